"""Every op of the table against dense torch, over meshes, placements, shapes and dtypes: values and gradients.

`MESHLOOM_CASES` sets the number of cases per op (for long runs, which also draw new cases every time).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshloom.ops import OPS
from oracle import check_case
from samples import SAMPLES, Draw

CASES = int(os.environ.get("MESHLOOM_CASES", "0"))
PER_OP = CASES or 80


def test_every_op_of_the_table_has_samples_and_there_are_twenty_thousand_cases() -> None:
    assert set(SAMPLES) == set(OPS)
    assert len(SAMPLES) * 80 >= 20_000


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_op_equals_dense_on_any_mesh_and_placements(name: str) -> None:
    ran = 0

    @settings(
        max_examples=PER_OP, deadline=None, derandomize=not CASES, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal ran
        draw = Draw(data.draw)
        check_case(draw, SAMPLES[name](draw))
        ran += 1

    run()
    assert ran >= PER_OP, f"only {ran} cases ran"
