"""Fourier transforms along the last dim, of real and imaginary parts that are tensors of their own.

Hardware needs one op for every way to split up a length; here all of them are torch's transform. `precision` concerns
speed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.calling import Made, make, op, operands
from meshloom.ttnn.ops.topologies import EACH, Rows, moves
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

Two = tuple[Made, Made]
PRECISE = "precise"


def _complex(name: str, real: Tensor, imag: Tensor | None) -> tuple[Block, list[Tensor]]:
    given = [real] if imag is None else [real, imag]
    _, blocks = operands(name, *given)
    if imag is not None and tuple(imag.shape) != tuple(real.shape):
        raise OperandError(f"ttnn.{name}: real parts {list(real.shape)} and imaginary ones {list(imag.shape)} differ")
    first = blocks[0].float()
    second = blocks[1].float() if imag is not None else torch.zeros_like(first)
    return torch.complex(*torch.broadcast_tensors(first, second)), given


def _transform(
    name: str, real: Tensor, imag: Tensor | None, size: int | None, function: Callable[..., Block] = torch.fft.fft
) -> Two:
    """A transform of every row, whose dim must be whole on each device."""
    block, given = _complex(name, real, imag)
    if size is not None and size != real.shape[-1]:
        raise OperandError(f"ttnn.{name}: rows of {real.shape[-1]} elements, and a transform of {size}")
    kept: tuple[int | None, ...] = (*range(len(real.shape) - 1), None)
    return _two(function(block), moves(*(kept for _ in given)), given)


def _two(block: Block, rule: Rows, given: list[Tensor]) -> Two:
    real, imag = block.real.contiguous(), block.imag.contiguous()
    return make(real, rule, *given), make(imag, rule, *given)


def _tensor(given: object) -> Tensor | None:
    """An imaginary part at its place, if it is no length or precision that stands there."""
    return given if isinstance(given, Tensor) else None


@op("experimental.fft")
def fft(input_real, input_imag: Tensor | str | None = None, precision=PRECISE) -> Two:
    """The Fourier transform of every row, as real and imaginary parts."""
    return _transform("experimental.fft", input_real, _tensor(input_imag), None)


@op("experimental.ifft")
def ifft(spectrum_real, spectrum_imag, precision=PRECISE) -> Two:
    """The inverse Fourier transform of every row: that of its transform is the row."""
    return _transform("experimental.ifft", spectrum_real, spectrum_imag, None, torch.fft.ifft)


@op("experimental.bluestein_fft")
def bluestein_fft(
    input_real, input_imag: Tensor | int | None = None, N: int | str | None = None, precision=PRECISE
) -> Two:
    """The Fourier transform of rows of any length N."""
    size = input_imag if isinstance(input_imag, int) else N if isinstance(N, int) else None
    return _transform("experimental.bluestein_fft", input_real, _tensor(input_imag), size)


@op("experimental.fft_three_pass")
def fft_three_pass(
    input_real, input_imag: Tensor | int | None = None, full_N=None, precision=PRECISE, inverse=False
) -> Two:
    """The Fourier transform of long rows, or the inverse one."""
    size = input_imag if isinstance(input_imag, int) else full_N if isinstance(full_N, int) else None
    function = torch.fft.ifft if inverse else torch.fft.fft
    return _transform("experimental.fft_three_pass", input_real, _tensor(input_imag), size, function)


@op("experimental.apply_twiddles")
def apply_twiddles(input_real, input_imag: Tensor, N1, N2) -> Two:
    """Matrices [..., N1, N2] times exp(-2 pi i * row * column / (N1 * N2)), between the two passes of a transform."""
    name = "experimental.apply_twiddles"
    block, given = _complex(name, input_real, input_imag)
    if tuple(input_real.shape[-2:]) != (N1, N2):
        raise OperandError(f"ttnn.{name}: matrices of {N1} x {N2}, not {list(input_real.shape)}")
    angles = -2 * math.pi / (N1 * N2) * torch.outer(torch.arange(N1), torch.arange(N2)).double()
    factors = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    kept: tuple[int | None, ...] = (*range(len(input_real.shape) - 2), None, None)
    return _two(block * factors, moves(kept, kept), given)


@op("experimental.complex_mul")
def complex_mul(a_real, a_imag, b_real, b_imag) -> Two:
    """The products of complex numbers."""
    name = "experimental.complex_mul"
    first, left = _complex(name, a_real, a_imag)
    second, right = _complex(name, b_real, b_imag)
    block, given = first * second, [*left, *right]
    return make(block.real.contiguous(), EACH, *given), make(block.imag.contiguous(), EACH, *given)
