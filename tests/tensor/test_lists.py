"""Functions of lists: `foreach` and `fused` optimizers, clipping, `torch._foreach_*` and scalers equal dense."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import meshloom as loom
import ranks
from meshloom import Mesh

OPTIMIZERS = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and "foreach" in inspect.signature(found.__init__).parameters
}
FUSED = [name for name, found in OPTIMIZERS.items() if "fused" in inspect.signature(found.__init__).parameters]
FLAGS = [(name, "foreach") for name in OPTIMIZERS] + [(name, "fused") for name in FUSED]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "lr": 0.01}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
}
EVEN, UNEVEN = ((8, 4), (4, 8), (8,)), ((5, 7), (3, 2), (7,), (1, 3))
LAYOUTS: dict[str, tuple[Mesh, tuple[tuple[int, ...], ...], list[str]]] = {
    "even": (Mesh(d=2), EVEN, ["S(0)"]),
    "uneven": (Mesh(d=3), UNEVEN, ["S(0)"]),
    "two axes": (Mesh(a=2, b=2), EVEN, ["S(0), R", "S(0), S(0)"]),
    "two axes, uneven": (Mesh(a=2, b=3), UNEVEN, ["S(0), S(0)", "R, S(0)"]),
    "both dims": (Mesh(a=2, b=2), EVEN[:2], ["S(0), S(1)", "S(1), S(0)"]),
    "both dims, uneven": (Mesh(a=2, b=3), ((5, 7), (3, 2), (1, 3)), ["S(0), S(1)", "S(1), S(0)", "S(1), S(1)"]),
    "replicated": (Mesh(a=2, b=2), UNEVEN, ["R, R"]),
    "all kinds": (Mesh(a=2, b=3), (*EVEN, *UNEVEN), ["S(0), R", "R, R", "S(0), S(0)", "R, S(0)"]),
}


def values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def pair(layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters, dense and on a mesh, with gradients to come."""
    mesh, shapes, placements = LAYOUTS[layout]
    dense = [torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(shapes)]
    ours = [
        loom.Parameter(loom.distribute(each.detach().clone(), mesh, placements[i % len(placements)]))
        for i, each in enumerate(dense)
    ]
    return dense, ours


def backward(parameters: Sequence[torch.Tensor], step: int) -> None:
    loss: Any = 0
    for i, each in enumerate(parameters):
        other = values(each.shape, 100 * step + i)
        if isinstance(each, loom.Tensor):
            other = loom.distribute(other, each.mesh, each.placements)
        loss = loss + (each * each * other).sum()
    loss.backward()


def check_close(ours: Sequence[Any], dense: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(dense) > 0
    for mine, theirs in zip(ours, dense, strict=True):
        assert isinstance(mine, loom.Tensor)
        torch.testing.assert_close(mine.detach().to_torch(), theirs.detach(), rtol=1e-5, atol=1e-6)
        check_padding(mine)


def check_padding(tensor: loom.Tensor) -> None:
    """What a process holds beyond the tensor is zero."""
    if tensor.topology.padded:
        held = float(tensor.block.detach().double().abs().sum())
        seen = sum(
            float(tensor.shard_at(place).detach().double().abs().sum())
            for place in tensor.mesh.coordinates()
            if all(c == 0 or str(p) != "R" for c, p in zip(place, tensor.placements, strict=True))
        )
        assert math.isclose(held, seen, rel_tol=1e-12) or not math.isfinite(seen)


def check_state(ours: torch.optim.Optimizer, dense: torch.optim.Optimizer) -> None:
    """All state is that of dense, and lies where the parameters do."""
    for (mine, kept), (_, expected) in zip(ours.state.items(), dense.state.items(), strict=True):
        assert set(kept) == set(expected)
        for name, value in kept.items():
            if isinstance(value, loom.Tensor):
                check_close([value], [expected[name]])
                if value.shape == mine.shape and name not in ("row_var", "col_var"):
                    assert value.placements == mine.placements, name
            elif isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[name])


