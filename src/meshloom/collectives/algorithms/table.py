"""The table of collective algorithms: one line each, with the links it needs and its published cost.

To add one: a function that returns a schedule, and a line here; one test proves it on every topology that fits and
counts its steps and bytes against the line. `V` is the bytes of all chunks together (an all-gather's result, a
reduce-scatter's operand, what all members of an all-to-all hold), `p` the members, a and W latency and bandwidth of one
link and direction. Rooted collectives are counted from an end of a line. The formulas, and where they come from:

    ring                (p-1)a + (p-1)/p V/W; all-reduce twice that        NCCL's ring; Patarasuk and Yuan 2009
    bidirectional_ring  p/2 a + V/(2W), p/2 rounded down                   the scaling book: max(T_min p/2, V/W_bidi)
    line                as the ring, on both directions of its links       derived: a link carries up to p-1 pieces
    all-to-all          ring (p-1)/(2p) V, both ways V/8 + V/(4p)          the scaling book: a quarter of the all-gather
    halving_doubling    log2(p) a + (p-1)/p V/W; all-reduce twice that     Thakur, Rabenseifner and Gropp 2005
    tree                log2(p) (a + V/W), rounded up; all-reduce twice    the binomial tree, Thakur et al. 2005
    binary_tree         k segments up and down: (2D+k-1)(a + V/(kW))       NCCL's tree; Sanders et al. 2009, about
                        with depth D and k = 2D: 4D-1 steps, about 2V      2 log2(p) a + 2V/W
    pipeline            the same along a line from its middle, k = 2p      derived: towards V/W as k grows
    grid, torus         steps add up over the axes; (p-1)/p V/W            reduce-scatter on x, all-reduce of V/p_x on
                        on lines, about half of it on rings                y, all-gather on x; torus papers
    *_split             one part of V per axis: bandwidth times axes       the scaling book: V/(W_bidi d)
    levels              a step per axis, the outer one with the least      hierarchical collectives: reduce inside a
                        bytes: V/(p_0 ... p_k) of V for axis k             host, then between hosts, then spread inside
    direct, two_step    a link for every pair: a + V/(pW)                  full mesh; one- and two-shot all-reduce
    spanning_tree       upper bounds, for links in no order                breadth first, at worst a line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from meshloom.collectives.algorithms import formulas as cost, recursive, timing, trees
from meshloom.collectives.algorithms.building import (
    Build,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    everyone_to_everyone,
    gather,
    reduce,
    reduce_broadcast,
    reduce_scatter,
    scatter,
)
from meshloom.collectives.algorithms.formulas import Formula, around, depth, doublings, half, once, twice
from meshloom.collectives.algorithms.grids import box, grid_gather, grid_reduce, grid_scatter
from meshloom.collectives.algorithms.trees import Group
from meshloom.collectives.schedule import Schedule
from meshloom.errors import ArgumentError, FabricError, closest
from meshloom.fabric import Fabric
from meshloom.fabric.axis import is_joined
from meshloom.mesh import Coordinate

NEEDS = ("ring", "line", "full", "grid", "levels", "any")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One line of the table: a collective, a name, the links it needs, how it is built, what it costs.

    `exact` says whether every group meets the formula (with the root at an end of a line), or it is an upper bound.
    `timing` is what it takes on links that are all alike, if a closed form is known; of a grid it is asked by axis.
    """

    collective: str
    name: str
    needs: str
    build: Build
    formula: Formula
    exact: bool = True
    timing: Callable[..., float | None] = timing.unknown

    def __call__(self, group: Iterable[Coordinate], fabric: Fabric, *, root: int = 0) -> Schedule:
        """The schedule over a group of coordinates; a FabricError says which link or order is not there."""
        members = tuple(group)
        return (_kept if len(members) <= _SMALL else _kept_large)(self, members, fabric, root)

    def dims(self, group: Group) -> tuple[int, ...]:
        """What the formula takes for this group: its size, or the length of each axis of a grid."""
        if not self.is_across:
            return (len(group),)
        return tuple(len({each[axis] for each in group}) for axis in box(group))

    @property
    def is_across(self) -> bool:
        """Whether it goes along several axes of a grid, lines or rings, or levels in which a link joins every two."""
        return self.needs in ("grid", "levels")

    def can_go_along(self, kind: str, size: int) -> bool:
        """Whether an axis of some kind is enough for it, if it goes across axes."""
        if self.needs == "levels":
            return is_joined(kind, size)
        return "torus" not in self.name or kind == "ring" or is_joined(kind, size)

    def __str__(self) -> str:
        return f"{self.collective} by {self.name} ({self.needs} links)"


