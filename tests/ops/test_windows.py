"""Convolution and pooling: what they communicate, and small networks that use them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Mesh

MESH = Mesh(dp=4)


def images(placements: str, *shape: int) -> loom.Tensor:
    return loom.randn(*shape, mesh=MESH, placements=placements)


def kinds(log: object) -> list[str]:
    return [event.kind for event in log]  # type: ignore[attr-defined]


def test_a_convolution_of_a_sharded_batch_communicates_nothing() -> None:
    with loom.record() as log:
        found = F.conv2d(images("S(0)", 6, 3, 8, 8), torch.randn(5, 3, 3, 3), torch.randn(5), padding=1)
    assert kinds(log) == [] and str(found.placements[0]) == "S(0)" and log.fallbacks == {}


@pytest.mark.parametrize("transposed", [False, True])
def test_channels_of_a_convolution_are_labels(transposed: bool) -> None:
    function, swap = (F.conv_transpose2d, True) if transposed else (F.conv2d, False)
    x, shape = images("R", 2, 8, 6, 6), (8, 12, 3, 3) if swap else (12, 8, 3, 3)
    out, into = ("S(1)", "S(0)") if swap else ("S(0)", "S(1)")
    with loom.record() as log:
        found = function(x, images(out, *shape), loom.randn(12, mesh=MESH, placements="S(0)"))
    assert kinds(log) == [] and str(found.placements[0]) == "S(1)"
    weight, bias = images(into, *shape), torch.randn(12)
    with loom.record() as log:
        function(x.redistribute("S(1)"), weight)
    assert kinds(log) == ["all_reduce"]
    found = function(x.redistribute("S(1)"), weight, bias)
    torch.testing.assert_close(found.to_torch(), function(x.to_torch(), weight.to_torch(), bias), rtol=1e-4, atol=1e-4)


def test_groups_of_a_convolution_are_worked_on_where_they_are() -> None:
    x, weight = images("S(1)", 2, 8, 6, 6), images("S(0)", 8, 1, 3, 3)
    with loom.record() as log:
        found = F.conv2d(x, weight, groups=8)
    assert kinds(log) == [] and str(found.placements[0]) == "S(1)"
    torch.testing.assert_close(found.to_torch(), F.conv2d(x.to_torch(), weight.to_torch(), groups=8))


def test_a_dim_that_windows_slide_over_is_gathered_and_explain_says_so() -> None:
    x = images("S(2)", 2, 3, 8, 8)
    explained = loom.explain(lambda: F.conv2d(x, torch.randn(5, 3, 3, 3)))
    (plan,) = explained.plans
    assert [each.kind for each in plan.forward] == ["all_gather"] and "all_gather" in str(explained)


@pytest.mark.parametrize("kernel", [1, 2])
def test_windows_that_lie_side_by_side_stay_where_they_are(kernel: int) -> None:
    x = images("S(2)", 2, 3, 8, 8)
    for work in (
        lambda: F.conv2d(x, torch.randn(5, 3, kernel, kernel), stride=kernel),
        lambda: F.max_pool2d(x, kernel),
        lambda: F.avg_pool2d(x, kernel),
        lambda: F.adaptive_avg_pool2d(x, 8 // kernel),
        lambda: F.conv_transpose2d(x, torch.randn(3, 5, kernel, kernel), stride=kernel),
    ):
        with loom.record() as log:
            found = work()
        assert kinds(log) == [] and str(found.placements[0]) == "S(2)"


@pytest.mark.parametrize("placements", ["S(0)", "S(1)"])
def test_pooling_and_interpolation_leave_batch_and_channels_where_they_are(placements: str) -> None:
    x = images(placements, 5, 6, 7, 7)
    for work in (
        lambda: F.max_pool2d(x, 3, 2, 1),
        lambda: F.avg_pool2d(x, 3, 2),
        lambda: F.adaptive_max_pool2d(x, 1),
        lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda: F.pad(x, (1, 2, 0, 1), value=3.0),
    ):
        with loom.record() as log:
            found = work()
        assert kinds(log) == [] and str(found.placements[0]) == placements and log.fallbacks == {}


def test_a_maximum_with_its_place_and_columns_of_windows_go_through_the_fallback() -> None:
    x = images("S(0)", 5, 2, 6, 6)
    with loom.record() as log:
        _, places = F.max_pool2d(x, 2, return_indices=True)
        columns = F.unfold(x, 2)
        both = torch.adaptive_max_pool1d(x[:, :, 0], 2)
    assert sum(log.fallbacks.values()) == 3
    dense = x.to_torch()
    assert torch.equal(places.to_torch(), F.max_pool2d(dense, 2, return_indices=True)[1])
    assert torch.equal(columns.to_torch(), F.unfold(dense, 2))
    assert torch.equal(both[1].to_torch(), torch.adaptive_max_pool1d(dense[:, :, 0], 2)[1])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        return self.out(F.adaptive_avg_pool2d(F.relu(self.second(x)), 1).flatten(1))


@pytest.mark.parametrize("batch", [8, 10])
def test_a_small_network_of_convolutions_learns_as_dense_on_a_sharded_batch(batch: int) -> None:
    torch.manual_seed(0)
    model = Small()
    x, target = torch.randn(batch, 1, 8, 8), torch.arange(batch) % 3
    F.cross_entropy(model(x), target).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(loom.distribute(each.detach(), MESH, "R")))
    placed = loom.distribute(x, MESH, "S(0)")
    with loom.record() as log:
        F.cross_entropy(model(placed), loom.distribute(target, MESH, "S(0)")).backward()
        found = {name: each.grad.to_torch() for name, each in model.named_parameters()}
    assert log.fallbacks == {}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused_in_our_words() -> None:
    x = images("S(0)", 4, 3, 8, 8)
    with pytest.raises(loom.ShapeError, match="expects 2 channels and dim 1 of the input has 3"):
        F.conv2d(x, torch.randn(5, 2, 3, 3))
    with pytest.raises(loom.ShapeError, match="the windows are larger than the input"):
        F.conv2d(x, torch.randn(5, 3, 9, 9))
    with pytest.raises(loom.ShapeError, match="needs an input of 3 or 4 dims"):
        F.max_pool2d(x[0, 0], 2)
    with pytest.raises(loom.ArgumentError, match="either size or scale_factor"):
        loom.interpolate(x)
