"""How an array is cut over cards with memory of their own: as a topology says, by leading axes, or in equal pieces.

A layout is a value. It cuts a contiguous array into the part of every card of this process, says which cards have to be
read to know all of it, and puts what they gave together again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from meshloom.engines.layout import to_block
from meshloom.mesh import Coordinate, Mesh
from meshloom.placement import Replicate, Shard, Topology
from meshloom.types import Shape, numel

Parts = Mapping[Coordinate, torch.Tensor]


@dataclass(frozen=True)
class Layout(ABC):
    """How an array of a shape is cut over the cards of a mesh."""

    mesh: Mesh
    shape: Shape

    @property
    @abstractmethod
    def part_shape(self) -> Shape:
        """The shape of what one card holds."""

    @abstractmethod
    def cut(self, array: torch.Tensor) -> dict[Coordinate, torch.Tensor]:
        """What each card of this process holds of an array, row-major."""

    @abstractmethod
    def sources(self) -> list[Coordinate]:
        """The cards to read: one of those that hold the same."""

    @abstractmethod
    def join(self, parts: Parts, into: torch.Tensor) -> None:
        """Put what those cards gave into an array."""


class Blocks(Layout):
    """An array whose block has the mesh axes of this process first; size 1 where all cards hold the same."""

    @property
    def block_shape(self) -> Shape:
        """The shape of the block."""
        return self.shape

    @property
    def part_shape(self) -> Shape:
        """The shape of what one card holds."""
        return self.block_shape[self.mesh.ndim :]

    def cut(self, array: torch.Tensor) -> dict[Coordinate, torch.Tensor]:
        """What each card of this process holds of an array, row-major."""
        block = self._block(array)
        return {place: block[self._index(place)] for place in self.mesh.local_coordinates()}

    def sources(self) -> list[Coordinate]:
        """The cards to read: one of those that hold the same."""
        found: dict[Coordinate, Coordinate] = {}
        for place in self.mesh.local_coordinates():
            found.setdefault(self._index(place), place)
        return list(found.values())

    def join(self, parts: Parts, into: torch.Tensor) -> None:
        """Put what those cards gave into an array."""
        block = self._block(into)
        for place, part in parts.items():
            block[self._index(place)] = part

    def _index(self, place: Coordinate) -> Coordinate:
        sizes = zip(place, self.mesh.local_offset, self.block_shape, strict=False)
        return tuple(c - start if size > 1 else 0 for c, start, size in sizes)

    def _block(self, array: torch.Tensor) -> torch.Tensor:
        return array.view(self.block_shape)


@dataclass(frozen=True, eq=False)
class Placed(Blocks):
    """The stored array of a topology: every card holds its shard, padding included. Two of them are equal if every card
    holds the same bytes for the same array, whatever dims of size 1 there are in front.

    >>> from meshloom import parse
    >>> topology = parse("f32[4, 3](S(0)) on Mesh(x=2)")
    >>> {place: list(part.shape) for place, part in placed(topology).cut(torch.ones(4, 3)).items()}
    {(0,): [2, 3], (1,): [2, 3]}
    """

    topology: Topology

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placed) and _strip(self.topology) is _strip(other.topology)

    def __hash__(self) -> int:
        return hash(_strip(self.topology))

    @property
    def block_shape(self) -> Shape:
        """The shape of the block."""
        return self.topology.block_shape

    def _block(self, array: torch.Tensor) -> torch.Tensor:
        return to_block(array.view(self.shape), self.topology)


def placed(topology: Topology) -> Placed:
    """The layout of a topology's stored array.

    >>> from meshloom import parse
    >>> placed(parse("f32[1, 4](S(1)) on Mesh(x=2)")) == placed(parse("bf16[4](S(0)) on Mesh(x=2)"))
    True
    """
    return Placed(topology.mesh, topology.stored_shape, topology)


@lru_cache(maxsize=4096)
def _strip(topology: Topology) -> Topology:
    """A topology without dims of size 1 in front, and of one dtype."""
    count = 0
    if not topology.partial_axes:
        while count < topology.ndim and topology.shape[count] == topology.stored_shape[count] == 1:
            count += 1
    return shift(topology.with_dtype("f32"), -count)


def shift(topology: Topology, count: int) -> Topology:
    """A topology with so many dims of size 1 more in front, or fewer."""
    if not count:
        return topology
    shape = (1,) * count + topology.shape if count > 0 else topology.shape[-count:]
    placements = [
        each if not isinstance(each, Shard) else Shard(each.dim + count) if each.dim + count >= 0 else Replicate()
        for each in topology.placements
    ]
    return Topology(topology.mesh, tuple(placements), shape, topology.dtype)


def strip(shape: Sequence[int]) -> Shape:
    """A shape without dims of size 1 in front.

    >>> strip((1, 1, 4, 1)), strip((1,))
    ((4, 1), ())
    """
    sizes = tuple(shape)
    while sizes and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes


class Spread(Layout):
    """An array that no placements describe, such as one inside of an op: equal pieces of it, in order."""

    @property
    def part_shape(self) -> Shape:
        """The shape of what one card holds."""
        return (-(-numel(self.shape) // len(self._places())),)

    def cut(self, array: torch.Tensor) -> dict[Coordinate, torch.Tensor]:
        """What each card of this process holds of an array, row-major."""
        places, (size,) = self._places(), self.part_shape
        flat = array.view(-1)
        missing = size * len(places) - flat.numel()
        flat = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        return dict(zip(places, flat.view(len(places), size), strict=True))

    def sources(self) -> list[Coordinate]:
        """The cards to read: all that hold more than padding."""
        (size,) = self.part_shape
        used = -(-numel(self.shape) // size) if size else 0
        return self._places()[:used]

    def join(self, parts: Parts, into: torch.Tensor) -> None:
        """Put what those cards gave into an array."""
        if parts:
            into.view(-1).copy_(torch.cat([part.view(-1) for part in parts.values()])[: into.numel()])

    def _places(self) -> list[Coordinate]:
        return list(self.mesh.local_coordinates())
