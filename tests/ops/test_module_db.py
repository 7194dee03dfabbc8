"""Every module of torch's own module database equals dense: values, gradients, buffers; trained and not.

A fixed tenth of modules, dtypes, modes and meshes; `make soak` has them all.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

pytest.importorskip("expecttest", reason="torch's own tests need it")

from meshloom.engines.torch_engine import FUNCTIONS
from meshloom.tensor.entries import forget_all
from module_database import LATER, SAME, SKIPPED, check, database, inputs, matrix
from op_database import tenth

SOAK = bool(os.environ.get("MESHLOOM_CASES"))
PARTS = 60 if SOAK else 8


@pytest.mark.filterwarnings("ignore")  # torch's own, about old arguments
@pytest.mark.parametrize("part", range(PARTS))
def test_modules_of_torch_equal_dense(part: int, record_property: pytest.RecordProperty) -> None:
    counts: Counter[str] = Counter()
    for cell in (matrix() if SOAK else tenth(matrix()))[part::PARTS]:
        counts.update(check(cell, number, given) for number, given in inputs(cell, 1000 if SOAK else LATER))
    for outcome, count in counts.items():
        record_property(f"torch's module database, {outcome}", count)
    if not SOAK:  # a part of the whole is a few modules, of which all may be skipped; of the tenth it is a mix
        assert counts[SAME] >= sum(counts.values()) * 0.8, counts


def test_the_tenth_meets_every_module_and_skipped_ones_are_modules_of_torch() -> None:
    assert {cell.name for cell in tenth(matrix())} == set(database())
    assert len(database()) >= 100 and set(SKIPPED) <= set(database())


def test_a_planted_gradient_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FUNCTIONS["linear"]
    monkeypatch.setitem(FUNCTIONS, "linear", lambda input, **rest: right(input=input.detach(), **rest))
    forget_all()
    try:
        with pytest.raises(AssertionError, match=r"nn\.Linear"):
            for cell in (cell for cell in matrix() if cell.name == "nn.Linear"):
                for number, given in inputs(cell):
                    check(cell, number, given)
    finally:
        forget_all()
