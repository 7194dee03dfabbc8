"""Moving elements about."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines.torch_engine.local import Function, Local, aware
from meshloom.ops.shapes import indexed_dims, is_whole, section_sizes, squeezed_dims
from meshloom.types import Shape


@aware
def _reshape(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    return input.reshape(local.shapes[0])


@aware
def _squeeze(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    dims = squeezed_dims(local.call)
    return input.squeeze(dims) if dims else input.view(input.shape)


@aware
def _expand(local: Local, input: torch.Tensor, **_: Any) -> torch.Tensor:
    return input.expand(local.shapes[0])


@aware
def _narrow(local: Local, input: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if length == local.call.shape("input")[dim]:
        return input.view(input.shape)
    return input.narrow(dim, start, length)


@aware
def _getitem(local: Local, input: torch.Tensor, index: Any) -> torch.Tensor:
    return input[local.once("index", lambda: _padded_index(local.call.shape("input"), index))]


def _padded_index(shape: Shape, index: Any) -> tuple[Any, ...]:
    """The index with whole dims taken whole, padding included."""
    return tuple(
        slice(None) if dim is not None and is_whole(each, shape[dim]) else each
        for each, dim in indexed_dims(index, shape)
    )


@aware
def _split(local: Local, input: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    dim, sizes = section_sizes(local.call)
    return input.split(sizes, dim)


SHAPE: dict[str, Function] = {
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": torch.unsqueeze,
    "permute": torch.permute,
    "transpose": torch.transpose,
    "expand": _expand,
    "narrow": _narrow,
    "getitem": _getitem,
    "split": _split,
    "chunk": _split,
    "cat": torch.cat,
    "stack": torch.stack,
}
