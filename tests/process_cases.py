"""What ranks run in `test_processes.py`: each draws the same cases, works on its own box, and compares with dense.

A failure names its case; to replay one on two processes: `ranks.run(2, "process_cases:op_case", "softmax", 3)`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import meshloom as loom
import oracle
import test_autograd
import test_optimizers
import test_random
from meshloom import Mesh, Partial, Placement, Replicate, Shard
from meshloom.comms import deferred, gradients, wire
from meshloom.engines.torch_engine import FUNCTIONS as ENGINE, Local, scans
from meshloom.mesh import HERE
from meshloom.processes import join
from meshloom.tensor.entries import forget_all
from oracle import MESHES, check_case, check_close, check_padding
from samples import SAMPLES, Seeded

Placed = tuple[Placement, ...]
Grid = tuple[tuple[int, ...], tuple[int, ...]]  # a mesh's shape, and the grid of processes that splits it


def grids(count: int, shapes: Sequence[tuple[int, ...]] = MESHES) -> list[Grid]:
    """Every mesh with every grid in which `count` processes cut it into equal boxes."""
    return [
        (shape, grid)
        for shape in shapes
        for grid in itertools.product(*(range(1, size + 1) for size in shape))
        if math.prod(grid) == count and all(size % parts == 0 for size, parts in zip(shape, grid, strict=True))
    ]


def op_case(name: str, number: int) -> None:
    """One case of an op: mesh, grid, placements and values all follow from its name and number."""
    join()
    d = Seeded(f"{name} {number}")
    deep = d.number(0, 9) == 0  # three axes take long to plan
    shape, grid = d.pick([each for each in grids(HERE.count) if (len(each[0]) > 2) == deep] or grids(HERE.count))
    try:
        check_case(d, SAMPLES[name](d), loom.open_mesh(shape, processes=grid))
    except Exception as error:
        raise AssertionError(f"op_case({name!r}, {number}) on {shape} over {grid} processes failed: {error}") from error


def op_cases(numbers: Sequence[int], names: Sequence[str] | None = None) -> Counter[str]:
    """Cases of every op; how many of each ran."""
    ran: Counter[str] = Counter()
    for name in sorted(SAMPLES) if names is None else names:
        for number in numbers:
            op_case(name, number)
            ran[name] += 1
    return ran


SHARED = {name for name, function in ENGINE.items() if getattr(function, "is_shared", False)}


def shared_cases(numbers: Sequence[int]) -> set[str]:
    """Cases of the ops that can work on a dim which processes share; which of them did."""
    seen: set[str] = set()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(local: Local, *args: Any, **kwargs: Any) -> Any:
            if not local.peers.alone:
                seen.add(name)
            return function(local, *args, **kwargs)

        return call

    forget_all()
    with patch.dict(ENGINE, {name: noted(name, ENGINE[name]) for name in SHARED}):
        op_cases(numbers, sorted(SHARED))
    forget_all()
    return seen


def talk() -> dict[str, int]:
    """The elements that this process gives away for an op on 64 x 8 x 16, sharded in a dim that it works on."""
    join()
    mesh = loom.open_mesh((2,))
    x = loom.distribute(torch.randn(64, 8, 16), mesh, "S(0)")
    spatial, wide = x.redistribute("S(2)"), loom.distribute(torch.randn(64, 128), mesh, "S(1)")
    few, each = torch.tensor([3, 60, 3]), torch.randint(0, 64, (64, 8, 16))
    works: dict[str, Callable[[], Any]] = {
        "batch_norm": lambda: torch.nn.functional.batch_norm(x, None, None, training=True),
        "group_norm": lambda: torch.nn.functional.group_norm(spatial, 2),
        "rms_norm": lambda: torch.nn.functional.rms_norm(spatial, (16,)),
        "std": lambda: x.std(0),
        "nanmean": lambda: x.nanmean(0),
        "logsumexp": lambda: x.logsumexp(0),
        "vector_norm": lambda: torch.linalg.vector_norm(x),
        "nll_loss": lambda: torch.nn.functional.nll_loss(wide, torch.arange(64)),
        "cumsum": lambda: x.cumsum(0),
        "cummax": lambda: x.cummax(0),
        "topk": lambda: x.topk(2, 0),
        "searchsorted": lambda: torch.searchsorted(loom.arange(8192, mesh=mesh, placements="S(0)"), few),
        "index_select": lambda: x.index_select(0, few),
        "index": lambda: x[few],
        "index_put": lambda: x.index_put((few,), torch.zeros(8, 16)),
        "scatter": lambda: x.scatter(0, each, 1.0),
        "tril": lambda: wide.tril(),
    }
    found = {}
    for name, work in works.items():
        with counted() as seen:
            work()
        found[name] = sum(elements for _, elements in seen)
    return found


NAN, INF = math.nan, math.inf
_ROWS = torch.tensor([[0.5, -1.0, 2.0], [-0.5, 1.5, 0.0], [2.0, 0.25, -2.0], [1.0, 0.0, 0.5], [-1.0, 2.0, 1.0]])
_LINE = torch.tensor([1.0, -2.0, 0.5, 3.0, 2.0])
_PLACES = torch.tensor([[0, 1, 2], [4, 3, 4]])
_BYTES = torch.tensor([[1, 0], [3, 2], [0, 4], [2, 2], [1, 3]], dtype=torch.uint8)


def _with(rows: torch.Tensor, row: int, *values: float) -> torch.Tensor:
    return torch.cat([rows[:row], torch.tensor([values]), rows[row + 1 :]])


def _norm(order: float) -> Callable[[Any], Any]:
    return lambda x: torch.linalg.vector_norm(x, order, 0)


def _product(x: Any, source: Any) -> Any:
    return torch.scatter_reduce(x, 0, _PLACES, source, "prod")


def _classes(*target: int, dtype: torch.dtype = torch.int64, **options: Any) -> Callable[[Any], Any]:
    return lambda x: torch.nn.functional.cross_entropy(x.T, torch.tensor(target, dtype=dtype), **options)


LINEAR = ("sum", "mean", "max", "min")  # in the gradient: that of a product is the other factors


def _through(op: str, x: Any) -> Any:
    """The same values, partial on every axis for a while."""
    if not isinstance(x, loom.Tensor):
        return x
    return x.redistribute((Partial(op),) * x.mesh.ndim).redistribute(x.placements)


_SPECIAL = torch.tensor([[0.0, -0.0, 1.0], [-2.0, NAN, INF], [-INF, -0.0, 0.0], [3.0, -1.0, 1e-45], [-0.0, 0.0, 5.0]])

Awkward = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
AWKWARD: dict[str, Awkward] = {  # rows of the first operand are split: of five, one process holds four
    "logsumexp of bytes": (lambda x: torch.logsumexp(x, 0), (_BYTES,)),
    "layer_norm with a wider weight": (
        lambda x, w: torch.nn.functional.layer_norm(x.T, (5,), w),
        (_ROWS.bfloat16(), _LINE),
    ),
    "batch_norm with a wider weight": (
        lambda x, w: torch.nn.functional.batch_norm(x, None, None, w, training=True),
        (_ROWS.bfloat16(), _LINE[:3]),
    ),
    "layer_norm without eps": (lambda x, w: torch.nn.functional.layer_norm(x, (3,), w, eps=0.0), (_ROWS, _LINE[:3])),
    "layer_norm along processes without eps": (
        lambda x, w: torch.nn.functional.layer_norm(x.T, (5,), w, eps=0.0),
        (_ROWS, _LINE),
    ),
    "rms_norm without eps": (lambda x, w: torch.nn.functional.rms_norm(x, (3,), w, eps=0.0), (_ROWS, _LINE[:3])),
    "group_norm without eps": (
        lambda x, w: torch.nn.functional.group_norm(x.view(5, 1, 3), 1, w, eps=0.0),
        (_ROWS, _LINE[:1]),
    ),
    **{f"{op} of special parts": (partial(_through, op), (_SPECIAL,)) for op in LINEAR},
    **{f"{op} of infinite gradients": (lambda x, op=op: _through(op, x) * INF, (_SPECIAL,)) for op in LINEAR},
    **{f"{op} of signed zeros": (lambda x, op=op: 1 / _through(op, x), (_SPECIAL,)) for op in LINEAR},
    "mean of large parts": (partial(_through, "mean"), (torch.full((5, 3), 2e38),)),
    "mean of large wide parts": (partial(_through, "mean"), (torch.full((5, 3), 1e308, dtype=torch.float64),)),
    "var of infinity": (lambda x: x.var(0), (_with(_ROWS, 1, INF, 0.0, -INF),)),
    "var without freedom": (lambda x: x.var(0, correction=9), (_ROWS,)),
    "amax of nothing but -inf": (lambda x: x.amax(0), (torch.full((5, 3), -INF),)),
    "infinity norm of equal elements": (_norm(INF), (torch.ones(5, 3),)),
    "smallest of equal elements": (_norm(-INF), (torch.ones(5, 3),)),
    "norm of infinity": (_norm(2), (_with(_ROWS, 1, INF, 0.0, 1.0),)),
    "norm where a process holds zeros": (_norm(3), (_with(_ROWS, 4, 0.0, 0.0, 0.0),)),
    "norm where a process holds nothing": (_norm(-1), (_ROWS[:1] + 4,)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), (_ROWS,)),
    "cumsum in half precision": (lambda x: x.bfloat16().cumsum(0).float(), (torch.linspace(0, 3, 192).view(64, 3),)),
    "cross_entropy of probabilities": (
        lambda x, p: torch.nn.functional.cross_entropy(x.T, p, reduction="sum"),
        (_ROWS[:4], torch.eye(4)[:3]),
    ),
    "cross_entropy of an ignored row": (_classes(0, -100, 3, reduction="none"), (_with(_ROWS, 2, 1.0, NAN, 0.5),)),
    "cross_entropy of byte classes": (_classes(0, 4, 3, dtype=torch.uint8), (_ROWS,)),
    "embedding of bools": (lambda w: torch.nn.functional.embedding(torch.tensor([4, 0]), w), (_ROWS > 0,)),
    "index_add to nothing": (
        lambda x, s: torch.index_add(x, 0, torch.zeros(0, dtype=torch.int64), s),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ),
    "take_along_dim around the end": (lambda x: torch.take_along_dim(x, torch.tensor([[-1], [7]]), 0), (_ROWS,)),
    "scatter_reduce of nan": (_product, (_ROWS, torch.tensor([[NAN, 1.0, 2.0], [3.0, 4.0, INF]]))),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "softmax of integers": lambda x: torch.softmax(x.long(), 0),
    "nanmean of integers": lambda x: torch.nanmean(x.long(), 0),
    "layer_norm of integers": lambda x: torch.nn.functional.layer_norm(x.long().T, (5,)),
    "a class below zero": _classes(0, -2, 1),
    "a class beyond the last": _classes(0, 5, 1),
    "classes that are no int64": _classes(0, 4, 1, dtype=torch.int32),
    "a flat index below zero": lambda x: torch.take_along_dim(x, torch.tensor([-1])),
    "an index that is no int64": lambda x: torch.index_copy(x, 0, torch.tensor([1], dtype=torch.int32), x[:1]),
}


def _causal(x: Any) -> Any:
    rows = x.view(1, 1, 5, 3)
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


EXPLAINED: dict[str, Callable[[Any], Any]] = {  # ops that look at where their elements stand
    "cummax": lambda x: x.cummax(0),
    "cross_entropy": _classes(0, 4, 1),
    "attention": _causal,
}


def awkward() -> tuple[int, int, int]:
    """Values that need care in a dim which processes share: results, gradients of both orders, refusals as in torch.

    Beside them, ops that are explained without their values.
    """
    join()
    for shape, grid, placements in (((4,), (2,), "S(0)"), ((2, 2), (1, 2), "S(0), S(0)")):
        mesh = loom.open_mesh(shape, processes=grid)
        for name, (work, given) in AWKWARD.items():
            _check_awkward(name, work, given, mesh, placements)
        for name, refused in REFUSED.items():
            for x in (_ROWS, loom.distribute(_ROWS, mesh, placements)):
                try:
                    refused(x)
                except (RuntimeError, IndexError, loom.DTypeError):
                    continue
                raise AssertionError(f"{name} was not refused for {type(x).__name__}")
        for name, work in EXPLAINED.items():
            x = loom.distribute(_ROWS, mesh, placements)
            assert loom.explain(lambda work=work, x=x: work(x)).events, name
    return len(AWKWARD), len(REFUSED), len(EXPLAINED)


def _check_awkward(
    name: str, work: Callable[..., Any], given: tuple[torch.Tensor, ...], mesh: Mesh, placements: str
) -> None:
    dense = [each.clone().requires_grad_(each.is_floating_point()) for each in given]
    first = loom.distribute(given[0], mesh, placements)
    ours = [first.requires_grad_(dense[0].requires_grad), *(each.clone() for each in given[1:])]
    ours[1:] = [loom.distribute(each, mesh, ", ".join("R" * mesh.ndim)).requires_grad_() for each in ours[1:]]
    with warnings.catch_warnings():  # torch's own about a variance without freedom
        warnings.simplefilter("ignore")
        expected, found = work(*dense), work(*ours)
    oracle.check_result(found, expected, name)
    if not expected.requires_grad or not expected.numel() or expected.dtype == torch.bfloat16:
        return
    for mine, theirs in zip(*(_both_orders(each, of) for each, of in ((found, ours), (expected, dense))), strict=True):
        check_padding(mine, f"gradient of {name}")
        check_close(mine.detach().to_torch(), theirs.detach(), f"gradient of {name}")


def _both_orders(result: Any, leaves: list[Any]) -> list[Any]:
    """The gradients, and where these are finite those of the sum of their squares."""
    seed = torch.arange(1.0, 1.0 + result.numel()).view(tuple(result.shape))
    first = torch.autograd.grad((result * seed).sum(), leaves, create_graph=True)
    finite = all(bool(each.isfinite().all()) for each in first)
    curved = [each for each in first if each.requires_grad] if finite else []
    second = (
        torch.autograd.grad(sum((each * each).sum() for each in curved), leaves, allow_unused=True) if curved else ()
    )
    return [*first, *(each for each in second if each is not None)]


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """The collectives between processes inside: their kind and the elements that this process gave."""
    seen: list[tuple[str, int]] = []

    def watched(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((kind, data.numel()))
            return function(data, *args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for kind in KINDS:
            undo.enter_context(replaced(wire, kind, watched(kind, getattr(wire, kind))))
        undo.enter_context(replaced(wire, "begin_sum", watched("all_reduce", wire.begin_sum)))
        yield seen


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while."""
    kept = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _all_placements(axes: int, dims: int, op: str) -> list[Placed]:
    each: list[Placement] = [Replicate(), Partial(op), *(Shard(dim) for dim in range(dims))]
    return list(itertools.product(each, repeat=axes))


