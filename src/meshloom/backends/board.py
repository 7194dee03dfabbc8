"""The board: the store at which the processes meet and leave notes for each other, with answers in bounded time.

On a link that is cut, the store's own calls wait until the system notices, a quarter of an hour later. Here they run in
a thread of their own, so that whoever asks waits only for as long as it says.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshloom.errors import LostError

LOOK = 0.1  # seconds between two looks while processes meet
_ALL = "all came"
_FAILED = "nobody waits"


class Board:
    """Notes by name, on the store through which the processes met."""

    def __init__(self, store: Any) -> None:
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        self._is_silent = False
        self._lost: str | None = None
        self._store = dist.PrefixStore("meshloom", store.clone())
        threading.Thread(target=self._serve, name="meshloom board", daemon=True).start()

    def write(self, name: str, text: str, seconds: float) -> None:
        """Put a note up."""
        self._ask(seconds, "set", name, text)

    def read(self, name: str, seconds: float) -> str | None:
        """A note, or None if it is not there."""
        return self._ask(seconds, "get", name).decode() if self.has(name, seconds) else None

    def read_all(self, names: list[str], seconds: float) -> list[str | None]:
        """Several notes, in two questions where all of them are there."""
        if not self._ask(seconds, "check", names):
            return [self.read(name, seconds) for name in names]
        return [note.decode() for note in self._ask(seconds, "multi_get", names)]

    def has(self, name: str, seconds: float) -> bool:
        """Whether a note is there."""
        return bool(self._ask(seconds, "check", [name]))

    def count(self, name: str, seconds: float) -> int:
        """Count one more; how many there are now."""
        return int(self._ask(seconds, "add", name, 1))

    def _ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        """A RuntimeError if there is no answer in time; once silent, nobody waits until there is one again."""
        if self._lost is not None:
            raise RuntimeError(self._lost)
        answer: Future[Any] = Future()
        self._asked.put((method, arguments, answer))
        try:
            return answer.result(LOOK if self._is_silent else seconds)
        except Late:
            self._is_silent = True
            raise RuntimeError(f"the store of the processes did not answer within {seconds:g} s") from None

    def _serve(self) -> None:
        while True:
            method, arguments, answer = self._asked.get()
            try:
                answer.set_result(getattr(self._store, method)(*arguments))
            except dist.DistNetworkError as error:  # asking again would only fill the output with torch's warnings
                self._lost = f"the store of the processes is gone: {first_line(error)}"
                answer.set_exception(RuntimeError(self._lost))
            except Exception as error:
                answer.set_exception(error)
            self._is_silent = False


def holds_store(rank: int) -> bool:
    """Whether the store is inside of this process."""
    return rank == 0 and not is_agents()


def is_agents() -> bool:
    """Whether the store is inside of torchrun's agent, rather than in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(rank: int, count: int, seconds: float, line: str) -> tuple[Any, Board]:
    """The store and the board on it, once all processes have come; an error on each that names those who never did."""
    start = time.monotonic()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def missing(headline: str, reason: object = None) -> LostError:
        return LostError(
            f"rank {rank} waited {time.monotonic() - start:.1f} s in open_mesh at {line}: {headline}",
            meeting_point=f"{address}:{port}",
            timeout=f"{seconds:g} s",
            reason=reason,
            fix="start all ranks with the same WORLD_SIZE and meeting point; raise timeout= (or MESHLOOM_TIMEOUT)",
        )

    is_holder = holds_store(rank)
    try:
        if not is_holder:
            _wait_for_answer(address, port, start + seconds)
        store = dist.TCPStore(
            address, port, count, is_holder, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
        )
    except (OSError, RuntimeError) as error:
        fate = "it cannot hold the store there" if is_holder else "nobody answers where rank 0 should be"
        raise missing(fate, first_line(error)) from None
    board = Board(store)
    try:
        absent = _wait_for_all(board, rank, count, start + seconds)
    except RuntimeError as error:
        raise missing("the meeting point does not answer any more", first_line(error)) from None
    if absent:
        if is_holder:
            time.sleep(10 * LOOK)  # the others read it before the store goes
        raise missing(f"{absent} of {count} never came")
    return store, board


def _wait_for_answer(address: str, port: int, deadline: float) -> None:
    """Until somebody listens there; the store's own attempts take twice the time and fill the output with warnings."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(LOOK, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK)


def _wait_for_all(board: Board, rank: int, count: int, deadline: float) -> str | None:
    """None when all have come; else who has not, as the first one that stopped waiting says."""
    board.write(f"came {rank}", socket.gethostname(), LOOK + deadline - time.monotonic())
    if board.count("came", LOOK + deadline - time.monotonic()) == count:
        board.write(_ALL, "", LOOK + deadline - time.monotonic())
    while not board.has(_ALL, seconds := max(LOOK, deadline - time.monotonic())):
        if (absent := board.read(_FAILED, seconds)) is not None:
            return absent
        if time.monotonic() > deadline:
            late = [str(each) for each in range(count) if not board.has(f"came {each}", seconds)]
            board.write(_FAILED, absent := f"rank{'s' * (len(late) > 1)} {', '.join(late)}", seconds)
            return absent
        time.sleep(LOOK)
    return None


def first_line(error: Exception) -> str:
    """The part of an error that a report has room for."""
    return (str(error) or type(error).__name__).splitlines()[0]
