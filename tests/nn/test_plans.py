"""Plans by name, found by the structure of a model and the names of a mesh's axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import Mesh, Plan, Replicate, Shard, plans
from meshloom.nn.roles import COLUMNS, ROWS, blocks_of, roles_of

GRID = Mesh(dp=2, tp=4)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(8, 11, bias=False)


PRINTED = {
    "data": "batch      dp=S(0), tp=S(0)",
    "fsdp": """\
batch      dp=S(0), tp=S(0)
parameter  **   dp=S(0), tp=S(0)
output     wte  dp=S(0), tp=S(0)
unit       layers.*""",
    "hsdp": """\
batch      dp=S(0), tp=S(0)
parameter  **   tp=S(0)
output     wte  dp=S(0), tp=S(0)
unit       layers.*""",
    "tensor": """\
batch      dp=S(0)
parameter  wte.weight                                        tp=S(0)
parameter  layers.*.attention.{q_proj,k_proj,v_proj}.weight  tp=S(0)
parameter  layers.*.attention.{q_proj,k_proj,v_proj}.bias    tp=S(0)
parameter  layers.*.attention.o_proj.weight                  tp=S(1)
parameter  layers.*.feed.0.weight                            tp=S(0)
parameter  layers.*.feed.0.bias                              tp=S(0)
parameter  layers.*.feed.2.weight                            tp=S(1)
parameter  lm_head.weight                                    tp=S(0)""",
    "context": "batch      dp=S(0), tp=S(1)",
}


@pytest.mark.parametrize("name", PRINTED)
def test_plans_of_whole_models_print_as_they_should(name):
    assert str(plans.named(name, Model(), GRID)) == PRINTED[name]


def placed(name: str, module: nn.Module, mesh: Mesh) -> dict[str, str]:
    found = plans.named(name, module, mesh).check(module).parameters
    return {key: ", ".join(f"{axis}={each}" for axis, each in axes.items()) or "R" for key, axes in found.items()}


def test_columns_rows_and_vocabularies_are_found():
    found = placed("tensor", Model(), GRID)
    assert {key: each for key, each in found.items() if ".1." not in key or "layers" not in key} == {
        "wte.weight": "tp=S(0)",
        "wpe.weight": "R",
        **{f"layers.0.attention.{each}_proj.weight": "tp=S(0)" for each in "qkv"},
        **{f"layers.0.attention.{each}_proj.bias": "tp=S(0)" for each in "qkv"},
        "layers.0.attention.o_proj.weight": "tp=S(1)",
        "layers.0.attention.o_proj.bias": "R",
        "layers.0.norm.weight": "R",
        "layers.0.norm.bias": "R",
        "layers.0.feed.0.weight": "tp=S(0)",
        "layers.0.feed.0.bias": "tp=S(0)",
        "layers.0.feed.2.weight": "tp=S(1)",
        "layers.0.feed.2.bias": "R",
        "lm_head.weight": "tp=S(0)",
    }


def test_fully_sharded_and_tensor_parallel_use_two_dims_of_a_matrix():
    found = placed("fsdp+tensor", Model(), Mesh(fsdp=2, tp=4))
    assert found["layers.0.attention.q_proj.weight"] == "fsdp=S(1), tp=S(0)"
    assert found["layers.0.attention.o_proj.weight"] == "fsdp=S(0), tp=S(1)"
    assert found["layers.0.attention.q_proj.bias"] == "tp=S(0)"
    assert found["layers.0.norm.weight"] == "fsdp=S(0)"


def test_between_blocks_the_sequence_lies_over_the_tensor_axis():
    plan = plans.named("tensor+sequence", Model(), GRID)
    assert list(plan.outputs) == ["wte", "layers.*.attention.o_proj", "layers.*.feed.2"]
    assert all(axes == {"tp": Shard(1)} for axes in plan.outputs.values())
    assert plan.inputs == {"layers.*.attention": {"tp": Replicate()}}  # queries, keys and values read it
    assert plan.parameters == plans.named("tensor", Model(), GRID).parameters


def test_transposed_products_and_attention_of_torch_are_known():
    class Conv1D(nn.Module):  # as transformers has it: (in, out)
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

    model = nn.ModuleDict({"c_fc": Conv1D(16, 4), "c_proj": Conv1D(4, 16), "a": nn.MultiheadAttention(4, 2)})
    assert placed("tensor", model, GRID) == {
        "c_fc.weight": "tp=S(1)",
        "c_fc.bias": "tp=S(0)",
        "c_proj.weight": "tp=S(0)",
        "c_proj.bias": "R",
        "a.in_proj_weight": "tp=S(0)",
        "a.in_proj_bias": "tp=S(0)",
        "a.out_proj.weight": "tp=S(1)",
        "a.out_proj.bias": "R",
    }


def test_experts_in_one_parameter_are_dealt_out():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(4, 8, 6)), nn.Parameter(torch.zeros(4, 6, 4))
            self.bias, self.scale = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(3, 8))

    found = placed("tensor", nn.ModuleDict({"experts": Experts()}), GRID)
    expected = {"gate_up_proj": "tp=S(0)", "down_proj": "tp=S(0)", "bias": "tp=S(0)", "scale": "R"}
    assert found == {f"experts.{key}": each for key, each in expected.items()}


def test_a_chain_of_products_is_told_by_shape():
    chain = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(2, 9)
    )
    assert {name: role.kind for name, role in roles_of(chain).items() if name.endswith("weight")} == {
        "0.weight": "column",
        "2.weight": "row",
        "3.weight": "column",
        "4.weight": "row",
    }


def test_no_name_is_both_a_column_and_a_row():
    from meshloom.nn.patterns import fits

    words = "q_proj out_proj query o wi wo fc1 fc2 c_attn c_proj to_q to_out up down w1 w2 w3 in_proj x_proj".split()
    for word in words:
        assert any(fits(each, word) for each in COLUMNS) != any(fits(each, word) for each in ROWS), word


def test_a_model_in_which_nothing_is_found_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Conv2d(1, 2, 3)})
    with pytest.raises(loom.ArgumentError) as caught:
        plans.named("tensor", model, GRID)
    assert str(caught.value) == (
        "no layer of this ModuleDict is known to read or to write the input of a block\n"
        "  layers  a, b\n"
        "  fix     write the plan: loom.Plan({'**.first.weight': 'tp=S(0)', '**.second.weight': 'tp=S(1)'})"
    )


@pytest.mark.parametrize(
    ("axes", "tensor", "context", "sharded"),
    [
        (("dp", "tp"), "tp", "tp", "tp"),
        (("tp", "dp"), "tp", "dp", "dp"),
        (("a", "b"), "b", "b", "b"),
        (("cp", "x"), "x", "cp", "x"),
        (("fsdp", "model"), "model", "model", "fsdp"),
        (("sp", "mp", "shard"), "mp", "sp", "shard"),
    ],
)
def test_axes_go_by_name_and_else_by_position(axes, tensor, context, sharded):
    mesh = Mesh(**dict.fromkeys(axes, 2))
    assert set(plans.named("tensor", Model(), mesh).parameters["wte.weight"]) == {tensor}
    assert plans.named("tensor", Model(), mesh).batch == {axis: Shard(0) for axis in sorted(axes) if axis != tensor}
    batch: Any = plans.named("context", Model(), mesh).batch
    assert batch[context] == Shard(1) and set(batch) == set(axes)
    assert plans.named("hsdp", Model(), mesh).parameters["**"] == {sharded: Shard(0)}


@pytest.mark.parametrize("name", ["hsdp", "fsdp+tensor"])
def test_plans_of_two_axes_are_refused_on_one(name):
    with pytest.raises(loom.MeshError, match=r"needs a mesh of two axes\n  mesh  Mesh\(tp=8\)\n  fix   loom.open_mesh"):
        plans.named(name, Model(), Mesh(tp=8))


def test_single_numbers_are_not_sharded():
    model = nn.Linear(3, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    assert plans.named("fsdp", model, Mesh(fsdp=2)) == Plan({"scale": "R", "**": "fsdp=S(0)"}, batch="fsdp=S(0)")


def test_a_model_without_parameters_has_a_plan_too():
    assert plans.named("fsdp", nn.ReLU(), Mesh(fsdp=2)) == Plan(batch="fsdp=S(0)")


def test_blocks_are_the_outermost_lists_of_modules_with_parts():
    assert blocks_of(Model()) == ("layers",)
    nested = nn.ModuleDict(
        {"down": nn.ModuleList([Model(), Model()]), "up": nn.Sequential(Model()), "flat": nn.ModuleList()}
    )
    assert blocks_of(nested) == ("down", "up")
    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == ()


def test_every_plan_of_every_name_reads_back():
    for name in plans.NAMES:
        model = Model() if name != "expert" else nn.Sequential(loom.experts.MoE(6, 4, experts=5, top_k=2))
        plan = plans.named(name, model, GRID)
        assert Plan.parse(str(plan)) == plan == Plan.from_toml(plan.to_toml())


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp+tensor"])
def test_a_vocabulary_that_is_larger_than_the_batch_leaves_the_batch_where_it_lies(name):
    class Large(Model):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(6000, 8)

    mesh = loom.open_mesh((2, 2), axes=("dp", "tp") if name != "fsdp+tensor" else ("fsdp", "tp"))
    asked = plans.named(name, Large(), mesh)
    letters = loom.distribute(torch.randint(6000, (64, 16)), mesh, dict(asked.batch))
    found = loom.parallelize(Large(), mesh, asked).wte(letters)
    assert found.placements == letters.placements
    unasked = loom.parallelize(Large(), mesh, replace(asked, outputs={})).wte(letters)
    pairs = zip(unasked.placements, letters.placements, strict=True)
    assert any(q == Shard(0) != p for p, q in pairs), unasked.topology
