"""Between the host and the devices: moving, allocating, and writing in place.

A tensor of one part goes to every device. One with the parts of a mesh goes to the devices at the same coordinates,
which the mesh has to have. Writing keeps a tensor's array and its address, so that traces see the new values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.calling import op
from meshloom.ttnn.tensor.boxes import box_for, gather_parts, held_shape, take_box
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import DRAM_MEMORY_CONFIG, MemoryConfig
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import TILE, Tensor
from meshloom.ttnn.tensor.topology import ALONE, REPLICATE, TensorTopology

Queue = int | None  # a queue by its number, the thread's for None
Lying = tuple[Block, TensorTopology, "tuple[MeshCoordinate, ...] | None"]


def replicated(device: MeshDevice) -> TensorTopology:
    """The label of what all devices hold alike, as one axis over all of them."""
    count = math.prod(device.shape)
    return TensorTopology([count], [REPLICATE], coordinates(device.shape))


def coordinates(grid: Sequence[int]) -> list[MeshCoordinate]:
    """Every coordinate of a grid, row-major."""
    return [MeshCoordinate(place) for place in itertools.product(*map(range, grid))]


def lying(tensor: Tensor, device: MeshDevice) -> Lying:
    """How a tensor's parts lie on a mesh: its block, label and devices there. May share memory."""
    grid, block = device.grid, tensor.block
    is_single = math.prod(tensor.grid) == 1
    if tensor.grid == grid and not (is_single and tensor.tensor_topology() == ALONE):
        return box_for(tensor, grid), tensor.tensor_topology(), tensor._coords
    if is_single:
        return block.reshape(*(1,) * len(grid), *tensor.shape), replicated(device), None
    places = tensor.device_coords()
    for place in places:
        if len(place) != len(grid) or any(c >= size for c, size in zip(place, grid, strict=True)):
            raise OperandError(
                f"Coordinate {place} not found in mesh {device}",
                tensor=f"lies on a mesh of {list(tensor.grid)}",
                fix="map it for this mesh: from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim))",
            )
    box = tuple(slice(0, min(a, b)) for a, b in zip(tensor.grid, grid, strict=True))
    full = gather_parts(tensor).block.expand(*tensor.grid, *tensor.shape)
    there = block.new_zeros(*grid, *tensor.shape)
    there[box] = full[box]
    return take_box(there, grid), tensor.tensor_topology(), tuple(places)


def move_to(
    tensor: Tensor, device: MeshDevice, memory_config: MemoryConfig, cq_id: Queue = None, *, copies: bool = True
) -> Tensor:
    """A tensor on a mesh, in a certain memory."""
    if not isinstance(device, MeshDevice):
        raise ArgumentError(f"{device!r} is not a MeshDevice", fix="ttnn.open_mesh_device(ttnn.MeshShape(2, 4))")
    block, label, coords = lying(tensor, device)
    own, where = block.clone() if copies else block, {"grid": device.grid, "device": device, "coords": coords}
    made = tensor._like(own, **where, topology=label, memory_config=memory_config)
    queues.transfer(made, cq_id, writes=True)
    return made


@op("to_device")
def to_device(tensor, device, memory_config=None, *, queue_id: Queue = None, cq_id: Queue = None) -> Tensor:
    """On a mesh: a single tensor on every device, parts each on its own. From another mesh it goes by the host."""
    check_tensor("to_device", tensor)
    if tensor.device() is device and memory_config in (None, tensor.memory_config()):
        return share(tensor)
    config = memory_config or tensor.memory_config()
    source = tensor if tensor.device() is None else from_device(tensor, queue_id=queue_id)
    return move_to(source, device, config, queue_id if queue_id is not None else cq_id)


def share(tensor: Tensor, coords: tuple[MeshCoordinate, ...] | None = None) -> Tensor:
    """Another tensor with the same values, the same memory and the same label, maybe on fewer devices."""
    return tensor.shared_by(tensor._like(tensor.block, coords=coords or tensor._coords, room=tensor._room))


@op("from_device")
def from_device(tensor: Tensor, blocking=True, *, queue_id: Queue = None, cq_id: Queue = None) -> Tensor:
    """A copy on the host, with the same parts."""
    check_tensor("from_device", tensor)
    if tensor.device() is None:
        return tensor
    block = tensor.block
    queues.transfer(tensor, queue_id if queue_id is not None else cq_id, writes=False)
    return tensor._like(block.clone(), device=None, home=None)


