"""A client and two workers beside the same program on two ranks, and beside calls of torch's RPC.

`python -m benchmarks.controller` prints the table; the ranks are this file too, started by `meshloom run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshloom as loom

SIZE, WIDTH, ROWS = 1024, 512, 256
ROUNDS = 2
GOALS = {
    "client time of a small op": (12.0, "us"),
    "small ops per second through 2 workers": (30_000.0, "/s"),
    "matmul, client over ranks": (1.05, "x"),
    "MLP step, client over ranks": (1.05, "x"),
    "item() of a value that is there": (0.5, "ms"),
    "100 MB fetched": (1.0, "GB/s"),
}
MORE_IS_BETTER = ("/s", "GB/s")


def works(mesh: loom.Mesh) -> dict[str, Callable[[], Any]]:
    """The programs that a client and ranks run alike; each ends with a number that is read."""
    a = loom.ones(SIZE, SIZE, mesh=mesh, placements="S(0)")
    b = loom.ones(SIZE, SIZE, mesh=mesh, placements="R")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = loom.parallelize(net, mesh, "data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = loom.ones(ROWS, WIDTH, mesh=mesh, placements="S(0)")

    def matmul() -> float:
        c = a
        for _ in range(8):
            c = c @ b
        return c[0, 0].item()

    def step() -> float:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    return {"matmul": matmul, "MLP step": step}


def best(work: Callable[[], Any], rounds: int = 7) -> float:
    """The shortest of some runs, in seconds."""
    work()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def on_a_rank() -> None:
    """The same programs where all ranks run them."""
    mesh = loom.open_mesh((2,), axes=("dp",))
    found = {name: best(work) for name, work in works(mesh).items()}
    if loom.process().rank == 0:
        print("FOUND " + json.dumps(found))


def ranks() -> dict[str, float]:
    """What two ranks take."""
    command = [sys.executable, "-m", "meshloom", "run", "--nproc", "2", str(Path(__file__)), "rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=True)
    line = next(line for line in done.stdout.splitlines() if "FOUND " in line)
    found: dict[str, float] = json.loads(line.partition("FOUND ")[2])
    return found


def client() -> dict[str, float]:
    """What a client with two workers takes."""
    with loom.launch(workers=2, threads=1) as cluster:
        mesh = cluster.open_mesh((2,), axes=("dp",))
        x, y = loom.ones(32, 32, mesh=mesh), loom.ones(32, 32, mesh=mesh)
        found = {name: best(work) for name, work in works(mesh).items()}
        x + y
        cluster.wait()
        count = 6000
        own, start = time.thread_time(), time.perf_counter()
        for _ in range(count):
            x + y
        found["op"] = (time.thread_time() - own) / count
        cluster.wait()
        found["ops"] = count / (time.perf_counter() - start)
        number = x[0, 0].redistribute("R")
        number.item()
        found["item"] = best(number.item, 200)
        big = loom.ones(25_000_000, mesh=mesh, placements="R")
        found["fetch"] = 0.1 / best(big.to_torch, 5)
    return found


def rpc_calls() -> float:
    """Calls per second of an add with torch's RPC to two workers, sent without waiting."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "rpc"], capture_output=True, text=True, timeout=120, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RPC ")), None)
    return float(line.split()[1]) if line else float("nan")


def _rpc_worker(rank: int) -> None:
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29711")
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        a = [rpc.remote(f"worker{each}", torch.ones, args=((16, 32),)) for each in (1, 2)]
        count = 1000
        start = time.perf_counter()
        for _ in range(count):
            made = [rpc.remote(each.owner(), _add, args=(each,)) for each in a]
        for each in made:
            each.to_here()
        print(f"RPC {count / (time.perf_counter() - start)}", flush=True)
    rpc.shutdown()


def _add(value: Any) -> torch.Tensor:
    held: torch.Tensor = value.local_value()
    return held + held


def measure() -> list[tuple[str, float, float, str, bool]]:
    """The table: what, found, goal, unit, reached."""
    turns = [(client(), ranks()) for _ in range(ROUNDS)]  # in turn: the machine may change meanwhile
    mine = {name: _best_of([each[name] for each, _ in turns], name in ("ops", "fetch")) for name in turns[0][0]}
    theirs = {name: min(each[name] for _, each in turns) for name in turns[0][1]}
    found = {
        "client time of a small op": mine["op"] * 1e6,
        "small ops per second through 2 workers": mine["ops"],
        "matmul, client over ranks": mine["matmul"] / theirs["matmul"],
        "MLP step, client over ranks": mine["MLP step"] / theirs["MLP step"],
        "item() of a value that is there": mine["item"] * 1e3,
        "100 MB fetched": mine["fetch"],
    }
    return [
        (name, value, GOALS[name][0], GOALS[name][1], _reaches(value, *GOALS[name])) for name, value in found.items()
    ]


def _best_of(values: list[float], is_more_better: bool) -> float:
    return max(values) if is_more_better else min(values)


def _reaches(value: float, goal: float, unit: str) -> bool:
    return value >= goal if unit in MORE_IS_BETTER else value <= goal


def main() -> None:
    """Print the table."""
    for name, value, goal, unit, is_reached in measure():
        print(f"{name:<40} {value:>12.2f} {unit:<5} goal {goal:>10g}  {'reached' if is_reached else 'NOT reached'}")
    print(f"{'the same add by torch RPC, 2 workers':<40} {rpc_calls():>12.2f} /s")


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        on_a_rank()
    elif sys.argv[1:] == ["rpc"]:
        torch.multiprocessing.spawn(_rpc_worker, nprocs=3)
    else:
        main()
