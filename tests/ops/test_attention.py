"""Attention over sequences that lie apart: a ring equals dense, forward and backward, and says what it passes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from forms.net import Net
from forms.whole import ring_attention
from meshloom import Mesh
from meshloom.ops import Call

attend = F.scaled_dot_product_attention


def qkv(queries: int, keys: int, heads: int = 2, groups: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = ((2, heads * groups, queries, 4), (2, heads, keys, 4), (2, heads, keys, 6))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check_alike(mesh: Mesh, placements: str, dense: list[torch.Tensor], **options: Any) -> Any:
    """Values and gradients equal dense ones; what was recorded."""
    theirs = [each.clone().requires_grad_() for each in dense]
    mine = [loom.distribute(each, mesh, placements).requires_grad_() for each in dense]
    with loom.record() as log:
        found = attend(*mine, **options)
        found.square().sum().backward()
    attend(*theirs, **options).square().sum().backward()
    torch.testing.assert_close(found.to_torch().detach(), attend(*dense, **options))
    for ours, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), expected.grad)
    return log


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (10, 10), (7, 5), (3, 9), (4, 1)])
@pytest.mark.parametrize("placements", ["S(2)", "S(2), S(2)", "S(1), S(2)", "S(0), S(2)"])
def test_sequences_that_lie_apart_equal_dense(placements: str, queries: int, keys: int, causal: bool) -> None:
    mesh = Mesh(sp=4) if "," not in placements else Mesh(dp=2, sp=4)
    check_alike(mesh, placements, qkv(queries, keys), is_causal=causal)


def test_heads_in_groups_and_masks_go_around_the_ring_too() -> None:
    dense = qkv(7, 5, heads=2, groups=3)
    check_alike(Mesh(sp=4), "S(2)", dense, enable_gqa=True)
    for shape in ((7, 5), (1, 5), (7, 1), (2, 1, 1, 5)):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        check_alike(Mesh(sp=4), "S(2)", qkv(7, 5), attn_mask=mask)
        check_alike(Mesh(sp=4), "S(2)", qkv(7, 5), attn_mask=mask > -3)


def test_keys_and_values_are_passed_on_and_never_gathered() -> None:
    log = check_alike(Mesh(sp=4), "S(2)", qkv(8, 8))
    forward = [str(event.collective) for event in log if event.phase == "forward" and event.call.startswith("scaled")]
    # three rounds: 2 x 2 x 2 keys of 4 numbers, and as many values of 6
    assert sorted(forward) == ["shift over sp of 4: 128 B"] * 3 + ["shift over sp of 4: 192 B"] * 3
    backward = [event.kind for event in log if event.phase == "backward" and event.call.startswith("scaled")]
    assert backward == ["shift"] * 12
    assert not [event for event in log if event.kind == "all_gather"]


def test_replicated_queries_ask_all_keys_where_they_lie() -> None:
    query, key, value = qkv(1, 9)
    mesh = Mesh(sp=4)
    placed = [loom.distribute(each, mesh, where) for each, where in ((query, "R"), (key, "S(2)"), (value, "S(2)"))]
    (plan,) = loom.explain(lambda: attend(*placed)).plans
    assert [row.label for row in plan.rows] == ["keys"]
    assert [(each.kind, each.op) for each in plan.forward] == [("all_reduce", op) for op in ("max", "sum", "sum")]
    torch.testing.assert_close(attend(*placed).to_torch(), attend(query, key, value))


def test_whole_groups_of_heads_stay_where_they_are() -> None:
    dense = qkv(5, 5, heads=4, groups=2)
    placed = [loom.distribute(each, Mesh(tp=4), "S(1)") for each in dense]
    with loom.communication("forbid"):
        found = attend(*placed, enable_gqa=True, is_causal=True)
    torch.testing.assert_close(found.to_torch(), attend(*dense, enable_gqa=True, is_causal=True))


def test_dropout_on_a_ring_draws_the_same_weights_for_any_placement() -> None:
    dense, found = qkv(6, 6), []
    for placements in ("R", "S(2)", "S(1)"):
        torch.manual_seed(3)
        found.append(attend(*(loom.distribute(each, Mesh(sp=2), placements) for each in dense), dropout_p=0.4))
    for each in found[1:]:
        torch.testing.assert_close(each.to_torch(), found[0].to_torch())


@pytest.mark.parametrize("causal", [False, True])
def test_the_blockwise_form_has_the_gradients_of_dense_attention(causal: bool) -> None:
    dense = [each.requires_grad_() for each in qkv(7, 5)]
    parts = [[each.requires_grad_() for each in leaf.detach().tensor_split(3, 2)] for leaf in dense]
    call = Call("attention", (), {"scale": None, "is_causal": causal, "enable_gqa": False})
    found = torch.cat(ring_attention(call, [list(each) for each in zip(*parts, strict=True)], Net()), 2)
    expected = attend(*dense, is_causal=causal)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for pieces, whole in zip(parts, dense, strict=True):
        torch.testing.assert_close(torch.cat([each.grad for each in pieces], 2), whole.grad)


@pytest.mark.parametrize("on_mesh", [(0,), (1,), (2,), (0, 2), (3,)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_attention_with_dropout_takes_plain_operands_beside_those_on_the_mesh(on_mesh: Any, options: Any) -> None:
    mask = None if options else torch.ones(6, 6, dtype=torch.bool).tril()
    dense = [*qkv(6, 6, groups=2 if options.get("enable_gqa") else 1), mask]
    if mask is None and 3 in on_mesh:
        pytest.skip("no mask")
    found = []
    for places in (on_mesh, (0, 1, 2)):
        torch.manual_seed(3)
        given = [loom.distribute(each, Mesh(sp=2), "R") if i in places else each for i, each in enumerate(dense)]
        found.append(attend(*given, dropout_p=0.4, **options))
    torch.testing.assert_close(found[0].to_torch(), found[1].to_torch())
    assert found[0].to_torch().shape == (2, dense[0].shape[1], 6, 6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("placements", ["R", "S(0)", "S(1)"])
def test_multihead_attention_takes_its_mask_on_the_mesh(
    training: bool, kind: Any, need_weights: bool, placements: str
) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x, mask = torch.randn(3, 5, 8), torch.randn(5, 5)
    mask = (mask > 0).logical_and(~torch.eye(5, dtype=torch.bool)) if kind == torch.bool else mask
    expected = module(x, x, x, attn_mask=mask, need_weights=need_weights)
    ours, held = loom.distribute(x, Mesh(w=2), "S(0)"), loom.distribute(mask, Mesh(w=2), placements)
    found = module(ours, ours, ours, attn_mask=held, need_weights=need_weights)
    torch.testing.assert_close(found[0].to_torch(), expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if need_weights:
        torch.testing.assert_close(found[1].to_torch(), expected[1])
