"""Fronts of functions that are made of others: their formulas, whose ops keep placements one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.errors import ArgumentError
from meshloom.tensor.calling import Overload
from meshloom.tensor.fallback import fallback
from meshloom.types import Dims


def _reduce(loss: torch.Tensor, reduction: str) -> Any:
    if reduction not in ("none", "mean", "sum"):
        raise ArgumentError(f"{reduction} is not a valid value for reduction", fix="none, mean or sum")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _local_response_norm(
    input: torch.Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    """Each channel divided by what its neighbours are: the mean square over a window of channels."""
    if input.dim() < 3:
        raise ArgumentError(f"Expected 3D or higher dimensionality input (got {input.dim()} dimensions)")
    if not input.numel():
        return input
    if not input.is_floating_point():  # torch rounds the means of integers
        return fallback(F.local_response_norm, (input, size, alpha, beta, k), {}, "local_response_norm")
    around = F.pad(input * input, (0, 0) * (input.dim() - 2) + (size // 2, (size - 1) // 2))
    means = around.unfold(1, size, 1).mean(-1)
    return input / (means * alpha + k) ** beta


def _lp_pool(dims: int, average: Callable[..., torch.Tensor]) -> Overload:
    """The p-norm of each window: (mean of the powers * size of the window) ** (1 / p)."""

    def overload(
        input: torch.Tensor,
        norm_type: float,
        kernel_size: int | Sequence[int],
        stride: Dims = None,
        ceil_mode: bool = False,
    ) -> Any:
        p = float(norm_type)
        means = average(input.pow(p), kernel_size, stride, 0, ceil_mode)
        count = kernel_size**dims if isinstance(kernel_size, int) else math.prod(kernel_size)
        return (torch.sign(means) * F.relu(torch.abs(means)) * count).pow(1.0 / p)

    return overload


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """(log var + (input - target)^2 / var) / 2, a variance below eps taken for eps and without its gradient."""
    if isinstance(var, float):
        if var < 0:
            raise ArgumentError("var has negative entry/entries")
        var = torch.full_like(input, var)
    elif bool((var < 0).any()):
        raise ArgumentError("var has negative entry/entries")
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or any(
            mine not in (size, 1) for mine, size in zip(var.shape, input.shape, strict=True)
        ):
            raise ArgumentError("var is of incorrect size", input=list(input.shape), var=list(var.shape))
    limit = var.detach().clamp(min=eps) - var.detach()  # a constant: the gradient goes to var itself
    var = var + limit
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduce(loss, reduction)


def _multilabel_soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    reduce: object = None,
    reduction: str = "mean",
) -> Any:
    """The mean over classes of the two-class cross entropy of each."""
    if size_average is not None or reduce is not None:
        old = (input, target, weight, size_average, reduce, reduction)
        return fallback(F.multilabel_soft_margin_loss, old, {}, "multilabel_soft_margin_loss")
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    if weight is not None:
        loss = loss * weight
    return _reduce(loss.sum(-1) / input.shape[-1], reduction)


def _triplet_margin_with_distance_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    *,
    distance_function: Callable[..., torch.Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """max(margin + d(anchor, positive) - d(anchor, negative), 0)."""
    if reduction not in ("none", "mean", "sum"):
        raise ArgumentError(f"{reduction} is not a valid value for reduction", fix="none, mean or sum")
    if margin <= 0:
        raise ArgumentError(f"margin must be greater than 0, got {margin}")
    distance = distance_function if distance_function is not None else F.pairwise_distance
    if not anchor.dim() == positive.dim() == negative.dim():
        raise ArgumentError(
            "anchor, positive and negative must have the same number of dims",
            dims=[anchor.dim(), positive.dim(), negative.dim()],
        )
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return _reduce((margin + near - far).clamp_min(0), reduction)


def _gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Softmax of logits with noise; `hard` gives its largest element as one, with the gradient of the softmax."""
    noise = -torch.log(-torch.log1p(-torch.rand_like(logits).clamp_min(torch.finfo(logits.dtype).tiny)))
    soft = F.softmax((logits + noise) / tau, dim)
    if not hard:
        return soft
    place = soft.argmax(dim, keepdim=True)
    one = torch.zeros_like(soft).scatter(dim, place, 1.0)
    return one - soft.detach() + soft


COMPOSED: dict[str, Overload] = {
    "gumbel_softmax": _gumbel_softmax,
    "local_response_norm": _local_response_norm,
    "lp_pool1d": _lp_pool(1, F.avg_pool1d),
    "lp_pool2d": _lp_pool(2, F.avg_pool2d),
    "lp_pool3d": _lp_pool(3, F.avg_pool3d),
    "gaussian_nll_loss": _gaussian_nll_loss,
    "multilabel_soft_margin_loss": _multilabel_soft_margin_loss,
    "triplet_margin_with_distance_loss": _triplet_margin_with_distance_loss,
}
