"""The topology of an op's result: `ops.follow` on the placements of its operands, in TTNN's spelling.

An op that is a native one names it (`topology_of("sum", x, dim=(0,), keepdim=False)`), and its rule in the op table
says what becomes of placements. What only TTNN has says it in rows of the same kind: `rows("S(2), R -> S(1)")`, or
`moves((0, 2, 1))` where dims go elsewhere. Rules are asked about the parts that devices hold, not about wholes.

TTNN's own are the axes: those of the distribution shape if all operands have the same one, else those of the mesh, for
a distribution over [8] on a mesh of 2x4 is one over both axes; and the size of a dim whose end is padding, which goes
along with the dim. Results are kept: operands seen before cost one look-up and get the object that they got before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from meshloom.mesh import Mesh
from meshloom.ops import ALIASES, OPS, Call, Ref, Row, find
from meshloom.ops.binding import bind
from meshloom.ops.follow import ANYTHING, EXACT, Known, choices_alone, follow
from meshloom.ops.labels import contraction_rows, labels, pointwise
from meshloom.ops.rule import Rule
from meshloom.ops.shapes import partials
from meshloom.placement import Partial, Replicate, Shard, Topology, read_placements
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import (
    REPLICATE,
    UNKNOWN,
    Placement,
    PlacementPartial,
    PlacementReplicate,
    PlacementShard,
    TensorTopology,
)

Rows = tuple[Row, ...]

EACH = pointwise()  # every element by itself, or every device its own chunk: no terms are kept
LINEAR = pointwise("P(sum) -> P(sum)")
Named = str | Rule  # a line of the op table, or a rule that is none
KEPT = 4096  # results that are kept at most

_kept: dict[tuple[Any, ...], tuple[TensorTopology, Any]] = {}  # with the rows whose id is in the key
_ALONE = Mesh(device=1)  # a rule is asked about what one device holds
_NAMES = ("input", "other", "bias")  # what a rule that is no line of the table calls its operands


def topology_of(
    rule: str | Rule | Rows,
    *operands: Any,
    shape: Sequence[int] | None = None,
    scales: bool = False,
    filled: bool = False,
    **arguments: Any,
) -> TensorTopology:
    """The topology of what an op makes of operands; numbers among them count for the rules that look at them.

    `shape` is that of a part of the result if rows are given, and not that of the first operand's. It `scales` if a dim
    that grows does so element by element, in order: padding at its end then stays at the end. Padding was `filled` if
    what is summed over changes no sum.
    """
    key: list[Any] = [id(rule) if rule.__class__ is tuple else rule, filled]  # the entry keeps it: no other has its id
    for each in operands:
        if isinstance(each, Tensor):
            key += (each._topology, each._grid, each._block.shape if each._block is not None else None)
        else:
            key.append(each if type(each) is int else None)  # a dim; whatever a factor is, terms stay terms
    if arguments or shape is not None:
        key += (shape, scales, *arguments.items())
    known = tuple(key)
    found = _kept.get(known)
    if found is None:
        return _keep(known, _find(rule, operands, shape, scales, filled, arguments), rule)
    return found[0]


def _keep(key: tuple[Any, ...], found: TensorTopology, rule: str | Rule | Rows | None = None) -> TensorTopology:
    if len(_kept) >= KEPT:
        _kept.clear()
    _kept[key] = found, rule
    return found


def _find(
    rule: str | Rule | Rows,
    operands: Sequence[Any],
    shape: Sequence[int] | None,
    scales: bool,
    filled: bool,
    arguments: dict[str, Any],
) -> TensorTopology:
    tensors = [each for each in operands if isinstance(each, Tensor)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if isinstance(rule, tuple):
        found, size = rule, shapes[0] if shape is None else tuple(shape)
    else:
        choices = choices_alone(find(rule).rule if isinstance(rule, str) else rule, _call(rule, operands, arguments))
        found, size = choices.rows, choices.shapes[0]
    frame = Frame(tensors)
    made = follow(found, frame.axes, shapes)
    columns = zip(*frame.axes, strict=True)
    return frame.topology(
        [_spell(each, column, shapes, size, scales, filled) for each, column in zip(made, columns, strict=True)]
    )


def _call(rule: str | Rule, operands: Sequence[Any], arguments: dict[str, Any]) -> Call:
    """The call of a rule on the parts of a device."""
    tensors = [each for each in operands if isinstance(each, Tensor)]
    numbers = itertools.count()
    leaves = tuple(Ref(next(numbers)) if isinstance(each, Tensor) else each for each in operands)
    parts = tuple(Topology(_ALONE, (Replicate(),), tuple(each.shape), "f32") for each in tensors)
    if isinstance(rule, str):
        op = find(rule)
        return Call(op.name, parts, bind(op, leaves, arguments), () if op.signature else leaves)
    return Call("", parts, dict(zip(_NAMES, leaves, strict=False)), leaves)


def _spell(
    found: Known, column: Sequence[Placement], shapes: Sequence[tuple[int, ...]], size: Any, scales: bool, filled: bool
) -> Placement:
    """A placement of the result, with the size of a dim whose end is padding: that of the first operand that is cut."""
    pairs = zip(column, shapes, strict=True)
    cut, had = next(((p, shape) for p, shape in pairs if isinstance(p, PlacementShard)), (PlacementShard(0), (0,)))
    if isinstance(found, Shard):
        return scale_cut(cut, found.dim, had[cut.dim], size[found.dim], scales)
    if isinstance(found, Partial):
        is_told = cut.size is None or (filled and found.op != "mean")  # of a padded dim, means have other weights
        return PlacementPartial(found.op) if is_told else UNKNOWN
    return UNKNOWN if found is None else REPLICATE


def scale_cut(placement: PlacementShard, dim: int, had: int, has: int, scales: bool) -> Placement:
    """The cut of a dim whose parts were of one size and are of another: a padded end goes along with a reshape if it is
    whole rows of the result; otherwise padding has got between the elements, and there is no global tensor.

    >>> scale_cut(PlacementShard(0, size=6), 1, 4, 2, True), scale_cut(PlacementShard(0, size=7), 1, 4, 2, True)
    (PlacementShard(1, size=3), PlacementPartial('unknown'))
    """
    if placement.size is None or had == has:
        return placement.at(dim)
    scaled, rest = divmod(placement.size * has, had)
    return PlacementShard(dim, scaled) if scales and not rest else UNKNOWN


def without_terms(topology: TensorTopology) -> TensorTopology:
    """The topology after a function that is not linear: terms make no whole any more."""
    return topology.with_placements([UNKNOWN if isinstance(p, Partial) else p for p in topology.placements()])


def rule_of(name: str) -> Named:
    """The native op of a name, if it takes its operands element by element; else a rule that keeps no terms."""
    op = OPS.get(ALIASES.get(name, name))
    return op.name if op is not None and op.signature is None else EACH


# rows of what only TTNN has


@functools.cache
def rows(*texts: str, exact: bool = False) -> Rows:
    """Rows from their text, in which `*` is an operand that does not matter; if `exact`, R is no shard.

    >>> rows("S(0), R -> S(1)", "P(sum), R -> P(sum)")[0].outs
    (Shard(dim=1),)
    """
    sides = ([side.strip() for side in text.split("->")] for text in texts)
    return tuple(
        Row(EXACT if exact else "", tuple(map(_read, left.split(", "))), (_read(right),)) for left, right in sides
    )


def _read(text: str) -> Any:
    return ANYTHING if text == "*" else UNKNOWN if text == "P(unknown)" else read_placements(text)[0]


@functools.cache
def einsum(text: str, *linear: int) -> Rows:
    """Rows from labels, of which a dot is a dim that is not cut; in the `linear` operands sums stay sums.

    >>> [str(row) for row in einsum("bs, .h -> bsh", 1)]
    ['S(0), R -> S(0)', 'S(1), R -> S(1)', 'R, S(1) -> S(2)', 'R, P(sum) -> P(sum) if whole']
    """
    left, output = text.replace(" ", "").split("->")
    inputs = left.split(",")
    found = contraction_rows(inputs, output, range(len(inputs)), len(inputs))
    sums = found[len(found) - len(inputs) :]
    return (*(row for row in found[: -len(inputs)] if row.label != "."), *(sums[number] for number in linear))


@functools.cache
def moves(*places: tuple[int | None, ...], linear: bool = True) -> Rows:
    """Rows of an op that puts the dims of operands elsewhere: the dim of the result, or None if it is gone."""
    found: list[Row] = []
    alike: list[Any] = [Replicate()]
    for dim in sorted({place for each in places for place in each if place is not None}):
        cuts = [[Shard(at) for at, place in enumerate(each) if place == dim] or alike for each in places]
        found += [Row("", cut, (Shard(dim),)) for cut in itertools.product(*cuts)]
    return (*found, *(partials(len(places)) if linear else ()))


def same(tensor: Tensor, shift: int = 0) -> tuple[int, ...]:
    """Places of dims that stay, or that all move by as much."""
    return tuple(range(shift, len(tensor.shape) + shift))


@functools.cache
def contraction(text: str) -> Rule:
    """The rule of a product of matrices, from its labels; a third operand is added to it."""
    plain, added = labels(text, "input", "other"), labels(text, "input", "other", bias="bias")
    return lambda call: added(call) if call.has("bias") else plain(call)


# shapes


def topology_of_reshape(tensor: Tensor, shape: Sequence[int], known: dict[int, int] | None = None) -> TensorTopology:
    """Of a reshape of parts. The devices of an axis that cuts dim d come after all elements before d, so any dim of the
    result with as many elements before it can be the one that is cut:

    [4, 6, 5] cut at 6, as [4, 3, 10]: 4 elements are before dim 1 of both, so the whole is cut at the 3.
    [4, 6, 5] cut at 6, as [24, 5]: no dim has 4 elements before it.
    """
    key = ("reshape", tensor._topology, tensor._grid, tuple(tensor.shape), tuple(shape), *(known or {}).items())
    found = _kept.get(key)
    if found is not None:
        return found[0]
    had, has = tuple(tensor.shape), tuple(shape)
    places = tuple((known or {}).get(dim, place_in(had, dim, has)) for dim in range(len(had)))
    in_order = _are_in_order([each.dim for each in Frame([tensor]).axes[0] if isinstance(each, Shard)], places)
    kept = moves(places if in_order else (None,) * len(had))
    return _keep(key, topology_of(kept, tensor, shape=has, scales=True))


def place_in(had: tuple[int, ...], dim: int, shape: tuple[int, ...]) -> int | None:
    """The dim of a reshaped tensor that is cut when this one was.

    >>> place_in((4, 6, 5), 1, (4, 3, 10)), place_in((4, 6, 5), 1, (24, 5)), place_in((1, 8), 0, (1, 1, 1, 8))
    (1, None, 2)
    """
    before = math.prod(had[:dim])
    fitting = [place for place in range(len(shape)) if math.prod(shape[:place]) == before]
    from_end = dim - len(had) + len(shape)

    def preference(place: int) -> tuple[bool, bool, bool, bool]:
        like = shape[place] == had[dim]
        return (not (like and place == from_end), not (like and place == dim), not like, shape[place] == 1)

    return min(fitting, key=preference, default=None)


def _are_in_order(cut: Sequence[int], places: Sequence[int | None]) -> bool:
    """Whether dims that axes cut keep their order; two that fall together must be in the order of their axes."""
    for first, second in itertools.combinations(cut, 2):
        a, b = places[first], places[second]
        if first == second or a is None or b is None:
            continue
        if (first < second and a > b) or (first > second and a <= b):
            return False
    return True


# the axes that labels are about


@functools.cache
def replicated_topology(grid: tuple[int, ...]) -> TensorTopology:
    """The topology of what all devices of a mesh hold alike, over [N]: that of a tensor put there without a mapper.

    >>> replicated_topology((2, 4)).distribution_shape(), replicated_topology((2, 4)).placements()
    (MeshShape([8]), [PlacementReplicate()])
    """
    places = list(itertools.product(*map(range, grid)))
    return TensorTopology([len(places)], [REPLICATE], places)


def alike_topology(grid: tuple[int, ...]) -> TensorTopology:
    """The topology of what is made on the devices themselves, alike on all: over the axes of the mesh.

    >>> alike_topology((2, 4)).placements()
    [PlacementReplicate(), PlacementReplicate()]
    """
    return TensorTopology(grid, [REPLICATE] * len(grid), list(itertools.product(*map(range, grid))))


def by_axis(tensor: Tensor, grid: tuple[int, ...] | None = None) -> tuple[Placement, ...] | None:
    """What every axis of the mesh does, or of the part of it that the tensor lies on, dims counted from the front; None
    if the label is about something else."""
    label, grid = tensor._topology, grid or tensor._grid
    shape, placements = tuple(label._shape), label._placements
    if shape != grid and not (len(shape) == 1 and shape[0] in (1, math.prod(grid))):
        return (REPLICATE,) * len(grid) if _is_replicated(tensor) else None
    return _from_front(placements if shape == grid else placements * len(grid), len(tensor.shape))


def _from_front(placements: Sequence[Placement], rank: int) -> tuple[Placement, ...]:
    return tuple([p.at(p.dim % rank) if isinstance(p, PlacementShard) and p.dim < 0 < rank else p for p in placements])


def _is_replicated(tensor: Tensor) -> bool:
    return all(isinstance(each, PlacementReplicate) for each in tensor._topology._placements)


class Frame:
    """The axes that the labels of some operands are about: their sizes, and what each operand has on them."""

    __slots__ = ("axes", "like", "sizes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        told = [tensor for tensor in tensors if not _is_replicated(tensor)] or [tensors[0]]
        self.like = told[0]
        shape = self.like._topology._shape
        if all(each._topology._shape == shape for each in told):
            self.sizes = tuple(shape)
            alike = (REPLICATE,) * len(self.sizes)
            self.axes = [
                alike if _is_replicated(each) else _from_front(each._topology._placements, len(each.shape))
                for each in tensors
            ]
        else:
            self.sizes = self.like._grid
            self.axes = [by_axis(each) or (UNKNOWN,) * len(self.sizes) for each in tensors]

    def topology(self, axes: Sequence[Placement]) -> TensorTopology:
        """The topology of a result, in the form of the first operand that is not the same everywhere."""
        label, grid = self.like._topology, self.like._grid
        told = [  # an axis of one device has no terms
            REPLICATE if size == 1 and isinstance(each, PlacementPartial) else each
            for each, size in zip(axes, self.sizes, strict=True)
        ]
        if self.sizes == tuple(label._shape):
            return label.with_placements(told)
        if len(label._shape) == 1 and len(set(told)) == 1:
            return label.with_placements(told[:1])
        return TensorTopology(grid, told, list(itertools.product(*map(range, grid))))
