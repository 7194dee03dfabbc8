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


_BY_DIMS = {
    "conv": _conv,
    "conv_transpose": _conv,
    "max_pool": _pool,
    "avg_pool": _pool,
    "adaptive_avg_pool": _adaptive,
    "adaptive_max_pool": _adaptive,
}
WINDOWS: dict[str, Function] = {
    **{name + dims: make(getattr(F, name + dims)) for name, make in _BY_DIMS.items() for dims in ("1d", "2d", "3d")},
    "interpolate": F.interpolate,
}
