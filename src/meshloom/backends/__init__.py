"""The processes of a run: how they meet, look after each other and divide a plan. Dispatch asks for a kernel here.

Names load on first use: the control plane (`bindings`, `control`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshloom.backends.spread import kernel_of
    from meshloom.backends.world import join

_LAZY = {"kernel_of": "meshloom.backends.spread", "join": "meshloom.backends.world"}

__all__ = ["join", "kernel_of"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'meshloom.backends' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
