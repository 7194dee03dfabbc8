"""Partial rows are offered only where their identity holds for every value of the dtype: dense's result, always."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom.ops import CONDITIONS, OPS, Call, Ref, holds
from meshloom.placement import Topology

INF = math.inf
MESH = loom.open_mesh((2,))


def whole(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def made_partial(values: Any, op: str = "sum") -> loom.Tensor:
    """R -> P: one device has the value, the others what does not change it."""
    return loom.distribute(values, MESH, "R").redistribute(f"P({op})")


def parts(values: Any, op: str, dtype: torch.dtype) -> loom.Tensor:
    """One part per device."""
    return loom.from_local(torch.tensor(values, dtype=dtype), MESH, f"P({op})")


def check_as_dense(run: Callable[..., Any], *operands: loom.Tensor, output: str = "P(sum)", **options: Any) -> None:
    """A call that asks for a partial result has dense's values, dtype and signs of zero."""
    expected = run(*(each.to_torch() for each in operands), **options)
    with loom.with_output(output):
        found = run(*operands, **options)
    assert str(found.placements[0]) == output
    torch.testing.assert_close(found.to_torch(), expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(found.to_torch()[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.int64])
@pytest.mark.parametrize("scales", [{"alpha": 0.6, "beta": 0.2}, {"alpha": 2.6}, {"beta": -1.4}])
def test_fractional_scales_of_integers_are_cut_as_dense_cuts_them(dtype: torch.dtype, scales: dict[str, float]) -> None:
    one = lambda *shape: torch.ones(shape, dtype=dtype)  # noqa: E731
    left, right = loom.distribute(one(2, 4), MESH, "S(1)"), loom.distribute(one(4), MESH, "S(0)")
    bias = made_partial(one(2))
    expected = torch.addmv(one(2), one(2, 4), one(4), **scales)
    found = torch.addmv(bias, left, right, **scales)
    assert found.dtype == dtype and torch.equal(found.to_torch(), expected)
    check_as_dense(torch.addmv, bias, left, right, **scales)
    check_as_dense(torch.addmm, made_partial(one(2, 2)), left, loom.distribute(one(4, 2), MESH, "S(0)"), **scales)
    check_as_dense(torch.addmm, made_partial(one(2, 2)), made_partial(one(2, 2)), made_partial(one(2, 2)), **scales)


WIDENING: dict[str, Callable[..., Any]] = {
    "div": lambda x: x / 2,
    "sum": lambda x: x.sum(),
    "sum to i16": lambda x: x.sum(dtype=torch.int16),
    "mean": lambda x: x.mean(dtype=torch.float32),
    "cumsum": lambda x: x.cumsum(0),
    "mul by a float": lambda x: x * 1.5,
    "add i64": lambda x: x + x.to(torch.int64),
    "mul i64": lambda x: x * x.to(torch.int64),
    "deg2rad": torch.deg2rad,
    "einsum": lambda x: torch.einsum("i->", x),
    "cat": lambda x: torch.cat([x, x.to(torch.int64)]),
    "where": lambda x: torch.where(torch.tensor([True, False]), x, x.to(torch.int64)),
}


@pytest.mark.parametrize("name", WIDENING)
def test_an_integer_sum_that_wraps_is_not_widened_part_by_part(name: str) -> None:
    check_as_dense(WIDENING[name], parts([[100, 3], [100, 4]], "sum", torch.int8))


def test_an_integer_sum_that_wraps_is_not_added_part_by_part_to_a_sum_of_floats() -> None:
    floats = parts([[0.5], [0.25]], "sum", torch.float64)
    check_as_dense(torch.add, floats, parts([[100], [100]], "sum", torch.int8))


def test_a_sum_of_products_of_bytes_stays_a_sum_of_bytes() -> None:
    ones = [
        loom.distribute(torch.ones(shape, dtype=torch.uint8), MESH, "R") for shape in ((2, 2), (3, 2, 4), (3, 4, 2))
    ]
    check_as_dense(torch.addbmm, *ones)


def test_a_half_sum_that_overflows_is_not_widened_part_by_part() -> None:
    x = parts([[60000.0], [60000.0]], "sum", torch.float16)
    check_as_dense(lambda x: x.sum(dtype=torch.float32), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
@pytest.mark.parametrize(("given", "asked"), [("max", "P(min)"), ("min", "P(max)")])
def test_the_opposite_of_integers_keeps_no_order(dtype: torch.dtype, given: str, asked: str) -> None:
    info = torch.iinfo(dtype)
    check_as_dense(torch.neg, parts([[5, info.min], [info.min, info.max]], given, dtype), output=asked)


@pytest.mark.parametrize(("given", "asked"), [("max", "P(min)"), ("min", "P(max)")])
def test_the_opposite_of_a_largest_float_is_a_smallest_without_communication(given: str, asked: str) -> None:
    x = parts([[5.0, -INF, math.nan], [2.0, INF, 1.0]], given, torch.float32)
    with loom.communication("forbid"):
        loom.neg(x, output=asked)
    check_as_dense(torch.neg, x, output=asked)


SCALED: dict[str, Callable[[loom.Tensor], Any]] = {
    "mul inf": lambda x: x * INF,
    "mul a tensor": lambda x: x * whole([INF, -INF, 1.0]),
    "reflected mul": lambda x: whole([INF, -INF, 1.0]) * x,
    "mul what float32 cannot hold": lambda x: x * 1e300,
    "mul -1": lambda x: x * -1,
    "mul 0": lambda x: x * 0,
    "div 0.": lambda x: x / 0.0,
    "div -0.": lambda x: x / -0.0,
    "div what float32 cannot hold": lambda x: x / 1e-300,
    "div a tensor": lambda x: x / whole([0.0, -0.0, 1.0]),
    "matmul": lambda x: x @ whole([[INF, 1.0], [-INF, 1.0], [1.0, INF]]),
    "outer": lambda x: torch.outer(x, whole([INF, 1.0])),
    "linear": lambda x: F.linear(x, whole([[INF, 1.0, -INF]])),
    "einsum": lambda x: torch.einsum("i,i->i", x, whole([INF, 1.0, -INF])),
    "conv1d": lambda x: F.conv1d(x.view(1, 1, 3), whole([[[INF]]])),
    "ldexp": lambda x: torch.ldexp(x, torch.tensor([200, 1, 1])),
    "neg": torch.neg,
    "sub": lambda x: x - x.abs(),
    "add with alpha": lambda x: torch.add(x, x, alpha=-1),
    "addmm": lambda x: torch.addmm(x.view(3, 1), x.view(3, 1), whole([[1.0]]), beta=INF),
    "in place": lambda x: x.clone().mul_(INF),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("values", [[1.0, -2.0, 3.0], [0.0, -0.0, 5.0], [INF, -INF, math.nan]])
def test_a_sum_is_not_scaled_part_by_part_where_a_part_may_give_nan_or_lose_its_sign(name: str, values: Any) -> None:
    check_as_dense(SCALED[name], made_partial(whole(values)))


@pytest.mark.parametrize("number", [2, 0.5, 3.0])
def test_a_sum_scaled_by_a_positive_number_stays_a_sum_without_communication(number: float) -> None:
    x = made_partial(whole([1.0, -0.0, INF]))
    for run in (lambda x: x * number, lambda x: x / number, lambda x: torch.add(x, x, alpha=number)):
        with loom.communication("forbid"), loom.with_output("P(sum)"):
            run(x)
        check_as_dense(run, x)


def test_a_number_seen_before_does_not_decide_for_another() -> None:
    x = made_partial(whole([1.0, 2.0]))
    for number in (2.0, INF, 0.5, -1.0, 0.0, 2.0):
        check_as_dense(lambda x, by=number: x * by, x)


def test_integer_products_carry_sums_without_communication() -> None:
    x = parts([[100, -128], [100, 127]], "sum", torch.int8)
    b = loom.distribute(torch.tensor([[127, 2], [3, -128]], dtype=torch.int8), MESH, "R")
    line = b[0]
    for run in (lambda x: x @ b, lambda x: x * line, torch.neg, lambda x: x - x):
        with loom.communication("forbid"), loom.with_output("P(sum)"):
            run(x)
    check_as_dense(lambda x: x @ b.to_torch(), x)


def test_a_row_that_is_chosen_by_name_must_hold() -> None:
    x, b = made_partial(whole([1.0])), loom.distribute(whole([[1.0]]), MESH, "R")
    with pytest.raises(loom.ArgumentError, match="row 'P\\(sum\\)' does not fit this call"), loom.choose(x0="P(sum)"):
        x @ b


def test_explain_says_why_a_row_is_not_offered() -> None:
    x, b = made_partial(whole([1.0])), loom.distribute(whole([[1.0]]), MESH, "R")
    text = str(loom.explain(lambda: loom.matmul(x, b, output="P(sum)")))
    assert CONDITIONS["whole"].meaning in text


def test_every_condition_of_the_table_is_known_and_used() -> None:
    operands = tuple(Topology(MESH, (loom.Replicate(),), (2, 2), "f32") for _ in range(2))
    seen = set()
    for op in OPS.values():
        if op.signature is None:
            for count in (1, 2):
                call = Call(op.name, operands[:count], {}, tuple(Ref(i) for i in range(count)))
                seen |= {row.when for row in op.rule(call).rows}
    assert seen - {""} == set(CONDITIONS)
    assert all(isinstance(holds(OPS["add"], call, row), bool) for row in OPS["add"].rule(call).rows)
