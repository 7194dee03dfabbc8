"""`loom.autoplan`: plans in order, verified, never slower than a named one, equal to dense; and if none fits."""

from __future__ import annotations

import copy
import importlib
import math
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import Mesh
from meshloom.fabric import preset
from meshloom.nn.hooks import fitting
from meshloom.nn.search.autoplan import make_task, rank
from meshloom.nn.search.blocks import Folded, copy_without_data
from meshloom.nn.search.choosing import Search, named_plans
from meshloom.nn.search.meshes import make_mesh, tensor_sizes
from meshloom.nn.search.recipes import ALL, WAYS, Built, Named, other_ways, parts_of
from meshloom.nn.search.trials import Task, Trials

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import plan_models  # examples/plan_models.py
from plan_models import MODELS, SIZES, build, example, loss


def task(model: str = "llama", machine: str = "t3000", devices: int = 4, rows: int = 4, **more) -> Task:
    found = preset(machine).machine()
    given = {"memory": found.memory, "loss": loss, **more}
    return Task(build(model, "tiny"), example(model, "tiny", rows), found, devices, **given)


def plan(model: str = "llama", machine: str = "t3000", devices: int = 4, rows: int = 4, **more) -> loom.nn.Ranking:
    return loom.autoplan(build(model, "tiny"), example(model, "tiny", rows), machine, devices, loss=loss, **more)


@cache
def searched(model: str) -> tuple[Search, loom.nn.Ranking]:
    """The plans of a tiny model on four chips, searched once."""
    search = Search(task(model), lambda line: None)
    return search, rank(search)


def ranked(model: str) -> loom.nn.Ranking:
    return searched(model)[1]


@pytest.fixture
def llama() -> loom.nn.Ranking:
    return ranked("llama")


def test_plans_come_in_order_with_what_they_cost_and_why_they_are_slower(llama):
    times = [each.time for each in llama]
    assert times == sorted(times) and len(llama) == 5
    assert llama.best is llama[0] and llama.plan == llama[0].plan and llama.best.why == ""
    for each in llama[1:]:
        slower = each.time / llama.best.time - 1
        assert each.why.startswith(f"{slower:+.1%}")
        assert each.memory > 0 and each.bytes > 0
    assert f"{llama.tried} were priced" in str(llama) and str(llama.plan).splitlines()[0] in str(llama)


def test_the_figures_are_those_of_a_dry_run_of_the_whole_model(llama):
    for each in llama[:2]:
        model, (given, wanted) = build("llama", "tiny"), example("llama", "tiny", 4)
        loom.parallelize(model, each.mesh, each.plan, device="meta")
        batch = tuple(loom.distribute(x, each.mesh, each.plan.batch) for x in (given, wanted))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):  # the second step has the optimizer's state from its start
            with loom.dry_run("t3000") as run:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.time == pytest.approx(each.time, rel=1e-9)
        assert run.memory.peak == each.memory and run.bytes == each.bytes


@pytest.mark.parametrize("model", MODELS)
def test_it_is_never_slower_than_the_best_named_plan_that_fits(model):
    search, found = searched(model)
    plans = [(mesh, recipe) for mesh, recipe in named_plans(search.task) if search.trials.price(mesh, recipe)]
    named = [search.trials.verify(mesh, recipe) for mesh, recipe in plans]
    assert len(named) >= 8 and {recipe.name for _, recipe in plans} >= {"data", "fsdp", "tensor", "hsdp"}
    assert found.best.time <= min(run.time for run in named if search.task.fits(run.memory.peak))


