"""The plan of one op call: a row of its rule for every mesh axis, chosen by price.

`pricing.py` says what a choice costs. Three rules keep it predictable:

- Where the operands already line up with a row, what the op communicates by itself (the reduction that the row leaves,
  the statistics inside) is not held against it: S(k) x S(k) is reduced, not gathered. The exception is a reduction of
  so many bytes that another plan costs less than half in all: [8192, 64] S(1) @ [64, 8192] S(0) would reduce 256 MB
  where moving the operands takes 4.
- A partial operand is reduced before the op, unless the caller asked for a partial result: sum(a) / 0 is inf, while
  sum(a / 0) is nan.
- A replicated operand is not sharded for its own sake: a row that shards nothing which was sharded before is only
  considered on an axis for which the caller asked for a sharded or partial result.

The automatic result is never Partial: without a request the partial axis becomes R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshloom.collectives import Collective
from meshloom.errors import ArgumentError, MeshError
from meshloom.fabric import VIRTUAL, Machine
from meshloom.mesh import Mesh
from meshloom.ops import CONDITIONS, Call, Choices, Row, find, holds
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, as_placements, can_be_partial
from meshloom.planner.pricing import (
    ROUNDING,
    Pricing,
    Request,
    Rows,
    is_possible,
    lines_up,
    move,
    settle,
    statistics,
)
from meshloom.planner.redistribution import route
from meshloom.types import is_floating

SEARCHED = 512  # combinations of rows that are priced together; beyond that, axis by axis
FORGIVEN = 2.0  # times the price of any other plan that what an op causes may cost where its operands line up


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen decision for one op call.

    `ins` are the operands where the rows want them, `raw` the results as the rows leave them, `outs` the results as
    they are handed over. `forward` are the collectives of the call in order. Those of its gradient are worked out when
    asked for: `backward` of one operand, `backward_results` before it reaches the operands.
    """

    call: Call
    rows: tuple[Row, ...]
    ins: tuple[Topology, ...]
    raw: tuple[Topology, ...]
    outs: tuple[Topology, ...]
    forward: tuple[Collective, ...]
    cost: float
    machine: Machine
    request: Request

    @property
    def mesh(self) -> Mesh:
        """The mesh of the operands."""
        return self.call.operands[0].mesh

    @property
    def bytes(self) -> int:
        """The bytes that one device receives in this call."""
        return sum(each.bytes for each in self.forward)

    def backward(self, operand: int) -> tuple[Collective, ...]:
        """The collectives that bring an operand's gradient home.

        Where a replicated operand meets a result that is sharded or partial, each device has a part of the gradient:
        a partial sum that is reduced to the placements that the gradient's value has.
        """
        source = self.call.operands[operand]
        if not is_floating(source.dtype):
            return ()
        found = tuple(self._cotangent(row, operand, axis) for axis, row in enumerate(self.rows))
        arrived = source.with_placements(found)
        return route(arrived, source.reduced.placements, self.machine)[0]

    def _cotangent(self, row: Row, operand: int, axis: int) -> Placement:
        placement = row.ins[operand]
        if not isinstance(placement, Replicate):
            return placement if isinstance(placement, Shard) else Replicate()
        split = any(not isinstance(out, Replicate) for out in row.outs) or bool(row.inner)
        return Partial("sum") if split and self.mesh.shape[axis] > 1 else Replicate()

    def gathers(self, operand: int) -> tuple[Collective, ...]:
        """The collectives that gather an operand for work that is split along the same axes; none of any other operand.

        That is full sharding: no device keeps what it gathered so, and backward gathers it again.
        """
        source, target = self.call.operands[operand], self.ins[operand]
        pairs = zip(source.placements, target.placements, self.mesh.shape, strict=True)
        axes = [axis for axis, (now, wanted, size) in enumerate(pairs) if now != wanted and size > 1]
        if source.partial_axes or not all(self._is_gathered(axis, operand) for axis in axes):
            return ()
        found = route(source, target.placements, self.machine)[0]
        return found if len(found) == len(axes) else ()  # not by a detour

    def _is_gathered(self, axis: int, operand: int) -> bool:
        row = self.rows[axis]
        is_cut = any(isinstance(placement, Shard) for placement in row.ins)
        return is_cut and isinstance(self._cotangent(row, operand, axis), Partial)

    def backward_results(self) -> tuple[Collective, ...]:
        """The collectives that bring the results' gradients to the rows, and the statistics of backward."""
        found: list[Collective] = []
        for raw, out in zip(self.raw, self.outs, strict=True):
            if is_floating(out.dtype):
                found += route(out.reduced, raw.reduced.placements, self.machine)[0]
        for axis, row in enumerate(self.rows):
            found += statistics(self.ins, axis, row.backward)
        return tuple(found)


