"""Commands: what a queue is given. Each knows what it touches, runs once, and leaves a note of how it went."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

import torch

from meshloom.context import state
from meshloom.engines.private import disable_current_modes
from meshloom.errors import DeviceTimeoutError, where
from meshloom.mesh import Coordinate
from meshloom.runtime import transfers
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.events import MeshEvent
from meshloom.runtime.launches import GivenUp, UnderWay
from meshloom.runtime.program import Launch, places_of, total
from meshloom.runtime.races import Access
from meshloom.runtime.system import Failures, System

if TYPE_CHECKING:
    from meshloom.runtime.queue import MeshCommandQueue
    from meshloom.runtime.trace import Trace


_here = threading.local()


def running_here() -> Command | None:
    """The command that this thread is running, if it is a queue's."""
    return getattr(_here, "command", None)


class Note:
    """What a queue remembers of a command: enough for the story, nothing that keeps memory alive."""

    __slots__ = ("number", "status", "text", "where")

    def __init__(self, text: str, where: str) -> None:
        self.number, self.text, self.where, self.status = 0, text, where, "waiting"

    def __str__(self) -> str:
        return f"#{self.number} {self.text} at {self.where}: {self.status}"


class Command:
    """The root of all commands."""

    buffers: Sequence[MeshBuffer] = ()
    captured = ""  # why it cannot be captured; empty if it can

    def __init__(self, text: str) -> None:
        self.note = Note(text, where())
        self.queue: MeshCommandQueue | None = None

    @property
    def number(self) -> int:
        """Its place on its queue."""
        return self.note.number

    @property
    def text(self) -> str:
        """What it does, and where it was enqueued."""
        return f"{self.note.text} at {self.note.where}"

    def accesses(self) -> Iterable[Access]:
        """What it reads and writes."""
        return ()

    def is_ready(self) -> bool:
        """Whether it could go on without waiting for another queue."""
        return True

    def perform(self) -> None:
        """Run it, unless the queue has failed; what goes wrong is told to the queue."""
        assert self.queue is not None
        if self.queue.has_failed:
            self.note.status = "not run"
            self.skip()
            return
        self.note.status = "running"
        _here.command = self
        try:
            with disable_current_modes() if state.capture is not None else nullcontext():
                self.run(self.queue.id)
        except GivenUp:
            return
        except BaseException as error:  # this is a thread of ours: nobody else would hear of it
            self.note.status = "failed"
            self.queue.fail(self, error)
            self.skip()
        else:
            self.note.status = "done"
        finally:
            _here.command = None

    def run(self, queue: int) -> None:
        """Do it."""
        raise NotImplementedError

    def skip(self) -> None:
        """It will not be done."""


def _access(buffer: MeshBuffer, places: Iterable[Coordinate], writes: bool) -> Access:
    return Access(buffer.region, buffer.name, buffer.cards(places), writes)


def _places_of(buffer: MeshBuffer) -> list[Coordinate]:
    return [place for place in buffer.device.coordinates() if buffer.layout.part(place) is not None]


class Transfer(Command):
    """Data to or from cards. One that does not answer in time may still be at it: it gets no more work, and nobody its
    memory."""

    def run(self, queue: int) -> None:
        try:
            self.move(queue)
        except Failures as error:
            late = [place for place, each in error.found if isinstance(each, DeviceTimeoutError)]
            self.buffers[0].device.leave(late, self.buffers, f"{self.text} did not end in time")
            raise

    def move(self, queue: int) -> None:
        """Do it."""
        raise NotImplementedError


class _HostTransfer(Transfer):
    """Between the host and a buffer: all of it, or the part at one coordinate."""

    verb: ClassVar[str]

    def __init__(self, buffer: MeshBuffer, place: Coordinate | None, index: object) -> None:
        super().__init__(f"{self.verb} {buffer.name}" + ("" if place is None else f" at {place}"))
        self.buffers = (buffer,)
        self._place, self._index = place, index

    def accesses(self) -> Iterable[Access]:
        (buffer,) = self.buffers
        places = _places_of(buffer) if self._place is None else (self._place,)
        return (_access(buffer, places, self.verb == "write"),)


class Write(_HostTransfer):
    """Host data into a buffer."""

    verb, captured = "write", "writes from the host are not captured"

    def __init__(self, buffer: MeshBuffer, value: torch.Tensor, place: Coordinate | None, index: object) -> None:
        super().__init__(buffer, place, index)
        self._value = value

    def move(self, queue: int) -> None:
        (buffer,) = self.buffers
        if self._place is None:
            transfers.write_all(buffer, self._value, queue)
        else:
            transfers.write_at(buffer, self._place, self._value, self._index, queue)


