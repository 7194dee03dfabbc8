"""Step graphs made by hand, for tests of time and memory that need no program."""

from __future__ import annotations

from dataclasses import replace

from meshloom.collectives import Collective
from meshloom.cost import Load
from meshloom.cost.step import Node, StepGraph, Storage
from meshloom.fabric import Machine
from meshloom.mesh import Mesh

# One FLOP, one byte and one step each take a second.
SECONDS = Machine("seconds", latency=1e-12, bandwidth=1.0, flops=1.0, memory_bandwidth=1e30)


def collective(seconds: int, axis: str = "tp", shape: tuple[int, ...] = (1 << 20,)) -> Collective:
    """One that takes so many seconds: a broadcast brings one device as many bytes."""
    return Collective("broadcast", axis, 2, seconds, "f32", shape)


EMPTY = Node(
    number=0, op="", phase="forward", module="", where="", operands=(), results=(), kernels=("k",), dtype="f32",
    loads=(), model_flops=0.0, before=(), before_of=(), after=(), reads=(), writes=(), kernel_range=(0, 1),
)  # fmt: skip


def node(number: int, seconds: float = 1.0, **more) -> Node:
    """A node that computes for so many seconds."""
    loads = (Load(seconds, 0.0),) if seconds else ()
    named = {"op": f"op{number}", "where": f"made.py:{number}", "kernel_range": (number, number + 1), **more}
    return replace(EMPTY, number=number, loads=loads, model_flops=seconds, **named)


def storage(number: int, size: int, made: int, freed: int | None, held_for: str = "temporaries") -> Storage:
    """Memory of so many bytes between two kernels."""
    return Storage(number, f"storage {number}", held_for, size, made, freed, max(made, 0), "", f"made.py:{made}")


def graph(nodes, storages=(), kernels: int | None = None) -> StepGraph:
    """A graph of these on two axes of two devices."""
    return StepGraph(tuple(nodes), tuple(storages), (Mesh(dp=2, tp=2),), len(nodes) if kernels is None else kernels)
