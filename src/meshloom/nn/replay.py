"""One stage of a model, run by calling the whole model: units of other stages are not run but stood in for.

The Python between units runs in every turn, as it is; a unit of another stage returns tensors without data, of the
topologies that a survey of the model has found. What a unit of a later stage takes of this stage is sent to it, and
what a unit of this stage takes of an earlier one has arrived: both sides see the same calls in the same order, so a
place in that order is all that names a tensor. No module is traced, and none is written for it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshloom.comms import WORLD
from meshloom.engines.layout import torch_dtype
from meshloom.errors import ArgumentError
from meshloom.mesh import Mesh
from meshloom.nn.hooks import fitting
from meshloom.nn.stages import Stage
from meshloom.placement import Replicate, Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import distribute
from meshloom.tensor.known_numbers import KnownNumbers
from meshloom.tensor.shadow import Shadows, Untouched

Way = tuple[int, int]  # from one stage to another


@dataclass(frozen=True)
class Slot:
    """A tensor that goes from one stage to another: where it lies before and after, and if its gradient returns."""

    source: Topology
    target: Topology
    is_tracked: bool


@dataclass
class Survey:
    """What a pass over the model has shown: what each call of a unit returns, what crosses, and the end of it all."""

    returns: list[Any] = field(default_factory=list)
    slots: dict[Way, list[Slot]] = field(default_factory=dict)
    result: Any = None
    loss: Topology | None = None
    used: frozenset[int] = frozenset()  # the parameters that have a gradient, by their numbers in the model

    def into(self, stage: int) -> Iterator[tuple[Way, list[Slot]]]:
        """What arrives at a stage, by the stages that it comes from."""
        return ((way, slots) for way, slots in sorted(self.slots.items()) if way[1] == stage)

    def out_of(self, stage: int) -> Iterator[tuple[Way, list[Slot]]]:
        """What leaves a stage, by the stages that it goes to."""
        return ((way, slots) for way, slots in sorted(self.slots.items()) if way[0] == stage)


class _Running(threading.local):
    current: Pass | None = None


_RUNNING = _Running()


class Pass:
    """A call of the model, in which its units ask what to do."""

    def __init__(self, stages: Sequence[Stage], numbers: Mapping[int, int], rows: int) -> None:
        self.stages, self.numbers, self.rows = (
            stages,
            numbers,
            rows,
        )  # the stage of a unit, by its id; rows of the batch
        self.meshes: dict[Mesh, int] = {each.mesh: each.number for each in stages}
        self.kept: list[Any] = []  # tensors whose ids are known here

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is the one that units ask."""
        before, _RUNNING.current = _RUNNING.current, self
        try:
            yield
        finally:
            _RUNNING.current = before

    def call(self, unit: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a unit returns."""
        raise NotImplementedError

    def stage_of(self, tensor: Tensor) -> int | None:
        """The stage whose mesh a tensor is on."""
        return self.meshes.get(tensor.mesh)

    def spread(self, value: torch.Tensor, stage: Stage) -> torch.Tensor:
        """A plain tensor where the batch of a stage lies, if it has a row for each sample."""
        if value.dim() == 0 or value.shape[0] != self.rows or not stage.plan.batch:
            return value
        return distribute(value, stage.mesh, fitting(stage.plan.batch, value.dim()))  # type: ignore[arg-type]


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A value with its tensors changed, in lists, tuples and dictionaries too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(each, change) for each in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, each in value.items():
            made[key] = map_tensors(each, change)
        return made
    return value


def stand_in(value: Any) -> Any:
    """A tensor of a topology without data; anything else is itself."""
    if not isinstance(value, Topology):
        return value
    return _stand(Tensor(value, torch.empty(value.stored_shape, dtype=torch_dtype(value.dtype), device="meta")))


def _stand(value: torch.Tensor) -> torch.Tensor:
    """A tensor without data that says it has some: models put their own masks where a value is."""
    if isinstance(value, Tensor) and value._data.is_meta:
        value._stands_on = WORLD.device
    return value


def arrive(topology: Topology, mesh: Mesh) -> Topology:
    """Where a tensor lies on the next stage: axes of the same name do what they did, others replicate."""
    known = dict(zip(topology.mesh.axes, topology.reduced.placements, strict=True))
    placements = tuple(known.get(axis, Replicate()) for axis in mesh.axes)
    return Topology(mesh, placements, topology.shape, topology.dtype)


class Surveying(Pass):
    """The pass that finds out: every unit runs, on shapes alone."""

    def __init__(self, stages: Sequence[Stage], numbers: Mapping[int, int], rows: int) -> None:
        super().__init__(stages, numbers, rows)
        self.found = Survey()
        self.last = 0
        self.moved: dict[tuple[int, int], Tensor] = {}
        self.ends: list[Tensor] = []  # what gradients come back to

    def call(self, unit: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.numbers[id(unit)]
        if number < self.last:
            raise ArgumentError(
                f"a {type(unit).__name__} of stage {number} is called after stage {self.last} has begun",
                fix="cut the model in the order of its calls: stages=[[patterns of stage 0], [those of stage 1], ...]",
            )
        self.last, stage = number, self.stages[number]

        def bring(value: torch.Tensor) -> torch.Tensor:
            return self._bring(value, stage)

        result = run(*map_tensors(args, bring), **map_tensors(kwargs, bring))
        self.found.returns.append(describe(result))
        return map_tensors(result, _stand)

    def _bring(self, value: torch.Tensor, stage: Stage) -> torch.Tensor:
        if not isinstance(value, Tensor):
            return self.spread(value, stage)
        source = self.stage_of(value)
        if source is None or source == stage.number:
            return value
        key = (id(value), stage.number)
        if key not in self.moved:
            self.kept.append(value)
            slot = Slot(value.topology, arrive(value.topology, stage.mesh), value.requires_grad)
            self.found.slots.setdefault((source, stage.number), []).append(slot)
            self.ends += [value] if slot.is_tracked else []
            made: Tensor = stand_in(slot.target)
            if slot.is_tracked:
                made.requires_grad_()
            self.moved[key] = made
        return self.moved[key]

    def find_used(self, parameters: Sequence[Any]) -> frozenset[int]:
        """The parameters that a pass of backward reaches, by number."""
        ends = [each._data for each in self.ends if each.requires_grad]
        leaves = {i: state.shadows.of(each)._data for i, each in enumerate(parameters) if isinstance(each, Tensor)}
        tracked = {i: each for i, each in leaves.items() if each.requires_grad}
        if not ends or not tracked:
            return frozenset()
        seeds = [torch.empty_like(each) for each in ends]
        found = torch.autograd.grad(ends, list(tracked.values()), seeds, allow_unused=True)
        return frozenset(i for i, each in zip(tracked, found, strict=True) if each is not None)


def describe(value: Any) -> Any:
    """A result with topologies in place of tensors."""
    return map_tensors(value, lambda each: each.topology if isinstance(each, Tensor) else each)


@contextmanager
def surveying() -> Iterator[None]:
    """Shapes alone: nothing is computed, logged, told or changed."""
    unseen = {"logs": (), "shadows": Shadows(), "policy": None, "waiting": {}}
    with torch.random.fork_rng(devices=[]), Untouched(), KnownNumbers(), state.changed(**unseen), muted():
        yield


@contextmanager
def muted() -> Iterator[None]:
    """What happens here is not compared with other processes."""
    before, WORLD.is_muted = WORLD.is_muted, True
    try:
        yield
    finally:
        WORLD.is_muted = before


class Playing(Pass):
    """The pass of one turn: the units of one stage run on what has arrived, those of the others are stood in for.

    While others are stood in for, nothing is logged or forbidden: it does not happen.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        numbers: Mapping[int, int],
        rows: int,
        stage: Stage,
        survey: Survey,
        arrived: Mapping[Way, Sequence[Tensor]],
        seed: int,
    ) -> None:
        super().__init__(stages, numbers, rows)
        self.stage, self.survey, self.arrived, self.seed = stage, survey, arrived, seed
        self.calls = 0
        self.has_begun = False
        self.leaving: dict[Way, list[Tensor]] = {}
        self.taken: dict[tuple[int, int], Tensor] = {}
        self.counts: dict[Way, int] = {}
        self.logs, self.policy = state.logs, state.policy

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            self._mute()
            try:
                yield
            finally:
                self.speak()

    def call(self, unit: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.numbers[id(unit)]
        self.calls += 1
        if number != self.stage.number:
            return self._stand_in_for(number, args, kwargs)
        self.speak()
        if not self.has_begun:
            torch.manual_seed(self.seed)
            self.has_begun = True
        return run(*map_tensors(args, self._take), **map_tensors(kwargs, self._take))

    def _stand_in_for(self, number: int, args: Any, kwargs: Any) -> Any:
        self._mute()
        if number > self.stage.number:
            map_tensors((args, kwargs), lambda value: self._leave(value, number))
        return map_topologies(self.survey.returns[self.calls - 1])

    def _leave(self, value: torch.Tensor, number: int) -> None:
        if isinstance(value, Tensor) and value.mesh == self.stage.mesh and (id(value), number) not in self.taken:
            self.taken[id(value), number] = value
            self.leaving.setdefault((self.stage.number, number), []).append(value)

    def _take(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, Tensor):
            return self.spread(value, self.stage)
        source = self.stage_of(value)
        if source is None or source == self.stage.number:
            return value
        key = (id(value), self.stage.number)
        if key not in self.taken:
            self.kept.append(value)
            way = (source, self.stage.number)
            place = self.counts[way] = self.counts.get(way, -1) + 1
            self.taken[key] = self.arrived[way][place]
        return self.taken[key]

    def _mute(self) -> None:
        WORLD.is_muted = True
        state._set({"logs": (), "policy": None})

    def speak(self) -> None:
        """What happens now belongs to this stage."""
        WORLD.is_muted = False
        state._set({"logs": self.logs, "policy": self.policy})


def map_topologies(value: Any) -> Any:
    """A described result with stand-ins for its topologies."""
    if isinstance(value, Topology):
        return stand_in(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(map_topologies, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(map_topologies, value))
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, each in value.items():
            made[key] = map_topologies(each)
        return made
    return value


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A unit is called: as it was, or as the pass that is running says."""
    own: Any = type(self).__mro__[1]
    current = _RUNNING.current
    if current is None or id(self) not in current.numbers:
        return own.__call__(self, *args, **kwargs)
    return current.call(self, lambda *given, **named: own.__call__(self, *given, **named), args, kwargs)


def mark_unit(unit: nn.Module) -> None:
    """Let a module ask the pass that is running, whenever it is called: its class becomes one of that class's own."""
    kind = type(unit)
    if not hasattr(kind, "_is_unit"):
        unit.__class__ = type(
            kind.__name__, (kind,), {"__call__": _call, "_is_unit": True, "__module__": kind.__module__}
        )


def unmark_unit(unit: nn.Module) -> None:
    """The module as it was."""
    if hasattr(type(unit), "_is_unit"):
        unit.__class__ = type(unit).__mro__[1]
