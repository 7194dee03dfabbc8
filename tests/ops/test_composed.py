"""Functions of torch.nn that are made of others: their ops come one by one, and a sharded batch is not gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Shard
from meshloom.tensor.torch_api.composed import COMPOSED

MESH = loom.Mesh(dp=2, tp=2)
ROWS = {"dp": Shard(0)}


def _placed(module: nn.Module, split: Callable[[str], Any]) -> nn.Module:
    module = copy.deepcopy(module)
    for name, each in list(module.named_parameters()):
        owner, _, which = name.rpartition(".")
        setattr(module.get_submodule(owner), which, loom.Parameter(each.detach(), MESH, split(name)))
    return module


def _same(ours: Any, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-5)


def _replicated(name: str) -> Any:
    return {}


def _tensor_parallel(name: str) -> Any:
    if "in_proj" in name or "linear1" in name:
        return {"tp": Shard(0)}
    return {"tp": Shard(1)} if name.endswith(("out_proj.weight", "linear2.weight")) else {}


@pytest.fixture
def batch() -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8)
    return x, loom.distribute(x, MESH, ROWS)


@pytest.mark.parametrize("split", [_replicated, _tensor_parallel])
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_multihead_attention_equals_dense_with_its_gradients_and_has_no_fallback(batch, split, options):
    x, ours = batch
    dense = nn.MultiheadAttention(8, 2, batch_first=True)
    held = _placed(dense, split)
    padding = torch.zeros(6, 5, dtype=torch.bool)
    padding[:, 4] = True
    expected = dense(x, x, x, key_padding_mask=padding, **options)
    with loom.record() as log:
        found = held(ours, ours, ours, key_padding_mask=padding, **options)
    assert not log.fallbacks
    assert found[0].placements[0] == Shard(0)
    _same(found[0], expected[0])
    if expected[1] is not None:
        _same(found[1], expected[1])
    expected[0].square().sum().backward()
    found[0].square().sum().backward()
    for mine, theirs in zip(held.parameters(), dense.parameters(), strict=True):
        _same(mine.grad, theirs.grad)


@pytest.mark.parametrize("masks", ["scores", "heads", "keys", "both", "causal", "none"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_takes_every_mask(batch, masks, need_weights):
    x, ours = batch
    dense = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    hidden = torch.rand(12, 5, 5) > 0.8
    options: dict[str, Any] = {
        "scores": {"attn_mask": hidden[0]},
        "heads": {"attn_mask": torch.randn(12, 5, 5)},
        "keys": {"key_padding_mask": hidden[:6, 0]},
        "both": {"attn_mask": torch.randn(5, 5), "key_padding_mask": hidden[:6, 0].float() * -9},
        "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
        "none": {},
    }[masks]
    expected = dense(x, x, x, need_weights=need_weights, **options)
    found = _placed(dense, _replicated)(ours, ours, ours, need_weights=need_weights, **options)
    _same(found[0], expected[0])
    assert not expected[0].isnan().any()
    assert (found[1] is None) == (expected[1] is None)
    if need_weights:
        _same(found[1], expected[1])


def test_multihead_attention_takes_one_sequence_other_widths_and_torchs_rare_options(batch):
    x, ours = batch
    for options in ({}, {"kdim": 3, "vdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        dense = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        held = _placed(dense, _replicated)
        cut = options.get("kdim", 8), options.get("vdim", 8)
        for given, mine in ((x, ours), (x[0], ours[0])):
            expected = dense(given, given[..., : cut[0]], given[..., : cut[1]])
            found = held(mine, mine[..., : cut[0]], mine[..., : cut[1]])
            _same(found[0], expected[0])
            _same(found[1], expected[1])


def test_a_hint_about_a_mask_that_is_not_given_is_refused(batch):
    _, ours = batch
    held = _placed(nn.MultiheadAttention(8, 2, batch_first=True), _replicated)
    with pytest.raises(loom.ArgumentError, match="is_causal is a hint about attn_mask"):
        held(ours, ours, ours, is_causal=True)


def test_a_batch_goes_through_an_encoder_layer_without_communication(batch):
    x, ours = batch
    dense = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    held = _placed(dense, _replicated)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for mode in (True, False):
        dense.train(mode)
        held.train(mode)
        with loom.communication("forbid"):
            found = held(ours, src_mask=causal, is_causal=True)
        _same(found, dense(x, src_mask=causal, is_causal=True))
        assert found.placements[0] == Shard(0)


def _pictures() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(6, 4, 6, 6)


CALLS: dict[str, Callable[[Any], Any]] = {
    "gumbel_softmax": lambda x: F.gumbel_softmax(x * 0 + 100 * torch.eye(6)[0], dim=-1),
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "lp_pool1d": lambda x: F.lp_pool1d(x[:, 0], 2.0, 2),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
    "lp_pool3d": lambda x: F.lp_pool3d(x[:, None], 2.0, 2),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x[:, 0], x[:, 1], x[:, 2] + 0.1),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x[:, 0, 0], (x[:, 1, 1] > 0.5).float()),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(
        x[:, 0, 0], x[:, 1, 1], x[:, 2, 2], distance_function=lambda a, b: (a - b).norm(dim=-1)
    ),
}


def test_every_composed_function_has_a_call_here():
    assert {*CALLS} == set(COMPOSED)


@pytest.mark.parametrize("name", CALLS)
def test_a_composed_function_equals_dense_and_gathers_nothing(name):
    x = _pictures()
    dense, ours = x.clone().requires_grad_(), loom.distribute(x, MESH, ROWS).requires_grad_()
    with loom.record() as log:
        found = CALLS[name](ours)
    assert not log.fallbacks and not log.kinds()["all_gather"]
    expected = CALLS[name](dense)
    _same(found, expected)
    expected.sum().backward()
    found.sum().backward()
    _same(ours.grad, dense.grad)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dropout_of_channels_keeps_or_drops_a_whole_channel_and_gathers_nothing(dims):
    module = getattr(nn, f"Dropout{dims}d")(0.25)
    x = loom.ones(40, 10, *(3,) * dims, mesh=MESH, placements=ROWS)
    with loom.communication("forbid"):
        found = module(x)
        module.eval()
        assert module(x) is x
    assert found.topology is x.topology
    channels = found.to_torch().flatten(2)
    assert (channels == channels[:, :, :1]).all()
    assert channels.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (channels[:, :, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.08)


def test_dropout_of_channels_drops_the_same_ones_for_any_placements():
    drawn = []
    for placements in ("R, R", "S(1), S(0)", "S(0), S(3)"):
        torch.manual_seed(3)
        drawn.append(F.dropout2d(loom.ones(8, 6, 2, 2, mesh=MESH, placements=placements), 0.5).to_torch())
    assert 0 < drawn[0].mean() < 2
    assert all(torch.equal(drawn[0], each) for each in drawn[1:])


def test_a_question_of_kind_gathers_nothing():
    x = loom.ones(4, 3, mesh=MESH, placements="S(0), S(1)")
    with loom.record() as log, loom.communication("forbid"):
        assert not (x.is_nested or x.is_quantized or x.is_sparse_csr or x.is_mkldnn)
        assert x.nbytes == 48
    assert not log.fallbacks
    with loom.record() as log:
        assert x.real.shape == (4, 3)
    assert list(log.fallbacks) == ["real"]
