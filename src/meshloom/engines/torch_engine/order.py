"""Putting elements in order."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function


def _in_one_piece(value: Any) -> Any:
    """torch warns about arrays that it has to copy; one without its padding may be such."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _searchsorted(sorted_sequence: torch.Tensor, input: Any, **options: Any) -> torch.Tensor:
    return torch.searchsorted(_in_one_piece(sorted_sequence), _in_one_piece(input), **options)


def _bucketize(input: Any, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.bucketize(_in_one_piece(input), _in_one_piece(boundaries), **options)


ORDER: dict[str, Function] = {
    "sort": torch.sort,
    "argsort": torch.argsort,
    "topk": torch.topk,
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
}
