"""Between the two views of one block: what every device holds with a label, and the whole with a topology.

A label is about a distribution shape, and so is the native tensor that it describes: it lies on the mesh *seen in that
shape* (`view`), the same devices row-major. A dim cut by [8] on a mesh of 2x4 is then one cut into 8 chunks, with its
padding at the end, as the label says it. Tensors that have to meet are brought to one view (`carry`): where both
cut alike the array stays as it is, else the tensor is gathered first, which is seen by whoever watches communication.

    [8] S(0)  f32[16, 4] on Mesh(x0=8)      ->  S(0), S(0) on Mesh(x0=2, x1=4): chunk 2 * 4 + 3 is chunk 3 of chunk 2
    [8] S(0)  f32[9, 4], padded to 16       ->  gathered: 9 over (2, 4) is 5 + 4, which lies otherwise
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from meshloom.engines.layout import fill, from_block, short_name
from meshloom.errors import ArgumentError, OperandError
from meshloom.mesh import Mesh
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology
from meshloom.placement.spelling import read_placements
from meshloom.runtime import MeshCoordinate
from meshloom.tensor.base import Tensor as Native
from meshloom.tensor.moving import redistribute
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.tensor.boxes import are_runs, gather_parts, grid_of, see_in, take_box
from meshloom.ttnn.tensor.composers import in_order
from meshloom.ttnn.tensor.mappers import MeshMapperConfig, ReplicateTensorToMeshWrapper, TensorToMesh
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import (
    UNKNOWN,
    Placement as LabelPlacement,
    PlacementShard,
    TensorTopology,
    join,
    spell,
    unspell,
)


@lru_cache(maxsize=256)
def view(mesh: Mesh, shape: tuple[int, ...]) -> Mesh:
    """The devices of a mesh seen in another shape, row-major.

    >>> view(Mesh(x0=2, x1=4), (8,))
    Mesh(x0=8)
    """
    return mesh if shape == mesh.shape else mesh.reshape(**{f"x{axis}": size for axis, size in enumerate(shape)})


# from a label to a topology


@dataclass(frozen=True)
class Reading:
    """What a label says of a tensor: the view it lies on, in the order of which devices, cut how, how large."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    sizes: tuple[int | None, ...]
    is_in_order: bool


def lift(tensor: Tensor, block: Block | None = None) -> Native:
    """The whole of a tensor as its label describes it, or of a block that lies as the tensor's does (a cast of it)."""
    values, reading = tensor.block if block is None else block, _read(tensor)
    if not reading.is_in_order:
        every = gather_parts(tensor)
        values = in_order(every, tensor.tensor_topology().mesh_coords()).to(values.dtype)
        values = take_box(values.reshape(*reading.mesh.shape, *tensor.shape), grid_of(reading.mesh))
    elif reading.mesh.shape != tensor.grid:
        values = see_in(values, tensor.grid, grid_of(reading.mesh))
    return _whole(values, reading)


def _read(tensor: Tensor) -> Reading:
    """Labels that were seen before, on a mesh that was seen before, cost one look-up."""
    device = tensor.device()
    assert device is not None
    return _reading(tensor.tensor_topology(), device.runtime.mesh, tuple(tensor.shape), tensor._coords)


@lru_cache(maxsize=4096)
def _reading(
    label: TensorTopology, mesh: Mesh, local: tuple[int, ...], coords: tuple[MeshCoordinate, ...] | None
) -> Reading:
    held, rank = mesh.size if coords is None else len(coords), len(local)
    if held == mesh.size and all(isinstance(each, Replicate) for each in label.placements()):
        return Reading(mesh, (Replicate(),) * mesh.ndim, (None,) * rank, True)
    shape, placements = tuple(label.distribution_shape()), label.placements()
    order = [mesh.index(place) for place in label.mesh_coords()]
    if len(shape) == 1 and held < mesh.size and isinstance(placements[0], PlacementShard) and _is_first(order, held):
        cut = placements[0].dim % rank  # 10 over 8 is five chunks of two: the last devices hold nothing of it
        size = placements[0].size or held * local[cut]
        shape, placements, order = (mesh.size,), [PlacementShard(cut, size)], list(range(mesh.size))
    if math.prod(shape) != mesh.size or sorted(order) != list(range(mesh.size)) or UNKNOWN in placements:
        raise _untold(label, held, mesh)
    is_in_order = order == list(range(mesh.size))
    seen = view(mesh if is_in_order else mesh.reordered(order), shape)
    return Reading(seen, tuple(unspell(each, rank) for each in placements), _sizes(placements, rank), is_in_order)


