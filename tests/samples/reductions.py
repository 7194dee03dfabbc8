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


def wild(function: Callable[..., Any]) -> Sample:
    """A reduction of elements that nan and infinity are among."""

    def sample(d: Draw) -> Case:
        case = reduction(function, (torch.float32,))(d)
        return Case(tuple(Operand(each.shape, each.dtype, "wild") for each in case.operands), case.run)

    return sample


def spread(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape, correction, keep = d.shape(1, 3, empty=False), d.pick((0, 1)), d.yes()
        dim = d.pick((None, d.dim(shape)))
        shape = tuple(size + 2 for size in shape)
        return Case((Operand(shape, torch.float32),), lambda x: function(x, dim, correction=correction, keepdim=keep))

    return sample


def logsumexp(d: Draw) -> Case:
    shape, keep = d.shape(1, 3), d.yes()
    dim = d.pick((d.dim(shape), tuple(range(len(shape)))))
    return Case((Operand(shape, d.pick(FLOATS)),), lambda x: torch.logsumexp(x, dim, keep))


def vector_norm(d: Draw) -> Case:
    shape, keep = d.shape(1, 3, empty=False), d.yes()
    order = d.pick((2, 2, 1, 3, 0, 0.5, -2, float("inf"), float("-inf")))
    dim = d.pick((None, d.dim(shape)))
    run = (lambda x: torch.norm(x, order, dim, keep)) if d.yes() and dim is not None else (
        lambda x: torch.linalg.vector_norm(x, order, dim, keep)
    )  # fmt: skip
    return Case((Operand(shape, torch.float32),), run)


def count_nonzero(d: Draw) -> Case:
    shape = d.shape(0, 3)
    dim = d.pick((None, d.dim(shape))) if shape else None
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.count_nonzero(x, dim))


def quantile(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(1, 3, empty=False)
        q = d.pick((0.5, 0.0, 0.3, 1.0))
        options = {"keepdim": d.yes(), "interpolation": d.pick(("linear", "lower", "nearest"))}
        dim = d.pick((None, d.dim(shape)))
        return Case((Operand(shape, torch.float32),), lambda x: function(x, q, dim, **options))

    return sample


def kthvalue(d: Draw) -> Case:
    shape, keep = d.shape(1, 3, empty=False), d.yes()
    dim = d.dim(shape)
    k = d.number(1, shape[dim])
    return Case((Operand(shape, torch.float32),), lambda x: tuple(torch.kthvalue(x, k, dim, keep)))


def scan(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64)) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(0, 3)
        dim = d.dim(shape) if shape else d.pick((0, -1))
        return Case((Operand(shape, d.pick(dtypes)),), lambda x: _listed(function(x, dim)))

    return sample


def _listed(found: Any) -> Any:
    return tuple(found) if isinstance(found, tuple) else found


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
    "var": spread(torch.var),
    "std": spread(torch.std),
    "nansum": wild(torch.nansum),
    "nanmean": wild(torch.nanmean),
    "count_nonzero": count_nonzero,
    "logsumexp": logsumexp,
    "linalg_vector_norm": vector_norm,
    "median": along(torch.median, (torch.float32, torch.int64)),
    "nanmedian": along(torch.nanmedian, (torch.float32, torch.int64)),
    "mode": along(torch.mode, (torch.float32, torch.int64)),
    "quantile": quantile(torch.quantile),
    "nanquantile": quantile(torch.nanquantile),
    "kthvalue": kthvalue,
    "cumsum": scan(torch.cumsum, ALL),
    "cumprod": scan(torch.cumprod),
    "logcumsumexp": scan(torch.logcumsumexp, (torch.float32,)),
    "cummax": scan(torch.cummax),
    "cummin": scan(torch.cummin),
    "argmax": arg(torch.argmax),
    "argmin": arg(torch.argmin),
    "max_dim": along(torch.max),
    "min_dim": along(torch.min),
}  # fmt: skip
