"""Softmax, norms, losses and attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from meshloom.engines.engine import Function, aware
from meshloom.engines.numpy_engine.local import Array, Known
from meshloom.engines.numpy_engine.lookup import check_indices
from meshloom.engines.numpy_engine.promotion import is_float, need_float
from meshloom.errors import ArgumentError, UnsupportedError
from meshloom.ops.labels import normal_dim
from meshloom.ops.normalisation import normalised

Formula = Callable[..., Array]


def _log_softmax(input: Array, axis: int) -> Array:
    if not input.size:
        return np.array(input)
    shifted = input - np.max(input, axis=axis, keepdims=True)
    found: Array = shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))
    return found


def _softmax(input: Array, axis: int) -> Array:
    if not input.size:
        return np.array(input)
    powers = np.exp(input - np.max(input, axis=axis, keepdims=True))
    found: Array = powers / np.sum(powers, axis=axis, keepdims=True)
    return found


def _along(op: str, function: Formula) -> Function:
    def apply(input: Array, dim: int, dtype: Any, _stacklevel: int) -> Array:
        found = input if dtype is None else input.astype(dtype, copy=False)
        need_float(op, found)
        axis = normal_dim(dim, found.ndim)
        result: Array = function(found.reshape(found.shape or (1,)), axis).reshape(found.shape)
        return result

    return apply


@aware
def _layer_norm(
    known: Known, input: Array, normalized_shape: object, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    need_float("layer_norm", input, weight, bias)
    axes = tuple(range(input.ndim - normalised(known.call), input.ndim))
    count = math.prod(input.shape[axis] for axis in axes)
    centred = input - np.sum(input, axis=axes, keepdims=True) / count
    scaled = centred / np.sqrt(np.sum(centred * centred, axis=axes, keepdims=True) / count + eps)
    scaled = scaled if weight is None else scaled * weight
    found: Array = scaled if bias is None else scaled + bias
    return found


def _cross_entropy(
    input: Array, target: Array, weight: Array | None, size_average: object, ignore_index: int, reduce: object,
    reduction: str, label_smoothing: float,
) -> Array:  # fmt: skip
    need_float("cross_entropy", input, weight)
    if size_average is not None or reduce is not None:
        raise ArgumentError("size_average and reduce are torch's old names", fix="use reduction=")
    axis = 1 if input.ndim > 1 else 0
    logs = np.moveaxis(_log_softmax(input, axis), axis, -1)
    weights = np.ones(logs.shape[-1], logs.dtype) if weight is None else weight
    if is_float(target.dtype):
        losses, total = _by_share(logs, np.moveaxis(target, axis, -1), weights, label_smoothing)
    else:
        losses, total = _by_class(logs, target, weights, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    found: Array = np.sum(losses) if reduction == "sum" else np.true_divide(np.sum(losses), total, dtype=input.dtype)
    return found


def _by_class(logs: Array, target: Array, weights: Array, ignored: int, smoothing: float) -> tuple[Array, Any]:
    """The losses of targets that name a class, and what their mean is divided by: the weight of what counts."""
    counts = target != ignored
    place = np.where(counts, target, 0)
    check_indices("target", place, logs.shape[-1])
    own = np.where(counts, weights[place], 0)
    losses = -own * np.take_along_axis(logs, place[..., None], -1)[..., 0]
    if smoothing:
        spread = np.where(counts, -np.sum(logs * weights, axis=-1), 0) / logs.shape[-1]
        losses = (1 - smoothing) * losses + smoothing * spread
    return np.where(counts, losses, 0).astype(logs.dtype), np.sum(own)


def _by_share(logs: Array, target: Array, weights: Array, smoothing: float) -> tuple[Array, Any]:
    """The losses of targets that give each class its share, and what their mean is divided by: how many there are."""
    classes = logs.shape[-1]
    shares = target * (1 - smoothing) + smoothing / classes
    return -np.sum(logs * shares * weights, axis=-1).astype(logs.dtype), max(logs.size // max(classes, 1), 0)


def _attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Array:  # fmt: skip
    need_float("scaled_dot_product_attention", query, key, value)
    if dropout_p:
        raise UnsupportedError("the numpy engine has no dropout", fix="use dropout_p=0.0, or the torch engine")
    if enable_gqa:
        key, value = (np.repeat(each, query.shape[-3] // each.shape[-3], axis=-3) for each in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = np.matmul(query, np.swapaxes(key, -1, -2)) * np.asarray(factor, query.dtype)
    scores = scores + _mask(scores, attn_mask, is_causal)
    # a query that may look nowhere sees zeros, not nan
    highest = np.max(scores, axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(highest), 0, highest))
    sums = np.sum(powers, axis=-1, keepdims=True)
    found: Array = np.matmul(powers / np.where(sums == 0, 1, sums), value)
    return found


def _mask(scores: Array, mask: Array | None, is_causal: bool) -> Array:
    """What is added to the scores: nothing, or -inf where a query may not look."""
    if is_causal:
        if mask is not None:
            raise ArgumentError("is_causal and attn_mask exclude each other", fix="give one of them")
        mask = np.tri(*scores.shape[-2:], dtype=bool)
    if mask is None:
        return np.zeros((), scores.dtype)
    shown = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask
    return shown.astype(scores.dtype, copy=False)


WHOLE: dict[str, Function] = {
    "softmax": _along("softmax", _softmax),
    "log_softmax": _along("log_softmax", _log_softmax),
    "layer_norm": _layer_norm,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
