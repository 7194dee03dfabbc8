"""Tiny models of public libraries with random weights, and where their parameters go: what tests of libraries share.

`put` is all that a program says of meshloom: it replaces parameters by parameters on a mesh, tied ones by one. With
MESHLOOM_DENSE=1 in the environment it leaves them dense, and every test must still pass: one that does not is wrong
itself, whatever it says of a mesh.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import meshloom as loom

IS_DENSE = bool(os.environ.get("MESHLOOM_DENSE"))
LIBRARIES = ("transformers", "accelerate", "peft", "lightning_fabric", "diffusers", "safetensors")
MARKS = [  # one process of xdist imports the libraries, and the others need not
    pytest.mark.xdist_group("models"),
    pytest.mark.slow,
    pytest.mark.skipif(any(find_spec(name) is None for name in LIBRARIES), reason="the extra `models` is not here"),
]
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here, none is fetched
TOKENS = 40
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Layout:
    """A mesh, where the batch goes, and by patterns of names where parameters go; the rest are as `other` says."""

    mesh: loom.Mesh
    batch: str
    other: str
    parameters: Mapping[str, str]

    def of(self, name: str, parameter: torch.Tensor) -> str:
        """The placements of a parameter."""
        found = next((each for pattern, each in self.parameters.items() if re.search(pattern, name)), self.other)
        deepest = max([int(dim) for dim in re.findall(r"\d", found)], default=-1)
        return found if deepest < parameter.dim() else ", ".join("R" for _ in self.mesh.shape)


GRID = loom.Mesh(dp=2, tp=4)
COLUMNS = r"(q_proj|k_proj|v_proj|gate_proj|up_proj|fc1|in_proj|dt_proj)\.(weight|bias)$"
ROWS = r"(o_proj|out_proj|down_proj|fc2|x_proj)\.weight$"
CONV1D = {r"(c_attn|c_fc)\.weight$": "R, S(1)", r"c_proj\.weight$": "R, S(0)", r"(c_attn|c_fc)\.bias$": "R, S(0)"}
LAYOUTS = {
    "data": Layout(GRID, "S(0), S(0)", "R, R", {}),
    "tensor": Layout(
        GRID,
        "S(0), R",
        "R, R",
        {COLUMNS: "R, S(0)", ROWS: "R, S(1)", **CONV1D, r"(embed_tokens|wte|lm_head|embeddings)\.weight$": "R, S(0)"},
    ),
    "sharded": Layout(GRID, "S(0), S(0)", "S(0), S(0)", {}),
    "uneven": Layout(loom.Mesh(fsdp=3), "S(0)", "S(0)", {}),
}


def put(model: torch.nn.Module, layout: str, device: str | None = None) -> Any:
    """The model with its parameters on a mesh; tied ones stay tied."""
    chosen = LAYOUTS[layout]
    made: dict[int, tuple[Any, Any]] = {}  # with the dense one, so that no other gets its id
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None and not IS_DENSE and not isinstance(p, loom.Parameter):
                if id(p) not in made:
                    where = chosen.of(f"{prefix}.{name}", p)
                    made[id(p)] = p, loom.Parameter(p.detach().to(device), chosen.mesh, where, p.requires_grad)
                module._parameters[name] = made[id(p)][1]
    return model.to(device) if IS_DENSE and device else model


def share(value: torch.Tensor, layout: str) -> Any:
    """A batch on the mesh."""
    return value if IS_DENSE else loom.distribute(value, LAYOUTS[layout].mesh, LAYOUTS[layout].batch)


def both(model: torch.nn.Module, layout: str) -> tuple[Any, Any]:
    """A dense model, and the same one on a mesh."""
    return model, put(copy.deepcopy(model), layout)


def tokens(rows: int = 8, length: int = 6, seed: int = 0) -> torch.Tensor:
    """Rows of tokens; 0, 1 and 2 are kept for padding, beginnings and ends."""
    return torch.randint(3, TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Random numbers that begin at a seed, and go on afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def llama(**options: Any) -> Any:
    """Grouped heads; embedding and head tied, unless options say otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    kept = {"num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 64, "tie_word_embeddings": True}
    return _made(LlamaForCausalLM, LlamaConfig(**{**sizes, **kept, **ENDS, **options}))


def gpt2(**options: Any) -> Any:
    """Without dropout, since ours draws other numbers than torch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": TOKENS}
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _made(GPT2LMHeadModel, GPT2Config(**{**sizes, **ENDS, **calm, **options}))


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": TOKENS}
    return _made(MambaForCausalLM, MambaConfig(**sizes, **ENDS))


def whisper() -> Any:
    """It hears 20 frames of 8 bands."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "vocab_size": TOKENS}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    limits = {
        "max_source_positions": 10,
        "max_target_positions": 16,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return _made(WhisperForConditionalGeneration, WhisperConfig(**sizes, **heads, **ends, **limits))


def qwen3() -> Any:
    """Norms of queries and keys, heads of their own size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": TOKENS, "max_position_embeddings": 64}
    return _made(Qwen3ForCausalLM, Qwen3Config(**sizes, **heads, **ENDS, tie_word_embeddings=True))


def mixtral() -> Any:
    """Four experts, of which each token goes to two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 64, "num_local_experts": 4}
    return _made(MixtralForCausalLM, MixtralConfig(**sizes, **heads, **ENDS, num_experts_per_tok=2))


