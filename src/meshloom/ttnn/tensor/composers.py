"""From the parts of a mesh to one tensor: by a composer that says along which dims, or by what the label says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshloom.engines.reductions import REDUCTIONS
from meshloom.errors import ArgumentError, OperandError
from meshloom.mesh.process import number_of
from meshloom.runtime import MeshCoordinate, MeshShape
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.tensor.mappers import (
    UNSET,
    check_count,
    check_dims,
    check_mesh,
    compute_distribution_to_mesh_mapping,
    overrides,
)
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.topology import Placement, PlacementPartial, PlacementShard, TensorTopology

if TYPE_CHECKING:
    from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "ConcatMesh2dToTensor ConcatMeshToTensor CppMeshToTensor ListMeshToTensor MeshComposerConfig MeshToTensor "
    "concat_mesh_to_tensor_composer create_mesh_composer"
).split()


class MeshComposerConfig:
    """Along which dim the parts of each axis of a distribution shape are put together.

    >>> MeshComposerConfig([0, -1])
    MeshComposerConfig(dims: [0, -1])
    """

    def __init__(
        self,
        dims: Sequence[int] | int = UNSET,
        mesh_shape_override: Any = None,
        *,
        row_dim: int | None = None,
        col_dim: int | None = None,
    ) -> None:
        if isinstance(dims, int):  # MeshComposerConfig(row_dim, col_dim)
            dims, mesh_shape_override = (dims, mesh_shape_override), None
        pair = (row_dim, col_dim) if dims is UNSET else tuple(dims)
        if not all(isinstance(dim, int) for dim in pair):
            raise ArgumentError(f"dims of a composer are numbers, not {pair}")
        self.dims = [int(dim) for dim in pair if dim is not None]
        self.mesh_shape_override = None if mesh_shape_override is None else MeshShape(list(mesh_shape_override))
        self.mesh_offset_override = ()

    def __repr__(self) -> str:
        return f"MeshComposerConfig(dims: {self.dims}{overrides(self)})"


class MeshToTensor:
    """Puts the parts of a mesh together along one dim for every axis of a distribution shape.

    A shape that is smaller than the mesh (`mesh_shape_override`) is that many devices from the first: a box of the mesh
    if it has as many axes and fits, else the first row-major.
    """

    def __init__(self, mesh: MeshDevice | None, config: MeshComposerConfig) -> None:
        self.mesh, self._config = mesh, config
        self.shape = tuple(config.mesh_shape_override or (mesh.shape if mesh is not None else ())) or None
        if self.shape is None:
            return
        if mesh is not None:
            compute_distribution_to_mesh_mapping(self.shape, mesh.shape)
        check_count(self.shape, len(config.dims), "dimensions", config)

    def config(self) -> MeshComposerConfig:
        """The config it was made from."""
        return self._config

    def compose(self, tensor: Tensor) -> torch.Tensor:
        """The whole of a tensor's parts."""
        dims = check_dims(self._config.dims, len(tensor.shape))
        shape, coords = self._places(tensor)
        sizes = _padded_dims(tensor)
        label = tensor.tensor_topology()
        is_all = len(coords) == len(label.mesh_coords())
        if sizes and not (is_all and _agrees(tensor, dict(zip(dims, shape, strict=True)))):
            return _join_cut(tensor, coords, shape, dims)
        whole = join_axes(in_order(tensor, coords).unflatten(0, shape), dims)
        for dim, size in sizes.items():
            whole = whole.narrow(dim, 0, size)
        return whole

    def _places(self, tensor: Tensor) -> tuple[tuple[int, ...], Sequence[MeshCoordinate]]:
        held = tensor.device_coords()
        if self.mesh is not None and math.prod(tensor.grid) < self.mesh.get_num_devices():
            listed = compute_distribution_to_mesh_mapping(self.shape or (), self.mesh.shape)
            outside = next((place for place in listed if not _is_inside(place, tensor.grid)), None)
            if outside is not None:
                raise OperandError(f"Coordinate {outside} is out of bounds for shape {MeshShape(tensor.grid)}")
        if self.shape is None:
            return (len(held),), held
        places = _from_the_first(self.shape, tensor, held)
        if len(self.shape) == 1:
            return (len(places),), places
        if len(places) != math.prod(self.shape):
            raise OperandError(
                f"ND composition requires the number of tensors {len(held)} to match the mesh shape "
                f"{MeshShape(self.shape)}",
                fix="use ttnn.ConcatMeshToTensor, or no composer",
            )
        return self.shape, places

    def __repr__(self) -> str:
        return f"MeshToTensor({self._config})"


CppMeshToTensor = MeshToTensor


class ListMeshToTensor:
    """Keeps the parts apart: `to_torch` gives a list with one tensor for each device, row-major."""

    def __init__(self, mesh_device: MeshDevice | None = None) -> None:
        if mesh_device is not None:
            check_mesh(mesh_device)

    def compose(self, tensor: Tensor) -> list[torch.Tensor]:
        """What every device holds, without padding of uneven dims."""
        return [cut(tensor, place) for place in tensor.device_coords()]


