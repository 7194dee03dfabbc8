"""Running the ranks of this host: one loop that listens to them, shows what they say, and ends them.

The guardian (`cli/guardian.py`) starts the ranks and says how each one ended. Every rank has three pipes to this
process: its output, and the lifeline, on which it says that it failed before anything else of it ends (`cli/rank.py`),
so that the first failure is known in the order that it happened. Nothing in the loop waits for the screen.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from meshloom import settings
from meshloom.cli.guardian import CAUGHT, Guardian, Start, kill_group
from meshloom.cli.meeting import Met, meet_hosts, meet_in
from meshloom.cli.merging import Lines, Merger, Said, tag
from meshloom.cli.run import Launch
from meshloom.cli.showing import DESCRIPTORS, Screen, open_log
from meshloom.errors import LaunchError
from meshloom.processes.jobs import is_watched, remove_job, write_job

GRACE = 5  # seconds between asking a rank to end and ending it
PIECE = 1 << 16  # bytes that are read at once
ROUNDS = 16  # pieces that a pipe holds at most, as the system has it
TAIL = 20  # last lines of stderr in a report
STREAMS = tuple(DESCRIPTORS)


def launch(plan: Launch) -> None:
    """Run every rank of this host to its end; an error that names the first failure, if there is one."""
    screen = Screen()
    met = _meet(plan)
    logs = _open_logs(plan)
    folder = _make_folder()
    with _catch_signals() as heard:
        run = Run(plan, screen, logs, heard)
        try:
            run.start(folder, met or meet_in(folder, plan.interface))
            run.listen()
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # the guardian has done it, unless it was killed
    if run.stopped_by is not None:
        _stop(plan, run.stopped_by)
    if run.failures:
        raise _failure(plan, run)


def _meet(plan: Launch) -> Met | None:
    """On several hosts, what they agree upon; on one there is nobody to meet."""
    try:
        return meet_hosts(plan) if plan.has_several_hosts else None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no rank had started") from None


def _make_folder() -> Path:
    """A folder that only this user can open (mode 0700), with room in it."""
    where = tempfile.gettempdir()
    try:
        folder = Path(tempfile.mkdtemp(prefix="meshloom-"))
        try:
            (folder / "room").write_bytes(bytes(1 << 16))
            (folder / "room").unlink()
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise LaunchError(
            f"the folder for temporary files {where} cannot be written: {error.strerror}",
            fix="make room there, or set TMPDIR to another folder",
        ) from error
    return folder


def _open_logs(plan: Launch) -> dict[tuple[str, int], int]:
    if plan.log_dir is None:
        return {}
    places = [(stream, binding.rank) for binding in plan.local for stream in STREAMS]
    return {(stream, rank): open_log(plan.log_dir / f"rank-{rank}.{stream}.log") for stream, rank in places}


@contextmanager
def _catch_signals() -> Iterator[int]:
    """A descriptor from which the numbers of signals can be read; SIGHUP stays ignored where it is (nohup)."""
    ear, mouth = os.pipe()
    os.set_blocking(ear, False)
    os.set_blocking(mouth, False)
    before = {number: signal.getsignal(number) for number in CAUGHT}
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number, handler in before.items():
        if (number, handler) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(number, lambda *_: None)
    try:
        yield ear
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ear)
        os.close(mouth)


@dataclass(slots=True)
class Rank:
    """What is known of one rank."""

    number: int
    pid: int | None = None
    code: int | None = None  # how it ended
    said: int | None = None  # the exit code by its own word, before it ended
    error: str | None = None
    deadline: float | None = None  # when it is ended by force
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))

    @property
    def fate(self) -> int:
        """Its exit code: its own, although it may have been ended while it tidied up."""
        assert self.code is not None
        return self.said or self.code


class Run:
    """Reads what ranks say and shows it at once; sees them end, and ends those that do not."""

    def __init__(self, plan: Launch, screen: Screen, logs: dict[tuple[str, int], int], signals: int) -> None:
        self.order: list[int] = []  # ranks as they ended or said that they failed
        self.ranks = {binding.rank: Rank(binding.rank) for binding in plan.local}
        self.stopped_by: signal.Signals | None = None
        self._job, self._began, self._report_at = f"run-{os.getpid()}", time.time(), 0.0
        self._patient_until = math.inf  # with a reader that does not read
        self._plan, self._screen, self._logs = plan, screen, logs
        self._selector = selectors.PollSelector()  # the screen may be a file, which epoll does not take
        self._mergers = {stream: Merger(self.ranks, plan.hold) for stream in STREAMS}
        self._lines = {(stream, rank): Lines(plan.hold) for rank in self.ranks for stream in STREAMS}
        self._lifelines: dict[int, int] = {}  # by rank
        self._pipes: dict[int, Callable[[], object]] = {}  # output of ranks, and who takes it
        self._watch(signals, partial(self._take_signals, signals))

    def start(self, folder: Path, met: Met) -> None:
        """Start the guardian, and with it the ranks."""
        with _reserve_port() as port:
            starts = [self._prepare(rank, met, port.getsockname()[1]) for rank in self.ranks]
            self._guardian = Guardian(starts, folder)
        self._watch(self._guardian.reports, self._take_reports)

    def _prepare(self, rank: int, met: Met, port: int) -> Start:
        """The pipes of a rank, with its environment."""
        ends = {}
        for name in (*STREAMS, "lifeline"):
            ear, ends[name] = os.pipe()
            os.set_blocking(ear, False)
            if name == "lifeline":
                self._lifelines[rank] = ear
                self._watch(ear, partial(self._take_news, rank))
            else:
                self._pipes[ear] = partial(self._take_output, ear, name, rank)
                self._watch(ear, self._pipes[ear])
        inherited = {
            name: text for name, text in settings.environment().items() if not name.startswith("TORCHELASTIC_")
        }
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**inherited, **alone, **met.environment(), **self._plan.environment_of(rank)}
        return Start(rank, self._plan.command, environment, has_stdin=rank == min(self.ranks), **ends)

    def _watch(self, descriptor: int, take: Callable[[], object], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(descriptor, events, take)

    @property
    def failures(self) -> dict[int, Rank]:
        """The ranks that did not end well."""
        return {number: rank for number, rank in self.ranks.items() if rank.code}

    def listen(self) -> None:
        """Until all ranks have ended, and what they said is shown."""
        try:
            while any(rank.code is None for rank in self.ranks.values()):
                self._listen_once(self._patience())
                self._report()
        finally:
            remove_job(self._job)
            is_well = self.stopped_by is None and all(rank.code == 0 for rank in self.ranks.values())
            self._guardian.end(is_well)
        for _ in range(ROUNDS):  # not until nothing comes: children that go on may speak on, to nobody
            self._read_rest()
        self._show_rest()
        for descriptor in (*self._logs.values(), *self._lifelines.values(), *self._pipes, self._guardian.reports):
            os.close(descriptor)
        self._selector.close()

    def _report(self) -> None:
        """Tell `meshloom monitor` of the ranks, while somebody watches."""
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + 0.5
        with suppress(OSError):  # a folder that cannot be written shows nothing
            if is_watched() and "meshloom.controller.worker" not in self._plan.typed:  # its client tells more
                ranks = [_shown(rank) for rank in self.ranks.values()]
                title = f"meshloom run {' '.join(self._plan.typed)}"
                write_job(self._job, {"kind": "run", "title": title, "began": self._began, "workers": ranks})

    def _listen_once(self, patience: float) -> None:
        self._register_screen()
        for key, _ in self._selector.select(patience):
            key.data()
        if self._screen.has_lost_reader:  # as with `| head`: so does the run
            self._stop(signal.SIGTERM)
        self._tick(time.monotonic())

    def _register_screen(self) -> None:
        """Wait for a slow reader, and keep ranks waiting when it is too slow."""
        known = set(self._selector.get_map())
        for stream, descriptor in DESCRIPTORS.items():
            if stream in self._screen.waiting and descriptor not in known:
                self._watch(descriptor, partial(self._screen.flush, stream), selectors.EVENT_WRITE)
            elif stream not in self._screen.waiting and descriptor in known:
                self._selector.unregister(descriptor)
        for ear, take in self._pipes.items():
            if self._screen.is_full and ear in known:
                self._selector.unregister(ear)
            elif not self._screen.is_full and ear not in known:
                self._watch(ear, take)

    def _patience(self) -> float:
        """How long to wait for output: until something is due, a tenth of a second at most."""
        dues = [*(each.due for each in self._mergers.values()), *(each.due for each in self._lines.values())]
        soonest = min((due for due in dues if due is not None), default=None)
        return 0.1 if soonest is None else min(0.1, max(0.0, soonest - time.monotonic()))

    # what is heard

    def _take_output(self, ear: int, stream: str, rank: int) -> None:
        data = _read(ear)
        if data == b"":  # all who could speak have ended
            self._drop(ear)
        elif data:
            self._log(stream, rank, data)
            self._say(stream, rank, self._lines[stream, rank].feed(data, time.monotonic()))

    def _drop(self, ear: int) -> None:
        del self._pipes[ear]
        if ear in self._selector.get_map():
            self._selector.unregister(ear)
        os.close(ear)

    def _take_news(self, rank: int) -> None:
        """What a rank says on its lifeline: how its script ended; after a failure it may tidy up, not stay."""
        data, known = _read(self._lifelines[rank]), self.ranks[rank]
        if data == b"" and self._lifelines[rank] in self._selector.get_map():
            self._selector.unregister(self._lifelines[rank])
        for facts in map(json.loads, (data or b"").splitlines()):
            known.said, known.error = facts["code"], facts["error"]
            self._note_end(rank)
            if known.said:
                known.deadline = time.monotonic() + GRACE

    def _take_reports(self) -> None:
        """What the guardian says; first all that ranks have said before it."""
        data = _read(self._guardian.reports)
        for rank in self.ranks:
            self._take_news(rank)
        if data == b"":
            self._selector.unregister(self._guardian.reports)
            self._bury_all()
        for facts in map(json.loads, (data or b"").splitlines()):
            known = self.ranks[facts["rank"]]
            known.pid = facts.get("pid", known.pid)
            if "error" in facts:
                known.error, facts["code"] = f"it could not be started: {facts['error']}", 1
            if "code" in facts:
                self._bury(known, facts["code"])

    def _bury_all(self) -> None:
        """The guardian was killed, and the system has ended the ranks with it."""
        for rank in self.ranks.values():
            if rank.code is None:
                if rank.pid is not None:
                    kill_group(rank.pid, signal.SIGKILL)
                rank.error = rank.error or "the guardian of the ranks was killed"
                self._bury(rank, -signal.SIGKILL)

    def _bury(self, rank: Rank, code: int) -> None:
        """A rank has ended; if it failed, the others are asked to end."""
        rank.code, rank.deadline = code, None
        self._note_end(rank.number)
        if code:
            self._ask_to_end(signal.SIGTERM)

    def _note_end(self, rank: int) -> None:
        if rank not in self.order:
            self.order.append(rank)

    def _ask_to_end(self, number: int) -> None:
        """A signal to those who still run and have not been asked; they get a deadline."""
        asked = [rank for rank in self.ranks.values() if rank.code is None and rank.deadline is None]
        if asked:
            self._guardian.send(number, [rank.number for rank in asked])
        for rank in asked:
            rank.deadline = time.monotonic() + GRACE

    def _take_signals(self, signals: int) -> None:
        for number in _read(signals) or b"":
            if number in CAUGHT:
                self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        """The end begins, once: a second Ctrl-C must not leave it half done."""
        if self.stopped_by is None:
            self.stopped_by, self._patient_until = number, time.monotonic() + 2 * GRACE
            self._ask_to_end(number)

    def _tick(self, now: float) -> None:
        for (stream, rank), lines in self._lines.items():
            self._say(stream, rank, lines.tick(now))
        for stream, merger in self._mergers.items():
            self._show(stream, merger.tick(now))
        for late in self.ranks.values():
            if late.deadline is not None and now >= late.deadline:
                late.deadline = now + GRACE
                self._guardian.send(signal.SIGKILL, [late.number])

    # what is shown

    def _say(self, stream: str, rank: int, lines: list[str]) -> None:
        for line in lines:
            line = line.removeprefix(f"[rank{rank}]: ")  # torch's own, before its tracebacks
            if stream == "stderr":
                self.ranks[rank].tail.append(line)
            self._show(stream, self._mergers[stream].say(rank, line, time.monotonic()))

    def _show(self, stream: str, said: list[Said]) -> None:
        world = len(self._plan.bindings)
        if said:
            self._screen.show(stream, "".join(f"{tag(each.ranks, world)} {each.line}\n" for each in said))

    def _log(self, stream: str, rank: int, data: bytes) -> None:
        descriptor = self._logs.get((stream, rank))
        if descriptor is None:
            return
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            os.close(self._logs.pop((stream, rank)))
            self._screen.show("stderr", f"meshloom run: the {stream} of rank {rank} is no longer logged: {error}\n")

    def _read_rest(self) -> None:
        self._drain_screen()
        for take in list(self._pipes.values()):
            take()

    def _show_rest(self) -> None:
        for (stream, rank), lines in self._lines.items():
            self._say(stream, rank, lines.end())
        for stream, merger in self._mergers.items():
            for rank in self.ranks:
                self._show(stream, merger.leave(rank, time.monotonic()))
        self._drain_screen()

    def _drain_screen(self) -> None:
        """Wait for a slow reader, unless somebody has stopped the run and it had its moment."""
        while self._screen.waiting and time.monotonic() < self._patient_until:
            self._listen_once(0.1)


def _shown(rank: Rank) -> dict[str, object]:
    """What the monitor shows of a rank."""
    state = "ready" if rank.code is None else _ending(rank.code)
    return {"number": rank.number, "state": state, "pid": rank.pid or 0, "line": rank.tail[-1] if rank.tail else ""}


@contextmanager
def _reserve_port() -> Iterator[socket.socket]:
    """A port of loopback for programs of plain torch, whose rank 0 may listen there; nobody else is given it.

    It is bound and does not listen, and the guardian has it for as long as ranks run.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held


