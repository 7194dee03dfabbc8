"""Unmodified public models, built without data: a dry run of their training step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import Shard

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "Qwen3ForCausalLM": {**COMMON, "num_key_value_heads": 2, "head_dim": 16},
    "MistralForCausalLM": {**COMMON, "num_key_value_heads": 2},
    "GemmaForCausalLM": {**COMMON, "num_key_value_heads": 2, "head_dim": 16},
    "BertForMaskedLM": COMMON,
    "MixtralForCausalLM": {**COMMON, "num_key_value_heads": 2, "num_local_experts": 4},
    "T5ForConditionalGeneration": {
        "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4, "vocab_size": 96,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip


def build(name: str, mesh: loom.Mesh) -> nn.Module:
    """A model without data, its parameters replicated on the mesh; those that are tied stay tied."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**MODELS[name]))
    made: dict[int, loom.Tensor] = {}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, which = path.rpartition(".")
        placed = made.setdefault(id(parameter), loom.Parameter(parameter.detach(), mesh, {}))
        setattr(model.get_submodule(owner), which, placed)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_public_model_has_time_memory_and_links(name):
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    model = build(name, mesh)
    tokens = loom.distribute(torch.zeros(4, 16, dtype=torch.long), mesh, {"dp": Shard(0)})
    with loom.dry_run("galaxy") as run:
        model(input_ids=tokens, labels=tokens).loss.backward()
    held = sum(parameter.topology.local_bytes for parameter in model.parameters())
    trained = sum(parameter.topology.local_bytes for parameter in model.parameters() if parameter.grad is not None)
    assert run.memory.peaks["parameters"] == held
    assert run.memory.peaks["gradients"] == trained > 0.9 * held
    assert run.memory.peaks["activations"] > 0 and run.time > 0
    # backward takes twice what forward takes, and a fused attention half as much again
    forward, backward = (sum(n.model_flops for n in run.nodes if n.phase == phase) for phase in ("forward", "backward"))
    assert 2 * forward <= backward <= 2.5 * forward
    assert set(run.links) == {"dp"}
    folded = [row for row in run.table("module").rows if row.count > 1]
    assert folded, "layers in the middle are equal; the first and the last may differ"
