"""Look-ups and writes by index: an index counts elements, so padding of the dim it counts is taken off.

In one process these ops run without padding. While an axis leads (the result stays partial), and where processes split
the mesh, arrays come with theirs; then `whole` takes it off the dim that is looked up, and `_back` puts it back. Where
peers hold parts of that dim each finds, or takes, what falls to it: what is elsewhere is zero in what is found, and
goes to a spare line in what is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local, aware, shared
from meshloom.ops.lookup import indexed_places

Find = Callable[..., torch.Tensor]


def _places(local: Local, index: torch.Tensor, dim: int, name: str = "input", lowest: int = 0) -> torch.Tensor:
    """Where this process stores what an index names along a dim; -1 where it does not. Its dtype is the index's own.

    Indices go from `lowest`, 0 or the negative size.
    """
    if index.is_meta:
        return torch.empty_like(index)
    spots = local.spots(name, dim)
    size = len(spots)
    if index.numel():
        least, most = (int(each) for each in torch.aminmax(index))
        if least < lowest or most >= size:
            wrong = least if least < lowest else most
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
    return spots.to(index.device)[torch.where(index < 0, index + size, index)].to(index.dtype)


@shared
def _embedding(local: Local, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    if local.peers.alone:
        if padding_idx is not None and padding_idx < 0:
            padding_idx += local.call.shape("weight")[0]
        return F.embedding(input, local.trim("weight", weight, 0), padding_idx)
    place = _places(local, input, 0, "weight")
    missing = place < 0
    ignored = -1 if padding_idx is None else int(local.spots("weight", 0)[padding_idx])
    found = F.embedding(torch.where(missing, 0, place), weight, None if ignored < 0 else ignored)
    return found.masked_fill(missing.unsqueeze(-1), 0)


def _finding(function: Callable[..., torch.Tensor], wraps: bool = False) -> Function:
    """An op that looks elements of the input up along `dim`. Its index may count modulo the size."""

    @shared
    def find(local: Local, input: torch.Tensor, dim: int | None = None, **others: Any) -> torch.Tensor:
        if dim is None:
            return _take(local, input, next(iter(others.values())), function)
        if local.peers.alone:
            return function(local.whole("input", input, dim % max(input.dim(), 1)), dim=dim, **others)
        dim, name = dim % input.dim(), "indices" if "indices" in others else "index"
        index, size = others.pop(name), local.call.shape("input")[dim]
        place = _places(local, index % size if wraps and size else index, dim)
        missing = place < 0
        found = function(input, dim=dim, **{name: torch.where(missing, 0, place)}, **others)
        if missing.dim() != found.dim():  # a line of indices
            missing = missing.view([-1 if d == dim else 1 for d in range(found.dim())])
        return found.masked_fill(missing, 0)

    return find


@shared
def _take(local: Local, input: torch.Tensor, index: torch.Tensor, function: Find = torch.take) -> torch.Tensor:
    """Elements by their flat position in the whole; `take` also counts from the end."""
    if local.peers.alone:
        for dim in range(input.dim()):
            input = local.whole("input", input, dim)
        return function(input.contiguous(), index.contiguous())
    is_take, shape = function is torch.take, local.call.shape("input")
    index, size = index if is_take else index.flatten(), torch.Size(shape).numel()
    lowest = -size if is_take else 0
    if not index.is_meta and index.numel() and not lowest <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(f"out of range: tried to take elements {index.tolist()} of a tensor of {size}")
    rest = torch.where(index < 0, index + size, index)
    flat, missing = torch.zeros_like(rest), torch.zeros_like(rest, dtype=torch.bool)
    step, stride = 1, 1
    for dim in reversed(range(len(shape))):
        place = _places(local, rest // step % shape[dim], dim)
        missing, flat = missing | (place < 0), flat + torch.where(place < 0, 0, place) * stride
        step, stride = step * shape[dim], stride * input.shape[dim]
    return torch.take(input.contiguous(), flat).masked_fill(missing, 0)


@aware
def _take_rows(local: Local, input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One look-up in the rows of all batches."""
    rows = local.whole("input", input, input.dim() - 2)
    count, width = rows.shape[-2:]
    batches = torch.arange(math.prod(rows.shape[:-2]), device=index.device).reshape(*rows.shape[:-2], 1)
    missing = index < 0
    places = torch.where(missing, 0, index) + batches * count
    if not count:
        return rows.sum(-2, keepdim=True).expand(*index.shape, width)  # zeros that lead to the input
    found = rows.flatten(0, -2).index_select(0, places.flatten()).reshape(*index.shape, width)
    return found.masked_fill(missing.unsqueeze(-1), 0)


