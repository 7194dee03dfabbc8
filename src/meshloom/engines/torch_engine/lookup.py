"""Look-ups: an index counts elements, so padding of the dim it counts is taken off.

In one process these ops run without padding. While an axis leads (the result stays partial), and where processes split
the mesh, arrays come with theirs; then `whole` takes it off the dim that is looked up, and `_back` puts it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.layout import pad
from meshloom.engines.torch_engine.local import Function, Local, aware


@aware
def _embedding(local: Local, input: Any, weight: Any, padding_idx: int | None) -> torch.Tensor:
    if padding_idx is not None and padding_idx < 0:
        padding_idx += local.call.shape("weight")[0]
    return F.embedding(input, local.trimmed("weight", weight, 0), padding_idx)


def _all_whole(local: Local, data: torch.Tensor) -> torch.Tensor:
    for dim in range(data.dim()):
        data = local.whole("input", data, dim)
    return data


def _back(local: Local, input: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """The result with the padding that was taken off the input."""
    if result.shape == input.shape:
        return result
    return pad(result, dim, local.call.shape("input")[dim], local.ins[local.call.index("input")].shards[dim])


def _finding(function: Callable[..., torch.Tensor]) -> Function:
    """An op that looks elements of the input up along `dim`."""

    @aware
    def find(local: Local, input: torch.Tensor, dim: int | None = None, **others: Any) -> torch.Tensor:
        if dim is None:
            return function(_all_whole(local, input).contiguous(), *(each.contiguous() for each in others.values()))
        return function(local.whole("input", input, dim % max(input.dim(), 1)), dim=dim, **others)

    return find


def _writing(function: Callable[..., torch.Tensor]) -> Function:
    """An op that writes into the input along `dim`."""

    @aware
    def write(local: Local, input: torch.Tensor, dim: int, **others: Any) -> torch.Tensor:
        place = dim % max(input.dim(), 1)
        result = function(local.whole("input", input, place), dim=place, **others)
        return _back(local, input, result, place)

    return write


def _scatter(input: Any, dim: int, index: Any, src: Any, value: Any, reduce: str | None) -> torch.Tensor:
    content = value if src is None else src
    if reduce is None:
        return torch.scatter(input, dim, index, content)
    return torch.scatter(input, dim, index, content, reduce=reduce)


def indexed_dims(indices: tuple[Any, ...]) -> list[int]:
    return [dim for dim, each in enumerate(indices) if each is not None]


def entries(indices: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in indices)


@aware
def _index(local: Local, input: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    for dim in indexed_dims(indices):
        input = local.whole("input", input, dim)
    return input[entries(indices)]


@aware
def _index_put(
    local: Local, input: torch.Tensor, indices: tuple[Any, ...], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    result, dims = input, indexed_dims(indices)
    for dim in dims:
        result = local.whole("input", result, dim)
    result = torch.ops.aten.index_put(result, indices, values, accumulate)
    for dim in dims:
        result = _back(local, input, result, dim)
    return result


# ops that find elements along a dim, and ops that write them; processes that share the dim do so in their own way
FINDS: dict[str, Function] = {
    "gather": torch.gather,
    "take_along_dim": torch.take_along_dim,
    "index_select": torch.index_select,
}
WRITES: dict[str, Function] = {
    "index_add": torch.index_add,
    "index_copy": torch.index_copy,
    "index_fill": torch.index_fill,
    "scatter": _scatter,
    "scatter_add": torch.scatter_add,
    "scatter_reduce": torch.scatter_reduce,
}

LOOKUP: dict[str, Function] = {
    "embedding": _embedding,
    **{name: _finding(function) for name, function in FINDS.items()},
    "take": _finding(torch.take),
    "index": _index,
    "index_put": _index_put,
    **{name: _writing(function) for name, function in WRITES.items()},
    "one_hot": lambda input, num_classes: F.one_hot(input, num_classes),
}
