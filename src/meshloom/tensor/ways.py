"""Three ways to carry out a collective, with one meaning: on the block, through the host, over links.

A way has a few operations on arrays whose first dim is the members of a group. `pieces` have two: what each member
has for each. The rest of an array (other mesh axes, dims) is the same for all of them. Where the members lie on several
processes, the first dim is the members of this one (`backends.members`), and a result that one member has alone is only
there with its process.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch

from meshloom.backends import links
from meshloom.backends.links import Box
from meshloom.backends.members import Members
from meshloom.collectives.algorithms import algorithm, choose
from meshloom.collectives.schedule import Schedule, Send
from meshloom.engines import sending
from meshloom.engines.reductions import REDUCTIONS
from meshloom.errors import ArgumentError
from meshloom.fabric import VIRTUAL, Fabric
from meshloom.mesh import Coordinate, Mesh
from meshloom.runtime import state, where

_LOW = (torch.bfloat16, torch.float16)


class HostTrafficWarning(UserWarning):
    """Collectives go through the host where they are repeated."""


class Direct:
    """Array operations on the block."""

    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        """What the members hold, reduced."""
        return REDUCTIONS[op].quickly(parts)

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        """The reduction, written where `out` lies."""
        with torch.no_grad():
            REDUCTIONS[op].quickly(parts, out)

    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        """What the members hold, together."""
        return parts

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        """What the root holds."""
        return parts[root].clone()

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        """For each member its piece of the reduction, or of what the root holds."""
        return pieces[root].clone() if kind == "scatter" else REDUCTIONS[op].quickly(pieces)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        """For each member the pieces that the others had for it."""
        return pieces.transpose(0, 1)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """For each member what the member named in `order` holds; zero for None."""
        zero = parts.new_zeros(parts.shape[1:])
        return torch.stack([zero if o is None else parts[o] for o in order])


class Between(Direct):
    """Array operations on the members of this process, and one collective between processes."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        return self.members.reduce(parts, op)

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        with torch.no_grad():
            REDUCTIONS["sum" if op == "mean" else op].quickly(parts, out)
            self.members.reduce_rest(out, op)

    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        return self.members.gather_at(parts, root) if kind == "gather" else self.members.gather(parts)

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        return self.members.broadcast(parts, root)

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        return self.members.scatter(pieces, root) if kind == "scatter" else self.members.reduce_scatter(pieces, op)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        return self.members.exchange(pieces)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        return self.members.rearrange(parts, order)


def _through_the_host(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method, counted with its bytes and seconds when it is done."""

    @wraps(method)
    def run(self: Host, *arguments: Any) -> torch.Tensor:
        start = time.perf_counter()
        found = method(self, *arguments)
        _count_host(self.moved, time.perf_counter() - start)
        return found

    return run


class Host(Direct):
    """Every part is read back and combined in the order of the members, low precision in float32."""

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
        return self.broadcast(pieces, root) if kind == "scatter" else self.reduce(kind, pieces, op, root)

    @_through_the_host
    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        rows = self._read(pieces)
        return torch.stack([torch.stack([row[i] for row in rows]) for i in range(len(rows))]).to(pieces.dtype)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        return super().rearrange(self.gather("shift", parts, 0), order)

    def _read(self, parts: torch.Tensor) -> list[torch.Tensor]:
        self.moved = 2 * parts.numel() * parts.element_size()
        wide = torch.float32 if parts.dtype in _LOW else parts.dtype
        return [part.to(wide) for part in parts]


class HostBetween(Host):
    """Every process reads the parts of all, combines them as one process does, and keeps those of its members."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        return self.members.own(super().scatter(kind, pieces, op, root))

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        return self.members.own(super().exchange(pieces))

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        return self.members.own(super().rearrange(parts, order))

    def _read(self, parts: torch.Tensor) -> list[torch.Tensor]:
        return super()._read(self.members.gather(parts))


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
            stacklevel=5,
        )


