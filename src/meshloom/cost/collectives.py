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
            return _fastest_across(kind, [known[name] for name in names if known[name].size > 1], size, machine)
    seconds, name = _fastest(kind, devices, size, machine, machine.axis(collective.axis, devices))
    return name, seconds


def price_of(kind: str, devices: int, size: int, machine: Machine, axis: int | None = None) -> float:
    """The same from the bytes that one device receives, for searches that compare many collectives.

    `axis` is the number of the mesh axis, on a machine that is bound to the mesh.
    """
    links = machine.axes[axis] if axis is not None and machine.axes else machine.axis("", devices)
    return _fastest(kind, devices, size, machine, links)[0]


def _fastest(kind: str, devices: int, size: int, machine: Machine, links: AxisLinks | None) -> tuple[float, str]:
    if links is None:
        return _fastest_on_a_ring(kind, devices, size, machine)
    if devices == 1:
        return 0.0, "nothing"
    hops = _hops(links, machine.combining)
    if kind in _TO_THE_NEXT:
        return machine.launch + _way_back(links.kind, devices) * hops.copy(size), "one send"
    whole = KINDS[kind].whole(size, devices)
    lines = _allowed(kind, links.kind, devices)
    found = ((line.timing(hops, devices, whole, devices - 1), line.name) for line in lines)
    best, name = min(((seconds, name) for seconds, name in found if seconds is not None), key=itemgetter(0))
    return machine.launch + best, name


def _way_back(kind: str, devices: int) -> int:
    """The hops from the last member to the first."""
    return devices - 1 if kind == "line" else 1


@lru_cache(maxsize=256)
def _hops(links: AxisLinks, combining: float | None) -> Hops:
    return Hops(links, combining, links.kind == "switch")


@lru_cache(maxsize=1024)
def _allowed(kind: str, links: str, devices: int) -> tuple[Algorithm, ...]:
    """The algorithms for which the links of an axis are enough; a ring of 3 joins every two."""
    joined = links in ("full", "switch") or devices == 2 or (links == "ring" and devices == 3)
    needs = {"line", *(["ring"] if links == "ring" or joined else []), *(["full"] if joined else [])}
    return tuple(line for line in ALGORITHMS.values() if line.collective == kind and line.needs in needs)


def _fastest_across(kind: str, axes: Sequence[AxisLinks], size: int, machine: Machine) -> tuple[str, float]:
    """A collective over several axes at once: along each in turn, or along a way through all at the slowest pace."""
    dims = [each.size for each in axes]
    devices = math.prod(dims)
    if len(axes) < 2 or kind in _TO_THE_NEXT:
        seconds, name = _fastest(kind, devices, size, machine, (axes or machine.axes)[0])
        return name, seconds
    whole, hops = KINDS[kind].whole(size, devices), [_hops(each, machine.combining) for each in axes]
    lines = [line for line in ALGORITHMS.values() if line.collective == kind and line.needs == "grid"]
    timed = [(line.timing(hops, dims, whole), line.name) for line in lines if _has_rings(line, axes)]
    found = [(machine.launch + each, name) for each, name in timed if each is not None]
    slow = min(axes, key=lambda each: each.bandwidth)
    ring = AxisLinks("ring", devices, max(each.latency for each in axes), slow.bandwidth, slow.combined, slow.packet)
    seconds, name = min([*found, _fastest(kind, devices, size, machine, ring)])
    return name, seconds


def _has_rings(line: Algorithm, axes: Sequence[AxisLinks]) -> bool:
    return "torus" not in line.name or all(each.kind != "line" or each.size == 2 for each in axes)


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
