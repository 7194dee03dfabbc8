"""Words for places on a grid of devices, as TTNN spells them: shape, coordinate, range, kind of links.

All of them are tuples or frozen values, so they go wherever a plain tuple goes.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, overload

from meshloom.errors import ArgumentError, BoundsError, MeshError
from meshloom.mesh import Coordinate, Mesh


def _numbers(what: str, given: tuple[object, ...]) -> tuple[int, ...]:
    listed = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in listed):
        raise MeshError(f"{what} takes whole numbers, not {given!r}", fix=f"write {what}(2, 4) or {what}([2, 4])")
    return tuple(listed)


def _in_order(
    what: str, given: tuple[object, ...], named: Mapping[str, object], letter: str, listed: str
) -> tuple[object, ...]:
    """Arguments by name behind those by position: `s0=2, s1=4`, or all of them as one sequence, `shape=[2, 4]`."""
    order = [f"{letter}{place}" for place in range(len(given), len(given) + len(named))]
    if list(named) == [listed]:
        order = [listed]
    if set(order) != set(named) or (order == [listed] and given):
        raise ArgumentError(
            f"{what} takes {letter}0, {letter}1... or {listed}, not {', '.join(named)}",
            fix=f"write {what}(2, 4) or {what}({letter}0=2, {letter}1=4)",
        )
    return (*given, *(named[name] for name in order))


class Sizes(tuple[int, ...]):
    """Sizes of TTNN: in front of them there are ones."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[int, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> int | tuple[int, ...]:
        try:
            return tuple.__getitem__(self, index)
        except IndexError:
            assert not isinstance(index, slice)  # which never fails
            return size_in_front(self, operator.index(index))


class MeshShape(Sizes):
    """The shape of a mesh.

    >>> MeshShape(2, 4), MeshShape([2, 4]).mesh_size(), MeshShape(s0=2, s1=4) == (2, 4)
    (MeshShape([2, 4]), 8, True)
    """

    __slots__ = ()

    def __new__(cls, *sizes: object, **named: object) -> MeshShape:
        if named:
            sizes = _in_order("MeshShape", sizes, named, "s", "shape")
        made = super().__new__(cls, _numbers("MeshShape", sizes))
        if not made:
            raise MeshError("MeshShape cannot have 0 dimension.", fix="write MeshShape(2, 4)")
        return made

    def dims(self) -> int:
        """The number of axes."""
        return len(self)

    def mesh_size(self) -> int:
        """The number of devices."""
        return math.prod(self)

    def __repr__(self) -> str:
        return f"MeshShape({list(self)})"


LEAST_RANK = 4  # shapes of TTNN have ones in front up to it


def size_in_front(shape: Sequence[int], index: int) -> int:
    """One of the ones that stand in front of fewer than four dims; an error if it is none.

    >>> size_in_front((2, 4), -3)
    1
    """
    rank = len(shape)
    if -max(rank, LEAST_RANK) <= index < 0:
        return 1
    raise BoundsError(f"ShapeBase[] index out of range. {index} not in [{-max(rank, LEAST_RANK)}, {rank})")


class MeshCoordinate(tuple[int, ...]):
    """A place on a mesh.

    >>> MeshCoordinate(1, 2), MeshCoordinate([1, 2]) == (1, 2)
    (MeshCoordinate([1, 2]), True)
    """

    __slots__ = ()

    def __new__(cls, *places: object, **named: object) -> MeshCoordinate:
        if named:
            places = _in_order("MeshCoordinate", places, named, "c", "coords")
        return super().__new__(cls, _numbers("MeshCoordinate", places))

    def dims(self) -> int:
        """The number of axes."""
        return len(self)

    def __repr__(self) -> str:
        return f"MeshCoordinate({list(self)})"


