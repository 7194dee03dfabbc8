"""Predicted against measured on this machine: it is calibrated, then asked about sizes and shapes that it did not see.

Every point is measured in three passes over all points, and again where its best was not met twice, as the calibration
does; between processes in three runs of them, as their tables, since how threads lie on the cores lasts as long as a
run. The best counts, and the spread of all says how far a point repeats at all.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from examples.transformer import PLANS

import meshloom as loom
from benchmarks import gpt
from benchmarks.goals import Goal
from benchmarks.optimizers import megatron_placements
from benchmarks.results import OURS, Row, verdict
from benchmarks.works import language_step
from meshloom.cli.calibrate import measure_together
from meshloom.cli.host_measuring import FULL, QUICK, measure_host, time_and_memory
from meshloom.cli.measuring import read_in_passes, time_for
from meshloom.fabric.host import Host
from meshloom.tensor.host_time import host_time

# the collectives, each with what it is told besides the value
KINDS: dict[str, tuple[int, ...]] = {
    "all_reduce": (), "all_gather": (0,), "reduce_scatter": (0,), "all_to_all": (1, 0), "broadcast": (),
}  # fmt: skip
MEDIAN, WORST = Goal("error", 0.15), Goal("error", 0.30)
BETWEEN, FAR = Goal("error", 0.20), Goal("error", 0.0)
PROCESSES = (2, 4)
RUNS = 3  # of processes
RANKS = Path(__file__).with_name("prediction_ranks.py")
DEVICES = (8, 32)
SIZES = (2 << 10, 24 << 10, 200 << 10, 3 << 20, 12 << 20, 40 << 20)
PRODUCTS = (
    (96, 96, 96), (300, 300, 300), (512, 512, 512), (768, 768, 768), (1200, 1200, 1200), (20, 2048, 2048),
    (2048, 50, 2048), (1500, 200, 900), (2000, 2000, 40), (333, 777, 555), (8, 3000, 3000), (640, 640, 2560),
)  # fmt: skip
SHAPES = ((512, 512), (2000, 1000), (4096, 4096))
ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1, "relu": torch.relu, "gelu": F.gelu, "exp": torch.exp,
    "softmax(1)": lambda x: x.softmax(1), "softmax(0)": lambda x: x.softmax(0), "sum": torch.sum,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One point: what is run on how many devices, for how long it is measured, and how it is made ready."""

    work: str
    detail: str
    devices: int
    seconds: float
    make: Callable[[], Callable[[], object]]


def cases(quick: bool) -> list[Case]:
    """Every point."""
    short = 0.01 if quick else 0.12
    found = [*_collectives(short), *_products(short), *_elementwise(short)]
    steps = [*_steps(0.05 if quick else 1.5)]
    return [*found[::17], steps[0]] if quick else [*found, *steps]


def count(quick: bool) -> int:
    """How many rows there will be, the summaries included."""
    together = 12 if quick else 30 + 30 + (6 if find_spec("transformers") is not None else 4)
    return len(cases(quick)) + 2 + together + 2


def predictions(quick: bool) -> Iterator[Row]:
    """In this process, then on several."""
    yield from alone(quick)
    yield from between(quick)


def alone(quick: bool) -> Iterator[Row]:
    """For each point a row with both times and the error of the predicted one; then what lies in the middle."""
    host, listed = measure_host(QUICK if quick else FULL), cases(quick)
    readings = read_in_passes([partial(_read, case, host) for case in listed], lambda reading: reading[0])
    errors = []
    for case, taken in zip(listed, readings, strict=True):
        row = _row(case, taken)
        assert row.error is not None
        errors.append(abs(row.error))
        yield row
    for name, goal, value in (
        ("median", MEDIAN, statistics.median(errors)),
        ("95 of 100", WORST, sorted(errors)[math.ceil(0.95 * len(errors)) - 1]),
    ):
        figure = round(value, 4)
        yield Row(
            OURS, "predicted", f"{name} of {len(errors)} points", (), 0, "error", error=figure, **verdict(goal, figure)
        )


