"""The parts of a tensor one by one, and back: single parts, parts put on a mesh, mapping and composing on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.ops.calling import op
from meshloom.ttnn.tensor.boxes import gather_parts, held_shape, place_here
from meshloom.ttnn.tensor.composers import MeshToTensor
from meshloom.ttnn.tensor.converting import converted, host
from meshloom.ttnn.tensor.mappers import TensorToMesh
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import ALONE, PlacementShard, TensorTopology
from meshloom.ttnn.tensor.transfers import coordinates, move_to, share


@op("get_device_tensors")
def get_device_tensors(tensor) -> list[Tensor]:
    """One tensor for each device that holds a part, row-major; they share memory.

    On devices each still belongs to the mesh and has its label; on the host each stands alone.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"ttnn.get_device_tensors takes a ttnn.Tensor, not a {type(tensor).__name__}")
    if tensor.device() is not None:
        return [share(tensor, (place,)) for place in tensor.device_coords()]
    single: dict[str, Any] = {"grid": (1, 1), "topology": ALONE, "coords": None, "home": None}
    places, every = tensor.device_coords(), gather_parts(tensor)  # copies, if some parts are on other processes
    return [every.shared_by(every._like(every.part(place)[(None,) * 2], **single), place) for place in places]


def _check_alike(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise OperandError("there are no tensors to put together")
    for each in tensors:
        if not isinstance(each, Tensor):
            raise ArgumentError(f"{each!r} is not a ttnn.Tensor")
    first = tensors[0]
    for each in tensors[1:]:
        if (tuple(each.shape), each.dtype, each.layout, each.tile) != (
            tuple(first.shape),
            first.dtype,
            first.layout,
            first.tile,
        ):
            raise OperandError(
                "All tensor shards must have the same tensor spec",
                shards=f"{list(first.shape)} {first.dtype} {first.layout} and {list(each.shape)} {each.dtype} "
                f"{each.layout}",
            )


@op("from_host_shards")
def from_host_shards(tensors: Sequence[Tensor], mesh_shape) -> Tensor:
    """One tensor of the host whose parts are these, row-major over a mesh shape."""
    grid = tuple(mesh_shape)
    if len(tensors) != math.prod(grid):
        raise OperandError("Number of tensor shards must match mesh size", shards=len(tensors), mesh=f"{list(grid)}")
    _check_alike(tensors)
    if any(each.device() is not None for each in tensors):
        raise OperandError("from_host_shards takes tensors of the host", fix="x.cpu(), or combine_device_tensors")
    places = [each.device_coords() for each in tensors]
    if any(len(held) != 1 for held in places):
        raise OperandError("from_host_shards takes single parts", fix="ttnn.get_device_tensors(x)")
    first = tensors[0]
    parts = [gather_parts(each).part(held[0]) for each, held in zip(tensors, places, strict=True)]
    block = torch.unflatten(torch.stack(parts), 0, grid)
    label = TensorTopology([len(tensors)], [PlacementShard(0)], coordinates(grid))
    return first._like(block, grid=grid, topology=label, coords=None, home=None)


@op("combine_device_tensors")
def combine_device_tensors(*, tensors) -> Tensor:
    """One tensor of the parts that these hold on one mesh. Those of one tensor keep sharing its memory."""
    _check_alike(tensors)
    first = tensors[0]
    device = first.device()
    if device is None or any(each.device() is not device for each in tensors):
        raise OperandError("combine_device_tensors takes tensors of one mesh", fix="from_host_shards for the host")
    placed = sorted(((place, each) for each in tensors for place in each.device_coords()), key=lambda pair: pair[0])
    places = [place for place, _ in placed]
    if len(set(places)) < len(places):
        raise OperandError("two of the tensors hold a part on the same device", devices=places)
    every = len(places) == math.prod(first.grid)
    made = _combine(placed, first, None if every else tuple(places))
    made.update_tensor_topology(TensorTopology([len(places)], [PlacementShard(0)], places))
    return made


def _combine(
    placed: Sequence[tuple[MeshCoordinate, Tensor]], first: Tensor, coords: tuple[MeshCoordinate, ...] | None
) -> Tensor:
    if all(each._room is first._room for _, each in placed):
        made = share(first)
        made._coords, made._form = coords, None
        return made
    block = first.block.new_zeros(*held_shape(first.grid), *first.shape)
    for place, each in placed:
        here = place_here(first.grid, place)
        if here is not None:
            block[here] = each.part(place)
    return first._like(block, coords=coords)


@op("distribute_tensor")
def distribute_tensor(tensor, mapper, mesh_device=None) -> Tensor:
    """A single tensor of the host as the parts of a mesh; on it, if it is named."""
    if not isinstance(mapper, TensorToMesh):
        raise ArgumentError(f"{mapper!r} is not a TensorToMesh", fix="unwrap() it, or ttnn.create_mesh_mapper")
    if tensor.device() is not None:
        raise OperandError(
            "TensorToMesh only supports host tensors; got storage type: StorageType::DEVICE", fix="tensor.cpu()"
        )
    whole = gather_parts(tensor).part(tensor.device_coords()[0])
    block, label, coords = mapper.map(whole)
    values = converted(block, tensor.dtype, tensor.block)
    made = tensor._like(values, grid=mapper.grid, topology=label, coords=coords, home=mapper.mesh)
    return made if mesh_device is None else move_to(made, mesh_device, tensor.memory_config(), copies=False)


@op("aggregate_tensor")
def aggregate_tensor(tensor, composer) -> Tensor:
    """The parts of a tensor as one on the host, put together by a composer."""
    if not isinstance(composer, MeshToTensor):
        raise ArgumentError(f"{composer!r} is not a MeshToTensor", fix="ttnn.ConcatMeshToTensor(mesh_device, dim=0)")
    tensor.wait()
    values: Any = composer.compose(gather_parts(tensor))
    return host(values.clone(), tensor)
