"""Tensors that the client makes: of nothing by name, or from data that goes to the workers that hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshloom.comms.handles import Handle
from meshloom.controller import checkpoints
from meshloom.controller.calls import find_lease, forward, note_transfer, refuse_mesh, refuse_tensor
from meshloom.controller.session import Data
from meshloom.controller.tensors import ClusterLease, Deciding, RemoteTensor, make_remote
from meshloom.controller.values import encode
from meshloom.controller.worker import bytes_of
from meshloom.errors import ArgumentError, UnsupportedError
from meshloom.placement import Topology, extents
from meshloom.runtime import state
from meshloom.tensor import collectives, creation
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import HERE
from meshloom.tensor.moving import to_dense
from meshloom.tensor.refusals import refuse_moved_parameter, refuse_parameter

_MAKING = frozenset(
    f"loom:{name}" for name in "full arange randn rand empty eye linspace logspace randint randperm normal".split()
)


def take(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `tensor.clients` asks: the result if the call is on the mesh of a cluster, else `HERE`."""
    if Deciding.now:
        return HERE
    if name in _STATES and state.shadows is None:
        return _STATES[name](function, args, kwargs)
    if name == "loom:put_stored":
        return _put_stored(*args)
    lease = find_lease(args, kwargs)
    if state.shadows is not None:
        return HERE if lease is None else forward(name, function, args, kwargs)
    if lease is None and _names_no_mesh(name, args, kwargs):
        mesh = creation._opened[-1]
        if isinstance(mesh.lease, ClusterLease):
            lease, kwargs = mesh.lease, {**kwargs, "mesh": mesh}
    if lease is None:
        return HERE
    if name in _SPECIAL:
        return _SPECIAL[name](lease, function, args, kwargs)
    if name in _MAKING:
        kwargs = {key: each for key, each in kwargs.items() if key != "device"}
        return forward(name, lambda *given, **named: function(*given, **named, device="meta"), args, kwargs)
    return forward(name, function, args, kwargs)


_STATES: dict[str, Any] = {"loom:save": checkpoints.save, "loom:load": checkpoints.load}


