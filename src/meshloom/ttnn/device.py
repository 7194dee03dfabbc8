"""The mesh device as TTNN spells it, around the runtime's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom import runtime
from meshloom.runtime import MeshShape


class MeshDevice:
    """A grid of devices; what it does, `runtime` does."""

    def __init__(self, device: runtime.MeshDevice) -> None:
        self.runtime = device

    @property
    def shape(self) -> MeshShape:
        """The shape of the grid."""
        return self.runtime.shape

    def get_num_devices(self) -> int:
        """How many devices there are."""
        return self.runtime.num_devices

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.shape))
        return f"MeshDevice({grid} grid, {self.get_num_devices()} devices)"


def open_mesh_device(mesh_shape: Sequence[int] | None = None, **options: Any) -> MeshDevice:
    """Open a mesh of devices."""
    return MeshDevice(runtime.open_mesh_device(mesh_shape, **options))