def redistributions(journeys: Sequence[tuple[Grid, tuple[int, ...], str]]) -> tuple[int, dict[str, int]]:
    """Every pair of placements of a tensor on some meshes: how many pairs, and how often each collective ran."""
    join()
    pairs = 0
    with counted() as seen:
        for (shape, grid), size, op in journeys:
            mesh = loom.open_mesh(shape, processes=grid)
            ways = _all_placements(mesh.ndim, len(size), op)
            for here, there in itertools.product(ways, ways):
                _check_journey(mesh, size, here, there)
                pairs += 1
    return pairs, dict(Counter(kind for kind, _ in seen))


def _check_journey(mesh: Mesh, size: tuple[int, ...], here: Placed, there: Placed) -> None:
    """There keeps values, zero padding and gradients."""
    what = f"{size} from {here} to {there} on {mesh} over {mesh.processes} processes"
    generator = torch.Generator().manual_seed(len(size))
    dense, weight = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    settled = [Replicate() if isinstance(each, Partial) else each for each in here]
    leaf = loom.distribute(dense, mesh, tuple(settled)).requires_grad_()
    source = leaf.redistribute(here)
    moved = source.redistribute(there)
    assert moved.placements == there and tuple(moved._data.shape) == moved.topology.stored_shape, what
    for each in (source, moved):
        check_padding(each, what)
    check_close(moved.to_torch().detach(), dense, what)
    (moved * weight).sum().backward()
    assert leaf.grad is not None and leaf.grad.placements == leaf.placements, what
    check_close(leaf.grad.to_torch(), weight, f"gradient of {what}")


