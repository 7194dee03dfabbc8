"""Fronts that count and add up by number: bincount, histc, embedding_bag, made of look-ups and writes by index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from meshloom.tensor.calling import Overload
from meshloom.tensor.fallback import fallback
from meshloom.tensor.writing import write_out


def _add_up(size: int, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values added up by their places in a line: sharded ones are partial sums."""
    start = torch.zeros(size, *values.shape[1:], dtype=values.dtype, device=values.device)
    return torch.index_add(start, 0, places, values)


def _bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """The number of places follows from the largest value, which is read."""
    held = input
    if held.ndim != 1 or held.dtype.is_floating_point or not held.numel() or held.is_meta or int(held.min()) < 0:
        return fallback(torch.bincount, (input, weights, minlength), {}, "bincount")
    values = torch.ones_like(held, dtype=torch.int64) if weights is None else weights
    if weights is not None and values.dtype != torch.float32:
        values = values.to(torch.float64)
    return _add_up(max(minlength, int(held.max()) + 1), held.to(torch.int64), values)


def _histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: object = None) -> Any:
    """Bins of equal width; without bounds they go from the least element to the largest, which are read."""
    held = input
    if held.dtype not in (torch.float32, torch.float64) or not held.numel() or held.is_meta or min > max or bins < 1:
        return fallback(torch.histc, (input, bins, min, max), {"out": out}, "histc")
    low, high = (min, max) if min != max else (held.min().item(), held.max().item())
    if low == high:
        low, high = low - 1, high + 1
    # torch's own order of steps, in the dtype of the input: in another one, elements at an edge go to the next bin
    start, end = (torch.tensor(each, dtype=held.dtype, device=held.device) for each in (low, high))
    flat = held.reshape(-1)
    counted = (flat >= start) & (flat <= end)
    places = torch.where(counted, (flat - start) * bins / (end - start), 0.0)
    found = _add_up(bins, places.to(torch.int64).clamp(max=bins - 1), counted.to(held.dtype))
    return found if out is None else write_out(found, out)


def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums and means of looked-up rows; what changes the weight or its gradient is left to torch."""
    ids = input
    special = max_norm is not None or scale_grad_by_freq or sparse or padding_idx is not None or not ids.numel()
    if special or mode not in ("sum", "mean") or (ids.ndim == 1) != (offsets is not None) or offsets is ids:
        options = (max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset)
        return fallback(F.embedding_bag, (input, weight, offsets, *options, padding_idx), {}, "embedding_bag")
    found = F.embedding(input, weight)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    if ids.ndim == 2:
        return found.sum(1) if mode == "sum" else found.mean(1)
    return _bags(found, offsets[:-1] if include_last_offset else offsets, mode)


def _bags(rows: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    """Rows added up by the bag in which they lie: the last one that begins before or at them."""
    places = torch.arange(rows.shape[0], device=rows.device)
    bags = torch.searchsorted(offsets, places.to(offsets.dtype), right=True) - 1
    sums = _add_up(offsets.shape[0], bags, rows)
    if mode == "sum":
        return sums
    counts = _add_up(offsets.shape[0], bags, torch.ones(rows.shape[0], dtype=rows.dtype, device=rows.device))
    return sums / counts.clamp(min=1).unsqueeze(-1)


COUNTING: dict[str, Overload] = {"bincount": _bincount, "histc": _histc, "embedding_bag": _embedding_bag}
