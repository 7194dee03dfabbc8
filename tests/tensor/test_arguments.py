"""Arguments that torch takes in more than one way: None before a number, flags by place, numpy's names, mixed dtypes.

Each program runs three times on every layout, since a call that was seen before goes another way, and equals dense;
so does its first operand afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom.engines.layout import short_name

LAYOUTS = [((2,), "R"), ((2,), "S(0)"), ((3,), "S(0)"), ((2, 2), "S(1), S(0)"), ((2, 2), "P(sum), S(0)")]
LINE = torch.tensor([[1.5, -2.0, 0.25, 3.0], [-0.5, 2.5, -1.0, 0.75], [4.0, -3.0, 1.0, 0.5], [0.1, 0.2, -0.3, 2.0]])
SPECIAL = torch.tensor([[torch.nan, torch.inf, -torch.inf, 2.0], [0.0, -1.0, torch.nan, 5.0]])
SMALL = torch.tensor([[100, -120, 3], [127, -128, 0]], dtype=torch.int8)
BYTES = torch.tensor([[0, 2, 255], [0, 0, 7]], dtype=torch.uint8)

Program = Callable[[Any], Any]


def leaves(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (tuple, list)) else [result]


def check_program(program: Program, given: torch.Tensor) -> None:
    dense = given.clone()
    wanted = leaves(program(dense))
    for shape, placements in LAYOUTS:
        for _ in range(3):
            ours = loom.distribute(given.clone(), loom.Mesh.of(shape), placements.replace("P(sum)", "R"))
            ours = ours.redistribute(placements)
            found = leaves(program(ours))
            assert len(found) == len(wanted)
            for mine, theirs in zip((*found, ours), (*wanted, dense), strict=True):
                assert mine.topology.dtype == short_name(mine.dtype)
                torch.testing.assert_close(mine.to_torch(), theirs, equal_nan=True)


PROGRAMS: dict[str, tuple[Program, torch.Tensor]] = {
    "clamp by an upper bound, by place": (lambda x: torch.clamp(x, None, 0.5), LINE),
    "x.clip by an upper bound, by place": (lambda x: x.clip(None, 1), LINE),
    "nan_to_num without a number for nan": (lambda x: torch.nan_to_num(x, None, 1.0), SPECIAL),
    "nan_to_num without one for inf": (lambda x: x.nan_to_num(1.0, None, 2.0), SPECIAL),
    "a copy by place, after a dtype": (lambda x: x.to(torch.float32, False, True).add_(1), LINE),
    "a copy by place, after a tensor": (lambda x: x.to(LINE, False, True).add_(1), LINE),
    "a copy by place, after device and dtype": (lambda x: x.to("cpu", torch.float32, False, True).add_(1), LINE),
    "no copy by place": (lambda x: x.to(torch.float32, False, False).add_(1), LINE),
    "a truth value for a slope": (lambda x: torch.celu(x, True), LINE),
    "a truth value for the value of a threshold": (lambda x: F.threshold(x, 0.5, True), LINE),
    "inplace by place": (lambda x: F.leaky_relu(x, 0.1, True), LINE),
    "inplace by place, after two bounds": (lambda x: F.hardtanh(x, -1.0, 0.5, True), LINE),
    "var_mean along an axis": (lambda x: torch.var_mean(x, axis=0), LINE),
    "std_mean along an axis that is kept": (lambda x: torch.std_mean(x, axis=-1, keepdims=True), LINE),
    "tensor_split along an axis": (lambda x: x.tensor_split(2, axis=1), LINE),
    "tensor_split along an axis, by indices": (lambda x: torch.tensor_split(x, indices=(1, 3), axis=1), LINE),
    "any over no dims": (lambda x: x.any(()), SPECIAL),
    "all over no dims": (lambda x: torch.all(x, dim=[]), BYTES),
    "rsub scales in the dtype of the result": (lambda x: torch.rsub(x, 0.5, alpha=2), SMALL),
    "rsub of a tensor": (lambda x: torch.rsub(x, torch.tensor([0.5]), alpha=3), SMALL),
    "a truth value of numpy counts as a float": (lambda x: x + numpy.bool_(True), SMALL),
    "numpy's truth value as a choice": (lambda x: torch.where(x > 0, x, numpy.bool_(True)), SMALL),
    "numpy's names": (lambda x: torch.softmax(axis=0, x=x), LINE),
    "numpy's names of two operands": (lambda x: torch.matmul(x2=x, x=x), LINE),
    "numpy's name in a front": (lambda x: x.unbind(axis=1), LINE),
    "numpy's number of a dim": (lambda x: x.select(numpy.int64(1), 0), LINE),
    "a dtype, all by name": (lambda x: torch.softmax(dtype=torch.float64, input=x, dim=1), LINE),
    "the input of a norm by name": (lambda x: torch.linalg.norm(input=x, ord=2, dim=1), LINE),
    "a factor by name": (lambda x: torch.cholesky_solve(x, input2=torch.eye(4) * 2), LINE),
    "numbers in a tuple within an index": (lambda x: (x[:, (1, -1)], x[(0, 2, 2),], x[(0, 1), 1:]), LINE),
    "an assignment by numbers in a tuple": (lambda x: [x, x.__setitem__((slice(None), (1, 2)), 5.0)][:1], LINE),
    "a plain tensor that ours is like": (lambda x: F.cosine_similarity(x, torch.ones(4, 4)), LINE),
    "a plain tensor that broadcasts": (lambda x: F.cosine_similarity(torch.ones(1, 4), x, -1), LINE),
    "a plain line above one of ours": (lambda x: torch.vstack([torch.ones(4), x[0]]), LINE),
}


@pytest.mark.filterwarnings("ignore::meshloom.FallbackWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_argument_in_another_way_means_what_it_means_to_torch(name: str) -> None:
    check_program(*PROGRAMS[name])


@pytest.mark.parametrize("name", ["sum", "cumsum", "softmax", "tril", "logsumexp"])
def test_a_call_by_name_alone_writes_its_out(name: str) -> None:
    function, along = getattr(torch, name), {} if name == "tril" else {"dim": 1}
    ours, wanted = loom.distribute(LINE, loom.Mesh(d=2), "S(0)"), function(input=LINE, **along)
    out = loom.zeros(*wanted.shape, mesh=ours.mesh)
    assert function(input=ours, **along, out=out) is out
    torch.testing.assert_close(out.to_torch(), wanted)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


FLOATING: dict[str, Program] = {
    "sin": lambda x: x.sin(),
    "torch.sqrt": lambda x: torch.sqrt(x * x),
    "a quotient": lambda x: x / 3,
    "a quotient of two": lambda x: x / (x * x + 1),
    "a product": lambda x: x * 0.5,
    "a choice": lambda x: torch.where(x > 0, 1.0, 0.5),
    "a list": lambda x: torch._foreach_mul([x], 0.5),
    "a complex product": lambda x: x * 1j,
}


@pytest.mark.parametrize("name", FLOATING)
def test_a_call_seen_before_follows_the_default_dtype(name: str) -> None:
    program, given = FLOATING[name], torch.arange(-6, 6).reshape(4, 3)
    for dtype in (torch.float32, torch.float64, torch.float32):
        with default_dtype(dtype):
            check_program(program, given)


def test_a_number_in_a_tensor_gives_a_list_its_dtype() -> None:
    given = torch.arange(6)
    ours = loom.distribute(given, loom.Mesh(d=2), "S(0)")
    for factor in (torch.tensor(2), torch.tensor(0.5), torch.tensor(2)):
        (found,) = torch._foreach_mul([ours], factor)
        assert found.topology.dtype == short_name(found.dtype)
        torch.testing.assert_close(found.to_torch(), torch._foreach_mul([given], factor)[0])


REFUSED: dict[str, tuple[Program, type[Exception]]] = {
    "an assignment by index of another dtype": (
        lambda x: x.__setitem__(torch.tensor([0]), torch.ones(4).double()),
        RuntimeError,
    ),
    "a fill with more than a number": (lambda x: x.fill_(x[0]), RuntimeError),
    "rsub of a truth value": (lambda x: torch.rsub(x, True, alpha=2), RuntimeError),
    "a word that tensor_split does not know": (lambda x: x.tensor_split(2, along=1), TypeError),
}


@pytest.mark.filterwarnings("ignore::meshloom.FallbackWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    program, kind = REFUSED[name]
    with pytest.raises(kind):
        program(LINE.clone())
    with pytest.raises((kind, loom.MeshloomError)):
        program(loom.distribute(LINE, loom.Mesh(d=2), "S(0)"))
