"""How long this machine kept processes waiting for a core: such time is nobody's fault, and bounds leave it out."""

from __future__ import annotations

import time
from pathlib import Path


class Patience:
    """Seconds since it was made, without those in which some process waited for a core."""

    def __init__(self) -> None:
        self._start, self._stalled = time.monotonic(), _stalled()

    @property
    def seconds(self) -> float:
        """What counts so far; a system that tells nothing of its load counts all."""
        return time.monotonic() - self._start - (_stalled() - self._stalled)


def _stalled() -> float:
    pressure = Path("/proc/pressure/cpu")
    try:
        return int(pressure.read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0
