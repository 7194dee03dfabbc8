"""How arrays lie in the DRAM of a card: in pages that go round its banks, and matrices as tiles.

An array of two dims or more is kept as tiles of 32x32 (`runtime/tiles.py`), padded with zeros, a tile per page. One
with fewer dims is kept as it is, in pages of as many bytes. The driver could tilise by itself, in Python, element by
element; here it is a reshape, a permutation and a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshloom.runtime.tiles import TILE, tilize, untilize
from meshloom.types import Shape

ELEMENTS = TILE * TILE  # of a page
FIRST = 0x40  # the first bytes of every bank are not for data
Runs = NDArray[np.int64]  # rows of (offset, length), in bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """An array in the memory of a card; `buffer` is the driver's own handle."""

    shape: Shape
    dtype: torch.dtype
    buffer: Any

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


def page_size(dtype: torch.dtype) -> int:
    """The bytes of a page."""
    return ELEMENTS * dtype.itemsize


def pages(shape: Shape) -> int:
    """How many pages an array takes.

    >>> pages((33, 5)), pages((2, 64, 64)), pages((1025,)), pages((0, 4))
    (2, 8, 2, 0)
    """
    if len(shape) < 2:
        return -(-math.prod(shape) // ELEMENTS)
    return math.prod(shape[:-2]) * -(-shape[-2] // TILE) * -(-shape[-1] // TILE)


def footprint(shape: Shape, dtype: torch.dtype, banks: int) -> int:
    """The bytes that an array takes of all banks together: the same of each, since it starts at one offset in all.

    >>> footprint((32, 32), torch.float32, 7), footprint((7 * 32, 64), torch.bfloat16, 7)
    (28672, 28672)
    """
    return -(-pages(shape) // banks) * banks * page_size(dtype)


def to_card(data: torch.Tensor) -> bytes:
    """The elements as a card keeps them.

    >>> len(to_card(torch.ones(33, 5))), to_card(torch.tensor([1, 2], dtype=torch.int16))[:4]
    (8192, b'\\x01\\x00\\x02\\x00')
    """
    flat = tilize(data, pad=True).reshape(-1) if data.ndim > 1 else data.reshape(-1)
    room = pages(tuple(data.shape)) * ELEMENTS
    return torch.constant_pad_nd(flat, [0, room - flat.numel()]).contiguous().view(torch.uint8).numpy().tobytes()


def from_card(data: bytes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_card`.

    >>> x = torch.randn(2, 33, 5)
    >>> from_card(to_card(x), (2, 33, 5), torch.float32).equal(x)
    True
    """
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if len(shape) < 2:
        return flat[: math.prod(shape)].reshape(shape)
    rows, cols = (-(-side // TILE) * TILE for side in shape[-2:])
    return untilize(flat.reshape(*shape[:-2], rows * cols), shape)


def runs_of(shape: Shape, itemsize: int, key: tuple[Any, ...], start: int, stop: int | None) -> Runs:
    """Where the elements `start` to `stop` of what an index names lie, as few pieces as there are.

    >>> runs_of((32, 32), 4, ((0, 1, 1),), 0, 32).tolist()  # a row of a tile is in two faces
    [[0, 64], [1024, 64]]
    """
    at = _positions(shape, key)[start:stop]
    if not len(at):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    firsts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([firsts, [len(at)]]))
    found: Runs = np.stack([at[firsts], lengths], 1) * itemsize
    return found


@lru_cache(maxsize=16)  # a message goes in packets, each of which asks
def _positions(shape: Shape, key: tuple[Any, ...]) -> NDArray[np.int64]:
    """For every element that an index names where the card keeps it, in row-major order."""
    index = tuple(slice(*each) if isinstance(each, tuple) else each for each in key)
    flat = torch.arange(pages(shape) * ELEMENTS)
    if len(shape) < 2:
        return flat[: math.prod(shape)].reshape(shape)[index].reshape(-1).numpy()
    rows, cols = (-(-side // TILE) * TILE for side in shape[-2:])
    return untilize(flat.reshape(*shape[:-2], rows * cols), shape)[index].reshape(-1).numpy()


def index_key(index: Any) -> tuple[Any, ...]:
    """An index of slices and numbers as something that can be looked up."""
    listed = index if isinstance(index, tuple) else (index,)
    return tuple((each.start, each.stop, each.step) if isinstance(each, slice) else each for each in listed)
