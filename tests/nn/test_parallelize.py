"""A module goes to a mesh and comes back, in place; nothing else about it changes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import meshloom as loom
import ranks
from meshloom import Mesh, Plan, Shard
from meshloom.nn import mesh_of, plan_of
from refusals import refusal

GRID = Mesh(dp=2, tp=4)
MESHES = {"2x4": GRID, "3": Mesh(tp=3), "8": Mesh(tp=8)}


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)
        self.calls = 0

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        self.calls += 1
        return x + self.down(F.gelu(self.up(self.norm(x)))) * scale


class Net(nn.Module):
    """Tied weights, a buffer, a frozen parameter, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(6.0) / 6)
        self.register_buffer("steps", torch.tensor(3), persistent=False)

    def forward(self, letters: Any, weights: Any = None) -> Any:
        x = self.embedding(letters) + self.shift + self.frozen
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x) * self.scale


class ExpertBlock(nn.Module):
    """A block of five experts, of which each token goes to two, and one that all go to."""

    def __init__(self) -> None:
        super().__init__()
        self.down = loom.experts.MoE(6, 4, experts=5, top_k=2, shared=1)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return x + self.down(x) * scale


def net(plan: str = "") -> Net:
    """A net; for the plan `expert` one with experts."""
    torch.manual_seed(0)
    made = Net()
    if plan == "expert":
        made.blocks.append(ExpertBlock())
    return made


def letters() -> torch.Tensor:
    return torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(batch).square().mean().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: g.to_torch() if isinstance(g, loom.Tensor) else g.clone() for name, g in found.items()}


def check_same(ours: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == dense.keys() and ours
    for name, value in dense.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", loom.plans.NAMES)
@pytest.mark.parametrize("mesh", MESHES)
def test_results_and_gradients_are_those_of_the_dense_module(plan, mesh):
    if plan in ("hsdp", "fsdp+tensor") and MESHES[mesh].ndim == 1:
        pytest.skip("needs two axes")
    dense = net(plan)
    ours = loom.parallelize(copy.deepcopy(dense), MESHES[mesh], plan)
    check_same({"y": ours(letters()).to_torch()}, {"y": dense(letters())})
    check_same(gradients(ours, letters()), gradients(dense, letters()))


def test_it_works_in_place_and_remembers_its_plan():
    model = net()
    plan = Plan({"**.up.weight": "tp=S(0)"}, batch="dp=S(0)")
    assert loom.parallelize(model, GRID, plan) is model
    assert plan_of(model) is plan and mesh_of(model) is GRID
    assert plan_of(model.head) is None and mesh_of(net()) is None
    notes = {name: p.topology.notation for name, p in model.named_parameters()}
    assert notes["blocks.1.up.weight"] == "f32[10, 6](R, S(0))"
    assert notes["blocks.1.up.bias"] == "f32[10](R, R)"


def test_tied_weights_stay_tied_and_buffers_follow():
    model = loom.parallelize(net(), GRID, "fsdp")
    assert model.head.weight is model.embedding.weight
    assert model.shift.topology.notation == "f32[6](R, R)" and model.steps.topology.notation == "i64[](R, R)"
    assert "steps" not in model.state_dict() and "shift" in model.state_dict()
    assert not model.frozen.requires_grad and model.scale.requires_grad
    assert model.scale.topology.notation == "f32[](R, R)"


@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor", "fsdp+tensor"])
def test_unparallelize_is_the_identity(plan):
    model = net()
    model.embedding.weight.no_decay = True
    before = copy.deepcopy(model)
    gradients(model, letters())
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loom.unparallelize(loom.parallelize(model, GRID, plan))
    assert plan_of(model) is None and not model._forward_pre_hooks
    assert model.head.weight is model.embedding.weight and model.embedding.weight.no_decay
    for (name, p), q in zip(model.state_dict(keep_vars=True).items(), before.state_dict().values(), strict=True):
        assert type(p) in (nn.Parameter, torch.Tensor), name
        assert torch.equal(p, q) and p.dtype == q.dtype
    assert not model.frozen.requires_grad and torch.equal(model.steps, before.steps)
    assert {name: p.grad for name, p in model.named_parameters() if p.grad is not None}.keys() == kept.keys()
    assert all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters() if name in kept)
    check_same(gradients(model, letters()), gradients(before, letters()))


