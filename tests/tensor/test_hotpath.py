"""Overhead does not depend on the number of devices: no op loops over them, and a call seen before is one look-up."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import meshloom as loom
from meshloom import Mesh, Partial, Replicate
from meshloom.engines import torch_engine
from meshloom.engines.layout import torch_dtype
from meshloom.tensor import dispatch, entries
from meshloom.tensor.binding import freeze

SOURCES = os.path.dirname(os.path.abspath(loom.__file__)) + os.sep


class Calls(TorchDispatchMode):
    """Counts the array calls that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(function)] += 1
        return function(*args, **(kwargs or {}))


def put(mesh: Mesh, placements: str, *shape: int) -> loom.Tensor:
    return loom.distribute(torch.ones(shape) / 2, mesh, placements)


Build = Callable[[Mesh], Callable[[], Any]]


def one(placements: str, act: Callable[[loom.Tensor], Any], *shape: int) -> Build:
    """An op of one tensor."""

    def build(mesh: Mesh) -> Callable[[], Any]:
        x = put(mesh, placements, *(shape or (256, 384)))
        return lambda: act(x)

    return build


def two(first: str, second: str, act: Callable[[Any, Any], Any], *shapes: tuple[int, ...]) -> Build:
    """An op of two tensors."""

    def build(mesh: Mesh) -> Callable[[], Any]:
        one_shape, other_shape = shapes or ((256, 384), (256, 384))
        x, y = put(mesh, first, *one_shape), put(mesh, second, *other_shape)
        return lambda: act(x, y)

    return build


def sharded(act: Callable[[], Any]) -> Any:
    """The distributed form of an op over dim 0, where the planner would gather on many devices."""
    with loom.choose(d="dim 0"):
        return act()


