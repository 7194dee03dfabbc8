"""Three modes of a collective, with one meaning: on the block, through the host, over links.

A mode has a few operations on arrays whose first dim is the members of a group that this process holds; on a mesh of
one process, which is a group of one, those are all of them. `pieces` have two: what each member has for each. The rest
of an array (other mesh axes, dims) is the same for all. What every member holds afterwards is one value, replicated:
its gradient is the same on every process. A result that one member has alone is only there with its process.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch

from meshloom.collectives.algorithms import algorithm, choose
from meshloom.collectives.schedule import Schedule, Send
from meshloom.comms import wire
from meshloom.comms.gradients import (
    AllGather,
    AllReduce,
    AllToAll,
    AtRoot,
    Broadcast,
    Extreme,
    GatherAtRoot,
    ReduceScatter,
    Routes,
    SendRows,
    combine,
    reduce_local,
    slice_own,
)
from meshloom.comms.group import Group
from meshloom.comms.schedules import Box, Executor
from meshloom.context import state
from meshloom.engines.layout import Step
from meshloom.engines.node import Node
from meshloom.engines.reductions import REDUCTIONS
from meshloom.errors import ArgumentError, is_program, where
from meshloom.fabric import VIRTUAL, Fabric
from meshloom.mesh import Coordinate, Mesh

_LOW = (torch.bfloat16, torch.float16)


class HostTrafficWarning(UserWarning):
    """Collectives go through the host where they are repeated."""


class DirectMode:
    """Array operations on the members of this process, and one collective between processes if there are others."""

    def __init__(self, group: Group, precise: bool = False) -> None:
        self.group, self.precise = group, precise

    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        """What the members hold, reduced."""
        group = self.group
        if not group.crosses:
            return REDUCTIONS[op].quickly(parts)
        if self.precise and parts.dtype in _LOW:  # rounded once, as in one process
            return self.reduce(kind, parts.float(), op, root).to(parts.dtype)
        if op in ("sum", "mean"):
            total = AllReduce.apply(reduce_local(parts, "sum"), group, len(parts) > 1)
            return total / group.size if op == "mean" else total
        return combine(reduce_local(parts, op), group, op) if op == "prod" else Extreme.apply(parts, group, op)

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        """The reduction, written where `out` lies."""
        group = self.group
        first = "sum" if op == "mean" and group.crosses else op
        with torch.no_grad():
            REDUCTIONS[first].quickly(parts, out)
            if not group.crosses:
                return
            found = wire.all_reduce(out, group, first, own=True)
            if found.data_ptr() != out.data_ptr():
                out.copy_(found)
            if op == "mean":
                out /= group.size

    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        """What all members hold, together; of a `gather`, with the process of the root."""
        group = self.group
        if not group.crosses:
            return parts
        if kind == "gather":
            return GatherAtRoot.apply(parts, group, root)
        return group.together(AllGather.apply(parts, group))

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        """What the root holds."""
        return Broadcast.apply(parts, self.group, root) if self.group.crosses else parts[root].clone()

    def at_root(self, value: torch.Tensor, root: int) -> torch.Tensor:
        """A value that one member takes (which another process may not have at all), zero for the others."""
        if self.group.crosses:
            return AtRoot.apply(value, self.group, root)
        zeros = value.new_zeros(value.shape)
        return torch.stack([value if member == root else zeros for member in range(self.group.size)])

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        """For each member its piece of the reduction, or of what the root holds."""
        group = self.group
        if not group.crosses:
            return pieces[root].clone() if kind == "scatter" else REDUCTIONS[op].quickly(pieces)
        if kind == "scatter":
            source, row = group.places[root]
            routes = tuple(((source, member), place) for member, place in enumerate(group.places))
            rows = pieces[row if source == group.index else 0]
            return SendRows.apply(rows, group, Routes(routes, group.size, group.count))
        if self.precise and pieces.dtype in _LOW:
            return self.scatter(kind, pieces.float(), op, root).to(pieces.dtype)
        if op in ("sum", "mean"):
            total = ReduceScatter.apply(group.apart(reduce_local(pieces, "sum")), group)
            return total / group.size if op == "mean" else total
        if torch.is_grad_enabled() and pieces.requires_grad:
            return REDUCTIONS[op].along(self.exchange(pieces), 1)
        return wire.reduce_scatter(group.apart(reduce_local(pieces, op)), group, op)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        """For each member the pieces that the others had for it."""
        group = self.group
        if not group.crosses:
            return pieces.transpose(0, 1)
        arrived = AllToAll.apply(group.apart(pieces, 1).movedim(1, 0), group)
        return group.together(arrived.movedim(2, 0), 1)  # from (processes, their members, own members, ...)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """For each member what the member named in `order` holds; zero for None."""
        group = self.group
        if not group.crosses:
            return _in_order(parts, order)
        routes = tuple((group.places[o], group.places[to]) for to, o in enumerate(order) if o is not None)
        return SendRows.apply(parts, group, Routes(routes, group.count, group.count))


def _in_order(parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
    zero = parts.new_zeros(parts.shape[1:])
    return torch.stack([zero if o is None else parts[o] for o in order])


def _through_the_host(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method, counted with its bytes and seconds when it is done."""

    @wraps(method)
    def run(self: HostMode, *arguments: object) -> torch.Tensor:
        start = time.perf_counter()
        found = method(self, *arguments)
        _count_host(self.moved, time.perf_counter() - start)
        return found

    return run


