"""Where output goes: to the screen, which may be slow, full or closed, and to log files that only their owner reads.

Nothing here ever waits, so that ranks are always listened to: what the screen does not take yet is kept for later, and
what it cannot take at all is left out.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from pathlib import Path

from meshloom.errors import LaunchError

DESCRIPTORS = {"stdout": 1, "stderr": 2}
ENOUGH = 1 << 20  # bytes kept for a slow reader; beyond that, ranks wait as they would for their own


class Screen:
    """stdout and stderr of the launcher."""

    def __init__(self) -> None:
        self._kept = {stream: bytearray() for stream in DESCRIPTORS if getattr(sys, stream) is not None}
        self.has_lost_reader = False
        for stream in set(DESCRIPTORS) - set(self._kept):
            _fill(DESCRIPTORS[stream])

    def show(self, stream: str, text: str) -> None:
        """Write now what can be written now."""
        if stream in self._kept:
            self._kept[stream] += text.encode(errors="replace")
            self.flush(stream)

    def flush(self, stream: str) -> None:
        """Write what is kept, as far as the reader takes it."""
        kept, descriptor = self._kept.get(stream), DESCRIPTORS[stream]
        try:
            while kept and _is_writable(descriptor):
                del kept[: os.write(descriptor, kept[: select.PIPE_BUF])]  # that much never blocks
        except OSError as error:
            del self._kept[stream]
            self._say_why(stream, error)

    def _say_why(self, stream: str, error: OSError) -> None:
        if error.errno == errno.EPIPE:
            self.has_lost_reader = True
        else:
            self.show("stderr", f"meshloom run: {stream} is no longer shown: {error.strerror}\n")

    @property
    def waiting(self) -> list[str]:
        """The streams whose readers are slow."""
        return [stream for stream, kept in self._kept.items() if kept]

    @property
    def is_full(self) -> bool:
        """Whether so much is kept that ranks should wait."""
        return any(len(kept) > ENOUGH for kept in self._kept.values())


def _fill(descriptor: int) -> None:
    """Put something harmless where a stream was closed, or a pipe of ours would become our output."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _is_writable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def open_log(path: Path) -> int:
    """A new log file that only its owner can read; never another file that somebody put in its place."""
    try:
        found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _refusal(path, "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)) from error
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        os.close(found)
        raise _refusal(path, "it belongs to somebody else" if stat.S_ISREG(about.st_mode) else "it is not a file")
    os.fchmod(found, 0o600)
    os.ftruncate(found, 0)
    return found


def _refusal(path: Path, reason: str) -> LaunchError:
    return LaunchError(f"the log {path} cannot be written: {reason}", fix="remove it, or give another --log-dir")
