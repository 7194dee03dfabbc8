"""Products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines import private
from meshloom.engines.torch_engine.local import Function


def _bilinear(input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """As a contraction, which can be mapped over devices."""
    found = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias


def _grouped_mm(input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's kernel where the rows are aligned, as those of a shard need not be; without data it knows bf16 only."""
    if (
        not input.is_meta
        and input.numel()
        and mat2.numel()
        and all(each.shape[-1] * each.element_size() % 16 == 0 and each.is_contiguous() for each in (input, mat2))
    ):
        return private.grouped_mm(input, mat2, offs=offs)
    return multiply_groups(input, mat2, offs, range(len(mat2)))


def multiply_groups(
    input: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor, numbers: Iterable[int]
) -> torch.Tensor:
    """The tokens of some experts, given with their numbers, and zeros for all other tokens."""
    found = input.new_zeros(input.shape[0], experts.shape[2])
    if not offs.is_meta:
        ends = [0, *offs.tolist()]
        for expert, number in zip(experts, numbers, strict=True):
            if number >= 0:
                found[ends[number] : ends[number + 1]] = input[ends[number] : ends[number + 1]] @ expert
    # who holds no expert has a gradient too: nothing is read of either
    return found + input[:0].sum(dtype=input.dtype) * experts[:0].sum(dtype=input.dtype)


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
    "grouped_mm": _grouped_mm,
    "cdist": torch.cdist,
    "addmm": torch.addmm,
    "addmv": torch.addmv,
    "addr": torch.addr,
    "addbmm": torch.addbmm,
    "baddbmm": torch.baddbmm,
}