def plan(
    call: Call, request: Request | None = None, machine: Machine = VIRTUAL, chosen: dict[str, str] | None = None
) -> Plan:
    """The cheapest plan for a call; ties go to the row that stands first in its rule.

    `request` asks for placements of the result per axis (None: automatic), negative dims counted from the result's end.
    `chosen` names the row to take on an axis.
    """
    mesh = common_mesh(call.operands)
    for name in chosen or ():
        mesh.axis(name)
    choices = find(call.op).rule(call)
    wanted = _read_request(request, mesh, len(choices.shapes[0]))
    candidates = [_candidates(call, choices, axis, wanted[axis], chosen or {}) for axis in range(mesh.ndim)]
    pricing = Pricing(call, choices, wanted, machine)
    rows = _search(pricing, candidates)
    return _assemble(pricing, _reconsider(pricing, rows, candidates, chosen or {}))


def _reconsider(pricing: Pricing, rows: Rows, candidates: list[Rows], chosen: dict[str, str]) -> Rows:
    """Other rows where operands line up with these, if the reduction that they leave makes those too expensive."""
    names = pricing.mesh.axes
    axes = [axis for axis, row in enumerate(rows) if names[axis] not in chosen and _is_reduced(pricing, row, axis)]
    if not axes or not pricing.moves_many_bytes(rows):
        return rows
    wide = [_all_rows(pricing, axis) if axis in axes else (row,) for axis, row in enumerate(rows)]
    if math.prod(map(len, wide)) > SEARCHED:
        wide = [candidates[axis] if axis in axes else (row,) for axis, row in enumerate(rows)]
    return pricing.cheapest_in_full(wide, pricing.full(rows) / FORGIVEN) or rows


def _is_reduced(pricing: Pricing, row: Row, axis: int) -> bool:
    """Whether a row is taken for its operands' sake, and leaves a result that is to be reduced."""
    leaves = any(isinstance(out, Partial) for out in row.outs)
    return leaves and pricing.mesh.shape[axis] > 1 and pricing.is_free(row, axis)


def _all_rows(pricing: Pricing, axis: int) -> Rows:
    call = pricing.call
    return tuple(row for row in pricing.choices.rows if _can_be_taken(row, call, axis) and not _carries(row))


def _read_request(request: Request | None, mesh: Mesh, ndim: int) -> Request:
    if request is None:
        return (None,) * mesh.ndim
    full = as_placements(tuple(Replicate() if each is None else each for each in request), mesh, ndim)
    return tuple(None if asked is None else each for asked, each in zip(request, full, strict=True))


def common_mesh(operands: Sequence[Topology]) -> Mesh:
    """The mesh that all operands are on."""
    meshes = dict.fromkeys(topology.mesh for topology in operands)
    if len(meshes) > 1:
        raise MeshError(
            "the operands are on different meshes",
            meshes=" and ".join(map(str, meshes)),
            fix="bring them to one mesh: x.redistribute(placements, mesh=mesh)",
        )
    return next(iter(meshes))


