"""One of several processes on which plans are measured: those with names, and the one that autoplan calls the fastest.

Run as `meshloom run --nproc 2 benchmarks/autoplan_ranks.py found.json full`. The processes measure themselves first,
all at once: a product of matrices, a copy, a small op, and collectives between them. Those figures are the machine that
autoplan plans for. Every process calls the same things as often as the others.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
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
BEST = "the best"


def seconds_of(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least seconds of each, in turn round by round; all processes call each as often."""
    best = dict.fromkeys(works, math.inf)
    for number in range(rounds + 1):
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            if number:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return {name: average(seconds) for name, seconds in best.items()}


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
    cases = {f"{kind} {size}": (kind, size) for kind in ("all_reduce", "all_gather") for size in effort.collectives}
    works = {name: collective_work(kind, mesh, "d", size) for name, (kind, size) in cases.items()}
    took = seconds_of(works, 3 * rounds)
    points = [Point(kind, HERE.count, size, took[name]) for name, (kind, size) in cases.items()]
    latency, bandwidth = fit(points)
    return loom.Machine("here", latency, bandwidth, flops, copied, memory=8e9, overhead=overhead)


def make_step(mesh: loom.Mesh, plan: loom.Plan, sizes: Sizes) -> Callable[[], None]:
    """A training step on real processes."""
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

    return step


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
    plans = {f"{recipe.title} on {mesh}": (mesh, recipe) for mesh, recipe in named_plans(task)}
    plans = {name: pair for name, pair in plans.items() if search.trials.price(*pair) is not None}
    named = list(plans)
    plans[BEST] = (best.mesh, best.recipe)
    whole = search.trials.folded.whole
    took = seconds_of({name: make_step(m, r.plan(whole, m), sizes) for name, (m, r) in plans.items()}, rounds)
    both = {name: [took[name], search.trials.verify(*pair).time] for name, pair in plans.items()}
    found = {
        "best": f"{best.recipe.title} on {best.mesh}",
        "took": both[BEST],
        "named": {name: both[name] for name in named},
    }
    if HERE.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({**found, "machine": repr(machine)}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
