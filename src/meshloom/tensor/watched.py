"""A call while somebody records, explains or forbids: what it communicates, told before and after it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from meshloom.comms.weights import Use, forget_gathered
from meshloom.engines.kernel import Function, Kernel
from meshloom.engines.layout import apply
from meshloom.errors import place_of
from meshloom.runtime import Event, state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.entries import Entry


class Watched:
    """One call while somebody is watching: its events."""

    def __init__(self, entry: Entry, tensors: Sequence[Tensor]) -> None:
        self.plan, self.where = entry.plan, where()
        for log in state.logs:
            log.begin_call(self.plan, self.where, tensors)

    @property
    def forward(self) -> list[Event]:
        """The events of the call itself."""
        return [Event(each, self.plan.call.op, self.where) for each in self.plan.forward]

    def forget_gathered(self, kernel: Kernel, datas: Sequence[torch.Tensor], function: Function) -> Function:
        """The function so that backward gathers weights again, as processes do, and tells so.

        Processes that split the mesh do so by themselves.
        """
        plan = self.plan
        if plan.mesh.is_split or kernel.leads or not torch.is_grad_enabled():
            return function
        gathered = {i: moved for i in range(len(plan.ins)) if (moved := plan.gathers(i))}
        if not gathered:
            return function
        place = place_of(sys._getframe(2))

        def use(operand: int, leaf: torch.Tensor) -> Use:
            step = kernel.prepare[operand]
            prepare = _keep if step is None else partial(apply, step)
            return Use(operand, leaf, prepare, plan.call.op, gathered[operand], place)

        return forget_gathered(function, datas, use, gathered)

    def run(self, function: Callable[..., Any], *args: object) -> Any:
        """The call itself; one that does not come to its end is told too."""
        try:
            return function(*args)
        except BaseException:
            for log in state.logs:
                log.abandon_call()
            raise

    def log(self, entry: Entry, results: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Write the call into every open log, with the arrays that it gave."""
        self.plan = entry.plan
        for log in state.logs:
            log.note_call(entry.plan, self.where)
        state.log(self.forward)
        for log in state.logs:
            log.end_call(results if isinstance(results, tuple) else (results,))


def _keep(data: torch.Tensor) -> torch.Tensor:
    return data
