"""Samples of convolution, pooling and interpolation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from samples.drawing import Case, Draw, Operand, Sample

FLOAT = torch.float32


def _sizes(d: Draw, count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(d.number(low, high) for _ in range(count))


def _lead(d: Draw) -> tuple[int, ...]:
    """A batch, or none."""
    return (d.size(empty=False),) if d.number(0, 4) else ()


def conv(function: Callable[..., Any], count: int) -> Sample:
    def sample(d: Draw) -> Case:
        groups, patches = d.pick((1, 1, 2, 4)), d.number(0, 2) == 0
        kernel = _sizes(d, count, 1, 3 if count < 3 else 2)
        options: dict[str, Any] = {"groups": groups}
        if patches:
            options["stride"] = kernel
            slid = tuple(k * d.number(1, 4) for k in kernel)
        else:
            options.update(stride=d.number(1, 2), dilation=d.number(1, 2), padding=d.number(0, 1))
            slid = tuple(d.number(5, 7 if count < 3 else 5) for _ in kernel)
            if d.number(0, 2) == 0 and all(k % 2 for k in kernel):  # torch warns about even windows
                options.update(padding="same", stride=1)
        channels, out = groups * d.number(1, 4), groups * d.number(1, 4)
        operands = [Operand((*_lead(d), channels, *slid), FLOAT), Operand((out, channels // groups, *kernel), FLOAT)]
        if d.yes():
            operands.append(Operand((out,), FLOAT))
        return Case(tuple(operands), lambda x, w, b=None: function(x, w, b, **options))

    return sample


def conv_transpose(function: Callable[..., Any], count: int) -> Sample:
    def sample(d: Draw) -> Case:
        groups, kernel = d.pick((1, 1, 2, 4)), _sizes(d, count, 1, 3 if count < 3 else 2)
        options: dict[str, Any] = {"groups": groups}
        if d.number(0, 2) == 0:
            options["stride"] = kernel
        else:
            options.update(stride=2, padding=d.number(0, 1), output_padding=d.number(0, 1), dilation=d.number(1, 2))
        channels, out = groups * d.number(1, 4), d.number(1, 4)
        slid = tuple(d.number(2, 4) for _ in kernel)
        operands = [Operand((*_lead(d), channels, *slid), FLOAT), Operand((channels, out, *kernel), FLOAT)]
        if d.yes():
            operands.append(Operand((out * groups,), FLOAT))
        return Case(tuple(operands), lambda x, w, b=None: function(x, w, b, **options))

    return sample


def pool(function: Callable[..., Any], count: int, dilated: bool) -> Sample:
    def sample(d: Draw) -> Case:
        kernel = _sizes(d, count, 1, 3)
        options: dict[str, Any] = {"ceil_mode": d.yes()}
        if d.yes():
            options.update(stride=d.number(1, 3), padding=d.number(0, min(kernel) // 2))
            if dilated:
                options["dilation"] = d.number(1, 2)
            else:
                options["count_include_pad"] = d.yes()
        slid = tuple(k * d.number(1, 3) if d.yes() else d.number(5, 7) for k in kernel)
        slid = tuple(max(size, 5) if len(options) > 1 else size for size in slid)
        operand = Operand((*_lead(d), d.size(empty=False), *slid), FLOAT)
        return Case((operand,), lambda x: function(x, kernel, **options))

    return sample


def adaptive(function: Callable[..., Any], count: int) -> Sample:
    def sample(d: Draw) -> Case:
        slid = tuple(d.number(1, 8 if count < 3 else 4) for _ in range(count))
        target: Any = tuple(d.pick(range(1, size + 1)) for size in slid)
        if count > 1 and d.yes():
            target = (None, *target[1:])
        operand = Operand((*_lead(d), d.size(empty=False), *slid), FLOAT)
        return Case((operand,), lambda x: function(x, target))

    return sample


def interpolate(d: Draw) -> Case:
    count = d.number(1, 3)
    slid = tuple(d.number(1, 4) for _ in range(count))
    modes = {1: ("nearest", "linear", "area"), 2: ("nearest", "bilinear", "bicubic"), 3: ("nearest", "trilinear")}[
        count
    ]
    options: dict[str, Any] = {"mode": d.pick(modes)}
    if d.yes():
        options["size"] = tuple(d.number(1, 6) for _ in range(count))
    else:
        options["scale_factor"] = d.pick((1, 2, 1.5, 2.7))
    if "linear" in options["mode"] and d.yes():
        options["align_corners"] = True
    return Case((Operand((*_sizes(d, 2, 1, 7), *slid), FLOAT),), lambda x: F.interpolate(x, **options))


WINDOWS: dict[str, Sample] = {
    "conv1d": conv(F.conv1d, 1),
    "conv2d": conv(F.conv2d, 2),
    "conv3d": conv(F.conv3d, 3),
    "conv_transpose1d": conv_transpose(F.conv_transpose1d, 1),
    "conv_transpose2d": conv_transpose(F.conv_transpose2d, 2),
    "conv_transpose3d": conv_transpose(F.conv_transpose3d, 3),
    "max_pool1d": pool(F.max_pool1d, 1, True),
    "max_pool2d": pool(F.max_pool2d, 2, True),
    "max_pool3d": pool(F.max_pool3d, 3, True),
    "avg_pool1d": pool(F.avg_pool1d, 1, False),
    "avg_pool2d": pool(F.avg_pool2d, 2, False),
    "avg_pool3d": pool(F.avg_pool3d, 3, False),
    "adaptive_avg_pool1d": adaptive(F.adaptive_avg_pool1d, 1),
    "adaptive_avg_pool2d": adaptive(F.adaptive_avg_pool2d, 2),
    "adaptive_avg_pool3d": adaptive(F.adaptive_avg_pool3d, 3),
    "adaptive_max_pool1d": adaptive(F.adaptive_max_pool1d, 1),
    "adaptive_max_pool2d": adaptive(F.adaptive_max_pool2d, 2),
    "adaptive_max_pool3d": adaptive(F.adaptive_max_pool3d, 3),
    "interpolate": interpolate,
}
