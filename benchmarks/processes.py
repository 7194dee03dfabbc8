"""meshloom beside DTensor and DDP on real Gloo processes over loopback, in one run.

`python -m benchmarks.processes --ranks 2` starts the processes (`--megabytes` sets the size of the collectives), which
time both sides in turn: short rounds of the same number of calls on every process, a barrier before each, best of many.
It prints one line of JSON per work, with the seconds of rank 0. All sides use one thread per process, as torchrun sets
it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import Work
from benchmarks.works import BATCH, FEATURES, SIZE, language_step, mlp, training_step

MEGABYTES = 64
ADD, INNER, REDUCE, GATHER, SCATTER = "add", "matmul inner", "all-reduce", "all-gather", "reduce-scatter"
STEP, DEEP, LLAMA, CHECK = "MLP step", "deep MLP step", "Llama step", "divergence check"
DEPTH, WIDTH, ROWS = 20, 1024, 64  # of the deep MLP, and rows per process
LIMIT_SECONDS = 540.0

# work, detail: as `benchmarks.peers` expects them
WORKS = (
    (ADD, "DTensor, 32x32 per device"),
    (ADD, "dense torch, 32x32"),
    (ADD, "DTensor, both over dense torch"),
    (INNER, f"DTensor, {SIZE}^3"),
    (REDUCE, f"DTensor, {MEGABYTES} MB"),
    (GATHER, f"DTensor, {MEGABYTES} MB"),
    (SCATTER, f"DTensor, {MEGABYTES} MB"),
    (STEP, "DTensor, data-parallel"),
    (STEP, "DDP, data-parallel"),
    (DEEP, f"DDP, {DEPTH * 4.2:.0f} MB of gradients"),
    (LLAMA, "DDP, AdamW"),
    (LLAMA, "DDP, AdamW fused on both sides"),
    (CHECK, "MLP step, sample against off"),
    (CHECK, "MLP step, always against off"),
)


Sides = tuple[Work, ...]  # ours first
Seconds = tuple[float, ...]


def _works(count: int, megabytes: int) -> Iterator[tuple[tuple[str, str], Sides, int, int]]:
    """Each work: its sides, calls per round, rounds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import meshloom as loom

    mesh = loom.open_mesh((count,), axes=("dp",))
    theirs = init_device_mesh("cpu", (count,))
    x, y = (torch.randn(32 * count, 32) for _ in range(2))
    a, b = (loom.distribute(each, mesh, "S(0)") for each in (x, y))
    c, d = (distribute_tensor(each, theirs, [Shard(0)]) for each in (x, y))
    one, two = (each[:32].clone() for each in (x, y))
    yield WORKS[0], (lambda: a + b, lambda: c + d, lambda: one + two), 200, 60

    x, y = (torch.randn(SIZE, SIZE) for _ in range(2))
    a, b = loom.distribute(x, mesh, "S(1)"), loom.distribute(y, mesh, "S(0)")
    c, d = distribute_tensor(x, theirs, [Shard(1)]), distribute_tensor(y, theirs, [Shard(0)])
    yield WORKS[3], (lambda: a @ b, lambda: (c @ d).redistribute(theirs, [Replicate()])), 2, 30

    size = megabytes * (1 << 20) // 4
    part = torch.randn(size)
    e = loom.from_local(part, mesh, "P(sum)")
    f = DTensor.from_local(part, theirs, [Partial()])
    yield WORKS[4], (lambda: e.redistribute("R"), lambda: f.redistribute(theirs, [Replicate()])), 1, 40
    scatter = (lambda: e.redistribute("S(0)"), lambda: f.redistribute(theirs, [Shard(0)]))

    part = torch.randn(size // count)
    g = loom.from_local(part, mesh, "S(0)")
    h = DTensor.from_local(part, theirs, [Shard(0)])
    yield WORKS[5], (lambda: g.redistribute("R"), lambda: h.redistribute(theirs, [Replicate()])), 1, 40
    yield WORKS[6], scatter, 1, 40
    yield from _steps(mesh)


def _steps(mesh: Any) -> Iterator[tuple[tuple[str, str], Sides, int, int]]:
    from meshloom.comms import WORLD

    model, x, y = small_mlp()
    step = training_step(*ours(model, x, y, mesh))
    yield WORKS[7], (step, training_step(*with_dtensor(model, x, y, mesh))), 1, 60
    yield WORKS[8], (step, training_step(*with_ddp(model, x, y, mesh))), 1, 60
    yield WORKS[9], beside_ddp(*deep_mlp(mesh.size), mesh, training_step), 1, 20
    yield WORKS[10], beside_ddp(*llama(), mesh, language_step), 1, 20
    yield WORKS[11], beside_ddp(*llama(), mesh, partial(language_step, fused=True)), 1, 20

    def under(check: str) -> Work:
        def run() -> object:
            WORLD.check = check
            return step()

        return run

    yield WORKS[12], (under("sample"), under("off")), 1, 120
    yield WORKS[13], (under("always"), under("off")), 1, 40
    WORLD.check = "sample"


def small_mlp() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The MLP of the works, with a batch."""
    return mlp(), torch.randn(BATCH, FEATURES[0]), torch.randn(BATCH, FEATURES[-1])


def deep_mlp(count: int, rows: int = ROWS) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Many layers, with a batch of so many rows for every process."""
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(rows * count, WIDTH), torch.randn(rows * count, WIDTH)


Placed = tuple[torch.nn.Module, Any, Any]  # a model with its batch
Make = Callable[[torch.nn.Module, Any, Any], Work]


def ours(dense: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Placed:
    """A model replicated on the mesh, with its batch sharded."""
    import meshloom as loom

    a, b = (loom.distribute(each, mesh, "S(0)") for each in (x, y))
    return _placed(copy.deepcopy(dense), mesh), a, b


def with_ddp(dense: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Placed:
    """A model in DDP, with the rows of this process."""
    from torch.nn.parallel import DistributedDataParallel

    rows = len(x) // mesh.size
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    return DistributedDataParallel(copy.deepcopy(dense)), x[mine], y[mine]


def with_dtensor(dense: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Placed:
    """A model of replicated DTensors, with its batch sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    theirs = init_device_mesh("cpu", (mesh.size,))
    a, b = (distribute_tensor(each, theirs, [Shard(0)]) for each in (x, y))
    return distribute_module(copy.deepcopy(dense), theirs), a, b


def beside_ddp(dense: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, mesh: Any, make: Make) -> Sides:
    """A data-parallel step of ours, and of DDP on the rows of this process."""
    return make(*ours(dense, x, y, mesh)), make(*with_ddp(dense, x, y, mesh))


def llama() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A small Llama with a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=256,
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (8, 128))
    return LlamaForCausalLM(config), tokens, tokens


def _placed(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    import meshloom as loom

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(parameter.detach(), mesh, {}))
    return model


def best_of(sides: Sides, calls: int, rounds: int) -> Seconds:
    """The best seconds per call of every side on this process."""
    for side in sides:
        for _ in range(3):
            side()
    best = [float("inf")] * len(sides)
    order = [*range(len(sides))]
    for _ in range(rounds):
        order.reverse()  # who comes after whom alternates
        for which in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                sides[which]()
            best[which] = min(best[which], (time.perf_counter() - start) / calls)
    return tuple(best)


def _rows(work: tuple[str, str], best: Seconds) -> list[tuple[tuple[str, str], Seconds]]:
    """What is printed of a work. The add has a third side, below which no wrapper can go, and the cost above it."""
    if len(best) == 2:
        return [(work, best)]
    ours, theirs, dense = best
    figures = ((ours, theirs), (ours, dense), (ours - dense, theirs - dense))
    return [*zip(WORKS[:3], figures, strict=True)]


def rank(count: int, scale: float, megabytes: int) -> None:
    """One process: measure every work together with the others."""
    torch.manual_seed(0)
    for work, sides, calls, rounds in _works(count, megabytes):
        taken = max(3, int(rounds * scale))
        for (name, detail), seconds in _rows(work, best_of(sides, calls, taken)):
            if dist.get_rank() == 0:
                print(json.dumps({"work": name, "detail": detail, "timing": (*seconds, taken)}), flush=True)


def launch(command: list[str], count: int, environment: dict[str, str] | None = None) -> int:
    """Start a command of this Python as so many processes and wait for them; rank 0 prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(environment or {})}
    return start_ranks([[sys.executable, *command]] * count, met, range(count))


def start_ranks(commands: Sequence[list[str]], met: dict[str, str], places: Sequence[int]) -> int:
    """Start a rank for each command, with its place on its host, and wait for all; `met` says where they meet."""
    shared = {**os.environ, "WORLD_SIZE": str(len(commands)), "OMP_NUM_THREADS": "1", **met}
    started = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(i), "LOCAL_RANK": str(place)}, cwd=Path(__file__).parents[1]
        )
        for i, (command, place) in enumerate(zip(commands, places, strict=True))
    ]
    try:
        return max(abs(process.wait(timeout=LIMIT_SECONDS)) for process in started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the collectives")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        return launch(["-m", "benchmarks.processes", *sys.argv[1:]], given.ranks)
    rank(given.ranks, given.scale, given.megabytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
