"""What `help(loom.matmul)` shows: torch's signature, with `output=`, and torch's own text.

The signatures are the lines of the stub that type checkers read, `meshloom/__init__.pyi`; `tests/stubs.py` makes it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

_STUB = Path(__file__).parents[1] / "__init__.pyi"
_Parameter = inspect.Parameter


def describe(function: Callable[..., object]) -> Callable[..., object]:
    """The function of an op with the signature and the text of torch's function of that name.

    >>> import meshloom as loom
    >>> list(inspect.signature(loom.matmul).parameters)
    ['input', 'other', 'out', 'output']
    """
    name = function.__name__
    described: Any = function
    line = _lines().get(name)
    if line is not None:
        described.__signature__ = read_signature(line)
    said = inspect.getdoc(_theirs(name))
    described.__doc__ = f"As `torch.{name}`, on a mesh; `output=` asks for the placements of the result."
    if said:
        described.__doc__ += f"\n\ntorch says:\n\n{said}\n"
    return function


@cache
def _lines() -> dict[str, str]:
    """The first line of the stub for each function."""
    found: dict[str, str] = {}
    for line in _STUB.read_text(encoding="utf-8").splitlines() if _STUB.is_file() else ():
        if line.startswith("def "):
            found.setdefault(line[4 : line.index("(")], line)
    return found


def _theirs(name: str) -> Any:
    """torch's function of a name of ours: `linalg_det` is `torch.linalg.det`."""
    room, _, rest = name.partition("_")
    if room in ("linalg", "special"):
        return getattr(getattr(torch, room), rest, None)
    places = (torch, torch.nn.functional, torch.Tensor)
    return next((getattr(place, name) for place in places if hasattr(place, name)), None)


def read_signature(line: str) -> inspect.Signature:
    """The signature that a line of a stub spells.

    >>> read_signature("def f(x: Tensor, *, dim: int = 0) -> Tensor: ...")
    <Signature (x: 'Tensor', *, dim: 'int' = 0) -> 'Tensor'>
    """
    (function,) = ast.parse(line).body
    assert isinstance(function, ast.FunctionDef)
    result = ast.unparse(function.returns) if function.returns else inspect.Signature.empty
    return inspect.Signature(list(_parameters(function.args)), return_annotation=result)


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults: list[Any] = [None] * (len(placed) - len(arguments.defaults)) + arguments.defaults
    for number, (argument, default) in enumerate(zip(placed, defaults, strict=True)):
        is_first = number < len(arguments.posonlyargs)
        yield _parameter(
            argument, _Parameter.POSITIONAL_ONLY if is_first else _Parameter.POSITIONAL_OR_KEYWORD, default
        )
    if arguments.vararg:
        yield _parameter(arguments.vararg, _Parameter.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, _Parameter.KEYWORD_ONLY, default)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, _Parameter.VAR_KEYWORD)


class _Spelled:
    """A default that is no plain value, shown as it is spelled."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
    annotation = ast.unparse(argument.annotation) if argument.annotation else _Parameter.empty
    value = _Parameter.empty if default is None else _value(default)
    return _Parameter(argument.arg, kind, default=value, annotation=annotation)


def _value(default: ast.expr) -> Any:
    try:
        return ast.literal_eval(default)
    except ValueError:
        return _Spelled(ast.unparse(default))
