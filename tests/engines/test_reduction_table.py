"""The table of reductions: every column says the same of each line."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

import meshloom as loom
from meshloom.engines.reductions import LONG, PANEL, REDUCTIONS, number
from meshloom.errors import DTypeError
from meshloom.placement import IDENTITY, PARTIAL_OPS

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]
CASES = [
    (op, dtype)
    for op in REDUCTIONS
    for dtype in DTYPES
    if not (dtype == torch.bool and op in ("sum", "mean", "prod"))
    if dtype.is_floating_point or op != "mean"
]


def parts(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[1, 2, 0, -3], [2, 2, 0, 1], [1, -1, 1, 2]]).to(dtype)


def test_the_table_has_a_line_for_every_partial_placement():
    assert tuple(REDUCTIONS) == PARTIAL_OPS == tuple(IDENTITY)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_all_along_a_dim_combine_as_two_after_two_do(op, dtype):
    line, x = REDUCTIONS[op], parts(dtype)
    expected = reduce(line.combine, x)
    expected = expected / len(x) if op == "mean" else expected
    into = torch.empty_like(x[0])
    for found in (line.along(x, 0), line.quickly(x), line.quickly(x, into), into, line.along(x.T, 1)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_identity_and_what_is_neutral_change_nothing(op, dtype):
    line, x = REDUCTIONS[op], parts(dtype)
    filled = torch.full_like(x, number(IDENTITY[op], dtype))
    assert torch.equal(line.combine(x, filled), x)
    if line.neutral is not None:
        assert torch.equal(line.combine(x, line.neutral(x)), x)
    elif op != "mean":
        assert torch.equal(line.combine(x, x), x)


@pytest.mark.parametrize("elements", [LONG, PANEL, PANEL + 5, 2 * PANEL + LONG])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_long_parts_add_up_one_by_one_with_and_without_a_gradient(rows, elements):
    line, x = REDUCTIONS["sum"], torch.randn(rows, elements, dtype=torch.float64)
    expected, into, apart = reduce(torch.add, x), torch.empty(elements).double(), torch.empty(elements, 2).double()
    for found in (line.along(x, 0), line.quickly(x), line.quickly(x, into), into):
        assert torch.equal(found, expected)
    torch.testing.assert_close(line.quickly(x, apart[:, 1]), expected)
    torch.testing.assert_close(line.along(x.T.contiguous(), 1), expected)
    x.requires_grad_()
    for function in (line.quickly, lambda each: line.along(each, 0)):
        found = function(x)
        assert torch.equal(found, expected)
        (gradient,) = torch.autograd.grad(found, x, expected, create_graph=True)
        assert torch.equal(gradient, expected.expand(rows, -1))


def test_long_parts_in_half_are_rounded_once():
    x = torch.ones(300, LONG, dtype=torch.bfloat16)
    assert torch.equal(REDUCTIONS["sum"].quickly(x), torch.full((LONG,), 300.0, dtype=torch.bfloat16))


def test_a_collective_of_long_parts_equals_dense():
    mesh = loom.open_mesh((5,))
    x = torch.randn(5 * (PANEL + 10), dtype=torch.float64)
    given = loom.distribute(x, mesh, "S(0)")
    expected = x.view(5, -1).sum(0)
    torch.testing.assert_close(loom.collectives.all_reduce(given).to_torch(), expected)
    torch.testing.assert_close(loom.collectives.reduce_scatter(given, 0).to_torch(), expected)
    partial = loom.from_local([*x.view(5, -1)], mesh, "P(sum)")
    torch.testing.assert_close(partial.redistribute("R").to_torch(), expected)


def test_complex_numbers_have_no_ends():
    with pytest.raises(DTypeError, match="c64 has no order"):
        number("lowest", torch.complex64)
