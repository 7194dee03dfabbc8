"""What the memory of a device looks like: banks, what is in use, and every piece of it."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshloom.errors import ArgumentError
from meshloom.runtime.memory import Allocator
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.tensor.memory import BufferType

__all__ = ["MemoryView", "dump_device_memory_state", "get_memory_view"]

REPORTS = Path("generated") / "reports"  # in the working directory, as the original has it


@dataclass(frozen=True)
class MemoryView:
    """One kind of memory of a device, in bytes of one bank; all banks look alike."""

    num_banks: int
    total_bytes_per_bank: int
    total_bytes_allocated_per_bank: int
    total_bytes_free_per_bank: int
    largest_contiguous_bytes_free_per_bank: int
    block_table: list[dict[str, str]] = field(repr=False)


def get_memory_view(device: MeshDevice, buffer_type: BufferType) -> MemoryView:
    """What one kind of memory of the first device looks like: tensors lie at one address on all of them."""
    if not isinstance(buffer_type, BufferType):
        raise ArgumentError(f"get_memory_view takes a BufferType, not {buffer_type!r}")
    memory = device.runtime.system.memory["dram" if buffer_type in (BufferType.DRAM, BufferType.TRACE) else "l1"]
    number = device.runtime.numbers[0]
    usage = memory.usage()[number]
    return MemoryView(
        memory.banks,
        memory.bank_size,
        usage.used // memory.banks,
        usage.free // memory.banks,
        usage.largest_free // memory.banks,
        _pieces(memory, number),
    )


def _pieces(memory: Allocator, number: int) -> list[dict[str, str]]:
    """Every piece of a bank by address, in use or not."""
    found, end = [], 0
    for region in memory.live():
        if region.mask >> number & 1:
            found += _piece(end, region.address, "no", "") + _piece(region.address, region.end, "yes", region.owner)
            end = region.end
    return found + _piece(end, memory.bank_size, "no", "")


def _piece(start: int, end: int, allocated: str, owner: str) -> list[dict[str, str]]:
    if start == end:
        return []
    return [{"address": str(start), "size": str(end - start), "allocated": allocated, "owner": owner}]


def dump_device_memory_state(device: MeshDevice, prefix: str = "") -> None:
    """Write what the memory of a device looks like to tables under `generated/reports`."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    views = {kind.name: asdict(get_memory_view(device, kind)) for kind in (BufferType.DRAM, BufferType.L1)}
    blocks = [{"memory": kind, **each} for kind, view in views.items() for each in view.pop("block_table")]
    _write(f"{prefix}memory_usage_summary.csv", [{"memory": kind, **view} for kind, view in views.items()])
    _write(f"{prefix}memory_blocks.csv", blocks)


def _write(name: str, rows: list[dict[str, str]]) -> None:
    with open(REPORTS / name, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
