"""What a peer's process measures: theirs, ours and dense torch in the same minutes, a line of JSON per work."""

from __future__ import annotations

import json

from benchmarks.timing import Side, Work, contest
from benchmarks.works import all_works


def our_work(work: tuple[str, str], devices: int) -> Work:
    """Ours of the same name on as many devices, checked against dense and ready to be timed."""
    (spec,) = [spec for spec in all_works((devices,)) if (spec.name, spec.detail) == work]
    ours = spec.make().ours
    assert ours is not None, f"{work} has nothing to time"
    return ours


def compare(work: tuple[str, str], theirs: Side, ours: Work, dense: Work, seconds: float) -> None:
    """Time the three in turn and print the line of the work, its timing as a `Comparison` has it."""
    best, rounds = contest((theirs, Side(ours), Side(dense)), seconds)
    tell(work, timing=[*best, rounds])


def tell(work: tuple[str, str], **figures: object) -> None:
    """Print what was found of a work."""
    name, detail = work
    print(json.dumps({"work": name, "detail": detail, **figures}), flush=True)
