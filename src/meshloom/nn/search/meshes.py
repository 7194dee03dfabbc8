"""Meshes to look at: all ways to cut a number of devices into axes for rows, weights, sequences and columns.

The last axis of a mesh lies on links that are nearest to each other, so the axis that talks most, `tp`, is the last,
and does not leave the innermost level of a machine that has levels. On a machine that is a torus the reverse order is
looked at too: `tp` then lies on its first axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshloom.fabric import Machine
from meshloom.mesh import Mesh

MOST = 32  # devices that a tensor axis or a context axis has at most


def divisors(number: int) -> list[int]:
    """The numbers that divide a number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def tensor_sizes(machine: Machine, devices: int) -> list[int]:
    """The sizes that a tensor axis may have: those that divide, inside of the innermost level."""
    level = machine.axes[-1].level if machine.axes else ""
    inner = math.prod(each.size for each in machine.axes if each.level == level) if level else MOST
    return [each for each in divisors(devices) if each <= min(inner, MOST)]


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of the axes that have more than one device; of one device, if there is none.

    >>> make_mesh(dp=4, fsdp=1, tp=2), make_mesh(dp=1)
    (Mesh(dp=4, tp=2), Mesh(dp=1))
    """
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Mesh.of(tuple(kept.values()), tuple(kept))


def orders(machine: Machine, mesh: Mesh) -> Iterator[Mesh]:
    """A mesh, and the mesh with its axes reversed where its links differ."""
    yield mesh
    turned = Mesh.of(mesh.shape[::-1], mesh.axes[::-1])
    is_level = any(axis.level for axis in machine.axes)
    if mesh.ndim > 1 and len(machine.axes) > 1 and not is_level and _links(machine, mesh) != _links(machine, turned):
        yield turned


def _links(machine: Machine, mesh: Mesh) -> dict[str, object]:
    return {axis.name: axis for axis in machine.on(mesh).axes}
