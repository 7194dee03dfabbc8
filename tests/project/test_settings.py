"""The environment is read in one file, and its table is the one that the docs show."""

from __future__ import annotations

import re
from pathlib import Path

from meshloom.settings import VARIABLES, Variable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py")) if path.name != "settings.py"}
READING = re.compile(r"\benviron\b|\bgetenv\b")
NAMED = re.compile(r"\b(?:MESHLOOM|TT|TTNN)_[A-Z_]+[A-Z]\b")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (?:-|`(.*?)`) \| (.*) \|$", re.M)


def reading(sources: dict[Path, str]) -> list[str]:
    """The files that read the environment."""
    return [str(path) for path, text in sources.items() if READING.search(text)]


def test_the_environment_is_read_in_one_file() -> None:
    assert len(SOURCES) > 100
    assert reading(SOURCES) == []


def test_a_second_reader_would_be_found() -> None:
    for text in ("os.environ['A']", "from os import environ", "os.getenv('A')"):
        assert reading({Path("planted.py"): text}) == ["planted.py"]


def test_every_variable_that_the_source_names_is_in_the_table() -> None:
    quoted = {name for text in SOURCES.values() for name in NAMED.findall(text)}
    assert len(quoted) > 10
    assert quoted <= set(VARIABLES)


def test_the_docs_show_the_table() -> None:
    rows = ROW.findall((ROOT / "docs" / "settings.md").read_text())
    assert [Variable(*row) for row in rows] == [*VARIABLES.values()]
