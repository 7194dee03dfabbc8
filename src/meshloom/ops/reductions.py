"""Rules of reductions that are more than one partial result (an index too, a variance, a norm), and of scans."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshloom.errors import ShapeError
from meshloom.ops.labels import (
    SUM,
    R,
    extreme_row,
    kept_rows,
    normal_dim,
    normal_dims,
    others,
    reduced_dims,
    reduced_shape,
)
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, Rule, named_row, with_none
from meshloom.placement import Partial, Shard
from meshloom.types import Shape, is_floating


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


def with_statistics(*ops: str) -> Rule:
    """The rule of a reduction that all-reduces statistics of a sharded dim: its result is replicated."""

    def rule(call: Call) -> Choices:
        shape, dims = call.shape("input"), reduced_dims(call)
        keepdim = bool(call.arguments["keepdim"])
        stats = tuple(Inner(op, others(len(shape), *dims)) for op in ops)
        rows = kept_rows(call, dims, keepdim)
        rows += [
            Row(f"dim {dim}", (Shard(dim),), (R,), stats, even=_weightless(call, dim), local=False) for dim in dims
        ]
        return with_none(call, [reduced_shape(shape, dims, keepdim)], rows, flops=4 * math.prod(shape))

    return rule


def _weightless(call: Call, dim: int) -> tuple[Even, ...]:
    """No padding of a dim under exp unless it can hold -inf: no integer weighs nothing."""
    place = call.index("input")
    topology = call.operands[place]
    return () if is_floating(topology.dtype) else (Even(place, dim, topology.shape[dim]),)


def lowest_fill(call: Call) -> tuple[Fill, ...]:
    """Padding of the reduced dims must not weigh: exp(-inf) = 0."""
    return (Fill(call.index("input"), -math.inf, reduced_dims(call)),)


# |x|_1, |x|_0 and the extreme norms of parts make up the norm of the whole
_NORMS = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}


def vector_norm(call: Call) -> Choices:
    """Norms that are sums or counts are partial over a sharded dim; extremes and sums of powers are all-reduced."""
    shape, dims = call.shape("input"), reduced_dims(call)
    keepdim, op = bool(call.arguments["keepdim"]), _NORMS.get(call.arguments["ord"])
    stat = Inner("sum", others(len(shape), *dims))
    rows = kept_rows(call, dims, keepdim)
    for dim in dims:
        if op is None:
            rows.append(Row(f"dim {dim}", (Shard(dim),), (R,), (stat,), local=False))
        elif op == "sum":
            rows.append(Row(f"dim {dim}", (Shard(dim),), (SUM,)))
        else:  # elements of equal size share the gradient
            rows.append(extreme_row(call, op, dim, dims))
    return with_none(call, [reduced_shape(shape, dims, keepdim)], rows, flops=2 * math.prod(shape))


def norm_fill(call: Call) -> tuple[Fill, ...]:
    """Zeros do not count in a norm, but for negative orders, where infinity does not."""
    if call.arguments["ord"] >= 0:
        return ()
    return (Fill(call.index("input"), math.inf, reduced_dims(call)),)


def along_one_dim(call: Call) -> Choices:
    """median, mode and their kind: the dim must be whole, all others may be sharded; values and indices."""
    shape = call.shape("input")
    dim = normal_dim(call.arguments["dim"], len(shape))
    dims = (dim,) if shape else ()
    keepdim = bool(call.arguments["keepdim"])
    out = reduced_shape(shape, dims, keepdim)
    return with_none(call, [out, out], kept_rows(call, dims, keepdim, results=2), flops=4 * math.prod(shape))


def quantile(call: Call) -> Choices:
    """`quantile(q, dim)`: the dim must be whole; a line of quantiles is a new dim in front."""
    shape, dim = call.shape("input"), call.arguments["dim"]
    dims = normal_dims(dim, len(shape))
    keepdim, lines = bool(call.arguments["keepdim"]), call.shape("q") if call.has("q") else ()
    if len(lines) > 1:
        raise ShapeError(f"{call.op} takes a number or a line of quantiles, not {list(lines)}")
    rows = [
        named_row(call, row.label, [Shard(each.dim + len(lines)) for each in row.outs if isinstance(each, Shard)],
                  input=row.ins[0])
        for row in kept_rows(call, dims, keepdim)
    ]  # fmt: skip
    out = lines + reduced_shape(shape, dims, keepdim)
    return with_none(call, [out], rows, flops=4 * math.prod(shape))


def scan(*partials: Partial, indexed: bool = False) -> Rule:
    """The rule of a scan along a dim: where it is sharded, each device learns the totals of those before it."""
    results = 2 if indexed else 1

    def rule(call: Call) -> Choices:
        shape = call.shape("input")
        dim = normal_dim(call.arguments["dim"], len(shape))
        rows = [Row(f"dim {d}", (Shard(d),), (Shard(d),) * results) for d in others(len(shape), dim)]
        if shape:
            totals = (Inner("", others(len(shape), dim), indexed=indexed, kind="all_gather"),)
            rows.append(Row(f"dim {dim}", (Shard(dim),), (Shard(dim),) * results, totals, totals, local=False))
        rows += [Row(str(each), (each,), (each,) * results) for each in partials]
        return with_none(call, [shape] * results, rows, flops=math.prod(shape))

    return rule


def scan_fill(value: float) -> Callable[[Call], tuple[Fill, ...]]:
    """Padding along the scanned dim holds what does not change a total."""
    return lambda call: (
        Fill(call.index("input"), value, (normal_dim(call.arguments["dim"], len(call.shape("input"))),)),
    )
