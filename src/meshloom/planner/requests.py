"""Requests that make several calls together cheaper: where results had better lie than where they do by themselves.

A call is planned for itself: its result is never partial, and nothing is sharded for its own sake. For the calls after
it another result may be worth more: two partial products that are added and reduced once, a result that is scattered
because the next call slices it. `cheapest_requests` looks at all calls together. Price is additive, so going through
them in order and keeping, for each way in which the values that are still needed may lie, the cheapest way to get there
finds the best there is on one axis, as long as no more than `KEPT` ways are open at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshloom.errors import MeshloomError
from meshloom.fabric import VIRTUAL, Machine
from meshloom.mesh import Mesh
from meshloom.ops import Call, find
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology
from meshloom.planner.plan import Plan, plan
from meshloom.planner.pricing import ROUNDING, Request
from meshloom.planner.redistribution import route
from meshloom.types import is_floating

KEPT = 64  # ways in which the values that are needed later may lie
ROUNDS = 3  # times that every mesh axis is looked at, the others as they are
WORTH = 0.02  # the part of the price that leaving out one request may cost: fewer requests are easier to follow

Placements = tuple[Placement, ...]
Value = tuple[int, int]  # the number of a call, and of its result
State = tuple[tuple[Value, Placements], ...]  # where the values lie that are needed later
Way = tuple[float, tuple[Request | None, ...]]  # what it costs to get there, and what is asked on the way


@dataclass(frozen=True, slots=True)
class Step:
    """A call as it was planned; `sources` say of each operand which result of an earlier call it is, None if of none.

    `is_kept` says that somebody may hold the result: it has to lie at the end where it lies by itself.
    """

    plan: Plan
    sources: tuple[Value | None, ...]
    where: str = ""
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A redistribution that the program asks for: of which value, and where it goes."""

    source: Topology
    sources: tuple[Value | None]
    target: Topology


