"""Carrying out a schedule on arrays: every step moves chunks between neighbours, all sends of a step at once.

Memory is one array of slots, (members of this process, chunks, elements). A step reads all its messages first, then
writes them, so that sends of one step do not see each other. Sends between members of one process are copies, others
are messages: every process knows the whole schedule, so that both ends of a message know of it, and in each step a
process sends one message to each process that one of its members sends to, and to no other. A chunk is the elements
that it has in one process; where other mesh axes cut what a member holds, a process may have few of them, or none.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from meshloom.collectives.schedule import Schedule, Send, waves
from meshloom.comms import wire
from meshloom.comms.group import Group
from meshloom.engines.reductions import REDUCTIONS

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
        if self.held == self.shape:
            return [min(piece * width, math.prod(self.shape)) for piece in range(pieces + 1)]
        return [self.before(piece * width) for piece in range(pieces)] + [math.prod(self.held)]


Write = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]  # numbers of messages; their rows, chunks; reduce?


@dataclass(frozen=True)
class Share:
    """A process's share of a step: what it reads of its own, sends to whom, gets from whom, and writes, in order.

    Messages are numbered: those of its own members first, then those that arrive, process by process.
    """

    read: tuple[torch.Tensor, torch.Tensor]  # rows, chunks
    leaving: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # process, (row, chunk)...
    arriving: tuple[tuple[int, tuple[int, ...]], ...]  # process, chunks
    written: tuple[Write, ...]  # in parts that write no slot twice


@lru_cache(maxsize=256)
def _shares(schedule: Schedule, group: Group) -> tuple[Share, ...]:
    places = dict(zip(schedule.group, group.places, strict=True))
    return tuple(_share(step, places, group.index) for step in schedule.steps)


def _share(step: Sequence[Send], places: dict[Any, tuple[int, int]], here: int) -> Share:
    own: list[tuple[int, int]] = []
    leaving: dict[int, list[tuple[int, int]]] = {}
    arriving: dict[int, list[int]] = {}
    for send in step:
        (source, row), (target, _) = places[send.source], places[send.destination]
        pairs = [(row, chunk) for chunk in send.chunks]
        if source == target == here:
            own += pairs
        elif source == here:
            leaving.setdefault(target, []).extend(pairs)
        elif target == here:
            arriving.setdefault(source, []).extend(send.chunks)
    starts = dict(zip(arriving, itertools.accumulate(map(len, arriving.values()), initial=len(own)), strict=False))
    counters = {here: itertools.count(), **{process: itertools.count(start) for process, start in starts.items()}}
    received = [send for send in step if places[send.destination][0] == here]
    numbers = {send: [next(counters[places[send.source][0]]) for _ in send.chunks] for send in received}
    return Share(
        _columns(own, 2),
        tuple((process, tuple(pairs)) for process, pairs in leaving.items()),
        tuple((process, tuple(chunks)) for process, chunks in arriving.items()),
        tuple(_writes(received, numbers, places)),
    )


def _writes(
    received: Sequence[Send], numbers: dict[Send, list[int]], places: dict[object, tuple[int, int]]
) -> Iterator[Write]:
    for wave in waves(received):
        for reduce in (True, False):
            chosen = [send for send in wave if send.reduce == reduce]
            rows = [
                (number, places[send.destination][1], chunk)
                for send in chosen
                for number, chunk in zip(numbers[send], send.chunks, strict=True)
            ]
            if rows:
                yield (*_columns(rows, 3), reduce)


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Any:
    return torch.tensor(rows, dtype=torch.int64).view(-1, width).unbind(1)


def send_all(
    schedule: Schedule, slots: torch.Tensor, group: Group, widths: Sequence[int], op: str = "sum"
) -> torch.Tensor:
    """Carry out every step on the slots, in place, together with the processes of the group.

    `widths` has the elements of each chunk; the rest of its slot is padding and stays here.
    """
    shares = _shares(schedule, group)
    if slots.is_meta:
        return slots
    if not group.crosses:
        for share in shares:
            _step(share, slots, widths, op)
        return slots
    told = torch.empty((len(slots), sum(widths)), dtype=slots.dtype, device="meta")  # what the check compares

    def run() -> None:
        for number, share in enumerate(shares):
            _step(share, slots, widths, op, group, TAG + number % _TAGS)

    wire.perform(f"{schedule.collective} by {schedule.algorithm}", group, told, lambda: Task(run), lambda _: None)
    return slots


def _step(
    share: Share, slots: torch.Tensor, widths: Sequence[int], op: str, group: Group | None = None, tag: int = 0
) -> None:
    messages = slots[share.read]
    if group is not None:
        messages = torch.cat([messages, *_exchange(share, slots, widths, group, tag)])
    for numbers, rows, chunks, reduce in share.written:
        arrived = messages[numbers]
        slots[rows, chunks] = REDUCTIONS[op].combine(slots[rows, chunks], arrived) if reduce else arrived


def _exchange(
    share: Share, slots: torch.Tensor, widths: Sequence[int], group: Group, tag: int
) -> Iterator[torch.Tensor]:
    """What arrives from each process, as messages with the room of a slot each."""
    rooms = {process: slots.new_empty(sum(widths[each] for each in chunks)) for process, chunks in share.arriving}
    sent = {
        process: torch.cat([slots[row, chunk, : widths[chunk]] for row, chunk in pairs])
        for process, pairs in share.leaving
    }
    _deliver(sent, rooms, group, tag)
    for process, chunks in share.arriving:
        arrived = slots.new_zeros(len(chunks), slots.shape[2])
        for row, part in zip(arrived, rooms[process].split([widths[each] for each in chunks]), strict=True):
            row[: len(part)] = part
        yield arrived


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
class Executor:
    """Collectives by a schedule, for the members of this process, each of which has a box of elements here.

    Rows are those of `group.mine`, in and out; what a member has for each, or from each, is there for all members.
    """

    group: Group
    box: Box

    def reduce_all(self, schedule: Schedule, rows: torch.Tensor, op: str) -> torch.Tensor:
        """All-reduce, reduce and broadcast: (own members, n) in; what each holds afterwards, (own members, n), out."""
        bounds = self.box.cut(schedule.chunks)
        return _join(send_all(schedule, _cut(rows, bounds), self.group, _sizes(bounds), op), bounds)

    def gather_all(self, schedule: Schedule, rows: torch.Tensor) -> torch.Tensor:
        """All-gather and gather: (own members, n) in; (own members, members, n), who holds whose, out."""
        chunks, bounds, widths = self._by_owner(schedule)
        cut = _cut(rows, bounds)
        slots = rows.new_zeros(len(rows), schedule.chunks, cut.shape[-1])
        for row, member in enumerate(self.group.mine):
            slots[row, chunks[member]] = cut[row]
        done = send_all(schedule, slots, self.group, widths)
        return _join(done[:, torch.tensor(chunks)], bounds)

    def scatter_all(self, schedule: Schedule, rows: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce-scatter and scatter: (own members, members, n), what each has for each, in; (own members, n) out."""
        chunks, bounds, widths = self._by_owner(schedule)
        cut = _cut(rows, bounds)
        slots = rows.new_zeros(len(rows), schedule.chunks, cut.shape[-1])
        slots[:, torch.tensor(chunks)] = cut
        done = send_all(schedule, slots, self.group, widths, op)
        return _join(torch.stack([done[row, chunks[member]] for row, member in enumerate(self.group.mine)]), bounds)

    def exchange_all(self, schedule: Schedule, rows: torch.Tensor) -> torch.Tensor:
        """All-to-all: (own members, members, n), what each has for each, in; from whom out."""
        size, width = self.group.size, rows.shape[2]
        slots = rows.new_zeros(len(rows), size * size, width)
        for row, member in enumerate(self.group.mine):
            slots[row, member * size : (member + 1) * size] = rows[row]
        done = send_all(schedule, slots, self.group, [width] * size**2)
        return torch.stack([done[row, member::size] for row, member in enumerate(self.group.mine)])

    def route_all(self, schedule: Schedule, rows: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """Messages along routes, chunk i to member i from the one that `order` names: (own members, n) in and out."""
        size, width = self.group.size, rows.shape[1]
        slots = rows.new_zeros(len(rows), size, width)
        for to, source in enumerate(order):
            row = None if source is None else self.group.row(source)
            if row is not None:
                slots[row, to] = rows[row]
        done = send_all(schedule, slots, self.group, [width] * size)
        return torch.stack([done[row, member] for row, member in enumerate(self.group.mine)])

    def _by_owner(self, schedule: Schedule) -> tuple[list[list[int]], list[int], list[int]]:
        """The chunks of each member, where the pieces of what it has begin and end, and the width of each chunk."""
        chunks = chunks_by_owner(schedule)
        bounds = self.box.cut(len(chunks[0]))
        widths = [0] * schedule.chunks
        for each in chunks:
            for chunk, width in zip(each, _sizes(bounds), strict=True):
                widths[chunk] = width
        return chunks, bounds, widths


def chunks_by_owner(schedule: Schedule) -> list[list[int]]:
    """The chunks of each member, in order."""
    found: list[list[int]] = [[] for _ in schedule.group]
    for chunk, owner in enumerate(schedule.owners):
        found[owner].append(chunk)
    return found


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(bounds)]


def _cut(rows: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """(..., n) to (..., pieces, elements of the largest), each filled with zeros, in memory of its own."""
    sizes = _sizes(bounds)
    width = max(sizes)
    if _are_even(bounds, width):  # one call, which copies also where there is nothing to pad
        padded = torch.constant_pad_nd(rows, (0, len(sizes) * width - rows.shape[-1]))
        return padded.view(*rows.shape[:-1], len(sizes), width)
    slots = rows.new_zeros(*rows.shape[:-1], len(sizes), width)
    for piece, part in enumerate(rows.split(sizes, -1)):
        slots[..., piece, : sizes[piece]] = part
    return slots


def _join(slots: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """(..., pieces, elements) to (..., n), the padding left out; the inverse of `_cut`."""
    if _are_even(bounds, slots.shape[-1]):
        return slots.flatten(-2)[..., : bounds[-1]]
    return torch.cat([slots[..., piece, :size] for piece, size in enumerate(_sizes(bounds))], -1)


def _are_even(bounds: Sequence[int], width: int) -> bool:
    """Whether pieces have one width, as far as they reach."""
    return list(bounds) == [min(piece * width, bounds[-1]) for piece in range(len(bounds))]
