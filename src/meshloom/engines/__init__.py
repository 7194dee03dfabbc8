"""Local compute on blocks. Engines load by name on first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from meshloom.engines.engine import Engine
from meshloom.errors import ArgumentError, closest

_ENGINES = {
    "numpy": "meshloom.engines.numpy_engine:NumpyEngine",
    "torch": "meshloom.engines.torch_distributed:TorchEngine",
}


def load(name: str) -> Engine:
    """The engine of that name, always the same one. NumPy's starts without torch.

    >>> load("torch").supports_distributed(), load("numpy").supports_distributed()
    (True, False)
    """
    if name not in _ENGINES:
        raise ArgumentError(f"there is no engine {name!r}", fix=closest(name, _ENGINES))
    return _load(name)


@cache
def _load(name: str) -> Engine:
    module, _, kind = _ENGINES[name].partition(":")
    made: Engine = getattr(import_module(module), kind)()
    return made


__all__ = ["Engine", "load"]
