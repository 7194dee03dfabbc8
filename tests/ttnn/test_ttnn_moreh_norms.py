"""Norms, losses and patches of the moreh family against torch on every device's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from ttnn_cases import check_parts, distributed, each_device, label, tensor_of
from ttnn_draws import P, R, S
from ttnn_op_cases import Case, OpCases

X = (2, 4, 2, 6)
STATS = (2, 4)
CHANNELS = (1, 1, 1, 4)
GROUPS = (1, 1, 2, 2)


def rooms(like: Any, *shapes: Any) -> list[Any]:
    """Zeros on the same mesh, for results."""
    return [
        tensor_of(torch.zeros(*(1,) * len(like.grid), *shape), like.grid, dtype=like.dtype, layout=like.layout)
        for shape in shapes
    ]


def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
    halves = (x.shape[0], x.shape[1])
    mean, rstd = rooms(x, halves, halves)
    found = ttnn.moreh_layer_norm(x, 2, 1e-5, gamma, beta, mean=mean, rstd=rstd)
    assert found[1] is mean and found[2] is rstd
    return found


def torch_layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> Any:
    mean, var = x.mean((-2, -1)), x.var((-2, -1), correction=0)
    return F.layer_norm(x, x.shape[-2:], gamma, beta), mean, (var + 1e-5).rsqrt()


def layer_norm_backward(grad: Any, x: Any, gamma: Any) -> Any:
    _, mean, rstd = ttnn.moreh_layer_norm(x, 2, mean=rooms(x, x.shape[:2])[0], rstd=rooms(x, x.shape[:2])[0])
    first, second = rooms(x, gamma.shape, gamma.shape)
    return ttnn.moreh_layer_norm_backward(grad, x, mean, rstd, 2, gamma=gamma, gamma_grad=first, beta_grad=second)


def torch_layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Any:
    leaves = [each.clone().requires_grad_() for each in (x, gamma, torch.zeros_like(gamma))]
    return torch.autograd.grad(F.layer_norm(leaves[0], x.shape[-2:], *leaves[1:]), leaves, grad)


def group_norm(x: Any, gamma: Any, beta: Any) -> Any:
    return ttnn.moreh_group_norm(x, 2, 1e-5, gamma, beta, are_required_outputs=[True, True, True])


def torch_group_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> Any:
    groups = x.reshape(x.shape[0], 2, -1)
    mean, var = groups.mean(-1), groups.var(-1, correction=0)
    out = F.group_norm(x, 2, gamma.flatten(), beta.flatten())
    return out, mean[None, None], (var + 1e-5).rsqrt()[None, None]


def group_norm_backward(grad: Any, x: Any, gamma: Any) -> Any:
    _, mean, rstd = ttnn.moreh_group_norm(x, 2, are_required_outputs=[True, True, True])
    return ttnn.moreh_group_norm_backward(grad, x, mean, rstd, 2, gamma=gamma, are_required_outputs=[True] * 3)


def torch_group_norm_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Any:
    leaves = [each.clone().requires_grad_() for each in (x, gamma.flatten(), torch.zeros(gamma.numel()))]
    found = torch.autograd.grad(F.group_norm(leaves[0], 2, *leaves[1:]), leaves, grad)
    return found[0], *(each.reshape(1, 1, 1, -1) for each in found[1:])


def nll(reduction: str) -> Any:
    def call(x: Any, target: Any, weight: Any) -> Any:
        how = {"weight_tensor": weight, "ignore_index": 2}
        return ttnn.moreh_nll_loss(x, target, reduction, **how)

    def reference(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Any:
        found = F.nll_loss(x, target.long(), weight, reduction=reduction, ignore_index=2)
        return found if reduction == "none" else found.reshape(1)

    return call, reference


def nll_backward(mean: bool) -> Any:
    def call(target: Any, grad: Any, weight: Any) -> Any:
        return ttnn.moreh_nll_loss_backward(target, grad, mean, weight_tensor=weight, ignore_index=2)

    def reference(target: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> Any:
        x = torch.zeros(target.shape[0], weight.numel(), *target.shape[1:], requires_grad=True)
        how = {"reduction": "mean" if mean else "sum", "ignore_index": 2}
        return torch.autograd.grad(F.nll_loss(x, target.long(), weight, **how), x, grad.reshape(()))[0]

    return call, reference


def unreduced(target: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(target.shape[0], weight.numel(), *target.shape[1:], requires_grad=True)
    return torch.autograd.grad(F.nll_loss(x, target.long(), weight, reduction="none"), x, grad)[0]


def linear_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Any:
    leaves = [each.clone().requires_grad_() for each in (x, w, bias)]
    return torch.autograd.grad(leaves[0] @ leaves[1].T + leaves[2], leaves, grad)


LOSS, CLASSES = [(4, 5, 6), (4, 6), (5,)], ["float", 5, "positive"]
FOLD = {"output_size": (4, 5), "kernel_size": (2, 2), "padding": (1, 1), "stride": (2, 1), "dilation": (1, 1)}
CASES = [
    Case(
        "moreh_layer_norm",
        layer_norm,
        torch_layer_norm,
        [X, (2, 6), (2, 6)],
        ["S(0), R, R -> S(0)", "S(1), R, R -> S(1)", "R, R, R -> R"],
    ),
    Case(
        "moreh_layer_norm_backward",
        layer_norm_backward,
        torch_layer_norm_backward,
        [X, X, (2, 6)],
        ["S(0), S(0), R -> S(0), P(sum), P(sum)", "S(1), S(1), R -> S(1), P(sum), P(sum)"],
        coarse=(5e-2, 8e-2),  # mean and deviation are rounded in between
    ),
    Case("moreh_group_norm", group_norm, torch_group_norm, [X, CHANNELS, CHANNELS], ["S(0), R, R -> S(0), S(2), S(2)"]),
    Case(
        "moreh_group_norm_backward",
        group_norm_backward,
        torch_group_norm_backward,
        [X, X, CHANNELS],
        ["S(0), S(0), R -> S(0), P(sum), P(sum)"],
        coarse=(5e-2, 8e-2),
    ),
    Case("moreh_nll_loss none", *nll("none"), LOSS, ["S(0), S(0), R -> S(0)", "S(2), S(1), R -> S(1)"], CLASSES),
    Case("moreh_nll_loss sum", *nll("sum"), LOSS, ["S(0), S(0), R -> P(sum)", "R, R, R -> R"], CLASSES),
    Case("moreh_nll_loss mean", *nll("mean"), LOSS, ["S(0), S(0), R -> P(unknown)"], CLASSES),
    Case(
        "moreh_nll_loss_backward sum",
        *nll_backward(False),
        [(4, 6), (1,), (5,)],
        ["S(0), R, R -> S(0)", "S(1), R, R -> S(2)"],
        [5, "float", "positive"],
    ),
    Case("moreh_nll_loss_backward mean", *nll_backward(True), [(4, 6), (1,), (5,)], [], [5, "float", "positive"]),
    Case(
        "moreh_nll_loss_unreduced_backward",
        lambda target, grad, weight: ttnn.moreh_nll_loss_unreduced_backward(target, grad, weight_tensor=weight),
        unreduced,
        [(4, 6), (4, 6), (5,)],
        ["S(0), S(0), R -> S(0)", "S(1), S(1), R -> S(2)"],
        [5, "float", "positive"],
    ),
    Case(
        "moreh_fold",
        lambda x: ttnn.moreh_fold(x, **FOLD),
        lambda x: F.fold(x, **FOLD),
        [(2, 8, 18)],
        ["S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"],
    ),
    Case(
        "moreh_linear_backward",
        lambda grad, x, w, bias: ttnn.moreh_linear_backward(grad, x, w, bias=bias),
        linear_backward,
        [(2, 3, 4), (2, 3, 6), (4, 6), (1, 1, 4)],
        ["S(0), S(0), R, R -> S(0), P(sum), P(sum)", "S(2), R, S(0), S(2) -> P(sum), S(0), S(2)"],
    ),
]


class TestNormsLossesAndPatches(OpCases):
    cases = CASES


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_are_clipped_in_place_as_torch_does(norm_type: float, max_norm: float) -> None:
    shapes, leads = [(3, 4), (5,), (2, 1, 2)], [(2, 1), (1, 2), (1, 1)]
    values = [torch.randn(*lead, *shape) for shape, lead in zip(shapes, leads, strict=True)]
    given = [tensor_of(each, (2, 2)) for each in values]

    def clip(*parts: torch.Tensor) -> list[torch.Tensor]:
        leaves = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for leaf, part in zip(leaves, parts, strict=True):
            leaf.grad = part.clone()
        total = torch.nn.utils.clip_grad_norm_(leaves, max_norm, norm_type)
        return [total.reshape(1), *(leaf.grad for leaf in leaves)]

    wanted = each_device(clip, *given)
    found = ttnn.moreh_clip_grad_norm(given, max_norm, norm_type)
    for number, each in enumerate([found, *given]):
        check_parts(each, {place: want[number] for place, want in wanted.items()})
    with pytest.raises(OperandError, match="not finite"):
        ttnn.moreh_clip_grad_norm([tensor_of(torch.full((1, 1, 2), torch.inf), (2, 2))], 1.0, error_if_nonfinite=True)


def test_what_is_alike_everywhere_is_so_no_more_when_norms_differ() -> None:
    cut, alike = distributed(torch.randn(4, 2), (2,), [S(0)]), distributed(torch.randn(3), (2,), [R])
    norm = ttnn.moreh_clip_grad_norm([cut, alike], 0.1)
    assert label(cut) == [S(0)] and label(alike) == label(norm) == [P("unknown")]


def test_losses_leave_padding_out_and_say_what_they_divided_by() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x, target = torch.randn(5, 4), torch.tensor([1, 2, 3, 0, 2])
    how = {"device": mesh, "layout": ttnn.TILE_LAYOUT, "mesh_mapper": ttnn.ShardTensorToMesh(mesh, dim=0)}
    given = ttnn.from_torch(x, **how), ttnn.from_torch(target.int(), **how)
    total = ttnn.moreh_nll_loss(*given, "sum")
    found = sum(float(ttnn.to_torch(each)) for each in ttnn.get_device_tensors(total))
    assert abs(found - float(F.nll_loss(x, target, reduction="sum"))) < 1e-5
    divisor = ttnn.zeros([1], dtype=ttnn.float32, device=mesh)
    ttnn.moreh_nll_loss(*given, "mean", divisor_tensor=divisor)
    assert [float(ttnn.to_torch(each)) for each in ttnn.get_device_tensors(divisor)] == [3.0, 2.0]
    with pytest.raises(ArgumentError, match='"none", "sum" or "mean"'):
        ttnn.moreh_nll_loss(*given, "median")
    with pytest.raises(ArgumentError, match="how many classes"):
        ttnn.moreh_nll_loss_backward(given[1], divisor, True)
    with pytest.raises(OperandError, match="normalized_dims=3"):
        ttnn.moreh_layer_norm(given[0], 3)
    ttnn.close_mesh_device(mesh)


def test_norms_and_statistics_of_planes_leave_the_padding_of_uneven_shards_out() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = torch.randn(2, 4, 3, 5)
    how = {"device": mesh, "layout": ttnn.TILE_LAYOUT, "mesh_mapper": ttnn.ShardTensorToMesh(mesh, dim=3)}
    given = ttnn.from_torch(x, **how)
    halves = x.split([3, 2], 3)
    calls = {
        "group norm": (lambda t: ttnn.moreh_group_norm(t, 2)[0], lambda p: F.group_norm(p, 2)),
        "layer norm": (lambda t: ttnn.moreh_layer_norm(t, 2)[0], lambda p: F.layer_norm(p, p.shape[-2:])),
        "planes": (ttnn.normalize_hw, lambda p: (p - p.mean((2, 3), True)) / p.std((2, 3), correction=0, keepdim=True)),
        "variance": (ttnn.var_hw, lambda p: p.var((2, 3), correction=0, keepdim=True)),
        "all": (ttnn.normalize_global, lambda p: (p - p.mean()) / p.std(correction=0)),
    }
    for name, (call, reference) in calls.items():
        parts = [ttnn.to_torch(part) for part in ttnn.get_device_tensors(call(given))]
        for part, half in zip(parts, halves, strict=True):
            want = reference(half)
            torch.testing.assert_close(part[..., : want.shape[-1]], want, rtol=1e-4, atol=1e-5, msg=name)
    ttnn.close_mesh_device(mesh)


def test_a_range_of_moreh_begins_at_zero_unless_told() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    assert ttnn.moreh_arange(end=4, device=mesh).to_list() == ttnn.moreh_arange(0, 4, 1, mesh).to_list() == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match="needs an end and a device"):
        ttnn.moreh_arange(3)
    ttnn.close_mesh_device(mesh)
