"""What a collective costs on a machine: the fastest algorithm that the links of its axis allow.

A machine may say what joins the devices along each axis (`Machine.axes`); then the price is the closed form of what the
simulator finds on such links, send by send. Without axes, every axis is a ring of the machine's latency and bandwidth.
The same table of algorithms is proven, simulated and carried out; here only its formulas are read, so that a price
takes microseconds for a group of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter

from meshloom.collectives.algorithms import ALGORITHMS, Algorithm
from meshloom.collectives.algorithms.timing import Hops
from meshloom.collectives.kinds import KINDS, Collective
from meshloom.fabric import AxisLinks, Machine
from meshloom.fabric.axis import is_joined
from meshloom.fabric.binding import join
from meshloom.fabric.machine import slowest

# The bytes of all chunks together, which the formulas speak of, from the bytes that one device receives.
_WHOLE: dict[str, Callable[[int], float]] = {
    "all_gather": lambda p: p / (p - 1),
    "all_reduce": lambda p: p / (2 * (p - 1)),
    "reduce_scatter": lambda p: p / (p - 1),
    "all_to_all": lambda p: p * p / (p - 1),
    "broadcast": lambda p: 1.0,
    "reduce": lambda p: 1.0,
    "gather": lambda p: p / (p - 1),
    "scatter": lambda p: float(p),
}
# From one member to the next, and from the last back to the first.
_TO_THE_NEXT = ("send_recv", "shift")


def price(collective: Collective, machine: Machine) -> float:
    """Seconds that a collective takes on a machine; bound to the mesh (`machine.on(mesh)`), it knows the axis by name.

    >>> from meshloom.fabric import preset
    >>> from meshloom.mesh import Mesh
    >>> cluster = preset("nvlink8x16").machine().on(Mesh(host=16, chip=8))
    >>> for axis, devices in (("host", 16), ("chip", 8)):
    ...     gather = Collective("all_gather", axis, devices, 1 << 20, "bf16", ())
    ...     print(f"{price(gather, cluster) * 1e6:.1f} us")
    54.9 us
    11.0 us
    """
    return fastest(collective, machine)[1]


def fastest(collective: Collective, machine: Machine) -> tuple[str, float]:
    """The algorithm that a collective would take on a machine, and its seconds.

    >>> from meshloom.fabric import VIRTUAL
    >>> name, seconds = fastest(Collective("all_reduce", "tp", 4, 96, "f32", (4, 4), "sum"), VIRTUAL)
    >>> name, f"{seconds * 1e6:.2f} us"
    ('bidirectional_ring', '3.21 us')
    """
    kind, devices, size = collective.kind, collective.devices, collective.bytes
    names = collective.axis.split(",")
    if len(names) > 1 and machine.axes:
        known = {each.name: each for each in machine.axes}
        if all(name in known for name in names):
            return _name_first(_fastest(kind, devices, size, machine, _join_axes(tuple(known[name] for name in names))))
    return _name_first(_fastest(kind, devices, size, machine, machine.axis(collective.axis, devices)))


def _name_first(found: tuple[float, str]) -> tuple[str, float]:
    return found[1], found[0]


def price_of(kind: str, devices: int, size: int, machine: Machine, axis: int | None = None) -> float:
    """The same from the bytes that one device receives, for searches that compare many collectives.

    `axis` is the number of the mesh axis, on a machine that is bound to the mesh.
    """
    links = machine.axes[axis] if axis is not None and machine.axes else machine.axis("", devices)
    return _fastest(kind, devices, size, machine, links)[0]


def _fastest(kind: str, devices: int, size: int, machine: Machine, links: AxisLinks | None) -> tuple[float, str]:
    if links is None:
        return _fastest_on_a_ring(kind, devices, size, machine)
    if kind == "copy":  # from one mesh to another, by the slowest links that there are
        return machine.launch + slowest(machine.axes).time(size), "one send"
    if devices == 1:
        return 0.0, "nothing"
    if kind in _TO_THE_NEXT:
        return machine.launch + _way_back(links.box or (links,), size), "one send"
    along = _fastest_along(kind, devices, size, machine, links)
    return min(_fastest_across(kind, links.box, size, machine), along) if len(links.box) > 1 else along


def _fastest_along(kind: str, devices: int, size: int, machine: Machine, links: AxisLinks) -> tuple[float, str]:
    hops = _hops(links, machine.combining)
    whole = KINDS[kind].whole(size, devices)
    lines = _allowed(kind, links.kind, devices)
    found = ((line.timing(hops, devices, whole, devices - 1), line.name) for line in lines)
    best, name = min(((seconds, name) for seconds, name in found if seconds is not None), key=itemgetter(0))
    return machine.launch + best, name


def _way_back(axes: Sequence[AxisLinks], size: int) -> float:
    """From the last member back to the first, which is the longest way: from end to end of every line."""
    return sum(each.time(size) * (each.size - 1 if each.kind == "line" else 1) for each in axes)


@lru_cache(maxsize=256)
def _hops(links: AxisLinks, combining: float | None) -> Hops:
    return Hops(links, combining, links.kind == "switch")


@lru_cache(maxsize=1024)
def _allowed(kind: str, links: str, devices: int) -> tuple[Algorithm, ...]:
    """The algorithms for which the links of an axis are enough."""
    joined = is_joined(links, devices)
    needs = {"line", *(["ring"] if links == "ring" or joined else []), *(["full"] if joined else [])}
    return tuple(line for line in ALGORITHMS.values() if line.collective == kind and line.needs in needs)


@lru_cache(maxsize=256)
def _join_axes(axes: tuple[AxisLinks, ...]) -> AxisLinks:
    return join(axes, math.prod(each.size for each in axes))


def _fastest_across(kind: str, axes: Sequence[AxisLinks], size: int, machine: Machine) -> tuple[float, str]:
    """Over several axes at once: along each in turn, or with a part of the value for each."""
    dims = [each.size for each in axes]
    whole, hops = KINDS[kind].whole(size, math.prod(dims)), [_hops(each, machine.combining) for each in axes]
    lines = [line for line in ALGORITHMS.values() if line.collective == kind and line.is_across]
    lines = [line for line in lines if all(line.can_go_along(each.kind, each.size) for each in axes)]
    timed = [(line.timing(hops, dims, whole), line.name) for line in lines]
    timed += [(_flood(kind, axes, hops, whole), "spanning_tree")]
    found = [(machine.launch + each, name) for each, name in timed if each is not None]
    return min(found, default=(math.inf, ""), key=itemgetter(0))


def _flood(kind: str, axes: Sequence[AxisLinks], hops: Sequence[Hops], whole: int) -> float | None:
    """From or to a corner of a box by the shortest ways, which cross every axis; the whole value over every link."""
    if kind not in ("broadcast", "reduce") or any(each.is_shared for each in hops):
        return None
    far = [each.size // 2 if each.kind == "ring" else each.size - 1 for each in axes]
    hop = [each.copy(whole) if kind == "broadcast" else each.add(whole) for each in hops]
    return sum(count * each for count, each in zip(far, hop, strict=True))


# --- machines without axes --------------------------------------------------------------------------------------


def _fastest_on_a_ring(kind: str, devices: int, size: int, machine: Machine) -> tuple[float, str]:
    if kind not in _WHOLE:
        return machine.launch + machine.transfer(1, size), "one send"
    seconds, name = min([(machine.transfer(steps, each * size), name) for name, steps, each in _lines(kind, devices)])
    return machine.launch + seconds, name


@lru_cache(maxsize=1024)
def _lines(kind: str, devices: int) -> tuple[tuple[str, int, float], ...]:
    """For each algorithm on a ring: its name, steps, and bytes in a row per byte that one device receives."""
    whole = _WHOLE[kind](devices)
    lines = (line for line in ALGORITHMS.values() if line.collective == kind and line.needs == "ring")
    return tuple((line.name, line.formula.steps(devices), float(line.formula.bytes(whole, devices))) for line in lines)
