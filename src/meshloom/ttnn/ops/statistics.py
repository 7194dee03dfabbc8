"""Statistics of the planes of [N, C, H, W] and of all that a device holds; and how alike two results are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.calling import Made, make, operands, register
from meshloom.ttnn.ops.reductions import reduce
from meshloom.ttnn.ops.topologies import EACH
from meshloom.ttnn.tensor.padding import mean_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["pearson_correlation_coefficient"]

PLANE = (-2, -1)


def _check(name: str, tensor: Tensor) -> None:
    if len(tensor.shape) != 4:
        raise OperandError(f"ttnn.{name} takes [N, C, H, W], not {list(tensor.shape)}", fix="ttnn.unsqueeze_to_4D")


def _spread(name: str, what: str, function: Callable[..., Block]) -> None:
    def call(input_tensor: Tensor) -> Made:
        _check(name, input_tensor)

        def over(x: Block, dims: list[int], keep: bool) -> Block:
            return function(x.float(), dims, correction=0, keepdim=keep)

        return reduce(name, over, "var", input_tensor, PLANE, True)

    register(name, f"The {what} of every plane, by the count of its elements: [N, C, 1, 1].", call)


_spread("var_hw", "variance", torch.var)
_spread("std_hw", "standard deviation", torch.std)


def _normalising(name: str, what: str, dims: Sequence[int]) -> None:
    def call(input_tensor: Tensor) -> Made:
        _check(name, input_tensor)
        _, (block,) = operands(name, input_tensor)
        apart = block.float() - mean_of(block.float(), input_tensor, dims)
        return make(apart / mean_of(apart.square(), input_tensor, dims).sqrt(), EACH, input_tensor)

    register(name, f"(x - mean) / deviation of {what}.", call)


_normalising("normalize_hw", "every plane", PLANE)
_normalising("normalize_global", "all that a device holds", (-4, -3, -2, -1))


def pearson_correlation_coefficient(expected: Any, actual: Any) -> float:
    """How alike two tensors are, of torch or of ttnn: 1 if one is the other scaled and shifted, 0 if unrelated.

    Equal tensors have 1, those without a number in common 0; infinities count as zeros beside finite numbers.

    >>> pearson_correlation_coefficient(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 5.0, 7.0]))
    1.0
    """
    first, second = (
        each.to_torch() if isinstance(each, Tensor) else torch.as_tensor(each) for each in (expected, actual)
    )
    if first.shape != second.shape:
        raise OperandError(f"pearson_correlation_coefficient: {list(first.shape)} and {list(second.shape)} differ")
    x, y = (each.detach().double().flatten() for each in (first, second))
    if (bool(x.isnan().all()) and bool(y.isnan().all())) or torch.equal(x, y):
        return 1.0
    if bool(x.isnan().all()) or bool(y.isnan().all()) or bool(x.any()) != bool(y.any()):
        return 0.0
    x, y = (torch.nan_to_num(each, nan=0.0, posinf=0.0, neginf=0.0) for each in (x, y))
    found = float(torch.corrcoef(torch.stack([x, y]))[0, 1]) if x.numel() > 1 else math.nan
    return float(torch.allclose(x, y)) if math.isnan(found) else round(found, 15)
