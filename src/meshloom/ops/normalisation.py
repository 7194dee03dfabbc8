"""Rules of ops that normalise whole dims: softmax and the norms.

Over a sharded dim they take a distributed form: local statistics, then a small all-reduce (`inner`), instead of a
gather of the dim. Backward has statistics of its own.
"""

from __future__ import annotations

import math

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import R, normal_dim, others
from meshloom.ops.rule import Call, Choices, Fill, Inner, Row, with_none
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


def layer_norm(call: Call) -> Choices:
    """mean and mean square are all-reduced; backward all-reduces two sums."""
    shape = call.shape("input")
    lead = len(shape) - normalised(call)
    kept = tuple(range(lead))
    rows = []
    for dim in range(len(shape)):
        ins: list[Placement] = [R] * len(call.operands)
        ins[call.index("input")] = Shard(dim)
        for name in ("weight", "bias"):
            if call.has(name) and dim >= lead:
                ins[call.index(name)] = Shard(dim - lead)
        stats = (Inner("sum", kept), Inner("sum", kept)) if dim >= lead else ()
        rows.append(Row(f"dim {dim}", tuple(ins), (Shard(dim),), stats, backward=stats, local=dim < lead))
    return with_none(call, [shape], rows, flops=8 * math.prod(shape))
