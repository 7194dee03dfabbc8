"""Places on a mesh, as TTNN spells them: the runtime's shape, coordinate and range, with sets of ranges and views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshloom.processes.discovery import Control, Scope
from meshloom.runtime.geometry import MeshCoordinate, MeshCoordinateRange, MeshShape, MeshType

if TYPE_CHECKING:
    from meshloom.ttnn.device.mesh_device import MeshDevice

__all__ = ["MeshCoordinate", "MeshCoordinateRange", "MeshCoordinateRangeSet", "MeshDeviceView", "MeshShape", "MeshType"]


class MeshCoordinateRangeSet:
    """Boxes of coordinates; one that continues another along one axis becomes a part of it.

    >>> boxes = MeshCoordinateRangeSet(MeshCoordinateRange((0, 0), (0, 1)))
    >>> boxes.merge(MeshCoordinateRange((0, 2), (0, 3))); boxes.ranges()[0].shape
    (1, 4)
    """

    def __init__(self, range: MeshCoordinateRange | None = None) -> None:
        self._ranges: list[MeshCoordinateRange] = [] if range is None else [range]

    def ranges(self) -> list[MeshCoordinateRange]:
        return list(self._ranges)

    def merge(self, range: MeshCoordinateRange) -> None:
        """Take a box in: join it with every other that makes one box with it."""
        found = True
        while found:
            found = False
            for each in self._ranges:
                both = _one_box(each, range)
                if both is not None:
                    self._ranges.remove(each)
                    range, found = both, True
                    break
        self._ranges.append(range)
        self._ranges.sort(key=lambda each: (each.start, each.end))

    def __repr__(self) -> str:
        return f"MeshCoordinateRangeSet({self._ranges!r})"


def _one_box(a: MeshCoordinateRange, b: MeshCoordinateRange) -> MeshCoordinateRange | None:
    """The box of two that are equal but for one axis, along which they touch or overlap, or of which one has all."""
    if a.contains(b):
        return a
    if b.contains(a):
        return b
    spans = [zip(each.start, each.end, strict=True) for each in (a, b)]
    differ = [(first, second) for first, second in zip(*spans, strict=True) if first != second]
    if len(differ) != 1:
        return None
    (low, high), (other_low, other_high) = differ[0]
    if other_low > high + 1 or low > other_high + 1:
        return None
    start = [min(pair) for pair in zip(a.start, b.start, strict=True)]
    return MeshCoordinateRange(start, [max(pair) for pair in zip(a.end, b.end, strict=True)])


class MeshDeviceView:
    """What a mesh looks like: its shape, and which of it is in this process."""

    def __init__(self, device: MeshDevice) -> None:
        self._device = device

    def shape(self, scope: Scope = "global") -> MeshShape:
        """Of the whole mesh, or of the box that this process holds."""
        return MeshShape(*self._control().mesh_shape(scope))

    def num_devices(self, scope: Scope = "global") -> int:
        return math.prod(self.shape(scope))

    def coord_range(self, scope: Scope = "global") -> MeshCoordinateRange:
        """The coordinates of the whole mesh, or of the box that this process holds."""
        spans = self._control().mesh_range(scope)
        return MeshCoordinateRange([span.start for span in spans], [span.stop - 1 for span in spans])

    def local_offset(self) -> MeshCoordinate:
        """The first coordinate that this process holds."""
        return MeshCoordinate(list(self._control().mesh_offset))

    def _control(self) -> Control:
        mesh = self._device.runtime.mesh
        return Control(mesh.shape, mesh.processes, mesh.place)

    def is_local(self, coord: Sequence[int]) -> bool:
        """Whether this process holds the device at a coordinate."""
        mesh = self._device.runtime.mesh
        return mesh.is_here(mesh.check(tuple(coord)))
