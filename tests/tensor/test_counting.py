"""Counts by number, bags of rows, experts in groups: equal to dense, and nothing large is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh
from meshloom.tensor import quick

MESH = Mesh(dp=2, tp=4)


def place(dense: torch.Tensor, placements: str) -> loom.Tensor:
    return loom.distribute(dense, MESH, placements)


@pytest.mark.parametrize("placements", ["R, R", "S(0), R", "S(0), S(0)"])
def test_bincount_and_histc_are_those_of_dense_and_gather_nothing(placements):
    ids, x, w = torch.randint(0, 9, (40_003,)), torch.randn(40_003), torch.rand(40_003)
    with loom.record() as seen:
        torch.testing.assert_close(torch.bincount(place(ids, placements)).to_torch(), torch.bincount(ids))
        weighted = torch.bincount(place(ids, placements), place(w, placements), minlength=12)
        torch.testing.assert_close(weighted.to_torch(), torch.bincount(ids, w, minlength=12), rtol=1e-4, atol=0)
        for options in ({}, {"bins": 7, "min": -1, "max": 1}):
            torch.testing.assert_close(
                torch.histc(place(x, placements), **options).to_torch(), torch.histc(x, **options)
            )
    assert all(event.collective.bytes < 2000 for event in seen.events)  # counts and bounds, not the 160 KB of elements


def test_elements_at_the_edges_of_bins_are_counted_as_torch_counts_them():
    for bins in (7, 100, 333):
        edges = torch.linspace(-0.3, 1.1, bins + 1)[1:-1]
        x = torch.cat([edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0))])
        mine = torch.histc(place(x, "S(0), S(0)"), bins, -0.3, 1.1)
        assert torch.equal(mine.to_torch(), torch.histc(x, bins, -0.3, 1.1))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placements", ["R, R", "S(0), R", "S(1), S(0)"])
def test_embedding_bag_is_that_of_dense(mode, placements):
    table = torch.randn(10, 6)
    ids, offsets = torch.randint(0, 10, (14,)), torch.tensor([0, 3, 3, 9])
    ours = place(table, placements)
    for args in ((ids.reshape(7, 2), None), (ids, offsets)):
        mine = F.embedding_bag(args[0], ours, args[1], mode=mode)
        torch.testing.assert_close(mine.to_torch(), F.embedding_bag(args[0], table, args[1], mode=mode))


def test_gumbel_softmax_keeps_the_placements_and_sums_to_one():
    logits = place(torch.randn(8, 5), "S(0), R")
    soft, hard = F.gumbel_softmax(logits, dim=1), F.gumbel_softmax(logits, hard=True, dim=1)
    assert soft.placements == hard.placements == logits.placements
    torch.testing.assert_close(soft.sum(1).to_torch(), torch.ones(8))
    assert ((hard.to_torch() - 1).abs() < 1e-6).sum() == 8


@pytest.mark.parametrize("call", [torch._grouped_mm, F.grouped_mm])
def test_experts_that_lie_apart_stay_there(call):
    tokens, experts = torch.randn(12, 8, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
    offs = torch.tensor([2, 5, 5, 12], dtype=torch.int32)
    w = place(experts.detach(), "R, S(0)").requires_grad_()
    with loom.record() as seen:
        y = call(tokens.detach(), w, offs=offs)
    assert [event.collective.kind for event in seen.events] == ["all_reduce"]
    dense = torch._grouped_mm(tokens, experts, offs=offs)
    torch.testing.assert_close(y.to_torch(), dense)
    y.square().sum().backward()
    dense.square().sum().backward()
    torch.testing.assert_close(w.grad.to_torch(), experts.grad)
    assert w.grad.placements == w.placements


def test_padding_among_experts_is_no_expert_beside_a_sum_that_is_kept():
    tokens, experts = torch.randn(6, 2), torch.randn(3, 2, 2)  # three experts on two devices
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    parts = place(tokens, "R, R").redistribute("P(sum), R")
    with loom.with_output("P(sum), R"), loom.choose(**{parts.mesh.axes[1]: "experts"}):
        y = torch._grouped_mm(parts, place(experts, "R, S(0)"), offs=place(offs, "R, R"))
    torch.testing.assert_close(y.to_torch(), torch.cat([tokens[:2] @ experts[0], tokens[2:] @ experts[2]]))


def test_cat_skips_an_empty_line_and_leaves_the_others_where_they_are():
    x = place(torch.randn(4, 8), "S(1), R")
    y = torch.cat([torch.tensor([]), x, x], dim=-2)
    assert y.placements == x.placements
    torch.testing.assert_close(y.to_torch(), torch.cat([x.to_torch()] * 2))
    assert torch.cat([torch.tensor([]), x.to(torch.int64)], dim=-2).dtype == torch.float32


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_line_of_quantiles_is_a_new_dim_in_front(dim):
    x, q = torch.randn(6, 5, 4), torch.tensor([0.25, 0.5, 0.9])
    for keepdim in (False, True):
        mine = torch.quantile(place(x, "S(0), S(1)"), q, dim, keepdim)
        torch.testing.assert_close(mine.to_torch(), torch.quantile(x, q, dim, keepdim))
    assert any(isinstance(each, loom.Shard) for each in mine.placements)


def test_joins_with_a_plain_tensor_of_no_elements_are_remembered_by_its_dtype_and_nothing_else(monkeypatch):
    """So begins the cache of keys of a public model, at every forward pass."""
    mesh = loom.open_mesh((4,))
    dense = torch.randn(6, 5, requires_grad=True)
    ours = loom.distribute(dense.detach(), mesh, "S(0)").requires_grad_()
    general: list[str] = []
    invoke = quick.invoke
    monkeypatch.setattr(quick, "invoke", lambda name, *rest: (general.append(name), invoke(name, *rest))[1])
    for dtype in (torch.float32, torch.float64, torch.int64) * 3:
        empty = torch.tensor([], dtype=dtype)
        for before, after in (([empty], []), ([], [empty])):
            found, expected = (torch.cat([*before, each, *after], dim=-2) for each in (ours, dense))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.detach().to_torch(), expected.detach())
            (given,), (wanted,) = (
                torch.autograd.grad(y.square().sum(), x) for y, x in ((found, ours), (expected, dense))
            )
            torch.testing.assert_close(given.to_torch(), wanted)
    assert general.count("cat") == 2 * 2 + 3 * 2  # twice for f32 and for i64, always where it is cast


def test_a_plain_tensor_of_no_elements_that_wants_a_gradient_gets_it_every_time():
    mesh = loom.open_mesh((2,))
    x = loom.ones(4, 3, mesh=mesh, placements="S(0)")
    for _ in range(3):
        empty = torch.tensor([], requires_grad=True)
        torch.cat([empty, x]).sum().backward()
        assert empty.grad is not None and empty.grad.shape == (0,)
        assert torch.cat([torch.tensor([]), x]).to_torch().sum() == 12
