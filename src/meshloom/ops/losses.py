"""Rules of losses: over sharded classes small statistics are all-reduced, over a sharded batch the sum."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.dtypes import check_floating
from meshloom.ops.labels import SUM, R, broadcast, carried_placement, others
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, Rule, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import Shape, is_floating


def known_reduction(call: Call, *known: str) -> str:
    """How a loss is reduced, or an error that names the ways."""
    reduction = str(call.arguments["reduction"])
    if reduction not in known:
        ways = ", ".join(map(repr, known[:-1]))
        raise ArgumentError(f"reduction {reduction!r} is not known", fix=f"use {ways} or {known[-1]!r}")
    return reduction


def of_elements(*ways: str, floating: tuple[str, ...] = (), far: bool = False) -> Rule:
    """The rule of a loss of each element and its target: any dim may be sharded, a sum over it is partial.

    A dim over which one of the two is broadcast is not summed in parts: its padding would have a loss. So would padding
    of integers where the loss is zero only at a number that is `far`. Operands that must be `floating` are named.
    """
    known = ("none", *ways, "sum", "mean")

    def rule(call: Call) -> Choices:
        if floating:
            check_floating(call, *floating)
        reduction = known_reduction(call, *known)
        shapes = [topology.shape for topology in call.operands]
        shape = broadcast(shapes)
        both = (call.index("input"), call.index("target"))
        rows = []
        for dim in range(len(shape)):
            ins = tuple(carried_placement(each, shape, dim) for each in shapes)
            if reduction == "none":
                rows.append(Row(f"dim {dim}", ins, (Shard(dim),)))
            elif all(isinstance(ins[index], Shard) for index in both):
                rows.append(Row(f"dim {dim}", ins, (SUM,), even=_far_enough(call, dim, shape) if far else ()))
        return with_none(call, [shape if reduction == "none" else ()], rows, flops=4 * math.prod(shape))

    return rule


def _far_enough(call: Call, dim: int, shape: Shape) -> tuple[Even, ...]:
    place = call.index("input")
    own = dim - len(shape) + len(call.shape("input"))
    return () if is_floating(call.operands[place].dtype) else (Even(place, own, shape[dim]),)


def no_loss(
    input: float, target: float, when: Callable[[Call], bool] = lambda call: True
) -> Callable[[Call], tuple[Fill, ...]]:
    """Padding that has no loss and whose gradient is dropped."""

    def fill(call: Call) -> tuple[Fill, ...]:
        if not when(call) or not is_floating(call.operands[call.index("input")].dtype):
            return ()
        pairs = (("input", input), ("target", target))
        return tuple(Fill(call.index(name), value, tuple(range(len(call.shape(name))))) for name, value in pairs)

    return fill


def of_classes(*stats: str) -> Rule:
    """The rule of a loss of classes: sharded classes all-reduce `stats`, a sharded batch the sum and the weight.

    cross_entropy shares max, sum and the target's logit, nll_loss the target's logarithm alone.
    """
    return lambda call: _of_classes(call, stats)


def _of_classes(call: Call, stats: tuple[str, ...]) -> Choices:
    shape, target = call.shape("input"), call.shape("target")
    classes = 1 if len(shape) > 1 else 0
    by_index = not is_floating(call.operands[call.index("target")].dtype)
    expected = tuple(size for dim, size in enumerate(shape) if dim != classes) if by_index else shape
    if target != expected:
        raise ShapeError(f"{call.op} of {list(shape)} needs targets of {list(expected)} and got {list(target)}")
    reduction = known_reduction(call, "none", "sum", "mean")
    batch = others(len(shape), classes)
    out = tuple(shape[dim] for dim in batch) if reduction == "none" else ()
    rows = [_batch_row(call, dim, place, by_index, reduction) for place, dim in enumerate(batch)]
    rows.append(_class_row(call, classes, by_index, tuple(Inner(op, batch) for op in stats)))
    return with_none(call, [out], rows, flops=6 * math.prod(shape))


def _batch_row(call: Call, dim: int, place: int, by_index: bool, reduction: str) -> Row:
    ins: list[Placement] = [R] * len(call.operands)
    ins[call.index("input")] = Shard(dim)
    ins[call.index("target")] = Shard(place if by_index else dim)
    label = f"dim {dim}"
    if reduction == "none":
        return Row(label, tuple(ins), (Shard(place),))
    ignorable = by_index and call.operands[call.index("target")].dtype != "u8"  # no byte is the ignored -100
    even = () if ignorable else (Even(call.index("input"), dim, call.shape("input")[dim]),)
    if reduction == "sum":
        return Row(label, tuple(ins), (SUM,), even=even)
    return Row(label, tuple(ins), (R,), (Inner("sum", ()), Inner("sum", ())), even=even, local=False)


def _class_row(call: Call, classes: int, by_index: bool, stats: tuple[Inner, ...]) -> Row:
    ins: list[Placement] = [R] * len(call.operands)
    ins[call.index("input")] = Shard(classes)
    if not by_index:
        ins[call.index("target")] = Shard(classes)
    if call.has("weight"):
        ins[call.index("weight")] = Shard(0)
    exact = by_index and not call.arguments.get("label_smoothing")
    even = () if exact else (Even(call.index("input"), classes, call.shape("input")[classes]),)
    return Row(f"dim {classes}", tuple(ins), (R,), stats, even=even, local=False)


def cross_entropy_fill(call: Call) -> tuple[Fill, ...]:
    """Padded rows are ignored; padded classes are taken off."""
    target = call.operands[call.index("target")]
    if is_floating(target.dtype) or target.dtype == "u8":
        return ()
    return (Fill(call.index("target"), call.arguments["ignore_index"], tuple(range(target.ndim))),)
