"""Products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function


def _bilinear(input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """As a contraction, which can be mapped over devices."""
    found = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias


CONTRACTIONS: dict[str, Function] = {
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "dot": torch.dot,
    "linear": F.linear,
    "einsum": lambda equation, operands: torch.einsum(equation, *operands),
    "outer": torch.outer,
    "inner": torch.inner,
    "vdot": torch.vdot,
    "tensordot": torch.tensordot,
    "bilinear": _bilinear,
    "addmm": torch.addmm,
    "addmv": torch.addmv,
    "addr": torch.addr,
    "addbmm": torch.addbmm,
    "baddbmm": torch.baddbmm,
}
