"""Both engines under one suite, on one worker; checklist rows 156 to 163, with real processes for what ranks do.

Three oracles: numbers written by hand, the samples of every op against dense torch, and the two engines against each
other over dtypes, shapes and dims.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from engine_ranks import run_ranks
from meshloom import engines
from meshloom.engines import Engine
from meshloom.engines.numpy_engine import promotion
from meshloom.engines.torch_distributed import backend_of, read_ranks
from meshloom.errors import (
    ArgumentError,
    BoundsError,
    CommunicationError,
    DTypeError,
    GradientError,
    MeshloomError,
    ShapeError,
    UnsupportedError,
)
from meshloom.ops import ALIASES
from meshloom.tensor.functions import KNOWN
from oracle import draw_values
from samples import SAMPLES, Case, Draw, Operand

NAMES = ("torch", "numpy")
BOTH = sorted(set(engines.load("torch").ops) & set(engines.load("numpy").ops))
INF, NAN = math.inf, math.nan
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(params=NAMES)
def engine(request) -> Engine:
    return engines.load(request.param)


def check_array(found: np.ndarray, expected: np.ndarray, what: str = "", slack: float = 1) -> None:
    """Equal within rounding; shape and dtype exactly."""
    assert (found.shape, str(found.dtype)) == (expected.shape, str(expected.dtype)), what
    rtol = TOLERANCE.get(str(expected.dtype), 0) * slack
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol, equal_nan=True, err_msg=what)


def listed(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


# Numbers written by hand: f, d, i and b make float32, float64, int64 and bool.


def f(values: Any) -> np.ndarray:
    return np.asarray(values, "float32")


def d(values: Any) -> np.ndarray:
    return np.asarray(values, "float64")


def i(values: Any) -> np.ndarray:
    return np.asarray(values, "int64")


def b(values: Any) -> np.ndarray:
    return np.asarray(values, "bool")


def case(*args: Any, to: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return args, kwargs, to


TABLE = [[1, 2, 3], [4, 5, 6]]
EXPECTED: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Any]]] = {
    "add": [
        case(f([1, 2]), f([10, 20]), to=f([11, 22])),
        case(f([[1], [2]]), f([10, 20]), alpha=2, to=f([[21, 41], [22, 42]])),
        case(i([1, 2]), 2.5, to=f([3.5, 4.5])),
        case(f([1]), d(1), to=f([2])),
        case(i([1]), f(1.5), to=f([2.5])),
        case(b([True, False]), b([True, True]), to=b([True, True])),
        case(b([True, False]), 2, to=i([3, 2])),
        case(i([1]), d([0.5]), to=d([1.5])),
    ],
    "sub": [case(f([1, 2]), f([10, 20]), to=f([-9, -18])), case(i([5]), i([3]), alpha=2, to=i([-1]))],
    "mul": [case(f([1, 2]), 3, to=f([3, 6])), case(b([True, False]), b([True, True]), to=b([True, False]))],
    "div": [
        case(i([7, -7]), 2, to=f([3.5, -3.5])),
        case(i([7, -7]), 2, rounding_mode="trunc", to=i([3, -3])),
        case(i([7, -7]), 2, rounding_mode="floor", to=i([3, -4])),
        case(f([7, -7, 1, 0]), f([2, 2, 0, 0]), rounding_mode="trunc", to=f([3, -3, INF, NAN])),
        case(f([1, -1, 0]), f([0, 0, 0]), to=f([INF, -INF, NAN])),
    ],
    "floor_divide": [case(f([7, -7, 1]), f([2, 2, 0]), to=f([3, -4, INF])), case(i([7, -7]), 2, to=i([3, -4]))],
    "remainder": [case(f([5, -5]), 3, to=f([2, 1])), case(i([5, -5]), i([-3, 3]), to=i([-1, 1]))],
    "fmod": [case(f([5, -5]), 3, to=f([2, -2])), case(i([5, -5]), 3, to=i([2, -2]))],
    "pow": [
        case(f([2, 4]), 0.5, to=f([math.sqrt(2), 2])),
        case(i([2, 3]), 3, to=i([8, 27])),
        case(2, f([3, -1]), to=f([8, 0.5])),
        case(2.5, i([1, 2]), to=f([2.5, 6.25])),
    ],
    "neg": [case(f([1, -2]), to=f([-1, 2])), case(i([3]), to=i([-3]))],
    "abs": [case(f([1, -2]), to=f([1, 2])), case(i([-3]), to=i([3]))],
    "square": [case(f([3, -2]), to=f([9, 4])), case(b([True, False]), to=i([1, 0]))],
    "sign": [case(f([3, -2, 0, NAN]), to=f([1, -1, 0, 0])), case(b([True, False]), to=b([True, False]))],
    "reciprocal": [case(f([4, 0]), to=f([0.25, INF])), case(i([2]), to=f([0.5]))],
    "maximum": [case(f([1, NAN, 3]), f([2, 2, 2]), to=f([2, NAN, 3])), case(i([1]), f([0.5]), to=f([1]))],
    "minimum": [case(f([1, NAN, 3]), f([2, 2, 2]), to=f([1, NAN, 2]))],
    "lerp": [case(f([0, 10]), f([10, 20]), 0.25, to=f([2.5, 12.5])), case(f([0]), f([8]), f([0.75]), to=f([6]))],
    "addcmul": [case(f([1]), f([2]), f([3]), value=2, to=f([13])), case(i([1]), i([2]), i([3]), to=i([7]))],
    "addcdiv": [case(f([1]), f([6]), f([3]), value=2, to=f([5]))],
    "eq": [case(f([1, NAN]), f([1, NAN]), to=b([True, False])), case(i([1, 2]), 1.5, to=b([False, False]))],
    "ne": [case(f([1, NAN]), f([1, NAN]), to=b([False, True]))],
    "lt": [case(f([1, 2]), 2, to=b([True, False])), case(b([True, False]), b([True, True]), to=b([False, True]))],
    "le": [case(i([1, 2, 3]), 2, to=b([True, True, False]))],
    "gt": [case(i([1, 2, 3]), 2, to=b([False, False, True]))],
    "ge": [case(i([1, 2, 3]), 2, to=b([False, True, True]))],
    "logical_and": [case(f([1, 0]), i([2, 2]), to=b([True, False]))],
    "logical_or": [case(f([1, 0]), i([0, 0]), to=b([True, False]))],
    "logical_xor": [case(f([1, 0]), i([2, 2]), to=b([False, True]))],
    "logical_not": [case(f([1, 0]), to=b([False, True]))],
    "bitwise_and": [case(i([6, 5]), 3, to=i([2, 1])), case(b([True]), b([False]), to=b([False]))],
    "bitwise_or": [case(i([6, 5]), 3, to=i([7, 7]))],
    "bitwise_xor": [case(i([6, 5]), 3, to=i([5, 6]))],
    "bitwise_not": [case(i([0, 5]), to=i([-1, -6])), case(b([True]), to=b([False]))],
    "isnan": [case(f([1, NAN, INF]), to=b([False, True, False])), case(i([1]), to=b([False]))],
    "isinf": [case(f([1, NAN, INF]), to=b([False, False, True])), case(b([True]), to=b([False]))],
    "isfinite": [case(f([1, NAN, INF]), to=b([True, False, False])), case(i([1]), to=b([True]))],
    "where": [
        case(b([True, False]), f([1, 2]), f([3, 4]), to=f([1, 4])),
        case(b([True, False]), i([1, 2]), 0.5, to=f([1, 0.5])),
    ],
    "masked_fill": [case(f([1, 2]), b([True, False]), -INF, to=f([-INF, 2])), case(i([1]), b([True]), 7, to=i([7]))],
    "clamp": [
        case(f([-1, 0.5, 9, NAN]), 0, 1, to=f([0, 0.5, 1, NAN])),
        case(i([0, 3]), min=0.5, to=f([0.5, 3])),
        case(f([0, 5]), min=2, max=-1, to=f([-1, -1])),
        case(f([1, 5]), max=f([0, 9]), to=f([0, 5])),
    ],
    "exp": [case(f([0, 1]), to=f([1, math.e])), case(i([0]), to=f([1])), case(d([1]), to=d([math.e]))],
    "log": [case(f([1, 0, -1]), to=f([0, -INF, NAN]))],
    "log1p": [case(d([0, 1e-12]), to=d([0, 1e-12]))],
    "expm1": [case(d([0, 1e-12]), to=d([0, 1e-12]))],
    "sqrt": [case(f([4, -1]), to=f([2, NAN])), case(b([True]), to=f([1]))],
    "rsqrt": [case(f([4, 0]), to=f([0.5, INF]))],
    "sin": [case(d([0, math.pi / 2]), to=d([0, 1]))],
    "cos": [case(d([0, math.pi]), to=d([1, -1]))],
    "tanh": [case(f([0, 99]), to=f([0, 1]))],
    "sigmoid": [case(f([0, -200, 200]), to=f([0.5, 0, 1]))],
    "relu": [case(f([-1, 2, NAN]), to=f([0, 2, NAN])), case(i([-1, 2]), to=i([0, 2]))],
    "gelu": [
        case(d([0, 1]), to=d([0, 0.8413447460685429])),
        case(d([1]), approximate="tanh", to=d([0.8411919906082768])),
    ],
    "silu": [case(d([0, 1]), to=d([0, 0.7310585786300049]))],
    "erf": [case(d([0, 1, -INF]), to=d([0, 0.8427007929497149, -1])), case(i([0]), to=f([0]))],
    "floor": [case(f([1.5, -1.5]), to=f([1, -2])), case(i([3]), to=i([3]))],
    "ceil": [case(f([1.5, -1.5]), to=f([2, -1]))],
    "round": [case(f([0.5, 1.5, -2.5]), to=f([0, 2, -2])), case(d([1.25, 1.35]), decimals=1, to=d([1.2, 1.4]))],
    "to": [case(f([1.9, 0, -1.9]), "int64", to=i([1, 0, -1])), case(i([2, 0]), dtype="bool", to=b([True, False]))],
    "clone": [case(i([1, 2]), to=i([1, 2]))],
    "matmul": [
        case(f(TABLE), f([1, 0, 2]), to=f([7, 16])),
        case(i([[1, 2]]), i([[3], [4]]), to=i([[11]])),
        case(f(np.ones((2, 1, 2, 3))), f(np.ones((4, 3, 2))), to=f(np.full((2, 4, 2, 2), 3))),
        case(f(np.ones((2, 0))), f(np.ones((0, 3))), to=f(np.zeros((2, 3)))),
    ],
    "mm": [case(f([[1, 2]]), f([[3], [4]]), to=f([[11]]))],
    "bmm": [case(f([[[1, 2]]]), f([[[3], [4]]]), to=f([[[11]]]))],
    "mv": [case(f(TABLE), f([1, 0, 2]), to=f([7, 16]))],
    "dot": [case(f([1, 2]), f([3, 4]), to=f(11)), case(i([1, 2]), i([3, 4]), to=i(11))],
    "linear": [case(f([[1, 2]]), f([[3, 4], [5, 6]]), f([1, -1]), to=f([[12, 16]]))],
    "einsum": [
        case("ij,kj->ik", f([[1, 2]]), f([[3, 4], [5, 6]]), to=f([[11, 17]])),
        case("iij->j", f(np.arange(8).reshape(2, 2, 2)), to=f([6, 8])),
        case("ba", i([[1, 2]]), to=i([[1], [2]])),
    ],
    "sum": [
        case(f(TABLE), to=f(21)),
        case(f(TABLE), (0, -1), keepdim=True, to=f([[21]])),
        case(b([[True, True], [True, False]]), 1, to=i([2, 1])),
        case(f(np.ones((0, 2))), 0, to=f([0, 0])),
        case(i([1, 2]), dtype="float64", to=d(3)),
        case(b(True), to=i(1)),
    ],
    "mean": [case(f(TABLE), 0, to=f([2.5, 3.5, 4.5])), case(i([1, 2]), dtype="float32", to=f(1.5))],
    "amax": [case(f(TABLE), 1, to=f([3, 6])), case(f([1, NAN]), to=f(NAN)), case(b([True, False]), to=b(True))],
    "amin": [case(i(TABLE), (0, 1), keepdim=True, to=i([[1]]))],
    "prod": [case(f(TABLE), 1, to=f([6, 120])), case(b([True, True]), to=i(1)), case(f(np.ones(0)), to=f(1))],
    "any": [case(f([[0, 0], [0, 2]]), 1, to=b([False, True])), case(b(np.ones(0)), to=b(False))],
    "all": [case(f([[0, 1], [3, 2]]), 1, to=b([False, True])), case(b(np.ones(0)), to=b(True))],
    "var": [
        case(f([[1, 3], [2, 6]]), 1, to=f([2, 8])),
        case(f([1, 3]), correction=0, to=f(1)),
        case(f([1, 3]), unbiased=False, keepdim=True, to=f([1])),
    ],
    "argmax": [case(f([[1, 3], [5, 2]]), to=i(2)), case(i([[1, 3], [5, 2]]), 1, keepdim=True, to=i([[1], [0]]))],
    "argmin": [case(f([[1, 3], [5, 2]]), 0, to=i([0, 1]))],
    "max_dim": [case(f([[1, 3], [5, 2]]), 1, to=(f([3, 5]), i([1, 0]))), case(f(3), 0, to=(f(3), i(0)))],
    "min_dim": [case(i([[1, 3], [5, 2]]), -1, keepdim=True, to=(i([[1], [2]]), i([[0], [1]])))],
    "softmax": [
        case(f([[0, 0], [-INF, 1]]), 1, to=f([[0.5, 0.5], [0, 1]])),
        case(i([0, 0]), 0, dtype="float64", to=d([0.5, 0.5])),
        case(f(3), 0, to=f(1)),
    ],
    "log_softmax": [case(d([0, 0]), 0, to=d([-math.log(2)] * 2)), case(f([1000, 0]), 0, to=f([0, -1000]))],
    "layer_norm": [
        case(d([[1, 3], [2, 2]]), (2,), eps=0.0, to=d([[-1, 1], [NAN, NAN]])),
        case(d([[1, 3]]), 2, d([2, 2]), d([1, 0]), eps=0.0, to=d([[-1, 2]])),
    ],
    "cross_entropy": [
        case(d([[0, 0], [0, 0]]), i([0, 1]), to=d(math.log(2))),
        case(d([[0, 0], [0, 0]]), i([0, -100]), reduction="sum", to=d(math.log(2))),
        case(d([[0, 0], [0, 0]]), i([0, 1]), d([1, 3]), reduction="none", to=d([math.log(2), 3 * math.log(2)])),
        case(d([[0, 0]]), d([[0.25, 0.5]]), label_smoothing=0.5, to=d(0.875 * math.log(2))),
    ],
    "embedding": [case(i([[2, 0]]), f([[1, 2], [3, 4], [5, 6]]), to=f([[[5, 6], [1, 2]]]))],
    "scaled_dot_product_attention": [
        case(d([[0.0], [0]]), d([[1.0], [2]]), d([[4.0], [8]]), to=d([[6], [6]])),
        case(d([[0.0], [0]]), d([[1.0], [2]]), d([[4.0], [8]]), is_causal=True, to=d([[4], [6]])),
        case(d([[0.0]]), d([[1.0], [2]]), d([[4.0], [8]]), b([[False, True]]), to=d([[8]])),
        case(d([[0.0]]), d([[1.0], [2]]), d([[4.0], [8]]), b([[False, False]]), to=d([[0]])),
    ],
    "reshape": [
        case(f(TABLE), 3, -1, to=f([[1, 2], [3, 4], [5, 6]])),
        case(f(np.ones((0, 3))), (3, 0), to=f([[]] * 3)),
    ],
    "view": [case(i(TABLE), (6,), to=i([1, 2, 3, 4, 5, 6]))],
    "flatten": [case(i([[[1], [2]]]), 1, to=i([[1, 2]])), case(f(1), to=f([1]))],
    "squeeze": [case(f([[[1], [2]]]), to=f([1, 2])), case(f([[[1], [2]]]), (0, 1), to=f([[1], [2]]))],
    "unsqueeze": [case(f([1, 2]), -1, to=f([[1], [2]]))],
    "permute": [case(f(np.ones((2, 3, 0))), 2, 0, 1, to=f(np.ones((0, 2, 3)))), case(i(TABLE), (1, 0), to=i(TABLE).T)],
    "transpose": [case(i(TABLE), 0, -1, to=i(TABLE).T), case(f(1), 0, 0, to=f(1))],
    "expand": [case(f([[1], [2]]), 2, -1, 2, to=f([[[1, 1], [2, 2]]] * 2))],
    "narrow": [case(i(TABLE), 1, -2, 2, to=i([[2, 3], [5, 6]])), case(i(TABLE), 1, 3, 0, to=i([[], []]))],
    "getitem": [case(i(TABLE), (1, 2), to=i(6)), case(i(TABLE), (None, slice(1, None), ...), to=i([[[4, 5, 6]]]))],
    "split": [
        case(i([1, 2, 3]), 2, to=(i([1, 2]), i([3]))),
        case(i(TABLE), [1, 2], 1, to=(i([[1], [4]]), i([[2, 3], [5, 6]]))),
    ],
    "tensor_split": [
        case(i([1, 2, 3, 4, 5]), (3,), to=(i([1, 2, 3]), i([4, 5]))),
        case(i([1, 2, 3]), 2, to=(i([1, 2]), i([3]))),
    ],
    "chunk": [case(i([1, 2, 3, 4, 5]), 3, to=(i([1, 2]), i([3, 4]), i([5])))],
    "cat": [case([i([1]), f([0.5])], to=f([1, 0.5])), case([b([[True]]), b([[False]])], dim=1, to=b([[True, False]]))],
    "stack": [case([i([1, 2]), i([3, 4])], dim=-1, to=i([[1, 3], [2, 4]]))],
}  # fmt: skip


def own(engine: Engine, value: Any) -> Any:
    """An argument with its NumPy arrays as the engine's own."""
    if isinstance(value, np.ndarray):
        return engine.array(value.copy())
    return [own(engine, each) for each in value] if isinstance(value, list) else value


