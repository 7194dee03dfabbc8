"""Rules of activations that are not pointwise: one slope per channel, one half that opens the other."""

from __future__ import annotations

import math

from meshloom.errors import ShapeError
from meshloom.ops.labels import R, normal_dim, others
from meshloom.ops.rule import Call, Choices, Row, with_none
from meshloom.placement import Placement, Shard


def prelu(call: Call) -> Choices:
    """Any dim may be sharded; the slopes lie along dim 1."""
    shape, slopes = call.shape("input"), math.prod(call.shape("weight"))
    channels = shape[1] if len(shape) > 1 else 1
    if len(call.shape("weight")) > 1 or slopes not in (1, channels):
        raise ShapeError(
            f"prelu of {list(shape)} needs 1 slope or {channels} and got a weight of {list(call.shape('weight'))}"
        )
    rows = []
    for dim in range(len(shape)):
        ins: list[Placement] = [R, R]
        ins[call.index("input")] = Shard(dim)
        if dim == 1 and slopes == channels and call.shape("weight") and slopes > 1:
            ins[call.index("weight")] = Shard(0)
        rows.append(Row(f"dim {dim}", tuple(ins), (Shard(dim),)))
    return with_none(call, [shape], rows, flops=math.prod(shape))


def glu(call: Call) -> Choices:
    """The halves of one dim meet, so that dim is not sharded."""
    shape = call.shape("input")
    dim = normal_dim(call.arguments["dim"], len(shape))
    if not shape or shape[dim] % 2:
        raise ShapeError(f"glu halves a dim of even size, and dim {dim} of {list(shape)} is not")
    out = shape[:dim] + (shape[dim] // 2,) + shape[dim + 1 :]
    rows = [Row(f"dim {each}", (Shard(each),), (Shard(each),)) for each in others(len(shape), dim)]
    return with_none(call, [out], rows, flops=2 * math.prod(out))
