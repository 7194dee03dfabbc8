"""The simulator: closed formulas where links do not contend, queues where they do, and a trace that opens."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import ArgumentError, Machine, Mesh
from meshloom.collectives.algorithms import ALGORITHMS, Algorithm
from meshloom.collectives.jobs import Jobs, Wires, by_events, by_steps, read_schedule
from meshloom.collectives.schedule import Schedule, Send
from meshloom.errors import FabricError
from meshloom.fabric import Fabric, Link
from meshloom.observe.simulate import Simulation, compute_time, schedule_of, simulate, whole_size
from meshloom.ops import Call, Ref
from meshloom.planner import Plan, plan
from meshloom.runtime import Log

LATENCY, BANDWIDTH = 1e-6, 1e9


def ring_of(p: int, **named: object) -> Fabric:
    return Fabric.grid((p,), "ring", LATENCY, BANDWIDTH, **named)


def line_of(p: int) -> Fabric:
    return Fabric.grid((p,), "line", LATENCY, BANDWIDTH)


def schedule(*steps: tuple[Send, ...], chunks: int = 1, devices: int = 4) -> Schedule:
    return Schedule("made", "by_hand", tuple((i,) for i in range(devices)), chunks, steps)


def send(source: int, destination: int, chunk: int = 0, *also: int, reduce: bool = False) -> Send:
    return Send((source,), (destination,), chunk, reduce, also)


def ring_all_reduce(p: int) -> Schedule:
    """The ring as everybody writes it: chunk i - k leaves member i in step k, then i + 1 - k comes back."""
    around = [(i, (i + 1) % p) for i in range(p)]
    scatter = (tuple(send(a, b, (a - k) % p, reduce=True) for a, b in around) for k in range(p - 1))
    gather = (tuple(send(a, b, (a + 1 - k) % p) for a, b in around) for k in range(p - 1))
    return Schedule("all_reduce", "ring", tuple((i,) for i in range(p)), p, (*scatter, *gather))


def starts(made: Schedule, fabric: Fabric, size: int, barrier: bool = False) -> list[float]:
    """When each message starts, in microseconds, in the order of the schedule."""
    sends = read_schedule(made, Wires(fabric), size)
    return [round(each * 1e6, 6) for each in by_events(sends, barrier).tolist()]


# one message, one link


def test_a_message_takes_latency_plus_bytes_over_bandwidth():
    assert simulate(schedule((send(0, 1),)), line_of(2), 5000).time == pytest.approx(LATENCY + 5000 / BANDWIDTH)


def test_a_link_serves_one_message_at_a_time_and_the_next_does_not_wait_for_latency():
    found = simulate(schedule((send(0, 1, 0),), (send(0, 1, 1),), chunks=2), line_of(2), 4000)
    assert found.time == pytest.approx(2 * 2000 / BANDWIDTH + LATENCY)
    assert [(span.start, span.name) for span in found.events if "->" in span.track] == [
        (0.0, "chunk 0"),
        (pytest.approx(2e-6), "chunk 1"),
    ]


def test_two_directions_of_an_edge_do_not_hinder_each_other():
    found = simulate(schedule((send(0, 1, 0), send(1, 0, 1)), chunks=2), line_of(2), 4000)
    assert found.time == pytest.approx(LATENCY + 2000 / BANDWIDTH)


def test_several_sends_on_a_link_in_one_step_queue():
    found = simulate(schedule((send(0, 1, 0), send(0, 1, 1), send(0, 1, 2)), chunks=3), line_of(2), 3000)
    assert found.time == pytest.approx(3 * 1000 / BANDWIDTH + LATENCY)
    assert found.link((0,), (1,)).messages == 3


def test_the_slow_link_is_the_slow_one():
    there, back = Link((0,), (1,), 1e-6, 1e9), Link((1,), (0,), 3e-6, 1e8)
    fabric = Fabric.of((2,), [there, back])
    assert simulate(schedule((send(0, 1),)), fabric, 1000).time == pytest.approx(2e-6)
    assert simulate(schedule((send(1, 0),)), fabric, 1000).time == pytest.approx(13e-6)


# dependencies


def test_a_send_waits_for_the_last_write_to_what_it_reads():
    assert starts(schedule((send(0, 1),), (send(1, 2),)), line_of(3), 1000) == [0, 2]


def test_a_send_of_another_chunk_does_not_wait_for_the_step_before():
    made = schedule((send(0, 1, 0),), (send(1, 2, 1),), chunks=2)
    assert starts(made, line_of(3), 2000) == [0, 0]
    assert starts(made, line_of(3), 2000, barrier=True) == [0, 2]


def test_a_send_waits_for_every_contribution_to_what_it_reads():
    made = schedule((send(0, 1, reduce=True),), (send(2, 1, reduce=True),), (send(1, 0),))
    assert starts(made, Fabric.of((3,), [*line_of(2).links, *_slow_edge()]), 1000) == [0, 0, 11]


def test_a_send_does_not_wait_for_what_was_replaced():
    made = schedule((send(2, 1, reduce=True),), (send(0, 1),), (send(1, 0),))
    assert starts(made, Fabric.of((3,), [*line_of(2).links, *_slow_edge()]), 1000) == [0, 0, 2]


def _slow_edge() -> list[Link]:
    return [Link((1,), (2,), LATENCY, 1e8), Link((2,), (1,), LATENCY, 1e8)]


def test_a_send_of_several_chunks_waits_for_all_of_them_and_carries_their_bytes():
    made = schedule((send(0, 1, 0),), (send(0, 1, 1),), (send(1, 2, 0, 1),), chunks=2)
    assert starts(made, line_of(3), 2000) == [0, 1, 3]
    found = simulate(made, line_of(3), 2000)
    assert found.link((1,), (2,)).bytes == 2000 and found.time == pytest.approx(6e-6)
    assert "chunk 0 and others" in {span.name for span in found.events}


def test_sends_of_one_step_read_what_was_there_before_it():
    assert starts(schedule((send(0, 1), send(1, 2))), line_of(3), 1000) == [0, 0]


def test_a_link_serves_first_what_is_ready_first_and_not_what_stands_first():
    # chunk 0 comes to 1 over two slow hops, chunk 1 is at 1 from the start: it goes first, though it stands last
    made = schedule((send(0, 1, 0),), (send(1, 2, 0),), (send(1, 2, 1),), chunks=2)
    sends = read_schedule(made, Wires(line_of(3)), 2000)
    assert starts(made, line_of(3), 2000) == [0, 2, 0]
    assert by_steps(sends) is None


def test_an_empty_chunk_still_takes_its_latency():
    assert simulate(schedule((send(0, 1, 1),), chunks=2), line_of(2), 1).time == pytest.approx(LATENCY)


def test_chunks_are_ceil_sized_and_the_last_is_what_is_left():
    made = schedule(tuple(send(i, i + 1, i) for i in range(4)), chunks=4)
    found = simulate(made, line_of(5), 10)
    assert [found.link((i,), (i + 1,)).bytes for i in range(4)] == [3, 3, 3, 1]


# ports, packets, sums and starts


def switch_of(p: int, **named: object) -> Fabric:
    return Fabric.grid((p,), "switch", LATENCY, BANDWIDTH, **named)


def test_messages_to_several_at_once_share_the_port_of_their_source():
    to_three = schedule(tuple(send(0, i) for i in (1, 2, 3)))
    assert starts(to_three, switch_of(4), 1000) == [0, 1, 2]
    assert simulate(to_three, switch_of(4), 1000).time == pytest.approx(LATENCY + 3 * 1000 / BANDWIDTH)
    assert simulate(to_three, FABRICS["full"](4), 1000).time == pytest.approx(LATENCY + 1000 / BANDWIDTH)


def test_messages_from_several_at_once_share_the_port_of_their_destination():
    from_three = schedule(tuple(send(i, 0, reduce=True) for i in (1, 2, 3)))
    assert starts(from_three, switch_of(4), 1000) == [0, 0, 0]
    assert simulate(from_three, switch_of(4), 1000).time == pytest.approx(LATENCY + 3 * 1000 / BANDWIDTH)


def test_a_port_sends_and_receives_at_once_and_messages_that_change_places_do_not_wait():
    around = schedule(tuple(send(i, (i + 1) % 4) for i in range(4)))
    assert simulate(around, switch_of(4), 1000).time == pytest.approx(LATENCY + 1000 / BANDWIDTH)


def test_ports_of_two_axes_are_two():
    both = Schedule(
        "made", "by_hand", ((0, 0), (0, 1), (1, 0)), 1, ((Send((0, 0), (0, 1), 0), Send((0, 0), (1, 0), 0)),)
    )
    found = simulate(both, Fabric.grid((2, 3), "switch", LATENCY, BANDWIDTH), 1000)
    assert found.time == pytest.approx(LATENCY + 1000 / BANDWIDTH)


def test_what_is_on_its_way_through_a_switch_does_not_hold_up_its_source():
    # 1 and 2 send to 0 at once; 2 has to wait at the port of 0, and has sent to 3 meanwhile
    made = schedule((send(1, 0, 0, reduce=True), send(2, 0, 0, reduce=True), send(2, 3, 0)))
    found = {span.track: span.start for span in simulate(made, switch_of(4), 1000).events if "->" in span.track}
    assert found["(2,)->(3,)"] == pytest.approx(1e-6)


def test_sums_may_be_slower_than_copies_and_take_their_own_time():
    made = schedule((send(0, 1, reduce=True),), (send(1, 0),))
    slow = Fabric.grid((2,), "line", LATENCY, BANDWIDTH, combined=[BANDWIDTH / 2], combining=BANDWIDTH / 4)
    assert starts(made, slow, 1000) == [0, 7]  # 2 us on the link, 1 us of latency, 4 us to combine
    assert simulate(made, slow, 1000).time == pytest.approx(9e-6)


def test_combining_does_not_hold_up_the_link():
    made = schedule((send(0, 1, 0, reduce=True),), (send(0, 1, 1, reduce=True),), chunks=2)
    slow = Fabric.grid((2,), "line", LATENCY, BANDWIDTH, combining=BANDWIDTH)
    assert starts(made, slow, 2000) == [0, 1]


def test_latency_grows_with_the_size_up_to_a_full_packet():
    by_size = Fabric.grid((2,), "line", LATENCY, BANDWIDTH, packets=[(4000, 3e-6)])
    times = [simulate(schedule((send(0, 1),)), by_size, size).time for size in (0, 2000, 4000, 8000)]
    assert times == pytest.approx([1e-6, 4e-6, 7e-6, 11e-6])


def test_a_small_message_occupies_its_link_as_long_as_the_least_one():
    made = schedule(*((send(0, 1, i),) for i in range(4)), chunks=4)
    least = Fabric.grid((2,), "line", LATENCY, BANDWIDTH, least=1000)
    assert starts(made, least, 40) == [0, 1, 2, 3]
    assert simulate(made, least, 40).time == pytest.approx(5e-6)
    assert simulate(made, least, 8000).time == pytest.approx(9e-6)


def test_a_collective_starts_after_what_starting_takes():
    slow = ring_of(4, launch=5e-6)
    plain, late = (simulate(ring_all_reduce(4), fabric, 4000) for fabric in (ring_of(4), slow))
    assert late.time == pytest.approx(plain.time + 5e-6)
    assert min(span.start for span in late.events) == pytest.approx(5e-6)
    assert simulate(schedule(), slow, 4000).time == 0
    made = matmul("S(1)", "S(0)")
    assert simulate(made, slow).time == pytest.approx(simulate(made, ring_of(4)).time + 5e-6)


# closed formulas


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("size", [64, 10**5, 10**8])
def test_a_ring_all_reduce_takes_what_the_formula_says(p, size):
    size -= size % p
    expected = 2 * (p - 1) * LATENCY + 2 * (p - 1) / p * size / BANDWIDTH
    for barrier in (False, True):
        assert simulate(ring_all_reduce(p), ring_of(p), size, barrier=barrier).time == pytest.approx(expected, rel=1e-9)


FABRICS = {"ring": ring_of, "line": line_of, "full": lambda p: Fabric.grid((p,), "full", LATENCY, BANDWIDTH)}
EVEN = 2**8 * 3**3 * 5 * 7  # divides into the chunks of every group below


def predicted(line: Algorithm, group: tuple[tuple[int, ...], ...], size: int) -> float:
    """The published time of an algorithm: its steps times latency, and its bytes over bandwidth."""
    dims = line.dims(group)
    return line.formula.steps(*dims) * LATENCY + float(line.formula.bytes(Fraction(size), *dims)) / BANDWIDTH


@pytest.mark.parametrize("line", ALGORITHMS.values(), ids=str)
@pytest.mark.parametrize("size", [EVEN, 1000 * EVEN])
def test_every_algorithm_takes_what_its_formula_says(line, size):
    shapes = [(2, 4), (4, 4), (2, 3)] if line.is_across else [(2,), (4,), (8,), (5,)]
    ran = 0
    for shape in shapes:
        kinds = {"grid": "ring" if "torus" in line.name else "line", "any": "line", "levels": "full"}
        fabric = Fabric.grid(shape, kinds.get(line.needs, line.needs), LATENCY, BANDWIDTH)
        if "halving" in line.name and shape == (5,):
            continue  # partners at powers of two
        made = line(fabric.coordinates(), fabric)
        closed = predicted(line, fabric.coordinates(), size)
        in_steps, free = (simulate(made, fabric, size, barrier=barrier).time for barrier in (True, False))
        assert in_steps == pytest.approx(closed, rel=0.01) if line.exact else in_steps <= closed * 1.01
        assert free <= in_steps * (1 + 1e-9)
        ran += 1
    assert ran >= 3


# From the field's cost models: the same times without a barrier, since nothing contends.
CLOSED = {
    ("all_gather", "ring"): lambda p, a, t: (p - 1) * a + (p - 1) / p * t,
    ("reduce_scatter", "ring"): lambda p, a, t: (p - 1) * a + (p - 1) / p * t,
    ("all_reduce", "ring"): lambda p, a, t: 2 * ((p - 1) * a + (p - 1) / p * t),
    ("all_gather", "bidirectional_ring"): lambda p, a, t: p // 2 * (a + t / p),
    ("all_gather", "line"): lambda p, a, t: (p - 1) * a + (p - 1) / p * t,
    ("all_reduce", "halving_doubling"): lambda p, a, t: 2 * math.log2(p) * a + 2 * (p - 1) / p * t,
    ("all_reduce", "tree"): lambda p, a, t: 2 * math.log2(p) * (a + t),
    ("all_to_all", "direct"): lambda p, a, t: a + t / p**2,
}


@pytest.mark.parametrize("name", CLOSED, ids=" ".join)
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_the_cost_models_of_the_field_come_out_without_a_barrier(name, p):
    line = ALGORITHMS[name]
    fabric = FABRICS[line.needs](p)
    for size in (2**16, 2**26):
        closed = CLOSED[name](p, LATENCY, size / BANDWIDTH)
        assert simulate(line(fabric.coordinates(), fabric), fabric, size).time == pytest.approx(closed, rel=0.01)


def test_a_pipeline_of_chunks_along_a_line_overlaps_its_hops():
    p, chunks = 5, 40
    steps = tuple(
        tuple(send(i, i + 1, k - i) for i in range(p - 1) if 0 <= k - i < chunks) for k in range(chunks + p - 2)
    )
    found = simulate(schedule(*steps, chunks=chunks, devices=p), line_of(p), chunks * 10**6)
    piece = 10**6 / BANDWIDTH
    assert found.time == pytest.approx((p - 1) * LATENCY + (chunks + p - 2) * piece, rel=1e-9)
    assert found.utilisation > 0.9


# two ways, one result


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, Fabric, int]:
    """Sends between random neighbours: most are well-formed, some put two on a link or overtake."""
    p, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    chance = random.Random(draw(st.integers(0, 10**6)))
    rates = [chance.choice([1e8, 1e9]) for _ in range(2 * p)]
    pairs = [(i, (i + 1) % p) for i in range(p)] + [((i + 1) % p, i) for i in range(p)]
    links = {pair: Link((pair[0],), (pair[1],), chance.choice([0.0, 1e-6]), rates[n]) for n, pair in enumerate(pairs)}
    fabric = Fabric.of((p,), links.values(), switches=[0] if chance.random() < 0.3 else [])
    distinct = chance.random() < 0.7
    steps = []
    for _ in range(chance.randrange(8)):
        used = chance.sample(sorted(links), min(len(links), chance.randrange(4)))
        if not distinct and used:
            used = used + used[:1]
        steps.append(tuple(send(*pair, *_some(chance, chunks), reduce=chance.random() < 0.5) for pair in used))
    return schedule(*steps, chunks=chunks, devices=p), fabric, chance.randrange(5000)


def _some(chance: random.Random, chunks: int) -> list[int]:
    return chance.sample(range(chunks), chance.randint(1, chunks))


@settings(max_examples=300, deadline=None)
@given(schedules(), st.booleans())
def test_arrays_and_events_give_the_same_starts_to_the_last_bit(case, barrier):
    made, fabric, size = case
    sends = read_schedule(made, Wires(fabric), size)
    quick = by_steps(sends, barrier)
    if quick is not None:
        assert quick.tolist() == by_events(sends, barrier).tolist()
    slow = plainly(made, fabric, size, barrier)
    assert by_events(sends, barrier).tolist() == pytest.approx(slow)


def test_both_ways_are_taken_by_random_schedules():
    found = {True: 0, False: 0}

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(schedules())
    def count(case):
        found[by_steps(read_schedule(case[0], Wires(case[1]), case[2])) is None] += 1

    count()
    assert min(found.values()) >= 20


def plainly(made: Schedule, fabric: Fabric, size: int, barrier: bool) -> list[float]:
    """The model once more, by its words: again and again what is ready first takes its link, or the port it is at."""
    each = -(-size // made.chunks)
    flat = [(number, one) for number, step in enumerate(made.steps) for one in step]
    needs = [_needed(flat, row, barrier) for row in range(len(flat))]
    begin: dict[int, float] = {}
    arrive: dict[int, float] = {}
    free: dict[tuple[object, ...], float] = {}
    crossing: dict[int, float] = {}  # of what is in the switch: when its first byte is at the second port
    while len(arrive) < len(flat):
        open_rows = [row for row in range(len(flat)) if row not in begin and all(o in arrive for o in needs[row])]
        waiting = [(max((arrive[o] for o in needs[row]), default=0.0), row) for row in open_rows]
        ready, row = min([*waiting, *((when, row) for row, when in crossing.items())])
        one = flat[row][1]
        link = fabric.link(one.source, one.destination)
        carried = sum(max(0, min(each, size - chunk * each)) for chunk in one.chunks)
        if row in crossing:
            del crossing[row]
            enter = max(ready, free.get(("into", one.destination), 0.0))
            arrive[row] = free["into", one.destination] = enter + carried / link.bandwidth
            continue
        queue = ("out", one.source) if fabric.switches else (one.source, one.destination)
        begin[row] = max(ready, free.get(queue, 0.0))
        free[queue] = begin[row] + carried / link.bandwidth
        if fabric.switches:
            crossing[row] = begin[row] + link.latency
        else:
            arrive[row] = begin[row] + link.time(carried)
    return [begin[row] for row in range(len(flat))]


def _needed(flat: list[tuple[int, Send]], row: int, barrier: bool) -> list[int]:
    step, one = flat[row]
    earlier = [other for other in range(row) if flat[other][0] < step]
    if barrier:
        return earlier
    return [other for chunk in one.chunks for other in _writers(flat, earlier, one.source, chunk)]


def _writers(flat: list[tuple[int, Send]], earlier: list[int], place: object, chunk: int) -> list[int]:
    found: list[int] = []
    fresh = -1
    for other in earlier:
        step, one = flat[other]
        if one.destination == place and chunk in one.chunks:
            found = [*found, other] if one.reduce or fresh == step else [other]
            fresh = step
    return found


# what comes back


def test_a_simulation_has_bytes_and_utilisation_of_every_link():
    found = simulate(ring_all_reduce(4), ring_of(4), 4000)
    assert found.bytes == 4 * 6 * 1000
    forth, back = found.link((0,), (1,)), found.link((1,), (0,))
    assert (forth.messages, forth.bytes, back.messages, back.bytes) == (6, 6000, 0, 0)
    assert forth.busy == pytest.approx(6e-6) and forth.utilisation == pytest.approx(0.5)
    assert back.utilisation == 0 and found.utilisation == forth.utilisation
    assert len(found.links) == 8
    with pytest.raises(FabricError, match=r"no link joins \(0,\) and \(2,\)"):
        found.link((0,), (2,))


def test_a_simulation_is_a_value_and_cannot_change():
    first, second = (simulate(ring_all_reduce(4), ring_of(4), 4000) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != simulate(ring_all_reduce(4), ring_of(4), 4004)
    with pytest.raises(AttributeError):
        first.time = 0.0


def test_a_simulation_prints_its_time_and_the_busiest_links():
    assert str(simulate(ring_all_reduce(10), ring_of(10, name="round"), 10_000)).splitlines() == [
        "ring all_reduce of 10000 B over 10 devices on round: 36.000 us",
        "  link                 messages        bytes    busy us   used",
        *(f"  ({i},)->({i + 1},)                 18        18000     18.000    50%" for i in range(8)),
        "  and 2 other links, none busier",
        "  180000 B on 10 of 20 links",
    ]


def test_a_schedule_without_sends_takes_no_time():
    found = simulate(schedule((), ()), line_of(4), 100)
    assert found.time == 0 and found.bytes == 0 and found.events == ()
    assert str(found) == "by_hand made of 100 B over 4 devices: 0.000 us\n  0 B on 0 of 6 links"


# the timeline


def read_trace(found: Simulation, path) -> tuple[dict, dict, list]:
    """The names of processes, the names of tracks, and the spans of a written trace, checked for their form."""
    found.timeline(path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    processes, tracks, spans = {}, {}, []
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            assert event["name"] == "thread_name" and (event["pid"], event["tid"]) not in tracks
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 and event["name"]
            assert (event["pid"], event["tid"]) in tracks
            spans.append(event)
    return processes, tracks, spans


def check_apart(spans: list) -> None:
    """Spans of one track do not overlap."""
    ends: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda each: each["ts"]):
        place = span["pid"], span["tid"]
        assert span["ts"] >= ends.get(place, 0.0) - 1e-6, span
        ends[place] = span["ts"] + span["dur"]


def test_the_trace_has_a_track_per_device_and_link_and_a_span_per_message(tmp_path):
    found = simulate(ring_all_reduce(4), ring_of(4), 4000)
    processes, tracks, spans = read_trace(found, tmp_path / "trace.json")
    assert processes == {1: "devices", 2: "links"}
    assert sorted(name for (pid, _), name in tracks.items() if pid == 1) == ["(0,)", "(1,)", "(2,)", "(3,)"]
    assert {name for (pid, _), name in tracks.items() if pid == 2} == {
        f"{each.source}->{each.destination}" for each in found.links
    }
    messages = [span for span in spans if span["cat"] == "link"]
    assert len(messages) == 24 and all(span["args"]["bytes"] == 1000 for span in messages)
    assert {round(span["dur"], 6) for span in messages} == {1.0}
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(found.time * 1e6)
    assert [span["name"] for span in spans if span["cat"] == "device"] == ["ring all_reduce"] * 4
    check_apart(spans)


def test_a_device_has_more_lanes_where_its_spans_overlap(tmp_path):
    found = simulate(overlapping(), FAST_RING, compute=SLOW)
    _, tracks, spans = read_trace(found, tmp_path / "trace.json")
    assert "(0,) #2" in tracks.values()
    check_apart(spans)


def test_overlapping_spans_would_be_found():
    with pytest.raises(AssertionError):
        check_apart([{"pid": 1, "tid": 1, "ts": 0.0, "dur": 2.0}, {"pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}])


# size


@pytest.mark.slow
def test_a_ring_of_1024_devices_simulates_in_seconds():
    made, fabric = ring_all_reduce(1024), ring_of(1024)
    found = simulate(made, fabric, 2**20)
    assert found.time == pytest.approx(2046 * (LATENCY + 1024 / BANDWIDTH), rel=1e-9)
    assert found.bytes == 2046 * 2**20


def test_slots_are_numbered_anew_where_few_of_many_are_used(monkeypatch):
    made, fabric = ring_all_reduce(6), ring_of(6)
    expected = simulate(made, fabric, 999)
    monkeypatch.setattr("meshloom.collectives.jobs.DENSE", 0)
    assert simulate(made, fabric, 999) == expected


# errors


def test_a_send_without_a_link_is_refused_with_the_way_round():
    with pytest.raises(FabricError) as caught:
        simulate(schedule((send(0, 1),), (send(0, 1), send(0, 2))), line_of(3), 10)
    assert str(caught.value) == (
        "no link joins (0,) and (2,)\n"
        "  schedule  by_hand made, step 1: (0,) -> (2,) chunk 0\n"
        "  fabric    3 fabric (line) of 4 links\n"
        "  fix       send along the links: (0,) -> (1,) -> (2,)"
    )


def test_a_coordinate_that_is_not_on_the_fabric_is_refused():
    with pytest.raises(FabricError, match=r"^coordinate \(3,\) of the schedule is not on the fabric"):
        simulate(schedule((send(2, 3),)), line_of(3), 10)


def test_a_chunk_that_the_schedule_does_not_have_is_refused():
    with pytest.raises(ArgumentError, match=r"^a schedule of 2 chunks sends chunk 5"):
        simulate(schedule((send(0, 1, 0, 5),), chunks=2), line_of(3), 10)


@pytest.mark.parametrize("size", [None, -1])
def test_a_schedule_needs_a_size(size):
    with pytest.raises(ArgumentError) as caught:
        simulate(schedule(), line_of(4), size)
    assert str(caught.value) == (f"a schedule is simulated for a size in bytes, not {size}\n  fix  give size=2**20")


def test_a_stranger_and_a_fabric_that_is_none_are_refused():
    with pytest.raises(ArgumentError, match=r"^simulate takes a Schedule, a Plan, a Log or an Explanation, not 3"):
        simulate(3, line_of(2))
    with pytest.raises(ArgumentError, match=r"^simulate takes a Fabric, not 'ring'"):
        simulate(schedule(), "ring", 3)


def test_jobs_that_join_take_no_time():
    jobs = Jobs()
    first, second = jobs.add(0, (), busy=2.0), jobs.add(1, (), busy=3.0, delay=1.0)
    both = jobs.join([first, second])
    last = jobs.add(0, (both,), busy=1.0)
    start, arrive = jobs.run()
    assert (start[last], arrive[last]) == (4.0, 5.0)
    assert jobs.join([last]) == last


# plans and records

SLOW = Machine("slow", latency=LATENCY, bandwidth=BANDWIDTH, flops=1e9, memory_bandwidth=1e9)
FAST_RING = ring_of(4)


def matmul(first: str, second: str, size: int = 64, mesh: Mesh | None = None) -> Plan:
    mesh = mesh or Mesh(tp=4)
    a, b = (loom.parse(f"f32[{size}, {size}]({each}) on {mesh}") for each in (first, second))
    return plan(Call("matmul", (a, b), {"input": Ref(0), "other": Ref(1)}, ()), machine=SLOW)


def logged(*plans: Plan) -> Log:
    """A record of these calls, as dispatch writes it."""
    from meshloom.runtime import Event

    log = Log()
    for each in plans:
        log.note_call(each, "made.py:1")
        log.events += [Event(moved, each.call.op, "made.py:1") for moved in each.forward]
    return log


def overlapping() -> Log:
    """A matmul with an all-reduce, and one of other shapes that does not need it."""
    return logged(matmul("S(1)", "S(0)", 64), matmul("S(0)", "R", 96))


def alone(kind: str, size: int, fabric: Fabric = FAST_RING) -> float:
    """The time of the schedule that is chosen for the whole fabric."""
    return simulate(schedule_of(kind, fabric.coordinates(), fabric, size), fabric, size).time


def test_a_plan_that_moves_nothing_takes_what_the_planner_says():
    made = matmul("S(0)", "R")
    found = simulate(made, FAST_RING)
    assert found.time == pytest.approx(made.cost) and found.bytes == 0
    assert {(span.track, span.name) for span in found.events} == {(f"({i},)", "matmul") for i in range(4)}


def test_another_machine_computes_at_another_speed():
    made = matmul("S(0)", "R")
    quick = Machine("quick", latency=1, bandwidth=1, flops=1e12, memory_bandwidth=1e10)
    assert simulate(made, FAST_RING, compute=quick).time == pytest.approx(compute_time(made, quick))
    assert compute_time(made, quick) < compute_time(made, SLOW)


def test_a_reduction_follows_the_compute():
    made = matmul("S(1)", "S(0)")
    found = simulate(made, FAST_RING)
    assert found.time == pytest.approx(compute_time(made, SLOW) + alone("all_reduce", 64 * 64 * 4))
    spans = [span for span in found.events if span.track == "(0,)"]
    assert [span.name for span in spans] == ["matmul", "all_reduce over tp"]
    assert spans[1].start == pytest.approx(spans[0].duration)


def test_operands_are_moved_before_the_compute():
    with_gather = plan(
        Call("matmul", matmul("S(0)", "S(0)").call.operands, {"input": Ref(0), "other": Ref(1)}, ()),
        machine=SLOW,
        chosen={"tp": "m"},
    )
    assert [each.kind for each in with_gather.forward] == ["all_gather"]
    found = simulate(with_gather, FAST_RING)
    assert found.time == pytest.approx(compute_time(with_gather, SLOW) + alone("all_gather", 64 * 64 * 4))
    assert [span.name for span in found.events if span.track == "(1,)"] == ["all_gather over tp", "matmul"]


def test_independent_work_runs_beside_a_collective():
    first, second = matmul("S(1)", "S(0)", 64), matmul("S(0)", "R", 96)
    together = simulate(logged(first, second), FAST_RING).time
    parts = simulate(first, FAST_RING).time, simulate(second, FAST_RING).time
    assert max(parts) < together < sum(parts) * 0.999
    assert together == pytest.approx(compute_time(first, SLOW) + max(parts[1], alone("all_reduce", 64 * 64 * 4)))


def test_a_call_that_may_need_a_result_waits_for_it():
    first, second = matmul("S(1)", "S(0)", 64), matmul("S(0)", "R", 64)
    parts = simulate(first, FAST_RING).time, simulate(second, FAST_RING).time
    assert simulate(logged(first, second), FAST_RING).time == pytest.approx(sum(parts))


def test_groups_of_an_axis_run_side_by_side_on_their_own_links():
    fabric = Fabric.grid((2, 4), ("line", "ring"), LATENCY, BANDWIDTH)
    made = matmul("R, S(1)", "R, S(0)", mesh=Mesh(dp=2, tp=4))
    found = simulate(made, fabric)
    assert found.time == pytest.approx(compute_time(made, SLOW) + alone("all_reduce", 64 * 64 * 4))
    assert all(each.messages == 0 for each in found.links if each.source[0] != each.destination[0])


def test_a_mesh_lies_on_the_fabric_by_its_device_ids():
    made = matmul("S(1)", "S(0)", mesh=Mesh.of((2,), ("tp",), device_ids=(3, 2)))
    used = {(each.source, each.destination) for each in simulate(made, FAST_RING).links if each.messages}
    assert used == {((2,), (3,)), ((3,), (2,))}


def test_a_mesh_that_is_larger_than_the_fabric_is_refused():
    with pytest.raises(loom.MeshError) as caught:
        simulate(matmul("S(0)", "R", mesh=Mesh(tp=8)), FAST_RING)
    assert str(caught.value) == (
        "device 7 is not on a fabric of 4 devices\n"
        "  mesh    Mesh(tp=8)\n"
        "  fabric  4 fabric (ring) of 8 links\n"
        "  fix     simulate on a fabric of at least 8 devices"
    )


def test_a_plan_knows_its_sizes():
    with pytest.raises(ArgumentError, match=r"^a Plan knows its sizes"):
        simulate(matmul("S(0)", "R"), FAST_RING, 100)


def program():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x, w = loom.ones(16, 8, mesh=mesh, placements="S(0), S(1)"), loom.ones(8, 12, mesh=mesh, placements="R, S(0)")
    return lambda: (x @ w).relu().redistribute("R, S(0)").softmax(0)


TORUS = Fabric.grid((2, 4), "ring", LATENCY, BANDWIDTH)


def test_a_record_and_an_explanation_of_one_program_take_the_same_time():
    run = program()
    with loom.record() as log:
        run()
    told = loom.explain(run)
    first, second = simulate(log, TORUS), simulate(told, TORUS)
    assert first.time == second.time > 0 and first.links == second.links
    names = {span.name for span in first.events}
    assert {"matmul", "relu", "softmax", "all_reduce over tp", "all_gather over dp"} <= names
    assert first.title == f"3 calls, {len(log)} collectives"


def test_a_redistribution_waits_for_what_came_before_it_and_holds_up_what_follows():
    found = simulate(loom.explain(program()), TORUS)
    (relu,) = (span for span in found.events if (span.name, span.track) == ("relu", "(0, 0)"))
    (softmax,) = (span for span in found.events if (span.name, span.track) == ("softmax", "(0, 0)"))
    gathers = [span for span in found.events if (span.name, span.track) == ("all_gather over dp", "(0, 0)")]
    assert gathers and gathers[0].start >= relu.start + relu.duration
    assert softmax.start >= gathers[-1].start + gathers[-1].duration


def test_backward_is_in_the_record_and_in_the_time():
    mesh = loom.open_mesh((4,), axes=("dp",))
    x, w = loom.ones(16, 8, mesh=mesh), loom.Parameter(loom.ones(8, 8, mesh=mesh, placements="R"))

    def train():
        (x @ w).sum().backward()
        return w.grad

    with loom.record() as log:
        train()
    assert any(event.phase == "backward" for event in log)
    forward = Log([event for event in log if event.phase == "forward"], log.calls, marks=log.marks)
    assert simulate(log, FAST_RING).time > simulate(forward, FAST_RING).time


def test_a_function_without_a_rule_holds_up_what_follows():
    import torch

    x = loom.ones(16, 2, mesh=loom.open_mesh((4,), axes=("dp",)))
    log = loom.explain(lambda: torch.renorm(x.exp(), 2, 0, 1.0).sin()).log
    names = [span.name for span in simulate(log, FAST_RING).events if span.track == "(2,)"]
    assert names == ["exp", "all_gather over dp", "sin"]


def test_a_record_without_a_plan_needs_a_mesh():
    mesh = loom.open_mesh((4,), axes=("dp",))
    x = loom.ones(16, mesh=mesh)
    with loom.record() as log:
        x.to_torch()
    with pytest.raises(loom.MeshError) as caught:
        simulate(log, FAST_RING)
    assert str(caught.value) == "no mesh is known for all_gather over dp of 4: 48 B\n  fix  give mesh="
    assert simulate(log, FAST_RING, mesh=mesh).time == pytest.approx(alone("all_gather", 64))


def test_a_record_whose_events_are_lost_is_refused():
    log = logged(matmul("S(1)", "S(0)"))
    log.events.clear()
    with pytest.raises(ArgumentError, match=r"^the record has the call matmul at made\.py:1 without its collectives"):
        simulate(log, FAST_RING)


def test_a_record_that_does_not_say_when_its_calls_were_made_is_refused():
    log = Log()
    log.calls.append((matmul("S(0)", "R"), "made.py:1"))
    with pytest.raises(ArgumentError, match=r"^the record does not say when its calls were made"):
        simulate(log, FAST_RING)


@pytest.mark.parametrize("kind", ["shift", "send_recv"])
def test_a_point_to_point_collective_goes_to_the_next_member_along_the_links(kind):
    made = schedule_of(kind, ((0,), (2,), (1,)), line_of(3), 300)
    assert [[str(each) for each in step] for step in made.steps] == [
        ["(0,) -> (1,) chunk 0", "(2,) -> (1,) chunk 1", "(1,) -> (0,) chunk 2"],
        ["(1,) -> (2,) chunk 0"],
    ]
    assert simulate(made, line_of(3), 3000).time == pytest.approx(2 * (LATENCY + 1000 / BANDWIDTH))


def test_literal_collectives_of_a_record_are_simulated_with_the_bytes_they_say():
    mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    x = loom.ones(16, 8, mesh=mesh, placements="S(0), S(1)")
    with loom.record() as log:
        loom.collectives.all_reduce(x)
        loom.collectives.all_gather(x, 0, "dp")
        loom.collectives.broadcast(x, 0, "tp")
        loom.collectives.shift(x, 1, "tp")
    square = Fabric.grid((2, 2), "line", LATENCY, BANDWIDTH)
    found = simulate(log, square, mesh=mesh)
    names = [span.name for span in found.events if span.track == "(0, 0)"]
    assert names == ["all_reduce over dp,tp", "all_gather over dp", "broadcast over tp", "shift over tp"]
    assert found.bytes > 0


def test_an_empty_record_takes_no_time():
    assert simulate(Log(), FAST_RING).time == 0


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_whole_of_a_collective_is_found_from_what_a_device_receives(kind, p):
    from meshloom.collectives import KINDS, Collective

    whole = 240
    before, after = {"all_gather": (whole // p, whole), "reduce_scatter": (whole, whole // p)}.get(kind, (whole, whole))
    assert whole_size(Collective(kind, "tp", p, KINDS[kind].size(before, after, p), "f32", ())) == whole


def test_simulating_does_not_import_torch():
    code = (
        "from meshloom import simulate\nfrom meshloom.fabric import Fabric\n"
        "from meshloom.collectives.schedule import Schedule, Send\n"
        "fabric = Fabric.grid((2,), 'line', 1e-6, 1e9)\n"
        "simulate(Schedule('s', 'a', ((0,), (1,)), 1, ((Send((0,), (1,), 0),),)), fabric, 9)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
