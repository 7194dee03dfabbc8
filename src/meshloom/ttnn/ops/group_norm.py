"""Group norm, and the forms in which programs give it weights and masks.

On hardware the channels of a core fill whole tiles, so weights are laid out core by core, and a mask says which columns
of its tiles belong to a group. Here the mask changes nothing, and weights are put together again.
"""

from __future__ import annotations

from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.calling import Made, make, op, operands
from meshloom.ttnn.ops.normalisation import affine
from meshloom.ttnn.ops.topologies import moves, rows, same
from meshloom.ttnn.tensor.converting import from_torch
from meshloom.ttnn.tensor.formats import DataType, Layout, Tile
from meshloom.ttnn.tensor.padding import mean_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["create_group_norm_input_mask", "create_group_norm_input_negative_mask", "create_group_norm_weight_bias_rm"]

TILE_WIDTH = 32


@op("group_norm")
def group_norm(input_tensor, *, num_groups, epsilon=1e-12, weight=None, bias=None, core_grid=None) -> Made:
    """The norm of groups of channels of [N, 1, H * W, C]: mean and variance over all places and the group's channels.

    Weight and bias may be padded to tiles, as [1, 1, tiles, 32]: all channels, or those of every core, at the front.
    """
    channels, axes, rank = input_tensor.shape[-1], len(input_tensor.grid), len(input_tensor.shape)
    if channels % num_groups:
        raise OperandError(f"ttnn.group_norm: {channels} channels are not {num_groups} equal groups")
    present = [each for each in (input_tensor, weight, bias) if each is not None]
    _, (block, *_) = operands("group_norm", *present)
    gamma, beta = (_by_channel(each, input_tensor, core_grid) for each in (weight, bias))
    places = tuple(range(1 - rank, -1))  # all dims but those of pictures and channels

    def average(values: Block) -> Block:
        """The mean of its group, for every channel."""
        groups = mean_of(values, input_tensor, places).unflatten(-1, (num_groups, -1))
        result: Block = groups.mean(-1, keepdim=True).expand_as(groups).flatten(-2)
        return result

    def call(x: Block) -> Block:
        apart = x - average(x)
        return affine(apart * torch.rsqrt(average(apart.square()) + epsilon), gamma, beta, axes, rank)

    last, others = len(input_tensor.shape) - 1, present[1:]
    cuts = moves(same(input_tensor), *((last,) * len(each.shape) for each in others), linear=False)
    return make(call(block.float()), (*cuts, *rows(f"S({last}){', R' * len(others)} -> S({last})")), *present)


def _by_channel(tensor: Tensor | None, like: Tensor, core_grid: Any) -> Block | None:
    """A weight as one row of channels, without what `create_group_norm_weight_bias_rm` puts behind those of a core."""
    if tensor is None:
        return None
    flat = tensor.block.float().flatten(len(tensor.grid))
    channels, total = like.shape[-1], flat.shape[-1]
    cores = _cores_across(channels, total, like, core_grid)
    wide = TILE_WIDTH * -(-channels // cores // TILE_WIDTH) if cores > 1 else total
    result: Block | None = flat[..., : cores * wide].unflatten(-1, (cores, wide))[..., : channels // cores].flatten(-2)
    return result


def _cores_across(channels: int, total: int, like: Tensor, core_grid: Any) -> int:
    """Over how many cores a weight was laid out: as the channels of the input lie, if its size is one of that."""
    spec = like.memory_config().shard_spec
    told = [channels // spec.shape[1]] if spec is not None and channels % spec.shape[1] == 0 else []
    told += [core_grid.y, core_grid.x] if hasattr(core_grid, "x") else []
    fitting = [n for n in range(1, channels + 1) if _padded_width(channels, n) == total]
    return next((n for n in (*told, *fitting) if n in fitting), 1)


def _padded_width(channels: int, cores: int) -> int | None:
    """What channels take when those of every core are filled up to whole tiles.

    >>> _padded_width(320, 1), _padded_width(320, 4), _padded_width(320, 3)
    (320, 384, None)
    """
    return None if channels % cores else cores * TILE_WIDTH * -(-channels // cores // TILE_WIDTH)


def create_group_norm_weight_bias_rm(input_tensor: torch.Tensor, num_channels: int, num_cores_x: int) -> torch.Tensor:
    """A weight or bias of `group_norm` as [1, 1, tiles, 32]: the channels of every core, filled up to tiles with zeros.

    >>> create_group_norm_weight_bias_rm(torch.ones(96), 96, 2).sum(-1).tolist()
    [[[32.0, 16.0, 32.0, 16.0]]]
    """
    padded = _padded_width(num_channels, num_cores_x)
    if padded is None or input_tensor.numel() != num_channels:
        raise ArgumentError(
            f"create_group_norm_weight_bias_rm: {input_tensor.numel()} elements are not {num_channels} channels "
            f"over {num_cores_x} cores",
            fix="one element for every channel, and a number of cores that divides them",
        )
    each = num_channels // num_cores_x
    rows = torch.nn.functional.pad(input_tensor.reshape(num_cores_x, each), (0, padded // num_cores_x - each))
    return rows.reshape(1, 1, -1, TILE_WIDTH)


def create_group_norm_input_mask(
    num_channel: int,
    num_groups: int,
    num_cores_across_channel: int,
    data_type: DataType = DataType.BFLOAT16,
    tile_height: int = 32,
    tile_width: int = TILE_WIDTH,
    rows_in_last_tile: int = 0,
) -> Tensor:
    """Ones at the channels of every group, inside of the tiles that it touches: [1, groups, 32, tiles * 32], on host.

    Groups follow one another on a core, so one may begin within a tile:

    >>> mask = create_group_norm_input_mask(96, 4, 1)  # groups of 24 begin at 0, 24, 48 = 32 + 16, 72 = 64 + 8
    >>> mask.shape, mask.to_torch()[0, :, 0].argmax(-1).tolist()
    (Shape([1, 4, 32, 64]), [0, 24, 16, 8])
    """
    if rows_in_last_tile:
        raise ArgumentError(
            f"create_group_norm_input_mask: rows_in_last_tile={rows_in_last_tile} is not covered", fix="0"
        )
    mask = _mask_groups(num_channel, num_groups, num_cores_across_channel, tile_height, tile_width)
    return from_torch(mask, data_type, layout=Layout.TILE, tile=Tile((tile_height, tile_width)))


def create_group_norm_input_negative_mask(
    num_channel: int,
    num_groups: int,
    num_cores_across_channel: int,
    data_type: DataType = DataType.BFLOAT16,
    tile_height: int = 32,
    tile_width: int = TILE_WIDTH,
) -> Tensor:
    """Zeros where `create_group_norm_input_mask` has ones, and ones elsewhere."""
    mask = _mask_groups(num_channel, num_groups, num_cores_across_channel, tile_height, tile_width)
    return from_torch(1 - mask, data_type, layout=Layout.TILE, tile=Tile((tile_height, tile_width)))


def _mask_groups(channels: int, groups: int, cores: int, height: int, width: int) -> torch.Tensor:
    if channels % groups or groups % cores:
        raise ArgumentError(
            f"a mask of {groups} groups of {channels} channels over {cores} cores",
            fix="groups of equal size, as many of them on every core",
        )
    size = channels // groups
    starts = [group % (groups // cores) * size % width for group in range(groups)]
    tiles = max(-(-(start + size) // width) for start in (group * size % width for group in range(groups)))
    mask = torch.zeros(1, groups, height, tiles * width)
    for group, start in enumerate(starts):
        mask[:, group, :, start : start + size] = 1
    return mask
