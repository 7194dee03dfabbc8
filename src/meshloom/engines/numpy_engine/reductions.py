"""Reductions, with torch's dtypes: integers and bools add up in int64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshloom.engines.engine import Function
from meshloom.engines.numpy_engine.local import Array
from meshloom.engines.numpy_engine.promotion import is_float, need_float, need_number
from meshloom.ops.labels import normal_dim, normal_dims
from meshloom.types import Dims


def _axes(input: Array, dim: Dims) -> tuple[int, ...]:
    return normal_dims(dim, input.ndim)


def _sum_dtype(input: Array, dtype: object) -> Any:
    """The dtype in which torch adds up and multiplies."""
    return dtype or (input.dtype if is_float(input.dtype) else np.dtype("int64"))


def _sum(input: Array, dim: Dims, keepdim: bool, dtype: object) -> Array:
    kind = _sum_dtype(input, dtype)
    found: Array = np.sum(input.astype(kind, copy=False), axis=_axes(input, dim), keepdims=keepdim, dtype=kind)
    return found


def _mean(input: Array, dim: Dims, keepdim: bool, dtype: Any) -> Array:
    found = input if dtype is None else input.astype(dtype, copy=False)
    need_float("mean", found)
    axes = _axes(found, dim)
    mean: Array = np.true_divide(np.sum(found, axis=axes, keepdims=keepdim), _count(found, axes), dtype=found.dtype)
    return mean


def _count(input: Array, axes: tuple[int, ...]) -> int:
    return math.prod(input.shape[axis] for axis in axes)


def _prod(input: Array, dim: Dims, keepdim: bool, dtype: object) -> Array:
    kind = _sum_dtype(input, dtype)
    keep = keepdim and dim is not None
    found: Array = np.prod(input.astype(kind, copy=False), axis=_axes(input, dim), keepdims=keep, dtype=kind)
    return found


def _extreme(function: Function) -> Function:
    return lambda input, dim, keepdim: function(input, axis=_axes(input, dim), keepdims=keepdim)


def _truth(function: Function) -> Function:
    """bool, except that uint8 stays uint8, as in torch."""

    def reduce(input: Array, dim: Dims, keepdim: bool) -> Array:
        kind = input.dtype if input.dtype == np.uint8 else bool
        return np.asarray(function(input, axis=_axes(input, dim), keepdims=keepdim)).astype(kind)

    return reduce


def _var(input: Array, dim: Dims, unbiased: Any, keepdim: bool, correction: Any) -> Array:
    need_float("var", input)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    axes = _axes(input, dim)
    count = _count(input, axes)
    centred = input - np.true_divide(np.sum(input, axis=axes, keepdims=True), count, dtype=input.dtype)
    squares = np.sum(centred * centred, axis=axes, keepdims=keepdim)
    found: Array = np.true_divide(squares, max(count - correction, 0), dtype=input.dtype)
    return found


def _position(op: str, function: Function) -> Function:
    """The first place of the extreme element: of all of them where no dim is given."""

    def find(input: Array, dim: int | None, keepdim: bool) -> Array:
        need_number(op, input)
        if dim is None:
            return np.reshape(function(input), (1,) * input.ndim if keepdim else ())
        axis = normal_dim(dim, input.ndim)
        found = np.asarray(function(input, axis=axis))
        return np.expand_dims(found, axis) if keepdim and input.ndim else found

    return find


def _value_and_position(value: Function, position: Function) -> Function:
    def find(input: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
        axis = normal_dim(dim, input.ndim)
        values, places = np.asarray(value(input, axis=axis)), np.asarray(position(input, axis=axis))
        if keepdim and input.ndim:
            return np.expand_dims(values, axis), np.expand_dims(places, axis)
        return values, places

    return find


REDUCTIONS: dict[str, Function] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _extreme(np.max),
    "amin": _extreme(np.min),
    "prod": _prod,
    "any": _truth(np.any),
    "all": _truth(np.all),
    "var": _var,
    "argmax": _position("argmax", np.argmax),
    "argmin": _position("argmin", np.argmin),
    "max_dim": _value_and_position(np.max, np.argmax),
    "min_dim": _value_and_position(np.min, np.argmin),
}