def _names_no_mesh(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is to be made on the mesh that was opened last."""
    if not creation._opened or kwargs.get("mesh") is not None:
        return False
    return name in _MAKING or (name == "loom:distribute" and (len(args) < 2 or args[1] is None))


def _distribute(lease: ClusterLease, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Data of the client onto the mesh."""
    value, *rest = args
    if isinstance(value, RemoteTensor):
        return function(*args, **kwargs)
    dense = value.detach() if isinstance(value, torch.Tensor) else creation._dense(value)
    named = {**dict(zip(("mesh", "placements"), rest, strict=False)), **kwargs}
    return _put(lease, dense, _topology_of(function, dense, named))


_PLACED: dict[Any, Topology] = {}


def _topology_of(function: Callable[..., Any], dense: torch.Tensor, named: dict[str, Any]) -> Topology:
    placements = named.get("placements")
    spelled = tuple(placements.items()) if isinstance(placements, Mapping) else placements
    key = tuple(dense.shape), dense.dtype, named.get("mesh"), tuple(spelled) if isinstance(spelled, list) else spelled
    found = _PLACED.get(key)
    if found is None or found.is_closed:
        Deciding.now += 1
        try:
            found = function(dense.to("meta"), **named).topology
        finally:
            Deciding.now -= 1
        if len(_PLACED) > 1 << 12:
            _PLACED.clear()
        _PLACED[key] = found
    return found


def _put(lease: ClusterLease, dense: torch.Tensor, topology: Topology) -> Any:
    """A dense tensor onto the mesh: to each worker what it holds."""
    session, whole = lease.session, topology.reduced
    there = lease.split(whole)
    boxes = [extents(there, worker) for worker in range(session.workers)] if there.mesh.is_split else []
    is_same = all(len(each) == 1 and each[0].shape == tuple(dense.shape) for each in boxes)
    parts: list[tuple[tuple[int, ...], memoryview]]
    if is_same:
        parts = [((dense.numel(),), bytes_of(dense.contiguous().clone()))] * session.workers
    else:
        parts = [_part_of(dense, each) for each in boxes]
    made = make_remote(session, whole)
    place = {
        "mesh": lease.meshes[topology.mesh],
        "placements": encode(whole.placements, refuse_tensor, refuse_mesh),
        "shape": list(topology.shape),
    }
    note_transfer(session, "broadcast" if is_same else "scatter", dense)
    session.put(Data(made._id, str(dense.dtype).removeprefix("torch."), parts, place))
    return made.redistribute(topology.placements) if whole is not topology else made


def _put_stored(topology: Topology, stored: torch.Tensor) -> Any:
    """What was read from files, or of a batch: here it is all of the tensor."""
    lease = topology.mesh.lease
    if not isinstance(lease, ClusterLease):
        return HERE
    return _put(lease, to_dense(Tensor(topology, stored), "distribute"), topology)


def _part_of(dense: torch.Tensor, boxes: Any) -> tuple[tuple[int, ...], memoryview]:
    """What a worker gets: the boxes that it holds, one after the other."""
    joined = torch.cat([dense[each.slices].reshape(-1) for each in boxes]) if boxes else dense.new_empty(0)
    return (joined.numel(),), bytes_of(joined)


def _parameter(lease: ClusterLease, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _, data, *rest = args
    names = dict(zip(("mesh", "placements", "requires_grad"), rest, strict=False)) | kwargs
    needs = bool(names.get("requires_grad", True))
    mesh, placements = names.get("mesh"), names.get("placements")
    if not isinstance(data, torch.Tensor):
        raise ArgumentError("a parameter needs a tensor", fix="loom.Parameter(torch.ones(4), mesh)")
    if not isinstance(data, RemoteTensor):
        data = creation.distribute(data.detach(), mesh, placements if placements is not None else {})
    else:
        if mesh is not None:
            refuse_moved_parameter(data.topology, mesh)
        if placements is not None:
            data = data.redistribute(placements)
    refuse_parameter(data.topology, needs)
    made = data.detach().requires_grad_(needs)
    made._is_param = True
    return made


def _from_parts(lease: ClusterLease, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What each device is to hold: checked and put together here, then sent to the workers that hold it."""
    Deciding.now += 1
    try:
        found = function(*args, **kwargs)
        if found.topology.partial_axes:
            raise UnsupportedError(
                "parts that are summed up by all devices cannot be sent to a cluster one by one",
                tensor=found.topology,
                fix="put their sum there: loom.distribute(sum(parts), mesh, placements)",
            )
        if found.requires_grad:
            raise UnsupportedError(
                "a part that requires a gradient goes to a cluster: its gradient would have to come back",
                fix="loom.from_local([part.detach() ...], mesh, placements).requires_grad_()",
            )
        dense = to_dense(found, "from_local")
    finally:
        Deciding.now -= 1
    return _put(lease, dense, found.topology)


class RemoteHandle(Handle):
    """A collective that was sent to the workers: calls after it are done after it, so that nobody has to wait."""

    def __init__(self, name: str, tensor: RemoteTensor) -> None:
        self.name, self.topology, self._result = name, tensor.topology, tensor
        self._number = tensor._session.issued

    def done(self) -> bool:
        """Whether all workers have done it."""
        return bool(self._result._session.done >= self._number)

    def wait(self, timeout: float | None = None) -> Any:
        """The result, as of any call on a cluster: its values are there when they are asked for."""
        self._result._session.check()
        return self._result


def _start(lease: ClusterLease, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    name, x, rest, named = args
    if named.get("stress") not in (None, False) or state.stress is not None:
        raise UnsupportedError(
            f"stress delays collectives of this process, and {name}_async goes to a cluster",
            fix="try the program under stress on a mesh of this process",
        )
    named = {word: value for word, value in named.items() if word != "stress"}
    return RemoteHandle(name, getattr(collectives, name)(x, *rest, **named))


_SPECIAL: dict[str, Any] = {
    "loom:distribute": _distribute,
    "loom:Parameter": _parameter,
    "loom:from_local": _from_parts,
    "moves:start": _start,
}
