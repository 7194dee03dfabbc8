"""`pipeline`: a model in stages on meshes of their own, and micro-batches that go through them one behind the other.

A schedule (`planner.pipelines`) says which stage does what in which order. Each process does the turns of the stages
that it holds, in that order, and nothing else: what it needs of others it waits for, what others need of it is sent
while it goes on. One process that holds all stages does all turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshloom.comms import WORLD, wire
from meshloom.comms.copying import connect, crosses
from meshloom.errors import ArgumentError, DivergenceError, PeerLostError, PipelineError, expect
from meshloom.mesh import Mesh
from meshloom.nn import plans
from meshloom.nn.parallelize import parallelize, unparallelize
from meshloom.nn.plan import Plan
from meshloom.nn.replay import (
    Playing,
    Slot,
    Survey,
    Surveying,
    Way,
    describe,
    map_tensors,
    map_topologies,
    mark_unit,
    stand_in,
    surveying,
    unmark_unit,
)
from meshloom.nn.stages import Part, Stage, choose_meshes, cut, find_owners, part_of, refuse_shared, restrict
from meshloom.planner.pipelines import BACKWARD, FORWARD, PipelineSchedule, Turn, forward_schedule, schedule_of
from meshloom.tensor.base import Tensor
from meshloom.tensor.gradient_sums import accumulate, synchronize
from meshloom.tensor.moving import begin_redistribution

Loss = Callable[[Any, Any], Any]
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Done:
    """A turn that this process has done: when it was free for it, when it began, and when it ended, in seconds."""

    turn: Turn
    free: float
    start: float
    end: float


@dataclass
class Report:
    """What this process did in a step."""

    schedule: PipelineSchedule
    done: list[Done] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)  # by stage, the most micro-batches that it has kept
    seconds: float = 0.0

    def order(self, stage: int) -> tuple[Turn, ...]:
        """The turns of a stage, as they were done."""
        return tuple(each.turn for each in self.done if each.turn.stage == stage)

    @property
    def busy(self) -> float:
        """Seconds in which this process had what it needed."""
        return sum(each.end - each.start for each in self.done)

    @property
    def bubble(self) -> float:
        """The part of the step in which this process waited for other stages."""
        return 1.0 - self.busy / self.seconds if self.seconds else 0.0


def pipeline(
    module: nn.Module | Sequence[nn.Module],
    stages: int | Sequence[Any],
    mesh: Mesh | Sequence[Mesh],
    schedule: str = "1f1b",
    *,
    axis: str | None = None,
    micro_batches: int | None = None,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    reduction: str = "mean",
    device: str | None = None,
) -> Pipeline:
    """Put a model on a mesh in stages, one behind the other: `step` runs micro-batches through all of them.

    `stages` is a number, the names of the modules at which the stages after the first begin, or for each stage a list
    of patterns of module names. They lie on the submeshes of `mesh` along `axis` ("pp", or the first), or on the
    meshes of a list, which may differ in shape. `plan` places each stage on its mesh as `parallelize` does.
    `micro_batches` is twice the number of stages unless it is given. `loss(output, target)` is that of one micro-batch;
    without it the model returns its own. `reduction` says what a loss is of its rows: the losses of micro-batches are
    averaged by rows, or added.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2, 2), axes=("pp", "tp"))
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> pipe = loom.pipeline(net, 2, mesh, micro_batches=3, plan="tensor", loss=nn.functional.mse_loss)
    >>> print(pipe)
    stage 0 on Mesh(tp=2)  0
    stage 1 on Mesh(tp=2, ids=[2, 3])  2
    >>> loss = pipe.step(torch.ones(6, 8), target=torch.zeros(6, 4))
    >>> print(pipe.report.schedule)
    stage 0  F0 F1 B0 F2 B1 B2
    stage 1  F0 B0 F1 B1 F2 B2
    """
    whole = nn.Sequential(*module) if isinstance(module, (list, tuple)) else module
    expect("module", whole, nn.Module, fix="give a torch.nn.Module, or a list of them")
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction={reduction!r} is not known", fix='"mean" or "sum"')
    rows = cut(whole, stages)
    refuse_shared(whole, rows)
    count = 2 * len(rows) if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"micro_batches={micro_batches!r} is no number of micro-batches", fix="give 1 or more")
    schedule_of(schedule, len(rows), count)
    meshes = choose_meshes(mesh, axis, len(rows))
    made = _place(whole, rows, meshes, {} if plan is None else plan, device)
    return Pipeline(whole, *made, schedule, count, loss, reduction)


def _place(
    module: nn.Module, rows: Sequence[Sequence[str]], meshes: Sequence[Mesh], plan: Any, device: str | None
) -> tuple[tuple[Stage, ...], tuple[Part, ...]]:
    """Every stage on its mesh; an error puts back what was placed."""
    stages, parts = [], []
    owners = find_owners(module, [name for row in rows for name in row])
    for number, (row, mesh) in enumerate(zip(rows, meshes, strict=True)):
        chosen = plans.as_plan(plan, module, mesh)
        chosen.check(module)
        part = part_of(module, row, owners if number == 0 else ())
        stages.append(Stage(number, mesh, tuple(row), restrict(chosen, part)))
        parts.append(part)
    placed: list[Part] = []
    try:
        for stage, part in zip(stages, parts, strict=True):
            parallelize(part, stage.mesh, stage.plan, device=device)
            placed.append(part)
    except BaseException:
        for part in placed:
            unparallelize(part)
        raise
    _hand_back(module, parts[0], owners)
    return tuple(stages), tuple(parts)


def _hand_back(module: nn.Module, part: Part, owners: Sequence[str]) -> None:
    """The parameters that no unit has, from the first stage's part to the module that they belong to."""
    for path in owners:
        for name, parameter in part.get_submodule(path).named_parameters(recurse=False):
            setattr(module.get_submodule(path), name, parameter)


