"""A dry run: time, memory and links of a step on a machine, before any hardware is booked.

Inside of `dry_run` a program runs as it is. On tensors of `device="meta"` nothing is computed, so that a model of any
size on a mesh of any size costs seconds; on tensors with data it runs, and is recorded. What was recorded is a step
graph (`meshloom.cost.step`); everything that a `DryRun` says is read from it and from the machine's figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any

from meshloom.cost.step import PHASES, DeviceClass, Node, StepGraph
from meshloom.errors import ArgumentError, UnsupportedError, closest, expect
from meshloom.fabric import Machine, Preset
from meshloom.fabric.catalogue import as_machine, memory_on
from meshloom.observe.folding import Folding
from meshloom.observe.memory_use import Memory, measure, show_bytes
from meshloom.observe.tables import Branch, Table, Total, grow_tree, total_by
from meshloom.observe.timing import STREAMS, Prices, Slice, Timing, cover, time_step
from meshloom.runtime import Log, state

TABLES = ("module", "phase", "axis", "line", "kind")


@dataclass(frozen=True, slots=True)
class AxisLoad:
    """What the links of one mesh axis carry in a step."""

    axis: str
    devices: int  # in one group of the axis
    collectives: int
    bytes: int  # that one device receives
    seconds: float  # in which its links are busy
    exposed: float  # of those, the seconds in which devices only wait
    used: float  # busy seconds over the time of the step
    kinds: Mapping[str, int]  # bytes by kind of collective
    links: str  # what joins the devices of a group: "ring of 8, 34.8 GB/s, 0.87 us"


@dataclass(frozen=True, slots=True)
class ClassTime:
    """What the devices of one class do in a step: those that are on the same meshes, such as a stage of a pipeline."""

    number: int
    devices: int
    meshes: tuple[str, ...]
    compute: float  # seconds
    communication: float  # seconds of collectives on its meshes, hidden ones included
    busy: float  # seconds in which it computes or communicates on its own mesh
    bubble: float  # the part of the step in which it waits for other classes


@dataclass(frozen=True, slots=True)
class Assumption:
    """A figure or a simplification that the answer rests on, and where it comes from."""

    what: str
    value: str
    source: str


class DryRun:
    """What a step costs on a machine. Empty until the `with` block has ended.

    The data behind the answers: `graph` (nodes and storages), `timeline` (one device over time), `memory.timeline`,
    `tree` (modules with equal layers folded), `links` (per mesh axis) and `assumptions`.
    """

    def __init__(
        self, machine: Machine, memory: float | None, overlap: bool = True, fused_attention: bool = True
    ) -> None:
        self.machine = machine  # whose figures the prices come from
        self.overlap = overlap  # whether communication may run beside compute
        self.fused_attention = fused_attention  # whether attention without data keeps no scores
        self.limit = memory  # bytes that one device has; None for no limit
        self.log = Log()  # the collectives in order, as `loom.record` has them
        self._graph: StepGraph | None = None

    def _take(self, recorder: Any) -> None:
        self._graph = recorder.graph()
        self.log = Log(**{field.name: getattr(recorder, field.name) for field in fields(Log)})

    @property
    def graph(self) -> StepGraph:
        """The nodes and storages of the step."""
        if self._graph is None:
            raise UnsupportedError(
                "a dry run has its answers when its block has ended",
                fix="read them after the block: with loom.dry_run() as run: step()",
            )
        return self._graph

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls of the step in order: forward, backward and optimizer."""
        return self.graph.nodes

    @cached_property
    def timing(self) -> Timing:
        """When each node computes and communicates on one device."""
        return time_step(self.graph, self.machine, self.overlap)

    @property
    def timeline(self) -> tuple[Slice, ...]:
        """One device over time: start, duration and stream of every compute and collective, in the order of time."""
        return self.timing.slices

    @property
    def time(self) -> float:
        """Seconds of the step."""
        return self.timing.time

    @cached_property
    def memory(self) -> Memory:
        """What one device holds: the peak, by purpose, and over time."""
        starts: dict[int, float] = {}
        for each in self.timeline:
            starts.setdefault(each.node, each.start)
        return measure(self.graph, self.limit, starts)

    @cached_property
    def flops(self) -> float:
        """The products of the step on all devices, counted once where several devices do the same; no recomputation."""
        return sum(node.model_flops for node in self.nodes)

    @property
    def device_flops(self) -> float:
        """The arithmetic of one device, with everything that it does."""
        return sum(node.flops for node in self.nodes)

    @property
    def dtype(self) -> str:
        """The dtype that most of the arithmetic is done in."""
        found: dict[str, float] = defaultdict(float)
        for node in self.nodes:
            found[node.dtype] += node.flops
        return max(found, key=lambda each: found[each], default="f32")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `flops` over what all devices could do in that time at their peak."""
        could = self.time * self.graph.devices * self.machine.peak(self.dtype)
        return self.flops / could if could else 0.0

    @property
    def bytes(self) -> int:
        """The bytes that one device receives from others."""
        return sum(node.bytes for node in self.nodes)

    @cached_property
    def links(self) -> dict[str, AxisLoad]:
        """What the links of each mesh axis carry, by the name of the axis; with several meshes, `axis of mesh 1`."""
        found = {(node.mesh, each.axis): each.devices for node in self.nodes for each in node.collectives}
        return {_axis_name(*key): self._load(*key, devices) for key, devices in found.items()}

    def _load(self, mesh: int, axis: str, devices: int) -> AxisLoad:
        nodes = [node for node in self.nodes if node.mesh == mesh]
        slices = [each for each in self.timeline if (each.mesh, each.axis) == (mesh, axis)]
        moved = [each for node in nodes for each in node.collectives if each.axis == axis]
        kinds: dict[str, int] = defaultdict(int)
        for each in moved:
            kinds[each.kind] += each.bytes
        busy, exposed = sum(each.duration for each in slices), sum(each.exposed for each in slices)
        used = busy / self.time if self.time else 0.0
        joined = self.machine.on(self.graph.meshes[mesh]).axis(axis, devices)
        links = str(joined) if joined is not None else f"ring of {devices}, {_show_links(self.machine)}"
        return AxisLoad(axis, devices, len(moved), sum(kinds.values()), busy, exposed, used, dict(kinds), links)

    @cached_property
    def classes(self) -> tuple[ClassTime, ...]:
        """The classes of devices, such as the stages of a pipeline, with what each does and how long it waits."""
        return tuple(self._class_time(each) for each in self.graph.classes)

    def _class_time(self, one: DeviceClass) -> ClassTime:
        own = [each for each in self.timeline if each.mesh in one.meshes and each.name != "copy"]
        compute, moved = (sum(each.duration for each in own if each.stream == kind) for kind in STREAMS)
        busy = cover((each.start, each.end) for each in own)
        bubble = 1.0 - busy / self.time if self.time else 0.0
        meshes = tuple(str(self.graph.meshes[number]) for number in one.meshes if number < len(self.graph.meshes))
        return ClassTime(one.number, one.devices, meshes, compute, moved, busy, bubble)

    @property
    def bubble(self) -> float:
        """The part of the time of all devices in which they wait for other classes: the bubble of a pipeline."""
        devices = sum(each.devices for each in self.classes)
        return sum(each.devices * each.bubble for each in self.classes) / devices if devices else 0.0

    @cached_property
    def bounds(self) -> dict[str, float]:
        """What the time goes to, in seconds: "arithmetic", "memory traffic", and waiting for each axis; largest first.

        A kernel is bound by whichever of arithmetic and traffic takes it longer.
        """
        found: dict[str, float] = defaultdict(float)
        prices = Prices(self.machine, self.graph.meshes)
        for node in self.nodes:
            for name, seconds in prices.bounds(node).items():
                found[name] += seconds
        for load in self.links.values():
            found[f"waits for {load.axis}"] += load.exposed
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def folding(self) -> Folding:
        """How paths of modules are written with equal layers folded."""
        return Folding(self.nodes)

    @cached_property
    def tree(self) -> Branch:
        """The modules with all that happens in them, equal layers as one branch."""
        return grow_tree(self.folding.path, self.nodes, self._slices, "step")

    @cached_property
    def _slices(self) -> dict[int, list[Slice]]:
        found: dict[int, list[Slice]] = defaultdict(list)
        for each in self.timeline:
            found[each.node].append(each)
        return found

    def table(self, by: str = "module") -> Table:
        """Where the time goes, by "module" (equal layers folded), "phase", "axis", "line" or "kind" (of op)."""
        if by not in TABLES:
            raise ArgumentError(f"by={by!r} is no table", fix=closest(by, TABLES))
        if by == "axis":
            return self._table_of_axes()
        keys = {
            "module": lambda node: self.folding.path(node.module) or f"({node.phase})",
            "phase": lambda node: node.phase,
            "line": lambda node: node.where,
            "kind": lambda node: node.op,
        }
        found = total_by(keys[by], self.nodes, self._slices)
        if by != "module":
            for each in found.values():
                each.modules.clear()
        order = (lambda row: PHASES.index(row.name)) if by == "phase" else (lambda row: -row.time)
        return Table(by, tuple(sorted(found.values(), key=order)), self.time)

    def _table_of_axes(self) -> Table:
        found: dict[str, Total] = {}
        for each in self.timeline:
            name = _axis_name(each.mesh, each.axis) if each.axis else "compute"
            total = found.setdefault(name, Total(name))
            total.calls += 1
            total.add_slice(each)
        return Table("axis", tuple(sorted(found.values(), key=lambda row: -row.time)), self.time)

    @cached_property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Every figure and simplification that the answers rest on."""
        return tuple(_assumptions(self))

    def compare(self, other: DryRun) -> Comparison:
        """This run beside another: totals, and where they differ most."""
        if not isinstance(other, DryRun):
            raise ArgumentError(f"compare takes another dry run, not {other!r:.80}")
        return Comparison(self, other)

    def report(self, path: str | PathLike[str]) -> None:
        """Write the run as one HTML page that opens offline: the totals, pictures, tables and assumptions."""
        from meshloom.observe.report import write_report

        write_report(self, path)

    def write_timeline(self, path: str | PathLike[str]) -> None:
        """Write one device over time as a file in Chrome's trace format, which Perfetto opens."""
        from meshloom.observe.step_trace import step_events
        from meshloom.observe.timeline import write_events

        write_events(step_events(self), path)

    def __str__(self) -> str:
        return "\n".join(_page(self))

    def __repr__(self) -> str:
        if self._graph is None:
            return f"<dry run on {self.machine.name}, not ended>"
        return f"<dry run on {self.machine.name}: {show_seconds(self.time)}, {show_bytes(self.memory.peak)}>"


