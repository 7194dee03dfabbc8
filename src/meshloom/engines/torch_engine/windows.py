"""Looking through windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local, aware
from meshloom.ops.windows import slid_dims


def _conv(function: Callable[..., torch.Tensor]) -> Function:
    """A convolution of what is there: with sharded groups a device has its share of them."""

    @aware
    def run(local: Local, input: torch.Tensor, weight: torch.Tensor, groups: int, **others: object) -> torch.Tensor:
        place = -1 - slid_dims(local.call.op)
        own = groups if groups == 1 else groups * input.shape[place] // local.call.shape("input")[place]
        return function(input, weight, groups=own, **others)

    return run


def _pool(function: Function) -> Function:
    return lambda input, kernel_size, stride, **others: function(
        input, kernel_size, kernel_size if stride is None else stride, **others
    )


def _adaptive(function: Callable[..., torch.Tensor]) -> Function:
    """The result's size where windows slide: a device's own, if they are sharded."""

    @aware
    def run(local: Local, input: torch.Tensor, output_size: object) -> torch.Tensor:
        return function(input, local.shapes[0][-slid_dims(local.call.op) :])

    return run


WINDOWS: dict[str, Function] = {
    "conv1d": _conv(F.conv1d),
    "conv2d": _conv(F.conv2d),
    "conv3d": _conv(F.conv3d),
    "conv_transpose1d": _conv(F.conv_transpose1d),
    "conv_transpose2d": _conv(F.conv_transpose2d),
    "conv_transpose3d": _conv(F.conv_transpose3d),
    "max_pool1d": _pool(F.max_pool1d),
    "max_pool2d": _pool(F.max_pool2d),
    "max_pool3d": _pool(F.max_pool3d),
    "avg_pool1d": _pool(F.avg_pool1d),
    "avg_pool2d": _pool(F.avg_pool2d),
    "avg_pool3d": _pool(F.avg_pool3d),
    "adaptive_avg_pool1d": _adaptive(F.adaptive_avg_pool1d),
    "adaptive_avg_pool2d": _adaptive(F.adaptive_avg_pool2d),
    "adaptive_avg_pool3d": _adaptive(F.adaptive_avg_pool3d),
    "adaptive_max_pool1d": _adaptive(F.adaptive_max_pool1d),
    "adaptive_max_pool2d": _adaptive(F.adaptive_max_pool2d),
    "adaptive_max_pool3d": _adaptive(F.adaptive_max_pool3d),
    "interpolate": F.interpolate,
}