def _is_first(order: Sequence[int], held: int) -> bool:
    return list(order) == list(range(held))


def _untold(label: TensorTopology, held: int, mesh: Mesh) -> OperandError:
    if held < mesh.size:
        return OperandError(
            f"the tensor lies on {held} of {mesh.size} devices, and its label does not say what the others hold",
            label=label,
            fix="use a submesh of those devices, or a mapper over all of them",
        )
    return OperandError(
        "the global tensor cannot be reconstructed from these shards",
        label=label,
        fix="all_reduce or all_gather it first, or say what it is: x.update_tensor_topology(...)",
    )


def _sizes(placements: Sequence[LabelPlacement], rank: int) -> tuple[int | None, ...]:
    """The size of the whole of every dim whose end is padding."""
    known = {each.dim % rank: each.size for each in placements if isinstance(each, PlacementShard)}
    return tuple(known.get(dim) for dim in range(rank))


def _whole(block: Block, reading: Reading) -> Native:
    """The native tensor of a block with the axes of that view. Padding is zero there, so it is made zero."""
    axes = reading.mesh.ndim
    for axis, (size, each) in enumerate(zip(reading.mesh.local_shape, reading.placements, strict=True)):
        if isinstance(each, Replicate):
            block = block.narrow(axis, 0, 1) if block.shape[axis] > 1 else block
        elif block.shape[axis] != size:  # all hold the same part or term, and it is stored once
            block = block.expand(*block.shape[:axis], size, *block.shape[axis + 1 :])
    even, wanted = _topologies(reading, tuple(block.shape[axes:]), short_name(block.dtype))
    if wanted is even:
        return Native(even, from_block(block, even))
    if wanted.stored_shape == even.stored_shape and not _nests(wanted):
        return Native(wanted, fill(from_block(block, wanted), wanted, 0))
    found = Native(even, from_block(block, even))
    for dim, size in enumerate(wanted.shape):
        if size != even.shape[dim]:
            found = cast(Native, found.narrow(dim, 0, size))
    return found


@lru_cache(maxsize=4096)
def _topologies(reading: Reading, local: tuple[int, ...], dtype: str) -> tuple[Topology, Topology]:
    """Of all that the devices hold, padding included, and of what counts."""
    even = join(reading.mesh, reading.placements, local, dtype)
    wanted = tuple(end if size is None else size for size, end in zip(reading.sizes, even.shape, strict=True))
    return even, Topology(reading.mesh, reading.placements, wanted, dtype)


def _nests(topology: Topology) -> bool:
    """Whether padding lies inside of a dim and not at its end: several axes cut a dim that does not divide."""
    return any(len(cutting(topology, dim)) > 1 for dim in topology.padded_dims)


def cutting(topology: Topology, dim: int) -> list[int]:
    """The axes that really cut a dim."""
    return [axis for axis in topology.axes_of[dim] if topology.mesh.shape[axis] > 1]


# between views


def carry(tensor: Native, mesh: Mesh) -> Native:
    """The same tensor on another view of its devices."""
    if tensor.mesh == mesh:
        return tensor
    target = _alike(tensor.topology, mesh)
    if target is not None and (not mesh.is_split or (are_runs(grid_of(tensor.mesh)) and are_runs(grid_of(mesh)))):
        return Native(target, tensor._data.reshape(target.stored_shape))
    tensor = redistribute(tensor, tensor.topology.replicated.placements)
    alike = Topology(mesh, (Replicate(),) * mesh.ndim, tensor.topology.shape, tensor.topology.dtype)
    made = Native(alike, tensor._data.reshape(alike.stored_shape))
    return made if target is None else redistribute(made, target.placements)  # boxes are other devices there


