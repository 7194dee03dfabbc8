"""Samples of linear algebra on batches; of empty ones torch itself gives gradients with a warning about strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samples.drawing import Case, Draw, Operand, Sample


def square(function: Callable[..., Any], values: str = "regular") -> Sample:
    """A function of square matrices."""

    def sample(d: Draw) -> Case:
        n = d.number(1, 4)
        return Case((Operand((*d.shape(0, 2, empty=False), n, n), torch.float32, values),), function)

    return sample


def wide(function: Callable[..., Any]) -> Sample:
    """A function of matrices of any shape."""

    def sample(d: Draw) -> Case:
        shape = (*d.shape(0, 2, empty=False), d.number(1, 4), d.number(1, 4))
        return Case((Operand(shape, torch.float32, "regular"),), function)

    return sample


def tall(function: Callable[..., Any]) -> Sample:
    """A function of matrices with as many rows as columns, or more: for qr, the others have no gradient."""

    def sample(d: Draw) -> Case:
        n = d.number(1, 3)
        return Case(
            (Operand((*d.shape(0, 2, empty=False), n + d.number(0, 2), n), torch.float32, "regular"),), function
        )

    return sample


def solve(d: Draw) -> Case:
    batch, n, left = d.shape(0, 2, empty=False), d.number(1, 4), d.yes()
    matrix = Operand((*batch, n, n), torch.float32, "regular")
    if d.number(0, 3) == 0:
        return Case((matrix, Operand((*batch, n), torch.float32)), torch.linalg.solve)
    tail = (n, d.number(1, 3)) if left else (d.number(1, 3), n)
    shape = (*d.broadcast_to(batch), *tail)
    if shape == (*batch, n):  # torch takes it for a batch of vectors
        shape = (*batch, *tail)
    other = Operand(shape, torch.float32)
    return Case((matrix, other), lambda a, b: torch.linalg.solve(a, b, left=left))


def solve_triangular(d: Draw) -> Case:
    batch, n, upper = d.shape(0, 2, empty=False), d.number(1, 4), d.yes()
    matrix = Operand((*batch, n, n), torch.float32, "regular")
    other = Operand((*d.broadcast_to(batch), n, d.number(1, 3)), torch.float32)
    return Case((matrix, other), lambda a, b: torch.linalg.solve_triangular(a, b, upper=upper))


def cholesky_solve(d: Draw) -> Case:
    batch, n, upper = d.shape(0, 2, empty=False), d.number(1, 4), d.yes()
    matrix = Operand((*batch, n, n), torch.float32, "regular")
    other = Operand((*batch, n, d.number(1, 3)), torch.float32)
    return Case((other, matrix), lambda b, a: torch.cholesky_solve(b, a, upper))


def cross(d: Draw) -> Case:
    shape = d.shape(0, 2, empty=False)
    place = d.number(0, len(shape))
    full = (*shape[:place], 3, *shape[place:])
    other = tuple(1 if size != 3 and d.number(0, 3) == 0 else size for size in full)
    dim = d.pick((place, place - len(full)))
    operands = (Operand(full, torch.float32), Operand(other, torch.float32))
    return Case(operands, lambda a, b: torch.linalg.cross(a, b, dim=dim))


def power(d: Draw) -> Case:
    n = d.pick((-2, -1, 0, 1, 2, 3))
    return square(lambda x: torch.linalg.matrix_power(x, n))(d)


def rooted(function: Callable[..., Any]) -> Sample:
    """`upper=` either way."""

    def sample(d: Draw) -> Case:
        upper = d.yes()
        return square(lambda x: function(x, upper=upper), "definite")(d)

    return sample


MATRICES: dict[str, Sample] = {
    "linalg_inv": square(torch.linalg.inv),
    "linalg_pinv": tall(torch.linalg.pinv),
    "linalg_det": square(torch.linalg.det),
    "linalg_slogdet": square(torch.linalg.slogdet),
    "logdet": square(torch.logdet, "definite"),
    "linalg_matrix_rank": wide(torch.linalg.matrix_rank),
    "linalg_matrix_power": power,
    "linalg_matrix_exp": square(torch.linalg.matrix_exp, "small"),
    "linalg_cholesky": rooted(torch.linalg.cholesky),
    "cholesky_inverse": rooted(torch.cholesky_inverse),
    "linalg_qr": tall(torch.linalg.qr),
    "linalg_svd": wide(lambda x: torch.linalg.svd(x, full_matrices=False)),
    "linalg_svdvals": wide(torch.linalg.svdvals),
    "linalg_eigh": square(torch.linalg.eigh, "definite"),
    "linalg_eigvalsh": square(torch.linalg.eigvalsh, "definite"),
    "linalg_solve": solve,
    "linalg_solve_triangular": solve_triangular,
    "cholesky_solve": cholesky_solve,
    "linalg_cross": cross,
}
