"""The dispatcher's log: every call with the plan that was chosen for it, its collectives, bytes and line.

What goes between the client and its workers is in it too: `broadcast` and `scatter` of data to them, `gather` of values
from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshloom.collectives import Collective

TRANSFERS = ("broadcast", "scatter", "gather")


@dataclass(frozen=True, slots=True)
class Line:
    """One call, or one transfer between the client and its workers.

    `plan` is the row that each mesh axis takes, with the placements; `bytes` what one device receives, of a transfer
    what the tensor has.
    """

    number: int
    call: str
    where: str
    plan: tuple[str, ...]
    collectives: tuple[Collective, ...]
    bytes: int

    @property
    def is_transfer(self) -> bool:
        """Whether data went between the client and its workers."""
        return self.call in TRANSFERS and not self.plan

    def __str__(self) -> str:
        parts = [f"{self.number:>6}  {self.call:<14} {self.where:<18}"]
        parts += [*self.plan, *(str(each) for each in self.collectives)]
        if self.is_transfer:
            parts.append(f"{self.bytes} B")
        return "  ".join(parts).rstrip()


class DispatcherLog:
    """The last calls of a client, in order."""

    def __init__(self, kept: Iterable[Any]) -> None:
        self.lines = tuple(_line(each) for each in kept)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, place: int) -> Line:
        return self.lines[place]

    def of(self, call: str) -> list[Line]:
        """The lines of one call, or of one kind of transfer."""
        return [each for each in self.lines if each.call == call]

    def kinds(self) -> Counter[str]:
        """How often each collective and each transfer took place."""
        found = Counter(each.kind for line in self.lines for each in line.collectives)
        return found + Counter(line.call for line in self.lines if line.is_transfer)

    def bytes_of(self, kind: str) -> int:
        """The bytes of one kind of collective or transfer."""
        moved = sum(each.bytes for line in self.lines for each in line.collectives if each.kind == kind)
        return moved + sum(line.bytes for line in self.lines if line.is_transfer and line.call == kind)

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self.lines)


def _line(kept: tuple[int, str, str, Any, int]) -> Line:
    number, name, where, outcome, size = kept
    call = _NAMES.get(bare := name.rpartition(":")[2].rpartition(".")[2], bare)
    if outcome is None:
        return Line(number, call, where, (), (), size)
    moved = tuple(each.collective for each in outcome.events)
    plans = tuple(describe(each) for each, _ in outcome.plans)
    return Line(number, call, where, plans, moved, sum(each.bytes for each in moved))


# operators under the names of their ops
_NAMES = {"__matmul__": "matmul", "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div"}


def describe(plan: Any) -> str:
    """A plan in one line: what comes in, which row each axis takes, what comes out.

    >>> describe("sort")
    'sort: fallback, operands gathered'
    """
    if not hasattr(plan, "rows"):
        return f"{plan}: fallback, operands gathered"
    ins = ", ".join(each.notation for each in plan.call.operands)
    outs = ", ".join(each.notation for each in plan.outs)
    rows = ", ".join(f"{axis} takes {row.label}" for axis, row in zip(plan.mesh.axes, plan.rows, strict=True))
    return f"{plan.call.op}: {ins} -> {outs} ({rows})"
