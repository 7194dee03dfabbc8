"""Movement of a tensor between topologies: within the process by array operations, between processes by one collective
per step.

The path is the planner's, which `explain` and `record` report. A step changes one mesh axis. Where the axis stays in
the process, `engines.layout` does it on what the process holds; where all of them do, it composes the path into few
array calls. Where an axis crosses processes, its local part is an array operation and the rest is one collective, so
that each byte crosses once. Sums over several axes are reduced together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

import torch

from meshloom.comms.copying import copy
from meshloom.comms.gradients import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Slice,
    SumGradient,
    combine,
)
from meshloom.comms.group import WORLD, Group, group_of
from meshloom.engines import layout
from meshloom.engines.layout import Step
from meshloom.engines.reductions import REDUCTIONS, total
from meshloom.fabric import VIRTUAL, Machine
from meshloom.mesh import Mesh
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology
from meshloom.planner import settle, stations


def move(
    data: torch.Tensor, source: Topology, target: Topology, machine: Machine = VIRTUAL, call: str = "redistribute"
) -> torch.Tensor:
    """The stored array of `source` laid out as `target` wants it, wherever its parts are, on its mesh or another."""
    step = _known_mover(source, target, machine)
    if step is _to_another_mesh:
        return _move_between(data, source, target, machine, call)
    if source.mesh.is_split and WORLD.watch is not None:
        WORLD.watch.begin(f"{call}({source.notation})", source.mesh)
    return data if step is None else step(data)


def _move_between(data: torch.Tensor, source: Topology, target: Topology, machine: Machine, call: str) -> torch.Tensor:
    """To another mesh: settled on the one, copied, and on the other made partial if it should be."""
    there = settle(source, machine)
    data = move(data, source, there, machine, call)
    if WORLD.watch is not None:
        WORLD.watch.begin(f"{call}({source.notation})", source.mesh)
    return move(copy(data, there, target.reduced), target.reduced, target, machine, call)


@lru_cache(maxsize=4096)
def _known_mover(source: Topology, target: Topology, machine: Machine) -> Step | None:
    return mover(source, target, machine) if source.mesh == target.mesh else _to_another_mesh


def _to_another_mesh(data: torch.Tensor) -> torch.Tensor:
    """The mark of a move between meshes, which `_move_between` makes."""
    raise NotImplementedError


def mover(
    source: Topology, target: Topology, machine: Machine, merged: tuple[int, ...] = (), own: bool = False
) -> Step | None:
    """`move`, worked out beforehand; None where nothing is to be done.

    On `merged` axes the source is partial between processes only: what is local has been summed already, and the array
    has no dim for the axis. `own` says that the array is nobody else's and may be written to.
    """
    if not source.mesh.is_split:
        return layout.mover(source, target, machine)
    steps = _steps(source, target, machine, merged, own)
    if not steps:
        return None
    if len(steps) == 1:
        return steps[0]

    return partial(walk, steps)


def walk(steps: Iterable[Step], data: torch.Tensor) -> torch.Tensor:
    """An array after one step and the next."""
    for step in steps:
        data = step(data)
    return data


def gathering_steps(source: Topology, target: Topology, machine: Machine) -> list[Step] | None:
    """The steps of `mover` where the first one gathers, as do all others that cross processes; else None."""
    if not source.mesh.is_split or source.partial_axes:
        return None
    changed = [axis for axis, (p, q) in enumerate(_pairs(source, target)) if p != q]
    crossing = [axis for axis in changed if source.mesh.processes[axis] > 1]
    is_straight = len(stations(source, target.placements, machine)) == len(changed) + 1
    if not crossing or not is_straight or any(isinstance(target.placements[axis], Shard) for axis in crossing):
        return None
    steps = _steps(source, target, machine, (), False)
    return steps if isinstance(steps[0], Gather) else None


def _pairs(source: Topology, target: Topology) -> Iterable[tuple[Placement, Placement]]:
    return zip(source.placements, target.placements, strict=True)


def _steps(source: Topology, target: Topology, machine: Machine, merged: tuple[int, ...], own: bool) -> list[Step]:
    way = stations(source, target.placements, machine)
    here, together = source, _axes_summed_together(way, merged, source.mesh)
    left = [axis for axis in source.partial_axes if axis not in together or axis not in merged]
    steps = [_lead(left.index(axis), _count_added(source, target, axis)) for axis in left if axis in merged]
    if together:
        here = _with(source, dict.fromkeys(together, Replicate()))
        dims = tuple(place for place, axis in enumerate(left) if axis in together)
        steps.append(_sum(group_of(source.mesh, together), dims, own))
    for before, after in itertools.pairwise(way):
        axis = next(a for a, (p, q) in enumerate(zip(before, after, strict=True)) if p != q)
        there = _with(here, {axis: after[axis]})
        if there is here:
            continue
        step = _step(here, there, axis)
        if step is not None:
            steps.append(step)
        here = there
    return steps


def _with(topology: Topology, changed: dict[int, Placement]) -> Topology:
    return topology.with_placements(tuple(changed.get(axis, p) for axis, p in enumerate(topology.placements)))


def _axes_summed_together(way: Sequence[tuple[Placement, ...]], merged: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The axes whose sums become replicated: one all-reduce for all of them."""
    found = []
    for axis in range(mesh.ndim):
        line = [placements[axis] for placements in way]
        following = next((p for p in line if p != line[0]), None)
        crossing = mesh.processes[axis] > 1
        if line[0] == Partial("sum") and isinstance(following, Replicate) and (crossing or axis in merged):
            found.append(axis)
    return tuple(found)


