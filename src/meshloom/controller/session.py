"""The client's end of its connections: a queue of commands, and a thread that sends them and listens to the workers.

Whoever calls only appends to the queue. The thread takes what is there, packs it into one frame and sends it to every
worker, so that a program that is ahead of its workers sends large batches, and Ctrl-C never cuts a frame in two.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from meshloom import errors
from meshloom.controller import wire
from meshloom.errors import ClosedError, DeviceError, MeshloomError, PeerLostError, TraceError, where

BEAT = 1.0  # seconds between two signs of life of a worker
BATCH = 256  # commands in a frame
AHEAD = 8192  # commands that the client may be ahead of its workers
PIECE = 1 << 16  # bytes that are received at once
KEPT = 10000  # lines of the log
TICK = 0.001  # seconds between two looks at the queue while a program is calling
IDLE = 0.005  # seconds without a call after which the thread sleeps
LOOK = 0.5  # seconds between two looks for workers that are lost
SEEN = 0.5  # seconds in which a launcher sees that a worker has ended
REFUSED = "refused:"  # before the name of a call that cannot be sent
FAREWELL = 4.0  # seconds for workers to come to the end that they were told of
GRACE = 5.0  # seconds in which the others must fail too, or the cluster is broken


@dataclass
class Data:
    """A tensor that is on its way to the workers: to each its own bytes."""

    number: int
    dtype: str
    parts: Sequence[tuple[Sequence[int], memoryview]]  # shape and bytes, for each worker
    place: dict[str, Any] | None = None  # where the parts belong on a mesh; None of a plain tensor


@dataclass
class Reply:
    """What somebody waits for: the answers that have come, and how many are wanted."""

    wanted: int = 1
    values: list[tuple[Any, torch.Tensor | None]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)


@dataclass
class Status:
    """What is known of a worker."""

    number: int
    done: int = 0
    busy: float = 0.0
    memory: int = 0
    call: str = ""
    line: str = ""
    heard: float = field(default_factory=time.monotonic)


@dataclass
class _Failed:
    """A command that failed on some workers."""

    error: MeshloomError
    since: float
    workers: set[int] = field(default_factory=set)


class _Peer:
    """One worker's connection: what is to be sent, and what has come of the next frame."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.socket = number, connection
        self.out: deque[memoryview] = deque()
        self.events = selectors.EVENT_READ
        self.status = Status(number)
        self._have = bytearray()  # the beginning of a frame
        self._kind, self._header = b"", None
        self._payload: torch.Tensor | None = None
        self._rest = memoryview(b"")  # of the payload, that has not come

    def receive(self) -> list[tuple[bytes, Any, torch.Tensor | None]] | None:
        """The frames that are complete; None if the worker is gone."""
        found: list[tuple[bytes, Any, torch.Tensor | None]] = []
        while True:
            try:
                if self._payload is not None:
                    wanted = len(self._rest)
                    count = self.socket.recv_into(self._rest)
                    self._rest = self._rest[count:]
                else:
                    wanted = PIECE
                    piece = self.socket.recv(PIECE)
                    count = len(piece)
                    self._have += piece
            except BlockingIOError:
                return found
            except (ConnectionError, OSError):
                return None
            if not count:
                return None
            while self._take_frame(found):
                pass
            if count < wanted and self._payload is None:
                return found  # there is no more

    def _take_frame(self, found: list[tuple[bytes, Any, torch.Tensor | None]]) -> bool:
        """Whether a frame was complete: it goes to those that are found."""
        if self._payload is None:
            if len(self._have) < wire.HEAD.size:
                return False
            self._kind, header, announced = wire.read_head(self._have[: wire.HEAD.size])
            if not header:
                raise wire.WireError("a frame has no header")
            end = wire.HEAD.size + header
            if len(self._have) < end:
                return False
            self._header = wire.read_header(self._kind, self._have[wire.HEAD.size : end])
            del self._have[:end]
            if not announced:
                found.append((self._kind, self._header, None))
                return True
            self._payload = torch.empty(announced, dtype=torch.uint8)
            array: Any = self._payload.numpy()
            count = min(announced, len(self._have))
            self._rest = memoryview(array).cast("B")
            self._rest[:count] = self._have[:count]
            self._rest = self._rest[count:]
            del self._have[:count]
        if self._rest:
            return False
        found.append((self._kind, self._header, self._payload))
        self._payload = None
        return True


