"""Looking after each other: every process says what it is doing, and the first failure ends all of them with its cause.

Each process has a thread that writes its status (last call, its number and line, whether it waits) to the board where
the processes met, and reads whether another one has failed. A collective that takes too long, a peer that is gone, an
exception anywhere: who notices first writes it down, everybody else raises a `PeerLostError` that shows it with a table
of all processes. Nobody waits for ever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from meshloom.errors import DivergenceError, MeshloomError, PeerLostError, is_program, line_of, where
from meshloom.mesh import HERE, Mesh
from meshloom.processes.status import LEFT, Status, blame, has_answered, is_status, judge, table
from meshloom.processes.store import Board, UnwrittenError, first_line, holder, holds_store

BEAT = 0.25  # seconds between two looks of the thread
GRACE = 2.0  # how long a process that fails waits for the others to say where they are
RECENT = 1024  # calls that are remembered

Failure = dict[str, Any]
Said = tuple[str, str, str]  # the kind of a collective, the call that it is part of, and the line
Told = tuple[int, str, str]  # the number of the last collective, what was done, and the line


class Watch:
    """What this process is doing, and what it knows of the others."""

    def __init__(self, world: Any, board: Board) -> None:
        self.world = world
        self.number = 0  # collectives begun
        self.call = "open_mesh"  # what may communicate
        self.kind, self.of, self.line, self.since = "", "", "", 0.0  # the last collective, and when it began to wait
        self.grid: tuple[int, ...] = ()
        self.story: deque[Told] = deque(maxlen=RECENT)
        self.failure: Failure | None = None
        self.works: list[Any] = []  # collectives that are under way, or were when they were given up
        self.waited = 0.0  # seconds, for collectives
        self._board = board
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshloom watch", daemon=True)
        self._beats = 0
        self._state = "running"
        self._is_telling = False  # an error that says who is where is being made
        self._is_over = False  # this process needs the store no more
        self._is_closed = False  # rank 0 has left, and the store with it

    def start(self) -> None:
        """Begin, and take note of exceptions and of SIGTERM, unless the program has handlers of its own."""
        self._publish(self.world.timeout)
        self._thread.start()
        faulthandler.enable()
        sys.excepthook, self._hook = self._uncaught, sys.excepthook
        threading.excepthook, self._thread_hook = self._uncaught_in_thread, threading.excepthook
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._terminate)
        os.register_at_fork(after_in_child=self._start_in_child)

    def _start_in_child(self) -> None:
        """A child of this process, such as a loader of data, is no rank: it ends as it would without us."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        if threading.excepthook == self._uncaught_in_thread:
            threading.excepthook = self._thread_hook
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(self) -> None:
        """Say that this process leaves."""
        self._state, self._is_over = "left", True
        if holds_store(HERE.rank) and self.failure is None:
            self._board.write("closed", True, GRACE)
        self._done.set()
        self._thread.join(timeout=2 * GRACE)
        self._linger(GRACE)
        self._await_work(GRACE)

    def _linger(self, seconds: float) -> None:
        """The process that holds the store waits until the others have read why, or that, it leaves, or are silent."""
        deadline = time.monotonic() + seconds
        heard: dict[int, tuple[int, float]] = {}  # the last beat of each, and when it came
        while holds_store(HERE.rank) and (now := time.monotonic()) < deadline:
            others = {rank: status for rank, status in self._statuses().items() if rank != HERE.rank}
            for rank, status in others.items():
                if rank not in heard or heard[rank][0] != status["beats"]:
                    heard[rank] = status["beats"], now
            if all(status["over"] or now - heard[rank][1] > GRACE for rank, status in others.items()):
                return
            time.sleep(BEAT / 5)

    def _await_work(self, seconds: float) -> None:
        """A collective that was given up ends when its peers are gone; torch's thread must not end it amid our exit."""
        deadline = time.monotonic() + seconds
        is_over = not self.works
        while not is_over and time.monotonic() < deadline:
            is_over = all(work.is_completed() for work in self.works)
            time.sleep(BEAT / 5)  # after its end too: the thread tidies up

    # one collective

    def begin(self, call: str, mesh: Mesh) -> None:
        """A call that may communicate."""
        self.call, self.grid = call, mesh.processes

    def enter(self, kind: str) -> None:
        """A collective begins."""
        if self.failure is not None:
            raise self._loss("cannot go on")
        self.number += 1
        self.kind, self.of, self.line, self.since = kind, self.call, where(), time.monotonic()

    def tell(self, text: str, line: str) -> None:
        """One more thing that this process has done, for the story of a divergence."""
        self.story.append((self.number, text, line))

    def said(self) -> Said:
        """What the collective that has begun is called, for who comes back to wait for it."""
        return self.kind, self.of, self.line

    def return_to(self, said: Said) -> None:
        """Wait for a collective that has begun before."""
        if self.failure is not None:
            raise self._loss("cannot go on")
        self.kind, self.of, self.line = said
        self.since = time.monotonic()

    def leave(self) -> None:
        """The collective has ended, or goes on by itself."""
        self.since = 0.0

    def look(self, since: float) -> None:
        """While waiting since then: raise if somebody failed, or if this has taken too long."""
        if self.failure is not None:
            raise self._loss("cannot go on")
        if time.monotonic() - since > self.world.timeout:
            raise self._give_up(f"{self._here()} has waited longer than {self.world.timeout:g} s")

    def explained(self, error: Exception) -> Exception:
        """The error of a collective with the story of all processes; first the cause, if another one failed first."""
        if isinstance(error, MeshloomError):
            return error
        self._await_cause(GRACE)  # a peer that raised says so a moment before its connection closes
        if self.failure is not None:
            return self._loss("cannot go on")
        reason = str(error).splitlines()[0].split("This is typically")[0].strip()
        return self._give_up(f"{self._here()} lost its connection", reason=reason)

    def _await_cause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(BEAT / 5)

    def _here(self) -> str:
        done = f"{self.kind} {self.number} of {self.of} at {self.line}" if self.kind else "before any collective"
        return f"{done} on rank {HERE.rank}"

    # failures

    def diverged(self, headline: str, **details: Any) -> DivergenceError:
        """An error that all processes raise by themselves."""
        self._tell(headline)
        return DivergenceError(headline, **details)

    def _give_up(self, headline: str, **details: Any) -> PeerLostError:
        """An error that says who is not where this process is; if another one failed first, what that one said."""
        with self._telling():
            seen, unknown = self._look()
            blamed = headline + blame(seen, HERE.rank)
            self._tell(blamed)
            first = self.failure
            if first is not None and first["rank"] != HERE.rank:  # it looked before those whom it blames were ended
                blamed = f"{headline}: {first['headline']}"
            return PeerLostError(blamed, **details, processes=self._table(seen, unknown), fix=_FIX)

    def _loss(self, what: str) -> PeerLostError:
        """An error that follows from another one."""
        failure = self.failure
        assert failure is not None
        with self._telling():
            return PeerLostError(
                f"{self._here()} {what}: {failure['headline']}",
                cause=failure["cause"] if failure["cause"] != failure["headline"] else None,
                processes=self._table(*self._look()),
                fix=_FIX,
            )

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """While an error is made, no signal cuts it short."""
        self._state, self._is_telling = "raised", True
        try:
            yield
        finally:
            self._is_telling = False

    def _tell(self, headline: str, cause: str = "") -> None:
        """Write the failure down, unless another one was first."""
        self._state = "raised"
        told: Failure = {"rank": HERE.rank, "headline": headline, "cause": cause or headline}
        try:
            first = self._board.write_first("failure", told, GRACE)
            if self.failure is None and _is_failure(first):
                self.failure = first
            self._publish(GRACE)
        except RuntimeError as error:  # the process that holds the store is gone too
            told["cause"] += f" (nobody else was told: {first_line(error)})"
        if self.failure is None:
            self.failure = told

    def _uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        own = None if isinstance(error, (PeerLostError, DivergenceError)) else self._describe_error(kind, error, trace)
        if own is not None and self.failure is None:
            self._tell(*own)
        self._hook(kind, error, trace)
        if own is not None:
            print(f"meshloom: {own[0]}, last call {self._here()}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        self._let_go()
        self._linger(5 * GRACE)
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)  # collectives under way would keep it alive

    def _uncaught_in_thread(self, args: Any) -> None:
        """What ends all processes ends this one too, wherever it was raised."""
        if isinstance(args.exc_value, (PeerLostError, DivergenceError)):
            self._uncaught(args.exc_type, args.exc_value, args.exc_traceback)
        self._thread_hook(args)

    def _describe_error(self, kind: Any, error: BaseException, trace: Any) -> tuple[str, str]:
        """The headline and the cause of an exception of the program."""
        line = where_raised(trace)
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        what = "was interrupted" if issubclass(kind, KeyboardInterrupt) else f"raised {text.splitlines()[0]}"
        return f"rank {HERE.rank} {what} at {line}", f"{text}\nat {line}, last call {self._here()}"

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, from whoever started the processes or from our own thread: say where we were."""
        if self._is_telling:
            return  # it came because another one was quicker; this process is about to end with more to say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once
        self._await_cause(2 * BEAT)
        line = line_of(frame)
        if self.failure is None:
            raise self._give_up(f"rank {HERE.rank} was told to end at {line}, last call {self._here()}")
        raise self._loss(f"was ended at {line}")

    # the thread

    def _run(self) -> None:
        failed_at, has_asked = 0.0, False
        while not self._done.wait(BEAT):
            if not self._look_at_board():
                return
            if self.failure is None or self._state != "running":
                continue
            failed_at = failed_at or time.monotonic()
            late = time.monotonic() - failed_at
            if late > GRACE and not self.since and not has_asked:  # the program is busy elsewhere
                has_asked = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            if late > 4 * GRACE:
                self._abandon()
        self._look_at_board()

    def _look_at_board(self) -> bool:
        """Write the status, read whether somebody failed; false when the run is over."""
        try:
            with suppress(UnwrittenError):  # a full disk ends nobody whose collectives go on
                self._publish(self.world.timeout)
            self._read_failure(self.world.timeout)
            self._is_closed = self._board.read("closed", self.world.timeout) is not None
            if self._is_closed:
                self._let_go()
            return not self._is_closed
        except RuntimeError as error:
            if self.failure is None and not self._done.is_set():
                self.failure = {"rank": HERE.rank, "headline": self._cut_off(), "cause": first_line(error)}
            return not self._done.is_set()

    def _cut_off(self) -> str:
        return f"rank {HERE.rank} has lost {holder()}, which holds the store of the processes"

    def _abandon(self) -> None:
        """The program does not come back from where it is (a call into C that waits): end it with the report."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        print(f"PeerLostError: {self._loss(f'was ended at {line_of(frame)}')}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    def _read_failure(self, seconds: float) -> None:
        if self.failure is None and _is_failure(told := self._board.read("failure", seconds)):
            self.failure = told

    def _publish(self, seconds: float) -> None:
        self._board.write(f"status {HERE.rank}", self._status(), seconds)

    def _let_go(self) -> None:
        """Say that this process has read all that it will; the store may go."""
        self._is_over = True
        try:
            self._publish(GRACE)
        except RuntimeError:  # it has gone
            self._is_closed = True

    def _status(self) -> Status:
        self._beats += 1
        since = self.since
        waits = self._state == "running" and since > 0
        return {
            "beats": self._beats,
            "host": socket.gethostname(),
            "number": self.number,
            "call": f"{self.kind} of {self.of}" if self.kind else self.call,
            "line": self.line,
            "now": "" if waits else line_of(sys._current_frames().get(threading.main_thread().ident or 0)),
            "state": "waiting" if waits else self._state,
            "seconds": round(time.monotonic() - since, 1) if waits else 0,
            "over": self._is_over,
        }

    # the others

    def _look(self) -> tuple[dict[int, Status], str]:
        """Where everybody is, and what is to be said of those who are not known."""
        try:
            deadline = time.monotonic() + GRACE
            first = last = self._statuses()
            while not has_answered(first, last, HERE.rank) and time.monotonic() < deadline:
                time.sleep(BEAT)
                last = self._statuses()
            return {**judge(first, last, HERE.rank), HERE.rank: self._status()}, "has said nothing"
        except RuntimeError as error:
            known = {0: LEFT} if self._is_closed else {}
            return {**known, HERE.rank: self._status()}, f"not known, {first_line(error)}"

    def _table(self, seen: dict[int, Status], unknown: str) -> str:
        return table(seen, HERE.count, self.grid, unknown)

    def _statuses(self) -> dict[int, Status]:
        notes = self._board.read_all([f"status {rank}" for rank in range(HERE.count)], GRACE)
        return {rank: note for rank, note in enumerate(notes) if is_status(note)}

    # stories, for a divergence

    def ends(self, told: str) -> dict[int, str]:
        """What the processes that have come to the end of the program say of it, this one included."""
        try:
            self._board.write(f"end {HERE.rank}", told, GRACE)
            notes = self._board.read_all([f"end {rank}" for rank in range(HERE.count)], GRACE)
        except RuntimeError:  # the store has gone with the rank that holds it, which has compared what it saw
            return {HERE.rank: told}
        return {rank: note for rank, note in enumerate(notes) if note is not None}

    def stories(self, number: int, ranks: tuple[int, ...]) -> dict[int, list[Told]]:
        """What some processes have been doing, by rank; whoever does not say so in time is left out."""
        key, deadline = f"story {number} of {ranks} ", time.monotonic() + 2 * GRACE
        self._board.write(key + str(HERE.rank), list(self.story), GRACE)
        found: dict[int, list[Told]] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in set(ranks) - set(found):
                if isinstance(note := self._board.read(key + str(rank), GRACE), list):
                    found[rank] = [(number, text, line) for number, text, line in note]
            time.sleep(BEAT / 5)
        return found


_FIX = "look at the rank that failed or hangs; raise timeout= (or MESHLOOM_TIMEOUT) if it was only slow"


def _is_failure(note: Any) -> bool:
    """Whether a note tells of a failure; without a secret anybody may have written it."""
    return isinstance(note, dict) and {"rank", "headline", "cause"} <= set(note)


def where_raised(trace: Any) -> str:
    """The innermost line of the program in a traceback."""
    found = "unknown line"
    for frame, number in traceback.walk_tb(trace):
        if is_program(frame.f_code.co_filename):
            found = f"{os.path.basename(frame.f_code.co_filename)}:{number}"
    return found