A, B, ODD = (256, 384), (384, 128), (257, 131)
OPS: dict[str, Build] = {
    "add": two("S(0)", "S(0)", lambda x, y: x + y),
    "add of other shards": two("S(0)", "S(1)", lambda x, y: x + y),
    "add of a replicated tensor": two("S(0)", "R", lambda x, y: x + y),
    "add of uneven shards": two("S(0)", "S(0)", lambda x, y: x + y, ODD, ODD),
    "add of partial sums": two("P(sum)", "P(sum)", lambda x, y: x + y),
    "add of a number": one("S(0)", lambda x: x + 1),
    "add of a number to uneven shards": one("S(0)", lambda x: x + 1, *ODD),
    "mul": two("S(1)", "S(1)", lambda x, y: x * y),
    "div of uneven shards": two("S(0)", "S(0)", lambda x, y: x / y, ODD, ODD),
    "exp": one("S(0)", lambda x: x.exp()),
    "log of uneven shards": one("S(0)", lambda x: x.log(), *ODD),
    "relu of a partial sum": one("P(sum)", lambda x: x.relu()),
    "where": two("S(0)", "S(1)", lambda x, y: loom.where(x > 0, x, y)),
    "cast": one("S(0)", lambda x: x.to(torch.float64)),
    "row matmul": two("S(0)", "R", lambda x, y: x @ y, A, B),
    "column matmul": two("R", "S(1)", lambda x, y: x @ y, A, B),
    "inner matmul": two("S(1)", "S(0)", lambda x, y: x @ y, A, B),
    "matmul of other shards": two("S(0)", "S(1)", lambda x, y: x @ y, A, B),
    "inner matmul of uneven shards": two("S(1)", "S(0)", lambda x, y: x @ y, (130, 131), (131, 129)),
    "inner matmul kept partial": two("S(1)", "S(0)", lambda x, y: loom.matmul(x, y, output="P(sum)"), A, B),
    "inner matmul scattered": two("S(1)", "S(0)", lambda x, y: loom.matmul(x, y, output="S(0)"), A, B),
    "batched matmul": two("S(0)", "S(0)", lambda x, y: x @ y, (128, 4, 5), (128, 5, 4)),
    "linear": two("S(0)", "S(0)", lambda x, y: F.linear(x, y), A, (128, 384)),
    "einsum": two("S(0)", "S(1)", lambda x, y: loom.einsum("ij,kj->ik", x, y)),
    "sum": one("S(0)", lambda x: x.sum()),
    "sum over a dim": one("S(0)", lambda x: x.sum(0)),
    "mean of uneven shards": one("S(0)", lambda x: x.mean(0), *ODD),
    "amax of uneven shards": one("S(0)", lambda x: x.amax(0), *ODD),
    "argmax": one("S(0)", lambda x: x.argmax(0)),
    "var of uneven shards": one("S(0)", lambda x: sharded(lambda: x.var(0)), *ODD),
    "softmax over the sharded dim": one("S(1)", lambda x: x.softmax(1)),
    "softmax over an uneven dim": one("S(0)", lambda x: sharded(lambda: x.softmax(0)), *ODD),
    "layer norm over the sharded dim": one("S(1)", lambda x: F.layer_norm(x, (384,))),
    "cross entropy": one("S(1)", lambda x: F.cross_entropy(x, torch.arange(256))),
    "embedding": one("S(0)", lambda x: F.embedding(torch.arange(40), x)),
    "attention": one("S(0)", lambda x: F.scaled_dot_product_attention(x, x, x), 128, 2, 4, 8),
    "reshape": one("S(0)", lambda x: x.reshape(256, 48, 8)),
    "flatten of uneven shards": one("S(0)", lambda x: x.flatten(), *ODD),
    "transpose": one("S(0)", lambda x: x.T),
    "slice of the sharded dim": one("S(0)", lambda x: x[3:77:2]),
    "slice of another dim": one("S(0)", lambda x: x[:, 3:77]),
    "cat": two("S(0)", "S(0)", lambda x, y: loom.cat([x, y])),
    "cat along another dim": two("S(0)", "S(0)", lambda x, y: loom.cat([x, y], 1)),
    "stack": two("S(0)", "S(1)", lambda x, y: loom.stack([x, y])),
    "split": one("S(0)", lambda x: x.split(128, 1)),
    "redistribute": one("S(0)", lambda x: x.redistribute("S(1)")),
    "redistribute uneven shards": one("S(0)", lambda x: x.redistribute("S(1)"), *ODD),
    "reduce": one("P(sum)", lambda x: x.redistribute("R")),
    "make partial": one("R", lambda x: x.redistribute("P(sum)")),
    "to_torch": one("S(0)", lambda x: x.to_torch(), *ODD),
    "a function without a rule": one("S(0)", lambda x: torch.cumsum(x, 0)),
    "add in place": two("S(0)", "S(1)", lambda x, y: x.add_(y)),
    "assign": two("S(0)", "S(1)", lambda x, y: x.copy_(y)),
    "set item": one("S(0)", lambda x: x.__setitem__(slice(3, 9), 1.0)),
    "shard_at": one("S(0)", lambda x: x.shard_at((1,))),
    "block": one("S(1)", lambda x: x.block),
    "dropout": one("S(0)", lambda x: F.dropout(x, 0.5)),
    "zeros like": one("S(0)", lambda x: loom.zeros_like(x)),
}  # fmt: skip


def counted(build: Build, devices: int) -> Counter[str]:
    """The array calls of an op that was seen before."""
    run = build(Mesh(d=devices))
    run()
    with Calls() as calls:
        run()
    return calls.names


@pytest.mark.parametrize("name", OPS)
def test_an_op_makes_as_many_array_calls_on_128_devices_as_on_2(name):
    few, many = counted(OPS[name], 2), counted(OPS[name], 128)
    assert sum(few.values()) == sum(many.values()), f"{few - many} and {many - few}"


TRAINED: dict[str, Build] = {
    "data-parallel layer": two("S(0)", "R", lambda x, y: (x @ y).relu().sum().backward(), A, B),
    "column-parallel layer": two("R", "S(1)", lambda x, y: (x @ y).relu().sum().backward(), A, B),
    "inner-parallel layer": two("S(1)", "S(0)", lambda x, y: (x @ y).relu().sum().backward(), A, B),
    "uneven data-parallel layer": two("S(0)", "R", lambda x, y: (x @ y).relu().sum().backward(), (131, 20), (20, 8)),
    "softmax": one("S(1)", lambda x: x.softmax(1).square().sum().backward()),
}


