"""What this process holds of a tensor whose mesh several processes split: the parts of its own box of coordinates.

The grid of a tensor is the shape of its mesh, the same on every process. In one process it is a plain tuple; where
processes split the mesh it is a `Grid`, which knows the mesh too, and goes from tensor to tensor with the blocks. The
mesh axes of a block are then those of the box: 1 where all devices along an axis hold the same, or where the box has
one device there. Labels and coordinates are those of the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from meshloom.engines.layout import from_block, short_name, to_block
from meshloom.mesh import Mesh
from meshloom.placement import Replicate, Shard, Topology
from meshloom.tensor import collectives as native
from meshloom.tensor.base import Tensor as Native
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.topology import PlacementReplicate, TensorTopology

if TYPE_CHECKING:
    from meshloom.ttnn.tensor.tensor import Tensor


class Grid(tuple[int, ...]):
    """The shape of a mesh that processes split."""

    mesh: Mesh
    held: tuple[int, ...]

    def __new__(cls, mesh: Mesh) -> Grid:
        made = super().__new__(cls, mesh.shape)
        made.mesh, made.held = mesh.with_lease(None), mesh.local_shape  # it outlives the device
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@lru_cache(maxsize=256)
def grid_of(mesh: Mesh) -> tuple[int, ...]:
    """The grid of tensors on a mesh.

    >>> grid_of(Mesh(r=2, c=4)), type(grid_of(Mesh.of((2, 4), processes=(2, 1)))).__name__
    ((2, 4), 'Grid')
    """
    return Grid(mesh) if mesh.is_split else mesh.shape


def held_shape(grid: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the box that this process holds: of the whole mesh where nobody splits it.

    >>> held_shape((2, 4)), held_shape(Grid(Mesh.of((2, 4), processes=(2, 1))))
    ((2, 4), (1, 4))
    """
    return grid.held if isinstance(grid, Grid) else grid


def held_offset(grid: tuple[int, ...]) -> tuple[int, ...]:
    """The first coordinate of the box that this process holds."""
    return grid.mesh.local_offset if isinstance(grid, Grid) else (0,) * len(grid)


def place_here(grid: tuple[int, ...], place: Sequence[int]) -> tuple[int, ...] | None:
    """A coordinate of the mesh as one of this process's box; None if another process holds it."""
    if not isinstance(grid, Grid):
        return tuple(place)
    here = tuple(c - start for c, start in zip(place, grid.mesh.local_offset, strict=True))
    return here if all(0 <= c < size for c, size in zip(here, grid.held, strict=True)) else None


def take_box(block: Block, grid: tuple[int, ...]) -> Block:
    """Of a block on the whole mesh, what this process holds, in memory of its own where that is less."""
    if not isinstance(grid, Grid):
        return block
    found = block
    for axis, (start, size) in enumerate(zip(grid.mesh.local_offset, grid.held, strict=True)):
        if block.shape[axis] > 1:
            found = found.narrow(axis, start, size)
    return found if found.shape == block.shape else found.clone()


# to the native view and back


def to_native(block: Block, mesh: Mesh, own: Sequence[int] = ()) -> Native:
    """A block as a native tensor: mesh axes as dims in front. On the axes of `own` every device gets its own part."""
    axes = mesh.ndim
    if own:
        lead = [mesh.local_shape[axis] if axis in own else size for axis, size in enumerate(block.shape[:axes])]
        block = block.expand(*lead, *block.shape[axes:])
    topology, lying = lie_down(block, mesh)
    return Native(topology, from_block(lying, topology))


def lie_down(block: Block, mesh: Mesh) -> tuple[Topology, torch.Tensor]:
    """A block as the topology of a native tensor and the block of it, in which the mesh axes cut dims of their own."""
    topology, shape = _lying(mesh, block.shape, block.dtype)
    return topology, block.view(shape)


def stand_up(block: torch.Tensor, axes: int) -> Block:
    """The block of what `lie_down` gave, or of what a collective made of it, without the dims that mesh axes cut."""
    return block.reshape(block.shape[:axes] + block.shape[2 * axes :])


@lru_cache(maxsize=4096)
def _lying(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Topology, tuple[int, ...]]:
    """How a block of that shape lies: mesh axes cut dims of their own, those of size 1 are replicated. And its shape
    then.

    Where a box has one device along an axis, the block does not say whether the others hold the same: they count as
    different, which is right in any case.
    """
    held = zip(shape, mesh.shape, mesh.local_shape, strict=False)
    alike = [size == 1 < whole and not (mesh.is_split and here == 1) for size, whole, here in held]
    placements = [Replicate() if same else Shard(axis) for axis, same in enumerate(alike)]
    front = [1 if same else mesh.shape[axis] for axis, same in enumerate(alike)]
    lying = (*shape[: mesh.ndim], *(1,) * mesh.ndim, *shape[mesh.ndim :])
    return Topology(mesh, placements, (*front, *shape[mesh.ndim :]), short_name(dtype)), lying


