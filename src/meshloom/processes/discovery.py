"""The control plane: which devices there are, and which part of a mesh this process holds. Ops never ask it anything.

`discover` lists devices. `control(mesh)` is a mesh as this process sees it: globally all of it, locally its own box.
Where devices are declared, by `MESHLOOM_VIRTUAL_DEVICES=8` or by the visible ids alone, no GPU is looked for. Without
`MESHLOOM_VIRTUAL_DEVICES`, Tenstorrent cards come first. A mesh of virtual devices needs no declaration at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshloom import settings
from meshloom.errors import BindingError, MeshError, closest
from meshloom.mesh import Coordinate, Mesh
from meshloom.mesh.process import place_of
from meshloom.processes.bindings import HOST_RANK, Binding, Environment, from_environment, visible_devices

DEVICES = "MESHLOOM_VIRTUAL_DEVICES"
CARDS = Path("/dev/tenstorrent")
SCOPES = ("local", "global")
Scope = Literal["local", "global"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device: its kind, its number on this host, and where it is found."""

    kind: Literal["virtual", "card", "cuda"]
    id: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"


def discover(environment: Environment | None = None) -> list[Device]:
    """The devices that this process sees, in the order of its visible ids; an empty list where there are none.

    >>> [str(device) for device in discover({"MESHLOOM_VIRTUAL_DEVICES": "4", "TT_VISIBLE_DEVICES": "2,3"})]
    ['virtual:2', 'virtual:3']
    """
    given = settings.environment() if environment is None else environment
    visible = visible_devices(given)
    if given.get(DEVICES):
        return _pick([Device("virtual", number) for number in range(_count_declared(given))], visible)
    cards = _cards()
    if cards:
        return _pick(cards, visible)
    return _gpus() if visible is None else [Device("virtual", number) for number in visible]


def visible_mesh(
    shape: Sequence[int] | int | None = None,
    axes: Sequence[str] | None = None,
    environment: Environment | None = None,
    opened: Callable[..., Mesh] = Mesh.of,
) -> Mesh:
    """A mesh over all visible devices: a line of them without a shape, the first ones with one.

    >>> visible_mesh(environment={"TT_VISIBLE_DEVICES": "2,3"}).device_ids
    (2, 3)
    """
    ids = [device.id for device in discover(environment)]
    if shape is None and not ids:
        raise MeshError("there is no device to open a mesh over", fix=f"give a shape, or set {DEVICES}=8")
    sizes = (len(ids),) if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    if not ids:  # virtual devices that nobody had to declare
        return opened(sizes, axes)
    if math.prod(sizes) > len(ids):
        raise MeshError(
            f"a mesh of shape {sizes} needs {math.prod(sizes)} devices, but {len(ids)} are visible",
            visible=", ".join(map(str, ids)),
            fix=f"open a mesh of at most {len(ids)} devices, or make more visible",
        )
    return opened(sizes, axes, device_ids=ids[: math.prod(sizes)])


