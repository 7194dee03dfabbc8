"""A training step of the example GPT on a mesh, beside the same step of the same model on dense torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from examples.transformer import GPT, PLANS, Text, Trainer

import meshloom as loom
from benchmarks import goals
from benchmarks.goals import Goal
from benchmarks.timing import Work
from benchmarks.works import Pair, Spec, check_models
from meshloom import Plan, Shard

WIDTH, HEADS, HIDDEN, LAYERS = 128, 8, 256, 2
ROWS, LENGTH = 128, 32  # a row for every device
DATA = Plan(batch={"dp": Shard(0)})


def works(devices: Sequence[int]) -> list[Spec]:
    """The step, data-parallel on every number of devices and tensor-parallel on (2, 4)."""
    listed = [_spec("data-parallel", (count,), ("dp",), DATA, goals.GPT_DATA) for count in devices]
    if 8 in devices:
        listed.append(_spec("tensor-parallel", (2, 4), ("dp", "tp"), PLANS["tensor"], goals.GPT_TENSOR))
    return listed


def _spec(detail: str, shape: tuple[int, ...], axes: tuple[str, ...], plan: Plan, goal: Goal) -> Spec:
    def make() -> Pair:
        return sides(loom.open_mesh(shape, axes=axes), plan)

    spec = Spec("GPT step", detail, shape, make, seconds=8.0)
    return spec.held_to(goal)


def sides(mesh: loom.Mesh, plan: Plan) -> Pair:
    """Both steps, after one of each whose parameters were compared."""
    text = Text()
    model = GPT(len(text.letters), WIDTH, HEADS, HIDDEN, LAYERS)
    [batch] = text.batches(1, ROWS, LENGTH)
    ours, dense = Trainer(model, mesh, plan), Trainer(copy.deepcopy(model))
    pair = Pair(step(ours, batch), step(dense, batch))
    check_models(pair, ours.model, dense.model, "GPT step")
    return pair


def step(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> Work:
    """Forward, backward and one AdamW update on a batch that is in its place."""
    letters, following = (trainer.placed(each) for each in batch)

    def run() -> Any:
        loss = trainer.model.loss(letters, following)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        return loss

    return run