class HostMode(DirectMode):
    """Every process reads the parts of all and combines them in the order of the members, low precision in float32."""

    moved = 0  # bytes read back and written

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        out.copy_(self.reduce(kind, parts, op, root))

    @_through_the_host
    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        held = self._read(parts)
        total = held[0]
        for part in held[1:]:
            total = REDUCTIONS[op].combine(total, part)
        total = total / len(held) if op == "mean" else total
        return total.to(parts.dtype, copy=len(held) == 1)  # of one member it would be the operand itself

    @_through_the_host
    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        return torch.stack(self._read(parts)).to(parts.dtype)

    @_through_the_host
    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        return self._read(parts)[root].to(parts.dtype, copy=True)

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        scattered = kind == "scatter"
        return self._own(self.broadcast(pieces, root) if scattered else self.reduce(kind, pieces, op, root))

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        return self._own(self._transpose(pieces))

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        return self._own(_in_order(self.gather("shift", parts, 0), order))

    @_through_the_host
    def _transpose(self, pieces: torch.Tensor) -> torch.Tensor:
        rows = self._read(pieces)
        return torch.stack([torch.stack([row[i] for row in rows]) for i in range(len(rows))]).to(pieces.dtype)

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        return slice_own(values, self.group) if self.group.crosses else values

    def _read(self, parts: torch.Tensor) -> list[torch.Tensor]:
        everything = DirectMode.gather(self, "all_gather", parts, 0)
        self.moved = 2 * everything.numel() * everything.element_size()
        wide = torch.float32 if parts.dtype in _LOW else parts.dtype
        return [part.to(wide) for part in everything]


HOT = 100  # collectives through the host after which it is said that there are many
_through_host = [0, 0, 0.0]  # collectives, bytes, seconds


def _count_host(size: int, seconds: float) -> None:
    """Say once, with the figures, that a hot path goes through the host."""
    for place, more in enumerate((1, size, seconds)):
        _through_host[place] += more
    if _through_host[0] == HOT:
        warnings.warn(
            f"{HOT} collectives went through the host, {_through_host[1]} B in {_through_host[2]:.3g} s, the last at "
            f"{where()}; mode='direct' or 'fabric' does not",
            HostTrafficWarning,
            stacklevel=_depth(),
        )


