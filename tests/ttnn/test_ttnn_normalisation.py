"""Softmax, norms and losses against torch on every device's part, and the distributed pairs against whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import OperandError
from ttnn_cases import check_claim, check_op, check_parts, composed, distributed, each_device, label, tensor_of
from ttnn_draws import DTYPES, Grid, P, R, S, blocks, grids


@settings(max_examples=40, deadline=None)
@given(data=st.data(), grid=grids(), dim=st.integers(-3, 2))
def test_softmax_is_torchs_on_every_device(data: st.DataObject, grid: Grid, dim: int) -> None:
    shape = tuple(data.draw(st.sampled_from([1, 5, 33])) for _ in range(3))
    x = tensor_of(data.draw(blocks(grid, shape, -9, 9)), grid, dtype=data.draw(st.sampled_from(DTYPES)))
    check_op(ttnn.softmax(x, dim), lambda part: part.softmax(dim), x)
    assert ttnn.softmax(x, dim).dtype is x.dtype


def test_softmax_in_place_scaled_and_masked() -> None:
    grid, values = (2,), torch.rand(2, 1, 2, 4, 6)
    mask = tensor_of(torch.where(torch.rand(1, 1, 1, 4, 6) > 0.5, 0.0, -1e9), grid)

    def fresh() -> Any:
        return tensor_of(values.clone(), grid)

    x = fresh()
    check_op(ttnn.scale_mask_softmax(x, 0.5, mask), lambda p, m: (p * 0.5 + m).softmax(-1), x, mask)
    check_op(ttnn.scale_mask_softmax(x), lambda p: p.softmax(-1), x)
    for name, wanted in (
        ("softmax_in_place", lambda p, m: p.softmax(-1)),
        ("scale_mask_softmax_in_place", lambda p, m: (p * 0.5 + m).softmax(-1)),
        ("scale_causal_mask_hw_dims_softmax_in_place", lambda p, m: (p * 0.5 + m).softmax(-1)),
    ):
        y = fresh()
        found = getattr(ttnn, name)(y) if name == "softmax_in_place" else getattr(ttnn, name)(y, 0.5, mask)
        assert found is y
        check_op(y, wanted, fresh(), mask)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), grid=grids(), with_bias=st.booleans(), tiled=st.booleans())
def test_norms_of_rows_are_torchs_on_every_device(
    data: st.DataObject, grid: Grid, with_bias: bool, tiled: bool
) -> None:
    width = data.draw(st.sampled_from([32, 64] if tiled else [5, 33]))
    x = tensor_of(data.draw(blocks(grid, (2, 3, width))), grid, dtype=data.draw(st.sampled_from(DTYPES)))
    shape = (1, 1, width // 32, 32) if tiled else (width,)
    weight, bias = (tensor_of(data.draw(blocks(grid, shape)), grid) for _ in range(2))
    extra = tensor_of(data.draw(blocks(grid, (2, 3, width))), grid)
    given_bias = {"bias": bias} if with_bias else {}

    def layer(p: Any, w: Any, b: Any, e: Any) -> torch.Tensor:
        return F.layer_norm(p + e, (width,), w.flatten(), b.flatten() if with_bias else None, 1e-5)

    def rms(p: Any, w: Any, b: Any, e: Any) -> torch.Tensor:
        found = F.rms_norm(p + e, (width,), w.flatten(), 1e-5)
        return found + b.flatten() if with_bias else found

    for name, wanted in (("layer_norm", layer), ("rms_norm", rms)):
        found = getattr(ttnn, name)(x, epsilon=1e-5, weight=weight, residual_input_tensor=extra, **given_bias)
        assert found.dtype is x.dtype
        check_op(found, wanted, x, weight, bias, extra, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid,axis", [((4,), 0), ((2, 4), 1), ((2, 2), 0)])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_distributed_pair_is_the_norm_of_whole_rows(name: str, grid: Grid, axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(1, 1, 8, 32, generator=generator) * 2 - 0.7
    gamma, beta = (torch.rand(32, generator=generator) for _ in range(2))
    cut = [S(3) if each == axis else R for each in range(len(grid))]
    row = [S(0) if each == axis else R for each in range(len(grid))]
    x, weight, bias = distributed(whole, grid, cut), distributed(gamma, grid, row), distributed(beta, grid, row)
    pre, post = getattr(ttnn, f"{name}_pre_all_gather"), getattr(ttnn, f"{name}_post_all_gather")
    stats = pre(x, dtype=ttnn.float32)
    tiles = 1 if name == "rms_norm" else 2
    assert stats.shape == [1, 1, 8, 32 * tiles] and label(stats) == cut
    gathered = distributed(composed(stats), grid, [R] * len(grid))
    found = post(x, gathered, epsilon=1e-5, weight=weight, bias=bias)
    wanted = F.layer_norm(whole, (32,), gamma, beta, 1e-5)
    if name == "rms_norm":
        wanted = F.rms_norm(whole, (32,), gamma, 1e-5) + beta
    assert label(found) == cut and check_claim(found, wanted)
    assert not torch.allclose(composed(post(x, stats, epsilon=1e-5, weight=weight, bias=bias)), wanted, atol=1e-3)


def test_statistics_that_are_no_tiles_are_refused() -> None:
    x = tensor_of(torch.rand(1, 4, 32), (2,))
    with pytest.raises(OperandError, match="statistics of width 31 are not whole tiles of 32"):
        ttnn.rms_norm_post_all_gather(x, tensor_of(torch.rand(1, 4, 31), (2,)))
    with pytest.raises(OperandError, match="31 elements, the last dim of the input 32"):
        ttnn.rms_norm(x, weight=tensor_of(torch.rand(1, 31), (2,)))


def test_group_norm_is_torchs_with_channels_last() -> None:
    grid = (2, 2)
    x = tensor_of(torch.rand(2, 1, 3, 1, 20, 8), grid)
    weight, bias = tensor_of(torch.rand(1, 2, 8), grid), tensor_of(torch.rand(1, 2, 1, 1, 1, 32), grid)

    def wanted(p: Any, w: Any, b: Any) -> torch.Tensor:
        turned = p.squeeze(1).mT
        return F.group_norm(turned, 4, w, b.flatten()[:8], 1e-5).mT.unsqueeze(1)

    check_op(
        ttnn.group_norm(x, num_groups=4, epsilon=1e-5, weight=weight, bias=bias), wanted, x, weight, bias, atol=1e-4
    )
    with pytest.raises(OperandError, match="8 channels are not 3 equal groups"):
        ttnn.group_norm(x, num_groups=3)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_is_torchs_and_training_writes_its_statistics(training: bool) -> None:
    grid = (2,)
    x = tensor_of(torch.rand(2, 4, 3, 5, 5), grid)
    mean, var, weight, bias = (tensor_of(torch.rand(1, 1, 3, 1, 1) + 0.5, grid) for _ in range(4))
    before = [each.block.clone() for each in (mean, var)]

    def wanted(which: int) -> Any:
        def call(p: Any, w: Any, b: Any) -> torch.Tensor:
            kept = [each[0].flatten().clone() for each in before]
            found = F.batch_norm(p, *kept, w.flatten(), b.flatten(), training, 0.1, 1e-5)
            return (found, *(each.reshape(1, 3, 1, 1) for each in kept))[which]

        return call

    found = ttnn.batch_norm(x, running_mean=mean, running_var=var, training=training, weight=weight, bias=bias)
    check_op(found, wanted(0), x, weight, bias, atol=1e-4)
    check_op(mean, wanted(1), x, weight, bias)
    check_op(var, wanted(2), x, weight, bias)
    with pytest.raises(OperandError, match="running_mean and running_var must be defined in evaluation mode"):
        ttnn.batch_norm(x)


@pytest.mark.parametrize("name,function", [("l1_loss", F.l1_loss), ("mse_loss", F.mse_loss)])
@pytest.mark.parametrize("mode", ["NONE", "SUM", "MEAN"])
def test_losses_are_torchs(name: str, function: Any, mode: str) -> None:
    a, b = (tensor_of(torch.rand(2, 3, 4), (2,)) for _ in range(2))
    found = getattr(ttnn, name)(a, b, reduction=ttnn.LossReductionMode[mode])
    check_op(found, lambda x, y: function(x, y, reduction=mode.lower()), a, b)


def test_a_loss_over_a_sharded_batch_leaves_terms() -> None:
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    x, y = distributed(a, (2,), [S(0)]), distributed(b, (2,), [S(0)])
    total = ttnn.mse_loss(x, y, reduction=ttnn.LossReductionMode.MEAN)
    assert label(total) == [P("mean")] and check_claim(total, F.mse_loss(a, b))


def test_softmax_over_a_sharded_dim_stands_side_by_side() -> None:
    x = distributed(torch.rand(4, 6), (2,), [S(1)])
    found = ttnn.softmax(x, -1)
    assert label(found) == [S(1)] and label(ttnn.softmax(distributed(torch.rand(4, 6), (2,), [P()]))) == [P("unknown")]
    check_parts(found, each_device(lambda part: part.softmax(-1), x))


def test_group_norm_is_not_the_same_everywhere_if_its_weight_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 1, 6, 8, generator=generator), torch.randn(1, 1, 2, 8, generator=generator)
    cut = distributed(weight, (2, 2), [R, S(2)])
    found = ttnn.group_norm(distributed(x, (2, 2), [S(0), R]), num_groups=2, weight=cut)
    assert found.tensor_topology().placements() == [S(0), P("unknown")]
    alike = distributed(torch.ones(1, 1, 1, 8), (2, 2), [R, R])
    scaled = ttnn.group_norm(distributed(x, (2, 2), [S(0), R]), num_groups=2, weight=alike)
    assert scaled.tensor_topology().placements() == [S(0), R]


def test_batch_norm_refuses_statistics_that_are_not_of_its_channels() -> None:
    x = tensor_of(torch.ones(2, 2, 1, 3, 4, 3), (2, 2))
    flat = tensor_of(torch.ones(2, 2, 3), (2, 2))
    with pytest.raises(OperandError, match=r"\[1, 3, 1, 1\]"):
        ttnn.batch_norm(x, running_mean=flat, running_var=flat)
