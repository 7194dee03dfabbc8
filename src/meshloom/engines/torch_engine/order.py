"""Putting elements in order."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, shared


def _in_one_piece(value: object) -> Any:
    """torch warns about arrays that it has to copy; one without its padding may be such."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@shared
def _searchsorted(local: Local, sorted_sequence: torch.Tensor, input: object, **options: Any) -> torch.Tensor:
    """How many elements come before. Of those that are here only, such numbers add up."""
    line = local.whole("sorted_sequence", sorted_sequence, sorted_sequence.dim() - 1)
    return torch.searchsorted(_in_one_piece(line), _in_one_piece(input), **options)


@shared
def _bucketize(local: Local, input: object, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.bucketize(_in_one_piece(input), _in_one_piece(local.whole("boundaries", boundaries, 0)), **options)


@shared
def _topk(local: Local, input: torch.Tensor, k: int, dim: int, largest: bool, sorted: bool) -> Any:
    """The best of each peer are the only ones that can be the best of all."""
    peers, dim = local.peers, dim % max(input.dim(), 1)
    own = local.whole("input", input, dim)
    if peers.alone:
        return torch.topk(own, k, dim, largest, sorted)
    counts = [min(k, len(local.held_places("input", dim, rank))) for rank in peers.ranks]
    values, spots = torch.topk(own, counts[peers.index], dim, largest)
    positions = local.positions("input", dim)[local.held_places("input", dim)]
    indices = torch.empty_like(spots) if spots.is_meta else positions.to(spots.device)[spots]

    def join(data: torch.Tensor) -> torch.Tensor:
        short = [*data.shape]
        short[dim] = k - data.shape[dim]
        every = peers.gather(torch.cat([data, data.new_zeros(short)], dim))
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(every, counts, strict=True)], dim)

    best, chosen = torch.topk(join(values), k, dim, largest, sorted)
    return best, join(indices).gather(dim, chosen)


ORDER: dict[str, Function] = {
    "sort": torch.sort,
    "argsort": torch.argsort,
    "topk": _topk,
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
}
