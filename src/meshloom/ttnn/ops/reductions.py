"""Reductions, orderings and running sums: every device over its own part.

A dim that is summed over drops unless `keepdim`; without a dim all are, and the result has rank 0. Over a sharded dim
the label of a sum, mean, maximum, minimum or product says that devices hold terms of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import Made, Optionals, make, op, operands, register
from meshloom.ttnn.ops.topologies import EACH, LINEAR, Named, moves, same, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.padding import fill_padding, real_places, reduce_without_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

Dims = int | Sequence[int] | None


def dims_of(name: str, tensor: Tensor, dim: Dims) -> list[int]:
    """The dims that were named, counted from the back, as a block takes them; all of them for None or no dims."""
    rank = len(tensor.shape)
    named = [dim] if isinstance(dim, int) else list(dim or range(rank))
    for each in named:
        if not -max(rank, 1) <= each < max(rank, 1):
            raise OperandError(
                f"ttnn.{name}: Unsupported dim {each} for a tensor of rank {rank}",
                fix=f"dims are {-rank} to {rank - 1}",
            )
    return sorted({each % rank - rank for each in named}) if rank else []


def exact(block: Block) -> Block:
    """In float32 if it is bfloat16: sums are kept there and rounded once."""
    return block.float() if block.dtype is torch.bfloat16 else block


REDUCED_AS = {"sum": "sum", "amax": "max", "amin": "min", "prod": "prod"}  # native reductions whose padding is filled


def reduce(
    name: str,
    function: Callable[[Block, list[int], bool], Block],
    native: str,
    tensor: Tensor,
    dim: Dims,
    keepdim: bool,
    scalar: float = 1.0,
) -> Made:
    """A function over dims of every device's part; `native` is the reduction whose rule says what becomes of cuts."""
    _, (block,) = operands(name, tensor)
    dims = dims_of(name, tensor, dim)
    identity = REDUCED_AS.get(native)
    block = exact(fill_padding(block, tensor, dims, identity))
    if not dims:
        found = block
    elif identity is None and real_places(tensor, dims) is not None:
        found = reduce_without_padding(lambda part: function(part, dims, keepdim), block, tensor, dims)
    else:
        found = function(block, dims, keepdim)
    if scalar != 1.0:
        found = found * scalar
    return make(found, native, tensor, filled=True, dim=tuple(dims), keepdim=keepdim)


def _one_by_one(function: Callable[..., Block]) -> Callable[[Block, list[int], bool], Block]:
    """A function that torch has for one dim only."""

    def call(block: Block, dims: list[int], keepdim: bool) -> Block:
        for dim in dims:  # from the back of the negative numbers: -4 first, and those behind keep their number
            block = function(block, dim, keepdim)
        return block

    return call


_SPEED = "compute_kernel_config correction sub_core_grids fast_and_approximate_mode output_layout"


def _summing(name: str, function: Callable[[Block, list[int], bool], Block], op_name: str) -> None:
    def call(input_tensor: Tensor, dim: Dims = None, keepdim: bool = False, *, scalar: float = 1.0) -> Made:
        return reduce(name, function, op_name, input_tensor, dim, keepdim, scalar)

    register(name, f"The {name} over a dim, several, or all; `scalar` multiplies it.", call, also=_SPEED)


_summing("sum", lambda x, dims, keep: x.sum(dims, keep), "sum")
_summing("mean", lambda x, dims, keep: (x if x.is_floating_point() else x.float()).mean(dims, keep), "mean")
_summing("max", lambda x, dims, keep: x.amax(dims, keep), "amax")
_summing("min", lambda x, dims, keep: x.amin(dims, keep), "amin")


def _spreading(name: str, function: Callable[..., Block]) -> None:
    def call(
        input_tensor: Tensor, dim: Dims = None, keepdim: bool = False, *, scalar: float = 1.0, correction: bool = True
    ) -> Made:
        def spread(block: Block, dims: list[int], keep: bool) -> Block:
            return function(block.float(), dims, correction=int(correction), keepdim=keep)

        return reduce(name, spread, "var", input_tensor, dim, keepdim, scalar)

    register(name, f"The {name} over a dim, several, or all; `correction` divides by one less than the count.", call)


_spreading("std", torch.std)
_spreading("var", torch.var)


@op("prod")
def prod(input_tensor, dim: int | Tensor | None = None, keepdim=False, *, output_tensor=None, dims=None) -> Made:
    """The product over a dim or all; with an output tensor and `dims=`, those dims are kept with size 1."""
    if isinstance(dim, Tensor):
        output_tensor, dim = dim, None
    product = _one_by_one(lambda x, d, keep: x.prod(d, keep))
    over, keep = (dim, keepdim) if dims is None else (dims, True)
    return reduce("prod", product, "prod", input_tensor, over, keep).into(output_tensor)


@op("argmax")
def argmax(input_tensor, dim=None, keepdim=False) -> Made:
    """Where the largest element lies: the first one, in one dim or in the flattened part."""
    _, (block,) = operands("argmax", input_tensor)
    dims, axes = dims_of("argmax", input_tensor, dim), len(input_tensor.grid)
    block = fill_padding(block, input_tensor, dims, "max")
    if dim is None:
        found = block.flatten(axes).argmax(-1) if len(input_tensor.shape) else torch.zeros_like(block)
        if keepdim:
            found = found.reshape(*found.shape, *(1,) * len(input_tensor.shape))
    else:
        found = block.argmax(dims[0], keepdim)
    label = topology_of("argmax", input_tensor, dim=tuple(dims), keepdim=keepdim)
    return Made(found, input_tensor, label, dtype=DataType.UINT32, layout=Layout.ROW_MAJOR)


