"""What algorithms take on links that are all alike: closed forms of what the simulator finds, send by send.

`Hops` is one message in seconds: `copy` and `add` are a whole hop (occupied, on its way, combined), `room` and
`room_added` the part for which the link, or on a switch the port, is occupied. Messages follow each other, so a
pipeline of k segments over d hops takes `d hops + (k - 1) rooms`; on a switch the messages of one device to several
others share its port. Where no closed form is known (two arms that share a port, unequal axes at once), there is None:
such an algorithm is not priced, and chosen only where its schedule, carried out in numbers, is faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshloom.collectives.algorithms.formulas import Count
from meshloom.fabric.links import Carrier


class Hops:
    """Messages over links of one kind, for devices that combine at some rate."""

    __slots__ = ("_add_room", "_copy_room", "_full", "_latency", "_least", "_rise", "_settle", "is_shared")

    def __init__(self, links: Carrier, combining: float | None = None, is_shared: bool = False) -> None:
        self._latency = links.latency
        self._full, rise = links.packet or (1.0, links.latency)
        self._rise = rise - links.latency
        self._least = links.least
        self._copy_room = 1 / links.bandwidth
        self._add_room = 1 / (links.combined or links.bandwidth)
        self._settle = 1 / combining if combining else 0.0
        self.is_shared = is_shared

    def is_like(self, other: Hops) -> bool:
        """Whether messages take as long as over another."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def room(self, size: float) -> float:
        """For how long a message that is copied keeps others waiting."""
        return max(size, self._least) * self._copy_room

    def room_added(self, size: float) -> float:
        """For how long a message that is combined keeps others waiting."""
        return max(size, self._least) * self._add_room

    def delay(self, size: float) -> float:
        """How long a message is on its way."""
        return self._latency + self._rise * min(1.0, size / self._full)

    def copy(self, size: float) -> float:
        """One message, copied."""
        return max(size, self._least) * self._copy_room + self.delay(size)

    def add(self, size: float) -> float:
        """One message, combined."""
        return max(size, self._least) * self._add_room + size * self._settle + self.delay(size)

    def growing(self, size: float, count: int) -> float:
        """Messages of 1, 2, ..., `count` pieces in a row, copied."""
        rises = _sum_up_to(size, count, self._full) / self._full if self._rise else 0.0
        few = min(count, int(self._least // size)) if size else count
        counted = few * self._least + (count * (count + 1) - few * (few + 1)) / 2 * size
        return counted * self._copy_room + count * self._latency + rises * self._rise

    def copies(self, size: float, count: int) -> float:
        """One message to each of `count` others, all at once: on a switch, one after the other through a port."""
        return self.delay(size) + self.room(size) * (count if self.is_shared else 1)

    def additions(self, size: float, count: int) -> float:
        """The same, combined where they arrive; or from `count` others."""
        return self.add(size) + self.room_added(size) * (count - 1 if self.is_shared else 0)


def _sum_up_to(size: float, count: int, most: float) -> float:
    """The sum of 1, 2, ..., `count` times a size, each counted up to a limit."""
    below = min(count, int(most // size)) if size else count
    return below * (below + 1) / 2 * size + (count - below) * most


# Seconds, or None: of a hop, the members, the bytes of all chunks together, the longest arm from the root of a line.
Timing = Callable[[Hops, int, int, int], float | None]


def share(v: int, chunks: int) -> int:
    """The largest of some chunks."""
    return -(-v // chunks)


def unknown(hops: Hops, p: int, v: int, reach: int) -> float | None:
    """No closed form."""
    return None


def _alone(timing: Timing) -> Timing:
    """A closed form that holds if no two messages share a port."""
    return lambda hops, p, v, reach: None if hops.is_shared and p > 2 else timing(hops, p, v, reach)


def _from_an_end(timing: Timing) -> Timing:
    """The same for a root at an end of a line, from which there is one arm."""
    return lambda hops, p, v, reach: None if hops.is_shared and reach < p - 1 else timing(hops, p, v, reach)


def along_trees(steps: Count, arms: int, on_line: bool = False) -> dict[str, Timing]:
    """Every collective along paths from each member, or from the root: `arms` from a member at once."""
    guard = _alone if arms > 1 else lambda timing: timing
    rooted = _from_an_end if on_line else guard

    def far(p: int, reach: int) -> int:
        return reach if on_line else steps(p)

    def pieces(is_dealt: bool) -> Timing:
        return lambda h, p, v, reach: (
            _end_to_end(h, p, v, is_dealt) if on_line and reach == p - 1 else far(p, reach) * h.copy(share(v, p))
        )

    return {
        "all_gather": guard(lambda h, p, v, reach: steps(p) * h.copy(share(v, p))),
        "reduce_scatter": guard(lambda h, p, v, reach: steps(p) * h.add(share(v, p))),
        "all_reduce": guard(lambda h, p, v, reach: steps(p) * (h.add(share(v, p)) + h.copy(share(v, p)))),
        "all_to_all": guard(lambda h, p, v, reach: h.growing(share(v, p * p), steps(p))),
        "broadcast": rooted(lambda h, p, v, reach: far(p, reach) * h.copy(v)),
        "reduce": rooted(lambda h, p, v, reach: far(p, reach) * h.add(v)),
        "gather": rooted(pieces(is_dealt=False)),
        "scatter": rooted(pieces(is_dealt=True)),
    }


def _end_to_end(h: Hops, p: int, v: int, is_dealt: bool) -> float:
    """Pieces between one end of a line and all members: the last ones, which go farthest, may be smaller or empty.

    Dealt out, these leave first, and the others wait for them.
    """
    piece = share(v, p)
    full = min(p, v // piece) if piece else 0
    if full == p:
        return (p - 1) * h.copy(piece)
    left, empty = v - full * piece, p - 1 - full
    ways = [(p - 1) * h.copy(0.0) if empty else 0.0, full * h.copy(left), (full - 1) * h.copy(piece)]
    if is_dealt:
        ways[1] += empty * h.room(0.0)
        ways[2] += empty * h.room(0.0) + h.room(left)
    return max(ways)


def along_pipeline(segments: Count) -> dict[str, Timing]:
    """Segments that follow each other along a line; an all-reduce goes to its middle and back."""

    def middle(h: Hops, p: int, v: int, reach: int) -> float:
        size, most = share(v, segments(p)), max(h.room, h.room_added, key=lambda room: room(1.0))
        return p // 2 * (h.add(size) + h.copy(size)) + (segments(p) - 1) * most(size)

    def down(h: Hops, p: int, v: int, reach: int) -> float:
        return reach * h.copy(share(v, segments(p))) + (segments(p) - 1) * h.room(share(v, segments(p)))

    def up(h: Hops, p: int, v: int, reach: int) -> float:
        return reach * h.add(share(v, segments(p))) + (segments(p) - 1) * h.room_added(share(v, segments(p)))

    return {"broadcast": _from_an_end(down), "reduce": _from_an_end(up), "all_reduce": _alone(middle)}


def by_halves() -> dict[str, Timing]:
    """Recursive halving and doubling: one message of each member in each step."""

    def doubling(hop: Callable[[float], float], p: int, v: int) -> float | None:
        if p & (p - 1):
            return None
        return sum(hop(share(v, p) << bit) for bit in range(p.bit_length() - 1))

    def both(h: Hops, p: int, v: int, reach: int) -> float | None:
        up, down = doubling(h.add, p, v), doubling(h.copy, p, v)
        return None if up is None or down is None else up + down

    def crossing(h: Hops, p: int, v: int, reach: int) -> float | None:
        return None if p & (p - 1) else (p.bit_length() - 1) * h.copy(share(v, p * p) * p // 2)

    return {
        "all_gather": lambda h, p, v, reach: doubling(h.copy, p, v),
        "reduce_scatter": lambda h, p, v, reach: doubling(h.add, p, v),
        "all_reduce": both,
        "all_to_all": crossing,
    }


def along_binomial_tree() -> dict[str, Timing]:
    """A root hands over half of its range, then half of what is left, ...: its messages share its port."""
    return {
        "broadcast": lambda h, p, v, reach: _hand_over(h, p, lambda members: v),
        "reduce": lambda h, p, v, reach: _collect(h, p, v),
        "all_reduce": lambda h, p, v, reach: _collect(h, p, v) + _hand_over(h, p, lambda members: v),
        "scatter": lambda h, p, v, reach: _hand_over(h, p, lambda members: members * share(v, p)),
        "gather": _alone(lambda h, p, v, reach: _hand_over(h, p, lambda members: members * share(v, p))),
    }


def _ranges(p: int) -> list[int]:
    """The lengths of all ranges that halving p leaves, from 2 on, the shortest first."""
    found, left = set(), {p}
    while left:
        found |= left
        left = {half for each in left for half in (each // 2, each - each // 2) if half > 1} - found
    return sorted(found)


def _hand_over(h: Hops, p: int, size: Callable[[int], float]) -> float:
    """The last leaf: behind the message for the other half, or in its own half, which has had to wait for that."""
    known = {0: 0.0, 1: 0.0}
    for members in _ranges(p):
        other = members // 2
        waiting = h.room(size(other)) if h.is_shared else 0.0
        known[members] = max(h.copy(size(other)) + known[other], waiting + known[members - other])
    return known[p]


def _collect(h: Hops, p: int, v: int) -> float:
    """When the root has everything: what comes from the other half goes through its port after that of its own."""
    room, settle = h.room_added(v), h.add(v) - h.delay(v) - h.room_added(v)
    known = {0: (0.0, 0.0), 1: (0.0, 0.0)}  # when all of a range is there, and when the port of its root is free
    for members in _ranges(p):
        done, free = known[members - members // 2]
        begin = known[members // 2][0] + h.delay(v)
        is_before = begin + room <= free - room or not h.is_shared
        end = max(free, begin + room) if is_before else max(free, begin) + room
        known[members] = max(done, end + settle), end
    return known[p][0]


def along_binary_tree(segments: Count) -> dict[str, Timing]:
    """The tree of a heap, in segments; each inner member has two children, whose messages share its port."""

    def down(h: Hops, p: int, v: int, reach: int) -> float:
        size = share(v, segments(p))
        between = h.room(size) * (2 if h.is_shared and p > 2 else 1)
        return _deepest(h, p, size, {}) + (segments(p) - 1) * between

    def up(h: Hops, p: int, v: int, reach: int) -> float:
        return _climb(h, p, share(v, segments(p)), segments(p), {})[-1]

    return {"broadcast": down, "reduce": up}


def _children(p: int) -> tuple[int, int]:
    """The sizes of the two parts below the root of a heap of p: 6 are 1 + 3 + 2."""
    full = 1 << (p.bit_length() - 1)  # as many as a full last row may have at most
    last = p - full + 1
    left = (full >> 1) - 1 + min(last, full >> 1)
    return left, p - 1 - left


def _deepest(h: Hops, p: int, size: int, known: dict[int, float]) -> float:
    """When the first segment is at the last leaf: a second child waits for the first one's message.

    What is below a member is a heap again, of few different sizes: `known` are those that were asked for.
    """
    if p < 2:
        return 0.0
    if p not in known:
        left, right = _children(p)
        waiting = h.room(size) if h.is_shared and right else 0.0
        later = max(_deepest(h, left, size, known), waiting + _deepest(h, right, size, known))
        known[p] = h.copy(size) + later
    return known[p]


def _climb(h: Hops, p: int, size: int, count: int, known: dict[int, list[float]]) -> list[float]:
    """When each segment is whole at the root of a heap: its children's messages go through its port as they come."""
    if p < 2:
        return [0.0] * count
    if p not in known:
        below = [_climb(h, each, size, count, known) for each in _children(p) if each]
        known[p] = _meet(h, size, below)
    return known[p]


def _meet(h: Hops, size: int, below: Sequence[Sequence[float]]) -> list[float]:
    """When each segment has come from all children, which send it as soon as they have it."""
    room, delay = h.room_added(size), h.delay(size)
    coming = []
    for ready in below:
        left = -room
        for segment, when in enumerate(ready):
            left = max(when, left + room)
            coming.append((left + delay, segment))
    whole, free = [0.0] * len(below[0]), 0.0
    for arrives, segment in sorted(coming):
        free = (max(arrives, free) if h.is_shared else arrives) + room
        whole[segment] = max(whole[segment], free + h.add(size) - delay - room)
    return whole


def to_everyone() -> dict[str, Timing]:
    """One message from each to each, or from or to the root."""
    return {
        "all_gather": lambda h, p, v, reach: h.copies(share(v, p), p - 1),
        "reduce_scatter": lambda h, p, v, reach: h.additions(share(v, p), p - 1),
        "all_reduce": lambda h, p, v, reach: h.additions(v, p - 1),
        "all_to_all": lambda h, p, v, reach: h.copies(share(v, p * p), p - 1),
        "broadcast": lambda h, p, v, reach: h.copies(v, p - 1),
        "reduce": lambda h, p, v, reach: h.additions(v, p - 1),
        "gather": lambda h, p, v, reach: h.copies(share(v, p), p - 1),
        "scatter": lambda h, p, v, reach: h.copies(share(v, p), p - 1),
    }


def in_two_steps(h: Hops, p: int, v: int, reach: int) -> float:
    """All-reduce: each gets a piece of everybody, then gives it to everybody."""
    return h.additions(share(v, p), p - 1) + h.copies(share(v, p), p - 1)


Hop = Callable[[Hops, float], float]
Across = Callable[[Sequence[Hops], Sequence[int], int], float | None]


def in_turn(steps: Count) -> dict[str, Across]:
    """A grid, one axis after the other, the last first: what was gathered so far goes along the next."""

    def one_way(hop: Hop) -> Across:
        def across(axes: Sequence[Hops], dims: Sequence[int], v: int) -> float | None:
            held, found = share(v, math.prod(dims)), 0.0
            for hops, p in zip(reversed(axes), reversed(dims), strict=True):
                if hops.is_shared and p > 2:
                    return None
                found += steps(p) * hop(hops, held)
                held *= p
            return found

        return across

    return _both_ways(one_way)


def in_levels() -> dict[str, Across]:
    """A grid of joined axes, the first axis first: what was gathered so far goes to everyone along the next."""

    def one_way(hop: Hop) -> Across:
        everyone = Hops.copies if hop is Hops.copy else Hops.additions

        def across(axes: Sequence[Hops], dims: Sequence[int], v: int) -> float:
            held, found = share(v, math.prod(dims)), 0.0
            for hops, p in zip(axes, dims, strict=True):
                found += everyone(hops, held, p - 1)
                held *= p
            return found

        return across

    return _both_ways(one_way)


def at_once(steps: Count) -> dict[str, Across]:
    """A grid of equal axes, a part of the value for each: all are in step. On unequal ones no closed form is known."""

    def one_way(hop: Hop) -> Across:
        def across(axes: Sequence[Hops], dims: Sequence[int], v: int) -> float | None:
            p, count = dims[0], len(dims)
            if any(hops.is_shared or not hops.is_like(axes[0]) for hops in axes) or set(dims) != {p}:
                return None
            piece = share(v, count * p**count)
            return sum(steps(p) * hop(axes[0], piece * p**phase) for phase in range(count))

        return across

    return _both_ways(one_way)


class Phase(NamedTuple):
    """A part of the value on its way round the rings of an axis: messages of some bytes, both ways, added or copied."""

    axis: int
    size: int
    is_added: bool


def around_at_once() -> dict[str, Across]:
    """A torus, a part of the value for each axis, which may be unequal: then parts meet on links, and queue."""

    def gather(dims: Sequence[int], v: int) -> list[list[Phase]]:
        axes = list(range(len(dims)))[::-1]
        return [_phases(axes[part:] + axes[:part], dims, v) for part in range(len(dims))]

    def scatter(dims: Sequence[int], v: int) -> list[list[Phase]]:
        return [[each._replace(is_added=True) for each in reversed(part)] for part in gather(dims, v)]

    def reduce(dims: Sequence[int], v: int) -> list[list[Phase]]:
        return [there + back for there, back in zip(scatter(dims, v), gather(dims, v), strict=True)]

    def timed(parts: Callable[[Sequence[int], int], list[list[Phase]]]) -> Across:
        return lambda axes, dims, v: (
            None if any(hops.is_shared for hops in axes) else _queue_round(axes, dims, parts(dims, v))
        )

    return {"all_gather": timed(gather), "reduce_scatter": timed(scatter), "all_reduce": timed(reduce)}


def _phases(axes: Sequence[int], dims: Sequence[int], v: int) -> list[Phase]:
    held, found = share(v, len(dims) * math.prod(dims)), []
    for axis in axes:
        found.append(Phase(axis, held, is_added=False))
        held *= dims[axis]
    return found


def _queue_round(axes: Sequence[Hops], dims: Sequence[int], parts: Sequence[Sequence[Phase]]) -> float:
    """When the last part has gone through its phases.

    All devices of a torus do the same at the same time, so one of them is enough: what it sends one way is what it gets
    from the other. A part sends both ways, to the far side of the ring; a message follows the one before it, a phase
    the whole of the phase before, and messages of different parts wait for each other where they share a link.
    """
    free: dict[tuple[int, bool], float] = {}
    arms = [len(part) * [0] for part in parts]  # messages of a phase that have yet to arrive
    ended = [0.0] * len(parts)
    queue: list[tuple[float, int, int, int, bool]] = []  # ready, phase, step, part, direction

    def begin(part: int, phase: int, now: float) -> None:
        p = dims[parts[part][phase].axis]
        arms[part][phase] = p - 1
        for is_back, steps in enumerate((p // 2, p - 1 - p // 2)):
            if steps:
                heapq.heappush(queue, (now, phase, 0, part, bool(is_back)))

    for part in range(len(parts)):
        begin(part, 0, 0.0)
    while queue:
        now, phase, step, part, is_back = heapq.heappop(queue)
        axis, size, is_added = parts[part][phase]
        hops, p = axes[axis], dims[axis]
        link = (axis, is_back != is_added)  # sums come back the way that copies went
        now = max(now, free.get(link, 0.0))
        free[link] = now + (hops.room_added(size) if is_added else hops.room(size))
        done = now + (hops.add(size) if is_added else hops.copy(size))
        ended[part] = max(ended[part], done)
        arms[part][phase] -= 1
        if step + 1 < (p - 1 - p // 2 if is_back else p // 2):
            heapq.heappush(queue, (done, phase, step + 1, part, is_back))
        if not arms[part][phase] and phase + 1 < len(parts[part]):
            begin(part, phase + 1, ended[part])
    return max(ended)


def _both_ways(one_way: Callable[[Hop], Across]) -> dict[str, Across]:
    gather, scatter = one_way(Hops.copy), one_way(Hops.add)

    def reduce(axes: Sequence[Hops], dims: Sequence[int], v: int) -> float | None:
        there, back = scatter(axes, dims, v), gather(axes, dims, v)
        return None if there is None or back is None else there + back

    return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
