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


def pair(function: Callable[..., Any], values: str = "any") -> Sample:
    """Two float operands that broadcast."""

    def sample(d: Draw) -> Case:
        shape = d.shape()
        shapes = [shape, d.broadcast_to(shape)]
        return Case(tuple(Operand(each, torch.float32, values) for each in shapes), function)

    return sample


def with_options(function: Callable[..., Any], *options: dict[str, Any], values: str = "any") -> Sample:
    def sample(d: Draw) -> Case:
        chosen = d.pick(options)
        return unary(lambda x: function(x, **chosen), FLOATS, values)(d)

    return sample


def prelu(d: Draw) -> Case:
    shape = d.shape(1, 3)
    slopes = d.pick((1, shape[1] if len(shape) > 1 else 1))
    return Case((Operand(shape, torch.float32), Operand((slopes,), torch.float32)), F.prelu)


def glu(d: Draw) -> Case:
    shape = list(d.shape(1, 3))
    dim = d.dim(shape)
    shape[dim] *= 2
    return Case((Operand(tuple(shape), torch.float32),), lambda x: F.glu(x, dim))


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


_LOGIC = ("and", "or", "xor")
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
    **{name: binary(getattr(torch, name), ALL) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{name}": binary(getattr(torch, f"logical_{name}"), ALL, numbers=False) for name in _LOGIC},
    **{f"bitwise_{name}": binary(getattr(torch, f"bitwise_{name}"), INTEGRAL, scalars=(1, 3, True)) for name in _LOGIC},
    "bitwise_not": unary(torch.bitwise_not, INTEGRAL),
    **{name: unary(getattr(torch, name), ALL) for name in ("logical_not", "isnan", "isinf", "isfinite")},
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
    "positive": unary(torch.positive, NUMBERS),
    "sgn": unary(torch.sgn, NUMBERS),
    "angle": unary(torch.angle, (torch.float32, torch.int64)),
    "conj_physical": unary(torch.conj_physical, NUMBERS),
    "complex": pair(torch.complex),
    "float_power": binary(torch.float_power, NUMBERS, scalars=(2, 0.5, -1, 0)),
    "ldexp": without_gradients(binary(torch.ldexp, (torch.float32,), numbers=False)),
    "fmax": binary(torch.fmax, NUMBERS, numbers=False),
    "fmin": binary(torch.fmin, NUMBERS, numbers=False),
    "gcd": binary(torch.gcd, (torch.int64,), numbers=False),
    "lcm": binary(torch.lcm, (torch.int64,), numbers=False),
    "copysign": binary(torch.copysign, (torch.float32, torch.int64)),
    "nextafter": without_gradients(pair(torch.nextafter)),
    "heaviside": without_gradients(pair(torch.heaviside)),
    "hypot": pair(torch.hypot),
    "atan2": binary(torch.atan2, (torch.float32, torch.int64), numbers=False),
    "xlogy": binary(torch.xlogy, (torch.float32, torch.int64)),
    "special_xlog1py": binary(torch.special.xlog1py, (torch.float32,)),
    "logaddexp": pair(torch.logaddexp),
    "logaddexp2": pair(torch.logaddexp2),
    "igamma": without_gradients(pair(torch.igamma, "positive")),
    "igammac": without_gradients(pair(torch.igammac, "positive")),
    "special_zeta": without_gradients(pair(torch.special.zeta, "positive")),
    "bitwise_left_shift": binary(torch.bitwise_left_shift, (torch.int64,), "below:5", scalars=(1, 3)),
    "bitwise_right_shift": binary(torch.bitwise_right_shift, (torch.int64,), "below:5", scalars=(1, 3)),
    "isclose": lambda d: pair(
        (lambda options: lambda x, y: torch.isclose(x, y, **options))(
            d.pick(({}, {"atol": 0.5}, {"rtol": 0.2, "equal_nan": True})))
    )(d),
    "signbit": unary(torch.signbit, ALL),
    "isreal": unary(torch.isreal, ALL),
    "isposinf": unary(torch.isposinf, ALL),
    "isneginf": unary(torch.isneginf, ALL),
    "clamp_min": binary(torch.clamp_min, NUMBERS, scalars=(1, -0.5)),
    "clamp_max": binary(torch.clamp_max, NUMBERS, scalars=(-1, 0.5)),
    "nan_to_num": with_options(torch.nan_to_num, {}, {"nan": 2.0, "neginf": 0.5, "posinf": -1.0}, values="wild"),
    "log2": unary(torch.log2),
    "log10": unary(torch.log10),
    "logit": lambda d: unary((lambda e: lambda x: torch.logit(x, e))(d.pick((None, 0.1))))(d),
    **{
        name: unary(getattr(torch, name))
        for name in (
            "exp2 tan asin acos atan sinh cosh asinh acosh atanh sinc deg2rad rad2deg trunc frac erfc erfinv lgamma "
            "digamma i0"
        ).split()
    },
    **{
        f"special_{name}": unary(getattr(torch.special, name), (torch.float32,))
        for name in "i0e i1 i1e entr erfcx ndtr ndtri log_ndtr".split()
    },
    **{
        f"special_{name}": without_gradients(unary(getattr(torch.special, name), (torch.float32,)))
        for name in (
            "bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
            "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai"
        ).split()
    },
    **{
        name: unary(getattr(F, name))
        for name in "logsigmoid relu6 mish selu softsign tanhshrink hardsigmoid hardswish".split()
    },
    "elu": with_options(F.elu, {}, {"alpha": 2.0}),
    "celu": with_options(F.celu, {}, {"alpha": 2.0}),
    "leaky_relu": with_options(F.leaky_relu, {}, {"negative_slope": -0.5}),
    "prelu": prelu,
    "softplus": with_options(F.softplus, {}, {"beta": 2}, {"threshold": 1}),
    "softshrink": with_options(F.softshrink, {}, {"lambd": 0.1}),
    "hardshrink": with_options(F.hardshrink, {}, {"lambd": 0.1}),
    "hardtanh": with_options(F.hardtanh, {}, {"min_val": 0.5, "max_val": 1.5}),
    "threshold": with_options(F.threshold, {"threshold": 0.1, "value": 20}, {"threshold": -1, "value": 5}),
    "glu": glu,
}  # fmt: skip
