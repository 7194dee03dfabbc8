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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine import FUNCTIONS
from meshloom.errors import ArgumentError, DTypeError, MeshError, ShapeError, expect
from meshloom.mesh import Mesh
from meshloom.nn.routing import Routing, balance_loss, choose, limit, route, sort_choices, z_loss
from meshloom.placement import Replicate, Shard, Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import table_call
from meshloom.tensor.creation import distribute
from meshloom.tensor.device_dims import join_devices, split_devices

__all__ = [
    "Dispatch",
    "Experts",
    "MoE",
    "Routing",
    "balance_loss",
    "choose",
    "combine",
    "dispatch",
    "limit",
    "route",
    "z_loss",
]
Activation = Callable[[torch.Tensor], torch.Tensor]


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
    choices: tuple[int, int]

    @property
    def capacity(self) -> int:
        """How many rows a device sends to each part of the experts."""
        return int(self.rows.shape[-2])

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Each row times the matrix of its expert, of [experts, in, out], and its bias of [experts, out]."""
        rows = rows.to(weight.dtype)
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
    count, choices, top_k = experts.shape[0], (index.shape[0], index.shape[1]), index.shape[1]
    tokens, home, index = _spread(tokens, index.long(), experts)
    parts = _parts(experts)
    chunk = -(-count // parts)
    with torch.no_grad():
        chosen = index.flatten(-2)
        order, place, counts = sort_choices(chosen, count)
        counts = F.pad(counts, (0, parts * chunk - count)).unflatten(-1, (parts, chunk))
        sizes = counts.sum(-1)
        starts = sizes.cumsum(-1) - sizes
        capacity = _agree(sizes, chosen, count)
        c = torch.arange(capacity, device=chosen.device)
        sorted_places = (starts.unsqueeze(-1) + c).clamp(max=chosen.shape[-1] - 1).flatten(-2)
        source = torch.where((c < sizes.unsqueeze(-1)).flatten(-2), order.gather(-1, sorted_places) // top_k, -1)
        part = chosen.clamp(min=0) // chunk
        slots = torch.where(chosen < 0, -1, part * capacity + place - starts.gather(-1, part))
    rows = _call("take_rows", tokens, source).unflatten(-2, (parts, capacity))
    sent = rows.topology if isinstance(rows, Tensor) else None
    rows, counts = _exchange(rows, experts, -3), _exchange(counts, experts, -2)
    return Dispatch(rows, _number(counts, c), slots, home, sent, choices)


def combine(sent: Dispatch, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What experts made of the rows, back where the tokens are: for each token the sum of its choices, weighted."""
    if rows.shape[:-1] != sent.rows.shape[:-1] or tuple(weights.shape) != sent.choices:
        raise ShapeError(
            "combine needs a row for each row that was sent, and a weight for each choice",
            shapes=f"rows {list(rows.shape)} of {list(sent.rows.shape)}, weights {list(weights.shape)}",
            fix=f"give the rows of this dispatch, and weights {list(sent.choices)}",
        )
    if sent.sent is not None:
        rows = _lay_rows(rows, sent.sent)
    top_k = sent.choices[1]
    found = _call("take_rows", rows.flatten(-3, -2), sent.slots)
    found = found.unflatten(-2, (found.shape[-2] // top_k, top_k))
    if sent.tokens is not None:
        weights = split_devices(_lay_rows(weights, sent.tokens))
    mixed = (found * weights.unsqueeze(-1)).sum(-2).to(rows.dtype)
    return mixed if sent.tokens is None else join_devices(mixed, sent.tokens)


class Experts(torch.nn.Module):
    """Experts in stacks of weights, [experts, in, out]: gated nets, or plain ones with `gated=False`.

    `forward(tokens, index, weights)` gives for each token the sum of what its experts make of it, weighted.
    """

    def __init__(
        self, experts: int, width: int, hidden: int, activation: Activation = F.silu, *, gated: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = torch.nn.Parameter(torch.empty(experts, width, hidden)) if gated else None
        self.up_proj = torch.nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = torch.nn.Parameter(torch.empty(experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform numbers as those of `nn.Linear`."""
        for weight in self.parameters():
            bound = weight.shape[1] ** -0.5
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens [tokens, width] through the experts that `index` [tokens, choices] names."""
        sent = dispatch(tokens, index, self.down_proj)
        wide = sent.multiply(sent.rows, self.up_proj)
        if self.gate_proj is None:
            wide = self.activation(wide)
        else:
            wide = self.activation(sent.multiply(sent.rows, self.gate_proj)) * wide
        return go_home(combine(sent, sent.multiply(wide, self.down_proj), weights), tokens)


class MoE(torch.nn.Module):
    """A feed-forward layer of experts: a router, experts, and `shared` experts that every token goes to.

    `options` are those of `route`. `routing` has the routing of the last call, for `balance_loss` and `z_loss`.
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int, *, shared: int = 0, **options: Any) -> None:
        super().__init__()
        self.top_k, self.options = top_k, options
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.shared = Shared(width, hidden * shared) if shared else None
        self.routing: Routing | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "routing": None}  # tensors that a graph has made cannot be copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [..., width] through the layer."""
        tokens = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
        self.routing = route(self.router(tokens), self.top_k, **self.options)
        mixed: torch.Tensor = self.experts(tokens, self.routing.index, self.routing.weights.to(x.dtype))
        mixed = mixed.reshape(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)


class Shared(torch.nn.Module):
    """The gated net that every token goes through; several shared experts are one that is wider."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [..., width] through the net."""
        found: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def go_home(mixed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """What was combined, where the tokens came from."""
    if isinstance(mixed, Tensor) and isinstance(tokens, Tensor):
        mixed = mixed.redistribute(tokens.topology.reduced.placements)
    return mixed


def _call(name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """An op of the table, on the mesh or on dense tensors."""
    if any(isinstance(each, Tensor) for each in tensors):
        return table_call(name, *tensors)
    if name == "take_rows":
        return dense_rows(*tensors)
    found: torch.Tensor = FUNCTIONS[name](*tensors)
    return found


def dense_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by number of a dense tensor; zeros for -1."""
    if not len(rows):
        return rows.sum(0, keepdim=True).expand(len(index), -1)  # zeros that lead to the rows
    found = rows.index_select(0, index.clamp(min=0))
    return found.masked_fill((index < 0).unsqueeze(-1), 0)


def _check(tokens: torch.Tensor, index: torch.Tensor, experts: torch.Tensor) -> None:
    for name, each in (("tokens", tokens), ("index", index), ("experts", experts)):
        expect(name, each, torch.Tensor, fix="give a tensor, on a mesh or dense")
    if (
        tokens.ndim != 2
        or index.ndim != 2
        or tokens.shape[0] != index.shape[0]
        or not index.shape[1]
        or not experts.ndim
    ):
        raise ShapeError(
            "dispatch needs tokens [tokens, width], an index [tokens, choices] and a weight [experts, ...]",
            shapes=f"{list(tokens.shape)}, {list(index.shape)} and {list(experts.shape)}",
            fix="x.flatten(0, -2) makes a line of tokens",
        )
    if index.is_floating_point() or index.dtype == torch.bool:
        raise DTypeError(f"an index of {index.dtype} names no experts", fix="give whole numbers, such as those of topk")


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


def _on_mesh(tensor: torch.Tensor, mesh: Mesh) -> Tensor:
    if not isinstance(tensor, Tensor):
        return distribute(tensor, mesh, {})
    if tensor.mesh != mesh:
        raise MeshError(
            "tokens and experts lie on two meshes",
            tokens=tensor.topology,
            experts=mesh,
            fix="put them on one mesh: loom.distribute(tokens.to_torch(), mesh, ...)",
        )
    return tensor


def _lay_rows(tensor: torch.Tensor, like: Topology) -> Tensor:
    found: Tensor = _on_mesh(tensor, like.mesh).redistribute(like.placements)
    return found


def _expert_axes(experts: torch.Tensor) -> list[int]:
    if not isinstance(experts, Tensor):
        return []
    return [axis for axis, each in enumerate(experts.placements) if each == Shard(0)]


def _parts(experts: torch.Tensor) -> int:
    return math.prod(experts.mesh.shape[axis] for axis in _expert_axes(experts)) if isinstance(experts, Tensor) else 1


def _agree(sizes: torch.Tensor, chosen: torch.Tensor, experts: int) -> int:
    """How many rows a device sends to each part of the experts: the most that any has for any.

    The same number tells every device whether somebody names an expert that is not there.
    """
    parts, choices = sizes.shape[-1], chosen.shape[-1]
    if sizes.is_meta:
        state.assume("tokens per expert", "the same for all experts and devices")
        return round_up(-(-choices // parts))
    beyond = torch.where(chosen < experts, 0, chosen + choices)
    most = int(torch.cat([sizes, beyond], -1).max())
    if most > choices:
        raise ArgumentError(
            f"index names expert {most - choices} of {experts}",
            fix=f"numbers go from 0 to {experts - 1}, and -1 means none",
        )
    return choices if parts == 1 else min(choices, round_up(most))


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
    there = tuple(Shard(place) if axis in axes else each for axis, each in enumerate(rows.placements))
    found: Tensor = rows.redistribute(there)
    return found


def _number(counts: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Which expert of its part each row is for: rows come in the order of experts."""
    ends = counts.cumsum(-1)
    found = (c.unsqueeze(-1) >= ends.unsqueeze(-2)).sum(-1)
    return torch.where(c < ends[..., -1:], found, -1)
