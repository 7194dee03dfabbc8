"""Simulate: how long a schedule, a plan or a recorded program takes on the links of a fabric.

The model. A link serves one message at a time in each direction, first come, first served; a message occupies it for
bytes over bandwidth and arrives a latency later. A send starts when what it reads is there: the last writes to that
slot. Steps order these dependencies and are no barrier, unless asked for. A device computes its calls in program order,
each for max(FLOP / flops, bytes / memory bandwidth); collectives run beside compute as soon as their data is there.

Start with `simulate`. The engine is in `jobs.py`, the file that Perfetto opens in `timeline.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike

import numpy as np

from meshloom.collectives import KINDS, Collective
from meshloom.collectives.algorithms import choose
from meshloom.collectives.jobs import (
    NOWHERE,
    Floats,
    Integers,
    Jobs,
    Sends,
    Wires,
    add_sends,
    finish_schedule,
    read_schedule,
)
from meshloom.collectives.schedule import Schedule, Send
from meshloom.cost import load_of
from meshloom.errors import ArgumentError, FabricError, MeshError, UnsupportedError
from meshloom.fabric import Fabric, Machine
from meshloom.mesh import Coordinate, Mesh
from meshloom.observe.explain import Explanation
from meshloom.observe.timeline import Span, Spans, write_trace
from meshloom.ops import find
from meshloom.planner import Plan, route
from meshloom.runtime import Event, Log
from meshloom.types import Shape

SHOWN = 8  # links that a printed simulation lists


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one direction of a link carried, for how many seconds, and in which part of the whole time."""

    source: Coordinate
    destination: Coordinate
    messages: int
    bytes: int
    busy: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A predicted run: seconds in all, what each link carried, and the spans of every link and device."""

    title: str
    time: float
    links: tuple[LinkUse, ...]
    spans: Spans = field(repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """The bytes that all links carried together."""
        return sum(each.bytes for each in self.links)

    @property
    def utilisation(self) -> float:
        """The part of the time for which the busiest link was occupied."""
        return max((each.utilisation for each in self.links), default=0.0)

    @property
    def events(self) -> tuple[Span, ...]:
        """Every message, compute and collective in the order of time."""
        return tuple(self.spans)

    def link(self, source: Coordinate, destination: Coordinate) -> LinkUse:
        """What the link from one coordinate to another carried."""
        for each in self.links:
            if (each.source, each.destination) == (source, destination):
                return each
        raise FabricError(f"no link joins {source} and {destination}")

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write a file in Chrome's trace format, for Perfetto: one track per device and per link."""
        write_trace(self.spans, path)

    def __str__(self) -> str:
        used = sorted((each for each in self.links if each.messages), key=lambda each: -each.busy)
        lines = [f"{self.title}: {self.time * 1e6:.3f} us"]
        if used:
            lines.append(f"  {'link':<20} {'messages':>8} {'bytes':>12} {'busy us':>10} {'used':>6}")
        for each in used[:SHOWN]:
            name = _arrow(each.source, each.destination)
            busy, part = f"{each.busy * 1e6:.3f}", f"{each.utilisation:.0%}"
            lines.append(f"  {name:<20} {each.messages:>8} {each.bytes:>12} {busy:>10} {part:>6}")
        if len(used) > SHOWN:
            lines.append(f"  and {len(used) - SHOWN} other links, none busier")
        return "\n".join([*lines, f"  {self.bytes} B on {len(used)} of {len(self.links)} links"])


