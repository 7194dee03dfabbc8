"""Which algorithm to take: the one with the lowest predicted time among those that the links allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshloom.collectives.algorithms.table import Algorithm, algorithms_of
from meshloom.collectives.proof import cost
from meshloom.collectives.schedule import Schedule, chunk_sizes
from meshloom.errors import FabricError
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm for one group, with its schedule and predicted seconds, or why it does not fit."""

    algorithm: Algorithm
    schedule: Schedule | None
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        figure = f"{self.seconds * 1e6:.2f} us" if self.schedule else f"does not fit: {self.reason}"
        return f"{self.algorithm}: {figure}"


def candidates(
    collective: str, group: Iterable[Coordinate], fabric: Fabric, size: int, *, root: int = 0
) -> tuple[Candidate, ...]:
    """Every algorithm of a collective, the fastest first (ties in the order of the table), then those that do not fit.

    `size` is the bytes of all chunks together.
    """
    members = tuple(group)
    found = [_candidate(line, members, fabric, size, root) for line in algorithms_of(collective)]
    return tuple(sorted(found, key=lambda each: each.seconds))


def choose(collective: str, group: Iterable[Coordinate], fabric: Fabric, size: int, *, root: int = 0) -> Algorithm:
    """The algorithm with the lowest predicted time: over its steps, the sum of the slowest link's time.

    >>> ring = Fabric.grid((8,), "ring", latency=1e-6, bandwidth=1e9)
    >>> print(choose("all_reduce", ring.coordinates(), ring, 1 << 20))
    all_reduce by bidirectional_ring (ring links)
    """
    best, *_ = candidates(collective, group, fabric, size, root=root)
    if best.schedule is None:
        raise FabricError(f"no algorithm for {collective} fits these links", fabric=fabric, reason=best.reason)
    return best.algorithm


def _candidate(line: Algorithm, group: tuple[Coordinate, ...], fabric: Fabric, size: int, root: int) -> Candidate:
    try:
        schedule = line(group, fabric, root=root)
    except FabricError as error:
        return Candidate(line, None, float("inf"), error.headline)
    return Candidate(line, schedule, cost(schedule, fabric, chunk_sizes(size, schedule.chunks)).seconds)
