"""Memory over a step: sums of what is alive, the peak, and the error that names it."""

from __future__ import annotations

import math

import pytest

import meshloom as loom
from meshloom.observe.memory_use import measure
from refusals import refusal
from step_graphs import graph, node, storage

STORAGES = [
    storage(0, 100, -1, None, "parameters"),
    storage(1, 30, 0, 2, "activations"),
    storage(2, 50, 1, 1),
    storage(3, 20, 2, None, "gradients"),
]
NODES = [node(i) for i in range(4)]


def test_the_peak_is_the_most_that_is_alive_during_one_kernel():
    found = measure(graph(NODES, STORAGES), None, {})
    assert [point.bytes for point in found.timeline] == [130, 180, 150, 120]
    assert found.peak == 180 and found.node is NODES[1] and found.where == "made.py:1"
    assert {what: size for what, size in found.at_peak.items() if size} == {
        "parameters": 100, "activations": 30, "temporaries": 50
    }  # fmt: skip
    assert [each.number for each in found.alive] == [0, 2, 1]
    assert found.peaks["gradients"] == 20 and found.peaks["temporaries"] == 50


def test_a_node_of_several_kernels_has_its_own_peak_and_a_time():
    nodes = [node(0, kernel_range=(0, 3)), node(1, kernel_range=(3, 4))]
    found = measure(graph(nodes, STORAGES, kernels=4), None, {0: 0.0, 1: 2.5})
    assert [(point.bytes, point.time) for point in found.timeline] == [(180, 0.0), (120, 2.5)]


def test_what_is_too_much_is_an_error_that_names_the_line_and_the_largest_tensors():
    found = measure(graph(NODES, STORAGES), 150, {})
    assert refusal(found.check, loom.OutOfMemoryError) == (
        "one device needs 180 B and has 150 B: op1 at made.py:1\n"
        "  held     parameters 100 B, activations 30 B, temporaries 50 B\n"
        "  largest      100 B  storage 0 (parameters, made at made.py:-1)\n"
        "                50 B  storage 2 (temporaries, made at made.py:1)\n"
        "                30 B  storage 1 (activations, made at made.py:0)\n"
        "  fix      shard parameters over more devices; dry_run(memory=math.inf) looks at the step without a limit"
    )


@pytest.mark.parametrize("limit", [180, math.inf, None])
def test_what_fits_is_no_error(limit):
    measure(graph(NODES, STORAGES), limit, {}).check()


def test_a_step_of_nothing_has_no_memory():
    found = measure(graph([]), None, {})
    assert (found.peak, found.node, found.timeline) == (0, None, ())