def _layouts(count: int) -> list[str]:
    return [name for name, (shape, _, _) in test_optimizers.LAYOUTS.items() if math.prod(shape) % count == 0]


def optimizers() -> int:
    """Every optimizer of torch takes the steps that one process takes; how many runs were compared."""
    join()
    ran = 0
    for name, make in test_optimizers.OPTIMIZERS.items():
        expected = test_optimizers.dense_parameters()
        losses = test_optimizers.train(make(expected), expected, 4)
        for layout in _layouts(HERE.count):
            held = test_optimizers.parameters(layout)
            assert held[0].mesh.is_split
            found = test_optimizers.train(make(held), held, 4)
            half = name == "Muon"  # which multiplies in bfloat16: every part of a sum is rounded
            assert _near(found, losses, 1e-3 if half else 1e-5), f"{name} with {layout}: {found} and not {losses}"
            test_optimizers.check_same(held, expected, 5e-3 if half else 1e-5)
            ran += 1
    return ran


def _near(found: Sequence[float], expected: Sequence[float], relative: float) -> bool:
    return all(abs(a - b) <= relative * max(abs(b), 1e-3) for a, b in zip(found, expected, strict=True))


STYLES: dict[str, tuple[str, str, str]] = {  # placements of the batch, the first weight (8, 12), the second (12, 8)
    "data parallel": ("S(0), R", "R, R", "R, R"),
    "all data parallel": ("S(0), S(0)", "R, R", "R, R"),
    "tensor parallel": ("R, R", "R, S(1)", "R, S(0)"),
    "both": ("S(0), R", "R, S(1)", "R, S(0)"),
    "fully sharded": ("S(0), S(0)", "S(0), S(0)", "S(0), S(0)"),
}