def qwen3_moe() -> Any:
    """Eight narrow experts, of which each token goes to two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": TOKENS}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    return _made(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **heads, **experts, **ENDS))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    kept = {"vocab_size": TOKENS, "max_position_embeddings": 32, "pad_token_id": 0}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _made(BertForMaskedLM, BertConfig(**sizes, **kept, **calm))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout_rate": 0.0}
    return _made(T5ForConditionalGeneration, T5Config(**sizes, **ends))


def vit() -> Any:
    """Pictures of 3x8x8 in four patches, five classes."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _made(ViTForImageClassification, ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5))


def mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 16, "state_size": 8, "num_hidden_layers": 2, "vocab_size": TOKENS, "expand": 2}
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "conv_kernel": 4}
    return _made(Mamba2ForCausalLM, Mamba2Config(**sizes, **heads, **ENDS))


def clip() -> Any:
    """Text and pictures of 3x8x8."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": TOKENS, "max_position_embeddings": 16, **ENDS}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    return _made(CLIPModel, CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))


def deepseek_v3() -> Any:
    """Attention through narrow products, experts in groups after a first dense layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    dims = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "vocab_size": TOKENS}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return _made(DeepseekV3ForCausalLM, DeepseekV3Config(**sizes, **heads, **dims, **experts, **ENDS))


def gemma3() -> Any:
    """Sliding and full attention in turn."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": TOKENS, "max_position_embeddings": 64}
    kinds = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return _made(Gemma3ForCausalLM, Gemma3TextConfig(**sizes, **heads, **kinds, **ENDS))


def unet() -> Any:
    """A denoiser of latents of 4x8x8 with a text of 12 features."""
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    back = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "block_out_channels": (8, 16), "norm_num_groups": 4}
    sizes = {"sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 12, "attention_head_dim": 4}
    return _made(lambda given: UNet2DConditionModel(**given), {**blocks, **back, **sizes})


def build_on_meta(name: str) -> Any:
    """A model without data."""
    with torch.device("meta"):
        return PUBLIC[name]()


def _made(kind: Callable[..., Any], config: Any) -> Any:
    with seeded():
        made = kind(config).eval()
        for p in made.parameters():  # as they are made, next to nothing depends on the input
            p.data += 0.2 * torch.randn_like(p)
    return made


# What tests of the libraries generate with and train; PUBLIC has these and more.
MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "whisper": whisper, "mamba": mamba}
PUBLIC: dict[str, Callable[[], Any]] = {
    **MODELS,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mamba2": mamba2,
    "clip": clip,
    "deepseek_v3": deepseek_v3,
    "gemma3": gemma3,
    "unet": unet,
}


def prompt(name: str, rows: int = 4) -> dict[str, Any]:
    """What a model is given: tokens, sound, or noise with a text."""
    draw = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 20, generator=draw)}
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=draw)}
    if name == "clip":
        return {"input_ids": tokens(rows), "pixel_values": torch.randn(rows, 3, 8, 8, generator=draw)}
    if name == "unet":
        text = torch.randn(rows, 5, 12, generator=draw)
        noise = torch.randn(rows, 4, 8, 8, generator=draw)
        return {"sample": noise, "timestep": torch.arange(rows) * 100, "encoder_hidden_states": text}
    return {"input_ids": tokens(rows)}


def example(name: str, rows: int = 8) -> dict[str, Any]:
    """What a model is trained with."""
    given = prompt(name, rows)
    if name == "vit":
        return {**given, "labels": torch.arange(rows) % 5}
    if name == "clip":
        return {**given, "return_loss": True}
    if name == "unet":
        return given
    return {**given, "labels": tokens(rows, seed=2) if name in ("whisper", "t5", "bert") else given["input_ids"]}


def loss_of(result: Any) -> torch.Tensor:
    """The loss that a model gives, or one of its result."""
    loss = getattr(result, "loss", None)
    return result[0].square().mean() if loss is None else loss
