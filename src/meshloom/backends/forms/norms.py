"""Softmax and the norms of dims that several processes hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.backends import wire
from meshloom.backends.forms.across import Across
from meshloom.backends.nodes import statistic
from meshloom.engines.layout import short_name
from meshloom.engines.torch_engine.local import wide_dtype
from meshloom.engines.torch_engine.whole import per_channel
from meshloom.errors import DTypeError
from meshloom.ops.normalisation import normalised, softmax_dim


def _softmax(logarithm: bool) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, dim: int, dtype: Any, _stacklevel: Any) -> torch.Tensor:
        dim = softmax_dim(across.plan.call)
        kept = dtype or input.dtype
        x = wide(across, input, kept)
        if x.numel() == 0:
            return x.to(kept)
        high = wire.all_reduce(x.detach().amax(dim, keepdim=True), across.group, "max")
        weights = (x - high).exp()
        total = statistic(weights.sum(dim, keepdim=True), across.group)
        return (x - high - total.log() if logarithm else weights / total).to(kept)

    return form


def wide(across: Across, input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input in the dtype in which torch adds up; integers cannot be normalised."""
    if not dtype.is_floating_point:
        raise DTypeError(f"{across.plan.call.op} takes floating-point numbers, not {short_name(dtype)}")
    return input.to(wide_dtype(dtype))


def _layer_norm(
    across: Across, input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    dims = tuple(range(input.dim() - normalised(across.plan.call), input.dim()))
    middle, count = centred(across, wide(across, input, input.dtype), dims)
    spread = statistic(middle.square().sum(dims, keepdim=True), across.group) / count
    scaled = middle * torch.rsqrt(spread + eps)
    scaled = scaled if weight is None else scaled * weight
    return (scaled if bias is None else scaled + bias).to(input.dtype)


def centred(across: Across, x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The input less its mean over dims, zero where there is padding, and the global count."""
    count = across.local.count(dims)
    return _less_mean(across, x, across.local.mask(x, dims), dims, count)[0], count


def _less_mean(
    across: Across, x: torch.Tensor, mask: torch.Tensor | None, dims: tuple[int, ...], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mean = statistic(x.sum(dims, keepdim=True), across.group) / count
    return x - mean if mask is None else torch.where(mask, x - mean, 0), mean


def _rms_norm(across: Across, input: torch.Tensor, normalized_shape: Any, weight: Any, eps: Any) -> torch.Tensor:
    dims = tuple(range(input.dim() - normalised(across.plan.call), input.dim()))
    x = wide(across, input, input.dtype)
    squares = statistic(x.square().sum(dims, keepdim=True), across.group) / across.local.count(dims)
    scaled = x * torch.rsqrt(squares + (torch.finfo(x.dtype).eps if eps is None else eps))
    return (scaled if weight is None else scaled * weight).to(input.dtype)


def _group_norm(
    across: Across, input: torch.Tensor, num_groups: int, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    """Positions lie apart, groups do not: the groups that are here, by the channels that one has."""
    spatial = tuple(range(2, input.dim()))
    width = across.plan.call.shape("input")[1] // num_groups
    x = wide(across, input, input.dtype).unflatten(1, (-1, width))
    dims, count = tuple(range(2, x.dim())), width * across.local.count(spatial)
    middle, _ = _less_mean(across, x, across.local.mask(input, spatial), dims, count)
    spread = statistic(middle.square().sum(dims, keepdim=True), across.group) / count
    return per_channel((middle * torch.rsqrt(spread + eps)).flatten(1, 2), weight, bias).to(input.dtype)


def _batch_norm(
    across: Across, input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool,
    momentum: float, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Training alone has statistics to share; the batch's mean and unbiased variance come out too."""
    dims = tuple(d for d in range(input.dim()) if d != 1)
    count, x = across.local.count(dims), wide(across, input, input.dtype)
    middle, mean = _less_mean(across, x, across.local.mask(input, dims), dims, count)
    spread = statistic(middle.square().sum(dims, keepdim=True), across.group) / count
    out = per_channel(middle * torch.rsqrt(spread + eps), weight, bias).to(input.dtype)
    return out, mean.detach().flatten(), spread.detach().flatten() * (count / max(count - 1, 1))


NORMS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax(False),
    "log_softmax": _softmax(True),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}