def _axis_name(mesh: int, axis: str) -> str:
    return axis if not mesh else f"{axis} of mesh {mesh}"


@dataclass(frozen=True)
class Comparison:
    """Two dry runs side by side; `rows` has name, first and second value."""

    first: DryRun
    second: DryRun

    @property
    def rows(self) -> tuple[tuple[str, float, float], ...]:
        """Totals of both: seconds, bytes, FLOPs and shares."""
        pairs = [(name, read(self.first), read(self.second)) for name, read in _TOTALS.items()]
        for phase in PHASES:
            times = [_phase_time(run, phase) for run in (self.first, self.second)]
            if any(times):
                pairs.append((f"{phase} s", times[0], times[1]))
        axes = dict.fromkeys([*self.first.links, *self.second.links])
        pairs += [(f"{axis} bytes", _axis_bytes(self.first, axis), _axis_bytes(self.second, axis)) for axis in axes]
        return tuple(pairs)

    def __str__(self) -> str:
        head = f"{'':<20} {'first':>14} {'second':>14} {'second/first':>13}"
        return "\n".join([head, *(_compared(*row) for row in self.rows)])


_TOTALS: dict[str, Callable[[DryRun], float]] = {
    "time s": lambda run: run.time,
    "compute s": lambda run: run.timing.compute,
    "waits s": lambda run: run.timing.exposed,
    "MFU": lambda run: run.mfu,
    "memory bytes": lambda run: float(run.memory.peak),
    "bytes received": lambda run: float(run.bytes),
    "FLOPs": lambda run: run.flops,
    "devices": lambda run: float(run.graph.devices),
}