def test_a_dense_copy_and_the_parameters_do_not_share_memory():
    dense = net()
    values = dense.frozen.data
    ours = loom.parallelize(dense, Mesh(tp=2), "data")
    values.zero_()
    assert ours.frozen.to_torch().abs().sum() > 0
    back = loom.unparallelize(ours)
    back.frozen.data.zero_()
    assert back.shift.abs().sum() > 0


def test_gradients_go_along_and_attributes_of_parameters_too():
    dense = net()
    dense.scale.no_decay = True
    expected = gradients(dense, letters())
    ours = loom.parallelize(dense, GRID, "tensor")
    assert ours.scale.no_decay
    up = ours.blocks[0].up.weight
    assert up.grad.topology == up.topology
    check_same({name: p.grad.to_torch() for name, p in ours.named_parameters() if p.grad is not None}, expected)


def test_plain_batches_are_spread_and_tensors_on_the_mesh_stay_where_they_are():
    seen: list[Any] = []
    model = loom.parallelize(net(), GRID, Plan(batch="dp=S(0), tp=S(1)"))
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    here = loom.distribute(letters(), GRID, "R, S(0)")
    model(here, weights=[torch.ones(5), {"a": torch.ones(()), "b": 3}, ("c", torch.ones(5, 4, 2))])
    ((given,), kwargs) = seen[0]
    assert given is here
    one, rest, last = kwargs["weights"]
    assert one.topology.notation == "f32[5](S(0), R)" and rest["a"].topology.notation == "f32[](R, R)"
    assert rest["b"] == 3 and last[0] == "c" and last[1].topology.notation == "f32[5, 4, 2](S(0), S(1))"


def test_what_a_module_takes_and_returns_goes_where_the_plan_says():
    plan = Plan(
        {"**.up.weight": "tp=S(0)", "**.down.weight": "tp=S(1)"},
        batch="dp=S(0)",
        inputs={"blocks.*.norm": "tp=S(1)"},
        outputs={"blocks.*.down": "tp=S(1)", "head": "dp=R, tp=R"},
    )
    dense = net()
    model = loom.parallelize(copy.deepcopy(dense), GRID, plan)
    notes: dict[str, str] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: notes.update({name: f"{args[0].topology.notation} {y.topology.notation}"})
        )
        for name in ("blocks.0.norm", "blocks.0.down", "head")
    ]
    y = model(letters())
    for hook in hooks:
        hook.remove()
    assert notes["blocks.0.norm"] == "f32[5, 4, 6](S(0), S(1)) f32[5, 4, 6](S(0), S(1))"
    assert notes["blocks.0.down"].endswith("f32[5, 4, 6](S(0), S(1))")
    assert notes["head"].endswith("f32[5, 4, 7](R, R)")
    torch.testing.assert_close(y.to_torch(), dense(letters()), rtol=1e-5, atol=1e-6)
    check_same(gradients(model, letters()), gradients(dense, letters()))
    loom.unparallelize(model)
    check_same(gradients(model, letters()), gradients(dense, letters()))


def test_a_product_whose_result_is_sharded_is_scattered_and_not_reduced_to_all():
    dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    plan = loom.plans.named("tensor", dense, Mesh(tp=4))
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(2))
    kinds = {}
    for name, each in {"R": plan, "S(1)": dataclasses.replace(plan, outputs={"2": "tp=S(1)"})}.items():
        model = loom.parallelize(copy.deepcopy(dense), Mesh(tp=4), each)
        with loom.record() as log:
            y = model(x)
        kinds[name] = [event.kind for event in log]
        assert y.topology.notation == f"f32[2, 4, 64]({name})"
        torch.testing.assert_close(y.to_torch(), dense(x), rtol=1e-5, atol=1e-5)
    assert kinds == {"R": ["all_reduce"], "S(1)": ["reduce_scatter"]}


