"""The client's tensors: where they lie and what they were computed from, without data.

`RemoteTensor` is a `Tensor` to programs. This file says what the client knows of one; `controller.methods` attaches
what can be done with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from meshloom.controller.outcomes import stand_in
from meshloom.controller.session import Session
from meshloom.engines import private
from meshloom.engines.layout import torch_dtype
from meshloom.errors import UnsupportedError
from meshloom.mesh import Mesh
from meshloom.placement import Topology, extents
from meshloom.runtime.leases import Lease
from meshloom.tensor import base
from meshloom.tensor.base import Tensor
from meshloom.tensor.joining import native

_CPU = torch.device("cpu")
_FLAG: Any = private.TensorBase.requires_grad


class _Deciding(threading.local):
    """How many calls this thread is deciding on stand-ins."""

    now = 0


Deciding = _Deciding()


class ClusterLease(Lease):
    """What ties meshes to the cluster whose workers hold them, and how the workers split them."""

    __slots__ = ("_holders", "meshes", "session")

    def __init__(self, name: str, session: Session) -> None:
        super().__init__(name)
        self.session = session
        self.meshes: dict[Mesh, int] = {}  # their numbers on the workers
        self._holders: dict[Topology, tuple[int, ...]] = {}

    def check_making(self) -> None:
        """Tensors are made by the workers; here only stand-ins are, while a call is decided."""
        self.check_open()
        if not Deciding.now:
            raise UnsupportedError(
                f"this function cannot make tensors on a mesh of {self._name}",
                fix="make a plain tensor and put it there: loom.distribute(x, mesh, placements)",
            )

    def check_open(self) -> None:
        """An error if the cluster has been closed."""
        if self._closed:
            self.session.check()
        super().check_open()

    def split(self, topology: Topology) -> Topology:
        """A topology as the workers have it."""
        mesh = topology.mesh.with_lease(None).split(self.session.workers)
        return Topology(mesh, topology.placements, topology.shape, topology.dtype)

    def holders(self, topology: Topology) -> tuple[int, ...]:
        """The workers that hold different parts of a tensor, which is not partial."""
        found = self._holders.get(topology)
        if found is None:
            there = self.split(topology)
            workers = range(self.session.workers if there.mesh.is_split else 1)
            parts: dict[Any, int] = {}
            for worker in workers:
                parts.setdefault(extents(there, worker) if there.mesh.is_split else 0, worker)
            found = self._holders[topology] = tuple(parts.values())
        return found


def lease_of(topology: Topology) -> ClusterLease:
    """The cluster of a topology; an error if it has been closed."""
    lease = topology.mesh.lease
    assert isinstance(lease, ClusterLease)
    return lease


class Node:
    """What a tensor with a gradient was computed from; of a leaf (or one that keeps its gradient) the tensor too."""

    __slots__ = ("leaf", "parents")

    def __init__(self, parents: tuple[Node, ...], leaf: weakref.ref[RemoteTensor] | None = None) -> None:
        self.parents, self.leaf = parents, leaf


def nodes_from(starts: list[Node]) -> Iterator[Node]:
    """Every node that gradients reach from some."""
    seen: set[int] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            left += node.parents


class RemoteTensor(Tensor):
    """A tensor on the mesh of a cluster: what the client knows of it."""

    _is_remote = True
    _session: Session
    _id: int
    _tracked: int = 0  # 1: a leaf with a gradient; 2: computed from tensors with one
    _node: Node | None = None
    _family: list[weakref.ref[RemoteTensor]] | None = None  # it, its base and their views
    _slope: RemoteTensor | None = None  # its gradient as it was handed out
    _has_slope = False
    _is_old = False  # backward has run since its gradient was handed out
    _keeps_slope = False
    _writes = 0
    _memory: int = 0  # of a tensor with the memory of another: that one's number
    _is_marked = False
    _is_foreign = False  # the result of an autograd.Function of the program

    def __del__(self) -> None:
        number = vars(self).get("_id")
        if number is not None:
            self._session.queue.append(number)

    @property
    def _data(self) -> torch.Tensor:  # type: ignore[override]
        """An array without data, for those who ask for dtype, shape and flags."""
        kept = vars(self).get("_blank")
        if kept is None or kept[0] is not self.topology or kept[1] != self._tracked:
            kept = vars(self)["_blank"] = (self.topology, self._tracked, stand_in(self.topology, self._tracked)._data)
        found: torch.Tensor = kept[2]
        return found

    @property
    def _memory_key(self) -> int:
        """What it shares with tensors that are the same memory, seen in the same way."""
        return self._memory or self._id

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return torch_dtype(self.topology.dtype)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the workers hold it."""
        return _CPU

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise UnsupportedError(
            "a tensor of a cluster cannot be pickled: its values are in other processes",
            tensor=self.topology,
            fix="x.to_torch() fetches it; loom.save(state, folder) lets the workers write it",
        )

    def _state(self) -> str:
        return ", requires_grad=True" if self._tracked else ""


@lru_cache(1 << 12)
def maker(topology: Topology, tracked: bool) -> Callable[[], RemoteTensor]:
    """What makes tensors of a topology: everything that does not change is given beforehand."""
    return partial(
        base._make, RemoteTensor, topology.shape, None, None, None, torch_dtype(topology.dtype), torch.strided, _CPU,
        False, tracked, None, False, True,
    )  # fmt: skip


def make_remote(session: Session, topology: Topology, number: int | None = None) -> RemoteTensor:
    """The client's tensor for one of the workers'."""
    made = maker(topology, False)()
    made.topology = topology
    made._session, made._id = session, number if number is not None else next(session.numbers)
    return made


def refuse_foreign(tensor: RemoteTensor) -> None:
    """The result of an `autograd.Function` of the program has a backward that no worker can run."""
    if tensor._is_foreign and native(tensor, "grad_fn") is not None:
        raise UnsupportedError(
            "this tensor of a cluster comes from a torch.autograd.Function of the program, whose backward would have "
            "to run inside of a worker",
            reason="code of the client runs on the client only",
            tensor=tensor.topology,
            fix="write it with ops of tensors, or call it inside of torch.no_grad()",
        )


def set_tracked(tensor: RemoteTensor, tracked: int, node: Node | None) -> None:
    """Whether it has a gradient, and of what; torch's own flag says the same."""
    tensor._node, tensor._tracked = node, tracked
    with private.DisableTorchFunctionSubclass():
        _FLAG.__set__(tensor, bool(tracked))


def make_leaf(tensor: RemoteTensor) -> None:
    """Ask for its gradient."""
    set_tracked(tensor, 1, Node((), weakref.ref(tensor)))


def turn_into(tensor: RemoteTensor, topology: Topology) -> None:
    """Another shape, dtype or placement, in place."""
    tensor.topology = topology
    blank = maker(topology, False)()
    blank.topology = topology
    with private.DisableTorchFunctionSubclass():
        _FLAG.__set__(tensor, False)
        private.TensorBase.data.__set__(tensor, blank)


def join_family(one: RemoteTensor, view: RemoteTensor) -> None:
    """A view, and what it is a view of."""
    if one._family is None:
        one._family = [weakref.ref(one)]
    if len(one._family) > 64:  # of a loop over rows, those that are gone
        one._family[:] = [each for each in one._family if each() is not None]
    one._family.append(weakref.ref(view))
    view._family = one._family
