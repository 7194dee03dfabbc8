"""A mesh on a machine: which links join the devices along each of its axes.

A mesh with as many axes as the machine lies on it axis by axis. It may be a part of the machine (a part of a ring is a
line), or larger, as a machine of that size with the same links. A mesh of as many devices in another shape lies on it
by its device ids, row-major: an axis of it is an axis of the machine, a part of one, every k-th device of one, or a way
through several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshloom.fabric.axis import AxisLinks

_JOINED = ("full", "switch")


def bind(axes: tuple[AxisLinks, ...], names: Sequence[str], shape: Sequence[int]) -> tuple[AxisLinks, ...]:
    """An axis of the machine for each axis of a mesh.

    >>> torus = tuple(AxisLinks("ring", size, 1e-6, 1e9) for size in (8, 4))
    >>> [(each.kind, each.size, each.latency) for each in bind(torus, ("a", "b", "c"), (2, 4, 4))]
    [('ring', 2, 4e-06), ('line', 4, 1e-06), ('ring', 4, 1e-06)]
    """
    sizes = [each.size for each in axes]
    if len(axes) == len(shape) and (tuple(sizes) == tuple(shape) or math.prod(sizes) != math.prod(shape)):
        found = [_resize(axis, size) for axis, size in zip(axes, shape, strict=True)]
    else:
        found = [_find(axes, math.prod(shape[i + 1 :]), size) for i, size in enumerate(shape)]
    return tuple(replace(each, name=name) for each, name in zip(found, names, strict=True))


def _resize(axis: AxisLinks, size: int) -> AxisLinks:
    kind = "line" if axis.kind == "ring" and size < axis.size else axis.kind
    return replace(axis, kind=kind, size=size)


def _find(axes: Sequence[AxisLinks], stride: int, size: int) -> AxisLinks:
    """What joins `size` devices whose ids are `stride` apart."""
    inner = 1
    for place in range(len(axes) - 1, -1, -1):
        axis = axes[place]
        if stride < inner * axis.size:
            step = max(1, stride // inner)
            if step * size <= axis.size:
                return _every(axis, step, size)
            return _through(axes[: place + 1], size)
        inner *= axis.size
    return _resize(axes[0], size)


def _every(axis: AxisLinks, step: int, size: int) -> AxisLinks:
    """Every step-th device of an axis: messages go over `step` links, which as many groups share."""
    if axis.kind in _JOINED:
        return _resize(axis, size)
    kind = "ring" if axis.kind == "ring" and step * size == axis.size else "line"
    packet = axis.packet and (axis.packet[0], axis.packet[1] * step)
    slow = axis.combined and axis.combined / step
    return replace(
        axis,
        kind=kind,
        size=size,
        latency=axis.latency * step,
        bandwidth=axis.bandwidth / step,
        combined=slow,
        packet=packet,
    )


def _through(axes: Sequence[AxisLinks], size: int) -> AxisLinks:
    """A way through the box that the last of some axes span."""
    count = 1
    while count < len(axes) and math.prod(each.size for each in axes[-count:]) < size:
        count += 1
    return join(axes[-count:], size)


def join(crossed: Sequence[AxisLinks], size: int) -> AxisLinks:
    """One axis of `size` devices out of several: a ring or a line through all, at the pace of the slowest of them.

    >>> mesh = [AxisLinks("line", 2, 1e-6, 1e9), AxisLinks("line", 4, 2e-6, 1e9)]
    >>> both = join(mesh, 8)
    >>> both.kind, both.latency, [each.size for each in both.box]
    ('ring', 2e-06, [2, 4])
    """
    slow = min(crossed, key=lambda each: each.bandwidth)
    latency = max(each.latency for each in crossed)
    # A box with an even side closes into a ring; so does a torus. Both ways round share a port of a switch.
    closed = size % 2 == 0 or all(each.kind != "line" for each in crossed)
    both = 2 if slow.kind == "switch" else 1
    is_whole = math.prod(each.size for each in crossed) == size
    return replace(
        slow,
        kind="ring" if closed else "line",
        size=size,
        latency=latency,
        bandwidth=slow.bandwidth / both,
        combined=slow.combined and slow.combined / both,
        box=tuple(each for each in crossed if each.size > 1) if is_whole else (),
    )
