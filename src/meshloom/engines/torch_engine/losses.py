"""Losses on stored arrays: of elements, and of classes that peers may hold parts of."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from meshloom.engines.layout import short_name
from meshloom.engines.peers import Peers
from meshloom.engines.torch_engine.local import Function, Local, aware, shared, wide_dtype
from meshloom.errors import DTypeError
from meshloom.ops.labels import broadcast
from meshloom.types import Shape


def _reduce_elements(local: Local, each: torch.Tensor, reduction: str) -> torch.Tensor:
    """The loss of some elements: a mean counts the elements of the whole."""
    if reduction == "none":
        return each
    counts = {"sum": 1, "mean": math.prod(_whole(local)), "batchmean": (*local.call.shape("input"), 1)[0]}
    if not each.is_floating_point() and not each.is_complex():
        return each.sum() if reduction == "sum" else each.mean()  # int64; torch refuses a mean of integers
    return (each.sum(dtype=wide_dtype(each.dtype)) / counts[reduction]).to(each.dtype)


def _whole(local: Local) -> Shape:
    return broadcast([topology.shape for topology in local.call.operands])


def _element_loss(function: Callable[..., torch.Tensor]) -> Function:
    """torch's own where all elements are here, else the sum of those that are."""
    return _formula_loss(partial(function, reduction="none"), function)


def _formula_loss(formula: Callable[..., torch.Tensor], own: Callable[..., torch.Tensor] | None = None) -> Function:
    """The losses of elements by a formula, reduced; `own` is torch's function, if it can be mapped over devices."""

    @aware
    def loss(
        local: Local, reduction: str, size_average: object = None, reduce: object = None, **given: object
    ) -> torch.Tensor:
        if own is not None:
            here = broadcast([tuple(each.shape) for each in given.values() if isinstance(each, torch.Tensor)])
            if here == _whole(local):
                return own(**given, reduction=reduction)
        return _reduce_elements(local, formula(**given), reduction)

    return loss


def _kl_div(input: torch.Tensor, target: torch.Tensor, log_target: bool) -> torch.Tensor:
    if log_target:
        return target.exp() * (target - input)
    return torch.xlogy(target, target) - target * input


def _soft_margin_loss(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(-target * input))


