"""Schedules of pipelines: proven without devices, and beside those of torch's own pipelines."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from meshloom import ArgumentError, ScheduleError
from meshloom.planner.pipelines import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    PipelineSchedule,
    Turn,
    balance,
    forward_schedule,
    schedule_of,
)

SIZES = (st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 9))


@given(*SIZES)
def test_every_schedule_is_proven(name, stages, batches):
    schedule = schedule_of(name, stages, batches).check()
    assert sorted(schedule.turns) == sorted(turn for row in schedule.rows for turn in row)
    for stage, row in enumerate(schedule.rows):
        assert tuple(turn for turn in schedule.turns if turn.stage == stage) == row


@given(st.integers(1, 6), st.integers(1, 9))
def test_one_forward_one_backward_keeps_at_most_as_many_micro_batches_as_stages(stages, batches):
    schedule = schedule_of("1f1b", stages, batches)
    assert [schedule.alive(stage) for stage in range(stages)] == [min(stages - s, batches) for s in range(stages)]
    assert schedule_of("gpipe", stages, batches).alive(0) == batches


@given(*SIZES, st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_bubble_is_the_known_formula(name, stages, batches, forward, backward):
    expected = (stages - 1) / (batches + stages - 1)
    assert schedule_of(name, stages, batches).bubble(forward, backward) == pytest.approx(expected)


def test_sending_makes_the_bubble_larger():
    schedule = schedule_of("1f1b", 2, 4)
    assert schedule.bubble() < schedule.bubble(sending=0.5) < 1


@pytest.mark.parametrize(
    ("name", "stages", "batches"), [*itertools.product(("1f1b", "gpipe"), (1, 2, 3, 4), (1, 2, 4, 7))]
)
def test_rows_are_those_of_torch(name, stages, batches):
    ours = schedule_of(name, stages, batches)
    for stage in range(stages):
        assert [(turn.phase, turn.batch) for turn in ours.rows[stage]] == order_of_torch(name, stage, stages, batches)


def order_of_torch(name: str, stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """What torch's schedule does on a stage that only writes down what it is told."""
    from torch.distributed.pipelining import schedules

    done: list[tuple[str, int]] = []
    nothing = {each: lambda *args, **kwargs: [] for each in ("get_fwd_recv_ops", "get_fwd_send_ops")}
    fake = SimpleNamespace(
        stage_index=stage,
        is_last=stage == stages - 1,
        has_backward=True,
        forward_one_chunk=lambda number, *args, **kwargs: done.append((FORWARD, number)),
        backward_one_chunk=lambda number, *args, **kwargs: done.append((BACKWARD, number)),
        get_bwd_recv_ops=nothing["get_fwd_recv_ops"],
        get_bwd_send_ops=nothing["get_fwd_recv_ops"],
        perform_reduce_grad=lambda *args: None,
        scale_grads=lambda *args: None,
        clear_runtime_states=lambda: None,
        **nothing,
    )
    theirs: Any = object.__new__({"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}[name])
    vars(theirs).update(
        _stage=fake, _num_stages=stages, _n_microbatches=batches, _has_backward=True, scale_grads=False,
        _check_inputs=lambda *args: ([()] * batches, [{}] * batches), _initialize_stage=lambda *args, **kwargs: None,
        _maybe_compute_loss=lambda *args, **kwargs: None, _maybe_get_loss=lambda *args: None,
        _update_losses=lambda *args: None,
    )  # fmt: skip
    theirs._step_microbatches([()] * batches, [{}] * batches, None, None)
    return done


def changed(schedule: PipelineSchedule, stage: int, row: list[Turn]) -> PipelineSchedule:
    rows = list(schedule.rows)
    rows[stage] = tuple(row)
    return PipelineSchedule(schedule.name, schedule.batches, tuple(rows))


def test_the_proof_finds_what_is_wrong():
    good = schedule_of("1f1b", 2, 2)
    first = list(good.rows[0])
    with pytest.raises(ScheduleError, match="stage 0 does not do each pass of 2 micro-batches once"):
        changed(good, 0, first[:-1]).check()
    with pytest.raises(ScheduleError, match="stage 0 does not do each pass of 2 micro-batches once"):
        changed(good, 0, [first[0], *first]).check()
    late = [turn for turn in first if turn.phase == BACKWARD] + [turn for turn in first if turn.phase == FORWARD]
    with pytest.raises(ScheduleError, match="every stage waits for another") as told:
        changed(good, 0, late).check()
    assert "stage 0 at B0" in str(told.value)


def test_a_schedule_that_nobody_knows_is_refused():
    with pytest.raises(ArgumentError, match="schedule='1f2b' is not known"):
        schedule_of("1f2b", 2, 2)


def test_forward_passes_alone_are_a_schedule_too():
    assert forward_schedule(3, 2).check().bubble() == pytest.approx(2 / 4)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_balance_is_as_good_as_any_cut(weights, data):
    stages = data.draw(st.integers(1, len(weights)))

    def heaviest(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(weights)]
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    found = balance(weights, stages)
    assert len(found) == stages - 1
    assert list(found) == sorted(set(found))
    assert heaviest(found) == min(map(heaviest, itertools.combinations(range(1, len(weights)), stages - 1)))
