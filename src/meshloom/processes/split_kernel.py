"""A plan carried out by several processes: each computes on its own box, and collectives join what rows leave apart.

The decision is the plan's, row by row, the same on every process. Locally it is the kernel of one process: devices of
the box are folded into one array call. What is added: operands and results cross processes
(`comms.redistribution`), a result that rows leave partial is summed over the processes, an op that needs statistics of
a dim which several processes hold is told its peers, and a replicated operand of split work gets its gradient summed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from meshloom.collectives import Collective
from meshloom.comms.deferred import found_deferred, sum_gradient
from meshloom.comms.gradients import Once
from meshloom.comms.group import WORLD, Group, check_joined, group_of
from meshloom.comms.peers import peers_of
from meshloom.comms.redistribution import Gather, gathering_steps, mover, walk
from meshloom.comms.weights import (
    Use,
    forget_gathered,
    gather_weight,
    is_weight,
    scatter_back,
)
from meshloom.engines.kernel import Function, Kernel, function_of
from meshloom.engines.layout import Step, apply
from meshloom.engines.peers import Peers
from meshloom.errors import place_of, where
from meshloom.ops import OPS, Row
from meshloom.placement import Partial, Replicate, Shard, Topology
from meshloom.planner import Plan, moves
from meshloom.processes.divergence import STORY, describe, is_listening, note


class SplitKernel(Kernel):
    """The kernel of a plan on a mesh that processes split."""

    __slots__ = ("entered", "mesh", "told", "weights")

    def __init__(self, plan: Plan) -> None:
        check_joined(plan.mesh)
        self.mesh = plan.mesh
        self.weights: dict[int, tuple[Collective, ...]] = {}  # operands that are gathered, perhaps leaves, and by what
        super().__init__(plan)
        self.told = f"{plan.call.op}({', '.join(topology.notation for topology in plan.call.operands)})"
        self.entered = self._entered()

    def _entered(self) -> tuple[tuple[int, Step, Group], ...] | None:
        """Operands whose gradients are summed, where nothing else is done before or after the op; None elsewhere."""
        steps = [(i, step) for i, step in enumerate(self.prepare) if step is not None]
        if self.leads or self.weights or any(self.finish) or not all(map(_is_sum_alone, (step for _, step in steps))):
            return None
        return tuple((i, step, step.keywords["group"]) for i, step in steps)  # type: ignore[attr-defined]

    def run(self, datas: Sequence[torch.Tensor], function: Function) -> Any:
        """The results' stored arrays; what is done is said before it is done."""
        WORLD.watch.begin(self.told, self.mesh)
        if is_listening() and not any(data.is_meta for data in datas):  # what is explained is nobody else's business
            note(describe(self.told, STORY.identity), where(), self.plan.mesh.ranks)
        if self.entered is not None:
            ready = [*datas]
            for i, step, group in self.entered:
                known = found_deferred(ready[i], group)
                ready[i] = apply(step, ready[i]) if known is None else known
            return function(*ready)
        if self.weights and not self.leads and torch.is_grad_enabled():
            function = self._without_keeping(datas, function)
        return super().run(datas, function)

    def _without_keeping(self, datas: Sequence[torch.Tensor], function: Function) -> Function:
        place = place_of(sys._getframe(2))
        return forget_gathered(function, datas, lambda i, leaf: self._use(i, leaf, place), self.weights)

    def _use(self, operand: int, leaf: torch.Tensor, place: tuple[str, int]) -> Use:
        step, call = self.prepare[operand], self.plan.call
        assert step is not None
        return Use(operand, leaf, partial(apply, step), call.op, self.weights[operand], place)

    def _crossing(self) -> list[int]:
        return [axis for axis, parts in enumerate(self.plan.mesh.processes) if parts > 1]

    def _bring(self, operand: int) -> Step | None:
        bring, group, alone = self._move(operand), self._entry(operand), self._alone(operand)
        steps = self._gathering(operand)
        if steps is not None and alone is None:
            self.weights[operand] = moves(self.plan.call.operands[operand], self.ins[operand], self.plan.machine)
            return self._bring_weight(operand, steps)
        if group is None and alone is None:
            return bring
        if group is not None and bring is None and alone is None:  # a replicated weight of split work
            return partial(sum_gradient, group=group)

        def run(data: torch.Tensor) -> torch.Tensor:
            data = data if bring is None else bring(data)
            data = data if group is None else sum_gradient(data, group)
            return data if alone is None else Once.apply(data, alone)

        return run

    def _gathering(self, operand: int) -> list[Step] | None:
        """The steps of an operand that is gathered for split work: its gradient is scattered as it was gathered."""
        source, target = self.plan.call.operands[operand], self.ins[operand]
        steps = gathering_steps(source, target, self.plan.machine)
        gathered = [step.axis for step in steps or () if isinstance(step, Gather)]
        return steps if steps is not None and all(self._is_entered(axis, operand) for axis in gathered) else None

    def _bring_weight(self, operand: int, steps: list[Step]) -> Step:
        gathered = [step.axis for step in steps if isinstance(step, Gather)]
        axes = [axis for axis in self._crossing() if axis not in gathered and self._is_entered(axis, operand)]
        rest, first = group_of(self.plan.mesh, axes), steps[0]
        assert isinstance(first, Gather)
        others = [scatter_back(step) if isinstance(step, Gather) else step for step in steps[1:]]

        def run(data: torch.Tensor) -> torch.Tensor:
            leaf, data = data, data if rest is None else sum_gradient(data, rest)
            whole = gather_weight(data, leaf, first) if is_weight(leaf) else scatter_back(first)(data)
            return walk(others, whole)

        return run

    def _move(self, operand: int) -> Step | None:
        plan = self.plan
        return mover(plan.call.operands[operand], self.ins[operand], plan.machine)

    def _hand_over(self, result: int, arrived: Topology) -> Step | None:
        plan = self.plan
        raw, out = plan.raw[result], plan.outs[result]
        apart = tuple(axis for axis in self._crossing() if self._is_apart(axis, raw))
        placements = tuple(raw.placements[a] if a in apart else p for a, p in enumerate(arrived.placements))
        own = OPS[plan.call.op].is_fresh
        return mover(arrived.with_placements(placements), out, plan.machine, merged=apart, own=own)

    def _is_apart(self, axis: int, raw: Topology) -> bool:
        """Whether processes hold parts of a sum: the row cuts an operand on an axis that nobody keeps partial."""
        return isinstance(raw.placements[axis], Partial) and axis not in self.leads and _is_cut(self.plan.rows[axis])

    def _alone(self, operand: int) -> Group | None:
        """The processes of which one takes an operand that a sum counts once, such as the bias of a split product."""
        rows = self.plan.rows
        axes = [
            axis
            for axis in self._crossing()
            if isinstance(rows[axis].ins[operand], Partial) and axis not in self.leads and _is_cut(rows[axis])
        ]
        return group_of(self.plan.mesh, axes)

    def _entry(self, operand: int) -> Group | None:
        """The processes over which the gradient of a replicated operand is summed."""
        axes = [axis for axis in self._crossing() if self._is_entered(axis, operand)]
        return group_of(self.plan.mesh, axes)

    def _is_entered(self, axis: int, operand: int) -> bool:
        row = self.plan.rows[axis]
        split = any(not isinstance(out, Replicate) for out in row.outs) or bool(row.inner)
        # what is partial only to be summed again stays whole on every process
        whole = not _is_cut(row) and axis not in self.leads
        return isinstance(row.ins[operand], Replicate) and split and not whole

    def _is_local(self) -> bool:
        raw = [placement for each in self.plan.raw for placement in each.placements]
        return self.local.peers.alone and not any(isinstance(placement, Partial) for placement in raw)

    def _peers(self) -> Peers:
        """The processes along the axes on which the op needs more than what one holds."""
        peers = peers_of(self.plan.mesh, [axis for axis in self._crossing() if not self.plan.rows[axis].local])
        assert peers.alone or function_of(self.plan.call.op).is_shared  # type: ignore[attr-defined]
        return peers

    def _map(self, function: Function, presence: tuple[int | None, ...]) -> Function:
        """What communicates cannot be mapped: one entry after the other, the same number on every process."""
        if self.local.peers.alone:
            return super()._map(function, presence)

        def run(*datas: torch.Tensor) -> Any:
            pairs = [*zip(datas, presence, strict=True)]
            count = next(len(data) for data, there in pairs if there is not None)
            results = [function(*(d if there is None else d[i] for d, there in pairs)) for i in range(count)]
            if isinstance(results[0], torch.Tensor):
                return torch.stack(results)
            return tuple(torch.stack(each) for each in zip(*results, strict=True))

        return run


def kernel_of(plan: Plan) -> Kernel:
    """What carries a plan out: in this process, or with the others that hold the mesh."""
    return SplitKernel(plan) if plan.mesh.is_split else Kernel(plan)


def _is_sum_alone(step: Step) -> bool:
    return isinstance(step, partial) and step.func is sum_gradient


def _is_cut(row: Row) -> bool:
    """Whether a row shards an operand."""
    return any(isinstance(placement, Shard) for placement in row.ins)
