"""Reductions on stored arrays, whose padding must not count, of dims that peers may hold parts of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines.node import Node
from meshloom.engines.peers import Peers
from meshloom.engines.torch_engine.local import Function, Local, aware, dims_of, shared, wide_dtype
from meshloom.types import Dims


def _sum(input: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    dims = dims_of(input, dim)
    return torch.sum(input, dims, keepdim, dtype=dtype) if dims else torch.sum(input, dtype=dtype)


@aware
def _mean(local: Local, input: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    dims = dims_of(input, dim)
    kind = dtype or input.dtype
    if tuple(input.shape) == local.call.shape("input") or not (kind.is_floating_point or kind.is_complex):
        return torch.mean(input, dims, keepdim, dtype=dtype) if dims else torch.mean(input, dtype=dtype)
    return (torch.sum(input, dims, keepdim, dtype=wide_dtype(kind)) / local.count(dims)).to(kind)


def _prod(input: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.prod(input, dtype=dtype) if dim is None else torch.prod(input, dim, keepdim, dtype=dtype)


def _over_dims(function: Callable[..., torch.Tensor]) -> Function:
    def reduce(input: torch.Tensor, dim: Dims, keepdim: bool) -> torch.Tensor:
        dims = dims_of(input, dim)
        return function(input, dims, keepdim) if dims else function(input)

    return reduce


def centre(
    local: Local, x: torch.Tensor, mask: torch.Tensor | None, dims: tuple[int, ...], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """An array less its mean over dims, zero where there is padding, and the mean."""
    mean = local.peers.statistic(x.sum(dims, keepdim=True)) / count
    return x - mean if mask is None else torch.where(mask, x - mean, 0), mean


def _deviations(local: Local, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return centre(local, x, local.mask(x, dims), dims, local.count(dims))[0]


def _variance(local: Local, middle: torch.Tensor, dims: tuple[int, ...], freedom: float) -> torch.Tensor:
    squares = (middle * middle.conj()).real if middle.is_complex() else middle.square()
    return local.peers.sum(squares.sum(dims, keepdim=True)) / max(freedom, 0)


class _Variance(Node):
    """The variance among peers. Its gradient is torch's own, which does not go through the mean: inf - inf is nan."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, local: Local, dims: tuple[int, ...], freedom: Any) -> torch.Tensor:
        middle = _deviations(local, input, dims)
        ctx.save_for_backward(input, middle)
        ctx.local, ctx.dims, ctx.freedom = local, dims, freedom
        return _variance(local, middle, dims, freedom)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, middle = ctx.saved_tensors
        gradient = ctx.local.peers.share(gradient)
        if torch.is_grad_enabled():
            middle = _deviations(ctx.local, input, ctx.dims)
        found, mask = gradient * 2 / ctx.freedom * middle, ctx.local.mask(input, ctx.dims)
        return found if mask is None else torch.where(mask, found, 0), None, None, None


def _spread(function: Callable[..., torch.Tensor]) -> Function:
    """var or std: torch's own where all is here and nothing is padded. Where the variance is zero std has no slope."""

    @shared
    def run(
        local: Local, input: torch.Tensor, dim: Dims, unbiased: Any, keepdim: bool, correction: Any
    ) -> torch.Tensor:
        dims, alone = dims_of(input, dim), local.peers.alone
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        is_number = input.is_floating_point() or input.is_complex()  # torch refuses others
        if not is_number or (alone and local.mask(input, dims) is None):
            return function(input, dims or None, correction=correction, keepdim=keepdim)
        x, freedom = input.to(wide_dtype(input.dtype)), local.count(dims) - correction
        if alone:
            found = _variance(local, _deviations(local, x, dims), dims, freedom)
        else:
            found = _Variance.apply(x, local, dims, freedom)
        found = found if keepdim else found.squeeze(dims)
        found = found if input.is_complex() else found.to(input.dtype)
        return found if function is torch.var else torch.where(found == 0, 0, torch.where(found == 0, 1, found).sqrt())

    return run


