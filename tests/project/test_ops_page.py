"""The page that lists every op is made from the table, and is up to date."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshloom.ops import OPS
from meshloom.ops.table import FAMILIES
from ops_page import PAGE, page, shown_op


def test_the_page_of_ops_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/ops_page.py"


def test_every_op_stands_on_the_page_once() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `", line)]
    cells = [line.split(" | ")[0] for line in lines]
    found = [name for cell in cells for name in re.findall(r"`(\w+)`", cell) if name in OPS]
    table = found[: len(OPS)]  # what is left to the fallback comes after
    assert sorted(table) == sorted(OPS)


def test_the_families_make_up_the_table() -> None:
    assert {op.name for ops in FAMILIES.values() for op in ops} == set(OPS)
    assert sum(len(ops) for ops in FAMILIES.values()) == len(OPS)


def test_a_changed_rule_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shown_op(OPS["sum"])
    after = shown_op(dataclasses.replace(OPS["sum"], rule=OPS["amax"].rule))
    assert before != after and "P(sum)" in before[1] and "P(max)" in after[1]