def from_native(tensor: Native) -> Block:
    """The block of a native tensor that `to_native` made, or that a collective made of one."""
    return stand_up(to_block(tensor._data, tensor.topology), tensor.topology.mesh.ndim)


# reading


def gather_parts(tensor: Tensor, *, by_label: bool = False) -> Tensor:
    """A tensor whose parts are all here, gathered from the processes; itself if nobody splits its mesh.

    `by_label`: what the label says is the same along an axis is that of the first device of the axis, and stored once.
    """
    grid = tensor._grid
    if not isinstance(grid, Grid):
        return tensor
    if tensor._coords is not None and len(tensor._coords) == 1:
        own = to_native(tensor.block, grid.mesh, own=range(len(grid)))
        found = native.broadcast(own, grid.mesh.index(tensor._coords[0]))
        return tensor._like(from_native(found), grid=tuple(grid), device=None, home=None)
    found = to_native(tensor.block, grid.mesh)
    same = same_axes(tensor._topology, grid) if by_label and tensor._coords is None else []
    alike = [grid.mesh.axes[axis] for axis in same if grid.mesh.shape[axis] > 1]
    if alike:
        found = native.broadcast(found, 0, alike)
    return tensor._like(found.to_torch(), grid=tuple(grid), device=None, home=None)


def same_axes(label: TensorTopology, grid: tuple[int, ...]) -> list[int]:
    """The mesh axes along which a label of all devices says that they hold the same."""
    if tuple(label._shape) not in (tuple(grid), (math.prod(grid),)):
        return []
    told = label._placements if tuple(label._shape) == tuple(grid) else label._placements * len(grid)
    return [axis for axis, each in enumerate(told) if isinstance(each, PlacementReplicate)]


def unseen_axes(grid: tuple[int, ...], label: TensorTopology | None) -> list[bool]:
    """Along which mesh axes devices of other processes may differ from what is here, though the block does not show it:
    those of which the box has one device, unless a label says that all along them hold the same."""
    if not isinstance(grid, Grid):
        return [False] * len(grid)
    same = [] if label is None else same_axes(label, grid)
    sizes = enumerate(zip(grid, grid.held, strict=True))
    return [here == 1 < whole and axis not in same for axis, (whole, here) in sizes]


def box_for(tensor: Tensor, grid: tuple[int, ...]) -> Block:
    """What this process holds of a tensor on a mesh of the same shape that may be split otherwise, or not at all."""
    mine, theirs = tensor._grid, grid
    if mine != theirs or (type(mine) is type(theirs) and held_shape(mine) == held_shape(theirs)):
        return tensor.block
    return take_box(gather_parts(tensor).block, grid)


def agree(grid: tuple[int, ...], is_so: bool) -> bool:
    """Whether it is so on every process that holds a box of the mesh."""
    if not isinstance(grid, Grid):
        return is_so
    axes = len(grid)
    votes = to_native(torch.full((1,) * (axes + 1), int(is_so)), grid.mesh, own=range(axes))
    return bool(from_native(native.all_reduce(votes, op="min")).item())


def see_in(block: Block, grid: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    """A block on a mesh as one on the same devices in another shape, row-major, with a part for each of them.

    Boxes of both are the same devices if processes hold one run of them after the other: 2x4 over two processes seen
    as 8. Where they are not, as in 3x4 over two processes, parts are gathered and cut again.
    """
    dims = block.shape[len(grid) :]
    if not isinstance(grid, Grid) and not isinstance(shape, Grid):
        return block.expand(*grid, *dims).reshape(*shape, *dims)
    if are_runs(grid) and are_runs(shape):
        return block.expand(*held_shape(grid), *dims).reshape(*held_shape(shape), *dims)
    every = to_native(block, grid.mesh).to_torch() if isinstance(grid, Grid) else block
    return take_box(every.expand(*grid, *dims).reshape(*shape, *dims), shape)


def are_runs(grid: tuple[int, ...]) -> bool:
    """Whether every process holds a run of devices, row-major: behind the last axis that is split, none is."""
    parts = grid.mesh.processes if isinstance(grid, Grid) else (1,) * len(grid)
    held = held_shape(grid)
    return all(size == 1 or all(each == 1 for each in parts[axis + 1 :]) for axis, size in enumerate(held))
