"""The functions that a client may call on its workers, by name: ours, torch's own that take tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.overrides import get_overridable_functions, resolve_name

import meshloom
from meshloom.errors import UnsupportedError, closest
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import invoke
from meshloom.tensor.functions import KNOWN, LISTS

Function = Callable[..., Any]

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
    for function, name in KNOWN.items():  # those that torch does not list
        found.setdefault(function, f"known:{name}")
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
    if room == "loom" and bare in meshloom.__all__ + meshloom._OPS:
        found: Function = getattr(meshloom, bare)
        return found
    if room == "moves" and bare in meshloom.collectives.ON_TENSORS:
        moved: Function = getattr(meshloom.collectives, bare)
        return moved
    if room == "get" and bare in PROPERTIES:
        return lambda tensor: getattr(tensor, bare)
    if room == "set" and bare in PROPERTIES:
        return lambda tensor, value: setattr(tensor, bare, value)
    if room == "mark" and bare == "parameter":
        return _mark_parameter
    if room == "known" and bare in KNOWN.values():
        return lambda *args, **kwargs: invoke(bare, args, kwargs)
    if room == "f" and bare in _by_name():
        return _by_name()[bare]
    raise UnsupportedError(f"workers have no function {name!r}", fix=closest(bare, _by_name()))


def _mark_parameter(tensor: Any) -> None:
    """What `torch.nn.Parameter` does to a tensor of another class."""
    tensor._is_param = True
    tensor._data._is_parameter = True
