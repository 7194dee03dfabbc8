"""Attention over a sequence that several processes hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.backends.forms.across import Across
from meshloom.backends.ring import Ring, RingAttention
from meshloom.comms.group import Group
from meshloom.engines.torch_engine.local import wide_dtype


def attention(
    across: Across, query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False, **options: Any
) -> torch.Tensor:
    """Queries know where they stand; keys and values that several processes hold go around the ring."""
    rows = across.positions("query", query.dim() - 2)
    group = across.along("key", key.dim() - 2)
    if group is None:
        mask = (rows.unsqueeze(-1) >= torch.arange(key.shape[-2])).to(query.device) if is_causal else attn_mask
        return F.scaled_dot_product_attention(query, key, value, mask, **options)
    return _Sequence(across, group, rows, query, key, value).attended(attn_mask, is_causal, **options)


class _Sequence:
    """Attention whose keys and values lie on a ring of processes: one block of scores at a time."""

    def __init__(self, across: Across, group: Group, rows: torch.Tensor, query: Any, key: Any, value: Any) -> None:
        self.across, self.group, self.rows = across, group, rows
        self.query, self.key, self.value = query, key, value

    def attended(self, mask: Any, is_causal: bool, scale: Any, enable_gqa: bool, dropout_p: float = 0.0) -> Any:
        """What each query of this process gets."""
        query, key, value = self.query, self.key, self.value
        groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        batch = query.shape[:-2] if enable_gqa else torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        heads = (*batch[:-1], batch[-1] // groups) if enable_gqa else batch
        keys = self.across.topology("key").shape[-2]
        seen = None if mask is None else mask.expand(*batch, query.shape[-2], keys)
        folded = [_folded_heads(x, groups) for x in (query.expand(*batch, *query.shape[-2:]), seen)]
        key, value = (x.expand(*heads, *x.shape[-2:]) for x in (key, value))
        if scale is None:
            scale = query.shape[-1] ** -0.5
        ring = Ring(self.group, scale, self._columns, self._allowed(folded[1], is_causal, groups))
        bias = folded[1] if mask is not None and mask.dtype != torch.bool else None
        x = folded[0].to(wide_dtype(query.dtype))
        out = RingAttention.apply(x, key, value, None if bias is None else bias.to(x.dtype), ring).to(query.dtype)
        return out if groups == 1 else out.unflatten(-2, (groups, -1)).flatten(-4, -3)

    def _columns(self, process: int) -> torch.Tensor:
        return self.across.positions("key", self.key.dim() - 2, self.group.ranks[process]).to(self.key.device)

    def _allowed(self, mask: Any, is_causal: bool, groups: int) -> Callable[[int], torch.Tensor | None]:
        if is_causal:
            rows = self.rows.repeat(groups).unsqueeze(-1).to(self.query.device)
            return lambda process: rows >= self._columns(process)
        if mask is not None and mask.dtype == torch.bool:
            return lambda process: mask[..., self._columns(process).clamp(min=0)]
        return lambda process: None


def _folded_heads(x: Any, groups: int) -> Any:
    """The query heads that share a head of keys, one below the other."""
    return x if x is None or groups == 1 else x.unflatten(-3, (-1, groups)).flatten(-3, -2)
