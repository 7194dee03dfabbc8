"""Write the report of a script's step: time, memory and links on a machine, as one HTML page that opens offline.

The script is run once. It defines build(mesh), which gets the mesh of --mesh and gives the function that runs one step,
or step(), which runs one step on a mesh that the script opens or finds as loom.current_mesh(). Tensors of
device="meta" need no memory, so that a model and a mesh of any size can be looked at.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshloom.cli.predict import run_script
from meshloom.errors import MeshloomError, OutOfMemoryError
from meshloom.fabric import Preset, load_preset, preset
from meshloom.mesh import Mesh

MESH = "write sizes, --mesh 2x4, or names and sizes, --mesh dp=2,tp=4"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom report` takes."""
    parser.add_argument("script", type=Path, help="a script that defines build(mesh) or step()")
    parser.add_argument("--machine", required=True, help="a preset such as t3000, or the path of a TOML file")
    parser.add_argument("--mesh", help="2x4 for axes x0 and x1, or dp=2,tp=4; needed by build(mesh)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="where to write (default %(default)s)")
    parser.add_argument("--trace", type=Path, help="also write the timeline, as a JSON file that Perfetto opens")
    parser.add_argument("--args", default="", help="arguments of the script, in one text: --args '--layers 4'")


def run(options: argparse.Namespace) -> None:
    """Load, run dry, write; a step that does not fit is written as well, and then told."""
    machine = find_machine(options.machine)
    mesh = None if options.mesh is None else read_mesh(options.mesh)

    from meshloom.observe.dry_run import dry_run

    step = load_program(options.script, shlex.split(options.args), mesh)
    too_much: OutOfMemoryError | None = None
    try:
        with dry_run(machine) as found:
            step()
    except OutOfMemoryError as error:
        too_much = error
    check_mesh(found.graph.meshes, mesh)
    found.report(options.out)
    if options.trace is not None:
        found.write_timeline(options.trace)
    print(f"{found}\n\nwrote {options.out}")
    if too_much is not None:
        raise too_much


def find_machine(name: str) -> Preset:
    """A preset by its name, or from a file."""
    return load_preset(name) if name.endswith(".toml") else preset(name)


def read_mesh(text: str) -> Mesh:
    """A mesh as the command line spells it.

    >>> read_mesh("2x4"), read_mesh("dp=2,tp=4")
    (Mesh(x0=2, x1=4), Mesh(dp=2, tp=4))
    """
    sizes = re.fullmatch(r"\d+(x\d+)*", text)
    named = re.fullmatch(r"[A-Za-z_]\w*=\d+(,[A-Za-z_]\w*=\d+)*", text)
    if not sizes and not named:
        raise MeshloomError(f"--mesh {text} is no mesh", fix=MESH)
    pairs = [each.split("=") for each in text.split(",")] if named else []
    shape = [int(size) for _, size in pairs] if named else [int(size) for size in text.split("x")]
    return Mesh.of(shape, [name for name, _ in pairs] if named else None)


def load_program(script: Path, rest: list[str], mesh: Mesh | None) -> Callable[[], object]:
    """Run a script with a mesh open, and give the function that runs one step."""
    from meshloom.tensor.creation import open_mesh

    opened = None if mesh is None else open_mesh(mesh.shape, mesh.axes)
    defined = run_script(script, rest)
    step = _build(script, defined["build"], opened) if "build" in defined else defined.get("step")
    if not callable(step):
        what = "build(mesh) gave no function" if "build" in defined else f"{script} defines neither build nor step"
        raise MeshloomError(what, fix="def build(mesh): ... return step, or def step(): ...")
    found: Callable[[], object] = step
    return found


def _build(script: Path, build: Callable[[Mesh], Any], mesh: Mesh | None) -> Any:
    if mesh is None:
        raise MeshloomError(f"build(mesh) of {script} needs a mesh", fix=MESH)
    return build(mesh)


def check_mesh(used: tuple[Mesh, ...], asked: Mesh | None) -> None:
    """An error if the step ran on meshes of its own and not on the one that was asked for."""
    if asked is not None and used and all(each.shape != asked.shape for each in used):
        ran = ", ".join(map(str, used))
        raise MeshloomError(
            f"the step ran on {ran} and not on {asked}",
            fix="use the mesh that build(mesh) gets, or loom.current_mesh()",
        )
