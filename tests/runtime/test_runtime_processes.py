"""Cards of a mesh that several processes split: buffers, workloads, queues and events, as one process has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ranks
import runtime_rank_cases

COUNTS = (2, 4)


def check_same(found: Any, wanted: Any) -> None:
    """Raise unless both are the same to the bit."""
    assert type(found) is type(wanted) and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and torch.equal(one, other), (one, other)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("slow", [False, True])
def test_row_173_buffers_of_every_layout_are_read_as_in_one_process(count: int, slow: bool) -> None:
    wanted = runtime_rank_cases.transfers(slow)
    totals = dict.fromkeys(wanted["counts"], 0)
    for found in ranks.run(count, "runtime_rank_cases:transfers", slow):
        for name in runtime_rank_cases.LAYOUTS:
            check_same(found[name], wanted[name])
        totals = {name: total + found["counts"][name] for name, total in totals.items()}
    assert totals == wanted["counts"]  # every card was told once, by the process that holds it


@pytest.mark.parametrize("count", COUNTS)
def test_row_173_programs_on_ranges_run_where_the_devices_are(count: int) -> None:
    wanted = runtime_rank_cases.workloads()
    for found in ranks.run(count, "runtime_rank_cases:workloads"):
        check_same(found, wanted)


@pytest.mark.parametrize("count", COUNTS)
def test_all_processes_together_hold_a_buffer_once(count: int) -> None:
    whole = runtime_rank_cases.held()
    assert whole["bytes"] == 64 * 64 * 4
    places = [(row, column) for row in range(2) for column in range(4)]
    for rank, found in enumerate(ranks.run(count, "runtime_rank_cases:held")):
        mine = slice(rank * 8 // count, (rank + 1) * 8 // count)
        assert found["bytes"] == whole["bytes"] // count
        assert found["here"] == places[mine]
        assert found["ids"] == (list(range(8)), list(range(8))[mine])
        owner = 0 if rank else 1
        assert found["told"] == f"rank {owner} holds the device at {(0, 0) if rank else places[8 // count]}"


def test_finish_returns_when_all_processes_are_done() -> None:
    (first, returned), (last, _) = ranks.run(2, "runtime_rank_cases:finished")
    assert first < last <= returned


def test_cards_with_memory_of_their_own_are_opened_by_the_process_that_holds_them() -> None:
    wanted = runtime_rank_cases.own_memory()
    assert (wanted["opened"], wanted["told"]) == ([0, 1, 2, 3], "")
    for rank, found in enumerate(ranks.run(2, "runtime_rank_cases:own_memory")):
        assert found["opened"] == [[0, 1], [2, 3]][rank]
        check_same([found["x"]], [wanted["x"]])
        assert found["told"].startswith("MeshDevice(2x2, 4 devices) is split over processes, and its cards hold memory")
