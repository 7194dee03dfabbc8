"""Losses of a batch or of classes that several processes hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.backends.forms.across import Across
from meshloom.comms import wire
from meshloom.comms.gradients import AllReduce
from meshloom.comms.group import Group, group_of
from meshloom.engines.layout import short_name
from meshloom.engines.torch_engine.local import wide_dtype
from meshloom.errors import DTypeError


def _cross_entropy(
    across: Across, input: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any,
    reduction: str, label_smoothing: float,
) -> torch.Tensor:  # fmt: skip
    return _reduced(across, reduction, input, *_losses(across, input, target, weight, ignore_index, label_smoothing))


def _nll_loss(
    across: Across, input: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any,
    reduction: str,
) -> torch.Tensor:  # fmt: skip
    return _reduced(across, reduction, input, *_losses(across, input, target, weight, ignore_index, None))


def _reduced(across: Across, reduction: str, input: Any, loss: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The losses of samples as the call wants them; a mean is over the samples of all processes."""
    if reduction == "none":
        return loss.to(input.dtype)
    if reduction == "sum":
        return loss.sum().to(input.dtype)
    classes = _classes(input)
    batch = [axis for dim in range(input.dim()) if dim != classes for axis in across.topology("input").axes_of[dim]]
    group = group_of(across.plan.mesh, sorted(batch))
    total, count = loss.sum(), counted.sum()
    if group is not None:
        total, count = AllReduce.apply(total, group), wire.all_reduce(count, group)
    none = count == 0  # nan, as torch has it, and a gradient of zero
    return torch.where(none, math.nan, total / torch.where(none, 1, count)).to(input.dtype)


def _classes(input: torch.Tensor) -> int:
    return 1 if input.dim() > 1 else 0


def _losses(
    across: Across, input: Any, target: Any, weight: Any, ignore_index: int, smoothing: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and what it counts in a mean; without a smoothing the input is a logarithm already."""
    classes = _classes(input)
    group = across.along("input", classes)
    if group is not None:
        return _Classes(across, group, classes, input).losses(target, weight, ignore_index, smoothing)
    x = across.local.trimmed("input", input, classes)
    weight = None if weight is None else across.local.trimmed("weight", weight, 0)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none"}
    if smoothing is None:
        loss = F.nll_loss(x, target, weight, **options)
    else:
        loss = F.cross_entropy(x, target, weight, label_smoothing=smoothing, **options)
    if target.is_floating_point():
        return loss, torch.ones_like(loss)
    kept = target != ignore_index
    counted = kept if weight is None else torch.where(kept, weight[torch.where(kept, target, 0).long()], 0)
    return loss, counted.to(loss.dtype)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(size for d, size in enumerate(shape) if d != dim)


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
        return AllReduce.apply(parts, self.group)

    def losses(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normal = self._normaliser() if smoothing is not None else self.x.new_zeros(_without(self.x.shape, self.dim))
        smoothing = smoothing or 0.0
        each = self.held if weight is None else self.held * self._per_class(weight.to(self.x.dtype))
        if target.is_floating_point():
            wanted = (target * (1 - smoothing) + smoothing / self.count) * each
            return self._against(wanted, self.x, normal), torch.ones_like(normal)
        if target.dtype not in (torch.int64, torch.uint8):
            raise DTypeError(f"{self.across.plan.call.op} takes classes as i64 or u8, not {short_name(target.dtype)}")
        kept = target != ignore_index
        hit = self._hits(torch.where(kept, target, 0)) * kept.unsqueeze(self.dim) * each
        wanted = hit * (1 - smoothing)
        if smoothing:
            wanted = wanted + smoothing / self.count * each * kept.unsqueeze(self.dim)
        counted = kept.to(normal.dtype) if weight is None else self._total(hit.sum(self.dim))
        loss = self._against(wanted, torch.where(wanted != 0, self.x, 0), normal)
        return torch.where(kept, loss, 0), counted

    def _normaliser(self) -> torch.Tensor:
        high = wire.all_reduce(self.x.detach().amax(self.dim, keepdim=True), self.group, "max")
        return (high + self._total((self.x - high).exp().sum(self.dim, keepdim=True)).log()).squeeze(self.dim)

    def _per_class(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view([-1 if d == self.dim else 1 for d in range(self.x.dim())])

    def _hits(self, target: torch.Tensor) -> torch.Tensor:
        """1 where this process holds the class of a target, 0 elsewhere."""
        if target.numel() and not target.is_meta:
            least, most = (int(each) for each in torch.aminmax(target))
            if least < 0 or most >= self.count:
                raise IndexError(f"Target {least if least < 0 else most} is out of bounds.")
        place = self.across.spots("input", self.dim).to(target.device)[target.long()]  # bytes would be a mask
        found = torch.zeros_like(self.x).scatter(self.dim, place.clamp(min=0).unsqueeze(self.dim), 1.0)
        return found * (place >= 0).unsqueeze(self.dim)

    def _against(self, wanted: torch.Tensor, logits: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
        """Sum over classes of wanted * (normaliser - logit)."""
        both = self._total(torch.stack([wanted.sum(self.dim), (wanted * logits).sum(self.dim)]))
        return both[0] * normal - both[1]


LOSSES: dict[str, Callable[..., Any]] = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss}