def train(optimizers: Sequence[Any], parameters: Sequence[Any], steps: range) -> None:
    """Steps of every optimizer on its own parameters."""
    for step in steps:
        for optimizer, own in zip(optimizers, parameters, strict=True):
            optimizer.zero_grad()
            backward(own, step)
            optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_optimizers_of_lists_are_those_of_dense(name, flag, layout):
    for options in OPTIONS.get(name, [{}]):
        dense, ours = pair(layout)
        made = [OPTIMIZERS[name](each, **{flag: True}, **options) for each in (dense, ours)]
        train(made, (dense, ours), range(5))
        check_close(ours, dense)
        check_state(made[1], made[0])


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_take_their_rate_as_a_tensor_where_those_of_dense_do(name):
    dense, ours = pair("all kinds")
    made = [OPTIMIZERS[name](each, lr=torch.tensor(0.02), fused=True) for each in (dense, ours)]
    train(made, (dense, ours), range(3))
    check_close(ours, dense)


@pytest.mark.parametrize("layout", ["uneven", "all kinds"])
@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("source", ["ours", "dense"])
def test_optimizers_of_lists_go_on_with_loaded_state(name, flag, layout, source):
    dense, ours = pair(layout)
    made = [OPTIMIZERS[name](each, **{flag: True}) for each in (dense, ours)]
    train(made, (dense, ours), range(2))
    states = [each.state_dict() for each in made]
    made = [OPTIMIZERS[name](each, **{flag: True}) for each in (dense, ours)]
    made[0].load_state_dict(copy.deepcopy(states[0]))
    made[1].load_state_dict(copy.deepcopy(states[source == "ours"]))
    if source == "dense" and flag == "fused" and name != "SGD":  # which keeps nothing without momentum
        backward(ours, 2)
        with pytest.raises(loom.UnsupportedError, match="lie alike"):
            made[1].step()
        return
    train(made, (dense, ours), range(2, 5))
    check_close(ours, dense)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_of_lists_is_that_of_dense(layout):
    for norm in (1.0, 2.0, math.inf):
        dense, ours = pair(layout)
        totals = []
        for parameters in (dense, ours):
            backward(parameters, 1)
            totals.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=norm, foreach=True))
        torch.testing.assert_close(totals[1].to_torch(), totals[0])
        check_close([each.grad for each in ours], [each.grad for each in dense])
        for parameters in (dense, ours):
            torch.nn.utils.clip_grad_value_(parameters, 0.05, foreach=True)
            again = torch.nn.utils.get_total_norm([each.grad for each in parameters], norm, foreach=True)
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.01, again, foreach=True)
        check_close([each.grad for each in ours], [each.grad for each in dense])


def scaled_steps(flag: str | None, *sides: list[Any]) -> Iterator[tuple[list[Any], Any, Any, int]]:
    """Four steps of an optimizer with a scaler on each side: parameters, optimizer, scaler and the step's number."""
    for parameters in sides:
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **({flag: True} if flag else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            yield parameters, optimizer, scaler, step


@pytest.mark.parametrize("flag", ["foreach", "fused", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_with_plain_parameters_among_ours_are_those_of_dense(layout, flag):
    dense, ours = pair(layout)
    dense.insert(1, torch.nn.Parameter(values((3, 4))))
    ours.insert(1, torch.nn.Parameter(values((3, 4))))
    told = []
    for parameters, optimizer, scaler, step in scaled_steps(flag, dense, ours):
        backward([each for each in parameters if each is not parameters[1]], step)
        scaler.scale(parameters[1].square().sum()).backward()
        if step == 2:
            parameters[1].grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        for norm in (2.0, math.inf):
            told.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm, foreach=flag == "foreach")))
        torch.nn.utils.clip_grad_value_(parameters, 0.5, foreach=flag == "foreach")
        scaler.step(optimizer)
        scaler.update()
    assert told[:8] == pytest.approx(told[8:], nan_ok=True)
    torch.testing.assert_close(ours.pop(1), dense.pop(1))
    check_close(ours, dense)


