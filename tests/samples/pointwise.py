"""Samples of pointwise ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from samples.drawing import ALL, FLOATS, INTEGRAL, NUMBERS, Case, Draw, Operand, Sample, without_gradients


def unary(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = FLOATS, values: str = "any") -> Sample:
    return lambda d: Case((Operand(d.shape(), d.pick(dtypes), values),), function)


def binary(
    function: Callable[..., Any],
    dtypes: Sequence[torch.dtype] = NUMBERS,
    second: str = "any",
    scalars: Sequence[Any] = (2, -1.5, 3),
    numbers: bool = True,
) -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(), d.pick(dtypes)
        kind = d.number(0, 3) if numbers else d.number(1, 3)
        if kind == 0:
            scalar = d.pick(scalars)
            return Case((Operand(shape, dtype),), lambda x: function(x, scalar))
        other = d.pick(dtypes) if d.number(0, 3) == 0 else dtype
        pair = (Operand(shape, dtype), Operand(d.broadcast_to(shape), other, second))
        if kind == 1:
            return Case((Operand(d.broadcast_to(shape), dtype), Operand(shape, other, second)), function)
        return Case(pair, function)

    return sample


def ternary(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = FLOATS, third: str = "any") -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(), d.pick(dtypes)
        others = (Operand(d.broadcast_to(shape), dtype), Operand(d.broadcast_to(shape), dtype, third))
        return Case((Operand(shape, dtype), *others), function)

    return sample


def where(d: Draw) -> Case:
    shape, dtype = d.shape(), d.pick(ALL)
    cond = Operand(d.broadcast_to(shape), torch.bool)
    if d.yes():
        number = d.pick((0, 1.5, float("-inf")))
        return Case((cond, Operand(shape, torch.float32)), lambda c, x: torch.where(c, x, number))
    return Case((cond, Operand(shape, dtype), Operand(d.broadcast_to(shape), dtype)), torch.where)


def masked_fill(d: Draw) -> Case:
    shape = d.shape()
    value = d.pick((0.0, 2.0, float("-inf"), float("nan")))
    operands = (Operand(shape, d.pick(FLOATS)), Operand(d.broadcast_to(shape), torch.bool))
    return Case(operands, lambda x, m: torch.masked_fill(x, m, value))


def clamp(d: Draw) -> Case:
    bounds = d.pick(({"min": -0.5}, {"max": 0.5}, {"min": 0.25, "max": 1.0}, {"min": 2, "max": -1}, {"min": 1}))
    shape, dtype = d.shape(), d.pick(FLOATS)
    if d.number(0, 3) == 0:
        bound = Operand(d.broadcast_to(shape), dtype)
        return Case((Operand(shape, dtype), bound), lambda x, low: torch.clamp(x, min=low))
    return Case((Operand(shape, dtype),), lambda x: torch.clamp(x, **bounds))


def cast(d: Draw) -> Case:
    dtype = d.pick((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.int32))
    return Case((Operand(d.shape(), d.pick(ALL)),), lambda x: x.to(dtype, copy=True))


def _value(d: Draw) -> float:
    return float(d.pick((-1.0, 0.5, 2.0)))


def addc(function: Callable[..., Any], third: str = "any") -> Sample:
    def sample(d: Draw) -> Case:
        value = _value(d)
        return ternary(lambda x, a, b: function(x, a, b, value=value), FLOATS, third)(d)

    return sample


POINTWISE: dict[str, Sample] = {
    "add": lambda d: binary((lambda a: lambda x, y: torch.add(x, y, alpha=a))(d.pick((1, 2, -1))))(d),
    "sub": binary(torch.sub),
    "mul": binary(torch.mul, ALL, scalars=(2, 0.5, True)),
    "div": lambda d: binary(
        (lambda mode: lambda x, y: torch.div(x, y, rounding_mode=mode))(d.pick((None, None, "floor", "trunc"))),
        (torch.float32,), "nonzero",
    )(d),
    "floor_divide": without_gradients(binary(torch.floor_divide, (torch.float32, torch.int64), "nonzero")),
    "remainder": binary(torch.remainder, (torch.float32, torch.int64), "nonzero"),
    "fmod": binary(torch.fmod, (torch.float32, torch.int64), "nonzero"),
    "pow": binary(torch.pow, (torch.float32,), scalars=(2, 0.5, -1, 0)),
    "neg": unary(torch.neg, NUMBERS),
    "abs": unary(torch.abs, NUMBERS),
    "square": unary(torch.square, NUMBERS),
    "sign": unary(torch.sign, NUMBERS),
    "reciprocal": unary(torch.reciprocal, FLOATS, "nonzero"),
    "maximum": binary(torch.maximum, NUMBERS, numbers=False),
    "minimum": binary(torch.minimum, NUMBERS, numbers=False),
    "lerp": ternary(torch.lerp),
    "addcmul": addc(torch.addcmul),
    "addcdiv": addc(torch.addcdiv, "nonzero"),
    "eq": binary(torch.eq, ALL),
    "ne": binary(torch.ne, ALL),
    "lt": binary(torch.lt, ALL),
    "le": binary(torch.le, ALL),
    "gt": binary(torch.gt, ALL),
    "ge": binary(torch.ge, ALL),
    "logical_and": binary(torch.logical_and, ALL, numbers=False),
    "logical_or": binary(torch.logical_or, ALL, numbers=False),
    "logical_xor": binary(torch.logical_xor, ALL, numbers=False),
    "logical_not": unary(torch.logical_not, ALL),
    "bitwise_and": binary(torch.bitwise_and, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_or": binary(torch.bitwise_or, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_xor": binary(torch.bitwise_xor, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_not": unary(torch.bitwise_not, INTEGRAL),
    "isnan": unary(torch.isnan, ALL),
    "isinf": unary(torch.isinf, ALL),
    "isfinite": unary(torch.isfinite, ALL),
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "exp": unary(torch.exp),
    "log": unary(torch.log),
    "log1p": unary(torch.log1p),
    "expm1": unary(torch.expm1),
    "sqrt": unary(torch.sqrt),
    "rsqrt": unary(torch.rsqrt),
    "sin": unary(torch.sin),
    "cos": unary(torch.cos),
    "tanh": unary(torch.tanh),
    "sigmoid": unary(torch.sigmoid),
    "relu": unary(torch.relu, NUMBERS),
    "gelu": lambda d: unary((lambda a: lambda x: F.gelu(x, approximate=a))(d.pick(("none", "tanh"))))(d),
    "silu": unary(F.silu),
    "erf": unary(torch.erf),
    "floor": unary(torch.floor),
    "ceil": unary(torch.ceil),
    "round": unary(torch.round),
    "to": cast,
    "clone": unary(torch.clone, ALL),
}  # fmt: skip
