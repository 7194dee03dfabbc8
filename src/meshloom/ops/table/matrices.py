"""Linear algebra on batches of matrices. The engine puts regular matrices in place of padding."""

from __future__ import annotations

from meshloom.ops import matrices
from meshloom.ops.matrices import matrices as each
from meshloom.ops.rule import Op

_TOLERANCES = "input, *, atol=None, rtol=None, hermitian=False"

MATRICES: tuple[Op, ...] = (
    Op("linalg_inv", each(matrices.same, square=True), "input", "finite"),
    Op("linalg_pinv", each(matrices.swapped), _TOLERANCES, "finite"),
    Op("linalg_det", each(matrices.number, square=True), "input", "finite"),
    Op("linalg_slogdet", each(matrices.sign_and_number, square=True), "input", "finite"),
    Op("logdet", each(matrices.number, square=True), "input", "finite"),
    Op("linalg_matrix_rank", each(matrices.number), _TOLERANCES, "finite", result="i64"),
    Op("linalg_matrix_power", each(matrices.same, square=True), "input, n", "finite"),
    Op("linalg_matrix_exp", each(matrices.same, square=True), "input", "finite"),
    Op("linalg_cholesky", each(matrices.same, square=True), "input, *, upper=False", "finite"),
    Op("cholesky_inverse", each(matrices.same, square=True), "input, upper=False", "finite"),
    Op("linalg_qr", each(matrices.qr), "input, mode='reduced'", "finite"),
    Op("linalg_svd", each(matrices.svd), "input, full_matrices=True, *, driver=None", "finite"),
    Op("linalg_svdvals", each(matrices.values), "input, *, driver=None", "finite"),
    Op("linalg_eigh", each(matrices.values_and_vectors, square=True), "input, UPLO='L'", "finite"),
    Op("linalg_eigvalsh", each(matrices.values, square=True), "input, UPLO='L'", "finite"),
    Op("linalg_solve", matrices.solve, "input, other, *, left=True", "finite"),
    Op(
        "linalg_solve_triangular",
        matrices.solve,
        "input, other, *, upper, left=True, unitriangular=False",
        "finite",
        result="input",
    ),
    Op("cholesky_solve", matrices.solve, "other, input, upper=False", "finite"),
    Op("linalg_cross", matrices.cross, "input, other, *, dim=-1"),
)
