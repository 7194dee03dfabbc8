"""The published costs, as formulas: steps and bytes in a row, from the members `p` and the bytes `v` of all chunks.

With latency a and bandwidth W of one link and direction, the time is `steps * a + bytes / W`. For a grid, `p` is the
length of each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Count = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Formula:
    """Steps, and the sum over the steps of the largest message."""

    steps: Callable[..., int]
    bytes: Callable[..., Fraction]


def around(p: int) -> int:
    """Once round a ring, or from end to end of a line."""
    return p - 1


def half(p: int) -> int:
    """To the far side of a ring, both ways."""
    return p // 2


def once(p: int) -> int:
    """Over a link to everyone."""
    return 1


def doublings(p: int) -> int:
    """log2(p), rounded up."""
    return (p - 1).bit_length()


def depth(p: int) -> int:
    """log2(p), rounded down: the depth of a binary tree of p."""
    return p.bit_length() - 1


def twice(steps: Count) -> Count:
    """Two ways in a row."""
    return lambda p: 2 * steps(p)


def pieces(steps: Count) -> Formula:
    """Every step moves one of p pieces."""
    return Formula(steps, lambda v, p: v * steps(p) / p)


def whole(steps: Count) -> Formula:
    """Every step moves the whole value."""
    return Formula(steps, lambda v, p: v * steps(p))


def halving(steps: Count, passes: int = 1) -> Formula:
    """Steps move 1/2, 1/4, ... of the value, or grow that way: (p-1)/p of it in all."""
    return Formula(lambda p: passes * steps(p), lambda v, p: passes * v * (p - 1) / p)


def bundles(steps: Count) -> Formula:
    """All-to-all: n pieces of p*p in the first step, n-1 in the next, ..., 1 in the last."""
    return Formula(steps, lambda v, p: v * steps(p) * (steps(p) + 1) / (2 * p * p))


def crossing(steps: Count) -> Formula:
    """All-to-all: every step moves half of what a member holds, which is 1/p of all."""
    return Formula(steps, lambda v, p: v * steps(p) / (2 * p))


def pipeline(way: Count, segments: Count) -> Formula:
    """Segments that follow each other: the last leaves when the way of the first has segments-1 steps more to count."""
    return Formula(lambda p: way(p) + segments(p) - 1, lambda v, p: v * (way(p) + segments(p) - 1) / segments(p))


def in_turn(steps: Count, passes: int = 1) -> Formula:
    """A grid, last axis first: its steps move one piece, those of the axis before as many as the last is long, ..."""

    def size(v: Fraction, *p: int) -> Fraction:
        moved = sum(steps(length) * math.prod(p[i + 1 :]) for i, length in enumerate(p))
        return passes * v * moved / math.prod(p)

    return Formula(lambda *p: passes * sum(map(steps, p)), size)


def inwards(passes: int = 1) -> Formula:
    """A grid of joined axes, first axis first: a step each, the last with as many pieces as all others are long."""

    def size(v: Fraction, *p: int) -> Fraction:
        return passes * v * sum(math.prod(p[:i]) for i in range(len(p))) / math.prod(p)

    return Formula(lambda *p: passes * len(p), size)


def at_once(steps: Count, passes: int = 1) -> Formula:
    """A grid, a part of the value for each axis: every phase has all axes in it and lasts as long as the longest."""

    def size(v: Fraction, *p: int) -> Fraction:
        moved = sum(_largest(steps, p, phase) for phase in range(len(p)))
        return passes * v * moved / (len(p) * math.prod(p))

    return Formula(lambda *p: passes * len(p) * max(map(steps, p)), size)


def _largest(steps: Count, p: tuple[int, ...], phase: int) -> int:
    """Step by step, the largest message of the parts under way: (axis of this phase, what the axes before gathered)."""
    axes = p[::-1]
    turns = [axes[part:] + axes[:part] for part in range(len(p))]
    under_way = [(steps(turn[phase]), math.prod(turn[:phase])) for turn in turns]
    return sum(
        max(held for last, held in under_way if last > step) for step in range(max(last for last, _ in under_way))
    )


def at_most_all(steps: Count) -> Formula:
    """On any tree, step t of a flood moves at most p-t pieces over a link: p(p-1)/2 in all."""
    return Formula(steps, lambda v, p: v * (p - 1) / 2)
