"""The explicit layer under the tensors: devices, memory, buffers, workloads, queues, events, traces.

    open_mesh_device((2, 4))          a MeshDevice: cards, memory, queues; it has a Mesh (a value) and is closed
      create_mesh_buffer(...)         a MeshBuffer: one address on all devices, replicated or sharded; it is a block
      Program(kernel, reads, writes)  a Python kernel over what one device holds
      MeshWorkload().add_program      programs on ranges of coordinates
      mesh.queue(0).enqueue_...       in order on one queue; queues are ordered by events only
      mesh.capture()                  a Trace: replayed at the same addresses

Data goes down one way: `queue` takes a command (`commands`), the race detector (`races`) looks at it, a runner
(`runners`) runs it on the queue's thread, and `transfers` or `program` act: one array call on the block for all cards
where that is the same, else card by card through the protocol in `card`. `docs/runtime.md` tells it with pictures.

The names above load on first use; those of `meshloom.context`, which need no torch, are found here too.
"""

from importlib import import_module
from typing import Any

from meshloom.context import Event, HostTransfer, Log, Policy, State, state
from meshloom.errors import where

_LAZY = {
    "MeshShape": "geometry",
    "MeshCoordinate": "geometry",
    "MeshCoordinateRange": "geometry",
    "MeshType": "geometry",
    "MeshDevice": "device",
    "enqueue_mesh_workload": "device",
    "synchronize_mesh_device": "device",
    "close_mesh_device": "device",
    "open_mesh_device": "opening",
    "MeshBuffer": "buffer",
    "create_mesh_buffer": "buffer",
    "ReplicatedBufferConfig": "layouts",
    "ShardedBufferConfig": "layouts",
    "all_reduce": "buffer_collectives",
    "all_gather": "buffer_collectives",
    "reduce_scatter": "buffer_collectives",
    "all_reduce_host": "buffer_collectives",
    "all_gather_host": "buffer_collectives",
    "reduce_scatter_host": "buffer_collectives",
    "MeshDevicePy": "document_names",
    "MeshBufferPy": "document_names",
    "MeshWorkloadPy": "document_names",
    "SourceKernel": "card",
    "Program": "program",
    "MeshWorkload": "workload",
    "MeshCommandQueue": "queue",
    "MeshEvent": "events",
    "Trace": "trace",
    "capture": "trace",
    "VirtualDriver": "virtual",
    "VirtualCard": "virtual",
    "SimulatedClock": "virtual",
    "Fault": "virtual",
    "ProcessDriver": "drivers.process.driver",
    "ProcessCard": "drivers.process.driver",
    "Usage": "memory",
    "tilize": "tiles",
    "untilize": "tiles",
}

__all__ = ["Event", "Log", "Policy", "State", "HostTransfer", "state", "where", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'meshloom.runtime' has no attribute {name!r}")
    found = getattr(import_module(f"meshloom.runtime.{_LAZY[name]}"), name)
    globals()[name] = found
    return found
