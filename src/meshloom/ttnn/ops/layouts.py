"""Ops that change how a device keeps its part and not what it is: tiles or rows, and over which cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device.cores import CoreCoord, CoreRange, CoreRangeSet
from meshloom.ttnn.ops.block_moves import fresh
from meshloom.ttnn.ops.calling import Made, Optionals, op, operands
from meshloom.ttnn.ops.movement import view_as
from meshloom.ttnn.ops.slicing import pad, slice_, slice_write
from meshloom.ttnn.ops.topologies import topology_of_reshape
from meshloom.ttnn.tensor.formats import DataType, Layout, Tile
from meshloom.ttnn.tensor.memory import DRAM_MEMORY_CONFIG, BufferType, MemoryConfig, ShardSpec
from meshloom.ttnn.tensor.tensor import Tensor

# tiles


@op("tilize")
def tilize(input_tensor, *, tile=None) -> Made:
    """In tiles; the last two dims have to be whole tiles."""
    height, width = (tile or Tile()).tile_shape
    sizes = (1, *input_tensor.shape)[-2:] if len(input_tensor.shape) else (1, 1)
    for size, side, what in ((sizes[1], width, "width"), (sizes[0], height, "height")):
        if size % side:
            raise OperandError(
                f"ttnn.tilize: Input tensor {what} ({size}) must be divisible by tile {what} ({side})",
                fix="ttnn.tilize_with_zero_padding",
            )
    return _copy_in("tilize", input_tensor, layout=Layout.TILE)


@op("tilize_with_zero_padding")
def tilize_with_zero_padding(input_tensor) -> Made:
    """In tiles, filled up with zeros."""
    return _copy_in("tilize_with_zero_padding", input_tensor, layout=Layout.TILE)


@op("tilize_with_val_padding")
def tilize_with_val_padding(input_tensor, output_tensor_shape, pad_value, *, memory_config=None, dtype=None) -> Tensor:
    """In tiles, filled up with a value to a shape that is whole tiles; the logical shape stays."""
    how = {"layout": Layout.TILE, "dtype": dtype, "memory_config": memory_config}
    made = _copy_in("tilize_with_val_padding", input_tensor, **how).tensor()
    if tuple(made.padded_shape) != tuple(output_tensor_shape):
        filled = pad(input_tensor, output_tensor_shape, (0,) * len(input_tensor.shape), pad_value)
        return _copy_in("tilize_with_val_padding", filled, **how).tensor()
    made._pad = pad_value
    return made


@op("untilize")
def untilize(input_tensor) -> Made:
    """In rows, without the padding of tiles; block floats become bfloat16."""
    dtype = DataType.BFLOAT16 if input_tensor.dtype.is_block_float else None
    return _copy_in("untilize", input_tensor, layout=Layout.ROW_MAJOR, dtype=dtype)


@op("untilize_with_unpadding")
def untilize_with_unpadding(input_tensor, output_tensor_end, *, memory_config=None) -> Tensor:
    """In rows, cut after the element that is named last in every dim."""
    rows = untilize(input_tensor, memory_config=memory_config)
    ends = [min(last + 1, size) for last, size in zip(output_tensor_end, rows.shape, strict=True)]
    return rows if ends == list(rows.shape) else slice_(rows, [0] * len(ends), ends)


@op("fill_implicit_tile_padding")
def fill_implicit_tile_padding(input_tensor, fill_value, *, memory_config=None) -> Tensor:
    """The same values; what tiles are filled up with is another value."""
    made = _copy_in("fill_implicit_tile_padding", input_tensor, memory_config=memory_config).tensor()
    made._pad = fill_value
    return made


def _copy_in(name: str, tensor: Tensor, **how: Any) -> Made:
    """The same values in memory of their own, in the layout, dtype or memory config that is told."""
    _, (block,) = operands(name, tensor)
    return Made(fresh(block), tensor, tensor.tensor_topology(), **how)


# cores


_SPREAD = Optionals("grid shard_shape shard_scheme shard_orientation")
_TO = Optionals("output_dtype sharded_memory_config preallocated_output")


@op("interleaved_to_sharded", more=(_SPREAD, _TO))
def interleaved_to_sharded(input_tensor, **how) -> Made:
    """Spread over cores: by a memory config, or by cores, the shape of a shard, a scheme and an orientation."""
    (grid, shape, scheme, orientation), (dtype, config, output) = _SPREAD(how), _TO(how)
    if isinstance(grid, MemoryConfig):  # the form with a memory config, and maybe a dtype after it
        config, dtype = grid, shape or dtype
    if config is None:
        if scheme is None or orientation is None:
            raise ArgumentError("ttnn.interleaved_to_sharded: a memory config, or grid, shape, scheme and orientation")
        config = MemoryConfig(scheme, BufferType.L1, ShardSpec(_cores(grid), shape, orientation))
    if not config.is_sharded():
        raise OperandError(f"ttnn.interleaved_to_sharded: {config} is not sharded", fix="a sharded memory config")
    return _copy_in("interleaved_to_sharded", input_tensor, dtype=dtype, memory_config=config, output=output)


def _cores(grid: CoreCoord | CoreRangeSet) -> CoreRangeSet:
    if isinstance(grid, CoreRangeSet):
        return grid
    return CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(grid.x - 1, grid.y - 1))])


@op("sharded_to_interleaved")
def sharded_to_interleaved(input_tensor, memory_config=None) -> Made:
    """Spread over banks page by page, in DRAM unless said otherwise."""
    config = memory_config or DRAM_MEMORY_CONFIG
    if config.is_sharded():
        raise OperandError(f"ttnn.sharded_to_interleaved: {config} is sharded", fix="ttnn.reshard")
    return _copy_in("sharded_to_interleaved", input_tensor, memory_config=config)


@op("reshard")
def reshard(input_tensor, output_memory_config) -> Made:
    """Spread over cores in another way."""
    return _copy_in("reshard", input_tensor, memory_config=output_memory_config)


@op("interleaved_to_sharded_partial")
def interleaved_to_sharded_partial(
    input_tensor,
    grid: object,
    shard_shape: Sequence[int],
    num_slices,
    slice_index,
    shard_scheme,
    shard_orientation,
    *,
    output_dtype=None,
) -> Tensor:
    """One of so many equal slices of the rows, spread over cores; shape [1, 1, rows / slices, width]."""
    starts, ends = _slice_of_rows(input_tensor, num_slices, slice_index)
    rows = slice_(_as_rows(input_tensor), starts, ends)
    return interleaved_to_sharded(rows, grid, shard_shape, shard_scheme, shard_orientation, output_dtype)


@op("sharded_to_interleaved_partial")
def sharded_to_interleaved_partial(input_tensor, cache_tensor: Tensor, num_slices, slice_index) -> Tensor:
    """Write one of so many equal slices of the rows of a tensor, in place."""
    starts, ends = _slice_of_rows(cache_tensor, num_slices, slice_index)
    rows = _as_rows(cache_tensor)
    slice_write(_as_rows(input_tensor), rows, starts, ends, (1, 1, 1, 1))
    if rows is not cache_tensor:
        cache_tensor.grow(rows.block.reshape(*rows.block.shape[: len(rows.grid)], *cache_tensor.shape))
    return cache_tensor


def _as_rows(tensor: Tensor) -> Tensor:
    shape = (1, 1, -1, tensor.shape[-1])
    if tuple(tensor.shape[:-2]) == (1, 1):
        return tensor
    sizes = (*shape[:2], tensor.block[(0,) * len(tensor.grid)].numel() // shape[-1], shape[-1])
    return view_as(tensor, sizes, topology_of_reshape(tensor, sizes))


def _slice_of_rows(tensor: Tensor, slices: int, number: int) -> tuple[list[int], list[int]]:
    rows, width = tensor.block[(0,) * len(tensor.grid)].numel() // tensor.shape[-1], tensor.shape[-1]
    if rows % slices or not 0 <= number < slices:
        raise OperandError(f"slice {number} of {slices} of {rows} rows", fix="equal slices, numbered from 0")
    size = rows // slices
    return [0, 0, number * size, 0], [1, 1, (number + 1) * size, width]
