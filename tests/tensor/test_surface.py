"""The public surface is a list; every op of the table is reached by method, operator, loom.*, torch.* and F.* alike."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh
from meshloom.ops import ALIASES, OPS
from meshloom.planner import Plan
from meshloom.runtime import Log
from meshloom.tensor.calling import invoke, table_call

NAMES = """
ArgumentError BindingError BoundsError CheckpointError ClosedError CommunicationError CommunicationWarning DTypeError
DeviceError DeviceTimeoutError DivergenceError DryRun Explanation FabricError FallbackWarning GradientError LaunchError
LostError Machine Mesh MeshError MeshloomError ModeError NotationError OperandError OutOfMemoryError Parameter Partial
PeerLostError Pipeline PipelineError Placement PlacementError RaceError Replicate ScheduleError ShapeError Shard
Simulation Tensor Topology
TraceError UncoveredError UnsupportedError ViewError arange bernoulli checkpoint choose collectives communication
communication_table control current_mesh discover distribute draw draw_mesh dropout dry_run empty empty_like engines
explain eye fabric from_buffer from_local full full_like linspace logspace multinomial normal ones ones_like open_mesh
parse process rand rand_like randint randint_like randn randn_like randperm record runtime simulate stress ttnn
use_fabric use_machine with_output zeros zeros_like accumulate distributed extend synchronize distribute_tensor
from_device_mesh from_dtensor data seconds_waited RandomState Saving export latest load save Plan parallelize plans
unparallelize autoplan experts pipeline
""".split()

OP_NAMES = """
abs absolute add addcdiv addcmul all amax amin any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor bmm cat
ceil chunk clamp clip clone concat concatenate cos cross_entropy div divide dot einsum embedding eq erf exp expand expm1
flatten floor floor_divide fmod ge gelu getitem greater greater_equal gt isfinite isinf isnan layer_norm le lerp less
less_equal linear log log1p log_softmax logical_and logical_not logical_or logical_xor lt masked_fill matmul max maximum
mean min minimum mm mul multiply mv narrow ne neg negative not_equal permute pow prod reciprocal relu remainder reshape
round rsqrt scaled_dot_product_attention sigmoid sign silu sin softmax special_expit split sqrt square squeeze stack sub
subtract sum swapaxes swapdims tanh to transpose true_divide unsqueeze var view where
acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_left_shift
bitwise_right_shift celu clamp_max clamp_min complex conj_physical copysign cosh deg2rad digamma elu erfc erfinv exp2
fix float_power fmax fmin frac gcd glu hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac
isclose isneginf isposinf isreal lcm ldexp leaky_relu lgamma log10 log2 logaddexp logaddexp2 logit logsigmoid mish
nan_to_num nextafter positive prelu rad2deg relu6 selu sgn signbit sinc sinh softplus softshrink softsign
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
special_gammainc special_gammaincc special_gammaln special_i0e special_i1 special_i1e special_log_ndtr
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_ndtr special_ndtri special_psi special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_spherical_bessel_j0 special_xlog1py special_zeta tan tanhshrink threshold trunc xlogy
count_nonzero cummax cummin cumprod cumsum kthvalue linalg_vector_norm logcumsumexp logsumexp median mode nanmean
nanmedian nanquantile nansum quantile std
addbmm addmm addmv addr baddbmm batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits ger
group_norm huber_loss inner kl_div l1_loss mse_loss nll_loss outer poisson_nll_loss rms_norm smooth_l1_loss
soft_margin_loss tensor_split tensordot vdot
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
argsort avg_pool1d avg_pool2d avg_pool3d broadcast_to bucketize cdist cholesky_inverse cholesky_solve conv1d conv2d
conv3d conv_transpose1d conv_transpose2d conv_transpose3d det diag_embed diagonal flip gather grouped_mm index
index_add index_copy index_fill index_put index_select interpolate inverse linalg_cholesky linalg_cross linalg_det
linalg_eigh linalg_eigvalsh linalg_inv linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd linalg_svdvals logdet matrix_exp matrix_power
max_pool1d max_pool2d max_pool3d meshgrid moveaxis movedim one_hot pad pixel_shuffle pixel_unshuffle ravel repeat
repeat_interleave roll rot90 scatter scatter_add scatter_reduce searchsorted slogdet sort take take_along_dim tile topk
tril triu unbind unflatten unfold view_as_complex view_as_real
""".split()

# Public, but not taken along by `from meshloom import *`, which would hide Python's own.
AS_BUILTINS = "abs all any complex max min pow round sum".split()

# Ops that `loom.experts` is made of: their arguments mean nothing to anybody else.
OF_EXPERTS = {"expert_mm", "take_rows"}
# Ops of the table without a public name: max and min are reached by their own names, which sort out the overloads.
NO_FUNCTION = {"max_dim", "min_dim", *OF_EXPERTS}
# Ops whose first operand is not the tensor that torch has the method on, or that take several.
NOT_FIRST = ("embedding", "cat", "stack", "where", "cross_entropy", "meshgrid")
# Ops without a method, as in torch: indexing is x[...], einsum starts with its equation.
NO_METHOD = {"getitem", "einsum", "max_dim", "min_dim", *OF_EXPERTS}


def test_the_public_names_are_these():
    assert sorted([*loom.__all__, *AS_BUILTINS]) == sorted([*NAMES, *OP_NAMES])
    assert not [name for name in loom.__all__ if hasattr(builtins, name)]
    assert len(set(loom.__all__)) == len(loom.__all__)


@pytest.mark.parametrize("name", [*NAMES, *OP_NAMES])
def test_every_public_name_resolves_and_is_documented(name):
    found = getattr(loom, name)
    assert name in dir(loom)
    assert name == "Placement" or (found.__doc__ and found.__doc__.strip())


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'meshloom' has no attribute 'matmull'"):
        loom.matmull  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'no_such_method'"):
        loom.ones(2, mesh=Mesh(d=2)).no_such_method  # noqa: B018


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert loom.__version__ == version("meshloom")


def test_every_op_of_the_table_is_a_function_and_a_method():
    assert {name for name in OPS if name not in {*loom.__all__, *AS_BUILTINS}} == NO_FUNCTION
    assert {name for name in OPS if name not in vars(loom.Tensor)} == NO_METHOD


def test_every_alias_leads_to_an_op_of_the_table():
    assert set(ALIASES.values()) <= set(OPS)
    assert not set(ALIASES) & set(OPS)


# one table, many ways


MESH = Mesh(dp=2, tp=3)


def put(placements: str, *shape: int) -> loom.Tensor:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).abs() + 0.5
    return loom.distribute(dense, MESH, placements)


def x() -> loom.Tensor:
    return put("S(0), R", 6, 4)


def y() -> loom.Tensor:
    return put("R, S(1)", 6, 4)


def integers() -> loom.Tensor:
    return loom.distribute(torch.arange(24).view(6, 4), MESH, "S(0), R")


def places(*shape: int) -> loom.Tensor:
    return loom.distribute(torch.arange(torch.Size(shape).numel()).view(shape) % 4, MESH, "R, R")


def image(dims: int) -> loom.Tensor:
    return put("S(0), R", 6, 4, *(4,) * dims)


def batch() -> loom.Tensor:
    """Positive definite matrices."""
    return loom.distribute(torch.eye(3).expand(6, 3, 3) * torch.arange(1.0, 4.0), MESH, "S(0), R")


ON_MATRICES = "inv pinv det slogdet matrix_rank matrix_exp cholesky qr svd svdvals eigh eigvalsh".split()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def given(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def convolved(dims: int, placements: str, *channels: int) -> Callable[[], Arguments]:
    return lambda: given(image(dims), put(placements, *channels, *(3,) * dims))


def pooled(dims: int) -> Callable[[], Arguments]:
    return lambda: given(image(dims), 2)


UNARY = (
    "abs ceil clone cos erf exp expm1 floor gelu isfinite isinf isnan log log1p logical_not neg reciprocal relu round "
    "rsqrt sigmoid sign silu sin sqrt square tanh acos acosh angle asin asinh atan atanh celu conj_physical cosh "
    "deg2rad digamma elu erfc erfinv exp2 frac glu hardshrink hardsigmoid hardswish hardtanh i0 isneginf isposinf "
    "isreal leaky_relu lgamma log10 log2 logit logsigmoid mish nan_to_num positive rad2deg relu6 selu sgn signbit sinc "
    "sinh softplus softshrink softsign special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 "
    "special_bessel_y1 special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr "
    "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_ndtr special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
    "special_spherical_bessel_j0 tan tanhshrink trunc"
).split()
BINARY = (
    "add sub mul div floor_divide remainder fmod pow maximum minimum eq ne lt le gt ge logical_and logical_or "
    "logical_xor atan2 clamp_max clamp_min complex copysign float_power fmax fmin heaviside hypot igamma igammac "
    "isclose ldexp logaddexp logaddexp2 nextafter special_xlog1py special_zeta xlogy"
).split()
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift")
SAMPLES: dict[str, Callable[[], Arguments]] = {
    **{name: lambda: given(x()) for name in UNARY},
    **{name: lambda: given(x(), y()) for name in BINARY},
    **{name: lambda: given(integers(), 3) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", *SHIFTS)},
    **{name: lambda: given(integers(), integers()) for name in ("gcd", "lcm")},
    "prelu": lambda: given(x(), put("R, S(0)", 4)),
    "threshold": lambda: given(x(), 0.1, 3.0),
    "bitwise_not": lambda: given(integers()),
    "lerp": lambda: given(x(), y(), 0.5),
    "addcmul": lambda: given(x(), y(), y()),
    "addcdiv": lambda: given(x(), y(), y()),
    "where": lambda: given(x() > 1, x(), y()),
    "masked_fill": lambda: given(x(), x() > 1, 0.0),
    "clamp": lambda: given(x(), 0.5, 1.0),
    "to": lambda: given(x(), torch.float64),
    "matmul": lambda: given(x(), put("S(0), R", 4, 5)),
    "mm": lambda: given(x(), put("S(0), R", 4, 5)),
    "bmm": lambda: given(put("S(0), R", 2, 3, 4), put("S(0), S(1)", 2, 4, 3)),
    "mv": lambda: given(x(), put("S(0), R", 4)),
    "dot": lambda: given(put("S(0), R", 4), put("S(0), R", 4)),
    "linear": lambda: given(x(), put("R, S(0)", 5, 4)),
    "einsum": lambda: given("ij,kj->ik", x(), y()),
    **{name: lambda: given(x(), 0) for name in ("sum", "mean", "amax", "amin", "prod", "any", "all", "var", "argmax")},
    "argmin": lambda: given(x(), 0),
    **{
        name: lambda: given(x(), 0)
        for name in "std nansum nanmean count_nonzero logsumexp median nanmedian mode cumsum cumprod".split()
    },
    **{name: lambda: given(x(), 0) for name in "logcumsumexp cummax cummin".split()},
    "kthvalue": lambda: given(x(), 2, 0),
    **{name: lambda: given(x(), 0.5, 0) for name in ("quantile", "nanquantile")},
    "cdist": lambda: given(x(), y()),
    "grouped_mm": lambda: given(x(), put("S(0), R", 2, 4, 4), offs=torch.tensor([2, 6], dtype=torch.int32)),
    "expert_mm": lambda: given(put("S(0), R", 2, 6, 4), put("S(0), R", 4, 4, 5), torch.ones(2, 6, dtype=torch.int64)),
    "take_rows": lambda: given(put("S(0), R", 2, 6, 4), torch.ones(2, 5, dtype=torch.int64)),
    "outer": lambda: given(put("S(0), R", 6), put("R, S(0)", 4)),
    "inner": lambda: given(x(), y()),
    "vdot": lambda: given(put("S(0), R", 6), put("S(0), R", 6)),
    "tensordot": lambda: given(x(), put("S(0), R", 4, 5), 1),
    "bilinear": lambda: given(x(), y(), put("R, R", 3, 4, 4)),
    "addmm": lambda: given(put("R, S(0)", 5), x(), put("S(0), R", 4, 5)),
    "addmv": lambda: given(put("S(0), R", 6), x(), put("R, R", 4)),
    "addr": lambda: given(x(), put("S(0), R", 6), put("R, R", 4)),
    "addbmm": lambda: given(put("R, R", 3, 3), put("S(0), R", 2, 3, 4), put("S(0), R", 2, 4, 3)),
    "baddbmm": lambda: given(put("R, R", 3, 3), put("S(0), R", 2, 3, 4), put("S(0), R", 2, 4, 3)),
    "rms_norm": lambda: given(x(), (4,)),
    "group_norm": lambda: given(put("S(0), R", 6, 4, 3), 2),
    "batch_norm": lambda: given(x(), None, None, training=True),
    **{f"{name}_loss": lambda: given(x(), y()) for name in "mse l1 smooth_l1 huber soft_margin poisson_nll".split()},
    "binary_cross_entropy": lambda: given(x().sigmoid(), y().sigmoid()),
    "binary_cross_entropy_with_logits": lambda: given(x(), y()),
    "kl_div": lambda: given(x(), y(), reduction="sum"),
    "nll_loss": lambda: given(x(), torch.tensor([0, 1, 2, 3, 0, 1])),
    "linalg_vector_norm": lambda: given(x(), 3, 0),
    "max_dim": lambda: given(x(), 0),
    "min_dim": lambda: given(x(), 0),
    "softmax": lambda: given(x(), 0),
    "log_softmax": lambda: given(x(), 0),
    "layer_norm": lambda: given(x(), (4,)),
    "cross_entropy": lambda: given(x(), torch.tensor([0, 1, 2, 3, 0, 1])),
    "embedding": lambda: given(torch.tensor([5, 0]), x()),
    "scaled_dot_product_attention": lambda: given(*(put("S(0), R", 2, 3, 4) for _ in range(3))),
    "reshape": lambda: given(x(), (12, 2)),
    "view": lambda: given(x(), 12, 2),
    "flatten": lambda: given(x()),
    "squeeze": lambda: given(put("S(0), R", 6, 1), 1),
    "unsqueeze": lambda: given(x(), 0),
    "permute": lambda: given(x(), (1, 0)),
    "transpose": lambda: given(x(), 0, 1),
    "expand": lambda: given(x(), (2, 6, 4)),
    "narrow": lambda: given(x(), 0, 1, 3),
    "getitem": lambda: given(x(), slice(1, 3)),
    "split": lambda: given(x(), 2),
    "chunk": lambda: given(x(), 2),
    "tensor_split": lambda: given(x(), (2, 4)),
    "cat": lambda: given([x(), y()]),
    "stack": lambda: given([x(), y()]),
    "gather": lambda: given(x(), 1, places(6, 2)),
    "take_along_dim": lambda: given(x(), places(6, 2), 1),
    "take": lambda: given(x(), places(5)),
    "index_select": lambda: given(x(), 1, places(3)),
    "index": lambda: given(x(), (None, places(3))),
    "index_put": lambda: given(x(), (places(3),), torch.zeros(3, 4)),
    "index_add": lambda: given(x(), 0, places(3), put("R, R", 3, 4)),
    "index_copy": lambda: given(x(), 0, places(3), put("R, R", 3, 4)),
    "index_fill": lambda: given(x(), 0, places(3), 2.0),
    "scatter": lambda: given(x(), 1, places(6, 2), put("S(0), R", 6, 2)),
    "scatter_add": lambda: given(x(), 1, places(6, 2), put("S(0), R", 6, 2)),
    "scatter_reduce": lambda: given(x(), 1, places(6, 2), put("S(0), R", 6, 2), "sum"),
    "one_hot": lambda: given(places(6, 2), 4),
    "sort": lambda: given(x(), 1),
    "argsort": lambda: given(x(), 1),
    "topk": lambda: given(x(), 2, 1),
    "searchsorted": lambda: given(x(), x()),
    "bucketize": lambda: given(x(), torch.arange(3.0)),
    "unflatten": lambda: given(x(), 0, (3, 2)),
    "ravel": lambda: given(x()),
    "view_as_complex": lambda: given(put("S(0), R", 6, 2)),
    "view_as_real": lambda: given(loom.complex(x(), x())),
    "movedim": lambda: given(x(), 0, 1),
    "unbind": lambda: given(x(), 1),
    "unfold": lambda: given(x(), 1, 2, 1),
    "diagonal": lambda: given(x()),
    "diag_embed": lambda: given(x()),
    "tril": lambda: given(x(), 1),
    "triu": lambda: given(x(), 1),
    "repeat": lambda: given(x(), 2, 1),
    "tile": lambda: given(x(), (2, 1)),
    "repeat_interleave": lambda: given(x(), 2, 0),
    "roll": lambda: given(x(), 1, 1),
    "flip": lambda: given(x(), (1,)),
    "rot90": lambda: given(x(), 1, (0, 1)),
    "pad": lambda: given(x(), (1, 1)),
    "meshgrid": lambda: given(put("S(0), R", 4), put("R, S(0)", 3), indexing="ij"),
    "pixel_shuffle": lambda: given(put("S(0), R", 2, 4, 3, 3), 2),
    "pixel_unshuffle": lambda: given(put("S(0), R", 2, 1, 4, 4), 2),
    **{f"conv{n}d": convolved(n, "R, S(0)", 5, 4) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolved(n, "R, S(1)", 4, 5) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": pooled(n) for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_max", "adaptive_avg")},
    "interpolate": lambda: given(image(2), scale_factor=2),
    **{f"linalg_{name}": lambda: given(batch()) for name in ON_MATRICES},
    "linalg_matrix_power": lambda: given(batch(), 2),
    "linalg_solve": lambda: given(batch(), put("S(0), R", 6, 3, 2)),
    "linalg_solve_triangular": lambda: given(batch(), put("S(0), R", 6, 3, 2), upper=True),
    "linalg_cross": lambda: given(put("S(0), R", 6, 3), put("S(0), R", 6, 3)),
    "cholesky_solve": lambda: given(put("S(0), R", 6, 3, 2), batch()),
    "cholesky_inverse": lambda: given(batch()),
    "logdet": lambda: given(batch()),
}


def ways(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every spelling of an op: as a function of loom, torch and F, and as a method."""
    public = {"max_dim": "max", "min_dim": "min"}.get(name, name)
    if public in {*loom.__all__, *AS_BUILTINS}:
        yield f"loom.{public}", getattr(loom, public)
    if name in OF_EXPERTS:
        yield "table_call", partial(table_call, name)
        yield "invoke", lambda *args: invoke(name, args, {})
        return
    if name == "getitem":
        yield "x[...]", operator.getitem
    elif public not in NO_METHOD and name not in NOT_FIRST:
        yield f"x.{public}", lambda first, *args, **kwargs: getattr(first, public)(*args, **kwargs)
    elif name == "where":
        yield "x.where", lambda condition, first, other: first.where(condition, other)
    # torch.embedding and torch.layer_norm take other arguments, torch.adaptive_max_pool1d gives indices too
    odd = {"embedding", "layer_norm", "adaptive_max_pool1d", "batch_norm", "group_norm", "kl_div", "poisson_nll_loss"}
    odd.add("binary_cross_entropy_with_logits")
    if hasattr(torch, public) and public not in odd:
        yield f"torch.{public}", getattr(torch, public)
    if hasattr(F, public) and public != "unfold":  # F.unfold gives columns of windows
        yield f"F.{public}", getattr(F, public)
    for space in (torch.special, torch.linalg):
        bare = public.removeprefix(f"{space.__name__.split('.')[-1]}_")
        if bare != public and hasattr(space, bare):
            yield f"{space.__name__}.{bare}", getattr(space, bare)