class Session:
    """Everything between this process and the workers of one cluster."""

    def __init__(
        self,
        connections: Sequence[socket.socket],
        timeout: float,
        name: str,
        find_fate: Callable[[int], MeshloomError | None],
    ) -> None:
        self._find_fate = find_fate  # what is known of the end of a worker, besides that its connection ended
        self.name, self.timeout, self.workers = name, timeout, len(connections)
        self.queue: deque[Any] = deque()
        self.numbers = itertools.count(1)
        self.issued, self._count = 0, itertools.count(1)
        self.failure: MeshloomError | None = None
        self.is_closed = False
        self._farewell = 0.0  # seconds for which workers that were told to end or to stay are heard out
        self.log: deque[Any] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter()
        self.context: Any = None
        self.plain: dict[Any, int] = {}  # plain tensors that the workers have, by what they hold
        self.pid = os.getpid()
        self.capturing: str | None = None  # the trace that calls go into
        self.lock = threading.RLock()  # a call and the modes that it is made in go together
        self._peers = [_Peer(number, each) for number, each in enumerate(connections)]
        self._replies: dict[int, Reply] = {}
        self._requests = itertools.count(1)
        self._failed: dict[int, _Failed] = {}  # commands that some workers have failed in and others not yet
        self._told = 0  # the commands whose failures somebody has been told of
        self._is_asleep = False
        self._is_waited_for = 0  # callers that wait until the workers have come further
        self._busy_until = self._look_at = 0.0
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._ear, False)
        self._progress = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        for peer in self._peers:
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self.pipes: list[Any] = []  # that a forked process must not hold open
        _SESSIONS.add(self)
        self._thread = threading.Thread(target=self._run, daemon=True, name="meshloom controller")
        self._thread.start()

    # what callers do

    @property
    def done(self) -> int:
        """The commands that every worker has done."""
        return min(peer.status.done for peer in self._peers)

    @property
    def statuses(self) -> list[Status]:
        """What is known of each worker."""
        return [peer.status for peer in self._peers]

    def check(self) -> None:
        """An error if the cluster is closed, broken, or a command failed."""
        if self.is_closed:
            raise ClosedError(f"{self.name} has been closed", fix="launch another: loom.launch(workers=...)")
        if self.failure is not None:
            failure = self.failure
            if not getattr(failure, "is_final", False):
                self.failure, self._told = None, self.issued
            raise failure.locate(where=where())  # if nothing was under way, whoever calls next learns of it

    def put(self, command: Any) -> None:
        """Queue a command; wait if the workers are too far behind."""
        if self.failure is not None or self.is_closed:
            self.check()
        if command.__class__ is Data:
            self.refuse_while_capturing("data was sent")
        self.queue.append(command)
        self.issued = next(self._count)
        if self._is_asleep:
            self.wake()
        if self.issued - self._peers[0].status.done > AHEAD and self.issued - self.done > AHEAD:
            self._wait_for(lambda: self.issued - self.done <= AHEAD // 2)

    def drop(self, number: int) -> None:
        """A tensor is gone: told with the next commands."""
        self.queue.append(number)

    def wake(self) -> None:
        """Let the thread look at the queue at once; while it is awake it does so every millisecond."""
        self._is_asleep = False
        with suppress(OSError):  # it has ended
            os.write(self._mouth, b"w")

    def refuse_while_capturing(self, what: str) -> None:
        """What a replay could not do again."""
        if self.capturing is not None:
            raise TraceError(
                f"{what} while trace {self.capturing!r} is captured, and a replay could not do it again",
                fix="do it before or after the trace; copy_ into a tensor gives a replay other data",
            )

    def ask(self, make: Callable[[int], Any], wanted: int = 1) -> list[tuple[Any, torch.Tensor | None]]:
        """Queue a command that is answered, and wait for the answers; `wanted` is how many workers answer."""
        self.refuse_while_capturing("a value was read")
        request, reply = next(self._requests), Reply(wanted)
        self._replies[request] = reply
        try:
            self.put(make(request))
            self.wake()
            self._await_event(reply.arrived)
        finally:
            self._replies.pop(request, None)
        if not reply.values or reply.values[0][0] is _LOST:
            self.check()
        if self.failure is not None:
            self.check()
        return reply.values

    def _await_event(self, event: threading.Event) -> None:
        while not event.wait(0.5):
            if self.failure is not None or self.is_closed:
                self.check()

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        with self._progress:
            self._is_waited_for += 1
            try:
                while not is_true():
                    if self.failure is not None or self.is_closed:
                        self.check()
                    self._progress.wait(0.5)
            finally:
                self._is_waited_for -= 1

    def wait(self) -> None:
        """Until the workers have done everything; an error if something failed."""
        if self.failure is None and not self.is_closed:
            self.ask(lambda request: ["a", request])
        self.check()

    def close(self, stays: bool = False) -> None:
        """Say goodbye, if anybody listens; workers that stay wait for another client."""
        if self.is_closed:
            return
        patience = self.timeout if stays else FAREWELL
        if self.failure is None or not getattr(self.failure, "is_final", False):
            self.queue.append(["l"] if stays else ["e"])
            self._farewell = patience
        self.is_closed = True
        self.wake()
        self._thread.join(patience + 1)

    def leave_to_parent(self) -> None:
        """In a forked process: the workers are the parent's, and must see when it ends."""
        for each in (*self._peers, *self.pipes):
            (each.socket if isinstance(each, _Peer) else each).close()
        if not self.is_closed:
            self.failure = ClosedError(
                f"{self.name} belongs to process {self.pid}, and process {os.getpid()} was forked from it",
                fix="use it in the process that launched it, or launch another",
            )
            self.failure.is_final = True  # type: ignore[attr-defined]

    # what the thread does

    def _run(self) -> None:
        try:
            while not (self.is_closed and not self.queue and not any(peer.out for peer in self._peers)):
                self._pump()
            if self._farewell:
                self._hear_out()
        except MeshloomError as error:
            self._break(error)
        except Exception as error:
            self._break(PeerLostError(f"the connection to the workers broke: {type(error).__name__}: {error}"))
        finally:
            for peer in self._peers:
                peer.socket.close()
            self._selector.close()
            os.close(self._ear)
            self._release()

    def _hear_out(self) -> None:
        """Wait until the workers hang up: a socket that is closed with something unread takes the last words along."""
        deadline = time.monotonic() + self._farewell
        for peer in self._peers:
            with suppress(OSError):  # a worker that is gone, or late, has heard what it will hear
                while (left := deadline - time.monotonic()) > 0:
                    peer.socket.settimeout(left)
                    if not peer.socket.recv(1 << 16):
                        break

    def _pump(self) -> None:
        is_busy = bool(self.queue)
        self._pack()
        for peer in self._peers:
            events = selectors.EVENT_READ if self._flush(peer) else selectors.EVENT_READ | selectors.EVENT_WRITE
            if events != peer.events:
                peer.events = events
                self._selector.modify(peer.socket, events, peer)
        now = time.monotonic()
        self._busy_until = now + IDLE if is_busy else self._busy_until
        is_awake = now < self._busy_until and not self._replies  # whoever waits for an answer calls nothing
        self._is_asleep = not is_awake
        patience = 0.0 if self.queue and not is_awake else TICK if is_awake else LOOK
        for key, _ in self._selector.select(patience):
            if key.fd == self._ear:
                os.read(self._ear, 4096)
            else:
                self._hear(key.data)
        self._is_asleep = False
        if now >= self._look_at:
            self._look_at = now + LOOK / 2
            self._look_for_lost(now)

    def _pack(self) -> None:
        """What is queued, as frames."""
        if sum(len(peer.out) for peer in self._peers) > 64 * len(self._peers):
            return  # they do not take what they have been given
        batch: list[Any] = []
        drops: list[int] | None = None
        while self.queue:
            each = self.queue.popleft()
            if each.__class__ is int:
                if drops is None:
                    drops = []
                    batch.append(["d", drops])
                drops.append(each)
                continue
            drops = None
            if each.__class__ is Data:
                self._send_batch(batch)
                batch = []
                self._send_parts(each)
                continue
            batch.append(each)
            if len(batch) >= BATCH:
                self._send_batch(batch)
                batch = []
        self._send_batch(batch)

    def _send_batch(self, batch: list[Any]) -> None:
        if not batch:
            return
        try:
            frame = memoryview(wire.pack(b"call", batch))
        except wire.WireError as error:  # too long as one
            half = len(batch) // 2
            for each in (batch[:half], batch[half:]) if half else ([refuse_call(batch[0], error.headline)],):
                self._send_batch(each)
            return
        for peer in self._peers:
            peer.out.append(frame)

    def _send_parts(self, data: Data) -> None:
        for peer, (shape, content) in zip(self._peers, data.parts, strict=True):
            header = {"id": data.number, "dtype": data.dtype, "shape": list(shape), "place": data.place}
            peer.out += (memoryview(wire.pack(b"data", header, content.nbytes)), content)

    def _flush(self, peer: _Peer) -> bool:
        """Send what the worker takes; whether all of it has gone."""
        while peer.out:
            view = peer.out[0]
            try:
                count = peer.socket.send(view) if view.nbytes else 0
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(peer, f"its connection ended: {error.strerror or error}", is_over=True) from None
            if count < view.nbytes:
                peer.out[0] = view[count:]
                continue
            peer.out.popleft()
        return True

    def _hear(self, peer: _Peer) -> None:
        frames = peer.receive()
        for kind, header, payload in frames or ():
            peer.status.heard = time.monotonic()
            if kind == b"tell":
                peer.status.done, peer.status.busy = header["done"], 0.0
                if self._is_waited_for:
                    with self._progress:
                        self._progress.notify_all()
            elif kind == b"beat":
                status = peer.status
                status.done, status.busy, status.memory = header["done"], float(header["busy"]), header["memory"]
                status.call, status.line = header["call"], header["line"]
            elif kind == b"give":
                self._take_answer(header, payload)
            elif kind == b"fail":
                self._take_failure(header)
        if frames is None and not self.is_closed:
            raise self._lost(peer, "it has ended", is_over=True)

    def _take_answer(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        reply = self._replies.get(header["request"])
        if reply is None:
            return  # whoever asked was interrupted
        reply.values.append((header["value"], payload))
        is_broken = isinstance(header["value"], dict) and "broken" in header["value"]
        if is_broken or len(reply.values) >= reply.wanted:
            reply.arrived.set()

    def _take_failure(self, facts: dict[str, Any]) -> None:
        """A command failed on a worker: the first who waits is told."""
        failed = self._failed.setdefault(facts["number"], _Failed(rebuild(facts), time.monotonic()))
        failed.workers.add(facts["worker"])
        if len(failed.workers) == self.workers:
            del self._failed[facts["number"]]
        if facts["number"] >= self._told and self.failure is None:
            self.failure = failed.error
            self._release()

    def _lost(self, peer: _Peer, how: str, is_over: bool = False) -> MeshloomError:
        call, line = peer.status.call, peer.status.line
        if not peer.status.busy:
            call, line = self._first_not_done(peer.status.done)
        if is_over:  # the cluster is: hung up on, the others end, and then the launcher tells who was first
            time.sleep(SEEN)
            for each in self._peers:
                each.socket.close()
        fate = (self._find_fate(peer.number) if is_over else None) or PeerLostError(how)
        return type(fate)(
            f"worker {peer.number} of {self.name} is lost: {fate.headline}",
            call=call.rpartition(":")[2] or None,
            where=line or None,
            output=fate.details.get("output"),
            fix="close the cluster and launch another; what lay on it is gone",
        )

    def _first_not_done(self, done: int) -> tuple[str, str]:
        """The call that a worker was at, or is to do next, from the log."""
        for number, name, line, *_ in list(self.log):
            if number > done:
                return name, line
        return "", ""

    def _look_for_lost(self, now: float) -> None:
        for peer in self._peers:
            silent = now - peer.status.heard
            if silent > max(self.timeout, 2 * BEAT):
                raise self._lost(peer, f"nothing was heard of it for {silent:.1f} s")
            if peer.status.busy > self.timeout:
                raise self._lost(peer, f"{peer.status.call.rpartition(':')[2]} runs for {peer.status.busy:.1f} s")
        for number, failed in list(self._failed.items()):
            others = [peer for peer in self._peers if peer.number not in failed.workers]
            if any(peer.status.done > number for peer in others) or now - failed.since > min(GRACE, self.timeout):
                who = ", ".join(str(each) for each in sorted(failed.workers))
                failed.error.details["broken"] = f"it failed on worker {who} only, so the workers no longer agree"
                raise failed.error.locate()

    def _break(self, error: MeshloomError) -> None:
        error.is_final = True  # type: ignore[attr-defined]
        self.failure = error
        self._release()

    def _release(self) -> None:
        """Let everybody look who waits."""
        for reply in list(self._replies.values()):
            if not reply.arrived.is_set():
                reply.values.append((_LOST, None))
                reply.arrived.set()
        with self._progress:
            self._progress.notify_all()


_LOST = object()
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for each in list(_SESSIONS):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def refuse_call(command: list[Any], why: str) -> list[Any]:
    """What stands for a call that cannot be sent: it fails on all workers, at its line."""
    if command[0] != "c":
        raise wire.WireError(why)
    _, name, _, _, results, line, _ = command
    return ["c", REFUSED + name.rpartition(":")[2], [why], 0, results, line, 0]


def rebuild(facts: dict[str, Any]) -> MeshloomError:
    """The error of a worker here: its class, its words, who and where."""
    kind = getattr(errors, facts["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, MeshloomError)
    name = facts["call"].partition(":")[2] or facts["call"]
    rest = facts["text"].partition("\n")[2]
    return (kind if is_ours else DeviceError)(  # type: ignore[misc]
        facts["headline"] if is_ours else f"{facts['error']}: {facts['headline']}",
        call=name,
        where=facts["line"] or None,
        worker=facts["worker"],
        details=rest or None,
    )
