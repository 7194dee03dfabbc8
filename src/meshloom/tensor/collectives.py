"""Literal collectives on tensors: they act on what each device holds, whatever its placement says.

A group is the devices along some mesh axes; there is one for every place on the other axes. The result's shape and
placements follow from what was done: an all-reduce of shape (8, 4) placed S(0) on 4 devices gives shape (2, 4), R. A
device that holds fewer elements than the others counts the missing ones as what does not change the reduction. Where a
dim is cut by the group and by other axes, parts are taken with their padding, which is zero.

Three ways to carry each out: `direct`, array operations on the block; `host`, every part read back, combined in a fixed
order and written to all; `fabric`, a schedule of sends between neighbours, step by step. One meaning: they are
differentiable in every mode, and a result that is replicated counts once in a loss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.collectives import KINDS, Collective
from meshloom.engines.layout import fill, from_block, mask_of, pad, to_block, unpad
from meshloom.errors import ArgumentError, ShapeError, closest
from meshloom.mesh import Mesh
from meshloom.ops.labels import normal_dim
from meshloom.placement import PARTIAL_OPS, Partial, Placement, Replicate, Shard, Topology
from meshloom.runtime import Event, state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.functions import own
from meshloom.tensor.moving import shadowed
from meshloom.types import Shape

MODES = ("direct", "host", "fabric")
Axis = str | Sequence[str] | None

_IDENTITY: dict[str, Any] = {"sum": 0, "mean": 0, "max": "lowest", "min": "highest", "prod": 1}
_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
}


class HostTrafficWarning(UserWarning):
    """A collective went through the host."""


class Group:
    """The devices along some axes of a tensor's mesh, and what each of them holds.

    `parts` is the block with the members first, in row-major order of the group's axes: shape (p, other mesh axes,
    local dims). A replicated axis repeats its value without a copy.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        self.tensor = tensor
        self.mesh = tensor.mesh
        self.axes = group_axes(self.mesh, axis)
        self.sizes = tuple(self.mesh.shape[a] for a in self.axes)
        self.size = math.prod(self.sizes)

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
        """What each member holds, elements that a member lacks filled with `missing`."""
        topology, data = self.tensor.topology, self.tensor._data
        lacking = tuple(d for d in topology.padded_dims if any(a in self.axes for a in topology.axes_of[d]))
        if lacking and missing != 0:
            data = fill(data, topology, missing, lacking)
        return self._members_first(to_block(data, topology))

    def _members_first(self, block: torch.Tensor) -> torch.Tensor:
        count = len(self.axes)
        front = block.movedim(self.axes, tuple(range(count)))
        return front.expand(*self.sizes, *front.shape[count:]).flatten(0, count - 1)

    def nobody(self) -> torch.Tensor | None:
        """True where no member holds an element, in the shape of one part."""
        topology = self.tensor.topology.reduced
        mask = mask_of(topology, self.tensor._data.device)
        if mask is None:
            return None
        return ~self._members_first(to_block(mask.expand(topology.stored_shape), topology)).any(0)

    def same(self, part: torch.Tensor, shape: Shape) -> Tensor:
        """The tensor of which every member holds `part`."""
        for axis in self.axes:
            part = part.unsqueeze(axis)
        target = self.placed(Replicate(), shape)
        return Tensor(target, from_block(part, target))

    def each(self, parts: torch.Tensor, target: Topology) -> Tensor:
        """The tensor of which member i holds `parts[i]`; no axis of the group is replicated."""
        block = parts.unflatten(0, self.sizes).movedim(tuple(range(len(self.axes))), self.axes)
        return Tensor(target, from_block(block, target))


def group_axes(mesh: Mesh, axis: Axis) -> tuple[int, ...]:
    """The positions of the axes that a collective goes over, in mesh order; None means the whole mesh."""
    if axis is None:
        return tuple(range(mesh.ndim))
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    found = tuple(mesh.axis(name) for name in names)
    if len(set(found)) != len(found) or not found:
        raise ArgumentError(f"axis= names {list(names)}", mesh=mesh, fix="name each axis once, or leave it out for all")
    return tuple(sorted(found))


