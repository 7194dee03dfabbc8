"""Traces: commands and tensor ops captured once and replayed many times, at the same addresses.

While a capture is open, nothing runs: commands for its queue and tensor ops of its thread are written down, and their
results are allocated. A replay reads the inputs as they are then and writes the results where they were. What a live
trace uses keeps its memory until the trace is released, whoever else lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from meshloom.context import state
from meshloom.errors import ClosedError, MeshError, TraceError, where
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.commands import Command
from meshloom.runtime.races import Access
from meshloom.runtime.recorder import Recorder, Step, replayable
from meshloom.runtime.reuse import Reuse

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice
    from meshloom.runtime.queue import MeshCommandQueue

_ids = count()


class Trace:
    """What was captured, ready to be replayed."""

    def __init__(self, device: MeshDevice | None) -> None:
        self.id = next(_ids)
        self.device, self.where = device, where()
        self.buffers: tuple[MeshBuffer, ...] = ()
        self.commands: list[Command] = []
        self.used: list[list[Access]] = []  # what tensor ops read and write, an op each
        self.released = False
        self._calls: list[Callable[[], Any]] = []
        self._kept: list[Any] = []

    def __len__(self) -> int:
        """How many calls a replay makes."""
        return len(self._calls)

    def replay(self) -> None:
        """Run all of it once; returns when it is done. Tensor ops run here, commands on the queue they came from."""
        self.check(self.device)
        if self.commands:
            queue = self.commands[0].queue
            assert queue is not None
            queue.enqueue_trace(self, blocking=True)
            return
        with torch.no_grad():
            for call in self._calls:
                call()

    def release(self) -> None:
        """Let its memory go; a second time does nothing."""
        self.released = True
        self._calls, self._kept, self.commands = [], [], []
        if self.device is not None:
            self.device.let_go(self.id)
        self.buffers = ()

    def check(self, device: MeshDevice | None) -> None:
        """An error if it cannot be replayed there."""
        if self.released:
            raise ClosedError(f"trace {self.id} has been released", captured=self.where, fix="capture another")
        if state.capture is not None and state.capture.trace is self:
            raise TraceError(f"trace {self.id} is still being captured", fix="end the capture first")
        if self.device is not None and device is not self.device:
            raise MeshError(f"trace {self.id} belongs to {self.device}", asked=device)

    # inside

    def run(self, queue: int) -> None:
        """Every call in order, on whatever thread this is."""
        with torch.no_grad():
            for call in self._calls:
                try:
                    call()
                except Exception as error:
                    error.step = getattr(getattr(call, "__self__", None), "text", None)  # type: ignore[attr-defined]
                    raise

    def accesses(self) -> Iterable[Access]:
        """What a replay reads before it writes it, and what it writes."""
        written: set[tuple[int, int]] = set()
        for step in (*(list(command.accesses()) for command in self.commands), *self.used):
            for access in step:
                if not access.writes:
                    number = access.region.number
                    open_ = {c: p for c, p in access.cards.items() if (number, c) not in written}
                    if open_:
                        yield access._replace(cards=open_)
            for access in step:
                if access.writes:
                    written.update((access.region.number, card) for card in access.cards)
                    yield access

    def __repr__(self) -> str:
        return f"Trace({self.id}: {len(self)} calls, captured at {self.where})"


class Capture:
    """A trace in the making."""

    def __init__(self, trace: Trace, queue: MeshCommandQueue | None) -> None:
        self.trace, self.queue = trace, queue
        self._steps: list[Step | Command] = []
        self._recorder = Recorder(self._steps.append)
        self._wrappers: list[Any] = []
        self._at_end: list[Callable[[Trace], None]] = []
        if state.capture is not None:
            raise TraceError("a trace is already being captured in this thread", fix="end it first")
        if queue is not None:
            if queue.capture is not None:
                raise TraceError(f"queue {queue.cq_id} is already being captured", fix="end that capture first")
            queue.capture = self
        state.capture = self
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def add(self, command: Command, blocking: bool) -> None:
        """Write a command down."""
        if command.captured:
            raise self.refuse(command.captured)
        if blocking:
            raise self.refuse("nothing runs while a trace is captured, so nothing can be waited for")
        command.queue = self.queue
        self._steps.append(command)

    def keep(self, value: object) -> None:
        """Hold something for as long as the trace lives."""
        self._wrappers.append(value)

    def at_end(self, act: Callable[[Trace], None]) -> None:
        """Do something with the trace once it is complete."""
        self._at_end.append(act)

    def makes(self, array: torch.Tensor) -> bool:
        """Whether an array comes of the calls that are being captured, and not from before."""
        return self._recorder.makes(array)

    def refuse(self, reason: str) -> TraceError:
        """The error for something that cannot be captured."""
        return TraceError(reason, trace=self.trace.id, fix="do it before or after the capture")

    def end(self, keep: bool = True) -> None:
        """Close it; the trace can be replayed from now on, or is thrown away."""
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        state.capture = None
        if self.queue is not None:
            self.queue.capture = None
        if keep:
            self._build()
        else:
            self.trace.release()

    def _build(self) -> None:
        trace, recorder = self.trace, self._recorder
        rewritten = recorder.rewritten
        recorder.forget()
        reuse = Reuse(self._steps, recorder.made)
        reuse.take_out()
        reuse.put_in(recorder.sizes)
        for step in self._steps:
            if isinstance(step, Command):
                assert self.queue is not None
                trace.commands.append(step)
                trace._calls.append(_Runner(step, self.queue.id).run)
            elif not step.constant or rewritten.intersection(step.written):
                trace._calls.append(replayable(step))
        trace._kept = [self._steps, self._wrappers]
        trace.buffers = tuple(dict.fromkeys(buffer for each in trace.commands for buffer in each.buffers))
        for act in self._at_end:
            act(trace)


class _Runner:
    """A command of a trace."""

    def __init__(self, command: Command, queue: int) -> None:
        self._command, self._queue = command, queue
        self.text = command.text

    def run(self) -> None:
        self._command.run(self._queue)


@contextmanager
def capture() -> Iterator[Trace]:
    """Capture the tensor ops inside; `trace.replay()` makes each of their array calls once, without planning.

    Inputs are what existed before: change them in place and replay. Results are written where the capture put them.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,)))
    >>> with capture() as trace:
    ...     y = (x + 1) * 2
    >>> trace.replay(); y.tolist()
    [4.0, 4.0, 4.0, 4.0]
    >>> _ = x.copy_(loom.zeros(4)); trace.replay(); y.tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    taken = Capture(Trace(None), None)
    try:
        yield taken.trace
    except BaseException:
        taken.end(keep=False)
        raise
    taken.end()
