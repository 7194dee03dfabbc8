"""An op of a user's own equals dense on any mesh and placements, and a rule that does not hold is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import meshloom as loom
import ranks
from meshloom import Partial, Replicate, Shard, extend
from meshloom.ops import OPS
from oracle import check_case
from own_ops import OWN, SAMPLES, defined
from samples import Draw

Function = Callable[..., Any]
MANY = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def own() -> Iterator[dict[str, Function]]:
    with defined() as ops:
        yield ops


@pytest.fixture
def op() -> Iterator[Callable[..., Callable[[Function], Function]]]:
    """`extend.op` for one test: what it adds is taken away after it."""
    before = set(OPS)
    yield extend.op
    for name in set(OPS) - before:
        extend.remove(name)


@pytest.mark.parametrize("name", OWN)
def test_an_own_op_equals_dense_on_any_mesh_and_placements(own, name: str) -> None:
    @MANY
    @given(st.data())
    def run(data: st.DataObject) -> None:
        draw = Draw(data)
        check_case(draw, SAMPLES[name](own)(draw))

    run()


def test_an_own_op_equals_dense_on_two_processes() -> None:
    assert ranks.run(2, "own_ops:compare_on_ranks", 8) == [[*OWN]] * 2


@pytest.mark.parametrize("name", OWN)
def test_the_rules_hold_on_separate_devices(own, name: str) -> None:
    rows = extend.check(own[name], *OWN[name][2])
    assert rows and not any(row.startswith("none") for row in rows)


def test_what_is_sharded_stays_and_a_sum_is_reduced(own) -> None:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.randn(10, 6, mesh=mesh, placements="S(0), R")
    with loom.record() as log:
        normed = own["scale_norm"](x, torch.ones(6))
    assert normed.topology.notation == "f32[10, 6](S(0), R)" and not log.bytes
    a, b = (loom.randn(8, 6, mesh=mesh, placements="R, S(1)") for _ in range(2))
    with loom.record() as log:
        found = own["squared_distance"](a, b)
        kept = own["squared_distance"](a, b, output={"tp": Partial("sum")})
    assert [str(event.collective) for event in log] == ["all_reduce(sum) over tp of 4: 384 B"]
    assert found.placements == (Replicate(), Replicate()) and kept.placements == (Replicate(), Partial("sum"))
    torch.testing.assert_close(found.to_torch(), torch.cdist(a.to_torch(), b.to_torch()).square())
    torch.testing.assert_close(kept.to_torch(), found.to_torch())


def test_a_whole_label_is_gathered_and_explain_says_so(own) -> None:
    x = loom.randn(4, 8, mesh=loom.open_mesh((4,), axes=("tp",)), placements="S(1)")
    told = loom.explain(lambda: own["scale_norm"](x, torch.ones(8)))
    assert [event.kind for event in told.events] == ["all_gather"]
    assert "scale_norm(f32[4, 8](S(1)), f32[8](R)) -> f32[4, 8](R)" in str(told)


def test_uneven_shards_are_gathered_where_the_function_must_not_see_padding(own) -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    for size, kind in ((8, "all_reduce"), (10, "all_gather")):
        a = loom.randn(4, size, mesh=mesh, placements="S(1)")
        with loom.record() as log:
            found = own["careful_distance"](a, a)
        assert {event.kind for event in log} == {kind}
        torch.testing.assert_close(
            found.to_torch(), torch.cdist(a.to_torch(), a.to_torch()).square(), atol=1e-4, rtol=0
        )


def test_on_plain_tensors_it_is_the_function_itself(own) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(own["swiglu"](x, x), torch.nn.functional.silu(x) * x)
    assert type(own["swiglu"](x, x)) is torch.Tensor


def test_it_trains_as_a_layer(own) -> None:
    mesh = loom.open_mesh((2, 3), axes=("dp", "tp"))
    torch.manual_seed(0)
    dense = torch.ones(7, requires_grad=True)
    weight = loom.Parameter(torch.ones(7), mesh)
    x = torch.randn(10, 7)
    for norm, on in ((dense, x), (weight, loom.distribute(x, mesh, {"dp": Shard(0)}))):
        own["scale_norm"](on, norm).square().sum().backward()
    torch.testing.assert_close(weight.grad.to_torch(), dense.grad)


def test_an_optional_operand_may_be_left_out_and_numbers_are_arguments(own) -> None:
    x = loom.rand(5, 3, mesh=loom.open_mesh((2,)), placements="S(0)") + 0.5
    torch.testing.assert_close(own["log_ratio"](x, 2.0).to_torch(), (x.to_torch() / 2.0).log())
    torch.testing.assert_close(own["log_ratio"](x, x, scale=3).to_torch(), torch.zeros(5, 3), atol=1e-6, rtol=0)


# Refusals


def test_a_name_that_is_taken_is_refused(own, op) -> None:
    with pytest.raises(loom.ArgumentError) as error:
        op("... -> ...", name="matmul")(torch.sin)
    assert str(error.value) == (
        "there is an op 'matmul' already\n  fix  give yours another name: extend.op(..., name=\"my_matmul\")"
    )
    with pytest.raises(loom.ArgumentError) as error:
        op("..., ... -> ...", name="swiglu")(torch.mul)
    assert str(error.value) == (
        "there is an op 'swiglu' already\n"
        '  fix  give yours another name: extend.op(..., name="my_swiglu"), or take the old one away first: '
        "extend.remove('swiglu')"
    )


def test_a_name_is_free_again_and_the_old_plans_are_forgotten(op) -> None:
    x = loom.ones(4, mesh=loom.open_mesh((2,)), placements="S(0)")
    assert op("... -> ...", name="step")(lambda x: x + 1)(x).tolist() == [2.0] * 4
    extend.remove("step")
    assert op("... -> ...", name="step")(lambda x: x + 2)(x).tolist() == [3.0] * 4
    with pytest.raises(loom.ArgumentError, match=r"'relu' is no op that was added with extend\.op"):
        extend.remove("relu")


@pytest.mark.parametrize(
    ("told", "function", "message"),
    [
        ({"labels": "ab, b"}, torch.mv, "the labels of 'own' cannot be read: 'ab, b'"),
        ({"labels": "a... -> a"}, torch.sin, "the labels of 'own' cannot be read"),
        ({"labels": 3}, torch.sin, "labels=3 is of type int"),
        ({"labels": "a -> a", "whole": None}, torch.sin, "whole=None is of type NoneType"),
        ({"labels": "ab -> ab", "whole": "c"}, torch.nn.functional.silu, "label 'c' of 'own' stands in no operand"),
        ({"labels": "ab -> ab", "sums": "b"}, torch.nn.functional.silu, "'b' of 'own' is summed over, and every"),
        ({"labels": "a, a -> a"}, lambda a: a, "'own' has labels for 2 arguments and takes 1"),
        ({"labels": "a -> a"}, lambda *a: a[0], r"an op cannot have the parameter \*a"),
        ({"labels": "a -> a"}, lambda a, output=1: a, "an op cannot have the parameter output=1"),
        ({"labels": "a -> a"}, lambda a, how=torch.sin: a, "the default of 'how' is no plain value"),
    ],
)
def test_what_cannot_be_an_op_is_refused_when_it_is_defined(told, function, message: str) -> None:
    with pytest.raises(loom.ArgumentError, match=message):
        extend.op(**told, name="own")(function)
    assert "own" not in OPS


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(loom.ArgumentError, match="'<lambda>' is no name for an op"):
        extend.op("... -> ...")(lambda x: x)


def test_a_tensor_without_labels_is_refused(own) -> None:
    x = loom.ones(4, mesh=loom.open_mesh((2,)), placements="S(0)")
    with pytest.raises(loom.ArgumentError, match="log_ratio has labels for 2 arguments and got a tensor besides"):
        own["log_ratio"](x, x, scale=x)


# Rules that do not hold


def test_a_label_that_must_stay_whole_is_found(op) -> None:
    soft = op("...d -> ...d", name="soft")(lambda x: x.softmax(-1))
    with pytest.raises(loom.PlacementError) as error:
        extend.check(soft, torch.arange(12.0).view(2, 6))
    first, *rest = str(error.value).splitlines()
    assert first == "the rule of 'soft' does not hold where label 'd' is sharded over 2 devices"
    assert rest[0] == "  row    S(1) -> S(1)" and rest[-1] == '  fix    say that it must stay whole: whole="d"'
    extend.remove("soft")
    assert extend.check(op("...d -> ...d", whole="d", name="soft")(lambda x: x.softmax(-1)), torch.randn(4, 6)) == (
        "A: S(0) -> S(0)",
    )


def test_a_sum_that_does_not_add_up_is_found(op) -> None:
    top = op("mk -> m", sums="k", name="top")(lambda x: x.amax(-1))
    with pytest.raises(loom.PlacementError, match="label 'k' is sharded over 2 devices") as error:
        extend.check(top, torch.arange(12.0).view(2, 6))
    assert "take 'k' out of sums" in str(error.value)


def test_a_bias_that_every_device_adds_is_found(op) -> None:
    biased = op("mk, nk, n -> mn", sums="k", name="biased")(lambda x, w, b: x @ w.T + b)
    with pytest.raises(loom.PlacementError, match="label 'k'"):
        extend.check(biased, torch.randn(4, 6), torch.randn(2, 6), torch.ones(2))


class _HalfGradient(torch.autograd.Function):
    """The sum of all rows in its backward, where a device has only its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / len(gradient)


