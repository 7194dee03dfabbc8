"""The way from one member of a group to all others: a tree of links, and the step in which each is crossed.

Every algorithm but recursive halving and the 2-D ones is a choice of tree per member: once round the ring, both ways
round it, to both ends of a line, one link to everyone, halves of halves. `building` makes schedules of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshloom.errors import FabricError
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate

Group = tuple[Coordinate, ...]


class Edge(NamedTuple):
    """A link of a tree, from the side of its root outwards, and the step (from 0) in which it is crossed."""

    parent: Coordinate
    child: Coordinate
    step: int


Tree = tuple[Edge, ...]
Growth = Callable[[Group, Fabric], Callable[[Coordinate], Tree]]


def path(*arms: Sequence[Coordinate]) -> Tree:
    """Arms that start at the same member, crossed link by link.

    >>> [(edge.parent, edge.child, edge.step) for edge in path([(1,), (2,), (3,)], [(1,), (0,)])]
    [((1,), (2,), 0), ((2,), (3,), 1), ((1,), (0,), 0)]
    """
    return tuple(Edge(arm[i], arm[i + 1], i) for arm in arms for i in range(len(arm) - 1))


def ring(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """Once round the ring."""
    order = fabric.ring(group)
    place = {each: i for i, each in enumerate(order)}
    return lambda root: path(_rotate(order, place[root]))


def both_ways(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """Both ways round the ring, to the far side of it: half the group the one way, the rest the other."""
    order = fabric.ring(group)
    place = {each: i for i, each in enumerate(order)}
    half = len(order) // 2 + 1

    def tree(root: Coordinate) -> Tree:
        turned = _rotate(order, place[root])
        return path(turned[:half], (root, *reversed(turned[half:])))

    return tree


def line(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """To both ends of the line."""
    order = fabric.line(group)
    place = {each: i for i, each in enumerate(order)}
    return lambda root: path(order[place[root] :], order[place[root] :: -1])


def star(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """A link to everyone, the next one first: on a switch no two members then send to the same one at once."""
    check_full(group, fabric)
    place = {each: i for i, each in enumerate(group)}
    return lambda root: tuple(Edge(root, each, 0) for each in _rotate(group, place[root])[1:])


def halves(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """The binomial tree: the root hands half of its range to a member of that half, and both go on alike."""
    check_full(group, fabric)
    place = {each: i for i, each in enumerate(group)}
    return lambda root: tuple(_halves(group, 0, len(group), place[root], 0))


def binary(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """The binary tree of a heap: the children of i are 2i + 1 and 2i + 2, counted from the root."""
    check_full(group, fabric)
    place = {each: i for i, each in enumerate(group)}

    def tree(root: Coordinate) -> Tree:
        turned = _rotate(group, place[root])
        # Members 1, 2 are at depth 1; 3 to 6 at depth 2: the depth of i is the length of i + 1 in bits, less 1.
        return tuple(Edge(turned[(i - 1) // 2], turned[i], (i + 1).bit_length() - 2) for i in range(1, len(turned)))

    return tree


def spanning(group: Group, fabric: Fabric) -> Callable[[Coordinate], Tree]:
    """Breadth first through whatever links join the members: one tree for all, seen from each of them."""
    near = _spanning_tree(group, fabric)
    return lambda root: tuple(_outwards(root, near))


def check_full(group: Group, fabric: Fabric) -> None:
    """Raise unless a link joins every two members, both ways."""
    for a in group:
        linked = set(fabric.neighbours(a))
        for b in group:
            if a != b and b not in linked:
                raise FabricError(f"no link joins {a} to {b}, and every two of {len(group)} members need one")


def _rotate(order: Group, start: int) -> Group:
    return order[start:] + order[:start]


def _halves(group: Group, low: int, high: int, root: int, step: int) -> list[Edge]:
    """The root's part is the larger one, so that it hands over at most half: 5 is 3 + 2, then 2 + 1 and 1 + 1."""
    if high - low < 2:
        return []
    large = (high - low + 1) // 2
    if root < low + large:
        own, other, head = (low, low + large), (low + large, high), low + large
    else:
        own, other, head = (high - large, high), (low, high - large), low
    handed = Edge(group[root], group[head], step)
    return [handed, *_halves(group, *own, root, step + 1), *_halves(group, *other, head, step + 1)]


def _spanning_tree(group: Group, fabric: Fabric) -> dict[Coordinate, list[Coordinate]]:
    inside = set(group)
    near: dict[Coordinate, list[Coordinate]] = {group[0]: []}
    for here in (edge := [group[0]]):
        for each in fabric.neighbours(here):
            if each in inside and each not in near and fabric.link(each, here):
                near[each] = [here]
                near[here].append(each)
                edge.append(each)
    if len(near) < len(group):
        lost = next(each for each in group if each not in near)
        raise FabricError(
            f"no way between {group[0]} and {lost} stays inside the group of {len(group)}",
            fix="choose a group whose members are joined by links, both ways",
        )
    return near


def _outwards(root: Coordinate, near: dict[Coordinate, list[Coordinate]]) -> list[Edge]:
    depth, edges = {root: 0}, []
    for here in (reached := [root]):
        for each in near[here]:
            if each not in depth:
                depth[each] = depth[here] + 1
                edges.append(Edge(here, each, depth[here]))
                reached.append(each)
    return edges
