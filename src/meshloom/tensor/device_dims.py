"""The devices that shard the first dim of a tensor as dims of their own, and back: the same array in other words.

Of f32[10, 8](S(0), S(0)) on Mesh(dp=2, ep=4) each device holds up to 2 rows: that is f32[2, 4, 2, 8](S(0), S(1)), with
zeros where a device holds fewer. Nothing moves. What follows acts on the rows of each device alone.
"""

from __future__ import annotations

from meshloom.placement import Placement, Shard, Topology
from meshloom.tensor.base import Tensor
from meshloom.tensor.moving import shadow_of


def split_devices(tensor: Tensor) -> Tensor:
    """Dim 0 cut into one dim for each mesh axis that shards it, in the order of the mesh, and the rows of a device.

    >>> import meshloom as loom
    >>> mesh = loom.Mesh(dp=2, ep=4)
    >>> split_devices(loom.ones(10, 8, mesh=mesh, placements="S(0), S(0)")).topology.notation
    'f32[2, 4, 2, 8](S(0), S(1))'
    """
    tensor = shadow_of(tensor)
    topology = tensor.topology
    local, axes = topology.mesh.local_shape, topology.axes_of[0]
    sizes = (*(local[axis] for axis in axes), topology.local_shape[0])
    return Tensor(split_topology(topology), tensor._data.unflatten(0, sizes))


def split_topology(topology: Topology) -> Topology:
    """Where `split_devices` puts a tensor."""
    axes = topology.axes_of[0]
    shape = (*topology.shards[0], topology.local_shape[0], *topology.shape[1:])
    return Topology(topology.mesh, _shifted(topology, axes), shape, topology.dtype)


def _shifted(topology: Topology, axes: tuple[int, ...]) -> tuple[Placement, ...]:
    def placed(axis: int, now: Placement) -> Placement:
        if axis in axes:
            return Shard(axes.index(axis))
        return Shard(now.dim + len(axes)) if isinstance(now, Shard) else now

    return tuple(placed(axis, now) for axis, now in enumerate(topology.placements))


def join_devices(tensor: Tensor, rows: Topology) -> Tensor:
    """Undo `split_devices`: dim 0 has the rows of a topology again, on the devices that have them there.

    What a device has beyond its rows must be zero.
    """
    tensor = shadow_of(tensor)
    count = len(rows.axes_of[0])
    target = Topology(rows.mesh, rows.placements, (rows.shape[0], *tensor.shape[count + 1 :]), tensor.topology.dtype)
    return Tensor(target, tensor._data.flatten(0, count))
