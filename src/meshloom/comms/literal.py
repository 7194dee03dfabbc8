"""Literal collectives: they act on what each device holds, whatever its placement says.

A group is the devices along some mesh axes; there is one for every place on the other axes. The result's shape and
placements follow from what was done: an all-reduce of shape (8, 4) placed S(0) on 4 devices gives shape (2, 4), R. A
device that holds fewer elements than the others counts the missing ones as what does not change the reduction. Where a
dim is cut by the group and by other axes, parts are taken with their padding, which is zero.

Three modes: `direct`, array operations on the block; `host`, every part read back, combined in a fixed order and
written to all; `fabric`, a schedule of sends between neighbours, step by step. One meaning: they are differentiable in
every mode, and a result that is replicated counts once in a loss. A `Call` is one collective on a stored array; its
methods give the topology and the stored array of the result, which `tensor.collectives` makes tensors of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from meshloom.collectives import KINDS, Collective
from meshloom.collectives.algorithms import algorithm as named
from meshloom.comms.deferred import sum_gradient
from meshloom.comms.group import WORLD, Group, group_of, members_of
from meshloom.comms.modes import DirectMode, FabricMode, HostMode
from meshloom.context import Event, state
from meshloom.engines.layout import fill, from_block, mask_of, pad, to_block, unpad
from meshloom.errors import ArgumentError, ModeError, closest, where
from meshloom.mesh import Mesh
from meshloom.placement import IDENTITY, PARTIAL_OPS, Partial, Placement, Replicate, Shard, Topology, can_be_partial
from meshloom.types import Shape

MODES = ("direct", "host", "fabric")
REPLICATE = Replicate()
Axis = str | Sequence[str] | None
Placed = tuple[Topology, torch.Tensor]  # a tensor as its topology and its stored array


class Operand:
    """A stored array as the members of the groups along some axes of its mesh hold it.

    `parts` is the block with the members first, in row-major order of the group's axes: shape (p, other mesh axes,
    local dims). A replicated axis repeats its value without a copy. Where processes split the mesh they are the members
    of this process; `group` knows the others. `data` is the stored array, or the block if it `is_block`.
    """

    __slots__ = ("axes", "data", "group", "is_block", "is_whole", "mesh", "size", "sizes", "topology")

    def __init__(self, topology: Topology, data: torch.Tensor, axis: Axis, is_block: bool = False) -> None:
        self.topology, self.data, self.is_block = topology, data, is_block
        self.mesh = topology.mesh
        self.axes, self.group, self.is_whole = _members(topology, tuple(axis) if isinstance(axis, list) else axis)
        self.sizes, self.size = self.group.sizes, self.group.size

    @property
    def name(self) -> str:
        """The axes as an event names them."""
        return ",".join(self.mesh.axes[a] for a in self.axes)

    def place(self, placement: Placement, shape: Shape) -> Topology:
        """A tensor of this shape placed so along the group, and as before on the other axes."""
        return _place(self.topology, self.axes, placement, shape)

    def held_shape(self) -> Shape:
        """The shape of what one member of each group holds, seen over the other axes."""
        return _held_shape(self.topology, self.axes)

    def others(self, dim: int) -> int:
        """How many places on the other axes cut a dim."""
        return _others(self.topology, self.axes, dim)

    def parts(self, missing: object = 0) -> torch.Tensor:
        """What each member holds; an element that some lack is `missing` there, one that all lack is zero."""
        topology, data = self.topology, self._with_summed_gradient() if self.group.crosses else self.data
        lacking = missing != 0 and [d for d in topology.padded_dims if any(a in self.axes for a in topology.axes_of[d])]
        if not lacking:
            return self._members_first(data if self.is_block else to_block(data, topology))
        data = from_block(data, topology) if self.is_block else data
        parts = self._members_first(to_block(fill(data, topology, missing, tuple(lacking)), topology))
        return torch.where(self._held_by_some(), parts, torch.zeros((), dtype=parts.dtype, device=parts.device))

    def _with_summed_gradient(self) -> torch.Tensor:
        """The array; what processes hold alike and use as parts of their own gets the sum of its gradients."""
        topology, data = self.topology, self.data
        if data.is_meta:
            return data
        alike = [axis for axis in self.axes if isinstance(topology.placements[axis], Replicate)]
        group = group_of(self.mesh, alike)
        return data if group is None else sum_gradient(data, group)

    def _members_first(self, block: torch.Tensor, sizes: Shape | None = None) -> torch.Tensor:
        count, held = len(self.axes), sizes or self.group.held
        front = block if self.is_whole else block.movedim(self.axes, tuple(range(count)))
        if front.shape[:count] != held:
            front = front.expand(*held, *front.shape[count:])
        return front.flatten(0, count - 1) if count > 1 else front

    def _held_by_some(self) -> torch.Tensor:
        """True where some member holds an element, in the shape of one part."""
        reduced = self.topology.reduced
        whole = Mesh.of(self.mesh.shape, self.mesh.axes) if self.mesh.is_split else self.mesh
        topology = Topology(whole, reduced.placements, reduced.shape, reduced.dtype)
        mask = mask_of(topology, self.data.device)
        assert mask is not None
        found = self._members_first(to_block(mask.expand(topology.stored_shape), topology), self.sizes).any(0)
        for place, axis in enumerate(self.other_axes):
            if axis in self.topology.partial_axes:  # the mask has size 1 where a partial tensor has the axis
                found = found.narrow(place, 0, 1)
            elif self.mesh.processes[axis] > 1 and not isinstance(reduced.placements[axis], Replicate):
                found = found.narrow(place, self.mesh.local_offset[axis], self.mesh.local_shape[axis])
        return found

    @property
    def other_axes(self) -> tuple[int, ...]:
        """The mesh axes that the group does not go over."""
        return tuple(axis for axis in range(self.mesh.ndim) if axis not in self.axes)

    def other_places(self) -> tuple[tuple[int, int], ...]:
        """For every other axis its size in a part, and where this process's begins; (1, 0) where it is replicated."""
        placements, start = self.topology.placements, self.mesh.local_offset
        alike = {axis for axis in self.other_axes if isinstance(placements[axis], Replicate)}
        return tuple((1, 0) if axis in alike else (self.mesh.shape[axis], start[axis]) for axis in self.other_axes)

    def same(self, part: torch.Tensor) -> torch.Tensor:
        """The block of which every member holds `part`."""
        for axis in self.axes:
            part = part.unsqueeze(axis)
        return part

    def each(self, parts: torch.Tensor) -> torch.Tensor:
        """The block of which member i holds `parts[i]`."""
        block = torch.unflatten(parts, 0, self.group.held)
        return block if self.is_whole else block.movedim(tuple(range(len(self.axes))), self.axes)


