"""Which experts a token goes to, and with which weights; what losses say of it. Every token is decided on its own.

Scores are softmax or sigmoid of the router's logits. With groups, as DeepSeek has them, a token first chooses groups of
experts, by the sum of their two best scores, and then experts of those. A bias changes the choice, not the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.errors import ArgumentError, closest, expect
from meshloom.placement import Replicate, Shard
from meshloom.tensor.base import Tensor
from meshloom.tensor.device_dims import join_devices, split_devices

SCORES: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


@dataclass(frozen=True)
class Routing:
    """Where tokens go: `index` [tokens, choices] names experts, -1 none; `weights` are theirs in the sum.

    `scores` [tokens, experts] are those that the choice was made from, without bias; `logits` what the router gave.
    """

    index: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return int(self.logits.shape[-1])

    @property
    def load(self) -> torch.Tensor:
        """How many tokens each expert gets, [experts]."""
        chosen = self.index.flatten()
        key = torch.where(chosen < 0, self.experts, chosen)
        counts = key.new_zeros((self.experts + 1,)).scatter_add(0, key, torch.ones_like(key))
        return counts[: self.experts]


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    best_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
) -> Routing:
    """The `top_k` best experts of each token, and their scores, over the sum of them if `normalize`, times `scale`.

    `logits` are [tokens, experts]. `bias` [experts] is added for the choice alone. With `groups`, experts come from the
    `best_groups` best groups. An expert takes at most `capacity` tokens of the batch, the first ones: the choices of
    the others become -1. Without a capacity none is dropped.

    >>> found = route(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), 2)
    >>> found.index.tolist(), [[round(x, 2) for x in row] for row in found.weights.tolist()]
    ([[1, 2], [0, 2]], [[0.73, 0.27], [0.88, 0.12]])
    """
    _check(logits, top_k, score, groups, best_groups, capacity)
    scores = SCORES[score](logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits)
    with torch.no_grad():
        index = choose(scores if bias is None else scores + bias, top_k, groups, best_groups)
    weights = scores.gather(-1, index)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if capacity is not None:
        index = limit(index, logits.shape[-1], capacity)
    return Routing(index, weights * scale, scores, logits)


def choose(
    scores: torch.Tensor, top_k: int, groups: int = 1, best_groups: int = 1, summed: int = 2, stable: bool = False
) -> torch.Tensor:
    """The numbers of the best experts [..., top_k] by their scores [..., experts], of the best groups.

    A group is as good as the sum of its `summed` best scores. With `stable` equal scores go to the lower number.
    """
    if groups > 1:
        parts = scores.unflatten(-1, (groups, -1))
        best = parts.topk(min(summed, parts.shape[-1]), -1).values.sum(-1)
        chosen = torch.zeros_like(best).scatter(-1, best.topk(best_groups, -1).indices, 1.0) > 0
        scores = parts.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    ordered = scores.sort(dim=-1, descending=True, stable=True) if stable else scores.topk(top_k, -1)
    return ordered.indices[..., :top_k]


def limit(index: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """The choices [tokens, choices] with -1 for those that an expert has no room for: it takes the first of the batch.

    >>> limit(torch.tensor([[0, 1], [0, 2], [0, 1]]), 3, 2).tolist()
    [[0, 1], [0, 2], [-1, 1]]
    """
    with torch.no_grad():
        if not isinstance(index, Tensor):
            return _keep_first(index, experts, capacity)
        rows: Any = index.redistribute(tuple(p if p == Shard(0) else Replicate() for p in index.placements))
        choices = split_devices(rows + 1) - 1  # padding is zero: no expert
        kept: Any = _keep_first(choices, experts, capacity) + 1
        return join_devices(kept, rows.topology) - 1


def _keep_first(choices: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    chosen = choices.flatten(-2)
    _, place, counts = sort_choices(chosen, experts)
    first = counts.cumsum(-1) - counts - _before(counts)
    rank = place - first.gather(-1, chosen.clamp(min=0, max=experts - 1))
    kept: torch.Tensor = torch.where((chosen >= 0) & (rank < capacity), chosen, -1).unflatten(-1, choices.shape[-2:])
    return kept


def _before(counts: torch.Tensor) -> torch.Tensor:
    """How many choices of each expert earlier devices have, of [*devices, experts]."""
    if not isinstance(counts, Tensor) or counts.ndim == 1:
        return torch.zeros_like(counts)
    whole: torch.Tensor = counts.redistribute((Replicate(),) * counts.mesh.ndim).flatten(0, -2)
    before: torch.Tensor = (whole.cumsum(0) - whole).unflatten(0, counts.shape[:-1])
    return before


def sort_choices(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices in the order of their experts, where each went, and how many each expert has."""
    key = torch.where((chosen < 0) | (chosen >= experts), experts, chosen)
    order = key.argsort(dim=-1, stable=True)
    counts = key.new_zeros((*key.shape[:-1], experts + 1)).scatter_add(-1, key, torch.ones_like(key))
    return order, order.argsort(-1), counts[..., :experts]


def balance_loss(routing: Routing, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The load-balancing loss of Switch and Mixtral: experts * sum(f * p), least where all experts are used alike.

    `f` is the number of choices of an expert over the number of tokens, `p` its mean score, over the sum of a token's
    scores. `mask` [tokens] has zeros for tokens that do not count, such as padding.

    >>> even = route(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1)
    >>> round(balance_loss(even).item(), 4)
    1.0
    """
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    if mask is None:
        used, total = routing.load.to(scores.dtype), float(max(scores.shape[0], 1))
        return (used / total * (scores.sum(0) / total)).sum() * routing.experts
    kept = mask.reshape(-1).to(scores.dtype)
    key = torch.where(routing.index < 0, routing.experts, routing.index).flatten()
    each = kept.unsqueeze(-1).expand(routing.index.shape).flatten()
    used = scores.new_zeros((routing.experts + 1,)).scatter_add(0, key, each)[: routing.experts]
    count = kept.sum().clamp(min=1)
    return (used / count * ((scores * kept.unsqueeze(-1)).sum(0) / count)).sum() * routing.experts


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean square of logsumexp(logits): it keeps the router's logits small.

    >>> round(z_loss(torch.zeros(3, 4)).item(), 4)
    1.9218
    """
    return logits.float().logsumexp(-1).square().mean()


def _check(logits: torch.Tensor, top_k: int, score: str, groups: int, best_groups: int, capacity: int | None) -> None:
    expect("logits", logits, torch.Tensor, fix="give the router's result, [tokens, experts]")
    for name, each in (("top_k", top_k), ("groups", groups), ("best_groups", best_groups)):
        expect(name, each, int, fix=f"give a whole number: {name}=2")
    if score not in SCORES:
        raise ArgumentError(f"there is no score {score!r}", fix=closest(score, SCORES))
    experts = logits.shape[-1] if logits.ndim == 2 else 0
    if not experts:
        raise ArgumentError(
            f"route needs logits [tokens, experts], not {list(logits.shape)}", fix="logits.flatten(0, -2)"
        )
    if (
        groups < 1
        or experts % groups
        or not 1 <= best_groups <= groups
        or not 1 <= top_k <= experts // groups * best_groups
    ):
        raise ArgumentError(
            f"{top_k} experts of {best_groups} of {groups} groups of {experts} experts cannot be chosen",
            fix="groups= divides the experts, and the best groups have at least top_k of them",
        )
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        raise ArgumentError(
            f"capacity={capacity!r} is no number of tokens",
            fix="give a whole number above 0: math.ceil(1.25 * tokens * top_k / experts) leaves a quarter free",
        )
