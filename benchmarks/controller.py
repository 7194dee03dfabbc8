"""A client and two workers, in turn with the same program on two ranks of torchrun, and beside torch RPC and Ray calls.

Ranks and workers are there all the time, and wait without using a core while the other side runs. `python -m
benchmarks.run --only controller` prints the table; the ranks and the peers are this file too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshloom as loom

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goals import Goal
from benchmarks.results import OURS, Row, verdict

SIZE, WIDTH, ROWS = 1024, 512, 256
CALLS = 6000
NAME = "controller"
GOALS = {
    "op": Goal("ours_us", 12.0, " us each"),
    "calls": Goal("ours_us", 33.3, " us each, 30,000/s"),
    "matmul": Goal("ratio", 1.05),
    "MLP step": Goal("ratio", 1.05),
    "item": Goal("ours_us", 500.0, " us each"),
    "fetch": Goal("mb_per_s", 1000.0, " MB/s", at_least=True),
}


# The programs


def works(mesh: loom.Mesh) -> dict[str, Callable[[], Any]]:
    """What a client and ranks run alike; each ends with a number that is read."""
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
        return float(c[0, 0].item())

    def step() -> float:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.item())

    return {"matmul": matmul, "MLP step": step}


def time_of(work: Callable[[], Any]) -> float:
    """The seconds of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Ranks, which wait for a word on a pipe of their own


def serve_rank(folder: Path) -> None:
    """Run what the pipe of this rank says; the first rank tells how long it took."""
    found = works(loom.open_mesh((2,), axes=("dp",)))
    rank = loom.process().rank
    with open(folder / f"rank{rank}") as orders, open(folder / "answers", "w") if not rank else open(os.devnull) as out:
        for line in orders:
            took = time_of(found[line.strip()])
            if not rank:
                print(took, file=out, flush=True)


