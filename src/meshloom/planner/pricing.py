"""What a choice of rows costs, and what it costs at least.

The price of a choice is what it takes to bring the operands there, the statistics communicated inside, the compute,
and what it takes to bring the result to the placements that the caller asked for. Its bound is the same sum axis by
axis, as if all other axes left as little to move as they can: it takes no search, and only choices whose bound is
below the best price are priced.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

from meshloom.collectives import KINDS, Collective
from meshloom.cost import load_of, price, price_of
from meshloom.cost.compute import chunk, cut_of
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
MANY = 10.0  # times its latency that a collective takes which is decided by its bytes
SURVEYED = 16  # choices from which on one search over all of their placements pays


class Pricing:
    """The prices of one call's choices, one row for each mesh axis."""

    def __init__(self, call: Call, choices: Choices, wanted: Request, machine: Machine) -> None:
        self.call, self.choices, self.wanted = call, choices, wanted
        self.mesh = call.operands[0].mesh
        self.given, self.machine = machine, machine.on(self.mesh)
        self.paths = [paths_from(topology, machine) for topology in call.operands]

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
        return self._price(rows, frozenset(axis for axis, row in enumerate(rows) if self.is_free(row, axis)), limit)

    def _price(self, rows: Rows, free: frozenset[int], limit: float) -> float:
        beside = self._beside(rows, free)
        stops = [self._stop(i, rows) for i in range(len(self.paths))]
        return beside + self._moving(stops, limit - beside) if beside <= limit else math.inf

    def moves_many_bytes(self, rows: Rows) -> bool:
        """Whether bytes, and not the latency of their steps, decide what the reductions of a choice cost."""
        latency = in_all = 0.0
        for axis, row in enumerate(rows):
            for i, out in enumerate(row.outs):
                devices = self.mesh.shape[axis]
                if devices > 1 and self._is_reduced(out, axis):
                    latency += price_of("all_reduce", devices, 0, self.machine, axis)
                    in_all += price_of("all_reduce", devices, self._reduced_bytes(i, rows, axis), self.machine, axis)
        return in_all > MANY * latency

    def _reduced_bytes(self, result: int, rows: Rows, axis: int) -> int:
        placements = [row.outs[result] for row in rows]
        held = numel(chunk(self.choices.shapes[result], placements, self.mesh.shape)) * itemsize(self.dtypes[result])
        return KINDS["all_reduce"].size(held, held, self.mesh.shape[axis])

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
        return self._lowest(candidates, self.held_against, math.inf)

    def cheapest_in_full(self, candidates: Sequence[Rows], limit: float) -> Rows | None:
        """The choice with the lowest full price, all that the op causes counted; None if none is below a limit."""
        return self._lowest(candidates, lambda rows, most: self._price(rows, frozenset(), most), limit)

    def _lowest(
        self, candidates: Sequence[Rows], price_of: Callable[[Rows, float], float], limit: float
    ) -> Rows | None:
        bounds = self._bounds(candidates)
        lowest, priced = limit, []
        for place in sorted(range(len(bounds)), key=bounds.__getitem__):
            most = lowest * (1 + ROUNDING)
            if bounds[place] > most:
                break
            rows = _pick(candidates, place)
            if is_possible(self.call, rows) and (cost := price_of(rows, most)) < math.inf:
                priced.append((place, cost, rows))
                lowest = min(lowest, cost)
        return _first_of_the_lowest(priced)

    def _beside(self, rows: Rows, free: frozenset[int], cost_of: _Cost = Paths.cost) -> float:
        """All but the moves of operands: the statistics inside, the way of the results, the compute."""
        cost = load_of(self.call, self.choices, rows, self.dtypes).seconds(self.machine)
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
        paths = paths_from(Topology(self.mesh, start, self.choices.shapes[result], self.dtypes[result]), self.given)
        return cost_of(paths, paths.encode(stop))

    def _bounds(self, candidates: Sequence[Rows]) -> list[float]:
        """What each choice costs at least, in the order of their product."""
        found = [0.0]
        for axis, rows in enumerate(candidates):
            owed = [self._least_settling(row, axis) for row in rows]
            found = [before + each for before in found for each in owed]
        parts = [self._least_compute(candidates), *(self._least_moves(i, candidates) for i in range(len(self.paths)))]
        return [sum(each) * (1 - ROUNDING) for each in zip(found, *parts, strict=True)]

    def _least_compute(self, candidates: Sequence[Rows]) -> list[float]:
        """What a device computes at least: as if every sharded dim were divided evenly."""
        if find(self.call.op).view:
            return [0.0] * math.prod(map(len, candidates))
        flops = self._divide(self.choices.flops, candidates, lambda row: cut_of(row) is not None)
        traffic = [0.0] * len(flops)
        for size, is_sharded in self._tensors():
            traffic = list(map(operator.add, traffic, self._divide(size, candidates, is_sharded)))
        return list(map(self.machine.compute, flops, traffic))

    def _tensors(self) -> Iterator[tuple[int, Callable[[Row], bool]]]:
        """The bytes of every operand and result, and what tells whether a row shards it."""
        for i, topology in enumerate(self.call.operands):
            yield numel(topology.shape) * itemsize(topology.dtype), partial(_is_sharded, i)
        for i, shape in enumerate(self.choices.shapes):
            yield numel(shape) * itemsize(self.dtypes[i]), partial(_is_sharded, ~i)

    def _divide(self, whole: float, candidates: Sequence[Rows], is_cut: Callable[[Row], bool]) -> list[float]:
        """A figure over the devices of the axes on which a row cuts it, for each choice."""
        found = [float(whole)]
        for devices, rows in zip(self.mesh.shape, candidates, strict=True):
            parts = [devices if is_cut(row) else 1 for row in rows]
            found = [before / each for before in found for each in parts]
        return found

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
        return min(price_of(kind, devices, size, self.machine, axis) for kind, size in sizes.items())


def _is_sharded(place: int, row: Row) -> bool:
    """Whether a row shards an operand, or a result, which is told as ~number."""
    placement = row.ins[place] if place >= 0 else row.outs[~place]
    return placement.__class__ is Shard


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
            cut = Shard(even.dim)
            if not even.holds([mesh.shape[axis] for axis, other in enumerate(rows) if other.ins[even.operand] == cut]):
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
