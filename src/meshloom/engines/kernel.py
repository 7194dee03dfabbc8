"""From a plan to a kernel: the one place where a decision becomes array calls.

A reduction over devices is folded into the op that leaves it: the op runs on the stored arrays, where the device axis
and the dim it shards are one dim, so that a K-sharded matmul with its all-reduce is one contraction. Only where the
result is to stay partial (or comes in partial) does a device axis lead, and the op is mapped over it. An op marked
`trimmed` runs without its padding unless an axis leads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from meshloom.engines import private
from meshloom.engines.layout import Step, apply, expose, fill, mover
from meshloom.engines.peers import ALONE, Peers
from meshloom.engines.torch_engine import FUNCTIONS, PLAIN, Local
from meshloom.ops import OPS, Fill, Ref, find
from meshloom.placement import Partial, Replicate, Topology
from meshloom.planner import Plan

Function = Callable[..., Any]


class Kernel:
    """What a plan does to arrays: `prepare` each operand, run the function, `finish` each result."""

    __slots__ = ("bound", "finish", "ins", "leads", "local", "plan", "prepare", "presence", "room", "simple", "trimmed")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.leads = _leads(plan)
        self.trimmed = find(plan.call.op).at_zero == "trimmed" and not self.leads and not plan.mesh.is_split
        self.ins = tuple(folded(topology, self.leads) for topology in plan.ins)
        shapes = tuple(raw.stored_shape[len(raw.partial_axes) :] for raw in plan.raw)
        self.local = Local(plan.call, self.ins, shapes, self._peers())
        self.prepare = tuple(self._preparation(i) for i in range(len(self.ins)))
        self.presence = tuple(
            tuple(0 if not isinstance(t.placements[axis], Replicate) else None for t in self.ins) for axis in self.leads
        )
        self.finish = tuple(self._finish(i) for i in range(len(plan.raw)))
        self.simple = not self.leads and not any(self.prepare) and not any(self.finish)
        self.room = _room(plan) if self.trimmed else None
        self.bound = self._bind() if find(plan.call.op).signature is not None else None

    def _peers(self) -> Peers:
        """Who else holds parts of what the op works on."""
        return ALONE

    def _preparation(self, operand: int) -> Step | None:
        plan = self.plan
        source, target = plan.call.operands[operand], self.ins[operand]
        if self.trimmed and target.padded:
            return mover(source, target.replicated, plan.machine)
        fills = [each for each in _fills(plan) if each.operand == operand and target.padded]
        leads = self.leads
        bring = self._bring(operand)
        if not fills and not leads:
            return bring

        def prepare(data: torch.Tensor) -> torch.Tensor:
            data = data if bring is None else bring(data)
            for each in fills:
                data = fill(data, target, each.value, each.dims)
            return expose(data, target, leads) if leads else data

        return prepare

    def _bring(self, operand: int) -> Step | None:
        """An operand to where the rows want it."""
        return mover(self.plan.call.operands[operand], self.ins[operand], self.plan.machine)

    def _finish(self, result: int) -> Step | None:
        plan = self.plan
        arrived = folded(plan.raw[result], self.leads)
        arrived = arrived.replicated if self.trimmed and arrived.padded else arrived
        hand_over = self._hand_over(result, arrived)
        # where an axis leads, a device may hold nothing but what its operand was filled with
        is_filled = bool(self.leads) and any(each.value != 0 for each in _fills(plan))
        if not (arrived.padded and (is_filled or _needs_mask(plan))):
            return hand_over

        def finish(data: torch.Tensor) -> torch.Tensor:
            # the dtype is the engine's; topologies of layouts do not depend on it
            data = fill(data, arrived, 0)
            return data if hand_over is None else hand_over(data)

        return finish

    def _hand_over(self, result: int, arrived: Topology) -> Step | None:
        """A result from where the op left it to where it is wanted."""
        return mover(arrived, self.plan.outs[result], self.plan.machine)

    def run(self, datas: Sequence[torch.Tensor], function: Function) -> Any:
        """The results' stored arrays, from the operands' and the function on prepared arrays."""
        if self.simple:
            return function(*datas)
        ready = self.prepared(datas)
        if self.room is not None and not (torch.is_grad_enabled() and any(data.requires_grad for data in ready)):
            padded, rows = ready[0].new_empty(self.room), ready[0].shape[0]
            padded.narrow(0, rows, self.room[0] - rows).zero_()
            torch.mm(*ready, out=padded.narrow(0, 0, rows))
            return padded
        for presence in reversed(self.presence):
            function = self._map(function, presence)
        results = function(*ready)
        if isinstance(results, torch.Tensor):
            step = self.finish[0]
            return results if step is None else step(results)
        return tuple(r if step is None else step(r) for r, step in zip(results, self.finish, strict=True))

    def _map(self, function: Function, presence: tuple[int | None, ...]) -> Function:
        """The function on every entry of a device axis, which only some arrays have."""
        return torch.vmap(function, in_dims=presence)

    def prepared(self, datas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands' stored arrays as the function takes them."""
        return [data if step is None else apply(step, data) for data, step in zip(datas, self.prepare, strict=True)]

    def _bind(self) -> Function:
        """The op's function with the call's own arguments, waiting for the arrays."""
        plain, arguments = self._plain(), self.plan.call.arguments
        if plain is not None:
            return plain
        function = function_of(self.plan.call.op)
        lead = (self.local,) if getattr(function, "is_aware", False) else ()
        if any(isinstance(each, tuple) and _has_ref(each) for each in arguments.values()):
            return lambda *datas: function(*lead, **_substitute(arguments, datas))
        fixed = {name: each for name, each in arguments.items() if not isinstance(each, Ref)}
        places = {name: each.index for name, each in arguments.items() if isinstance(each, Ref)}
        in_order = [*places.values()] == [*range(len(places))] and [*arguments][: len(places)] == [*places]
        if in_order and _takes_first(function, len(lead), [*places]):
            return partial(function, *lead, **fixed) if lead or fixed else function
        return lambda *datas: function(*lead, **{name: datas[i] for name, i in places.items()}, **fixed)

    def _plain(self) -> Function | None:
        """Torch's own function, where the arrays are dense tensors; its arrays are given by place."""
        plan = self.plan
        short = PLAIN.get(plan.call.op)
        dense = not (self.leads or any(each.padded for each in (*self.ins, *plan.raw)))
        if short is None or not dense or not self._is_local():
            return None
        fixed = {name: each for name, each in plan.call.arguments.items() if not isinstance(each, Ref)}
        return short(self.local, fixed)

    def _is_local(self) -> bool:
        """Whether the op on the arrays of this process is the op on the tensors."""
        return True


