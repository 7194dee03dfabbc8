"""Launches under way: how long each may take, and what becomes of one that takes longer.

Python cannot end a thread. A kernel that does not end within the timeout is given up: whoever waits gets an error, its
cards count as lost and take no further work, and its thread, should it ever return, finds that nobody wants its result.
Nobody watches the clock in between: those who wait look at it, for all launches of the mesh, so that a launch which
ends in time costs an entry in a set.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshloom.errors import DeviceError
from meshloom.mesh import Coordinate

if TYPE_CHECKING:
    from meshloom.runtime.commands import Command


class GivenUp(BaseException):
    """In the thread of a launch that was given up: nobody waits for it any more."""


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A launch: the command that it belongs to, where it runs, and since when."""

    command: Command
    places: Collection[Coordinate]
    since: float


class Launches:
    """The launches of all queues of one system."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.lost: dict[int, str] = {}  # the numbers of cards that do not come back, and why
        self._under_way: set[UnderWay] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def begin(self, command: Command, places: Collection[Coordinate]) -> UnderWay:
        """A kernel starts."""
        launch = UnderWay(command, places, time.monotonic())
        self._under_way.add(launch)
        return launch

    def end(self, launch: UnderWay) -> None:
        """A kernel has ended, by itself or by an error."""
        with self._lock:
            if launch not in self._under_way:
                raise GivenUp
            self._under_way.remove(launch)

    def wait(self, until: Callable[[float | None], bool], timeout: float | None) -> bool:
        """Wait for something, as `until(seconds)` does it; on the way, give up what takes too long."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            spans = [self._span(), None if end is None else end - time.monotonic()]
            if until(min((max(0.0, span) for span in spans if span is not None), default=None)):
                return True
            self._give_up()
            if end is not None and time.monotonic() >= end:
                return False

    def _span(self) -> float | None:
        """How long it is until a launch can have taken too long; one that starts now has all its time."""
        if self.timeout is None:
            return None
        first = min((launch.since for launch in tuple(self._under_way)), default=time.monotonic())
        return first + self.timeout - time.monotonic()

    def _give_up(self) -> None:
        if self.timeout is None:
            return
        with self._lock:
            late = [each for each in tuple(self._under_way) if time.monotonic() - each.since >= self.timeout]
            self._under_way.difference_update(late)
        for launch in late:
            assert launch.command.queue is not None
            launch.command.queue.give_up(launch)

    def check_cards(self, numbers: Iterable[int]) -> None:
        """An error if one of these cards is lost."""
        reason = next((self.lost[number] for number in numbers if number in self.lost), None)
        if reason is not None:
            raise DeviceError(
                f"a card is lost: {reason}",
                lost=f"{len(self.lost)} card{'s' if len(self.lost) != 1 else ''}",
                fix="use the other cards, or close the mesh device and open it again",
            )

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that has the threads."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """An error in a process that was forked: the threads of the queues did not come along."""
        if self.is_forked:
            raise DeviceError(
                f"the mesh device was opened by process {self._process}, and process {os.getpid()} was forked from it",
                fix="open a mesh device in the child, or start it by multiprocessing.get_context('spawn')",
            )
