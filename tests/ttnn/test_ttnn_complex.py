"""Complex numbers against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from ttnn_op_cases import Case, OpCases

SHAPE = (2, 1, 4, 6)


def z(real: Any, imag: Any) -> Any:
    return ttnn.complex_tensor(real, imag) if isinstance(real, ttnn.Tensor) else torch.complex(real, imag)


def one(name: str, function: Any, *cuts: str) -> Case:
    """An op of one operand, from its parts."""
    return Case(
        name, lambda r, i: getattr(ttnn, name)(z(r, i)), lambda r, i: parts(function(z(r, i))), [SHAPE] * 2, cuts
    )


def parts(found: torch.Tensor) -> Any:
    return (found.real, found.imag) if found.is_complex() else found


def flow(function: Any, grad: torch.Tensor, *values: torch.Tensor) -> list[Any]:
    leaves = [value.clone().requires_grad_() for value in values]
    return [parts(each) for each in torch.autograd.grad(function(*leaves), leaves, grad)]


def backward(name: str, function: Any, real_grad: bool, count: int = 1, **numbers: float) -> Case:
    """A backward op: of the gradient, then the operands."""
    heads = 1 if real_grad else 2

    def call(*given: Any) -> Any:
        grad = given[0] if real_grad else z(*given[:2])
        pairs = [z(*given[at : at + 2]) for at in range(heads, len(given), 2)]
        if isinstance(given[0], ttnn.Tensor):
            return getattr(ttnn, f"{name}_bw")(grad, *pairs, *numbers.values())
        return flow(function, grad, *pairs)

    width = heads + 2 * count
    return Case(f"{name}_bw", call, call, [SHAPE] * width, [", ".join(["S(0)"] * width) + " -> S(0)"])


EACH = "S(0), S(0) -> S(0)", "S(3), S(3) -> S(3)", "R, R -> R", "P(sum), P(sum) -> P(unknown)"
CASES = [
    one("angle", torch.angle, *EACH),
    one("conj", torch.conj_physical, *EACH),
    one("polar", lambda x: torch.polar(x.real, x.imag), *EACH),
    one("real", torch.real, "S(0), S(0) -> S(0)", "P(sum), P(sum) -> P(sum)"),
    one("imag", torch.imag, "S(2), S(2) -> S(2)", "P(sum), P(sum) -> P(sum)"),
    one("abs", torch.abs, *EACH),
    one("reciprocal", torch.reciprocal, *EACH),
    backward("real", torch.real, True),
    backward("imag", torch.imag, True),
    backward("angle", torch.angle, True),
    backward("conj", torch.conj, False),
    backward("polar", lambda x: torch.polar(x.real, x.imag), False),
    backward("abs", torch.abs, True),
    backward("reciprocal", torch.reciprocal, False),
    backward("add", lambda x, y: x + 0.5 * y, False, 2, alpha=0.5),
    backward("sub", lambda x, y: x - 0.5 * y, False, 2, alpha=0.5),
    backward("mul", torch.mul, False, 2),
    backward("div", torch.div, False, 2),
]


class TestComplexNumbers(OpCases):
    cases = CASES


def test_numbers_on_the_axes_are_found_and_ones_of_length_zero_have_no_gradient() -> None:
    real, imag = ttnn.from_torch(torch.tensor([1.0, 0.0, 2.0])), ttnn.from_torch(torch.tensor([0.0, 0.0, 3.0]))
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    number = ttnn.complex_tensor(*(ttnn.to_device(each, mesh) for each in (real, imag)))
    assert ttnn.is_real(number).to_list() == [1.0, 1.0, 0.0] and ttnn.is_imag(number).to_list() == [0.0, 1.0, 0.0]
    (found,) = ttnn.abs_bw(ttnn.ones([3], device=mesh, dtype=ttnn.float32), number)
    assert found.real.to_list()[1] == found.imag.to_list()[1] == 0.0
    assert ttnn.reciprocal(number, memory_config=ttnn.L1_MEMORY_CONFIG).imag.memory_config() == ttnn.L1_MEMORY_CONFIG
    kept = ttnn.conj_bw(number, number, memory_config=ttnn.L1_MEMORY_CONFIG)[0]
    assert kept.real.memory_config() == kept[1].memory_config() == ttnn.L1_MEMORY_CONFIG
    number.deallocate()
    assert not number.real.is_allocated() and not number.imag.is_allocated()
    ttnn.close_mesh_device(mesh)


def test_a_complex_tensor_is_two_tensors_of_one_shape() -> None:
    x = ttnn.from_torch(torch.ones(2))
    with pytest.raises(ArgumentError, match="two tensors"):
        ttnn.complex_tensor(x, 1.0)
    with pytest.raises(OperandError, match="differ"):
        ttnn.complex_tensor(x, ttnn.from_torch(torch.ones(3)))
    with pytest.raises(ArgumentError, match="takes a ComplexTensor, not a Tensor"):
        ttnn.angle(x)