@dataclass
class _Kept:
    """What a stage keeps of a micro-batch until its backward pass."""

    arrived: dict[Way, list[Tensor]]
    leaving: dict[Way, list[Tensor]]
    loss: Any = None


class Pipeline:
    """A model in stages. `step` is one pass of training; a call is a forward pass.

    `module` is the model itself, with its names: optimizers, checkpoints and `train()` work on it as they do without.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: tuple[Stage, ...],
        parts: tuple[Part, ...],
        schedule: str,
        micro_batches: int,
        loss: Loss | None,
        reduction: str,
    ) -> None:
        self.module, self.stages, self.schedule, self.micro_batches = module, stages, schedule, micro_batches
        self.loss, self.reduction = loss, reduction
        self.report: Report | None = None  # of the last step
        self._parts = parts
        units = {name: module.get_submodule(name) for stage in stages for name in stage.units}
        self._numbers = {id(units[name]): stage.number for stage in stages for name in stage.units}
        self._surveys: dict[Any, Survey] = {}
        for unit in units.values():
            mark_unit(unit)

    def __repr__(self) -> str:
        return "\n".join(f"stage {each.number} on {each.mesh}  {' '.join(each.units)}" for each in self.stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all stages; of those that other processes hold, this one has no data and no gradient."""
        return self.module.parameters()

    def unparallelize(self) -> nn.Module:
        """The model off its meshes, dense and whole in every process."""
        owners = find_owners(self.module, [name for stage in self.stages for name in stage.units])
        for stage in self.stages:
            for name in stage.units:
                unmark_unit(self.module.get_submodule(name))
        for part in self._parts:
            unparallelize(part)
        _hand_back(self.module, self._parts[0], owners)
        return self.module

    def step(self, *inputs: Any, target: Any = None, **named: Any) -> Tensor:
        """The loss of a batch, and its gradients in the parameters: forward and backward of all micro-batches.

        Tensors of the batch, the target included, are cut along dim 0; give the whole batch in every process. The loss
        is a tensor on the mesh of the last stage: `item()` has its value in every process that asks, and all must.
        """
        batches = _split((inputs, named, target), self.micro_batches)
        run = _Run(self, batches, schedule_of(self.schedule, len(self.stages), len(batches)))
        run.run()
        self.report = run.report
        return run.total()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns for a batch, on the mesh of the last stage; without gradients."""
        batches = _split((inputs, named, None), self.micro_batches)
        run = _Run(self, batches, forward_schedule(len(self.stages), len(batches)), is_trained=False)
        with torch.no_grad():
            run.run()
            self.report = run.report
            return run.results()

    def survey(self, batch: Any, rows: int, is_trained: bool) -> Survey:
        """What goes from where to where for a micro-batch of these shapes."""
        key = (_signature(batch), self.module.training, is_trained, self.loss)
        if key not in self._surveys:
            self._surveys[key] = self._survey(batch, rows, is_trained)
        return self._surveys[key]

    def _survey(self, batch: Any, rows: int, is_trained: bool) -> Survey:
        args, named, target = batch
        passing = Surveying(self.stages, self._numbers, rows)
        with surveying(), torch.set_grad_enabled(is_trained), passing.running():
            result = self.module(*args, **named)
            passing.found.result = describe(result)
            if is_trained:
                loss = self._lose(passing, self.stages[-1], result, target)
                passing.found.loss = loss.topology
                passing.ends.append(loss)
                passing.found.used = passing.find_used(list(self.module.parameters()))
        for way, slots in sorted(passing.found.slots.items()):
            for slot in slots:
                if crosses(slot.source, slot.target):
                    connect(slot.source.reduced, slot.target.reduced, _channel(way))
        return passing.found

    def _lose(self, passing: Any, stage: Stage, result: Any, target: Any) -> Tensor:
        """The loss of a micro-batch, on the last stage."""
        if self.loss is not None:
            result = self.loss(result, map_tensors(target, lambda each: passing.spread(each, stage)))
        elif target is not None:
            raise ArgumentError("there is a target and no loss", fix="loom.pipeline(..., loss=F.cross_entropy)")
        if not isinstance(result, Tensor) or result.numel() != 1:
            told = result.topology if isinstance(result, Tensor) else type(result).__name__
            raise ArgumentError(
                "the last stage gives no loss",
                result=told,
                fix="loom.pipeline(..., loss=f) with f(output, target) that gives one number",
            )
        return result


def _channel(way: Way) -> str:
    return f"stages {way[0]} and {way[1]}"


def _signature(batch: Any) -> Any:
    """Shapes, dtypes and plain values, as a key."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, (list, tuple)):
        return tuple(_signature(each) for each in batch)
    if isinstance(batch, dict):
        return tuple((key, _signature(each)) for key, each in batch.items())
    return repr(batch)


