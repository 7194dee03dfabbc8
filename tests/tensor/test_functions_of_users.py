"""A user's `autograd.Function` on tensors on a mesh gives values and gradients of dense, or is refused for certain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import meshloom as loom
from layouts import layouts

LAYOUTS = layouts(
    "4 R", "2 S(0)", "4 S(0)", "8 S(1)", "2x2 S(0), S(0)", "2x4 S(1), S(0)", "2x4 R, S(1)", "3 P(sum)",
    "2x2 P(mean), S(1)", "2x2 S(0), P(max)",
)  # fmt: skip
SHAPE = (6, 5)


def drawn(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


class Cube(Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, y = ctx.saved_tensors
        return gradient * 3 * y / x


class Both(Function):
    """Two operands, two results."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, product: Any, total: Any) -> Any:
        x, w = ctx.saved_tensors
        return product * w + total, product * x + total


class Ranked(Function):
    """A result that has a gradient, and one that has none."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        order = x.argsort(0)
        ctx.mark_non_differentiable(order)
        return x * 2, order

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        return gradient * 2


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


class Scaled(Function):
    """A number beside its tensor, and a setup apart from its forward."""

    @staticmethod
    def forward(x: Any, factor: float) -> Any:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.factor, None


class Same(Function):
    """Gives its operand back."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 7


