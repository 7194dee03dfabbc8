"""Norms and losses beyond the walk over the table: running statistics, modules, old arguments, what is communicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Mesh
from oracle import check_raw_gradient

MESH = Mesh(dp=2, tp=3)
PLACED = ("S(0), R", "S(0), S(0)", "R, S(1)", "S(1), S(0)", "S(2), S(0)", "R, R")


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("placements", PLACED)
def test_batch_norm_trains_on_the_global_batch_and_moves_its_running_statistics(placements: str) -> None:
    mine, theirs = nn.BatchNorm1d(5, momentum=0.3), nn.BatchNorm1d(5, momentum=0.3)
    with loom.record() as log:
        for step in range(3):
            value = dense(7, 5, 4) + step
            found, expected = mine(loom.distribute(value, MESH, placements)), theirs(value)
            torch.testing.assert_close(found.to_torch().detach(), expected.detach())
    assert "batch_norm" not in log.fallbacks
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))
    mine.eval(), theirs.eval()
    value = dense(7, 5, 4)
    torch.testing.assert_close(mine(loom.distribute(value, MESH, placements)).to_torch(), theirs(value))


def test_running_statistics_on_the_mesh_keep_their_placements() -> None:
    mean, spread = loom.zeros(6, mesh=MESH, placements="R, S(0)"), loom.ones(6, mesh=MESH, placements="R, S(0)")
    known = torch.zeros(6), torch.ones(6)
    value = dense(4, 6)
    F.batch_norm(loom.distribute(value, MESH, "S(0), S(1)"), mean, spread, training=True)
    F.batch_norm(value, *known, training=True)
    for mine, theirs in zip((mean, spread), known, strict=True):
        assert str(mine.placements[1]) == "S(0)"
        torch.testing.assert_close(mine.to_torch(), theirs)


def test_a_sharded_batch_all_reduces_two_sums_per_channel_and_sharded_channels_nothing() -> None:
    value = dense(8, 6, 4)
    x = loom.distribute(value, Mesh(w=2), "S(0)")
    (plan,) = loom.explain(lambda: F.batch_norm(x, None, None, training=True)).plans
    assert [str(each) for each in plan.forward] == ["all_reduce(sum) over w of 2: 24 B"] * 2
    by_channel = loom.distribute(value, Mesh(w=2), "S(1)")
    with loom.communication("forbid"):
        F.batch_norm(by_channel, None, None, training=True)


@pytest.mark.parametrize("placements", PLACED)
def test_instance_norm_equals_dense_with_and_without_statistics(placements: str) -> None:
    value = dense(7, 5, 4)
    x = loom.distribute(value, MESH, placements)
    weight = dense(5)
    torch.testing.assert_close(F.instance_norm(x, weight=weight).to_torch(), F.instance_norm(value, weight=weight))
    given = (torch.zeros(5), torch.ones(5))
    found = F.instance_norm(x, *given, use_input_stats=False)
    torch.testing.assert_close(found.to_torch(), F.instance_norm(value, *given, use_input_stats=False))
    mine, theirs = nn.InstanceNorm1d(5, track_running_stats=True), nn.InstanceNorm1d(5, track_running_stats=True)
    torch.testing.assert_close(mine(x).to_torch(), theirs(value))
    torch.testing.assert_close(mine.running_mean, theirs.running_mean)


def test_group_norm_keeps_whole_groups_on_a_device_and_gathers_otherwise() -> None:
    value = dense(2, 12, 3)
    x = loom.distribute(value, Mesh(w=2), "S(1)")
    with loom.communication("forbid"):
        F.group_norm(x, 4)
    found = F.group_norm(x, 3)  # a group of 4 channels would be cut
    torch.testing.assert_close(found.to_torch(), F.group_norm(value, 3))


LOSSES: dict[str, Any] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_a_loss_over_a_sharded_batch_is_one_number_all_reduced(name: str) -> None:
    loss = LOSSES[name]
    value, target = dense(7, 3), dense(3, 7).t().sigmoid().contiguous()
    x, y = (loom.distribute(each, Mesh(w=4), "S(0)") for each in (value, target))
    (plan,) = loom.explain(lambda: loss(x, y)).plans
    assert [each.kind for each in plan.forward] == ["all_reduce"] and plan.bytes <= 8
    torch.testing.assert_close(loss(x, y).to_torch(), loss(value, target))


def test_a_target_that_broadcasts_equals_dense() -> None:
    value, target = dense(7, 3), dense(1, 3)
    x = loom.distribute(value, MESH, "S(0), S(0)")
    for reduction in ("mean", "sum", "none"):
        expected = F.kl_div(value, target.sigmoid(), reduction=reduction if reduction != "mean" else "batchmean")
        found = F.kl_div(x, target.sigmoid(), reduction=reduction if reduction != "mean" else "batchmean")
        torch.testing.assert_close(found.to_torch(), expected)


def test_the_old_arguments_of_a_loss_are_left_to_torch() -> None:
    x = loom.distribute(dense(6, 3), MESH, "S(0), R")
    with pytest.warns(UserWarning, match="size_average"), loom.record() as log:
        found = F.mse_loss(x, dense(6, 3) * 2, size_average=False)
    assert dict(log.fallbacks) == {"mse_loss": 1}
    torch.testing.assert_close(found.to_torch(), F.mse_loss(dense(6, 3), dense(6, 3) * 2, reduction="sum"))


def test_an_unknown_reduction_is_refused_with_the_ways_there_are() -> None:
    x = loom.distribute(dense(6, 3), MESH, "S(0), R")
    with pytest.raises(loom.ArgumentError, match="reduction 'median' is not known"):
        F.mse_loss(x, x, reduction="median")


def test_softmin_is_the_softmax_of_the_negative() -> None:
    x = loom.distribute(dense(7, 3), MESH, "S(0), S(1)")
    torch.testing.assert_close(F.softmin(x, dim=1).to_torch(), F.softmin(dense(7, 3), dim=1))


def test_batch_norm_of_one_value_per_channel_is_refused_in_training_alone() -> None:
    module, x = nn.BatchNorm1d(5), loom.distribute(dense(1, 5, 1), MESH, "R, S(1)")
    with pytest.raises(loom.ShapeError, match=r"more than one value per channel and got \[1, 5, 1\]"):
        module(x)
    assert module.eval()(x).shape == (1, 5, 1)


def channels(function: Any, *lead: Any) -> Any:
    return lambda x, w, b, eps: function(x, *lead, weight=w, bias=b, eps=eps)


NORMS: dict[str, Any] = {
    "layer_norm": (lambda x, w, b, eps: F.layer_norm(x, (4,), w, b, eps), (3, 5, 4), 4),
    "rms_norm": (lambda x, w, b, eps: F.rms_norm(x, (4,), w, eps), (3, 5, 4), 4),
    "group_norm": (channels(F.group_norm, 3), (3, 6, 5), 6),
    "instance_norm": (lambda x, w, b, eps: F.instance_norm(x, weight=w, bias=b, eps=eps), (3, 5, 4), 5),
    "batch_norm": (lambda x, w, b, eps: F.batch_norm(x, None, None, w, b, training=True, eps=eps), (3, 5, 4), 5),
    "batch_norm in use": (
        lambda x, w, b, eps: F.batch_norm(x, torch.zeros(5), torch.arange(1.0, 6.0), w, b, eps=eps),
        (3, 5, 4),
        5,
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    "placements", ["S(0), R", "S(0), S(1)", "S(1), S(0)", "S(2), S(0)", "S(1), S(2)", "S(0), S(0)"]
)
@pytest.mark.parametrize("eps", [0.0, 1e-50, 1e-5])
def test_norms_of_padded_lines_have_finite_gradients_without_eps(name: str, placements: str, eps: float) -> None:
    run, shape, width = NORMS[name]
    eps = eps or (1e-60 if name == "batch_norm" else 0.0)  # torch refuses to train it without
    plain = [dense(*shape), dense(width), dense(width + 1)[1:].clone()]
    for each in plain:
        each.requires_grad_()
    seed = dense(*shape).flip(0)
    run(*plain, eps).backward(seed)
    ours = [loom.distribute(plain[0].detach(), MESH, placements).requires_grad_()]
    ours += [loom.distribute(each.detach(), MESH, "R, R").requires_grad_() for each in plain[1:]]
    run(*ours, eps).backward(seed)
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            check_raw_gradient(mine, name)
            torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 2, 2), (0, 5), (3, 5, 0), (1, 5, 0)], ids=str)
def test_batch_norm_of_an_empty_batch_is_empty_and_keeps_the_running_statistics(
    shape: tuple[int, ...], affine: bool, training: bool
) -> None:
    for mesh, placements in ((Mesh(w=1), "S(0)"), (Mesh(w=2), "S(0)"), (MESH, "S(1), S(0)"), (MESH, "R, R")):
        module = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(5, affine=affine).train(training)
        x = loom.zeros(*shape, mesh=mesh, placements=placements).requires_grad_()
        found = module(x)
        found.sum().backward()
        assert found.shape == shape and x.grad.shape == shape
        assert module.running_mean.tolist() == [0] * 5 and module.running_var.tolist() == [1] * 5
        assert all(each.grad.tolist() == [0] * 5 for each in module.parameters())


def test_batch_norm_of_an_empty_line_is_torchs() -> None:
    assert F.batch_norm(loom.zeros(0, mesh=MESH), torch.zeros(0), torch.zeros(0)).shape == (0,)


REFUSED: dict[str, Any] = {
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm in use": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "kl_div": lambda x: F.kl_div(x, x.float(), reduction="sum"),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "the mean of l1_loss": lambda x: F.l1_loss(x, x * 2),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", REFUSED)
def test_norms_and_losses_of_integers_are_refused_as_in_torch(name: str, dtype: torch.dtype) -> None:
    value = torch.arange(9).reshape(3, 3).to(dtype)
    if (name, dtype) != ("the mean of l1_loss", torch.bool):
        with pytest.raises(RuntimeError):
            REFUSED[name](value)
        for mesh, placements in ((Mesh(w=1), "R"), (Mesh(w=2), "S(0)"), (Mesh(w=2), "S(1)"), (MESH, "S(0), S(1)")):
            with pytest.raises(loom.errors.MeshloomError):
                REFUSED[name](loom.distribute(value, mesh, placements))


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "batch_norm", "instance_norm"])
def test_norms_of_complex_numbers_are_refused_as_in_torch(name: str) -> None:
    for placements in ("R, R", "S(0), R", "S(1), R"):
        with pytest.raises(loom.DTypeError, match="needs real floating-point numbers and got c64"):
            REFUSED[name](loom.distribute(torch.ones(3, 3, dtype=torch.complex64), MESH, placements))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8])
def test_an_l1_loss_of_integers_is_summed_as_int64(dtype: torch.dtype) -> None:
    one, other = (torch.tensor([3, 100, 7, 9, 50, 120, 2]).to(dtype).roll(step) for step in range(2))
    for placements in ("R, R", "S(0), R", "S(0), S(0)"):
        given = [loom.distribute(each, MESH, placements) for each in (one, other)]
        found, expected = (F.l1_loss(*each, reduction="sum") for each in (given, (one, other)))
        assert (found.dtype, found.item()) == (expected.dtype, expected.item())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_padding_has_no_poisson_loss_among_integers(dtype: torch.dtype, reduction: str) -> None:
    value, target = torch.tensor([0, 1, 1, 0, 1]).to(dtype), torch.arange(5)
    for placements in ("S(0), R", "S(0), S(0)"):
        given = [loom.distribute(each, MESH, placements) for each in (value, target)]
        found = F.poisson_nll_loss(*given, reduction=reduction)
        torch.testing.assert_close(found.to_torch(), F.poisson_nll_loss(value, target, reduction=reduction))


def test_local_response_norm_of_integers_is_torchs() -> None:
    value = torch.arange(12).reshape(1, 4, 3)
    found = F.local_response_norm(loom.distribute(value, MESH, "R, S(1)"), 2)
    torch.testing.assert_close(found.to_torch(), F.local_response_norm(value, 2))