def _start(mesh: Mesh, style: str) -> tuple[list[Any], list[Any]]:
    """The parameters of an MLP 8 -> 12 -> 8, and micro-batches of 6 rows."""
    drawn = torch.Generator().manual_seed(0)
    batch, first, second = STYLES[style]
    weights = [torch.randn(shape, generator=drawn) / 4 for shape in ((8, 12), (12,), (12, 8), (8,))]
    held = [loom.Parameter(w, mesh, at) for w, at in zip(weights, (first, "R, R", second, "R, R"), strict=True)]
    batches = [loom.distribute(torch.randn((6, 8), generator=drawn), mesh, batch) for _ in range(3)]
    return held, batches


def _mlp(x: Any, held: list[Any]) -> Any:
    return torch.tanh(x @ held[0] + held[1]) @ held[2] + held[3]


def _train(mesh: Mesh, style: str, make: Callable[[Any], Any], steps: int = 3) -> tuple[list[float], list[Any]]:
    """Losses and parameters after steps of three micro-batches each, gradients clipped."""
    held, batches = _start(mesh, style)
    optimizer, losses = make(held), []
    for _ in range(steps):
        optimizer.zero_grad()
        for x in batches:
            loss = (_mlp(x, held) - x).square().mean()
            loss.backward()
            losses.append(loss.item())
        losses.append(float(clip_grad_norm_(held, 0.5)))
        optimizer.step()
    return losses, [each.detach().to_torch() for each in held]


def training(shape: tuple[int, ...]) -> int:
    """Training split over every grid equals the same training in one process; how many runs were compared."""
    join()
    ran = 0
    names = ("SGD momentum", "Adam", "AdamW", "Adafactor")
    for style, name in itertools.product(STYLES, names):
        make = test_optimizers.OPTIMIZERS[name]
        losses, weights = _train(Mesh.of(shape), style, make)
        for _, grid in grids(HERE.count, [shape]):
            found, mine = _train(loom.open_mesh(shape, processes=grid), style, make)
            assert _near(found, losses, 1e-6), f"{style}, {name} over {grid}: {found} and not {losses}"
            for ours, theirs in zip(mine, weights, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=f"{style}, {name} over {grid}")
            ran += 1
    return ran


def accumulation() -> list[list[tuple[str, int]]]:
    """The collectives of micro-batches, of the backward that sums and of the step, with parameters in two groups."""
    join()
    held, batches = _start(loom.open_mesh((HERE.count, 2), processes=(HERE.count, 1)), "data parallel")
    optimizer = torch.optim.SGD([{"params": held[:2]}, {"params": held[2:], "lr": 0.2}], lr=0.1, foreach=False)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        with counted() as micro, loom.accumulate():
            for x in batches:
                _mlp(x, held).square().sum().backward()
        with counted() as last:
            _mlp(batches[0], held).square().sum().backward()
        with counted() as step:
            optimizer.step()
        found += [micro, last, step]
    with counted() as again:
        [each.grad for each in held]
    return [*found, again]