def _build(algorithm: Algorithm, group: Group, fabric: Fabric, root: int) -> Schedule:
    if not 0 <= root < len(group):
        raise ArgumentError(f"root {root} is not in a group of {len(group)}", fix=f"give 0 to {len(group) - 1}")
    schedule = replace(algorithm.build(group, fabric, root), algorithm=algorithm.name)
    pairs = {(send.source, send.destination) for step in schedule.steps for send in step}
    lost = [pair for pair in sorted(pairs) if fabric.link(*pair) is None]
    if lost:
        raise FabricError(f"{algorithm} needs a link from {lost[0][0]} to {lost[0][1]}, and there is none")
    return schedule


# A ring of 1024 has two million sends: of the large ones only the last few are kept.
_SMALL = 64
_kept = lru_cache(maxsize=256)(_build)
_kept_large = lru_cache(maxsize=2)(_build)


def _table(*lines: Algorithm) -> dict[tuple[str, str], Algorithm]:
    return {(line.collective, line.name): replace(line, timing=_timing_of(line)) for line in lines}


def _timing_of(line: Algorithm) -> Callable[..., float | None]:
    return _TIMINGS.get(line.name, {}).get(line.collective, timing.unknown)


def _segments(p: int) -> int:
    """Into how many segments a binary tree cuts the value."""
    return 2 * max(1, depth(p))


def _pipe(p: int) -> int:
    """Into how many segments a line cuts the value."""
    return 2 * p


