"""Between meshloom and DTensor: meshes, placements and tensors in both directions, and the names that its users type.

A DTensor has one device per process. So a device mesh becomes a mesh that is split into one device per process, and a
tensor becomes a DTensor where each process holds one device of its mesh, or where there is one process alone: that one
is then the only device of the device mesh. Gradients flow through both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshloom.comms import WORLD
from meshloom.engines.layout import from_block, short_name
from meshloom.errors import ArgumentError, MeshError, PlacementError, expect
from meshloom.mesh import HERE, Mesh
from meshloom.placement import Partial, Placement, Placements, Replicate, Shard, Topology
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import _number, _pad, distribute, open_mesh
from meshloom.tensor.gradient_sums import watch_dense
from meshloom.tensor.moving import redistribute, shadow_of, to_dense, to_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_OURS = {"sum": "sum", "avg": "mean", "max": "max", "min": "min", "product": "prod"}  # reductions, by torch's names
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The mesh of a torch `DeviceMesh`, opened: the same shape and names, one device per process.

    >>> import tempfile, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    >>> from_device_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
    Mesh(dp=1, tp=1)
    >>> dist.destroy_process_group()
    """
    _check_ranks(device_mesh)
    shape = tuple(device_mesh.mesh.shape)
    mesh = open_mesh(shape, device_mesh.mesh_dim_names, processes=shape)
    WORLD.device_meshes[mesh] = dist.group.WORLD, device_mesh
    return mesh


def _check_ranks(device_mesh: object) -> None:
    ranks = getattr(device_mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor):
        raise ArgumentError(f"{device_mesh!r:.80} is not a DeviceMesh", fix="loom.open_mesh((2, 4)) opens a mesh")
    count = dist.get_world_size() if dist.is_initialized() else 1
    if ranks.flatten().tolist() != list(range(count)):
        raise MeshError(
            f"a mesh has all {count} processes in the order of their ranks, and this device mesh has others",
            asked=str(device_mesh),
            fix=f"use the device mesh of all processes: init_device_mesh(device_type, shape) of {count} devices",
        )


def from_dtensor(dtensor: DTensor) -> Tensor:
    """A torch `DTensor` as a tensor on a mesh: the same placements, the same memory where nothing is padded.

    >>> import tempfile, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    >>> device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> from_dtensor(distribute_tensor(torch.arange(3), device_mesh, [Shard(0)]))
    Tensor i64[3](S(0)) on Mesh(tp=1)
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    placements = getattr(dtensor, "placements", None)
    if placements is None or not hasattr(dtensor, "device_mesh"):
        raise ArgumentError(
            f"from_dtensor takes a DTensor, not a {type(dtensor).__name__}", fix="loom.distribute takes dense tensors"
        )
    mesh = _mesh_of(dtensor.device_mesh)
    placed = tuple(_ours(each) for each in placements)
    target = Topology(mesh, placed, tuple(dtensor.shape), short_name(dtensor.dtype))
    topology = _nearest_shared(target)
    if topology is not target:
        dtensor = dtensor.redistribute(placements=_all_theirs(topology))
    local = dtensor.to_local(grad_placements=_all_theirs(topology.reduced))
    expected = topology.extent(mesh.local_offset)
    if tuple(local.shape) != expected:
        raise PlacementError(
            f"this process holds {list(local.shape)} of the DTensor and its placements give it {list(expected)}",
            tensor=topology,
            fix="loom.distribute(dtensor.full_tensor(), mesh, placements)",
        )
    block = _pad(local, topology.local_shape).view(topology.block_shape)
    return redistribute(_number(Tensor(topology, from_block(block, topology))), placed)


def _nearest_shared(topology: Topology) -> Topology:
    """The nearest topology with the same chunks in both worlds: 5 over (2, 2) is 2, 1, 2, 0 here and 2, 1, 1, 1 there.

    Where the axes before the last cut a dim unevenly, only the first of them is kept.
    """
    uneven = [dim for dim, parts in enumerate(topology.shards) if topology.shape[dim] % math.prod(parts[:-1])]
    dropped = {axis for dim in uneven for axis in topology.axes_of[dim][1:]}
    if not dropped:
        return topology
    return topology.with_placements(
        tuple(Replicate() if axis in dropped else each for axis, each in enumerate(topology.placements))
    )


def _mesh_of(device_mesh: Any) -> Mesh:
    """The mesh of a device mesh that was seen before, or a new one."""
    found = next((mesh for mesh, (_, known) in WORLD.device_meshes.items() if known is device_mesh), None)
    return found if found is not None else from_device_mesh(device_mesh)


def _ours(placement: Placement) -> Placement:
    """A placement of torch as one of ours; ours stay as they are."""
    if isinstance(placement, (Shard, Replicate, Partial)):
        return placement
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial" and placement.reduce_op in _OURS:
        return Partial(_OURS[placement.reduce_op])
    raise PlacementError(
        f"{placement!r} of a DTensor has no counterpart on a mesh",
        fix="redistribute the DTensor to Shard, Replicate or Partial first, or loom.distribute(d.full_tensor(), mesh)",
    )


def _theirs(placement: Placement) -> Any:
    """A placement of ours as one of torch's."""
    from torch.distributed import tensor

    if isinstance(placement, Shard):
        return tensor.Shard(placement.dim)
    return tensor.Replicate() if isinstance(placement, Replicate) else tensor.Partial(_THEIRS[placement.op])


