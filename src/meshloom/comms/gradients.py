"""How gradients cross processes: a collective and its counterpart, as nodes of torch's graph.

A gradient has the dual placement of its value: that of a replicated value is the same on every process, that of a
partial sum is the same on every process, that of a shard is a shard.

Each node is a line of `_COUNTERPARTS`: what it does, and the node that its gradient goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comms import wire
from meshloom.comms.group import WORLD, Group
from meshloom.engines.node import Node
from meshloom.engines.reductions import REDUCTIONS, nothing_like

Run = Callable[..., torch.Tensor]


def _node(name: str, run: Run, back: str) -> type[Node]:
    """A node of torch's graph. Backward goes on under the name of the call that the forward pass was part of."""

    def forward(ctx: Any, data: torch.Tensor, group: Group, *how: object) -> torch.Tensor:
        ctx.group, ctx.call, ctx.more = group, WORLD.watch.call, (None,) * len(how)
        return run(data, group, *how)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        WORLD.watch.call = ctx.call if ctx.call.endswith(" backward") else f"{ctx.call} backward"
        return NODES[back].apply(gradient, ctx.group), None, *ctx.more

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": __name__}
    return type(name, (Node,), methods)


# fmt: off
_COUNTERPARTS: dict[str, tuple[Run, str]] = {  # (processes, ...) is what each process has, or what there is for each
    # a replicated value that split work uses: the parts of its gradient add up (a view would keep what it is kept by)
    "SumGradient":    (lambda data, group: data.detach(), "AllReduce"),
    # partial sums become one value, of which each has the whole gradient; `own` lets the sum use their memory
    "AllReduce":      (lambda data, group, own=False: wire.all_reduce(data.detach(), group, own=own), "SumGradient"),
    # shards become one value: (...) to (processes, ...)
    "AllGather":      (lambda data, group: wire.all_gather(data, group), "Slice"),
    # one value becomes shards: (processes, ...) to (...)
    "Slice":          (lambda data, group: data[group.index].clone(), "AllGather"),
    # partial sums of (processes, ...) become shards (...)
    "ReduceScatter":  (lambda data, group: wire.reduce_scatter(data, group), "GatherGradient"),
    # the gradient of partial sums from those of their shards: its own gradient adds up again
    "GatherGradient": (lambda data, group: wire.all_gather(data, group), "ReduceScatter"),
    # shards of one dim become shards of another: piece i of (processes, ...) goes to process i
    "AllToAll":       (lambda data, group: wire.all_to_all(data, group), "AllToAll"),
}
# fmt: on
NODES: dict[str, type[Node]] = {name: _node(name, *way) for name, way in _COUNTERPARTS.items()}
SumGradient, AllReduce, AllGather, Slice, ReduceScatter, GatherGradient, AllToAll = NODES.values()


class Once(Node):
    """A value of which a sum over processes counts one: the first process keeps it, the others add nothing."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        return data.view_as(data) if group.index == 0 else nothing_like(data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def combine(data: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    """The reduction of every process's array by another op than sum, as one value; its gradient is that of the op."""
    if op == "mean":  # in a dtype whose sums do not overflow, and with a power of two taken out where there is none
        wide, part = _widest(data), 2.0 ** -group.processes.bit_length()
        return (AllReduce.apply(wide * part, group) / (group.processes * part)).to(data.dtype)
    if not (torch.is_grad_enabled() and data.requires_grad):
        return wire.all_reduce(data.detach(), group, op)
    stacked = AllGather.apply(data, group)
    return REDUCTIONS[op].along(stacked, 0)


def _widest(data: torch.Tensor) -> torch.Tensor:
    return data.to(torch.complex128 if data.is_complex() else torch.float64)


def reduce_local(parts: torch.Tensor, op: str) -> torch.Tensor:
    """What the members of this process hold, reduced; of one member it is the part itself."""
    return parts[0] if len(parts) == 1 else REDUCTIONS[op].along(parts, 0)


