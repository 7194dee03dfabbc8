"""What a report shows, read from a dry run as plain values that JSON can hold.

Totals are exact. The two long lists, slices of time and points of memory, are columns; their times have eight digits,
their bytes are exact. Names stand once in `names` and are numbers elsewhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from meshloom.cost.step import HELD_FOR, PHASES, Node
from meshloom.mesh import Mesh
from meshloom.observe.report.alternatives import Alternatives
from meshloom.observe.tables import Branch, Total
from meshloom.observe.timing import Prices, Slice

if TYPE_CHECKING:
    from meshloom.observe.dry_run import DryRun

SHOWN = 10  # calls that cost most
TENSORS = 20  # of those alive at the peak
DIGITS = 8

Figures = dict[str, Any]


def collect_figures(run: DryRun) -> Figures:
    """All that a report shows of a dry run."""
    names = Names()
    found = {
        "title": f"{_machine_title(run)}: {', '.join(map(str, run.graph.meshes)) or 'no mesh'}",
        "machine": run.machine.name,
        "totals": totals(run),
        "bounds": [{"what": what, "seconds": seconds} for what, seconds in run.bounds.items()],
        "phases": [row(each) for each in run.table("phase")],
        "kinds": [*kinds(run)],
        "ops": [row(each) for each in run.table("kind")],
        "modules": [row(each) for each in run.table("module")],
        "memory": memory(run),
        "tree": tree(run.tree),
        "links": links(run),
        "meshes": [*map(mesh, run.graph.meshes)],
        "nodes": nodes(run, names),
        "timeline": timeline(run, names),
        "calls": calls(run),
        "assumptions": [
            {"what": each.what, "value": each.value, "source": each.source} for each in run.assumptions
        ],
    }  # fmt: skip
    return {**found, "names": names.all}


def compare_plans(plans: Sequence[tuple[DryRun, str, str, str]]) -> list[Figures]:
    """The totals of several runs side by side, each with why it is slower than the first, and its plan."""
    return [
        {
            "title": title, "mesh": ", ".join(map(str, run.graph.meshes)), "why": why, "plan": plan, **_few_totals(run),
            "bounds": [{"what": what, "seconds": seconds} for what, seconds in run.bounds.items()],
        }
        for run, title, why, plan in plans
    ]  # fmt: skip


def _few_totals(run: DryRun) -> Figures:
    found = totals(run)
    return {name: found[name] for name in ("time", "compute", "exposed", "mfu", "memory", "bytes")}


class Names:
    """Texts as numbers."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text."""
        if text not in self.numbers:
            self.numbers[text] = len(self.all)
            self.all.append(text)
        return self.numbers[text]


def _machine_title(run: DryRun) -> str:
    count = run.graph.devices
    return f"A step on {count:,} device{'' if count == 1 else 's'} of {run.machine.name}"


def totals(run: DryRun) -> Figures:
    """The headline."""
    limit = run.limit if run.limit is not None and math.isfinite(run.limit) else None
    return {
        "time": run.time,
        "compute": run.timing.compute,
        "communication": run.timing.communication,
        "exposed": run.timing.exposed,
        "mfu": run.mfu,
        "flops": run.flops,
        "device_flops": run.device_flops,
        "peak_flops": run.machine.peak(run.dtype),
        "dtype": run.dtype,
        "memory": run.memory.peak,
        "limit": limit,
        "bytes": run.bytes,
        "devices": run.graph.devices,
        "calls": len(run.nodes),
        "has_data": run.graph.has_data,
    }


def row(total: Total) -> Figures:
    """A line of a table."""
    return {
        "name": total.name,
        "count": total.count,
        "calls": total.calls,
        "time": total.time,
        "compute": total.compute,
        "exposed": total.exposed,
        "hidden": hidden(total),
        "flops": total.flops,
        "bytes": total.bytes,
    }


def hidden(total: Total) -> float:
    """The seconds of collectives that run beside compute; a difference of rounding is none.

    >>> hidden(Total("", communication=2.0, exposed=0.5)), hidden(Total("", communication=0.1 * 3, exposed=0.3))
    (1.5, 0.0)
    """
    beside = total.communication - total.exposed
    return beside if beside > 1e-9 * total.communication else 0.0


def kinds(run: DryRun) -> Iterable[Figures]:
    """Time by phase and by what it goes to: what bounds compute, and each collective over each axis."""
    found: dict[tuple[str, str], Total] = {}
    for phase, name, seconds in _computed(run):
        total = found.setdefault((phase, name), Total(name))
        total.calls += 1
        total.compute += seconds
    for each in run.timeline:
        if each.axis:
            key = run.nodes[each.node].phase, f"{each.name.partition(' ')[0]} over {each.axis}"
            total = found.setdefault(key, Total(key[1]))
            total.calls += 1
            total.add_slice(each)
    for phase, name in sorted(found, key=lambda key: (PHASES.index(key[0]), -found[key].time)):
        yield {"phase": phase, **row(found[phase, name])}


def _computed(run: DryRun) -> Iterable[tuple[str, str, float]]:
    prices = Prices(run.machine, run.graph.meshes)
    for node in run.nodes:
        for name, seconds in prices.bounds(node).items():
            if seconds:
                yield node.phase, name, seconds


def memory(run: DryRun) -> Figures:
    """The peak explained, and memory over time as differences from point to point."""
    held, points = run.memory, run.memory.timeline
    columns = list(zip(*(point.held for point in points), strict=True)) or [() for _ in HELD_FOR]
    return {
        "purposes": list(HELD_FOR),
        "at_peak": [held.at_peak.get(what, 0) for what in HELD_FOR],
        "peaks": [held.peaks.get(what, 0) for what in HELD_FOR],
        "node": None if held.node is None else held.node.number,
        "where": held.where,
        "call": str(held.node) if held.node is not None else "the start",
        "alive": alive(run)[:TENSORS],
        "tensors": len(held.alive),
        "nodes": differences([point.node for point in points]),
        "times": [shorten(point.time) for point in points],
        "held": [differences(column) for column in columns],
    }


