"""The figures of this machine, measured: what a call takes on average, without the few that other work held up.

The devices are virtual and share the machine. All of them compute at once, in one call on the block, so each has its
share of memory, bandwidth and FLOP/s. Latency and bandwidth of links are those with which the price of a collective
comes nearest to the time that it takes on the block, by least squares, for every mesh axis.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from meshloom.collectives import (
    KINDS,
    Collective,
    all_gather as gather,  # on tensors
    all_reduce as reduce,
)
from meshloom.cost import price
from meshloom.fabric import Machine, Preset
from meshloom.mesh import Mesh
from meshloom.processes.exchange import exchange
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import open_mesh, randn

Tell = Callable[[str, int, int], None]
FIT_ROUNDS = 30
PASSES = 3  # in which everything is timed once; the best pass counts, so that a disturbance has to come back to be seen
# What a figure is where the times show none: a nanosecond, a petabyte per second.
LEAST_LATENCY, LEAST_PER_BYTE = 1e-9, 1e-15
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: seconds per figure, and sizes in bytes or rows."""

    seconds: float
    copy: int
    matmul: int
    collectives: tuple[int, ...]


FULL = Effort(seconds=0.6, copy=256 << 20, matmul=1024, collectives=(64 << 10, 32 << 20))
QUICK = Effort(seconds=0.01, copy=1 << 20, matmul=64, collectives=(4 << 10, 256 << 10))


