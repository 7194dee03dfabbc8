"""What a process holds of a tensor, as boxes of global indices with their place in the stored array.

Chunks that lie beside each other in both are one: a process alone has one extent for all that is not padded inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from meshloom.mesh import HERE
from meshloom.placement.topology import Topology
from meshloom.types import Shape, numel


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements of one dim: from which global index on, how many, and where they are stored."""

    start: int
    size: int
    place: int


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: its first global index and its shape.

    >>> Part((2, 0), (3, 4)).stop
    (5, 4)
    """

    start: Shape
    shape: Shape

    @property
    def stop(self) -> Shape:
        """The global index behind its last element, in every dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Extent(Part):
    """A box of a tensor, and where the stored array has it (partial axes aside)."""

    place: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the global tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def stored(self) -> tuple[slice, ...]:
        """The box in the dims of the stored array."""
        return tuple(slice(place, place + size) for place, size in zip(self.place, self.shape, strict=True))

    @property
    def count(self) -> int:
        """How many elements it has."""
        return numel(self.shape)


def extents(topology: Topology, rank: int | None = None) -> tuple[Extent, ...]:
    """What this process holds of a tensor, or what another rank holds; padding is in none of them.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.placement.placements import Shard
    >>> whole = Topology(Mesh(a=2, b=4), (Shard(0), Shard(0)), (10,), "f32")
    >>> [(each.start, each.shape, each.place) for each in extents(whole)]
    [((0,), (5,), (0,)), ((5,), (5,), (8,))]
    """
    if topology.mesh.ranks and (HERE.rank if rank is None else rank) not in topology.mesh.ranks:
        return ()
    lines = [runs(topology, dim, rank) for dim in range(topology.ndim)]
    return tuple(_extent(each) for each in itertools.product(*lines))


def _extent(runs: tuple[Run, ...]) -> Extent:
    starts, sizes = (run.start for run in runs), (run.size for run in runs)
    return Extent(tuple(starts), tuple(sizes), tuple(run.place for run in runs))


def runs(topology: Topology, dim: int, rank: int | None = None) -> list[Run]:
    """What a process holds of one dim, in the order in which it is stored."""
    mesh, axes = topology.mesh, topology.axes_of[dim]
    offset, held = mesh.offset_of(rank), mesh.local_shape
    coordinate = [0] * mesh.ndim
    found = []
    for number, places in enumerate(itertools.product(*(range(held[axis]) for axis in axes))):
        for axis, place in zip(axes, places, strict=True):
            coordinate[axis] = offset[axis] + place
        start, size = topology.chunk(coordinate, dim)
        found.append(Run(start, size, number * topology.local_shape[dim]))
    return list(_join(found))


def _join(found: Iterable[Run]) -> Iterable[Run]:
    """Neighbours as one, empty ones left out: chunks of 3, 3, 3 and 1 are one run of 10."""
    last: Run | None = None
    for run in found:
        if run.size == 0:
            continue
        if last is not None and (last.start + last.size, last.place + last.size) == (run.start, run.place):
            last = Run(last.start, last.size + run.size, last.place)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
