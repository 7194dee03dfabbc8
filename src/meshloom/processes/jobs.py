"""Jobs of this user on this host, for `meshloom monitor`: a file each, in a folder that only the user can read.

A job writes its state while somebody watches, and takes its file away at its end; of one that was killed the process id
says that it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from meshloom import settings

WATCHED = 5.0  # seconds for which a look of the monitor counts


def folder() -> Path:
    """Where jobs leave their state."""
    made = Path(settings.read("XDG_CACHE_HOME")) / "meshloom" / "jobs"
    made.mkdir(parents=True, exist_ok=True, mode=0o700)
    return made


def is_watched() -> bool:
    """Whether a monitor has looked lately."""
    try:
        return time.time() - (folder() / "watched").stat().st_mtime < WATCHED
    except OSError:
        return False


def note_watching() -> None:
    """The monitor looks."""
    with contextlib.suppress(OSError):
        (folder() / "watched").touch(mode=0o600)


def write_job(name: str, state: dict[str, Any]) -> None:
    """The state of a job, in place of the last one."""
    place = folder() / f"{name}.json"
    aside = place.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        json.dump({**state, "pid": os.getpid(), "written": time.time()}, file)
    os.replace(aside, place)


def remove_job(name: str) -> None:
    """The job has ended."""
    with contextlib.suppress(OSError):
        (folder() / f"{name}.json").unlink(missing_ok=True)


def read_jobs() -> list[dict[str, Any]]:
    """The jobs that run; what is left of others is removed."""
    found = []
    for each in sorted(folder().glob("*.json")):
        try:
            state = json.loads(each.read_text())
            os.kill(state["pid"], 0)
        except (ProcessLookupError, ValueError, KeyError, TypeError):
            each.unlink(missing_ok=True)
        except OSError:
            continue  # it has just ended, or is another user's
        else:
            found.append({**state, "name": each.stem})
    return found


def memory_of(pid: int) -> int:
    """The bytes that a process has in memory; 0 if it is not there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
