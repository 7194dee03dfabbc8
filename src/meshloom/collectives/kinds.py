"""The table of collectives: bytes that one device receives under the algorithm-free lower bound, and steps.

`before` and `after` are the bytes that one device holds before and after, `p` the number of devices on the axis.
Virtual devices count as real ones, whether or not the block moved anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshloom.fabric import Machine
from meshloom.types import Shape


@dataclass(frozen=True, slots=True)
class Kind:
    """One collective: its bytes and steps as formulas."""

    size: Callable[[int, int, int], int]
    steps: Callable[[int], int]


KINDS: dict[str, Kind] = {
    "all_gather": Kind(lambda before, after, p: after * (p - 1) // p, lambda p: p - 1),
    "all_reduce": Kind(lambda before, after, p: 2 * (before * (p - 1) // p), lambda p: 2 * (p - 1)),
    "reduce_scatter": Kind(lambda before, after, p: before * (p - 1) // p, lambda p: p - 1),
    "all_to_all": Kind(lambda before, after, p: before * (p - 1) // p, lambda p: p - 1),
    "broadcast": Kind(lambda before, after, p: after, lambda p: p - 1),
    "reduce": Kind(lambda before, after, p: before, lambda p: p - 1),
    "gather": Kind(lambda before, after, p: after * (p - 1) // p, lambda p: p - 1),
    "scatter": Kind(lambda before, after, p: after, lambda p: p - 1),
    "send_recv": Kind(lambda before, after, p: before, lambda p: 1),
    "shift": Kind(lambda before, after, p: before, lambda p: 1),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over one mesh axis.

    >>> print(Collective("all_reduce", "tp", 4, 96, "f32", (4, 4), "sum"))
    all_reduce(sum) over tp of 4: 96 B
    """

    kind: str
    axis: str
    devices: int
    bytes: int
    dtype: str
    shape: Shape
    op: str | None = None

    def __str__(self) -> str:
        name = self.kind if self.op is None else f"{self.kind}({self.op})"
        return f"{name} over {self.axis} of {self.devices}: {self.bytes} B"


def price(collective: Collective, machine: Machine) -> float:
    """Seconds that a collective takes on a machine."""
    return machine.transfer(KINDS[collective.kind].steps(collective.devices), collective.bytes)