def autograd() -> None:
    """What `torch.autograd` offers beside `backward()`: each a claim of its own, on leaves that all split work uses."""
    join()
    for check in (_grad, _inputs, _unused, _hooks, _zero_grad, _deep_copy, _trap, _second_order, _penalty, _recomputed,
                  _pickled, _frozen, _assigned, _thrown_away, _programs, _plain_leaf, _shared,
                  _written_between, _hooked_and_assigned, _hooked_and_dropped, _cut):  # fmt: skip
        mesh = loom.open_mesh((HERE.count, 2), processes=(HERE.count, 1))
        try:
            check(mesh)
        except Exception as error:
            raise AssertionError(f"{check.__name__} failed: {error}") from error


def _pair(mesh: Mesh) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Rows that are split, a weight that is not, and both dense."""
    drawn = torch.Generator().manual_seed(1)
    x, w = torch.randn((7, 5), generator=drawn), torch.randn((5, 3), generator=drawn)
    ours = loom.distribute(x, mesh, "S(0), R"), loom.distribute(w, mesh, "R, R").requires_grad_()
    return *ours, x, w.clone().requires_grad_()


def _equal(ours: Any, dense: torch.Tensor, what: str = "values") -> None:
    check_close(ours.to_torch().detach(), dense.detach(), what)


def _grad(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    (found,) = torch.autograd.grad((x @ w).tanh().sum() + (w * w).sum(), w)
    (expected,) = torch.autograd.grad((dense_x @ dense_w).tanh().sum() + (dense_w * dense_w).sum(), dense_w)
    _equal(found, expected)
    assert w.grad is None


def _inputs(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    v = loom.ones(3, mesh=mesh, placements="R, R", requires_grad=True)
    ((x @ w) * v).sum().backward(inputs=[w])
    assert v.grad is None
    _equal(w.grad, torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)[0])


def _unused(mesh: Mesh) -> None:
    x, w, *_ = _pair(mesh)
    (x @ w).sum().backward()
    v = loom.ones(3, mesh=mesh, placements="R, R", requires_grad=True)
    assert torch.autograd.grad((v * v).sum(), [v, w], allow_unused=True)[1] is None
    try:
        torch.autograd.grad((v * v).sum(), [v, w])
    except RuntimeError:
        return
    raise AssertionError("an input that was not used is no error")


def _hooks(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    seen: list[Any] = []
    handle = w.register_hook(lambda g: seen.append(g.to_torch()))
    (x @ w).square().sum().backward()
    (expected,) = torch.autograd.grad((dense_x @ dense_w).square().sum(), dense_w)
    assert len(seen) == 1
    check_close(seen[0], expected, "what a hook sees")
    handle.remove()
    w.grad = None
    w.register_hook(lambda g: g * 3)
    (x @ w).square().sum().backward()
    _equal(w.grad, expected * 3)


def _zero_grad(mesh: Mesh) -> None:
    for to_none in (True, False):
        x, w, dense_x, dense_w = _pair(mesh)
        held = loom.Parameter(w.detach())
        optimizer = torch.optim.SGD([held], lr=1.0)
        (x @ held).sum().backward()
        optimizer.zero_grad(set_to_none=to_none)
        assert held.grad is None if to_none else not held.grad.to_torch().any()
        (x @ held).sum().backward()
        _equal(held.grad, torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)[0])


def _deep_copy(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    (expected,) = torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)
    for leaf in (w, loom.Parameter(w.detach())):
        (x @ leaf).sum().backward()
        copied = copy.deepcopy(leaf)
        kept = 0 if isinstance(leaf, torch.nn.Parameter) else 1  # torch's parameters leave theirs behind
        assert kept or copied.grad is None
        (x @ copied).sum().backward()
        _equal(copied.grad, expected * (kept + 1))
        _equal(leaf.grad, expected)


def _trap(mesh: Mesh) -> None:
    """A replicated use and a split use: the replicated one must not be counted once per process."""
    x, w, dense_x, dense_w = _pair(mesh)
    for uses in ("split first", "replicated first"):
        w.grad = None
        terms = [(x @ w).exp().sum(), (w * w).sum()]
        sum(terms if uses == "split first" else reversed(terms)).backward()
        _equal(w.grad, torch.autograd.grad((dense_x @ dense_w).exp().sum() + (dense_w * dense_w).sum(), dense_w)[0])


def _second_order(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    found = []
    for a, b in ((x, w), (dense_x, dense_w)):
        (first,) = torch.autograd.grad((a @ b).pow(3).sum(), b, create_graph=True)
        found.append(torch.autograd.grad((first * first).sum(), b)[0])
    _equal(found[0], found[1])


def _penalty(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    for a, b in ((x, w), (dense_x, dense_w)):
        with warnings.catch_warnings():  # torch's own about the cycle between a parameter and such a gradient
            warnings.simplefilter("ignore")
            (a @ b).pow(3).mean().backward(create_graph=True)
        first = b.grad
        b.grad = None
        first.square().sum().backward()
    _equal(w.grad, dense_w.grad)


def _recomputed(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    checkpoint(lambda a: (a @ w).tanh() @ w.T, x, use_reentrant=False).sum().backward()
    ((dense_x @ dense_w).tanh() @ dense_w.T).sum().backward()
    _equal(w.grad, dense_w.grad)


def _pickled(mesh: Mesh) -> None:
    x, w, *_ = _pair(mesh)
    (x @ w).sum().backward()
    read = pickle.loads(pickle.dumps(w))  # it is whole on every process
    _equal(read, w.to_torch())
    (x @ read).sum().backward()
    _equal(read.grad, w.grad.to_torch())


def _frozen(mesh: Mesh) -> None:
    x, w, dense_x, dense_w = _pair(mesh)
    (x @ w).sum().backward()
    w.requires_grad_(False)
    assert not (x @ w).requires_grad
    w.requires_grad_()
    (x @ w).sum().backward()
    _equal(w.grad, torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)[0] * 2)


def _assigned(mesh: Mesh) -> None:
    """New data under a parameter: its gradients go on, those of the old data stay."""
    x, w, dense_x, dense_w = _pair(mesh)
    (expected,) = torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)
    held = loom.Parameter(w.detach())
    (x @ held).sum().backward()
    held.data = held.data * 2
    (x @ held).sum().backward()
    _equal(held.grad, expected * 2)
    (x @ held).sum().backward()
    held.data = held.data * 2
    held.grad = None
    (x @ held).sum().backward()
    _equal(held.grad, expected)


def _thrown_away(mesh: Mesh) -> None:
    """A gradient that nobody reads does not take part in the sums of others, nor when its leaf is gone."""
    x, w, dense_x, dense_w = _pair(mesh)
    lost = loom.Parameter(w.detach())
    (x @ lost).sum().backward()
    cycle: list[Any] = [lost]
    cycle.append(cycle)
    del lost, cycle
    if HERE.rank == 0:
        import gc

        gc.collect()
    (x @ w).sum().backward()
    _equal(w.grad, torch.autograd.grad((dense_x @ dense_w).sum(), dense_w)[0])


def _programs(mesh: Mesh) -> None:
    """The programs of the autograd tests, with every layout that these processes split."""
    for name, program in test_autograd.PROGRAMS.items():
        dense = test_autograd.drawn().requires_grad_()
        program(dense).backward()
        for layout in test_autograd.LAYOUTS:
            if math.prod(layout[0]) % HERE.count == 0:
                x = test_autograd.leaf(layout)
                assert x.mesh.is_split
                program(x).backward()
                check_close(x.grad.to_torch(), dense.grad, f"{name} with {layout}")
                check_padding(x.grad, f"{name} with {layout}")


def _plain_leaf(mesh: Mesh) -> None:
    """A plain torch leaf beside split work gets the whole gradient on every process."""
    x, _, dense_x, dense_w = _pair(mesh)
    plain = dense_w.detach().clone().requires_grad_()
    (x @ plain).tanh().sum().backward()
    assert plain.grad is not None
    check_close(plain.grad, torch.autograd.grad((dense_x @ dense_w).tanh().sum(), dense_w)[0], "a plain leaf")


def _shared(mesh: Mesh) -> None:
    """Three products of one activation: its gradients add up and travel once, as the record says, in each pass."""
    sent, told, found = _use_thrice(mesh, lambda x: None)
    assert sent == [("all_reduce", 4 * 5)] * 2, sent
    assert told == 2
    _equal(*found)


def _written_between(mesh: Mesh) -> None:
    """A write in place between the uses: what came before it has another gradient than what comes after."""
    sent, told, found = _use_thrice(mesh, lambda x: x.mul_(2))
    assert sent == [("all_reduce", 4 * 5)] * 4, sent
    assert told == 4
    _equal(*found)


def _hooked_and_assigned(mesh: Mesh) -> None:
    """New data under a parameter with a hook, which shares one array with its uses: they see the new data."""
    x, w, dense_x, dense_w = _pair(mesh)
    held = loom.Parameter(w.detach())
    held.register_hook(lambda gradient: None)
    x @ held
    for make in (lambda data: data * 3, lambda data: data.double()):
        held.data, dense_w = make(held.data), make(dense_w)
        check_close((x.to(held.dtype) @ held).to_torch(), dense_x.to(dense_w.dtype) @ dense_w, "with new data")


def _hooked_and_dropped(mesh: Mesh) -> None:
    """A parameter with a hook that nobody holds any more is gone, though its uses shared an array."""
    x, w, *_ = _pair(mesh)
    held = loom.Parameter(w.detach())
    held.register_hook(lambda gradient: None)
    (x @ held).sum().backward()
    data = weakref.ref(held._data)
    del held
    gc.collect()
    assert data() is None


def _cut(mesh: Mesh) -> None:
    """Three results of one call are three tensors: the gradient of each is summed, and the record says so."""
    x, w, dense_x, dense_w = _pair(mesh)
    loss = sum((x @ column).square().sum() for column in (w * 2).unbind(1))
    with counted() as seen, loom.record() as log:
        (gradient,) = torch.autograd.grad(loss, w)
    sums = [each for each in log if each.phase == "backward" and each.kind == "all_reduce"]
    assert len(sums) == len(seen) == 3, (sums, seen)
    _equal(gradient, torch.autograd.grad((dense_x @ (dense_w * 2)).square().sum(), dense_w)[0])


def _use_thrice(
    mesh: Mesh, change: Callable[[Any], Any]
) -> tuple[list[tuple[str, int]], int, tuple[Any, torch.Tensor]]:
    """Of two passes: the sums of the activation's gradient that travelled and were told, and the last gradients."""
    drawn = torch.Generator().manual_seed(2)
    start, weights = torch.randn((4, 5), generator=drawn), torch.randn((3, 4, 5), generator=drawn)

    def run(x: Any, columns: Sequence[Any]) -> Any:
        hidden = x * 3.0
        first = torch.cat([torch.nn.functional.linear(hidden, each) for each in columns[:2]], 1)
        change(hidden)
        (first.tanh().sum() + torch.nn.functional.linear(hidden, columns[2]).tanh().sum()).backward()
        return x.grad

    dense, ours = start.clone().requires_grad_(), loom.distribute(start, mesh, "R, R").requires_grad_()
    columns = [loom.distribute(each, mesh, "S(0), R") for each in weights]
    with counted() as seen, loom.record() as log:
        for _ in range(2):
            found = run(ours, columns)
            expected = run(dense, weights)
    sums = [each for each in log if each.phase == "backward" and each.kind == "all_reduce"]
    return [each for each in seen if each[1] == start.numel()], len(sums), (found, expected)


