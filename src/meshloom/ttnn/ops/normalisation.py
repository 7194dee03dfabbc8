"""Softmax, norms and losses: every device over its own part.

`*_pre_all_gather` gives the sums of one device in a tile: the first column of it for squares, and for layer norm a
second tile for the plain sum. Gathered along the last dim they are what `*_post_all_gather` reads: tile by tile, so
that the norm is that of the whole row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.activations import LossReductionMode
from meshloom.ttnn.ops.calling import Made, compute, make, op, operands, register, result, shared_coords
from meshloom.ttnn.ops.elementwise import binary
from meshloom.ttnn.ops.reductions import run
from meshloom.ttnn.ops.topologies import EACH, moves, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.padding import count_of, fill_padding, mean_of, real_places
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import Placement, PlacementShard

STATISTICS = 32  # the columns of a tile that holds the statistics of rows

# softmax


def _normalise(name: str, tensor: Tensor, function: Callable[[Block], Block], others: tuple[Tensor, ...] = ()) -> Made:
    """A function of float32 values that keeps the shape."""
    _, (block, *_) = operands(name, tensor, *others)
    return make(function(block.float()), EACH, tensor, *others)


def _softmax(name: str, in_place: bool) -> None:
    def call(input_tensor, dim=-1) -> Made:
        made = run(name, lambda x, at: x.float().softmax(at), input_tensor, dim, identity="max")
        return made.into(input_tensor if in_place else None)

    register(name, f"Softmax along a dim of every device's part{_WRITTEN * in_place}.", call)


def _masked_softmax(name: str, in_place: bool) -> None:
    def call(input_tensor, scale=None, mask: Tensor | None = None, *, is_causal_mask=False) -> Made:
        axes, rank, whole = len(input_tensor.grid), len(input_tensor.shape), "hw_dims" in name or is_causal_mask

        def function(x: Block) -> Block:
            x = x if scale is None else x * scale
            if mask is not None:
                shift = _with_rank(mask.block.float(), axes, rank)
                x = x + (shift[..., : x.shape[-2], : x.shape[-1]] if whole else shift)
            filled = fill_padding(x, input_tensor, [-1], "max")
            return fill_padding(filled.softmax(-1), input_tensor, [-1], "sum")

        made = _normalise(name, input_tensor, function, () if mask is None else (mask,))
        return made.into(input_tensor if in_place else None)

    register(name, f"softmax(scale * x + mask) along the last dim{_WRITTEN * in_place}.", call)


_WRITTEN = ", written into the tensor"
_softmax("softmax", in_place=False)
_softmax("softmax_in_place", in_place=True)
_masked_softmax("scale_mask_softmax", in_place=False)
_masked_softmax("scale_mask_softmax_in_place", in_place=True)
_masked_softmax("scale_causal_mask_hw_dims_softmax_in_place", in_place=True)


def _with_rank(mask: Block, axes: int, rank: int) -> Block:
    """A mask with as many dims as what it is added to: ones in front put in or left out."""
    extra = mask.dim() - axes - rank
    if extra > 0 and set(mask.shape[axes : axes + extra]) == {1}:
        return mask.reshape(*mask.shape[:axes], *mask.shape[axes + extra :])
    return aligned(mask, axes, rank)


# norms


def weight_row(tensor: Tensor | None, width: int, axes: int) -> Block | None:
    """A weight or bias as one row, if it has an element for every column."""
    if tensor is None:
        return None
    _check_row(tensor, width)
    return _row(tensor.block, axes, 1)


def _check_row(tensor: Tensor, width: int) -> None:
    if tensor.logical_volume() != width:
        raise OperandError(
            f"gamma or beta has {tensor.logical_volume()} elements, the last dim of the input {width}",
            fix="give one element for every column",
        )


def _row(block: Block, axes: int, rank: int) -> Block:
    """A weight or bias as one row of that rank: TTNN also keeps it as [1, 1, width / 32, 32]."""
    return block.float().reshape(*block.shape[:axes], *(1,) * (rank - 1), -1)


def affine(x: Block, weight: Block | None, bias: Block | None, axes: int, rank: int) -> Block:
    if weight is not None:
        x = x * aligned(weight, axes, rank)
    return x if bias is None else x + aligned(bias, axes, rank)


def _norm(
    name: str,
    tensor,
    function: Callable[..., Block],
    *,
    weight=None,
    bias=None,
    residual_input_tensor=None,
    statistics: Tensor | None = None,
) -> Made:
    """A norm of float32 values, and of the block of statistics if there are some; times a weight, plus a bias."""
    residual = residual_input_tensor
    given = (tensor, weight, bias, residual, statistics)
    axes, rank, is_there = len(tensor.grid), len(tensor.shape), [each is not None for each in given]
    tensors = tuple(each for each in given if each is not None)
    operands(name, *tensors[: len(tensors) - is_there[4]])
    weights = [each for each in (weight, bias) if each is not None]
    for each in weights:
        _check_row(each, tensor.shape[-1])

    has_weight, has_bias, has_residual, has_sums = is_there[1:]

    def kernel(block: Block, *rest: Block) -> Block:
        told = iter(rest)
        gamma = next(told) if has_weight else None
        beta = next(told) if has_bias else None
        x = block.float() + next(told).float() if has_residual else block.float()
        found = function(x, next(told)) if has_sums else function(x)
        if gamma is not None:
            found = found * _row(gamma, axes, rank)
        return found if beta is None else found + _row(beta, axes, rank)

    rows = tuple(map(as_row, weights))
    others = (*rows, residual) if residual is not None else rows
    return compute(kernel, tensors, topology_of(EACH, tensor, *others), coords=shared_coords(tensor, *others))


def as_row(tensor: Tensor) -> Tensor:
    """A weight seen as one row, for its label: the only dim that can be cut is the last."""
    axes = len(tensor.grid)
    block = tensor.block.reshape(*tensor.block.shape[:axes], -1)
    label = topology_of(moves((0,) * len(tensor.shape)), tensor, shape=block.shape[axes:], scales=True)
    return Tensor(block, tensor.grid, tensor.dtype, tensor.layout, label, tensor.device(), room=tensor._room)


@op("layer_norm", more=_norm)
def layer_norm(input_tensor, *, epsilon=1e-12, **how) -> Made:
    """(x - mean) / sqrt(var + epsilon) of every row, times the weight, plus the bias."""
    if real_places(input_tensor, [-1]) is None:
        width = input_tensor.shape[-1:]
        plain = functools.partial(torch.nn.functional.layer_norm, normalized_shape=width, eps=epsilon)
        return _norm("layer_norm", input_tensor, plain, **how)

    def call(x: Block) -> Block:
        apart = x - mean_of(x, input_tensor, [-1])
        return apart * torch.rsqrt(mean_of(apart.square(), input_tensor, [-1]) + epsilon)

    return _norm("layer_norm", input_tensor, call, **how)


@op("rms_norm", more=_norm)
def rms_norm(input_tensor, *, epsilon=1e-12, **how) -> Made:
    """x / sqrt(mean of squares + epsilon) of every row, times the weight, plus the bias."""
    if real_places(input_tensor, [-1]) is None:
        plain = functools.partial(torch.rms_norm, normalized_shape=input_tensor.shape[-1:], eps=epsilon)
        return _norm("rms_norm", input_tensor, plain, **how)

    def call(x: Block) -> Block:
        return x * torch.rsqrt(mean_of(x.square(), input_tensor, [-1]) + epsilon)

    return _norm("rms_norm", input_tensor, call, **how)


def _statistics(name: str, tensor: Tensor, sums: Callable[[Block], list[Block]], residual: Tensor | None) -> Made:
    """One tile for each sum of a row: the sum in its first column, zeros beside it."""
    others = () if residual is None else (residual,)
    operands(name, tensor, *others)
    real = real_places(tensor, [-1])

    def kernel(block: Block, *rest: Block) -> Block:
        x = block.float() + rest[0].float() if rest else block.float()
        x = x if real is None else torch.where(real, x, torch.zeros(()))
        return torch.cat([torch.nn.functional.pad(each, (0, STATISTICS - 1)) for each in sums(x)], -1)

    label = topology_of(EACH, tensor, *others)
    whole = [PlacementShard(each.dim) if _cuts_last(each, tensor) else each for each in label.placements()]
    return compute(kernel, (tensor, *others), label.with_placements(whole), dtype=DataType.BFLOAT16, layout=Layout.TILE)


def _pre_all_gather(names: str, doc: str, sums: Callable[[Block], list[Block]]) -> None:
    name = names.split()[0]

    def call(input_tensor, *, residual_input_tensor=None) -> Made:
        return _statistics(name, input_tensor, sums, residual_input_tensor)

    register(names, doc, call)


_pre_all_gather(
    "rms_norm_pre_all_gather experimental.wan_fused_rmsnorm_pre_allgather",
    "The sum of squares of every row of a device's part, as one tile: gather it along the last dim next.",
    lambda x: [x.square().sum(-1, keepdim=True)],
)
_pre_all_gather(
    "layer_norm_pre_all_gather experimental.dit_layernorm_pre_allgather",
    "The sums of squares and of elements of every row of a device's part, as two tiles: gather them next.",
    lambda x: [x.square().sum(-1, keepdim=True), x.sum(-1, keepdim=True)],
)


def _check_statistics(name: str, tensor: Tensor, stats: Tensor, tiles: int) -> int:
    """An error unless statistics are whole tiles; how many elements the whole row has."""
    operands(name, tensor, stats)
    if stats.shape[-1] % (tiles * STATISTICS) or not stats.shape[-1]:
        raise OperandError(
            f"ttnn.{name}: statistics of width {stats.shape[-1]} are not whole tiles of {tiles * STATISTICS}",
            fix="all_gather what pre_all_gather gave, along its last dim",
        )
    return _width_of(tensor, stats.shape[-1] // (tiles * STATISTICS))


def _gather_sums(stats: Block, tiles: int) -> list[Block]:
    """The sums over the whole row."""
    columns = stats.float().unflatten(-1, (-1, tiles, STATISTICS))[..., 0]
    return [columns[..., tile].sum(-1, keepdim=True) for tile in range(tiles)]


def _width_of(tensor: Tensor, devices: int) -> int:
    """The elements of a row that is on so many devices, without the padding of an uneven last dim."""
    cuts = [each for each in tensor.tensor_topology().placements() if _cuts_last(each, tensor)]
    return min([devices * tensor.shape[-1], *(cut.size for cut in cuts if cut.size is not None)])


def _cuts_last(placement: Placement, tensor: Tensor) -> TypeGuard[PlacementShard]:
    return isinstance(placement, PlacementShard) and placement.dim % len(tensor.shape) == len(tensor.shape) - 1


@op("rms_norm_post_all_gather", more=_norm)
def rms_norm_post_all_gather(input_tensor, stats, *, epsilon=1e-12, **how) -> Made:
    """The norm of whole rows, from the gathered statistics of their parts."""
    name = "rms_norm_post_all_gather"
    count = _check_statistics(name, input_tensor, stats, 1)

    def call(x: Block, gathered: Block) -> Block:
        (squares,) = _gather_sums(gathered, 1)
        return x * torch.rsqrt(squares / count + epsilon)

    return _norm(name, input_tensor, call, statistics=stats, **how)


@op("layer_norm_post_all_gather", more=_norm)
def layer_norm_post_all_gather(input_tensor, stats, *, epsilon=1e-12, **how) -> Made:
    """The norm of whole rows, from the gathered statistics of their parts."""
    name = "layer_norm_post_all_gather"
    count = _check_statistics(name, input_tensor, stats, 2)

    def call(x: Block, gathered: Block) -> Block:
        squares, sums = _gather_sums(gathered, 2)
        mean = sums / count
        var = squares / count - mean.square()
        return (x - mean) * torch.rsqrt(var + epsilon)

    return _norm(name, input_tensor, call, statistics=stats, **how)


@op("batch_norm")
def batch_norm(
    input, *, running_mean=None, running_var=None, training=False, eps=1e-05, momentum=0.1, weight=None, bias=None
) -> Made:
    """The norm of every channel of [N, C, H, W]; statistics are [1, C, 1, 1], and training writes the running ones."""
    name = "batch_norm"
    given = tuple(each for each in (running_mean, running_var, weight, bias) if each is not None)
    _, (block, *_) = operands(name, input, *given)
    if len(input.shape) != 4:
        raise OperandError(
            f"ttnn.{name}: batch_norm not supported for tensors with rank {len(input.shape)}", fix="[N, C, H, W]"
        )
    for each in given:
        if tuple(each.shape) != (1, input.shape[1], 1, 1):
            raise OperandError(
                f"ttnn.{name}: {list(each.shape)} for the channels of {list(input.shape)}",
                fix=f"[1, {input.shape[1]}, 1, 1]",
            )
    if not training and (running_mean is None or running_var is None):
        raise OperandError(f"ttnn.{name}: running_mean and running_var must be defined in evaluation mode")
    x = block.float()
    if training:
        mean = mean_of(x, input, (-4, -2, -1))
        var = mean_of((x - mean).square(), input, (-4, -2, -1))
        count = torch.as_tensor(count_of(input, (-4, -2, -1)))
        for running, fresh in ((running_mean, mean), (running_var, var * count / (count - 1).clamp(min=1))):
            if running is not None:
                mixed = (1 - momentum) * running.block.float() + momentum * fresh
                label = topology_of("var", input, dim=(0, 2, 3), keepdim=True)
                result(mixed, running, topology=label, output_tensor=running)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.block.float(), running_var.block.float()
    normal = (x - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        normal = normal * weight.block.float()
    if bias is not None:
        normal = normal + bias.block.float()
    return make(normal, EACH, input, *given)


# losses


def _loss(name: str, function: Callable[[Block, Block], Block]) -> None:
    def call(
        input_reference: Tensor,
        input_prediction: Tensor,
        *,
        reduction: LossReductionMode = LossReductionMode.NONE,
        kind=None,
    ) -> Made:
        both = (input_reference, input_prediction)
        if reduction is LossReductionMode.NONE:
            return binary(name, function, *both, kind=kind)
        exact = DataType.FLOAT32
        each = binary(name, lambda x, y: function(x.float(), y.float()), *both, kind=exact).tensor(exact)
        dims = list(range(-len(each.shape), 0))
        mean = reduction is LossReductionMode.MEAN
        label = topology_of("mean" if mean else "sum", each, filled=True, dim=tuple(dims))
        block = fill_padding(each.block, each, dims, "sum")
        found = mean_of(block, each, dims) if mean else block.sum(dims, keepdim=True)
        return Made(found.flatten(len(each.grid) - 1), each, label, kind or input_reference.dtype)

    register(name, f"The {name} of every two elements, or their sum or mean over a device's part.", call)


_loss("l1_loss", lambda x, y: (x - y).abs())
_loss("mse_loss", lambda x, y: (x - y).square())