class Read(_HostTransfer):
    """A buffer to the host."""

    verb, captured = "read", "reads to the host are not captured"

    def __init__(self, buffer: MeshBuffer, place: Coordinate | None, index: object, out: torch.Tensor | None) -> None:
        super().__init__(buffer, place, index)
        self._out = out
        self.result: torch.Tensor | None = None
        self._is_gathered = False

    def move(self, queue: int) -> None:
        (buffer,) = self.buffers
        if self._place is None:
            found = transfers.read_all(buffer, queue)
        else:
            found = transfers.read_at(buffer, self._place, self._index, queue)
        self.result = found if self._out is None or buffer.device.mesh.is_split else self._out.copy_(found)

    def gather(self) -> torch.Tensor | None:
        """The result, with what other processes have of it; called once, where the program waits for it."""
        (buffer,) = self.buffers
        if self.result is None or self._is_gathered or not buffer.device.mesh.is_split:
            return self.result
        found = transfers.gather_whole(buffer, self.result, self._place)
        self.result, self._is_gathered = found if self._out is None else self._out.copy_(found), True
        return self.result


class Run(Command):
    """A workload: every program on its range."""

    def __init__(self, name: str, launches: Sequence[Launch], system: System) -> None:
        super().__init__(f"workload {name}")
        self.launches, self._system = launches, system
        self.buffers = tuple(dict.fromkeys(buffer for launch in launches for buffer in launch.program.buffers))

    def accesses(self) -> Iterable[Access]:
        for launch in self.launches:
            program, places = launch.program, list(launch.where.places())
            for buffer in dict.fromkeys((*program.reads, *program.updates)):
                yield _access(buffer, places, False)
            for buffer in dict.fromkeys((*program.writes, *program.updates)):
                yield _access(buffer, places, True)

    def run(self, queue: int) -> None:
        system, left = self._system, []
        for launch in self.launches:
            if launch.here is None:
                launch.prepare_elsewhere()
            elif self._launch_all(launch):
                system.tell("launch", launch.here.places(), 0, queue, total([launch]))
            else:
                launch.prepare(system, per_card=True)
                left.append(launch)
        if left:
            self._launch_each(left, queue)

    def _launch_all(self, launch: Launch) -> bool:
        """Run a kernel once for all devices of its range; False if it must run on each."""
        under_way = self._begin(launch.here or launch.where)
        try:
            launch.prepare(self._system, per_card=False)
            function = launch.block_function(self._system)  # tries the kernel on shapes
            if function is not None:
                launch.run_on_block(function)
        finally:
            self._system.launches.end(under_way)
        return function is not None

    def _begin(self, places: Collection[Coordinate]) -> UnderWay:
        """A kernel starts, for the command that this thread is running: this one, or the replay that it is part of."""
        return self._system.launches.begin(running_here() or self, places)

    def _launch_each(self, launches: Sequence[Launch], queue: int) -> None:
        """Start all of them in row-major order, then wait for all: one that fails does not stop the others."""
        assert self.queue is not None
        device, system = self.queue.device, self._system
        tickets, failed = [], []
        for place, launch in places_of(launches):
            card = device.card(place)
            under_way = self._begin((place,))
            try:
                handles = [buffer.storage.at(place) for buffer in launch.program.buffers]
                before = getattr(card, "host_bytes", 0)
                ticket = card.launch(launch.program.load(card, system), handles, launch.args_at(place))
                tickets.append((place, card, ticket))
                system.counts["host_bytes"] += getattr(card, "host_bytes", 0) - before  # a kernel that ran on the host
            except BaseException as error:
                failed.append((place, error))
            system.launches.end(under_way)
            system.tell("launch", [place], 0, queue, 1)
        timeout = system.launches.timeout
        end = None if timeout is None else time.monotonic() + timeout
        for place, card, ticket in tickets:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                if not card.wait(ticket, left):
                    late = f"did not end within {timeout:g} s"
                    is_over = device.leave((place,), self.buffers, f"{self.text} {late}")
                    failed.append((place, DeviceTimeoutError(late + (", and was ended" if is_over else ""))))
            except BaseException as error:
                failed.append((place, error))
        if failed:
            raise Failures(sorted(failed, key=lambda pair: pair[0]))


class Record(Command):
    """An event comes about."""

    captured = "events are not captured"

    def __init__(self, event: MeshEvent) -> None:
        super().__init__(f"record event {event.id}")
        self._event = event

    def run(self, queue: int) -> None:
        self._event.happen()

    def skip(self) -> None:
        self._event.happen(failed=True)


class Wait(Command):
    """The queue waits for another's event."""

    captured = "events are not captured"

    def __init__(self, event: MeshEvent) -> None:
        super().__init__(f"wait for event {event.id}")
        self._event = event

    def is_ready(self) -> bool:
        return self._event.is_done

    def run(self, queue: int) -> None:
        self._event.wait()
        if self._event.failed:
            raise RuntimeError(f"event {self._event.id} of queue {self._event.queue.id} failed")


class Replay(Command):
    """All of a trace."""

    captured = "a trace cannot be captured into another"

    def __init__(self, trace: Trace) -> None:
        super().__init__(f"replay trace {trace.id}")
        self.buffers = trace.buffers
        self._trace = trace

    def accesses(self) -> Iterable[Access]:
        return self._trace.accesses()

    def run(self, queue: int) -> None:
        self._trace.run(queue)
