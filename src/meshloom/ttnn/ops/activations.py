"""Functions of one block: what unary ops, fused activations and chains of them compute, and how they are named.

`UNARY` holds every function with its parameters in order. An activation of another op (`activations=`, `activation=`)
is named by text, by `UnaryOpType`, or by `UnaryWithParam` with its parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError, closest
from meshloom.ttnn.ops.calling import REQUIRED
from meshloom.ttnn.ops.topologies import EACH, LINEAR, Named, rule_of
from meshloom.ttnn.tensor.parts import Block

__all__ = ("BcastOpDim BcastOpMath GeluVariant LossReductionMode SigmoidMode UnaryOpType UnaryWithParam").split()


class GeluVariant(enum.Enum):
    """How gelu is worked out; the table of the hardware is as exact as the formula here."""

    Accurate, FastLut, Tanh = range(3)


class SigmoidMode(enum.Enum):
    """How exactly the hardware works out a sigmoid; here always exactly."""

    Accurate, AccurateWithFastExp, FastApproximate = range(3)


class BcastOpMath(enum.Enum):
    """What `bcast` does."""

    ADD, SUB, MUL = range(3)


class BcastOpDim(enum.Enum):
    """Along which of the last two dims `bcast` repeats its second operand."""

    H, W, HW = range(3)


class LossReductionMode(enum.Enum):
    """What becomes of the loss of every element."""

    NONE, SUM, MEAN = range(3)


@dataclass(frozen=True)
class Function:
    """A function of a block with named parameters; `rule` says what becomes of placements: a native op's, or a rule."""

    call: Callable[..., Block]
    parameters: Mapping[str, Any]
    rule: Named = EACH
    rank: int = 0  # the least that a tensor has to have


UNARY: dict[str, Function] = {}


def _put(name: str, call: Callable[..., Block], rule: Named | None = None, rank: int = 0, **parameters: Any) -> None:
    UNARY[name] = Function(call, parameters, rule or (EACH if parameters else rule_of(name)), rank)


def _fine(call: Callable[..., Block]) -> Callable[..., Block]:
    """A formula of several steps is worked out in float32 and rounded once."""
    return lambda x, *values: call(x.float() if x.dtype is torch.bfloat16 else x, *values)


def _gelu(x: Block, variant: Any = GeluVariant.Accurate) -> Block:
    return F.gelu(x, approximate="tanh" if variant is GeluVariant.Tanh else "none")


def _rotate_pairs(x: Block) -> Block:
    """Pairs of neighbours as complex numbers, times i: (a, b) becomes (-b, a)."""
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)


def _glu(gate: Callable[[Block], Block]) -> Callable[..., Block]:
    def call(x: Block, dim: int = -1) -> Block:
        if x.shape[dim] % 2:
            raise OperandError(f"a gate is the second half of a dim, and dim {dim} has size {x.shape[dim]}")
        kept, gated = x.chunk(2, dim)
        return kept * gate(gated)

    return _fine(call)


def _xielu(x: Block, alpha_p: float, alpha_n: float) -> Block:
    """The integral of an exponential unit: alpha_p * x^2 + x / 2, and alpha_n * (e^x - 1 - x) + x / 2 below zero."""
    below = x.clamp(max=0)
    return torch.where(x > 0, alpha_p * x.square(), alpha_n * (torch.expm1(below) - below)) + 0.5 * x


def divide(x: Block, y: Any, rounding_mode: str | None = None) -> Block:
    """The quotient, as `rounding_mode` asks: None, "trunc" or "floor"."""
    return torch.div(x, y, rounding_mode=rounding_mode)


_PLAIN = """abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor
frac isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 reciprocal rsqrt sign signbit sin sinh sqrt
square tan tanh trunc logical_not"""
for _name in _PLAIN.split():
    _put(_name, getattr(torch, _name))
for _name in "relu relu6 silu mish hardsigmoid hardswish softsign tanhshrink".split():
    _put(_name, getattr(F, _name))

