"""Samples of ops that put elements in order."""

from __future__ import annotations

from typing import Any

import torch

from samples.drawing import NUMBERS, Case, Draw, Operand, Sample

_PLAIN = (torch.float32, torch.int64)


def sort(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim, down = d.dim(shape), d.yes()
    return Case((Operand(shape, d.pick(NUMBERS)),), lambda x: torch.sort(x, stable=True, dim=dim, descending=down))


def argsort(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim, down = d.dim(shape), d.yes()
    return Case((Operand(shape, d.pick(NUMBERS)),), lambda x: torch.argsort(x, dim=dim, descending=down, stable=True))


def topk(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim, largest = d.dim(shape), d.yes()
    k = d.number(0, shape[dim])
    return Case((Operand(shape, torch.float32),), lambda x: torch.topk(x, k, dim, largest))


def searchsorted(d: Draw) -> Case:
    batch = d.shape(0, 2, empty=False) if d.yes() else ()
    dtype, right = d.pick(_PLAIN), d.yes()
    line = Operand((*batch, d.size()), dtype, "sorted")
    values = Operand((*batch, d.size()) if batch else d.shape(0, 2), dtype)
    return Case((line, values), lambda s, x: torch.searchsorted(s, x, right=right))


def bucketize(d: Draw) -> Case:
    dtype, options = d.pick(_PLAIN), {"right": d.yes(), "out_int32": d.yes()}
    if d.number(0, 5) == 0:
        line = Operand((d.size(),), dtype, "sorted")
        return Case((line,), lambda line: torch.bucketize(1, line, **options))
    operands = (Operand(d.shape(), dtype), Operand((d.size(),), dtype, "sorted"))

    def run(x: Any, line: Any) -> Any:
        return torch.bucketize(x, line, **options)

    return Case(operands, run)


ORDER: dict[str, Sample] = {
    "sort": sort,
    "argsort": argsort,
    "topk": topk,
    "searchsorted": searchsorted,
    "bucketize": bucketize,
}
