"""A call on tensors of a cluster: read, looked up or decided, queued for the workers.

`forward` is the one way. Its key holds all that the result's form depends on; what was decided for a key is kept, so
that a call like it costs one look-up, a new tensor and a line in the queue.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from meshloom.collectives import Collective
from meshloom.context import Event
from meshloom.controller import outcomes
from meshloom.controller.outcomes import Constant, Many, New, Outcome, Same, stand_in
from meshloom.controller.session import Data, Session
from meshloom.controller.tensors import (
    ClusterLease,
    Deciding,
    Node,
    RemoteTensor,
    join_family,
    lease_of,
    make_remote,
    maker,
    refuse_foreign,
    set_tracked,
    turn_into,
)
from meshloom.controller.values import PLACEMENTS, encode
from meshloom.controller.worker import bytes_of, tensors_in
from meshloom.engines import private
from meshloom.errors import ArgumentError, MeshError, UnsupportedError, place_of
from meshloom.fabric import VIRTUAL
from meshloom.mesh import Mesh
from meshloom.placement import Topology
from meshloom.runtime import state
from meshloom.runtime.leases import listen
from meshloom.tensor import random
from meshloom.tensor.base import Tensor
from meshloom.tensor.quick import POINTWISE
from meshloom.tensor.recording import Recorder

_is_grad_enabled = torch.is_grad_enabled
_any_autocast = private.is_any_autocast_enabled

OUTCOMES: dict[Any, Outcome] = {}
MOST_OUTCOMES = 1 << 14
MOST_PLAIN = 256  # plain tensors that workers keep for the next use
RESERVED = 64  # numbers for the results of a call that only workers can describe
listen(lambda lease: OUTCOMES.clear())

# Functions whose results have shapes that do not depend on the values of whole numbers among the operands.
_INDEXED = frozenset(
    "embedding cross_entropy nll_loss index_select gather take_along_dim scatter scatter_ scatter_add scatter_add_ "
    "index_add index_add_ index_copy index_copy_ index_fill index_fill_ __getitem__ __setitem__ add sub mul div eq ne "
    "lt le gt ge where one_hot __add__ __sub__ __mul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ distribute".split()
)


# Where and in which modes


_LINES: dict[tuple[str, int], str] = {}


def line_here(depth: int = 2) -> str:
    """The line of the program that is calling."""
    place = place_of(sys._getframe(depth))
    found = _LINES.get(place)
    if found is None:
        found = _LINES[place] = f"{place[0].rpartition('/')[2]}:{place[1]}" if place[0] else ""
    return found


def match_context(session: Session) -> Any:
    """Let the workers have the modes of this thread: gradients, autocast, what is asked for or forbidden."""
    plain = state.plain
    if not plain and any(isinstance(each, Recorder) for each in state.logs):
        raise UnsupportedError(
            "a dry run does not look at tensors of a cluster, which would do the work",
            fix="dry-run the program on a mesh of this process: loom.open_mesh(shape, axes)",
        )
    now = (
        _is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_autocast_dtype("cpu") if _any_autocast() and torch.is_autocast_enabled("cpu") else None,
        None if plain else _freeze(state.output),
        None if plain else _freeze(state.chosen),
        state.accumulating,
        not plain and state.policy is not None and state.policy.level == "forbid",
    )
    if now != session.context:
        if not plain and state.machine is not VIRTUAL:
            raise UnsupportedError(
                "a cluster plans for the machine that it is on", fix="use_machine(...) goes with explain and dry_run"
            )
        session.context = now
        session.put(["x", {
            "grad": now[0],
            "dtype": str(now[1]).removeprefix("torch."),
            "cast": None if now[2] is None else str(now[2]).removeprefix("torch."),
            "output": None if plain or state.output is None else encode(state.output, refuse_tensor, refuse_mesh),
            "chosen": None if plain else state.chosen,
            "accumulating": now[5],
            "forbid": now[6],
        }])  # fmt: skip
    return now


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def refuse_tensor(value: torch.Tensor) -> int:
    """Where no tensor can be."""
    raise ArgumentError("a tensor stands where a number, a word or a placement is wanted")


def refuse_mesh(value: Mesh) -> int:
    """Where no mesh can be."""
    raise ArgumentError("a mesh stands where a number, a word or a placement is wanted")


# Reading arguments


class Reading:
    """The arguments of one call, as they are read: the key, and the tensors in order."""

    __slots__ = ("is_named_by_value", "key", "lease", "numbers_matter", "session", "tensors", "values_matter")

    def __init__(self, name: str, lease: ClusterLease) -> None:
        self.session, self.lease = lease.session, lease
        self.key: list[Any] = [name]
        self.tensors: list[RemoteTensor] = []
        self.numbers_matter, self.values_matter = _kind_of(name)

    def read(self, value: Any) -> Any:
        """The wire form of an argument; the key and the tensors grow."""
        kind = value.__class__
        if kind is RemoteTensor:
            if value._session is not self.session:
                raise MeshError("tensors of two clusters in one call", fix="fetch one of them: x.to_torch()")
            if value._is_foreign:
                refuse_foreign(value)
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
        return self._read_other(value, kind)

    def _read_other(self, value: Any, kind: type) -> Any:
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
            return {"t": self._read_plain(value)}
        if isinstance(value, Mesh):
            self.key.append(value)
            if value not in self.lease.meshes:
                raise MeshError("a mesh of this process beside a tensor of a cluster", fix="cluster.open_mesh(...)")
            return {"m": self.lease.meshes[value]}
        if isinstance(value, torch.Generator):
            return {"g": 0}
        if isinstance(value, numpy.generic):
            return self.read(value.item())
        found = encode(value, refuse_tensor, refuse_mesh)
        self.key.append(value)
        return found

    def _read_plain(self, value: torch.Tensor) -> int:
        if value.requires_grad and _is_grad_enabled():
            raise UnsupportedError(
                "a plain tensor that requires a gradient stands beside one of a cluster: its gradient would have to "
                "come back from the workers",
                fix="put it on the mesh: loom.Parameter(w, mesh, placements), or give w.detach()",
            )
        number, digest = send_plain(self.session, value)
        self.key += (torch.Tensor, tuple(value.shape), value.dtype)
        if value.dtype is torch.bool or (self.values_matter and not value.is_floating_point()):
            self.key.append(digest)
        return number


_KINDS: dict[str, tuple[bool, bool]] = {}


def _kind_of(name: str) -> tuple[bool, bool]:
    """Whether a call's form depends on numbers among its arguments, and on the values of whole numbers in tensors."""
    found = _KINDS.get(name)
    if found is None:
        bare = name.rpartition(".")[2].rpartition(":")[2]
        found = _KINDS[name] = (bare.rstrip("_") not in POINTWISE and bare not in POINTWISE, bare not in _INDEXED)
    return found


