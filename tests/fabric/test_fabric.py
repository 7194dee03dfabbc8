"""A fabric answers from its links alone: routes, rings, lines; presets are data with a source beside every figure."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import assume, given, settings, strategies as st

from meshloom import FabricError, Machine, fabric
from meshloom.fabric import VIRTUAL, AxisLinks, Fabric, Link, Preset, load_preset, preset, preset_names
from meshloom.fabric.orders import is_order
from meshloom.mesh import Coordinate

KINDS = ("line", "ring", "full")
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def grid(shape: tuple[int, ...], kinds: str | tuple[str, ...] = "line", **more: object) -> Fabric:
    return Fabric.grid(shape, kinds, 1e-6, 1e9, **more)  # type: ignore[arg-type]


@st.composite
def grids(draw: st.DrawFn) -> Fabric:
    shape = draw(shapes)
    return grid(shape, tuple(draw(st.sampled_from(KINDS)) for _ in shape))


@st.composite
def tori(draw: st.DrawFn) -> Fabric:
    """Rings along two or three axes of 3 or more: every edge has another way round."""
    return grid(tuple(draw(st.lists(st.integers(3, 5), min_size=1, max_size=3))), "torus")


@st.composite
def broken(draw: st.DrawFn) -> Fabric:
    """A grid that lost some edges and stayed whole, with some links of its own."""
    found = draw(grids())
    for _ in range(draw(st.integers(0, 4))):
        link = draw(st.sampled_from(found.links)) if found.links else None
        if link is not None:
            try:
                found = found.without(link.source, link.destination)
            except FabricError:
                continue
    if found.size > 1 and draw(st.booleans()):
        a, b = draw(st.lists(st.sampled_from(found.coordinates()), min_size=2, max_size=2, unique=True))
        found = Fabric.of(found.shape, [*found.links, Link(a, b, 1e-6, 1e9)])
    return found


def distances(found: Fabric, start: Coordinate) -> dict[Coordinate, int]:
    """Plain breadth-first search over the list of links."""
    seen, edge = {start: 0}, [start]
    while edge:
        here = edge.pop(0)
        for link in found.links:
            if link.source == here and link.destination not in seen:
                seen[link.destination] = seen[here] + 1
                edge.append(link.destination)
    return seen


def check_route(found: Fabric, way: tuple[Coordinate, ...], a: Coordinate, b: Coordinate) -> None:
    assert (way[0], way[-1]) == (a, b)
    pairs = {(link.source, link.destination) for link in found.links}
    assert all(step in pairs for step in itertools.pairwise(way))


def check_order(found: Fabric, order: tuple[Coordinate, ...], group: tuple[Coordinate, ...], closed: bool) -> None:
    assert sorted(order) == sorted(group)
    wrap = [order[0]] if closed and len(order) > 1 else []
    check_route(found, (*order, *wrap), order[0], order[0] if closed else order[-1])


# The checklist


@pytest.mark.parametrize(
    ("kinds", "shape", "expected"),
    [
        ("line", (8,), 7),
        ("ring", (8,), 1),
        ("line", (2, 4), 4),
        ("torus", (2, 4), 2),
        ("mesh", (8, 4), 10),
        ("torus", (8, 4), 2),
        ("full", (8,), 1),
    ],
)
def test_row_086_routes_of_line_ring_and_mesh_have_the_expected_hops(kinds, shape, expected):
    found = grid(shape, kinds)
    first, last = (0,) * len(shape), tuple(size - 1 for size in shape)
    assert found.hops(first, last) == expected
    assert len(found.route(first, last)) == expected + 1
    check_route(found, found.route(first, last), first, last)


def test_row_086_a_line_a_ring_and_a_mesh_go_different_ways():
    assert grid((4,), "line").route((0,), (3,)) == ((0,), (1,), (2,), (3,))
    assert grid((4,), "ring").route((0,), (3,)) == ((0,), (3,))
    assert grid((2, 2), "mesh").route((0, 0), (1, 1)) == ((0, 0), (1, 0), (1, 1))


def test_row_099_a_ring_on_links_that_form_a_line_is_refused_with_the_reason_and_the_line():
    with pytest.raises(FabricError) as caught:
        grid((4,), "line").ring([(0,), (1,), (2,), (3,)])
    assert str(caught.value) == (
        "no ring joins these 4 coordinates: (0,) is linked to (1,) alone\n"
        "  fabric   4 fabric (line) of 6 links\n"
        "  group    (0,) (1,) (2,) (3,)\n"
        "  nearest  a line: (0,) (1,) (2,) (3,)\n"
        "  fix      ask for the line, or make axis 0 a ring"
    )
    assert isinstance(caught.value, ValueError)


def test_row_099_a_row_of_a_t3000_is_a_line_and_the_whole_of_it_is_a_ring():
    found = preset("t3000").fabric()
    with pytest.raises(FabricError, match="nearest  a line"):
        found.ring(found.group(1, (0, 0)))
    check_order(found, found.ring(found.coordinates()), found.coordinates(), closed=True)


def test_row_099_a_2x4_that_lost_a_corner_link_forms_no_ring():
    found = preset("t3000").fabric().without((0, 0), (0, 1))
    with pytest.raises(FabricError, match=r"\(0, 0\) is linked to \(1, 0\) alone"):
        found.ring(found.coordinates())


@pytest.mark.parametrize("name", ["t3000", "galaxy", "loudbox"])
def test_row_108_line_ring_mesh_and_torus_change_the_routes(name):
    figures = preset(name)
    last = tuple(size - 1 for size in figures.shape)
    mesh, torus = figures.fabric(kinds="mesh"), figures.fabric(kinds="torus")
    start = (0,) * len(last)
    assert mesh.hops(start, last) == sum(last)
    assert torus.hops(start, last) == len(last)
    assert mesh.route(start, last) != torus.route(start, last)
    line, ring = figures.fabric((8,), "line"), figures.fabric((8,), "ring")
    assert (line.hops((0,), (7,)), ring.hops((0,), (7,))) == (7, 1)
    raw = [
        {round(link.bandwidth / figures.efficiency_of(kind)) for link in made.links}
        for kind, made in (("ring", ring), ("line", mesh))
    ]
    assert raw[0] == raw[1]


# Routes


@given(broken(), st.data())
@settings(max_examples=120, deadline=None)
def test_routes_are_shortest_and_use_only_links(found, data):
    a, b = (data.draw(st.sampled_from(found.coordinates())) for _ in range(2))
    way = found.route(a, b)
    check_route(found, way, a, b)
    assert len(way) - 1 == found.hops(a, b) == distances(found, a)[b]


@given(grids(), st.data())
@settings(max_examples=80, deadline=None)
def test_routes_of_a_whole_grid_are_those_of_a_search(found, data):
    a, b = (data.draw(st.sampled_from(found.coordinates())) for _ in range(2))
    searched = copy.copy(found)
    object.__setattr__(searched, "kinds", None)  # without it every distance comes from a search
    assert found.route(a, b) == searched.route(a, b)
    assert found.hops(a, b) == distances(found, a)[b]


@given(broken(), st.data())
@settings(max_examples=60, deadline=None)
def test_routes_are_the_same_however_the_links_are_listed(found, data):
    other = Fabric.of(found.shape, data.draw(st.permutations(found.links)), found.name)
    a, b = (data.draw(st.sampled_from(found.coordinates())) for _ in range(2))
    assert other == found
    assert other.route(a, b) == found.route(a, b)


@given(grids(), st.data())
@settings(max_examples=60, deadline=None)
def test_hops_are_symmetric_on_symmetric_fabrics(found, data):
    a, b = (data.draw(st.sampled_from(found.coordinates())) for _ in range(2))
    assert found.hops(a, b) == found.hops(b, a)


def test_hops_need_not_be_symmetric_where_links_are_not():
    one_way = Fabric.of((3,), [Link((i,), ((i + 1) % 3,), 1e-6, 1e9) for i in range(3)])
    assert (one_way.hops((0,), (2,)), one_way.hops((2,), (0,))) == (2, 1)


@given(grids(), st.data())
@settings(max_examples=60, deadline=None)
def test_routes_of_a_whole_grid_finish_one_axis_before_the_next(found, data):
    a, b = (data.draw(st.sampled_from(found.coordinates())) for _ in range(2))
    moves = [next(i for i in range(len(p)) if p[i] != q[i]) for p, q in itertools.pairwise(found.route(a, b))]
    assert moves == sorted(moves)


@given(tori(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_torus_that_lost_any_link_still_routes(found, data):
    lost = data.draw(st.sampled_from(found.links))
    left = found.without(lost.source, lost.destination)
    assert left.link(lost.source, lost.destination) is None
    a, b = lost.source, data.draw(st.sampled_from(found.coordinates()))
    check_route(left, left.route(a, b), a, b)
    assert left.hops(a, b) == distances(left, a)[b] >= found.hops(a, b)
    assert left.hops(lost.source, lost.destination) > 1


def test_a_broken_link_is_routed_around_and_only_there():
    found = grid((2, 4)).without((0, 1), (0, 2))
    assert found.route((0, 1), (0, 2)) == ((0, 1), (1, 1), (1, 2), (0, 2))
    assert found.route((0, 0), (0, 1)) == ((0, 0), (0, 1))


def test_a_tie_around_a_ring_goes_upwards():
    assert grid((4,), "ring").route((1,), (3,)) == ((1,), (2,), (3,))
    assert grid((4,), "ring").route((3,), (1,)) == ((3,), (0,), (1,))


# Rings and lines


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
@settings(max_examples=60, deadline=None)
def test_every_torus_is_a_ring_and_every_mesh_is_a_line(shape):
    torus, mesh = grid(shape, "torus"), grid(shape, "mesh")
    check_order(torus, torus.ring(torus.coordinates()), torus.coordinates(), closed=True)
    check_order(mesh, mesh.line(mesh.coordinates()), mesh.coordinates(), closed=False)


@pytest.mark.parametrize("shape", list(itertools.product(range(2, 7), repeat=2)))
def test_a_mesh_is_a_ring_exactly_when_it_has_an_even_number_of_coordinates(shape):
    found = grid(shape)
    if math.prod(shape) % 2 == 0:
        check_order(found, found.ring(found.coordinates()), found.coordinates(), closed=True)
    else:
        with pytest.raises(FabricError, match="a ring takes them in turn"):
            found.ring(found.coordinates())


def has_order(found: Fabric, group: tuple[Coordinate, ...], closed: bool) -> bool:
    """Whether any order of the group runs along links, by trying all."""
    orders = itertools.permutations(group)
    near = {each: found.neighbours(each) for each in group}
    return any(is_order(order, near, closed) for order in orders)


@given(broken(), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_an_order_is_found_exactly_when_there_is_one(found, closed, data):
    points = st.lists(st.sampled_from(found.coordinates()), min_size=1, max_size=6, unique=True)
    group = tuple(data.draw(points))
    ask = found.ring if closed else found.line
    if has_order(found, group, closed):
        check_order(found, ask(group), group, closed)
    else:
        with pytest.raises(FabricError) as caught:
            ask(group)
        assert {"group", "nearest", "fix"} <= caught.value.details.keys()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("lost", [None, ((0, 1), (1, 1))])
def test_every_small_group_of_a_mesh_gets_its_order_or_a_refusal(closed, lost):
    found = grid((3, 3)) if lost is None else grid((3, 3)).without(*lost)
    outcomes = set()
    for group in itertools.chain(*(itertools.combinations(found.coordinates(), size) for size in range(1, 6))):
        exists = has_order(found, group, closed)
        outcomes.add(exists)
        try:
            check_order(found, found.ring(group) if closed else found.line(group), group, closed)
        except FabricError:
            assert not exists, group
        else:
            assert exists, group
    assert outcomes == {False, True}


def test_the_oracle_of_orders_can_say_no_and_yes():
    found = grid((3,), "line")
    assert not has_order(found, found.coordinates(), closed=True)
    assert has_order(found, found.coordinates(), closed=False)


def test_a_ring_starts_with_the_first_member_and_keeps_a_good_order():
    found = grid((4, 4), "mesh")
    square = ((1, 1), (1, 2), (2, 2), (2, 1))
    assert found.ring(square) == square
    assert found.ring(found.coordinates())[0] == (0, 0)


def test_a_ring_of_one_and_of_two_need_no_wrap():
    found = grid((4,), "line")
    assert found.ring([(2,)]) == ((2,),)
    assert found.ring([(2,), (1,)]) == ((2,), (1,))


def test_a_large_torus_is_a_ring_also_without_a_link():
    found = grid((32, 32), "torus").without((0, 0), (0, 1))
    check_order(found, found.ring(found.coordinates()), found.coordinates(), closed=True)


@pytest.mark.parametrize(
    ("found", "group", "reason", "nearest"),
    [
        (grid((5,)), ((0,), (1,), (3,)), "no link joins", "2 separate parts: (0,) (1,); (3,)"),
        (grid((3, 3)), ((0, 1), (1, 0), (1, 1), (1, 2), (2, 1)), "one neighbour each", "a tree over 5 coordinates"),
    ],
)
def test_a_line_that_does_not_exist_is_refused_with_what_there_is(found, group, reason, nearest):
    with pytest.raises(FabricError, match=reason) as caught:
        found.line(group)
    assert caught.value.details["nearest"] == nearest


def test_two_squares_that_meet_in_one_coordinate_form_no_ring():
    group = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2))
    with pytest.raises(FabricError, match=r"in turn|pass \(1, 1\)"):
        grid((3, 3)).ring(group)


# Fabrics as values


def test_an_edge_is_two_links_and_a_ring_of_two_is_one_edge():
    assert len(grid((2,), "ring").links) == 2
    assert len(grid((3,), "ring").links) == 6
    assert grid((2,), "ring") == grid((2,), "line")
    assert len(grid((8,), "full").links) == 56


def test_lanes_and_figures_may_differ_by_axis():
    found = Fabric.grid((2, 3), "line", (1e-6, 2e-6), (1e9, 3e9), (4, 1))
    assert found.link((0, 0), (1, 0)) == Link((0, 0), (1, 0), 1e-6, 4e9)
    assert found.link((0, 0), (0, 1)) == Link((0, 0), (0, 1), 2e-6, 3e9)
    assert found.link((0, 0), (1, 1)) is None


def test_parallel_lanes_are_merged_into_bandwidth():
    twice = grid((2,), extra=[((0,), (1,))])
    assert twice.link((0,), (1,)) == Link((0,), (1,), 1e-6, 2e9)
    assert twice.link((1,), (0,)) == Link((1,), (0,), 1e-6, 2e9)


def test_an_extra_link_is_taken_in_its_own_direction_only():
    found = grid((4,), extra=[Link((0,), (3,), 5e-6, 1e8)])
    assert (found.hops((0,), (3,)), found.hops((3,), (0,))) == (1, 3)
    assert found.neighbours((0,)) == ((1,), (3,))


def test_neighbours_are_listed_by_axis_upwards_first():
    assert grid((3, 3), "torus").neighbours((0, 0)) == ((1, 0), (2, 0), (0, 1), (0, 2))
    assert grid((3, 3), "mesh").neighbours((1, 1)) == ((2, 1), (0, 1), (1, 2), (1, 0))


@given(broken())
@settings(max_examples=60, deadline=None)
def test_a_fabric_reads_back_from_its_code_and_survives_copies(found):
    assert eval(repr(found), {"Fabric": Fabric, "Link": Link}) == found
    for other in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert other == found
        assert hash(other) == hash(found)


def test_a_fabric_cannot_change_and_is_equal_by_name_shape_and_links():
    found = grid((4,))
    with pytest.raises(AttributeError, match="is a value"):
        found.name = "other"  # type: ignore[misc]
    assert found != grid((4,), name="other")
    assert found != grid((4,), "ring")
    assert found != grid((2, 2))
    assert len({found, grid((4,)), grid((4,), "ring")}) == 2


def test_a_group_along_an_axis_is_in_order():
    found = grid((2, 3))
    assert found.group(0, (1, 2)) == ((0, 2), (1, 2))
    assert found.coordinates() == tuple(itertools.product(range(2), range(3)))
    with pytest.raises(FabricError, match="axis 2"):
        found.group(2, (0, 0))


def test_a_switch_joins_everyone_through_one_port_each():
    found = grid((4, 2), ("switch", "line"))
    assert found.kinds == ("switch", "line") and found.switches == (0,)
    assert found.hops((0, 0), (3, 1)) == 2
    assert found != grid((4, 2), ("full", "line")) and found.links == grid((4, 2), ("full", "line")).links
    assert str(found) == "4x2 fabric (switch, line) of 32 links"
    assert found.without((0, 0), (1, 0)).switches == (0,)


def test_a_fabric_with_packets_sums_and_starts_reads_back_from_its_code():
    figures = {"combined": [5e8, None], "packets": [None, (4096, 2e-6)], "combining": 1e9, "least": (0.0, 100.0)}
    one = grid((2, 3), ("ring", "switch"), **figures, launch=1e-6)
    assert one.link((0, 0), (1, 0)) == Link((0, 0), (1, 0), 1e-6, 1e9, combined=5e8)
    assert one.link((0, 0), (0, 2)) == Link((0, 0), (0, 2), 1e-6, 1e9, packet=(4096, 2e-6), least=100.0)
    other = one.without((0, 0), (1, 0))
    for found in (one, other):
        assert eval(repr(found), {"Fabric": Fabric, "Link": Link}) == found
        for made in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
            assert (made, made.launch, made.combining, made.switches) == (found, 1e-6, 1e9, (1,))
    assert one != grid((2, 3), ("ring", "switch"), **figures)


def test_lanes_multiply_the_bandwidth_of_sums_too():
    found = Fabric.grid((2,), "line", 1e-6, 1e9, 3, combined=[5e8])
    assert found.link((0,), (1,)) == Link((0,), (1,), 1e-6, 3e9, combined=1.5e9)
    merged = Fabric.of((2,), [*found.links, Link((0,), (1,), 2e-6, 1e9, packet=(100, 3e-6))])
    assert merged.link((0,), (1,)) == Link((0,), (1,), 2e-6, 4e9, combined=2.5e9, packet=(100, 3e-6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fabric.of((2,), grid((2,)).links, switches=[1]), "switch on axis 1 of a 2 fabric"),
        (lambda: grid((2,), launch=-1.0), "launch=-1.0 s"),
        (lambda: grid((2,), combining=0.0), "combining=0.0 bytes/s"),
        (lambda: grid((2, 2), packets=[(4096, 1e-6)]), "1 values of packets for 2 axes"),
        (lambda: Link((0,), (1,), 1e-6, 1e9, packet=(0, 1e-6)), "packet (0, 1e-06)"),
        (lambda: Link((0,), (1,), 1e-6, 1e9, combined=-1.0), "combined -1.0"),
        (lambda: AxisLinks("rign", 4, 1e-6, 1e9), "'rign' is not a kind of axis"),
        (lambda: AxisLinks("ring", 0, 1e-6, 1e9), "an axis of 0 devices"),
        (lambda: AxisLinks("ring", 4, 1e-6, 0.0), "a ring of 4 of 1e-06 s and 0.0 bytes/s"),
        (lambda: replace(preset("galaxy"), packet=None), "has a packet without its latency"),
        (lambda: replace(preset("galaxy"), levels=("chip",)), "needs levels for each of 2 axes"),
        (lambda: grid((4,), missing=[((1,), (2,))]), "not connected: no way from (0,) to (2,) (3,)"),
        (lambda: Fabric.of((2,), [Link((0,), (1,), 1e-6, 1e9)]), "not connected: no way back to (0,) from (1,)"),
        (lambda: Fabric.of((2, 2), []), "not connected"),
        (lambda: grid((4,), missing=[((0,), (2,))]), "no link joins (0,) and (2,)"),
        (lambda: grid((4,)).without((0,), (2,)), "no link joins (0,) and (2,)"),
        (lambda: grid((4,), "rign"), "'rign' is not a kind of axis"),
        (lambda: grid((4, 2), ("line",)), "1 kinds for 2 axes"),
        (lambda: grid((4, 0)), "shape (4, 0) cannot exist"),
        (lambda: Fabric.grid((4, 2), "line", (1e-6,), 1e9), "1 values of latency for 2 axes"),
        (lambda: Fabric.of((2,), [Link((0,), (2,), 1e-6, 1e9)]), "leaves a 2 fabric"),
        (lambda: Link((0,), (0,), 1e-6, 1e9), "a link from (0,) to itself"),
        (lambda: Link((0,), (1,), -1.0, 1e9), "-1.0 s"),
        (lambda: Link((0,), (1,), 1e-6, math.nan), "nan bytes/s"),
        (lambda: grid((4,)).route((0,), (4,)), "(4,) is not a coordinate of a 4 fabric"),
        (lambda: grid((4,)).link((0, 0), (1,)), "(0, 0) is not a coordinate of a 4 fabric"),
        (lambda: grid((4,)).ring([]), "a group needs a coordinate"),
        (lambda: grid((4,)).line([(0,), (1,), (0,)]), "(0,) is in the group more than once"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(FabricError, match=re.escape(message)):
        make()


# Presets


@pytest.mark.parametrize(
    ("name", "shape", "links", "edge", "memory"),
    [
        ("n300", (1, 2), 2, 12.5e9, 12e9),
        ("t3000", (2, 4), 20, 12.5e9, 12e9),
        ("galaxy", (8, 4), 128, 50e9, 12e9),
        ("quietbox", (2, 2), 8, 100e9, 32e9),
        ("loudbox", (2, 4), 20, 100e9, 32e9),
        ("nvlink8", (8,), 56, 300e9, 80e9),
        ("ethernet16", (16,), 240, 12.5e9, 256e9),
    ],
)
def test_a_preset_gives_its_fabric_and_its_machine(name, shape, links, edge, memory):
    found = preset(name)
    assert (found.shape, found.memory) == (shape, memory)
    lines = found.fabric()
    assert (lines.name, lines.shape, len(lines.links)) == (name, shape, links)
    assert [link.bandwidth for link in lines.links] == pytest.approx([edge * found.efficiency] * links)
    machine = found.machine()
    assert machine.bandwidth == pytest.approx(edge * found.efficiency)
    assert (machine.name, machine.memory, machine.peaks) == (name, memory, found.flops)
    assert found.machine("bf16").flops == dict(found.flops).get("bf16", machine.flops)


def test_the_list_of_presets_above_is_all_of_them():
    levels = ("galaxy4", "nvlink8x16")  # of two levels: below
    flat = ("ethernet16", "galaxy", "loudbox", "n300", "nvlink8", "quietbox", "t3000")
    assert preset_names() == tuple(sorted((*flat, *levels)))


@pytest.mark.parametrize(
    ("name", "shape", "levels", "edges"),
    [
        ("nvlink8x16", (16, 8), ("host", "chip"), (25e9, 300e9)),
        ("galaxy4", (4, 8, 4), ("rack", "chip", "chip"), (25e9, 37.5e9, 37.5e9)),
    ],
)
def test_a_preset_of_two_levels_has_other_links_on_each(name, shape, levels, edges):
    found = preset(name)
    axes = found.machine().axes
    assert tuple(axis.size for axis in axes) == shape and tuple(axis.level for axis in axes) == levels
    assert [axis.bandwidth for axis in axes] == pytest.approx([edge * found.efficiency for edge in edges])
    lines = found.fabric()
    for number, axis in enumerate(axes):
        along = {
            (link.latency, link.bandwidth, link.combined, link.packet, link.least)
            for link in lines.links
            if lines.axis_of(link) == number
        }
        assert along == {(axis.latency, axis.bandwidth, axis.combined, axis.packet, axis.least)}
    assert lines.kinds == tuple(axis.kind for axis in axes)


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_of_a_preset_has_its_source_beside_it(name):
    text = (resources.files("meshloom.fabric") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    figures = [line for line in text.splitlines() if re.search(r"=\s*\[?[0-9.]", line)]
    assert len(figures) >= 9
    assert [line for line in figures if not re.search(r"#\s\w.{5,}", line)] == []


def test_a_preset_in_another_shape_keeps_kinds_and_figures():
    large = preset("galaxy").fabric((32, 32))
    assert large.kinds == ("ring", "ring")
    assert large.hops((0, 0), (31, 31)) == 2
    assert preset("n300").fabric((8,)).kinds == ("line",)
    uneven = replace(preset("galaxy"), kinds=("ring", "line"))
    with pytest.raises(FabricError, match="differ in kinds"):
        uneven.fabric((8,))


def test_a_name_of_a_preset_is_read_in_any_case_and_an_unknown_one_lists_the_closest():
    assert preset("GALAXY") is preset("galaxy")
    with pytest.raises(FabricError, match="did you mean 'galaxy'"):
        preset("galxy")


OWN = """\
title = "Two boxes"
shape = [2, 4]
kinds = ["line", "ring"]

