"""The table of docs/autoplan.md: five models, three sizes, four machines; autoplan beside the best named plan.

    python -m benchmarks.autoplan                               # all, half an hour on one core
    python -m benchmarks.autoplan --machines t3000 --sizes small --models gpt
    python -m benchmarks.autoplan --page                        # put what was found into docs/autoplan.md
    python -m benchmarks.autoplan --measure 2 4                 # on real processes of this machine, with a clock

Nothing of the table is measured with a clock but the search itself, so its figures are the same everywhere. What is
found goes to benchmarks/autoplan.json, case by case, so that a run that was stopped goes on. `make bench` measures on
processes: the plan that autoplan calls the fastest beside the fastest of the named ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.plan_models import MODELS, build, example, loss

from benchmarks.goals import Goal
from benchmarks.results import OURS, Row, verdict
from meshloom.nn.search.autoplan import make_task
from meshloom.nn.search.choosing import Search
from meshloom.observe.dry_run import show_seconds
from meshloom.observe.memory_use import show_bytes

MACHINES = {"t3000": 8, "galaxy": 32, "nvlink8": 8, "nvlink8x16": 128}
SIZES = ("small", "medium", "large")
FOUND = Path(__file__).with_name("autoplan.json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "autoplan.md"
RANKS = Path(__file__).with_name("autoplan_ranks.py")
PROCESSES = (2, 4)
MEASURED = Goal("ratio", 1.15)
MEASURING = (
    "On processes of the machine that wrote this page, two cores and nothing else on them, a step of a small GPT by "
    "clock (`python -m benchmarks.autoplan --measure 2 4`, also part of `make bench`; goal: a ratio of at most 1.15):"
)
MARKS = ("<!-- table: made by benchmarks/autoplan.py -->", "<!-- end of table -->")


def rows_of(machine: str) -> int:
    """The rows of a batch: two for each device."""
    return 2 * MACHINES[machine]


def look(model: str, size: str, machine: str) -> dict[str, Any]:
    """The best plan of a case by dry runs of the whole model, and the best named one."""
    start = time.process_time()
    given = build(model, size), example(model, size, rows_of(machine))
    task = make_task(*given, machine, MACHINES[machine], loss=loss)
    search = Search(task, lambda line: None)
    verified = search.run(3)  # not `rank`, which also looks for what would help where nothing fits
    found: dict[str, Any] = {"model": model, "size": size, "machine": machine, "tried": len(search.found)}
    found["parameters"] = sum(each.numel() for each in given[0].parameters())
    if not verified:
        return {**found, "cpu": time.process_time() - start}
    best = verified[0]
    named = [each for each in search.fitting() if each.is_named]
    runs = [(search.trials.verify(each.mesh, each.recipe), each) for each in named[:2]]
    fit = [(run.time, each.mesh, each.recipe.title) for run, each in runs if task.fits(run.memory.peak)]
    found |= {"time": best.run.time, "memory": best.run.memory.peak, "mesh": str(best.mesh), "plan": best.recipe.title}
    if fit:
        seconds, mesh, title = min(fit, key=lambda each: each[0])
        found |= {"named_time": seconds, "named_mesh": str(mesh), "named": title}
    return {**found, "cpu": time.process_time() - start}


def measured(quick: bool) -> Iterator[Row]:
    """On real processes: the plan that autoplan calls the fastest, over the fastest named plan, by the clock."""
    for count in PROCESSES[: 1 if quick else None]:
        found = measure_on(count, quick)
        named = min(took for took, _ in found["named"].values())
        ratio = found["took"][0] / named
        times = {"ours_us": round(found["took"][0] * 1e6, 1), "dense_us": round(named * 1e6, 1)}
        held = {"ratio": round(ratio, 3), **verdict(MEASURED, ratio)}
        yield Row(OURS, "autoplan", f"{found['best']}, {count} processes", (count,), count, "ratio", **times, **held)


def measure_on(count: int, quick: bool) -> dict[str, Any]:
    """What processes have found that planned and measured together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "meshloom", "run", "--nproc", str(count), str(RANKS), str(path)]
        root = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RANKS.parents[1]), os.environ.get("PYTHONPATH", "")])}
        root["OMP_NUM_THREADS"] = "1"
        done = subprocess.run([*command, "quick" if quick else "full"], capture_output=True, text=True, env=root)
        if done.returncode:
            raise RuntimeError(
                f"{count} processes did not come to their end:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def cases(given: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Those that were asked for."""
    for machine in given.machines:
        for size in given.sizes:
            for model in given.models:
                yield model, size, machine


def read_found(path: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs have found."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def keep(path: Path, key: str, each: dict[str, Any]) -> None:
    """Add what was found to the file."""
    path.write_text(json.dumps({**read_found(path), key: each}, indent=1, sort_keys=True) + "\n")


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of the table, one for each case."""
    yield "| machine | model | time | memory | the best plan | the best named plan | its time |"
    yield "|---|---|---|---|---|---|---|"
    for machine in MACHINES:
        for model in MODELS:
            for size in SIZES:
                each = found.get(f"{machine} {size} {model}")
                if each is not None:
                    yield _line(each)


def measured_table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of what was measured on processes."""
    yield "| processes | autoplan's choice | it takes | the fastest named plan | it takes | ratio |"
    yield "|---|---|---|---|---|---|"
    for count in PROCESSES:
        each = found.get(f"measured {count}")
        if each is not None:
            took, name = min((took, name) for name, (took, _) in each["named"].items())
            mine = each["took"][0]
            times = f"{show_seconds(mine)} | {name} | {show_seconds(took)} | {mine / took:.2f}"
            yield f"| {count} | {each['best']} | {times} |"


def _line(each: dict[str, Any]) -> str:
    billions = each["parameters"] / 1e9
    name = f"{each['model']} {each['size']}, {billions:.2g}B"
    if "time" not in each:
        return f"| {each['machine']} | {name} | | | nothing fits | | |"
    named = f"`{each['named']}`, {_mesh(each['named_mesh'])}" if "named" in each else "none fits"
    ratio = f"{each['named_time'] / each['time']:.2f}x" if "named" in each else ""
    plan = f"`{each['plan']}`" if each["plan"] == each.get("named") else each["plan"]
    figures = f"{show_seconds(each['time'])} | {show_bytes(each['memory'])}"
    return f"| {each['machine']} | {name} | {figures} | {plan}, {_mesh(each['mesh'])} | {named} | {ratio} |"


def _mesh(text: str) -> str:
    return text.removeprefix("Mesh").strip("()")


def write_page(found: dict[str, dict[str, Any]]) -> None:
    """The table between its marks."""
    first, last = MARKS
    lines = "\n".join([*table(found), "", MEASURING, "", *measured_table(found)])
    page = PAGE.read_text(encoding="utf-8")
    whole = re.compile(f"{re.escape(first)}.*{re.escape(last)}", re.DOTALL)
    PAGE.write_text(whole.sub(lambda _: f"{first}\n\n{lines}\n\n{last}", page), encoding="utf-8")


def main() -> None:
    """Look at every case that was asked for, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--again", action="store_true", help="also cases that were looked at before")
    parser.add_argument("--found", type=Path, default=FOUND, help="the file of what was found (default %(default)s)")
    parser.add_argument("--page", action="store_true", help="only write the table into docs/autoplan.md")
    parser.add_argument("--measure", nargs="+", type=int, help="only measure, on so many processes")
    given = parser.parse_args()
    for count in given.measure or ():
        found = measure_on(count, quick=False)
        keep(given.found, f"measured {count}", found)
        print(f"{count} processes: {found['best']} takes {show_seconds(found['took'][0])}")
        print("named plans, measured and predicted:")
        for name, (took, said) in sorted(found["named"].items(), key=lambda pair: pair[1]):
            print(f"  {show_seconds(took)}, {show_seconds(said)}  {name}", flush=True)
    if given.measure:
        return
    for model, size, machine in [] if given.page else cases(given):
        key = f"{machine} {size} {model}"
        if key not in read_found(given.found) or given.again:
            each = look(model, size, machine)
            keep(given.found, key, each)
            print(_line(each), f"{each['tried']} tried, {each['cpu']:.0f} s of CPU time", flush=True)
    write_page(read_found(given.found))


if __name__ == "__main__":
    main()
