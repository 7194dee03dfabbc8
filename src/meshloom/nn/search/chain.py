"""The choices of all parts at once, from the price of each choice alone: dynamic programming along the chain of parts.

A part takes and gives activations that lie the same way whatever the other parts choose, so what a choice adds in time
and memory is priced once, by changing that part only. Walking along the parts, of all choices so far only those are
kept that no other beats in both time and memory; the frontier at the end has the fastest plan for every memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Choices(NamedTuple):
    """How parts lie, and what that adds to time and memory."""

    time: float
    memory: float
    ways: tuple[tuple[str, str, str], ...] = ()  # a part, an axis, and how the part lies on it


def frontier(changes: Mapping[tuple[str, str], Mapping[str, tuple[float, float]]]) -> list[Choices]:
    """For each part on each axis, and each way, the seconds and bytes that it adds: all that is worth choosing.

    >>> for each in frontier({("attention", "tp"): {"whole": (-1.0, 5.0)}, ("feed", "tp"): {"whole": (2.0, 9.0)}}):
    ...     print(each.time, each.memory, each.ways)
    -1.0 5.0 (('attention', 'tp', 'whole'),)
    0.0 0.0 ()
    """
    kept = [Choices(0.0, 0.0)]
    for (part, axis), ways in changes.items():
        longer = [
            Choices(each.time + time, each.memory + memory, (*each.ways, (part, axis, way)))
            for each in kept
            for way, (time, memory) in ways.items()
        ]
        kept = _undominated([*kept, *longer])
    return kept


def _undominated(given: Iterable[Choices]) -> list[Choices]:
    found: list[Choices] = []
    for each in sorted(given):
        if not found or each.memory < found[-1].memory:
            found.append(each)
    return found
