"""Works on block floats: rounding values to bfloat8_b, and packing them to the bytes of tiles, beside a bare copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.goals import Goal
from benchmarks.works import Pair, Spec
from meshloom.ttnn.tensor import blockfloat

SIDE = 4096
BITS = 7
SPEED = Goal("mb_per_s", 200.0, " MB/s", at_least=True)


def works(devices: Sequence[int]) -> list[Spec]:
    """Rounding and packing; one device, since blocks do not know of devices."""
    named = (("round", blockfloat.round_blocks), ("pack", blockfloat.pack))
    return [
        Spec(f"blockfloat {name}", f"{SIDE}x{SIDE} f32, to a copy", (1,), partial(_pair, act), SPEED, "mb_per_s")
        for name, act in named
        if 1 in devices
    ]


def _pair(act: Callable[[torch.Tensor, int], torch.Tensor]) -> Pair:
    values = torch.randn(SIDE, SIDE)
    return Pair(lambda: act(values, BITS), values.clone, nbytes=values.nbytes)
