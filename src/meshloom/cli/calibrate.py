"""Measure this machine (memory, arithmetic, collectives between virtual devices) and write a preset in TOML."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshloom.errors import MeshloomError
from meshloom.fabric.catalogue import THIS_MACHINE

BUSY = 0.1  # the part of the cores that other work may take


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom calibrate` takes."""
    parser.add_argument("--out", type=Path, default=THIS_MACHINE, help="the file to write (default %(default)s)")
    parser.add_argument(
        "--shape", type=shape, default=(8,), help="the mesh of virtual devices, as 8 or 2x4 (default 8)"
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


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    from meshloom.cli.measuring import FULL, QUICK, measure  # loads torch

    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = measure(options.shape, QUICK if options.quick else FULL, tell=_tell)
    if found.others is not None and found.others > BUSY and not (options.quick or options.busy):
        raise MeshloomError(
            f"other work took {found.others:.0%} of the cores: figures measured beside it are too slow",
            fix="end the other work and measure again, or keep the figures with --busy; nothing was written",
        )
    options.out.write_text(found.to_toml(), encoding="utf-8")
    print(found.to_toml(), end="")
    print(f"\n{found.preset}\nwritten to {options.out}", file=sys.stderr)


def _tell(what: str, number: int, total: int) -> None:
    print(f"[{number}/{total}] {what}", file=sys.stderr, flush=True)
