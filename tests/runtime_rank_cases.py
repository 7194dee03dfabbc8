"""What ranks run in `test_runtime_processes.py`: programs on the cards of a mesh that they split."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from meshloom.errors import MeshError, UnsupportedError
from meshloom.runtime import MeshCoordinateRange, MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from test_runtime_cards import Stranger, Strangers

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"layout": "replicated", "global_shape": (4, 8)},
    "sharded": {"layout": "sharded", "global_shape": (4, 8), "shard_shape": (2, 2)},
    "by columns": {"layout": "sharded", "global_shape": (4, 8), "shard_shape": (2, 2), "orientation": "col_major"},
    "half": {"layout": "sharded", "global_shape": (4, 8), "shard_shape": (0, 2)},
    "other half": {"layout": "sharded", "global_shape": (4, 8), "shard_shape": (2, 0), "orientation": "col_major"},
    "some devices": {"layout": "sharded", "global_shape": (4, 4), "shard_shape": (2, 2)},
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def transfers(slow: bool = False) -> dict[str, Any]:
    """Buffers of every layout: written, changed by kernels, written at one place, read in every way."""
    found: dict[str, Any] = {}
    with open_mesh_device((2, 4), dispatch="slow" if slow else "fast") as mesh:
        queue = mesh.queue()
        for name, layout in LAYOUTS.items():
            x = create_mesh_buffer(mesh, **layout)
            queue.enqueue_write(x, numbers(*layout["global_shape"]))
            first = queue.enqueue_read(x)
            workload = MeshWorkload()
            workload.add_program(None, Program(lambda x, by: x.mul_(by), updates=[x], args={"by": 3}))
            queue.enqueue_workload(workload)
            later = queue.enqueue_read(x, blocking=False)
            places = [(0, 0), (1, 1)] if name != "some devices" else [(0, 0), (0, 3)]
            for place in places:
                queue.enqueue_write(x, torch.full(x.local_shape, 7.0), coordinate=place)
            parts = [queue.enqueue_read(x, coordinate=place) for place in places]
            piece = queue.enqueue_read(x, coordinate=places[1], index=(0, slice(0, 1)))
            found[name] = [first, later.result(), *parts, piece]
        mesh.synchronize()
        found["counts"] = {name: mesh.counts[name] for name in ("write", "read", "launch")}
    return found


def workloads() -> list[Any]:
    """Programs on ranges that cross processes, with arguments of their own, on two queues with an event between."""
    with open_mesh_device((2, 4), num_command_queues=2) as mesh:
        first, second = mesh.queue(0), mesh.queue(1)
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 8), shard_shape=(2, 2))
        y = create_mesh_buffer(mesh, layout="replicated", global_shape=(2, 2))
        first.enqueue_write(x, numbers(4, 8))
        workload = MeshWorkload()
        added = Program(lambda x, by: x.add_(by), updates=[x], args={"by": 10})
        workload.add_program(MeshCoordinateRange((0, 1), (1, 2)), added)
        workload.add_program(MeshCoordinateRange((0, 3), (0, 3)), Program(mark, updates=[x]))
        workload.set_args((1, 1), by=100)
        first.enqueue_workload(workload)
        event = first.record_event()
        second.wait_for_event(event)
        copies = MeshWorkload()
        copies.add_program(None, Program(lambda x, y: y.copy_(x), reads=[x], writes=[y]))
        second.enqueue_workload(copies)
        second.finish()
        event.synchronize()
        return [first.enqueue_read(x), *(second.enqueue_read(y, coordinate=place) for place in mesh.coordinates())]


def mark(x: torch.Tensor, coordinate: tuple[int, ...]) -> None:
    x.fill_(coordinate[0] * 10 + coordinate[1])


def held() -> dict[str, Any]:
    """The bytes of a buffer in this process, the cards that were opened here, and what a remote one answers."""
    with open_mesh_device((2, 4)) as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(64, 64), shard_shape=(32, 16))
        mine, other = list(mesh.mesh.local_coordinates()), [p for p in mesh.coordinates() if not mesh.mesh.is_here(p)]
        told = ""
        if other:
            try:
                x.handle(other[0])
            except MeshError as error:
                told = error.headline
        return {
            "bytes": x.storage.block.untyped_storage().nbytes(),
            "here": mine,
            "ids": (mesh.get_device_ids(), mesh.get_device_ids("local")),
            "told": told,
        }


def finished() -> tuple[float, float]:
    """When the kernels of this process had ended, and when `finish` returned: rank 1 takes a second longer."""
    with open_mesh_device((2, 4)) as mesh:
        ended: list[float] = []

        def work(x: torch.Tensor, coordinate: tuple[int, ...]) -> None:
            time.sleep(0.25 if os.environ["RANK"] == "1" else 0)
            ended.append(time.time())

        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 8), shard_shape=(2, 2))
        workload = MeshWorkload()
        workload.add_program(None, Program(work, updates=[x]))
        mesh.queue().enqueue_workload(workload)
        mesh.queue().finish()
        return ended[-1], time.time()


class Counted(Strangers):
    """Cards with memory of their own, and a note of those that were opened."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def open(self, index: int) -> Stranger:
        self.opened.append(index)
        return super().open(index)


def own_memory() -> dict[str, Any]:
    """A buffer on cards that have memory of their own: written, changed by a kernel, read."""
    rack = Counted()
    with open_mesh_device((2, 2), driver=rack) as mesh:
        queue = mesh.queue()
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 2))
        queue.enqueue_write(x, numbers(4, 4))
        workload = MeshWorkload()
        workload.add_program(MeshCoordinateRange((0, 0), (1, 0)), Program(mark, updates=[x]))
        queue.enqueue_workload(workload)
        told = ""
        try:
            mesh.create_submesh((1, 2))
        except UnsupportedError as error:
            told = error.headline
        return {"opened": rack.opened, "x": queue.enqueue_read(x), "told": told}
