"""The race detector: vector clocks over queues and the host, looked at when a command is enqueued.

Every queue is an *agent*, and so is the host. A clock says, for each agent, up to which of its commands everything is
known to be done. A command starts after what was on its queue before, after what the host knew when it enqueued it, and
after the events that its queue waited for. Two uses of the same memory, one of them a write, must be ordered by that;
if they are not, this is an error, whether or not they would have collided this time.

Memory is known by its owner and by the card. Whoever is given the address of a buffer that was freed inherits what was
done to it: a write there must come after all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshloom.errors import RaceError
from meshloom.mesh import Coordinate
from meshloom.runtime.memory import Region

HOST = -1
Clock = dict[int, int]


class Use(NamedTuple):
    """A command that read or wrote: which queue, the queue's own count, and what to say of it."""

    queue: int
    time: int
    text: str


class Access(NamedTuple):
    """What a command does with a buffer: on which cards (by number, with their coordinates), reading or writing."""

    region: Region
    name: str
    cards: Mapping[int, Coordinate]
    writes: bool


@dataclass
class Shadow:
    """What was done to one buffer, by card: the last write, and the reads since then (the last of each queue)."""

    region: Region
    written: dict[int, Use] = field(default_factory=dict)
    read: dict[int, dict[int, Use]] = field(default_factory=dict)

    def uses(self, card: int) -> Iterable[Use]:
        """Everything that a write must come after."""
        yield from self.read.get(card, {}).values()
        if card in self.written:
            yield self.written[card]

    def inherit(self, other: Shadow, card: int) -> None:
        """Take over what was done to memory that was freed: it was used, and it holds nothing any more."""
        mine = self.read.setdefault(card, {})
        for use in other.uses(card):
            if use.queue not in mine or mine[use.queue].time < use.time:
                mine[use.queue] = use


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Let a clock know what another knows.

    >>> mine = {0: 3, 1: 1}
    >>> join(mine, {1: 5, 2: 2}); mine
    {0: 3, 1: 5, 2: 2}
    """
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


class Races:
    """The clocks of all queues and of the host, and the shadows of all buffers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._shadows: dict[int, Shadow] = {}

    def note_allocation(self, region: Region) -> None:
        """A buffer has got memory that others may have had before."""
        with self._lock:
            made = Shadow(region)
            for number, old in list(self._shadows.items()):
                if not old.region.freed:
                    continue
                if self._is_settled(old):
                    del self._shadows[number]
                elif old.region.overlaps(region):
                    for card in {*old.written, *old.read}:
                        made.inherit(old, card)
            self._shadows[region.number] = made

    def note_host_write(self, region: Region, cards: Iterable[int]) -> None:
        """The host has written a buffer itself, after waiting for all queues that use it."""
        with self._lock:
            shadow = self._shadow(region)
            for card in cards:
                shadow.written[card] = Use(HOST, 0, "the host")
                shadow.read.pop(card, None)

    def note_command(self, queue: int, text: str, accesses: Iterable[Access]) -> None:
        """A command begins its life: an error if it is not ordered after what it collides with."""
        with self._lock:
            clock = dict(self._clock(queue))
            join(clock, self._clocks[HOST])
            clock[queue] = clock.get(queue, 0) + 1
            use, listed = Use(queue, clock[queue], text), list(accesses)
            for access in listed:
                self._check(access, use, clock)
            self._clocks[queue] = clock
            for access in sorted(listed, key=lambda each: each.writes):
                self._note(access, use)

    def note_event(self, queue: int) -> Clock:
        """The clock of an event: all that its queue has been given so far."""
        with self._lock:
            clock = self._clock(queue)
            join(clock, self._clocks[HOST])
            return dict(clock)

    def note_wait(self, queue: int, event: Clock) -> None:
        """A queue goes on only after an event."""
        with self._lock:
            join(self._clock(queue), event)

    def note_synchronize(self, event: Clock) -> None:
        """The host goes on only after an event."""
        with self._lock:
            join(self._clocks[HOST], event)

    def note_finish(self, queue: int) -> None:
        """The host has waited for all of a queue."""
        with self._lock:
            join(self._clocks[HOST], self._clock(queue))

    def _clock(self, queue: int) -> Clock:
        return self._clocks.setdefault(queue, {})

    def _shadow(self, region: Region) -> Shadow:
        return self._shadows.setdefault(region.number, Shadow(region))

    def _is_settled(self, shadow: Shadow) -> bool:
        known = self._clocks[HOST]
        cards = {*shadow.written, *shadow.read}
        return all(known.get(use.queue, 0) >= use.time for card in cards for use in shadow.uses(card))

    def _check(self, access: Access, use: Use, clock: Clock) -> None:
        shadow = self._shadow(access.region)
        for card, place in access.cards.items():
            if access.writes:
                for earlier in shadow.uses(card):
                    _check_order(access, earlier, use, place, clock)
            elif card in shadow.written:
                _check_order(access, shadow.written[card], use, place, clock)
            else:
                raise RaceError(
                    f"{use.text} reads {access.name} at {place}, where nothing has been written",
                    queue=use.queue,
                    fix=f"write {access.name} at {place} before, or do not read there",
                )

    def _note(self, access: Access, use: Use) -> None:
        shadow = self._shadow(access.region)
        for card in access.cards:
            if access.writes:
                shadow.written[card] = use
                shadow.read.pop(card, None)
            else:
                shadow.read.setdefault(card, {})[use.queue] = use


def _check_order(access: Access, earlier: Use, use: Use, place: Coordinate, clock: Clock) -> None:
    if clock.get(earlier.queue, 0) >= earlier.time:
        return
    verb = "writes" if access.writes else "reads"
    raise RaceError(
        f"{use.text} {verb} {access.name} at {place}, not ordered after {earlier.text}",
        first=f"queue {earlier.queue}: {earlier.text}",
        second=f"queue {use.queue}: {use.text}",
        missing=f"an event recorded on queue {earlier.queue} after the first and waited for by queue {use.queue} "
        "before the second",
        fix=f"event = queue{earlier.queue}.record_event(); queue{use.queue}.wait_for_event(event)",
    )
