"""The numpy engine: the ops of one worker without torch. Forward only: float32, float64, integers, bool.

Results have the values, shapes and dtypes that the torch engine gives (`promotion`). There are no gradients and no
other processes: what needs them raises and names the torch engine.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from meshloom.engines.engine import Engine, Function
from meshloom.engines.numpy_engine.contractions import CONTRACTIONS
from meshloom.engines.numpy_engine.local import Known
from meshloom.engines.numpy_engine.lookup import LOOKUP
from meshloom.engines.numpy_engine.pointwise import POINTWISE
from meshloom.engines.numpy_engine.promotion import DTYPES, FLOAT
from meshloom.engines.numpy_engine.reductions import REDUCTIONS
from meshloom.engines.numpy_engine.shape import SHAPE
from meshloom.engines.numpy_engine.whole import WHOLE
from meshloom.errors import DTypeError, UnsupportedError
from meshloom.ops import Call
from meshloom.placement import Topology
from meshloom.types import LONG_NAME, Shape, check_dtype

FUNCTIONS: dict[str, Function] = {**POINTWISE, **CONTRACTIONS, **REDUCTIONS, **WHOLE, **LOOKUP, **SHAPE}


class NumpyEngine(Engine):
    """Ops by name on NumPy arrays.

    >>> engine = NumpyEngine()
    >>> engine.run("sum", engine.array([[True, False], [True, True]]), dim=1)
    array([1, 2])
    """

    name = "numpy"
    kind = np.ndarray
    functions = FUNCTIONS

    def run(self, op: str, *args: object, **kwargs: object) -> Any:
        """The result of an op of the table; inf and nan come without a warning, as in torch."""
        with np.errstate(all="ignore"):
            result = super().run(op, *args, **kwargs)
        return tuple(map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)

    def _own(self, value: Any) -> Any:
        return np.asarray(value) if isinstance(value, np.generic) else super()._own(value)

    def _topology(self, array: Any) -> Topology:
        _check_dtype(array.dtype)
        return super()._topology(array)

    def _facts_of(self, call: Call, shapes: tuple[Shape, ...]) -> Known:
        return Known(call, shapes)

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """Numbers, lists or a NumPy array as an array; Python's floats become float32, as in torch."""
        found = np.asarray(values)
        if dtype is not None:
            return found.astype(self.dtype(dtype), copy=False)
        if found.dtype == np.float64 and not isinstance(values, (np.ndarray, np.generic)):
            return found.astype(FLOAT)
        _check_dtype(found.dtype)
        return found

    def numpy(self, array: Any) -> Any:
        """The array itself."""
        return np.asarray(array)

    def dtype(self, name: str) -> Any:
        """NumPy's dtype of a name.

        >>> NumpyEngine().dtype("f32")
        dtype('float32')
        """
        long = LONG_NAME[check_dtype(name)]
        if long not in map(str, DTYPES):
            raise _unknown_dtype(long)
        return np.dtype(long)

    def requires_grad_(self, array: Any) -> NoReturn:
        """Refused: the engine runs forward only."""
        raise UnsupportedError(
            "the numpy engine has no gradients",
            fix='use the torch engine: engines.load("torch"), or tensors on a mesh (loom.distribute)',
        )

    def supports_distributed(self) -> bool:
        """False: it computes in one process."""
        return False

    def all_reduce_sum(self, tensor: Any, group: Any = None) -> NoReturn:
        """Refused: the engine computes in one process."""
        raise _alone("all_reduce_sum")

    def all_gather(self, tensor: Any, group: Any = None) -> NoReturn:
        """Refused: the engine computes in one process."""
        raise _alone("all_gather")

    def reduce_scatter(self, tensor: Any, group: Any = None) -> NoReturn:
        """Refused: the engine computes in one process."""
        raise _alone("reduce_scatter")


def _check_dtype(dtype: np.dtype[np.generic]) -> None:
    if dtype not in DTYPES:
        raise _unknown_dtype(str(dtype))


def _unknown_dtype(name: str) -> DTypeError:
    known = ", ".join(map(str, DTYPES))
    return DTypeError(f"the numpy engine has no {name}", has=known, fix="convert it, or use the torch engine")


def _alone(op: str) -> UnsupportedError:
    return UnsupportedError(
        f"the numpy engine computes in one process and has no {op}",
        fix=f'use engines.load("torch").{op}(...) in processes started by torchrun or `meshloom run`',
    )


__all__ = ["FUNCTIONS", "NumpyEngine"]