@pytest.mark.parametrize("name", TRAINED)
def test_backward_makes_as_many_array_calls_on_128_devices_as_on_2(name):
    def with_gradient(mesh: Mesh) -> Callable[[], Any]:
        run = TRAINED[name](mesh)
        for cell in run.__closure__ or ():
            if isinstance(cell.cell_contents, loom.Tensor):
                cell.cell_contents.requires_grad_()
        return run

    few, many = counted(with_gradient, 2), counted(with_gradient, 128)
    assert sum(few.values()) == sum(many.values()) > 4, f"{few - many} and {many - few}"


def test_the_counter_sees_a_loop_over_devices():
    def loop(mesh: Mesh) -> Callable[[], Any]:
        x = put(mesh, "S(0)", 128, 4)
        return lambda: [x.shard_at((i,)) + 1 for i in range(mesh.size)]

    assert sum(counted(loop, 128).values()) > sum(counted(loop, 2).values())


@pytest.mark.parametrize("devices", [1, 2, 8, 128])
def test_a_call_seen_before_is_one_array_call(devices):
    mesh = Mesh(d=devices)
    x, y = put(mesh, "S(0)", 256, 32), put(mesh, "S(0)", 256, 32)
    x + y
    with Calls() as calls:
        x + y
    assert calls.names == {"aten.add.Tensor": 1}
    w = put(mesh, "R", 32, 8)
    x @ w
    with Calls() as calls:
        x @ w
    assert calls.names == {"aten.mm.default": 1}


