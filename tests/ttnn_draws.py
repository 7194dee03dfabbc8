"""What Hypothesis draws for the per-device view: meshes, shapes, blocks, and what each axis does to a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from meshloom import ttnn
from meshloom.ttnn.tensor.topology import Placement

R, S, P = ttnn.PlacementReplicate(), ttnn.PlacementShard, ttnn.PlacementPartial
UNKNOWN = P("unknown")
Place = Grid = tuple[int, ...]
GRIDS = [(1,), (4,), (1, 2), (2, 3), (2, 1, 2)]
PLANES = [(1, 1), (1, 4), (2, 2), (2, 1), (3, 2), (2, 1, 2)]
DTYPES = [ttnn.float32, ttnn.bfloat16]
planes = st.sampled_from(PLANES)


@st.composite
def grids(draw: Any) -> Place:
    return draw(st.sampled_from(GRIDS))


@st.composite
def blocks(draw: Any, grid: Place, shape: Sequence[int], low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """What all devices hold: along some axes of the mesh, the same."""
    lead = [1 if draw(st.booleans()) else size for size in grid]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    return torch.rand((*lead, *shape), generator=generator) * (high - low) + low


@st.composite
def shapes(draw: Any, least: int = 1, most: int = 4, sizes: Sequence[int] = (0, 1, 2, 5, 33)) -> tuple[int, ...]:
    """Uneven tiles, size 1, nothing at all."""
    return tuple(draw(st.lists(st.sampled_from(sizes), min_size=least, max_size=most)))


@st.composite
def cuts(draw: Any, grid: Place, shape: Sequence[int], terms: bool = True) -> list[Placement]:
    """What each axis of the mesh does to a whole: a dim it divides is cut, or all hold the same, or terms of a sum."""
    sizes, found = list(shape), []
    for size in grid:
        ways: list[Placement] = [ttnn.PlacementReplicate()]
        ways += [ttnn.PlacementShard(dim) for dim, each in enumerate(sizes) if each % size == 0 and each]
        if terms:
            ways.append(ttnn.PlacementPartial("sum"))
        way = draw(st.sampled_from(ways))
        if isinstance(way, ttnn.PlacementShard):
            sizes[way.dim] //= size
        found.append(way)
    return found


@st.composite
def alike_for(draw: Any, grid: Sequence[int]) -> list[bool]:
    """Along which axes all devices hold the same."""
    return [draw(st.booleans()) for _ in grid]


@st.composite
def placements_for(draw: Any, grid: Sequence[int], dims: Sequence[int], terms: bool = True) -> list[Any]:
    """A placement for every axis, cutting some of the dims; a dim may be cut by several axes."""
    options = [R, *(S(dim) for dim in dims), *([P("sum")] if terms else [])]
    return [draw(st.sampled_from(options)) if size > 1 else R for size in grid]


def cuts_of(grid: Sequence[int], placements: Sequence[Any], dim: int) -> int:
    """Into how many pieces a dim is cut."""
    count = 1
    for size, placement in zip(grid, placements, strict=True):
        count *= size if placement == S(dim) else 1
    return count
