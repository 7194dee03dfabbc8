"""Rules of ops that put elements in order: the ordered dim is whole, the others may be sharded."""

from __future__ import annotations

import math
from dataclasses import replace

from meshloom.errors import ShapeError
from meshloom.ops.labels import SUM, R, normal_dim, others
from meshloom.ops.rule import Call, Choices, Inner, Row, named_row, with_none
from meshloom.placement import Shard
from meshloom.types import Shape


def ordered_rows(shape: Shape, dim: int, results: int) -> list[Row]:
    """Rows that shard any dim but the ordered one."""
    return [Row(f"dim {d}", (Shard(d),), (Shard(d),) * results) for d in others(len(shape), dim)]


def _dim(call: Call) -> int:
    return normal_dim(call.arguments["dim"], len(call.shape("input")))


def sort(call: Call) -> Choices:
    """`sort`: values and where they were."""
    shape = call.shape("input")
    return with_none(call, [shape, shape], ordered_rows(shape, _dim(call), 2), flops=_comparisons(shape, _dim(call)))


def argsort(call: Call) -> Choices:
    """`argsort`: where the values were."""
    shape = call.shape("input")
    return with_none(call, [shape], ordered_rows(shape, _dim(call), 1), flops=_comparisons(shape, _dim(call)))


def _comparisons(shape: Shape, dim: int) -> int:
    return math.prod(shape) * max(1, shape[dim] if shape else 1).bit_length()


def topk(call: Call) -> Choices:
    """`topk(k, dim)`: the best of each device are the only ones that can be the best of all."""
    shape, dim, k = call.shape("input"), _dim(call), call.arguments["k"]
    size = shape[dim] if shape else 1
    if not 0 <= k <= size:
        raise ShapeError(f"topk takes k from 0 to {size}, the size of dim {dim}, not {k}")
    out = shape[:dim] + (k,) + shape[dim + 1 :] if shape else shape
    rows = ordered_rows(shape, dim, 2)
    if 0 < 2 * k <= size:
        best = Inner("", others(len(shape), dim), indexed=True, kind="all_gather", times=k)
        rows.append(Row(f"dim {dim}", (Shard(dim),), (R, R), (best,), local=False))
    return with_none(call, [out, out], rows, flops=math.prod(shape))


def searchsorted(call: Call) -> Choices:
    """A place in a sorted line is the number of elements before it, and such numbers add up over chunks."""
    line, values = call.shape("sorted_sequence"), call.shape("input") if call.has("input") else ()
    if len(line) > 1 and (len(line) != len(values) or line[:-1] != values[:-1]):
        raise ShapeError(f"the sorted lines {list(line)} and the values {list(values)} need equal dims but the last")
    rows = [
        named_row(call, f"dim {d}", (Shard(d),), input=Shard(d), sorted_sequence=Shard(d), sorter=Shard(d))
        for d in range(len(line) - 1)
    ]
    first = len(line) - 1 if len(line) > 1 else 0
    rows += [named_row(call, f"values {d}", (Shard(d),), input=Shard(d)) for d in range(first, len(values))]
    if not call.has("sorter"):
        rows.append(replace(named_row(call, "line", (SUM,), sorted_sequence=Shard(len(line) - 1)), local=False))
    return with_none(call, [values], rows)


def bucketize(call: Call) -> Choices:
    """`bucketize(boundaries)`: as `searchsorted` with one line for all."""
    values, line = call.shape("input") if call.has("input") else (), call.shape("boundaries")
    if len(line) != 1:
        raise ShapeError(f"bucketize needs boundaries of one dim and got {list(line)}")
    rows = [named_row(call, f"dim {d}", (Shard(d),), input=Shard(d)) for d in range(len(values))]
    rows.append(replace(named_row(call, "line", (SUM,), boundaries=Shard(0)), local=False))
    return with_none(call, [values], rows)
