"""The machine that runs virtual devices, as tables: what kernels on blocks take in this process, by kind and size.

A block is not a ring of devices. A reduction reads all of it and writes a part, a copy reads and writes, replicated
work is done once, and fresh memory costs page faults. No single bandwidth stands for all of these, so every kind of
kernel has a curve of its own, measured by `meshloom calibrate`. A host prices what runs here; it never chooses a plan.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshloom.errors import ArgumentError, FabricError, closest, expect
from meshloom.fabric import reading
from meshloom.fabric.reading import Document

Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: straight lines between measured points where both are drawn as powers of two.

    Below the first point a size costs what the first one does, beyond the last it costs in proportion.

    >>> curve = Curve(((1024, 1e-6), (4096, 4e-6)))
    >>> [f"{curve.seconds(size) * 1e6:.1f}" for size in (1, 1024, 2048, 4096, 8192)]
    ['1.0', '1.0', '2.0', '4.0', '8.0']
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(min(each) <= 0 for each in self.points):
            raise ArgumentError(
                f"a curve has points of growing sizes, all above 0, not {self.points!r:.80}",
                fix="give pairs of a size and its seconds",
            )

    def seconds(self, size: float) -> float:
        """What a size takes."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] * size / last[0]
        right = bisect.bisect_right(self.points, size, key=lambda point: point[0])
        (low, before), (high, after) = self.points[right - 1 : right + 1]
        part = math.log(size / low) / math.log(high / low)
        return before * math.exp(part * math.log(after / before))

    def residual(self) -> float:
        """How far the line between its neighbours lies from a measured point, at the median; 0 of one or two points.

        >>> Curve(((1.0, 1.0), (2.0, 2.2), (4.0, 4.0))).residual()  # doctest: +ELLIPSIS
        0.0909...
        """
        inner = range(1, len(self.points) - 1)
        missed = [Curve(self.points[:i] + self.points[i + 1 :]).seconds(self.points[i][0]) for i in inner]
        errors = [abs(said / self.points[i][1] - 1) for i, said in zip(inner, missed, strict=True)]
        return statistics.median(errors) if errors else 0.0


