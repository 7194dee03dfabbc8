"""Recursive halving and doubling: partners at distance 1, 2, 4, ... on links that join every two members."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from meshloom.collectives.algorithms.building import Steps, backwards, schedule, steps_of
from meshloom.collectives.algorithms.trees import Group, check_full
from meshloom.collectives.schedule import Schedule
from meshloom.errors import FabricError
from meshloom.fabric import Fabric


def _doubling(group: Group, fabric: Fabric) -> Steps:
    """All-gather: partners at distance 1, 2, 4, ... swap all that they have."""
    bits = _bits(group, fabric)
    steps = []
    for bit in range(bits):
        size = 1 << bit
        # At distance 2, member 5 (101) holds the aligned pair 4, 5.
        held = [tuple(range(i >> bit << bit, (i >> bit << bit) + size)) for i in range(len(group))]
        steps.append(steps_of((0, group[i], group[i ^ size], held[i]) for i in range(len(group)))[0])
    return tuple(steps)


def _bits(group: Group, fabric: Fabric) -> int:
    if len(group) & (len(group) - 1):
        below = 1 << (len(group).bit_length() - 1)
        raise FabricError(
            f"recursive halving needs a power of two of members, not {len(group)}",
            fix=f"take {below} or {2 * below} members, or another algorithm",
        )
    check_full(group, fabric)
    return len(group).bit_length() - 1


def doubling_gather(group: Group, fabric: Fabric, root: int) -> Schedule:
    """All-gather by recursive doubling."""
    return schedule("all_gather", group, _doubling(group, fabric), root, owners=range(len(group)))


def halving_scatter(group: Group, fabric: Fabric, root: int) -> Schedule:
    """Reduce-scatter by recursive halving: recursive doubling backwards."""
    steps = backwards(_doubling(group, fabric), reduce=True)
    return schedule("reduce_scatter", group, steps, root, owners=range(len(group)))


def halving_doubling(group: Group, fabric: Fabric, root: int) -> Schedule:
    """All-reduce by recursive halving, then doubling (Rabenseifner)."""
    doubling = _doubling(group, fabric)
    return schedule("all_reduce", group, backwards(doubling, reduce=True) + doubling, root, chunks=len(group))


def doubling_exchange(group: Group, fabric: Fabric, root: int) -> Schedule:
    """All-to-all over the hypercube: with the partner at distance 1, 2, 4, ... goes all that is for its side."""
    p, steps = len(group), []
    for bit in range(_bits(group, fabric)):
        low = (1 << bit) - 1
        # Before step `bit`, member m holds i -> j where j agrees with m in the bits below, and i in the others.
        steps.append(
            steps_of(
                (0, group[m], group[m ^ (1 << bit)], [i * p + j for i, j in _crossing(m, bit, low, p)])
                for m in range(p)
            )[0]
        )
    return schedule("all_to_all", group, tuple(steps), root, owners=[i % p for i in range(p * p)])


def _crossing(m: int, bit: int, low: int, p: int) -> Iterable[tuple[int, int]]:
    sources = [m & ~low | i for i in range(low + 1)]
    targets = [j for j in range(p) if j & low == m & low and (j ^ m) >> bit & 1]
    return itertools.product(sources, targets)
