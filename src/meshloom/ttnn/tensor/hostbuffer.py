"""The parts of a tensor on the host, by the coordinate of the device that they are meant for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshloom.errors import BoundsError
from meshloom.runtime import MeshCoordinate, MeshCoordinateRange, MeshShape
from meshloom.ttnn.tensor.boxes import place_here
from meshloom.ttnn.tensor.parts import Block, part

__all__ = ["DistributedHostBuffer"]


class DistributedHostBuffer:
    """A view of a tensor's block: one part for each coordinate, None where there is none."""

    def __init__(self, block: Block, grid: tuple[int, ...], coords: Sequence[MeshCoordinate] | None) -> None:
        self._block, self._grid, self._shape = block, grid, MeshShape(list(grid))
        self._coords = None if coords is None else frozenset(coords)

    def shape(self) -> MeshShape:
        return self._shape

    def is_local(self, coord: Sequence[int]) -> bool:
        """Whether this process has the part."""
        return place_here(self._grid, self._check(coord)) is not None

    def shard_coords(self) -> Iterator[MeshCoordinate]:
        """The coordinates that have a part, row-major."""
        return (place for place in MeshCoordinateRange(self._shape) if self._coords is None or place in self._coords)

    def get_shard(self, coord: Sequence[int]) -> Block | None:
        """The part of a coordinate, a view; None where there is none, or where another process has it."""
        place = self._check(coord)
        here = place_here(self._grid, place)
        if here is None or (self._coords is not None and place not in self._coords):
            return None
        return part(self._block, here)

    def _check(self, coord: Sequence[int]) -> MeshCoordinate:
        place = MeshCoordinate(list(coord))
        if tuple(place) not in MeshCoordinateRange(self._shape):
            raise BoundsError(f"Coordinate {place} is out of bounds for shape {self._shape}")
        return place