def _from_the_first(shape: Sequence[int], tensor: Tensor, held: Sequence[MeshCoordinate]) -> Sequence[MeshCoordinate]:
    """The devices that a distribution shape stands for; of a tensor on part of a mesh, among those that hold a part."""
    count = math.prod(shape)
    if count > math.prod(tensor.grid):
        return held
    listed = compute_distribution_to_mesh_mapping(shape, tensor.grid)
    if tensor._coords is None:
        return listed
    having = [place for place in listed if place in tensor._coords]
    return having if len(having) == min(count, len(held)) else held[:count]


def _is_inside(place: Sequence[int], grid: Sequence[int]) -> bool:
    return len(place) == len(grid) and all(c < size for c, size in zip(place, grid, strict=True))


def in_order(tensor: Tensor, coords: Sequence[MeshCoordinate]) -> Block:
    """The parts of some devices, one behind the other along a new first dim."""
    grid = tensor.grid
    full = tensor.block.expand(*grid, *tensor.shape).flatten(0, len(grid) - 1)
    numbers = [number_of(place, grid) for place in coords]
    return full if numbers == list(range(len(full))) else full[numbers]


def join_axes(parts: Block, dims: Sequence[int]) -> Block:
    """Leading axes put together, each along its dim (counted among those of a part).

    >>> join_axes(torch.arange(8).reshape(2, 2, 1, 2), [0, 1])
    tensor([[0, 1, 2, 3],
            [4, 5, 6, 7]])
    """
    for axis in reversed(range(len(dims))):
        place = axis + dims[axis]
        parts = parts.movedim(axis, place).flatten(place, place + 1)
    return parts


# padding of uneven dims


def _padded_dims(tensor: Tensor) -> dict[int, int]:
    """The dims whose end is padding, with the size of the whole."""
    rank, placements = len(tensor.shape), tensor.tensor_topology().placements()
    return {p.dim % rank: p.size for p in placements if isinstance(p, PlacementShard) and p.size is not None}


def _agrees(tensor: Tensor, asked: dict[int, int]) -> bool:
    """Whether a composer joins the padded dims just as they were cut, so that the padding lies at the end."""
    joined = tensor.tensor_topology().join(tensor.shape)
    return all(asked.get(dim) == math.prod(joined.shards[dim]) for dim in _padded_dims(tensor))


def _join_cut(
    tensor: Tensor, coords: Sequence[MeshCoordinate], shape: Sequence[int], dims: Sequence[int]
) -> torch.Tensor:
    """Parts without their padding, joined axis after axis, the last first."""
    parts = [cut(tensor, place) for place in coords]
    for size, dim in reversed(list(zip(shape, dims, strict=True))):
        rows = [parts[start : start + size] for start in range(0, len(parts), size)]
        if any(_other_sizes(part, dim) != _other_sizes(row[0], dim) for row in rows for part in row):
            raise OperandError(
                f"the dims {list(dims)} of the composer are not those that the padded tensor was cut along",
                label=tensor.tensor_topology(),
                fix="ttnn.to_torch(x) without a composer",
            )
        parts = [torch.cat(row, dim) for row in rows]
    return parts[0]


def _other_sizes(part: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*part.shape[:dim], *part.shape[dim + 1 :])


def cut(tensor: Tensor, place: MeshCoordinate) -> torch.Tensor:
    """What the device at a coordinate holds of the whole: its part without padding of uneven dims."""
    values = tensor.part(place)
    for dim, (start, end) in enumerate(extents(tensor, place)):
        values = values.narrow(dim, 0, end - start)
    return values


def extents(tensor: Tensor, place: MeshCoordinate) -> list[tuple[int, int]]:
    """From where to where the part of a device goes in the whole, for every dim, as the label says."""
    starts = tensor.tensor_topology().offsets(tensor.shape).get(place)
    if starts is None:
        return [(0, size) for size in tensor.shape]
    sizes = _padded_dims(tensor)
    ends = [start + size for start, size in zip(starts, tensor.shape, strict=True)]
    ends = [min(end, sizes.get(dim, end)) for dim, end in enumerate(ends)]
    return [(min(start, end), end) for start, end in zip(starts, ends, strict=True)]


# by the label