def _writing(function: Callable[..., torch.Tensor], from_end: bool = False) -> Function:
    """An op that writes into the input along `dim`. Its index may count from the end."""

    @shared
    def write(local: Local, input: torch.Tensor, dim: int, index: torch.Tensor, **others: Any) -> torch.Tensor:
        dim = dim % max(input.dim(), 1)
        if local.peers.alone:
            return _back(local, input, function(local.whole("input", input, dim), dim=dim, index=index, **others), dim)
        place = _places(local, index, dim, lowest=-local.call.shape("input")[dim] if from_end else 0)
        spare = input.shape[dim]
        if function is torch.scatter_reduce and others["src"].shape == place.shape:
            others["src"] = others["src"].masked_fill(place < 0, 1)  # nan on the spare line would have a gradient
        found = function(_roomy(input, dim), dim=dim, index=torch.where(place < 0, spare, place), **others)
        return found.narrow(dim, 0, spare)

    return write


def _back(local: Local, input: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """The result with the padding that was taken off the input."""
    return result if result.shape == input.shape else local.pad_like("input", result, dim)


def _roomy(input: torch.Tensor, dim: int) -> torch.Tensor:
    """The input with a spare line along a dim."""
    line = [1 if d == dim else size for d, size in enumerate(input.shape)]
    return torch.cat([input, input.new_zeros(line)], dim)


def _scatter(
    input: torch.Tensor, dim: int, index: Any, src: torch.Tensor | None, value: Any, reduce: str | None
) -> torch.Tensor:
    content = value if src is None else src
    if reduce is None:
        return torch.scatter(input, dim, index, content)
    return torch.scatter(input, dim, index, content, reduce=reduce)


def _indexed_dims(indices: tuple[object, ...]) -> list[int]:
    return [dim for dim, each in enumerate(indices) if each is not None]


def _locate(local: Local, indices: tuple[Any, ...]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """For each indexed dim where this process stores what is named, and which of it is not all here."""
    shape = local.call.shape("input")
    places = {dim: _places(local, indices[dim], dim, lowest=-shape[dim]) for dim in _indexed_dims(indices)}
    missing = torch.stack([*torch.broadcast_tensors(*(place < 0 for place in places.values()))]).any(0)
    return places, missing


@shared
def _index(local: Local, input: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    if local.peers.alone:
        for dim in _indexed_dims(indices):
            input = local.whole("input", input, dim)
        return input[tuple(slice(None) if each is None else each for each in indices)]
    places, missing = _locate(local, indices)
    here = (torch.where(missing, 0, places[dim]) if dim in places else slice(None) for dim in range(len(indices)))
    found = input[tuple(here)]
    after = found.dim() - indexed_places(local.call)[1] - missing.dim()  # dims behind those of the index
    return found.masked_fill(missing.view(*missing.shape, *(1,) * after), 0)


@shared
def _index_put(
    local: Local, input: torch.Tensor, indices: tuple[object, ...], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    put: Callable[..., torch.Tensor] = torch.ops.aten.index_put
    if local.peers.alone:
        result, dims = input, _indexed_dims(indices)
        for dim in dims:
            result = local.whole("input", result, dim)
        result = put(result, indices, values, accumulate)
        for dim in dims:
            result = _back(local, input, result, dim)
        return result
    places, missing = _locate(local, indices)
    first = min(places)
    spare = input.shape[first]
    here = tuple(
        torch.where(missing, spare if dim == first else 0, places[dim]) if dim in places else None
        for dim in range(len(indices))
    )
    return put(_roomy(input, first), here, values, accumulate).narrow(first, 0, spare)


LOOKUP: dict[str, Function] = {
    "embedding": _embedding,
    "gather": _finding(torch.gather),
    "take_along_dim": _finding(torch.take_along_dim, wraps=True),
    "index_select": _finding(torch.index_select),
    "take": _take,
    "take_rows": _take_rows,
    "index": _index,
    "index_put": _index_put,
    "index_add": _writing(torch.index_add),
    "index_copy": _writing(torch.index_copy),
    "index_fill": _writing(torch.index_fill, from_end=True),
    "scatter": _writing(_scatter),
    "scatter_add": _writing(torch.scatter_add),
    "scatter_reduce": _writing(torch.scatter_reduce),
    "one_hot": lambda input, num_classes: F.one_hot(input, num_classes),
}
