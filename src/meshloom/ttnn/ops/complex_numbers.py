"""Complex numbers: a tensor of real and one of imaginary parts, ops on them, and the backward ops.

Gradients are torch's: of a real function of z, the one along conj(z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.calling import Made, make, op, operands, register
from meshloom.ttnn.ops.topologies import EACH, LINEAR, Named
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.parts import Block, lead
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["ComplexTensor"]


@dataclass(frozen=True)
class ComplexTensor:
    """Real and imaginary parts; of `polar`, lengths and angles.

    >>> from meshloom import ttnn
    >>> import torch
    >>> z = ttnn.complex_tensor(ttnn.from_torch(torch.ones(2)), ttnn.from_torch(torch.zeros(2)))
    >>> z.real is z[0], z.imag is z[1]
    (True, True)
    """

    real: Tensor
    imag: Tensor

    def __post_init__(self) -> None:
        for part in (self.real, self.imag):
            if not isinstance(part, Tensor):
                raise ArgumentError(f"a ComplexTensor is made of two tensors, not of a {type(part).__name__}")
        if tuple(self.real.shape) != tuple(self.imag.shape):
            raise OperandError(f"real parts {list(self.real.shape)} and imaginary ones {list(self.imag.shape)} differ")

    def __getitem__(self, number: int) -> Tensor:
        return (self.real, self.imag)[number]

    def deallocate(self) -> None:
        """Give back the memory of both."""
        self.real.deallocate(force=True)
        self.imag.deallocate(force=True)


Number = Tensor | ComplexTensor


def _parts(*values: Number) -> list[Tensor]:
    listed = [(each.real, each.imag) if isinstance(each, ComplexTensor) else (each,) for each in values]
    return [part for pair in listed for part in pair]


def _check(name: str, *values: Any) -> None:
    for each in values:
        if not isinstance(each, ComplexTensor):
            raise ArgumentError(
                f"ttnn.{name} takes a ComplexTensor, not a {type(each).__name__}", fix="ttnn.complex_tensor(real, imag)"
            )


def _blocks(name: str, *values: Number) -> list[Block]:
    """The values of operands in float32, complex ones as torch's complex numbers."""
    given = iter(operands(name, *_parts(*values))[1])
    found = []
    for each in values:
        block = next(given).float()
        found.append(
            torch.complex(*torch.broadcast_tensors(block, next(given).float())) if _is_complex(each) else block
        )
    return found


def _is_complex(value: Any) -> bool:
    return isinstance(value, ComplexTensor)


def _pair(z: Block, rule: Named, *values: Number, memory_config: MemoryConfig | None = None) -> ComplexTensor:
    """A complex block as two tensors, labelled by the rule for all parts of the operands."""
    tensors = _parts(*values)
    first, second = (
        make(part.contiguous(), rule, *tensors).tensor(memory_config=memory_config) for part in (z.real, z.imag)
    )
    return ComplexTensor(first, second)


@op("complex_tensor")
def complex_tensor(real, imag) -> ComplexTensor:
    """Two tensors as one of complex numbers."""
    return ComplexTensor(real, imag)


@op("real")
def real(input_tensor: ComplexTensor) -> Made:
    """The real parts."""
    return _part("real", input_tensor, 0)


@op("imag")
def imag(input_tensor: ComplexTensor) -> Made:
    """The imaginary parts."""
    return _part("imag", input_tensor, 1)


def _part(name: str, z: ComplexTensor, number: int) -> Made:
    _check(name, z)
    _, (block,) = operands(name, z[number])
    return make(block.clone(), LINEAR, z[number])


@op("angle")
def angle(input_tensor: ComplexTensor) -> Made:
    """The angle of every number, from -pi to pi."""
    _check("angle", input_tensor)
    (z,) = _blocks("angle", input_tensor)
    return make(z.angle(), EACH, *_parts(input_tensor))


@op("is_real")
def is_real(input_tensor: ComplexTensor) -> Made:
    """1 where the imaginary part is zero, else 0."""
    _check("is_real", input_tensor)
    (z,) = _blocks("is_real", input_tensor)
    return make(z.imag == 0, EACH, *_parts(input_tensor))


@op("is_imag")
def is_imag(input_tensor: ComplexTensor) -> Made:
    """1 where the real part is zero, else 0."""
    _check("is_imag", input_tensor)
    (z,) = _blocks("is_imag", input_tensor)
    return make(z.real == 0, EACH, *_parts(input_tensor))


@op("conj")
def conj(input_tensor: ComplexTensor, *, memory_config=None) -> ComplexTensor:
    """The same real parts, and imaginary ones with the other sign."""
    _check("conj", input_tensor)
    (z,) = _blocks("conj", input_tensor)
    return _pair(z.conj().resolve_conj(), EACH, input_tensor, memory_config=memory_config)


@op("polar")
def polar(input_tensor: ComplexTensor, *, memory_config=None) -> ComplexTensor:
    """Numbers from their lengths (the real parts) and angles (the imaginary ones)."""
    _check("polar", input_tensor)
    (z,) = _blocks("polar", input_tensor)
    return _pair(torch.polar(z.real, z.imag), EACH, input_tensor, memory_config=memory_config)


# what ops of real numbers do with complex ones


def magnitude(z: ComplexTensor) -> Made:
    """The length of every number."""
    (block,) = _blocks("abs", z)
    return make(block.abs(), EACH, *_parts(z))


def invert(z: ComplexTensor, memory_config: MemoryConfig | None = None) -> ComplexTensor:
    """One over every number."""
    (block,) = _blocks("reciprocal", z)
    return _pair(block.reciprocal(), EACH, z, memory_config=memory_config)


# backward ops


def complex_gradients(
    name: str,
    function: Callable[..., Block],
    grad: Number,
    *values: ComplexTensor,
    memory_config: MemoryConfig | None = None,
) -> list[ComplexTensor]:
    """The gradient of every operand of a function of complex numbers, given that of its result."""
    _check(name, *values)
    upper, *blocks = _blocks(name, grad, *values)
    axes = len(values[0].real.grid)
    sizes = lead((upper, *blocks), axes)
    with torch.enable_grad():
        leaves = [block.detach().expand(*sizes, *block.shape[axes:]).clone().requires_grad_() for block in blocks]
        found = function(*leaves)
        flows = torch.autograd.grad(found, leaves, upper.expand(found.shape).to(found.dtype), allow_unused=True)
    made = []
    for leaf, flow, value in zip(leaves, flows, values, strict=True):
        z = torch.zeros_like(leaf) if flow is None else flow.detach()
        made.append(_pair(z.resolve_conj(), EACH, value, grad, *values, memory_config=memory_config))
    return made


_BACKWARD: dict[str, tuple[str, Callable[[Block], Block]]] = {
    "real": ("the real parts", lambda z: z.real),
    "imag": ("the imaginary parts", lambda z: z.imag),
    "angle": ("the angles", torch.angle),
    "conj": ("the conjugates", torch.conj),
    "polar": ("numbers from lengths and angles", lambda z: torch.polar(z.real, z.imag)),
}


def _register(name: str, what: str, function: Callable[[Block], Block]) -> None:
    def call(
        grad_tensor: Number, input_tensor: ComplexTensor, *, memory_config: MemoryConfig | None = None
    ) -> list[ComplexTensor]:
        return complex_gradients(f"{name}_bw", function, grad_tensor, input_tensor, memory_config=memory_config)

    register(f"{name}_bw", f"The gradient of complex numbers, from that of {what}.", call)


for _name, (_what, _function) in _BACKWARD.items():
    _register(_name, _what, _function)
