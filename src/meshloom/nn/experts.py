"""`loom.experts`: tokens to the experts that they chose, and back. Start with `route`, `dispatch` and `combine`.

Experts lie over mesh axes: dim 0 of their weights is sharded. Each device routes its own tokens, sends every token to
the devices that have its experts by one all-to-all, and gets what they made of it by another. Nothing is dropped unless
`route` is given a capacity, and no weight of an expert ever moves. All of it also works on dense tensors.

The all-to-all has a fixed size: each device sends equally many rows to each, as many as the largest such part needs
(`capacity`). Devices agree on that number first. So the cost grows with the imbalance between *devices*, not between
experts: if every token goes to one device, rows of zeros make the buffers as many times larger as there are devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine import FUNCTIONS
from meshloom.errors import ArgumentError, ShapeError
from meshloom.placement import Replicate, Shard, Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import table_call
from meshloom.tensor.device_dims import join_devices, split_devices


@dataclass(frozen=True)
class Dispatch:
    """Tokens where their experts are: `rows` [..., parts, capacity, width], and what brings them back.

    Part i of `rows` is on the devices that have the i-th part of the experts; `number` says which of its experts a row
    is for, -1 for a row that nobody sent.
    """

    rows: torch.Tensor
    number: torch.Tensor
    slots: torch.Tensor
    tokens: Topology | None
    sent: Topology | None
    top_k: int

    @property
    def capacity(self) -> int:
        """How many rows a device sends to each part of the experts."""
        return int(self.rows.shape[-2])

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Each row times the matrix of its expert, of [experts, in, out], and its bias of [experts, out]."""
        found = _call("expert_mm", rows, weight, self.number)
        if bias is None:
            return found
        ones = torch.ones_like(rows[..., :1])
        return found + _call("expert_mm", ones, bias.unsqueeze(1), self.number)


