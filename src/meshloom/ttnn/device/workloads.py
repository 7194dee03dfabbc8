"""Buffers and workloads of the runtime under the tensors, on a mesh device as TTNN spells it."""

from __future__ import annotations

from meshloom import runtime
from meshloom.runtime import MeshBuffer, MeshWorkload, Program
from meshloom.ttnn.device.mesh_device import MeshDevice

__all__ = ["MeshBuffer", "MeshWorkload", "Program", "create_mesh_buffer", "enqueue_mesh_workload"]


def create_mesh_buffer(mesh: MeshDevice, *args: object, **kwargs: object) -> MeshBuffer:
    """A buffer on every device of a mesh, as `runtime.create_mesh_buffer` makes it.

    >>> from meshloom import ttnn
    >>> with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh:
    ...     ttnn.create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 2), name="x")
    MeshBuffer(x: f32[4, 4] shards [2, 2], at 0x0 in dram)
    """
    return runtime.create_mesh_buffer(mesh.runtime, *args, **kwargs)


def enqueue_mesh_workload(mesh: MeshDevice, workload: MeshWorkload, blocking: bool = True, *, cq_id: int = 0) -> None:
    """Launch every program of a workload on its range; with `blocking`, return when all devices are done."""
    runtime.enqueue_mesh_workload(mesh.runtime, workload, blocking, cq_id=cq_id)
