"""The peers, each in a process of its own. One that is missing or breaks gives a row that says so, never an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from typing import IO

from benchmarks import goals, moves
from benchmarks.results import JAX, LOCAL_TENSOR, OURS, Row, figures, verdict
from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 120.0

# The works that localtensor.py measures on any number of ranks; repeated here, since it may not even import.
LOCAL_WORKS = (
    ("add", "32x32 per device"),
    ("matmul row", "1024^3"),
    ("matmul inner", "1024^3"),
    ("MLP step", "data-parallel"),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: the module that measures it, on which numbers of ranks, and how to get it."""

    who: str
    module: str
    ranks: tuple[int, ...]
    works: tuple[tuple[str, str], ...]
    hint: str = ""

    def works_on(self, ranks: int) -> tuple[tuple[str, str], ...]:
        """What it is measured at on so many ranks."""
        return (*self.works, *moves.WORKS) if ranks == moves.DEVICES else self.works


ALL = (
    Peer(LOCAL_TENSOR, "benchmarks.localtensor", (8, 32), LOCAL_WORKS),
    Peer(JAX, "benchmarks.jaxdevices", (moves.DEVICES,), (), " (pip install meshloom[bench])"),
)


def answers(peer: Peer, ranks: int, scale: float, ours: Sequence[Row]) -> Iterator[Row]:
    """What a peer does on that many ranks, row by row as they arrive."""
    command = [sys.executable, "-m", peer.module, "--ranks", str(ranks), "--scale", str(scale)]
    left = list(peer.works_on(ranks))
    reason = ""
    for line in _lines(command):
        if not line.startswith("{"):
            reason = line.strip()
            continue
        found = json.loads(line)
        left.remove((found["work"], found["detail"]))
        yield _row(peer, found["work"], found["detail"], ranks, Timing(*found["timing"]), ours)
    hint = peer.hint if "No module named" in reason else ""
    for work, detail in left:
        missing = f"missing: {reason or 'no answer'}{hint}"
        yield Row(peer.who, work, detail, (ranks,), ranks, _shown(work), missing=missing)


def _row(peer: Peer, work: str, detail: str, ranks: int, timing: Timing, ours: Sequence[Row]) -> Row:
    """The peer's figures, and how many times ours on as many devices that is."""
    twin = next((r for r in ours if r.who == OURS and (r.work, r.detail, r.devices) == (work, detail, ranks)), None)
    times = None if twin is None or not twin.ours_us else round(timing.ours * 1e6 / twin.ours_us, 2)
    judged = verdict(goals.PEERS.get(work), times)
    shown = _shown(work) if times is not None else "ratio"
    return Row(peer.who, work, detail, (ranks,), ranks, shown, times_ours=times, **figures(timing), **judged)


def _shown(work: str) -> str:
    return "times_ours" if (work in dict(moves.WORKS)) else "ratio"


def _lines(command: list[str]) -> Iterator[str]:
    """The lines a command prints; if it fails or is late, one line says why."""
    late = Event()
    with TemporaryFile("w+") as errors:
        with _started(command, errors, late) as process:
            assert process.stdout is not None
            yield from process.stdout
        if late.is_set():
            yield f"no answer within {LIMIT_SECONDS:g} s"
        elif process.returncode:
            errors.seek(0)
            yield _last_line(errors.read()) or f"exit status {process.returncode}"


@contextmanager
def _started(command: list[str], errors: IO[str], late: Event) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive its time, nor the block if that is left early."""

    def stop() -> None:
        late.set()
        process.kill()

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    timer = Timer(LIMIT_SECONDS, stop)
    timer.start()
    with process:
        try:
            yield process
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()


def _last_line(text: str) -> str:
    """The last line of an error, with paths cut to their last part: the results name no machine."""
    lines = text.strip().splitlines()
    return re.sub(r"/\S*/", "", lines[-1]) if lines else ""
