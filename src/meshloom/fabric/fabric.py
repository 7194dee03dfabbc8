"""A fabric is a grid of coordinates and the directed links between them; it answers routes, rings and lines.

Start with `Fabric.grid` (a line or a ring along each axis) or `Fabric.of` (any list of links). Fabrics are values,
equal by name, shape, links and figures. Every answer follows from the links alone, so that every process gives the
same one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshloom.errors import FabricError, closest
from meshloom.fabric.axis import KINDS
from meshloom.fabric.links import Link, Packet
from meshloom.fabric.orders import Reason, find_order, parts
from meshloom.mesh import Coordinate

Pair = tuple[Coordinate, Coordinate]
PerAxis = float | Sequence[float]
Figures = tuple[float, float, float | None, Packet | None, float]
# One word for all axes.
_WHOLE = {"mesh": "line", "torus": "ring"}
# How many entries the kept tables of distances may have together.
_KEPT = 1 << 22


class Fabric:
    """Coordinates and the links between them.

    >>> fabric = Fabric.grid((2, 4), ("line", "ring"), latency=1e-6, bandwidth=1e9)
    >>> print(fabric)
    2x4 fabric (line, ring) of 24 links
    >>> fabric.route((0, 0), (1, 3))
    ((0, 0), (1, 0), (1, 3))
    """

    __slots__ = (
        "__weakref__",
        "_distances",
        "_hash",
        "_near",
        "_sources",
        "_table",
        "combining",
        "kinds",
        "launch",
        "links",
        "name",
        "shape",
        "switches",
    )

    name: str
    shape: tuple[int, ...]
    links: tuple[Link, ...]
    switches: tuple[int, ...]
    launch: float
    combining: float | None
    kinds: tuple[str, ...] | None
    _table: dict[Pair, Link]
    _near: dict[Coordinate, tuple[Coordinate, ...]]
    _sources: dict[Coordinate, list[Coordinate]]
    _distances: dict[Coordinate, dict[Coordinate, int]]
    _hash: int

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        links: Iterable[Link],
        switches: Iterable[int] = (),
        launch: float = 0.0,
        combining: float | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "name", name)
        put(self, "shape", checked_shape(shape))
        put(self, "switches", _checked_switches(self.shape, switches))
        put(self, "launch", launch)
        put(self, "combining", combining)
        put(self, "_table", _merge(self.shape, links))
        put(self, "links", tuple(self._table.values()))
        put(self, "_near", _neighbours(self.shape, self._table))
        put(self, "_sources", _sources(self._near, self._table))
        put(self, "kinds", _kinds_of(self.shape, self._table, self.switches))
        put(self, "_distances", {})
        put(self, "_hash", hash((name, self.shape, self.links)))
        _check_figures(launch, combining)
        _check_connected(self)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        links: Iterable[Link],
        name: str = "",
        *,
        switches: Iterable[int] = (),
        launch: float = 0.0,
        combining: float | None = None,
    ) -> Fabric:
        """A fabric of any links; lanes that join the same pair are merged into one link of their summed bandwidth.

        `switches` are the axes along which the links of a device share one port, out and in. `launch` is what starting
        a collective takes, `combining` the bytes per second at which a device combines what arrives (None: at once).

        >>> there, back = Link((0,), (1,), 1e-6, 1e9), Link((1,), (0,), 1e-6, 1e9)
        >>> Fabric.of((2,), [there, there, back]).link((0,), (1,))
        Link(source=(0,), destination=(1,), latency=1e-06, bandwidth=2000000000.0)
        """
        return cls(name, shape, links, switches, launch, combining)

    @classmethod
    def grid(
        cls,
        shape: Sequence[int],
        kinds: str | Sequence[str],
        latency: PerAxis,
        bandwidth: PerAxis,
        lanes: int | Sequence[int] = 1,
        *,
        missing: Iterable[Pair] = (),
        extra: Iterable[Pair | Link] = (),
        name: str = "",
        combined: Sequence[float | None] = (),
        packets: Sequence[Packet | None] = (),
        least: PerAxis = 0.0,
        launch: float = 0.0,
        combining: float | None = None,
    ) -> Fabric:
        """A line or a ring along each axis; latency, bandwidth (of a lane and direction) and lanes, for all or each.

        A kind is "line", "ring", "full" (every one joined with every other) or "switch" (the same through one port
        each), per axis or one for all; "mesh" stands for lines along all axes, "torus" for rings. A ring of 2 is one
        edge. A pair in `missing` loses both directions; a pair in `extra` gains both, with the figures of the first
        axis. `combined` (of a lane), `packets` and `least` are as in a `Link`; `launch` and `combining` as in `of`.

        >>> Fabric.grid((4,), "ring", 1e-6, 1e9, missing=[((3,), (0,))]).hops((0,), (3,))
        3
        """
        shape = checked_shape(shape)
        ways = checked_kinds(shape, kinds)
        figures = _figures(shape, latency, bandwidth, lanes, combined, packets, least)
        broken = _checked_missing(shape, ways, missing)
        links = [Link(a, b, *figures[axis]) for axis, a, b in _edges(shape, ways) if (a, b) not in broken]
        switches = [axis for axis, way in enumerate(ways) if way == "switch"]
        return cls(name, shape, [*links, *_extra(extra, figures)], switches, launch, combining)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Fabric is a value and cannot change: {name} = {value!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Fabric is a value and cannot change: del {name}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Fabric) or self._hash != other._hash:
            return False
        return self._values() == other._values()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Fabric, self._values()

    def _values(self) -> tuple[object, ...]:
        return self.name, self.shape, self.links, self.switches, self.launch, self.combining

    def __repr__(self) -> str:
        more = {"name": self.name, "launch": self.launch, "combining": self.combining}
        figures = self._axis_figures()
        if self.kinds is None or figures is None:
            return f"Fabric.of({self.shape}, {self.links}{_arguments({**more, 'switches': self.switches})})"
        columns = tuple(tuple(each) for each in zip(*figures, strict=True)) if figures else ((),) * 5
        latency, bandwidth, combined, packets, least = columns
        more |= {"combined": any(combined) and combined, "packets": any(packets) and packets}
        more |= {"least": any(least) and least}
        return f"Fabric.grid({self.shape}, {self.kinds}, {latency}, {bandwidth}{_arguments(more)})"

    def __str__(self) -> str:
        title = f" {self.name!r}" if self.name else ""
        ways = f" ({', '.join(self.kinds)})" if self.kinds else ""
        return f"{_times(self.shape)} fabric{title}{ways} of {len(self.links)} links"

    def _axis_figures(self) -> list[Figures] | None:
        """The figures of each axis, or None where the links of one axis differ; 1 where an axis has none."""
        found: dict[int, set[Figures]] = {axis: set() for axis in range(len(self.shape))}
        for link in self.links:
            figures = (link.latency, link.bandwidth, link.combined, link.packet, link.least)
            found.setdefault(self.axis_of(link), set()).add(figures)
        if any(len(each) > 1 for each in found.values()):
            return None
        return [next(iter(found[axis]), (1.0, 1.0, None, None, 0.0)) for axis in range(len(self.shape))]

    def axis_of(self, link: Link) -> int:
        """The axis that a link runs along; the number of axes for one that runs along none."""
        return _direction(self.shape, link.source, link.destination)[0]

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)

    def coordinates(self) -> tuple[Coordinate, ...]:
        """All coordinates, row-major."""
        return tuple(self._near)

    def link(self, a: Coordinate, b: Coordinate) -> Link | None:
        """The link from a to b, if there is one."""
        found = self._table.get((a, b))
        if found is None:
            self._check(a, b)
        return found

    def neighbours(self, a: Coordinate) -> tuple[Coordinate, ...]:
        """Where the links of a lead: along axis 0 up and down, then axis 1, ..., then by any other link."""
        self._check(a)
        return self._near[a]

    def hops(self, a: Coordinate, b: Coordinate) -> int:
        """The number of links on the shortest way from a to b."""
        self._check(a, b)
        return self._distance(b)(a)

    def route(self, a: Coordinate, b: Coordinate) -> tuple[Coordinate, ...]:
        """The shortest way from a to b, both included: along axis 0 first where links allow it, upwards in a tie."""
        self._check(a, b)
        distance, here, way = self._distance(b), a, [a]
        while here != b:
            left = distance(here) - 1
            here = next(each for each in self._near[here] if distance(each) == left)
            way.append(here)
        return tuple(way)

    def _distance(self, target: Coordinate) -> Callable[[Coordinate], int]:
        """Hops to the target as a function: arithmetic on a whole grid, a kept table otherwise."""
        if self.kinds is not None:
            ways = tuple(zip(target, self.shape, self.kinds, strict=True))
            return lambda here: sum(_apart(at, *way) for at, way in zip(here, ways, strict=True))
        return self._table_to(target).__getitem__

    def _table_to(self, target: Coordinate) -> dict[Coordinate, int]:
        found = self._distances.get(target)
        if found is None:
            if len(self._distances) * self.size > _KEPT:
                self._distances.clear()
            found = self._distances[target] = _breadth_first(target, self._sources)
        return found

    def group(self, axis: int, at: Coordinate) -> tuple[Coordinate, ...]:
        """The coordinates along an axis through `at`, in order.

        >>> Fabric.grid((2, 3), "line", 1e-6, 1e9).group(1, (1, 0))
        ((1, 0), (1, 1), (1, 2))
        """
        self._check(at)
        if not 0 <= axis < len(self.shape):
            raise FabricError(f"axis {axis} is not of a {_times(self.shape)} fabric", fix=closest(axis, range(len(at))))
        return tuple((*at[:axis], i, *at[axis + 1 :]) for i in range(self.shape[axis]))

    def ring(self, group: Iterable[Coordinate]) -> tuple[Coordinate, ...]:
        """The group in an order in which each is linked to the next and the last to the first.

        >>> Fabric.grid((2, 2), "line", 1e-6, 1e9).ring([(0, 0), (0, 1), (1, 0), (1, 1)])
        ((0, 0), (0, 1), (1, 1), (1, 0))
        """
        members = self._members(group)
        found = find_order(members, self._within(members), closed=True)
        if isinstance(found, Reason):
            raise self._refusal("ring", members, found)
        return found

    def line(self, group: Iterable[Coordinate]) -> tuple[Coordinate, ...]:
        """The group in an order in which each is linked to the next.

        >>> Fabric.grid((2, 2), "line", 1e-6, 1e9).line([(1, 0), (0, 0), (0, 1)])
        ((1, 0), (0, 0), (0, 1))
        """
        members = self._members(group)
        found = find_order(members, self._within(members), closed=False)
        if isinstance(found, Reason):
            raise self._refusal("line", members, found)
        return found

    def without(self, a: Coordinate, b: Coordinate) -> Fabric:
        """The same fabric with the links between a and b broken, in both directions.

        >>> Fabric.grid((4,), "ring", 1e-6, 1e9).without((0,), (3,)).hops((0,), (3,))
        3
        """
        self._check(a, b)
        if not {(a, b), (b, a)} & self._table.keys():
            raise FabricError(f"no link joins {a} and {b}", fix=f"{a} is linked to {_listing(self._near[a])}")
        left = [each for pair, each in self._table.items() if {*pair} != {a, b}]
        return Fabric(self.name, self.shape, left, self.switches, self.launch, self.combining)

    def _members(self, group: Iterable[Coordinate]) -> tuple[Coordinate, ...]:
        members = tuple(group)
        self._check(*members)
        if not members:
            raise FabricError("a group needs a coordinate", fix="give at least one")
        if len(set(members)) < len(members):
            twice = next(each for each in members if members.count(each) > 1)
            raise FabricError(f"{twice} is in the group more than once", fix="give each coordinate once")
        return members

    def _within(self, members: tuple[Coordinate, ...]) -> dict[Coordinate, tuple[Coordinate, ...]]:
        inside = set(members)
        return {each: tuple(near for near in self._near[each] if near in inside) for each in members}

    def _check(self, *coordinates: Coordinate) -> None:
        for each in coordinates:
            if each not in self._near:
                last = tuple(size - 1 for size in self.shape)
                raise FabricError(
                    f"{each!r} is not a coordinate of a {_times(self.shape)} fabric",
                    fix=f"give a tuple of {len(self.shape)} between {(0,) * len(self.shape)} and {last}",
                )

    def _refusal(self, asked: str, members: tuple[Coordinate, ...], reason: Reason) -> FabricError:
        near = self._nearest(asked, members)
        return FabricError(
            f"no {asked} joins these {len(members)} coordinates: {reason}",
            fabric=self,
            group=_listing(members),
            nearest=near,
            fix=self._remedy(asked, members, near),
        )

    def _nearest(self, asked: str, members: tuple[Coordinate, ...]) -> str:
        within = self._within(members)
        pieces = parts(members, within)
        if len(pieces) > 1:
            return f"{len(pieces)} separate parts: {'; '.join(_listing(each) for each in pieces)}"
        order = find_order(members, within, closed=False) if asked == "ring" else Reason("")
        if isinstance(order, Reason):
            return f"a tree over {len(members)} coordinates"
        return f"a line: {_listing(order)}"

    def _remedy(self, asked: str, members: tuple[Coordinate, ...], near: str) -> str:
        axes = [i for i in range(len(self.shape)) if len({each[i] for each in members}) > 1]
        if asked == "ring" and len(axes) == 1 and len(members) == self.shape[axes[0]]:
            return f"ask for the line, or make axis {axes[0]} a ring"
        if near.startswith("a line"):
            return "ask for the line, or leave out a coordinate"
        if near.startswith("a tree"):
            return "use a tree or route between members, or choose another group"
        return "add the coordinates between the parts, or choose another group"


def _times(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "single"


def _listing(coordinates: Sequence[Coordinate], most: int = 12) -> str:
    shown = " ".join(str(each) for each in coordinates[:most])
    return shown if len(coordinates) <= most else f"{shown} and {len(coordinates) - most} more"


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple of sizes that can be."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise FabricError(f"a fabric of shape {sizes!r} cannot exist", fix="give whole numbers of at least 1")
    return sizes


def checked_kinds(shape: tuple[int, ...], kinds: str | Sequence[str]) -> tuple[str, ...]:
    """A kind for each axis.

    >>> checked_kinds((2, 4), "torus")
    ('ring', 'ring')
    """
    ways = (_WHOLE.get(kinds, kinds),) * len(shape) if isinstance(kinds, str) else tuple(kinds)
    for each in ways:
        if each not in KINDS:
            raise FabricError(f"{each!r} is not a kind of axis", fix=closest(each, (*KINDS, *_WHOLE)))
    if len(ways) != len(shape):
        raise FabricError(f"{len(ways)} kinds for {len(shape)} axes", fix="give one kind, or one per axis")
    return ways


def _arguments(given: Mapping[str, object]) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items() if value)


def _checked_switches(shape: tuple[int, ...], switches: Iterable[int]) -> tuple[int, ...]:
    axes = tuple(sorted(set(switches)))
    for axis in axes:
        if not 0 <= axis < len(shape):
            fix = closest(axis, range(len(shape)))
            raise FabricError(f"switch on axis {axis} of a {_times(shape)} fabric", fix=fix)
    return axes


def _check_figures(launch: float, combining: float | None) -> None:
    if not 0 <= launch < math.inf or (combining is not None and not combining > 0):
        raise FabricError(
            f"a fabric with launch={launch!r} s and combining={combining!r} bytes/s",
            fix="give a launch of at least 0, and a rate above 0 or None",
        )


def _figures(
    shape: tuple[int, ...],
    latency: PerAxis,
    bandwidth: PerAxis,
    lanes: int | Sequence[int],
    combined: Sequence[float | None],
    packets: Sequence[Packet | None],
    least: PerAxis,
) -> list[Figures]:
    """What the links of each axis have, of all lanes together."""
    each = zip(
        _per_axis("latency", shape, latency),
        _per_axis("bandwidth", shape, bandwidth),
        _per_axis("lanes", shape, lanes),
        _per_axis("combined", shape, combined or None),
        _per_axis("packets", shape, packets or None),
        _per_axis("least", shape, least),
        strict=True,
    )
    return [
        (seconds, rate * count, slow and slow * count, packet and tuple(packet), few)
        for seconds, rate, count, slow, packet, few in each
    ]


def _per_axis(what: str, shape: tuple[int, ...], value: Any) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * len(shape)
    if len(values) != len(shape):
        raise FabricError(f"{len(values)} values of {what} for {len(shape)} axes", fix="give one, or one per axis")
    return values


def _grid(shape: tuple[int, ...]) -> Iterator[Coordinate]:
    return itertools.product(*(range(size) for size in shape))


def _edges(shape: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[tuple[int, Coordinate, Coordinate]]:
    """Both directions of every edge of a grid, with the axis it runs along."""
    for at in _grid(shape):
        for axis, (size, kind) in enumerate(zip(shape, kinds, strict=True)):
            for up in _onward(at[axis], size, kind):
                there = (*at[:axis], up, *at[axis + 1 :])
                yield axis, at, there
                yield axis, there, at


def _onward(at: int, size: int, kind: str) -> Iterable[int]:
    """Where the edges of one axis lead from a place, each edge from one of its ends."""
    if kind in ("full", "switch"):
        return range(at + 1, size)
    if at + 1 < size:
        return (at + 1,)
    # A ring of 2 is one edge: from 1 on to 0 would be the same edge again.
    return (0,) if kind == "ring" and size > 2 else ()


def _checked_missing(shape: tuple[int, ...], kinds: tuple[str, ...], missing: Iterable[Pair]) -> set[Pair]:
    pairs = {(a, b) for a, b in missing}
    edges = {(a, b) for _, a, b in _edges(shape, kinds)} if pairs else set()
    for a, b in sorted(pairs):
        if (a, b) not in edges:
            near = sorted(end for start, end in edges if start == a)
            fix = f"{a} is linked to {_listing(near)}" if near else f"{a} is no coordinate of a {_times(shape)} fabric"
            raise FabricError(f"no link joins {a} and {b}, so it cannot be missing", fix=fix)
    return pairs | {(b, a) for a, b in pairs}


def _extra(extra: Iterable[Pair | Link], figures: list[Figures]) -> Iterator[Link]:
    for each in extra:
        if isinstance(each, Link):
            yield each
        else:
            a, b = each
            yield Link(a, b, *figures[0])
            yield Link(b, a, *figures[0])


def _merge(shape: tuple[int, ...], links: Iterable[Link]) -> dict[Pair, Link]:
    """One link per ordered pair, in row-major order: bandwidths of lanes add up, the largest latency counts."""
    merged: dict[Pair, Link] = {}
    for link in links:
        pair = (link.source, link.destination)
        _check_ends(shape, link)
        if pair in merged:
            link = _add_lanes(link, merged[pair])
        merged[pair] = link
    return dict(sorted(merged.items()))


def _add_lanes(a: Link, b: Link) -> Link:
    both = a.combined or b.combined
    combined = (a.combined or a.bandwidth) + (b.combined or b.bandwidth) if both else None
    packet = max((each for each in (a.packet, b.packet) if each), key=lambda each: each[1], default=None)
    latency, least = max(a.latency, b.latency), max(a.least, b.least)
    return Link(a.source, a.destination, latency, a.bandwidth + b.bandwidth, combined, packet, least)


def _check_ends(shape: tuple[int, ...], link: Link) -> None:
    for end in (link.source, link.destination):
        inside = len(end) == len(shape) and all(0 <= at < size for at, size in zip(end, shape, strict=True))
        if not inside:
            raise FabricError(f"the link from {link.source} to {link.destination} leaves a {_times(shape)} fabric")


def _neighbours(shape: tuple[int, ...], table: Mapping[Pair, Link]) -> dict[Coordinate, tuple[Coordinate, ...]]:
    near: dict[Coordinate, list[Coordinate]] = {at: [] for at in _grid(shape)}
    for a, b in table:
        near[a].append(b)
    return {a: tuple(sorted(ends, key=lambda b, a=a: _direction(shape, a, b))) for a, ends in near.items()}  # type: ignore[misc]


def _direction(shape: tuple[int, ...], a: Coordinate, b: Coordinate) -> tuple[int, int, Coordinate]:
    """How a neighbour is ranked: by axis, up, down, then further; a link along no axis comes last."""
    moved = [axis for axis in range(len(shape)) if a[axis] != b[axis]]
    if len(moved) == 1:
        step = (b[moved[0]] - a[moved[0]]) % shape[moved[0]]
        return moved[0], {shape[moved[0]] - 1: 1, 1: 0}.get(step, 2), b
    return len(shape), 0, b


def _kinds_of(shape: tuple[int, ...], table: Mapping[Pair, Link], switches: Sequence[int]) -> tuple[str, ...] | None:
    """The kind of each axis if the links are exactly a grid; the plainest where several mean the same links."""
    start = (0,) * len(shape)

    def is_joined(axis: int, there: int) -> bool:
        return (start, (*start[:axis], there, *start[axis + 1 :])) in table

    def kind_of(axis: int, size: int) -> str:
        if axis in switches:
            return "switch"
        if size < 3 or not is_joined(axis, size - 1):
            return "line"
        return "full" if size > 3 and is_joined(axis, 2) else "ring"

    kinds = tuple(map(kind_of, range(len(shape)), shape))
    return kinds if table.keys() == {(a, b) for _, a, b in _edges(shape, kinds)} else None


def _apart(here: int, there: int, size: int, kind: str) -> int:
    gap = abs(here - there)
    if kind in ("full", "switch"):
        return min(gap, 1)
    return gap if kind == "line" else min(gap, size - gap)


def _sources(
    near: Mapping[Coordinate, tuple[Coordinate, ...]], table: Mapping[Pair, Link]
) -> dict[Coordinate, list[Coordinate]]:
    """For each coordinate those with a link to it."""
    sources: dict[Coordinate, list[Coordinate]] = {at: [] for at in near}
    for a, b in table:
        sources[b].append(a)
    return sources


def _breadth_first(start: Coordinate, near: Mapping[Coordinate, Sequence[Coordinate]]) -> dict[Coordinate, int]:
    found, edge, hops = {start: 0}, [start], 0
    while edge:
        hops += 1
        edge = list({b: None for a in edge for b in near[a] if b not in found})
        found.update(dict.fromkeys(edge, hops))
    return found


def _check_connected(fabric: Fabric) -> None:
    start = (0,) * len(fabric.shape)
    for word, near in (("from", fabric._near), ("back to", fabric._sources)):
        reached = _breadth_first(start, near)
        if len(reached) < fabric.size:
            lost = [each for each in fabric._near if each not in reached]
            raise FabricError(
                f"the fabric is not connected: no way {word} {start} {'to' if word == 'from' else 'from'} "
                f"{_listing(lost, 4)}",
                fabric=fabric,
                fix=f"join {lost[0]} with one of {_listing(list(reached), 4)}",
            )
