"""What an explained program could ask for: where results had better lie, and what that saves.

A `Flow` is a log that also knows which result of which call an operand is. `planner.requests` does the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.context import Log
from meshloom.fabric import Machine
from meshloom.placement import Placement, Topology, spell
from meshloom.planner import Advice, Change, Move, Plan, Step, cheapest_requests
from meshloom.planner.requests import Value

LEAST = 0.1  # the part of the price that is worth a line,
STEPS = 10  # if it is more than so many latencies: bytes decide, not how many steps a small collective takes


class Flow(Log):
    """A log whose calls know where their operands come from."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Plan | tuple[Topology, Topology], tuple[Value | None, ...], str]] = []
        self._arrays: dict[int, Any] = {}  # all that was seen, so that no other array gets its number
        self._made: dict[int, Value] = {}
        self._written: set[Value | None] = set()  # results that were written in place later: they stay where they lie
        self._sources: tuple[Value | None, ...] = ()

    def begin_call(self, call: object, where: str, tensors: Sequence[Any]) -> None:
        """A planned call is about to run: its operands are what earlier calls gave, or come from outside."""
        arrays = [tensor._data for tensor in tensors]
        self._arrays.update((id(each), each) for each in arrays)
        self._sources = tuple([self._made.get(id(each)) for each in arrays])

    def end_call(self, results: Sequence[Any]) -> None:
        """The call has run and given these arrays; one that was there before was written in place."""
        decided, where = self.calls[-1]
        self._note(decided, where, results)

    def note_move(self, tensor: Any, target: Any, data: Any) -> None:
        """The program has redistributed a tensor."""
        self.begin_call(None, "", [tensor])
        self._note((tensor.topology, target), "", [data])

    def _note(self, made: Plan | tuple[Topology, Topology], where: str, results: Sequence[Any]) -> None:
        for i, array in enumerate(results):
            if id(array) in self._arrays:
                self._written.add(self._made.pop(id(array), None))
            else:
                self._arrays[id(array)], self._made[id(array)] = array, (len(self._steps), i)
        self._steps.append((made, self._sources, where))

    @property
    def program(self) -> list[Step | Move]:
        """The calls and redistributions with their data flow. What nothing reads later, somebody may hold."""
        flow = [tuple([None if each in self._written else each for each in sources]) for _, sources, _ in self._steps]
        read = {source for sources in flow for source in sources}
        found: list[Step | Move] = []
        for number, ((made, _, where), sources) in enumerate(zip(self._steps, flow, strict=True)):
            if isinstance(made, Plan):
                is_kept = not any((number, i) in read for i in range(len(made.outs)))
                found.append(Step(made, sources, where, is_kept))
            else:
                found.append(Move(made[0], (sources[0],), made[1]))
        return found


def advise(flow: Flow) -> Advice | None:
    """The requests that make the program cheaper by a tenth or more; None where there are none."""
    program = flow.program
    machine = next((step.plan.machine for step in program if isinstance(step, Step)), None)
    return None if machine is None else advise_program(program, machine)


def advise_program(program: Sequence[Step | Move], machine: Machine) -> Advice | None:
    """The same for calls with their data flow, on a machine."""
    found = cheapest_requests(program, machine)
    return found if found.before - found.after >= max(LEAST * found.before, STEPS * machine.latency) else None


def describe_advice(found: Advice) -> list[str]:
    """Advice as lines of text."""
    saved = 1 - found.after / found.before
    head = f"cheaper by {saved:.0%}: {found.after * 1e6:.3f} us instead of {found.before * 1e6:.3f} us, if you ask for"
    return [head, *(f"  {line}" for change in found.changes for line in describe_change(change))]


def describe_change(change: Change) -> list[str]:
    """What to write at a call, and where to bring its result back to."""
    lines = []
    place = f"{change.op} at {change.where}"
    if change.request is not None:
        lines.append(f"{place}: output={_spell_request(change)}")
    if change.back is not None:
        lines.append(f"{place}: .redistribute({spell(change.back)[1:-1]!r}) of its result")
    return lines


def _spell_request(change: Change) -> str:
    asked: dict[str, Placement] = {
        axis: each for axis, each in zip(change.result.mesh.axes, change.request or (), strict=True) if each is not None
    }
    return "{" + ", ".join(f"{axis!r}: {str(each)!r}" for axis, each in asked.items()) + "}"
