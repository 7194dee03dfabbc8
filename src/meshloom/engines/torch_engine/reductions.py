"""Reductions on stored arrays, whose padding must not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines.layout import pad
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


Total = Callable[[torch.Tensor], torch.Tensor]


def alone(sums: torch.Tensor) -> torch.Tensor:
    """The total of sums of which no other process holds a part."""
    return sums


def centred(
    x: torch.Tensor, mask: torch.Tensor | None, dims: tuple[int, ...], count: int, total: Total = alone
) -> tuple[torch.Tensor, torch.Tensor]:
    """An array less its mean over dims, zero where there is padding, and the mean."""
    mean = total(x.sum(dims, keepdim=True)) / count
    return x - mean if mask is None else torch.where(mask, x - mean, 0), mean


def _correction(unbiased: Any, correction: Any) -> Any:
    if correction is not None:
        return correction
    return 1 if unbiased is None else int(unbiased)


def _plain(function: Any, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    """var or std of an array without padding."""
    return function(input, dims_of(input, dim) or None, correction=_correction(unbiased, correction), keepdim=keepdim)


@aware
def _var(local: Local, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    dims = dims_of(input, dim)
    mask = local.mask(input, dims)
    if mask is None or not (input.is_floating_point() or input.is_complex()):
        return _plain(torch.var, input, dim, unbiased, keepdim, correction)
    correction = _correction(unbiased, correction)
    count = local.count(dims)
    middle, _ = centred(input.to(wide_dtype(input.dtype)), mask, dims, count)
    squares = (middle * middle.conj()).real if middle.is_complex() else middle.square()
    spread = squares.sum(dims, keepdim) / max(count - correction, 0)
    return spread if input.is_complex() else spread.to(input.dtype)


@aware
def _std(local: Local, input: torch.Tensor, **options: Any) -> torch.Tensor:
    """The root of the variance; where that is zero it has no gradient, as in torch."""
    if local.mask(input, dims_of(input, options["dim"])) is None:
        return _plain(torch.std, input, **options)
    spread = _var(local, input, **options)
    none = spread == 0
    return torch.where(none, 0, torch.where(none, 1, spread).sqrt())


@aware
def _nanmean(local: Local, input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims = dims_of(input, dim)
    mask = local.mask(input, dims)
    if mask is None or not input.is_floating_point():
        return torch.nanmean(input, dims or None, keepdim, dtype=dtype)
    kind = dtype or input.dtype
    total = torch.nansum(torch.where(mask, input, 0), dims, keepdim, dtype=wide_dtype(kind))
    return (total / (mask & ~input.isnan()).sum(dims, keepdim)).to(kind)


def _count_nonzero(input: torch.Tensor, dim: Any) -> torch.Tensor:
    return torch.count_nonzero(input, dims_of(input, dim) or None)


def _nansum(input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return torch.nansum(input, dims_of(input, dim) or None, keepdim, dtype=dtype)


def _vector_norm(input: torch.Tensor, ord: float, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return torch.linalg.vector_norm(input, ord, dims_of(input, dim) or None, keepdim, dtype=dtype)


def _indexed_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """An index counts elements, so padding is taken off first and put back after."""

    @aware
    def scan(local: Local, input: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        if not input.dim():
            return tuple(function(input, 0))
        dim = dim % input.dim()
        topology = local.ins[local.call.index("input")]
        found = function(local.trimmed("input", input, dim), dim)
        return tuple(pad(each, dim, topology.shape[dim], topology.shards[dim]) for each in found)

    return scan


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
    "std": _std,
    "nansum": _nansum,
    "nanmean": _nanmean,
    "count_nonzero": _count_nonzero,
    "logsumexp": torch.logsumexp,
    "linalg_vector_norm": _vector_norm,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "mode": torch.mode,
    "kthvalue": torch.kthvalue,
    "quantile": torch.quantile,
    "nanquantile": torch.nanquantile,
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": _indexed_scan(torch.cummax),
    "cummin": _indexed_scan(torch.cummin),
    "max_dim": torch.max,
    "min_dim": torch.min,
}
