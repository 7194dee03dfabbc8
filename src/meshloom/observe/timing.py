"""How long a step takes on one device: compute in program order, and the links of each mesh axis beside it.

In an SPMD program all devices do the same, so one device and one group per axis stand for all of them, and the work
here does not depend on how many there are. A node computes when the device is free and what it reads is there. A
collective occupies the links of its axis, in the first gap that is long enough after what it moves is there; those of
different axes do not disturb each other, unless they go through one port to a switch. What brings an operand may run
ahead by one such node, as prefetching does, but not the first of a pass. The sum of a gradient starts when the
gradient is there; small ones travel together. The scatter of a gradient, too, runs beside the rest of backward; who
starts a third large one waits for the first. Without overlap everything happens one after the other.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshloom.collectives import Collective
from meshloom.cost import price
from meshloom.cost.step import Node, StepGraph
from meshloom.fabric import Machine
from meshloom.mesh import Mesh
from meshloom.types import itemsize

STREAMS = ("compute", "communication")
# `LARGE` of `comms.deferred` and the figures of `comms.scatters`, without torch
SMALL = 1 << 20  # elements below which gradients are summed together
SCATTERED_TOGETHER = 1 << 18  # bytes of a gradient up to which it is scattered with others
TOGETHER = 1 << 20  # bytes of those from which they are
UNDER_WAY = 2  # scatters of large gradients


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that takes time on one device: the compute of a node, or a collective."""

    node: int  # the number of the node
    stream: str  # "compute" or "communication"
    axis: str  # the mesh axis of a collective; empty for compute
    name: str  # the op, or the collective's name
    start: float  # in seconds from the start of the step
    duration: float
    exposed: float = 0.0  # of a collective: the seconds in which the device does nothing but wait
    bytes: int = 0  # of a collective: what the device receives
    mesh: int = 0  # the number of the mesh that it happens on

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.duration


@dataclass(frozen=True)
class Timing:
    """All slices in the order of time, when the step is done, and the totals of the busiest class of devices."""

    slices: tuple[Slice, ...]
    time: float
    compute: float  # seconds in which the device computes
    communication: float  # seconds of its collectives, hidden ones included
    exposed: float  # seconds in which it waits for collectives, or for other classes of devices
    busiest: int = 0  # the number of the class


def time_step(graph: StepGraph, machine: Machine, overlap: bool = True) -> Timing:
    """When each node of a step computes and communicates on a machine."""
    clock = _Clock(graph, machine, overlap)
    sums: list[Node] = []
    for node in graph.nodes:
        if node.is_gradient_sum and node.after[0].kind != "reduce_scatter":
            sums.append(node)
            continue
        clock.sum_gradients(sums)
        sums = []
        clock.enter(node)
        if node.is_gradient_sum:
            clock.scatter(node)
        else:
            clock.run(node)
    clock.sum_gradients(sums)
    clock.finish_scatters(range(len(graph.meshes)))
    return clock.finish()


