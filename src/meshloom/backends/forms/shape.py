"""Triangles of matrices whose rows or columns several processes hold: each knows where its elements stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.backends.forms.across import Across


def _triangle(lower: bool) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, diagonal: int) -> torch.Tensor:
        rows, columns = (across.positions("input", input.dim() - back).to(input.device) for back in (2, 1))
        offset = columns - rows.unsqueeze(-1)
        return input.masked_fill(offset > diagonal if lower else offset < diagonal, 0)

    return form


SHAPE: dict[str, Callable[..., Any]] = {"tril": _triangle(True), "triu": _triangle(False)}
