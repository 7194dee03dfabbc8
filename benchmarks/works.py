"""The works: each makes its operands, checks its answer against dense, and hands both sides over to be timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom
from benchmarks import goals, moves
from benchmarks.bare import bare
from benchmarks.goals import Goal
from benchmarks.timing import Work

SIZE = 1024
BATCH = 256
FEATURES = (1024, 4096, 1024)
REPLICATED_BYTES = 4 * 1024 * 1024


class WrongAnswer(AssertionError):
    """A work whose result is not the dense one; its time means nothing."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides of a work, ready to be timed, or one figure that needs no clock."""

    ours: Work | None = None
    dense: Work | None = None
    copies: float | None = None
    nbytes: int | None = None  # what ours goes through in a call


@dataclass(frozen=True, slots=True)
class Spec:
    """One cell of the table: a work on a mesh."""

    name: str
    detail: str
    mesh: tuple[int, ...]
    make: Callable[[], Pair]
    goal: Goal | None = None
    shown: str = "ratio"
    seconds: float = 1.0

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.mesh)

    def held_to(self, goal: Goal | None) -> Spec:
        """The same work with a goal, if it counts on so many devices."""
        return replace(self, goal=goal if goal is not None and self.devices >= goal.from_devices else None)


def all_works(devices: Sequence[int]) -> list[Spec]:
    """Every work on every number of devices, in the order of the table."""
    found = [spec for count in devices for spec in _on(count)]
    order = list(dict.fromkeys((spec.name, spec.detail) for count in sorted(devices)[::-1] for spec in _on(count)))
    return sorted(found, key=lambda spec: order.index((spec.name, spec.detail)))


def _on(devices: int) -> list[Spec]:
    listed = [_add(devices)]
    listed += [_matmul(kind, rows, devices) for rows in (SIZE, 16) for kind in _MATMULS]
    listed += [_mesh_matmul(labels, devices) for labels in _MESH_MATMULS if devices > 1]
    listed += [_mlp(devices), _memory(devices)]
    listed += [_hot(call, devices) for call in _HOT]
    listed += [_hot(call, devices, is_bare=True) for call in _HOT_BARE]
    if devices == moves.DEVICES:
        listed += [make(new) for make in (_all_reduce, _all_gather) for new in (False, True)]
    return [spec.held_to(spec.goal) for spec in listed]


def _check(ours: loom.Tensor, dense: torch.Tensor, what: str) -> None:
    if not torch.allclose(ours.to_torch(), dense, rtol=1e-4, atol=1e-3):
        worst = (ours.to_torch() - dense).abs().max().item()
        raise WrongAnswer(f"{what}: differs from dense by {worst:g}, shape {tuple(ours.shape)}")


def _add(devices: int) -> Spec:
    def make() -> Pair:
        mesh = loom.open_mesh((devices,))
        a, b = (loom.randn(32 * devices, 32, mesh=mesh, placements="S(0)") for _ in range(2))
        x, y = a.block, b.block
        _check(a + b, (x + y).flatten(0, 1), "add")
        return Pair(lambda: a + b, lambda: x + y)

    return Spec("add", "32x32 per device", (devices,), make, goals.ADD, "extra_us")


# What one mesh axis does to (A, B) when it shards a label of the matmul.
_MATMULS = {"row": ("S(0)", "R"), "column": ("R", "S(1)"), "batch": ("S(0)", "S(0)"), "inner": ("S(1)", "S(0)")}
_MESH_MATMULS = {
    "S(m) x S(n)": ("S(0), R", "R, S(1)"),
    "S(m) x S(k)": ("S(0), S(1)", "R, S(0)"),
    "S(n) x S(k)": ("R, S(1)", "S(1), S(0)"),
}