def _phase_time(run: DryRun, phase: str) -> float:
    return sum(row.time for row in run.table("phase").rows if row.name == phase)


def _axis_bytes(run: DryRun, axis: str) -> float:
    return float(run.links[axis].bytes) if axis in run.links else 0.0


def _compared(name: str, first: float, second: float) -> str:
    ratio = f"{second / first:13.3f}" if first else f"{'-':>13}"
    return f"{name:<20} {first:14.6g} {second:14.6g} {ratio}"


def _page(run: DryRun) -> Iterator[str]:
    """The totals, then where the time goes."""
    graph, timing = run.graph, run.timing
    how = "with data" if graph.has_data else "without data"
    meshes = ", ".join(map(str, graph.meshes))
    yield f"{len(graph.nodes)} calls on {meshes}: {graph.devices} devices of {run.machine.name}, {how}"
    parts = f"compute {show_seconds(timing.compute)}, waits {show_seconds(timing.exposed)}"
    yield f"  time    {show_seconds(run.time)}: {parts}"
    whole = sum(run.bounds.values()) or 1.0
    yield f"  bound   {', '.join(f'{what} {100 * seconds / whole:.0f} %' for what, seconds in run.bounds.items())}"
    peak = run.machine.peak(run.dtype)
    yield f"  MFU     {100 * run.mfu:.1f} % of {peak / 1e12:.4g} TFLOP/s ({run.dtype}); {run.flops:.4g} FLOP in all"
    yield f"  memory  {run.memory}"
    for one in run.classes if len(run.classes) > 1 else ():
        told = f"compute {show_seconds(one.compute)}, bubble {100 * one.bubble:.0f} %"
        yield f"  class {one.number} {one.devices} devices on {', '.join(one.meshes)}: {told}"
    for each in run.links.values():
        busy = f"{show_seconds(each.seconds)} busy ({100 * each.used:.0f} %), {show_seconds(each.exposed)} exposed"
        yield f"  {each.axis:<7} {each.collectives} collectives over {each.devices}: {show_bytes(each.bytes)}, {busy}"
    yield ""
    yield str(run.table("phase"))
    yield ""
    table = run.table("module")
    yield str(Table("module", table.rows, table.time, shown=20))


