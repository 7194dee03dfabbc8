"""Scans. Along a dim that peers hold parts of, each scans its chunks and learns the totals of the chunks before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, shared, wide_dtype

Totals = Callable[[torch.Tensor], torch.Tensor]


class Chunks:
    """The chunks of a dim: those that are here, and which come before each of them.

    A process need not hold neighbours: of a dim that two axes shard, the second one may be the one that is split.
    """

    def __init__(self, local: Local, dim: int) -> None:
        self.dim, self.peers = dim, local.peers
        topology, ranks = local.topology("input"), local.peers.ranks
        self.size = topology.local_shape[dim]
        starts = torch.stack([local.positions("input", dim, rank).view(-1, self.size)[:, 0] for rank in ranks])
        self.here = starts.shape[1]
        starts = torch.where(starts < 0, topology.shape[dim], starts).flatten()  # chunks of padding come last
        self.order = torch.argsort(starts, stable=True)
        self.places = torch.argsort(self.order).view(len(ranks), -1)[local.peers.index]

    def split(self, data: torch.Tensor) -> torch.Tensor:
        """The dim as chunks and what is in a chunk: (..., here, size, ...)."""
        chunks: torch.Tensor = data.unflatten(self.dim, (self.here, self.size))
        return chunks

    def before(self, totals: torch.Tensor, nothing: float, scan: Totals) -> torch.Tensor:
        """For each chunk here what the scan makes of the totals of all before it, from totals (..., here, ...)."""
        every = self.peers.share(self.peers.gather(totals))
        line = every.movedim(0, self.dim).flatten(self.dim, self.dim + 1).index_select(self.dim, self.order)
        first = torch.full_like(line.narrow(self.dim, 0, 1), nothing)
        past = torch.cat([first, line.narrow(self.dim, 0, line.shape[self.dim] - 1)], self.dim)
        return scan(past).index_select(self.dim, self.places).unsqueeze(self.dim + 1)


def _chunks(local: Local, dim: int) -> Chunks:
    found: Chunks = local.once("chunks", lambda: Chunks(local, dim))
    return found


def _scan(function: Callable[..., torch.Tensor], nothing: float, combine: Callable[..., torch.Tensor]) -> Function:
    """A scan whose padding holds what changes no total, so that the last of a chunk is its total."""

    @shared
    def run(local: Local, input: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        if local.peers.alone or input.numel() == 0:
            return function(input, dim, **options)
        kept = options.get("dtype") or input.dtype
        if wide_dtype(kept) != kept:  # rounded once, at the end
            return run(local, input.to(wide_dtype(kept)), dim, **dict.fromkeys(options)).to(kept)
        dim = dim % input.dim()
        chunks = _chunks(local, dim)
        own = function(chunks.split(input), dim + 1, **options)
        past = chunks.before(own.select(dim + 1, -1), nothing, lambda line: function(line, dim, dtype=line.dtype))
        mask = local.mask(input, (dim,))
        if mask is not None:  # what becomes of padding has no gradient, of any order
            own = torch.where(mask.unflatten(0, (chunks.here, chunks.size)), own, 0)
        return combine(own, past).flatten(dim, dim + 1)

    return run


def _logcumsumexp(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.logcumsumexp(input, dim)


def _logaddexp(own: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """Nothing before adds nothing, and has no gradient."""
    none = past == -math.inf
    return torch.where(none, own, torch.logaddexp(own, torch.where(none, 0, past)))


def _extreme_scan(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], better: Callable[..., torch.Tensor]
) -> Function:
    """Of equal elements the last one counts, and nan beats all. An index counts elements, so padding is taken off."""

    @shared
    def run(local: Local, input: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        if not input.dim():
            return tuple(function(input, 0))
        dim = dim % input.dim()
        if local.peers.alone:
            found = function(local.trim("input", input, dim), dim)
            return tuple(local.pad_like("input", each, dim) for each in found)
        if input.numel() == 0:
            return tuple(function(input, dim))
        chunks = _chunks(local, dim)
        positions = local.positions("input", dim).view(chunks.here, chunks.size).to(input.device)
        values, spots = function(chunks.split(input), dim + 1)
        line = positions.view(chunks.here, chunks.size, *(1,) * (input.dim() - dim - 1)).expand_as(values)
        indices = line.gather(dim + 1, spots)
        # the total of a chunk is at its last element; a chunk of padding comes after all others and is nobody's past
        last = ((positions >= 0).sum(1) - 1).clamp(min=0)
        last = last.view(-1, 1, *(1,) * (input.dim() - dim - 1)).expand_as(values.narrow(dim + 1, 0, 1))
        best, where = (each.gather(dim + 1, last).squeeze(dim + 1) for each in (values, indices))
        past, at = _past(chunks, best, where, function, dim)
        start = (chunks.places == 0).view(-1, 1, *(1,) * (input.dim() - dim - 1)).to(input.device)
        mine = better(values, past) | values.isnan() | start
        values, indices = torch.where(mine, values, past), torch.where(mine, indices, at)
        return values.flatten(dim, dim + 1), indices.flatten(dim, dim + 1)

    return run


def _past(
    chunks: Chunks,
    best: torch.Tensor,
    where: torch.Tensor,
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best value before each chunk, and its index."""
    spots: list[torch.Tensor] = []

    def values_of(line: torch.Tensor) -> torch.Tensor:
        # the first has nobody before it: what stands there is not looked at
        found, chosen = function(line.narrow(dim, 1, line.shape[dim] - 1), dim)
        spots.append(chosen)
        return torch.cat([line.narrow(dim, 0, 1), found], dim)

    def indices_of(line: torch.Tensor) -> torch.Tensor:
        rest = line.narrow(dim, 1, line.shape[dim] - 1)
        return torch.cat([line.narrow(dim, 0, 1), rest.gather(dim, spots[0])], dim)

    return chunks.before(best, 0, values_of), chunks.before(where, 0, indices_of)


SCANS: dict[str, Function] = {
    "cumsum": _scan(torch.cumsum, 0, torch.add),
    "cumprod": _scan(torch.cumprod, 1, torch.mul),
    "logcumsumexp": _scan(_logcumsumexp, -math.inf, _logaddexp),
    "cummax": _extreme_scan(torch.cummax, torch.ge),
    "cummin": _extreme_scan(torch.cummin, torch.le),
}
