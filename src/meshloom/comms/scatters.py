"""Gradients of gathered weights on their way to the shards: reduce-scattered while backward goes on.

A gradient that is large starts at once, small ones wait for each other and travel together. At most two large ones are
under way: who adds a third waits for the first. The end of the pass waits for all, so that whoever comes after backward
finds the gradients in place. What starts when follows from the order of backward alone, the same on every process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshloom.comms import wire
from meshloom.comms.group import Group
from meshloom.engines import private

SMALL = 1 << 18  # bytes of a gradient up to which it waits for others
TOGETHER = 1 << 20  # bytes of small ones from which they travel
MOST = 2  # large ones under way


@dataclass(frozen=True, eq=False)
class Scatter:
    """Gradients of some leaves that are being reduce-scattered in one collective."""

    leaves: tuple[torch.Tensor, ...]
    finish: Callable[[], torch.Tensor]

    def settle(self) -> None:
        """Wait for the sums and add them to the leaves' gradients."""
        total, start = self.finish(), 0
        if len(self.leaves) == 1:
            accumulate(self.leaves[0], total)
            return
        for leaf in self.leaves:
            accumulate(leaf, total[start : start + leaf.numel()].view(leaf.shape))
            start += leaf.numel()


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to the gradient of a leaf as autograd does: in place, unless it belongs to a graph."""
    if leaf.grad is None:
        leaf.grad = gradient
    elif leaf.grad.requires_grad:
        leaf.grad = leaf.grad + gradient
    else:
        with torch.no_grad():
            leaf.grad.add_(gradient)


class Scatters:
    """What is under way, and what waits to travel together."""

    def __init__(self) -> None:
        self.under_way: deque[Scatter] = deque()
        self.small: dict[tuple[Group, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.tasks: set[int] = set()  # the passes at whose end all is waited for

    def takes(self, leaf: torch.Tensor, node: torch.autograd.graph.Node | None) -> bool:
        """Whether a leaf's gradient may come after the node of its use: nobody but backward's end will look at it."""
        if node is None or torch.is_grad_enabled() or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return False
        try:
            return private.will_execute(node)
        except RuntimeError:  # what torch says of a leaf that autograd.grad was asked for
            return False

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        """One more gradient, (processes, ...), of this process."""
        self._await_end()
        if gradient.nbytes > SMALL:
            self._begin((leaf,), gradient, group)
            return
        alike = self.small.setdefault((group, gradient.dtype), [])
        alike.append((leaf, gradient))
        if sum(each.nbytes for _, each in alike) >= TOGETHER:
            self._begin_small(group, gradient.dtype)

    def finish(self) -> None:
        """Wait for all."""
        self.tasks.discard(private.current_graph_task_id())
        for group, dtype in [*self.small]:
            self._begin_small(group, dtype)
        while self.under_way:
            self.under_way.popleft().settle()

    def drop(self) -> None:
        """Forget what a pass left that did not come to its end."""
        self.small.clear()
        self.tasks.clear()
        while self.under_way:
            self.under_way.popleft().finish()

    def _await_end(self) -> None:
        task = private.current_graph_task_id()
        if task not in self.tasks:
            self.tasks.add(task)
            private.engine.queue_callback(self.finish)

    def _begin(self, leaves: Sequence[torch.Tensor], pieces: torch.Tensor, group: Group) -> None:
        while len(self.under_way) >= MOST:
            self.under_way.popleft().settle()
        self.under_way.append(Scatter(tuple(leaves), wire.begin_reduce_scatter(pieces, group)))

    def _begin_small(self, group: Group, dtype: torch.dtype) -> None:
        alike = self.small.pop((group, dtype))
        pieces = [gradient.flatten(1) for _, gradient in alike]
        self._begin([leaf for leaf, _ in alike], torch.cat(pieces, 1) if len(pieces) > 1 else alike[0][1], group)


SCATTERS = Scatters()
