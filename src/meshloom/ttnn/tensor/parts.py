"""What every device holds, as one array: mesh axes first (size 1 where all along an axis hold the same), then the dims.

Ops on parts never communicate, so they are plain array calls with the mesh axes as a batch. Where torch's function
takes leading dims as a batch, it is called on the array; `each` serves the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Block = torch.Tensor


def lead(blocks: Sequence[Block], axes: int) -> tuple[int, ...]:
    """The mesh axes of what comes of several blocks: 1 where all of them are alike."""
    sizes = [block.shape[:axes] for block in blocks]
    first = sizes[0]
    return first if sizes.count(first) == len(sizes) else tuple(map(max, *sizes))


def aligned(block: Block, axes: int, rank: int) -> Block:
    """A block whose parts have at least that rank: ones are put between the mesh axes and the dims, to broadcast.

    >>> aligned(torch.zeros(2, 4, 5), axes=2, rank=3).shape
    torch.Size([2, 4, 1, 1, 5])
    """
    missing = rank - (block.dim() - axes)
    return block.reshape(*block.shape[:axes], *(1,) * missing, *block.shape[axes:]) if missing > 0 else block


def each(function: Callable[..., Any], blocks: Sequence[Block], axes: int) -> Any:
    """A function of one device's parts, for all devices at once. It returns one array or a tuple of them.

    >>> each(lambda x: x.sort().values, [torch.tensor([[3, 1], [2, 9]])], axes=1)
    tensor([[1, 3],
            [2, 9]])
    """
    sizes = lead(blocks, axes)
    if math.prod(sizes) == 1:
        return _map(function(*(block[(0,) * axes] for block in blocks)), lambda part: part[(None,) * axes])
    alike = [all(size == 1 for size in block.shape[:axes]) for block in blocks]
    flat = [
        block[(0,) * axes] if same else block.expand(*sizes, *block.shape[axes:]).flatten(0, axes - 1)
        for block, same in zip(blocks, alike, strict=True)
    ]
    batched = torch.vmap(function, in_dims=tuple(None if same else 0 for same in alike))
    return _map(batched(*flat), lambda part: torch.unflatten(part, 0, sizes))


def _map(found: Any, change: Callable[[Block], Block]) -> Any:
    return tuple(map(change, found)) if isinstance(found, (tuple, list)) else change(found)


def part(block: Block, place: Sequence[int]) -> Block:
    """What the device at a coordinate holds, a view."""
    return block[tuple(0 if size == 1 else c for size, c in zip(block.shape, place, strict=False))]
