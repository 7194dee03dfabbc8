"""Events: a mark on one queue that others, and the host, can wait for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from meshloom.errors import DeviceTimeoutError
from meshloom.runtime.geometry import MeshCoordinateRange
from meshloom.runtime.races import Clock

if TYPE_CHECKING:
    from meshloom.runtime.queue import MeshCommandQueue


class MeshEvent:
    """All that a queue had been given when it was recorded. It comes about when the queue gets there.

    If the queue fails before, the event comes about as failed, and whoever waits for it fails too: nobody hangs.
    """

    def __init__(
        self,
        queue: MeshCommandQueue,
        where: str,
        clock: Clock | None,
        device_range: MeshCoordinateRange | None = None,
    ) -> None:
        self.id = queue.system.next_event()
        self.queue, self.where = queue, where
        self._range = device_range
        self._clock = clock
        self._done = threading.Event()
        self.number = 0  # of the command that records it
        self.failed = False

    @property
    def device_range(self) -> MeshCoordinateRange:
        """The devices that it was recorded for."""
        return self._range or MeshCoordinateRange(self.queue.device.mesh.shape)

    @property
    def mesh_cq_id(self) -> int:
        """The number of its queue."""
        return self.queue.cq_id

    def query(self) -> bool:
        """Whether it has come about; never waits."""
        self.queue.runner.some()
        if self._done.is_set():
            self._note_synchronized()
            return True
        return False

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host; errors of the queue are raised here."""
        self.queue.wait(self.number, timeout)
        self._note_synchronized()
        if self.failed:
            self.queue.finish(timeout)

    def _note_synchronized(self) -> None:
        if self._clock is not None and self.queue.system.races is not None:
            self.queue.system.races.note_synchronize(self._clock)

    # what commands use

    @property
    def is_done(self) -> bool:
        """Whether it has come about."""
        return self._done.is_set()

    @property
    def clock(self) -> Clock:
        """What is known to be done after it."""
        return self._clock or {}

    def happen(self, failed: bool = False) -> None:
        """The queue has got there, or never will."""
        self.failed = failed
        self._done.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait on another queue."""
        if not self._done.wait(timeout):
            raise DeviceTimeoutError(f"event {self.id} did not come about within {timeout} s", where=self.where)

    def __repr__(self) -> str:
        state = "failed" if self.failed else "done" if self.is_done else "to come"
        return (
            f"MeshEvent(id={self.id}, device_id={self.queue.device.id}, mesh_cq_id={self.mesh_cq_id}, "
            f"device_range={self.device_range!r}, {state})"
        )