def _alike(here: Topology, mesh: Mesh) -> Topology | None:
    """The topology on another view whose array is the same; None if there is none."""
    kinds = {each for each, size in zip(here.placements, here.mesh.shape, strict=True) if size > 1}
    if len(kinds) > 1 or (here.mesh.device_ids != mesh.device_ids and kinds - {Replicate()}):
        return None
    kind = kinds.pop() if kinds else Replicate()
    placements = tuple(kind if size > 1 else Replicate() for size in mesh.shape)
    found = Topology(mesh, placements, here.shape, here.dtype)
    moved = here.padded and (_nests(here) or _nests(found))
    return None if moved or math.prod(found.stored_shape) != math.prod(here.stored_shape) else found


# from a topology to a label


def lower(tensor: Native, grid: tuple[int, ...]) -> tuple[Block, TensorTopology]:
    """What every device of a grid holds of a tensor, and the label that says so."""
    tensor = _with_padding_at_the_end(tensor)
    topology, mesh = tensor.topology, tensor.mesh
    block, local = tensor.block, tensor.topology.local_shape
    if mesh.shape != tuple(grid):
        alike = all(isinstance(each, Replicate) for each in topology.placements)
        block = block.reshape(*(1,) * len(grid), *local) if alike else see_in(block, grid_of(mesh), grid)
    return block, _label(topology, tuple(grid))


@lru_cache(maxsize=4096)
def _label(topology: Topology, grid: tuple[int, ...]) -> TensorTopology:
    placements = [spell(each, topology) for each in topology.placements]
    return TensorTopology(topology.mesh.shape, placements, list(Mesh.of(grid).coordinates()))


def _with_padding_at_the_end(tensor: Native) -> Native:
    """A label knows the size of a whole dim, not padding inside of it: only the outermost axis goes on cutting it."""
    topology = tensor.topology
    if not topology.padded or not _nests(topology):
        return tensor
    inner = {axis for dim in topology.padded_dims for axis in cutting(topology, dim)[1:]}
    kept = tuple(Replicate() if axis in inner else each for axis, each in enumerate(topology.placements))
    return redistribute(tensor, kept)


# what is asked for


def read_output(output: Any, device: MeshDevice) -> tuple[Mesh, tuple[Placement, ...]]:
    """The view and the placements that `output=` stands for.

    One placement is about all devices row-major, as a mapper takes it; several are about the axes of the mesh. A label,
    a mapper and its config bring their own shape.
    """
    mesh = device.runtime.mesh
    if isinstance(output, (TensorToMesh, ReplicateTensorToMeshWrapper)):
        output = output.unwrap().config()
    if isinstance(output, MeshMapperConfig):
        shape, given = tuple(output.mesh_shape_override or mesh.shape), list(output.placements)
    elif isinstance(output, TensorTopology):
        shape, given = tuple(output.distribution_shape()), list(output.placements())
    else:
        given = list(_several(output))
        shape = (mesh.size,) if len(given) == 1 else mesh.shape
    if math.prod(shape) != mesh.size or len(shape) != len(given):
        raise OperandError(
            f"{len(given)} placements over a shape of {list(shape)} say nothing about the {mesh.size} devices",
            mesh=mesh,
            fix=f"give one placement, or {mesh.ndim} for the axes of the mesh",
        )
    return view(mesh, shape), tuple(_one(each) for each in given)


def _several(output: Any) -> Sequence[Any]:
    if isinstance(output, str):
        return read_placements(output)
    return output if isinstance(output, (list, tuple)) else (output,)


def _one(placement: Any) -> Placement:
    if isinstance(placement, (Shard, Replicate, Partial)):
        return unspell(placement)
    raise ArgumentError(
        f"output={placement!r} is not a placement",
        fix="ttnn.PlacementShard(dim), ttnn.PlacementReplicate(), a list of them, a topology or a mapper config",
    )
