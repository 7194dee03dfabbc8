"""A fabric is the set of links between devices: which coordinates are joined, how far, how wide.

Links are directed; an edge between neighbours is two of them. Nothing is sent between coordinates that no link joins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshloom.errors import FabricError
from meshloom.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of an edge: seconds per message and bytes per second (of all its lanes together)."""

    source: Coordinate
    destination: Coordinate
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise FabricError(f"a link from {self.source} to itself", fix="join two coordinates")
        if not 0 <= self.latency < math.inf or not 0 < self.bandwidth < math.inf:
            raise FabricError(
                f"a link from {self.source} to {self.destination} of {self.latency!r} s and {self.bandwidth!r} bytes/s",
                fix="give a latency of at least 0 and a bandwidth above 0",
            )

    def time(self, size: int) -> float:
        """Seconds for one message.

        >>> Link((0,), (1,), 1e-6, 1e9).time(1000)
        2e-06
        """
        return self.latency + size / self.bandwidth
