"""Padding of uneven dims where it would count: sums, extremes and products leave it out.

Parts have one shape, so a batch of 7 on two devices has an eighth row. Ops work on it as on the others and nobody looks
at it, until a dim is reduced: then it takes the value that changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch

from meshloom.engines.reductions import number
from meshloom.placement import IDENTITY
from meshloom.ttnn.tensor.composers import piece_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import PlacementShard, TensorTopology


def fill_padding(block: Block, tensor: Tensor, dims: Sequence[int], op: str | None) -> Block:
    """The block of a tensor, with what changes nothing in the padding of these dims, if there is any."""
    if op not in IDENTITY or op == "mean":
        return block
    rank = len(tensor.shape)
    named = {dim % rank for dim in dims} if rank else set()
    for placement in tensor.tensor_topology().placements():
        if isinstance(placement, PlacementShard) and placement.size is not None and placement.dim in named:
            block = torch.where(
                _real(tensor, placement.dim, placement.size),
                block,
                torch.tensor(number(IDENTITY[op], block.dtype), dtype=block.dtype),
            )
    return block


def _real(tensor: Tensor, dim: int, size: int) -> torch.Tensor:
    """Which places along a dim are not padding, for every device."""
    chunk, rank = tensor.shape[dim], len(tensor.shape)
    starts = torch.tensor(_pieces(tensor.tensor_topology(), dim, tensor.grid)).reshape(tensor.grid) * chunk
    real = starts.unsqueeze(-1) + torch.arange(chunk) < size
    return real.reshape(*tensor.grid, *(1,) * dim, chunk, *(1,) * (rank - dim - 1))


@lru_cache(maxsize=256)
def _pieces(label: TensorTopology, dim: int, grid: tuple[int, ...]) -> list[int]:
    """The number of the piece of a dim that every device of a mesh has, row-major."""
    found = {tuple(place): piece_of(label, number, dim) for number, place in enumerate(label.mesh_coords())}
    return [found.get(place, 0) for place in itertools.product(*map(range, grid))]
