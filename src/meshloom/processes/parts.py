"""What each device holds, told to all processes in a few numbers: shape, dtype, and a checksum where it matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from meshloom.comms import wire
from meshloom.comms.group import WORLD
from meshloom.engines.layout import short_name
from meshloom.errors import ShapeError
from meshloom.mesh import Coordinate, Mesh
from meshloom.processes.divergence import checksum
from meshloom.types import LONG_NAME, Shape, numel

_DTYPES = list(LONG_NAME)
_DIMS = 16


@dataclass(frozen=True)
class Part:
    """One device's part without its values; the checksum is 0 where nobody asked for it."""

    shape: Shape
    dtype: str
    checksum: int


def described(held: Mapping[Coordinate, torch.Tensor], mesh: Mesh, compare: bool) -> dict[Coordinate, Part]:
    """Every device's part, from those that this process holds and what the others say of theirs."""
    mine = {c: Part(tuple(p.shape), short_name(p.dtype), checksum(p) if compare else 0) for c, p in held.items()}
    if not mesh.is_split and not mesh.ranks:
        return mine
    assert WORLD.control is not None
    WORLD.watch.begin("from_local", mesh)
    nothing = [_numbers(Part((), _DTYPES[0], 0))] * numel(mesh.local_shape)  # of a process that holds none of it
    told = wire.all_gather(torch.tensor([_numbers(part) for part in mine.values()] or nothing), WORLD.control)
    found: dict[Coordinate, Part] = {}
    for rank, rows in enumerate(told.tolist()):
        if rank in mesh.holders:
            found.update(zip(mesh.local_coordinates(rank), (_part(row) for row in rows), strict=True))
    return found


def _numbers(part: Part) -> list[int]:
    if len(part.shape) > _DIMS:
        raise ShapeError(f"a part of {len(part.shape)} dims has more than {_DIMS}")
    shape = [*part.shape, *(-1 for _ in range(_DIMS - len(part.shape)))]
    return [_DTYPES.index(part.dtype), part.checksum, *shape]


def _part(row: list[int]) -> Part:
    return Part(tuple(size for size in row[2:] if size >= 0), _DTYPES[row[0]], row[1])
