"""Checkpoints of 2 GB beside the same bytes written to a file with `fsync`: what a save and a load add to the disk.

Both write to a new name, sync, and rename over what the round before has written, so that both also remove 2 GB. The
state is a model on (2, 4), half of it sharded and half replicated, with the moments of AdamW. `python -m
benchmarks.checkpoints` also prints the memory that each takes above the state.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import meshloom as loom
from benchmarks.goals import Goal
from benchmarks.works import Pair, Spec

NBYTES = 2 * 10**9
MESH = (2, 4)
STEP = 1 << 23  # bytes of one write of the baseline
GOAL = Goal("ratio", 1.25)  # 0.8x the speed


def works(devices: Sequence[int]) -> list[Spec]:
    """A save, a save in a thread that is waited for, and a load."""
    if 8 not in devices:
        return []
    return [
        Spec("checkpoint", f"{deed} of 2 GB", MESH, partial(pair, deed, NBYTES), GOAL, "ratio", seconds=20.0)
        for deed in DEEDS
    ]


def make_state(nbytes: int) -> dict[str, Any]:
    """A model of two kinds of layers with its optimizer, of so many bytes in all."""
    mesh = loom.open_mesh(MESH, axes=("dp", "tp"))
    layers, width = 8, 1024
    rows = nbytes // (3 * layers * width * 4)
    module = torch.nn.ParameterList(
        loom.Parameter(torch.full((rows, width), float(n)), mesh, "R, S(1)" if n % 2 else "S(0), R")
        for n in range(layers)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        moments = {key: torch.full_like(parameter.detach(), 0.5) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return {"model": module, "optimizer": optimizer, "step": 1}


@cache
def place() -> Path:
    """A folder on the disk, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="meshloom-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def prepare(nbytes: int) -> tuple[dict[str, Any], memoryview]:
    """The state, and as many bytes of the baseline."""
    return make_state(nbytes), memoryview(torch.arange(nbytes // 4, dtype=torch.int32).view(torch.uint8).numpy())


def write_bytes(data: memoryview, file: Path) -> None:
    """The baseline: the bytes to a new file, synced and renamed."""
    aside = file.with_suffix(".tmp")
    with open(aside, "wb", buffering=0) as out:
        for first in range(0, len(data), STEP):
            out.write(data[first : first + STEP])
        os.fsync(out.fileno())
    os.rename(aside, file)


def save(state: dict[str, Any]) -> None:
    """A save that ends before it returns."""
    loom.save(state, place() / "checkpoint", progress=False)


def save_in_thread(state: dict[str, Any]) -> None:
    """A save in a thread, waited for at once."""
    loom.save(state, place() / "checkpoint", asynchronous=True).wait()


def load(state: dict[str, Any]) -> None:
    """A load into a state that is there: every byte compared, then read."""
    loom.load(place() / "checkpoint", into=state, progress=False)


DEEDS: dict[str, Callable[[dict[str, Any]], None]] = {"save": save, "save in a thread": save_in_thread, "load": load}


def pair(deed: str, nbytes: int) -> Pair:
    """One deed beside the baseline."""
    state, data = prepare(nbytes)
    save(state)
    return Pair(partial(DEEDS[deed], state), partial(write_bytes, data, place() / "baseline"))


def peak_above(act: Callable[[], None]) -> int:
    """The most memory that a call has above what there was before, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(rounds: int = 3) -> None:
    """Print times in turn, and memory above the state."""
    state, data = prepare(NBYTES)
    size = NBYTES / 1e6
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, act in {"baseline": None, **DEEDS}.items():
            begun = time.perf_counter()
            write_bytes(data, place() / "baseline") if act is None else act(state)
            best[name] = min(best.get(name, 1e9), time.perf_counter() - begun)
    for name, seconds in best.items():
        print(f"{name:<18} {size / seconds:7.0f} MB/s   {best['baseline'] / seconds:.2f} of the baseline's speed")
    for name, act in DEEDS.items():
        print(f"{name:<18} {peak_above(partial(act, state)) / 1e6:7.0f} MB above the state")


if __name__ == "__main__":
    main()
