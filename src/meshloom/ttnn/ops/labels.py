"""The label of an op's result, from the labels of its operands and what was done to their dims.

A label says how the parts that devices hold make up the result of the same op on wholes. A dim that an op puts
elsewhere takes its placement along; one that it sums over leaves partial sums; one along which every device works
alone (softmax, sort, cumsum over a sharded dim) is labelled as before: the whole is what stands side by side. Where
parts differ and no whole can be told from them (gelu of partial sums, S(0) times S(1) on one axis, a size-1 dim of a
shard that was broadcast) the label is `UNKNOWN`: composing asks for a composer, and a collective still does what it
says.

Axes are those of the distribution shape if all operands have the same one, else those of the mesh: a distribution over
[8] on a mesh of 2x4 is one over both axes. Results are kept: operands with labels and shapes that were seen before cost
one look-up, and get the very object that they got before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import (
    REPLICATE,
    Placement,
    PlacementPartial,
    PlacementReplicate,
    PlacementShard,
    TensorTopology as Label,
)

Axes = tuple[Placement, ...]

UNKNOWN = PlacementPartial("unknown")  # parts differ along the axis, and no whole can be told from them
TERMS = ("sum", "mean")  # what linear functions keep: f(a) + f(b) = f(a + b), and so for the mean
KEPT = 4096  # results that are kept at most

_kept: dict[tuple[Any, ...], tuple[tuple[Label, ...], Label]] = {}


def _remembered(key: tuple[Any, ...], tensors: Sequence[Tensor], find: Callable[[], Label]) -> Label:
    """A label found once for operands with the same label objects, which live as long as their entry: ids are safe."""
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= KEPT:
            _kept.clear()
        found = _kept[key] = (tuple(tensor._topology for tensor in tensors), find())
    return found[1]


@functools.cache
def replicated(grid: tuple[int, ...]) -> Label:
    """The label of what all devices of a mesh hold alike, over [N]: that of a tensor put there without a mapper.

    >>> replicated((2, 4)).distribution_shape(), replicated((2, 4)).placements()
    (MeshShape([8]), [PlacementReplicate()])
    """
    places = list(itertools.product(*map(range, grid)))
    return Label([len(places)], [REPLICATE], places)


def by_axis(tensor: Tensor) -> Axes | None:
    """What every axis of the mesh does, dims counted from the front; None if the label is about something else."""
    label, grid = tensor.tensor_topology(), tensor.grid
    shape, placements = tuple(label.distribution_shape()), tuple(label.placements())
    if shape != grid and not (len(shape) == 1 and shape[0] in (1, math.prod(grid))):
        if all(isinstance(p, PlacementReplicate) for p in placements):
            return (REPLICATE,) * len(grid)
        return None
    return _front(placements if shape == grid else placements * len(grid), len(tensor.shape))


def _front(placements: Sequence[Placement], rank: int) -> Axes:
    return tuple(p.at(p.dim % rank) if isinstance(p, PlacementShard) and rank else p for p in placements)


def labelled(axes: Axes, like: Tensor) -> Label:
    """The label for what every axis does, in the form of an operand's label where that can say it."""
    label, grid = like.tensor_topology(), like.grid
    if len(label.distribution_shape()) == 1 and len(set(axes)) == 1:
        return Label(label.distribution_shape(), axes[:1], label.mesh_coords())
    return Label(grid, axes, [tuple(place) for place in like._places()])


