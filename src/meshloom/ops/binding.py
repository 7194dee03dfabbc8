"""A call's arguments by name, and with a `Ref` in the place of each tensor: what rules read."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from meshloom.errors import ArgumentError
from meshloom.ops.rule import Op, Ref

# Other names of arguments: numpy's, and torch's where its functions and methods differ.
_RENAMED = {
    "axis": "dim",
    "keepdims": "keepdim",
    "self": "input",
    "tensor": "input",
    "x": "input",
    "x1": "input",
    "a": "input",
    "x2": "other",
    "A": "input",
    "B": "other",
    "split_size_or_sections": "sections",
    "split_size": "sections",
    "chunks": "sections",
    "mat2": "other",
    "other": "mat2",
    "axis0": "dim0",
    "axis1": "dim1",
    "size": "shape",  # of view
    "dims": "repeats",  # of tile
}


@cache
def _signature(text: str) -> inspect.Signature:
    """The signature of a function with these parameters; defaults are literals.

    >>> str(_signature("input, *shape, dim=-1"))
    '(input, *shape, dim=-1)'
    """
    written = ast.parse(f"def op({text}): ...").body[0]
    assert isinstance(written, ast.FunctionDef)
    given = written.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
    found = [_parameter(each, _PLACE, default) for each, default in zip(given.args, defaults, strict=True)]
    if given.vararg is not None:
        found.append(_parameter(given.vararg, inspect.Parameter.VAR_POSITIONAL, None))
    found += [_parameter(each, _NAME, value) for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return inspect.Signature(found)


_PLACE, _NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def _parameter(written: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
    return inspect.Parameter(written.arg, kind, default=value)


def bind(op: Op, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, Any]:
    """The arguments by name, defaults filled in; `*shape` may come as numbers, as a tuple or by name."""
    if op.signature is None:
        return dict(kwargs)
    signature = _signature(op.signature)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    named = {_rename(name, signature): value for name, value in kwargs.items()}
    if rest is not None and rest in named:  # what stands before it in the signature is given by place as well
        before = [*signature.parameters][len(args) : [*signature.parameters].index(rest) + 1]
        args = (*args, *[named.pop(name) for name in before if name in named])
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentError(f"{op.name}: {error}", fix=f"call it as {op.name}({op.signature})") from None
    bound.apply_defaults()
    found = dict(bound.arguments)
    if rest is not None and len(found[rest]) == 1 and isinstance(found[rest][0], (tuple, list)):
        found[rest] = tuple(found[rest][0])
    return found


def sort_named(op: Op, args: Sequence[object], kwargs: dict[str, Any]) -> tuple[Sequence[object], dict[str, Any]]:
    """Named arguments in the order of the op's signature, whichever way round they were written; the first by place.

    >>> from meshloom.ops import OPS
    >>> sort_named(OPS["layer_norm"], (), {"bias": 1, "weight": 2, "input": 3})
    ((3,), {'weight': 2, 'bias': 1})
    """
    if op.signature is None or (args and len(kwargs) < 2):
        return args, kwargs
    signature = _signature(op.signature)
    names = [*signature.parameters]
    places = {name: names.index(own) for name in kwargs if (own := _rename(name, signature)) in names}
    ordered = dict(sorted(kwargs.items(), key=lambda each: places.get(each[0], len(names))))
    if not args and places and min(places.values()) == 0:
        return (ordered.pop(next(iter(ordered))),), ordered
    return args, ordered


def _rename(name: str, signature: inspect.Signature) -> str:
    """Our name of an argument that is called otherwise; what the op does not have keeps the name that was written."""
    other = _RENAMED.get(name, name)
    return other if other in signature.parameters and name not in signature.parameters else name


def refer(value: Any, tensors: list[Any], kind: type) -> Any:
    """The argument with a `Ref` for each tensor, numbered in order of appearance; lists become tuples."""
    if isinstance(value, kind):
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if isinstance(value, (tuple, list)):
        return tuple(refer(each, tensors, kind) for each in value)
    return value
