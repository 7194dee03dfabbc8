"""Plans of transformers and styles of torch, as plans of ours."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import meshloom as loom
from meshloom import Mesh, Plan, plans
from meshloom.nn.styles import STYLES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.w1, self.w2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        return x + self.w2(torch.relu(self.w1(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(8, 12, bias=False)

    def forward(self, letters: Any) -> Any:
        x = self.tok(letters)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


# The plan of torch's own tutorial: sequences between blocks, columns and rows inside.
TUTORIAL = {
    "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.w1": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.w2": RowwiseParallel(output_layouts=Shard(1)),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def test_the_plan_of_torchs_tutorial_is_read():
    assert str(plans.from_torch(TUTORIAL, Model(), batch="dp=S(0)")) == (
        "batch      dp=S(0)\n"
        "parameter  tok.weight          tp=S(0)\n"
        "parameter  layers.*.w1.weight  tp=S(0)\n"
        "parameter  layers.*.w1.bias    tp=S(0)\n"
        "parameter  layers.*.w2.weight  tp=S(1)\n"
        "parameter  output.weight       tp=S(0)\n"
        "input      layers.*.norm       tp=S(1)\n"
        "input      layers.*.w1         tp=R\n"
        "input      output              tp=R\n"
        "output     tok                 tp=S(1)\n"
        "output     layers.*.w2         tp=S(1)\n"
        "output     output              tp=R"
    )


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=4), Mesh(tp=3), Mesh(dp=1, tp=8)], ids=str)
def test_a_model_under_that_plan_is_the_dense_one(mesh):
    torch.manual_seed(0)
    dense = Model()
    letters = torch.randint(12, (4, 6))
    batch = "dp=S(0)" if "dp" in mesh.axes else None
    ours = loom.parallelize(copy.deepcopy(dense), mesh, plans.from_torch(TUTORIAL, dense, batch=batch))
    y, z = dense(letters), ours(letters)
    torch.testing.assert_close(z.to_torch(), y, rtol=1e-5, atol=1e-5)
    y.square().mean().backward()
    z.square().mean().backward()
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad, rtol=1e-4, atol=1e-6)


def test_modules_can_be_prepared():
    one = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    two = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    both = PrepareModuleInputOutput(
        input_layouts=Replicate(), desired_input_layouts=Shard(0), output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )  # fmt: skip
    found = plans.from_torch({"layers.0": one, "layers.1": two, "output": both}, Model(), axis="model")
    expected = Plan(
        inputs={"layers.0": "model=R", "output": "model=S(0)"}, outputs={"layers.1": "model=S(1)", "output": "model=R"}
    )
    assert found == expected


@pytest.mark.parametrize(
    ("styles", "says"),
    [
        ({"layer": ColwiseParallel()}, "the style of 'layer' fits no module\n  fix  did you mean 'layers'?"),
        ({"layers.0.norm": ColwiseParallel()}, "'layers.0.norm' is a LayerNorm, and ColwiseParallel is for Linear and"),
        ({"output": RowwiseParallel(output_layouts=Partial())}, "the style of 'output' has the layout Partial"),
        ({"output": "colwise"}, "the style str of 'output' is not known"),
        (
            {
                "output": PrepareModuleInput(
                    input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Shard(1), Replicate())
                )
            },
            "the style of 'output' gives the tensors of one module several layouts\n  layouts  R, S(1)",
        ),
    ],
)
def test_styles_that_cannot_be_taken_are_refused(styles, says):
    with pytest.raises(loom.ArgumentError) as caught:
        plans.from_torch(styles, Model())
    assert str(caught.value).startswith(says)


class Known(Model):
    tp_plan = {"tok": "embedding_rowwise", "layers.*.w1": "colwise", "layers.*.w2.weight": "rowwise"}
    tp_plan |= {"output": "colwise_gather_output", "layers.*.norm": "sequence_parallel"}


def test_a_plan_of_transformers_names_modules_or_parameters():
    assert plans.from_huggingface(Known(), axis="t") == Plan(
        {"tok.weight": "t=S(0)", "layers.*.w1.weight": "t=S(0)", "layers.*.w1.bias": "t=S(0)"}
        | {"layers.*.w2.weight": "t=S(1)", "output.weight": "t=S(0)"},
        inputs={"layers.*.norm": "t=S(1)"},
        outputs={"output": "t=R"},
    )


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_transformers_makes_a_plan_that_fits(style):
    model = Model()
    model.tp_plan = {"layers.*.w1": style}
    if style in ("embedding_colwise", "embedding_rowwise"):
        model.tp_plan = {"tok": style}
    plan = plans.from_huggingface(model)
    assert all(line.takes for line in plan.check(model).lines)


@pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `models` is not here")
@pytest.mark.slow
@pytest.mark.xdist_group("models")
def test_the_table_has_every_style_that_transformers_has():
    import transformers.distributed.expert_parallel  # noqa: F401  (registers its styles)
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(STYLES) == set(ALL_PARALLEL_STYLES.keys())


def test_models_without_a_plan_and_unknown_styles_are_refused():
    with pytest.raises(loom.ArgumentError) as caught:
        plans.from_huggingface(Model())
    assert str(caught.value) == (
        "this Model has no plan for tensor parallelism of its own\n"
        '  fix  loom.plans.named("tensor", model, mesh) finds columns and rows by name and shape'
    )
    odd = Model()
    odd.tp_plan = {"output": "colwize"}
    with pytest.raises(
        loom.ArgumentError, match=r"the style 'colwize' of 'output' is not known\n  fix  did you mean 'col"
    ):
        plans.from_huggingface(odd)
