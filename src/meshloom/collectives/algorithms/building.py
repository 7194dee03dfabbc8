"""Schedules from trees: what crosses each link of a member's tree, and in which step.

Four collectives are written down; four are the same film played backwards. Backwards, a send goes the other way, and
copies that spread out become contributions that come together:

    all_gather -> reduce_scatter      broadcast -> reduce      scatter -> gather      all_reduce = both in a row
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshloom.collectives.algorithms.trees import Edge, Group, Growth, Tree
from meshloom.collectives.schedule import Schedule, Send, Step
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate

Build = Callable[[Group, Fabric, int], Schedule]
Steps = tuple[Step, ...]
Timed = tuple[int, Coordinate, Coordinate, Sequence[int]]
Pieces = Mapping[Coordinate, tuple[int, ...]]


def steps_of(sends: Iterable[Timed], reduce: bool = False) -> Steps:
    """Sends with the step of each, in steps; what crosses one link in one step is one message."""
    steps: list[dict[tuple[Coordinate, Coordinate], Sequence[int]]] = []
    for step, source, destination, chunks in sends:
        while step >= len(steps):
            steps.append({})
        pair = (source, destination)
        before = steps[step].get(pair)
        steps[step][pair] = chunks if before is None else (*before, *chunks)
    return tuple(
        tuple(Send(*pair, chunks[0], reduce, tuple(chunks[1:])) for pair, chunks in step.items()) for step in steps
    )


def backwards(steps: Steps, reduce: bool) -> Steps:
    """The same film from its end: every send turned round, combining where copies spread."""
    return tuple(
        tuple(Send(each.destination, each.source, each.chunk, reduce, each.also) for each in step)
        for step in reversed(steps)
    )


def together(*parts: Steps) -> Steps:
    """Parts that run side by side, step by step."""
    return tuple(tuple(itertools.chain(*step)) for step in itertools.zip_longest(*parts, fillvalue=()))


def sends_along(trees: Callable[[Coordinate], Tree], pieces: Pieces) -> Steps:
    """All-gather: the pieces of every member along its own tree.

    All trees grow side by side, so that members who send to many, or get from many when the film runs backwards, take
    turns: on a switch no port is then asked for by several at once.
    """
    grown = [[(edge, chunks) for edge in trees(each)] for each, chunks in pieces.items()]
    side_by_side = itertools.chain.from_iterable(itertools.zip_longest(*grown))
    return steps_of((each[0].step, each[0].parent, each[0].child, each[1]) for each in side_by_side if each)


def pour(tree: Tree, segments: int) -> Steps:
    """Broadcast: segments follow each other down one tree."""
    return steps_of((edge.step + i, edge.parent, edge.child, (i,)) for i in range(segments) for edge in tree)


def exchange(group: Group, trees: Callable[[Coordinate], Tree]) -> Steps:
    """All-to-all: along the tree of i, each link carries what is for the members behind it (chunk i*p+j for j)."""
    place, p = {each: i for i, each in enumerate(group)}, len(group)
    return steps_of(
        (edge.step, edge.parent, edge.child, [place[root] * p + place[each] for each in behind])
        for root in group
        for edge, behind in _behind(trees(root))
    )


def deal(group: Group, tree: Tree, bundled: bool) -> Steps:
    """Scatter: bundled, each link is crossed once with all that is for the members behind it; or one piece after the
    other, the farthest first, so that all arrive in the end."""
    place = {each: i for i, each in enumerate(group)}
    if bundled:
        return steps_of((e.step, e.parent, e.child, [place[each] for each in behind]) for e, behind in _behind(tree))
    into = {edge.child: edge for edge in tree}
    last = max((edge.step for edge in tree), default=0)
    return steps_of(
        (edge.step + last - into[each].step, edge.parent, edge.child, (place[each],))
        for each in into
        for edge in _way_to(each, into)
    )


def _way_to(member: Coordinate, into: Mapping[Coordinate, Edge]) -> Iterable[Edge]:
    while member in into:
        yield into[member]
        member = into[member].parent


def _behind(tree: Tree) -> Iterable[tuple[Edge, list[Coordinate]]]:
    """Each edge with the members that are reached through it."""
    behind: dict[Coordinate, list[Coordinate]] = {}
    for edge in sorted(tree, key=lambda each: -each.step):
        mine = behind.setdefault(edge.child, [])
        mine.insert(0, edge.child)
        behind.setdefault(edge.parent, []).extend(mine)
        yield edge, list(mine)


def own_pieces(group: Group) -> Pieces:
    """Piece i for member i."""
    return {each: (i,) for i, each in enumerate(group)}


def schedule(
    collective: str, group: Group, steps: Steps, root: int = 0, *, chunks: int | None = None, owners: Sequence[int] = ()
) -> Schedule:
    """A schedule whose algorithm the table will name; without owners the number of chunks is given."""
    return Schedule(collective, "", group, len(owners) if chunks is None else chunks, steps, tuple(owners), root)


def all_gather(growth: Growth) -> Build:
    """Every member's piece spreads along its tree."""
    return lambda group, fabric, root: schedule(
        "all_gather", group, sends_along(growth(group, fabric), own_pieces(group)), root, owners=range(len(group))
    )


