"""Gradients: values, placements, padding, and every way torch has of asking for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import meshloom as loom
from layouts import layouts

# mesh, placements of a (6, 5) tensor
LAYOUTS = layouts(
    "1 S(0)", "4 R", "2 S(0)", "4 S(0)", "8 S(1)", "2x2 S(0), S(0)", "2x4 S(0), S(0)", "2x4 S(1), S(0)",
    "2x2x2 S(0), R, S(0)", "2x1x3 S(1), R, S(0)",
)  # fmt: skip
SHAPE = (6, 5)


def drawn(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(layout: Any, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Any:
    """A leaf on a mesh."""
    return loom.distribute(drawn(shape, seed), loom.open_mesh(layout[0]), layout[1]).requires_grad_()


def check_gradient(found: Any, expected: torch.Tensor, value: Any) -> None:
    """Raise unless a gradient is right, placed as its value is, with zero padding."""
    assert found.placements == value.topology.reduced.placements
    torch.testing.assert_close(found.detach().to_torch(), expected.detach(), atol=1e-5, rtol=1e-5)
    topology = found.topology
    for place in topology.mesh.coordinates():
        device = tuple(0 if size == 1 else c for c, size in zip(place, found.block.shape, strict=False))
        held = found.detach().block[device].clone()
        held[tuple(slice(0, extent) for extent in topology.extent(place))] = 0
        assert not held.any(), f"padding of {place} is not zero: {held}"


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "square": lambda x: (x * x).sum(),
    "shifted log": lambda x: (x.abs() + 1).log().mean(),
    "sqrt": lambda x: (x.abs() + 0.1).sqrt().sum(),
    "matmul": lambda x: (x @ x.T).relu().sum(),
    "softmax": lambda x: (x.softmax(0) * x.log_softmax(1)).sum(),
    "row minus mean": lambda x: ((x - x.mean(0)) ** 2 / x.var(0)).sum(),
    "max": lambda x: x.amax(0).sum() + x.max(1).values.prod(),
    "views": lambda x: (x.reshape(30)[3:17] * x.T.reshape(30)[:14]).sum(),
    "cat": lambda x: torch.cat([x, x * 2])[1::3].exp().sum(),
    "where": lambda x: torch.where(x > 0, x * x, x.sigmoid()).sum(),
    "norm": lambda x: F.layer_norm(x, (5,), x[0], x[1]).pow(3).sum(),
    "fallback": lambda x: x.cumsum(0).logsumexp(1).sum(),
    "fallback views": lambda x: (x.movedim(0, 1)[1] * x.diagonal().sum()).sum(),
    "used twice": lambda x: (x * 2).sum() + (x[0] @ x.T).sum() + x[0, 0] ** 3,
    "expand": lambda x: (x[:, None].expand(6, 3, 5) * torch.arange(3.0)[:, None]).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_equals_dense_for_every_layout(name: str) -> None:
    dense = drawn().requires_grad_()
    PROGRAMS[name](dense).backward()
    assert dense.grad is not None
    for layout in LAYOUTS:
        x = leaf(layout)
        PROGRAMS[name](x).backward()
        check_gradient(x.grad, dense.grad, x)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(PROGRAMS)),
    first=st.sampled_from([None, *"R S(0) S(1)".split()]),
    second=st.sampled_from("R S(0) S(1)".split()),
    sizes=st.sampled_from([(2, 2), (3, 1), (4, 2), (1, 3), (2, 5)]),
)
def test_autograd_grad_equals_dense_for_any_placements(name: str, first: Any, second: str, sizes: Any) -> None:
    layout = ((sizes[0],), second) if first is None else (sizes, f"{first}, {second}")
    dense, x = drawn().requires_grad_(), leaf(layout)
    (expected,) = torch.autograd.grad(PROGRAMS[name](dense), dense)
    (found,) = torch.autograd.grad(PROGRAMS[name](x), x)
    check_gradient(found, expected, x)
    assert x.grad is None


@pytest.mark.parametrize("first", LAYOUTS, ids=str)
def test_gradients_of_two_leaves_with_different_placements_equal_dense(first: Any) -> None:
    a, w = drawn(), drawn((5, 7), 1)
    dense = a.clone().requires_grad_(), w.clone().requires_grad_()
    (dense[0] @ dense[1]).tanh().sum().backward()
    mesh = loom.open_mesh(first[0])
    for at in ("R", "S(0)", "S(1)"):
        x = loom.distribute(a, mesh, first[1]).requires_grad_()
        other = loom.distribute(w, mesh, ", ".join([at] * mesh.ndim)).requires_grad_()
        (x @ other).tanh().sum().backward()
        for mine, theirs in zip((x, other), dense, strict=True):
            assert theirs.grad is not None
            check_gradient(mine.grad, theirs.grad, mine)


def test_a_plain_torch_leaf_gets_its_gradient_through_the_mesh() -> None:
    plain, dense, weight = (each.requires_grad_() for each in (drawn(), drawn(), drawn((5, 3), 1)))
    w = loom.distribute(drawn((5, 3), 1), loom.open_mesh((4,)), "S(0)").requires_grad_()
    (plain @ w).exp().sum().backward()
    (dense @ weight).exp().sum().backward()
    torch.testing.assert_close(plain.grad, dense.grad)
    torch.testing.assert_close(w.grad.to_torch(), weight.grad)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_accumulate_until_taken_away(layout: Any) -> None:
    x = leaf(layout)
    for _ in range(3):
        (x * 2).sum().backward()
    check_gradient(x.grad, torch.full(SHAPE, 6.0), x)
    x.grad.zero_()
    check_gradient(x.grad, torch.zeros(SHAPE), x)
    x.grad.add_(1)
    (x * 2).sum().backward()
    check_gradient(x.grad, torch.full(SHAPE, 3.0), x)
    x.grad = None
    assert x.grad is None
    x.grad = drawn(seed=2)
    check_gradient(x.grad, drawn(seed=2), x)
    x.grad = loom.distribute(drawn(seed=3), x.mesh, ", ".join(["S(1)"] * x.mesh.ndim))
    check_gradient(x.grad, drawn(seed=3), x)


def test_a_graph_is_freed_unless_it_is_retained() -> None:
    x = leaf(LAYOUTS[3])
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    check_gradient(x.grad, 4 * drawn(), x)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_backward_of_several_tensors_runs_through_a_shared_graph_once() -> None:
    for layout in LAYOUTS:
        x, dense = leaf(layout), drawn().requires_grad_()
        for each in (x, dense):
            middle = each.exp()
            torch.autograd.backward([middle.sum(), (middle * each)], [None, torch.ones(SHAPE)])
        assert dense.grad is not None
        check_gradient(x.grad, dense.grad, x)


def test_backward_of_given_inputs_leaves_the_others_alone() -> None:
    x, other = leaf(LAYOUTS[3]), leaf(LAYOUTS[3], seed=1)
    (x * other).sum().backward(inputs=[x])
    check_gradient(x.grad, drawn(seed=1), x)
    assert other.grad is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_seed_of_any_placement_may_be_given(layout: Any) -> None:
    seed = drawn(seed=4)
    for make in (lambda x: seed, lambda x: loom.distribute(seed, x.mesh, ", ".join(["S(1)"] * x.mesh.ndim))):
        x = leaf(layout)
        y = x.tanh()
        (found,) = torch.autograd.grad(y, x, make(x), retain_graph=True)
        y.backward(make(x))
        expected = seed * (1 - drawn().tanh() ** 2)
        check_gradient(found, expected, x)
        check_gradient(x.grad, expected, x)


def test_a_tensor_of_one_element_starts_backward_whatever_its_padding() -> None:
    for shape in ((), (1,), (1, 1)):
        dense = torch.full(shape, 3.0)
        x = loom.distribute(dense, loom.open_mesh((4,)), "S(0)" if shape else "R").requires_grad_()
        (x * x).backward()
        check_gradient(x.grad, torch.full(shape, 6.0), x)
        (found,) = torch.autograd.grad(x * x, x)
        check_gradient(found, torch.full(shape, 6.0), x)


def test_backward_of_more_than_one_number_is_refused() -> None:
    x = loom.ones(4, 6, mesh=loom.open_mesh((2,), axes=("dp",)), requires_grad=True)
    for call in (lambda: (x * 2).backward(), lambda: torch.autograd.grad(x * 2, x)):
        with pytest.raises(loom.GradientError) as error:
            call()
        assert str(error.value) == (
            "backward starts from one number and this tensor has more\n"
            "  tensor  f32[4, 6](S(0)) on Mesh(dp=2)\n"
            "  fix     reduce it first, as in y.sum().backward(), or give backward(gradient=...)"
        )


def test_unused_inputs_give_none_when_allowed() -> None:
    x, other = leaf(LAYOUTS[3]), leaf(LAYOUTS[3])
    assert torch.autograd.grad(x.sum(), [x, other], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(x.sum(), [x, other])
    found = torch.autograd.grad(x.sum(), [x, other], allow_unused=True, materialize_grads=True)[1]
    check_gradient(found, torch.zeros(SHAPE), other)


@pytest.mark.parametrize("name", ["square", "shifted log", "matmul", "softmax", "views", "row minus mean"])
def test_the_gradient_of_a_gradient_equals_dense(name: str) -> None:
    dense = drawn().requires_grad_()
    (first,) = torch.autograd.grad(PROGRAMS[name](dense), dense, create_graph=True)
    (expected,) = torch.autograd.grad((first * first).sum() + first.sum(), dense)
    for layout in LAYOUTS:
        x = leaf(layout)
        (mine,) = torch.autograd.grad(PROGRAMS[name](x), x, create_graph=True)
        (found,) = torch.autograd.grad((mine * mine).sum() + mine.sum(), x)
        torch.testing.assert_close(found.to_torch(), expected, atol=1e-4, rtol=1e-4)
        check_gradient(mine, first, x)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gradient_penalty_through_dot_grad_equals_dense(layout: Any) -> None:
    scale = [torch.tensor(1.5, requires_grad=True) for _ in range(2)]
    x, dense = leaf(layout), drawn().requires_grad_()
    for each, factor in zip((x, dense), scale, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle
            ((each**3).sum() * factor).backward(create_graph=True)
        assert each.grad is not None
        penalty = each.grad.sum() + (each.grad * each.grad).sum()
        (found,) = torch.autograd.grad(penalty, factor)
        factor.grad = found
        each.grad = None
    torch.testing.assert_close(scale[0].grad, scale[1].grad, rtol=1e-4, atol=1e-4)


def test_no_grad_inference_mode_and_detach_leave_no_graph() -> None:
    for layout in LAYOUTS:
        x = leaf(layout)
        with torch.no_grad():
            assert not (x * 2).requires_grad
            assert (x.sum() + 1).grad_fn is None
        with torch.inference_mode():
            assert not (x @ x.T).requires_grad
        with torch.no_grad(), torch.enable_grad():
            assert (x * 2).requires_grad
        assert not x.detach().requires_grad
        assert not (x.detach() * 2).requires_grad
        assert (x * 2).grad_fn is not None
        ((x * x.detach()).sum()).backward()
        check_gradient(x.grad, drawn(), x)
        torch.testing.assert_close(x.detach().to_torch(), drawn())


def test_inference_tensors_may_be_computed_with_afterwards() -> None:
    with torch.inference_mode():
        x = loom.distribute(drawn(), loom.open_mesh((4,)), "S(0)") * 2
    torch.testing.assert_close((x + 1).softmax(0).to_torch(), (drawn() * 2 + 1).softmax(0))


def test_turning_requires_grad_off_and_on() -> None:
    x = leaf(LAYOUTS[3])
    assert x.is_leaf
    x.requires_grad_(False)
    assert not (x * 2).requires_grad
    x.requires_grad = True
    assert (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        (x * 2).requires_grad_(False)
    with pytest.raises(loom.GradientError, match="a tensor of i64 has no gradient"):
        loom.arange(4, mesh=x.mesh).requires_grad_()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hooks_see_gradients_and_may_replace_them(layout: Any) -> None:
    seen: list[Any] = []
    x = leaf(layout)
    y = x.exp()
    handle = y.register_hook(seen.append)
    y.register_hook(lambda gradient: gradient * 2)
    removed = y.register_hook(lambda gradient: gradient * 1000)
    removed.remove()
    x.register_hook(lambda gradient: gradient + 1)
    (y * 3).sum().backward()
    check_gradient(seen[0], torch.full(SHAPE, 3.0), y)
    check_gradient(x.grad, drawn().exp() * 6 + 1, x)
    handle.remove()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_retained_gradient_equals_dense(layout: Any) -> None:
    x = leaf(layout)
    y = x * 2
    y.retain_grad()
    assert y.retains_grad
    (y.sum() * 5).backward()
    check_gradient(y.grad, torch.full(SHAPE, 5.0), y)
    check_gradient(x.grad, torch.full(SHAPE, 10.0), x)


def partial_product(mesh: loom.Mesh) -> tuple[Any, Any]:
    """A leaf and a partial sum computed from it."""
    x = loom.distribute(drawn((6, 8)), mesh, "S(1)").requires_grad_()
    w = loom.distribute(drawn((8, 5), 1), mesh, "S(0)")
    return x, loom.matmul(x, w, output="P(sum)")


def test_the_gradient_of_a_partial_sum_is_replicated_and_equals_dense() -> None:
    mesh = loom.open_mesh((4,))
    dense = drawn((6, 8)).requires_grad_()
    product = dense @ drawn((8, 5), 1)
    product.retain_grad()
    (product.tanh() * 2).sum().backward()
    assert product.grad is not None
    assert dense.grad is not None
    x, y = partial_product(mesh)
    assert str(y.placements[0]) == "P(sum)"
    seen: list[Any] = []
    y.register_hook(seen.append)
    y.retain_grad()
    (y.tanh() * 2).sum().backward()
    check_gradient(y.grad, product.grad, y)
    check_gradient(seen[0], product.grad, y)
    check_gradient(x.grad, dense.grad, x)
    x, y = partial_product(mesh)
    (found,) = torch.autograd.grad((y.tanh() * 2).sum(), y)
    check_gradient(found, product.grad, y)


def test_a_hook_on_a_partial_sum_may_replace_its_gradient() -> None:
    x, y = partial_product(loom.open_mesh((4,)))
    y.register_hook(lambda gradient: gradient * 3)
    y.sum().backward()
    check_gradient(x.grad, 3 * torch.ones(6, 5) @ drawn((8, 5), 1).T, x)


def test_other_partial_values_have_no_gradient_of_their_own() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.distribute(drawn((8, 5)), mesh, "S(0)").requires_grad_()
    y = loom.amax(x, 0, output="P(max)")
    with pytest.raises(loom.GradientError) as error:
        torch.autograd.grad(y.sum(), y)
    assert str(error.value) == (
        "a tensor that is P(max) has no gradient of its own\n"
        "  tensor  f32[5](P(max)) on Mesh(tp=4)\n"
        "  fix     redistribute it first: x.redistribute({'tp': Replicate()})"
    )


def test_backward_may_start_from_a_partial_number() -> None:
    x = leaf(((4,), "S(0)"))
    y = loom.sum(x * x, output="P(sum)")
    assert str(y.placements[0]) == "P(sum)"
    y.backward()
    check_gradient(x.grad, 2 * drawn(), x)


def test_a_partial_leaf_is_refused_with_the_redistribution_to_do() -> None:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.distribute(torch.ones(4, 6), mesh, "S(0), P(sum)")
    expected = (
        "a tensor that is P(sum) on axis 'tp' cannot require a gradient\n"
        "  tensor  f32[4, 6](S(0), P(sum)) on Mesh(dp=2, tp=4)\n"
        "  fix     redistribute it first: x.redistribute({'tp': Replicate()}).requires_grad_()"
    )
    for call in (
        lambda: x.requires_grad_(),
        lambda: setattr(x, "requires_grad", True),
        lambda: loom.Parameter(x),
        lambda: loom.zeros(4, 6, mesh=mesh, placements="S(0), P(sum)", requires_grad=True),
    ):
        with pytest.raises(loom.GradientError) as error:
            call()
        assert str(error.value) == expected
    assert not x.requires_grad
    assert x.redistribute({"tp": loom.Replicate()}).requires_grad_().requires_grad


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_gradients_through_redistribution_and_reading_equal_dense(source: Any) -> None:
    weight = drawn(seed=5)
    targets = ["R", "S(0)", "S(1)", "P(sum)"]
    for at in targets:
        x = leaf(source)
        y = x.redistribute(", ".join([at] * x.mesh.ndim))
        (y * weight).sum().backward()
        check_gradient(x.grad, weight, x)
    x = leaf(source)
    (x.to_torch() * weight).sum().backward()
    check_gradient(x.grad, weight, x)


def block(x: Any, w: Any) -> Any:
    """What is recomputed in the tests of activation checkpointing."""
    return F.dropout(torch.tanh(x @ w), 0.4) @ w.T


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_checkpointing_with_dropout_gives_the_same_gradients(layout: Any) -> None:
    results = []
    for saved in (False, True):
        x, w = leaf(layout), leaf(layout, (5, 4), 1)
        torch.manual_seed(7)
        y = checkpoint(block, x, w, use_reentrant=False) if saved else block(x, w)
        (y * y).sum().backward()
        results.append((y.detach().to_torch(), x.grad.to_torch(), w.grad.to_torch(), torch.rand(()).item()))
    for plain, saved_again in zip(*results, strict=True):
        torch.testing.assert_close(saved_again, plain)


def test_checkpointing_a_module_recomputes_and_gives_the_same_gradients() -> None:
    mesh = loom.open_mesh((2, 2))
    calls = []
    gradients = []
    for saved in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(5, 5), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(5, 5)]
        for layer in (layers[0], layers[3]):
            for name, each in list(layer.named_parameters()):
                setattr(layer, name, loom.Parameter(each.detach(), mesh, "R, S(0)"))
        module = torch.nn.Sequential(*layers)
        layers[0].register_forward_hook(lambda *_, s=saved: calls.append(s))
        x = leaf(((2, 2), "S(0), R"))
        y = checkpoint_sequential(module, 2, x, use_reentrant=False) if saved else module(x)
        y.pow(2).sum().backward()
        gradients.append([x.grad.to_torch(), *(each.grad.to_torch() for each in module.parameters())])
    assert (calls.count(False), calls.count(True)) == (1, 2)
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain)


AUTOCAST: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.T),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "linear then softmax": lambda x, w: (x @ w).softmax(-1),
    "layer norm": lambda x, w: F.layer_norm(x @ w, (4,)),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 1, 2, 3, 0, 1])),
    "mean": lambda x, w: (x @ w).mean(),
    "exp": lambda x, w: (x @ w).exp() + x.sum(),
    "fallback": lambda x, w: torch.logsumexp(x @ w, 0),
    "mse": lambda x, w: F.mse_loss(x @ w, torch.zeros(6, 4)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_equals_dense_under_autocast(name: str) -> None:
    dense = drawn().requires_grad_(), drawn((5, 4), 1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = AUTOCAST[name](*dense)
    expected.float().sum().backward()
    for shape, at in LAYOUTS:
        mesh = loom.open_mesh(shape)
        x = loom.distribute(drawn(), mesh, at).requires_grad_()
        w = loom.distribute(drawn((5, 4), 1), mesh, at).requires_grad_()
        before = AUTOCAST[name](x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = AUTOCAST[name](x, w)
        after = AUTOCAST[name](x, w)
        assert before.dtype == after.dtype == torch.float32
        assert found.dtype == expected.dtype
        assert found.topology.dtype == {torch.float32: "f32", torch.bfloat16: "bf16"}[expected.dtype]
        torch.testing.assert_close(found.detach().to_torch(), expected.detach(), rtol=0.03, atol=0.06)
        found.float().sum().backward()
        for mine, theirs in zip((x, w), dense, strict=True):
            assert theirs.grad is not None
            assert mine.grad.dtype == theirs.grad.dtype
            torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=0.05, atol=0.1)


def transforms(x: Any) -> dict[str, Callable[[], Any]]:
    """torch.func transforms of something, and around something."""
    plain = torch.ones(3, *SHAPE)
    return {
        "grad": lambda: torch.func.grad(lambda a: (a * a).sum())(x),
        "vmap": lambda: torch.func.vmap(lambda a: a * 2)(x),
        "jvp": lambda: torch.func.jvp(lambda a: a * 2, (x,), (x,)),
        "vjp": lambda: torch.func.vjp(lambda a: a * 2, x),
        "jacrev": lambda: torch.func.jacrev(lambda a: a * 2)(x),
        "vmap around": lambda: torch.func.vmap(lambda a: a * x)(plain),
        "grad around": lambda: torch.func.grad(lambda a: (a @ x.T).sum())(plain),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("name", transforms(None))
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_function_transforms_are_refused_in_words(name: str, kind: str) -> None:
    mesh = loom.open_mesh((2,))
    x: Any = loom.ones(*SHAPE, mesh=mesh) if kind == "tensor" else loom.Parameter(torch.ones(SHAPE), mesh, "S(0)")
    with pytest.raises((loom.UnsupportedError, ValueError, RuntimeError)) as error:
        transforms(x)[name]()
    assert str(error.value) == (
        "torch.func transforms do not work on meshloom tensors\n"
        "  fix  use backward() or torch.autograd.grad for gradients; shard a batch dim instead of vmap"
    )
    assert (x * 2).sum().item() == 60


@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
def test_a_compiled_function_gives_the_same_values_and_gradients_and_nothing_of_ours_is_compiled() -> None:
    from torch._dynamo.utils import counters

    mesh = loom.open_mesh((4,))
    results = []
    torch.compiler.reset()
    counters.clear()
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        p, x = loom.Parameter(drawn((5, 5)), mesh, "S(0)"), loom.distribute(drawn(), mesh, "S(1)").requires_grad_()
        loss = wrap(lambda a, w: (a @ w).tanh().pow(2).sum())(x, p)
        loss.backward()
        results.append([loss.detach().to_torch(), x.grad.to_torch(), p.grad.to_torch()])
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)
    assert counters["frames"]["total"] == 1  # the function itself


class Rounded(torch.autograd.Function):
    """Rounding whose gradient passes where the input is small."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_of_the_users_has_the_gradient_of_dense(layout):
    x, dense = leaf(layout), drawn().requires_grad_()
    for value, other in ((x, dense), (x * 2, dense * 2)):
        found, expected = Rounded.apply(value), Rounded.apply(other)
        torch.testing.assert_close(found.to_torch(), expected)
        (found * value).sum().backward()
        (expected * other).sum().backward()
        torch.testing.assert_close(x.grad.to_torch(), dense.grad)
    with torch.no_grad():
        assert not Rounded.apply(x + 0.6).requires_grad


