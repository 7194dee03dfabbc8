"""How a tensor lies on the mesh, as TTNN labels it: one placement for every axis of a distribution shape.

A label says of which whole these parts are the parts. Ops on parts never communicate, so the label has to follow from
what was done: a reduction drops and renumbers dims, and a contraction over a sharded dim leaves partial sums.

It is the pieces of a native topology that are known before a tensor is: with the shape of a part it becomes one
(`TensorTopology.join`), and a native topology is spelled as a label by `spell`.

All parts have one shape, so a dim that does not divide is padded at its end. The placement that cuts it then knows the
size of the whole without the padding, wherever the dim goes (`PlacementShard.at`), and composers cut there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from meshloom.mesh import Coordinate, Mesh
from meshloom.placement import Partial, Placement as Native, Replicate, Shard, Topology
from meshloom.runtime import MeshCoordinate, MeshShape

__all__ = ["PlacementPartial", "PlacementReplicate", "PlacementShard", "TensorTopology"]


class PlacementShard(Shard):
    """The axis cuts a dim of the tensor. `size` is that of the whole dim where its end is padding, else None.

    >>> PlacementShard(1), PlacementShard(0, size=7).at(2), PlacementShard(0, size=7) == PlacementShard(0)
    (PlacementShard(1), PlacementShard(2, size=7), True)
    """

    __slots__ = ("size",)
    size: int | None

    def __init__(self, dim: int, size: int | None = None) -> None:
        super().__init__(dim)
        object.__setattr__(self, "size", size)

    def at(self, dim: int) -> PlacementShard:
        """The same cut of another dim: what becomes of it when an op moves the dim."""
        return PlacementShard(dim, self.size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self.dim == other.dim

    __hash__ = Shard.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementShard, (self.dim, self.size)

    def __repr__(self) -> str:
        padded = "" if self.size is None else f", size={self.size}"
        return f"PlacementShard({self.dim}{padded})"

    __str__ = __repr__


class PlacementReplicate(Replicate):
    """All devices along the axis hold the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicate)

    __hash__ = Replicate.__hash__

    def __repr__(self) -> str:
        return "PlacementReplicate()"

    __str__ = __repr__


class PlacementPartial(Partial):
    """The devices along the axis hold terms: the whole is their sum (or maximum, minimum). An op that is none of the
    reductions ("unknown") says that the global tensor cannot be reconstructed from them."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Any op may stand here."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partial) and self.op == other.op

    __hash__ = Partial.__hash__

    def __repr__(self) -> str:
        return f"PlacementPartial({self.op!r})"

    __str__ = __repr__


Placement = PlacementShard | PlacementReplicate | PlacementPartial
REPLICATE = PlacementReplicate()
UNKNOWN = PlacementPartial("unknown")  # parts differ along the axis, and the global tensor cannot be reconstructed


def spell(placement: Native, topology: Topology) -> Placement:
    """A placement of a native topology as labels have it: a cut knows the size of a dim whose end is padding."""
    if isinstance(placement, Shard):
        padded = placement.dim in topology.padded_dims
        return PlacementShard(placement.dim, topology.shape[placement.dim] if padded else None)
    return PlacementPartial(placement.op) if isinstance(placement, Partial) else REPLICATE


def unspell(placement: Native, rank: int = 0) -> Native:
    """A placement of a label as a native one, its dim counted from the front if the rank is given."""
    if isinstance(placement, Shard):
        return Shard(placement.dim % rank if rank else placement.dim)
    return Partial(placement.op) if isinstance(placement, Partial) else Replicate()


def join(mesh: Mesh, placements: Sequence[Native], local: Sequence[int], dtype: str = "f32") -> Topology:
    """The topology of all that devices hold, padding included, if each holds a part of this shape.

    >>> str(join(Mesh(x=2, y=4), (Shard(1), Replicate()), (3, 5)))
    'f32[3, 10](S(1), R) on Mesh(x=2, y=4)'
    """
    pairs = list(zip(mesh.shape, placements, strict=True))
    full = [size * math.prod(n for n, each in pairs if each == Shard(dim)) for dim, size in enumerate(local)]
    return Topology(mesh, placements, full, dtype)


_known: WeakValueDictionary[Any, TensorTopology] = WeakValueDictionary()


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TensorTopology:
    """A distribution shape, what each of its axes does, and the coordinates of the devices in its row-major order."""

    _shape: MeshShape
    _placements: tuple[Placement, ...]
    _coords: tuple[MeshCoordinate, ...]

    def __new__(
        cls, distribution_shape: Sequence[int], placements: Sequence[Placement], mesh_coords: Sequence[Sequence[int]]
    ) -> TensorTopology:
        """Equal ones are one object, so that ops compare labels by identity."""
        key = tuple(distribution_shape), tuple(placements), tuple(map(tuple, mesh_coords))
        sizes = tuple(getattr(each, "size", None) for each in key[1])  # of padded dims: not compared
        found = _known.get((key, sizes))
        if found is None:
            found = _known[key, sizes] = object.__new__(cls)
            object.__setattr__(found, "_shape", MeshShape(list(key[0])))
            object.__setattr__(found, "_placements", key[1])
            object.__setattr__(found, "_coords", tuple(MeshCoordinate(list(place)) for place in key[2]))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorTopology, (tuple(self._shape), self._placements, tuple(map(tuple, self._coords)))

    def distribution_shape(self) -> MeshShape:
        """The shape that placements are about; it may differ from the mesh's, as 8 does from 2x4."""
        return self._shape

    def placements(self) -> list[Placement]:
        """What each axis of the distribution shape does."""
        return list(self._placements)

    def mesh_coords(self) -> list[MeshCoordinate]:
        """The devices, in row-major order of the distribution shape."""
        return list(self._coords)

    def with_placements(self, placements: Sequence[Placement]) -> TensorTopology:
        """The same devices with other placements."""
        return TensorTopology(self._shape, placements, self._coords)

    def join(self, local: Sequence[int]) -> Topology:
        """The native topology of what parts of this shape are cut from, padding included; terms count as equals."""
        return _join(self, tuple(local))

    def offsets(self, local: Sequence[int]) -> dict[Coordinate, tuple[int, ...]]:
        """Where the part of every device begins in what the parts are cut from."""
        return _offsets(self, tuple(local))

    def __repr__(self) -> str:
        return (
            f"TensorTopology(distribution_shape={self._shape}, placements={list(self._placements)}, "
            f"mesh_coords={list(self._coords)})"
        )


@lru_cache(maxsize=4096)
def _join(label: TensorTopology, local: tuple[int, ...]) -> Topology:
    cuts = [unspell(each, len(local)) if isinstance(each, Shard) else Replicate() for each in label._placements]
    return join(Mesh.of(label._shape), cuts, local)


@lru_cache(maxsize=4096)
def _offsets(label: TensorTopology, local: tuple[int, ...]) -> dict[Coordinate, tuple[int, ...]]:
    joined = label.join(local)
    return {place: joined.offset(at) for place, at in zip(label._coords, joined.mesh.coordinates(), strict=False)}


ALONE = TensorTopology([1], [REPLICATE], [(0, 0)])
