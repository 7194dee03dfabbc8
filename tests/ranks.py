"""Real processes for tests: a function of a test-side module runs on n ranks over loopback, in torchrun's environment.

    results = ranks.run(4, "process_cases:op_cases", 12, timeout=100)

Every rank imports the module, calls the function with the same arguments, and what it returns comes back in the order
of ranks. Arguments and results are pickled. Ranks are forked off a process that has imported torch and does nothing
else, so that a start costs milliseconds instead of seconds. If a rank fails, or does not end in time, all are ended (by
their ids) and `run` raises with the output of every rank, that of the first to fail first.

The processes meet at a store that this process holds, as torchrun's agent does, so that no port can be taken by others.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 240.0  # a busy machine is no failure
GRACE = 5.0  # how long the others may go on after a rank has failed: they may have something to say
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "meshloom.tensor", "meshloom.processes.health", "hypothesis"]
)


@dataclass
class Rank:
    """One process that was started: its output goes to a file, its result to another."""

    number: int
    process: multiprocessing.process.BaseProcess
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / f"output{self.number}").read_text(errors="replace")

    @property
    def result(self) -> Any:
        return pickle.loads((self.folder / f"result{self.number}").read_bytes())

    def told(self) -> str:
        return f"--- rank {self.number}, ended with {self.process.exitcode}\n{self.output}"


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
    environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
    output = str(place / f"output{number}")
    process = FORKS.Process(target=live, args=(output, environment, main, str(place), target))
    process.start()
    return Rank(number, process, place)


def _wait(started: list[Rank], timeout: float) -> str | None:
    """Wait for all; what went wrong, if anything, with the ranks' output in the order in which they ended."""
    until, ended = time.monotonic() + timeout, []
    while len(ended) < len(started):
        ended += [each for each in started if each not in ended and each.process.exitcode is not None]
        failed = [each for each in ended if each.process.exitcode != 0]
        if failed:
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    failed = [each for each in ended if each.process.exitcode != 0]
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
        if each.process.exitcode is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.join()


def live(output: str, environment: dict[str, str], act: Callable[..., None], *args: Any) -> None:
    """The life of a rank, as it would be in an interpreter of its own: hooks for errors and for the end are called."""
    os.setsid()
    gc.freeze()  # what was imported before the fork stays, and the collector need not look at it
    os.environ.clear()
    os.environ.update(environment)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        act(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(folder: str, target: str) -> None:
    """One rank: run the function, leave its result."""
    import torch

    import meshloom

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=meshloom.FallbackWarning)
    torch.set_num_threads(1)
    place = Path(folder)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    result = function(*pickle.loads((place / "arguments").read_bytes()))
    (place / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
