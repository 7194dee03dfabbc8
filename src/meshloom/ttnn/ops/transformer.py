"""Attention in TTNN's forms: whole sequences, one token of every user, caches of pages, latent keys; and its softmax.

Layouts: a whole sequence is q [B, H, S, D] with k, v [B, K, T, D]; decoding is q [1, B, H, D] with caches [B, K, T, D]
or pages [P, K, n, D] and a table [B, m] of their numbers. A user at position -1 is skipped: its row is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.calling import op, operands, result, shared_coords
from meshloom.ttnn.labels import merged
from meshloom.ttnn.memory import MemoryConfig
from meshloom.ttnn.ops.attending import attend, label, mask_of, paged, sink_of, within
from meshloom.ttnn.ops.heads import nlp_concat_heads
from meshloom.ttnn.parts import Block
from meshloom.ttnn.tensor import Tensor

__all__ = ["PagedCacheGeometryOverride"]

_QUASAR = "experimental.quasar.transformer."


@dataclass
class PagedCacheGeometryOverride:
    """A paged cache seen with pages of another size or with another number of heads; 0 leaves it as it is."""

    block_size: int = 0
    num_kv_heads: int = 0

    def active(self) -> bool:
        """Whether it changes something."""
        return bool(self.block_size or self.num_kv_heads)


def _out(
    values: Block,
    tensors: Sequence[Tensor],
    name: str,
    memory: MemoryConfig | None,
    q_dims: Sequence[int] = (0, 1, 2),
) -> Tensor:
    topology = label(name, tensors, q_dims)
    return result(values, tensors[0], topology=topology, memory_config=memory, coords=shared_coords(*tensors))


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Shapes that go together."""
    for tensor in (q, k, v):
        if len(tensor.shape) != 4:
            raise OperandError(f"ttnn.{name} takes tensors of rank 4, not {list(tensor.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise OperandError(f"ttnn.{name}: heads of {q.shape[-1]} (queries) and {k.shape[-1]} (keys)")
    if tuple(k.shape[:3]) != tuple(v.shape[:3]):
        raise OperandError(f"ttnn.{name}: keys {list(k.shape)} and values {list(v.shape)} differ")
    if heads % k.shape[1]:
        raise OperandError(f"ttnn.{name}: {heads} query heads do not divide among {k.shape[1]} key heads")


# whole sequences


@op("transformer.scaled_dot_product_attention", _QUASAR + "scaled_dot_product_attention")
def scaled_dot_product_attention(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
    attention_sink: Tensor | None = None,
    cu_window_seqlens: Tensor | None = None,
    windowed_q_token_offset: int = 0,
    windowed_q_token_offset_tensor: Tensor | None = None,
    output_concat_heads: bool = False,
    attn_mask_block_map: Tensor | None = None,
) -> Tensor:
    """softmax(q @ k.T * scale + mask) @ v; causal unless said otherwise.

    A sliding window is the nearest `sliding_window_size` positions, half of them on each side if not causal. Windows of
    `cu_window_seqlens` see only themselves. A sink is multiplied by the scale like every logit.
    """
    name = "transformer.scaled_dot_product_attention"
    tensors = _given(
        input_tensor_q, input_tensor_k, input_tensor_v, attn_mask, cu_window_seqlens, windowed_q_token_offset_tensor
    )
    q, k, v = operands(name, *tensors)[1][:3]
    _check(name, input_tensor_q, input_tensor_k, input_tensor_v, input_tensor_q.shape[1])
    if input_tensor_q.shape[0] != input_tensor_k.shape[0]:
        raise OperandError(f"ttnn.{name}: batches of {input_tensor_q.shape[0]} and {input_tensor_k.shape[0]}")
    axes, windowed = len(input_tensor_q.grid), cu_window_seqlens is not None
    causal = is_causal and not windowed
    if causal and attn_mask is not None:
        raise OperandError(f"ttnn.{name}: is_causal=True and attn_mask exclude each other", fix="is_causal=False")
    if causal and q.shape[-2] != k.shape[-2]:
        raise OperandError(
            f"ttnn.{name}: causal attention of {q.shape[-2]} queries over {k.shape[-2]} keys",
            fix="as many keys as queries, or ttnn.transformer.chunked_scaled_dot_product_attention",
        )
    seen = None
    if windowed:
        assert cu_window_seqlens is not None
        seen = _same_window(q, k, axes, cu_window_seqlens, windowed_q_token_offset, windowed_q_token_offset_tensor)
    elif sliding_window_size is not None:
        seen = _near(q.shape[-2], k.shape[-2], sliding_window_size, causal)[(None,) * (axes + 2)]
    values = attend(
        q,
        k,
        v,
        axes,
        scale=scale,
        causal=causal,
        seen=seen,
        bias=mask_of(attn_mask),
        sink=sink_of(name, attention_sink, input_tensor_q.shape[1]),
    )
    if output_concat_heads:
        return _heads_together(values, tensors, name, memory_config, axes)
    return _out(values, tensors, name, memory_config)


def _near(queries: int, keys: int, window: int, causal: bool) -> Block:
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    if causal:
        return within(columns, rows, window)
    return (rows - columns).abs() <= window // 2


def _same_window(q: Block, k: Block, axes: int, bounds: Tensor, offset: int, offsets: Tensor | None) -> Block:
    """Queries and keys of one window: `bounds` are where windows begin, and the end of the last."""
    ends = bounds.block.flatten(axes)
    shift = torch.tensor(offset) if offsets is None else offsets.block.flatten(axes)[..., :1]
    rows = (torch.arange(q.shape[-2]) + shift).unsqueeze(-1) >= ends.unsqueeze(-2)
    columns = torch.arange(k.shape[-2]).unsqueeze(-1) >= ends.unsqueeze(-2)
    windows, others = rows.sum(-1), columns.sum(-1)
    seen = windows.unsqueeze(-1) == others.unsqueeze(-2)
    return seen.reshape(*seen.shape[:axes], 1, 1, *seen.shape[axes:])


def _heads_together(
    values: Block, tensors: Sequence[Tensor], name: str, memory: MemoryConfig | None, axes: int
) -> Tensor:
    return nlp_concat_heads(_out(values, tensors, name, None), memory_config=memory)


@op("transformer.joint_scaled_dot_product_attention", _QUASAR + "joint_scaled_dot_product_attention")
def joint_scaled_dot_product_attention(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    joint_tensor_q: Tensor,
    joint_tensor_k: Tensor,
    joint_tensor_v: Tensor,
    *,
    joint_strategy: str = "rear",
    program_config: Any = None,
    scale: float | None = None,
    compute_kernel_config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Attention of two sequences as if one followed the other, without a mask; their results apart."""
    name = "transformer.joint_scaled_dot_product_attention"
    if joint_strategy != "rear":
        raise ArgumentError(f"ttnn.{name}: joint_strategy={joint_strategy!r}", fix="'rear'")
    first, second = (input_tensor_q, input_tensor_k, input_tensor_v), (joint_tensor_q, joint_tensor_k, joint_tensor_v)
    blocks = operands(name, *first, *second)[1]
    axes, length = len(input_tensor_q.grid), input_tensor_q.shape[2]
    sizes = torch.broadcast_shapes(*(block.shape[:axes] for block in blocks))
    wide = [block.expand(*sizes, *block.shape[axes:]) for block in blocks]
    q, k, v = (torch.cat(pair, dim=-2) for pair in zip(wide[:3], wide[3:], strict=True))
    values = attend(q, k, v, axes, scale=scale)
    return (
        _out(values[..., :length, :].contiguous(), (*first, *second), name, None),
        _out(values[..., length:, :].contiguous(), (*second, *first), name, None),
    )


# pages


@op("transformer.chunked_scaled_dot_product_attention", _QUASAR + "chunked_scaled_dot_product_attention")
def chunked_scaled_dot_product_attention(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    page_table_tensor: Tensor,
    chunk_start_idx: int | None = None,
    *,
    chunk_start_idx_tensor: Tensor | None = None,
    scale: float | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
    paged_cache_geometry: PagedCacheGeometryOverride | None = None,
    sliding_window_size: int | None = None,
    attention_sink: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of a sequence, at `chunk_start_idx`, over all of it up to there in pages."""
    name = "transformer.chunked_scaled_dot_product_attention"
    return _chunk(
        name,
        (input_tensor_q, input_tensor_k, input_tensor_v),
        page_table_tensor,
        chunk_start_idx,
        chunk_start_idx_tensor,
        scale,
        memory_config,
        paged_cache_geometry,
        sliding_window_size,
        attention_sink,
    )


def _chunk(
    name: str,
    three: Sequence[Tensor],
    table: Tensor,
    start: int | None,
    start_tensor: Tensor | None,
    scale: float | None,
    memory: MemoryConfig | None,
    geometry: PagedCacheGeometryOverride | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    tensors = _given(*three, table, start_tensor)
    q, k, v, pages = operands(name, *tensors)[1][:4]
    axes = len(three[0].grid)
    sizes = (geometry.block_size, geometry.num_kv_heads) if geometry is not None else (0, 0)
    keys = paged(k, pages, axes, *sizes)
    values = paged(v, pages, axes, *sizes)[..., :width]
    if start_tensor is not None:
        first = start_tensor.block.flatten(axes)[..., :1]
    elif start is not None:
        first = torch.full((1,) * (axes + 1), start)
        if start + q.shape[-2] > keys.shape[-2]:
            raise OperandError(f"ttnn.{name}: positions up to {start + q.shape[-2]} of {keys.shape[-2]} in the pages")
    else:
        raise ArgumentError(f"ttnn.{name}: chunk_start_idx or chunk_start_idx_tensor")
    rows = (first + torch.arange(q.shape[-2])).unsqueeze(-1)
    seen = within(torch.arange(keys.shape[-2]), rows, window)
    found = attend(
        q,
        keys,
        values,
        axes,
        scale=scale,
        seen=seen.reshape(*seen.shape[:axes], 1, 1, *seen.shape[axes:]),
        sink=sink_of(name, sink, three[0].shape[1]),
    )
    return _out(found, tensors, name, memory)


# one token of every user


@op("transformer.scaled_dot_product_attention_decode", _QUASAR + "scaled_dot_product_attention_decode")
def scaled_dot_product_attention_decode(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    *,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    cur_pos: Sequence[int] = (),
    cur_pos_tensor: Tensor | None = None,
    attention_sink: Tensor | None = None,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
    share_cache: bool | None = None,
) -> Tensor:
    """One token of every user, [1, B, H, D], over the positions of its cache up to its own."""
    name = "transformer.scaled_dot_product_attention_decode"
    three = (input_tensor_q, input_tensor_k, input_tensor_v)
    _check(name, *three, input_tensor_q.shape[2])
    if not share_cache and input_tensor_k.shape[0] < input_tensor_q.shape[1]:
        raise OperandError(
            f"ttnn.{name}: {input_tensor_q.shape[1]} users and a cache of {input_tensor_k.shape[0]}",
            fix="share_cache=True if all users have one cache",
        )
    users = input_tensor_q.shape[1]

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        if share_cache:
            return [block.expand(*block.shape[:axes], users, *block.shape[axes + 1 :]) for block in blocks]
        return [block.narrow(axes, 0, users) for block in blocks]

    return _decode(
        name,
        three,
        caches,
        (),
        is_causal,
        attn_mask,
        cur_pos,
        cur_pos_tensor,
        attention_sink,
        scale,
        sliding_window_size,
        memory_config,
    )


@op("transformer.paged_scaled_dot_product_attention_decode", _QUASAR + "paged_scaled_dot_product_attention_decode")
def paged_scaled_dot_product_attention_decode(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    page_table_tensor: Tensor,
    *,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    cur_pos_tensor: Tensor | None = None,
    attention_sink: Tensor | None = None,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
    paged_cache_geometry: PagedCacheGeometryOverride | None = None,
    cache_position_modulo: int | None = None,
    spec_multi_pos_tiles: int = 0,
) -> Tensor:
    """`scaled_dot_product_attention_decode` over pages [P, K, n, D] that a table [B, m] puts in order."""
    name = "transformer.paged_scaled_dot_product_attention_decode"
    if spec_multi_pos_tiles:
        raise OperandError(f"ttnn.{name}: spec_multi_pos_tiles={spec_multi_pos_tiles} is not covered", fix="0")
    return _paged_decode(
        name,
        (input_tensor_q, input_tensor_k, input_tensor_v),
        page_table_tensor,
        is_causal,
        attn_mask,
        cur_pos_tensor,
        attention_sink,
        scale,
        sliding_window_size,
        memory_config,
        paged_cache_geometry,
        cache_position_modulo,
    )


def _paged_decode(
    name: str,
    three: Sequence[Tensor],
    table: Tensor,
    causal: bool,
    mask: Tensor | None,
    positions: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    window: int | None,
    memory: MemoryConfig | None,
    geometry: PagedCacheGeometryOverride | None = None,
    modulo: int | None = None,
    width: int | None = None,
) -> Tensor:
    sizes = (geometry.block_size, geometry.num_kv_heads) if geometry is not None else (0, 0)

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        return [paged(block, table.block, axes, *sizes) for block in blocks]

    return _decode(
        name, three, caches, (table,), causal, mask, (), positions, sink, scale, window, memory, modulo, width
    )


def _decode(
    name: str,
    three: Sequence[Tensor],
    caches: Any,
    others: Sequence[Tensor],
    causal: bool,
    mask: Tensor | None,
    positions: Sequence[int],
    positions_tensor: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    window: int | None,
    memory: MemoryConfig | None,
    modulo: int | None = None,
    width: int | None = None,
) -> Tensor:
    """Query heads that share a key head are the rows of one product, so that keys are not repeated."""
    tensors = _given(*three, *others, mask, positions_tensor)
    blocks = operands(name, *tensors)[1]
    axes, heads = len(three[0].grid), three[0].shape[2]
    k, v = caches(blocks[1:3], axes)
    groups = (k.shape[-3], heads // k.shape[-3])
    q = blocks[0].flatten(axes, axes + 1).unflatten(-2, groups)  # [*mesh, B, K, H / K, D]
    seen = bias = None
    if causal:
        last = _last(name, positions, positions_tensor, axes, three[0].shape[1])
        seen = within(torch.arange(k.shape[-2]), last[..., None], window, modulo)[..., None, None, :]
    if mask is not None:
        bias = _by_groups(mask_of(mask), axes, heads, groups)
    column = sink_of(name, sink, heads)
    found = attend(
        q,
        k,
        v[..., :width],
        axes,
        scale=scale,
        seen=seen,
        bias=bias,
        sink=None if column is None else column.reshape(*column.shape[: axes + 1], *groups, 1),
    )
    values = found.flatten(-3, -2).unsqueeze(axes)
    return _out(values, tensors, name, memory, q_dims=(1, 2))


def _last(name: str, positions: Sequence[int], tensor: Tensor | None, axes: int, users: int) -> Block:
    """The position of every user, [*mesh, B]."""
    if tensor is not None:
        return tensor.block.flatten(axes)[..., :users].long()
    if len(positions) != users:
        raise OperandError(
            f"ttnn.{name}: {len(positions)} positions for {users} users", fix="cur_pos or cur_pos_tensor with one each"
        )
    return torch.tensor(list(positions)).reshape(*(1,) * axes, users)


def _by_groups(mask: Block | None, axes: int, heads: int, groups: tuple[int, int]) -> Block | None:
    """A mask [B, 1, H or 1, T] as [B, K, H / K, T]; rows beyond the heads are padding."""
    if mask is None or mask.shape[-2] == 1:
        return mask
    return mask[..., :heads, :].flatten(axes + 1, axes + 2).unflatten(axes + 1, groups)


# latent keys, whose first elements are the values


@op("transformer.flash_mla_prefill", _QUASAR + "flash_mla_prefill")
def flash_mla_prefill(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    head_dim_v: int | Tensor | None = None,
    *,
    input_tensor_v: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
) -> Tensor:
    """Attention whose values are the first `head_dim_v` elements of its keys, or given apart."""
    name = "transformer.flash_mla_prefill"
    value = head_dim_v if isinstance(head_dim_v, Tensor) else input_tensor_v
    width = head_dim_v if isinstance(head_dim_v, int) else None
    tensors = _given(input_tensor_q, input_tensor_k, value if value is not None else input_tensor_k, attn_mask)
    q, k, v = operands(name, *tensors)[1][:3]
    if is_causal and attn_mask is not None:
        raise OperandError(f"ttnn.{name}: is_causal=True and attn_mask exclude each other", fix="is_causal=False")
    found = attend(
        q, k, v[..., :width], len(input_tensor_q.grid), scale=scale, causal=is_causal, bias=mask_of(attn_mask)
    )
    return _out(found, tensors, name, memory_config)


@op("transformer.chunked_flash_mla_prefill", _QUASAR + "chunked_flash_mla_prefill")
def chunked_flash_mla_prefill(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    head_dim_v: int,
    page_table_tensor: Tensor,
    chunk_start_idx: int,
    *,
    scale: float | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
) -> Tensor:
    """`flash_mla_prefill` of a chunk over pages."""
    name = "transformer.chunked_flash_mla_prefill"
    three = (input_tensor_q, input_tensor_k, input_tensor_k)
    return _chunk(name, three, page_table_tensor, chunk_start_idx, None, scale, memory_config, width=head_dim_v)


@op("transformer.flash_multi_latent_attention_decode", _QUASAR + "flash_multi_latent_attention_decode")
def flash_multi_latent_attention_decode(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor | None = None,
    head_dim_v: int | None = None,
    *,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    cur_pos: Sequence[int] = (),
    cur_pos_tensor: Tensor | None = None,
    attention_sink: Tensor | None = None,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
) -> Tensor:
    """`scaled_dot_product_attention_decode` whose values are the first `head_dim_v` elements of its keys."""
    name = "transformer.flash_multi_latent_attention_decode"

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        return [block.narrow(axes, 0, input_tensor_q.shape[1]) for block in blocks]

    return _decode(
        name,
        (input_tensor_q, input_tensor_k, input_tensor_v if input_tensor_v is not None else input_tensor_k),
        caches,
        (),
        is_causal,
        attn_mask,
        cur_pos,
        cur_pos_tensor,
        attention_sink,
        scale,
        sliding_window_size,
        memory_config,
        width=head_dim_v,
    )


@op("transformer.paged_flash_multi_latent_attention_decode", _QUASAR + "paged_flash_multi_latent_attention_decode")
def paged_flash_multi_latent_attention_decode(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor | None = None,
    head_dim_v: int | None = None,
    page_table_tensor: Tensor | None = None,
    *,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    cur_pos_tensor: Tensor | None = None,
    attention_sink: Tensor | None = None,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    memory_config: MemoryConfig | None = None,
    program_config: Any = None,
    compute_kernel_config: Any = None,
) -> Tensor:
    """`flash_multi_latent_attention_decode` over pages."""
    name = "transformer.paged_flash_multi_latent_attention_decode"
    if page_table_tensor is None:
        raise ArgumentError(f"ttnn.{name}: page_table_tensor is missing")
    return _paged_decode(
        name,
        (input_tensor_q, input_tensor_k, input_tensor_v if input_tensor_v is not None else input_tensor_k),
        page_table_tensor,
        is_causal,
        attn_mask,
        cur_pos_tensor,
        attention_sink,
        scale,
        sliding_window_size,
        memory_config,
        width=head_dim_v,
    )


# the softmax alone


@op("transformer.attention_softmax")
def attention_softmax(
    tensor: Tensor,
    *,
    head_size: int | None = None,
    attention_mask: Tensor | None = None,
    program_config: Any = None,
    causal_mask: bool | None = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """softmax(x / sqrt(head_size) + mask) over the last dim."""
    return _softmax("transformer.attention_softmax", tensor, head_size, attention_mask, memory_config, None)


@op("transformer.attention_softmax_")
def attention_softmax_(
    tensor: Tensor,
    *,
    head_size: int | None = None,
    attention_mask: Tensor | None = None,
    program_config: Any = None,
    causal_mask: bool | None = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """`attention_softmax` in place."""
    return _softmax("transformer.attention_softmax_", tensor, head_size, attention_mask, memory_config, tensor)


def _softmax(
    name: str,
    tensor: Tensor,
    head_size: int | None,
    mask: Tensor | None,
    memory: MemoryConfig | None,
    output: Tensor | None,
) -> Tensor:
    tensors = _given(tensor, mask)
    scores, *added = operands(name, *tensors)[1]
    logits = scores.float() / (head_size**0.5 if head_size is not None else 1.0)
    for bias in added:
        logits = logits + bias.float()
    return result(
        torch.softmax(logits, dim=-1),
        tensor,
        topology=merged(tensors, len(tensor.shape)),
        memory_config=memory,
        output_tensor=output,
        coords=shared_coords(*tensors),
    )
