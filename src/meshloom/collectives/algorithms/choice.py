"""Which algorithm to take: the one with the lowest predicted time among those that the links allow.

On links that are all alike the time is that of the algorithm's closed form, by which prices are made as well. On any
others the schedule is built and carried out in numbers, unless even the best of the links would make it too slow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshloom.collectives.algorithms.grids import box
from meshloom.collectives.algorithms.table import Algorithm, algorithms_of
from meshloom.collectives.algorithms.timing import Hops
from meshloom.collectives.algorithms.trees import Group, check_full, spanning
from meshloom.collectives.schedule import Schedule
from meshloom.errors import FabricError
from meshloom.fabric import Fabric, Link
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
    """The algorithm with the lowest predicted time, by which a collective is priced as well.

    Built are only those without a closed form that could still be the fastest. What was chosen once is remembered: all
    that decides is in the call, and a fabric with other links is another value.

    >>> ring = Fabric.grid((8,), "ring", latency=1e-6, bandwidth=1e9)
    >>> print(choose("all_reduce", ring.coordinates(), ring, 1 << 20))
    all_reduce by bidirectional_ring (ring links)
    """
    return _choose(collective, tuple(group), fabric, size, root)


@lru_cache(maxsize=4096)
def _choose(collective: str, group: Group, fabric: Fabric, size: int, root: int) -> Algorithm:
    """The algorithm alone: a large group's schedule has millions of sends."""
    return _fastest(collective, group, fabric, size, root)[0]


def best(collective: str, group: Iterable[Coordinate], fabric: Fabric, size: int, *, root: int = 0) -> Candidate:
    """What `choose` chooses, with its schedule and predicted time."""
    members = tuple(group)
    line, seconds = _fastest(collective, members, fabric, size, root)
    return Candidate(line, line(members, fabric, root=root), seconds)


def _fastest(collective: str, group: Group, fabric: Fabric, size: int, root: int) -> tuple[Algorithm, float]:
    lines = algorithms_of(collective)
    known = {i: _closed(line, group, fabric, size, root) for i, line in enumerate(lines)}
    found = [(seconds, i) for i, seconds in known.items() if isinstance(seconds, float)]
    open_ones = [i for i, seconds in known.items() if seconds is None]
    reason = next((each for each in reversed(known.values()) if isinstance(each, FabricError)), None)
    for floor, i in sorted((_floor(lines[i], group, fabric, size), i) for i in open_ones):
        if not found or floor <= min(found)[0]:
            each = _candidate(lines[i], group, fabric, size, root)
            found += [(each.seconds, i)] if each.schedule else []
            reason = reason if each.schedule else FabricError(each.reason)
    if not found:
        raise FabricError(
            f"no algorithm for {collective} fits these links", fabric=fabric, reason=reason and reason.headline
        )
    seconds, place = min(found)
    return lines[place], seconds


def _candidate(line: Algorithm, group: Group, fabric: Fabric, size: int, root: int) -> Candidate:
    from meshloom.collectives.jobs import time_schedule  # numpy, which prices do not need

    try:
        schedule = line(group, fabric, root=root)
    except FabricError as error:
        return Candidate(line, None, math.inf, error.headline)
    closed = _closed(line, group, fabric, size, root)
    return Candidate(line, schedule, closed if isinstance(closed, float) else time_schedule(schedule, fabric, size))


# --- closed forms -----------------------------------------------------------------------------------------------


def _closed(line: Algorithm, group: Group, fabric: Fabric, size: int, root: int) -> float | FabricError | None:
    """The time by the closed form; None if there is none here, an error if the links do not form what it needs."""
    try:
        across = line.is_across
        found = _time_grid(line, group, fabric, size) if across else _time(line, group, fabric, size, root)
    except FabricError as error:
        return error.with_traceback(None)  # which would keep alive what its callers hold
    if found is None or len(group) < 2:
        return None if found is None else 0.0
    return float(fabric.launch + found)


def _time(line: Algorithm, group: Group, fabric: Fabric, size: int, root: int) -> float | None:
    order = _order(line.needs, group, fabric)
    hops = None if order is None else _alike(_links_of(line.needs, order, fabric), fabric)
    if order is None or hops is None:
        return None
    at = order.index(group[root])
    return line.timing(hops, len(order), size, max(at, len(order) - 1 - at))


def _order(needs: str, group: Group, fabric: Fabric) -> Group | None:
    if needs == "ring":
        return fabric.ring(group)
    if needs == "line":
        return fabric.line(group)
    if needs == "full":
        check_full(group, fabric)
        return group
    return None


def _links_of(needs: str, order: Group, fabric: Fabric) -> list[Link]:
    """The links that an order needs, in both directions; those of a line are also what a ring of two has."""
    if needs == "full":
        pairs = list(itertools.permutations(order, 2))
    else:
        onward = list(itertools.pairwise([*order, order[0]] if needs == "ring" and len(order) > 2 else order))
        pairs = [pair for a, b in onward for pair in ((a, b), (b, a))]
    found = (fabric.link(*pair) for pair in pairs)
    return [link for link in found if link is not None] or list(fabric.links[:1])


