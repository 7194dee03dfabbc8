"""Requests for several calls together: as good as the best that an exhaustive search over rows and placements finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest

from meshloom import Machine, Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.cost import load_of, price
from meshloom.fabric import preset
from meshloom.ops import Call, Ref, Row, find, holds
from meshloom.planner import Move, Step, cheapest_requests, plan, route
from meshloom.planner.pricing import is_possible, statistics
from meshloom.planner.requests import Value

GALAXY = preset("galaxy").machine("bf16")
MESH = Mesh(tp=8)
R = (Replicate(),)


@dataclass(frozen=True)
class Held:
    """A tensor of a program: where it lies, and the call that made it."""

    topology: Topology
    value: Value | None = None


@dataclass
class Program:
    """Calls in order, as they are planned one by one."""

    machine: Machine = GALAXY
    steps: list[Step | Move] = field(default_factory=list)

    def given(self, text: str, *shape: int) -> Held:
        placement: dict[str, Placement] = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1)}
        return Held(Topology(MESH, (placement[text],), shape, "bf16"))

    def call(self, op: str, *operands: Held, is_kept: bool = False, **arguments: Any) -> Held:
        call = Call(op, tuple(each.topology for each in operands), *ARGUMENTS[op](arguments))
        decided = plan(call, None, self.machine)
        self.steps.append(Step(decided, tuple(each.value for each in operands), f"line {len(self.steps)}", is_kept))
        return Held(decided.outs[0], (len(self.steps) - 1, 0))

    def move(self, text: str, held: Held) -> Held:
        target = held.topology.with_placements(self.given(text, *held.topology.shape).topology.placements)
        self.steps.append(Move(held.topology, (held.value,), target))
        return Held(target, (len(self.steps) - 1, 0))

    @property
    def price(self) -> float:
        """What it costs as it was planned."""
        moves = (step for step in self.steps if isinstance(step, Move))
        routes = sum(route(each.source, each.target.placements, self.machine)[1] for each in moves)
        return routes + sum(step.plan.cost for step in self.steps if isinstance(step, Step))


ARGUMENTS: dict[str, Any] = {
    "matmul": lambda more: ({"input": Ref(0), "other": Ref(1)}, ()),
    "add": lambda more: ({}, (Ref(0), Ref(1))),
    "mul": lambda more: ({}, (Ref(0), Ref(1))),
    "sum": lambda more: ({"input": Ref(0), "dim": 0, "keepdim": False, "dtype": None}, ()),
    "softmax": lambda more: ({"input": Ref(0), "dim": -1, "dtype": None}, ()),
}


def squares_without_a_shard() -> Program:
    found = Program()
    x, *weights = (found.given("R", 8192, 8192) for _ in range(4))
    for number, each in enumerate(weights):
        x = found.call("matmul", x, each, is_kept=number == 2)
    return found


def a_sharded_batch_and_one_sharded_weight() -> Program:
    found = Program()
    x, w1 = found.given("S(0)", 2048, 2048), found.given("S(1)", 2048, 8192)
    for number, each in enumerate([w1, found.given("R", 8192, 2048), found.given("R", 2048, 8192)]):
        x = found.call("matmul", x, each, is_kept=number == 2)
    return found


def two_row_parallel_products_added() -> Program:
    found = Program()
    products = [
        found.call("matmul", found.given("S(1)", 4096, inner), found.given("S(0)", inner, 4096))
        for inner in (4096, 16384)
    ]
    found.call("add", *products, is_kept=True)
    return found


def sequence_parallel() -> Program:
    found = Program()
    rows = found.call("matmul", found.given("S(1)", 8192, 8192), found.given("S(0)", 8192, 8192))
    residual = found.call("add", rows, found.given("R", 8192, 8192))
    normed = found.call("softmax", residual)
    scaled = found.call("mul", normed, found.given("R", 8192))
    found.call("matmul", scaled, found.given("S(1)", 8192, 8192), is_kept=True)
    return found


def experts_and_their_sum() -> Program:
    """Experts over the devices, each on all tokens; the sum over experts, then a residual, softmax and columns."""
    found = Program()
    tokens = found.given("R", 4096, 4096)
    each = found.call("matmul", tokens, found.given("S(0)", 8, 4096, 4096))
    gated = found.call("mul", each, found.given("S(0)", 8, 4096, 1))
    residual = found.call("add", found.call("sum", gated), tokens)
    found.call("matmul", found.call("softmax", residual), found.given("S(1)", 4096, 8192), is_kept=True)
    return found


def the_gradient_of_a_weight_that_is_sharded() -> Program:
    found = Program()
    gradient = found.call("matmul", found.given("S(1)", 4096, 32768), found.given("S(0)", 32768, 4096))
    found.move("S(0)", gradient)
    return found


PROGRAMS = [
    experts_and_their_sum,
    the_gradient_of_a_weight_that_is_sharded,
    squares_without_a_shard,
    a_sharded_batch_and_one_sharded_weight,
    two_row_parallel_products_added,
    sequence_parallel,
]


def search(program: Program, limit: int | None = None) -> float:
    """The lowest price over every row of every call and every placement of every result, kept ones where they were.

    It asks the op table for rows and the cost of one row at a time, and does not plan. `limit` leaves placements out.
    """
    steps, machine = program.steps, program.machine

    @lru_cache(None)
    def rest(number: int, held: tuple[tuple[Value, Placement], ...]) -> float:
        if number == len(steps):
            return 0.0
        step, lies = steps[number], dict(held)
        if isinstance(step, Move):
            assert step.sources[0] is not None
            source = step.source.with_placements((lies[step.sources[0]],))
            return route(source, step.target.placements, machine)[1] + rest(number + 1, ())
        operands = tuple(
            topology if source is None else topology.with_placements((lies[source],))
            for topology, source in zip(step.plan.call.operands, step.sources, strict=True)
        )
        call = replace(step.plan.call, operands=operands)
        best = float("inf")
        for cost, result in carry_out(call, machine, limit):
            if step.is_kept:
                cost += route(result, step.plan.outs[0].placements, machine)[1]
            after = {**lies, (number, 0): result.placements[0]}
            needed = {source for later in steps[number + 1 :] for source in later.sources}
            kept = tuple(sorted(((v, p) for v, p in after.items() if v in needed), key=str))
            best = min(best, cost + rest(number + 1, kept))
        return best

    return rest(0, ())


def carry_out(call: Call, machine: Machine, limit: int | None) -> Iterator[tuple[float, Topology]]:
    """Every row with every placement that its result may be brought to, and what that costs."""
    choices = find(call.op).rule(call)
    for row in choices.rows:
        if not (holds(find(call.op), call, row) and is_possible(call, (row,))):
            continue
        raw = Topology(MESH, row.outs[:1], choices.shapes[0], "bf16")
        moved = sum(
            route(each, (want,), machine)[1] for each, want in zip(call.operands, row.ins, strict=True) if want != each
        )
        cost = moved + inside(call, row, machine) + load_of(call, choices, (row,), ["bf16"]).seconds(machine)
        shards: list[Placement] = [Shard(dim) for dim in range(len(raw.shape))]
        for placement in [Replicate(), *shards, Partial("sum")][:limit]:
            if not isinstance(placement, Partial) or raw.placements[0] == placement:
                there = raw.with_placements((placement,))
                yield cost + route(raw, there.placements, machine)[1], there


def inside(call: Call, row: Row, machine: Machine) -> float:
    ins = [each.with_placements((want,)) for each, want in zip(call.operands, row.ins, strict=True)]
    return sum(price(each, machine) for each in statistics(ins, 0, row.inner))


@pytest.mark.parametrize("make", PROGRAMS)
def test_the_requests_come_within_a_tenth_of_the_best_there_is(make: Any) -> None:
    program = make()
    best, advice = search(program), cheapest_requests(program.steps, GALAXY)
    assert advice.before == pytest.approx(program.price)
    assert advice.changes
    assert best * (1 - 1e-9) <= advice.after <= 1.1 * best < advice.before


def test_an_exhaustive_search_that_leaves_placements_out_finds_less() -> None:
    program = squares_without_a_shard()
    assert search(program, limit=1) > 1.2 * search(program)


@pytest.mark.parametrize("make", PROGRAMS)
def test_planning_each_call_with_its_request_costs_what_was_said(make: Any) -> None:
    program = make()
    advice = cheapest_requests(program.steps, GALAXY)
    asked = {each.step: each for each in advice.changes}
    lies: dict[Value, Topology] = {}
    total = 0.0
    for number, step in enumerate(program.steps):
        if isinstance(step, Move):
            assert step.sources[0] is not None
            total += route(lies[step.sources[0]], step.target.placements, GALAXY)[1]
            continue
        operands = tuple(
            topology if source is None else lies[source]
            for topology, source in zip(step.plan.call.operands, step.sources, strict=True)
        )
        request = asked[number].request if number in asked else None
        decided = plan(replace(step.plan.call, operands=operands), request, GALAXY)
        lies[number, 0] = decided.outs[0]
        total += decided.cost
        if number in asked:
            assert asked[number].result == decided.outs[0]
            if asked[number].back is not None:
                total += route(decided.outs[0], asked[number].back, GALAXY)[1]
    assert total == pytest.approx(advice.after)


def test_two_partial_products_are_asked_to_stay_partial_until_they_are_added() -> None:
    advice = cheapest_requests(two_row_parallel_products_added().steps, GALAXY)
    assert [(each.op, each.request) for each in advice.changes[:2]] == [("matmul", (Partial("sum"),))] * 2


def test_a_request_of_the_program_stays() -> None:
    x, w = (Topology(MESH, R, (8192, 8192), "bf16") for _ in range(2))
    call = Call("matmul", (x, w), {"input": Ref(0), "other": Ref(1)})
    step = Step(plan(call, R, GALAXY), (None, None), is_kept=True)
    assert cheapest_requests([step], GALAXY).changes == ()


def test_a_program_that_is_as_good_as_it_can_be_gets_no_advice() -> None:
    program = Program()
    columns = program.call("matmul", program.given("R", 4096, 4096), program.given("S(1)", 4096, 16384))
    program.call("matmul", columns, program.given("S(0)", 16384, 4096), is_kept=True)
    advice = cheapest_requests(program.steps, GALAXY)
    assert advice.changes == () and advice.before == advice.after == pytest.approx(search(program), rel=0.1)


def test_no_calls_cost_nothing() -> None:
    assert cheapest_requests([]).after == 0.0