def _class_loss(function: Callable[..., torch.Tensor]) -> Function:
    """cross_entropy, or nll_loss, whose input is a logarithm already and which has no smoothing."""

    @shared
    def loss(
        local: Local, input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int,
        reduction: str, size_average: object = None, reduce: object = None, **smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        dim = 1 if input.dim() > 1 else 0  # of the classes
        peers, topology = local.peers, local.topology("input")
        holders = peers if peers.alone else peers.along(topology.mesh, topology.axes_of[dim])
        if holders.alone:
            x = local.trim("input", input, dim)
            weight = None if weight is None else local.trim("weight", weight, 0)
            way = reduction if peers.alone else "none"
            each = function(x, target, weight, ignore_index=ignore_index, reduction=way, **smoothing)
            if peers.alone:
                return each
            counted = _count_samples(each, target, weight, ignore_index)
        else:
            each, counted = _Classes(local, holders, dim, input).losses(target, weight, ignore_index, **smoothing)
        return _reduce_batch(local, reduction, input, dim, each, counted)

    return loss


def _count_samples(
    each: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """What each sample counts in a mean."""
    if target.is_floating_point():
        return torch.ones_like(each)
    kept = target != ignore_index
    counts = kept if weight is None else torch.where(kept, weight[torch.where(kept, target, 0).long()], 0)
    return counts.to(each.dtype)


def _reduce_batch(
    local: Local, reduction: str, input: torch.Tensor, classes: int, each: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """The losses of samples as the call wants them; a mean is over the samples of all peers."""
    if reduction == "none":
        return each.to(input.dtype)
    if reduction == "sum":
        return each.sum().to(input.dtype)
    topology = local.topology("input")
    batch = sorted(axis for dim in range(input.dim()) if dim != classes for axis in topology.axes_of[dim])
    peers = local.peers.along(topology.mesh, batch)
    total, count = peers.sum(torch.stack([each.sum(), counted.sum().to(each.dtype)])).unbind()  # one message
    none = count == 0  # nan, as torch has it, and a gradient of zero
    return torch.where(none, math.nan, total / torch.where(none, 1, count)).to(input.dtype)


class _Classes:
    """Logits whose classes peers hold parts of: their maximum and sums over classes are shared."""

    def __init__(self, local: Local, peers: Peers, dim: int, input: torch.Tensor) -> None:
        self.local, self.peers, self.dim = local, peers, dim
        x = input.to(wide_dtype(input.dtype))
        mask = local.mask(input, (dim,))
        self.x = x if mask is None else torch.where(mask, x, -math.inf)
        self.held = torch.ones((), dtype=x.dtype) if mask is None else mask.to(x.dtype)
        self.count = local.topology("input").shape[dim]

    def losses(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, label_smoothing: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each sample, and what it counts in a mean; without a smoothing the input is a logarithm."""
        smoothing = label_smoothing or 0.0
        rest = [size for d, size in enumerate(self.x.shape) if d != self.dim]
        normal = self.x.new_zeros(rest) if label_smoothing is None else self._normaliser()
        each = self.held if weight is None else self.held * self._per_class(weight.to(self.x.dtype))
        if target.is_floating_point():
            wanted = (target * (1 - smoothing) + smoothing / self.count) * each
            return self._against(wanted, self.x, normal), torch.ones_like(normal)
        if target.dtype not in (torch.int64, torch.uint8):
            raise DTypeError(f"{self.local.call.op} takes classes as i64 or u8, not {short_name(target.dtype)}")
        kept = target != ignore_index
        hit = self._hits(torch.where(kept, target, 0)) * kept.unsqueeze(self.dim) * each
        wanted = hit * (1 - smoothing)
        if smoothing:
            wanted = wanted + smoothing / self.count * each * kept.unsqueeze(self.dim)
        counted = kept.to(normal.dtype) if weight is None else self.peers.sum(hit.sum(self.dim))
        loss = self._against(wanted, torch.where(wanted != 0, self.x, 0), normal)
        return torch.where(kept, loss, 0), counted

    def _normaliser(self) -> torch.Tensor:
        high = self.peers.reduce(self.x.detach().amax(self.dim, keepdim=True), "max")
        return (high + self.peers.sum((self.x - high).exp().sum(self.dim, keepdim=True)).log()).squeeze(self.dim)

    def _per_class(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view([-1 if d == self.dim else 1 for d in range(self.x.dim())])

    def _hits(self, target: torch.Tensor) -> torch.Tensor:
        """1 where this process holds the class of a target, 0 elsewhere."""
        if target.numel() and not target.is_meta:
            least, most = (int(each) for each in torch.aminmax(target))
            if least < 0 or most >= self.count:
                raise IndexError(f"Target {least if least < 0 else most} is out of bounds.")
        place = self.local.spots("input", self.dim).to(target.device)[target.long()]  # bytes would be a mask
        found = torch.zeros_like(self.x).scatter(self.dim, place.clamp(min=0).unsqueeze(self.dim), 1.0)
        return found * (place >= 0).unsqueeze(self.dim)

    def _against(self, wanted: torch.Tensor, logits: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
        """Sum over classes of wanted * (normaliser - logit)."""
        both = self.peers.sum(torch.stack([wanted.sum(self.dim), (wanted * logits).sum(self.dim)]))
        return both[0] * normal - both[1]


_ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip

LOSSES: dict[str, Function] = {
    **{function.__name__: _element_loss(function) for function in _ELEMENT_LOSSES},
    "soft_margin_loss": _formula_loss(_soft_margin_loss),
    "kl_div": _formula_loss(_kl_div),
    "nll_loss": _class_loss(F.nll_loss),
    "cross_entropy": _class_loss(F.cross_entropy),
}