def _alike(links: Sequence[Link], fabric: Fabric) -> Hops | None:
    """Messages over links, if all of them take as long, and share ports all alike or not at all."""
    figures = {(link.latency, link.bandwidth, link.combined, link.packet, link.least) for link in links}
    axes = {fabric.axis_of(link) for link in links} if fabric.switches else set()
    is_shared = bool(axes & set(fabric.switches))
    if len(figures) != 1 or (is_shared and len(axes) > 1):
        return None
    return Hops(links[0], fabric.combining, is_shared)


def _time_grid(line: Algorithm, group: Group, fabric: Fabric, size: int) -> float | None:
    """On a whole grid whose axes are what the algorithm needs, each with links that are all alike."""
    axes, dims = box(group), line.dims(group)
    if fabric.kinds is None or any(fabric.shape[axis] != p for axis, p in zip(axes, dims, strict=True)):
        return None
    if not all(line.can_go_along(fabric.kinds[axis], p) for axis, p in zip(axes, dims, strict=True)):
        return None
    inside = set(group)
    links: dict[int, list[Link]] = {axis: [] for axis in axes}
    for link in fabric.links:
        if link.source in inside and (axis := fabric.axis_of(link)) in links:
            links[axis].append(link)
    hops = [each for each in (_alike(links[axis], fabric) for axis in axes) if each is not None]
    return line.timing(hops, dims, size) if len(hops) == len(axes) else None


# --- bounds -----------------------------------------------------------------------------------------------------


def _floor(line: Algorithm, group: Group, fabric: Fabric, size: int) -> float:
    """Seconds that an algorithm without a closed form here takes at least, without building it."""
    hops = _best_hops(fabric)
    try:
        if not line.exact:
            return _seconds(hops, *_least_on_a_tree(line.collective, group, fabric, size))
        if line.is_across:
            return _floor_of_grid(line, group, hops, size)
    except FabricError:
        return math.inf
    least = _surely(size, line.collective, [len(group)])
    found = line.timing(hops, len(group), least, -(-(len(group) - 1) // 2))
    return _seconds(hops, 1, 0.0) if found is None else found * (1 - 1e-9)


def _best_hops(fabric: Fabric) -> Hops:
    """Messages over the best of all links."""
    latency = min((link.latency for link in fabric.links), default=0.0)
    bandwidth = max((max(link.bandwidth, link.combined or 0.0) for link in fabric.links), default=1.0)
    return Hops(Link((0,), (1,), latency, bandwidth))


def _floor_of_grid(line: Algorithm, group: Group, hops: Hops, size: int) -> float:
    """From corner to corner, and what the busiest link carries of all parts of the value."""
    dims = line.dims(group)
    passes, parts = 2 if line.collective == "all_reduce" else 1, len(dims) if "split" in line.name else 1
    inwards = list(range(len(dims)))[:: 1 if line.needs == "levels" else -1]
    carried = [0.0] * len(dims)
    for part in range(parts):
        held = _surely(size, line.collective, dims) / (math.prod(dims) * parts)
        for axis in inwards[part:] + inwards[:part]:
            carried[axis] += _far(line, dims[axis]) * held
            held *= dims[axis]
    return _seconds(hops, passes * sum(_far(line, p) for p in dims), passes * max(carried))


def _far(line: Algorithm, p: int) -> int:
    """To the far end or side of an axis: the hops, and the pieces that the busiest link carries for one of each."""
    if line.needs == "levels":
        return 1
    return p // 2 if "torus" in line.name else p - 1


def _surely(size: int, collective: str, dims: Sequence[int]) -> int:
    """An even value with no chunk larger than the uneven ones: of k chunks the last has at least size/k - (k-1)."""
    p = math.prod(dims)
    chunks = p * p if collective == "all_to_all" else p * max(2, len(dims))
    return max(0, size - chunks * (chunks - 1))


def _least_on_a_tree(collective: str, group: Group, fabric: Fabric, size: int) -> tuple[float, float]:
    """Some member of a tree has one neighbour, and all that it gets comes over that link; the farthest is as deep."""
    p, deep = len(group), max((edge.step + 1 for edge in spanning(group, fabric)(group[0])), default=0)
    if collective in ROOTED or collective == "all_reduce":
        return deep / 2, 0.0
    return deep, _surely(size, collective, [p]) * (p - 1) / (p * p if collective == "all_to_all" else p)


def _seconds(hops: Hops, steps: float, size: float) -> float:
    """A hair less than the time of some steps and some bytes in a row, so that rounding rules nothing out."""
    return (steps * hops.delay(0.0) + hops.room(size)) * (1 - 1e-9)
