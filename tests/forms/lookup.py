"""Distributed forms of look-ups."""

from __future__ import annotations

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


_BY_OFFSET = """
gather take_along_dim take index_select index index_put index_add index_copy index_fill scatter scatter_add
scatter_reduce tril triu
"""

LOOKUP: dict[str, Form] = {
    "embedding": embedding_form,
    **dict.fromkeys(("searchsorted", "bucketize"), counting_form),
    **dict.fromkeys(_BY_OFFSET.split(), offset_form),
}
