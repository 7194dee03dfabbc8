"""A mesh is a value: named axes, their sizes, which device sits at each coordinate, and where that device lives.

A *virtual* coordinate is a place in this mesh; its *home* is the coordinate of a physical device and a lane on it. A
mesh of 4x4 virtual devices on 2x2 physical ones has four lanes per device. Homes travel with the devices through
`reshape` and `submesh`, so `virtual_to_physical` keeps its answer.

Several processes may split a mesh: `processes` is their grid, one number per axis, and each holds the box of
coordinates at its place in it. A submesh stays with the processes that hold its devices: `ranks` lists them, in the
order of the grid, where they are not all processes of the run; the others hold nothing of it (`is_elsewhere`). Meshes
are equal by names, sizes, device ids, that grid and those ranks.

A mesh costs what its shape costs: ids and homes that follow from the shape are worked out when somebody asks.

The mesh of a device that can be closed has a `lease` of it, and is equal to meshes of the same lease only: what lies on
such a device can be told from what lies on a mesh that is a value and nothing else.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from meshloom.errors import MeshError, closest
from meshloom.mesh.process import HERE, check_grid, divide, number_of, place_of

Coordinate = tuple[int, ...]
Home = tuple[Coordinate, int]
FEW = 1 << 20


class Lease(Protocol):
    """What a device gives the meshes that it owns: it ends when the device is closed.

    `store` is where tensors lie whose device has memory of its own; None where they lie in this process's.
    """

    store: Any

    def check_open(self) -> None:
        """An error if it has been closed."""

    def check_making(self) -> None:
        """An error if this process cannot make tensors there."""


class Homes(Sequence[Home]):
    """Where each virtual device lives: 4x4 on 2x2 puts rows 0-1, columns 0-1 on physical (0, 0), lanes 0 to 3.

    >>> list(Homes((2, 2), (2, 1)))
    [((0, 0), 0), ((0, 0), 1), ((1, 0), 0), ((1, 0), 1)]
    """

    __slots__ = ("physical", "shape")

    def __init__(self, shape: tuple[int, ...], physical: tuple[int, ...]) -> None:
        if len(shape) != len(physical) or any(size % real for size, real in zip(shape, physical, strict=True)):
            fitting = tuple(math.gcd(size, real) for size, real in zip(shape, physical, strict=False))
            raise MeshError(
                f"a virtual mesh of shape {shape} does not lie evenly on physical devices of shape {physical}",
                fix=f"use a physical shape that divides it axis by axis, such as {fitting}",
            )
        self.shape, self.physical = shape, physical

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[each] for each in range(len(self))[number])
        lane, home = 0, []
        for c, size, real in zip(
            place_of(range(len(self))[number], self.shape), self.shape, self.physical, strict=True
        ):
            lanes = size // real
            home.append(c // lanes)
            lane = lane * lanes + c % lanes
        return tuple(home), lane

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Homes) and (self.shape, self.physical) == (other.shape, other.physical):
            return True
        return isinstance(other, (Homes, tuple)) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return Homes, (self.shape, self.physical)


class Mesh:
    """An N-D grid of device coordinates with named axes.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.shape, mesh.axes, mesh.size
    ((2, 4), ('dp', 'tp'), 8)
    >>> mesh
    Mesh(dp=2, tp=4)
    """

    __slots__ = (
        "__weakref__", "_hash", "_ids", "_index", "_local",
        "axes", "homes", "is_split", "lease", "processes", "ranks", "shape", "size",
    )  # fmt: skip

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    size: int
    homes: Sequence[Home]
    processes: tuple[int, ...]
    ranks: tuple[int, ...]  # who holds it, where not everybody does
    is_split: bool
    lease: Lease | None
    _ids: Sequence[int]  # a range where they count through
    _local: Mesh | None
    _index: dict[str, int]
    _hash: int

    def __init__(self, /, **axes: int) -> None:
        shape = tuple(axes.values())
        _check_axes(tuple(axes), shape)
        self._fill(tuple(axes), shape, range(math.prod(shape)), None)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        axes: Sequence[str] | None = None,
        device_ids: Sequence[int] | None = None,
        physical: Sequence[int] | None = None,
        processes: Sequence[int] | None = None,
    ) -> Mesh:
        """A mesh from a shape and names; axes without names are called x0, x1, ...

        >>> Mesh.of((2, 2))
        Mesh(x0=2, x1=2)
        >>> Mesh.of((4, 4), ("r", "c"), physical=(2, 2)).virtual_to_physical((3, 0))
        ((1, 0), 2)
        """
        if isinstance(shape, int):
            shape = (shape,)
        for name, given in (("shape", shape), ("axes", axes), ("device_ids", device_ids), ("physical", physical)):
            _check_listed(name, given)
        _check_listed("processes", processes)
        names = tuple(axes) if axes is not None else tuple(f"x{i}" for i in range(len(shape)))
        _check_axes(names, tuple(shape))
        ids: Sequence[int] = range(math.prod(shape))
        if device_ids is not None:
            ids = device_ids if isinstance(device_ids, range) else tuple(device_ids)
            _check_ids(ids, tuple(shape))
        homes = None if physical is None else Homes(tuple(shape), tuple(physical))
        if processes is not None:
            check_grid(tuple(processes), tuple(shape))
        return _made(names, tuple(shape), ids, homes, None if processes is None else tuple(processes))

    def _fill(
        self,
        axes: tuple[str, ...],
        shape: tuple[int, ...],
        ids: Sequence[int],
        homes: Sequence[Home] | None,
        processes: tuple[int, ...] | None = None,
        lease: Lease | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        put = object.__setattr__
        put(self, "axes", axes)
        put(self, "shape", shape)
        put(self, "size", math.prod(shape))
        put(self, "_ids", _counted_through(ids))
        put(self, "homes", homes if homes is not None else Homes(shape, shape))
        put(self, "lease", lease)
        put(self, "_index", {name: i for i, name in enumerate(axes)})
        put(self, "processes", processes or (1,) * len(shape))
        put(self, "ranks", ranks)
        put(self, "is_split", math.prod(self.processes) > 1)
        put(self, "_local", None)
        put(self, "_hash", hash(self._key()))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is a value and cannot change: {name} = {value!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Mesh is a value and cannot change: del {name}")

    def _key(self) -> tuple[object, ...]:
        return self.axes, self.shape, self._ids, self.processes, self.ranks, self.lease

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Mesh) and self._hash == other._hash and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self._is_plain():
            return str(self)
        return f"Mesh.of({self.shape}, {self.axes}, device_ids={self.device_ids})"

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.shape, strict=True))
        ids = "" if self._is_plain() else f", ids={list(self.device_ids)}"
        return f"Mesh({inside}{ids})"

    def _repr_html_(self) -> str:
        from meshloom.mesh.picture import draw_html

        return draw_html(self)

    def _is_plain(self) -> bool:
        return self._ids == range(self.size)

    def __reduce__(self) -> tuple[object, ...]:
        """In a file it is a value: the lease does not go along."""
        ids = None if self._is_plain() else self._ids
        homes = None if self.homes == Homes(self.shape, self.shape) else self.homes
        return _made, (self.axes, self.shape, ids, homes, self.processes, None, self.ranks)

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The ids of the devices, row-major."""
        return tuple(self._ids)

    def device_id(self, coordinate: Sequence[int]) -> int:
        """The id of the device at a coordinate.

        >>> Mesh(x=10**9).device_id((123456789,))
        123456789
        """
        return self._ids[self.index(coordinate)]

    def with_lease(self, lease: Lease | None) -> Mesh:
        """The same mesh as that of a device, or with None as a value and nothing else."""
        return _made(self.axes, self.shape, self._ids, self.homes, self.processes, lease, self.ranks)

    def held_by(self, ranks: tuple[int, ...]) -> Mesh:
        """The same mesh, held by some processes of the run, in the order of their grid; () for all."""
        return _made(self.axes, self.shape, self._ids, self.homes, self.processes, self.lease, ranks)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_elsewhere(self) -> bool:
        """Whether other processes hold it and this one holds nothing of it."""
        return bool(self.ranks) and HERE.rank not in self.ranks

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks of the processes that hold some of it, in the order of their grid; all, where each holds all."""
        return self.ranks or tuple(range(math.prod(self.processes) if self.is_split else HERE.count))

    @property
    def place(self) -> Coordinate:
        """The position of this process in the grid of processes; that of the first, where this one holds nothing."""
        return self._place_of(HERE.rank) if self.is_split else (0,) * self.ndim

    def _place_of(self, rank: int) -> Coordinate:
        if self.ranks:
            rank = self.ranks.index(rank) if rank in self.ranks else 0
        return place_of(rank, self.processes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the box of coordinates that one process holds.

        >>> Mesh.of((2, 4), processes=(1, 2)).local_shape
        (2, 2)
        """
        return tuple(size // parts for size, parts in zip(self.shape, self.processes, strict=True))

    @property
    def local_offset(self) -> Coordinate:
        """The first coordinate of this process's box."""
        return self.offset_of(None)

    def offset_of(self, rank: int | None) -> Coordinate:
        """The first coordinate of the box of a rank; None is this process."""
        place = self.place if rank is None else self._place_of(rank)
        return tuple(c * size for c, size in zip(place, self.local_shape, strict=True))

    @property
    def local(self) -> Mesh:
        """This process's box as a mesh of its own: the same for every process."""
        if not self.is_split:
            return self
        if self._local is None:
            object.__setattr__(self, "_local", Mesh.of(self.local_shape, self.axes))
        assert self._local is not None
        return self._local

    def is_here(self, coordinate: Sequence[int]) -> bool:
        """Whether this process holds a coordinate."""
        if self.is_elsewhere:
            return False
        box = zip(coordinate, self.local_offset, self.local_shape, strict=True)
        return all(start <= c < start + size for c, start, size in box)

    def local_coordinates(self, rank: int | None = None) -> Iterator[Coordinate]:
        """The coordinates that this process holds, or that of another rank, row-major."""
        if self.ranks and (HERE.rank if rank is None else rank) not in self.ranks:
            return iter(())
        return _grid(self.local_shape, self.offset_of(rank))

    def owner(self, coordinate: Sequence[int]) -> int:
        """The rank of the process that holds a coordinate (the first, where all of them hold it)."""
        rank = 0
        for c, size, parts in zip(self.check(coordinate), self.local_shape, self.processes, strict=True):
            rank = rank * parts + c // size
        return self.ranks[rank] if self.ranks else rank

    def split(self, count: int) -> Mesh:
        """The same mesh, split into equal boxes over a number of processes; as it is where that cannot be.

        >>> Mesh(dp=2, tp=4).split(4).processes
        (2, 2)
        """
        return _made(self.axes, self.shape, self._ids, self.homes, divide(self.shape, count), self.lease, self.ranks)

    def axis(self, name: str | int) -> int:
        """The position of an axis given by name or by position.

        >>> Mesh(dp=2, tp=4).axis("tp")
        1
        """
        if isinstance(name, str):
            if name not in self._index:
                raise MeshError(f"the mesh has no axis {name!r}", mesh=self, fix=closest(name, self.axes))
            return self._index[name]
        if not hasattr(name, "__index__") or not -self.ndim <= name < self.ndim:
            raise MeshError(
                f"axis {name} is out of range for {self.ndim} axes", mesh=self, fix=closest(name, self.axes)
            )
        return name % self.ndim

    def coordinates(self) -> Iterator[Coordinate]:
        """Every coordinate, row-major."""
        return _grid(self.shape)

    def index(self, coordinate: Sequence[int]) -> int:
        """The row-major position of a coordinate.

        >>> Mesh(dp=2, tp=4).index((1, 2))
        6
        """
        self.check(coordinate)
        return number_of(coordinate, self.shape)

    def check(self, coordinate: Sequence[int]) -> Coordinate:
        """The coordinate as a tuple, or an error if the mesh does not have it."""
        place = tuple(coordinate) if isinstance(coordinate, Sequence) else (coordinate,)
        if (
            len(place) != self.ndim
            or not all(type(c) is int or hasattr(c, "__index__") for c in place)
            or not all(0 <= c < size for c, size in zip(place, self.shape, strict=True))
        ):
            last = tuple(size - 1 for size in self.shape)
            raise MeshError(
                f"coordinate {place} is not on the mesh",
                mesh=self,
                fix=f"coordinates go from {(0,) * self.ndim} to {last}",
            )
        return place

    def virtual_to_physical(self, coordinate: Sequence[int]) -> Home:
        """The home of a virtual coordinate: the physical coordinate and the lane on that device.

        >>> Mesh(dp=2, tp=4).virtual_to_physical((1, 2))
        ((1, 2), 0)
        """
        return self.homes[self.index(coordinate)]

    def physical_to_virtual(self, coordinate: Sequence[int], lane: int = 0) -> Coordinate:
        """The virtual coordinate that lives at a home; the inverse of `virtual_to_physical`."""
        home = (tuple(coordinate), lane)
        for place, each in zip(self.coordinates(), self.homes, strict=True):
            if each == home:
                return place
        raise MeshError(f"no virtual device lives at {home}", mesh=self)

    def reshape(self, **axes: int) -> Mesh:
        """The same devices in another shape; each keeps its id and its home.

        >>> Mesh(dp=2, tp=4).reshape(x=8).virtual_to_physical((6,))
        ((1, 2), 0)
        """
        shape = tuple(axes.values())
        _check_axes(tuple(axes), shape)
        if math.prod(shape) != self.size:
            raise MeshError(
                f"{self.size} devices cannot be reshaped to {math.prod(shape)}",
                mesh=self,
                asked=", ".join(f"{name}={size}" for name, size in axes.items()),
                fix=f"use sizes whose product is {self.size}",
            )
        made = _made(tuple(axes), shape, self._ids, self.homes, lease=self.lease, ranks=self.ranks)
        return made.split(math.prod(self.processes))

    def reordered(self, order: Sequence[int]) -> Mesh:
        """The same shape with its devices, and their homes, in another order.

        >>> Mesh(x=3).reordered([2, 0, 1]).device_ids
        (2, 0, 1)
        """
        if len(order) != self.size or (not _is_counting(order) and sorted(order) != list(range(self.size))):
            raise MeshError(f"{list(order)} is no order of {self.size} devices", mesh=self)
        if _is_counting(order):
            return self
        ids, homes = tuple(self._ids[i] for i in order), tuple(self.homes[i] for i in order)
        return _made(self.axes, self.shape, ids, homes, self.processes, self.lease, self.ranks)

    def submesh(self, where: Mapping[str, int | slice] | None = None, /, **ranges: int | slice) -> Mesh:
        """The devices at the given places: an int drops the axis, a slice keeps a part of it.

        Devices stay with the process that holds them; where these do not hold equal boxes of the submesh, every process
        holds all of it.

        >>> Mesh(dp=2, tp=4).submesh(dp=1).device_ids
        (4, 5, 6, 7)
        >>> Mesh.of((2, 4), ("dp", "tp"), processes=(2, 1)).submesh(dp=1).ranks
        (1,)
        """
        wanted = {self.axes[self.axis(name)]: place for name, place in {**(where or {}), **ranges}.items()}
        picks = [self._places(name, wanted.get(name, slice(None))) for name in self.axes]
        kept = [i for i, name in enumerate(self.axes) if not isinstance(wanted.get(name), int)]
        indices = [self.index(place) for place in itertools.product(*picks)]
        grid, ranks = self._holders_of(picks, kept)
        return _made(
            tuple(self.axes[i] for i in kept),
            tuple(len(picks[i]) for i in kept),
            tuple(self._ids[i] for i in indices),
            tuple(self.homes[i] for i in indices),
            grid,
            self.lease,
            ranks,
        )

    def _holders_of(
        self, picks: Sequence[Sequence[int]], kept: Sequence[int]
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """The grid of the processes that hold a part of the mesh, and their ranks unless they are all of them."""
        cuts = [_boxes(each, size) for each, size in zip(picks, self.local_shape, strict=True)]
        if self.lease is not None:  # the driver of a device decides
            return divide(tuple(len(picks[i]) for i in kept), math.prod(self.processes)), ()
        if not self.is_split or any(each is None for each in cuts):
            return None, self.ranks if not self.is_split else ()
        firsts = itertools.product(*([box[0] for box in each or ()] for each in cuts))
        ranks = tuple(self.owner(first) for first in firsts)
        grid = tuple(len(cuts[i] or ()) for i in kept)
        if list(ranks) != sorted(ranks):  # torch numbers the members of a group by rank
            return None, ()
        return grid, () if ranks == tuple(range(math.prod(self.processes))) and not self.ranks else ranks

    def _places(self, name: str, place: int | slice) -> Sequence[int]:
        size = self.shape[self.axis(name)]
        if isinstance(place, slice):
            picked = range(size)[place]
            if not picked:
                raise MeshError(f"slice {place.start}:{place.stop} of axis {name!r} holds no device", mesh=self)
            return picked
        if not hasattr(place, "__index__") or not -size <= place < size:
            raise MeshError(
                f"place {place} is out of range for axis {name!r} of size {size}",
                mesh=self,
                fix=f"places go from {-size} to {size - 1}",
            )
        return (place % size,)


def _made(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    device_ids: Sequence[int] | None,
    homes: Sequence[Home] | None,
    processes: tuple[int, ...] | None = None,
    lease: Lease | None = None,
    ranks: tuple[int, ...] = (),
) -> Mesh:
    mesh = Mesh.__new__(Mesh)
    ids = device_ids if device_ids is not None else range(math.prod(shape))
    mesh._fill(axes, shape, ids, homes, processes, lease, ranks)
    return mesh


def _boxes(places: Sequence[int], size: int) -> list[list[int]] | None:
    """Places of an axis by the box that each is in; None where they do not make boxes of one size, each in one piece.

    >>> _boxes([2, 3, 4, 5], 2), _boxes([0, 2], 4), _boxes([1, 2, 3], 2)
    ([[2, 3], [4, 5]], [[0, 2]], None)
    """
    found = [list(each) for _, each in itertools.groupby(places, lambda place: place // size)]
    numbers = [each[0] // size for each in found]
    return found if len({len(each) for each in found}) == 1 and len(set(numbers)) == len(numbers) else None


def _grid(shape: Sequence[int], start: Sequence[int] | None = None) -> Iterator[Coordinate]:
    """The coordinates of a box, row-major, one after the other."""
    first = start if start is not None else (0,) * len(shape)
    if math.prod(shape) > FEW:  # `product` would write every axis down before it begins
        places = (place_of(number, shape) for number in range(math.prod(shape)))
        return (tuple(map(operator.add, place, first)) for place in places)
    return itertools.product(*(range(a, a + size) for a, size in zip(first, shape, strict=True)))


def _is_counting(numbers: Sequence[int]) -> bool:
    """Whether they are 0, 1, 2, ... in order."""
    if isinstance(numbers, range):
        return numbers == range(len(numbers))
    return all(number == i for i, number in enumerate(numbers))


def _counted_through(ids: Sequence[int]) -> Sequence[int]:
    """Ids in the one form that stands for them: a range from 0, or a tuple."""
    return range(len(ids)) if _is_counting(ids) else tuple(ids)


def _check_listed(name: str, given: object) -> None:
    if given is not None and not isinstance(given, Iterable):
        raise MeshError(
            f"{name}={given!r} is of type {type(given).__name__}", fix="give one entry per axis, or per device"
        )


def _check_axes(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    asked = ", ".join(f"{name}={size!r}" for name, size in zip(axes, shape, strict=False))
    if len(axes) != len(shape):
        raise MeshError(
            f"{len(shape)} sizes and {len(axes)} axis names do not pair up",
            shape=shape,
            axes=axes,
            fix="give one name per size",
        )
    for name, size in zip(axes, shape, strict=True):
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(f"{name!r} is not an axis name", asked=asked, fix="use an identifier such as 'tp'")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(
                f"axis {name!r} has size {size!r}",
                asked=asked,
                fix="every axis has a whole number of devices, 1 or more",
            )
    if len(set(axes)) != len(axes):
        raise MeshError("two axes have the same name", asked=asked, fix="name every axis differently")


def _check_ids(ids: Sequence[int], shape: tuple[int, ...]) -> None:
    if len(ids) != math.prod(shape):
        raise MeshError(
            f"a mesh of shape {shape} needs {math.prod(shape)} device ids and got {len(ids)}",
            ids=ids,
            fix="give one id per device",
        )
    if not isinstance(ids, range) and len(set(ids)) != len(ids):
        raise MeshError("a device id stands twice", ids=ids, fix="name every device once")