def between(quick: bool) -> Iterator[Row]:
    """The same on several processes, each number of them calibrated and predicted together."""
    errors: list[float] = []
    far = 0
    numbers = PROCESSES[: 1 if quick else None]
    for count, each in itertools.chain.from_iterable(zip(itertools.repeat(n), _together(n, quick)) for n in numbers):
        error = each["said"] / each["took"] - 1
        errors.append(abs(error))
        far += abs(error) > max(0.3, each["spread"])
        yield Row(
            OURS, f"predicted {each['work']}", f"{each['detail']}, {count} processes, spread {each['spread']:.0%}",
            (count,), count, "error", ours_us=round(each["took"] * 1e6, 3), predicted_us=round(each["said"] * 1e6, 3),
            error=round(error, 4),
        )  # fmt: skip
    for detail, goal, value in (
        (f"median of {len(errors)} points between processes", BETWEEN, statistics.median(errors)),
        ("part of them further off than 30 % and than their spread", FAR, far / len(errors)),
    ):
        held = {"error": round(value, 4), **verdict(goal, value)}
        yield Row(OURS, "predicted", detail, (), 0, "error", **held)


def _together(count: int, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "host.toml").write_text(measure_together(count, quick), encoding="utf-8")
        runs = [_run_together(count, quick, Path(folder)) for _ in range(1 if quick else RUNS)]
    return [_best_of_runs(each) for each in zip(*runs, strict=True)]


