"""What backward communicates: seen by whoever watches while it runs, wherever the forward pass ran.

A call whose gradients communicate leaves a hook at the graph node of its result. While somebody records or forbids, the
hook tells what the gradient that arrives there causes. The sums of a leaf come last: they are carried out once, at the
end of the pass, or wait inside `accumulate` for the first pass after it. An optimizer step has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from meshloom.backends import at_end_of_backward, collect, drop, finish_with, twins
from meshloom.collectives import Collective
from meshloom.runtime import Event, state, where
from meshloom.tensor.base import Tensor


class Back(NamedTuple):
    """What the backward of a call communicates: before it reaches the operands, and for the gradient of each."""

    results: tuple[Collective, ...]
    operands: tuple[tuple[Collective, ...], ...]
    lasts: tuple[bool, ...]  # of a leaf, whether the collectives are its sum, which comes at the end of the pass

    def __bool__(self) -> bool:
        return bool(self.results) or any(self.operands)


def is_tracked(data: torch.Tensor) -> bool:
    """Whether a gradient will come back to the array."""
    return torch.is_grad_enabled() and data.requires_grad


class Hook:
    """At the node of a call's result: tells what its backward communicates, once per pass."""

    __slots__ = ("back", "call", "line", "sources", "task")

    def __init__(self, call: str, back: Back, tensors: Sequence[Tensor]) -> None:
        self.call, self.back, self.line, self.task = call, back, where(), -1
        # the node of an operand says whether its gradient is wanted; a leaf has its own only while backward runs
        self.sources = [
            (i, tensor if tensor._data.is_leaf else tensor._data.grad_fn)
            for i, tensor in enumerate(tensors)
            if back.operands[i] and tensor._data.requires_grad
        ]

    def __call__(self, gradients: Any) -> None:
        if not (state.watching or state.accumulating or state.waiting):
            return
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return
        self.task = task
        happen(self._events(self.back.results))
        for i, source in self.sources:
            if _is_wanted(source):
                events = self._events(self.back.operands[i])
                if self.back.lasts[i] and isinstance(source, Tensor):
                    defer(source, events)
                else:
                    happen(events)

    def _events(self, collectives: Iterable[Collective]) -> list[Event]:
        return [Event(each, self.call, self.line, "backward") for each in collectives]


def _is_wanted(source: Any) -> bool:
    """Whether the pass that is under way computes the gradient of an operand."""
    arrays = [source._data, *(twin.array for twin in twins(source._data))] if isinstance(source, Tensor) else ()
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in arrays] if arrays else [source]
    return any(_is_executed(node) for node in nodes)


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch says of a leaf that autograd.grad was asked for, and of no other
        return True


def follow(call: str, back: Back, results: Any, tensors: Sequence[Tensor]) -> None:
    """Let the backward of a call be seen, if it communicates."""
    if not back:
        return
    listed = (results,) if isinstance(results, torch.Tensor) else results
    hook = Hook(call, back, tensors)
    for node in dict.fromkeys(each.grad_fn for each in listed if each.requires_grad):
        if node is not None:
            node.register_prehook(hook)


def happen(events: Sequence[Event]) -> None:
    """Communication of backward: it may be forbidden, and it is logged."""
    state.check(events)
    state.log(events)


# The sums of leaves


class Waiting(NamedTuple):
    """A leaf with sums that are told and not carried out."""

    leaf: Tensor
    told: dict[Any, Event]


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


def _add(told: dict[Any, Event], events: Sequence[Event]) -> dict[Any, Event]:
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
    state.log(events)


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


def synchronize(parameters: Any = None) -> None:
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
    given = [parameters] if isinstance(parameters, (Tensor, torch.Tensor)) else list(parameters)
    leaves = [each for each in (getattr(one, "_loom", one) for one in given) if isinstance(each, Tensor)]
    waiting = [state.waiting[id(each)] for each in leaves if id(each) in state.waiting]
    _carry_out(waiting, {id(each._data) for each in leaves})
