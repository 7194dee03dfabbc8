"""One owner per card: a lock on the card's node, which goes with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from meshloom.errors import DeviceError, DeviceTimeoutError, MeshError


class CardLock:
    """The right to use the node of a card. Nothing is left behind: the system gives it back when the process ends."""

    def __init__(self, node: Path) -> None:
        self._node = node
        try:
            self._file = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MeshError(f"{node} is not there", fix=_others(node)) from None
        except PermissionError:
            raise DeviceError(
                f"{node} cannot be opened by this user", fix="add the user to the group that owns it, or ask its owner"
            ) from None
        if not _try_lock(self._file):
            found = os.fstat(self._file)
            os.close(self._file)
            raise DeviceError(
                f"{node} is in use by {_owner(found)}",
                fix="close the mesh device there, or wait for it: a card has one owner",
            )

    def release(self) -> None:
        """Let the card go; a second time does nothing."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a forked child that has the file too
            os.close(self._file)
            self._file = -1


def _others(node: Path) -> str:
    there = sorted(path.name for path in node.parent.iterdir()) if node.parent.is_dir() else []
    return f"{node.parent} has {', '.join(there)}" if there else f"there are no cards: {node.parent} is empty"


def _owner(found: os.stat_result) -> str:
    """Who holds the lock on a file, as far as the system tells."""
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if name in fields and "FLOCK" in fields:
                pid = int(fields[4])
                return "this process" if pid == os.getpid() else f"process {pid}"
    return "another process"


@contextlib.contextmanager
def alone(path: Path, timeout: float) -> Iterator[None]:
    """Let one process at a time do what is inside; an error if another does not end in time."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = time.monotonic() + timeout
    try:
        while not _try_lock(file):
            if time.monotonic() >= end:
                raise DeviceTimeoutError(
                    f"{_owner(os.fstat(file))} has held {path} for {timeout:g} s", fix="end it, if it hangs"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