[links]
lanes = [1, 2]
latency = 2e-6
bandwidth = [1e9, 4e9]
efficiency = 0.5
missing = [[[0, 0], [0, 1]]]
extra = [[[0, 0], [1, 2]], { from = [0, 1], to = [1, 3], latency = 1e-3, bandwidth = 1e6 }]

[device]
memory = 8e9
memory_bandwidth = 1e11

[device.flops]
f32 = 1e12
"""


def written(tmp_path, text: str) -> Preset:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return load_preset(path)


def test_a_preset_of_ones_own_is_read_from_toml(tmp_path):
    found = written(tmp_path, OWN)
    assert (found.name, found.title) == ("own", "Two boxes")
    lines = found.fabric()
    assert lines.link((0, 1), (0, 2)) == Link((0, 1), (0, 2), 2e-6, 4e9)
    assert lines.link((0, 1), (1, 1)) == Link((0, 1), (1, 1), 2e-6, 0.5e9)
    assert lines.link((0, 0), (0, 1)) is None
    assert lines.link((0, 0), (1, 2)) == Link((0, 0), (1, 2), 2e-6, 0.5e9)
    assert lines.link((0, 1), (1, 3)) == Link((0, 1), (1, 3), 1e-3, 1e6)
    assert lines.link((1, 3), (0, 1)) is None
    assert found.machine().bandwidth == 0.5e9
    assert found.fabric(kinds="mesh").link((0, 0), (0, 1)) is not None


MORE = OWN.replace('kinds = ["line", "ring"]', 'kinds = ["line", "ring"]\nlevels = ["host", "chip"]').replace(
    "efficiency = 0.5",
    "efficiency = 0.5\npatterns.combine = 0.25\npatterns.ring = 1.0\n"
    "launch = 3e-6\npacket = 4096\npacket_latency = 4e-6\nleast = 100",
)
MORE = MORE.replace(
    "memory = 8e9", "memory = 8e9\nmemory_efficiency = 0.9\nefficiency = 0.8\noverhead = 1e-6\ncombining = 3e10"
)


def test_a_preset_says_efficiency_by_pattern_and_what_starting_and_combining_take(tmp_path):
    found = written(tmp_path, MORE)
    line, ring = found.machine().axes
    assert (line.bandwidth, line.combined, line.level) == (0.5e9, 0.25e9, "host")
    assert (ring.bandwidth, ring.combined, ring.level) == (8e9, 2e9, "chip")
    assert line.packet == ring.packet == (4096, 4e-6) and line.least == ring.least == 100
    machine = found.machine()
    assert (machine.launch, machine.overhead, machine.combining) == (3e-6, 1e-6, 3e10)
    assert machine.compute(0.8e12, 0) == pytest.approx(1.0 + 1e-6)
    assert machine.compute(0, 0.9e11) == pytest.approx(1.0 + 1e-6)
    fabric = found.fabric()
    assert (fabric.launch, fabric.combining) == (3e-6, 3e10)
    assert fabric.link((1, 0), (1, 1)) == Link((1, 0), (1, 1), 2e-6, 8e9, 2e9, (4096, 4e-6), 100)
    assert written(tmp_path, found.to_toml()) == found
    assert str(found) == (
        "own: Two boxes\n"
        "  links    2x4 (line of hosts, ring of chips), 1 lane of 1 GB/s x 0.5, 2 us | 2 lanes of 4 GB/s x 0.5, 2 us\n"
        "  patterns combine x 0.25, ring x 1\n"
        "  packet   4096 B, 4 us; messages count for 100 B at least\n"
        "  sums     3 us to start a collective, 30 GB/s combined\n"
        "  device   8 GB at 100 GB/s x 0.9, 1 us per op\n"
        "  flops    f32 1 T, x 0.8"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("patterns.combine = 0.25", "patterns.combin = 0.25", "links.patterns.combin is not a pattern"),
        ("patterns.combine = 0.25", "patterns.combine = 2", "links.patterns.combine is 2"),
        ("launch = 3e-6", "launch = -1", "links.launch is -1"),
        ("packet_latency = 4e-6", "", "links.packet_latency is missing"),
        ("overhead = 1e-6", 'overhead = "1e-6"', "device.overhead is '1e-6'"),
        ("combining = 3e10", "combining = 0", "device.combining is 0"),
        ('levels = ["host", "chip"]', 'levels = ["host"]', "levels is ['host']"),
    ],
)
def test_a_bad_figure_of_these_is_refused_with_its_key(tmp_path, old, new, message):
    assert old in MORE
    with pytest.raises(FabricError, match=re.escape(message)):
        written(tmp_path, MORE.replace(old, new, 1))


def test_a_preset_written_as_toml_reads_back(tmp_path):
    own = written(tmp_path, OWN)
    for found in (own, replace(own, title='a "b" \\ c\nd'), *map(preset, preset_names())):
        assert written(tmp_path, found.to_toml()) == found


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("latency = 2e-6", 'latency = "2e-6"', 7, "links.latency is '2e-6'"),
        ("latency = 2e-6", "latency = true", 7, "links.latency is True"),
        ("latency = 2e-6", "", 5, "links.latency is missing"),
        ("bandwidth = [1e9, 4e9]", "bandwidth = [1e9]", 8, "links.bandwidth is [1000000000.0]"),
        ("bandwidth = [1e9, 4e9]", "bandwidth = -1", 8, "links.bandwidth is -1"),
        ("efficiency = 0.5", "efficiency = 1.5", 9, "links.efficiency is 1.5"),
        ("lanes = [1, 2]", "lanes = 0.5", 6, "links.lanes is 0.5"),
        ('"line", "ring"', '"line", "rign"', 3, "kinds is ['line', 'rign']"),
        ("shape = [2, 4]", "shape = 8", 2, "shape is 8"),
        ("shape = [2, 4]", "", None, "shape is missing"),
        ("memory = 8e9", "memory = inf", 14, "device.memory is inf"),
        ("memory = 8e9", "memroy = 8e9", 13, "device.memory is missing"),
        ("memory = 8e9", "memory = 8e9\nmemroy = 8e9", 15, "device.memroy is not a key of a preset"),
        ("f32 = 1e12", "f31 = 1e12", 18, "device.flops.f31 is not a dtype"),
        ("f32 = 1e12", "", 17, "device.flops is missing"),
        ("[[0, 0], [0, 1]]", "[[0, 0], [0]]", 10, "links.missing is"),
        ("[[0, 0], [0, 1]]", "[[0, 0], [0, 2]]", 10, "links.missing gives no fabric: no link joins (0, 0) and (0, 2)"),
        ("from = [0, 1], ", "", 11, "links.extra is"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_key(tmp_path, old, new, line, message):
    assert old in OWN
    with pytest.raises(FabricError) as caught:
        written(tmp_path, OWN.replace(old, new, 1))
    where = "own.toml: " if line is None else f"own.toml, line {line}: "
    assert f"{where}{message}" in str(caught.value)
    assert "fix" in str(caught.value)


def test_a_file_that_is_no_toml_is_refused_with_the_line(tmp_path):
    with pytest.raises(FabricError, match=r"own\.toml is not TOML: .*line 2"):
        written(tmp_path, "shape = [2]\nkinds line\n")
    with pytest.raises(FabricError, match="cannot be read: No such file"):
        load_preset(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FabricError, match="not UTF-8"):
        load_preset(tmp_path / "bytes.toml")


def test_keys_may_be_dotted_and_the_line_is_still_found(tmp_path):
    text = OWN.replace("[device.flops]\nf32 = 1e12", "flops.f32 = 0")
    with pytest.raises(FabricError, match=re.escape("line 17: device.flops.f32 is 0")):
        written(tmp_path, text)


# Machines


def test_a_machine_prints_what_it_was_given_and_reads_back():
    assert repr(VIRTUAL).endswith("memory_bandwidth=288000000000.0)")
    for machine in (VIRTUAL, *(preset(name).machine() for name in preset_names())):
        assert eval(repr(machine), {"Machine": Machine}) == machine


def test_a_machine_computes_at_the_peak_of_the_dtype():
    machine = preset("nvlink8").machine()
    assert machine.compute(312e12, 1, "bf16") == pytest.approx(1.0)
    assert machine.compute(19.5e12, 1) == machine.compute(19.5e12, 1, "f32") == pytest.approx(1.0)
    assert machine.compute(1, 2e12, "bf16") == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{"launch": -1.0}, {"overhead": -1e-6}])
def test_a_machine_refuses_negative_seconds(wrong):
    with pytest.raises(TypeError, match="give 0 or more seconds"):
        replace(VIRTUAL, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"memory": 0}, {"peaks": (("f32", -1.0),)}, {"latency": 0}, {"combining": 0.0}, {"memory_efficiency": 0.0}],
)
def test_a_machine_refuses_figures_that_are_not_above_zero(wrong):
    with pytest.raises(TypeError, match="give a number above 0"):
        replace(VIRTUAL, **wrong)


def test_the_room_exports_what_it_says():
    assert all(hasattr(fabric, name) for name in fabric.__all__)


@given(tori())
@settings(max_examples=20, deadline=None)
def test_planted_faults_are_caught_by_the_checks(found):
    assume(found.size > 3)
    a, far = (0,) * len(found.shape), max(found.coordinates(), key=lambda each: found.hops((0,) * len(each), each))
    assume(found.hops(a, far) > 1)
    with pytest.raises(AssertionError):
        check_route(found, (a, far), a, far)
    with pytest.raises(AssertionError):
        check_order(found, (a, far), found.coordinates(), closed=False)
