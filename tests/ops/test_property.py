"""Every op of the table against dense torch, over meshes, placements, shapes and dtypes: values and gradients.

`make soak` is the long run: `MESHLOOM_CASES` cases in all (dealt out to the ops), drawn from `MESHLOOM_SEED`. A failure
prints the command that draws the same cases again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st

from meshloom.ops import OPS
from oracle import check_case
from samples import SAMPLES, Draw

CASES = int(os.environ.get("MESHLOOM_CASES", "0"))
SEED = int(os.environ.get("MESHLOOM_SEED", "0"))
PER_OP = math.ceil((CASES or 20_500) / len(SAMPLES))


def test_every_op_of_the_table_has_samples_and_there_are_twenty_thousand_cases() -> None:
    assert set(SAMPLES) == set(OPS)
    assert CASES or len(SAMPLES) * PER_OP >= 20_000


def run_cases(check: Callable[[Draw], None], count: int) -> int:
    """Draw so many cases and check them; how many ran."""
    ran = 0

    @seed(SEED)
    @settings(
        max_examples=count, deadline=None, derandomize=not CASES, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal ran
        check(Draw(data))
        ran += 1

    run()
    return ran


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_op_equals_dense_on_any_mesh_and_placements(name: str, record_property: pytest.RecordProperty) -> None:
    try:
        ran = run_cases(lambda draw: check_case(draw, SAMPLES[name](draw)), PER_OP)
    except BaseException:
        print(f"again: {replay(name)}")
        raise
    record_property("cases of ops against dense", ran)
    assert ran >= PER_OP, f"only {ran} cases ran"


def replay(name: str) -> str:
    """The command that draws the cases of one op again."""
    drawn = f"MESHLOOM_CASES={CASES} MESHLOOM_SEED={SEED} " if CASES else ""
    return f'{drawn}python -m pytest -n 0 "tests/ops/test_property.py" -k "[{name}]"'


def test_the_same_seed_draws_the_same_cases() -> None:
    drawn: list[list[int]] = []
    for _ in range(2):
        drawn.append([])
        run_cases(lambda draw: drawn[-1].append(draw.number(0, 10_000)), 20)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 10


def test_a_failing_case_says_how_to_draw_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], record_property: pytest.RecordProperty
) -> None:
    def wrong(draw: Draw, case: object) -> None:
        raise AssertionError("wrong")

    monkeypatch.setitem(globals(), "check_case", wrong)
    monkeypatch.setitem(globals(), "CASES", 1000)
    monkeypatch.setitem(globals(), "SEED", 17)
    with pytest.raises(AssertionError, match="wrong"):
        test_op_equals_dense_on_any_mesh_and_placements("add", record_property)
    assert "again: MESHLOOM_CASES=1000 MESHLOOM_SEED=17 python -m pytest -n 0" in capsys.readouterr().out
