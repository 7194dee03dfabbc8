"""Explain: what a piece of program would do, on shapes alone. It never runs on data and never changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshloom.cost import fastest
from meshloom.errors import ArgumentError
from meshloom.observe.advice import Flow, advise, describe_advice
from meshloom.planner import Advice, Plan, consider
from meshloom.runtime import Event, HostTransfer, Log, state

PAGE = 40  # calls up to which each is printed with its rows; a longer program is one page


@dataclass(frozen=True)
class Explanation:
    """What would run: the planned calls, their collectives, and what backward would add."""

    log: Log
    result: Any = None

    @property
    def events(self) -> list[Event]:
        """The collectives in order, backward included."""
        return self.log.events

    @property
    def bytes(self) -> int:
        """The bytes that one device would receive."""
        return self.log.bytes

    @property
    def transfers(self) -> list[HostTransfer]:
        """What would go between the host and cards with memory of their own, backward included."""
        return self.log.transfers

    @property
    def host_bytes(self) -> int:
        """The bytes that would go through the host."""
        return self.log.host_bytes

    @property
    def plans(self) -> list[Plan]:
        """The plans of the calls that have a rule."""
        return [each for each, _ in self.log.calls if isinstance(each, Plan)]

    @property
    def cost(self) -> float:
        """The price of all calls in seconds, on the machine they were planned for."""
        return sum(each.cost for each in self.plans)

    @cached_property
    def advice(self) -> Advice | None:
        """The requests that make all calls together cheaper by a tenth or more; None where there are none.

        A short program has it in its text; of a hundred calls the search takes some seconds.

        >>> import meshloom as loom
        >>> mesh = loom.open_mesh((4,), axes=("tp",))
        >>> x = loom.empty(1024, 4096, mesh=mesh, placements="S(1)", device="meta")
        >>> w = loom.empty(4096, 1024, mesh=mesh, placements="S(0)", device="meta")
        >>> found = explain(lambda: x @ w + (2 * x) @ w).advice  # reduce once, behind the sum
        >>> [(each.op, str(each.request[0])) for each in found.changes]
        [('matmul', 'P(sum)'), ('matmul', 'P(sum)'), ('add', 'P(sum)')]
        """
        return advise(self.log) if isinstance(self.log, Flow) else None

    @property
    def brief(self) -> str:
        """The text without the rows: a line per call, and what it moves.

        >>> import meshloom as loom
        >>> x = loom.ones(8, 8, mesh=loom.open_mesh((4,), axes=("tp",)), placements="S(1)")
        >>> print(explain(lambda: (x + 1).sum(1)).brief)  # doctest: +ELLIPSIS
        add(f32[8, 8](S(1))) -> f32[8, 8](S(1)) on Mesh(tp=4)  at ...
        sum(f32[8, 8](S(1))) -> f32[8](R) on Mesh(tp=4)  at ...
          moves all_reduce(sum) over tp of 4: 48 B, ... us
        1 collective, 48 B per device
        """
        return self._text(rows=False)

    @property
    def full(self) -> str:
        """The whole text, however long: every call with all its rows."""
        return self._text(rows=True)

    def __str__(self) -> str:
        return self.full if len(self.log.calls) <= PAGE else "\n".join(_page(self))

    def _text(self, rows: bool) -> str:
        lines: list[str] = []
        for each, where in self.log.calls:
            lines += _describe(each, where, rows) if isinstance(each, Plan) else [f"{each}  at {where}"]
        planned = {(each.call.op, where) for each, where in self.log.calls if isinstance(each, Plan)}
        moved = [e for e in self.events if e.phase == "backward" or (e.call, e.where) not in planned]
        if moved:
            lines += ["also:", *(f"  {event}" for event in moved)]
        if self.log.pending:
            lines += ["held back by accumulate:", *(f"  {event}" for event in self.log.pending)]
        if self.transfers:
            lines += ["through the host:", *(f"  {each}" for each in self.transfers)]
        if len(self.log.calls) <= PAGE and self.advice is not None:
            lines += describe_advice(self.advice)
        count = len(self.events)
        return "\n".join([*lines, f"{count} collective{'' if count == 1 else 's'}, {self.bytes} B per device"])


def explain(program: Callable[[], object]) -> Explanation:
    """What a program would do: rows considered, chosen, collectives, bytes, cost, why.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((4,), axes=("tp",))
    >>> x, w = loom.ones(8, 8, mesh=mesh, placements="S(1)"), loom.ones(8, 8, mesh=mesh, placements="S(0)")
    >>> found = explain(lambda: x @ w)
    >>> [str(event.collective) for event in found.events]
    ['all_reduce(sum) over tp of 4: 384 B']
    """
    if not callable(program):
        raise ArgumentError(f"explain takes a program, not {program!r:.80}", fix="explain(lambda: x @ w)")
    import torch

    from meshloom.tensor.known_numbers import KnownNumbers
    from meshloom.tensor.shadow import Shadows, Untouched, optimizers_kept

    log = Flow()
    unseen = {"logs": (log,), "shadows": Shadows(), "policy": None, "waiting": {}}
    with torch.random.fork_rng(devices=[]), Untouched(), KnownNumbers(), optimizers_kept(), state.changed(**unseen):
        result = program()
    return Explanation(log, result)


def _page(found: Explanation) -> Iterator[str]:
    """A long program: the totals, what it moves, and its calls with equal ones folded, the most expensive first."""
    yield f"{len(found.log.calls)} calls, {len(found.events)} collectives, {found.bytes} B per device"
    yield f"{found.cost * 1e3:.3f} ms by the planner's prices, which leave backward's compute out"
    yield from _moved(found.events)
    if found.transfers:
        yield f"{len(found.transfers)} transfers between host and cards, {found.host_bytes} B: found.transfers"
    groups: dict[str, list[float]] = {}
    for each, where in found.log.calls:
        text = next(_describe(each, where, rows=False)) if isinstance(each, Plan) else f"{each}  at {where}"
        groups.setdefault(text, []).append(each.cost if isinstance(each, Plan) else 0.0)
    listed = sorted(groups.items(), key=lambda group: -sum(group[1]))
    for text, costs in listed[:PAGE]:
        yield f"  {sum(costs) * 1e6:11.3f} us {f'x{len(costs)}':>5}  {text}"
    if len(listed) > PAGE:
        yield f"  and {len(listed) - PAGE} more kinds of calls"
    yield "every call: found.brief; with its rows: found.full; what to ask for: found.advice, which takes a while"


def _moved(events: list[Event]) -> Iterator[str]:
    """What moves, by phase, axis and kind."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for event in events:
        totals.setdefault((event.phase, event.axis, event.kind), []).append(event.bytes)
    for (phase, axis, kind), sizes in totals.items():
        yield f"  {phase:<8} {axis:<6} {kind:<14} x{len(sizes):<5} {sum(sizes)} B"


def _describe(plan: Plan, where: str, rows: bool) -> Iterator[str]:
    operands = ", ".join(topology.notation for topology in plan.call.operands)
    results = ", ".join(topology.notation for topology in plan.outs)
    yield f"{plan.call.op}({operands}) -> {results} on {plan.mesh}  at {where}"
    for line in consider(plan) if rows else ():
        mark = "chosen  " if line.chosen else "rejected"
        price = "        -" if line.cost is None else f"{line.cost * 1e6:9.3f}"
        yield f"  {line.axis:>4} {mark} {price} us  {line.row.label:<8} {line.row!s:<28} {line.reason}"
    for collective in plan.forward:
        name, seconds = fastest(collective, plan.machine.on(plan.mesh))
        yield f"  moves {collective}, {name}, {seconds * 1e6:.3f} us"
    if rows and not plan.forward:
        yield "  moves nothing"
