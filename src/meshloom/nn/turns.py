"""The turns of a process in one step of a pipeline: what arrives, what is run, what is sent, and what came of it.

What the next turn needs is on its way while one runs. Everything between stages is a redistribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from meshloom.comms import WORLD, wire
from meshloom.context import state
from meshloom.errors import DivergenceError, PeerLostError, PipelineError
from meshloom.nn.replay import Playing, Slot, Way, map_topologies, stand_in
from meshloom.planner.pipelines import BACKWARD, FORWARD, PipelineSchedule, Turn
from meshloom.tensor.base import Tensor
from meshloom.tensor.gradient_sums import accumulate, discard, synchronize
from meshloom.tensor.moving import begin_redistribution

if TYPE_CHECKING:
    from meshloom.nn.pipeline import Pipeline


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


@dataclass
class _Kept:
    """What a stage keeps of a micro-batch until its backward pass."""

    arrived: dict[Way, list[Tensor]]
    leaving: dict[Way, list[Tensor]]
    loss: Any = None


def channel_of(way: Way) -> str:
    """The messages between two stages, in order among themselves."""
    return f"stages {way[0]} and {way[1]}"


class Run:
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
        self.is_accumulating = state.accumulating  # then sums wait for a step that does not
        self.backward_left = {each.number: len(batches) for each in pipe.stages}

    def run(self) -> None:
        """Do all turns in order; what the next one needs is on its way meanwhile."""
        begin = time.perf_counter()
        try:
            for place, turn in enumerate(self.turns):
                free = time.perf_counter()
                for each in self.turns[place : place + 2]:
                    self._post(each)
                with self._explain(turn), self._within(turn.stage):
                    self._do(turn, free)
        except BaseException:
            self._discard()
            raise
        wire.settle_messages()
        if self.is_trained:
            self._give_gradients()
        self.report.seconds = time.perf_counter() - begin

    def _discard(self) -> None:
        """A step that failed leaves no parts of gradients that wait for others."""
        for part in self.pipe.parts:
            for each in part.parameters():
                if isinstance(each, Tensor):
                    discard(each)

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
            here=f"coordinate {stage.mesh.local_offset} and on, a box of {stage.mesh.local_shape}",
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
        return begin_redistribution(given, target, "pipeline", channel_of(way), phase)

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
        with torch.random.fork_rng(devices=[]), passing.running():
            result = pipe.run_model(args, named, self.is_trained)
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
        roots: list[Any] = [kept.loss] if kept.loss is not None else []
        seeds: list[Any] = [None] * len(roots)
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
        if not self.backward_left[turn.stage] and not self.is_accumulating:
            synchronize(self.pipe.parts[turn.stage].parameters())

    def _give_gradients(self) -> None:
        """Parameters that other processes hold have a gradient there, and here one without data."""
        used = {number for survey in self.surveys for number in survey.used}
        for number, parameter in enumerate(self.pipe.module.parameters()):
            is_elsewhere = isinstance(parameter, Tensor) and parameter.mesh.is_elsewhere
            if is_elsewhere and number in used and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

    # results

    def total(self) -> Tensor:
        """The loss of the batch."""
        if not self.pipe.stages[-1].is_here:
            return stand_in(self.surveys[0].loss)  # type: ignore[no-any-return]
        found: Any = torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]
        return found  # type: ignore[no-any-return]

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