def _shapes(kind: str, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The operands' shapes; the batched ones take the same FLOPs in 128 parts."""
    if kind != "batch":
        return (rows, SIZE), (SIZE, SIZE)
    # 128 * 256 * 128 * 256 = 1024^3; 128 * 16 * 64 * 128 = 16 * 1024^2
    m, k, n = (256, 128, 256) if rows == SIZE else (16, 64, 128)
    return (128, m, k), (128, k, n)


def _matmul(kind: str, rows: int, devices: int) -> Spec:
    goal = goals.ROW_MATMUL if kind in ("row", "batch") else goals.COLUMN_MATMUL
    make = _product((devices,), _shapes(kind, rows), _MATMULS[kind])
    detail = f"{rows} rows" if rows != SIZE else f"{SIZE}^3"
    return Spec(f"matmul {kind}", detail, (devices,), make, goal, seconds=2.0 if rows == SIZE else 1.0)


def _mesh_matmul(labels: str, devices: int) -> Spec:
    shape = near_square(devices)
    make = _product(shape, _shapes("row", SIZE), _MESH_MATMULS[labels])
    return Spec("matmul 2-D", labels, shape, make, goals.MESH_MATMUL, seconds=2.0)


def near_square(devices: int) -> tuple[int, int]:
    """The 2-D mesh nearest to a square, the shorter axis first.

    >>> near_square(8), near_square(32), near_square(128)
    ((2, 4), (4, 8), (8, 16))
    """
    short = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return short, devices // short


Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def _product(mesh_shape: tuple[int, ...], shapes: Shapes, placements: tuple[str, str]) -> Callable[[], Pair]:
    def make() -> Pair:
        mesh = loom.open_mesh(mesh_shape)
        x, y = (torch.randn(shape) for shape in shapes)
        a, b = (loom.distribute(each, mesh, p) for each, p in zip((x, y), placements, strict=True))
        _check(a @ b, x @ y, f"matmul {placements}")
        return Pair(lambda: a @ b, lambda: x @ y)

    return make


def mlp() -> torch.nn.Sequential:
    """The dense module of the training step."""
    inner, hidden, outer = FEATURES
    return torch.nn.Sequential(torch.nn.Linear(inner, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outer))


def training_step(model: torch.nn.Module, x: object, y: object) -> Work:
    """Forward, backward and one SGD update of a module."""
    return _update(torch.optim.SGD(model.parameters(), lr=0.01), lambda: (model(x) - y).square().mean())


def language_step(
    model: torch.nn.Module, tokens: object, labels: object, rate: float = 1e-4, fused: bool | None = None
) -> Work:
    """The same with AdamW of a language model of `transformers`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=fused)
    return _update(optimizer, lambda: model(input_ids=tokens, labels=labels, use_cache=False).loss)


def _update(optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Work:
    def step() -> object:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step


def on_mesh(model: torch.nn.Module, mesh: loom.Mesh) -> torch.nn.Module:
    """A copy of a module with every parameter replicated on a mesh."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, loom.Parameter(parameter.detach(), mesh, {}))
    return made


def _mlp(devices: int) -> Spec:
    def make() -> Pair:
        mesh = loom.open_mesh((devices,))
        model = mlp()
        ours = on_mesh(model, mesh)
        x, y = torch.randn(BATCH, FEATURES[0]), torch.randn(BATCH, FEATURES[-1])
        placed = [loom.distribute(each, mesh, "S(0)") for each in (x, y)]
        pair = Pair(training_step(ours, *placed), training_step(model, x, y))
        check_models(pair, ours, model, "MLP step")
        return pair

    return Spec("MLP step", "data-parallel", (devices,), make, goals.MLP_STEP, seconds=5.0)


def check_models(pair: Pair, ours: torch.nn.Module, dense: torch.nn.Module, what: str) -> None:
    """Both sides make a step and have the same parameters after it."""
    assert pair.ours is not None and pair.dense is not None
    pair.ours(), pair.dense()
    for (name, mine), theirs in zip(ours.named_parameters(), dense.parameters(), strict=True):
        _check(mine, theirs.detach(), f"{what}, {name}")


def _memory(devices: int) -> Spec:
    def make() -> Pair:
        size = math.isqrt(REPLICATED_BYTES // 4)
        tensor = loom.distribute(torch.randn(size, size), loom.open_mesh((devices,)), "R")
        return Pair(copies=tensor.block.untyped_storage().nbytes() / REPLICATED_BYTES)

    return Spec("memory", "replicated 4 MB", (devices,), make, goals.REPLICATED, "copies")


# Calls of the hot path, over plain torch on the same array: (x, w, b) to a result, and the microseconds they may add.
_HOT: dict[str, tuple[Callable[..., Any], float]] = {
    "a + b, with gradients": (lambda x, w, b: x + x, 2.4),
    "a * 2.0": (lambda x, w, b: x * 2.0, 2.0),
    "a.relu()": (lambda x, w, b: x.relu(), 2.0),
    "torch.matmul(a, w)": (lambda x, w, b: torch.matmul(x, w), 4.0),
    "F.linear(a, w)": (lambda x, w, b: F.linear(x, w), 4.0),
    "F.layer_norm(a, [32], b, b)": (lambda x, w, b: F.layer_norm(x, (32,), b, b), 6.0),
    "a[0]": (lambda x, w, b: x[0], 4.0),
    "a.sum()": (lambda x, w, b: x.sum(), 4.0),
    "a.add_(b)": (lambda x, w, b: x.add_(x), 2.2),
}


_HOT_BARE = ("a * 2.0", "torch.matmul(a, w)", "F.layer_norm(a, [32], b, b)")


def _hot(call: str, devices: int, is_bare: bool = False) -> Spec:
    """A call on our tensors, or on a wrapper that does nothing: what would remain if ours cost nothing."""
    function, most = _HOT[call]

    def make() -> Pair:
        x, w, b = torch.randn(32 * devices, 32), torch.randn(32, 32), torch.randn(32)
        if call == "a.add_(b)":
            x.zero_()
        if is_bare:
            a, v, c = bare(x), bare(w), bare(b)
        else:
            mesh = loom.open_mesh((devices,))
            a, v, c = loom.distribute(x, mesh, "S(0)"), loom.distribute(w, mesh, "R"), loom.distribute(b, mesh, "R")
        if "gradients" in call:
            a, x = a.requires_grad_(), x.requires_grad_()
        _check(function(a, v, c), function(x, w, b), call)
        return Pair(lambda: function(a, v, c), lambda: function(x, w, b))

    goal = None if is_bare else Goal("extra_us", most, " us")
    detail = f"{call}, bare wrapper" if is_bare else call
    return Spec("call", detail, (devices,), make, goal, "extra_us")


def _all_reduce(new: bool) -> Spec:
    def make() -> Pair:
        mesh = loom.open_mesh((moves.DEVICES,))
        x = loom.randn(moves.DEVICES * moves.elements(), mesh=mesh, placements="S(0)")
        out = None if new else loom.zeros(moves.elements(), mesh=mesh, placements="R")
        parts = x.to_torch().view(moves.DEVICES, -1)
        _check(loom.collectives.all_reduce(x, out=out), parts.sum(0), "all-reduce")
        return Pair(lambda: loom.collectives.all_reduce(x, out=out), moves.reduce_traffic(parts))

    return _collective(moves.ALL_REDUCE_NEW if new else moves.ALL_REDUCE, make, new, seconds=5.0)


def _all_gather(new: bool) -> Spec:
    def make() -> Pair:
        mesh = loom.open_mesh((moves.DEVICES,))
        x = loom.randn(moves.elements(), mesh=mesh, placements="S(0)")
        out = None if new else loom.zeros(moves.elements(), mesh=mesh, placements="R")
        whole = x.to_torch().clone()
        _check(loom.collectives.all_gather(x, 0, out=out), whole, "all-gather")
        return Pair(lambda: loom.collectives.all_gather(x, 0, out=out), moves.gather_traffic(whole))

    return _collective(moves.ALL_GATHER_NEW if new else moves.ALL_GATHER, make, new, seconds=3.0)


def _collective(work: tuple[str, str], make: Callable[[], Pair], new: bool, seconds: float) -> Spec:
    """A collective; the goal is for the one that writes into memory that is there, as its baseline does."""
    return Spec(*work, (moves.DEVICES,), make, None if new else goals.COLLECTIVE, seconds=seconds)