def _split(batch: Any, count: int) -> list[tuple[Any, int]]:
    """Micro-batches with their rows: chunks of dim 0, the last ones smaller or not there at all."""
    sizes: list[int] = []
    map_tensors(batch, lambda each: sizes.append(each.shape[0]) if each.dim() else None)
    if not sizes or not sizes[0]:
        raise ArgumentError("the batch has no rows", fix="give a tensor whose dim 0 counts samples, as pipe.step(x)")
    rows, size = sizes[0], -(-sizes[0] // count)

    def slice_at(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
        end = min(start + size, rows)
        return lambda each: each[start:end] if each.dim() and each.shape[0] == rows else each

    return [(map_tensors(batch, slice_at(start)), min(size, rows - start)) for start in range(0, rows, size)]


class _Run:
    """The turns of this process in one step."""

    def __init__(
        self, pipe: Pipeline, batches: list[tuple[Any, int]], schedule: PipelineSchedule, is_trained: bool = True
    ) -> None:
        self.pipe, self.batches, self.is_trained = pipe, batches, is_trained
        self.rows = sum(rows for _, rows in batches)
        self.surveys = [pipe.survey(batch, rows, is_trained) for batch, rows in batches]
        self.report = Report(schedule)
        self.turns = schedule.order(each.number for each in pipe.stages if each.is_here)
        self.seed = int(torch.randint(1 << 62, ()).item())
        self.mail: dict[tuple[Way, int, str], list[Callable[[], Tensor]]] = {}
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.outputs: dict[int, Any] = {}
        self.losses: list[Any] = []
        self.backward_left = {each.number: len(batches) for each in pipe.stages}

    def run(self) -> None:
        """Do all turns in order; what the next one needs is on its way meanwhile."""
        begin = time.perf_counter()
        for place, turn in enumerate(self.turns):
            free = time.perf_counter()
            for each in self.turns[place : place + 2]:
                self._post(each)
            with self._explain(turn), self._within(turn.stage):
                self._do(turn, free)
        wire.settle_messages()
        if self.is_trained:
            self._give_gradients()
        self.report.seconds = time.perf_counter() - begin

    def _do(self, turn: Turn, free: float) -> None:
        arrived = self._receive(turn)
        start = time.perf_counter()
        if turn.phase == FORWARD:
            self._forward(turn, arrived)
        else:
            self._backward(turn, arrived)
        self.report.done.append(Done(turn, free, start, time.perf_counter()))

    @contextmanager
    def _explain(self, turn: Turn) -> Iterator[None]:
        """An error says on which stage, and of which micro-batch."""
        try:
            yield
        except (PeerLostError, DivergenceError):
            raise  # these tell of another process, or of all
        except Exception as error:
            raise self._failure(turn, error) from error

    def _failure(self, turn: Turn, error: Exception) -> PipelineError:
        stage = self.pipe.stages[turn.stage]
        first = str(error).partition("\n")[0]
        return PipelineError(
            f"stage {turn.stage} of {len(self.pipe.stages)} failed in the {turn.phase} pass of micro-batch "
            f"{turn.batch}: {type(error).__name__}: {first}",
            mesh=stage.mesh,
            here=f"coordinate {stage.mesh.local_offset} and on" if stage.mesh.is_split else None,
            modules=" ".join(stage.units),
        )

    @contextmanager
    def _within(self, number: int) -> Iterator[None]:
        """What is done here is done by the processes that hold a stage."""
        before, WORLD.within = WORLD.within, self.pipe.stages[number].mesh.ranks
        try:
            yield
        finally:
            WORLD.within = before

    # what goes between stages

    def _arriving(self, turn: Turn) -> Iterator[tuple[Way, int, str, list[Slot]]]:
        survey = self.surveys[turn.batch]
        if turn.phase == FORWARD:
            for way, slots in survey.into(turn.stage):
                yield way, turn.batch, FORWARD, slots
        else:
            for way, slots in survey.out_of(turn.stage):
                yield way, turn.batch, BACKWARD, [each for each in slots if each.is_tracked]

    def _post(self, turn: Turn) -> None:
        """Begin to receive what a turn needs of stages that are elsewhere."""
        for way, batch, phase, slots in self._arriving(turn):
            sender = self.pipe.stages[way[0] if phase == FORWARD else way[1]]
            if not sender.is_here and (way, batch, phase) not in self.mail:
                self.mail[way, batch, phase] = [self._begin(None, slot, way, phase) for slot in slots]

    def _begin(self, tensor: Tensor | None, slot: Slot, way: Way, phase: str) -> Callable[[], Tensor]:
        source, target = slot.source, slot.target
        if phase == BACKWARD:
            source, target = target.reduced, source.reduced
        given = stand_in(source) if tensor is None else tensor
        return begin_redistribution(given, target, "pipeline", _channel(way), phase)

    def _receive(self, turn: Turn) -> dict[Way, list[Tensor]]:
        return {
            way: [finish() for finish in self.mail.pop((way, batch, phase), [])]
            for way, batch, phase, _ in self._arriving(turn)
        }

    def _send(self, tensors: Sequence[Tensor], slots: Sequence[Slot], way: Way, batch: int, phase: str) -> None:
        receiver = self.pipe.stages[way[1] if phase == FORWARD else way[0]]
        begun = [self._begin(each, slot, way, phase) for each, slot in zip(tensors, slots, strict=True)]
        if receiver.is_here:
            self.mail[way, batch, phase] = begun

    # turns

    def _forward(self, turn: Turn, arrived: dict[Way, list[Tensor]]) -> None:
        pipe, stage, survey = self.pipe, self.pipe.stages[turn.stage], self.surveys[turn.batch]
        (args, named, target), rows = self.batches[turn.batch]
        for way, slots in survey.into(turn.stage):
            for each, slot in zip(arrived[way], slots, strict=True):
                if slot.is_tracked and self.is_trained:
                    each.requires_grad_()
        seed = self.seed + turn.stage * len(self.batches) + turn.batch
        passing = Playing(pipe.stages, pipe._numbers, rows, stage, survey, arrived, seed)
        kept = _Kept(arrived, passing.leaving)
        with torch.random.fork_rng(devices=[]):
            with passing.running():
                result = pipe.module(*args, **named)
                if stage is pipe.stages[-1]:
                    passing.speak()
                    self._finish(turn, kept, passing, result, target)
        for way, slots in survey.out_of(turn.stage):
            self._send(passing.leaving.get(way, []), slots, way, turn.batch, FORWARD)
        if self.is_trained:
            self.kept[turn.stage, turn.batch] = kept
            alive = sum(1 for number, _ in self.kept if number == turn.stage)
            self.report.alive[turn.stage] = max(alive, self.report.alive.get(turn.stage, 0))

    def _finish(self, turn: Turn, kept: _Kept, passing: Playing, result: Any, target: Any) -> None:
        if not self.is_trained:
            self.outputs[turn.batch] = result
            return
        loss = self.pipe._lose(passing, self.pipe.stages[-1], result, target)
        part = self.batches[turn.batch][1] / self.rows if self.pipe.reduction == "mean" else 1.0
        kept.loss = loss * part
        self.losses.append(kept.loss.detach())

    def _backward(self, turn: Turn, arrived: dict[Way, list[Tensor]]) -> None:
        survey, kept = self.surveys[turn.batch], self.kept.pop((turn.stage, turn.batch))
        roots, seeds = ([kept.loss], [None]) if kept.loss is not None else ([], [])
        for way, slots in survey.out_of(turn.stage):
            tracked = [each for each, slot in zip(kept.leaving[way], slots, strict=True) if slot.is_tracked]
            roots += tracked
            seeds += arrived[way]
        with accumulate():
            if roots:
                torch.autograd.backward(roots, seeds)
        for way, slots in survey.into(turn.stage):
            pairs = [(each, slot) for each, slot in zip(kept.arrived[way], slots, strict=True) if slot.is_tracked]
            synchronize([each for each, _ in pairs])  # what goes back is the whole gradient
            gradients = [_gradient(each) for each, _ in pairs]
            self._send(gradients, [slot for _, slot in pairs], way, turn.batch, BACKWARD)
        self.backward_left[turn.stage] -= 1
        if not self.backward_left[turn.stage]:
            synchronize(self.pipe._parts[turn.stage].parameters())

    def _give_gradients(self) -> None:
        """Parameters that other processes hold have a gradient there, and here one without data."""
        used = {number for survey in self.surveys for number in survey.used}
        for number, parameter in enumerate(self.pipe.module.parameters()):
            if number in used and isinstance(parameter, Tensor) and parameter.mesh.is_elsewhere:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)

    # results

    def total(self) -> Tensor:
        """The loss of the batch."""
        if not self.pipe.stages[-1].is_here:
            return stand_in(self.surveys[0].loss)  # type: ignore[no-any-return]
        found: Tensor = torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]
        return found

    def results(self) -> Any:
        """What the model returns for all micro-batches, one behind the other."""
        if not self.pipe.stages[-1].is_here:
            self.outputs = {i: map_topologies(each.result) for i, each in enumerate(self.surveys)}
        return _join([self.outputs[i] for i in range(len(self.batches))])


def _gradient(tensor: Tensor) -> Tensor:
    found = tensor.grad
    return found if found is not None else torch.zeros_like(tensor)  # type: ignore[return-value]


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if len(values) > 1 and first.dim() else first
    if isinstance(first, (list, tuple)):
        return type(first)(_join(list(each)) for each in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _join([each[key] for each in values]) for key in first}
    return first
