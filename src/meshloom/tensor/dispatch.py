"""One op call: look up the plan, run its kernel, wrap the result. The one short file where deciding and doing meet.

For a call seen before this is one dictionary look-up and the kernel call. `call` is the general way in; the operators
of `Tensor` try `CACHE` with a shorter key first.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from meshloom.backends import kernel_of
from meshloom.backends.checks import STORY, is_compared, note_data
from meshloom.engines.kernel import Function, Kernel, function_of
from meshloom.engines.layout import short_name, torch_dtype
from meshloom.errors import GradientError, MeshError, MeshloomError, OperandError
from meshloom.mesh import Lease, Mesh
from meshloom.ops import OPS, Call
from meshloom.ops.binding import bind, refer
from meshloom.placement import Partial, Replicate, Topology, as_placements
from meshloom.planner import Plan, plan, retyped
from meshloom.runtime import Event, leases, state, where
from meshloom.tensor.base import Tensor, maker
from meshloom.tensor.binding import NUMBERS, freeze, freeze_number
from meshloom.tensor.gradient_sums import Back, follow
from meshloom.tensor.joining import refuse_transforms
from meshloom.tensor.views import attach

LIMIT = 1 << 14


class Entry:
    """A call seen before: its plan, its kernel and the topologies that come out."""

    __slots__ = (
        "_back", "communicates_back", "direct", "free", "is_view", "kernel", "leased", "op", "out", "outs", "plan",
        "salt", "tracked",
    )  # fmt: skip

    def __init__(self, decided: Plan, kernel: Kernel, direct: Function | None) -> None:
        self.plan = decided
        self.kernel = kernel
        self.outs = decided.outs
        self.out = decided.outs[0]
        self.direct = direct
        self.op = decided.call.op
        self.is_view, self.leased = OPS[self.op].is_view, decided.mesh.lease is not None
        self.free, self.tracked = (maker(self.out, torch_dtype(self.out.dtype), tracked) for tracked in (False, True))
        self.salt = _salt(decided) if decided.mesh.is_split else 0  # of what this call makes of its operands' numbers
        self._back: Back | None = None
        self.communicates_back = True  # until the first call with a gradient has looked

    def back(self) -> Back:
        """What its backward communicates."""
        if self._back is None:
            plan, places = self.plan, range(len(self.plan.call.operands))
            lasts = tuple(self.kernel.ins[i].placements == plan.call.operands[i].placements for i in places)
            self._back = Back(plan.backward_results(), tuple(plan.backward(i) for i in places), lasts)
            self.communicates_back = bool(self._back)
        return self._back

    def wrap(self, results: Any) -> Any:
        """The results of the kernel as tensors."""
        if results.__class__ is torch.Tensor:
            if self.leased or not results.is_cpu:
                return Tensor(self.out, results)
            made = self.tracked() if results.requires_grad else self.free()
            made._data, made.topology = results, self.out
            return made
        if isinstance(results, torch.Tensor):
            return Tensor(self.out, results)
        wrapped = tuple([Tensor(topology, result) for topology, result in zip(self.outs, results, strict=True)])
        pack = PACKED.get(self.op)
        return wrapped if pack is None else pack(wrapped)

    def follow(self, results: Any, tensors: Sequence[Tensor], is_written: bool = False) -> Any:
        """The results; if they have a backward that communicates, it is seen."""
        tracked = results.requires_grad if isinstance(results, torch.Tensor) else any(r.requires_grad for r in results)
        if tracked and (back := self._back or self.back()):
            return follow(self.plan.call.op, back, results, tensors, is_written)
        return results


def _salt(decided: Plan) -> int:
    """A number of a call and its arguments that is the same in every process; 0 stands for one process."""
    call = decided.call
    plain = {name: each for name, each in call.arguments.items() if isinstance(each, (int, float, str, tuple))}
    return zlib.crc32(f"{call.op} {call.operands} {plain} {call.leaves}".encode()) or 1


def identity(salt: int, tensors: Iterable[Tensor], arguments: Iterable[Any] = ()) -> int:
    """What a call makes of its operands: which tensors it works on, as a number that is the same in every process."""
    for tensor in tensors:
        salt = (salt * 1000003 + tensor._number) & _MASK
    for each in arguments:
        if each.__class__ in NUMBERS and each == each:
            salt = (salt * 1000003 + hash(each)) & _MASK
    return salt


_MASK = (1 << 63) - 1

CACHE: dict[Any, Entry] = {}
_PLAINLY = (False, None)  # not in place, no autocast: nothing in the key, which the hot path builds at every call
_BESIDES = object()  # no argument is equal to it
_LEASED: dict[Lease | None, set[Any]] = {}  # the keys of calls on meshes that end
_LOCK = threading.Lock()


def remember(key: Any, entry: Entry) -> None:
    """Keep an entry; the oldest goes when the cache is full."""
    with _LOCK:
        if len(CACHE) >= LIMIT:
            oldest = next(iter(CACHE))
            _LEASED.get(CACHE.pop(oldest).plan.mesh.lease, set()).discard(oldest)
        CACHE[key] = entry
        lease = entry.plan.mesh.lease
        if lease is not None:
            _LEASED.setdefault(lease, set()).add(key)


def forget(lease: Lease) -> None:
    """Drop the entries of calls on a mesh that has come to its end."""
    with _LOCK:
        for key in _LEASED.pop(lease, ()):
            CACHE.pop(key, None)


leases.listen(forget)


def autocast_key() -> Any:
    """What autocast changes about a call."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Reader:
    """Reads the arguments of one call: unwraps parameters, makes plain tensors replicated ones, builds the key."""

    __slots__ = ("_given", "_mesh", "key", "numbers", "plain", "shadows", "tensors")

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], numbers_matter: bool) -> None:
        self._given = (name, args, kwargs)
        self._mesh: Mesh | None = None
        self.numbers = numbers_matter
        self.shadows = state.shadows
        self.tensors: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.key: list[Any] = [name]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first of our tensors."""
        if self._mesh is None:
            name, args, kwargs = self._given
            self._mesh = find_mesh(args) or find_mesh(kwargs.values())
            if self._mesh is None:
                raise MeshError(f"{name} got no meshloom tensor", fix="put an operand on a mesh with loom.distribute")
        return self._mesh

    def read(self, value: Any) -> Any:
        """The argument as dispatch uses it."""
        kind = value.__class__
        if kind is Tensor or isinstance(value, Tensor):
            if self.shadows is not None:
                value = self.shadows.of(value)
        elif kind in NUMBERS:
            self.key.append(freeze_number(value) if self.numbers else kind)
            return value
        elif kind is tuple or kind is list:
            self.key.append(len(value))
            return tuple([self.read(each) for each in value])
        elif isinstance(value, torch.Tensor):
            made = as_tensor(value, self.mesh)
            if made._data is value or made._data._base is value:
                self.plain.append(made)
            value = made
        elif isinstance(value, numpy.ndarray):
            value = as_tensor(torch.as_tensor(value), self.mesh)
        elif isinstance(value, numpy.generic):
            return self.read(value.item())
        else:
            self.key.append(freeze(value))
            return tuple(value) if isinstance(value, tuple) else value
        self.tensors.append(value)
        self.key.append(value.topology)
        return value


def as_tensor(value: torch.Tensor, mesh: Mesh) -> Any:
    """A torch tensor as one of ours: a parameter's own, or a replicated one."""
    if isinstance(value, Tensor):
        return state.shadows.of(value) if state.shadows is not None else value
    refuse_transforms(value)
    if mesh.is_split and is_compared() and not value.is_meta and state.shadows is None:
        note_data("operand", value)
    if mesh.is_split and value.is_leaf and value.requires_grad:
        value = value.view_as(value)  # torch reads its gradient, not we: it is summed at each use
    shape = tuple(value.shape)
    made = Tensor(Topology(mesh, (Replicate(),) * mesh.ndim, shape, short_name(value.dtype)), value)
    return state.shadows.of(made) if state.shadows is not None else made


