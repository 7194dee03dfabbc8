"""The processes of a run: how they meet, look after each other and compare what they do; which of them runs where.

Names load on first use: the control plane (`bindings`, `discovery`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshloom.processes.world import join

__all__ = ["join"]


def __getattr__(name: str) -> Any:
    if name != "join":
        raise AttributeError(f"module 'meshloom.processes' has no attribute {name!r}")
    return import_module("meshloom.processes.world").join