def simulate(
    what: Schedule | Plan | Log | Explanation,
    fabric: Fabric,
    size: int | None = None,
    *,
    compute: Machine | None = None,
    mesh: Mesh | None = None,
    barrier: bool = False,
) -> Simulation:
    """How long a schedule of a value of `size` bytes, a plan, a record or an explanation takes on a fabric.

    `compute` is the machine that arithmetic is timed with (by default the one that a call was planned for). A mesh lies
    on the fabric by its device ids, row-major; `mesh` is for records that hold no plan to take it from. With `barrier`
    a step of a schedule starts when the one before has arrived everywhere.

    >>> from meshloom.collectives.schedule import Send
    >>> fabric = Fabric.grid((2,), "line", latency=1e-6, bandwidth=1e9)
    >>> swap = Schedule("shift", "direct", ((0,), (1,)), 2, ((Send((0,), (1,), 0), Send((1,), (0,), 1)),))
    >>> print(simulate(swap, fabric, size=2000))
    direct shift of 2000 B over 2 devices: 2.000 us
      link                 messages        bytes    busy us   used
      (0,)->(1,)                  1         1000      1.000    50%
      (1,)->(0,)                  1         1000      1.000    50%
      2000 B on 2 of 2 links
    """
    _check_fabric(fabric)
    if isinstance(what, Schedule):
        return _simulate_schedule(what, fabric, _checked_size(size), barrier)
    if size is not None:
        raise ArgumentError(f"a {type(what).__name__} knows its sizes", asked=f"size={size!r}", fix="leave size out")
    if isinstance(what, Plan):
        program = _Program(fabric, compute, [what.mesh], barrier)
        program.call(what)
        return program.run(what.call.op)
    if isinstance(what, Explanation):
        return _simulate_log(what.log, fabric, compute, mesh, barrier)
    if isinstance(what, Log):
        return _simulate_log(what, fabric, compute, mesh, barrier)
    raise ArgumentError(f"simulate takes a Schedule, a Plan, a Log or an Explanation, not {what!r}")


def _check_fabric(fabric: object) -> None:
    if not isinstance(fabric, Fabric):
        raise ArgumentError(
            f"simulate takes a Fabric, not {fabric!r}", fix="make one with Fabric.grid or take a preset"
        )


def _checked_size(size: int | None) -> int:
    if size is None or size < 0:
        raise ArgumentError(f"a schedule is simulated for a size in bytes, not {size!r}", fix="give size=2**20")
    return size


# one schedule


def _simulate_schedule(schedule: Schedule, fabric: Fabric, size: int, barrier: bool) -> Simulation:
    wires = Wires(fabric)
    sends = read_schedule(schedule, wires, size)
    start, arrive = (each + fabric.launch for each in finish_schedule(sends, barrier))
    name = f"{schedule.algorithm} {schedule.collective}"
    labels = sends.chunk + np.where(np.diff(sends.parts) > 1, schedule.chunks, 0)
    devices, begin, finish = _presence(sends, start, arrive, len(wires.coordinates))
    spans = Spans(
        _tracks(fabric),
        len(fabric.links),
        (
            *(f"chunk {i}" for i in range(schedule.chunks)),
            *(f"chunk {i} and others" for i in range(schedule.chunks)),
            name,
        ),
        np.concatenate([sends.link, devices + len(fabric.links)]),
        np.concatenate([labels, np.full(len(devices), 2 * schedule.chunks)]),
        np.concatenate([start, begin]),
        np.concatenate([sends.busy, finish - begin]),
        np.concatenate([sends.size, np.zeros(len(devices), np.int64)]),
    )
    title = f"{name} of {size} B over {len(schedule.group)} devices" + (f" on {fabric.name}" if fabric.name else "")
    return _sum_up(title, float(arrive.max(initial=0.0)), fabric, spans)


def _presence(sends: Sends, start: Floats, arrive: Floats, count: int) -> tuple[Integers, Floats, Floats]:
    """The devices that take part, from the first message that each sends or receives to the last."""
    begin, finish = np.full(count, np.inf), np.zeros(count)
    for devices, end in ((sends.source, start + sends.busy), (sends.destination, arrive)):
        np.minimum.at(begin, devices, start)
        np.maximum.at(finish, devices, end)
    found = np.flatnonzero(np.isfinite(begin))
    return found, begin[found], finish[found]


def _tracks(fabric: Fabric) -> tuple[str, ...]:
    return (
        *(_arrow(each.source, each.destination) for each in fabric.links),
        *(str(place) for place in fabric.coordinates()),
    )


