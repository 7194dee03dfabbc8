"""From one tensor to the parts of a mesh.

A config has a distribution shape and says for each of its axes which dim it cuts. The shape is the mesh's own, a box of
it (SUBMESH), or any other with at most as many places, which are dealt to the devices in row-major order (ROW_MAJOR).

A dim of size n over p places is cut into chunks of ceil(n / p). Over one axis the last places may then hold nothing: 10
over 8 is five chunks of two. Where the chunks do not come out even the dim is padded with zeros to p chunks, and its
placement keeps the size (`PlacementShard(0, size=9)`), so that composers cut the padding off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError, expect
from meshloom.runtime import MeshCoordinate, MeshShape
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.refusal_levels import refuse_addition
from meshloom.ttnn.tensor.boxes import take_box
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.topology import (
    REPLICATE,
    Placement,
    PlacementPartial,
    PlacementReplicate,
    PlacementShard,
    TensorTopology,
)

__all__ = (
    "CppTensorToMesh MeshMapperConfig ReplicateTensorToMesh ReplicateTensorToMeshWrapper ShardTensor2dMesh "
    "ShardTensorToMesh TensorToMesh compute_distribution_to_mesh_mapping create_mesh_mapper "
    "replicate_tensor_to_mesh_mapper shard_tensor_to_mesh_mapper"
).split()

UNSET: Any = object()


# configs


class MeshMapperConfig:
    """What each axis of a distribution shape does; `row_dim` and `col_dim` say it for two axes, None replicates.

    >>> MeshMapperConfig([PlacementShard(0)], MeshShape([8]))
    MeshMapperConfig(placements: [PlacementShard(0)], mesh_shape_override=MeshShape([8]))
    >>> MeshMapperConfig(row_dim=1).placements
    [PlacementShard(1), PlacementReplicate()]
    """

    def __init__(
        self,
        placements: Any = UNSET,
        mesh_shape_override: Any = None,
        mesh_offset_override: Sequence[int] = (),
        *,
        row_dim: int | None = None,
        col_dim: int | None = None,
    ) -> None:
        if isinstance(placements, int) or placements is None:  # MeshMapperConfig(row_dim, col_dim)
            row_dim, col_dim, mesh_shape_override = placements, mesh_shape_override, None
            placements = UNSET
        pair: list[Placement] = [REPLICATE if dim is None else PlacementShard(dim) for dim in (row_dim, col_dim)]
        self.placements = pair if placements is UNSET else list(placements)
        for each in self.placements:
            if not isinstance(each, (PlacementShard, PlacementReplicate, PlacementPartial)):
                raise ArgumentError(f"{each!r} is not a placement", fix="PlacementShard(dim) or PlacementReplicate()")
        self.mesh_shape_override = None if mesh_shape_override is None else MeshShape(list(mesh_shape_override))
        self.mesh_offset_override = tuple(mesh_offset_override)

    def __repr__(self) -> str:
        return f"MeshMapperConfig(placements: {self.placements}{overrides(self)})"


def overrides(config: Any) -> str:
    """The part of a config's text that is seldom there."""
    shape = "" if config.mesh_shape_override is None else f", mesh_shape_override={config.mesh_shape_override}"
    offset = f", mesh_offset_override={list(config.mesh_offset_override)}" if config.mesh_offset_override else ""
    return shape + offset


# where the places of a distribution are


