"""Meshes for tests of the per-device view, opened for a while, or once for each shape until the end of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def mesh_of(grid: Sequence[int]) -> Iterator[ttnn.MeshDevice]:
    """An open mesh of a shape, closed at the end."""
    device = ttnn.open_mesh_device(ttnn.MeshShape(*grid))
    try:
        yield device
    finally:
        ttnn.close_mesh_device(device)
