"""The rule of attention: batch, heads, queries, and sequences that pass around a ring."""

from __future__ import annotations

import math
from typing import Any

from meshloom.errors import ShapeError
from meshloom.ops.labels import R, broadcast, carried_placement
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Row, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import Shape


def attention(call: Call) -> Choices:
    """Batch, heads, queries and width may be sharded alone, or keys and values on their sequence.

    Queries that are sharded with keys and values take ring attention: keys and values pass from device to device, and
    each keeps a running maximum and sum. Replicated queries are asked of all keys at once, and the parts are combined.
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    if min(len(query), len(key), len(value)) < 2 or query[-1] != key[-1] or key[-2] != value[-2]:
        raise ShapeError(
            "query [..., L, E], key [..., S, E] and value [..., S, V] do not go together",
            shapes=f"{list(query)}, {list(key)}, {list(value)}",
        )
    grouped = bool(call.arguments["enable_gqa"])
    batch = query[:-2] if grouped else broadcast([query[:-2], key[:-2], value[:-2]])
    out = batch + (query[-2], value[-1])
    rows = [_batch_row(call, dim, out) for dim in range(len(batch) - grouped)]
    rows += [_grouped_row(call, out)] if grouped and len(batch) else []
    rows += [_queries_row(call, out), _width_row(call, out), _keys_row(call, out), _ring_row(call, out)]
    return with_none(call, [out], rows, flops=4 * math.prod(out) * key[-2])


def _row(call: Call, label: str, out: Placement, mask: int | None = None, **more: Any) -> Row:
    """A row from the placements of query, key and value by name; `mask` is the dim of the scores that is sharded."""
    named = {name: more.pop(name) for name in ("query", "key", "value") if name in more}
    ins: list[Placement] = [R] * len(call.operands)
    for name, placement in named.items():
        ins[call.index(name)] = placement
    if call.has("attn_mask") and mask is not None:
        ins[call.index("attn_mask")] = carried_placement(call.shape("attn_mask"), _scores(call), mask)
    return Row(label, tuple(ins), (out,), **more)


def _scores(call: Call) -> Shape:
    """The shape of query times key: what a mask is broadcast to."""
    query, key = call.shape("query"), call.shape("key")
    batch = query[:-2] if call.arguments["enable_gqa"] else broadcast([query[:-2], key[:-2]])
    return batch + (query[-2], key[-2])


def _batch_row(call: Call, dim: int, out: Shape) -> Row:
    placed = {name: carried_placement(call.shape(name)[:-1] + out[-1:], out, dim) for name in ("query", "key", "value")}
    return _row(call, f"dim {dim}", Shard(dim), dim, **placed)


def _grouped_row(call: Call, out: Shape) -> Row:
    """Heads in groups: a device has whole groups if it has as many as divide the heads of the keys."""
    heads = {name: len(call.shape(name)) - 3 for name in ("query", "key", "value")}
    even = (Even(call.index("key"), heads["key"], call.shape("key")[heads["key"]]),)
    placed = {name: Shard(dim) for name, dim in heads.items()}
    return _row(call, f"dim {len(out) - 3}", Shard(len(out) - 3), len(out) - 3, **placed, even=even)


def _queries_row(call: Call, out: Shape) -> Row:
    dim, own = len(out) - 2, len(call.shape("query")) - 2
    causal = bool(call.arguments["is_causal"])
    even = (Even(call.index("query"), own, out[-2]),) if causal else ()
    return _row(call, f"dim {dim}", Shard(dim), dim, query=Shard(own), even=even, local=not causal)


def _width_row(call: Call, out: Shape) -> Row:
    return _row(call, "width", Shard(len(out) - 1), value=Shard(len(call.shape("value")) - 1))


def _ring_row(call: Call, out: Shape) -> Row:
    """Keys and values go around; backward they go around again, and their gradients with them."""
    dims = {name: len(call.shape(name)) - 2 for name in ("query", "key", "value")}
    passed = tuple(
        Inner("", tuple(range(len(call.shape(name)))), call.index(name), kind="shift") for name in ("key", "value")
    )
    placed = {name: Shard(dim) for name, dim in dims.items()}
    return _row(
        call, "ring", Shard(len(out) - 2), len(out) - 2, **placed, inner=passed, backward=passed * 2, local=False
    )


def _keys_row(call: Call, out: Shape) -> Row:
    """Each device answers from its own keys; the maximum, the sum of weights and the weighted sum are all-reduced."""
    query = call.shape("query")
    index, lead = call.index("query"), tuple(range(len(query) - 1))
    times = max(math.prod(out[:-1]) // max(math.prod(query[:-1]), 1), 1)
    stats = tuple(Inner(op, lead, index, times=each) for op, each in (("max", times), ("sum", times)))
    stats += (Inner("sum", lead, index, times=times * max(out[-1], 1)),)
    placed = {name: Shard(len(call.shape(name)) - 2) for name in ("key", "value")}
    # between processes, keys that lie apart while their queries do not are gathered
    return _row(call, "keys", R, len(out) - 1, **placed, inner=stats, local=False, across=False)


def attention_fill(call: Call) -> tuple[Fill, ...]:
    """A padded row of a boolean mask must let something through, or softmax gives nan."""
    if not call.has("attn_mask"):
        return ()
    mask = call.operands[call.index("attn_mask")]
    return (Fill(call.index("attn_mask"), mask.dtype == "bool", tuple(range(mask.ndim))),)