def dispatch(tokens: torch.Tensor, index: torch.Tensor, experts: torch.Tensor) -> Dispatch:
    """Tokens [tokens, width] to the experts that `index` [tokens, choices] names; -1 names none.

    `experts` is any weight of theirs, [experts, ...]: dim 0 says how many there are, and on which devices.
    """
    _check(tokens, index, experts)
    count, top_k = experts.shape[0], index.shape[1]
    tokens, home, index = _spread(tokens, index, experts)
    parts = _parts(experts)
    chunk = -(-count // parts)
    with torch.no_grad():
        chosen = index.flatten(-2)
        order, place, counts = _sort(chosen, count)
        counts = F.pad(counts, (0, parts * chunk - count)).unflatten(-1, (parts, chunk))
        sizes = counts.sum(-1)
        starts = sizes.cumsum(-1) - sizes
        capacity = _agree(sizes, chosen.shape[-1])
        c = torch.arange(capacity, device=chosen.device)
        sorted_places = (starts.unsqueeze(-1) + c).clamp(max=chosen.shape[-1] - 1).flatten(-2)
        source = torch.where((c < sizes.unsqueeze(-1)).flatten(-2), order.gather(-1, sorted_places) // top_k, -1)
        part = chosen.clamp(min=0) // chunk
        slots = torch.where(chosen < 0, -1, part * capacity + place - starts.gather(-1, part))
    rows = _call("take_rows", tokens, source).unflatten(-2, (parts, capacity))
    sent = rows.topology if isinstance(rows, Tensor) else None
    rows, counts = _exchange(rows, experts, -3), _exchange(counts, experts, -2)
    return Dispatch(rows, _number(counts, c), slots, home, sent, top_k)


def combine(sent: Dispatch, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What experts made of the rows, back where the tokens are: for each token the sum of its choices, weighted."""
    if isinstance(rows, Tensor):
        assert sent.sent is not None
        rows = rows.redistribute(sent.sent.placements)
    found = _call("take_rows", rows.flatten(-3, -2), sent.slots).unflatten(-2, (-1, sent.top_k))
    if sent.tokens is not None:
        weights = split_devices(_lay_rows(weights, sent.tokens))
    mixed = (found * weights.unsqueeze(-1)).sum(-2).to(rows.dtype)
    return mixed if sent.tokens is None else join_devices(mixed, sent.tokens)


def _call(name: str, *tensors: torch.Tensor) -> Any:
    """An op of the table, on the mesh or on dense tensors."""
    if any(isinstance(each, Tensor) for each in tensors):
        return table_call(name, *tensors)
    if name == "take_rows":
        return dense_rows(*tensors)
    return FUNCTIONS[name](*tensors)


def dense_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by number of a dense tensor; zeros for -1."""
    found = rows.index_select(0, index.clamp(min=0)) if len(rows) else rows.new_zeros(len(index), rows.shape[-1])
    return found.masked_fill((index < 0).unsqueeze(-1), 0)


def _check(tokens: torch.Tensor, index: torch.Tensor, experts: torch.Tensor) -> None:
    if tokens.ndim != 2 or index.ndim != 2 or tokens.shape[0] != index.shape[0] or experts.ndim < 1:
        raise ShapeError(
            "dispatch needs tokens [tokens, width], an index [tokens, choices] and a weight [experts, ...]",
            shapes=f"{list(tokens.shape)}, {list(index.shape)} and {list(experts.shape)}",
            fix="x.flatten(0, -2) makes a line of tokens",
        )


def _spread(
    tokens: torch.Tensor, index: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, Topology | None, torch.Tensor]:
    """Tokens and choices with the devices that have them as dims in front; on a mesh also where they lie in a line."""
    if not isinstance(experts, Tensor):
        return tokens, None, index
    mesh = experts.mesh
    split = {
        axis: Shard(0) if isinstance(each, Replicate) or each == Shard(0) else Replicate()
        for axis, each in zip(mesh.axes, experts.placements, strict=True)
    }
    laid = _on_mesh(tokens, mesh).redistribute(split)
    choices = _on_mesh(index, mesh).redistribute(split)
    return split_devices(laid), laid.topology, split_devices(choices + 1) - 1  # padding is zero: no expert


def _on_mesh(tensor: torch.Tensor, mesh: Any) -> Tensor:
    from meshloom.tensor.creation import distribute

    return tensor if isinstance(tensor, Tensor) else distribute(tensor, mesh, {})


def _lay_rows(tensor: torch.Tensor, like: Topology) -> Tensor:
    return _on_mesh(tensor, like.mesh).redistribute(like.placements)


def _expert_axes(experts: torch.Tensor) -> list[int]:
    if not isinstance(experts, Tensor):
        return []
    return [axis for axis, each in enumerate(experts.placements) if each == Shard(0)]


def _parts(experts: torch.Tensor) -> int:
    return math.prod(experts.mesh.shape[axis] for axis in _expert_axes(experts)) if isinstance(experts, Tensor) else 1


def _sort(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices in the order of their experts, where each went, and how many each expert has."""
    key = torch.where(chosen < 0, experts, chosen)
    order = key.argsort(dim=-1, stable=True)
    counts = key.new_zeros((*key.shape[:-1], experts + 1)).scatter_add(-1, key, torch.ones_like(key))
    return order, order.argsort(-1), counts[..., :experts]


def _agree(sizes: torch.Tensor, choices: int) -> int:
    """How many rows a device sends to each part of the experts: the most that any has for any."""
    parts = sizes.shape[-1]
    if parts == 1:
        return choices
    if sizes.is_meta:
        return round_up(-(-choices // parts))
    return min(choices, round_up(max(int(sizes.max()), 1)))


def round_up(count: int) -> int:
    """The next number with four binary digits that count: calls of few sizes are planned once.

    >>> [round_up(each) for each in (1, 15, 17, 33, 100, 1000)]
    [1, 15, 18, 36, 104, 1024]
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def _exchange(rows: torch.Tensor, experts: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows to the devices that have their part: an all-to-all over each axis that the experts lie over."""
    axes = _expert_axes(experts)
    if not axes or not isinstance(rows, Tensor):
        return rows
    place = rows.ndim + dim
    return rows.redistribute(
        tuple(Shard(place) if axis in axes else each for axis, each in enumerate(rows.placements))
    )


def _number(counts: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Which expert of its part each row is for: rows come in the order of experts."""
    ends = counts.cumsum(-1)
    found = (c.unsqueeze(-1) >= ends.unsqueeze(-2)).sum(-1)
    return torch.where(c < ends[..., -1:], found, -1)
