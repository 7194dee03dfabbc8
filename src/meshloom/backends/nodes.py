"""How gradients cross processes: a collective and its counterpart, as nodes of torch's graph.

A gradient has the dual placement of its value: that of a replicated value is the same on every process, that of a
partial sum is the same on every process, that of a shard is a shard.

| node      | forward                          | backward                                    |
|-----------|----------------------------------|---------------------------------------------|
| `Enter`   | nothing: a replicated value is used by work that is split | the parts of its gradient add up: all-reduce |
| `Leave`   | all-reduce of partial sums       | nothing                                     |
| `Join`    | all-gather of shards             | a slice                                     |
| `Cut`     | a slice of a replicated value    | all-gather                                  |
| `Scatter` | reduce-scatter of partial sums   | all-gather                                  |
| `Once`    | one process keeps a value that a sum counts | nothing: the sum's gradient is the same everywhere |
| `Swap`    | all-to-all                       | the reverse all-to-all                      |
"""

from __future__ import annotations

from typing import Any

import torch

from meshloom.backends import wire
from meshloom.backends.world import WORLD, Group
from meshloom.engines.reductions import REDUCTIONS, nothing_like


def _keep(ctx: Any, group: Group) -> None:
    """What backward needs: the group, and which call it belongs to."""
    ctx.group, ctx.call = group, WORLD.watch.call


def _resume(ctx: Any) -> None:
    WORLD.watch.call = ctx.call if ctx.call.endswith(" backward") else f"{ctx.call} backward"


class Enter(torch.autograd.Function):
    """A replicated value at the door of split work."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return Leave.apply(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    """Partial sums become one value."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group, own: bool = False) -> torch.Tensor:
        _keep(ctx, group)
        return wire.all_reduce(data.detach(), group, own=own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _resume(ctx)
        return Enter.apply(gradient, ctx.group), None, None


class Join(torch.autograd.Function):
    """Shards become one value: (...) to (processes, ...)."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return wire.all_gather(data, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return Cut.apply(gradient, ctx.group), None


class Cut(torch.autograd.Function):
    """One value becomes shards: (processes, ...) to (...)."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return data[group.index].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return Join.apply(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """Partial sums of (processes, ...) become shards (...)."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return wire.reduce_scatter(data, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return _Collect.apply(gradient, ctx.group), None


class _Collect(torch.autograd.Function):
    """The gradient of partial sums from those of their shards; its own gradient adds up again."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return wire.all_gather(data, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return Scatter.apply(gradient, ctx.group), None


class Once(torch.autograd.Function):
    """A value of which a sum over processes counts one: the first process keeps it, the others add nothing."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        return data.view_as(data) if group.index == 0 else nothing_like(data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Swap(torch.autograd.Function):
    """Shards of one dim become shards of another: piece i of (processes, ...) goes to process i."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        _keep(ctx, group)
        return wire.all_to_all(data, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _resume(ctx)
        return Swap.apply(gradient, ctx.group), None


def statistic(data: torch.Tensor, group: Group) -> torch.Tensor:
    """A sum over all processes that split work goes on with: its gradient adds up on the way back."""
    return Enter.apply(Leave.apply(data, group), group)


def combined(data: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    """The reduction of every process's array by another op than sum, as one value; its gradient is that of the op."""
    if op == "mean":  # in a dtype whose sums do not overflow, and with a power of two taken out where there is none
        wide, part = _widest(data), 2.0 ** -group.size.bit_length()
        return (Leave.apply(wide * part, group) / (group.size * part)).to(data.dtype)
    if not (torch.is_grad_enabled() and data.requires_grad):
        return wire.all_reduce(data.detach(), group, op)
    stacked = Join.apply(data, group)
    return REDUCTIONS[op].along(stacked, 0)


def _widest(data: torch.Tensor) -> torch.Tensor:
    return data.to(torch.complex128 if data.is_complex() else torch.float64)
