"""The step graph: what one device does in a step of a program, as values that time, memory and reports are read from.

A *node* is a call with what it moves: forward and optimizer calls as they were planned, backward's with the kernels
that autograd ran. A *storage* is memory that one device holds, from the kernel that makes it to the last one before it
is freed. Nodes read and write storages by number, so the flow of data is known and not guessed from shapes. Kernels
are numbered too, in the order in which they ran: that is the clock of memory.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from meshloom.collectives import Collective
from meshloom.cost.compute import Load
from meshloom.mesh import Mesh

PHASES = ("forward", "recompute", "backward", "optimizer")
# What memory is held for. Gathered are operands as a device needs them for a call, whole where it keeps a shard.
HELD_FOR = ("parameters", "gradients", "optimizer state", "activations", "gathered", "temporaries", "inputs")


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a step, on the device that has most to do."""

    number: int  # its place in `StepGraph.nodes`
    op: str  # of the op table, or torch's name for what has no line there
    phase: str  # one of PHASES
    module: str  # where in the model: "GPT.blocks.3.attention.qkv"; empty outside of modules
    where: str  # the line of the program: "train.py:12"; of a backward node that of its forward call
    operands: tuple[str, ...]  # "bf16[4, 2048](S(0), R)"
    results: tuple[str, ...]
    kernels: tuple[str, ...]  # the array functions that ran, in order
    dtype: str  # of the arithmetic
    loads: tuple[Load, ...]  # what one device computes and touches: of each kernel, or of the planned call as a whole
    model_flops: float  # the arithmetic of all devices, counted once where several do the same
    before: tuple[Collective, ...]  # what is moved before it can compute
    before_of: tuple[int | None, ...]  # the storage that each of those moves; None stands for all that it reads
    after: tuple[Collective, ...]  # what is moved before its results can be used
    reads: tuple[int, ...]  # numbers of storages
    writes: tuple[int, ...]
    kernel_range: tuple[int, int]  # the numbers of its first kernel, and of the first one after it
    gradient_of: int | None = None  # of a backward node: the number of its forward node
    is_gradient_sum: bool = False  # the sum of a parameter's gradient, which may run beside the rest of backward
    mesh: int = 0  # the number of the mesh that it runs on, in `StepGraph.meshes`

    @property
    def flops(self) -> float:
        """The arithmetic of one device."""
        return sum(load.flops for load in self.loads)

    @property
    def traffic(self) -> float:
        """The bytes of its own memory that one device reads and writes."""
        return sum(load.bytes for load in self.loads)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that it moves between devices."""
        return self.before + self.after

    @property
    def bytes(self) -> int:
        """The bytes that one device receives from others."""
        return sum(each.bytes for each in self.collectives)

    def __str__(self) -> str:
        back = "" if self.phase == "forward" else f" ({self.phase})"
        place = f"{self.module}, {self.where}" if self.module else self.where
        return f"{self.op}{back} at {place}"


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that one device holds for a while."""

    number: int  # its place in `StepGraph.storages`
    name: str  # a parameter's name, or what made it: "linear bf16[4, 2048, 4096](S(0), R)"
    held_for: str  # one of HELD_FOR
    bytes: int  # on the device that holds most
    made: int  # the kernel that made it; -1 if it was there before
    freed: int | None  # the last kernel before it was freed; None if it is there at the end
    node: int | None  # the node that made it
    module: str
    where: str
    mesh: int = 0  # the number of the mesh whose devices hold it

    def is_alive(self, kernel: int) -> bool:
        """Whether it is held while a kernel runs."""
        return self.made <= kernel and (self.freed is None or kernel <= self.freed)


@dataclass(frozen=True)
class StepGraph:
    """The nodes of a step in the order in which they ran, and the memory that they used."""

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    meshes: tuple[Mesh, ...]  # that its tensors are on, in the order in which they were used
    kernels: int = 0  # how many ran
    has_data: bool = False  # whether values were computed; on `meta` there are none

    @property
    def mesh(self) -> Mesh | None:
        """The largest of its meshes; None if there is none."""
        return max(self.meshes, key=lambda mesh: math.prod(mesh.shape), default=None)

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """The kinds of devices: those that are on the same meshes do the same. One mesh, one class."""
        if len(self.meshes) < 2:
            return (DeviceClass(0, math.prod(self.meshes[0].shape) if self.meshes else 1, (0,)),)
        on: dict[int, tuple[int, ...]] = {}
        for number, mesh in enumerate(self.meshes):
            for device in mesh.device_ids:
                on[device] = (*on.get(device, ()), number)
        return tuple(DeviceClass(i, count, meshes) for i, (meshes, count) in enumerate(Counter(on.values()).items()))

    @property
    def devices(self) -> int:
        """How many devices the step runs on."""
        return sum(each.devices for each in self.classes)


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that all do the same in a step: one of them stands for all."""

    number: int
    devices: int  # how many there are
    meshes: tuple[int, ...]  # the numbers of the meshes that they are on
