"""Moves of elements inside blocks, for all devices at once: rows by number, copies, dims counted from the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from meshloom.engines.private import disable_current_modes
from meshloom.errors import OperandError
from meshloom.runtime import state
from meshloom.ttnn.device import queues
from meshloom.ttnn.tensor.boxes import held_shape, place_here
from meshloom.ttnn.tensor.parts import Block, lead, part
from meshloom.ttnn.tensor.tensor import Tensor


def axis_of(name: str, dim: int, rank: int) -> int:
    """A dim counted from the front; a tensor without dims has one that is 0 or -1, as in torch."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise OperandError(
            f"ttnn.{name}: dim {dim} is out of range for a tensor of rank {rank}",
            fix=f"use -{rank} to {rank - 1}" if rank else "the tensor has no dims",
        )
    return dim % rank if rank else 0


def fresh(block: Block) -> Block:
    """The same values in memory of their own, so that no tensor changes when another is written."""
    return block.clone(memory_format=torch.contiguous_format)


def spread(blocks: Sequence[Block], axes: int) -> list[Block]:
    """Blocks with the mesh axes of all of them; views."""
    sizes = lead(blocks, axes)
    return [block if block.shape[:axes] == sizes else block.expand(*sizes, *block.shape[axes:]) for block in blocks]


def row_offsets(table: Block, axes: int, rows: int, rank: int) -> Block:
    """How many rows of a flattened table are before every device's own: shape of the mesh axes, then ones.

    >>> row_offsets(torch.zeros(1, 3, 10, 4), axes=2, rows=10, rank=1).flatten()
    tensor([ 0, 10, 20])
    """
    sizes = table.shape[:axes]
    places = torch.arange(math.prod(sizes)) * rows
    return places.reshape(*sizes, *(1,) * rank)


def take_rows(table: Block, index: Block, axes: int) -> Block:
    """Rows of every device's table by number: [*mesh, V, ...] and [*mesh, *n] give [*mesh, *n, ...].

    >>> take_rows(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[1, 0]]), axes=1).squeeze(-1)
    tensor([[2., 1.],
            [4., 3.]])
    """
    rows = table.shape[axes]
    flat = table.reshape(-1, *table.shape[axes + 1 :])
    places = index.long()
    if flat.shape[0] != rows:
        places = places + row_offsets(table, axes, rows, places.dim() - axes)
    found = flat.index_select(0, places.reshape(-1))
    return found.reshape(*places.shape, *flat.shape[1:])


def inside(name: str, index: Block, size: int, what: str, lowest: int = 0) -> tuple[int, int] | None:
    """The least and the greatest of numbers, an error if they are outside of what they count; None without numbers, and
    while a trace is captured: there are no values to look at then."""
    if state.capture is not None or not index.numel():
        return None
    low, high = (int(index),) * 2 if index.numel() == 1 else map(int, torch.aminmax(index))
    if low < lowest or high >= size:
        raise OperandError(
            f"ttnn.{name}: {what} {low if low < lowest else high} is out of range, there are {size}",
            fix=f"use {lowest} to {size - 1}",
        )
    return low, high


def whole(values: Sequence[int] | int, count: int) -> tuple[int, ...]:
    """One number for all, or one for each.

    >>> whole(3, 2), whole([1, 2], 2)
    ((3, 3), (1, 2))
    """
    return (values,) * count if isinstance(values, int) else tuple(values)


def writable_block(tensor: Tensor, sizes: Sequence[int]) -> Block:
    """The block of a tensor that is about to be written with different values along some axes: contiguous, with these
    mesh axes.

    One that was stored once for all devices gets memory for each, outside of any trace: what a replay changes has to
    stay changed for the next.
    """
    device = tensor.device()
    if device is not None and (device.watched or state.capture is not None):
        queues.used(device, "op", writes=(tensor,))
    if tensor._sharers is not None:
        tensor.tell_sharers_apart()
    block, axes = tensor.block, len(tensor.grid)
    if tensor._coords is not None and tensor._sharers is not None:  # others of its memory lie on more devices
        sizes = held_shape(tensor.grid)
    wanted = tuple(max(have, need) for have, need in zip(block.shape[:axes], sizes, strict=True))
    if wanted != tuple(block.shape[:axes]) or not block.is_contiguous():
        tensor.grow(_grow(block, (*wanted, *block.shape[axes:])))
    return tensor.block


def copy_parts(tensor: Tensor, target: Block, values: Block) -> None:
    """Write into a view of the block of a tensor, on the devices that it lies on."""
    if tensor._coords is None:
        target.copy_(values)
        return
    for place in tensor._coords:
        here = place_here(tensor.grid, place)
        if here is not None:
            part(target, here).copy_(part(values, here))


def _grow(block: Block, shape: tuple[int, ...]) -> Block:
    with outside_capture(block):
        return fresh(block.expand(shape))


def outside_capture(*blocks: Block) -> AbstractContextManager[object]:
    """Where arrays of before a capture have values, so that they can be read during it. Without a capture: here."""
    before = state.capture is not None and not any(map(state.capture.makes, blocks))
    return disable_current_modes() if before else nullcontext()
