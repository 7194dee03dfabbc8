"""Every class of torch.optim takes the same steps on parameters of any placement as on dense ones."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import meshloom as loom
from meshloom.tensor.lists import is_dense, is_ordered_as
from meshloom.tensor.optimizer_steps import StandIn
from oracle import check_padding

# mesh, placements of the (7, 5) weight, placements of the (5,) bias; 7 and 5 divide by nothing here
LAYOUTS = {
    "replicated": ((4,), "R", "R"),
    "rows": ((2,), "S(0)", "S(0)"),
    "columns": ((5,), "S(1)", "S(0)"),
    "uneven rows": ((4,), "S(0)", "S(0)"),
    "two axes": ((2, 2), "S(0), S(1)", "R, S(0)"),
    "nested": ((2, 4), "S(0), S(0)", "S(0), S(0)"),
    "three axes": ((2, 1, 2), "S(1), R, S(0)", "R, R, S(0)"),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=0.05, maximize=True),
    "Adam foreach off": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05, weight_decay=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2, weight_decay=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "LBFGS strong_wolfe": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05, decoupled_weight_decay=True, weight_decay=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2, maximize=True),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}
PAIRED = ["SGD momentum", "Adam amsgrad", "Adafactor", "Adagrad", "LBFGS", "Muon"]


def start() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, a bias, and inputs with their targets."""
    drawn = torch.Generator().manual_seed(0)
    shapes = (7, 5), (5,), (11, 7), (11, 5)
    weight, bias, inputs, targets = (torch.randn(shape, generator=drawn) for shape in shapes)
    return weight, bias, inputs, targets


def dense_parameters() -> list[Any]:
    """The parameters on one device."""
    return [torch.nn.Parameter(each.clone()) for each in start()[:2]]


def parameters(layout: str) -> list[Any]:
    """The parameters on a mesh."""
    shape, weight, bias = LAYOUTS[layout]
    mesh = loom.open_mesh(shape)
    return [loom.Parameter(each, mesh, at) for each, at in zip(start()[:2], (weight, bias), strict=True)]


def loss_of(held: list[Any]) -> Any:
    """The loss of a small regression."""
    _, _, inputs, targets = start()
    weight, bias = held
    return ((torch.tanh(inputs @ weight) + bias - targets) ** 2).mean() * 3


def train(optimizer: torch.optim.Optimizer, held: list[Any], steps: int) -> list[float]:
    """The losses of some steps."""

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(held)
        loss.backward()
        return loss.detach()

    return [optimizer.step(closure).item() for _ in range(steps)]  # type: ignore[attr-defined]


