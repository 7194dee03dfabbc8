"""Command queues: each in order, none waiting for another but by events. Errors are collected and told once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshloom.comms import WORLD, group_of, wire
from meshloom.errors import (
    ArgumentError,
    DeviceError,
    DeviceTimeoutError,
    MeshError,
    MeshloomError,
    RaceError,
    expect,
    expect_seconds,
    where,
)
from meshloom.runtime import transfers
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.commands import Command, Note, Read, Record, Replay, Run, Wait, Write, running_here
from meshloom.runtime.events import MeshEvent
from meshloom.runtime.geometry import MeshCoordinateRange
from meshloom.runtime.launches import UnderWay
from meshloom.runtime.system import Failures
from meshloom.runtime.workload import MeshWorkload

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice
    from meshloom.runtime.trace import Capture, Trace

STORY = 12  # commands that an error tells of
GIVEN_UP = "given up"
LOST = (
    "a lost card takes no further work: close the mesh device and open it again, with a longer timeout= if it needs one"
)


class Pending:
    """A read under way: `result()` waits for it."""

    def __init__(self, queue: MeshCommandQueue, command: Read) -> None:
        self._queue, self._command = queue, command

    def done(self) -> bool:
        """Whether the result is there; never waits."""
        self._queue.runner.some()
        return self._command.result is not None

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """What was read; errors of the queue are raised here."""
        self._queue.settle(self._command.number, timeout)
        found = self._command.gather()
        if found is None:
            raise DeviceError(f"{self._command.text} was not run", fix="see the error that the queue raised before")
        return found


class MeshCommandQueue:
    """A queue of commands for all devices of a mesh, run in order by a worker of its own."""

    def __init__(self, device: MeshDevice, cq_id: int) -> None:
        self.device, self.cq_id, self.system = device, cq_id, device.system
        self.id = device.system.next_queue()
        self.runner = self.system.runner(f"meshloom-queue-{device.id}-{cq_id}")
        self.capture: Capture | None = None
        self._story: deque[Note] = deque(maxlen=STORY)
        self._failures: list[tuple[Note, BaseException]] = []
        self._lock = threading.Lock()
        self._last = 0

    def enqueue_write(
        self,
        buffer: MeshBuffer,
        data: object,
        *,
        coordinate: Sequence[int] | None = None,
        index: object = ...,
        blocking: bool = False,
    ) -> None:
        """Write host data: all of the buffer, or one coordinate's part, or the piece of it that an index names."""
        self.device.check_buffer(buffer)
        place = None if coordinate is None else self.device.mesh.check(coordinate)
        self._check_index(place, index)
        shape = buffer.shape if place is None else transfers.part_shape(buffer, index)
        self._check_held(buffer, place)
        if self.capture is not None:
            raise self.capture.refuse(Write.captured)
        value = transfers.host_value(data, shape, buffer.dtype, buffer.name)
        self.submit(Write(buffer, value, place, index), blocking)

    def enqueue_read(
        self,
        buffer: MeshBuffer,
        *,
        coordinate: Sequence[int] | None = None,
        index: object = ...,
        out: torch.Tensor | None = None,
        blocking: bool = True,
    ) -> Any:
        """Read all of the buffer, or one coordinate's part, or a piece of it: the values, or a `Pending` for them."""
        self.device.check_buffer(buffer)
        place = None if coordinate is None else self.device.mesh.check(coordinate)
        self._check_index(place, index)
        transfers.part_shape(buffer, index)
        self._check_held(buffer, place)
        command = Read(buffer, place, index, out)
        self.submit(command, blocking)
        return command.gather() if blocking else Pending(self, command)

    def enqueue_workload(self, workload: MeshWorkload, *, blocking: bool = False) -> None:
        """Launch every program of a workload on its range."""
        expect(
            "workload", workload, MeshWorkload, fix="workload = MeshWorkload(); workload.add_program(range, program)"
        )
        self.device.check_open()
        self.submit(Run(workload.name, workload.launches(self.device), self.system), blocking)

    def enqueue_trace(self, trace: Trace, *, blocking: bool = False) -> None:
        """Replay a trace on this queue."""
        if not hasattr(trace, "replay"):
            raise ArgumentError(f"trace={trace!r} is no trace", fix="give what begin_trace_capture returned")
        trace.check(self.device)
        self.submit(Replay(trace), blocking)

    def record_event(self, device_range: MeshCoordinateRange | None = None) -> MeshEvent:
        """An event that comes about when all that was enqueued so far is done; for `device_range`."""
        self._refuse_in_capture(Record.captured)
        with self._lock:
            clock = None if self.system.races is None else self.system.races.note_event(self.id)
        event = MeshEvent(self, where(), clock, device_range)
        command = Record(event)
        self.submit(command, False)
        event.number = command.number
        return event

    def wait_for_event(self, event: MeshEvent) -> None:
        """Let what is enqueued from now on wait for an event of another queue."""
        self._refuse_in_capture(Wait.captured)
        expect("event", event, MeshEvent, fix="give what record_event() of another queue returned")
        if event.queue.system is not self.system:
            raise MeshError("the event is of another mesh", fix="wait for it on the host: event.synchronize()")
        if self.system.races is not None:
            self.system.races.note_wait(self.id, event.clock)
        self.submit(Wait(event), False)

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all that was enqueued, on all processes that split the mesh; errors are raised here, all at once."""
        self._finish_here(timeout)
        mesh = self.device.mesh
        group = group_of(mesh, range(mesh.ndim)) if mesh.is_split else None
        if group is not None:
            WORLD.watch.begin(f"finish of queue {self.cq_id}", mesh)
            wire.barrier(group)

    def _finish_here(self, timeout: float | None = None) -> None:
        """Wait for all that was enqueued on the devices of this process."""
        self.settle(self._last, timeout)
        if self.system.races is not None:
            self.system.races.note_finish(self.id)

    # inside

    def _runs_here(self) -> bool:
        """Whether this is the thread that runs the queue's commands."""
        running = running_here()
        return running is not None and running.queue is self

    def submit(self, command: Command, blocking: bool) -> None:
        """Take a command: check it, number it, hand it to the worker (or to the trace being captured)."""
        self.device.check_open()
        self.system.launches.check_process()
        if self.system.launches.lost:
            self.system.launches.check_cards(card for access in command.accesses() for card in access.cards)
        if self.capture is not None:
            self.capture.add(command, blocking)
            return
        with self._lock:
            if self.system.races is not None:
                self.system.races.note_command(self.id, command.text, command.accesses())
            self._last += 1
            command.queue, command.note.number = self, self._last
            self._story.append(command.note)
            for buffer in command.buffers:
                buffer.note_use(self, self._last)
            self.runner.submit(command)
        self.runner.some()
        if blocking:
            self._finish_here()
        elif self.runner.waits and not self._runs_here():
            self.wait(command.number)

    def wait(self, number: int, timeout: float | None = None) -> None:
        """Wait for a command; errors stay for later."""
        expect_seconds("timeout", timeout)
        if self._runs_here():
            raise RaceError(
                f"a kernel waits for queue {self.cq_id}, on which it runs itself: neither would ever end",
                kernel=running_here(),
                fix="wait outside of the kernel, after it was enqueued",
            )
        if not self.runner.wait(number, timeout):
            running = next((note for note in self._story if note.status == "running"), None)
            raise DeviceTimeoutError(
                f"queue {self.cq_id} did not end within {timeout} s",
                running=running,
                story=self.story(),
                fix="give it more time, or look at what is running",
            )

    def settle(self, number: int, timeout: float | None = None) -> None:
        """Wait for a command and raise what went wrong up to it."""
        self.wait(number, timeout)
        if self._failures:
            self.wait(self._last, timeout)
            raise self._take_error()

    @property
    def has_failed(self) -> bool:
        """Whether a command failed and nobody has been told yet."""
        return bool(self._failures)

    def fail(self, command: Command, error: BaseException) -> None:
        """A command failed: what follows is not run until somebody has been told."""
        self._failures.append((command.note, error))

    def give_up(self, launch: UnderWay) -> None:
        """A launch takes too long: it is left to itself, its cards are lost, and what is behind it is not run."""
        note, late = launch.command.note, f"did not end within {self.system.launches.timeout:g} s"
        note.status = GIVEN_UP
        places = [tuple(place) for place in launch.places]
        self.device.leave(places, launch.command.buffers, f"{note.text} at {note.where} {late}")
        found = [(place, DeviceTimeoutError(late)) for place in places]
        with self._lock:
            self._failures.append((note, Failures(found)))
            left = self.runner.abandon(self._last)
        for command in left:
            command.perform()  # the queue has failed: it is not run

    def story(self) -> str:
        """The last commands and how they went."""
        return "\n".join(str(note) for note in self._story)

    def forget(self) -> MeshloomError | None:
        """The error that nobody has been told of, taken away."""
        return self._take_error() if self._failures else None

    def _take_error(self) -> MeshloomError:
        failures, self._failures = self._failures, []
        note, error = failures[0]
        found = error.found if isinstance(error, Failures) else [(None, error)]
        kind = DeviceTimeoutError if isinstance(error, Failures) and error.timed_out else DeviceError
        size = self.device.num_devices
        many = f"{len(found)} of {size} devices" if isinstance(error, Failures) else "the host"
        made = kind(
            f"{note.text} at {note.where} failed on {many}",
            inside=getattr(error, "step", None),
            queue=f"{self.cq_id} of {self.device}",
            devices="\n".join(_error_line(place, each) for place, each in found),
            story=self.story(),
            fix=LOST
            if note.status == GIVEN_UP
            else "the queue is clear again; what was not run must be enqueued again",
        )
        made.__cause__ = found[0][1]
        return made

    def _refuse_in_capture(self, reason: str) -> None:
        if self.capture is not None:
            raise self.capture.refuse(reason)

    def _check_held(self, buffer: MeshBuffer, place: Any) -> None:
        if place is not None and buffer.layout.part(place) is None:
            raise MeshError(f"{buffer.name} has no shard at {place}", buffer=buffer)

    def _check_index(self, place: object, index: object) -> None:
        if place is None and index is not ...:
            raise MeshError("index= names a piece of one device's part", fix="give coordinate= as well")

    def __repr__(self) -> str:
        return f"MeshCommandQueue({self.cq_id} of {self.device})"


def _error_line(place: object, error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"{place if place is not None else '-'}: {type(error).__name__}: {first}"
