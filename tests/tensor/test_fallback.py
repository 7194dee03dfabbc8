"""The total fallback: any torch function without a rule gives the dense result, and says that it was gathered."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.engines.layout import short_name
from meshloom.tensor import functions

MESH = Mesh(dp=2, tp=3)
WEIGHTS = {2: (0.5, 0.5), 3: (0.5, 0.25, 0.25)}  # exact in floating point


@dataclass(frozen=True)
class Function:
    """A torch function with the shapes of its operands; `grad` where its gradient is checked too."""

    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((6, 5),)
    grad: bool = True
    kind: str = "float"


M, V, CUBE, SQUARE = (6, 5), (7,), (2, 4, 3), (4, 4)


def each(names: str, place: Any, *args: Any, **options: Any) -> dict[str, Function]:
    """One function per name, all with the same arguments behind the operand."""

    def entry(name: str) -> Function:
        function = getattr(place, name)
        return Function(lambda x: function(x, *args), **options)

    return {f"{name}": entry(name) for name in names.split()}


def sym(x: Any) -> Any:
    return x @ x.mT + 5 * torch.eye(4)


FUNCTIONS: dict[str, Function] = {
    # functions of one number
    **each("acos asin atanh erfinv logit", torch, kind="unit"),
    **each("acosh digamma lgamma", torch, kind="above one"),
    **each("asinh atan cosh deg2rad erfc exp2 frac positive rad2deg sinc sinh tan trunc nan_to_num sgn i0", torch),
    **each("log10 log2", torch, kind="above one"),
    **each("signbit isposinf isneginf isreal isneginf", torch, grad=False),
    **each(
        "celu elu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu softplus softshrink "
        "softsign tanhshrink",
        F,
    ),
    "threshold": Function(lambda x: F.threshold(x, 0, 5)),
    "glu": Function(lambda x: F.glu(x, 0)),
    "prelu": Function(lambda x, w: F.prelu(x, w), (M, (5,))),
    # along a dim
    **each("cumsum cumprod logcumsumexp", torch, 0),
    "cummax": Function(lambda x: torch.cummax(x, 1)),
    "cummin": Function(lambda x: torch.cummin(x, 0)),
    "logsumexp": Function(lambda x: torch.logsumexp(x, 1)),
    "std": Function(lambda x: torch.std(x, 0)),
    "std_mean": Function(lambda x: torch.std_mean(x, 1)),
    "var_mean": Function(lambda x: torch.var_mean(x, 0)),
    "nansum": Function(lambda x: torch.nansum(x, 1)),
    "nanmean": Function(lambda x: torch.nanmean(x)),
    "median": Function(lambda x: torch.median(x, 1)),
    "nanmedian": Function(lambda x: torch.nanmedian(x, 0)),
    "mode": Function(lambda x: torch.mode(x, 1)),
    "quantile": Function(lambda x: torch.quantile(x, 0.3, 0)),
    "aminmax": Function(lambda x: torch.aminmax(x)),
    "count_nonzero": Function(lambda x: torch.count_nonzero(x, 0), grad=False),
    "softmin": Function(lambda x: F.softmin(x, 1)),
    "normalize": Function(lambda x: F.normalize(x, dim=0)),
    "norm": Function(lambda x: torch.norm(x)),
    "vector_norm": Function(lambda x: torch.linalg.vector_norm(x, 3, 1)),
    "renorm": Function(lambda x: torch.renorm(x, 2, 0, 1.0)),
    "diff": Function(lambda x: torch.diff(x, dim=1)),
    "trapezoid": Function(lambda x: torch.trapezoid(x, dim=0)),
    # order
    "sort": Function(lambda x: torch.sort(x, 0)),
    "argsort": Function(lambda x: torch.argsort(x, 1), grad=False),
    "topk": Function(lambda x: torch.topk(x, 3, 1)),
    "kthvalue": Function(lambda x: torch.kthvalue(x, 2, 0)),
    "msort": Function(torch.msort),
    "searchsorted": Function(lambda x, y: torch.searchsorted(torch.sort(x.flatten()).values, y), (M, V), grad=False),
    "bucketize": Function(lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), grad=False),
    "histc": Function(lambda x: torch.histc(x, 4, -2, 2), grad=False),
    "unique": Function(lambda x: torch.unique(x, return_inverse=True, return_counts=True), grad=False, kind="int"),
    "unique_consecutive": Function(torch.unique_consecutive, grad=False, kind="int"),
    "bincount": Function(lambda x: torch.bincount(x.flatten()), grad=False, kind="int"),
    # shapes
    **each("flip", torch, (0,)),
    **each("fliplr flipud ravel", torch),
    "roll": Function(lambda x: torch.roll(x, 2, 0)),
    "rot90": Function(torch.rot90),
    "tile": Function(lambda x: torch.tile(x, (2, 1))),
    "repeat": Function(lambda x: x.repeat(1, 2)),
    "repeat_interleave": Function(lambda x: torch.repeat_interleave(x, 2, 0)),
    "movedim": Function(lambda x: torch.movedim(x, 0, 2), (CUBE,)),
    "moveaxis": Function(lambda x: torch.moveaxis(x, 1, 0), (CUBE,)),
    "unbind": Function(lambda x: torch.unbind(x, 1)),
    "unfold": Function(lambda x: x.unfold(0, 3, 2)),
    "unflatten": Function(lambda x: torch.unflatten(x, 0, (2, 3))),
    "tensor_split": Function(lambda x: torch.tensor_split(x, 4, 0)),
    "hsplit": Function(lambda x: torch.hsplit(x, [2, 3])),
    "vsplit": Function(lambda x: torch.vsplit(x, 2)),
    "hstack": Function(lambda x, y: torch.hstack((x, y)), (M, M)),
    "vstack": Function(lambda x, y: torch.vstack((x, y)), (M, M)),
    "dstack": Function(lambda x, y: torch.dstack((x, y)), (M, M)),
    "column_stack": Function(lambda x, y: torch.column_stack((x, y)), (M, M)),
    "block_diag": Function(lambda x, y: torch.block_diag(x, y), (M, SQUARE)),
    "atleast_3d": Function(torch.atleast_3d),
    "broadcast_to": Function(lambda x: torch.broadcast_to(x, (2, 6, 5))),
    "diag": Function(torch.diag, (V,)),
    "diagonal": Function(lambda x: torch.diagonal(x, 1)),
    "diag_embed": Function(torch.diag_embed),
    "trace": Function(torch.trace, (SQUARE,)),
    "tril": Function(torch.tril),
    "triu": Function(lambda x: torch.triu(x, 1)),
    "pad": Function(lambda x: F.pad(x, (1, 2, 0, 1), value=3.0)),
    "pixel_shuffle": Function(lambda x: F.pixel_shuffle(x, 2), ((1, 4, 2, 3),)),
    # two or more tensors
    "addmm": Function(lambda a, x, y: torch.addmm(a, x, y, beta=2), ((6, 3), M, (5, 3))),
    "baddbmm": Function(torch.baddbmm, ((2, 4, 2), CUBE, (2, 3, 2))),
    "addr": Function(torch.addr, (M, (6,), (5,))),
    "outer": Function(torch.outer, (V, (4,))),
    "inner": Function(torch.inner, (M, (3, 5))),
    "vdot": Function(torch.vdot, (V, V)),
    "kron": Function(torch.kron, ((2, 3), (3, 2))),
    "cross": Function(lambda x, y: torch.cross(x, y, dim=-1), (CUBE, CUBE)),
    "tensordot": Function(lambda x, y: torch.tensordot(x, y, 1), (CUBE, (3, 2))),
    "chain_matmul": Function(lambda x, y: torch.linalg.multi_dot((x, y, y)), ((6, 4), SQUARE)),
    "cdist": Function(lambda x, y: torch.cdist(x, y), (M, (4, 5))),
    "pdist": Function(lambda x: F.pdist(x)),
    "dist": Function(lambda x, y: torch.dist(x, y), (M, M)),
    "atan2": Function(torch.atan2, (M, M)),
    "hypot": Function(torch.hypot, (M, M)),
    "copysign": Function(torch.copysign, (M, M)),
    "fmax": Function(torch.fmax, (M, M)),
    "logaddexp": Function(torch.logaddexp, (M, M)),
    "heaviside": Function(torch.heaviside, (M, M), grad=False),
    "isclose": Function(torch.isclose, (M, M), grad=False),
    "allclose": Function(lambda x, y: torch.allclose(x, y), (M, M), grad=False),
    "equal": Function(lambda x: torch.equal(x, x), grad=False),
    "cosine_similarity": Function(lambda x, y: F.cosine_similarity(x, y, 0), (M, M)),
    "pairwise_distance": Function(lambda x, y: F.pairwise_distance(x, y), (M, M)),
    "bilinear": Function(lambda x, y, w: F.bilinear(x, y, w), ((6, 3), (6, 4), (2, 3, 4))),
    "gcd": Function(torch.gcd, (M, M), grad=False, kind="int"),
    "left_shift": Function(lambda x: x << 1, grad=False, kind="int"),
    # gather and scatter
    "gather": Function(lambda x: torch.gather(x, 1, torch.tensor([[0, 4], [1, 2]]))),
    "take": Function(lambda x: torch.take(x, torch.tensor([0, 7, 29]))),
    "take_along_dim": Function(lambda x: torch.take_along_dim(x, torch.tensor([[4], [0]] * 3), 1)),
    "index_select": Function(lambda x: torch.index_select(x, 0, torch.tensor([5, 0, 0]))),
    "index_add": Function(lambda x, y: torch.index_add(x, 0, torch.tensor([5, 0]), y), (M, (2, 5))),
    "index_copy": Function(lambda x, y: torch.index_copy(x, 0, torch.tensor([5, 0]), y), (M, (2, 5))),
    "index_fill": Function(lambda x: torch.index_fill(x, 1, torch.tensor([2]), 9.0)),
    "scatter": Function(lambda x, y: torch.scatter(x, 0, torch.tensor([[5, 0, 1, 2, 3]]), y), (M, (1, 5))),
    "scatter_add": Function(lambda x, y: torch.scatter_add(x, 0, torch.tensor([[5, 0, 1, 2, 3]]), y), (M, (1, 5))),
    "scatter_reduce": Function(
        lambda x, y: torch.scatter_reduce(x, 0, torch.tensor([[5, 0, 1, 2, 3]]), y, "amax"), (M, (1, 5))
    ),
    "masked_select": Function(lambda x: torch.masked_select(x, x > 0)),
    "masked_scatter": Function(lambda x, y: torch.masked_scatter(x, x > 0, y), (M, M)),
    "nonzero": Function(lambda x: torch.nonzero(x > 0), grad=False),
    "argwhere": Function(lambda x: torch.argwhere(x > 0), grad=False),
    "index by a tensor": Function(lambda x: x[torch.tensor([4, 1])]),
    "index by a mask": Function(lambda x: x[x > 0]),
    "index by two tensors": Function(lambda x: x[torch.tensor([4, 1]), torch.tensor([0, 2])]),
    # linear algebra
    **each("det slogdet inverse pinverse matrix_exp", torch, shapes=(SQUARE,)),
    "cholesky": Function(lambda x: torch.linalg.cholesky(sym(x)), (SQUARE,)),
    "solve": Function(lambda x, y: torch.linalg.solve(x, y), (SQUARE, (4, 2))),
    "svdvals": Function(torch.linalg.svdvals),
    "svd": Function(lambda x: torch.linalg.svd(x, full_matrices=False), grad=False),
    "qr": Function(lambda x: torch.linalg.qr(x)),
    "eigvalsh": Function(lambda x: torch.linalg.eigvalsh(sym(x)), (SQUARE,)),
    "lstsq": Function(lambda x, y: torch.linalg.lstsq(x, y).solution, (M, (6, 2)), grad=False),
    "matrix_power": Function(lambda x: torch.matrix_power(x, 3), (SQUARE,)),
    "matrix_rank": Function(torch.linalg.matrix_rank, grad=False),
    "cov": Function(torch.cov),
    "corrcoef": Function(torch.corrcoef),
    "fft": Function(lambda x: torch.fft.fft(x, dim=0), grad=False),
    "rfft": Function(lambda x: torch.fft.rfft(x), grad=False),
    "stft": Function(lambda x: torch.stft(x, 4, window=torch.ones(4), return_complex=True), ((9,),), grad=False),
    # networks
    "conv1d": Function(lambda x, w: F.conv1d(x, w, padding=1), ((2, 3, 7), (4, 3, 3))),
    "conv2d": Function(lambda x, w, b: F.conv2d(x, w, b), ((2, 3, 5, 4), (4, 3, 2, 2), (4,))),
    "conv_transpose1d": Function(lambda x, w: F.conv_transpose1d(x, w), ((2, 3, 7), (3, 2, 3))),
    "max_pool2d": Function(lambda x: F.max_pool2d(x, 2), ((2, 3, 5, 4),)),
    "avg_pool2d": Function(lambda x: F.avg_pool2d(x, 2), ((2, 3, 5, 4),)),
    "adaptive_avg_pool1d": Function(lambda x: F.adaptive_avg_pool1d(x, 2), (CUBE,)),
    "interpolate": Function(lambda x: F.interpolate(x, scale_factor=2), (CUBE,)),
    "batch_norm": Function(lambda x: F.batch_norm(x, None, None, training=True), (CUBE,)),
    "group_norm": Function(lambda x: F.group_norm(x, 2), (CUBE,)),
    "instance_norm": Function(lambda x: F.instance_norm(x), (CUBE,)),
    "rms_norm": Function(lambda x: F.rms_norm(x, (5,))),
    "mse_loss": Function(lambda x, y: F.mse_loss(x, y), (M, M)),
    "l1_loss": Function(lambda x, y: F.l1_loss(x, y), (M, M)),
    "smooth_l1_loss": Function(lambda x, y: F.smooth_l1_loss(x, y), (M, M)),
    "huber_loss": Function(lambda x, y: F.huber_loss(x, y), (M, M)),
    "kl_div": Function(lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), (M, M)),
    "nll_loss": Function(lambda x: F.nll_loss(x, torch.tensor([0, 4, 1, 1, 2, 3]))),
    "binary_cross_entropy_with_logits": Function(
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(6, 5) / 2)
    ),
    "one_hot": Function(lambda x: F.one_hot(x % 4, 4), grad=False, kind="int"),
    "embedding_bag": Function(
        lambda w: F.embedding_bag(torch.tensor([[0, 2], [5, 5]]), w, mode="sum")
    ),
    "gumbel-free straight through": Function(lambda x: x.clone().detach() + torch.special.ndtr(x)),
    "special.entr": Function(lambda x: torch.special.entr(x), kind="unit", grad=False),
    "special.log_ndtr": Function(torch.special.log_ndtr),
    "complex": Function(lambda x, y: torch.complex(x, y), (M, M), grad=False),
    "polar": Function(lambda x, y: torch.polar(x, y), (M, M), grad=False),
    "float_power": Function(lambda x: torch.float_power(x, 2)),
    "frexp": Function(lambda x: torch.frexp(x), grad=False),
    "ldexp": Function(lambda x: torch.ldexp(x, torch.tensor(2))),
    "nextafter": Function(torch.nextafter, (M, M), grad=False),
    "result as numbers": Function(lambda x: x.sum().item(), grad=False, kind="int"),
}  # fmt: skip


def values(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "int":
        return torch.randint(0, 6, shape, generator=generator)
    if kind == "float":
        return torch.randn(shape, generator=generator)
    return torch.rand(shape, generator=generator) * 0.8 + (0.1 if kind == "unit" else 1.1)


def spread(dense: torch.Tensor, placements: tuple[Placement, ...]) -> loom.Tensor:
    """A tensor from parts, with partial sums that are really spread over the devices."""
    topology = Topology(MESH, placements, tuple(dense.shape), short_name(dense.dtype))
    parts = {}
    for place in MESH.coordinates():
        part = dense
        for dim, (start, extent) in enumerate(zip(topology.offset(place), topology.extent(place), strict=True)):
            part = part.narrow(dim, min(start, dense.shape[dim]), extent)
        for axis in topology.partial_axes:
            part = part * WEIGHTS[MESH.shape[axis]][place[axis]] if dense.is_floating_point() else part
        parts[place] = part
    return loom.from_local(parts, MESH, placements)


def placed(generator: random.Random, ndim: int, kind: str) -> tuple[Placement, ...]:
    partial = Partial("max") if kind == "int" else Partial("sum")
    options: list[Placement] = [Replicate(), partial, *(Shard(dim) for dim in range(ndim))]
    return tuple(generator.choice(options) for _ in MESH.axes)


def dense_of(value: Any) -> Any:
    if isinstance(value, loom.Tensor):
        return value.to_torch()
    if isinstance(value, (tuple, list)):
        return [dense_of(part) for part in value]
    return value


def check_same(found: Any, expected: Any, name: str) -> None:
    found, expected = dense_of(found), dense_of(expected)
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            check_same(one, other, name)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert found == expected, name


def cases(name: str) -> list[list[tuple[Placement, ...]]]:
    """Six placements of every operand: all replicated, all sharded on dim 0, all partial, and three at random."""
    function, generator = FUNCTIONS[name], random.Random(name)
    partial = Partial("max") if function.kind == "int" else Partial("sum")
    fixed = [(Replicate(),) * 2, (Shard(0), Shard(0)), (partial, Shard(0))]
    drawn = [[placed(generator, len(s), function.kind) for s in function.shapes] for _ in range(3)]
    return [[each_operand] * len(function.shapes) for each_operand in fixed] + drawn


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_without_a_rule_equals_dense(name):
    function = FUNCTIONS[name]
    dense = [values(shape, function.kind, seed) for seed, shape in enumerate(function.shapes)]
    expected = function.run(*dense)
    for placements in cases(name):
        operands = [spread(d, p) for d, p in zip(dense, placements, strict=True)]
        check_same(function.run(*operands), expected, f"{name} on {placements}")


def loss_of(result: Any) -> Any:
    listed = result if isinstance(result, (tuple, list)) else [result]
    return sum((part * part * (1 + i)).sum() for i, part in enumerate(listed) if part.dtype.is_floating_point)


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if function.grad])
def test_its_gradient_equals_dense(name):
    function = FUNCTIONS[name]
    dense = [values(s, function.kind, seed).requires_grad_() for seed, s in enumerate(function.shapes)]
    loss_of(function.run(*dense)).backward()
    for placements in cases(name)[1:4]:
        leaves, operands = [], []
        for value, place in zip(dense, placements, strict=True):
            leaf = loom.distribute(value.detach(), MESH, "R, R").requires_grad_()
            leaves.append(leaf)
            operands.append(leaf.redistribute(place))
        loss_of(function.run(*operands)).backward()
        for leaf, value in zip(leaves, dense, strict=True):
            check_same(leaf.grad, value.grad, f"gradient of {name} on {placements}")


def test_a_hundred_functions_would_work_without_their_rules(monkeypatch):
    """Rules make a call stay where it is; the numbers do not need them."""
    monkeypatch.setattr(functions, "DOORS", {})
    gathered = set()
    for name, function in FUNCTIONS.items():
        dense = [values(shape, function.kind, number) for number, shape in enumerate(function.shapes)]
        with loom.record() as log:
            found = function.run(*(spread(each, (Shard(0), Replicate())) for each in dense))
        if log.fallbacks:
            gathered.add(name)
            check_same(found, function.run(*dense), name)
    assert len(gathered) >= 100


def test_results_keep_the_placements_of_an_operand_of_the_same_shape():
    x = spread(values(M, "float", 0), (Shard(1), Partial("sum")))
    assert torch.cumsum(x, 0).placements == (Shard(1), Replicate())
    assert torch.topk(x, 2, 1).values.placements == (Replicate(), Replicate())


# data-dependent shapes, random functions, mutation, out=


def test_data_dependent_shapes_follow_the_values_and_are_not_cached():
    x = loom.distribute(torch.tensor([0.0, 1.0, 0.0, 2.0]), MESH, "S(0), R")
    assert torch.nonzero(x).shape == (2, 1)
    x.add_(1)
    assert torch.nonzero(x).shape == (4, 1)
    assert torch.unique(x).shape == (3,)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "poisson": lambda x: torch.poisson(x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.4),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("placements", ["S(0), S(1)", "S(0), S(0)", "P(sum), R"])
def test_random_functions_draw_torchs_own_values_after_manual_seed(name, placements):
    dense = torch.rand(M, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    expected = RANDOM[name](dense)
    x = loom.distribute(dense, MESH, placements)
    torch.manual_seed(5)
    check_same(RANDOM[name](x), expected, name)
    torch.manual_seed(6)
    again = RANDOM[name](x)
    assert not torch.equal(dense_of(again), expected)


def put(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


MUTATING: dict[str, Callable[[Any, Any], Any]] = {
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([5, 0, 5, 1, 2, 3]), y),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([5, 0, 4, 1, 2, 3]), y),
    "index_fill_": lambda x, y: x.index_fill_(1, torch.tensor([3]), 7.0),
    "scatter_": lambda x, y: x.scatter_(0, torch.tensor([[5, 0, 1, 2, 3]]), 4.0),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.tensor([[5, 0, 1, 2, 3]]), y),
    "masked_scatter_": lambda x, y: x.masked_scatter_(y > 0, y),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "tril_": lambda x, y: x.tril_(),
    "addmm_": lambda x, y: x.addmm_(y, torch.ones(5, 5)),
    "clamp_min_": lambda x, y: x.clamp_min_(0.5),
    "put_": lambda x, y: x.put_(torch.tensor([1, 29]), torch.tensor([8.0, 9.0])),
    "x[mask] = 0": lambda x, y: put(x, y > 0, 0.0),
    "x[tensor] = y": lambda x, y: put(x, torch.tensor([1, 4]), y[:2]),
}


@pytest.mark.parametrize("name", MUTATING)
@pytest.mark.parametrize("placements", ["S(0), S(1)", "S(0), S(0)", "P(sum), R", "R, R"])
def test_a_mutating_function_writes_back_into_its_operand(name, placements):
    dense, other = values(M, "float", 0), values(M, "float", 1)
    x, y = loom.distribute(dense, MESH, placements), loom.distribute(other, MESH, "R, S(0)")
    topology = x.topology
    expected = MUTATING[name](dense, other)
    assert MUTATING[name](x, y) is x
    assert x.topology is topology
    check_same(x, expected, name)
    check_same(y, other, name)


@pytest.mark.parametrize("placements", ["S(0), S(1)", "S(0), S(0)", "P(sum), R"])
def test_out_forms_write_where_they_are_told(placements):
    dense = values(M, "float", 0)
    x = spread(dense, loom.parse(f"({placements})"))
    out = loom.zeros(M, mesh=MESH, placements="R, S(0)")
    assert torch.cumsum(x, 0, out=out) is out
    check_same(out, torch.cumsum(dense, 0), "cumsum out=")
    first, second = loom.zeros(M, mesh=MESH), loom.zeros(M, mesh=MESH, dtype=torch.int64)
    torch.sort(x, 1, out=(first, second))
    check_same([first, second], list(torch.sort(dense, 1)), "sort out=")
    plain = torch.zeros(M)
    torch.atan2(x, x, out=plain)
    check_same(plain, torch.atan2(dense, dense), "plain out=")


def test_structured_results_keep_their_names():
    dense = values(M, "float", 0)
    x = loom.distribute(dense, MESH, "S(0), S(1)")
    check_same(torch.sort(x).indices, torch.sort(dense).indices, "sort")
    check_same(torch.topk(x, 2).values, torch.topk(dense, 2).values, "topk")
    assert type(torch.sort(x)) is torch.return_types.sort
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close((u @ (s.unsqueeze(-1) * v)).to_torch(), dense, rtol=1e-4, atol=1e-4)


def test_fallback_calls_are_counted_in_record_and_said_in_explain():
    x = spread(values(M, "float", 0), (Shard(0), Shard(1)))
    with loom.record() as log:
        torch.kron(x, x)
        torch.block_diag(x, x)
    assert log.fallbacks == {"kron": 1, "block_diag": 1}
    assert {event.call for event in log} == {"kron", "block_diag"}
    text = str(loom.explain(lambda: torch.kron(x, x)))
    assert "kron: no rule, gathered and computed dense  at test_fallback.py:" in text


@pytest.mark.parametrize("function", [torch.nonzero, torch.unique, lambda x: torch.masked_select(x, x > 0)])
def test_on_meta_a_function_that_needs_values_is_a_clear_error(function):
    x = loom.ones(M, mesh=MESH, device="meta")
    with pytest.raises(
        loom.UnsupportedError, match=r"cannot run on shapes alone\n  reason .*\n  fix +its result depends"
    ):
        function(x)


@pytest.mark.parametrize("function", [lambda x: torch.cumsum(x, 0), lambda x: torch.topk(x, 2), torch.det])
def test_on_meta_a_function_of_shapes_gives_shapes(function):
    dense = torch.ones(SQUARE)
    found, expected = function(loom.ones(SQUARE, mesh=MESH, device="meta")), function(dense)
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for one, other in pairs:
        assert one.is_meta and one.shape == other.shape and one.dtype == other.dtype


# what other systems got wrong


def test_item_of_a_partial_norm_is_the_global_norm():
    dense = values((16, 8), "float", 0)
    x = loom.distribute(dense, MESH, "S(0), S(1)")
    assert torch.linalg.vector_norm(x).item() == pytest.approx(dense.norm().item())
    partial = loom.sum(x * x, output="P(sum), P(sum)")
    assert partial.item() == pytest.approx((dense * dense).sum().item(), rel=1e-5)
    assert float(partial.sqrt()) == pytest.approx(dense.norm().item(), rel=1e-5)


def test_threshold_of_a_partial_max_reduces_first():
    parts = [torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])]
    x = loom.from_local(parts, Mesh(d=2), "P(max)")
    assert torch.equal(F.threshold(x, 0, 5).to_torch(), F.threshold(torch.tensor([3.0, 2.0]), 0, 5))
    negative = loom.from_local([-torch.ones(2), -torch.ones(2)], Mesh(d=2), "P(max)")
    assert torch.equal(F.threshold(negative, 0, 5).to_torch(), torch.full((2,), 5.0))


def test_nonzero_works_on_a_sharded_tensor():
    dense = torch.tensor([[0, 1], [2, 0], [0, 3]])
    assert torch.equal(torch.nonzero(loom.distribute(dense, MESH, "S(0), S(1)")).to_torch(), torch.nonzero(dense))


@pytest.mark.parametrize("shape", [(5, 3), (7, 2), (1, 4), (13, 1)])
def test_flattening_an_uneven_shard_is_the_flat_dense_tensor(shape):
    dense = values(shape, "float", 0)
    for placements in ("S(0), R", "S(0), S(0)", "S(1), S(0)", "R, S(1)"):
        check_same(loom.distribute(dense, MESH, placements).view(-1), dense.view(-1), placements)


def test_partial_plus_a_number_adds_it_once():
    dense = values(M, "float", 0)
    for op in ("sum", "mean", "max", "min"):
        x = loom.distribute(dense, MESH, (Partial(op), Replicate()))
        check_same(x + 1, dense + 1, op)
        check_same(1 - x, 1 - dense, op)
        check_same(x.add_(1), dense + 1, op)


def test_stacking_many_tensors_is_one_call_that_equals_dense():
    many = [values((3,), "float", seed) for seed in range(300)]
    with loom.record() as log:
        found = torch.stack([loom.distribute(each_one, MESH, "S(0), R") for each_one in many])
    assert len(log.calls) == 1
    check_same(found, torch.stack(many), "stack")


def test_ragged_parts_are_refused_and_never_silently_lost():
    parts = [torch.ones(2), torch.ones(3)]
    with pytest.raises(loom.PlacementError, match=r"the part at \(0,\) has shape \[2\]"):
        loom.from_local(parts, Mesh(d=2), "S(0)")


def test_masked_fill_in_place_works_on_every_placement():
    dense, mask = values(M, "float", 0), values(M, "float", 1) > 0
    for one, other in itertools.product(("S(0), S(1)", "P(sum), R", "R, S(0)"), ("S(0), R", "R, R")):
        x = loom.distribute(dense, MESH, one).masked_fill_(loom.distribute(mask, MESH, other), 3.0)
        check_same(x, dense.masked_fill(mask, 3.0), one)


def test_a_function_without_a_rule_says_once_per_line_that_it_gathers():
    x = loom.distribute(values(M, "float", 0), MESH, "S(0), R")

    def run() -> None:
        torch.renorm(x, 2, 0, 1.0)

    text = r"renorm at test_fallback.py:\d+ has no rule: it gathers f32\[6, 5\]\(S\(0\), R\)"
    with pytest.warns(loom.FallbackWarning, match=text):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    with pytest.warns(loom.FallbackWarning):
        torch.renorm(x, 2, 0, 1.0)


def test_a_function_without_a_rule_is_quiet_where_nothing_moves_or_somebody_records():
    x, whole = (loom.distribute(values(M, "float", 0), MESH, each_one) for each_one in ("S(0), R", "R, R"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.renorm(whole, 2, 0, 1.0)
        with loom.record() as log:
            torch.renorm(x, 2, 0, 1.0)
    assert log.fallbacks == {"renorm": 1}


@pytest.mark.parametrize("name", ["get_device", "is_conj", "is_inference", "is_neg", "is_pinned", "is_shared"])
def test_a_question_that_the_stored_array_answers_gathers_nothing(name):
    dense = values(M, "float", 0)
    x = loom.distribute(dense, MESH, "S(0), S(1)")
    with loom.communication("forbid"), loom.record() as log:
        assert getattr(x, name)() == getattr(dense, name)()
        if hasattr(torch, name):
            assert getattr(torch, name)(x) == getattr(torch, name)(dense)
    assert not log.fallbacks


def test_resolving_a_conjugate_keeps_the_tensor_or_gives_its_value():
    dense = torch.view_as_complex(torch.randn(6, 4, 2))
    x = loom.distribute(dense, MESH, "S(0), S(1)")
    assert x.resolve_conj() is x and x.resolve_neg() is x and torch.resolve_conj(x) is x
    check_same(x.conj().resolve_conj(), dense.conj().resolve_conj(), "S(0), S(1)")


def test_memory_is_shared_where_it_lies():
    module = torch.nn.Linear(4, 6)
    module.weight = loom.Parameter(module.weight.detach(), MESH, "S(0), R")
    weight, before = module.weight, module.weight.detach().to_torch()
    assert not weight.is_shared()
    assert module.share_memory() is module and module.weight is weight and weight.is_shared()
    assert torch.equal(weight.detach().to_torch(), before)