_put("neg", torch.neg, LINEAR)
_put("identity", torch.clone, LINEAR)
_put("deg2rad", torch.deg2rad, LINEAR)
_put("rad2deg", torch.rad2deg, LINEAR)
_put("alt_complex_rotate90", _rotate_pairs, LINEAR)
_put("bitwise_not", torch.bitwise_not)
_put("cbrt", _fine(lambda x: x.sign() * x.abs().pow(1 / 3)))
_put("celu", F.celu, alpha=1.0)
_put("elu", F.elu, alpha=1.0)
_put("eqz", lambda x: x == 0)
_put("nez", lambda x: x != 0)
_put("gez", lambda x: x >= 0)
_put("gtz", lambda x: x > 0)
_put("lez", lambda x: x <= 0)
_put("ltz", lambda x: x < 0)
_put("fill", lambda x, fill_value: torch.full_like(x, fill_value), fill_value=REQUIRED)
_put("gelu", _gelu, variant=GeluVariant.Accurate)
_put("hardmish", _fine(lambda x: x * (x + 2.8).clamp(0, 5) / 5))
_put("hardshrink", F.hardshrink, lambd=0.5)
_put("hardtanh", F.hardtanh, min_val=-1.0, max_val=1.0)
_put("heaviside", lambda x, value: torch.heaviside(x, x.new_tensor(value)), value=REQUIRED)
_put("i0", torch.special.i0)
_put("i1", torch.special.i1)
_put("leaky_relu", F.leaky_relu, negative_slope=REQUIRED)
_put("log_sigmoid", F.logsigmoid)
_put("logit", torch.logit, eps=None)
_put("multigammaln", _fine(lambda x: torch.mvlgamma(x, 4)))
_put("polygamma", _fine(lambda x, k: torch.polygamma(int(k), x)), k=REQUIRED)
_put("relu_max", lambda x, upper_limit: F.relu(x.clamp(max=upper_limit)), upper_limit=REQUIRED)
_put("relu_min", lambda x, lower_limit: F.relu(x.clamp(min=lower_limit)), lower_limit=REQUIRED)
_put("round", lambda x, decimals: torch.round(x, decimals=decimals), decimals=0)
_put("rpow", lambda x, exponent: torch.pow(exponent, x), exponent=REQUIRED)
_put("selu", _fine(lambda x, scale, alpha: scale * F.elu(x, alpha)), scale=1.0506999492645264, alpha=1.673259973526001)
_put("sigmoid", lambda x, *_: torch.sigmoid(x), vector_mode=4, mode=SigmoidMode.Accurate)
_put("sigmoid_accurate", lambda x, *_: torch.sigmoid(x), fast_and_approximate_mode=False)
_put("softcap", _fine(lambda x, beta: beta * torch.tanh(x / beta)), beta=REQUIRED)
_put("softplus", F.softplus, beta=1.0, threshold=20.0)
_put("softshrink", F.softshrink, lambd=0.5)
_put("swish", F.silu)
_put("threshold", F.threshold, threshold=REQUIRED, value=REQUIRED)
_put("rdiv", lambda x, value, mode: divide(torch.full_like(x, value), x, mode), value=REQUIRED, rounding_mode=None)
_put("glu", _glu(torch.sigmoid), rank=1, dim=-1)
_put("reglu", _glu(F.relu), rank=1, dim=-1)
_put("swiglu", _glu(F.silu), rank=1, dim=-1)
_put(
    "geglu",
    lambda x, dim, variant: _glu(lambda y: _gelu(y, variant))(x, dim),
    rank=1,
    dim=-1,
    variant=GeluVariant.Accurate,
)
_put("xielu", _fine(_xielu), alpha_p=0.8, alpha_n=0.8)
_put("tril", lambda x, diagonal: x.tril(diagonal), LINEAR, rank=2, diagonal=0)
_put("triu", lambda x, diagonal: x.triu(diagonal), LINEAR, rank=2, diagonal=0)


_KINDS = """ABS ACOS ACOSH ADD_UNARY_SFPU ALT_COMPLEX_ROTATE90 ASIN ASINH ATAN ATANH BITWISE_AND BITWISE_NOT BITWISE_OR
BITWISE_XOR CBRT CEIL CELU CLAMP_TSS COS COSH DIGAMMA DIV_UNARY_SFPU ELU EQZ ERF ERFC ERFINV EXP EXP2 EXPM1
FILL FLOOR FMOD FRAC GELU GELU_TANH GEZ GTZ HARDMISH HARDSHRINK HARDSIGMOID HARDSWISH HARDTANH HEAVISIDE I0
I1 IDENTITY ISFINITE ISINF ISNAN ISNEGINF ISPOSINF LEAKY_RELU LEFT_SHIFT LEZ LGAMMA LOG LOG10 LOG1P LOG2
LOGICAL_NOT_UNARY LOGIT LOGSIGMOID LTZ MAXIMUM MINIMUM MISH MUL_UNARY_SFPU NEG NEZ POLYGAMMA POWER
POWER_ITERATIVE PRELU_SFPU RDIV RECIP RELU RELU6 RELU_MAX RELU_MIN REMAINDER RIGHT_SHIFT ROUND RPOW RSQRT
RSUB SELU SIGMOID SIGN SIGNBIT SILU SIN SINH SOFTCAP SOFTPLUS SOFTSHRINK SOFTSIGN SQRT SQUARE SUB_UNARY_SFPU
TAN TANH TANHSHRINK THRESHOLD TRUNC UNARY_EQ UNARY_GE UNARY_GT UNARY_LE UNARY_LT UNARY_NE"""
UnaryOpType = enum.Enum("UnaryOpType", _KINDS.split(), start=0)  # type: ignore[misc]
UnaryOpType.__doc__ = "The kinds of function that can be fused into another op."

