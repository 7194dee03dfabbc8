"""Fronts of ops that put elements in order."""

from __future__ import annotations

import torch

from meshloom.tensor.calling import Overload, table_results


def _msort(input: torch.Tensor) -> torch.Tensor:
    return table_results("sort", input, 0)[0]


ORDER: dict[str, Overload] = {"msort": _msort}