def test_an_inner_matmul_with_its_reduction_is_one_contraction():
    mesh = Mesh(d=128)
    x, w = put(mesh, "S(1)", 64, 256), put(mesh, "S(0)", 256, 32)
    x @ w
    with Calls() as calls:
        x @ w
    assert calls.names == {"aten.mm.default": 1}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were planned while a test runs."""
    seen: list[str] = []
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda call, *rest: seen.append(call.op) or plan(call, *rest))
    return seen


def test_a_call_seen_before_is_not_planned_again(planned):
    mesh = Mesh(seen_before=3)
    x, y = put(mesh, "S(0)", 9, 5), put(mesh, "S(0)", 9, 5)
    x + y
    assert planned == ["add"]
    for _ in range(3):
        x + y
        torch.add(x, y)
        put(mesh, "S(0)", 9, 5) + y
    assert planned == ["add"]
    x + y.redistribute("R")
    assert planned == ["add", "add"]


def test_a_call_seen_before_calls_the_engine_once(monkeypatch):
    seen = []
    monkeypatch.setitem(torch_engine.FUNCTIONS, "sub", lambda *args: seen.append(1) or torch.sub(*args))
    mesh = Mesh(engine_calls=3)
    x = put(mesh, "S(0)", 9, 5)
    x - x
    x - x
    assert seen == [1, 1]


def test_a_scalar_that_the_rule_does_not_read_makes_no_new_entry(planned):
    x = put(Mesh(scalars=3), "S(0)", 9, 5)
    x * 0.5
    before = len(dispatch.CACHE)
    for i in range(200):
        x * (i + 0.25)
        x + float(i)
    assert len(dispatch.CACHE) <= before + 1  # the first add
    assert planned.count("mul") == 1


def test_the_cache_is_bounded(monkeypatch):
    small: dict[Any, Any] = {}
    monkeypatch.setattr(dispatch, "CACHE", small)
    monkeypatch.setattr(entries, "LIMIT", 16)
    mesh = Mesh(bounded=2)
    for size in range(1, 60):
        x = put(mesh, "S(0)", size)
        assert torch.equal(loom.add(x, x).to_torch(), torch.ones(size))
    assert len(small) <= 16


def test_one_and_one_point_zero_and_true_do_not_collide():
    x = loom.distribute(torch.arange(6), Mesh(kinds=2), "S(0)")
    dense = torch.arange(6)
    for _ in range(2):
        for number in (1, 1.0, True):
            for act in (lambda t, n: t + n, lambda t, n: t * n, lambda t, n: t == n):
                found, expected = act(x, number), act(dense, number)
                assert torch_dtype(found.topology.dtype) == found.dtype == expected.dtype
                assert torch.equal(found.to_torch(), expected)
    powers = [(x**2).dtype, (x**2.0).dtype]
    assert powers == [torch.int64, torch.float32]


def test_arguments_that_the_rule_reads_do_not_collide():
    dense = torch.randn(4, 4)
    x = loom.distribute(dense, Mesh(arguments=2), "S(0)")
    for _ in range(2):
        for dim, keep in ((0, False), (0, True), (1, False), (1, True)):
            assert x.sum(dim, keep).shape == dense.sum(dim, keep).shape
        assert torch.equal(x[1:3].to_torch(), dense[1:3])
        assert torch.equal(x[1:4].to_torch(), dense[1:4])
        assert torch.equal(x[1].to_torch(), dense[1])
        torch.testing.assert_close(x.var(0, unbiased=False).to_torch(), dense.var(0, unbiased=False))
        torch.testing.assert_close(x.var(0).to_torch(), dense.var(0))
        assert x.reshape(2, 8).shape == (2, 8) and x.reshape(8, 2).shape == (8, 2)


def test_autocast_is_part_of_the_key():
    x = put(Mesh(cast=2), "S(0)", 4, 4)
    assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


FLOATS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.int64, torch.float32)]
ANY_NUMBERS = "add sub mul truediv floordiv mod pow matmul eq ne lt le gt ge".split()
BITS = "and_ or_ xor".split()


@pytest.mark.parametrize(("name", "dtypes"), [*product(ANY_NUMBERS, FLOATS), *product(BITS, [(torch.int64,) * 2])])
def test_operators_under_autocast_give_what_torch_gives(name, dtypes):
    """Most operators do not ask whether autocast is on: it must not matter to them, new or seen before."""
    act, (x, y) = getattr(operator, name), (torch.full((4, 4), 3, dtype=dtype) for dtype in dtypes)
    if name == "matmul":
        x = x.to(y.dtype)  # torch refuses two dtypes
    a, b = (loom.distribute(each, Mesh(cast=2), "S(0)") for each in (x, y))
    for enabled in (False, True, False, True, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for found, expected in ((act(a, b), act(x, y)), *(((act(a, 2), act(x, 2)),) if name != "matmul" else ())):
                assert torch_dtype(found.topology.dtype) == found.dtype == expected.dtype
                assert torch.equal(found.to_torch(), expected)


def test_scopes_do_not_leak_into_cached_calls():
    x = put(Mesh(scoped=2), "S(0)", 4, 4)
    with loom.with_output("R"):
        assert (x + x).placements == (Replicate(),)
    assert str((x + x).placements[0]) == "S(0)"


# memory


def stored(x: loom.Tensor) -> int:
    return x._data.untyped_storage().nbytes()


@pytest.mark.parametrize("devices", [1, 2, 128])
def test_a_replicated_tensor_is_stored_once(devices):
    dense = torch.ones(64, 32)
    for x in (
        loom.distribute(dense, Mesh(d=devices), "R"),
        loom.ones(64, 32, mesh=Mesh(d=devices), placements="R"),
        loom.distribute(dense, Mesh(d=devices), "S(0)").redistribute("R"),
        loom.distribute(dense, Mesh(d=devices), "S(0)").sum(0, keepdim=True)
        + loom.zeros(64, 32, mesh=Mesh(d=devices), placements="R"),
    ):
        assert x.placements == (Replicate(),)
        assert stored(x) == 64 * 32 * 4
        assert x.block.shape == (1, 64, 32)


def test_a_sharded_tensor_is_stored_once_with_its_padding():
    x = loom.distribute(torch.ones(257, 3), Mesh(d=128), "S(0)")
    assert stored(x) == 128 * 3 * 3 * 4  # 128 chunks of 3 rows


def test_a_reduction_over_128_devices_does_not_hold_128_partial_results():
    mesh = Mesh(d=128)
    x, w = put(mesh, "S(1)", 64, 256), put(mesh, "S(0)", 256, 32)
    assert stored(x @ w) == 64 * 32 * 4
    kept = loom.matmul(x, w, output=Partial("sum"))
    assert stored(kept) == 128 * 64 * 32 * 4  # asked for


def test_a_gradient_of_a_replicated_parameter_is_stored_once():
    mesh = Mesh(d=128)
    w = loom.Parameter(torch.ones(16, 8), mesh, "R")
    (put(mesh, "S(0)", 256, 16) @ w).sum().backward()
    assert stored(w.grad) == 16 * 8 * 4


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("devices", [2, 5, 32])
def test_a_product_with_padded_rows_is_the_same_with_and_without_a_gradient(rows, devices):
    torch.manual_seed(rows)
    a, b = torch.randn(rows, 8), torch.randn(8, 6)
    mesh = Mesh(d=devices)
    left, right = loom.distribute(a, mesh, "S(0)"), loom.distribute(b, mesh, "R")
    tracked = loom.distribute(a, mesh, "S(0)").requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (left @ right).dtype == torch.bfloat16
    for found in (left @ right, loom.matmul(left, right), torch.mm(left, right), tracked @ right, (left @ right)):
        torch.testing.assert_close(found.to_torch().detach(), a @ b)
        assert not found._data.detach()[rows:].any()
    (tracked @ right).sum().backward()
    torch.testing.assert_close(tracked.grad.to_torch(), torch.ones(rows, 6) @ b.T)


def test_zero_and_minus_zero_are_different_arguments() -> None:
    x = loom.ones(3, mesh=loom.open_mesh((2,)))
    for value in (0.0, -0.0, 0.0):
        found = torch.nn.functional.pad(x, (1, 0), value=value).to_torch()
        assert math.copysign(1.0, float(found[0])) == math.copysign(1.0, value)


def test_complex_arguments_go_by_both_signs_of_zero() -> None:
    keys = {freeze(complex(a, b)) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)}
    assert len(keys) == 9
    assert freeze(math.nan) == freeze(math.nan) != freeze(1.0)
    assert len({freeze(0), freeze(0.0), freeze(-0.0), freeze(False), freeze(True), freeze(1)}) == 6


def own_frames(act: Callable[[], Any]) -> list[str]:
    """The Python functions of meshloom's sources that one call enters, in order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            found.append(f"{frame.f_code.co_filename.removeprefix(SOURCES)}:{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


