"""Measure this machine and write a preset for its virtual devices, and tables of what kernels take here, in TOML."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from meshloom.errors import MeshloomError
from meshloom.fabric.catalogue import THIS_MACHINE
from meshloom.fabric.host import host_path

BUSY = 0.1  # the part of the cores that other work may take
RUNS = 3  # of several processes: the best counts, and how threads lie on the cores lasts as long as a run


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom calibrate` takes."""
    parser.add_argument("--out", type=Path, default=THIS_MACHINE, help="the file to write (default %(default)s)")
    parser.add_argument(
        "--shape", type=shape, default=(8,), help="the mesh of virtual devices, as 8 or 2x4 (default 8)"
    )
    parser.add_argument(
        "--processes", type=several, nargs="*", default=[], help="also measure so many processes at once, as 2 4"
    )
    parser.add_argument("--busy", action="store_true", help="write the figures also if other work took the cores")
    parser.add_argument("--quick", action="store_true", help="small sizes, a second in all: not a measurement")


def shape(text: str) -> tuple[int, ...]:
    """The shape of a mesh from text: every axis has links, so at least two devices.

    >>> shape("2x4")
    (2, 4)
    """
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh such as 8 or 2x4, with 2 or more devices per axis")
    return tuple(map(int, parts))


def several(text: str) -> int:
    """How many processes measure at once, from text.

    >>> several("4")
    4
    """
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes such as 2 or 4")
    return int(text)


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    if options.out.is_dir():
        raise MeshloomError(f"{options.out} is a folder", fix="give the path of a file, such as here.toml")
    from meshloom.cli import host_measuring  # loads torch
    from meshloom.cli.measuring import FULL, QUICK, Clock, measure

    options.out.parent.mkdir(parents=True, exist_ok=True)
    clock, more = Clock.read(), host_measuring.STEPS
    found = measure(options.shape, QUICK if options.quick else FULL, lambda what, i, n: _tell(what, i, n + more))
    sweep, before = host_measuring.QUICK if options.quick else host_measuring.FULL, 4 + len(options.shape)
    host = host_measuring.measure_host(sweep, lambda what, i, n: _tell(what, before + i, before + n))
    between = {count: measure_together(count, options.quick) for count in options.processes}
    others = clock.others() if not between else found.others
    if others is not None and others > BUSY and not (options.quick or options.busy):
        raise MeshloomError(
            f"other work took {others:.0%} of the cores: figures measured beside it are too slow",
            fix="end the other work and measure again, or keep the figures with --busy; nothing was written",
        )
    options.out.write_text(found.to_toml(), encoding="utf-8")
    host_path(options.out).write_text(host.to_toml(), encoding="utf-8")
    for count, text in between.items():
        host_path(options.out, count).write_text(text, encoding="utf-8")
    print(found.to_toml(), end="")
    print(f"\n{found.preset}\nwritten to {options.out} and {host_path(options.out)}", file=sys.stderr)


def measure_together(count: int, is_quick: bool, runs: int | None = None) -> str:
    """The tables of one of several processes that measure at the same time, as TOML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.toml"
        script = str(Path(__file__).with_name("host_measuring.py"))
        command = [sys.executable, "-m", "meshloom", "run", "--nproc", str(count), script, str(path)]
        runs = runs or (1 if is_quick else RUNS)
        for number in range(1, runs + 1):
            _tell(f"{count} processes at once", number, runs)
            done = subprocess.run([*command, "quick" if is_quick else "full"], capture_output=True, text=True)
            if done.returncode:
                said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
                raise MeshloomError(f"{count} processes could not be measured:\n{said}")
        return path.read_text(encoding="utf-8")


def _tell(what: str, number: int, total: int) -> None:
    print(f"[{number}/{total}] {what}", file=sys.stderr, flush=True)
