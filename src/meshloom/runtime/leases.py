"""Leases: what ties a mesh to its device, until the device is closed.

A tensor on the mesh of a device is of no use after that. Nobody asks about it on the way to a kernel: when a lease
ends, the topologies on its meshes lose their mesh and all that follows from it, and caches that know them forget them.
So the next use of such a tensor is a first use, and ends at what is missing. On a mesh that is a value nothing ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshloom.errors import ClosedError
from meshloom.placement import Topology

if TYPE_CHECKING:
    from meshloom.runtime.card_memory import CardStore

_listeners: list[Callable[[Lease], None]] = []


def listen(listener: Callable[[Lease], None]) -> None:
    """Call a function with each lease that ends."""
    _listeners.append(listener)


class Lease:
    """The time in which a device is open, for the meshes that it has."""

    __slots__ = ("_closed", "_name", "store")

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self.store: CardStore | None = None  # of cards that have memory of their own

    def check_open(self) -> None:
        """An error if the device has been closed."""
        if self._closed:
            raise ClosedError(f"{self._name} has been closed", fix="open it again: open_mesh_device(...)")

    def check_making(self) -> None:
        """An error if this process cannot make tensors there: it is closed, or others hold them."""
        self.check_open()

    def end(self) -> None:
        """The device is closed: so is all that lies on it."""
        if self.store is not None and not self._closed:
            self.store.close()
        self._closed = True
        if Topology.close(self):
            for listener in _listeners:
                listener(self)
