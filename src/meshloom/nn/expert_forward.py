"""The forward of a module that has the weights of all its experts in stacks, as the models of transformers have them.

A plan names such modules (`experts=[...]`): their tokens then travel to the devices that have the experts. What is read
of a module are the attributes by which transformers lets one exchange the implementation of experts.
"""

from __future__ import annotations

from typing import Any

import torch

from meshloom.errors import ArgumentError
from meshloom.nn.experts import Dispatch, combine, dispatch, go_home

_NEEDED = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")


def can_dispatch(module: torch.nn.Module) -> bool:
    """Whether a module is such a stack of experts."""
    return all(hasattr(module, name) for name in _NEEDED)


def check_experts(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """An error unless tokens can travel to the experts of a module."""
    if not can_dispatch(module):
        missing = [each for each in _NEEDED if not hasattr(module, each)]
        raise ArgumentError(
            f"{name!r} is a {type(module).__name__} without {', '.join(missing)}: it is no stack of experts as the "
            "models of transformers have them",
            fix="leave it out of experts=, and call loom.experts.dispatch and combine in its forward",
        )
    return module


def forward_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the module's own forward gives, tokens [tokens, width], with tokens that travel and experts that stay."""
    sent = dispatch(hidden_states, top_k_index, module.down_proj)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    wide = _multiply(module, sent, sent.rows, name)
    wide = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
    rows = _multiply(module, sent, wide, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return go_home(combine(sent, rows, top_k_weights).to(hidden_states.dtype), hidden_states)


def _multiply(module: Any, sent: Dispatch, rows: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return sent.multiply(rows, weight if module.is_transposed else weight.transpose(-2, -1), bias)
