"""What plans cost: dry runs of a step on a folded model, drawn out to all blocks, and of the whole model.

`Trials.price` runs the step with one block of each kind, and once more with two of it. What the second block adds, each
further one adds too; a test holds this against whole runs. `Trials.verify` runs the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from meshloom.errors import ArgumentError, MeshloomError, closest
from meshloom.fabric import Machine
from meshloom.mesh import Mesh
from meshloom.nn.hooks import Spread
from meshloom.nn.parallelize import parallelize
from meshloom.nn.plan import Plan
from meshloom.nn.search.blocks import Folded, Kind
from meshloom.observe.dry_run import DryRun, dry_run
from meshloom.tensor.recording import Unchanged

FEW = 2  # blocks of a kind that are not worth folding
MODES = ("train", "prefill", "decode")
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Recipe(Protocol):
    """A way to make a plan for a model on a mesh: the same for a folded model and for the whole one."""

    @property
    def title(self) -> str:
        """What it does, in a few words."""

    @property
    def recompute(self) -> int:
        """How many blocks recompute: the folded model has too few to tell."""

    def plan(self, module: nn.Module, mesh: Mesh) -> Plan:
        """The plan; an error if the model has nothing that it could be made of."""


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, all parameters in one call of each of its kernels."""
    return torch.optim.AdamW(parameters, foreach=True)


@dataclass(frozen=True)
class Task:
    """What a plan is wanted for."""

    module: nn.Module
    batch: Any
    machine: Machine
    devices: int
    memory: float | None  # bytes that one device has; None for no limit
    mode: str = "train"
    loss: Loss | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = default_optimizer

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ArgumentError(f"mode={self.mode!r} is no kind of step", fix=closest(self.mode, MODES))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return [*_tensors(self.batch)]

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return max((each.shape[0] for each in self.tensors if each.dim()), default=1)

    @property
    def length(self) -> int:
        """The size of the second dim of the batch: of text, its tokens."""
        return max((each.shape[1] for each in self.tensors if each.dim() > 1), default=1)

    def with_rows(self, rows: int) -> Task:
        """The same with the first rows of the batch."""
        return replace(self, batch=_shorten(self.batch, self.rows, rows))

    def fits(self, memory: float) -> bool:
        """Whether a device has that much."""
        return self.memory is None or memory <= self.memory


@dataclass(frozen=True)
class Price:
    """What a step costs one device: seconds, the most bytes that it holds, the bytes that it receives."""

    time: float
    memory: float
    bytes: float
    least: Mapping[str, float] = field(default_factory=dict)  # seconds that a step takes at least, by what it needs

    def __add__(self, other: Price) -> Price:
        axes = dict.fromkeys([*self.least, *other.least])
        least = {axis: self.least.get(axis, 0.0) + other.least.get(axis, 0.0) for axis in axes}
        return Price(self.time + other.time, self.memory + other.memory, self.bytes + other.bytes, least)

    def __sub__(self, other: Price) -> Price:
        return self + other.times(-1)

    def times(self, count: float) -> Price:
        """That many times the same."""
        least = {axis: seconds * count for axis, seconds in self.least.items()}
        return Price(self.time * count, self.memory * count, self.bytes * count, least)


def _read(run: DryRun) -> Price:
    return Price(run.time, run.memory.peak, run.bytes, _bounds_of(run))


def _bounds_of(run: DryRun) -> dict[str, float]:
    """What no step is faster than: by axis, forward and all that its links carry after it; and the compute, with the
    waits of the calls themselves.

    Of few blocks one of them may be hidden behind another; of many blocks it may be what the step takes.
    """
    nodes = {node.number: node for node in run.nodes}
    forward = end_of_forward(run)
    found = {"compute": 0.0}
    for each in run.timeline:
        node = nodes[each.node]
        if not node.is_gradient_sum:
            found["compute"] += each.exposed if each.axis else each.duration
        if each.axis and node.phase != "forward":
            found[each.axis] = found.get(each.axis, forward) + each.duration
    return found


def end_of_forward(run: DryRun) -> float:
    """When backward begins: what an optimizer does afterwards to keep padding zero is no part of it."""
    nodes = {node.number: node for node in run.nodes}
    return min((each.start for each in run.timeline if nodes[each.node].phase == "backward"), default=run.time)


