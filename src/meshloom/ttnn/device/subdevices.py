"""Parts of a device: sets of cores that run on their own, and who has which; and where dispatch runs.

Ops here run on all of a device at once, so a sub-device changes nothing of a result. What programs say about them is
kept and checked: ids that were never loaded, cores that two sub-devices claim, a manager that is removed while in use.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device.cores import CoreRangeSet
from meshloom.ttnn.device.fabric import FabricTensixConfig

__all__ = [
    "DispatchCoreAxis",
    "DispatchCoreConfig",
    "DispatchCoreType",
    "SubDevice",
    "SubDeviceId",
    "SubDeviceManagerId",
]


class DispatchCoreType(enum.Enum):
    """Which cores dispatch."""

    WORKER = 0
    ETH = 1

    __repr__ = enum.Enum.__str__


class DispatchCoreAxis(enum.Enum):
    """Whether dispatch takes a row or a column of cores."""

    ROW = 0
    COL = 1

    __repr__ = enum.Enum.__str__


class DispatchCoreConfig:
    """Where dispatch runs: by default on a row of workers.

    >>> DispatchCoreConfig().type, DispatchCoreConfig(axis=DispatchCoreAxis.COL).axis
    (DispatchCoreType.WORKER, DispatchCoreAxis.COL)
    """

    def __init__(
        self,
        type: DispatchCoreType | None = None,
        axis: DispatchCoreAxis | None = None,
        fabric_tensix_config: FabricTensixConfig | None = None,
    ) -> None:
        if type is DispatchCoreType.ETH and axis is DispatchCoreAxis.COL:
            raise OperandError("COL axis is not supported for ETH dispatch core type", fix="DispatchCoreAxis.ROW")
        self.type = type or DispatchCoreType.WORKER
        self.axis = axis or DispatchCoreAxis.ROW
        self.fabric_tensix_config = fabric_tensix_config or FabricTensixConfig.DISABLED

    def __repr__(self) -> str:
        return f"DispatchCoreConfig(type={self.type}, axis={self.axis})"


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
    """The ways to divide a device that were made, the one that is loaded, and whom dispatch waits for."""

    def __init__(self) -> None:
        self._managers: dict[SubDeviceManagerId, tuple[SubDevice, ...]] = {}
        self._numbers = count(1)
        self.loaded: SubDeviceManagerId | None = None
        self.stall_group: tuple[SubDeviceId, ...] = ()

    @property
    def ids(self) -> tuple[SubDeviceId, ...]:
        """The sub-devices that are loaded: one, where nothing was divided."""
        parts = 1 if self.loaded is None else len(self._managers[self.loaded])
        return tuple(map(SubDeviceId, range(parts)))

    def create(self, sub_devices: Sequence[SubDevice], local_l1_size: int) -> SubDeviceManagerId:
        """Remember a way to divide the device."""
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

    def load(self, manager: SubDeviceManagerId) -> None:
        """Divide the device that way."""
        self.loaded = self._known(manager)
        self.stall_group = ()

    def clear(self) -> None:
        """Do not divide the device."""
        self.loaded, self.stall_group = None, ()

    def remove(self, manager: SubDeviceManagerId) -> None:
        """Forget a way to divide the device."""
        if self._known(manager) == self.loaded:
            raise OperandError("Cannot remove active sub device manager", fix="clear_loaded_sub_device_manager() first")
        del self._managers[manager]

    def stall(self, ids: Sequence[SubDeviceId]) -> None:
        """Say whom dispatch waits for."""
        self.check(ids)
        if not ids:
            raise OperandError("Sub-device stall group must not be empty", fix="reset_sub_device_stall_group()")
        self.stall_group = tuple(ids)

    def check(self, ids: Sequence[SubDeviceId]) -> None:
        """An error for sub-devices that are not loaded."""
        for each in ids:
            if each not in self.ids:
                raise OperandError(f"there is no sub-device {each}", loaded=", ".join(map(str, self.ids)))

    def _known(self, manager: SubDeviceManagerId) -> SubDeviceManagerId:
        if manager not in self._managers:
            raise OperandError(f"Sub-device manager does not exist: {manager}")
        return manager
