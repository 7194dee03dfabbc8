"""What one device holds of an array that a kernel works on, from arrays whose placements are known.

A stored array has the mesh axes merged into its dims. The arrays inside of a call (gradients, statistics, transposed
and flattened operands) have no placements of their own; their dims are those of the call's operands and results, in
another order, merged, or of size 1. So an array of as many elements as one that is known is spread in the same way,
and any other one dim by dim, a dim being recognised by its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshloom.placement import Topology
from meshloom.types import Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """An array as it is stored, and what the fullest device holds of each of its dims."""

    stored: Shape
    local: Shape

    @property
    def share(self) -> float:
        """The part of all elements that one device holds.

        >>> Layout((16, 8), (4, 8)).share
        0.25
        """
        return math.prod(self.local) / (math.prod(self.stored) or 1)


def layout_of(topology: Topology) -> Layout:
    """The layout of a tensor's stored array: partial axes lead, and each device holds one entry of them.

    >>> from meshloom import parse
    >>> layout_of(parse("f32[16, 8](S(0), P(sum)) on Mesh(dp=2, tp=4)"))
    Layout(stored=(4, 16, 8), local=(1, 8, 8))
    """
    return Layout(topology.stored_shape, (1,) * len(topology.partial_axes) + topology.local_shape)


def infer_share(shape: Shape, known: Sequence[Layout]) -> float | None:
    """The part of an array that one device holds, from the layouts of others; None where nothing is known.

    >>> x = Layout((32, 128, 64), (8, 128, 64))
    >>> infer_share((4096, 64), [x]), infer_share((32, 128, 1), [x]), infer_share((4096,), [x]), infer_share((), [x])
    (0.25, 0.25, 0.25, 1.0)
    """
    if not known:
        return None
    for layout in known:
        if layout.stored == shape:
            return layout.share
    elements = math.prod(shape)
    for layout in known:
        if math.prod(layout.stored) == elements:
            return layout.share
    return _infer_by_dims(shape, known)


def _infer_by_dims(shape: Shape, known: Sequence[Layout]) -> float:
    """Each dim as the first known one of its size, or several neighbours of that size together, used once each."""
    share, used = 1.0, set[tuple[int, int]]()
    for size in shape:
        if size == 1:
            continue
        for number, run, local in _runs(known, size):
            places = {(number, dim) for dim in run}
            if not places & used:
                used |= places
                share *= local / size
                break
    return share


def _runs(known: Iterable[Layout], size: int) -> Iterable[tuple[int, range, int]]:
    """The neighbouring dims that have a size together: of which layout, which dims, what one device holds of them."""
    for number, layout in enumerate(known):
        for first, last in itertools.combinations(range(len(layout.stored) + 1), 2):
            if math.prod(layout.stored[first:last]) == size:
                yield number, range(first, last), math.prod(layout.local[first:last])
