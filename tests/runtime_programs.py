"""Random mesh programs as data: made, run on a mesh, run on a sequential reference, and judged by a graph.

The judge does not know vector clocks: it draws an edge from every command to the next on its queue, from a record to
the waits for it, and from what the host has waited for to all that is enqueued later; two uses of the same bytes, one
of them a write, must be joined by a path.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device

DEVICES, WIDTH, SLOTS, PRIME = 2, 2, 4, 1009


@dataclass(frozen=True)
class Op:
    """One line of a program; what the fields mean follows from the kind."""

    kind: str
    queue: int = 0
    buffers: tuple[int, ...] = ()  # of a work: source, target
    place: int | None = None  # one device, or all
    value: int = 0
    event: int = 0
    trace: int = 0


@dataclass
class Plan:
    """A program and what its maker knew."""

    queues: int
    ops: list[Op] = field(default_factory=list)

    def without(self, number: int) -> Plan:
        """The program with one line taken out."""
        return Plan(self.queues, self.ops[:number] + self.ops[number + 1 :])


# what touches what


def places(op: Op) -> tuple[int, ...]:
    return tuple(range(DEVICES)) if op.place is None else (op.place,)


def uses(op: Op, plan: Plan) -> list[tuple[int, int, bool]]:
    """Buffer, device and whether it is written, of one command."""
    if op.kind == "write":
        return [(op.buffers[0], place, True) for place in places(op)]
    if op.kind == "read":
        return [(op.buffers[0], place, False) for place in places(op)]
    if op.kind == "work":
        source, target = op.buffers
        found = [(source, place, False) for place in places(op)]
        return found + [(target, place, write) for place in places(op) for write in (False, True)]
    if op.kind == "replay":
        return [use for each in captured(plan, op.trace) for use in uses(each, plan)]
    return []


def captured(plan: Plan, trace: int) -> list[Op]:
    return [op for op in plan.ops if op.kind == "capture" and op.trace == trace for op in as_works(op)]


def as_works(op: Op) -> list[Op]:
    """What a capture contains: a work, and the same again with another number."""
    return [replace(op, kind="work"), replace(op, kind="work", value=op.value + 1)]


def races(plan: Plan, addresses: dict[int, int]) -> list[tuple[int, int]]:
    """The pairs of lines that collide and that no path joins."""
    before: list[int] = []  # for each line a bit mask of the lines that are surely done before it
    last = [0] * plan.queues
    host, recorded, seen, found = 0, {}, [], []
    for number, op in enumerate(plan.ops):
        known = 0
        if op.kind == "finish":
            host |= last[op.queue]
        elif op.kind == "record":
            recorded[op.event] = last[op.queue] | host
        elif op.kind == "wait":
            last[op.queue] |= recorded[op.event]
        elif op.kind in ("write", "read", "work", "replay"):
            known = last[op.queue] | host
            mine = {(addresses[b], place, write) for b, place, write in uses(op, plan)}
            for earlier, theirs in seen:
                collide = any(a == c and p == q and (w or v) for a, p, w in mine for c, q, v in theirs)
                if collide and not known >> earlier & 1:
                    found.append((earlier, number))
            seen.append((number, mine))
            last[op.queue] = known | 1 << number
        before.append(known)
    return found


# making one


class Maker:
    """Makes an ordered program: before a command that would collide, an event is recorded and waited for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.plan = Plan(self.random.randint(1, 3))
        self.live: list[int] = []
        self.slots: dict[int, int] = {}  # buffer to slot, as first fit gives them
        self.count = self.events = self.traces = 0
        self.in_trace: set[int] = set()
        self.waits: list[int] = []  # the lines of waits that a collision asked for

    def make(self, length: int) -> Plan:
        for _ in range(2):
            self.alloc()
        for _ in range(length):
            self.random.choice((self.alloc, self.free, self.write, self.work, self.work, self.read, self.read,
                                self.finish, self.capture, self.replay))()  # fmt: skip
        return self.plan

    def alloc(self) -> None:
        free = sorted(set(range(SLOTS)) - {self.slots[buffer] for buffer in self.live})
        if not free:
            return
        buffer, self.count = self.count, self.count + 1
        self.slots[buffer] = free[0]
        self.live.append(buffer)
        self.plan.ops.append(Op("alloc", buffers=(buffer,)))
        self.give(Op("write", self.queue(), (buffer,), None, self.number()))

    def free(self) -> None:
        candidates = [buffer for buffer in self.live if buffer not in self.in_trace]
        if len(candidates) > 1:
            buffer = self.random.choice(candidates)
            self.live.remove(buffer)
            self.plan.ops.append(Op("free", buffers=(buffer,)))

    def write(self) -> None:
        self.give(Op("write", self.queue(), (self.buffer(),), self.place(), self.number()))

    def read(self) -> None:
        self.give(Op("read", self.queue(), (self.buffer(),)))

    def work(self) -> None:
        self.give(Op("work", self.queue(), (self.buffer(), self.buffer()), self.place(), self.number()))

    def finish(self) -> None:
        self.plan.ops.append(Op("finish", self.queue()))

    def capture(self) -> None:
        if self.traces < 2:
            pair = self.buffer(), self.buffer()
            self.in_trace.update(pair)
            op = Op("capture", self.queue(), pair, self.place(), self.number(), trace=self.traces)
            self.plan.ops.append(op)
            self.traces += 1

    def replay(self) -> None:
        if self.traces:
            self.give(Op("replay", self.queue(), trace=self.random.randrange(self.traces)))

    def give(self, op: Op) -> None:
        """Add a command, after as many events as it takes."""
        self.plan.ops.append(op)
        while True:
            missing = [pair for pair in races(self.plan, self.slots) if pair[1] == len(self.plan.ops) - 1]
            if not missing:
                return
            other = self.plan.ops[missing[-1][0]].queue
            event, self.events = self.events, self.events + 1
            self.plan.ops[-1:] = [Op("record", other, event=event), Op("wait", op.queue, event=event), op]
            self.waits.append(len(self.plan.ops) - 2)

    def queue(self) -> int:
        return self.random.randrange(self.plan.queues)

    def buffer(self) -> int:
        return self.random.choice(self.live)

    def place(self) -> int | None:
        return self.random.choice((None, None, *range(DEVICES)))

    def number(self) -> int:
        return self.random.randrange(100)