def slice_own(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Of what is known for all group, that of this process's."""
    return Slice.apply(group.apart(values), group)


# devices of a group that lie on several processes: arrays have this process's members first


class Extreme(Node):
    """The maximum or minimum of all members; those that have it share its gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Group, op: str) -> torch.Tensor:
        found = wire.all_reduce(reduce_local(parts.detach(), op), group, op, own=len(parts) > 1)
        ctx.group = group
        ctx.save_for_backward(parts, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts, found = ctx.saved_tensors
        mask = parts.detach() == found.detach()
        count = wire.all_reduce(mask.sum(0), ctx.group, own=True)
        return SumGradient.apply(gradient, ctx.group) * mask / count, None, None


class Broadcast(Node):
    """One member's part for all: (own members, ...) to (...)."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        data = parts[group.row(root) or 0]
        return wire.broadcast(data, group, group.places[root][0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AtRoot.apply(gradient, ctx.group, ctx.root), None, None


class AtRoot(Node):
    """A value that one member takes, zero for the others: (...) to (own members, ...)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        parts, row = value.new_zeros((group.count, *value.shape)), group.row(root)
        if row is not None:
            parts[row] = value
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Broadcast.apply(gradient, ctx.group, ctx.root), None, None


Place = tuple[int, int]  # a process of the group, and a row of its array


@dataclass(frozen=True)
class Routes:
    """Rows that go from one process's array to another's: from where to where, and how many rows either has."""

    routes: tuple[tuple[Place, Place], ...]
    before: int
    after: int

    def back(self) -> Routes:
        """The same routes the other way."""
        return Routes(tuple((there, here) for here, there in self.routes), self.after, self.before)

    def between(self, source: int, target: int) -> list[tuple[int, int]]:
        """The rows that go from one process to another, before and after."""
        return [(here[1], there[1]) for here, there in self.routes if (here[0], there[0]) == (source, target)]

    @property
    def cross(self) -> bool:
        """Whether anything leaves a process."""
        return any(here[0] != there[0] for here, there in self.routes)


def _send(rows: torch.Tensor, group: Group, routes: Routes) -> torch.Tensor:
    """Rows sent along routes, zero where nothing arrives; what several bring to one row adds up."""
    here = group.index
    room = rows.new_zeros((routes.after, *rows.shape[1:]))
    if rows.is_meta:
        return room
    written = _put(room, routes.between(here, here), rows, set())
    if routes.cross:
        others = [process for process in range(group.processes) if process != here]
        arriving = [(process, pair) for process in others for pair in routes.between(process, here)]
        leaving = [[row for row, _ in routes.between(here, process)] for process in range(group.processes)]
        leaving[here] = []
        arrived = wire.exchange_rows(rows, leaving, [(process, row) for process, (row, _) in arriving], group)
        _put(room, [(i, row) for i, (_, (_, row)) in enumerate(arriving)], arrived, written)
    return room


class SendRows(Node):
    """Rows sent along routes; on the way back what one row gave to several adds up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Group, routes: Routes) -> torch.Tensor:
        ctx.group, ctx.routes = group, routes
        return _send(rows, group, routes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return SendRows.apply(gradient, ctx.group, ctx.routes.back()), None, None


class GatherAtRoot(Node):
    """All parts with the process of one member: (own members, ...) to (all members, ...)."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        ctx.group = group
        target = group.places[root][0]
        routes = tuple((place, (target, member)) for member, place in enumerate(group.places))
        return _send(parts, group, Routes(routes, group.count, group.size))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return slice_own(gradient, ctx.group), None, None


def _put(room: torch.Tensor, pairs: Iterable[tuple[int, int]], rows: torch.Tensor, written: set[int]) -> set[int]:
    """Rows put into a room that was zero, added to those that are there already: which have been written."""
    for source, target in pairs:
        room[target] = room[target] + rows[source] if target in written else rows[source]
        written.add(target)
    return written
