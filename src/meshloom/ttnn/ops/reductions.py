"""Reductions, orderings and running sums: every device over its own part.

A dim that is summed over drops unless `keepdim`; without a dim all are, and the result has rank 0. Over a sharded dim
the label of a sum, mean, maximum, minimum or product says that devices hold terms of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.calling import op, operands, result
from meshloom.ttnn.formats import DataType, Layout
from meshloom.ttnn.labels import merged, reduced
from meshloom.ttnn.memory import MemoryConfig
from meshloom.ttnn.padding import filled
from meshloom.ttnn.parts import Block
from meshloom.ttnn.tensor import Tensor

Dims = int | Sequence[int] | None


def dims_of(name: str, tensor: Tensor, dim: Dims) -> list[int]:
    """The dims that were named, counted from the back, as a block takes them; all of them for None."""
    rank = len(tensor.shape)
    named = range(rank) if dim is None else [dim] if isinstance(dim, int) else list(dim)
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


def _reduce(
    name: str,
    function: Callable[[Block, list[int], bool], Block],
    op_name: str | None,
    tensor: Tensor,
    dim: Dims,
    keepdim: bool,
    memory_config: MemoryConfig | None,
    scalar: float = 1.0,
    layout: Layout | None = None,
    output_tensor: Tensor | None = None,
) -> Tensor:
    _, (block,) = operands(name, tensor)
    dims = dims_of(name, tensor, dim)
    block = filled(block, tensor, dims, op_name)
    found = function(exact(block), dims, keepdim) if dims else exact(block)
    if scalar != 1.0:
        found = found * scalar
    return result(
        found,
        tensor,
        topology=reduced(tensor, dims, keepdim, op_name, clean=True),
        layout=layout,
        memory_config=memory_config,
        output_tensor=output_tensor,
    )


def _one_by_one(function: Callable[..., Block]) -> Callable[[Block, list[int], bool], Block]:
    """A function that torch has for one dim only."""

    def call(block: Block, dims: list[int], keepdim: bool) -> Block:
        for dim in dims:  # from the back of the negative numbers: -4 first, and those behind keep their number
            block = function(block, dim, keepdim)
        return block

    return call


def _summing(name: str, function: Callable[[Block, list[int], bool], Block], op_name: str) -> None:
    def call(
        input_tensor: Tensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        memory_config: MemoryConfig | None = None,
        compute_kernel_config: Any = None,
        scalar: float = 1.0,
        correction: bool | None = None,
        sub_core_grids: Any = None,
        fast_and_approximate_mode: bool = False,
        output_layout: Layout | None = None,
    ) -> Tensor:
        return _reduce(name, function, op_name, input_tensor, dim, keepdim, memory_config, scalar, output_layout)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"The {name} over a dim, several, or all; `scalar` multiplies it."
    op(name)(call)


_summing("sum", lambda x, dims, keep: x.sum(dims, keep), "sum")
_summing("mean", lambda x, dims, keep: (x if x.is_floating_point() else x.float()).mean(dims, keep), "mean")
_summing("max", lambda x, dims, keep: x.amax(dims, keep), "max")
_summing("min", lambda x, dims, keep: x.amin(dims, keep), "min")


def _spreading(name: str, function: Callable[..., Block]) -> None:
    def call(
        input_tensor: Tensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        memory_config: MemoryConfig | None = None,
        compute_kernel_config: Any = None,
        scalar: float = 1.0,
        correction: bool = True,
        sub_core_grids: Any = None,
    ) -> Tensor:
        def spread(block: Block, dims: list[int], keep: bool) -> Block:
            return function(block.float(), dims, correction=int(correction), keepdim=keep)

        return _reduce(name, spread, None, input_tensor, dim, keepdim, memory_config, scalar)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"The {name} over a dim, several, or all; `correction` divides by one less than the count."
    op(name)(call)


_spreading("std", torch.std)
_spreading("var", torch.var)


@op("prod")
def prod(
    input_tensor: Tensor,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
    *,
    output_tensor: Tensor | None = None,
    dims: Sequence[int] | None = None,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """The product over a dim or all; with an output tensor and `dims=`, those dims are kept with size 1."""
    if isinstance(dim, Tensor):
        output_tensor, dim = dim, None
    product = _one_by_one(lambda x, d, keep: x.prod(d, keep))
    if dims is not None:
        return _reduce("prod", product, "prod", input_tensor, dims, True, memory_config, output_tensor=output_tensor)
    return _reduce("prod", product, "prod", input_tensor, dim, keepdim, memory_config, output_tensor=output_tensor)


@op("argmax")
def argmax(
    input_tensor: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    sub_core_grids: Any = None,
    memory_config: MemoryConfig | None = None,
    output_tensor: Tensor | None = None,
    enable_secondary_dm: bool | None = None,
) -> Tensor:
    """Where the largest element lies: the first one, in one dim or in the flattened part."""
    _, (block,) = operands("argmax", input_tensor)
    dims, axes = dims_of("argmax", input_tensor, dim), len(input_tensor.grid)
    if dim is None:
        found = block.flatten(axes).argmax(-1) if len(input_tensor.shape) else torch.zeros_like(block)
        if keepdim:
            found = found.reshape(*found.shape, *(1,) * len(input_tensor.shape))
    else:
        found = block.argmax(dims[0], keepdim)
    return result(
        found,
        input_tensor,
        topology=reduced(input_tensor, dims, keepdim, None),
        dtype=DataType.UINT32,
        layout=Layout.ROW_MAJOR,
        memory_config=memory_config,
        output_tensor=output_tensor,
    )


def _index_kind(size: int) -> DataType:
    return DataType.UINT16 if size < 1 << 16 else DataType.UINT32


def _two(
    values: Block,
    indices: Block,
    tensor: Tensor,
    dim: int,
    memory_config: MemoryConfig | None,
    outputs: Sequence[Tensor] | None,
) -> list[Tensor]:
    """Values and where they were, every device for itself: along a sharded dim they stand side by side."""
    label = merged((tensor,), len(tensor.shape))
    first, second = outputs if outputs is not None else (None, None)
    kind = second.dtype if second is not None else _index_kind(tensor.shape[dim])
    return [
        result(values, tensor, topology=label, memory_config=memory_config, output_tensor=first),
        result(indices, tensor, topology=label, dtype=kind, memory_config=memory_config, output_tensor=second),
    ]


@op("topk")
def topk(
    input_tensor: Tensor,
    k: int = 32,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    memory_config: MemoryConfig | None = None,
    sub_core_grids: Any = None,
    indices_tensor: Tensor | None = None,
    output_tensor: Sequence[Tensor] | None = None,
    stable: bool = False,
) -> list[Tensor]:
    """The k largest (or smallest) elements along a dim and where they were; `indices_tensor` names the places anew."""
    _, (block,) = operands("topk", input_tensor)
    (at,) = dims_of("topk", input_tensor, dim)
    if not 1 <= k <= input_tensor.shape[at]:
        raise OperandError(f"ttnn.topk: k={k} of a dim of size {input_tensor.shape[at]}", fix="k is 1 to that size")
    if stable:
        order = torch.sort(block, dim=at, descending=largest, stable=True)
        values, indices = order.values.narrow(at, 0, k), order.indices.narrow(at, 0, k)
    else:
        values, indices = torch.topk(block, k, at, largest, sorted)
    if indices_tensor is not None:
        _, (names,) = operands("topk", indices_tensor)
        lead = torch.broadcast_shapes(names.shape[: len(input_tensor.grid)], indices.shape[: len(input_tensor.grid)])
        names, indices = (each.expand(*lead, *each.shape[len(lead) :]) for each in (names, indices))
        indices = names.gather(at, indices)
    return _two(values, indices, input_tensor, at, memory_config, output_tensor)


@op("sort")
def sort(
    input_tensor: Tensor,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
    *,
    memory_config: MemoryConfig | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The elements in order along a dim, and where they were."""
    _, (block,) = operands("sort", input_tensor)
    (at,) = dims_of("sort", input_tensor, dim)
    values, indices = torch.sort(block, dim=at, descending=descending, stable=stable)
    return _two(values, indices, input_tensor, at, memory_config, out)


