"""Literal collectives on tensors: they act on what each device holds, whatever its placement says.

A group is the devices along some mesh axes; there is one for every place on the other axes. The result's shape and
placements follow from what was done: an all-reduce of shape (8, 4) placed S(0) on 4 devices gives shape (2, 4), R. A
device that holds fewer elements than the others counts the missing ones as what does not change the reduction. Where a
dim is cut by the group and by other axes, parts are taken with their padding, which is zero.

Three ways to carry each out: `direct`, array operations on the block; `host`, every part read back, combined in a fixed
order and written to all; `fabric`, a schedule of sends between neighbours, step by step. One meaning: they are
differentiable in every mode, and a result that is replicated counts once in a loss. Where the members of a group lie on
several processes each way has a counterpart that works together with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.backends import WORLD, wire
from meshloom.backends.checks import STORY
from meshloom.backends.leaves import entered
from meshloom.backends.members import members_of
from meshloom.backends.world import group_of
from meshloom.collectives import KINDS, Collective
from meshloom.collectives.algorithms import algorithm as named
from meshloom.engines.layout import fill, from_block, mask_of, pad, to_block, unpad
from meshloom.errors import ArgumentError, GradientError, ModeError, ShapeError, ViewError, closest
from meshloom.mesh import Mesh
from meshloom.ops.labels import normal_dim
from meshloom.placement import IDENTITY, PARTIAL_OPS, Partial, Placement, Replicate, Shard, Topology, can_be_partial
from meshloom.runtime import Event, state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.moving import same_storage, shadowed
from meshloom.tensor.views import moved_view
from meshloom.tensor.ways import Between, Direct, Host, HostBetween, LinksBetween, OverLinks
from meshloom.types import Shape

MODES = ("direct", "host", "fabric")
Axis = str | Sequence[str] | None


class Group:
    """The devices along some axes of a tensor's mesh, and what each of them holds.

    `parts` is the block with the members first, in row-major order of the group's axes: shape (p, other mesh axes,
    local dims). A replicated axis repeats its value without a copy. Where processes split the mesh they are the members
    of this process; `members` knows the others.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        self.tensor = tensor
        self.mesh = tensor.mesh
        self.axes = group_axes(self.mesh, axis)
        self.sizes = tuple(self.mesh.shape[a] for a in self.axes)
        self.size = math.prod(self.sizes)
        self.members = members_of(self.mesh, self.axes)

    @property
    def name(self) -> str:
        """The axes as an event names them."""
        return ",".join(self.mesh.axes[a] for a in self.axes)

    def placed(self, placement: Placement, shape: Shape) -> Topology:
        """A tensor of this shape placed so along the group, and as before on the other axes."""
        topology = self.tensor.topology
        placements = tuple(placement if a in self.axes else p for a, p in enumerate(topology.placements))
        return Topology(self.mesh, placements, shape, topology.dtype)

    def held_shape(self) -> Shape:
        """The shape of what one member of each group holds, seen over the other axes."""
        topology = self.tensor.topology
        return tuple(self._held(topology, dim) for dim in range(topology.ndim))

    def _held(self, topology: Topology, dim: int) -> int:
        axes = topology.axes_of[dim]
        if not any(a in self.axes for a in axes):
            return topology.shape[dim]
        return topology.local_shape[dim] * self.others(dim)

    def others(self, dim: int) -> int:
        """How many places on the other axes cut a dim."""
        axes = self.tensor.topology.axes_of[dim]
        return math.prod(self.mesh.shape[a] for a in axes if a not in self.axes)

    def parts(self, missing: Any = 0) -> torch.Tensor:
        """What each member holds; an element that some lack is `missing` there, one that all lack is zero."""
        topology, data = self.tensor.topology, self._entered()
        lacking = tuple(d for d in topology.padded_dims if any(a in self.axes for a in topology.axes_of[d]))
        if not lacking or missing == 0:
            return self._members_first(to_block(data, topology))
        parts = self._members_first(to_block(fill(data, topology, missing, lacking), topology))
        return torch.where(self._held_by_some(), parts, torch.zeros((), dtype=parts.dtype, device=parts.device))

    def _entered(self) -> torch.Tensor:
        """The array; what processes hold alike and use as parts of their own gets the sum of its gradients."""
        topology, data = self.tensor.topology, self.tensor._data
        if not self.members.crosses or data.is_meta:
            return data
        alike = [axis for axis in self.axes if isinstance(topology.placements[axis], Replicate)]
        group = group_of(self.mesh, alike)
        return data if group is None else entered(data, group)

    def _members_first(self, block: torch.Tensor, sizes: Shape | None = None) -> torch.Tensor:
        count = len(self.axes)
        front = block.movedim(self.axes, tuple(range(count)))
        return front.expand(*(sizes or self.members.held), *front.shape[count:]).flatten(0, count - 1)

    def _held_by_some(self) -> torch.Tensor:
        """True where some member holds an element, in the shape of one part."""
        reduced = self.tensor.topology.reduced
        topology = (
            reduced
            if not self.mesh.is_split
            else Topology(Mesh.of(self.mesh.shape, self.mesh.axes), reduced.placements, reduced.shape, reduced.dtype)
        )
        mask = mask_of(topology, self.tensor._data.device)
        assert mask is not None
        found = self._members_first(to_block(mask.expand(topology.stored_shape), topology), self.sizes).any(0)
        for place, axis in enumerate(self.other_axes):
            if axis in self.tensor.topology.partial_axes:  # the mask has size 1 where a partial tensor has the axis
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
        placements, start = self.tensor.placements, self.mesh.local_offset
        alike = {axis for axis in self.other_axes if isinstance(placements[axis], Replicate)}
        return tuple((1, 0) if axis in alike else (self.mesh.shape[axis], start[axis]) for axis in self.other_axes)

    def same(self, part: torch.Tensor, shape: Shape) -> Tensor:
        """The tensor of which every member holds `part`."""
        for axis in self.axes:
            part = part.unsqueeze(axis)
        target = self.placed(Replicate(), shape)
        return Tensor(target, from_block(part, target))

    def each(self, parts: torch.Tensor, target: Topology) -> Tensor:
        """The tensor of which member i holds `parts[i]`; no axis of the group is replicated."""
        block = parts.unflatten(0, self.members.held).movedim(tuple(range(len(self.axes))), self.axes)
        return Tensor(target, from_block(block, target))


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


