"""Reports of memory: while they are enabled, every program that a device runs for the first time leaves one."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from meshloom.ttnn.device.memory_view import dump_device_memory_state
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.calling import AFTER
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["DisableMemoryReports", "EnableMemoryReports"]

_seen: WeakKeyDictionary[MeshDevice, int] = WeakKeyDictionary()  # how many programs a device had when it was last asked


def EnableMemoryReports() -> None:
    """Write what the memory of a device looks like after every new program, under `generated/reports`.

    The files of the n-th program of a device begin with `program_n_`.
    """
    if _report not in AFTER:
        AFTER.append(_report)


def DisableMemoryReports() -> None:
    """Write no more reports."""
    if _report in AFTER:
        AFTER.remove(_report)


def _report(operation: Any, args: Any, kwargs: Any, output: Any) -> None:
    tensors = [each for each in (output, *args, *kwargs.values()) if isinstance(each, Tensor)]
    device = next((each.device() for each in tensors if each.device() is not None), None)
    if device is None:
        return
    count = device.num_program_cache_entries()
    if count > _seen.get(device, 0):
        dump_device_memory_state(device, f"program_{count}_")
    _seen[device] = count
