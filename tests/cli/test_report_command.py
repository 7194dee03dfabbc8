"""`meshloom report`, as users run it: a script, a machine and a mesh become a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshloom import Mesh
from meshloom.cli import main
from meshloom.cli.report import read_mesh
from meshloom.fabric import preset

STEP = """
import sys, torch, meshloom as loom
ROWS = {rows}
def product(mesh):
    x = loom.empty(ROWS, 4096, mesh=mesh, placements={{mesh.axes[-1]: loom.Shard(1)}}, device="meta")
    w = loom.empty(4096, 1024, mesh=mesh, placements={{mesh.axes[-1]: loom.Shard(0)}}, device="meta")
    return lambda: (x @ w).relu()
"""
BUILD = STEP + "def build(mesh): return product(mesh)\n"
CURRENT = STEP + "step = product(loom.current_mesh())\n"
OWN = STEP + "step = product(loom.open_mesh((4,), axes=('tp',)))\n"


def write_script(folder: Path, text: str, rows: str = "1024") -> str:
    path = folder / "script.py"
    path.write_text(text.format(rows=rows))
    return str(path)


def figures(path: Path) -> dict:
    return json.loads(re.search(r'id="figures">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


def report(*arguments: str, out: Path) -> int:
    return main(["report", *arguments, "--out", str(out)])


@pytest.mark.parametrize(
    ("text", "mesh", "meshes"),
    [
        (BUILD, ["--mesh", "2x4"], [{"axes": ["x0", "x1"], "shape": [2, 4], "ids": None}]),
        (BUILD, ["--mesh", "dp=2,tp=4"], [{"axes": ["dp", "tp"], "shape": [2, 4], "ids": None}]),
        (CURRENT, ["--mesh", "tp=8"], [{"axes": ["tp"], "shape": [8], "ids": None}]),
        (OWN, [], [{"axes": ["tp"], "shape": [4], "ids": None}]),
    ],
    ids=["build", "named axes", "current mesh", "mesh of the script"],
)
def test_a_script_becomes_a_page(text, mesh, meshes, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert report(write_script(tmp_path, text), "--machine", "t3000", *mesh, out=out) == 0
    found = figures(out)
    assert found["machine"] == "t3000" and found["meshes"] == meshes
    assert {each["op"] for each in found["calls"]} == {"matmul", "relu"}
    assert f"wrote {out}" in capsys.readouterr().out


def test_arguments_of_the_script_a_machine_of_a_file_and_a_trace(tmp_path):
    machine, trace = tmp_path / "mine.toml", tmp_path / "trace.json"
    machine.write_text(preset("t3000").to_toml().replace('"t3000"', '"mine"'))
    script = write_script(tmp_path, BUILD, rows="int(sys.argv[1])")
    arguments = [script, "--machine", str(machine), "--mesh", "tp=4", "--args", "64", "--trace", str(trace)]
    assert report(*arguments, out=tmp_path / "page.html") == 0
    found = figures(tmp_path / "page.html")
    assert found["machine"] == "mine" and found["calls"][0]["results"] == ["f32[64, 1024](R)"]
    names = [each["name"] for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    assert names == ["matmul", "all_reduce", "relu"]


def test_a_step_that_does_not_fit_is_an_error_and_has_its_page(tmp_path, capsys):
    script = write_script(tmp_path, BUILD, rows="1 << 22")
    assert report(script, "--machine", "t3000", "--mesh", "tp=4", out=tmp_path / "page.html") == 1
    totals = figures(tmp_path / "page.html")["totals"]
    assert totals["memory"] > totals["limit"] == 12e9
    assert "one device needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("x = 1", ["--mesh", "2x4"], "defines neither build nor step"),
        (BUILD, [], "needs a mesh"),
        (STEP + "def build(mesh): return 3\n", ["--mesh", "4"], "gave no function"),
        (BUILD, ["--mesh", "2 by 4"], "is no mesh"),
        (BUILD, ["--mesh", "dp=2xtp=4"], "is no mesh"),
        (OWN, ["--mesh", "2x4"], "ran on Mesh(tp=4) and not on Mesh(x0=2, x1=4)"),
        (BUILD, ["--mesh", "2x4", "--machine", "t3001"], "did you mean 't3000'"),
        (BUILD, ["--mesh", "2x4", "--machine", "none.toml"], "cannot be read"),
    ],
)
def test_what_cannot_be_reported_is_told(text, arguments, says, tmp_path, capsys):
    script = write_script(tmp_path, text)
    assert report(script, "--machine", "t3000", *arguments, out=tmp_path / "page.html") == 1
    told = capsys.readouterr().err
    assert told.startswith("meshloom report: ") and says in told
    assert not (tmp_path / "page.html").exists()


def test_a_mesh_is_sizes_or_names_with_sizes():
    assert read_mesh("8") == Mesh(x0=8) and read_mesh("2x2x2").shape == (2, 2, 2)
    assert read_mesh("pp=2,dp=3,tp=4") == Mesh(pp=2, dp=3, tp=4)
