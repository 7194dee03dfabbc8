"""Attention on stored arrays, and over a sequence that peers hold: keys and values go around the ring, block by block.

A process keeps its own queries. In each step it attends to the block of keys and values that it has at the moment, adds
to its running sums (scaled by the running maximum, so that nothing overflows), and passes the block on. It never holds
more than two blocks of keys and values. Backward goes around once more: the gradients of a block travel with it and are
complete when it is home again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.context import state
from meshloom.engines import private
from meshloom.engines.node import Node
from meshloom.engines.peers import Peers
from meshloom.engines.torch_engine.local import Local, shared, wide_dtype
from meshloom.errors import GradientError

LARGE = 1 << 18  # elements from which blocks are passed on one by one


@shared
def attention(
    local: Local,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    **options: Any,
) -> torch.Tensor:
    """Padded keys must not weigh, and a causal mask counts queries: both are taken off, and queries put back after.

    Where peers hold parts of the sequence each query knows where it stands.
    """
    is_fused = query.is_meta and not state.keeps_scores
    function, dim = fused_without_data if is_fused else F.scaled_dot_product_attention, query.dim() - 2
    if not local.peers.alone:
        rows, keys = local.positions("query", dim), local.topology("key")
        holders = local.peers.along(keys.mesh, keys.axes_of[-2])
        if not holders.alone:
            return _attend(local, holders, query, key, value, attn_mask, rows if is_causal else None, **options)
        mask = (rows.unsqueeze(-1) >= torch.arange(key.shape[-2])).to(query.device) if is_causal else attn_mask
        return function(query, key, value, mask, **options)
    key, value = (local.trim(name, each, each.dim() - 2) for name, each in (("key", key), ("value", value)))
    if attn_mask is not None:
        attn_mask = local.trim("attn_mask", attn_mask, attn_mask.dim() - 1)
    if not is_causal:
        return function(query, key, value, attn_mask, **options)
    found = function(local.trim("query", query, dim), key, value, attn_mask, is_causal=True, **options)
    return local.pad_like("query", found, dim, found.dim() - 2)


def fused_without_data(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention on `meta` by the fused kernel that devices have: torch itself would write all scores down there.

    What that kernel does not take (other ranks, a mask with a gradient, arrays mapped over devices) goes torch's way.
    """
    arrays = (query, key, value)
    if not _can_be_fused(query, key, value, enable_gqa) or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(
            *arrays, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    found: torch.Tensor = private.fused_attention(*arrays, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


def _can_be_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    arrays = (query, key, value)
    if not all(each.dim() == 4 and not private.is_functorch_wrapped_tensor(each) for each in arrays):
        return False
    is_same = query.shape[-1] == value.shape[-1] and len({each.shape[0] for each in arrays}) == 1
    return is_same and key.shape[-3] == value.shape[-3] and (enable_gqa or query.shape[-3] == key.shape[-3])


def _attend(
    local: Local, peers: Peers, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    rows: torch.Tensor | None,
    scale: float | None, enable_gqa: bool, dropout_p: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """What each query of this process gets, by its row where attention is causal: one block of scores at a time."""
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    batch = query.shape[:-2] if enable_gqa else torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    heads = (*batch[:-1], batch[-1] // groups) if enable_gqa else batch
    key, value = (x.expand(*heads, *x.shape[-2:]) for x in (key, value))
    folded = _fold_heads(query.expand(*batch, *query.shape[-2:]), groups)
    x, bias = folded.to(wide_dtype(query.dtype)), None
    if mask is not None:
        mask = _fold_heads(mask.expand(*batch, query.shape[-2], local.topology("key").shape[-2]), groups)
        mask, bias = (mask, None) if mask.dtype == torch.bool else (None, mask.to(x.dtype))
    if rows is not None:
        rows = rows.repeat(groups).unsqueeze(-1).to(query.device)
    ring = Ring(local, peers, query.shape[-1] ** -0.5 if scale is None else scale, rows, mask)
    out = RingAttention.apply(x, key, value, bias, ring).to(query.dtype)
    return out if groups == 1 else out.unflatten(-2, (groups, -1)).flatten(-4, -3)


def _fold_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The query heads that share a head of keys, one below the other."""
    return x if groups == 1 else x.unflatten(-3, (-1, groups)).flatten(-3, -2)


@dataclass(frozen=True)
class Ring:
    """How the blocks of a ring meet: the scale of scores, and what a query may see of the block of each process.

    A query sees the keys up to its own row, where `rows` are given, or those at which the mask is True.
    """

    local: Local
    peers: Peers
    scale: float
    rows: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def size(self) -> int:
        """How many blocks there are."""
        return len(self.peers.ranks)

    def pass_on(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every block goes to the next process; what comes is from the one before. The list is emptied."""
        if sum(block.numel() for block in blocks) >= LARGE:  # a copy of all of them would not be small
            return [self.peers.pass_on(blocks.pop(0).contiguous()) for _ in range(len(blocks))]
        arrived = self.peers.pass_on(torch.cat([block.reshape(-1) for block in blocks]))
        parts = arrived.split([block.numel() for block in blocks])
        return [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]

    def columns(self, step: int, device: torch.device) -> torch.Tensor:
        """The global positions of the keys of the block that is here in a step; -1 for padding."""
        owner = self.peers.ranks[(self.peers.index - step) % self.size]
        return self.local.positions("key", self.local.topology("key").ndim - 2, owner).to(device)

    def scores(self, query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, step: int) -> torch.Tensor:
        """What the queries make of the block that is here."""
        found = query @ key.to(query.dtype).mT * self.scale
        columns = self.columns(step, query.device)
        seen, places = columns >= 0, columns.clamp(min=0)
        if bias is not None:
            found = found + bias[..., places]
        if self.rows is not None:
            seen = seen & (self.rows >= columns)
        elif self.mask is not None:
            seen = seen & self.mask[..., places]
        return torch.where(seen, found, -math.inf)


class RingAttention(Node):
    """softmax(query @ key.mT * scale + bias) @ value, for keys and values that lie on a ring of processes."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, ring: Ring
    ) -> torch.Tensor:
        high = query.new_full((*query.shape[:-1], 1), -math.inf)
        total, mixed = torch.zeros_like(high), query.new_zeros((*query.shape[:-1], value.shape[-1]))
        block = [key, value]
        for step in range(ring.size):
            scores = ring.scores(query, block[0], bias, step)
            highest = torch.maximum(high, scores.amax(-1, keepdim=True))
            base = torch.where(highest == -math.inf, 0, highest)  # nothing seen yet
            kept, weights = (high - base).exp(), (scores - base).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            mixed = mixed * kept + weights @ block[1].to(query.dtype)
            high = highest
            if step + 1 < ring.size:
                block = ring.pass_on(block)
        blind = total == 0  # a query that sees no key gives zero, as torch has it
        out = torch.where(blind, 0, mixed / total)
        ctx.save_for_backward(query, key, value, bias, out, torch.where(blind, 0, high + total.log()))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's own fused attention refuses create_graph too
            raise GradientError(
                "attention over a sequence that several processes hold has no second derivative",
                fix="write it out: softmax(query @ key.mT * scale, -1) @ value has one",
            )
        query, key, value, bias, out, normal = ctx.saved_tensors
        ring: Ring = ctx.ring
        share = (gradient * out).sum(-1, keepdim=True)
        for_query = torch.zeros_like(query)
        for_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        wide = query.dtype
        block = [key.to(wide), value.to(wide)]
        theirs = [torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)]  # the gradients of the block
        for step in range(ring.size):
            weights = (ring.scores(query, block[0], bias, step) - normal).exp()
            theirs[1] += weights.mT @ gradient
            slope = weights * (gradient @ block[1].mT - share)
            if for_bias is not None:
                for_bias.index_add_(-1, ring.columns(step, query.device).clamp(min=0), slope)
            for_query += slope @ block[0] * ring.scale
            theirs[0] += slope.mT @ query * ring.scale
            theirs = ring.pass_on(theirs)
            if step + 1 < ring.size:
                block = ring.pass_on(block)
        return for_query, theirs[0].to(key.dtype), theirs[1].to(value.dtype), for_bias, None
