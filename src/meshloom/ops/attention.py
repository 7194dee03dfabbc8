"""The rule of attention."""

from __future__ import annotations

import math

from meshloom.errors import ShapeError
from meshloom.ops.labels import R, broadcast, carried_placement
from meshloom.ops.rule import Call, Choices, Even, Fill, Row, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import Shape


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
