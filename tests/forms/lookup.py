"""Distributed forms of look-ups."""

from __future__ import annotations

import math
from typing import Any

import torch

from forms.net import Form, Net, compute, sharded_dim
from meshloom import Shard
from meshloom.ops import Call, Row


def embedding_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    found, start = [], 0
    for ids, weight in held:
        mine = (ids >= start) & (ids < start + len(weight))
        rows = weight[torch.where(mine, ids - start, 0)]
        found.append(torch.where(mine.unsqueeze(-1), rows, 0))
        start += len(weight)
    return found


def offset_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """A device that knows its chunk and where it starts, and nothing else: it has zeros elsewhere."""
    dim, shape = sharded_dim(row), call.shape("input")
    found, start = [], 0
    for chunk, *rest in held:
        full = torch.zeros(shape, dtype=chunk.dtype)
        full.narrow(dim, start, chunk.shape[dim]).copy_(chunk)
        (result,) = compute(call, [full, *rest], [shape])
        own = isinstance(row.outs[0], Shard)
        found.append(result.narrow(dim, start, chunk.shape[dim]) if own else result)
        start += chunk.shape[dim]
    return found


def counting_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Places in a device's own part of a sorted line; they add up."""
    return [compute(call, datas, [()])[0] for datas in held]


def best_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[Any]:
    """Each device gives its best k, filled up with the worst value; the best of these are the best of all."""
    dim, k, largest = sharded_dim(row), call.arguments["k"], call.arguments["largest"]
    values, indices, start = [], [], 0
    for (x,) in held:
        value, index = torch.topk(x, min(k, x.shape[dim]), dim, largest)
        short = [0, 0] * (x.dim() - 1) + [0, k - value.shape[dim]]
        moved = torch.nn.functional.pad(value.movedim(dim, 0), short, value=-math.inf if largest else math.inf)
        values.append(moved.movedim(0, -1).squeeze(-1) if k == 1 else moved.movedim(0, -1))
        indices.append(torch.nn.functional.pad(index.movedim(dim, 0) + start, short))
        start += x.shape[dim]
    every = torch.cat([each.unsqueeze(-1) if k == 1 else each for each in net.all_gather(values)], -1).movedim(-1, dim)
    found = torch.topk(every, k, dim, largest)
    places = torch.cat(indices).movedim(0, dim).gather(dim, found.indices)
    return [(found.values, places)] * len(held)


def experts_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """A device that knows which experts it has: tokens of others are zero."""
    found, start = [], 0
    for tokens, experts, offs in held:
        ends = [0, *offs.tolist()]
        result = tokens.new_zeros(len(tokens), experts.shape[2])
        for number, expert in enumerate(experts, start):
            result[ends[number] : ends[number + 1]] = tokens[ends[number] : ends[number + 1]] @ expert
        found.append(result)
        start += len(experts)
    return found


_BY_OFFSET = """
gather take_along_dim take index_select index index_put index_add index_copy index_fill scatter scatter_add
scatter_reduce tril triu
"""

LOOKUP: dict[str, Form] = {
    "embedding": embedding_form,
    "grouped_mm": experts_form,
    "topk": best_form,
    **dict.fromkeys(("searchsorted", "bucketize"), counting_form),
    **dict.fromkeys(_BY_OFFSET.split(), offset_form),
}
