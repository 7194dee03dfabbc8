"""Norms, losses and patches of the moreh family, with their backward ops, as torch has them.

Statistics of norms (`mean`, `rstd`) are results where room is given for them, or where they are required.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import Made, Optionals, make, op, operands, result, shared_coords
from meshloom.ttnn.ops.gradients import Gradients, Rooms
from meshloom.ttnn.ops.matmul import matmul
from meshloom.ttnn.ops.moreh import sum_to
from meshloom.ttnn.ops.topologies import moves, rows, same, topology_of
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.padding import fill_padding, mean_of, real_places
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor

Places = tuple[int | None, ...]

# norms


@op("moreh_layer_norm")
def moreh_layer_norm(
    input, normalized_dims, eps=1e-05, gamma=None, beta=None, *, output=None, mean=None, rstd=None
) -> Gradients:
    """The norm over the last `normalized_dims` dims, its mean and one over its deviation."""
    name, given = "moreh_layer_norm", [each for each in (gamma, beta) if each is not None]
    _, (block, *_) = operands(name, input, *given)
    dims, outer = _last(name, input, normalized_dims), len(input.shape) - normalized_dims
    x, axes = block.float(), len(input.grid)
    average = mean_of(x, input, dims)
    scale = torch.rsqrt(mean_of((x - average).square(), input, dims) + eps)
    found = _affine((x - average) * scale, gamma, beta, axes)
    wide = moves(same(input), *(same(each, outer) for each in given), linear=False)
    kept: Places = tuple(range(outer)) + (None,) * normalized_dims
    made: Gradients = [make(found, wide, input, *given).into(output)]
    for values, room in ((average, mean), (scale, rstd)):
        block = values.reshape(*values.shape[:axes], *input.shape[:outer])
        made.append(make(block, moves(kept, linear=False), input).into(room) if room is not None else None)
    return made


def _last(name: str, tensor: Tensor, count: int) -> tuple[int, ...]:
    if not 1 <= count <= len(tensor.shape):
        raise OperandError(f"ttnn.{name}: normalized_dims={count} of a tensor of rank {len(tensor.shape)}")
    return tuple(range(-count, 0))


def _affine(x: Block, gamma: Tensor | None, beta: Tensor | None, axes: int) -> Block:
    rank = x.dim() - axes
    if gamma is not None:
        x = x * aligned(gamma.block.float(), axes, rank)
    return x if beta is None else x + aligned(beta.block.float(), axes, rank)


@op("moreh_layer_norm_backward")
def moreh_layer_norm_backward(
    output_grad, input, mean, rstd, normalized_dims, *, gamma=None, input_grad=None, gamma_grad=None, beta_grad=None
) -> Gradients:
    """The gradient of the input of a layer norm, and those of weight and bias where room is given for them."""
    name, given = "moreh_layer_norm_backward", [] if gamma is None else [gamma]
    _, blocks = operands(name, output_grad, input, mean, rstd, *given)
    dims, outer, axes = _last(name, input, normalized_dims), len(input.shape) - normalized_dims, len(input.grid)
    grad, x = blocks[0].float(), blocks[1].float()
    average, scale = (
        each.float().reshape(*each.shape[:axes], *input.shape[:outer], *(1,) * normalized_dims) for each in blocks[2:4]
    )
    normal = (x - average) * scale
    flow = _affine(grad, gamma, None, axes)
    apart = flow - mean_of(flow, input, dims) - normal * mean_of(flow * normal, input, dims)
    stats: Places = tuple(range(outer))
    wide = moves(same(input), same(input), stats, stats, *(same(each, outer) for each in given), linear=False)
    made: Gradients = [make(scale * apart, wide, output_grad, input, mean, rstd, *given).into(input_grad)]
    cuts = [f"S({d}), S({d}), S({d}), S({d}) -> P(sum)" for d in range(outer)]
    cuts += [f"S({d}), S({d}), R, R -> S({d - outer})" for d in range(outer, len(input.shape))]
    for values, room in ((grad * normal, gamma_grad), (grad, beta_grad)):
        made.append(None if room is None else _sum_batch(values, cuts, (output_grad, input, mean, rstd), room, outer))
    return made


def _sum_batch(values: Block, cuts: Sequence[str], tensors: Sequence[Tensor], room: Tensor, outer: int) -> Made:
    """The sum over the dims in front, in the shape of the weight that it is the gradient of."""
    like, axes = tensors[1], len(room.grid)
    over = list(range(-len(like.shape), outer - len(like.shape)))
    block = fill_padding(values, like, over, "sum")
    found = (block.sum(over) if over else block).reshape(*block.shape[:axes], *room.shape)
    label = topology_of(rows(*cuts), *tensors, shape=tuple(room.shape), filled=True)
    return Made(found, room, label, output=room, coords=shared_coords(*tensors))


_GROUP = Rooms("output mean rstd", (True, False, False), "memory_config", room_asks=True)


@op("moreh_group_norm", more=_GROUP)
def moreh_group_norm(input, num_groups, eps=1e-05, gamma=None, beta=None, **rooms) -> Gradients:
    """The norm of groups of channels of [N, C, H, W]; mean and one over the deviation are [1, 1, N, groups]."""
    name, given = "moreh_group_norm", [each for each in (gamma, beta) if each is not None]
    _, (block, *_) = operands(name, input, *given)
    _check_groups(name, input, num_groups)
    x, axes = block.float(), len(input.grid)
    average = _group_mean(x, input, num_groups)
    scale = torch.rsqrt(_group_mean((x - average).square(), input, num_groups) + eps)
    found = _by_channel((x - average) * scale, gamma, beta, axes)
    channels = [_channel_places(each) for each in given]
    wide = moves(same(input), *channels, linear=False)
    made = [make(found, wide, input, *given)]
    for values in (average, scale):
        kept = values.unflatten(axes + 1, (num_groups, -1))[..., 0, :, :]
        kept = kept.reshape(*kept.shape[:axes], 1, 1, input.shape[0], num_groups)
        made.append(make(kept, moves((2, 3, None, None), linear=False), input))
    return _GROUP.fill(made, rooms)


def _check_groups(name: str, tensor: Tensor, groups: int) -> None:
    if len(tensor.shape) != 4 or tensor.shape[1] % groups:
        raise OperandError(f"ttnn.{name}: {groups} groups of the channels of {list(tensor.shape)}", fix="[N, C, H, W]")


def _group_mean(values: Block, tensor: Tensor, groups: int) -> Block:
    """The mean of its group for every channel of [N, C, H, W], without padding: [N, C, 1, 1]."""
    planes = mean_of(values, tensor, (-2, -1)).unflatten(-3, (groups, -1))
    found: Block = planes.mean(-3, keepdim=True).expand_as(planes).flatten(-4, -3)
    return found


def _by_group(stats: Block, tensor: Tensor, groups: int) -> Block:
    """Statistics [1, 1, N, groups] as [N, C, 1, 1]."""
    axes, (batch, channels) = len(tensor.grid), tensor.shape[:2]
    return stats.reshape(*stats.shape[:axes], batch, groups, 1, 1).repeat_interleave(channels // groups, axes + 1)


def _by_channel(x: Block, gamma: Tensor | None, beta: Tensor | None, axes: int) -> Block:
    def columns(tensor: Tensor) -> Block:
        return tensor.block.float().reshape(*tensor.block.shape[:axes], 1, -1, 1, 1)

    if gamma is not None:
        x = x * columns(gamma)
    return x if beta is None else x + columns(beta)


def _channel_places(tensor: Tensor) -> Places:
    """A weight of [1, 1, 1, C] is cut where the channels of a picture are."""
    return tuple(1 if size != 1 or at == len(tensor.shape) - 1 else None for at, size in enumerate(tensor.shape))


_GROUP_BACKWARD = Rooms("input_grad gamma_grad beta_grad", (True, False, False), room_asks=True)


@op("moreh_group_norm_backward", more=_GROUP_BACKWARD)
def moreh_group_norm_backward(output_grad, input, mean, rstd, num_groups, *, gamma=None, **rooms) -> Gradients:
    """The gradients of the input of a group norm, of its weight and of its bias; those are [1, 1, 1, C]."""
    name, given = "moreh_group_norm_backward", [] if gamma is None else [gamma]
    _, blocks = operands(name, output_grad, input, mean, rstd, *given)
    _check_groups(name, input, num_groups)
    grad, x, axes = blocks[0].float(), blocks[1].float(), len(input.grid)
    average, scale = (_by_group(each.float(), input, num_groups) for each in blocks[2:4])
    normal = (x - average) * scale
    flow = _by_channel(grad, gamma, None, axes)
    along = normal * _group_mean(flow * normal, input, num_groups)
    whole = scale * (flow - _group_mean(flow, input, num_groups) - along)
    tensors = (output_grad, input, mean, rstd)
    picture: Places = (0, 1, 2, 3)
    stats: Places = (None, None, 0, 1)
    found = make(
        whole, moves(picture, picture, stats, stats, *map(_channel_places, given), linear=False), *tensors, *given
    )
    cuts = [
        "S(0), S(0), S(2), S(2) -> P(sum)",
        "S(1), S(1), S(3), S(3) -> S(3)",
        *(f"S({d}), S({d}), R, R -> P(sum)" for d in (2, 3)),
    ]
    made: Gradients = [found]
    for values in (grad * normal, grad):
        block = fill_padding(values, input, (-4, -2, -1), "sum").sum((-4, -2, -1))
        label = topology_of(rows(*cuts), *tensors, shape=(1, 1, 1, block.shape[-1]), filled=True)
        column = block.reshape(*block.shape[:axes], 1, 1, 1, -1)
        made.append(Made(column, input, label, coords=shared_coords(*tensors)))
    return _GROUP_BACKWARD.fill(made, rooms)


# losses


def _chosen(name: str, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Block, Block]:
    """The class of every place, and its weight: 0 where it is to be ignored or is padding."""
    _, blocks = operands(name, *([target] if weight is None else [target, weight]))
    axes = len(target.grid)
    index = blocks[0].long()
    counts = index != ignore_index
    real = real_places(target, range(len(target.shape)))
    counts = counts if real is None else counts & real
    index = torch.where(counts, index, 0)
    if weight is None:
        return index, counts.float()
    table, numbers = spread([blocks[1].float().flatten(axes), index.flatten(axes)], axes)
    return index, torch.where(counts, table.gather(-1, numbers).unflatten(-1, tuple(target.shape)), 0)


_NLL = Optionals("weight_tensor divisor_tensor output_tensor")
_NLL_BACKWARD = Optionals("weight_tensor divisor_tensor input_grad_tensor")


@op("moreh_nll_loss", more=_NLL)
def moreh_nll_loss(input_tensor, target_tensor, reduction, *, ignore_index=-100, **rooms) -> Made:
    """-x[n, target[n]] of log probabilities [N, C, ...], weighted by class: each, their sum, or their weighted mean.

    `divisor_tensor` is where the sum of weights goes that a mean is divided by.
    """
    name, (weight_tensor, divisor_tensor, output_tensor) = "moreh_nll_loss", _NLL(rooms)
    if reduction not in ("none", "sum", "mean"):
        raise ArgumentError(f"ttnn.{name}: reduction={reduction!r}", fix='"none", "sum" or "mean"')
    _, (block, *_) = operands(name, input_tensor, target_tensor)
    axes = len(input_tensor.grid)
    index, weight = _chosen(name, target_tensor, weight_tensor, ignore_index)
    values, places = spread([block.float(), index.unsqueeze(axes + 1)], axes)
    loss = -values.gather(axes + 1, places).squeeze(axes + 1) * weight
    given = (input_tensor, target_tensor, *(() if weight_tensor is None else (weight_tensor,)))
    rest = ", R" * (len(given) - 2)
    pairs = [(0, 0), *((d + 1, d) for d in range(1, len(target_tensor.shape)))]
    if reduction == "none":
        cuts = [f"S({n}), S({m}){rest} -> S({m})" for n, m in pairs]
        label = topology_of(rows(*cuts), *given, shape=tuple(target_tensor.shape))
        return Made(loss, input_tensor, label, output=output_tensor, coords=shared_coords(*given))
    shape = (1,) if output_tensor is None else tuple(output_tensor.shape)
    cuts = [f"S({n}), S({m}){rest} -> P(sum)" for n, m in pairs] if reduction == "sum" else []
    label = topology_of(rows(*cuts), *given, shape=shape, filled=True)
    total = loss.flatten(axes).sum(-1)
    if reduction == "mean":
        divisor = weight.flatten(axes).sum(-1)
        if divisor_tensor is not None:
            shaped = divisor.reshape(*divisor.shape, *divisor_tensor.shape)
            result(shaped, divisor_tensor, topology=label, output_tensor=divisor_tensor)
        total = total / divisor
    return Made(
        total.reshape(*total.shape, *shape), input_tensor, label, output=output_tensor, coords=shared_coords(*given)
    )


@op("moreh_nll_loss_backward", more=_NLL_BACKWARD)
def moreh_nll_loss_backward(target_tensor, output_grad_tensor, reduction_mean, *, ignore_index=-100, **rooms) -> Made:
    """The gradient of log probabilities, from that of the sum or the mean of their loss."""
    name, (weight_tensor, divisor_tensor, input_grad_tensor) = "moreh_nll_loss_backward", _NLL_BACKWARD(rooms)
    given = [target_tensor, output_grad_tensor, weight_tensor, divisor_tensor]
    axes = len(target_tensor.grid)
    classes = _classes(name, weight_tensor, input_grad_tensor)
    _, (grad,) = operands(name, output_grad_tensor)
    index, weight = _chosen(name, target_tensor, weight_tensor, ignore_index)
    flow = grad.float().flatten(axes).reshape(*grad.shape[:axes], *(1,) * len(target_tensor.shape))
    if reduction_mean:
        if divisor_tensor is not None:
            _, (divisor,) = operands(name, divisor_tensor)
            flow = flow / divisor.float().reshape(*divisor.shape[:axes], *(1,) * len(target_tensor.shape))
        else:
            flow = flow / weight.sum(tuple(range(axes, weight.dim())), keepdim=True)
    return _spread_classes(index, -weight * flow, classes, given, output_grad_is_cut=False).into(input_grad_tensor)


@op("moreh_nll_loss_unreduced_backward")
def moreh_nll_loss_unreduced_backward(
    target_tensor, output_grad_tensor, *, weight_tensor=None, input_grad_tensor=None, ignore_index=-100
) -> Made:
    """The gradient of log probabilities, from that of the loss of every place."""
    name = "moreh_nll_loss_unreduced_backward"
    _, (grad,) = operands(name, output_grad_tensor)
    classes = _classes(name, weight_tensor, input_grad_tensor)
    index, weight = _chosen(name, target_tensor, weight_tensor, ignore_index)
    given = [target_tensor, output_grad_tensor, weight_tensor]
    return _spread_classes(index, -weight * grad.float(), classes, given, output_grad_is_cut=True).into(
        input_grad_tensor
    )


def _classes(name: str, weight: Tensor | None, room: Tensor | None) -> int:
    if room is None and weight is None:
        raise ArgumentError(f"ttnn.{name} cannot tell how many classes there are", fix="input_grad_tensor=")
    return room.shape[1] if room is not None else math.prod(weight.shape)  # type: ignore[union-attr]


def _spread_classes(
    index: Block, values: Block, classes: int, given: Sequence[Tensor | None], output_grad_is_cut: bool
) -> Made:
    """Values at the class of every place of [N, C, ...], zeros at the others."""
    tensors = [each for each in given if each is not None]
    target, grad = tensors[:2]
    axes, rank = len(target.grid), len(target.shape)
    values, index = spread([values, index], axes)
    shape = (*values.shape[: axes + 1], classes, *values.shape[axes + 1 :])
    found = values.new_zeros(shape).scatter(axes + 1, index.unsqueeze(axes + 1), values.unsqueeze(axes + 1))
    second = [f"S({d})" if output_grad_is_cut else "R" for d in range(rank)]
    rest = ", R" * (len(tensors) - 2)
    cuts = [f"S({d}), {second[d]}{rest} -> S({d + (d > 0)})" for d in range(rank)]
    label = topology_of(rows(*cuts), *tensors, shape=shape[axes:])
    return Made(found, grad, label, coords=shared_coords(*tensors))


# gradients of programs


@op("moreh_clip_grad_norm")
def moreh_clip_grad_norm(inputs, max_norm, norm_type=2.0, error_if_nonfinite=False, *, total_norm=None) -> Made:
    """The norm of all gradients of a device together, which are scaled down in place to `max_norm` if it is larger."""
    name = "moreh_clip_grad_norm"
    _, blocks = operands(name, *inputs)
    axes = len(inputs[0].grid)
    filled = [
        fill_padding(block.float(), each, range(len(each.shape)), "sum").flatten(axes)
        for block, each in zip(blocks, inputs, strict=True)
    ]
    parts = torch.cat(spread(filled, axes), -1)
    norm: Block = torch.linalg.vector_norm(parts, norm_type, -1)
    if error_if_nonfinite and not bool(norm.isfinite().all()):
        raise OperandError(f"ttnn.{name}: the norm of the gradients is not finite", fix="error_if_nonfinite=False")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    others = ", *" * (len(inputs) - 1)
    shape = (1,) if total_norm is None else tuple(total_norm.shape)
    label = topology_of(rows(), *inputs, shape=shape)
    for place, (block, each) in enumerate(zip(blocks, inputs, strict=True)):
        ordered = (each, *inputs[:place], *inputs[place + 1 :])
        kept = topology_of(rows(*(f"S({d}){others} -> S({d})" for d in range(len(each.shape)))), *ordered)
        factor = scale.reshape(*scale.shape, *(1,) * len(each.shape))
        result(block.float() * factor, each, topology=kept, output_tensor=each)
    return Made(norm.reshape(*norm.shape, *shape), inputs[0], label, output=total_norm)


@op("moreh_fold")
def moreh_fold(
    input, output=None, output_size=(), kernel_size=(), dilation=(1, 1), padding=(0, 0), stride=(1, 1)
) -> Made:
    """Pictures [N, C, H, W] from patches [N, C * k * k, places]: what patches have for a place is summed."""
    name = "moreh_fold"
    _, (block,) = operands(name, input)
    rank = len(input.shape)
    if rank not in (2, 3) or len(output_size) != 2 or len(kernel_size) != 2:
        raise OperandError(
            f"ttnn.{name}: patches {list(input.shape)}, output_size {list(output_size)}, "
            f"kernel_size {list(kernel_size)}",
            fix="[N, C * k * k, places] with two numbers each",
        )
    flat = block.float().reshape(-1, *input.shape[-2:])
    how: dict[str, Any] = {"dilation": dilation, "padding": padding, "stride": stride}
    found = F.fold(flat, tuple(output_size), tuple(kernel_size), **{each: tuple(value) for each, value in how.items()})
    whole = found.reshape(*block.shape[: block.dim() - 2], *found.shape[1:])
    places: Places = (0, 1, None) if rank == 3 else (0, None)
    return make(whole, moves(places), input, scales=True).into(output)


_LINEAR = Rooms("input_grad weight_grad bias_grad", (True, True, True))


@op("moreh_linear_backward", more=_LINEAR)
def moreh_linear_backward(output_grad, input, weight, *, bias=None, **rooms) -> Gradients:
    """The gradients of x @ weight.T + bias: of x, of the weight, and of a bias that is given."""
    operands("moreh_linear_backward", output_grad, input, weight)
    wanted, exact = _LINEAR.wanted(rooms), DataType.FLOAT32  # sums are rounded once
    made: Gradients = [None, None, None]
    if wanted[0]:
        made[0] = sum_to(matmul(output_grad, weight, dtype=exact), input)
    if wanted[1]:
        made[1] = sum_to(matmul(output_grad, input, transpose_a=True, dtype=exact), weight)
    like = bias if bias is not None else rooms.get("bias_grad")
    if wanted[2] and like is not None:
        made[2] = sum_to(output_grad, like)
    return _LINEAR.fill(made, rooms)
