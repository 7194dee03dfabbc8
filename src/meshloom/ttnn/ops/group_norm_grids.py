"""Over which cores the input of a group norm lies, as programs ask before they shard it.

Rows are cut into whole tiles, channels so that no group is on two cores.
"""

from __future__ import annotations

from meshloom.errors import OperandError
from meshloom.ttnn.device.cores import CoreCoord, CoreGrid, CoreRange, CoreRangeSet, num_cores_to_corerangeset
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.tensor.formats import TILE_SIZE
from meshloom.ttnn.tensor.memory import BufferType, MemoryConfig, ShardOrientation, ShardSpec, TensorMemoryLayout

__all__ = ["determine_expected_group_norm_sharded_config_and_grid_size", "get_group_norm_cores_across_channel"]

CHANNELS_AT_ONCE = 8  # what a core reads of a row at least


def determine_expected_group_norm_sharded_config_and_grid_size(
    *,
    device: MeshDevice,
    num_channels: int,
    num_groups: int,
    input_nhw: int,
    is_height_sharded: bool,
    is_row_major: bool = False,
) -> tuple[MemoryConfig, CoreGrid]:
    """The memory that the input [1, 1, N * H * W, C] of a group norm should have, and the grid of cores that holds it.

    >>> from meshloom import ttnn
    >>> with ttnn.create_mesh_device(ttnn.MeshShape(1, 1)) as mesh:  # 8 x 8 cores
    ...     memory, grid = determine_expected_group_norm_sharded_config_and_grid_size(
    ...         device=mesh, num_channels=320, num_groups=32, input_nhw=4096, is_height_sharded=False)
    >>> memory.shard_spec.shape, grid  # 128 rows of tiles on 8 cores, 32 groups of 10 channels on 8
    ([512, 40], ttnn.CoreGrid(x=8, y=8))
    """
    if num_channels % num_groups or num_channels % TILE_SIZE:
        raise OperandError(
            f"{num_channels} channels are not {num_groups} equal groups in whole tiles",
            fix=f"a multiple of {TILE_SIZE}",
        )
    cores = device.compute_with_storage_grid_size()
    tiles = -(-input_nhw // TILE_SIZE)
    down = _largest_divisor(tiles, cores.x * cores.y if is_height_sharded else cores.x)
    across = 1 if is_height_sharded else _cores_of_channels(num_channels, num_channels // num_groups, cores.y)
    shard = (tiles // down * TILE_SIZE, num_channels // across)
    if is_height_sharded:
        grid = CoreGrid(x=min(down, cores.x), y=-(-down // cores.x))
        held = num_cores_to_corerangeset(down, cores, row_wise=True)
        layout, orientation = TensorMemoryLayout.HEIGHT_SHARDED, ShardOrientation.ROW_MAJOR
    else:
        grid = CoreGrid(x=across, y=down) if is_row_major else CoreGrid(x=down, y=across)
        held = CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(grid.x - 1, grid.y - 1))])
        layout = TensorMemoryLayout.BLOCK_SHARDED
        orientation = ShardOrientation.ROW_MAJOR if is_row_major else ShardOrientation.COL_MAJOR
    return MemoryConfig(layout, BufferType.L1, ShardSpec(held, shard, orientation)), grid


def _largest_divisor(number: int, most: int) -> int:
    """The largest number of equal pieces up to a limit.

    >>> _largest_divisor(12, 8), _largest_divisor(7, 6)
    (6, 1)
    """
    return next(count for count in range(min(number, most), 0, -1) if number % count == 0)


def _cores_of_channels(channels: int, group: int, most: int) -> int:
    """The largest number of cores that have whole groups each, and channels that can be read at once."""
    runs = channels // CHANNELS_AT_ONCE
    return next(count for count in range(most, 0, -1) if runs % count == 0 and channels // count % group == 0)


def get_group_norm_cores_across_channel(
    memory_layout: TensorMemoryLayout, core_grid: CoreGrid, shard_orientation: ShardOrientation | None = None
) -> int:
    """Over how many cores the channels lie: one, all, or those of a row or column of the grid.

    >>> get_group_norm_cores_across_channel(TensorMemoryLayout.BLOCK_SHARDED, CoreGrid(x=8, y=4))
    4
    """
    if memory_layout is TensorMemoryLayout.HEIGHT_SHARDED:
        return 1
    if memory_layout is TensorMemoryLayout.BLOCK_SHARDED:
        return int(core_grid.x if shard_orientation is ShardOrientation.ROW_MAJOR else core_grid.y)
    return int(core_grid.x * core_grid.y)
