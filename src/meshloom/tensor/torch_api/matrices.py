"""Fronts of linear algebra: torch's older names for ops of `torch.linalg`."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.errors import ShapeError
from meshloom.tensor.calling import Overload, table_call, table_results
from meshloom.tensor.fallback import fallback


def _cholesky(input: torch.Tensor, upper: bool = False, **kwargs: object) -> torch.Tensor:
    return table_call("linalg_cholesky", input, upper=upper, **kwargs)


def _cholesky_solve(input: torch.Tensor, input2: object, upper: bool = False, **kwargs: object) -> torch.Tensor:
    return table_call("cholesky_solve", input, input2, upper, **kwargs)


def _linalg_qr(A: torch.Tensor, mode: str = "reduced", **kwargs: object) -> Any:
    if mode == "r":  # Q is a single empty tensor, whatever the batch
        return fallback(torch.linalg.qr, (A, mode), kwargs, "linalg_qr")
    return table_results("linalg_qr", A, mode, **kwargs)


def _qr(input: torch.Tensor, some: bool = True) -> tuple[torch.Tensor, ...]:
    q, r = table_results("linalg_qr", input, "reduced" if some else "complete")
    return torch.return_types.qr((q, r))


def _svd(input: torch.Tensor, some: bool = True, compute_uv: bool = True) -> Any:
    """torch.svd gives V and not its transpose."""
    if not compute_uv:
        return fallback(torch.svd, (input, some, compute_uv), {}, "svd")
    u, s, vh = table_results("linalg_svd", input, not some)
    return torch.return_types.svd((u, s, table_call("transpose", vh, -2, -1)))


def _pinverse(input: torch.Tensor, rcond: float = 1e-15) -> torch.Tensor:
    return table_call("linalg_pinv", input, rtol=rcond, atol=0.0)


def _cross(input: torch.Tensor, other: object, dim: int | None = None, **kwargs: object) -> torch.Tensor:
    """Without a dim: the first of size 3."""
    if dim is None:
        sizes = list(input.shape)
        if 3 not in sizes:
            raise ShapeError(f"cross needs a dim of size 3 and {sizes} has none")
        dim = sizes.index(3)
    return table_call("linalg_cross", input, other, dim=dim, **kwargs)


MATRICES: dict[str, Overload] = {
    "cholesky": _cholesky,
    "cholesky_solve": _cholesky_solve,
    "linalg_qr": _linalg_qr,
    "qr": _qr,
    "svd": _svd,
    "pinverse": _pinverse,
    "cross": _cross,
}
