"""The mesh device as TTNN spells it, around the runtime's: opening, closing, grids, submeshes, program cache."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from meshloom import runtime
from meshloom.errors import ArgumentError, OperandError, TraceError, expect
from meshloom.processes import join
from meshloom.processes.discovery import Scope
from meshloom.processes.splitting import bound_ids
from meshloom.runtime.device import MeshDevice as RuntimeDevice
from meshloom.runtime.geometry import MeshShape, MeshType
from meshloom.runtime.memory import Usage
from meshloom.runtime.opening import node_driver, read_mesh_type, sorted_out
from meshloom.runtime.virtual import VirtualDriver
from meshloom.settings import read as read_setting
from meshloom.ttnn.device import fabric
from meshloom.ttnn.device.cores import CoreCoord, CoreGrid
from meshloom.ttnn.device.fabric import FabricNodeId, MeshId
from meshloom.ttnn.device.geometry import MeshDeviceView
from meshloom.ttnn.device.subdevices import DispatchCoreConfig, SubDevices
from meshloom.ttnn.device.system import OPEN, Arch, System, get_system, is_bound, is_line, snake, tell
from meshloom.ttnn.tensor.boxes import grid_of

__all__ = (
    "CloseDevice CloseDevices CreateDevice CreateDevices Device GetDefaultDevice MeshDevice ReadDeviceProfiler "
    "SetDefaultDevice close_device close_mesh_device create_mesh_device "
    "get_max_worker_l1_unreserved_size is_blackhole is_wormhole_b0 manage_device "
    "open_device open_mesh_device"
).split()

MAXIMUM_QUEUES = 2
WORKERS = 18  # where the cores that kernels see begin, in both directions
RACES = "MESHLOOM_CHECK"
_default: weakref.ref[MeshDevice] | None = None


class MeshDevice(SubDevices):
    """A grid of devices; what it does, `runtime` does. Programs may set attributes of their own on it.

    >>> with create_mesh_device(MeshShape(2, 4)) as mesh:
    ...     mesh, mesh.get_num_devices(), mesh.compute_with_storage_grid_size()
    (MeshDevice(2x4 grid, 8 devices), 8, 8-8)
    """

    def __init__(
        self,
        device: RuntimeDevice,
        system: System,
        *,
        options: Mapping[str, Any] | None = None,
        parent: MeshDevice | None = None,
    ) -> None:
        super().__init__()
        self.runtime, self.system, self.parent = device, system, parent
        self.chip_name = device.system.chip.name
        self.options = dict(options or {})  # sizes of regions, dispatch: as they were asked for
        self._submeshes: weakref.WeakSet[MeshDevice] = weakref.WeakSet()
        self._opened = tuple(device.shape), tuple(device.mesh.device_ids)
        self._programs: set[Hashable] | frozenset[Hashable] = set()
        self._caches = self._misses_allowed = True
        self.reshaped = False  # tensors may be older than its shape
        self.watched = self.is_watched()  # ops say what they use, or wait for a trace: `queues.used`
        OPEN.add(self)
        tell("opened", self)

    def is_watched(self) -> bool:
        """Whether ops say what they use: its shape has changed, races are looked for, every call is compared with those
        of the other processes, or the cards have memory of their own."""
        is_compared = self.runtime.mesh.is_split and runtime.state.checked
        if self.runtime.lease.store is not None:
            return True
        return self.reshaped or is_compared or self.runtime.system.races is not None

    # the grid

    @property
    def shape(self) -> MeshShape:
        return self.runtime.shape

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape as tensors on it have it: where processes split the mesh, it knows how."""
        return grid_of(self.runtime.mesh)

    @property
    def mesh_type(self) -> MeshType | None:
        """How the devices are linked, if that was said."""
        return self.runtime.mesh_type

    def id(self) -> int:
        """Its number: meshes and submeshes are counted as they are made."""
        return self.runtime.id

    def get_num_devices(self) -> int:
        return self.runtime.num_devices

    def get_device_ids(self, scope: Scope = "global") -> list[int]:
        """The ids of its devices, row-major: of all, or with `scope="local"` of those that this process holds."""
        return self.runtime.get_device_ids(scope)

    def get_device_id(self, coord: Sequence[int]) -> int:
        """The id of the device at a coordinate."""
        return self.get_device_ids()[self._place(coord)]

    def get_fabric_node_id(self, coord: Sequence[int]) -> FabricNodeId:
        """The device at a coordinate as the fabric knows it: by its place in the system."""
        return FabricNodeId(MeshId(self.get_system_mesh_id()), self.system.ids.index(self.get_device_id(coord)))

    def _place(self, coord: Sequence[int]) -> int:
        place = tuple(coord)
        if len(place) != len(self.shape) or not all(0 <= c < size for c, size in zip(place, self.shape, strict=True)):
            raise OperandError(f"Device ID requested for MeshCoord {place} not found.", mesh=self)
        return self.runtime.mesh.index(place)

    def get_view(self) -> MeshDeviceView:
        return MeshDeviceView(self)

    def virtual_to_physical(self, coord: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The physical device of a coordinate and the lane on it; more than one lane where `physical=` is smaller."""
        return self.runtime.virtual_to_physical(tuple(coord))

    def physical_to_virtual(self, coord: Sequence[int], lane: int = 0) -> tuple[int, ...]:
        """The coordinate of a lane of a physical device: the inverse of `virtual_to_physical`."""
        return self.runtime.mesh.physical_to_virtual(tuple(coord), lane)

    def get_system_mesh_id(self) -> int:
        """The number of the system that it is a part of: there is one."""
        return 0

    def reshape(self, new_shape: Sequence[int]) -> None:
        """The same devices in another shape: a line goes along the snake, as a line of the system does.

        Tensors of before can be read, and are refused by ops: they lie as the mesh was.
        """
        sizes = tuple(new_shape)
        if runtime.state.capture is not None:
            raise TraceError("a mesh cannot be reshaped during trace capture", fix="do it before or after the capture")
        if math.prod(sizes) != self.get_num_devices():
            raise OperandError(
                f"New shape must have the same number of devices as current shape: {MeshShape(*sizes)} and {self.shape}"
            )
        wanted = self._ids_in(sizes)
        now = self.get_device_ids()
        self.runtime.reshape(*sizes, order=[now.index(each) for each in wanted])
        self.reshaped = self.watched = True

    def _ids_in(self, sizes: tuple[int, ...]) -> Sequence[int]:
        """The devices row-major in another shape."""
        shape, ids = self._opened
        if sizes == shape:
            return ids
        if is_line(sizes):
            return ids if is_line(shape) else [ids[place] for place in snake(shape)]
        whole = self.system
        if sorted(ids) == sorted(whole.ids) and len(sizes) == len(whole.shape):
            return whole.devices(sizes)
        if whole.count is None:  # virtual devices that nobody gave a shape are linked as one likes
            return ids
        raise OperandError(
            f"{self} cannot be reshaped to {MeshShape(*sizes)}: its devices are not linked that way",
            fix=f"a line, or {MeshShape(*shape)}",
        )

    # submeshes

    def create_submesh(self, submesh_shape: Sequence[int], offset: Sequence[int] | None = None) -> MeshDevice:
        """A mesh of some of the devices, with queues of its own."""
        sizes = tuple(submesh_shape)
        start = tuple(offset) if offset is not None else (0,) * len(sizes)
        self._check_submesh(sizes, start)
        made = MeshDevice(self.runtime.create_submesh(sizes, start), self.system, options=self.options, parent=self)
        self._submeshes.add(made)
        return made

    def _check_submesh(self, sizes: tuple[int, ...], start: tuple[int, ...]) -> None:
        if not all(size > 0 for size in sizes):
            raise OperandError(f"Invalid submesh shape: {sizes}. All dimensions must be positive.")
        if len(sizes) != len(self.shape) or len(start) != len(self.shape):
            raise OperandError(
                f"Submesh shape {MeshShape(*sizes)} and parent mesh {self.shape} must have the same dimensions"
            )
        if any(a + n > whole for a, n, whole in zip(start, sizes, self.shape, strict=True)):
            raise OperandError(
                f"Submesh shape {MeshShape(*sizes)} and offset {start} does not fit within parent mesh "
                f"({tuple(self.shape)})."
            )

    def create_submeshes(self, submesh_shape: Sequence[int]) -> list[MeshDevice]:
        """All of it cut into submeshes of one shape, row-major."""
        sizes = tuple(submesh_shape)
        self._check_submesh(sizes, (0,) * len(sizes))
        for dim, (whole, part) in enumerate(zip(self.shape, sizes, strict=True)):
            if whole % part:
                raise OperandError(
                    f"Shape {self.shape} is not divisible by submesh shape {MeshShape(*sizes)} along dimension {dim}"
                )
        counts = [whole // part for whole, part in zip(self.shape, sizes, strict=True)]
        places = runtime.MeshCoordinateRange(counts)
        return [
            self.create_submesh(sizes, [at * part for at, part in zip(place, sizes, strict=True)]) for place in places
        ]

    def get_submeshes(self) -> list[MeshDevice]:
        return sorted((each for each in self._submeshes if not each.runtime.closed), key=MeshDevice.id)

    def quiesce_devices(self) -> None:
        """Wait for all that was queued, on submeshes too."""
        self.runtime.synchronize()

    # what a device is like

    def arch(self) -> Arch:
        return Arch(self.runtime.system.chip.name)

    def compute_with_storage_grid_size(self) -> CoreCoord:
        """The cores of one device."""
        grid = self.runtime.system.chip.cores
        return CoreCoord(grid.x, grid.y)

    @property
    def core_grid(self) -> CoreGrid:
        grid = self.runtime.system.chip.cores
        return CoreGrid(x=grid.x, y=grid.y)

    def dram_grid_size(self) -> CoreCoord:
        """The banks of DRAM of one device, as a grid of one row."""
        grid = self.runtime.system.chip.dram_grid
        return CoreCoord(grid.x, grid.y)

    def sfpu_eps(self) -> float:
        """The distance from 1 to the next number, of what ops compute with."""
        return 2.0**-23

    def sfpu_nan(self) -> float:
        """What ops give where there is no number."""
        return math.nan

    def sfpu_inf(self) -> float:
        """What ops give where numbers end."""
        return math.inf

    def worker_core_from_logical_core(self, logical_core: CoreCoord) -> CoreCoord:
        """A core by the number that kernels see."""
        self._check_core(logical_core, self.compute_with_storage_grid_size())
        return CoreCoord(logical_core.x + WORKERS, logical_core.y + WORKERS)

    def logical_core_from_worker_core(self, virtual_core: CoreCoord) -> CoreCoord:
        """A core by its place in the grid: the inverse of `worker_core_from_logical_core`."""
        size = self.compute_with_storage_grid_size()
        self._check_core(virtual_core, CoreCoord(size.x + WORKERS, size.y + WORKERS), WORKERS)
        return CoreCoord(virtual_core.x - WORKERS, virtual_core.y - WORKERS)

    def dram_core_from_logical_core(self, logical_core: CoreCoord) -> CoreCoord:
        """A bank of DRAM by the number that kernels see: its own."""
        self._check_core(logical_core, self.dram_grid_size())
        return logical_core

    def _check_core(self, core: CoreCoord, end: CoreCoord, start: int = 0) -> None:
        if not (start <= core.x < end.x and start <= core.y < end.y):
            raise OperandError(f"there is no core {core}", grid=f"{start}-{start} to {end.x - 1}-{end.y - 1}")

    def get_optimal_dram_bank_to_logical_worker_assignment(self, noc: Any, coord: Sequence[int] | None = None) -> Any:
        """A worker for every bank of DRAM: a list, or for one device a dict by bank. All are equally near here."""
        size = self.compute_with_storage_grid_size()
        workers = [CoreCoord(bank % size.x, bank // size.x) for bank in range(self.dram_grid_size().num_cores)]
        if coord is None:
            return workers
        self._place(coord)
        return dict(enumerate(workers))

    def memory_usage(self, buffer_type: str = "dram") -> dict[tuple[int, ...], Usage]:
        """The memory of every device: used, free, peak, largest free piece."""
        return self.runtime.memory_usage(buffer_type)

    # programs

    def count_program(self, key: tuple[Hashable, ...]) -> bool:
        """An op is run: `key` is its name, then what its program depends on, such as shapes and dtypes. True if such
        an op was not run before."""
        if key in self._programs:
            return False
        self._new_program(key)
        return True

    def _new_program(self, key: tuple[Hashable, ...]) -> None:
        self.runtime.check_open()
        if not self._misses_allowed:
            raise OperandError(
                f'Device operation "{key[0]}": program cache miss occurred, but cache misses are forbidden',
                fix="run it once before set_program_cache_misses_allowed(False)",
            )
        if self._caches and isinstance(self._programs, set):
            self._programs.add(key)

    def num_program_cache_entries(self) -> int:
        """How many different programs were run."""
        return len(self._programs)

    def enable_program_cache(self) -> None:
        """Remember programs, which is so from the start."""
        self._caches = True

    def clear_program_cache(self) -> None:
        self._programs = set()

    def disable_and_clear_program_cache(self) -> None:
        """Forget all programs, and remember none."""
        self.clear_program_cache()
        self._caches = False

    def set_program_cache_misses_allowed(self, allowed: bool) -> None:
        """Whether an op may be run that was not run before."""
        self._misses_allowed = allowed

    # the end

    def close(self) -> None:
        """Wait for all queues, then let everything go, submeshes first. Twice is harmless."""
        for child in list(self._submeshes):
            child.close()
        self._programs = frozenset()
        OPEN.discard(self)
        self.runtime.close()
        tell("closed", self)

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.shape))
        return f"MeshDevice({grid} grid, {self.get_num_devices()} devices)"


Device = MeshDevice


def open_mesh_device(
    mesh_shape: Any = None,
    l1_small_size: Any = 0,
    trace_region_size: int = 0,
    num_command_queues: int = 1,
    dispatch_core_config: DispatchCoreConfig | None = None,
    offset: Sequence[int] | None = None,
    physical_device_ids: Sequence[int] = (),
    worker_l1_size: int = 0,
    *,
    mesh_type: MeshType | str | None = None,
    device_ids: Sequence[Any] | None = None,
    shape: Sequence[int] | None = None,
    **settings: Any,
) -> MeshDevice:
    """A mesh of devices: `(MeshShape(2, 4))`, `((2, 4), device_ids)` or `(paths_or_ids, (2, 4))`; none is all of them.

    `settings` are the runtime's: `memory`, `driver`, `check`, `dispatch`, `stress`, `timeout`, `cache`.

    >>> mesh = open_mesh_device(MeshShape(1, 2), mesh_type=MeshType.Ring)
    >>> mesh.mesh_type, close_mesh_device(mesh)
    (<MeshType.Ring: 'ring'>, None)
    """
    if not isinstance(l1_small_size, int):  # (shape, device_ids) and (paths_or_ids, shape)
        mesh_shape, device_ids, l1_small_size = (mesh_shape, l1_small_size, 0)
    if shape is not None:
        mesh_shape, device_ids = shape, mesh_shape if device_ids is None else device_ids
    sizes, ids = sorted_out(mesh_shape, device_ids)
    options = {
        "l1_small_size": _size("l1_small_size", l1_small_size),
        "trace_region_size": _size("trace_region_size", trace_region_size),
        "worker_l1_size": _size("worker_l1_size", worker_l1_size),
        "dispatch_core_config": dispatch_core_config,
    }
    if isinstance(num_command_queues, bool) or num_command_queues not in range(1, MAXIMUM_QUEUES + 1):
        raise ArgumentError(f"num_command_queues={num_command_queues!r}", fix="1 or 2")
    join()
    system, sizes, chosen = _choose_devices(sizes, list(physical_device_ids) or ids, offset)
    fabric.check_opening(system, chosen)
    settings.setdefault("check", "races" if "races" in read_setting(RACES).split(",") else None)
    if not {"driver", "memory", "preset"} & settings.keys():
        settings["driver"] = node_driver(mesh_shape, device_ids) or VirtualDriver(None, system.chip)
    kind = fabric.mesh_type_of(read_mesh_type(mesh_type))
    made = runtime.open_mesh_device(
        sizes,
        chosen,
        num_command_queues=num_command_queues,
        mesh_type=kind,
        worker_l1_size=options["worker_l1_size"],
        **settings,
    )
    return MeshDevice(made, system, options=options)


def _choose_devices(
    sizes: Sequence[int] | None, ids: Sequence[int] | None, offset: Sequence[int] | None
) -> tuple[System, tuple[int, ...], list[int]]:
    """The system, the shape and the devices of a mesh that is asked for."""
    system = get_system()
    if ids is not None:
        if sizes is None:
            sizes = (1, len(ids))
        if math.prod(sizes) != len(ids):
            raise OperandError(
                f"Shape and values size mismatch; shape mesh_size: {math.prod(sizes)}, values size: {len(ids)}"
            )
        system.check_ids(ids)
        return system, tuple(sizes), list(ids)
    sizes = system.shape if sizes is None else tuple(sizes)
    system = system.around(sizes, offset)
    bound = bound_ids(sizes) if is_bound(system) else None
    return system, sizes, system.devices(sizes, offset) if bound is None else bound


def _size(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ArgumentError(f"{name}={given!r} is no number of bytes")
    return given


def close_mesh_device(mesh_device: MeshDevice) -> None:
    """Close a mesh; twice is harmless."""
    expect("mesh_device", mesh_device, MeshDevice, fix="give what ttnn.open_mesh_device returned")
    mesh_device.close()


@contextlib.contextmanager
def create_mesh_device(*args: Any, **kwargs: Any) -> Iterator[MeshDevice]:
    """A mesh that is closed at the end of the block."""
    device = open_mesh_device(*args, **kwargs)
    try:
        yield device
    finally:
        close_mesh_device(device)


def open_device(*, device_id: int = 0, **options: Any) -> MeshDevice:
    """One device: a mesh of 1x1, with the options of `open_mesh_device`.

    >>> device = open_device(device_id=0)
    >>> device.shape, close_device(device)
    (MeshShape([1, 1]), None)
    """
    return open_mesh_device(MeshShape(1, 1), physical_device_ids=[device_id], **options)


def CreateDevice(device_id: int, num_command_queues: int = 1, *sizes: Any, **options: Any) -> MeshDevice:
    """One device: `(device_id, num_command_queues, l1_small_size, trace_region_size, dispatch_core_config)`."""
    named = dict(zip(("l1_small_size", "trace_region_size", "dispatch_core_config"), sizes, strict=False))
    return open_device(device_id=device_id, num_command_queues=num_command_queues, **named, **options)


def CreateDevices(device_ids: Sequence[int], *args: Any, **kwargs: Any) -> dict[int, MeshDevice]:
    """Devices by their ids, a mesh of 1x1 each."""
    return {device_id: CreateDevice(device_id, *args, **kwargs) for device_id in device_ids}


def close_device(device: MeshDevice) -> None:
    """Close a device; twice is harmless."""
    device.close()


CloseDevice = close_device


def CloseDevices(devices: Mapping[int, MeshDevice]) -> None:
    for device in devices.values():
        close_device(device)


def manage_device(device_id: int) -> contextlib.AbstractContextManager[MeshDevice]:
    """A device that is closed at the end of the block."""
    return create_mesh_device(MeshShape(1, 1), physical_device_ids=[device_id])


def SetDefaultDevice(device: MeshDevice | None = None) -> None:
    """The device that is taken where none is named."""
    global _default
    _default = None if device is None else weakref.ref(device)


def GetDefaultDevice() -> MeshDevice | None:
    """The device that is taken where none is named."""
    found = None if _default is None else _default()
    return None if found is None or found.runtime.closed else found


def get_max_worker_l1_unreserved_size() -> int:
    """The bytes of L1 that a core of the system has for programs: the most that `worker_l1_size` can be."""
    return get_system().chip.l1


def is_wormhole_b0(device: MeshDevice | None = None) -> bool:
    """Whether a device, or the system, has that generation of chips."""
    return (get_system().arch if device is None else device.arch()) is Arch.WORMHOLE_B0


def is_blackhole(device: MeshDevice | None = None) -> bool:
    """Whether a device, or the system, has that generation of chips."""
    return (get_system().arch if device is None else device.arch()) is Arch.BLACKHOLE


def ReadDeviceProfiler(device: MeshDevice) -> None:
    """Wait for a device. There is nothing to read: `meshloom.observe` tells what ran."""
    device.runtime.synchronize()