def _room(plan: Plan) -> tuple[int, ...] | None:
    """The shape of the padded result that a product of two matrices is written into, where only its rows are padded.

    It saves the copy that padding the product would be; autograd and autocast have no `out=`.
    """
    call, out = plan.call, plan.outs[0]
    matrices = OPS[call.op].takes_out and all(topology.ndim == 2 for topology in call.operands)
    in_order = list(call.arguments.values()) == [Ref(0), Ref(1)]
    rows_alone = out.padded_dims == (0,) and len(out.shards[0]) == 1 and not out.partial_axes
    plain = matrices and in_order and rows_alone and not private.is_any_autocast_enabled()
    return out.stored_shape if plain else None


def function_of(op: str) -> Function:
    """The engine's function for an op of the table."""
    return FUNCTIONS[op]


def _takes_first(function: Function, lead: int, names: list[str]) -> bool:
    """Whether a function's parameters begin with these names, so that they may be given by place, which is faster."""
    try:
        return [*inspect.signature(function).parameters][lead : lead + len(names)] == names
    except ValueError:  # one of torch's own, which does not tell: its order is that of the table
        return True


def _has_ref(values: tuple[object, ...]) -> bool:
    return any(isinstance(each, Ref) for each in values)


def _substitute(arguments: dict[str, object], datas: Sequence[torch.Tensor]) -> dict[str, object]:
    def value(each: object) -> Any:
        if isinstance(each, Ref):
            return datas[each.index]
        if isinstance(each, tuple) and _has_ref(each):
            return tuple(value(part) for part in each)
        return each

    return {name: value(each) for name, each in arguments.items()}


def _leads(plan: Plan) -> tuple[int, ...]:
    """The axes that stay in front: an operand is partial there, or the result is to stay as partial as it comes."""
    found = []
    for axis, row in enumerate(plan.rows):
        carried = _is_carried(plan, axis)
        kept = row.local and any(
            isinstance(raw.placements[axis], Partial) and raw.placements[axis] == out.placements[axis]
            for raw, out in zip(plan.raw, plan.outs, strict=True)
        )
        if carried or kept:
            found.append(axis)
    return tuple(found)


def _is_carried(plan: Plan, axis: int) -> bool:
    """Whether an operand's parts must stay apart. A whole one that the row splits only to sum it again stays whole."""
    split = [s for s, want in zip(plan.call.operands, plan.rows[axis].ins, strict=True) if isinstance(want, Partial)]
    kept = any(isinstance(out.placements[axis], Partial) for out in plan.outs)
    return bool(split) and (kept or any(isinstance(source.placements[axis], Partial) for source in split))


def folded(raw: Topology, leads: tuple[int, ...]) -> Topology:
    """A topology as the folded op has it: only the axes that lead are partial, the others are reduced already."""
    return raw.with_placements(
        tuple(
            Replicate() if isinstance(each, Partial) and axis not in leads else each
            for axis, each in enumerate(raw.placements)
        )
    )


def _fills(plan: Plan) -> tuple[Fill, ...]:
    op = find(plan.call.op)
    if op.at_zero == "singular":
        return tuple(Fill(i, 1, tuple(range(t.ndim))) for i, t in enumerate(plan.ins))
    return op.fill(plan.call)


def _needs_mask(plan: Plan) -> bool:
    """Whether padding of the result may be something else than zero.

    A pointwise op marked `zero` leaves zero only where every operand is zero: not beside a number, nor where an
    operand is broadcast over the padded dim.
    """
    op = find(plan.call.op)
    if op.at_zero != "zero":
        return True
    out = plan.raw[0]
    if op.signature is not None:  # the mean of nothing is nan, also over padding
        return not op.view and 0 not in out.shape and any(0 in topology.shape for topology in plan.ins)
    if len(plan.call.operands) < len(plan.call.leaves) + len(plan.call.arguments):
        return True
    for dim in out.padded_dims:
        for topology in plan.ins:
            own = dim - (out.ndim - topology.ndim)
            if own < 0 or own not in topology.padded_dims:
                return True
    return False
