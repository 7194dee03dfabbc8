"""Ops as kernels for cards in processes: torch runs there too, so an op is a call of it on the card's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshloom.runtime.card import Kernel, Part

NAMES = """
matmul sum transpose add sub mul div relu neg exp log sqrt rsqrt reciprocal abs tanh sigmoid sin cos silu
threshold_backward tanh_backward sigmoid_backward
""".split()
GIVEN = {"threshold_backward": {"threshold": 0}}  # what torch wants to be told even if it is the usual


def make_kernel(name: str) -> Kernel:
    """A kernel that writes the result of an op on all arrays but the last into the last."""
    given = GIVEN.get(name, {})

    def kernel(*arrays: torch.Tensor, **args: Any) -> None:
        *operands, out = arrays
        found = getattr(torch.ops.aten, name)(*operands, **{**given, **args})
        out.copy_(found.view(out.shape))

    kernel.__name__ = name
    return kernel


KERNELS = {name: make_kernel(name) for name in NAMES}


def kernel_of(op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> Kernel | None:
    """The kernel of an op on floats of one dtype; None if there is none."""
    dtypes = {part.dtype for part in (*operands, result)}
    return KERNELS.get(op) if len(dtypes) == 1 and result.dtype.is_floating_point else None
