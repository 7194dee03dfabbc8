"""The GPT of examples/transformer.py: the dense losses on every plan, and exactly the expected communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpt
import meshloom as loom
import ranks

LAYERS = gpt.SIZES["layers"]
DP, TP = 2, 4
# what a device holds of the activations of one layer, in float32: its rows, all letters, all features
ACTIVATIONS = gpt.ROWS // DP * gpt.LENGTH * gpt.SIZES["width"] * 4

Moved = tuple[str, str, int]


@pytest.fixture(scope="module")
def dense() -> list[float]:
    return gpt.losses(None, 100)


def check_close(found: list[float], expected: list[float]) -> None:
    """Within 1e-4, on every step."""
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) < 1e-4, f"step {step}: {a} against {b}"


@pytest.mark.slow
@pytest.mark.parametrize("plan", gpt.PLANS)
def test_after_100_steps_the_loss_on_the_mesh_is_the_dense_loss(plan, dense):
    check_close(gpt.losses(plan, 100), dense)


def test_the_model_learns(dense):
    assert sum(dense[-10:]) / 10 < dense[0] - 1


def test_another_order_of_batches_would_be_noticed(dense):
    with pytest.raises(AssertionError, match="step 0"):
        check_close(gpt.losses("tensor", 3, seed=5), dense[:3])


def step_of(plan: str) -> tuple[gpt.Trainer, loom.runtime.Log]:
    """What one step of training communicates."""
    text, trainer = gpt.trainer(plan)
    (batch,) = text.batches(1, gpt.ROWS, gpt.LENGTH)
    with loom.record() as log:
        trainer.step(*batch)
    assert not log.fallbacks and not log.pending
    return trainer, log


def told(log: Any) -> list[tuple[str, str, str, str, int]]:
    return [(event.phase, event.call, event.kind, event.axis, event.bytes) for event in log]


def all_reduce(size: int, devices: int) -> int:
    return 2 * size * (devices - 1) // devices


def gradients_over_dp(trainer: gpt.Trainer) -> list[Moved]:
    """One all-reduce per parameter, of the part that a device holds, in any order."""
    held = [each.topology.local_bytes for each in trainer.model.parameters()]
    return sorted(("all_reduce", "dp", all_reduce(size, DP)) for size in held)


def gradients_over_both(trainer: gpt.Trainer) -> list[Moved]:
    """Per parameter: scattered over the long axis, a part of it summed over the short one, gathered again; sorted."""
    found: list[Moved] = []
    for parameter in trainer.model.parameters():
        size = parameter.numel() * 4
        part = size // TP
        found += [("reduce_scatter", "tp", size - part), ("all_reduce", "dp", all_reduce(part, DP))]
        found += [("all_gather", "tp", size - part)]
    return sorted(found)


def moves(lines: list[tuple[str, str, str, str, int]]) -> list[Moved]:
    return [(kind, axis, size) for _, _, kind, axis, size in lines]


def test_one_tensor_parallel_step_communicates_what_an_expert_expects():
    trainer, log = step_of("tensor")
    lines = told(log)
    over_tp = ("linear", "all_reduce", "tp", all_reduce(ACTIVATIONS, TP))
    # after `out` and after `down`, the row-parallel weights
    assert lines[: 2 * LAYERS] == [("forward", *over_tp)] * (2 * LAYERS)
    # the head is replicated and needs nothing; the mean of the loss is a sum and a count, of 4 B each
    loss = ("forward", "cross_entropy", "all_reduce", "dp", all_reduce(4, DP))
    assert lines[2 * LAYERS : 2 * LAYERS + 2] == [loss] * 2
    # before `up` and before `qkv`, the column-parallel weights, on the way back
    assert lines[2 * LAYERS + 2 : 4 * LAYERS + 2] == [("backward", *over_tp)] * (2 * LAYERS)
    # and each parameter's gradient once, also that of the embedding, which is used twice
    rest = lines[4 * LAYERS + 2 :]
    assert sorted(moves(rest)) == gradients_over_dp(trainer)
    assert {phase for phase, *_ in rest} == {"backward"} and len(rest) == 2 + 6 * LAYERS


def test_one_data_parallel_step_reduces_gradients_and_the_loss_and_nothing_else():
    trainer, log = step_of("data")
    lines = told(log)
    loss = [line for line in lines if line[1] == "cross_entropy"]
    assert moves(loss) == [("all_reduce", "dp", all_reduce(4, DP))] * 2 + [("all_reduce", "tp", all_reduce(4, TP))] * 2
    assert sorted(moves([line for line in lines if line not in loss])) == gradients_over_both(trainer)


def test_one_sequence_parallel_step_sends_keys_and_values_around_the_ring_and_gathers_none():
    trainer, log = step_of("sequence")
    lines = told(log)
    attention = [line for line in lines if line[1] == "scaled_dot_product_attention"]
    forward = moves([line for line in attention if line[0] == "forward"])
    backward = moves([line for line in attention if line[0] == "backward"])
    part = ACTIVATIONS // TP  # of the keys, or of the values
    around = [("shift", "tp", part)] * ((TP - 1) * LAYERS)
    assert forward == around * 2
    # on the way back keys and values go around again, and their gradients with them
    assert backward == around * 4
    loss = [line for line in lines if line[1] == "cross_entropy"]
    assert [axis for _, axis, _ in moves(loss)] == ["dp", "dp", "tp", "tp"]
    others = [line for line in lines if line not in loss and line not in attention]
    assert sorted(moves(others)) == gradients_over_both(trainer)


def test_a_2d_tensor_parallel_step_keeps_every_weight_in_eighths():
    trainer, log = step_of("tensor-2d")
    weights = {name: each for name, each in trainer.model.named_parameters() if each.ndim == 2 and "blocks" in name}
    assert len(weights) == 4 * LAYERS
    for name, weight in weights.items():
        assert weight.topology.local_bytes * DP * TP == weight.numel() * 4, name
        assert weight.grad.placements == weight.placements, name
    over_tp = [line for line in told(log) if line[0] == "forward" and line[3] == "tp"]
    assert [(call, kind) for _, call, kind, _, _ in over_tp] == [("linear", "all_reduce")] * (2 * LAYERS)
    # no weight is gathered: what moves on the way forward are activations
    assert {kind for phase, _, kind, _, _ in told(log) if phase == "forward"} == {"all_reduce"}


# of two processes each holds a row of the mesh, of four a row of two
SPLITS = {2: (2, 1), 4: (2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("count", SPLITS)
def test_real_processes_give_the_same_losses_and_one_call_per_bucket(count, dense):
    plans = ["tensor", "sequence"]
    for losses, calls, split in ranks.run(count, "gpt:on_a_rank", plans, 20, timeout=240):
        assert split == SPLITS[count]
        for plan in plans:
            check_close(losses[plan], dense[:20])
        # the sum and the count of the loss in one, all gradients in one; four per layer where processes split tp
        layers = 4 * LAYERS if SPLITS[count][1] > 1 else 0
        assert calls == {"all_reduce of 2": 1 + 1 + layers}


def test_the_text_is_sampled_alike_from_the_mesh_and_from_dense():
    written = []
    for plan in (None, "tensor"):
        text, trainer = gpt.trainer(plan)
        for batch in text.batches(3, gpt.ROWS, gpt.LENGTH):
            trainer.step(*batch)
        written.append(text.sample(trainer.dense(), "The ", 12, gpt.LENGTH))
    assert written[0] == written[1] and len(written[0]) == 16


def test_a_parameter_lies_where_the_first_pattern_that_fits_puts_it():
    _, trainer = gpt.trainer("tensor")
    names = dict(trainer.model.named_parameters())
    assert names["blocks.1.attention.qkv.weight"].topology.notation == "f32[96, 32](R, S(0))"
    assert names["blocks.0.feed.down.weight"].topology.notation == "f32[32, 48](R, S(1))"
    assert names["embedding.weight"].placements == (loom.Replicate(), loom.Replicate())
    assert isinstance(trainer.dense().norm.weight, torch.nn.Parameter)
