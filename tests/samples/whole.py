"""Samples of ops that look at a whole dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from samples.drawing import FLOATS, Case, Draw, Operand, Sample


def softmax(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(1, 3)
        dim = d.dim(shape)
        return Case((Operand(shape, d.pick(FLOATS)),), lambda x: function(x, dim=dim))

    return sample


def layer_norm(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    tail = shape[d.number(0, len(shape) - 1) :]
    operands = [Operand(shape, torch.float32)]
    if d.yes():
        operands.append(Operand(tail, torch.float32))
        if d.yes():
            operands.append(Operand(tail, torch.float32))
    return Case(tuple(operands), lambda x, w=None, b=None: F.layer_norm(x, tail, w, b))


def cross_entropy(d: Draw) -> Case:
    n, c = d.size(empty=False), d.size(empty=False)
    extra = d.shape(0, 1, empty=False)
    reduction = d.pick(("mean", "sum", "none"))
    smoothing = d.pick((0.0, 0.0, 0.1))
    ignore = d.pick((-100, 0))
    logits = Operand((n, c, *extra), torch.float32)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if d.number(0, 3) == 0:
        target = Operand((n, c, *extra), torch.float32)
        return Case((logits, target), lambda x, t: F.cross_entropy(x, t, **options))
    target = Operand((n, *extra), torch.int64, f"below:{c}")
    options["ignore_index"] = ignore
    if d.yes():
        weight = Operand((c,), torch.float32, "positive", gradient=False)
        return Case((logits, target, weight), lambda x, t, w: F.cross_entropy(x, t, w, **options))
    return Case((logits, target), lambda x, t: F.cross_entropy(x, t, **options))


def attention(d: Draw) -> Case:
    batch = d.shape(0, 2, empty=False)
    queries, keys, width, out = (d.size(empty=False) for _ in range(4))
    qkv = [
        Operand((*batch, queries, width), torch.float32),
        Operand((*batch, keys, width), torch.float32),
        Operand((*batch, keys, out), torch.float32),
    ]
    kind = d.number(0, 3)
    if kind == 0:
        return Case(tuple(qkv), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if kind == 1:
        mask = Operand(d.pick(((queries, keys), (*batch, queries, keys), (1, keys))), torch.float32)
        return Case((*qkv, mask), F.scaled_dot_product_attention)
    if kind == 2:
        mask = Operand(d.pick(((queries, keys), (*batch, queries, keys))), torch.bool, "mostly")
        return Case((*qkv, mask), F.scaled_dot_product_attention)
    scale = d.pick((None, 0.5))
    return Case(tuple(qkv), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale))


WHOLE: dict[str, Sample] = {
    "softmax": softmax(torch.softmax),
    "log_softmax": softmax(F.log_softmax),
    "layer_norm": layer_norm,
    "cross_entropy": cross_entropy,
    "scaled_dot_product_attention": attention,
}  # fmt: skip
