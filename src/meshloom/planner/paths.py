"""Shortest paths over the placements of one tensor, with placements written as small numbers.

On each axis `d` stands for S(d), `WHOLE` for R and `PARTS` for the partial placement that the source has there: a
station is a tuple of such numbers. All that a price reads of a station is how many bytes a device holds there, so that
nothing but numbers is made on the way; topologies and collectives are made for the path that was found.

A search goes on only until its target is settled and goes on from there when another target is asked for. What is
equal but for rounding counts as equal, so a target is settled once all that is left is more expensive than rounding
explains.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from meshloom.collectives import KINDS
from meshloom.cost import price_of
from meshloom.fabric import Machine
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology
from meshloom.types import itemsize, numel

Station = tuple[int, ...]
WHOLE, PARTS = -1, -2
SMALL = 64  # placements of a tensor up to which all of them are searched; beyond, those between source and target
_KEPT = 1 << 16  # prices on a machine
_ROUNDING = 1e-8  # more than a chain of sums in another order can differ by


def encode(placement: Placement, now: Placement) -> int:
    """The number of a placement on the way: what becomes partial does so at the end and for nothing; till then it is R.

    >>> encode(Shard(1), Replicate()), encode(Partial(), Partial()), encode(Partial(), Shard(0))
    (1, -2, -1)
    """
    if isinstance(placement, Shard):
        return placement.dim
    return PARTS if isinstance(placement, Partial) and placement == now else WHOLE


def kind_of(now: int, wanted: int) -> str:
    """The collective that changes one axis from something else than R."""
    if now == PARTS:
        return "reduce_scatter" if wanted >= 0 else "all_reduce"
    return "all_to_all" if wanted >= 0 else "all_gather"


@lru_cache(maxsize=16)
def prices_on(machine: Machine) -> dict[tuple[str, int, int, int], float]:
    """Prices that searches on a machine have asked for, by kind, place, and the bytes before and after.

    The place is the number of the axis where a machine knows its axes, and else how many devices there are.
    """
    return {}


class Paths:
    """The cheapest paths from one topology to other placements of the same tensor on a machine."""

    __slots__ = (
        "_beyond",
        "_bytes",
        "_costs",
        "_count",
        "_found",
        "_least",
        "_prices",
        "_width",
        "machine",
        "places",
        "sizes",
        "small",
        "source",
        "start",
        "wide",
    )

    def __init__(self, source: Topology, machine: Machine) -> None:
        self.source, self.machine = source, machine.on(source.mesh)
        self.sizes = source.mesh.shape
        self.places = range(len(self.sizes)) if self.machine.axes else self.sizes
        self.start: Station = tuple(encode(each, each) for each in source.placements)
        self.wide = tuple(dim for dim, size in enumerate(source.shape) if size > 1)  # the others are not worth a detour
        self.small = (1 + len(self.wide)) ** len(self.sizes) <= SMALL
        self._bytes: dict[Station, int] = {}
        self._prices = prices_on(self.machine)
        self._count, self._width = numel(source.shape), itemsize(source.dtype)
        self._least: dict[tuple[int, int, int], float] = {}
        self._costs: dict[Station, float] = {self.start: 0.0}
        self._found: dict[Station, tuple[list[Station], float]] = {}
        self._beyond: dict[Station, float] = {}

    def encode(self, target: tuple[Placement, ...]) -> Station:
        """The station before a target's partial axes are made."""
        return tuple(map(encode, target, self.source.placements))

    def cost(self, stop: Station, limit: float = math.inf) -> float:
        """Seconds of the cheapest path to a station, up to rounding; infinite if that is above a limit."""
        found = self._costs.get(stop)
        if found is None:
            if self._beyond.get(stop, -1.0) > limit:
                return math.inf
            found = Estimate(self, stop).run(limit)
            (self._beyond if found > limit else self._costs)[stop] = found
        return found if found <= limit else math.inf

    def find(self, stop: Station) -> tuple[list[Station], float]:
        """The stations of the cheapest path, the source's first, each another on one axis; and the price in seconds."""
        known = self._found.get(stop)
        if known is None:
            search = Search(self, stop, self.options(stop))
            cost, way = search.run(), [stop]
            while way[-1] in search.came:
                way.append(search.came[way[-1]])
            known = self._found[stop] = (way[::-1], cost)
        return known

    def decode(self, station: Station) -> tuple[Placement, ...]:
        """A station as placements."""
        return tuple(
            Shard(code) if code >= 0 else Replicate() if code == WHOLE else now
            for code, now in zip(station, self.source.placements, strict=True)
        )

    def price(self, axis: int, now: int, wanted: int, held: int, there: Station) -> float:
        """Seconds for the change of one axis, from the bytes that a device holds before it."""
        kind = kind_of(now, wanted)
        after = self.bytes_at(there) if kind == "all_gather" else held  # all others have a price by what was before
        return self.price_between(kind, axis, held, after)

    def price_between(self, kind: str, axis: int, before: int, after: int) -> float:
        """Seconds for a collective on one axis, from the bytes that a device holds before and after it."""
        key = (kind, self.places[axis], before, after)
        found = self._prices.get(key)
        if found is None:
            if len(self._prices) >= _KEPT:
                self._prices.clear()
            devices = self.sizes[axis]
            found = price_of(kind, devices, KINDS[kind].size(before, after, devices), self.machine, axis)
            self._prices[key] = found
        return found

    def bytes_at(self, station: Station) -> int:
        """The bytes that one device holds, padding included; chunks of chunks are as large as chunks of all at once."""
        found = self._bytes.get(station)
        if found is None:
            parts = [1] * self.source.ndim
            for code, size in zip(station, self.sizes, strict=True):
                if code >= 0:
                    parts[code] *= size
            found = self._width
            for size, count in zip(self.source.shape, parts, strict=True):
                found *= -(-size // count)
            self._bytes[station] = found
        return found

    def survey(self, open_to: Sequence[Iterable[int]]) -> dict[Station, float]:
        """What stations cost at least whose axes are open to some placements: all of them at once, in one search.

        It may take detours over what another target wants, which the search for one target does not.
        """
        anything = self.wide if self.small else ()
        options = [
            tuple(dict.fromkeys((WHOLE, *each, *(anything if now != WHOLE else ()))))
            for each, now in zip(open_to, self.start, strict=True)
        ]
        search = Search(self, (), options)
        search.run()
        return {station: cost for station, (cost, _) in search.best.items()}

    def bound(self, stop: Station) -> float:
        """What the way to a station costs at least."""
        return sum(map(self.least, range(len(stop)), self.start, stop))

    def least(self, axis: int, now: int, stop: int) -> float:
        """What an axis costs at least on its way, whatever the others do: its first collective, and little to move.

        A small tensor may be gathered and sliced rather than sharded anew, and reduced whole rather than in shards.
        """
        if now in (stop, WHOLE) or self.sizes[axis] == 1:
            return 0.0
        key = (axis, now, stop)
        found = self._least.get(key)
        if found is None:
            everybody = math.prod(self.sizes)
            before, after = self._least_bytes(everybody), self._least_bytes(everybody // self.sizes[axis])
            found = self.price_between(kind_of(now, WHOLE), axis, before, after)
            if now == PARTS or stop != WHOLE:
                found = min(found, self.price_between(kind_of(now, 0), axis, before, after))
            self._least[key] = found
        return found

    def _least_bytes(self, parts: int) -> int:
        return -(-self._count // parts) * self._width

    def options(self, stop: Station) -> tuple[tuple[int, ...], ...]:
        """What each axis may be on the way: anything on small meshes, since a detour may be cheaper.

        A replicated axis only becomes what the target wants: nothing is sharded for its own sake.
        """
        if self.small:
            return tuple(
                _between(now, wanted) if now == WHOLE else tuple(sorted({WHOLE, *self.wide, max(wanted, WHOLE)}))
                for now, wanted in zip(self.start, stop, strict=True)
            )
        return tuple(
            _between(now, wanted) if now != wanted or self._is_in_the_way(axis, stop) else ()
            for axis, (now, wanted) in enumerate(zip(self.start, stop, strict=True))
        )

    def _is_in_the_way(self, axis: int, stop: Station) -> bool:
        """Whether an axis that is where it should be has to step aside for one further out that shards the same dim.

        Other such axes stay: gathered, they would cost, and make all else more expensive.
        """
        dim = self.start[axis]
        return dim >= 0 and any(
            now != wanted and dim in (now, wanted) for now, wanted in zip(self.start[:axis], stop[:axis], strict=True)
        )


def _between(now: int, wanted: int) -> tuple[int, ...]:
    if wanted == WHOLE:
        return () if now == WHOLE else (WHOLE,)
    return wanted, WHOLE


class Search:
    """Dijkstra's search over what each axis may be; of equal paths it takes that with the fewest steps."""

    __slots__ = ("best", "came", "options", "order", "paths", "queue", "stop")

    def __init__(self, paths: Paths, stop: Station, options: Sequence[tuple[int, ...]]) -> None:
        self.paths, self.stop = paths, stop
        self.options = [(axis, open_to) for axis, open_to in enumerate(options) if open_to]
        self.best: dict[Station, tuple[float, int]] = {paths.start: (0.0, 0)}
        self.came: dict[Station, Station] = {}
        self.order = itertools.count(1)
        self.queue: list[tuple[float, int, int, Station]] = [(0.0, 0, 0, paths.start)]

    def run(self) -> float:
        """The cost of the way, once nothing that is left can change it; infinite if there is none."""
        queue, best, nowhere = self.queue, self.best, (math.inf, 0)
        while queue and queue[0][0] <= best.get(self.stop, nowhere)[0] * (1 + _ROUNDING):
            cost, steps, _, here = heapq.heappop(queue)
            if (cost, steps) == best[here]:
                self._relax(here, cost, steps + 1)
        return best.get(self.stop, nowhere)[0]

    def _relax(self, here: Station, cost: float, steps: int) -> None:
        best = self.best
        for there, edge, _, _, _ in self.edges(here):
            reached, known = (cost + edge, steps), best.get(there)
            if known is None or _is_better(reached, known):
                best[there] = reached
                self.came[there] = here
                heapq.heappush(self.queue, (cost + edge, steps, next(self.order), there))

    def edges(self, here: Station) -> list[tuple[Station, float, int, int, int]]:
        """The changes of one axis that are one collective or none, their price, the axis, what it was and becomes.

        Axes that shard the same dim nest, left first, so only the innermost of them may change.
        """
        paths, held, found = self.paths, self.paths.bytes_at(here), []
        for axis, open_to in self.options:
            now, outer, inner = here[axis], here[:axis], here[axis + 1 :]
            if now >= 0 and now in inner:
                continue
            free = now == WHOLE or paths.sizes[axis] == 1
            for wanted in open_to:
                if wanted != now and (wanted == WHOLE or wanted not in inner):
                    there = (*outer, wanted, *inner)
                    edge = 0.0 if free else paths.price(axis, now, wanted, held, there)
                    found.append((there, edge, axis, now, wanted))
        return found


class Estimate(Search):
    """The same search for a price alone: led by what is left at least (A*), it sees a small part of the stations.

    Of equal paths it may meet another one first, which is why it does not say which. `ways` holds the estimate of the
    whole way, a number that puts the newest first, the cost so far, what is left at least, and the station.
    """

    __slots__ = ("reached", "ways")

    def __init__(self, paths: Paths, stop: Station) -> None:
        super().__init__(paths, stop, paths.options(stop))
        left = paths.bound(stop)
        self.reached = {paths.start: 0.0}
        self.ways: list[tuple[float, int, float, float, Station]] = [(left, 0, 0.0, left, paths.start)]

    def run(self, limit: float = math.inf) -> float:
        """The cost of the way; or, if that is above the limit, something above the limit that it costs at least."""
        while self.ways:
            estimate, _, cost, left, here = heapq.heappop(self.ways)
            if here == self.stop:
                return cost
            if estimate > limit:
                return estimate
            if cost == self.reached[here]:
                self._expand(here, cost, left)
        return math.inf

    def _expand(self, here: Station, cost: float, left: float) -> None:
        least, stop, reached = self.paths.least, self.stop, self.reached
        for there, edge, axis, now, wanted in self.edges(here):
            known = reached.get(there)
            if known is None or cost + edge < known:
                reached[there] = cost + edge
                rest = left - least(axis, now, stop[axis]) + least(axis, wanted, stop[axis])
                heapq.heappush(self.ways, (cost + edge + rest, -next(self.order), cost + edge, rest, there))


def _is_better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    if one[0] == other[0] or math.isclose(one[0], other[0]):
        return one[1] < other[1]
    return one[0] < other[0]
