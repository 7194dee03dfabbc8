"""Gradients of replicated leaves that split work uses: kept apart on each process, and summed once, when they are read.

Such a use goes through a second leaf that shares the first one's memory, its *twin*: backward accumulates this
process's part there, over as many micro-batches as there are. `collect` then sums what is waiting, of all leaves
together: small gradients travel in one buffer, large ones in their own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from meshloom.backends import wire
from meshloom.backends.nodes import Enter
from meshloom.backends.world import Group

LARGE = 1 << 18  # elements from which a gradient travels by itself


class Twin:
    """The second leaf of a replicated leaf, for uses whose gradient is summed over a group."""

    def __init__(self, leaf: torch.Tensor, group: Group) -> None:
        self.leaf, self.group = weakref.ref(leaf), group
        self.array = leaf.detach().requires_grad_()
        self.array._entered = True  # type: ignore[attr-defined]


_twins: list[Twin] = []  # in the order of their first use, which is the same on every process


def entered(data: torch.Tensor, group: Group) -> torch.Tensor:
    """A replicated array as split work uses it."""
    if not (torch.is_grad_enabled() and data.requires_grad) or getattr(data, "_entered", False):
        return data
    if not data.is_leaf or data.is_meta or data._backward_hooks:
        return Enter.apply(data, group)
    return _twin(data, group).array


def twins(leaf: torch.Tensor) -> list[Twin]:
    """The twins of a leaf that still share its memory."""
    known: list[Twin] = getattr(leaf, "_twins", [])
    return [twin for twin in known if twin.array.data_ptr() == leaf.data_ptr()]


def _twin(leaf: torch.Tensor, group: Group) -> Twin:
    for twin in twins(leaf):
        if twin.group is group:
            return twin
    made = Twin(leaf, group)
    leaf._twins = [*twins(leaf), made]  # type: ignore[attr-defined]
    _twins.append(made)
    return made


def drop(leaf: torch.Tensor) -> None:
    """Forget what is waiting for a leaf."""
    for twin in twins(leaf):
        twin.array.grad = None


def collect() -> None:
    """Sum what is waiting over the processes and add it to the leaves' gradients."""
    _twins[:] = [twin for twin in _twins if twin.leaf() is not None]
    waiting = [twin for twin in _twins if twin.array.grad is not None]
    for group, dtype in dict.fromkeys((twin.group, _gradient(twin).dtype) for twin in waiting):
        alike = [twin for twin in waiting if twin.group is group and _gradient(twin).dtype == dtype]
        large = [twin for twin in alike if _gradient(twin).numel() >= LARGE or _gradient(twin).requires_grad]
        for twin in large:
            gradient = _gradient(twin)
            own = not gradient.requires_grad
            _add(twin, wire.all_reduce(gradient, group, own=own) if own else Enter.apply(gradient, group))
        _together([twin for twin in alike if twin not in large], group)


def _gradient(twin: Twin) -> torch.Tensor:
    gradient = twin.array.grad
    assert gradient is not None
    return gradient


def _together(alike: list[Twin], group: Group) -> None:
    if not alike:
        return
    gradients = [_gradient(twin) for twin in alike]
    total = wire.all_reduce(torch.cat([each.reshape(-1) for each in gradients]), group, own=True)
    start = 0
    for twin, gradient in zip(alike, gradients, strict=True):
        _add(twin, total[start : start + gradient.numel()].view(gradient.shape))
        start += gradient.numel()


def _add(twin: Twin, total: torch.Tensor) -> None:
    leaf = twin.leaf()
    assert leaf is not None
    twin.array.grad = None
    leaf.grad = total if leaf.grad is None else leaf.grad + total


def summed(leaf: torch.Tensor, own: torch.Tensor | None, parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """A leaf's gradient from that of its own uses and those of its twins, as `torch.autograd.grad` gives them."""
    for twin, part in zip(twins(leaf), parts, strict=True):
        if part is not None:
            total = wire.all_reduce(part, twin.group)
            own = total if own is None else own + total
    return own
