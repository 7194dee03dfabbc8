"""Rules of losses: over sharded classes small statistics are all-reduced, over a sharded batch the sum."""

from __future__ import annotations

import math

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import SUM, R, others
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import is_floating


def cross_entropy(call: Call) -> Choices:
    """Over sharded classes max, sum and the target's logit are all-reduced; over a sharded batch, sum and weight."""
    shape, target = call.shape("input"), call.shape("target")
    classes = 1 if len(shape) > 1 else 0
    by_index = not is_floating(call.operands[call.index("target")].dtype)
    expected = tuple(size for dim, size in enumerate(shape) if dim != classes) if by_index else shape
    if target != expected:
        raise ShapeError(f"cross_entropy of {list(shape)} needs targets of {list(expected)} and got {list(target)}")
    reduction = call.arguments["reduction"]
    if reduction not in ("none", "sum", "mean"):
        raise ArgumentError(f"reduction {reduction!r} is not known", fix="use 'none', 'sum' or 'mean'")
    batch = others(len(shape), classes)
    out = tuple(shape[dim] for dim in batch) if reduction == "none" else ()
    rows = [_batch_row(call, dim, place, by_index, reduction) for place, dim in enumerate(batch)]
    rows.append(_class_row(call, classes, by_index, batch))
    return with_none(call, [out], rows, flops=6 * math.prod(shape))


def _batch_row(call: Call, dim: int, place: int, by_index: bool, reduction: str) -> Row:
    ins: list[Placement] = [R] * len(call.operands)
    ins[call.index("input")] = Shard(dim)
    ins[call.index("target")] = Shard(place if by_index else dim)
    label = f"dim {dim}"
    if reduction == "none":
        return Row(label, tuple(ins), (Shard(place),))
    even = () if by_index else (Even(call.index("input"), dim, call.shape("input")[dim]),)
    if reduction == "sum":
        return Row(label, tuple(ins), (SUM,), even=even)
    return Row(label, tuple(ins), (R,), (Inner("sum", ()), Inner("sum", ())), even=even, local=False)


def _class_row(call: Call, classes: int, by_index: bool, batch: tuple[int, ...]) -> Row:
    ins: list[Placement] = [R] * len(call.operands)
    ins[call.index("input")] = Shard(classes)
    if not by_index:
        ins[call.index("target")] = Shard(classes)
    if call.has("weight"):
        ins[call.index("weight")] = Shard(0)
    stats = tuple(Inner(op, batch) for op in ("max", "sum", "sum"))
    exact = by_index and not call.arguments["label_smoothing"]
    even = () if exact else (Even(call.index("input"), classes, call.shape("input")[classes]),)
    return Row(f"dim {classes}", tuple(ins), (R,), stats, even=even, local=False)


def cross_entropy_fill(call: Call) -> tuple[Fill, ...]:
    """Padded rows are ignored; padded classes are taken off."""
    target = call.operands[call.index("target")]
    if is_floating(target.dtype):
        return ()
    return (Fill(call.index("target"), call.arguments["ignore_index"], tuple(range(target.ndim))),)
