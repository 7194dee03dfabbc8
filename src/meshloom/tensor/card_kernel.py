"""The kernel of a plan on cards that have memory of their own: one op, whose results lie on them when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshloom.engines.kernel import Function, Kernel
from meshloom.placement import Topology
from meshloom.planner import Plan
from meshloom.processes.split_kernel import kernel_of
from meshloom.runtime.card_array import run_op
from meshloom.runtime.card_memory import CardStore


class CardKernel(Kernel):
    """What a plan does to arrays on cards: another kernel, at the end of which the host holds nothing."""

    __slots__ = ("inner", "store")

    def __init__(self, inner: Kernel, store: CardStore) -> None:
        for name in Kernel.__slots__:
            setattr(self, name, getattr(inner, name))
        self.inner, self.store, self.simple = inner, store, False

    def run(self, datas: Sequence[torch.Tensor], function: Function) -> Any:
        """The results' stored arrays."""
        plan = self.plan
        return run_op(plan.call.op, lambda: self.inner.run(datas, function), plan.outs, self.store)

    def prepared(self, datas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands' stored arrays as the function takes them."""
        topologies: tuple[Topology, ...] = self.ins
        found = run_op(self.plan.call.op, lambda: tuple(self.inner.prepared(datas)), topologies, self.store)
        return list(found)


def kernel_for(plan: Plan) -> Kernel:
    """The kernel of a plan, wherever its arrays lie."""
    lease, kernel = plan.mesh.lease, kernel_of(plan)
    return kernel if lease is None or lease.store is None else CardKernel(kernel, lease.store)