class Trials:
    """Dry runs of one task, each done once."""

    def __init__(self, task: Task, folded: Folded | None = None) -> None:
        self.task = task
        self.folded = folded or Folded(task.module)
        self.sample = self.folded.with_blocks(dict.fromkeys(self.folded.counts, 1))
        self.known: dict[object, Price | None] = {}
        self.unfolded: Exception | None = None  # why the model cannot be run with fewer blocks
        self.refused: dict[tuple[Mesh, str], MeshloomError] = {}  # what could not be tried, and why
        self.whole: dict[tuple[Mesh, str], DryRun] = {}

    def price(self, mesh: Mesh, recipe: Recipe) -> Price | None:
        """What a step costs by a recipe; None where the recipe cannot be used, see `refused`."""
        try:
            key = self.key(mesh, recipe)
        except MeshloomError as error:
            self.refused[mesh, recipe.title] = error
            return None
        if key not in self.known:
            try:
                self.known[key] = self._price(mesh, recipe)
            except MeshloomError as error:
                self.refused[mesh, recipe.title], self.known[key] = error, None
        return self.known[key]

    def key(self, mesh: Mesh, recipe: Recipe) -> object:
        """What a recipe does with the folded model: two recipes that do the same are one."""
        found = recipe.plan(self.sample, mesh).check(self.sample)
        parameters = frozenset((name, axes) for name, axes in found.parameters.items() if axes)
        others = [line for line in found.lines if line.word != "parameter"]
        lines = frozenset((line.word, name, line.axes) for line in others for name in line.takes)
        return mesh, found.batch, parameters, lines, recipe.recompute

    def _price(self, mesh: Mesh, recipe: Recipe) -> Price:
        """What all blocks cost: those of one block of each kind, and what a second one of a kind adds, as often as it
        is there. A model of few blocks is run as it is, and one that cannot do without some of them."""
        if self.unfolded is None and max(self.folded.counts.values(), default=1) > FEW:
            try:
                return self._draw_out(mesh, recipe)
            except MeshloomError:
                raise
            except Exception as error:  # a model may count on all of its blocks being there
                self.unfolded = error
        return _read(self.verify(mesh, recipe))

    def _draw_out(self, mesh: Mesh, recipe: Recipe) -> Price:
        counts = self.folded.counts
        one = dict.fromkeys(counts, 1)
        base = total = self._measure(mesh, recipe, one)
        for kind, count in counts.items():
            if count > 1:
                more = self._measure(mesh, recipe, {**one, kind: 2})
                total = total + (more - base).times(count - 1)
        return replace(total, time=max(total.time, *total.least.values()))

    def _measure(self, mesh: Mesh, recipe: Recipe, counts: Mapping[Kind, int]) -> Price:
        return _read(self.run(self.folded.with_blocks(counts), mesh, recipe))

    def verify(self, mesh: Mesh, recipe: Recipe) -> DryRun:
        """The dry run of the whole model."""
        key = (mesh, str(recipe.plan(self.folded.whole, mesh)))
        if key not in self.whole:
            self.whole[key] = self.run(self.folded.with_blocks({}), mesh, recipe)
        return self.whole[key]

    def run(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> DryRun:
        """The dry run of a step of a model, which is put on the mesh."""
        plan = recipe.plan(model, mesh)
        parallelize(model, mesh, plan, device="meta")
        args, kwargs = arguments_of(self.task.batch)
        args, kwargs = Spread(mesh, plan.batch, moves=False)(model, args, kwargs)  # type: ignore[arg-type]
        is_trained = self.task.mode == "train"
        optimizer = self._optimizer(model) if is_trained else None
        with torch.random.fork_rng(devices=[]), dry_run(self.task.machine, memory=math.inf) as run:
            if optimizer is None:
                with torch.no_grad():
                    model(*args, **kwargs)
            else:
                _train(model, args, kwargs, self.task, optimizer)
        run.limit = self.task.memory
        return run

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer([each for each in model.parameters() if each.requires_grad])
        warm(optimizer)
        return optimizer


def warm(optimizer: torch.optim.Optimizer) -> None:
    """One step of nothing: from the second step on, the state of an optimizer is there while activations are."""
    for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
        parameter.grad = torch.zeros_like(parameter)
    with Unchanged():
        optimizer.step()
    optimizer.zero_grad()


def _train(model: nn.Module, args: Any, kwargs: Any, task: Task, optimizer: torch.optim.Optimizer) -> None:
    if task.loss is not None:
        batch = kwargs or (args if isinstance(task.batch, (list, tuple)) else args[0])
        loss = task.loss(model, batch)
    else:
        loss = find_loss(model(*args, **kwargs))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def find_loss(result: Any) -> torch.Tensor:
    """The loss that a model returns, or the mean of its first result if it returns none.

    >>> find_loss((torch.ones(2, 3), torch.zeros(1)))
    tensor(1.)
    """
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    first = next((each for each in _tensors(result) if each.is_floating_point()), None)
    if first is None:
        raise ArgumentError(
            f"the model returns {type(result).__name__}, and no number in it can be a loss",
            fix="give a loss: loom.autoplan(..., loss=lambda model, batch: ...)",
        )
    return first if first.dim() == 0 else first.float().mean()


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a model; numbers that are computed with need no values."""
    if isinstance(batch, Mapping):
        return (), {key: _light(each) for key, each in batch.items()}
    return tuple(map(_light, batch)) if isinstance(batch, (list, tuple)) else (_light(batch),), {}


def _light(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_light, value))
    return {key: _light(each) for key, each in value.items()} if type(value) is dict else value


def _shorten(value: Any, rows: int, wanted: int) -> Any:
    """A batch with fewer rows; tensors that have another first dim stay."""
    if isinstance(value, torch.Tensor):
        return value[:wanted] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: _shorten(each, rows, wanted) for key, each in value.items()}
    return type(value)(_shorten(each, rows, wanted) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
