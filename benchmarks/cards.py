"""Cards in processes of their own: bytes into and out of one, an empty launch, and the same through a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.goals import Goal
from benchmarks.runtime import nothing
from benchmarks.timing import Work
from benchmarks.works import Pair, Spec, WrongAnswer
from meshloom.runtime import MeshWorkload, ProcessDriver, Program, create_mesh_buffer, open_mesh_device

SIZE = 1 << 24  # elements: 64 MB
SPEED = Goal("mb_per_s", 1000.0, " MB/s", at_least=True)
LAUNCH = Goal("ours_us", 150.0, " us at most")


def works(devices: Sequence[int]) -> list[Spec]:
    """A write, a read and a launch on one card, then through the queue of a mesh of one."""
    if 1 not in devices:
        return []
    return [
        _on_one("card write", "64 MB, to a copy", write, SPEED),
        _on_one("card read", "64 MB, to a copy", read, SPEED),
        _on_one("card launch", "empty, and its wait", launch, LAUNCH),
        _on_one("card queue", "write of 64 MB, to a copy", queue_write, SPEED),
        _on_one("card queue", "read of 64 MB, to a copy", queue_read, SPEED),
        _on_one("card queue", "empty workload, enqueue and finish", queue_launch, None),
    ]


def _on_one(name: str, detail: str, make: Callable[[int], Pair], goal: Goal | None) -> Spec:
    return Spec(name, detail, (1,), partial(make, SIZE), goal, goal.figure if goal else "ours_us")


def _held(size: int) -> tuple[Any, Any, torch.Tensor, Work]:
    """A card, memory of it, a value, and a copy of that."""
    card, value, other = ProcessDriver().open(0), torch.randn(size), torch.zeros(size)
    memory = card.alloc(0, (size,), torch.float32)
    card.write(memory, value)
    if not card.read(memory).equal(value):
        raise WrongAnswer("a card does not give back what was written")
    return card, memory, value, lambda: other.copy_(value)


def write(size: int) -> Pair:
    """Host data into a card."""
    card, memory, value, copy = _held(size)
    return Pair(lambda: card.write(memory, value), copy, nbytes=value.nbytes)


def read(size: int) -> Pair:
    """What a card holds, to the host."""
    card, memory, value, copy = _held(size)
    return Pair(lambda: card.read(memory), copy, nbytes=value.nbytes)


def launch(size: int) -> Pair:
    """A kernel that does nothing, started and waited for."""
    card, memory, _, _ = _held(1)
    loaded = card.load(card.driver.compile(nothing), nothing)
    return Pair(lambda: card.wait(card.launch(loaded, [memory], {}), 10.0), lambda: nothing(None))


def _queued(size: int) -> tuple[Any, Any, torch.Tensor, Work]:
    mesh, value, other = open_mesh_device((1,), driver="processes"), torch.randn(size), torch.zeros(size)
    buffer = create_mesh_buffer(mesh, global_shape=(size,))
    mesh.queue().enqueue_write(buffer, value, blocking=True)
    return mesh, buffer, value, lambda: other.copy_(value)


def queue_write(size: int) -> Pair:
    """The same through a queue, which keeps a copy of what it is given."""
    mesh, buffer, value, copy = _queued(size)
    return Pair(lambda: mesh.queue().enqueue_write(buffer, value, blocking=True), copy, nbytes=value.nbytes)


def queue_read(size: int) -> Pair:
    """The same through a queue, which puts the parts of all cards together."""
    mesh, buffer, value, copy = _queued(size)
    return Pair(lambda: mesh.queue().enqueue_read(buffer), copy, nbytes=value.nbytes)


def queue_launch(size: int) -> Pair:
    """An empty workload, enqueued and finished."""
    mesh, buffer, _, _ = _queued(1)
    workload = MeshWorkload()
    workload.add_program(None, Program(nothing, updates=[buffer]))
    return Pair(lambda: mesh.queue().enqueue_workload(workload, blocking=True), lambda: nothing(None))
