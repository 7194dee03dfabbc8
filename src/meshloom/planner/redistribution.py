"""Redistribution: the cheapest way from one topology to another, as a shortest path whose edges are collectives.

`S->R` all-gather, `P->R` all-reduce, `P->S` reduce-scatter, `S(i)->S(j)` all-to-all; `R->S` and `R->P` move nothing.
Axes that shard the same dim nest, left first, so only the innermost of them may change: (S(0), S(0)) becomes
(R, S(0)) by gathering the right axis, then the left one, then slicing; or, where that moves fewer bytes, by an
all-to-all out of the way, a gather, and an all-to-all back.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from meshloom.collectives import KINDS, Collective
from meshloom.errors import PlacementError
from meshloom.fabric import Machine
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, bytes_received, spell
from meshloom.planner.paths import Paths, Station

_Placements = tuple[Placement, ...]


@lru_cache(maxsize=4096)
def paths_from(source: Topology, machine: Machine) -> Paths:
    """The paths from a topology; what one search has found, the next one uses."""
    return Paths(source, machine)


@lru_cache(maxsize=65536)
def route(source: Topology, target: _Placements, machine: Machine) -> tuple[tuple[Collective, ...], float]:
    """The collectives that bring a tensor to other placements, in order, and their price in seconds.

    >>> from meshloom import Mesh
    >>> from meshloom.fabric import VIRTUAL
    >>> t = Topology(Mesh(tp=4), (Shard(0),), (8, 4), "f32")
    >>> [str(step) for step in route(t, (Replicate(),), VIRTUAL)[0]]
    ['all_gather over tp of 4: 96 B']
    """
    if target == source.placements:
        return (), 0.0
    paths = paths_from(source, machine)
    stations, cost = paths.find(paths.encode(target))
    if cost == math.inf:
        raise PlacementError(f"there is no way from {spell(source.placements)} to {spell(target)}", tensor=source)
    return _collectives(paths, stations), cost


def _collectives(paths: Paths, stations: list[Station]) -> tuple[Collective, ...]:
    """The edges of a path that move something."""
    found = []
    before = paths.source
    for here, there in itertools.pairwise(stations):
        after = before.with_placements(paths.decode(there))
        axis = next(i for i, (now, then) in enumerate(zip(here, there, strict=True)) if now != then)
        found.append(collective(before, after, axis))
        before = after
    return tuple(each for each in found if each is not None)


@lru_cache(maxsize=65536)
def stations(source: Topology, target: _Placements, machine: Machine) -> tuple[_Placements, ...]:
    """The placements on the way of `route`, the source's first and the target's last; each differs by one axis."""
    paths = paths_from(source, machine)
    found = [paths.decode(each) for each in paths.find(paths.encode(target))[0]]
    for axis, wanted in enumerate(target):  # what becomes partial does so at the end
        if found[-1][axis] != wanted:
            found.append(found[-1][:axis] + (wanted,) + found[-1][axis + 1 :])
    return tuple(found)


def moves(source: Topology, target: Topology, machine: Machine) -> tuple[Collective, ...]:
    """The collectives between two topologies of one tensor; between two meshes a copy is among them.

    >>> from meshloom import Mesh
    >>> from meshloom.fabric import VIRTUAL
    >>> mesh = Mesh(pp=2, tp=2)
    >>> one = Topology(mesh.submesh(pp=0), (Partial("sum"),), (8, 4), "f32")
    >>> two = Topology(mesh.submesh(pp=1), (Replicate(),), (8, 4), "f32")
    >>> print(*moves(one, two, VIRTUAL), sep="; ")
    reduce_scatter(sum) over tp of 2: 64 B; copy Mesh(tp=2) -> Mesh(tp=2, ids=[2, 3]): 128 B
    """
    if source.mesh == target.mesh:
        return route(source, target.placements, machine)[0]
    there = settle(source, machine)
    first, last = route(source, there.placements, machine)[0], route(target.reduced, target.placements, machine)[0]
    return (*first, *_copies(there, target.reduced), *last)


@lru_cache(maxsize=4096)
def settle(source: Topology, machine: Machine) -> Topology:
    """Where a tensor lies when it leaves its mesh: partial axes are reduced, into shards where that is cheaper.

    What the other mesh receives is the same for all of them.
    """
    if not source.partial_axes:
        return source
    options: list[list[Placement]] = [
        [Replicate(), *map(Shard, range(source.ndim))] if isinstance(each, Partial) else [each]
        for each in source.placements
    ]
    return min(
        (source.with_placements(each) for each in itertools.product(*options)),
        key=lambda there: route(source, there.placements, machine)[1],
    )


def _copies(source: Topology, target: Topology) -> tuple[Collective, ...]:
    """The copy between two meshes; none where every device has its part already."""
    size = bytes_received(source, target)
    way = f"{source.mesh} -> {target.mesh}"
    return (Collective("copy", way, target.mesh.size, size, source.dtype, target.local_shape),) if size else ()


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
