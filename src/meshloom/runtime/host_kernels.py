"""Python kernels on cards that cannot run Python: the host reads the memory, runs the kernel, and writes back.

So every program runs on every card from the first day. It is slow, and it is counted: `card.host_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshloom.runtime.card import Card, Kernel


def run_on_host(card: Card, kernel: Kernel, handles: Sequence[Any], args: Mapping[str, Any]) -> int:
    """Run a kernel on what a card holds; the bytes that went through the host. Memory that did not change stays."""
    before = [card.read(handle) for handle in handles]
    arrays = [each.clone() for each in before]
    kernel(*arrays, **args)
    moved = sum(each.nbytes for each in before)
    for handle, old, new in zip(handles, before, arrays, strict=True):
        if not _is_same(old, new):
            card.write(handle, new)
            moved += new.nbytes
    return moved


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays have the same bytes: nan is nan, and -0 is not 0."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return array.detach().reshape(-1).contiguous().view(torch.uint8)
