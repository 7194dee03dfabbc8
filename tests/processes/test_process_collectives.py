"""Literal collectives between real processes: what one process gives, in every mode, gradients included."""

from __future__ import annotations

import pytest

import ranks
from collective_cases import FAULTS, NAMES

PER_NAME = 25
MODES = ("direct", "host", "fabric")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 4])
def test_processes_give_what_one_process_gives(count: int, mode: str) -> None:
    first, *others = ranks.run(count, "collective_cases:cases", (mode,), PER_NAME, timeout=240)
    assert all(other == first for other in others)
    assert sum(first.values()) == PER_NAME * len(NAMES)
    assert first[mode, "tracked, crossing"] > 60 and first[mode, "plain, crossing"] > 60
    assert first[mode, "refused"] < 60


@pytest.mark.parametrize(
    ("fault", "mode", "names"),
    [
        ("members are not put in order", "direct", ("all_gather",)),
        ("gradients of what is held alike are not summed", "direct", ("all_reduce",)),
        ("chunks are cut by what one process holds", "fabric", ("all_reduce", "reduce_scatter")),
        ("the last step is left out", "fabric", ("broadcast",)),
    ],
)
def test_a_planted_fault_is_caught(fault: str, mode: str, names: tuple[str, ...]) -> None:
    assert fault in FAULTS
    with pytest.raises(AssertionError, match=rf"case\('{mode}', '({'|'.join(names)})'"):
        ranks.run(2, "collective_cases:cases_with", fault, mode, names, timeout=120)


@pytest.mark.parametrize("count", [2, 4])
def test_a_collective_over_an_axis_that_crosses_is_one_round_of_torch(count: int) -> None:
    for found in ranks.run(count, "collective_cases:calls_of_each"):
        assert found == {
            "all_reduce": ["alltoall_base"],  # of little: one round, where Gloo's own takes several
            "all_gather": ["alltoall_base"],
            "reduce_scatter": ["alltoall_base"],
            "all_to_all": ["alltoall_base"],
            "broadcast": ["broadcast"],
            "reduce": ["alltoall_base"],
            "gather": ["alltoall_base"],
            "scatter": ["alltoall_base"],
            "send_recv": ["alltoall_base"],
            "shift": ["alltoall_base"],
            "all_reduce over b, then over both": ["alltoall_base"],
            "all_reduce of much": ["allreduce"],
            "all_gather of much": ["broadcast"] * count,  # at once, each into its place; Gloo's own copies all of it
        }


@pytest.mark.parametrize("kind", ["line", "ring"])
def test_messages_go_only_where_links_are(kind: str) -> None:
    results = ranks.run(4, "collective_cases:peers", kind)
    for found in results:
        assert found["calls"] == {"send", "recv"}
        assert found["peers"] == found["linked"]
        assert found["sums"] == results[0]["sums"]
    assert results[0]["linked"] == ({1} if kind == "line" else {1, 3})


def test_explaining_a_collective_asks_no_other_process() -> None:
    assert ranks.run(2, "collective_cases:explained_alone") == [
        ["all_reduce 192", "all_reduce (host) 192", "all_reduce (fabric) 192"],
        [],
    ]


def test_asynchronous_collectives_under_stress_give_what_one_process_gives() -> None:
    assert ranks.run(2, "collective_cases:stressed", (0, 1, 2)) == [[True] * 3] * 2


@pytest.mark.parametrize("mode", ["direct", "fabric"])
def test_a_rank_that_stays_away_is_reported_by_all(mode: str) -> None:
    told = ranks.run(2, "collective_cases:lost", mode, timeout=40)
    assert "has waited longer than 3 s" in told[0] and "all_reduce" in told[0] and "collective_cases.py" in told[0]
    assert "waited longer than 3 s" in told[1]
