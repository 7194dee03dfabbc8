"""In-place forms equal dense, keep placements, reach the base of a view, and change nothing on failure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import meshloom as loom
from layouts import layouts
from meshloom.ops import OPS
from meshloom.tensor.calling import is_written

# mesh, placements of a (6, 5) tensor: 6 over 2 is even, over 4 uneven, over (2, 2) has padding inside
TARGETS = layouts(
    "1 S(0)", "4 R", "2 S(0)", "4 S(0)", "8 S(1)", "2x2 S(0), S(0)", "2x4 S(1), S(0)", "2 P(sum)", "3 P(max)",
    "3 P(min)", "2x2 P(sum), S(0)", "2x2 P(mean), S(1)", "2x2 P(prod), R", "2x2x2 S(0), R, S(0)",
    "2x2x2 S(1), P(sum), S(0)",
)  # fmt: skip
SHAPE = (6, 5)


def drawn(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    """Numbers between 0.5 and 2: every op of the table is defined there."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.5


def placed(dense: torch.Tensor, shape: tuple[int, ...], placements: str) -> Any:
    """A tensor on a mesh; partial ones hold different numbers on every device."""
    made = loom.distribute(dense, loom.open_mesh(shape), placements)
    if made.topology.partial_axes and dense.dtype != torch.bool:
        _unbalance(made._data, made.placements[made.topology.partial_axes[0]].op)
    return made


def _unbalance(parts: torch.Tensor, op: str) -> None:
    """Change what devices hold (above zero, padding zero) and not what it reduces to."""
    if op in ("sum", "mean"):
        moved = parts[0] // 4 if not parts.is_floating_point() else parts[0] / 4
        parts[0] -= moved
        parts[1] += moved
    elif op == "prod" and parts.is_floating_point():
        parts[0] *= 2
        parts[1] /= 2
    elif op == "max":
        parts[1] -= parts[1] // 2
    elif op == "min":
        parts[1] *= 2


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_the_tensors_of_these_tests_hold_what_they_should(shape: tuple[int, ...], placements: str) -> None:
    for dense in (drawn(), (drawn() * 9).long()):
        if dense.is_floating_point() or "mean" not in placements:
            check_same(placed(dense, shape, placements), dense)


def check_same(found: Any, expected: torch.Tensor) -> None:
    """Raise unless a tensor equals a dense one and its padding is zero."""
    torch.testing.assert_close(found.to_torch(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    topology = found.topology
    for place in topology.mesh.coordinates():
        device = tuple(0 if size == 1 else c for c, size in zip(place, found.block.shape, strict=False))
        held = found.block[device].clone()
        held[tuple(slice(0, extent) for extent in topology.extent(place))] = 0
        assert not held.any(), f"padding of {place} is not zero: {held}"


def names() -> list[str]:
    """The in-place forms of the table that torch has too."""
    return sorted(name for name in OPS if is_written(name + "_") and hasattr(torch.Tensor, name + "_"))


ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "add": [((drawn(seed=1),), {"alpha": 3}), ((2,), {}), ((drawn((5,), 2),), {})],
    "sub": [((drawn(seed=1),), {"alpha": 2}), ((drawn((6, 1), 2),), {})],
    "mul": [((drawn(seed=1),), {}), ((0.5,), {})],
    "div": [((drawn(seed=1),), {}), ((drawn(seed=1),), {"rounding_mode": "floor"}), ((2,), {})],
    "floor_divide": [((drawn(seed=1),), {})],
    "remainder": [((drawn(seed=1),), {})],
    "fmod": [((drawn(seed=1),), {})],
    "pow": [((drawn(seed=1),), {}), ((-1,), {}), ((0,), {})],
    "lerp": [((drawn(seed=1), 0.3), {}), ((drawn(seed=1), drawn(seed=2)), {})],
    "addcmul": [((drawn(seed=1), drawn(seed=2)), {"value": 0.5})],
    "addcdiv": [((drawn(seed=1), drawn(seed=2)), {"value": 0.5})],
    "clamp": [((0.8, 1.2), {}), ((), {"min": 1.0}), ((drawn(seed=1),), {})],
    "masked_fill": [((drawn(seed=1) > 1, 7.0), {}), ((drawn((5,), 1) > 1, torch.tensor(3.0)), {})],
    **{name: [((drawn(seed=1),), {}), ((1.0,), {})] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: [((drawn(seed=1),), {})] for name in "atan2 hypot nextafter heaviside ldexp igamma igammac".split()},
    **{name: [((drawn(seed=1),), {}), ((1,), {})] for name in "clamp_min clamp_max copysign xlogy".split()},
    "float_power": [],  # gives float64, which a float32 target refuses, as in torch
    "nan_to_num": [((), {"nan": 1.0})],
    "logit": [((0.1,), {})],
    **{name: [((drawn(seed=1).round() > 1,), {})] for name in ("logical_and", "logical_or", "logical_xor")},
}
INTEGERS = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "gcd",
    "lcm",
)  # fmt: skip


