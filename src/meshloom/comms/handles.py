"""Asynchronous collectives: started at once, valid after `wait()`.

Outside of `stress` a collective runs on a worker thread. All processes must begin theirs in the same order: one between
processes has begun when its handle is there, and goes on while the program does. Inside, it runs when the seed says so:
later than others that were started after it, after random delays, or not before somebody waits. Until then its memory
holds poison (nan, or the lowest number), so that a consumer that does not wait computes with it, as it would on
hardware.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from meshloom.comms.wire import STARTER
from meshloom.context import state
from meshloom.engines.layout import torch_dtype
from meshloom.errors import STARTED, RaceError, where
from meshloom.placement import Topology

WORKERS = 2

Run = Callable[[Callable[[], Any]], "Future[Any]"]


@lru_cache(maxsize=1)
def _workers(process: int) -> ThreadPoolExecutor:
    """The threads of a process: those of its parent do not come along when it is forked."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="meshloom-collective")


def run_now(work: Callable[[], Any]) -> Future[Any]:
    """Work that was done here and now; its error, if it has one, is kept for whoever waits."""
    future: Future[Any] = Future()
    _run(work, future)
    return future


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def begin(work: Callable[[], Any]) -> Future[Any]:
    """Work with one collective between processes: when this returns it has begun, and a thread goes on with it."""
    future: Future[Any] = Future()
    begun, line = threading.Event(), where()

    def run() -> None:
        STARTED.line = line
        STARTER.wait_for(begun.set)
        try:
            _run(work, future)
        finally:
            begun.set()

    threading.Thread(target=run, name="meshloom-collective", daemon=True).start()
    begun.wait()
    return future


class Handle:
    """A collective under way: `wait()` gives its result, `done()` says whether it is there."""

    def __init__(self, name: str, topology: Topology, work: Callable[[], Any], run: Run | None = None) -> None:
        self.name = name
        self.topology = topology
        self._process = os.getpid()
        self._future = (run or _workers(self._process).submit)(work)

    def done(self) -> bool:
        """Whether the result is there; never waits."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The result; an error of the collective is raised here."""
        if not self._future.done() and os.getpid() != self._process:
            raise RaceError(
                f"{self.name} was started by process {self._process}, and process {os.getpid()} was forked from it",
                tensor=self.topology,
                fix="wait for it before the fork, or start it in the child",
            )
        return self._future.result(timeout)

    @property
    def tensor(self) -> Any:
        """The result's memory without waiting; an error while the collective is under way."""
        if not self.done():
            raise RaceError(
                f"the result of {self.name} is used while it is under way",
                tensor=self.topology,
                fix="call wait() first",
            )
        return self.wait()

    def __repr__(self) -> str:
        return f"Handle({self.name} -> {self.topology}, {'done' if self.done() else 'under way'})"


class Delayed(Handle):
    """A collective whose completion a seed decides; its memory is poison until then."""

    def __init__(self, name: str, topology: Topology, work: Callable[[], Any], stress: Stress, memory: Any) -> None:
        self.name, self.topology = name, topology
        self._work, self._stress = work, stress
        self._result: Any = None
        self._memory = memory  # a tensor of poison
        stress.start(self)

    def done(self) -> bool:
        return self._result is not None

    def wait(self, timeout: float | None = None) -> Any:
        self._stress.finish(self)
        assert self._result is not None
        return self._result

    @property
    def tensor(self) -> Any:
        """The result's memory as it is now."""
        return self._memory if self._result is None else self._result

    def complete(self) -> None:
        """Do the work, and let it appear in memory."""
        if self._result is None:
            self._result = self._work()
            with torch.no_grad():
                self._memory._data.copy_(self._result._data)


def poison(topology: Topology) -> torch.Tensor:
    """A stored array that nobody should read yet: nan, or the lowest number."""
    dtype = torch_dtype(topology.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(topology.stored_shape, float("nan"), dtype=dtype)
    return torch.full(topology.stored_shape, True if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype)


class Stress:
    """Completes collectives in an order and after delays that follow from a seed alone."""

    def __init__(self, seed: int, longest: float = 2e-4) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self._under_way: list[Delayed] = []

    def start(self, handle: Delayed) -> None:
        """A collective was started: perhaps some complete now, this one among them."""
        self._under_way.append(handle)
        self._some()

    def finish(self, handle: Delayed) -> None:
        """Somebody waits: others may come first."""
        self._some()
        self._complete(handle)

    def drain(self) -> None:
        """Complete what is left, in any order."""
        self._random.shuffle(self._under_way)
        while self._under_way:
            self._complete(self._under_way[-1])

    def _some(self) -> None:
        for handle in self._random.sample(self._under_way, self._random.randint(0, len(self._under_way))):
            if self._random.random() < 0.5:
                self._complete(handle)

    def _complete(self, handle: Delayed) -> None:
        time.sleep(self._random.random() * self._longest)
        handle.complete()
        if handle in self._under_way:
            self._under_way.remove(handle)


@contextmanager
def stress(seed: int = 0) -> Iterator[Stress]:
    """Run asynchronous collectives inside with random delays and shuffled completion, the same for the same seed.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("d",)))
    >>> with stress(seed=1):
    ...     loom.collectives.all_reduce_async(x).wait().to_torch()
    tensor([2., 2.])
    """
    running = Stress(seed)
    with state.changed(stress=running):
        try:
            yield running
        finally:
            running.drain()
