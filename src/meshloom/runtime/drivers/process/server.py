"""The server: a process that has imported torch and does nothing but fork cards off itself and look after them.

A card is asked for with four descriptors: its line to the owner, a *lifeline* from the owner to the server, its memory
and that of the links. On the lifeline the server says which process it is, and later how that ended. When the owner's
end is closed, by the owner or with it (even by kill -9), the process is ended, and whatever it has started. When nobody
can ask for cards any more the server ends, and it does not stay without cards for long.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field
from types import FrameType

from meshloom.runtime.drivers.process.worker import Settings, live

LONGEST = 1 << 20  # bytes of a request


@dataclass
class Server:
    """The requests of the owner, and every card's lifeline by its process."""

    requests: socket.socket
    idle: float  # seconds without a card after which it ends
    lifelines: dict[int, socket.socket] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> None:
        """Fork and look after cards until the owner is gone, or nobody has asked for a card for a while."""
        woken = self._listen()
        self.selector.register(self.requests, selectors.EVENT_READ)
        while True:
            found = self.selector.select(None if self.lifelines else self.idle)
            ready = {key.fileobj for key, _ in found}
            if woken in ready:
                woken.recv(1 << 12)
                self._reap()
            for pid, lifeline in list(self.lifelines.items()):
                if lifeline in ready:  # nothing is ever said there: it was closed
                    self.selector.unregister(lifeline)
                    self._end(pid)
            if (self.requests in ready and not self._take()) or not (found or self.lifelines):
                break
        for pid in list(self.lifelines):
            self._end(pid)
            os.waitpid(pid, 0)

    def _listen(self) -> socket.socket:
        """A socket that is ready whenever a process has ended."""
        woken, waking = socket.socketpair()
        for each in (woken, waking):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
        self.selector.register(woken, selectors.EVENT_READ)
        return woken

    def _take(self) -> bool:
        """Fork the card that is asked for; False if nobody will ask any more."""
        message, descriptors, _, _ = socket.recv_fds(self.requests, LONGEST, 4)
        if not message:
            return False
        line, lifeline = (socket.socket(fileno=each) for each in descriptors[:2])
        own = os.getpid()
        pid = os.fork()
        if not pid:
            self._become(own, line, descriptors[2:], Settings(**json.loads(message)))
        line.close()
        for each in descriptors[2:]:
            os.close(each)
        self.lifelines[pid] = lifeline
        self.selector.register(lifeline, selectors.EVENT_READ)
        _say(lifeline, f"pid {pid}\n")
        return True

    def _become(self, server: int, line: socket.socket, memories: list[int], settings: Settings) -> None:
        """Be a card for the rest of this process's life."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for each in (self.requests, *self.lifelines.values()):
                each.close()
            live(line, memories, settings, server)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Say of every process that has ended how it did."""
        for pid in list(self.lifelines):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill(pid)  # what it has started
                lifeline = self.lifelines.pop(pid)
                if lifeline in self.selector.get_map():
                    self.selector.unregister(lifeline)
                _say(lifeline, f"status {status}\n")
                lifeline.close()

    def _end(self, pid: int) -> None:
        _kill(pid)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of it
        os.killpg(group, signal.SIGKILL)


def _say(lifeline: socket.socket, text: str) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the owner does not want to know
        lifeline.send(text.encode())


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The signal need only wake the server."""


def main(descriptor: int, idle: float) -> None:
    """The whole life of the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # cards share these pages as long as nobody counts references in them
    Server(socket.socket(fileno=descriptor), idle).serve()
