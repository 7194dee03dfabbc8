"""Starting ranks with torchrun's own agent, and a thread that listens to them.

torchrun opens for every rank the files that `Outlets.reify` names: they are pipes here. A third pipe, the lifeline,
tells when and how a rank ends (`cli/rank.py`), so that the first failure is known in the order that it happened.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from meshloom.cli import rank as entry
from meshloom.cli.merging import Lines, Merger, tag
from meshloom.cli.run import Launch
from meshloom.errors import LaunchError

GRACE = 5  # seconds between asking a rank to end and ending it
TAIL = 20  # last lines of stderr in a report
STREAMS = ("stdout", "stderr")


def launch(plan: Launch) -> None:
    """Run every rank of this host to its end; an error that names the first failure, if there is one."""
    _silence_torchrun()
    listener, meeting = Listener(plan), Meeting()
    try:
        launch_agent(_config(plan, listener, meeting), sys.executable, list(plan.command[1:]))
    except ChildFailedError as error:
        listener.finish(end_all=True)
        raise _failure(plan, listener, error.failures) from None
    except SignalException as error:
        _ignore_signals()
        listener.finish(end_all=True)
        _stopped(plan, error.sigval)
    except (RendezvousError, DistError) as error:
        raise LaunchError(
            f"the {len(plan.bindings.hosts)} hosts did not meet at {plan.endpoint} within {plan.start_timeout} s",
            reason=str(error).partition("\n")[0],
            fix="start the same command on every host, each with its --node-rank; the endpoint must be reachable",
        ) from error
    finally:
        meeting.end()
        listener.finish()


def _silence_torchrun() -> None:
    """Leave it to us to tell what happens, unless the user asks torchrun to with LOGLEVEL."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    for name in () if "LOGLEVEL" in os.environ else names:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _ignore_signals() -> None:
    """The end has begun, and a second Ctrl-C must not leave it half done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


class Meeting:
    """Ctrl-C while hosts meet: torch waits for them in C++, where Python does not hear it, so a thread listens."""

    def __init__(self) -> None:
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        signal.set_wakeup_fd(self._mouth)
        self._is_over = False
        threading.Thread(target=self._wait, name="meshloom-meeting", daemon=True).start()

    def end(self) -> None:
        """The hosts have met, or failed to."""
        if not self._is_over:
            self._is_over = True
            signal.set_wakeup_fd(-1)
            os.close(self._mouth)

    def _wait(self) -> None:
        heard = os.read(self._ear, 1)
        os.close(self._ear)
        if heard:
            _write(2, b"meshloom run: stopped, no rank had started\n")
            os._exit(128 + heard[0])


def _config(plan: Launch, listener: Listener, meeting: Meeting) -> LaunchConfig:
    settings: dict[str, Any] = {
        "min_nodes": len(plan.bindings.hosts),
        "max_nodes": len(plan.bindings.hosts),
        "nproc_per_node": len(plan.local),
        "run_id": plan.run_id,
        "rdzv_backend": plan.backend,
        "rdzv_endpoint": plan.endpoint,
        "rdzv_configs": {"timeout": plan.start_timeout, "rank": plan.node},
        "max_restarts": 0,
        "local_addr": "localhost" if plan.backend == "c10d" and len(plan.bindings.hosts) == 1 else None,
        "logs_specs": Outlets(plan, listener, meeting),
        "shutdown_timeout": GRACE,
    }
    known = {each.name for each in fields(LaunchConfig)}  # shutdown_timeout is younger than the oldest torch we take
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


class Outlets(LogsSpecs):
    """Where torchrun sends the output of its ranks, and the place at which it asks for their environment."""

    def __init__(self, plan: Launch, listener: Listener, meeting: Meeting) -> None:
        super().__init__()
        self._plan = plan
        self._listener = listener
        self._meeting = meeting

    @property
    def root_log_dir(self) -> str:
        return str(self._plan.log_dir or os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Pipes for every rank; its environment grows by what its binding says."""
        self._meeting.end()
        paths: dict[str, dict[int, str]] = {stream: {} for stream in STREAMS}
        for local_rank, environment in envs.items():
            rank = int(environment["RANK"])
            pipes = self._listener.add(rank)
            environment |= self._plan.environment_of(rank)
            environment |= {entry.LIFELINE: str(pipes["lifeline"]), "TORCHELASTIC_ERROR_FILE": ""}
            for stream in STREAMS:
                paths[stream][local_rank] = str(pipes[stream])
        self._listener.start()
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=paths["stdout"], stderrs=paths["stderr"], error_files=nowhere)