@pytest.mark.parametrize("act", [lambda x: torch._foreach_norm([x]), lambda x: torch._foreach_max([x]), "scaler"])
@pytest.mark.parametrize("rows", [4, 5])
def test_reductions_of_lists_are_recorded_and_forbidden(act, rows):
    if act == "scaler":

        def act(x: Any) -> None:
            torch._amp_foreach_non_finite_check_and_unscale_([x], torch.zeros(1), torch.ones(1))

    x = loom.ones(rows, 3, mesh=Mesh(d=2), placements="S(0)")
    with loom.record() as story:
        act(x)
    assert [event.kind for event in story.events] == ["all_reduce"]
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError):
        act(x)
    with loom.record() as story:
        torch._foreach_mul_([x], 2.0)
    assert not story.events


def test_a_norm_that_is_not_finite_is_an_error_as_in_dense():
    dense, ours = pair("uneven")
    for parameters in (dense, ours):
        backward(parameters, 1)
        with torch.no_grad():
            parameters[0].grad[4, 0] = math.inf
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, foreach=True)


MESH = Mesh(a=2, b=3)
PLACES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "alike": (["S(0), R", "R, S(0)", "R, R"],) * 3,
    "mixed": (["S(0), R", "R, R", "S(0), S(0)"], ["R, S(0)", "S(0), R", "R, R"], ["R, R", "S(0), R", "S(0), R"]),
    "partial": (["S(0), P(sum)", "P(sum), R", "R, R"],) * 3,
    "partial and not": (["S(0), P(sum)", "P(max), R", "R, R"], ["R, R"] * 3, ["S(0), R"] * 3),
}
SIZES = ((4, 6), (5, 7), (3,))
NUMBERS, EACH = 1.5, [0.5, 2.0, 3.0]

