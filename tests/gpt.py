"""The GPT of examples/transformer.py at a size that trains in seconds: here, and as a function for `ranks.run`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

import meshloom as loom
from meshloom.comms import wire

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from transformer import GPT, PLANS, Text, Trainer

SIZES = {"width": 32, "heads": 4, "hidden": 48, "layers": 2}
ROWS, LENGTH = 8, 16


def made() -> tuple[Text, GPT]:
    """The text and a model, the same every time."""
    torch.manual_seed(0)
    text = Text()
    return text, GPT(len(text.letters), **SIZES)


def trainer(plan: str | None) -> tuple[Text, Trainer]:
    """The model on the mesh by a plan, or dense."""
    text, model = made()
    if plan is None:
        return text, Trainer(model)
    return text, Trainer(model, loom.open_mesh((2, 4), axes=("dp", "tp")), PLANS[plan])


def losses(plan: str | None, steps: int, seed: int = 1) -> list[float]:
    """The loss of every step."""
    text, model = trainer(plan)
    return [model.step(*batch) for batch in text.batches(steps, ROWS, LENGTH, seed)]


def on_a_rank(plans: list[str], steps: int) -> tuple[dict[str, list[float]], Counter[str], tuple[int, ...]]:
    """For a rank: the losses by plan, the calls of one tensor-parallel step, and how processes split the mesh."""
    return {plan: losses(plan, steps) for plan in plans}, calls_of_one_step("tensor"), loom.current_mesh().processes


def calls_of_one_step(plan: str) -> Counter[str]:
    """For a rank: what one step asks of `torch.distributed`, the caches being warm."""
    text, model = trainer(plan)
    first, second = text.batches(2, ROWS, LENGTH)
    model.step(*first)
    calls: Counter[str] = Counter()
    begin = wire.begin

    def counted(kind, group, *rest):
        calls[f"{kind} of {group.size}"] += 1
        return begin(kind, group, *rest)

    wire.begin = counted
    try:
        model.step(*second)
    finally:
        wire.begin = begin
    return calls