def test_a_gradient_that_depends_on_the_part_is_found(op) -> None:
    uneasy = op("md -> md", whole="d", name="uneasy")(lambda x: _HalfGradient.apply(x))
    with pytest.raises(loom.PlacementError, match="label 'm'") as error:
        extend.check(uneasy, torch.randn(4, 3))
    assert "the gradient of 'x' differs" in str(error.value)


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("ratio", lambda x, y: (x / y).log(), {"labels": "..., ... -> ..."}),
        ("counted", lambda x: x.exp().sum(-1), {"labels": "mk -> m", "sums": "k"}),
    ],
)
def test_a_function_that_must_not_see_padding_is_found(op, name: str, function, told) -> None:
    samples = [torch.rand(4, 6) + 0.5 for _ in range(function.__code__.co_argcount)]
    assert extend.check(op(**told, name=name)(function), *samples)
    extend.remove(name)
    with pytest.raises(loom.PlacementError, match="is padded with zeros") as error:
        extend.check(op(**told, name=name, sees_padding=True)(function), *samples)
    assert "leave sees_padding out" in str(error.value)


def test_labels_that_do_not_tell_the_shape_are_found_by_the_check_and_by_the_first_call(op) -> None:
    turned = op("ab -> ab", name="turned")(lambda x: x.T.clone())
    with pytest.raises(loom.ShapeError, match=r"the labels of 'turned' say \[4, 6\] and it gives \[6, 4\]"):
        extend.check(turned, torch.randn(4, 6))
    with pytest.raises(loom.ShapeError, match=r"the labels of 'turned' say \[4, 6\], and the function gives \[6, 4\]"):
        turned(loom.ones(4, 6, mesh=loom.open_mesh((2,)), placements="S(0)"))


def test_a_check_needs_samples_that_can_be_cut(own) -> None:
    with pytest.raises(loom.ArgumentError, match="label 'A' of 'swiglu' has one element in these samples"):
        extend.check(own["swiglu"], torch.randn(1, 4), torch.randn(1, 4))
    with pytest.raises(loom.ArgumentError, match=r"'sin' is no op that was added with extend\.op"):
        extend.check(torch.sin, torch.randn(4))
