"""Every fault of `test_faults` in a program of ttnn: it ends on every rank, in seconds, with an error that names it."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import pytest

import faults
from faults import errors
from test_faults import check_divergence, check_paused, check_says, cut_off, interrupted

PROGRAM = Path(__file__).parents[1] / "ttnn_fault_program.py"
line = partial(faults.line, program=PROGRAM)
run = partial(faults.run, program=PROGRAM)
STEP = line("step")
REDUCE = r"all_reduce \d+ of all_reduce\(f32\[\d, 2, 8, 4\]\(S\(0\), S\(1\)\)\) over x0,x1"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["kill_before", "kill_in", "kill_after"])
def test_a_killed_rank_is_named_by_the_one_that_needs_it(case: str, tmp_path: Path) -> None:
    well, killed = run(case, tmp_path)
    assert (well.code, killed.code) == (1, -signal.SIGKILL)
    check_says(errors(well.text), f"PeerLostError: {REDUCE} at {STEP} on rank 0 lost its connection: rank 1 is gone")
    check_says(errors(well.text), "processes +rank +place +host +call", r"^\s+1 +\(1, 0\) .*gone$")


@pytest.mark.parametrize("starter", [faults.torchrun, faults.meshloom_run])
def test_a_killed_rank_is_named_under_a_launcher_that_ends_the_others(starter: object, tmp_path: Path) -> None:
    ranks = starter("kill_after", tmp_path, count=4, program=PROGRAM)  # type: ignore[operator]
    for rank in (0, 2, 3):
        check_says(errors(ranks[rank].text), rf"PeerLostError: .*{STEP}.*rank {rank}\b.*rank 1 is gone")


def test_the_rank_that_holds_the_store_may_be_killed(tmp_path: Path) -> None:
    _, well = run("kill_after", tmp_path, FAULT_RANK="0")
    lost = "(lost its connection|cannot go on: rank 1 has lost rank 0)"
    check_says(errors(well.text), rf"PeerLostError: {REDUCE} at {STEP} on rank 1 {lost}")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_leaves_early_is_missed(bad: int, tmp_path: Path) -> None:
    ranks = run("early", tmp_path, fresh=bad == 1, FAULT_RANK=str(bad))
    assert (ranks[bad].code, ranks[1 - bad].code) == (0, 1)
    told = rf"PeerLostError: {REDUCE} at {STEP} on rank {1 - bad} lost its connection: rank {bad} has left$"
    check_says(errors(ranks[1 - bad].text), told)


def test_ranks_may_end_right_after_they_have_met(tmp_path: Path) -> None:
    ranks = run("ends_at_once", tmp_path, count=4, fresh=True)
    assert [(rank.code, rank.text) for rank in ranks] == [(0, "end\n")] * 4


def test_an_exception_on_one_of_four_ranks_ends_all_with_its_cause_first(tmp_path: Path) -> None:
    ranks = run("raises", tmp_path, count=4, FAULT_RANK="2")
    assert [rank.code for rank in ranks] == [1, 1, 1, 1]
    raised = "rank 2 raised ValueError: the data of this rank is broken at " + line("raise")
    check_says(errors(ranks[2].text), "ValueError: the data", rf"meshloom: {raised}, last call {REDUCE}")
    for rank in (0, 1, 3):
        check_says(
            errors(ranks[rank].text), rf"PeerLostError: {REDUCE} at {STEP} on rank {rank} cannot go on: {raised}"
        )


def test_an_exception_under_torchrun_reaches_the_ranks_that_it_ends(tmp_path: Path) -> None:
    well, bad = faults.torchrun("raises", tmp_path, program=PROGRAM)
    raised = "rank 1 raised ValueError: the data of this rank is broken at " + line("raise")
    check_says(errors(bad.text), "ValueError: the data of this rank is broken")
    check_says(errors(well.text), rf"PeerLostError: .*rank 0 (cannot go on|was ended at \S+): {raised}$")


def test_a_program_that_catches_the_error_ends_by_itself_and_cannot_communicate(tmp_path: Path) -> None:
    well, asleep = run("catches", tmp_path)
    waited = rf"{REDUCE} at {STEP} on rank 0 has waited longer than 4 s: rank 1 is running at"
    check_says(well.text, f"caught 0: {waited}", rf"caught 1: {REDUCE} at {STEP} on rank 0 cannot go on: {waited}")
    assert well.code == 0 and "goes on alone" in well.text
    check_says(errors(asleep.text), rf"PeerLostError: .*on rank 1 was ended at \S+: {waited}")


def test_a_rank_that_reads_alone_is_told_where_the_others_are(tmp_path: Path) -> None:
    elsewhere, alone = run("reads_alone", tmp_path)
    waited = rf"to_torch\(.*\) at {line('alone')} on rank 1 has waited longer than 4 s: rank 0 is running at"
    check_says(errors(alone.text), f"PeerLostError: .*{waited} {line('elsewhere')}$")
    check_says(errors(elsewhere.text), rf"PeerLostError: .* on rank 0 was ended at {line('elsewhere')}: .*{waited}")


# ranks that do different things


def collective(kind: str, shape: str, tag: str, over: str = "x0,x1") -> str:
    return rf"{kind} of {kind}\(f32\[{shape}\]\(S\(0\), S\(1\)\)\) over {over} at {line(tag)}"


def test_a_divergent_branch_shows_both_sides_on_all_ranks(tmp_path: Path) -> None:
    sides = [collective(kind, "2, 2, 8, 4", "branch") for kind in ("all_reduce", "all_gather")]
    check_divergence(run("branch", tmp_path), *sides, "rank 0 against rank 1")


def test_a_divergent_order_shows_both_sides_on_all_ranks(tmp_path: Path) -> None:
    ranks = run("order", tmp_path, count=4, FAULT_RANK="2")
    sides = collective("all_gather", "4, 2, 1, 8, 4", "order"), collective("all_reduce", "4, 2, 8, 4", "order")
    check_divergence(ranks, *sides, "ranks 0, 1, 3 against rank 2")


def test_a_divergence_along_one_axis_is_told_to_the_groups_that_do_not_see_it(tmp_path: Path) -> None:
    ranks = run("one_axis", tmp_path, count=4, FAULT_RANK="3")
    sides = [collective("all_gather", f"2, 2, 8, {width}", "one_axis", "x1") for width in (8, 4)]
    check_divergence(ranks, *sides, "ranks 0, 1, 2 against rank 3")


def test_a_divergence_in_a_thread_shows_both_sides(tmp_path: Path) -> None:
    for rank in run("in_a_thread", tmp_path):
        check_says(errors(rank.text), "DivergenceError: .*rank 0: .*all_reduce.*, but rank 1: .*all_gather")


@pytest.mark.parametrize(("case", "tag"), [("plain_tensors", "plain"), ("shape", None)])
def test_what_is_given_to_from_torch_must_be_the_same(case: str, tag: str | None, tmp_path: Path) -> None:
    at = line(tag) if tag is not None else r"\S+"
    for rank in run(case, tmp_path):
        told = errors(rank.text)
        check_says(
            told, rf"DivergenceError: a plain tensor, .*, differs: rank 0: .*ttnn.from_torch .* at {at}, but rank 1"
        )


def test_check_off_compares_nothing(tmp_path: Path) -> None:
    assert [(each.code, each.text) for each in run("plain_tensors", tmp_path, FAULT_CHECK="off")] == [(0, "end\n")] * 2


def test_check_always_notices_an_op_that_does_not_communicate(tmp_path: Path) -> None:
    for rank in run("silent_divergence", tmp_path, FAULT_CHECK="always"):
        told = rf"DivergenceError: .*, but rank 1: ttnn.multiply\(FLOAT32 \[8, 4\]\) at {line('silent')}$"
        check_says(errors(rank.text), told)


def test_check_sample_leaves_such_an_op_alone(tmp_path: Path) -> None:
    ranks = run("silent_divergence", tmp_path, FAULT_CHECK="sample")
    assert [(rank.code, rank.text.count("end\n")) for rank in ranks] == [(0, 1), (0, 1)]


def test_a_difference_after_the_last_check_is_told_at_the_end(tmp_path: Path) -> None:
    last, first = run("differs_at_the_end", tmp_path)
    check_says(errors(last.text), "DivergenceError: the processes did different things after the last check")
    assert (last.code, first.code) == (1, 0)


def test_a_mismatch_that_sample_does_not_compare_still_ends_both_ranks(tmp_path: Path) -> None:
    for rank in run("late_mismatch", tmp_path):
        assert rank.code not in (0, None)
        assert re.search(r"(PeerLostError|DivergenceError): |Fatal Python error: Aborted", rank.text), rank.text


# ranks that do not come


def test_a_rank_that_sleeps_is_named_with_its_line_and_ended(tmp_path: Path) -> None:
    well, asleep = run("sleep", tmp_path)
    waited = rf"{REDUCE} at {STEP} on rank 0 has waited longer than 4 s: rank 1 is running at {line('sleep')}$"
    check_says(errors(well.text), f"PeerLostError: {waited}", "processes", rf"^\s+1 .* running at {line('sleep')}$")
    check_says(errors(asleep.text), rf"PeerLostError: .* on rank 1 was ended at {line('sleep')}: {waited}")


def test_a_rank_that_hears_no_signal_is_ended_with_the_report(tmp_path: Path) -> None:
    well, stuck = run("stuck_in_c", tmp_path)
    check_says(errors(well.text), rf"PeerLostError: .*rank 1 is running at {line('stuck')}$")
    check_says(errors(stuck.text), rf"PeerLostError: .* on rank 1 was ended at {line('stuck')}: .*has waited longer")


def test_a_rank_that_never_starts_is_named_by_all_others(tmp_path: Path) -> None:
    for rank in run("never_starts", tmp_path, count=4, absent=[1, 3], fresh=True, MESHLOOM_TIMEOUT="8"):
        told = rf"PeerLostError: rank {rank.rank} waited \d+\.\d s in open_mesh at {line('never')}: ranks 1, 3 of 4"
        check_says(errors(rank.text), told)


def test_a_rank_that_sleeps_is_ended_on_four_ranks_under_meshloom_run(tmp_path: Path) -> None:
    ranks = faults.meshloom_run("sleep", tmp_path, count=4, program=PROGRAM, FAULT_RANK="2")
    asleep = rf"rank 2 is running at {line('sleep')}"
    for rank in (0, 1, 3):
        check_says(errors(ranks[rank].text), rf"PeerLostError: .* on rank {rank} .*{asleep}")
    waited = "has waited longer than 4 s"
    check_says(errors(ranks[2].text), rf"PeerLostError: .* on rank 2 was ended at {line('sleep')}: .*{waited}")


def test_a_rank_alone_without_the_one_that_holds_the_store_says_so(tmp_path: Path) -> None:
    (rank,) = run("never_starts", tmp_path, absent=[0], FAULT_RANK="0", MESHLOOM_TIMEOUT="3")
    told = rf"PeerLostError: rank 1 waited .* in open_mesh at {line('never')}: nobody answers where rank 0"
    check_says(errors(rank.text), told)
    assert "[c10d]" not in rank.text


# hosts and launchers


CUT = [("goes_on", 2, "step"), ("goes_on", 4, "step"), ("goes_on_but_one", 2, "busy")]


@pytest.mark.parametrize(("case", "count", "far_tag"), CUT)
def test_a_link_that_is_cut_is_reported_on_both_sides(case: str, count: int, far_tag: str, tmp_path: Path) -> None:
    ranks = cut_off(case, tmp_path, count, PROGRAM)
    assert [rank.code for rank in ranks] == [1] * count
    near, far = ranks[: count // 2], ranks[count // 2 :]
    for rank in near:
        check_says(errors(rank.text), rf"PeerLostError: {REDUCE} at {STEP} on rank {rank.rank} ", "processes")
        for other in far:
            check_says(errors(rank.text), rf"^\s+{other.rank} .*gone$")
    for rank in far:
        ended = rf"on rank {rank.rank} .*({line(far_tag)}|lost rank 0|waited)"
        check_says(errors(rank.text), rf"PeerLostError: {REDUCE} at \S+ {ended}")


@pytest.mark.parametrize("to_group", [False, True], ids=["the launcher", "its group"])
def test_an_interrupt_ends_all_ranks(to_group: bool, tmp_path: Path) -> None:
    for rank in interrupted("goes_on", tmp_path, to_group, program=PROGRAM):
        check_says(
            errors(rank.text), rf"(rank {rank.rank} was interrupted at \S+, last call|PeerLostError:) .*{REDUCE}"
        )


def test_a_launcher_that_is_paused_changes_nothing(tmp_path: Path) -> None:
    check_paused(tmp_path, PROGRAM)