@cache
def dense(model: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """A model, a batch, and the gradients of its parameters."""
    torch.manual_seed(0)
    made = build(model, "tiny", "cpu", torch.float64)
    batch = example(model, "tiny", 4, "cpu", torch.float64)
    ran = copy.deepcopy(made)
    loss(ran, batch).backward()
    return made, batch, {name: p.grad for name, p in ran.named_parameters()}


def check_equal(model: str, mesh: Mesh, plan: loom.Plan) -> None:
    """An error unless a model on a mesh has the gradients of the dense one."""
    made, batch, expected = dense(model)
    ours = loom.parallelize(copy.deepcopy(made), mesh, plan)
    placed = tuple(loom.distribute(x, mesh, fitting(plan.batch, x.dim())) for x in batch)
    loss(ours, placed).backward()
    for name, p in ours.named_parameters():
        assert torch.allclose(p.grad.to_torch(), expected[name], rtol=1e-9, atol=1e-12), f"{name} by\n{plan}"


@pytest.mark.parametrize("model", MODELS)
def test_each_plan_is_applied_by_parallelize_and_equals_dense(model):
    for each in ranked(model):
        check_equal(model, each.mesh, each.plan)


def test_a_pipeline_is_applied_by_apply_and_equals_dense(tmp_path):
    torch.manual_seed(0)
    made = plan_models.llama(replace(SIZES["tiny"], layers=4, words=16)).double()
    tokens = torch.arange(8 * 16).reshape(8, 16) % 16
    batch = (tokens, tokens)
    found = loom.autoplan(made, batch, "t3000", 2, 780_000, loss=loss)  # no plan without stages fits
    found.report(tmp_path / "page.html")
    assert "2 stages" in (tmp_path / "page.html").read_text(encoding="utf-8")
    ran = copy.deepcopy(made)
    expected = loss(ran, batch)
    expected.backward()
    for each in found:
        assert each.stages.count == 2 and each.mesh == Mesh(pp=2) and each.memory <= 780_000
        assert "2 stages" in each.title and "begin at blocks." in str(found)
        pipe = each.apply(copy.deepcopy(made))
        assert isinstance(pipe, loom.Pipeline) and pipe.micro_batches == each.stages.micro_batches
        assert torch.allclose(pipe.step(*batch).to_torch(), expected.detach(), rtol=1e-5)  # a loss in f32
        for p, q in zip(pipe.parameters(), ran.parameters(), strict=True):
            assert torch.allclose(p.grad.to_torch(), q.grad, rtol=1e-5, atol=1e-8)


def test_the_price_of_a_pipeline_is_near_to_its_dry_run():
    with torch.device("meta"):
        model = plan_models.llama(replace(SIZES["medium"], layers=4)).to(torch.bfloat16)
        tokens = torch.zeros(64, 1024, dtype=torch.long)
    search = Search(make_task(model, (tokens, tokens), "galaxy", 32, loss=loss), lambda line: None)
    shapes = [(make_mesh(fsdp=8, tp=4), Built(is_sequence=True)), (make_mesh(dp=32), Built())]
    found = list(search.stager.candidates(shapes, is_short=False))
    assert {mesh.shape[0] for mesh, _, _ in found} == {2, 4}
    for mesh, recipe, price in (min(found, key=lambda each: each[2].time), found[-1]):
        run = search.stager.verify(mesh, recipe)
        assert price.time == pytest.approx(run.time, rel=0.2)
        assert 0.02 < run.bubble < 0.6 and len(run.classes) == recipe.stages.count


def test_a_model_with_tied_weights_is_not_cut_and_the_ranking_says_why():
    with torch.device("meta"):
        model = plan_models.gpt(replace(SIZES["tiny"], layers=2))
    search = Search(make_task(model, example("gpt", "tiny", 8), "t3000", 2, loss=loss), lambda line: None)
    assert not list(search.stager.candidates([(make_mesh(dp=2), Built())], is_short=True))
    (said,) = [str(error) for (_, what), error in search.trials.refused.items() if what == "stages"]
    assert "'embedding.weight' of stage 0 and 'head.weight' of stage 1 are one parameter" in said


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_chosen_equals_dense(seed):
    draw = random.Random(seed)
    model = draw.choice(list(MODELS))
    sizes = {axis: draw.choice((1, 2)) for axis in ("dp", "fsdp", "cp")}
    experts = {"ep": draw.choice((1, 2))} if model == "moe" else {}
    mesh = make_mesh(**sizes, **experts, tp=draw.choice((2, 3, 4)))
    recipe = Built((), draw.random() < 0.5, draw.choice((0, ALL)))
    for (part, axis), ways in other_ways(parts_of(build(model, "tiny")), mesh).items():
        recipe = recipe.changed(part, axis, draw.choice((WAYS[axis][0], *ways)))
    check_equal(model, mesh, recipe.plan(build(model, "tiny"), mesh))


def test_a_gradient_that_differs_a_little_is_found():
    gradient = dense("gpt")[2]["embedding.weight"]
    before = gradient[0, 0].item()
    gradient[0, 0] *= 1.001
    try:
        with pytest.raises(AssertionError, match=r"embedding\.weight"):
            check_equal("gpt", make_mesh(tp=2), Built().plan(build("gpt", "tiny"), make_mesh(tp=2)))
    finally:
        gradient[0, 0] = before


def test_short_memory_makes_blocks_recompute_and_no_more_than_needed():
    with torch.device("meta"):
        model = plan_models.llama(replace(SIZES["tiny"], layers=2, length=256))
        tokens = torch.zeros(2, 256, dtype=torch.long)
    mesh = make_mesh(fsdp=2)
    trials = Trials(make_task(model, (tokens, tokens), "t3000", 2, 1e12, loss=loss))
    none, one, every = (trials.verify(mesh, Built(recompute=count)) for count in (0, 1, ALL))
    assert every.memory.peak < one.memory.peak < none.memory.peak
    found = loom.autoplan(model, (tokens, tokens), "t3000", 2, one.memory.peak, loss=loss)
    assert found.best.memory <= one.memory.peak
    assert any(each.plan.recompute == ("blocks.0",) for each in found)
    assert all(each.memory <= one.memory.peak for each in found)


@cache
def refusal() -> str:
    """What is said when nothing fits."""
    with pytest.raises(loom.OutOfMemoryError) as error:
        plan(devices=2, rows=8, memory=100_000)
    return str(error.value)


def test_when_nothing_fits_the_error_says_what_would():
    said = refusal()
    assert said.startswith("no plan fits: one device needs") and "has 100 KB" in said
    assert "closest" in said and "devices:" in said and "rows:" in said


def test_what_the_error_says_would_fit_does_fit():
    words = refusal().split()
    rows = int(words[words.index("batches") + 2])
    assert plan(devices=2, rows=rows, memory=100_000, keep=1).best.memory <= 100_000


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_inference_has_no_backward_and_no_optimizer(mode):
    model, (tokens, _) = build("llama", "tiny"), example("llama", "tiny", 4)
    found = loom.autoplan(model, tokens if mode == "prefill" else tokens[:, -1:], "t3000", 4, mode=mode)
    assert {node.phase for node in found.best.run.nodes} == {"forward"}
    assert found.best.run.memory.peaks["gradients"] == found.best.run.memory.peaks["optimizer state"] == 0


def test_folded_models_predict_whole_ones():
    sizes = replace(SIZES["tiny"], layers=7)
    with torch.device("meta"):
        model = plan_models.llama(sizes).to(torch.bfloat16)
    wanted = Task(model, example("llama", "tiny", 8), preset("galaxy").machine(), 8, None, loss=loss)
    trials = Trials(wanted)
    assert list(trials.folded.counts.values()) == [7] and len(trials.sample.blocks) == 1
    for recipe, mesh in [
        (Named("data"), make_mesh(dp=8)), (Named("fsdp"), make_mesh(fsdp=8)), (Built(), make_mesh(fsdp=4, tp=2)),
        (Built((), True, ALL), make_mesh(dp=2, fsdp=2, tp=2)), (Named("context"), make_mesh(dp=2, cp=4)),
    ]:  # fmt: skip
        price, run = trials.price(mesh, recipe), trials.verify(mesh, recipe)
        assert price.time == pytest.approx(run.time, rel=0.03), recipe
        assert price.memory == pytest.approx(run.memory.peak, rel=0.1), recipe
        assert price.bytes == pytest.approx(run.bytes, rel=1e-3), recipe


def test_a_block_that_hides_behind_a_sum_of_gradients_is_not_free():
    sizes = replace(SIZES["large"], layers=8)
    with torch.device("meta"):
        model = plan_models.llama(sizes).to(torch.bfloat16)
        tokens = torch.zeros(1024, sizes.length, dtype=torch.long)
    trials = Trials(make_task(model, (tokens, tokens), "nvlink8x16", 1024, loss=loss))
    mesh, recipe = make_mesh(dp=256, tp=4), Built(is_sequence=True).changed("head", "tp", "whole")
    assert trials.price(mesh, recipe).time == pytest.approx(trials.verify(mesh, recipe).time, rel=0.1)


def test_the_module_and_the_random_state_are_left_as_they_are():
    model, batch = build("gpt", "tiny", "cpu", torch.float32), example("gpt", "tiny", 4, "cpu")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loom.autoplan(model, batch, "t3000", 2, loss=loss, keep=1)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def test_blocks_that_differ_are_kinds_of_their_own():
    def layer(width: int) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, width, batch_first=True)

    model = nn.Sequential()
    model.layers = nn.ModuleList([layer(16), layer(16), layer(32), layer(16)])
    folded = Folded(model)
    assert folded.counts == {("layers", 0): 3, ("layers", 1): 1}
    cut = folded.with_blocks({("layers", 0): 1})
    assert [each.linear1.out_features for each in cut.layers] == [16, 32]
    assert all(p.is_meta for p in copy_without_data(model).parameters())