def _mid(group: Group, fabric: Fabric) -> Coordinate:
    return fabric.line(group)[len(group) // 2]


# What algorithms take on links that are all alike, by name and collective.
_TIMINGS: Mapping[str, Mapping[str, Callable[..., float | None]]] = {
    "ring": timing.along_trees(around, arms=1),
    "bidirectional_ring": timing.along_trees(half, arms=2),
    "line": timing.along_trees(around, arms=2, on_line=True),
    "pipeline": timing.along_pipeline(_pipe),
    "halving_doubling": timing.by_halves(),
    "tree": timing.along_binomial_tree(),
    "binary_tree": timing.along_binary_tree(_segments),
    "direct": timing.to_everyone(),
    "two_step": {"all_reduce": timing.in_two_steps},
    "grid": timing.in_turn(around),
    "grid_split": timing.at_once(around),
    "torus": timing.in_turn(half),
    "torus_split": timing.around_at_once(),
    "levels": timing.in_levels(),
}
_A = Algorithm
_BI, _HD, _BT, _ST = "bidirectional_ring", "halving_doubling", "binary_tree", "spanning_tree"


def _along(name: str, needs: str, tree: trees.Growth, steps: cost.Count) -> tuple[Algorithm, ...]:
    """Every collective along one kind of tree, from all members or from the root."""
    return (
        _A("all_gather", name, needs, all_gather(tree), cost.pieces(steps)),
        _A("reduce_scatter", name, needs, reduce_scatter(tree), cost.pieces(steps)),
        _A("all_reduce", name, needs, all_reduce(tree), cost.pieces(twice(steps))),
        _A("all_to_all", name, needs, all_to_all(tree), cost.bundles(steps)),
        _A("broadcast", name, needs, broadcast(tree), cost.whole(steps)),
        _A("reduce", name, needs, reduce(tree), cost.whole(steps)),
        _A("gather", name, needs, gather(tree), cost.pieces(steps)),
        _A("scatter", name, needs, scatter(tree), cost.pieces(steps)),
    )


def _on_grid(
    name: str, tree: trees.Growth, price: Callable[..., Formula], needs: str = "grid", **how: bool
) -> tuple[Algorithm, ...]:
    """Axis by axis along one kind of tree; an all-reduce is both passes."""
    return (
        _A("all_gather", name, needs, grid_gather(tree, **how), price()),
        _A("reduce_scatter", name, needs, grid_scatter(tree, **how), price()),
        _A("all_reduce", name, needs, grid_reduce(tree, **how), price(passes=2)),
    )


# fmt: off
ALGORITHMS: dict[tuple[str, str], Algorithm] = _table(
    *_along("ring", "ring", trees.ring,      around),  # once round the ring
    *_along(_BI,    "ring", trees.both_ways, half),    # both ways round it: half the steps, each link half the bytes
    *_along("line", "line", trees.line,      around),  # to both ends of a line
    # along a line in segments that follow each other
    _A("broadcast",  "pipeline", "line", broadcast(trees.line, _pipe),              cost.pipeline(around, _pipe)),
    _A("reduce",     "pipeline", "line", reduce(trees.line, _pipe),                 cost.pipeline(around, _pipe)),
    _A("all_reduce", "pipeline", "line", reduce_broadcast(trees.line, _pipe, _mid), cost.pipeline(twice(half), _pipe)),
    # partners at distance 1, 2, 4, ...: powers of two
    _A("all_gather",     _HD, "full", recursive.doubling_gather,   cost.halving(doublings)),
    _A("reduce_scatter", _HD, "full", recursive.halving_scatter,   cost.halving(doublings)),
    _A("all_reduce",     _HD, "full", recursive.halving_doubling,  cost.halving(doublings, passes=2)),
    _A("all_to_all",     _HD, "full", recursive.doubling_exchange, cost.crossing(doublings)),
    # the binomial tree: halves of halves
    _A("broadcast",  "tree", "full", broadcast(trees.halves),             cost.whole(doublings)),
    _A("reduce",     "tree", "full", reduce(trees.halves),                cost.whole(doublings)),
    _A("all_reduce", "tree", "full", reduce_broadcast(trees.halves),      cost.whole(twice(doublings))),
    _A("gather",     "tree", "full", gather(trees.halves, bundled=True),  cost.halving(doublings)),
    _A("scatter",    "tree", "full", scatter(trees.halves, bundled=True), cost.halving(doublings)),
    # the binary tree, in segments that follow each other
    _A("broadcast",  _BT, "full", broadcast(trees.binary, _segments),        cost.pipeline(depth, _segments)),
    _A("reduce",     _BT, "full", reduce(trees.binary, _segments),           cost.pipeline(depth, _segments)),
    _A("all_reduce", _BT, "full", reduce_broadcast(trees.binary, _segments), cost.pipeline(twice(depth), _segments)),
    # one axis after the other, on lines or on rings; split: all axes at once, on parts of the value
    *_on_grid("grid",        trees.line,      partial(cost.in_turn, around)),
    *_on_grid("grid_split",  trees.line,      partial(cost.at_once, around), split=True),
    *_on_grid("torus",       trees.both_ways, partial(cost.in_turn, half)),
    *_on_grid("torus_split", trees.both_ways, partial(cost.at_once, half), split=True),
    # a link for every pair along each axis: first between hosts, then inside; backwards the other way round
    *_on_grid("levels", trees.star, cost.inwards, "levels", inwards=True),
    # a link for every pair
    _A("all_gather",     "direct",   "full", all_gather(trees.star),           cost.pieces(once)),
    _A("reduce_scatter", "direct",   "full", reduce_scatter(trees.star),       cost.pieces(once)),
    _A("all_reduce",     "direct",   "full", everyone_to_everyone(trees.star), cost.whole(once)),
    _A("all_reduce",     "two_step", "full", all_reduce(trees.star),           cost.pieces(twice(once))),
    _A("all_to_all",     "direct",   "full", all_to_all(trees.star),           cost.bundles(once)),
    _A("broadcast",      "direct",   "full", broadcast(trees.star),            cost.whole(once)),
    _A("reduce",         "direct",   "full", reduce(trees.star),               cost.whole(once)),
    _A("gather",         "direct",   "full", gather(trees.star),               cost.pieces(once)),
    _A("scatter",        "direct",   "full", scatter(trees.star),              cost.pieces(once)),
    # whatever joins the members
    _A("all_gather",     _ST, "any", all_gather(trees.spanning),       cost.at_most_all(around), exact=False),
    _A("reduce_scatter", _ST, "any", reduce_scatter(trees.spanning),   cost.at_most_all(around), exact=False),
    _A("all_reduce",     _ST, "any", reduce_broadcast(trees.spanning), cost.whole(twice(around)), exact=False),
    _A("all_to_all",     _ST, "any", all_to_all(trees.spanning),       cost.at_most_all(around), exact=False),
    _A("broadcast",      _ST, "any", broadcast(trees.spanning),        cost.whole(around), exact=False),
    _A("reduce",         _ST, "any", reduce(trees.spanning),           cost.whole(around), exact=False),
    _A("gather",         _ST, "any", gather(trees.spanning),           cost.pieces(around), exact=False),
    _A("scatter",        _ST, "any", scatter(trees.spanning),          cost.pieces(around), exact=False),
)
# fmt: on


def algorithm(collective: str, name: str) -> Algorithm:
    """A line of the table by its names; unknown ones list the closest.

    >>> print(algorithm("all_reduce", "ring"))
    all_reduce by ring (ring links)
    """
    known = {each.name: each for each in algorithms_of(collective)}
    if name not in known:
        raise ArgumentError(f"{collective} has no algorithm {name!r}", fix=closest(name, known))
    return known[name]


def algorithms_of(collective: str) -> tuple[Algorithm, ...]:
    """All lines of a collective, in the order of the table."""
    found = tuple(line for line in ALGORITHMS.values() if line.collective == collective)
    if not found:
        known = dict.fromkeys(line.collective for line in ALGORITHMS.values())
        raise ArgumentError(f"{collective!r} is not a collective with a schedule", fix=closest(collective, known))
    return found
