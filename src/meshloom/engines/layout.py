"""Between layouts of one tensor: stored array and block, padding and no padding, partial and reduced.

The stored array has the partial axes first and then the dims, each with its padding (see `placement.topology`). All of
this is plain torch, so autograd goes through it by itself: the backward of a pad is a slice, of a slice a pad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from meshloom.engines.reductions import REDUCTIONS, nothing_like, number
from meshloom.errors import NotationError, closest
from meshloom.fabric import VIRTUAL, Machine
from meshloom.placement import Partial, Replicate, Topology, extents
from meshloom.planner import stations
from meshloom.types import LONG_NAME, Shape, numel, short_dtype

Step = Callable[[torch.Tensor], torch.Tensor]


def torch_dtype(short: str) -> torch.dtype:
    """torch's dtype for a short name, or for torch's own."""
    found = getattr(torch, LONG_NAME.get(short, short), None)
    if not isinstance(found, torch.dtype):
        raise NotationError(f"{short!r} is not a dtype", fix=closest(short, LONG_NAME.values()))
    return found


@lru_cache(maxsize=256)
def short_name(dtype: torch.dtype) -> str:
    """The short name of torch's dtype."""
    return short_dtype(str(dtype))


def view_bytes(data: torch.Tensor) -> torch.Tensor:
    """The bytes of an array: its own memory where its elements lie in order, else a copy's.

    One element of any stride is contiguous to torch, which yet refuses to view it so.

    >>> view_bytes(torch.arange(4, dtype=torch.int16)[::3][1:])
    tensor([3, 0], dtype=torch.uint8)
    """
    return data.detach().contiguous().as_strided((data.numel(),), (1,)).view(torch.uint8)


def empty_stored(topology: Topology) -> torch.Tensor:
    """Memory for what this process holds, `meta` if nothing; its padding is zero, the rest is to be filled."""
    if topology.mesh.is_elsewhere:
        return torch.empty(topology.stored_shape, dtype=torch_dtype(topology.dtype), device="meta")
    held = sum(extent.count for extent in extents(topology))
    make = torch.empty if held == numel(topology.stored_shape) else torch.zeros
    return make(topology.stored_shape, dtype=torch_dtype(topology.dtype))


