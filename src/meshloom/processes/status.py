"""What each process says it is doing: one line of a table each, and in a few words who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshloom.mesh.process import place_of

Status = dict[str, Any]

ENDED = ("raised", "left")
LEFT: Status = {
    "beats": 0,
    "host": "-",
    "number": "-",
    "call": "-",
    "line": "",
    "now": "",
    "state": "left",
    "seconds": 0,
    "over": True,
}
_STATES = (*ENDED, "gone", "running", "waiting")
SHOWN = 4  # processes that a headline names
_HEAD = ("rank", "place", "host", "call", "number", "line", "state")


def is_status(note: object) -> bool:
    """Whether a note is a status; without a secret anybody may have written it.

    >>> is_status(LEFT), is_status({"beats": 1}), is_status(7)
    (True, False, False)
    """
    return isinstance(note, dict) and set(LEFT) <= set(note) and note["state"] in _STATES


def judge(first: Mapping[int, Status], last: Mapping[int, Status], here: int) -> dict[int, Status]:
    """The last statuses; who has not written a new one in the meantime, though it has not ended, is gone.

    >>> judge({1: {"beats": 7, "state": "waiting"}}, {1: {"beats": 7, "state": "waiting"}}, here=0)
    {1: {'beats': 7, 'state': 'gone'}}
    """
    return {
        rank: {**status, "state": "gone"} if rank != here and _is_silent(first.get(rank), status) else status
        for rank, status in last.items()
    }


def has_answered(first: Mapping[int, Status], last: Mapping[int, Status], here: int) -> bool:
    """Whether every process but this one has written a new status, or has ended."""
    return all(rank == here or not _is_silent(first.get(rank), status) for rank, status in last.items())


def _is_silent(first: Status | None, last: Status) -> bool:
    return first is not None and first["beats"] == last["beats"] and last["state"] not in ENDED


def table(statuses: Mapping[int, Status], count: int, grid: Sequence[int], unknown: str) -> str:
    """All processes: rank, place, host, last call with its number and line, and whether it waits or is gone."""
    rows = [_HEAD, *(_row(rank, statuses.get(rank), grid, unknown) for rank in range(count))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(rank: int, status: Status | None, grid: Sequence[int], unknown: str) -> tuple[str, ...]:
    place = str(place_of(rank, grid)) if grid else "-"
    if status is None:
        return str(rank), place, "-", "-", "-", "-", unknown
    line = status["line"] or status["now"] or "-"
    return str(rank), place, status["host"], status["call"], str(status["number"]), line, _state(status)


def _state(status: Status) -> str:
    if status["state"] == "waiting":
        return f"waiting for {status['seconds']} s"
    if status["state"] == "running" and status["now"]:
        return f"running at {status['now']}"
    return str(status["state"])


def blame(statuses: Mapping[int, Status], here: int) -> str:
    """Who is not where this process is, for the end of a headline; empty if nobody is known to be elsewhere.

    >>> first, second = ({"number": 3, "call": call, "line": "a.py:7", "state": "waiting"} for call in ("sum", "max"))
    >>> blame({0: first, 1: second, 2: first}, here=0)
    ': rank 1 waits in max 3 at a.py:7'
    """
    fates = [
        f"rank {rank} {_fate(status)}" for rank, status in statuses.items() if _is_elsewhere(status, statuses[here])
    ]
    more = f", and {len(fates) - SHOWN} more" if len(fates) > SHOWN else ""
    return ": " + ", ".join(fates[:SHOWN]) + more if fates else ""


def _is_elsewhere(status: Status, here: Status) -> bool:
    """Whether a process is not in the same collective, waiting or having given it up as well."""
    same = (status["number"], status["call"]) == (here["number"], here["call"])
    return not (same and status["state"] in ("waiting", "raised"))


def _fate(status: Status) -> str:
    where = f"at {status.get('now') or status['line']}"
    return {
        "gone": f"is gone, last seen {where}",
        "left": "has left",
        "raised": "has raised an error",
        "running": f"is running {where}",
        "waiting": f"waits in {status['call']} {status['number']} at {status['line']}",
    }[status["state"]]
