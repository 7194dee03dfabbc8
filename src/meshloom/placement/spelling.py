"""The ways to write placements (a dict by axis name, a tuple, text); all become one tuple, an entry per mesh axis."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshloom.errors import NotationError, PlacementError
from meshloom.mesh import Mesh
from meshloom.placement.placements import Partial, Placement, Replicate, Shard

Placements = Mapping[str, Placement] | Sequence[Placement] | Placement | str

_TOKEN = re.compile(r"\s*(?:(R)|S\((-?\d+)\)|P\((\w+)\))\s*(?:,|$)")


def spell(placements: Sequence[Placement]) -> str:
    """The short notation of several placements.

    >>> spell((Shard(0), Replicate()))
    '(S(0), R)'
    """
    return "(" + ", ".join(str(each) for each in placements) + ")"


def read_placements(text: str) -> tuple[Placement, ...]:
    """The placements that a text stands for.

    >>> read_placements("S(0), R")
    (Shard(dim=0), Replicate())
    """
    bare = text.strip()
    if bare.startswith("(") and bare.endswith(")"):
        bare = bare[1:-1]
    found: list[Placement] = []
    position = 0
    while position < len(bare):
        token = _TOKEN.match(bare, position)
        if token is None:
            raise NotationError(
                f"{bare[position:].strip()!r} is not a placement",
                text=repr(text),
                fix="write S(dim), R or P(sum), separated by commas, as in 'S(0), R'",
            )
        replicated, dim, op = token.groups()
        found.append(Replicate() if replicated else Shard(int(dim)) if dim is not None else Partial(op))
        position = token.end()
    return tuple(found)


def as_placements(given: Placements | None, mesh: Mesh, ndim: int | None = None) -> tuple[Placement, ...]:
    """One placement per mesh axis, with dims counted from the front if `ndim` is given.

    Axes that a dict does not name are replicated.

    >>> as_placements({"tp": Shard(-1)}, Mesh(dp=2, tp=4), ndim=2)
    (Replicate(), Shard(dim=1))
    """
    if given is None:
        return (Replicate(),) * mesh.ndim
    if isinstance(given, str):
        given = read_placements(given)
    if isinstance(given, (Shard, Replicate, Partial)):
        given = (given,)
    if isinstance(given, Mapping):
        by_axis = {mesh.axis(name): _placement(each) for name, each in given.items()}
        listed = tuple(by_axis.get(i, Replicate()) for i in range(mesh.ndim))
    elif isinstance(given, Sequence):
        listed = tuple(_placement(each) for each in given)
    else:
        listed = (_placement(given),)
    if len(listed) != mesh.ndim:
        raise PlacementError(
            f"{len(listed)} placements for {mesh.ndim} mesh axes",
            mesh=mesh,
            asked=spell(listed),
            fix=f"give one per axis, or name the axes: {{{mesh.axes[0]!r}: Shard(0)}}" if mesh.ndim else None,
        )
    return listed if ndim is None else tuple(_count_from_front(each, ndim, mesh, listed) for each in listed)


def _placement(each: object) -> Placement:
    if isinstance(each, str):
        found = read_placements(each)
        if len(found) == 1:
            return found[0]
    if isinstance(each, (Shard, Replicate, Partial)):
        return each
    raise PlacementError(f"{each!r} is not a placement", fix="use Shard(dim), Replicate() or Partial(op)")


def _count_from_front(placement: Placement, ndim: int, mesh: Mesh, asked: tuple[Placement, ...]) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        there = f"dims go from 0 to {ndim - 1}" if ndim > 1 else "its only dim is 0: use S(0)"
        dims = there if ndim else "a 0-d tensor can only be R or P"
        raise PlacementError(
            f"dim {placement.dim} is out of range for a tensor of {ndim} dims", mesh=mesh, asked=spell(asked), fix=dims
        )
    return placement if placement.dim >= 0 else Shard(placement.dim % ndim)