def told(log: Log) -> list[Any]:
    """What a record says of calls: the op, its operands, what came out, and the events."""
    plans = [
        (p.call.op, [str(t) for t in p.call.operands], [str(row) for row in p.rows], [str(t) for t in p.outs])
        for p, _ in log.calls
        if isinstance(p, Plan)
    ]
    return [plans, [(event.collective, event.call, event.phase) for event in log], dict(log.fallbacks)]


def run(function: Callable[..., Any], name: str) -> list[Any]:
    args, kwargs = SAMPLES[name]()
    with loom.record() as log:
        function(*args, **kwargs)
    return told(log)


def test_there_is_a_sample_for_every_op():
    assert set(SAMPLES) == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_every_way_to_an_op_gives_the_same_record(name):
    records = {way: run(function, name) for way, function in ways(name)}
    assert len(records) >= 2, "only one way was found"
    first = next(iter(records.values()))
    plans, _, fallbacks = first
    assert [op for op, *_ in plans] == [name] and fallbacks == {}
    for way, record in records.items():
        assert record == first, way


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if not alias.startswith("_")])
def test_an_alias_gives_the_record_of_its_op(alias):
    name = ALIASES[alias]
    expected = run(getattr(loom, name), name)
    assert run(getattr(loom, alias), name) == expected
    for place in (torch, torch.special):
        function = getattr(place, alias.removeprefix("special_"), None)
        if function is not None:
            assert run(function, name) == expected


