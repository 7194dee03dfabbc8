"""The torch engine: op name to function. A function sees stored arrays, whose dims are the tensor's dims.

A function marked `aware` also gets the `Local` of the call, for what the arrays alone do not tell: global sizes, and
where padding is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.layout import mask_of, unpad
from meshloom.ops import Call
from meshloom.ops.labels import normal_dims
from meshloom.ops.shapes import indexed_dims, is_whole, section_sizes, squeezed_dims
from meshloom.ops.special import normalised
from meshloom.placement import Topology
from meshloom.types import Shape


@dataclass(frozen=True, slots=True)
class Local:
    """What a function may know of the call besides its arrays."""

    call: Call
    ins: tuple[Topology, ...]
    shapes: tuple[Shape, ...]
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Work that depends on the call alone, done on its first run."""
        if name not in self.memo:
            self.memo[name] = work()
        return self.memo[name]

    def count(self, dims: tuple[int, ...]) -> int:
        """The global number of elements along dims of the input."""
        return math.prod(self.call.shape("input")[dim] for dim in dims)

    def mask(self, data: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor | None:
        """True where the input holds an element along dims."""
        return mask_of(self.ins[self.call.index("input")], data.device, dims)

    def trimmed(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """The operand without its padding along a dim that is looked up by index: padding may be interior."""
        return unpad(data, dim, self.call.shape(name)[dim], self.ins[self.call.index(name)].shards[dim])


def aware(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that gets the `Local` first."""
    function.is_aware = True  # type: ignore[attr-defined]
    return function


def _dims(input: torch.Tensor, dim: Any) -> tuple[int, ...]:
    return normal_dims(dim, input.dim())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up: half precision is summed in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _sum(input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims = _dims(input, dim)
    return torch.sum(input, dims, keepdim, dtype=dtype) if dims else torch.sum(input, dtype=dtype)


@aware
def _mean(local: Local, input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    dims = _dims(input, dim)
    kind = dtype or input.dtype
    if tuple(input.shape) == local.call.shape("input") or not (kind.is_floating_point or kind.is_complex):
        return torch.mean(input, dims, keepdim, dtype=dtype) if dims else torch.mean(input, dtype=dtype)
    return (torch.sum(input, dims, keepdim, dtype=_wide(kind)) / local.count(dims)).to(kind)


def _prod(input: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return torch.prod(input, dtype=dtype) if dim is None else torch.prod(input, dim, keepdim, dtype=dtype)


def _over_dims(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(input: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        dims = _dims(input, dim)
        return function(input, dims, keepdim) if dims else function(input)

    return reduce


@aware
def _var(local: Local, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    dims = _dims(input, dim)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    mask = local.mask(input, dims)
    if mask is None or not (input.is_floating_point() or input.is_complex()):
        return torch.var(input, dims or None, correction=correction, keepdim=keepdim)
    count = local.count(dims)
    wide = input.to(_wide(input.dtype))
    centred = torch.where(mask, wide - wide.sum(dims, keepdim=True) / count, 0)
    squares = (centred * centred.conj()).real if centred.is_complex() else centred.square()
    spread = squares.sum(dims, keepdim) / max(count - correction, 0)
    return spread if input.is_complex() else spread.to(input.dtype)


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
    wide = input.to(_wide(input.dtype))
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


@aware
def _embedding(local: Local, input: Any, weight: Any, padding_idx: int | None) -> torch.Tensor:
    if padding_idx is not None and padding_idx < 0:
        padding_idx += local.call.shape("weight")[0]
    return F.embedding(input, local.trimmed("weight", weight, 0), padding_idx)


@aware
def _reshape(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    return input.reshape(local.shapes[0])


@aware
def _squeeze(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    dims = squeezed_dims(local.call)
    return input.squeeze(dims) if dims else input.view(input.shape)


@aware
def _expand(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    return input.expand(local.shapes[0])


@aware
def _narrow(local: Local, input: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if length == local.call.shape("input")[dim]:
        return input.view(input.shape)
    return input.narrow(dim, start, length)


@aware
def _getitem(local: Local, input: torch.Tensor, index: Any) -> torch.Tensor:
    return input[local.once("index", lambda: _padded_index(local.call.shape("input"), index))]


def _padded_index(shape: Shape, index: Any) -> tuple[Any, ...]:
    """The index with whole dims taken whole, padding included."""
    return tuple(
        slice(None) if dim is not None and is_whole(each, shape[dim]) else each
        for each, dim in indexed_dims(index, shape)
    )


@aware
def _split(local: Local, input: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    dim, sizes = section_sizes(local.call)
    return input.split(sizes, dim)


# For each op of the table: the function, called with the op's arguments by name, or as they came for pointwise ops.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sign": torch.sign,
    "reciprocal": torch.reciprocal,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
    "addcdiv": torch.addcdiv,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "logical_not": torch.logical_not,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "bitwise_not": torch.bitwise_not,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "where": torch.where,
    "masked_fill": torch.masked_fill,
    "clamp": torch.clamp,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "to": lambda input, dtype: input.to(dtype),
    "clone": torch.clone,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "dot": torch.dot,
    "linear": F.linear,
    "einsum": lambda equation, operands: torch.einsum(equation, *operands),
    "sum": _sum,
    "mean": _mean,
    "amax": _over_dims(torch.amax),
    "amin": _over_dims(torch.amin),
    "prod": _prod,
    "any": _over_dims(torch.any),
    "all": _over_dims(torch.all),
    "var": _var,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "max_dim": torch.max,
    "min_dim": torch.min,
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "layer_norm": _layer_norm,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": torch.unsqueeze,
    "permute": torch.permute,
    "transpose": torch.transpose,
    "expand": _expand,
    "narrow": _narrow,
    "getitem": _getitem,
    "split": _split,
    "chunk": _split,
    "cat": torch.cat,
    "stack": torch.stack,
}
