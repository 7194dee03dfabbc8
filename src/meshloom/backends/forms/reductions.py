"""Reductions of dims that several processes hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meshloom.backends.forms.across import Across
from meshloom.comms import wire
from meshloom.comms.gradients import AllReduce, SumGradient, statistic
from meshloom.comms.group import Group
from meshloom.engines.torch_engine.local import wide_dtype
from meshloom.engines.torch_engine.reductions import centred
from meshloom.ops.labels import normal_dims


def _var(across: Across, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    dims = normal_dims(dim, input.dim())
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if not (input.is_floating_point() or input.is_complex()):
        function = getattr(torch, across.plan.call.op)  # torch's own refusal
        return function(input, dims or None, correction=correction, keepdim=keepdim)
    spread = _Spread.apply(input.to(wide_dtype(input.dtype)), across, dims, correction)
    spread = spread if keepdim else spread.squeeze(dims)
    return spread if input.is_complex() else spread.to(input.dtype)


class _Spread(torch.autograd.Function):
    """The variance. Its gradient is torch's own, which does not go through the mean: inf - inf would be nan there."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, across: Across, dims: tuple[int, ...], correction: Any) -> torch.Tensor:
        middle, count = _middle(across, input, dims), across.local.count(dims)
        ctx.save_for_backward(input, middle)
        ctx.across, ctx.dims, ctx.freedom = across, dims, count - correction
        squares = (middle * middle.conj()).real if middle.is_complex() else middle.square()
        return wire.all_reduce(squares.sum(dims, keepdim=True), across.group) / max(ctx.freedom, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, middle = ctx.saved_tensors
        gradient = SumGradient.apply(gradient, ctx.across.group)
        if torch.is_grad_enabled():
            middle = _middle(ctx.across, input, ctx.dims)
        found, mask = gradient * 2 / ctx.freedom * middle, ctx.across.local.mask(input, ctx.dims)
        return found if mask is None else torch.where(mask, found, 0), None, None, None


def _middle(across: Across, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    total = partial(statistic, group=across.group)
    return centred(x, across.local.mask(x, dims), dims, across.local.count(dims), total)[0]


def _std(across: Across, input: torch.Tensor, **options: Any) -> torch.Tensor:
    """The root of the variance; where that is zero it has no gradient, as in torch."""
    spread = _var(across, input, **options)
    none = spread == 0
    return torch.where(none, 0, torch.where(none, 1, spread).sqrt())


def _nanmean(across: Across, input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims, kind = normal_dims(dim, input.dim()), dtype or input.dtype
    if not input.is_floating_point():
        return torch.nanmean(input, dims or None, keepdim, dtype=dtype)  # torch's own refusal
    mask, there = across.local.mask(input, dims), ~input.isnan()
    if mask is not None:
        input, there = torch.where(mask, input, 0), there & mask
    total = AllReduce.apply(torch.nansum(input, dims, keepdim, dtype=wide_dtype(kind)), across.group)
    return (total / wire.all_reduce(there.sum(dims, keepdim), across.group)).to(kind)


def _logsumexp(across: Across, input: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    dims = normal_dims(dim, input.dim())
    if input.numel() == 0:
        return torch.logsumexp(input, dims, keepdim)
    kept = input.dtype if input.is_floating_point() or input.is_complex() else torch.get_default_dtype()
    x = input.to(wide_dtype(kept))
    high = wire.all_reduce((x.real if x.is_complex() else x).detach().amax(dims, keepdim=True), across.group, "max")
    high = torch.where(high.isinf(), 0, high)
    found = AllReduce.apply((x - high).exp().sum(dims, keepdim=True), across.group).log() + high
    return (found if keepdim else found.squeeze(dims)).to(kept)


def _vector_norm(across: Across, input: torch.Tensor, ord: float, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims, kind = normal_dims(dim, input.dim()), dtype or input.dtype
    if math.isinf(ord):
        size = torch.linalg.vector_norm(input.unsqueeze(0), 1, 0, dtype=dtype)
        found = _Extreme.apply(size, across, dims, "max" if ord > 0 else "min")
    elif input.numel() == 0 or not (kind.is_floating_point or kind.is_complex):
        return torch.linalg.vector_norm(input, ord, dims or None, keepdim, dtype=dtype)
    else:
        found = _Norm.apply(input.to(wide_dtype(kind)), across.group, dims, ord)
        found = found.to(kind) if kind.is_floating_point else found
    return found if keepdim else found.squeeze(dims)


class _Norm(torch.autograd.Function):
    """The norm of the parts' norms. Its gradient asks for the norm of all, and not how a part makes up for it."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: Group, dims: tuple[int, ...], ord: float) -> torch.Tensor:
        own = torch.linalg.vector_norm(input, ord, dims or None, True)
        found: torch.Tensor = torch.linalg.vector_norm(wire.all_gather(own, group), ord, 0)
        ctx.save_for_backward(input, found)
        ctx.group, ctx.ord = group, ord
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """sgn(x) (|x| / norm)^(ord - 1), and nothing where there is no norm."""
        input, found = ctx.saved_tensors
        none = found == 0
        whole, gradient = (
            SumGradient.apply(torch.where(none, 1, found), ctx.group),
            SumGradient.apply(gradient, ctx.group),
        )
        if ctx.ord == 2:
            return torch.where(none, 0, input / whole * gradient), None, None, None
        idle = input == 0 if ctx.ord > 0 else (input == 0) | input.isinf()  # padding is among them
        part = torch.where(idle, 1, input) / whole
        return torch.where(none | idle, 0, part.sgn() * part.abs().pow(ctx.ord - 1) * gradient), None, None, None


class _Extreme(torch.autograd.Function):
    """The largest or smallest element; equal ones share its gradient, wherever they are."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, across: Across, dims: tuple[int, ...], op: str) -> torch.Tensor:
        reduce = torch.amax if op == "max" else torch.amin
        found = wire.all_reduce(reduce(input, dims, True), across.group, op)
        ctx.save_for_backward(input, found)
        ctx.dims, ctx.group, ctx.mask = dims, across.group, across.local.mask(input, dims)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, found = ctx.saved_tensors
        equal = input == found if ctx.mask is None else (input == found) & ctx.mask
        count = wire.all_reduce(equal.sum(ctx.dims, keepdim=True).to(gradient.dtype), ctx.group)
        return equal * (SumGradient.apply(gradient, ctx.group) / count), None, None, None


def _extreme(op: str) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        dims = normal_dims(dim, input.dim())
        found = _Extreme.apply(input, across, dims, op)
        return found if keepdim else found.squeeze(dims)

    return form


def _indexed(largest: bool, values_too: bool) -> Callable[..., Any]:
    def form(across: Across, input: torch.Tensor, dim: Any, keepdim: bool) -> Any:
        dims = normal_dims(dim, input.dim())
        kept = [d for d in range(input.dim()) if d not in dims]
        flat = input.permute(*kept, *dims).flatten(len(kept)) if dims else input.unsqueeze(-1)
        pick = (flat.max(-1) if largest else flat.min(-1)).indices
        value = flat.gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        index = _flat_positions(across, dims)[pick]
        best, first, mine = _best(value.detach(), index, across.group, largest)
        shown = _Shown.apply(value, best, mine, across.group) if values_too else best
        shape = [1 if d in dims else size for d, size in enumerate(input.shape)]
        if keepdim:
            shown, first = shown.view(shape), first.view(shape)
        return (shown, first) if values_too else first

    return form


class _Shown(torch.autograd.Function):
    """The best value of all processes; its gradient goes to the one that has it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, best: torch.Tensor, mine: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.save_for_backward(mine)
        ctx.group = group
        return best.view_as(best)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (mine,) = ctx.saved_tensors
        return torch.where(mine, SumGradient.apply(gradient, ctx.group), 0), None, None, None


def _flat_positions(across: Across, dims: tuple[int, ...]) -> torch.Tensor:
    """The global flat index over dims of each element that this process holds."""
    total = torch.zeros((), dtype=torch.int64)
    shape = across.topology("input").shape
    for dim in dims:
        total = total.unsqueeze(-1) * shape[dim] + across.positions("input", dim)
    return total.flatten()


def _best(
    value: torch.Tensor, index: torch.Tensor, group: Group, largest: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best value of all processes, its first index, and whether it is this process's."""
    if value.is_meta:
        return value, index, torch.ones_like(value, dtype=torch.bool)
    values, indices = wire.all_gather(value, group), wire.all_gather(index, group)
    best = values.amax(0) if largest else values.amin(0)
    equal = (values == best) | (values.isnan() & best.isnan())
    first = torch.where(equal, indices, torch.iinfo(torch.int64).max).amin(0)
    return best, first, index == first


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "var": _var,
    "std": _std,
    "nanmean": _nanmean,
    "logsumexp": _logsumexp,
    "linalg_vector_norm": _vector_norm,
    "amax": _extreme("max"),
    "amin": _extreme("min"),
    "argmax": _indexed(True, False),
    "argmin": _indexed(False, False),
    "max_dim": _indexed(True, True),
    "min_dim": _indexed(False, True),
}
