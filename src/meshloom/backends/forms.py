"""Ops that need statistics of a dim which several processes hold: each works on its own part, small sums are shared.

A form is called with the op's arguments on what this process holds, padding filled as the op's line of the table says.
`Leave` is a sum that all processes then hold alike; `statistic` is one with which split work goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.backends import wire
from meshloom.backends.nodes import Enter, Leave, statistic
from meshloom.backends.ring import Ring, RingAttention
from meshloom.backends.world import Group, group_of
from meshloom.engines.layout import box, pad
from meshloom.engines.torch_engine import Local
from meshloom.engines.torch_engine.local import wide_dtype
from meshloom.ops.labels import normal_dims
from meshloom.ops.normalisation import normalised, softmax_dim
from meshloom.placement import Topology
from meshloom.planner import Plan


@dataclass(frozen=True)
class Across:
    """What a form may know: the call, the plan, and the processes that share the op's statistics."""

    local: Local
    plan: Plan
    group: Group

    def topology(self, name: str) -> Topology:
        """Where the operand given as an argument lies when the op runs."""
        return self.local.ins[self.plan.call.index(name)]

    def positions(self, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
        """The global index of each element that this process, or another rank, holds along a dim; -1 for padding."""
        topology = self.topology(name)
        size = topology.shape[dim]
        line = pad(torch.arange(1, size + 1), 0, size, topology.shards[dim])
        return box(line, topology, dim, 0, rank) - 1

    def spots(self, name: str, dim: int) -> torch.Tensor:
        """For each global index along a dim where this process holds it; -1 where it does not."""
        held = self.positions(name, dim)
        found = torch.full((self.topology(name).shape[dim],), -1)
        found[held[held >= 0]] = torch.nonzero(held >= 0).squeeze(1)
        return found

    def along(self, name: str, dim: int) -> Group | None:
        """The processes that hold parts of a dim."""
        return group_of(self.plan.mesh, self.topology(name).axes_of[dim])


def _softmax(logarithm: bool) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, dim: int, dtype: Any, _stacklevel: Any) -> torch.Tensor:
        dim = softmax_dim(across.plan.call)
        kept = dtype or input.dtype
        x = input.to(wide_dtype(kept))
        if x.numel() == 0:
            return x.to(kept)
        high = wire.all_reduce(x.detach().amax(dim, keepdim=True), across.group, "max")
        weights = (x - high).exp()
        total = statistic(weights.sum(dim, keepdim=True), across.group)
        return (x - high - total.log() if logarithm else weights / total).to(kept)

    return form


