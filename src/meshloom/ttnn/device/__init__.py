"""What programs run on: devices and meshes of them, cores, queues, links, sockets, processes.

`ttnn.device.name` answers from `mesh_device.py`, as the original's module of that name does.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

_FILES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.mesh_device"), name)