FRAMES: dict[str, tuple[int, Callable[[Any, Any, Any], Any]]] = {
    "x @ w": (2, lambda x, w, b: x @ w),
    "torch.matmul(x, w)": (5, lambda x, w, b: torch.matmul(x, w)),
    "x.matmul(w)": (5, lambda x, w, b: x.matmul(w)),
    "loom.matmul(x, w)": (5, lambda x, w, b: loom.matmul(x, w)),
    "F.layer_norm": (8, lambda x, w, b: F.layer_norm(x, (32,), b, b)),
    "x.redistribute('...')": (8, lambda x, w, b: x.redistribute("R, S(1)")),
    "x.redistribute({...})": (8, lambda x, w, b: x.redistribute({"dp": "R"})),
    "x.redistribute((...))": (8, lambda x, w, b: x.redistribute((Replicate(), Replicate()))),
    "a.add_(b)": (3, lambda x, w, b: x.add_(x)),
}
LAYOUTS = {"rows": ("S(0), R", 256), "rows twice": ("S(0), S(0)", 256), "two dims": ("S(0), S(1)", 256)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FRAMES)
def test_a_call_seen_before_enters_few_functions_of_ours(name, layout):
    limit, act = FRAMES[name]
    placements, rows = LAYOUTS[layout]
    mesh = Mesh(dp=2, tp=4)
    x, w, b = put(mesh, placements, rows, 32), put(mesh, "R, R", 32, 32), put(mesh, "R, R", 32)
    for _ in range(3):
        act(x, w, b)
    found = own_frames(lambda: act(x, w, b))
    assert 1 <= len(found) <= limit, found


