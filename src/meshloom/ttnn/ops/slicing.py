"""Ops that take tensors apart along dims and put them together: slice, split, pad, concat, stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import axis_of, copy_parts, fresh, inside, outside_capture, spread, writable_block
from meshloom.ttnn.ops.calling import Made, blocks_of, make, op, operands, shared_coords
from meshloom.ttnn.ops.results import is_padded_along
from meshloom.ttnn.ops.topologies import moves, rows, same, topology_of
from meshloom.ttnn.tensor.formats import rounded
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

# apart


@op(
    "slice",
    "experimental.padded_slice",  # padding up to whole shards of a core is derived from the memory config
    spelled={f"{kind}slice_{end}": f"{end}s" for kind in ("", "padded_") for end in ("start", "end", "step")},
)
def slice_(input_tensor, starts, ends, steps=None, *, slice_dim=None, num_devices=None) -> Made:
    """The elements from start to end of every dim, in steps. Tensors as starts and ends may differ between devices."""
    (block,) = blocks_of("slice", input_tensor)
    if isinstance(starts, Tensor) and isinstance(ends, Tensor):
        values = _sliced_by_tensors(input_tensor, starts, ends, steps, slice_dim, num_devices)
        coords = shared_coords(input_tensor, starts)
    elif isinstance(starts, Tensor) or isinstance(ends, Tensor):
        raise ArgumentError("ttnn.slice: starts and ends are both tensors or both sequences")
    else:
        values, coords = fresh(block[_spans(input_tensor, starts, ends, steps)]), None
    by = (starts,) if isinstance(starts, Tensor) else ()
    kept = moves(same(input_tensor), *((None,),) * len(by))
    label = topology_of(kept, input_tensor, *by, shape=values.shape[len(input_tensor.grid) :])
    return Made(values, input_tensor, label, coords=coords)


def _spans(
    tensor: Tensor, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int] | None
) -> tuple[slice, ...]:
    """Slices of a block, checked: numbers below zero count from the end."""
    shape = tuple(tensor.shape)
    every = tuple(steps) if steps is not None else (1,) * len(shape)
    if not len(starts) == len(ends) == len(every) == len(shape):
        raise OperandError(
            f"ttnn.slice: {len(starts)} starts, {len(ends)} ends and {len(every)} steps for rank {len(shape)}",
            fix=f"give {len(shape)} of each",
        )
    found = []
    for dim, (size, start, end, step) in enumerate(zip(shape, starts, ends, every, strict=True)):
        first, last = start + size * (start < 0), end + size * (end < 0)
        if step < 1 or not 0 <= first <= size or last > size or last < first:
            raise OperandError(
                f"ttnn.slice: {start}:{end}:{step} is no slice of dim {dim} of size {size}",
                fix=f"0 <= start <= end <= {size} and a step of at least 1",
            )
        found.append(slice(first, last, step))
    return (*(slice(None),) * len(tensor.grid), *found)


def _sliced_by_tensors(
    tensor: Tensor,
    starts: Tensor,
    ends: Tensor,
    steps: Sequence[int] | None,
    slice_dim: int | None,
    num_devices: int | None,
) -> Block:
    """Slices whose starts every device knows for itself; all have to be of one size."""
    _, (block, first, last) = operands("slice", tensor, starts, ends)
    axes, shape = len(tensor.grid), tuple(tensor.shape)
    if slice_dim is not None and num_devices is not None:
        place = axis_of("slice", slice_dim, len(shape))
        sizes = [size // num_devices if dim == place else size for dim, size in enumerate(shape)]
    else:
        sizes = _sizes(first, last, shape)
    every = tuple(steps) if steps is not None else (1,) * len(shape)
    for dim, (size, step) in enumerate(zip(sizes, every, strict=True)):
        if size == shape[dim] and step == 1:
            continue
        count = -(-size // step)
        index = first[..., dim, None].long() + torch.arange(count) * step
        inside("slice", index, shape[dim], f"element of dim {dim}")
        block = take_along(block, index, axes, dim)
    return fresh(block)


def _sizes(first: Block, last: Block, shape: tuple[int, ...]) -> list[int]:
    """The size of all slices. In a capture it is that of the bounds as they are now: replays move them, no more."""
    with outside_capture(first, last):
        lengths = (last.long() - first.long()).reshape(-1, len(shape)).unique(dim=0)
        if len(lengths) != 1:
            raise OperandError("ttnn.slice: devices ask for slices of different sizes", fix="all of one size")
        return [int(size) for size in lengths[0]]


def take_along(block: Block, index: Block, axes: int, dim: int) -> Block:
    """Elements of one dim by number, the numbers of every device its own: index is [*mesh, n]."""
    rank = block.dim() - axes
    sizes = [max(b, i) for b, i in zip(block.shape[:axes], index.shape[:axes], strict=True)]
    shape = [*index.shape[:axes], *(1,) * dim, index.shape[-1], *(1,) * (rank - dim - 1)]
    inner = [index.shape[-1] if each == dim else size for each, size in enumerate(block.shape[axes:])]
    wide = index.reshape(shape).expand(*sizes, *inner)
    return block.expand(*sizes, *block.shape[axes:]).gather(axes + dim, wide)


@op("experimental.slice_write")
def slice_write(
    input_tensor, output_tensor: Tensor, start: Sequence[int], end: Sequence[int], step: Sequence[int]
) -> Tensor:
    """Write a tensor into a slice of another, in place."""
    _, (values, _) = operands("experimental.slice_write", input_tensor, output_tensor)
    axes = len(output_tensor.grid)
    room = writable_block(output_tensor, values.shape[:axes])[_spans(output_tensor, start, end, step)]
    if room.shape[axes:] != values.shape[axes:]:
        raise OperandError(
            f"ttnn.experimental.slice_write: {list(values.shape[axes:])} into {list(room.shape[axes:])}",
            fix="give a tensor of the shape of the slice",
        )
    copy_parts(output_tensor, room, rounded(values, output_tensor.dtype))
    kept = rows(*(f"S({dim}), R -> S({dim})" for dim in same(output_tensor)))  # every device has rows of its own
    both = (*moves(same(output_tensor), same(input_tensor)), *kept)
    output_tensor.update_tensor_topology(topology_of(both, output_tensor, input_tensor))
    return output_tensor


@op("narrow")
def narrow(input_tensor, dim, start: int, length) -> Tensor:
    """So many elements of one dim, from a start on."""
    shape = tuple(input_tensor.shape)
    place = axis_of("narrow", dim, len(shape))
    first = start + shape[place] * (start < 0)
    starts = [first if each == place else 0 for each in range(len(shape))]
    ends = [first + length if each == place else size for each, size in enumerate(shape)]
    return slice_(input_tensor, starts, ends)


@op("split")
def split(input_tensor, split_size: int | Sequence[int], dim=0) -> list[Made]:
    """Pieces along a dim, of one size (the last may be smaller) or of the sizes given."""
    (block,) = blocks_of("split", input_tensor)
    place = axis_of("split", dim, len(input_tensor.shape))
    size = input_tensor.shape[place]
    if not isinstance(split_size, int) and sum(split_size) != size:
        raise OperandError(f"ttnn.split: sizes {list(split_size)} for a dim of {size}", fix=f"sizes that sum to {size}")
    if isinstance(split_size, int) and split_size < 1:
        raise OperandError(f"ttnn.split: pieces of size {split_size}", fix="a size of at least 1")
    cut = split_size if isinstance(split_size, int) else list(split_size)
    return _pieces(input_tensor, block.split(cut, dim=len(input_tensor.grid) + place))


@op("chunk")
def chunk(input_tensor, chunks, dim) -> list[Made]:
    """So many pieces along a dim, or fewer if its size runs out."""
    (block,) = blocks_of("chunk", input_tensor)
    place = axis_of("chunk", dim, len(input_tensor.shape))
    return _pieces(input_tensor, block.chunk(chunks, dim=len(input_tensor.grid) + place))


def _pieces(tensor: Tensor, blocks: Sequence[Block]) -> list[Made]:
    axes = len(tensor.grid)
    return [
        Made(fresh(block), tensor, topology_of(moves(same(tensor)), tensor, shape=block.shape[axes:]))
        for block in blocks
    ]


# together


@op("concat")
def concat(tensors, dim=0, *, groups=1) -> Made:
    """Tensors one after the other along a dim; with groups, the first piece of each, then the second of each..."""
    first, place, blocks = _alike("concat", tensors, dim, 0)
    axes = len(first.grid)
    for tensor in tensors:
        if _others(tensor, place) != _others(first, place):
            raise OperandError(
                "All dimensions must be the same size except for the dimension along which the contenation is taking "
                "place.",
                shapes=f"{[list(each.shape) for each in tensors]} along dim {dim}",
                fix="make the other dims equal",
            )
        if tensor.shape[place] % groups:
            raise OperandError(f"ttnn.concat: {tensor.shape[place]} does not divide into {groups} groups")
    whole = spread(blocks, axes)
    if groups > 1:
        pieces = [block.chunk(groups, dim=axes + place) for block in whole]
        whole = [piece for group in zip(*pieces, strict=True) for piece in group]
    values = torch.cat(whole, dim=axes + place)
    return make(values, moves(*map(same, tensors)), *tensors)


@op("stack")
def stack(input_tensors, dim) -> Made:
    """Tensors one after the other along a new dim."""
    first, place, blocks = _alike("stack", input_tensors, dim, 1)
    axes = len(first.grid)
    if any(tuple(each.shape) != tuple(first.shape) for each in input_tensors):
        raise OperandError(
            f"ttnn.stack: shapes {[list(each.shape) for each in input_tensors]} differ",
            fix="stack tensors of one shape",
        )
    values = torch.stack(spread(blocks, axes), dim=axes + place)
    places = tuple(each + (each >= place) for each in range(len(first.shape)))
    return make(values, moves(*[places] * len(input_tensors)), *input_tensors)


def _alike(name: str, tensors: Sequence[Tensor], dim: int, more: int) -> tuple[Tensor, int, list[Block]]:
    """The first of some tensors that have to be of one dtype, layout and rank, the dim from the front, and blocks."""
    if not tensors:
        raise OperandError(f"ttnn.{name}: need 1 or more tensors", fix="give at least one")
    blocks = blocks_of(name, *tensors)
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype is not first.dtype:
            raise OperandError(
                f"ttnn.{name}: All Tensors should have same dtypes, not {first.dtype} and {tensor.dtype}",
                fix="ttnn.typecast",
            )
        if tensor.layout is not first.layout and not more and is_padded_along(tensors, dim):
            raise OperandError(f"ttnn.{name}: expected all input tensors to be in tile layout", fix="ttnn.to_layout")
        if tensor.layout is not first.layout:
            raise OperandError(
                f"ttnn.{name}: All Tensors should have same layouts, not {first.layout} and {tensor.layout}",
                fix="ttnn.to_layout",
            )
        if len(tensor.shape) != len(first.shape):
            raise OperandError(
                f"ttnn.{name}: All tensors must have the same rank, not {len(first.shape)} and {len(tensor.shape)}"
            )
    return first, axis_of(name, dim, len(first.shape) + more), blocks


def _others(tensor: Tensor, place: int) -> tuple[int, ...]:
    return tuple(size for each, size in enumerate(tensor.shape) if each != place)


# larger


@op("pad")
def pad(
    input_tensor, padding: Sequence[Any] | None = None, input_tensor_start=None, value=0.0, *, output_padded_shape=None
) -> Made:
    """A value before and after the elements of dims: pairs for the last dims, or a shape and where the tensor starts.

    Both of TTNN's forms are taken: `pad(x, [(0, 1), (2, 3)], 0.0)` and `pad(x, shape, start, 0.0)`.
    """
    (block,) = blocks_of("pad", input_tensor)
    start: Sequence[int] | None = None
    if isinstance(input_tensor_start, (int, float)):  # the value, third in the form with pairs
        value = input_tensor_start
    else:
        start = input_tensor_start
    given = padding if padding is not None else output_padded_shape
    if given is None:
        raise ArgumentError("ttnn.pad: padding is missing")
    pairs = _pairs(input_tensor, given, start)
    flat = [size for pair in reversed(pairs) for size in pair]
    values = torch.nn.functional.pad(block, flat, value=value) if any(flat) else fresh(block)
    kept = moves(same(input_tensor), linear=value == 0)
    return make(values, kept, input_tensor)


def _pairs(tensor: Tensor, given: Sequence[Any], start: Sequence[int] | None) -> list[tuple[int, int]]:
    """How much to put before and after every dim."""
    shape = tuple(tensor.shape)
    if given and not isinstance(given[0], int):
        pairs = [(0, 0)] * (len(shape) - len(given)) + [(int(front), int(back)) for front, back in given]
    else:
        starts = tuple(start) if start is not None else (0,) * len(shape)
        sizes = zip(given, shape, starts, strict=False)
        pairs = [(first, total - size - first) for total, size, first in sizes]
    if len(pairs) != len(shape) or any(size < 0 for pair in pairs for size in pair):
        raise OperandError(f"ttnn.pad: {list(given)} for {list(shape)}", fix="sizes of at least 0 for every dim")
    return pairs
