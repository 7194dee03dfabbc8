"""Notes as files in a folder that only this user can open: the store of a run on one host, where nothing listens.

It has the methods of torch's stores that the board asks for. A note is replaced as a whole, so that nobody reads half
of one. (torch's own FileStore only ever grows, and every process writes its status four times a second.)
"""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from urllib.parse import quote


class FolderNotes:
    """Notes by name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._numbers = itertools.count()

    def set(self, name: str, text: str) -> None:
        """Write a note, over an older one."""
        os.replace(self._draft(text), self._path(name))

    def get(self, name: str) -> bytes:
        """A note that is there."""
        return self._path(name).read_bytes()

    def multi_get(self, names: list[str]) -> list[bytes]:
        """Several notes that are there."""
        return [self.get(name) for name in names]

    def check(self, names: list[str]) -> bool:
        """Whether all of them are there."""
        return all(self._path(name).exists() for name in names)

    def compare_set(self, name: str, expected: str | bytes, desired: str) -> bytes:
        """Write a note if there is none, or the expected one; the note that is there afterwards."""
        draft = self._draft(desired)
        try:
            os.link(draft, self._path(name))
        except FileExistsError:  # another one was first
            if self.get(name) == (expected.encode() if isinstance(expected, str) else expected):
                self.set(name, desired)
        draft.unlink()
        return self.get(name)

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe=" ")

    def _draft(self, text: str) -> Path:
        draft = self._folder / f".{os.getpid()}.{threading.get_ident()}.{next(self._numbers)}"
        draft.write_text(text)
        return draft
