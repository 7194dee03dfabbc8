"""One op call: look up the plan, run its kernel, wrap the result. The one short file where deciding and doing meet.

For a call seen before this is one dictionary look-up and the kernel call. `call` is the general way in; the operators
of `Tensor` try `CACHE` with a shorter key first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from meshloom.engines.kernel import Function, Kernel, function_of
from meshloom.engines.layout import short_name
from meshloom.errors import MeshloomError, OperandError
from meshloom.ops import OPS, Call
from meshloom.ops.binding import bind, refer, sort_named
from meshloom.placement import Partial, Topology
from meshloom.planner import Plan, plan, retype
from meshloom.processes.divergence import STORY
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.binding import NUMBERS, freeze
from meshloom.tensor.card_kernel import kernel_for
from meshloom.tensor.clients import HERE, Clients
from meshloom.tensor.entries import CACHE, Entry, identity, remember
from meshloom.tensor.reading import Reader, autocast_key, follow_to_meta, read_number, read_request
from meshloom.tensor.views import attach
from meshloom.tensor.watched import Watched

_PLAINLY = (False, None)  # not in place, no autocast: nothing in the key, which the hot path builds at every call
_BESIDES = object()  # no argument is equal to it
_ARRAY = object()  # stands among arguments for an array that is given later


def call(name: str, args: Sequence[object], kwargs: dict[str, object], output: object = None) -> Any:
    """Run an op of the table on any mix of operands and return the wrapped result."""
    if Clients.take is not None:
        with nullcontext() if output is None else state.changed(output=output):
            sent = Clients.take(f"table:{name}", _calling(name), tuple(args), kwargs)
        if sent is not HERE:
            return sent
    found = Resolved(name, args, kwargs, output)
    result = found.perform()
    if TRAIL.calls is not None:
        TRAIL.calls.append((found, result))
    return result


def _calling(name: str) -> Any:
    return lambda *args, **kwargs: call(name, args, kwargs)


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
        self,
        name: str,
        args: Sequence[object],
        kwargs: dict[str, object],
        output: object,
        kept: tuple[object, ...] | None = None,
    ) -> None:
        self.op = OPS[name]
        args, kwargs = sort_named(self.op, args, kwargs)  # rules take the first operand for the first argument
        reader = Reader(name, args, kwargs, self.op.signature is not None)
        self.args = tuple([reader.read(each) for each in args])
        self.kwargs = {k: reader.read(read_number(name, k, value)) for k, value in kwargs.items()} if kwargs else kwargs
        self.tensors = reader.tensors
        if not self.tensors:
            reader.mesh  # noqa: B018  raises
        if reader.plain:
            follow_to_meta(reader.plain, reader.tensors)
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
                self.request = read_request(wanted, reader.mesh)
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

    def _decide(self, request: object) -> Entry:
        operands = tuple(tensor.topology for tensor in self.tensors)
        try:
            seen: list[Any] = []
            spelled = tuple(refer(each, seen, Tensor) for each in self.args)
            named = {name: refer(value, seen, Tensor) for name, value in self.kwargs.items()}
            arguments = bind(self.op, spelled, named)
            leaves = spelled if self.op.signature is None else ()
            decided = plan_call(Call(self.op.name, operands, arguments, leaves), request)
        except MeshloomError as error:
            raise locate(error, self.op.name, operands) from None
        kernel = kernel_for(decided)
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
            watched = Watched(self.entry, self.tensors)
            state.check(watched.forward)
            function = watched.forget_gathered(self.entry.kernel, datas, function)
        run = self.entry.kernel.run if known else self._first_run
        results = run(datas, function) if watched is None else watched.run(run, datas, function)
        if not known:
            self.entry = _with_dtypes(self.entry, results)
            remember(self.key, self.entry)
        if watched is not None:
            watched.log(self.entry, results)
        if self.entry.communicates_back:
            results = self.entry.follow(results, self.tensors)
        return self._wrap(results)

    def _wrap(self, results: object) -> Any:
        """The results as tensors; those of a view op are tied to its operand."""
        made = self.entry.wrap(results)
        if self.entry.is_view:
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
            raise locate(OperandError(headline, details=rest or None), self.op.name, operands) from error

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
        # not the tensors, which would live as long as the call is remembered
        args = [_ARRAY if isinstance(each, Tensor) else each for each in self.args]
        kwargs = {name: _ARRAY if isinstance(each, Tensor) else each for name, each in self.kwargs.items()}

        def run(*datas: torch.Tensor) -> Any:
            left = iter(datas)
            positional = [next(left) if each is _ARRAY else each for each in args]
            named = {name: next(left) if each is _ARRAY else each for name, each in kwargs.items()}
            return function(*positional, **named)

        return run


def _on_meta_together(datas: list[torch.Tensor]) -> list[torch.Tensor]:
    """Arrays of which one has no data, all without: masks and positions keep theirs in a dry run."""
    if not any(data.is_meta for data in datas):
        return datas
    return [data if data.is_meta else data.to("meta") for data in datas]


def plan_call(described: Call, request: Any) -> Plan:
    """The plan under the current machine and choices."""
    return plan(described, request, state.machine, state.chosen)


def locate(error: MeshloomError, name: str, operands: Sequence[Topology]) -> MeshloomError:
    """The error with the call and its operands."""
    mesh = operands[0].mesh
    return error.locate(call=f"{name}({', '.join(topology.notation for topology in operands)})", mesh=mesh)


def _with_dtypes(entry: Entry, results: torch.Tensor | tuple[torch.Tensor, ...]) -> Entry:
    """The entry with the dtypes that the engine gave; the table says which, but for autocast and the default dtype."""
    listed = (results,) if isinstance(results, torch.Tensor) else results
    dtypes = tuple([short_name(result.dtype) for result in listed])
    if dtypes == tuple([topology.dtype for topology in entry.outs]):
        return entry
    return Entry(retype(entry.plan, dtypes), entry.kernel, entry.direct)


def _direct(decided: Plan, kernel: Kernel) -> Function | None:
    """The engine's function alone, for calls that need nothing else."""
    function = function_of(decided.call.op) if kernel.simple and len(decided.outs) == 1 else None
    return None if getattr(function, "is_aware", False) else function
