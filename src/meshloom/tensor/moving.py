"""Explicit movement of whole tensors: redistribute, read as dense, assign. Each is seen by whoever is watching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshloom.comms import WORLD, move
from meshloom.comms.copying import begin_copy, crosses
from meshloom.comms.group import one_device_each
from meshloom.errors import UnsupportedError, expect
from meshloom.mesh import HERE, Mesh
from meshloom.placement import Placements, Replicate, Topology, as_placements
from meshloom.planner import moves, settle
from meshloom.processes.divergence import STORY
from meshloom.runtime import Event, state, where
from meshloom.runtime.card_array import CardArray, run_op, to_host
from meshloom.tensor.base import Tensor
from meshloom.tensor.gradient_sums import Back, follow, is_tracked, watch_dense
from meshloom.tensor.joining import refuse_plain_results


def shadow_of(tensor: Tensor) -> Tensor:
    """The tensor, or its stand-in without data while something is being explained."""
    tensor.topology.check_open()
    return tensor if state.shadows is None else state.shadows.of(tensor)


def same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two arrays share memory."""
    if isinstance(first, CardArray) or isinstance(second, CardArray):
        return isinstance(first, CardArray) and isinstance(second, CardArray) and first.memory is second.memory
    if first.is_meta or second.is_meta:
        return first is second or (first._is_view() and first._base is second)
    held, other = first.untyped_storage(), second.untyped_storage()
    if held._cdata == other._cdata:  # the one thing that tells of empty arrays
        return True
    return held.data_ptr() == other.data_ptr() != 0


def version_of(data: torch.Tensor) -> int | None:
    """How often an array was written; None where nobody counts, as in inference mode."""
    return None if data.is_inference() else data._version


def target_topology(tensor: Tensor, placements: Placements | None, mesh: Mesh | None = None) -> Topology:
    """Where a redistribution leads; axes that a dict does not name stay as they are, or are R on another mesh."""
    topology = tensor.topology
    if mesh is not None and (where := _check_mesh(mesh)) != topology.mesh:
        return Topology(where, as_placements(placements, where, topology.ndim), topology.shape, topology.dtype)
    if isinstance(placements, Mapping):
        named = {topology.mesh.axis(name): each for name, each in placements.items()}
        placements = tuple(named.get(axis, now) for axis, now in enumerate(topology.placements))
    return topology.with_placements(as_placements(placements, topology.mesh, topology.ndim))


def _check_mesh(given: object) -> Mesh:
    mesh: Any = getattr(given, "mesh", given)  # a MeshDevice has a mesh
    expect("mesh", mesh, Mesh, fix="give a mesh, such as mesh.submesh(pp=1)")
    if mesh.lease is not None:
        mesh.lease.check_making()
    found: Mesh = mesh
    return found


def redistribute(
    tensor: Tensor, placements: Placements | None = None, *, mesh: Mesh | None = None, copy: bool = False
) -> Tensor:
    """The same values placed otherwise, in memory of their own; with `mesh` on another mesh, such as a submesh.

    As with `Tensor.to`, a tensor that has these placements already is returned itself; `copy=True` copies it.

    >>> import meshloom as loom
    >>> whole = loom.open_mesh((2, 2), axes=("pp", "tp"))
    >>> x = loom.arange(6, mesh=whole.submesh(pp=0), placements="S(0)")
    >>> redistribute(x, "R", mesh=whole.submesh(pp=1))
    Tensor i64[6](R) on Mesh(tp=2, ids=[2, 3])
    tensor([0, 1, 2, 3, 4, 5])
    """
    if state.plain and not copy and mesh is None:
        key = tensor.topology, tuple(placements.items()) if isinstance(placements, dict) else placements
        target = _TARGETS.get(key) if _is_hashable(key) else None
        if target is None:
            tensor.topology.check_open()
            target = target_topology(tensor, placements)
            if _is_hashable(key) and not tensor.topology.mesh.lease:
                _keep_target(key, target)
    else:
        tensor = shadow_of(tensor)
        target = target_topology(tensor, placements, mesh)
    if target is tensor.topology and not copy:
        return tensor
    data = carry(tensor, target, "redistribute")
    if same_storage(data, tensor._data):
        data = data.clone()
    for log in state.logs:
        log.note_move(tensor, target, data)
    made = Tensor(target, data)
    if tensor._number and target.mesh is tensor.mesh:
        made._number = tensor._number
    return made