def _arrow(source: Coordinate, destination: Coordinate) -> str:
    return f"{source}->{destination}"


def _sum_up(title: str, time: float, fabric: Fabric, spans: Spans) -> Simulation:
    count = len(fabric.links)
    on_links = spans.track < count
    track = spans.track[on_links]
    messages = np.bincount(track, minlength=count).tolist()
    busy = np.bincount(track, spans.duration[on_links], minlength=count).tolist()
    carried = np.zeros(count, np.int64)
    np.add.at(carried, track, spans.bytes[on_links])
    uses = zip(fabric.links, messages, carried.tolist(), busy, strict=True)
    links = (LinkUse(at.source, at.destination, n, size, b, b / time if time else 0.0) for at, n, size, b in uses)
    return Simulation(title, time, tuple(links), spans)


# plans and records


def whole_size(collective: Collective) -> int:
    """The bytes of the whole value of a collective: for an all-to-all, what all devices hold together.

    >>> whole_size(Collective("all_gather", "tp", 4, 96, "f32", (2, 4)))
    128
    """
    return KINDS[collective.kind].whole(collective.bytes, collective.devices)


def schedule_of(kind: str, group: tuple[Coordinate, ...], fabric: Fabric, size: int) -> Schedule:
    """The schedule that a collective of a plan or a record is carried out with: the fastest that the links allow.

    A record does not keep the root of a rooted collective, which is taken to be the first member, nor who sends to whom
    in a point-to-point one: there every member sends to the next.
    """
    if len(group) == 1:
        return Schedule(kind, "none", group, 1, ())
    if kind in ("send_recv", "shift"):
        return _to_the_next(kind, group, fabric)
    return choose(kind, group, fabric, size)(group, fabric)


def _to_the_next(kind: str, group: tuple[Coordinate, ...], fabric: Fabric) -> Schedule:
    ways = [fabric.route(here, there) for here, there in zip(group, (*group[1:], group[0]), strict=True)]
    hops = (
        tuple(Send(way[hop], way[hop + 1], chunk) for chunk, way in enumerate(ways) if hop + 1 < len(way))
        for hop in range(max(map(len, ways)) - 1)
    )
    return Schedule(kind, "routes", group, len(group), tuple(hops))


def compute_time(plan: Plan, machine: Machine) -> float:
    """Seconds that the fullest device computes, as the planner prices it."""
    dtypes = [each.dtype for each in plan.raw]
    return load_of(plan.call, find(plan.call.op).rule(plan.call), plan.rows, dtypes).seconds(machine)


After = dict[int, tuple[int, ...]]  # for each device the jobs that something waits for
_Made = tuple[Shape, str]


def _simulate_log(log: Log, fabric: Fabric, compute: Machine | None, mesh: Mesh | None, barrier: bool) -> Simulation:
    plans = [each for each, _ in log.calls if isinstance(each, Plan)]
    meshes = dict.fromkeys([*([mesh] if mesh else []), *(each.mesh for each in plans)])
    program = _Program(fabric, compute, list(meshes), barrier)
    for each in _in_order(log):
        if isinstance(each, Plan):
            program.call(each)
        elif isinstance(each, Event):
            program.event(each.collective)
        else:
            program.wait_for_all()
    return program.run(f"{len(log.calls)} calls, {len(log.events)} collectives")


def _in_order(log: Log) -> Iterator[Plan | Event | str]:
    """Calls with the events between them; the events of a call itself are in its plan."""
    if len(log.marks) != len(log.calls):
        raise ArgumentError("the record does not say when its calls were made", fix="write calls with log.called")
    at = 0
    for (each, where), mark in zip(log.calls, log.marks, strict=True):
        yield from log.events[at:mark]
        at = mark
        if isinstance(each, Plan):
            at += len(each.forward)
            if [event.collective for event in log.events[mark:at]] != list(each.forward):
                raise ArgumentError(f"the record has the call {each.call.op} at {where} without its collectives")
        yield each
    yield from log.events[at:]


