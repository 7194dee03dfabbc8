"""Rules of reductions that are more than one partial result: a value with its index, a variance."""

from __future__ import annotations

import math

from meshloom.ops.labels import R, kept_rows, normal_dim, normal_dims, others, reduced_dims, reduced_shape
from meshloom.ops.rule import Call, Choices, Even, Inner, Row, with_none
from meshloom.placement import Shard
from meshloom.types import Shape


def arg_reduction(call: Call) -> Choices:
    """argmax, argmin: over a sharded dim the best value travels with its index."""
    shape, dims = call.shape("input"), reduced_dims(call)
    keepdim = bool(call.arguments["keepdim"])
    rows = kept_rows(call, dims, keepdim)
    rows += [_indexed_row(shape, dims, dim, 1) for dim in dims]
    return with_none(call, [reduced_shape(shape, dims, keepdim)], rows, flops=math.prod(shape))


def value_and_index(call: Call) -> Choices:
    """max and min along a dim: values and indices."""
    shape = call.shape("input")
    dim = normal_dim(call.arguments["dim"], len(shape))
    keepdim = bool(call.arguments["keepdim"])
    dims = (dim,) if shape else ()
    rows = kept_rows(call, dims, keepdim, results=2)
    rows += [_indexed_row(shape, dims, each, 2) for each in dims]
    out = reduced_shape(shape, dims, keepdim)
    return with_none(call, [out, out], rows, flops=math.prod(shape))


def _indexed_row(shape: Shape, dims: tuple[int, ...], dim: int, results: int) -> Row:
    stat = Inner("max", others(len(shape), *dims), indexed=True)
    return Row(f"dim {dim}", (Shard(dim),), (R,) * results, (stat,), even=(Even(0, dim, shape[dim]),), local=False)


def var(call: Call) -> Choices:
    """mean and squared distance from it are all-reduced over a sharded dim."""
    shape, dims = call.shape("input"), normal_dims(call.arguments["dim"], len(call.shape("input")))
    keepdim = bool(call.arguments["keepdim"])
    kept = others(len(shape), *dims)
    stats = (Inner("sum", kept), Inner("sum", kept))
    rows = kept_rows(call, dims, keepdim)
    rows += [Row(f"dim {dim}", (Shard(dim),), (R,), stats, local=False) for dim in dims]
    return with_none(call, [reduced_shape(shape, dims, keepdim)], rows, flops=4 * math.prod(shape))
