"""What leaves this process: nothing, or `torch.distributed`. Dispatch asks for a kernel and for movement here.

Names load on first use: the control plane (`bindings`, `control`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshloom.backends.leaves import (
        at_end_of_backward,
        collect,
        drop,
        finish_with,
        is_waiting,
        queue_at_end,
        summed,
        twins,
    )
    from meshloom.backends.moving import move
    from meshloom.backends.spread import kernel_of
    from meshloom.backends.world import WORLD, join

_LAZY = {
    **dict.fromkeys(
        "at_end_of_backward collect drop finish_with is_waiting queue_at_end summed twins".split(),
        "meshloom.backends.leaves",
    ),
    "move": "meshloom.backends.moving",
    "kernel_of": "meshloom.backends.spread",
    **dict.fromkeys(("WORLD", "join"), "meshloom.backends.world"),
}

__all__ = [
    "WORLD",
    "at_end_of_backward",
    "collect",
    "drop",
    "finish_with",
    "is_waiting",
    "join",
    "kernel_of",
    "move",
    "queue_at_end",
    "summed",
    "twins",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'meshloom.backends' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
