"""Moving elements about: views where NumPy has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshloom.engines.engine import Function, aware
from meshloom.engines.numpy_engine.local import Array, Known
from meshloom.engines.numpy_engine.promotion import together
from meshloom.ops.labels import normal_dim
from meshloom.ops.shapes import section_sizes, squeezed_dims

Formula = Callable[..., Array]


@aware
def _reshape(known: Known, input: Array, **_: object) -> Array:
    return input.reshape(known.shapes[0])


@aware
def _squeeze(known: Known, input: Array, **_: object) -> Array:
    return np.squeeze(input, squeezed_dims(known.call))


@aware
def _expand(known: Known, input: Array, **_: object) -> Array:
    return np.broadcast_to(input, known.shapes[0])


def _transpose(input: Array, dim0: int, dim1: int) -> Array:
    return np.swapaxes(input, dim0, dim1) if input.ndim else input


def _narrow(input: Array, dim: int, start: int, length: int) -> Array:
    axis = normal_dim(dim, input.ndim)
    begin = start % input.shape[axis] if start < 0 else start
    return input[(slice(None),) * axis + (slice(begin, begin + length),)]


@aware
def _split(known: Known, input: Array, **_: object) -> tuple[Array, ...]:
    axis, sizes = section_sizes(known.call)
    ends = np.cumsum(sizes)
    return tuple(
        input[(slice(None),) * axis + (slice(end - size, end),)] for end, size in zip(ends, sizes, strict=True)
    )


def _joining(function: Formula) -> Function:
    def join(tensors: Sequence[Array], dim: int) -> Array:
        return function(together(*tensors), axis=dim)

    return join


SHAPE: dict[str, Function] = {
    **dict.fromkeys(("reshape", "view", "flatten"), _reshape),
    "squeeze": _squeeze,
    "unsqueeze": lambda input, dim: np.expand_dims(input, dim),
    "permute": lambda input, dims: np.transpose(input, dims),
    "transpose": _transpose,
    "expand": _expand,
    "narrow": _narrow,
    "getitem": lambda input, index: input[index],
    **dict.fromkeys(("split", "chunk", "tensor_split"), _split),
    "cat": _joining(np.concatenate),
    "stack": _joining(np.stack),
}
