"""Rows of the list that speak of workers, on 2 and on 4 real processes: the same claims as in one process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import faults
import ranks
import row_ranks
from test_train import SCRIPT, check_close, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 4])
def failures(request) -> list[dict[str, str]]:
    """What failed on each rank, by row, after one start of the processes."""
    return ranks.run(request.param, "row_ranks:rows", timeout=200)


@pytest.mark.parametrize("name", row_ranks.ROWS)
def test_row_on_processes(name, failures):
    failed = {rank: found[name] for rank, found in enumerate(failures) if name in found}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


def test_row_101_the_data_parallel_example_runs_on_a_4x8_mesh_split_over_processes(tmp_path):
    (tmp_path / "alone").mkdir()
    (tmp_path / "split").mkdir()
    alone = trained(tmp_path / "alone", mesh="4x8")
    split = trained(tmp_path / "split", "-m", "torch.distributed.run", "--nproc-per-node", "4", mesh="4x8")
    check_close(split, alone)


def test_row_103_the_documented_command_runs_two_ranks(tmp_path):
    command = f"torchrun --nproc-per-node 2 {Path(SCRIPT).parent.name}/{Path(SCRIPT).name}"
    assert command.replace("2", "4") in Path(SCRIPT).read_text(), "the script documents how to start it"
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "--steps", "2"]
    done = subprocess.run(starter, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes, mesh 2x4" in done.stdout


def overlaps(spans: list[list[tuple[float, float]]]) -> int:
    """In how many rounds all ranks were at work at the same time."""
    rounds = list(zip(*spans, strict=True))
    assert rounds
    return sum(max(start for start, _ in each) < min(end for _, end in each) for each in rounds)


def test_row_144_workers_multiply_their_rows_at_the_same_time():
    assert overlaps(ranks.run(2, "row_ranks:matmul_spans", 10, False)) > 0


def test_row_144_workers_that_multiply_in_turn_are_found():
    assert overlaps(ranks.run(2, "row_ranks:matmul_spans", 3, True)) == 0


def test_row_167_killing_one_of_four_workers_is_an_error_on_the_others(tmp_path):
    workers = faults.run("kill_after", tmp_path, count=4, FAULT_RANK="3")
    assert [worker.code for worker in workers] == [1, 1, 1, -signal.SIGKILL]
    for worker in workers[:3]:
        told = faults.errors(worker.text)
        assert re.search(
            rf"PeerLostError: all_reduce \d+ of sum\(.*\) at {faults.line('step')} on rank {worker.rank} ", told
        )
        assert "rank 3 is gone" in told