def _check(x: Any, mode: str, op: str = "sum") -> Tensor:
    tensor = own(x)
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"a collective takes a meshloom tensor, not {type(x).__name__}", fix="loom.distribute it")
    if mode not in MODES:
        raise ArgumentError(f"there is no mode {mode!r}", fix=closest(mode, MODES))
    if op not in PARTIAL_OPS:
        raise ArgumentError(f"there is no reduction {op!r}", fix=closest(op, PARTIAL_OPS))
    if op == "mean" and not tensor.is_floating_point():
        raise ArgumentError(f"a mean of {tensor.topology.dtype} has no meaning", fix="use sum, or cast to float")
    return shadowed(tensor)


def all_reduce(x: Any, axis: Axis = None, op: str = "sum", mode: str = "direct") -> Tensor:
    """Every member of each group holds the reduction of what its members hold.

    >>> import meshloom as loom
    >>> x = loom.arange(8, mesh=loom.open_mesh((4,), axes=("d",)), placements="S(0)")
    >>> all_reduce(x)
    Tensor i64[2](R) on Mesh(d=4)
    tensor([12, 16])
    """
    tensor = _check(x, mode, op)
    group = Group(tensor, axis)
    _tell(group, "all_reduce", mode, op)
    return _reduced(group, op, mode)


def _reduced(group: Group, op: str, mode: str) -> Tensor:
    if group.tensor.dtype == torch.bool and op in ("sum", "prod"):
        raise ArgumentError(f"a {op} of bool has no meaning", fix="use max for any, min for all")
    part = REDUCERS[mode](group, group.parts(_IDENTITY[op]), op)
    nobody = group.nobody()
    if nobody is not None:
        part = torch.where(nobody, torch.zeros((), dtype=part.dtype, device=part.device), part)
    return group.same(part, group.held_shape())


