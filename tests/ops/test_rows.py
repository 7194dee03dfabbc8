"""Every row of every rule, run on separate devices; and the oracles' own tests: each planted fault must be caught."""

from __future__ import annotations

import builtins
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from devices import (
    check_form,
    check_identity,
    check_row,
    describe,
    draw_seed,
    draw_specials,
    exact,
    is_runnable,
    rows_of,
)
from forms import FORMS, compute, has_form
from meshloom.engines import torch_engine
from meshloom.ops import OPS, Op, holds
from meshloom.ops.labels import pointwise, reduction
from meshloom.placement import Partial
from meshloom.tensor.entries import forget_all
from oracle import check_case
from samples import SAMPLES, Draw

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # planted faults need finding, not shrinking
    suppress_health_check=list(HealthCheck),
)


def run_cases(check: Callable[[Draw], None], cases: int = 40) -> None:
    @settings(SETTINGS, max_examples=cases)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check(Draw(data))

    run()


def walk_rows(name: str, d: Draw, seen: Counter[str]) -> None:
    """Draw one case of an op and check each of its rows that holds for these sizes."""
    case = exact(SAMPLES[name](d), name)
    devices = d.number(2, 3)
    call = describe(case, devices)
    choices = rows_of(call)
    for row in choices.rows:
        if not is_runnable(row, case.operands, choices, devices) or not holds(OPS[call.op], call, row):
            continue
        if row.local:
            check_row(call, choices, row, case, devices, draw_seed(d))
            seen["local" if row.label != "none" else "none"] += 1
        elif has_form(call, row):
            check_form(call, choices, row, case, devices, draw_seed(d))
            seen["form"] += 1


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_row_holds_on_separate_devices(name: str) -> None:
    seen: Counter[str] = Counter()
    run_cases(lambda d: walk_rows(name, d, seen))
    assert seen["none"] > 0
    assert seen["local"] > 0, f"no sharded row of {name} was ever run"
    assert (seen["form"] > 0) == (name in FORMS), f"{name}: {dict(seen)}"


DTYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


def walk_identities(name: str, d: Draw, seen: Counter[str]) -> None:
    """Draw one case of an op in some dtype and check each row with partial operands that is offered for it."""
    case, devices = SAMPLES[name](d), d.number(2, 3)
    dtypes = {each.dtype: d.pick(DTYPES) for each in case.operands if each.values == "any"}
    dtypes = {old: new for old, new in dtypes.items() if old != torch.bool and not old.is_complex}
    operands = (
        dataclasses.replace(each, dtype=dtypes.get(each.dtype, each.dtype)) if each.values == "any" else each
        for each in case.operands
    )
    case = dataclasses.replace(case, operands=tuple(operands), gradients=False)
    try:
        call = describe(case, devices)
        choices = rows_of(call)
        compute(call, [draw_specials(each, 0) for each in case.operands], choices.shapes)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return  # torch has no such op for these dtypes
    for row in choices.rows:
        carries = row.local and any(isinstance(placement, Partial) for placement in row.ins)
        if carries and is_runnable(row, case.operands, choices, devices) and holds(OPS[call.op], call, row):
            check_identity(call, choices, row, case, devices, draw_seed(d))
            seen[str(row)] += 1


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_row_with_partial_operands_holds_for_every_value_of_the_dtype(name: str) -> None:
    run_cases(lambda d: walk_identities(name, d, Counter()), 12)


FORGETFUL = {
    "neg": "P(max) -> P(min)",
    "sign": "P(max) -> P(max)",
    "mul": "P(sum), R -> P(sum)",
    "sub": "P(sum), P(sum) -> P(sum)",
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_row_that_forgets_its_condition_is_caught(plant: Callable[[Op], None], name: str) -> None:
    plant(changed(name, rule=pointwise(FORGETFUL[name])))
    expect_caught(lambda d: walk_identities(name, d, Counter()))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Op], None]]:
    """Put a faulty op into the table for the length of a test."""

    def put(op: Op) -> None:
        monkeypatch.setitem(OPS, op.name, op)
        forget_all()

    yield put
    forget_all()


def changed(name: str, **changes: object) -> Op:
    return dataclasses.replace(OPS[name], **changes)


def caught_by_hypothesis() -> tuple[type[BaseException], ...]:
    """What Hypothesis raises: the failure itself, or a group of several."""
    group = getattr(builtins, "ExceptionGroup", None)
    return (AssertionError,) if group is None else (AssertionError, group)


CAUGHT = caught_by_hypothesis()


def expect_caught(check: Callable[[Draw], None]) -> None:
    """Some case among many must fail; Hypothesis stops at the first."""
    with pytest.raises(CAUGHT):
        run_cases(check, 1000)


def property_check(name: str) -> Callable[[Draw], None]:
    return lambda d: check_case(d, SAMPLES[name](d))


def test_a_partial_row_that_is_not_linear_is_caught_by_both_oracles(plant: Callable[[Op], None]) -> None:
    plant(changed("relu", rule=pointwise("P(sum) -> P(sum)")))
    expect_caught(property_check("relu"))
    expect_caught(lambda d: walk_rows("relu", d, Counter()))


def test_a_reduction_with_the_wrong_partial_is_caught(plant: Callable[[Op], None]) -> None:
    plant(changed("amax", rule=reduction("min")))
    expect_caught(lambda d: walk_rows("amax", d, Counter()))


def test_a_row_that_forgets_its_collectives_is_caught(plant: Callable[[Op], None]) -> None:
    def forgetful(call):  # type: ignore[no-untyped-def]
        choices = OPS["log_softmax"].rule(call)
        rows = tuple(dataclasses.replace(row, inner=(), backward=(), local=True) for row in choices.rows)
        return dataclasses.replace(choices, rows=rows)

    plant(changed("softmax", rule=forgetful))
    expect_caught(lambda d: walk_rows("softmax", d, Counter()))


def test_a_row_that_names_too_few_statistics_is_caught(plant: Callable[[Op], None]) -> None:
    def thrifty(call):  # type: ignore[no-untyped-def]
        choices = OPS["log_softmax"].rule(call)
        rows = tuple(dataclasses.replace(row, inner=row.inner[:1]) for row in choices.rows)
        return dataclasses.replace(choices, rows=rows)

    plant(changed("softmax", rule=thrifty))
    expect_caught(lambda d: walk_rows("softmax", d, Counter()))


@pytest.mark.parametrize(("name", "mark"), [("exp", "zero"), ("cos", "zero"), ("log", "finite"), ("eq", "zero")])
def test_a_wrong_padding_mark_is_caught(plant: Callable[[Op], None], name: str, mark: str) -> None:
    plant(changed(name, at_zero=mark))
    expect_caught(property_check(name))


def test_a_reduction_that_does_not_fill_its_padding_is_caught(plant: Callable[[Op], None]) -> None:
    plant(changed("amax", fill=OPS["sum"].fill))
    expect_caught(property_check("amax"))


class Wrong(torch.autograd.Function):
    """tanh with the gradient of a sine."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.saved_tensors[0].cos()


def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_engine.FUNCTIONS, "tanh", Wrong.apply)
    forget_all()
    expect_caught(property_check("tanh"))
    forget_all()


def test_a_wrong_value_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_engine.FUNCTIONS, "sub", torch.add)
    forget_all()
    expect_caught(property_check("sub"))
    forget_all()
