"""What a mesh device and its submeshes share: cards, memory, compiled kernels, clocks, counters and how work is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from meshloom.errors import ArgumentError, DeviceTimeoutError, closest
from meshloom.mesh import Coordinate
from meshloom.runtime.card import Card, Driver
from meshloom.runtime.chips import Chip
from meshloom.runtime.compile_cache import CompileCache
from meshloom.runtime.launches import Launches
from meshloom.runtime.links import Routes
from meshloom.runtime.memory import Allocator
from meshloom.runtime.races import Races
from meshloom.runtime.runners import Runner, Shuffle, Shuffled, Threaded

CHECKS = ("races",)
DISPATCH = ("fast", "slow")
HOST = ("write", "read")  # what goes between cards and the host


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened on one card, in the order in which it was dispatched."""

    kind: str
    coordinate: Coordinate
    nbytes: int
    queue: int


class Failures(Exception):
    """What went wrong on which devices, in one command."""

    def __init__(self, found: Sequence[tuple[Coordinate, BaseException]]) -> None:
        super().__init__(f"{len(found)} devices failed")
        self.found = list(found)

    @property
    def timed_out(self) -> bool:
        """Whether all that went wrong is that a device did not end."""
        return all(isinstance(error, DeviceTimeoutError) for _, error in self.found)


class System:
    """The cards of one `open_mesh_device` and all that belongs to them."""

    def __init__(
        self,
        driver: Driver,
        cards: Sequence[Card | None],
        *,
        check: str | None,
        dispatch: str,
        stress: int | None,
        timeout: float | None,
        cache: Any,
        worker_l1_size: int = 0,
    ) -> None:
        self.driver, self.cards, self.launches = driver, tuple(cards), Launches(timeout)
        self.dispatch = _check_known("dispatch", dispatch, DISPATCH)
        self.races = Races() if check is not None and _check_known("check", check, CHECKS) else None
        chip = self.chip = _common_chip([card.info().chip for card in cards if card is not None])
        l1 = _check_l1(worker_l1_size, chip) or chip.l1
        self.memory = {
            "dram": Allocator("DRAM", chip.dram, chip.banks, len(cards)),
            "l1": Allocator("L1", l1 * chip.cores.num_cores, chip.cores.num_cores, len(cards)),
        }
        self.cache = CompileCache(cache)
        self.routes = Routes()
        self.counts: Counter[str] = Counter()
        self.logs: list[list[Entry]] = []
        self._shuffle = None if stress is None else Shuffle(stress)
        self._queues, self._events = count(), count()

    def next_queue(self) -> int:
        """A number for a queue: every queue of the cards has another."""
        return next(self._queues)

    def next_event(self) -> int:
        """A number for an event."""
        return next(self._events)

    def runner(self, name: str) -> Runner:
        """Who runs a queue."""
        thread = Threaded(name, self.launches, waits=self.dispatch == "slow")
        return thread if thread.waits or self._shuffle is None else Shuffled(self._shuffle, thread)

    @property
    def is_vectorised(self) -> bool:
        """Whether one array call may stand for all cards."""
        return self.dispatch == "fast" and self.driver.shares_memory and self.driver.is_plain()

    def tell(self, kind: str, places: Iterable[Coordinate], nbytes: int, queue: int, number: int) -> None:
        """Count what `number` cards were told to do, and write it down for who asked."""
        self.counts[kind] += number
        if kind in HOST:
            self.counts["host_bytes"] += nbytes * number
        if self.logs:
            entries = [Entry(kind, place, nbytes, queue) for place in places]
            for log in self.logs:
                log.extend(entries)

    @contextmanager
    def logged(self) -> Iterator[list[Entry]]:
        """Everything that cards are told to do inside, in order."""
        log: list[Entry] = []
        self.logs.append(log)
        try:
            yield log
        finally:
            self.logs.remove(log)

    def each(self, members: Iterable[tuple[Coordinate, Card]], act: Callable[[Coordinate, Card], None]) -> None:
        """Do something on every card, row-major; what fails on some does not keep the others from it."""
        failed = []
        for place, card in members:
            try:
                act(place, card)
            except BaseException as error:  # a driver may leave with SystemExit or KeyboardInterrupt
                failed.append((place, error))
        if failed:
            raise Failures(failed)


def close_cards(cards: Iterable[Card | None]) -> list[Exception]:
    """Let all cards go; what fails on some does not keep the others open."""
    errors: list[Exception] = []
    for card in cards:
        try:
            if card is not None:
                card.close()
        except Exception as error:
            errors.append(error)
    return errors


def _common_chip(chips: Sequence[Chip]) -> Chip:
    """What every card has: memory is used in lock-step, so the least of each counts."""
    first = chips[0]
    if all(chip == first for chip in chips):
        return first
    banks = min(chip.banks for chip in chips)
    dram = min(chip.dram // chip.banks for chip in chips) * banks
    least = min(chips, key=lambda chip: chip.cores.num_cores)
    return Chip(first.name, dram, banks, min(chip.l1 for chip in chips), least.cores)


def _check_l1(size: int, chip: Chip) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= chip.l1:
        raise ArgumentError(
            f"worker_l1_size={size!r} is more than a core of {chip.name} has, or no number of bytes",
            fix=f"{chip.l1} bytes at most; 0 for all of them",
        )
    return size


def _check_known(what: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ArgumentError(f"there is no {what} {value!r}", fix=closest(value, known))
    return value