def begin_redistribution(tensor: Tensor, target: Topology, call: str, channel: str, phase: str) -> Callable[[], Tensor]:
    """Begin to copy a tensor to another mesh; call what comes back for the tensor there, once. No gradient follows.

    Processes that hold nothing of its mesh give a tensor without data. Messages of a `channel` are in order among
    themselves alone.
    """
    source = tensor.topology
    events = [Event(each, call, where(), phase) for each in moves(source, target, state.machine)]
    state.check(events)
    there = settle(source, state.machine)
    with torch.no_grad():
        data = move(tensor._data.detach(), source, there, state.machine, call)
        finish = begin_copy(data, there, target.reduced, channel)
    for log in state.logs:
        log.note_tensor(tensor)
    state.log(events, of=tensor)

    def end() -> Tensor:
        with torch.no_grad():
            made = move(finish(), target.reduced, target, state.machine, call)
            made = made.clone() if same_storage(made, tensor._data) else made
        for log in state.logs:
            log.note_move(tensor, target, made)
        return Tensor(target, made)

    if crosses(source, target):
        return end
    there_already = end()
    return lambda: there_already


def _is_hashable(key: object) -> bool:
    """Whether what was asked for makes a key; a list does not."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


_TARGETS: dict[object, Topology] = {}  # where redistributions led that were asked for in these words


def _keep_target(key: object, target: Topology) -> None:
    if len(_TARGETS) >= 1 << 12:
        _TARGETS.clear()
    _TARGETS[key] = target


def carry(tensor: Tensor, target: Topology, call: str, on_host: bool = False) -> torch.Tensor:
    """The stored array of a tensor at another topology; may share memory with it. With `on_host` it is read first,
    where cards with memory of their own hold it."""
    source, array = tensor.topology, tensor._data
    if on_host or source.mesh.lease is not target.mesh.lease:  # what leaves cards is read from them
        array = to_host(array)
    if source is target:
        return array
    if array.__class__ is CardArray:
        return _carry_on_cards(tensor, target, call)
    if state.plain and not source.mesh.is_split and not array.requires_grad:
        return move(array, source, target, state.machine, call)
    return _carry(tensor, array, target, call)


def _carry_on_cards(tensor: Tensor, target: Topology, call: str) -> torch.Tensor:
    """The same where cards with memory of their own hold the array: at the end they hold what came of it."""
    store = tensor.topology.mesh.lease.store  # type: ignore[union-attr]
    found: torch.Tensor = run_op(call, lambda: _carry(tensor, tensor._data, target, call), (target,), store)
    return found


def _carry(tensor: Tensor, array: torch.Tensor, target: Topology, call: str) -> torch.Tensor:
    source = tensor.topology
    events: list[Event] = []
    if state.watching:
        line = where()
        for log in state.logs:
            log.note_tensor(tensor)
        events = [Event(each, call, line) for each in moves(source, target, state.machine)]
        state.check(events)
    STORY.identity = tensor._number
    data = move(array, source, target, state.machine, call)
    STORY.identity = 0
    if is_tracked(data) and (back := _moves_back(source, target)):
        data = follow(call, back, data, (tensor,))
    state.log(events, of=tensor)
    return data


def _moves_back(source: Topology, target: Topology) -> Back:
    """What brings the gradient of a tensor that moved home; it crosses processes as it comes."""
    if source.mesh != target.mesh:  # the way it came
        there = settle(source, state.machine)
        way = (*moves(target.reduced, there, state.machine), *moves(there, source.reduced, state.machine))
        return Back((), (way,), (False,))
    return Back((), (moves(target.reduced, source.reduced, state.machine),), (False,))


def to_dense(tensor: Tensor, call: str, on_host: bool = False) -> torch.Tensor:
    """The dense array of a tensor; may share memory with it. With `on_host` it is one of this process in any case."""
    topology = tensor.topology
    if topology.mesh.ranks and topology.mesh.ranks != WORLD.within and state.shadows is None:
        everybody = one_device_each((HERE.count,))
        target = Topology(everybody, (Replicate(),), topology.shape, topology.dtype)
        return carry(tensor, target, call, on_host)
    return carry(tensor, topology.replicated, call, on_host)


def to_torch(tensor: Tensor) -> torch.Tensor:
    """The tensor as one dense torch tensor of its own, always; partial sums are reduced."""
    tensor = shadow_of(tensor)
    refuse_plain_results(tensor)
    found = to_dense(tensor, "to_torch", on_host=True)
    return watch_dense(found.clone() if same_storage(found, tensor._data) else found)


def read(tensor: Tensor, call: str) -> torch.Tensor:
    """The dense values for the host; there are none while something is explained or planned on meta."""
    tensor = shadow_of(tensor)
    if tensor._data.is_meta and (state.shadows is not None or not tensor.mesh.is_elsewhere):
        raise UnsupportedError(
            f"{call}() needs values and this tensor has none",
            tensor=tensor.topology,
            fix="explain and meta tensors know shapes only: keep value-dependent code outside",
        )
    if state.capture is not None:
        raise state.capture.refuse(f"{call}() needs values, and while a trace is captured nothing is computed")
    refuse_plain_results(tensor)
    return to_dense(tensor, call, on_host=True).detach()
