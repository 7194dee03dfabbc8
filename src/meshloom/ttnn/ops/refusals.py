"""What the original refuses of operands that work here, by family of ops: dtypes that have no kernel, mixtures of them.

A `Limit` says what all tensors of a call have to be, and the original's reason if one is not. `calling.operands` asks
`judge` when a kind of call is seen for the first time; `refusal_levels` decides what becomes of a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.ttnn.choices import spell_choice
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.tensor import Tensor

BF16, F32, BF8, BF4, FP8 = (
    DataType.BFLOAT16,
    DataType.FLOAT32,
    DataType.BFLOAT8_B,
    DataType.BFLOAT4_B,
    DataType.FP8_E4M3,
)
INT32, UINT32, UINT16 = DataType.INT32, DataType.UINT32, DataType.UINT16
FLOATS = frozenset((BF16, F32, BF8, BF4, FP8))


@dataclass(frozen=True, slots=True)
class Limit:
    """What the tensors of a call have to be: of some dtypes, or all of one unless all are floats.

    A reason may name the op as the original's enum does (`kind`), the dtype, and those of two operands (`a`, `b`).
    """

    reason: str
    dtypes: frozenset[DataType] | None = None
    first: int | None = None  # how many of the tensors it is about; None means all

    def find(self, name: str, tensors: Sequence[Tensor]) -> str | None:
        """The original's reason to refuse these tensors, if it has one."""
        given = [each.dtype for each in tensors[: self.first]]
        if self.dtypes is None:
            is_mixed = len(set(given)) > 1 and not FLOATS.issuperset(given)
            return self._say(name, given[0], given[1]) if is_mixed else None
        wrong = next((each for each in given if each not in self.dtypes), None)
        return None if wrong is None else self._say(name, wrong, wrong)

    def _say(self, name: str, a: DataType, b: DataType) -> str:
        kind = KINDS.get(name, name.upper())
        return self.reason.format(kind=kind, name=name.capitalize(), a=spell_choice(a), b=spell_choice(b))


# Ops whose kind the original spells otherwise than their name in capitals.
KINDS = {
    "reciprocal": "RECIP",
    "log_sigmoid": "LOGSIGMOID",
    "swish": "SILU",
    "subtract": "SUB",
    "multiply": "MUL",
    "divide": "DIV",
    "pow": "POWER",
}

LIMITS: dict[str, Limit] = {}


def _limit(names: str, limit: Limit) -> None:
    LIMITS.update(dict.fromkeys(names.split(), limit))


_limit(
    """acos acosh asin asinh atan atanh cbrt ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor
    frac gelu hardmish hardshrink hardsigmoid hardswish hardtanh heaviside i0 i1 isfinite isinf isnan isneginf isposinf
    leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish polygamma rad2deg reciprocal relu6 round rpow rsqrt
    selu sigmoid sigmoid_accurate silu sin sinh softcap softplus softshrink softsign sqrt swish tan tanh tanhshrink
    trunc""",
    Limit("Unary: UnaryOpType::{kind} does not support integer input dtype {a}", FLOATS),
)
_limit(
    """add subtract sub multiply mul rsub squared_difference logaddexp logaddexp2 ldexp maximum minimum div divide pow
    eq ne gt ge lt le logical_and logical_or logical_xor remainder fmod xlogy atan2 hypot bias_gelu
    bitwise_and bitwise_or bitwise_xor gcd lcm""",
    Limit(
        "Mixed dtype is not supported for binary operation BinaryOpType::{kind}, dtype A: {a}, dtype B: {b}", first=2
    ),
)
_limit(
    "addcmul addcdiv",
    Limit(
        "{name} supports only BFLOAT16, BFLOAT8_B, FLOAT32, INT32, and UINT32 dtypes. Got {a}",
        frozenset((BF16, BF8, F32, INT32, UINT32)),
    ),
)
_limit(
    "all_reduce",
    Limit("moreh_sum input only supports specific data types. [BFLOAT16, INT32]", frozenset((*FLOATS, INT32))),
)
# What follows has no kernel for integers; the words are ours where the original's are not known.
_limit("matmul linear addmm", Limit("Unsupported data format {a}", FLOATS, first=2))
_limit(
    """softmax softmax_in_place scale_mask_softmax scale_mask_softmax_in_place layer_norm rms_norm group_norm batch_norm
    layer_norm_pre_all_gather rms_norm_pre_all_gather transformer.scaled_dot_product_attention
    transformer.scaled_dot_product_attention_decode experimental.rotary_embedding
    experimental.rotary_embedding_llama""",
    Limit("Unsupported data format {a}", FLOATS, first=1),
)
_limit(
    "sum mean max min std var",
    Limit(
        "Only BFLOAT16, BFLOAT8_B, FLOAT32, INT32 and UINT32 are supported for generic reduction - got {a}",
        frozenset((*FLOATS, INT32, UINT32)),
    ),
)


def judge(name: str, tensors: Sequence[Tensor]) -> str | None:
    """Why the original refuses a call of an op with these tensors; None if it does not.

    >>> judge("add", [])
    """
    limit = LIMITS.get(name) or LIMITS.get(name.removesuffix("_"))
    return None if limit is None or not tensors else limit.find(name.removesuffix("_"), tensors)