def send_plain(session: Session, value: torch.Tensor) -> tuple[int, bytes]:
    """The number of a plain tensor that all workers have, which get it once; and a digest of what it holds."""
    dense = value.detach().contiguous().cpu()
    digest = hashlib.blake2b(bytes_of(dense), digest_size=20).digest()
    key = digest, dense.dtype, tuple(dense.shape)
    number = session.plain.pop(key, None)
    if number is None:
        number = next(session.numbers)
        if len(session.plain) >= MOST_PLAIN:
            session.queue.append(session.plain.pop(next(iter(session.plain))))
        note_transfer(session, "broadcast", dense)
        name, part = str(dense.dtype).removeprefix("torch."), (dense.shape, bytes_of(dense.clone()))
        session.put(Data(number, name, [part] * session.workers))
    session.plain[key] = number  # now the youngest
    return number, digest


def note_transfer(session: Session, kind: str, data: torch.Tensor) -> None:
    """Data that goes between the client and its workers, for the log."""
    session.log.append((session.issued, kind, line_here(3), None, data.numel() * data.itemsize))


# One call


def forward(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on tensors of a cluster; `function` is what would run here on tensors without data."""
    lease = find_lease(args, kwargs)
    assert lease is not None
    if state.shadows is not None:
        return _replace_in(function, args, kwargs, _shadow_of)
    session = lease.session
    if session.failure is not None or session.is_closed:
        session.check()
    call = Reading(name, lease)
    encoded = [call.read(each) for each in args]
    named: Any = 0
    if kwargs:
        named = {}
        for word, each in kwargs.items():
            call.key.append(word)
            named[word] = call.read(each)
    with session.lock:
        call.key.append(match_context(session))
        key = tuple(call.key)
        outcome = OUTCOMES.get(key)
        keys: list[int] = []
        if outcome is None:
            outcome, keys = _decide_first(key, function, args, kwargs, call.tensors)
        elif outcome.keys:
            keys = [random.draw_key(kwargs.get("generator")) for _ in range(outcome.keys)]
        if outcome.is_asked:
            return _ask(name, encoded, named, keys, call)
        if outcome.is_unsure:
            result = _ask(name, encoded, named, keys, call)
            dtypes = iter([each.topology.dtype for each in tensors_in(result) if isinstance(each, Tensor)])
            outcome.results, outcome.is_unsure = outcomes.retype(outcome.results, dtypes), False
            return result
        if not state.plain and state.watching:
            state.check(outcome.events)
        numbers: list[int] = []
        result = _make_results(outcome.results, call.tensors, session, numbers)
        for write in outcome.writes:
            _note_write(call.tensors, write)
        issue(session, ["c", name, encoded, named, numbers, line_here(3), keys], outcome)
        return result


def issue(session: Session, command: list[Any], outcome: Outcome | None) -> None:
    """Queue a call and write it into the log; while somebody records, wait and write down what the workers did."""
    line = command[5]
    if command[6]:
        session.refuse_while_capturing("random numbers were drawn")
    if not state.plain and state.logs:
        ((told, _),) = session.ask(lambda request: ["r", command, request])
        events = tuple(_read_event(each) for each in told)
        for log in state.logs:
            for plan, _ in outcome.plans if outcome is not None else ():
                log.note_call(plan, line)
        state.log(events)
    else:
        session.put(command)
    session.log.append((session.issued, command[1], line, outcome, 0))


def _read_event(told: list[Any]) -> Event:
    (kind, axis, devices, size, dtype, shape, op), call, where, phase, host = told
    return Event(Collective(kind, axis, devices, size, dtype, tuple(shape), op), call, where, phase, host)


def _shadow_of(tensor: RemoteTensor) -> Tensor:
    """What stands for a tensor of a cluster while something is explained: the same for the length of it."""
    known = state.shadows.known.get(id(tensor))
    if known is None:
        known = state.shadows.known[id(tensor)] = (tensor, stand_in(tensor.topology, tensor._tracked))
    found: Tensor = known[1]
    return found


def _decide_first(
    key: Any, function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[RemoteTensor]
) -> tuple[Outcome, list[int]]:
    tracks = torch.is_grad_enabled()
    Deciding.now += 1
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(tracks):  # in that mode torch does not count writes
            standing = {id(each): stand_in(each.topology, each._tracked) for each in tensors}
            ordered = [standing[id(each)] for each in tensors]
            found = outcomes.decide(
                lambda: _replace_in(function, args, kwargs, lambda each: standing[id(each)]), ordered
            )
    finally:
        Deciding.now -= 1
    if len(OUTCOMES) >= MOST_OUTCOMES:
        del OUTCOMES[next(iter(OUTCOMES))]
    OUTCOMES[key] = found[0]
    found[0].is_unsure = _any_autocast() and not found[0].is_asked and not found[0].writes
    return found


def _replace_in(function: Callable[..., Any], args: Any, kwargs: Any, replace: Callable[[Any], Any]) -> Any:
    """The call with something else in place of the cluster's tensors."""

    def change(value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return replace(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)([change(each) for each in value])
        if isinstance(value, dict):
            return {key: change(each) for key, each in value.items()}
        return value

    return function(*[change(each) for each in args], **{key: change(each) for key, each in kwargs.items()})


def _make_results(found: Any, tensors: list[RemoteTensor], session: Session, numbers: list[int]) -> Any:
    if found.__class__ is New:
        made = maker(found.topology, found.is_tracked)()
        made.topology, made._session = found.topology, session
        made._id = number = next(session.numbers)
        numbers.append(number)
        if found.is_tracked:
            made._tracked, made._node = 2, _node_of(tensors, found.parents)
            if not found.parents:
                made._tracked, made._node = 1, Node((), weakref.ref(made))
        if found.view_of is not None:
            join_family(tensors[found.view_of], made)
        if found.same_as is not None:
            made._memory = tensors[found.same_as]._memory_key
        return made
    if found.__class__ is Same:
        numbers.append(tensors[found.place]._id)
        return tensors[found.place]
    if found.__class__ is Many:
        return found.make([_make_results(each, tensors, session, numbers) for each in found.parts])
    assert found.__class__ is Constant
    return found.value


def _node_of(tensors: list[RemoteTensor], parents: tuple[int, ...]) -> Node:
    return Node(tuple([node for place in parents if (node := tensors[place]._node) is not None]))


def _note_write(tensors: list[RemoteTensor], write: Any) -> None:
    target = tensors[write.place]
    target._writes += 1
    if write.topology is not target.topology:
        turn_into(target, write.topology)
    if write.is_tracked and target._tracked != 1:
        node = _node_of(tensors, write.parents)
        for reference in target._family or [weakref.ref(target)]:
            each = reference()
            if each is not None and each._tracked != 1:
                own = () if each is target or each._node is None else (each._node,)
                set_tracked(each, 2, Node((node, *own)))


# Calls that only workers can describe


def _ask(name: str, encoded: list[Any], named: Any, keys: list[int], call: Reading) -> Any:
    """A call whose result depends on values: the workers say what came of it."""
    session, line = call.session, line_here(4)
    first = next(session.numbers)
    for _ in range(RESERVED):
        next(session.numbers)
    ((value, _),) = session.ask(lambda request: ["q", name, encoded, named, first, line, keys, request])
    session.log.append((session.issued, name, line, None, 0))
    return _read_answer(value, call, tuple(each._node for each in call.tensors if each._node is not None))


def _read_answer(value: Any, call: Reading, parents: tuple[Node, ...]) -> Any:
    if isinstance(value, list):
        return [_read_answer(each, call, parents) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_read_answer(each, call, parents) for each in value["tuple"])
    if "same" in value:
        return next(each for each in call.tensors if each._id == value["same"])
    if "plain" in value:
        from meshloom.controller.reading import fetch_plain

        return fetch_plain(call.session, value["plain"])
    mesh = next(each for each, number in call.lease.meshes.items() if number == value["mesh"])
    placed = [PLACEMENTS[kind](*rest) for kind, *rest in value["placements"]]
    made = make_remote(call.session, Topology(mesh, placed, value["shape"], value["dtype"]), value["tensor"])
    if value["tracked"]:
        set_tracked(made, 2, Node(parents))
    return made


def find_lease(args: Any, kwargs: Any) -> ClusterLease | None:
    """The cluster of the first tensor or mesh among arguments."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if value.__class__ is RemoteTensor:
            return lease_of(value.topology)
        if isinstance(value, Mesh) and isinstance(value.lease, ClusterLease):
            return value.lease
        if value.__class__ is list or value.__class__ is tuple:
            found = find_lease(value, {})
            if found is not None:
                return found
    return None


def send(tensor: RemoteTensor, name: str, *rest: Any, results: list[int] | None = None) -> None:
    """A call on one tensor that needs no deciding."""
    lease = lease_of(tensor.topology)
    call = Reading(name, lease)
    with lease.session.lock:
        encoded = [{"t": tensor._id}, *(call.read(each) for each in rest)]
        lease.session.put(["c", name, encoded, 0, results or [], line_here(3), 0])