def check_tensor(name: str, tensor: object) -> None:
    """An error unless it is a tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"ttnn.{name} takes a ttnn.Tensor, not a {type(tensor).__name__}")


# writing in place


@op("copy_host_to_device_tensor")
def copy_host_to_device_tensor(host_tensor, device_tensor, cq_id: Queue = None) -> None:
    """Write a tensor of the host into one of the devices, which takes its label; a single part goes to all."""
    _check_pair("copy_host_to_device_tensor", host_tensor, device_tensor)
    device = device_tensor.device()
    assert device is not None
    _check_alike("Host tensor has different", host_tensor, device_tensor)
    block, label, _ = lying(host_tensor, device)
    queues.transfer(device_tensor, cq_id, writes=True)
    device_tensor.write(block, label=label)
    device_tensor.update_tensor_topology(label)


@op("copy_device_to_host_tensor")
def copy_device_to_host_tensor(device_tensor, host_tensor, blocking=True, cq_id: Queue = None) -> None:
    """Write a tensor of the devices into one of the host, which takes its label."""
    _check_pair("copy_device_to_host_tensor", host_tensor, device_tensor)
    _check_alike("Host tensor has different", host_tensor, device_tensor)
    if math.prod(host_tensor.grid) != math.prod(device_tensor.grid):
        raise OperandError(
            f"the host tensor has {math.prod(host_tensor.grid)} parts, the devices {math.prod(device_tensor.grid)}",
            fix="ttnn.allocate_tensor_on_host(device_tensor.spec, mesh_device)",
        )
    queues.transfer(device_tensor, cq_id, writes=False)
    block = box_for(device_tensor, host_tensor.grid)
    if host_tensor.grid != device_tensor.grid:
        block = gather_parts(device_tensor).block.expand(*device_tensor.grid, *device_tensor.shape)
        block = take_box(block.reshape(*host_tensor.grid, *host_tensor.shape), host_tensor.grid)
    host_tensor.write(block, label=device_tensor.tensor_topology())
    host_tensor.update_tensor_topology(device_tensor.tensor_topology())


def _check_pair(name: str, host_tensor: Any, device_tensor: Any) -> None:
    check_tensor(name, host_tensor)
    check_tensor(name, device_tensor)
    if host_tensor.device() is not None or device_tensor.device() is None:
        raise OperandError(
            f"ttnn.{name}: host_tensor is on {host_tensor.device() or 'the host'}, device_tensor on "
            f"{device_tensor.device() or 'the host'}",
            fix="give the tensor of the host and that of the devices in the order of their names",
        )


def _check_alike(text: str, a: Tensor, b: Tensor) -> None:
    for what, one, other in (
        ("shape", list(a.shape), list(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("page config", (a.layout, a.tile), (b.layout, b.tile)),
    ):
        if one != other:
            raise OperandError(f"{text} {what}", host=one, device=other)


# room without values


@op("allocate_tensor_on_device")
def allocate_tensor_on_device(*args: Any, **kwargs: Any) -> Tensor:
    """Room on every device: `(spec, mesh_device)` or `(shape, dtype, layout, mesh_device, memory_config)`.

    Every device has a part of its own in it from the start, so that any values can be written into it in place.
    """
    shape, dtype, layout, device, config, tile = _read_form("allocate_tensor_on_device", *args, **kwargs)
    grid = device.grid
    block = torch.zeros(*held_shape(grid), *shape, dtype=dtype.store)
    label = TensorTopology(grid, [REPLICATE] * len(grid), coordinates(grid))
    made = Tensor(block, grid, dtype, layout, label, device, config, tile)
    found = queues.found_at(made._room, block, len(grid))
    if found is not None:
        made._block = found
    return made


@op("allocate_tensor_on_host")
def allocate_tensor_on_host(*args: Any, **kwargs: Any) -> Tensor:
    """A tensor of the host with a part for every device: arguments as for `allocate_tensor_on_device`."""
    shape, dtype, layout, device, config, tile = _read_form("allocate_tensor_on_host", *args, **kwargs)
    grid = device.grid
    block = torch.zeros(*held_shape(grid), *shape, dtype=dtype.store)
    return Tensor(block, grid, dtype, layout, ALONE, None, config, tile)


def _read_form(name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Shape, dtype, layout, device, memory config and tile, of either form of the call."""
    words: tuple[str, ...] = ("shape", "dtype", "layout", "mesh_device", "memory_config")
    if "tensor_spec" in kwargs or (args and hasattr(args[0], "dtype")):
        words = ("tensor_spec", "mesh_device")
    given = {**dict(zip(words, args, strict=False)), **kwargs}
    unknown = [each for each in given if each not in words]
    missing = [each for each in words if each not in given and each != "memory_config"]
    if len(args) > len(words) or unknown or missing:
        raise ArgumentError(
            f"ttnn.{name} takes (tensor_spec, mesh_device) or (shape, dtype, layout, mesh_device, memory_config)",
            missing=", ".join(missing) or None,
            unknown=", ".join(unknown) or None,
        )
    device = given["mesh_device"]
    if not isinstance(device, MeshDevice):
        raise ArgumentError(f"ttnn.{name}: {device!r} is not a MeshDevice")
    if words[0] == "tensor_spec":
        spec = given["tensor_spec"]
        return spec.shape, spec.dtype, spec.layout, device, spec.memory_config, spec.tile
    dtype, layout = given["dtype"], given["layout"]
    if not isinstance(dtype, DataType) or not isinstance(layout, Layout):
        raise ArgumentError(f"ttnn.{name}: {dtype!r} and {layout!r} are no dtype and layout")
    return given["shape"], dtype, layout, device, given.get("memory_config") or DRAM_MEMORY_CONFIG, TILE
