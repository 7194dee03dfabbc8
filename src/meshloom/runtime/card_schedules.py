"""Schedules of collectives on cards: the same steps that are proven and priced as data, over links between cards.

Every chunk is a piece of memory, and travels in packets that fit into a slot. Within a step the packets of a chunk go
one after the other: first all cards that send one, then all that receive it. So a send reads what was there before the
step, and no link ever needs more than one slot. Whether members could wait in a circle is looked at before the first
packet leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshloom.collectives.proof import check_credits, check_form
from meshloom.collectives.schedule import Schedule, Send
from meshloom.mesh import Coordinate
from meshloom.runtime.links import Channel


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk in the memory of every card: the elements `start` to `stop` of what an index names there."""

    index: Any
    start: int
    stop: int


class Routes:
    """The channels between cards, made when they are first used, and what went over them."""

    def __init__(self) -> None:
        self._channels: dict[tuple[Any, Any], Channel] = {}
        self.messages = self.bytes = 0

    def channel(self, source: Any, destination: Any) -> Channel:
        """The channel from one card to another."""
        pair = (source, destination)
        if pair not in self._channels:
            self._channels[pair] = Channel(source, destination)
        return self._channels[pair]


@lru_cache(maxsize=256)
def _check(schedule: Schedule) -> None:
    check_form(schedule)
    check_credits(schedule)


def run_schedule(
    schedule: Schedule,
    cards: Mapping[Coordinate, Any],
    handles: Mapping[Coordinate, Any],
    pieces: Sequence[Piece],
    itemsize: int,
    routes: Routes,
    *,
    op: str = "sum",
    timeout: float | None = None,
) -> None:
    """Carry out every step on memory of cards; an error, before anything moves, if the schedule could get stuck."""
    _check(schedule)
    for step in schedule.steps:
        for chunk in sorted({chunk for send in step for chunk in send.chunks}):
            sends = [
                (send, routes.channel(cards[send.source], cards[send.destination]))
                for send in step
                if chunk in send.chunks
            ]
            _move(sends, handles, pieces[chunk], itemsize, routes, op, timeout)


def _move(
    sends: Sequence[tuple[Send, Channel]],
    handles: Mapping[Coordinate, Any],
    piece: Piece,
    itemsize: int,
    routes: Routes,
    op: str,
    timeout: float | None,
) -> None:
    """One chunk over some links, packet by packet."""
    each = min(channel.slot_size for _, channel in sends) // itemsize
    for start in range(piece.start, piece.stop, each):
        stop = min(start + each, piece.stop)
        under_way = [
            channel.start_send(handles[send.source], piece.index, start, stop, timeout) for send, channel in sends
        ]
        for finish in under_way:
            finish()
        for send, channel in sends:
            combine = op if send.reduce else None
            channel.receive(handles[send.destination], piece.index, start, stop, combine, timeout)
        routes.messages += len(sends)
        routes.bytes += len(sends) * (stop - start) * itemsize