def _running(
    name: str,
    function: Callable[[Block, int], Block],
    tensor: Tensor,
    dim: int,
    dtype: DataType | None,
    reverse_order: bool,
    out: Tensor | None,
    memory_config: MemoryConfig | None,
    keeps: str = "",
) -> Tensor:
    _, (block,) = operands(name, tensor)
    (at,) = dims_of(name, tensor, dim)
    values = exact(block)
    found = function(values.flip(at), at).flip(at) if reverse_order else function(values, at)
    label = merged((tensor,), len(tensor.shape), keeps=keeps)
    return result(found, tensor, topology=label, dtype=dtype, memory_config=memory_config, output_tensor=out)


@op("cumsum")
def cumsum(
    input: Tensor,
    dim: int,
    *,
    dtype: DataType | None = None,
    reverse_order: bool = False,
    out: Tensor | None = None,
    memory_config: MemoryConfig | None = None,
    disable_compensated_sum: bool = False,
) -> Tensor:
    """The sum of all elements up to each one, or from each one on."""
    return _running("cumsum", torch.cumsum, input, dim, dtype, reverse_order, out, memory_config, "sum")


@op("cumprod")
def cumprod(
    input_tensor: Tensor,
    dim: int,
    *,
    dtype: DataType | None = None,
    reverse_order: bool = False,
    out: Tensor | None = None,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """The product of all elements up to each one, or from each one on."""
    return _running("cumprod", torch.cumprod, input_tensor, dim, dtype, reverse_order, out, memory_config)


@op("ema")
def ema(
    input_tensor: Tensor,
    alpha: float,
    *,
    out: Tensor | None = None,
    core_grid: Any = None,
    memory_config: MemoryConfig | None = None,
    compute_kernel_config: Any = None,
) -> Tensor:
    """The moving average along the last dim: y[t] = alpha * y[t-1] + (1 - alpha) * x[t], and y[-1] = 0."""

    def averaged(x: Block, at: int) -> Block:
        total, steps = torch.zeros_like(x.select(at, 0)), []
        for each in x.unbind(at):
            total = alpha * total + (1 - alpha) * each
            steps.append(total)
        return torch.stack(steps, at) if steps else x

    return _running("ema", averaged, input_tensor, -1, None, False, out, memory_config, "sum")


@op("experimental.fast_reduce_nc")
def fast_reduce_nc(
    input: Tensor,
    *,
    dims: Sequence[int] = (),
    output: Tensor | None = None,
    memory_config: MemoryConfig | None = None,
    compute_kernel_config: Any = None,
    sub_core_grids: Any = None,
) -> Tensor:
    """The sum over leading dims, which are kept with size 1."""
    return _reduce(
        "experimental.fast_reduce_nc",
        lambda x, named, keep: x.sum(named, keep),
        "sum",
        input,
        tuple(dims) or (0, 1),
        True,
        memory_config,
        output_tensor=output,
    )
