"""`docs/checklist.md` from the names of the tests: every row of the requirements, and the tests that run its check.

A test runs the check of row 31 if its name begins with `test_row_031`; `test_row_031_and_071` runs two. What ranks run
begins with `row_`. `python tests/checklist_page.py` writes the page; a test compares it with the names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROWS = TESTS / "data" / "checklist.txt"
PAGE = TESTS.parent / "docs" / "checklist.md"
DOCUMENTS = ("TTNN's distributed operations", "mesh runtime", "multi-device guide", "sharding strategies")
NAME = re.compile(r"(?:test_)?row_(\d+(?:_and_\d+)*)_")
INTRO = """# Checklist

What the four documents that meshloom is built after ask for, a row each. The documents: {documents}.

The check is what a user could run. Beside it stand the tests that run it, found by their names (`test_row_031…`;
functions of `row_ranks.py` run on real processes). **Open** says what no test runs yet. Written by
`python tests/checklist_page.py`.

{count} rows, {open} of them open.

| row | document | feature | check | tests |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the data file; `lacking` is what no test of the row runs yet."""

    number: int
    document: int
    feature: str
    check: str
    lacking: str = ""


def read_rows(text: str) -> list[Row]:
    """The rows of the data file."""
    lines = (line.split(" | ") for line in text.splitlines() if not line.startswith("#"))
    return [Row(int(number), int(document), *rest) for number, document, *rest in lines]


def numbers_of(name: str) -> list[int]:
    """The rows that a function runs, by its name."""
    found = NAME.match(name)
    return [int(each) for each in found[1].split("_and_")] if found else []


def functions_in(source: str) -> Iterator[str]:
    """The names of the functions of a module, methods too, in order."""
    nodes = ast.walk(ast.parse(source))
    found = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return (node.name for node in sorted(found, key=lambda node: node.lineno))


def find_tests(paths: Iterable[Path]) -> dict[int, list[str]]:
    """For each row the functions that run it, as `file.py::function`."""
    found: dict[int, list[str]] = {}
    for path in sorted(paths):
        for name in functions_in(path.read_text(encoding="utf-8")):
            for number in numbers_of(name):
                found.setdefault(number, []).append(f"{path.name}::{name}")
    return found


def is_open(row: Row, tests: dict[int, list[str]]) -> bool:
    """Whether some of the row's check is run by no test."""
    return bool(row.lacking) or row.number not in tests


def shown_row(row: Row, tests: dict[int, list[str]]) -> str:
    cells = [f"`{each}`" for each in tests.get(row.number, ())]
    if is_open(row, tests):
        cells.append(f"**open**: {row.lacking}" if row.lacking else "**open**")
    return f"| {row.number} | {row.document} | {row.feature} | {row.check} | {'<br>'.join(cells)} |\n"


def page(rows: list[Row], tests: dict[int, list[str]]) -> str:
    """The whole page."""
    documents = ", ".join(f"{number} {title}" for number, title in enumerate(DOCUMENTS, 1))
    still = sum(is_open(row, tests) for row in rows)
    intro = INTRO.format(documents=documents, count=len(rows), open=still)
    return intro + "".join(shown_row(row, tests) for row in rows)


def current_page() -> str:
    """The page of this repository as it stands."""
    return page(read_rows(ROWS.read_text(encoding="utf-8")), find_tests(TESTS.rglob("*.py")))


if __name__ == "__main__":
    PAGE.write_text(current_page(), encoding="utf-8")
    print(f"{PAGE.name} is written")