def _tensor(x: Any) -> Tensor:
    tensor = x
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"a collective takes a meshloom tensor, not {type(x).__name__}", fix="loom.distribute it")
    return tensor


def _check(x: Any, mode: str, op: str | None) -> Tensor:
    tensor = _tensor(x)
    if mode not in MODES:
        raise ModeError(f"there is no mode {mode!r}", fix=closest(mode, MODES))
    if op is not None and op not in PARTIAL_OPS:
        raise ArgumentError(f"there is no reduction {op!r}", fix=closest(op, PARTIAL_OPS))
    if op is not None and not can_be_partial(Partial(op), tensor.topology.dtype):
        fix = "use max for any, min for all, or cast first" if tensor.topology.dtype == "bool" else "cast to f32 first"
        raise ArgumentError(f"a {op} of {tensor.topology.dtype} has no meaning", fix=fix)
    return shadowed(tensor)


class Call:
    """One collective call: its tensor, its group and its way, checked and told to whoever watches.

    `grows` is how a member's part changes: "more" for what is gathered, "less" for what is scattered.
    """

    def __init__(
        self,
        kind: str,
        x: Any,
        axis: Axis,
        mode: str,
        op: str | None = None,
        root: int = 0,
        grows: str = "",
        algorithm: str | None = None,
        precise: bool = False,
    ) -> None:
        self.tensor = _check(x, mode, op)
        self.group = Group(self.tensor, axis)
        check_member(self.group, root, "root")
        self.way = self._way(kind, mode, algorithm, precise)
        self._tell(kind, mode, op, grows)
        if self.group.members.crosses and not self.tensor._data.is_meta:
            WORLD.watch.begin(f"{kind}({self.tensor.topology.notation}) over {self.group.name}", self.tensor.mesh)
            STORY.add(f"{kind} {self.tensor._number:x}")

    def _way(self, kind: str, mode: str, name: str | None, precise: bool) -> Direct:
        if name is not None:
            named(kind, name)  # an unknown one is refused in every mode
        members = self.group.members
        if mode == "fabric" and members.mesh.is_split:
            return LinksBetween(members, name, precise, self.group.other_places())
        if mode == "fabric":
            return OverLinks(self.tensor.mesh, self.group.axes, name, precise)
        if members.crosses:
            return HostBetween(members) if mode == "host" else Between(members)
        return Host() if mode == "host" else Direct()

    def _tell(self, kind: str, mode: str, op: str | None, grows: str) -> None:
        group, topology = self.group, self.tensor.topology
        if not state.watching or group.size == 1:
            return
        held = topology.local_bytes
        after = {"more": held * group.size, "less": -(-held // group.size)}.get(grows, held)
        size = KINDS[kind].size(held, after, group.size)
        told = Collective(kind, group.name, group.size, size, topology.dtype, topology.local_shape, op)
        host = group.size * (held + after) if mode == "host" else 0
        events = [Event(told, kind if mode == "direct" else f"{kind} ({mode})", where(), host=host)]
        state.check(events)
        state.log(events)


def check_member(group: Group, member: int, name: str) -> None:
    """An error unless the group has a member of that number."""
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < group.size:
        raise ArgumentError(
            f"{name} {member!r} is not a member of a group of {group.size}",
            mesh=group.mesh,
            fix=f"members go from 0 to {group.size - 1}, row-major over {group.name}",
        )


def _dim(x: Any, dim: int) -> int:
    tensor = _tensor(x)
    if not tensor.topology.shape:
        raise ShapeError("a 0-d tensor has no dim to gather or cut along", tensor=tensor.topology, fix="unsqueeze it")
    return normal_dim(dim, tensor.ndim)


def all_reduce(
    x: Any,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Every member of each group holds the reduction of what its members hold.

    `algorithm` names a schedule for `mode="fabric"`; `precise` lets it add low precision in float32.
    `out` is a tensor with the shape and placements of the result, to be written.

    >>> import meshloom as loom
    >>> x = loom.arange(8, mesh=loom.open_mesh((4,), axes=("d",)), placements="S(0)")
    >>> all_reduce(x)
    Tensor i64[2](R) on Mesh(d=4)
    tensor([12, 16])
    """
    call = Call("all_reduce", x, axis, mode, str(op), algorithm=algorithm, precise=precise)
    return _reduced(call, "all_reduce", op, out=out)


def _reduced(call: Call, kind: str, op: str, root: int = 0, out: Tensor | None = None) -> Tensor:
    group, shape = call.group, call.group.held_shape()
    parts = group.parts(IDENTITY[op])
    if out is None:
        return group.same(call.way.reduce(kind, parts, op, root), shape)
    target = group.placed(Replicate(), shape)
    block = to_block(_room(out, target, call), target)
    call.way.reduce_into(block.squeeze(group.axes), kind, parts, op, root)
    return out


def _room(out: Any, target: Topology, call: Call) -> torch.Tensor:
    """The array of `out=`, if it is a tensor that holds just such a result and no gradient would be lost."""
    tensor = _tensor(out)
    if tensor.topology != target:
        raise ArgumentError(
            "out= is not placed as the result", out=tensor.topology, result=target, fix="loom.zeros one"
        )
    if torch.is_grad_enabled() and (call.tensor.requires_grad or tensor.requires_grad):
        raise GradientError("out= has no gradient", tensor=target, fix="leave out= away, or use torch.no_grad()")
    if (view := moved_view(tensor)) is not None:
        raise ViewError(
            "out= is a view that does not share its base's memory: making the view moved data",
            view=tensor.topology,
            base=view.base.topology,
            fix="give a tensor of its own, and write it to the base: base[...] = value",
        )
    room = shadowed(tensor)._data
    if same_storage(room, call.tensor._data):
        raise ArgumentError("out= shares memory with what is reduced or gathered", fix="give a tensor of its own")
    return room


def all_gather(
    x: Any,
    dim: int,
    axis: Axis = None,
    mode: str = "direct",
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
) -> Tensor:
    """Every member of each group holds what all of them hold, one after the other along `dim`.

    `out` is a tensor with the shape and placements of the result, to be written.

    >>> import meshloom as loom
    >>> x = loom.arange(3, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_gather(x, 0)
    Tensor i64[3](R) on Mesh(d=2)
    tensor([0, 1, 2])
    """
    place = _dim(x, dim)
    call = Call("all_gather", x, axis, mode, grows="more", algorithm=algorithm)
    found = _gathered(call, "all_gather", place)
    if out is None:
        return _apart(found, call)
    _room(out, found.topology, call).copy_(found._data)
    return out


def _apart(found: Tensor, call: Call) -> Tensor:
    """A result that shares no memory with the operand: writing to the one leaves the other as it is."""
    shared = same_storage(found._data, call.tensor._data)
    return Tensor(found.topology, found._data.clone()) if shared else found


def _gathered(call: Call, kind: str, dim: int, root: int = 0) -> Tensor:
    group, held = call.group, call.group.held_shape()
    parts = call.way.gather(kind, group.parts(), root)
    joined, long = _joined(group, parts, dim, members=0)
    return group.same(joined, held[:dim] + (long,) + held[dim + 1 :])


def _joined(group: Group, parts: torch.Tensor, dim: int, members: int) -> tuple[torch.Tensor, int]:
    """Parts (dim `members` of the array) laid end to end along a dim, and how long the dim is then.

    Where the group alone cuts the dim, its parts without their padding are the dim; elsewhere all have one size.
    """
    topology = group.tensor.topology
    place = parts.dim() - topology.ndim + dim - 1
    joined = parts.movedim(members, place).flatten(place, place + 1)
    if topology.axes_of[dim] != group.axes:
        return joined, topology.local_shape[dim] * group.others(dim) * group.size
    return unpad(joined, place, topology.shape[dim], topology.shards[dim]), topology.shape[dim]


def reduce_scatter(
    x: Any,
    dim: int,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Each member holds its chunk, along `dim`, of the reduction of what the members hold.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="R")
    >>> reduce_scatter(x, 0)
    Tensor f32[4](S(0)) on Mesh(d=2)
    tensor([2., 2., 2., 2.])
    """
    place = _dim(x, dim)
    call = Call("reduce_scatter", x, axis, mode, str(op), algorithm=algorithm, precise=precise)
    pieces = _pieces(call.group, call.group.parts(IDENTITY[op]), place)
    return _scattered(call, call.way.scatter("reduce_scatter", pieces, op, 0), place)


def scatter(
    x: Any, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Each member holds its chunk, along `dim`, of what member `root` holds."""
    place = _dim(x, dim)
    call = Call("scatter", x, axis, mode, root=root, grows="less", algorithm=algorithm)
    pieces = _pieces(call.group, call.group.parts(), place)
    return _scattered(call, call.way.scatter("scatter", pieces, "sum", root), place)


def _pieces(group: Group, parts: torch.Tensor, dim: int) -> torch.Tensor:
    """(p, ..., n, ...) to (p, p, ..., n / p, ...): what each member has for each."""
    place = parts.dim() - group.tensor.ndim + dim
    padded = pad(parts, place, parts.shape[place], group.sizes)
    return padded.unflatten(place, (group.size, padded.shape[place] // group.size)).movedim(place, 1)


def _scattered(call: Call, pieces: torch.Tensor, dim: int) -> Tensor:
    held = call.group.held_shape()
    return call.group.each(
        pieces, call.group.placed(Shard(dim), held[:dim] + (_wide(call, pieces, dim),) + held[dim + 1 :])
    )


def _wide(call: Call, pieces: torch.Tensor, dim: int) -> int:
    """How long a dim is that was cut into pieces: where other axes cut it too, all pieces have one size."""
    group, topology = call.group, call.tensor.topology
    if group.others(dim) == 1:
        return topology.local_shape[dim]
    return pieces.shape[pieces.dim() - topology.ndim + dim] * group.size * group.others(dim)


def all_to_all(
    x: Any, split_dim: int, concat_dim: int, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Each member cuts what it holds along `split_dim`, sends a piece to each, and joins what it gets.

    >>> import meshloom as loom
    >>> x = loom.ones(4, 6, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_to_all(x, 1, 0).topology.notation
    'f32[4, 6](S(1))'
    """
    split, concat = _dim(x, split_dim), _dim(x, concat_dim)
    if split == concat:
        raise ArgumentError(
            f"split_dim and concat_dim are both {split}",
            fix="use two dims; all_gather and reduce_scatter act along one",
        )
    call = Call("all_to_all", x, axis, mode, algorithm=algorithm)
    arrived = call.way.exchange(_pieces(call.group, call.group.parts(), split))
    joined, long = _joined(call.group, arrived, concat, members=1)
    shape = list(call.group.held_shape())
    shape[split], shape[concat] = _wide(call, joined, split), long
    return _apart(call.group.each(joined, call.group.placed(Shard(split), tuple(shape))), call)


def broadcast(
    x: Any, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Every member of each group holds what its member number `root` holds.

    >>> import meshloom as loom
    >>> x = loom.arange(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> broadcast(x, root=1).to_torch()
    tensor([2, 3])
    """
    call = Call("broadcast", x, axis, mode, root=root, algorithm=algorithm)
    return call.group.same(call.way.broadcast(call.group.parts(), root), call.group.held_shape())


def reduce(
    x: Any,
    root: int = 0,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Member `root` of each group holds the reduction, the others hold zero: P(sum)."""
    call = Call("reduce", x, axis, mode, str(op), root, algorithm=algorithm, precise=precise)
    return _at_root(_reduced(call, "reduce", op, root), call.group, root)


def gather(
    x: Any, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Member `root` of each group holds what all of them hold along `dim`, the others hold zero: P(sum)."""
    place = _dim(x, dim)
    call = Call("gather", x, axis, mode, root=root, grows="more", algorithm=algorithm)
    return _at_root(_gathered(call, "gather", place, root), call.group, root)


def _at_root(tensor: Tensor, group: Group, root: int) -> Tensor:
    """One member holds the value, the others zero; a bool is held as P(max)."""
    kind = Partial("max" if tensor.topology.dtype == "bool" else "sum")
    part = to_block(tensor._data, tensor.topology)
    for axis in reversed(group.axes):
        part = part.squeeze(axis)
    return group.each(_alone(part, group, root), group.placed(kind, tensor.topology.shape))


def _alone(part: torch.Tensor, group: Group, root: int) -> torch.Tensor:
    if group.members.crosses:
        return group.members.at_root(part, root)
    zeros = part.new_zeros(part.shape)
    return torch.stack([part if member == root else zeros for member in range(group.size)])


def send_recv(x: Any, source: int, destination: int, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Member `destination` of each group holds what member `source` holds; the others keep what they have.

    >>> import meshloom as loom
    >>> x = loom.arange(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> send_recv(x, 0, 1).to_torch()
    tensor([0, 1, 0, 1])
    """
    group = Group(_check(x, mode, None), axis)
    check_member(group, source, "source")
    check_member(group, destination, "destination")
    order = [source if member == destination else member for member in range(group.size)]
    return _rearranged("send_recv", x, axis, mode, order)


def shift(x: Any, offset: int = 1, axis: Axis = None, wrap: bool = True, mode: str = "direct") -> Tensor:
    """Each member holds what the member `offset` places before it holds; without `wrap` the first ones hold zero.

    >>> import meshloom as loom
    >>> x = loom.arange(3, mesh=loom.open_mesh((3,), axes=("d",)), placements="S(0)")
    >>> shift(x).to_torch()
    tensor([2, 0, 1])
    """
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ArgumentError(f"shift takes a whole number of places, not {offset!r}")
    size = Group(_check(x, mode, None), axis).size
    order = [(member - offset) % size if wrap else member - offset for member in range(size)]
    return _rearranged("shift", x, axis, mode, [o if 0 <= o < size else None for o in order])


def _rearranged(kind: str, x: Any, axis: Axis, mode: str, order: Sequence[int | None]) -> Tensor:
    """Each member's part replaced by another's: the placements stay, so the parts must have room for each other."""
    group = Group(_check(x, mode, None), axis)
    topology = group.tensor.topology
    along = [a for a in group.axes if group.mesh.shape[a] > 1]
    same = all(isinstance(topology.placements[a], Replicate) for a in along)
    if not same or None in order:
        if any(isinstance(topology.placements[a], Replicate) for a in along):
            raise ArgumentError(
                "members of the group would hold different values along a replicated axis, which no placement says",
                tensor=topology,
                fix="shard the tensor along the group, or leave the replicated axis out of it",
            )
        if any(a in group.axes for d in topology.padded_dims for a in topology.axes_of[d]):
            raise ShapeError(
                "parts of different sizes cannot take each other's place",
                tensor=topology,
                fix="pad the dim to a multiple of the devices",
            )
    call = Call(kind, x, axis, mode)
    if same:  # or a group of one
        held = call.tensor._data
        return Tensor(topology, held.clone() if None not in order else torch.zeros_like(held))
    return call.group.each(call.way.rearrange(call.group.parts(), order), topology)


def barrier(mesh: Mesh) -> None:
    """Wait for every device: for every process that holds some; those of one process are always at the same line."""
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"barrier takes a mesh, not {type(mesh).__name__}")
    group = group_of(mesh, range(mesh.ndim)) if state.shadows is None else None
    if group is not None:
        WORLD.watch.begin("barrier()", mesh)
        wire.all_reduce(torch.zeros(1), group, own=True)
