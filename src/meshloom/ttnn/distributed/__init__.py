"""Ops with a global meaning on tensors of parts: `ttnn.distributed.matmul(a, b, output=...)` and its kind.

Where `ttnn.matmul` multiplies what each device holds, `ttnn.distributed.matmul` multiplies the wholes that the labels
describe: topologies of the operands are read, communication is planned and done as needed, and the result has the
topology that was asked for. The README beside this file has an example. What the original keeps under this name
(`ttnn.distributed.open_mesh_device`) is here too.
"""

from __future__ import annotations

from typing import Any

from meshloom.ttnn import surface
from meshloom.ttnn.distributed.operations import (
    add,
    embedding,
    layer_norm,
    linear,
    matmul,
    mean,
    multiply,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
    sum,
    to_topology,
)

__all__ = [
    "add",
    "embedding",
    "layer_norm",
    "linear",
    "matmul",
    "mean",
    "multiply",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "sum",
    "to_topology",
]


def __getattr__(name: str) -> Any:
    if f"distributed.{name}" in surface.originals():
        return surface.find(name)
    raise AttributeError(f"ttnn.distributed has no {name!r}; it has {', '.join(__all__)}")
