"""Look-ups. NumPy counts negative indices from the end; an index of a table is never negative."""

from __future__ import annotations

from meshloom.engines.engine import Function
from meshloom.engines.numpy_engine.local import Array
from meshloom.errors import BoundsError, DTypeError


def check_indices(name: str, indices: Array, size: int) -> None:
    """Refuse indices that a table of `size` rows does not have."""
    if indices.dtype.kind not in "iu":
        raise DTypeError(f"{name} holds indices, which are integers, and got {indices.dtype}")
    outside = indices[(indices < 0) | (indices >= size)]
    if outside.size:
        raise BoundsError(f"{name} holds {outside.flat[0]}, and indices go from 0 to {size - 1}")


def _embedding(input: Array, weight: Array, padding_idx: int | None) -> Array:
    check_indices("input", input, weight.shape[0])
    return weight[input]


LOOKUP: dict[str, Function] = {
    "embedding": _embedding,
}
