"""Products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from meshloom.engines import private
from meshloom.engines.torch_engine.local import Function, Local, shared


def _bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As a contraction, which can be mapped over devices."""
    found = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias


@shared
def _grouped_mm(local: Local, input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's kernel where the rows are aligned, as those of a shard need not be; without data it knows bf16 only, and
    all experts have equally many tokens.

    Otherwise the tokens of the experts that are here, and zeros for those of others: their sum has them all.
    """
    mat2 = local.whole("mat2", mat2, 0) if local.peers.alone else mat2  # padding is no expert
    if (
        local.peers.alone
        and not input.is_meta
        and input.numel()
        and mat2.numel()
        and all(each.shape[-1] * each.element_size() % 16 == 0 and each.is_contiguous() for each in (input, mat2))
    ):
        found: torch.Tensor = private.grouped_mm(input, mat2, offs=offs)
        return found
    if local.peers.alone and (input.is_meta or offs.is_meta):
        return _share_evenly(input, mat2)
    found = input.new_zeros(input.shape[0], mat2.shape[2])
    if not offs.is_meta:
        ends = [0, *offs.tolist()]
        numbers = range(len(mat2)) if local.peers.alone else local.positions("mat2", 0).tolist()
        for expert, number in zip(mat2, numbers, strict=True):
            if number >= 0:
                found[ends[number] : ends[number + 1]] = input[ends[number] : ends[number + 1]] @ expert
    # who holds no expert has a gradient too: nothing is read of either
    return found + input[:0].sum(dtype=input.dtype) * mat2[:0].sum(dtype=input.dtype)


def _share_evenly(rows: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Rows in equal shares times the matrices, for what costs are counted from: of products without data."""
    count, experts = rows.shape[0], mat2.shape[0]
    each = -(-count // max(experts, 1))
    padded = rows if each * experts == count else F.pad(rows, (0, 0, 0, each * experts - count))
    return torch.bmm(padded.unflatten(0, (experts, each)), mat2).flatten(0, 1).narrow(0, 0, count)


def _expert_mm(input: torch.Tensor, mat2: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The rows in the order of their experts, one product for each, and back. Without data all have equally many."""
    rows, experts = input.flatten(0, -2), mat2.shape[0]
    shape = (*input.shape[:-1], mat2.shape[2])
    if input.is_meta or number.is_meta:
        return _share_evenly(rows, mat2).reshape(shape)
    own = -(-experts // max(input.shape[-3], 1))  # experts of a part
    first = torch.arange(input.shape[-3]).unsqueeze(-1) * own
    expert = torch.where((number < 0) | (number >= own), experts, number + first).flatten()
    order = expert.argsort(stable=True)
    counts = expert.bincount(minlength=experts + 1)[:experts].tolist()
    order = order[: sum(counts)]
    with torch.autocast(rows.device.type, enabled=False):  # as torch's own product in groups
        products = [some @ each for some, each in zip(rows[order].split(counts), mat2.unbind(), strict=True)]
    return rows.new_zeros(rows.shape[0], mat2.shape[2]).index_copy(0, order, torch.cat(products)).reshape(shape)


def _addbmm(input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """torch's own; mapped over devices it adds integers up in int64."""
    found = torch.addbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    return found.to(batch1.dtype) if found.dtype == torch.int64 else found


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
    "expert_mm": _expert_mm,
    "cdist": torch.cdist,
    "addmm": torch.addmm,
    "addmv": torch.addmv,
    "addr": torch.addr,
    "addbmm": _addbmm,
    "baddbmm": torch.baddbmm,
}
