"""Ops that read and write elements by number: gather, scatter, index_fill, nonzero."""

from __future__ import annotations

import math

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import axis_of, fresh, inside, spread, take_rows
from meshloom.ttnn.ops.calling import Made, make, op, operands, result
from meshloom.ttnn.ops.topologies import Rows, moves, rows, same, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.tensor import Tensor

# along a dim


@op("gather")
def gather(input, dim, index) -> Made:
    """Elements along a dim by number, as torch.gather."""
    _, blocks = operands("gather", input, index)
    axes, place = len(input.grid), _common("gather", input, dim, index)
    block, numbers = spread(blocks, axes)
    inside("gather", numbers, input.shape[place], "index")
    values = block.gather(axes + place, numbers.long())
    return make(values, "gather", input, place, index)


def _common(name: str, tensor: Tensor, dim: int, index: Tensor) -> int:
    if len(index.shape) != len(tensor.shape):
        raise OperandError(
            f"ttnn.{name}: index has rank {len(index.shape)}, the tensor {len(tensor.shape)}", fix="give equal ranks"
        )
    if index.dtype.is_float:
        raise OperandError(f"ttnn.{name}: index is {index.dtype}", fix="an integer dtype")
    place = axis_of(name, dim, len(tensor.shape))
    pairs = enumerate(zip(index.shape, tensor.shape, strict=True))
    if any(have > size for each, (have, size) in pairs if each != place):
        raise OperandError(
            f"ttnn.{name}: index {list(index.shape)} is larger than {list(tensor.shape)} outside of dim {dim}"
        )
    return place


_REDUCE = {"add": "sum", "sum": "sum", "multiply": "prod", "prod": "prod", "amax": "amax", "amin": "amin"}


@op("scatter")
def scatter(input, dim, index, src, *, reduce=None) -> Made:
    """Elements put along a dim by number, as torch.scatter; `reduce` is add, multiply, amax or amin."""
    if reduce is not None and reduce not in _REDUCE:
        raise ArgumentError(f"ttnn.scatter: reduce={reduce!r}", fix=f"one of {sorted(_REDUCE)}")
    _, blocks = operands("scatter", input, index, src)
    axes, place = len(input.grid), _common("scatter", input, dim, index)
    if src.dtype is not input.dtype:
        raise OperandError(f"ttnn.scatter: src is {src.dtype}, the tensor {input.dtype}", fix="ttnn.typecast")
    block, numbers, source = spread(blocks, axes)
    inside("scatter", numbers, input.shape[place], "index")
    at = numbers.long()
    values = (
        block.scatter(axes + place, at, source)
        if reduce is None
        else block.scatter_reduce(axes + place, at, source, _REDUCE[reduce])
    )
    return make(values, _scatter_rows(input, place), input, index, src)


def _scatter_rows(tensor: Tensor, place: int) -> Rows:
    """Row i of numbers and values is about row i of the tensor: cut where all are, and as each device has it along
    the dim that is written."""
    every = (f"S({dim}), S({dim}), S({dim}) -> S({dim})" for dim in range(len(tensor.shape)))
    return rows(*every, f"S({place}), R, R -> S({place})")


@op("scatter_add")
def scatter_add(input, dim, index, src, *, memory_config=None) -> Tensor:
    """`scatter` that adds."""
    return scatter(input, dim, index, src, memory_config=memory_config, reduce="add")


@op("tosa_gather")
def tosa_gather(input, index, *, memory_config=None) -> Tensor:
    """Rows [N, W, C] of [N, K, C] by numbers [N, W]."""
    return gather(input, 1, _widen(index, input), memory_config=memory_config)


@op("tosa_scatter")
def tosa_scatter(input, index, src, *, memory_config=None) -> Tensor:
    """Rows [N, W, C] put into [N, K, C] by numbers [N, W]."""
    return scatter(input, 1, _widen(index, input), src, memory_config=memory_config)


def _widen(index: Tensor, like: Tensor) -> Tensor:
    """Numbers [N, W] for whole rows: [N, W, C]."""
    operands("tosa_gather", index, like)
    block = index.block.unsqueeze(-1).expand(*index.block.shape, like.shape[-1])
    cuts = rows("S(0), * -> S(0)", "S(1), * -> S(1)", "R, S(2) -> S(2)", "R, * -> R", exact=True)
    label = topology_of(cuts, index, like, shape=(*index.shape, like.shape[-1]))
    return result(fresh(block), index, topology=label)