def _candidates(
    call: Call, choices: Choices, axis: int, wanted: Placement | None, chosen: dict[str, str]
) -> tuple[Row, ...]:
    name = call.operands[0].mesh.axes[axis]
    if name in chosen:
        return _chosen_row(call, choices, chosen[name], name)
    now = [topology.placements[axis] for topology in call.operands]
    open_ended = wanted is not None and not isinstance(wanted, Replicate)
    rows = (row for row in choices.rows if open_ended or _is_called_for(row, now))
    rows = (row for row in rows if _can_be_taken(row, call, axis))
    return tuple(row for row in rows if isinstance(wanted, Partial) or not _carries(row))


def _can_be_taken(row: Row, call: Call, axis: int) -> bool:
    return (row.across or call.operands[0].mesh.processes[axis] == 1) and _fits(row, call)


def _carries(row: Row) -> bool:
    """Whether the row takes a partial operand and leaves a partial result."""
    return any(isinstance(want, Partial) for want in row.ins) and not any(isinstance(p, Shard) for p in row.ins)


def _is_reduced_first(row: Row, now: Sequence[Placement], wanted: Placement | None) -> bool:
    """Whether operands lie as the row wants them but for being partial, which only a request for P keeps."""
    held = any(isinstance(want, Partial) and want == have for want, have in zip(row.ins, now, strict=True))
    return held and _carries(row) and not isinstance(wanted, Partial)


def _fits(row: Row, call: Call) -> bool:
    """Whether the operands' dtypes can be partial as the row wants them, and the row holds for all their values."""
    return _has_meaning(row, call) and holds(find(call.op), call, row)


def _has_meaning(row: Row, call: Call) -> bool:
    pairs = zip(row.ins, call.operands, strict=True)
    return all(not isinstance(want, Partial) or can_be_partial(want, have.dtype) for want, have in pairs)


def _why_not(row: Row, call: Call) -> str:
    if not _has_meaning(row, call):
        return "has no meaning for these dtypes"
    needs = CONDITIONS.get(row.when)
    if needs is not None and not needs.test(call, row):
        return f"holds {needs.meaning}"
    return "holds for sums that keep their dtype and are scaled by positive finite numbers"


def _is_called_for(row: Row, now: Sequence[Placement]) -> bool:
    pairs = list(zip(row.ins, now, strict=True))
    return row.label == "none" or any(isinstance(want, Shard) and want == have for want, have in pairs)


def _chosen_row(call: Call, choices: Choices, label: str, axis: str) -> tuple[Row, ...]:
    rows = tuple(row for row in choices.rows if row.label == label)
    if rows and not any(_fits(row, call) for row in rows):
        raise ArgumentError(f"row {label!r} does not fit this call", row=rows[0], why=f"it {_why_not(rows[0], call)}")
    rows = tuple(row for row in rows if _fits(row, call))
    if not rows:
        known = ", ".join(dict.fromkeys(row.label for row in choices.rows))
        raise ArgumentError(f"the op has no row {label!r} for axis {axis!r}", fix=f"its rows are {known}")
    return rows


def _search(pricing: Pricing, candidates: list[Rows]) -> Rows:
    if math.prod(len(rows) for rows in candidates) > SEARCHED:
        candidates = _axis_by_axis(pricing, candidates)
    found = pricing.cheapest(candidates)
    if found is None:
        raise ArgumentError(
            f"no row of {pricing.call.op} holds for these operands",
            fix="the rows that were chosen need shards that divide the dim: choose others or leave the choice open",
        )
    return found


def _axis_by_axis(pricing: Pricing, candidates: list[Rows]) -> list[Rows]:
    """Keep the best row of each axis while the others stay replicated: for meshes with many axes."""
    call, none = pricing.call, pricing.choices.rows[-1]
    kept: list[Rows] = []
    for axis, rows in enumerate(candidates):
        prices = []
        for row in rows:
            combination = tuple(row if other == axis else none for other in range(len(candidates)))
            if is_possible(call, combination):
                prices.append((pricing.held_against(combination), row))
        best = min(prices, key=lambda pair: pair[0])[1]
        kept.append((best,))
    if is_possible(call, tuple(rows[0] for rows in kept)):
        return kept
    return [(none,)] * len(candidates)


