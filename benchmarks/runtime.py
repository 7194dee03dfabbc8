"""Works of the mesh runtime: traces of tensor ops and of workloads, the same eagerly, bulk reads, empty workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import meshloom as loom
from benchmarks.goals import Goal
from benchmarks.timing import Work
from benchmarks.works import Pair, Spec
from meshloom.runtime import MeshDevice, MeshWorkload, Program, capture, create_mesh_buffer, open_mesh_device

LAYERS = 10
ROWS, WIDTH = 32, 64  # per device
Sides = tuple[Work, Work]
REPLAY = Goal("ratio", 1.2)
EAGER = Goal("ratio", 2.0)
COMMANDS = Goal("ratio", 0.9)  # less than enqueuing them, by more than noise
BULK = Goal("ratio", 0.9, from_devices=2)  # faster, by more than noise


def works(devices: Sequence[int]) -> list[Spec]:
    """Every work on every number of devices."""
    named: tuple[tuple[str, str, Callable[[int], Sides], Goal | None, str], ...] = (
        ("trace replay", "50 ops, to bare torch", replayed, REPLAY, "ratio"),
        ("trace eager", "50 ops, to bare torch", eager, EAGER, "ratio"),
        ("trace commands", "10 workloads, to enqueuing them", commands, COMMANDS, "ratio"),
        ("read bulk", "to a read per device", bulk_read, BULK, "ratio"),
        ("workload empty", "enqueue and finish", empty_workload, None, "ours_us"),
    )
    return [
        Spec(name, detail, (count,), partial(_pair, make, count), shown=shown).held_to(goal)
        for name, detail, make, goal, shown in named
        for count in devices
    ]


def _pair(make: Callable[[int], Sides], devices: int) -> Pair:
    ours, dense = make(devices)
    return Pair(ours, dense)


def layers(x: Any, weight: Any, bias: Any, scale: Any) -> Any:
    """Fifty ops: ten times a product, a sum, a relu, a product of elements and a residual."""
    for _ in range(LAYERS):
        y = x @ weight
        y = y + bias
        y = y.relu()
        y = y * scale
        x = y - x
    return x


def _operands(devices: int) -> tuple[list[loom.Tensor], list[torch.Tensor]]:
    mesh = loom.open_mesh((devices,), axes=("d",))
    shapes = ((devices * ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (devices * ROWS, WIDTH))
    dense = [torch.randn(shape) / 8 for shape in shapes]
    placed = [loom.distribute(each, mesh, "S(0)" if len(each) > WIDTH or devices == 1 else "R") for each in dense]
    return placed, dense


def _checked(ours: Callable[[], Any], dense: torch.Tensor) -> None:
    found = ours()
    if not torch.allclose(found.to_torch(), dense, rtol=1e-4, atol=1e-4):
        raise AssertionError("the program does not give the dense result")


def replayed(devices: int) -> Sides:
    """A trace of the program beside the bare torch calls on the same blocks."""
    placed, dense = _operands(devices)
    with capture() as trace:
        result = layers(*placed)

    def replay() -> Any:
        trace.replay()
        return result

    _checked(replay, layers(*dense))
    return trace.replay, lambda: layers(*dense)


def eager(devices: int) -> Sides:
    """The program op by op beside the bare torch calls."""
    placed, dense = _operands(devices)
    _checked(lambda: layers(*placed), layers(*dense))
    return lambda: layers(*placed), lambda: layers(*dense)


def _nothing_on(devices: int) -> tuple[MeshDevice, MeshWorkload]:
    """A mesh, and a workload on it that does nothing."""
    mesh = open_mesh_device((devices,))
    workload = MeshWorkload()
    updated = create_mesh_buffer(mesh, global_shape=(1,))
    workload.add_program(None, Program(nothing, updates=[updated], vectorised=True))
    return mesh, workload


def commands(devices: int) -> Sides:
    """A trace of ten workloads beside enqueuing and finishing them."""
    mesh, workload = _nothing_on(devices)
    queue = mesh.queue()
    with mesh.capture() as trace:
        for _ in range(LAYERS):
            queue.enqueue_workload(workload)

    def one_by_one() -> None:
        for _ in range(LAYERS):
            queue.enqueue_workload(workload)
        queue.finish()

    return trace.replay, one_by_one


def bulk_read(devices: int) -> Sides:
    """A whole buffer read at once beside one read per device."""
    mesh = open_mesh_device((devices,))
    x = create_mesh_buffer(mesh, layout="sharded", global_shape=(devices * ROWS, WIDTH), shard_shape=(ROWS, WIDTH))
    queue = mesh.queue()
    queue.enqueue_write(x, torch.randn(devices * ROWS, WIDTH), blocking=True)

    def slowly() -> None:
        for place in mesh.coordinates():
            queue.enqueue_read(x, coordinate=place)

    return lambda: queue.enqueue_read(x), slowly


def empty_workload(devices: int) -> Sides:
    """Enqueue of a workload that does nothing, and its finish, beside a Python call that does nothing."""
    mesh, workload = _nothing_on(devices)
    queue = mesh.queue()

    def run() -> None:
        queue.enqueue_workload(workload)
        queue.finish()

    return run, lambda: nothing(None)


def nothing(x: Any) -> None:
    """A kernel that does nothing."""
