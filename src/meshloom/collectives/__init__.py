"""Collectives: as data (kinds, schedules, algorithms), and by name the literal ones on tensors.

`collectives.all_reduce(x)` and the like act on tensors and live below this room: the package says where
(`find_with`), and they are loaded on first use, so that the data can be read without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.collectives.kinds import KINDS, Collective, Kind
from meshloom.collectives.schedule import Schedule, Send, Step

ON_TENSORS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "shift",
    "barrier",
)

ASYNCHRONOUS = tuple(f"{name}_async" for name in ON_TENSORS if name != "barrier")

__all__ = [
    "ASYNCHRONOUS",
    "KINDS",
    "ON_TENSORS",
    "Collective",
    "Kind",
    "Schedule",
    "Send",
    "Step",
    *ON_TENSORS,
]


_found: list[Callable[[str], Any]] = []


def find_with(find: Callable[[str], object]) -> None:
    """Say how a collective on tensors is found by its name; the package does."""
    _found[:] = [find]


def __getattr__(name: str) -> Any:
    if name in ON_TENSORS or name in ASYNCHRONOUS:
        return _found[0](name)
    raise AttributeError(f"module 'meshloom.collectives' has no attribute {name!r}")
