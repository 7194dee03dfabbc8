"""What joins the devices along one axis of a mesh: the value that a price is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.errors import FabricError, closest
from meshloom.fabric.links import Carrier, Packet, show_given

# What an axis can be: neighbours joined, also the last with the first, every one with every other by a link of their
# own, or all with a switch, by one port each.
KINDS = ("line", "ring", "full", "switch")


def is_joined(kind: str, size: int) -> bool:
    """Whether a link joins every two of an axis; also along a ring of 3.

    >>> is_joined("ring", 3), is_joined("line", 2), is_joined("ring", 4)
    (True, True, False)
    """
    return kind in ("full", "switch") or size < 3 or (kind == "ring" and size == 3)


@dataclass(frozen=True, slots=True, repr=False)
class AxisLinks(Carrier):
    """The links along one axis, all alike: their kind, the devices, and what a message takes.

    On a switch, `bandwidth` is that of a device's one port, in each direction. `level` says what the links lie between.
    An axis that winds through several of a machine is the `box` of these, besides a ring or a line at the slowest pace.

    >>> AxisLinks("ring", 8, latency=1e-6, bandwidth=1e9, name="tp")
    Machine.Axis(kind='ring', size=8, latency=1e-06, bandwidth=1000000000.0, name='tp')
    """

    kind: str
    size: int
    latency: float
    bandwidth: float
    combined: float | None = None
    packet: Packet | None = None
    least: float = 0.0
    name: str = ""
    level: str = ""
    box: tuple[AxisLinks, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FabricError(f"{self.kind!r} is not a kind of axis", fix=closest(self.kind, KINDS))
        if self.size < 1:
            raise FabricError(f"an axis of {self.size!r} devices", fix="give a whole number of at least 1")
        self.check(f"a {self.kind} of {self.size}")

    def __repr__(self) -> str:
        return f"Machine.Axis({show_given(self)})"

    def __str__(self) -> str:
        level = f" between {self.level}s" if self.level else ""
        return f"{self.kind} of {self.size}{level}, {self.bandwidth / 1e9:.4g} GB/s, {self.latency * 1e6:.3g} us"
