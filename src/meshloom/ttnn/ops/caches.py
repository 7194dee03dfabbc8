"""Ops that write into caches of keys and values, in place: the same address, on all devices at once, also in a trace.

A cache that is stored once for all devices gets memory for each before they would differ. A user at position -1 and a
page of number -1 are skipped. Positions and pages outside of the cache are refused where the original writes elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch

from meshloom.errors import OperandError
from meshloom.placement import Shard
from meshloom.runtime import state
from meshloom.ttnn.ops.attending import check_positions, positions_of, regroup
from meshloom.ttnn.ops.block_moves import copy_parts, inside, row_offsets, spread, writable_block
from meshloom.ttnn.ops.calling import Optionals, op, operands
from meshloom.ttnn.ops.topologies import Frame, Rows, rows, topology_of
from meshloom.ttnn.tensor.boxes import take_box
from meshloom.ttnn.tensor.formats import rounded
from meshloom.ttnn.tensor.parts import Block, lead
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import UNKNOWN, PlacementShard, TensorTopology

Coords = Collection[Sequence[int]] | None


# caches [B, H, S, D]


@op(
    "fill_cache",
    "kv_cache.fill_cache_for_user_",
    spelled={"cache": "cache_tensor", "input": "input_tensor", "batch_index": "batch_idx"},
)
def fill_cache(cache_tensor, input_tensor, batch_idx, *, update_idx=0) -> Tensor:
    """Write [1, H, s, D] into the cache of one user, from a position on."""
    _, (_, values) = operands("fill_cache", cache_tensor, input_tensor)
    users, heads, length, size = cache_tensor.shape
    count = input_tensor.shape[2]
    if not 0 <= batch_idx < users:
        raise OperandError(f"ttnn.fill_cache: user {batch_idx} of {users}", fix=f"use 0 to {users - 1}")
    if update_idx < 0 or update_idx + count > length:
        raise OperandError(
            f"ttnn.fill_cache: positions {update_idx} to {update_idx + count - 1} of a cache of {length}",
            fix="a longer cache, or fewer positions",
        )
    if tuple(input_tensor.shape) != (1, heads, count, size):
        raise OperandError(
            f"ttnn.fill_cache: {list(input_tensor.shape)} into a cache {list(cache_tensor.shape)}",
            fix=f"give [1, {heads}, s, {size}]",
        )
    room = writable_block(cache_tensor, values.shape[: len(cache_tensor.grid)])
    target = room.select(-4, batch_idx).narrow(-2, update_idx, count)
    copy_parts(cache_tensor, target, rounded(values.squeeze(-4), cache_tensor.dtype))
    return _update_label(cache_tensor, input_tensor, (1, 2, 3), (1, 2, 3))


@op(
    "update_cache",
    "kv_cache.update_cache_for_token_",
    spelled={"cache_tensor": "cache", "input_tensor": "input", "update_index": "update_idx"},
)
def update_cache(cache, input, update_idx, batch_offset=0) -> Tensor:
    """Write one token of every user, [1, H, users, D], at one position of the cache."""
    _, (_, values) = operands("update_cache", cache, input)
    users, heads, length, size = cache.shape
    if not 0 <= update_idx < length:
        raise OperandError(f"ttnn.update_cache: position {update_idx} of {length}", fix=f"use 0 to {length - 1}")
    if (input.shape[1], input.shape[3]) != (heads, size) or input.shape[2] < batch_offset + users:
        raise OperandError(
            f"ttnn.update_cache: {list(input.shape)} into a cache {list(cache.shape)} with batch_offset={batch_offset}",
            fix=f"give [1, {heads}, {batch_offset + users} or more, {size}]",
        )
    room = writable_block(cache, values.shape[: len(cache.grid)])
    some = values.squeeze(-4).narrow(-2, batch_offset, users).transpose(-3, -2)  # [*mesh, users, H, D]
    copy_parts(cache, room.select(-2, update_idx), rounded(some, cache.dtype))
    return _update_label(cache, input, (2, 1, 3), (0, 1, 3))


# every user at its own position, maybe in pages


_PAGED = Optionals("mesh_coords block_size cache_position_modulo")
_UPDATE = Optionals("update_idxs_tensor share_cache page_table num_kv_heads", update_idxs=(), batch_offset=0)


@op("experimental.paged_update_cache", more=(_UPDATE, _PAGED))
def paged_update_cache(cache_tensor, input_tensor, **how) -> Tensor:
    """Write one token of every user, [1, B, H, D], each at its own position: of [B, H, S, D], or of pages."""
    name, (mesh_coords, block_size, cache_position_modulo) = "experimental.paged_update_cache", _PAGED(how)
    update_idxs_tensor, share_cache, page_table, num_kv_heads, update_idxs, batch_offset = _UPDATE(how)
    others = [tensor for tensor in (update_idxs_tensor, page_table) if tensor is not None]
    blocks = operands(name, cache_tensor, input_tensor, *others)[1]
    axes, users = len(cache_tensor._grid), blocks[1].shape[len(cache_tensor._grid) + 1]
    check_positions(name, update_idxs, update_idxs_tensor, users)
    position = positions_of(update_idxs, None if update_idxs_tensor is None else blocks[2], axes, users)
    if cache_position_modulo is not None:
        position = torch.where(position < 0, position, position % cache_position_modulo)
    geometry = (block_size or 0, num_kv_heads or 0)
    pages, heads, length = regroup(blocks[0], axes, *geometry).shape[axes : axes + 3]
    ends = row = None
    if page_table is not None:
        row, position, skipped = _in_pages(name, page_table.block, position, position < 0, axes, length, batch_offset)
        inside(name, row.masked_fill(skipped, 0), pages, "page")
    else:
        ends = inside(name, position, length, "position", lowest=-1)
        if not share_cache and not 0 <= batch_offset <= pages - users:
            raise OperandError(f"ttnn.{name}: {users} users and a cache of {pages}", fix="a cache for every user")
    values = blocks[1].flatten(axes, axes + 1)[..., :heads, :]  # [*mesh, B, H, D]; heads beyond are padding
    if values.shape[-2] != heads:
        raise OperandError(f"ttnn.{name}: {input_tensor.shape[2]} heads into a cache of {heads}")
    is_plain = not share_cache and mesh_coords is cache_tensor._coords is None
    if is_plain and ends is not None and 0 <= ends[0] == ends[1]:  # all users are at one position
        room = regroup(writable_block(cache_tensor, lead([values, position], axes)), axes, *geometry)
        room.narrow(axes, batch_offset, users).select(-2, ends[0]).copy_(rounded(values, cache_tensor.dtype))
    else:
        if row is None:
            row = torch.zeros_like(position) if share_cache else torch.arange(batch_offset, batch_offset + users)
            row, skipped = row.expand_as(position), position < 0
        skipped = _elsewhere(skipped, cache_tensor, mesh_coords)
        _put(cache_tensor, values, row, position, skipped, geometry, (heads, cache_tensor.shape[-1]))
    if mesh_coords is not None:
        return _unknown(cache_tensor)
    return _update_label(cache_tensor, input_tensor, (1, 2, 3), (0, 1, 3), others)


@op("experimental.paged_fused_update_cache", more=(_UPDATE, _PAGED))
def paged_fused_update_cache(
    cache_tensor1, input_tensor1, cache_tensor2, input_tensor2, **how
) -> tuple[Tensor, Tensor]:
    """`paged_update_cache` of two caches."""
    first = paged_update_cache(cache_tensor1, input_tensor1, **how)
    return first, paged_update_cache(cache_tensor2, input_tensor2, **how)


@op("experimental.paged_fill_cache", more=_PAGED)
def paged_fill_cache(
    cache_tensor, input_tensor, page_table, *, batch_idx_tensor=None, batch_idx=0, valid_seq_len_tensor=None, **how
) -> Tensor:
    """Write a sequence, [1, H, S, D], into the pages of one user."""
    name, (mesh_coords, block_size, cache_position_modulo) = "experimental.paged_fill_cache", _PAGED(how)
    others = [tensor for tensor in (page_table, batch_idx_tensor, valid_seq_len_tensor) if tensor is not None]
    blocks = operands(name, cache_tensor, input_tensor, *others)[1]
    axes = len(cache_tensor.grid)
    seen = regroup(blocks[0], axes, block_size or 0, 0)
    pages, heads, length = seen.shape[axes : axes + 3]
    table = _rows_of_user(name, page_table, batch_idx, batch_idx_tensor, axes)
    count = input_tensor.shape[2]
    if input_tensor.shape[1] != heads:
        raise OperandError(f"ttnn.{name}: {input_tensor.shape[1]} heads into a cache of {heads}")
    position = torch.arange(count).reshape(*(1,) * axes, count)
    skipped = torch.zeros_like(position, dtype=torch.bool)
    if valid_seq_len_tensor is not None:
        skipped = position >= valid_seq_len_tensor.block.flatten(axes)[..., :1]
    if cache_position_modulo is not None:  # of positions that fall together, the last is kept
        skipped = skipped | (position < count - cache_position_modulo)
        position = position % cache_position_modulo
    if count > table.shape[-1] * length and cache_position_modulo is None:
        raise OperandError(
            f"ttnn.{name}: {count} positions and {table.shape[-1]} pages of {length}", fix="a longer page table"
        )
    page = torch.take_along_dim(*_wide(table, position // length, axes), dim=-1)
    skipped = skipped | (page < 0)
    inside(name, torch.where(skipped, torch.zeros_like(page), page), pages, "page")
    values = blocks[1].squeeze(axes).transpose(-3, -2)  # [*mesh, S, H, D]
    skipped = _elsewhere(skipped, cache_tensor, mesh_coords)
    whole = (heads, cache_tensor.shape[-1])
    _put(cache_tensor, values, page, position % length, skipped, (block_size or 0, 0), whole)
    if mesh_coords is not None:
        return _unknown(cache_tensor)
    return _update_label(cache_tensor, input_tensor, (1, 3), (1, 3), others)


def _wide(table: Block, index: Block, axes: int) -> tuple[Block, Block]:
    """A table and numbers of its entries, with the mesh axes of both."""
    wide, numbers = spread([table, index], axes)
    return wide.long(), numbers.long()


def _in_pages(
    name: str, table: Block, position: Block, skipped: Block, axes: int, length: int, offset: int
) -> tuple[Block, Block, Block]:
    """The page of every user's position, and the position inside it."""
    users = position.shape[-1]
    rows = table.narrow(axes, offset, users).long()
    inside(name, position, rows.shape[-1] * length, "position", lowest=-1)
    entry = (position.clamp(min=0) // length).unsqueeze(-1)
    page = torch.take_along_dim(*_wide(rows, entry, axes), dim=-1).squeeze(-1)
    return page, position.clamp(min=0) % length, skipped | (page < 0)


def _rows_of_user(name: str, table: Tensor, user: int, tensor: Tensor | None, axes: int) -> Block:
    """The pages of one user, [*mesh, m]."""
    pages = table.block.reshape(*table.block.shape[:axes], -1, table.shape[-1])
    if tensor is None:
        if not 0 <= user < pages.shape[axes]:
            raise OperandError(f"ttnn.{name}: user {user} of {pages.shape[axes]} in the page table")
        return pages.select(axes, user)
    numbers = tensor.block.flatten(axes)[..., :1].long()
    inside(name, numbers, pages.shape[axes], "user")
    wide, index = _wide(pages, numbers.unsqueeze(-1).expand(*numbers.shape, pages.shape[-1]), axes)
    return wide.gather(axes, index).squeeze(axes)


def _elsewhere(skipped: Block, cache: Tensor, coords: Coords) -> Block:
    """With all devices skipped but those at some coordinates, or those that a cache on part of a mesh lies on."""
    coords = cache._coords if coords is None else coords
    if coords is None:
        return skipped
    here = torch.zeros(cache.grid, dtype=torch.bool)
    for place in coords:
        here[tuple(place)] = True
    here = take_box(here, cache.grid)
    return skipped | ~here.reshape(*here.shape, *(1,) * (skipped.dim() - here.dim()))


def _put(
    cache: Tensor,
    values: Block,
    page: Block,
    position: Block,
    skipped: Block,
    geometry: tuple[int, int],
    whole: tuple[int, int],
) -> None:
    """Write rows [*mesh, n, H, D] at pages and positions [*mesh, n] of every device; a skipped row is not written.

    Which rows are skipped is known on replay only, and every row of one call writes somewhere: a skipped one repeats
    the first that is not, or writes what is there if all are skipped.
    """
    axes, count = len(cache.grid), values.shape[len(cache.grid)]
    room = regroup(writable_block(cache, lead([values, page, position, skipped], axes)), axes, *geometry)
    sizes = room.shape[:axes]
    if state.capture is None and not bool(skipped.any()):
        flat, offsets = room.view(-1, *room.shape[axes + 1 :]), row_offsets(room, axes, room.shape[axes], 1)
        row, column = (page + offsets).expand(*sizes, count).flatten(), position.expand(*sizes, count).flatten()
        flat[row, :, column] = rounded(values, cache.dtype).expand(*sizes, count, *whole).flatten(0, axes)
        return
    page, position, skipped = (each.expand(*sizes, count) for each in (page, position, skipped))
    source = torch.where(skipped, skipped.to(torch.int8).argmin(-1, keepdim=True), torch.arange(count))
    none = skipped.all(-1).reshape(*sizes, 1, 1, 1)
    at = [torch.where(none[..., 0, 0], torch.zeros_like(each), each.gather(-1, source)) for each in (page, position)]
    flat = room.view(-1, *room.shape[axes + 1 :])
    row, column = ((at[0] + row_offsets(room, axes, room.shape[axes], 1)).flatten(), at[1].flatten())
    wide = rounded(values, cache.dtype).expand(*sizes, count, *whole)
    new = wide.gather(axes, source.reshape(*sizes, count, 1, 1).expand(wide.shape))
    old = flat[row, :, column].reshape(new.shape)
    flat[row, :, column] = torch.where(none, old, new).flatten(0, axes)


# labels


def _update_label(
    cache: Tensor, source: Tensor, dims: Sequence[int], places: Sequence[int], others: Sequence[Tensor] = ()
) -> Tensor:
    """The label of a cache after a write: what cuts the tokens cuts the cache, unless it is cut otherwise already.

    A cache that one axis cuts and tokens that only another one cuts are shards of unlike global tensors: 2 x H heads
    and 4 x H on a mesh of 2x4. There is no global tensor of the result.
    """
    label = topology_of(_update_rows(len(cache.shape), tuple(dims), tuple(places), len(others)), cache, source, *others)
    if label is not cache.tensor_topology():
        label = _without_strangers(label, Frame([cache, source, *others]))
    cache.update_tensor_topology(label)
    return cache


@functools.cache
def _update_rows(rank: int, dims: tuple[int, ...], places: tuple[int, ...], others: int) -> Rows:
    every, beside, alike = range(rank), ", *" * others, ", R" * others
    cuts = [
        f"{now}, S({dim}){beside} -> S({place})"
        for dim, place in zip(dims, places, strict=True)
        for now in (f"S({place})", "R")
    ]
    # Rows of its own on every device: whatever it writes there, they stand side by side.
    kept = ["R", "P(unknown)", *(f"S({dim})" for dim in every if dim not in dims)]
    cuts += [f"S({dim}), {new}{beside} -> S({dim})" for dim in every for new in kept]
    cuts += [f"{each}, {each}{alike} -> {each}" for each in ("R", "P(sum)", "P(mean)")]
    return rows(*cuts, exact=True)


def _without_strangers(label: TensorTopology, frame: Frame) -> TensorTopology:
    """Unknown along the axes that cut the tokens alone, if another axis cuts the cache alone."""
    pairs = [tuple(isinstance(each, Shard) for each in pair) for pair in zip(*frame.axes[:2], strict=True)]
    if (True, False) not in pairs or (False, True) not in pairs:
        return label
    placements = label.placements() * (len(pairs) // len(label.placements()))
    told = zip(placements, pairs, strict=True)
    return frame.topology([UNKNOWN if pair == (False, True) else each for each, pair in told])


def _unknown(cache: Tensor) -> Tensor:
    """The label of a cache of which only some devices wrote."""
    label = cache.tensor_topology()
    placements = [each if isinstance(each, PlacementShard) else UNKNOWN for each in label.placements()]
    cache.update_tensor_topology(label.with_placements(placements))
    return cache


# positions


@op("plus_one")
def plus_one(input_tensor: Tensor, skip_negative_entries=False) -> Tensor:
    """One more, in place; entries below zero stay if asked for."""
    _, (block,) = operands("plus_one", input_tensor)
    if input_tensor.dtype.is_float:
        raise OperandError(f"ttnn.plus_one takes integers, not {input_tensor.dtype}", fix="ttnn.int32 or ttnn.uint32")
    step = (block >= 0).to(block.dtype) if skip_negative_entries else 1
    room = writable_block(input_tensor, block.shape[: len(input_tensor.grid)])
    copy_parts(input_tensor, room, rounded(block + step, input_tensor.dtype))
    return input_tensor
