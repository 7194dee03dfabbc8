"""Local compute on blocks. Engines load by name on first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from meshloom.errors import ArgumentError, closest

_ENGINES = {"torch": "meshloom.engines.torch_engine"}


def load(name: str) -> ModuleType:
    """The engine of that name.

    >>> sorted(load("torch").FUNCTIONS)[:2]
    ['abs', 'add']
    """
    if name not in _ENGINES:
        raise ArgumentError(f"there is no engine {name!r}", fix=closest(name, _ENGINES))
    return import_module(_ENGINES[name])


__all__ = ["load"]
