"""The event engine: jobs wait for other jobs and for a resource that serves one at a time, first come, first served.

A job is *ready* when what it waits for has arrived. It *starts* when its resource is free and every job that was ready
before it has been served, keeps the resource `busy` seconds, and *arrives* `delay` seconds after that: bandwidth is
occupancy, latency is propagation that the next message does not wait for. Jobs ready at the same time go by number.

On a switch a message goes through two ports: it keeps the one of its source `busy` seconds, its first byte reaches the
one of its destination `delay` seconds after it has started, and keeps that as long, after those that came before it.
What arrives to be combined is there `settle` seconds later.

A schedule is run in one of two ways with the same result. `by_events` takes ready jobs from a heap. `by_steps` goes
through the steps with arrays, which holds as long as messages become ready on every link in the order of the schedule;
where they do not, it gives up and the heap decides.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshloom.collectives.schedule import Schedule, Send
from meshloom.errors import ArgumentError, FabricError
from meshloom.fabric import Fabric, Link

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
NOWHERE = -1  # the resource of a job that only joins others
DENSE = 1 << 24  # slots up to which all are kept, used or not


@dataclass
class Jobs:
    """Jobs as columns, numbered in an order in which each comes after those that it waits for."""

    resource: list[int] = field(default_factory=list)
    ports: list[tuple[int, int] | None] = field(default_factory=list)  # out of the source, into the destination
    busy: list[float] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)
    settle: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # who is waited for, and by whom: one entry per pair
    after: list[int] = field(default_factory=list)

    def add(
        self,
        resource: int,
        after: Sequence[int],
        busy: float = 0.0,
        delay: float = 0.0,
        size: int = 0,
        label: int = 0,
        settle: float = 0.0,
        ports: tuple[int, int] | None = None,
    ) -> int:
        """One more job; its number. With ports, these are waited for, and the resource only says what the job is."""
        job = len(self.resource)
        self.resource.append(resource)
        self.ports.append(ports)
        self.busy.append(busy)
        self.delay.append(delay)
        self.settle.append(settle)
        self.size.append(size)
        self.label.append(label)
        self.before.extend(after)
        self.after.extend([job] * len(after))
        return job

    def join(self, after: Sequence[int]) -> int:
        """A job that takes no time and arrives with the last of others; the other itself where there is but one."""
        return after[0] if len(after) == 1 else self.add(NOWHERE, after)

    def run(self) -> tuple[Floats, Floats]:
        """When each job starts, and when it arrives.

        >>> jobs = Jobs()
        >>> first = jobs.add(0, (), busy=2.0, delay=1.0)
        >>> second = jobs.add(0, (), busy=2.0)  # the link is free again after 2 seconds
        >>> third = jobs.add(1, (first, second))
        >>> jobs.run()[0].tolist()
        [0.0, 2.0, 4.0]
        """
        resource, ports, busy, delay, settle = self.resource, self.ports, self.busy, self.delay, self.settle
        waits, followers, first = self._edges()
        ready = [0.0] * len(resource)
        start, arrive = ready.copy(), ready.copy()
        free = [0.0] * (1 + max([*resource, *(port for both in ports if both for port in both)], default=0))
        queue = [(0.0, job, False) for job, count in enumerate(waits) if not count]
        while queue:
            now, job, has_left = heapq.heappop(queue)
            both = ports[job]
            at = resource[job] if both is None else both[has_left]
            if at >= 0:
                now = max(now, free[at])
                free[at] = now + busy[job]
            if not has_left:
                start[job] = now
                if both is not None:  # its first byte will be at the second port
                    heapq.heappush(queue, (now + delay[job], job, True))
                    continue
            arrive[job] = done = now + busy[job] + (0.0 if has_left else delay[job]) + settle[job]
            for other in followers[first[job] : first[job + 1]]:
                ready[other] = max(ready[other], done)
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(queue, (ready[other], other, False))
        return np.array(start), np.array(arrive)

    def _edges(self) -> tuple[list[int], list[int], list[int]]:
        """How many each job waits for; all followers by the job that they follow, and where those of a job begin."""
        count = len(self.resource)
        before, after = np.array(self.before, np.int64), np.array(self.after, np.int64)
        first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
        followers = after[np.argsort(before, kind="stable")]
        return np.bincount(after, minlength=count).tolist(), followers.tolist(), first.tolist()


class Wires:
    """The links of a fabric as numbers: coordinates and links by their position."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.coordinates = tuple(fabric.coordinates())
        self.index = {place: i for i, place in enumerate(self.coordinates)}
        pairs = [self._code(self.index[each.source], self.index[each.destination]) for each in fabric.links]
        codes = np.array(pairs, np.int64)
        self._order = np.argsort(codes)
        self._codes = codes[self._order]
        self.latency = np.array([each.latency for each in fabric.links], np.float64)
        self.bandwidth = np.array([each.bandwidth for each in fabric.links], np.float64)
        self.combined = np.array([each.combined or each.bandwidth for each in fabric.links], np.float64)
        packets = [each.packet or (math.inf, each.latency) for each in fabric.links]
        self.packet, self.packet_latency = np.array(packets, np.float64).reshape(-1, 2).T
        self.least = np.array([each.least for each in fabric.links], np.float64)
        self.ports = [self._find_ports(each) for each in fabric.links]

    def _find_ports(self, link: Link) -> tuple[int, int] | None:
        """The ports of a link along a switch, numbered after all links and devices: out of its source, into its end."""
        axis, axes = self.fabric.axis_of(link), len(self.fabric.shape)
        if axis not in self.fabric.switches:
            return None
        first = len(self.fabric.links) + len(self.coordinates)
        ends = (self.index[link.source], self.index[link.destination])
        out, into = (first + 2 * (end * axes + axis) + side for side, end in enumerate(ends))
        return out, into

    def occupied(self, link: Integers, size: Integers, combined: NDArray[np.bool_]) -> Floats:
        """Seconds for which messages keep their links, as `Carrier.occupied` has it."""
        rate: Floats = np.where(combined, self.combined[link], self.bandwidth[link])
        return np.maximum(size, self.least[link]) / rate

    def delays(self, link: Integers, size: Integers) -> Floats:
        """Seconds that messages still need when they have left, as `Carrier.delay` has it."""
        latency: Floats = self.latency[link]
        rise: Floats = (self.packet_latency[link] - latency) * np.minimum(1.0, size / self.packet[link])
        return latency + rise

    def settles(self, size: Integers, combined: NDArray[np.bool_]) -> Floats:
        """Seconds that combining takes."""
        rate = self.fabric.combining
        return np.where(combined, size / rate, 0.0) if rate else np.zeros(len(size))

    def _code(self, source: Any, destination: Any) -> Any:
        return source * len(self.coordinates) + destination

    def find(self, source: Integers, destination: Integers) -> Integers:
        """The links between pairs of coordinates, -1 where no link joins them."""
        codes = self._code(source, destination)
        if not len(self._codes):
            return np.full(len(codes), -1, np.int64)
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[at] == codes, self._order[at], -1)


