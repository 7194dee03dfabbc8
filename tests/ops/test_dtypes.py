"""The dtype column of the op table is what the engine gives, for every sample call and every dtype that torch takes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import meshloom as loom
from meshloom.errors import MeshloomError
from meshloom.ops import OPS
from meshloom.ops.dtypes import promote_pair
from meshloom.tensor import dispatch
from meshloom.tensor.entries import forget_all
from meshloom.types import LONG_NAME
from oracle import Made
from samples import SAMPLES, Case, Draw

FLOATING = (torch.float64, torch.float16, torch.complex64, torch.complex128)
OTHERS = (torch.int32, torch.uint8, torch.int8, torch.bool)
MESH = loom.Mesh(w=2)


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls whose dtypes the engine had to correct."""
    found: list[str] = []
    keep = dispatch.retype

    def note(decided: object, dtypes: tuple[str, ...]) -> object:
        call = decided.call
        dense = [f"{each.dtype}{list(each.shape)}" for each in call.operands]
        found.append(
            f"{call.op}{dense} {call.leaves} {call.arguments}: {[each.dtype for each in decided.outs]}, but {dtypes}"
        )
        return keep(decided, dtypes)

    monkeypatch.setattr(dispatch, "retype", note)
    return found


def other_dtypes(case: Case) -> list[Case]:
    """The case with all its floating operands, or all its integers, in another dtype."""

    def replaced(old: bool, new: torch.dtype) -> Case:
        return dataclasses.replace(case, gradients=False, operands=tuple(
            dataclasses.replace(each, dtype=new, gradient=False)
            if each.dtype.is_floating_point == old and each.dtype != torch.bool else each
            for each in case.operands
        ))  # fmt: skip

    kinds = itertools.chain(((True, new) for new in (*FLOATING, *OTHERS)), ((False, new) for new in OTHERS))
    return [case, *(replaced(*kind) for kind in kinds)]


def run(draw: Draw, case: Case) -> None:
    """Run a case; what torch refuses has no dtype."""
    try:
        made = [Made(draw, MESH, operand, False) for operand in case.operands]
        case.run(*(each.dense for each in made))
        ours = [each.tensor for each in made]
    except Exception:
        return
    try:
        case.run(*ours)
    except (MeshloomError, RuntimeError):
        return  # rows that need another dtype; whether they may is for test_property to say


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_table_says_the_dtype_that_the_engine_gives(name: str, corrected: list[str]) -> None:
    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw = Draw(data)
        for case in other_dtypes(SAMPLES[name](draw)):
            run(draw, case)

    forget_all()
    check()
    assert corrected == []


def test_autocast_and_the_default_dtype_have_the_last_word(corrected: list[str]) -> None:
    x = loom.ones(4, 4, mesh=MESH, placements="S(0)")
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
    assert (y.dtype, y.topology.dtype, len(corrected)) == (torch.bfloat16, "bf16", 1)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        z = x.to(torch.int64).exp()
    finally:
        torch.set_default_dtype(kept)
        forget_all()
    assert (z.dtype, z.topology.dtype, len(corrected)) == (torch.float64, "f64", 2)


def test_the_rule_of_an_op_runs_once_per_new_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, op = [], OPS["div"]
    monkeypatch.setitem(OPS, "div", dataclasses.replace(op, rule=lambda call: ran.append(call) or op.rule(call)))
    x = loom.ones(6, 4, mesh=MESH, placements="S(0)").to(torch.int32)
    forget_all()
    with loom.communication("forbid"), loom.with_output("S(-2)"):
        assert (x / x).dtype == torch.float32
    assert len(ran) == 1


def test_promotion_is_that_of_torch() -> None:
    known = {name: getattr(torch, long) for name, long in LONG_NAME.items() if name not in ("u16", "u32", "u64")}
    for one, other in itertools.product(known, repeat=2):
        assert getattr(torch, LONG_NAME[promote_pair(one, other)]) == torch.promote_types(known[one], known[other])
