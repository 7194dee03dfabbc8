"""Softmax, norms, losses and attention on stored arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local, aware, wide_dtype
from meshloom.ops.normalisation import normalised


@aware
def _layer_norm(
    local: Local, input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    ndim = input.dim()
    dims = tuple(range(ndim - normalised(local.call), ndim))
    mask = local.mask(input, dims)
    if mask is None:
        return F.layer_norm(input, tuple(input.shape[d] for d in dims), weight, bias, eps)
    count = local.count(dims)
    wide = input.to(wide_dtype(input.dtype))
    centred = torch.where(mask, wide - wide.sum(dims, keepdim=True) / count, 0)
    scaled = (centred * torch.rsqrt(centred.square().sum(dims, keepdim=True) / count + eps)).to(input.dtype)
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


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


WHOLE: dict[str, Function] = {
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "layer_norm": _layer_norm,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
}
