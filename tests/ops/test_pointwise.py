"""Pointwise ops beyond the walk over the table: numbers by name, `inplace=`, shifts, promotion, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh
from oracle import check_padding

MESH = Mesh(dp=2, tp=3)


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def spread(value: torch.Tensor, placements: str = "S(0), S(0)") -> loom.Tensor:
    return loom.distribute(value, MESH, placements)


def check_same(found: loom.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.to_torch(), expected)
    check_padding(found, "result")


@pytest.mark.parametrize("name", ["add", "sub", "copysign", "fmod"])
def test_a_number_given_by_name_leaves_padding_zero(name: str) -> None:
    value, function = dense(7, 2), getattr(torch, name)
    check_same(function(spread(value), other=2), function(value, other=2))


ACTIVATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "relu": (F.relu, ()),
    "relu6": (F.relu6, ()),
    "silu": (F.silu, ()),
    "mish": (F.mish, ()),
    "selu": (F.selu, ()),
    "elu": (F.elu, (0.5,)),
    "celu": (F.celu, (0.5,)),
    "leaky_relu": (F.leaky_relu, (0.3,)),
    "hardtanh": (F.hardtanh, (0.1, 0.4)),
    "hardsigmoid": (F.hardsigmoid, ()),
    "hardswish": (F.hardswish, ()),
    "threshold": (F.threshold, (0.1, 3.0)),
    "rrelu": (F.rrelu, (0.1, 0.3, False)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_in_place_changes_its_operand_and_equals_dense(name: str) -> None:
    function, args = ACTIVATIONS[name]
    value = dense(7, 3)
    for given, named in (((*args, True), {}), (args, {"inplace": True})):
        mine, theirs = spread(value), value.clone()
        with loom.record() as log:
            found = function(mine, *given, **named)
        assert found is mine
        assert not log.fallbacks
        check_same(mine, function(theirs, *given, **named))


def test_the_module_form_of_an_activation_communicates_nothing() -> None:
    value = dense(6, 4)
    for module in (torch.nn.Hardswish(), torch.nn.ELU(2.0), torch.nn.Softplus(), torch.nn.LogSigmoid(), torch.nn.GLU()):
        with loom.communication("forbid"):
            found = module(spread(value, "S(0), R"))
        check_same(found, module(value))


def test_random_slopes_are_drawn_by_torch_through_the_fallback() -> None:
    with loom.record() as log:
        F.rrelu(spread(dense(6, 4)), training=True)
    assert dict(log.fallbacks) == {"rrelu": 1}


def test_shifts_are_ops_of_the_table() -> None:
    whole = torch.arange(14).view(7, 2)
    mine = spread(whole)
    with loom.communication("forbid"):
        found = (spread(whole) << 2, spread(whole) >> spread(whole), 2 << spread(whole))
        mine <<= 1
    for each, expected in zip((*found, mine), (whole << 2, whole >> whole, 2 << whole, whole << 1), strict=True):
        check_same(each, expected)


PROMOTED = (
    (torch.add, torch.int64, torch.float32),
    (torch.atan2, torch.int64, torch.int32),
    (torch.xlogy, torch.int64, torch.int64),
    (torch.copysign, torch.int32, torch.float64),
    (torch.float_power, torch.float32, torch.int64),
    (torch.logaddexp, torch.float32, torch.float64),
    (torch.maximum, torch.bfloat16, torch.float32),
    (torch.ldexp, torch.float32, torch.int64),
    (torch.bitwise_left_shift, torch.int32, torch.int64),
)


@pytest.mark.parametrize(("function", "first", "second"), PROMOTED)
def test_two_dtypes_give_the_one_that_torch_gives(function: Any, first: torch.dtype, second: torch.dtype) -> None:
    a, b = ((dense(7, 2).abs() * 3 + 1).to(dtype) for dtype in (first, second))
    check_same(function(spread(a), spread(b)), function(a, b))
    check_same(function(spread(a), b[0]), function(a, b[0]))


def test_a_monotone_function_keeps_a_partial_maximum_when_asked() -> None:
    part = loom.distribute(dense(6, 4), MESH, "P(max), R")
    with loom.communication("forbid"):
        found = loom.atan(part, output="P(max), R")
    assert str(found.placements[0]) == "P(max)"
    torch.testing.assert_close(found.to_torch(), dense(6, 4).atan())


def test_gradients_can_be_added_to_that_of_sgn() -> None:
    x = loom.distribute(torch.tensor([-2.0, 0.0, 3.0]), Mesh(d=2), "S(0)").requires_grad_()
    x.sgn().sum().backward()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
