"""Distributed forms of reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from forms.net import Form, Net, compute, sharded_dim, with_dims
from meshloom.ops import Call, Row
from meshloom.ops.labels import normal_dims


def var_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    shape, dim = call.shape("input"), call.arguments["dim"]
    dims = tuple(range(len(shape))) if dim is None else (dim % len(shape),)
    count = math.prod(shape[d] for d in dims)
    mean = net.all_reduce([x.sum(dims) for (x,) in held], "sum") / count
    for d in dims:
        mean = mean.unsqueeze(d)
    spread = net.all_reduce([(x - mean).square().sum(dims) for (x,) in held], "sum")
    found = spread / (count - call.arguments["correction"])
    found = found.sqrt() if call.op == "std" else found
    return [with_dims(found, dims, call.arguments["keepdim"])] * len(held)


def index_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[Any]:
    shape, dim, largest = call.shape("input"), call.arguments["dim"], call.op in ("argmax", "max_dim")
    keepdim, sharded = call.arguments["keepdim"], sharded_dim(row)
    dims = tuple(range(len(shape))) if dim is None else (dim % len(shape),)
    positions = torch.arange(math.prod(shape)).view(shape)
    if dim is not None:
        positions = (
            torch.arange(shape[dims[0]]).view([-1 if d == dims[0] else 1 for d in range(len(shape))]).expand(shape)
        )
    values, indices, start = [], [], 0
    for (x,) in held:
        place = positions.narrow(sharded, start, x.shape[sharded])
        start += x.shape[sharded]
        kept = [d for d in range(x.dim()) if d not in dims]
        flat = x.permute(*kept, *dims).flatten(len(kept))
        spots = place.permute(*kept, *dims).flatten(len(kept))
        best = (flat.max(-1) if largest else flat.min(-1)).indices.unsqueeze(-1)
        values.append(flat.gather(-1, best).squeeze(-1))
        indices.append(spots.gather(-1, best).squeeze(-1))
    value, index = (with_dims(each, dims, keepdim) for each in net.best(values, indices, largest))
    return [index if call.op.startswith("arg") else (value, index)] * len(held)


def _dims(call: Call) -> tuple[int, ...]:
    return normal_dims(call.arguments["dim"], len(call.shape("input")))


def nanmean_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dims = _dims(call)
    total = net.all_reduce([x.nansum(dims) for (x,) in held], "sum")
    count = net.all_reduce([(~x.isnan()).sum(dims) for (x,) in held], "sum")
    return [with_dims(total / count, dims, call.arguments["keepdim"])] * len(held)


def logsumexp_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dims = _dims(call)
    high = net.all_reduce([_highest(x, dims) for (x,) in held], "max")
    total = net.all_reduce([(x - with_dims(high, dims, True)).exp().sum(dims) for (x,) in held], "sum")
    return [with_dims(high + total.log(), dims, call.arguments["keepdim"])] * len(held)


def _highest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The maximum; of nothing, minus infinity."""
    if all(x.shape[dim] for dim in dims):
        return x.amax(dims)
    return x.new_full([size for dim, size in enumerate(x.shape) if dim not in dims], -math.inf)


def extreme_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dims, op = _dims(call), "max" if call.op == "amax" else "min"
    found = net.all_reduce([getattr(x, call.op)(dims) for (x,) in held], op)
    return [with_dims(found, dims, call.arguments["keepdim"])] * len(held)


def norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dims, order = _dims(call), call.arguments["ord"]
    if abs(order) == math.inf:
        sizes = [x.abs().amax(dims) if order > 0 else x.abs().amin(dims) for (x,) in held]
        found = net.all_reduce(sizes, "max" if order > 0 else "min")
        return [with_dims(found, dims, call.arguments["keepdim"])] * len(held)
    total = net.all_reduce([x.abs().pow(order).sum(dims) for (x,) in held], "sum")
    return [with_dims(total.pow(1 / order), dims, call.arguments["keepdim"])] * len(held)


_COMBINE: dict[str, Any] = {"cumsum": torch.add, "cumprod": torch.mul, "logcumsumexp": torch.logaddexp}


def scan_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Each device scans what it holds, and then adds the totals of those before it."""
    dim, combine = sharded_dim(row), _COMBINE[call.op]
    scans = [compute(call, h, [h[0].shape])[0] for h in held]
    totals = net.all_gather([each.select(dim, -1) for each in scans])
    found, before = [], None
    for mine, total in zip(scans, totals, strict=True):
        found.append(mine if before is None else combine(mine, before.unsqueeze(dim)))
        before = total if before is None else combine(before, total)
    return found


def indexed_scan_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[Any]:
    """The best value so far of the devices before, with its index, where nothing better is held."""
    dim, better = sharded_dim(row), torch.ge if call.op == "cummax" else torch.le
    function, found, start = getattr(torch, call.op), [], 0
    scans = [function(x, dim) for (x,) in held]
    net.all_gather([each.values.select(dim, -1) for each in scans])
    before: Any = None
    for values, indices in scans:
        indices, start = indices + start, start + values.shape[dim]
        if before is not None:
            mine = better(values, before[0])
            values, indices = torch.where(mine, values, before[0]), torch.where(mine, indices, before[1])
        found.append((values, indices))
        before = (values.narrow(dim, -1, 1), indices.narrow(dim, -1, 1))
    return found


REDUCTIONS: dict[str, Form] = {
    **dict.fromkeys(("var", "std"), var_form),
    "nanmean": nanmean_form,
    "logsumexp": logsumexp_form,
    "linalg_vector_norm": norm_form,
    **dict.fromkeys(("amax", "amin"), extreme_form),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), scan_form),
    **dict.fromkeys(("cummax", "cummin"), indexed_scan_form),
    **dict.fromkeys(("argmax", "argmin", "max_dim", "min_dim"), index_form),
}
