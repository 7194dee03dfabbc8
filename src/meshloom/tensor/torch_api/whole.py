"""Fronts of softmax, norms, losses, attention, look-ups and products."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines import private
from meshloom.errors import ArgumentError, ShapeError
from meshloom.runtime import state
from meshloom.tensor.calling import Overload, invoke, pure, table_call, table_results
from meshloom.tensor.fallback import fallback
from meshloom.tensor.reading import as_tensor, find_mesh
from meshloom.tensor.torch_api.casting import cast
from meshloom.tensor.torch_api.composed import COMPOSED
from meshloom.tensor.torch_api.pointwise import dropout

LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.poisson_nll_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.nll_loss, F.cross_entropy,
)  # fmt: skip


def _softmax(name: str) -> Callable[..., object]:
    """`dtype=` is cast to first: an integer cannot hold the -inf that padding needs."""

    def overload(
        input: torch.Tensor, *args: object, dtype: torch.dtype | None = None, **kwargs: object
    ) -> torch.Tensor:
        wanted = dtype or next((each for each in args if isinstance(each, torch.dtype)), None)
        given = input if wanted is None else cast(input, wanted)
        return table_call(name, given, *args[:1], **kwargs)

    return overload


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    output: object = None,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return fallback(F.embedding, (input, weight, *options), {}, "embedding")
    return table_call("embedding", input, weight, padding_idx, output=output)


def _loss(function: Callable[..., object]) -> Overload:
    """A loss of `torch.nn.functional`; its old arguments `size_average` and `reduce` are left to torch."""
    name, signature = function.__name__, inspect.signature(function)

    def overload(*args: object, output: object = None, **kwargs: object) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if any(given.get(each) is not None for each in ("size_average", "reduce")):
            return fallback(function, args, kwargs, name)
        if private.is_any_autocast_enabled():
            given = {key: _widen(value) for key, value in given.items()}
        return table_call(name, output=output, **given)

    return overload


def _widen(value: object) -> Any:
    """Under autocast losses are computed in float32; torch casts inside its own functions, and ours may have others."""
    held = value
    if not isinstance(held, torch.Tensor) or held.dtype not in (torch.float16, torch.bfloat16):
        return value
    return cast(held, torch.float32) if torch.is_autocast_enabled(held.device.type) else value


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Training takes the statistics of the global batch, and moves the running ones towards them."""
    options = (weight, bias, training, momentum, eps)
    if not math.prod(input.shape):
        return _norm_of_nothing(input, weight, bias)
    if not training:
        return table_call("batch_norm", input, running_mean, running_var, *options)
    shape = input.shape
    if math.prod((*shape[:1], *shape[2:])) == 1:
        raise ShapeError(
            f"batch_norm in training needs more than one value per channel and got {list(shape)}",
            fix="give it a larger batch, or call eval() on the module",
        )
    with state.changed(output=None):  # what was asked for is asked of the normalised input alone
        out, mean, spread = table_results("batch_norm", input, None, None, *options)
    with torch.no_grad(), state.changed(output=None):
        for running, now in ((running_mean, mean), (running_var, spread)):
            if running is not None:
                invoke("lerp_", (running, cast(now, running.dtype), momentum), {})
    return out if state.output is None else table_call("clone", out)


