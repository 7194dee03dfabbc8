"""The board: where the processes meet and leave notes for each other, with answers in bounded time.

`meshloom run` says where it is (`MESHLOOM_STORE`): on one host a folder of this user, so that no store listens at all;
on several hosts a store that rank 0 holds, at one address. Without that, it is the store of whoever started the
processes. On a link that is cut, a store's own calls wait until the system notices, a quarter of an hour later. Here
they run in a thread of their own, so that whoever asks waits only for as long as it says.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as Late, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from meshloom import settings
from meshloom.errors import PeerLostError
from meshloom.processes import interfaces
from meshloom.processes.notes import FolderNotes
from meshloom.processes.sealing import seal_of_run

VARIABLE = "MESHLOOM_STORE"  # file:///folder or tcp://address:port
MARGIN = 1.0  # seconds after which we no longer wait for torch's own timeout
LOOK = 0.1  # seconds between two looks while processes meet
_GRACE = 10.0  # seconds that a busy machine may take to pass on why a meeting failed
_MET = "all came"
_FAILED = "nobody waits"

Result = TypeVar("Result")


def bounded(seconds: float, call: Callable[[], Result]) -> Result:
    """What a call gives; a RuntimeError if it does not come back in time (a call into C cannot be ended)."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="meshloom bounded call", daemon=True)
    thread.start()
    try:
        return answer.result(seconds)
    except Late:
        atexit.register(thread.join, 2 * MARGIN)  # coming back amid our exit, it would abort the process
        raise RuntimeError(f"there was no answer within {seconds:.3g} s") from None


class UnwrittenError(RuntimeError):
    """A note that could not be written now, such as on a full disk; the store is still there."""


class Board:
    """Notes by name, on the store through which the processes met; what others write there is not a note."""

    def __init__(self, notes: object) -> None:
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        self._is_silent = False
        self._lost: str | None = None
        self._notes = notes
        self._seal = seal_of_run()
        threading.Thread(target=self._serve, name="meshloom board", daemon=True).start()

    @classmethod
    def beside(cls, store: Any) -> Board:
        """The board of processes that met through a store of torch: in the folder of the run, or else on that store."""
        folder = folder_of_run()
        return cls(FolderNotes(folder / "notes") if folder else dist.PrefixStore("meshloom", store.clone()))

    def write(self, name: str, value: object, seconds: float) -> None:
        """Put a note up."""
        self._ask(seconds, "set", name, self._seal.wrap(name, value))

    def write_first(self, name: str, value: object, seconds: float) -> Any:
        """Put a note up unless there is one; the note that is there."""
        own, expected = self._seal.wrap(name, value), b""
        for _ in range(3):  # a stranger may write between
            expected = self._ask(seconds, "compare_set", name, expected, own)
            if (note := self._seal.unwrap(name, expected)) is not None:
                return note
        return value

    def read(self, name: str, seconds: float) -> Any:
        """A note, or None if it is not there."""
        return self._seal.unwrap(name, self._ask(seconds, "get", name)) if self.has(name, seconds) else None

    def read_all(self, names: list[str], seconds: float) -> list[Any]:
        """Several notes, in two questions where all of them are there."""
        if not self._ask(seconds, "check", names):
            return [self.read(name, seconds) for name in names]
        found = self._ask(seconds, "multi_get", names)
        return [self._seal.unwrap(name, note) for name, note in zip(names, found, strict=True)]

    def has(self, name: str, seconds: float) -> bool:
        """Whether something is written there."""
        return bool(self._ask(seconds, "check", [name]))

    def _ask(self, seconds: float, method: str, *arguments: object) -> Any:
        """A RuntimeError if there is no answer in time; once silent, nobody waits until there is one again."""
        if self._lost is not None:
            raise RuntimeError(self._lost)
        answer: Future[Any] = Future()
        self._asked.put((method, arguments, answer))
        try:
            return answer.result(LOOK if self._is_silent else seconds)
        except Late:
            if not self._is_silent:
                atexit.register(wait, [answer], 2 * MARGIN)  # as for a bounded call
            self._is_silent = True
            raise RuntimeError(f"the store of the processes did not answer within {seconds:g} s") from None

    def _serve(self) -> None:
        while True:
            method, arguments, answer = self._asked.get()
            try:
                answer.set_result(getattr(self._notes, method)(*arguments))
            except (dist.DistNetworkError, FileNotFoundError) as error:  # asking again would only give more warnings
                self._lost = f"the store of the processes is gone: {first_line(error)}"
                answer.set_exception(RuntimeError(self._lost))
            except OSError as error:
                answer.set_exception(UnwrittenError(f"the store of the processes cannot be written: {error}"))
            except Exception as error:
                answer.set_exception(error)
            self._is_silent = False


def folder_of_run() -> Path | None:
    """Where the processes of one host meet, if `meshloom run` has started them."""
    url = urlsplit(settings.read(VARIABLE))
    return Path(unquote(url.path)) if url.scheme == "file" else None


def holds_store(rank: int) -> bool:
    """Whether the store is inside of this process."""
    return rank == 0 and holder() == "rank 0"


