"""The label of what moves elements: reshaping, joining, splitting heads, attention, convolution.

Where a cut dim goes is told by `places`: for every dim of an operand the dim of the result, or None if it is gone.
Parts whose cut dim is gone, and terms that went through something that is not linear, make no whole (`UNKNOWN`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshloom.ttnn.ops.labels import UNKNOWN, Frame, _remembered, clashing
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import (
    REPLICATE,
    Placement,
    PlacementPartial,
    PlacementReplicate,
    PlacementShard,
    TensorTopology as Label,
)

Places = Sequence[int | None]
Rule = Callable[[Sequence[Placement]], Placement | None]


def same(tensor: Tensor, shift: int = 0) -> tuple[int, ...]:
    """Places of dims that stay, or that all move by as much.

    >>> class Rank3: shape = (2, 3, 4)
    >>> same(Rank3, 1)
    (1, 2, 3)
    """
    return tuple(dim + shift for dim in range(len(tensor.shape)))


def mapped(tensor: Tensor, places: Places, shape: Sequence[int], linear: bool = True, scales: bool = False) -> Label:
    """Of an op on one tensor that puts dims elsewhere; terms stay terms where the op is linear.

    It `scales` if a dim that grows does so element by element, in order: padding at its end then stays at the end.
    """
    key = ("mapped", tuple(places), tuple(shape), linear, scales, tensor._grid, tensor.shape, id(tensor._topology))
    return _remembered(key, (tensor,), lambda: _mapped(tensor, places, shape, linear, scales))


def _mapped(tensor: Tensor, places: Places, shape: Sequence[int], linear: bool, scales: bool = False) -> Label:
    frame = Frame([tensor])
    return frame.label([_after(tensor, placement, places, shape, linear, scales) for placement in frame.axes[0]])


def _after(
    tensor: Tensor, placement: Placement, places: Places, shape: Sequence[int], linear: bool, scales: bool = False
) -> Placement:
    if isinstance(placement, PlacementPartial):
        return placement if linear else UNKNOWN
    if not isinstance(placement, PlacementShard):
        return placement
    dim = places[placement.dim] if places else None
    return UNKNOWN if dim is None else scaled_cut(placement, dim, tensor.shape[placement.dim], shape[dim], scales)


def scaled_cut(placement: PlacementShard, dim: int, had: int, has: int, scales: bool) -> Placement:
    """The cut of a dim whose parts were of one size and are of another: a padded end goes along with a reshape if it is
    whole rows of the result; otherwise padding has got between the elements, and no whole can be told.

    >>> scaled_cut(PlacementShard(0, size=6), 1, 4, 2, True), scaled_cut(PlacementShard(0, size=7), 1, 4, 2, True)
    (PlacementShard(1, size=3), PlacementPartial('unknown'))
    """
    if placement.size is None or had == has:
        return placement.at(dim)
    scaled, rest = divmod(placement.size * has, had)
    return PlacementShard(dim, scaled) if scales and not rest else UNKNOWN


def kept(tensor: Tensor, shape: Sequence[int] | None = None, linear: bool = True) -> Label:
    """Of an op on one tensor that leaves dims where they are."""
    return mapped(tensor, same(tensor), tensor.shape if shape is None else shape, linear)


def reshaped(tensor: Tensor, shape: Sequence[int], known: Mapping[int, int] | None = None) -> Label:
    """Of a reshape. The devices of an axis that cuts dim d come after all elements before d, so any dim of the result
    with as many elements before it can be the one that is cut:

    [4, 6, 5] cut at 6, as [4, 3, 10]: 4 elements are before dim 1 of both, so the whole is cut at the 3.
    [4, 6, 5] cut at 6, as [24, 5]: no dim has 4 elements before it.
    """
    sizes = tuple(shape)
    key = ("reshaped", sizes, tuple((known or {}).items()), tensor._grid, tensor.shape, id(tensor._topology))
    return _remembered(key, (tensor,), lambda: _reshaped(tensor, sizes, known or {}))


def _reshaped(tensor: Tensor, shape: tuple[int, ...], known: Mapping[int, int]) -> Label:
    had = tuple(tensor.shape)
    places = [known[dim] if dim in known else place_in(had, dim, shape) for dim in range(len(had))]
    return _mapped(tensor, places if _in_order(tensor, places) else [None] * len(had), shape, True, scales=True)


def place_in(had: tuple[int, ...], dim: int, shape: tuple[int, ...]) -> int | None:
    """The dim of a reshaped tensor that is cut when this one was.

    >>> place_in((4, 6, 5), 1, (4, 3, 10)), place_in((4, 6, 5), 1, (24, 5)), place_in((1, 8), 0, (1, 1, 1, 8))
    (1, None, 2)
    """
    before = math.prod(had[:dim])
    fitting = [place for place in range(len(shape)) if math.prod(shape[:place]) == before]
    from_end = dim - len(had) + len(shape)

    def preference(place: int) -> tuple[bool, bool, bool, bool]:
        like = shape[place] == had[dim]
        return (not (like and place == from_end), not (like and place == dim), not like, shape[place] == 1)

    return min(fitting, key=preference, default=None)


def _in_order(tensor: Tensor, places: Places) -> bool:
    """Whether dims that axes cut keep their order; two that fall together must be in the order of their axes."""
    cut = [placement.dim for placement in Frame([tensor]).axes[0] if isinstance(placement, PlacementShard)]
    for major, first in enumerate(cut):
        for second in cut[major + 1 :]:
            a, b = places[first], places[second]
            if first == second or a is None or b is None:
                continue
            if (first < second and a > b) or (first > second and a <= b):
                return False
    return True


def joined(tensors: Sequence[Tensor], places: Sequence[Places], shape: Sequence[int], linear: bool = True) -> Label:
    """Of an op on several tensors: what cuts one of them cuts the result, and only terms with terms give terms."""
    key = (
        "joined",
        tuple(map(tuple, places)),
        tuple(shape),
        linear,
        tensors[0]._grid,
        *(tensor.shape for tensor in tensors),
        *(id(tensor._topology) for tensor in tensors),
    )
    return _remembered(key, tensors, lambda: _joined(tensors, places, shape, linear))


def _joined(tensors: Sequence[Tensor], places: Sequence[Places], shape: Sequence[int], linear: bool) -> Label:
    frame = Frame(tensors)
    rows = [
        [_after(tensor, placement, where, shape, linear) for placement in row]
        for tensor, where, row in zip(tensors, places, frame.axes, strict=True)
    ]
    clash = clashing(rows)
    columns = enumerate(zip(*rows, strict=True))
    return frame.label([UNKNOWN if axis in clash else _together(column) for axis, column in columns])


def _together(column: Sequence[Placement]) -> Placement:
    if len(set(column)) == 1:
        return column[0]
    told = {placement for placement in column if not isinstance(placement, PlacementReplicate)}
    only = told.pop()
    return only if not told and isinstance(only, PlacementShard) else UNKNOWN


def ruled(name: Any, tensors: Sequence[Tensor], rule: Rule) -> Label:
    """By a rule of one axis: from what it does to every operand, what it does to the result; None is not known.

    The rule may look at shapes and at what `name` says, nothing else: its results are kept.
    """
    shapes, labels = (tuple(tensor.shape for tensor in tensors), tuple(id(tensor._topology) for tensor in tensors))
    key = ("ruled", name, tensors[0]._grid, shapes, labels)
    return _remembered(key, tensors, lambda: _ruled(tensors, rule))


def _ruled(tensors: Sequence[Tensor], rule: Rule) -> Label:
    def along(column: Sequence[Placement]) -> Placement:
        if all(isinstance(placement, PlacementReplicate) for placement in column):
            return REPLICATE
        return rule(column) or UNKNOWN

    frame = Frame(tensors)
    return frame.label([along(column) for column in zip(*frame.axes, strict=True)])
