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
    """One collective: what one device receives, from what it holds before and after; and the reverse, the whole value.

    The whole is what a schedule cuts into chunks: of an all-to-all, what all devices hold together.

    >>> KINDS["all_gather"].size(32, 128, 4), KINDS["all_gather"].whole(96, 4)
    (96, 128)
    """

    size: Callable[[int, int, int], int]
    whole: Callable[[int, int], int]


def _from_others(size: int, p: int) -> int:
    """What comes from the others if everybody has as much; whole bytes, so that one byte is never none."""
    return -(-size * (p - 1) // p)


def _with_own(size: int, p: int) -> int:
    """What everybody has, from what comes from the others."""
    return -(-size * p // (p - 1)) if p > 1 else size


KINDS: dict[str, Kind] = {
    "all_gather": Kind(lambda before, after, p: _from_others(after, p), _with_own),
    "all_reduce": Kind(lambda before, after, p: _from_others(2 * before, p), lambda size, p: _with_own(size // 2, p)),
    "reduce_scatter": Kind(lambda before, after, p: _from_others(before, p), _with_own),
    "all_to_all": Kind(lambda before, after, p: _from_others(before, p), lambda size, p: _with_own(size, p) * p),
    "broadcast": Kind(lambda before, after, p: after, lambda size, p: size),
    "reduce": Kind(lambda before, after, p: before, lambda size, p: size),
    "gather": Kind(lambda before, after, p: _from_others(after, p), _with_own),
    "scatter": Kind(lambda before, after, p: after, lambda size, p: size * p),
    "send_recv": Kind(lambda before, after, p: before, lambda size, p: size * p),
    "shift": Kind(lambda before, after, p: before, lambda size, p: size * p),
    "copy": Kind(lambda before, after, p: after, lambda size, p: size),  # between meshes: what a device lacks
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over one mesh axis; of a copy between meshes, `axis` is the two meshes.

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
        if self.kind == "copy":
            return f"copy {self.axis}: {self.bytes} B"
        return f"{name} over {self.axis} of {self.devices}: {self.bytes} B"