def test_a_model_that_needs_all_its_blocks_is_run_whole():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x):
            return self.layers[2](self.layers[1](self.layers[0](x)))

    found = loom.autoplan(Stack(), torch.ones(4, 8), "t3000", 2)
    assert found.best.run.device_flops > 0
    assert any("the model with fewer blocks" in each and "IndexError" in each for each in found.refused)


def test_a_model_without_roles_has_plans_for_its_rows():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    found = loom.autoplan(model, torch.ones(8, 3, 16, 16), "t3000", 4)
    assert {each.title for each in found} <= {"data", "fsdp", "hsdp", "context", "each part by its role"}
    assert any("tensor" in each for each in found.refused)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "trian"}, "train"),
        ({"devices": 0}, "devices=0"),
        ({"devices": 2.0}, "devices=2.0"),
        ({"keep": 0}, "keep=0"),
        ({"machine": "t300"}, "t3000"),
        ({"machine": 3}, "machine=3"),
        ({"memory": -1.0}, "memory=-1.0"),
        ({"memory": math.nan}, "memory=nan"),
        ({"memory": "12G"}, "memory='12G'"),
        ({"loss": 3}, "loss=3 is no function"),
        ({"optimizer": "adam"}, "optimizer='adam' is no function"),
    ],
)
def test_wrong_arguments_are_named(wrong, said):
    given = {"machine": "t3000", "devices": 2, **wrong}
    with pytest.raises(loom.MeshloomError, match=said):
        loom.autoplan(build("gpt", "tiny"), example("gpt", "tiny", 4), **{"loss": loss, **given})


