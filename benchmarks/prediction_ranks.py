"""One of several processes that are measured and predicted together; the first writes what it found as JSON.

Run as `meshloom run --nproc 2 benchmarks/prediction_ranks.py found.json full`, with the tables of as many processes in
`host.toml` beside it. Every process calls the same things as often as the others, so points are timed in a fixed number
of rounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import meshloom as loom
from benchmarks.prediction import KINDS, Reading, make_collective, make_gpt, make_llama, make_mlp, read
from meshloom.cli.host_measuring import rounds_of
from meshloom.cli.measuring import read_in_passes, time_rounds
from meshloom.fabric.host import Host, load_host
from meshloom.mesh.process import HERE
from meshloom.processes import join

SIZES = (3 << 10, 48 << 10, 400 << 10, 2500 << 10, 12 << 20, 40 << 20)
Point = tuple[str, str, int, Callable[[], Callable[[], object]]]


def points(is_quick: bool) -> Iterator[Point]:
    """Name, detail, rounds and how what is called is made; a collective with the bytes that every process gives."""
    mesh = loom.open_mesh((HERE.count,), axes=("d",))
    for kind in KINDS:
        for size in SIZES[:2] if is_quick else SIZES:
            rounds = 3 if is_quick else rounds_of(size, 40)
            yield kind.replace("_", "-"), _text(size), rounds, partial(make_collective, kind, mesh, size // 4 // 8 * 8)
    for plan in ("data", "tensor") if HERE.count == 2 else ():
        yield "MLP step", plan, 3 if is_quick else 20, partial(make_mlp, plan, mesh)
        grid = loom.open_mesh((1, 2) if plan == "tensor" else (2, 1), axes=("dp", "tp"))
        if not is_quick:
            yield "GPT step", plan, 10, partial(make_gpt, plan, grid)
        if not is_quick and find_spec("transformers") is not None:
            yield "Llama step", plan, 10, partial(make_llama, plan, grid)


def read_point(point: Point, host: Host) -> Reading:
    """The typical seconds of a point, made anew, and those that are predicted."""
    _, _, rounds, make = point
    return read(make(), host, partial(time_rounds, rounds=rounds))


def _text(size: int) -> str:
    return f"{size / (1 << 20):.3g} MB" if size >= 1 << 20 else f"{size >> 10} KB"


if __name__ == "__main__":
    join()
    is_quick = sys.argv[2] == "quick"
    torch.manual_seed(0)
    host = load_host(Path(sys.argv[1]).with_name("host.toml"))
    listed = [*points(is_quick)]
    reads = [partial(read_point, each, host) for each in listed]
    readings = read_in_passes(reads, lambda reading: reading[0], passes=2, more=1)
    found = [
        {"work": work, "detail": detail, "readings": taken}
        for (work, detail, *_), taken in zip(listed, readings, strict=True)
    ]
    if HERE.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