def all_gather(x: Any, dim: int, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Every member of each group holds what all of them hold, one after the other along `dim`.

    >>> import meshloom as loom
    >>> x = loom.arange(3, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_gather(x, 0)
    Tensor i64[3](R) on Mesh(d=2)
    tensor([0, 1, 2])
    """
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    place = _dim(tensor, dim)
    _tell(group, "all_gather", mode, grows=group.size)
    return _gathered(group, place, mode)


def _dim(tensor: Tensor, dim: int) -> int:
    if not tensor.topology.shape:
        raise ShapeError("a 0-d tensor has no dim to gather or cut along", tensor=tensor.topology, fix="unsqueeze it")
    return normal_dim(dim, tensor.ndim)


def _gathered(group: Group, dim: int, mode: str) -> Tensor:
    topology = group.tensor.topology
    parts = GATHERERS[mode](group, group.parts())
    place = parts.dim() - topology.ndim + dim
    joined = parts.movedim(0, place - 1).flatten(place - 1, place)
    held = group.held_shape()
    long = topology.local_shape[dim] * group.others(dim) * group.size
    made = group.same(joined, held[:dim] + (long,) + held[dim + 1 :])
    if topology.axes_of[dim] != group.axes:
        return made
    # the dim is cut by this group alone: its parts, laid end to end without their padding, are the dim
    lead = len(made.topology.partial_axes)
    data = unpad(made._data, lead + dim, topology.shape[dim], topology.shards[dim])
    return Tensor(group.placed(Replicate(), held[:dim] + (topology.shape[dim],) + held[dim + 1 :]), data)


def reduce_scatter(x: Any, dim: int, axis: Axis = None, op: str = "sum", mode: str = "direct") -> Tensor:
    """Each member holds its chunk, along `dim`, of the reduction of what the members hold."""
    tensor = _check(x, mode, op)
    group = Group(tensor, axis)
    place = _dim(tensor, dim)
    _tell(group, "reduce_scatter", mode, op)
    return _cut(_reduced(group, op, mode), group, place)


def _cut(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Each member keeps its chunk of what all hold; where other axes cut the dim too, chunks are of one size."""
    part = to_block(tensor._data, tensor.topology)
    for axis in reversed(group.axes):
        part = part.squeeze(axis)
    place = part.dim() - tensor.ndim + dim
    size = part.shape[place]
    padded = pad(part, place, size, group.sizes)
    length = padded.shape[place] // group.size
    pieces = padded.unflatten(place, (group.size, length)).movedim(place, 0)
    shape, others = tensor.topology.shape, group.others(dim)
    whole = size if others == 1 else length * group.size * others
    return group.each(pieces, group.placed(Shard(dim), shape[:dim] + (whole,) + shape[dim + 1 :]))


def all_to_all(x: Any, split_dim: int, concat_dim: int, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Each member cuts what it holds along `split_dim`, sends a piece to each, and joins what it gets.

    >>> import meshloom as loom
    >>> x = loom.ones(4, 6, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_to_all(x, 1, 0).topology.notation
    'f32[4, 6](S(1))'
    """
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    split, concat = _dim(tensor, split_dim), _dim(tensor, concat_dim)
    _tell(group, "all_to_all", mode)
    return _cut(_gathered(group, concat, mode), group, split)


def broadcast(x: Any, root: int = 0, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Every member of each group holds what its member number `root` holds."""
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    _check_member(group, root, "root")
    _tell(group, "broadcast", mode)
    return group.same(ROOTED[mode](group, group.parts(), root), group.held_shape())


def _check_member(group: Group, member: int, name: str) -> None:
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < group.size:
        raise ArgumentError(
            f"{name} {member!r} is not a member of a group of {group.size}",
            mesh=group.mesh,
            fix=f"members go from 0 to {group.size - 1}, row-major over {group.name}",
        )


def reduce(x: Any, root: int = 0, axis: Axis = None, op: str = "sum", mode: str = "direct") -> Tensor:
    """Member `root` of each group holds the reduction, the others hold zero: P(sum)."""
    tensor = _check(x, mode, op)
    group = Group(tensor, axis)
    _check_member(group, root, "root")
    _tell(group, "reduce", mode, op)
    return _at_root(_reduced(group, op, mode), group, root)


def gather(x: Any, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Member `root` of each group holds what all of them hold along `dim`, the others hold zero: P(sum)."""
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    _check_member(group, root, "root")
    place = _dim(tensor, dim)
    _tell(group, "gather", mode, grows=group.size)
    return _at_root(_gathered(group, place, mode), group, root)


def scatter(x: Any, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Each member holds its chunk, along `dim`, of what member `root` holds."""
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    _check_member(group, root, "root")
    place = _dim(tensor, dim)
    _tell(group, "scatter", mode, grows=1 / group.size)
    return _cut(group.same(ROOTED[mode](group, group.parts(), root), group.held_shape()), group, place)


def _at_root(tensor: Tensor, group: Group, root: int) -> Tensor:
    """One member holds the value, the others zero; a bool is held as P(max)."""
    kind = Partial("max" if tensor.topology.dtype == "bool" else "sum")
    part = to_block(tensor._data, tensor.topology)
    for axis in reversed(group.axes):
        part = part.squeeze(axis)
    zeros = part.new_zeros(part.shape)
    stacked = torch.stack([part if member == root else zeros for member in range(group.size)])
    return group.each(stacked, group.placed(kind, tensor.topology.shape))


def send_recv(x: Any, source: int, destination: int, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Member `destination` of each group holds what member `source` holds; the others keep what they have."""
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    _check_member(group, source, "source")
    _check_member(group, destination, "destination")
    order = list(range(group.size))
    order[destination] = source
    _tell(group, "send_recv", mode)
    return _rearranged(group, order)


def shift(x: Any, offset: int = 1, axis: Axis = None, wrap: bool = True, mode: str = "direct") -> Tensor:
    """Each member holds what the member `offset` places before it holds; without `wrap` the first ones hold zero."""
    tensor = _check(x, mode)
    group = Group(tensor, axis)
    order: list[int | None] = [member - offset for member in range(group.size)]
    order = [o % group.size if wrap and o is not None else o for o in order]
    order = [o if o is not None and 0 <= o < group.size else None for o in order]
    _tell(group, "shift", mode)
    return _rearranged(group, order)


def _rearranged(group: Group, order: Sequence[int | None]) -> Tensor:
    """Each member's part replaced by another's: the placements stay, so the parts must have room for each other."""
    tensor, topology = group.tensor, group.tensor.topology
    same = all(isinstance(topology.placements[a], Replicate) for a in group.axes)
    if same and None not in order:
        return Tensor(topology, tensor._data.clone())
    if any(isinstance(topology.placements[a], Replicate) and group.mesh.shape[a] > 1 for a in group.axes):
        raise ArgumentError(
            "members of the group would hold different values along a replicated axis, which no placement says",
            tensor=topology,
            fix="shard the tensor along the group, or leave the replicated axis out of it",
        )
    if any(any(a in group.axes for a in topology.axes_of[d]) for d in topology.padded_dims):
        raise ShapeError(
            "parts of different sizes cannot take each other's place", tensor=topology, fix="pad the dim to a multiple"
        )
    parts = group.parts()
    zero = parts.new_zeros(parts.shape[1:])
    return group.each(torch.stack([zero if o is None else parts[o] for o in order]), topology)


def barrier(mesh: Mesh) -> None:
    """Wait for every device; in one process they are always at the same line."""
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"barrier takes a mesh, not {type(mesh).__name__}")


# -- the three ways ---------------------------------------------------------------------------------------------------


def _host_parts(group: Group, parts: torch.Tensor) -> list[torch.Tensor]:
    """Every part read back, low precision widened."""
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    size = 2 * parts.numel() * parts.element_size()
    if not state.logs and size > 1 << 20:
        warnings.warn(f"a collective moves {size} B through the host", HostTrafficWarning, stacklevel=5)
    return [part.to(wide) for part in parts]


def _host_reduce(group: Group, parts: torch.Tensor, op: str) -> torch.Tensor:
    held = _host_parts(group, parts)
    total = held[0]
    for part in held[1:]:
        total = _PAIR[op](total, part)
    if op == "mean":
        total = total / len(held)
    return total.to(parts.dtype)


_PAIR: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}

REDUCERS: dict[str, Callable[[Group, torch.Tensor, str], torch.Tensor]] = {
    "direct": lambda group, parts, op: _REDUCE[op](parts),
    "host": _host_reduce,
}
GATHERERS: dict[str, Callable[[Group, torch.Tensor], torch.Tensor]] = {
    "direct": lambda group, parts: parts,
    "host": lambda group, parts: torch.stack(_host_parts(group, parts)).to(parts.dtype),
}
ROOTED: dict[str, Callable[[Group, torch.Tensor, int], torch.Tensor]] = {
    "direct": lambda group, parts, root: parts[root].clone(),
    "host": lambda group, parts, root: _host_parts(group, parts)[root].to(parts.dtype).clone(),
}


def _tell(group: Group, kind: str, mode: str, op: str | None = None, grows: float = 1) -> None:
    """Say what is communicated, to whoever watches; `grows` is how much more a member holds afterwards."""
    if not state.watching or group.size == 1:
        return
    topology = group.tensor.topology
    size = KINDS[kind].size(topology.local_bytes, int(topology.local_bytes * grows), group.size)
    told = Collective(kind, group.name, group.size, size, topology.dtype, topology.local_shape, op)
    events = [Event(told, kind if mode == "direct" else f"{kind} ({mode})", where())]
    state.check(events)
    state.log(events)
