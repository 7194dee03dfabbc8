"""Calls that were not seen before: rule, plan, kernel and run, with nothing remembered of the call or its moves.

What a first call takes depends on where its operands lie, so each work takes the slowest of many random placements.
"""

from __future__ import annotations

import math
import operator
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import meshloom as loom
from benchmarks.goals import Goal
from benchmarks.works import Pair, Spec
from meshloom.planner import paths, redistribution
from meshloom.tensor import dispatch

SIZE = 64
TRIED = 40
MESHES = {(2, 4): 1000.0, (2, 2, 2): 4000.0, (2, 2, 2, 2, 2): 20000.0}  # microseconds over the dense call
CALLS: dict[str, Callable[[Any, Any], Any]] = {"a @ b": operator.matmul, "a + b": operator.add}
_REMEMBERED = (redistribution.route, redistribution.stations, redistribution.paths_from, paths.prices_on)


def works(devices: Sequence[int]) -> list[Spec]:
    """Both calls on meshes of two, three and five axes."""
    return [
        Spec("first call", f"{call}, {len(mesh)} axes", mesh, partial(_pair, call, mesh), Goal("extra_us", most, " us"),
             "extra_us", seconds=2.0)
        for mesh, most in MESHES.items() if math.prod(mesh) in devices for call in CALLS
    ]  # fmt: skip


def forget() -> None:
    """Make every call a first one: no entry of a call, no path, no price is kept."""
    dispatch.CACHE.clear()
    for each in _REMEMBERED:
        each.cache_clear()


def _pair(call: str, shape: tuple[int, ...]) -> Pair:
    mesh, function, draw = loom.open_mesh(shape), CALLS[call], random.Random(0)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    pairs = [[loom.distribute(each, mesh, _draw_placements(draw, mesh)) for each in (a, b)] for _ in range(TRIED)]
    x, y = max(pairs, key=lambda pair: min(_time_first(function, *pair) for _ in range(3)))
    if not torch.allclose(function(x, y).to_torch(), function(a, b), rtol=1e-4, atol=1e-3):
        raise AssertionError(f"{call} of {x.topology} and {y.topology} is not the dense result")

    def ours() -> Any:
        forget()
        return function(x, y)

    return Pair(ours, lambda: function(a, b))


def _draw_placements(draw: random.Random, mesh: loom.Mesh) -> str:
    return ", ".join(draw.choice(("R", "S(0)", "S(1)")) for _ in mesh.axes)


def _time_first(function: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    forget()
    begun = time.process_time()
    function(x, y)
    return time.process_time() - begun
