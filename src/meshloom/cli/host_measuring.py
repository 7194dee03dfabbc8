"""The tables of this machine, measured: curves of kernels by size, products by their sizes, what a call costs.

Each point is timed in several passes over all of them, so that a disturbance of some seconds meets it once, and the
best pass counts. What a pass says is what a call takes on average (`measuring.typical`). Memory that the system gave
meanwhile has a figure of its own, and is taken off. What processes do together is measured in several runs of them, of
which the best counts too: how their threads lie on the cores lasts as long as a run.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from meshloom import collectives
from meshloom.cli.measuring import DTYPES, MORE, PASSES, Tell, read_in_passes, time_for, time_rounds
from meshloom.comms import wire
from meshloom.comms.group import group_of
from meshloom.cost.host import FRESH, ROWS, RUNS, TOKENS, WEIGHED, WIDTHS, Work, kernel_seconds
from meshloom.engines import private
from meshloom.fabric.host import Curve, Host, Products, Sizes
from meshloom.mesh import Mesh
from meshloom.mesh.process import HERE
from meshloom.processes import join
from meshloom.tensor.creation import distribute, open_mesh, randn
from meshloom.tensor.host_time import MEMORY, HostTime, bytes_given, host_time, page_faults


@dataclass(frozen=True, slots=True)
class Sweep:
    """How much is measured: seconds per point and pass, bytes that a kernel touches, steps of products and their limit.

    `rounds` is how often processes call what they do together, and `sent` the bytes that they send. `large` are sizes
    at which sums alone are measured: their results stay small. `beyond` are sizes of copies and additions that no cache
    holds, into memory that is there.
    """

    seconds: float
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    flops: float
    rounds: int
    sent: tuple[int, ...]
    large: tuple[int, ...] = ()
    beyond: tuple[int, ...] = ()


AMONG_SEVERAL = 1  # passes at most over what did not repeat: they are started again, and on shared cores little repeats
MB = 1 << 20
# results stay below what the allocator takes anew from the system every time: that has a figure of its own
SIZES = tuple(size << 10 for size in (4, 16, 48, 128, 320, 1024, 1800, 2560, 5 << 10, 16 << 10, 48 << 10))
# from a line of the cache on, rows begin at its start: what others cost has a figure of its own; none is a whole number
# of pages, which few rows times a large matrix are slower at
STEPS_OF_PRODUCTS = (1, 4, 16, 48, 80, 128, 208, 384, 704, 1104, 1904, 3088)
SENT = tuple(size << 10 for size in (1, 8, 24, 96, 256, 1024, 5 << 10, 10 << 10, 20 << 10, 36 << 10, 64 << 10))
# sums are measured where they stop to fit into a cache too, and far beyond it
LARGE = tuple(size * MB for size in (20, 28, 38, 60, 84, 130, 200, 640, 1500))
BEYOND = tuple(size * MB for size in (84, 170))
FULL = Sweep(0.01, SIZES, STEPS_OF_PRODUCTS, 5e9, 40, SENT, LARGE, BEYOND)
QUICK = Sweep(0.0005, (1 << 12, 1 << 16), (16, 64), 1e7, 3, (1 << 10, 16 << 10))

Made = tuple[Callable[[], object], float]  # what is timed, ready to run, and how much it does: bytes, FLOP
Reading = tuple[float, float]  # its seconds, and how much it did


class Timed(NamedTuple):
    """What one pass says of a point: seconds of a call, how much it did, and bytes that the system gave to it."""

    seconds: float
    amount: float
    given: float


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a table: how it is made ready, and for how many seconds it is timed, or in how many rounds."""

    table: str
    place: Any
    make: Callable[[], Made]
    seconds: float = 0.0
    rounds: int = 0  # of what processes do together, each as often as the others

    def read(self) -> Timed:
        """Time it once, and look at how much memory the system gave to the calls."""
        run, amount = self.make()
        clock = partial(time_rounds, rounds=self.rounds) if self.rounds else partial(time_for, seconds=self.seconds)
        seconds, given = time_and_memory(run, clock)
        return Timed(seconds, amount, given)


Readings = dict[str, dict[Any, Reading]]  # by table and place


