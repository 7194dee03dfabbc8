"""Linear algebra on batches: no communication where the batch is sharded, and torch's older names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import Mesh

MESH = Mesh(a=2, b=3)


def batch(*lead: int) -> torch.Tensor:
    """Symmetric positive matrices with distinct eigenvalues."""
    drawn = torch.randn(*lead, 3, 3, generator=torch.Generator().manual_seed(1))
    return drawn @ drawn.mT + torch.diag(torch.arange(1.0, 4.0))


WORKS: dict[str, Callable[[Any], Any]] = {
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "x.inverse": lambda x: x.inverse(),
    "det": torch.det,
    "slogdet": torch.linalg.slogdet,
    "logdet": torch.logdet,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "qr": torch.linalg.qr,
    "complete qr": lambda x: torch.linalg.qr(x[..., :2], "complete"),
    "svd": torch.linalg.svd,
    "thin svd": lambda x: torch.linalg.svd(x[..., :2], full_matrices=False),
    "torch.svd": lambda x: torch.svd(x[..., :2]),
    "eigh": torch.linalg.eigh,
    "eigvalsh": torch.linalg.eigvalsh,
    "solve": lambda x: torch.linalg.solve(x, torch.ones(3, 2)),
    "solve from the right": lambda x: torch.linalg.solve(x, torch.ones(2, 3), left=False),
    "pinv": lambda x: torch.linalg.pinv(x[..., :2]),
    "matrix_power": lambda x: x.matrix_power(3),
    "matrix_rank": torch.linalg.matrix_rank,
}


@pytest.mark.parametrize("placements", ["S(0), R", "S(0), S(1)", "S(0), S(0)"])
@pytest.mark.parametrize("name", WORKS)
def test_a_sharded_batch_is_worked_on_without_communication(name: str, placements: str) -> None:
    dense = batch(5, 4)
    tensor = loom.distribute(dense, MESH, placements)
    with loom.record() as log:
        found = WORKS[name](tensor)
    assert list(log) == [] and log.fallbacks == {}
    expected = WORKS[name](dense)
    assert type(found).__name__ == type(expected).__name__
    pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else zip(found, expected, strict=True)
    for ours, theirs in pairs:
        assert ours.placements == tensor.placements
        torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placements", ["S(1), R", "R, S(2)", "P(sum), S(0)"])
def test_a_matrix_that_is_cut_is_made_whole_first(placements: str) -> None:
    dense = batch(5)
    tensor = loom.distribute(dense, MESH, "R, S(0)").redistribute(placements)
    torch.testing.assert_close(torch.linalg.inv(tensor).to_torch(), torch.linalg.inv(dense), rtol=1e-4, atol=1e-4)


def test_an_empty_batch_stays_empty() -> None:
    empty = loom.zeros(0, 3, 3, mesh=MESH, placements="S(0), R")
    assert torch.linalg.inv(empty).shape == (0, 3, 3) and torch.det(empty).shape == (0,)


def test_a_singular_matrix_is_torchs_error_and_padding_is_not() -> None:
    uneven = loom.distribute(batch(5), MESH, "S(0), S(0)")
    assert uneven.topology.padded
    torch.linalg.inv(uneven)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(loom.zeros(5, 3, 3, mesh=MESH, placements="S(0), S(0)"))


def test_padding_spoils_no_gradient_of_eigenvectors() -> None:
    dense = batch(5).requires_grad_()
    ours = loom.distribute(dense.detach(), MESH, "S(0), S(0)").requires_grad_()
    for x in (dense, ours):
        values, vectors = torch.linalg.eigh(x)
        (values.sum() + (vectors.abs() * torch.arange(3.0)).sum()).backward()
    torch.testing.assert_close(ours.grad.to_torch(), dense.grad, rtol=1e-3, atol=1e-3)


def test_what_is_not_a_square_matrix_is_refused_in_our_words() -> None:
    with pytest.raises(loom.ShapeError, match=r"linalg_inv needs square matrices and got \[2, 3\]"):
        torch.linalg.inv(loom.zeros(2, 3, mesh=MESH))
    with pytest.raises(loom.ShapeError, match="does not go with a right side"):
        torch.linalg.solve(loom.zeros(3, 3, mesh=MESH), torch.ones(2, 2))
    with pytest.raises(loom.ShapeError, match="vectors of 3"):
        torch.linalg.cross(loom.zeros(2, 2, mesh=MESH), loom.zeros(2, 2, mesh=MESH))


def test_arguments_may_have_torchs_names() -> None:
    tensor, right = loom.distribute(batch(4), MESH, "S(0), R"), torch.ones(4, 3, 1)
    found = torch.linalg.solve(A=tensor, B=right)
    torch.testing.assert_close(found.to_torch(), torch.linalg.solve(batch(4), right), rtol=1e-4, atol=1e-4)


COMPLEX: dict[str, Callable[[Any], Any]] = {
    **{name: WORKS[name] for name in ("inv", "det", "slogdet", "cholesky", "pinv", "matrix_power", "matrix_rank")},
    "eigvalsh": torch.linalg.eigvalsh,
    "svdvals": torch.linalg.svdvals,
    "matrix_exp": torch.linalg.matrix_exp,
    "qr": lambda x: torch.linalg.qr(x)[1].abs(),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x)[0],
    "solve": lambda x: torch.linalg.solve(x, x.mT),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x, x.mT, upper=True),
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda x: torch.cholesky_solve(x.mT, x),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_matrices_in_a_padded_batch_equal_dense(name: str) -> None:
    drawn = torch.randn(2, 3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)) / 2
    dense = (drawn @ drawn.mH + torch.diag(torch.arange(1.0, 4.0))).requires_grad_()
    ours = loom.distribute(dense.detach(), Mesh(w=3), "S(0)").requires_grad_()
    found, expected = COMPLEX[name](ours), COMPLEX[name](dense)
    pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else zip(found, expected, strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.detach().to_torch(), theirs.detach(), rtol=1e-4, atol=1e-4)
    if isinstance(expected, torch.Tensor) and expected.requires_grad:
        found.abs().sum().backward(), expected.abs().sum().backward()
        torch.testing.assert_close(ours.grad.to_torch(), dense.grad, rtol=1e-3, atol=1e-3)