def reduce_scatter(growth: Growth) -> Build:
    """An all-gather backwards."""
    return lambda group, fabric, root: schedule(
        "reduce_scatter",
        group,
        backwards(sends_along(growth(group, fabric), own_pieces(group)), reduce=True),
        root,
        owners=range(len(group)),
    )


def all_reduce(growth: Growth) -> Build:
    """A reduce-scatter, then an all-gather."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        gather = sends_along(growth(group, fabric), own_pieces(group))
        return schedule("all_reduce", group, backwards(gather, reduce=True) + gather, root, chunks=len(group))

    return build


def all_to_all(growth: Growth) -> Build:
    """What is for the members behind a link crosses it together."""
    return lambda group, fabric, root: schedule(
        "all_to_all",
        group,
        exchange(group, growth(group, fabric)),
        root,
        owners=[i % len(group) for i in range(len(group) ** 2)],
    )


def broadcast(growth: Growth, segments: Callable[[int], int] = lambda p: 1) -> Build:
    """Down the root's tree, in segments that follow each other."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        count = segments(len(group))
        return schedule("broadcast", group, pour(growth(group, fabric)(group[root]), count), root, chunks=count)

    return build


def reduce(growth: Growth, segments: Callable[[int], int] = lambda p: 1) -> Build:
    """A broadcast backwards."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        count = segments(len(group))
        steps = backwards(pour(growth(group, fabric)(group[root]), count), reduce=True)
        return schedule("reduce", group, steps, root, chunks=count)

    return build


def reduce_broadcast(
    growth: Growth,
    segments: Callable[[int], int] = lambda p: 1,
    head: Callable[[Group, Fabric], Coordinate] = lambda group, fabric: group[0],
) -> Build:
    """All-reduce: up one tree and down again; a segment goes down as soon as it is whole, while others still go up."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        count, tree = segments(len(group)), growth(group, fabric)(head(group, fabric))
        depth = max((edge.step for edge in tree), default=-1) + 1
        down = pour(tree, count)
        # Backwards the last segment comes up first; numbered from the other end, segment i is whole at depth + i.
        up = backwards(pour(tree, count), reduce=True)
        turned = tuple(tuple(_renumber(each, count) for each in step) for step in up)
        return schedule("all_reduce", group, together(turned, ((),) * depth + down), root, chunks=count)

    return build


def _renumber(send: Send, count: int) -> Send:
    return Send(send.source, send.destination, count - 1 - send.chunk, send.reduce)


def scatter(growth: Growth, bundled: bool = False) -> Build:
    """Down the root's tree, each piece to its member."""
    return lambda group, fabric, root: schedule(
        "scatter",
        group,
        deal(group, growth(group, fabric)(group[root]), bundled),
        root,
        owners=range(len(group)),
    )


def gather(growth: Growth, bundled: bool = False) -> Build:
    """A scatter backwards."""
    return lambda group, fabric, root: schedule(
        "gather",
        group,
        backwards(deal(group, growth(group, fabric)(group[root]), bundled), reduce=False),
        root,
        owners=range(len(group)),
    )


def everyone_to_everyone(growth: Growth) -> Build:
    """All-reduce in one step: each sends its whole value to each."""

    def build(group: Group, fabric: Fabric, root: int) -> Schedule:
        steps = steps_of(
            ((edge.step, edge.parent, edge.child, (0,)) for each in group for edge in growth(group, fabric)(each)),
            reduce=True,
        )
        return schedule("all_reduce", group, steps, root, chunks=1)

    return build
