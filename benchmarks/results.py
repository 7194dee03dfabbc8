"""What was measured, as values: rows, and the whole run as JSON without a trace of the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import meshloom as loom
from benchmarks.goals import Goal
from benchmarks.timing import Timing

OURS = "meshloom"
LOCAL_TENSOR = "DTensor LocalTensor"
JAX = "JAX host devices"
PROCESSES = "meshloom on processes"


@dataclass(frozen=True, slots=True)
class Row:
    """One work on one mesh: its figures, and how they stand to the goal."""

    who: str
    work: str
    detail: str
    mesh: tuple[int, ...]
    devices: int
    shown: str
    ours_us: float | None = None
    dense_us: float | None = None
    ratio: float | None = None
    extra_us: float | None = None
    copies: float | None = None
    theirs_us: float | None = None
    times_ours: float | None = None
    mb_per_s: float | None = None
    ours_mb: float | None = None
    theirs_mb: float | None = None
    predicted_us: float | None = None
    error: float | None = None
    rounds: int | None = None
    goal: str | None = None
    ok: bool | None = None
    missing: str | None = None

    @property
    def figure(self) -> float | None:
        """The figure that the table shows."""
        return getattr(self, self.shown)


def figures(timing: Timing) -> dict[str, Any]:
    """A timing as the fields of a row."""
    return {
        "ours_us": round(timing.ours * 1e6, 3),
        "dense_us": round(timing.dense * 1e6, 3),
        "ratio": timing.ratio,
        "extra_us": timing.extra_us,
        "rounds": timing.rounds,
    }


def compared(theirs: float, ours: float, dense: float, rounds: int) -> dict[str, Any]:
    """The best seconds per call of a peer, of ours and of dense torch as the fields of a row; `ratio` is theirs to
    dense torch.

    >>> compared(0.0008, 0.0002, 0.0001, 50)["times_ours"]
    4.0
    """
    times = {"theirs_us": theirs, "ours_us": ours, "dense_us": dense}
    ratios = {"ratio": round(theirs / dense, 4), "times_ours": round(theirs / ours, 2)}
    return {**{name: round(seconds * 1e6, 3) for name, seconds in times.items()}, **ratios, "rounds": rounds}


def weighed(ours: float, theirs: float) -> dict[str, Any]:
    """Megabytes of both sides as the fields of a row.

    >>> weighed(30.0, 40.0)
    {'ours_mb': 30.0, 'theirs_mb': 40.0, 'ratio': 0.75}
    """
    return {"ours_mb": round(ours, 1), "theirs_mb": round(theirs, 1), "ratio": round(ours / theirs, 4)}


def verdict(goal: Goal | None, value: float | None) -> dict[str, Any]:
    """A goal and whether it is met, as the fields of a row."""
    if goal is None or value is None:
        return {}
    return {"goal": str(goal), "ok": goal.met(value)}


@dataclass(frozen=True, slots=True)
class Setting:
    """Under what conditions a run was made."""

    date: str
    meshloom: str
    torch: str
    python: str
    threads: int
    cores: int | None
    load: float
    quick: bool


def setting(quick: bool) -> Setting:
    """The conditions now; `load` is the machine's before the run, which ought to be near zero."""
    return Setting(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        meshloom=loom.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2),
        quick=quick,
    )


def write(path: Path, rows: Sequence[Row], conditions: Setting, complete: bool) -> None:
    """The run as JSON; figures that a row does not have are left out."""
    listed = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
    whole = {**asdict(conditions), "complete": complete, "rows": listed}
    path.write_text(json.dumps(whole, indent=1) + "\n")