def _layer_norm(
    across: Across, input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    dims = tuple(range(input.dim() - normalised(across.plan.call), input.dim()))
    centred, count = _centred(across, input, dims)
    spread = statistic(centred.square().sum(dims, keepdim=True), across.group) / count
    scaled = (centred * torch.rsqrt(spread + eps)).to(input.dtype)
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _centred(across: Across, input: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The input less its mean over dims, zero where there is padding, and the global count."""
    count = across.local.count(dims)
    x = input.to(wide_dtype(input.dtype))
    centred = x - statistic(x.sum(dims, keepdim=True), across.group) / count
    mask = across.local.mask(input, dims)
    return centred if mask is None else torch.where(mask, centred, 0), count


def _var(across: Across, input: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> torch.Tensor:
    dims = normal_dims(dim, input.dim())
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if not (input.is_floating_point() or input.is_complex()):
        return torch.var(input, dims or None, correction=correction, keepdim=keepdim)  # torch's own refusal
    centred, count = _centred(across, input, dims)
    squares = (centred * centred.conj()).real if centred.is_complex() else centred.square()
    spread = Leave.apply(squares.sum(dims, keepdim), across.group) / max(count - correction, 0)
    return spread if input.is_complex() else spread.to(input.dtype)


class _Extreme(torch.autograd.Function):
    """The largest or smallest element; equal ones share its gradient, wherever they are."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dims: tuple[int, ...], group: Group, op: str) -> torch.Tensor:
        reduce = torch.amax if op == "max" else torch.amin
        found = wire.all_reduce(reduce(input, dims, True), group, op)
        ctx.save_for_backward(input, found)
        ctx.dims, ctx.group = dims, group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, found = ctx.saved_tensors
        equal = input == found
        count = wire.all_reduce(equal.sum(ctx.dims, keepdim=True).to(gradient.dtype), ctx.group)
        return equal * (Enter.apply(gradient, ctx.group) / count), None, None, None


def _extreme(op: str) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        dims = normal_dims(dim, input.dim())
        found = _Extreme.apply(input, dims, across.group, op)
        return found if keepdim else found.squeeze(dims)

    return form


def _embedding(across: Across, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    spots = across.local.once("spots", lambda: across.spots("weight", 0))
    if input.is_meta:
        return F.embedding(input, weight)
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < len(spots):
        raise IndexError("index out of range in self")
    place = spots[input]
    rows = torch.where(place < 0, 0, place)
    ignored = None if padding_idx is None else int(spots[padding_idx])
    found = F.embedding(rows, weight, None if ignored is None or ignored < 0 else ignored)
    return found.masked_fill((place < 0).unsqueeze(-1), 0)


def _indexed(largest: bool, values_too: bool) -> Callable[..., Any]:
    def form(across: Across, input: torch.Tensor, dim: Any, keepdim: bool) -> Any:
        dims = normal_dims(dim, input.dim())
        kept = [d for d in range(input.dim()) if d not in dims]
        flat = input.permute(*kept, *dims).flatten(len(kept)) if dims else input.unsqueeze(-1)
        pick = (flat.max(-1) if largest else flat.min(-1)).indices
        value = flat.gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        index = _flat_positions(across, dims)[pick]
        best, first, mine = _best(value.detach(), index, across.group, largest)
        shown = _Shown.apply(value, best, mine, across.group) if values_too else best
        shape = [1 if d in dims else size for d, size in enumerate(input.shape)]
        if keepdim:
            shown, first = shown.view(shape), first.view(shape)
        return (shown, first) if values_too else first

    return form


class _Shown(torch.autograd.Function):
    """The best value of all processes; its gradient goes to the one that has it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, best: torch.Tensor, mine: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.save_for_backward(mine)
        ctx.group = group
        return best.view_as(best)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (mine,) = ctx.saved_tensors
        return torch.where(mine, Enter.apply(gradient, ctx.group), 0), None, None, None


def _flat_positions(across: Across, dims: tuple[int, ...]) -> torch.Tensor:
    """The global flat index over dims of each element that this process holds."""
    total = torch.zeros((), dtype=torch.int64)
    shape = across.topology("input").shape
    for dim in dims:
        total = total.unsqueeze(-1) * shape[dim] + across.positions("input", dim)
    return total.flatten()


def _best(
    value: torch.Tensor, index: torch.Tensor, group: Group, largest: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best value of all processes, its first index, and whether it is this process's."""
    if value.is_meta:
        return value, index, torch.ones_like(value, dtype=torch.bool)
    values, indices = wire.all_gather(value, group), wire.all_gather(index, group)
    best = values.amax(0) if largest else values.amin(0)
    equal = (values == best) | (values.isnan() & best.isnan())
    first = torch.where(equal, indices, torch.iinfo(torch.int64).max).amin(0)
    return best, first, index == first


def _cross_entropy(
    across: Across, input: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any,
    reduction: str, label_smoothing: float,
) -> torch.Tensor:  # fmt: skip
    classes = 1 if input.dim() > 1 else 0
    loss, counted = _losses(across, classes, input, target, weight, ignore_index, label_smoothing)
    if reduction == "none":
        return loss.to(input.dtype)
    if reduction == "sum":
        return loss.sum().to(input.dtype)
    batch = [axis for dim in range(input.dim()) if dim != classes for axis in across.topology("input").axes_of[dim]]
    group = group_of(across.plan.mesh, sorted(batch))
    total, count = loss.sum(), counted.sum()
    if group is not None:
        total, count = Leave.apply(total, group), wire.all_reduce(count, group)
    none = count == 0  # nan, as torch has it, and a gradient of zero
    return torch.where(none, math.nan, total / torch.where(none, 1, count)).to(input.dtype)


def _losses(
    across: Across, classes: int, input: Any, target: Any, weight: Any, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and what it counts in a mean."""
    group = across.along("input", classes)
    if group is not None:
        return _Classes(across, group, classes, input).losses(target, weight, ignore_index, smoothing)
    x = across.local.trimmed("input", input, classes)
    weight = None if weight is None else across.local.trimmed("weight", weight, 0)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none", "label_smoothing": smoothing}
    loss = F.cross_entropy(x, target, weight, **options)
    if target.is_floating_point():
        return loss, torch.ones_like(loss)
    kept = target != ignore_index
    counted = kept if weight is None else torch.where(kept, weight[torch.where(kept, target, 0)], 0)
    return loss, counted.to(loss.dtype)


class _Classes:
    """Logits whose classes several processes hold: their maximum and sums over classes are shared."""

    def __init__(self, across: Across, group: Group, dim: int, input: torch.Tensor) -> None:
        self.across, self.group, self.dim = across, group, dim
        x = input.to(wide_dtype(input.dtype))
        mask = across.local.mask(input, (dim,))
        self.x = x if mask is None else torch.where(mask, x, -math.inf)
        self.held = torch.ones((), dtype=x.dtype) if mask is None else mask.to(x.dtype)
        self.count = across.topology("input").shape[dim]

    def _total(self, parts: torch.Tensor) -> torch.Tensor:
        return Leave.apply(parts, self.group)

    def losses(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        high = wire.all_reduce(self.x.detach().amax(self.dim, keepdim=True), self.group, "max")
        normal = (high + self._total((self.x - high).exp().sum(self.dim, keepdim=True)).log()).squeeze(self.dim)
        each = self.held if weight is None else self.held * self._per_class(weight.to(self.x.dtype))
        if target.is_floating_point():
            wanted = (target * (1 - smoothing) + smoothing / self.count) * each
            return self._against(wanted, normal), torch.ones_like(normal)
        kept = target != ignore_index
        hit = self._hits(torch.where(kept, target, 0)) * kept.unsqueeze(self.dim) * each
        wanted = hit * (1 - smoothing)
        if smoothing:
            wanted = wanted + smoothing / self.count * each * kept.unsqueeze(self.dim)
        counted = kept.to(normal.dtype) if weight is None else self._total(hit.sum(self.dim))
        return self._against(wanted, normal), counted

    def _per_class(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view([-1 if d == self.dim else 1 for d in range(self.x.dim())])

    def _hits(self, target: torch.Tensor) -> torch.Tensor:
        """1 where this process holds the class of a target, 0 elsewhere."""
        place = self.across.spots("input", self.dim)[target]
        found = torch.zeros_like(self.x).scatter(self.dim, place.clamp(min=0).unsqueeze(self.dim), 1.0)
        return found * (place >= 0).unsqueeze(self.dim)

    def _against(self, wanted: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
        """Sum over classes of wanted * (normaliser - logit)."""
        wanted = wanted.expand_as(self.x)
        logits = torch.where(wanted != 0, self.x, 0)
        both = self._total(torch.stack([wanted.sum(self.dim), (wanted * logits).sum(self.dim)]))
        return both[0] * normal - both[1]


def _attention(
    across: Across, query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False, **options: Any
) -> torch.Tensor:
    """Queries know where they stand; keys and values that several processes hold go around the ring."""
    rows = across.positions("query", query.dim() - 2)
    group = across.along("key", key.dim() - 2)
    if group is None:
        mask = (rows.unsqueeze(-1) >= torch.arange(key.shape[-2])).to(query.device) if is_causal else attn_mask
        return F.scaled_dot_product_attention(query, key, value, mask, **options)
    return _Sequence(across, group, rows, query, key, value).attended(attn_mask, is_causal, **options)


class _Sequence:
    """Attention whose keys and values lie on a ring of processes: one block of scores at a time."""

    def __init__(self, across: Across, group: Group, rows: torch.Tensor, query: Any, key: Any, value: Any) -> None:
        self.across, self.group, self.rows = across, group, rows
        self.query, self.key, self.value = query, key, value

    def attended(self, mask: Any, is_causal: bool, scale: Any, enable_gqa: bool, dropout_p: float = 0.0) -> Any:
        """What each query of this process gets."""
        query, key, value = self.query, self.key, self.value
        groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        batch = query.shape[:-2] if enable_gqa else torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        heads = (*batch[:-1], batch[-1] // groups) if enable_gqa else batch
        keys = self.across.topology("key").shape[-2]
        seen = None if mask is None else mask.expand(*batch, query.shape[-2], keys)
        folded = [_folded_heads(x, groups) for x in (query.expand(*batch, *query.shape[-2:]), seen)]
        key, value = (x.expand(*heads, *x.shape[-2:]) for x in (key, value))
        if scale is None:
            scale = query.shape[-1] ** -0.5
        ring = Ring(self.group, scale, self._columns, self._allowed(folded[1], is_causal, groups))
        bias = folded[1] if mask is not None and mask.dtype != torch.bool else None
        x = folded[0].to(wide_dtype(query.dtype))
        out = RingAttention.apply(x, key, value, None if bias is None else bias.to(x.dtype), ring).to(query.dtype)
        return out if groups == 1 else out.unflatten(-2, (groups, -1)).flatten(-4, -3)

    def _columns(self, process: int) -> torch.Tensor:
        found: torch.Tensor = self.across.local.once(
            f"columns {process}",
            lambda: self.across.positions("key", self.key.dim() - 2, self.group.ranks[process]),
        )
        return found

    def _allowed(self, mask: Any, is_causal: bool, groups: int) -> Callable[[int], torch.Tensor | None]:
        if is_causal:
            rows = self.rows.repeat(groups).unsqueeze(-1)
            return lambda process: rows >= self._columns(process)
        if mask is not None and mask.dtype == torch.bool:
            return lambda process: mask[..., self._columns(process).clamp(min=0)]
        return lambda process: None


def _folded_heads(x: Any, groups: int) -> Any:
    """The query heads that share a head of keys, one below the other."""
    return x if x is None or groups == 1 else x.unflatten(-3, (-1, groups)).flatten(-3, -2)


FORMS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax(False),
    "log_softmax": _softmax(True),
    "layer_norm": _layer_norm,
    "var": _var,
    "amax": _extreme("max"),
    "amin": _extreme("min"),
    "embedding": _embedding,
    "argmax": _indexed(True, False),
    "argmin": _indexed(False, False),
    "max_dim": _indexed(True, True),
    "min_dim": _indexed(False, True),
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
