"""Looking after each other: every process says what it is doing, and the first failure ends all of them with its cause.

Each process has a thread that writes its status (last call, its number and line, whether it waits) to the store through
which the processes met, and reads whether another one has failed. A collective that takes too long, a peer that is
gone, an exception anywhere: who notices first writes it down, everybody else raises a `LostError` that shows it with a
table of all processes. Nobody waits for ever.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from meshloom.errors import DivergenceError, LostError, MeshloomError, is_program, line_of, where
from meshloom.mesh import HERE, Mesh
from meshloom.mesh.process import place_of

BEAT = 0.25  # seconds between two looks of the thread
GRACE = 2.0  # how long a process that fails waits for the others to say where they are
RECENT = 32  # calls that are remembered

Failure = dict[str, Any]


class Watch:
    """What this process is doing, and what it knows of the others."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.number = 0  # collectives begun
        self.call, self.line, self.kind, self.since = "nothing yet", "", "", 0.0
        self.grid: tuple[int, ...] = ()
        self.story: deque[tuple[int, str]] = deque(maxlen=RECENT)
        self.failure: Failure | None = None
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore("meshloom", store.clone())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshloom watch", daemon=True)
        self._beats = 0
        self._state = "running"
        self._holds_store = HERE.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def start(self) -> None:
        """Begin, and take note of exceptions and of SIGTERM, unless the program has handlers of its own."""
        self._publish()
        self._thread.start()
        faulthandler.enable()
        sys.excepthook, self._hook = self._uncaught, sys.excepthook
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._terminated)

    def stop(self) -> None:
        """Say that this process leaves."""
        self._state = "left"
        if self._holds_store and self.failure is None:
            self._store.set("closed", "")
        self._done.set()
        self._thread.join(timeout=2 * GRACE)
        self._linger(GRACE)
        self._store = None

    def _linger(self, seconds: float) -> None:
        """The process that holds the store gives the others time to read why, or that, it leaves."""
        deadline = time.monotonic() + seconds
        before: dict[int, Any] = {}
        while self._holds_store and time.monotonic() < deadline:
            now = self._statuses()
            silent = (now[rank] == before.get(rank) for rank in now if rank != HERE.rank)
            ended = (now[rank]["state"] in ("raised", "left") for rank in now if rank != HERE.rank)
            if all(done or quiet for done, quiet in zip(ended, silent, strict=True)):
                return
            before = now
            time.sleep(4 * BEAT)

    # one collective

    def begin(self, call: str, mesh: Mesh) -> None:
        """A call that may communicate."""
        self.call, self.grid = call, mesh.processes

    def enter(self, kind: str) -> None:
        """A collective begins."""
        if self.failure is not None:
            raise self._lost("cannot go on")
        self.number += 1
        self.kind, self.line, self.since = kind, where(), time.monotonic()
        self.story.append((self.number, f"{kind} of {self.call} at {self.line}"))

    def leave(self) -> None:
        """The collective has ended."""
        self.since = 0.0

    def look(self) -> None:
        """While waiting: raise if somebody failed, or if this has taken too long."""
        if self.failure is not None:
            raise self._lost("cannot go on")
        if self.since and time.monotonic() - self.since > self.world.timeout:
            raise self._give_up(f"{self._here()} has waited longer than {self.world.timeout:g} s")

    def explained(self, error: Exception) -> Exception:
        """The error of a collective with the story of all processes; first the cause, if another one failed first."""
        if isinstance(error, MeshloomError):
            return error
        deadline = time.monotonic() + GRACE  # a peer that raised says so a moment before its connection closes
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(BEAT / 5)
        if self.failure is not None:
            return self._lost("cannot go on")
        reason = str(error).splitlines()[0].split("This is typically")[0].strip()
        return self._give_up(f"{self._here()} lost its connection", reason=reason)

    def _here(self) -> str:
        return f"{self.kind} {self.number} of {self.call} at {self.line} on rank {HERE.rank}"

    # failures

    def diverged(self, headline: str, **details: Any) -> DivergenceError:
        """An error that all processes raise by themselves."""
        self._tell(headline)
        return DivergenceError(headline, **details)

    def _give_up(self, headline: str, **details: Any) -> LostError:
        self._tell(headline)
        return LostError(headline, **details, processes=self.table(), fix=_FIX)

    def _lost(self, what: str) -> LostError:
        failure = self.failure
        assert failure is not None
        self._state = "raised"
        return LostError(
            f"{self._here()} {what}: {failure['headline']}",
            cause=failure["cause"],
            processes=self.table(),
            fix=_FIX,
        )

    def _tell(self, headline: str, cause: str = "") -> None:
        """Write the failure down, unless another one was first."""
        self._state = "raised"
        told: Failure = {"rank": HERE.rank, "headline": headline, "cause": cause or headline}
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", json.dumps(told))
            elif self.failure is None:
                self._read_failure()
            self._publish()
        except RuntimeError as error:  # the process that holds the store is gone too
            told["cause"] += f" (and the store is gone: {str(error).splitlines()[0]})"
        if self.failure is None:
            self.failure = told

    def _uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, (LostError, DivergenceError)) and self.failure is None:
            line = where_raised(trace)
            text = "".join(traceback.format_exception_only(kind, error)).strip()
            name = "was interrupted" if issubclass(kind, KeyboardInterrupt) else f"raised {text.splitlines()[0]}"
            self._tell(f"rank {HERE.rank} {name} at {line}", cause=f"{text}\nat {line}, last call {self._here()}")
        self._hook(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        self._linger(3 * GRACE)
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)  # collectives under way would keep it alive

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, from whoever started the processes or from our own thread: say where we were."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once
        deadline = time.monotonic() + GRACE / 2
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(BEAT / 5)
        line = line_of(frame)
        if self.failure is None:
            raise self._give_up(f"rank {HERE.rank} was told to end at {line}")
        self.line = line
        raise self._lost("was ended")

    # the thread

    def _run(self) -> None:
        seen = 0.0
        while not self._done.wait(BEAT):
            try:
                self._publish()
                self._read_failure()
                if self._store.check(["closed"]):
                    return
            except RuntimeError as error:
                if not self._done.is_set() and self.failure is None:
                    reason = str(error).splitlines()[0]
                    self.failure = {"rank": -1, "headline": "the store of the processes is gone", "cause": reason}
            if self.failure is None or self._state != "running":
                continue
            seen = seen or time.monotonic()
            if not self.since and time.monotonic() - seen > GRACE:  # the program is busy elsewhere
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return
        try:
            self._publish()
        except RuntimeError:
            return  # nobody is left to read it

    def _read_failure(self) -> None:
        if self.failure is None and self._store.check(["failure"]):
            self.failure = json.loads(self._store.get("failure"))

    def _publish(self) -> None:
        self._beats += 1
        waits = self._state == "running" and self.since > 0
        status = {
            "beats": self._beats,
            "host": socket.gethostname(),
            "number": self.number,
            "call": f"{self.kind} of {self.call}" if self.kind else self.call,
            "line": self.line,
            "now": "" if waits else line_of(sys._current_frames().get(threading.main_thread().ident or 0)),
            "state": "waiting" if waits else self._state,
            "seconds": round(time.monotonic() - self.since, 1) if waits else 0,
        }
        self._store.set(f"status {HERE.rank}", json.dumps(status))

    # the table

    def table(self) -> str:
        """All processes: rank, place, host, last call with its number and line, and whether it waits or is gone."""
        try:
            first = self._statuses()
            time.sleep(4 * BEAT)
            second = self._statuses()
        except RuntimeError as error:
            return f"not to be had, the store is gone: {str(error).splitlines()[0]}"
        rows: list[tuple[str, ...]] = [("rank", "place", "host", "call", "number", "line", "state")]
        for rank in range(HERE.count):
            rows.append(self._row(rank, first.get(rank), second.get(rank)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _row(self, rank: int, first: Any, second: Any) -> tuple[str, ...]:
        place = str(place_of(rank, self.grid)) if self.grid else "-"
        if second is None:
            return str(rank), place, "-", "-", "-", "-", "never came"
        state = second["state"]
        if state in ("running", "waiting") and rank != HERE.rank and first and first["beats"] == second["beats"]:
            state = "gone"
        elif state == "waiting":
            state = f"waiting for {second['seconds']} s"
        elif state == "running" and second["now"]:
            state = f"running at {second['now']}"
        line = second["line"] or second["now"] or "-"
        return str(rank), place, second["host"], second["call"], str(second["number"]), line, state

    def _statuses(self) -> dict[int, Any]:
        found = {}
        for rank in range(HERE.count):
            if self._store.check([f"status {rank}"]):
                found[rank] = json.loads(self._store.get(f"status {rank}"))
        return found

    # stories, for a divergence

    def stories(self) -> dict[int, list[tuple[int, str]]]:
        """What every process has been doing, by rank; whoever does not say so in time is left out."""
        key = f"story {self.number} "
        self._store.set(key + str(HERE.rank), json.dumps(list(self.story)))
        found = {}
        for rank in range(HERE.count):
            try:
                self._store.wait([key + str(rank)], timedelta(seconds=2 * GRACE))
            except RuntimeError:
                continue  # shown as silent
            found[rank] = [tuple(each) for each in json.loads(self._store.get(key + str(rank)))]
        return found


_FIX = "look at the rank that failed or hangs; raise timeout= (or MESHLOOM_TIMEOUT) if it was only slow"


def where_raised(trace: Any) -> str:
    """The innermost line of the program in a traceback."""
    found = "unknown line"
    for frame, number in traceback.walk_tb(trace):
        if is_program(frame.f_code.co_filename):
            found = f"{os.path.basename(frame.f_code.co_filename)}:{number}"
    return found


@contextmanager
def meeting(seconds: float, line: str) -> Iterator[None]:
    """Processes meet; if some never come, the error says how many were waited for."""
    start = time.monotonic()
    try:
        yield
    except (RuntimeError, dist.DistStoreError) as error:
        count, rank = os.environ.get("WORLD_SIZE", "?"), os.environ.get("RANK", "?")
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise LostError(
            f"rank {rank} waited {time.monotonic() - start:.1f} s for {count} processes to meet, and some never came",
            call=f"open_mesh at {line}",
            meeting_point=address,
            timeout=f"{seconds:g} s",
            reason=str(error).splitlines()[0],
            fix="start all ranks with the same WORLD_SIZE and meeting point; raise timeout= (or MESHLOOM_TIMEOUT)",
        ) from None
