"""Attention over a sequence that several processes hold: keys and values go around the ring, block by block.

A process keeps its own queries. In each step it attends to the block of keys and values that it has at the moment, adds
to its running sums (scaled by the running maximum, so that nothing overflows), and passes the block on. It never holds
more than two blocks of keys and values. Backward goes around once more: the gradients of a block travel with it and are
complete when it is home again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comms import wire
from meshloom.comms.group import Group
from meshloom.errors import GradientError

LARGE = 1 << 18  # elements from which blocks are passed on one by one


@dataclass(frozen=True)
class Ring:
    """How the blocks of a ring meet: the scale of scores, and what a query may see of the block of each process.

    `columns(i)` are the global positions of the keys of process i, -1 for padding; `allowed(i)` is None, or True where
    a query may see a key of process i.
    """

    group: Group
    scale: float
    columns: Callable[[int], torch.Tensor]
    allowed: Callable[[int], torch.Tensor | None]

    def pass_on(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every block goes to the next process; what comes is from the one before. The list is emptied."""
        if sum(block.numel() for block in blocks) >= LARGE:  # a copy of all of them would not be small
            return [self._passed(blocks.pop(0).contiguous()) for _ in range(len(blocks))]
        arrived = self._passed(torch.cat([block.reshape(-1) for block in blocks]))
        found, start = [], 0
        for block in blocks:
            found.append(arrived[start : start + block.numel()].view(block.shape))
            start += block.numel()
        return found

    def _passed(self, block: torch.Tensor) -> torch.Tensor:
        here, size = self.group.index, self.group.size
        leaving: list[list[int]] = [[] for _ in range(size)]
        leaving[(here + 1) % size] = [0]
        return wire.exchange_rows(block.unsqueeze(0), leaving, [((here - 1) % size, 0)], self.group)[0]

    def owner(self, step: int) -> int:
        """Whose block is here in a step."""
        return (self.group.index - step) % self.group.size

    def scores(self, query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, step: int) -> torch.Tensor:
        """What the queries make of the block that is here."""
        owner = self.owner(step)
        found = query @ key.to(query.dtype).mT * self.scale
        columns = self.columns(owner)
        if bias is not None:
            found = found + bias[..., columns.clamp(min=0)]
        seen = columns >= 0
        allowed = self.allowed(owner)
        return torch.where(seen if allowed is None else seen & allowed, found, -math.inf)


class RingAttention(torch.autograd.Function):
    """softmax(query @ key.mT * scale + bias) @ value, for keys and values that lie on a ring of processes."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, ring: Ring
    ) -> torch.Tensor:
        high = query.new_full((*query.shape[:-1], 1), -math.inf)
        total, mixed = torch.zeros_like(high), query.new_zeros((*query.shape[:-1], value.shape[-1]))
        block = [key, value]
        for step in range(ring.group.size):
            scores = ring.scores(query, block[0], bias, step)
            highest = torch.maximum(high, scores.amax(-1, keepdim=True))
            base = torch.where(highest == -math.inf, 0, highest)  # nothing seen yet
            kept, weights = (high - base).exp(), (scores - base).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            mixed = mixed * kept + weights @ block[1].to(query.dtype)
            high = highest
            if step + 1 < ring.group.size:
                block = ring.pass_on(block)
        blind = total == 0  # a query that sees no key gives zero, as torch has it
        out = torch.where(blind, 0, mixed / total)
        ctx.save_for_backward(query, key, value, bias, out, torch.where(blind, 0, high + total.log()))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise _once_only()
        query, key, value, bias, out, normal = ctx.saved_tensors
        ring: Ring = ctx.ring
        share = (gradient * out).sum(-1, keepdim=True)
        for_query = torch.zeros_like(query)
        for_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        wide = query.dtype
        block = [key.to(wide), value.to(wide)]
        theirs = [torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)]  # the gradients of the block
        for step in range(ring.group.size):
            weights = (ring.scores(query, block[0], bias, step) - normal).exp()
            theirs[1] += weights.mT @ gradient
            slope = weights * (gradient @ block[1].mT - share)
            if for_bias is not None:
                for_bias.index_add_(-1, ring.columns(ring.owner(step)).clamp(min=0), slope)
            for_query += slope @ block[0] * ring.scale
            theirs[0] += slope.mT @ query * ring.scale
            theirs = ring.pass_on(theirs)
            if step + 1 < ring.group.size:
                block = ring.pass_on(block)
        return for_query, theirs[0].to(key.dtype), theirs[1].to(value.dtype), for_bias, None


def _once_only() -> GradientError:
    """What create_graph meets here; torch's own fused attention refuses it too."""
    return GradientError(
        "attention over a sequence that several processes hold has no second derivative",
        fix="write it out: softmax(query @ key.mT * scale, -1) @ value has one",
    )
