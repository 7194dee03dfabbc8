"""Measure meshloom beside dense torch, DTensor, DDP and JAX in one run: tables, a JSON file, a page with a plot."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import (
    autoplan,
    blockfloat,
    cards,
    checkpoints,
    controller,
    first_calls,
    gpt,
    moves,
    optimizers,
    page,
    peers,
    prediction,
    report,
    results,
    runtime,
    ttnn_calls,
)
from benchmarks.results import OURS, Row, figures, verdict
from benchmarks.timing import duel
from benchmarks.works import Spec, all_works

DEVICES = (1, 8, 32, 128)
PEERS = "peers"
PROCESSES = "processes"
PREDICTED = "predicted"
PLANNED = "autoplan"
CLIENT = controller.NAME
QUICK = 0.1


def measure(spec: Spec, scale: float) -> Row:
    """Run one work and judge it."""
    torch.manual_seed(0)
    pair = spec.make()
    found: dict[str, Any] = {"copies": pair.copies}
    if pair.ours is not None and pair.dense is not None:
        within = spec.goal.bound * 1e-7 if spec.goal and spec.goal.figure == "extra_us" else math.inf  # a tenth of it
        found = figures(duel(pair.ours, pair.dense, spec.seconds * scale, within))
        if pair.nbytes is not None:
            found["mb_per_s"] = round(pair.nbytes / found["ours_us"], 1)
    judged = verdict(spec.goal, found.get(spec.goal.figure) if spec.goal else None)
    return Row(OURS, spec.name, spec.detail, spec.mesh, spec.devices, spec.shown, **found, **judged)


class Meter:
    """The progress bar, drawn between works only: a bar that redraws itself would take one of the cores."""

    def __init__(self, console: Console, total: int) -> None:
        text = TextColumn("{task.description}")
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self.bar = Progress(*columns, console=console, auto_refresh=False, transient=console.is_terminal)
        self.task = self.bar.add_task("", total=total)

    def begin(self, what: str) -> None:
        """Say what is being measured."""
        self.bar.update(self.task, description=what, refresh=True)

    def end(self, row: Row) -> None:
        """Show the figure of a row that is done."""
        self.bar.print(f"{row.who}: {row.work}, {row.detail}, {row.devices} devices: {report.figure(row)}")
        self.bar.update(self.task, advance=1, refresh=True)


def run(devices: Sequence[int], only: Sequence[str], scale: float, rows: list[Row], console: Console) -> None:
    """Measure into `rows`, one by one, so that whoever interrupts still has those before."""
    works = [spec for spec in _specs(devices) if _wanted(spec.name, only)]
    asked = [(peer, count) for peer in peers.ALL for count in peer.ranks if count in devices and _wanted(PEERS, only)]
    if _wanted(PROCESSES, only):
        together = peers.ON_PROCESSES
        asked += [(peer, count) for peer in together for count in peer.ranks]
    predicts = moves.DEVICES in devices and _wanted(PREDICTED, only)
    quick = scale < 1
    total = len(works) + sum(len(peer.works_on(count)) for peer, count in asked)
    planned = len(autoplan.PROCESSES[: 1 if quick else None]) if _wanted(PLANNED, only) else 0
    total += planned + (prediction.count(quick) if predicts else 0)
    meter = Meter(console, total + (controller.count() if _wanted(CLIENT, only) else 0))
    with meter.bar:
        for spec in works:
            meter.begin(f"{spec.name}, {spec.detail}, {spec.devices} devices")
            rows.append(measure(spec, scale))
            meter.end(rows[-1])
        if predicts:
            meter.begin("calibrating, then predicting")
            _take(prediction.predictions(quick), rows, meter)
        if planned:
            meter.begin("planning for processes, then measuring")
            _take(autoplan.measured(quick), rows, meter)
        if _wanted(CLIENT, only):
            meter.begin("a client and two workers, then two ranks, in turn")
            _take(controller.measured(quick), rows, meter)
        for peer, count in asked:
            meter.begin(f"{peer.who}, {count} ranks")
            _take(peers.answers(peer, count, scale), rows, meter)


def _specs(devices: Sequence[int]) -> list[Spec]:
    beside = (gpt, runtime, cards, blockfloat, first_calls, optimizers, ttnn_calls, checkpoints)
    return [*all_works(devices), *(spec for module in beside for spec in module.works(devices))]


def misses(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The figures of these works that miss their goals as they are now, and those that were not measured."""
    found = {(row.work, row.detail, row.devices): row for row in rows if row.who == OURS}
    told = []
    for spec in _specs(DEVICES):
        if spec.goal is None or spec.name not in names:
            continue
        row = found.get((spec.name, spec.detail, spec.devices))
        value = None if row is None else getattr(row, spec.goal.figure)
        if value is None or not spec.goal.met(value):
            told.append(f"{spec.name}, {spec.detail}, {spec.devices} devices: {value}, goal {spec.goal}")
    return told


def _take(found: Iterable[Row], rows: list[Row], meter: Meter) -> None:
    for row in found:
        rows.append(row)
        meter.end(row)


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == each or name.startswith(f"{each} ") for each in only)


def names() -> list[str]:
    """What `--only` knows: the works, their first words, predictions, plans, clients, the peers and the processes."""
    works = dict.fromkeys(spec.name for spec in _specs(DEVICES))
    parts = dict.fromkeys(part for name in works for part in (name.split()[0], name))
    return [*parts, PREDICTED, PLANNED, CLIENT, PEERS, PROCESSES]


def _devices(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of device counts such as 1,8,32,128")
    return found


def _path(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: its directory must exist and it must be a file")
    return path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="Measure meshloom beside dense torch, DTensor and JAX, interleaved, best of many.",
        epilog="Ctrl-C stops and prints the table so far; --json keeps what there is.",
    )
    made.add_argument(
        "--quick", action="store_true", help="a tenth of the time per work: a smoke run, not a measurement"
    )
    made.add_argument("--devices", type=_devices, default=DEVICES, help="numbers of devices (default 1,8,32,128)")
    made.add_argument("--only", action="append", default=[], choices=names(), metavar="NAME", help=(
        f"measure this work only; may be repeated; one of: {', '.join(names())}"
    ))  # fmt: skip
    made.add_argument("--json", type=_path, help=(
        "where to write; a whole run writes benchmarks/results.json and docs/benchmarks.md without being asked"
    ))  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file; 130 if interrupted."""
    options = parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    conditions, complete = results.setting(options.quick), False
    rows: list[Row] = []
    try:
        run(options.devices, options.only, QUICK if options.quick else 1.0, rows, console)
        complete = True
    except KeyboardInterrupt:
        console.print()
    report.show(console, rows, conditions, complete)
    is_whole = complete and not options.quick and not options.only and options.devices == DEVICES
    if is_whole and options.json is None:
        results.write(page.RESULTS, rows, conditions, complete)
        page.write()
    elif options.json is not None:
        results.write(options.json, rows, conditions, complete)
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
