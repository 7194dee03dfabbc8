"""`autoplan`: what is asked for is checked, searched for, and given back in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshloom.errors import ArgumentError, expect
from meshloom.fabric import Machine, Preset
from meshloom.fabric.catalogue import as_machine, memory_on
from meshloom.nn.parallelize import refuse_placed
from meshloom.nn.search.choosing import Search
from meshloom.nn.search.ranking import Candidate, Ranking, explain_difference
from meshloom.nn.search.remedies import nothing_fits
from meshloom.nn.search.staging import Staged, loss_of
from meshloom.nn.search.trials import Loss, Task, default_optimizer

KEPT = 5  # plans that are given back
Given = str | Machine | Preset  # a machine, or the name of a preset
_FUNCTIONS = {
    "loss": "give loss(model, batch), which calls the model and gives one number",
    "optimizer": "give optimizer(parameters), such as torch.optim.AdamW",
}


def autoplan(
    module: nn.Module,
    example_batch: Any,
    machine: Given,
    devices: int | None = None,
    memory: float | None = None,
    *,
    mode: str = "train",
    loss: Loss | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = default_optimizer,
    keep: int = KEPT,
    progress: Callable[[str], None] | None = None,
) -> Ranking:
    """The fastest plans of a model on a machine that fit into its memory, each verified by a dry run.

    `example_batch` is what the model is called with: a tensor, a tuple or a dict. `devices` are as many as the machine
    has, `memory` is the machine's own, unless others are given. `mode` is "train" (forward, backward and a step of the
    `optimizer`), "prefill" or "decode" (forward only, of the batch that is given). `loss(model, batch)` gives the loss
    of a batch on the mesh; without it, it is the loss that the model returns, or the mean of its first result. The
    module may be on `meta`, and is left as it is.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = autoplan(model, torch.ones(8, 64), "t3000")
    >>> found.best.time == min(each.time for each in found)
    True
    """
    task = make_task(module, example_batch, machine, devices, memory, mode=mode, loss=loss, optimizer=optimizer)
    return rank(Search(task, progress or (lambda line: None)), _positive("keep", keep))


def rank(search: Search, keep: int = KEPT) -> Ranking:
    """Run a search, and give back what it has found, in order."""
    verified = search.run(keep)
    if not verified:
        raise nothing_fits(search)
    best = verified[0].run
    whole = search.trials.folded.whole
    candidates = tuple(
        Candidate(
            each.recipe.title,
            each.mesh,
            each.recipe.plan(whole, each.mesh),
            each.run,
            "" if each.run is best else explain_difference(each.run, best),
            each.recipe.stages if isinstance(each.recipe, Staged) else None,
            loss_of(search.task) if isinstance(each.recipe, Staged) else None,
        )
        for each in verified
    )
    refused = [f"{what} on {mesh}: {error}" for (mesh, what), error in search.trials.refused.items()]
    if search.trials.unfolded is not None:
        refused.append(f"the model with fewer blocks; each plan was run with all of them: {search.trials.unfolded!r}")
    return Ranking(candidates, len(search.found), tuple(refused))


def make_task(
    module: nn.Module, batch: Any, machine: Given, devices: int | None = None, memory: float | None = None, **more: Any
) -> Task:
    """What a search is about, from the arguments of `autoplan`, which are checked."""
    expect("module", module, nn.Module, fix="give a torch.nn.Module")
    refuse_placed(module)
    for name in ("loss", "optimizer"):
        if more.get(name) is not None and not callable(more[name]):
            raise ArgumentError(f"{name}={more[name]!r:.80} is no function", fix=_FUNCTIONS[name])
    found = as_machine(machine)
    if more.get("mode", "train") == "train" and not any(each.requires_grad for each in module.parameters()):
        raise ArgumentError(
            f"this {type(module).__name__} has no parameters to train", fix='mode="prefill" plans for inference'
        )
    count = _count(found) if devices is None else _positive("devices", devices)
    return Task(module, batch, found, count, memory_on(found, memory), **more)


def _count(machine: Machine) -> int:
    if not machine.axes:
        raise ArgumentError(f"machine {machine.name!r} does not say how many devices it has", fix="give devices=8")
    return math.prod(axis.size for axis in machine.axes)


def _positive(what: str, value: int) -> int:
    expect(what, value, int, fix=f"give {what}=8")
    if value < 1:
        raise ArgumentError(f"{what}={value} is less than one", fix=f"give {what}=8")
    return value