def check_written(engine: Engine, op: str) -> None:
    """The cases written by hand."""
    for args, kwargs, expected in EXPECTED[op]:
        operands = [own(engine, each) for each in args]
        named = {name: own(engine, each) for name, each in kwargs.items()}
        results = listed(engine.run(op, *operands, **named))
        assert len(results) == len(listed(expected)), (op, args, kwargs)
        for found, wanted in zip(results, listed(expected), strict=True):
            assert isinstance(found, engine.kind)
            check_array(engine.numpy(found), wanted, f"{engine.name}: {op}{args} {kwargs}")


@pytest.mark.parametrize("op", BOTH)
def test_row_156_both_engines_give_the_numbers_written_by_hand(engine, op):
    check_written(engine, op)


def test_row_156_both_engines_have_the_ops_that_documents_and_programs_use():
    assert set(EXPECTED) == set(BOTH) == set(engines.load("numpy").ops)
    assert len(BOTH) > 85 and {"matmul", "sum", "mean", "add", "relu", "transpose"} <= set(BOTH)


# The samples of every op, awkward arguments included, against dense torch.


class Held:
    """An array of an engine that torch's functions and methods reach: each call becomes `engine.run`."""

    def __init__(self, engine: Engine, array: Any) -> None:
        self.engine, self.array = engine, array

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.call(KNOWN[function], args, kwargs or {})

    @classmethod
    def call(cls, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in ("max", "min"):
            name += "_dim"
        engine = next(each.engine for each in _flat(args) if isinstance(each, cls))
        kept = {key: _bare(value) for key, value in kwargs.items() if key not in _LEFT_OUT}
        result = engine.run(ALIASES.get(name, name), *_bare(args), **kept)
        return tuple(cls(engine, each) for each in result) if isinstance(result, (tuple, list)) else cls(engine, result)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.call("getitem", (self, index), {})


# arguments of torch's functions that say nothing about the values
_LEFT_OUT = {"inplace", "copy", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"}


def _flat(values: Any) -> Any:
    for each in values:
        yield from _flat(each) if isinstance(each, (tuple, list)) else (each,)


def _bare(value: Any) -> Any:
    """What an engine takes: its arrays, and dtypes by name."""
    if isinstance(value, Held):
        return value.array
    if isinstance(value, torch.dtype):
        return str(value)
    return type(value)(_bare(each) for each in value) if type(value) in (tuple, list) else value


def wide(operand: Operand) -> Operand:
    """The operand in a dtype that both engines have: float64 instead of bfloat16."""
    dtype = torch.float64 if operand.dtype == torch.bfloat16 else operand.dtype
    return Operand(operand.shape, dtype, operand.values, operand.gradient)


def casts_to_bfloat16(drawn: Case) -> bool:
    """Whether the sample converts to a dtype that the numpy engine has not."""
    dense = [draw_values(wide(operand), 0) for operand in drawn.operands]
    return any(each.dtype == torch.bfloat16 for each in listed(drawn.run(*dense)))


def check_sample(engine: Engine, drawn: Case, seed: int) -> None:
    """The sample on arrays of the engine, against the same function on dense torch tensors."""
    dense = [draw_values(wide(operand), seed + place) for place, operand in enumerate(drawn.operands)]
    expected = listed(drawn.run(*dense))
    results = listed(drawn.run(*(Held(engine, engine.array(each.numpy().copy())) for each in dense)))
    assert len(results) == len(expected)
    what = str([(str(each.dtype), tuple(each.shape)) for each in dense])
    for found, wanted in zip(results, expected, strict=True):
        check_array(engine.numpy(found.array), wanted.numpy(), what, slack=20)


@pytest.mark.parametrize("op", [op for op in BOTH if op in SAMPLES])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(data=st.data())
def test_row_156_the_samples_of_every_op_equal_dense_torch(name, op, data):
    draw = Draw(data)
    drawn = SAMPLES[op](draw)
    assume(op != "to" or not casts_to_bfloat16(drawn))
    check_sample(engines.load(name), drawn, draw.number(0, 10_000))


# The two engines against each other.

DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool")
SHAPES = ((), (1,), (0,), (5,), (3, 1), (2, 0, 3), (3, 4), (2, 3, 4))
UNARY = """
neg abs square sign reciprocal logical_not bitwise_not isnan isinf isfinite exp log log1p expm1 sqrt rsqrt sin cos tanh
sigmoid relu gelu silu erf floor ceil round clone sum mean amax amin prod any all var argmax argmin
""".split()
BINARY = """
add sub mul div floor_divide remainder fmod pow maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor
""".split()
# torch takes a bool to the power True, and the softmax of no integers: the numpy engine refuses them
TORCH_ALONE = ("pow", "softmax", "log_softmax")
OVER_DIMS = "sum mean amax amin any all var".split()
OVER_A_DIM = "prod argmax argmin max_dim min_dim softmax log_softmax".split()


def made(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small numbers above 0: no engine promises what 0 does to an integer division."""
    return np.random.default_rng(seed).integers(1, 5, shape).astype(dtype)


def outcome(engine: Engine, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[np.ndarray, ...] | None:
    """The results as NumPy arrays, or None where the engine refuses the call."""
    try:
        result = engine.run(op, *(own(engine, each) for each in args), **kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        return None
    return tuple(engine.numpy(each) for each in listed(result))


def check_agreement(op: str, *args: Any, **kwargs: Any) -> bool:
    """Both engines give the same, or both refuse; whether they gave anything."""
    mine, theirs = (outcome(engines.load(name), op, args, kwargs) for name in NAMES)
    what = f"{op}{[each if not isinstance(each, np.ndarray) else (each.dtype, each.shape) for each in args]} {kwargs}"
    if op in TORCH_ALONE and theirs is None:
        return False
    assert (mine is None) == (theirs is None), f"{what}: torch gives {mine}, numpy gives {theirs}"
    for one, other in zip(mine or (), theirs or (), strict=True):
        check_array(other, one, what)
    return mine is not None


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("op", UNARY)
def test_row_156_engines_agree_on_one_operand_of_every_dtype_and_shape(op):
    ran = [check_agreement(op, made(dtype, shape, 1)) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    assert any(ran)


@pytest.mark.parametrize("op", BINARY)
def test_row_156_engines_agree_on_two_operands_and_on_numbers_of_any_dtypes(op):
    pairs = (((3, 1), (2,)), ((), (2, 3)), ((1,), ()), ((0, 2), (2,)))
    ran = [
        check_agreement(op, made(one, left, 1), made(other, right, 2))
        for one, other, (left, right) in itertools.product(DTYPES, DTYPES, pairs)
    ]
    for dtype, shape, number in itertools.product(DTYPES, ((3,), ()), (2, 2.5, True)):
        ran.append(check_agreement(op, made(dtype, shape, 1), number))
    assert any(ran)


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("op", [*OVER_DIMS, *OVER_A_DIM])
def test_row_156_engines_agree_along_every_dim(op, keepdim):
    named = {} if "softmax" in op else {"keepdim": keepdim}
    ran = []
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        dims: list[Any] = list(range(-max(len(shape), 1), max(len(shape), 1)))
        dims += list(itertools.combinations(range(len(shape)), 2)) if op in OVER_DIMS else []
        dims += [len(shape) + 1, (0, 0)]
        ran += [check_agreement(op, made(dtype, shape, 3), dim, **named) for dim in dims]
    assert any(ran)


def test_the_dtype_of_a_result_is_torchs_for_every_mix():
    engine = engines.load("torch")
    operands = [made(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, ((2,), ()))] + [True, 2, 2.5]
    for left, right in itertools.product(operands, operands):
        expected = torch.result_type(own(engine, left), own(engine, right))
        assert f"torch.{promotion.common_dtype([left, right])}" == str(expected), (left, right)


# The oracles can fail.


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_function_is_caught_by_every_oracle(name, monkeypatch):
    engine = engines.load(name)
    right = engine.functions["sub"]
    monkeypatch.setitem(engine.functions, "sub", lambda input, other, alpha=1: right(other, input))
    with pytest.raises(AssertionError, match="sub"):
        check_written(engine, "sub")
    with pytest.raises(AssertionError):
        check_sample(engine, Case((Operand((3,), torch.float32), Operand((3,), torch.float32)), torch.sub), 0)
    with pytest.raises(AssertionError, match="sub"):
        check_agreement("sub", made("float32", (3,), 1), made("float32", (3,), 2))


def test_a_wrong_dtype_is_caught(monkeypatch):
    engine = engines.load("numpy")
    monkeypatch.setitem(engine.functions, "sqrt", lambda input: np.sqrt(input.astype("float64")))
    with pytest.raises(AssertionError):
        check_written(engine, "sqrt")


def test_a_refusal_of_one_engine_alone_is_caught(monkeypatch):
    def refuse(*args: Any) -> Any:
        raise TypeError("no")

    monkeypatch.setitem(engines.load("numpy").functions, "exp", refuse)
    with pytest.raises(AssertionError, match="numpy gives None"):
        check_agreement("exp", made("float32", (3,), 1))


# What engines are, and what they refuse.


def test_the_numpy_engine_starts_and_computes_without_torch():
    program = """
        import sys, meshloom
        engine = meshloom.engines.load("numpy")
        assert engine.run("matmul", engine.array([[1, 2]]), engine.array([[3], [4]])).tolist() == [[11]]
        assert engine.run("softmax", engine.array([0.0, 0.0]), dim=0).tolist() == [0.5, 0.5]
        assert "torch" not in sys.modules
    """
    command = [sys.executable, "-W", "error", "-c", "\n".join(line.strip() for line in program.splitlines())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_engine_is_loaded_once_and_tells_its_name():
    for name in NAMES:
        assert engines.load(name) is engines.load(name)
        assert repr(engines.load(name)) == f"engines.load({name!r})" and engines.load(name).name == name
    with pytest.raises(ArgumentError, match=r"no engine 'nunpy'[\s\S]*did you mean 'numpy'"):
        engines.load("nunpy")


def test_aliases_and_names_of_arguments_are_the_tables(engine):
    x = engine.array([[1, 2], [3, 4]])
    for name, kwargs in (("sum", {"axis": 0, "keepdims": True}), ("swapaxes", {"dim0": 0, "dim1": 1})):
        assert engine.run(name, x, **kwargs).shape == ((1, 2) if name == "sum" else (2, 2))
    assert engine.numpy(engine.run("multiply", x, x)).tolist() == [[1, 4], [9, 16]]


def test_pythons_floats_become_float32_and_arrays_keep_their_dtype(engine):
    assert str(engine.array([1.5, 2]).dtype).endswith("float32")
    assert str(engine.array(np.ones(2)).dtype).endswith("float64")
    assert str(engine.array([1.5], dtype="i32").dtype).endswith("int32")


def test_inf_and_nan_come_without_a_warning(engine):
    zero = engine.array([0.0])
    assert np.isnan(engine.numpy(engine.run("div", zero, zero))).all()
    assert np.isnan(engine.numpy(engine.run("mean", engine.array(np.ones((0, 2), "float32"))))).all()


@pytest.mark.parametrize(
    "op, args, error, words",
    [
        ("add", ([1.0, 2], [1.0, 2, 3]), ShapeError, "sizes 2 and 3 do not broadcast"),
        ("sum", ([1.0, 2], 4), ShapeError, "dim 4 is out of range"),
        ("reshape", ([1.0, 2], 3), ShapeError, "2 elements do not fill"),
        ("matmul", ([1.0, 2], [1.0, 2, 3]), ShapeError, "size 2 and size 3"),
        ("getitem", ([1.0, 2], 5), BoundsError, "index 5 is out of range"),
        ("madmul", ([1.0],), ArgumentError, "did you mean 'matmul'"),
        ("add", (), ArgumentError, "add needs an array"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_same_words(engine, op, args, error, words):
    operands = [engine.array(each) if isinstance(each, list) else each for each in args]
    with pytest.raises(error) as raised:
        engine.run(op, *operands)
    assert words in str(raised.value)
    assert op == "madmul" or f"engine  {engine.name}" in str(raised.value)


def test_an_array_of_another_engine_is_refused_with_the_way_out():
    with pytest.raises(ArgumentError, match=r"computes on numpy.ndarray and got a torch.Tensor[\s\S]*array\("):
        engines.load("numpy").run("add", torch.ones(2), np.ones(2))
    with pytest.raises(ArgumentError, match=r"computes on torch.Tensor and got a numpy.ndarray[\s\S]*array\("):
        engines.load("torch").run("cat", [torch.ones(2), np.ones(2)])


@pytest.mark.parametrize("dtype", ["float16", "complex64", "uint32"])
def test_dtypes_that_the_numpy_engine_has_not_are_refused(dtype):
    engine = engines.load("numpy")
    for refused in (
        lambda: engine.array(np.ones(2, dtype)),
        lambda: engine.array([1], dtype),
        lambda: engine.run("to", engine.array([1]), dtype),
        lambda: engine.run("neg", np.ones(2, dtype)),
    ):
        with pytest.raises(DTypeError, match=f"has no {dtype}"):
            refused()


def test_an_op_that_only_torch_has_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.delitem(engines.load("numpy").functions, "erf")
    with pytest.raises(NotImplementedError, match=r"the numpy engine has no 'erf'[\s\S]*torch engine"):
        engines.load("numpy").run("erf", np.ones(2))


def test_integers_by_zero_and_indices_outside_are_refused_by_numpy_as_by_torch(engine):
    one, zero = engine.array([1]), engine.array([0])
    for op in ("floor_divide", "remainder", "fmod"):
        with pytest.raises((MeshloomError, RuntimeError)):
            engine.run(op, one, zero)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            engine.run("embedding", engine.array([index]), engine.array([[1.0], [2.0]]))


def test_requires_grad_is_torchs_alone():
    assert engines.load("torch").requires_grad_(torch.ones(2)).requires_grad
    with pytest.raises(NotImplementedError) as raised:
        engines.load("numpy").requires_grad_(np.ones(2))
    assert "no gradients" in str(raised.value) and 'engines.load("torch")' in str(raised.value)


def test_gradients_flow_through_the_torch_engine():
    engine = engines.load("torch")
    x = engine.requires_grad_(engine.array([1.0, 2.0]))
    engine.run("sum", engine.run("square", x)).backward()
    assert x.grad.tolist() == [2, 4]


# Collectives: programs for every rank, all run by the same processes, one after the other.

COLLECTIVES = ("all_reduce_sum", "all_gather", "reduce_scatter")
PROGRAMS = {
    "all_reduce_sum": """
        given = torch.arange(6.0).reshape(2, 3) * (rank + 1)
        kept = given.clone()
        found, turned = engine.all_reduce_sum(given), engine.all_reduce_sum(given.t())
        number, empty = engine.all_reduce_sum(torch.tensor(rank)), engine.all_reduce_sum(torch.ones(0, 3))
        result = [found.tolist(), turned.tolist(), number.item(), list(empty.shape), torch.equal(given, kept)]
        for dtype in "uint8 int8 int16 int32 int64 float16 bfloat16 float64 complex64 uint16 uint64".split():
            twos = torch.full((3,), 2).to(getattr(torch, dtype))
            for total in (engine.all_reduce_sum(twos), engine.all_gather(engine.reduce_scatter(twos))):
                assert total.dtype == twos.dtype and total.tolist() == [2 * world] * 3, dtype
    """,
    "all_gather": """
        given = torch.full((2, 2), float(rank))
        uneven = engine.all_gather(torch.full((rank, 2), rank, dtype=torch.int16))
        truths = engine.all_gather(torch.tensor([rank % 2 == 0]))
        result = [engine.all_gather(given).tolist(), engine.all_gather(torch.tensor(rank)).tolist(), uneven.tolist(),
                  truths.tolist(), list(engine.all_gather(torch.ones(3, 0)).shape), given.tolist()]
    """,
    "reduce_scatter": """
        given = torch.arange(8.0).reshape(4, 2) + rank
        kept = given.clone()
        result = [engine.reduce_scatter(given).tolist(), engine.reduce_scatter(torch.arange(10) * (rank + 1)).tolist(),
                  engine.reduce_scatter(torch.arange(2, dtype=torch.int16)).tolist(),
                  list(engine.reduce_scatter(torch.ones(0, 2)).shape), torch.equal(given, kept)]
    """,
    "groups": """
        given = torch.full((2,), float(rank))
        called = [engine.all_reduce_sum(given, group=[0, 1]), engine.all_gather(given, group=(0, 1)),
                  engine.reduce_scatter(given, group=[1, 0])]
        if rank < 2:
            called.append(engine.all_reduce_sum(given, group=[0, 1]))  # the others do not even call
        if rank in (1, 3) and world == 4:
            called.append(engine.all_reduce_sum(given, group=[1, 3]))
        made = dist.new_group([world - 2, world - 1])
        called.append(engine.all_reduce_sum(given, group=made))
        called.append(engine.all_reduce_sum(given))
        result = [[each.tolist() for each in called], [each is given for each in called]]
    """,
    "backends": """
        from meshloom.engines.torch_distributed import GROUPS

        engine.all_reduce_sum(torch.ones(1), group=[rank])
        own, everyone = (GROUPS.find(ranks, "gloo").handle for ranks in ((rank,), tuple(range(world))))
        result = [isinstance(own, dist.ProcessGroupGloo), everyone is dist.group.WORLD,
                  GROUPS.find((rank,), "gloo").handle is own]
    """,
    "divergence": """
        from meshloom.errors import DivergenceError

        def told(call):
            try:
                call()
            except DivergenceError as error:
                return str(error)

        dtype = torch.float64 if rank else torch.float32
        result = [
            told(lambda: engine.all_reduce_sum(torch.ones(2 + rank))),
            told(lambda: engine.all_gather(torch.ones(2, 3, dtype=dtype))),
            told(lambda: engine.all_gather(torch.ones(3)) if rank else engine.all_reduce_sum(torch.ones(3))),
            engine.all_reduce_sum(torch.ones(1)).item(),
        ]
    """,
    "refusals": """
        def told(call):
            try:
                call()
            except Exception as error:
                return type(error).__name__

        result = [
            told(lambda: engine.all_reduce_sum(torch.tensor([True]))),
            told(lambda: engine.reduce_scatter(torch.tensor([True]))),
            told(lambda: engine.reduce_scatter(torch.tensor(1.0))),
            told(lambda: engine.all_reduce_sum([1.0])),
            told(lambda: engine.all_reduce_sum(torch.ones(1, requires_grad=True))),
            told(lambda: engine.all_reduce_sum(torch.ones(1), group=[0, world])),
            told(lambda: engine.all_reduce_sum(torch.ones((1,) * 17))),
        ]
    """,
}


@cache
def results_of(world: int) -> dict[str, list[Any]]:
    """What every program leaves at every rank."""
    return run_ranks(world, PROGRAMS)


@pytest.mark.parametrize("world", [2, 4])
def test_row_157_all_reduce_sum_is_the_sum_on_every_rank(world):
    table = np.arange(6.0).reshape(2, 3) * sum(range(1, world + 1))
    expected = [table.tolist(), table.T.tolist(), sum(range(world)), [0, 3], True]
    assert results_of(world)["all_reduce_sum"] == [expected] * world


@pytest.mark.parametrize("world", [2, 4])
def test_row_158_all_gather_is_the_concatenation_on_every_rank(world):
    for rank, (same, numbers, uneven, truths, empty, kept) in enumerate(results_of(world)["all_gather"]):
        assert same == [[float(each)] * 2 for each in range(world) for _ in range(2)]
        assert numbers == list(range(world))
        assert uneven == [[each] * 2 for each in range(world) for _ in range(each)]
        assert truths == [each % 2 == 0 for each in range(world)]
        assert empty == [3 * world, 0]
        assert kept == [[float(rank)] * 2] * 2


@pytest.mark.parametrize("world", [2, 4])
def test_row_159_reduce_scatter_gives_rank_i_slice_i_of_the_sum(world):
    total = np.arange(8.0).reshape(4, 2) * world + sum(range(world))
    tens = np.arange(10) * sum(range(1, world + 1))
    chunk = -(-10 // world)
    for rank, (found, uneven, short, empty, kept) in enumerate(results_of(world)["reduce_scatter"]):
        assert found == total[rank * 4 // world : (rank + 1) * 4 // world].tolist()
        assert uneven == tens[rank * chunk : (rank + 1) * chunk].tolist()
        assert short == ([rank * world] if rank < 2 else [])
        assert empty == [0, 2] and kept


def test_row_160_a_group_of_ranks_leaves_the_others_untouched():
    (zero, _), (one, _), (two, same), (three, _) = results_of(4)["groups"]
    world = [6.0, 6.0]
    assert zero == [[1, 1], [0, 0, 1, 1], [1], [1, 1], [0, 0], world]
    assert one == [[1, 1], [0, 0, 1, 1], [1], [1, 1], [4, 4], [1, 1], world]
    assert two == [[2, 2]] * 3 + [[5, 5], world]
    assert three == [[3, 3]] * 3 + [[4, 4], [5, 5], world]
    assert same == [True, True, True, False, False]


def test_row_161_only_the_torch_engine_supports_distributed():
    assert engines.load("torch").supports_distributed() is True
    assert engines.load("numpy").supports_distributed() is False


@pytest.mark.parametrize("op", COLLECTIVES)
def test_row_162_the_numpy_engine_raises_not_implemented_and_names_the_way_out(op):
    for group in (None, [0, 1]):
        with pytest.raises(NotImplementedError) as raised:
            getattr(engines.load("numpy"), op)(np.ones(3), group=group)
        assert isinstance(raised.value, UnsupportedError)
        for words in (op, 'engines.load("torch")', "torchrun", "meshloom run"):
            assert words in str(raised.value)


def test_row_163_the_backend_follows_the_device(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 1)) == "nccl"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"NCCL, which this torch was built without[\s\S]*tensor\.cpu\(\)"):
        backend_of(torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="no backend carries tensors on meta"):
        backend_of(torch.device("meta"))


@pytest.mark.parametrize("world", [2, 4])
def test_row_163_groups_of_cpu_tensors_are_gloo_groups_made_once(world):
    assert results_of(world)["backends"] == [[True, True, True]] * world


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_collective_in_a_single_process_names_the_launchers(op):
    with pytest.raises(CommunicationError) as raised:
        getattr(engines.load("torch"), op)(torch.ones(3))
    for words in (op, "torchrun", "meshloom run"):
        assert words in str(raised.value)


def test_ranks_that_disagree_get_an_error_that_shows_all_of_them():
    results = results_of(2)["divergence"]
    assert [each[:2] for each in results] == [results[0][:2]] * 2
    shapes, dtypes, kinds, after = results[0]
    assert shapes == (
        "the ranks of this all_reduce_sum do not fit together\n"
        "  rank 0  all_reduce_sum of f32[2]\n"
        "  rank 1  all_reduce_sum of f32[3]\n"
        "  fix     call the same collective everywhere, with the same dtype and the same shape"
    )
    assert "f32[2, 3]" in dtypes and "f64[2, 3]" in dtypes
    assert "rank 0  all_reduce_sum of f32[3]" in kinds and "rank 1  all_gather of f32[3]" in kinds
    assert after == 2


def test_what_collectives_cannot_carry_is_refused_on_every_rank():
    names = "DTypeError DTypeError ShapeError ArgumentError GradientError ArgumentError ShapeError".split()
    assert results_of(2)["refusals"] == [names] * 2


def test_a_group_is_read_as_ranks_in_order():
    assert read_ranks(None, 4) == (0, 1, 2, 3) and read_ranks({3, 1}, 4) == (1, 3)
    for wrong in ("01", 5, [4], [-1], [0, 0], [], [True], [0.0]):
        with pytest.raises(ArgumentError):
            read_ranks(wrong, 4)


def test_gradients_are_refused_only_where_they_would_be_lost():
    engine = engines.load("torch")
    with pytest.raises(GradientError, match="detach"):
        engine.all_gather(torch.ones(2, requires_grad=True))
    with torch.no_grad(), pytest.raises(CommunicationError):
        engine.all_gather(torch.ones(2, requires_grad=True))


def test_the_script_of_the_document_prints_what_the_document_says(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    script, shown = re.search(
        r"```python no-run\n(# ranks.*?)```\n\n```\n\$ [^\n]*\n(.*?)```", text, re.DOTALL
    ).groups()
    (tmp_path / "ranks.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d: [^\n]*?\]", done.stdout)  # torchrun does not keep the lines of ranks apart
    assert sorted(said) == shown.splitlines()


def test_a_rank_that_fails_fails_the_test():
    with pytest.raises(AssertionError, match=r"failed[\s\S]*planted"):
        run_ranks(2, {"planted": "if rank:\n    raise RuntimeError('planted')"})
