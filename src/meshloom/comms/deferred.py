"""Deferred gradients of replicated leaves that split work uses: each process keeps its part until the end of backward.

Such a use goes through a second leaf that shares the first one's memory: backward accumulates this process's part
there, over as many micro-batches as there are inside `loom.accumulate()`. `collect` then sums what is waiting, of all
leaves together: small gradients travel in one buffer, large ones in their own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from meshloom.comms import wire
from meshloom.comms.gradients import AllReduce, SumGradient
from meshloom.comms.group import Group
from meshloom.engines import private
from meshloom.errors import GradientError

LARGE = 1 << 18  # elements from which a gradient travels by itself


@dataclass(eq=False)
class DeferredGradient:
    """The second leaf of a replicated leaf: what split work adds to its gradient waits here for the sum."""

    array: torch.Tensor
    group: Group


class DeferredGradients(list[DeferredGradient]):
    """Those of a leaf, on the leaf; a copy of it, or what is read from a file, has none."""

    def __reduce__(self) -> tuple[object, ...]:
        return DeferredGradients, ()


@dataclass(frozen=True, eq=False)
class PendingSum:
    """A part of a gradient that is to be summed: of which leaf, if it is still there, and over which processes.

    It keeps the leaf: whether one that nobody holds is gone already may differ between processes.
    """

    array: torch.Tensor
    group: Group
    leaf: torch.Tensor | None

    @property
    def gradient(self) -> torch.Tensor:
        """The part of this process."""
        assert self.array.grad is not None
        return self.array.grad

    def settle(self, total: torch.Tensor) -> None:
        """Add the sum to the leaf's gradient."""
        self.array.grad = None
        if self.leaf is not None:
            self.leaf.grad = total if self.leaf.grad is None else self.leaf.grad + total


_waiting: dict[int, PendingSum] = {}  # in the order of backward, which is the same on every process
_passes: dict[
    Callable[[], None], int
] = {}  # by what comes at the end, the pass of backward that it was last queued for


def at_end_of_backward(finish: Callable[[], None]) -> None:
    """Call `finish` once when the pass of backward that is under way has ended."""
    current = private.current_graph_task_id()
    if _passes.get(finish) != current:
        _passes[finish] = current
        queue_at_end(finish)


def queue_at_end(function: Callable[[], None]) -> None:
    """Call a function when the pass of backward that is under way has ended."""
    private.engine.queue_callback(function)


def sum_gradient(data: torch.Tensor, group: Group) -> torch.Tensor:
    """A replicated array as split work uses it."""
    if not (torch.is_grad_enabled() and data.requires_grad) or getattr(data, "_is_deferred", False):
        return data
    if not data.is_leaf or data.is_meta or _has_hooks(data):
        return _sum_once(data, group)
    return _defer(data, group).array


def _sum_once(data: torch.Tensor, group: Group) -> torch.Tensor:
    """An array as all its uses share it until somebody writes to it: their gradients add up before they travel."""
    shared: dict[Group, tuple[object, torch.Tensor]] = getattr(data, "_shared", {})
    state = data._version, data.data_ptr(), data.dtype, data.shape  # `data.data = other` leaves the version alone
    known, found = shared.get(group, (None, data))
    if known != state:
        found = SumGradient.apply(data, group)
        data._shared = {**shared, group: (state, found)}  # type: ignore[attr-defined]
        if data.is_leaf and found.grad_fn is not None:
            found.grad_fn.register_hook(_part(weakref.ref(data)))
    return found


def _part(leaf: weakref.ref[torch.Tensor]) -> Callable[..., None]:
    """What ends the sharing of a leaf when its gradient is there: a leaf and its graph would keep each other."""

    def part(*gradients: object) -> None:
        held = leaf()
        if held is not None:
            held._shared = {}  # type: ignore[attr-defined]

    return part


def deferred_gradients(leaf: torch.Tensor) -> list[DeferredGradient]:
    """Those of a leaf that still share its memory."""
    return [each for each in _of(leaf) if each.array.data_ptr() == leaf.data_ptr()]


