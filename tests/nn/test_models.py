"""The matrix of public models: `make test` runs each model on one plan and each plan on two models, `make full` all.

With MESHLOOM_MODELS=all in the environment every model runs on every plan that fits it, on three meshes and on two
processes.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

import meshloom as loom
import model_matrix
import ranks
from library_models import MARKS, PUBLIC, llama, tokens
from model_matrix import FLAT, PLANS, cases, check_close, compare_gradients, open_mesh

pytestmark = MARKS
IS_WHOLE = os.environ.get("MESHLOOM_MODELS") == "all"

# Each model, each plan at least twice; every mesh.
SOME = [
    ("llama", "tensor", "2x4"),
    ("qwen3", "tensor+sequence", "8"),
    ("gpt2", "fsdp+tensor", "2x4"),
    ("mixtral", "tensor", "3"),
    ("qwen3_moe", "fsdp", "8"),
    ("bert", "context", "2x4"),
    ("t5", "fsdp+tensor", "2x4"),
    ("vit", "hsdp", "2x4"),
    ("whisper", "tensor+sequence", "3"),
    ("mamba", "data", "8"),
    ("mamba2", "fsdp", "3"),
    ("clip", "hsdp", "2x4"),
    ("deepseek_v3", "tensor", "2x4"),
    ("gemma3", "context", "3"),
    ("unet", "data", "2x4"),
    ("mixtral", "expert", "3"),
    ("qwen3_moe", "expert", "2x4"),
    ("deepseek_v3", "expert", "8"),
]
SPLIT = [("llama", "tensor"), ("gpt2", "fsdp"), ("mixtral", "data"), ("t5", "context"), ("deepseek_v3", "expert")]


@pytest.mark.parametrize(("model", "plan", "mesh"), list(cases()) if IS_WHOLE else SOME)
def test_a_public_model_trains_on_a_mesh_as_it_does_dense(model, plan, mesh):
    model_matrix.check(model, plan, open_mesh(mesh))


def test_the_short_list_has_each_model_and_each_plan_twice():
    assert {model for model, _, _ in SOME} == set(PUBLIC) and len(PUBLIC) == 15
    assert all(sum(plan == each for _, each, _ in SOME) >= 2 for plan in loom.plans.NAMES)
    assert set(PLANS) == set(loom.plans.NAMES)
    assert set(SOME) <= set(cases())


def test_a_model_that_differs_a_little_is_found():
    def place(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 2] *= 1.001
        return loom.parallelize(model, open_mesh("2x4"), "tensor")

    with pytest.raises(AssertionError, match=r"model\.layers\.1\.mlp"):
        check_close(compare_gradients("llama", place, torch.float32), model_matrix.LIMIT)


def groups() -> list[tuple[list[tuple[str, str]], tuple[str, ...]]]:
    """Cases that run together, so that processes import the libraries once, with the axes of their mesh."""
    if not IS_WHOLE:
        return [(SPLIT, ("tp",))]
    return [
        ([(each, plan) for each in models], ("dp", "tp") if plan in FLAT else ("tp",)) for plan, models in PLANS.items()
    ]


@pytest.mark.parametrize(("pairs", "axes"), groups(), ids=lambda each: "-".join(map(str, each))[:40])
def test_a_public_model_trains_on_two_processes_as_it_does_dense(pairs, axes):
    told = ranks.run(2, "model_ranks:matrix", pairs, axes, timeout=120 + 40 * len(pairs))
    assert told == [[f"{model} {plan}" for model, plan in pairs]] * 2


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek_v3", "gemma3"] if not IS_WHOLE else list(PUBLIC))
def test_the_plan_that_a_model_brings_trains_it_as_dense(model):
    mesh = open_mesh("2x4")

    def place(module: torch.nn.Module) -> torch.nn.Module:
        return loom.parallelize(module, mesh, loom.plans.from_huggingface(module, batch="dp=S(0)"))

    if not getattr(PUBLIC[model](), "tp_plan", None):
        pytest.skip("transformers has no plan for it")
    check_close(compare_gradients(model, place, torch.float32), model_matrix.LIMIT)


def test_sequences_are_gathered_once_for_each_part_of_a_block_and_scattered_after_it():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = loom.parallelize(llama(**sizes), open_mesh("2x4"), "tensor+sequence")
    with loom.record() as log:
        model(tokens(8, 16))
    moved = Counter((event.call, event.kind) for event in log if event.axis == "tp" and event.call != "embedding")
    assert moved == {("redistribute", "all_gather"): 4, ("linear", "reduce_scatter"): 4, ("linear", "all_gather"): 1}