def _settle_all(raw: Sequence[Placement], wanted: Request) -> tuple[Placement, ...]:
    return tuple(settle(here, asked) for here, asked in zip(raw, wanted, strict=True))


def _assemble(pricing: Pricing, rows: Rows) -> Plan:
    mesh, results = pricing.mesh, zip(pricing.choices.shapes, pricing.dtypes, strict=True)
    raw = tuple(
        Topology(mesh, tuple(row.outs[i] for row in rows), shape, dtype) for i, (shape, dtype) in enumerate(results)
    )
    cost, wanted, machine = pricing.full(rows), pricing.wanted, pricing.given
    return _complete(Plan(pricing.call, rows, move(pricing.call, rows), raw, (), (), cost, machine, wanted))


def _complete(begun: Plan) -> Plan:
    """A plan with its results as they are handed over and all that it communicates."""
    call, machine = begun.call, begun.machine
    outs = tuple(each.with_placements(_settle_all(each.placements, begun.request)) for each in begun.raw)
    forward: list[Collective] = []
    for source, target in zip(call.operands, begun.ins, strict=True):
        forward += route(source, target.placements, machine)[0]
    for axis, row in enumerate(begun.rows):
        forward += statistics(begun.ins, axis, row.inner)
    for source, target in zip(begun.raw, outs, strict=True):
        forward += route(source, target.placements, machine)[0]
    return replace(begun, outs=outs, forward=tuple(forward))


@dataclass(frozen=True, slots=True)
class Considered:
    """One row on one axis as `explain` shows it: its price with the other axes as chosen, and why it was not taken."""

    axis: str
    row: Row
    cost: float | None
    chosen: bool
    reason: str


def consider(decided: Plan) -> tuple[Considered, ...]:
    """Every row of every axis, with its price and the reason why it was or was not taken."""
    call = decided.call
    choices = find(call.op).rule(call)
    pricing = Pricing(call, choices, decided.request, decided.machine)
    found = []
    for axis, name in enumerate(decided.mesh.axes):
        now = [topology.placements[axis] for topology in call.operands]
        for row in dict.fromkeys(choices.rows):
            found.append(_consider(decided, pricing, axis, name, row, now))
    return tuple(found)


def _consider(decided: Plan, pricing: Pricing, axis: int, name: str, row: Row, now: Sequence[Placement]) -> Considered:
    call, rows = decided.call, decided.rows
    combination = rows[:axis] + (row,) + rows[axis + 1 :]
    if not _fits(row, call):
        return Considered(name, row, None, False, _why_not(row, call))
    if not is_possible(call, combination):
        return Considered(name, row, None, False, "needs shards that divide the dim")
    cost = pricing.full(combination)
    if row == rows[axis]:
        why = "operands already line up" if lines_up(row, call, axis) else "cheapest"
        return Considered(name, row, cost, True, why)
    if _is_reduced_first(row, now, decided.request[axis]):
        return Considered(name, row, cost, False, "partial operands are reduced first; ask with output=")
    if not _is_called_for(row, now) and decided.request[axis] in (None, Replicate()):
        return Considered(name, row, cost, False, "no operand is placed so; ask with output=")
    taken, this = (pricing.held_against(each) for each in (rows, combination))
    if this < taken * (1 - ROUNDING):
        heavy = cost > decided.cost * FORGIVEN
        why = "what it communicates costs too much" if heavy else "cheaper, but another row was chosen"
        return Considered(name, row, cost, False, why)
    if this > taken and cost < decided.cost:
        return Considered(name, row, cost, False, "would move operands that line up")
    return Considered(name, row, cost, False, "more expensive" if this > taken else "same price, stands later")


def retype(decided: Plan, dtypes: Sequence[str]) -> Plan:
    """The same plan with other dtypes of its results: autocast gives them, or a default dtype that is not f32."""
    return _complete(
        replace(decided, raw=tuple(each.with_dtype(dtype) for each, dtype in zip(decided.raw, dtypes, strict=True)))
    )
