"""The bubble of a pipeline, predicted by a dry run and by the clock: two stages on two processes, one thread each.

    python -m benchmarks.pipelines    # starts the processes, prints one line of JSON per schedule and size

The prediction is that of `loom.dry_run` of the same step, on `meta`, on a machine whose arithmetic and link are
measured here first: the seconds of one product, of a pass over memory, and of one message between the processes. The
clock is that of `pipe.report` on each process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshloom as loom
from meshloom.comms import wire
from meshloom.mesh import HERE

WIDTH, ROWS, LAYERS = 1024, 256, 4  # of each stage, and of each micro-batch
BATCHES = (2, 4, 8)
ROUNDS = 12


def main() -> None:
    """Start two processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        _measure(rounds)
    else:
        _start(rounds)


def _start(rounds: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MESHLOOM_CHECK": "off"}
    command = [sys.executable, "-m", "benchmarks.pipelines", "--rounds", str(rounds)]
    root = Path(__file__).resolve().parents[1]
    started = [
        subprocess.Popen(command, cwd=root, env={**os.environ, **shared, **more, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(2)
    ]
    if sum(each.wait(timeout=300) for each in started):
        raise SystemExit("a process failed")


def _net(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(each for _ in range(2 * LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def _loss(found: Any, wanted: Any) -> Any:
    return nn.functional.mse_loss(found, wanted)


def _measure(rounds: int) -> None:
    mesh = loom.open_mesh((2,), axes=("pp",))
    machine = _machine(mesh)
    for schedule in ("1f1b", "gpipe"):
        for batches in BATCHES:
            measured, seconds = _by_the_clock(mesh, schedule, batches, rounds)
            if HERE.rank == 0:
                run, ideal = _by_dry_run(machine, schedule, batches)
                found = {
                    "work": "pipeline bubble, 2 stages on 2 processes", "schedule": schedule, "micro_batches": batches,
                    "predicted": round(run.bubble, 4), "measured": round(measured, 4),
                    "off": round(run.bubble / measured - 1, 4), "formula": round(ideal, 4),
                    "seconds": round(seconds, 4), "predicted_seconds": round(run.time, 4),
                }  # fmt: skip
                print(json.dumps(found), flush=True)


def _machine(mesh: loom.Mesh) -> loom.Machine:
    """What one thread does here, and a message between the two processes."""
    a, b = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    product = _best(lambda: a @ b)
    wide = torch.randn(1 << 22)
    touched = _best(lambda: torch.relu(wide))
    times = {}
    for size in (1 << 10, 1 << 22):
        x = loom.ones(size, mesh=mesh.submesh(pp=slice(0, 1)), placements="R")
        times[size] = min(_message(x, mesh) for _ in range(10))
    bandwidth = 4 * ((1 << 22) - (1 << 10)) / max(times[1 << 22] - times[1 << 10], 1e-9)
    latency = max(times[1 << 10], 1e-9)
    peak = 2 * ROWS * WIDTH * WIDTH / product
    return loom.Machine("here", latency, bandwidth, peak, 8 * wide.numel() / touched)


def _message(x: loom.Tensor, mesh: loom.Mesh) -> float:
    """Seconds of a copy from the first process to the second and back, halved."""
    loom.collectives.barrier(mesh)
    begin = time.perf_counter()
    there = x.redistribute("R", mesh=mesh.submesh(pp=slice(1, 2)))
    there.redistribute("R", mesh=x.mesh)
    wire.settle_messages()
    return (time.perf_counter() - begin) / 2


def _best(run: Any, rounds: int = 20) -> float:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def _by_the_clock(mesh: loom.Mesh, schedule: str, batches: int, rounds: int) -> tuple[float, float]:
    """The bubble of both processes together, and the seconds of a step: the middle one of the three fastest steps."""
    torch.manual_seed(0)
    pipe = loom.pipeline(_net("cpu"), 2, mesh, schedule, micro_batches=batches, loss=_loss)
    x = torch.randn(batches * ROWS, WIDTH)
    steps = []
    for number in range(rounds + 2):
        pipe.module.zero_grad()
        loom.collectives.barrier(mesh)
        pipe.step(x, target=x)
        report = pipe.report
        assert report is not None
        both = loom.from_local(torch.tensor([[report.busy, report.seconds]]), mesh, "S(0)").to_torch()
        if number >= 2:
            time_of_step = float(both[:, 1].max())
            steps.append((time_of_step, 1 - float(both[:, 0].sum()) / (2 * time_of_step)))
    seconds, bubble = sorted(sorted(steps)[:3], key=itemgetter(1))[len(steps[:3]) // 2]
    return bubble, seconds


def _by_dry_run(machine: loom.Machine, schedule: str, batches: int) -> tuple[loom.DryRun, float]:
    mesh = loom.Mesh(pp=2)
    pipe = loom.pipeline(_net("meta"), 2, mesh, schedule, micro_batches=batches, loss=_loss, device="meta")
    x = torch.empty(batches * ROWS, WIDTH, device="meta")
    with loom.dry_run(machine, memory=math.inf) as run:
        pipe.step(x, target=x)
    assert pipe.report is not None
    return run, pipe.report.schedule.bubble()


if __name__ == "__main__":
    main()