def alive(run: DryRun) -> list[Figures]:
    """What is there at the peak, largest first; what equal layers or lines of a loop made is one line with a count."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for each in run.memory.alive:
        folded = run.folding.path(each.module)
        name = each.name.replace(each.module, folded) if each.module else each.name
        found[name, each.held_for, each.where].append(each.bytes)
    lines = sorted(found.items(), key=lambda line: -sum(line[1]))
    return [
        {"name": name, "purpose": what, "where": where, "count": len(sizes), "bytes": sum(sizes)}
        for (name, what, where), sizes in lines
    ]


def differences(values: Sequence[int]) -> list[int]:
    """The first value, then by how much each differs from the one before: mostly zeros, which are short.

    >>> differences([5, 5, 7])
    [5, 0, 2]
    """
    return [*values[:1], *(after - before for before, after in pairwise(values))]


def shorten(seconds: float) -> float:
    """A time with the digits that a picture needs.

    >>> shorten(0.12345678912)
    0.12345679
    """
    return float(f"{seconds:.{DIGITS}g}")


def tree(branch: Branch) -> Figures:
    """A module with its modules, its ops and what these wait for."""
    own = [_op(name, total) for name, total in branch.ops.items()]
    inside = [*map(tree, branch.children.values()), *own]
    return {"kind": "module", "path": branch.path, **row(branch.total), "name": branch.name, "inside": inside}


def _op(name: str, total: Total) -> Figures:
    waits = {"kind": "waits", "path": name, **row(Total("waits", exposed=total.exposed)), "inside": []}
    phase = name.rpartition("(")[2].rstrip(")")
    return {"kind": "op", "phase": phase, "path": name, **row(total), "inside": [waits] if total.exposed else []}


def links(run: DryRun) -> list[Figures]:
    """What the links of each axis carry."""
    return [
        {
            "name": name,
            "axis": load.axis,
            "devices": load.devices,
            "collectives": load.collectives,
            "bytes": load.bytes,
            "seconds": load.seconds,
            "exposed": load.exposed,
            "used": load.used,
            "kinds": dict(load.kinds),
            "links": load.links,
        }
        for name, load in run.links.items()
    ]


def mesh(of: Mesh) -> Figures:
    """A mesh; the ids of its devices only where they are not counted from 0.

    >>> mesh(Mesh(dp=2, tp=2)), mesh(Mesh(dp=2, tp=2).submesh(dp=1))["ids"]
    ({'axes': ['dp', 'tp'], 'shape': [2, 2], 'ids': None}, [2, 3])
    """
    ids = list(of.device_ids)
    counted = ids == list(range(len(ids)))
    return {"axes": list(of.axes), "shape": list(of.shape), "ids": None if counted else ids}


def nodes(run: DryRun, names: Names) -> Figures:
    """What each node is."""
    return {
        "op": [names.number(each.op) for each in run.nodes],
        "phase": [PHASES.index(each.phase) for each in run.nodes],
        "module": [names.number(each.module) for each in run.nodes],
        "where": [names.number(each.where) for each in run.nodes],
    }


def timeline(run: DryRun, names: Names) -> Figures:
    """One device of each class over time: lanes, and slices as columns."""
    lanes: dict[tuple[int, str], int] = {}
    for each in run.timeline:
        lanes.setdefault((each.mesh, each.axis), 0)
    order = sorted(lanes, key=lambda lane: (lane[0], lane[1] != "", lane[1]))
    lanes = {lane: number for number, lane in enumerate(order)}
    return {
        "phases": list(PHASES),
        "classes": [
            {"devices": each.devices, "lanes": [lanes[lane] for lane in order if lane[0] in each.meshes]}
            for each in run.graph.classes
        ],
        "lanes": [{"mesh": mesh, "name": axis or "compute"} for mesh, axis in order],
        "node": [each.node for each in run.timeline],
        "lane": [lanes[each.mesh, each.axis] for each in run.timeline],
        "name": [names.number(each.name) for each in run.timeline],
        "start": [shorten(each.start) for each in run.timeline],
        "duration": [shorten(each.duration) for each in run.timeline],
        "exposed": [shorten(each.exposed) for each in run.timeline],
        "bytes": [each.bytes for each in run.timeline],
    }


def calls(run: DryRun) -> list[Figures]:
    """The calls that cost most, equal layers together, each with the cheaper way that the planner knows of."""
    slices: dict[int, list[Slice]] = defaultdict(list)
    for each in run.timeline:
        slices[each.node].append(each)
    groups: dict[tuple[object, ...], tuple[Total, Node]] = {}
    for node in run.nodes:
        module = run.folding.path(node.module)
        key = (node.op, node.phase, module, node.where, node.operands)
        total, _ = groups.setdefault(key, (Total(module), node))
        total.add(node, slices[node.number])
        total.modules.add(node.module)
    most = sorted(groups.values(), key=lambda group: -group[0].time)[:SHOWN]
    cheaper = Alternatives(run)
    return [_call(total, node, cheaper) for total, node in most if total.time]


def _call(total: Total, node: Node, cheaper: Alternatives) -> Figures:
    return {
        **row(total),
        "op": node.op,
        "phase": node.phase,
        "where": node.where,
        "operands": list(node.operands),
        "results": list(node.results),
        "moves": [
            {"kind": each.kind, "op": each.op, "axis": each.axis, "devices": each.devices, "bytes": each.bytes}
            for each in node.collectives
        ],
        "alternative": cheaper.find(node),
    }
