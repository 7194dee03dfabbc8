"""Gradients of replicated leaves that split work uses: each process has a part, and the parts are summed in buckets.

Such a use goes through a second leaf that shares the first one's memory: backward accumulates this process's part
there, over as many micro-batches as there are inside `loom.accumulate()`. When the last use has contributed, the part
goes into a bucket: small gradients travel together in one buffer, large ones in their own memory. A full bucket leaves
at once and is on its way while backward goes on; `collect`, at the end of backward, sends the rest and waits for all.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from meshloom.comms import wire
from meshloom.comms.gradients import AllReduce, SumGradient
from meshloom.comms.group import Group
from meshloom.context import state
from meshloom.engines import private
from meshloom.errors import GradientError

LARGE = 1 << 20  # elements from which a gradient travels by itself
BUCKET = 1 << 22  # elements of small gradients that travel together: every round costs all processes a meeting

Kind = tuple[Group, torch.dtype]  # of gradients that may share a buffer


@dataclass(eq=False, slots=True)
class DeferredGradient:
    """The second leaf of a replicated leaf: what split work adds to its gradient waits here for the sum."""

    array: torch.Tensor
    group: Group
    under_way: list[torch.Tensor] = field(default_factory=list)  # parts that have left


class DeferredGradients(list[DeferredGradient]):
    """Those of a leaf, on the leaf; a copy of it, or what is read from a file, has none."""

    def __reduce__(self) -> tuple[object, ...]:
        return DeferredGradients, ()


@dataclass(eq=False, slots=True)
class PendingSum:
    """A part of a gradient that is to be summed: of which leaf, if it is still there, and over which processes.

    It keeps the leaf: whether one that nobody holds is gone already may differ between processes.
    """

    array: torch.Tensor
    group: Group
    under_way: list[torch.Tensor]  # parts that have left and were not dropped since
    leaf: torch.Tensor | None

    def take(self) -> torch.Tensor:
        """The part of this process, which leaves."""
        part = self.array.grad
        assert part is not None
        self.array.grad = None
        self.under_way.append(part)
        return part

    def settle(self, part: torch.Tensor, total: torch.Tensor) -> None:
        """Add the sum to the leaf's gradient, as torch does, unless the part was dropped on the way."""
        kept = [each for each in self.under_way if each is not part]
        is_wanted = len(kept) < len(self.under_way)
        self.under_way[:] = kept
        leaf = self.leaf
        if not is_wanted or leaf is None:
            return
        if leaf.grad is None:
            leaf.grad = total
        elif leaf.grad.requires_grad or total.requires_grad:  # one of them belongs to a graph
            leaf.grad = leaf.grad + total
        else:
            leaf.grad.add_(total)


class Bucket:
    """Gradients that travel together: one large, or small ones of one group and dtype in one buffer."""

    def __init__(self, sums: Sequence[PendingSum]) -> None:
        self._sums, self._parts = sums, [each.take() for each in sums]
        flat = [each.reshape(-1) for each in self._parts]
        self._finish = _begin_sum(flat[0] if len(flat) == 1 else _join(flat, sums[0].array), sums[0].group)

    def settle(self) -> None:
        """Wait for the sums, and give each leaf its own."""
        totals = private.nn_functions.unflatten_dense_tensors(self._finish(), self._parts)
        for each, part, total in zip(self._sums, self._parts, totals, strict=True):
            each.settle(part, total)


def _join(parts: list[torch.Tensor], first: torch.Tensor) -> torch.Tensor:
    """Gradients in one buffer: that of the last pass where nobody holds it, for new memory comes from the system.

    It belongs to the first one's second leaf, and goes with it. What is used is another tensor of the same memory: it
    counts as long as a sum is under way in it.
    """
    room: torch.Tensor | None = getattr(first, "_room", None)
    if room is not None and room.numel() == sum(part.numel() for part in parts) and _holders(room) == _ALONE:
        return torch.cat(parts, out=room.detach())
    found = torch.cat(parts)
    first._room = found.detach()  # type: ignore[attr-defined]
    return found


def _holders(room: torch.Tensor) -> tuple[int, int]:
    """How many references there are to an array's memory in Python, and how many in torch."""
    storage = room.untyped_storage()
    return sys.getrefcount(storage), private.storage_uses(storage._cdata)


_ALONE = _holders(torch.empty(1))  # nothing but one tensor: no gradient of the last pass, nor what was made of one


