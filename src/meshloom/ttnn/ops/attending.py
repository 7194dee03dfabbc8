"""Attention on blocks: what every form of it in `transformer` computes, which keys a query may see, and the label.

Queries are [*mesh, B, H, S, D], keys and values [*mesh, B, K, T, D]; H is a multiple of K. Mesh axes and batch are one
batch for torch. A row that may see nothing is zero, where the original leaves it undefined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from meshloom.errors import OperandError
from meshloom.ttnn.ops.block_moves import spread, take_rows
from meshloom.ttnn.ops.topologies import rows, topology_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology


def attend(
    q: Block,
    k: Block,
    v: Block,
    axes: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    seen: Block | None = None,
    bias: Block | None = None,
    sink: Block | None = None,
    blind: Block | None = None,
) -> Block:
    """softmax(q @ k.T * scale + bias) @ v over the keys that are seen; a sink is one more key without a value.

    `seen` is a mask of the keys that count, `bias` is added, `sink` is a logit per row: all as wide as
    [*mesh, B, H, S, T] or narrower by ones. `blind` are the rows that `seen` leaves no key, if the caller knows them.
    """
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if sink is not None:
        seen = _all_seen(q, k, axes, causal) if seen is None and bias is None else seen
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = _with_sink(seen, bias, sink * factor)
        seen, causal = None, False
    mask = bias if seen is None else seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    q, k, v, *_ = spread([q, k, v] if mask is None else [q, k, v, mask], axes)
    sizes = q.shape[: axes + 1]
    queries, keys, values = q.float().flatten(0, axes), k.float().flatten(0, axes), v.float().flatten(0, axes)
    found: Block = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if mask is None else _fold_mask(mask, sizes, axes),
        is_causal=causal and mask is None,
        scale=factor,
        enable_gqa=q.shape[-3] != k.shape[-3],
    )
    found = found.reshape(*sizes, *found.shape[1:])
    if mask is None:
        return found
    if blind is None or mask is not seen:
        is_seen = mask if mask.dtype is torch.bool else mask != -torch.inf
        blind = ~is_seen.any(-1, keepdim=True)
    return found.masked_fill(blind, 0)


def _fold_mask(mask: Block, sizes: Sequence[int], axes: int) -> Block:
    """A mask with mesh axes and batch in one dim: 1 if it is the same for all."""
    if math.prod(mask.shape[: axes + 1]) == 1:
        return mask.flatten(0, axes)
    return mask.expand(*sizes, *mask.shape[axes + 1 :]).flatten(0, axes)


def _all_seen(q: Block, k: Block, axes: int, causal: bool) -> Block:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return (seen.tril() if causal else seen)[(None,) * (axes + 2)]


def _with_sink(seen: Block | None, bias: Block | None, sink: Block) -> Block:
    """What is added to the logits of all keys and of the sink after them."""
    base = torch.zeros(()) if bias is None else bias.float()
    told = base if seen is None else torch.where(seen, base, torch.tensor(-torch.inf))
    shape = torch.broadcast_shapes(told.shape[:-1], sink.shape[:-1])
    return torch.cat([told.expand(*shape, told.shape[-1]), sink.float().expand(*shape, 1)], dim=-1)


def mask_of(tensor: Tensor | None) -> Block | None:
    """A mask that is added to the logits, as numbers."""
    return None if tensor is None else tensor.block.float()


def sink_of(name: str, block: Block, axes: int, heads: int) -> Block:
    """One logit per head, [*mesh, 1, H, 1, 1]: of [1, H, 1, 1], [H] or rows of a tile whose first column counts."""
    flat = block.flatten(axes)
    if flat.shape[-1] != heads:
        rows = block.reshape(*block.shape[:axes], -1, block.shape[-1])[..., 0]
        if rows.shape[-1] < heads:
            raise OperandError(
                f"ttnn.{name}: attention_sink {list(block.shape[axes:])} for {heads} heads", fix="[1, H, 1, 1]"
            )
        flat = rows[..., :heads]
    return flat.reshape(*flat.shape[:-1], 1, heads, 1, 1)


def within(keys: Block, last: Block, window: int | None, modulo: int | None = None) -> Block:
    """Which positions a query at `last` sees: itself and those before, maybe only the nearest ones.

    In a cache that is written round and round (`modulo`), slot j holds the newest position that ends there.

    >>> within(torch.arange(5), torch.tensor([3]), 2).int()
    tensor([0, 0, 1, 1, 0], dtype=torch.int32)
    >>> within(torch.arange(4), torch.tensor([5]), 3, modulo=4).int()
    tensor([1, 1, 0, 1], dtype=torch.int32)
    """
    if modulo is None:
        seen = keys <= last  # no key is below 0
        return seen if window is None else seen & (keys > last - window)
    age = (last - keys) % modulo
    seen = (age <= last) & (last >= 0) & (keys < modulo)
    return seen if window is None else seen & (age < window)


def read_pages(cache: Block, table: Block, axes: int, block_size: int = 0, heads: int = 0) -> Block:
    """Pages [*mesh, P, K, n, D] in the order of a table [*mesh, B, m]: [*mesh, B, K, m * n, D].

    Pages that the table does not name (-1) are any page: positions there are beyond every query's.
    """
    if block_size or heads:
        cache = regroup(cache, axes, block_size, heads)
    found = take_rows(cache, table.clamp(min=0), axes).transpose(axes + 1, axes + 2)  # [*mesh, B, K, m, n, D]
    return found.flatten(-3, -2)


def regroup(cache: Block, axes: int, block_size: int, heads: int) -> Block:
    """A cache seen as pages of another size or with another number of heads; a view."""
    size, count = block_size or cache.shape[-2], heads or cache.shape[-3]
    if math.prod(cache.shape[axes:-1]) % (size * count):
        raise OperandError(
            f"a cache {list(cache.shape[axes:])} does not hold pages of {count} heads x {size} positions"
        )
    return cache.reshape(*cache.shape[:axes], -1, count, size, cache.shape[-1])


def check_positions(name: str, listed: Sequence[int], tensor: Tensor | None, users: int) -> None:
    """An error unless every user has a position, in a list or in a tensor."""
    if tensor is None and len(listed) != users:
        raise OperandError(f"ttnn.{name}: {len(listed)} positions for {users} users", fix="one position for each")


def positions_of(listed: Sequence[int], block: Block | None, axes: int, users: int) -> Block:
    """The position of every user, [*mesh, B]."""
    if block is not None:
        return block.flatten(axes)[..., :users].long()
    return torch.tensor(list(listed)).reshape(*(1,) * axes, users)


def attention_topology(
    tensors: Sequence[Tensor], q_dims: Sequence[int] = (0, 1, 2), placed: bool = False
) -> TensorTopology:
    """Of attention of (q, k, v, others...): cut at the batch, the heads, the queries or the width of values.

    `q_dims` are the dims of q that are batch, heads and sequence; those of k and v are 0, 1 and 2. If queries are
    `placed`, by a causal mask or a window, every device counts its own from the start: a cut sequence is no whole then.
    """
    cuts = []
    for role, dim in enumerate(q_dims[: 2 if placed else 3]):
        keys = (f"S({role})", "R") if role < 2 else ("R",)
        beside = itertools.product(keys, keys, *[(f"S({role})", "R")] * (len(tensors) - 3))
        cuts += [f"S({dim}), {', '.join(each)} -> S({dim})" for each in beside]
    cuts += [f"R, R, {each}{', R' * (len(tensors) - 3)} -> {each}" for each in ("S(3)", "P(sum)")]
    return topology_of(rows(*cuts, exact=True), *tensors)
