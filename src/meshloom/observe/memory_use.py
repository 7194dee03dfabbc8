"""What one device holds over a step: by what it is held for, the peak, the line that causes it and what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshloom.cost.step import HELD_FOR, DeviceClass, Node, StepGraph, Storage
from meshloom.errors import OutOfMemoryError

SHOWN = 8  # tensors that an error names


@dataclass(frozen=True)
class Memory:
    """The memory of one device over a step, in bytes."""

    peak: int  # the most that is held at any time
    limit: float | None  # what the device has; None for no limit
    node: Node | None  # the call during which the peak is reached
    at_peak: Mapping[str, int]  # what it is held for at the peak; the sum is `peak`
    peaks: Mapping[str, int]  # the most that is held for each purpose at any time
    alive: tuple[Storage, ...]  # what is there at the peak, largest first
    timeline: tuple[MemoryPoint, ...]  # one per node of that class of devices, in program order
    device_class: int = 0  # the class of devices that needs most; all figures are of one of its devices

    @property
    def where(self) -> str:
        """The line of the program at which the peak is reached."""
        return self.node.where if self.node is not None else "unknown line"

    def check(self) -> None:
        """An error if a device does not have that much."""
        if self.limit is None or self.peak <= self.limit:
            return
        place = str(self.node) if self.node is not None else "the start"
        raise OutOfMemoryError(
            f"one device needs {show_bytes(self.peak)} and has {show_bytes(self.limit)}: {place}",
            held=", ".join(f"{what} {show_bytes(size)}" for what, size in self.at_peak.items() if size),
            largest="\n".join(f"{show_bytes(each.bytes):>9}  {describe(each)}" for each in self.alive[:SHOWN]),
            fix=self._advise(),
        )

    def _advise(self) -> str:
        """What would help most, by what most of the memory is held for."""
        most = max(self.at_peak, key=lambda what: self.at_peak[what])
        return _ADVICE[most] + "; dry_run(memory=math.inf) looks at the step without a limit"

    def __str__(self) -> str:
        of = f" of {show_bytes(self.limit)}" if self.limit is not None and self.limit < 1e30 else ""
        held = ", ".join(f"{what} {show_bytes(size)}" for what, size in self.at_peak.items() if size)
        return f"{show_bytes(self.peak)}{of}" + (f" at {self.node}: {held}" if self.node is not None else "")


_ADVICE = {
    "parameters": "shard parameters over more devices",
    "gradients": "shard parameters, and with them their gradients, over more devices",
    "optimizer state": "shard parameters, and with them the optimizer's state, over more devices",
    "activations": "use smaller batches per device, shard the sequence, or recompute with torch.utils.checkpoint",
    "gathered": "keep parameters where the calls want them, or recompute the calls that gather them",
    "temporaries": "use smaller batches per device or shard the tensors of that call",
    "inputs": "shard the inputs",
}


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The most that is held during one node."""

    node: int
    time: float  # when the node starts, in seconds
    bytes: int
    held: tuple[int, ...]  # by purpose, in the order of HELD_FOR, at that moment


def measure(graph: StepGraph, limit: float | None, starts: Mapping[int, float]) -> Memory:
    """The memory of a step, where it needs most; `starts` has the time at which each node starts."""
    found = [_measure(graph, each, limit, starts) for each in graph.classes]
    return max(found, key=lambda memory: memory.peak)


def _measure(graph: StepGraph, kind: DeviceClass, limit: float | None, starts: Mapping[int, float]) -> Memory:
    """That of one class of devices."""
    storages = [each for each in graph.storages if each.mesh in kind.meshes]
    lines = _lines(storages, graph.kernels)
    total = [sum(column) for column in zip(*lines, strict=True)]
    at = max(range(len(total)), key=lambda kernel: total[kernel])
    alive = sorted((each for each in storages if each.is_alive(at)), key=lambda each: -each.bytes)
    held = {what: line[at] for what, line in zip(HELD_FOR, lines, strict=True)}
    peaks = {what: max(line) for what, line in zip(HELD_FOR, lines, strict=True)}
    node = next((each for each in graph.nodes if each.kernel_range[0] <= at < each.kernel_range[1]), None)
    nodes = [each for each in graph.nodes if each.mesh in kind.meshes]
    points = _timeline(nodes, lines, total, starts)
    return Memory(total[at], limit, node, held, peaks, tuple(alive), points, kind.number)


def _lines(storages: Sequence[Storage], kernels: int) -> list[list[int]]:
    """For each purpose, the bytes that are held while each kernel runs."""
    changes = {what: [0] * (kernels + 2) for what in HELD_FOR}
    for each in storages:
        change = changes[each.held_for]
        change[max(each.made, 0)] += each.bytes
        if each.freed is not None:
            change[max(each.freed, each.made, 0) + 1] -= each.bytes
    return [list(accumulate(change))[: max(kernels, 1)] for change in changes.values()]


def _timeline(
    nodes: Sequence[Node], lines: Sequence[Sequence[int]], total: Sequence[int], starts: Mapping[int, float]
) -> tuple[MemoryPoint, ...]:
    found, time = [], 0.0
    for node in nodes:
        first, after = node.kernel_range
        time = max(time, starts.get(node.number, time))
        kernels = range(min(first, len(total) - 1), max(min(after, len(total)), min(first, len(total) - 1) + 1))
        at = max(kernels, key=lambda kernel: total[kernel])
        found.append(MemoryPoint(node.number, time, total[at], tuple(line[at] for line in lines)))
    return tuple(found)


def describe(storage: Storage) -> str:
    """A storage in one line: what it is and where it was made."""
    place = f", made at {storage.where}" if storage.where else ""
    return f"{storage.name} ({storage.held_for}{place})"


def show_bytes(size: float) -> str:
    """Bytes in the unit that suits them.

    >>> show_bytes(512), show_bytes(12e9), show_bytes(1.5e6)
    ('512 B', '12.0 GB', '1.50 MB')
    """
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            digits = 2 - (size >= 10 * unit) - (size >= 100 * unit)
            return f"{size / unit:.{digits}f} {name}"
    return f"{size:.0f} B"
