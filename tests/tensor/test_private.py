"""Torch's private names stand in one file, each is there in the torch that is installed, and each is used.

A private name is one that begins with an underscore, anywhere behind `torch`: `torch._x`, `torch.y._z`, `F._z`,
`from torch._x import y`, `from torch.x._y import z`, `from torch.x import _y`, `import torch._x`, and the same names in
text that is imported or looked up. Double underscores are Python's.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshloom.engines import private

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "meshloom"
PRIVATE = SOURCES / "engines" / "private.py"
# a place in the stack of callers, compared as text: nothing is looked up by it
TEXTS = {("tensor/methods.py", "torch._functorch.")}


def is_private(name: str) -> bool:
    return any(each.startswith("_") and not each.startswith("__") for each in name.split("."))


def private_names(source: str) -> set[str]:
    """The private names of torch in a program, under the full names of modules and of what was imported."""
    tree = ast.parse(source)
    known = dict(_imports(tree))
    found = {name for name in known.values() if is_private(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            head, _, rest = name.partition(".")
            if head in known and is_private(rest):
                found.add(f"{known[head]}.{rest}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if re.fullmatch(r"torch(\.\w+)*\.?", text) and is_private(text):
                found.add(text)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = _dotted(node.args[0])
            head = (name or "").partition(".")[0]
            named = node.args[1]
            if head in known and isinstance(named, ast.Constant) and is_private(str(named.value)):
                found.add(f"{known[head]}.{named.value}")
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What names of a program stand for names of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    yield (each.asname, each.name) if each.asname else ("torch", "torch")
                    if not each.asname and is_private(each.name):
                        yield each.name, each.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return head and f"{head}.{node.attr}"
    return None


def exists(name: str) -> bool:
    """Whether the installed torch has a name."""
    names = name.split(".")
    for count in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for each in names[count:]:
            if not hasattr(found, each):
                return False
            found = getattr(found, each)
        return True
    return False


def own_names() -> list[str]:
    """The names that private.py gives."""
    tree = ast.parse(PRIVATE.read_text())
    assigned = [each.target.id for each in tree.body if isinstance(each, ast.AnnAssign)]
    defined = [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)]
    return [*assigned, *defined, *private.__all__]


def test_no_source_but_one_names_a_private_name_of_torch():
    files = sorted(set(SOURCES.rglob("*.py")) - {PRIVATE})
    assert len(files) > 200
    found = {(str(path.relative_to(SOURCES)), name) for path in files for name in private_names(path.read_text())}
    assert found == TEXTS


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\nx = torch._grouped_mm(a, b)", "torch._grouped_mm"),
        ("import torch\ntorch.autograd._is_checkpoint_valid()", "torch.autograd._is_checkpoint_valid"),
        ("import torch\nx = torch.Tensor._make_wrapper_subclass", "torch.Tensor._make_wrapper_subclass"),
        ("import torch.nn.functional as F\nF._canonical_mask(x)", "torch.nn.functional._canonical_mask"),
        ("from torch import nn\nnn.functional._x(y)", "torch.nn.functional._x"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch._C import TensorBase", "torch._C.TensorBase"),
        ("from torch.utils import _pytree as trees", "torch.utils._pytree"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._dynamo as d\nd.disable(f)", "torch._dynamo"),
        ("def f():\n    import torch.utils._pytree", "torch.utils._pytree"),
        ("import_module('torch.utils._pytree')", "torch.utils._pytree"),
        ("import torch\ngetattr(torch, '_grouped_mm')", "torch._grouped_mm"),
    ],
)
def test_a_private_name_would_be_found(source, name):
    assert name in private_names(source)


def test_public_names_and_those_of_python_are_not_taken_for_private():
    source = "import torch\nfrom torch import nn\ntorch.ops.aten.add.Tensor(x)\nnn.Module.__init__(self)\nx._data\n"
    assert private_names(source) == set()


def test_each_private_name_is_there_in_the_installed_torch():
    names = private_names(PRIVATE.read_text())
    assert len(names) >= 15
    assert [name for name in sorted(names) if not exists(name)] == []
    assert not exists("torch._no_such_name") and not exists("torch._no_such_module.name")


def test_each_attribute_of_arrays_that_is_listed_is_there_and_used():
    listed = re.findall(r"`([A-Za-z]*\.?_\w+)(?:\(\))?`", private.__doc__)
    assert len(listed) >= 6
    sources = "\n".join(path.read_text() for path in SOURCES.rglob("*.py") if path != PRIVATE)
    for each in listed:
        owner, _, name = each.rpartition(".")
        value = torch.zeros(1).untyped_storage() if owner == "UntypedStorage" else torch.zeros(1)
        assert hasattr(value, name), each
        assert re.search(rf"\.{name}\b", sources), each


def test_each_private_name_is_used_and_has_its_reason():
    sources = [path.read_text() for path in sorted(SOURCES.rglob("*.py")) if path != PRIVATE]
    used = {name for text in sources for name in re.findall(r"\bprivate\.(\w+)", text)}
    for text in sources:
        for found in re.findall(r"from meshloom\.engines\.private import (\([^)]*\)|.*)", text):
            used |= set(re.findall(r"\w+", found))
    names = own_names()
    assert len(names) >= 15 and len(set(names)) == len(names)
    assert sorted(used) == sorted(names)
    lines = PRIVATE.read_text().splitlines()
    for first, second in itertools.pairwise(lines):
        if re.match(r"\w+: Any = ", second):
            assert first.startswith(("# ", "    ")) or re.match(r"\w+: Any = ", first), second


def test_the_range_of_torch_is_the_one_that_was_run():
    pinned = re.search(r"^torch==(\d+)\.(\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    major, minor = map(int, pinned.groups())
    ranges = re.findall(r'"torch([<>=][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert ranges == [f">={major}.{minor},<{major}.{minor + 1}"]
    assert importlib.metadata.version("torch").startswith(f"{major}.{minor}.")
    release = pinned[0].removeprefix("torch==")
    assert f"Seen in torch {release}." in private.__doc__
    told = re.search(r"run with torch (\S+) on Python (\S+)[;,.]", (ROOT / "docs/dependencies.md").read_text())
    assert told is not None and told.groups() == (release, "3.11")
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()
