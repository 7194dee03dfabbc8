"""The five reductions, one line each: how two values combine, how all along a dim do, and what changes nothing.

`along` is torch's own function with its corners right: the sign of a zero, sums that overflow where their mean does
not, gradients at nan and infinity. `quickly` is torch's own over the first dim, into memory that is there already. What
fills the place of a missing element is `placement.IDENTITY`. A mean is the sum of equal parts, divided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshloom.engines.node import Node
from meshloom.errors import DTypeError
from meshloom.types import Shape, short_dtype


def product(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The product along a dim. torch's own divides by each factor on the way back, and inf / inf is nan."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.prod(dim, dtype=x.dtype)
    x = x.clone()  # it is kept for the way back, and the parts may be written to before
    while x.shape[dim] > 1:
        half, odd = divmod(x.shape[dim], 2)
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([pairs, x.narrow(dim, 2 * half, 1)], dim) if odd else pairs
    return x.squeeze(dim)


LONG = 1 << 18  # elements of a part from which parts are added one by one
PANEL = 1 << 20  # elements that all parts add to before the next ones: they stay in a cache


def _are_long(parts: torch.Tensor) -> bool:
    """Whether parts are better added one by one: torch's own reads all of them at once, a line of the cache of each.

    It waits for memory then, by how far the parts lie apart two or three times as long.
    """
    is_wide = parts.dtype in (torch.float32, torch.float64)  # a sum in others is rounded once
    return is_wide and len(parts) > 1 and parts.numel() >= LONG * len(parts) and parts.is_contiguous()


def add_parts(parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of parts that lie in order, one after another; into `out` where it is given."""
    found = torch.empty_like(parts[0]) if out is None else out
    for into, first, second, *others in zip(*(each.view(-1).split(PANEL) for each in (found, *parts)), strict=True):
        torch.add(first, second, out=into)
        for each in others:
            into.add_(each)
    return found


class AddParts(Node):
    """The sum of long parts; with a gradient it is the same to the last bit as without."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor) -> torch.Tensor:
        ctx.shape = parts.shape
        return add_parts(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.expand(ctx.shape)


def total(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along a dim. torch's own starts from +0, so that a sum of nothing but -0 would lose its sign."""
    if x.shape[dim] == 1:
        return x.squeeze(dim).clone()
    if dim == 0 and _are_long(x):
        return AddParts.apply(x)
    found = x.sum(dim, dtype=x.dtype)
    if x.is_floating_point() or x.is_complex():
        with torch.no_grad():
            _reals(found).masked_fill_(_is_negative_zero(_reals(x), dim), -0.0)
    return found


def _reals(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _is_negative_zero(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Whether all along a dim is -0, whose bits are those of the lowest integer."""
    bits = _BITS[x.element_size()]
    return x.view(bits).amax(dim) == torch.iinfo(bits).min


def mean(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The mean along a dim. Where the sum overflows and the mean does not, a power of two is taken out first."""
    count, wide = x.shape[dim], x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    found = total(wide, dim) / count
    part = 2.0 ** -count.bit_length()
    return torch.where(found.isfinite(), found, (wide * part).sum(dim) / (count * part)).to(x.dtype)


class Extreme(Node):
    """The largest or the smallest along a dim; equal ones share the gradient, and nan equals nan.

    The gradient of torch's own is multiplied by a mask: at nan it has no share, and infinity times zero is nan.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, largest: bool) -> torch.Tensor:
        found = x.amax(dim) if largest else x.amin(dim)  # no view of anything: it may be written to, as x may
        wide = found.unsqueeze(dim)
        ctx.save_for_backward((x == wide) | (x.isnan() & wide.isnan()))
        ctx.dim = dim
        ctx.set_materialize_grads(False)  # what needs no gradient gives none, such as a norm that counts
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        (chosen,) = ctx.saved_tensors
        share = (gradient / chosen.sum(ctx.dim)).unsqueeze(ctx.dim)
        return torch.where(chosen, share, 0), None, None


def extreme(x: torch.Tensor, dim: int, largest: bool) -> torch.Tensor:
    """The largest or the smallest along a dim."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Extreme.apply(x, dim, largest)
    return x.amax(dim) if largest else x.amin(dim)


def nothing_like(data: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
    """What changes no sum: x + 0 turns -0 into 0, so it is -0 where there is one."""
    return data.new_zeros(data.shape if shape is None else shape).neg_()


def number(identity: object, dtype: torch.dtype) -> Any:
    """An identity as a number of a dtype: "lowest" and "highest" are the ends of its range.

    >>> number("lowest", torch.int8), number("highest", torch.float32), number(1, torch.bool)
    (-128, inf, 1)
    """
    if identity not in ("lowest", "highest"):
        return identity
    is_high = identity == "highest"
    if dtype == torch.bool:
        return is_high
    if dtype.is_floating_point:
        return math.inf if is_high else -math.inf
    if dtype.is_complex:
        raise DTypeError(f"{short_dtype(str(dtype))} has no order", fix="compare x.abs() or x.real")
    info = torch.iinfo(dtype)
    return info.max if is_high else info.min


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction. `between` is its name for torch.distributed; `neutral` is what all but one device hold where one
    has the value, None where all may hold the same."""

    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    along: Callable[[torch.Tensor, int], torch.Tensor]
    quickly: Callable[..., torch.Tensor]
    between: Any
    neutral: Callable[[torch.Tensor], torch.Tensor] | None = None


def _quickly(name: str) -> Callable[..., torch.Tensor]:
    function = getattr(torch, name)

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = function(x, 0, dtype=x.dtype, out=out) if name == "prod" else function(x, 0, out=out)
        return found

    return run


def _sum_quickly(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if not _are_long(x) or not (out is None or out.is_contiguous()):
        return torch.sum(x, 0, dtype=x.dtype, out=out)
    return AddParts.apply(x) if out is None else add_parts(x, out)


_SUM, _MAX, _MIN, _PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "MAX", "MIN", "PRODUCT"))
_largest, _smallest = partial(extreme, largest=True), partial(extreme, largest=False)

# fmt: off
REDUCTIONS: dict[str, Reduction] = {
    "sum":  Reduction(torch.add,     total,     _sum_quickly,      _SUM, nothing_like),
    "mean": Reduction(torch.add,     mean,      _quickly("mean"),  _SUM),
    "max":  Reduction(torch.maximum, _largest,  _quickly("amax"),  _MAX),
    "min":  Reduction(torch.minimum, _smallest, _quickly("amin"),  _MIN),
    "prod": Reduction(torch.mul,     product,   _quickly("prod"),  _PRODUCT, torch.ones_like),
}
# fmt: on