class _Program:
    """Calls and collectives as jobs.

    What a call needs of earlier ones is known by shape and dtype: it waits for every earlier result that could be an
    operand of it. A collective without a call (a redistribution, backward) waits for all that came before, and what
    comes after waits for it.
    """

    def __init__(self, fabric: Fabric, compute: Machine | None, meshes: Sequence[Mesh], barrier: bool) -> None:
        self.fabric, self.compute, self.meshes, self.barrier = fabric, compute, meshes, barrier
        self.wires = Wires(fabric)
        self.jobs = Jobs()
        self.names: dict[str, int] = {}
        self.schedules: dict[tuple[str, tuple[int, ...], int], Sends] = {}
        self.collectives: list[tuple[int, int, int, int]] = []  # device, name, the job before it, the job after it
        self.made: dict[_Made, After] = {}
        self.computed: After = {}
        self.everything: After = {}
        self.floor: After = {}

    def call(self, plan: Plan) -> None:
        """One op: its operands are moved side by side, then computed, then statistics, then the results are moved."""
        machine = self.compute or plan.machine
        devices = self._devices(plan.mesh)
        keys = {(each.shape, each.dtype) for each in plan.call.operands}
        ready = self._join(devices, [self.floor, *(self.made.get(key, {}) for key in keys)])
        chains = list(self._split(plan))
        moved = [self._chain(plan.mesh, ready, chain) for chain in chains[: len(plan.ins)]]
        done = self._compute(plan, machine, self._join(devices, [ready, *moved, self.computed]))
        self.computed = {**self.computed, **done}
        done = self._chain(plan.mesh, done, chains[len(plan.ins)])
        for made, chain in zip(plan.outs, chains[len(plan.ins) + 1 :], strict=True):
            self._keep((made.shape, made.dtype), self._chain(plan.mesh, done, chain))

    def event(self, collective: Collective) -> None:
        """A collective that no call of the record has asked for."""
        if collective.kind == "copy":
            raise UnsupportedError(
                f"a record does not say which links {collective} takes",
                fix="loom.dry_run prices copies between meshes, and has the time of a program with them",
            )
        mesh = self._mesh_of(collective)
        self.wait_for_all()
        self._note(self._collective(mesh, self._join(self._devices(mesh), [self.floor]), collective))
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Whatever comes now waits for whatever was there."""
        self.floor = self._join(self.everything, [self.everything])

    def run(self, title: str) -> Simulation:
        """The simulation of all that was added."""
        start, arrive = self.jobs.run()
        resource, label = (np.array(each, np.int64) for each in (self.jobs.resource, self.jobs.label))
        real = resource != NOWHERE
        device, name, before, after = np.array(self.collectives, np.int64).reshape(-1, 4).T
        begin = arrive[before] if len(before) else np.zeros(0)
        spans = Spans(
            _tracks(self.fabric),
            len(self.fabric.links),
            tuple(self.names),
            np.concatenate([resource[real], device + len(self.fabric.links)]),
            np.concatenate([label[real], name]),
            np.concatenate([start[real], begin]),
            np.concatenate([np.array(self.jobs.busy)[real], arrive[after] - begin]),
            np.concatenate([np.array(self.jobs.size, np.int64)[real], np.zeros(len(device), np.int64)]),
        )
        where = f" on {self.fabric.name}" if self.fabric.name else ""
        return _sum_up(title + where, float(arrive.max(initial=0.0)), self.fabric, spans)

    def _split(self, plan: Plan) -> Iterator[tuple[Collective, ...]]:
        """The collectives of a plan by what they are for: each operand, the statistics inside, each result."""
        left = list(plan.forward)

        def take(count: int) -> tuple[Collective, ...]:
            taken, left[:] = tuple(left[:count]), left[count:]
            return taken

        for source, target in zip(plan.call.operands, plan.ins, strict=True):
            yield take(len(route(source, target.placements, plan.machine)[0]))
        results = [len(route(a, b.placements, plan.machine)[0]) for a, b in zip(plan.raw, plan.outs, strict=True)]
        yield take(len(left) - sum(results))
        yield from map(take, results)

    def _compute(self, plan: Plan, machine: Machine, after: After) -> After:
        seconds = compute_time(plan, machine)
        name, first = self._name(plan.call.op), len(self.fabric.links)
        return {at: (self.jobs.add(first + at, jobs, seconds, label=name),) for at, jobs in after.items()}

    def _chain(self, mesh: Mesh, at: After, collectives: Iterable[Collective]) -> After:
        for each in collectives:
            at = self._collective(mesh, at, each)
        return at

    def _collective(self, mesh: Mesh, at: After, collective: Collective) -> After:
        """A collective in every group of its axes: the members' sends wait for what is before it on their device."""
        done: After = {}
        name = self._name(f"{collective.kind} over {collective.axis}")
        before = {device: self.jobs.join(jobs) for device, jobs in at.items()}
        gates = {device: self._launch(job, collective) for device, job in before.items()}
        for group in self._groups(mesh, collective.axis.split(",")):
            sends = self._sends(collective, group)
            made = add_sends(self.jobs, sends, gates, self.barrier, name)
            arrivals: dict[int, list[int]] = {device: [gates[device]] for device in group}
            for job, device in zip(made, sends.destination.tolist(), strict=True):
                arrivals.setdefault(device, []).append(job)
            for device in group:
                done[device] = (self.jobs.join(arrivals[device]),)
                self.collectives.append((device, name, before[device], done[device][0]))
        return done

    def _launch(self, job: int, collective: Collective) -> int:
        """What a collective waits for once it may begin: that it has been started."""
        if not self.fabric.launch or collective.devices == 1:
            return job
        return self.jobs.add(NOWHERE, (job,), delay=self.fabric.launch)

    def _sends(self, collective: Collective, group: tuple[int, ...]) -> Sends:
        size = whole_size(collective)
        key = (collective.kind, group, size)
        if key not in self.schedules:
            members = tuple(self.wires.coordinates[device] for device in group)
            schedule = schedule_of(collective.kind, members, self.fabric, size)
            self.schedules[key] = read_schedule(schedule, self.wires, size)
        return self.schedules[key]

    def _groups(self, mesh: Mesh, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        along = {mesh.axis(name) for name in axes}
        groups: dict[Coordinate, list[int]] = {}
        for place, device in zip(mesh.coordinates(), self._devices(mesh), strict=True):
            groups.setdefault(tuple(c for axis, c in enumerate(place) if axis not in along), []).append(device)
        return map(tuple, groups.values())

    def _devices(self, mesh: Mesh) -> tuple[int, ...]:
        if max(mesh.device_ids) >= len(self.wires.coordinates):
            raise MeshError(
                f"device {max(mesh.device_ids)} is not on a fabric of {len(self.wires.coordinates)} devices",
                mesh=mesh,
                fabric=self.fabric,
                fix=f"simulate on a fabric of at least {max(mesh.device_ids) + 1} devices",
            )
        return mesh.device_ids

    def _mesh_of(self, collective: Collective) -> Mesh:
        names = collective.axis.split(",")
        for mesh in self.meshes:
            sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
            if set(names) <= set(sizes) and math.prod(sizes[name] for name in names) == collective.devices:
                return mesh
        raise MeshError(
            f"no mesh is known for {collective}", known=", ".join(map(str, self.meshes)) or None, fix="give mesh="
        )

    def _name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def _keep(self, key: _Made, done: After) -> None:
        before = self.made.get(key, {})
        self.made[key] = {**before, **self._join(done, [before, done])}
        self._note(done)

    def _note(self, done: After) -> None:
        self.everything = {**self.everything, **self._join(done, [self.everything, done])}

    def _join(self, devices: Iterable[int], parts: Sequence[After]) -> After:
        """For each device one job that waits for all of its parts; none where there is nothing to wait for."""
        found: After = {}
        for device in devices:
            jobs = tuple(dict.fromkeys(job for part in parts for job in part.get(device, ())))
            found[device] = (self.jobs.join(jobs),) if jobs else ()
        return found
