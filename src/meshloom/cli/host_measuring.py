"""The tables of this machine, measured: curves of kernels by size, products by their sizes, what a call costs.

Each point is the best of several runs, since other work only ever adds time.
"""

from __future__ import annotations

import itertools
import math
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshloom import collectives
from meshloom.cli.measuring import DTYPES, Tell, best_of
from meshloom.comms import wire
from meshloom.comms.group import group_of
from meshloom.cost.host import FRESH, ROWS, RUNS, TOKENS, WEIGHED, WIDTHS, Work, kernel_seconds
from meshloom.engines import private
from meshloom.fabric.host import Curve, Host, Products, Sizes
from meshloom.mesh import Mesh
from meshloom.mesh.process import HERE
from meshloom.processes import join
from meshloom.tensor.creation import distribute, open_mesh, randn
from meshloom.tensor.host_time import host_time


@dataclass(frozen=True, slots=True)
class Sweep:
    """How much is measured: seconds per point, bytes that a kernel touches, steps of products and their limit.

    `rounds` is how often processes call what they do together, and `sent` the bytes that they send. `large` are sizes
    at which sums alone are measured: their results stay small.
    """

    seconds: float
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    flops: float
    rounds: int
    sent: tuple[int, ...]
    large: tuple[int, ...] = ()


# results stay below what the allocator takes anew from the system every time: that has a figure of its own
SIZES = tuple(size << 10 for size in (4, 16, 48, 128, 320, 1024, 1800, 5 << 10, 16 << 10, 48 << 10))
STEPS_OF_PRODUCTS = (1, 4, 16, 40, 72, 128, 208, 384, 704, 1100, 1900, 3072)
SENT = tuple(size << 10 for size in (1, 8, 24, 96, 256, 1024, 5 << 10, 20 << 10, 64 << 10))
FULL = Sweep(0.03, SIZES, STEPS_OF_PRODUCTS, 5e9, 100, SENT, (192 << 20, 640 << 20))
QUICK = Sweep(0.001, (1 << 12, 1 << 16), (16, 64), 1e7, 3, (1 << 10, 16 << 10))


def measure_host(sweep: Sweep = FULL, tell: Tell = lambda what, number, total: None) -> Host:
    """Every table of this process on this machine, with the threads that torch has now."""
    kinds, total = [*_kernels()], STEPS
    curves = {}
    for number, (kind, make) in enumerate(kinds, start=1):
        tell(f"kernels: {kind}", number, total)
        curves[kind] = _curve(make, _sizes_of(kind, sweep), sweep)
    products = {}
    for number, (name, dtype) in enumerate(DTYPES.items(), start=len(kinds) + 1):
        tell(f"products in {name}", number, total)
        products[name] = _products(dtype, sweep)
    tell("single kernels", total - 1, total)
    host = Host("this-machine", torch.get_num_threads(), curves, products, dict.fromkeys(CALLS, LEAST))
    host = replace(host, weights=dict(_weights(host, sweep)))
    tell("calls", total, total)
    host = replace(host, processes=dict(_between(host, sweep)))
    return replace(host, calls=_calls(host, sweep))


