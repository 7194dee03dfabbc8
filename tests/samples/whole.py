"""Samples of ops that look at a whole dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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


def rms_norm(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    tail = shape[d.number(0, len(shape) - 1) :]
    eps = d.pick((None, 1e-3))
    operands = [Operand(shape, d.pick(FLOATS))]
    if d.yes():
        operands.append(Operand(tail, operands[0].dtype))
    return Case(tuple(operands), lambda x, w=None: F.rms_norm(x, tail, w, eps))


def _affine(d: Draw, channels: int) -> list[Operand]:
    return [Operand((channels,), torch.float32)] * d.number(0, 2)


def group_norm(d: Draw) -> Case:
    groups, width = d.pick((1, 2, 3, 4, 6)), d.pick((1, 2, 3))
    shape = (d.size(empty=False), groups * width, *d.shape(0, 2, empty=False))
    shape = (*shape[:1], *shape[1:2], *(size + 1 for size in shape[2:])) if len(shape) > 2 else (*shape, 3)
    operands = (Operand(shape, torch.float32), *_affine(d, shape[1]))
    return Case(operands, lambda x, w=None, b=None: F.group_norm(x, groups, w, b))


def batch_norm(d: Draw) -> Case:
    shape = (d.size(empty=False) + 2, d.size(empty=False), *d.shape(0, 2, empty=False))
    operands = (Operand(shape, torch.float32), *_affine(d, shape[1]))
    if d.yes():
        return Case(operands, lambda x, w=None, b=None: F.batch_norm(x, None, None, w, b, True))
    known = (
        Operand((shape[1],), torch.float32, gradient=False),
        Operand((shape[1],), torch.float32, "positive", gradient=False),
    )
    return Case((operands[0], *known, *operands[1:]), lambda x, m, v, w=None, b=None: F.batch_norm(x, m, v, w, b))


def elements(
    function: Callable[..., Any], *options: dict[str, Any], values: tuple[str, str] = ("any", "any"),
    ways: Sequence[str] = ("mean", "sum", "none"), weights: Sequence[str] = (),
) -> Sample:  # fmt: skip
    """A loss of each element and its target, with weights that broadcast by the names given."""

    def sample(d: Draw) -> Case:
        shape, reduction = d.shape(1, 3), d.pick(ways)
        chosen = d.pick(options or ({},))
        operands = [Operand(shape, torch.float32, each) for each in values]
        named = [name for name in weights if d.yes()]
        operands += [Operand(d.broadcast_to(shape), torch.float32, "positive", gradient=False) for _ in named]
        return Case(
            tuple(operands),
            lambda x, t, *ws: function(x, t, reduction=reduction, **chosen, **dict(zip(named, ws, strict=True))),
        )

    return sample


def plain_targets(sample: Sample) -> Sample:
    """Targets that torch has no gradient for."""

    def changed(d: Draw) -> Case:
        case = sample(d)
        input, target, *rest = case.operands
        return Case((input, dataclasses.replace(target, gradient=False), *rest), case.run)

    return changed


def nll_loss(d: Draw) -> Case:
    n, c = d.size(empty=False), d.size(empty=False)
    extra = d.shape(0, 1, empty=False)
    options = {"reduction": d.pick(("mean", "sum", "none")), "ignore_index": d.pick((-100, 0))}
    operands = [Operand((n, c, *extra), torch.float32), Operand((n, *extra), torch.int64, f"below:{c}")]
    if d.yes():
        operands.append(Operand((c,), torch.float32, "positive", gradient=False))
    return Case(tuple(operands), lambda x, t, w=None: F.nll_loss(x, t, w, **options))


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
    """Causal, or with a mask of any shape that broadcasts, or neither; heads may share keys and values."""
    queries, keys, width, out = (d.size(empty=False) for _ in range(4))
    batch = outer = d.shape(0, 2, empty=False)
    options: dict[str, Any] = {"scale": d.pick((None, 0.5))}
    if d.number(0, 3) == 0:
        heads, groups = d.pick((1, 2, 4, 6)), d.pick((1, 2, 3))
        samples, options["enable_gqa"] = d.size(empty=False), True
        batch, outer = (samples, heads), (samples, heads * groups)
    shapes = [(*outer, queries, width), (*batch, keys, width), (*batch, keys, out)]
    operands = [Operand(shape, torch.float32) for shape in shapes]
    kind = d.number(0, 2)
    if kind == 0:
        options["is_causal"] = True
    elif kind == 1:
        lead = d.broadcast_to(outer)
        shape = (*lead, d.pick((1, queries)), keys if d.number(0, 3) else 1)
        dtype, values = d.pick(((torch.float32, "any"), (torch.bool, "mostly")))
        operands.append(Operand(shape, dtype, values))
    return Case(tuple(operands), lambda *xs: F.scaled_dot_product_attention(*xs, **options))


WHOLE: dict[str, Sample] = {
    "softmax": softmax(torch.softmax),
    "log_softmax": softmax(F.log_softmax),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "mse_loss": elements(F.mse_loss),
    "l1_loss": elements(F.l1_loss),
    "smooth_l1_loss": elements(F.smooth_l1_loss, {}, {"beta": 0.5}),
    "huber_loss": elements(F.huber_loss, {}, {"delta": 0.5}),
    "soft_margin_loss": plain_targets(elements(F.soft_margin_loss)),
    "poisson_nll_loss": elements(
        F.poisson_nll_loss, {}, {"log_input": False}, {"full": True}, values=("positive", "positive")
    ),
    "binary_cross_entropy": elements(F.binary_cross_entropy, values=("unit", "unit"), weights=("weight",)),
    "binary_cross_entropy_with_logits": elements(
        F.binary_cross_entropy_with_logits, values=("any", "unit"), weights=("weight", "pos_weight")
    ),
    "kl_div": elements(
        F.kl_div, {"log_target": False}, {"log_target": True}, values=("any", "positive"),
        ways=("sum", "none", "batchmean"),  # mean warns
    ),
    "nll_loss": nll_loss,
    "cross_entropy": cross_entropy,
    "scaled_dot_product_attention": attention,
}  # fmt: skip
