"""What a collective costs on a machine: the fastest algorithm on a ring of its links, by its published formula.

The same table of algorithms is proven, simulated and carried out; here only its formulas are read, so that a price
takes microseconds for a group of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from meshloom.collectives.algorithms import ALGORITHMS
from meshloom.collectives.kinds import Collective
from meshloom.fabric import Machine

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


@lru_cache(maxsize=1024)
def _lines(kind: str, devices: int) -> tuple[tuple[str, int, float], ...]:
    """For each algorithm on a ring: its name, steps, and bytes in a row per byte that one device receives."""
    whole = _WHOLE[kind](devices)
    lines = (line for line in ALGORITHMS.values() if line.collective == kind and line.needs == "ring")
    return tuple((line.name, line.formula.steps(devices), float(line.formula.bytes(whole, devices))) for line in lines)


def fastest(collective: Collective, machine: Machine) -> tuple[str, float]:
    """The algorithm that a collective would take on a ring of the machine's links, and its seconds.

    >>> from meshloom.fabric import VIRTUAL
    >>> name, seconds = fastest(Collective("all_reduce", "tp", 4, 96, "f32", (4, 4), "sum"), VIRTUAL)
    >>> name, f"{seconds * 1e6:.2f} us"
    ('bidirectional_ring', '3.21 us')
    """
    seconds, name = _fastest(collective.kind, collective.devices, collective.bytes, machine)
    return name, seconds


def _fastest(kind: str, devices: int, size: int, machine: Machine) -> tuple[float, str]:
    if kind not in _WHOLE:
        return machine.transfer(1, size), "one send"
    return min([(machine.transfer(steps, each * size), name) for name, steps, each in _lines(kind, devices)])


def price(collective: Collective, machine: Machine) -> float:
    """Seconds that a collective takes on a machine."""
    return price_of(collective.kind, collective.devices, collective.bytes, machine)


def price_of(kind: str, devices: int, size: int, machine: Machine) -> float:
    """The same from the bytes that one device receives, for searches that compare many collectives."""
    return _fastest(kind, devices, size, machine)[0]
