"""`src/meshloom/__init__.pyi` from torch's own stubs: the signatures of `loom.*` and of the methods of a tensor.

`python tests/stubs.py` writes the file; a test compares it with torch and with the public names. Functions of the op
table have torch's arguments and `output=`, and return our tensors; methods are torch's, and return ours too. What is
meshloom's own is read from its sources.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import meshloom as loom
from meshloom import _LAZY, _OPS

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "src" / "meshloom" / "__init__.pyi"
CREATION = ROOT / "src" / "meshloom" / "tensor" / "creation.py"
TORCH = Path(torch.__file__).parent

VERSION = torch.__version__.partition("+")[0]
HEADER = f'''# Made by `python tests/stubs.py` from the stubs of torch {VERSION}; a test compares it.
# mypy: ignore-errors
"""meshloom: a mesh-native tensor runtime."""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, overload

import torch
from torch import Generator, SymInt, contiguous_format, inf, memory_format, preserve_format, strided
from torch._prims_common import DeviceLikeType
from torch.nn.common_types import _ratio_any_t, _size_1_t, _size_2_opt_t, _size_2_t
from torch.nn.common_types import _size_3_opt_t, _size_3_t, _size_any_t
from torch.types import _bool, _complex, _device, _dtype, _float, _int, _layout, _qscheme, _size
from torch.types import Device, Number, Storage

import meshloom.tensor.base
from meshloom import checkpoint as checkpoint
from meshloom import collectives as collectives
from meshloom import distributed as distributed
from meshloom import engines as engines
from meshloom import extend as extend
from meshloom import fabric as fabric
from meshloom import runtime as runtime
from meshloom import ttnn as ttnn
from meshloom.placement import Placements
'''

Function = ast.FunctionDef


# Reading


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def by_name(nodes: list[ast.stmt]) -> dict[str, list[Function]]:
    """The functions among some statements, overloads together."""
    found: dict[str, list[Function]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


@cache
def torch_functions() -> dict[str, list[Function]]:
    """What torch's stubs say of `torch.*` and, where that has no such name, of `torch.nn.functional.*`."""
    functional = by_name(parsed(TORCH / "nn" / "functional.pyi").body)
    return {**functional, **by_name(parsed(TORCH / "_C" / "_VariableFunctions.pyi").body)}


@cache
def tensor_class() -> ast.ClassDef:
    body = parsed(TORCH / "_C" / "__init__.pyi").body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == "TensorBase")


_TYPES = {"Tensor": "Tensor", "int": "_int", "SymInt": "_int", "float": "_float", "bool": "_bool", "str": "str"}
_TYPES |= {
    "number": "Number",
    "Scalar": "Number",
    "Generator": "Generator",
    "ScalarType": "_dtype",
    "Device": "_device",
}


def from_schema(name: str) -> list[Function]:
    """The signature of an op that no stub has, from its schema: `linalg_cholesky(input, *, upper=False)`."""
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        if not any(argument.is_out for argument in schema.arguments):
            found.append(_from_schema(name, schema))
    return found


def _from_schema(name: str, schema: Any) -> Function:
    parts = []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        label = {"self": "input", "from": "from_"}.get(argument.name, argument.name)
        default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
        parts.append(f"{label}: {_spelled(str(argument.type))}{default}")
    results = [_spelled(str(each.type)) for each in schema.returns]
    result = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    return _read(f"def {name}({', '.join(parts)}) -> {result}: ...")


def _spelled(kind: str) -> str:
    if kind.startswith("Optional["):
        return f"{_spelled(kind[9:-1])} | None"
    if kind.startswith("List["):
        return f"Sequence[{_spelled(kind[5:-1])}]"
    return _TYPES.get(kind, "Any")


def _read(text: str) -> Function:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return node


# What no stub and no schema has as we have it
OURS = {
    "logsigmoid": ["def logsigmoid(input: Tensor) -> Tensor: ..."],
    "getitem": ["def getitem(input: Tensor, index: Any) -> Tensor: ..."],
    "einsum": ["def einsum(equation: str, *operands: Any) -> Tensor: ..."],
    "meshgrid": ["def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]: ..."],
    "index": ["def index(input: Tensor, indices: Sequence[Tensor | None]) -> Tensor: ..."],
    "expand": ["def expand(input: Tensor, *size: Any) -> Tensor: ..."],
    "view": ["def view(input: Tensor, *size: Any) -> Tensor: ..."],
    "repeat": ["def repeat(input: Tensor, *repeats: Any) -> Tensor: ..."],
    "to": ["def to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor: ..."],
    "unfold": ["def unfold(input: Tensor, dimension: _int, size: _int, step: _int) -> Tensor: ..."],
    "split": [
        "def split(tensor: Tensor, split_size_or_sections: _int | Sequence[_int], dim: _int = 0) "
        "-> tuple[Tensor, ...]: ..."
    ],
    "tensordot": ["def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor: ..."],
}