def find_mesh(values: Any) -> Mesh | None:
    """The mesh of the first meshloom tensor among arguments, lists included."""
    for value in values:
        if isinstance(value, Tensor):
            return value.topology.mesh
        if isinstance(value, (tuple, list)):
            found = find_mesh(value)
            if found is not None:
                return found
    return None


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any], output: Any = None) -> Any:
    """Run an op of the table on any mix of operands and return the wrapped result."""
    found = Resolved(name, args, kwargs, output)
    result = found.perform()
    if TRAIL.calls is not None:
        TRAIL.calls.append((found, result))
    return result


class _Trail(threading.local):
    """The calls that were made while somebody wanted to know, with their results, and those in place."""

    calls: list[tuple[Resolved, Any]] | None = None
    written: list[Resolved] | None = None


TRAIL = _Trail()


class Resolved:
    """One call with its arguments read and its entry found or decided.

    `kept` are the placements of the target that an in-place call writes to: its result has them whatever is asked.
    """

    __slots__ = ("args", "entry", "key", "known", "kwargs", "op", "request", "tensors")

    def __init__(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], output: Any, kept: tuple[Any, ...] | None = None
    ) -> None:
        self.op = OPS[name]
        reader = Reader(name, args, kwargs, self.op.signature is not None)
        self.args = tuple([reader.read(each) for each in args])
        self.kwargs = {k: reader.read(_number(name, k, value)) for k, value in kwargs.items()} if kwargs else kwargs
        self.tensors = reader.tensors
        if not self.tensors:
            reader.mesh  # noqa: B018  raises
        if reader.plain:
            _follow_to_meta(reader.plain, reader.tensors)
        self.request = kept
        key = reader.key
        if kwargs:
            key.extend(kwargs)
        special = (kept is not None, autocast_key())
        if special != _PLAINLY:
            key += (_BESIDES, *special)
        if output is not None or not state.plain:
            wanted = output if output is not None else state.output
            if kept is None and wanted is not None:
                self.request = _request(wanted, reader.mesh)
            key += (_BESIDES, self.request, state.machine, freeze(tuple(sorted((state.chosen or {}).items()))))
        if self.request is not None and any(each.__class__ is Partial for each in self.request):
            # rows that keep a sum look at the numbers that scale it
            key += (
                _BESIDES,
                *(freeze(each) for each in (*self.args, *self.kwargs.values()) if each.__class__ in NUMBERS),
            )
        self.key = tuple(key)
        entry = CACHE.get(self.key)
        self.known = entry is not None
        self.entry = entry if entry is not None else self._decide(self.request)

    def _decide(self, request: Any) -> Entry:
        operands = tuple(tensor.topology for tensor in self.tensors)
        try:
            seen: list[Any] = []
            spelled = tuple(refer(each, seen, Tensor) for each in self.args)
            named = {name: refer(value, seen, Tensor) for name, value in self.kwargs.items()}
            arguments = bind(self.op, spelled, named)
            leaves = spelled if self.op.signature is None else ()
            decided = plan_call(Call(self.op.name, operands, arguments, leaves), request)
        except MeshloomError as error:
            raise located(error, self.op.name, operands) from None
        kernel = kernel_of(decided)
        return Entry(decided, kernel, _direct(decided, kernel))

    def perform(self) -> Any:
        """The wrapped result of the call."""
        if not self.entry.salt:
            return self._perform()
        STORY.identity = identity(self.entry.salt, self.tensors, self.args)
        results = self._perform()
        for i, made in enumerate(results if isinstance(results, tuple) else (results,)):
            if isinstance(made, Tensor):
                made._number = STORY.identity + i
        STORY.identity = 0
        return results

    def _perform(self) -> Any:
        datas = _on_meta_together([tensor._data for tensor in self.tensors])
        known, watched = self.known, None
        if known and state.plain:
            kernel = self.entry.kernel
            bound = kernel.bound
            results = kernel.run(datas, bound if bound is not None else self.function())
            if self.entry.communicates_back:
                results = self.entry.follow(results, self.tensors)
            return self._wrap(results)
        function = self.function()
        if state.watching:
            watched = Watched(self.entry)
            state.check(watched.forward)
        run = self.entry.kernel.run if known else self._first_run
        results = run(datas, function)
        if not known:
            self.entry = _typed(self.entry, results)
            remember(self.key, self.entry)
        if watched is not None:
            watched.log(self.entry)
        if self.entry.communicates_back:
            results = self.entry.follow(results, self.tensors)
        return self._wrap(results)

    def _wrap(self, results: Any) -> Any:
        """The results as tensors; those of a view op are tied to its operand."""
        made = self.entry.wrap(results)
        if self.op.is_view:
            attach(
                self.tensors[0], made if made.__class__ is tuple else (made,), self.op.name, self.args[1:], self.kwargs
            )
        return made

    def _first_run(self, datas: list[torch.Tensor], function: Function) -> Any:
        """Run a call that was not seen before: what torch refuses, it refuses here, and the error says on what."""
        try:
            return self.entry.kernel.run(datas, function)
        except RuntimeError as error:
            if type(error) is not RuntimeError or self.tensors[0].mesh.is_split:
                raise  # ours, one that programs tell by its class, or perhaps of a transport
            operands = tuple(tensor.topology for tensor in self.tensors)
            headline, _, rest = str(error).partition("\n")
            raise located(OperandError(headline, details=rest or None), self.op.name, operands) from error

    def shortest(self) -> Function:
        """The function of a pointwise op whose arguments are all arrays, or the general one."""
        plain = self.entry.direct is not None and not self.kwargs and len(self.args) == len(self.tensors)
        return self.entry.direct if plain and self.entry.direct is not None else self.function()

    def function(self, replaced: Function | None = None) -> Function:
        """The function on prepared arrays: the engine's, or another with the same arguments."""
        if self.op.signature is not None:
            bound = self.entry.kernel.bound
            assert bound is not None
            return bound
        function = replaced or function_of(self.op.name)
        args, kwargs = self.args, self.kwargs

        def run(*datas: torch.Tensor) -> Any:
            left = iter(datas)
            positional = [next(left) if isinstance(each, Tensor) else each for each in args]
            named = {name: next(left) if isinstance(each, Tensor) else each for name, each in kwargs.items()}
            return function(*positional, **named)

        return run