def _depth() -> int:
    """How many calls away the program is, as a warning counts them."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and not is_program(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    return depth


class FabricMode(DirectMode):
    """A schedule of sends between neighbours, step by step; its gradient is that of the same work on the block.

    Chunks are cut as one process cuts them, so that every sum is made in the same order. `others` has size and offset
    of the mesh axes that lie before the dims in a part.
    """

    def __init__(self, group: Group, name: str | None, precise: bool, others: Sequence[tuple[int, int]] | None) -> None:
        super().__init__(group, precise)
        self.fabric = fabric_of(group.mesh)
        self.algorithm, self.others = name, others
        self.size = group.size
        self.direct = DirectMode(group)

    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        def run(executor: Executor, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return _average(executor.reduce_all(schedule, rows, op)[self._row(root)], op, self.size)

        return self._run(kind, parts, run, lambda x: self.direct.reduce(kind, x, op, root), root, parts.shape[1:])

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        out.copy_(self.reduce(kind, parts, op, root))

    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        def run(executor: Executor, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return executor.gather_all(schedule, rows)[self._row(root)]

        shape = (self.size, *parts.shape[1:])
        return self._run(kind, parts, run, lambda x: self.direct.gather(kind, x, root).clone(), root, shape)

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        def run(executor: Executor, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return executor.reduce_all(schedule, rows, "sum")[-1]

        return self._run("broadcast", parts, run, lambda x: self.direct.broadcast(x, root), root, parts.shape[1:])

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        def run(executor: Executor, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return _average(executor.scatter_all(schedule, rows, op), op, self.size)

        shape = (len(pieces), *pieces.shape[2:])
        return self._run(kind, pieces, run, lambda x: self.direct.scatter(kind, x, op, root), root, shape, 2)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        def run(executor: Executor, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return executor.exchange_all(schedule, rows)

        return self._run("all_to_all", pieces, run, lambda x: self.direct.exchange(x).clone(), 0, pieces.shape, 2)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """Hop by hop along the routes between the members; a link carries one message per step."""
        schedule = route(_first_group(self.group.mesh, self.group.axes), tuple(order), self.fabric)

        def send(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(len(x), math.prod(x.shape[1:]))
            return Executor(self.group, self._box(x, 1)).route_all(schedule, rows, order).reshape(x.shape)

        return SendAll.apply(parts, send, lambda x: self.direct.rearrange(x, order))

    def _run(
        self,
        kind: str,
        parts: torch.Tensor,
        run: Callable[[Executor, torch.Tensor, Schedule], torch.Tensor],
        same: Callable[[torch.Tensor], torch.Tensor],
        root: int,
        shape: Sequence[int],
        lead: int = 1,
    ) -> torch.Tensor:
        """What `run` gives in a result of this shape; `same` is the work on the block, `lead` the dims of members."""
        if self.size == 1:
            return same(parts)

        def send(x: torch.Tensor) -> torch.Tensor:
            wide = x.float() if self.precise and x.dtype in _LOW else x
            box = self._box(wide, lead)
            size = wide.element_size() * math.prod(wide.shape[1:lead]) * math.prod(box.shape)
            rows = wide.reshape(*wide.shape[:lead], math.prod(wide.shape[lead:]))
            return run(Executor(self.group, box), rows, self.schedule(kind, size, root)).to(x.dtype).reshape(shape)

        return SendAll.apply(parts, send, same)

    def _row(self, member: int) -> int:
        """The member's row; another process has to choose one too, and takes its first."""
        return self.group.row(member) or 0

    def _box(self, parts: torch.Tensor, lead: int) -> Box:
        """What this process holds of a member's elements: all of them, unless other axes leave the process."""
        held = tuple(parts.shape[lead:])
        if self.others is None:
            return Box(held, (0,) * len(held), held)
        dims = held[len(self.others) :]
        shape = (*(size for size, _ in self.others), *dims)
        return Box(shape, (*(start for _, start in self.others), *(0 for _ in dims)), held)

    def schedule(self, kind: str, size: int, root: int) -> Schedule:
        """The schedule for the group of the first place on the other axes; on a grid all groups are alike."""
        mesh, axes = self.group.mesh, self.group.axes
        group = _first_group(mesh, axes)
        if self.fabric.kinds is None and len(axes) < mesh.ndim:
            raise ArgumentError(
                "links that are no grid have no common schedule for several groups",
                fabric=self.fabric,
                fix="go over the whole mesh, or use a grid",
            )
        chosen = (
            algorithm(kind, self.algorithm) if self.algorithm else choose(kind, group, self.fabric, size, root=root)
        )
        return chosen(group, self.fabric, root=root)


def _average(total: torch.Tensor, op: str, members: int) -> torch.Tensor:
    return total / members if op == "mean" else total


@lru_cache(maxsize=256)
def _first_group(mesh: Mesh, axes: tuple[int, ...]) -> tuple[Coordinate, ...]:
    """The members of the group at the first place on the other axes."""
    return tuple(itertools.product(*(range(size if axis in axes else 1) for axis, size in enumerate(mesh.shape))))


@lru_cache(maxsize=256)
def route(group: tuple[Coordinate, ...], order: tuple[int | None, ...], fabric: Fabric) -> Schedule:
    """Messages along shortest routes, chunk i to member i; a hop waits until its link is free."""
    steps: list[list[Send]] = []
    busy: set[tuple[int, Coordinate, Coordinate]] = set()
    for to, o in enumerate(order):
        path = () if o is None else fabric.route(group[o], group[to])
        if not set(path) <= set(group):
            raise ArgumentError(f"the route from {path[0]} to {path[-1]} leaves the group", fabric=fabric)
        step = 0
        for source, destination in itertools.pairwise(path):
            while (step, source, destination) in busy:
                step += 1
            busy.add((step, source, destination))
            steps.extend([] for _ in range(step + 1 - len(steps)))
            steps[step].append(Send(source, destination, to))
            step += 1
    return Schedule("send_recv", "routes", group, len(group), tuple(tuple(step) for step in steps))


class SendAll(Node):
    """What a schedule gave; backward is the derivative of the same computation on the block."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, send: Step, same: Step) -> torch.Tensor:
        ctx.save_for_backward(parts)
        ctx.same = same
        return send(parts.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            parts = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.same(parts), parts, gradient)
        return found, None, None


@lru_cache(maxsize=64)
def _rings(shape: tuple[int, ...]) -> Fabric:
    return Fabric.grid(shape, "ring", VIRTUAL.latency, VIRTUAL.bandwidth, name="virtual")


def fabric_of(mesh: Mesh) -> Fabric:
    """The links of a mesh: those of `use_fabric`, or a ring along every axis."""
    fabric = state.fabric
    if fabric is None:
        return _rings(mesh.shape)
    if fabric.shape != mesh.shape:
        raise ArgumentError(
            f"the fabric has shape {fabric.shape} and the mesh {mesh.shape}",
            fabric=fabric,
            mesh=mesh,
            fix="use a fabric of the mesh's shape",
        )
    return fabric
