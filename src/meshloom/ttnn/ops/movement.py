"""Ops that give elements another shape or order: reshape, permute, repeat, roll, fold.

`view`, and `reshape` where rows stay whole, share the memory of their operand as in TTNN; all others copy. What only
moves elements does so where its operand is: a tensor of the host stays there, and so does the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.block_moves import axis_of, fresh, whole
from meshloom.ttnn.ops.calling import Made, blocks_of, make, op, operands, result
from meshloom.ttnn.ops.topologies import moves, same, topology_of, topology_of_reshape
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.memory import MemoryConfig, ShardSpec, TensorMemoryLayout
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.sharding import turn_shards
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

__all__ = ["TileReshapeMapMode"]


class TileReshapeMapMode(Choice):
    """Whether the hardware keeps the plan of a reshape of tiles; about speed only."""

    CACHE, RECREATE = range(2)


# shapes


@op("reshape", spelled={"logical_shape": "shape"})
def reshape(input_tensor, shape: Sequence[int] | None = None, padded_shape=None, *, memory_config=None) -> Tensor:
    """The same elements in another shape; one size may be -1. Rows that stay whole stay where they are in memory.

    With a padded shape, a shape of fewer or more elements says anew which of them are padding.
    """
    if shape is None:
        raise ArgumentError("ttnn.reshape: a shape is missing")
    if padded_shape is not None and -1 not in shape and math.prod(shape) != math.prod(input_tensor.shape):
        return _relabel_padding(input_tensor, tuple(shape), tuple(padded_shape), memory_config)
    sizes = infer_shape("reshape", tuple(input_tensor.shape), shape)
    return _see_as(input_tensor, sizes, memory=memory_config)


@op("view")
def view(input_tensor, shape: Sequence[int]) -> Tensor:
    """The same memory in another shape; the last dim stays, and in tiles the last two stay whole tiles."""
    sizes = infer_shape("view", tuple(input_tensor.shape), shape)
    if not is_view(input_tensor, sizes, None):
        raise OperandError(
            f"ttnn.view: {list(input_tensor.shape)} in {input_tensor.layout} cannot be seen as {list(sizes)} in place",
            fix="ttnn.reshape",
        )
    return view_as(input_tensor, sizes, topology_of_reshape(input_tensor, sizes))


@op("experimental.view")
def experimental_view(
    input_tensor, *sizes: Any, shape: Sequence[int] | None = None, N=None, C=None, H=None, W=None
) -> Tensor:
    """`view` with the sizes as four numbers or as one sequence."""
    named = [size for size in (N, C, H, W) if size is not None]
    listed = shape if shape is not None else sizes[0] if len(sizes) == 1 else [*sizes, *named]
    return view(input_tensor, listed)


@op("reshape_on_device")
def reshape_on_device(input_tensor, W, Z, Y, X, *, memory_config=None) -> Tensor:
    """`reshape` to four sizes."""
    return reshape(input_tensor, (W, Z, Y, X), memory_config=memory_config)


@op("squeeze")
def squeeze(input_tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Without dims of size 1: all of them, or the named ones that have it."""
    shape, rank = tuple(input_tensor.shape), len(input_tensor.shape)
    asked = list(range(rank)) if dim is None else [axis_of("squeeze", each, rank) for each in whole(dim, 1)]
    for each in asked:
        if asked.count(each) > 1:
            raise OperandError(
                f"ttnn.squeeze: dim {each} appears multiple times in the list of dims", fix="name each dim once"
            )
    gone = {each for each in asked if rank and shape[each] == 1}
    left = [each for each in range(rank) if each not in gone]
    return _see_as(input_tensor, [shape[each] for each in left], {each: place for place, each in enumerate(left)})


@op("unsqueeze")
def unsqueeze(input_tensor, dim) -> Tensor:
    """With a dim of size 1 put in."""
    shape = tuple(input_tensor.shape)
    place = axis_of("unsqueeze", dim, len(shape) + 1)
    places = {each: each + (each >= place) for each in range(len(shape))}
    return _see_as(input_tensor, (*shape[:place], 1, *shape[place:]), places)