class Unused(Function):
    """Has no gradient for one operand."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


def twice(x: Any) -> Any:
    y = Cube.apply(x)
    return y * y.detach() + y.sum(0)


def through_a_view(x: Any) -> Any:
    y = Scaled.apply(x.view(5, 6)[1:4], 3.0)
    y[0] = 1.0
    return y.T * 2


def written_after(x: Any) -> Any:
    y = Scaled.apply(x, 3.0)
    y.mul_(2)
    y[1] = x[0]
    return y


def written_before(x: Any) -> Any:
    y = x * 2
    y[2:4].mul_(3)
    return Cube.apply(y)


def mixed(x: Any) -> Any:
    product, total = Both.apply(x, drawn(3))
    return product * total


def without_gradients(x: Any) -> Any:
    with torch.no_grad():
        y = Cube.apply(x)
    assert not y.requires_grad
    return x * y


def chained(x: Any) -> Any:
    return Once.apply(Scaled.apply(Cube.apply(Same.apply(x)), 0.5))


def only_one(x: Any) -> Any:
    return Both.apply(x, x * 2)[1]


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "saved input and output": Cube.apply,
    "several results": lambda x: sum(Both.apply(x, x * 2)),
    "one of several results": only_one,
    "a plain operand": mixed,
    "a chain": chained,
    "a result used twice": twice,
    "a result without a gradient": lambda x: Ranked.apply(x)[0] * (Ranked.apply(x)[1] + 1),
    "once differentiable": Once.apply,
    "its operand given back": Same.apply,
    "no gradient for one operand": lambda x: Unused.apply(x, x * 5),
    "through a view": through_a_view,
    "written after": written_after,
    "written before": written_before,
    "inside no_grad": without_gradients,
    "checkpoint": lambda x: checkpoint(chained, x * 2, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(chained, x * 2, use_reentrant=True),
    "nested checkpoints": lambda x: checkpoint(
        lambda y: checkpoint(Cube.apply, y * 2, use_reentrant=False) + y, x * 2, use_reentrant=False
    ),
    "nested reentrant checkpoints": lambda x: checkpoint(
        lambda y: checkpoint(Cube.apply, y * 2, use_reentrant=True) + y, x * 2, use_reentrant=True
    ),
}


def leaf(layout: tuple[tuple[int, ...], str]) -> tuple[Any, Any]:
    """A leaf and the tensor, placed as the layout says, that programs get; a partial tensor cannot be a leaf."""
    shape, placements = layout
    mesh = loom.open_mesh(shape)
    if "P" not in placements:
        made = loom.distribute(drawn(), mesh, placements).requires_grad_()
        return made, made
    made = loom.distribute(drawn(), mesh, {}).redistribute(", ".join(["R"] * len(shape))).requires_grad_()
    return made, made.redistribute(placements)


def check_close(ours: Any, dense: torch.Tensor) -> None:
    assert isinstance(ours, loom.Tensor)
    torch.testing.assert_close(ours.detach().to_torch(), dense.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of nested reentrant checkpoints
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_equal_dense(name: str, layout: Any) -> None:
    x, placed = leaf(layout)
    dense = drawn().requires_grad_()
    mine, theirs = PROGRAMS[name](placed), PROGRAMS[name](dense * 1 if placed is not x else dense)
    check_close(mine, theirs)
    weight = drawn(9, tuple(theirs.shape))
    (mine * weight).sum().backward()
    (theirs * weight).sum().backward()
    check_close(x.grad, dense.grad)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_second_derivatives_equal_dense(layout: Any) -> None:
    x, placed = leaf(layout)
    dense = drawn().requires_grad_()
    found = []
    for at, given in ((x, placed), (dense, dense)):
        (first,) = torch.autograd.grad(Cube.apply(given).square().sum(), at, create_graph=True)
        (second,) = torch.autograd.grad((first * drawn(2)).sum(), at)
        found.append((first, second))
    for mine, theirs in zip(*found, strict=True):
        check_close(mine, theirs)


def test_a_function_that_is_differentiable_once_refuses_a_second_time() -> None:
    x, _ = leaf(((4,), "S(0)"))
    (first,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plain_operands_have_their_gradients(layout: Any) -> None:
    x, placed = leaf(layout)
    plain, other, dense = (drawn(seed).requires_grad_() for seed in (1, 1, 0))
    for first, second in ((placed, plain), (dense, other)):
        product, total = Both.apply(first, second)
        (product * 2 + total * total).sum().backward()
    check_close(x.grad, dense.grad)
    torch.testing.assert_close(plain.grad, other.grad)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hooks_and_retained_gradients_of_results_equal_dense(layout: Any) -> None:
    if "P" in layout[1]:
        pytest.skip("hooks on partial tensors")
    x, placed = leaf(layout)
    dense = drawn().requires_grad_()
    seen: list[list[Any]] = [[], []]
    for side, given in enumerate((placed, dense)):
        y = Cube.apply(given)
        y.retain_grad()
        y.register_hook(seen[side].append)
        y.register_hook(lambda gradient: gradient * 2)
        (y * drawn(4)).sum().backward()
        seen[side].append(y.grad)
    assert len(seen[0]) == len(seen[1])
    for mine, theirs in zip(*seen, strict=True):
        check_close(mine, theirs)
    check_close(x.grad, dense.grad)


@pytest.mark.parametrize("layout", LAYOUTS[:7], ids=str)
def test_full_backward_hooks_of_modules_see_what_dense_sees(layout: Any) -> None:
    seen: list[list[Any]] = [[], []]
    x, _ = leaf(layout)
    dense = drawn().requires_grad_()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    for side, given in enumerate((x, dense)):

        def after(module: Any, given_back: Any, gradients: Any, side: int = side) -> None:
            seen[side].extend([*given_back, *gradients])

        def before(module: Any, gradients: Any, side: int = side) -> Any:
            seen[side].extend(gradients)
            return tuple(each * 2 for each in gradients)

        handles = [model[0].register_full_backward_hook(after), model[2].register_full_backward_pre_hook(before)]
        model(given).square().sum().backward()
        for handle in handles:
            handle.remove()
    assert len(seen[0]) == len(seen[1]) == 3
    for mine, theirs in zip(*seen, strict=True):
        check_close(mine, theirs)
    check_close(x.grad, dense.grad)


def test_backward_of_chosen_inputs_leaves_the_others() -> None:
    x, other = leaf(((4,), "S(0)"))[0], leaf(((4,), "R"))[0]
    product, total = Both.apply(x, other)
    (product + total).sum().backward(inputs=[x])
    assert x.grad is not None and other.grad is None
    check_close(x.grad, drawn() + 1)


def test_a_saved_tensor_that_is_written_refuses_backward_as_dense_does() -> None:
    for given in (leaf(((4,), "S(0)"))[0] * 1, leaf(((2, 2), "S(0), S(0)"))[0] * 1, drawn().requires_grad_() * 1):
        y = Cube.apply(given)
        given.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_saved_tensor_that_is_written_through_a_moved_view_refuses_backward() -> None:
    for given in (leaf(((2, 2), "S(0), S(0)"))[0] * 1, drawn().requires_grad_() * 1):
        y = Cube.apply(given)
        given.view(30)[3:9].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Doubled(Function):
    """Writes into its operand."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


