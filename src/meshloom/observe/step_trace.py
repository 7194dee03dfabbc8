"""A dry run in Chrome's trace format, which Perfetto opens: one process per class of devices, a track for compute and
one per mesh axis, memory as a counter, and arrows between what waits for each other. Start with `step_events`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshloom.cost.step import HELD_FOR
from meshloom.observe.timing import Slice

if TYPE_CHECKING:
    from meshloom.observe.dry_run import DryRun

Event = dict[str, object]
Place = tuple[int, int]  # process and track


def step_events(run: DryRun) -> Iterator[Event]:
    """Names, boxes, memory and arrows of a dry run, in microseconds."""
    tracks = _tracks(run)
    yield from _titles(run, tracks)
    for each in run.timeline:
        for process in _processes(run, each):
            yield _box(run, each, {"pid": process, "tid": tracks[each.mesh, each.axis]})
    yield from _memory(run)
    for number, (before, after) in enumerate(waits(run)):
        yield from _arrow(number, before, after, run, tracks)


def _tracks(run: DryRun) -> dict[tuple[int, str], int]:
    """A number for each mesh and axis; compute first."""
    found = {(each.mesh, each.axis) for each in run.timeline}
    return {key: 1 + i for i, key in enumerate(sorted(found, key=lambda key: (key[1] != "", key)))}


def _processes(run: DryRun, each: Slice) -> list[int]:
    """The classes of devices that take part; processes are numbered from 1."""
    return [1 + kind.number for kind in run.graph.classes if each.mesh in kind.meshes]


def _titles(run: DryRun, tracks: dict[tuple[int, str], int]) -> Iterator[Event]:
    for kind in run.graph.classes:
        name = f"one of {kind.devices} devices of {run.machine.name}"
        yield {"ph": "M", "name": "process_name", "pid": 1 + kind.number, "args": {"name": name}}
        for (mesh, axis), track in tracks.items():
            if mesh in kind.meshes:
                said = (f"links of {axis}" if axis else "compute") + (f", mesh {mesh}" if mesh else "")
                place = {"pid": 1 + kind.number, "tid": track}
                yield {"ph": "M", "name": "thread_name", **place, "args": {"name": said}}
                yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": track}}


def _box(run: DryRun, each: Slice, place: dict[str, int]) -> Event:
    """Compute or a collective, with where it comes from."""
    node = run.nodes[each.node]
    says: Event = {"phase": node.phase, "module": node.module, "line": node.where, "node": node.number}
    if each.axis:
        says |= {"bytes": each.bytes, "exposed_us": each.exposed * 1e6, "of": node.op}
    else:
        says |= {"flops": node.flops, "operands": list(node.operands), "results": list(node.results)}
    times = {"ts": each.start * 1e6, "dur": each.duration * 1e6}
    return {"ph": "X", "cat": node.phase, "name": each.name, **place, **times, "args": says}


def _memory(run: DryRun) -> Iterator[Event]:
    """What one device holds, by purpose, wherever that changes; of the class that needs most."""
    last: tuple[int, ...] = ()
    for point in run.memory.timeline:
        if point.held != last:
            last = point.held
            held = dict(zip(HELD_FOR, last, strict=True))
            place = {"pid": 1 + run.memory.device_class, "ts": point.time * 1e6}
            yield {"ph": "C", "name": "memory in bytes", **place, "args": held}


def waits(run: DryRun) -> Iterator[tuple[Slice, Slice]]:
    """What waits for what: compute for the collectives that bring its operands, collectives for what they move, and
    the first compute that reads what a collective has reduced."""
    by_node: dict[int, list[Slice]] = defaultdict(list)
    for each in run.timeline:
        by_node[each.node].append(each)
    reduced: dict[int, Slice] = {}  # by storage
    for node in run.nodes:
        own = by_node[node.number]
        compute = next((each for each in own if not each.axis), None)
        if compute is not None:
            for held in node.reads:
                if held in reduced and reduced[held].end <= compute.start:
                    yield reduced.pop(held), compute
            for each in own:
                if each.axis:
                    yield (each, compute) if each.start < compute.start else (compute, each)
        last = max((each for each in own if each.axis), key=lambda each: each.end, default=None)
        if last is not None and node.after:
            reduced.update(dict.fromkeys(node.writes, last))


def _arrow(
    number: int, before: Slice, after: Slice, run: DryRun, tracks: dict[tuple[int, str], int]
) -> Iterator[Event]:
    """From the end of one box to the start of another; the end is drawn a little inside, so that it has a box."""
    for kind, each, time in (("s", before, before.end - before.duration / 100), ("f", after, after.start)):
        place = {"pid": _processes(run, each)[0], "tid": tracks[each.mesh, each.axis], "ts": time * 1e6}
        yield {
            "ph": kind,
            "id": number,
            "cat": "waits",
            "name": "waits",
            **place,
            **({"bp": "e"} if kind == "f" else {}),
        }
