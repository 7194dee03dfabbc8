"""Reductions on stored arrays, whose padding must not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, aware, dims_of, wide_dtype


def _sum(input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims = dims_of(input, dim)
    return torch.sum(input, dims, keepdim, dtype=dtype) if dims else torch.sum(input, dtype=dtype)


@aware
def _mean(local: Local, input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims = dims_of(input, dim)
    kind = dtype or input.dtype
    if tuple(input.shape) == local.call.shape("input") or not (kind.is_floating_point or kind.is_complex):
        return torch.mean(input, dims, keepdim, dtype=dtype) if dims else torch.mean(input, dtype=dtype)
    return (torch.sum(input, dims, keepdim, dtype=wide_dtype(kind)) / local.count(dims)).to(kind)


def _prod(input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return torch.prod(input, dtype=dtype) if dim is None else torch.prod(input, dim, keepdim, dtype=dtype)


def _over_dims(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(input: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        dims = dims_of(input, dim)
        return function(input, dims, keepdim) if dims else function(input)

    return reduce


@aware
def _var(local: Local, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    dims = dims_of(input, dim)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    mask = local.mask(input, dims)
    if mask is None or not (input.is_floating_point() or input.is_complex()):
        return torch.var(input, dims or None, correction=correction, keepdim=keepdim)
    count = local.count(dims)
    wide = input.to(wide_dtype(input.dtype))
    centred = torch.where(mask, wide - wide.sum(dims, keepdim=True) / count, 0)
    squares = (centred * centred.conj()).real if centred.is_complex() else centred.square()
    spread = squares.sum(dims, keepdim) / max(count - correction, 0)
    return spread if input.is_complex() else spread.to(input.dtype)


REDUCTIONS: dict[str, Function] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _over_dims(torch.amax),
    "amin": _over_dims(torch.amin),
    "prod": _prod,
    "any": _over_dims(torch.any),
    "all": _over_dims(torch.all),
    "var": _var,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "max_dim": torch.max,
    "min_dim": torch.min,
}
