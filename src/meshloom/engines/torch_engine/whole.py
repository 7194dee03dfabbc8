"""Softmax, norms, losses and attention on stored arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.layout import pad
from meshloom.engines.torch_engine.local import Function, Local, aware, wide_dtype
from meshloom.engines.torch_engine.reductions import Total, alone, centred
from meshloom.ops.labels import broadcast
from meshloom.ops.normalisation import normalised
from meshloom.types import Shape


@aware
def _layer_norm(
    local: Local, input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    dims = _trailing(local, input)
    if local.mask(input, dims) is None and not _divides_padding(local, input, eps):
        return F.layer_norm(input, tuple(input.shape[d] for d in dims), weight, bias, eps)
    return layer_norm(local, input, normalized_shape, weight, bias, eps)


def layer_norm(
    local: Local, input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float, total: Total = alone
) -> torch.Tensor:
    """The norm by its formula, which leaves padding out; `total` adds what other processes hold of a sum."""
    dims = _trailing(local, input)
    lines = _lines(local, input, dims)
    scaled, _, _ = _scaled(_wide(input), local.mask(input, dims), dims, local.count(dims), eps, total, lines)
    return _affine(scaled, weight, bias).to(input.dtype)


def _divides_padding(local: Local, input: torch.Tensor, eps: float) -> bool:
    """Whether lines that are all padding would be divided by their spread, which is zero: eps does not help."""
    return eps < torch.finfo(wide_dtype(input.dtype)).tiny and local.mask(input, tuple(range(input.dim()))) is not None


def _lines(local: Local, input: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor | None:
    """True where a line along dims holds elements, False where it is all padding; None where all of them do."""
    return local.mask(input, tuple(dim for dim in range(input.dim()) if dim not in dims))


def _trailing(local: Local, input: torch.Tensor) -> tuple[int, ...]:
    """The dims that a layer_norm or rms_norm call normalises."""
    return tuple(range(input.dim() - normalised(local.call), input.dim()))


def _wide(input: torch.Tensor) -> torch.Tensor:
    return input.to(wide_dtype(input.dtype))


def _scaled(
    x: torch.Tensor, mask: torch.Tensor | None, dims: tuple[int, ...], count: int, eps: float, total: Total,
    lines: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Zero mean and unit variance over dims, padding left out; and both. Where no line is, the variance is 1."""
    middle, mean = centred(x, mask, dims, count, total)
    spread = total(middle.square().sum(dims, keepdim=True)) / count
    return middle * _inverse_root(spread + eps, lines), mean, spread


def _inverse_root(squares: torch.Tensor, lines: torch.Tensor | None) -> torch.Tensor:
    """1 / sqrt, and 1 for lines that are all padding: 1 / sqrt(0) would be infinite, its gradient nan."""
    return torch.rsqrt(squares if lines is None else torch.where(lines, squares, 1))