def test_the_in_place_forms_are_those_of_the_pointwise_ops() -> None:
    assert {"add", "div", "exp", "relu", "clamp", "masked_fill", "addcdiv", "lerp", "eq"} <= set(names())
    assert "sum" not in names()
    assert len(names()) > 40


def _twin(argument: Any, mesh: loom.Mesh, placements: str) -> Any:
    """The argument on the mesh, with placements that are not the target's."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return loom.distribute(argument, mesh, placements)


@pytest.mark.parametrize("name", names())
def test_an_in_place_op_equals_dense_and_keeps_placements(name: str) -> None:
    for args, kwargs in ARGUMENTS.get(name, [((), {})]):
        for shape, placements in TARGETS:
            if name in INTEGERS and "mean" in placements:
                continue
            dense = drawn()
            if name in INTEGERS:
                dense, args = (dense * 9).long(), () if name == "bitwise_not" else ((drawn(seed=1) * 9).long(),)
            target = placed(dense, shape, placements)
            before = target.topology
            operands = [_twin(each, target.mesh, ", ".join(["R"] * len(shape))) for each in args]
            result = getattr(target, name + "_")(*operands, **kwargs)
            assert result is target
            assert target.topology is before
            check_same(target, getattr(dense.clone(), name + "_")(*args, **kwargs))


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in "iadd isub imul itruediv ifloordiv imod ipow".split()
}
BITS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in "iand ior ixor ilshift irshift".split()
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*OPERATORS, *BITS]),
    target=st.sampled_from([each for each in TARGETS if "mean" not in each[1]]),
    operand=st.sampled_from(["number", "plain", "R", "S(0)", "S(1)", "row"]),
)
def test_an_in_place_operator_equals_dense_for_any_operand(name: str, target: Any, operand: str) -> None:
    dense = drawn() if name in OPERATORS else (drawn() * 9).long()
    other = drawn(seed=1) if name in OPERATORS else (drawn(seed=1) * 2).long()
    if operand == "row":
        other = other[0]
    if operand == "number":
        other = 2
    mine = placed(dense, *target)
    second: Any = other
    if operand in ("R", "S(0)", "S(1)", "row"):
        at = "S(0)" if operand == "row" else operand
        second = loom.distribute(other, mine.mesh, ", ".join([at] * mine.mesh.ndim))
    function = {**OPERATORS, **BITS}[name]
    found = function(mine, second)
    assert found is mine
    assert found.placements == placed(dense, *target).placements
    check_same(found, function(dense.clone(), other))


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_copy_fill_and_zero_equal_dense(shape: tuple[int, ...], placements: str) -> None:
    target = placed(drawn(), shape, placements)
    before = target.topology
    check_same(target.copy_(drawn(seed=1)), drawn(seed=1))
    check_same(target.copy_(drawn((5,), 2)), drawn((5,), 2).expand(SHAPE))
    check_same(target.copy_((drawn(seed=3) * 9).long()), (drawn(seed=3) * 9).long().float())
    check_same(target.copy_(placed(drawn(seed=4), (*shape,), ", ".join(["S(1)"] * len(shape)))), drawn(seed=4))
    check_same(target.fill_(2.5), torch.full(SHAPE, 2.5))
    check_same(target.fill_(torch.tensor(1.5)), torch.full(SHAPE, 1.5))
    check_same(target.fill_(loom.distribute(torch.tensor(0.5), target.mesh, {})), torch.full(SHAPE, 0.5))
    check_same(target.fill_(float("nan")), torch.full(SHAPE, float("nan")))
    check_same(target.zero_(), torch.zeros(SHAPE))
    assert target.topology is before


INDICES: list[Any] = [
    0,
    -1,
    (2, 3),
    (slice(None), -2),
    slice(1, 4),
    slice(-3, None),
    slice(None, None, 2),
    slice(1, -1, 3),
    (slice(0, 6, 5), slice(4, 1)),
    Ellipsis,
    (Ellipsis, 1),
    (1, Ellipsis),
    (None, 3),
    (slice(2, 5), None, slice(None, None, 2)),
    slice(3, 100),
    (),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slice_assignment_equals_dense(index: Any) -> None:
    for shape, placements in TARGETS:
        dense = drawn()
        part = drawn(tuple(dense[index].shape), 1)
        for value in (3.0, part):
            expected = dense.clone()
            expected[index] = value
            mine = placed(dense, shape, placements)
            before = mine.topology
            mine[index] = value
            assert mine.topology is before
            check_same(mine, expected)
        if part.ndim:
            mine = placed(dense, shape, placements)
            mine[index] = loom.distribute(part, mine.mesh, ", ".join(["S(0)"] * len(shape)))
            check_same(mine, expected)


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_assignment_by_mask_and_by_list_equals_dense(shape: tuple[int, ...], placements: str) -> None:
    chosen = drawn(seed=1) > 1.2
    for index in (chosen, [0, 3], torch.tensor([5, 1]), (slice(None), [0, 2])):
        dense, mine = drawn(), placed(drawn(), shape, placements)
        dense[index] = -1.0
        mine[index] = -1.0
        check_same(mine, dense)
    dense, mine = drawn(), placed(drawn(), shape, placements)
    dense[chosen] = -1.0
    mine[placed(chosen, shape, ", ".join(["S(0)"] * len(shape)))] = -1.0
    check_same(mine, dense)


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_in_place_functions_without_a_rule_equal_dense(shape: tuple[int, ...], placements: str) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.cumsum_(0),
        lambda x: x.index_fill_(0, torch.tensor([1, 4]), 9.0),
        lambda x: x.triu_(),
        lambda x: F.leaky_relu(x.sub_(1), 0.1, inplace=True),
        lambda x: torch.relu_(x.sub_(1)),
        lambda x: F.relu(x.sub_(1), inplace=True),
        lambda x: F.silu(x, inplace=True),
    ]
    for call in calls:
        dense, mine = drawn(), placed(drawn(), shape, placements)
        before = mine.topology
        assert call(mine) is mine
        call(dense)
        assert mine.topology is before
        check_same(mine, dense)


def test_a_plain_target_takes_values_from_the_mesh() -> None:
    mine = placed(drawn(seed=1), (4,), "S(0)")
    dense = drawn()
    plain = dense
    plain += mine
    assert plain is dense
    torch.testing.assert_close(dense, drawn() + drawn(seed=1))
    dense.copy_(mine)
    assert torch.equal(dense, drawn(seed=1))
    dense[0] = mine[3]
    assert torch.equal(dense[0], drawn(seed=1)[3])
    dense.fill_(mine[0, 0])
    assert torch.equal(dense, torch.full(SHAPE, float(drawn(seed=1)[0, 0])))


# ways to look at a (6, 5) tensor, and what to write through them
VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[2],
    "rows": lambda x: x[1:4],
    "steps": lambda x: x[::2, 1:],
    "column": lambda x: x[:, -1],
    "narrow": lambda x: x.narrow(0, 1, 3),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T,
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(30),
    "view 3-D": lambda x: x.view(2, 3, 5),
    "reshape": lambda x: x.reshape(3, 10),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "split": lambda x: x.split(4)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "ellipsis": lambda x: x[...],
    "none": lambda x: x[None, 1:3],
    "movedim": lambda x: x.movedim(0, 1),
    "diagonal": lambda x: x.diagonal(),
    "unbind": lambda x: x.unbind(0)[4],
    "unfold": lambda x: x.unfold(0, 2, 2),
    "select": lambda x: x.select(1, 3),
    "iteration": lambda x: list(x)[5],
    "view_as": lambda x: x.view_as(torch.empty(15, 2)),
    "expand_as": lambda x: x.expand_as(torch.empty(6, 5)),
    "rows of the transpose": lambda x: x.T[1:3],
    "flat part": lambda x: x.reshape(30)[3:9],
    "view of a view": lambda x: x.view(30).view(5, 6)[1],
    "movedim then row": lambda x: x.movedim(0, 1)[2],
    "row then movedim": lambda x: x[1:5].movedim(0, 1),
    "contiguous": lambda x: x[1].contiguous() if isinstance(x, loom.Tensor) else x[1],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda v: v.add_(10),
    "sigmoid_": lambda v: v.sigmoid_(),
    "copy_": lambda v: v.copy_(torch.ones(tuple(v.shape))),
    "fill_": lambda v: v.fill_(4),
    "zero_": lambda v: v.zero_(),
    "setitem": lambda v: v.__setitem__(0, 5.0),
    "mask": lambda v: v.__setitem__(v > 1, 0.0),
    "cumsum_": lambda v: v.cumsum_(0),
    "operator": lambda v: operator.imul(v, 3),
}


def viewed(view: str) -> Iterator[tuple[Any, torch.Tensor, Any, torch.Tensor]]:
    """On every target a tensor, the same dense, and that view of both."""
    for shape, placements in TARGETS:
        dense, mine = drawn(), placed(drawn(), shape, placements)
        yield mine, dense, VIEWS[view](mine), VIEWS[view](dense)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("into", ["view", "base"])
def test_a_view_and_its_base_see_what_is_written_into_either(into: str, view: str, write: str) -> None:
    for mine, dense, seen, expected in viewed(view):
        for each in (seen, expected) if into == "view" else (mine, dense):
            WRITES[write](each)
        check_same(mine, dense)
        check_same(seen, expected)


def test_two_views_of_one_base_see_what_is_written_through_each_other() -> None:
    for shape, placements in TARGETS:
        dense, mine = drawn(), placed(drawn(), shape, placements)
        for first, second in (("view", "T"), ("diagonal", "flat part"), ("row then movedim", "chunk")):
            pairs = [(VIEWS[first](x), VIEWS[second](x)) for x in (mine, dense)]
            for one, other in pairs:
                one.mul_(2)
                other[0] = 7.0
                one.add_(other.sum())
            for ours, theirs in zip(*pairs, strict=True):
                check_same(ours, theirs)
        check_same(mine, dense)


def test_a_write_to_a_view_of_a_moved_view_reaches_the_base() -> None:
    x = loom.zeros(4, 6, mesh=loom.open_mesh((4,), axes=("tp",)), placements="S(1)")
    dense = torch.zeros(4, 6)
    chains = [each.reshape(24).view(2, 12)[0] for each in (x, dense)]
    for write in WRITES.values():
        for chain in chains:
            write(chain)
        check_same(x, dense)
        check_same(chains[0], chains[1])


def test_a_copy_of_a_view_is_no_view() -> None:
    x = loom.zeros(4, 6, mesh=loom.open_mesh((2,)), placements="S(1)")
    x.reshape(24).clone().add_(1)
    x.T.reshape(24).add_(1)  # torch copies here, and so does a mesh, whether it had to move or not
    assert not x.any()


def test_a_write_to_the_base_is_seen_by_a_view_that_shares_memory() -> None:
    x = loom.zeros(4, 6, mesh=loom.open_mesh((2,)), placements="S(0)")
    view = x.view(2, 2, 6)
    x += 1
    assert view.sum().item() == 24


@pytest.mark.parametrize("write", WRITES)
def test_a_leaf_that_requires_a_gradient_refuses_as_torch_does(write: str) -> None:
    for shape, placements in [each for each in TARGETS if "P" not in each[1]]:
        for make in (lambda x: x, lambda x: x[1:3]):
            dense, mine = drawn().requires_grad_(), placed(drawn(), shape, placements).requires_grad_()
            with pytest.raises(RuntimeError) as theirs:
                WRITES[write](make(dense))
            with pytest.raises(RuntimeError) as ours:
                WRITES[write](make(mine))
            assert "leaf Variable that requires grad" in str(theirs.value)
            assert "leaf Variable that requires grad" in str(ours.value)
            check_same(mine.detach(), drawn())
            with torch.no_grad():
                WRITES[write](mine)
            assert mine.is_leaf
            assert mine.requires_grad


@pytest.mark.parametrize("name", ["add", "mul", "sigmoid", "exp", "tanh", "sqrt", "reciprocal", "relu", "pow", "clamp"])
def test_gradients_through_in_place_ops_equal_dense(name: str) -> None:
    args = {"add": (2,), "mul": (drawn(seed=1),), "pow": (1.5,), "clamp": (0.7, 1.5)}.get(name, ())
    for shape, placements in [each for each in TARGETS if "P" not in each[1]]:
        leaves = drawn().requires_grad_(), placed(drawn(), shape, placements).requires_grad_()
        for leaf in leaves:
            middle = leaf * 1.25
            middle[1:3] = leaf[0]
            getattr(middle, name + "_")(*args)
            (middle * middle).sum().backward()
        check_same(leaves[1].grad, leaves[0].grad)


def test_gradients_through_a_write_to_a_view_equal_dense() -> None:
    for shape, placements in [((2,), "S(0)"), ((5,), "S(1)"), ((4,), "R"), ((4,), "S(0)")]:
        leaves = drawn().requires_grad_(), placed(drawn(), shape, placements).requires_grad_()
        for leaf in leaves:
            middle = leaf * 2
            middle.T[1:3].mul_(3) if placements != "S(1)" else middle[1:3].mul_(3)
            middle.mul_(leaf)
            middle.sum().backward()
        expected = leaves[0].grad
        if placements == "S(1)":
            dense = drawn().requires_grad_()
            middle = dense * 2
            middle[1:3].mul_(3)
            (middle * dense).sum().backward()
            expected = dense.grad
        check_same(leaves[1].grad, expected)


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_out_writes_into_its_target_and_keeps_its_placements(shape: tuple[int, ...], placements: str) -> None:
    target = placed(torch.zeros(SHAPE), shape, placements)
    before = target.topology
    first = loom.distribute(drawn(), target.mesh, ", ".join(["S(1)"] * len(shape)))
    assert torch.add(first, drawn(seed=1), out=target) is target
    check_same(target, drawn() + drawn(seed=1))
    torch.matmul(first, drawn((5, 5), 2), out=target)
    check_same(target, drawn() @ drawn((5, 5), 2))
    torch.cumsum(first, 0, out=target)
    check_same(target, drawn().cumsum(0))
    torch.exp(first, out=target)
    check_same(target, drawn().exp())
    assert target.topology is before


def test_out_may_be_a_plain_tensor() -> None:
    plain = torch.zeros(SHAPE)
    assert torch.mul(placed(drawn(), (4,), "S(0)"), 2, out=plain) is plain
    torch.testing.assert_close(plain, drawn() * 2)


@pytest.mark.parametrize(("shape", "placements"), TARGETS)
def test_a_write_that_fails_changes_nothing(shape: tuple[int, ...], placements: str) -> None:
    mine = placed(drawn(), shape, placements)
    expected = mine.to_torch()
    bad: list[Callable[[], Any]] = [
        lambda: mine.add_(torch.ones(7, 5)),
        lambda: mine.add_(torch.ones(3, 6, 5)),
        lambda: mine.mul_(torch.ones(4)),
        lambda: mine.copy_(torch.ones(7)),
        lambda: mine.copy_(torch.ones(2, 6, 5)),
        lambda: mine.__setitem__(0, torch.ones(4)),
        lambda: mine.__setitem__(6, 1.0),
        lambda: mine.__setitem__((0, 0, 0), 1.0),
        lambda: mine.__setitem__(slice(None, None, -1), 1.0),
        lambda: torch.add(mine, 1, out=placed(torch.zeros(5), shape, ", ".join(["R"] * len(shape)))),
        lambda: torch.add(torch.ones(5), torch.ones(3), out=mine),
        lambda: mine.add_(loom.ones(6, 5, mesh=loom.open_mesh((7,)))),
    ]
    for call in bad:
        with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)):
            call()
        assert torch.equal(mine.to_torch(), expected)


@pytest.mark.parametrize(("shape", "placements"), [each for each in TARGETS if "mean" not in each[1]])
def test_a_dtype_that_the_target_cannot_hold_changes_nothing(shape: tuple[int, ...], placements: str) -> None:
    whole = torch.arange(30).reshape(SHAPE)
    mine = placed(whole, shape, placements)
    bad: list[Callable[[], Any]] = [
        lambda: mine.add_(0.5),
        lambda: mine.div_(2),
        lambda: mine.mul_(torch.ones(5)),
        lambda: mine.sigmoid_(),
        lambda: torch.mul(mine, 0.5, out=mine),
    ]
    for call in bad:
        with pytest.raises((TypeError, RuntimeError)):
            call()
        assert torch.equal(mine.to_torch(), whole)
        assert mine.dtype == torch.int64


def test_the_dtype_of_the_target_wins_where_it_can_hold_the_result() -> None:
    mine = placed(drawn().bfloat16(), (4,), "S(0)")
    mine.add_(drawn(seed=1))
    assert mine.dtype == torch.bfloat16
    assert mine.topology.dtype == "bf16"
    assert torch.equal(mine.to_torch(), drawn().bfloat16().add_(drawn(seed=1)))


def test_shape_and_dtype_errors_are_whole_sentences() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.zeros(6, 5, mesh=mesh, placements="S(0)")
    with pytest.raises(loom.ShapeError) as error:
        x.add_(torch.ones(3, 6, 5))
    assert str(error.value) == (
        "add_ would give shape [3, 6, 5], which does not fit into its target\n"
        "  target  f32[6, 5](S(0)) on Mesh(tp=4)\n"
        "  fix     use add without the underscore"
    )


def test_writes_are_seen_by_a_record() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    target = loom.zeros(8, 8, mesh=mesh, placements="S(0)")
    other = loom.ones(8, 8, mesh=mesh, placements="S(1)")
    with loom.record() as log:
        target += other
        target.copy_(other)
    # all_to_all: what a device holds is 8 * 2 * 4 B, of which it sends away 3/4
    assert [(event.kind, event.axis, event.bytes) for event in log] == [("all_to_all", "tp", 48)] * 2
    with loom.communication("forbid"):
        target += 1
        with pytest.raises(loom.CommunicationError):
            target += other
    check_same(target, torch.full((8, 8), 2.0))


TURNS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapdims_": lambda x: x.swapdims_(-1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
}


@pytest.mark.parametrize("placements", ["S(0), S(0)", "R, S(1)", "S(1), S(0)", "P(sum), R"])
@pytest.mark.parametrize("shape", [(4, 4), (6, 5)])
@pytest.mark.parametrize("name", TURNS)
def test_a_tensor_is_turned_in_place_with_what_shares_its_memory(name, shape, placements) -> None:
    dense = torch.arange(float(shape[0] * shape[1])).view(shape)
    ours = loom.distribute(dense, loom.open_mesh((2, 2)), {}).redistribute(placements)
    same = ours.detach()
    assert TURNS[name](ours) is ours
    TURNS[name](turned := dense.clone())
    check_same(ours, turned)
    check_same(ours + 1, turned + 1)
    if "P" not in placements:
        ours.mul_(2)
        check_same(same, dense * 2)


def test_turning_passes_a_gradient_and_refuses_a_leaf() -> None:
    mesh = loom.open_mesh((2,))
    leaf, dense = loom.randn(4, 3, mesh=mesh).requires_grad_(), torch.zeros(4, 3)
    factor = torch.arange(12.0).view(3, 4)
    ((leaf * 1).t_() * factor).sum().backward()
    check_same(leaf.grad, dense + factor.t())
    with pytest.raises(loom.GradientError, match="t_ would change a leaf that requires a gradient"):
        leaf.t_()
    with torch.no_grad():
        assert leaf.t_().shape == (3, 4)


@pytest.mark.parametrize("placements", ["S(0), R", "R, R", "S(1), S(0)"])
@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (5, 5)])
def test_orthogonal_initialisation_gives_orthogonal_rows_or_columns(shape, placements) -> None:
    weight = loom.Parameter(torch.zeros(shape), loom.open_mesh((2, 2)), placements)
    found = torch.nn.init.orthogonal_(weight).to_torch().detach()
    square = found @ found.T if shape[0] <= shape[1] else found.T @ found
    torch.testing.assert_close(square, torch.eye(min(shape)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["resize_", "resize_as_", "as_strided_"])
def test_what_would_change_the_shape_behind_a_topology_is_refused(name) -> None:
    x = loom.zeros(4, 4, mesh=loom.open_mesh((2,), axes=("dp",)))
    with pytest.raises(loom.UnsupportedError) as caught:
        getattr(x, name)(x)
    assert str(caught.value) == (
        f"{name} is not for tensors on a mesh\n"
        "  tensor  f32[4, 4](S(0)) on Mesh(dp=2)\n"
        "  fix     make a new tensor, or x.copy_(value)"
    )


def test_a_tensor_that_was_drawn_is_detached_in_place() -> None:
    x = loom.randn(4, 6, mesh=loom.open_mesh((2, 2))).requires_grad_()
    y = x * 2
    assert y.detach_() is y and not y.requires_grad
    assert x.detach_() is x and not x.requires_grad


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(max)"])
def test_an_empty_tensor_that_was_placed_otherwise_is_no_view_and_can_be_written(placements: str) -> None:
    leaf = loom.zeros(0, 3, mesh=loom.open_mesh((2,)), placements="S(1)").requires_grad_()
    placed = leaf.redistribute(placements)
    assert placed.add_(1).shape == (0, 3)
    view = (leaf * 2).unsqueeze(0)
    assert view.mul_(2).shape == (1, 0, 3)


def test_items_of_a_tensor_can_be_set_to_the_tensor_itself() -> None:
    dense = torch.arange(2).view(1, 2)
    x = loom.distribute(dense.clone(), loom.open_mesh((3, 2)), "S(1), R")
    x[:1, None] = x
    check_same(x, dense)


def test_a_write_without_gradients_into_a_view_of_a_leaf_keeps_its_gradient() -> None:
    for shape, placements in (((2, 2), "S(1), S(1)"), ((2, 1), "S(1), S(1)"), ((2,), "S(0)")):
        x = loom.distribute(drawn((7, 3)), loom.open_mesh(shape), placements).requires_grad_()
        view = x.T
        with torch.no_grad():
            view.neg_()
        view.sum().backward()
        check_same(x.grad, torch.ones(7, 3))


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_an_extreme_was_reduced_to_can_be_written_and_has_its_gradient(op: str) -> None:
    leaf = loom.distribute(drawn(), loom.open_mesh((2,)), "R").requires_grad_()
    reduced = leaf.redistribute(f"P({op})").redistribute("R")
    reduced.mul_(2).sum().backward()
    check_same(leaf.grad, torch.full(SHAPE, 2.0))


def test_the_parameters_of_a_norm_of_an_empty_batch_have_gradients_of_zeros() -> None:
    mesh = loom.open_mesh((2, 3))
    weight, bias = (loom.ones(4, mesh=mesh, placements="R, S(0)").requires_grad_() for _ in range(2))
    F.group_norm(loom.zeros(0, 4, mesh=mesh), 2, weight, bias).sum().backward()
    check_same(weight.grad, torch.zeros(4))
    check_same(bias.grad, torch.zeros(4))


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_a_write_by_index_into_a_view_whose_elements_share_memory_is_torchs(placements: str) -> None:
    x = loom.arange(6, mesh=loom.open_mesh((3,)), placements="R").redistribute(placements)
    x.unfold(0, 2, 1).index_copy_(0, torch.tensor([0]), torch.tensor([[7, 8]]))
    assert x.tolist() == [7, 8, 2, 3, 4, 5]
    with pytest.raises(loom.ViewError, match="elements of it share memory"):
        x.expand(2, 6).add_(1)
    x.expand(2, 6)[0] = 4
    assert x.tolist() == [4] * 6


def test_a_write_without_gradients_into_a_view_that_was_made_without_them_is_torchs() -> None:
    x = loom.distribute(torch.ones(4, 6), loom.open_mesh((2, 3)), "S(0), R").requires_grad_()
    with torch.no_grad():
        view = x[:]
    again = view.view_as(view)
    with torch.no_grad():
        again.lerp_(loom.zeros(4, 6, mesh=x.mesh, placements="R, R"), 0.5)
    assert x.tolist() == [[0.5] * 6] * 4


@pytest.mark.parametrize("placements", ["P(sum)", "P(mean)", "P(max)", "P(prod)", "S(0)"])
def test_an_operand_that_has_to_move_moves_every_time_a_call_in_place_is_seen(placements: str) -> None:
    for _ in range(3):
        target = loom.zeros(2, 3, mesh=loom.open_mesh((2,)), placements="R")
        target.add_(loom.ones(3, mesh=target.mesh, placements="R").redistribute(placements))
        check_same(target, torch.ones(2, 3))


def test_a_write_seen_before_is_another_one_where_elements_share_memory() -> None:
    mesh = loom.open_mesh((2,))
    plain = loom.zeros(4, 3, mesh=mesh, placements="R")
    for _ in range(2):
        plain.add_(1.0)
    row, dense = loom.zeros(3, mesh=mesh, placements="R"), torch.zeros(3)
    wide = row.expand(4, 3)
    assert wide.topology is plain.topology
    with pytest.raises(RuntimeError):
        dense.expand(4, 3).add_(1.0)
    with pytest.raises(RuntimeError):
        wide.add_(1.0)
    assert not row.any()


TRACKED_WRITES: dict[str, Any] = {
    "cumsum_": lambda x: x.cumsum_(0),
    "cumprod_": lambda x: x.cumprod_(0),
    "x[i] =": lambda x: x.__setitem__(0, 3.0),
    "x[mask] =": lambda x: x.__setitem__(x.detach() > 1, 3.0),
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(2.0)),
    "renorm_": lambda x: x.renorm_(2, 0, 1.0),
    "addbmm_": lambda x: x.addbmm_(torch.ones(2, x.shape[0], 1), torch.ones(2, 1, x.shape[1])),
    "mul_": lambda x: x.mul_(x.detach().clone()),
    "square_": lambda x: x.square_(),
}


@pytest.mark.parametrize("op", ["max", "min", "prod", "sum", "mean"])
@pytest.mark.parametrize("name", TRACKED_WRITES)
def test_a_write_into_a_tracked_partial_tensor_has_the_gradient_of_dense(name: str, op: str) -> None:
    dense = drawn((4, 3)).requires_grad_()
    leaf = loom.distribute(drawn((4, 3)), loom.open_mesh((2,)), "R").requires_grad_()
    expected, found = dense * 1, leaf.redistribute(f"P({op})")
    TRACKED_WRITES[name](expected), TRACKED_WRITES[name](found)
    expected.sum().backward(), found.sum().backward()
    check_same(found.detach(), expected.detach())
    check_same(leaf.grad, dense.grad)


def test_a_view_whose_elements_share_memory_can_be_copied_from_itself() -> None:
    x = loom.arange(2, mesh=loom.open_mesh((5,))).double().expand(2, 2)
    assert x.copy_(x) is x
    assert x.tolist() == [[0, 1], [0, 1]]
    with pytest.raises(loom.ViewError, match="elements of it share memory"):
        x.copy_(x.clone())


@pytest.mark.parametrize(("shape", "placements"), [((1,), "R"), ((2,), "S(0)"), ((2, 2), "P(prod), R")])
def test_an_expanded_view_that_repeats_nothing_is_written_as_any_other(shape: tuple[int, ...], placements: str) -> None:
    def run(start: Any, other: Any) -> list[Any]:
        view = (start * 2).expand(1, 3).detach()
        view.mul_(other)
        view.sum().backward()
        return [view.detach(), other.grad]

    other = drawn((3,)).requires_grad_()
    ours = loom.distribute(drawn((3,)), loom.open_mesh(shape), {}).requires_grad_()
    start = loom.distribute(drawn((3,), 1), loom.open_mesh(shape), {}).requires_grad_()
    found = run(start.redistribute(placements), ours)
    for mine, theirs in zip(found, run(drawn((3,), 1).requires_grad_(), other), strict=True):
        check_same(mine, theirs)


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_a_write_into_a_detached_view_whose_elements_share_memory_keeps_the_gradient_of_its_base(
    placements: str,
) -> None:
    leaf = loom.distribute(drawn((3,)), loom.open_mesh((2,)), "R").requires_grad_()
    base = (leaf * 2).redistribute(placements)
    view = base.expand(2, 3).detach()
    view[0] = 1.5
    check_same(base.detach(), torch.full((3,), 1.5))
    assert not view.requires_grad
    base.sum().backward()
    check_same(leaf.grad, torch.full((3,), 2.0))
    with pytest.raises(loom.ViewError, match="cannot give a history to this view: it is detached"):
        view[0] = leaf
    check_same(base.detach(), torch.full((3,), 1.5))


@pytest.mark.parametrize("placements", ["R, R", "R, S(1)", "S(0), S(0)"])
def test_a_view_of_integers_as_floats_has_the_gradient_of_what_is_written_into_it(placements: str) -> None:
    leaf = loom.ones(3, 1, mesh=loom.open_mesh((2, 2)), dtype=torch.float64).requires_grad_()
    base = loom.zeros(3, 1, mesh=leaf.mesh, placements=placements, dtype=torch.int64)
    view = base.view(torch.float64)
    view[:2] = leaf[:2] * 3
    assert view.requires_grad and not base.requires_grad
    (view * 2).sum().backward()
    check_same(leaf.grad, torch.tensor([[6.0], [6.0], [0.0]], dtype=torch.float64))
    check_same(base, torch.tensor([[3.0], [3.0], [0.0]], dtype=torch.float64).view(torch.int64))


@pytest.mark.parametrize("op", ["prod", "max", "min", "sum"])
@pytest.mark.parametrize("write", ["x.mul_(x)", "x[0] = 4.0", "x.zero_()", "x.fill_(7.0)"])
def test_a_write_into_a_detached_partial_tensor_keeps_the_gradient_of_the_tracked_one(op: str, write: str) -> None:
    leaf = loom.distribute(drawn((3,)), loom.open_mesh((2,)), "R").requires_grad_()
    parts = leaf.redistribute(f"P({op})") * -2  # so that no part is neutral
    tracked, expected = parts.redistribute(f"P({op})"), drawn((3,)) * -2
    for x in (tracked.detach(), expected):
        exec(write, {"x": x})
    check_same(tracked.detach(), expected)
    tracked.sum().backward()
    check_same(leaf.grad, torch.full((3,), -2.0))


@pytest.mark.parametrize("placed", ["P(max)", "P(min)", "P(prod)", "P(sum)", "S(0), S(0)"])
@pytest.mark.parametrize("shape", [(5, 3), (4, 4)])
def test_a_view_from_before_its_base_was_turned_writes_what_the_base_was(shape: tuple[int, int], placed: str) -> None:
    dense = torch.linspace(-2, 2, shape[0] * shape[1]).reshape(shape)
    mesh = loom.Mesh(d=2) if placed.startswith("P") else loom.Mesh(a=2, b=2)
    ours = loom.distribute(dense.clone(), mesh, "R" if placed.startswith("P") else placed).redistribute(placed)
    for each in (ours, dense):
        before = each[0]
        each.t_().add_(1).unsqueeze_(0)
        each.mul_(2)
        before.sub_(3)
    torch.testing.assert_close(ours.to_torch(), dense)
