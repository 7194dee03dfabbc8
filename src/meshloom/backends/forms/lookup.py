"""Look-ups in a dim that several processes hold, and writes into one: each finds, or takes, what falls to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.backends.forms.across import Across
from meshloom.engines.torch_engine.contractions import multiply_groups
from meshloom.engines.torch_engine.lookup import FINDS, WRITES, entries, indexed_dims
from meshloom.ops.lookup import indexed_places

_FROM_THE_END = frozenset("take index index_put index_fill".split())  # ops that take negative indices
_AROUND = "take_along_dim"  # torch counts its index modulo the size


def _embedding(across: Across, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    place = _places(across, input, 0, "weight")
    missing = place < 0
    ignored = None if padding_idx is None else int(across.spots("weight", 0)[padding_idx])
    found = F.embedding(torch.where(missing, 0, place), weight, None if ignored is None or ignored < 0 else ignored)
    return found.masked_fill(missing.unsqueeze(-1), 0)


def _places(across: Across, index: torch.Tensor, dim: int, name: str = "input") -> torch.Tensor:
    """Where this process stores what an index names along a dim; -1 where it does not. Its dtype is the index's own."""
    if index.is_meta:
        return torch.empty_like(index)
    spots = across.spots(name, dim)
    size = len(spots)
    if across.plan.call.op == _AROUND and size:
        index = index % size
    lowest = -size if across.plan.call.op in _FROM_THE_END else 0
    if index.numel():
        least, most = (int(each) for each in torch.aminmax(index))
        if least < lowest or most >= size:
            wrong = least if least < lowest else most
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
    return spots.to(index.device)[torch.where(index < 0, index + size, index)].to(index.dtype)


def _finding(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An op that looks elements up along `dim`; what is elsewhere is zero here, and the sum has it all."""

    def form(across: Across, input: torch.Tensor, dim: int | None = None, **others: Any) -> torch.Tensor:
        name = "indices" if "indices" in others else "index"
        if dim is None:
            return _take(across, input, others[name] if name == "index" else others[name].flatten())
        dim = dim % input.dim()
        place = _places(across, others.pop(name), dim)
        missing = place < 0
        found = function(input, dim=dim, **{name: torch.where(missing, 0, place)}, **others)
        if missing.dim() != found.dim():  # a line of indices
            missing = missing.view([-1 if d == dim else 1 for d in range(found.dim())])
        return found.masked_fill(missing, 0)

    return form


def _take(across: Across, input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements by their flat position in the whole."""
    shape = across.plan.call.shape("input")
    size = torch.Size(shape).numel()
    lowest = -size if across.plan.call.op in _FROM_THE_END else 0
    if not index.is_meta and index.numel() and not lowest <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(f"out of range: tried to take elements {index.tolist()} of a tensor of {size}")
    rest = torch.where(index < 0, index + size, index)
    flat, missing = torch.zeros_like(rest), torch.zeros_like(rest, dtype=torch.bool)
    step, stride = 1, 1
    for dim in reversed(range(len(shape))):
        place = _places(across, rest // step % shape[dim], dim)
        missing, flat = missing | (place < 0), flat + torch.where(place < 0, 0, place) * stride
        step, stride = step * shape[dim], stride * input.shape[dim]
    return torch.take(input.contiguous(), flat).masked_fill(missing, 0)


def _writing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An op that writes into the input along `dim`; what belongs elsewhere goes to a spare line."""

    def form(across: Across, input: torch.Tensor, dim: int, index: torch.Tensor, **others: Any) -> torch.Tensor:
        dim = dim % input.dim()
        place, spare = _places(across, index, dim), input.shape[dim]
        if across.plan.call.op == "scatter_reduce" and others["src"].shape == place.shape:
            others["src"] = others["src"].masked_fill(place < 0, 1)  # nan on the spare line would have a gradient
        found = function(_roomy(input, dim), dim=dim, index=torch.where(place < 0, spare, place), **others)
        return found.narrow(dim, 0, spare)

    return form


def _roomy(input: torch.Tensor, dim: int) -> torch.Tensor:
    line = [1 if d == dim else size for d, size in enumerate(input.shape)]
    return torch.cat([input, input.new_zeros(line)], dim)


def _located(across: Across, indices: tuple[Any, ...]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """For each indexed dim where this process stores what is named, and which of it is not all here."""
    places = {dim: _places(across, indices[dim], dim) for dim in indexed_dims(indices)}
    missing = torch.stack([*torch.broadcast_tensors(*(place < 0 for place in places.values()))]).any(0)
    return places, missing


def _index(across: Across, input: torch.Tensor, indices: tuple[Any, ...]) -> torch.Tensor:
    places, missing = _located(across, indices)
    here = (torch.where(missing, 0, places[dim]) if dim in places else None for dim in range(len(indices)))
    found = input[entries(tuple(here))]
    after = found.dim() - indexed_places(across.plan.call)[1] - missing.dim()  # dims behind those of the index
    return found.masked_fill(missing.view(*missing.shape, *(1,) * after), 0)


def _index_put(
    across: Across, input: torch.Tensor, indices: tuple[Any, ...], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    places, missing = _located(across, indices)
    first = min(places)
    spare = input.shape[first]
    put = tuple(
        torch.where(missing, spare if dim == first else 0, places[dim]) if dim in places else None
        for dim in range(len(indices))
    )
    found: torch.Tensor = torch.ops.aten.index_put(_roomy(input, first), put, values, accumulate)
    return found.narrow(first, 0, spare)


def _grouped_mm(across: Across, input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The tokens of the experts that this process holds; those of others are zero here, and the sum has them all."""
    return multiply_groups(input, mat2, offs, across.positions("mat2", 0).tolist())


LOOKUP: dict[str, Callable[..., Any]] = {
    "embedding": _embedding,
    "grouped_mm": _grouped_mm,
    **{name: _finding(function) for name, function in FINDS.items()},
    "take": _take,
    "index": _index,
    "index_put": _index_put,
    **{name: _writing(function) for name, function in WRITES.items()},
}
