"""Opening a mesh device: every spelling that the documents use, told apart by type."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from meshloom import settings
from meshloom.errors import (
    ArgumentError,
    DeviceError,
    FabricError,
    MeshError,
    MeshloomError,
    closest,
    expect,
    expect_seconds,
)
from meshloom.fabric import VIRTUAL as VIRTUAL_MACHINE, Fabric
from meshloom.fabric.catalogue import Preset
from meshloom.mesh import Coordinate, Mesh
from meshloom.processes.discovery import discover
from meshloom.processes.splitting import bound_ids, split_bound, visible_ids
from meshloom.processes.world import join
from meshloom.runtime import accounts
from meshloom.runtime.card import Card, Driver, LinkedCard
from meshloom.runtime.chips import Chip, chip_of
from meshloom.runtime.device import MeshDevice
from meshloom.runtime.drivers.blackhole import BlackholeDriver
from meshloom.runtime.drivers.process.driver import ProcessDriver
from meshloom.runtime.geometry import MeshShape, MeshType
from meshloom.runtime.system import System, close_cards
from meshloom.runtime.virtual import VirtualDriver

TIMEOUT = 60.0
FORMS = 'sizes are whole numbers; devices are ids, or paths such as "/dev/tenstorrent/0" or "virtual:0"'
NODE, VIRTUAL = "/dev/tenstorrent/", "virtual:"
DEVICE = re.compile(rf"(?:{NODE}|{VIRTUAL})?(\d+)")
DRIVERS = ("virtual", "processes")
DRIVER = ("shares_memory", "enumerate", "open", "compile", "is_plain")


def open_mesh_device(
    mesh_shape: Any = None,
    device_ids: Any = None,
    *,
    mesh_type: MeshType | str | None = None,
    axes: Sequence[str] | None = None,
    physical: Sequence[int] | None = None,
    num_command_queues: int = 1,
    memory: float | None = None,
    preset: str | Preset | None = None,
    driver: Driver | str | None = None,
    check: str | None = None,
    dispatch: str | None = None,
    stress: int | None = None,
    timeout: float | None = TIMEOUT,
    cache: str | os.PathLike[str] | None = None,
    worker_l1_size: int = 0,
    processes: Sequence[int] | None = None,
) -> MeshDevice:
    """A mesh of cards: `(MeshShape(2, 4))`, `((2, 4), device_ids)`, or `(paths_or_ids, (2, 4))`.

    Without ids it takes all visible devices in order; without a shape, all of them in a row. With `memory` (bytes per
    device) or a machine `preset`, tensors on its mesh are accounted for. `check="races"` watches every queue.
    `dispatch="slow"` (or MESHLOOM_DISPATCH) runs every command at once, card by card. `stress` is a seed that shuffles
    the queues. `timeout` is how many seconds a launch may take; a card that takes longer is lost. `worker_l1_size` is
    how many bytes of L1 every core has for buffers, all of them for 0. `driver="processes"` gives virtual cards in
    processes of their own.

    Ids, and paths such as "virtual:3", are virtual cards of this process; a path of a node, "/dev/tenstorrent/3", is
    the Tenstorrent card there. A `driver` says which cards they are, whatever they are called.

    >>> with open_mesh_device(["virtual:3", "virtual:1"], (1, 2)) as mesh:
    ...     mesh.get_device_ids()
    [3, 1]
    """
    shape, ids = sorted_out(mesh_shape, device_ids)
    join()
    kind = read_mesh_type(mesh_type)
    expect_seconds("timeout", timeout, least=1e-9)
    if stress is not None:
        expect("stress", stress, int, fix="give a seed, such as stress=0")
    chip = chip_of(preset, memory)
    is_ours = driver is None or isinstance(driver, str)
    if isinstance(driver, str):
        driver = _named_driver(driver, chip)
    _check_driver(driver)
    driver = driver if driver is not None else node_driver(mesh_shape, device_ids)
    rack = driver if driver is not None else VirtualDriver(_declared_ids(), chip)
    if ids is None and shape is not None and is_ours:
        ids = bound_ids(shape)
    sizes, chosen = _fit(shape, ids, rack)
    if isinstance(num_command_queues, bool) or not isinstance(num_command_queues, int) or num_command_queues < 1:
        raise ArgumentError(f"num_command_queues={num_command_queues!r}", fix="give 1 or more")
    mesh = split_bound(Mesh.of(sizes, axes, chosen, physical, processes), processes)
    cards = _open_cards(rack, mesh)
    try:
        system = System(
            rack,
            cards,
            check=check,
            dispatch=dispatch or settings.read("MESHLOOM_DISPATCH"),
            stress=stress,
            timeout=timeout,
            cache=cache,
            worker_l1_size=worker_l1_size,
        )
        made = MeshDevice(mesh, range(mesh.size), system, num_command_queues, kind)
        _check_links(made)
    except BaseException:
        close_cards(cards)
        raise
    if memory is not None or preset is not None:
        accounts.note_open(made)
    return made


def node_driver(*given: Any) -> Driver | None:
    """The driver of the cards whose nodes are among the names of devices; None if all of them are virtual."""
    named = [os.fspath(each) for listed in given if isinstance(listed, Sequence) for each in listed if _is_path(each)]
    nodes = [each for each in named if each.startswith(NODE)]
    virtual = [each for each in named if each.startswith(VIRTUAL)]
    if nodes and virtual:
        raise ArgumentError(
            f"{nodes[0]} is a Tenstorrent card and {virtual[0]} a virtual one: a mesh has one kind", fix=FORMS
        )
    return BlackholeDriver() if nodes else None


def _open_cards(rack: Driver, mesh: Mesh) -> list[Card | None]:
    """The cards, row-major; those of other processes are opened there, unless they are but a view of our memory."""
    opened: list[Card | None] = []
    try:
        for place, index in zip(mesh.coordinates(), mesh.device_ids, strict=True):
            opened.append(_open_card(rack, index, place) if rack.shares_memory or mesh.is_here(place) else None)
    except BaseException:
        close_cards(opened)  # why the mesh does not open is what matters
        raise
    return opened


def _open_card(rack: Driver, index: int, place: Coordinate) -> Card:
    try:
        return rack.open(index)
    except (MeshloomError, SystemExit) as error:
        first, fix = str(error).partition("\n")[0], getattr(error, "details", {}).get("fix")
        raise DeviceError(
            f"the device at {place} does not open: {first}", driver=type(rack).__name__, fix=fix
        ) from error


def _check_links(device: MeshDevice) -> None:
    """An error if a type of mesh was asked for that the links of the cards do not form."""
    cards = device.cards
    if device.mesh_type is None or device.mesh.is_split or device.system.driver.shares_memory:
        return
    if not all(isinstance(card, LinkedCard) for card in cards):
        return
    shape = device.mesh.shape
    wanted = Fabric.grid(shape, device.mesh_type.kinds(shape), VIRTUAL_MACHINE.latency, VIRTUAL_MACHINE.bandwidth)
    there = device.fabric
    lost = next((link for link in wanted.links if there.link(link.source, link.destination) is None), None)
    if lost is not None:
        raise FabricError(
            f"a {device.mesh_type.value} of {shape} needs a link from {lost.source} to {lost.destination}, "
            "and the cards have none",
            links=", ".join(f"{link.source}-{link.destination}" for link in there.links),
            fix="give the cards in another order, another shape, or no mesh_type",
        )


def read_mesh_type(given: MeshType | str | None) -> MeshType | None:
    """A type of mesh, which may be given by its name."""
    if isinstance(given, str) and given in MeshType.__members__:
        return MeshType[given]
    if given is not None and not isinstance(given, MeshType):
        raise ArgumentError(f"there is no mesh type {given!r}", fix=closest(given, MeshType.__members__))
    return given


def _named_driver(name: str, chip: Chip) -> Driver:
    """A driver of virtual cards by its name."""
    if name not in DRIVERS:
        raise ArgumentError(f"there is no driver {name!r}", fix=closest(name, DRIVERS))
    kind = ProcessDriver if name == "processes" else VirtualDriver
    return kind(_declared_ids(), chip)


def _check_driver(driver: Any) -> None:
    if isinstance(driver, type):
        raise ArgumentError(f"driver={driver.__name__} is a class", fix=f"make one: driver={driver.__name__}()")
    if driver is not None and not isinstance(driver, Driver):
        missing = [name for name in DRIVER if not hasattr(driver, name)]
        raise ArgumentError(f"driver={driver!r} has no {', '.join(missing)}", fix="see meshloom.runtime.card.Driver")


def _declared_ids() -> list[int] | None:
    """The ids of the virtual devices that the control plane sees; None if nobody declared any."""
    return visible_ids() or [device.id for device in discover() if device.kind == "virtual"] or None


def sorted_out(first: Any, second: Any) -> tuple[tuple[int, ...] | None, list[int] | None]:
    """Shape and ids, whichever came first; ids are numbers or paths."""
    for each in (first, second):
        if each is not None and not isinstance(each, (int, Sequence)):
            raise ArgumentError(f"{each!r} is neither a shape nor a list of devices", fix="open_mesh_device((2, 4))")
        for item in each if isinstance(each, Sequence) else ():
            if not _is_path(item) and (isinstance(item, bool) or not isinstance(item, int)):
                raise ArgumentError(f"{item!r} is neither a size nor a device", fix=FORMS)
    if second is not None and _is_ids(first, second):
        first, second = second, first
    shape = None if first is None else MeshShape(first) if not isinstance(first, MeshShape) else first
    return shape, None if second is None else [_id(each) for each in second]


def _is_ids(first: Any, second: Any) -> bool:
    """Whether the first argument lists devices and the second is the shape."""
    if isinstance(first, MeshShape) or first is None or any(map(_is_path, second)):
        return False
    if isinstance(second, MeshShape) or any(map(_is_path, first)):
        return True
    as_written = math.prod(first) == len(second)
    turned = math.prod(second) == len(first)
    if as_written != turned:
        result: bool = turned
        return result
    return isinstance(first, list) and isinstance(second, tuple)


def _is_path(given: Any) -> bool:
    return isinstance(given, (str, os.PathLike))


def _id(given: Any) -> int:
    """A device id from a number or a path that ends with one."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    found = DEVICE.fullmatch(os.fspath(given)) if _is_path(given) else None
    if found is None:
        raise ArgumentError(f"{given!r} names no device", fix="give an id, or a path such as /dev/tenstorrent/0")
    return int(found[1])


