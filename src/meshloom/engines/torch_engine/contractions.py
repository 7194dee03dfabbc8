"""Products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function

CONTRACTIONS: dict[str, Function] = {
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "dot": torch.dot,
    "linear": F.linear,
    "einsum": lambda equation, operands: torch.einsum(equation, *operands),
}
