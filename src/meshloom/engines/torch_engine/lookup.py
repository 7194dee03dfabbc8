"""Look-ups: an index counts elements, so padding of the dim it counts is taken off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local, aware


@aware
def _embedding(local: Local, input: Any, weight: Any, padding_idx: int | None) -> torch.Tensor:
    if padding_idx is not None and padding_idx < 0:
        padding_idx += local.call.shape("weight")[0]
    return F.embedding(input, local.trimmed("weight", weight, 0), padding_idx)


LOOKUP: dict[str, Function] = {
    "embedding": _embedding,
}
