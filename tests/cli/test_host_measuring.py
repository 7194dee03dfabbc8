"""What is made of times on a machine that is not quiet: the clock is made up, so the truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.cli import calibrate, host_measuring, measuring
from meshloom.cli.host_measuring import (
    BETWEEN,
    CALL,
    FULL,
    QUICK,
    Point,
    Readings,
    _copy,
    _curve,
    _sizes_sent,
    read_points,
    read_readings,
    read_tables,
    write_readings,
)
from meshloom.cli.measuring import PASSES, repeats, time_for, typical
from meshloom.comms.wire import SMALL
from meshloom.fabric.host import load_host
from meshloom.mesh.process import HERE
from meshloom.tensor.host_time import LARGEST_PAGE, MEMORY, PAGE, page_faults

KERNELS = [2e-6 * 1.7**number for number in range(12)]  # seconds, undisturbed


class Clock:
    """A clock that only work moves on, as far as `slowness` says at that moment."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.slowness = 0.0, slowness

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * self.slowness(self.now)


@pytest.fixture
def start(monkeypatch: Any) -> Callable[[Callable[[float], float]], Clock]:
    """Start a clock that the measuring reads."""

    def begin(slowness: Callable[[float], float]) -> Clock:
        clock = Clock(slowness)
        monkeypatch.setattr(measuring, "time", clock)
        return clock

    return begin


def read(clock: Clock, seconds: float = 0.01) -> dict[Any, float]:
    points = [
        Point("kernels", each, lambda each=each: (lambda: clock.work(each), each * 1e9), seconds)  # type: ignore[misc]
        for each in KERNELS
    ]
    return {place: found for place, (found, _) in read_points(points, lambda *told: None)["kernels"].items()}


def jitter(best: float) -> Callable[[float], float]:
    """Calls of which a small part come near their best time, as those of two threads on cores that are not idle."""
    drawn = random.Random(0)
    return lambda now: 1.0 if drawn.random() < best else 1.2 + abs(drawn.gauss(0, 0.2))


def test_a_step_takes_the_sum_of_what_its_kernels_take_also_where_few_calls_are_near_their_best(start: Any) -> None:
    clock = start(jitter(best=0.03))
    alone = sum(read(clock).values())

    def step() -> None:
        for each in KERNELS * 20:
            clock.work(each)

    took = min(time_for(step, 1.0) for _ in range(PASSES))
    assert 20 * alone == pytest.approx(took, rel=0.05)
    assert 20 * sum(KERNELS) < 0.8 * took  # the best times, each of which is met in many calls, say too little


def test_a_disturbance_during_one_pass_leaves_no_trace(start: Any) -> None:
    undisturbed = start(lambda now: 1.0)
    assert read(undisturbed) == pytest.approx({each: each for each in KERNELS})
    end = undisturbed.now
    for first in (0.0, 0.2, 0.5, 0.9):
        disturbed = start(lambda now, first=first: 7.0 if first * end < now < first * end + 0.3 * end else 1.0)
        assert read(disturbed) == pytest.approx({each: each for each in KERNELS}), first


def test_a_point_that_does_not_repeat_is_timed_again(start: Any) -> None:
    clock, times = start(lambda now: 1.0), [5.0, 3.0, 2.0, 1.0, 1.0, 9.0]
    taken = iter(times)

    def make() -> tuple[Callable[[], None], float]:
        seconds = next(taken)
        return lambda: clock.work(seconds), 1.0

    found = read_points([Point("kernels", 0, make, 0.01)], lambda *told: None)
    assert found == {"kernels": {0: (pytest.approx(1.0), 1.0)}}
    assert [*taken] == times[5:]  # it was met twice then


def test_one_call_of_ten_may_be_held_up() -> None:
    assert typical([2.0] * 18 + [50.0, 90.0]) == 2.0
    assert typical([2.0, 4.0]) == 3.0  # of few calls none is left out
    assert not repeats([1.0, 1.2]) and repeats([1.2, 1.0, 1.01])


