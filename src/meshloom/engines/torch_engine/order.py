"""Putting elements in order."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, aware


def in_one_piece(value: Any) -> Any:
    """torch warns about arrays that it has to copy; one without its padding may be such."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@aware
def _searchsorted(local: Local, sorted_sequence: torch.Tensor, input: Any, **options: Any) -> torch.Tensor:
    line = local.whole("sorted_sequence", sorted_sequence, sorted_sequence.dim() - 1)
    return torch.searchsorted(in_one_piece(line), in_one_piece(input), **options)


@aware
def _bucketize(local: Local, input: Any, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.bucketize(in_one_piece(input), in_one_piece(local.whole("boundaries", boundaries, 0)), **options)


@aware
def _topk(local: Local, input: torch.Tensor, k: int, dim: int, **options: Any) -> Any:
    return torch.topk(local.whole("input", input, dim % max(input.dim(), 1)), k, dim, **options)


ORDER: dict[str, Function] = {
    "sort": torch.sort,
    "argsort": torch.argsort,
    "topk": _topk,
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
}
