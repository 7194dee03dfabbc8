"""One of several processes on which plans are measured: those with names, and the one that autoplan calls the fastest.

Run as `meshloom run --nproc 2 benchmarks/autoplan_ranks.py found.json full`. The processes measure themselves first,
all at once: a product of matrices, a copy, a small op, and collectives between them. Those figures are the machine that
autoplan plans for. Every process calls the same things as often as the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from examples.plan_models import SIZES, Sizes, gpt, loss

import meshloom as loom
from meshloom.cli.measuring import (
    Effort,
    Point,
    collective_work,
    fit,
    matmul_flops,
    memory_bandwidth,
    op_seconds,
)
from meshloom.mesh.process import HERE
from meshloom.nn.search.autoplan import make_task
from meshloom.nn.search.choosing import Search, named_plans
from meshloom.processes import join

EFFORT = {
    "full": Effort(0.5, 32 << 20, 512, (32 << 10, 4 << 20)),
    "quick": Effort(0.02, 1 << 20, 64, (4 << 10, 64 << 10)),
}
MODEL = {"full": Sizes(384, 2, 6, 6, 1536, 2048, 128), "quick": replace(SIZES["tiny"], layers=2)}
ROUNDS = {"full": 7, "quick": 2}
ROWS = 8


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    """The least seconds of some calls, of the slowest process; all processes call it as often."""
    found = []
    work()
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return average(min(found))


def average(value: float) -> float:
    """The mean of what the processes found, so that all decide the same."""
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told)
    return float(told) / HERE.count


def measure_machine(effort: Effort, rounds: int) -> loom.Machine:
    """This machine as so many devices, one for each process."""
    mesh = loom.open_mesh((HERE.count,), axes=("d",))
    dist.barrier()
    flops = average(matmul_flops("f32", effort))
    copied = average(memory_bandwidth(effort))
    small = loom.open_mesh((HERE.count,), axes=("d",))
    overhead = average(op_seconds(small, effort))
    points = []
    for kind in ("all_reduce", "all_gather"):
        for size in effort.collectives:
            points.append(Point(kind, HERE.count, size, seconds_of(collective_work(kind, mesh, "d", size), 3 * rounds)))
    latency, bandwidth = fit(points)
    return loom.Machine("here", latency, bandwidth, flops, copied, memory=8e9, overhead=overhead)


def measure_plan(mesh: loom.Mesh, plan: loom.Plan, sizes: Sizes, rounds: int) -> float:
    """Seconds of a training step on real processes."""
    torch.manual_seed(0)
    opened = loom.open_mesh(mesh.shape, axes=mesh.axes)
    model = loom.parallelize(gpt(sizes), opened, plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.arange(ROWS * sizes.length).reshape(ROWS, -1) % sizes.words
    batch = tuple(loom.distribute(each, opened, plan.batch) for each in (tokens, tokens))

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return seconds_of(step, rounds)


def main() -> None:
    """Plan, measure, and write what was found."""
    join()
    effort = sys.argv[2]
    sizes, rounds = MODEL[effort], ROUNDS[effort]
    machine = measure_machine(EFFORT[effort], rounds)
    tokens = torch.zeros(ROWS, sizes.length, dtype=torch.long)
    task = make_task(gpt(sizes), (tokens, tokens), machine, HERE.count, loss=loss)
    search = Search(task, lambda line: None)
    best = search.run(3)[0]
    plans = [(mesh, recipe) for mesh, recipe in named_plans(task) if search.trials.price(mesh, recipe) is not None]
    named = {}
    for mesh, recipe in plans:
        took = measure_plan(mesh, recipe.plan(search.trials.folded.whole, mesh), sizes, rounds)
        named[f"{recipe.title} on {mesh}"] = [took, search.trials.verify(mesh, recipe).time]
    took = measure_plan(best.mesh, best.recipe.plan(search.trials.folded.whole, best.mesh), sizes, rounds)
    found = {"best": f"{best.recipe.title} on {best.mesh}", "took": [took, best.run.time], "named": named}
    if HERE.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({**found, "machine": repr(machine)}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
