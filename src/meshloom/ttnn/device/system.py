"""Which devices there are, and which product they imitate: `MESHLOOM_SYSTEM`, or `set_system`.

`T3000`, `Galaxy`, `N300` and their like are products: a grid of chips of one kind with the ids that their drivers give
them. `2x4` is a grid of virtual devices, `32` that many in any shape. Nobody having said anything, there are as many as
a program asks for; one that asks how many there are is told 8, in 2 rows.

A mesh is laid on the grid of the system: a line winds along its rows from the offset on, other shapes lie at the offset
as they are, or turned if they only fit so.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshloom import settings
from meshloom.errors import ArgumentError, OperandError, closest
from meshloom.mesh import Coordinate, Mesh
from meshloom.processes import join
from meshloom.processes.bindings import process, visible_devices
from meshloom.processes.discovery import discover
from meshloom.processes.splitting import is_alone, visible_ids
from meshloom.runtime import MeshCoordinate, MeshShape
from meshloom.runtime.chips import BLACKHOLE, WORMHOLE, Chip, Grid
from meshloom.ttnn.choices import Choice

__all__ = (
    "Arch ClusterType GetNumAvailableDevices GetNumPCIeDevices GetPCIeDeviceID SystemMeshDescriptor get_arch_name "
    "get_cluster_type get_device_ids get_num_devices get_num_pcie_devices get_pcie_device_ids get_system set_system"
).split()

VARIABLE = "MESHLOOM_SYSTEM"


class Arch(Choice):
    """A generation of chips."""

    WORMHOLE_B0 = "wormhole_b0"
    BLACKHOLE = "blackhole"
    QUASAR = "quasar"


class ClusterType(Choice):
    """A product; `CUSTOM` is a grid of virtual devices."""

    INVALID, N150, N300, T3K, GALAXY, TG, P100, P150, P150_X2, P150_X4 = range(10)
    SIMULATOR_WORMHOLE_B0, SIMULATOR_BLACKHOLE, N300_2x2, P150_X8, P300 = range(10, 15)
    SIMULATOR_QUASAR, BLACKHOLE_GALAXY, P300_X2, CUSTOM = range(15, 19)


@dataclass(frozen=True, slots=True)
class System:
    """The devices there are: a grid with their ids row by row, the chip they have, and what is known of their links.

    >>> get_system("T3000").devices((1, 8)), get_system("T3000").devices((2, 2), offset=(0, 2))
    ([4, 0, 2, 6, 7, 3, 1, 5], [2, 6, 3, 7])
    """

    name: str
    shape: tuple[int, ...]
    ids: tuple[int, ...]
    kind: ClusterType = ClusterType.CUSTOM
    chip: Chip = WORMHOLE
    pcie: int | None = None
    preset: str | None = None  # where figures of its links are found
    count: int | None = None  # how many devices there are; None is as many as are asked for
    is_grid: bool = True  # False: devices without a shape of their own

    @property
    def arch(self) -> Arch:
        return Arch(self.chip.name)

    def around(self, shape: Sequence[int], offset: Sequence[int] | None) -> System:
        """A system that has room for a mesh: itself if it is a grid, else one of the mesh's own shape."""
        if self.is_grid:
            return self
        start = tuple(offset) if offset is not None else (0,) * len(shape)
        if len(start) != len(shape):
            raise OperandError(f"The specified offset {MeshCoordinate(*start)} is out of bounds for {tuple(shape)}")
        whole = tuple(a + n for a, n in zip(start, shape, strict=True))
        wanted = math.prod(whole)
        self._check_count(shape, wanted)
        ids = tuple(range(wanted)) if self.count is None else self.ids[:wanted]
        return replace(self, shape=whole, ids=ids, is_grid=True)

    def devices(self, shape: Sequence[int], offset: Sequence[int] | None = None) -> list[int]:
        """The ids of the devices under a mesh of that shape, in its row-major order, or an error that says why not."""
        sizes, start = tuple(shape), tuple(offset) if offset is not None else (0,) * len(self.shape)
        if not all(size > 0 for size in sizes):
            raise OperandError(f"{MeshShape(*sizes)} has no devices", fix="sizes of 1 and more")
        self._check_count(sizes, math.prod(sizes))
        if len(start) != len(self.shape) or any(a >= size for a, size in zip(start, self.shape, strict=True)):
            raise OperandError(
                f"The specified offset {MeshCoordinate(*start)} is out of bounds for the system mesh shape "
                f"{MeshShape(*self.shape)}"
            )
        by_place = dict(zip(itertools.product(*map(range, self.shape)), self.ids, strict=True))
        if is_line(sizes):
            places = list(itertools.islice(_snake(self.shape, start), math.prod(sizes)))
            if len(places) < math.prod(sizes):
                raise self._too_big(sizes, start)
            return [by_place[place] for place in places]
        return [by_place[place] for place in self._box(sizes, start)]

    def _box(self, sizes: tuple[int, ...], start: tuple[int, ...]) -> list[Coordinate]:
        if len(sizes) != len(self.shape):
            raise OperandError(
                f"Requested mesh shape dimensions mismatch: {len(sizes)} != {len(self.shape)}",
                asked=MeshShape(*sizes),
                system=MeshShape(*self.shape),
            )
        if _fits(sizes, start, self.shape):
            return [_offset(place, start) for place in itertools.product(*map(range, sizes))]
        turned = sizes[::-1]
        if len(sizes) != 2 or not _fits(turned, start, self.shape):
            raise self._too_big(sizes, start)
        return [_offset(place[::-1], start) for place in itertools.product(*map(range, sizes))]

    def _check_count(self, sizes: Sequence[int], wanted: int) -> None:
        if self.count is not None and wanted > self.count:
            raise OperandError(
                f"Requested mesh shape {MeshShape(*sizes)} requires {wanted} devices, but only {self.count} devices "
                f"are available in the system mesh {MeshShape(*self.shape)}.",
                fix=f"open a smaller mesh, or set {VARIABLE} to a larger system",
            )

    def _too_big(self, sizes: tuple[int, ...], start: tuple[int, ...]) -> OperandError:
        return OperandError(
            f"Requested mesh is too big and is not rotatable: {MeshShape(*sizes)} at {MeshCoordinate(*start)} on "
            f"{MeshShape(*self.shape)}"
        )

    def check_ids(self, ids: Sequence[int]) -> None:
        """An error for devices that there are not."""
        missing = [each for each in ids if self.count is not None and each not in self.ids]
        if missing:
            raise OperandError(f"there is no device {missing[0]}", devices=list(self.ids), system=self.name)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.shape)) if self.is_grid else "any shape"
        return f"{self.name}: {self.count if self.count is not None else 'any number of'} devices, {grid}"


