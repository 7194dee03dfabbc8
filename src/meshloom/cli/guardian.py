"""The guardian: the parent of the ranks of this host, which sees to it that nothing of a run stays behind.

It is a process between the launcher and the ranks. It starts them, says how each one ended, and passes signals on. When
the launcher says so, or is gone (even by kill -9), it ends every process that comes from a rank and removes the folder
of the run. On Linux it adopts whatever loses its parent, so that a child which has left its session is found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.cli.rank import LIFELINE

PATIENCE = 5.0  # seconds after which a process that SIGKILL does not end is left alone
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is started with: its command, environment, and its ends of the pipes to the launcher."""

    rank: int
    command: Sequence[str]
    environment: dict[str, str]
    stdout: int
    stderr: int
    lifeline: int
    has_stdin: bool


class Guardian:
    """The guardian as the launcher sees it; `reports` is to be read, a line of JSON for each start and end."""

    def __init__(self, starts: Sequence[Start], folder: Path) -> None:
        heard, self._orders = os.pipe()
        self.reports, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _live(starts, folder, heard, told, [self._orders, self.reports])
        ends = [end for start in starts for end in (start.stdout, start.stderr, start.lifeline)]
        for descriptor in (heard, told, *ends):
            os.close(descriptor)
        os.set_blocking(self.reports, False)

    def send(self, number: int, ranks: Sequence[int]) -> None:
        """Pass a signal on to ranks and their children."""
        self._order(signal=int(number), ranks=list(ranks))

    def end(self, is_well: bool) -> None:
        """Let it tidy up and wait for it; after a run that ended well, what ranks left running goes on."""
        if is_well:
            self._order(is_well=True)
        os.close(self._orders)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _order(self, **order: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed, which its reports tell
            os.write(self._orders, json.dumps(order).encode() + b"\n")


def _live(starts: Sequence[Start], folder: Path, orders: int, reports: int, foreign: list[int]) -> None:
    """The whole life of the guardian's process."""
    is_well = False
    try:
        os.setsid()
        for descriptor in foreign:
            os.close(descriptor)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        is_well = _Keeper(folder, orders, reports).keep(starts)
    except BaseException:
        traceback.print_exc()
    finally:
        if not is_well:
            end_children()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


class _Keeper:
    """Starts ranks, and listens to the launcher and to the system until the launcher is done or gone."""

    def __init__(self, folder: Path, orders: int, reports: int) -> None:
        self._orders, self._reports = orders, reports
        self._pids: dict[int, int] = {}  # by rank
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # systemd-tmpfiles leaves it alone, however old it is
        self._ear, mouth = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        for number in (*CAUGHT, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored stays so, in ranks too
                signal.signal(number, lambda *_: None)  # not ignored: ranks start with the default

    def keep(self, starts: Sequence[Start]) -> bool:
        """Whether the launcher says that all is well."""
        for start in starts:
            self._start(start)
        selector = selectors.DefaultSelector()
        selector.register(self._orders, selectors.EVENT_READ)
        selector.register(self._ear, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if self._ear in ready:
                os.read(self._ear, 1 << 12)
                self._collect()
            if self._orders in ready:
                orders = [json.loads(line) for line in os.read(self._orders, 1 << 16).splitlines()]
                if not orders or "is_well" in orders[-1]:
                    return bool(orders)
                for order in orders:
                    self._pass_on(order["signal"], order["ranks"])

    def _start(self, start: Start) -> None:
        try:
            process = subprocess.Popen(
                start.command,
                env={**start.environment, LIFELINE: f"{start.lifeline}:{os.getpid()}"},
                stdin=None if start.has_stdin else subprocess.DEVNULL,
                stdout=start.stdout,
                stderr=start.stderr,
                pass_fds=(start.lifeline,),
                start_new_session=True,
            )
        except OSError as error:
            self._report(rank=start.rank, error=str(error))
            return
        finally:
            for descriptor in (start.stdout, start.stderr, start.lifeline):
                os.close(descriptor)
        process.returncode = 0  # `_collect` waits for it
        self._pids[start.rank] = process.pid
        self._report(rank=start.rank, pid=process.pid)

    def _collect(self) -> None:
        """Every child that has ended, adopted ones too."""
        ranks = {pid: rank for rank, pid in self._pids.items()}
        for pid, status in _ended_children():
            if pid in ranks:
                del self._pids[ranks[pid]]
                self._report(rank=ranks[pid], code=os.waitstatus_to_exitcode(status), was=pid)

    def _pass_on(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._pids:  # not collected: its number is nobody else's
                kill_group(self._pids[rank], number)

    def _report(self, **facts: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone, which the orders tell
            os.write(self._reports, json.dumps(facts).encode()[:4000] + b"\n")


def kill_group(pid: int, number: int) -> None:
    """A signal to a process and those it started, unless they have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def end_children() -> None:
    """End every process that comes from this one, again and again until none is left: they may be starting others."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        list(_ended_children())
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _ended_children() -> Any:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def descendants(pid: int) -> list[int]:
    """The processes that come from a process, by the system's table of parents (Linux)."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            children.setdefault(int(each.read_text().rpartition(")")[2].split()[1]), []).append(int(each.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found
