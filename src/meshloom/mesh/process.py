"""Which process this is among how many, and how processes split a mesh into equal boxes.

A script that runs alone is rank 0 of 1. `processes.world` says otherwise, once, when processes join;
`processes.bindings.process` knows it from the environment before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshloom.errors import MeshError


@dataclass
class Process:
    """This process: its rank, and how many there are."""

    rank: int = 0
    count: int = 1


HERE = Process()


def divide(shape: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The grid in which `count` processes split a mesh into equal boxes, left axis first; None where they cannot.

    >>> divide((2, 4), 2), divide((2, 4), 8), divide((3, 5), 3), divide((2, 4), 3)
    ((2, 1), (2, 4), (3, 1), None)
    """
    if count < 1 or math.prod(shape) % count:
        return None
    grid = []
    for size in shape:
        grid.append(math.gcd(size, count))
        count //= grid[-1]
    return tuple(grid)


def counts(shape: Sequence[int]) -> list[int]:
    """The numbers of processes that split a mesh into equal boxes.

    >>> counts((2, 3))
    [1, 2, 3, 6]
    """
    size = math.prod(shape)
    small = [count for count in range(1, math.isqrt(size) + 1) if size % count == 0]
    return sorted({*small, *(size // count for count in small)})


def check_grid(grid: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """An error unless the grid of processes cuts every axis into equal parts."""
    if len(grid) != len(shape) or any(parts < 1 or size % parts for size, parts in zip(shape, grid, strict=True)):
        raise MeshError(
            f"a grid of {grid} processes does not cut a mesh of shape {shape} into equal boxes",
            fix="give one number per axis that divides its size",
        )


def place_of(rank: int, grid: Sequence[int]) -> tuple[int, ...]:
    """A rank's position in the grid of processes, row-major.

    >>> place_of(3, (2, 2))
    (1, 1)
    """
    place = []
    for parts in reversed(grid):
        place.append(rank % parts)
        rank //= parts
    return tuple(reversed(place))


def number_of(place: Iterable[int], grid: Sequence[int]) -> int:
    """The row-major number of a place in a grid: `place_of` backwards.

    >>> number_of((1, 2), (2, 4))
    6
    """
    number = 0
    for c, size in zip(place, grid, strict=True):
        number = number * size + c
    return number
