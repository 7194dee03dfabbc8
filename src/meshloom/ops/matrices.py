"""Rules of linear algebra: the last two dims are a matrix and stay whole, the dims before them are a batch.

A batch that is sharded is worked on without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshloom.errors import ShapeError
from meshloom.ops.labels import R, broadcast, carried_placement, normal_dim, others
from meshloom.ops.rule import Call, Choices, Row, Rule, with_none
from meshloom.placement import Placement, Shard
from meshloom.types import Shape

Shapes = Callable[[Call, int, int], Sequence[Shape]]


def batch_rows(operands: Sequence[Shape], batch: Shape, results: int) -> list[Row]:
    """Rows that shard one dim of a batch that the operands broadcast to; `operands` are their batch dims."""
    return [
        Row(f"dim {d}", tuple(carried_placement(own, batch, d) for own in operands), (Shard(d),) * results)
        for d in range(len(batch))
    ]


def matrices(results: Shapes, square: bool = False) -> Rule:
    """The rule of an op on each matrix of a batch; `results` gives what one matrix of m by n becomes."""

    def rule(call: Call) -> Choices:
        shape = call.shape("input")
        if len(shape) < 2 or (square and shape[-1] != shape[-2]):
            raise ShapeError(f"{call.op} needs {'square ' if square else ''}matrices and got {list(shape)}")
        batch, (m, n) = shape[:-2], shape[-2:]
        outs = [batch + each for each in results(call, m, n)]
        # a tolerance may be a tensor, one number per matrix
        lead = [batch if i == call.index("input") else each.shape for i, each in enumerate(call.operands)]
        rows = batch_rows(lead, batch, len(outs)) if broadcast(lead) == batch else []
        return with_none(call, outs, rows, flops=2 * math.prod(shape) * max(min(m, n), 1))

    return rule


def same(call: Call, m: int, n: int) -> Sequence[Shape]:
    """A matrix of the same shape."""
    return [(m, n)]


def number(call: Call, m: int, n: int) -> Sequence[Shape]:
    """One number."""
    return [()]


def sign_and_number(call: Call, m: int, n: int) -> Sequence[Shape]:
    """`slogdet`."""
    return [(), ()]


def values(call: Call, m: int, n: int) -> Sequence[Shape]:
    """Singular values or eigenvalues."""
    return [(min(m, n),)]


def values_and_vectors(call: Call, m: int, n: int) -> Sequence[Shape]:
    """`eigh`."""
    return [(n,), (n, n)]


def swapped(call: Call, m: int, n: int) -> Sequence[Shape]:
    """`pinv`."""
    return [(n, m)]


def qr(call: Call, m: int, n: int) -> Sequence[Shape]:
    """`qr` by its mode."""
    k, mode = min(m, n), call.arguments["mode"]
    known = {"reduced": [(m, k), (k, n)], "complete": [(m, m), (m, n)]}
    if mode not in known:
        raise ShapeError(f"mode {mode!r} of qr is not known", fix="use 'reduced' or 'complete'")
    return known[mode]


def svd(call: Call, m: int, n: int) -> Sequence[Shape]:
    """`svd`: U, S, Vh."""
    k = min(m, n)
    return [(m, m), (k,), (n, n)] if call.arguments["full_matrices"] else [(m, k), (k,), (k, n)]


def has_vectors(call: Call) -> bool:
    """Whether the right sides of `solve` are vectors, by torch's rule on the whole shapes; a chunk may look otherwise.

    A batch of (4, 2, 2) with (2, 2) is one matrix for all; of its chunk (2, 2, 2) torch would say two vectors.
    """
    right = call.shape("other")
    return call.op == "linalg_solve" and (len(right) == 1 or right == call.shape("input")[:-1])


def solve(call: Call) -> Choices:
    """`solve`, `solve_triangular`, `cholesky_solve`: a batch of matrices with a batch of right sides, broadcast."""
    matrix, right = call.shape("input"), call.shape("other")
    if len(matrix) < 2 or matrix[-1] != matrix[-2]:
        raise ShapeError(f"{call.op} needs square matrices and got {list(matrix)}")
    vectors, left = has_vectors(call), bool(call.arguments.get("left", True))
    tail = 1 if vectors else 2
    if len(right) < tail or right[-2 if left and not vectors else -1] != matrix[-1]:
        raise ShapeError(f"{call.op} of {list(matrix)} does not go with a right side of {list(right)}")
    pair = [matrix[:-2], right[: len(right) - tail]]
    batch = broadcast(pair)
    rows = [Row(row.label, _in_order(call, row.ins), row.outs) for row in batch_rows(pair, batch, 1)]
    out = batch + right[len(right) - tail :]
    return with_none(call, [out], rows, flops=2 * math.prod(out) * matrix[-1])


def _in_order(call: Call, ins: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of (input, other) as the operands stand."""
    found: list[Placement] = [R] * len(call.operands)
    found[call.index("input")], found[call.index("other")] = ins
    return tuple(found)


def cross(call: Call) -> Choices:
    """The cross product along a dim of size 3: any other dim may be sharded; linear in both."""
    shapes = [call.shape("input"), call.shape("other")]
    out = broadcast(shapes)
    dim = normal_dim(-1 if call.arguments["dim"] is None else call.arguments["dim"], len(out))
    if not out or out[dim] != 3 or any(len(shape) != len(out) or shape[dim] != 3 for shape in shapes):
        raise ShapeError(f"cross needs vectors of 3 along dim {dim} and got {list(shapes[0])} and {list(shapes[1])}")
    rows = [
        Row(f"dim {d}", tuple(carried_placement(shape, out, d) for shape in shapes), (Shard(d),))
        for d in others(len(out), dim)
    ]
    return with_none(call, [out], rows, flops=3 * math.prod(out))