def signatures_of(name: str) -> list[Function]:
    """torch's signatures of an op, without those that name dims."""
    if name in OURS:
        return [_read(text) for text in OURS[name]]
    found = [copy.deepcopy(each) for each in torch_functions().get(name) or from_schema(name)]
    found = [_fill_defaults(each) for each in found if not _is_named(each)]
    assert found, f"torch says nothing of {name}: add it to OURS"
    return found


def _fill_defaults(function: Function) -> Function:
    """The values of defaults that a stub leaves open, from the function itself; `self` is called `input` there."""
    for argument in (*function.args.posonlyargs, *function.args.args):
        argument.arg = "input" if argument.arg == "self" else argument.arg
    known = getattr(torch.nn.functional, function.name, None)
    if not inspect.isfunction(known):
        return function
    arguments, values = function.args, inspect.signature(known).parameters
    names = [each.arg for each in arguments.args[len(arguments.args) - len(arguments.defaults) :]]
    arguments.defaults = [_filled(*each, values) for each in zip(names, arguments.defaults, strict=True)]
    return function


def _filled(name: str, default: ast.expr, values: Any) -> ast.expr:
    is_open = isinstance(default, ast.Constant) and default.value is ...
    value = values[name].default if is_open and name in values else inspect.Parameter.empty
    return ast.Constant(value) if isinstance(value, (int, float, str, type(None))) else default


def _is_named(function: Function) -> bool:
    """Whether it is for named tensors, which torch has given up."""
    return any(word in ast.unparse(function.args) for word in ("EllipsisType", "names:"))


# Writing


BUILTINS = ("int", "float", "bool", "complex")  # a tensor has methods of these names


class Dense(ast.NodeTransformer):
    """Arguments may be torch's tensors; `Tensor` alone stands for ours, and so do results."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in BUILTINS:
            return ast.Name(f"_{node.id}")
        return ast.parse("torch.Tensor", mode="eval").body if node.id == "Tensor" else node


class Results(ast.NodeTransformer):
    """Named tuples of torch's tensors, as named tuples of ours."""

    def __init__(self) -> None:
        self.met: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(f"_{node.id}") if node.id in BUILTINS else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node).startswith("torch.return_types."):
            self.met.add(node.attr)
            return ast.Name(f"_{node.attr}")
        return ast.Name("Tensor") if ast.unparse(node) == "torch.Tensor" else node


RESULTS = Results()


def written(function: Function, is_method: bool = False, is_overload: bool = False, output: bool = False) -> str:
    """One line of a stub."""
    function = copy.deepcopy(function)
    arguments = function.args
    if output:
        arguments.kwonlyargs.append(ast.arg("output", ast.parse("Placements | None", mode="eval").body))
        arguments.kw_defaults.append(ast.Constant(None))
    function.args = Dense().visit(arguments)
    if function.returns is not None:
        function.returns = RESULTS.visit(function.returns)
    function.body, function.decorator_list = [ast.Expr(ast.Constant(...))], []
    line = " ".join(ast.unparse(ast.fix_missing_locations(function)).split("\n    "))
    indent = "    " if is_method else ""
    return f"{indent}@overload\n{indent}{line}" if is_overload else indent + line


def lines_of(functions: list[Function], **options: Any) -> Iterator[str]:
    """The lines of one function; overloads that have become equal are one."""
    found = list(dict.fromkeys(written(each, **options) for each in functions))
    if len(found) == 1:
        return iter(found)
    return iter(list(dict.fromkeys(written(each, is_overload=True, **options) for each in functions)))


def function_lines() -> Iterator[str]:
    for name in _OPS:
        if name not in _LAZY:
            yield from lines_of(signatures_of(name), output=True)


# Ours


def own_lines() -> Iterator[str]:
    """What is meshloom's own: imported as it is, or written out where it gives a tensor."""
    for name in sorted({*_LAZY} - {"Tensor", "Parameter"}):
        found = getattr(loom, name)
        source = _source_of(found) if inspect.isfunction(inspect.unwrap(found)) else None
        if source is not None and source.returns is not None and ast.unparse(source.returns) == "Tensor":
            yield written(_with_options(source))
        else:
            yield f"from {_LAZY[name]} import {name} as {name}"
    for name in sorted(set(loom.__all__) - {*_LAZY, *_OPS}):
        found = getattr(loom, name)
        if not inspect.ismodule(found):
            yield f"from {_home_of(name)} import {name} as {name}"


def _with_options(function: Function) -> Function:
    """A function that makes tensors, with the options that all of them take by name; `_like` takes more of torch's."""
    if function.args.kwarg is None or function.args.kwarg.arg != "options":
        return function
    made = copy.deepcopy(function)
    named = {each.arg for each in (*made.args.args, *made.args.kwonlyargs)}
    (options,) = (each for each in parsed(CREATION).body if isinstance(each, ast.ClassDef) and each.name == "Options")
    for field in options.body:
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) not in named:
            made.args.kwonlyargs.append(ast.arg(ast.unparse(field.target), field.annotation))
            made.args.kw_defaults.append(field.value)
    if not made.name.endswith("_like"):
        made.args.kwarg = None
    return made


