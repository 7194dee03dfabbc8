"""Putting elements in order."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function


def _searchsorted(sorted_sequence: torch.Tensor, input: Any, **options: Any) -> torch.Tensor:
    return torch.searchsorted(sorted_sequence, input, **options)


ORDER: dict[str, Function] = {
    "sort": torch.sort,
    "argsort": torch.argsort,
    "topk": torch.topk,
    "searchsorted": _searchsorted,
    "bucketize": torch.bucketize,
}
