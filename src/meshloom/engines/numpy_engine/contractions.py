"""Products. Operands have one dtype, as in torch."""

from __future__ import annotations

import numpy as np

from meshloom.engines.engine import Function
from meshloom.engines.numpy_engine.local import Array
from meshloom.engines.numpy_engine.promotion import need_number
from meshloom.errors import DTypeError


def _alike(op: str, *operands: Array) -> None:
    need_number(op, operands[0])
    dtypes = list(dict.fromkeys(str(each.dtype) for each in operands))
    if len(dtypes) > 1:
        raise DTypeError(f"{op} needs operands of one dtype and got {' and '.join(dtypes)}", fix="convert one of them")


def _product(op: str, second: str) -> Function:
    """The product of `input` and the argument that torch calls `second`."""

    def apply(input: Array, **named: Array) -> Array:
        _alike(op, input, named[second])
        found: Array = np.matmul(input, named[second])
        return found

    return apply


def _linear(input: Array, weight: Array, bias: Array | None) -> Array:
    _alike("linear", input, weight, *(() if bias is None else (bias,)))
    product = np.matmul(input, weight.T)
    found: Array = product if bias is None else product + bias
    return found


def _einsum(equation: str, operands: tuple[Array, ...]) -> Array:
    _alike("einsum", *operands)
    found: Array = np.einsum(equation, *operands, optimize=len(operands) > 1)
    return found


CONTRACTIONS: dict[str, Function] = {
    "matmul": _product("matmul", "other"),
    "mm": _product("mm", "mat2"),
    "bmm": _product("bmm", "mat2"),
    "mv": _product("mv", "vec"),
    "dot": _product("dot", "tensor"),
    "linear": _linear,
    "einsum": _einsum,
}
