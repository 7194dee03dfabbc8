"""Fronts of softmax, norms, losses, attention, look-ups and products."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.runtime import state
from meshloom.tensor.calling import Front, invoke, own, table_call
from meshloom.tensor.fallback import fallback
from meshloom.tensor.fronts.casting import cast
from meshloom.tensor.fronts.pointwise import dropout

LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.poisson_nll_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.nll_loss, F.cross_entropy,
)  # fmt: skip


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


def _loss(function: Callable[..., Any]) -> Front:
    """A loss of `torch.nn.functional`; its old arguments `size_average` and `reduce` are left to torch."""
    name, signature = function.__name__, inspect.signature(function)

    def front(*args: Any, output: Any = None, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if any(given.get(each) is not None for each in ("size_average", "reduce")):
            return fallback(function, args, kwargs, name)
        return table_call(name, output=output, **given)

    return front


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Training takes the statistics of the global batch, and moves the running ones towards them."""
    options = (weight, bias, training, momentum, eps)
    if not training:
        return table_call("batch_norm", input, running_mean, running_var, *options)
    with state.changed(output=None):  # what was asked for is asked of the normalised input alone
        out, mean, spread = table_call("batch_norm", input, None, None, *options)
    with torch.no_grad(), state.changed(output=None):
        for running, now in ((running_mean, mean), (running_var, spread)):
            if running is not None:
                invoke("lerp_", (running, cast(now, own(running).dtype), momentum), {})
    return out if state.output is None else table_call("clone", out)


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Every channel is a group of its own; with given statistics it is a batch norm that does not train."""
    if not use_input_stats:
        return table_call("batch_norm", input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is None and running_var is None:
        return table_call("group_norm", input, own(input).shape[1], weight, bias, eps)
    given = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return fallback(F.instance_norm, given, {}, "instance_norm")


def _softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return invoke("softmax", (table_call("neg", input), dim), {"dtype": dtype})


def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    """Pairs of dims that broadcast are left to torch."""
    dims = dims.tolist() if isinstance(dims, torch.Tensor) else dims
    if not isinstance(dims, int):
        first, second = ([each] if isinstance(each, int) else each for each in dims)
        sizes = zip((own(a).shape[d] for d in first), (own(b).shape[d] for d in second), strict=False)
        if any(here != there and 1 in (here, there) for here, there in sizes):
            return fallback(torch.tensordot, (a, b, dims), {"out": out}, "tensordot")
    return table_call("tensordot", a, b, dims, out=out)


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
    **{function.__name__: _loss(function) for function in LOSSES},
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "softmin": _softmin,
    "tensordot": _tensordot,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "linear": _linear,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
}
