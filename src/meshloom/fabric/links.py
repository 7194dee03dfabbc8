"""A fabric is the set of links between devices: which coordinates are joined, how far, how wide.

Links are directed; an edge between neighbours is two of them. Nothing is sent between coordinates that no link joins.
What a message takes is said once, in `Carrier`: a link of the simulator is one, and so are the links of a mesh axis
that a price is asked for.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from meshloom.errors import FabricError
from meshloom.mesh import Coordinate

# A full packet: its bytes, and its latency.
Packet = tuple[float, float]


class Carrier:
    """What carries messages from one device to another.

    A message occupies it for bytes over `bandwidth` (of all lanes together), or over `combined` if it is combined with
    what its destination holds (None: the same), and arrives a latency later. `packet` is the size of a full packet and
    its latency; the latency of smaller messages lies between (None: all messages have the same). A message of fewer
    bytes than `least` occupies it as long as one of that many.
    """

    __slots__ = ()
    latency: float
    bandwidth: float
    combined: float | None
    packet: Packet | None
    least: float

    def occupied(self, size: float, combined: bool = False) -> float:
        """Seconds for which a message keeps others waiting.

        >>> Link((0,), (1,), 1e-6, bandwidth=1e9, combined=5e8).occupied(1000, combined=True)
        2e-06
        """
        return max(size, self.least) / (self.combined if combined and self.combined else self.bandwidth)

    def delay(self, size: float) -> float:
        """Seconds that a message still needs when its last byte has left.

        >>> link = Link((0,), (1,), latency=1e-6, bandwidth=1e9, packet=(4000, 2e-6))
        >>> link.delay(0), link.delay(2000), link.delay(8000)
        (1e-06, 1.5e-06, 2e-06)
        """
        if self.packet is None:
            return self.latency
        full, latency = self.packet
        return self.latency + (latency - self.latency) * min(1.0, size / full)

    def time(self, size: float, combined: bool = False) -> float:
        """Seconds for one message.

        >>> Link((0,), (1,), 1e-6, 1e9).time(1000)
        2e-06
        """
        return self.occupied(size, combined) + self.delay(size)

    def check(self, what: str) -> None:
        """Raise unless the figures can be."""
        latencies = [self.latency, self.least, *([self.packet[1]] if self.packet else [])]
        above = [self.bandwidth, *([self.packet[0]] if self.packet else [])]
        above += [self.combined] if self.combined is not None else []
        if not all(0 <= each < math.inf for each in latencies) or not all(0 < each < math.inf for each in above):
            extra = f", combined {self.combined!r}, packet {self.packet!r}" if len(above) > 1 else ""
            extra += f", at least {self.least!r} bytes" if self.least else ""
            raise FabricError(
                f"{what} of {self.latency!r} s and {self.bandwidth!r} bytes/s{extra}",
                fix="give a latency of at least 0 and a bandwidth above 0",
            )


@dataclass(frozen=True, slots=True, repr=False)
class Link(Carrier):
    """One direction of an edge: seconds per message and bytes per second (of all its lanes together)."""

    source: Coordinate
    destination: Coordinate
    latency: float
    bandwidth: float
    combined: float | None = None
    packet: Packet | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise FabricError(f"a link from {self.source} to itself", fix="join two coordinates")
        self.check(f"a link from {self.source} to {self.destination}")

    def __repr__(self) -> str:
        return f"Link({show_given(self)})"


def show_given(value: Any) -> str:
    """The fields of a value as arguments, without those that are as they are by default."""
    given = ((field.name, getattr(value, field.name), field.default) for field in fields(value))
    return ", ".join(f"{name}={each!r}" for name, each, default in given if default is MISSING or each != default)