OPERATORS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_left_shift": operator.lshift,
    "bitwise_right_shift": operator.rshift,
    "bitwise_not": operator.invert,
    "neg": operator.neg,
    "abs": operator.abs,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_record_of_its_op(name):
    assert run(OPERATORS[name], name) == run(getattr(loom, name), name)


@pytest.mark.parametrize("symbol", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_an_operator_works_with_a_number_or_a_plain_tensor_on_either_side(symbol):
    act = getattr(operator, symbol)
    tensor = x()
    dense = tensor.to_torch()
    for other in (2, 2.5, True, torch.tensor(1.5), torch.full((4,), 2.0), dense.numpy()):
        plain = torch.as_tensor(other) if not isinstance(other, (int, float)) else other
        if isinstance(other, bool) and symbol == "sub":
            continue  # torch refuses a bool in a subtraction
        check_same(act(tensor, other), act(dense, plain))
        if not hasattr(other, "__array_interface__"):
            check_same(act(other, tensor), act(plain, dense))


def check_same(found: loom.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(found, loom.Tensor) and found.dtype == expected.dtype
    torch.testing.assert_close(found.to_torch(), expected)


@pytest.mark.parametrize("symbol", ["iadd", "isub", "imul", "itruediv", "ipow", "imod", "ifloordiv"])
def test_an_in_place_operator_changes_its_target(symbol):
    tensor = x()
    dense = tensor.to_torch()
    assert getattr(operator, symbol)(tensor, 2.0) is tensor
    torch.testing.assert_close(tensor.to_torch(), getattr(operator, symbol)(dense, 2.0))


def test_a_stranger_on_the_other_side_is_a_type_error():
    with pytest.raises(TypeError):
        x() + "text"  # type: ignore[operator]
    assert x().__add__("text") is NotImplemented
