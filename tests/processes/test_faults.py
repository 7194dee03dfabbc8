"""What goes wrong ends on every rank, in seconds, with an error that names rank, op and line; nothing is left behind.

Real processes, killed, stuck and led astray; the timeout of a collective is 4 s here and the program's own waits are
ten minutes, so a run that ends at all has been ended by the report.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import faults
import namespaces
from faults import Ended, errors, line

STEP = line("step")
SUM = r"all_reduce \d+ of sum\(f32\[16, 4\]\(S\(0\)\)\)"

pytestmark = pytest.mark.slow


def check_says(text: str, *patterns: str) -> None:
    """Every pattern is in the text, in this order."""
    position = 0
    for pattern in patterns:
        found = re.compile(pattern, re.M).search(text, position)
        assert found, f"{pattern!r} is not, or not in its place, in:\n{text}"
        position = found.start()


def row(rank: int, call: str, where: str, state: str) -> str:
    """A row of the table of processes."""
    return rf"^\s+{rank} +\({rank},\) +\S+ +{call} +\d+ +{re.escape(where)} +{state}$"


def test_the_helper_that_checks_texts_can_fail():
    check_says("one\ntwo", "one", "two")
    with pytest.raises(AssertionError, match="not in its place"):
        check_says("one\ntwo", "two", "one")


def test_the_check_for_processes_left_behind_can_fail(tmp_path):
    waits = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    process = subprocess.Popen(waits, start_new_session=True)
    try:
        faults.wait_until(lambda: faults.left(tmp_path) == [process.pid], [process], tmp_path)
        with pytest.raises(AssertionError, match="1 of 1 hung"):
            faults.wait_for([process], tmp_path, seconds=0.1)
        assert process.poll() is not None
    finally:
        process.kill()


# a process is gone

GONE = {
    "kill_before": (r"(?:new_group of )?open_mesh", r"\S+"),
    "kill_in": (r"all_reduce of sum\(f32\[16, 4\]\(S\(0\)\)\)", STEP),
    "kill_after": (r"all_reduce of sum\(f32\[16, 4\]\(S\(0\)\)\)", STEP),
}


@pytest.mark.parametrize("case", GONE)
def test_a_killed_rank_is_named_by_the_one_that_needs_it(case, tmp_path):
    well, killed = faults.run(case, tmp_path)
    assert (well.code, killed.code) == (1, -signal.SIGKILL)
    told = errors(well.text)
    check_says(
        told, f"PeerLostError: {SUM} at {STEP} on rank 0 lost its connection: rank 1 is gone, last seen at \\S+:\\d+$"
    )
    call, _ = GONE[case]
    check_says(told, "processes +rank +place +host +call", row(0, r"all_reduce of sum\S+ \S+", STEP, "raised"))
    check_says(told, rf"^\s+1 +\(1,\) +\S+ +{call} .*gone$")


@pytest.mark.parametrize("starter", [faults.torchrun, faults.meshloom_run])
def test_a_killed_rank_is_named_under_a_launcher_that_ends_the_others(starter, tmp_path):
    ranks = starter("kill_after", tmp_path, count=4)
    for rank in (0, 2, 3):
        told = errors(ranks[rank].text)
        check_says(told, rf"PeerLostError: .*rank {rank}\b.*rank 1 is gone")
        check_says(told, f"PeerLostError: .*{STEP}")
        check_says(told, "processes", rf"^\s+1 +\(1,\) .*{STEP} +gone$")
    launcher = (tmp_path / "launcher").read_text()
    assert "rank 1 of 4 failed first: killed by SIGKILL" in launcher or "exitcode  : -9" in launcher


def test_the_rank_that_holds_the_store_may_be_killed(tmp_path):
    _, well = faults.run("kill_after", tmp_path, FAULT_RANK="0")
    told = errors(well.text)
    check_says(
        told, rf"PeerLostError: {SUM} at {STEP} on rank 1 (lost its connection|cannot go on: rank 1 has lost rank 0)"
    )
    check_says(told, "processes", r"^\s+0 .*not known, ", row(1, r"all_reduce of sum\S+ \S+", STEP, "raised"))


def test_a_rank_that_leaves_early_is_missed(tmp_path):
    well, gone = faults.run("early", tmp_path, fresh=True)
    assert (well.code, gone.code) == (1, 0)
    check_says(errors(well.text), rf"PeerLostError: {SUM} at {STEP} on rank 0 lost its connection: rank 1 has left$")
    check_says(errors(well.text), "processes", row(1, r"all_reduce of sum\S+ \S+", STEP, "left"))


def test_the_rank_that_holds_the_store_is_missed_too_when_it_leaves_early(tmp_path):
    gone, well = faults.run("early", tmp_path, FAULT_RANK="0")
    assert (gone.code, well.code) == (0, 1)
    check_says(errors(well.text), rf"PeerLostError: {SUM} at {STEP} on rank 1 lost its connection: rank 0 has left$")
    check_says(errors(well.text), "processes", r"^\s+0 +\(0,\) .* left$")


def test_ranks_may_end_right_after_they_have_met(tmp_path):
    ranks = faults.run("ends_at_once", tmp_path, count=4, fresh=True)
    assert [(rank.code, rank.text) for rank in ranks] == [(0, "end\n")] * 4


# an exception


def test_an_exception_on_one_of_four_ranks_ends_all_with_its_cause_first(tmp_path):
    ranks = faults.run("raises", tmp_path, count=4, FAULT_RANK="2")
    assert [rank.code for rank in ranks] == [1, 1, 1, 1]
    raised = "rank 2 raised ValueError: the data of this rank is broken at " + line("raise")
    check_says(errors(ranks[2].text), "ValueError: the data", rf"meshloom: {raised}, last call all_reduce \d+ of sum")
    for rank in (0, 1, 3):
        check_says(
            errors(ranks[rank].text),
            rf"PeerLostError: all_reduce \d+ of sum\(.*\) at {STEP} on rank {rank} cannot go on: {raised}$",
            rf"cause +ValueError: the data of this rank is broken\n +at {line('raise')}, last call all_reduce",
            "processes",
            r"^\s+2 +\(2,\) .* raised$",
        )


def test_an_exception_in_backward_is_told_to_the_others(tmp_path):
    well, bad = faults.run("raises_in_backward", tmp_path)
    raised = f"rank 1 raised ValueError: no gradient at {line('backward')}"
    check_says(errors(bad.text), "ValueError: no gradient", f"meshloom: {raised}, last call")
    check_says(errors(well.text), rf"PeerLostError: .* at {STEP} on rank 0 cannot go on: {raised}$")


def test_a_rank_lost_during_backward_is_reported_with_the_forward_call(tmp_path):
    well, _ = faults.run("backward_of_a_lost_rank", tmp_path)
    backward = f"({line('lost_backward')}|{line('lost_grad')})"
    check_says(
        errors(well.text), rf"PeerLostError: all_reduce \d+ of .* backward at {backward} on rank 0 lost.*rank 1 is gone"
    )


def test_an_exception_under_torchrun_reaches_the_ranks_that_it_ends(tmp_path):
    well, bad = faults.torchrun("raises", tmp_path)
    raised = "rank 1 raised ValueError: the data of this rank is broken at " + line("raise")
    check_says(errors(bad.text), "ValueError: the data of this rank is broken")
    check_says(
        errors(well.text), rf"PeerLostError: .*rank 0 (cannot go on|was ended at \S+): {raised}$", "cause +ValueError"
    )


def test_a_program_that_catches_the_error_ends_by_itself_and_cannot_communicate(tmp_path):
    well, asleep = faults.run("catches", tmp_path)
    check_says(
        well.text,
        rf"caught 0: {SUM} at {STEP} on rank 0 has waited longer than 4 s: rank 1 is running at {PROGRAM_NAME}:\d+$",
        rf"caught 1: {SUM} at {STEP} on rank 0 cannot go on: {SUM} at {STEP} on rank 0 has waited",
        "goes on alone",
    )
    assert well.code == 0
    check_says(
        errors(asleep.text), rf"PeerLostError: .*on rank 1 was ended at \S+: {SUM} at {STEP} on rank 0 has waited"
    )


PROGRAM_NAME = re.escape(faults.PROGRAM.name)


# ranks that do different things


def check_divergence(ranks: list[Ended], good: str, bad: str, sides: str) -> None:
    """The same error on all ranks, with both sides."""
    first_bad = re.search(r"\d+$", sides)
    assert first_bad
    for rank in ranks:
        assert rank.code == 1
        told = errors(rank.text)
        check_says(
            told,
            rf"DivergenceError: the processes do different things: rank 0: {good}, but rank {first_bad[0]}: {bad}$",
        )
        check_says(told, f"sides +{sides}$", f"calls +rank 0: {good}$", f"rank {first_bad[0]}: {bad}$")


def test_a_divergent_branch_shows_both_sides_on_all_ranks(tmp_path):
    at = line("branch")
    check_divergence(
        faults.run("branch", tmp_path), rf"sum\(.*\) at {at}", rf"amax\(.*\) at {at}", "rank 0 against rank 1"
    )


def test_a_divergent_shape_shows_both_sides_on_all_ranks(tmp_path):
    at = line("shape")
    shapes = [rf"all_gather of redistribute\(f32\[16, {width}\]\(S\(0\)\)\) at {at}" for width in (4, 8)]
    check_divergence(faults.run("shape", tmp_path), *shapes, "rank 0 against rank 1")


def test_a_divergent_order_shows_both_sides_on_all_ranks(tmp_path):
    at = line("order")
    ranks = faults.run("order", tmp_path, count=4, FAULT_RANK="2")
    check_divergence(ranks, rf"amin\(.*\) at {at}", rf"amax\(.*\) at {at}", "ranks 0, 1, 3 against rank 2")


def test_a_divergence_along_one_axis_is_told_to_the_groups_that_do_not_see_it(tmp_path):
    at = line("one_axis")
    ranks = faults.run("one_axis", tmp_path, count=4, FAULT_RANK="3")
    texts = [rf".*f32\[8, {width}\].* at {at}" for width in (16, 8)]
    check_divergence(ranks, *texts, "ranks 0, 1, 2 against rank 3")


def test_plain_tensors_that_differ_name_from_local(tmp_path):
    for rank in faults.run("plain_tensors", tmp_path):
        told = errors(rank.text)
        check_says(
            told,
            rf"DivergenceError: a plain tensor, which counts as replicated, differs: rank 0: .* at {line('plain')}",
        )
        check_says(told, "fix +give what each process holds to loom.from_local")


def test_check_off_compares_nothing(tmp_path):
    ranks = faults.run("plain_tensors", tmp_path, FAULT_CHECK="off")
    assert [rank.code for rank in ranks] == [0, 0]
    assert [re.findall(r"sum (\S+)", rank.text) for rank in ranks] == [["96.0"], ["96.0"]]


def test_check_always_notices_an_op_that_does_not_communicate(tmp_path):
    for rank in faults.run("silent_divergence", tmp_path, FAULT_CHECK="always"):
        check_says(errors(rank.text), rf"DivergenceError: .*, but rank 1: mul\(.*\) at {line('silent')}$")


def test_check_sample_leaves_such_an_op_alone_after_the_first_calls(tmp_path):
    ranks = faults.run("silent_divergence", tmp_path, FAULT_CHECK="sample")
    assert [(rank.code, rank.text.count("end\n")) for rank in ranks] == [(0, 1), (0, 1)]


def test_a_mismatch_that_sample_does_not_compare_still_ends_both_ranks(tmp_path):
    ranks = faults.run("late_mismatch", tmp_path)
    assert all(rank.code not in (0, None) for rank in ranks)
    assert any("PeerLostError" in rank.text or "DivergenceError" in rank.text for rank in ranks)
    for rank in ranks:
        assert re.search(r"(PeerLostError|DivergenceError): |Fatal Python error: Aborted", rank.text), rank.text
        check_says(rank.text, line("late") + rf"|fault_program.py\", line {line('late').partition(':')[2]}")


# ranks that do not come


def test_a_rank_that_sleeps_is_named_with_its_line_and_ended(tmp_path):
    well, asleep = faults.run("sleep", tmp_path)
    assert (well.code, asleep.code) == (1, 1)
    waited = rf"{SUM} at {STEP} on rank 0 has waited longer than 4 s: rank 1 is running at {line('sleep')}$"
    check_says(errors(well.text), f"PeerLostError: {waited}", "processes", rf"^\s+1 .* running at {line('sleep')}$")
    check_says(errors(asleep.text), rf"PeerLostError: {SUM} at {STEP} on rank 1 was ended at {line('sleep')}: {waited}")


def test_a_rank_that_sleeps_is_ended_on_four_ranks_under_meshloom_run(tmp_path):
    ranks = faults.meshloom_run("sleep", tmp_path, count=4, FAULT_RANK="2")
    for rank in (0, 1, 3):
        check_says(
            errors(ranks[rank].text), rf"PeerLostError: .* on rank {rank} .*rank 2 is running at {line('sleep')}"
        )
    check_says(
        errors(ranks[2].text),
        rf"PeerLostError: .* on rank 2 was ended at {line('sleep')}: .*has waited longer than 4 s",
    )


def test_a_rank_that_hears_no_signal_is_ended_with_the_report(tmp_path):
    well, stuck = faults.run("stuck_in_c", tmp_path)
    check_says(errors(well.text), rf"PeerLostError: .*rank 1 is running at {line('stuck')}$")
    check_says(
        errors(stuck.text), rf"PeerLostError: .* on rank 1 was ended at {line('stuck')}: .*has waited longer than 4 s"
    )
    check_says(stuck.text, rf"fault_program.py\", line {line('stuck').partition(':')[2]} in stuck_in_c")


def test_a_rank_that_never_starts_is_named_by_all_others(tmp_path):
    ranks = faults.run("never_starts", tmp_path, count=4, absent=[1, 3], fresh=True, MESHLOOM_TIMEOUT="8")
    assert [rank.rank for rank in ranks] == [0, 2]
    for rank in ranks:
        told = errors(rank.text)
        check_says(
            told,
            rf"PeerLostError: rank {rank.rank} waited \d+\.\d s in open_mesh at {line('never')}: ranks 1, 3 of 4 never",
        )
        check_says(
            told, r"meeting_point +127.0.0.1:\d+", "timeout +8 s", "fix +start all ranks with the same WORLD_SIZE"
        )


def test_a_rank_that_is_slow_to_look_still_hears_who_never_started(tmp_path):
    case = "never_starts_and_one_is_slow"
    for rank in faults.run(case, tmp_path, count=3, absent=[2], FAULT_RANK="1", MESHLOOM_TIMEOUT="6"):
        waited = rf"PeerLostError: rank {rank.rank} waited \d+\.\d s in open_mesh at {line('slow')}"
        check_says(errors(rank.text), waited + ": rank 2 of 3 never")


def test_a_rank_alone_without_the_one_that_holds_the_store_says_so(tmp_path):
    (rank,) = faults.run("never_starts", tmp_path, absent=[0], FAULT_RANK="0", MESHLOOM_TIMEOUT="3")
    check_says(
        errors(rank.text),
        rf"PeerLostError: rank 1 waited .* in open_mesh at {line('never')}: nobody answers where rank 0",
    )
    assert "[c10d]" not in rank.text


# a link is cut


def cut_off(case: str, folder: Path, count: int, program: Path = faults.PROGRAM) -> list[Ended]:
    """Ranks on two hosts; when all are ready, the cable between the hosts is pulled."""
    with namespaces.pair() as hosts:
        started = namespaces.start_ranks(hosts, count, [sys.executable, str(program), case, str(folder)], folder)
        outputs = [folder / f"rank-{rank}" for rank in range(count)]
        faults.wait_until(lambda: all("READY" in each.read_text() for each in outputs), started, folder)
        time.sleep(1)
        hosts[1].cut()
        cut = time.time()
        ends = faults.wait_for(started, folder)
        texts = [f"FAULT {cut}\n{each.read_text(errors='replace')}" for each in outputs]
        codes = [process.returncode for process in started]
        return faults.told(case, [Ended(*each) for each in zip(range(count), codes, ends, texts, strict=True)])


@pytest.mark.parametrize("count", [2, 4])
def test_a_link_cut_in_mid_collective_is_reported_on_both_sides(count, tmp_path):
    ranks = cut_off("goes_on", tmp_path, count)
    assert [rank.code for rank in ranks] == [1] * count
    near, far = ranks[: count // 2], ranks[count // 2 :]
    for rank in ranks:
        check_says(errors(rank.text), rf"PeerLostError: all_reduce \d+ of sum\(.*\) at {STEP} on rank {rank.rank} ")
        check_says(rank.text, rf"has waited longer than 4 s|rank {rank.rank} has lost rank 0, which holds the store")
    for rank in near:
        for other in far:
            check_says(errors(rank.text), "processes", rf"^\s+{other.rank} +\({other.rank},\) .* {STEP} +gone$")
    for rank in far:
        check_says(errors(rank.text), "processes", r"^\s+0 .* not known, the store of the processes did not answer")


def test_a_rank_that_works_alone_notices_that_its_link_is_cut(tmp_path):
    near, far = cut_off("goes_on_but_one", tmp_path, 2)
    check_says(
        errors(near.text), rf"PeerLostError: {SUM} at {STEP} on rank 0 has waited longer than 4 s: rank 1 is gone"
    )
    lost = "rank 1 has lost rank 0, which holds the store of the processes"
    check_says(errors(far.text), rf"PeerLostError: {SUM} at {STEP} on rank 1 was ended at {line('busy')}: {lost}$")
    check_says(errors(far.text), "cause +the store of the processes did not answer within 4 s")


# the launcher


def interrupted(case: str, folder: Path, to_group: bool, count: int = 2, program: Path = faults.PROGRAM) -> list[Ended]:
    process = faults.start_meshloom_run(case, folder, count, program)
    logs = [folder / "logs" / f"rank-{rank}.stdout.log" for rank in range(count)]
    faults.wait_until(lambda: all(each.exists() and "READY" in each.read_text() for each in logs), [process], folder)
    time.sleep(1)
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    stopped = time.time()
    end = faults.wait_for([process], folder)[0]
    assert process.returncode == 130
    print(f"Ctrl-C: all had ended {end - stopped:.1f} s after it")
    return faults.logged_ranks(folder, count, end)


@pytest.mark.parametrize("to_group", [False, True], ids=["the launcher", "its group"])
def test_ctrl_c_at_the_launcher_ends_all_ranks_with_where_they_were(to_group, tmp_path):
    at = f"({STEP}|{line('loop')}|{line('next')})"  # in a step, or between two
    for rank in interrupted("goes_on", tmp_path, to_group):
        check_says(
            errors(rank.text),
            rf"(rank {rank.rank} was interrupted at {at}, last call|PeerLostError:) .*{SUM} at {STEP} on rank",
        )


def check_paused(folder: Path, program: Path = faults.PROGRAM) -> None:
    """A launcher that is stopped for longer than the timeout of the ranks, which need it only to be shown."""
    process = faults.start_meshloom_run("goes_on_until", folder, program=program)
    logs = [folder / "logs" / f"rank-{rank}.stdout.log" for rank in range(2)]
    faults.wait_until(lambda: all(each.exists() and "READY" in each.read_text() for each in logs), [process], folder)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    (folder / "go_on").touch()
    faults.wait_for([process], folder)
    said = (folder / "launcher").read_text()
    assert process.returncode == 0 and "[all 2] END" in said, said


def test_a_launcher_that_is_paused_changes_nothing(tmp_path):
    check_paused(tmp_path)


@pytest.mark.parametrize("program", [faults.PROGRAM, faults.PROGRAM.with_name("ttnn_fault_program.py")])
def test_a_log_folder_that_cannot_be_written_is_refused_before_any_rank_starts(program, tmp_path):
    (tmp_path / "logs").write_text("a file, not a folder")
    process = faults.start_meshloom_run("goes_on", tmp_path, program=program)
    faults.wait_for([process], tmp_path)
    assert process.returncode == 1
    said = (tmp_path / "launcher").read_text()
    check_says(
        said, rf"meshloom run: the log folder {tmp_path}/logs cannot be written: ", "fix +give another --log-dir"
    )
    assert "READY" not in said


# arguments

ENVIRONMENT = [
    ({"RANK": "0"}, "this process by halves: WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT not set"),
    ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT not set"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK 2 is out of range for 2"),
    ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK='x' is not a number"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "p"}, "MASTER_PORT='p' is not a number"),
    ({"MESHLOOM_TIMEOUT": "soon"}, "timeout 'soon' is not a number of seconds"),
    ({"MESHLOOM_TIMEOUT": "0"}, "timeout '0' is not a number of seconds"),
    ({"MESHLOOM_CHECK": "ever"}, "check 'ever' is not known"),
]


@pytest.fixture
def alone(monkeypatch):
    """The world as a process finds it that has not opened a mesh."""
    from meshloom.processes import bindings, world

    for name in (*bindings.RANKS, *bindings.NEEDED, "MESHLOOM_TIMEOUT", "MESHLOOM_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world.WORLD, "timeout", world.WORLD.timeout)
    monkeypatch.setattr(world.WORLD, "check", world.WORLD.check)
    return world.WORLD


@pytest.mark.parametrize(("environment", "says"), ENVIRONMENT)
def test_an_environment_that_is_wrong_is_refused_with_what_is_wrong(environment, says, alone, monkeypatch):
    import meshloom as loom

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((loom.ArgumentError, loom.BindingError), match=re.escape(says)):
        loom.open_mesh((2,))


@pytest.mark.parametrize("value", [0, -1, "never", float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(value, alone):
    import meshloom as loom

    with pytest.raises(loom.ArgumentError, match=re.escape(f"timeout {value!r} is not a number of seconds")):
        loom.open_mesh((2,), timeout=value)


def test_the_argument_wins_over_the_environment(alone, monkeypatch):
    import meshloom as loom

    monkeypatch.setenv("MESHLOOM_TIMEOUT", "7")
    monkeypatch.setenv("MESHLOOM_CHECK", "always")
    loom.open_mesh((2,))
    assert (alone.timeout, alone.check) == (7.0, "always")
    loom.open_mesh((2,), timeout=9, check="off")
    assert (alone.timeout, alone.check) == (9.0, "off")