def _lead(place: int, added: int) -> Step:
    """A merged axis that does not go at once gets a dim of its own: the first device has the value, others add none."""

    def run(data: torch.Tensor) -> torch.Tensor:
        data = data.unsqueeze(place)
        return torch.constant_pad_nd(data, [0, 0] * (data.dim() - place - 1) + [0, added], -0.0) if added else data

    return run


def _count_added(source: Topology, target: Topology, axis: int) -> int:
    """How many devices of the box beside the first one hold a part of a merged axis that stays a sum."""
    stays = source.placements[axis] == target.placements[axis] == Partial("sum")
    return source.mesh.local_shape[axis] - 1 if stays else 0


def _sum(group: Group | None, dims: tuple[int, ...], own: bool) -> Step:
    def run(data: torch.Tensor) -> torch.Tensor:
        local = data
        for place in reversed(dims):
            local = total(local, place)
        return local if group is None else AllReduce.apply(local, group, own or bool(dims))

    return run


def _step(before: Topology, after: Topology, axis: int) -> Step | None:
    now, wanted = before.placements[axis], after.placements[axis]
    group = group_of(before.mesh, (axis,))
    if group is None:
        made = layout.mover(before.held, after.held)
        if wanted != Partial("prod") or made is None:
            return made
        return lambda data: layout.fill(made(data), after, 0)  # ones; padding of the box is known to the whole alone
    if isinstance(now, Partial):
        reduce, finish = _local_part(before, axis, now.op), _reduction(after, now.op, wanted, group)
        return lambda data: finish(reduce(data))
    if isinstance(now, Replicate):
        if isinstance(wanted, Shard):
            return _into_shards(after, wanted.dim, group)
        return _split_up(before, after, axis, group)
    assert isinstance(now, Shard)
    if isinstance(wanted, Replicate):
        return Gather(before, now.dim, group)
    assert isinstance(wanted, Shard)
    return _exchange(before, after, now.dim, wanted.dim, group)


def _local_part(before: Topology, axis: int, op: str) -> Step:
    place = before.partial_axes.index(axis)
    if before.mesh.local_shape[axis] == 1:  # one part: what crosses the processes next makes memory of its own
        return lambda data: data.squeeze(place)
    return lambda data: REDUCTIONS[op].along(data, place)


def _reduction(after: Topology, op: str, wanted: Placement, group: Group) -> Step:
    if isinstance(wanted, Replicate):
        return (lambda data: AllReduce.apply(data, group)) if op == "sum" else lambda data: combine(data, group, op)
    assert isinstance(wanted, Shard)
    if op != "sum":
        slices = _into_shards(after, wanted.dim, group)
        return lambda data: slices(combine(data, group, op))
    cut = Pieces(after, wanted.dim, group)
    return lambda data: cut.merge(ReduceScatter.apply(cut.apart(data), group))


