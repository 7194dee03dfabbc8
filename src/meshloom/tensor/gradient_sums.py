"""What backward communicates: seen by whoever watches while it runs, wherever the forward pass ran.

A call whose gradients communicate leaves a note at the graph node of its result. When backward starts while somebody
records, forbids or accumulates, the notes that it will meet become hooks, which tell what the gradient that arrives
there causes. A dense tensor that was made of ours does the same when its gradient arrives. The sums of a leaf come
last: they are carried out once, at the end of the pass, or wait inside `accumulate` for the first pass after it. An
optimizer step has none of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from meshloom.collectives import Collective
from meshloom.comms.deferred import (
    at_end_of_backward,
    collect,
    deferred_gradients,
    drop,
    finish_with,
    queue_at_end,
)
from meshloom.engines import private
from meshloom.errors import Spot, expect, place_at, place_name, spot_of
from meshloom.runtime import Event, state
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import sent


class Back:
    """What the backward of a call communicates: before it reaches the operands, and for the gradient of each.

    `lasts` says, should the operand be a leaf, whether its collectives are a sum that comes at the end of the pass.
    """

    __slots__ = ("lasts", "operands", "results", "wanted")

    def __init__(
        self, results: tuple[Collective, ...], operands: Sequence[tuple[Collective, ...]], lasts: Sequence[bool]
    ) -> None:
        self.results, self.operands, self.lasts = results, operands, lasts
        self.wanted = tuple(i for i, each in enumerate(operands) if each)

    def __bool__(self) -> bool:
        return bool(self.results or self.wanted)


def is_tracked(data: torch.Tensor) -> bool:
    """Whether a gradient will come back to the array."""
    return torch.is_grad_enabled() and data.requires_grad


class Note:
    """At the node of a call's result: what its backward communicates. As a hook it tells so, once per pass.

    Of each operand whose gradient communicates, `sources` has the place, the node, which says whether the gradient
    is wanted, and which of the node's results it is; a leaf has its own node only while backward runs, so it stands
    for itself.
    """

    __slots__ = ("back", "call", "sources", "spot", "task")

    def __init__(self, call: str, back: Back, spot: Spot, sources: list[tuple[int, Any, int]]) -> None:
        self.call, self.back, self.spot, self.sources, self.task = call, back, spot, sources, -1

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        task = private.current_graph_task_id()
        if task == self.task:
            return
        self.task = task
        happen(self._events(self.back.results), first=True)
        for i, source, number in self.sources:
            if _is_wanted(source):
                collectives = self.back.operands[i]
                if self.back.lasts[i] and isinstance(source, Tensor):
                    defer(source, self._events(collectives))
                elif not self.back.lasts[i] or _is_first(source, number, collectives, task):
                    happen(self._events(collectives), of=source)

    def _events(self, collectives: Iterable[Collective]) -> list[Event]:
        line = place_name(place_at(self.spot)) or "unknown line"
        return [Event(each, self.call, line, "backward") for each in collectives]


def _is_first(node: Any, number: int, collectives: tuple[Collective, ...], task: int) -> bool:
    """Whether no other use of a node's result has told of this sum in this pass: their gradients add up before it."""
    told: dict[tuple[int, tuple[Collective, ...]], int] = node.metadata.setdefault(_SUMS, {})
    is_first = told.get((number, collectives)) != task
    told[number, collectives] = task
    return is_first


def _is_wanted(source: Any) -> bool:
    """Whether the pass that is under way computes the gradient of an operand."""
    arrays = (
        [source._data, *(each.array for each in deferred_gradients(source._data))] if isinstance(source, Tensor) else ()
    )
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in arrays] if arrays else [source]
    return any(_is_executed(node) for node in nodes)


def _is_executed(node: torch.autograd.graph.Node) -> bool:
    try:
        result: bool = private.will_execute(node)
        return result
    except RuntimeError:  # what torch says of a leaf that autograd.grad was asked for, and of no other
        return True


_KEY, _SUMS = "meshloom", "meshloom sums"  # of a call at the node of its result; of a node's result, by their last pass


def follow(
    call: str,
    back: Back,
    results: torch.Tensor | tuple[torch.Tensor, ...],
    tensors: Sequence[Tensor],
    is_written: bool = False,
    depth: int = 2,
) -> Any:
    """The results of a call whose backward communicates, so that it is seen; `is_written` of a call in place.

    The program is at least `depth` calls outwards: a frame that Python is asked for costs a microsecond.
    """
    sources = []
    for i in back.wanted:
        data = tensors[i]._data
        if data.requires_grad:
            sources.append((i, data.grad_fn or tensors[i], data.output_nr))
    told = [call, back, spot_of(sys._getframe(depth)), sources]  # shared by the nodes of all results
    operands = () if is_written else tensors
    if isinstance(results, torch.Tensor):
        return _mark(results, told, operands)
    return tuple(_mark(each, told, operands) for each in results)


def _mark(data: torch.Tensor, told: list[Any], operands: Sequence[Tensor]) -> torch.Tensor:
    """A result with what its note says at its node; one that is an operand's own array gets a node of its own first."""
    if not data.requires_grad:
        return data
    for operand in operands:
        if data is operand._data:
            data = data.view_as(data)
    node: Any = data.grad_fn
    if node is not None:  # torch calls a view tracked that was made without gradients of one that has them
        node.metadata[_KEY] = told
    return data


def _note_of(node: Any) -> Note | None:
    """The note at a node, made of what was told there when somebody wants to know: most passes nobody watches."""
    told = node.metadata.get(_KEY)
    if told is None:
        return None
    if len(told) > 1:
        told[:] = [Note(*told)]
    note: Note = told[0]
    return note