# torch's functions of lists; `a`, `b`, `c` are lists of tensors
FORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{
        name: (lambda op: lambda a, b, c: op(a))(getattr(torch, f"_foreach_{name}"))
        for name in "abs neg exp sigmoid tanh sin cos ceil floor round trunc frac sign erf expm1 clone cosh".split()
    },
    "add of a number": lambda a, b, c: torch._foreach_add(a, NUMBERS),
    "add of numbers": lambda a, b, c: torch._foreach_add(a, EACH),
    "add of lists": lambda a, b, c: torch._foreach_add(a, b),
    "add of lists, scaled": lambda a, b, c: torch._foreach_add(a, b, alpha=2.0),
    "add of a tensor": lambda a, b, c: torch._foreach_add(a, torch.tensor(2.0)),
    "sub of lists": lambda a, b, c: torch._foreach_sub(a, b),
    "mul of a number": lambda a, b, c: torch._foreach_mul(a, NUMBERS),
    "mul of numbers": lambda a, b, c: torch._foreach_mul(a, EACH),
    "mul of lists": lambda a, b, c: torch._foreach_mul(a, b),
    "mul of a tensor": lambda a, b, c: torch._foreach_mul(a, torch.tensor(2.0)),
    "div of a number": lambda a, b, c: torch._foreach_div(a, NUMBERS),
    "div of numbers": lambda a, b, c: torch._foreach_div(a, EACH),
    "div of lists": lambda a, b, c: torch._foreach_div(a, torch._foreach_add(torch._foreach_abs(b), 1.0)),
    "maximum of lists": lambda a, b, c: torch._foreach_maximum(a, b),
    "minimum of a number": lambda a, b, c: torch._foreach_minimum(a, 0.1),
    "maximum of numbers": lambda a, b, c: torch._foreach_maximum(a, EACH),
    "clamp_max of lists": lambda a, b, c: torch._foreach_clamp_max(a, b),
    "clamp_min of a number": lambda a, b, c: torch._foreach_clamp_min(a, 0.2),
    "pow of a number": lambda a, b, c: torch._foreach_pow(a, 2),
    "pow of numbers": lambda a, b, c: torch._foreach_pow(a, [2, 3, 1]),
    "pow of lists": lambda a, b, c: torch._foreach_pow(torch._foreach_exp(a), b),
    "a number to the power of a list": lambda a, b, c: torch._foreach_pow(2.0, a),
    "lerp by a number": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp by numbers": lambda a, b, c: torch._foreach_lerp(a, b, EACH),
    "lerp by lists": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "addcmul with a number": lambda a, b, c: torch._foreach_addcmul(a, b, c, 0.5),
    "addcmul with value": lambda a, b, c: torch._foreach_addcmul(a, b, c, value=0.5),
    "addcmul with numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, EACH),
    "addcmul with a tensor": lambda a, b, c: torch._foreach_addcmul(a, b, c, torch.tensor(EACH)),
    "addcdiv with numbers": lambda a, b, c: torch._foreach_addcdiv(a, b, torch._foreach_exp(c), EACH),
    "norm": lambda a, b, c: torch._foreach_norm(a),
    "norm 1": lambda a, b, c: torch._foreach_norm(a, 1),
    "norm inf": lambda a, b, c: torch._foreach_norm(a, math.inf),
    "norm in f64": lambda a, b, c: torch._foreach_norm(a, 2, dtype=torch.float64),
    "max": lambda a, b, c: torch._foreach_max(a),
    "max of what is below zero": lambda a, b, c: torch._foreach_max(torch._foreach_sub(a, 100.0)),
    "powsum": lambda a, b, c: torch._foreach_powsum(a, 2),
    "log of what padding makes infinite": lambda a, b, c: torch._foreach_log(torch._foreach_abs(a)),
    "reciprocal": lambda a, b, c: torch._foreach_reciprocal(a),
    "rsqrt": lambda a, b, c: torch._foreach_rsqrt(torch._foreach_abs(a)),
    "mm of what lies alike": lambda a, b, c: torch._foreach_mm([a[0][:, :4]], [b[0][:, :4]]),
    "mm": lambda a, b, c: torch._foreach_mm([a[0], a[1]], [b[0].T, b[1].T]),
}
WRITTEN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add_ of a number": lambda a, b, c: torch._foreach_add_(a, NUMBERS),
    "add_ of numbers": lambda a, b, c: torch._foreach_add_(a, EACH),
    "add_ of lists, scaled": lambda a, b, c: torch._foreach_add_(a, b, alpha=-0.1),
    "mul_ of a tensor": lambda a, b, c: torch._foreach_mul_(a, torch.tensor(3.0)),
    "mul_ of lists": lambda a, b, c: torch._foreach_mul_(a, b),
    "div_ of numbers": lambda a, b, c: torch._foreach_div_(a, EACH),
    "lerp_ by a number": lambda a, b, c: torch._foreach_lerp_(a, b, 0.25),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, value=0.5),
    "addcmul_ with a tensor": lambda a, b, c: torch._foreach_addcmul_(a, b, c, torch.tensor(EACH)),
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b),
    "zero_": lambda a, b, c: torch._foreach_zero_(a),
    "sqrt_": lambda a, b, c: torch._foreach_sqrt_(a),
    "exp_": lambda a, b, c: torch._foreach_exp_(a),
    "reciprocal_": lambda a, b, c: torch._foreach_reciprocal_(a),
    "maximum_": lambda a, b, c: torch._foreach_maximum_(a, b),
    "clamp_min_": lambda a, b, c: torch._foreach_clamp_min_(a, 0.1),
}


def three(places: str) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    dense = [[values(size, 10 * i + j) for j, size in enumerate(SIZES)] for i in range(3)]
    ours = [
        [_put(value, placements) for value, placements in zip(each, where, strict=True)]
        for each, where in zip(dense, PLACES[places], strict=True)
    ]
    return dense, ours


def _put(value: torch.Tensor, placements: str) -> loom.Tensor:
    whole = loom.distribute(value, MESH, "R, R")
    return whole if placements == "R, R" else whole.redistribute(placements)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_functions_of_lists_are_those_of_dense(form, places):
    dense, ours = three(places)
    expected, found = FORMS[form](*dense), FORMS[form](*ours)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, loom.Tensor) and mine.dtype == theirs.dtype and mine.shape == theirs.shape
        torch.testing.assert_close(mine.to_torch(), theirs, equal_nan=True, rtol=1e-5, atol=1e-5)
        check_padding(mine)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("form", WRITTEN)
