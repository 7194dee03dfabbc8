"""A schedule carried out by several processes: sends between members of one process are copies, others are messages.

Every process knows the whole schedule, so that both ends of a message know of it. In each step a process sends one
message to each process that one of its members sends to, and to no other. The slots are those of `engines.sending`,
with the rows of this process's members alone. A chunk is the elements that it has in one process; where other mesh axes
cut what a member holds, a process may have few of them, or none.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from meshloom.backends import wire
from meshloom.backends.members import Members
from meshloom.backends.world import Group
from meshloom.collectives.schedule import Schedule, Send
from meshloom.engines.reductions import REDUCTIONS
from meshloom.engines.sending import owned

TAG = 1 << 16  # tags of our messages start here; a program's own are likely to be below
_TAGS = 1 << 15


@dataclass(frozen=True)
class Box:
    """What a process holds of one member's elements: a box of their array, by its shape, offset and held shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    held: tuple[int, ...]

    def before(self, bound: int) -> int:
        """How many of its elements come before a flat index of the whole array.

        >>> [Box((2, 3), (1, 0), (1, 3)).before(bound) for bound in (0, 3, 4, 6)]
        [0, 0, 1, 3]
        """
        whole, here = math.prod(self.shape), math.prod(self.held)
        if bound >= whole or not here:
            return here
        found = 0
        for size, start, held in zip(self.shape, self.offset, self.held, strict=True):
            whole, here = whole // size, here // held
            digit, bound = divmod(bound, whole)
            found += min(max(digit - start, 0), held) * here
            if not start <= digit < start + held:
                break
        return found

    def cut(self, pieces: int) -> list[int]:
        """Where chunks of the whole array begin and end in the box."""
        width = -(-math.prod(self.shape) // pieces)
        return [self.before(piece * width) for piece in range(pieces)] + [math.prod(self.held)]


class Slots:
    """What this process's members hold during a schedule: a row for each, a stretch of it for each chunk."""

    def __init__(self, like: torch.Tensor, rows: int, widths: Sequence[int]) -> None:
        self.bounds = list(itertools.accumulate(widths, initial=0))
        self.data = like.new_zeros((rows, self.bounds[-1]))

    def at(self, row: int, chunk: int) -> torch.Tensor:
        """One slot, to be read or written."""
        return self.data[row, self.bounds[chunk] : self.bounds[chunk + 1]]

    def all(self, chunk: int) -> torch.Tensor:
        """The slots of a chunk, of all rows."""
        return self.data[:, self.bounds[chunk] : self.bounds[chunk + 1]]

    def read(self, row: int, chunks: Sequence[int]) -> torch.Tensor:
        """Slots end to end."""
        return torch.cat([self.at(row, chunk) for chunk in chunks])


@dataclass(frozen=True)
class Own:
    """A process's share of a step: what it sends to whom, what it gets from whom, and what it writes, in order."""

    leaving: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # process, (row, chunk)...
    arriving: tuple[tuple[int, tuple[int, ...]], ...]  # process, chunks
    written: tuple[tuple[int, int, int, int, bool], ...]  # from which process and number or row, row, chunk, reduce


@lru_cache(maxsize=256)
def _shares(schedule: Schedule, members: Members) -> tuple[Own, ...]:
    places = dict(zip(schedule.group, members.places, strict=True))
    return tuple(_share(step, places, members.index) for step in schedule.steps)


def _share(step: Sequence[Send], places: dict[Any, tuple[int, int]], here: int) -> Own:
    leaving: dict[int, list[tuple[int, int]]] = {}
    arriving: dict[int, list[int]] = {}
    written = []
    for send in step:
        (source, row), (target, to) = places[send.source], places[send.destination]
        for chunk in send.chunks:
            if target == here:
                number = row if source == here else len(arriving.setdefault(source, []))
                written.append((source, number, to, chunk, send.reduce))
            if source != target and target == here:
                arriving[source].append(chunk)
            if source != target and source == here:
                leaving.setdefault(target, []).append((row, chunk))
    sent = tuple((process, tuple(pairs)) for process, pairs in leaving.items())
    return Own(sent, tuple((process, tuple(chunks)) for process, chunks in arriving.items()), tuple(written))


def send_all(schedule: Schedule, slots: Slots, members: Members, op: str = "sum") -> Slots:
    """Carry out every step on the slots, in place, together with the processes of the group."""
    shares = _shares(schedule, members)
    if slots.data.is_meta:
        return slots
    if not members.crosses:
        for share in shares:
            _step(share, slots, members.index, op, None)
        return slots
    group = members.group(slots.data)
    told = torch.empty_like(slots.data, device="meta")  # the check compares its shape; the data goes over the links

    def run() -> None:
        for number, share in enumerate(shares):
            _step(share, slots, members.index, op, group, TAG + number % _TAGS)

    wire.perform(f"{schedule.collective} by {schedule.algorithm}", group, told, lambda: Task(run), lambda _: None)
    return slots


def _step(share: Own, slots: Slots, here: int, op: str, group: Group | None, tag: int = 0) -> None:
    rooms = {process: slots.data.new_empty(_size(chunks, slots)) for process, chunks in share.arriving}
    sent = {process: torch.cat([slots.at(*pair) for pair in pairs]) for process, pairs in share.leaving}
    parts = {
        process: rooms[process].split([_size((each,), slots) for each in chunks]) for process, chunks in share.arriving
    }
    inside = {
        (row, chunk): slots.at(row, chunk).clone() for process, row, _, chunk, _ in share.written if process == here
    }
    if group is not None:
        _deliver(sent, rooms, group, tag)
    for process, number, row, chunk, reduce in share.written:
        message = inside[number, chunk] if process == here else parts[process][number]
        slot = slots.at(row, chunk)
        slot.copy_(REDUCTIONS[op].combine(slot, message) if reduce else message)


def _size(chunks: Sequence[int], slots: Slots) -> int:
    return sum(slots.bounds[chunk + 1] - slots.bounds[chunk] for chunk in chunks)


def _deliver(sent: dict[int, torch.Tensor], rooms: dict[int, torch.Tensor], group: Group, tag: int) -> None:
    """Send and receive the messages of a step, all at once, and wait for them."""
    handle, device = group.handle, next((each.device for each in (*sent.values(), *rooms.values())), None)
    together = device is not None and device.type == "cuda"  # NCCL would wait for the first before it begins the next
    if together:
        handle._start_coalescing(device)
    works = [handle.recv([room], process, tag) for process, room in rooms.items() if room.numel()]
    works += [handle.send([message], process, tag) for process, message in sent.items() if message.numel()]
    if together:
        works = [handle._end_coalescing(device)]
    for work in works:
        work.wait()


class Task:
    """Work on a thread of its own, waited for like a collective: a wait that ends early leaves it as it is.

    A message of Gloo whose wait has timed out closes its connections, so that it cannot be waited for by slices itself.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._work, name="meshloom schedule", daemon=True).start()

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def is_completed(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end, for some time; its error is raised here."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class Sends:
    """The functions of `engines.sending` with the rows of this process's members, of which it holds a box of elements.

    Each takes the rows of `members.mine` and gives theirs; what a member has for each, or from each, is there for all.
    """

    members: Members
    box: Box

    def reduce_all(self, schedule: Schedule, rows: torch.Tensor, op: str) -> torch.Tensor:
        """All-reduce, reduce and broadcast: (own members, n) in and out."""
        bounds = self.box.cut(schedule.chunks)
        slots = Slots(rows, len(rows), [end - start for start, end in itertools.pairwise(bounds)])
        slots.data.copy_(rows)
        return send_all(schedule, slots, self.members, op).data

    def gather_all(self, schedule: Schedule, rows: torch.Tensor) -> torch.Tensor:
        """All-gather and gather: (own members, n) in; (own members, members, n), who holds whose, out."""
        chunks, slots, bounds = _by_owner(schedule, rows, self.box)
        for row, member in enumerate(self.members.mine):
            for piece, chunk in enumerate(chunks[member]):
                slots.at(row, chunk).copy_(rows[row, bounds[piece] : bounds[piece + 1]])
        send_all(schedule, slots, self.members)
        return torch.stack([torch.stack([slots.read(row, each) for each in chunks]) for row in range(len(rows))])

    def scatter_all(self, schedule: Schedule, rows: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce-scatter and scatter: (own members, members, n), what each has for each, in; (own members, n) out."""
        chunks, slots, bounds = _by_owner(schedule, rows, self.box)
        for member, each in enumerate(chunks):
            for piece, chunk in enumerate(each):
                slots.all(chunk).copy_(rows[:, member, bounds[piece] : bounds[piece + 1]])
        send_all(schedule, slots, self.members, op)
        return torch.stack([slots.read(row, chunks[member]) for row, member in enumerate(self.members.mine)])

    def exchange_all(self, schedule: Schedule, rows: torch.Tensor) -> torch.Tensor:
        """All-to-all: (own members, members, n), what each has for each, in; from whom out."""
        size = self.members.size
        slots = Slots(rows, len(rows), [rows.shape[2]] * size**2)
        for row, member in enumerate(self.members.mine):
            for to in range(size):
                slots.at(row, member * size + to).copy_(rows[row, to])
        send_all(schedule, slots, self.members)
        arrived = [
            torch.stack([slots.at(row, other * size + member) for other in range(size)])
            for row, member in enumerate(self.members.mine)
        ]
        return torch.stack(arrived)

    def route_all(self, schedule: Schedule, rows: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """Messages along routes, chunk i to member i from the one that `order` names: (own members, n) in and out."""
        slots = Slots(rows, len(rows), [rows.shape[1]] * self.members.size)
        for to, o in enumerate(order):
            row = None if o is None else self.members.row(o)
            if row is not None:
                slots.at(row, to).copy_(rows[row])
        send_all(schedule, slots, self.members)
        return torch.stack([slots.at(row, member) for row, member in enumerate(self.members.mine)])


def _by_owner(schedule: Schedule, rows: torch.Tensor, box: Box) -> tuple[list[list[int]], Slots, list[int]]:
    """The chunks of each member, slots for them, and where the pieces of what a member has begin and end."""
    chunks = owned(schedule)
    bounds = box.cut(len(chunks[0]))
    widths = [0] * schedule.chunks
    for each in chunks:
        for piece, chunk in enumerate(each):
            widths[chunk] = bounds[piece + 1] - bounds[piece]
    return chunks, Slots(rows, len(rows), widths), bounds
