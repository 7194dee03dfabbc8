"""Leases: what ties a mesh to its device, until the device is closed.

A tensor on the mesh of a device is of no use after that. Nobody asks about it on the way to a kernel: when a lease
ends, the topologies on its meshes lose their mesh and all that follows from it, and caches that know them forget them.
So the next use of such a tensor is a first use, and ends at what is missing. On a mesh that is a value nothing ends.
"""

from __future__ import annotations

from collections.abc import Callable

from meshloom.errors import ClosedError, UnsupportedError
from meshloom.placement import Topology

_listeners: list[Callable[[Lease], None]] = []


def listen(listener: Callable[[Lease], None]) -> None:
    """Call a function with each lease that ends."""
    _listeners.append(listener)


class Lease:
    """The time in which a device is open, for the meshes that it has."""

    __slots__ = ("_closed", "_name", "driver")

    def __init__(self, name: str, driver: str | None) -> None:
        self._name, self._closed = name, False
        self.driver = driver  # the name of one whose cards have memory of their own

    def check_open(self) -> None:
        """An error if the device has been closed."""
        if self._closed:
            raise ClosedError(f"{self._name} has been closed", fix="open it again: open_mesh_device(...)")

    def check_tensors(self) -> None:
        """An error if tensors cannot lie on the device: it is closed, or its memory is not this process's."""
        self.check_open()
        if self.driver is not None:
            raise UnsupportedError(
                f"tensors do not lie on the cards of {self.driver} yet: they would stay in host memory",
                device=self._name,
                fix="use create_mesh_buffer, queues and workloads there, or a mesh of virtual devices for tensors",
            )

    def end(self) -> None:
        """The device is closed: so is all that lies on it."""
        self._closed = True
        if Topology.close(self):
            for listener in _listeners:
                listener(self)