# What follows from a topology and the axes of a group alone: worked out once.


@lru_cache(maxsize=4096)
def _members(topology: Topology, axis: Axis) -> tuple[tuple[int, ...], Group, bool]:
    """The axes of a group, the group, and whether it is all of the mesh: its axes are then in front as they are."""
    axes = group_axes(topology.mesh, axis)
    return axes, members_of(topology.mesh, axes), len(axes) == topology.mesh.ndim


@lru_cache(maxsize=4096)
def _place(topology: Topology, axes: tuple[int, ...], placement: Placement, shape: Shape) -> Topology:
    placements = tuple(placement if a in axes else p for a, p in enumerate(topology.placements))
    return Topology(topology.mesh, placements, shape, topology.dtype)


@lru_cache(maxsize=4096)
def _held_shape(topology: Topology, axes: tuple[int, ...]) -> Shape:
    sizes = []
    for dim, size in enumerate(topology.shape):
        is_cut = any(a in axes for a in topology.axes_of[dim])
        sizes.append(topology.local_shape[dim] * _others(topology, axes, dim) if is_cut else size)
    return tuple(sizes)


@lru_cache(maxsize=4096)
def _others(topology: Topology, axes: tuple[int, ...], dim: int) -> int:
    return math.prod(topology.mesh.shape[a] for a in topology.axes_of[dim] if a not in axes)


def group_axes(mesh: Mesh, axis: Axis) -> tuple[int, ...]:
    """The positions of the axes that a collective goes over, in mesh order; None means the whole mesh."""
    if axis is None:
        return tuple(range(mesh.ndim))
    if not isinstance(axis, Sequence) or not all(isinstance(name, str) for name in axis):
        raise ArgumentError(f"axis takes names, not {axis!r}", mesh=mesh, fix=closest(axis, mesh.axes))
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    found = tuple(mesh.axis(name) for name in names)
    if len(set(found)) != len(found) or not found:
        raise ArgumentError(f"axis= names {list(names)}", mesh=mesh, fix="name each axis once, or leave it out for all")
    return tuple(sorted(found))