def _norm_of_nothing(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """An empty batch is normalised as torch does it: running statistics stay, parameters have gradients of zeros."""
    out = table_call("clone", input)
    for name, each in (("mul", weight), ("add", bias)):
        out = out if each is None else table_call(name, out, each[0])
    return out


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Every channel is a group of its own; with given statistics it is a batch norm that does not train."""
    if not use_input_stats:
        return table_call("batch_norm", input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is None and running_var is None:
        return table_call("group_norm", input, input.shape[1], weight, bias, eps)
    given = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return fallback(F.instance_norm, given, {}, "instance_norm")


def _softmin(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return invoke("softmax", (table_call("neg", input), dim), {"dtype": dtype})


def _tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: object = None) -> Any:
    """Pairs of dims that broadcast are left to torch."""
    dims = dims.tolist() if isinstance(dims, torch.Tensor) else dims
    if not isinstance(dims, int):
        first, second = ([each] if isinstance(each, int) else each for each in dims)
        sizes = zip((a.shape[d] for d in first), (b.shape[d] for d in second), strict=False)
        if any(here != there and 1 in (here, there) for here, there in sizes):
            return fallback(torch.tensordot, (a, b, dims), {"out": out}, "tensordot")
    return table_call("tensordot", a, b, dims, out=out)


def _attention(
    query: Any,
    key: Any,
    value: object,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output: object = None,
) -> Any:
    if not dropout_p:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        given = {name: each for name, each in options.items() if each is not None and each is not False}
        return table_call("scaled_dot_product_attention", query, key, value, output=output, **given)
    query, key, value, attn_mask = _on_one_mesh(query, key, value, attn_mask)
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


def _on_one_mesh(*operands: Any) -> list[object]:
    """Plain tensors among operands are taken as replicated, as in a call of the table."""
    mesh = find_mesh(operands)
    return [each if each is None or mesh is None else as_tensor(each, mesh) for each in operands]


def _multi_head_attention(*args: object, **kwargs: object) -> Any:
    """`nn.MultiheadAttention`, batch and heads as dims of their own: torch merges them, which gathers a sharded one."""
    bound = _HEADS.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.add_zero_attn or any(getattr(given, name) is not None for name in ("bias_k", "static_k", "static_v")):
        return fallback(F.multi_head_attention_forward, args, kwargs, "multi_head_attention_forward")
    alone = given.query.ndim == 2
    query, key, value = (_heads(each, given.num_heads, alone) for each in _project(given))
    mask = _merged_masks(given, query.shape[0])
    is_plain = given.is_causal and given.key_padding_mask is None and not given.need_weights  # then the mask is a hint
    dropped = given.dropout_p if given.training else 0.0
    weights = None
    if given.need_weights:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        weights = dropout(weights, dropped)
        found = weights @ value
    else:
        found = _attention(query, key, value, None if is_plain else mask, dropped, is_plain)
    out = F.linear(found.permute(2, 0, 1, 3).flatten(2), given.out_proj_weight, given.out_proj_bias)
    if weights is not None and given.average_attn_weights:
        weights = weights.mean(1)
    return (out.squeeze(1), weights if weights is None else weights.squeeze(0)) if alone else (out, weights)


_HEADS = inspect.signature(F.multi_head_attention_forward)


def _project(given: Any) -> list[Any]:
    """Query, key and value after their projections, whose weights lie in one matrix or in three."""
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    inputs = (given.query, given.key, given.value)
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def _heads(x: torch.Tensor, count: int, alone: bool) -> Any:
    """(length, batch, width) as (batch, head, length, width of a head)."""
    return (x.unsqueeze(1) if alone else x).unflatten(-1, (count, -1)).permute(1, 2, 0, 3)


def _merged_masks(given: Any, batch: int) -> Any:
    """The masks of scores and of keys as one that is added to the scores of (batch, head, query, key), or None."""
    if given.is_causal and given.attn_mask is None:
        raise ArgumentError("is_causal is a hint about attn_mask, which is not given", fix="give attn_mask as well")
    scores, keys = (
        None if mask is None else private.canonical_mask(mask, name, None, "", given.query.dtype, check_other=False)
        for mask, name in ((given.attn_mask, "attn_mask"), (given.key_padding_mask, "key_padding_mask"))
    )
    if scores is not None and scores.dim() == 3:
        scores = scores.unflatten(0, (batch, -1))
    if keys is not None:
        keys = (keys if keys.dim() == 2 else keys.unsqueeze(0))[:, None, None]
    return keys if scores is None else scores if keys is None else scores + keys


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: object) -> Any:
    if weight.ndim == 1:
        return fallback(F.linear, (input, weight, bias), kwargs, "linear")
    return table_call("linear", input, weight, bias, **kwargs)


def _grouped_mm(*args: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None, **kwargs: Any) -> Any:
    """Tokens in a line and experts in a stack have a rule; other forms are left to torch."""
    output = kwargs.pop("output", None)
    tokens, experts, *more = (*args, *(kwargs[name] for name in ("self", "mat2", "mat_a", "mat_b") if name in kwargs))
    offs, bias, out_dtype = (*more, *(offs, bias, out_dtype)[len(more) :])
    if (tokens.ndim, experts.ndim) != (2, 3) or offs is None or bias is not None or out_dtype is not None:
        given = {"offs": offs, "bias": bias, "out_dtype": out_dtype}
        return fallback(private.grouped_mm, (tokens, experts), given, "grouped_mm")
    return table_call("grouped_mm", tokens, experts, offs, output=output)


def _einsum(equation: object, *operands: object, output: object = None) -> Any:
    if not isinstance(equation, str):
        return fallback(torch.einsum, (equation, *operands), {}, "einsum")
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    return table_call("einsum", equation, *listed, output=output)


WHOLE: dict[str, Overload] = {
    **pure({function.__name__: _loss(function) for function in LOSSES}),
    **pure({name: _softmax(name) for name in ("softmax", "log_softmax")}),
    **pure({"embedding": _embedding, "linear": _linear, "einsum": _einsum, "softmin": _softmin}),
    **pure({"scaled_dot_product_attention": _attention}),
    **COMPOSED,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "tensordot": _tensordot,
    "multi_head_attention_forward": _multi_head_attention,
    "grouped_mm": _grouped_mm,
    "_grouped_mm": _grouped_mm,
}