def holder() -> str:
    """Who holds the store: nobody but the disk, torchrun's agent, or rank 0."""
    if folder_of_run():
        return "the folder of the run"
    return "the launcher" if settings.read("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def meet(rank: int, count: int, seconds: float, line: str) -> tuple[Any, Board]:
    """The store and the board on it, once all processes have come; an error on each that names those who never did."""
    start = time.monotonic()
    place = settings.read(VARIABLE) or f"tcp://{_bracket(settings.read('MASTER_ADDR'))}:{settings.read('MASTER_PORT')}"

    def missing(headline: str, reason: object = None, fix: str = _FIX) -> PeerLostError:
        return PeerLostError(
            f"rank {rank} waited {time.monotonic() - start:.1f} s in open_mesh at {line}: {headline}",
            meeting_point=place.partition("//")[2],
            timeout=f"{seconds:g} s",
            reason=reason,
            fix=fix,
        )

    try:
        store, board = _open(place, rank, count, seconds)
    except (OSError, RuntimeError) as error:
        fate = "it cannot hold the store there" if holds_store(rank) else "nobody answers where rank 0 should be"
        raise missing(fate, first_line(error)) from None
    try:
        absent, wrong = _wait_for_all(board, rank, count, start + seconds)
    except RuntimeError as error:
        raise missing("the meeting point does not answer any more", first_line(error)) from None
    if absent or wrong:
        with contextlib.suppress(RuntimeError):  # why it failed is known here; it matters less who else knows
            _part(board, rank, count)
    if wrong:
        raise missing(wrong, fix=_FIX_ADDRESS)
    if absent:
        raise missing(f"{absent} of {count} never came")
    return store, board


_FIX = "start all ranks with the same WORLD_SIZE and meeting point; raise timeout= (or MESHLOOM_TIMEOUT)"
_FIX_ADDRESS = (
    f"set {interfaces.VARIABLE} on every host to the interface that joins the hosts, or give the host's name an "
    "address that the others can reach (/etc/hosts)"
)


def _open(place: str, rank: int, count: int, seconds: float) -> tuple[Any, Board]:
    if folder := folder_of_run():
        store = dist.FileStore(str(folder / "store"), -1)
        return store, Board.beside(store)
    url = urlsplit(place)
    address, port = url.hostname or "", url.port or 0
    until, is_holder = time.monotonic() + seconds, holds_store(rank)
    if not is_holder:
        _wait_for_answer(address, port, until)
    door = _listen(address, port) if is_holder and settings.is_set(VARIABLE) else None
    left = max(LOOK, until - time.monotonic())

    def connect() -> tuple[Any, Board]:
        patience, shared = timedelta(seconds=left / 2), door is None  # torch gives up before we do
        store = dist.TCPStore(address, port, count, is_holder, patience, False, shared, door)
        store.set_timeout(timedelta(seconds=seconds))
        return store, Board.beside(store)

    return bounded(left + MARGIN, connect)


def _listen(address: str, port: int) -> int:
    """A socket at one address alone; torch's own would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024).detach()


def _bracket(address: str) -> str:
    return f"[{address}]" if ":" in address else address


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


def _wait_for_all(board: Board, rank: int, count: int, deadline: float) -> tuple[str, str]:
    """Who has not come, as the first one that stopped waiting says, and what rank 0 finds wrong with those who have."""
    names = _names("came", count)
    own = {
        "host": socket.gethostname(),
        "machine": interfaces.machine(),
        "interface": settings.read(interfaces.VARIABLE) or None,
        "address": interfaces.gloo_address(),
    }
    board.write(names[rank], own, _GRACE + deadline - time.monotonic())
    while (met := board.read(_MET, seconds := _GRACE + max(0, deadline - time.monotonic()))) is None:
        if (absent := board.read(_FAILED, seconds)) is not None:
            return str(absent), ""
        came = board.read_all(names, seconds) if rank == 0 or time.monotonic() > deadline else []
        late = [str(each) for each, note in enumerate(came) if note is None]
        if rank == 0 and not late:
            board.write(_MET, {"wrong": _find_unreachable(came)}, seconds)
        elif late and time.monotonic() > deadline:
            return str(board.write_first(_FAILED, f"rank{'s' * (len(late) > 1)} {', '.join(late)}", seconds)), ""
        time.sleep(LOOK)
    return "", str(met["wrong"])


def _part(board: Board, rank: int, count: int) -> None:
    """Say that this process knows why the meeting failed; who holds the store stays until all who came know it."""
    board.write(_names("knows", count)[rank], True, _GRACE)
    until = time.monotonic() + _GRACE
    while holds_store(rank) and time.monotonic() < until:
        came, know = (board.read_all(_names(what, count), _GRACE) for what in ("came", "knows"))
        if all(told or not there for there, told in zip(came, know, strict=True)):
            return
        time.sleep(LOOK)


def _names(what: str, count: int) -> list[str]:
    return [f"{what} {rank}" for rank in range(count)]


def _find_unreachable(came: list[Any]) -> str:
    """What is wrong with where Gloo would listen, before it is asked: it would wait for the others far too long."""
    several = len({note["machine"] for note in came}) > 1
    for rank, note in enumerate(came):
        if note["address"] is None:
            return f"rank {rank} on {note['host']} has no interface named {note['interface']} with an address"
        if several and interfaces.is_loopback(note["address"]):
            return f"rank {rank} on {note['host']} would wait at {note['address']}, which no other host can reach"
    return ""


def first_line(error: Exception) -> str:
    """The part of an error that a report has room for."""
    return (str(error) or type(error).__name__).splitlines()[0]
