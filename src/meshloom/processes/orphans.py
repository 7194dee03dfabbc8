"""Processes that must not outlive who started them."""

from __future__ import annotations

import os
import signal
import sys


def end_with(parent: int) -> None:
    """Let the system end this process when its parent dies, even by kill -9 (Linux only)."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
