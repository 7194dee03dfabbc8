"""Redistribution: the cheapest way from one topology to another, as a shortest path whose edges are collectives.

`S->R` all-gather, `P->R` all-reduce, `P->S` reduce-scatter, `S(i)->S(j)` all-to-all; `R->S` and `R->P` move nothing.
Axes that shard the same dim nest, left first, so only the innermost of them may change: (S(0), S(0)) becomes
(R, S(0)) by gathering the right axis, then the left one, then slicing; or, where that moves fewer bytes, by an
all-to-all out of the way, a gather, and an all-to-all back.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from meshloom.collectives import KINDS, Collective, price
from meshloom.errors import PlacementError
from meshloom.fabric import Machine
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, spell

_Placements = tuple[Placement, ...]
_Tree = tuple[dict[_Placements, tuple[float, int]], dict[_Placements, tuple[_Placements, Collective | None]]]
WHOLE = 64  # placements of a tensor up to which all of them are searched; beyond, those between source and target


@lru_cache(maxsize=65536)
def route(source: Topology, target: _Placements, machine: Machine) -> tuple[tuple[Collective, ...], float]:
    """The collectives that bring a tensor to other placements, in order, and their price in seconds.

    >>> from meshloom import Mesh
    >>> from meshloom.fabric import VIRTUAL
    >>> t = Topology(Mesh(tp=4), (Shard(0),), (8, 4), "f32")
    >>> [str(step) for step in route(t, (Replicate(),), VIRTUAL)[0]]
    ['all_gather over tp of 4: 96 B']
    """
    stop = _stop(source, target)
    if stop == source.placements:
        return (), 0.0
    best, came = _search(source, _options(source, stop), machine)
    if stop not in best:
        raise PlacementError(f"there is no way from {spell(source.placements)} to {spell(target)}", tensor=source)
    return tuple(_walk(came, stop)), best[stop][0]


@lru_cache(maxsize=65536)
def stations(source: Topology, target: _Placements, machine: Machine) -> tuple[_Placements, ...]:
    """The placements on the way of `route`, the source's first and the target's last; each differs by one axis."""
    stop = _stop(source, target)
    came = _search(source, _options(source, stop), machine)[1] if stop != source.placements else {}
    found, here = [stop], stop
    while here in came:
        here = came[here][0]
        found.append(here)
    found.reverse()
    for axis, wanted in enumerate(target):  # what becomes partial does so at the end
        if found[-1][axis] != wanted:
            found.append(found[-1][:axis] + (wanted,) + found[-1][axis + 1 :])
    return tuple(found)


def _stop(source: Topology, target: _Placements) -> _Placements:
    """Where the path has to lead: what becomes partial does so at the end and for nothing, so R is its station."""
    return tuple(
        Replicate() if isinstance(wanted, Partial) and wanted != now else wanted
        for now, wanted in zip(source.placements, target, strict=True)
    )


def _options(source: Topology, stop: _Placements) -> tuple[tuple[Placement, ...], ...]:
    """What each axis may be on the way: anything on small meshes, since a detour over another sharding may be cheaper.

    A replicated axis only becomes what the target wants: nothing is sharded for its own sake.
    """
    anything: tuple[Placement, ...] = (Replicate(), *(Shard(dim) for dim in range(source.ndim)))
    small = len(anything) ** source.mesh.ndim <= WHOLE
    return tuple(
        anything if small and not isinstance(now, Replicate) else tuple(dict.fromkeys((wanted, Replicate())))
        for now, wanted in zip(source.placements, stop, strict=True)
    )


@lru_cache(maxsize=4096)
def _search(source: Topology, options: tuple[tuple[Placement, ...], ...], machine: Machine) -> _Tree:
    """The shortest paths over the placements that each axis may take; of equal ones that with the fewest steps."""
    best: dict[_Placements, tuple[float, int]] = {source.placements: (0.0, 0)}
    came: dict[_Placements, tuple[_Placements, Collective | None]] = {}
    order = itertools.count(1)
    queue: list[tuple[float, int, int, _Placements]] = [(0.0, 0, 0, source.placements)]
    while queue:
        cost, steps, _, here = heapq.heappop(queue)
        if (cost, steps) != best[here]:
            continue
        before = source.with_placements(here)
        for axis, placement in _changes(here, options):
            there = here[:axis] + (placement,) + here[axis + 1 :]
            edge = collective(before, source.with_placements(there), axis)
            reached = (cost + (price(edge, machine) if edge else 0.0), steps + 1)
            if there not in best or _is_better(reached, best[there]):
                best[there] = reached
                came[there] = (here, edge)
                heapq.heappush(queue, (*reached, next(order), there))
    return best, came


def _is_better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    if math.isclose(one[0], other[0]):
        return one[1] < other[1]
    return one < other


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


def _changes(here: _Placements, options: Sequence[tuple[Placement, ...]]) -> Iterator[tuple[int, Placement]]:
    """The changes of a single axis that are one collective, or none."""
    for axis, (now, open_to) in enumerate(zip(here, options, strict=True)):
        for placement in open_to:
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
