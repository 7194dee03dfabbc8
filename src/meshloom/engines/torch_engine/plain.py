"""Torch's own functions in their shortest form, for calls whose stored arrays are dense tensors: nothing is padded,
no axis leads. Each line takes what is known of the call and its fixed arguments, and gives a function of the arrays
in their order; None where the long form has to do it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local
from meshloom.ops import Ref
from meshloom.ops.labels import normal_dims

Fixed = dict[str, Any]
Short = Callable[[Local, Fixed], Function | None]


def _reduction(function: Function) -> Short:
    def short(local: Local, fixed: Fixed) -> Function | None:
        ndim = len(local.call.shape("input"))
        dims = normal_dims(fixed["dim"], ndim)
        if fixed["dtype"] is not None or not dims:
            return None
        if len(dims) == ndim and not fixed["keepdim"]:
            return function
        return partial(function, dim=dims, keepdim=True) if fixed["keepdim"] else partial(function, dim=dims)

    return short


def _softmax(function: Function) -> Short:
    return lambda local, fixed: partial(function, dim=fixed["dim"]) if fixed["dtype"] is None else None


def _reshape(local: Local, fixed: Fixed) -> Function:
    return methodcaller("reshape", local.shapes[0])


def _getitem(local: Local, fixed: Fixed) -> Function:
    return itemgetter(fixed["index"])


def _layer_norm(local: Local, fixed: Fixed) -> Function | None:
    shape, eps = tuple(fixed["normalized_shape"]), fixed["eps"]
    if "weight" not in fixed:
        return lambda input, weight, bias=None: torch.layer_norm(input, shape, weight, bias, eps)
    return (lambda input: torch.layer_norm(input, shape, None, None, eps)) if "bias" in fixed else None


def _rms_norm(local: Local, fixed: Fixed) -> Function:
    shape, eps = tuple(fixed["normalized_shape"]), fixed["eps"]
    return lambda input, weight=None: torch.rms_norm(input, shape, weight, eps)


def _joining(function: Callable[..., torch.Tensor]) -> Short:
    def short(local: Local, fixed: Fixed) -> Function | None:
        dim, given = fixed["dim"], fixed["tensors"]
        in_order = given == tuple(map(Ref, range(len(given))))
        return (lambda *arrays: function(arrays, dim)) if in_order else None

    return short


PLAIN: dict[str, Short] = {
    "cat": _joining(torch.cat),
    "stack": _joining(torch.stack),
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "linear": lambda local, fixed: F.linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "getitem": _getitem,
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "ravel"), _reshape),
}