def _on_meta_together(datas: list[torch.Tensor]) -> list[torch.Tensor]:
    """Arrays of which one has no data, all without: masks and positions keep theirs in a dry run."""
    if not any(data.is_meta for data in datas):
        return datas
    return [data if data.is_meta else data.to("meta") for data in datas]


def _follow_to_meta(plain: list[Tensor], tensors: list[Tensor]) -> None:
    """A plain tensor beside one without data is taken for its shape only: a dry run may have plain operands."""
    if any(tensor._data.is_meta for tensor in tensors):
        for tensor in plain:
            tensor._replace(tensor._data.to("meta"))


def _number(op: str, key: str, value: Any) -> Any:
    """torch takes `alpha=` and `value=` for numbers: a tensor given there is read."""
    if key == "alpha" or (key == "value" and op in ("addcmul", "addcdiv")):
        return value.item() if hasattr(value, "item") else value
    return value


def _request(wanted: Any, mesh: Mesh) -> tuple[Any, ...]:
    full = as_placements(wanted, mesh)
    if not isinstance(wanted, Mapping):
        return full
    named = {mesh.axis(name) for name in wanted}
    return tuple(each if axis in named else None for axis, each in enumerate(full))


def plan_call(described: Call, request: Any) -> Plan:
    """The plan under the current machine and choices."""
    return plan(described, request, state.machine, state.chosen)


