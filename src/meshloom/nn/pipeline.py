"""`pipeline`: a model in stages on meshes of their own, and micro-batches that go through them one behind the other.

A schedule (`planner.pipelines`) says which stage does what in which order. Each process does the turns of the stages
that it holds, in that order, and nothing else: what it needs of others it waits for, what others need of it is sent
while it goes on. One process that holds all stages does all turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshloom.comms.copying import connect, crosses
from meshloom.errors import ArgumentError, expect
from meshloom.mesh import Mesh
from meshloom.nn import plans
from meshloom.nn.parallelize import parallelize, unparallelize
from meshloom.nn.plan import Plan
from meshloom.nn.replay import (
    Survey,
    Surveying,
    describe,
    map_tensors,
    mark_unit,
    surveying,
    unmark_unit,
)
from meshloom.nn.stages import Part, Stage, choose_meshes, cut, find_owners, part_of, refuse_shared, restrict
from meshloom.nn.turns import Report, Run, channel_of
from meshloom.planner.pipelines import forward_schedule, schedule_of
from meshloom.tensor.base import Tensor

Loss = Callable[[Any, Any], Any]
BatchLoss = Callable[[nn.Module, Any], Any]  # of a model and what it is called with
REDUCTIONS = ("mean", "sum")
_KEPT = 64  # surveys, of micro-batches of different shapes


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
    batch_loss: BatchLoss | None = None,
) -> Pipeline:
    """Put a model on a mesh in stages, one behind the other: `step` runs micro-batches through all of them.

    `stages` is a number, the names of the modules at which the stages after the first begin, or for each stage a list
    of patterns of module names. They lie on the submeshes of `mesh` along `axis` ("pp", or the first), or on the
    meshes of a list, which may differ in shape. `plan` places each stage on its mesh as `parallelize` does.
    `micro_batches` is twice the number of stages unless it is given. `loss(output, target)` is that of one micro-batch;
    without it the model returns its own. `batch_loss(model, batch)` stands for both where the loss calls the model, as
    that of `autoplan` does. `reduction` says what a loss is of its rows: the losses of micro-batches are averaged by
    rows, or added.

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
    whole: Any = nn.Sequential(*module) if isinstance(module, (list, tuple)) else module
    expect("module", whole, nn.Module, fix="give a torch.nn.Module, or a list of them")
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction={reduction!r} is not known", fix='"mean" or "sum"')
    if loss is not None and batch_loss is not None:
        raise ArgumentError("there are two losses", fix="give loss(output, target) or batch_loss(model, batch)")
    for name, given in (("loss", loss), ("batch_loss", batch_loss)):
        if given is not None and not callable(given):
            raise ArgumentError(f"{name}={given!r:.80} is no function", fix="give a function, such as F.mse_loss")
    rows = cut(whole, stages)
    refuse_shared(whole, rows)
    count = 2 * len(rows) if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"micro_batches={micro_batches!r} is no number of micro-batches", fix="give 1 or more")
    schedule_of(schedule, len(rows), count)
    meshes = choose_meshes(mesh, axis, len(rows))
    made = _place(whole, rows, meshes, {} if plan is None else plan, device)
    return Pipeline(whole, *made, schedule, count, loss, reduction, batch_loss)


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
        batch_loss: BatchLoss | None = None,
    ) -> None:
        self.module, self.stages, self.schedule, self.micro_batches = module, stages, schedule, micro_batches
        self.loss, self.reduction, self.batch_loss = loss, reduction, batch_loss
        self.report: Report | None = None  # of the last step
        self.parts = parts
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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm together is at most `max_norm`; the norm before that.

        `torch.nn.utils.clip_grad_norm_` does so for tensors on one mesh. Every process calls it.
        """
        norms = []
        for part in self.parts:
            gradients = [each.grad for each in part.parameters() if each.grad is not None]
            if gradients:
                found: Any = nn.utils.get_total_norm(gradients, norm_type)
                norms.append(found.to_torch() if isinstance(found, Tensor) else found)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
        for part in self.parts:
            nn.utils.clip_grads_with_norm_(part.parameters(), max_norm, total)
        return total

    def unparallelize(self) -> nn.Module:
        """The model off its meshes, dense and whole in every process."""
        owners = find_owners(self.module, [name for stage in self.stages for name in stage.units])
        for stage in self.stages:
            for name in stage.units:
                unmark_unit(self.module.get_submodule(name))
        for part in self.parts:
            unparallelize(part)
        _hand_back(self.module, self.parts[0], owners)
        return self.module

    def step(self, *inputs: Any, target: Any = None, **named: Any) -> Tensor:
        """The loss of a batch, and its gradients in the parameters: forward and backward of all micro-batches.

        Tensors of the batch, the target included, are cut along dim 0; give the whole batch in every process. The loss
        is a tensor on the mesh of the last stage: `item()` has its value in every process that asks, and all must.
        """
        if self.batch_loss is not None and target is not None:
            raise ArgumentError("batch_loss takes no target", fix="pipe.step(*batch), with the target in the batch")
        batches = _split(_make_dense((inputs, named, target)), self.micro_batches)
        run = Run(self, batches, schedule_of(self.schedule, len(self.stages), len(batches)))
        run.run()
        self.report = run.report
        return run.total()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns for a batch, on the mesh of the last stage; without gradients."""
        batches = _split(_make_dense((inputs, named, None)), self.micro_batches)
        run = Run(self, batches, forward_schedule(len(self.stages), len(batches)), is_trained=False)
        with torch.no_grad():
            run.run()
            self.report = run.report
            return run.results()

    def survey(self, batch: Any, rows: int, is_trained: bool) -> Survey:
        """What goes from where to where for a micro-batch of these shapes."""
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        key = (_signature(batch), self.module.training, is_trained, self.loss, autocast)
        if key not in self._surveys:
            if len(self._surveys) >= _KEPT:
                self._surveys.clear()
            self._surveys[key] = self._survey(batch, rows, is_trained)
        return self._surveys[key]

    def _survey(self, batch: Any, rows: int, is_trained: bool) -> Survey:
        args, named, target = batch
        passing = Surveying(self.stages, self._numbers, rows)
        with surveying(), torch.set_grad_enabled(is_trained), passing.running():
            result = self.run_model(args, named, is_trained)
            passing.found.result = describe(result)
            if is_trained:
                loss = self._lose(passing, self.stages[-1], result, target)
                passing.found.loss = loss.topology
                passing.ends.append(loss)
                passing.found.used = passing.find_used(list(self.module.parameters()))
        for way, slots in sorted(passing.found.slots.items()):
            for slot in slots:
                if crosses(slot.source, slot.target):
                    connect(slot.source.reduced, slot.target.reduced, channel_of(way))
        return passing.found

    def run_model(self, args: Any, named: Any, is_trained: bool) -> Any:
        """What the model returns for a micro-batch; its loss, if it is a function of the model and the batch."""
        if self.batch_loss is None or not is_trained:
            return self.module(*args, **named)
        return self.batch_loss(self.module, named or (args[0] if len(args) == 1 else args))

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
                fix="loom.pipeline(..., loss=f) with f(output, target) that gives one number, or batch_loss=f with "
                "f(model, batch)",
            )
        return result


def _signature(batch: Any) -> Any:
    """Shapes, dtypes and plain values, as a key."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, (list, tuple)):
        return tuple(_signature(each) for each in batch)
    if isinstance(batch, dict):
        return tuple((key, _signature(each)) for key, each in batch.items())
    return repr(batch)


def _make_dense(batch: Any) -> Any:
    """A batch of plain tensors: those on a mesh are gathered, since each stage lays them otherwise."""
    return map_tensors(batch, lambda each: each.to_torch() if isinstance(each, Tensor) else each)


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
