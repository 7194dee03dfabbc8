"""What a search has found: plans in the order of their time, what each costs, and why it is not the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar, overload

from torch import nn

from meshloom.mesh import Mesh
from meshloom.nn.parallelize import parallelize
from meshloom.nn.pipeline import BatchLoss, Pipeline
from meshloom.nn.plan import Plan
from meshloom.nn.search.staging import Stages
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
    stages: Stages | None = None  # for a pipeline: how the model is cut, and into how many micro-batches
    batch_loss: BatchLoss | None = None  # for a pipeline: the loss that the plans were made for

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

    def apply(self, module: _Module, **options: Any) -> _Module | Pipeline:
        """Open the mesh and put a model on it by the plan: the model itself, by `parallelize`.

        If there are `stages`, it is a `Pipeline` instead, by `pipeline`, and `step(*batch)` is a pass of training.
        Options are those of the function that is called.
        """
        mesh = open_mesh(self.mesh.shape, self.mesh.axes)
        if self.stages is None:
            return parallelize(module, mesh, self.plan, **options)
        assert self.batch_loss is not None
        return self.stages.apply(module, mesh, self.plan, self.batch_loss, **options)

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
    mine, theirs = _parts(run), _parts(best)
    changes = {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in dict.fromkeys([*mine, *theirs])}
    slower = run.time - best.time
    worth = [name for name in changes if abs(changes[name]) > LEAST * best.time]
    largest = sorted(worth, key=lambda name: -abs(changes[name]))
    said = [f"{name} {'+' if changes[name] > 0 else '-'}{show_seconds(abs(changes[name]))}" for name in largest[:SHOWN]]
    return f"{slower / best.time:+.1%}: {', '.join(said)}" if said else f"{slower / best.time:+.1%}"


def _parts(run: DryRun) -> dict[str, float]:
    """What the time of a device goes to: of a pipeline that of a stage in the middle, with what it waits for others."""
    if len(run.classes) < 2:
        return dict(run.bounds)
    found = {name: part / len(run.classes) for name, part in run.bounds.items() if " -> " not in name}
    return {**found, "waits for other stages": run.bubble * run.time}


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
    stages = ranking.best.stages
    if stages is not None:
        yield f"  stages     begin at {', '.join(stages.begins)}; {stages.micro_batches} micro-batches"
    yield from (f"  {line}" for line in str(ranking.plan).splitlines())
