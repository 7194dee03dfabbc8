"""Folders of checkpoints: written aside under another name, put in place in one step, numbered, the last ones kept.

A folder that is being written is called `name.tmp-` and sixteen digits. Each process that writes there holds a lock,
the first one on a file beside the folder, from before it is there until it has its name. The system lets go of a lock
when its process ends, however it ends. So a folder aside whose lock is free, or gone, is a leftover: the next save
removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

from meshloom.checkpoint.files import sync_folder
from meshloom.checkpoint.index import FORMAT, NAME, read_json
from meshloom.errors import ArgumentError, CheckpointError

_MARK = ".tmp-"
_ASIDE = re.compile(r"(?P<name>.+)\.tmp-[0-9a-f]{16}")
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2


def as_folder(folder: object) -> Path:
    """A path that a checkpoint can have."""
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"folder={folder!r:.80} is of type {type(folder).__name__}", fix='"runs/step-000100"')
    path = Path(os.path.abspath(os.fspath(folder)))
    if path.name == "" or _ASIDE.fullmatch(path.name):
        raise ArgumentError(f"{path} cannot be the folder of a checkpoint", fix='"runs/step-000100"')
    return path


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that was written to its end; its files are not looked at."""
    return (folder / NAME).is_file() and not folder.is_symlink() and _ASIDE.fullmatch(folder.name) is None


def check_target(folder: Path) -> None:
    """An error if saving to a folder would remove what is not a checkpoint."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: it is a link", fix=f"save to {os.path.realpath(folder)}")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: it is a file", fix="give the name of a folder")
    if any(folder.iterdir()) and not _is_ours(folder):
        raise CheckpointError(f"{folder}: it has files that are not a checkpoint's", fix="give a new folder")


def _is_ours(folder: Path) -> bool:
    """Whether a folder has an index of ours, damaged or not."""
    try:
        found = read_json(folder / NAME)
    except CheckpointError:
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


# Aside


def name_aside(folder: Path, token: str) -> Path:
    """Where a checkpoint is written before it is put in place."""
    return folder.with_name(f"{folder.name}{_MARK}{token}")


class Lock:
    """A lock on a file that ends with the process, or with `release`."""

    def __init__(self, file: Path) -> None:
        self._file, self._number = file, -1
        while self._number < 0:
            number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(number, fcntl.LOCK_EX)
            if file.exists() and os.stat(file).st_ino == os.fstat(number).st_ino:
                self._number = number
            else:  # somebody has taken the file for a leftover before it was locked
                os.close(number)

    def release(self, *, remove: bool = False) -> None:
        """Let go of it, once."""
        if self._number >= 0:
            if remove:
                self._file.unlink(missing_ok=True)
            fcntl.flock(self._number, fcntl.LOCK_UN)  # also where a child of this process has the file open
            os.close(self._number)
            self._number = -1


def lock_file(aside: Path, rank: int) -> Path:
    """The file that a process holds a lock on while it writes: that of the first one is not inside, and outlasts it."""
    return aside / f"rank-{rank:05d}.lock" if rank else aside.with_name(f"{aside.name}.lock")


def is_free(file: Path) -> bool:
    """Whether the process that held the lock on a file has let go of it, or has ended; False where there is no file."""
    try:
        number = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(number)
    return True


def is_held(file: Path) -> bool:
    """Whether a process holds the lock on a file; False where there is no file."""
    return file.exists() and not is_free(file)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what saves to this folder, or to others of its series, have left behind when they were ended."""
    gone = [aside for aside in _asides(folder) if not is_held(lock_file(aside, 0))]
    for aside in gone:
        shutil.rmtree(aside, ignore_errors=True)
        lock_file(aside, 0).unlink(missing_ok=True)
    return gone


def _asides(folder: Path) -> list[Path]:
    """The folders aside of a series, those included of which only the lock is left."""
    found = set()
    for each in folder.parent.iterdir() if folder.parent.is_dir() else ():
        aside = each.with_name(each.name.removesuffix(".lock"))
        matched = _ASIDE.fullmatch(aside.name)
        if matched and _stem(matched["name"]) == _stem(folder.name) and not each.is_symlink():
            found.add(aside)
    return sorted(found)


def _stem(name: str) -> str:
    matched = _NUMBERED.fullmatch(name)
    return matched["stem"] if matched else name


def put_in_place(aside: Path, folder: Path) -> None:
    """Give a complete checkpoint its name; one that has it is exchanged for it in the same step, and removed."""
    try:
        os.rename(aside, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(aside, folder)
        sync_folder(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)


def _exchange(aside: Path, folder: Path) -> None:
    """Exchange two folders, of which one is there at every moment under the name."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_CWD, os.fsencode(aside), _AT_CWD, os.fsencode(folder), _EXCHANGE) != 0:
        reason = "the system has no way to do it" if rename is None else os.strerror(ctypes.get_errno())
        raise CheckpointError(
            f"{folder}: it cannot be exchanged for the new checkpoint in one step: {reason}",
            fix='save each checkpoint to a folder of its own: loom.save(state, f"runs/step-{step:06d}", keep=2)',
        )


# Series


def check_series(folder: Path, keep: object) -> None:
    """An error unless a folder is one of a series, of which the last ones can be kept."""
    if keep is None:
        return
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ArgumentError(f"keep={keep!r} is not a number of checkpoints", fix="keep=2 keeps the last two")
    if not _NUMBERED.fullmatch(folder.name):
        raise ArgumentError(
            f"keep={keep} needs a name that ends in a number, and {folder.name!r} does not",
            fix='loom.save(state, f"runs/step-{step:06d}", keep=2)',
        )


def remove_older(folder: Path, keep: int) -> list[Path]:
    """Remove the complete checkpoints of a series before this one, except the last `keep`, which this one is of."""
    mine = _NUMBERED.fullmatch(folder.name)
    assert mine is not None
    older = [
        (int(matched["number"]), each)
        for each in folder.parent.iterdir()
        if (matched := _NUMBERED.fullmatch(each.name)) is not None
        and matched["stem"] == mine["stem"]
        and int(matched["number"]) < int(mine["number"])
        and is_checkpoint(each)
        and _is_ours(each)
    ]
    gone = [each for _, each in sorted(older)][: max(0, len(older) - (keep - 1))]
    for each in gone:
        _remove(each)
    return gone


def _remove(folder: Path) -> None:
    """Remove a checkpoint: it loses its name first, so that nobody finds one by halves."""
    aside = name_aside(folder, os.urandom(8).hex())
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, by the number in its name; None where there is none.

    >>> import tempfile
    >>> latest(tempfile.mkdtemp()) is None
    True
    """
    parent = Path(os.path.abspath(os.fspath(folder)))
    if not parent.is_dir():
        return None
    found = [
        (int(matched["number"]), each.name, each)
        for each in parent.iterdir()
        if (matched := _NUMBERED.fullmatch(each.name)) and is_checkpoint(each)
    ]
    return max(found)[2] if found else None
