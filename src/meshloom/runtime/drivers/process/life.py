"""One process of a card as its owner sees it: started by the server, spoken to, found ended, let go.

The server is one process per owner, started with the first card. A fork of the owner has no cards: its copies of the
lines are closed at once, so that the end of the owner is not hidden by the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from meshloom.errors import DeviceError
from meshloom.runtime.drivers.process.arena import Arena
from meshloom.runtime.drivers.process.frames import Frames, wait_for

IDLE = 60.0  # seconds that the server stays without a card
STARTING = 120.0  # seconds that a card may take to come to life: the first one imports torch
ENDING = 10.0  # seconds that a killed process may take to be gone
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from meshloom.runtime.drivers.process.server import main; main(int(sys.argv[2]), float(sys.argv[3]))"
)


class Life:
    """A process that is a card: its line for messages, and its lifeline."""

    def __init__(self, line: socket.socket, lifeline: socket.socket, pid: int) -> None:
        self.frames, self.pid = Frames(line), pid
        self._lifeline = lifeline
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._all = select.poll()
        for each in (line, lifeline, self._woken):
            self._all.register(each, select.POLLIN)
        self._told = ""
        self.close = weakref.finalize(self, _close_all, (line, lifeline, self._woken, self._waking))
        _lives.add(self)

    def poll(self, timeout: float | None) -> None:
        """Wait until a message has come, the process has ended, or somebody says `wake`. One thread at a time."""
        self._all.poll(None if timeout is None else -(-timeout * 1000 // 1))
        with contextlib.suppress(OSError):  # nobody did
            self._woken.recv(1 << 12)

    def wake(self) -> None:
        """Let the thread that polls return."""
        self._waking.send(b".")

    @property
    def is_over(self) -> bool:
        """Whether it is known how the process ended."""
        return bool(self._told)

    def has_news(self) -> bool:
        """Whether it has said something, or has ended; never waits."""
        return wait_for([(self.frames.socket, select.POLLIN), (self._lifeline, select.POLLIN)], 0.0)

    def fate(self) -> str:
        """How it ended, in words; waits until it has."""
        if not self._told:
            word, _, number = _hear(self._lifeline, ENDING).partition(" ")
            self._told = describe(int(number)) if word == "status" else "does not answer any more"
        return self._told

    def kill(self) -> None:
        """Let the process be ended, if it has not ended; does not wait for that."""
        with contextlib.suppress(OSError):  # it has, and this is closed
            self._lifeline.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End the process if it has not ended. It is gone when this returns; `close` lets go of what is left."""
        if self.close.alive:
            self.kill()
            self.fate()


def describe(status: int) -> str:
    """What a process did, from what `waitpid` says of it.

    >>> describe(9), describe(3 << 8)
    ('was killed by signal 9 (SIGKILL), as the system does when memory runs out', 'ended with exit code 3')
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    why = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){why}"


def _hear(lifeline: socket.socket, timeout: float) -> str:
    """A line of what the server says; empty if it is gone or says nothing."""
    text = b""
    while not text.endswith(b"\n"):
        found = b""
        if wait_for([(lifeline, select.POLLIN)], timeout):
            with contextlib.suppress(OSError):  # it is gone
                found = lifeline.recv(1)
        if not found:
            return ""
        text += found
    return text.decode().strip()


def _close_all(sockets: tuple[socket.socket, ...]) -> None:
    for each in sockets:
        each.close()


class Nursery:
    """The server as its owner sees it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(IDLE)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()

    def start(self, arenas: Sequence[Arena], settings: dict[str, object]) -> Life | None:
        """A process for a card; None if the server has gone meanwhile."""
        line, its_line = socket.socketpair()
        lifeline, its_lifeline = socket.socketpair()
        try:
            given = [its_line.fileno(), its_lifeline.fileno(), *(each.file.fileno() for each in arenas)]
            socket.send_fds(self._requests, [json.dumps(settings).encode()], given)
        except OSError:
            _close_all((line, lifeline))
            return None
        finally:
            _close_all((its_line, its_lifeline))
        number = ""
        try:
            number = _hear(lifeline, STARTING).partition(" ")[2]
        finally:
            if not number:
                _close_all((line, lifeline))
        return Life(line, lifeline, int(number)) if number else None

    def leave(self) -> None:
        """The server ends, and with it all of its cards."""
        self._requests.close()
        self._process.wait(ENDING)

    def forget(self) -> None:
        """In a fork of the owner: it is not ours."""
        self._requests.close()
        self._process.returncode = 0  # nobody waits for it here


_lives: weakref.WeakSet[Life] = weakref.WeakSet()
_lock = threading.Lock()
_nursery: Nursery | None = None


def start(arenas: Sequence[Arena], index: int, settings: dict[str, object]) -> Life:
    """A process for a card, from the server of this process, which is started if there is none."""
    global _nursery
    with _lock:
        for _ in range(2):  # the server may have ended for want of cards
            if _nursery is None:
                _nursery = Nursery()
            found = _nursery.start(arenas, settings)
            if found is not None:
                return found
            _leave()
    raise DeviceError(f"the process of card {index} did not start", fix="see what Python printed to stderr")


def _leave() -> None:
    global _nursery
    if _nursery is not None:
        _nursery.leave()
        _nursery = None


def _forget() -> None:
    """In a fork: close the copies of all lines."""
    global _nursery, _lock
    _lock = threading.Lock()
    for life in list(_lives):
        life.close()
    if _nursery is not None:
        _nursery.forget()
        _nursery = None


atexit.register(_leave)
os.register_at_fork(after_in_child=_forget)
