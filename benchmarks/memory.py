"""How much memory a side needs on processes of its own: the resident set above that before, now and at its highest.

Both sides run with allocator settings that give memory back when it is freed, so that what is resident is what is held.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.processes import launch

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
FIGURES = "FIGURES"  # the variable that names the file in which the first rank writes what it found


def resident(name: str) -> float:
    """MB of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def settle() -> None:
    """Give back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Watched:
    """MB above those at the beginning of a block: `now()`, and `highest` at its end."""

    def __enter__(self) -> Watched:
        settle()
        self._before = resident("VmRSS")
        self.forget()
        return self

    def forget(self) -> None:
        """The highest is that from now on."""
        settle()
        Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> float:
        """What is held at this moment."""
        settle()
        return resident("VmRSS") - self._before

    def __exit__(self, *_: object) -> None:
        self.highest = resident("VmHWM") - self._before


def tell_heaviest(megabytes: Sequence[float]) -> None:
    """Write the figures of the heaviest process; all of them call it."""
    found = torch.tensor(megabytes)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        Path(os.environ[FIGURES]).write_text(" ".join(map(str, found.tolist())))


def weigh_sides(command: Sequence[str], sides: Sequence[str], count: int) -> tuple[int, list[tuple[float, ...]]]:
    """Run a command that ends in `tell_heaviest` for every side: the worst exit code, and each figure of all sides.

    A process of torch's may abort while it ends, after its figures are written: they count.
    """
    with TemporaryDirectory() as folder:
        found = []
        for side in sides:
            file = Path(folder) / side
            failed = launch([*command, side], count, {**ALLOCATOR, FIGURES: str(file)})
            if not file.exists():
                return failed or 1, []
            found.append([float(each) for each in file.read_text().split()])
    return 0, list(zip(*found, strict=True))
