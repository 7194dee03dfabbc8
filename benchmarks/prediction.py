"""Predicted against measured: this machine is calibrated, then the simulator is asked about other sizes too."""

from __future__ import annotations

from collections.abc import Iterator

import meshloom as loom
from benchmarks import moves
from benchmarks.results import OURS, Row
from meshloom.cli.measuring import FULL, QUICK, Effort, collective_point, measure
from meshloom.collectives.algorithms import choose
from meshloom.fabric import Fabric

KINDS = ("all_reduce", "all_gather")
SIZES = (256 << 10, 4 << 20, 64 << 20)
QUICK_SIZES = (8 << 10, 64 << 10)


def predictions(quick: bool) -> Iterator[Row]:
    """For each collective and size a row with both times and the error of the predicted one."""
    effort = QUICK if quick else FULL
    fabric = measure((moves.DEVICES,), effort).preset.fabric()
    for kind in KINDS:
        for size in QUICK_SIZES if quick else SIZES:
            yield _row(kind, size, fabric, effort)


def count(quick: bool) -> int:
    """How many rows there will be."""
    return len(KINDS) * len(QUICK_SIZES if quick else SIZES)


def predicted(kind: str, size: int, fabric: Fabric) -> float:
    """Seconds that the simulator gives a value of `size` bytes on the links of a fabric."""
    group = tuple(fabric.coordinates())
    schedule = choose(kind, group, fabric, size)(group, fabric)
    return loom.simulate(schedule, fabric, size=size).time


def _row(kind: str, size: int, fabric: Fabric, effort: Effort) -> Row:
    mesh = loom.open_mesh((moves.DEVICES,))
    took = collective_point(kind, mesh, mesh.axes[0], size, effort.seconds).seconds
    says = predicted(kind, size, fabric)
    return Row(
        OURS, f"predicted {kind.replace('_', '-')}", _text(size), mesh.shape, moves.DEVICES, "error",
        ours_us=round(took * 1e6, 3), predicted_us=round(says * 1e6, 3), error=round(says / took - 1, 4),
    )  # fmt: skip


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
