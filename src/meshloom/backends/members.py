"""The members of a group of devices that lie on several processes: array operations on those of this process, and one
collective between processes.

Arrays have the members first, as in `tensor.ways`: *parts* are (own members, ...), *pieces* are (own members, all
members, ...), what each has for each. Members are numbered row-major over the group's axes, and so are the processes.
What every member holds afterwards is one value, replicated: its gradient is the same on every process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from meshloom.backends import wire
from meshloom.backends.nodes import Cut, Enter, Join, Leave, Scatter, Swap, combined
from meshloom.backends.world import Group, group_of
from meshloom.engines.reductions import REDUCTIONS
from meshloom.mesh import Mesh


@dataclass(frozen=True)
class Members:
    """The devices along some axes of a mesh, and which of them this process holds. `members_of` makes one of a kind."""

    mesh: Mesh
    axes: tuple[int, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices along each axis."""
        return tuple(self.mesh.shape[axis] for axis in self.axes)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The devices of this process along each axis."""
        return tuple(self.mesh.local_shape[axis] for axis in self.axes)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The processes along each axis."""
        return tuple(self.mesh.processes[axis] for axis in self.axes)

    @property
    def crosses(self) -> bool:
        """Whether the members lie on several processes."""
        return math.prod(self.grid) > 1

    @property
    def size(self) -> int:
        """How many members there are."""
        return math.prod(self.sizes)

    @property
    def count(self) -> int:
        """How many of them this process holds."""
        return math.prod(self.held)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For every member its process (by number in the group) and its row there.

        >>> Members(Mesh.of((2, 4), processes=(1, 2)), (0, 1)).places
        ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3))
        """
        return tuple(self._place(member) for member in itertools.product(*(range(size) for size in self.sizes)))

    def _place(self, member: Sequence[int]) -> tuple[int, int]:
        process = row = 0
        for at, held, parts in zip(member, self.held, self.grid, strict=True):
            process, row = process * parts + at // held, row * held + at % held
        return process, row

    @property
    def index(self) -> int:
        """The number of this process in the group."""
        place = 0
        for axis, parts in zip(self.axes, self.grid, strict=True):
            place = place * parts + self.mesh.place[axis]
        return place

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """The numbers of this process's members, in the order of its rows."""
        return tuple(member for member, (process, _) in enumerate(self.places) if process == self.index)

    def row(self, member: int) -> int | None:
        """The row of a member, None where another process holds it."""
        process, row = self.places[member]
        return row if process == self.index else None

    def group(self, data: torch.Tensor) -> Group:
        """The processes; where there is no data nobody is asked, and they are a number."""
        if data.is_meta:
            return Group(tuple(range(math.prod(self.grid))), None, self.index)
        group = group_of(self.mesh, self.axes)
        assert group is not None
        return group

    def together(self, stacked: torch.Tensor, place: int = 0) -> torch.Tensor:
        """(..., processes, own members, ...) to (..., all members, ...), in their order."""
        count = len(self.axes)
        split = stacked.unflatten(place + 1, self.held).unflatten(place, self.grid)
        order = [place + i + level * count for i in range(count) for level in (0, 1)]
        rest = range(place + 2 * count, split.dim())
        return split.permute(*range(place), *order, *rest).flatten(place, place + 2 * count - 1)

    def apart(self, whole: torch.Tensor, place: int = 0) -> torch.Tensor:
        """(..., all members, ...) to (..., processes, own members, ...); the inverse of `together`."""
        count = len(self.axes)
        both = tuple(size for pair in zip(self.grid, self.held, strict=True) for size in pair)
        split = whole.unflatten(place, both)
        order = [place + 2 * i + level for level in (0, 1) for i in range(count)]
        rest = range(place + 2 * count, split.dim())
        moved = split.permute(*range(place), *order, *rest)
        return moved.flatten(place + count, place + 2 * count - 1).flatten(place, place + count - 1)

    # what all members hold afterwards

    def reduce(self, parts: torch.Tensor, op: str) -> torch.Tensor:
        """The reduction of all parts."""
        group = self.group(parts)
        if op in ("sum", "mean"):
            total = Leave.apply(_local(parts, "sum"), group, len(parts) > 1)
            return total / self.size if op == "mean" else total
        if op == "prod":
            return combined(_local(parts, op), group, op)
        return Extreme.apply(parts, group, op)

    def reduce_rest(self, out: torch.Tensor, op: str) -> None:
        """Every process's own reduction (for a mean, its sum) becomes that of all parts, in the same memory."""
        found = wire.all_reduce(out, self.group(out), "sum" if op == "mean" else op, own=True)
        if found.data_ptr() != out.data_ptr():
            out.copy_(found)
        if op == "mean":
            out /= self.size

    def gather(self, parts: torch.Tensor) -> torch.Tensor:
        """All parts: (all members, ...)."""
        return self.together(Join.apply(parts, self.group(parts)))

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        """The part of one member."""
        return Broadcast.apply(parts, self, root)

    # what is at one member, or different with each

    def at_root(self, value: torch.Tensor, root: int) -> torch.Tensor:
        """A value that one member takes (which another process may not have at all), zero for the others."""
        return Alone.apply(value, self, root)

    def gather_at(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        """All parts with the process of one member, zero elsewhere; their gradient is the same on every process."""
        return Gathered.apply(parts, self, root)

    def scatter(self, pieces: torch.Tensor, root: int) -> torch.Tensor:
        """The pieces that one member has for each."""
        source, row = self.places[root]
        routes = tuple(((source, member), place) for member, place in enumerate(self.places))
        rows = pieces[row if source == self.index else 0]
        return Routed.apply(rows, self, Routes(routes, self.size, self.count))

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """For each member the part of the member named in `order`; zero for None."""
        routes = tuple((self.places[o], self.places[to]) for to, o in enumerate(order) if o is not None)
        return Routed.apply(parts, self, Routes(routes, self.count, self.count))

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        """For each member the pieces that the others had for it."""
        sent = self.apart(pieces, 1).movedim(1, 0)
        arrived = Swap.apply(sent, self.group(pieces))  # (processes, their members, own members, ...)
        return self.together(arrived.movedim(2, 0), 1)

    def reduce_scatter(self, pieces: torch.Tensor, op: str) -> torch.Tensor:
        """For each member its piece of the reduction."""
        group = self.group(pieces)
        if op in ("sum", "mean"):
            total = Scatter.apply(self.apart(_local(pieces, "sum")), group)
            return total / self.size if op == "mean" else total
        if torch.is_grad_enabled() and pieces.requires_grad:
            return REDUCTIONS[op].along(self.exchange(pieces), 1)
        return wire.reduce_scatter(self.apart(_local(pieces, op)), group, op)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Of what is known for all members, that of this process's."""
        return Cut.apply(self.apart(values), self.group(values))


@lru_cache(maxsize=256)
def members_of(mesh: Mesh, axes: tuple[int, ...]) -> Members:
    """The members of the groups along some axes."""
    return Members(mesh, axes)


def _local(parts: torch.Tensor, op: str) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else REDUCTIONS[op].along(parts, 0)


class Extreme(torch.autograd.Function):
    """The maximum or minimum of all members; those that have it share its gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Group, op: str) -> torch.Tensor:
        found = wire.all_reduce(_local(parts.detach(), op), group, op, own=len(parts) > 1)
        ctx.group = group
        ctx.save_for_backward(parts, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        parts, found = ctx.saved_tensors
        mask = parts.detach() == found.detach()
        count = wire.all_reduce(mask.sum(0), ctx.group, own=True)
        return Enter.apply(gradient, ctx.group) * mask / count, None, None


class Broadcast(torch.autograd.Function):
    """One member's part for all: (own members, ...) to (...)."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, members: Members, root: int) -> torch.Tensor:
        ctx.members, ctx.root = members, root
        data = parts[members.row(root) or 0]
        return wire.broadcast(data, members.group(parts), members.places[root][0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Alone.apply(gradient, ctx.members, ctx.root), None, None


class Alone(torch.autograd.Function):
    """A value that one member takes, zero for the others: (...) to (own members, ...)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, members: Members, root: int) -> torch.Tensor:
        ctx.members, ctx.root = members, root
        parts, row = value.new_zeros((members.count, *value.shape)), members.row(root)
        if row is not None:
            parts[row] = value
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Broadcast.apply(gradient, ctx.members, ctx.root), None, None


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


def _sent(rows: torch.Tensor, members: Members, routes: Routes) -> torch.Tensor:
    """Rows sent along routes, zero where nothing arrives; what several bring to one row adds up."""
    group, here = members.group(rows), members.index
    room = rows.new_zeros((routes.after, *rows.shape[1:]))
    if rows.is_meta:
        return room
    written = _put(room, routes.between(here, here), rows, set())
    if routes.cross:
        others = [process for process in range(group.size) if process != here]
        arriving = [(process, pair) for process in others for pair in routes.between(process, here)]
        leaving = [[row for row, _ in routes.between(here, process)] for process in range(group.size)]
        leaving[here] = []
        arrived = wire.exchange_rows(rows, leaving, [(process, row) for process, (row, _) in arriving], group)
        _put(room, [(i, row) for i, (_, (_, row)) in enumerate(arriving)], arrived, written)
    return room


class Routed(torch.autograd.Function):
    """Rows sent along routes; on the way back what one row gave to several adds up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, members: Members, routes: Routes) -> torch.Tensor:
        ctx.members, ctx.routes = members, routes
        return _sent(rows, members, routes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Routed.apply(gradient, ctx.members, ctx.routes.back()), None, None


class Gathered(torch.autograd.Function):
    """All parts with the process of one member: (own members, ...) to (all members, ...)."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, members: Members, root: int) -> torch.Tensor:
        ctx.members = members
        target = members.places[root][0]
        routes = tuple((place, (target, member)) for member, place in enumerate(members.places))
        return _sent(parts, members, Routes(routes, members.count, members.size))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.members.own(gradient), None, None


def _put(room: torch.Tensor, pairs: Iterable[tuple[int, int]], rows: torch.Tensor, written: set[int]) -> set[int]:
    """Rows put into a room that was zero, added to those that are there already: which have been written."""
    for source, target in pairs:
        room[target] = room[target] + rows[source] if target in written else rows[source]
        written.add(target)
    return written