def test_an_interrupt_ends_the_search_and_leaves_nothing_behind():
    calls = []

    def interrupted(model, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(model, batch)

    model = build("gpt", "tiny", "cpu", torch.float32)
    with pytest.raises(KeyboardInterrupt):
        loom.autoplan(model, example("gpt", "tiny", 4), "t3000", 2, loss=interrupted)
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    with loom.record() as log:  # nothing records or forbids any more
        loss(model, example("gpt", "tiny", 4, "cpu")).backward()
    assert not list(log)


@pytest.mark.parametrize("devices", [1, 3, 7])
def test_any_number_of_devices_has_a_plan(devices):
    found = plan("gpt", devices=devices, rows=6, keep=1)
    assert math.prod(found.mesh.shape) == devices
    check_equal("gpt", found.mesh, found.plan)


def test_fewer_rows_than_devices_cut_the_sequence():
    found = plan(rows=1, devices=4)
    assert all(set(each.mesh.axes) & {"cp", "tp"} for each in found)


def test_a_tensor_axis_stays_inside_of_a_level():
    assert max(tensor_sizes(preset("nvlink8x16").machine(), 128)) == 8
    assert max(tensor_sizes(preset("galaxy4").machine(), 128)) == 32
    assert tensor_sizes(preset("galaxy").machine(), 6) == [1, 2, 3, 6]


def test_parts_are_columns_with_their_rows():
    names = {model: [part.name for part in parts_of(build(model, "tiny"))] for model in MODELS}
    assert names["gpt"] == ["embedding", "attention", "net", "head", "biases and norms"]
    assert names["moe"] == ["embedding", "attention", "experts", "head", "biases and norms"]


ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "benchmarks" / "autoplan.json"


@pytest.fixture
def table(monkeypatch):
    """The module that makes the table of the docs, and the cases that it has found."""
    monkeypatch.syspath_prepend(str(ROOT))
    made = importlib.import_module("benchmarks.autoplan")
    found = made.read_found(FOUND)
    return made, {key: each for key, each in found.items() if "model" in each}


def test_the_table_of_the_docs_is_what_was_found(table):
    made, found = table
    assert "\n".join(made.table(found)) in (ROOT / "docs" / "autoplan.md").read_text(encoding="utf-8")
    assert found and all(each["cpu"] > 0 for each in found.values())


def test_no_case_of_the_table_is_slower_than_a_named_plan(table):
    _, found = table
    beside = [each for each in found.values() if "named_time" in each]
    assert beside and all(each["time"] <= each["named_time"] for each in beside)
