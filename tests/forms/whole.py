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
    forms = {"ring": ring_attention, "keys": split_keys}
    return forms.get(row.label, causal_queries)(call, held, net)


def causal_queries(call: Call, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Causal attention of a device's own queries: its mask starts at its own offset."""
    found, start = [], 0
    for query, *rest in held:
        key, value = _heads(call, query, *rest[:2])
        rows = torch.arange(query.shape[-2]).unsqueeze(-1) + start
        mask = rows >= torch.arange(key.shape[-2])
        scale = call.arguments["scale"]
        found.append(torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale))
        start += query.shape[-2]
    return found


def _heads(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values with a head for every head of the query."""
    if not call.arguments["enable_gqa"]:
        return [key, value]
    return [each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value)]


def _scores(
    call: Call, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, row: int, column: int
) -> torch.Tensor:
    """Scores of queries from `row` on against keys from `column` on; the mask is of these alone."""
    scale = call.arguments["scale"]
    found = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if call.arguments["is_causal"]:
        rows = torch.arange(query.shape[-2]).unsqueeze(-1) + row
        found = found.masked_fill(rows < torch.arange(key.shape[-2]) + column, -math.inf)
    if mask is None:
        return found
    return found.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else found + mask


def _offsets(parts: list[torch.Tensor]) -> list[int]:
    return [sum(each.shape[-2] for each in parts[:i]) for i in range(len(parts))]


def ring_attention(call: Call, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Keys and values pass around; each device folds a block at a time into its maximum, sum and weighted sum."""
    devices = len(held)
    queries, keys, values = ([h[i] for h in held] for i in range(3))
    masks = [h[3] if len(h) > 3 else None for h in held]
    rows, columns, sizes = _offsets(queries), _offsets(keys), [k.shape[-2] for k in keys]
    running: list[Any] = [None] * devices
    for step in range(devices):
        for i in range(devices):
            j = (i - step) % devices
            mask = masks[i]
            if mask is not None and mask.shape[-1] > 1:
                mask = mask.narrow(-1, columns[j], sizes[j])
            key, value = _heads(call, queries[i], keys[i], values[i])
            scores = _scores(call, queries[i], key, mask, rows[i], columns[j])
            running[i] = _folded(running[i], scores, value)
        if step < devices - 1:
            keys, values = net.shift(keys), net.shift(values)
    return [_divided(weighted, total) for _, total, weighted in running]


def _divided(weighted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """A query that may see nothing gets zeros, as in torch."""
    return weighted / total.masked_fill(total == 0, 1)


def _folded(before: Any, scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One more block of scores in the running maximum, sum of weights and weighted sum of values."""
    high = scores.detach().amax(-1, keepdim=True)
    high = high if before is None else torch.maximum(high, before[0])
    finite = high.masked_fill(high == -math.inf, 0)
    weights = (scores - finite).exp()
    total, weighted = weights.sum(-1, keepdim=True), weights @ value
    if before is not None:
        kept = (before[0] - finite).exp()
        total, weighted = total + before[1] * kept, weighted + before[2] * kept
    return high, total, weighted


def split_keys(call: Call, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """All queries against a device's own keys; the parts are combined by three all-reduces."""
    columns, answers = _offsets([h[1] for h in held]), []
    for h, column in zip(held, columns, strict=True):
        key, value = _heads(call, h[0], h[1], h[2])
        answers.append((_scores(call, h[0], key, h[3] if len(h) > 3 else None, 0, column), value))
    high = net.all_reduce([scores.amax(-1) for scores, _ in answers], "max").unsqueeze(-1)
    weights = [(scores - high.masked_fill(high == -math.inf, 0)).exp() for scores, _ in answers]
    total = net.all_reduce([each.sum(-1) for each in weights], "sum").unsqueeze(-1)
    parts = [each @ value for each, (_, value) in zip(weights, answers, strict=True)]
    narrow = [each.squeeze(-1) for each in parts]  # a width of 1 is not named
    return [_divided(net.all_reduce(narrow, "sum").view(parts[0].shape), total)] * len(held)


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
