"""A thread that helps another one: it does what it is given, one thing after the other.

An executor of the standard library would do, but takes nothing any more once the program has come to its end, and a
save in a thread goes on then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class Helper:
    """One thread; inside `with`, `begin` gives it something to do.

    >>> with Helper("adder") as adder:
    ...     adder.begin(lambda: 1 + 1).result()
    2
    """

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"meshloom {name}")

    def __enter__(self) -> Helper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self._thread.join()

    def begin(self, act: Callable[[], Result]) -> Future[Result]:
        """What it will have done, and given or raised."""
        future: Future[Result] = Future()
        self._given.put((future, act))
        return future

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            future, act = given
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
