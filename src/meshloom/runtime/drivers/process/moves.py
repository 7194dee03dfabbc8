"""What cards in processes do for each other, as kernels: memory goes into a slot of a link, out of one, or elsewhere.

A slot is memory that both processes have mapped. Nothing of a message comes near the process of the owner.
"""

from __future__ import annotations

from typing import Any

import torch

from meshloom.runtime.virtual import take_message


def put(memory: torch.Tensor, slot: torch.Tensor, index: Any, start: int, stop: int) -> None:
    """Send: elements of this card's memory into a slot."""
    slot.copy_(memory[index].reshape(-1)[start:stop])


def take(memory: torch.Tensor, slot: torch.Tensor, index: Any, start: int, stop: int, op: str | None) -> None:
    """Receive: what is in a slot into this card's memory, or combined with it."""
    take_message(memory[index], start, stop, slot, op)


def duplicate(source: torch.Tensor, target: torch.Tensor, source_index: Any, target_index: Any) -> None:
    """Copy: elements of this card's memory to another place in it."""
    target[target_index] = source[source_index]