@op("unsqueeze_to_4D")
def unsqueeze_to_4D(tensor) -> Tensor:
    """With ones in front until there are four dims."""
    shape = tuple(tensor.shape)
    missing = 4 - len(shape)
    if missing < 0:
        raise OperandError(f"ttnn.unsqueeze_to_4D: Tensor rank is greater than 4: {list(shape)}")
    return _see_as(tensor, (1,) * missing + shape, {each: each + missing for each in range(len(shape))})


def infer_shape(name: str, had: Sequence[int], asked: Sequence[int]) -> tuple[int, ...]:
    """A shape with its -1 worked out.

    >>> infer_shape("reshape", (2, 6), (3, -1))
    (3, 4)
    """
    sizes, total = tuple(asked), math.prod(had)
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known and total % known == 0:
        sizes = tuple(total // known if size == -1 else size for size in sizes)
    if any(size < 0 for size in sizes) or math.prod(sizes) != total:
        raise OperandError(
            f"Invalid arguments to {name}: {list(had)} has {total} elements, {list(asked)} "
            + ("leaves more than one size open" if sizes.count(-1) > 1 else f"asks for {known}"),
            fix="ask for a shape of as many elements",
        )
    return sizes


def is_view(tensor: Tensor, shape: tuple[int, ...], memory_config: MemoryConfig | None) -> bool:
    """Whether the memory can stay as it is: rows stay whole, and in tiles the rows of tiles do."""
    had = tuple(tensor.shape)
    if memory_config is not None and memory_config != tensor.memory_config():
        return False
    if had[-1:] != shape[-1:] or not tensor.block.is_contiguous():
        return had == shape
    height, rows = tensor.tile.tile_shape[0], had[-2:-1] or (1,)
    after = shape[-2:-1] or (1,)
    return tensor.layout is Layout.ROW_MAJOR or rows == after or (rows[0] % height == 0 and after[0] % height == 0)


def view_as(tensor: Tensor, shape: Sequence[int], label: TensorTopology) -> Tensor:
    """A tensor in the memory of another."""
    (block,) = blocks_of("view", tensor)
    return tensor.shared_by(_in_memory_of(tensor, block.reshape(*block.shape[: len(tensor.grid)], *shape), label))


def _in_memory_of(tensor: Tensor, block: Block, label: TensorTopology) -> Tensor:
    memory = tensor.memory_config()
    return tensor._like(block, topology=label, memory_config=memory, pad_value=0.0, room=tensor._room)


def _relabel_padding(
    tensor: Tensor, shape: tuple[int, ...], padded: tuple[int, ...], memory: MemoryConfig | None
) -> Tensor:
    """The memory of a tensor with another logical shape: rows become padding, or padding becomes rows.

    [1, 1, 32, 64] as [1, 1, 5, 64] in [1, 1, 32, 64]: five rows are left, and 27 are padding.
    """
    full, axes = _with_padding(tensor), len(tensor._grid)
    height = tensor.tile.tile_shape[0] if tensor.layout is Layout.TILE else 1
    places = _check_padding(full.shape[axes:], shape, padded, height)
    all_rows = full.reshape(*full.shape[:axes], *padded)
    seen = all_rows
    for dim, size in enumerate(shape):
        if size != padded[dim]:
            seen = seen.narrow(axes + dim, 0, size)
    label = topology_of_reshape(tensor, shape, places if len(tensor.shape) == len(shape) else None)
    if memory is not None and memory != tensor.memory_config():
        return result(fresh(seen), tensor, topology=label, memory_config=memory)
    made = _in_memory_of(tensor, seen, label)
    made._relabelled = (seen, all_rows)
    is_shared = full.untyped_storage().data_ptr() == tensor.block.untyped_storage().data_ptr()
    return tensor.shared_by(made) if is_shared else made  # padding of tiles was put beside it just now


@lru_cache(maxsize=1024)
def _check_padding(
    had: tuple[int, ...], shape: tuple[int, ...], padded: tuple[int, ...], height: int
) -> dict[int, int]:
    """An error unless a shape fits into a padded one that memory of `had` can be seen as, in tiles of that height.
    Else where its dims are: all in their places."""
    is_cut = padded[-2:-1] != had[-2:-1] and (padded[-2:] or (1,))[0] % height
    fits = len(padded) == len(shape) and all(size <= full for size, full in zip(shape, padded, strict=True))
    if not fits or math.prod(padded) != math.prod(had) or padded[-1:] != had[-1:] or is_cut:
        raise OperandError(
            f"Invalid arguments to reshape: {list(had)} in memory cannot be {list(shape)} inside of {list(padded)}",
            fix=f"give a padded shape of {math.prod(had)} elements in rows of {had[-1]}",
        )
    return {dim: dim for dim in range(len(shape))}


def _with_padding(tensor: Tensor) -> Block:
    """The block of a tensor with its padding: what a reshape made padding of, else what tiles are filled up with."""
    (block,) = blocks_of("reshape", tensor)
    if hasattr(tensor, "_relabelled") and tensor._relabelled[0] is block:  # and it was not put elsewhere since
        return tensor._relabelled[1]
    return block if tensor.shape == tensor.padded_shape else tensor._pad_tiles(tensor._pad)


def _see_as(
    tensor: Tensor, shape: Sequence[int], places: dict[int, int] | None = None, memory: MemoryConfig | None = None
) -> Tensor:
    """A tensor in another shape, in the same memory if that can stay as it is."""
    sizes, label = tuple(shape), topology_of_reshape(tensor, shape, places)
    if is_view(tensor, sizes, memory):
        return view_as(tensor, sizes, label)
    (block,) = blocks_of("reshape", tensor)
    values = block.reshape(*block.shape[: len(tensor.grid)], *sizes)
    return result(fresh(values), tensor, topology=label, memory_config=memory)


# order


@op("permute")
def permute(input_tensor, dims) -> Made:
    """The dims in another order."""
    (block,) = blocks_of("permute", input_tensor)
    rank, axes = len(input_tensor.shape), len(input_tensor.grid)
    if len(dims) != rank:
        raise OperandError(
            "The number of dimensions in the tensor input does not match the length of the desired ordering: "
            f"{rank} and {list(dims)}",
            fix=f"give {rank} dims",
        )
    order = [axis_of("permute", dim, rank) for dim in dims]
    if len(set(order)) != rank:
        raise OperandError(f"ttnn.permute: {list(dims)} names a dim twice", fix="name each dim once")
    values = fresh(block.permute(*range(axes), *(axes + dim for dim in order)))
    made = make(values, "permute", input_tensor, dims=tuple(order))
    if input_tensor.is_sharded() and _turns_matrix(input_tensor, order):
        made.memory_config = turn_shards(input_tensor.memory_config())
    return made


def _turns_matrix(tensor: Tensor, order: Sequence[int]) -> bool:
    """Whether another order of dims exchanges the rows and columns of a tensor that is one matrix."""
    rank = len(order)
    return rank > 1 and list(order[-2:]) == [rank - 1, rank - 2] and math.prod(tensor.shape[:-2]) == 1


@op("transpose")
def transpose(input_tensor, dim1, dim2, *, memory_config=None) -> Tensor:
    """Two dims exchanged."""
    rank = len(input_tensor.shape)
    order = list(range(rank))
    first, second = axis_of("transpose", dim1, rank), axis_of("transpose", dim2, rank)
    order[first], order[second] = second, first
    return permute(input_tensor, order, memory_config=memory_config)


@op("experimental.transpose_rm")
def transpose_rm(input) -> Tensor:
    """The last two dims exchanged."""
    return transpose(input, -2, -1)


@op("experimental.convert_to_hwc")
def convert_to_hwc(input) -> Made:
    """Pictures [1, B, C, HW] with their channels last: [1, 1, B * HW, C]. A core that had columns has those rows."""
    name = "experimental.convert_to_hwc"
    _, (block,) = operands(name, input)
    if len(input.shape) != 4 or input.shape[0] != 1:
        raise OperandError(f"ttnn.{name} takes [1, B, C, HW], not {list(input.shape)}")
    _, batch, channels, places = input.shape
    values, sizes = fresh(block.transpose(-2, -1)), (1, 1, batch * places, channels)
    between = Tensor(values, input.grid, input.dtype, input.layout, topology_of("permute", input, dims=(0, 1, 3, 2)))
    label = topology_of_reshape(between, sizes)
    made = Made(values.reshape(*block.shape[: len(input.grid)], *sizes), input, label, layout=Layout.ROW_MAJOR)
    spec = input.memory_config().shard_spec
    if spec is not None:
        aligned = -(-channels // ROW_ALIGNMENT) * ROW_ALIGNMENT
        height = batch * min(spec.shape[1], places)
        made.memory_config = _sharded(input, TensorMemoryLayout.HEIGHT_SHARDED, (height, aligned))
    return made


@op("experimental.convert_to_chw")
def convert_to_chw(input) -> Made:
    """Pictures [1, 1, HW, C] with their channels first: [1, 1, C, HW]. A core that had rows has those columns."""
    _, (block,) = operands("experimental.convert_to_chw", input)
    if len(input.shape) != 4:
        raise OperandError(f"ttnn.experimental.convert_to_chw takes [1, 1, HW, C], not {list(input.shape)}")
    made = make(fresh(block.transpose(-2, -1)), "permute", input, dims=(0, 1, 3, 2))
    made.layout, spec = Layout.ROW_MAJOR, input.memory_config().shard_spec
    if spec is not None:
        made.memory_config = _sharded(input, TensorMemoryLayout.WIDTH_SHARDED, (input.shape[-1], spec.shape[0]))
    return made


ROW_ALIGNMENT = 8  # elements of a row in L1 of two bytes each: 16 bytes


def _sharded(tensor: Tensor, kind: TensorMemoryLayout, part: tuple[int, int]) -> MemoryConfig:
    """The memory and the cores of a sharded tensor, for shards of another shape."""
    given = tensor.memory_config()
    assert given.shard_spec is not None
    spec = ShardSpec(given.shard_spec.grid, part, given.shard_spec.orientation)
    return MemoryConfig(kind, given.buffer_type, spec)


# repetition


@op("repeat")
def repeat(input_tensor, repeat_dims) -> Made:
    """The tensor several times along every dim; fewer numbers are for the last dims, more put dims in front."""
    (block,) = blocks_of("repeat", input_tensor)
    had, axes = len(input_tensor.shape), len(input_tensor.grid)
    times = (*(1,) * (had - len(repeat_dims)), *repeat_dims)
    if any(each < 0 for each in times):
        raise OperandError(f"ttnn.repeat: {list(times)} for a tensor of rank {had}", fix="give numbers >= 0")
    new = len(times) - had
    spaced = block.reshape(*block.shape[:axes], *(1,) * new, *block.shape[axes:])
    values = fresh(spaced.repeat(*(1,) * axes, *times))
    return make(values, moves(same(input_tensor, new)), input_tensor)


@op("repeat_interleave")
def repeat_interleave(input_tensor, repeats, dim) -> Made:
    """Every element several times in a row along a dim."""
    (block,) = blocks_of("repeat_interleave", input_tensor)
    place = axis_of("repeat_interleave", dim, len(input_tensor.shape))
    axes = len(input_tensor.grid)
    values = block.repeat_interleave(repeats, dim=axes + place)
    return make(values, moves(same(input_tensor)), input_tensor, scales=True)


@op("expand")
def expand(input_tensor, output_shape) -> Made:
    """Dims of size 1 made larger; -1 keeps a size, and sizes in front are new dims."""
    (block,) = blocks_of("expand", input_tensor)
    had, axes, asked = tuple(input_tensor.shape), len(input_tensor.grid), tuple(output_shape)
    new = len(asked) - len(had)
    sizes = tuple(have if size == -1 else size for size, have in zip(asked, (1,) * new + had, strict=False))
    if new < 0 or any(have not in (1, size) for size, have in zip(sizes[new:], had, strict=True)):
        raise OperandError(f"ttnn.expand: {list(had)} cannot become {list(asked)}", fix="only dims of size 1 grow")
    spaced = block.reshape(*block.shape[:axes], *(1,) * new, *had)
    values = fresh(spaced.expand(*block.shape[:axes], *sizes))
    return make(values, moves(same(input_tensor, new)), input_tensor)


@op("experimental.broadcast_to")
def broadcast_to(input, output_shape, *, memory_config=None, output=None) -> Made | Tensor:
    """`expand` that can write into a tensor."""
    made = expand(input, output_shape, memory_config=memory_config)
    return made if output is None else Made(made.block, made, made.tensor_topology(), output=output)


@op("roll")
def roll(input_tensor, shifts, dim: int | Sequence[int] | None = None) -> Made:
    """Elements moved along dims, those that fall off put in at the other end; without a dim, along all of them."""
    (block,) = blocks_of("roll", input_tensor)
    axes, rank = len(input_tensor.grid), len(input_tensor.shape)
    label = topology_of(moves(same(input_tensor)), input_tensor)
    if dim is None:
        flat = block.flatten(axes) if rank else block
        values = flat.roll(shifts, dims=axes).reshape(block.shape) if rank else fresh(block)
        return Made(values, input_tensor, label)
    dims = [axes + axis_of("roll", each, rank) for each in whole(dim, 1)]
    steps = whole(shifts, len(dims))
    if len(steps) != len(dims):
        raise OperandError(f"ttnn.roll: {len(steps)} shifts for {len(dims)} dims", fix="give one shift for each dim")
    return Made(block.roll(steps, dims), input_tensor, label)


@op("fold")
def fold(
    input,
    stride_h,
    stride_w,
    output_shape=None,
    padding=(0, 0),
    override_memory_config=None,
    collapse_output=False,
    *,
    input_is_nhwc=True,
) -> Tensor:
    """Pictures [N, H, W, C] with patches of stride_h x stride_w as channels: [N, H / h, W / w, h * w * C].

    `padding` is (h, w), (top, bottom, left, right), or the latter with (front, back) of the channels.
    """
    _, (block,) = operands("fold", input)
    axes = len(input.grid)
    if len(input.shape) != 4 or not input_is_nhwc:
        raise OperandError(f"ttnn.fold takes [N, H, W, C], not {list(input.shape)}", fix="reshape it to four dims")
    padded = torch.nn.functional.pad(block, _around(padding))
    *_, n, height, width, channels = padded.shape
    if height % stride_h or width % stride_w:
        raise OperandError(
            f"ttnn.fold: {height}x{width} does not divide into patches of {stride_h}x{stride_w}",
            fix=f"pad to {-(-height // stride_h) * stride_h}x{-(-width // stride_w) * stride_w}",
        )
    rows, columns = height // stride_h, width // stride_w
    cut = padded.reshape(*padded.shape[:axes], n, rows, stride_h, columns, stride_w, channels)
    patches = cut.transpose(-4, -3).reshape(*padded.shape[:axes], n, rows, columns, stride_h * stride_w * channels)
    folded = result(
        fresh(patches),
        input,
        topology=topology_of(
            moves((0, 1, 2, 3 if stride_h * stride_w == 1 else None)), input, shape=patches.shape[axes:]
        ),
        memory_config=override_memory_config,
    )
    if output_shape is not None:
        return _crop(folded, tuple(output_shape))
    return reshape(folded, (1, 1, n * rows * columns, -1)) if collapse_output else folded


def _around(padding: Sequence[int]) -> list[int]:
    """What torch's pad takes, for [H, W, C] at the end.

    >>> _around((1, 2)), _around((1, 2, 3, 4))
    ([0, 0, 2, 2, 1, 1], [0, 0, 3, 4, 1, 2])
    """
    if len(padding) == 2:
        return [0, 0, padding[1], padding[1], padding[0], padding[0]]
    top, bottom, left, right, *channels = padding
    return [*(channels or (0, 0)), left, right, top, bottom]


def _crop(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    axes = len(tensor.grid)
    block = tensor.block[(slice(None),) * axes + tuple(slice(size) for size in shape)]
    return result(fresh(block), tensor, topology=topology_of(moves(same(tensor)), tensor, shape=shape))
