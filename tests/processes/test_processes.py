"""On real processes everything is as in one: ops, redistributions, training, random numbers, reading and writing.

A start of processes costs seconds, so each number of processes is started once and does all of its work together.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import ranks
from meshloom import Mesh
from meshloom.mesh import HERE
from meshloom.processes import divergence, join
from meshloom.processes.divergence import checksum
from process_cases import ALIASES, AWKWARD, EXPLAINED, FAULTS, FUNCTIONS, KINDS, REFUSED, SHARED, STYLES, WRITES, grids
from samples import SAMPLES
from test_optimizers import LAYOUTS, OPTIMIZERS
from test_random import DRAWS

TIMEOUT = 900.0  # a busy machine is no failure; what hangs is reported by the processes themselves
CASES = {2: 2000, 4: 2000, 3: 200, 8: 100}
PER_FORM = 42  # as many as it takes until each op was drawn with a dim that processes share
SHAPE = {2: (2, 4), 4: (2, 4), 3: (3, 2), 8: (2, 4)}  # of the mesh that is trained on
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
    8: [(((8,), (8,)), (9, 7), "sum")],
}


def per_op(count: int) -> int:
    return -(-CASES[count] // len(SAMPLES))


def names(count: int) -> list[str]:
    """The ops that run on so many processes: all of them, on 8 a third."""
    return sorted(SAMPLES)[:: 3 if count == 8 else 1]


@pytest.mark.slow
@pytest.mark.parametrize("count", CASES)
def test_ops_redistributions_training_and_autograd_are_those_of_one_process(count: int) -> None:
    work: list[Any] = [
        ("op_cases", (range(per_op(count)), names(count))),
        ("redistributions", (JOURNEYS[count],)),
        ("training", (SHAPE[count],)),
        ("accumulation", ()),
        ("autograd", ()),
    ]
    found = ranks.run(count, "process_cases:together", *work, timeout=TIMEOUT)
    assert all(each == found[0] for each in found)
    check_cases(found[0]["op_cases"], count)
    check_journeys(found[0]["redistributions"], count)
    assert found[0]["training"] == 4 * len(STYLES) * len(grids(count, [SHAPE[count]]))
    check_accumulation(found[0]["accumulation"])


def check_cases(ran: dict[str, int], count: int) -> None:
    """Every op that was asked for, and as many cases as were promised."""
    assert set(ran) == set(names(count))
    assert sum(ran.values()) >= CASES[count]


def check_journeys(found: Any, count: int) -> None:
    """Every pair of placements, and every collective on the way."""
    pairs, kinds = found
    assert pairs == sum(((2 + len(size)) ** len(shape)) ** 2 for (shape, _), size, _ in JOURNEYS[count])
    assert set(kinds) == set(KINDS)


def check_accumulation(found: Any) -> None:
    """Micro-batches reduce their losses alone, the backward after them makes one reduction of all parameters."""
    micro, last, step, micro_again, last_again, step_again, read = found
    assert micro == micro_again == [("all_reduce", 1)] * 3
    assert last == last_again == [("all_reduce", 1), ("all_reduce", 8 * 12 + 12 + 12 * 8 + 8)]
    assert step == step_again == read == []


@pytest.mark.slow
def test_ops_on_a_dim_that_processes_share_do_not_gather_it() -> None:
    found = ranks.run(2, "process_cases:shared_cases", range(PER_FORM), timeout=TIMEOUT)
    assert all(each == SHARED for each in found), f"never worked on a dim that processes share: {SHARED - found[0]}"


def test_ops_on_a_dim_that_processes_share_send_statistics_and_no_data() -> None:
    line = 8 * 16  # what is left of 64 x 8 x 16 elements without the dim that is worked on
    assert ranks.run(2, "process_cases:talk", timeout=TIMEOUT)[0] == {
        "batch_norm": 2 * 8,  # two sums per channel
        "group_norm": 2 * 64 * 2,  # two sums per group
        "rms_norm": 64 * 8,
        "std": 2 * line,
        "nanmean": 2 * line,
        "logsumexp": 3 * line,  # the maximum counts twice: as it is given, and as the integers that are sent
        "vector_norm": 1,
        "nll_loss": 2 * 64,
        "cumsum": line,
        "cummax": 2 * line,  # values and indices
        "topk": 2 * 2 * line,
        "searchsorted": 3,
        "index_select": 3 * line,
        "index": 3 * line,
        "index_put": 0,
        "scatter": 0,
        "tril": 0,
    }


def test_awkward_values_in_a_dim_that_processes_share_are_those_of_one_process() -> None:
    found = ranks.run(2, "process_cases:awkward", timeout=TIMEOUT)
    assert found == [(len(AWKWARD), len(REFUSED), len(EXPLAINED))] * 2


def test_views_of_a_plain_tensor_are_summed_up_once_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(divergence, "note", lambda text, line, ranks: told.append(text))
    monkeypatch.setattr(divergence, "checksum", lambda data: summed.append(data) or int(data.sum()))
    plain = torch.arange(12.0).reshape(3, 4)
    for _ in range(3):
        divergence.note_data("operand", plain[None, 1:])
        divergence.note_data("operand", plain[:, 0])
    assert len(summed) == 2 and told == told[:2] * 3
    plain[2, 0] += 1  # both views have it
    divergence.note_data("operand", plain[None, 1:])
    divergence.note_data("operand", plain[:, 0])
    assert len(summed) == 4 and not {*told[6:]} & {*told[:6]}


def test_the_checksum_of_one_element_is_that_of_its_value_whatever_its_stride() -> None:
    assert checksum(torch.arange(8)[4::8]) == checksum(torch.arange(8)[::4][1:]) == checksum(torch.tensor([4]))
    assert checksum(torch.arange(8)[::4][:1]) == checksum(torch.tensor([0]))


@pytest.mark.slow
def test_optimizers_random_values_reading_and_writing_are_those_of_one_process() -> None:
    work = [("optimizers", ()), ("randomness", ()), ("reading", ()), ("writing", ())]
    found = ranks.run(2, "process_cases:together", *work, timeout=TIMEOUT)
    for rank, each in enumerate(found):
        assert each["optimizers"] == len(OPTIMIZERS) * (len(LAYOUTS) - 1)  # a mesh of five cannot be halved
        assert each["randomness"] == len(DRAWS) * len(grids(2, [(2,), (2, 4), (4, 2)]))
        assert each["writing"] >= (len(FUNCTIONS) + len(WRITES) + len(ALIASES)) * (3 + 9 * 4)
        check_reading(rank, *each["reading"])


def check_reading(rank: int, shown: str, listed: Any, numbers: list[float], error: str) -> None:
    """Every rank reads the same, and a shard that another one holds is named."""
    assert shown.startswith(
        "Tensor f32[5, 2](S(0), P(sum)) on Mesh(dp=2, tp=2)\ntensor([[0., 1.],\n        [2., 3.],\n"
    )
    assert listed == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert numbers == [45.0, 45.0, 9.0, 45.0, 5.0, 7.0]
    assert error == f"the shard at {(1 - rank, 0)} is held by rank {1 - rank} and not by this one"


@pytest.mark.slow
def test_the_cases_catch_every_planted_fault() -> None:
    found = ranks.run(2, "process_cases:faults", range(12), timeout=TIMEOUT)
    for name in FAULTS:
        assert any(each[name] for each in found), f"{name} was not caught"


def test_meshes_are_split_along_one_axis_and_along_several() -> None:
    assert {((2, 4), (2, 2)), ((2, 4), (1, 4)), ((2, 2, 2), (2, 1, 2))} <= set(grids(4))
    for count in CASES:
        assert all(Mesh.of(shape, processes=grid).is_split for shape, grid in grids(count))
        assert {len(shape) for shape, _ in grids(count)} == {1, 2, 3}


def test_the_harness_tells_of_the_rank_that_failed_first() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed\n--- rank 1, ended with 1\n.*KeyError.*--- rank 0"):
        ranks.run(2, "test_processes:fail_on_one", timeout=TIMEOUT)


def fail_on_one() -> None:
    join()
    if HERE.rank == 1:
        raise KeyError("this one")
    time.sleep(600)


def test_the_harness_ends_ranks_that_do_not_end() -> None:
    with pytest.raises(AssertionError, match="2 did not end within 3 s"):
        ranks.run(2, "time:sleep", 600, timeout=3)
