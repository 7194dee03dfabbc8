"""Samples of reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from samples.drawing import ALL, FLOATS, NUMBERS, Case, Draw, Operand, Sample


def reduction(
    function: Callable[..., Any], dtypes: Sequence[torch.dtype] = NUMBERS, several: bool = True, empty: bool = True
) -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(0, 3, empty), d.pick(dtypes)
        operand = (Operand(shape, dtype),)
        keep = d.yes()
        if not shape or d.number(0, 3) == 0:
            return Case(operand, function)
        dim: Any = d.dim(shape)
        if several and d.yes():
            dim = tuple(d.pick((i, i - len(shape))) for i in range(len(shape)) if d.yes()) or (dim,)
        return Case(operand, lambda x: function(x, dim=dim, keepdim=keep))

    return sample


def var(d: Draw) -> Case:
    shape, correction, keep = d.shape(1, 3, empty=False), d.pick((0, 1)), d.yes()
    dim = d.pick((None, d.dim(shape)))
    shape = tuple(size + 2 for size in shape)
    return Case((Operand(shape, torch.float32),), lambda x: torch.var(x, dim, correction=correction, keepdim=keep))


def along(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = NUMBERS) -> Sample:
    """max and min along a dim, as (values, indices); values only, since ties have no fixed index."""

    def sample(d: Draw) -> Case:
        shape, keep = d.shape(1, 3, empty=False), d.yes()
        dim = d.dim(shape)
        return Case((Operand(shape, d.pick(dtypes)),), lambda x: tuple(function(x, dim, keep)))

    return sample


def arg(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape, keep = d.shape(1, 3, empty=False), d.yes()
        dim = d.pick((None, d.dim(shape)))
        return Case((Operand(shape, d.pick((torch.float32, torch.int64))),), lambda x: function(x, dim, keepdim=keep))

    return sample


REDUCTIONS: dict[str, Sample] = {
    "sum": reduction(torch.sum, ALL),
    "mean": reduction(torch.mean, FLOATS),
    "amax": reduction(torch.amax, ALL, empty=False),
    "amin": reduction(torch.amin, ALL, empty=False),
    "prod": reduction(torch.prod, NUMBERS, several=False),
    "any": reduction(torch.any, ALL),
    "all": reduction(torch.all, ALL),
    "var": var,
    "argmax": arg(torch.argmax),
    "argmin": arg(torch.argmin),
    "max_dim": along(torch.max),
    "min_dim": along(torch.min),
}  # fmt: skip
