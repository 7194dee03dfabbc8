"""Distributed forms of softmax, norms, losses and attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from forms.net import Form, Net, compute, sharded_dim
from meshloom import Shard
from meshloom.ops import Call, Row


def softmax_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dim = sharded_dim(row)
    high = net.all_reduce([x.amax(dim) for (x,) in held], "max").unsqueeze(dim)
    exps = [(x - high).exp() for (x,) in held]
    total = net.all_reduce([e.sum(dim) for e in exps], "sum").unsqueeze(dim)
    if call.op == "log_softmax":
        return [x - high - total.log() for (x,) in held]
    return [e / total for e in exps]


def layer_norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    tail = call.arguments["normalized_shape"]
    dims = tuple(range(-len(tail), 0))
    count = math.prod(tail)
    total = net.all_reduce([h[0].sum(dims) for h in held], "sum")
    square = net.all_reduce([h[0].square().sum(dims) for h in held], "sum")
    mean = (total / count).reshape(total.shape + (1,) * len(tail))
    scale = torch.rsqrt((square / count).reshape(mean.shape) - mean.square() + call.arguments["eps"])
    return [_affine((h[0] - mean) * scale, *h[1:]) for h in held]


def rms_norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    tail, eps = call.arguments["normalized_shape"], call.arguments["eps"]
    dims = tuple(range(-len(tail), 0))
    square = net.all_reduce([h[0].square().sum(dims) for h in held], "sum") / math.prod(tail)
    scale = torch.rsqrt(square + (torch.finfo(torch.float32).eps if eps is None else eps))
    return [_affine(h[0] * scale.reshape(scale.shape + (1,) * len(tail)), *h[1:]) for h in held]


def group_norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Sum and squares of each group of a sample, over the positions of all devices."""
    shape, groups = call.shape("input"), call.arguments["num_groups"]
    count = math.prod(shape[1:]) // groups
    parts = [h[0].unflatten(1, (groups, -1)).flatten(2) for h in held]

    def shared(sums: list[torch.Tensor]) -> torch.Tensor:
        narrow = [each if groups > 1 else each.squeeze(1) for each in sums]
        return net.all_reduce(narrow, "sum").view(shape[0], groups, 1) / count

    mean = shared([x.sum(2) for x in parts])
    spread = shared([(x - mean).square().sum(2) for x in parts])
    found = [((x - mean) * torch.rsqrt(spread + call.arguments["eps"])) for x in parts]
    return [_by_channel(x.view(h[0].shape), *h[1:]) for x, h in zip(found, held, strict=True)]


def batch_norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[Any]:
    """Sum and squares of each channel, over the batches and positions of all devices."""
    shape = call.shape("input")
    dims = [d for d in range(len(shape)) if d != 1]
    count = math.prod(shape[d] for d in dims)
    line = (-1,) + (1,) * (len(shape) - 2)
    mean = net.all_reduce([h[0].sum(dims) for h in held], "sum") / count
    spread = net.all_reduce([(h[0] - mean.view(line)).square().sum(dims) for h in held], "sum") / count
    scale = torch.rsqrt(spread + call.arguments["eps"]).view(line)
    outs = [_by_channel((h[0] - mean.view(line)) * scale, *h[1:]) for h in held]
    return [(out, mean, spread * count / max(count - 1, 1)) for out in outs]


def _by_channel(x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
    line = (-1,) + (1,) * (x.dim() - 2)
    return _affine(x, *(each.view(line) for each in affine))


def nll_loss_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Over sharded classes each device has the logarithms of its own; over a sharded batch as cross_entropy."""
    classes = 1 if len(call.shape("input")) > 1 else 0
    if row.ins[0] != Shard(classes):
        return cross_entropy_form(call, row, held, net)
    target, found, start = held[0][1], [], 0
    for h in held:
        width = h[0].shape[classes]
        mine = (target >= start) & (target < start + width)
        local = torch.where(mine, target - start, 0)
        value = h[0].gather(classes, local.unsqueeze(classes)).squeeze(classes)
        weight = h[2][local] if len(h) > 2 else torch.ones(target.shape)
        found.append(torch.stack([torch.where(mine, value * weight, 0), torch.where(mine, weight, 0)]))
        start += width
    net.log.append(("sum", tuple(target.shape)))  # of the two, as one
    return [_reduced_classes(call, target, *torch.stack(found).sum(0))] * len(held)


def _reduced_classes(call: Call, target: torch.Tensor, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    kept = target != call.arguments["ignore_index"]
    losses, weights = torch.where(kept, -losses, 0), torch.where(kept, weights, 0)
    how = call.arguments["reduction"]
    return losses if how == "none" else losses.sum() if how == "sum" else losses.sum() / weights.sum()


def _affine(x: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def cross_entropy_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    classes = 1 if len(call.shape("input")) > 1 else 0
    if row.ins[0] == Shard(classes):
        return _by_classes(call, classes, held, net)
    options = {**call.arguments, "reduction": "sum"}
    described = Call(call.op, call.operands, options)
    sums = net.all_reduce([compute(described, h, [()])[0] for h in held], "sum")
    weights = [_weight(call, h) for h in held]
    return [sums / net.all_reduce(weights, "sum")] * len(held)


def _weight(call: Call, held: list[torch.Tensor]) -> torch.Tensor:
    target = held[1]
    if target.is_floating_point():
        return torch.tensor(float(target.numel() // target.shape[1]))
    kept = target != call.arguments["ignore_index"]
    each = held[2][torch.where(kept, target, 0)] if len(held) > 2 else torch.ones(target.shape)
    return torch.where(kept, each, 0).sum()


def _by_classes(call: Call, classes: int, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Plain targets only: log of the sum of exps, minus the target's logit, weighted."""
    target = held[0][1]
    high = net.all_reduce([h[0].amax(classes) for h in held], "max")
    total = net.all_reduce([(h[0] - high.unsqueeze(classes)).exp().sum(classes) for h in held], "sum")
    found, start = [], 0
    for h in held:
        width = h[0].shape[classes]
        mine = (target >= start) & (target < start + width)
        local = torch.where(mine, target - start, 0)
        logit = h[0].gather(classes, local.unsqueeze(classes)).squeeze(classes) - high - total.log()
        weight = h[2][local] if len(h) > 2 else torch.ones(target.shape)
        found.append(torch.stack([torch.where(mine, logit * weight, 0), torch.where(mine, weight, 0)]))
        start += width
    net.log.append(("sum", tuple(target.shape)))
    return [_reduced_classes(call, target, *torch.stack(found).sum(0))] * len(held)


def attention_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Causal attention of a device's own queries: its mask starts at its own offset."""
    found, start = [], 0
    for query, key, value in held:
        rows = torch.arange(query.shape[-2]).unsqueeze(-1) + start
        mask = rows >= torch.arange(key.shape[-2])
        found.append(torch.nn.functional.scaled_dot_product_attention(query, key, value, mask))
        start += query.shape[-2]
    return found


WHOLE: dict[str, Form] = {
    "softmax": softmax_form,
    "log_softmax": softmax_form,
    "layer_norm": layer_norm_form,
    "rms_norm": rms_norm_form,
    "group_norm": group_norm_form,
    "batch_norm": batch_norm_form,
    "nll_loss": nll_loss_form,
    "cross_entropy": cross_entropy_form,
    "scaled_dot_product_attention": attention_form,
}
