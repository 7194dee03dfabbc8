"""A topology answers where every element of a tensor lives: mesh x placements x global shape and dtype.

Chunks are `ceil` sized and nest, left mesh axis first: 10 over (2, 4) is 5 + 5, then 2, 2, 1, 0 in each.

Two shapes follow from it. The *block* has the mesh axes first, then what one device holds: `(2, 4, m, n)`. The *stored*
shape is the same elements in the order of the dims: each mesh axis stands directly before the dim it shards and is
merged with it, replicated axes are gone, partial axes lead. A block is always a view of the stored array, and where
nothing is padded the stored array of a sharded tensor is the dense tensor, which is what makes a fold free.

Where processes split the mesh, both are what one process holds: the stored array of `held`, the tensor's part in the
box as a topology of its own. What a process lacks at the end of its box is padding there, as on a device.

Topologies are interned: equal ones are the same object, so that a cache can look them up by identity.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

from meshloom.errors import ClosedError, DTypeError, PlacementError
from meshloom.mesh import Coordinate, Lease, Mesh
from meshloom.placement.placements import Partial, Placement, Replicate, Shard
from meshloom.placement.spelling import spell
from meshloom.types import Shape, is_floating, itemsize, numel


class Topology:
    """Where every element of a tensor lives.

    >>> t = Topology(Mesh(dp=2, tp=4), (Shard(0), Replicate()), (16, 8), "f32")
    >>> str(t)
    'f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)'
    >>> t.local_shape, t.offset((1, 0)), t.block_shape, t.stored_shape
    ((8, 8), (8, 0), (2, 1, 8, 8), (16, 8))
    """

    _known: ClassVar[WeakValueDictionary[tuple[object, ...], Topology]] = WeakValueDictionary()
    _leased: ClassVar[dict[Lease, WeakSet[Topology]]] = {}  # those on meshes that end
    _lock: ClassVar[threading.Lock] = threading.Lock()

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: Shape
    dtype: str

    def __new__(cls, mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int], dtype: str) -> Topology:
        key = (mesh, tuple(placements), tuple(shape), dtype)
        found = cls._known.get(key)
        if found is None:
            found = super().__new__(cls)
            found.mesh, found.placements, found.shape, found.dtype = mesh, key[1], key[2], dtype
            found._validate()
            with cls._lock:  # `setdefault` of a weak dictionary is not atomic
                found = cls._known.setdefault(key, found)
                if mesh.lease is not None:
                    cls._leased.setdefault(mesh.lease, WeakSet()).add(found)
        return found

    def __getattr__(self, name: str) -> Any:
        """What a topology does not have: its mesh, once that has been closed, and so all that follows from it."""
        closed = vars(self).get("_closed")
        if closed is None or name != "mesh":
            raise AttributeError(f"a topology has no {name}")
        raise ClosedError(
            f"{closed} is on a mesh device that has been closed", fix="read it before: x.to_torch() has its values"
        )

    @classmethod
    def close(cls, lease: Lease) -> list[Topology]:
        """End the topologies on the meshes of a lease: shape, dtype and placements are all that they still know."""
        with cls._lock:
            ended = list(cls._leased.pop(lease, ()))
            for each in ended:
                del cls._known[each.mesh, each.placements, each.shape, each.dtype]
                text, kept = str(each), (each.placements, each.shape, each.dtype)
                vars(each).clear()
                each.placements, each.shape, each.dtype = kept
                vars(each)["_closed"] = text
        return ended

    @property
    def is_closed(self) -> bool:
        """Whether its mesh has been closed."""
        return "_closed" in vars(self)

    def check_open(self) -> None:
        """An error if its mesh has been closed."""
        self.mesh  # noqa: B018  raises

    def _validate(self) -> None:
        if self.mesh.lease is not None:
            self.mesh.lease.check_open()
        if len(self.placements) != self.mesh.ndim:
            raise PlacementError(f"{len(self.placements)} placements for {self.mesh.ndim} mesh axes", mesh=self.mesh)
        for placement in self.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise PlacementError(
                    f"{placement} names a dim that a tensor of {len(self.shape)} dims does not have",
                    mesh=self.mesh,
                    asked=spell(self.placements),
                    shape=list(self.shape),
                )
            if isinstance(placement, Partial):
                check_partial(placement, self.dtype)
        if not reduce_together(self.placements):
            raise PlacementError(
                "partial axes with different reductions have no common order",
                mesh=self.mesh,
                asked=spell(self.placements),
                fix="reduce one of them first; only P(sum) and P(mean) go together",
            )

    def __repr__(self) -> str:
        if self.is_closed:
            return str(self)
        return f"Topology({self.mesh!r}, {self.placements!r}, {self.shape!r}, {self.dtype!r})"

    def __str__(self) -> str:
        return f"{vars(self)['_closed']}, closed" if self.is_closed else f"{self.notation} on {self.mesh}"

    def _repr_html_(self) -> str:
        from meshloom.placement.picture import draw_html

        return draw_html(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Topology, (self.mesh, self.placements, self.shape, self.dtype)

    def __copy__(self) -> Topology:
        return self

    def __deepcopy__(self, memo: object) -> Topology:
        return self

    @property
    def notation(self) -> str:
        """The tensor without its mesh: `f32[16, 8](S(0), R)`."""
        return f"{self.dtype}{list(self.shape)}{spell(self.placements)}"

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.shape)

    @cached_property
    def axes_of(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the mesh axes that shard it, left first."""
        found: list[list[int]] = [[] for _ in self.shape]
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                found[placement.dim].append(axis)
        return tuple(tuple(axes) for axes in found)

    @cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the sizes of the mesh axes that shard it."""
        return tuple(tuple(self.mesh.shape[axis] for axis in axes) for axes in self.axes_of)

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """The mesh axes on which the tensor is Partial."""
        return tuple(axis for axis, placement in enumerate(self.placements) if isinstance(placement, Partial))

    @cached_property
    def local_shape(self) -> Shape:
        """What one device holds, padding included: the shape behind the mesh axes of the block."""
        return tuple(_innermost(size, shards) for size, shards in zip(self.shape, self.shards, strict=True))

    @cached_property
    def held(self) -> Topology:
        """What one process holds, as a topology on its own box; the same for every process.

        >>> mesh = Mesh.of((4, 2), ("dp", "tp"), processes=(2, 1))
        >>> str(Topology(mesh, (Shard(0), Replicate()), (10, 3), "f32").held)
        'f32[6, 3](S(0), R) on Mesh(dp=2, tp=2)'
        """
        if not self.mesh.is_split:
            return self
        sizes = tuple(self._held_size(dim) for dim in range(self.ndim))
        return Topology(self.mesh.local, self.placements, sizes, self.dtype)

    def _held_size(self, dim: int) -> int:
        """The size of a dim in the box: down to the last axis that crosses processes boxes are cut evenly."""
        size, boxes, kept = self.shape[dim], 1, self.shape[dim]
        for axis in self.axes_of[dim]:
            size = _ceil(size, self.mesh.shape[axis])
            boxes *= self.mesh.local_shape[axis]
            if self.mesh.processes[axis] > 1:
                kept = boxes * size
        return kept

    def crosses(self, dim: int) -> bool:
        """Whether the chunks of a dim lie on several processes."""
        return any(self.mesh.processes[axis] > 1 for axis in self.axes_of[dim])

    @cached_property
    def is_whole(self) -> bool:
        """Whether every process holds all of it: no axis that processes split shards it or keeps it partial."""
        split = zip(self.mesh.processes, self.placements, strict=True)
        return all(parts == 1 or isinstance(placement, Replicate) for parts, placement in split)

    @cached_property
    def block_shape(self) -> Shape:
        """Mesh axes (size 1 where replicated), then the local shape; the axes of the box where processes split them."""
        replicated = (isinstance(placement, Replicate) for placement in self.placements)
        lead = tuple(1 if same else size for same, size in zip(replicated, self.mesh.local_shape, strict=True))
        return lead + self.local_shape

    @cached_property
    def stored_shape(self) -> Shape:
        """Partial axes, then every dim with its padding."""
        local = self.mesh.local_shape
        lead = tuple(local[axis] for axis in self.partial_axes)
        parts = (math.prod(local[axis] for axis in axes) for axes in self.axes_of)
        return lead + tuple(size * count for size, count in zip(self.local_shape, parts, strict=True))

    @cached_property
    def padded_dims(self) -> tuple[int, ...]:
        """The dims whose chunks do not all have the same size."""
        full = (size * math.prod(shards) for size, shards in zip(self.local_shape, self.shards, strict=True))
        return tuple(d for d, (size, all_of_it) in enumerate(zip(self.shape, full, strict=True)) if all_of_it != size)

    @cached_property
    def padded(self) -> bool:
        """Whether some device holds padding."""
        return bool(self.padded_dims)

    @cached_property
    def local_bytes(self) -> int:
        """The bytes that one device holds, padding included."""
        return numel(self.local_shape) * itemsize(self.dtype)

    def chunk(self, coordinate: Sequence[int], dim: int) -> tuple[int, int]:
        """The offset and the extent of a coordinate's chunk of one dim, padding left out.

        >>> t = Topology(Mesh(a=2, b=4), (Shard(0), Shard(0)), (10,), "f32")
        >>> [t.chunk((1, b), 0) for b in range(4)]
        [(5, 2), (7, 2), (9, 1), (10, 0)]
        """
        start, extent, full = 0, self.shape[dim], self.shape[dim]
        for axis in self.axes_of[dim]:
            full = _ceil(full, self.mesh.shape[axis])
            begin = min(coordinate[axis] * full, extent)
            start, extent = start + begin, min(full, extent - begin)
        return start, extent

    def offset(self, coordinate: Sequence[int]) -> Shape:
        """The global index of a device's first element."""
        place = self.mesh.check(coordinate)
        return tuple(self.chunk(place, dim)[0] for dim in range(self.ndim))

    def extent(self, coordinate: Sequence[int]) -> Shape:
        """The shape of what a device holds, padding left out."""
        place = self.mesh.check(coordinate)
        return tuple(self.chunk(place, dim)[1] for dim in range(self.ndim))

    def padding(self, coordinate: Sequence[int]) -> Shape:
        """How many elements of each local dim are padding on a device."""
        return tuple(full - held for full, held in zip(self.local_shape, self.extent(coordinate), strict=True))

    def owners(self, index: Sequence[int]) -> tuple[Coordinate, ...]:
        """Every coordinate that holds the element at a global index.

        >>> Topology(Mesh(dp=2, tp=2), (Shard(0), Replicate()), (4,), "f32").owners((3,))
        ((1, 0), (1, 1))
        """
        if len(index) != self.ndim or not all(0 <= i < size for i, size in zip(index, self.shape, strict=True)):
            raise PlacementError(f"index {tuple(index)} is not in the tensor", tensor=self)
        return tuple(place for place in self.mesh.coordinates() if self._holds(place, index))

    def _holds(self, place: Coordinate, index: Sequence[int]) -> bool:
        chunks = (self.chunk(place, dim) for dim in range(self.ndim))
        return all(start <= i < start + extent for (start, extent), i in zip(chunks, index, strict=True))

    def with_placements(self, placements: Sequence[Placement]) -> Topology:
        """The same tensor placed otherwise."""
        return Topology(self.mesh, placements, self.shape, self.dtype)

    def with_dtype(self, dtype: str) -> Topology:
        """The same placement for another dtype."""
        return self if dtype == self.dtype else Topology(self.mesh, self.placements, self.shape, dtype)

    @cached_property
    def replicated(self) -> Topology:
        """The same tensor, replicated on every axis."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    @cached_property
    def reduced(self) -> Topology:
        """The same tensor with every Partial axis replicated; also the topology of its gradient."""
        settled = (Replicate() if isinstance(each, Partial) else each for each in self.placements)
        return self.with_placements(tuple(settled))


def reduce_together(placements: Sequence[Placement]) -> bool:
    """Whether partial axes can be reduced in any order: all alike, or sums and means."""
    kinds = {"sum" if each.op == "mean" else each.op for each in placements if isinstance(each, Partial)}
    return len(kinds) <= 1


def can_be_partial(placement: Partial, dtype: str) -> bool:
    """P(sum) and P(prod) refuse bool, P(mean) refuses bool and integers, P(max) and P(min) refuse complex numbers."""
    if placement.op in ("max", "min"):
        return dtype not in ("c64", "c128")
    return is_floating(dtype) or (dtype != "bool" and placement.op != "mean")


def check_partial(placement: Partial, dtype: str) -> None:
    """An error that names the dtype if it cannot be partial that way."""
    if not can_be_partial(placement, dtype):
        fix = "use P(sum), or cast to a floating dtype"
        if dtype == "bool":
            fix = "use P(max) for any, P(min) for all"
        if dtype in ("c64", "c128"):
            fix = "complex numbers have no order: use P(sum), or take x.abs() or x.real"
        raise DTypeError(f"{placement} has no meaning for {dtype}", fix=fix)


def _ceil(size: int, parts: int) -> int:
    return -(-size // parts)


def _innermost(size: int, shards: tuple[int, ...]) -> int:
    for parts in shards:
        size = _ceil(size, parts)
    return size
