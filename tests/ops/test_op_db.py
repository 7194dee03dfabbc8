"""Every function of torch's own operator database equals dense, by rule or by fallback; the counts are printed.

First samples on one mesh, and of later samples, six dtypes and five meshes a fixed tenth; `make soak` has them all.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import op_database
from meshloom import Shard
from meshloom.ops import OPS
from meshloom.ops.rule import Call, Choices, Row, with_none
from meshloom.tensor.entries import forget_all
from op_database import (
    ALL_DTYPES,
    DTYPES,
    FALLBACK,
    LARGE,
    LATER,
    MESHES,
    NO_TENSOR,
    RULE,
    SKIPPED,
    SPARSE,
    calls,
    check,
    database,
    later_calls,
    matrix,
    tenth,
)  # fmt: skip

pytest.importorskip("expecttest", reason="torch's own tests need it")
PARTS = 12  # of the table, dealt out one by one
REASONS = {*SKIPPED.values(), NO_TENSOR, SPARSE, LARGE}
SOAK = bool(os.environ.get("MESHLOOM_CASES"))
LATER_PARTS = 400 if SOAK else 24
MARKS = 986685182  # of the tenth, added up


@pytest.mark.filterwarnings("ignore")  # torch's own, about old names and beta features
@pytest.mark.parametrize("part", range(PARTS))
def test_functions_of_torch_equal_dense_on_a_2_by_3_mesh(part: int, record_property: pytest.RecordProperty) -> None:
    counts: Counter[str] = Counter()
    for op in database()[part::PARTS]:
        counts.update(check(call) for call in calls(op))
    print(dict(counts))
    for outcome, count in counts.items():
        record_property(f"torch's operator database, {outcome}", count)
    assert set(counts) <= {RULE, FALLBACK, *REASONS}
    # of about 270 calls: it cannot skip its way through
    assert counts[RULE] >= 120, counts
    assert counts[FALLBACK] >= 40, counts
    assert sum(counts[reason] for reason in REASONS) <= 45, counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(LATER_PARTS))
def test_later_samples_equal_dense_in_six_dtypes_on_five_meshes(
    part: int, record_property: pytest.RecordProperty
) -> None:
    counts: Counter[str] = Counter()
    for cell in (matrix() if SOAK else tenth(matrix()))[part::LATER_PARTS]:
        counts.update(check(call) for call in later_calls(cell, 100 if SOAK else LATER))
    for outcome, count in counts.items():
        record_property(f"torch's operator database, later samples, {outcome}", count)
    if not SOAK:  # a part of the whole is a few functions, of which all may be skipped; of the tenth it is a mix
        assert counts[RULE] >= sum(counts.values()) * 0.4, counts
        assert counts[RULE] + counts[FALLBACK] >= sum(counts.values()) * 0.8, counts


def test_the_tenth_is_always_the_same_and_meets_every_function_dtype_and_mesh() -> None:
    cells = tenth(matrix())
    assert {cell.name for cell in cells} == {cell.name for cell in matrix()}
    assert {cell.dtype for cell in cells} == {*ALL_DTYPES} and {cell.mesh for cell in cells} == {*MESHES}
    assert len(matrix()) * 0.09 < len(cells) < len(matrix()) * 0.16
    assert sum(cell.mark for cell in cells) % 2**32 == MARKS, "the fixed tenth is another one"


def test_the_table_of_skipped_functions_names_functions_of_torch_and_the_samples_are_many() -> None:
    names = {op.formatted_name for op in database()}
    assert set(SKIPPED) <= names
    assert len(names) >= 600 and len(SKIPPED) <= 30
    supported = sum(op.supports_dtype(dtype, "cpu") for op in database() for dtype in DTYPES)
    assert supported >= 1000


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A table that may be changed for the length of a test."""
    yield monkeypatch
    forget_all()


def expect_caught(name: str, seeds: int = 40) -> None:
    """Some placements of the function's samples must show the fault."""
    [op] = [op for op in database() if op.formatted_name == name]
    with pytest.raises(AssertionError, match=name):
        for seed in range(seeds):
            for call in calls(op):
                check(dataclasses.replace(call, number=seed))


def any_dim(call: Call) -> Choices:
    """The rule of an op that leaves every element in its place."""
    shape = call.shape("input")
    return with_none(call, [shape], [Row(str(dim), (Shard(dim),), (Shard(dim),)) for dim in range(len(shape))])


def test_a_planted_rule_that_is_wrong_is_caught(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(OPS, "flip", dataclasses.replace(OPS["flip"], rule=any_dim))
    forget_all()
    expect_caught("flip")


def test_planted_padding_that_is_not_zero_is_caught(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(OPS, "cos", dataclasses.replace(OPS["cos"], at_zero="zero"))
    forget_all()
    expect_caught("cos")


def test_a_planted_function_that_is_wrong_in_its_gradient_is_caught(planted: pytest.MonkeyPatch) -> None:
    from meshloom.engines.torch_engine import FUNCTIONS

    planted.setitem(FUNCTIONS, "exp", lambda x: x.detach().exp() + 2 * (x - x.detach()))
    forget_all()
    expect_caught("exp")


def test_parts_put_apart_reduce_to_the_value_they_had() -> None:
    for op in ("sum", "max", "min"):
        value = torch.arange(10.0).view(2, 5)
        tensor = op_database.loom.distribute(value, op_database.MESH, {}).redistribute(f"P({op}), S(1)")
        moved = op_database.apart(tensor)
        assert not torch.equal(moved._data, tensor._data)
        assert torch.equal(moved.to_torch(), value)
