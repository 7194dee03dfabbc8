"""Padding of uneven dims where it would count: sums, extremes, products, means and norms leave it out.

Parts have one shape, so a batch of 7 on two devices has an eighth row. Ops work on it as on the others and nobody looks
at it, until a dim is reduced: then it takes the value that changes nothing, or is cut off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from meshloom.engines.reductions import number
from meshloom.placement import IDENTITY
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.tensor.boxes import held_offset, held_shape, take_box
from meshloom.ttnn.tensor.composers import extents
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import PlacementShard


def real_places(tensor: Tensor, dims: Sequence[int]) -> Block | None:
    """Which elements of every device's part are no padding of these dims, to be broadcast; None if there is none."""
    rank, found = len(tensor.shape), None
    for placement in tensor._topology._placements:
        if isinstance(placement, PlacementShard) and placement.size is not None:
            dim = placement.dim % rank
            if any(each % rank == dim for each in dims):
                real = _real(tensor, dim, placement.size)
                found = real if found is None else found & real
    return found


def fill_padding(block: Block, tensor: Tensor, dims: Sequence[int], op: str | None) -> Block:
    """The block of a tensor, with what changes nothing in the padding of these dims, if there is any."""
    if op not in IDENTITY or op == "mean":
        return block
    real = real_places(tensor, dims)
    if real is None:
        return block
    return torch.where(real, block, torch.tensor(number(IDENTITY[op], block.dtype), dtype=block.dtype))


def count_of(tensor: Tensor, dims: Sequence[int]) -> int | Block:
    """How many elements every device has along dims, without their padding; dims are counted from the end and kept."""
    real = real_places(tensor, dims)
    if real is None:
        return math.prod(tensor.shape[dim] for dim in dims)
    return real.expand(*held_shape(tensor.grid), *tensor.shape).sum(tuple(dims), keepdim=True)


def mean_of(values: Block, tensor: Tensor, dims: Sequence[int]) -> Block:
    """The mean over dims of every device's part, without their padding; dims are counted from the end and kept.

    A device that has nothing but padding gets 0.
    """
    count = count_of(tensor, dims)
    if isinstance(count, int):
        return values.mean(tuple(dims), keepdim=True)
    return fill_padding(values, tensor, dims, "sum").sum(tuple(dims), keepdim=True) / count.clamp(min=1)


def reduce_without_padding(
    function: Callable[[Block], Block], block: Block, tensor: Tensor, dims: Sequence[int]
) -> Block:
    """A function of every device's part that reduces dims, device by device, each without the padding of these.

    A device that has nothing but padding gets zeros.
    """
    axes, held, offset = len(tensor.grid), held_shape(tensor.grid), held_offset(tensor.grid)
    full, found = block.expand(*held, *tensor.shape), []
    for place in itertools.product(*map(range, held)):
        part = full[tuple(slice(at, at + 1) for at in place)]
        global_place = MeshCoordinate([at + start for at, start in zip(place, offset, strict=True)])
        sizes = [end - start for start, end in extents(tensor, global_place)]
        for dim in dims:
            part = part.narrow(dim, 0, sizes[dim])
        found.append(function(part) if part.numel() else None)
    like = next((each for each in found if each is not None), None)
    if like is None:  # every device here has nothing but padding
        like = torch.zeros_like(function(torch.ones_like(full[(slice(0, 1),) * axes])))
    whole = torch.cat([torch.zeros_like(like) if each is None else each for each in found])
    return whole.reshape(*held, *like.shape[axes:])


def _real(tensor: Tensor, dim: int, size: int) -> torch.Tensor:
    """Which places along a dim are not padding, for every device."""
    chunk, rank, nowhere = tensor.shape[dim], len(tensor.shape), (0,) * len(tensor.shape)
    offsets = tensor.tensor_topology().offsets(tensor.shape)
    starts = torch.tensor([offsets.get(place, nowhere)[dim] for place in itertools.product(*map(range, tensor.grid))])
    real = take_box(starts.reshape(tensor.grid), tensor.grid).unsqueeze(-1) + torch.arange(chunk) < size
    return real.reshape(*held_shape(tensor.grid), *(1,) * dim, chunk, *(1,) * (rank - dim - 1))
