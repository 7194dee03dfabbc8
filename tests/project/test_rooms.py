"""The rooms in order: a room imports only rooms above it, and the pure rooms start without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "meshloom"
ORDER = (
    "errors types settings mesh placement fabric collectives context ops cost planner engines comms processes runtime "
    "tensor checkpoint observe nn controller ttnn distributed extend cli"
).split()
PURE = (*ORDER[: ORDER.index("planner") + 1], "observe")
# A module of ours as a string, or the beginning of one in an f-string: what `import_module` is given, in some table.
NAMED = re.compile(r"meshloom(\.[a-z_]+)+\.?")
# Rooms that a room may import from below, inside functions only.
LAZY = {("observe", "tensor"), ("observe", "torch")}


@dataclass(frozen=True)
class Import:
    """One import: the room it stands in, the module it names, and whether it waits inside a function."""

    file: str
    room: str
    module: str
    lazy: bool


def room_of(module: str) -> str | None:
    """The room of a module by its dotted name; None for the package itself and for strangers."""
    parts = module.split(".")
    return parts[1] if parts[0] == "meshloom" and len(parts) > 1 else None


def read_imports(source: str, file: str, module: str) -> Iterator[Import]:
    """Every import of a source text: those inside functions, under TYPE_CHECKING and by a string included."""
    room = room_of(module) or "__init__"
    for node, lazy in _walk(ast.parse(source), False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, room, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            if base == "meshloom":
                for alias in node.names:
                    yield Import(file, room, f"meshloom.{alias.name}", lazy)
            else:
                yield Import(file, room, base, lazy)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield Import(file, room, node.value.rstrip("."), True)


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside
        yield from _walk(child, inside)


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    lead = module.split(".")[: -node.level]
    return ".".join([*lead, *([node.module] if node.module else [])])


def all_imports() -> list[Import]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found += read_imports(path.read_text(), str(path.relative_to(SOURCE)), ".".join(parts))
    return found


def downward(imports: list[Import]) -> list[Import]:
    """The imports of a room that stands below the importing one."""
    return [each for each in imports if _is_downward(each)]


def _is_downward(each: Import) -> bool:
    target = room_of(each.module)
    if each.room in ("__init__", "__main__"):
        return False
    if each.module == "meshloom":
        return True
    if target is None or target == each.room:
        return False
    if each.lazy and (each.room, target) in LAZY:
        return False
    return target not in ORDER or ORDER.index(target) > ORDER.index(each.room)


def torch_in_pure_rooms(imports: list[Import]) -> list[Import]:
    """The imports of torch where it must not be: at module level of a pure room, or anywhere in one but observe."""
    named = [each for each in imports if each.room in PURE and each.module.split(".")[0] == "torch"]
    return [each for each in named if not (each.lazy and (each.room, "torch") in LAZY)]


def test_every_file_belongs_to_a_room_of_the_order():
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert rooms - {"__init__", "__main__"} <= set(ORDER)
    assert {"errors", "types", "mesh", "placement", "ops", "planner", "engines", "tensor", "observe"} <= rooms


def test_no_room_imports_a_room_below_it():
    imports = all_imports()
    assert len(imports) > 100
    assert downward(imports) == []


def test_the_pure_rooms_do_not_import_torch():
    assert torch_in_pure_rooms(all_imports()) == []


def test_the_engine_room_does_import_torch():
    assert any(each.room == "engines" and each.module == "torch" for each in all_imports())


PLANTED = {
    "at module level": "from meshloom.tensor.base import Tensor\n",
    "inside a function": "def late():\n    from meshloom.tensor import base\n",
    "inside a method": "class A:\n    def late(self):\n        import meshloom.tensor.base\n",
    "relative": "from ..tensor import base\n",
    "from the package": "from meshloom import tensor\n",
    "for types only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from meshloom.tensor import base\n",
    "the whole package": "import meshloom\n",
    "by a string": "import importlib\n\ndef late():\n    importlib.import_module('meshloom.tensor.base')\n",
    "by a string with a gap": "def late(name):\n    return __import__(f'meshloom.tensor.{name}')\n",
    "by a table of strings": "LAZY = {'Tensor': 'meshloom.tensor.base'}\n",
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_violation_is_found(how):
    found = downward(list(read_imports(PLANTED[how], "planner/planted.py", "meshloom.planner.planted")))
    assert len(found) == 1
    assert found[0].room == "planner"


def test_observe_may_import_tensor_late_and_not_early():
    late = "def explain():\n    from meshloom.tensor import shadow\n    import torch\n"
    early = "from meshloom.nn import layers\nimport torch\n"
    name = "meshloom.observe.planted"
    assert downward(list(read_imports(late, "o", name))) == []
    assert torch_in_pure_rooms(list(read_imports(late, "o", name))) == []
    assert len(downward(list(read_imports(early, "o", name)))) == 1
    assert len(torch_in_pure_rooms(list(read_imports(early, "o", name)))) == 1


def test_a_planted_torch_is_found_in_a_pure_room_even_inside_a_function():
    text = "def late():\n    import torch.nn as nn\n"
    assert len(torch_in_pure_rooms(list(read_imports(text, "p", "meshloom.planner.planted")))) == 1


def run_without_torch(program: str) -> str:
    """Run a program in a fresh interpreter and check that torch was not imported by it."""
    whole = program + "\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'\nprint('done')\n"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


PURE_PROGRAMS = {
    "import": "import meshloom",
    "parse and draw": "import meshloom as loom\n"
    "t = loom.parse('f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)')\nprint(loom.draw(t), loom.draw_mesh(t.mesh))",
    "plan a matmul": "from meshloom import Mesh, Shard, Topology\nfrom meshloom.ops import Call, Ref\n"
    "from meshloom.planner import consider, plan\n"
    "a = Topology(Mesh(tp=4), (Shard(1),), (8, 8), 'f32')\nb = Topology(Mesh(tp=4), (Shard(0),), (8, 8), 'f32')\n"
    "p = plan(Call('matmul', (a, b), {'input': Ref(0), 'other': Ref(1)}, ()))\n"
    "assert [str(c) for c in p.forward] == ['all_reduce(sum) over tp of 4: 384 B']\nconsider(p)",
    "a route": "from meshloom import Mesh, Replicate, Shard, Topology\nfrom meshloom.fabric import VIRTUAL\n"
    "from meshloom.planner import route\n"
    "route(Topology(Mesh(tp=4), (Shard(0),), (8, 4), 'f32'), (Replicate(),), VIRTUAL)",
    "scopes": "import meshloom as loom\nwith loom.record() as log, loom.communication('forbid'):\n    pass\n"
    "print(loom.communication_table(log))",
}


@pytest.mark.parametrize("name", PURE_PROGRAMS)
def test_planning_and_drawing_do_not_import_torch(name):
    assert run_without_torch(PURE_PROGRAMS[name]).endswith("done\n")


def test_the_check_for_torch_can_fail():
    with pytest.raises(AssertionError, match="torch was imported"):
        run_without_torch("import meshloom\nmeshloom.Tensor")
