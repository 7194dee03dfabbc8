"""The peers, each in a process of its own. One that is missing or breaks gives a row that says so, never an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from typing import IO

from benchmarks import goals
from benchmarks.results import LOCAL_TENSOR, OURS, Row, figures, verdict
from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 120.0

# The works that localtensor.py measures; repeated here, since it may not even import.
WORKS = (
    ("add", "32x32 per device"),
    ("matmul row", "1024^3"),
    ("matmul inner", "1024^3"),
    ("MLP step", "data-parallel"),
)


def local_tensor(ranks: int, scale: float, ours: Sequence[Row]) -> Iterator[Row]:
    """DTensor's LocalTensor mode on that many ranks, row by row as they arrive."""
    command = [sys.executable, "-m", "benchmarks.localtensor", "--ranks", str(ranks), "--scale", str(scale)]
    left = list(WORKS)
    reason = ""
    for line in _lines(command):
        if not line.startswith("{"):
            reason = line
            continue
        found = json.loads(line)
        left.remove((found["work"], found["detail"]))
        yield _row(found["work"], found["detail"], ranks, Timing(*found["timing"]), ours)
    for work, detail in left:
        yield Row(LOCAL_TENSOR, work, detail, (ranks,), ranks, "ratio", missing=f"missing: {reason or 'no answer'}")


def _row(work: str, detail: str, ranks: int, timing: Timing, ours: Sequence[Row]) -> Row:
    """The peer's figures; an add is also compared with ours on as many devices."""
    twin = next((r for r in ours if r.who == OURS and (r.work, r.detail, r.devices) == (work, detail, ranks)), None)
    times = None if twin is None or not twin.ours_us else round(timing.ours * 1e6 / twin.ours_us, 2)
    goal = goals.PEER_ADD if work == "add" else None
    judged = verdict(goal, times)
    return Row(LOCAL_TENSOR, work, detail, (ranks,), ranks, "ratio", times_ours=times, **figures(timing), **judged)


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