class OverLinks(Direct):
    """A schedule of sends between neighbours, step by step; its gradient is that of the same work on the block."""

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], name: str | None, precise: bool) -> None:
        self.fabric = fabric_of(mesh)
        self.mesh, self.axes, self.algorithm, self.precise = mesh, axes, name, precise
        self.size = math.prod(mesh.shape[axis] for axis in axes)
        self.direct = Direct()

    def reduce(self, kind: str, parts: torch.Tensor, op: str, root: int) -> torch.Tensor:
        def run(sends: Any, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return _averaged(sends.reduce_all(schedule, rows, op)[self._row(root)], op, self.size)

        return self._run(kind, parts, run, lambda x: self.direct.reduce(kind, x, op, root), root)

    def reduce_into(self, out: torch.Tensor, kind: str, parts: torch.Tensor, op: str, root: int) -> None:
        out.copy_(self.reduce(kind, parts, op, root))

    def gather(self, kind: str, parts: torch.Tensor, root: int) -> torch.Tensor:
        def run(sends: Any, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return sends.gather_all(schedule, rows)[self._row(root)]

        return self._run(kind, parts, run, lambda x: self.direct.gather(kind, x, root).clone(), root)

    def broadcast(self, parts: torch.Tensor, root: int) -> torch.Tensor:
        def run(sends: Any, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return sends.reduce_all(schedule, rows, "sum")[-1]

        return self._run("broadcast", parts, run, lambda x: self.direct.broadcast(x, root), root)

    def scatter(self, kind: str, pieces: torch.Tensor, op: str, root: int) -> torch.Tensor:
        def run(sends: Any, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return _averaged(sends.scatter_all(schedule, rows, op), op, self.size)

        return self._run(kind, pieces, run, lambda x: self.direct.scatter(kind, x, op, root), root, 2)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        def run(sends: Any, rows: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            return sends.exchange_all(schedule, rows)

        return self._run("all_to_all", pieces, run, lambda x: self.direct.exchange(x).clone(), 0, 2)

    def rearrange(self, parts: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
        """Hop by hop along the routes between the members; a link carries one message per step."""
        schedule = routed(self._group(), tuple(order), self.fabric)

        def sent(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(len(x), math.prod(x.shape[1:]))
            return self._sends(x, 1).route_all(schedule, rows, order).reshape(x.shape)

        return Sent.apply(parts, sent, lambda x: self.direct.rearrange(x, order))

    def _run(
        self,
        kind: str,
        parts: torch.Tensor,
        run: Callable[[Any, torch.Tensor, Schedule], torch.Tensor],
        same: Callable[[torch.Tensor], torch.Tensor],
        root: int,
        members: int = 1,
    ) -> torch.Tensor:
        if self.size == 1:
            return same(parts)
        shape = _like(same, parts)

        def sent(x: torch.Tensor) -> torch.Tensor:
            wide = x.float() if self.precise and x.dtype in _LOW else x
            schedule = self.schedule(kind, wide.element_size() * self._elements(wide, members), root)
            rows = wide.reshape(*wide.shape[:members], math.prod(wide.shape[members:]))
            return run(self._sends(wide, members), rows, schedule).to(x.dtype).reshape(shape)

        return Sent.apply(parts, sent, same)

    def _sends(self, parts: torch.Tensor, members: int) -> Any:
        """What carries out schedules: `reduce_all` and its kind."""
        return sending

    def _row(self, member: int) -> int:
        """Where a member is among the parts."""
        return member

    def _elements(self, parts: torch.Tensor, members: int) -> int:
        """How many elements a member has, for all places on the other axes."""
        return math.prod(parts.shape[1:])

    def _group(self) -> tuple[Coordinate, ...]:
        return _first_group(self.mesh, self.axes)

    def schedule(self, kind: str, size: int, root: int) -> Schedule:
        """The schedule for the group of the first place on the other axes; on a grid all groups are alike."""
        group = self._group()
        if self.fabric.kinds is None and len(self.axes) < self.mesh.ndim:
            raise ArgumentError(
                "links that are no grid have no common schedule for several groups",
                fabric=self.fabric,
                fix="go over the whole mesh, or use a grid",
            )
        if self.algorithm is not None:
            return algorithm(kind, self.algorithm)(group, self.fabric, root=root)
        return choose(kind, group, self.fabric, size, root=root)(group, self.fabric, root=root)


class LinksBetween(OverLinks):
    """A schedule of sends between neighbours, of which some are messages between processes.

    Chunks are cut as one process cuts them, so that every sum is made in the same order. `others` has size and offset
    of the mesh axes that lie before the dims in a part.
    """

    def __init__(self, members: Members, name: str | None, precise: bool, others: Sequence[tuple[int, int]]) -> None:
        super().__init__(members.mesh, members.axes, name, precise)
        self.members, self.others = members, tuple(others)
        self.direct = Between(members) if members.crosses else Direct()

    def _sends(self, parts: torch.Tensor, members: int) -> Any:
        return links.Sends(self.members, self._box(parts, members))

    def _row(self, member: int) -> int:
        """The member's row; another process has to choose one too, and takes its first."""
        return self.members.row(member) or 0

    def _elements(self, parts: torch.Tensor, members: int) -> int:
        return math.prod(parts.shape[1:members]) * math.prod(self._box(parts, members).shape)

    def _box(self, parts: torch.Tensor, members: int) -> Box:
        dims = tuple(parts.shape[members + len(self.others) :])
        shape = (*(size for size, _ in self.others), *dims)
        offset = (*(start for _, start in self.others), *(0 for _ in dims))
        return Box(shape, offset, tuple(parts.shape[members:]))


def _like(same: Callable[[torch.Tensor], torch.Tensor], parts: torch.Tensor) -> torch.Size:
    with torch.no_grad():
        return same(torch.empty(parts.shape, dtype=parts.dtype, device="meta")).shape


def _averaged(total: torch.Tensor, op: str, members: int) -> torch.Tensor:
    return total / members if op == "mean" else total


@lru_cache(maxsize=256)
def _first_group(mesh: Mesh, axes: tuple[int, ...]) -> tuple[Coordinate, ...]:
    """The members of the group at the first place on the other axes."""
    return tuple(itertools.product(*(range(size if axis in axes else 1) for axis, size in enumerate(mesh.shape))))


@lru_cache(maxsize=256)
def routed(group: tuple[Coordinate, ...], order: tuple[int | None, ...], fabric: Fabric) -> Schedule:
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


class Sent(torch.autograd.Function):
    """What a schedule gave; backward is the derivative of the same computation on the block."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, sent: Any, same: Any) -> torch.Tensor:
        ctx.save_for_backward(parts)
        ctx.same = same
        return sent(parts.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
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
