"""Marks of a program for a profiler, as `ttnn.profiler` has them: torch's own profiler shows them.

>>> import torch
>>> from meshloom import ttnn
>>> with torch.profiler.profile() as profile:
...     ttnn.start_tracy_zone("model.py", "attention", 12)
...     _ = torch.ones(2) + 1
...     stopped = ttnn.stop_tracy_zone()
>>> [each.key for each in profile.key_averages() if "attention" in each.key]
['attention model.py:12']
"""

from __future__ import annotations

import threading
from typing import Any

from torch.profiler import record_function

from meshloom.errors import ArgumentError
from meshloom.ttnn.surface import refusing

__all__ = ["start_tracy_zone", "stop_tracy_zone", "tracy_frame", "tracy_message"]


class _Zones(threading.local):
    """The zones of a thread that were started and not yet stopped."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_zones = _Zones()


def start_tracy_zone(source: str, functName: str, lineNum: int, color: int = 0) -> None:
    """Begin a zone, named after a function and its line; zones lie inside each other."""
    zone = record_function(f"{functName} {source}:{lineNum}")
    zone.__enter__()
    _zones.open.append(zone)


def stop_tracy_zone(name: str = "", color: int = 0) -> bool:
    """End the zone that was begun last; False if there is none."""
    if not _zones.open:
        return False
    _zones.open.pop().__exit__(None, None, None)
    return True


def tracy_message(source: str, color: int = 15792383) -> None:
    """Mark a moment with a text."""
    if not isinstance(source, str):
        raise ArgumentError(f"ttnn.tracy_message takes a text, not {source!r}")
    with record_function(source):
        pass


def tracy_frame() -> None:
    """Mark the end of a frame."""
    tracy_message("frame")


__getattr__ = refusing(
    "profiler",
    {
        "no hardware measures programs here; `meshloom.record` and torch's profiler tell what ran": (
            "get_all_programs_perf_data get_latest_programs_perf_data"
        )
    },
)