def _affine(input: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    input = input if weight is None else input * weight
    return input if bias is None else input + bias


def _per_channel(input: torch.Tensor, *each: Any) -> torch.Tensor:
    """Scale and shift, one of each per channel."""
    line = (-1,) + (1,) * (input.dim() - 2)
    return _affine(input, *(None if x is None else x.view(line) for x in each))


@aware
def _rms_norm(local: Local, input: torch.Tensor, normalized_shape: Any, weight: Any, eps: float | None) -> torch.Tensor:
    dims = _trailing(local, input)
    if local.mask(input, dims) is None and not _divides_padding(local, input, 1 if eps is None else eps):
        return F.rms_norm(input, tuple(input.shape[d] for d in dims), weight, eps)
    return rms_norm(local, input, normalized_shape, weight, eps)


def rms_norm(
    local: Local, input: torch.Tensor, normalized_shape: Any, weight: Any, eps: float | None, total: Total = alone
) -> torch.Tensor:
    """The norm by its formula: padding, which is zero, adds nothing."""
    dims, x = _trailing(local, input), _wide(input)
    squares = total(x.square().sum(dims, keepdim=True)) / local.count(dims)
    squares = squares + (torch.finfo(x.dtype).eps if eps is None else eps)
    scaled = x * _inverse_root(squares, _lines(local, input, dims))
    return _affine(scaled, weight, None).to(input.dtype)


@aware
def _group_norm(local: Local, input: torch.Tensor, num_groups: int, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    if local.mask(input, tuple(range(2, input.dim()))) is None and not _divides_padding(local, input, eps):
        groups = input.shape[1] // (local.call.shape("input")[1] // num_groups)
        if not input.numel():  # torch does not take it, and the parameters have a gradient of zeros
            return _per_channel(input * 1, weight, bias)
        return torch.group_norm(input, groups, weight, bias, eps)
    return group_norm(local, input, num_groups, weight, bias, eps)


def group_norm(
    local: Local, input: torch.Tensor, num_groups: int, weight: Any, bias: Any, eps: float, total: Total = alone
) -> torch.Tensor:
    """The norm by its formula, of the groups that are here, by the channels that one has."""
    width, spatial = local.call.shape("input")[1] // num_groups, tuple(range(2, input.dim()))
    x = _wide(input).unflatten(1, (-1, width))
    dims, count = tuple(range(2, x.dim())), width * local.count(spatial)
    lines = local.mask(input, (0,))  # groups are whole
    scaled, _, _ = _scaled(x, local.mask(input, spatial), dims, count, eps, total, _deeper(lines))
    return _per_channel(scaled.flatten(1, 2), weight, bias).to(input.dtype)


def _deeper(lines: torch.Tensor | None) -> torch.Tensor | None:
    """A mask of the batch for an array whose channels are two dims."""
    return None if lines is None else lines.unsqueeze(-1)


@aware
def _batch_norm(
    local: Local, input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """In training the batch's mean and unbiased variance come out too."""
    if not training:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, False)
    dims = _but_channels(input)
    if local.mask(input, dims) is not None or _divides_padding(local, input, eps):
        return batch_norm(local, input, running_mean, running_var, weight, bias, training, momentum, eps)
    out, mean, inverse = torch.native_batch_norm(input, weight, bias, None, None, True, momentum, eps)
    return out, mean.detach(), _unbiased(inverse.detach().pow(-2) - eps, local.count(dims))


def batch_norm(
    local: Local, input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool,
    momentum: float, eps: float, total: Total = alone,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The norm in training by its formula, with the batch's mean and unbiased variance."""
    dims = _but_channels(input)
    count = local.count(dims)
    lines = _lines(local, input, dims)
    scaled, mean, spread = _scaled(_wide(input), local.mask(input, dims), dims, count, eps, total, lines)
    out = _per_channel(scaled, weight, bias).to(input.dtype)
    return out, mean.detach().flatten(), _unbiased(spread.detach().flatten(), count)


def _but_channels(input: torch.Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(input.dim()) if d != 1)


def _unbiased(spread: torch.Tensor, count: int) -> torch.Tensor:
    return spread * (count / max(count - 1, 1))


def _reduced(local: Local, each: torch.Tensor, reduction: str) -> torch.Tensor:
    """The loss of some elements: a mean counts the elements of the whole."""
    if reduction == "none":
        return each
    counts = {"sum": 1, "mean": math.prod(_whole(local)), "batchmean": (*local.call.shape("input"), 1)[0]}
    if not each.is_floating_point() and not each.is_complex():
        return each.sum() if reduction == "sum" else each.mean()  # int64; torch refuses a mean of integers
    return (each.sum(dtype=wide_dtype(each.dtype)) / counts[reduction]).to(each.dtype)


def _whole(local: Local) -> Shape:
    return broadcast([topology.shape for topology in local.call.operands])


def _element_loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's own where all elements are here, else the sum of those that are."""

    @aware
    def loss(local: Local, reduction: str, size_average: Any = None, reduce: Any = None, **given: Any) -> torch.Tensor:
        here = broadcast([tuple(each.shape) for each in given.values() if isinstance(each, torch.Tensor)])
        if here == _whole(local):
            return function(**given, reduction=reduction)
        return _reduced(local, function(**given, reduction="none"), reduction)

    return loss


def _formula_loss(formula: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that torch cannot map over devices, by its formula."""

    @aware
    def loss(local: Local, reduction: str, size_average: Any = None, reduce: Any = None, **given: Any) -> torch.Tensor:
        return _reduced(local, formula(**given), reduction)

    return loss


def _kl_div(input: torch.Tensor, target: torch.Tensor, log_target: bool) -> torch.Tensor:
    if log_target:
        return target.exp() * (target - input)
    return torch.xlogy(target, target) - target * input


def _soft_margin_loss(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(-target * input))


@aware
def _nll_loss(
    local: Local, input: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any,
    reduction: str,
) -> torch.Tensor:  # fmt: skip
    input = local.trimmed("input", input, 1 if input.dim() > 1 else 0)
    weight = None if weight is None else local.trimmed("weight", weight, 0)
    return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)


_ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip


def _softmax(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda input, dim, dtype, _stacklevel: function(input, dim, dtype=dtype)


@aware
def _cross_entropy(
    local: Local, input: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any,
    reduction: str, label_smoothing: float,
) -> torch.Tensor:  # fmt: skip
    input = local.trimmed("input", input, 1 if input.dim() > 1 else 0)
    weight = None if weight is None else local.trimmed("weight", weight, 0)
    return F.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


@aware
def _attention(
    local: Local, query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, **options: Any
) -> torch.Tensor:
    """Padded keys must not weigh, and a causal mask counts queries: both are taken off, and queries put back after."""
    key, value = (local.trimmed(name, each, each.dim() - 2) for name, each in (("key", key), ("value", value)))
    if attn_mask is not None:
        attn_mask = local.trimmed("attn_mask", attn_mask, attn_mask.dim() - 1)
    if not is_causal:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    dim, topology = query.dim() - 2, local.ins[local.call.index("query")]
    query = local.trimmed("query", query, dim)
    found = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=True, **options)
    return pad(found, found.dim() - 2, topology.shape[dim], topology.shards[dim])


WHOLE: dict[str, Function] = {
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **{function.__name__: _element_loss(function) for function in _ELEMENT_LOSSES},
    "soft_margin_loss": _formula_loss(_soft_margin_loss),
    "kl_div": _formula_loss(_kl_div),
    "nll_loss": _nll_loss,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
