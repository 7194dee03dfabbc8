"""Samples of contractions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.tensor.calling import table_call
from samples.drawing import FLOATS, Case, Draw, Operand, Sample


def matmul(d: Draw) -> Case:
    m, k, n = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    dtype = d.pick(FLOATS)
    kind = d.number(0, 5)
    left, right = (m, k), (k, n)
    if kind == 0:
        left = (k,)
    elif kind == 1:
        right = (k,)
    elif kind == 2:
        left, right = (k,), (k,)
    if len(left) == 2 and kind != 3:
        left = d.broadcast_to(batch) + left
    if len(right) == 2 and kind > 3:
        right = batch + right
    return Case((Operand(left, dtype), Operand(right, dtype)), torch.matmul)


def bmm(d: Draw) -> Case:
    b, m, k, n = (d.size() for _ in range(4))
    dtype = d.pick(FLOATS)
    return Case((Operand((b, m, k), dtype), Operand((b, k, n), dtype)), torch.bmm)


def grouped_mm(d: Draw) -> Case:
    """Tokens in order of their experts; some experts have none, and widths need not be aligned."""
    e, m, k, n = d.number(1, 5), d.number(0, 12), d.size(), d.size()
    tokens, experts = Operand((m, k), torch.float32), Operand((e, k, n), torch.float32)
    ends = Operand((e,), torch.int32, f"ends:{m}", gradient=False)
    function = d.pick((torch._grouped_mm, F.grouped_mm))

    def run(x: Any, w: Any, offs: Any) -> Any:
        if type(x) is not torch.Tensor:
            return function(x, w, offs=offs)
        bounds = [0, *offs.tolist()]
        return torch.cat([x[a:b] @ each for a, b, each in zip(bounds[:-1], bounds[1:], w, strict=True)])

    return Case((tokens, experts, ends), run)


def expert_mm(d: Draw) -> Case:
    """Rows in parts, each with its experts; some experts have none, some rows have no expert."""
    parts, experts, rows = d.number(1, 4), d.number(1, 9), d.number(1, 6)
    lead, k, n = d.shape(0, 2, empty=False), d.size(), d.size()
    shape = (*lead, parts, rows)
    numbers = Operand(shape, torch.int64, f"numbers:{-(-experts // parts)}", gradient=False)
    dtype = d.pick(FLOATS)

    def run(x: Any, w: Any, number: Any) -> Any:
        if type(x) is not torch.Tensor:
            return table_call("expert_mm", x, w, number)
        first = torch.arange(parts).unsqueeze(-1) * -(-experts // parts)
        expert = torch.where(number < 0, experts, number + first).clamp(max=experts)
        stack = torch.cat([w, torch.zeros_like(w[:1])])
        return (x.unsqueeze(-2) @ stack[expert]).squeeze(-2)

    return Case((Operand((*shape, k), dtype), Operand((experts, k, n), dtype), numbers), run)


def cdist(d: Draw) -> Case:
    p, r, m, batch = d.size(), d.size(), d.size(), d.shape(0, 2, empty=False)
    power = d.pick((2.0, 1.0, 3.0))
    pair = (Operand((*batch, p, m), torch.float32), Operand((*batch, r, m), torch.float32))
    return Case(pair, lambda x, y: torch.cdist(x, y, power, "donot_use_mm_for_euclid_dist"))


def mm(d: Draw) -> Case:
    m, k, n = (d.size() for _ in range(3))
    return Case((Operand((m, k), torch.float32), Operand((k, n), torch.float32)), torch.mm)


def mv(d: Draw) -> Case:
    m, k = d.size(), d.size()
    return Case((Operand((m, k), torch.float32), Operand((k,), torch.float32)), torch.mv)


def dot(d: Draw) -> Case:
    k = d.size()
    return Case((Operand((k,), torch.float32), Operand((k,), torch.float32)), torch.dot)


def linear(d: Draw) -> Case:
    k, n, dtype = d.size(), d.size(), d.pick(FLOATS)
    operands = [Operand((*d.shape(0, 2), k), dtype), Operand((n, k), dtype)]
    if d.yes():
        operands.append(Operand((n,), dtype))
    return Case(tuple(operands), F.linear)


def einsum(d: Draw) -> Case:
    sizes = {label: d.size() for label in "abcde"}
    text = d.pick(
        ("ab,bc->ac", "abc,cd->abd", "abc,abd->acd", "ab,ab->", "ab,cb->ca", "aab->b", "abc->ca", "ab,bc,cd->ad",
         "a,b->ab", "...ab,...bc->...ac", "ab->", "ab,b", "bca,cd->dab")
    )  # fmt: skip
    shapes = [_einsum_shape(part, sizes) for part in text.partition("->")[0].split(",")]
    return Case(tuple(Operand(shape, torch.float32) for shape in shapes), lambda *xs: torch.einsum(text, *xs))


def _einsum_shape(labels: str, sizes: dict[str, int]) -> tuple[int, ...]:
    batch = (sizes["e"],) if "..." in labels else ()
    return batch + tuple(sizes[label] for label in labels.replace("...", ""))


def outer(d: Draw) -> Case:
    return Case((Operand((d.size(),), torch.float32), Operand((d.size(),), torch.float32)), torch.outer)


def inner(d: Draw) -> Case:
    k = d.size()
    shapes = [(*d.shape(0, 2), k), (*d.shape(0, 1), k)]
    if d.number(0, 9) == 0:
        shapes[d.number(0, 1)] = ()
    return Case(tuple(Operand(shape, torch.float32) for shape in shapes), torch.inner)


def tensordot(d: Draw) -> Case:
    first, second, m, n = (d.size() for _ in range(4))
    kind = d.number(0, 3)
    if kind == 0:
        shapes, dims = ((m, first, second), (first, second, n)), 2
    elif kind == 1:
        shapes, dims = ((first, m, second), (n, second, first)), ([0, -1], [2, 1])
    elif kind == 2:
        shapes, dims = ((m, first), (first,)), 1
    else:
        shapes, dims = ((m,), (n, first)), 0
    operands = tuple(Operand(shape, torch.float32) for shape in shapes)
    return Case(operands, lambda a, b: torch.tensordot(a, b, dims))


def bilinear(d: Draw) -> Case:
    i, j, out = (d.size(empty=False) for _ in range(3))
    batch = d.shape(1, 2, empty=False)
    shapes = [(*batch, i), (*batch, j), (out, i, j), *([(out,)] if d.yes() else [])]
    return Case(tuple(Operand(shape, torch.float32) for shape in shapes), F.bilinear)


def added(function: Callable[..., Any], spec: str, broadcasts: bool = True) -> Sample:
    """A product by labels that is added to something of its shape, or that broadcasts to it."""

    def sample(d: Draw) -> Case:
        sizes = {label: d.size() for label in "bmkn"}
        left, out = spec.split("->")
        target = tuple(sizes[x] for x in out)
        bias = d.broadcast_to(target) if broadcasts and d.yes() else target
        shapes = [bias, *(tuple(sizes[x] for x in part) for part in left.split(","))]
        options = d.pick(({}, {"beta": 2, "alpha": 0.5}))
        return Case(tuple(Operand(shape, torch.float32) for shape in shapes), lambda *xs: function(*xs, **options))

    return sample


CONTRACTIONS: dict[str, Sample] = {
    **{each.__name__: each for each in (matmul, mm, bmm, mv, dot, linear, outer, inner, tensordot, bilinear)},
    **{each.__name__: each for each in (grouped_mm, expert_mm, cdist, einsum)},
    "vdot": lambda d: dataclasses.replace(dot(d), run=torch.vdot),
    "addmm": added(torch.addmm, "mk,kn->mn"),
    "addmv": added(torch.addmv, "mk,k->m", broadcasts=False),  # torch resizes what it adds to
    "addr": added(torch.addr, "m,n->mn"),
    "addbmm": added(torch.addbmm, "bmk,bkn->mn"),
    "baddbmm": added(torch.baddbmm, "bmk,bkn->bmn"),
}  # fmt: skip
