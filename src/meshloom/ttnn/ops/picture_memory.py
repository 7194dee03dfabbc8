"""Where the results of convolutions and pools lie: over which cores, with which shards.

A result is sharded if the input is, or if a layout is asked for; otherwise it lies in pages, in the input's memory.
Rows are those of all pictures together, [N * H * W, C]. A sharded input keeps its cores: results lie over the same ones
by height, while cores across channels are those that the channels of the result fill.
"""

from __future__ import annotations

from meshloom.ttnn.device.cores import CoreCoord, CoreRange, CoreRangeSet, num_cores_to_corerangeset
from meshloom.ttnn.ops.convolution_configs import Op2DSliceConfig
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.memory import (
    DRAM_MEMORY_CONFIG,
    BufferType,
    MemoryConfig,
    ShardOrientation,
    ShardSpec,
    TensorMemoryLayout,
)
from meshloom.ttnn.tensor.tensor import Tensor

SIDE = 32  # of a tile

HEIGHT, WIDTH, BLOCK = (
    TensorMemoryLayout.HEIGHT_SHARDED,
    TensorMemoryLayout.WIDTH_SHARDED,
    TensorMemoryLayout.BLOCK_SHARDED,
)


def memory_of_pictures(
    tensor: Tensor,
    size: tuple[int, int],
    layout: Layout,
    *,
    asked: TensorMemoryLayout | None = None,
    cores: CoreRangeSet | None = None,
    turned: bool = False,
    slices: Op2DSliceConfig | None = None,
    keeps_channels: bool = False,
) -> MemoryConfig:
    """The memory config of a result of `size` (rows, channels) that is made of a tensor on a device.

    `asked` is the layout that the caller wants and `cores` are those that it wants; `turned` shards go down columns. A
    result that `keeps_channels` has those of a core where the input has them.
    """
    if slices is not None and slices.slice_type is not Op2DSliceConfig.SliceTypeEnum.L1Full:
        return DRAM_MEMORY_CONFIG  # slices are put together there
    given = tensor.memory_config()
    is_like_input = given.buffer_type is not BufferType.DRAM and asked in (None, given.memory_layout)
    spec = given.shard_spec if is_like_input else None
    kind = asked or (given.memory_layout if is_like_input else None)
    if kind not in (HEIGHT, WIDTH, BLOCK):
        return MemoryConfig(buffer_type=given.buffer_type)
    orientation = spec.orientation if spec is not None else _ORIENTATIONS[turned]
    grid, lying = _grid_of(tensor), spec.grid if spec is not None else cores
    down = _cut_rows(kind, size[0], grid, orientation, lying)
    across = _cut_channels(kind, size[1], grid, orientation)
    over, width = _over(kind, down, across, grid, orientation, lying), _whole_tiles(-(-size[1] // across))
    if spec is not None and keeps_channels:
        over, width = spec.grid, _whole_tiles(spec.shape[1]) if layout is Layout.TILE else spec.shape[1]
    rows = -(-size[0] // down)
    part = (_whole_tiles(rows) if layout is Layout.TILE else rows, width)
    return MemoryConfig(kind, BufferType.L1, ShardSpec(over, part, orientation))


def memory_by_rows(tensor: Tensor, rows: int, channels: int) -> MemoryConfig:
    """Rows in L1 over all cores, equally many on each but the last."""
    grid = _grid_of(tensor)
    height = -(-rows // grid.num_cores)
    over = num_cores_to_corerangeset(-(-rows // height), grid, row_wise=True)
    return MemoryConfig(HEIGHT, BufferType.L1, ShardSpec(over, (height, channels), ShardOrientation.ROW_MAJOR))


_ORIENTATIONS = (ShardOrientation.ROW_MAJOR, ShardOrientation.COL_MAJOR)


def _grid_of(tensor: Tensor) -> CoreCoord:
    device = tensor.device()
    assert device is not None
    return device.compute_with_storage_grid_size()


def _tiles(size: int) -> int:
    return -(-size // SIDE)


def _whole_tiles(size: int) -> int:
    return _tiles(size) * SIDE


def _cut_rows(
    kind: TensorMemoryLayout, rows: int, grid: CoreCoord, orientation: ShardOrientation, lying: CoreRangeSet | None
) -> int:
    """Over how many cores rows go: those that are there, or as many as have something."""
    if kind is WIDTH:
        return 1
    is_turned = orientation is ShardOrientation.COL_MAJOR
    if lying is None:
        return _fill(_tiles(rows), grid.num_cores if kind is HEIGHT else grid.x if is_turned else grid.y)
    size = lying.bounding_box().grid_size()
    return lying.num_cores() if kind is HEIGHT else size.x if is_turned else size.y


def _cut_channels(kind: TensorMemoryLayout, channels: int, grid: CoreCoord, orientation: ShardOrientation) -> int:
    """Over how many cores channels go: one, equally many tiles each by width, as many as have something by both."""
    if kind is HEIGHT:
        return 1
    tiles = _tiles(channels)
    if kind is WIDTH:
        return max(n for n in range(1, min(tiles, grid.num_cores) + 1) if tiles % n == 0)
    return _fill(tiles, grid.y if orientation is ShardOrientation.COL_MAJOR else grid.x)


def _over(
    kind: TensorMemoryLayout,
    down: int,
    across: int,
    grid: CoreCoord,
    orientation: ShardOrientation,
    lying: CoreRangeSet | None,
) -> CoreRangeSet:
    """The cores: those that are there by height, else the first ones, or a rectangle from the first one on."""
    if kind is BLOCK:
        x, y = (down, across) if orientation is ShardOrientation.COL_MAJOR else (across, down)
        return CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(x - 1, y - 1))])
    if kind is HEIGHT and lying is not None:
        return lying
    return num_cores_to_corerangeset(down * across, grid, row_wise=True)


def _fill(tiles: int, most: int) -> int:
    """The most cores of which none is empty, if each but the last has as many tiles.

    >>> _fill(10, 64), _fill(100, 64), _fill(9, 8)
    (10, 50, 5)
    """
    each = -(-tiles // most)
    return -(-tiles // each)