@dataclass(frozen=True)
class Sends:
    """A schedule as columns, one row per send, and columns of parts: one per chunk that a send carries, in order.

    `steps` are the rows at which steps begin, and the end; `parts` the parts at which rows begin, and the end. A slot
    is the memory of a chunk on a device, by number.
    """

    steps: Integers
    parts: Integers
    source: Integers
    destination: Integers
    link: Integers
    chunk: Integers  # the first one that is carried
    reduce: NDArray[np.bool_]
    size: Integers
    busy: Floats
    delay: Floats
    settle: Floats
    ports: tuple[tuple[int, int] | None, ...]  # none at all where no message goes through a switch
    reads: Integers  # of each part, the slot at the source
    writes: Integers  # of each part, the slot at the destination

    def __len__(self) -> int:
        return len(self.link)

    def ranges(self) -> Iterable[tuple[slice, slice]]:
        """The rows of each step that has any, and their parts."""
        for low, high in itertools.pairwise(self.steps.tolist()):
            if low < high:
                yield slice(low, high), slice(int(self.parts[low]), int(self.parts[high]))


def read_schedule(schedule: Schedule, wires: Wires, size: int) -> Sends:
    """The columns of a schedule for a value of `size` bytes, in chunks of ceil size: 10 over 4 is 3, 3, 3, 1."""
    flat = list(itertools.chain.from_iterable(schedule.steps))
    source, destination = (_places(flat, name, wires) for name in ("source", "destination"))
    chunk = np.fromiter(map(attrgetter("chunk"), flat), np.int64, len(flat))
    more = np.fromiter(map(len, map(attrgetter("also"), flat)), np.int64, len(flat))
    parts = np.concatenate([[0], np.cumsum(more + 1)])
    carried = np.fromiter(_chunks_of(flat), np.int64, int(parts[-1])) if more.any() else chunk
    _check_chunks(schedule, carried)
    link = wires.find(source, destination)
    if len(link) and link.min() < 0:
        raise _no_link(schedule, flat[int(link.argmin())], int(link.argmin()), wires.fabric)
    sizes = _sizes(carried, parts, size, schedule.chunks)
    devices = np.repeat(np.stack([source, destination]), more + 1, axis=1)
    reads, writes = _number_anew(devices * schedule.chunks + carried, len(wires.coordinates) * schedule.chunks)
    reduce = np.fromiter(map(attrgetter("reduce"), flat), np.bool_, len(flat))
    busy, delay, settle = wires.occupied(link, sizes, reduce), wires.delays(link, sizes), wires.settles(sizes, reduce)
    ports = tuple(wires.ports[each] for each in link.tolist()) if wires.fabric.switches else ()
    steps = np.cumsum([0, *map(len, schedule.steps)])
    return Sends(
        steps, parts, source, destination, link, chunk, reduce, sizes, busy, delay, settle, ports, reads, writes
    )


