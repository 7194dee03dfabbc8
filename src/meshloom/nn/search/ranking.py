"""What a search has found: plans in the order of their time, what each costs, and why it is not the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar, overload

from torch import nn

from meshloom.mesh import Mesh
from meshloom.nn.parallelize import parallelize
from meshloom.nn.plan import Plan
from meshloom.observe.dry_run import DryRun, show_seconds
from meshloom.observe.memory_use import show_bytes
from meshloom.observe.report import write_report
from meshloom.tensor.creation import open_mesh

_Module = TypeVar("_Module", bound=nn.Module)
SHOWN = 3  # reasons that one line names,
LEAST = 0.005  # if they are more than so much of the time


@dataclass(frozen=True)
class Candidate:
    """A plan with its mesh, and the dry run of the whole step."""

    title: str  # the name of a plan, or what was chosen
    mesh: Mesh
    plan: Plan
    run: DryRun
    why: str = ""  # why it is slower than the first, in the parts of its time

    @property
    def time(self) -> float:
        """Seconds of the step."""
        return self.run.time

    @property
    def memory(self) -> int:
        """The most bytes that one device holds."""
        return self.run.memory.peak

    @property
    def bytes(self) -> int:
        """The bytes that one device receives."""
        return self.run.bytes

    def apply(self, module: _Module, **options: Any) -> _Module:
        """Open the mesh and put a model on it by the plan; options are those of `parallelize`."""
        return parallelize(module, open_mesh(self.mesh.shape, self.mesh.axes), self.plan, **options)

    def __str__(self) -> str:
        head = f"{show_seconds(self.time)}, {show_bytes(self.memory)}, receives {show_bytes(self.bytes)}"
        return f"{head}: {self.title} on {self.mesh}"


@dataclass(frozen=True)
class Ranking(Sequence[Candidate]):
    """Plans that fit, the fastest first; `print` shows them as a table."""

    candidates: tuple[Candidate, ...]
    tried: int  # how many plans were priced
    refused: tuple[str, ...] = ()  # what could not be tried, and why

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """The plan of the fastest."""
        return self.best.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the fastest."""
        return self.best.mesh

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        return self.candidates[place]

    def __len__(self) -> int:
        return len(self.candidates)

    def report(self, path: str | PathLike[str]) -> None:
        """Write the dry run of the fastest as one HTML page, with the others beside it."""
        write_report(self.best.run, path, [(each.run, each.title, each.why, str(each.plan)) for each in self])

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain_difference(run: DryRun, best: DryRun) -> str:
    """Why a run is slower than the best one: the parts of its time that grew, and those that shrank.

    The parts are those of `DryRun.bounds`: arithmetic, memory traffic, and waiting for each axis.
    """
    names = dict.fromkeys([*run.bounds, *best.bounds])
    changes = {name: run.bounds.get(name, 0.0) - best.bounds.get(name, 0.0) for name in names}
    slower = run.time - best.time
    worth = [name for name in changes if abs(changes[name]) > LEAST * best.time]
    largest = sorted(worth, key=lambda name: -abs(changes[name]))
    said = [f"{name} {'+' if changes[name] > 0 else '-'}{show_seconds(abs(changes[name]))}" for name in largest[:SHOWN]]
    return f"{slower / best.time:+.1%}: {', '.join(said)}" if said else f"{slower / best.time:+.1%}"


def _lines(ranking: Ranking) -> Iterator[str]:
    yield f"{len(ranking)} plans, the fastest first; {ranking.tried} were priced"
    rows = [("", "time", "memory", "received", "mesh", "plan")]
    for number, each in enumerate(ranking, start=1):
        figures = (show_seconds(each.time), show_bytes(each.memory), show_bytes(each.bytes))
        rows.append((str(number), *figures, str(each.mesh), each.title))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        if number > 1:
            yield f"{'':<{widths[0]}}  {ranking[number - 1].why}"
    yield ""
    yield "the first plan"
    yield from (f"  {line}" for line in str(ranking.plan).splitlines())
