"""Which meshes account for the tensors on them: those opened with a memory limit or a machine preset.

Room order forbids that this room knows tensors. So the tensor room leaves a function here that is called when the first
such mesh opens and when the last one closes; in between it tells `hold` of every tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshloom.mesh import Mesh
from meshloom.runtime.memory import Region

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice

_open: weakref.WeakValueDictionary[Mesh, MeshDevice] = weakref.WeakValueDictionary()
_listeners: list[Callable[[bool], None]] = []


def listen(listener: Callable[[bool], None]) -> None:
    """Call a function whenever accounting starts (True) or ends (False), and now if it is on."""
    _listeners.append(listener)
    if _open:
        listener(True)


def note_open(device: MeshDevice) -> None:
    """A mesh that accounts has been opened."""
    _open[device.mesh] = device
    _tell()


def note_moved(before: Mesh, device: MeshDevice) -> None:
    """A mesh device has another mesh now."""
    if _open.get(before) is device:
        del _open[before]
        _open[device.mesh] = device


def note_closed(device: MeshDevice) -> None:
    """A mesh has been closed."""
    if _open.get(device.mesh) is device:
        del _open[device.mesh]
        _tell()


def _tell() -> None:
    for listener in _listeners:
        listener(bool(_open))


def account_of(mesh: Mesh) -> MeshDevice | None:
    """The device that accounts for tensors on a mesh, if one does."""
    return _open.get(mesh)


def hold(device: MeshDevice, nbytes: int, text: str, where: str) -> Region:
    """Room for a tensor on every device of a mesh; it is given back with `device.system.memory`."""
    return device.system.memory["dram"].allocate(nbytes, device.mask, text, where)
