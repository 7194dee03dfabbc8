"""The table of collectives: bytes that one device receives under the algorithm-free lower bound.

`before` and `after` are the bytes that one device holds before and after, `p` the number of devices on the axis.
Virtual devices count as real ones, whether or not the block moved anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshloom.types import Shape


@dataclass(frozen=True, slots=True)
class Kind:
    """One collective: what one device receives, from what it holds before and after."""

    size: Callable[[int, int, int], int]


def _from_others(size: int, p: int) -> int:
    """What comes from the others if everybody has as much; whole bytes, so that one byte is never none."""
    return -(-size * (p - 1) // p)


KINDS: dict[str, Kind] = {
    "all_gather": Kind(lambda before, after, p: _from_others(after, p)),
    "all_reduce": Kind(lambda before, after, p: _from_others(2 * before, p)),
    "reduce_scatter": Kind(lambda before, after, p: _from_others(before, p)),
    "all_to_all": Kind(lambda before, after, p: _from_others(before, p)),
    "broadcast": Kind(lambda before, after, p: after),
    "reduce": Kind(lambda before, after, p: before),
    "gather": Kind(lambda before, after, p: _from_others(after, p)),
    "scatter": Kind(lambda before, after, p: after),
    "send_recv": Kind(lambda before, after, p: before),
    "shift": Kind(lambda before, after, p: before),
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
