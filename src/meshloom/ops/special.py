"""Rules of ops that look at a whole dim: softmax, norms, losses, look-ups, attention, arg-reductions.

Over a sharded dim they take a distributed form: local statistics, then a small all-reduce (`inner`), instead of a
gather of the dim. Backward has statistics of its own.
"""

from __future__ import annotations

import math

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import (
    SUM,
    R,
    broadcast,
    carried_placement,
    contraction_rows,
    fresh_labels,
    kept_rows,
    normal_dim,
    normal_dims,
    others,
    reduced_dims,
    reduced_shape,
)
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import Shape, is_floating


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


def embedding(call: Call) -> Choices:
    """A sharded vocabulary is a masked look-up: each device finds its own rows, the sum has them all."""
    ids, weight = call.shape("input"), call.shape("weight")
    if len(weight) != 2:
        raise ShapeError(f"embedding needs a weight of 2 dims and got {list(weight)}")
    first, second = call.index("input"), call.index("weight")

    def row(label: str, for_ids: Placement, for_weight: Placement, out: Placement, local: bool = True) -> Row:
        ins = (for_ids, for_weight) if first < second else (for_weight, for_ids)
        return Row(label, ins, (out,), local=local)

    rows = [row(f"dim {d}", Shard(d), R, Shard(d)) for d in range(len(ids))]
    rows.append(row("width", R, Shard(1), Shard(len(ids))))
    rows.append(row("vocabulary", R, Shard(0), SUM, local=False))
    return with_none(call, [ids + (weight[1],)], rows)


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


def matmul_spec(call: Call) -> str:
    """The labels of matmul for the ranks of its operands."""
    left, right = len(call.shape("input")), len(call.shape("other"))
    if not left or not right:
        raise ShapeError("matmul needs operands of one dim or more", fix="multiply by a 0-d tensor with *")
    vectors = {(True, True): "k, k -> ", (True, False): "k, ...kn -> ...n", (False, True): "...mk, k -> ...m"}
    return vectors.get((left == 1, right == 1), "...mk, ...kn -> ...mn")


def einsum_labels(call: Call) -> tuple[list[str], str]:
    """The operands' labels and the result's, with `...` written out in capitals that the equation does not use."""
    text = call.arguments["equation"].replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    shapes = [topology.shape for topology in call.operands]
    if len(inputs) != len(shapes):
        raise ShapeError(f"the equation {text!r} names {len(inputs)} operands and got {len(shapes)}")
    ranks = [len(shape) - len(t.replace("...", "")) for t, shape in zip(inputs, shapes, strict=True)]
    deepest = max((rank for t, rank in zip(inputs, ranks, strict=True) if "..." in t), default=0)
    batch = fresh_labels(max(deepest, 0), text)
    spelled = [
        t.replace("...", batch[len(batch) - rank :] if rank > 0 else "") for t, rank in zip(inputs, ranks, strict=True)
    ]
    if not arrow:
        named = "".join(spelled)
        output = batch + "".join(sorted(c for c in set(named) if named.count(c) == 1 and c not in batch))
    return spelled, output.replace("...", batch)


def einsum(call: Call) -> Choices:
    """Any label that stands once in each operand may be sharded; sizes of 1 in a batch dim are left to the op."""
    inputs, output = einsum_labels(call)
    shapes = [topology.shape for topology in call.operands]
    wide = _wide_labels(inputs, shapes)
    unknown = [label for label in output if label not in wide]
    if unknown:
        raise ShapeError(f"the result's label {unknown[0]!r} stands in no operand")
    rows = contraction_rows(inputs, output, range(len(shapes)), len(shapes))
    narrow = {x for t, s in zip(inputs, shapes, strict=True) for x, n in zip(t, s, strict=True) if n != wide[x]}
    rows = [row for row in rows if row.label not in narrow]
    out = tuple(wide[label] for label in output)
    return with_none(call, [out], rows, flops=2 * math.prod(wide.values()))


def _wide_labels(inputs: list[str], shapes: list[Shape]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text, shape in zip(inputs, shapes, strict=True):
        if len(text) != len(shape):
            raise ShapeError(f"labels {text!r} need {len(text)} dims and the operand has {list(shape)}")
        for label, size in zip(text, shape, strict=True):
            known = sizes.get(label, 1)
            if 1 not in (known, size) and known != size:
                raise ShapeError(
                    f"label {label!r} has size {known} and size {size}",
                    labels=", ".join(inputs),
                    fix=f"make the dims called {label!r} equal",
                )
            sizes[label] = size if known == 1 else known
    return sizes


def attention(call: Call) -> Choices:
    """Batch, heads and queries may be sharded; keys and values of a sharded query are replicated."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    if min(len(query), len(key), len(value)) < 2 or query[-1] != key[-1] or key[-2] != value[-2]:
        raise ShapeError(
            "query [..., L, E], key [..., S, E] and value [..., S, V] do not go together",
            shapes=f"{list(query)}, {list(key)}, {list(value)}",
        )
    grouped = bool(call.arguments["enable_gqa"])
    batch = query[:-2] if grouped else broadcast([query[:-2], key[:-2], value[:-2]])
    out = batch + (query[-2], value[-1])
    rows = [_attention_row(call, dim, out, key[-2]) for dim in range(len(batch) - grouped)]
    rows.append(_attention_row(call, len(batch), out, key[-2]))
    ins: list[Placement] = [R] * len(call.operands)
    ins[call.index("value")] = Shard(len(value) - 1)
    rows.append(Row("width", tuple(ins), (Shard(len(out) - 1),)))
    return with_none(call, [out], rows, flops=4 * math.prod(out) * key[-2])


def _attention_row(call: Call, dim: int, out: Shape, keys: int) -> Row:
    queries = dim == len(out) - 2
    ins: list[Placement] = [R] * len(call.operands)
    for name in ("query",) if queries else ("query", "key", "value"):
        shape = call.shape(name)
        ins[call.index(name)] = carried_placement(shape[:-1] + out[-1:], out, dim)
    if call.has("attn_mask"):
        scores = out[:-1] + (keys,)
        ins[call.index("attn_mask")] = carried_placement(call.shape("attn_mask"), scores, dim)
    causal = queries and bool(call.arguments["is_causal"])
    even = (Even(call.index("query"), len(call.shape("query")) - 2, out[-2]),) if causal else ()
    return Row(f"dim {dim}", tuple(ins), (Shard(dim),), even=even, local=not causal)


def attention_fill(call: Call) -> tuple[Fill, ...]:
    """A padded row of a boolean mask must let something through, or softmax gives nan."""
    if not call.has("attn_mask"):
        return ()
    mask = call.operands[call.index("attn_mask")]
    return (Fill(call.index("attn_mask"), mask.dtype == "bool", tuple(range(mask.ndim))),)