def _is_seen() -> bool:
    """Whether anybody wants to know what backward communicates."""
    return bool(state.watching or state.accumulating or state.waiting)


@contextmanager
def watch_backward(roots: Iterable[torch.Tensor]) -> Iterator[None]:
    """A pass of backward from these arrays, of which whoever watches is told."""
    handles = _hook([root.grad_fn for root in roots]) if _is_seen() else []
    try:
        yield
    finally:
        _remove(handles)


def _hook(nodes: list[Any]) -> list[object]:
    """The notes at all nodes behind these become hooks."""
    handles: list[Any] = []
    known: set[object] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        note = _note_of(node)
        if note is not None:
            handles.append(node.register_prehook(note))
        nodes += [behind for behind, _ in node.next_functions]
    return handles


def watch_dense(data: torch.Tensor) -> torch.Tensor:
    """A dense array that was made of ours: torch may start backward from it, and then we hear of it here."""
    node: Any = data.grad_fn if is_tracked(data) else None
    if node is not None:
        own, behind = _note_of(node), [each for each, _ in node.next_functions]

        def arrive(gradients: Sequence[torch.Tensor | None]) -> None:
            if _is_seen():
                if own is not None:
                    own(gradients)
                handles = _hook([*behind])
                queue_at_end(lambda: _remove(handles))

        node.register_prehook(arrive)
    return data


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def happen(events: Sequence[Event], first: bool = False, of: object = None) -> None:
    """Communication of backward: it may be forbidden, and it is logged; `first` of what the call waits for.

    `of` is the graph node whose gradient is moved, which comes from all uses of the node's result together; or the
    leaf.
    """
    state.check(events)
    state.log(events, of, first)


# The sums of leaves


class Waiting(NamedTuple):
    """A leaf with sums that are told and not carried out."""

    leaf: Tensor
    told: dict[object, Event]


def defer(leaf: Tensor, events: Sequence[Event]) -> None:
    """A leaf's sum happens once, at the end of the pass: keep what will then happen."""
    if state.asked is not None:
        _add(state.asked.setdefault(id(leaf), {}), events)
        return
    told = state.waiting.setdefault(id(leaf), Waiting(leaf, {})).told
    _add(told, events)
    for log in state.logs:
        log.pending += [each for each in told.values() if each not in log.pending]
    at_end_of_backward(finish)


def _add(told: dict[object, Event], events: Sequence[Event]) -> dict[object, Event]:
    """Several uses of a leaf that communicate the same add up before they do: the first is told."""
    for event in events:
        told.setdefault((event.kind, event.axis, event.bytes), event)
    return told


def finish() -> None:
    """The end of a pass of backward: the sums of all leaves, unless they are to wait."""
    if not state.accumulating:
        _carry_out([*state.waiting.values()], None)


finish_with(finish)


def _carry_out(waiting: Sequence[Waiting], only: set[int] | None) -> None:
    events = [event for each in waiting for event in each.told.values()]
    state.check(events)
    collect(only)
    for each in waiting:
        forget(each.leaf)
    for each in waiting:
        state.log(each.told.values(), of=each.leaf)


def forget(leaf: Tensor) -> None:
    """No sum of a leaf is told any more."""
    waiting = state.waiting.pop(id(leaf), None)
    for log in state.logs if waiting is not None else ():
        log.pending[:] = [each for each in log.pending if each not in waiting.told.values()]


def discard(leaf: Tensor) -> None:
    """Forget the sums of a leaf and the parts that wait for them."""
    forget(leaf)
    drop(leaf._data)


@contextmanager
def asking() -> Iterator[None]:
    """`torch.autograd.grad` sums the gradients it gives at once, and leaves what waits alone."""
    with state.changed(asked={}):
        yield


def give(leaf: Tensor) -> None:
    """The sum of a gradient that `torch.autograd.grad` gives."""
    happen([*(state.asked or {}).get(id(leaf), {}).values()])


@contextmanager
def accumulate() -> Iterator[None]:
    """Keep each device's part of a parameter's gradient; the first backward after the scope sums them, once.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2,), axes=("dp",))
    >>> w = loom.Parameter(torch.ones(3, 1), mesh)
    >>> def loss():
    ...     return (loom.ones(4, 3, mesh=mesh, placements="S(0)") @ w).mean()
    >>> with loom.record() as log:
    ...     with accumulate():
    ...         loss().backward()
    ...         loss().backward()
    ...     loss().backward()
    >>> [event.kind for event in log if event.phase == "backward"]
    ['all_reduce']
    >>> w.grad.to_torch().flatten()
    tensor([3., 3., 3.])
    """
    with state.changed(accumulating=True):
        yield


def synchronize(parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Carry out the sums of gradients that wait: of these parameters, or of all.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2,), axes=("dp",))
    >>> w = loom.Parameter(torch.ones(3, 1), mesh)
    >>> with loom.accumulate():
    ...     (loom.ones(4, 3, mesh=mesh, placements="S(0)") @ w).mean().backward()
    >>> synchronize([w])
    >>> w.grad.to_torch().flatten()
    tensor([1., 1., 1.])
    """
    if parameters is None:
        _carry_out([*state.waiting.values()], None)
        return
    expect("parameters", parameters, (torch.Tensor, Iterable), fix="loom.synchronize(model.parameters())")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for each in given:
        expect("parameters", each, torch.Tensor, fix="loom.synchronize(model.parameters())")
    _synchronize(given)


@sent("loom:_synchronize")
def _synchronize(given: list[torch.Tensor]) -> None:
    leaves = [each for each in given if isinstance(each, Tensor)]
    waiting = [state.waiting[id(each)] for each in leaves if id(each) in state.waiting]
    _carry_out(waiting, {id(each._data) for each in leaves})