def check_same(found: list[Any], expected: list[Any], atol: float = 1e-5) -> None:
    """Raise unless parameters hold the same numbers, and nothing but zero in their padding."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().to_torch(), theirs.detach(), atol=atol, rtol=1e-5)
        check_padding(mine, "after a step")


def test_every_optimizer_class_of_torch_is_tried() -> None:
    classes = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert {name.split()[0] for name in OPTIMIZERS} == classes - {"Optimizer", "SparseAdam"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_equal_dense_for_every_layout(name: str) -> None:
    expected = dense_parameters()
    losses = train(OPTIMIZERS[name](expected), expected, 5)
    assert len(set(losses)) == 5
    for layout in LAYOUTS:
        held = parameters(layout)
        placed = [each.topology for each in held]
        assert train(OPTIMIZERS[name](held), held, 5) == pytest.approx(losses, abs=1e-5, rel=1e-5), layout
        check_same(held, expected)
        assert [each.topology for each in held] == placed


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "RMSprop", "Rprop", "Adamax", "Adagrad"])
def test_state_is_placed_as_its_parameter(name: str) -> None:
    held = parameters("uneven rows")
    optimizer = OPTIMIZERS[name](held)
    train(optimizer, held, 2)
    for parameter in held:
        kept = {key: each for key, each in optimizer.state[parameter].items() if isinstance(each, loom.Tensor)}
        assert kept
        assert all(each.topology is parameter.topology for each in kept.values()), kept


def test_sparse_adam_refuses_dense_gradients_as_it_does_for_torch() -> None:
    messages = []
    for held in (dense_parameters(), parameters("rows")):
        with pytest.raises(RuntimeError) as error:
            train(torch.optim.SparseAdam(held, lr=0.1), held, 1)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("layout", ["replicated", "uneven rows", "nested"])
def test_a_saved_and_loaded_optimizer_goes_on_as_if_nothing_happened(name: str, layout: str) -> None:
    expected = dense_parameters()
    train(OPTIMIZERS[name](expected), expected, 4)
    first = parameters(layout)
    optimizer = OPTIMIZERS[name](first)
    train(optimizer, first, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = copy.deepcopy(first)
    resumed = OPTIMIZERS[name](second)
    resumed.load_state_dict(torch.load(file, weights_only=False))
    train(resumed, second, 2)
    check_same(second, expected)
    train(optimizer, first, 2)
    check_same(second, [each.detach().to_torch() for each in first])


def test_a_deep_copied_optimizer_steps_on_its_own() -> None:
    held = parameters("uneven rows")
    optimizer = OPTIMIZERS["Adam"](held)
    train(optimizer, held, 2)
    before = [each.detach().to_torch() for each in held]
    copied = copy.deepcopy(optimizer)
    train(copied, copied.param_groups[0]["params"], 2)
    check_same(held, before, atol=0)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules_equal_dense(name: str) -> None:
    results = []
    for held in (dense_parameters(), parameters("two axes")):
        optimizer = OPTIMIZERS["SGD momentum"](held)
        schedule = SCHEDULES[name](optimizer)
        rates = []
        for _ in range(5):
            (loss,) = train(optimizer, held, 1)
            schedule.step(loss) if name == "ReduceLROnPlateau" else schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        results.append((held, rates))
    (expected, rates), (found, own_rates) = results
    assert own_rates == pytest.approx(rates)
    assert len(set(rates)) > 1
    check_same(found, expected)


def test_parameter_groups_have_their_own_settings() -> None:
    results = []
    for held in (dense_parameters(), parameters("uneven rows")):
        groups = [{"params": held[:1], "lr": 0.1}, {"params": held[1:], "weight_decay": 0.5}]
        train(torch.optim.AdamW(groups, lr=0.01), held, 3)
        results.append(held)
    check_same(results[1], results[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_norm_equals_dense(layout: str, norm: float) -> None:
    expected, found = dense_parameters(), parameters(layout)
    loss_of(expected).backward()
    loss_of(found).backward()
    total = get_total_norm([each.grad for each in expected], norm)
    torch.testing.assert_close(get_total_norm([each.grad for each in found], norm).to_torch(), total)
    before = clip_grad_norm_(expected, 0.1, norm)
    clipped = clip_grad_norm_(found, 0.1, norm)
    torch.testing.assert_close(clipped.to_torch(), before)
    assert float(before) > 0.1
    check_same([each.grad for each in found], [each.grad for each in expected])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_by_value_equals_dense(layout: str) -> None:
    expected, found = dense_parameters(), parameters(layout)
    loss_of(expected).backward()
    loss_of(found).backward()
    unclipped = expected[0].grad.clone()
    clip_grad_value_(expected, 0.05)
    clip_grad_value_(found, 0.05)
    assert not torch.equal(unclipped, expected[0].grad)
    check_same([each.grad for each in found], [each.grad for each in expected])


def test_clipping_refuses_a_norm_that_is_not_finite_when_asked() -> None:
    held = parameters("rows")
    loss_of(held).backward()
    held[0].grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(held, 1.0, error_if_nonfinite=True)


def test_averaged_weights_equal_dense() -> None:
    averages = []
    for held in (dense_parameters(), parameters("uneven rows")):
        module = torch.nn.ParameterList(held)
        averaged = torch.optim.swa_utils.AveragedModel(module, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.5))
        optimizer = OPTIMIZERS["SGD"](held)
        for _ in range(3):
            train(optimizer, held, 1)
            averaged.update_parameters(module)
        averages.append(list(averaged.module.parameters()))
    check_same(averages[1], averages[0])


def test_a_vector_of_parameters_equals_dense() -> None:
    vector = torch.nn.utils.parameters_to_vector(parameters("uneven rows"))
    dense = torch.cat([each.flatten() for each in start()[:2]])
    assert torch.equal(vector.detach().to_torch(), dense)


# Steps on stored arrays

ON_ARRAYS = [name for name in OPTIMIZERS if not name.startswith(("Adafactor", "LBFGS", "Muon"))]


@pytest.fixture
def on_arrays(monkeypatch) -> list[bool]:
    """Of each step on tensors of a mesh that could run on arrays, whether it did."""
    found: list[bool] = []
    fill = StandIn.fill

    def note(self: StandIn) -> bool:
        did = fill(self)
        found.append(did)
        return did

    monkeypatch.setattr(StandIn, "fill", note)
    return found


def take_steps(held: list[Any], optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(held).backward()
        optimizer.step()


def check_equal(ours: list[Any], dense: list[Any]) -> None:
    for mine, theirs in zip(ours, dense, strict=True):
        assert torch.allclose(mine.detach().to_torch(), theirs, rtol=1e-5, atol=1e-6)
        check_padding(mine, "a parameter")


@pytest.mark.parametrize("layout", ["two axes", "uneven rows"])
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_once_an_elementwise_optimizer_has_its_state_it_steps_on_arrays(name, layout, on_arrays):
    ours, dense = parameters(layout), dense_parameters()
    optimizer = OPTIMIZERS[name](ours)
    take_steps(ours, optimizer, 4)
    take_steps(dense, OPTIMIZERS[name](dense), 4)
    assert on_arrays[1:] == [True] * 3
    check_equal(ours, dense)
    for held in optimizer.state.values():
        assert all(type(each) is loom.Tensor for each in held.values() if torch.is_tensor(each) and each.ndim)
        for each in held.values():
            if type(each) is loom.Tensor:
                check_padding(each, "state")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {*ON_ARRAYS}))
def test_optimizers_that_look_at_whole_tensors_step_on_tensors(name, on_arrays):
    ours = parameters("rows")
    optimizer = OPTIMIZERS[name](ours)
    for _ in range(3):
        optimizer.step(lambda: loss_of(ours))
    assert on_arrays == []


def test_a_class_derived_from_an_optimizer_steps_on_tensors(on_arrays):
    class Own(torch.optim.AdamW):
        pass

    ours = parameters("rows")
    take_steps(ours, Own(ours, lr=0.05))
    assert on_arrays == []


def test_hooks_of_an_optimizer_see_tensors_and_their_gradients_are_used(on_arrays):
    def halve(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for each in optimizer.param_groups[0]["params"]:
            each.grad = each.grad / 2

    for held in (ours := parameters("rows")), (dense := dense_parameters()):
        optimizer = torch.optim.AdamW(held, lr=0.05)
        optimizer.register_step_pre_hook(halve)
        take_steps(held, optimizer)
    assert on_arrays == []
    check_equal(ours, dense)


def test_a_hook_after_the_step_gets_the_optimizer_of_the_program():
    ours = parameters("rows")
    optimizer = torch.optim.AdamW(ours, lr=0.05)
    seen = []
    optimizer.register_step_post_hook(lambda found, args, kwargs: seen.append(found))
    take_steps(ours, optimizer)
    assert seen == [optimizer] * 3


def test_a_step_that_is_recorded_runs_on_tensors_and_the_next_one_on_arrays(on_arrays):
    ours, dense = parameters("two axes"), dense_parameters()
    optimizer = torch.optim.AdamW(ours, lr=0.05)
    take_steps(ours, optimizer, 2)
    with loom.record():
        take_steps(ours, optimizer, 1)
    take_steps(ours, optimizer, 1)
    take_steps(dense, torch.optim.AdamW(dense, lr=0.05), 4)
    assert on_arrays == [False, True, True]
    check_equal(ours, dense)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}, {"maximize": True}])
def test_options_of_a_step_on_arrays_do_what_they_do_on_dense_ones(options, on_arrays):
    ours, dense = parameters("uneven rows"), dense_parameters()
    take_steps(ours, torch.optim.AdamW(ours, lr=0.05, **options), 4)
    take_steps(dense, torch.optim.AdamW(dense, lr=0.05, **options), 4)
    assert on_arrays == [False, True, True, True]
    check_equal(ours, dense)


def test_a_step_that_is_differentiated_stays_on_tensors(on_arrays):
    for held in parameters("rows"), dense_parameters():
        loss_of(held).backward()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            torch.optim.SGD(held, lr=0.05, differentiable=True).step()
    assert on_arrays == [False]


def test_rates_and_groups_that_change_between_steps_take_effect(on_arrays):
    for held in (ours := parameters("two axes")), (dense := dense_parameters()):
        optimizer = torch.optim.AdamW(held[:1], lr=0.05)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(5):
            if number == 2:
                optimizer.add_param_group({"params": held[1:], "lr": 0.01})
                rates.base_lrs.append(0.01)
            take_steps(held, optimizer, 1)
            rates.step()
    assert on_arrays == [False, True, False, True, True]  # a new group has no state at first
    check_equal(ours, dense)


def test_a_parameter_without_a_gradient_is_left_alone(on_arrays):
    ours, dense = parameters("rows"), dense_parameters()
    for held in ours, dense:
        frozen = held[0].detach().clone().requires_grad_()
        optimizer = torch.optim.AdamW([*held, frozen], lr=0.05)
        take_steps(held, optimizer)
        assert frozen.grad is None
    check_equal(ours, dense)
    assert on_arrays == [False, True, True]


def test_saved_values_notice_a_step_on_arrays():
    ours = parameters("rows")
    optimizer = torch.optim.AdamW(ours, lr=0.05)
    take_steps(ours, optimizer, 2)
    loss, versions = ours[0].square().sum(), [each._version for each in ours]
    optimizer.step()
    assert all(each._version > before for each, before in zip(ours, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_that_lies_elsewhere_keeps_the_step_on_tensors(on_arrays):
    ours, dense = parameters("rows"), dense_parameters()
    optimizer = torch.optim.AdamW(ours, lr=0.05)
    take_steps(ours, optimizer, 2)
    moved = optimizer.state[ours[0]]
    moved["exp_avg"] = moved["exp_avg"].redistribute("R")
    take_steps(ours, optimizer, 1)
    take_steps(dense, torch.optim.AdamW(dense, lr=0.05), 3)
    assert on_arrays == [False, True, False]
    check_equal(ours, dense)


def test_a_state_without_a_momentum_yet_gets_one(on_arrays):
    for held in (ours := parameters("rows")), (dense := dense_parameters()):
        optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
        # as older versions of torch saved it
        empty = {i: {"momentum_buffer": None} for i in range(len(held))}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": empty})
        take_steps(held, optimizer, 4)
        assert all(torch.is_tensor(optimizer.state[each]["momentum_buffer"]) for each in held)
    assert on_arrays == [False, True, True, True]
    check_equal(ours, dense)


def test_complex_parameters_are_stepped_through_views_of_real_numbers():
    start = torch.randn(5, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    dense = torch.nn.Parameter(start.clone())
    ours = loom.Parameter(start.clone(), loom.open_mesh((2, 2)), "S(0), S(0)")
    for held in (dense, ours):
        optimizer = torch.optim.NAdam([held], lr=0.05)
        optimizer.register_step_pre_hook(lambda *_: None)  # a step on tensors
        for _ in range(3):
            optimizer.zero_grad()
            held.abs().square().sum().backward()
            optimizer.step()
    check_same([ours], [dense])


@pytest.fixture
def fused_steps(monkeypatch):
    """How many arrays each fused step of Adam or AdamW had."""
    found = []
    for name in ("_fused_adam_", "_fused_adamw_"):
        own = getattr(torch, name)
        step = partial(lambda own, *args, **kwargs: (found.append(len(args[0])), own(*args, **kwargs))[1], own)
        monkeypatch.setattr(torch, name, step)
    return found


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}], ids=["plain", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_that_is_left_to_torch_is_fused_and_equals_dense_but_for_the_last_bit(name, options, dtype, fused_steps):
    shapes = ((7, 5), (64,), (33, 17), (3,), (40, 3))
    mesh = loom.open_mesh((4,))
    dense = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    ours = [loom.Parameter(each.detach().clone(), mesh, "S(0)") for each in dense]
    optimizers = [getattr(torch.optim, name)(held, lr=0.05, **options) for held in (dense, ours)]
    for _ in range(6):
        for mine, theirs in zip(ours, dense, strict=True):
            theirs.grad = torch.randn_like(theirs)
            mine.grad = loom.distribute(theirs.grad.clone(), mesh, "S(0)")
        for optimizer in optimizers:
            optimizer.step()
    assert fused_steps == [5] * 5  # the first step makes the state
    close = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for mine, theirs in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine.detach().to_torch(), theirs.detach(), **close)
        kept, expected = optimizers[1].state[mine], optimizers[0].state[theirs]
        for key, value in expected.items():
            found = kept[key].to_torch() if isinstance(kept[key], loom.Tensor) else kept[key]
            torch.testing.assert_close(found, value, **close)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_whoever_keeps_an_array_notices_a_fused_step(options, is_recorded):
    held = loom.Parameter(torch.randn(8, 4), loom.open_mesh((4,)), "S(0)")
    optimizer = torch.optim.AdamW([held], lr=0.05, **options)
    for _ in range(3):
        held.grad = loom.ones(8, 4, mesh=held.mesh, placements="S(0)")
        before = held._data._version
        with loom.record() if is_recorded else contextlib.nullcontext():
            optimizer.step()
        assert held._data._version > before


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": False}], ids=str)
def test_who_says_how_an_optimizer_steps_is_heard_to_the_bit(options, fused_steps):
    ours, dense = parameters("rows"), dense_parameters()
    for held in ours, dense:
        optimizer = torch.optim.AdamW(held, lr=0.05, **options)
        for seed in range(3):
            torch.manual_seed(seed)
            for each in held:
                drawn = torch.randn(each.shape)
                each.grad = drawn if held is dense else loom.distribute(drawn, each.mesh, each.placements)
            optimizer.step()
    assert fused_steps == []
    for mine, theirs in zip(ours, dense, strict=True):
        assert torch.equal(mine.detach().to_torch(), theirs.detach())


@pytest.mark.parametrize("what", ["a rate that is a tensor", "short floats", "a class of its own"])
def test_a_step_is_not_fused_where_that_would_be_another_one(what, fused_steps):
    class Own(torch.optim.AdamW):
        pass

    make = Own if what == "a class of its own" else torch.optim.AdamW
    rate = torch.tensor(0.05) if what == "a rate that is a tensor" else 0.05
    dtype = torch.bfloat16 if what == "short floats" else torch.float32
    held = loom.Parameter(torch.randn(8, 4, dtype=dtype), loom.open_mesh((4,)), "S(0)")
    optimizer = make([held], lr=rate)
    for _ in range(3):
        held.grad = loom.ones(8, 4, mesh=held.mesh, placements="S(0)", dtype=dtype)
        optimizer.step()
    assert fused_steps == []


def turned(tensor: torch.Tensor, mesh: loom.Mesh) -> torch.Tensor:
    """The same values, with the elements in another order in memory."""
    found = loom.distribute(tensor.t().contiguous(), mesh, "S(0)").t()
    assert not is_ordered_as(found._data, loom.distribute(tensor, mesh, "S(1)")._data)
    return found


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the third step"])
def test_a_fused_step_is_that_of_dense_whatever_the_order_of_elements_in_memory(name, late):
    """Torch's own goes through memory from end to end: with a gradient of other strides it gives wrong numbers."""
    mesh = loom.open_mesh((4,))
    options = {"momentum": 0.9} if name == "SGD" else {}
    dense = torch.nn.Parameter(torch.randn(10, 12))
    ours = loom.Parameter(dense.detach().clone(), mesh, "S(1)")
    make = getattr(torch.optim, name)
    first, second = make([dense], lr=0.1, **options), make([ours], lr=0.1, fused=True, **options)
    for step in range(5):
        dense.grad = torch.randn_like(dense)
        is_turned = step >= 2 or not late
        ours.grad = turned(dense.grad, mesh) if is_turned else loom.distribute(dense.grad, mesh, "S(1)")
        first.step()
        second.step()
        torch.testing.assert_close(ours.detach().to_torch(), dense.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(ours.grad.to_torch(), dense.grad)


def test_a_fused_step_takes_a_gradient_of_which_many_elements_are_one():
    mesh = loom.open_mesh((4,))
    dense = torch.nn.Parameter(torch.randn(8, 6))
    ours = loom.Parameter(dense.detach().clone(), mesh, "S(0)")
    line = torch.randn(8, 1)
    dense.grad, ours.grad = line.expand(8, 6), loom.distribute(line, mesh, "S(0)").expand(8, 6)
    first, second = torch.optim.AdamW([dense], lr=0.1, foreach=False), torch.optim.AdamW([ours], lr=0.1, fused=True)
    for _ in range(3):
        first.step()
        second.step()
    torch.testing.assert_close(ours.detach().to_torch(), dense.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensors", ["lr", "betas", "neither"])
def test_numbers_of_an_optimizer_may_be_tensors(as_tensors):
    lr: Any = torch.tensor(0.05) if as_tensors == "lr" else 0.05
    betas: Any = (torch.tensor(0.8), torch.tensor(0.9)) if as_tensors == "betas" else (0.8, 0.9)
    for held in (ours := parameters("rows")), (dense := dense_parameters()):
        take_steps(held, torch.optim.AdamW(held, lr=lr, betas=betas), 4)
    check_equal(ours, dense)


def test_a_fused_step_takes_state_that_was_kept_in_another_order():
    mesh = loom.open_mesh((4,))
    start, slope = torch.randn(8, 12), torch.randn(8, 12)
    found = []
    for fused in (False, True):
        ours = loom.Parameter(start.clone(), mesh, "S(1)")
        ours.grad = loom.distribute(slope, mesh, "S(1)")
        optimizer = torch.optim.AdamW([ours], lr=0.1, fused=fused)
        optimizer.step()
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[ours][key] = turned(optimizer.state[ours][key].to_torch(), mesh)
        kept = optimizer.state[ours]["exp_avg"]
        optimizer.step()
        assert optimizer.state[ours]["exp_avg"] is kept
        found.append((ours.detach().to_torch(), kept.to_torch()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_fused_step_leaves_what_lies_between_the_elements_of_a_parameter_alone():
    mesh = loom.open_mesh((2,))
    wide = loom.distribute(torch.arange(48.0).reshape(4, 12), mesh, "S(0)")
    part = wide[:, :5].detach().requires_grad_()
    assert not is_dense(part._data)
    part.grad = loom.ones(4, 5, mesh=mesh, placements="S(0)")
    dense = torch.arange(48.0).reshape(4, 12)[:, :5].clone().requires_grad_()
    dense.grad = torch.ones(4, 5)
    for held, fused in ((part, True), (dense, False)):
        optimizer = torch.optim.AdamW([held], lr=0.1, fused=fused)
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(part.detach().to_torch(), dense.detach())
    assert torch.equal(wide.detach().to_torch()[:, 5:], torch.arange(48.0).reshape(4, 12)[:, 5:])
