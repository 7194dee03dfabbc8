"""Fronts of ops that put elements in order, and torch's names for what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.tensor.calling import Front, table_call
from meshloom.tensor.entries import PACKED


def _packed(kind: type) -> Callable[[list[Any]], Any]:
    return lambda results: kind(tuple(results))


PACKED.update(
    {
        name: _packed(getattr(torch.return_types, name))
        for name in "sort topk linalg_slogdet linalg_qr linalg_svd linalg_eigh".split()
    }
)


def _msort(input: Any) -> Any:
    return table_call("sort", input, 0).values


ORDER: dict[str, Front] = {"msort": _msort}
