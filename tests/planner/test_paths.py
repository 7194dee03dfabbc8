"""Searches over placements as numbers find what a plain search over topologies finds, and bounds are below prices."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time

import pytest

from meshloom import Machine, Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.collectives import Collective
from meshloom.cost import price
from meshloom.fabric import VIRTUAL, preset
from meshloom.ops import Call, Ref, Row
from meshloom.planner import paths, plan, route, stations
from meshloom.planner.paths import SMALL, Paths
from meshloom.planner.pricing import Pricing, is_possible
from meshloom.planner.redistribution import collective, paths_from

MACHINES = (
    VIRTUAL,
    Machine("slow", latency=1e-4, bandwidth=1e9, flops=1e12, memory_bandwidth=1e11),
    Machine("wide", latency=1e-9, bandwidth=1e8, flops=1e10, memory_bandwidth=1e11),
    preset("galaxy4").machine(),
    preset("nvlink8x16").machine(),
)
Placements = tuple[Placement, ...]


# the plain search: every station is a topology, every edge a collective, every option is tried


def _plain_options(source: Topology, stop: Placements) -> list[tuple[Placement, ...]]:
    wide = [Shard(dim) for dim, size in enumerate(source.shape) if size > 1]
    small = (1 + len(wide)) ** source.mesh.ndim <= SMALL
    shards = [Shard(dim) for dim in range(source.ndim)]
    return [
        (Replicate(), *(each for each in shards if each in wide or each == wanted))
        if small and now != Replicate()
        else tuple(dict.fromkeys((wanted, Replicate())))
        for now, wanted in zip(source.placements, stop, strict=True)
    ]


def _plain_edges(here: Placements, options: list[tuple[Placement, ...]]) -> list[tuple[int, Placement]]:
    found = []
    for axis, (now, open_to) in enumerate(zip(here, options, strict=True)):
        later = {each for each in here[axis + 1 :] if isinstance(each, Shard)}
        for wanted in open_to:
            allowed = now == Replicate() or not isinstance(wanted, Partial)
            if wanted != now and allowed and not later & {now, wanted}:
                found.append((axis, wanted))
    return found


def search_plainly(source: Topology, target: Placements, machine: Machine) -> tuple[list[Collective], float]:
    """Dijkstra over topologies to the very end; of equal paths that with the fewest steps, then the first found."""
    pairs = zip(source.placements, target, strict=True)
    stop = tuple(Replicate() if isinstance(wanted, Partial) and wanted != now else wanted for now, wanted in pairs)
    options, machine = _plain_options(source, stop), machine.on(source.mesh)
    best, came, order = {source.placements: (0.0, 0)}, {}, itertools.count()
    queue = [(0.0, 0, next(order), source.placements)]
    while queue:
        cost, steps, _, here = heapq.heappop(queue)
        if (cost, steps) != best[here]:
            continue
        for axis, wanted in _plain_edges(here, options):
            there = here[:axis] + (wanted,) + here[axis + 1 :]
            edge = collective(source.with_placements(here), source.with_placements(there), axis)
            new, old = (cost + (price(edge, machine) if edge else 0.0), steps + 1), best.get(there, (math.inf, 0))
            if new[1] < old[1] if math.isclose(new[0], old[0]) else new < old:
                best[there], came[there] = new, (here, edge)
                heapq.heappush(queue, (*new, next(order), there))
    found, here = [], stop
    while here in came:
        here, edge = came[here]
        found.append(edge)
    return [edge for edge in found[::-1] if edge is not None], best[stop][0]


def draw_mesh(draw: random.Random) -> Mesh:
    names = "abcde"[: draw.choice((1, 2, 3, 3, 4, 4, 5))]
    return Mesh(**{name: draw.choice((1, 2, 2, 3, 4, 8)) for name in names})


def draw_placements(draw: random.Random, mesh: Mesh, ndim: int) -> Placements:
    op = draw.choice(("sum", "max"))
    kinds = [Replicate(), Partial(op), *(Shard(dim) for dim in range(ndim) for _ in range(2))]
    return tuple(draw.choice(kinds) for _ in mesh.axes)


def draw_topology(draw: random.Random, mesh: Mesh, ndim: int) -> Topology:
    shape = tuple(draw.choice((1, 3, 7, 8, 10, 64, 1000)) for _ in range(ndim))
    return Topology(mesh, draw_placements(draw, mesh, ndim), shape, "f32")


@pytest.mark.parametrize("seed", range(4))
def test_a_route_is_that_of_a_plain_search(seed):
    draw = random.Random(seed)
    for _ in range(60):
        source = draw_topology(draw, draw_mesh(draw), draw.choice((1, 2, 2, 3)))
        target, machine = draw_placements(draw, source.mesh, source.ndim), draw.choice(MACHINES)
        steps, cost = search_plainly(source, target, machine)
        assert list(route(source, target, machine)[0]) == steps, (str(source), target)
        assert route(source, target, machine)[1] == cost
        way = stations(source, target, machine)
        assert (way[0], way[-1]) == (source.placements, target)
        assert all(sum(a != b for a, b in zip(*pair, strict=True)) == 1 for pair in itertools.pairwise(way))


@pytest.mark.parametrize("seed", range(4))
def test_an_estimate_is_the_price_and_bounds_are_below_it(seed):
    draw = random.Random(seed)
    for _ in range(40):
        source = draw_topology(draw, draw_mesh(draw), draw.choice((1, 2, 3)))
        open_to = [sorted({now, -1, draw.randrange(source.ndim)}) for now in Paths(source, VIRTUAL).start]
        found = Paths(source, draw.choice(MACHINES))
        known = found.survey(open_to)
        for stop in draw.sample(list(itertools.product(*open_to)), 2):
            cost = found.find(stop)[1]
            assert math.isclose(found.cost(stop), cost, rel_tol=1e-8, abs_tol=1e-18)
            assert found.bound(stop) <= cost * (1 + 1e-9)
            assert known[stop] <= cost * (1 + 1e-9)


def test_a_price_above_the_limit_is_infinite_until_the_limit_is_raised():
    source = Topology(Mesh(a=2, b=4), (Shard(0), Shard(1)), (64, 64), "f32")
    found = Paths(source, VIRTUAL)
    cost = found.find((-1, -1))[1]
    assert found.cost((-1, -1), cost / 2) == found.cost((-1, -1), cost / 3) == math.inf
    assert found.cost((-1, -1), cost * 2) == found.cost((-1, -1)) == pytest.approx(cost)
    assert found.cost((-1, -1), cost / 2) == math.inf


def test_prices_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(paths, "_KEPT", 8)
    prices = paths.prices_on(MACHINES[1])
    prices.clear()
    for size in range(1, 30):
        Paths(Topology(Mesh(a=2), (Shard(0),), (size,), "f32"), MACHINES[1]).cost((-1,))
        assert 0 < len(prices) <= 8


def test_a_dim_of_one_makes_no_redistribution_more_expensive():
    mesh, draw = Mesh(a=4, b=4, c=4), random.Random(5)
    places = [Replicate(), *(Shard(dim) for dim in range(3))]
    pairs = [tuple(tuple(draw.choice(places) for _ in range(3)) for _ in range(2)) for _ in range(150)]
    worse, found = [], 0
    for source, target in pairs:
        plain, with_one = (
            route(Topology(mesh, source, shape, "f32"), target, VIRTUAL)[1] for shape in ((64, 64, 64), (64, 64, 64, 1))
        )
        found += plain > 0
        worse += [(source, target)] if with_one > plain * (1 + 1e-9) else []
    assert found > 100 and not worse


# plans


def decide_plainly(call: Call, machine: Machine) -> tuple[object, ...]:
    """Price every product of the rows that are considered; the first of the cheapest."""
    module = plan.__globals__
    choices = module["find"](call.op).rule(call)
    axes = range(call.operands[0].mesh.ndim)
    candidates = [module["_candidates"](call, choices, axis, None, {}) for axis in axes]
    pricing = Pricing(call, choices, (None,) * len(axes), machine)
    if math.prod(map(len, candidates)) > module["SEARCHED"]:
        candidates = module["_axis_by_axis"](pricing, candidates)
    best = (math.inf, ())
    for rows in itertools.product(*candidates):
        if is_possible(call, rows) and (cost := pricing.held_against(rows)) < best[0] * (1 - 1e-9):
            best = (cost, rows)
    return reconsider_plainly(pricing, best[1], candidates)


def reconsider_plainly(pricing: Pricing, rows: tuple[Row, ...], candidates: list[tuple[Row, ...]]) -> tuple[Row, ...]:
    """Price in full every product of all rows on the axes that are reduced; the first that costs less than half."""
    module, axes = plan.__globals__, range(len(rows))
    reduced = [axis for axis in axes if module["_is_reduced"](pricing, rows[axis], axis)]
    if not reduced or not pricing.moves_many_bytes(rows):
        return rows
    wide = [module["_all_rows"](pricing, axis) if axis in reduced else (rows[axis],) for axis in axes]
    if math.prod(map(len, wide)) > module["SEARCHED"]:
        wide = [candidates[axis] if axis in reduced else (rows[axis],) for axis in axes]
    best = (pricing.full(rows) / 2, rows)
    for each in itertools.product(*wide):
        if is_possible(pricing.call, each) and (cost := pricing.full(each)) < best[0] * (1 - 1e-9):
            best = (cost, each)
    return best[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_has_the_rows_of_the_cheapest_product(seed):
    draw = random.Random(seed)
    for _ in range(15):
        mesh, size = draw_mesh(draw), draw.choice((7, 8, 64, 1000))
        operands = tuple(Topology(mesh, draw_placements(draw, mesh, 2), (size, size), "f32") for _ in range(2))
        arguments = {"input": Ref(0), "other": Ref(1)}
        machine = draw.choice(MACHINES)
        for call in (Call("matmul", operands, arguments), Call("add", operands, {}, (Ref(0), Ref(1)))):
            assert plan(call, None, machine).rows == decide_plainly(call, machine), operands


def test_the_work_of_a_first_plan_grows_with_axes_and_not_with_their_size():
    def count(size: int) -> int:
        mesh = Mesh(a=size, b=size, c=size)
        source = Topology(mesh, (Shard(0), Shard(1), Shard(0)), (4096, 4096), "f32")
        return len(paths_from(source, VIRTUAL).survey([(-1, 0, 1)] * 3))

    assert count(2) == count(64) == 27


def test_a_plan_on_five_axes_takes_milliseconds():
    mesh = Mesh(a=2, b=2, c=2, d=2, e=2)
    placed = ("S(0), S(1), S(0), S(1), S(0)", "S(1), S(0), S(1), S(0), S(1)")
    a, b = (loom_placements(mesh, text) for text in placed)
    begun = time.process_time()
    plan(Call("add", (a, b), {}, (Ref(0), Ref(1))))
    assert time.process_time() - begun < 0.2  # ten times the goal, for a slow machine; a plain search took 0.8


def loom_placements(mesh: Mesh, text: str) -> Topology:
    kinds = {"S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate()}
    return Topology(mesh, tuple(kinds[each] for each in text.split(", ")), (64, 64), "f32")