def _index_kind(size: int) -> DataType:
    return DataType.UINT16 if size < 1 << 16 else DataType.UINT32


def _two(values: Block, indices: Block, tensor: Tensor, dim: int, outputs: Sequence[Tensor] | None) -> list[Made]:
    """Values and where they were, every device for itself: along a sharded dim they stand side by side."""
    label = topology_of(moves(same(tensor), linear=False), tensor, shape=values.shape[len(tensor.grid) :])
    first, second = outputs if outputs is not None else (None, None)
    kind = second.dtype if second is not None else _index_kind(tensor.shape[dim])
    return [Made(values, tensor, label, output=first), Made(indices, tensor, label, kind, output=second)]


_ORDER = Optionals("indices_tensor", stable=False)


@op("topk", more=_ORDER)
def topk(
    input_tensor, k=32, dim=-1, largest=True, sorted=True, *, output_tensor: Sequence[Tensor] | None = None, **how
) -> list[Made]:
    """The k largest (or smallest) elements along a dim and where they were; `indices_tensor` names the places anew."""
    indices_tensor, stable = _ORDER(how)
    _, (block, *names) = operands("topk", input_tensor, *([] if indices_tensor is None else [indices_tensor]))
    (at,) = dims_of("topk", input_tensor, dim)
    if not 1 <= k <= input_tensor.shape[at]:
        raise OperandError(f"ttnn.topk: k={k} of a dim of size {input_tensor.shape[at]}", fix="k is 1 to that size")
    block = fill_padding(block, input_tensor, [at], "max" if largest else "min")
    if stable:
        order = torch.sort(block, dim=at, descending=largest, stable=True)
        values, indices = order.values.narrow(at, 0, k), order.indices.narrow(at, 0, k)
    else:
        values, indices = torch.topk(block, k, at, largest, sorted)
    for each in names:
        named, indices = spread([each, indices], len(input_tensor.grid))
        indices = named.gather(at, indices)
    return _two(values, indices, input_tensor, at, output_tensor)


@op("sort")
def sort(input_tensor, dim=-1, descending=False, stable=False, *, out=None) -> list[Made]:
    """The elements in order along a dim, and where they were."""
    _, (block,) = operands("sort", input_tensor)
    (at,) = dims_of("sort", input_tensor, dim)
    block = fill_padding(block, input_tensor, [at], "max" if descending else "min")  # padding stays at the end
    values, indices = torch.sort(block, dim=at, descending=descending, stable=stable)
    return _two(values, indices, input_tensor, at, out)


def run(
    name: str,
    function: Callable[[Block, int], Block],
    tensor: Tensor,
    dim: int,
    reverse_order: bool = False,
    rule: Named = EACH,
    identity: str = "sum",
) -> Made:
    """A function along a dim of every device's part, from its start or from its end.

    Padding of the dim takes the value that changes nothing for the reduction of that name, and is zero in the result.
    """
    _, (block,) = operands(name, tensor)
    (at,) = dims_of(name, tensor, dim)
    values = exact(fill_padding(block, tensor, [at], identity))
    found = function(values.flip(at), at).flip(at) if reverse_order else function(values, at)
    return make(fill_padding(found, tensor, [at], "sum"), rule, tensor)


@op("cumsum")
def cumsum(input, dim, *, reverse_order=False) -> Made:
    """The sum of all elements up to each one, or from each one on."""
    return run("cumsum", torch.cumsum, input, dim, reverse_order, LINEAR)


@op("cumprod")
def cumprod(input_tensor, dim, *, reverse_order=False) -> Made:
    """The product of all elements up to each one, or from each one on."""
    return run("cumprod", torch.cumprod, input_tensor, dim, reverse_order, identity="prod")


@op("ema")
def ema(input_tensor, alpha) -> Made:
    """The moving average along the last dim: y[t] = alpha * y[t-1] + (1 - alpha) * x[t], and y[-1] = 0."""

    def average(x: Block, at: int) -> Block:
        total, steps = torch.zeros_like(x.select(at, 0)), []
        for each in x.unbind(at):
            total = alpha * total + (1 - alpha) * each
            steps.append(total)
        return torch.stack(steps, at) if steps else x

    return run("ema", average, input_tensor, -1, rule=LINEAR)


@op("experimental.fast_reduce_nc")
def fast_reduce_nc(input, *, dims=()) -> Made:
    """The sum over leading dims, which are kept with size 1."""
    name, over = "experimental.fast_reduce_nc", tuple(dims) or (0, 1)
    return reduce(name, lambda x, named, keep: x.sum(named, keep), "sum", input, over, True)


@op("experimental.intimg")
def intimg(input_tensor) -> Made:
    """The sum of all elements above and to the left of each one, itself included, of pictures [B, H, W, C]."""
    name = "experimental.intimg"
    if len(input_tensor.shape) != 4:
        raise OperandError(f"ttnn.{name} takes pictures [B, H, W, C], not {list(input_tensor.shape)}")
    _, (block,) = operands(name, input_tensor)
    found = exact(fill_padding(block, input_tensor, (-3, -2), "sum")).cumsum(-3).cumsum(-2)
    return make(found, LINEAR, input_tensor)
