"""What type checkers, editors and `help` are told of the public names: torch's signatures, with our tensors in them."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshloom as loom
import stubs
from meshloom import _OPS
from meshloom.tensor.signatures import read_signature

ROOT = Path(__file__).resolve().parents[2]


def made_with() -> str:
    """The version of torch in the first line of the stub."""
    return stubs.STUB.read_text().split("stubs of torch ")[1].split(";")[0]


def test_the_stub_is_what_the_public_names_and_torch_say():
    if torch.__version__.partition("+")[0] != made_with():
        pytest.skip(f"the stub is made from torch {made_with()}")
    assert stubs.STUB.read_text() == stubs.stub(), "run: python tests/stubs.py"


def test_the_stub_names_everything_public_and_nothing_else():
    tree = ast.parse(stubs.STUB.read_text())
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.asname for alias in node.names if alias.asname}
    assert {name for name in named if not name.startswith("_")} == {*loom.__all__, *_OPS}


@pytest.mark.parametrize("name", _OPS)
def test_a_function_of_the_table_shows_its_signature(name):
    signature = inspect.signature(getattr(loom, name))
    kinds = [each.kind for each in signature.parameters.values()]
    assert "output" in signature.parameters
    assert kinds[0] is not inspect.Parameter.VAR_KEYWORD and len(kinds) > 1
    assert getattr(loom, name).__doc__.startswith(f"As `torch.{name}`, on a mesh")


def test_help_shows_the_signature_and_the_text_of_torch():
    shown = pydoc.render_doc(loom.matmul)
    assert "matmul(" in shown and "other: 'torch.Tensor'" in shown
    assert "Matrix product of two tensors." in shown
    assert str(inspect.signature(loom.cross_entropy)).count("...") == 0
    assert inspect.signature(loom.cross_entropy).parameters["ignore_index"].default == -100


def test_arguments_of_a_signature_are_those_that_the_call_takes():
    """By the names that are shown, in any order."""
    x = loom.ones(4, 4, mesh=loom.Mesh(d=2), placements="S(0)")
    assert loom.softmax(dim=1, input=x).shape == (4, 4)
    assert loom.matmul(other=x, input=x, output="R").placements == (loom.Replicate(),)


def test_a_line_of_a_stub_is_read_as_python_reads_it():
    def written(a: int, /, b: str = "x", *c: int, d: float = 1.5, e, **f: object) -> None: ...

    line = "def written(a: int, /, b: str = 'x', *c: int, d: float = 1.5, e, **f: object) -> None: ..."
    assert str(read_signature(line)) == str(inspect.signature(written))


PROGRAM = """
import torch
import meshloom as loom

mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
x = loom.distribute(torch.ones(8, 8), mesh, {"dp": loom.Shard(0)})
w = loom.Parameter(torch.ones(8, 8), mesh, {"tp": loom.Shard(1)})
reveal_type(loom.matmul(x, w, output={"dp": loom.Replicate()}))
reveal_type(x @ w)
reveal_type(loom.max(x, 1).values)
reveal_type((2 - x).softmax(dim=-1).sum())
reveal_type(w.grad)
reveal_type(x.redistribute("R, R").to_torch())
reveal_type(x.mesh)
reveal_type(torch.nn.Linear(8, 8)(x))
reveal_type(loom.from_local([torch.ones(1)] * 8, mesh, "S(0), R").topology)
"""
REVEALED = [
    "meshloom.Tensor",
    "meshloom.Tensor",
    "meshloom.Tensor",
    "meshloom.Tensor",
    "meshloom.Tensor | None",
    "torch._tensor.Tensor",
    "meshloom.mesh.mesh.Mesh",
    "Any",
    "meshloom.placement.topology.Topology",
]
WRONG = {
    "loom.matmul(x)": "Missing positional argument",
    "loom.softmax(x, dim='last')": "incompatible type",
    "loom.matmul(x, x, output=3)": "incompatible type",
    "loom.matmull(x, x)": "has no attribute",
    "x.reshape(4, 4).placements.shape": "has no attribute",
    "loom.open_mesh(axes=3)": "incompatible type",
}


def check_types(folder: Path, text: str) -> list[str]:
    """What mypy says of a program, line by line; its cache is that of `make test`."""
    program = folder / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), str(program)],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if "program.py" in line]


@pytest.mark.slow
def test_a_type_checker_accepts_a_program_and_refuses_wrong_ones(tmp_path):
    start = len(PROGRAM.splitlines()) + 1
    said = check_types(tmp_path, PROGRAM + "\n".join(WRONG) + "\n")
    revealed = [line.split('"')[1] for line in said if "Revealed type" in line]
    assert revealed == REVEALED
    errors = {int(line.split(":")[1]): line for line in said if ": error:" in line}
    assert sorted(errors) == list(range(start, start + len(WRONG)))
    for number, expected in enumerate(WRONG.values()):
        assert expected in errors[start + number]
