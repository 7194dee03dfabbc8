"""The residual network of examples/cnn.py: losses and running statistics of dense, and what it communicates."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import meshloom as loom
import ranks

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from cnn import PLAN, ResNet, Trainer, accuracy, batches, largest_difference, statistics

STEPS, ROWS = 40, 32


def made() -> ResNet:
    torch.manual_seed(0)
    return ResNet(width=4)


def trained(trainer: Trainer, steps: int = STEPS, rows: int = ROWS) -> list[float]:
    return [trainer.step(*batch) for batch in batches(steps, rows)]


def on_mesh(devices: int) -> Trainer:
    return Trainer(made(), loom.open_mesh((devices,), axes=("dp",)), PLAN)


def on_a_rank(devices: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """For a rank: losses, running statistics, and whether processes split the mesh."""
    trainer = on_mesh(devices)
    return trained(trainer, steps), statistics(trainer.dense()), trainer.mesh.is_split


@pytest.fixture(scope="module")
def dense() -> tuple[Trainer, list[float]]:
    trainer = Trainer(made())
    return trainer, trained(trainer)


def check_close(found: list[float], expected: list[float]) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) < 1e-4, f"step {step}: {a} against {b}"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 5])  # 32 pictures over 5 are 7, 7, 7, 7, 4
def test_losses_and_running_statistics_are_those_of_dense(devices, dense):
    trainer = on_mesh(devices)
    check_close(trained(trainer), dense[1])
    assert len(statistics(trainer.model)) == 2 * 5
    assert largest_difference(trainer.dense(), dense[0].model) < 1e-4


@pytest.mark.slow
def test_the_network_learns_to_tell_directions(dense):
    trainer, losses = dense
    assert losses[-1] < losses[0] - 0.4
    (unseen,) = batches(1, 128, seed=9)
    assert accuracy(copy.deepcopy(trainer.model), *unseen) > 0.5  # of four directions


def test_statistics_of_a_part_of_the_batch_would_be_noticed():
    ours, theirs = on_mesh(8), Trainer(made())
    (batch,) = batches(1, ROWS)
    ours.step(*batch)
    theirs.step(*(each[: ROWS // 8] for each in batch))
    assert largest_difference(ours.dense(), theirs.model) > 1e-2


def test_one_step_reduces_statistics_gradients_and_the_loss_and_moves_no_activations():
    trainer = on_mesh(8)
    first, second = batches(2, ROWS)
    trainer.step(*first)
    with loom.record() as log:
        trainer.step(*second)
    assert {(event.kind, event.axis) for event in log} == {("all_reduce", "dp")}
    calls = Counter((event.call, event.phase) for event in log)
    parameters = Counter(type(layer) for layer in trainer.model.modules() for _ in layer.parameters(recurse=False))
    norms = parameters[nn.BatchNorm2d] // 2
    assert norms == 5
    # sum and count of the loss; mean and variance of each norm, and on the way back their gradients
    assert calls.pop(("cross_entropy", "forward")) == 2
    assert calls.pop(("batch_norm", "forward")) == 2 * norms
    # a norm's own weight and bias come with its backward
    assert calls.pop(("batch_norm", "backward")) == 2 * norms + parameters[nn.BatchNorm2d]
    assert calls.pop(("conv2d", "backward")) == parameters[nn.Conv2d] == 6
    assert calls.pop(("linear", "backward")) == parameters[nn.Linear] == 2
    assert not calls


@pytest.mark.slow
def test_two_real_processes_have_the_statistics_of_the_whole_batch():
    theirs = Trainer(made())
    expected = trained(theirs, 6)
    for losses, found, split in ranks.run(2, "test_examples_cnn:on_a_rank", 4, 6, timeout=240):
        assert split
        check_close(losses, expected)
        for name, value in statistics(theirs.model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
