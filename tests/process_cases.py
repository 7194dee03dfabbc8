"""What ranks run in `test_processes.py`: every rank draws the same cases, works on its own box, and compares with dense.

Failures name the case: `replay(count, name, number)` runs it alone.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import meshloom as loom
from meshloom import Mesh
from meshloom.backends import wire
from meshloom.mesh import HERE
from oracle import MESHES, check_case
from samples import SAMPLES, Draw


class Seeded(Draw):
    """Draws that follow from a text alone, so that every rank draws the same."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self._random.randrange(len(values))]

    def yes(self) -> bool:
        return self._random.random() < 0.5

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def grids(count: int, shapes: Sequence[tuple[int, ...]] = MESHES) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every mesh with every grid in which `count` processes cut it into equal boxes."""
    return [
        (shape, grid)
        for shape in shapes
        for grid in itertools.product(*(range(1, size + 1) for size in shape))
        if math.prod(grid) == count and all(size % parts == 0 for size, parts in zip(shape, grid, strict=True))
    ]


def op_case(name: str, number: int) -> None:
    """One case of an op: mesh, grid, placements and values all follow from its name and number."""
    d = Seeded(f"{name} {number}")
    shape, grid = d.pick(grids(HERE.count))
    try:
        check_case(d, SAMPLES[name](d), loom.open_mesh(shape, processes=grid))
    except Exception as error:
        raise AssertionError(f"op_case({name!r}, {number}) on {shape} over {grid} processes failed: {error}") from error


def op_cases(per_op: int, names: Sequence[str] | None = None, first: int = 0) -> Counter[str]:
    """Cases of every op; how many of each ran."""
    loom.open_mesh(HERE.count or 1)
    loom.open_mesh((1,), processes=(1,))
    ran: Counter[str] = Counter()
    for name in sorted(SAMPLES) if names is None else names:
        for number in range(first, first + per_op):
            op_case(name, number)
            ran[name] += 1
    return ran