def is_line(shape: Sequence[int]) -> bool:
    """Whether at most one side is longer than 1."""
    return sum(size != 1 for size in shape) <= 1


def _fits(sizes: Sequence[int], start: Sequence[int], whole: Sequence[int]) -> bool:
    return all(a + n <= size for a, n, size in zip(start, sizes, whole, strict=True))


def _offset(place: Coordinate, start: Sequence[int]) -> Coordinate:
    return tuple(a + b for a, b in zip(place, start, strict=True))


def _snake(shape: Sequence[int], start: Sequence[int]) -> Iterator[Coordinate]:
    """Along the first row from a place on, back along the next one, and so on.

    >>> list(_snake((2, 3), (0, 1)))
    [(0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    rows = list(itertools.product(*map(range, shape[:-1])))
    first, width = rows.index(tuple(start[:-1])), shape[-1]
    yield from ((*rows[first], column) for column in range(start[-1], width))
    for number, row in enumerate(rows[first + 1 :]):
        yield from ((*row, column) for column in (range(width) if number % 2 else reversed(range(width))))


def snake(shape: Sequence[int]) -> list[int]:
    """The devices of a grid along its snake, by their row-major numbers.

    >>> snake((2, 4))
    [0, 1, 2, 3, 7, 6, 5, 4]
    """
    numbers = dict(zip(itertools.product(*map(range, shape)), range(math.prod(shape)), strict=True))
    return [numbers[place] for place in _snake(shape, (0,) * len(shape))]


def _product(name: str, shape: tuple[int, int], kind: ClusterType, chip: Chip = WORMHOLE, **more: Any) -> System:
    count = math.prod(shape)
    return System(name, shape, more.pop("ids", tuple(range(count))), kind, chip, count=count, **more)


# A n300 shows one of its two chips on PCIe, so a T3000 shows 4 of 8. Galaxy's chips have two rows of cores more free.
PRODUCTS = (
    _product("N150", (1, 1), ClusterType.N150),
    _product("N300", (1, 2), ClusterType.N300, pcie=1, preset="n300"),
    _product("T3000", (2, 4), ClusterType.T3K, pcie=4, preset="t3000", ids=(4, 0, 2, 6, 5, 1, 3, 7)),
    _product("Galaxy", (8, 4), ClusterType.GALAXY, replace(WORMHOLE, cores=Grid(8, 10)), preset="galaxy"),
    _product("P100", (1, 1), ClusterType.P100, BLACKHOLE),
    _product("P150", (1, 1), ClusterType.P150, BLACKHOLE),
    _product("P150x2", (1, 2), ClusterType.P150_X2, BLACKHOLE),
    _product("QuietBox", (2, 2), ClusterType.P150_X4, BLACKHOLE, preset="quietbox"),
    _product("LoudBox", (2, 4), ClusterType.P150_X8, BLACKHOLE, preset="loudbox"),
)
_ALIASES = {"t3k": "t3000", "tg": "galaxy", "p150x4": "quietbox", "p150x8": "loudbox"}
_BY_NAME = {each.name.lower(): each for each in PRODUCTS}
ANY = System("virtual", (2, 4), tuple(range(8)), is_grid=False)

OPEN: weakref.WeakSet[Any] = weakref.WeakSet()  # mesh devices that are open
WATCHERS: list[Callable[[str, Any], None]] = []  # called as watcher("opened", device); also "closed", "waited"
_chosen: System | None = None


def tell(what: str, device: object) -> None:
    """Say to watchers that something was done with a mesh."""
    for watcher in tuple(WATCHERS):
        watcher(what, device)


def get_system(given: str | int | Sequence[int] | System | None = None) -> System:
    """The system that a text means, or that was chosen: by `set_system`, by MESHLOOM_SYSTEM, by the control plane.

    >>> print(get_system("galaxy")), print(get_system("2x4")), print(get_system(32))
    Galaxy: 32 devices, 8x4
    2x4: 8 devices, 2x4
    32: 32 devices, any shape
    (None, None, None)
    """
    if given is not None:
        return _read(given)
    if _chosen is not None:
        return _chosen
    named = settings.read(VARIABLE)
    if named:
        return _read(named)
    if process().count > 1 and visible_devices() is not None:
        join()  # the devices of the others belong to the system too
    declared = visible_ids()
    if declared is None:
        declared = [device.id for device in discover() if device.kind == "virtual"]
    return _system_of(len(declared), declared) if declared else ANY


def is_bound(system: System) -> bool:
    """Whether its devices are those that the environment lets processes see: nobody chose another system."""
    return _chosen is None and not settings.read(VARIABLE) and system.count is not None


def set_system(system: str | int | Sequence[int] | System | None) -> System:
    """Choose the system for this process: a product, a shape, a number; None goes back to what the environment says."""
    global _chosen
    if len(OPEN):
        raise OperandError(
            "the system cannot change while devices are open", open=", ".join(map(repr, OPEN)), fix="close them first"
        )
    _chosen = None if system is None else _read(system)
    return get_system()


def _read(given: str | int | Sequence[int] | System) -> System:
    if isinstance(given, System):
        return given
    text = str(given).strip().lower() if isinstance(given, (str, int)) else "x".join(map(str, given))
    found = _BY_NAME.get(_ALIASES.get(text, text))
    if found is not None:
        return found
    if re.fullmatch(r"[1-9]\d*", text):
        return _system_of(int(text), range(int(text)))
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        shape = tuple(map(int, text.split("x")))
        return System(text, shape, tuple(range(math.prod(shape))), count=math.prod(shape))
    raise ArgumentError(
        f"there is no system {given!r}",
        fix=f"a number, a shape such as 2x4, or a product: {closest(text, [each.name for each in PRODUCTS])}",
    )


def _system_of(count: int, ids: Sequence[int]) -> System:
    return System(str(count), (1, count), tuple(ids), count=count, is_grid=False)


class SystemMeshDescriptor:
    """What the system is like before anything is opened.

    >>> SystemMeshDescriptor().all_local()
    True
    """

    def __init__(self) -> None:
        join()
        self._system = get_system()
        self._mesh = Mesh.of(self._system.shape).split(1 if is_alone() else process().count)

    def shape(self) -> MeshShape:
        return MeshShape(*self._system.shape)

    def local_shape(self) -> MeshShape:
        """The shape of those in this process."""
        return MeshShape(*self._mesh.local_shape)

    def get_device_id(self, coord: Sequence[int]) -> int:
        return self._system.ids[self._place(coord)]

    def is_local(self, coord: Sequence[int]) -> bool:
        """Whether the device at a coordinate is in this process."""
        self._place(coord)
        return not self._mesh.is_split or self._mesh.owner(tuple(coord)) == process().rank

    def all_local(self) -> bool:
        """Whether all of them are in this process."""
        return not self._mesh.is_split

    def _place(self, coord: Sequence[int]) -> int:
        places = list(itertools.product(*map(range, self._system.shape)))
        if tuple(coord) not in places:
            raise OperandError(f"{MeshCoordinate(*coord)} is not in the system mesh {self.shape()}")
        return places.index(tuple(coord))


def get_num_devices() -> int:
    return len(get_system().ids)


def get_device_ids() -> list[int]:
    return list(range(get_num_devices()))


def get_num_pcie_devices() -> int:
    """How many devices the host reaches without another one."""
    found = get_system().pcie
    return found if found is not None else get_num_devices()


def get_pcie_device_ids() -> range:
    """The ids of the devices that the host reaches without another one."""
    return range(get_num_pcie_devices())


GetNumAvailableDevices, GetNumPCIeDevices = get_num_devices, get_num_pcie_devices


def GetPCIeDeviceID(device_id: int) -> int:
    """The device by which the host reaches a device."""
    get_system().check_ids([device_id])
    return device_id % get_num_pcie_devices()


def get_arch_name() -> str:
    return get_system().chip.name


def get_cluster_type() -> ClusterType:
    return get_system().kind