@pytest.mark.parametrize("name", ["x @ w", "torch.matmul(x, w)", "F.layer_norm"])
def test_the_counter_of_functions_sees_that_a_first_call_enters_more(name):
    limit, act = FRAMES[name]
    rows = 16 * (50 + list(FRAMES).index(name))  # shapes that no other test has
    mesh = Mesh(first_frames=2)
    x, w, b = put(mesh, "S(0)", rows, 32), put(mesh, "R", 32, 32), put(mesh, "R", 32)
    assert len(own_frames(lambda: act(x, w, b))) > 4 * limit
    assert len(own_frames(lambda: act(x, w, b))) <= limit


SHORT: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a cast to the dtype that is there": (4, lambda x: x.to(torch.float32)),
    "x.float()": (4, lambda x: x.float()),
    "a cast to another dtype": (6, lambda x: x.to(torch.int64)),
    "x.sum(-1)": (4, lambda x: x.sum(-1)),
    "x[:3]": (6, lambda x: x[:3]),
    "x.view": (5, lambda x: x.view(-1)),
    "torch.cat": (6, lambda x: torch.cat([x, x], -1)),
}


@pytest.mark.parametrize("name", SHORT)
def test_more_doors_are_short(name):
    limit, act = SHORT[name]
    x = put(Mesh(short=2), "S(0)", 8, 4)
    for _ in range(3):
        act(x)
    found = own_frames(lambda: act(x))
    assert 1 <= len(found) <= limit, found


COLLECTIVES: dict[str, tuple[int, dict[str, Any]]] = {  # functions of ours that a collective seen before enters
    "all_reduce": (120, {"axis": "tp"}),
    "all_gather": (120, {"dim": 0, "axis": "tp"}),
    "reduce_scatter": (120, {"dim": 0, "axis": "tp"}),
    "all_to_all": (120, {"split_dim": 1, "concat_dim": 0, "axis": "tp"}),
    "broadcast": (120, {"root": 1, "axis": "tp"}),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_fabric_collective_seen_before_does_not_choose_its_algorithm_again(name):
    limit, options = COLLECTIVES[name]
    x = put(Mesh(dp=2, tp=4), "S(0), S(0)", 256, 32)
    collective = getattr(loom.collectives, name)
    for _ in range(3):
        collective(x, mode="fabric", **options)
    found = own_frames(lambda: collective(x, mode="fabric", **options))
    assert 10 <= len(found) <= limit, Counter(found).most_common(20)


def test_a_fabric_collective_chooses_again_when_a_link_is_gone():
    x = put(Mesh(links=4), "S(0)", 64)
    whole = loom.fabric.Fabric.grid((4,), "ring", 1e-6, 1e9)
    dense = loom.collectives.all_reduce(x).to_torch()
    for fabric in (whole, whole.without((3,), (0,)), whole):
        with loom.use_fabric(fabric):
            assert loom.collectives.all_reduce(x, mode="fabric").to_torch().equal(dense)
            with pytest.raises(loom.FabricError) if fabric is not whole else nullcontext():
                loom.collectives.all_reduce(x, mode="fabric", algorithm="ring")


def test_an_uneven_tensor_is_written_in_a_few_functions_and_its_padding_stays_zero():
    x = put(Mesh(uneven=3), "S(0)", 4, 2)
    for _ in range(3):
        x.cos_()
    found = own_frames(lambda: x.cos_())
    assert len(found) <= 7, found
    assert x._data[4:].eq(0).all()


def test_a_cast_seen_before_tells_copies_devices_and_requests_apart():
    x = put(Mesh(casts=2), "S(0)", 4)
    for _ in range(3):
        assert x.to(torch.float32) is x and x.float() is x and x.to("cpu") is x
        assert x.to(torch.float32, copy=True) is not x
        assert x.to(torch.int64).dtype == torch.int64
        with loom.with_output("R"):
            assert x.to(torch.float32).placements == (Replicate(),)