def test_what_memory_from_the_system_cost_is_taken_off(start: Any, monkeypatch: Any) -> None:
    clock, faults = start(lambda now: 1.0), 0
    monkeypatch.setattr("meshloom.cli.host_measuring.page_faults", lambda: faults)

    def fresh(pages: int) -> Any:
        def run() -> None:
            nonlocal faults
            faults += pages
            clock.work(1e-4 + pages * 1e-6)

        return lambda: (run, float(max(pages, 1) * PAGE))

    points = [Point(MEMORY, "fresh", fresh(400), 0.01), Point(MEMORY, "there", fresh(0), 0.01)]
    found = read_points([*points, Point("copy", 1, fresh(100), 0.01)], lambda *told: None)
    assert found["copy"][1][0] == pytest.approx(1e-4)
    assert found[MEMORY]["fresh"][0] == pytest.approx(5e-4)


def test_sizes_that_come_to_the_same_bytes_are_one_point_of_a_curve() -> None:
    assert _curve({1: (3.0, 64.0), 2: (2.0, 64.0), 3: (5.0, 128.0)}).points == ((64.0, 2.0), (128.0, 5.0))


@pytest.mark.parametrize("is_there", [True, False])
def test_memory_from_the_system_is_given_anew_every_time_whatever_the_heap_holds(is_there: bool) -> None:
    run, size = _copy(48 << 20, is_there)
    run()
    holes = [torch.ones(20 << 18) for _ in range(8)]  # once free, they may stay in the heap
    del holes
    for _ in range(3):
        before = page_faults()
        run()
        assert ((page_faults() - before) * LARGEST_PAGE < size) == is_there


def test_no_size_lies_between_two_that_are_reduced_in_different_ways(monkeypatch: Any) -> None:
    for count in (2, 3, 4):
        monkeypatch.setattr(HERE, "count", count)
        sizes = _sizes_sent("all_reduce", FULL)
        sent = [size // 4 // count * count * 4 for size in sizes]  # as it is given: whole numbers of elements for each
        (change,) = [b - a for a, b in pairwise(sent) if a * count <= SMALL < b * count]
        assert change <= 8 * count
        assert {*sizes} > {*FULL.sent} and _sizes_sent("all_gather", FULL) == [*FULL.sent]
        assert _sizes_sent("all_reduce", QUICK) == [*QUICK.sent]


def test_the_best_of_several_runs_of_processes_counts_and_only_what_they_do_together_is_read_again(
    monkeypatch: Any,
) -> None:
    asked: list[set[str]] = []
    now: Readings = {
        BETWEEN: {("all_reduce", 64): (2.0, 64.0), ("all_reduce", 128): (3.0, 128.0)},
        CALL: {"op": (5.0, 1.0)},
    }

    def read(points: list[Point], tell: object, earlier: Readings | None = None) -> Readings:
        asked.append({each.table for each in points})
        return now

    monkeypatch.setattr(host_measuring, "read_points", read)
    earlier: Readings = {
        "copy": {8: (1.0, 8.0)}, BETWEEN: {("all_reduce", 64): (1.5, 64.0), ("all_reduce", 128): (4.0, 128.0)},
    }  # fmt: skip
    assert read_tables(QUICK, earlier=earlier) == {
        "copy": {8: (1.0, 8.0)}, CALL: {"op": (5.0, 1.0)},
        BETWEEN: {("all_reduce", 64): (1.5, 64.0), ("all_reduce", 128): (3.0, 128.0)},
    }  # fmt: skip
    assert asked == [{CALL}]  # one process alone has nothing to do with others
    assert read_tables(QUICK) == now
    assert len(asked[1]) > 20


def test_readings_are_kept_for_the_next_run_as_they_are(tmp_path: Path) -> None:
    found: Readings = {"f32": {(16, 48, 80): (1e-6, 122880.0)}, "copy": {64: (2.5e-7, 64.0)}, CALL: {"op": (3e-6, 1.0)}}
    assert read_readings(tmp_path / "none.json") is None
    write_readings(found, tmp_path / "kept.json")
    assert read_readings(tmp_path / "kept.json") == found


def test_two_processes_measure_together_in_several_runs(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "host.toml").write_text(calibrate.measure_together(2, is_quick=True, runs=2))
    host = load_host(tmp_path / "host.toml")
    assert host.threads >= 1 and {kind for kind, _ in host.processes} >= {"all_reduce", "broadcast"}
    assert [line for line in capfd.readouterr().err.splitlines() if "at once" in line] == [
        "[1/2] 2 processes at once",
        "[2/2] 2 processes at once",
    ]
