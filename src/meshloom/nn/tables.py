"""Frozen dictionaries: what plans are made of. They print as dictionaries, hash, and keep the order of their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from meshloom.errors import ArgumentError, NotationError, PlacementError
from meshloom.nn.patterns import check_pattern
from meshloom.placement import Partial, Placement, Replicate, Shard, read_placements

_V = TypeVar("_V")


class Table(Mapping[str, _V], Generic[_V]):
    """A dictionary that does not change. Two of them are equal if they have the same lines in the same order.

    >>> Table({"a": 1}), hash(Table({"a": 1})) == hash(Table({"a": 1}))
    ({'a': 1}, True)
    """

    __slots__ = ("_lines",)

    def __init__(self, lines: Mapping[str, _V]) -> None:
        self._lines = dict(lines)

    def __getitem__(self, key: str) -> _V:
        return self._lines[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return list(self._lines.items()) == list(other._lines.items())
        return self._lines == other

    def __hash__(self) -> int:
        return hash(tuple(self._lines.items()))

    def __repr__(self) -> str:
        return repr(self._lines)


Axes = Table[Placement]  # a placement for each axis that shards; the others are replicated
AxesLike = Mapping[str, Placement | str] | str | Replicate | None


def read_axes(given: AxesLike, keep: bool = False) -> Axes:
    """Placements by the name of a mesh axis, from a dict or from text; `R` and axes that are not named are the same.

    With `keep` they are not: of an activation, an axis that is not named stays as it is.

    >>> read_axes("dp=S(0), tp=S(1)")
    {'dp': Shard(dim=0), 'tp': Shard(dim=1)}
    >>> read_axes({"tp": "S(1)", "dp": Replicate()}), read_axes("R")
    ({'tp': Shard(dim=1)}, {})
    """
    if given is None or isinstance(given, Replicate):
        return Table({})
    if isinstance(given, str):
        given = _split(given)
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{given!r} does not name mesh axes", fix="write {'tp': Shard(0)} or 'tp=S(0)'")
    found = {_axis(axis): _placement(axis, each) for axis, each in given.items()}
    return Table({axis: found[axis] for axis in sorted(found) if keep or isinstance(found[axis], Shard)})


def spell_axes(axes: Axes) -> str:
    """The short notation: `dp=S(0), tp=S(1)`, or `R` where no axis shards.

    >>> spell_axes(read_axes({"tp": Shard(1)}))
    'tp=S(1)'
    """
    return ", ".join(f"{axis}={each}" for axis, each in axes.items()) or "R"


def read_table(given: Mapping[str, AxesLike] | None, keep: bool = False) -> Table[Axes]:
    """Lines from patterns to placements, as they are given.

    >>> read_table({"**.bias": "tp=S(0)"})
    {'**.bias': {'tp': Shard(dim=0)}}
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{given!r} is no table", fix="write {'**.q_proj.weight': {'tp': Shard(0)}}")
    return Table({check_pattern(pattern): read_axes(axes, keep) for pattern, axes in given.items()})


def _split(text: str) -> Mapping[str, Placement | str]:
    if text.strip() in ("R", ""):
        return {}
    found: dict[str, Placement | str] = {}
    for part in text.split(","):
        axis, equals, each = (piece.strip() for piece in part.partition("="))
        if not equals or axis in found:
            raise NotationError(
                f"{text!r} does not say once for each axis where it goes",
                fix="name the axes: 'dp=S(0), tp=S(1)', or R",
            )
        found[axis] = each
    return found


def _axis(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise PlacementError(f"{name!r} is no name of a mesh axis", fix="use names as in Mesh(dp=2, tp=4)")
    return name


def _placement(axis: str, given: object) -> Placement:
    read = read_placements(given) if isinstance(given, str) else (given,)
    (each,) = read if len(read) == 1 else (given,)
    if isinstance(each, Partial):
        raise PlacementError(
            f"a plan cannot place anything as {each} on axis {axis!r}", fix="use Shard(dim) or Replicate()"
        )
    if not isinstance(each, (Shard, Replicate)):
        raise PlacementError(f"{given!r} is not a placement", fix="use Shard(dim) or Replicate()")
    return each