@dataclass(frozen=True, slots=True, init=False)
class MeshCoordinateRange:
    """A box of coordinates, both corners included; of a shape alone, all of it.

    >>> box = MeshCoordinateRange((0, 1), (1, 2))
    >>> list(box) == [(0, 1), (0, 2), (1, 1), (1, 2)], box.intersection(MeshCoordinateRange(MeshShape(1, 2)))
    (True, MeshCoordinateRange(start=MeshCoordinate([0, 1]), end=MeshCoordinate([0, 1])))
    """

    start: MeshCoordinate
    end: MeshCoordinate

    def __init__(self, start: Sequence[int], end: Sequence[int] | None = None) -> None:
        for corner in (start, end):
            if corner is not None and (isinstance(corner, str) or not isinstance(corner, Sequence)):
                raise MeshError(f"{corner!r} is no coordinate", fix="MeshCoordinateRange((0, 0), (1, 1))")
        last = tuple(size - 1 for size in start) if end is None else tuple(end)
        first = (0,) * len(start) if end is None else tuple(start)
        if len(first) != len(last):
            raise _no_range(first, last, f"dimensions of a coordinate range do not match: {len(first)} != {len(last)}")
        if any(a > b for a, b in zip(first, last, strict=True)):
            raise _no_range(first, last, "Start coordinate is greater than end coordinate")
        object.__setattr__(self, "start", MeshCoordinate(first))
        object.__setattr__(self, "end", MeshCoordinate(last))

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of places along each axis."""
        return tuple(b - a + 1 for a, b in zip(self.start, self.end, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of an array whose dims are the mesh axes."""
        return tuple(slice(a, b + 1) for a, b in zip(self.start, self.end, strict=True))

    def places(self) -> Iterator[Coordinate]:
        """Its coordinates as plain tuples, as errors show them."""
        return itertools.product(*(range(a, b + 1) for a, b in zip(self.start, self.end, strict=True)))

    def __iter__(self) -> Iterator[MeshCoordinate]:
        return map(_coordinate, self.places())

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __contains__(self, place: object) -> bool:
        return (
            isinstance(place, tuple)
            and len(place) == len(self.start)
            and all(a <= c <= b for a, c, b in zip(self.start, place, self.end, strict=True))
        )

    def contains(self, other: Sequence[int] | MeshCoordinateRange) -> bool:
        """Whether a coordinate, or all of a range, is in it."""
        if isinstance(other, MeshCoordinateRange):
            return other.start in self and other.end in self
        return tuple(other) in self

    def intersects(self, other: MeshCoordinateRange) -> bool:
        """Whether some coordinate is in both."""
        return self.intersection(other) is not None

    def intersection(self, other: MeshCoordinateRange) -> MeshCoordinateRange | None:
        """The box that both have; None where they have none.

        >>> MeshCoordinateRange((0, 1), (1, 2)).intersection(MeshCoordinateRange((0, 0), (0, 1))).span
        '(0, 1)..(0, 1)'
        """
        low = [max(pair) for pair in zip(self.start, other.start, strict=True)]
        high = [min(pair) for pair in zip(self.end, other.end, strict=True)]
        return MeshCoordinateRange(low, high) if all(a <= b for a, b in zip(low, high, strict=True)) else None

    @property
    def span(self) -> str:
        """Both corners, as errors show them: `(0, 1)..(1, 3)`."""
        return f"{tuple(self.start)}..{tuple(self.end)}"


_coordinate = functools.partial(tuple.__new__, MeshCoordinate)  # of numbers that need no check


def _no_range(first: Coordinate, last: Coordinate, reason: str) -> MeshError:
    """An error in our words, with the reason in the original's."""
    return MeshError(f"a range cannot go from {first} to {last}: {reason}", fix="give the lower corner first")


def range_of(given: object) -> MeshCoordinateRange:
    """A range from a range, one coordinate or a pair of corners.

    >>> range_of((0, 1)).span, range_of([(0, 1), (1, 3)]).span
    ('(0, 1)..(0, 1)', '(0, 1)..(1, 3)')
    """
    if isinstance(given, MeshCoordinateRange):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise MeshError(
            f"{given!r} is no range of coordinates", fix="give None for all devices, (0, 1), or its two corners"
        )
    corners = tuple(given)
    pair = bool(corners) and not isinstance(corners[0], int)
    return MeshCoordinateRange(*corners) if pair else MeshCoordinateRange(corners, corners)


def range_here(where: MeshCoordinateRange, mesh: Mesh) -> MeshCoordinateRange | None:
    """What this process holds of a range; None if that is nothing."""
    if not mesh.is_split:
        return where
    box = zip(mesh.local_offset, mesh.local_shape, strict=True)
    return where.intersection(MeshCoordinateRange(mesh.local_offset, [first + size - 1 for first, size in box]))


def check_range(given: MeshCoordinateRange | None, mesh: Mesh) -> MeshCoordinateRange:
    """A range on a mesh, all of it for None; an error for coordinates that the mesh does not have."""
    if given is None:
        return MeshCoordinateRange(mesh.shape)
    mesh.check(given.start)
    mesh.check(given.end)
    return given


class MeshType(enum.Enum):
    """How the devices along an axis are linked: the kinds of links of each axis follow from it.

    >>> MeshType.Ring.kinds((2, 4))
    ('ring', 'ring')
    """

    Line = "line"
    Ring = "ring"
    Mesh = "mesh"
    Torus = "torus"

    def kinds(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The kind of links of every axis: a mesh is lines, a torus is rings."""
        kind = "ring" if self in (MeshType.Ring, MeshType.Torus) else "line"
        return (kind,) * len(shape)