def _read(descriptor: int) -> bytes | None:
    """What there is to read: nothing at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, PIECE)
    except BlockingIOError:
        return None


def _failure(plan: Launch, run: Run) -> LaunchError:
    """The first failure as an error: who, how, and the last that it said."""
    failed = [rank for rank in run.order if rank in run.failures]
    first = next((rank for rank in failed if run.ranks[rank].said != 0), failed[0])  # 0: ended while it tidied up
    known = run.ranks[first]
    here = " on this host" if plan.has_several_hosts else ""
    headline = f"rank {first} of {len(plan.bindings)} failed first{here}: {_ending(known.fate)}"
    if early := _left_early(run, known):
        headline = f"{early} left before the others{here}, and rank {first} failed of it: {_ending(known.fate)}"
    return LaunchError(
        headline,
        host=plan.bindings[first].host if here else None,
        error=known.error,
        stderr="\n".join(known.tail) or None,
        others=_others(run, first),
        logs=plan.log_dir,
    )


def _left_early(run: Run, first: Rank) -> str:
    """Who ended well while another one still needed it, as that one says."""
    if not (first.error or "").startswith("PeerLostError"):
        return ""
    early = [
        rank for rank in run.order[: run.order.index(first.number)] if 0 in (run.ranks[rank].said, run.ranks[rank].code)
    ]
    return f"rank{'s' * (len(early) > 1)} {', '.join(map(str, early))}" if early else ""


def _ending(code: int) -> str:
    """How a process ended, in words.

    >>> _ending(3), _ending(-9)
    ('exit code 3', 'killed by SIGKILL (signal 9)')
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name} (signal {-code})"


def _others(run: Run, first: int) -> str | None:
    """The ranks that failed after the first one, not those that the launcher ended."""
    own = [
        f"rank {number}: {_ending(rank.fate)}" + (f", {rank.error}" * bool(rank.error))
        for number, rank in sorted(run.failures.items())
        if number != first and rank.fate not in (-signal.SIGTERM, -signal.SIGKILL)
    ]
    return "\n".join(own) or None


def _stop(plan: Launch, number: signal.Signals) -> None:
    """End as a process does that was stopped by this signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt(f"all {len(plan.local)} ranks have ended")
    print(f"meshloom run: stopped by {number.name}, all {len(plan.local)} ranks have ended", file=sys.stderr)
    sys.exit(128 + number)
