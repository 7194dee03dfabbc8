"""Schedules of collectives on cards: the same steps that are proven and priced as data, over links between cards.

Every chunk is a piece of memory, and travels in packets that fit into a slot. Within a step the packets of a chunk go
one after the other: first all cards that send one, then all that receive it. So a send reads what was there before the
step, and no link ever needs more than one slot. Whether members could wait in a circle is looked at before the first
packet leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshloom.collectives.proof import check_credits, check_form
from meshloom.collectives.schedule import Schedule, Send
from meshloom.errors import FabricError
from meshloom.mesh import Coordinate
from meshloom.runtime.links import Channel, Routes
from meshloom.runtime.system import Failures


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk in the memory of every card: the elements `start` to `stop` of what an index names there."""

    index: Any
    start: int
    stop: int


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
    with routes.lock:
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
    if not each:
        raise FabricError(f"no slot has room for an element of {itemsize} B", channels=[each for _, each in sends])
    for start in range(piece.start, piece.stop, each):
        stop = min(start + each, piece.stop)
        under_way = []
        for send, channel in sends:
            with at_card(send.source):
                finish = channel.start_send(handles[send.source], piece.index, start, stop, timeout)
            under_way.append((send, finish))
        for send, finish in under_way:
            with at_card(send.source):
                finish()
        for send, channel in sends:
            with at_card(send.destination):
                combine = op if send.reduce else None
                channel.receive(handles[send.destination], piece.index, start, stop, combine, timeout)
        routes.messages += len(sends)
        routes.bytes += len(sends) * (stop - start) * itemsize


@contextmanager
def at_card(place: Coordinate) -> Iterator[None]:
    """What goes wrong inside went wrong on the card at a coordinate."""
    try:
        yield
    except Exception as error:
        raise Failures([(place, error)]) from error
