"""The peers, each in processes of its own. One that is missing or breaks gives a row that says so, never an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from typing import IO, Any

from benchmarks import goals, moves
from benchmarks.results import JAX, LOCAL_TENSOR, PROCESSES, Row, compared, figures, verdict, weighed
from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parents[1]
# The works that localtensor.py and jaxdevices.py measure on any number of ranks; repeated here, since they may not even
# import. `processes.py` has its own.
MEMORY = ("memory", "replicated 4 MB")
COMMON = (
    ("add", "32x32 per device"),
    ("matmul row", "1024^3"),
    ("matmul inner", "1024^3"),
    ("MLP step", "data-parallel"),
    MEMORY,
)
TOGETHER = (
    ("add", "DTensor, 32x32 per device"),
    ("add", "dense torch, 32x32"),
    ("add", "DTensor, both over dense torch"),
    ("matmul inner", "DTensor, 1024^3"),
    ("all-reduce", "DTensor, 64 MB"),
    ("all-gather", "DTensor, 64 MB"),
    ("reduce-scatter", "DTensor, 64 MB"),
    ("MLP step", "DTensor, data-parallel"),
    ("MLP step", "DDP, data-parallel"),
    ("deep MLP step", "DDP, 84 MB of gradients"),
    ("Llama step", "DDP, AdamW"),
    ("Llama step", "DDP, AdamW fused on both sides"),
    ("divergence check", "MLP step, sample against off"),
    ("divergence check", "MLP step, always against off"),
)
HEAVY = (
    ("MLP step peak", "DTensor, data-parallel"),
    ("deep MLP step peak", "DDP, 84 MB of gradients"),
    ("Llama step peak", "DDP, AdamW"),
)
SHARDED = tuple(
    (work, f"FSDP2, {tokens} tokens")
    for tokens in ("many", "few")
    for work in ("sharded step", "sharded forward keeps", "sharded peak")
)
LINKED = (("deep MLP step", "DDP, over 1 Gbit/s"), ("exposed sums", "of all, over 1 Gbit/s"))


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: the module that measures it, on which numbers of ranks, and how to get it."""

    who: str
    module: str
    ranks: tuple[int, ...]
    works: tuple[tuple[str, str], ...]
    hint: str = ""
    limit: float = 300.0  # seconds

    def works_on(self, ranks: int) -> tuple[tuple[str, str], ...]:
        """What it is measured at on so many ranks."""
        return (*self.works, *moves.WORKS) if ranks == moves.DEVICES else self.works


ALL = (
    Peer(LOCAL_TENSOR, "benchmarks.localtensor", (8, 32), COMMON),
    Peer(JAX, "benchmarks.jaxdevices", (8, 32, 128), COMMON, " (pip install meshloom[bench])"),
)
# Both sides run on the same processes: a row holds our time and theirs.
PROCESS_PEER = Peer(PROCESSES, "benchmarks.processes", (2, 4), TOGETHER, limit=600.0)
HEAVY_PEER = Peer(PROCESSES, "benchmarks.heavy", (2, 4), HEAVY)
SHARDING_PEER = Peer(PROCESSES, "benchmarks.sharding", (2, 4), SHARDED, limit=600.0)
LINK_PEER = Peer(PROCESSES, "benchmarks.link", (2,), LINKED)
ON_PROCESSES = (PROCESS_PEER, HEAVY_PEER, SHARDING_PEER, LINK_PEER)


def answers(peer: Peer, ranks: int, scale: float) -> Iterator[Row]:
    """What a peer does on that many ranks, row by row as they arrive."""
    command = [sys.executable, "-m", peer.module, "--ranks", str(ranks), "--scale", str(scale)]
    left = list(peer.works_on(ranks))
    reason = ""
    for line in _lines(command, peer.limit):
        if not line.startswith("{"):
            reason = line.strip()
            continue
        found = json.loads(line)
        left.remove((found["work"], found["detail"]))
        yield _row(peer, found, ranks)
    hint = peer.hint if "No module named" in reason else ""
    for work, detail in left:
        missing = f"missing: {reason or 'no answer'}{hint}"
        yield Row(peer.who, work, detail, (ranks,), ranks, "ratio", missing=missing)


def _row(peer: Peer, found: dict[str, Any], ranks: int) -> Row:
    """The figures of a line; of a peer also how many times ours that is, measured beside it."""
    work, detail = found["work"], found["detail"]
    place = (peer.who, work, detail, (ranks,), ranks)
    if "copies" in found:
        return Row(*place, "copies", copies=found["copies"])
    if "megabytes" in found:
        judged = verdict(goals.of_processes(work, detail), weighed(*found["megabytes"])["ratio"])
        return Row(*place, "ratio", **weighed(*found["megabytes"]), **judged)
    if peer.who == PROCESSES:
        timing = Timing(*found["timing"])
        judged = verdict(goals.of_processes(work, detail), timing.ratio)
        return Row(*place, "ratio", **figures(timing), **judged)
    beside = compared(*found["timing"])
    judged = verdict(goals.of_peer(work, ranks), beside["times_ours"])
    return Row(*place, "times_ours", **beside, **judged)


def _lines(command: list[str], limit: float) -> Iterator[str]:
    """The lines a command prints; if it fails or is late, one line says why."""
    late = Event()
    with TemporaryFile("w+") as errors:
        with _started(command, errors, late, limit) as process:
            assert process.stdout is not None
            yield from process.stdout
        if late.is_set():
            yield f"no answer within {limit:g} s"
        elif process.returncode:
            errors.seek(0)
            yield _last_line(errors.read()) or f"exit status {process.returncode}"


@contextmanager
def _started(command: list[str], errors: IO[str], late: Event, limit: float) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive its time, nor the block if that is left early."""

    def stop() -> None:
        late.set()
        process.kill()

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    timer = Timer(limit, stop)
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
