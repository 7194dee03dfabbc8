"""Softmax and the norms on stored arrays. Where all of a line is here and nothing is padded they are torch's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshloom.engines.layout import short_name
from meshloom.engines.torch_engine.local import Function, Local, shared, wide_dtype
from meshloom.engines.torch_engine.reductions import centre
from meshloom.errors import DTypeError
from meshloom.ops.normalisation import normalised, softmax_dim

Given = Tensor | None


def _wide(local: Local, input: Tensor, dtype: torch.dtype) -> Tensor:
    """The input in the dtype in which sums are made; integers cannot be normalised."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DTypeError(f"{local.call.op} takes floating-point numbers, not {short_name(dtype)}")
    return input.to(wide_dtype(dtype))


def _softmax(function: Callable[..., Tensor]) -> Function:
    @shared
    def run(local: Local, input: Tensor, dim: int, dtype: torch.dtype | None, _stacklevel: object) -> Tensor:
        if local.peers.alone:
            return function(input, dim, dtype=dtype)
        dim, kept = softmax_dim(local.call), dtype or input.dtype
        x = _wide(local, input, kept)
        if x.numel() == 0:
            return x.to(kept)
        high = local.peers.reduce(x.detach().amax(dim, keepdim=True), "max")
        weights = (x - high).exp()
        total = local.peers.statistic(weights.sum(dim, keepdim=True))
        return (weights / total if function is torch.softmax else x - high - total.log()).to(kept)

    return run


def _is_plain(local: Local, input: Tensor, dims: tuple[int, ...], eps: float) -> bool:
    """Whether torch's own function does it: lines along dims are here, without padding, and none is all padding.

    Such a line would be divided by its spread, which is zero, where eps does not help.
    """
    if not local.peers.alone or local.mask(input, dims) is not None:
        return False
    small = torch.finfo(wide_dtype(input.dtype)).tiny
    return eps >= small or local.mask(input, tuple(range(input.dim()))) is None


def _lines(local: Local, input: Tensor, dims: tuple[int, ...]) -> Given:
    """True where a line along dims holds elements, False where it is all padding; None where all of them do."""
    return local.mask(input, tuple(dim for dim in range(input.dim()) if dim not in dims))


def _trailing(local: Local, input: Tensor) -> tuple[int, ...]:
    """The dims that a layer_norm or rms_norm call normalises."""
    return tuple(range(input.dim() - normalised(local.call), input.dim()))


def _standardise(
    local: Local, x: Tensor, mask: Given, dims: tuple[int, ...], count: int, eps: float, lines: Given
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero mean and unit variance over dims, padding left out; and both. Where no line is, the variance is 1."""
    middle, mean = centre(local, x, mask, dims, count)
    spread = local.peers.statistic(middle.square().sum(dims, keepdim=True)) / count
    return middle * _inverse_root(spread + eps, lines), mean, spread


def _inverse_root(squares: Tensor, lines: Given) -> Tensor:
    """1 / sqrt, and 1 for lines that are all padding: 1 / sqrt(0) would be infinite, its gradient nan."""
    return torch.rsqrt(squares if lines is None else torch.where(lines, squares, 1))


def _affine(input: Tensor, weight: Given, bias: Given) -> Tensor:
    input = input if weight is None else input * weight
    return input if bias is None else input + bias


def _per_channel(input: Tensor, *each: Given) -> Tensor:
    """Scale and shift, one of each per channel."""
    line = (-1,) + (1,) * (input.dim() - 2)
    return _affine(input, *(None if x is None else x.view(line) for x in each))


@shared
def _layer_norm(
    local: Local, input: Tensor, normalized_shape: object, weight: Given, bias: Given, eps: float
) -> Tensor:
    dims = _trailing(local, input)
    if _is_plain(local, input, dims, eps):
        return F.layer_norm(input, tuple(input.shape[d] for d in dims), weight, bias, eps)
    x, mask, lines = _wide(local, input, input.dtype), local.mask(input, dims), _lines(local, input, dims)
    scaled, _, _ = _standardise(local, x, mask, dims, local.count(dims), eps, lines)
    return _affine(scaled, weight, bias).to(input.dtype)


@shared
def _rms_norm(local: Local, input: Tensor, normalized_shape: object, weight: Given, eps: float | None) -> Tensor:
    """Padding, which is zero, adds nothing."""
    dims = _trailing(local, input)
    if _is_plain(local, input, dims, 1 if eps is None else eps):
        return F.rms_norm(input, tuple(input.shape[d] for d in dims), weight, eps)
    x = _wide(local, input, input.dtype)
    squares = local.peers.statistic(x.square().sum(dims, keepdim=True)) / local.count(dims)
    squares = squares + (torch.finfo(x.dtype).eps if eps is None else eps)
    return _affine(x * _inverse_root(squares, _lines(local, input, dims)), weight, None).to(input.dtype)


@shared
def _group_norm(local: Local, input: Tensor, num_groups: int, weight: Given, bias: Given, eps: float) -> Tensor:
    """The norm of the groups that are here, by the channels that one has."""
    width, spatial = local.call.shape("input")[1] // num_groups, tuple(range(2, input.dim()))
    if _is_plain(local, input, spatial, eps):
        if not input.numel():  # torch does not take it, and the parameters have a gradient of zeros
            return _per_channel(input * 1, weight, bias)
        return torch.group_norm(input, input.shape[1] // width, weight, bias, eps)
    x = _wide(local, input, input.dtype).unflatten(1, (-1, width))
    dims, count = tuple(range(2, x.dim())), width * local.count(spatial)
    lines = local.mask(input, (0,))  # groups are whole, and channels are two dims here
    lines = None if lines is None else lines.unsqueeze(-1)
    scaled, _, _ = _standardise(local, x, local.mask(input, spatial), dims, count, eps, lines)
    return _per_channel(scaled.flatten(1, 2), weight, bias).to(input.dtype)


@shared
def _batch_norm(
    local: Local, input: Tensor, running_mean: Given, running_var: Given, weight: Given, bias: Given,
    training: bool, momentum: float, eps: float,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """In training, which alone has statistics to share, the batch's mean and unbiased variance come out too."""
    if not training:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, False)
    dims = tuple(d for d in range(input.dim()) if d != 1)
    count = local.count(dims)
    if _is_plain(local, input, dims, eps):
        out, mean, inverse = torch.native_batch_norm(input, weight, bias, None, None, True, momentum, eps)
        spread = inverse.detach().pow(-2) - eps
    else:
        x, mask, lines = _wide(local, input, input.dtype), local.mask(input, dims), _lines(local, input, dims)
        scaled, mean, spread = _standardise(local, x, mask, dims, count, eps, lines)
        out = _per_channel(scaled, weight, bias).to(input.dtype)
        kept = input.dtype if weight is None else weight.dtype  # as torch keeps statistics
        mean, spread = mean.to(kept), spread.to(kept)
    return out, mean.detach().flatten(), spread.detach().flatten() * (count / max(count - 1, 1))


NORMS: dict[str, Function] = {
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}