def _of(leaf: torch.Tensor) -> list[DeferredGradient]:
    found: list[DeferredGradient] = getattr(leaf, "_deferred", [])
    return found


def _defer(leaf: torch.Tensor, group: Group) -> DeferredGradient:
    for each in deferred_gradients(leaf):
        if each.group is group:
            return each
    array = leaf.detach().requires_grad_()
    array._is_deferred = True  # type: ignore[attr-defined]
    array.register_post_accumulate_grad_hook(_note(weakref.ref(leaf), group))
    made = DeferredGradient(array, group)
    used = [each for each in _of(leaf) if each.array.data_ptr() == leaf.data_ptr() or each.array.grad is not None]
    leaf._deferred = DeferredGradients([*used, made])  # type: ignore[attr-defined]
    return made


def _note(leaf: weakref.ref[torch.Tensor], group: Group) -> Callable[[torch.Tensor], None]:
    """What backward calls when it has added to a deferred gradient."""

    def note(array: torch.Tensor) -> None:
        held = leaf()
        if held is not None and _has_hooks(held):
            array.grad = None
            raise _late_hooks(held)
        if id(array) not in _waiting:
            _waiting[id(array)] = PendingSum(array, group, held)
        at_end_of_backward(_finish)

    return note


_finish: Callable[[], None]


def finish_with(finish: Callable[[], None]) -> None:
    """What the end of a pass of backward calls when sums are waiting: it decides whether they are carried out now."""
    global _finish
    _finish = finish


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _late_hooks(leaf: torch.Tensor) -> GradientError:
    """A hook sees the whole gradient, and a deferred one is a part: with hooks, a leaf's is summed on its way."""
    return GradientError(
        f"a hook of a leaf of shape {list(leaf.shape)} came after the leaf was used: it would not be called",
        fix="register it before the forward pass",
    )


def drop(leaf: torch.Tensor) -> None:
    """Forget what is waiting for a leaf."""
    for each in _of(leaf):
        each.array.grad = None


def is_waiting(leaf: torch.Tensor) -> bool:
    """Whether parts of a leaf's gradient are not summed yet."""
    return any(each.array.grad is not None for each in _of(leaf))


def collect(only: Collection[int] | None = None) -> None:
    """Sum what is waiting over the processes and add it to the leaves' gradients; of some leaves only, by id."""
    due = [key for key, each in _waiting.items() if only is None or id(each.leaf) in only]
    waiting = [each for each in (_waiting.pop(key) for key in due) if each.array.grad is not None]
    for group, dtype in dict.fromkeys((each.group, each.gradient.dtype) for each in waiting):
        alike = [each for each in waiting if each.group is group and each.gradient.dtype == dtype]
        alone = [each for each in alike if each.gradient.numel() >= LARGE or each.gradient.requires_grad]
        for each in alone:
            each.settle(_sum(each.gradient, group))
        _sum_together([each for each in alike if each not in alone], group)


def _sum(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of every process's part, in the part's memory; of create_graph it belongs to the graph."""
    return AllReduce.apply(part, group) if part.requires_grad else wire.all_reduce(part, group, own=True)


def _sum_together(alike: list[PendingSum], group: Group) -> None:
    if not alike:
        return
    gradients = [each.gradient for each in alike]
    total = wire.all_reduce(torch.cat([each.reshape(-1) for each in gradients]), group, own=True)
    start = 0
    for each, gradient in zip(alike, gradients, strict=True):
        each.settle(total[start : start + gradient.numel()].view(gradient.shape))
        start += gradient.numel()


def sum_parts(
    leaf: torch.Tensor, own: torch.Tensor | None, parts: Iterable[torch.Tensor | None]
) -> torch.Tensor | None:
    """A leaf's gradient from that of its own uses and the deferred ones, as `torch.autograd.grad` gives them."""
    for each, part in zip(deferred_gradients(leaf), parts, strict=True):
        if part is not None:
            if _has_hooks(leaf):
                raise _late_hooks(leaf)
            total = AllReduce.apply(part, each.group)
            own = total if own is None else own + total
    return own
