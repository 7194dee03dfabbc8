"""Linear algebra: torch takes batches by itself. Where a batch is padded, its zero matrices become regular ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, aware
from meshloom.ops.matrices import has_vectors


def _regular(local: Local, input: torch.Tensor) -> torch.Tensor:
    """The batch with diag(1, 2, ...) for padding: invertible, definite, with distinct eigenvalues."""
    mask = local.mask(input, tuple(range(input.dim() - 2)))
    if mask is None:
        return input
    m, n = input.shape[-2:]
    steps = torch.arange(1, min(m, n) + 1, device=input.device)  # complex ones too: the copy casts
    filler = input.new_zeros(m, n)
    filler.diagonal().copy_(steps)
    return torch.where(mask, input, filler)


def _each(function: Function) -> Function:
    """A function of one matrix."""

    @aware
    def run(local: Local, input: torch.Tensor, **options: object) -> Any:
        return function(_regular(local, input), **options)

    return run


def _pair(function: Function) -> Function:
    """A function of a matrix and a right side."""

    @aware
    def run(local: Local, input: torch.Tensor, other: torch.Tensor, **options: object) -> Any:
        return function(_regular(local, input), other, **options)

    return run


_SOLVE: Callable[..., torch.Tensor] = torch.linalg.solve


@aware
def _solve(local: Local, input: torch.Tensor, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Matrices on the right get as many dims as there are on the left, so that none is taken for a vector."""
    matrix = _regular(local, input)
    if has_vectors(local.call):
        return _SOLVE(matrix, other.unsqueeze(-1), left=left).squeeze(-1)
    missing = max(matrix.dim() - other.dim(), 0)
    return _SOLVE(matrix, other[(None,) * missing], left=left)


def _cholesky_solve(input: torch.Tensor, other: torch.Tensor, upper: bool) -> torch.Tensor:
    return torch.cholesky_solve(other, input, upper)


MATRICES: dict[str, Function] = {
    "linalg_inv": _each(torch.linalg.inv),
    "linalg_pinv": _each(torch.linalg.pinv),
    "linalg_det": _each(torch.linalg.det),
    "linalg_slogdet": _each(torch.linalg.slogdet),
    "logdet": _each(torch.logdet),
    "linalg_matrix_rank": _each(torch.linalg.matrix_rank),
    "linalg_matrix_power": _each(torch.linalg.matrix_power),
    "linalg_matrix_exp": _each(torch.linalg.matrix_exp),
    "linalg_cholesky": _each(torch.linalg.cholesky),
    "cholesky_inverse": _each(torch.cholesky_inverse),
    "linalg_qr": _each(torch.linalg.qr),
    "linalg_svd": _each(torch.linalg.svd),
    "linalg_svdvals": _each(torch.linalg.svdvals),
    "linalg_eigh": _each(torch.linalg.eigh),
    "linalg_eigvalsh": _each(torch.linalg.eigvalsh),
    "linalg_solve": _solve,
    "linalg_solve_triangular": _pair(torch.linalg.solve_triangular),
    "cholesky_solve": _pair(_cholesky_solve),
    "linalg_cross": lambda input, other, dim: torch.linalg.cross(input, other, dim=dim),
}