@shared
def _nanmean(local: Local, input: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    dims, kind, peers = dims_of(input, dim), dtype or input.dtype, local.peers
    mask = local.mask(input, dims)
    if (mask is None and peers.alone) or not input.is_floating_point():
        return torch.nanmean(input, dims or None, keepdim, dtype=dtype)
    there = ~input.isnan()
    if mask is not None:
        input, there = torch.where(mask, input, 0), there & mask
    total = peers.sum(torch.nansum(input, dims, keepdim, dtype=wide_dtype(kind)))
    return (total / peers.sum(there.sum(dims, keepdim))).to(kind)


@shared
def _logsumexp(local: Local, input: torch.Tensor, dim: int | tuple[int, ...], keepdim: bool) -> torch.Tensor:
    if local.peers.alone or input.numel() == 0:
        return torch.logsumexp(input, dim, keepdim)
    dims = dims_of(input, dim)
    kept = input.dtype if input.is_floating_point() or input.is_complex() else torch.get_default_dtype()
    x = input.to(wide_dtype(kept))
    high = local.peers.reduce((x.real if x.is_complex() else x).detach().amax(dims, keepdim=True), "max")
    high = torch.where(high.isinf(), 0, high)
    found = local.peers.sum((x - high).exp().sum(dims, keepdim=True)).log() + high
    return (found if keepdim else found.squeeze(dims)).to(kept)


@shared
def _vector_norm(
    local: Local, input: torch.Tensor, ord: float, dim: Dims, keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    dims, kind = dims_of(input, dim), dtype or input.dtype
    norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm
    is_empty = math.isfinite(ord) and (input.numel() == 0 or not (kind.is_floating_point or kind.is_complex))
    if local.peers.alone or is_empty:
        return norm(input, ord, dims or None, keepdim, dtype=dtype)
    if math.isinf(ord):
        found = _Extreme.apply(norm(input.unsqueeze(0), 1, 0, dtype=dtype), local, dims, "max" if ord > 0 else "min")
    else:
        found = _Norm.apply(input.to(wide_dtype(kind)), local.peers, dims, ord)
        found = found.to(kind) if kind.is_floating_point else found
    return found if keepdim else found.squeeze(dims)


class _Norm(Node):
    """The norm of the parts' norms. Its gradient asks for the norm of all, and not how a part makes up for it."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, peers: Peers, dims: tuple[int, ...], ord: float) -> torch.Tensor:
        own = torch.linalg.vector_norm(input, ord, dims or None, True)
        found: torch.Tensor = torch.linalg.vector_norm(peers.gather(own), ord, 0)
        ctx.save_for_backward(input, found)
        ctx.peers, ctx.ord = peers, ord
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """sgn(x) (|x| / norm)^(ord - 1), and nothing where there is no norm."""
        input, found = ctx.saved_tensors
        none = found == 0
        whole, gradient = ctx.peers.share(torch.where(none, 1, found)), ctx.peers.share(gradient)
        if ctx.ord == 2:
            return torch.where(none, 0, input / whole * gradient), None, None, None
        idle = input == 0 if ctx.ord > 0 else (input == 0) | input.isinf()  # padding is among them
        part = torch.where(idle, 1, input) / whole
        return torch.where(none | idle, 0, part.sgn() * part.abs().pow(ctx.ord - 1) * gradient), None, None, None


class _Extreme(Node):
    """The largest or smallest element; equal ones share its gradient, wherever they are."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, local: Local, dims: tuple[int, ...], op: str) -> torch.Tensor:
        found = local.peers.reduce((torch.amax if op == "max" else torch.amin)(input, dims, True), op)
        ctx.save_for_backward(input, found)
        ctx.dims, ctx.peers, ctx.mask = dims, local.peers, local.mask(input, dims)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, found = ctx.saved_tensors
        equal = input == found if ctx.mask is None else (input == found) & ctx.mask
        count = ctx.peers.sum(equal.sum(ctx.dims, keepdim=True).to(gradient.dtype))
        return equal * (ctx.peers.share(gradient) / count), None, None, None


def _extreme(function: Callable[..., torch.Tensor], op: str) -> Function:
    @shared
    def run(local: Local, input: torch.Tensor, dim: Dims, keepdim: bool) -> torch.Tensor:
        dims = dims_of(input, dim)
        if local.peers.alone:
            return function(input, dims, keepdim) if dims else function(input)
        found = _Extreme.apply(input, local, dims, op)
        return found if keepdim else found.squeeze(dims)

    return run


def _extreme_index(function: Function, largest: bool, has_values: bool = False) -> Function:
    """Where the largest or smallest element is, by its global index, and which it is."""

    @shared
    def run(local: Local, input: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
        if local.peers.alone:
            return function(input, dim, keepdim)
        dims = dims_of(input, dim)
        kept = [d for d in range(input.dim()) if d not in dims]
        flat = input.permute(*kept, *dims).flatten(len(kept)) if dims else input.unsqueeze(-1)
        pick = (flat.max(-1) if largest else flat.min(-1)).indices
        value = flat.gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        index = _flat_positions(local, dims)[pick]
        best, first = _best(value.detach(), index, local.peers, largest)
        shown = _Shown.apply(value, best, index == first, local.peers) if has_values else best
        if keepdim:
            shape = [1 if d in dims else size for d, size in enumerate(input.shape)]
            shown, first = shown.view(shape), first.view(shape)
        return (shown, first) if has_values else first

    return run


class _Shown(Node):
    """The best value of all peers; its gradient goes to the one that has it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, best: torch.Tensor, mine: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.save_for_backward(mine)
        ctx.peers = peers
        return best.view_as(best)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return torch.where(mine, ctx.peers.share(gradient), 0), None, None, None


def _flat_positions(local: Local, dims: tuple[int, ...]) -> torch.Tensor:
    """The global flat index over dims of each element that this process holds."""
    total = torch.zeros((), dtype=torch.int64)
    shape = local.topology("input").shape
    for dim in dims:
        total = total.unsqueeze(-1) * shape[dim] + local.positions("input", dim)
    return total.flatten()


def _best(value: torch.Tensor, index: torch.Tensor, peers: Peers, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The best value of all peers, and its first index."""
    if value.is_meta:
        return value, index
    values, indices = peers.gather(value), peers.gather(index)
    best = values.amax(0) if largest else values.amin(0)
    equal = (values == best) | (values.isnan() & best.isnan())
    return best, torch.where(equal, indices, torch.iinfo(torch.int64).max).amin(0)


def _count_nonzero(input: torch.Tensor, dim: Dims) -> torch.Tensor:
    return torch.count_nonzero(input, dims_of(input, dim) or None)


def _nansum(input: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.nansum(input, dims_of(input, dim) or None, keepdim, dtype=dtype)


REDUCTIONS: dict[str, Function] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _extreme(torch.amax, "max"),
    "amin": _extreme(torch.amin, "min"),
    "prod": _prod,
    "any": _over_dims(torch.any),
    "all": _over_dims(torch.all),
    "var": _spread(torch.var),
    "argmax": _extreme_index(torch.argmax, True),
    "argmin": _extreme_index(torch.argmin, False),
    "std": _spread(torch.std),
    "nansum": _nansum,
    "nanmean": _nanmean,
    "count_nonzero": _count_nonzero,
    "logsumexp": _logsumexp,
    "linalg_vector_norm": _vector_norm,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "mode": torch.mode,
    "kthvalue": torch.kthvalue,
    "quantile": torch.quantile,
    "nanquantile": torch.nanquantile,
    "max_dim": _extreme_index(torch.max, True, has_values=True),
    "min_dim": _extreme_index(torch.min, False, has_values=True),
}
