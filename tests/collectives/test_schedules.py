"""Every algorithm of the table, on every topology that fits: proven, counted against its formula; faults are found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from meshloom.collectives.algorithms import (
    ALGORITHMS,
    NEEDS,
    Algorithm,
    algorithm,
    algorithms_of,
    best,
    candidates,
    choose,
)
from meshloom.collectives.proof import MEANINGS, check_contributions, check_credits, cost, prove
from meshloom.collectives.schedule import Schedule, Send, chunk_sizes, waves
from meshloom.errors import ArgumentError, FabricError, MeshloomError, ScheduleError
from meshloom.fabric import Fabric, Link

LATENCY, BANDWIDTH = 1e-6, 1e9
SIZES = range(2, 33)
GRIDS = [*itertools.product(range(2, 5), range(2, 9)), (2, 2, 3), (3, 2, 4)]
LEVELS = [(4, 4), (2, 5), (5, 3), (2, 3, 4)]
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@cache
def line(*shape: int) -> Fabric:
    return Fabric.grid(shape, "line", LATENCY, BANDWIDTH)


@cache
def ring(*shape: int) -> Fabric:
    return Fabric.grid(shape, "ring", LATENCY, BANDWIDTH)


@cache
def full(p: int) -> Fabric:
    pairs = itertools.permutations([(i,) for i in range(p)], 2)
    return Fabric.of((p,), [Link(a, b, LATENCY, BANDWIDTH) for a, b in pairs])


@cache
def joined(*shape: int) -> Fabric:
    """Axes along which a link joins every two."""
    return Fabric.grid(shape, "full", LATENCY, BANDWIDTH)


@cache
def star(p: int) -> Fabric:
    """All joined to the first: no ring, no line, no grid."""
    ends = [((0,), (i,)) for i in range(1, p)]
    return Fabric.of((p,), [Link(*pair, LATENCY, BANDWIDTH) for a, b in ends for pair in ((a, b), (b, a))])


@cache
def topologies() -> tuple[Fabric, ...]:
    lines = [kind(p) for p in SIZES for kind in (line, ring, full)]
    stars = [star(p) for p in SIZES if p > 3]  # a star of 3 is a line with its root in the middle
    levels = [joined(*shape) for shape in LEVELS]
    return (*lines, *stars, *(kind(*shape) for shape in GRIDS for kind in (line, ring)), *levels)


def fitting(chosen: Algorithm) -> Iterator[tuple[Fabric, Schedule]]:
    for fabric in topologies():
        try:
            yield fabric, chosen(fabric.coordinates(), fabric)
        except FabricError:
            continue


def expected(chosen: Algorithm, schedule: Schedule, size: int) -> tuple[int, Fraction]:
    dims = chosen.dims(schedule.group)
    return chosen.formula.steps(*dims), chosen.formula.bytes(Fraction(size), *dims)


def check_cost(chosen: Algorithm, fabric: Fabric, schedule: Schedule) -> None:
    """Even chunks meet the formula exactly; uneven ones take as many steps and at most the bytes of even ones."""
    even, uneven = 6 * schedule.chunks, 6 * schedule.chunks - schedule.chunks // 2 - 1
    steps, size = expected(chosen, schedule, even)
    found = cost(schedule, fabric, chunk_sizes(even, schedule.chunks))
    if chosen.exact:
        assert (found.steps, found.bytes) == (steps, size), (chosen, fabric)
        assert math.isclose(found.seconds, steps * LATENCY + size / BANDWIDTH), (chosen, fabric)
    else:
        assert found.steps <= steps and found.bytes <= size, (chosen, fabric)
    ragged = cost(schedule, fabric, chunk_sizes(uneven, schedule.chunks))
    assert (ragged.steps, ragged.messages) == (found.steps, found.messages)
    assert ragged.bytes <= found.bytes
    assert sum(ragged.sent.values()) == sum(ragged.received.values()) == sum(ragged.links.values())


def least_received(schedule: Schedule, size: int) -> float:
    """Bytes that the busiest receiver cannot do without, whatever the algorithm."""
    p = len(schedule.group)
    parts = {"broadcast": p, "reduce": p, "scatter": 1, "all_to_all": (p - 1) / p}
    return size * parts.get(schedule.collective, p - 1) / p


NAMES = [pytest.param(each, id=f"{each.collective}-{each.name}") for each in ALGORITHMS.values()]


@pytest.mark.parametrize("chosen", NAMES)
def test_every_algorithm_is_proven_and_meets_its_formula_on_every_topology_that_fits(chosen):
    sizes = set()
    for fabric, schedule in fitting(chosen):
        proof = prove(schedule, fabric)
        # A member gets at most every chunk over every link that leads to it, in a step.
        assert 0 < proof.in_flight <= schedule.chunks * (len(schedule.group) - 1)
        assert (proof.steps, proof.sends) == (len(schedule.steps), schedule.sends)
        check_cost(chosen, fabric, schedule)
        received = cost(schedule, fabric, chunk_sizes(12 * schedule.chunks, schedule.chunks)).received
        assert max(received.values()) >= least_received(schedule, 12 * schedule.chunks)
        sizes.add(len(schedule.group))
    assert sizes >= expected_sizes(chosen)


def expected_sizes(chosen: Algorithm) -> set[int]:
    """The groups that an algorithm must have been offered for."""
    if chosen.name == "halving_doubling":
        return {2, 4, 8, 16, 32}
    if chosen.needs == "levels":
        return {math.prod(shape) for shape in LEVELS}
    return {math.prod(shape) for shape in GRIDS if len(shape) == 2} if chosen.needs == "grid" else set(SIZES)


@pytest.mark.parametrize("chosen", [each for each in NAMES if each.values[0].collective in ROOTED])
def test_every_root_is_proven_and_takes_at_most_the_formula(chosen):
    tried = 0
    for fabric in (line(5), ring(5), ring(6), full(7), full(8), line(2, 3), star(5)):
        for root in range(fabric.size):
            try:
                schedule = chosen(fabric.coordinates(), fabric, root=root)
            except FabricError:
                continue
            prove(schedule, fabric)
            assert schedule.root == root
            steps, size = expected(chosen, schedule, 6 * schedule.chunks)
            found = cost(schedule, fabric, [6] * schedule.chunks)
            assert found.steps <= steps and found.bytes <= size
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize("chosen", NAMES)
def test_the_order_of_the_group_numbers_the_results_and_need_not_be_that_of_the_links(chosen):
    tried = 0
    for fabric in (line(4), ring(5), full(4), ring(3, 3), line(2, 4)):
        group = fabric.coordinates()[::-1]
        group = (group[1], group[0], *group[2:])
        try:
            schedule = chosen(group, fabric)
        except FabricError:
            continue
        prove(schedule, fabric)
        assert schedule.group == group
        tried += 1
    assert tried


@pytest.mark.parametrize("chosen", NAMES)
def test_a_part_of_a_fabric_is_a_group_too(chosen):
    fabric = ring(4, 8)
    groups = [fabric.group(0, (0, 3)), fabric.group(1, (2, 0)), ((0, 0), (0, 1), (1, 0), (1, 1))]
    fits = []
    for group in groups:
        try:
            fits.append(prove(chosen(group, fabric), fabric))
        except FabricError as error:
            fits.append(None)
            assert "link" in error.headline or "grid" in error.headline
    assert any(fits) == (chosen.needs != "full")


def test_every_collective_has_an_algorithm_on_every_topology():
    kinds = (line(6), ring(6), full(6), star(6), line(2, 3), ring(3, 3))
    for collective, fabric in itertools.product(MEANINGS, kinds):
        assert best(collective, fabric.coordinates(), fabric, 600).schedule is not None


def test_the_table_needs_only_known_topologies_and_no_line_is_there_twice():
    assert {each.needs for each in ALGORITHMS.values()} == set(NEEDS)
    assert [(each.collective, each.name) for each in ALGORITHMS.values()] == list(ALGORITHMS)
    assert {collective for collective, _ in ALGORITHMS} == set(MEANINGS)


def test_the_formulas_are_those_that_are_published():
    """Figures worked out by hand, for 8 members and 800 bytes."""
    worked = {
        ("all_gather", "ring"): (7, 700),
        ("all_reduce", "ring"): (14, 1400),
        ("all_gather", "bidirectional_ring"): (4, 400),  # V/2
        ("all_to_all", "bidirectional_ring"): (4, 125),  # V/8 + V/32
        ("all_reduce", "halving_doubling"): (6, 1400),
        ("all_reduce", "tree"): (6, 4800),
        ("all_reduce", "binary_tree"): (11, Fraction(8800, 6)),  # depth 3, 6 segments
        ("all_reduce", "pipeline"): (23, 1150),
        ("all_to_all", "direct"): (1, Fraction(800, 64)),
    }
    for key, (steps, size) in worked.items():
        formula = ALGORITHMS[key].formula
        assert (formula.steps(8), formula.bytes(Fraction(800), 8)) == (steps, size), key
    grid = ALGORITHMS["all_reduce", "grid"].formula
    assert (grid.steps(2, 4), grid.bytes(Fraction(800), 2, 4)) == (8, 1400)  # 2(1 + 3) steps, 2 * 7/8 V
    split = ALGORITHMS["all_reduce", "grid_split"].formula
    assert (split.steps(4, 4), split.bytes(Fraction(1600), 4, 4)) == (12, 1500)  # half of 2 * 15/16 V
    levels = ALGORITHMS["all_reduce", "levels"].formula
    assert (levels.steps(2, 4), levels.bytes(Fraction(800), 2, 4)) == (4, 600)  # 2(1 + 2) pieces of 1/8 V


# --- planted faults ---------------------------------------------------------------------------------------------


def ring_of_four() -> Schedule:
    return ALGORITHMS["all_reduce", "ring"](ring(4).coordinates(), ring(4))


def changed(schedule: Schedule, step: int, *sends: Send) -> Schedule:
    steps = list(schedule.steps)
    steps[step] = sends
    return replace(schedule, steps=tuple(steps))


def dropped(schedule: Schedule) -> Schedule:
    return changed(schedule, 5, *schedule.steps[5][1:])


def dropped_early(schedule: Schedule) -> Schedule:
    return changed(schedule, 0, *schedule.steps[0][1:])


def doubled(schedule: Schedule) -> Schedule:
    return replace(schedule, steps=(schedule.steps[0], *schedule.steps))


def without_link(schedule: Schedule) -> Schedule:
    first, *rest = schedule.steps[0]
    return changed(schedule, 0, replace(first, destination=((first.source[0] + 2) % 4,)), *rest)


def twice_on_a_link(schedule: Schedule) -> Schedule:
    first = schedule.steps[0][0]
    return changed(schedule, 0, *schedule.steps[0], replace(first, chunk=(first.chunk + 1) % 4))


def wrong_destination(schedule: Schedule) -> Schedule:
    """What was to go on round the ring goes back to where it came from."""
    first, *rest = schedule.steps[4]
    return changed(schedule, 4, replace(first, destination=((first.source[0] - 1) % 4,)), *rest)


def swapped(schedule: Schedule) -> Schedule:
    steps = schedule.steps
    return replace(schedule, steps=(*steps[:4], steps[5], steps[4]))


def replaced_instead(schedule: Schedule) -> Schedule:
    first, *rest = schedule.steps[0]
    return changed(schedule, 0, replace(first, reduce=False), *rest)


def written_twice(schedule: Schedule) -> Schedule:
    """A piece that comes round the ring comes from the other side as well, in the same step."""
    last = schedule.steps[5]
    return changed(schedule, 5, *last, replace(last[0], source=((last[0].destination[0] + 1) % 4,)))


def stranger(schedule: Schedule) -> Schedule:
    first, *rest = schedule.steps[0]
    return changed(schedule, 0, replace(first, source=(9,)), *rest)


def no_such_chunk(schedule: Schedule) -> Schedule:
    first, *rest = schedule.steps[0]
    return changed(schedule, 0, replace(first, chunk=4), *rest)


def chunk_twice(schedule: Schedule) -> Schedule:
    first, *rest = schedule.steps[0]
    return changed(schedule, 0, replace(first, also=(first.chunk,)), *rest)


FAULTS = {
    dropped: """(3,) ends without chunk 0 of (0,), (1,), (2,)
  schedule  all_reduce by ring over 4: 6 steps, 23 sends, 4 chunks
  holds     (3,)
  last      no send brings it there""",
    dropped_early: """(0,) ends without chunk 0 of (3,)
  schedule  all_reduce by ring over 4: 6 steps, 23 sends, 4 chunks
  holds     (0,), (1,), (2,)
  last      step 2, (1,) +> (0,) chunk 0""",
    doubled: """step 1, (3,) +> (2,) chunk 0: (2,) has chunk 0 of (3,) already: counted twice
  schedule  all_reduce by ring over 4: 7 steps, 28 sends, 4 chunks""",
    without_link: """step 0, (3,) +> (1,) chunk 0: no link joins (3,) to (1,)
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks
  fix       go by (3,) -> (0,) -> (1,)""",
    twice_on_a_link: """step 0, (3,) +> (2,) chunk 1: the link carries two sends in one step
  schedule  all_reduce by ring over 4: 6 steps, 25 sends, 4 chunks
  other     (3,) +> (2,) chunk 0""",
    wrong_destination: """(2,) ends without chunk 0 of (0,), (1,)
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks
  holds     (2,), (3,)
  last      step 0, (3,) +> (2,) chunk 0""",
    swapped: """(3,) ends without chunk 0 of (0,), (1,)
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks
  holds     (2,), (3,)
  last      step 4, (2,) -> (3,) chunk 0""",
    replaced_instead: """(0,) ends without chunk 0 of (2,)
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks
  holds     (0,), (1,), (3,)
  last      step 2, (1,) +> (0,) chunk 0""",
    written_twice: """step 5, (0,) -> (3,) chunk 0: chunk 0 at (3,) is written twice in one step
  schedule  all_reduce by ring over 4: 6 steps, 25 sends, 4 chunks
  other     (2,) -> (3,) chunk 0""",
    stranger: """step 0, (9,) +> (2,) chunk 0: (9,) is not in the group
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks""",
    no_such_chunk: """step 0, (3,) +> (2,) chunk 4: there is no chunk 4 of 4
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks""",
    chunk_twice: """step 0, (3,) +> (2,) chunks 0, 0: a chunk is in the message twice
  schedule  all_reduce by ring over 4: 6 steps, 24 sends, 4 chunks""",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_is_rejected_with_its_own_message(fault):
    prove(ring_of_four(), ring(4))
    with pytest.raises(ScheduleError) as caught:
        prove(fault(ring_of_four()), ring(4))
    assert str(caught.value) == FAULTS[fault]


def small(chosen: Algorithm) -> tuple[Fabric, Schedule]:
    return next((fabric, schedule) for fabric, schedule in fitting(chosen) if len(schedule.group) == 4)


@pytest.mark.parametrize("chosen", NAMES)
def test_no_send_of_any_algorithm_can_be_left_out(chosen):
    fabric, schedule = small(chosen)
    for number, step in enumerate(schedule.steps):
        for i in range(len(step)):
            with pytest.raises(ScheduleError):
                prove(changed(schedule, number, *step[:i], *step[i + 1 :]), fabric)


@pytest.mark.parametrize("chosen", NAMES)
def test_no_send_of_any_algorithm_can_copy_where_it_should_combine_or_the_reverse(chosen):
    fabric, schedule = small(chosen)
    for number, step in enumerate(schedule.steps):
        for i, send in enumerate(step):
            turned = replace(send, reduce=not send.reduce)
            with pytest.raises(ScheduleError):
                prove(changed(schedule, number, *step[:i], turned, *step[i + 1 :]), fabric)


@pytest.mark.parametrize("collective", MEANINGS)
def test_doing_nothing_proves_nothing(collective):
    _, schedule = small(algorithms_of(collective)[0])
    with pytest.raises(ScheduleError, match="ends without chunk"):
        check_contributions(replace(schedule, steps=()))


@pytest.mark.parametrize("collective", ["reduce_scatter", "gather", "scatter", "reduce", "broadcast", "all_gather"])
def test_the_right_steps_for_another_owner_or_root_are_wrong(collective):
    fabric, schedule = small(algorithms_of(collective)[0])
    other = replace(schedule, owners=schedule.owners[1:] + schedule.owners[:1]) if schedule.owners else None
    for wrong in filter(None, (other, replace(schedule, root=1) if collective in ROOTED else None)):
        with pytest.raises(ScheduleError):
            prove(wrong, fabric)


def test_two_messages_on_a_link_both_ways_wait_in_a_circle_with_one_buffer_each():
    a, b = (0,), (1,)
    both = tuple(Send(source, other, chunk) for source, other in ((a, b), (b, a)) for chunk in (0, 1))
    with pytest.raises(ScheduleError) as caught:
        check_credits(Schedule("all_gather", "eager", (a, b), 2, (both,), owners=(0, 1)))
    assert (
        str(caught.value)
        == """with one buffer per link, members wait in a circle
  schedule  all_gather by eager over 2: 1 steps, 4 sends, 2 chunks
  waits     (0,) waits for (1,) to take: step 0, (0,) -> (1,) chunk 1
            (1,) waits for (0,) to take: step 0, (1,) -> (0,) chunk 1"""
    )


def test_a_long_ring_of_messages_does_not_wait_in_a_circle():
    check_credits(ALGORITHMS["all_to_all", "ring"](ring(16).coordinates(), ring(16)), orders=20)


def test_memory_in_flight_is_reported_and_can_be_bounded():
    group, fabric = full(6).coordinates(), full(6)
    schedule = ALGORITHMS["reduce", "direct"](group, fabric)
    assert prove(schedule, fabric, limit=5).in_flight == 5
    with pytest.raises(ScheduleError) as caught:
        prove(schedule, fabric, limit=4)
    assert caught.value.headline == "step 0, (5,) +> (0,) chunk 0: 5 chunks are on their way to (0,) at once"
    assert prove(ALGORITHMS["all_reduce", "ring"](group, fabric), fabric).in_flight == 1


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"collective": "all_reduse"}, "'all_reduse' is not a collective with a meaning"),
        ({"group": ((0,), (0,), (1,), (2,))}, "a coordinate is in the group more than once"),
        ({"root": 4}, "root 4 is not a position in a group of 4"),
        ({"owners": (0, 1)}, "4 chunks have 2 owners"),
        ({"owners": (0, 1, 2, 7)}, "an owner is not a position in a group of 4"),
    ],
)
def test_a_schedule_whose_numbers_are_out_of_range_is_rejected(wrong, text):
    schedule = ALGORITHMS["all_gather", "ring"](ring(4).coordinates(), ring(4))
    with pytest.raises(ScheduleError) as caught:
        prove(replace(schedule, **wrong), ring(4))
    assert caught.value.headline == text


def test_an_all_to_all_with_other_owners_is_rejected():
    schedule = ALGORITHMS["all_to_all", "ring"](ring(3).coordinates(), ring(3))
    with pytest.raises(ScheduleError, match="goes from i to j"):
        prove(replace(schedule, owners=schedule.owners[::-1]), ring(3))


def test_a_schedule_error_is_ours_and_a_runtime_error():
    assert issubclass(ScheduleError, MeshloomError) and issubclass(ScheduleError, RuntimeError)


def test_reduces_that_meet_in_a_slot_fall_into_waves_in_the_order_of_the_step():
    (step,) = ALGORITHMS["reduce", "direct"](full(4).coordinates(), full(4)).steps
    assert list(waves(step)) == [(each,) for each in step]
    (step,) = ALGORITHMS["all_gather", "direct"](full(4).coordinates(), full(4)).steps
    assert list(waves(step)) == [step]


def test_the_cost_needs_a_size_per_chunk_and_links():
    schedule = ring_of_four()
    with pytest.raises(ArgumentError, match="3 sizes for 4 chunks"):
        cost(schedule, ring(4), [1, 2, 3])
    with pytest.raises(ScheduleError, match="no link joins"):
        cost(schedule, line(4), [1, 1, 1, 1])


def test_the_cost_is_counted_by_link_and_by_device():
    found = cost(ALGORITHMS["gather", "line"](line(3).coordinates(), line(3)), line(3), [5, 7, 11])
    assert found.links == {((1,), (0,)): 18, ((2,), (1,)): 11}
    assert (found.sent, found.received) == ({(1,): 18, (2,): 11}, {(0,): 18, (1,): 11})
    assert (found.steps, found.messages, found.bytes) == (2, 3, 22)


def test_a_slow_link_is_what_a_step_waits_for():
    slow = Link((0,), (1,), 5e-6, 1e8)
    links = [slow if (each.source, each.destination) == ((0,), (1,)) else each for each in ring(4).links]
    fabric = Fabric.of((4,), links)
    schedule = ALGORITHMS["all_gather", "ring"](fabric.coordinates(), fabric)
    assert math.isclose(cost(schedule, fabric, [100] * 4).seconds, 3 * slow.time(100))


# --- choosing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", MEANINGS)
@pytest.mark.parametrize("size", [1, 37, 1000, 100_000, 10_000_000])
def test_the_chosen_algorithm_is_the_fastest_of_all_that_fit(collective, size):
    uneven = Fabric.grid((3, 3), ("line", "ring"), (1e-6, 4e-6), (2e9, 1e9))
    for fabric in (line(5), ring(7), full(6), full(8), star(6), line(3, 4), ring(4, 4), uneven):
        for root in (0, fabric.size // 2) if collective in ROOTED else (0,):
            group = fabric.coordinates()
            every = candidates(collective, group, fabric, size, root=root)
            assert choose(collective, group, fabric, size, root=root) == every[0].algorithm
            times = [each.seconds for each in every]
            assert times == sorted(times) and times[0] < math.inf


def test_small_values_take_few_steps_and_large_ones_few_bytes():
    group = full(8).coordinates()
    assert choose("all_reduce", group, full(8), 64).name == "direct"
    assert choose("all_reduce", group, full(8), 1 << 24).name == "two_step"
    # Segments follow each other without waiting for latency, so on a line they pay at any size.
    assert choose("broadcast", line(16).coordinates(), line(16), 64).name == "pipeline"
    assert choose("broadcast", line(16).coordinates(), line(16), 1 << 24).name == "pipeline"
    assert choose("all_reduce", ring(8, 8).coordinates(), ring(8, 8), 64).name == "torus"
    assert choose("all_reduce", ring(8, 8).coordinates(), ring(8, 8), 1 << 24).name == "torus_split"


def test_a_broken_link_leaves_the_ring_out():
    fabric = ring(6).without((2,), (3,))
    assert choose("all_reduce", fabric.coordinates(), fabric, 1 << 20).needs == "line"
    with pytest.raises(FabricError, match="no ring joins these 6 coordinates"):
        algorithm("all_reduce", "ring")(fabric.coordinates(), fabric)


def test_members_that_no_links_join_are_refused_with_the_reason():
    with pytest.raises(FabricError) as caught:
        choose("all_gather", [(0,), (2,), (4,)], line(5), 100)
    assert caught.value.headline == "no algorithm for all_gather fits these links"
    assert caught.value.details["reason"] == "no way between (0,) and (2,) stays inside the group of 3"


def test_a_candidate_says_its_time_or_why_it_does_not_fit():
    *_, last = candidates("all_reduce", line(3).coordinates(), line(3), 3000)
    first = best("all_reduce", line(3).coordinates(), line(3), 3000)
    assert str(first) == "all_reduce by pipeline (line links): 5.50 us"
    assert str(last) == (
        "all_reduce by two_step (full links): does not fit: "
        "no link joins (0,) to (2,), and every two of 3 members need one"
    )


def test_unknown_names_list_the_closest():
    with pytest.raises(ArgumentError) as caught:
        choose("all_reduse", line(2).coordinates(), line(2), 8)
    assert str(caught.value).startswith(
        "'all_reduse' is not a collective with a schedule\n  fix  did you mean 'all_reduce'? known:"
    )
    with pytest.raises(ArgumentError) as caught:
        algorithm("gather", "rign")
    assert str(caught.value) == (
        "gather has no algorithm 'rign'\n  fix  did you mean 'ring'? known: 'ring', 'bidirectional_ring', 'line', "
        "'tree', 'direct', 'spanning_tree'"
    )


def test_a_root_outside_the_group_and_an_odd_number_to_halve_are_errors():
    with pytest.raises(ArgumentError, match="root 3 is not in a group of 3"):
        algorithm("broadcast", "line")(line(3).coordinates(), line(3), root=3)
    with pytest.raises(FabricError, match="needs a power of two of members, not 6"):
        algorithm("all_reduce", "halving_doubling")(full(6).coordinates(), full(6))


def test_one_member_alone_has_nothing_to_send():
    for chosen in ALGORITHMS.values():
        if not chosen.is_across:
            assert chosen(line(1).coordinates(), line(1)).sends == 0


def test_a_torus_of_1024_is_chosen_for_without_building_the_long_rings():
    fabric = ring(32, 32)
    found = best("all_reduce", fabric.coordinates(), fabric, 1 << 26)
    assert found.algorithm.name == "torus_split" and found.schedule is not None
    assert len(found.schedule.steps) == 64