@dataclass(frozen=True, slots=True)
class Change:
    """What to write at one call: the placements to ask for, and where to bring a result back to that somebody may hold.

    Either may be None: nothing is asked, or the result lies where it lay.
    """

    step: int
    op: str
    where: str
    request: Request | None
    result: Topology
    back: Placements | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What a program costs by itself, what it costs with the changes, and the changes."""

    before: float
    after: float
    changes: tuple[Change, ...]


def cheapest_requests(program: Sequence[Step | Move], machine: Machine = VIRTUAL) -> Advice:
    """The requests under which all calls together cost least; none where nothing is cheaper.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.ops import Ref
    >>> mesh = Mesh(tp=8)
    >>> a, b = (Topology(mesh, (Replicate(),), (4096, 4096), "bf16") for _ in range(2))
    >>> alone = plan(Call("matmul", (a, b), {"input": Ref(0), "other": Ref(1)}))
    >>> found = cheapest_requests([Step(alone, (None, None), is_kept=True)])
    >>> found.after < found.before, found.changes[0].request
    (True, (Shard(dim=0),))
    """
    search = _Search(program, machine)
    nothing: list[Request | None] = [None] * len(program)
    before = search.price(nothing)
    best = nothing
    for axis in [*range(max((_mesh_of(step).ndim for step in program), default=0))] * ROUNDS:
        found = search.find(best, axis)
        if search.price(found) < search.price(best):
            best = found
    best = _leave_out(search, best)
    return Advice(before, search.price(best), tuple(search.describe(best)))


def _mesh_of(step: Step | Move) -> Mesh:
    return step.plan.mesh if isinstance(step, Step) else step.source.mesh


def _leave_out(search: _Search, requests: list[Request | None]) -> list[Request | None]:
    """The requests without those that save next to nothing."""
    for number in range(len(requests)):
        without = [None if i == number else each for i, each in enumerate(requests)]
        if requests[number] is not None and search.price(without) <= search.price(requests) * (1 + WORTH):
            requests = without
    return requests


class _Search:
    """The ways through a program, each call planned once for every way in which its operands may lie."""

    def __init__(self, program: Sequence[Step | Move], machine: Machine) -> None:
        self.program, self.machine = program, machine
        self.plans: dict[tuple[int, tuple[Topology, ...], Request], Plan | None] = {}  # equal calls have one plan
        self.last: dict[Value, int] = {
            source: number for number, step in enumerate(program) for source in step.sources if source is not None
        }

    def carry_out(
        self, number: int, held: dict[Value, Placements], request: Request | None
    ) -> tuple[float, tuple[Topology, ...]] | None:
        """What a step costs where the values lie so, and its results; None where the request has no meaning for it."""
        step = self.program[number]
        if isinstance(step, Move):
            source = step.source if step.sources[0] is None else step.source.with_placements(held[step.sources[0]])
            return route(source, step.target.placements, self.machine)[1], (step.target,)
        decided = self._plan(step.plan, self._place(step, held), request or step.plan.request)
        return None if decided is None else (decided.cost + self._return(step, decided), decided.outs)

    def _plan(self, decided: Plan, operands: tuple[Topology, ...], request: Request) -> Plan | None:
        """The plan of a call on these operands; None where the request has no meaning for it."""
        key = id(decided), operands, request
        if key not in self.plans:
            call = decided.call
            try:
                self.plans[key] = plan(replace(call, operands=operands), request, self.machine)
            except MeshloomError:  # not every placement is one that this result can have
                self.plans[key] = None
        return self.plans[key]

    def price(self, requests: Sequence[Request | None]) -> float:
        """What the program costs under these requests."""
        return sum(cost for cost, _ in self._go_through(requests))

    def _go_through(self, requests: Sequence[Request | None]) -> Iterator[tuple[float, tuple[Topology, ...]]]:
        held = dict[Value, Placements]()
        for number, request in enumerate(requests):
            found = self.carry_out(number, held, request)
            assert found is not None
            held.update(_results(number, found[1]))
            yield found

    def find(self, fixed: Sequence[Request | None], axis: int) -> list[Request | None]:
        """The cheapest requests that differ from the fixed ones on one mesh axis."""
        ways: dict[State, Way] = {(): (0.0, ())}
        for number in range(len(self.program)):
            found: dict[State, Way] = {}
            options = [*self._options(number, fixed[number], axis)]
            for state, (cost, before) in ways.items():
                held = dict(state)
                for request in options:
                    done = self.carry_out(number, held, request)
                    if done is None:
                        continue
                    total = cost + done[0]
                    after = self._needed(number, {**held, **_results(number, done[1])})
                    way = total, (*before, request)
                    if after not in found or _is_better(way, found[after]):
                        found[after] = way
            ways = dict(sorted(found.items(), key=lambda way: way[1][0])[:KEPT])
        return [*min(ways.values(), key=lambda way: way[0])[1]]

    def _place(self, step: Step, held: dict[Value, Placements]) -> tuple[Topology, ...]:
        """The operands of a call where the results of earlier ones lie."""
        pairs = zip(step.plan.call.operands, step.sources, strict=True)
        return tuple([each if source is None else each.with_placements(held[source]) for each, source in pairs])

    def _needed(self, number: int, held: dict[Value, Placements]) -> State:
        return tuple((value, placed) for value, placed in held.items() if self.last.get(value, -1) > number)

    def _return(self, step: Step, decided: Plan) -> float:
        """What it costs to bring a result back that somebody may hold."""
        if not step.is_kept:
            return 0.0
        pairs = zip(decided.outs, step.plan.outs, strict=True)
        return sum(route(here, home.placements, self.machine)[1] for here, home in pairs)

    def _options(self, number: int, fixed: Request | None, axis: int) -> Iterator[Request | None]:
        """What may be asked of a call: nothing more than before, or any placement on the axis."""
        yield fixed
        step = self.program[number]
        if isinstance(step, Move):
            return
        given = fixed or step.plan.request
        if axis < len(given) and given[axis] is None and len(step.plan.outs) == 1:
            for each in _placements(step.plan):
                yield given[:axis] + (each,) + given[axis + 1 :]

    def describe(self, requests: Sequence[Request | None]) -> Iterator[Change]:
        """The requests with their calls, and the results that are brought back."""
        for number, (request, (_, results)) in enumerate(zip(requests, self._go_through(requests), strict=True)):
            step = self.program[number]
            if isinstance(step, Step):
                home = step.plan.outs[0].placements
                back = home if step.is_kept and results[0].placements != home else None
                if request is not None or back is not None:
                    yield Change(number, step.plan.call.op, step.where, request, results[0], back)


def _is_better(way: Way, other: Way) -> bool:
    """Whether a way is cheaper; of equal ones that with fewer partial results, which take memory."""
    if abs(way[0] - other[0]) > ROUNDING * other[0]:
        return way[0] < other[0]
    return _count_partial(way[1]) < _count_partial(other[1])


def _count_partial(requests: Sequence[Request | None]) -> int:
    return sum(isinstance(each, Partial) for request in requests if request is not None for each in request)


def _results(number: int, results: Sequence[Topology]) -> dict[Value, Placements]:
    return {(number, i): each.placements for i, each in enumerate(results)}


def _placements(decided: Plan) -> Iterator[Placement]:
    """The placements that the one result of a call can have on an axis."""
    (result,) = decided.outs
    yield Replicate()
    yield from (Shard(dim) for dim, size in enumerate(result.shape) if size > 1)
    if is_floating(result.dtype) and _is_ever_partial(decided.call):
        yield Partial("sum")


def _is_ever_partial(call: Call) -> bool:
    """Whether a row of the op's rule leaves a sum."""
    return any(out == Partial("sum") for row in find(call.op).rule(call).rows for out in row.outs)
