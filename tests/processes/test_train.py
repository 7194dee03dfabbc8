"""examples/train.py, one script: alone, under torchrun, under `meshloom run`, over two hosts, with the same losses.

The mesh is the same everywhere, 2 x 4 devices. In one process a sum over devices is folded into one contraction, across
processes it is added by Gloo: the order of the additions differs, so losses agree within float32 rounding. Where it is
the same (run twice, on as many processes; on loopback and over a cable), they are bit-equal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import faults
import interpreters
import namespaces

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train.py")
STEPS = 10
Losses = list[float]

pytestmark = pytest.mark.slow


def arguments(folder: Path, mesh: str = "2x4") -> list[str]:
    return [SCRIPT, "--steps", str(STEPS), "--mesh", mesh, "--losses", str(folder / "losses")]


def read(folder: Path) -> Losses:
    losses: Losses = json.loads((folder / "losses").read_text())
    assert len(losses) == STEPS and losses[-1] < losses[0]
    return losses


def trained(folder: Path, *starter: str, mesh: str = "2x4") -> Losses:
    """The losses of the script as something starts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = interpreters.run([*starter, *arguments(folder, mesh)], environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder)


def trained_over_a_cable(folder: Path, count: int) -> Losses:
    """The losses of the script on two hosts."""
    with namespaces.pair() as hosts:
        started = namespaces.start_ranks(hosts, count, [sys.executable, *arguments(folder)], folder)
        faults.wait_for(started, folder, seconds=240)
        said = "".join((folder / f"rank-{rank}").read_text() for rank in range(count))
        assert [process.returncode for process in started] == [0] * count, said
    return read(folder)


def check_close(found: Losses, expected: Losses) -> None:
    """Within float32 rounding, on every step."""
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= 1e-6 * abs(b), f"step {step}: {a} against {b}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Losses:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> Callable[[int], Losses]:
    """The losses on so many processes of this host, trained once."""

    @cache
    def run(count: int) -> Losses:
        folder = tmp_path_factory.mktemp(f"torchrun-{count}")
        return trained(folder, "-m", "torch.distributed.run", "--nproc-per-node", str(count))

    return run


def test_the_comparison_can_fail(plain):
    with pytest.raises(AssertionError, match="step 3"):
        check_close([loss * (1 + 2e-6 * (step == 3)) for step, loss in enumerate(plain)], plain)


def test_a_run_alone_repeats_bit_for_bit(plain, tmp_path):
    assert trained(tmp_path) == plain


@pytest.mark.parametrize("count", [2, 4])
def test_torchrun_gives_the_losses_of_a_run_alone(count, plain, under_torchrun):
    check_close(under_torchrun(count), plain)


@pytest.mark.parametrize("count", [2, 4])
def test_meshloom_run_gives_the_losses_of_a_run_alone(count, plain, tmp_path):
    check_close(trained(tmp_path, "-m", "meshloom", "run", "--nproc", str(count)), plain)


STARTERS = {
    "meshloom run": [
        "-m",
        "meshloom",
        "run",
        "--hosts",
        "10.77.0.1:2,10.77.0.2:2",
        "--rdzv-endpoint",
        "10.77.0.1:29500",
    ],
    "torchrun": ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "static"]
    + ["--rdzv-endpoint", "10.77.0.1:29500"],
}


@pytest.mark.parametrize("starter", STARTERS)
def test_a_launcher_on_each_of_two_hosts_gives_the_losses_of_a_run_alone(starter, plain, tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": namespaces.CABLE, "OMP_NUM_THREADS": "1"}
    with namespaces.pair() as hosts:
        started = [
            host.start(
                [sys.executable, *STARTERS[starter], "--node-rank", str(node), *arguments(tmp_path)],
                tmp_path / f"host-{node}",
                environment,
            )
            for node, host in enumerate(hosts)
        ]
        faults.wait_for(started, tmp_path, seconds=240)
        said = "".join((tmp_path / f"host-{node}").read_text() for node in range(2))
        assert [process.returncode for process in started] == [0, 0], said
    check_close(read(tmp_path), plain)


@pytest.mark.parametrize("count", [2, 4])
def test_two_hosts_give_the_losses_of_one_bit_for_bit(count, plain, under_torchrun, tmp_path):
    apart = trained_over_a_cable(tmp_path, count)
    check_close(apart, plain)
    assert apart == under_torchrun(count)