@dataclass(slots=True)
class Rank:
    """What is known of one rank."""

    number: int
    pid: int | None = None
    has_ended: bool = False
    has_failed: bool = False  # by its own word, before it ended
    error: str | None = None
    deadline: float | None = None  # when it is ended by force
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))


class Listener(threading.Thread):
    """Reads what ranks say and shows it at once; sees them end, and ends those that do not."""

    def __init__(self, plan: Launch) -> None:
        super().__init__(name="meshloom-listener", daemon=True)
        self.order: list[int] = []  # ranks as they ended or said that they failed
        self.ranks: dict[int, Rank] = {}
        self._plan = plan
        self._folder: Path | None = None
        self._selector = selectors.DefaultSelector()
        local = [binding.rank for binding in plan.local]
        self._mergers = {stream: Merger(local, plan.hold) for stream in STREAMS}
        self._lines: dict[tuple[str, int], Lines] = {}
        self._logs: dict[tuple[str, int], int] = {}
        self._is_over = threading.Event()
        self._showing = True

    def add(self, rank: int) -> dict[str, Path]:
        """Make the pipes of a rank."""
        self.ranks[rank] = Rank(rank)
        folder = self._folder = self._folder or Path(tempfile.mkdtemp(prefix="meshloom-"))
        pipes = {name: folder / f"{rank}.{name}" for name in (*STREAMS, "lifeline")}
        for name, path in pipes.items():
            os.mkfifo(path, 0o600)
            self._selector.register(os.open(path, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ, (name, rank))
        for stream in STREAMS:
            self._lines[stream, rank] = Lines(self._plan.hold)
            if self._plan.log_dir is not None:
                path = self._plan.log_dir / f"rank-{rank}.{stream}.log"
                self._logs[stream, rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        return pipes

    def finish(self, end_all: bool = False) -> None:
        """Show what is left; with `end_all` end whatever the ranks have left behind."""
        if end_all:
            for rank in self.ranks.values():
                self._kill(rank)
        self._is_over.set()
        if self.is_alive():
            self.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self) -> None:
        """Listen until the launch is over, then show the rest."""
        while not self._is_over.is_set():
            self._listen(self._patience())
        while self._listen(0):
            pass
        for (stream, rank), lines in self._lines.items():
            self._say(stream, rank, lines.end())
        for stream, merger in self._mergers.items():
            for rank in self.ranks:
                self._show(stream, merger.leave(rank, time.monotonic()))
        for descriptor in self._logs.values():
            os.close(descriptor)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _listen(self, patience: float) -> bool:
        """Read once from every pipe that has something; whether any had."""
        heard = [(key, *key.data, _read(key.fd)) for key, _ in self._selector.select(patience)]
        for _, name, rank, data in heard:
            if name in STREAMS and data:
                self._hear(name, rank, data)
        for key, _, rank, data in (each for each in heard if each[1] == "lifeline"):  # as they spoke or died
            if data:
                self._learn(self.ranks[rank], data)
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                self._bury(self.ranks[rank])
        self._tick(time.monotonic())
        return any(data for *_, data in heard)

    def _patience(self) -> float:
        """How long to wait for output: until something is due, a tenth of a second at most."""
        dues = [*(each.due for each in self._mergers.values()), *(each.due for each in self._lines.values())]
        soonest = min((due for due in dues if due is not None), default=None)
        return 0.1 if soonest is None else min(0.1, max(0.0, soonest - time.monotonic()))

    def _hear(self, stream: str, rank: int, data: bytes) -> None:
        self._log(stream, rank, data)
        self._say(stream, rank, self._lines[stream, rank].feed(data, time.monotonic()))

    def _say(self, stream: str, rank: int, lines: list[str]) -> None:
        for line in lines:
            line = line.removeprefix(f"[rank{rank}]: ")  # torch's own, before its tracebacks
            if stream == "stderr":
                self.ranks[rank].tail.append(line)
            self._show(stream, self._mergers[stream].say(rank, line, time.monotonic()))

    def _log(self, stream: str, rank: int, data: bytes) -> None:
        descriptor = self._logs.get((stream, rank))
        if descriptor is None:
            return
        try:
            _write(descriptor, data)
        except OSError as error:
            os.close(self._logs.pop((stream, rank)))
            _write(2, f"meshloom run: the {stream} of rank {rank} is no longer logged: {error}\n".encode())

    def _show(self, stream: str, said: list[Any]) -> None:
        world = len(self._plan.bindings)
        text = "".join(f"{tag(each.ranks, world)} {each.line}\n" for each in said)
        if not text or not self._showing:
            return
        try:
            _write(1 if stream == "stdout" else 2, text.encode(errors="replace"))
        except BrokenPipeError:  # the reader has gone (as with `| head`): so does the run
            self._showing = False
            os.kill(os.getpid(), signal.SIGTERM)

    def _tick(self, now: float) -> None:
        for (stream, rank), lines in self._lines.items():
            self._say(stream, rank, lines.tick(now))
        for stream, merger in self._mergers.items():
            self._show(stream, merger.tick(now))
        for late in self.ranks.values():
            if late.deadline is not None and now >= late.deadline:
                late.deadline = None
                self._kill(late)

    def _learn(self, rank: Rank, data: bytes) -> None:
        for line in data.splitlines():
            facts = json.loads(line)
            rank.pid = facts.get("pid", rank.pid)
            if facts.get("has_failed"):
                rank.has_failed, rank.error = True, facts.get("error")
                rank.deadline = time.monotonic() + GRACE  # it has failed; it may tidy up, not stay
                self.order.append(rank.number)

    def _bury(self, rank: Rank) -> None:
        """A rank has ended: torchrun asks the others to end if it failed, and here they get a deadline."""
        rank.has_ended, rank.deadline = True, None
        if rank.number not in self.order:
            self.order.append(rank.number)
        if rank.pid is not None and (rank.has_failed or _status(rank.pid)):
            for other in self.ranks.values():
                if not other.has_ended and other.deadline is None:
                    other.deadline = time.monotonic() + GRACE

    def _kill(self, rank: Rank) -> None:
        if rank.pid is None:
            return
        try:
            os.killpg(rank.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nothing of the group is left
            return


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _status(pid: int) -> int:
    """The exit status of a child that is just ending, left for torchrun to collect; 0 if that has been done already."""
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return 0
        if found is not None:
            return found.si_status
        time.sleep(0.001)
    return 0


def _failure(plan: Launch, listener: Listener, failures: dict[int, ProcessFailure]) -> LaunchError:
    """The first failure as an error: who, how, and the last that it said."""
    torchs = min(failures, key=lambda rank: failures[rank].timestamp)
    first = next((rank for rank in listener.order if rank in failures), torchs)
    known = listener.ranks[first]
    several = len(plan.bindings.hosts) > 1
    return LaunchError(
        f"rank {first} of {len(plan.bindings)} failed first{' on this host' if several else ''}: "
        + _ending(failures[first].exitcode),
        host=plan.bindings[first].host if several else None,
        error=known.error,
        stderr="\n".join(known.tail) or None,
        others=_others(listener, failures, first),
        logs=plan.log_dir,
    )


def _ending(code: int) -> str:
    """How a process ended, in words.

    >>> _ending(3), _ending(-9)
    ('exit code 3', 'killed by SIGKILL (signal 9)')
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name} (signal {-code})"


def _others(listener: Listener, failures: dict[int, ProcessFailure], first: int) -> str | None:
    """The ranks that failed after the first one, not those that the launcher ended."""
    own = [
        f"rank {rank}: {_ending(failure.exitcode)}"
        + (f", {listener.ranks[rank].error}" * bool(listener.ranks[rank].error))
        for rank, failure in sorted(failures.items())
        if rank != first and failure.exitcode not in (-signal.SIGTERM, -signal.SIGKILL)
    ]
    return "\n".join(own) or None


def _stopped(plan: Launch, number: signal.Signals) -> None:
    """End as a process does that was stopped by this signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt(f"all {len(plan.local)} ranks have ended")
    print(f"meshloom run: stopped by {number.name}, all {len(plan.local)} ranks have ended", file=sys.stderr)
    sys.exit(128 + number)
