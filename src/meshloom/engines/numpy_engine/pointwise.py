"""Functions that act on each element, with torch's dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshloom.engines.engine import Function
from meshloom.engines.numpy_engine.local import Array
from meshloom.engines.numpy_engine.promotion import as_float, is_float, need_float, need_number, together
from meshloom.errors import ArgumentError, DTypeError

Formula = Callable[..., Array]


def _binary(function: Formula) -> Function:
    """On two operands in their common dtype, which the result has."""

    def apply(input: Array | complex, other: Array | complex) -> Array:
        left, right = together(input, other)
        return function(left, right).astype(left.dtype, copy=False)

    return apply


def _arrays(op: str, function: Formula) -> Function:
    """An op that takes no numbers, as in torch."""

    def apply(input: Array, other: Array) -> Array:
        if not isinstance(input, np.ndarray) or not isinstance(other, np.ndarray):
            raise ArgumentError(f"{op} takes two arrays, not {input!r} and {other!r}", fix="make the number an array")
        return function(input, other)

    return apply


def _comparison(function: Function) -> Function:
    """On two operands in their common dtype, to bool."""
    return lambda input, other: function(*together(input, other))


def _bitwise(function: Formula) -> Function:
    def apply(input: Array | complex, other: Array | complex) -> Array:
        left, right = together(input, other)
        if is_float(left.dtype):
            raise DTypeError("bitwise ops have no meaning for floating-point numbers", fix="use integers or bools")
        return function(left, right)

    return apply


def _floating(function: Function) -> Function:
    """On one operand in floating point: integers and bools become float32."""
    return lambda input: function(as_float(input))


def _number(op: str, function: Formula) -> Function:
    """On one operand that is not bool, in its own dtype."""

    def apply(input: Array) -> Array:
        need_number(op, input)
        return function(input)

    return apply


def _rounding(op: str, function: Function) -> Function:
    """Integers are whole already, and stay integers."""
    return _number(op, lambda input: function(input) if is_float(input.dtype) else input.copy())


def _add(input: Array | complex, other: Array | complex, *, alpha: complex = 1) -> Array:
    left, right = together(input, other)
    return left + right if alpha == 1 else _scale(left, right, alpha)


def _sub(input: Array | complex, other: Array | complex, *, alpha: complex = 1) -> Array:
    for each in (input, other):
        need_number("sub", np.asarray(each))
    left, right = together(input, other)
    return left - right if alpha == 1 else _scale(left, right, -alpha)


def _scale(left: Array, right: Array, factor: object) -> Array:
    if isinstance(factor, float) and not is_float(left.dtype):
        raise ArgumentError(f"alpha {factor} is not whole, and the operands are {left.dtype}")
    found: Array = (left + right * np.asarray(factor).astype(left.dtype)).astype(left.dtype, copy=False)
    return found


def _div(input: Array | complex, other: Array | complex, *, rounding_mode: str | None = None) -> Array:
    left, right = together(input, other)
    if rounding_mode == "floor":
        found: Array = _FLOOR_DIVIDE(left, right)
        return found
    if rounding_mode == "trunc":
        return _truncate(left, right)
    if rounding_mode is not None:
        raise ArgumentError(f"rounding_mode {rounding_mode!r} is not known", fix="use None, 'floor' or 'trunc'")
    quotient: Array = np.true_divide(as_float(left), as_float(right))
    return quotient


def _truncate(left: Array, right: Array) -> Array:
    if is_float(left.dtype):
        return np.trunc(left / right)
    _need_divisor(right)
    return ((left - np.fmod(left, right)) // right).astype(left.dtype, copy=False)


def _need_divisor(divisor: Array) -> None:
    if not is_float(divisor.dtype) and not divisor.all():
        raise ArgumentError("integers cannot be divided by 0", fix="divide floats, which gives inf or nan")


def _division(op: str, function: Formula) -> Function:
    def apply(left: Array, right: Array) -> Array:
        need_number(op, left)
        _need_divisor(right)
        return function(left, right)

    return _binary(apply)


_FLOOR_DIVIDE = _division("floor_divide", np.floor_divide)


def _pow(input: Array | complex, exponent: object) -> Array:
    base, power = together(input, exponent)
    need_number("pow", base)
    if not is_float(base.dtype) and (power < 0).any():
        raise ArgumentError("an integer to a negative power is no integer", fix="make one of them a float")
    found: Array = np.power(base, power)
    return found


def _square(input: Array) -> Array:
    wide = input.astype("int64") if input.dtype == bool else input
    return wide * wide


def _sign(input: Array) -> Array:
    # nan has no sign, which counts as 0
    return input.copy() if input.dtype == bool else np.where(input != input, 0, np.sign(input)).astype(input.dtype)


def _lerp(input: Array, end: Array, weight: Array | complex) -> Array:
    need_float("lerp", input, end, weight)
    start, stop, share = together(input, end, weight)
    # from the nearer end, so that both ends are met exactly
    found: Array = np.where(np.abs(share) < 0.5, start + share * (stop - start), stop - (stop - start) * (1 - share))
    return found


def _addcmul(input: Array, tensor1: Array, tensor2: Array, *, value: complex = 1) -> Array:
    base, first, second = together(input, tensor1, tensor2)
    found: Array = (base + np.asarray(value).astype(base.dtype) * first * second).astype(base.dtype, copy=False)
    return found


def _addcdiv(input: Array, tensor1: Array, tensor2: Array, *, value: complex = 1) -> Array:
    need_float("addcdiv", input, tensor1, tensor2)
    base, first, second = together(input, tensor1, tensor2)
    found: Array = (base + np.asarray(value).astype(base.dtype) * first / second).astype(base.dtype, copy=False)
    return found


def _where(condition: Array, input: Array | complex, other: Array | complex) -> Array:
    return np.where(condition.astype(bool), *together(input, other))


def _masked_fill(input: Array, mask: Array, value: object) -> Array:
    return np.where(mask, np.asarray(value).astype(input.dtype), input)


def _clamp(input: Array, min: object = None, max: object = None) -> Array:
    if min is None and max is None:
        raise ArgumentError("clamp needs min, max or both")
    found, *bounds = together(input, *(each for each in (min, max) if each is not None))
    if min is not None:
        found = np.maximum(found, bounds.pop(0))
    return found if max is None else np.minimum(found, bounds[0])


def _sigmoid(input: Array) -> Array:
    return 1 / (1 + np.exp(-input))


def _relu(input: Array) -> Array:
    return np.maximum(input, 0).astype(input.dtype, copy=False)


def _gelu(input: Array, approximate: str = "none") -> Array:
    need_float("gelu", input)
    if approximate == "none":
        found: Array = 0.5 * input * (1 + _erf(input / math.sqrt(2)))
        return found
    if approximate != "tanh":
        raise ArgumentError(f"approximate {approximate!r} is not known", fix="use 'none' or 'tanh'")
    curve: Array = 0.5 * input * (1 + np.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input**3)))
    return curve


def _silu(input: Array) -> Array:
    need_float("silu", input)
    found: Array = input / (1 + np.exp(-input))
    return found


def _erf(input: Array) -> Array:
    # NumPy has no erf: Python's, element by element
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(input)).astype(input.dtype)


def _round(input: Array, *, decimals: int = 0) -> Array:
    need_number("round", input)
    return np.round(input, decimals) if is_float(input.dtype) else input.copy()


POINTWISE: dict[str, Function] = {
    "add": _add,
    "sub": _sub,
    "mul": _binary(np.multiply),
    "div": _div,
    "floor_divide": _FLOOR_DIVIDE,
    "remainder": _division("remainder", np.remainder),
    "fmod": _division("fmod", np.fmod),
    "pow": _pow,
    "neg": _number("neg", np.negative),
    "abs": _number("abs", np.abs),
    "square": _square,
    "sign": _sign,
    "reciprocal": _floating(lambda input: 1 / input),
    "maximum": _arrays("maximum", _binary(np.maximum)),
    "minimum": _arrays("minimum", _binary(np.minimum)),
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "eq": _comparison(np.equal),
    "ne": _comparison(np.not_equal),
    "lt": _comparison(np.less),
    "le": _comparison(np.less_equal),
    "gt": _comparison(np.greater),
    "ge": _comparison(np.greater_equal),
    "logical_and": _arrays("logical_and", np.logical_and),
    "logical_or": _arrays("logical_or", np.logical_or),
    "logical_xor": _arrays("logical_xor", np.logical_xor),
    "logical_not": np.logical_not,
    "bitwise_and": _bitwise(np.bitwise_and),
    "bitwise_or": _bitwise(np.bitwise_or),
    "bitwise_xor": _bitwise(np.bitwise_xor),
    "bitwise_not": np.bitwise_not,
    "isnan": _floating(np.isnan),
    "isinf": _floating(np.isinf),
    "isfinite": _floating(np.isfinite),
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "exp": _floating(np.exp),
    "log": _floating(np.log),
    "log1p": _floating(np.log1p),
    "expm1": _floating(np.expm1),
    "sqrt": _floating(np.sqrt),
    "rsqrt": _floating(lambda input: 1 / np.sqrt(input)),
    "sin": _floating(np.sin),
    "cos": _floating(np.cos),
    "tanh": _floating(np.tanh),
    "sigmoid": _floating(_sigmoid),
    "relu": _number("relu", _relu),
    "gelu": _gelu,
    "silu": _silu,
    "erf": _floating(_erf),
    "floor": _rounding("floor", np.floor),
    "ceil": _rounding("ceil", np.ceil),
    "round": _round,
    "to": lambda input, dtype: input.astype(dtype, copy=False),
    "clone": lambda input, *, memory_format=None: input.copy(),
}
