"""The moreh family against torch on every device's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from ttnn_cases import check_claim, check_op, check_parts, distributed, each_device, tensor_of
from ttnn_draws import P, R, S

GRID = (2, 2)


def made(*shape: int, seed: int = 0, lead: tuple[int, int] = (2, 1)) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tensor_of(torch.rand(*lead, *shape, generator=generator) + 0.1, GRID)


def flow(function: Any, which: int = 0) -> Any:
    """What autograd gives for an operand of a function: of the gradient first, then the operands."""

    def call(grad: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        leaves = [part.clone().requires_grad_() for part in parts]
        return torch.autograd.grad(function(*leaves), leaves, grad)[which]

    return call


@pytest.mark.parametrize("dim", [None, 1, (0, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_and_their_gradients(dim: Any, keepdim: bool) -> None:
    x = made(2, 3, 4)
    dims = (0, 1, 2) if dim is None else dim
    check_op(ttnn.moreh_sum(x, dim, keepdim=keepdim), lambda p: p.sum(dims, keepdim), x)
    check_op(ttnn.moreh_mean(x, dim=dim, keepdim=keepdim), lambda p: p.mean(dims, keepdim), x)
    check_op(ttnn.moreh_mean(x, dim=dim, keepdim=keepdim, divisor=7), lambda p: p.sum(dims, keepdim) / 7, x)
    norm = ttnn.moreh_norm(x, 3.0, dim=dim, keepdim=keepdim)
    check_op(norm, lambda p: torch.linalg.vector_norm(p, 3.0, dims, keepdim), x)
    grad = tensor_of(torch.rand(1, 2, *norm.shape), GRID)
    found = ttnn.moreh_sum_backward(grad, input=x, dim=dim, keepdim=keepdim)
    check_parts(found, each_device(flow(lambda p: p.sum(dims, keepdim)), grad, x))
    found = ttnn.moreh_mean_backward(grad, dim=dim, keepdim=keepdim, input_grad_shape=x.shape)
    check_parts(found, each_device(flow(lambda p: p.mean(dims, keepdim)), grad, x))
    found = ttnn.moreh_norm_backward(x, norm, grad, 3.0, dim=dim, keepdim=keepdim)
    check_parts(found, each_device(flow(lambda p: torch.linalg.vector_norm(p, 3.0, dims, keepdim)), grad, x))


@pytest.mark.parametrize(
    "name,function",
    [
        ("softmax", lambda p, d: p.softmax(d)),
        ("softmin", lambda p, d: torch.nn.functional.softmin(p, d)),
        ("logsoftmax", lambda p, d: p.log_softmax(d)),
    ],
)
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_and_its_gradient(name: str, function: Any, dim: int) -> None:
    x, grad = made(3, 5), made(3, 5, seed=1, lead=(1, 2))
    y = getattr(ttnn, f"moreh_{name}")(x, dim)
    check_op(y, lambda p: function(p, dim), x)
    found = getattr(ttnn, f"moreh_{name}_backward")(y, grad, dim)
    check_parts(found, each_device(flow(lambda p: function(p, dim)), grad, x), rtol=1e-4, atol=1e-5)


def test_products_and_their_gradients() -> None:
    a, b, w = made(2, 3, 4), made(2, 4, 5, seed=1), made(6, 4, seed=2)
    check_op(ttnn.moreh_bmm(a, b), torch.bmm, a, b)
    check_op(ttnn.moreh_matmul(a, b), torch.matmul, a, b)
    check_op(ttnn.moreh_matmul(b, a, transpose_input=True, transpose_other=True), lambda p, q: p.mT @ q.mT, b, a)
    check_op(ttnn.moreh_linear(a, w, bias=made(6)), lambda p, q, r: p @ q.T + r, a, w, made(6))
    grad = made(2, 3, 5, seed=3, lead=(1, 2))
    for name in ("moreh_bmm_backward", "moreh_matmul_backward"):
        for which, found in enumerate(getattr(ttnn, name)(grad, a, b)):
            check_parts(found, each_device(flow(torch.matmul, which), grad, a, b))
        assert getattr(ttnn, name)(grad, a, b, are_required_outputs=[False, True])[0] is None
    one = made(1, 4, 5, seed=4)
    for which, found in enumerate(ttnn.moreh_matmul_backward(grad, a, one)):
        check_parts(found, each_device(flow(torch.matmul, which), grad, a, one))


def test_an_inner_product_of_shards_leaves_terms() -> None:
    a, b = torch.rand(1, 1, 1, 6), torch.rand(1, 1, 1, 6)
    x, y = (distributed(each, (2,), [S(3)]) for each in (a, b))
    found = ttnn.moreh_dot(x, y)
    assert list(found.tensor_topology().placements()) == [P()] and check_claim(found, (a * b).sum(-1, keepdim=True))
    grad = distributed(torch.rand(1, 1, 1, 1), (2,), [R])
    first, second = ttnn.moreh_dot_backward(grad, x, y)
    check_op(first, torch.mul, y, grad)
    check_op(second, torch.mul, x, grad)


def test_running_sums_powers_and_their_gradients() -> None:
    x = made(3, 5)
    check_op(ttnn.moreh_cumsum(x, 1), lambda p: p.cumsum(1), x)
    check_parts(ttnn.moreh_cumsum_backward(x, 1), each_device(flow(lambda p: p.cumsum(1)), x, x))
    check_op(ttnn.moreh_abs_pow(x, 2.5), lambda p: p.abs() ** 2.5, x)


@pytest.mark.parametrize("name,kind", [("moreh_adam", torch.optim.Adam), ("moreh_adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps_of_adam_are_torchs(name: str, kind: Any, amsgrad: bool) -> None:
    x = made(3, 5)
    grads = [made(3, 5, seed=seed) for seed in (1, 2, 3)]

    def steps(p: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        leaf = p.clone().requires_grad_()
        optimizer = kind([leaf], lr=0.01, weight_decay=0.1, amsgrad=amsgrad)
        for each in g:
            leaf.grad = each.clone()
            optimizer.step()
        return leaf.detach()

    state = [x, ttnn.zeros_like(x), ttnn.zeros_like(x), ttnn.zeros_like(x)]
    for number, grad in enumerate(grads, 1):
        p, m, v, top = state
        settings = {"lr": 0.01, "weight_decay": 0.1, "step": number, "amsgrad": amsgrad}
        state = getattr(ttnn, name)(p, grad, m, v, max_exp_avg_sq_in=top if amsgrad else None, **settings)
    check_parts(state[0], each_device(steps, x, *grads), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="steps are counted from 1"):
        getattr(ttnn, name)(x, x, x, x)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_of_sgd_are_torchs(nesterov: bool) -> None:
    x = made(3, 5)
    grads = [made(3, 5, seed=seed) for seed in (1, 2, 3)]

    def steps(p: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        leaf = p.clone().requires_grad_()
        optimizer = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
        for each in g:
            leaf.grad = each.clone()
            optimizer.step()
        return leaf.detach()

    p, moving = x, None
    for number, grad in enumerate(grads):
        p, moving = ttnn.moreh_sgd(
            p, grad, moving, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov, momentum_initialized=number > 0
        )
    check_parts(p, each_device(steps, x, *grads))


def test_a_wrong_gradient_is_noticed() -> None:
    x = made(3, 5)
    with pytest.raises(AssertionError):
        check_parts(ttnn.moreh_cumsum(x, 1), each_device(flow(lambda p: p.cumsum(1)), x, x))


def test_operands_of_different_shapes_are_refused() -> None:
    x, y = made(4, 6), made(2, 4, 6)
    for call in (
        lambda: ttnn.moreh_dot(x, y),
        lambda: ttnn.moreh_sgd(x, y, momentum_initialized=False),
        lambda: ttnn.moreh_adam(x, y, x, x, step=1),
        lambda: ttnn.moreh_softmax_backward(x, y, 0),
    ):
        with pytest.raises(OperandError, match="differ"):
            call()


def test_sums_of_an_uneven_dim_are_terms_of_the_whole() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    whole = torch.rand(3, 7)
    mapper = ttnn.ShardTensorToMesh(mesh, dim=1)
    x = ttnn.exp(ttnn.from_torch(whole, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=mapper))
    torch.testing.assert_close(ttnn.to_torch(ttnn.moreh_sum(x, 1)), whole.exp().sum(1))
    ttnn.close_mesh_device(mesh)
