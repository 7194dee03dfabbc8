"""Fronts of softmax, losses, attention, look-ups and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.tensor.calling import Front, invoke, own, table_call
from meshloom.tensor.fallback import fallback
from meshloom.tensor.fronts.casting import cast
from meshloom.tensor.fronts.pointwise import dropout


def _softmax(name: str) -> Callable[..., Any]:
    """`dtype=` is cast to first: an integer cannot hold the -inf that padding needs."""

    def front(input: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        wanted = dtype or next((each for each in args if isinstance(each, torch.dtype)), None)
        given = input if wanted is None else cast(input, wanted)
        return table_call(name, given, *args[:1], **kwargs)

    return front


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    output: Any = None,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return fallback(F.embedding, (input, weight, *options), {}, "embedding")
    return table_call("embedding", input, weight, padding_idx, output=output)


def _cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    legacy = [kwargs.get("size_average"), kwargs.get("reduce"), *args[1:2], *args[3:4]]
    if any(each is not None for each in legacy):
        return fallback(F.cross_entropy, (input, target, *args), kwargs, "cross_entropy")
    return table_call("cross_entropy", input, target, *args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output: Any = None,
) -> Any:
    if not dropout_p:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        given = {name: each for name, each in options.items() if each is not None and each is not False}
        return table_call("scaled_dot_product_attention", query, key, value, output=output, **given)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (invoke("repeat_interleave", (each, groups), {"dim": -3}) for each in (key, value))
    scores = invoke("matmul", (query, invoke("transpose", (key, -2, -1), {})), {})
    scores = invoke("mul", (scores, scale if scale is not None else query.shape[-1] ** -0.5), {})
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        scores = invoke("masked_fill", (scores, ~allowed, float("-inf")), {})
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = invoke("masked_fill", (scores, invoke("logical_not", (attn_mask,), {}), float("-inf")), {})
    elif attn_mask is not None:
        scores = invoke("add", (scores, attn_mask), {})
    weights = dropout(invoke("softmax", (scores, -1), {}), dropout_p)
    return invoke("matmul", (weights, value), {})


def _linear(input: Any, weight: Any, bias: Any = None, **kwargs: Any) -> Any:
    if own(weight).ndim == 1:
        return fallback(F.linear, (input, weight, bias), kwargs, "linear")
    return table_call("linear", input, weight, bias, **kwargs)


def _einsum(equation: Any, *operands: Any, output: Any = None) -> Any:
    if not isinstance(equation, str):
        return fallback(torch.einsum, (equation, *operands), {}, "einsum")
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    return table_call("einsum", equation, *listed, output=output)


WHOLE: dict[str, Front] = {
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "linear": _linear,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
}
