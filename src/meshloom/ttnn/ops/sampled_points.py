"""Pictures read at points between their elements: turned pictures, and attention to points of several pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import Made, make, op, operands
from meshloom.ttnn.ops.topologies import moves, rows
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

# turned pictures


@op("rotate")
def rotate(input_tensor, angle, *, center=None, fill=0.0, expand=False, interpolation_mode="nearest") -> Made:
    """Pictures [N, H, W, C] turned counter-clockwise by degrees, around their middle or an element (x, y).

    What comes from outside of the picture is `fill`.
    """
    _, (block,) = operands("rotate", input_tensor)
    if len(input_tensor.shape) != 4:
        raise OperandError(f"ttnn.rotate takes pictures [N, H, W, C], not {list(input_tensor.shape)}")
    if expand:
        raise UnsupportedError("ttnn.rotate: a turned picture is as large as the picture", fix="ttnn.pad it first")
    if interpolation_mode not in ("nearest", "bilinear"):
        raise ArgumentError(f"ttnn.rotate: interpolation_mode={interpolation_mode!r}", fix="'nearest' or 'bilinear'")
    high, wide = input_tensor.shape[1:3]
    x, y = _turn(high, wide, angle, center or ((wide - 1) / 2, (high - 1) / 2))
    found = _nearest(block, x, y, fill) if interpolation_mode == "nearest" else _bilinear(block.float(), x, y, fill)
    return make(found, moves((0, None, None, 3), linear=fill == 0), input_tensor)


def _turn(high: int, wide: int, angle: float, center: tuple[float, float]) -> tuple[Block, Block]:
    """Where every element of a turned picture comes from; y points down, so 90 degrees take (1, 0) to (0, -1)."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    x = torch.arange(wide, dtype=torch.float64) - center[0]
    y = (torch.arange(high, dtype=torch.float64) - center[1]).unsqueeze(-1)
    return cos * x - sin * y + center[0], sin * x + cos * y + center[1]


def _pick(block: Block, x: Block, y: Block, fill: float) -> Block:
    """Elements of [..., H, W, C] by their numbers, [h, w]; `fill` for those outside."""
    high, wide = block.shape[-3:-1]
    is_inside = (x >= 0) & (x < wide) & (y >= 0) & (y < high)
    number = (y.clamp(0, high - 1) * wide + x.clamp(0, wide - 1)).flatten()
    found: Block = block.flatten(-3, -2).index_select(-2, number).unflatten(-2, tuple(x.shape))
    return found.masked_fill(~is_inside.unsqueeze(-1), fill)


def _nearest(block: Block, x: Block, y: Block, fill: float) -> Block:
    return _pick(block, x.round(decimals=6).round().long(), y.round(decimals=6).round().long(), fill)


def _bilinear(block: Block, x: Block, y: Block, fill: float) -> Block:
    left, top = x.round(decimals=6).floor(), y.round(decimals=6).floor()
    found = torch.zeros(())
    for down in (0, 1):
        for right in (0, 1):
            weight = (1 - (x - left - right).abs()) * (1 - (y - top - down).abs())
            found = found + _pick(block, left.long() + right, top.long() + down, fill) * weight.float().unsqueeze(-1)
    return found


# attention to points


def _attend(
    name: str, value: Tensor, places: Block, weights: Tensor, shapes: Sequence[Sequence[int]], align_corners: bool
) -> Block:
    """The weighted sum of values at points: places are [*mesh, B, Q, heads, levels, points, 2], from -1 to 1."""
    axes = len(value.grid)
    sizes = [high * wide for high, wide in shapes]
    if sum(sizes) != value.shape[1] or len(shapes) != places.shape[-3]:
        raise OperandError(
            f"ttnn.{name}: {value.shape[1]} values and {places.shape[-3]} levels for {[list(each) for each in shapes]}"
        )
    values, places, weight = spread([value.block.float(), places, weights.block.float()], axes)
    lead, (heads, width) = values.shape[: axes + 1], values.shape[-2:]
    found = torch.zeros(())
    for level, (part, (high, wide)) in enumerate(zip(values.split(sizes, axes + 1), shapes, strict=True)):
        # [*mesh, B, places, heads, D] as pictures [batch * heads, D, H, W], read at [batch * heads, Q, points, 2]
        pictures = part.movedim(-2, axes + 1).transpose(-1, -2).reshape(-1, width, high, wide)
        points = places[..., level, :, :].movedim(-3, axes + 1).flatten(0, axes + 1)
        read = F.grid_sample(pictures, points, "bilinear", "zeros", align_corners)
        factor = weight[..., level, :].movedim(-2, axes + 1).flatten(0, axes + 1)
        found = found + (read * factor.unsqueeze(1)).sum(-1)
    return found.reshape(*lead, heads * width, -1).transpose(-1, -2).contiguous()


def _points_label(count: int) -> tuple[str, ...]:
    """Of values, then what is by query: cut at the batch, the queries or the heads."""
    cut = {each: f", {each}" * (count - 1) for each in ("S(0)", "S(1)", "S(2)")}
    return f"S(0){cut['S(0)']} -> S(0)", f"R{cut['S(1)']} -> S(1)"


@op("experimental.fused_msda")
def fused_msda(
    value: Tensor,
    sampling_locations,
    attention_weights,
    spatial_shapes,
    *,
    align_corners=False,
    locations_in_grid_space=False,
) -> Made:
    """Deformable attention over pictures of several sizes: [B, all places, heads, D], read at points, gives
    [B, Q, heads * D].

    Points are [B, Q, heads, levels, points, 2], from 0 to 1, or from -1 to 1 in grid space; weights lack the 2.
    """
    name, given = "experimental.fused_msda", (value, sampling_locations, attention_weights)
    _, (_, places, _) = operands(name, *given)
    grid = places.float() if locations_in_grid_space else 2 * places.float() - 1
    found = _attend(name, value, grid, attention_weights, spatial_shapes, align_corners)
    return make(found, rows(*_points_label(3), "S(2), S(2), S(2) -> S(2)", "P(sum), R, R -> P(sum)"), *given)


@op("experimental.fused_msda_from_offsets")
def fused_msda_from_offsets(
    value: Tensor,
    reference_points,
    sampling_offsets,
    attention_weights,
    spatial_shapes,
    *,
    reference_mode="level",
    align_corners=False,
) -> Made:
    """`fused_msda` at reference points [B, Q, levels, 2], from 0 to 1, plus offsets in elements of their level."""
    name = "experimental.fused_msda_from_offsets"
    if reference_mode != "level":
        raise UnsupportedError(f"ttnn.{name}: reference_mode={reference_mode!r} is not covered", fix="'level'")
    given = (value, reference_points, sampling_offsets, attention_weights)
    _, (_, points, offsets, _) = operands(name, *given)
    sizes = torch.tensor([[wide, high] for high, wide in spatial_shapes], dtype=torch.float32)
    near = points.float().unsqueeze(-3).unsqueeze(-2)  # [*mesh, B, Q, 1, levels, 1, 2]
    places = 2 * (near + offsets.float() / sizes.unsqueeze(-2)) - 1
    found = _attend(name, value, places, attention_weights, spatial_shapes, align_corners)
    return make(found, rows(*_points_label(4), "S(2), R, S(2), S(2) -> S(2)", "P(sum), R, R, R -> P(sum)"), *given)