def test_a_function_of_the_users_has_its_gradient_for_leaves_results_and_parameters():
    mesh = loom.open_mesh((2,), axes=("dp",))
    x = loom.zeros(4, mesh=mesh).requires_grad_()
    for value in (x, x * 2, loom.Parameter(x)):
        (found,) = torch.autograd.grad((Rounded.apply(value) * 3).sum(), value)
        assert found.tolist() == [3.0] * 4
    with torch.no_grad():
        assert Rounded.apply(x + 0.6).tolist() == [1.0] * 4
    assert Rounded.apply(x.detach() + 0.6).tolist() == [1.0] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_of_the_users_on_the_part_of_each_device_has_the_gradient_of_dense(layout):
    x, dense = leaf(layout), drawn().requires_grad_()
    y = x * 2
    parts = [Rounded.apply(y.shard_at(at)) for at in y.mesh.local_coordinates()]
    found = loom.from_local(parts, y.mesh, y.placements)
    expected = Rounded.apply(dense * 2)
    torch.testing.assert_close(found.to_torch(), expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert 0 < dense.grad.count_nonzero() < dense.numel()
    check_gradient(x.grad, dense.grad, x)


def test_the_gradient_of_a_partial_product_with_an_infinite_factor_is_that_of_dense() -> None:
    values = torch.tensor([-1.0, 0.5, 2.0, -0.5])  # log1p of -1 is -inf
    dense = values.clone().requires_grad_()
    torch.log1p(dense).backward(torch.ones(4))
    x = loom.distribute(values, loom.Mesh.of((4,)), "R").requires_grad_()
    with loom.with_output("P(prod)"):
        y = torch.log1p(x)
    assert str(y.placements[0]) == "P(prod)"
    assert y.tolist()[0] == -float("inf")
    y.backward(torch.ones(4))
    check_gradient(x.grad, dense.grad, x)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_hook_on_a_result_whose_gradient_is_undefined_is_called_with_none_as_in_torch(layout: Any) -> None:
    def calls(x: Any) -> list[Any]:
        seen: list[Any] = []
        first, *_, last = (x * 2).unbind(0)
        first.register_hook(seen.append)
        last.sum().backward()
        return seen

    assert calls(leaf(layout)) == calls(drawn().requires_grad_()) == [None]


def test_the_padding_of_a_gradient_that_was_read_is_zero_after_the_next_backward():
    mesh = loom.open_mesh((4,))
    x = loom.zeros(5, 3, mesh=mesh, placements="S(0)").requires_grad_()
    for count in (1, 2, 3):
        x.exp().sum().backward()
        found = x.grad
        assert found is x.grad
        assert found.block[3].abs().sum() == 0  # the last device holds nothing
        assert found.tolist() == [[float(count)] * 3] * 5


@pytest.mark.parametrize("change, sums", [(None, 1), ("mul_", 2)])
def test_the_gradients_of_one_tensor_add_up_before_they_are_summed_over_the_devices(
    change: str | None, sums: int
) -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.distribute(torch.randn(8, 6), mesh, {}).requires_grad_()
    q, k, v = (loom.distribute(torch.randn(6, 6), mesh, {"tp": loom.Shard(0)}) for _ in range(3))
    hidden = x * 2
    first = hidden @ q.T + hidden @ k.T
    if change is not None:
        getattr(hidden, change)(3)  # what comes after has another gradient
    result = (first + hidden @ v.T).tanh().sum()
    for _ in range(2):
        with loom.record() as log:
            result.backward(retain_graph=True)
        assert [(each.kind, each.axis, each.bytes) for each in log] == [
            ("all_reduce", "tp", 2 * 8 * 6 * 4 * 3 // 4)
        ] * sums


def test_a_use_that_backward_does_not_reach_sums_nothing() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    hidden = loom.distribute(torch.randn(8, 6), mesh, {}).requires_grad_() * 2
    w = loom.Parameter(torch.randn(6, 6), mesh, {"tp": loom.Shard(0)})
    hidden @ w.T
    with loom.record() as log:
        (hidden * hidden).sum().backward()
    assert len(log) == 0


def test_each_result_of_a_call_with_several_has_a_sum_of_its_own() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.distribute(torch.randn(8, 6), mesh, {}).requires_grad_()
    w = loom.distribute(torch.randn(6, 3), mesh, {"tp": loom.Shard(0)})
    left, right = (x * 2).chunk(2, 1)
    with loom.record() as log:
        ((left @ w.T).tanh().sum() + (right @ w.T).tanh().sum()).backward()
    assert [each.kind for each in log if each.phase == "backward"] == ["all_reduce"] * 2


@pytest.mark.parametrize("placed", ["R", "P(max)", "P(min)"])
def test_a_norm_that_counts_gives_no_gradient_as_in_torch(placed):
    x = loom.distribute(torch.tensor([3.0, 0.0]), loom.open_mesh((2,)), "R").requires_grad_()
    torch.linalg.vector_norm(x.redistribute(placed), 0).backward()
    assert x.grad is None
