"""What a peer's process measures: theirs, ours and dense torch in the same minutes, a line of JSON per work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from benchmarks import moves
from benchmarks.timing import Side, Work, contest
from benchmarks.works import SIZE, all_works

# The works that peers are measured at, by the names of our table, and seconds to measure.
SECONDS = {
    ("add", "32x32 per device"): 1.0,
    ("matmul row", f"{SIZE}^3"): 3.0,
    ("matmul inner", f"{SIZE}^3"): 3.0,
    ("MLP step", "data-parallel"): 6.0,
    **dict.fromkeys(moves.WORKS, 5.0),
}
Make = TypeVar("Make")


def works_of(makes: Mapping[str, Make], ranks: int) -> dict[tuple[str, str], tuple[Make, float]]:
    """What is timed on so many ranks: how to make each work, by its name, and seconds to measure."""
    timed = (work for work in SECONDS if work not in moves.WORKS or ranks == moves.DEVICES)
    return {work: (makes[work[0]], SECONDS[work]) for work in timed}


def our_work(work: tuple[str, str], devices: int) -> Work:
    """Ours of the same name on as many devices, checked against dense and ready to be timed."""
    (spec,) = [spec for spec in all_works((devices,)) if (spec.name, spec.detail) == work]
    ours = spec.make().ours
    assert ours is not None, f"{work} has nothing to time"
    return ours


def compare(work: tuple[str, str], theirs: Side, ours: Work, dense: Work, seconds: float) -> None:
    """Time the three in turn and print the line of the work, their seconds per call and the rounds."""
    best, rounds = contest((theirs, Side(ours), Side(dense)), seconds)
    tell(work, timing=[*best, rounds])


def tell(work: tuple[str, str], **figures: object) -> None:
    """Print what was found of a work."""
    name, detail = work
    print(json.dumps({"work": name, "detail": detail, **figures}), flush=True)
