"""What keeps what alive: hooks keep no tensor and no graph, and a redistribution that moves nothing makes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import Mesh

MIB = 1 << 18  # elements of float32
LAYOUTS = {
    "even": (Mesh(d=2), "S(0)", MIB),
    "uneven": (Mesh(d=3), "S(0)", MIB + 1),
    "replicated": (Mesh(d=2), "R", MIB),
}


def start(layout: str) -> loom.Tensor:
    mesh, placements, count = LAYOUTS[layout]
    return loom.ones(count, mesh=mesh, placements=placements).requires_grad_()


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(each() is not None for each in references)


def results_with(x: loom.Tensor, hook: Callable[[loom.Tensor], Any]) -> list[weakref.ref[Any]]:
    """Fifty results of a MiB, each with a hook, dropped again."""
    kept = []
    for i in range(50):
        y = x * float(i)
        hook(y)
        kept += [weakref.ref(y._data), weakref.ref(y)]
    return kept


HOOKS: dict[str, Callable[[loom.Tensor], Any]] = {
    "no hook": lambda y: None,
    "register_hook": lambda y: y.register_hook(lambda g: g * 2),
    "two hooks": lambda y: (y.register_hook(lambda g: None), y.register_hook(lambda g: g)),
    "a hook that was removed": lambda y: y.register_hook(lambda g: g).remove(),
    "a hook on a result that retains its gradient": lambda y: (y.retain_grad(), y.register_hook(lambda g: g)),
    "a hook on a view": lambda y: y[1:].register_hook(lambda g: g),
    "a hook, then a write": lambda y: (y.register_hook(lambda g: g), y.mul_(2)),
    "a hook and a pass": lambda y: (y.register_hook(lambda g: g), y.sum().backward()),
    "a hook and a derivative": lambda y: (y.register_hook(lambda g: g), torch.autograd.grad(y.sum(), y)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HOOKS)
def test_results_with_hooks_are_collected_when_they_are_dropped(name, layout):
    x = start(layout)
    references = results_with(x, HOOKS[name])
    assert len(references) == 100
    assert alive(references) == 0


def test_a_result_that_somebody_keeps_is_seen():
    kept: list[loom.Tensor] = []
    references = results_with(start("even"), kept.append)
    assert len(kept) == 50 and alive(references) == 100


def test_a_hook_that_holds_its_tensor_is_the_users_own_and_is_collected_like_any_cycle_of_torch():
    def count(x: Any, array: Callable[[Any], Any]) -> int:
        kept = []
        for i in range(5):
            y = x * float(i)
            y.register_hook(lambda g, y=y: None)
            kept.append(weakref.ref(array(y)))
            del y
        return alive(kept)

    dense = count(torch.ones(8, requires_grad=True), lambda y: y)
    ours = count(loom.ones(8, mesh=Mesh(d=2), placements="S(0)").requires_grad_(), lambda y: y)
    assert ours <= dense


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hook_after_accumulation_keeps_no_graph(layout):
    mesh, placements, count = LAYOUTS[layout]
    p = loom.Parameter(loom.ones(count, mesh=mesh, placements=placements))
    seen: list[float] = []
    p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.sum().item()))
    kept: list[weakref.ref[Any]] = []
    for _ in range(5):
        y = p * 2
        z = y * y
        kept += [weakref.ref(each._data) for each in (y, z)] + [weakref.ref(z)]
        z.sum().backward()
        del y, z
        assert alive(kept) == 0
        p.grad = None
    assert seen == [8.0 * count] * 5


def test_a_parameter_with_a_hook_after_accumulation_is_collected():
    kept = []
    for _ in range(10):
        p = loom.Parameter(loom.ones(MIB, mesh=Mesh(d=2), placements="S(0)"))
        p.register_post_accumulate_grad_hook(lambda q: None)
        (p * 2).sum().backward()
        kept += [weakref.ref(p), weakref.ref(p._data), weakref.ref(p.grad._data)]
        del p
    assert alive(kept) == 0


def test_hooks_that_free_the_gradient_as_it_comes_leave_none_behind():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for module in model:
        for name, each in list(module.named_parameters()):
            setattr(module, name, loom.Parameter(loom.distribute(each.detach(), Mesh(d=2), "S(0)")))
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    before = [each.detach().to_torch() for each in optimizers]

    def step(parameter: loom.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in optimizers:
        each.register_post_accumulate_grad_hook(step)
    model(loom.ones(4, 8, mesh=Mesh(d=2), placements="S(0)")).square().sum().backward()
    assert all(each.grad is None for each in optimizers)
    assert not any(torch.equal(old, new.detach().to_torch()) for old, new in zip(before, optimizers, strict=True))


def test_module_hooks_keep_no_result():
    layer = torch.nn.Linear(64, 64)
    for name, each in list(layer.named_parameters()):
        setattr(layer, name, loom.Parameter(loom.distribute(each.detach(), Mesh(d=2), "S(0)")))
    layer.register_full_backward_hook(lambda *_: None)
    layer.register_forward_hook(lambda *_: None)
    kept = []
    x = loom.ones(64, 64, mesh=Mesh(d=2), placements="S(0)").requires_grad_()
    for _ in range(10):
        y = layer(x)
        kept += [weakref.ref(y), weakref.ref(y._data)]
        y.sum().backward()
        del y
    assert alive(kept) == 0


@pytest.mark.parametrize("placements", ["S(0), R", "R, R", "S(1), S(0)", "R, P(sum)"])
@pytest.mark.parametrize("shape", [(4, 6), (5, 7)])
def test_a_redistribution_to_the_same_placements_is_the_tensor_itself_and_copy_copies(placements, shape):
    mesh = Mesh(a=2, b=2)
    x = loom.ones(*shape, mesh=mesh, placements="R, R").redistribute(placements)
    by_axis = dict(zip(("a", "b"), x.placements, strict=True))
    for same in (placements, x.placements, list(x.placements), by_axis, {"a": x.placements[0]}):
        with loom.record() as story:
            assert x.redistribute(same) is x
            copied = x.redistribute(same, copy=True)
        assert not story.events
        assert copied is not x and copied.placements == x.placements
        assert copied._data.untyped_storage().data_ptr() != x._data.untyped_storage().data_ptr()
        assert torch.equal(copied.to_torch(), x.to_torch())
        copied.add_(1)
        assert torch.equal(x.to_torch(), torch.ones(shape)) and torch.equal(copied.to_torch(), torch.full(shape, 2.0))


def test_a_copy_by_redistribution_passes_its_gradient_on():
    x = loom.ones(5, 3, mesh=Mesh(d=2), placements="S(0)").requires_grad_()
    x.redistribute("S(0)", copy=True).square().sum().backward()
    assert torch.equal(x.grad.to_torch(), torch.full((5, 3), 2.0))


def test_a_redistribution_elsewhere_never_shares_memory():
    mesh = Mesh(a=2, b=2)
    x = loom.ones(8, 8, mesh=mesh, placements="S(0), R")
    for target in ("R, R", "S(1), R", "S(0), S(0)", "R, S(0)", "S(0), S(1)"):
        moved = x.redistribute(target)
        moved.zero_()
        assert torch.equal(x.to_torch(), torch.ones(8, 8))


CALLS: dict[str, Any] = {
    "x @ w": lambda x, w: x @ w,
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "cat": lambda x, w: torch.cat([x, w]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "where": lambda x, w: torch.where(x > 0, x, w),
    "addcmul": lambda x, w: torch.addcmul(x, x, w, value=2.0),
    "lerp": lambda x, w: torch.lerp(x, w, 0.5),
    "clamp": lambda x, w: torch.clamp(x, min=w),
    "rsub": lambda x, w: torch.rsub(x, w),
    "add_": lambda x, w: x.clone().add_(w),
    "view": lambda x, w: x.view(16),
    "a plain operand": lambda x, w: x * torch.ones(4),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("placements", ["S(0)", "R"])
def test_a_call_that_is_remembered_keeps_none_of_its_tensors(call, placements):
    mesh = loom.open_mesh((3,))
    x, w = (loom.randn(4, 4, mesh=mesh, placements=placements) for _ in range(2))
    references = [weakref.ref(each) for each in (x, w, x._data, w._data)]
    for _ in range(3):
        CALLS[call](x, w)
    del x, w
    assert alive(references) == 0


@pytest.mark.parametrize("take_away", [torch.optim.Optimizer.zero_grad, lambda optimizer: _delete_gradients(optimizer)])
def test_a_gradient_that_was_taken_away_is_not_in_memory(take_away: Callable[[torch.optim.Optimizer], None]) -> None:
    weight = loom.Parameter(torch.ones(4, 3), loom.open_mesh((2,), axes=("dp",)), "R")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (weight * 2).sum().backward()
    optimizer.step()  # reads the gradient, which is remembered for the next one who asks
    old = weakref.ref(weight.grad._data)
    assert old() is not None
    take_away(optimizer)
    assert old() is None


def _delete_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            del parameter.grad
