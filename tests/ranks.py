"""Real processes for tests: a function of a test-side module runs on n ranks over loopback, in torchrun's environment.

    results = ranks.run(4, "process_cases:op_cases", 12, timeout=100)

Every rank imports the module, calls the function with the same arguments, and what it returns comes back in the order
of ranks. Arguments and results are pickled. A start costs some two seconds of importing torch: let one start do many
things. If a rank fails, or does not end in time, all are ended (by their ids) and `run` raises with the output of every
rank, that of the first to fail first.

The processes meet at a store that this process holds, as torchrun's agent does, so that no port can be taken by others.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 90.0
GRACE = 5.0  # how long the others may go on after a rank has failed: they may have something to say


@dataclass
class Rank:
    """One process that was started: its output goes to a file, its result to another."""

    number: int
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / f"output{self.number}").read_text(errors="replace")

    @property
    def result(self) -> Any:
        return pickle.loads((self.folder / f"result{self.number}").read_bytes())

    def told(self) -> str:
        return f"--- rank {self.number}, ended with {self.process.returncode}\n{self.output}"


def run(
    count: int, target: str, *arguments: Any, timeout: float = TIMEOUT, environment: dict[str, str] | None = None
) -> list[Any]:
    """What `module:function(*arguments)` returns on each of `count` processes, in the order of ranks."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "arguments").write_bytes(pickle.dumps(arguments))
        shared = {**_shared(count, store.port), **(environment or {})}
        started: list[Rank] = []
        try:
            started += (_start(place, target, number, shared) for number in range(count))
            story = _wait(started, timeout)
        finally:
            _end(started)
        if story:
            raise AssertionError(f"{target} on {count} processes: {story}")
        return [each.result for each in started]


def _shared(count: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _start(place: Path, target: str, number: int, shared: dict[str, str]) -> Rank:
    command = [sys.executable, "-W", "error", __file__, str(place), target]
    environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
    with open(place / f"output{number}", "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Rank(number, process, place)


def _wait(started: list[Rank], timeout: float) -> str | None:
    """Wait for all; what went wrong, if anything, with the ranks' output in the order in which they ended."""
    until, ended = time.monotonic() + timeout, []
    while len(ended) < len(started):
        ended += [each for each in started if each not in ended and each.process.poll() is not None]
        failed = [each for each in ended if each.process.returncode != 0]
        if failed:
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    failed = [each for each in ended if each.process.returncode != 0]
    late = [each for each in started if each not in ended]
    if not failed and not late:
        return None
    _end(started)
    fate = f"rank {failed[0].number} failed" if failed else f"{len(late)} did not end within {timeout:g} s"
    others = [each for each in started if each not in failed]
    return "\n".join([fate, *(each.told() for each in (*failed, *others))])


def _end(started: list[Rank]) -> None:
    """End what is still running, and what it started."""
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def main(folder: str, target: str) -> None:
    """One rank: run the function, leave its result."""
    import torch

    torch.set_num_threads(1)
    place = Path(folder)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    result = function(*pickle.loads((place / "arguments").read_bytes()))
    (place / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
