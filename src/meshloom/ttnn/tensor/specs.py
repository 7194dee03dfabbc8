"""What a tensor is without its values: shape, dtype, layout, memory; and questions about tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshloom.errors import ArgumentError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.device.cores import CoreRange, CoreRangeSet
from meshloom.ttnn.tensor.formats import DataType, Layout, Shape, Tile, padded_shape
from meshloom.ttnn.tensor.memory import (
    BufferType,
    MemoryConfig,
    NdShardSpec,
    ShardOrientation,
    ShardStrategy,
    TensorMemoryLayout,
    create_sharded_memory_config_,
)

if TYPE_CHECKING:
    from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "StorageType TensorSpec get_memory_config has_storage_type_of has_tile_padding is_sharded "
    "is_tensor_storage_on_device"
).split()

ROWS = ShardOrientation.ROW_MAJOR


class StorageType(Choice):
    """Where a tensor's values are."""

    HOST, DEVICE = 0, 1


@dataclass(frozen=True, init=False)
class TensorSpec:
    """Shape, dtype, layout and memory: `(shape, dtype, layout, buffer_type, tile)`, or in place of the buffer type a
    memory layout and a shard spec, or a shard spec of any number of dims.

    >>> from meshloom import ttnn
    >>> spec = TensorSpec([1, 1, 40, 10], ttnn.bfloat16, ttnn.TILE_LAYOUT, ttnn.BufferType.L1)
    >>> spec.memory_config == ttnn.L1_MEMORY_CONFIG, spec.shape
    (True, Shape([1, 1, 40, 10]))
    """

    shape: Shape
    dtype: DataType
    layout: Layout
    memory_config: MemoryConfig
    tile: Tile

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DataType,
        layout: Layout,
        *args: Any,
        buffer_type: BufferType = BufferType.DRAM,
        tile: Tile | None = None,
        memory_layout: TensorMemoryLayout | None = None,
        shard_spec: Any = None,
        nd_shard_spec: NdShardSpec | None = None,
    ) -> None:
        rest = list(args)
        if rest and isinstance(rest[0], TensorMemoryLayout):
            memory_layout = rest.pop(0)
            shard_spec = rest.pop(0) if rest else shard_spec
        elif rest and isinstance(rest[0], NdShardSpec):
            nd_shard_spec = rest.pop(0)
        buffer_type = rest.pop(0) if rest else buffer_type
        tile = rest.pop(0) if rest else tile
        if rest or not isinstance(dtype, DataType) or not isinstance(layout, Layout):
            raise ArgumentError(f"TensorSpec takes a shape, a dtype, a layout and memory, not {(dtype, layout, *args)}")
        if nd_shard_spec is not None:
            config = MemoryConfig(buffer_type, nd_shard_spec)
        else:
            config = MemoryConfig(memory_layout or TensorMemoryLayout.INTERLEAVED, buffer_type, shard_spec)
        values = (Shape(shape), dtype, layout, config, tile or Tile())
        for name, value in zip(("shape", "dtype", "layout", "memory_config", "tile"), values, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.layout, tile=tensor.tile)._in(tensor.memory_config())

    def _in(self, config: MemoryConfig) -> TensorSpec:
        made = TensorSpec(self.shape, self.dtype, self.layout, tile=self.tile)
        object.__setattr__(made, "memory_config", config)
        return made

    def _spread(self, strategy: ShardStrategy, grid: CoreRange | CoreRangeSet, orientation: Any) -> TensorSpec:
        sizes = padded_shape(self.shape, self.layout, self.tile)
        cores = CoreRangeSet([grid]) if isinstance(grid, CoreRange) else grid
        is_tiled = self.layout is Layout.TILE
        found = create_sharded_memory_config_(sizes, cores, strategy, orientation, tile_layout=is_tiled)
        return self._in(MemoryConfig(found.memory_layout, self.memory_config.buffer_type, found.shard_spec))

    def height_sharded(self, grid: CoreRangeSet, orientation: ShardOrientation = ROWS) -> TensorSpec:
        """With rows spread over cores."""
        return self._spread(ShardStrategy.HEIGHT, grid, orientation)

    def width_sharded(self, grid: CoreRangeSet, orientation: ShardOrientation = ROWS) -> TensorSpec:
        """With columns spread over cores."""
        return self._spread(ShardStrategy.WIDTH, grid, orientation)

    def block_sharded(self, grid: CoreRange | CoreRangeSet, orientation: ShardOrientation = ROWS) -> TensorSpec:
        """With rows and columns spread over a grid of cores."""
        return self._spread(ShardStrategy.BLOCK, grid, orientation)

    def sharded(self, shard_shape: Any, grid: Any = None, orientation: ShardOrientation = ROWS) -> TensorSpec:
        """With shards of any number of dims: by their shape and the cores, or by a shard spec."""
        spec = shard_shape if isinstance(shard_shape, NdShardSpec) else NdShardSpec(shard_shape, grid, orientation)
        return self._in(MemoryConfig(self.memory_config.buffer_type, spec))


# questions


def has_storage_type_of(tensor: Tensor, storage_type: StorageType) -> bool:
    """Whether a tensor is there."""
    return bool(tensor.storage_type() is storage_type)


def is_tensor_storage_on_device(tensor: Tensor) -> bool:
    return tensor.device() is not None


def is_sharded(tensor: Tensor) -> bool:
    """Whether devices spread their part of a tensor over cores by a shard shape."""
    return tensor.is_sharded()


def get_memory_config(tensor: Tensor) -> MemoryConfig:
    return tensor.memory_config()


def has_tile_padding(tensor: Tensor, *, dim: int | None = None) -> bool:
    """Whether tiles are larger than the values need, in any dim or in one."""
    logical, padded = tensor.shape, tensor.padded_shape
    if dim is not None and len(logical) == len(padded):
        return logical[dim] != padded[dim]
    return tuple(logical) != tuple(padded)
