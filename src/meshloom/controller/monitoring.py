"""What a cluster shows to `meshloom monitor`: workers, queue, last calls, collectives by axis, meshes, errors."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any

from meshloom.controller.log import TRANSFERS, DispatcherLog
from meshloom.controller.session import Session
from meshloom.controller.tensors import ClusterLease
from meshloom.processes.jobs import is_watched, remove_job, write_job

LAST = 40  # calls that are shown
EVERY = 0.5  # seconds between two states


class Reporter:
    """Writes the state of a cluster while somebody watches."""

    def __init__(self, session: Session, lease: ClusterLease) -> None:
        self.session, self.lease = session, lease
        self.job = f"cluster-{os.getpid()}-{id(session):x}"
        self.began = time.time()
        self._seen = 0
        self._axes: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="meshloom reporter")
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(EVERY):
            if is_watched():
                try:
                    write_job(self.job, self.state())
                except OSError:
                    return  # a folder that cannot be written shows nothing

    def close(self) -> None:
        """The cluster has ended."""
        self._end.set()
        self._thread.join(2)
        remove_job(self.job)

    def state(self) -> dict[str, Any]:
        """Everything that the page shows, as plain values."""
        kept = list(self.session.log)
        self._count(kept)
        session, now = self.session, time.monotonic()
        return {
            "kind": "cluster",
            "title": session.name,
            "began": self.began,
            "workers": [
                {
                    "number": each.number,
                    "state": _state_of(each, now),
                    "call": each.call.rpartition(":")[2],
                    "line": each.line,
                    "done": each.done,
                    "memory": each.memory,
                }
                for each in session.statuses
            ],
            "queue": {"issued": session.issued, "done": session.done, "waiting": max(0, session.issued - session.done)},
            "calls": [
                {"number": each.number, "call": each.call, "where": each.where, "plan": list(each.plan),
                 "moves": [str(one) for one in each.collectives], "bytes": each.bytes}
                for each in DispatcherLog(kept[-LAST:])
            ],
            "axes": dict(self._axes),
            "moved": dict(self._moved),
            "meshes": [
                {"axes": list(mesh.axes), "shape": list(mesh.shape), "holders": _holders(mesh, session.workers)}
                for mesh in list(self.lease.meshes)
                if mesh.size <= 256
            ],
            "error": None if session.failure is None else str(session.failure),
        }  # fmt: skip

    def _count(self, kept: list[Any]) -> None:
        """Bytes by axis and by kind, of the calls since the last look."""
        for number, name, _, outcome, size in kept:
            if number <= self._seen:
                continue
            if outcome is None and name in TRANSFERS:
                self._moved[name] += size
            for event in outcome.events if outcome is not None else ():
                self._axes[event.axis] += event.bytes
                self._moved[event.kind] += event.bytes
        self._seen = max([self._seen, *(each[0] for each in kept)])


def _state_of(status: Any, now: float) -> str:
    if now - status.heard > 3:
        return f"silent for {now - status.heard:.0f} s"
    return f"busy for {status.busy:.1f} s" if status.busy > 0.05 else "ready"


def _holders(mesh: Any, workers: int) -> list[int]:
    split = mesh.with_lease(None).split(workers)
    return [split.owner(place) if split.is_split else 0 for place in split.coordinates()]
