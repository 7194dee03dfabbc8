"""What every device holds: the tensor, its formats and label, the ways to it from torch and back, files.

`ttnn.tensor.name` answers from `tensor.py`, as the original's module of that name does.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

_FILES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.tensor"), name)