def randomness() -> int:
    """Random values are those of one process, bit for bit, on every grid; how many draws were compared."""
    join()
    ran = 0
    for name, draw in test_random.DRAWS.items():
        for shape, grid in grids(HERE.count, [(HERE.count,), (2, 2 * HERE.count), (4, HERE.count)]):
            found = []
            for mesh in (Mesh.of(shape), loom.open_mesh(shape, processes=grid)):
                placements = "(" + ", ".join(f"S({axis % 2})" for axis in range(mesh.ndim)) + ")"
                torch.manual_seed(5)
                first, second = draw((7, 5), mesh, placements), draw((7, 5), mesh, placements)
                found.append((first.to_torch(), second.to_torch(), torch.rand(3)))
            for mine, theirs in zip(found[1], found[0], strict=True):
                assert torch.equal(mine, theirs), f"{name} on {shape} over {grid}"
            ran += 1
    return ran


def reading() -> tuple[str, list[Any], list[float], str]:
    """What every rank reads of a tensor, and what it is told of a shard that another one holds."""
    join()
    mesh = loom.open_mesh((HERE.count, 2), axes=("dp", "tp"), processes=(HERE.count, 1))
    dense = torch.arange(10.0).reshape(5, 2)
    x = loom.distribute(dense, mesh, "S(0), P(sum)")
    total = x.sum()
    numbers = [total.item(), float(total), *(x.max().tolist(),), float(x.numpy().sum()), float(len(x)), float(x[3, 1])]
    assert bool(total) and 45.0 in total and f"{total:.1f}" == "45.0"
    held = x.redistribute("S(0), R")
    for place in mesh.local_coordinates():
        start, extent = held.topology.chunk(place, 0)
        assert torch.equal(held.shard_at(place), dense[start : start + extent])
    remote = ((HERE.rank + 1) % HERE.count, 0)
    try:
        held.shard_at(remote)
    except loom.PlacementError as error:
        return repr(x), x.tolist(), numbers, str(error).splitlines()[0]
    raise AssertionError("a shard that another rank holds was handed out")


