"""Experts over mesh axes: values and gradients of the dense sum, the bytes that move, losses, drops, refusals."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import meshloom as loom
import ranks
from expert_cases import LAYOUTS, ROUTINGS, SIZES, Case, Layout, check, dense, make, mix, place, to_one
from meshloom import Mesh, Shard
from meshloom.nn import experts
from meshloom.nn.experts import round_up

GRID = loom.open_mesh((2, 4), axes=("dp", "ep"))
ON_GRID = loom.zeros(4, 4, mesh=GRID, placements="R, S(0)")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_that_travel_give_values_and_gradients_of_the_dense_sum(layout, sizes):
    check(make(*sizes), LAYOUTS[layout], LAYOUTS[layout].open())


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (2, 1, 2)]),
    st.data(),
    st.integers(0, 20),
    st.integers(1, 9),
    st.sampled_from(sorted(ROUTINGS)),
)
def test_any_mesh_any_sizes_any_placements_equal_the_dense_sum(shape, data, tokens, count, routing):
    axes = tuple("abc"[: len(shape)])
    top_k = data.draw(st.integers(1, max(1, count - 1)))
    if routing == "without the first" and count == 1:
        routing = "at random"
    words = {
        "tokens": ("S(0)", "R", "S(1)"),
        "up": ("R", "S(0)", "S(1)", "S(2)"),
        "down": ("R", "S(0)", "S(1)", "S(2)"),
    }
    placed = {key: ", ".join(data.draw(st.sampled_from(each)) for _ in shape) for key, each in words.items()}
    layout = Layout(loom.Mesh.of(shape, axes), **placed)
    check(make(tokens, count, top_k, routing, seed=data.draw(st.integers(0, 99))), layout, layout.open())


@pytest.mark.parametrize("fault", ["weights", "another expert", "a lost token", "the gradient"])
def test_the_comparison_finds_what_is_wrong(fault):
    def run(case: Any) -> Any:
        index, weights = case.index, case.weights
        if fault == "weights":
            weights = weights.flip(1)
        if fault == "another expert":
            index = (index + 1) % 8
        if fault == "a lost token":
            index = torch.where(torch.arange(32).unsqueeze(1) == 7, -1, index)
        found = mix(Case(case.tokens, index, weights, case.up, case.down))
        return found + (case.down.sum() - case.down.sum().detach() if fault == "the gradient" else 0)

    with pytest.raises(AssertionError, match="not close"):
        check(make(32, 8, 2, "at random"), LAYOUTS["dp2 ep4"], LAYOUTS["dp2 ep4"].open(), run)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_same_functions_on_dense_tensors_are_the_dense_sum(sizes):
    case = make(*sizes)
    torch.testing.assert_close(mix(case), dense(case))


# What moves


def moved(case: Case, layout: Layout) -> tuple[loom.context.Log, loom.context.Log, int]:
    mesh = layout.open()
    ours = place(case, layout, mesh)
    with loom.record() as forward:
        found = mix(ours)
    total = found.sum()
    with loom.record() as backward:
        total.backward()
    return forward, backward, found.shape[1]


@pytest.mark.parametrize("routing", ["at random", "to one", "without the first"])
@pytest.mark.parametrize(("layout", "devices", "groups"), [("ep4", 4, 4), ("ep8", 8, 8), ("dp2 ep4", 4, 8)])
def test_the_bytes_of_the_all_to_alls_are_those_of_the_formula(layout, devices, groups, routing):
    """One device receives, from each of the other d - 1 along the axis, capacity rows of `width` numbers, on the way
    there and on the way back, and as much in backward; once also the counts of its experts, 8 bytes each.

    The capacity is the most rows that a device has for a device, with four binary digits that count.
    """
    tokens, count, top_k, width, size = 48, 16, 2, 6, 8
    case = make(tokens, count, top_k, routing)
    each = tokens // groups
    parts = case.index.reshape(groups, each * top_k) // (count // devices)
    most = max(int((part == d).sum()) for part in parts for d in range(devices))
    rows = (devices - 1) * round_up(most) * width * size
    forward, backward, _ = moved(case, LAYOUTS[layout])
    told = [event.bytes for event in forward if event.kind == "all_to_all"]
    assert sorted(told) == sorted([rows, rows, (devices - 1) * (count // devices) * 8])
    assert [event.bytes for event in backward if event.kind == "all_to_all"] == [rows, rows]
    kinds = {event.kind for event in forward}
    assert kinds == {"all_to_all", "all_reduce"}  # the reductions agree on one number
    assert all(event.bytes <= 16 for event in forward if event.kind == "all_reduce")


def test_no_collective_moves_the_weights_of_experts():
    """Along the axis that the experts lie over nothing of their size moves, in forward and in backward."""
    case = make(16, 8, 2, "at random")
    case.up, case.down = (
        torch.randn(8, *shape, dtype=torch.float64).requires_grad_() for shape in ((6, 500), (500, 6))
    )
    forward, backward, _ = moved(case, LAYOUTS["dp2 ep4"])
    assert max(event.bytes for event in (*forward, *backward) if event.axis == "ep") < case.up.nbytes / 50
    over_data = [event for event in backward if event.axis == "dp" and event.kind == "all_reduce"]
    assert [event.bytes for event in over_data if event.bytes > 10000] == [case.up.nbytes // 4] * 2  # their gradients


def test_uneven_counts_cost_at_most_as_many_times_more_as_there_are_devices():
    even = make(64, 8, 2, "at random")
    even.index = torch.stack([torch.arange(64) % 8, (torch.arange(64) + 4) % 8], 1)
    costs = []
    for index in (even.index, to_one(64, 8, 2, torch.Generator())):
        even.index = index
        forward, _, _ = moved(even, LAYOUTS["ep4"])
        costs.append(sum(event.bytes for event in forward if event.kind == "all_to_all"))
    assert costs[0] < costs[1] <= 4 * costs[0]


def test_capacities_have_few_sizes():
    sizes = {round_up(count) for count in range(1, 4097)}
    assert all(count <= round_up(count) <= count * 1.125 for count in range(1, 4097)) and len(sizes) < 85


def test_two_axes_that_experts_do_not_divide_over_are_exact_too():
    layout = Layout(loom.Mesh(ep=2, tp=2), "S(0), S(0)", "S(0), S(0)", "S(0), S(0)")
    check(make(12, 6, 2, "at random"), layout, layout.open())


# Between processes


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, ["ep4", "dp2 ep4"]),
        (2, ["ep4", "dp2 ep4", "dp2 tp4", "columns"]),
        (4, ["ep4", "ep8", "dp2 ep4", "dp2 ep2 tp2"]),
    ],
)
def test_processes_send_tokens_to_each_other(count, names):
    assert ranks.run(count, "expert_cases:run_cases", names) == [len(SIZES) * len(names)] * count


# Routing


def logits_of(tokens: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalized": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid"},
    "groups": {"score": "sigmoid", "groups": 4, "best_groups": 2, "scale": 2.5},
    "biased": {"score": "sigmoid", "groups": 2, "best_groups": 1, "bias": torch.linspace(-1, 1, 8)},
}


def route_by_hand(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[list[set[int]], torch.Tensor]:
    """The experts of each token, and for each expert its weight, zero if it was not chosen."""
    groups, best = options.get("groups", 1), options.get("best_groups", 1)
    chosen, weights = [], torch.zeros_like(logits)
    for token, row in enumerate(logits.tolist()):
        line = torch.tensor(row, dtype=logits.dtype)
        scores = line.sigmoid() if options.get("score") == "sigmoid" else line.softmax(0)
        biased = (scores + options["bias"] if "bias" in options else scores).tolist()
        size = len(row) // groups
        value = {g: sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)}
        kept = sorted(value, key=lambda g: -value[g])[:best]
        among = [e for e in range(len(row)) if e // size in kept]
        mine = sorted(among, key=lambda e: -biased[e])[:top_k]
        total = sum(scores[e] for e in mine) if options.get("normalize", True) else 1.0
        for e in mine:
            weights[token, e] = scores[e] / total * options.get("scale", 1.0)
        chosen.append(set(mine))
    return chosen, weights


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("placements", [None, "S(0), S(0)", "R, S(1)"])
def test_routes_are_those_made_by_hand(options, placements):
    logits, given = logits_of(13, 8), OPTIONS[options]
    chosen, weights = route_by_hand(logits, 2, **given)
    ours = logits if placements is None else loom.distribute(logits, GRID, placements)
    found = experts.route(ours, 2, **given)
    index, own = (each if placements is None else each.to_torch() for each in (found.index, found.weights))
    assert [set(row) for row in index.tolist()] == chosen
    torch.testing.assert_close(torch.zeros_like(weights).scatter(1, index, own), weights)


@pytest.mark.parametrize("capacity", [1, 3, 100])
@pytest.mark.parametrize("placements", [None, "S(0), S(0)", "S(0), R", "R, R"])
def test_an_expert_takes_the_first_tokens_of_the_batch_up_to_its_capacity(placements, capacity):
    logits = logits_of(21, 5)
    index = experts.route(logits, 2).index
    taken, expected = [0] * 5, index.clone()
    for token, row in enumerate(index.tolist()):
        for which, e in enumerate(row):
            taken[e] += 1
            if taken[e] > capacity:
                expected[token, which] = -1
    ours = logits if placements is None else loom.distribute(logits, GRID, placements)
    found = experts.route(ours, 2, capacity=capacity)
    assert torch.equal(found.index if placements is None else found.index.to_torch(), expected)
    load = found.load if placements is None else found.load.to_torch()
    assert load.tolist() == [min(each, capacity) for each in taken]


def test_what_is_dropped_counts_for_nothing():
    layer = loom.experts.MoE(6, 5, experts=4, top_k=2, capacity=2).double()
    x = torch.randn(9, 6, dtype=torch.float64)
    found, case = layer(x), layer.routing
    kept = torch.where(case.index < 0, 0.0, case.weights)
    index = case.index.clamp(min=0)
    assert (case.index < 0).any()
    torch.testing.assert_close(found, layer.experts(x, index, kept))


@pytest.mark.parametrize("placements", ["S(0), S(0)", "R, R"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_losses_are_those_of_the_dense_router(placements, with_mask):
    logits = logits_of(20, 6).requires_grad_()
    mask = (torch.arange(20) % 3 > 0).double() if with_mask else None
    routing = experts.route(logits, 2)
    scores, rows = logits.softmax(-1), 20.0 if mask is None else float(mask.sum())
    kept = torch.ones(20, dtype=torch.float64) if mask is None else mask
    used = F.one_hot(routing.index, 6).sum(1) * kept.unsqueeze(1)
    expected = 6 * ((used.sum(0) / rows) * ((scores * kept.unsqueeze(1)).sum(0) / rows)).sum()
    ours = loom.distribute(logits.detach(), GRID, placements).requires_grad_()
    with loom.record() as log:
        found = experts.balance_loss(experts.route(ours, 2), mask)
    assert all(event.bytes < 200 for event in log)  # sums over experts, never scores of tokens
    torch.testing.assert_close(found.to_torch(), expected)
    found.backward()
    torch.testing.assert_close(ours.grad.to_torch(), torch.autograd.grad(expected, logits)[0])
    torch.testing.assert_close(experts.z_loss(ours).to_torch().double(), logits.logsumexp(-1).square().mean())


# Layers and plans


def layer(**options: Any) -> experts.MoE:
    torch.manual_seed(0)
    return loom.experts.MoE(8, 6, experts=6, top_k=2, shared=2, **options)


@pytest.mark.parametrize("axes", [("ep",), ("dp", "ep"), ("dp", "tp"), ("dp", "ep", "tp"), ("x", "y")])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_layer_of_experts_trains_as_it_does_dense(axes, score):
    mesh = loom.open_mesh({1: (4,), 2: (2, 4), 3: (2, 2, 2)}[len(axes)], axes=axes)
    dense = nn.Sequential(nn.Linear(8, 8), layer(score=score))
    ours = loom.parallelize(copy.deepcopy(dense), mesh, "expert")
    both = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (dense, ours)]
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, losses = torch.randn(5, 3, 8, generator=draw), []
        for model, optimizer in both:
            optimizer.zero_grad()
            y = model(x)
            loss = y.square().mean() + 0.01 * experts.balance_loss(model[1].routing)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for p, q in zip(loom.unparallelize(ours).parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class Stack(nn.Module):
    """Experts as transformers has them, with biases, transposed, without a gate."""

    has_gate, has_bias, is_transposed, num_experts = False, True, True, 6

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.up_proj_bias = nn.Parameter(torch.randn(6, 8, 5)), nn.Parameter(torch.randn(6, 5))
        self.down_proj, self.down_proj_bias = nn.Parameter(torch.randn(6, 5, 8)), nn.Parameter(torch.randn(6, 8))
        self.act_fn = nn.GELU()

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        rows = torch.einsum("th,ehf->tef", hidden_states, self.up_proj) + self.up_proj_bias
        rows = torch.einsum("tef,efh->teh", self.act_fn(rows), self.down_proj) + self.down_proj_bias
        weights = torch.zeros(len(top_k_index), 6).scatter(1, top_k_index, top_k_weights)
        return (rows * weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Parameter(torch.randn(8, 6)), Stack()

    def forward(self, x: Any) -> Any:
        routing = experts.route(x @ self.gate, 2)
        return self.experts(x, routing.index, routing.weights)


def test_stacks_of_other_libraries_get_a_forward_in_which_tokens_travel_and_give_it_back():
    torch.manual_seed(0)
    dense, x = Block(), torch.randn(10, 8)
    ours = copy.deepcopy(dense)
    own = ours.experts.forward
    plan = loom.plans.named("expert", ours, GRID)
    assert plan.experts == ("experts",) and plan.batch == {"dp": Shard(0), "ep": Shard(0)}
    assert all(axes == {"ep": Shard(0)} for axes in plan.parameters.values())
    assert loom.Plan.parse(str(plan)) == plan == loom.Plan.from_toml(plan.to_toml())
    loom.parallelize(ours, GRID, plan)
    with loom.record() as log:
        found = ours(x)
    assert log.kinds()["all_to_all"] == 3 and log.kinds()["all_gather"] == 0
    torch.testing.assert_close(found.to_torch(), dense(x), rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    dense(x).square().sum().backward()
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad, rtol=1e-4, atol=1e-4)
    back = loom.unparallelize(ours)
    assert back.experts.forward == own
    torch.testing.assert_close(back(x), dense(x))


@pytest.mark.parametrize(
    ("axes", "over", "batch", "rest"),
    [
        ({"ep": 3}, ("ep",), ("ep",), None),
        ({"dp": 2, "ep": 3}, ("ep",), ("dp", "ep"), None),
        ({"expert": 2, "dp": 2}, ("expert",), ("expert", "dp"), None),
        ({"dp": 2, "tp": 3}, ("tp",), ("dp",), "tp"),
        ({"a": 2, "b": 3}, ("b",), ("a", "b"), None),
        ({"dp": 2, "ep": 3, "tp": 2}, ("ep", "tp"), ("dp", "ep"), "tp"),
        ({"dp": 2, "ep": 2, "tp": 2}, ("ep",), ("dp", "ep"), "tp"),  # six experts over four devices
    ],
)
def test_experts_go_over_the_axis_of_their_name_and_the_rest_over_the_tensor_axis(axes, over, batch, rest):
    found = loom.plans.named("expert", nn.Sequential(layer()), Mesh(**axes)).check(nn.Sequential(layer()))
    assert found.parameters["0.experts.down_proj"] == {axis: Shard(0) for axis in sorted(over)}
    assert found.batch == {axis: Shard(0) for axis in sorted(batch)}
    assert found.parameters["0.router.weight"] == {}
    assert found.parameters["0.shared.down_proj.weight"] == ({} if rest is None else {rest: Shard(1)})


# Without data


def test_a_dry_run_takes_all_experts_for_equally_busy_and_says_so():
    with torch.device("meta"):
        model = nn.Sequential(loom.experts.MoE(64, 32, experts=16, top_k=2))
    loom.parallelize(model, GRID, "expert", device="meta")
    with loom.dry_run("t3000") as run:
        model(torch.empty(256, 64, device="meta")).sum().backward()
    (told,) = [each for each in run.assumptions if each.what == "tokens per expert"]
    assert (told.value, told.source) == ("the same for all experts and devices", "no data to look at")
    rows = 3 * (256 // 8 * 2 // 4) * 64 * 4  # from each of three devices a quarter of 64 choices
    sent = [event.bytes for event in run.log if event.kind == "all_to_all"]
    assert sorted(sent) == [3 * 4 * 8, rows, rows, rows]  # the batch has no gradient
    product, router = 2 * 256 * 2 * 64 * 32, 2 * 256 * 64 * 16
    assert run.flops == (3 + 2 + 2) * product + 2 * router  # down has two gradients, gate, up and router have one


def test_nothing_is_assumed_where_there_are_values():
    with loom.dry_run() as run:
        mix(place(make(32, 8, 2, "to one"), LAYOUTS["ep4"], LAYOUTS["ep4"].open()))
    assert not [each for each in run.assumptions if each.what == "tokens per expert"]


def test_explain_knows_the_collectives_without_running():
    ours = place(make(32, 8, 2, "at random"), LAYOUTS["ep4"], LAYOUTS["ep4"].open())
    found = loom.explain(lambda: mix(ours))
    assert [event.kind for event in found.events].count("all_to_all") == 3


# Refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: experts.route(torch.zeros(3, 4), 5), "5 experts of 1 of 1 groups of 4 experts cannot be chosen"),
        (lambda: experts.route(torch.zeros(3, 4), 2, groups=3), "2 experts of 1 of 3 groups of 4 experts cannot"),
        (lambda: experts.route([[1.0]], 1), "logits"),
        (lambda: experts.route(torch.zeros(3, 4), "2"), "top_k='2'"),
        (lambda: experts.route(torch.zeros(3, 4), 2, groups=0), "2 experts of 1 of 0 groups"),
        (
            lambda: experts.dispatch(loom.zeros(4, 4, mesh=Mesh(x=2)), torch.zeros(4, 1).long(), ON_GRID),
            "on two meshes",
        ),
        (lambda: experts.route(torch.zeros(4), 2), r"route needs logits \[tokens, experts\], not \[4\]"),
        (lambda: experts.route(torch.zeros(3, 4), 2, score="softmx"), "there is no score 'softmx'"),
        (lambda: experts.route(torch.zeros(3, 4), 2, capacity=0), "capacity=0 is no number of tokens"),
        (
            lambda: experts.dispatch(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(4, 4)),
            r"dispatch needs tokens \[tokens, width\]",
        ),
        (lambda: loom.plans.named("expert", nn.Linear(2, 2), GRID), "this Linear has no experts"),
        (
            lambda: loom.parallelize(nn.Sequential(nn.Linear(2, 2)), GRID, loom.Plan(experts=["0"])),
            "'0' is a Linear without num_experts, has_gate, has_bias, is_transposed, down_proj",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(call, text):
    with pytest.raises(loom.MeshloomError, match=text) as caught:
        call()
    assert "fix" in str(caught.value)


def test_rows_and_weights_of_something_else_are_refused():
    case = make(8, 4, 2, "at random")
    sent = experts.dispatch(case.tokens, case.index, case.up)
    with pytest.raises(loom.ShapeError, match=r"rows \[1, 16, 6\] of \[1, 16, 6\], weights \[8, 1\]"):
        experts.combine(sent, sent.rows, case.weights[:, :1])
    with pytest.raises(loom.DTypeError, match=r"an index of torch\.float64 names no experts"):
        experts.dispatch(case.tokens, case.weights, case.up)


def test_a_layer_that_has_run_can_be_copied_and_casts_as_torch_does():
    net = layer()
    net(torch.randn(4, 8)).sum().backward()
    other = copy.deepcopy(net)
    assert other.routing is None and net.routing is not None
    ours = loom.parallelize(other, GRID, "expert")
    x = torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = ours(x).to_torch(), net(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (0, 8), (0, 3, 8), (2, 3, 8)])
def test_tokens_come_in_any_shape(shape):
    x, net = torch.randn(shape), layer()
    found = loom.parallelize(copy.deepcopy(net), GRID, "expert")(x).to_torch()
    torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-5)


def test_recomputed_layers_have_the_same_gradients():
    dense = nn.Sequential(nn.Linear(8, 8), layer())
    ours = copy.deepcopy(dense)
    plan = loom.plans.named("expert", ours, GRID)
    loom.parallelize(ours, GRID, dataclasses.replace(plan, recompute=["1"]))
    x = torch.randn(7, 8)
    for model in (dense, ours):
        model(x).square().sum().backward()
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad, rtol=1e-4, atol=1e-5)


def test_a_number_beyond_the_experts_is_refused():
    case = make(8, 4, 2, "at random")
    case.index[3, 1] = 7
    for given_case in (case, place(case, LAYOUTS["ep4"], LAYOUTS["ep4"].open())):
        with pytest.raises(loom.MeshloomError, match="index names expert 7 of 4"):
            mix(given_case)
