"""Calls of torch as kernels that a driver offers for its cards: launched on every card, and not a byte by the host.

Torch calls an op on stored arrays, whose dims are cut over the mesh as their layouts say. Each rule here says what
every card does on its shard then, how the result lies, and over which axes the shards have to be summed: a product over
a dim that both operands have cut in the same way is a product on each card and a sum over their links. The driver is
asked for a kernel by the name of the op; where it has none, or no rule fits, the call goes through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from meshloom.collectives.schedule import Schedule
from meshloom.engines import private
from meshloom.placement import Placement, Replicate, Shard, Topology
from meshloom.runtime.card import Kernel, Part
from meshloom.runtime.card_array import CardArray
from meshloom.runtime.card_layouts import Placed, placed, shift, strip
from meshloom.runtime.card_links import plan_sum, run_sum
from meshloom.runtime.card_memory import CardStore, Memory, Shards
from meshloom.types import Shape, numel

_aten: Any = torch.ops.aten
Axes = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """An array that lies on the cards as a topology says; turned if it is the transpose of what lies there."""

    shards: Shards
    topology: Topology
    is_turned: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the cards know it by the shape that it has here: dims of size 1 in front may differ."""
        return self.is_turned or self.shards.part_shape == self.topology.local_shape

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The mesh axes that cut each dim."""
        return self.topology.axes_of


@dataclass(frozen=True)
class Step:
    """One kernel on every card, and the axes over which its result is summed."""

    op: str
    operands: tuple[Operand, ...]
    result: Topology
    args: Mapping[str, Any] = field(default_factory=dict)
    summed: Axes = ()


def prepare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What runs a call on the cards alone; None where the driver offers no kernel that fits."""
    store = _store_of(args)
    if store is None or store.fluent is None:
        return None
    rule = RULES.get(func)
    if rule is None:
        return _prepare_several(func, args, kwargs)
    step = rule(*args, **kwargs)
    ready = None if step is None else _make_ready(step, store)
    if ready is None:
        return None
    return partial(_write, args[0], ready) if func._schema.is_mutable else ready.make


def _write(target: CardArray, ready: Ready) -> CardArray:
    target.memory.give(ready.compute())
    return target


def _store_of(args: Sequence[Any]) -> CardStore | None:
    for each in private.tree_flatten(args)[0]:
        if isinstance(each, CardArray):
            return each.memory.store
    return None


@dataclass(frozen=True)
class Ready:
    """A step with all that it needs: its kernel, one for each operand that has to be turned, the sums over links."""

    step: Step
    store: CardStore
    kernel: Kernel
    turns: tuple[Kernel | None, ...]
    schedules: Sequence[Schedule]

    def make(self) -> CardArray:
        """The result as an array."""
        memory = Memory(self.store, self.step.operands[0].shards.dtype)
        memory.give(self.compute())
        twin = torch.empty(self.step.result.stored_shape, dtype=memory.dtype, device="meta")
        return CardArray(memory, twin, any(each.shards.is_meta for each in self.step.operands))

    def compute(self) -> Shards:
        """The result on the cards."""
        step = self.step
        operands = [
            each.shards if turn is None else self._launch("transpose", turn, [each.shards], each.topology, TURN)
            for each, turn in zip(step.operands, self.turns, strict=True)
        ]
        made = self._launch(step.op, self.kernel, operands, step.result, step.args)
        if self.schedules and made.handles:
            run_sum(self.store, made, self.schedules)
        return made

    def _launch(
        self, op: str, kernel: Kernel, operands: Sequence[Shards], result: Topology, args: Mapping[str, Any]
    ) -> Shards:
        layout, dtype = placed(result), operands[0].dtype
        if any(each.is_meta for each in operands):
            return Shards(self.store, layout, dtype, {}, None)
        made = self.store.allocate(layout, dtype)
        if made.part_bytes:
            self.store.launch(op, kernel, [*operands, made], args)
        return made


TURN = {"dim0": 0, "dim1": 1}


