"""The order of elements along a dim that several processes hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.backends.forms.across import Across
from meshloom.comms import wire
from meshloom.comms.gradients import AllGather
from meshloom.engines.torch_engine.order import in_one_piece


def _topk(across: Across, input: torch.Tensor, k: int, dim: int, largest: bool, sorted: bool) -> Any:
    """The best of each process are the only ones that can be the best of all."""
    dim = dim % input.dim()
    counts = [min(k, len(across.held("input", dim, rank))) for rank in across.group.ranks]
    own = across.trimmed("input", input, dim)
    values, spots = torch.topk(own, counts[across.group.index], dim, largest)
    positions = across.positions("input", dim)[across.held("input", dim)]
    indices = torch.empty_like(spots) if spots.is_meta else positions.to(spots.device)[spots]

    def joined(data: torch.Tensor, gather: Callable[..., torch.Tensor]) -> torch.Tensor:
        short = [*data.shape]
        short[dim] = k - data.shape[dim]
        every = gather(torch.cat([data, data.new_zeros(short)], dim), across.group)
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(every, counts, strict=True)], dim)

    best, chosen = torch.topk(joined(values, AllGather.apply), k, dim, largest, sorted)
    return best, joined(indices, wire.all_gather).gather(dim, chosen)


def _searchsorted(across: Across, sorted_sequence: torch.Tensor, input: Any, **options: Any) -> torch.Tensor:
    """How many of the elements that are here come before; such numbers add up."""
    line = across.trimmed("sorted_sequence", sorted_sequence, sorted_sequence.dim() - 1)
    return torch.searchsorted(in_one_piece(line), in_one_piece(input), **options)


def _bucketize(across: Across, input: Any, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    line = across.trimmed("boundaries", boundaries, 0)
    return torch.bucketize(in_one_piece(input), in_one_piece(line), **options)


ORDER: dict[str, Callable[..., Any]] = {"topk": _topk, "searchsorted": _searchsorted, "bucketize": _bucketize}