def compute_distribution_to_mesh_mapping(
    distribution_shape: Sequence[int], mesh_shape: Sequence[int], offset: Sequence[int] = ()
) -> list[MeshCoordinate]:
    """The device of each place of a distribution shape, both row-major.

    >>> compute_distribution_to_mesh_mapping(MeshShape([3]), MeshShape(2, 2))
    [MeshCoordinate([0, 0]), MeshCoordinate([0, 1]), MeshCoordinate([1, 0])]
    >>> compute_distribution_to_mesh_mapping(MeshShape(2, 1), MeshShape(2, 2))
    [MeshCoordinate([0, 0]), MeshCoordinate([1, 0])]
    """
    shape, mesh = tuple(distribution_shape), tuple(mesh_shape)
    if math.prod(shape) > math.prod(mesh):
        raise OperandError(
            f"The size of the supplied mesh shape {MeshShape(shape)} does not match the device shape size "
            f"{MeshShape(mesh)}",
            fix=f"use at most {math.prod(mesh)} places",
        )
    if _is_box(shape, mesh):
        starts = offset or (0,) * len(mesh)
        return [
            MeshCoordinate(place)
            for place in itertools.product(*(range(a, a + n) for a, n in zip(starts, shape, strict=True)))
        ]
    every = itertools.product(*map(range, mesh))
    return [MeshCoordinate(place) for place in itertools.islice(every, math.prod(shape))]


def _is_box(shape: Sequence[int], mesh: Sequence[int]) -> bool:
    return len(shape) == len(mesh) and all(a <= b for a, b in zip(shape, mesh, strict=True))


def _check_offset(offset: Sequence[int], shape: Sequence[int], mesh: Sequence[int]) -> None:
    if not offset:
        return
    if not _is_box(shape, mesh):
        raise OperandError(
            "mesh_offset_override is only supported when the distribution fits within the mesh device per-dimension "
            f"(SUBMESH mode); the distribution is {MeshShape(shape)}, the mesh {MeshShape(mesh)}"
        )
    if len(offset) != len(mesh):
        raise OperandError(f"mesh_offset_override {list(offset)} has not the dims of the mesh {MeshShape(mesh)}")
    for dim, (start, size, end) in enumerate(zip(offset, shape, mesh, strict=True)):
        if start + size > end:
            raise OperandError(
                f"The sub-rectangle anchored at offset {list(offset)} does not fit within the mesh device shape "
                f"{MeshShape(mesh)} (dimension {dim})",
                fix=f"start at most at {end - size}",
            )


def check_dims(dims: Sequence[int], rank: int) -> list[int]:
    """Dims counted from the front; an error for one that is not there, or there twice."""
    bad = [dim for dim in dims if not -rank <= dim < rank]
    if bad:
        raise OperandError(
            f"Invalid dimension index; got dims: {{{', '.join(map(str, dims))}}}, tensor dimension: {rank}",
            fix=f"use a dim from {-rank} to {rank - 1}" if rank else "a tensor without dims cannot be cut",
        )
    counted = [dim % rank for dim in dims]
    if len(set(counted)) < len(counted):
        raise OperandError(f"dims must be unique; got {list(dims)} for {rank} dims", fix="name every dim once")
    return counted


def check_count(shape: Sequence[int], count: int, what: str, config: object) -> None:
    """An error unless a config has one placement or dim for every axis of a shape."""
    if len(shape) != count:
        raise OperandError(
            f"The number of dimensions in the mesh shape {MeshShape(shape)} does not match the number of {what} in the "
            f"config {config}",
            fix=f"give {len(shape)} {what.replace('dimensions', 'dims')}",
        )


# mappers

Coords = tuple[MeshCoordinate, ...]


