"""Which algorithm to take: the one with the lowest predicted time among those that the links allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from meshloom.collectives.algorithms.table import Algorithm, algorithms_of
from meshloom.collectives.algorithms.trees import spanning
from meshloom.collectives.proof import cost
from meshloom.collectives.schedule import Schedule, chunk_sizes
from meshloom.errors import FabricError
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate

ROOTED = ("broadcast", "reduce", "gather", "scatter")


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

    `size` is the bytes of all chunks together. All of them are built, which takes a while for hundreds of members.
    """
    members = tuple(group)
    found = [_candidate(line, members, fabric, size, root) for line in algorithms_of(collective)]
    return tuple(sorted(found, key=lambda each: each.seconds))


def choose(collective: str, group: Iterable[Coordinate], fabric: Fabric, size: int, *, root: int = 0) -> Algorithm:
    """The algorithm with the lowest predicted time: over its steps, the sum of the slowest link's time.

    Built are only those that could still be the fastest by their formula. What was chosen once is remembered: all that
    decides is in the call, and a fabric with other links is another value.

    >>> ring = Fabric.grid((8,), "ring", latency=1e-6, bandwidth=1e9)
    >>> print(choose("all_reduce", ring.coordinates(), ring, 1 << 20))
    all_reduce by bidirectional_ring (ring links)
    """
    return _choose(collective, tuple(group), fabric, size, root)


@lru_cache(maxsize=4096)
def _choose(collective: str, group: tuple[Coordinate, ...], fabric: Fabric, size: int, root: int) -> Algorithm:
    """The algorithm alone: a large group's schedule has millions of sends."""
    return best(collective, group, fabric, size, root=root).algorithm


def best(collective: str, group: Iterable[Coordinate], fabric: Fabric, size: int, *, root: int = 0) -> Candidate:
    """What `choose` chooses, with its schedule and predicted time."""
    members = tuple(group)
    lines = algorithms_of(collective)
    floors = [_floor(line, members, fabric, size) for line in lines]
    found: list[tuple[float, int, Candidate]] = []
    for floor, i in sorted((floor, i) for i, floor in enumerate(floors)):
        if not found or floor <= min(found)[0]:
            each = _candidate(lines[i], members, fabric, size, root)
            found.append((each.seconds, i, each))
    first = min(found)[2]
    if first.schedule is None:
        raise FabricError(f"no algorithm for {collective} fits these links", fabric=fabric, reason=found[-1][2].reason)
    return first


def _candidate(line: Algorithm, group: tuple[Coordinate, ...], fabric: Fabric, size: int, root: int) -> Candidate:
    try:
        schedule = line(group, fabric, root=root)
    except FabricError as error:
        return Candidate(line, None, float("inf"), error.headline)
    return Candidate(line, schedule, cost(schedule, fabric, chunk_sizes(size, schedule.chunks)).seconds)


def _floor(line: Algorithm, group: tuple[Coordinate, ...], fabric: Fabric, size: int) -> float:
    """Seconds that the algorithm takes at least, without building it; infinite if its group cannot be."""
    try:
        if not line.exact:
            return _seconds(fabric, *_least_on_a_tree(line.collective, group, fabric, size))
        dims = line.dims(group)
    except FabricError:
        return float("inf")
    steps = line.formula.steps(*dims)
    if line.collective in ROOTED:
        # A root in the middle of a line halves the steps; its own piece, which stays, may be the largest.
        return _seconds(fabric, steps / 2, 0.0)
    return _seconds(fabric, steps, float(line.formula.bytes(Fraction(_surely(size, line.collective, dims)), *dims)))


def _surely(size: int, collective: str, dims: Sequence[int]) -> int:
    """An even value with no chunk larger than the uneven ones: of k chunks the last has at least size/k - (k-1)."""
    p = math.prod(dims)
    chunks = p * p if collective == "all_to_all" else p * max(2, len(dims))
    return max(0, size - chunks * (chunks - 1))


def _least_on_a_tree(collective: str, group: tuple[Coordinate, ...], fabric: Fabric, size: int) -> tuple[float, float]:
    """Some member of a tree has one neighbour, and all that it gets comes over that link; the farthest is as deep."""
    p, deep = len(group), max((edge.step + 1 for edge in spanning(group, fabric)(group[0])), default=0)
    if collective in ROOTED or collective == "all_reduce":
        return deep / 2, 0.0
    return deep, _surely(size, collective, [p]) * (p - 1) / (p * p if collective == "all_to_all" else p)


def _seconds(fabric: Fabric, steps: float, size: float) -> float:
    """The time on the best of the links; a hair less, so that rounding rules nothing out."""
    latency = min((link.latency for link in fabric.links), default=0.0)
    bandwidth = max((link.bandwidth for link in fabric.links), default=1.0)
    return (steps * latency + size / bandwidth) * (1 - 1e-9)
