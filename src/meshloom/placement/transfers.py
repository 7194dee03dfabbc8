"""What a copy between two meshes sends: for every pair of processes the boxes that one gives the other.

A process that needs a box and holds it already takes its own; of several that hold the same, each gives to some, so
that every element reaches every process that holds it on the target once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshloom.placement.extents import Extent, Part, extents
from meshloom.placement.topology import Topology
from meshloom.types import itemsize, numel


@dataclass(frozen=True, slots=True)
class Box(Part):
    """A box of a tensor: where the source's stored array has it, and where the target's does."""

    taken: tuple[slice, ...]
    put: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one process gives another, or itself."""

    source: int
    target: int
    boxes: tuple[Box, ...]

    @property
    def count(self) -> int:
        """How many elements."""
        return sum(numel(each.shape) for each in self.boxes)


@lru_cache(maxsize=4096)
def transfers(source: Topology, target: Topology) -> tuple[Transfer, ...]:
    """All transfers of a copy, in an order that every process finds; neither topology is partial.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.placement.placements import Replicate, Shard
    >>> whole = Mesh.of((2, 2), ("pp", "tp"), processes=(2, 1))
    >>> one, two = (Topology(whole.submesh(pp=i), (p,), (4,), "f32") for i, p in enumerate((Shard(0), Replicate())))
    >>> [(each.source, each.target, each.count) for each in transfers(one, two)]
    [(0, 1, 4)]
    """
    holders: dict[tuple[Extent, ...], list[int]] = {}
    for rank in source.mesh.holders:
        holders.setdefault(extents(source, rank), []).append(rank)
    found: dict[tuple[int, int], list[Box]] = {}
    for number, rank in enumerate(target.mesh.holders):
        for held, ranks in holders.items():
            giver = rank if rank in ranks else ranks[number % len(ranks)]
            found.setdefault((giver, rank), []).extend(_boxes(held, extents(target, rank)))
    return tuple(Transfer(*pair, tuple(boxes)) for pair, boxes in sorted(found.items()) if boxes)


def _boxes(held: tuple[Extent, ...], wanted: tuple[Extent, ...]) -> Iterator[Box]:
    for here in held:
        for there in wanted:
            start = tuple(map(max, here.start, there.start))
            shape = tuple(stop - first for stop, first in zip(map(min, here.stop, there.stop), start, strict=True))
            if all(size > 0 for size in shape):
                yield Box(start, shape, _inside(here, start, shape), _inside(there, start, shape))


def _inside(extent: Extent, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """A box in the dims of the stored array that has it in an extent."""
    rows = zip(start, shape, extent.start, extent.place, strict=True)
    return tuple(slice(place + at - first, place + at - first + size) for at, size, first, place in rows)


@lru_cache(maxsize=4096)
def bytes_received(source: Topology, target: Topology) -> int:
    """The bytes that the device which lacks most receives: what it holds on the target and not on the source.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.placement.placements import Shard
    >>> meshes = Mesh(a=2), Mesh(b=2), Mesh.of((1,), device_ids=[7])
    >>> here, again, there = (Topology(each, (Shard(0),), (4,), "f32") for each in meshes)
    >>> bytes_received(here, again), bytes_received(here, there)
    (0, 16)
    """
    places = (
        {source.mesh.device_id(place): place for place in source.mesh.coordinates()} if _meet(source, target) else {}
    )
    if not places:
        return target.local_bytes
    most = 0
    for place in target.mesh.coordinates():
        here = places.get(target.mesh.device_id(place))
        held = 0 if here is None else _overlap(source, here, target, place)
        most = max(most, numel(target.extent(place)) - held)
    return most * itemsize(target.dtype)


def _meet(source: Topology, target: Topology) -> bool:
    """Whether some device is on both meshes."""
    return not set(source.mesh.device_ids).isdisjoint(target.mesh.device_ids)


def _overlap(source: Topology, here: tuple[int, ...], target: Topology, there: tuple[int, ...]) -> int:
    count = 1
    for dim in range(source.ndim):
        (first, size), (other, width) = source.chunk(here, dim), target.chunk(there, dim)
        count *= max(0, min(first + size, other + width) - max(first, other))
    return count