def whole(tensor: Tensor) -> torch.Tensor:
    """The whole that the label says the parts make up; an error where it does not say."""
    label, held = tensor.tensor_topology(), tensor.device_coords()
    if len(held) == 1:
        return tensor.part(held[0])
    shape, placements, coords = tuple(label.distribution_shape()), label.placements(), label.mesh_coords()
    tells = set(coords) == set(held) and math.prod(shape) == len(coords) and len(placements) == len(shape)
    if not tells or not all(_is_told(tensor, label, each) for each in placements):
        raise OperandError(
            f"Can't convert a tensor distributed on {MeshShape(tensor.grid)} mesh to row-major logical tensor. Supply "
            "a mesh composer to concatenate multi-device shards.",
            label=label,
            fix="to_torch(x, mesh_composer=ttnn.ConcatMeshToTensor(dim=0)) or ttnn.ListMeshToTensor()",
        )
    parts = _by_label(tensor, shape, coords)
    for axis in reversed(range(parts.dim() - len(tensor.shape))):
        parts = _close_axis(parts, axis, *_axis(tensor, shape, placements, axis))
    for dim, size in _padded_dims(tensor).items():
        parts = parts.narrow(dim, 0, size)
    return parts.to(tensor.block.dtype)


def _is_told(tensor: Tensor, label: TensorTopology, placement: Placement) -> bool:
    """Whether a placement says how parts make up a whole: terms that can be summed, padding that is where it was."""
    if isinstance(placement, PlacementPartial):
        return placement.op in REDUCTIONS
    if not isinstance(placement, PlacementShard):
        return True
    rank = len(tensor.shape)
    if not -rank <= placement.dim < rank:
        return False
    return placement.size is None or label.join(tensor.shape).shape[placement.dim] >= placement.size


def _is_along_the_mesh(tensor: Tensor, shape: Sequence[int], coords: Sequence[MeshCoordinate]) -> bool:
    """Whether the axes of a label are those of the mesh, or its only axis is all of them."""
    fits = tuple(shape) == tensor.grid or tuple(shape) == (math.prod(tensor.grid),)
    return fits and [number_of(place, tensor.grid) for place in coords] == list(range(len(coords)))


def _by_label(tensor: Tensor, shape: Sequence[int], coords: Sequence[MeshCoordinate]) -> Block:
    if _is_along_the_mesh(tensor, shape, coords):
        return tensor.block
    return in_order(tensor, coords).reshape(*shape, *tensor.shape)


def _axis(tensor: Tensor, shape: Sequence[int], placements: Sequence[Placement], axis: int) -> tuple[int, Placement]:
    """The size of an axis of the parts and what it does."""
    if tuple(shape) != tensor.grid and tuple(shape) == (math.prod(tensor.grid),):
        return tensor.grid[axis], placements[0]
    return shape[axis], placements[axis]


def _close_axis(parts: Block, axis: int, size: int, placement: Placement) -> Block:
    """One axis less: its parts joined, its terms summed, or the first of equals."""
    if not isinstance(placement, (PlacementShard, PlacementPartial)):
        return parts.select(axis, 0)
    full = parts.expand(*parts.shape[:axis], size, *parts.shape[axis + 1 :])
    if isinstance(placement, PlacementPartial):
        return _combine(placement.op, full, axis)
    place = axis + placement.dim % (parts.dim() - axis - 1)
    return full.movedim(axis, place).flatten(place, place + 1)


def _combine(op: str, terms: Block, axis: int) -> Block:
    """Terms as the whole that they make up; sums of bfloat16 are wide."""
    is_wide = op == "mean" or (op in ("sum", "prod") and terms.dtype is torch.bfloat16)
    return REDUCTIONS[op].along(terms.float() if is_wide else terms, axis)


# factories


def create_mesh_composer(mesh_device: MeshDevice | None, config: MeshComposerConfig) -> MeshToTensor:
    """The composer of a config."""
    if not isinstance(config, MeshComposerConfig):
        raise ArgumentError(f"{config!r} is not a MeshComposerConfig")
    return MeshToTensor(mesh_device, config)


def concat_mesh_to_tensor_composer(mesh_device: Any = None, dim: int = UNSET) -> MeshToTensor:
    """All parts one behind the other along a dim; the mesh may be left out."""
    if dim is UNSET and isinstance(mesh_device, int):
        mesh_device, dim = None, mesh_device
    if not isinstance(dim, int):
        raise ArgumentError("a composer needs a dim", fix="ttnn.ConcatMeshToTensor(mesh_device, dim=0)")
    if mesh_device is None:
        return MeshToTensor(None, MeshComposerConfig([dim]))
    check_mesh(mesh_device)
    return MeshToTensor(mesh_device, MeshComposerConfig([dim], [math.prod(mesh_device.shape)]))


ConcatMeshToTensor = concat_mesh_to_tensor_composer


def ConcatMesh2dToTensor(
    mesh_device: MeshDevice | None = None, mesh_shape: Sequence[int] = (), dims: Sequence[int] = ()
) -> MeshToTensor:
    """Rows put together along one dim and columns along another."""
    if len(tuple(mesh_shape)) != 2 or len(tuple(dims)) != 2:
        raise ArgumentError(
            f"a grid has two axes: got mesh_shape={mesh_shape}, dims={dims}", fix="create_mesh_composer"
        )
    return MeshToTensor(mesh_device, MeshComposerConfig(dims, mesh_shape))
