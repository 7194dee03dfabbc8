"""Reports of dry runs, and their figures read back and compared with the run, one by one."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import meshloom as loom
from llama import Sizes, make_step
from meshloom.cost.step import HELD_FOR, PHASES
from meshloom.observe.tables import Branch, Total

SMALL = Sizes(width=64, hidden=96, heads=4, groups=4, vocabulary=96, layers=3, dp=2, tp=4, rows=2, length=16)


def run_small(layers: int = 3, **options: Any) -> loom.DryRun:
    """A dry run of a small Llama."""
    with loom.dry_run("galaxy", **options) as run:
        make_step(Sizes(**{**vars(SMALL), "layers": layers}))()
    return run


def read_figures(path: Path) -> dict[str, Any]:
    """The figures of a page."""
    page = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def check_figures(figures: dict[str, Any], run: loom.DryRun) -> None:
    """Every figure is that of the run; times of the two long lists to eight digits."""
    check_totals(figures, run)
    for name, by in (("phases", "phase"), ("ops", "kind"), ("modules", "module")):
        rows = run.table(by).rows
        assert len(figures[name]) == len(rows) > 0
        for shown, row in zip(figures[name], rows, strict=True):
            check_row(shown, row)
    check_tree(figures["tree"], run.tree)
    check_memory(figures, run)
    check_timeline(figures, run)
    for shown, (name, load) in zip(figures["links"], run.links.items(), strict=True):
        assert shown.pop("name") == name
        assert shown == {each: getattr(load, each) for each in load.__dataclass_fields__}
    said = [(each["what"], each["value"], each["source"]) for each in figures["assumptions"]]
    assert said == [(each.what, each.value, each.source) for each in run.assumptions]
    assert [(each["axes"], each["shape"]) for each in figures["meshes"]] == [
        ([*mesh.axes], [*mesh.shape]) for mesh in run.graph.meshes
    ]


def check_totals(figures: dict[str, Any], run: loom.DryRun) -> None:
    assert figures["totals"] == {
        "time": run.time, "compute": run.timing.compute, "communication": run.timing.communication,
        "exposed": run.timing.exposed, "mfu": run.mfu, "flops": run.flops, "device_flops": run.device_flops,
        "peak_flops": run.machine.peak(run.dtype), "dtype": run.dtype, "memory": run.memory.peak, "limit": run.limit,
        "bytes": run.bytes, "devices": run.graph.devices, "calls": len(run.nodes), "has_data": run.graph.has_data,
    }  # fmt: skip
    assert [(each["what"], each["seconds"]) for each in figures["bounds"]] == [*run.bounds.items()]
    assert figures["machine"] == run.machine.name


def check_row(shown: dict[str, Any], total: Total) -> None:
    """A line of a table is a total."""
    for name in ("name", "count", "calls", "time", "compute", "exposed", "flops", "bytes"):
        assert shown[name] == getattr(total, name), name
    beside = total.communication - total.exposed
    assert shown["hidden"] == pytest.approx(beside, rel=1e-9, abs=1e-9 * total.communication)


def check_tree(shown: dict[str, Any], branch: Branch) -> None:
    """A box of the flame graph is a branch, and so are the boxes inside."""
    check_row({**shown, "name": branch.total.name}, branch.total)
    assert (shown["name"], shown["path"], shown["kind"]) == (branch.name, branch.path, "module")
    inside = len(branch.children)
    for box, child in zip(shown["inside"][:inside], branch.children.values(), strict=True):
        check_tree(box, child)
    for box, (name, total) in zip(shown["inside"][inside:], branch.ops.items(), strict=True):
        check_row(box, total)
        assert box["name"] == f"{box['name'].rpartition(' ')[0]} ({box['phase']})" == name
        assert [each["time"] for each in box["inside"]] == [total.exposed] * bool(total.exposed)


def check_memory(figures: dict[str, Any], run: loom.DryRun) -> None:
    shown, memory = figures["memory"], run.memory
    assert shown["purposes"] == [*HELD_FOR]
    assert shown["at_peak"] == [memory.at_peak[what] for what in HELD_FOR]
    assert shown["peaks"] == [memory.peaks[what] for what in HELD_FOR]
    assert shown["node"] == memory.node.number and shown["where"] == memory.where and shown["call"] == str(memory.node)
    assert shown["tensors"] == len(memory.alive)
    held = list(zip(*(accumulate(column) for column in shown["held"]), strict=True))
    assert held == [point.held for point in memory.timeline]
    assert [*accumulate(shown["nodes"])] == [point.node for point in memory.timeline]
    assert shown["times"] == pytest.approx([point.time for point in memory.timeline], rel=1e-7)


def check_timeline(figures: dict[str, Any], run: loom.DryRun) -> None:
    shown, names, nodes = figures["timeline"], figures["names"], figures["nodes"]
    assert shown["phases"] == [*PHASES]
    lanes = [(lane["mesh"], "" if lane["name"] == "compute" else lane["name"]) for lane in shown["lanes"]]
    assert [lanes[lane] for lane in shown["lane"]] == [(each.mesh, each.axis) for each in run.timeline]
    assert [names[name] for name in shown["name"]] == [each.name for each in run.timeline]
    for what in ("node", "bytes"):
        assert shown[what] == [getattr(each, what) for each in run.timeline], what
    for what in ("start", "duration", "exposed"):
        assert shown[what] == pytest.approx([getattr(each, what) for each in run.timeline], rel=1e-7), what
    for what in ("op", "module", "where"):
        assert [names[each] for each in nodes[what]] == [getattr(node, what) for node in run.nodes], what
    assert [PHASES[each] for each in nodes["phase"]] == [node.phase for node in run.nodes]
    assert [each["devices"] for each in shown["classes"]] == [each.devices for each in run.graph.classes]
