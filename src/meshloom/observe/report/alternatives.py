"""A cheaper way for a call of a step: what the planner would ask for if it looked at the calls around it as well.

A call is planned for itself. Here the calls just before and after it are planned together (`planner.requests`), on the
machine of the dry run. Prices are those of the calls alone, forward and without overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshloom.cost.step import Node
from meshloom.observe.advice import advise_program, describe_change
from meshloom.observe.timing import Prices
from meshloom.placement import Topology
from meshloom.planner import Advice, Plan, Step
from meshloom.planner.requests import Value

if TYPE_CHECKING:
    from meshloom.observe.dry_run import DryRun

# Calls before and after one that are looked at together with it, by the number of mesh axes: each axis multiplies the
# ways in which values may lie. With more axes than three it is the call and the next.
REACH = {0: (3, 8), 1: (3, 8), 2: (3, 8), 3: (2, 4)}
MANY_AXES = (0, 1)

Planned = tuple[Node, Plan]


class Alternatives:
    """The planned calls of a step, and the search around one of them."""

    def __init__(self, run: DryRun) -> None:
        self.storages, self.prices = run.graph.storages, Prices(run.machine)
        plans = {_key_of_plan(each, where): each for each, where in run.log.calls if isinstance(each, Plan)}
        paired = [(node, plans.get(_key(node))) for node in run.nodes if node.phase != "backward"]
        self.planned: list[Planned] = [(node, plan) for node, plan in paired if plan is not None]
        # What redistributions and plain kernels read has to lie where it lies.
        self.fixed = {held for node, plan in paired if plan is None for held in node.reads}
        self.known: dict[int, dict[str, Any] | None] = {}

    def find(self, node: Node) -> dict[str, Any] | None:
        """What to ask for, and the price without and with it; None where nothing cheaper is known.

        For a node of backward it is that of its forward call.
        """
        number = node.number if node.gradient_of is None else node.gradient_of
        if number not in self.known:
            self.known[number] = self._find(number)
        return self.known[number]

    def _find(self, number: int) -> dict[str, Any] | None:
        at = next((i for i, (node, _) in enumerate(self.planned) if node.number == number), None)
        if at is None or not self._is_like(at, at):
            return None
        before, after = REACH.get(self.planned[at][1].mesh.ndim, MANY_AXES)
        first = at - self._reach(at, range(at - 1, max(at - before, 0) - 1, -1))
        end = at + 1 + self._reach(at, range(at + 1, min(at + after + 1, len(self.planned))))
        program = self._follow_values(self.planned[first:end], self.planned[end:])
        found = advise_program(program, self.prices.machine_for(self.planned[at][0].dtype))
        return _describe(found, len(program)) if found is not None and _concerns(found, program, at - first) else None

    def _reach(self, at: int, others: range) -> int:
        """How many calls, one after the other, can be looked at together with one."""
        return len([*itertools.takewhile(lambda other: self._is_like(at, other), others)])

    def _is_like(self, at: int, other: int) -> bool:
        """Whether a call is of the same phase and mesh, and gives a result of its own that may lie anywhere."""
        (here, mine), (there, its) = self.planned[at], self.planned[other]
        return here.phase == there.phase and mine.mesh == its.mesh and not self._is_in_place(there)

    def _is_in_place(self, node: Node) -> bool:
        """Whether kernels write what was there before; a view has no kernels."""
        return bool(node.kernels) and any(self.storages[each].node != node.number for each in node.writes)

    def _follow_values(self, window: Sequence[Planned], later: Sequence[Planned]) -> list[Step]:
        """Calls with their data flow: an operand is the last result of its topology in the storage that it lies in."""
        made: dict[tuple[int, Topology], Value] = {}
        sources: list[tuple[Value | None, ...]] = []
        for number, (node, plan) in enumerate(window):
            sources.append(tuple([made.get(pair) for pair in self._operands(node, plan)]))
            made.update({(held, out): (number, i) for i, out in enumerate(plan.outs) for held in node.writes})
        read = {source for each in sources for source in each}
        wanted = {made.get(pair) for node, plan in later for pair in self._operands(node, plan)}
        return [
            Step(plan, sources[number], node.where, self._is_kept(number, node, plan, read, wanted))
            for number, (node, plan) in enumerate(window)
        ]

    def _is_kept(self, number: int, node: Node, plan: Plan, read: set[Value | None], wanted: set[Value | None]) -> bool:
        """Whether a result is used outside of the calls that are looked at, or by nobody that we know of."""
        values = {(number, i) for i in range(len(plan.outs))}
        return bool(values & wanted or self.fixed.intersection(node.writes)) or not values & read

    def _operands(self, node: Node, plan: Plan) -> Iterator[tuple[int, Topology]]:
        """The storage and the topology of each operand of a call.

        A node reads its operands first, each storage once, and then what its own kernels make: where there are fewer
        storages than operands, the last one is read again (`x * x`).
        """
        given = [each for each in node.reads if self.storages[each].node != node.number]
        last = given[-1:] * len(plan.call.operands)
        return zip(given + last, plan.call.operands, strict=False)


def _concerns(found: Advice, program: Sequence[Step], place: int) -> bool:
    """Whether a change is at the call itself or at one that makes its operands."""
    near = {place, *(source[0] for source in program[place].sources if source is not None)}
    return any(change.step in near for change in found.changes)


def _describe(found: Advice, calls: int) -> dict[str, Any]:
    asks = [line for change in found.changes for line in describe_change(change)]
    return {"calls": calls, "before": found.before, "after": found.after, "asks": asks}


def _key(node: Node) -> tuple[object, ...]:
    return node.op, node.where, node.operands, node.results


def _key_of_plan(plan: Plan, where: str) -> tuple[object, ...]:
    notations = (tuple(each.notation for each in group) for group in (plan.call.operands, plan.outs))
    return plan.call.op, where, *notations
