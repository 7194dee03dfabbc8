"""Ops that split a hidden width into heads and put heads together again.

A fused width holds all query heads, then all key heads, then all value heads of a device. Parts that are cut at the
hidden width so become parts that are cut at the heads, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.device.cores import (
    CoreCoord,
    CoreRange,
    CoreRangeSet,
    join_cells,
    num_cores_to_corerangeset,
    num_cores_to_corerangeset_in_subcoregrids,
)
from meshloom.ttnn.ops.block_moves import fresh, inside
from meshloom.ttnn.ops.calling import Made, Optionals, compute, make, op, operands, register, shared_coords
from meshloom.ttnn.ops.slicing import slice_, take_along
from meshloom.ttnn.ops.topologies import moves, same, topology_of
from meshloom.ttnn.tensor.formats import TILE_SIZE
from meshloom.ttnn.tensor.memory import BufferType, MemoryConfig, ShardSpec, TensorMemoryLayout
from meshloom.ttnn.tensor.padding import real_places
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

Three = tuple[Made, Made, Made]
Outputs = Sequence[Tensor | None] | None


@op("experimental.nlp_create_qkv_heads", spelled={"input_q": "input"})
def nlp_create_qkv_heads(
    input, input_kv=None, *, num_heads, num_kv_heads=None, transpose_k_heads=True, kv_tied=False, output_tensors=None
) -> Three:
    """[B, 1, S, (q + k + v) * D] as [B, q, S, D], [B, k, S, D] (or [B, k, D, S]) and [B, v, S, D]."""
    name = "experimental.nlp_create_qkv_heads"
    return _split(name, input, input_kv, num_heads, num_kv_heads, transpose_k_heads, kv_tied, output_tensors)


@op("experimental.create_qkv_heads")
def create_qkv_heads(input, *, num_heads, num_kv_heads=None, transpose_k_heads=True, output_tensors=None) -> Three:
    """`nlp_create_qkv_heads` of a width that goes group by group: query heads, then their key and their value head."""
    name, groups = "experimental.create_qkv_heads", num_kv_heads or num_heads
    ordered = _by_kind(name, input, groups, (num_heads // groups, 1, 1), num_heads)
    return _split(name, ordered, None, num_heads, num_kv_heads, transpose_k_heads, outputs=output_tensors)


@op("experimental.create_qkv_heads_from_separate_tensors")
def create_qkv_heads_from_separate_tensors(
    input, input_kv, *, num_heads, num_kv_heads=None, transpose_k_heads=True, output_tensors=None
) -> Three:
    """Queries [B, 1, S, q * D], and keys and values [B, 1, T, 2 * k * D] that go group by group."""
    name, groups = "experimental.create_qkv_heads_from_separate_tensors", num_kv_heads or num_heads
    ordered = _by_kind(name, input_kv, groups, (1, 1), groups)
    return _split(name, input, ordered, num_heads, num_kv_heads, transpose_k_heads, outputs=output_tensors)


def _by_kind(name: str, tensor: Tensor, groups: int, heads: Sequence[int], count: int) -> Tensor:
    """A width of groups, each with so many heads of every kind, as all heads of one kind after those of another.

    q0 q1 k0 v0 | q2 q3 k1 v1 becomes q0 q1 q2 q3 | k0 k1 | v0 v1.
    """
    _, (block,) = operands(name, tensor)
    if count % groups or tensor.shape[-1] % (groups * sum(heads)):
        raise OperandError(
            f"ttnn.{name}: a width of {tensor.shape[-1]} is not {groups} groups of {sum(heads)} heads",
            fix=f"{groups * sum(heads)} * the size of a head",
        )
    kinds = block.unflatten(-1, (groups, sum(heads), -1)).split(list(heads), -2)
    ordered = torch.cat([each.flatten(-3) for each in kinds], -1)
    return make(ordered, moves(tuple(range(len(tensor.shape)))), tensor).tensor()


@op("experimental.nlp_create_q_heads_split")
def nlp_create_q_heads_split(input, *, num_heads, split_head_dim) -> tuple[Made, Made]:
    """[B, 1, S, heads * D] as [B, heads, S, split_head_dim] and [B, heads, S, D - split_head_dim]."""
    name = "experimental.nlp_create_q_heads_split"
    _, (block,) = operands(name, input)
    size, axes = _head_size(name, input, None, (num_heads,)), len(input.grid)
    if not 0 < split_head_dim < size:
        raise OperandError(f"ttnn.{name}: split_head_dim={split_head_dim} of heads of {size}")
    heads = _with_heads(block, axes, num_heads, size)
    first, second = (
        Made(fresh(part), input, _split_label(input, part.shape[axes:], at_end=False))
        for part in heads.split([split_head_dim, size - split_head_dim], -1)
    )
    return first, second


@op("experimental.nlp_create_qkv_heads_vit")
def nlp_create_qkv_heads_vit(input, *, output_tensors=None) -> Three:
    """Heads of 64, as many for keys and values as for queries."""
    name = "experimental.nlp_create_qkv_heads_vit"
    return _split(name, input, heads=input.shape[-1] // (3 * 64), outputs=output_tensors)


@op("experimental.nlp_create_qkv_heads_falcon7b")
def nlp_create_qkv_heads_falcon7b(input) -> Three:
    """Query heads of 64, one head for keys and one for values."""
    return _split("experimental.nlp_create_qkv_heads_falcon7b", input, None, input.shape[-1] // 64 - 2, 1)


@op("transformer.split_query_key_value_and_split_heads")
def split_query_key_value_and_split_heads(
    input_tensor, kv_input_tensor=None, *, num_heads, num_kv_heads=None, transpose_key=True
) -> Three:
    """[B, S, (q + k + v) * D] as [B, q, S, D], [B, k, D, S] (or [B, k, S, D]) and [B, v, S, D]."""
    name = "transformer.split_query_key_value_and_split_heads"
    return _split(name, input_tensor, kv_input_tensor, num_heads, num_kv_heads, transpose_key)


@op("experimental.split_query_key_value_and_split_heads")
def experimental_split_query_key_value_and_split_heads(input_tensor, *, num_heads=16, output_tensors=None) -> Three:
    """[B, 1, S, 3 * H * D] as [B, H, S, D], [B, H, D, S] and [B, H, S, D]."""
    name = "experimental.split_query_key_value_and_split_heads"
    return _split(name, input_tensor, heads=num_heads, turned=True, outputs=output_tensors)


def _split(
    name: str,
    fused: Tensor,
    kv: Tensor | None = None,
    heads: int = 1,
    fewer: int | None = None,
    turned: bool = False,
    tied: bool = False,
    outputs: Outputs = None,
) -> Three:
    kv_heads = heads if fewer is None else fewer
    given = [fused] if kv is None else [fused, kv]
    blocks = operands(name, *given)[1]
    axes = len(fused.grid)
    counts = (heads, kv_heads) if tied else (heads, kv_heads, kv_heads)
    size = _head_size(name, fused, kv, counts)
    sources = [fused, *([fused if kv is None else kv] * (len(counts) - 1))]
    if kv is None:
        parts = list(blocks[0].split([count * size for count in counts], dim=-1))
    else:
        parts = [blocks[0], *blocks[1].split([count * size for count in counts[1:]], dim=-1)]
    made = [_with_heads(part, axes, count, size) for part, count in zip(parts, counts, strict=True)]
    if tied:
        made.append(made[1])
        sources.append(sources[1])
    if turned:
        made[1] = made[1].transpose(-1, -2)
    found = []
    for number, (block, source) in enumerate(zip(made, sources, strict=True)):
        label = _split_label(source, block.shape[axes:], at_end=turned and number == 1)
        each = Made(fresh(block), source, label, coords=shared_coords(*given))
        found.append(each.into(outputs[number] if outputs else None))
    return found[0], found[1], found[2]


def _head_size(name: str, fused: Tensor, kv: Tensor | None, counts: Sequence[int]) -> int:
    """The width of a head, from that of the operand."""
    if len(fused.shape) not in (3, 4) or (len(fused.shape) == 4 and fused.shape[1] != 1):
        raise OperandError(f"ttnn.{name} takes [B, 1, S, W] or [B, S, W], not {list(fused.shape)}")
    width, total = fused.shape[-1], sum(counts) if kv is None else counts[0]
    if width % total:
        raise OperandError(
            f"ttnn.{name}: a width of {width} does not divide into {total} heads", fix=f"{total} * the size of a head"
        )
    size = width // total
    if kv is not None and kv.shape[-1] != size * sum(counts[1:]):
        raise OperandError(
            f"ttnn.{name}: heads of {size} make {size * sum(counts[1:])} of keys and values, not {kv.shape[-1]}"
        )
    return size


def _with_heads(part: Block, axes: int, count: int, size: int) -> Block:
    """[B, (1,) S, count * size] as [B, count, S, size]."""
    batch, length = part.shape[axes], part.shape[-2]
    return part.reshape(*part.shape[:axes], batch, length, count, size).transpose(-3, -2)


def _split_label(source: Tensor, shape: Sequence[int], at_end: bool) -> Any:
    """Batch and sequence stay, the hidden width becomes the heads."""
    places: list[int | None] = [0, 3 if at_end else 2, 1]
    if len(source.shape) == 4:
        places.insert(1, None)
    return topology_of(moves(tuple(places)), source, shape=shape)


# decoding: one token of every user


_LAID = Optionals("num_kv_heads memory_config", overlap_qk_coregrid=True)


@op("experimental.nlp_create_qkv_heads_decode", more=_LAID)
def nlp_create_qkv_heads_decode(
    input_tensor, *, num_heads, output_tensors=None, batch_offset: Tensor | None = None, slice_size=None, **how
) -> Three:
    """[1, 1, B, (q + k + v) * D] as [1, B, q, D], [1, B, k, D] and [1, B, v, D]; maybe of a slice of the users.

    Every user has a core, which holds its heads; keys are on the next ones unless they may overlap with queries.
    """
    name, (num_kv_heads, memory_config, overlaps) = "experimental.nlp_create_qkv_heads_decode", _LAID(how)
    if (batch_offset is None) != (slice_size is None):
        raise OperandError(f"ttnn.{name}: batch_offset and slice_size are given together or not at all")
    users = input_tensor if batch_offset is None else _some_users(input_tensor, batch_offset, slice_size or 0)
    device, (block,) = operands(name, users)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    counts = (num_heads, kv_heads, kv_heads)
    size, axes = _head_size(name, users, None, counts), len(users.grid)
    lead, starts = block.shape[:axes], (0, num_heads, num_heads + kv_heads)
    shapes = [(users.shape[0] * users.shape[1], users.shape[2], count, size) for count in counts]
    found = [
        compute(
            functools.partial(_take_heads, start * size, count * size, (*lead, *shape)),
            (users,),
            topology_of(moves((0, None, 1, 2)), users, shape=shape),
            output=output_tensors[number] if output_tensors else None,
        )
        for number, (start, count, shape) in enumerate(zip(starts, counts, shapes, strict=True))
    ]
    for number, (made, count) in enumerate(zip(found, counts, strict=True)):
        after = number == 1 and not overlaps
        grid, batch = device.compute_with_storage_grid_size(), users.shape[2]
        made.memory_config = memory_config
        if (memory_config is None or memory_config.is_sharded()) and batch * (1 + after) <= grid.num_cores:
            made.memory_config = _core_per_user(grid, batch, (count, size), after)
    return found[0], found[1], found[2]


def _take_heads(start: int, width: int, shape: Sequence[int], block: Block) -> Block:
    """Some columns of a block, in another shape."""
    return fresh(block.narrow(-1, start, width)).view(shape)


def _core_per_user(grid: CoreCoord, users: int, heads: tuple[int, int], after: bool) -> MemoryConfig:
    """Heads of all users, [heads, D] each filled up to tiles, on the first cores or on those after them."""
    cores = list(CoreRange(CoreCoord(0, 0), CoreCoord(grid.x - 1, grid.y - 1)).cells())
    over = join_cells(cores[users : 2 * users] if after else cores[:users])
    part = (-(-heads[0] // TILE_SIZE) * TILE_SIZE, -(-heads[1] // TILE_SIZE) * TILE_SIZE)
    return MemoryConfig(TensorMemoryLayout.HEIGHT_SHARDED, BufferType.L1, ShardSpec(over, part))


def _some_users(tensor: Tensor, offset: Tensor, count: int) -> Tensor:
    """The users from an offset on that every device knows for itself."""
    name = "experimental.nlp_create_qkv_heads_decode"
    _, (block, first) = operands(name, tensor, offset)
    axes, users = len(tensor.grid), tensor.shape[2]
    if count > users:
        raise OperandError(f"{count} users of {users}", fix="a smaller slice_size")
    index = first.flatten(axes)[..., :1].long() + torch.arange(count)
    inside(name, index, users, "user")
    values = take_along(block, index, axes, 2)
    label = topology_of(moves(same(tensor), (None,) * len(offset.shape)), tensor, offset, shape=values.shape[axes:])
    return Made(values, tensor, label, coords=shared_coords(tensor, offset)).tensor()


USERS = 32  # as many as decoding counts, there or not: the rows of a tile


@op("experimental.nlp_concat_heads_decode")
def nlp_concat_heads_decode(input_tensor, *, num_heads, sub_core_grids=None) -> Made:
    """[1, B, heads, D] as [1, 1, 32, num_heads * D], with zeros for users that are not there.

    Heads beyond `num_heads` are padding and left out. Of a sharded tensor, a core gets a head of all users.
    """
    name = "experimental.nlp_concat_heads_decode"
    device, (block,) = operands(name, input_tensor)
    axes = len(input_tensor.grid)
    if len(input_tensor.shape) != 4 or input_tensor.shape[2] < num_heads:
        raise OperandError(f"ttnn.{name}: {num_heads} heads of {list(input_tensor.shape)}", fix="give [1, B, heads, D]")
    one, users, _, size = input_tensor.shape
    absent = max(0, USERS - users)
    shape = (*block.shape[:axes], one, 1, users, num_heads * size)

    def kernel(x: Block) -> Block:
        heads = x.narrow(-2, 0, num_heads).reshape(shape)
        return torch.nn.functional.pad(heads, (0, 0, 0, absent)) if absent else fresh(heads)

    is_uneven = absent and real_places(input_tensor, [1]) is not None  # zeros are then behind padding
    scales = num_heads == input_tensor.shape[2] and not is_uneven
    part = (one, 1, users + absent, num_heads * size)
    found = compute(
        kernel, (input_tensor,), topology_of(moves((0, 2, 3, None)), input_tensor, shape=part, scales=scales)
    )
    if input_tensor.is_sharded():
        over = _first_cores(num_heads, device.compute_with_storage_grid_size(), sub_core_grids)
        spec = ShardSpec(over, (part[-2], size))
        found.memory_config = MemoryConfig(TensorMemoryLayout.WIDTH_SHARDED, BufferType.L1, spec)
    return found


def _first_cores(count: int, grid: CoreCoord, among: CoreRangeSet | None) -> CoreRangeSet:
    """The first so many cores row by row, of a set if there is one."""
    if among is None:
        return num_cores_to_corerangeset(count, grid, row_wise=True)
    first = CoreCoord(*next(iter(among.cells(True))))
    return num_cores_to_corerangeset_in_subcoregrids(first, count, among, row_wise=True)


# together


def join_heads(name: str, tensor: Tensor, four: bool) -> Made:
    """[B, H, S, D] as [B, S, H * D], of rank 4 or 3."""
    _, (block,) = operands(name, tensor)
    axes = len(tensor.grid)
    if len(tensor.shape) != 4:
        raise OperandError(f"ttnn.{name} takes [B, H, S, D], not {list(tensor.shape)}")
    made = block.transpose(-3, -2).flatten(-2)
    places = (0, 2, 1, None)
    if four:
        made, places = made.unsqueeze(axes + 1), (0, 3, 2, None)
    return make(fresh(made), moves(places), tensor, scales=True)


def _concatenate(name: str, shape: str, four: bool) -> None:
    def call(input_tensor: Tensor) -> Made:
        return join_heads(name, input_tensor, four)

    register(name, f"[B, H, S, D] as {shape}.", call)


_concatenate("experimental.nlp_concat_heads", "[B, 1, S, H * D]", True)
_concatenate("experimental.concatenate_heads", "[B, 1, S, H * D]", True)
_concatenate("transformer.concatenate_heads", "[B, S, H * D]", False)


@op("experimental.nlp_kv_cache_load_slice")
def nlp_kv_cache_load_slice(
    input_tensor, *, seq_len_start, seq_len_end, memory_config=None, output_tensor=None
) -> Tensor:
    """Some positions of a cache [B, H, S, D]."""
    batch, heads, _, size = input_tensor.shape
    starts, ends = (0, 0, seq_len_start, 0), (batch, heads, seq_len_end, size)
    return slice_(input_tensor, starts, ends, memory_config=memory_config, output_tensor=output_tensor)