def to_dtensor(self: Tensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The tensor as a torch `DTensor` with the same placements, on a device mesh of the same axes.

    Each process must hold one device of the mesh. One process alone is a device mesh of one: the tensor is whole there,
    and partial sums are reduced.

    >>> import tempfile, torch.distributed as dist
    >>> import meshloom as loom
    >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    >>> x = loom.arange(3, mesh=loom.open_mesh((2,), axes=("tp",)), placements="S(0)")
    >>> x.to_dtensor().placements
    (Shard(dim=0),)
    >>> x.to_dtensor().to_local()
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    tensor = shadow_of(self)
    _check_one_device(tensor)
    where = device_mesh if device_mesh is not None else _device_mesh_of(tensor)
    if tuple(where.mesh.shape) != tensor.mesh.processes:
        raise MeshError(
            f"the device mesh has shape {tuple(where.mesh.shape)} and the processes are {tensor.mesh.processes}",
            tensor=tensor.topology,
            fix="leave device_mesh out",
        )
    if not tensor.mesh.is_split:
        return _make_dtensor(to_dense(tensor, "to_dtensor", on_host=True), tensor.topology.reduced, where)
    shared = _nearest_shared(tensor.topology)
    found = _make_dtensor(_local_part(redistribute(tensor, shared.placements)), shared, where)
    return found if shared is tensor.topology else found.redistribute(placements=_all_theirs(tensor.topology))


def _make_dtensor(local: torch.Tensor, topology: Topology, where: Any) -> DTensor:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(topology.shape)
    return DTensor.from_local(
        watch_dense(local), where, _all_theirs(topology), run_check=False, shape=shape, stride=_strides(shape)
    )


def _all_theirs(topology: Topology) -> list[Any]:
    return [_theirs(each) for each in topology.placements]


def _check_one_device(tensor: Tensor) -> None:
    """An error unless this process holds one device, or is alone."""
    mesh = tensor.mesh
    if not dist.is_initialized():
        raise ArgumentError(
            "a DTensor needs torch's processes, and they are not initialised",
            tensor=tensor.topology,
            fix="start with torchrun and open the mesh, or torch.distributed.init_process_group(...)",
        )
    if mesh.ranks:
        raise MeshError(
            f"a DTensor is on all processes, and this tensor is held by ranks {list(mesh.ranks)}",
            tensor=tensor.topology,
            fix="bring it to a mesh of all processes first: x.redistribute(placements, mesh=mesh)",
        )
    if math.prod(mesh.local_shape) != 1 and (mesh.is_split or HERE.count > 1):
        raise MeshError(
            f"a DTensor has one device per process, and this process holds {math.prod(mesh.local_shape)} of them",
            tensor=tensor.topology,
            fix=f"use a mesh of {HERE.count} devices, such as loom.open_mesh({mesh.processes}, {mesh.axes})",
        )


def _device_mesh_of(tensor: Tensor) -> Any:
    """The device mesh of a tensor's mesh; all processes make it together, once."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = tensor.mesh
    world, found = WORLD.device_meshes.get(mesh, (None, None))
    if found is None or world is not dist.group.WORLD:  # that of processes which are gone
        found = init_device_mesh(tensor.device.type, mesh.processes, mesh_dim_names=mesh.axes)
        WORLD.device_meshes[mesh] = dist.group.WORLD, found
    return found


def _local_part(tensor: Tensor) -> torch.Tensor:
    """What the one device of this process holds, padding left out."""
    part = tensor.block[(0,) * tensor.mesh.ndim]
    for dim, extent in enumerate(tensor.topology.extent(tensor.mesh.local_offset)):
        part = part.narrow(dim, 0, extent)
    return part


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor: (4, 3) has (3, 1)."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Placements | Sequence[Any] | None = None,
) -> Tensor:
    """As `torch.distributed.tensor.distribute_tensor`, on a mesh: without placements it is replicated.

    Takes a mesh or a `DeviceMesh`, and placements of meshloom or of torch. `loom.distribute` shards dim 0 instead when
    placements are left out.

    >>> import meshloom as loom
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    >>> distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(1)]).topology.notation
    'f32[8, 8](R, S(1))'
    >>> distribute_tensor(torch.ones(8, 8), mesh).topology.notation
    'f32[8, 8](R, R)'
    """
    expect("tensor", tensor, torch.Tensor, fix="loom.distribute takes lists and arrays as well")
    mesh = device_mesh if device_mesh is None or isinstance(device_mesh, Mesh) else _mesh_of(device_mesh)
    if isinstance(placements, (list, tuple)):
        placements = [each if isinstance(each, str) else _ours(each) for each in placements]
    return distribute(tensor, mesh, {} if placements is None else placements)


def full_tensor(self: Tensor) -> torch.Tensor:
    """The global value as one dense torch tensor, as `DTensor.full_tensor()`; the same as `to_torch()`.

    >>> import meshloom as loom
    >>> loom.arange(5, mesh=loom.open_mesh((2,))).full_tensor()
    tensor([0, 1, 2, 3, 4])
    """
    return to_torch(self)


def to_local(self: Tensor) -> torch.Tensor:
    """What the devices of this process hold, as `DTensor.to_local()`: one shard, so they must all hold the same.

    >>> import meshloom as loom
    >>> x = loom.ones(2, mesh=loom.open_mesh((4,), axes=("dp",)), placements="R")
    >>> x.to_local()
    tensor([1., 1.])
    """
    mesh = self.topology.mesh
    different = [
        axis
        for axis, size, placement in zip(mesh.axes, mesh.local_shape, self.topology.placements, strict=True)
        if size > 1 and not isinstance(placement, Replicate)
    ]
    if different:
        first = mesh.local_offset
        raise PlacementError(
            f"this process holds {math.prod(mesh.local_shape)} devices, and they hold different parts along "
            f"{' and '.join(different)}",
            tensor=self.topology,
            fix=f"x.shard_at({first}) is the part of one device, x.block has all of them, x.to_torch() is the whole",
        )
    return self.shard_at(mesh.local_offset)


# The methods of a tensor that are written here; `tensor.methods` attaches them.
METHODS: dict[str, Callable[..., Any]] = {
    "to_dtensor": to_dtensor,
    "full_tensor": full_tensor,
    "to_local": to_local,
}
