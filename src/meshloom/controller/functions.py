"""The functions that a client may call on its workers, by name: ours, those of torch that take tensors, no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.overrides import get_overridable_functions, resolve_name

from meshloom import collectives
from meshloom.collectives import ON_TENSORS
from meshloom.errors import UnsupportedError, closest
from meshloom.ops import ALIASES, OPS
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import OVERLOADS, invoke, is_written
from meshloom.tensor.dispatch import call
from meshloom.tensor.functions import KNOWN, LISTS

Function = Callable[..., Any]

# What is no op: what makes tensors of nothing, mostly; and where it is.
_MAKING = {
    **dict.fromkeys("full arange randn rand".split(), "meshloom.tensor.creation"),
    "_synchronize": "meshloom.tensor.gradient_sums",
    **dict.fromkeys(
        "empty eye linspace logspace randint randint_like randperm normal bernoulli multinomial".split(),
        "meshloom.tensor.creation_random",
    ),
}
_NAMES = frozenset({*KNOWN.values(), *OPS, *ALIASES, *OVERLOADS})
# Attributes that are read and written with a call of their own.
PROPERTIES = ("data", "grad", "T", "mT", "real", "imag", "H", "mH")


@cache
def torch_names() -> dict[Any, str]:
    """torch's functions to their names: those that ask their arguments what to do."""
    found: dict[Any, str] = {}
    for listed in get_overridable_functions().values():
        for function in listed:
            name = resolve_name(function)
            if name is not None:
                found.setdefault(function, name)
    for function, name in LISTS.items():
        found[function] = f"torch.{name}"
    for function in (torch.autograd.grad, torch.autograd.backward):
        found[function] = f"torch.autograd.{function.__name__}"
    for known, name in KNOWN.items():  # those that torch does not list
        found.setdefault(known, f"known:{name}")
    return found


@cache
def _by_name() -> dict[str, Function]:
    return {name: function for function, name in torch_names().items() if not name.startswith("known:")}


@cache
def find(name: str) -> Function:
    """The function of a name; an error for anything that is not of the table."""
    room, _, bare = name.partition(":")
    if room == "m" and bare in vars(Tensor):
        function: Function = getattr(Tensor, bare)
        return function
    if room == "loom" and bare in _MAKING:
        made: Function = getattr(import_module(_MAKING[bare]), bare)
        return made
    if room == "moves" and bare in ON_TENSORS:
        moved: Function = getattr(collectives, bare)
        return moved
    if room == "get" and bare in PROPERTIES:
        return lambda tensor: getattr(tensor, bare)
    if room == "set" and bare in PROPERTIES:
        return lambda tensor, value: setattr(tensor, bare, value)
    if room == "mark" and bare == "parameter":
        return _mark_parameter
    if room == "table" and bare in OPS:
        return lambda *args, **kwargs: call(bare, args, kwargs)
    if room == "known" and (bare in _NAMES or is_written(bare)):
        return lambda *args, **kwargs: invoke(bare, args, kwargs)
    if room == "f" and bare in _by_name():
        return _by_name()[bare]
    raise UnsupportedError(f"workers have no function {name!r}", fix=closest(bare, _by_name()))


def _mark_parameter(tensor: Any) -> None:
    """What `torch.nn.Parameter` does to a tensor of another class."""
    tensor._is_param = True
    tensor._data._is_parameter = True
