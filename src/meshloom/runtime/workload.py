"""A workload maps programs to ranges of coordinates; one enqueue launches all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshloom.errors import ArgumentError, ClosedError, MeshError
from meshloom.mesh import Coordinate
from meshloom.runtime.geometry import MeshCoordinateRange, check_range, range_here, range_of
from meshloom.runtime.program import Launch, Program

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice


class MeshWorkload:
    """Programs on ranges that do not overlap. After its first enqueue it stays as it is; its arguments may change.

    >>> workload = MeshWorkload()
    >>> workload.add_program(MeshCoordinateRange((0, 0), (1, 1)), Program(lambda: None))
    >>> workload.add_program(MeshCoordinateRange((1, 1), (1, 3)), Program(lambda: None))
    Traceback (most recent call last):
        ...
    meshloom.errors.MeshError: range (1, 1)..(1, 3) overlaps (0, 0)..(1, 1)
      fix  give every program coordinates of its own
    """

    def __init__(self) -> None:
        self.programs: list[tuple[MeshCoordinateRange | None, Program]] = []
        self._args: dict[str, Any] = {}
        self._at: dict[Coordinate, dict[str, Any]] = {}
        self._device: weakref.ref[MeshDevice] | None = None

    def add_program(self, where: object, program: Program) -> None:
        """Run a program on a range: a `MeshCoordinateRange`, one coordinate, a pair of corners, or None for all."""
        if self._device is not None:
            raise ClosedError("a workload that was enqueued cannot change", fix="make another MeshWorkload")
        if not isinstance(program, Program):
            raise ArgumentError(f"add_program takes a Program, not {program!r}", fix="Program(kernel, reads=[...])")
        placed = None if where is None else range_of(where)
        for other, _ in self.programs:
            _check_apart(placed, other)
        self.programs.append((placed, program))

    def set_args(self, coordinate: Sequence[int] | None = None, /, **args: object) -> None:
        """Runtime arguments for every device, or for one; they hold from the next enqueue on."""
        given = self._args if coordinate is None else self._at.setdefault(tuple(coordinate), {})
        given.update(args)

    def launches(self, device: MeshDevice) -> list[Launch]:
        """What an enqueue on a device runs, with the arguments of now; or an error."""
        bound = None if self._device is None else self._device()
        if bound is not None and bound is not device:
            raise MeshError("a workload belongs to the mesh it was first enqueued on", fix="make one for each mesh")
        if not self.programs:
            raise ArgumentError("the workload has no program", fix="workload.add_program(range, program)")
        for place in self._at:
            device.mesh.check(place)
        placed = [(check_range(where, device.mesh), program) for where, program in self.programs]
        found = [
            Launch(where, program, self._args, self._at, range_here(where, device.mesh)) for where, program in placed
        ]
        for launch in found:
            for buffer in launch.program.buffers:
                device.check_buffer(buffer)
        self._device = weakref.ref(device)
        return found

    @property
    def name(self) -> str:
        """Its programs' names."""
        return "+".join(dict.fromkeys(program.name for _, program in self.programs)) or "nothing"


def _check_apart(mine: MeshCoordinateRange | None, other: MeshCoordinateRange | None) -> None:
    if mine is None or other is None or mine.intersects(other):
        first, second = (each.span if each is not None else "the whole mesh" for each in (mine, other))
        raise MeshError(f"range {first} overlaps {second}", fix="give every program coordinates of its own")