@contextmanager
def ranks() -> Iterator[Callable[[str], float]]:
    """Two ranks of torchrun: a function that says how many seconds they take for a program."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in ("rank0", "rank1", "answers"):
            os.mkfifo(Path(folder) / name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *place]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = subprocess.Popen(
            [*command, str(Path(__file__)), "rank", folder], env=environment, stderr=subprocess.DEVNULL
        )
        stack.callback(process.wait, 30)
        pipes = [stack.enter_context(open(Path(folder) / f"rank{rank}", "w")) for rank in (0, 1)]
        answers = stack.enter_context(open(Path(folder) / "answers"))

        def ask(name: str) -> float:
            for pipe in pipes:
                print(name, file=pipe, flush=True)
            return float(answers.readline())

        yield ask


# What is measured


def compare_programs(cluster: Any, rounds: int) -> Iterator[tuple[str, float, float]]:
    """Each program by the client and by the ranks, in turn: the shortest of each."""
    mine = works(cluster.open_mesh((2,), axes=("dp",)))
    with ranks() as theirs:
        for name, work in mine.items():
            for _ in range(2):
                work(), theirs(name)
            both = [(time_of(work), theirs(name)) for _ in range(rounds)]
            yield name, min(ours for ours, _ in both), min(others for _, others in both)


def time_calls(cluster: Any) -> tuple[float, float]:
    """Client time of a small add, and the time of one of many through the workers, in seconds."""
    mesh = cluster.open_mesh((2,), axes=("dp",))
    x, y = loom.ones(32, 32, mesh=mesh), loom.ones(32, 32, mesh=mesh)
    x + y
    cluster.wait()
    own, start = time.thread_time(), time.perf_counter()
    for _ in range(CALLS):
        x + y
    used = (time.thread_time() - own) / CALLS
    cluster.wait()
    return used, (time.perf_counter() - start) / CALLS


def measured(quick: bool) -> Iterator[Row]:
    """The rows: what a client costs beside ranks that do the same, and beside peers."""
    rounds = 3 if quick else 40
    with loom.launch(workers=2, threads=1) as cluster:
        for name, ours, theirs in compare_programs(cluster, rounds):
            ratio = round(ours / theirs, 4)
            yield _row(name, "over the same on torchrun", "ratio", ours, dense_us=round(theirs * 1e6, 1), ratio=ratio)
        turns = [time_calls(cluster) for _ in range(rounds)]
        yield _row("op", "32x32 add, time of the client", "ours_us", min(used for used, _ in turns))
        calls = min(each for _, each in turns)
        yield _row("calls", "32x32 add, one of many", "ours_us", calls)
        mesh = cluster.open_mesh((2,), axes=("dp",))
        number = loom.ones(32, 32, mesh=mesh)[0, 0].redistribute("R")
        number.item()
        yield _row("item", "a value that needs no collective", "ours_us", min(time_of(number.item) for _ in range(200)))
        big = loom.ones(25_000_000, mesh=mesh, placements="R")
        took = min(time_of(big.to_torch) for _ in range(2 * rounds))
        yield _row("fetch", "100 MB", "mb_per_s", took, mb_per_s=round(100 / took, 1))
    for peer, calling in (("torch RPC", "rpc"), ("Ray actors", "ray")):
        if calling == "ray" and find_spec("ray") is None:
            yield Row(OURS, f"{NAME} calls", f"the same by {peer}", (2,), 2, "times_ours", missing="ray: not installed")
            continue
        each = call_peer(calling)
        figures = {"theirs_us": round(each * 1e6, 1), "times_ours": round(each / calls, 2)}
        yield _row("calls", f"the same by {peer}", "times_ours", calls, **figures)


def _row(name: str, detail: str, shown: str, seconds: float, **figures: Any) -> Row:
    goal = GOALS[name]
    found = {"ours_us": round(seconds * 1e6, 2), **figures}
    judged = {} if shown == "times_ours" else verdict(goal, found[goal.figure])
    return Row(OURS, f"{NAME} {name}", detail, (2,), 2, shown, **found, **judged)


def count() -> int:
    """How many rows there are."""
    return len(GOALS) + 2


# Peers: a call on two tensors that are there, sent without waiting


def call_peer(which: str) -> float:
    """The seconds of one add on both workers."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with tempfile.TemporaryDirectory(prefix="r") as home:
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), which], capture_output=True, text=True, timeout=180, check=False,
            env={**environment, "HOME": home, "RAY_TMPDIR": home},
        )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("TOOK ")), None)
    if line is None:
        raise RuntimeError(f"{which} did not come to its end:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(line.split()[1])


def serve_rpc(rank: int, port: int) -> None:
    """Torch's RPC: one process calls, two others hold the tensors."""
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        held = [rpc.remote(f"worker{each}", torch.ones, args=((16, 32),)) for each in (1, 2)]

        def work() -> None:
            for _ in range(500):
                made = [rpc.remote(each.owner(), _add, args=(each,)) for each in held]
            for each in made:
                each.to_here()

        print(f"TOOK {min(time_of(work) for _ in range(3)) / 500}", flush=True)
    rpc.shutdown()


def _add(value: Any) -> torch.Tensor:
    held: torch.Tensor = value.local_value()
    return held + held


def call_actors() -> None:
    """Ray: two actors hold the tensors, and what they compute stays there."""
    import ray

    class Holder:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.held = self.made = torch.ones(16, 32)

        def add(self) -> None:
            self.made = self.held + self.held

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=1)(Holder)
    actors = [actor.remote() for _ in range(2)]

    def work() -> None:
        for _ in range(500):
            made = [each.add.remote() for each in actors]
        ray.get(made)

    work()
    print(f"TOOK {min(time_of(work) for _ in range(3)) / 500}", flush=True)
    ray.shutdown()


def main(arguments: list[str]) -> None:
    """A rank or a peer of this benchmark."""
    if arguments[0] == "rank":
        serve_rank(Path(arguments[1]))
    elif arguments[0] == "ray":
        call_actors()
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(serve_rpc, (port,), nprocs=3)


if __name__ == "__main__":
    main(sys.argv[1:])
