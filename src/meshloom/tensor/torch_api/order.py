"""Fronts of ops that put elements in order."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.tensor.calling import Overload, table_results


def _msort(input: torch.Tensor) -> Any:
    return table_results("sort", input, 0)[0]


ORDER: dict[str, Overload] = {"msort": _msort}