def _masked(x: Any) -> None:
    x[x > 0.5] = -1.0


def _sliced(x: Any) -> None:
    x[1:4, ::2] = 7.0
    x[-1] = x[0] * 2
    x[:, 1] += 3


def _through_views(x: Any) -> None:
    x.T[0].mul_(5)
    x.view(6, 5)[2].add_(1)
    x.narrow(0, 1, 2).zero_()


def _pointwise(x: Any) -> None:
    x.add_(torch.arange(5.0)).mul_(2).clamp_(min=-3).sub_(x[0].clone())
    x /= 3
    x.copy_(x.flip(0))


def _outs(x: Any) -> None:
    torch.add(x, 1, out=x)
    torch.exp(x * 0.1, out=x)


def _no_rule(x: Any) -> None:
    x.copy_(torch.renorm(x, 2, 0, 1.0))
    x.cumsum_(1)
    x.index_copy_(0, torch.tensor([4, 0]), torch.ones(2, 5))


def _filled(x: Any) -> None:
    x.fill_diagonal_(9.0)
    x.masked_fill_(x < 0, 0.25)


WRITES: dict[str, Callable[[Any], None]] = {
    "masked": _masked,
    "sliced": _sliced,
    "through views": _through_views,
    "pointwise": _pointwise,
    "out=": _outs,
    "no rule": _no_rule,
    "filled": _filled,
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {  # without a rule, or with results whose shape depends on values
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x > 0).unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "kron": lambda x: torch.kron(x[:2], x[2:4]),
    "histc": lambda x: torch.histc(x, 4, -2, 2),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "movedim": lambda x: x.movedim(0, 1).contiguous(),
}


def writing() -> int:
    """In-place ops, assignment, views, `out=` and functions without a rule equal dense; how many were compared."""
    join()
    ran = 0
    for shape, grid in grids(HERE.count, [(HERE.count,), (2, 4), (4, 2)]):
        mesh = loom.open_mesh(shape, processes=grid)
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=mesh.ndim):
            what = f"{placements} on {shape} over {grid}"
            for name, write in WRITES.items():
                dense = torch.randn((6, 5), generator=torch.Generator().manual_seed(3))
                x = loom.distribute(dense, mesh, placements)
                write(x)
                write(dense)
                check_close(x.to_torch(), dense, f"{name} of {what}")
                check_padding(x, f"{name} of {what}")
                assert x.placements == placements, what
                ran += 1
            ran += _check_functions(mesh, placements, what) + _check_aliases(mesh, placements, what)
    return ran