def time_and_memory(run: Callable[[], object], clock: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    """The seconds of a call, as a clock finds them, and the bytes that the system gave to each call meanwhile."""
    run()
    calls, before = 0, page_faults()

    def counted() -> None:
        nonlocal calls
        calls += 1
        run()

    seconds = clock(counted)
    return seconds, bytes_given(page_faults() - before) / calls


def measure_host(sweep: Sweep = FULL, tell: Tell = lambda what, number, total: None) -> Host:
    """Every table of this process on this machine, with the threads that torch has now."""
    return make_tables(read_tables(sweep, tell))


def read_tables(
    sweep: Sweep = FULL, tell: Tell = lambda what, number, total: None, earlier: Readings | None = None
) -> Readings:
    """The readings that tables are made of; with those of an earlier run of the processes, the better of both.

    What a process does by itself is not read a second time.
    """
    points = [*_sent_points(_sent(), sweep), *_call_points(_calls(), sweep)]
    if earlier is None:
        alone = (_curve_points, _product_points, _single_points, _other_points)
        return read_points([*(point for each in alone for point in each(sweep)), *points], tell)
    found = {**earlier}
    for table, readings in read_points(points, tell, earlier).items():
        both = [*earlier.get(table, {}).items(), *readings.items()]
        found[table] = {place: min(each for at, each in both if at == place) for place, _ in both}
    return found


def make_tables(found: Readings) -> Host:
    """The tables that explain the readings."""
    curves = {kind: _curve(found[kind]) for kind, _ in _kernels()}
    products = {name: _products(found[name]) for name in DTYPES}
    host = Host("this-machine", torch.get_num_threads(), curves, products, dict.fromkeys(CALLS, LEAST))
    host = replace(host, weights=_weights(found, host), calls={**host.calls, **_memory_costs(found, host)})
    host = replace(host, processes=_between(found, _sent(), host))
    return replace(host, calls=_call_costs(found, _calls(), host))


def read_points(points: Sequence[Point], tell: Tell, earlier: Readings | None = None) -> Readings:
    """The best reading of every point, table by table in each pass, without what memory from the system cost in it.

    What that costs is one of the points, or was one of an earlier run.
    """
    tables = [*dict.fromkeys(point.table for point in points)]
    listed = sorted(points, key=lambda point: tables.index(point.table))
    total = PASSES * len(tables) + 1

    def tell_table(turn: int, number: int) -> None:
        table = listed[number].table
        if turn == PASSES:
            tell("what did not repeat", total, total)
        elif number == 0 or table != listed[number - 1].table:
            tell(f"{table}, pass {turn + 1}", turn * len(tables) + tables.index(table) + 1, total)

    more = MORE if HERE.count == 1 else AMONG_SEVERAL
    readings = read_in_passes([point.read for point in listed], lambda timed: timed.seconds, tell_table, more=more)
    best: dict[str, dict[Any, Timed]] = {table: {} for table in tables}
    for point, each in zip(listed, readings, strict=True):
        best[point.table][point.place] = min(each)
    known: Mapping[str, Any] = {**(earlier or {}), **best}
    fresh = _cost_of_fresh(known[MEMORY]) if MEMORY in known else 0.0
    return {
        table: {
            place: (timed.seconds if table == MEMORY else max(timed.seconds - timed.given * fresh, LEAST), timed.amount)
            for place, timed in found.items()
        }
        for table, found in best.items()
    }


def _cost_of_fresh(readings: Mapping[Any, Sequence[float]]) -> float:
    """What a byte from the system costs beside one that is there."""
    (fresh, size, *_), (there, *_) = (readings[name] for name in ("fresh", "there"))
    return max((fresh - there) / size, LEAST)


def _curve_points(sweep: Sweep) -> Iterator[Point]:
    for kind, make in _kernels():
        for size in _sizes_of(kind, sweep):
            yield Point(kind, size, partial(make, size), sweep.seconds)


def _curve(readings: Mapping[Any, Reading]) -> Curve:
    """Seconds by what is really touched; sizes that come to the same bytes are one point."""
    points: dict[float, float] = {}
    for seconds, touched in readings.values():
        points[touched] = min(seconds, points.get(touched, math.inf))
    return Curve(tuple(sorted(points.items())))


def _sizes_of(kind: str, sweep: Sweep) -> tuple[int, ...]:
    """At which sizes a kind is measured: those that have many curves at every second."""
    if kind.startswith("sum"):
        results = {"sum": 1 << 30, **{f"sum of {rows} rows": rows for rows in ROWS}}[kind]
        return (*sweep.sizes, *(size for size in sweep.large if size // results < 2 * FRESH))
    beyond = sweep.beyond if kind.startswith(("pointwise", "copy", "turned copy", "strided copy")) else ()
    return (*(sweep.sizes[::2] if kind[-1].isdecimal() and len(sweep.sizes) > 2 else sweep.sizes), *beyond)


# Curves: for a number of bytes that a kernel touches, the kernel ready to run, and the bytes that it really touches


def _kernels() -> Iterator[tuple[str, Callable[[int], Made]]]:
    yield "pointwise", lambda size: _on(size // 12, 2, _into_room(size, torch.add), 12)
    yield "in place", lambda size: _on(size // 12, 2, lambda a, b: a.add_(b), 12)
    yield "copy", lambda size: _on(size // 8, 1, _into_room(size, _copy_to), 8)
    yield "turned copy", lambda size: _on_rows(size // 8, _into_room(size, lambda a, out: _copy_to(a.t(), out)), 8)
    for run in RUNS:
        yield f"strided {run}", partial(_strided, run)
        yield f"strided copy {run}", partial(_strided_copy, run)
        yield f"join {run}", partial(_join, run)
    yield "sum", lambda size: _on_rows(size // 4, lambda a: a.sum(-1), 4)
    for rows in ROWS:
        yield f"sum of {rows} rows", partial(_sum_of_rows, rows)
    yield "softmax", lambda size: _on_rows(size // 8, lambda a: a.softmax(-1), 8)
    yield "softmax across", lambda size: _on_rows(size // 8, lambda a: a.softmax(0), 8)
    yield "norm", lambda size: _on_rows(size // 8, lambda a: F.layer_norm(a, a.shape[-1:]), 8)
    yield "look-up", _look_up
    for tokens, width in itertools.product(TOKENS, WIDTHS):
        for kind in ("attention", "attention backward"):
            yield f"{kind} {tokens}x{width}", partial(_attention, tokens, width, kind != "attention")


Kernel = Callable[..., torch.Tensor]


def _into_room(size: int, kernel: Kernel) -> Kernel:
    """A kernel that takes `out`: of sizes beyond the others its result goes into memory that is there."""
    if size <= SIZES[-1]:
        return partial(kernel, out=None)
    room: list[torch.Tensor] = []

    def run(*given: torch.Tensor) -> torch.Tensor:
        if not room:
            room.append(kernel(*given, out=None))
        return kernel(*given, out=room[0])

    return run


def _copy_to(given: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """A copy in order."""
    if out is not None:
        return out.copy_(given)
    return given.clone() if given.is_contiguous() else given.contiguous()


def _on(elements: int, arrays: int, run: Callable[..., object], each: int) -> Made:
    given = [torch.ones(max(1, elements)) for _ in range(arrays)]
    return lambda: run(*given), float(each * max(1, elements))


def _on_rows(elements: int, run: Callable[..., object], each: int, rows: int | None = None) -> Made:
    rows = max(1, rows if rows is not None else math.isqrt(elements))
    given = torch.ones(rows, max(1, elements // rows))
    return lambda: run(given), float(each * given.numel())


def _strided(run: int, size: int) -> Made:
    """Two arrays of which one has its heads turned to the front, as attention has them, and lies in short runs."""
    turned = torch.rand(8, max(1, size // (12 * 8 * 8 * run)), 8, 2 * run)[..., :run].transpose(1, 2)
    other = torch.rand(turned.shape)
    return lambda: turned * other, 12.0 * other.numel()


def _strided_copy(run: int, size: int) -> Made:
    """Runs in another order, as an all-to-all has them."""
    given = torch.rand(8, max(1, size // (8 * 8 * 8 * run)), 8, 2 * run)[..., :run].transpose(0, 2)
    return partial(_into_room(size, _copy_to), given), 8.0 * given.numel()


def _join(run: int, size: int) -> Made:
    """Two arrays side by side."""
    pair = [torch.rand(max(1, size // (16 * run)), run) for _ in range(2)]
    return lambda: torch.cat(pair, 1), 16.0 * pair[0].numel()


def _sum_of_rows(rows: int, size: int) -> Made:
    return _on_rows(size // 4, lambda a: a.sum(0), 4, rows)


def _look_up(size: int) -> Made:
    rows = max(1, size // (8 * 256))
    table, places = torch.rand(rows, 256), torch.randint(0, rows, (rows,))
    return lambda: F.embedding(places, table), 8.0 * table.numel() + 8 * rows


def _attention(tokens: int, width: int, is_backward: bool, size: int) -> Made:
    """As many heads as make so many FLOP; the curve goes by FLOP."""
    heads = max(1, size // (4 * tokens * tokens * width))
    q, k, v = (torch.rand(1, heads, tokens, width, requires_grad=is_backward) for _ in range(3))
    flops = 4.0 * heads * tokens * tokens * width
    result = F.scaled_dot_product_attention(q, k, v)
    if not is_backward:
        return lambda: F.scaled_dot_product_attention(q, k, v), flops
    ones = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, (q, k, v), ones, retain_graph=True), 2.5 * flops


def _product_points(sweep: Sweep) -> Iterator[Point]:
    for name, dtype in DTYPES.items():
        for m, k, n in itertools.product(_steps_of(name, sweep), repeat=3):
            if 2.0 * m * k * n <= sweep.flops:
                yield Point(name, (m, k, n), partial(_product, dtype, (m, k, n)), sweep.seconds / 2)


def _steps_of(dtype: str, sweep: Sweep) -> tuple[int, ...]:
    """Of other dtypes than f32 every second step is enough."""
    return sweep.steps if dtype == "f32" or len(sweep.steps) < 3 else sweep.steps[::2]


def _product(dtype: torch.dtype, sizes: Sizes) -> Made:
    """Into memory that is there: what fresh memory costs has a figure of its own."""
    m, k, n = sizes
    a, b, made = (torch.ones(shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
    return partial(torch.mm, a, b, out=made), 2.0 * m * k * n


def _products(readings: Mapping[Any, Reading]) -> Products:
    """FLOP/s on the grid; beyond the limit a product runs as fast as the largest measured one that it contains."""
    steps = tuple(sorted({size for sizes in readings for size in sizes}))
    rates: dict[Sizes, float] = {}
    for sizes in sorted(itertools.product(steps, repeat=3), key=math.prod):
        seconds, flops = readings.get(sizes, (0.0, 0.0))
        rates[sizes] = flops / seconds if seconds else _contained(sizes, rates, steps)
    return Products(steps, rates)


def _contained(sizes: Sizes, rates: dict[Sizes, float], steps: tuple[int, ...]) -> float:
    m, k, n = (steps[steps.index(size) - 1] if size == max(sizes) else size for size in sizes)
    return rates[m, k, n]


Function = tuple[Callable[[], object], int]  # and how many arrays it touches


def _functions(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> dict[str, Function]:
    """Kernels that weigh more or less than their kind."""
    aten = torch.ops.aten
    return {
        "neg": (lambda: -x, 2), "relu": (lambda: x.relu(), 2), "div": (lambda: x / y, 3), "sqrt": (lambda: x.sqrt(), 2),
        "rsqrt": (lambda: x.rsqrt(), 2), "exp": (lambda: x.exp(), 2), "log": (lambda: x.log(), 2),
        "tanh": (lambda: x.tanh(), 2), "sigmoid": (lambda: x.sigmoid(), 2), "silu": (lambda: F.silu(x), 2),
        "gelu": (lambda: F.gelu(x), 2), "erf": (lambda: x.erf(), 2), "sin": (lambda: x.sin(), 2),
        "cos": (lambda: x.cos(), 2), "pow": (lambda: x.pow(2), 2), "where": (lambda: torch.where(x > y, x, y), 4),
        "silu_backward": (lambda: aten.silu_backward(g, x), 3), "gelu_backward": (lambda: aten.gelu_backward(g, x), 3),
        "tanh_backward": (lambda: aten.tanh_backward(g, x), 3),
        "threshold_backward": (lambda: aten.threshold_backward(g, x, 0), 3),
    }  # fmt: skip


def _functions_in_order(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> dict[str, Function]:
    """Those that are only met on arrays that lie in order."""
    rows, aten = x[: len(x) // 64 * 64].view(-1, 64), torch.ops.aten
    return {
        "addcmul_": (lambda: x.addcmul_(y, g, value=1e-9), 4), "lerp_": (lambda: x.lerp_(y, 1e-9), 3),
        "addcdiv_": (lambda: x.addcdiv_(y, g, value=1e-9), 4), "sqrt_": (lambda: y.clamp_(0.5).sqrt_(), 4),
        "_softmax_backward_data": (lambda: aten._softmax_backward_data(rows, rows, -1, torch.float32), 3),
        "_log_softmax_backward_data": (lambda: aten._log_softmax_backward_data(rows, rows, -1, torch.float32), 3),
    }  # fmt: skip


def _single_points(sweep: Sweep) -> Iterator[Point]:
    """Single kernels, at a size where arithmetic decides."""
    size = WEIGHED // 8
    arrays = [torch.rand(size) + 0.5 for _ in range(3)]
    apart = [(torch.rand(size, 2) + 0.5)[:, 0] for _ in range(3)]
    for name, (run, count) in {**_functions(*arrays), **_functions_in_order(*arrays)}.items():
        yield Point(SINGLE, name, partial(_as_is, run, 4.0 * count * size), sweep.seconds)
    for name, (run, count) in _functions(*apart).items():
        yield Point(SINGLE, name + APART, partial(_as_is, run, 4.0 * count * size), sweep.seconds)


def _other_points(sweep: Sweep) -> Iterator[Point]:
    """What is compared with its like: operands by columns, rows across lines, lists, memory from the system."""
    outer, inner = (sweep.steps[len(sweep.steps) // 2] * times for times in (1, 3))
    a, b = torch.rand(outer, inner), torch.rand(inner, outer)
    turned = a.t().contiguous().t()
    lists = [[torch.rand(8) for _ in range(32)] for _ in range(2)]
    yield Point(OTHER, "by columns", partial(_as_is, partial(torch.matmul, turned, b), 1.0), sweep.seconds * 2)
    yield Point(OTHER, "by rows", partial(_as_is, partial(torch.matmul, a, b), 1.0), sweep.seconds * 2)
    even = sweep.steps[2 * len(sweep.steps) // 3]
    yield Point(OTHER, "even", partial(_product, torch.float32, (even,) * 3), sweep.seconds * 2)
    yield Point(OTHER, "ragged", partial(_product, torch.float32, (even - 3,) * 3), sweep.seconds * 2)
    yield Point(OTHER, "list", partial(_as_is, partial(private.foreach_add_, *lists), 32.0), sweep.seconds)
    for name, columns in (("even", 1024), ("uneven", 1000)):
        across = partial(_on_rows, 1024 * columns, lambda a: a.softmax(0), 8, 1024)
        yield Point(OTHER, f"across {name}", across, sweep.seconds * 2)
    yield Point(MEMORY, "fresh", partial(_copy, sweep.sizes[-1], False), sweep.seconds * 4)
    yield Point(MEMORY, "there", partial(_copy, sweep.sizes[-1], True), sweep.seconds * 4)


def _as_is(run: Callable[[], object], amount: float) -> Made:
    return run, amount


def _copy(size: int, is_there: bool) -> Made:
    """A copy into memory that is there, or into memory that the system gives and takes back every time.

    A clone would not do: the C library may have so much in its heap.
    """
    source = torch.ones(size // 4)
    there = torch.empty_like(source)
    return lambda: (there if is_there else _take_from_system(size)).copy_(source), float(size)


def _take_from_system(size: int) -> torch.Tensor:
    """As the C library takes it: memory that processes could share has smaller pages and costs more."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)


def _weights(found: Readings, host: Host) -> dict[str, float]:
    """Single kernels beside the curve of their kind; products by columns, or with ragged rows, beside others."""
    weights = {name: _weigh(name, *reading, host) for name, reading in found[SINGLE].items()}
    other = found[OTHER]
    weights["ragged"] = _compare(other["ragged"], other["even"])
    weights["even"] = _compare(other["across even"], other["across uneven"])
    return {**weights, "transposed": other["by columns"][0] / other["by rows"][0]}


def _compare(one: Reading, other: Reading) -> float:
    """How many times as long one takes for as much as the other does."""
    return (one[0] / one[1]) / (other[0] / other[1])


def _memory_costs(found: Readings, host: Host) -> dict[str, float]:
    """What a tensor of a list costs beside a kernel, and a byte from the system beside one that is there."""
    listed, items = found[OTHER]["list"]
    item = (listed - host.curve("in place").points[0][1]) / items
    return {"item": max(item, LEAST), "fresh": _cost_of_fresh(found[MEMORY])}


def _weigh(name: str, seconds: float, touched: float, host: Host) -> float:
    work = Work(name.removesuffix(APART), touched, run=int(name.endswith(APART)))
    start, whole = (kernel_seconds(replace(work, bytes=size), host) for size in (1.0, touched))
    return max(0.05, (seconds - start) / max(whole - start, 1e-12))


# Calls, on small tensors: what they cost besides their kernels

Run = Callable[[], Any]


def _calls() -> dict[str, Run]:
    """What is called: a small layer, where one op is not like the one before, its backward, and single calls."""
    mesh = open_mesh((8,))
    x, square = (randn(*shape, mesh=mesh, placements="S(0)") for shape in ((8 * 32,), (16, 16)))
    forward = _layer(mesh)
    repeated: tuple[Run, ...] = (
        lambda: x + x,
        partial(torch.relu, x),
        partial(torch.sum, x),
        partial(torch.softmax, square, 1),
    )
    return {
        "op": forward,
        "kernel": partial(forward().backward, retain_graph=True),
        **{f"{AGAIN} {number}": run for number, run in enumerate(repeated)},
        "all_reduce": lambda: collectives.all_reduce(x),
        "all_gather": lambda: collectives.all_gather(x, 0),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, 0),
        "all_to_all": lambda: collectives.all_to_all(square, 1, 0),
        "broadcast": lambda: collectives.broadcast(x),
    }


def _call_points(calls: Mapping[str, Run], sweep: Sweep) -> Iterator[Point]:
    rounds = sweep.rounds if HERE.count > 1 else 0
    for name, run in calls.items():
        yield Point(CALL, name, partial(_as_is, run, 1.0), sweep.seconds * 4, rounds)


def _call_costs(found: Readings, calls: Mapping[str, Run], host: Host) -> dict[str, float]:
    """What a call and a kernel of backward cost besides their kernels."""
    priced = {name: _price(run, host) for name, run in calls.items()}
    costs = {name: found[CALL][name][0] - each.seconds_without_fresh for name, each in priced.items()}
    costs["op"] /= len(priced["op"].calls)
    costs["kernel"] /= priced["kernel"].kernels
    costs[AGAIN] = statistics.fmean(costs.pop(name) for name in calls if name.startswith(AGAIN))
    return {**host.calls, **{name: max(seconds, LEAST) for name, seconds in costs.items()}}


def _price(run: Run, host: Host) -> HostTime:
    with host_time(host) as found:
        run()
    return found


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
AGAIN = "again"
CALLS = ("op", AGAIN, *COLLECTIVES, "kernel", "item", "fresh")
LEAST = 1e-15  # seconds of what the tables explain to the last bit
SINGLE, OTHER, BETWEEN, CALL = "single kernels", "copies and lists", "collectives between processes", "calls"
APART = " by element"
STEPS = PASSES * (len([*_kernels()]) + len(DTYPES) + 4) + 1  # what is told of


def _layer(mesh: Mesh) -> Callable[[], Any]:
    """Norm, attention by hand and a feed-forward part, on few rows of each device, with residuals."""
    drawn = [torch.rand(shape) / 8 for shape in ((96, 32), (32, 32), (128, 32), (32, 128))]
    inner, outer, up, down = (distribute(each, mesh, "R").requires_grad_() for each in drawn)
    x = randn(64, 4, 32, mesh=mesh, placements="S(0)")

    def forward() -> Any:
        normed = F.layer_norm(x, (32,))
        q, k, v = F.linear(normed, inner).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / 6.0).softmax(-1)
        hidden = x + F.linear(scores @ v, outer)
        return (hidden + F.linear(F.gelu(F.linear(hidden, up)), down)).square().mean()

    return forward


# What processes do together, each as often as the others

Send = Callable[[torch.Tensor], object]


def _sent() -> dict[str, Send]:
    """The collectives between the processes that there are; none in one process.

    An all-reduce sends what was just written, as in a program: what lies in a cache since the last time is sent faster.
    """
    group = group_of(open_mesh((8,)), [0]) if HERE.count > 1 else None
    if group is None:
        return {}
    count = group.processes
    return {
        "all_reduce": lambda x: wire.all_reduce(x, group),
        "all_gather": lambda x: wire.all_gather(x, group),
        "reduce_scatter": lambda x: wire.reduce_scatter(x.view(count, -1), group),
        "all_to_all": lambda x: wire.all_to_all(x.view(count, -1), group),
        "broadcast": lambda x: wire.broadcast(x, group, 0),
    }


def _sent_points(sent: Mapping[str, Send], sweep: Sweep) -> Iterator[Point]:
    """Collectives by the bytes that each process gives."""
    for kind, send in sent.items():
        for size in _sizes_sent(kind, sweep):
            yield Point(BETWEEN, (kind, size), partial(_give, send, size), rounds=rounds_of(size, sweep.rounds))


def _sizes_sent(kind: str, sweep: Sweep) -> list[int]:
    """The sweep's sizes; of an all-reduce also the last one that takes one round, and the first that does not."""
    last = wire.SMALL // HERE.count
    ends = (last, last + 4 * HERE.count) if kind == "all_reduce" else ()
    return sorted({*sweep.sent, *(size for size in ends if size < max(sweep.sent))})


def rounds_of(size: int, rounds: int) -> int:
    """How often a collective of some bytes is called, if one of a megabyte is so often.

    A small one up to four times as often, a large one less often: among processes that share cores, it takes twice as
    long the next time.

    >>> rounds_of(4096, 40), rounds_of(1 << 20, 40), rounds_of(64 << 20, 40)
    (160, 40, 16)
    """
    return max(min(16, rounds), int(rounds * min(4, (1 << 20) / size)))


def _give(send: Send, size: int) -> Made:
    x = torch.zeros(size // 4 // HERE.count * HERE.count)
    return partial(send, x), float(x.nbytes)


def _between(found: Readings, sent: Mapping[str, Send], host: Host) -> dict[tuple[str, int], Curve]:
    """Curves of the collectives without their kernels.

    A reduce-scatter adds what arrives, the root of a broadcast copies what it sends: a program's kernels are priced as
    they are seen, those too, so the curve is what they do not explain.
    """
    host = replace(host, processes={(kind, HERE.count): Curve(((1.0, LEAST),)) for kind in sent})
    points: dict[str, dict[float, float]] = {kind: {} for kind in sent}
    for (kind, size), (took, given) in found.get(BETWEEN, {}).items():
        run, _ = _give(sent[kind], size)
        points[kind][given] = max(LEAST, took - _price(run, host).seconds_without_fresh)
    return {(kind, HERE.count): Curve(tuple(sorted(each.items()))) for kind, each in points.items()}


def write_readings(found: Readings, path: Path) -> None:
    """Keep readings for the next run of the processes."""
    rows = [[table, place, *reading] for table, each in found.items() for place, reading in each.items()]
    path.write_text(json.dumps(rows), encoding="utf-8")


def read_readings(path: Path) -> Readings | None:
    """The readings that an earlier run of the processes kept; None before the first."""
    if not path.exists():
        return None
    found: Readings = {}
    for table, place, seconds, amount in json.loads(path.read_text(encoding="utf-8")):
        found.setdefault(table, {})[tuple(place) if isinstance(place, list) else place] = seconds, amount
    return found


def measure_as_one_of_several(path: Path, sweep: Sweep) -> None:
    """In a process that measures together with others: the first writes the tables, and readings beside them."""
    kept = path.with_suffix(".json")
    found = read_tables(sweep, earlier=read_readings(kept))
    host = make_tables(found)
    if HERE.rank == 0:
        write_readings(found, kept)
        path.write_text(host.to_toml(), encoding="utf-8")


if __name__ == "__main__":
    join()
    measure_as_one_of_several(Path(sys.argv[1]), QUICK if sys.argv[2] == "quick" else FULL)
