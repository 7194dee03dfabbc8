"""A machine is the set of figures that the planner prices with: no formula contains a literal of its own."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from meshloom.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Machine:
    """Latency per step, bandwidth of one link direction, and what one device computes and reads per second.

    `memory` is what one device holds in bytes (None: no limit), `peaks` the FLOP/s of dtypes that have their own.

    >>> Machine("slow", latency=1e-3, bandwidth=1e9, flops=1e12, memory_bandwidth=1e11).transfer(steps=2, size=10**9)
    1.002
    """

    name: str
    latency: float
    bandwidth: float
    flops: float
    memory_bandwidth: float
    memory: float | None = None
    peaks: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        figures = [(field.name, getattr(self, field.name)) for field in fields(self)[1:6]]
        for what, value in [*figures, *self.peaks]:
            if value is not None and not value > 0:
                raise ArgumentError(f"{what} of machine {self.name!r} is {value!r}", fix="give a number above 0")

    def __repr__(self) -> str:
        shown = [field for field in fields(self) if field.default is MISSING or getattr(self, field.name)]
        return f"Machine({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in shown)})"

    def transfer(self, steps: int, size: float) -> float:
        """Seconds for `steps` sends in a row that bring one device `size` bytes in all."""
        return steps * self.latency + size / self.bandwidth

    def compute(self, flops: float, size: float, dtype: str | None = None) -> float:
        """Seconds for arithmetic and memory traffic that overlap, at the peak of a dtype if it has one of its own."""
        return max(flops / self.peak(dtype), size / self.memory_bandwidth)

    def peak(self, dtype: str | None = None) -> float:
        """FLOP/s of a dtype by its short name; `flops` for one without a figure of its own.

        >>> machine = Machine("m", 1e-6, 1e9, flops=1e12, memory_bandwidth=1e11, peaks=(("bf16", 2e12),))
        >>> machine.peak("bf16"), machine.peak("f32")
        (2000000000000.0, 1000000000000.0)
        """
        return next((value for name, value in self.peaks if name == dtype), self.flops)


# Figures of one Wormhole n300 chip: 12.5 GB/s per link and direction, 0.8 us per hop, 288 GB/s DRAM, 65.5 TFLOP/s FP16.
VIRTUAL = Machine("virtual", latency=0.8e-6, bandwidth=12.5e9, flops=65.5e12, memory_bandwidth=288e9)
