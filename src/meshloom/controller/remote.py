"""The client's tensors: where they lie and what they depend on, without data. Every call goes to the workers.

`RemoteTensor` is a `Tensor` to programs. Its methods, and torch's functions on it, look up what the call leads to
(`controller.outcomes`), queue it for the workers and return. What reads a value waits for it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy
import torch

from meshloom.controller import outcomes
from meshloom.controller.functions import PROPERTIES, torch_names
from meshloom.controller.outcomes import Constant, Many, New, Outcome, Same, stand_in
from meshloom.controller.session import Data, Session, dense_of
from meshloom.controller.values import encode
from meshloom.controller.worker import bytes_of
from meshloom.engines import private
from meshloom.engines.layout import torch_dtype
from meshloom.errors import (
    ArgumentError,
    GradientError,
    MeshError,
    OperandError,
    UnsupportedError,
    place_of,
)
from meshloom.mesh import Mesh
from meshloom.placement import Topology, extents
from meshloom.runtime import state
from meshloom.runtime.leases import Lease
from meshloom.tensor import base, random
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import HERE, Clients
from meshloom.tensor.functions import KNOWN, on_torch
from meshloom.tensor.quick import POINTWISE
from meshloom.tensor.refusals import refuse_partial_leaf
import sys

_CPU = torch.device("cpu")
_is_grad_enabled = torch.is_grad_enabled
_any_autocast = private.is_any_autocast_enabled
_FLAG: Any = private.TensorBase.requires_grad


class ClusterLease(Lease):
    """What ties the meshes of a cluster to it."""

    __slots__ = ("meshes", "session")

    def __init__(self, name: str, session: Session) -> None:
        super().__init__(name, None)
        self.session = session
        self.meshes: dict[Mesh, int] = {}

    def split(self, topology: Topology) -> Topology:
        """A topology as the workers have it."""
        mesh = topology.mesh.with_lease(None)
        return Topology(mesh.split(self.session.workers), topology.placements, topology.shape, topology.dtype)

    def holders(self, topology: Topology) -> list[int]:
        """The workers that hold different parts of a tensor."""
        there = self.split(topology)
        if not there.mesh.is_split:
            return [0]
        found: dict[Any, int] = {}
        for worker in range(self.session.workers):
            found.setdefault(extents(there, worker), worker)
        return list(found.values())

    def check_tensors(self) -> None:
        """Tensors on it are made by the workers; here only stand-ins are, while a call is decided."""
        self.check_open()
        if not _DECIDING.now:
            raise UnsupportedError(
                f"this function cannot make tensors on the mesh of {self._name} yet",
                fix="make it here as a plain tensor and put it there: loom.distribute(x, mesh, placements)",
            )


class _Deciding:
    now = 0


_DECIDING = _Deciding()


class Node:
    """What a tensor with a gradient was computed from; of a leaf, the leaf."""

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

    _session: Session
    _id: int
    _tracked: int = 0  # 1: a leaf with a gradient; 2: computed from tensors with one
    _node: Node | None = None
    _family: list[weakref.ref[RemoteTensor]] | None = None  # it, its base and their views
    _slope: RemoteTensor | None = None  # its gradient
    _has_slope = False
    _keeps_slope = False
    _writes = 0
    _marked = False

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
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return torch_dtype(self.topology.dtype)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the workers hold it."""
        return _CPU

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        return self._marked

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self._marked = bool(value)
        if value:
            send(self._session, "mark:parameter", [{"t": self._id}])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise UnsupportedError(
            "a tensor of a cluster cannot be pickled: its values are in other processes",
            tensor=self.topology,
            fix="x.to_torch() fetches it; loom.save(state, folder) lets the workers write it",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if self._marked:
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> Tensor:
        made: Tensor = self.detach().requires_grad_(self.requires_grad)
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        name = "Parameter containing:\nTensor" if self._marked else "Tensor"
        if self.topology.is_closed:
            return f"{name} {self.topology}"
        state_text = ", requires_grad=True" if self._tracked else ""
        return f"{name} {self.topology}{state_text}\n{fetch(self)!r}"

    def _value_text(self) -> str:
        return repr(fetch(self))

    def _state(self) -> str:
        return ", requires_grad=True" if self._tracked else ""


def _maker(topology: Topology, tracked: bool) -> Callable[[], RemoteTensor]:
    return partial(
        base._make, RemoteTensor, topology.shape, None, None, None, torch_dtype(topology.dtype), torch.strided, _CPU,
        False, tracked, None, False, True,
    )  # fmt: skip


def make_remote(session: Session, topology: Topology, number: int | None = None) -> RemoteTensor:
    """The client's tensor for one of the workers'."""
    made = _maker(topology, False)()
    made.topology = topology
    made._session, made._id = session, number if number is not None else next(session.numbers)
    return made


def _set_tracked(tensor: RemoteTensor, tracked: int, node: Node | None) -> None:
    tensor._node, tensor._tracked = node, tracked
    with private.DisableTorchFunctionSubclass():
        _FLAG.__set__(tensor, bool(tracked))


# Sending


def send(session: Session, name: str, args: list[Any], results: list[int] | None = None) -> None:
    """A command that needs no deciding."""
    session.put(["c", name, args, 0, results or [], _line(), 0])


_LINES: dict[tuple[str, int], str] = {}


def _line() -> str:
    place = place_of(sys._getframe(2))
    found = _LINES.get(place)
    if found is None:
        found = _LINES[place] = f"{place[0].rpartition('/')[2]}:{place[1]}" if place[0] else ""
    return found


def _match_context(session: Session) -> None:
    """Let the workers have the modes of this thread: gradients, autocast, what is asked for."""
    plain = state.plain
    now = (
        _is_grad_enabled(),
        torch.get_default_dtype(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) if _any_autocast() else None,
        None if plain else _frozen(state.output),
        None if plain else _frozen(state.chosen),
        state.accumulating,
    )
    if now != session.context:
        session.context = now
        session.put(["x", {
            "grad": now[0],
            "dtype": str(now[1]).removeprefix("torch."),
            "cast": str(now[2][1]).removeprefix("torch.") if now[2] is not None and now[2][0] else None,
            "output": None if plain or state.output is None else encode(state.output, _no_tensor, _no_mesh),
            "chosen": None if plain else state.chosen,
            "accumulating": state.accumulating,
        }])  # fmt: skip


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _no_tensor(value: torch.Tensor) -> int:
    raise ArgumentError("a tensor is no placement")


def _no_mesh(value: Mesh) -> int:
    raise ArgumentError("a mesh is no placement")


# Calls


OUTCOMES: dict[Any, Outcome] = {}
MOST_OUTCOMES = 1 << 14


class _Call:
    """The arguments of one call, read: key, wire form, tensors."""

    __slots__ = ("encoded", "key", "lease", "named", "numbers_matter", "plain", "session", "tensors", "values_matter")

    def __init__(self, name: str, session: Session, lease: ClusterLease, numbers_matter: bool) -> None:
        self.session, self.lease = session, lease
        self.key: list[Any] = [name]
        self.tensors: list[RemoteTensor] = []
        self.numbers_matter = numbers_matter
        self.values_matter = name.rpartition(".")[2].rpartition(":")[2] not in _INDEXED

    def read(self, value: Any) -> Any:
        """The wire form of an argument; the key and the tensors grow."""
        kind = value.__class__
        if kind is RemoteTensor:
            if value._session is not self.session:
                raise MeshError("tensors of two clusters in one call", fix="fetch one: x.to_torch()")
            self.key += (value.topology, value._tracked)
            self.tensors.append(value)
            return {"t": value._id}
        if kind is int or kind is float or kind is bool:
            if self.numbers_matter:
                self.key += (kind, value if value or kind is not float else repr(value))
            else:
                self.key.append(kind)
            return value
        if value is None or kind is str:
            self.key.append(value)
            return value
        if kind is list or kind is tuple or kind is torch.Size:
            self.key += (list if kind is list else tuple, len(value))
            read = [self.read(each) for each in value]
            return read if kind is list else {"u": read}
        if kind is slice:
            self.key.append(slice)
            return {"s": [self.read(value.start), self.read(value.stop), self.read(value.step)]}
        if isinstance(value, Mapping):
            self.key += (dict, len(value))
            return {"b": [[self.read(k), self.read(v)] for k, v in value.items()]}
        if isinstance(value, Tensor):
            raise MeshError(
                "a tensor of this process beside one of a cluster",
                tensor=value.topology,
                fix="put it there: loom.distribute(x.to_torch(), mesh, placements)",
            )
        if isinstance(value, numpy.ndarray):
            value = torch.as_tensor(value)
        if isinstance(value, torch.Tensor):
            return {"t": self._plain(value)}
        if isinstance(value, Mesh):
            self.key.append(value)
            return {"m": self.lease.meshes[value]}
        if isinstance(value, torch.Generator):
            return {"g": 0}
        found = encode(value, _no_tensor, _no_mesh)
        self.key.append(value if not isinstance(value, numpy.generic) else (type(value), value.item()))
        return found

    def _plain(self, value: torch.Tensor) -> int:
        if value.requires_grad and _is_grad_enabled():
            raise UnsupportedError(
                "a plain tensor that requires a gradient is used beside one of a cluster: its gradient would have to "
                "come back from the workers",
                fix="put it on the mesh: loom.Parameter(w, mesh, placements), or give w.detach()",
            )
        number, content = plain_operand(self.session, value)
        self.key += (torch.Tensor, tuple(value.shape), value.dtype)
        if value.dtype is torch.bool or (self.values_matter and not value.is_floating_point()):
            self.key.append(content)
        return number


# Functions whose results have shapes that do not depend on the values of whole numbers among the operands.
_INDEXED = frozenset(
    "embedding cross_entropy nll_loss index_select gather take_along_dim scatter scatter_ scatter_add scatter_add_ "
    "index_add index_add_ index_copy index_copy_ index_fill index_fill_ __getitem__ __setitem__ add sub mul div eq ne "
    "lt le gt ge where one_hot __add__ __sub__ __mul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ distribute".split()
)


def plain_operand(session: Session, value: torch.Tensor) -> tuple[int, bytes]:
    """The number of a plain tensor among the workers' own, which get it once; and what it holds, as a digest."""
    dense = value.detach().contiguous().cpu()
    content = bytes_of(dense)
    digest = hashlib.blake2b(content, digest_size=20).digest()
    key = digest, dense.dtype, tuple(dense.shape)
    kept = session.plain.get(key)
    if kept is None:
        kept = next(session.numbers)
        session.plain[key] = kept
        note_transfer(session, "broadcast", dense)
        whole = bytes_of(dense.clone()) if content.nbytes < 1 << 20 else content
        name = str(dense.dtype).removeprefix("torch.")
        data = Data(kept, name, [(dense.shape, whole)] * session.workers)
        if whole is content:
            session.send_data(data)
        else:
            session.put(data)
        if len(session.plain) > 256:
            oldest = next(iter(session.plain))
            session.queue.append(session.plain.pop(oldest))
    return kept, digest


def note_transfer(session: Session, kind: str, data: torch.Tensor) -> None:
    """Data that goes between the client and its workers, for the log."""
    session.log.append((session.issued, kind, _line(), None, data.numel() * data.itemsize))


def forward(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on tensors of a cluster: decided here, queued for the workers."""
    lease = _find_lease(args, kwargs)
    assert lease is not None
    session = lease.session
    if state.shadows is not None:
        return _run_on(function, args, kwargs, state.shadows.of)
    bare = name.rpartition(".")[2].rpartition(":")[2]
    call = _Call(name, session, lease, bare.rstrip("_") not in POINTWISE)
    encoded = [call.read(each) for each in args]
    named: Any = 0
    if kwargs:
        named = {}
        for key, each in kwargs.items():
            call.key.append(key)
            named[key] = call.read(each)
    _match_context(session)
    key = (*call.key, session.context, state.machine)
    outcome = OUTCOMES.get(key)
    keys: list[int] = []
    if outcome is None:
        outcome, keys = _decide(function, args, kwargs, call.tensors)
        if len(OUTCOMES) >= MOST_OUTCOMES:
            del OUTCOMES[next(iter(OUTCOMES))]
        OUTCOMES[key] = outcome
    elif outcome.keys:
        keys = [random.draw_key(kwargs.get("generator")) for _ in range(outcome.keys)]
    if outcome.is_asked:
        return _ask(name, encoded, named, keys, call)
    if state.watching:
        state.check(outcome.events)
    numbers: list[int] = []
    result = _results(outcome.results, call.tensors, session, numbers)
    for write in outcome.writes:
        _note_write(call.tensors, write)
    line = _line()
    session.put(["c", name, encoded, named, numbers, line, keys])
    session.log.append((session.issued, name, line, outcome, 0))
    return result


def _decide(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[RemoteTensor]
) -> tuple[Outcome, list[int]]:
    standing = {id(each): stand_in(each.topology, each._tracked) for each in tensors}
    ordered = [standing[id(each)] for each in tensors]
    _DECIDING.now += 1
    try:
        return outcomes.decide(lambda: _run_on(function, args, kwargs, lambda each: standing[id(each)]), ordered)
    finally:
        _DECIDING.now -= 1


def _run_on(function: Callable[..., Any], args: Any, kwargs: Any, replace: Callable[[Any], Any]) -> Any:
    def change(value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return replace(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)([change(each) for each in value])
        if isinstance(value, dict):
            return {key: change(each) for key, each in value.items()}
        return value

    return function(*[change(each) for each in args], **{key: change(each) for key, each in kwargs.items()})


def _results(found: Any, tensors: list[RemoteTensor], session: Session, numbers: list[int]) -> Any:
    if found.__class__ is New:
        made = _maker(found.topology, found.is_tracked)()
        made.topology = found.topology
        made._session = session
        made._id = number = next(session.numbers)
        numbers.append(number)
        if found.is_tracked:
            made._tracked, made._node = 2, _node_of(tensors, found.parents)
            if not found.parents:
                made._tracked, made._node = 1, Node((), weakref.ref(made))
        if found.view_of is not None:
            _join_family(tensors[found.view_of], made)
        return made
    if found.__class__ is Same:
        numbers.append(tensors[found.place]._id)
        return tensors[found.place]
    if found.__class__ is Many:
        return found.make([_results(each, tensors, session, numbers) for each in found.parts])
    assert found.__class__ is Constant
    return found.value


def _node_of(tensors: list[RemoteTensor], parents: tuple[int, ...]) -> Node:
    return Node(tuple([node for place in parents if (node := tensors[place]._node) is not None]))


def _join_family(one: RemoteTensor, view: RemoteTensor) -> None:
    if one._family is None:
        one._family = [weakref.ref(one)]
    one._family.append(weakref.ref(view))
    view._family = one._family


def _note_write(tensors: list[RemoteTensor], write: Any) -> None:
    target = tensors[write.place]
    target._writes += 1
    if write.topology is not target.topology:
        target.topology = write.topology
        blank = make_blank(write.topology)
        with private.DisableTorchFunctionSubclass():
            _FLAG.__set__(target, False)
            private.TensorBase.data.__set__(target, blank)
    if write.is_tracked and target._tracked != 1:
        node = _node_of(tensors, write.parents)
        family = [each() for each in target._family or [weakref.ref(target)]]
        for each in family:
            if each is not None:
                own = () if each is target or each._node is None else (each._node,)
                _set_tracked(each, 2, Node((node, *own)))


def make_blank(topology: Topology) -> RemoteTensor:
    """A tensor of the right shape and dtype that stands for nothing."""
    made = _maker(topology, False)()
    made.topology = topology
    return made


def _ask(name: str, encoded: list[Any], named: Any, keys: list[int], call: _Call) -> Any:
    """A call whose result depends on values: the workers say what came of it."""
    session = call.session
    first = next(session.numbers)
    for _ in range(_RESERVED):
        next(session.numbers)
    line = _line()
    ((value, _),) = session.ask(lambda request: ["q", name, encoded, named, first, line, keys, request])
    session.log.append((session.issued, name, line, None, 0))
    tracked = [each._node for each in call.tensors if each._node is not None]
    return _read_answer(value, call, tuple(tracked))


_RESERVED = 64


def _read_answer(value: Any, call: _Call, parents: tuple[Node, ...]) -> Any:
    if isinstance(value, list):
        return [_read_answer(each, call, parents) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_read_answer(each, call, parents) for each in value["tuple"])
    if "same" in value:
        return next(each for each in call.tensors if each._id == value["same"])
    if "plain" in value:
        return fetch_plain(call.session, value["plain"])
    mesh = next(each for each, number in call.lease.meshes.items() if number == value["mesh"])
    placed = [_PLACEMENTS[kind](*rest) for kind, *rest in value["placements"]]
    topology = Topology(mesh, placed, value["shape"], value["dtype"])
    made = make_remote(call.session, topology, value["tensor"])
    if value["tracked"]:
        _set_tracked(made, 2, Node(parents))
    return made


from meshloom.placement import Partial, Replicate, Shard  # noqa: E402

_PLACEMENTS: dict[str, Any] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}


def _find_lease(args: Any, kwargs: Any) -> ClusterLease | None:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if value.__class__ is RemoteTensor:
            lease = value.topology.mesh.lease
            assert isinstance(lease, ClusterLease)
            return lease
        if isinstance(value, Mesh) and isinstance(value.lease, ClusterLease):
            return value.lease
        if value.__class__ is list or value.__class__ is tuple:
            found = _find_lease(value, {})
            if found is not None:
                return found
    return None


def take(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `tensor.clients` asks: the result if the call is on the mesh of a cluster, else `HERE`."""
    if _DECIDING.now or state.shadows is not None:
        return HERE
    lease = _find_lease(args, kwargs)
    if lease is None:
        if name in _MAKING and kwargs.get("mesh") is None and _opened and isinstance(_opened[-1].lease, ClusterLease):
            kwargs = {**kwargs, "mesh": _opened[-1]}
            lease = _opened[-1].lease
        else:
            return HERE
    if name in _SPECIAL:
        return _SPECIAL[name](lease, function, args, kwargs)
    if name in _MAKING:
        return _make(lease, name, function, args, kwargs)
    return forward(name, function, args, kwargs)


from meshloom.tensor.creation import _opened  # noqa: E402

_MAKING = frozenset(
    f"loom:{name}"
    for name in "full arange randn rand empty eye linspace logspace randint randperm normal bernoulli".split()
)


def _make(
    lease: ClusterLease, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A tensor of nothing: here without data."""
    given = {key: each for key, each in kwargs.items() if key != "device"}
    return forward(name, lambda *a, **k: function(*a, **k, device="meta"), args, given)


def _distribute(
    lease: ClusterLease, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Data of the client onto the mesh."""
    value, *rest = args
    if isinstance(value, RemoteTensor):
        return function(*args, **kwargs)
    dense = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    named = dict(zip(("mesh", "placements"), rest, strict=False)) | kwargs
    key = "distribute", tuple(dense.shape), dense.dtype, named["mesh"], _frozen(named.get("placements"))
    topology = _PLACED.get(key) if _is_hashable(key) else None
    if topology is None:
        _DECIDING.now += 1
        try:
            topology = function(dense.to("meta"), **named).topology
        finally:
            _DECIDING.now -= 1
        if _is_hashable(key):
            _PLACED[key] = topology
    return _put(lease, dense, topology)


_PLACED: dict[Any, Topology] = {}


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _put(lease: ClusterLease, dense: torch.Tensor, topology: Topology) -> RemoteTensor:
    """A dense tensor onto the mesh: to each worker what it holds."""
    session = lease.session
    partial = topology.partial_axes
    there = lease.split(topology.reduced)
    whole: Any = ((dense.numel(),), bytes_of(dense.contiguous().clone()))
    boxes = [extents(there, worker) for worker in range(session.workers)] if there.mesh.is_split else []
    is_same = all(len(each) == 1 and each[0].shape == tuple(dense.shape) for each in boxes)
    parts = [whole] * session.workers if is_same else [_part_of(dense, each) for each in boxes]
    made = make_remote(session, topology.reduced)
    place = {
        "mesh": lease.meshes[topology.mesh],
        "placements": encode(topology.reduced.placements, _no_tensor, _no_mesh),
        "shape": list(topology.shape),
    }
    note_transfer(session, "broadcast" if is_same else "scatter", dense)
    data = Data(made._id, str(dense.dtype).removeprefix("torch."), parts, place)
    session.put(data)
    return made.redistribute(topology.placements) if partial else made  # type: ignore[return-value]


def _part_of(dense: torch.Tensor, boxes: Any) -> tuple[tuple[int, ...], memoryview]:
    """What a worker gets: the boxes that it holds, one after the other."""
    joined = torch.cat([dense[each.slices].reshape(-1) for each in boxes]) if boxes else dense.new_empty(0)
    return (joined.numel(),), bytes_of(joined)


def _parameter(
    lease: ClusterLease, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    cls, data, *rest = args
    names = dict(zip(("mesh", "placements", "requires_grad"), rest, strict=False)) | kwargs
    needs = bool(names.pop("requires_grad", True))
    mesh, placements = names.get("mesh"), names.get("placements")
    from meshloom.tensor.creation import distribute

    if not isinstance(data, RemoteTensor):
        data = distribute(data.detach(), mesh, placements if placements is not None else {})
    elif placements is not None:
        data = data.redistribute(placements)
    refuse_partial_leaf(data.topology)
    if needs and not (data.dtype.is_floating_point or data.dtype.is_complex):
        fix = "cast it: x.float(), or give requires_grad=False"
        raise GradientError(f"a parameter of {data.topology.dtype} has no gradient", fix=fix)
    made = data.detach()
    made.requires_grad_(needs)
    made._is_param = True
    return made


_SPECIAL: dict[str, Any] = {"loom:distribute": _distribute, "loom:Parameter": _parameter}


# Reading


def fetch(tensor: RemoteTensor) -> torch.Tensor:
    """The values of a tensor, from those workers that hold different parts of it."""
    session, topology = tensor.session_checked(), tensor.topology
    lease = topology.mesh.lease
    assert isinstance(lease, ClusterLease)
    reduced = topology.reduced
    holders = lease.holders(reduced)
    answers = session.ask(lambda request: ["f", tensor._id, request], wanted=len(holders))
    for value, _ in answers:
        if "broken" in value:
            session.check()
            raise OperandError(value["broken"], tensor=topology, fix="a call that it was made by has failed")
    whole = torch.empty(topology.shape, dtype=torch_dtype(topology.dtype))
    for value, payload in answers:
        part = dense_of(value, payload)
        if len(value["boxes"]) == 1 and value["boxes"][0][1] == list(topology.shape):
            whole = part.view(topology.shape)
            break
        at = 0
        for start, shape in value["boxes"]:
            count = 1
            for size in shape:
                count *= size
            where = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
            whole[where] = part[at : at + count].view(tuple(shape))
            at += count
    note_transfer(session, "gather", whole)
    return whole


def fetch_plain(session: Session, number: int) -> torch.Tensor:
    """A plain tensor of the workers."""
    ((value, payload),) = session.ask(lambda request: ["f", number, request])
    return dense_of(value, payload)


def _to_torch(self: RemoteTensor) -> torch.Tensor:
    found = fetch(self)
    if self._tracked and _is_grad_enabled():
        return Fetched.apply(torch.zeros((), requires_grad=True), found)
    return found


class Fetched(torch.autograd.Function):
    """Values that were fetched from tensors with a gradient: what is computed of them here has none."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            "gradients do not flow from the client back to a cluster",
            fix="compute the loss on the mesh and fetch it, or fetch x.detach().to_torch()",
        )


def _item(self: RemoteTensor) -> Any:
    if self.numel() != 1:
        raise ArgumentError(
            f"item() takes a tensor of one element, not {self.numel()}",
            tensor=self.topology,
            fix="use x.tolist() or x.to_torch()",
        )
    return fetch(self).item()


def _session_checked(self: RemoteTensor) -> Session:
    self.topology.check_open()
    return self._session


# Gradients


def _requires_grad_(self: RemoteTensor, requires_grad: bool = True) -> RemoteTensor:
    self.topology.check_open()
    if bool(requires_grad) == bool(self._tracked):
        return self
    if requires_grad:
        refuse_partial_leaf(self.topology)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise GradientError(f"a tensor of {self.topology.dtype} has no gradient", fix="cast it: x.float()")
        _set_tracked(self, 1, Node((), weakref.ref(self)))
    else:
        if self._tracked == 2:
            raise GradientError(
                "requires_grad of a tensor that was computed cannot be taken away", fix="x.detach() has no gradient"
            )
        _set_tracked(self, 0, None)
    send(self._session, "m:requires_grad_", [{"t": self._id}, bool(requires_grad)])
    return self


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _starts(tensors: Any, seeds: Any) -> list[RemoteTensor]:
    starts = _as_list(tensors)
    given = _as_list(seeds) if seeds is not None else [None] * len(starts)
    for each, seed in zip(starts, given, strict=True):
        if not isinstance(each, RemoteTensor):
            raise UnsupportedError(
                "backward starts from a tensor of a cluster and a plain one together", fix="call backward on each"
            )
        if not each._tracked:
            raise GradientError(
                "backward starts from a tensor that does not require a gradient",
                tensor=each.topology,
                fix="call requires_grad_() on what it is computed from, outside of torch.no_grad()",
            )
        if seed is None and each.numel() != 1:
            raise GradientError(
                "backward starts from one number and this tensor has more",
                tensor=each.topology,
                fix="reduce it first, as in y.sum().backward(), or give backward(gradient=...)",
            )
    return starts


def _backward(
    self: RemoteTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _autograd_backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def _autograd_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    starts = _starts(tensors, grad_tensors)
    leaves = _reached(starts)
    if inputs is not None:
        wanted = {id(each) for each in _as_list(inputs)}
        leaves = [each for each in leaves if id(each) in wanted]
    session = starts[0].session_checked()
    lease = starts[0].topology.mesh.lease
    assert isinstance(lease, ClusterLease)
    call = _Call("f:torch.autograd.backward", session, lease, True)
    args = [call.read(each) for each in (starts, grad_tensors, retain_graph, bool(create_graph))]
    named = {"inputs": call.read(_as_list(inputs))} if inputs is not None else 0
    _match_context(session)
    line = _line()
    session.put(["c", "f:torch.autograd.backward", args, named, [], line, 0])
    session.log.append((session.issued, "f:torch.autograd.backward", line, None, 0))
    for leaf in leaves:
        leaf._has_slope = True
        leaf._stale = True


def _reached(starts: list[RemoteTensor]) -> list[RemoteTensor]:
    found = []
    for node in nodes_from([each._node for each in starts if each._node is not None]):
        if node.leaf is not None:
            leaf = node.leaf()
            if leaf is not None and leaf._tracked:
                found.append(leaf)
    return found


def _gradient(self: RemoteTensor) -> RemoteTensor | None:
    self.topology.check_open()
    if not self._has_slope:
        return None
    kept = self._slope
    if kept is None or self._stale:
        made = make_remote(self._session, self.topology.reduced)
        send(self._session, "get:grad", [{"t": self._id}], [made._id])
        self._slope, self._stale = made, False
        return made
    return kept


def _set_gradient(self: RemoteTensor, value: Any) -> None:
    self.topology.check_open()
    self._slope = None
    self._has_slope = value is not None
    self._stale = True
    lease = self.topology.mesh.lease
    assert isinstance(lease, ClusterLease)
    call = _Call("set:grad", self._session, lease, True)
    send(self._session, "set:grad", [{"t": self._id}, call.read(value)])


RemoteTensor._stale = False  # type: ignore[attr-defined]


def _autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    only_inputs: bool = True, allow_unused: Any = None, is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:  # fmt: skip
    starts, wanted = _starts(outputs, grad_outputs), _as_list(inputs)
    session = starts[0].session_checked()
    reached = {id(node) for node in nodes_from([each._node for each in starts if each._node is not None])}
    lease = starts[0].topology.mesh.lease
    assert isinstance(lease, ClusterLease)
    for each in wanted:
        if not isinstance(each, RemoteTensor):
            raise UnsupportedError("gradients of plain tensors do not come back from workers", fix="put it on the mesh")
        if each._node is None:
            raise GradientError("one of the inputs does not require a gradient", tensor=each.topology)
    is_used = [id(each._node) in reached for each in wanted]
    if not all(is_used) and not allow_unused and not materialize_grads:
        raise GradientError("the outputs do not depend on one of the inputs", fix="allow_unused=True gives None for it")
    call = _Call("f:torch.autograd.grad", session, lease, True)
    args = [call.read(each) for each in (starts, wanted, grad_outputs, retain_graph, bool(create_graph))]
    named = {"allow_unused": bool(allow_unused), "materialize_grads": bool(materialize_grads)}
    made: list[RemoteTensor | None] = []
    for each, used in zip(wanted, is_used, strict=True):
        if not used and not materialize_grads:
            made.append(None)
            continue
        found = make_remote(session, each.topology.reduced)
        if create_graph:
            _set_tracked(found, 2, Node(tuple(start._node for start in starts if start._node is not None)))
        made.append(found)
    _match_context(session)
    numbers = [each._id for each in made if each is not None]
    session.put(["c", "f:torch.autograd.grad", args, named, numbers, _line(), 0])
    return tuple(made)


def _retain_grad(self: RemoteTensor) -> None:
    if self._tracked == 2:
        assert self._node is not None
        self._node.leaf = weakref.ref(self)
        self._keeps_slope = True
        send(self._session, "m:retain_grad", [{"t": self._id}])


def _refuse(what: str, fix: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{what} on a tensor of a cluster would run code of the client inside of a worker", fix=fix
        )

    return refuse


def _detach_(self: RemoteTensor) -> RemoteTensor:
    _set_tracked(self, 0, None)
    send(self._session, "m:detach_", [{"t": self._id}])
    return self


# The class, filled


def _method(name: str, function: Any) -> Callable[..., Any]:
    code = f"m:{name}"

    def method(self: RemoteTensor, *args: Any, **kwargs: Any) -> Any:
        return forward(code, function, (self, *args), kwargs)

    method.__name__ = name
    method.__doc__ = getattr(function, "__doc__", None)
    return method


def _binary(name: str, function: Any) -> Callable[..., Any]:
    code = f"m:{name}"

    def operator(self: RemoteTensor, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return forward(code, function, (self, other), {})

    operator.__name__ = name
    return operator


_OPERANDS = (torch.Tensor, numpy.ndarray, numpy.generic, int, float, bool, complex)


def _property(name: str, settable: bool) -> property:
    def get(self: RemoteTensor) -> Any:
        return forward(f"get:{name}", lambda each: getattr(each, name), (self,), {})

    def put(self: RemoteTensor, value: Any) -> None:
        forward(f"set:{name}", lambda each, given: setattr(each, name, given), (self, value), {})

    return property(get, put if settable else None)


def _torch_function(
    cls: type, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Everything of torch's on a tensor of a cluster."""
    named = kwargs or {}
    known = KNOWN.get(function)
    if known in _GRADIENTS:
        return _GRADIENTS[known](*args, **named)
    name = torch_names().get(function)
    spelled = getattr(function, "__name__", "")
    if spelled in ("__get__", "__set__", "__delete__"):
        attribute = function.__self__.__name__
        if attribute in PROPERTIES and spelled == "__get__":
            return forward(f"get:{attribute}", lambda each: getattr(each, attribute), args, named)
        with private.DisableTorchFunctionSubclass():
            return function(*args)
    if isinstance(args[0] if args else None, RemoteTensor) and spelled in vars(RemoteTensor) and spelled in _ANSWERED:
        return getattr(args[0], spelled)(*args[1:], **named)
    if getattr(function, "__module__", "") == torch.nn.init.__name__:
        with private.DisableTorchFunctionSubclass():
            return function(*args, **named)
    if name is None:
        raise UnsupportedError(
            f"{spelled or function} cannot be called on workers",
            fix="fetch the tensor first: x.to_torch()",
        )
    return forward(name if name.startswith("known:") else f"f:{name}", _calling(function), args, named)


def _calling(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: on_torch(Tensor, function, (), args, kwargs)


def _torch_dispatch(cls: type, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
    if function is torch.ops.prim.layout.default:
        raise UnsupportedError(
            "a torch.autograd.Function of the program on a tensor of a cluster: its backward would run inside of a worker",
            fix="write it with ops, or as an op of your own (docs/extending.md) in a program that all ranks run",
        )
    if function is torch.ops.aten.detach.default:
        return args[0].detach()
    raise UnsupportedError(f"{function} was called by torch itself on a tensor of a cluster", fix="x.to_torch() first")


_GRADIENTS: dict[Any, Any] = {
    "backward": _backward, "_autograd_backward": _autograd_backward, "_autograd_grad": _autograd_grad,
}  # fmt: skip

_HOOKS = "hooks"
_OWN: dict[str, Any] = {
    "size": Tensor.__dict__["size"],
    "item": _item,
    "tolist": lambda self: fetch(self).tolist(),
    "numpy": lambda self, **_: fetch(self).numpy(),
    "to_torch": _to_torch,
    "session_checked": _session_checked,
    "_read": lambda self, call: fetch(self),
    "requires_grad_": _requires_grad_,
    "requires_grad": property(lambda self: bool(self._tracked), lambda self, value: _requires_grad_(self, value) and None),
    "is_leaf": property(lambda self: self._tracked != 2),
    "retain_grad": _retain_grad,
    "retains_grad": property(lambda self: self._keeps_slope),
    "grad": property(_gradient, _set_gradient, lambda self: _set_gradient(self, None)),
    "grad_fn": property(lambda self: self._node if self._tracked == 2 else None),
    "backward": _backward,
    "detach_": _detach_,
    "register_hook": _refuse("a hook", "look at x.grad after backward, or write the change as ops on it"),
    "register_post_accumulate_grad_hook": _refuse("a hook", "look at x.grad after backward"),
    "data_ptr": _refuse("data_ptr()", "x.to_torch().data_ptr()"),
    "untyped_storage": _refuse("untyped_storage()", "x.to_torch().untyped_storage()"),
    "storage": _refuse("storage()", "x.to_torch().storage()"),
    "is_meta": False,
    "is_cpu": True,
    "is_cuda": False,
    "layout": torch.strided,
    "nbytes": property(lambda self: self.numel() * self.dtype.itemsize),
    "itemsize": property(lambda self: self.dtype.itemsize),
    "_version": property(lambda self: self._writes),
    "is_complex": lambda self: self.dtype.is_complex,
    "is_floating_point": lambda self: self.dtype.is_floating_point,
    "is_signed": lambda self: self.dtype.is_signed,
    "element_size": lambda self: self.dtype.itemsize,
    "__bool__": lambda self: bool(_item(self)),
    "__float__": lambda self: float(_item(self)),
    "__int__": lambda self: int(_item(self)),
    "__complex__": lambda self: complex(_item(self)),
    "__index__": lambda self: fetch(self).__index__(),
    "__array__": lambda self, dtype=None, copy=None: numpy.asarray(fetch(self).numpy(), dtype=dtype),
    "__torch_function__": classmethod(_torch_function),
    "__torch_dispatch__": classmethod(_torch_dispatch),
    "__hash__": object.__hash__,
}
# methods that ask a tensor and compute nothing: as they are, on what the client knows
_ASKS = frozenset(
    "size numel nelement dim ndimension is_contiguous is_same_size __len__ __format__ __contains__ __dir__ __pos__ "
    "__neg__ __abs__ __invert__ __hash__ _guard _seen where mesh placements shape dtype device ndim topology _data "
    "__array_priority__ is_sparse T mT".split()
)
_ANSWERED = frozenset({*_OWN, *_ASKS})


def _fill() -> None:
    for name, attribute in vars(Tensor).items():
        if name in vars(RemoteTensor) or name in _OWN or name in _ASKS or name in _LEFT:
            continue
        if isinstance(attribute, property):
            if name in PROPERTIES:
                setattr(RemoteTensor, name, _property(name, attribute.fset is not None))
        elif callable(attribute) and not isinstance(attribute, type):
            is_operator = name.startswith("__") and name not in ("__getitem__", "__setitem__")
            setattr(RemoteTensor, name, (_binary if is_operator else _method)(name, attribute))
    for name, attribute in _OWN.items():
        setattr(RemoteTensor, name, attribute)


_LEFT = frozenset(
    "__new__ __init__ __doc__ __module__ __slots__ __dict__ __weakref__ __annotations__ __getattr__ _replace _become "
    "_mirror _mirror_to _mask_padding_ _check_summed _value _repr_html_ __torch_function__ __torch_dispatch__ block "
    "__init_subclass__ __class_getitem__ shard_at".split()
)
_fill()


def listen() -> None:
    """Take calls on the meshes of clusters from now on."""
    Clients.take = take
