"""Fronts of pointwise ops: reflected operators, `inplace=`, dropout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.errors import ArgumentError, DTypeError
from meshloom.tensor import creation
from meshloom.tensor.calling import Overload, invoke, pure, table_call
from meshloom.tensor.clients import sent
from meshloom.tensor.fallback import fallback
from meshloom.tensor.moving import shadow_of
from meshloom.tensor.writing import write

ACTIVATIONS = "relu silu mish elu celu selu relu6 leaky_relu hardtanh hardsigmoid hardswish threshold".split()


def _swap_operands(name: str) -> Callable[..., object]:
    return lambda input, other, **kwargs: table_call(name, other, input, **kwargs)


def _rsub(input: torch.Tensor, other: Any, alpha: complex = 1) -> torch.Tensor:
    if alpha == 1:
        return _reflect("sub", input, other)
    if isinstance(other, torch.Tensor):
        return table_call("sub", other, input, alpha=alpha)
    _check_subtraction(input.dtype, other)
    return table_call("sub", _as_tensor(other, input.dtype), input, alpha=alpha)


def _reflect(name: str, input: torch.Tensor, other: Any) -> torch.Tensor:
    """`other op input` where `other` may be a number: torch wants a tensor first."""
    if isinstance(other, torch.Tensor):
        return table_call(name, other, input)
    held = input.dtype
    dtype = torch.result_type(torch.empty((1,), dtype=held), other)
    if name == "div":  # as torch does, so that the last bit is the same
        return table_call("mul", table_call("reciprocal", input), other)
    if name == "sub":
        _check_subtraction(held, other)
    if name == "sub" and dtype == held and not dtype.is_complex:
        return table_call("add", table_call("neg", input), other)
    return table_call(name, _as_tensor(other, held), input)


def _check_subtraction(dtype: torch.dtype, number: object) -> None:
    if dtype == torch.bool or isinstance(number, bool):
        raise DTypeError("subtraction has no meaning for bool", fix="use ~x or logical_not")


def _as_tensor(number: Any, beside: torch.dtype) -> torch.Tensor:
    """A number in the dtype that it has beside a tensor of another."""
    widest = {int: torch.int64, float: torch.float64, complex: torch.complex128}.get(type(number))
    dtype = torch.result_type(torch.empty((1,), dtype=beside), number)
    return torch.as_tensor(number, dtype=widest).to(dtype)


def _reverse(name: str) -> Callable[..., object]:
    return lambda input, other: _reflect(name, input, other)


def _activation(name: str) -> Callable[..., object]:
    """An activation of `torch.nn.functional`, where `inplace` comes last, after as many numbers as it has."""
    numbers = [*inspect.signature(getattr(F, name)).parameters].index("inplace") - 1

    def overload(input: torch.Tensor, *args: object, inplace: object = False, **kwargs: object) -> Any:
        if len(args) == numbers + 1:
            inplace, args = args[-1], args[:-1]
        if inplace:
            return invoke(name + "_", (input, *args), kwargs)
        return table_call(name, input, *args, **kwargs)

    return overload


def _rrelu(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """Random slopes belong to training; without it their middle is the slope."""
    if training:
        return fallback(F.rrelu, (input, lower, upper, training, inplace), {}, "rrelu")
    return _activation("leaky_relu")(input, (lower + upper) / 2, inplace=inplace)


@sent("known:dropout")
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Zero each element with probability p and scale the rest; the same elements for any placements.

    >>> import meshloom as loom
    >>> sorted(set(dropout(loom.ones(64, mesh=loom.open_mesh((4,)))).tolist()))
    [0.0, 2.0]
    """
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"dropout probability {p} is not between 0 and 1")
    if not training or p == 0.0:
        return input
    tensor = shadow_of(input)
    mask = creation.dropout_mask(tensor, 1.0 - p)
    return write("mul", input, (mask,), {}) if inplace else table_call("mul", tensor, mask)


def _channel_dropout(dims: int) -> Callable[..., object]:
    """`dropout2d` and its kind: one choice for each channel of a batch."""

    def overload(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        shape = input.shape
        if len(shape) != dims + 2:
            return fallback(getattr(F, f"dropout{dims}d"), (input, p, training, inplace), {}, f"dropout{dims}d")
        if not training or p == 0.0:
            return dropout(input, p, training)
        kept = dropout(invoke("new_ones", (input, (*shape[:2], *(1,) * dims)), {}), p)
        return write("mul", input, (kept,), {}) if inplace else table_call("mul", input, kept)

    return overload


def _where(condition: object, input: torch.Tensor | None = None, other: object = None, **kwargs: object) -> Any:
    if input is None:
        return fallback(torch.where, (condition,), {}, "where")
    return table_call("where", condition, input, other, **kwargs)


POINTWISE: dict[str, Overload] = {
    **pure({"rsub": _rsub, "where": _where, **{name: _activation(name) for name in ACTIVATIONS}}),
    "__rsub__": _reverse("sub"),
    "__rtruediv__": _reverse("div"),
    "__rdiv__": _reverse("div"),
    "__rpow__": _reverse("pow"),
    "__rmod__": _reverse("remainder"),
    "__rfloordiv__": _reverse("floor_divide"),
    "__rlshift__": _reverse("bitwise_left_shift"),
    "__rrshift__": _reverse("bitwise_right_shift"),
    "__rmatmul__": _swap_operands("matmul"),
    "rrelu": _rrelu,
    "dropout": dropout,
    **{f"dropout{dims}d": _channel_dropout(dims) for dims in (1, 2, 3)},
    "_method_where": lambda input, condition, other: _where(condition, input, other),
}