@op("index_fill", "index_fill_new")
def index_fill(input, dim, index, value) -> Made:
    """A value put at some numbers of a dim."""
    _, (block, numbers) = operands("index_fill", input, index)
    axes, place = len(input.grid), axis_of("index_fill", dim, len(input.shape))
    size = input.shape[place]
    inside("index_fill", numbers, size, "index")
    hit = (numbers.long().flatten(axes).unsqueeze(-1) == torch.arange(size)).any(-2)
    mask = hit.reshape(*hit.shape[:axes], *(size if each == place else 1 for each in range(len(input.shape))))
    values = torch.where(mask, torch.tensor(value, dtype=block.dtype), block)
    return make(values, moves(same(input), (None,) * len(index.shape), linear=False), input, index)


@op("indexed_fill")
def indexed_fill(batch_id, input_tensor_a, input_tensor_b, *, dim=0) -> Made:
    """A tensor with the entries `batch_id` of a dim taken from the entries of another, in order."""
    blocks = operands("indexed_fill", input_tensor_a, batch_id, input_tensor_b)[1]
    axes, place = len(input_tensor_a.grid), axis_of("indexed_fill", dim, len(input_tensor_a.shape))
    numbers = blocks[1].flatten(axes)
    inside("indexed_fill", numbers, input_tensor_a.shape[place], "entry")
    if numbers.shape[-1] != input_tensor_b.shape[place]:
        raise OperandError(
            f"ttnn.indexed_fill: {numbers.shape[-1]} entries are named, {input_tensor_b.shape[place]} are given"
        )
    block, at, source = spread([blocks[0], numbers, blocks[2]], axes)
    ones = [at.shape[-1] if each == place else 1 for each in range(len(input_tensor_a.shape))]
    index = at.long().reshape(*at.shape[:axes], *ones).expand_as(source)
    kept = moves(same(input_tensor_a), (None,) * len(batch_id.shape), same(input_tensor_b))
    tensors = (input_tensor_a, batch_id, input_tensor_b)
    return make(block.scatter(axes + place, index, source), kept, *tensors)


@op("moreh_getitem")
def moreh_getitem(input, index_tensors, index_dims) -> Made:
    """Elements by one vector of numbers for each of some dims next to each other; those become one dim."""
    blocks = operands("moreh_getitem", input, *index_tensors)[1]
    axes, rank = len(input.grid), len(input.shape)
    dims = [axis_of("moreh_getitem", dim, rank) for dim in index_dims]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise OperandError(f"ttnn.moreh_getitem: dims {list(index_dims)} are not next to each other")
    number = torch.zeros((), dtype=torch.int64)
    for dim, index in zip(dims, blocks[1:], strict=True):
        inside("moreh_getitem", index, input.shape[dim], f"index of dim {dim}", lowest=-input.shape[dim])
        number = number * input.shape[dim] + index.long().flatten(axes) % input.shape[dim]
    merged = blocks[0].flatten(axes + dims[0], axes + dims[-1]).movedim(axes + dims[0], axes)
    values = take_rows(merged, number, axes).movedim(axes, axes + dims[0])
    gone = len(dims) - 1
    kept = tuple(None if dim in dims else dim - gone * (dim > dims[-1]) for dim in range(rank))
    tensors = (input, *index_tensors)
    cuts = moves(kept, *((dims[0],) * len(index.shape) for index in index_tensors))
    return make(fresh(values), cuts, *tensors)


# by value


@op("nonzero")
def nonzero(input_tensor) -> list[Made]:
    """How many elements of [1, 1, 1, N] are not zero, and their numbers in front; the rest of the numbers are zero."""
    _, (block,) = operands("nonzero", input_tensor)
    axes, size = len(input_tensor.grid), math.prod(input_tensor.shape)
    hit = block.reshape(*block.shape[:axes], size) != 0
    order = hit.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = hit.sum(-1, keepdim=True)
    numbers = torch.where(torch.arange(size) < count, order, torch.zeros((), dtype=order.dtype))
    label = topology_of((), input_tensor, shape=(1, 1, 1, size))
    rows = [each.reshape(*each.shape[:axes], 1, 1, 1, each.shape[-1]) for each in (count, numbers)]
    return [Made(each, input_tensor, label, DataType.UINT32, Layout.ROW_MAJOR) for each in rows]


@op("experimental.isin")
def isin(elements, test_elements, *, invert=False) -> Made:
    """Whether every element is among some others."""
    _, (block, others) = operands("experimental.isin", elements, test_elements)
    axes = len(elements.grid)
    listed = others.flatten(axes)
    hit = block.unsqueeze(-1) == listed.reshape(*listed.shape[:axes], *(1,) * len(elements.shape), listed.shape[-1])
    both = (elements, test_elements)
    return make(hit.any(-1) != invert, moves(same(elements), (None,) * len(test_elements.shape), linear=False), *both)