def _chunks_of(flat: list[Send]) -> Iterable[int]:
    return itertools.chain.from_iterable(map(attrgetter("chunks"), flat))


def _sizes(carried: Integers, parts: Integers, size: int, chunks: int) -> Integers:
    """The bytes of each message."""
    each = -(-size // chunks)
    return np.add.reduceat(np.clip(size - carried * each, 0, each), parts[:-1]) if len(carried) else carried


def _number_anew(slots: Integers, total: int) -> Integers:
    """The slots as they are, or numbered anew where only few of very many are in use."""
    if total <= DENSE:
        return slots
    return np.unique(slots, return_inverse=True)[1].reshape(slots.shape)


def _places(flat: list[Send], name: str, wires: Wires) -> Integers:
    try:
        return np.fromiter(map(wires.index.__getitem__, map(attrgetter(name), flat)), np.int64, len(flat))
    except KeyError as error:
        place = error.args[0]
        raise FabricError(f"coordinate {place} of the schedule is not on the fabric", fabric=wires.fabric) from None


def _check_chunks(schedule: Schedule, carried: Integers) -> None:
    wrong = carried[(carried < 0) | (carried >= schedule.chunks)]
    if len(wrong):
        raise ArgumentError(f"a schedule of {schedule.chunks} chunks sends chunk {wrong[0]}", schedule=schedule)


def _no_link(schedule: Schedule, send: Send, row: int, fabric: Fabric) -> FabricError:
    bounds = itertools.accumulate(map(len, schedule.steps))
    step = next(number for number, end in enumerate(bounds) if row < end)
    way = " -> ".join(map(str, fabric.route(send.source, send.destination)))
    return FabricError(
        f"no link joins {send.source} and {send.destination}",
        schedule=f"{schedule.algorithm} {schedule.collective}, step {step}: {send}",
        fabric=fabric,
        fix=f"send along the links: {way}",
    )


def by_steps(sends: Sends, barrier: bool = False) -> Floats | None:
    """Starts by arrays, a step at a time; None where messages do not become ready in the order of the schedule."""
    if any(sends.ports):
        return None
    links = int(sends.link.max(initial=-1)) + 1
    free, latest = np.zeros(links), np.zeros(links)  # of each link: when it is free, when its last message was ready
    held = np.zeros(int(max(sends.reads.max(initial=-1), sends.writes.max(initial=-1))) + 1)  # since when a slot holds
    start, floor = np.zeros(len(sends)), 0.0
    for rows, parts in sends.ranges():
        link, writes = sends.link[rows], sends.writes[parts]
        ready = np.full(len(link), floor) if barrier else _ready(held, sends, rows, parts)
        if not (_are_distinct(link) and (ready >= latest[link]).all()):
            return None
        start[rows] = begin = np.maximum(ready, free[link])
        latest[link] = ready
        free[link] = end = begin + sends.busy[rows]
        arrive = end + sends.delay[rows] + sends.settle[rows]
        floor = max(floor, float(arrive.max()))
        count = np.diff(sends.parts[rows.start : rows.stop + 1])
        arrived, reduce = np.repeat(arrive, count), np.repeat(sends.reduce[rows], count)
        if reduce.all():
            np.maximum.at(held, writes, arrived)  # several may be combined in one slot
        elif _are_distinct(writes):
            held[writes] = np.where(reduce, np.maximum(held[writes], arrived), arrived)
        else:
            return None
    return start


def _ready(held: Floats, sends: Sends, rows: slice, parts: slice) -> Floats:
    """When all that each message reads is there."""
    return np.maximum.reduceat(held[sends.reads[parts]], sends.parts[rows] - parts.start)


def _are_distinct(numbers: Integers) -> bool:
    return len(numbers) < 2 or bool(np.diff(np.sort(numbers)).all())


def by_events(sends: Sends, barrier: bool = False) -> Floats:
    """Starts by the heap: any schedule, several sends on a link in one step included."""
    jobs = Jobs()
    add_sends(jobs, sends, None, barrier)
    start, _ = jobs.run()
    return start[np.array(jobs.resource, np.int64) >= 0]


def finish_schedule(sends: Sends, barrier: bool = False) -> tuple[Floats, Floats]:
    """When each send of a schedule starts, and when it has arrived."""
    start = by_steps(sends, barrier)
    if start is not None:
        return start, start + sends.busy + sends.delay + sends.settle
    jobs = Jobs()
    add_sends(jobs, sends, None, barrier)
    start, arrive = jobs.run()
    real = np.array(jobs.resource, np.int64) >= 0
    return start[real], arrive[real]


@lru_cache(maxsize=8)
def _wires_of(fabric: Fabric) -> Wires:
    return Wires(fabric)


def time_schedule(schedule: Schedule, fabric: Fabric, size: int) -> float:
    """Seconds that a schedule of a value of `size` bytes takes on a fabric where nothing else moves.

    >>> from meshloom.collectives.schedule import Send
    >>> line = Fabric.grid((2,), "line", latency=1e-6, bandwidth=1e9, launch=5e-6)
    >>> f"{time_schedule(Schedule('broadcast', 'one', ((0,), (1,)), 1, ((Send((0,), (1,), 0),),)), line, 1000):.1e}"
    '7.0e-06'
    """
    if not schedule.sends:
        return 0.0
    _, arrive = finish_schedule(read_schedule(schedule, _wires_of(fabric), size))
    return fabric.launch + float(arrive.max())


def add_sends(
    jobs: Jobs, sends: Sends, gates: Mapping[int, int] | None = None, barrier: bool = False, label: int = 0
) -> list[int]:
    """The sends of a schedule as jobs, in order; a device's sends wait for its gate, if gates are given."""
    columns = (sends.link, sends.source, sends.busy, sends.delay, sends.settle, sends.size, sends.parts, sends.reads)
    link, source, busy, delay, settle, size, parts, reads = (column.tolist() for column in columns)
    ports = sends.ports or (None,) * len(link)
    count, reduce, writes = np.diff(sends.parts), sends.reduce, sends.writes
    writers: dict[int, list[int]] = {}
    made: list[int] = []
    wall: list[int] = []
    for rows, pieces in sends.ranges():
        for row in range(rows.start, rows.stop):
            after = wall if barrier else _last_writes(writers, reads[parts[row] : parts[row + 1]])
            if gates is not None:
                after = [*after, gates[source[row]]]
            made.append(jobs.add(link[row], after, busy[row], delay[row], size[row], label, settle[row], ports[row]))
        if barrier:
            wall = [jobs.join(made[rows])]
        else:
            per_piece = (np.repeat(column, count[rows]).tolist() for column in (reduce[rows], made[rows]))
            _write(writers, zip(writes[pieces].tolist(), *per_piece, strict=True))
    return made


def _last_writes(writers: Mapping[int, list[int]], slots: Sequence[int]) -> list[int]:
    if len(slots) == 1:
        return writers.get(slots[0], [])
    return list(dict.fromkeys(job for slot in slots for job in writers.get(slot, ())))


def _write(writers: dict[int, list[int]], written: Iterable[tuple[int, bool, int]]) -> None:
    """After a step: what replaces a slot is all that it holds, what is combined comes on top."""
    fresh: set[int] = set()
    for slot, reduce, job in written:
        if reduce or slot in fresh:
            writers.setdefault(slot, []).append(job)
        else:
            writers[slot] = [job]
        fresh.add(slot)
