"""Rules of ops that normalise whole dims: softmax and the norms.

Over a sharded dim they take a distributed form: local statistics, then a small all-reduce (`inner`), instead of a
gather of the dim. Backward has statistics of its own.
"""

from __future__ import annotations

import math

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.dtypes import check_floating
from meshloom.ops.labels import R, normal_dim, others
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, Rule, with_none
from meshloom.placement import Placement, Shard


def softmax_dim(call: Call) -> int:
    """The dim that a softmax call normalises."""
    dim = call.arguments["dim"]
    if dim is None:
        raise ArgumentError(f"{call.op} needs a dim", fix=f"write {call.op}(x, dim=-1)")
    return normal_dim(dim, len(call.shape("input")))


def softmax(call: Call) -> Choices:
    """max and sum of the dim are all-reduced; backward all-reduces sum(g * y)."""
    shape, dim = call.shape("input"), softmax_dim(call)
    rows = [Row(f"dim {d}", (Shard(d),), (Shard(d),)) for d in others(len(shape), dim)]
    if shape:
        kept = others(len(shape), dim)
        stats = (Inner("max", kept), Inner("sum", kept))
        rows.append(Row(f"dim {dim}", (Shard(dim),), (Shard(dim),), stats, backward=(Inner("sum", kept),), local=False))
    return with_none(call, [shape], rows, flops=5 * math.prod(shape))


def softmax_fill(call: Call) -> tuple[Fill, ...]:
    """Padding of the normalised dim must not weigh: exp(-inf) = 0."""
    return (Fill(call.index("input"), -math.inf, (softmax_dim(call),)),)


def normalised(call: Call) -> int:
    """How many trailing dims a layer_norm call normalises."""
    shape, asked = call.shape("input"), call.arguments["normalized_shape"]
    wanted = (asked,) if isinstance(asked, int) else tuple(asked)
    if not wanted or shape[len(shape) - len(wanted) :] != wanted:
        raise ShapeError(f"normalized_shape {list(wanted)} is not the end of shape {list(shape)}")
    return len(wanted)


def trailing_norm(sums: int) -> Rule:
    """The rule of layer_norm and rms_norm, whose statistics are so many sums over the trailing dims."""

    def rule(call: Call) -> Choices:
        check_floating(call, real=True) if call.op == "layer_norm" else check_floating(call, "input")
        shape = call.shape("input")
        lead = len(shape) - normalised(call)
        rows = []
        for dim in range(len(shape)):
            ins: list[Placement] = [R] * len(call.operands)
            ins[call.index("input")] = Shard(dim)
            for name in ("weight", "bias"):
                if call.has(name) and dim >= lead:
                    ins[call.index(name)] = Shard(dim - lead)
            stats = (Inner("sum", tuple(range(lead))),) * sums if dim >= lead else ()
            rows.append(Row(f"dim {dim}", tuple(ins), (Shard(dim),), stats, backward=stats, local=dim < lead))
        return with_none(call, [shape], rows, flops=8 * math.prod(shape))

    return rule


def group_norm(call: Call) -> Choices:
    """Whole groups stay together; over sharded positions the sums of each group are all-reduced."""
    check_floating(call, real=True)
    shape, groups = call.shape("input"), call.arguments["num_groups"]
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        raise ShapeError(
            f"{shape[1] if len(shape) > 1 else 'no'} channels of {list(shape)} do not make {groups} groups"
        )
    sums = (Inner("sum", (0,), times=groups),) * 2
    rows = [_channel_row(call, 0, (Shard(0),)), _channel_row(call, 1, (Shard(1),), Even(0, 1, groups))]
    rows += [_channel_row(call, dim, (Shard(dim),), sums=sums) for dim in range(2, len(shape))]
    return with_none(call, [shape], rows, flops=8 * math.prod(shape))


def batch_norm(call: Call) -> Choices:
    """Statistics are of the global batch: sharded batch or positions all-reduce sums per channel. Channels are apart.

    In training the results are the normalised input, and mean and variance of the batch.
    """
    check_floating(call, real=True)
    shape, training = call.shape("input"), bool(call.arguments["training"])
    if len(shape) < 2:
        raise ShapeError(f"batch_norm needs an input of 2 dims or more and got {list(shape)}")
    sums = (Inner("sum", (1,)),) * 2 if training else ()
    rows = []
    for dim in range(len(shape)):
        outs: tuple[Placement, ...] = (Shard(dim),)
        if training:
            outs += (Shard(0),) * 2 if dim == 1 else (R, R)
        rows.append(_channel_row(call, dim, outs, sums=() if dim == 1 else sums))
    shapes = [shape, shape[1:2], shape[1:2]] if training else [shape]
    return with_none(call, shapes, rows, flops=8 * math.prod(shape))


def batch_norm_fill(call: Call) -> tuple[Fill, ...]:
    """Channels that are padding have unit variance: without eps they would be divided by zero."""
    return (Fill(call.index("running_var"), 1, (0,)),) if call.has("running_var") else ()


def _channel_row(
    call: Call, dim: int, outs: tuple[Placement, ...], even: Even | None = None, sums: tuple[Inner, ...] = ()
) -> Row:
    """A row of an op on [N, C, ...] whose other operands have one number per channel."""
    ins: list[Placement] = [Shard(0) if dim == 1 else R] * len(call.operands)
    ins[call.index("input")] = Shard(dim)
    evens = () if even is None else (even,)
    return Row(f"dim {dim}", tuple(ins), outs, sums, sums, evens, local=not sums)
