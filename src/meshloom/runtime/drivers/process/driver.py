"""Virtual cards in processes of their own, and the driver that opens them.

A card is its owner's end of three things: a process, a line to it, and memory that both have mapped. Writes and reads
are copies to and from that memory; they wait for launches that use the same piece, and for no others. A launch is a
message, and so is its end. When the process ends, be it by a crash or by the system, the card is *lost*: what is under
way on it fails with how it ended, and so does what comes after, until `reset` gives it another process. Its memory
stays.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from meshloom.errors import ArgumentError, DeviceError, expect
from meshloom.runtime.card import Kernel, Part
from meshloom.runtime.chips import HOST, Chip
from meshloom.runtime.drivers.process import arena, life
from meshloom.runtime.drivers.process.moves import duplicate, put, take
from meshloom.runtime.drivers.process.op_kernels import kernel_of
from meshloom.runtime.drivers.process.pickling import dump_arguments, dump_kernel
from meshloom.runtime.drivers.process.worker import Array, Bytes, Ended, Launch, Load, Settings
from meshloom.runtime.virtual import SLOT_SIZE, SLOTS, ImitatedCard, ImitatedDriver
from meshloom.types import Shape

SENDING = 60.0  # seconds that a card may take to take a message
MAIL = 1 << 36  # bytes for the slots of all links, of which only those are there that are used
LONGEST = 1 << 14  # bytes that go in a message
RESET = "card.reset() gives it another process; its memory stays as it is"
_numbers = count()


class Memory:
    """The handle of some memory of a card."""

    __slots__ = ("_arena", "dtype", "piece", "shape", "view")

    def __init__(self, place: arena.Arena, shape: Shape, dtype: torch.dtype) -> None:
        self._arena, self.shape, self.dtype = place, tuple(shape), dtype
        piece = place.take(math.prod(self.shape) * dtype.itemsize)
        self.piece: arena.Piece | None = piece  # None when it was freed
        self.view = arena.view(place.bytes, piece.start, self.shape, dtype)

    def check(self, place: arena.Arena) -> arena.Piece:
        """The piece, or an error if it was freed, or is of another card."""
        if self.piece is None:
            raise DeviceError("the memory has been freed", fix="keep the buffer until its last use")
        if self._arena is not place:
            raise DeviceError("the memory is of another card", fix="use the handle of this one: buffer.handle(place)")
        return self.piece


class Loaded:
    """A kernel that a card can launch. It is sent to the process of the card before its first launch there."""

    def __init__(self, name: str, message: bytes, drop: Callable[[int], None]) -> None:
        self.name, self.message, self._drop = name, message, drop
        self.number = next(_numbers)

    def __del__(self) -> None:
        self._drop(self.number)  # only makes a note: this may run anywhere


class Ticket:
    """A launch: what it uses, and how it ended."""

    __slots__ = ("error", "is_done", "name", "number", "pieces")

    def __init__(self, name: str, pieces: tuple[arena.Piece, ...]) -> None:
        self.name, self.pieces, self.number = name, pieces, next(_numbers)
        self.is_done = False
        self.error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        """It has ended; what it used may go."""
        self.error, self.is_done, self.pieces = error, True, ()


class ProcessCard(ImitatedCard):
    """A virtual card in a process of its own.

    >>> card = ProcessDriver().open(0)
    >>> memory = card.alloc(0, (2,), torch.float32)
    >>> card.write(memory, torch.tensor([1.0, 2.0]))
    >>> double = card.load(card.driver.compile(lambda x: x.mul_(2)), lambda x: x.mul_(2))
    >>> card.wait(card.launch(double, [memory], {}), timeout=60.0), card.read(memory)
    (True, tensor([2., 4.]))
    >>> card.close()
    """

    _driver: ProcessDriver

    def __init__(self, driver: ProcessDriver, index: int) -> None:
        super().__init__(driver, index)
        self._owner = os.getpid()
        self._arena = arena.Arena(arena.size_for(driver.chip), f"card-{index}")
        self._changed = threading.Condition()
        self._polled: life.Life | None = None
        self._flying: dict[int, Ticket] = {}
        self._unused: deque[int] = deque()
        self._loaded: dict[Kernel, Loaded] = {}
        self._lost = self._ending = ""  # why, once it is
        self._start()

    @property
    def driver(self) -> ProcessDriver:
        """What opened it."""
        return self._driver

    @property
    def pid(self) -> int:
        """The process that it is."""
        return self._life.pid

    # memory

    def alloc(self, address: int, shape: Shape, dtype: torch.dtype) -> Memory:
        self._check_usable()
        return Memory(self._arena, shape, dtype)

    def free(self, handle: Memory) -> None:
        """The memory goes when no launch uses it any more."""
        handle.piece = None

    def write(self, handle: Memory, data: torch.Tensor, index: Any = ...) -> None:
        self._begin("write")
        self._settle(handle)
        handle.view[index] = data

    def read(self, handle: Memory, index: Any = ...) -> torch.Tensor:
        self._begin("read")
        self._settle(handle)
        return handle.view[index].clone()

    def _settle(self, handle: Memory) -> None:
        """Wait for the launches that use some memory."""
        piece = handle.check(self._arena)
        for ticket in [each for each in tuple(self._flying.values()) if piece in each.pieces]:
            self._wait(ticket, None)
        self._check_usable()

    # kernels

    def load(self, binary: bytes, kernel: Kernel) -> Loaded:
        return Loaded(kernel.__name__, dump_kernel(binary, kernel), self._unused.append)

    def launch(self, loaded: Loaded, handles: Sequence[Memory], args: Mapping[str, object]) -> Ticket:
        return self._start_kernel("launch", loaded, handles, args)

    def _start_kernel(
        self,
        command: str,
        loaded: Loaded,
        handles: Sequence[Memory],
        args: Mapping[str, object],
        beside: tuple[Array, ...] = (),
    ) -> Ticket:
        """Let the process run a kernel on memory, and on arrays beside it."""
        self._check_alive()
        fault = self._fault_in(command)
        pieces = tuple(handle.check(self._arena) for handle in handles)
        arguments, kept = self._pass_on(dump_arguments(loaded.name, args))
        ticket = Ticket(loaded.name, (*pieces, *kept))
        arrays = tuple(Array(0, p.start, h.shape, h.dtype) for p, h in zip(pieces, handles, strict=True))
        with self._changed:
            self._check_usable()
            if loaded.number not in self._known:
                message, kept = self._pass_on(loaded.message)
                ticket.pieces += kept  # the process has taken it before this launch ends
                self._send(Load(loaded.number, message))
                self._known.add(loaded.number)
            unused = tuple(self._unused.popleft() for _ in range(len(self._unused)))
            seconds = self._delays.get(command, 0.0)
            self._flying[ticket.number] = ticket
            self._send(Launch(ticket.number, loaded.number, arrays + beside, arguments, seconds, fault, unused))
        return ticket

    def _pass_on(self, data: bytes) -> tuple[Bytes, tuple[arena.Piece, ...]]:
        """What a message says of some bytes, and memory to keep: long ones go beside it, so that it gets through."""
        if len(data) <= LONGEST:
            return data, ()
        piece = self._arena.put(data)
        return (piece.start, piece.start + len(data)), (piece,)

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        if not self._wait(ticket, timeout):
            return False
        if ticket.error is not None:
            raise ticket.error
        return True

    def _send(self, message: Load | Launch) -> None:
        """Send a message; whatever keeps it from going loses the card, since half of it may have gone."""
        try:
            self._life.frames.send(pickle.dumps(message), SENDING)
        except EOFError:
            self._lose()
            raise self._lost_error() from None
        except BaseException as error:
            self._lose(f"a message to it did not go: {type(error).__name__}: {error}")
            raise

    def _wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait until a launch has ended. One of those who wait listens to the line, for all of them."""
        self._check_owner()
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._take_in()
                if ticket.is_done:
                    return True
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._polled is not None:
                    self._changed.wait(left)
                else:
                    self._poll(left)

    def _poll(self, timeout: float | None) -> None:
        """Let others have the card while this thread waits for its process to say something, or to end."""
        life = self._polled = self._life
        self._changed.release()
        try:
            life.poll(timeout)
        finally:
            self._changed.acquire()
            self._polled = None
            if life.is_over:
                life.close()
            self._changed.notify_all()

    def _take_in(self) -> None:
        """Take what the process has said; or find that it has ended."""
        if self._lost or self.closed:
            return
        try:
            while (message := self._life.frames.pop()) is not None:
                self._note(pickle.loads(message))
        except EOFError:
            self._lose()

    def _note(self, ended: Ended) -> None:
        ticket = self._flying.pop(ended.ticket, None)
        if ticket is not None:
            ticket.end(_error_of(ended, self._index))
            self._wake()

    def _wake(self) -> None:
        """Let all who wait look: who polls might not hear of what another thread has taken in."""
        self._changed.notify_all()
        if self._polled is not None:
            self._polled.wake()

    # links: every card has one to every other of its driver

    def peers(self) -> Sequence[int]:
        return [index for index in self._driver.opened if index != self._index]

    def slots(self, peer: int) -> tuple[int, int]:
        return SLOTS, SLOT_SIZE

    def send(self, handle: Memory, index: Any, start: int, stop: int, peer: int, slot: int) -> Ticket:
        place = self._slot(self._index, peer, slot, stop - start, handle.dtype)
        return self._start_kernel("send", self._own(put), [handle], _range(index, start, stop), (place,))

    def receive(
        self, handle: Memory, index: Any, start: int, stop: int, peer: int, slot: int, op: str | None
    ) -> Ticket:
        place = self._slot(peer, self._index, slot, stop - start, handle.dtype)
        args = {**_range(index, start, stop), "op": op}
        return self._start_kernel("receive", self._own(take), [handle], args, (place,))

    def copy(self, source: Memory, source_index: Any, target: Memory, target_index: Any) -> Ticket:
        args = {"source_index": source_index, "target_index": target_index}
        return self._start_kernel("launch", self._own(duplicate), [source, target], args)

    def _slot(self, source: int, destination: int, slot: int, elements: int, dtype: torch.dtype) -> Array:
        """A slot of a link, as much of it as a message takes."""
        if not 0 <= slot < SLOTS or elements * dtype.itemsize > SLOT_SIZE:
            raise DeviceError(
                f"{elements} elements of {dtype} do not fit into slot {slot} from card {source} to card {destination}",
                slots=f"{SLOTS} of {SLOT_SIZE} bytes",
            )
        piece = self._driver.mailbox(source, destination)
        return Array(1, piece.start + slot * SLOT_SIZE, (elements,), dtype)

    def _own(self, kernel: Kernel) -> Loaded:
        """A kernel of ours, loaded once."""
        if kernel not in self._loaded:
            self._loaded[kernel] = self.load(self._driver.compile(kernel), kernel)
        return self._loaded[kernel]

    # when it is lost

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended; `reset` gives it another one."""
        self._hear()
        return bool(self._lost)

    def end(self, reason: str) -> None:
        """End its process, whatever it is doing: the card is lost, for this reason."""
        self._check_owner()
        self._ending = self._ending or reason
        self._life.kill()  # before the lock, which somebody may hold who waits for the process
        with self._changed:
            if not (self._lost or self.closed):
                self._lose()

    def _lose(self, reason: str | None = None) -> None:
        """The process has ended, or has to: everything under way fails with the reason."""
        told = self._ending or reason or f"its process {self._life.fate()}"
        self._life.end()
        self._lost = told
        if self._polled is not self._life:  # who polls lets go of it
            self._life.close()
        for ticket in self._flying.values():
            ticket.end(DeviceError(f"card {self._index} was lost in a launch of {ticket.name}: {told}", fix=RESET))
        self._flying.clear()
        self._wake()

    def _lost_error(self) -> DeviceError:
        return DeviceError(f"card {self._index} is lost: {self._lost}", fix=RESET)

    def _check_usable(self) -> None:
        self._check_owner()
        self._check_open()
        if self._lost:
            raise self._lost_error()

    def _check_alive(self) -> None:
        """An error if the card cannot be used; looks whether its process is still there."""
        self._check_owner()
        with self._changed:
            self._check_usable()
            if self._life.has_news():
                self._take_in()
                self._check_usable()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise DeviceError(
                f"card {self._index} was opened by process {self._owner}, and process {os.getpid()} was forked from it",
                fix="open a mesh device in the child, or start it by multiprocessing.get_context('spawn')",
            )

    def _begin(self, command: str) -> None:
        """Wait as long as a write or a read is to take, or fail as it is to fail."""
        self._check_alive()
        fault = self._fault_in(command)
        if fault:
            self.end(f"it {'was killed' if fault == 'kill' else 'did not answer'} in a {command}")
            raise self._lost_error()
        if self._delays.get(command):
            time.sleep(self._delays[command])

    def _fault_in(self, command: str) -> str:
        """What is to go wrong in a command beside an error, which is raised here; empty if nothing is."""
        for fault in self._faults:
            if fault.on == command and fault.strikes():
                if fault.kind != "raise":
                    return fault.kind
                raise DeviceError(f"card {self._index} failed in a {command}")
        return ""

    # the end

    @property
    def is_busy(self) -> bool:
        """Whether a launch is under way on it."""
        self._hear()
        return bool(self._flying)

    def _hear(self) -> None:
        """Take in what its process has said by now."""
        self._check_owner()
        with self._changed:
            self._take_in()

    def reset(self) -> None:
        """A card as new, in another process: no faults, no delays, nothing running. Its memory stays."""
        self._check_owner()
        self.recover()
        if not self.closed:
            self.end("it was reset")
            self._start()

    def _start(self) -> None:
        driver = self._driver
        arenas = (self._arena, driver.mail)
        sizes = [each.size for each in arenas]
        path, folder = list(map(str, sys.path)), os.getcwd()
        settings = Settings(self._index, sizes, driver.threads, driver.memory_limit, path, folder)
        self._life = life.start(arenas, self._index, settings._asdict())
        self._known: set[int] = set()
        self._lost = self._ending = ""

    def close(self) -> None:
        if self.closed or os.getpid() != self._owner:
            return
        self.end("it was closed")
        self.closed = True
        self._arena.close()
        self.recover()


def _error_of(ended: Ended, index: int) -> BaseException | None:
    """What a kernel raised, with the traceback of its process as the cause."""
    if ended.error is None:
        return None
    told = DeviceError(f"{ended.told}, on card {index}", there=ended.traceback)
    try:
        error = pickle.loads(ended.error)
    except Exception:  # an error of a class that only the other process knows
        return told
    if not isinstance(error, BaseException):
        return told
    error.__cause__ = told
    return error


def _range(index: Any, start: int, stop: int) -> dict[str, Any]:
    return {"index": index, "start": start, "stop": stop}


class ProcessDriver(ImitatedDriver):
    """Virtual cards that are processes: as many as you ask for, or exactly those of some ids.

    Each computes with `threads` threads. With `memory_limit`, kernels that take more than so many bytes beside
    the buffers of their card get an error.
    """

    name = "process"
    shares_memory = False

    def __init__(
        self,
        ids: Sequence[int] | None = None,
        chip: Chip = HOST,
        *,
        threads: int = 1,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(ids, chip)
        expect("threads", threads, int, fix="give the number of threads of a card, such as 1")
        if threads < 1:
            raise ArgumentError(f"threads={threads}", fix="give 1 or more")
        if memory_limit is not None:
            expect("memory_limit", memory_limit, int, fix="give bytes, or None for no limit")
            if memory_limit < 1:
                raise ArgumentError(f"memory_limit={memory_limit}", fix="give bytes, or None for no limit")
        self.threads, self.memory_limit = threads, memory_limit
        self.mail = arena.Arena(MAIL, "links")
        self._mailboxes: dict[tuple[int, int], arena.Piece] = {}

    def open(self, index: int) -> ProcessCard:
        """The card of that id, in a process that is running when this returns."""
        self.admit(index)
        return ProcessCard(self, index)

    def kernel_of(self, op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> Kernel | None:
        """The kernel of an op, which torch runs on the cards."""
        return kernel_of(op, operands, result, args)

    def mailbox(self, source: int, destination: int) -> arena.Piece:
        """The slots of the link from one card to another."""
        found = self._mailboxes.get((source, destination))
        return found or self._mailboxes.setdefault((source, destination), self.mail.take(SLOTS * SLOT_SIZE))

    def is_plain(self) -> bool:
        """Whether one array call may stand for all cards: never, since each has memory of its own."""
        return False