def located(error: MeshloomError, name: str, operands: Sequence[Topology]) -> MeshloomError:
    """The error with the call and its operands."""
    mesh = operands[0].mesh
    return error.located(call=f"{name}({', '.join(topology.notation for topology in operands)})", mesh=mesh)


def _typed(entry: Entry, results: Any) -> Entry:
    """The entry with the dtypes that the engine gave; the table says which, but for autocast and the default dtype."""
    listed = (results,) if isinstance(results, torch.Tensor) else results
    dtypes = tuple([short_name(result.dtype) for result in listed])
    if dtypes == tuple([topology.dtype for topology in entry.outs]):
        return entry
    return Entry(retyped(entry.plan, dtypes), entry.kernel, entry.direct)


def _direct(decided: Plan, kernel: Kernel) -> Function | None:
    """The engine's function alone, for calls that need nothing else."""
    function = function_of(decided.call.op) if kernel.simple and len(decided.outs) == 1 else None
    return None if getattr(function, "is_aware", False) else function


PACKED: dict[str, Callable[[Any], Any]] = {
    "max_dim": lambda results: torch.return_types.max((results[0], results[1])),
    "min_dim": lambda results: torch.return_types.min((results[0], results[1])),
}


class Watched:
    """One call while somebody is watching: its events."""

    def __init__(self, entry: Entry) -> None:
        self.plan, self.where = entry.plan, where()

    @property
    def forward(self) -> list[Event]:
        """The events of the call itself."""
        return [Event(each, self.plan.call.op, self.where) for each in self.plan.forward]

    def log(self, entry: Entry) -> None:
        """Write the call into every open log."""
        self.plan = entry.plan
        for log in state.logs:
            log.called(entry.plan, self.where)
        state.log(self.forward)


def refuse_partial_leaf(topology: Topology) -> None:
    """A Partial tensor cannot be a leaf: its gradient would belong to a value nobody holds."""
    for axis, placement in enumerate(topology.placements):
        if isinstance(placement, Partial):
            name = topology.mesh.axes[axis]
            raise GradientError(
                f"a tensor that is {placement} on axis {name!r} cannot require a gradient",
                tensor=topology,
                fix=f"redistribute it first: x.redistribute({{{name!r}: Replicate()}}).requires_grad_()",
            )
