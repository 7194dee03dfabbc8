"""Meshes for tests of the per-device view, opened once for each shape and closed at the end of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshloom import ttnn

Opener = Callable[..., "ttnn.MeshDevice"]


@pytest.fixture(scope="module")
def open_mesh() -> Iterator[Opener]:
    """A function that gives the mesh of a shape."""
    opened: dict[tuple[int, ...], ttnn.MeshDevice] = {}

    def of(*shape: int) -> ttnn.MeshDevice:
        if shape not in opened:
            opened[shape] = ttnn.open_mesh_device(ttnn.MeshShape(list(shape)))
        return opened[shape]

    yield of
    for mesh in opened.values():
        ttnn.close_mesh_device(mesh)


def cores(x: int, y: int) -> ttnn.CoreRangeSet:
    """A rectangle of cores of that width and height."""
    return ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(x - 1, y - 1))])


def semaphore_on(mesh: ttnn.MeshDevice) -> Any:
    """A semaphore on four cores of every device."""
    return ttnn.create_global_semaphore(mesh, cores(2, 2), 0)