class _Links:
    """The links of one mesh axis: one collective at a time, in the first gap that fits."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def reserve(self, ready: float, duration: float) -> float:
        """When a collective starts that is ready at some time."""
        place = bisect.bisect_right(self.ends, ready)
        start = ready
        while place < len(self.starts) and self.starts[place] < start + duration:
            start = max(start, self.ends[place])
            place += 1
        self.starts.insert(place, start)
        self.ends.insert(place, start + duration)
        return start


class _Clock:
    def __init__(self, graph: StepGraph, machine: Machine, overlap: bool) -> None:
        self.graph, self.overlap = graph, overlap
        self.classes: dict[int, list[int]] = defaultdict(list)  # of each mesh
        for each in graph.classes:
            for mesh in each.meshes:
                self.classes[mesh].append(each.number)
        self.prices = Prices(machine, graph.meshes)
        self.links: dict[tuple[int, str], _Links] = defaultdict(_Links)
        self.ready: dict[int, float] = {}  # when the content of a storage is there
        self.free = [0.0] * len(graph.classes)  # when a device of each class can compute again
        self.gates: dict[tuple[int, str], float] = defaultdict(float)  # when the last node computed that waited for it
        self.begun: dict[int, bool] = {}  # whether the pass of a mesh has brought anything yet
        self.in_backward: dict[int, bool] = {}
        self.under_way: dict[int, deque[float]] = defaultdict(deque)  # when the scatters of a mesh will be done
        self.waiting: dict[int, dict[object, list[Node]]] = defaultdict(lambda: defaultdict(list))  # small ones
        self.slices: list[Slice] = []

    def enter(self, node: Node) -> None:
        """A node may begin another pass on its mesh: nothing runs ahead into that, and backward waits at its end."""
        in_backward = node.phase in ("backward", "recompute")
        if self.in_backward.get(node.mesh, in_backward) != in_backward:
            if not in_backward:
                self.finish_scatters([node.mesh])
            self.begun[node.mesh] = False
        self.in_backward[node.mesh] = in_backward

    def run(self, node: Node) -> None:
        """A node: what it needs is brought, it computes, its results are reduced."""
        ready = max((self.ready.get(each, 0.0) for each in node.reads), default=0.0)
        begin = max(ready, self._bring(node, ready))
        seconds = self.prices.compute(node)
        start = max(self._when_free(node), begin) if seconds or node.before else begin
        if seconds:
            self.slices.append(Slice(node.number, "compute", "", node.op, start, seconds, mesh=node.mesh))
            self._occupy(node, start + seconds)
        for collective in node.before:
            self.gates[node.mesh, collective.axis] = start
        done = self._communicate(node, node.after, start + seconds)
        for each in node.writes:
            self.ready[each] = done

    def _bring(self, node: Node, ready: float) -> float:
        """When all operands are where the node wants them."""
        done, last = 0.0, dict[int | None, float]()
        turn = 0.0 if self.begun.get(node.mesh, True) else self._when_free(node)
        self.begun[node.mesh] = self.begun.get(node.mesh, True) or bool(node.before)
        for collective, of in zip(node.before, node.before_of, strict=True):
            there = ready if of is None else self.ready.get(of, 0.0)
            there = max(there, last.get(of, 0.0), self.gates[node.mesh, collective.axis], turn)
            last[of] = self._send(node, collective, there)
            done = max(done, last[of])
        return done

    def _when_free(self, node: Node) -> float:
        """When all devices of a node's mesh can compute."""
        return max((self.free[each] for each in self.classes[node.mesh]), default=0.0)

    def _occupy(self, node: Node, until: float) -> None:
        for each in self.classes[node.mesh]:
            self.free[each] = until

    def _communicate(self, node: Node, collectives: Iterable[Collective], ready: float) -> float:
        """When collectives are done that follow each other."""
        for collective in collectives:
            ready = self._send(node, collective, ready)
        return ready

    def _send(self, node: Node, collective: Collective, ready: float, name: str = "") -> float:
        seconds = self.prices.collective(collective, node.mesh)
        if self.overlap:
            start = self.links[node.mesh, self.prices.way(collective, node.mesh)].reserve(ready, seconds)
        else:
            start = max(self._when_free(node), ready)
            self._occupy(node, start + seconds)
        what, at = name or collective.kind, (start, seconds)
        self.slices.append(
            Slice(node.number, "communication", collective.axis, what, *at, bytes=collective.bytes, mesh=node.mesh)
        )
        return start + seconds

    def sum_gradients(self, nodes: Sequence[Node]) -> None:
        """The sums of gradients after a pass of backward, in the order in which the gradients were there."""
        small = defaultdict(list)
        large = []
        for node in nodes:
            if len(node.after) == 1 and math.prod(node.after[0].shape) < SMALL:
                each = node.after[0]
                small[each.kind, each.axis, each.dtype, each.op].append(node)
            else:
                large.append(node)
        for node in sorted(large, key=self._when_read):
            self._finish_sum([node], self._communicate(node, node.after, self._when_read(node)))
        for together in small.values():
            whole = _join([node.after[0] for node in together])
            ready = max(map(self._when_read, together))
            name = whole.kind if len(together) == 1 else f"{whole.kind} of {len(together)} small gradients"
            self._finish_sum(together, self._send(together[0], whole, ready, name))

    def scatter(self, node: Node) -> None:
        """The scatter of a gradient as soon as that is there; of a small one when there are enough of them."""
        first = node.after[0]
        if len(node.after) > 1 or math.prod(first.shape) * itemsize(first.dtype) > SCATTERED_TOGETHER:
            self._begin_scatter([node], node.after)
            return
        alike = self.waiting[node.mesh][first.axis, first.dtype, first.op]
        alike.append(node)
        if sum(math.prod(each.after[0].shape) * itemsize(first.dtype) for each in alike) >= TOGETHER:
            self._scatter_together(alike)

    def _scatter_together(self, nodes: list[Node]) -> None:
        whole = _join([node.after[0] for node in nodes])
        name = whole.kind if len(nodes) == 1 else f"{whole.kind} of {len(nodes)} small gradients"
        self._begin_scatter(nodes, [whole], name)
        nodes.clear()

    def _begin_scatter(self, nodes: Sequence[Node], collectives: Sequence[Collective], name: str = "") -> None:
        under_way, node = self.under_way[nodes[0].mesh], nodes[0]
        while len(under_way) >= UNDER_WAY:
            self._occupy(node, max(self._when_free(node), under_way.popleft()))
        done = max(map(self._when_read, nodes))
        for each in collectives:
            done = self._send(node, each, done, name)
        under_way.append(done)
        self._finish_sum(nodes, done)

    def finish_scatters(self, meshes: Iterable[int]) -> None:
        """The end of a pass of backward waits for all."""
        for mesh in meshes:
            for alike in self.waiting[mesh].values():
                if alike:
                    self._scatter_together(alike)
            under_way = self.under_way[mesh]
            for each in self.classes[mesh] if under_way else ():
                self.free[each] = max(self.free[each], *under_way)
            under_way.clear()

    def _when_read(self, node: Node) -> float:
        return max((self.ready.get(each, 0.0) for each in node.reads), default=0.0)

    def _finish_sum(self, nodes: Iterable[Node], done: float) -> None:
        for node in nodes:
            for each in node.writes:
                self.ready[each] = done

    def finish(self) -> Timing:
        """All slices, with the part of each collective that nothing hides."""
        slices = sorted(self.slices, key=lambda each: each.start)
        end = max((each.end for each in slices), default=0.0)
        waits: dict[int, float] = {}
        totals = []
        for each in self.graph.classes:
            own = {i: one for i, one in enumerate(slices) if one.mesh in each.meshes}
            for i, seconds in _share_waits(own).items():
                waits[i] = max(waits.get(i, 0.0), seconds)
            compute, moved = (sum(one.duration for one in own.values() if one.stream == kind) for kind in STREAMS)
            totals.append((compute, moved, each.number))
        compute, moved, busiest = max(totals)
        told = tuple(replace(each, exposed=waits[i]) if i in waits else each for i, each in enumerate(slices))
        return Timing(told, end, compute, moved, end - compute, busiest)


