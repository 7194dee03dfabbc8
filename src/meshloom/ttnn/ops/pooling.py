"""Pooling and resampling of pictures: every device its own, all in one call. Pooling gives flattened results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import spread, whole
from meshloom.ttnn.ops.calling import Made, make, op, operands, register
from meshloom.ttnn.ops.convolution_configs import Op2DSliceConfig
from meshloom.ttnn.ops.picture_memory import memory_by_rows, memory_of_pictures
from meshloom.ttnn.ops.sliding import (
    Around,
    around,
    channels_first,
    flatten_pictures,
    topology_of_pictures,
    torch_order,
    windows,
)
from meshloom.ttnn.ops.topologies import einsum, moves, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import MemoryConfig, TensorMemoryLayout
from meshloom.ttnn.tensor.padding import mean_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor


def _by_picture(pictures: Block, axes: int, function: Callable[[Block], Block]) -> Block:
    """A function of [B, C, H, W], of the pictures of all devices."""
    sizes = pictures.shape[: axes + 1]
    found = function(pictures.flatten(0, axes))
    return found.reshape(*sizes, *found.shape[1:])


def _pool(
    values: Block,
    tensor: Tensor,
    linear: bool,
    dtype: DataType,
    *,
    deallocate_input: bool = False,
    output_layout: Layout = Layout.ROW_MAJOR,
    applied_shard_scheme: TensorMemoryLayout | None = None,
    dram_slice_config: Op2DSliceConfig | None = None,
) -> Made:
    """What pools share: flattened results, where they lie, and what is freed."""
    block = flatten_pictures(values, len(tensor.grid))
    size = (block.shape[-2], block.shape[-1])
    memory = memory_of_pictures(
        tensor, size, output_layout, asked=applied_shard_scheme, slices=dram_slice_config, keeps_channels=True
    )
    made = Made(block, tensor, topology_of_pictures(tensor, size[0], linear), dtype, output_layout, memory)
    made.frees = tensor if deallocate_input else None
    return made


# windows


@op("max_pool2d", more=_pool)
def max_pool2d(
    input_tensor: Tensor,
    batch_size: int,
    input_h: int,
    input_w: int,
    channels: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
    *,
    return_indices: bool = False,
    dtype: DataType = DataType.BFLOAT16,
    **how: Any,
) -> Any:
    """The largest of every window, [1, 1, N * H' * W', C]; with `return_indices` also where in its picture it was."""
    operands("max_pool2d", input_tensor)
    axes, edges = len(input_tensor.grid), around(padding)
    kernel, steps, holes = whole(kernel_size, 2), whole(stride, 2), whole(dilation, 2)
    pictures = channels_first("max_pool2d", input_tensor, (batch_size, input_h, input_w, channels)).float()
    count = _counts((input_h, input_w), kernel, steps, edges, holes, ceil_mode)
    padded = F.pad(pictures, torch_order(edges), value=-torch.inf)
    found, where = (
        part.unflatten(0, pictures.shape[: axes + 1])
        for part in F.max_pool2d(padded.flatten(0, axes), kernel, steps, 0, holes, ceil_mode, return_indices=True)
    )
    found, where = (part[..., : count[0], : count[1]] for part in (found, where))
    if not return_indices:
        return _pool(found, input_tensor, False, dtype, **how)
    row, column = where // padded.shape[-1] - edges[0], where % padded.shape[-1] - edges[2]
    index = row.clamp(0, input_h - 1) * input_w + column.clamp(0, input_w - 1)
    made = _pool(found, input_tensor, False, dtype, **{**how, "deallocate_input": False})
    return [made, _pool(index, input_tensor, False, DataType.UINT16, **how)]


def _counts(
    sizes: tuple[int, int],
    kernel: Sequence[int],
    stride: Sequence[int],
    edges: Around,
    holes: Sequence[int],
    ceil: bool,
) -> tuple[int, int]:
    top, bottom, left, right = edges
    return (
        windows(sizes[0], kernel[0], stride[0], top, bottom, holes[0], ceil),
        windows(sizes[1], kernel[1], stride[1], left, right, holes[1], ceil),
    )


@op("avg_pool2d", more=_pool)
def avg_pool2d(
    input_tensor: Tensor,
    batch_size: int,
    input_h: int,
    input_w: int,
    channels: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    **how: Any,
) -> Made:
    """The mean of every window, [1, 1, N * H' * W', C], padding counted or not."""
    operands("avg_pool2d", input_tensor)
    axes, edges = len(input_tensor.grid), around(padding)
    kernel, steps = whole(kernel_size, 2), whole(stride, 2)
    pictures = channels_first("avg_pool2d", input_tensor, (batch_size, input_h, input_w, channels)).float()
    count = _counts((input_h, input_w), kernel, steps, edges, (1, 1), ceil_mode)

    def sum_windows(values: Block) -> Block:
        found = F.avg_pool2d(values, kernel, steps, 0, ceil_mode, divisor_override=1)
        return found[..., : count[0], : count[1]]

    total = _by_picture(F.pad(pictures, torch_order(edges)), axes, sum_windows)
    inside = F.pad(torch.ones(1, 1, input_h, input_w), torch_order(edges), value=1.0 if count_include_pad else 0.0)
    found = total / (divisor_override or sum_windows(inside))
    return _pool(found, input_tensor, True, DataType.BFLOAT16, **how)


@op("global_avg_pool2d")
def global_avg_pool2d(
    input_tensor: Tensor, *, memory_config: MemoryConfig | None = None, dtype: DataType | None = None
) -> Made:
    """The mean of every picture of [N, H, W, C]: [N, 1, 1, C]."""
    _, (block,) = operands("global_avg_pool2d", input_tensor)
    if len(input_tensor.shape) != 4:
        raise OperandError(f"ttnn.global_avg_pool2d takes [N, H, W, C], not {list(input_tensor.shape)}")
    return Made(
        mean_of(block.float(), input_tensor, (-3, -2)),
        input_tensor,
        topology_of("mean", input_tensor, dim=(1, 2), keepdim=True),
        dtype=dtype,
        memory_config=memory_config,
    )


def _adaptive(name: str, function: Callable[..., Block], linear: bool, doc: str) -> None:
    def call(
        input_tensor: Tensor,
        batch_size: int,
        input_h: int,
        input_w: int,
        channels: int,
        output_size: Sequence[int],
        **how: Any,
    ) -> Made:
        operands(name, input_tensor)
        pictures = channels_first(name, input_tensor, (batch_size, input_h, input_w, channels)).float()
        asked = tuple(whole(output_size, 2))
        found = _by_picture(pictures, len(input_tensor.grid), lambda flat: function(flat, asked))
        return _pool(found, input_tensor, linear, input_tensor.dtype, **how)

    register(name, f"{doc} of as many windows as asked for, [1, 1, N * h * w, C].", call, more=_pool)


_adaptive("adaptive_avg_pool2d", F.adaptive_avg_pool2d, True, "The means")
_adaptive("adaptive_max_pool2d", F.adaptive_max_pool2d, False, "The largest")


# other sizes, other places


@op("upsample")
def upsample(input_tensor: Tensor, scale_factor: float | Sequence[float], *, mode: str = "nearest") -> Made:
    """Larger pictures, [N, H, W, C]: by the nearest element or between neighbours (bilinear)."""
    _, (block,) = operands("upsample", input_tensor)
    if mode not in ("nearest", "bilinear"):
        raise ArgumentError(f"ttnn.upsample: mode={mode!r}", fix="'nearest' or 'bilinear'")
    if len(input_tensor.shape) != 4:
        raise OperandError(f"ttnn.upsample takes [N, H, W, C], not {list(input_tensor.shape)}")
    factors = (scale_factor, scale_factor) if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
    axes = len(input_tensor.grid)

    def larger(pictures: Block) -> Block:
        return F.interpolate(pictures, scale_factor=tuple(map(float, factors)), mode=mode)

    values = _by_picture(block.movedim(-1, -3).float(), axes, larger).movedim(-3, -1)
    made = make(values.contiguous(), moves((0, 1, 2, 3)), input_tensor)
    if mode == "bilinear" and not input_tensor.is_sharded():
        rows, channels = math.prod(values.shape[axes:-1]), values.shape[-1]
        made.memory_config = memory_by_rows(input_tensor, rows, channels)
    return made


@op("grid_sample")
def grid_sample(
    input_tensor: Tensor,
    grid: Tensor,
    *,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    use_precomputed_grid: bool = False,
    batch_output_channels: bool = False,
) -> Made:
    """Pictures [N, H, W, C] read at places [N, h, w, 2] from -1 to 1: [N, h, w, C]."""
    if use_precomputed_grid or batch_output_channels:
        raise OperandError("ttnn.grid_sample: precomputed and batched grids are not covered", fix="a grid [N, h, w, 2]")
    blocks = operands("grid_sample", input_tensor, grid)[1]
    axes = len(input_tensor.grid)
    pictures, places = (each.float().flatten(0, axes) for each in spread(blocks, axes))
    found = F.grid_sample(pictures.movedim(-1, -3), places, mode, padding_mode, align_corners)
    sizes = spread(blocks, axes)[0].shape[: axes + 1]
    values = found.unflatten(0, sizes).movedim(-3, -1)

    return make(values.contiguous(), einsum("n..c, nhw. -> nhwc"), input_tensor, grid)
