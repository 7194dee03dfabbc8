"""Which shards a tensor can have on the cores of a device, and what becomes of them in a result of another shape.

A tensor in memory is a matrix: all dims but the last are its rows. `flaw_of_shards` says why the original refuses a
spec, `fit_memory` gives the config of a result that goes where its operand is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from meshloom.ttnn.tensor.formats import TILE_SIZE, Layout, Tile
from meshloom.ttnn.tensor.memory import MemoryConfig, ShardOrientation, ShardSpec, TensorMemoryLayout

HEIGHT, WIDTH = TensorMemoryLayout.HEIGHT_SHARDED, TensorMemoryLayout.WIDTH_SHARDED
BLOCK = TensorMemoryLayout.BLOCK_SHARDED


@lru_cache(maxsize=4096)
def flaw_of_shards(config: MemoryConfig, shape: tuple[int, ...], layout: Layout, tile: Tile) -> str | None:
    """Why the original refuses these shards of a tensor with that padded shape; None if it does not.

    >>> from meshloom.ttnn.tensor.memory import ShardStrategy, create_sharded_memory_config
    >>> from meshloom.ttnn.device.cores import CoreGrid
    >>> config = create_sharded_memory_config((64, 32), CoreGrid(x=2, y=1), ShardStrategy.HEIGHT)
    >>> flaw_of_shards(config, (64, 32), Layout.TILE, Tile())
    >>> flaw_of_shards(config, (96, 32), Layout.TILE, Tile())
    'Number of shards along height 3 must not exceed number of cores 2'
    """
    spec = config.shard_spec
    if spec is None:
        return None
    if layout is Layout.TILE and any(size % side for size, side in zip(spec.shape, tile.tile_shape, strict=True)):
        sides, of_tile = ", ".join(map(str, spec.shape)), ", ".join(map(str, tile.tile_shape))
        return f"Physical shard shape ({sides}) must be tile {{{of_tile}}} sized!"
    (height, width), (high, wide) = _sides(shape), spec.shape
    down, across, cores = -(-height // high), -(-width // wide), spec.num_cores()
    if config.memory_layout is HEIGHT:
        if width != wide:
            return f"Shard width {wide} must match physical width {width} for height sharded"
        return _too_many("height", down, "cores", cores)
    if config.memory_layout is WIDTH:
        if height != high:
            return f"Shard height {high} must match physical height {height} for width sharded"
        return _too_many("width", across, "cores", cores)
    if config.memory_layout is BLOCK:
        return _flaw_of_blocks(spec, down, across)
    return None


def _flaw_of_blocks(spec: ShardSpec, down: int, across: int) -> str | None:
    if spec.grid.size() != 1:
        return "Shard grid must be one full rectangular grid for block sharded!"
    grid, by_rows = spec.grid.bounding_box().grid_size(), spec.orientation is ShardOrientation.ROW_MAJOR
    order = f" for {'row' if by_rows else 'column'} major orientation!"
    rows, columns = ("rows", grid.y), ("columns", grid.x)
    tall = _too_many("height", down, *(rows if by_rows else columns))
    broad = _too_many("width", across, *(columns if by_rows else rows))
    found = tall or broad
    return None if found is None else found + order


def _too_many(along: str, shards: int, of: str, there: int) -> str | None:
    if shards <= there:
        return None
    return f"Number of shards along {along} {shards} must not exceed number of {of} {there}"


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


@lru_cache(maxsize=4096)
def fit_memory(
    config: MemoryConfig, had: tuple[int, ...], has: tuple[int, ...], layout: Layout, tile: Tile
) -> MemoryConfig:
    """The config of a result with another padded shape than its operand: shards grow and shrink with the sides.

    Where such shards cannot be, the result is interleaved in the same memory.
    """
    spec = config.shard_spec
    if had == has and (spec is None or flaw_of_shards(config, has, layout, tile) is None):
        return config
    if spec is None:
        return MemoryConfig(TensorMemoryLayout.INTERLEAVED, config.buffer_type)
    least = TILE_SIZE if layout is Layout.TILE else 1
    pairs = zip(spec.shape, _sides(had), _sides(has), strict=True)
    sides = [max(side * size // max(before, 1), least) for side, before, size in pairs]
    found = MemoryConfig(config.memory_layout, config.buffer_type, ShardSpec(spec.grid, sides, spec.orientation))
    if flaw_of_shards(found, has, layout, tile) is None:
        return found
    return MemoryConfig(TensorMemoryLayout.INTERLEAVED, config.buffer_type)


def turn_shards(config: MemoryConfig) -> MemoryConfig | None:
    """The config of a transposed matrix: what were pieces of rows are pieces of columns. None without a spec."""
    spec = config.shard_spec
    if spec is None:
        return None
    layout = {HEIGHT: WIDTH, WIDTH: HEIGHT}.get(config.memory_layout, config.memory_layout)
    orientation = spec.orientation
    if layout is BLOCK:  # the grid of cores stays, and shards go over it in the other order
        is_by_rows = orientation is ShardOrientation.ROW_MAJOR
        orientation = ShardOrientation.COL_MAJOR if is_by_rows else ShardOrientation.ROW_MAJOR
    return MemoryConfig(layout, config.buffer_type, ShardSpec(spec.grid, spec.shape[::-1], orientation))