# running one


def mix(source: torch.Tensor, target: torch.Tensor, by: int) -> None:
    target.copy_((target * 3 + source + by) % PRIME)


def reference(plan: Plan) -> list[list[float]]:
    """What the reads give, one command after the other."""
    held: dict[int, torch.Tensor] = {}
    found = []

    def work(op: Op) -> None:
        for place in places(op):
            mix(held[op.buffers[0]][place], held[op.buffers[1]][place], op.value)

    for op in plan.ops:
        if op.kind == "alloc":
            held[op.buffers[0]] = torch.zeros(DEVICES, WIDTH)
        elif op.kind == "write":
            held[op.buffers[0]][list(places(op))] = filled(op)
        elif op.kind == "work":
            work(op)
        elif op.kind == "replay":
            for each in captured(plan, op.trace):
                work(each)
        elif op.kind == "read":
            found.append(held[op.buffers[0]].flatten().tolist())
    return found


def filled(op: Op) -> torch.Tensor:
    return (torch.arange(len(places(op)) * WIDTH, dtype=torch.float32) + op.value).view(-1, WIDTH)


def execute(plan: Plan, vectorised: bool | None = False, **options: Any) -> list[list[float]]:
    """What the reads give on a mesh; kernels run on each device unless told otherwise, which is faster for two."""
    mesh = open_mesh_device((DEVICES,), num_command_queues=plan.queues, **options)
    buffers: dict[int, Any] = {}
    events: dict[int, Any] = {}
    traces: dict[int, Any] = {}
    reads = []

    def workload(op: Op) -> MeshWorkload:
        made = MeshWorkload()
        source, target = (buffers[each] for each in op.buffers)
        where = None if op.place is None else (op.place,)
        if source is target:
            kernel, reads = (lambda t, by: mix(t, t, by)), []
        else:
            kernel, reads = mix, [source]
        args = {"by": op.value}
        made.add_program(where, Program(kernel, reads, updates=[target], args=args, vectorised=vectorised))
        return made

    try:
        for op in plan.ops:
            queue = mesh.queue(op.queue)
            if op.kind == "alloc":
                buffers[op.buffers[0]] = create_mesh_buffer(
                    mesh, layout="sharded", global_shape=(DEVICES * WIDTH,), shard_shape=(WIDTH,)
                )
            elif op.kind == "free":
                buffers[op.buffers[0]].free()
            elif op.kind == "write":
                data = filled(op).flatten()
                queue.enqueue_write(buffers[op.buffers[0]], data, coordinate=None if op.place is None else (op.place,))
            elif op.kind == "read":
                reads.append(queue.enqueue_read(buffers[op.buffers[0]], blocking=False))
            elif op.kind == "work":
                queue.enqueue_workload(workload(op))
            elif op.kind == "record":
                events[op.event] = queue.record_event()
            elif op.kind == "wait":
                queue.wait_for_event(events[op.event])
            elif op.kind == "finish":
                queue.finish()
            elif op.kind == "capture":
                with mesh.capture(op.queue) as trace:
                    for each in as_works(op):
                        queue.enqueue_workload(workload(each))
                traces[op.trace] = trace
            elif op.kind == "replay":
                queue.enqueue_trace(traces[op.trace])
        return [each.result().tolist() for each in reads]
    finally:
        mesh.close()


def addresses(plan: Plan) -> dict[int, int]:
    """The slot of every buffer, as first fit gives them; for programs that only differ in their events."""
    held: dict[int, int] = {}
    found: dict[int, int] = {}
    for op in plan.ops:
        if op.kind == "alloc":
            slot = min(set(range(SLOTS + 1)) - set(held.values()))
            held[op.buffers[0]] = found[op.buffers[0]] = slot
        elif op.kind == "free":
            del held[op.buffers[0]]
    return found
