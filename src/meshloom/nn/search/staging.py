"""Pipelines as candidates: equal blocks in stages one behind the other, over an axis `pp` that is the first of a mesh.

A stage does what a built plan says, on the devices of its place on `pp`, for one micro-batch after the other. What a
turn takes is read from a dry run of a folded model with one micro-batch on the devices of one stage; the schedule of
the pipeline says what comes of it, its bubble included. `run_stages` is the dry run of the whole pipeline, which
decides. `Candidate.apply` makes a pipeline of such a recipe by `loom.pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from meshloom.cost import price_of
from meshloom.errors import MeshloomError
from meshloom.mesh import Mesh
from meshloom.nn.pipeline import BatchLoss, Pipeline, pipeline
from meshloom.nn.plan import Plan
from meshloom.nn.roles import blocks_of
from meshloom.nn.search.recipes import ALL, Built
from meshloom.nn.search.trials import Price, Task, Trials, arguments_of, end_of_forward, find_loss, warm
from meshloom.nn.stages import cut, find_units, refuse_shared
from meshloom.observe.dry_run import DryRun, dry_run
from meshloom.planner.pipelines import FORWARD, Turn, balance, schedule_of
from meshloom.tensor.base import Tensor

STAGES = "pp"
SCHEDULE = "1f1b"
DEEP = 16  # stages at most
STATE = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class Stages:
    """How a model is cut into a pipeline: where the stages after the first begin, and into how many micro-batches."""

    begins: tuple[str, ...]
    micro_batches: int

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.begins) + 1

    def apply(self, module: nn.Module, mesh: Mesh, plan: Plan, batch_loss: BatchLoss, **options: Any) -> Pipeline:
        """The model as a pipeline on a mesh whose axis `pp` has a place for each stage."""
        return pipeline(
            module,
            list(self.begins),
            mesh,
            SCHEDULE,
            axis=STAGES,
            micro_batches=self.micro_batches,
            plan=plan,
            batch_loss=batch_loss,
            **options,
        )


@dataclass(frozen=True)
class Staged:
    """A recipe: stages, and a built plan for each of them."""

    stages: Stages
    inside: Built = field(default_factory=Built)

    @property
    def title(self) -> str:
        """The choices in a few words."""
        return f"{self.stages.count} stages, {self.stages.micro_batches} micro-batches, {self.inside.title}"

    @property
    def recompute(self) -> int:
        """How many blocks recompute."""
        return self.inside.recompute

    def plan(self, module: nn.Module, mesh: Mesh) -> Plan:
        """The plan of a model on the mesh of one stage."""
        return self.inside.plan(module, stage_mesh(mesh))


def stage_mesh(mesh: Mesh) -> Mesh:
    """The devices of the first stage.

    >>> stage_mesh(Mesh(pp=2, tp=4)), stage_mesh(Mesh(pp=2))
    (Mesh(tp=4), Mesh(pp=1))
    """
    return mesh.submesh({STAGES: 0 if mesh.ndim > 1 else slice(0, 1)})


def loss_of(task: Task) -> BatchLoss:
    """The loss of a micro-batch, as a function of the model and the batch."""

    def batch_loss(model: nn.Module, batch: Any) -> Any:
        if task.loss is not None:
            return task.loss(model, batch)
        args, kwargs = arguments_of(batch)
        return find_loss(model(*args, **kwargs))

    return batch_loss


def run_stages(module: nn.Module, mesh: Mesh, recipe: Staged, task: Task) -> DryRun:
    """The dry run of a step of a pipeline: all turns of all stages, then the optimizer of each stage."""
    pipe = recipe.stages.apply(module, mesh, recipe.plan(module, mesh), loss_of(task), device="meta")
    args, kwargs = arguments_of(task.batch)
    optimizers = [task.optimizer([each for each in part.parameters() if each.requires_grad]) for part in pipe.parts]
    for each in optimizers:
        warm(each)
    with torch.random.fork_rng(devices=[]), dry_run(task.machine, memory=math.inf) as run:
        pipe.step(*args, **kwargs)
        for each in optimizers:
            each.step()
            each.zero_grad()
    run.limit = task.memory
    return run


@dataclass(frozen=True)
class Part:
    """What some blocks, or all besides blocks, add to a stage: seconds of its turns and of what is done once per step,
    bytes that it always holds, and bytes that it keeps of each micro-batch."""

    forward: float
    backward: float
    once: float
    state: float
    kept: float
    received: float

    def __sub__(self, other: Part) -> Part:
        return self.plus(other, -1)

    def plus(self, other: Part, count: float = 1) -> Part:
        """This one and so many of another."""
        pairs = zip(self._values(), other._values(), strict=True)
        return Part(*(max(0.0, mine + count * theirs) for mine, theirs in pairs))

    def _values(self) -> tuple[float, ...]:
        return self.forward, self.backward, self.once, self.state, self.kept, self.received

    @property
    def turns(self) -> float:
        """Seconds of one micro-batch, there and back."""
        return self.forward + self.backward


def _read(run: DryRun) -> Part:
    nodes = {node.number: node for node in run.nodes}
    forward = back = end_of_forward(run)
    once = 0.0
    for each in run.timeline:
        node = nodes[each.node]
        if node.phase == "optimizer" or node.is_gradient_sum:
            once += each.duration
        elif node.phase != "forward":
            back = max(back, each.end)
    state = float(sum(run.memory.peaks[what] for what in STATE))
    return Part(forward, max(0.0, back - forward), once, state, max(0.0, run.memory.peak - state), float(run.bytes))


class Stager:
    """Makes pipelines for a task, and prices them."""

    def __init__(self, trials: Trials) -> None:
        self.trials, self.task = trials, trials.task
        self._small: dict[int, Trials] = {}
        self._whole: dict[tuple[Mesh, Staged], DryRun] = {}

    def verify(self, mesh: Mesh, recipe: Staged) -> DryRun:
        """The dry run of the whole pipeline."""
        if (mesh, recipe) not in self._whole:
            self._whole[mesh, recipe] = run_stages(self.trials.folded.with_blocks({}), mesh, recipe, self.task)
        return self._whole[mesh, recipe]

    def candidates(self, shapes: Sequence[tuple[Mesh, Built]], is_short: bool) -> Iterator[tuple[Mesh, Staged, Price]]:
        """Pipelines whose stages do what some plans do, with their data axis divided by the number of stages.

        If memory is short, also with as many micro-batches as there can be.
        """
        if self.task.mode != "train" or not self._can_be_cut():
            return
        blocks = sum(self.trials.folded.counts.values())
        for (mesh, inside), count in ((shape, each) for shape in shapes for each in _depths(blocks)):
            staged = _with_stages(mesh, count)
            for batches in [] if staged is None else self._micro_batches(staged, count, is_short):
                assert staged is not None
                found = self._make(staged, inside, batches)
                if found is not None:
                    yield staged, *found

    def _can_be_cut(self) -> bool:
        """Whether a model has one list of equal blocks, and no parameter that two stages would share."""
        whole = self.trials.folded.whole
        counts = self.trials.folded.counts
        if len(counts) != 1 or sum(counts.values()) < 2 or self.trials.unfolded is not None:
            return False
        try:
            refuse_shared(whole, cut(whole, [f"{blocks_of(whole)[0]}.1"]))
        except MeshloomError as error:  # it says which parameter
            self.trials.refused[Mesh(pp=2), "stages"] = error
            return False
        return True

    def _micro_batches(self, mesh: Mesh, stages: int, is_short: bool) -> list[int]:
        """Two and four micro-batches for each stage, if all devices of a stage get rows."""
        sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
        ways = math.prod(sizes.get(axis, 1) for axis in ("dp", "fsdp", "ep"))
        rows = self.task.rows
        wanted = dict.fromkeys([2 * stages, 4 * stages, *([rows // ways] if is_short else [])])
        return [each for each in wanted if each and rows % each == 0 and rows // each >= ways]

    def _make(self, mesh: Mesh, inside: Built, batches: int) -> tuple[Staged, Price] | None:
        """A pipeline and its price; blocks recompute if it does not fit otherwise."""
        found = self._price(mesh, inside, batches)
        if found is None or self.task.fits(found[1].memory):
            return found
        return self._price(mesh, replace(inside, recompute=ALL), batches)

    def _price(self, mesh: Mesh, inside: Built, batches: int) -> tuple[Staged, Price] | None:
        try:
            block, rest, sent = self._measure(stage_mesh(mesh), inside, self.task.rows // batches)
        except MeshloomError as error:
            self.trials.refused[mesh, f"stages with {inside.title}"] = error
            return None
        count = mesh.shape[mesh.axes.index(STAGES)]
        rows = self._cut(block.turns, rest.turns, count)
        stages = Stages(tuple(row[0] for row in rows[1:]), batches)
        whole = self.trials.folded.whole
        name = blocks_of(whole)[0]
        parts = [_nothing().plus(block, sum(unit.startswith(f"{name}.") for unit in row)) for row in rows]
        parts[-1] = parts[-1].plus(rest)
        first = replace(_nothing(), state=rest.state * self._share_of_first(name))
        parts[0], parts[-1] = parts[0].plus(first), parts[-1] - first
        return Staged(stages, inside), self._draw_out(parts, batches, sent, mesh)

    def _share_of_first(self, blocks: str) -> float:
        """Of the parameters besides the blocks, the part that is defined before them and so lies on the first stage."""
        names = [name for name, _ in self.trials.folded.whole.named_parameters()]
        inside = [place for place, name in enumerate(names) if name.startswith(f"{blocks}.")]
        sizes = [each.numel() for each in self.trials.folded.whole.parameters()]
        before, behind = sum(sizes[: inside[0]]), sum(sizes[inside[-1] + 1 :])
        return before / max(1, before + behind)

    def _draw_out(self, parts: Sequence[Part], batches: int, sent: float, mesh: Mesh) -> Price:
        """What a step of all stages takes, by the schedule."""
        schedule = schedule_of(SCHEDULE, len(parts), batches)

        def seconds(turn: Turn) -> float:
            return parts[turn.stage].forward if turn.phase == FORWARD else parts[turn.stage].backward

        sending = price_of("copy", 2, int(sent), self.task.machine.on(mesh))
        ends = [end for _, _, end in schedule.play(seconds, sending)]
        held = [part.state + part.kept * schedule.alive(stage) for stage, part in enumerate(parts)]
        received = max(part.received for part in parts) * batches
        return Price(max(ends) + max(part.once for part in parts), max(held), received)

    def _cut(self, block: float, rest: float, count: int) -> list[Sequence[str]]:
        """The units of each stage: the blocks, and what comes behind them, in parts of about the same time."""
        whole = self.trials.folded.whole
        units = find_units(whole)
        name = f"{blocks_of(whole)[0]}."
        places = [place for place, unit in enumerate(units) if unit.startswith(name)]
        weights = [block if place in places else 0.0 for place in range(len(units))]
        weights[min(places[-1] + 1, len(units) - 1)] += rest
        bounds = [0, *balance(weights, count), len(units)]
        return [units[a:b] for a, b in pairwise(bounds)]

    def _measure(self, mesh: Mesh, inside: Built, rows: int) -> tuple[Part, Part, float]:
        """A block, all besides the blocks, and the bytes between two blocks, of one micro-batch on one stage."""
        small = self._small.setdefault(rows, Trials(self.task.with_rows(rows), self.trials.folded))
        (kind,) = self.trials.folded.counts
        one, sent = self._run(small, mesh, inside, {kind: 1})
        two, _ = self._run(small, mesh, inside, {kind: 2})
        block = two - one
        return block, one - block, sent

    def _run(self, small: Trials, mesh: Mesh, inside: Built, counts: dict[Any, int]) -> tuple[Part, float]:
        model = small.folded.with_blocks(counts)
        sizes: list[float] = []
        first = model.get_submodule(f"{blocks_of(model)[0]}.0")
        first.register_forward_hook(lambda module, given, result: sizes.append(_bytes_of(result)))
        return _read(small.run(model, mesh, inside)), sizes[0] if sizes else 0.0


def _depths(blocks: int) -> Iterator[int]:
    """How many stages there may be."""
    count = 2
    while count <= min(blocks, DEEP):
        yield count
        count *= 2


def _with_stages(mesh: Mesh, count: int) -> Mesh | None:
    """A mesh with a first axis for stages, out of its data axis; None if that does not divide."""
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    for axis in ("dp", "fsdp"):
        if sizes.get(axis, 1) % count == 0:
            sizes[axis] //= count
            kept = {name: size for name, size in sizes.items() if size > 1}
            return Mesh.of((count, *kept.values()), (STAGES, *kept))
    return None


def _bytes_of(result: Any) -> float:
    """What one device holds of the first tensor that a block returns."""
    first = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(first, Tensor):
        return 0.0
    return float(math.prod(first.topology.local_shape) * first.element_size())


def _nothing() -> Part:
    return Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
