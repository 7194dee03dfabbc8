"""Attention of whole sequences and of chunks over pages, with latent keys too; and its softmax alone.

Queries are [B, H, S, D], keys and values [B, K, T, D] or pages [P, K, n, D] with a table [B, m] of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.attending import attend, attention_topology, mask_of, read_pages, sink_of, within
from meshloom.ttnn.ops.calling import Made, Optionals, make, op, operands, shared_coords
from meshloom.ttnn.ops.heads import join_heads
from meshloom.ttnn.ops.topologies import EACH
from meshloom.ttnn.tensor.padding import fill_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["PagedCacheGeometryOverride"]


@dataclass
class PagedCacheGeometryOverride:
    """A paged cache seen with pages of another size or with another number of heads; 0 leaves it as it is."""

    block_size: int = 0
    num_kv_heads: int = 0

    def active(self) -> bool:
        """Whether it changes something."""
        return bool(self.block_size or self.num_kv_heads)


def out(values: Block, tensors: Sequence[Tensor], placed: bool = False) -> Made:
    """The result of attention of (q, k, v, others...), like q."""
    label = attention_topology(tensors, placed=placed)
    return Made(values, tensors[0], label, coords=shared_coords(*tensors))


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors that are there."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def check(name: str, q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
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


_ATTENTION = Optionals("attn_mask scale", is_causal=True)
_WINDOWS = Optionals("sliding_window_size cu_window_seqlens windowed_q_token_offset_tensor", windowed_q_token_offset=0)


@op("transformer.scaled_dot_product_attention", more=(_ATTENTION, _WINDOWS))
def scaled_dot_product_attention(
    input_tensor_q, input_tensor_k, input_tensor_v, *, attention_sink=None, output_concat_heads=False, **how
) -> Made:
    """softmax(q @ k.T * scale + mask) @ v; causal unless said otherwise.

    A sliding window is the nearest `sliding_window_size` positions, half of them on each side if not causal. Windows of
    `cu_window_seqlens` see only themselves. A sink is multiplied by the scale like every logit.
    """
    name, (attn_mask, scale, is_causal) = "transformer.scaled_dot_product_attention", _ATTENTION(how)
    window, bounds, offsets, offset = _WINDOWS(how)
    others = (attn_mask, attention_sink, bounds, offsets)
    tensors = present(input_tensor_q, input_tensor_k, input_tensor_v, *others)
    q, k, v = operands(name, *tensors)[1][:3]
    check(name, input_tensor_q, input_tensor_k, input_tensor_v, input_tensor_q.shape[1])
    if input_tensor_q.shape[0] != input_tensor_k.shape[0]:
        raise OperandError(f"ttnn.{name}: batches of {input_tensor_q.shape[0]} and {input_tensor_k.shape[0]}")
    axes, windowed = len(input_tensor_q.grid), bounds is not None
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
        seen = _same_window(q, k, axes, bounds, offset, offsets)
    elif window is not None:
        seen = _near(q.shape[-2], k.shape[-2], window, causal)[(None,) * (axes + 2)]
    sink = None if attention_sink is None else sink_of(name, attention_sink.block, axes, input_tensor_q.shape[1])
    values = attend(q, k, v, axes, scale=scale, causal=causal, seen=seen, bias=mask_of(attn_mask), sink=sink)
    made = out(values, tensors, placed=causal or seen is not None)
    return join_heads("experimental.nlp_concat_heads", made.tensor(), True) if output_concat_heads else made


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


@op("transformer.joint_scaled_dot_product_attention")
def joint_scaled_dot_product_attention(
    input_tensor_q,
    input_tensor_k,
    input_tensor_v,
    joint_tensor_q,
    joint_tensor_k,
    joint_tensor_v,
    *,
    joint_strategy="rear",
    scale=None,
) -> tuple[Made, Made]:
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
        out(values[..., :length, :].contiguous(), (*first, *second)),
        out(values[..., length:, :].contiguous(), (*second, *first)),
    )


# pages


def _chunk(
    name: str,
    three: Sequence[Tensor],
    table: Tensor,
    start: int | None,
    width: int | None = None,
    *,
    chunk_start_idx_tensor: Tensor | None = None,
    scale=None,
    paged_cache_geometry=None,
    sliding_window_size=None,
    attention_sink=None,
) -> Made:
    tensors = present(*three, table, chunk_start_idx_tensor, attention_sink)
    q, k, v, pages = operands(name, *tensors)[1][:4]
    axes = len(three[0].grid)
    geometry = paged_cache_geometry or PagedCacheGeometryOverride()
    sizes = (geometry.block_size, geometry.num_kv_heads)
    keys = read_pages(k, pages, axes, *sizes)
    values = read_pages(v, pages, axes, *sizes)[..., :width]
    if chunk_start_idx_tensor is not None:
        first = chunk_start_idx_tensor.block.flatten(axes)[..., :1]
    elif start is not None:
        first = torch.full((1,) * (axes + 1), start)
        if start + q.shape[-2] > keys.shape[-2]:
            raise OperandError(f"ttnn.{name}: positions up to {start + q.shape[-2]} of {keys.shape[-2]} in the pages")
    else:
        raise ArgumentError(f"ttnn.{name}: chunk_start_idx or chunk_start_idx_tensor")
    rows = (first + torch.arange(q.shape[-2])).unsqueeze(-1)
    seen = within(torch.arange(keys.shape[-2]), rows, sliding_window_size)
    seen = seen.reshape(*seen.shape[:axes], 1, 1, *seen.shape[axes:])
    sink = None if attention_sink is None else sink_of(name, attention_sink.block, axes, three[0].shape[1])
    return out(attend(q, keys, values, axes, scale=scale, seen=seen, sink=sink), tensors, placed=True)


@op("transformer.chunked_scaled_dot_product_attention", more=_chunk)
def chunked_scaled_dot_product_attention(
    input_tensor_q, input_tensor_k, input_tensor_v, page_table_tensor, chunk_start_idx=None, **how
) -> Made:
    """Causal attention of a chunk of a sequence, at `chunk_start_idx`, over all of it up to there in pages."""
    three = (input_tensor_q, input_tensor_k, input_tensor_v)
    name = "transformer.chunked_scaled_dot_product_attention"
    return _chunk(name, three, page_table_tensor, chunk_start_idx, **how)


# latent keys, whose first elements are the values


@op("transformer.flash_mla_prefill", more=_ATTENTION)
def flash_mla_prefill(
    input_tensor_q, input_tensor_k, head_dim_v: int | Tensor | None = None, *, input_tensor_v=None, **how
) -> Made:
    """Attention whose values are the first `head_dim_v` elements of its keys, or given apart."""
    name, (attn_mask, scale, is_causal) = "transformer.flash_mla_prefill", _ATTENTION(how)
    value = head_dim_v if isinstance(head_dim_v, Tensor) else input_tensor_v
    width = head_dim_v if isinstance(head_dim_v, int) else None
    tensors = present(input_tensor_q, input_tensor_k, value if value is not None else input_tensor_k, attn_mask)
    q, k, v = operands(name, *tensors)[1][:3]
    check(name, tensors[0], tensors[1], tensors[2], q.shape[-3])
    if is_causal and attn_mask is not None:
        raise OperandError(f"ttnn.{name}: is_causal=True and attn_mask exclude each other", fix="is_causal=False")
    found = attend(
        q, k, v[..., :width], len(input_tensor_q.grid), scale=scale, causal=is_causal, bias=mask_of(attn_mask)
    )
    return out(found, tensors, placed=is_causal)


@op("transformer.chunked_flash_mla_prefill")
def chunked_flash_mla_prefill(
    input_tensor_q, input_tensor_k, head_dim_v, page_table_tensor, chunk_start_idx, *, scale=None
) -> Made:
    """`flash_mla_prefill` of a chunk over pages."""
    name = "transformer.chunked_flash_mla_prefill"
    three = (input_tensor_q, input_tensor_k, input_tensor_k)
    return _chunk(name, three, page_table_tensor, chunk_start_idx, head_dim_v, scale=scale)


# the softmax alone


@op("transformer.attention_softmax")
def attention_softmax(tensor, *, head_size=None, attention_mask=None) -> Made:
    """softmax(x / sqrt(head_size) + mask) over the last dim."""
    return _softmax("transformer.attention_softmax", tensor, head_size, attention_mask)


@op("transformer.attention_softmax_")
def attention_softmax_(tensor, *, head_size=None, attention_mask=None) -> Made:
    """`attention_softmax` in place."""
    return _softmax("transformer.attention_softmax_", tensor, head_size, attention_mask).into(tensor)


def _softmax(name: str, tensor: Tensor, head_size: int | None, mask: Tensor | None) -> Made:
    tensors = present(tensor, mask)
    scores, *added = operands(name, *tensors)[1]
    logits = scores.float() / (head_size**0.5 if head_size is not None else 1.0)
    for bias in added:
        logits = logits + bias.float()
    found = torch.softmax(fill_padding(logits, tensor, [-1], "max"), dim=-1)
    return make(fill_padding(found, tensor, [-1], "sum"), EACH, *tensors)
