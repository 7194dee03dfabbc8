"""A tensor cut into its different pieces: which part each one is, and which coordinates hold it.

Down go the coordinates of the axes that shard dim 0, across those of all other axes that shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.placement.placements import Partial, Shard
from meshloom.placement.topology import Topology


@dataclass(frozen=True, slots=True)
class Cut:
    """The mesh axes whose coordinates go down, and those whose go across."""

    topology: Topology
    down: tuple[int, ...]
    across: tuple[int, ...]

    def shape(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of some of the axes."""
        return tuple(self.topology.mesh.shape[axis] for axis in axes)

    def piece(self, top: Sequence[int], left: Sequence[int]) -> Piece:
        """The piece at a place down and a place across."""
        places = dict(zip(self.down + self.across, (*top, *left), strict=True))
        return Piece(self.topology, tuple(places.get(axis, 0) for axis in range(self.topology.mesh.ndim)))


@dataclass(frozen=True, slots=True)
class Piece:
    """What the device at a coordinate holds; devices that differ only on axes that do not shard hold the same piece.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.placement import Replicate
    >>> piece = Piece(Topology(Mesh(dp=2, tp=2), (Shard(0), Replicate()), (4, 6), "f32"), (1, 0))
    >>> piece.held, piece.owners, piece.number, piece.part(0), piece.part(1)
    ('2:4, 0:6', 'dp=1 tp=*', 1, 0.5, 1.0)
    """

    topology: Topology
    place: tuple[int, ...]

    @property
    def held(self) -> str:
        """The part of each dim."""
        chunks = (self.topology.chunk(self.place, dim) for dim in range(self.topology.ndim))
        return ", ".join(f"{start}:{start + extent}" for start, extent in chunks) or "()"

    @property
    def owners(self) -> str:
        """The coordinates that hold it: `*` for all of an axis, `+` for all of an axis that it is partial on."""
        return " ".join(f"{name}={self._mark(axis)}" for axis, name in enumerate(self.topology.mesh.axes))

    def _mark(self, axis: int) -> str:
        placement = self.topology.placements[axis]
        return str(self.place[axis]) if isinstance(placement, Shard) else "+" if isinstance(placement, Partial) else "*"

    @property
    def number(self) -> int:
        """Its number among the different pieces, row-major."""
        found = 0
        for axis, placement in enumerate(self.topology.placements):
            if isinstance(placement, Shard):
                found = found * self.topology.mesh.shape[axis] + self.place[axis]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return any(self.topology.chunk(self.place, dim)[1] == 0 for dim in range(self.topology.ndim))

    def part(self, *dims: int) -> float:
        """The share that it has of some dims."""
        extents = ((self.topology.chunk(self.place, dim)[1], self.topology.shape[dim]) for dim in dims)
        return math.prod(extent / size if size else 0.0 for extent, size in extents)


def cut(topology: Topology) -> Cut:
    """How a tensor is cut."""
    sharding = [axis for axis, each in enumerate(topology.placements) if isinstance(each, Shard)]
    down = [axis for axis in sharding if topology.placements[axis] == Shard(0)]
    return Cut(topology, tuple(down), tuple(axis for axis in sharding if axis not in down))
