"""Distributed forms of reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from forms.net import Form, Net, sharded_dim, with_dims
from meshloom.ops import Call, Row


def var_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    shape, dim = call.shape("input"), call.arguments["dim"]
    dims = tuple(range(len(shape))) if dim is None else (dim % len(shape),)
    count = math.prod(shape[d] for d in dims)
    mean = net.all_reduce([x.sum(dims) for (x,) in held], "sum") / count
    for d in dims:
        mean = mean.unsqueeze(d)
    spread = net.all_reduce([(x - mean).square().sum(dims) for (x,) in held], "sum")
    found = spread / (count - call.arguments["correction"])
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


REDUCTIONS: dict[str, Form] = {
    "var": var_form,
    "argmax": index_form,
    "argmin": index_form,
    "max_dim": index_form,
    "min_dim": index_form,
}
