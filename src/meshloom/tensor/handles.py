"""Asynchronous collectives: started at once, valid after `wait()`.

Outside of `stress` a collective runs on a worker thread; one between processes runs where it is started, since all of
them must do the same in the same order. Inside, it runs when the seed says so: later than others that
were started after it, after random delays, or not before somebody waits. Until then its memory holds poison (nan, or
the lowest number), so that a consumer that does not wait computes with it, as it would on hardware.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch

from meshloom.errors import RaceError
from meshloom.placement import Topology
from meshloom.runtime import state
from meshloom.tensor import collectives
from meshloom.tensor.base import Tensor
from meshloom.tensor.shadow import Shadows

WORKERS = 2


@lru_cache(maxsize=1)
def _workers(process: int) -> ThreadPoolExecutor:
    """The threads of a process: those of its parent do not come along when it is forked."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="meshloom-collective")


def _done(work: Callable[[], Tensor]) -> Future[Tensor]:
    """Work that was done here and now; its error, if it has one, is kept for whoever waits."""
    future: Future[Tensor] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


class Handle:
    """A collective under way: `wait()` gives its result, `done()` says whether it is there."""

    def __init__(self, name: str, topology: Topology, work: Callable[[], Tensor], at_once: bool = False) -> None:
        self.name = name
        self.topology = topology
        self._process = os.getpid()
        self._future: Future[Tensor] = _done(work) if at_once else _workers(self._process).submit(work)

    def done(self) -> bool:
        """Whether the result is there; never waits."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result; an error of the collective is raised here."""
        if not self._future.done() and os.getpid() != self._process:
            raise RaceError(
                f"{self.name} was started by process {self._process}, and process {os.getpid()} was forked from it",
                tensor=self.topology,
                fix="wait for it before the fork, or start it in the child",
            )
        return self._future.result(timeout)

    @property
    def tensor(self) -> Tensor:
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

    def __init__(self, name: str, topology: Topology, work: Callable[[], Tensor], stress: Stress) -> None:
        self.name, self.topology = name, topology
        self._work, self._stress = work, stress
        self._result: Tensor | None = None
        self._memory = Tensor(topology, _poison(topology))
        stress.start(self)

    def done(self) -> bool:
        return self._result is not None

    def wait(self, timeout: float | None = None) -> Tensor:
        self._stress.finish(self)
        assert self._result is not None
        return self._result

    @property
    def tensor(self) -> Tensor:
        """The result's memory as it is now."""
        return self._memory if self._result is None else self._result

    def complete(self) -> None:
        """Do the work, and let it appear in memory."""
        if self._result is None:
            self._result = self._work()
            with torch.no_grad():
                self._memory._data.copy_(self._result._data)


def _poison(topology: Topology) -> torch.Tensor:
    from meshloom.engines.layout import torch_dtype

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


def start(name: str, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle:
    """Start a collective; it is checked, and told to whoever watches, here and now."""
    function = getattr(collectives, name)
    stressed = kwargs.pop("stress", None)
    with state.changed(shadows=Shadows()):
        topology = function(x, *args, **kwargs).topology
    tracked = torch.is_grad_enabled()
    fabric = state.fabric

    def work() -> Tensor:
        with state.changed(fabric=fabric, logs=(), policy=None), torch.set_grad_enabled(tracked):
            return function(x, *args, **kwargs)

    running = Stress(int(stressed)) if stressed is not None and stressed is not False else state.stress
    if running is not None:
        return Delayed(name, topology, work, running)
    return Handle(name, topology, work, at_once=_leaves_the_process(function, x, args, kwargs))


def _leaves_the_process(function: Callable[..., Tensor], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = signature(function).bind(x, *args, **kwargs).arguments
    return collectives.Group(x, given.get("axis")).members.crosses


def _asynchronous(name: str) -> Callable[..., Handle]:
    def function(x: Any, *args: Any, **kwargs: Any) -> Handle:
        return start(name, x, args, kwargs)

    function.__name__ = function.__qualname__ = f"{name}_async"
    function.__doc__ = f"`{name}`, started at once: a handle whose `wait()` gives the result."
    return function


all_reduce_async = _asynchronous("all_reduce")
all_gather_async = _asynchronous("all_gather")
reduce_scatter_async = _asynchronous("reduce_scatter")
all_to_all_async = _asynchronous("all_to_all")
broadcast_async = _asynchronous("broadcast")
reduce_async = _asynchronous("reduce")
gather_async = _asynchronous("gather")
scatter_async = _asynchronous("scatter")
send_recv_async = _asynchronous("send_recv")
shift_async = _asynchronous("shift")