ALIASES: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[2],
    "steps": lambda x: x[1::2, 1:],
    "flat part": lambda x: x.view(30)[3:20],
    "transpose": lambda x: x.T,
    "row of the transpose": lambda x: x.T.unsqueeze(0)[:, 1],
    "diagonal": lambda x: x.diagonal(),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "bits": lambda x: x.view(torch.int32).view(torch.float32),
    "detached": lambda x: x.view(15, 2).detach()[4:],
}


def _check_aliases(mesh: Mesh, placements: Placed, what: str) -> int:
    """Views and their base see what is written to each other."""
    for name, view in ALIASES.items():
        dense = torch.randn((6, 5), generator=torch.Generator().manual_seed(5))
        x = loom.distribute(dense, mesh, placements)
        seen, expected = view(x), view(dense)
        other, flat = x.reshape(5, 6), dense.view(5, 6)
        for base, part in ((x, seen), (dense, expected)):
            base.add_(1)
            part.mul_(2)
            base[1:3] = part.sum()
            part[0] = 5.0
        check_close(x.to_torch(), dense, f"base of {name} of {what}")
        check_close(seen.to_torch(), expected, f"{name} of {what}")
        check_close(other.to_torch(), flat, f"other view beside {name} of {what}")
        check_padding(x, f"{name} of {what}")
    return len(ALIASES)


def _check_functions(mesh: Mesh, placements: Placed, what: str) -> int:
    dense = torch.randn((6, 5), generator=torch.Generator().manual_seed(4))
    for name, function in FUNCTIONS.items():
        theirs, ours = dense.clone().requires_grad_(), loom.distribute(dense, mesh, placements).requires_grad_()
        expected, found = function(theirs), function(ours)
        check_close(found.to_torch().detach(), expected.detach(), f"{name} of {what}")
        if expected.requires_grad and name != "svdvals":
            expected.square().sum().backward()
            found.square().sum().backward()
            check_close(ours.grad.to_torch(), theirs.grad, f"gradient of {name} of {what}")
    return len(FUNCTIONS)


def _keep(data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """An all-reduce that communicates nothing."""
    return data.clone()


def _pass(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """A backward that communicates nothing."""
    return gradient, None


def _alone(self: Any, totals: torch.Tensor, nothing: float, scan: Any) -> torch.Tensor:
    """Nothing before any chunk."""
    return torch.full_like(totals, nothing).unsqueeze(self.dim + 1)


def _shifted(self: Any, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
    """Positions as if every process were the first."""
    return torch.arange(self.topology(name).stored_shape[dim])


_settle = deferred.PendingSum.settle


def _settle_own(self: Any, total: torch.Tensor) -> None:
    """The part of this process in place of the sum of all."""
    _settle(self, self.gradient)


FAULTS: dict[str, tuple[Any, str, Any, Sequence[str]]] = {  # what is broken, and ops whose cases must show it
    "a sum that is not summed": (wire, "all_reduce", _keep, ("sum", "matmul")),
    "a gradient that is not summed": (gradients.SumGradient, "backward", staticmethod(_pass), ("mul", "softmax")),
    "a leaf's gradient that is not summed": (deferred.PendingSum, "settle", _settle_own, ("linear", "matmul")),
    "a gather of oneself": (wire, "all_gather", lambda x, group: torch.stack([x] * group.size), ("relu", "neg")),
    "an exchange with oneself": (wire, "all_to_all", lambda x, group: x.clone(), ("matmul", "softmax", "sub", "mul")),
    "an offset that is forgotten": (Local, "positions", _shifted, ("argmax", "argmin", "embedding")),
    "an offset that a look-up forgets": (Local, "positions", _shifted, ("gather", "index")),
    "an offset that a write forgets": (Local, "positions", _shifted, ("index_put", "scatter")),
    "chunks before that a scan forgets": (scans.Chunks, "before", _alone, ("cumsum", "cumprod")),
}


def faults(numbers: Sequence[int]) -> dict[str, list[str]]:
    """Break one thing after the other on every rank and run cases; what their checks said.

    Checks write down instead of raising, so that the ranks stay together whichever of them sees the fault.
    """
    join()
    found: dict[str, list[str]] = {}
    for fault, (owner, attribute, broken, names) in FAULTS.items():
        said = found[fault] = []
        forget_all()
        with contextlib.ExitStack() as undo:
            for check in ("check_close", "check_padding"):
                undo.enter_context(replaced(oracle, check, _noting(getattr(oracle, check), said)))
            undo.enter_context(replaced(owner, attribute, broken))
            for name, number in itertools.product(names, numbers):
                _noting(op_case, said)(name, number)
        forget_all()
    return found


def _noting(check: Callable[..., None], said: list[str]) -> Callable[..., None]:
    def note(*args: Any) -> None:
        try:
            check(*args)
        except AssertionError as error:
            said.append(str(error).splitlines()[0])

    return note


def together(*work: tuple[str, Sequence[Any]]) -> dict[str, Any]:
    """Several functions of this module, one after the other: what each returned."""
    found = {}
    for name, arguments in work:
        try:
            found[name] = globals()[name](*arguments)
        except Exception as error:
            raise AssertionError(f"{name}{tuple(arguments)} failed on rank {HERE.rank}: {error}") from error
    return found