def test_modules_are_computed_again_in_backward_and_only_there():
    dense = net()
    model = loom.parallelize(copy.deepcopy(dense), GRID, Plan(batch="dp=S(0)", recompute=["blocks.1"]))
    check_same(gradients(model, letters()), gradients(dense, letters()))
    assert [block.calls for block in model.blocks] == [1, 2]
    with torch.no_grad():
        model(letters())
    assert [block.calls for block in model.blocks] == [2, 3]
    loom.unparallelize(model)
    gradients(model, letters())
    assert [block.calls for block in model.blocks] == [3, 4]
    assert "forward" not in vars(model.blocks[1])


def test_a_forward_of_the_modules_own_is_kept_inside_and_given_back():
    model = net()
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda x, scale: own(x, scale=2 * scale)
    twice, dense = model.blocks[0].forward, copy.deepcopy(model)
    loom.parallelize(model, GRID, Plan(recompute=["blocks.*"]))
    check_same({"y": model(letters()).to_torch()}, {"y": dense(letters())})
    loom.unparallelize(model)
    assert model.blocks[0].forward is twice


def test_a_deep_copy_is_a_model_of_its_own():
    plan = Plan({"**.up.weight": "tp=S(0)"}, "dp=S(0)", outputs={"**.down": "tp=S(1)"}, recompute=["blocks.*"])
    model = loom.parallelize(net(), GRID, plan)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].up.weight.zero_()
    model.blocks[0].calls = 100
    changed, kept = other(letters()).to_torch(), model(letters()).to_torch()
    assert not torch.allclose(changed, kept) and other.blocks[0].calls == 1
    assert plan_of(other) == plan and other.head.weight is other.embedding.weight
    loom.unparallelize(other)
    assert isinstance(model.scale, loom.Tensor) and not other._forward_pre_hooks and model._forward_pre_hooks
    torch.testing.assert_close(model(letters()).to_torch(), kept)