@dataclass(frozen=True, slots=True)
class Point:
    """One collective of a value of `size` bytes over a mesh axis of some devices, and the seconds it took."""

    kind: str
    devices: int
    size: int
    seconds: float

    def price(self, machine: Machine) -> float:
        """The seconds that a machine's figures give."""
        held = (self.size, self.size) if self.kind == "all_reduce" else (self.size // self.devices, self.size)
        size = KINDS[self.kind].size(*held, self.devices)
        return price(Collective(self.kind, "d", self.devices, size, "f32", ()), machine)


@dataclass(frozen=True, slots=True)
class Found:
    """A measured machine: its preset, and the seconds that one small op on a block takes."""

    preset: Preset
    op: float
    points: tuple[tuple[Point, ...], ...]
    others: float | None  # the part of all cores that other work took meanwhile; None where nobody can tell

    def to_toml(self) -> str:
        """The preset as TOML; comments say where its figures come from."""
        lines = [
            "# Measured by `meshloom calibrate`; the devices are virtual and share one machine.",
            "# links: least squares of collectives on the block, per mesh axis; device: its share of a memory copy",
            "# (bytes read and written) and of a square matmul.",
            f"# One small op on a block of all devices takes {self.op * 1e6:.2f} us.",
            f"# Other work took {_percent(self.others)} of the cores meanwhile.",
        ]
        lines += [
            f"# axis {axis}: {point.kind} of {point.size} B over {point.devices} took {point.seconds * 1e6:.1f} us"
            for axis, points in enumerate(self.points)
            for point in points
        ]
        return "\n".join(lines) + "\n" + self.preset.to_toml()


def measure(shape: tuple[int, ...], effort: Effort = FULL, tell: Tell = lambda what, number, total: None) -> Found:
    """Every figure of a preset for a mesh of virtual devices on this machine."""
    total = 2 + len(DTYPES) + len(shape)
    devices, mesh, clock = math.prod(shape), open_mesh(shape), Clock.read()
    tell("memory copy", 1, total)
    copied = memory_bandwidth(effort)
    tell(f"an op on a block of {devices} devices", 2, total)
    op = op_seconds(mesh, effort)
    flops = []
    for number, name in enumerate(DTYPES, start=3):
        tell(f"matmul {name}", number, total)
        flops.append((name, matmul_flops(name, effort) / devices))
    points = []
    for axis, name in enumerate(mesh.axes):
        tell(f"collectives over {shape[axis]} devices", 3 + len(DTYPES) + axis, total)
        points.append(collective_points(mesh, name, effort))
    fits = [fit(each) for each in points]
    made = Preset(
        name="this-machine",
        title=f"this machine, shared by {devices} virtual devices",
        shape=shape,
        kinds=("ring",) * len(shape),
        lanes=(1,) * len(shape),
        latency=tuple(latency for latency, _ in fits),
        bandwidth=tuple(bandwidth for _, bandwidth in fits),
        efficiency=1.0,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices,
        memory_bandwidth=copied / devices,
        flops=tuple(flops),
    )
    return Found(made, op, tuple(points), clock.others())


def _percent(part: float | None) -> str:
    return "an unknown part" if part is None else f"{part:.0%}"


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since some time: of the wall, of this process on all its threads, and of all work on all cores."""

    wall: float
    own: float
    busy: float | None

    @classmethod
    def read(cls) -> Clock:
        """Now; the cores' time is Linux's, in ticks of user, nice, system, idle, waiting, interrupts and stolen."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                user, nice, system, _, _, *rest = map(int, file.readline().split()[1:9])
            busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            busy = None
        return cls(time.perf_counter(), time.process_time(), busy)

    def others(self) -> float | None:
        """The part of all cores that other work took since then."""
        now = Clock.read()
        if self.busy is None or now.busy is None or now.wall <= self.wall:
            return None
        taken = now.busy - self.busy - (now.own - self.own)
        return max(0.0, taken / (now.wall - self.wall) / (os.cpu_count() or 1))


def typical(times: Sequence[float]) -> float:
    """What a call takes on average, the slowest tenth of the calls left out.

    The average and not the least: a step of many kernels takes the sum of their averages. The sum of their least times
    is no time of the step, since no step meets all of its kernels at their best.

    >>> typical([1.0, 2.0] * 4 + [3.0, 500.0])  # another program had the core in one of ten calls
    1.6666666666666667
    """
    return statistics.fmean(sorted(times)[: len(times) - len(times) // 10])


def time_for(work: Callable[[], object], seconds: float) -> float:
    """The typical seconds of a call, of as many as fit into `seconds`; one at least, after one to warm up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return typical(times)


def time_rounds(work: Callable[[], object], rounds: int) -> float:
    """The typical seconds of so many calls, after one to warm up: for what processes do together, each as often."""
    work()
    return typical(timeit.repeat(work, number=1, repeat=rounds))


Reading = TypeVar("Reading")
AGREE = 1.05  # how far apart the two best readings of a point may lie
MORE = 2 * PASSES  # passes at most over the points that did not repeat


def read_in_passes(
    reads: Sequence[Callable[[], Reading]],
    seconds_of: Callable[[Reading], float],
    tell: Callable[[int, int], None] = lambda turn, number: None,
    passes: int = PASSES,
    more: int = MORE,
) -> list[list[Reading]]:
    """The readings of some points: pass after pass over all of them, and again of those that did not repeat.

    Processes that measure together all call it; a point that did not repeat on one of them is read again by all.
    """
    found: list[list[Reading]] = [[] for _ in reads]
    for turn, (number, read) in itertools.product(range(passes), enumerate(reads)):
        tell(turn, number)
        found[number].append(read())
    tell(passes, 0)
    for _ in range(more):
        repeated = exchange("measure", [repeats([*map(seconds_of, each)]) for each in found])
        if all(map(all, repeated)):
            break
        for readings, read, each in zip(found, reads, zip(*repeated, strict=True), strict=True):
            if not all(each):
                readings.append(read())
    return found


def repeats(seconds: Sequence[float]) -> bool:
    """Whether the best of some readings was met twice.

    >>> repeats([1.0, 5.0, 1.04]), repeats([1.0, 5.0, 1.5])
    (True, False)
    """
    best, second = sorted(seconds)[:2]
    return second <= AGREE * best


def memory_bandwidth(effort: Effort) -> float:
    """Bytes per second, read and written, of a copy into memory that is there."""
    source, target = (torch.ones(effort.copy // 4) for _ in range(2))
    return 2 * effort.copy / time_for(lambda: target.copy_(source), effort.seconds)


def op_seconds(mesh: Mesh, effort: Effort) -> float:
    """Seconds of an add of 32x32 per device."""
    a, b = [cast(Any, randn(32 * mesh.size, 32, mesh=mesh)) for _ in range(2)]
    return time_for(lambda: a + b, effort.seconds)


def matmul_flops(name: str, effort: Effort) -> float:
    """FLOP/s of a square matmul in a dtype."""
    size = effort.matmul
    a, b = (torch.randn(size, size).to(DTYPES[name]) for _ in range(2))
    return 2 * size**3 / time_for(lambda: a @ b, effort.seconds)


def collective_points(mesh: Mesh, axis: str, effort: Effort) -> tuple[Point, ...]:
    """All-reduce and all-gather over an axis, directly on the block, at each size."""
    return tuple(
        collective_point(kind, mesh, axis, size, effort.seconds)
        for kind in ("all_reduce", "all_gather")
        for size in effort.collectives
    )


def collective_point(kind: str, mesh: Mesh, axis: str, size: int, seconds: float) -> Point:
    """The time of one collective of a value of `size` bytes, into memory that is there."""
    devices = mesh.shape[mesh.axis(axis)]
    work = collective_work(kind, mesh, axis, size)
    return Point(kind, devices, size, time_for(work, seconds))


def collective_work(kind: str, mesh: Mesh, axis: str, size: int) -> Callable[[], Tensor]:
    """A call that reduces or gathers float32 values of `size` bytes over an axis, into memory that is there."""
    devices = mesh.shape[mesh.axis(axis)]
    held = size // 4 if kind == "all_reduce" else max(1, size // 4 // devices)
    x = randn(held * mesh.size, mesh=mesh, placements=", ".join(["S(0)"] * mesh.ndim))
    if kind == "all_reduce":
        room = reduce(x, axis)
        return lambda: reduce(x, axis, out=room)
    room = gather(x, 0, axis)
    return lambda: gather(x, 0, axis, out=room)


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """The latency and bandwidth, above zero, whose prices are nearest to the times by ratio: half counts as twice.

    A price is `steps * latency + bytes / bandwidth`: steps are the price at a latency of 1 and no time per byte. Least
    squares of (price - time) / sqrt(price * time), with the prices of the round before in the root.

    >>> exact = Machine("m", latency=1e-6, bandwidth=1e9, flops=1.0, memory_bandwidth=1.0)
    >>> made = [Point("all_reduce", 8, size, Point("all_reduce", 8, size, 0).price(exact)) for size in (800, 80000)]
    >>> latency, bandwidth = fit(made)
    >>> f"{latency:.2e} {bandwidth:.2e}"
    '1.00e-06 1.00e+09'
    """
    by_step = Machine("steps", latency=1.0, bandwidth=1e30, flops=1.0, memory_bandwidth=1.0)
    by_byte = Machine("bytes", latency=1e-30, bandwidth=1.0, flops=1.0, memory_bandwidth=1.0)
    rows = [(each.price(by_step), each.price(by_byte), each.seconds) for each in points]
    priced = [seconds for _, _, seconds in rows]
    for _ in range(FIT_ROUNDS):
        roots = [math.sqrt(price * seconds) for price, (_, _, seconds) in zip(priced, rows, strict=True)]
        latency, per_byte = _least([(s / r, b / r, t / r) for (s, b, t), r in zip(rows, roots, strict=True)])
        priced = [s * latency + b * per_byte for s, b, _ in rows]
    return latency, 1 / per_byte


def _least(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The x and y above zero with the least squares of `s * x + b * y - t`."""
    ss, sb, bb = sum(s * s for s, _, _ in rows), sum(s * b for s, b, _ in rows), sum(b * b for _, b, _ in rows)
    st, bt = sum(s * t for s, _, t in rows), sum(b * t for _, b, t in rows)
    determinant = ss * bb - sb * sb
    x, y = st * bb - bt * sb, bt * ss - st * sb
    if determinant <= 0 or x <= 0:
        return LEAST_LATENCY, bt / bb
    if y <= 0:
        return st / ss, LEAST_PER_BYTE
    return x / determinant, y / determinant