# Kinds that are no unary op of that name: what they compute, given their parameters.
_SPECIAL: dict[str, Callable[..., Block]] = {
    "ADD_UNARY_SFPU": torch.add,
    "SUB_UNARY_SFPU": torch.sub,
    "MUL_UNARY_SFPU": torch.mul,
    "DIV_UNARY_SFPU": torch.div,
    "RSUB": lambda x, value: value - x,
    "BITWISE_AND": lambda x, value: x & int(value),
    "BITWISE_OR": lambda x, value: x | int(value),
    "BITWISE_XOR": lambda x, value: x ^ int(value),
    "LEFT_SHIFT": lambda x, value: x << int(value),
    "RIGHT_SHIFT": lambda x, value: x >> int(value),
    "CLAMP_TSS": torch.clamp,
    "FMOD": torch.fmod,
    "REMAINDER": torch.remainder,
    "MAXIMUM": lambda x, value: x.clamp(min=value),
    "MINIMUM": lambda x, value: x.clamp(max=value),
    "POWER": torch.pow,
    "POWER_ITERATIVE": torch.pow,
    "PRELU_SFPU": F.leaky_relu,
    "UNARY_EQ": torch.eq,
    "UNARY_NE": torch.ne,
    "UNARY_GE": torch.ge,
    "UNARY_GT": torch.gt,
    "UNARY_LE": torch.le,
    "UNARY_LT": torch.lt,
    "GELU": lambda x, *_: F.gelu(x),  # its parameter asks for a fast approximation
    "GELU_TANH": lambda x: _gelu(x, GeluVariant.Tanh),
    "EXP": lambda x, *_: torch.exp(x),
    "ERF": lambda x, *_: torch.erf(x),
    "SIGMOID": lambda x, *_: torch.sigmoid(x),
    "RSQRT": lambda x, *_: torch.rsqrt(x),
}
_CALLED = {"LOGICAL_NOT_UNARY": "logical_not", "LOGSIGMOID": "log_sigmoid", "RECIP": "reciprocal"}
_WRITTEN = {"gelu_approx": "GELU_TANH", "gelu_tanh": "GELU_TANH", "logsigmoid": "LOGSIGMOID", "swish": "SILU"}


@dataclass(frozen=True, init=False, repr=False)
class UnaryWithParam:
    """A kind of function with its parameters.

    >>> UnaryWithParam(UnaryOpType.ELU, 0.5).params
    [0.5]
    """

    op_type: Any
    _params: tuple[float, ...]

    def __init__(self, op_type: Any, *params: float) -> None:
        if isinstance(op_type, tuple) and not params:
            op_type, *rest = op_type
            params = tuple(rest)
        if not isinstance(op_type, UnaryOpType):
            raise ArgumentError(f"UnaryWithParam takes a UnaryOpType first, not {op_type!r}")
        object.__setattr__(self, "op_type", op_type)
        object.__setattr__(self, "_params", tuple(float(each) for each in params))

    @property
    def params(self) -> list[float]:
        """The parameters."""
        return list(self._params)

    def __repr__(self) -> str:
        return f"UnaryWithParam(op_type={self.op_type.name},param={self.params})"


Activation = str | UnaryWithParam | Any


def activate(block: Block, activations: Sequence[Activation] | Activation | None) -> Block:
    """A block after one activation or several.

    >>> activate(torch.tensor([-1.0, 2.0]), [UnaryOpType.RELU, UnaryWithParam(UnaryOpType.ADD_UNARY_SFPU, 1.0)])
    tensor([1., 3.])
    """
    return activator(activations)(block)


def activator(activations: Sequence[Activation] | Activation | None) -> Callable[[Block], Block]:
    """One activation or several as one function: their names are read once."""
    functions = [(_function(each.op_type), each.params) for each in chain(activations)]

    def call(block: Block) -> Block:
        for function, params in functions:
            block = function(block, *params)
        return block

    return call


def chain(activations: Sequence[Activation] | Activation | None) -> list[UnaryWithParam]:
    """The activations that were named in one of the ways that there are."""
    if activations is None:
        return []
    if isinstance(activations, (list, tuple)) and not _is_pair(activations):
        return [_read(each) for each in activations]
    return [_read(activations)]


def _is_pair(value: Sequence[Any]) -> bool:
    return len(value) > 1 and isinstance(value[0], UnaryOpType) and isinstance(value[1], (int, float))


def _read(activation: Activation) -> UnaryWithParam:
    if isinstance(activation, UnaryWithParam):
        return activation
    if isinstance(activation, (UnaryOpType, tuple)):
        return UnaryWithParam(activation)
    if isinstance(activation, str):
        name = _WRITTEN.get(activation.lower(), activation.upper())
        if name in UnaryOpType.__members__:
            return UnaryWithParam(UnaryOpType[name])
        raise ArgumentError(
            f"no activation is called {activation!r}", fix=closest(activation, map(str.lower, UnaryOpType.__members__))
        )
    raise ArgumentError(
        f"an activation is named by text, UnaryOpType or UnaryWithParam, not by {type(activation).__name__}"
    )


def _function(kind: Any) -> Callable[..., Block]:
    special = _SPECIAL.get(kind.name)
    if special is not None:
        return special
    found = UNARY[_CALLED.get(kind.name, kind.name.lower())]
    defaults = list(found.parameters.values())

    def call(block: Block, *params: float) -> Block:
        values = (*params, *defaults[len(params) :])
        if any(value is REQUIRED for value in values):
            raise ArgumentError(f"{kind.name} needs parameters: {', '.join(found.parameters)}")
        return found.call(block, *values)

    return call