def _run_together(count: int, quick: bool, folder: Path) -> list[dict[str, Any]]:
    path = folder / "found.json"
    command = [sys.executable, "-m", "meshloom", "run", "--nproc", str(count), str(RANKS), str(path)]
    root = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RANKS.parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, "quick" if quick else "full"], capture_output=True, text=True, env=root)
    if done.returncode:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RuntimeError(f"{count} processes did not come to their end:\n{said}")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _best_of_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Both times of a point in the best pass of all runs, and how far all passes lie apart."""
    readings = [(took, said) for run in runs for took, said in run["readings"]]
    took, said = min(readings)
    return {**runs[0], "took": took, "said": said, "spread": spread_of(readings)}


Reading = tuple[float, float]  # the seconds that a call took, and that were predicted right after it


def _read(case: Case, host: Host) -> Reading:
    return read(case.make(), host, partial(time_for, seconds=case.seconds))


def read(run: Callable[[], object], host: Host, clock: Callable[[Callable[[], object]], float]) -> Reading:
    """What a call takes, and what the tables say of it with the memory that the system was seen to give meanwhile.

    Whether the heap has room for a result depends on all that the process did before, so it differs between passes.
    """
    run()
    took, given = time_and_memory(run, clock)
    with host_time(host) as found:
        run()
    return took, found.seconds_without_fresh + given * host.calls["fresh"]


def spread_of(readings: Sequence[Reading]) -> float:
    """How far the passes lie apart."""
    taken = [took for took, _ in readings]
    return max(taken) / min(taken) - 1


def _row(case: Case, readings: Sequence[Reading]) -> Row:
    """A point as it was timed in the best pass, and as it was predicted there."""
    took, said = min(readings)
    return Row(
        OURS, f"predicted {case.work}", f"{case.detail}, spread {spread_of(readings):.0%}", (case.devices,),
        case.devices, "error", ours_us=round(took * 1e6, 3), predicted_us=round(said * 1e6, 3),
        error=round(said / took - 1, 4),
    )  # fmt: skip


def _mesh(devices: int) -> loom.Mesh:
    return loom.open_mesh((devices,), axes=("d",))


def _collectives(seconds: float) -> Iterator[Case]:
    """Collectives of a value of some bytes on each device, or of so many on all together where each has a part."""
    for devices in DEVICES:
        for kind in KINDS:
            for size in SIZES:
                each = size // 4 if kind in ("all_reduce", "reduce_scatter") else max(1, size // 4 // devices)
                make = partial(_collective, kind, devices, each)
                yield Case(kind.replace("_", "-"), _text(size), devices, seconds, make)


def _collective(kind: str, devices: int, each: int) -> Callable[[], object]:
    return make_collective(kind, _mesh(devices), each)


def make_collective(kind: str, mesh: loom.Mesh, each: int) -> Callable[[], object]:
    """A collective to which every device gives so many elements; of an all-to-all as many as make a square."""
    devices = math.prod(mesh.shape)
    side = devices * max(1, math.isqrt(each // devices))
    shape = (side, side) if kind == "all_to_all" else (each * devices,)
    x = loom.randn(*shape, mesh=mesh, placements="S(0)")
    return partial(getattr(loom.collectives, kind), x, *KINDS[kind])


def _products(seconds: float) -> Iterator[Case]:
    for m, k, n in PRODUCTS:
        for name, placements in (("row", ("S(0)", "R")), ("inner", ("S(1)", "S(0)"))):
            make = partial(_product, (m, k, n), placements)
            yield Case("matmul", f"{m}x{k}x{n} {name}", 8, seconds, make)


def _product(sizes: tuple[int, int, int], placements: tuple[str, str]) -> Callable[[], object]:
    m, k, n = sizes
    a, b = (
        loom.randn(*shape, mesh=_mesh(8), placements=each)
        for shape, each in zip(((m, k), (k, n)), placements, strict=True)
    )
    return lambda: a @ b


def _elementwise(seconds: float) -> Iterator[Case]:
    for shape in SHAPES:
        for name, run in ELEMENTWISE.items():
            yield Case(name, f"{shape[0]}x{shape[1]}", 8, seconds, partial(_element, run, shape))


def _element(run: Callable[[Any], Any], shape: tuple[int, int]) -> Callable[[], object]:
    return partial(run, loom.randn(*shape, mesh=_mesh(8), placements="S(0)"))


def _steps(seconds: float) -> Iterator[Case]:
    for devices in DEVICES:
        for plan in ("data", "tensor"):
            yield Case("MLP step", plan, devices, seconds, partial(_on, make_mlp, plan, devices))
    for plan in ("data", "tensor"):
        yield Case("GPT step", plan, 8, seconds, partial(_on_grid, make_gpt, plan))
        if find_spec("transformers") is not None:
            yield Case("Llama step", plan, 8, seconds, partial(_on_grid, make_llama, plan))


def _on(make: Callable[..., Callable[[], object]], plan: str, devices: int) -> Callable[[], object]:
    return make(plan, _mesh(devices))


def _on_grid(make: Callable[..., Callable[[], object]], plan: str) -> Callable[[], object]:
    return make(plan, loom.open_mesh((2, 4), axes=("dp", "tp")))


def make_mlp(plan: str, mesh: loom.Mesh, width: int = 512, rows: int = 384) -> Callable[[], object]:
    """A training step of two layers, with the rows sharded, or the hidden dim."""
    is_data = plan == "data"
    shapes, placements = ((width, 4 * width), (4 * width, width)), ("R", "R") if is_data else ("S(1)", "S(0)")
    up, down = (
        loom.Parameter(torch.randn(shape) / 32, mesh, each) for shape, each in zip(shapes, placements, strict=True)
    )
    x = loom.randn(rows, width, mesh=mesh, placements="S(0)" if is_data else "R")
    optimizer = torch.optim.AdamW([up, down])

    def step() -> None:
        optimizer.zero_grad()
        ((x @ up).relu() @ down).square().mean().backward()
        optimizer.step()

    return step


def make_gpt(plan: str, mesh: loom.Mesh) -> Callable[[], object]:
    """A training step of the example GPT."""
    run = gpt.sides(mesh, PLANS[plan]).ours
    assert run is not None
    return run


def make_llama(plan: str, mesh: loom.Mesh) -> Callable[[], object]:
    """A training step of a public Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=96,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, module in model.named_modules():
        for each, value in list(module._parameters.items()):
            if value is not None:
                placements = megatron_placements(name) if plan == "tensor" else {}
                module._parameters[each] = loom.Parameter(value.detach(), mesh, placements)
    tokens = loom.distribute(torch.randint(0, 1024, (8, 96)), mesh, {"dp": loom.Shard(0)})
    return language_step(model, tokens, tokens, 1e-3)


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
