"""Dtypes of results, by torch's rules: what NumPy alone would give differs.

A dtype of a higher kind (bool, integer, float) wins. Within a kind, arrays with dims win over 0-d arrays, and those
over Python's numbers: float32[3] + float64[] is float32, int64[3] + 2.5 is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshloom.engines.numpy_engine.local import Array
from meshloom.errors import DTypeError

DTYPES = tuple(np.dtype(name) for name in "bool uint8 int8 int16 int32 int64 float32 float64".split())
FLOAT = np.dtype("float32")
_LEVEL = {"b": 0, "u": 1, "i": 1, "f": 2}
_NUMBERS = {bool: np.dtype("bool"), int: np.dtype("int64"), float: FLOAT}


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether the dtype holds floating-point numbers."""
    return dtype.kind == "f"


def promoted(*dtypes: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype of arrays of equal rank together: a float beside integers keeps its width."""
    floats = [each for each in dtypes if is_float(each)]
    return np.result_type(*(floats or dtypes))


def common_dtype(values: Sequence[object]) -> np.dtype[np.generic]:
    """The dtype in which an op computes on arrays and numbers together.

    >>> common_dtype([np.zeros(3, "int64"), 2.5]), common_dtype([np.zeros(3, "f4"), np.zeros((), "f8")])
    (dtype('float32'), dtype('float32'))
    """
    arrays = [each for each in values if isinstance(each, np.ndarray)]
    ranks = (
        [each.dtype for each in arrays if each.ndim],
        [each.dtype for each in arrays if not each.ndim],
        [number_dtype(each) for each in values if not isinstance(each, np.ndarray)],
    )
    found: np.dtype[np.generic] | None = None
    for dtypes in ranks:
        if dtypes:
            found = _over(found, promoted(*dtypes))
    assert found is not None
    return found


def number_dtype(value: object) -> np.dtype[np.generic]:
    """The dtype that a Python number stands for."""
    if type(value) not in _NUMBERS:
        raise DTypeError(f"the numpy engine takes arrays and Python's numbers, not {value!r}")
    return _NUMBERS[type(value)]


def _over(high: np.dtype[np.generic] | None, low: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype of a higher rank, unless the lower rank is of a higher kind."""
    if high is None:
        return low
    return low if _LEVEL[low.kind] > _LEVEL[high.kind] else high


def together(*values: object) -> list[Array]:
    """Arrays and numbers as arrays of their common dtype."""
    dtype = common_dtype(values)
    return [np.asarray(each).astype(dtype, copy=False) for each in values]


def as_float(input: Array) -> Array:
    """The array in floating point: integers and bools become float32."""
    return input if is_float(input.dtype) else input.astype(FLOAT)


def need_float(op: str, *arrays: object) -> None:
    """Refuse integers and bools where the op has no meaning for them."""
    for each in arrays:
        if isinstance(each, np.ndarray) and not is_float(each.dtype):
            raise DTypeError(
                f"{op} has no meaning for {each.dtype}", fix='convert it with run("to", x, "float32") first'
            )


def need_number(op: str, input: Array) -> None:
    """Refuse bools where the op has no meaning for them."""
    if input.dtype == bool:
        raise DTypeError(f"{op} has no meaning for bool", fix='convert it with run("to", x, "int64") first')
