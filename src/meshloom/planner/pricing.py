"""What a choice of rows costs, and what it costs at least.

The price of a choice is what it takes to bring the operands there, the statistics communicated inside, the compute,
and what it takes to bring the result to the placements that the caller asked for. Its bound is the same sum axis by
axis, as if all other axes left as little to move as they can: it takes no search, and only choices whose bound is
below the best price are priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from meshloom.collectives import KINDS, Collective, price, price_of
from meshloom.fabric import Machine
from meshloom.ops import Call, Choices, Inner, Row, find, result_dtypes
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, reduce_together
from meshloom.planner.paths import Paths, Station, encode
from meshloom.planner.redistribution import paths_from
from meshloom.types import itemsize, numel

Request = tuple[Placement | None, ...]
Rows = tuple[Row, ...]
_Cost = Callable[[Paths, Station], float]
ROUNDING = 1e-9  # prices that differ by less are equal: then the row that stands first is taken
SURVEYED = 16  # choices from which on one search over all of their placements pays


class Pricing:
    """The prices of one call's choices, one row for each mesh axis."""

    def __init__(self, call: Call, choices: Choices, wanted: Request, machine: Machine) -> None:
        self.call, self.choices, self.wanted, self.machine = call, choices, wanted, machine
        self.mesh = call.operands[0].mesh
        self.paths = [paths_from(topology, machine) for topology in call.operands]
        self._size = sum(numel(topology.shape) * itemsize(topology.dtype) for topology in call.operands)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the results."""
        return result_dtypes(find(self.call.op), self.call, len(self.choices.shapes))

    def full(self, rows: Rows) -> float:
        """The price of a choice in seconds, with all that it communicates."""
        moving = sum(_found_cost(paths, self._stop(i, rows)) for i, paths in enumerate(self.paths))
        return moving + self._beside(rows, frozenset(), _found_cost)

    def held_against(self, rows: Rows, limit: float = math.inf) -> float:
        """The price by which a choice is compared: without what the op itself causes where its operands line up.

        Infinite if it is above a limit, which takes less time to find out.
        """
        free = frozenset(axis for axis, row in enumerate(rows) if self.is_free(row, axis))
        beside = self._beside(rows, free)
        stops = [self._stop(i, rows) for i in range(len(self.paths))]
        return beside + self._moving(stops, limit - beside) if beside <= limit else math.inf

    def _moving(self, stops: list[Station], limit: float) -> float:
        """Seconds that bring the operands where the rows want them; infinite if that is above a limit."""
        bounds = [paths.bound(stop) for paths, stop in zip(self.paths, stops, strict=True)]
        cost, left = 0.0, limit - sum(bounds)
        for paths, stop, bound in zip(self.paths, stops, bounds, strict=True):
            each = paths.cost(stop, left + bound)
            cost, left = cost + each, left - (each - bound)
        return cost

    def _stop(self, operand: int, rows: Rows) -> Station:
        now = self.paths[operand].source.placements
        return tuple([encode(row.ins[operand], here) for row, here in zip(rows, now, strict=True)])

    def is_free(self, row: Row, axis: int) -> bool:
        """Whether what the op communicates on an axis is not held against a row."""
        return self.wanted[axis] is None and lines_up(row, self.call, axis)

    def cheapest(self, candidates: Sequence[Rows]) -> Rows | None:
        """The choice with the lowest price; of equal ones that which comes first. None if no choice is possible."""
        bounds = self._bounds(candidates)
        lowest, priced = math.inf, []
        for place in sorted(range(len(bounds)), key=bounds.__getitem__):
            limit = lowest * (1 + ROUNDING)
            if bounds[place] > limit:
                break
            rows = _pick(candidates, place)
            if is_possible(self.call, rows) and (cost := self.held_against(rows, limit)) < math.inf:
                priced.append((place, cost, rows))
                lowest = min(lowest, cost)
        return _first_of_the_lowest(priced)

    def _beside(self, rows: Rows, free: frozenset[int], cost_of: _Cost = Paths.cost) -> float:
        """All but the moves of operands: the statistics inside, the way of the results, the compute."""
        cost = self._compute(math.prod(self._parts(row, axis) for axis, row in enumerate(rows)))
        if any(row.inner for row in rows):
            ins = move(self.call, rows)
            for axis, row in enumerate(rows):
                if axis not in free:
                    cost += sum(price(each, self.machine) for each in statistics(ins, axis, row.inner))
        for i in range(len(self.choices.shapes)):
            cost += self._settling(i, rows, free, cost_of)
        return cost

    def _settling(self, result: int, rows: Rows, free: frozenset[int], cost_of: _Cost) -> float:
        """Seconds that bring a result from where the rows leave it to where it is handed over."""
        left = [row.outs[result] for row in rows]
        start = tuple([settle(each, None) if axis in free else each for axis, each in enumerate(left)])
        stop = tuple([settle(here, asked) for here, asked in zip(start, self.wanted, strict=True)])
        if start == stop:
            return 0.0
        paths = paths_from(Topology(self.mesh, start, self.choices.shapes[result], self.dtypes[result]), self.machine)
        return cost_of(paths, paths.encode(stop))

    def _parts(self, row: Row, axis: int) -> int:
        return 1 if row.label == "none" else self.mesh.shape[axis]

    def _compute(self, parts: int) -> float:
        return self.machine.compute(self.choices.flops / parts, self._size / parts)

    def _bounds(self, candidates: Sequence[Rows]) -> list[float]:
        """What each choice costs at least, in the order of their product."""
        parts, left = [1], [0.0]
        for axis, rows in enumerate(candidates):
            split, owed = [self._parts(row, axis) for row in rows], [self._least_settling(row, axis) for row in rows]
            parts = [before * each for before in parts for each in split]
            left = [before + each for before in left for each in owed]
        compute = {each: self._compute(each) for each in set(parts)}
        found = [compute[each] + owed for each, owed in zip(parts, left, strict=True)]
        for i in range(len(self.paths)):
            found = [before + each for before, each in zip(found, self._least_moves(i, candidates), strict=True)]
        return [each * (1 - ROUNDING) for each in found]

    def _least_moves(self, operand: int, candidates: Sequence[Rows]) -> list[float]:
        paths = self.paths[operand]
        places = zip(candidates, paths.source.placements, strict=True)
        wanted = [[encode(row.ins[operand], now) for row in rows] for rows, now in places]
        if math.prod(map(len, candidates)) < SURVEYED:
            return [paths.bound(stop) for stop in itertools.product(*wanted)]
        known = paths.survey(wanted)
        return [known.get(stop, 0.0) for stop in itertools.product(*wanted)]

    def _least_settling(self, row: Row, axis: int) -> float:
        """What it takes at least to reduce the partial results that a row leaves."""
        if self.mesh.shape[axis] == 1 or self.is_free(row, axis):
            return 0.0
        return sum(self._least_reduction(i, axis) for i, out in enumerate(row.outs) if self._is_reduced(out, axis))

    def _is_reduced(self, out: Placement, axis: int) -> bool:
        return out.__class__ is Partial and out != self.wanted[axis]

    def _least_reduction(self, result: int, axis: int) -> float:
        held = -(-numel(self.choices.shapes[result]) // self.mesh.size) * itemsize(self.dtypes[result])
        devices = self.mesh.shape[axis]
        sizes = {kind: KINDS[kind].size(held, held, devices) for kind in ("all_reduce", "reduce_scatter")}
        return min(price_of(kind, devices, size, self.machine) for kind, size in sizes.items())


def _found_cost(paths: Paths, stop: Station) -> float:
    """The price of the path that will be taken, which the plan asks for as well."""
    return paths.find(stop)[1]


def _pick(candidates: Sequence[Rows], place: int) -> Rows:
    """The choice at a place of the product, whose last axis counts fastest."""
    found = []
    for rows in reversed(candidates):
        place, last = divmod(place, len(rows))
        found.append(rows[last])
    return tuple(found[::-1])


def _first_of_the_lowest(priced: Iterable[tuple[int, float, Rows]]) -> Rows | None:
    best: tuple[float, Rows] | None = None
    for _, cost, rows in sorted(priced, key=lambda each: each[0]):
        if best is None or cost < best[0] * (1 - ROUNDING):
            best = (cost, rows)
    return best and best[1]


def is_possible(call: Call, rows: Sequence[Row]) -> bool:
    """Whether a choice has the even shards that its rows need, and partial axes that can be reduced in any order."""
    mesh = call.operands[0].mesh
    for row in rows:
        for even in row.even:
            shards = math.prod(
                mesh.shape[axis] for axis, other in enumerate(rows) if other.ins[even.operand] == Shard(even.dim)
            )
            if even.units % shards:
                return False
    sides = [*zip(*(row.ins for row in rows), strict=True), *zip(*(row.outs for row in rows), strict=True)]
    return all(reduce_together(placements) for placements in sides)


def move(call: Call, rows: Sequence[Row]) -> tuple[Topology, ...]:
    """The operands where the rows want them."""
    return tuple(
        topology.with_placements(tuple(row.ins[i] for row in rows)) for i, topology in enumerate(call.operands)
    )


def lines_up(row: Row, call: Call, axis: int) -> bool:
    """Whether the operands lie on an axis as a row wants them, or are replicated and only have to be sliced."""
    now = (topology.placements[axis] for topology in call.operands)
    return all(
        not isinstance(want, Partial) and (want == have or isinstance(have, Replicate))
        for want, have in zip(row.ins, now, strict=True)
    )


def statistics(ins: Sequence[Topology], axis: int, inners: Iterable[Inner]) -> list[Collective]:
    """What a row communicates inside, on one axis."""
    devices = ins[0].mesh.shape[axis]
    rounds = {"shift": devices - 1}
    return [_statistic(ins, axis, each) for each in inners for _ in range(rounds.get(each.kind, 1)) if devices > 1]


def _statistic(ins: Sequence[Topology], axis: int, inner: Inner) -> Collective:
    topology = ins[inner.operand]
    shape = tuple(topology.local_shape[dim] for dim in inner.dims)
    held = numel(shape) * inner.times * (itemsize(topology.dtype) + (8 if inner.indexed else 0))
    devices = topology.mesh.shape[axis]
    after = held * devices if inner.kind == "all_gather" else held
    size = KINDS[inner.kind].size(held, after, devices)
    op = inner.op if inner.kind == "all_reduce" else None
    return Collective(inner.kind, topology.mesh.axes[axis], devices, size, topology.dtype, shape, op)


def settle(raw: Placement, wanted: Placement | None) -> Placement:
    """What a result becomes on an axis: what was asked for, else what it is, and R if that is partial."""
    if wanted is not None:
        return wanted
    return Replicate() if isinstance(raw, Partial) else raw