def _home_of(name: str) -> str:
    source = parsed(ROOT / "src" / "meshloom" / "__init__.py")
    for node in source.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return str(node.module)
    raise AssertionError(f"{name} comes from nowhere")


def _source_of(function: Any) -> Function | None:
    function = inspect.unwrap(function)
    module = importlib.import_module(function.__module__)
    return by_name(parsed(Path(inspect.getfile(module))).body).get(function.__name__, [None])[0]


# The class


def class_lines() -> Iterator[str]:
    yield "class Tensor(meshloom.tensor.base.Tensor, torch.Tensor):"
    base = by_name(parsed(ROOT / "src" / "meshloom" / "tensor" / "dtensors.py").body)
    for name in ("full_tensor", "to_dtensor", "to_local"):
        yield written(base[name][0], is_method=True)
    yield "    def to_torch(self) -> torch.Tensor: ..."
    yield "    def redistribute(self, placements: Placements | None = None, *, copy: bool = False) -> Tensor: ..."
    yield "    def __getitem__(self, index: Any) -> Tensor: ..."
    yield "    def __iter__(self) -> Iterator[Tensor]: ..."
    for name in ("T", "mT", "H", "mH", "data", "real", "imag"):
        yield f"    @property\n    def {name}(self) -> Tensor: ..."
    yield "    @property\n    def grad(self) -> Tensor | None: ..."
    for name in IN_PYTHON:
        yield f"    def {name}(self, other: Any) -> Tensor: ..."
    yield "    def split(self, split_size: _int | Sequence[_int], dim: _int = 0) -> tuple[Tensor, ...]: ..."
    yield "    def unflatten(self, dim: _int, sizes: Sequence[_int]) -> Tensor: ..."
    yield "    def norm(self, p: Any = 'fro', dim: Any = None, keepdim: _bool = False) -> Tensor: ..."
    yield from method_lines()
    yield "class Parameter(Tensor, torch.nn.Parameter):"
    yield (
        "    def __new__(cls, data: Any, mesh: Mesh | None = None, placements: Placements | None = None, "
        "requires_grad: builtins.bool = True) -> Parameter: ..."
    )


# Operators that torch writes in Python, without types.
IN_PYTHON = (
    "__floordiv__ __pow__ __ipow__ __rsub__ __rdiv__ __rtruediv__ __rmod__ __rpow__ __rfloordiv__ __rmatmul__ "
    "__rlshift__ __rrshift__"
).split()
SKIPPED = {*IN_PYTHON} | {"__getitem__", "__iter__", "__new__", "__init__", "__setitem__", "__len__"}


def method_lines() -> Iterator[str]:
    """torch's methods that give tensors, and ours for ops that torch has as functions only."""
    theirs = by_name(tensor_class().body)
    for name, functions in theirs.items():
        if name not in SKIPPED and any(_gives_tensors(each) for each in functions):
            yield from lines_of([each for each in functions if not _is_named(each)], is_method=True)
    without = {*dir(torch.Tensor), *theirs, "einsum", "getitem", "meshgrid"}
    for name in _OPS:
        if name not in without and name in vars(loom.Tensor):
            takers = [each for each in signatures_of(name) if _takes_tensor(each)]
            yield from lines_of([_as_method(each) for each in takers], is_method=True)


def _gives_tensors(function: Function) -> bool:
    return function.returns is not None and any(
        word in ast.unparse(function.returns) for word in ("Tensor", "return_types")
    )


def _takes_tensor(function: Function) -> bool:
    """Whether the first argument is a tensor, so that it can be a method."""
    first = (*function.args.posonlyargs, *function.args.args)[:1]
    return any(each.annotation is None or "Tensor" in ast.unparse(each.annotation) for each in first)


def _as_method(function: Function) -> Function:
    made = copy.deepcopy(function)
    first = (made.args.posonlyargs or made.args.args)[0]
    first.arg, first.annotation = "self", None
    return made


def result_lines() -> Iterator[str]:
    """The named tuples that were met."""
    for node in parsed(TORCH / "return_types.pyi").body:
        if isinstance(node, ast.ClassDef) and node.name in RESULTS.met:
            fields = [each.name for each in by_name(node.body).values() for each in each[:1] if each.decorator_list]
            yield f"class _{node.name}(tuple[{', '.join('Tensor' for _ in fields)}]):"
            for field in fields:
                yield f"    @property\n    def {field}(self) -> Tensor: ..."


def stub() -> str:
    """The whole file."""
    body = [*own_lines(), "", *class_lines(), "", *function_lines()]
    names = "\n".join(f"    {name!r}," for name in sorted(set(loom.__all__) | {*_OPS} - {*dir(builtins)}))
    parts = [HEADER, "__version__: str", f"__all__ = [\n{names}\n]", *result_lines(), "", *body]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"{len(stub().splitlines())} lines in {STUB}")
