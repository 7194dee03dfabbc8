"""Rings and lines through a group: an order in which each member is linked to the next, or why there is none.

A box of coordinates has an order that can be written down; it is tried first, in every turn. What is left is searched,
with a bound, and a refusal names the obstacle if there is a simple one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from meshloom.mesh import Coordinate

Near = Mapping[Coordinate, Sequence[Coordinate]]
Order = tuple[Coordinate, ...]
Side = Sequence[int]
GUESSES = 256
TRIES = 20_000


class Reason(str):
    """Why there is no such order."""

    __slots__ = ()


def find_order(members: Order, near: Near, closed: bool) -> Order | Reason:
    """An order of all members along links, closed into a ring if asked; a ring starts with the first member.

    >>> row = {(0,): [(1,)], (1,): [(0,), (2,)], (2,): [(1,)]}
    >>> find_order(((1,), (0,), (2,)), row, closed=False)
    ((0,), (1,), (2,))
    >>> find_order(((1,), (0,), (2,)), row, closed=True)
    '(0,) is linked to (1,) alone'
    """
    for order in itertools.islice(_guesses(members, closed), GUESSES):
        if is_order(order, near, closed):
            return _turn(order, members[0]) if closed else order
    both = _make_undirected(members, near)
    return _obstacle(members, both, closed) or _search(members, near, both, closed)


def is_order(order: Sequence[Coordinate], near: Near, closed: bool) -> bool:
    """Whether each is linked to the next, and the last to the first if it must close."""
    wrap = closed and len(order) > 1
    return all(b in near[a] for a, b in itertools.pairwise([*order, order[0]] if wrap else order))


def parts(members: Sequence[Coordinate], near: Near) -> list[Order]:
    """The members in connected parts, each in the order of the members.

    >>> parts([(0,), (1,), (3,)], {(0,): [(1,)], (1,): [(0,)], (3,): []})
    [((0,), (1,)), ((3,),)]
    """
    both = _make_undirected(members, near)
    found: list[Order] = []
    left = list(members)
    while left:
        reached = _reach(left[0], both, set(left))
        found.append(tuple(each for each in left if each in reached))
        left = [each for each in left if each not in reached]
    return found


def _turn(order: Order, first: Coordinate) -> Order:
    start = order.index(first)
    return order[start:] + order[:start]


def _make_undirected(members: Sequence[Coordinate], near: Near) -> dict[Coordinate, list[Coordinate]]:
    both: dict[Coordinate, dict[Coordinate, None]] = {each: {} for each in members}
    for a in members:
        for b in near[a]:
            both[a][b] = both[b][a] = None
    return {each: list(ends) for each, ends in both.items()}


def _reach(start: Coordinate, near: Near, allowed: set[Coordinate]) -> set[Coordinate]:
    reached, edge = {start}, [start]
    while edge:
        for b in near[edge.pop()]:
            if b in allowed and b not in reached:
                reached.add(b)
                edge.append(b)
    return reached


def _guesses(members: Order, closed: bool) -> Iterator[Order]:
    yield members
    yield tuple(sorted(members))
    sides = [sorted({each[axis] for each in members}) for axis in range(len(members[0]))]
    if math.prod(len(side) for side in sides) != len(members):
        return
    wide = [axis for axis, side in enumerate(sides) if len(side) > 1]
    for axes in itertools.permutations(wide):
        # Turned sides start elsewhere: past a broken link.
        for turns in itertools.product(*(range(min(4, len(sides[axis]))) for axis in axes)):
            turned = [_rotate(sides[axis], turn) for axis, turn in zip(axes, turns, strict=True)]
            for order in _cycles(turned) if closed else [_snake(turned)]:
                yield tuple(_place(members[0], axes, each) for each in order)


def _rotate(side: Side, turn: int) -> Side:
    return [*side[turn:], *side[:turn]]


def _place(base: Coordinate, axes: Sequence[int], values: Coordinate) -> Coordinate:
    at = list(base)
    for axis, value in zip(axes, values, strict=True):
        at[axis] = value
    return tuple(at)


def _snake(sides: Sequence[Side]) -> list[Coordinate]:
    """Through a box, to and fro: (0, 0) (0, 1) (1, 1) (1, 0) for two sides of 2."""
    if not sides:
        return [()]
    inner = _snake(sides[1:])
    return [(at, *rest) for i, at in enumerate(sides[0]) for rest in (inner if i % 2 == 0 else reversed(inner))]


def _cycles(sides: Sequence[Side]) -> Iterator[list[Coordinate]]:
    """Closed ways through a box: combs where a side is even, a twist around the torus where both are odd."""
    if len(sides) < 2:
        yield _snake(sides)
        return
    outer, inner = _snake(sides[:1]), _snake(sides[1:])
    if len(outer) % 2 == 0:
        yield [row + column for row, column in _comb(outer, inner)]
    if len(inner) % 2 == 0:
        yield [row + column for column, row in _comb(inner, outer)]
    for ring in _cycles(sides[1:]) if len(outer) % 2 == len(inner) % 2 else ():
        if len(outer) >= len(ring):
            yield [row + column for row, column in _twist(outer, ring)]
        else:
            yield [row + column for column, row in _twist(ring, outer)]


def _comb(rows: list[Coordinate], columns: list[Coordinate]) -> Iterator[tuple[Coordinate, Coordinate]]:
    """An even number of rows, to and fro without column 0, which is the way back."""
    for i, row in enumerate(rows):
        for column in columns[1:] if i % 2 == 0 else columns[:0:-1]:
            yield row, column
    for row in reversed(rows):
        yield row, columns[0]


def _twist(rows: list[Coordinate], columns: list[Coordinate]) -> Iterator[tuple[Coordinate, Coordinate]]:
    """All the way round each row, then one row on; the start shifts by 1 per row, in all by len(columns)."""
    count, at = len(columns), 0
    for i, row in enumerate(rows):
        step = 1 if i < (len(rows) + count) // 2 else -1
        for k in range(count):
            yield row, columns[(at + step * k) % count]
        at -= step


def _obstacle(members: Order, both: Near, closed: bool) -> Reason | None:
    """A simple reason why no order can exist, if there is one."""
    apart = parts(members, both)
    if len(apart) > 1:
        return Reason(f"no link joins {apart[0][-1]} or its part to {apart[1][0]}")
    ends = [each for each in members if len(both[each]) < 2]
    if closed and ends and len(members) > 2:
        return Reason(f"{ends[0]} is linked to {both[ends[0]][0]} alone")
    if len(ends) > 2:
        return Reason(f"{len(ends)} of them have one neighbour each, and a line has two ends")
    return _unequal_sides(members, both, closed) or (_cut(members, both) if closed else None)


def _unequal_sides(members: Order, both: Near, closed: bool) -> Reason | None:
    """If links only join one colour to the other (a chessboard), a ring needs as many of each, a line within one."""
    colour = {members[0]: 0}
    edge = [members[0]]
    while edge:
        a = edge.pop()
        for b in both[a]:
            if b not in colour:
                colour[b] = 1 - colour[a]
                edge.append(b)
            elif colour[b] == colour[a]:
                return None
    ones = sum(colour.values())
    if abs(len(members) - 2 * ones) <= (0 if closed else 1):
        return None
    sides = f"{len(members) - ones} and {ones}"
    return Reason(f"links only join two sides, of {sides}, and a {'ring' if closed else 'line'} takes them in turn")


def _cut(members: Order, both: Near) -> Reason | None:
    everyone = set(members)
    for each in members:
        rest = everyone - {each}
        if rest and len(_reach(next(iter(rest)), both, rest)) < len(rest):
            return Reason(f"all ways between some of them pass {each}")
    return None


def _search(members: Order, near: Near, both: Near, closed: bool) -> Order | Reason:
    """Depth first, the member with the fewest ways on first, within TRIES."""
    tries = 0
    starts = members[:1] if closed else sorted(members, key=lambda each: len(both[each]))
    for start in starts:
        way, used = [start], {start}
        branches = [_onward(way, used, members, near, both, closed)]
        while branches:
            step = next(branches[-1], None)
            if step is None:
                branches.pop()
                used.discard(way.pop())
                continue
            tries += 1
            if tries > TRIES:
                return Reason(f"none was found in {TRIES} tries")
            way.append(step)
            used.add(step)
            if len(way) == len(members) and (not closed or start in near[step]):
                return tuple(way)
            branches.append(_onward(way, used, members, near, both, closed))
    return Reason("every order of them meets a pair that no link joins")


def _onward(
    way: list[Coordinate], used: set[Coordinate], members: Order, near: Near, both: Near, closed: bool
) -> Iterator[Coordinate]:
    """Where the way may go from here: nowhere if what is left can no longer be reached or left again."""
    here, start = way[-1], way[0]
    left = {each for each in members if each not in used}
    open_ends = left | {here, start} if closed else left | {here}
    tight = sum(sum(b in open_ends for b in both[each]) < 2 for each in left)
    if tight > (0 if closed else 1) or len(_reach(here, near, left)) <= len(left):
        return iter(())
    steps = [each for each in near[here] if each in left]
    return iter(sorted(steps, key=lambda each: sum(b in left for b in both[each])))