def _share_waits(slices: Mapping[int, Slice]) -> dict[int, float]:
    """For each collective, its part of the time in which a device waits; several at once share that time."""
    marks = sorted((time, i) for i, each in slices.items() for time in (each.start, each.end))
    waits: dict[int, float] = defaultdict(float)
    running: dict[str, dict[int, None]] = {stream: {} for stream in STREAMS}
    last = 0.0
    for time, i in marks:
        moving = running["communication"]
        if moving and not running["compute"]:
            for each in moving:
                waits[each] += (time - last) / len(moving)
        last = time
        same = running[slices[i].stream]
        if i in same:
            del same[i]
        else:
            same[i] = None
    return waits


def cover(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds that spans cover together.

    >>> cover([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, last = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _join(collectives: Sequence[Collective]) -> Collective:
    """Several collectives as one of all their bytes."""
    elements = sum(math.prod(each.shape) for each in collectives)
    return replace(collectives[0], bytes=sum(each.bytes for each in collectives), shape=(elements,))


class Prices:
    """What nodes and collectives cost on a machine; equal ones are asked for once."""

    def __init__(self, machine: Machine, meshes: Sequence[Mesh] = ()) -> None:
        self.machine = machine
        self.bound = [machine.on(mesh) for mesh in meshes] or [machine]  # which links join the axes of each mesh
        self.machines: dict[str, Machine] = {}
        self.known: dict[object, float] = {}

    def compute(self, node: Node) -> float:
        """The seconds that a node computes on one device."""
        key = (node.loads, node.dtype)
        if key not in self.known:
            machine = self.machine_for(node.dtype)
            self.known[key] = sum(load.seconds(machine) for load in node.loads if load.flops or load.bytes)
        return self.known[key]

    def bounds(self, node: Node) -> dict[str, float]:
        """The seconds of a node's kernels by what bounds each: arithmetic or memory traffic."""
        machine, found = self.machine_for(node.dtype), {"arithmetic": 0.0, "memory traffic": 0.0}
        for load in node.loads:
            seconds = load.seconds(machine) if load.flops or load.bytes else 0.0
            computes = replace(load, bytes=0.0).seconds(machine) >= replace(load, flops=0.0).seconds(machine)
            found["arithmetic" if computes else "memory traffic"] += seconds
        return found

    def collective(self, collective: Collective, mesh: int) -> float:
        """The seconds that a collective takes on the axes of a mesh, by the number of the mesh."""
        key = (collective, mesh)
        if key not in self.known:
            self.known[key] = price(collective, self.bound[mesh])
        return self.known[key]

    def way(self, collective: Collective, mesh: int) -> str:
        """What a collective occupies: the links of its axis, or the one port that a device has to a switch."""
        axis = self.bound[mesh].axis(collective.axis, collective.devices)
        return f"port {axis.level}" if axis is not None and axis.kind == "switch" else collective.axis

    def machine_for(self, dtype: str) -> Machine:
        """The machine with the peak of a dtype as its arithmetic."""
        if dtype not in self.machines:
            self.machines[dtype] = replace(self.machine, flops=self.machine.peak(dtype))
        return self.machines[dtype]