def weigh_neighbours(steps: Sequence[int], size: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """The steps below and above a size, each with its weight: the nearer by the logarithm, the heavier.

    >>> weigh_neighbours((2, 8, 32), 16), weigh_neighbours((2, 8, 32), 1)
    (((8, 0.5), (32, 0.5)), ((2, 1.0), (8, 0.0)))
    """
    size = min(max(size, steps[0]), steps[-1])
    right = min(bisect.bisect_right(steps, size), len(steps) - 1)
    low, high = steps[right - 1], steps[right]
    if low == high:  # a grid of one point
        return (low, 1.0), (high, 0.0)
    part = math.log(size / low) / math.log(high / low)
    return (low, 1 - part), (high, part)


@dataclass(frozen=True, slots=True)
class Products:
    """FLOP/s of matrix products by (m, k, n), measured on a grid of `steps`; between its points by their logarithms.

    >>> even = Products((16, 64), {(m, k, n): 2e9 for m in (16, 64) for k in (16, 64) for n in (16, 64)})
    >>> f"{even.seconds(1, (32, 32, 32)) * 1e6:.3f} us"
    '32.768 us'
    """

    steps: tuple[int, ...]
    rates: dict[Sizes, float] = field(hash=False)

    def seconds(self, batch: int, sizes: Sizes) -> float:
        """What a batch of products takes: starting one call, and for each what its product takes beyond that."""
        flops, least = 2.0 * math.prod(sizes), self.steps[0]
        alone, start = flops / self.rate(sizes), 2.0 * least**3 / self.rates[least, least, least]
        if batch == 1:
            return alone
        return start + batch * max(alone - start, flops / max(self.rates.values()))

    def rate(self, sizes: Sizes) -> float:
        """FLOP/s at a size: the eight points of the grid around it, each by how near it is."""
        sides = [weigh_neighbours(self.steps, size) for size in sizes]
        logarithm = 0.0
        for corner in itertools.product(*sides):
            weight = math.prod(part for _, part in corner)
            if weight:
                m, k, n = (step for step, _ in corner)
                logarithm += weight * math.log(self.rates[m, k, n])
        return math.exp(logarithm)


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine takes for kernels on blocks: curves by kind, products by dtype, seconds per call.

    `calls` has what a call costs besides its kernels: `op` for one of the global view, `again` for one like the call
    before and without gradients, `all_reduce` and its like for literal collectives, `kernel` for each kernel that
    backward starts by itself, `item` for each tensor of a list, and `fresh` for each byte of memory that comes from the
    system. `weights` says of single kernels how many times as long as their kind they take, beyond what starting one
    takes: a tanh is not a negation. `processes` has a curve per collective and number of processes, by the bytes of the
    value.
    """

    name: str
    threads: int
    curves: dict[str, Curve] = field(hash=False)
    products: dict[str, Products] = field(hash=False)
    calls: dict[str, float] = field(hash=False)
    weights: dict[str, float] = field(default_factory=dict, hash=False)
    processes: dict[tuple[str, int], Curve] = field(default_factory=dict, hash=False)

    def curve(self, kind: str) -> Curve:
        """The curve of a kind of kernel."""
        if kind not in self.curves:
            raise ArgumentError(f"host {self.name!r} has no curve for {kind!r}", fix=closest(kind, tuple(self.curves)))
        return self.curves[kind]

    def between(self, kind: str, processes: int) -> Curve:
        """The curve of a collective between processes."""
        found = self.processes.get((kind, processes))
        if found is None:
            known = ", ".join(f"{name} on {count}" for name, count in self.processes) or "nothing"
            raise ArgumentError(
                f"host {self.name!r} was not measured for {kind} on {processes} processes",
                known=known,
                fix=f"meshloom calibrate --processes {processes}",
            )
        return found

    def to_toml(self) -> str:
        """The tables as TOML."""
        lines = ["[host]", f"name = {reading.quote(self.name)}", f"threads = {self.threads}", "", "[host.calls]"]
        lines += [f"{what} = {seconds:.4g}" for what, seconds in self.calls.items()]
        if self.weights:
            lines += ["", "[host.weights]  # times the curve of its kind"]
            lines += [f'"{name}" = {weight:.4g}' for name, weight in self.weights.items()]
        lines += ["", "[host.curves]  # bytes that a kernel reads and writes, seconds"]
        for kind, curve in self.curves.items():
            lines += [f"# left out, a point is met by its neighbours within {curve.residual():.0%} at the median"]
            lines += [f'"{kind}" = {_show(curve.points)}']
        lines += ["", "[host.products]  # m, k, n, FLOP/s"]
        lines += [
            f"{dtype} = {_show((*sizes, rate) for sizes, rate in each.rates.items())}"
            for dtype, each in self.products.items()
        ]
        if self.processes:
            lines += ["", "[host.processes]  # bytes of the value, seconds"]
            lines += [f'"{kind} {count}" = {_show(curve.points)}' for (kind, count), curve in self.processes.items()]
        return "\n".join(lines) + "\n"


def _show(rows: Iterable[Sequence[float]]) -> str:
    return "[" + ", ".join("[" + ", ".join(f"{each:.5g}" for each in row) + "]" for row in rows) + "]"


def host_path(preset: str | os.PathLike[str], processes: int = 1) -> Path:
    """Where the tables lie that were measured together with a preset, by so many processes at once.

    >>> host_path("machines/here.toml").as_posix(), host_path("here.toml", 2).as_posix()
    ('machines/here.host.toml', 'here.host2.toml')
    """
    return Path(preset).with_suffix(f".host{processes if processes > 1 else ''}.toml")


def load_host(path: str | os.PathLike[str]) -> Host:
    """The tables in a file; an error that says how to make them if there is none."""
    expect("path", path, (str, os.PathLike), fix="give the path of a TOML file")
    file = Path(path)
    if not file.exists():
        raise FabricError(
            f"there are no tables of this machine at {file}",
            fix="meshloom calibrate, on a machine with nothing else to do",
        )
    return read_host(reading.read_text(file), str(file))


def read_host(text: str, file: str) -> Host:
    """A host from the TOML that `to_toml` writes.

    >>> curve, rates = Curve(((1024.0, 1e-6),)), {(16, 16, 16): 1e9}
    >>> products, between = {"f32": Products((16,), rates)}, {("all_reduce", 2): curve}
    >>> host = Host("here", 2, {"copy": curve}, products, {"op": 2e-6}, {"tanh": 9.5}, between)
    >>> read_host(host.to_toml(), "host.toml") == host
    True
    """
    document = Document(text, file)
    name, threads = document.take("host.name", reading.text), document.take("host.threads", reading.whole)
    calls = document.section("host.calls", reading.number)
    curves = document.section("host.curves", _read_curve)
    products = document.section("host.products", _read_products)
    weights = document.section("host.weights", reading.number, optional=True)
    processes = {}
    for key, curve in document.section("host.processes", _read_curve, optional=True).items():
        kind, _, count = key.rpartition(" ")
        if not (kind and count.isdecimal() and int(count) > 1):
            raise document.refusal(
                f"host.processes.{key}", "names no processes", fix='give keys such as "all_reduce 2"'
            )
        processes[kind, int(count)] = curve
    document.finish(_KEYS)
    return Host(name, threads, curves, products, calls, weights, processes)


_KEYS = tuple(f"host.{name}" for name in "name threads calls curves products weights processes".split())


def _read_products(value: object) -> Products:
    rows = _read_rows(value, 4)
    rates = {(int(m), int(k), int(n)): rate for m, k, n, rate in rows}
    steps = tuple(sorted({size for sizes in rates for size in sizes}))
    whole = all(size == int(size) for row in rows for size in row[:3])
    if not whole or rates.keys() != set(itertools.product(steps, repeat=3)):
        raise ValueError("m, k, n and FLOP/s for all m, k and n among the same whole numbers")
    return Products(steps, rates)


def _read_curve(value: object) -> Curve:
    points = tuple((size, seconds) for size, seconds in _read_rows(value, 2))
    if any(after[0] <= before[0] for before, after in itertools.pairwise(points)):
        raise ValueError("pairs of a size and its seconds, of growing sizes")
    return Curve(points)


def _read_rows(value: object, length: int) -> list[tuple[float, ...]]:
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == length for row in rows):
        raise ValueError(f"a list of lists of {length} numbers")
    return [tuple(reading.number(each) for each in row) for row in rows]
