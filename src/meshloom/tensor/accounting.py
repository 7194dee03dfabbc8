"""Tensors in the books of a mesh that was opened with a memory limit or a machine preset.

A tensor on the mesh of a device tells of its array when it gets one: it then holds room on every device of its mesh,
until no tensor refers to that array any more. A tensor on a mesh that is a value costs what it always did.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch

from meshloom.errors import OutOfMemoryError, where
from meshloom.runtime import accounts, state
from meshloom.runtime.card_array import CardArray

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice
    from meshloom.runtime.memory import Region
    from meshloom.runtime.system import System
    from meshloom.tensor.base import Tensor

# How many tensors refer to an array on the devices of a system, and the room it has there.
_Key = tuple[int, int]
_users: Counter[_Key] = Counter()
_rooms: dict[_Key, tuple[System, Region]] = {}
_held: dict[int, _Key] = {}


def account(tensor: Tensor, data: torch.Tensor) -> None:
    """Note that a tensor on the mesh of a device has this array."""
    device = accounts.account_of(tensor.topology.mesh)
    before = _held.get(id(tensor))
    if device is None or data.is_meta or data.__class__ is CardArray:  # whose memory is the cards' own
        return
    key = id(device.system), data.untyped_storage()._cdata
    if key == before:
        return
    if before is not None:
        _leave(id(tensor))
    _users[key] += 1  # before looking: whoever leaves meanwhile is not the last
    if key not in _rooms:
        _rooms[key] = device.system, _room(device, tensor, key)
    if id(tensor) not in _held:
        weakref.finalize(tensor, _leave, id(tensor)).atexit = False
    _held[id(tensor)] = key
    if state.capture is not None:
        state.capture.keep(tensor)


def _room(device: MeshDevice, tensor: Tensor, key: _Key) -> Region:
    topology = tensor.topology
    try:
        return accounts.hold(device, topology.local_bytes, f"tensor {topology.notation}", where())
    except OutOfMemoryError:
        del _users[key]
        raise


def _leave(identity: int) -> None:
    """A tensor is gone, or has another array: the last one to leave gives the room back."""
    key = _held.pop(identity, None)
    if key is None:
        return
    _users[key] -= 1
    if not _users[key]:
        del _users[key]
        system, region = _rooms.pop(key)
        system.memory["dram"].drop(region)
