"""Attention of one token of every user over its cache, which is dense or in pages.

Queries are [1, B, H, D], caches [B, K, T, D] or pages [P, K, n, D] with a table [B, m] of their numbers. A user at
position -1 is skipped: its row is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.attending import (
    attend,
    attention_topology,
    check_positions,
    positions_of,
    read_pages,
    sink_of,
    within,
)
from meshloom.ttnn.ops.calling import Made, Optionals, compute, op, operands, take
from meshloom.ttnn.ops.transformer import check, present
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor


class _Seen:
    """Which positions of its cache the token of every user sees."""

    def __init__(self, *, is_causal=True, cur_pos=(), sliding_window_size=None, cache_position_modulo=None) -> None:
        self.is_causal, self.listed = is_causal, tuple(cur_pos)
        self.window, self.modulo = sliding_window_size, cache_position_modulo

    def among(self, keys: int, positions: Block | None, axes: int, users: int) -> tuple[Block | None, Block | None]:
        """A mask of the keys, and the users that see none if that is known."""
        if not self.is_causal:
            return None, None
        last = positions_of(self.listed, positions, axes, users)[..., None, None, None]
        seen = within(torch.arange(keys), last, self.window, self.modulo)
        return seen, last < 0 if self.window is None and self.modulo is None else None


_OPTIONS = Optionals("attn_mask cur_pos_tensor attention_sink scale head_dim_v")
_DECODE = (_Seen, _OPTIONS)


def _decode(
    name: str,
    three: Sequence[Tensor],
    caches: Callable[[Sequence[Block], int], list[Block]],
    table: Tensor | None = None,
    **how: Any,
) -> Made:
    """Query heads that share a key head are the rows of one product, so that keys are not repeated.

    `caches` makes keys and values of the blocks of (k, v) and, if there is one, of the table of pages.
    """
    seen, (attn_mask, cur_pos_tensor, attention_sink, scale, head_dim_v) = _Seen(**take(_Seen, how)), _OPTIONS(how)
    others = (table, attn_mask, cur_pos_tensor, attention_sink)
    tensors, is_there = present(*three, *others), [each is not None for each in others]
    operands(name, *tensors)
    axes, heads, users = len(three[0].grid), three[0].shape[2], three[0].shape[1]
    if seen.is_causal:
        check_positions(name, seen.listed, cur_pos_tensor, users)
    has_pages, has_mask, has_positions, has_sink = is_there

    def kernel(queries: Block, keys: Block, values: Block, *rest: Block) -> Block:
        told = iter(rest)
        pages, mask = next(told) if has_pages else None, next(told) if has_mask else None
        positions, logits = next(told) if has_positions else None, next(told) if has_sink else None
        k, v = caches((keys, values) if pages is None else (keys, values, pages), axes)
        groups = (k.shape[-3], heads // k.shape[-3])
        q = queries.reshape(*queries.shape[:axes], users, *groups, queries.shape[-1])  # [*mesh, B, K, H / K, D]
        mask_of_keys, blind = seen.among(k.shape[-2], positions, axes, users)
        column = None if logits is None else sink_of(name, logits, axes, heads)
        sink = None if column is None else column.reshape(*column.shape[: axes + 1], *groups, 1)
        bias = None if mask is None else _by_groups(mask.float(), axes, heads, groups)
        some = v if head_dim_v is None else v[..., :head_dim_v]
        found = attend(q, k, some, axes, scale=scale, seen=mask_of_keys, bias=bias, sink=sink, blind=blind)
        return found.flatten(-3, -2).unsqueeze(axes)

    return compute(kernel, tensors, attention_topology(tensors, (1, 2)))


def _by_groups(mask: Block, axes: int, heads: int, groups: tuple[int, int]) -> Block:
    """A mask [B, 1, H or 1, T] as [B, K, H / K, T]; rows beyond the heads are padding."""
    if mask.shape[-2] == 1:
        return mask
    flat = mask[..., :heads, :].flatten(axes + 1, axes + 2)
    return flat.reshape(*flat.shape[: axes + 1], *groups, flat.shape[-1])


_PAGES = Optionals("paged_cache_geometry")


def _paged_decode(name: str, three: Sequence[Tensor], table: Tensor, **how: Any) -> Made:
    (geometry,) = _PAGES(how)
    sizes = (geometry.block_size, geometry.num_kv_heads) if geometry is not None else (0, 0)

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        *both, pages = blocks
        return [read_pages(block, pages, axes, *sizes) for block in both]

    return _decode(name, three, caches, table, **how)


@op("transformer.scaled_dot_product_attention_decode", more=_DECODE)
def scaled_dot_product_attention_decode(
    input_tensor_q, input_tensor_k, input_tensor_v, *, share_cache=None, **how
) -> Made:
    """One token of every user, [1, B, H, D], over the positions of its cache up to its own."""
    name = "transformer.scaled_dot_product_attention_decode"
    three = (input_tensor_q, input_tensor_k, input_tensor_v)
    check(name, *three, input_tensor_q.shape[2])
    if not share_cache and input_tensor_k.shape[0] < input_tensor_q.shape[1]:
        raise OperandError(
            f"ttnn.{name}: {input_tensor_q.shape[1]} users and a cache of {input_tensor_k.shape[0]}",
            fix="share_cache=True if all users have one cache",
        )
    users = input_tensor_q.shape[1]

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        if share_cache:
            return [block.expand(*block.shape[:axes], users, *block.shape[axes + 1 :]) for block in blocks]
        return [block if block.shape[axes] == users else block.narrow(axes, 0, users) for block in blocks]

    return _decode(name, three, caches, **how)


@op("transformer.paged_scaled_dot_product_attention_decode", more=(*_DECODE, _PAGES))
def paged_scaled_dot_product_attention_decode(
    input_tensor_q, input_tensor_k, input_tensor_v, page_table_tensor, *, spec_multi_pos_tiles=0, **how
) -> Made:
    """`scaled_dot_product_attention_decode` over pages [P, K, n, D] that a table [B, m] puts in order."""
    name = "transformer.paged_scaled_dot_product_attention_decode"
    if spec_multi_pos_tiles:
        raise OperandError(f"ttnn.{name}: spec_multi_pos_tiles={spec_multi_pos_tiles} is not covered", fix="0")
    three = (input_tensor_q, input_tensor_k, input_tensor_v)
    return _paged_decode(name, three, page_table_tensor, **how)


# latent keys, whose first elements are the values


@op("transformer.flash_multi_latent_attention_decode", more=_DECODE)
def flash_multi_latent_attention_decode(input_tensor_q, input_tensor_k, input_tensor_v=None, **how) -> Made:
    """`scaled_dot_product_attention_decode` whose values are the first `head_dim_v` elements of its keys."""

    users = input_tensor_q.shape[1]

    def caches(blocks: Sequence[Block], axes: int) -> list[Block]:
        return [block.narrow(axes, 0, users) for block in blocks]

    three = (input_tensor_q, input_tensor_k, input_tensor_v if input_tensor_v is not None else input_tensor_k)
    return _decode("transformer.flash_multi_latent_attention_decode", three, caches, **how)


@op("transformer.paged_flash_multi_latent_attention_decode", more=_DECODE)
def paged_flash_multi_latent_attention_decode(
    input_tensor_q, input_tensor_k, input_tensor_v=None, head_dim_v=None, page_table_tensor=None, **how
) -> Made:
    """`flash_multi_latent_attention_decode` over pages."""
    name = "transformer.paged_flash_multi_latent_attention_decode"
    if page_table_tensor is None:
        raise ArgumentError(f"ttnn.{name}: page_table_tensor is missing")
    three = (input_tensor_q, input_tensor_k, input_tensor_v if input_tensor_v is not None else input_tensor_k)
    return _paged_decode(name, three, page_table_tensor, head_dim_v=head_dim_v, **how)
