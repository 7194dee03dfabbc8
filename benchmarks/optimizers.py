"""Optimizers on parameters of a mesh, each against dense torch with the same arguments; a step of a public Llama."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

import meshloom as loom
from benchmarks.bare import bare, bare_parameter
from benchmarks.goals import Goal
from benchmarks.works import Pair, Spec, WrongAnswer, language_step

MESH = (2, 4)
STEPS = {"default": ({}, 2.0), "foreach": ({"foreach": True}, 1.5), "fused": ({"fused": True}, 1.5)}
SHAPES = [(64, 64), (64,), (128, 64)] * 7  # 21 small parameters


def works(devices: Sequence[int]) -> list[Spec]:
    """The works on a mesh of 8, if that is asked for; with each, what a wrapper that does nothing costs."""
    if math.prod(MESH) not in devices:
        return []
    steps = [
        ("AdamW step", f"21 parameters, {name}", partial(_step, options), most, 1.0)
        for name, (options, most) in STEPS.items()
    ]
    if find_spec("transformers") is not None:
        steps.append(("Llama step", "tiny, tensor-parallel, AdamW", _llama, 1.25, 4.0))
    return [
        Spec(name, detail + suffix, MESH, partial(make, puts), Goal("ratio", most) if goal else None, seconds=seconds)
        for name, detail, make, most, seconds in steps
        for suffix, puts, goal in (("", _on_mesh, True), (", bare wrapper", _in_wrappers, False))
    ]


class Puts(NamedTuple):
    """Where parameters and data go: `parameter` is given the placements that a mesh has for it."""

    parameter: Callable[[torch.Tensor, dict[str, loom.Placement]], Any]
    tokens: Callable[[torch.Tensor], Any]


def _on_mesh() -> Puts:
    mesh = loom.open_mesh(MESH, axes=("dp", "tp"))
    return Puts(
        lambda value, placements: loom.Parameter(value, mesh, placements),
        lambda tokens: loom.distribute(tokens, mesh, {"dp": loom.Shard(0)}),
    )


def _in_wrappers() -> Puts:
    return Puts(lambda value, _: bare_parameter(value), bare)


def _step(options: dict[str, Any], puts: Callable[[], Puts]) -> Pair:
    put = puts()
    values = [torch.randn(shape) for shape in SHAPES]
    dense = [torch.nn.Parameter(each.clone()) for each in values]
    ours = [put.parameter(each, {"tp": loom.Shard(0)}) for each in values]
    for mine, theirs in zip(ours, dense, strict=True):
        theirs.grad = torch.randn_like(theirs)
        mine.grad = theirs.grad.clone()
    mine_step, their_step = torch.optim.AdamW(ours, **options).step, torch.optim.AdamW(dense, **options).step
    mine_step()
    their_step()
    _check_all(ours, dense)
    return Pair(mine_step, their_step)


def _check_all(ours: Sequence[Any], dense: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(ours, dense, strict=True):
        if not torch.allclose(mine.detach().to_torch(), theirs, rtol=1e-4, atol=1e-5):
            raise WrongAnswer(f"a parameter differs from dense: {tuple(mine.shape)}")


def _llama(puts: Callable[[], Puts]) -> Pair:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    dense, ours = LlamaForCausalLM(config), LlamaForCausalLM(config)
    ours.load_state_dict(dense.state_dict())
    put = puts()
    for name, module in ours.named_modules():
        for each, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[each] = put.parameter(value.detach(), megatron_placements(name))
    tokens = torch.randint(0, 256, (8, 32))
    placed = put.tokens(tokens)
    steps = language_step(ours, placed, placed, 1e-3), language_step(dense, tokens, tokens, 1e-3)
    losses = [float(step()) for step in steps]
    if not math.isclose(*losses, rel_tol=1e-4):
        raise WrongAnswer(f"the loss is {losses[0]} and dense has {losses[1]}")
    _check_all(list(ours.parameters()), list(dense.parameters()))
    return Pair(*steps)


def megatron_placements(name: str) -> dict[str, loom.Placement]:
    """Columns of the first projections and rows of the second, as Megatron has them."""
    if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
        return {"tp": loom.Shard(0)}
    return {"tp": loom.Shard(1)} if name.endswith(("o_proj", "down_proj")) else {}
