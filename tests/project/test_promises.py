"""Every test that docs/promises.md names is there, and every promise names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE)


def functions_of(file: str) -> set[str]:
    """The names of a test file's functions."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_promise_is_held_by_a_test_that_is_there(file: str, name: str) -> None:
    assert name in functions_of(file), f"{file} has no test {name}"


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) >= 20
    assert [row for row in rows if "::test_" not in row] == []


def test_a_test_that_is_not_there_would_be_noticed() -> None:
    assert "test_that_nobody_wrote" not in functions_of("tests/project/test_promises.py")
