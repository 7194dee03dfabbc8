"""The documents and the examples run: every Python block in order, and the output that is printed under it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
EASE_OF_USE = ("first.py", "strategies.py", "scale.py", "demo.py")
OTHERS = ("fabric.py", "seven_steps.py")
COLLECTIVES = frozenset(
    "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv send_recv shift "
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single barrier isend irecv".split()
)
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
    code = compile("\n" * block.line + block.text, name, "exec")
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
def test_every_python_block_runs_and_prints_what_the_document_says(name):
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


def run_example(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_gives_the_dense_product():
    printed = run_example("first.py")
    assert "communicated: 0 bytes" in printed
    assert "equal to the dense product" in printed


def test_the_three_strategies_give_the_dense_values_with_the_communication_that_they_name():
    printed = run_example("strategies.py")
    one, two, _mean, three, scattered = printed.strip().split("\n\n")
    assert "0 bytes per worker" in one
    assert "all_reduce(sum)" in two and "all_reduce(sum)" in three
    assert "reduce_scatter(sum)" in scattered


def test_one_program_gives_one_answer_on_2_and_20_and_200_devices():
    printed = run_example("scale.py")
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["2", "20", "200"]
    assert "the same answer on every mesh" in printed


@pytest.mark.slow
def test_the_demo_trains_compares_and_shows_without_a_terminal():
    printed = run_example("demo.py", "--steps", "6")
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) in 6 steps", printed).groups())
    assert last < first
    differences = [float(each) for each in re.findall(r"largest difference (\S+)", printed)]
    assert len(differences) == 2 and max(differences) < 1e-4
    for shown in ("Mesh(dp=2, tp=4)", "dp=* tp=3", "all_reduce(sum)", "chosen", "x dense"):
        assert shown in printed


def test_the_demo_tells_its_options_and_refuses_no_steps():
    assert "--steps" in run_example("demo.py", "--help")
    with pytest.raises(AssertionError, match="train at least one step"):
        run_example("demo.py", "--steps", "0")


def test_the_fabric_example_compares_three_machines_and_writes_a_timeline(tmp_path):
    out = tmp_path / "timeline.json"
    printed = run_example("fabric.py", "--side", "4", "--out", str(out))
    rows = [line for line in printed.splitlines() if re.search(r"(ring|tree|2-D) \(", line)]
    assert len(rows) == 9
    for shown in ("T3000, 2x4", "Galaxy, 8x4", "torus, 4x4", str(out)):
        assert shown in printed
    spans = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"device", "link"} and len(spans) > 1000
    assert "--out" in run_example("fabric.py", "--help")


def called_collectives(source: str) -> set[str]:
    """The collectives that a program calls by name; strings and comparisons do not count."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}
    imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    modules = {alias.name for node in imports for alias in node.names} | set(re.findall(r"torch\.distributed", source))
    return (names | modules) & (COLLECTIVES | {"torch.distributed", "distributed"})


@pytest.mark.parametrize("name", EASE_OF_USE)
def test_no_example_of_the_ease_of_use_set_calls_a_collective(name):
    assert not called_collectives((ROOT / "examples" / name).read_text())


def test_a_collective_called_by_hand_would_be_found():
    assert called_collectives("import torch.distributed as dist\ndist.all_reduce(x)") == {
        "torch.distributed",
        "all_reduce",
    }
    assert called_collectives("kinds = ['all_reduce']") == set()


def test_every_example_is_run_by_a_test():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EASE_OF_USE, *OTHERS}