@dataclass(frozen=True, slots=True)
class Control:
    """A mesh as one process sees it: the shape, the grid of processes, and the place of this one in the grid.

    >>> seen = Control((2, 4), (1, 2), (0, 1))
    >>> seen.mesh_shape("local"), seen.mesh_shape("global"), seen.mesh_offset
    ((2, 2), (2, 4), (0, 2))
    >>> print(seen)
    global 2x4 by 1x2 processes; local 2x2 at (0, 2), coordinates [0:2, 2:4]
    """

    shape: tuple[int, ...]
    processes: tuple[int, ...]
    place: Coordinate

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.processes) == len(self.place):
            raise MeshError(f"{self.shape}, {self.processes} and {self.place} do not have the same number of axes")
        if any(parts < 1 or size % parts for size, parts in zip(self.shape, self.processes, strict=True)):
            raise MeshError(f"{_by(self.processes)} processes do not cut a mesh of {_by(self.shape)} into equal boxes")
        if not all(0 <= at < parts for at, parts in zip(self.place, self.processes, strict=True)):
            raise BindingError(f"place {self.place} is outside the grid of {_by(self.processes)} processes")

    def mesh_shape(self, scope: Scope = "global") -> tuple[int, ...]:
        """The shape of the whole mesh, or of the box that this process holds."""
        if check_scope(scope) == "global":
            return self.shape
        return tuple(size // parts for size, parts in zip(self.shape, self.processes, strict=True))

    def mesh_range(self, scope: Scope = "global") -> tuple[range, ...]:
        """The coordinates along every axis, of the whole mesh or of this process's box."""
        starts = self.mesh_offset if check_scope(scope) == "local" else (0,) * len(self.shape)
        return tuple(range(at, at + size) for at, size in zip(starts, self.mesh_shape(scope), strict=True))

    @property
    def mesh_offset(self) -> Coordinate:
        """The first coordinate that this process holds."""
        return tuple(at * size for at, size in zip(self.place, self.mesh_shape("local"), strict=True))

    def is_local(self, coordinate: Sequence[int]) -> bool:
        """Whether this process holds the coordinate."""
        spans = self.mesh_range("local")
        return len(coordinate) == len(spans) and all(at in span for at, span in zip(coordinate, spans, strict=True))

    def __str__(self) -> str:
        spans = ", ".join(f"{span.start}:{span.stop}" for span in self.mesh_range("local"))
        return (
            f"global {_by(self.shape)} by {_by(self.processes)} processes; "
            f"local {_by(self.mesh_shape('local'))} at {self.mesh_offset}, coordinates [{spans}]"
        )


def control(mesh: Mesh, hosts: Sequence[int] | None = None, binding: Binding | None = None) -> Control:
    """How this process sees a mesh; a host rank in the environment must say the same as the mesh does.

    `hosts` is a grid of processes for a mesh that is not split: what TT-Metal calls the host topology.

    >>> print(control(Mesh(r=2, c=4), hosts=(1, 2), binding=Binding(mesh_id=0, host_rank=1)))
    global 2x4 by 1x2 processes; local 2x2 at (0, 2), coordinates [0:2, 2:4]
    """
    bound = from_environment() if binding is None else binding
    if mesh.is_split and hosts is not None and tuple(hosts) != mesh.processes:
        raise MeshError(f"the mesh is split by {_by(mesh.processes)} processes, not {_by(hosts)}", mesh=mesh)
    grid = mesh.processes if hosts is None else tuple(hosts)
    place = mesh.place
    if bound.host_rank is not None:
        place = _bound_place(bound.host_rank, grid)
        if mesh.is_split and place != mesh.place:
            raise BindingError(
                f"{HOST_RANK[0]}={bound.host_rank} says place {place}, but rank {bound.rank} holds place {mesh.place}",
                mesh=mesh,
                fix="give host ranks in the order of ranks",
            )
    elif hosts is not None and not mesh.is_split:
        place = _bound_place(bound.rank, grid)
    return Control(mesh.shape, grid, place)


def _bound_place(number: int, grid: Sequence[int]) -> Coordinate:
    count = math.prod(grid)
    if number >= count:
        raise BindingError(
            f"host rank {number} is out of range for {count} processes ({_by(grid)})",
            fix=f"set {HOST_RANK[0]} or {HOST_RANK[1]} between 0 and {count - 1}",
        )
    return place_of(number, grid)


def _count_declared(given: Environment) -> int:
    if not given[DEVICES].strip().isdecimal():
        raise BindingError(f"{DEVICES}={given[DEVICES]!r} is not a number of devices", fix=f"set {DEVICES}=8")
    return int(given[DEVICES])


def find_cards(environment: Environment | None = None) -> list[Device]:
    """The Tenstorrent cards that this process sees, in the order of its visible ids."""
    visible = visible_devices(settings.environment() if environment is None else environment)
    return _pick(_cards(), visible)


def _pick(devices: list[Device], visible: tuple[int, ...] | None) -> list[Device]:
    if visible is None:
        return devices
    known = {device.id: device for device in devices}
    unknown = [number for number in visible if number not in known]
    if unknown:
        raise BindingError(
            f"device {unknown[0]} is to be visible, but there is no such device",
            found=", ".join(map(str, devices)) or "none",
            fix="name ids of devices that are there",
        )
    return [known[number] for number in visible]


def _cards() -> list[Device]:
    if not CARDS.is_dir():
        return []
    found = sorted((int(path.name), path) for path in CARDS.iterdir() if path.name.isdecimal())
    return [Device("card", number, str(path)) for number, path in found]


def _gpus() -> list[Device]:
    import torch  # two seconds: only where nothing is declared and there is no card

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [Device("cuda", number) for number in range(count)]


def check_scope(scope: str) -> str:
    """The scope, or an error if there is none of that name."""
    if scope not in SCOPES:
        raise MeshError(f"{scope!r} is not a scope", fix=closest(scope, SCOPES))
    return scope


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
