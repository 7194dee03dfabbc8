"""Softmax and the norms of dims that several processes hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meshloom.backends.forms.across import Across
from meshloom.comms import wire
from meshloom.comms.gradients import statistic
from meshloom.engines.layout import short_name
from meshloom.engines.torch_engine import whole
from meshloom.engines.torch_engine.local import wide_dtype
from meshloom.errors import DTypeError
from meshloom.ops.normalisation import softmax_dim


def _softmax(logarithm: bool) -> Callable[..., torch.Tensor]:
    def form(across: Across, input: torch.Tensor, dim: int, dtype: Any, _stacklevel: Any) -> torch.Tensor:
        dim = softmax_dim(across.plan.call)
        kept = dtype or input.dtype
        _refuse_integers(across, kept)
        x = input.to(wide_dtype(kept))
        if x.numel() == 0:
            return x.to(kept)
        high = wire.all_reduce(x.detach().amax(dim, keepdim=True), across.group, "max")
        weights = (x - high).exp()
        total = statistic(weights.sum(dim, keepdim=True), across.group)
        return (x - high - total.log() if logarithm else weights / total).to(kept)

    return form


def _refuse_integers(across: Across, dtype: torch.dtype) -> None:
    """Integers cannot be normalised."""
    if not dtype.is_floating_point:
        raise DTypeError(f"{across.plan.call.op} takes floating-point numbers, not {short_name(dtype)}")


def _norm(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A norm by its formula, its sums added up over the processes."""

    def form(across: Across, input: torch.Tensor, **options: Any) -> Any:
        _refuse_integers(across, input.dtype)
        return formula(across.local, input, **options, total=partial(statistic, group=across.group))

    return form


NORMS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax(False),
    "log_softmax": _softmax(True),
    "layer_norm": _norm(whole.layer_norm),
    "rms_norm": _norm(whole.rms_norm),
    "group_norm": _norm(whole.group_norm),
    "batch_norm": _norm(whole.batch_norm),  # in training, which alone has statistics to share
}