def _into_shards(after: Topology, dim: int, group: Group) -> Step:
    cut = Pieces(after, dim, group)

    def run(data: torch.Tensor) -> torch.Tensor:
        pieces = cut.apart(data)
        if torch.is_grad_enabled() and data.requires_grad:
            return cut.merge(Slice.apply(pieces, group))
        return cut.merge(pieces[group.index]).contiguous()

    return run


def _exchange(before: Topology, after: Topology, here: int, there: int, group: Group) -> Step:
    source, target = Pieces(before, here, group), Pieces(after, there, group)
    return lambda data: source.whole(target.merge(AllToAll.apply(target.apart(data), group), 1))


def _split_up(before: Topology, after: Topology, axis: int, group: Group) -> Step:
    """R->P: the first coordinate keeps the value, the others hold what does not change it."""
    placement = after.placements[axis]
    assert isinstance(placement, Partial)
    made = layout.mover(before.held, after.held)
    neutral = REDUCTIONS[placement.op].neutral

    def run(data: torch.Tensor) -> torch.Tensor:
        data = SumGradient.apply(data, group)
        if neutral is not None and group.index:
            data = torch.where(data.new_zeros((), dtype=torch.bool), data, neutral(data))
        return layout.fill(data if made is None else made(data), after, 0)

    return run


class Gather:
    """The shards of all processes of a group as one value; of two axes that shard a dim the inner one is first."""

    __slots__ = ("axis", "cut", "group", "source")

    def __init__(self, sharded: Topology, dim: int, group: Group) -> None:
        self.source, self.group, self.axis = sharded, group, sharded.axes_of[dim][-1]
        self.cut = Pieces(sharded, dim, group)

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return self.cut.whole(AllGather.apply(data, self.group))


class Pieces:
    """How the processes of a group cut a dim, of which their axis is the innermost.

    In the array of one process the dim is (outer boxes, own box, chunk), merged. `whole` is what the outer axes alone
    leave: (outer boxes, size).
    """

    def __init__(self, sharded: Topology, dim: int, group: Group) -> None:
        mesh, axes = sharded.mesh, sharded.axes_of[dim]
        self.place = len(sharded.partial_axes) + dim
        self.group = group
        self.outer = math.prod(mesh.local_shape[axis] for axis in axes[:-1])
        self.own = mesh.local_shape[axes[-1]] * sharded.local_shape[dim]
        self.size = _with(sharded, {axes[-1]: Replicate()}).local_shape[dim]

    def apart(self, data: torch.Tensor) -> torch.Tensor:
        """The whole dim as pieces for the processes, which lead: (processes, ..., own piece, ...)."""
        place, full = self.place, self.group.processes * self.own
        data = data.unflatten(place, (self.outer, self.size)) if self.outer != 1 else data.unsqueeze(place)
        if full != self.size:
            data = torch.constant_pad_nd(data, [0, 0] * (data.dim() - place - 2) + [0, full - self.size])
        pieces: torch.Tensor = data.unflatten(place + 1, (self.group.processes, self.own))
        return pieces.movedim(place + 1, 0)

    def merge(self, piece: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """A piece (..., outer boxes, own piece, ...) with its dim merged."""
        return piece.flatten(self.place + shift, self.place + shift + 1)

    def whole(self, pieces: torch.Tensor) -> torch.Tensor:
        """Pieces of every process, which lead, as the whole dim."""
        place = self.place
        if self.outer == 1:
            joined = pieces.movedim(0, place).flatten(place, place + 1)
            return joined if joined.shape[place] == self.size else joined.narrow(place, 0, self.size)
        split: torch.Tensor = pieces.unflatten(place + 1, (self.outer, self.own)).movedim(0, place + 1)
        return split.flatten(place + 1, place + 2).narrow(place + 1, 0, self.size).flatten(place, place + 1)
