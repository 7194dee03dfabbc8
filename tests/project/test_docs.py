"""The documents run: every Python block in order, and the output that is printed under it."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshloom.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its kind, its text, and the line that its text starts on."""

    kind: str
    text: str
    line: int


def read_blocks(text: str) -> list[Block]:
    return [Block(m["kind"].strip(), m["body"], text.count("\n", 0, m.start("body"))) for m in _FENCE.finditer(text)]


def run_block(block: Block, name: str, namespace: dict[str, Any]) -> str:
    """What a block prints; errors point at the line of the document."""
    code = compile("\n" * block.line + block.text, name, "exec", dont_inherit=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def without_places(text: str) -> str:
    """Printed text without the line numbers of documents, which move with every edit."""
    return re.sub(r"(\w+\.md):\d+", r"\1", "\n".join(line.rstrip() for line in text.strip().splitlines()))


def check_document(text: str, name: str) -> int:
    """Run every Python block and compare what it prints with the text block that follows it; how many ran."""
    blocks, namespace, ran = read_blocks(text), {"__name__": "__doc__"}, 0
    for number, block in enumerate(blocks):
        if block.kind != "python":
            continue
        printed = run_block(block, name, namespace)
        ran += 1
        follower = blocks[number + 1] if number + 1 < len(blocks) else None
        if follower is not None and follower.kind == "text":
            assert without_places(printed) == without_places(follower.text), f"{name}, line {block.line + 1}"
    return ran


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_python_block_runs_and_prints_what_the_document_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # where a reader would run them: examples are found from there
    text = (ROOT / name).read_text()
    fences = text.count("```python")
    skipped = text.count("```python no-run")
    assert check_document(text, Path(name).name) == fences - skipped


def test_a_document_that_prints_something_else_is_caught():
    with pytest.raises(AssertionError, match=r"made\.md, line 3"):
        check_document("\n```python\nprint(1)\n```\n\n```text\n2\n```\n", "made.md")


def test_a_document_whose_block_raises_is_caught():
    with pytest.raises(ZeroDivisionError):
        check_document("```python\nx = 1\n```\n```python\nx / 0\n```\n", "made.md")


def test_the_readme_has_a_first_example_and_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    assert "open_mesh" in next(block.text for block in read_blocks(text) if block.kind == "python")


def test_the_readme_counts_the_rules_as_the_table_does():
    text = (ROOT / "README.md").read_text()
    assert f"{len(OPS)} ops with rules" in text
    assert f"{len(OPS)} ops have a rule" in (ROOT / "docs" / "ops.md").read_text()


@pytest.mark.parametrize(
    ("row", "work"), [("small add", "add, 32x32 per device"), ("MLP training step", "MLP step, data-parallel")]
)
def test_the_readme_quotes_the_benchmark_page_within_a_third(row, work):
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {row}"))
    quoted = [float(each) for each in re.findall(r"([\d.]+)x ours", line)]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for peer, figure in zip(("DTensor LocalTensor", "JAX host devices"), quoted, strict=True):
        cells = next(line for line in page.splitlines() if line.startswith(f"| {peer}: {work}")).split("|")
        measured = float(re.search(r"[\d.]+", cells[3])[0])  # on 32 devices
        assert 2 / 3 < figure / measured < 1.5, f"README says {figure}x for {peer}, the page {measured}x"


def test_links_between_documents_lead_somewhere():
    found = 0
    for name in DOCUMENTS:
        prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", (ROOT / name).read_text()))
        for target in re.findall(r"\]\(([^)#]+)\)", prose):
            if "://" not in target:
                found += 1
                assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
    assert found > 10


def test_the_lines_of_the_recipe_are_lines_of_the_files_it_names():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = re.findall(r"^\*\*The \w+\*\*, `([^`]+)`.*?^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(recipes) == 3
    for path, added in recipes:
        lines = (ROOT / path).read_text().splitlines()
        for line in added.splitlines():
            assert line.removeprefix("+") in lines, f"{path} has no line {line!r}"
