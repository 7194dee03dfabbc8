"""Pooling and resampling of pictures: every device its own, all in one call. Pooling gives flattened results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import spread, whole
from meshloom.ttnn.ops.calling import Made, Optionals, make, op, operands, register, take
from meshloom.ttnn.ops.convolution_configs import Op2DSliceConfig
from meshloom.ttnn.ops.picture_memory import memory_by_rows, memory_of_pictures
from meshloom.ttnn.ops.sliding import Window, channels_first, flatten_pictures, topology_of_pictures
from meshloom.ttnn.ops.topologies import einsum, moves, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import TensorMemoryLayout
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
    tensor,
    linear: bool,
    dtype,
    *,
    deallocate_input=False,
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


class _Pictures:
    """Pictures that an op takes with their sizes, [N, C, H, W] of every device."""

    def __init__(self, name: str, tensor: Tensor, *, batch_size, input_h, input_w, channels) -> None:
        operands(name, tensor)
        self.height, self.width, self.axes = input_h, input_w, len(tensor.grid)
        self.block = channels_first(name, tensor, (batch_size, input_h, input_w, channels)).float()


@op("max_pool2d", more=(_Pictures, Window, _pool))
def max_pool2d(input_tensor, *, return_indices=False, dtype=DataType.BFLOAT16, **how) -> Any:
    """The largest of every window, [1, 1, N * H' * W', C]; with `return_indices` also where in its picture it was."""
    pictures = _Pictures("max_pool2d", input_tensor, **take(_Pictures, how))
    window = Window(**take(Window, how))
    down, across = window.count(pictures.height, pictures.width)
    padded = window.pad(pictures.block, value=-torch.inf)
    flat = padded.flatten(0, pictures.axes)
    pooled = F.max_pool2d(flat, window.kernel, window.steps, 0, window.holes, window.ceil, return_indices=True)
    found, where = (each.unflatten(0, padded.shape[: pictures.axes + 1])[..., :down, :across] for each in pooled)
    if not return_indices:
        return _pool(found, input_tensor, False, dtype, **how)
    row, column = where // padded.shape[-1] - window.edges[0], where % padded.shape[-1] - window.edges[2]
    index = row.clamp(0, pictures.height - 1) * pictures.width + column.clamp(0, pictures.width - 1)
    made = _pool(found, input_tensor, False, dtype, **{**how, "deallocate_input": False})
    return [made, _pool(index, input_tensor, False, DataType.UINT16, **how)]


@op("avg_pool2d", more=(_Pictures, Window, _pool))
def avg_pool2d(input_tensor, count_include_pad=True, divisor_override=None, **how) -> Made:
    """The mean of every window, [1, 1, N * H' * W', C], padding counted or not."""
    pictures = _Pictures("avg_pool2d", input_tensor, **take(_Pictures, how))
    window = Window(**take(Window, how))
    down, across = window.count(pictures.height, pictures.width)

    def sum_windows(values: Block) -> Block:
        found = F.avg_pool2d(values, window.kernel, window.steps, 0, window.ceil, divisor_override=1)
        return found[..., :down, :across]

    total = _by_picture(window.pad(pictures.block), pictures.axes, sum_windows)
    places = torch.ones(1, 1, pictures.height, pictures.width)
    inside = window.pad(places, value=1.0 if count_include_pad else 0.0)
    found = total / (divisor_override or sum_windows(inside))
    return _pool(found, input_tensor, True, DataType.BFLOAT16, **how)


@op("global_avg_pool2d")
def global_avg_pool2d(input_tensor, *, memory_config=None, dtype=None) -> Made:
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
    def call(input_tensor, output_size, **how) -> Made:
        pictures = _Pictures(name, input_tensor, **take(_Pictures, how))
        asked = tuple(whole(output_size, 2))
        found = _by_picture(pictures.block, pictures.axes, lambda flat: function(flat, asked))
        return _pool(found, input_tensor, linear, input_tensor.dtype, **how)

    register(name, f"{doc} of as many windows as asked for, [1, 1, N * h * w, C].", call, more=(_Pictures, _pool))


_adaptive("adaptive_avg_pool2d", F.adaptive_avg_pool2d, True, "The means")
_adaptive("adaptive_max_pool2d", F.adaptive_max_pool2d, False, "The largest")


# other sizes, other places


@op("upsample")
def upsample(input_tensor, scale_factor, *, mode="nearest") -> Made:
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


_UNCOVERED = Optionals(use_precomputed_grid=False, batch_output_channels=False)


@op("grid_sample", more=_UNCOVERED)
def grid_sample(
    input_tensor, grid: Tensor, *, mode="bilinear", padding_mode="zeros", align_corners=False, **uncovered
) -> Made:
    """Pictures [N, H, W, C] read at places [N, h, w, 2] from -1 to 1: [N, h, w, C]."""
    if any(_UNCOVERED(uncovered)):
        raise OperandError("ttnn.grid_sample: precomputed and batched grids are not covered", fix="a grid [N, h, w, 2]")
    blocks = operands("grid_sample", input_tensor, grid)[1]
    axes = len(input_tensor.grid)
    pictures, places = (each.float().flatten(0, axes) for each in spread(blocks, axes))
    found = F.grid_sample(pictures.movedim(-1, -3), places, mode, padding_mode, align_corners)
    sizes = spread(blocks, axes)[0].shape[: axes + 1]
    values = found.unflatten(0, sizes).movedim(-3, -1)

    return make(values.contiguous(), einsum("n..c, nhw. -> nhwc"), input_tensor, grid)