@pytest.mark.parametrize("layout", LAYOUTS[:7], ids=str)
def test_a_function_that_writes_into_its_operand_equals_dense_or_is_refused(layout: Any) -> None:
    x, _ = leaf(layout)
    dense = drawn().requires_grad_()
    (Doubled.apply(dense * 3) * drawn(1)).sum().backward()
    try:
        y = Doubled.apply(x * 3)
        (y * drawn(1)).sum().backward()
    except (loom.MeshloomError, RuntimeError):
        return
    check_close(y, drawn() * 6)
    check_close(x.grad, dense.grad)


class Gathered(Function):
    """Gives a plain tensor for one on a mesh."""

    @staticmethod
    def forward(ctx: Any, read: Any, x: Any) -> Any:
        return read(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, gradient * 2


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "to_torch": lambda x: x.to_torch(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: torch.full(x.shape, x.sum().item()),
    "shard_at": lambda x: torch.cat([x.shard_at((0,)), x.shard_at((1,))]),
    "block": lambda x: x.block.sum().expand(x.shape),
    "full_tensor": lambda x: x.full_tensor(),
    "to_torch of a result": lambda x: (x * 2).to_torch(),
    "tolist of a result": lambda x: torch.tensor((x + 1).tolist()),
    "copied": lambda x: torch.zeros(x.shape).copy_(x),
    "out=": lambda x: torch.add(x, 0, out=torch.zeros(x.shape)),
}


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_function_that_gives_a_plain_tensor_is_refused(name: str, is_leaf: bool) -> None:
    x, _ = leaf(((2,), "S(0)"))
    y = Gathered.apply(READS[name], x if is_leaf else x * 2)
    with pytest.raises(loom.GradientError, match="took a tensor on a mesh and gave a plain one"):
        y.sum().backward()


def test_reading_a_tensor_without_gradients_does_not_touch_its_backward() -> None:
    x, _ = leaf(((2,), "S(0)"))
    y = x * 2
    with torch.no_grad():
        x.to_torch(), y.tolist(), y.numpy(), y.shard_at((0,))
    (y * 3).sum().backward()
    check_close(x.grad, torch.full(SHAPE, 6.0))
    Cube.apply(y.detach().requires_grad_()).sum().backward()


class Inner(Function):
    """Computes with gradients inside of its forward, and gives a tensor that is tracked."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with torch.enable_grad():
            return x * 5

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3


@pytest.mark.parametrize("layout", LAYOUTS[:7], ids=str)
def test_a_result_that_is_tracked_inside_of_forward_has_the_gradient_of_its_function(layout: Any) -> None:
    given = leaf(layout)[0], drawn().requires_grad_()
    for each in given:
        (Inner.apply(each) * 2).sum().backward()
    check_close(*(each.grad for each in given))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(lambda y: (y * y).sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda y: y * 2)(x),
    "vmap over a plain operand": lambda x: torch.func.vmap(lambda y: y * x[0])(drawn()),
    "jvp": lambda x: torch.func.jvp(lambda y: y * 2, (x,), (x,)),
    "vjp": lambda x: torch.func.vjp(lambda y: y * 2, x)[1](x),
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.sum(0))(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda y: y.sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda y: (y * y).sum())(x),
    "grad around": lambda x: torch.func.grad(lambda w: (x * w).sum())(torch.ones(5)),
    "of a Function": lambda x: torch.func.grad(lambda y: Scaled.apply(y, 2.0).sum())(x),
    "linearize": lambda x: torch.func.linearize(lambda y: y * 2, x)[1](x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_is_refused(name: str, tracked: bool) -> None:
    x = leaf(((2,), "S(0)"))[0].detach().requires_grad_(tracked)
    for _ in range(2):  # a call seen before too
        with pytest.raises((loom.MeshloomError, RuntimeError, ValueError)):
            TRANSFORMS[name](x)
    assert (x * 2).shape == SHAPE  # nothing is left behind


def test_functional_call_works() -> None:
    model, x = torch.nn.Linear(5, 3), leaf(((2,), "S(0)"))[0]
    weights = {name: each.detach() * 2 for name, each in model.named_parameters()}
    check_close(
        torch.func.functional_call(model, weights, (x,)), torch.func.functional_call(model, weights, (drawn(),))
    )
