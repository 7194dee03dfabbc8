"""A machine is the set of figures that prices come from: no formula contains a literal of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from meshloom.errors import ArgumentError
from meshloom.fabric.axis import AxisLinks
from meshloom.fabric.binding import bind
from meshloom.fabric.links import show_given

if TYPE_CHECKING:
    from meshloom.mesh import Mesh


@dataclass(frozen=True, slots=True, repr=False)
class Machine:
    """Latency per step, bandwidth of one link direction, and what one device computes and reads per second.

    `memory` is what one device holds in bytes (None: no limit), `peaks` the FLOP/s of dtypes that have their own.
    `axes` says what joins the devices along each axis; without it, every axis is a ring of links with the machine's
    latency and bandwidth. `launch` is what starting a collective takes, `overhead` what an op takes besides its work,
    `combining` the bytes per second at which a device combines chunks that arrive (None: at once). `efficiency` is the
    part of arithmetic that is reached, `memory_efficiency` that of memory traffic.

    >>> Machine("slow", latency=1e-3, bandwidth=1e9, flops=1e12, memory_bandwidth=1e11).transfer(steps=2, size=10**9)
    1.002
    """

    Axis: ClassVar[type[AxisLinks]] = AxisLinks

    name: str
    latency: float
    bandwidth: float
    flops: float
    memory_bandwidth: float
    memory: float | None = None
    peaks: tuple[tuple[str, float], ...] = ()
    axes: tuple[AxisLinks, ...] = ()
    launch: float = 0.0
    overhead: float = 0.0
    combining: float | None = None
    efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def __post_init__(self) -> None:
        figures = [(field.name, getattr(self, field.name)) for field in fields(self)[1:6]]
        rates = [(name, getattr(self, name)) for name in ("combining", "efficiency", "memory_efficiency")]
        for what, value in [*figures, *self.peaks, *rates]:
            if value is not None and not value > 0:
                raise ArgumentError(f"{what} of machine {self.name!r} is {value!r}", fix="give a number above 0")
        for what, value in (("launch", self.launch), ("overhead", self.overhead)):
            if not value >= 0:
                raise ArgumentError(f"{what} of machine {self.name!r} is {value!r}", fix="give 0 or more seconds")

    def __repr__(self) -> str:
        return f"Machine({show_given(self)})"

    def __hash__(self) -> int:
        """By the figures that differ first: machines are looked up thousands of times."""
        return hash((self.name, self.latency, self.bandwidth, len(self.axes)))

    def transfer(self, steps: int, size: float) -> float:
        """Seconds for `steps` sends in a row that bring one device `size` bytes in all."""
        return steps * self.latency + size / self.bandwidth

    def compute(self, flops: float, size: float, dtype: str | None = None) -> float:
        """Seconds for arithmetic and memory traffic that overlap, at the peak of a dtype if it has one of its own.

        >>> machine = Machine("m", 1e-6, 1e9, flops=1e12, memory_bandwidth=1e11, overhead=1, memory_efficiency=0.5)
        >>> machine.compute(1e12, 1e11), machine.compute(0, 0)
        (3.0, 0.0)
        """
        if not flops and not size:
            return 0.0
        arithmetic = flops / (self.peak(dtype) * self.efficiency)
        return self.overhead + max(arithmetic, size / (self.memory_bandwidth * self.memory_efficiency))

    def peak(self, dtype: str | None = None) -> float:
        """FLOP/s of a dtype by its short name; `flops` for one without a figure of its own.

        >>> machine = Machine("m", 1e-6, 1e9, flops=1e12, memory_bandwidth=1e11, peaks=(("bf16", 2e12),))
        >>> machine.peak("bf16"), machine.peak("f32")
        (2000000000000.0, 1000000000000.0)
        """
        return next((value for name, value in self.peaks if name == dtype), self.flops)

    def on(self, mesh: Mesh) -> Machine:
        """The same machine with an axis for each of a mesh, whose devices lie on it row-major.

        >>> from meshloom.fabric import preset
        >>> from meshloom.mesh import Mesh
        >>> [(axis.name, axis.kind, axis.size) for axis in preset("galaxy").machine().on(Mesh(dp=8, tp=2)).axes]
        [('dp', 'ring', 8), ('tp', 'line', 2)]
        """
        return _bound(self, mesh.axes, mesh.shape) if self.axes else self

    def axis(self, name: str, devices: int) -> AxisLinks | None:
        """What joins the devices along an axis by its name; else along an axis of as many; else the slowest."""
        if not self.axes:
            return None
        named = [each for each in self.axes if each.name == name]
        return (named or [each for each in self.axes if each.size == devices] or [slowest(self.axes)])[0]


def slowest(axes: Sequence[AxisLinks]) -> AxisLinks:
    """The axis with the least bandwidth."""
    return min(axes, key=lambda each: each.bandwidth)


@lru_cache(maxsize=256)
def _bound(machine: Machine, names: tuple[str, ...], shape: tuple[int, ...]) -> Machine:
    return replace(machine, axes=bind(machine.axes, names, shape))


# Figures of one Wormhole n300 chip: 12.5 GB/s per link and direction, 0.8 us per hop, 288 GB/s DRAM, 65.5 TFLOP/s FP16.
VIRTUAL = Machine("virtual", latency=0.8e-6, bandwidth=12.5e9, flops=65.5e12, memory_bandwidth=288e9)
