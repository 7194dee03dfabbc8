"""Time on one device: program order, links beside it, what hides what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshloom.comms import scatters
from meshloom.comms.deferred import LARGE
from meshloom.fabric import preset
from meshloom.observe.timing import SCATTERED_TOGETHER, SMALL, TOGETHER, UNDER_WAY, time_step
from step_graphs import SECONDS, collective, graph, node


def spans(timing, stream=None):
    return [
        (each.node, round(each.start, 3), round(each.end, 3))
        for each in timing.slices
        if stream is None or each.stream == stream
    ]


def test_nodes_compute_one_after_the_other():
    timing = time_step(graph([node(0, 2), node(1, 3), node(2, 1)]), SECONDS)
    assert spans(timing) == [(0, 0, 2), (1, 2, 5), (2, 5, 6)]
    assert (timing.time, timing.compute, timing.exposed) == (6, 6, 0)


def test_who_reads_a_reduced_result_waits_and_who_does_not_goes_on():
    nodes = [
        node(0, 1, after=(collective(4),), writes=(7,)),
        node(1, 2, reads=(3,)),
        node(2, 1, reads=(7,)),
    ]
    timing = time_step(graph(nodes), SECONDS)
    assert spans(timing, "compute") == [(0, 0, 1), (1, 1, 3), (2, 5, 6)]
    assert spans(timing, "communication") == [(0, 1, 5)]
    (moved,) = [each for each in timing.slices if each.stream == "communication"]
    assert moved.exposed == pytest.approx(2) and timing.exposed == pytest.approx(2)


def test_without_overlap_everything_is_in_a_row():
    nodes = [node(0, 1, after=(collective(4),), writes=(7,)), node(1, 2, reads=(3,))]
    timing = time_step(graph(nodes), SECONDS, overlap=False)
    assert spans(timing) == [(0, 0, 1), (0, 1, 5), (1, 5, 7)]
    assert timing.exposed == pytest.approx(4)


def test_collectives_of_one_axis_queue_and_those_of_two_do_not():
    def both(axis: str):
        first = node(0, 1, after=(collective(4, "tp"),), writes=(0,))
        return time_step(graph([first, node(1, 1, after=(collective(4, axis),), writes=(1,))]), SECONDS)

    assert spans(both("tp"), "communication") == [(0, 1, 5), (1, 5, 9)]
    assert spans(both("dp"), "communication") == [(0, 1, 5), (1, 2, 6)]


@pytest.mark.parametrize(("machine", "take_turns"), [("nvlink8", True), ("galaxy", False)])
def test_axes_behind_one_port_take_turns_and_those_with_links_of_their_own_do_not(machine, take_turns):
    nodes = [node(i, 1, after=(collective(1 << 30, axis),), writes=(i,)) for i, axis in enumerate(("dp", "tp"))]
    timing = time_step(graph(nodes), preset(machine).machine())
    first, second = (each for each in timing.slices if each.stream == "communication")
    assert (second.start >= first.end) is take_turns


def test_an_operand_is_brought_ahead_by_one_node():
    nodes = [node(i, 3, before=(collective(2),), before_of=(i,), reads=(i,)) for i in range(3)]
    timing = time_step(graph(nodes), SECONDS)
    assert spans(timing, "communication") == [(0, 0, 2), (1, 2, 4), (2, 5, 7)]
    assert spans(timing, "compute") == [(0, 2, 5), (1, 5, 8), (2, 8, 11)]


def test_sums_of_gradients_run_beside_the_rest_of_backward():
    total = collective(3, "dp")
    nodes = [
        node(0, 1, phase="backward", writes=(0,)),
        node(1, 5, phase="backward", writes=(1,)),
        node(2, 0, phase="backward", reads=(0,), writes=(0,), after=(total,), is_gradient_sum=True),
        node(3, 0, phase="backward", reads=(1,), writes=(1,), after=(total,), is_gradient_sum=True),
        node(4, 1, phase="optimizer", reads=(0, 1)),
    ]
    timing = time_step(graph(nodes), SECONDS)
    assert spans(timing, "communication") == [(2, 1, 4), (3, 6, 9)]
    assert spans(timing, "compute")[-1] == (4, 9, 10)
    assert timing.exposed == pytest.approx(3)


def test_a_collective_that_comes_later_in_the_program_takes_an_earlier_gap():
    nodes = [
        node(0, 1, phase="backward", writes=(0,)),
        node(1, 9, phase="backward", after=(collective(2, "dp"),), writes=(1,)),
        node(2, 0, phase="backward", reads=(0,), writes=(0,), after=(collective(3, "dp"),), is_gradient_sum=True),
    ]
    assert spans(time_step(graph(nodes), SECONDS), "communication") == [(2, 1, 4), (1, 10, 12)]


def test_what_is_small_is_what_the_runtime_sends_together():
    assert SMALL == LARGE
    assert (SCATTERED_TOGETHER, TOGETHER, UNDER_WAY) == (scatters.SMALL, scatters.TOGETHER, scatters.MOST)


def scatter(number: int, seconds: int, of: int, elements: int = 1 << 20):
    moved = replace(collective(seconds, "dp", (elements,)), kind="reduce_scatter", op="sum")
    return node(number, 0, phase="backward", reads=(of,), writes=(of,), after=(moved,), is_gradient_sum=True)


def test_a_gradient_is_scattered_while_backward_goes_on_and_the_end_of_the_pass_waits():
    nodes = [
        node(0, 1, phase="backward", writes=(0,)), scatter(1, 4, 0), node(2, 2, phase="backward", reads=(9,)),
        node(3, 1, phase="optimizer", reads=(9,)),
    ]  # fmt: skip
    timing = time_step(graph(nodes), SECONDS)
    (moved,) = [each for each in timing.slices if each.stream == "communication"]
    assert spans(timing, "compute")[:2] == [(0, 0, 1), (2, 1, 3)]
    assert moved.start == 1 and spans(timing, "compute")[2][1] == pytest.approx(moved.end, abs=1e-3)


def test_who_starts_a_third_scatter_waits_for_the_first():
    nodes = [
        each for i in range(4) for each in (node(2 * i, 1, phase="backward", writes=(i,)), scatter(2 * i + 1, 8, i))
    ]
    timing = time_step(graph(nodes), SECONDS)
    ends = [each.end for each in timing.slices if each.stream == "communication"]
    starts = [each.start for each in timing.slices if each.stream == "compute"]
    assert starts[:3] == [0, 1, 2] and starts[3] == pytest.approx(ends[0])


def test_small_gradients_are_scattered_together_at_the_end_of_the_pass():
    nodes = [
        each for i in range(3) for each in (node(2 * i, 1, phase="backward", writes=(i,)), scatter(2 * i + 1, 1, i, 9))
    ]
    timing = time_step(graph([*nodes, node(6, 1, phase="optimizer", reads=(0,))]), SECONDS)
    (moved,) = [each for each in timing.slices if each.stream == "communication"]
    assert (moved.name, moved.start) == ("reduce_scatter of 3 small gradients", 3)


def test_the_first_of_a_pass_is_not_brought_ahead():
    nodes = [
        node(0, 3, before=(collective(2),), before_of=(0,), reads=(0,)), node(1, 4, phase="backward"),
        node(2, 1, phase="backward", before=(collective(2),), before_of=(0,), reads=(0,)),
        node(3, 1, phase="backward", before=(collective(2),), before_of=(1,), reads=(1,)),
    ]  # fmt: skip
    assert spans(time_step(graph(nodes), SECONDS), "communication") == [(0, 0, 2), (2, 9, 11), (3, 11, 13)]


def test_small_gradients_travel_together():
    small = collective(1, "dp", shape=(SMALL - 1,))
    nodes = [node(i, 1, phase="backward", writes=(i,)) for i in range(3)]
    nodes += [
        node(3 + i, 0, phase="backward", reads=(i,), writes=(i,), after=(small,), is_gradient_sum=True)
        for i in range(3)
    ]
    timing = time_step(graph(nodes), SECONDS)
    (moved,) = [each for each in timing.slices if each.stream == "communication"]
    assert (moved.name, moved.bytes) == ("broadcast of 3 small gradients", 3)
    assert (moved.start, moved.end) == (3, pytest.approx(6))


def test_waits_are_shared_by_the_collectives_that_are_under_way():
    nodes = [
        node(0, 1, after=(collective(4, "tp"),), writes=(0,)),
        node(1, 0, after=(collective(2, "dp"),), writes=(1,)),
        node(2, 1, reads=(0, 1)),
    ]
    timing = time_step(graph(nodes), SECONDS)
    exposed = {each.axis: each.exposed for each in timing.slices if each.axis}
    assert exposed == {"tp": pytest.approx(3.5), "dp": pytest.approx(0.5)}  # dp runs from 0 to 2, compute from 0 to 1
    assert sum(exposed.values()) == pytest.approx(timing.exposed)