def _sizes_of(kind: str, sweep: Sweep) -> tuple[int, ...]:
    """At which sizes a kind is measured: those that have many curves at every second."""
    if kind.startswith("sum"):
        results = {"sum": 1 << 30, **{f"sum of {rows} rows": rows for rows in ROWS}}[kind]
        return (*sweep.sizes, *(size for size in sweep.large if size // results < FRESH))
    return sweep.sizes[::2] if kind[-1].isdecimal() and len(sweep.sizes) > 2 else sweep.sizes


# Curves: for a number of bytes that a kernel touches, the kernel ready to run, and the bytes that it really touches

Made = tuple[Callable[[], object], float]


def _kernels() -> Iterator[tuple[str, Callable[[int], Made]]]:
    yield "pointwise", lambda size: _on(size // 12, 2, lambda a, b: a + b, 12)
    yield "in place", lambda size: _on(size // 12, 2, lambda a, b: a.add_(b), 12)
    yield "copy", lambda size: _on(size // 8, 1, lambda a: a.clone(), 8)
    yield "turned copy", lambda size: _on_rows(size // 8, lambda a: a.t().contiguous(), 8)
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


def _on(elements: int, arrays: int, run: Callable[..., object], each: int) -> Made:
    given = [torch.rand(max(1, elements)) for _ in range(arrays)]
    return lambda: run(*given), float(each * max(1, elements))


def _on_rows(elements: int, run: Callable[..., object], each: int, rows: int | None = None) -> Made:
    rows = max(1, rows if rows is not None else math.isqrt(elements))
    given = torch.rand(rows, max(1, elements // rows))
    return lambda: run(given), float(each * given.numel())


def _strided(run: int, size: int) -> Made:
    """Two arrays of which one has its heads turned to the front, as attention has them, and lies in short runs."""
    turned = torch.rand(8, max(1, size // (12 * 8 * 8 * run)), 8, 2 * run)[..., :run].transpose(1, 2)
    other = torch.rand(turned.shape)
    return lambda: turned * other, 12.0 * other.numel()


def _strided_copy(run: int, size: int) -> Made:
    """Runs in another order, as an all-to-all has them."""
    given = torch.rand(8, max(1, size // (8 * 8 * 8 * run)), 8, 2 * run)[..., :run]
    return lambda: given.transpose(0, 2).contiguous(), 8.0 * given.numel()


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


def _curve(make: Callable[[int], Made], sizes: Sequence[int], sweep: Sweep) -> Curve:
    points: dict[float, float] = {}
    for size in sizes:
        run, touched = make(size)
        points[touched] = best_of(run, sweep.seconds)
    return Curve(tuple(sorted(points.items())))


def _products(dtype: torch.dtype, sweep: Sweep) -> Products:
    """FLOP/s on the grid; beyond the limit a product runs as fast as the largest measured one that it contains.

    Of other dtypes than f32 every second step is enough.
    """
    rates: dict[Sizes, float] = {}
    steps = sweep.steps if dtype is torch.float32 or len(sweep.steps) < 3 else sweep.steps[::2]
    for m, k, n in sorted(itertools.product(steps, repeat=3), key=math.prod):
        flops = 2.0 * m * k * n
        if flops > sweep.flops:
            rates[m, k, n] = _contained((m, k, n), rates, steps)
        else:
            a, b, made = (torch.ones(shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
            # into memory that is there: what fresh memory costs has a figure of its own
            rates[m, k, n] = flops / best_of(partial(torch.mm, a, b, out=made), sweep.seconds / 4)
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


def _weights(host: Host, sweep: Sweep) -> Iterator[tuple[str, float]]:
    """Single kernels beside the curve of their kind, at a size where arithmetic decides."""
    size = WEIGHED // 8
    arrays = [torch.rand(size) + 0.5 for _ in range(3)]
    for name, (run, count) in {**_functions(*arrays), **_functions_in_order(*arrays)}.items():
        yield name, _weigh(Work(name, 4.0 * count * size), run, host, sweep)
    apart = [(torch.rand(size, 2) + 0.5)[:, 0] for _ in range(3)]
    for name, (run, count) in _functions(*apart).items():
        yield f"{name} by element", _weigh(Work(name, 4.0 * count * size, run=1), run, host, sweep)
    yield "transposed", _weigh_transposed(sweep)


def _weigh(work: Work, run: Callable[[], object], host: Host, sweep: Sweep) -> float:
    start, whole = (kernel_seconds(replace(work, bytes=size), host) for size in (1.0, work.bytes))
    return max(0.05, (best_of(run, sweep.seconds) - start) / max(whole - start, 1e-12))


def _weigh_transposed(sweep: Sweep) -> float:
    """How many times as long a product takes whose first operand lies by columns."""
    outer, inner = (sweep.steps[len(sweep.steps) // 2] * times for times in (1, 3))
    a, b = torch.rand(outer, inner), torch.rand(inner, outer)
    turned = a.t().contiguous().t()
    return best_of(lambda: turned @ b, sweep.seconds * 2) / best_of(lambda: a @ b, sweep.seconds * 2)


def _calls(host: Host, sweep: Sweep) -> dict[str, float]:
    """What calls cost besides their kernels, on small tensors."""
    mesh = open_mesh((8,))
    x, square = (randn(*shape, mesh=mesh, placements="S(0)") for shape in ((8 * 32,), (16, 16)))
    lists = [[torch.rand(8) for _ in range(32)] for _ in range(2)]
    again: dict[str, Callable[[], object]] = {
        "again": lambda: x + x,
        "all_reduce": lambda: collectives.all_reduce(x),
        "all_gather": lambda: collectives.all_gather(x, 0),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, 0),
        "all_to_all": lambda: collectives.all_to_all(square, 1, 0),
        "broadcast": lambda: collectives.broadcast(x),
    }
    found = {
        **_layer_calls(mesh, host, sweep),
        **{name: _beside(run, host, _best(run, sweep)) for name, run in again.items()},
    }
    alone = host.curve("in place").points[0][1]
    found["item"] = (best_of(lambda: private.foreach_add_(*lists), sweep.seconds) - alone) / 32
    found["fresh"] = _fresh(sweep)
    return {name: max(seconds, LEAST) for name, seconds in found.items()}


def _fresh(sweep: Sweep) -> float:
    """Seconds per byte of memory that comes from the system, beyond writing it."""
    source = torch.rand(FRESH // 2)
    target = torch.empty_like(source)
    there = best_of(lambda: target.copy_(source), sweep.seconds * 4)
    return (best_of(lambda: source.clone(), sweep.seconds * 4) - there) / source.nbytes


STEPS = len([*_kernels()]) + len(DTYPES) + 2  # what is told of
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
LEAST = 1e-15  # seconds of what the tables explain to the last bit
CALLS = ("op", "again", *COLLECTIVES, "kernel", "item", "fresh")


def _layer_calls(mesh: Mesh, host: Host, sweep: Sweep) -> dict[str, float]:
    """What a call and a kernel of backward cost in a small layer, where one op is not like the one before."""
    forward = _layer(mesh)
    with host_time(host) as priced:
        loss = forward()
    took = _best(forward, sweep)
    per_call = (took - priced.seconds) / len(priced.calls)
    with host_time(host) as back:
        loss.backward(retain_graph=True)
    took = _best(partial(loss.backward, retain_graph=True), sweep)
    return {"op": per_call, "kernel": (took - back.seconds) / back.kernels}


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


def _between(host: Host, sweep: Sweep) -> Iterator[tuple[tuple[str, int], Curve]]:
    """Collectives between the processes that there are, by the bytes that each one gives, without their kernels.

    A reduce-scatter adds what arrives, the root of a broadcast copies what it sends: a program's kernels are priced as
    they are seen, those too, so the curve is what they do not explain.
    """
    group = group_of(open_mesh((8,)), [0]) if HERE.count > 1 else None
    if group is None:
        return
    count = group.processes
    run: dict[str, Callable[[torch.Tensor], object]] = {
        "all_reduce": lambda x: wire.all_reduce(x, group, own=True),
        "all_gather": lambda x: wire.all_gather(x, group),
        "reduce_scatter": lambda x: wire.reduce_scatter(x.view(count, -1), group),
        "all_to_all": lambda x: wire.all_to_all(x.view(count, -1), group),
        "broadcast": lambda x: wire.broadcast(x, group, 0),
    }
    host = replace(host, processes={(kind, count): Curve(((1.0, LEAST),)) for kind in run})
    for kind, send in run.items():
        points = {}
        for size in sweep.sent:
            x = torch.zeros(size // 4 // count * count)
            call = partial(send, x)
            rounds = max(min(8, sweep.rounds), sweep.rounds * (1 << 20) // max(size, 1 << 20))
            points[float(x.nbytes)] = max(LEAST, _beside(call, host, _best_together(call, rounds)))
        yield (kind, count), Curve(tuple(points.items()))


def _best(run: Callable[[], object], sweep: Sweep) -> float:
    return best_of(run, sweep.seconds * 4) if HERE.count == 1 else _best_together(run, sweep.rounds)


def _best_together(run: Callable[[], object], rounds: int) -> float:
    run()
    return min(timeit.repeat(run, number=1, repeat=rounds))


def _beside(run: Callable[[], object], host: Host, took: float) -> float:
    """Of the seconds that a call took, those that the tables do not explain."""
    with host_time(host) as found:
        run()
    return took - found.seconds


if __name__ == "__main__":  # one of several processes, all measuring at once; the first writes what it found
    join()
    found = measure_host(QUICK if sys.argv[2] == "quick" else FULL)
    if HERE.rank == 0:
        Path(sys.argv[1]).write_text(found.to_toml(), encoding="utf-8")
