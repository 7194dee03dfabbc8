"""On real processes everything is as in one: ops, redistributions, training, random numbers, reading and writing."""

from __future__ import annotations

import math
from typing import Any

import pytest

import ranks
from meshloom import Mesh
from process_cases import FAULTS, KINDS, STYLES, grids
from samples import SAMPLES

TIMEOUT = 900.0  # a busy machine is no failure; what hangs is reported by the processes themselves
PER_OP = -(-2000 // len(SAMPLES))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("count", "per_op"), [(2, PER_OP), (4, PER_OP), (3, 1), (8, 1)])
def test_every_op_equals_dense_on_every_grid_of_processes(count: int, per_op: int) -> None:
    found = ranks.run(count, "process_cases:op_cases", range(per_op), timeout=TIMEOUT)
    assert all(each == found[0] for each in found)
    assert set(found[0]) == set(SAMPLES)
    assert sum(found[0].values()) >= (2000 if count in (2, 4) else 200)


def test_meshes_are_split_along_one_axis_and_along_several() -> None:
    assert ((2, 4), (2, 2)) in grids(4) and ((2, 4), (1, 4)) in grids(4) and ((2, 2, 2), (2, 1, 2)) in grids(4)
    for count in (2, 3, 4, 8):
        assert all(Mesh.of(shape, processes=grid).is_split for shape, grid in grids(count))
        assert {len(shape) for shape, _ in grids(count)} == {1, 2, 3}


JOURNEYS: dict[int, list[Any]] = {
    2: [
        (((2,), (2,)), (5, 7), "sum"),
        (((4,), (2,)), (5, 7), "max"),
        (((4,), (2,)), (9, 3), "prod"),
        (((4,), (2,)), (3, 9), "min"),
        (((4,), (2,)), (9,), "mean"),
        (((2, 4), (1, 2)), (5, 7), "sum"),
        (((2, 4), (2, 1)), (11,), "sum"),
    ],
    4: [(((4,), (4,)), (5, 7), "sum"), (((2, 4), (1, 4)), (9,), "sum"), (((4, 4), (2, 2)), (5, 7), "sum")],
    3: [(((3,), (3,)), (5, 7), "sum"), (((3, 2), (3, 1)), (7,), "mean")],
}


@pytest.mark.parametrize("count", JOURNEYS)
def test_every_pair_of_placements_keeps_values_and_gradients(count: int) -> None:
    found = ranks.run(count, "process_cases:redistributions", JOURNEYS[count], timeout=TIMEOUT)
    pairs, kinds = found[0]
    assert all(each == found[0] for each in found)
    assert pairs == sum(((2 + len(size)) ** len(shape)) ** 2 for (shape, _), size, _ in JOURNEYS[count])
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize("count", [2, 4])
def test_every_optimizer_takes_the_same_steps(count: int) -> None:
    assert min(ranks.run(count, "process_cases:optimizers", timeout=TIMEOUT)) >= 22 * 4


@pytest.mark.parametrize(("count", "shape"), [(2, (2, 4)), (4, (2, 4)), (3, (3, 2)), (8, (2, 4))])
def test_training_is_that_of_one_process(count: int, shape: tuple[int, int]) -> None:
    compared = 4 * len(STYLES) * len(grids(count, [shape]))
    assert ranks.run(count, "process_cases:training", shape, timeout=TIMEOUT) == [compared] * count


def test_micro_batches_make_one_reduction_of_all_parameters() -> None:
    for micro, step, micro_again, step_again, read in ranks.run(2, "process_cases:accumulation", timeout=TIMEOUT):
        assert micro == micro_again == [("all_reduce", 1)] * 3  # the losses
        assert step == step_again == [("all_reduce", 8 * 12 + 12 + 12 * 8 + 8)]
        assert read == []


@pytest.mark.parametrize("count", [2, 3])
def test_autograd_is_that_of_one_process(count: int) -> None:
    ranks.run(count, "process_cases:autograd", timeout=TIMEOUT)


@pytest.mark.parametrize("count", [2, 4])
def test_random_values_are_those_of_one_process_bit_for_bit(count: int) -> None:
    assert min(ranks.run(count, "process_cases:randomness", timeout=TIMEOUT)) >= 13 * 4


def test_every_rank_reads_the_same_and_a_remote_shard_is_named() -> None:
    found = ranks.run(2, "process_cases:reading", timeout=TIMEOUT)
    told = "Tensor f32[5, 2](S(0), P(sum)) on Mesh(dp=2, tp=2)\ntensor([[0., 1.],\n        [2., 3.],\n"
    for rank, (shown, listed, numbers, error) in enumerate(found):
        assert shown.startswith(told)
        assert listed == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert numbers == [45.0, 45.0, 9.0, 45.0, 5.0, 7.0]
        assert error == f"the shard at {(1 - rank, 0)} is held by rank {1 - rank} and not by this one"


@pytest.mark.parametrize("count", [2, 4])
def test_writing_views_and_functions_without_a_rule_equal_dense(count: int) -> None:
    assert min(ranks.run(count, "process_cases:writing", timeout=TIMEOUT)) >= 300


@pytest.mark.parametrize("name", FAULTS)
def test_the_cases_catch_what_is_broken(name: str) -> None:
    patience = {"MESHLOOM_TIMEOUT": "60"}  # a fault may show on one rank, which the others then wait for
    said = ranks.run(2, "process_cases:fault", name, timeout=TIMEOUT, environment=patience)
    assert any("failed" in each for each in said), said


def test_the_harness_tells_of_the_rank_that_failed_first() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed\n--- rank 1, ended with 1\n.*KeyError.*--- rank 0"):
        ranks.run(2, "test_processes:fail_on_one", timeout=60)


def fail_on_one() -> None:
    import time

    from meshloom.backends import join
    from meshloom.mesh import HERE

    join()
    if HERE.rank == 1:
        raise KeyError("this one")
    time.sleep(math.inf if HERE.rank < 0 else 60)


def test_the_harness_ends_ranks_that_do_not_end() -> None:
    with pytest.raises(AssertionError, match="2 did not end within 8 s"):
        ranks.run(2, "test_processes:sleep_on", timeout=8)


def sleep_on() -> None:
    import time

    time.sleep(600)
