"""One way to call anything by name: an overload, the op table, an in-place form, or the fallback.

An *overload* here is a Python function that sorts out the forms that torch's function has; `tensor.torch_api` fills
the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.errors import ArgumentError
from meshloom.ops import ALIASES, OPS
from meshloom.tensor.base import Tensor
from meshloom.tensor.binding import Unhashable
from meshloom.tensor.clients import HERE, Clients
from meshloom.tensor.dispatch import call
from meshloom.tensor.fallback import fallback
from meshloom.tensor.writing import write, write_out

Overload = Callable[..., Any]
OVERLOADS: dict[str, Overload] = {}
PURE: set[str] = set()


def pure(overloads: dict[str, Overload]) -> dict[str, Overload]:
    """Overloads that look at nothing but topologies and arguments: for a call seen before nobody asks them again."""
    PURE.update(overloads)
    return overloads


def table_call(name: str, *args: object, output: object = None, out: object = None, **kwargs: object) -> Tensor:
    """An op of the table by name that has one result, with `output=` placements and torch's `out=`."""
    result: Tensor = call(ALIASES.get(name, name), args, kwargs, output)
    if out is not None:
        result = write_out(result, out)
    return result


def table_results(
    name: str, *args: object, output: object = None, out: object = None, **kwargs: object
) -> tuple[Tensor, ...]:
    """The same of an op that has several results."""
    results: tuple[Tensor, ...] = call(ALIASES.get(name, name), args, kwargs, output)
    if out is not None:
        results = write_out(results, out)
    return results


def invoke(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """Call anything by name; `function` is torch's own for the fallback."""
    if Clients.take is not None:
        found = Clients.take(f"known:{name}", _calling(name), args, kwargs)
        if found is not HERE:
            return found
    try:
        overload = OVERLOADS.get(name)
        if overload is not None:
            return overload(*args, **(_respell(name, kwargs) if kwargs else kwargs))
        if (op := ALIASES.get(name, name)) in OPS:
            return table_call(name, *args, **kwargs) if kwargs else call(op, args, kwargs)
        if is_written(name) and isinstance(args[0], Tensor):
            return write(_bare_name(name), args[0], args[1:], kwargs)
    except Unhashable:
        pass
    return fallback(function or torch_function(name), args, kwargs, name)


# numpy's names of arguments, which torch's own functions take as well; those of `torch.nn.functional` do not
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "a": "input", "x2": "other"}
_OWN_NAMES = frozenset("cosine_similarity pairwise_distance tensordot".split())


def _respell(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Named arguments under torch's names."""
    if name in _OWN_NAMES or _NUMPY.keys().isdisjoint(kwargs):
        return kwargs
    return {_NUMPY.get(key, key): each for key, each in kwargs.items()}


def _calling(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: invoke(name, args, kwargs)


INPLACE = {f"__i{name}__": op for name, op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items()}  # fmt: skip


def _bare_name(name: str) -> str:
    bare = INPLACE.get(name) or name[:-1]
    return ALIASES.get(bare, bare)


def is_written(name: str) -> bool:
    """Whether a name is the in-place form of a pointwise op of the table."""
    if name not in INPLACE and (not name.endswith("_") or name.endswith("__")):
        return False
    op = OPS.get(_bare_name(name))
    return op is not None and op.signature is None and op.in_place


_SPACES = {"special": torch.special, "linalg": torch.linalg}


def spellings(name: str) -> list[tuple[object, str]]:
    """Where torch may have a function of that name; `special_ndtr` is `torch.special.ndtr`."""
    space, _, bare = name.partition("_")
    plain = [(torch.Tensor, name), (torch, name), (F, name), (torch.special, name)]
    return [*plain, (_SPACES[space], bare)] if space in _SPACES else plain


def torch_function(name: str) -> Callable[..., Any]:
    """torch's own function of a name, for the fallback."""
    for place, bare in spellings(name):
        found = getattr(place, bare, None)
        if callable(found):
            function: Callable[..., Any] = found
            return function
    raise ArgumentError(f"torch has no function {name!r}")
