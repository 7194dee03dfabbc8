"""Parts of a device: sets of cores that run on their own, and who has which; and where dispatch runs.

Ops here run on all of a device at once, so a sub-device changes nothing of a result. What programs say about them is
kept and checked: ids that were never loaded, cores that two sub-devices claim, a manager that is removed while in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.device.cores import CoreRangeSet
from meshloom.ttnn.device.fabric import FabricTensixConfig

__all__ = "DispatchCoreAxis DispatchCoreConfig DispatchCoreType SubDevice SubDeviceId SubDeviceManagerId".split()


class DispatchCoreType(Choice):
    """Which cores dispatch."""

    WORKER, ETH = 0, 1


class DispatchCoreAxis(Choice):
    """Whether dispatch takes a row or a column of cores."""

    ROW, COL = 0, 1


@dataclass
class DispatchCoreConfig:
    """Where dispatch runs: by default on a row of workers.

    >>> DispatchCoreConfig().type, DispatchCoreConfig(axis=DispatchCoreAxis.COL).axis
    (DispatchCoreType.WORKER, DispatchCoreAxis.COL)
    """

    type: DispatchCoreType | None = None
    axis: DispatchCoreAxis | None = None
    fabric_tensix_config: FabricTensixConfig | None = None

    def __post_init__(self) -> None:
        if self.type is DispatchCoreType.ETH and self.axis is DispatchCoreAxis.COL:
            raise OperandError("COL axis is not supported for ETH dispatch core type", fix="DispatchCoreAxis.ROW")
        self.type, self.axis = self.type or DispatchCoreType.WORKER, self.axis or DispatchCoreAxis.ROW
        self.fabric_tensix_config = self.fabric_tensix_config or FabricTensixConfig.DISABLED


@dataclass(frozen=True, slots=True)
class SubDeviceId:
    """The number of a sub-device among those that are loaded.

    >>> SubDeviceId(1) == SubDeviceId(1)
    True
    """

    id: int

    def __int__(self) -> int:
        return self.id


@dataclass(frozen=True, slots=True)
class SubDeviceManagerId:
    """The number of a way to divide a device."""

    id: int


class SubDevice:
    """Cores that run on their own: of workers, and of Ethernet if there is a second set."""

    def __init__(self, cores: Sequence[CoreRangeSet]) -> None:
        self.cores = tuple(cores)
        if not self.cores or not all(isinstance(each, CoreRangeSet) for each in self.cores):
            raise ArgumentError(f"SubDevice takes a list of CoreRangeSets, not {cores!r}")

    def __repr__(self) -> str:
        return f"SubDevice({list(self.cores)})"


class SubDevices:
    """A device that can be divided: the ways to, the one that is loaded, and whom dispatch waits for."""

    def __init__(self) -> None:
        self._managers: dict[SubDeviceManagerId, tuple[SubDevice, ...]] = {}
        self._numbers = count(1)
        self._loaded: SubDeviceManagerId | None = None
        self._stall_group: tuple[SubDeviceId, ...] = ()

    def get_sub_device_ids(self) -> list[SubDeviceId]:
        """The parts that every device is divided into: one, where nothing was divided."""
        return list(map(SubDeviceId, range(1 if self._loaded is None else len(self._managers[self._loaded]))))

    def create_sub_device_manager(self, sub_devices: Sequence[SubDevice], local_l1_size: int) -> SubDeviceManagerId:
        """Remember a way to divide every device."""
        if local_l1_size < 0:
            raise ArgumentError(f"local_l1_size={local_l1_size}")
        taken = CoreRangeSet()
        for each in sub_devices:
            mine = each.cores[0]
            if taken.num_cores() + mine.num_cores() != taken.merge(mine).num_cores():
                raise OperandError(f"SubDevices specified for SubDeviceManager intersect: {mine} and {taken}")
            taken = taken.merge(mine)
        made = SubDeviceManagerId(next(self._numbers))
        self._managers[made] = tuple(sub_devices)
        return made

    def load_sub_device_manager(self, sub_device_manager_id: SubDeviceManagerId) -> None:
        """Divide every device that way."""
        self._loaded, self._stall_group = self._check_manager(sub_device_manager_id), ()

    def clear_loaded_sub_device_manager(self) -> None:
        """Divide no device."""
        self._loaded, self._stall_group = None, ()

    def remove_sub_device_manager(self, sub_device_manager_id: SubDeviceManagerId) -> None:
        """Forget a way to divide devices."""
        if self._check_manager(sub_device_manager_id) == self._loaded:
            raise OperandError("Cannot remove active sub device manager", fix="clear_loaded_sub_device_manager() first")
        del self._managers[sub_device_manager_id]

    def set_sub_device_stall_group(self, sub_device_ids: Sequence[SubDeviceId]) -> None:
        """Say which parts dispatch waits for."""
        self.check_sub_devices(sub_device_ids)
        if not sub_device_ids:
            raise OperandError("Sub-device stall group must not be empty", fix="reset_sub_device_stall_group()")
        self._stall_group = tuple(sub_device_ids)

    def reset_sub_device_stall_group(self) -> None:
        """Dispatch waits for all parts."""
        self._stall_group = ()

    def check_sub_devices(self, ids: Sequence[SubDeviceId]) -> None:
        """An error for sub-devices that are not loaded."""
        known = self.get_sub_device_ids()
        for each in ids:
            if each not in known:
                raise OperandError(f"there is no sub-device {each}", loaded=", ".join(map(str, known)))

    def _check_manager(self, manager: SubDeviceManagerId) -> SubDeviceManagerId:
        if manager not in self._managers:
            raise OperandError(f"Sub-device manager does not exist: {manager}")
        return manager