def _fit(shape: tuple[int, ...] | None, ids: list[int] | None, rack: Driver) -> tuple[tuple[int, ...], list[int]]:
    """The shape and the ids of exactly as many devices, or an error."""
    visible = rack.enumerate()
    if ids is None and shape is None:
        if not visible:
            raise MeshError("no shape was given and there is no telling how many devices to take", fix="give a shape")
        shape = (len(visible),)
    if ids is None:
        assert shape is not None
        wanted = math.prod(shape)
        ids = list(range(wanted)) if visible is None else list(visible)[:wanted]
        if len(ids) < wanted:
            raise MeshError(
                f"a mesh of shape {tuple(shape)} needs {wanted} devices and there are {len(ids)}",
                devices=list(visible or ()),
                fix=f"open a smaller mesh, such as (1, {len(ids)})" if ids else "there is none to open",
            )
    missing = [each for each in ids if visible is not None and each not in visible]
    if missing:
        lacks = rack.lacks(missing[0]) if isinstance(rack, BlackholeDriver) else {}
        raise MeshError(f"there is no device {missing[0]}", devices=list(visible or ()), **lacks)
    shape = shape if shape is not None else (len(ids),)
    if math.prod(shape) != len(ids):
        raise MeshError(
            f"a mesh of shape {tuple(shape)} needs {math.prod(shape)} devices and {len(ids)} were given",
            devices=ids,
            fix=f"give {math.prod(shape)} ids, or a shape of {len(ids)} devices",
        )
    return tuple(shape), ids