def _begin_sum(part: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin the sum of every process's part, in the part's memory; of create_graph it belongs to the graph."""
    return (lambda: AllReduce.apply(part, group)) if part.requires_grad else wire.begin_sum(part, group)


def _is_large(part: torch.Tensor) -> bool:
    """Whether a gradient travels by itself; with create_graph it belongs to the graph, and does."""
    return part.numel() >= LARGE or part.requires_grad


_waiting: dict[int, PendingSum] = {}  # in the order of backward, which is the same on every process
_buckets: list[Bucket] = []  # that have left
_filled: dict[Kind, int] = {}  # elements of small gradients that wait, roughly: it says when to look
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
    known = found_deferred(data, group)
    if known is not None:
        return known
    if not (torch.is_grad_enabled() and data.requires_grad) or "_is_deferred" in data.__dict__:
        return data
    if not data.is_leaf or data.is_meta or _has_hooks(data):
        return _sum_once(data, group)
    return _defer(data, group).array


def found_deferred(data: torch.Tensor, group: Group) -> torch.Tensor | None:
    """The second leaf of a leaf that split work has used before: of most uses of parameters."""
    held = data.__dict__.get("_deferred")
    if not held or data._backward_hooks or data._post_accumulate_grad_hooks:
        return None
    if not (torch.is_grad_enabled() and data.requires_grad and data.is_leaf) or data.is_meta:
        return None
    place = data.data_ptr()
    for each in held:
        if each.group is group and each.array.data_ptr() == place:
            found: torch.Tensor = each.array
            return found
    return None


def _sum_once(data: torch.Tensor, group: Group) -> torch.Tensor:
    """An array as all its uses share it until somebody writes to it: their gradients add up before they travel."""
    shared: dict[Group, tuple[object, torch.Tensor]] = getattr(data, "_shared", {})
    version = data._version, data.data_ptr(), data.dtype, data.shape  # `data.data = other` leaves the first alone
    known, found = shared.get(group, (None, data))
    if known != version:
        found = SumGradient.apply(data, group)
        data._shared = {**shared, group: (version, found)}  # type: ignore[attr-defined]
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
    place = leaf.data_ptr()
    return [each for each in _of(leaf) if each.array.data_ptr() == place]


def _of(leaf: torch.Tensor) -> list[DeferredGradient]:
    found: list[DeferredGradient] = leaf.__dict__.get("_deferred", [])
    return found


def _defer(leaf: torch.Tensor, group: Group) -> DeferredGradient:
    """A second leaf for sums over a group; what split work adds to its gradient waits there."""
    array = leaf.detach().requires_grad_()
    array._is_deferred = True  # type: ignore[attr-defined]
    made = DeferredGradient(array, group)
    array.register_post_accumulate_grad_hook(_note(weakref.ref(leaf), group, made.under_way))
    used = [each for each in _of(leaf) if each.array.data_ptr() == leaf.data_ptr() or _waits(each)]
    leaf._deferred = DeferredGradients([*used, made])  # type: ignore[attr-defined]
    return made


def _note(
    leaf: weakref.ref[torch.Tensor], group: Group, under_way: list[torch.Tensor]
) -> Callable[[torch.Tensor], None]:
    """What backward calls when it has added to a deferred gradient."""

    def note(array: torch.Tensor) -> None:
        held = leaf()
        if held is not None and _has_hooks(held):
            array.grad = None
            raise _late_hooks(held)
        pending = _waiting.get(id(array))
        if pending is None:
            pending = _waiting[id(array)] = PendingSum(array, group, under_way, held)
        at_end_of_backward(_finish)
        if not state.accumulating and not state.is_restricted:
            _send_full(pending)

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
    """Forget what is waiting for a leaf, and what is under way."""
    for each in _of(leaf):
        each.array.grad = None
        each.under_way.clear()


def is_waiting(leaf: torch.Tensor) -> bool:
    """Whether parts of a leaf's gradient are not summed yet."""
    return any(map(_waits, _of(leaf)))


def _waits(deferred: DeferredGradient) -> bool:
    return deferred.array.grad is not None or bool(deferred.under_way)


def _send_full(latest: PendingSum) -> None:
    """Send the latest part if it is large, or all small ones of its kind once they fill a bucket."""
    part = latest.array.grad
    assert part is not None
    if _is_large(part):
        _send([latest])
        return
    kind = latest.group, part.dtype
    _filled[kind] = filled = _filled.get(kind, 0) + part.numel()
    if filled >= BUCKET:
        _filled[kind] = 0
        _send(_waiting_together()[kind])


def _waiting_together(only: Collection[int] | None = None) -> dict[object, list[PendingSum]]:
    """What waits, by what travels together: a large part alone, small ones by kind; of some leaves only, by id."""
    found: dict[object, list[PendingSum]] = {}
    for each in _waiting.values():
        part = each.array.grad
        if part is not None and (only is None or id(each.leaf) in only):
            found.setdefault(id(each) if _is_large(part) else (each.group, part.dtype), []).append(each)
    return found


def _send(sums: Sequence[PendingSum]) -> None:
    for each in sums:
        del _waiting[id(each.array)]
    _buckets.append(Bucket(sums))


def collect(only: Collection[int] | None = None) -> None:
    """Sum what is waiting over the processes and add it to the leaves' gradients; of some leaves only, by id."""
    for key in [key for key, each in _waiting.items() if each.array.grad is None]:  # dropped since
        del _waiting[key]
    for together in _waiting_together(only).values():
        _send(together)
    _filled.clear()
    while _buckets:
        _buckets.pop(0).settle()


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