def _make_ready(step: Step, store: CardStore) -> Ready | None:
    """A step with kernels of the driver; None if there is none for it, no links for its sum, or nothing to read."""
    parts, turns = [], []
    if any(not each.shards.part_bytes for each in step.operands):
        return None
    for operand in step.operands:
        held = Part(operand.shards.part_shape, operand.shards.dtype)
        turned = Part(placed(operand.topology).part_shape, held.dtype)
        turn = _kernel("transpose", [held], turned, TURN, store) if operand.is_turned else None
        if operand.is_turned and turn is None:
            return None
        turns.append(turn)
        parts.append(turned if operand.is_turned else held)
    result = Part(placed(step.result).part_shape, parts[0].dtype)
    kernel = _kernel(step.op, parts, result, step.args, store)
    size = numel(result.shape) * result.dtype.itemsize
    schedules = plan_sum(store, step.result.mesh, step.summed, size) if step.summed else ()
    if kernel is None or schedules is None:
        return None
    return Ready(step, store, kernel, tuple(turns), schedules)


def _kernel(
    op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any], store: CardStore
) -> Kernel | None:
    assert store.fluent is not None
    return store.fluent.kernel_of(op, operands, result, args)


# Operands


def _read(array: Any) -> Operand | None:
    """An array as a kernel can have it: whole, on the cards, as a topology says; or the transpose of a matrix."""
    if not isinstance(array, CardArray):
        return None
    shards = array.memory.shards
    if shards is None or not isinstance(shards.layout, Placed) or shards.layout.topology.partial_axes:
        return None
    topology = shards.layout.topology
    if array.is_whole() and strip(array.shape) == strip(topology.stored_shape):
        return Operand(shards, shift(topology, array.dim() - topology.ndim))
    if _is_transpose(array, topology):
        turned = _place(topology, topology.axes_of[::-1], topology.shape[::-1])
        return Operand(shards, turned, is_turned=True)
    return None


def _is_transpose(array: CardArray, topology: Topology) -> bool:
    twin = array.twin
    return (
        twin.dim() == 2
        and twin.dtype == array.memory.dtype
        and twin.numel() == numel(topology.stored_shape)
        and twin.t().is_contiguous()
        and tuple(twin.shape) == topology.stored_shape[::-1]
    )


def _place(like: Topology, axes: Sequence[Axes], shape: Shape) -> Topology:
    """A topology on the same mesh whose dims these axes cut."""
    placements: list[Placement] = [Replicate()] * like.mesh.ndim
    for dim, cut in enumerate(axes):
        for axis in cut:
            placements[axis] = Shard(dim)
    return Topology(like.mesh, tuple(placements), tuple(shape), like.dtype)


# Rules


def _contract(a: Any, b: Any) -> Step | None:
    """A product of matrices: rows and columns stay cut as they are, a dim that both have cut alike is summed over."""
    left, right = _read(a), _read(b)
    if left is None or right is None or left.shards.dtype != right.shards.dtype:
        return None
    if not (left.is_exact and right.is_exact):
        return None
    (rows, inner), (also_inner, columns) = left.axes, right.axes
    (m, k), (also_k, n) = left.topology.shape, right.topology.shape
    if inner != also_inner or k != also_k or set(rows) & set(columns):
        return None
    return Step("matmul", (left, right), _place(left.topology, (rows, columns), (m, n)), {}, inner)


def _pointwise(name: str, scalars: Sequence[str]) -> Callable[..., Step | None]:
    """An op by element: operands that lie alike, or are broadcast within every card."""

    def rule(*args: Any, **kwargs: Any) -> Step | None:
        arrays = [each for each in args if isinstance(each, torch.Tensor)]
        operands = [_read(each) for each in arrays]
        numbers = dict(zip(scalars, [each for each in args if not isinstance(each, torch.Tensor)], strict=False))
        given = {key: value for key, value in {**numbers, **kwargs}.items() if _DEFAULTS.get(key) != value}
        known = [each for each in operands if each is not None]
        if not known or len(known) != len(operands) or len({each.shards.dtype for each in known}) > 1:
            return None
        first = known[0].topology
        if not all(_goes_into(each.topology, first) for each in known[1:]):
            return None
        return Step(name, tuple(known), first, given)

    return rule


_DEFAULTS = {"alpha": 1, "threshold": 0}


def _goes_into(other: Topology, target: Topology) -> bool:
    """Whether one array is broadcast to another on every card by itself."""
    if other.ndim > target.ndim:
        return False
    lead = target.ndim - other.ndim
    return all(
        (size == target.shape[lead + dim] and other.axes_of[dim] == target.axes_of[lead + dim])
        or (size == 1 and not other.axes_of[dim])
        for dim, size in enumerate(other.shape)
    )