def test_optimizers_and_schedules_train_it_as_they_train_the_dense_one():
    dense = net()
    ours = loom.parallelize(copy.deepcopy(dense), GRID, "fsdp+tensor")
    for model in (dense, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            gradients(model, letters())
            optimizer.step()
            schedule.step()
    for p, q in zip(loom.unparallelize(ours).parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 6, batch_first=True),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Bilinear(3, 4, 5),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("plan", ["data", "fsdp"])
def test_modules_of_torch_go_and_come_back(module, plan):
    kind = type(module).__name__
    draw = torch.Generator().manual_seed(3)
    shapes = {"LSTM": [(3, 5, 4)], "Sequential": [(4, 1, 6, 6)], "Bilinear": [(6, 3), (6, 4)]}
    x = [torch.randn(shape, generator=draw) for shape in shapes.get(kind, [(3, 5, 8)])]
    x *= 3 if kind == "MultiheadAttention" else 1
    dense, ours = copy.deepcopy(module), loom.parallelize(copy.deepcopy(module), Mesh(tp=3), plan)
    y, z = dense(*x), ours(*x)
    y, z = (y[0], z[0]) if isinstance(y, tuple) else (y, z)
    torch.testing.assert_close(z.to_torch(), y, rtol=1e-5, atol=1e-5)
    weights = torch.randn(y.shape, generator=draw)  # not the square: batch norm makes that constant
    (z * weights).sum().backward()
    (y * weights).sum().backward()
    back = loom.unparallelize(ours)
    for p, q in zip(back.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(back.buffers(), dense.buffers(), strict=True):  # running statistics
        torch.testing.assert_close(p, q)


PLACEMENTS = st.one_of(st.just("R"), st.sampled_from(["S(0)", "S(-1)"]))
LINES = st.lists(
    st.tuples(
        st.sampled_from(
            ["**.weight", "**.bias", "blocks.*.up.*", "blocks.0.**", "embedding.weight", "**.{down,norm}.*"]
        ),
        PLACEMENTS,
        PLACEMENTS,
    ),
    max_size=4,
    unique_by=lambda line: line[0],
)


@settings(deadline=None, max_examples=25)
@given(LINES, PLACEMENTS, PLACEMENTS, st.sampled_from([(2, 4), (3, 1), (1, 5), (2, 3)]), st.booleans())
def test_any_plan_on_any_mesh_is_the_dense_module(lines, rows, columns, shape, recompute):
    table = {pattern: f"dp={first}, tp={second}" for pattern, first, second in lines}
    plan = Plan(table, f"dp={rows}, tp={columns}", recompute=["blocks.*"] if recompute else [])
    assert Plan.parse(str(plan)) == plan
    dense = net()
    ours = loom.parallelize(copy.deepcopy(dense), Mesh(dp=shape[0], tp=shape[1]), plan)
    check_same(gradients(ours, letters()), gradients(dense, letters()))
    for p, q in zip(loom.unparallelize(ours).parameters(), dense.parameters(), strict=True):
        assert torch.equal(p, q)


def test_processes_put_a_module_on_a_mesh_and_take_it_back():
    told = ranks.run(2, "model_ranks:life")
    assert told[0] == told[1] and len(told[0]) == len(loom.plans.NAMES) + 2


# Refusals


def test_a_second_time_is_refused():
    model = loom.parallelize(net(), GRID, "data")
    assert refusal(lambda: loom.parallelize(model, GRID, "fsdp")) == (
        "this Net is on a mesh already\n"
        "  mesh  Mesh(dp=2, tp=4)\n"
        "  fix   loom.unparallelize(module) first, or a fresh copy of the model"
    )
    assert refusal(lambda: loom.parallelize(nn.Sequential(model), GRID, "fsdp")).startswith("its part '0' is on a mesh")
    one = net()
    one.head.weight = loom.Parameter(torch.ones(7, 6), GRID)
    assert refusal(lambda: loom.parallelize(one, GRID, "data")) == (
        "'head.weight' is on a mesh already\n"
        "  tensor  f32[7, 6](R, R) on Mesh(dp=2, tp=4)\n"
        "  fix     give a module of dense tensors"
    )


def test_an_axis_that_the_mesh_does_not_have_is_refused():
    plan = Plan({"**.up.weight": {"model": Shard(0)}})
    assert refusal(lambda: loom.parallelize(net(), GRID, plan)) == (
        "the plan names a mesh axis 'model' that the mesh does not have\n"
        "  mesh  Mesh(dp=2, tp=4)\n"
        "  fix   plan.rename({'model': 'tp'}), or open a mesh with that axis"
    )


def test_a_name_that_is_no_plan_is_refused():
    assert refusal(lambda: loom.parallelize(net(), GRID, "tensr")) == (
        "there is no plan 'tensr'\n"
        "  fix  did you mean 'tensor'? known: 'data', 'fsdp', 'hsdp', 'tensor', 'tensor+sequence', 'fsdp+tensor', "
        "'context', 'expert'; a file ends in .toml"
    )
    assert refusal(lambda: loom.parallelize(net(), GRID, 3)).startswith("plan=3 is no plan")
    assert refusal(lambda: loom.parallelize(3, GRID, "data")).startswith("module=3 is of type int")
    assert refusal(lambda: loom.parallelize(net(), (2, 4), "data")).startswith("mesh=(2, 4) is of type tuple")


def test_lazy_modules_and_modules_that_are_not_on_a_mesh_are_refused():
    assert refusal(lambda: loom.parallelize(nn.LazyLinear(3), GRID, "data")).startswith("'weight' has no shape yet")
    assert refusal(lambda: loom.unparallelize(net())).startswith("this Net was not put on a mesh by parallelize")


def test_a_list_cannot_be_computed_again():
    model = net()
    assert refusal(lambda: loom.parallelize(model, GRID, Plan(recompute=["blocks"]))) == (
        "'blocks' is a ModuleList, which is never called, so nothing of it can be computed again\n"
        "  fix  name the modules in it: 'blocks.*'"
    )
    assert all(type(p) is nn.Parameter for p in model.parameters())


BAD = [
    Plan({"nothing": "R"}),
    Plan({"**": "tp=S(1)"}),
    Plan(batch="dp=S(0)", inputs={"head": "tp=R"}, outputs={"head": "tp=R"}, recompute=["blocks.0", "blocks"]),
]


@pytest.mark.parametrize("plan", BAD)
def test_a_refused_plan_leaves_the_module_as_it_was(plan):
    model, before = net(), net()
    refusal(lambda: loom.parallelize(model, GRID, plan))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert all(type(p) in (nn.Parameter, torch.Tensor) for p in (*model.parameters(), *model.buffers()))
    for each in model.modules():
        assert not each._forward_pre_hooks and not each._forward_hooks and "forward" not in vars(each)
    check_same(gradients(model, letters()), gradients(before, letters()))
    loom.parallelize(model, GRID, "fsdp")


def test_a_plan_may_be_a_table_or_a_file(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text('[parameters]\n"**.up.weight" = "tp=S(0)"\n')
    for plan in ({"**.up.weight": {"tp": Shard(0)}}, file, str(file)):
        model = loom.parallelize(net(), GRID, plan)
        assert model.blocks[0].up.weight.topology.notation == "f32[10, 6](R, S(0))"
        assert model(letters()).topology.notation == "f32[5, 4, 7](R, R)"


@pytest.mark.parametrize("way", ["parallelize", "unparallelize"])
def test_an_optimizer_from_before_is_refused_at_its_step(way):
    model = Net()
    if way == "unparallelize":
        loom.parallelize(model, GRID, "data")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    loom.parallelize(model, GRID, "data") if way == "parallelize" else loom.unparallelize(model)
    model(torch.arange(5)).sum().backward()
    told = refusal(optimizer.step)
    assert told == (
        f"this AdamW holds 'frozen' as it was before loom.{way}: its steps do not reach the model\n"
        f"  fix  make the optimizer after loom.{way}: torch.optim.AdamW(model.parameters(), ...)"
    )
    torch.optim.AdamW(model.parameters()).step()


def test_an_optimizer_of_parameters_that_are_where_they_were_steps():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    before = dict(model.named_parameters())
    with pytest.raises(loom.PlacementError):
        loom.parallelize(model, GRID, {"no.such": "tp=S(0)"})
    for each in (model, other):
        each(torch.ones(3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    loom.parallelize(model, GRID, "data")
    for name, parameter in before.items():  # put back by hand
        setattr(model, name, parameter)
    for optimizer in optimizers:
        optimizer.step()


def test_an_optimizer_of_a_model_that_is_gone_may_step():
    model = nn.Linear(3, 2)
    kept = list(model.parameters())
    loom.parallelize(model, GRID, "data")
    del model
    gc.collect()
    for each in kept:
        each.grad = torch.ones_like(each)
    torch.optim.SGD(kept, lr=0.1).step()


def test_an_optimizer_that_was_looked_at_is_looked_at_again_after_another_change():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loom.parallelize(model, GRID, "data")
    optimizer.step()
    loom.parallelize(other, GRID, "data")
    with pytest.raises(loom.ArgumentError, match=r"as it was before loom\.parallelize"):
        optimizer.step()


def test_parameters_that_were_replaced_are_not_kept():
    model = nn.Linear(3, 2)
    gone = weakref.ref(model.weight)
    loom.parallelize(model, GRID, "data")
    gc.collect()
    assert gone() is None
