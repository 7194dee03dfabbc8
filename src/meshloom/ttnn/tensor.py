"""The tensor of the per-device view: `shape` is what one device holds.

It has a block (see `parts`), a format, a label that says how the parts make up a whole, and on a device room in memory
with one address on all devices. Ops are attached to it in `ttnn.operators`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from meshloom.errors import where
from meshloom.runtime import MeshCoordinate, state
from meshloom.runtime.memory import Allocator, Region
from meshloom.ttnn.formats import DataType, Layout, Shape, Tile, bytes_of, padded_shape
from meshloom.ttnn.memory import DRAM_MEMORY_CONFIG, BufferType, MemoryConfig
from meshloom.ttnn.parts import Block
from meshloom.ttnn.topology import TensorTopology

if TYPE_CHECKING:
    from meshloom.ttnn.device import MeshDevice

TILE = Tile()
_ids = count()


class Room:
    """Bytes on every device of a mesh; given back when the last tensor that uses them is gone, or by hand."""

    __slots__ = ("allocator", "region")

    def __init__(self, allocator: Allocator, region: Region) -> None:
        self.allocator, self.region = allocator, region

    def __del__(self) -> None:
        self.allocator.drop(self.region)

    def free(self) -> None:
        """Give it back now."""
        self.allocator.release(self.region)


class Tensor:
    """What every device of a mesh holds, all of one shape; on the host or in the devices' memory."""

    __slots__ = (
        "__weakref__",
        "_block",
        "_coords",
        "_device",
        "_grid",
        "_memory",
        "_pad",
        "_room",
        "_topology",
        "dtype",
        "layout",
        "tensor_id",
        "tile",
    )

    _block: Block | None
    _coords: tuple[MeshCoordinate, ...] | None

    def __init__(
        self,
        block: Block,
        grid: Sequence[int],
        dtype: DataType,
        layout: Layout,
        topology: TensorTopology,
        device: MeshDevice | None = None,
        memory_config: MemoryConfig = DRAM_MEMORY_CONFIG,
        tile: Tile = TILE,
        pad_value: float = 0.0,
        coords: tuple[MeshCoordinate, ...] | None = None,
        room: Room | None = None,
    ) -> None:
        self._block, self._grid, self.dtype, self.layout, self.tile = block, tuple(grid), dtype, layout, tile
        self._topology, self._device, self._memory, self._pad = topology, device, memory_config, pad_value
        self._coords = coords  # the devices that hold a part; None means all
        self.tensor_id = next(_ids)
        self._room = room if room is not None or device is None else self._allocate(device)
        if state.capture is not None and device is not None:
            state.capture.keep(self._room)  # a replay writes there, so nobody else gets it while the trace lives

    def _allocate(self, device: MeshDevice) -> Room:
        kind = "l1" if self._memory.buffer_type is BufferType.L1 else "dram"
        allocator = device.runtime.system.memory[kind]
        size = bytes_of(math.prod(self.padded_shape), self.dtype)
        name = f"tensor {self.dtype.name} {list(self.shape)}"
        return Room(allocator, allocator.allocate(size, device.runtime.mask, name, where()))

    # shape and format

    @property
    def shape(self) -> Shape:
        """What one device holds, without the padding of tiles."""
        return Shape(self.block.shape[len(self._grid) :])

    @property
    def padded_shape(self) -> Shape:
        """What one device holds, with the padding of tiles."""
        return Shape(padded_shape(self.shape, self.layout, self.tile))

    @property
    def block(self) -> Block:
        """What all devices hold: mesh axes first, 1 where they hold the same. Shares memory."""
        assert self._block is not None
        return self._block

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the mesh that the parts lie on."""
        return self._grid

    def memory_config(self) -> MemoryConfig:
        """Where a device keeps its part."""
        return self._memory

    # where it is

    def device(self) -> MeshDevice | None:
        """The mesh that it is on; None on the host."""
        return self._device

    def device_coords(self) -> list[MeshCoordinate]:
        """The devices that hold a part."""
        return list(self._coords) if self._coords is not None else [MeshCoordinate(place) for place in self._places()]

    def _places(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self._grid))

    def tensor_topology(self) -> TensorTopology:
        """How the parts make up a whole."""
        return self._topology

    def update_tensor_topology(self, topology: TensorTopology) -> None:
        """Say how the parts make up a whole."""
        self._topology = topology
