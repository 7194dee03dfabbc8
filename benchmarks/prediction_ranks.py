"""One of several processes that are measured and predicted together; the first writes what it found as JSON.

Run as `meshloom run --nproc 2 benchmarks/prediction_ranks.py found.json full`. Every process calls the same things as
often as the others, so points are the best of a fixed number of rounds.
"""

from __future__ import annotations

import json
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import meshloom as loom
from benchmarks.prediction import RUNS, make_gpt, make_llama, make_mlp
from meshloom.cli.host_measuring import FULL, QUICK, measure_host
from meshloom.fabric.host import Host
from meshloom.mesh.process import HERE
from meshloom.processes import join
from meshloom.tensor.host_time import host_time

SIZES = (3 << 10, 48 << 10, 400 << 10, 2500 << 10, 12 << 20, 40 << 20)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
Point = tuple[str, str, int, Callable[[], object]]


def points(is_quick: bool) -> Iterator[Point]:
    """Name, detail, rounds and what is called."""
    mesh = loom.open_mesh((HERE.count,), axes=("d",))
    for kind in KINDS:
        for size in SIZES[:2] if is_quick else SIZES:
            rounds = 3 if is_quick else max(5, 40 * (1 << 20) // max(size, 1 << 20))
            yield kind.replace("_", "-"), _text(size), rounds, _collective(kind, mesh, size)
    for plan in ("data", "tensor") if HERE.count == 2 else ():
        yield "MLP step", plan, 3 if is_quick else 20, make_mlp(plan, mesh)
        grid = loom.open_mesh((1, 2) if plan == "tensor" else (2, 1), axes=("dp", "tp"))
        if not is_quick:
            yield "GPT step", plan, 10, make_gpt(plan, grid)
        if not is_quick and find_spec("transformers") is not None:
            yield "Llama step", plan, 10, make_llama(plan, grid)


def _collective(kind: str, mesh: loom.Mesh, size: int) -> Callable[[], object]:
    """A collective to which every process gives so many bytes."""
    side = max(2, round((size / 4) ** 0.5)) // 2 * 2
    shape = (side * HERE.count, side * HERE.count) if kind == "all_to_all" else (size // 4 // 8 * 8 * HERE.count,)
    x = loom.randn(*shape, mesh=mesh, placements="S(0)")
    more: dict[str, tuple[object, ...]] = {"all_gather": (0,), "reduce_scatter": (0,), "all_to_all": (1, 0)}
    return partial(getattr(loom.collectives, kind), x, *more.get(kind, ()))


def measure(point: Point, host: Host) -> dict[str, object]:
    """Both times of a point, and how far three runs lie apart."""
    name, detail, rounds, run = point
    run()
    run()
    with host_time(host) as found:
        run()
    taken = [min(timeit.repeat(run, number=1, repeat=rounds)) for _ in range(RUNS)]
    return {
        "work": name,
        "detail": detail,
        "took": min(taken),
        "spread": max(taken) / min(taken) - 1,
        "said": found.seconds,
    }


def _text(size: int) -> str:
    return f"{size / (1 << 20):.3g} MB" if size >= 1 << 20 else f"{size >> 10} KB"


if __name__ == "__main__":
    join()
    is_quick = sys.argv[2] == "quick"
    torch.manual_seed(0)
    host = measure_host(QUICK if is_quick else FULL)
    found = [measure(each, host) for each in points(is_quick)]
    if HERE.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