def _reduce(
    array: Any, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Step | None:
    """A sum over dims, and over the axes that cut them."""
    operand = _read(array)
    if operand is None or operand.is_turned or dtype not in (None, operand.shards.dtype):
        return None
    if not operand.is_exact or not operand.shards.dtype.is_floating_point:
        return None
    topology = operand.topology
    gone = sorted({dim % topology.ndim for dim in dims}) if dims else list(range(topology.ndim))
    kept = [dim for dim in range(topology.ndim) if keepdim or dim not in gone]
    axes = [() if dim in gone else topology.axes_of[dim] for dim in kept]
    shape = [1 if dim in gone else topology.shape[dim] for dim in kept]
    summed = tuple(sorted(axis for dim in gone for axis in topology.axes_of[dim]))
    result = _place(topology, axes, tuple(shape))
    return Step("sum", (operand,), result, {"dim": tuple(gone)}, summed)


def _in_place(rule: Callable[..., Step | None]) -> Callable[..., Step | None]:
    """The rule of an op whose result takes the place of its first operand, which must be all of its memory."""

    def written(target: Any, *args: Any, **kwargs: Any) -> Step | None:
        operand = _read(target)
        if operand is None or operand.is_turned or operand.shards.is_borrowed:
            return None
        step = rule(target, *args, **kwargs)
        return step if step is not None and placed(step.result) == operand.shards.layout else None

    return written


def _copy(array: Any, memory_format: Any = None) -> Step | None:
    """A copy of a transpose, in the order of its own elements."""
    operand = _read(array)
    if operand is None or not operand.is_turned or memory_format is not torch.contiguous_format:
        return None
    straight = Operand(operand.shards, operand.topology)
    return Step("transpose", (straight,), operand.topology, TURN)


_UNARY = "relu neg exp log sqrt rsqrt reciprocal abs tanh sigmoid sin cos silu".split()
_BINARY = {"add": ("alpha",), "sub": ("alpha",), "mul": (), "div": ()}
_BACKWARD = {"threshold_backward": ("threshold",), "tanh_backward": (), "sigmoid_backward": ()}

RULES: dict[Any, Callable[..., Step | None]] = {
    _aten.mm.default: _contract,
    _aten.sum.dim_IntList: _reduce,
    _aten.sum.default: _reduce,
    _aten.clone.default: _copy,
    **{getattr(_aten, name).default: _pointwise(name, ()) for name in _UNARY},
    **{getattr(_aten, f"{name}_").default: _in_place(_pointwise(name, ())) for name in _UNARY},
    **{getattr(_aten, name).Tensor: _pointwise(name, ("other", *more)) for name, more in _BINARY.items()},
    **{
        getattr(_aten, f"{name}_").Tensor: _in_place(_pointwise(name, ("other", *more)))
        for name, more in _BINARY.items()
    },
    **{getattr(_aten, name).default: _pointwise(name, more) for name, more in _BACKWARD.items()},
}


# Calls that are several


def _prepare_several(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A call that is made of others: a product with a bias, or one of the functions for lists of an optimizer."""
    if func is _aten.addmm.default:
        return _prepare_addmm(*args, **kwargs)
    single = LISTS.get(func)
    if single is None:
        return None
    lists = [each for each in args if isinstance(each, (list, tuple))]
    rest = [each for each in args if not isinstance(each, (list, tuple))]

    def run() -> list[Any] | None:
        found = [single(*items, *rest, **kwargs) for items in zip(*lists, strict=True)]
        return None if func._schema.is_mutable else found

    return run


def _prepare_addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Callable[[], Any] | None:
    product = prepare(_aten.mm.default, (a, b), {}) if beta == 1 and alpha == 1 else None
    return None if product is None else lambda: _aten.add.Tensor(product(), bias)


LISTS: dict[Any, Any] = {
    _aten._foreach_add_.List: _aten.add_.Tensor,
    _aten._foreach_add.List: _aten.add.Tensor,
    _aten._foreach_sub_.List: _aten.sub_.Tensor,
    _aten._foreach_mul_.List: _aten.mul_.Tensor,
    _aten._foreach_mul.List: _aten.mul.Tensor,
    _aten._foreach_mul_.Scalar: _aten.mul_.Tensor,
    _aten._foreach_mul.Scalar: _aten.mul.Tensor,
    _aten._foreach_neg.default: _aten.neg.default,
}
