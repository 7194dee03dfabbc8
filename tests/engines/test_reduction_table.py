"""The table of reductions: every column says the same of each line."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from meshloom.engines.reductions import REDUCTIONS, number
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


def test_complex_numbers_have_no_ends():
    with pytest.raises(DTypeError, match="c64 has no order"):
        number("lowest", torch.complex64)
