"""The page that lists every row of the requirements is made from the tests' names, and is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

import checklist_page
from checklist_page import PAGE, ROWS, TESTS, Row, current_page, find_tests, numbers_of, read_rows, shown_row


def test_the_page_is_what_the_names_of_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == current_page(), "run python tests/checklist_page.py"


def test_every_row_is_listed_once_and_every_numbered_test_has_a_row() -> None:
    rows = read_rows(ROWS.read_text(encoding="utf-8"))
    assert [row.number for row in rows] == list(range(1, 178))
    assert {row.document for row in rows} == {1, 2, 3, 4}
    assert set(find_tests(TESTS.rglob("*.py"))) <= {row.number for row in rows}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("test_row_031_and_071_two_programs", [31, 71]),
        ("test_row_54_every_process_of_2_hosts", [54]),
        ("row_23_one_script", [23]),
        ("test_row_on_processes", []),
        ("test_rows_are_many", []),
    ],
)
def test_a_name_tells_its_rows(name: str, rows: list[int]) -> None:
    assert numbers_of(name) == rows


def test_a_row_without_a_test_is_open_and_a_new_test_closes_it(tmp_path: Path) -> None:
    row = Row(7, 1, "a feature", "its check")
    assert shown_row(row, {}) == "| 7 | 1 | a feature | its check | **open** |\n"
    (tmp_path / "test_new.py").write_text("class TestIt:\n    def test_row_007_holds(self): ...\n")
    found = find_tests(tmp_path.glob("*.py"))
    assert shown_row(row, found) == "| 7 | 1 | a feature | its check | `test_new.py::test_row_007_holds` |\n"


def test_what_the_tests_of_a_row_leave_out_is_on_its_line() -> None:
    row = Row(7, 1, "a feature", "its check", "the second half")
    assert shown_row(row, {7: ["test_x.py::test_row_7_half"]}).endswith("half`<br>**open**: the second half |\n")
    head = checklist_page.page([row], {7: ["test_x.py::test_row_7_half"]})
    assert "1 rows, 1 of them open." in head
