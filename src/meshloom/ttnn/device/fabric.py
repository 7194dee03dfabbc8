"""Links between devices: how the fabric is configured, which topology an axis can have, semaphores, delays.

Collectives give the same values over any links, so the configuration is kept, checked as the original checks it, and
decides what `get_usable_topology` and `get_num_links` answer and whether an open mesh is a ring or a torus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from meshloom.errors import ArgumentError, OperandError
from meshloom.fabric import preset
from meshloom.runtime.geometry import MeshType
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.device.cores import CoreRangeSet
from meshloom.ttnn.device.system import OPEN, System, is_line
from meshloom.ttnn.tensor.memory import BufferType, room_on

if TYPE_CHECKING:
    from meshloom.ttnn.device.mesh_device import MeshDevice
    from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "FabricConfig FabricManagerMode FabricNodeId FabricReliabilityMode FabricRouterConfig FabricTensixConfig "
    "FabricType FabricUDMMode GlobalSemaphore MeshId Topology apply_device_delay create_global_semaphore "
    "get_all_fabric_mesh_ids get_fabric_config get_global_semaphore_address get_num_links get_usable_topology "
    "reset_global_semaphore_value set_fabric_config"
).split()


class FabricConfig(Choice):
    """How devices are linked for collectives."""

    DISABLED, FABRIC_1D_NEIGHBOR_EXCHANGE, FABRIC_1D, FABRIC_1D_RING = range(4)
    FABRIC_2D, FABRIC_2D_TORUS_X, FABRIC_2D_TORUS_Y, FABRIC_2D_TORUS_XY, CUSTOM = range(4, 9)


class FabricReliabilityMode(Choice):
    """What happens where links are missing."""

    STRICT_INIT, RELAXED_INIT, DYNAMIC_RECONFIG = 0, 1, 2


class FabricTensixConfig(Choice):
    """Whether cores help to route."""

    DISABLED, MUX = 0, 1


class FabricUDMMode(Choice):
    """Whether routes are made for unified data movement."""

    DISABLED, ENABLED = 0, 1


class FabricManagerMode(Choice):
    """Who sets the fabric up and takes it down."""

    DEFAULT, ENABLED, INIT_FABRIC, TERMINATE_FABRIC = 0, 1, 2, 3


class FabricType(Choice):
    """Which axes are closed to rings."""

    MESH, TORUS_X, TORUS_Y, TORUS_XY = 0, 1, 2, 3


class Topology(Choice):
    """How a collective goes along an axis."""

    Linear, Ring, Mesh, Torus = 1, 2, 3, 4


@dataclass
class FabricRouterConfig:
    """Settings of routers."""

    max_packet_payload_size_bytes: int | None = None


class MeshId(int):
    """The number of a mesh among meshes.

    >>> MeshId(3), int(MeshId(3))
    (M3, 3)
    """

    def __repr__(self) -> str:
        return f"M{int(self)}"


@dataclass(frozen=True, slots=True, repr=False)
class FabricNodeId:
    """A device as the fabric knows it.

    >>> FabricNodeId(MeshId(0), 1)
    FabricNodeId(M0, D1)
    """

    mesh_id: MeshId
    chip_id: int

    def __repr__(self) -> str:
        return f"FabricNodeId({self.mesh_id!r}, D{self.chip_id})"


_config = FabricConfig.DISABLED  # how devices are linked now
_planes: int | None = None  # by how many planes at most


def set_fabric_config(
    config: FabricConfig,
    reliability_mode: FabricReliabilityMode = FabricReliabilityMode.STRICT_INIT,
    num_planes: int | None = None,
    fabric_tensix_config: FabricTensixConfig = FabricTensixConfig.DISABLED,
    fabric_udm_mode: FabricUDMMode = FabricUDMMode.DISABLED,
    fabric_manager_mode: FabricManagerMode = FabricManagerMode.DEFAULT,
    router_config: FabricRouterConfig | None = None,
) -> None:
    """Say how devices are linked, before any is opened; DISABLED may be said at any time."""
    global _config, _planes
    if not isinstance(config, FabricConfig):
        raise ArgumentError(f"set_fabric_config takes a FabricConfig, not {config!r}")
    if config is not FabricConfig.DISABLED and len(OPEN):
        raise OperandError(
            f"SetFabricConfig({config.name}) is not allowed while devices are still open: "
            + ", ".join(map(repr, OPEN)),
            fix="call it before open_mesh_device, or close them first",
        )
    _config, _planes = config, num_planes
    import_module("meshloom.ttnn.ops.repeats").forget()  # which collectives are refused depends on it


def get_fabric_config() -> FabricConfig:
    return _config


def get_all_fabric_mesh_ids() -> list[MeshId]:
    """The meshes that the fabric links: one."""
    return [MeshId(0)]


def check_opening(system: System, ids: Sequence[int]) -> None:
    """An error if the fabric is on and not all devices of the system are opened: routes go through all of them."""
    idle = sorted(set(system.ids) - set(ids))
    if _config is not FabricConfig.DISABLED and system.count is not None and idle:
        raise OperandError(
            f"Fabric is being used but Device {idle[0]} is not active: {len(ids)} of {len(system.ids)} devices are "
            "opened",
            fix="open all of them, then mesh_device.create_submesh(...)",
        )


_KINDS = {FabricConfig.FABRIC_1D_RING: MeshType.Ring, FabricConfig.FABRIC_2D_TORUS_XY: MeshType.Torus}
_CLOSED = {  # axes that the configuration closes to rings: X is along rows
    FabricConfig.FABRIC_1D_RING: (0, 1),
    FabricConfig.FABRIC_2D_TORUS_X: (1,),
    FabricConfig.FABRIC_2D_TORUS_Y: (0,),
    FabricConfig.FABRIC_2D_TORUS_XY: (0, 1),
}


def mesh_type_of(given: MeshType | None) -> MeshType | None:
    """The type that a mesh is opened with: as it was asked for, else by the configuration."""
    return given if given is not None else _KINDS.get(_config)


def get_usable_topology(tensor: Tensor, topology: Topology | None = None, cluster_axis: int | None = None) -> Topology:
    """The topology that a collective can have there: a ring needs a way back and more than two devices."""
    device = tensor.device()
    if device is None:
        raise OperandError("get_usable_topology needs a tensor that is on a device", fix="ttnn.to_device(tensor, mesh)")
    shape = tuple(device.shape)
    asked = topology or (Topology.Ring if _config in _CLOSED else Topology.Linear)
    if asked not in (Topology.Ring, Topology.Torus):
        return asked
    if cluster_axis is None:
        closes, count = all(is_closed(device, axis) for axis in range(len(shape))), device.get_num_devices()
    else:
        closes, count = is_closed(device, cluster_axis), shape[cluster_axis]
    if count > 2 and closes:
        return asked
    return Topology.Linear if asked is Topology.Ring else Topology.Mesh


def is_closed(device: MeshDevice, axis: int) -> bool:
    """Whether there is a way back from the last device along an axis to the first: by type, configuration or cables."""
    if device.mesh_type is not None:
        return device.mesh_type.kinds(device.shape)[axis] == "ring"
    system = device.system
    if is_line(device.shape):  # all devices of two rows, laid along the snake, make a ring
        whole = device.get_num_devices() == len(system.ids)
        return whole and len(system.shape) == 2 and system.shape[0] == 2
    if axis in _CLOSED.get(_config, ()):
        return True
    spans = len(device.shape) == len(system.shape) and device.shape[axis] == system.shape[axis]
    return system.preset is not None and spans and preset(system.preset).kinds[axis] == "ring"


def get_num_links(mesh_device: MeshDevice, cluster_axis: int | None = None) -> int:
    """How many links there are between neighbours along an axis; the fewest of all axes without one."""
    system = mesh_device.system
    lanes = (1,) * mesh_device.shape.dims() if system.preset is None else preset(system.preset).lanes
    found = min(lanes) if cluster_axis is None or cluster_axis >= len(lanes) else lanes[cluster_axis]
    return found if _planes is None else min(found, _planes)


class GlobalSemaphore:
    """A counter in the memory of every device of a mesh, at one address."""

    def __init__(self, device: MeshDevice, cores: CoreRangeSet, value: int, kind: BufferType) -> None:
        self.device, self.cores, self.value = device, cores, _check_count(value)
        self._room = room_on(device, kind, 4, "global semaphore", per_bank=True)

    @property
    def address(self) -> int:
        """Where it is, on all devices and cores."""
        return self._room.region.address

    def add(self, number: int = 1) -> int:
        """Count up, and tell the new value."""
        self.value = _check_count(self.value + number)
        return self.value

    def __repr__(self) -> str:
        return f"GlobalSemaphore(value={self.value}, address={self.address})"


def _check_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ArgumentError(f"a semaphore counts from 0 to 2^32 - 1, not {value!r}")
    return value


def create_global_semaphore(
    mesh_device: MeshDevice, cores: CoreRangeSet, initial_value: int, buffer_type: BufferType = BufferType.L1
) -> GlobalSemaphore:
    """A counter on every device of a mesh."""
    mesh_device.runtime.check_open()
    if not isinstance(cores, CoreRangeSet):
        raise ArgumentError(f"create_global_semaphore takes a CoreRangeSet, not {cores!r}")
    return GlobalSemaphore(mesh_device, cores, initial_value, buffer_type)


def get_global_semaphore_address(global_semaphore: GlobalSemaphore) -> int:
    return global_semaphore.address


def reset_global_semaphore_value(global_semaphore: GlobalSemaphore, reset_value: int) -> None:
    """Set a counter on all devices."""
    global_semaphore.value = _check_count(reset_value)


def apply_device_delay(
    mesh_device: MeshDevice, delays: Sequence[Sequence[int]], *, subdevice_id: object = None
) -> None:
    """Make devices late by so many cycles each. Values do not depend on it, so that it is checked and nothing waits."""
    mesh_device.runtime.check_open()
    shape = tuple(mesh_device.shape)
    found = (len(delays), *{len(row) for row in delays})
    if found != shape:
        raise OperandError(f"delays of shape {found} for a mesh of shape {shape}", fix="a row of counts for every row")
    if not all(isinstance(each, int) and each >= 0 for row in delays for each in row):
        raise ArgumentError("delays are counts of cycles")
