"""Grids: a collective along one axis after the other, on lines (a mesh) or rings (a torus) of each axis.

Split, the value is cut into one part per axis and each part starts with another axis, so that all links are busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshloom.collectives.algorithms.building import Build, Pieces, Steps, backwards, schedule, sends_along, together
from meshloom.collectives.algorithms.trees import Group, Growth
from meshloom.collectives.schedule import Schedule
from meshloom.errors import FabricError
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate


def box(group: Group) -> tuple[int, ...]:
    """The axes along which a group is a full box of at least two axes, or an error."""
    sides = [sorted({each[axis] for each in group}) for axis in range(len(group[0]))]
    wide = tuple(axis for axis, side in enumerate(sides) if len(side) > 1)
    if len(wide) < 2 or set(itertools.product(*sides)) != set(group):
        raise FabricError(
            f"the group of {len(group)} is not all coordinates of a grid with at least two axes",
            fix="give every coordinate of a box, or an algorithm for one axis",
        )
    return wide


def _axis_by_axis(group: Group, fabric: Fabric, growth: Growth, axes: Sequence[int], pieces: Pieces) -> list[Steps]:
    """All-gather in phases: along one axis, then along the next what has been gathered so far, ..."""
    held, phases = dict(pieces), []
    for axis in axes:
        lines: dict[Coordinate, list[Coordinate]] = {}
        for each in sorted(group):
            lines.setdefault((*each[:axis], *each[axis + 1 :]), []).append(each)
        phases.append(
            together(
                *(sends_along(growth(tuple(row), fabric), {each: held[each] for each in row}) for row in lines.values())
            )
        )
        held = {each: tuple(sorted(c for e in row for c in held[e])) for row in lines.values() for each in row}
    return phases


def _grid_gather(growth: Growth, split: bool, group: Group, fabric: Fabric, inwards: bool = False) -> Steps:
    """Last axis first, or `inwards` the first; split, one part of every piece per axis, each starting with another."""
    axes = box(group) if inwards else box(group)[::-1]
    parts = len(axes) if split else 1
    phases = [
        _axis_by_axis(
            group,
            fabric,
            growth,
            axes[part:] + axes[:part],
            {each: (i * parts + part,) for i, each in enumerate(group)},
        )
        for part in range(parts)
    ]
    return tuple(itertools.chain.from_iterable(together(*phase) for phase in zip(*phases, strict=True)))


def _grid_owners(group: Group, split: bool) -> list[int]:
    parts = len(box(group)) if split else 1
    return [i for i in range(len(group)) for _ in range(parts)]


def grid_gather(growth: Growth, split: bool = False, inwards: bool = False) -> Build:
    """All-gather along one axis after the other."""
    return lambda group, fabric, root: schedule(
        "all_gather",
        group,
        _grid_gather(growth, split, group, fabric, inwards),
        root,
        owners=_grid_owners(group, split),
    )


def grid_scatter(growth: Growth, split: bool = False, inwards: bool = False) -> Build:
    """Reduce-scatter along one axis after the other: the all-gather backwards."""
    return lambda group, fabric, root: schedule(
        "reduce_scatter",
        group,
        backwards(_grid_gather(growth, split, group, fabric, inwards), reduce=True),
        root,
        owners=_grid_owners(group, split),
    )


def grid_reduce(growth: Growth, split: bool = False, inwards: bool = False) -> Build:
    """All-reduce: reduce-scatter along each axis, then all-gather along each, the other way round."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        steps = _grid_gather(growth, split, group, fabric, inwards)
        chunks = len(_grid_owners(group, split))
        return schedule("all_reduce", group, backwards(steps, reduce=True) + steps, root, chunks=chunks)

    return build
