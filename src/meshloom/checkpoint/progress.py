"""How far a save or a load is: a bar where a terminal is there, or a function of one's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from meshloom.errors import ArgumentError
from meshloom.mesh import HERE

Progress = bool | Callable[[int, int], object] | None


def check_progress(progress: object) -> None:
    """An error unless progress can be shown that way."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ArgumentError(
            f"progress={progress!r:.80} is of type {type(progress).__name__}",
            fix="True or False, or a function of the bytes that are done and of all",
        )


@contextmanager
def show(what: str, total: int, progress: Progress) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes as they are done, from any thread; the bar is the first process's."""
    if callable(progress):
        yield _Counter(total, progress)
    elif progress or (progress is None and HERE.rank == 0 and sys.stderr.isatty()):
        with _bar(what, total) as tell:
            yield tell
    else:
        yield lambda _: None


class _Counter:
    """Adds up what is done, and says so."""

    def __init__(self, total: int, tell: Callable[[int, int], object]) -> None:
        self._done, self._total, self._tell = 0, total, tell
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._tell(self._done, self._total)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn, TransferSpeedColumn

    columns: list[Any] = [TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