class TensorToMesh:
    """Cuts a tensor into the parts of a mesh. With `uneven`, no device is left without a part."""

    def __init__(self, mesh: MeshDevice, config: MeshMapperConfig, uneven: bool = False) -> None:
        check_mesh(mesh)
        self.mesh, self._config, self.uneven = mesh, config, uneven
        self.grid = mesh.grid
        self.shape = tuple(config.mesh_shape_override or self.grid)
        compute_distribution_to_mesh_mapping(self.shape, self.grid)
        check_count(self.shape, len(config.placements), "placements", config)
        _check_offset(config.mesh_offset_override, self.shape, self.grid)

    def config(self) -> MeshMapperConfig:
        """The config it was made from."""
        return self._config

    def unwrap(self) -> TensorToMesh:
        """The mapper itself."""
        return self

    @property
    def is_replicated(self) -> bool:
        """Whether every device gets all of a tensor."""
        return all(isinstance(each, PlacementReplicate) for each in self._config.placements)

    def map(self, whole: torch.Tensor) -> tuple[Block, TensorTopology, Coords | None]:
        """What this process holds of a tensor, its label, and the devices that hold a part (None: all).

        The block may share memory with the tensor.
        """
        placements = self._count_dims(whole.dim())
        shape = list(self.shape)
        parts = whole
        for axis in reversed(range(len(shape))):
            at, placement = len(shape) - 1 - axis, placements[axis]  # `at` axes are in front already
            if isinstance(placement, PlacementShard):
                size = whole.shape[placement.dim]
                shape[axis], chunk = self._chunks(size, shape[axis])
                end = shape[axis] * chunk - size
                if end:
                    self._refuse_uneven(whole.shape, placement.dim, shape[axis], chunk)
                placements[axis] = PlacementShard(placement.dim, size if end else None)
                dim = at + placement.dim
                parts = _lengthen(parts, dim, end).unflatten(dim, (shape[axis], chunk)).movedim(dim, 0)
            elif isinstance(placement, PlacementPartial):
                parts = _terms(parts, shape[axis], placement.op)
            else:
                parts = parts.unsqueeze(0)
        coords = compute_distribution_to_mesh_mapping(shape, self.grid, self._config.mesh_offset_override)
        held = None if len(coords) == math.prod(self.grid) else tuple(coords)
        block = take_box(_deal(parts, shape, self.grid, coords[0]), self.grid)
        return block, TensorTopology(shape, placements, coords), held

    def _refuse_uneven(self, whole: Sequence[int], dim: int, places: int, chunk: int) -> None:
        """Tell what the original refuses: a chunk that is smaller than the others, or axes with fewer chunks."""
        count, last = -(-whole[dim] // chunk), whole[dim] % chunk
        if last:
            full, rest = ([side if at == dim else size for at, size in enumerate(whole)] for side in (chunk, last))
            reason = f"Shard shape mismatch: expected Shape({full}) but got Shape({rest})"
        else:
            total = math.prod(self.shape)
            reason = (
                f"ND sharding requires the number of chunks {total // places * count} to match the mesh dimension size "
                f"{total}"
            )
        refuse_addition(reason, f"pad dim {dim} to {places * chunk}")

    def _count_dims(self, rank: int) -> list[Placement]:
        given = self._config.placements
        dims = iter(check_dims([each.dim for each in given if isinstance(each, PlacementShard)], rank))
        return [PlacementShard(next(dims)) if isinstance(each, PlacementShard) else each for each in given]

    def _chunks(self, size: int, places: int) -> tuple[int, int]:
        """How many chunks of which size: 10 over 8 is 5 of 2, and 9 over 8 is 8 of 2 of which 7 are padding."""
        chunk = -(-size // places)
        leaves_some_out = len(self.shape) == 1 and not self.uneven and chunk and size % chunk == 0
        return (size // chunk, chunk) if leaves_some_out else (places, chunk)

    def __repr__(self) -> str:
        return f"TensorToMesh({self.mesh}, {self._config})"


def _lengthen(values: torch.Tensor, dim: int, end: int) -> torch.Tensor:
    if not end:
        return values
    return torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1 - dim) + [0, end])


def _terms(values: torch.Tensor, places: int, op: str) -> torch.Tensor:
    """Terms that make up the values: for a sum the first has them and the others nothing."""
    if op != "sum":
        return values.unsqueeze(0)
    return torch.cat([values.unsqueeze(0), values.new_zeros(places - 1, *values.shape)])


def _deal(parts: Block, shape: Sequence[int], grid: Sequence[int], start: Sequence[int]) -> Block:
    """Parts in the order of a distribution shape as a block: mesh axes first, zeros for devices without a part."""
    places, rest = len(shape), parts.shape[len(shape) :]
    if all(size == 1 for size in parts.shape[:places]):
        return parts.reshape(*(1,) * len(grid), *rest)
    if tuple(shape) == tuple(grid):
        return parts
    if _is_box(shape, grid):
        block = parts.new_zeros(*grid, *rest)
        block[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] = parts
        return block
    flat = parts.expand(*shape, *rest).flatten(0, places - 1)
    if len(flat) < math.prod(grid):
        flat = torch.cat([flat, flat.new_zeros(math.prod(grid) - len(flat), *rest)])
    return flat.reshape(*grid, *flat.shape[1:])


def check_mesh(mesh: Any) -> None:
    """An error for what is no mesh."""
    if not isinstance(mesh, MeshDevice):
        raise ArgumentError(f"{mesh!r} is not a MeshDevice", fix="ttnn.open_mesh_device(ttnn.MeshShape(2, 4))")


def mapper_of(given: Any, device: MeshDevice | None) -> TensorToMesh | None:
    """The mapper of an argument, made for the mesh that the tensor goes to; None where there is none."""
    if given is None:
        return None
    if not isinstance(given, (TensorToMesh, ReplicateTensorToMeshWrapper)):
        raise ArgumentError(f"mesh_mapper={given!r} is not a mapper", fix="ttnn.ShardTensorToMesh(mesh, dim=0)")
    mapper = given.unwrap()
    if device is not None and mapper.grid != tuple(device.shape):
        raise OperandError(
            f"the mapper is for a mesh of shape {list(mapper.grid)} and the device has shape {list(device.shape)}",
            fix="make the mapper with the mesh that the tensor goes to",
        )
    return mapper


CppTensorToMesh = TensorToMesh


class ReplicateTensorToMeshWrapper:
    """A mapper that says of itself that it replicates."""

    def __init__(self, mapper: TensorToMesh) -> None:
        self._mapper = mapper

    def unwrap(self) -> TensorToMesh:
        """The mapper inside."""
        return self._mapper


def create_mesh_mapper(mesh_device: MeshDevice, config: MeshMapperConfig, *, uneven: bool = False) -> TensorToMesh:
    """The mapper of a config."""
    if not isinstance(config, MeshMapperConfig):
        raise ArgumentError(f"{config!r} is not a MeshMapperConfig")
    return TensorToMesh(mesh_device, config, uneven)


def replicate_tensor_to_mesh_mapper(mesh_device: MeshDevice) -> TensorToMesh:
    """All of a tensor on every device."""
    check_mesh(mesh_device)
    return TensorToMesh(mesh_device, MeshMapperConfig([REPLICATE], [math.prod(mesh_device.shape)]))


def shard_tensor_to_mesh_mapper(mesh_device: MeshDevice, dim: int, *, uneven: bool = False) -> TensorToMesh:
    """A dim cut over all devices, row-major."""
    check_mesh(mesh_device)
    expect("dim", dim, int, fix="give the number of a dim, such as dim=0")
    config = MeshMapperConfig([PlacementShard(dim)], [math.prod(mesh_device.shape)])
    return TensorToMesh(mesh_device, config, uneven)


ReplicateTensorToMesh = replicate_tensor_to_mesh_mapper
ShardTensorToMesh = shard_tensor_to_mesh_mapper


def ShardTensor2dMesh(
    mesh_device: MeshDevice, mesh_shape: Sequence[int], dims: Sequence[int | None], *, uneven: bool = False
) -> TensorToMesh:
    """One dim cut over the rows and one over the columns of a grid; None replicates."""
    if len(tuple(mesh_shape)) != 2 or len(tuple(dims)) != 2:
        raise ArgumentError(f"a grid has two axes: got mesh_shape={mesh_shape}, dims={dims}", fix="create_mesh_mapper")
    placements = [REPLICATE if dim is None else PlacementShard(dim) for dim in dims]
    return TensorToMesh(mesh_device, MeshMapperConfig(placements, mesh_shape), uneven)
