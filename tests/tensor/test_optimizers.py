"""Every class of torch.optim takes the same steps on parameters of any placement as on dense ones."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import meshloom as loom
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