def _levels(size: int, shards: Shape) -> list[int]:
    """The chunk size after each mesh axis: 10 over (2, 4) is [10, 5, 2]."""
    sizes = [size]
    for parts in shards:
        sizes.append(-(-sizes[-1] // parts))
    return sizes


@lru_cache(maxsize=4096)
def is_padded(size: int, shards: Shape) -> bool:
    """Whether chunks of a dim carry padding."""
    return _levels(size, shards)[-1] * math.prod(shards) != size


def pad(data: torch.Tensor, dim: int, size: int, shards: Shape) -> torch.Tensor:
    """Dense to stored along one dim: pad and split per mesh axis, then merge. 10 over (2, 4) is stored as 16."""
    if not is_padded(size, shards):
        return data
    sizes = _levels(size, shards)
    if len(shards) == 1:  # padding at the end only: one call, and half the time of cat
        return torch.constant_pad_nd(data, [0, 0] * (data.dim() - dim - 1) + [0, shards[0] * sizes[1] - size])
    for level, parts in enumerate(shards):
        missing = parts * sizes[level + 1] - sizes[level]
        if missing:
            shape = list(data.shape)
            shape[dim + level] = missing
            data = torch.cat([data, data.new_zeros(shape)], dim + level)
        data = data.unflatten(dim + level, (parts, sizes[level + 1]))
    return data.flatten(dim, dim + len(shards))


def unpad(data: torch.Tensor, dim: int, size: int, shards: Shape) -> torch.Tensor:
    """Stored to dense along one dim; the inverse of `pad`."""
    if not is_padded(size, shards):
        return data
    if len(shards) == 1:
        return data.narrow(dim, 0, size)
    sizes = _levels(size, shards)
    data = data.unflatten(dim, (*shards, sizes[-1]))
    for level in reversed(range(len(shards))):
        data = data.flatten(dim + level, dim + level + 1).narrow(dim + level, 0, sizes[level])
    return data


@lru_cache(maxsize=4096)
@torch.inference_mode(False)  # it is kept, and autograd saves nothing that was made in that mode
def _valid(topology: Topology, dims: tuple[int, ...], device: str) -> torch.Tensor | None:
    """True where the stored array holds an element along these dims; None where all of it does."""
    mask: torch.Tensor | None = None
    for dim in dims:
        if dim in topology.padded_dims:
            line = pad(torch.ones(topology.shape[dim], dtype=torch.bool), 0, topology.shape[dim], topology.shards[dim])
            line = box(line, topology, dim, 0).view((-1,) + (1,) * (topology.ndim - dim - 1))
            mask = line if mask is None else mask & line
    return None if mask is None else mask.to(device)


@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def padding_of(topology: Topology, device: torch.device) -> torch.Tensor | None:
    """True where the stored array holds padding, broadcastable to it; None where it has none.

    It is worked out from nothing: of a mask from before, a capture would only write down that it is to be inverted.
    """
    mask = _valid.__wrapped__(topology, topology.padded_dims, str(device))
    return None if mask is None else ~mask


def leads_nowhere(data: torch.Tensor) -> bool:
    """Whether torch calls an array tracked to which no gradient leads: a view, made without them, of one with them."""
    if not (data.requires_grad and data._is_view()):
        return False
    try:
        return data.grad_fn is None
    except RuntimeError:  # torch tells nothing of one that was written since it was made
        if torch.is_grad_enabled():
            raise
        return True


def tracked_nowhere(data: torch.Tensor) -> torch.Tensor:
    """The array as one that torch calls tracked and to which no gradient leads."""
    with torch.no_grad():
        return data.detach().requires_grad_().view_as(data)


def apply(step: Step, data: torch.Tensor) -> torch.Tensor:
    """A step on an array; what led nowhere still does, and has no node that torch would keep operands for."""
    if not leads_nowhere(data):
        return step(data)
    with torch.no_grad():
        return tracked_nowhere(step(data))


def box(data: torch.Tensor, topology: Topology, dim: int, place: int, rank: int | None = None) -> torch.Tensor:
    """Of an array that is stored whole along a dim (at `place`), what this process holds, or that of another rank."""
    mesh, axes = topology.mesh, topology.axes_of[dim]
    if not topology.crosses(dim):
        return data
    data = data.unflatten(place, (*(mesh.shape[axis] for axis in axes), topology.local_shape[dim]))
    for i, axis in enumerate(axes):
        data = data.narrow(place + i, mesh.offset_of(rank)[axis], mesh.local_shape[axis])
    return data.flatten(place, place + len(axes))


def mask_of(topology: Topology, device: torch.device, dims: tuple[int, ...] | None = None) -> torch.Tensor | None:
    """True where the stored array holds an element, broadcastable to it."""
    return _valid(topology, topology.padded_dims if dims is None else dims, str(device))


def fill(data: torch.Tensor, topology: Topology, value: object, dims: tuple[int, ...] | None = None) -> torch.Tensor:
    """The array with its padding (along some dims) set to a value."""
    mask = mask_of(topology, data.device, dims)
    if mask is None:
        return data
    if value in (math.inf, -math.inf) and not (data.is_floating_point() or data.is_complex()):
        value = "lowest" if value < 0 else "highest"
    return torch.where(mask, data, torch.as_tensor(number(value, data.dtype), dtype=data.dtype, device=data.device))


def mover(source: Topology, target: Topology, machine: Machine = VIRTUAL) -> Step | None:
    """The planner's path between two topologies, composed: None where it does nothing, one call where it can be.

    Its reductions come in the order of the path. Chunks are cut once, from the first to the last: between two steps
    they are the same elements with other padding. What becomes partial does so at the end, as on the path.
    """
    if source is target:
        return None
    sums = _reductions(source, target, machine)
    first = len(source.partial_axes) - len(sums)  # the dims begin behind the axes that stay partial
    chunks = [
        (first + dim, size, source.shards[dim], target.shards[dim])
        for dim, size in enumerate(source.shape)
        if source.shards[dim] != target.shards[dim]
        and (is_padded(size, source.shards[dim]) or is_padded(size, target.shards[dim]))
    ]
    becomes_partial = len(target.partial_axes) > first
    if not sums and not becomes_partial and len(chunks) < 2:
        return _cut(first + source.ndim, *chunks[0]) if chunks else None

    def run(data: torch.Tensor) -> torch.Tensor:
        for place, reduce in sums:
            data = reduce(data, place)
        for place, size, here, there in chunks:
            data = pad(unpad(data, place, size, here), place, size, there)
        return _make_partial(data, source, target) if becomes_partial else data

    return run


def _cut(ndim: int, place: int, size: int, here: Shape, there: Shape) -> Step:
    """One dim in other chunks, in one call where padding is only at the end."""
    if len(here) == 1 and not is_padded(size, there):
        return lambda data: data.narrow(place, 0, size)
    if len(there) == 1 and not is_padded(size, here):
        amount = [0, 0] * (ndim - place - 1) + [0, there[0] * -(-size // there[0]) - size]
        return lambda data: torch.constant_pad_nd(data, amount)
    return lambda data: pad(unpad(data, place, size, here), place, size, there)


def _reductions(source: Topology, target: Topology, machine: Machine) -> list[tuple[int, Callable[..., torch.Tensor]]]:
    """The reductions between two topologies, in the order of the path: over which leading dim, and how."""
    left = [*source.partial_axes]
    gone = [axis for axis in left if target.placements[axis] != source.placements[axis]]
    if len(gone) > 1:
        way = stations(source, target.placements, machine)
        gone.sort(key=lambda axis: next(i for i, each in enumerate(way) if each[axis] != source.placements[axis]))
    found = []
    for axis in gone:
        placement = source.placements[axis]
        assert isinstance(placement, Partial)
        found.append((left.index(axis), REDUCTIONS[placement.op].along))
        left.remove(axis)
    return found


def _make_partial(data: torch.Tensor, source: Topology, target: Topology) -> torch.Tensor:
    """R->P: coordinate 0 keeps the value and the others hold what does not change it."""
    for place, axis in enumerate(target.partial_axes):
        placement = target.placements[axis]
        if source.placements[axis] == placement:
            continue
        assert isinstance(placement, Partial)
        devices = target.mesh.shape[axis]
        data = data.unsqueeze(place)
        if REDUCTIONS[placement.op].neutral is None:
            # memory of its own: in-place ops refuse an expanded array
            data = data.expand(data.shape[:place] + (devices,) + data.shape[place + 1 :]).contiguous()
        elif devices > 1:
            rest = nothing_like(data, data.shape[:place] + (devices - 1,) + data.shape[place + 1 :])
            if placement.op == "prod":
                ones = torch.ones_like(rest)
                mask = mask_of(target, data.device)
                rest = ones if mask is None else torch.where(mask, ones, rest)
            data = torch.cat([data, rest], place)
    return data


def _split(topology: Topology) -> tuple[Shape, dict[int, int], list[int]]:
    """The stored array with every mesh axis as a dim of its own: its shape, where each axis and each local dim is."""
    sizes = topology.mesh.local_shape
    split = [sizes[axis] for axis in topology.partial_axes]
    places = {axis: place for place, axis in enumerate(topology.partial_axes)}
    local = []
    for dim, axes in enumerate(topology.axes_of):
        for axis in axes:
            places[axis] = len(split)
            split.append(sizes[axis])
        local.append(len(split))
        split.append(topology.local_shape[dim])
    return tuple(split), places, local


@lru_cache(maxsize=4096)
def _block_spec(topology: Topology) -> tuple[Shape, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """How a stored array becomes a block: split dims, permute (and back), then the axes of size 1 to insert."""
    split, places, local = _split(topology)
    order = [places[axis] for axis in sorted(places)] + local
    absent = tuple(axis for axis, each in enumerate(topology.placements) if isinstance(each, Replicate))
    return split, tuple(order), tuple(order.index(place) for place in range(len(order))), absent


def to_block(data: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The stored array as a block: a view, mesh axes first."""
    split, order, _, absent = _block_spec(topology)
    block = data.view(split).permute(order)
    for axis in absent:
        block = block.unsqueeze(axis)
    return block


def from_block(block: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The stored array of a block; copies only if the block's strides ask for it."""
    _, _, inverse, absent = _block_spec(topology)
    for axis in reversed(absent):
        block = block.squeeze(axis)
    return block.permute(inverse).reshape(topology.stored_shape)


def expose(data: torch.Tensor, topology: Topology, leads: tuple[int, ...]) -> torch.Tensor:
    """The stored array with some axes as leading dims (those that shard it or on which it is partial), in mesh order.

    The dims that follow are what is left: a dim sharded by another axis still has that axis merged into it.
    """
    split, places, local = _split(topology)
    front = [places[axis] for axis in leads if axis in places]
    groups = [[places[a] for a in axes if a not in leads] + [local[d]] for d, axes in enumerate(topology.axes_of)]
    order = front + [place for group in groups for place in group]
    shape = [split[place] for place in front] + [math.prod(split[place] for place in group) for group in groups]
    return data.reshape(split).permute(order).reshape(shape)