def test_functions_that_write_lists_are_those_of_dense(form, places):
    dense, ours = three(places)
    ours[0] = [each.abs() for each in ours[0]]
    dense[0] = [each.abs() for each in dense[0]]
    kept = [each.placements for each in ours[0]]
    views = [[each[1:] for each in lists[0]] for lists in (dense, ours)]
    WRITTEN[form](*dense)
    WRITTEN[form](*ours)
    assert [each.placements for each in ours[0]] == kept
    for mine, theirs in zip([*ours[0], *views[1]], [*dense[0], *views[0]], strict=True):
        torch.testing.assert_close(mine.to_torch(), theirs, equal_nan=True, rtol=1e-5, atol=1e-5)
    for mine in ours[0]:
        check_padding(mine)


@pytest.mark.parametrize("form", WRITTEN)
def test_functions_that_write_lists_of_views_write_the_bases(form):
    dense, ours = three("alike")
    for lists in (dense, ours):
        lists[0] = [each.abs() for each in lists[0]]
        WRITTEN[form](*([each[1:] for each in part] for part in lists))
    for mine, theirs in zip(ours[0], dense[0], strict=True):
        torch.testing.assert_close(mine.to_torch(), theirs, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_gradients_go_through_functions_of_lists():
    dense, ours = three("alike")
    for lists in (dense, ours):
        for each in lists[0]:
            each.requires_grad_()
        made = torch._foreach_mul(torch._foreach_exp(lists[0]), lists[1])
        sum((each * each).sum() for each in made).backward()
    check_close([each.grad for each in ours[0]], [each.grad for each in dense[0]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flag", ["foreach", "fused", None])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_a_scaler_steps_and_skips_as_in_dense(layout, flag, bad):
    dense, ours = pair(layout)
    told = []
    for parameters, optimizer, scaler, step in scaled_steps(flag, dense, ours):
        loss = sum((each * each).sum() for each in parameters)
        scaler.scale(loss).backward()
        if bad is not None and step == 1:
            with torch.no_grad():
                parameters[-1].grad.view(-1)[-1] = bad
        before = [each.detach().clone() for each in parameters]
        scaler.unscale_(optimizer) if step % 2 == 0 and flag != "fused" else None
        scaler.step(optimizer)
        scaler.update()
        moved = any(bool((a != b).any()) for a, b in zip(before, parameters, strict=True))
        told.append((scaler.get_scale(), moved))
    assert told[:4] == told[4:]
    assert [moved for _, moved in told[:4]] == [True, bad is None, True, True]
    check_close(ours, dense)


@pytest.mark.parametrize("placements", ["S(0)", "S(1)"])
def test_all_processes_skip_a_step_when_the_part_of_one_is_infinite(placements):
    first, second = ranks.run(2, "memory_ranks:scaled", placements)
    assert set(first) == set(second) == {(bad, fused) for bad in (None, 0, 1) for fused in (False, True)}
    for (bad, fused), (scales, values) in first.items():
        others = second[bad, fused]
        assert scales == others[0] == ([8.0] * 3 if bad is None else [8.0, 4.0, 4.0])
        for one, other in zip(values, others[1], strict=True):
            assert torch.equal(one, other) and bool(one.isfinite().all())
        assert torch.equal(values[0], values[1]) == (bad is not None)
        assert not torch.equal(values[1], values[2])


@pytest.mark.parametrize("placements", ["S(0)", "S(1)", "R"])
def test_optimizers_of_lists_are_those_of_dense_between_processes_and_do_not_communicate(placements):
    first, second = ranks.run(2, "memory_ranks:lists", placements)
    assert first == second < 1e-5


def test_lists_seen_before_are_refused_on_a_closed_mesh():
    from meshloom.runtime import open_mesh_device

    with open_mesh_device((2,)) as mesh:
        held = [loom.ones(4, mesh=mesh) for _ in range(2)]
        for _ in range(2):
            torch._foreach_add_(held, 1.0)
    with pytest.raises(loom.ClosedError):
        torch._foreach_add_(held, 1.0)