class Frame:
    """The axes that the labels of some operands are about: their sizes, and what each operand has on them."""

    __slots__ = ("axes", "like", "sizes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        told = [tensor for tensor in tensors if not is_replicated(tensor)] or [tensors[0]]
        self.like = told[0]
        first = self.like.tensor_topology()
        if all(each.tensor_topology().distribution_shape() == first.distribution_shape() for each in told):
            self.sizes = tuple(first.distribution_shape())
            rows = [
                _front(each.tensor_topology().placements(), len(each.shape))
                if any(each is one for one in told)
                else (REPLICATE,) * len(self.sizes)
                for each in tensors
            ]
        else:
            self.sizes = self.like.grid
            rows = [by_axis(each) or (UNKNOWN,) * len(self.sizes) for each in tensors]
        self.axes = rows

    def label(self, axes: Sequence[Placement]) -> Label:
        """The label of a result, in the form of the first operand that is not the same everywhere."""
        label = self.like.tensor_topology()
        told = tuple(  # an axis of one device has no terms
            REPLICATE if size == 1 and isinstance(each, PlacementPartial) else each
            for each, size in zip(axes, self.sizes, strict=True)
        )
        if self.sizes == tuple(label.distribution_shape()):
            # Placements are equal whatever the size of a padded dim, and labels are not: their text tells sizes too.
            return label if str(told) == str(tuple(label.placements())) else label.with_placements(told)
        return labelled(told, self.like)


def is_replicated(tensor: Tensor) -> bool:
    """Whether its label says that all devices hold the same."""
    return all(isinstance(each, PlacementReplicate) for each in tensor.tensor_topology()._placements)


def merged(
    tensors: Sequence[Tensor],
    rank: int,
    moved: Callable[[Tensor, int], int | None] | None = None,
    keeps: str = "",
) -> Label:
    """Of an op that works element by element: dims are aligned at the end, and what one operand shards is sharded.

    `keeps` says what it does to partial sums: "sum" for a + b and what is linear in all operands at once, "product" for
    a * b with one partial operand, "quotient" for a / b with the first. What is not told is not linear.
    """
    first = tensors[0]
    if moved is None:
        label = first._topology
        if _whole.get(id(label)) is label and _are_alike(tensors, rank):
            return label
        shapes = tuple(tensor.shape for tensor in tensors)
        key = ("merged", rank, keeps, first._grid, shapes, *(id(tensor._topology) for tensor in tensors))
        if not any(isinstance(each, PlacementPartial) for each in label._placements):
            _note_whole(label)
        return _remembered(key, tensors, lambda: _merged(tensors, rank, None, keeps))
    return _merged(tensors, rank, moved, keeps)


_whole: dict[int, Label] = {}  # labels without terms, by identity: what is done element by element leaves them alone


def _note_whole(label: Label) -> None:
    if len(_whole) >= KEPT:
        _whole.clear()
    _whole[id(label)] = label


def _are_alike(tensors: Sequence[Tensor], rank: int) -> bool:
    """Whether they have one label object and one shape of that rank, so that nothing is broadcast."""
    label, block = tensors[0]._topology, tensors[0]._block
    for each in tensors:  # no generator: this is on the way of every op
        if each._topology is not label or each._block is None or block is None or each._block.shape != block.shape:
            return False
    return block is not None and block.dim() - len(tensors[0]._grid) == rank


def _merged(
    tensors: Sequence[Tensor], rank: int, moved: Callable[[Tensor, int], int | None] | None, keeps: str
) -> Label:
    frame = Frame(tensors)
    sizes = [1] * rank
    for tensor in tensors:
        for dim, size in enumerate(tensor.shape, rank - len(tensor.shape)):
            if moved is None and size != 1:
                sizes[dim] = size

    def placed(tensor: Tensor, placement: Placement) -> Placement:
        if not isinstance(placement, PlacementShard):
            return placement
        if moved is not None:
            dim = moved(tensor, placement.dim)
            return REPLICATE if dim is None else placement.at(dim)
        dim = placement.dim + rank - len(tensor.shape)
        return UNKNOWN if tensor.shape[placement.dim] != sizes[dim] else placement.at(dim)  # it was broadcast

    rows = [[placed(tensor, p) for p in row] for tensor, row in zip(tensors, frame.axes, strict=True)]
    clash = clashing(rows)
    return frame.label(
        [UNKNOWN if axis in clash else _joined(column, keeps) for axis, column in enumerate(zip(*rows, strict=True))]
    )


def clashing(rows: Sequence[Sequence[Placement | None]]) -> set[int]:
    """Axes that cut a dim of one operand where others cut it along further ones. None is a dim that is summed over.

    Halves of x along one axis with halves of y along another: x0 + y0, x0 + y1, x1 + y0, x1 + y1 are no x + y.

    >>> clashing([[PlacementShard(0), REPLICATE], [REPLICATE, PlacementShard(0)]])
    {0, 1}
    >>> clashing([[PlacementShard(0), REPLICATE], [PlacementShard(0), PlacementShard(1)]])
    set()
    """
    found: set[int] = set()
    for dim in {_cut_dim(each) for row in rows for each in row} - {""}:
        sets = [{axis for axis, each in enumerate(row) if _cut_dim(each) == dim} for row in rows]
        cutting = [axes for axes in sets if axes]
        found |= {axis for axes in cutting for axis in axes if any(axis not in each for each in cutting)}
    return found


def _cut_dim(placement: Placement | None) -> int | str | None:
    """The dim that is cut, None for the one that is summed over, empty for none."""
    return placement.dim if isinstance(placement, PlacementShard) else None if placement is None else ""


def _joined(column: Sequence[Placement], keeps: str) -> Placement:
    """What comes of what the operands have on one axis."""
    shards = {each for each in column if isinstance(each, PlacementShard)}
    terms = [each for each in column if isinstance(each, PlacementPartial)]
    if not terms:
        return UNKNOWN if len(shards) > 1 else next(iter(shards), REPLICATE)
    if shards or len(set(terms)) > 1 or terms[0].op not in TERMS:
        return UNKNOWN
    fits = {
        "sum": len(terms) == len(column),
        "product": len(terms) == 1,
        "quotient": len(terms) == 1 and isinstance(column[0], PlacementPartial),
    }
    return terms[0] if fits.get(keeps, False) else UNKNOWN


def reduced(tensor: Tensor, dims: Sequence[int], keepdim: bool, op: str | None, clean: bool = False) -> Label:
    """Of a reduction over some dims: over a sharded one it leaves terms of `op`; the others are numbered anew.

    It is `clean` if padding at the end of an uneven dim was left out (`padding.filled`).
    """
    rank = len(tensor.shape)
    gone = tuple(sorted({dim % rank for dim in dims})) if rank else ()
    key = ("reduced", gone, keepdim, op, clean, rank, tensor._grid, id(tensor._topology))
    return _remembered(key, (tensor,), lambda: _reduced(tensor, gone, keepdim, op, clean))


def _reduced(tensor: Tensor, gone: Sequence[int], keepdim: bool, op: str | None, clean: bool) -> Label:
    def after(placement: Placement) -> Placement:
        if isinstance(placement, PlacementPartial):
            return placement if op is not None and {op, placement.op} <= _LIKE.get(op, {op}) else UNKNOWN
        if not isinstance(placement, PlacementShard):
            return placement
        if placement.dim in gone:  # of a padded dim, means of parts have other weights
            told = placement.size is None or (clean and op != "mean")
            return PlacementPartial(op) if op is not None and told else UNKNOWN
        return placement if keepdim else placement.at(placement.dim - sum(dim < placement.dim for dim in gone))

    frame = Frame([tensor])
    return frame.label([after(each) for each in frame.axes[0]])


_LIKE = {"sum": set(TERMS), "mean": set(TERMS)}  # a sum of means is the mean of sums


def moved(tensor: Tensor, places: Mapping[int, int]) -> Label:
    """Of an op that puts dims elsewhere: where each dim is now; parts of a sharded dim that is gone make no whole."""
    key = ("moved", tuple(places.items()), len(tensor.shape), tensor._grid, id(tensor._topology))
    return _remembered(key, (tensor,), lambda: _moved(tensor, places))


def _moved(tensor: Tensor, places: Mapping[int, int]) -> Label:
    def after(placement: Placement) -> Placement:
        if not isinstance(placement, PlacementShard):
            return placement
        return placement.at(places[placement.dim]) if placement.dim in places else UNKNOWN

    frame = Frame([tensor])
    return frame.label([after(each) for each in frame.axes[0]])


def contracted(a: Tensor, b: Tensor, a_inner: int, b_inner: int, rank: int) -> Label:
    """Of a product of matrices summed over one dim of each: an axis that cuts it leaves partial sums."""
    key = ("matmul", a_inner, b_inner, rank, a._grid, a.shape, b.shape, id(a._topology), id(b._topology))
    return _remembered(key, (a, b), lambda: _contracted(a, b, a_inner, b_inner, rank))


def _contracted(a: Tensor, b: Tensor, a_inner: int, b_inner: int, rank: int) -> Label:
    frame = Frame([a, b])
    inner = (a_inner % len(a.shape), b_inner % len(b.shape))
    outer = (rank - 2 if len(b.shape) > 1 else rank - 1, rank - 1)  # where the other dim of each matrix goes
    sizes = [1] * rank
    for tensor in (a, b):
        for dim, size in enumerate(tensor.shape[:-2], rank - len(tensor.shape)):
            sizes[dim] = max(sizes[dim], size)

    def placed(number: int, tensor: Tensor, placement: Placement) -> Placement | None:
        """Its placement in the result; None where it is summed over."""
        if not isinstance(placement, PlacementShard):
            return placement
        if placement.dim == inner[number]:
            return None
        if placement.dim >= len(tensor.shape) - 2:
            return placement.at(outer[number])
        dim = placement.dim + rank - len(tensor.shape)
        return placement.at(dim) if tensor.shape[placement.dim] == sizes[dim] else UNKNOWN

    rows = [[placed(n, t, p) for p in row] for n, (t, row) in enumerate(zip((a, b), frame.axes, strict=True))]
    clash = clashing(rows)
    pairs = enumerate(zip(*rows, strict=True))
    return frame.label([UNKNOWN if axis in clash else _multiplied(p, q) for axis, (p, q) in pairs])


def _multiplied(p: Placement | None, q: Placement | None) -> Placement:
    if p is not None and q is not None:
        return _joined((p, q), "product")
    other = p if q is None else q
    return PlacementPartial() if other is None or isinstance(other, PlacementReplicate) else UNKNOWN