def show_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> show_seconds(1.5), show_seconds(0.0123), show_seconds(4e-6)
    ('1.50 s', '12.3 ms', '4.00 us')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds >= 10 * unit else f"{seconds / unit:.2f} {name}"
    return f"{seconds * 1e6:.3g} us"


def _show_links(machine: Machine) -> str:
    return f"{machine.bandwidth / 1e9:.4g} GB/s, {show_seconds(machine.latency)}"


def _assumptions(run: DryRun) -> Iterator[Assumption]:
    machine, source = run.machine, f"machine {run.machine.name!r}"
    for name, load in run.links.items():
        yield Assumption(f"links of axis {name}", load.links, source)
    yield Assumption(f"peak of {run.dtype}", f"{machine.peak(run.dtype) / 1e12:.4g} TFLOP/s", source)
    yield Assumption("memory bandwidth", f"{machine.memory_bandwidth / 1e9:.4g} GB/s", source)
    yield Assumption("part of the peak that is reached", f"{machine.efficiency:.2g}", source)
    yield Assumption("part of the memory bandwidth that is reached", f"{machine.memory_efficiency:.2g}", source)
    yield Assumption("starting a kernel", show_seconds(machine.overhead), source)
    yield Assumption("starting a collective", show_seconds(machine.launch), source)
    yield from _MODEL
    for what, value in run.log.assumed.items():
        yield Assumption(what, value, "no data to look at")
    scores = "a fused kernel, which keeps no scores" if run.fused_attention else "keeps its scores"
    yield Assumption("attention without data", scores, f"dry_run(fused_attention={run.fused_attention})")
    together = "may run beside compute" if run.overlap else "never runs beside compute"
    yield Assumption("communication", together, f"dry_run(overlap={run.overlap})")


_MODEL = tuple(
    Assumption(what, value, "docs/dry_run.md")
    for what, value in (
        ("devices", "those on the same meshes do the same; the one with the largest shards stands for all of them"),
        ("links", "one collective at a time on each mesh axis; axes share nothing but a port to a switch"),
        ("forward calls", "one kernel each: operands read once, results written once"),
        ("backward", "the kernels that autograd ran, each with its own traffic"),
        ("FLOPs", "products, by torch's formulas; causal attention counts all pairs"),
        ("gradients", f"summed as soon as they are there; those below {1 << 18} elements together"),
        ("host", "its own work, and tensors that never meet the mesh, cost nothing"),
    )
)


@contextmanager
def dry_run(
    machine: str | Machine | Preset | None = None,
    memory: float | None = None,
    overlap: bool = True,
    fused_attention: bool = True,
) -> Iterator[DryRun]:
    """Record the step inside, and say what it costs on a machine: time, memory, links.

    `machine` is a preset's name, a preset or a machine; without one it is the machine in use. `memory` is what one
    device has, in bytes; without it the machine's own. A step that needs more is an `OutOfMemoryError` at the end of
    the block. `overlap=False` runs compute and communication one after the other; `fused_attention=False` is for a
    machine whose attention writes all scores down.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((4,), axes=("tp",))
    >>> x = loom.randn(1024, 1024, mesh=mesh, placements="S(1)", device="meta")
    >>> with dry_run("t3000") as run:
    ...     y = x @ x.T
    >>> print(f"{run.flops:.3g} FLOP, {run.bytes} B, {run.memory.peak} B")
    2.15e+09 FLOP, 6291456 B, 5242880 B
    """
    from meshloom.tensor.recording import recording

    found = state.machine if machine is None else as_machine(machine)
    limit = memory_on(found, memory)
    expect("overlap", overlap, bool, fix="give True or False")
    expect("fused_attention", fused_attention, bool, fix="give True or False")
    run = DryRun(found, limit, overlap, fused_attention)
    with state.changed(keeps_scores=not fused_attention), recording() as recorder:
        yield run
    run._take(recorder)
    run.memory.check()


__all__ = ["Assumption", "AxisLoad", "ClassTime", "Comparison", "DryRun", "dry_run"]