def check_mode(mode: str, op: str | None, topology: Topology) -> None:
    """An error unless there is such a mode, and such a reduction of the dtype."""
    if mode not in MODES:
        raise ModeError(f"there is no mode {mode!r}", fix=closest(mode, MODES))
    if op is not None and op not in PARTIAL_OPS:
        raise ArgumentError(f"there is no reduction {op!r}", fix=closest(op, PARTIAL_OPS))
    if op is not None and not can_be_partial(Partial(op), topology.dtype):
        fix = "use max for any, min for all, or cast first" if topology.dtype == "bool" else "cast to f32 first"
        raise ArgumentError(f"a {op} of {topology.dtype} has no meaning", fix=fix)


def check_member(operand: Operand, member: int, name: str) -> None:
    """An error unless the group has a member of that number."""
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < operand.size:
        raise ArgumentError(
            f"{name} {member!r} is not a member of a group of {operand.size}",
            mesh=operand.mesh,
            fix=f"members go from 0 to {operand.size - 1}, row-major over {operand.name}",
        )


class Call:
    """One collective call: its operand and its mode, checked and told to whoever watches.

    `grows` is how a member's part changes: "more" for what is gathered, "less" for what is scattered. `number` tells
    tensors apart when processes compare what they do.
    """

    def __init__(
        self,
        kind: str,
        topology: Topology,
        data: torch.Tensor,
        axis: Axis,
        mode: str,
        *,
        op: str = "sum",
        root: int = 0,
        grows: str = "",
        algorithm: str | None = None,
        precise: bool = False,
        number: int = 0,
        is_block: bool = False,
    ) -> None:
        self.kind, self.op, self.root = kind, op, root
        self.operand = Operand(topology, data, axis, is_block)
        if root != 0 or root.__class__ is not int:
            check_member(self.operand, root, "root")
        self.mode = self._mode(mode, algorithm, precise)
        if state.watching:
            self._tell(kind, mode, op if kind in REDUCING else None, grows)
        if self.operand.group.crosses and not data.is_meta:
            WORLD.watch.begin(f"{kind}({topology.notation}) over {self.operand.name}", topology.mesh)
            WORLD.story_of(topology.mesh.ranks).add(f"{kind} {number:x}")

    def _mode(self, mode: str, name: str | None, precise: bool) -> DirectMode:
        if name is not None:
            named(self.kind, name)  # an unknown one is refused in every mode
        group = self.operand.group
        if mode == "fabric":
            others = self.operand.other_places() if group.mesh.is_split else None
            return FabricMode(group, name, precise, others)
        return HostMode(group) if mode == "host" else DirectMode(group, precise)

    def _tell(self, kind: str, mode: str, op: str | None, grows: str) -> None:
        operand, topology = self.operand, self.operand.topology
        if operand.size == 1:
            return
        held = topology.local_bytes
        after = {"more": held * operand.size, "less": -(-held // operand.size)}.get(grows, held)
        size = KINDS[kind].size(held, after, operand.size)
        told = Collective(kind, operand.name, operand.size, size, topology.dtype, topology.local_shape, op)
        host = operand.size * (held + after) if mode == "host" else 0
        events = [Event(told, kind if mode == "direct" else f"{kind} ({mode})", where(), host=host)]
        state.check(events)
        state.log(events)

    def reduce_block(self) -> torch.Tensor:
        """Every member holds the reduction."""
        operand = self.operand
        return operand.same(self.mode.reduce(self.kind, operand.parts(IDENTITY[self.op]), self.op, self.root))

    def reduce(self) -> Placed:
        """`reduce_block` as a stored array."""
        return _place_block(self.reduce_block(), self.target())

    def target(self) -> Topology:
        """Where a reduction would lie."""
        return self.operand.place(REPLICATE, self.operand.held_shape())

    def reduce_into(self, out: torch.Tensor) -> None:
        """The reduction, written to a stored array of that topology."""
        operand = self.operand
        block = to_block(out, self.target()).squeeze(operand.axes)
        self.mode.reduce_into(block, self.kind, operand.parts(IDENTITY[self.op]), self.op, self.root)

    def gather_block(self, dim: int) -> torch.Tensor:
        """Every member holds what all of them hold, one after the other along a dim."""
        operand = self.operand
        parts = self.mode.gather(self.kind, operand.parts(), self.root)
        return operand.same(_join(operand, parts, dim, members=0))

    def gather(self, dim: int) -> Placed:
        """`gather_block` as a stored array."""
        operand, held = self.operand, self.operand.held_shape()
        target = operand.place(REPLICATE, held[:dim] + (_long(operand, dim),) + held[dim + 1 :])
        return _place_block(self.gather_block(dim), target)

    def scatter_block(self, dim: int) -> torch.Tensor:
        """Each member holds its chunk of the reduction, or of what the root holds."""
        operand = self.operand
        parts = operand.parts(0 if self.kind == "scatter" else IDENTITY[self.op])
        here = type(self.mode) is DirectMode and not operand.group.crosses
        if here and self.kind == "reduce_scatter":  # whole parts lie in one piece, the pieces for a member do not
            pieces = _pieces(operand, self.mode.reduce(self.kind, parts, self.op, self.root), dim, members=0)
        else:
            pieces = self.mode.scatter(self.kind, _pieces(operand, parts, dim), self.op, self.root)
        return operand.each(pieces)

    def scatter(self, dim: int) -> Placed:
        """`scatter_block` as a stored array."""
        operand, held, block = self.operand, self.operand.held_shape(), self.scatter_block(dim)
        shape = held[:dim] + (_wide(operand, block, dim),) + held[dim + 1 :]
        return _place_block(block, operand.place(Shard(dim), shape))

    def exchange(self, split: int, concat: int) -> Placed:
        """Each member cuts what it holds along one dim, sends a piece to each, and joins what it gets along another."""
        operand = self.operand
        arrived = self.mode.exchange(_pieces(operand, operand.parts(), split))
        joined = _join(operand, arrived, concat, members=1)
        shape = list(operand.held_shape())
        shape[split], shape[concat] = _wide(operand, joined, split), _long(operand, concat)
        return _place_block(operand.each(joined), operand.place(Shard(split), tuple(shape)))

    def broadcast(self) -> Placed:
        """Every member holds what the root holds."""
        return _place_block(self.operand.same(self.mode.broadcast(self.operand.parts(), self.root)), self.target())

    def at_root(self, found: Placed) -> Placed:
        """One member holds the value, the others zero; a bool is held as P(max)."""
        topology, data = found
        part = to_block(data, topology)
        for axis in reversed(self.operand.axes):
            part = part.squeeze(axis)
        kind = Partial("max" if topology.dtype == "bool" else "sum")
        alone = DirectMode(self.operand.group).at_root(part, self.root)
        return _place_block(self.operand.each(alone), self.operand.place(kind, topology.shape))

    def rearrange(self, order: Sequence[int | None]) -> Placed:
        """Each member's part replaced by another's."""
        found = self.operand.each(self.mode.rearrange(self.operand.parts(), order))
        return _place_block(found, self.operand.topology)


REDUCING = ("all_reduce", "reduce_scatter", "reduce")


def _place_block(block: torch.Tensor, topology: Topology) -> Placed:
    return topology, from_block(block, topology)


def _join(operand: Operand, parts: torch.Tensor, dim: int, members: int) -> torch.Tensor:
    """Parts (dim `members` of the array) laid end to end along a dim.

    Where the group alone cuts the dim, its parts without their padding are the dim; elsewhere all have one size.
    """
    topology = operand.topology
    place = parts.dim() - topology.ndim + dim - 1
    joined = parts.movedim(members, place).flatten(place, place + 1)
    if topology.axes_of[dim] != operand.axes:
        return joined
    return unpad(joined, place, topology.shape[dim], topology.shards[dim])


def _long(operand: Operand, dim: int) -> int:
    """How long a dim is once parts are joined along it."""
    topology = operand.topology
    if topology.axes_of[dim] != operand.axes:
        return topology.local_shape[dim] * operand.others(dim) * operand.size
    return topology.shape[dim]


def _pieces(operand: Operand, parts: torch.Tensor, dim: int, members: int = 1) -> torch.Tensor:
    """(p, ..., n, ...) to (p, p, ..., n / p, ...): what each member has for each; `members` is the new dim."""
    place = parts.dim() - operand.topology.ndim + dim
    padded = pad(parts, place, parts.shape[place], operand.sizes)
    pieces = torch.unflatten(padded, place, (operand.size, padded.shape[place] // operand.size))
    return pieces.movedim(place, members)


def _wide(operand: Operand, pieces: torch.Tensor, dim: int) -> int:
    """How long a dim is that was cut into pieces: where other axes cut it too, all pieces have one size."""
    topology = operand.topology
    if operand.others(dim) == 1:
        return topology.local_shape[dim]
    return pieces.shape[pieces.dim() - topology.ndim + dim] * operand.size * operand.others(dim)
