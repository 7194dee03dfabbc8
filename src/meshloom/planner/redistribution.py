"""Redistribution: the cheapest way from one topology to another, as a shortest path whose edges are collectives.

`S->R` all-gather, `P->R` all-reduce, `P->S` reduce-scatter, `S(i)->S(j)` all-to-all; `R->S` and `R->P` move nothing.
Axes that shard the same dim nest, left first, so only the innermost of them may change: (S(0), S(0)) becomes
(R, S(0)) by gathering the right axis, then the left one, then slicing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache

from meshloom.collectives import KINDS, Collective, price
from meshloom.errors import PlacementError
from meshloom.fabric import Machine
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, reduce_together, spell

_Placements = tuple[Placement, ...]


@lru_cache(maxsize=65536)
def route(source: Topology, target: _Placements, machine: Machine) -> tuple[tuple[Collective, ...], float]:
    """The collectives that bring a tensor to other placements, in order, and their price in seconds.

    >>> from meshloom import Mesh
    >>> from meshloom.fabric import VIRTUAL
    >>> t = Topology(Mesh(tp=4), (Shard(0),), (8, 4), "f32")
    >>> [str(step) for step in route(t, (Replicate(),), VIRTUAL)[0]]
    ['all_gather over tp of 4: 96 B']
    """
    start = source.placements
    best: dict[_Placements, tuple[float, int]] = {start: (0.0, 0)}
    came: dict[_Placements, tuple[_Placements, Collective | None]] = {}
    queue: list[tuple[float, int, int, _Placements]] = [(0.0, 0, 0, start)]
    pushed = 0
    while queue:
        cost, steps, _, here = heapq.heappop(queue)
        if here == target:
            return tuple(_walk(came, here)), cost
        if (cost, steps) > best[here]:
            continue
        for axis, placement in _changes(here, target):
            there = here[:axis] + (placement,) + here[axis + 1 :]
            if not reduce_together(there):
                continue
            edge = collective(source.with_placements(here), source.with_placements(there), axis)
            reached = (cost + (price(edge, machine) if edge else 0.0), steps + 1)
            if there not in best or reached < best[there]:
                best[there] = reached
                came[there] = (here, edge)
                pushed += 1
                heapq.heappush(queue, (*reached, pushed, there))
    raise PlacementError(f"there is no way from {spell(start)} to {spell(target)}", tensor=source)


def moves(source: Topology, target: Topology, machine: Machine) -> tuple[Collective, ...]:
    """The collectives between two topologies of one tensor."""
    return route(source, target.placements, machine)[0]


def _walk(came: dict[_Placements, tuple[_Placements, Collective | None]], here: _Placements) -> list[Collective]:
    steps: list[Collective] = []
    while here in came:
        here, edge = came[here]
        if edge is not None:
            steps.append(edge)
    return steps[::-1]


def _changes(here: _Placements, target: _Placements) -> Iterator[tuple[int, Placement]]:
    """The single-axis changes that may lead to the target: to what it wants, or to R on the way."""
    for axis, (now, wanted) in enumerate(zip(here, target, strict=True)):
        for placement in dict.fromkeys((wanted, Replicate())):
            if placement != now and _is_edge(now, placement) and _may_change(here, axis, placement):
                yield axis, placement


def _is_edge(now: Placement, placement: Placement) -> bool:
    return isinstance(now, Replicate) or not isinstance(placement, Partial)


def _may_change(here: _Placements, axis: int, placement: Placement) -> bool:
    later = {each.dim for each in here[axis + 1 :] if isinstance(each, Shard)}
    touched = {each.dim for each in (here[axis], placement) if isinstance(each, Shard)}
    return not later & touched


def collective(before: Topology, after: Topology, axis: int) -> Collective | None:
    """The collective of one edge; None where nothing moves."""
    devices = before.mesh.shape[axis]
    now, wanted = before.placements[axis], after.placements[axis]
    if devices == 1 or isinstance(now, Replicate):
        return None
    if isinstance(now, Partial):
        kind = "reduce_scatter" if isinstance(wanted, Shard) else "all_reduce"
        op: str | None = now.op
    else:
        kind, op = ("all_to_all" if isinstance(wanted, Shard) else "all_gather"), None
    size = KINDS[kind].size(before.local_bytes, after.local_bytes, devices)
    return Collective(kind, before.mesh.axes[axis], devices, size, before.dtype, before.local_shape, op)
