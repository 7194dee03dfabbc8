"""Moving elements about."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.torch_engine.local import Function, Local, aware, shared
from meshloom.ops.shapes import indexed_dims, is_whole, section_sizes, squeezed_dims
from meshloom.types import Shape


@aware
def _reshape(local: Local, input: torch.Tensor, **_: object) -> torch.Tensor:
    return input.reshape(local.shapes[0])


@aware
def _squeeze(local: Local, input: torch.Tensor, **_: object) -> torch.Tensor:
    dims = squeezed_dims(local.call)
    return input.squeeze(dims) if dims else input.view(input.shape)


@aware
def _expand(local: Local, input: torch.Tensor, **_: object) -> torch.Tensor:
    return input.expand(local.shapes[0])


@aware
def _narrow(local: Local, input: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if length == local.call.shape("input")[dim]:
        return input.view(input.shape)
    return input.narrow(dim, start, length)


@aware
def _getitem(local: Local, input: torch.Tensor, index: object) -> torch.Tensor:
    return input[local.once("index", lambda: _padded_index(local.call.shape("input"), index))]


def _padded_index(shape: Shape, index: object) -> tuple[Any, ...]:
    """The index with whole dims taken whole, padding included."""
    return tuple(
        slice(None) if dim is not None and is_whole(each, shape[dim]) else each
        for each, dim in indexed_dims(index, shape)
    )


@aware
def _split(local: Local, input: torch.Tensor, **_: object) -> tuple[torch.Tensor, ...]:
    dim, sizes = section_sizes(local.call)
    return torch.split(input, list(sizes), dim)


@aware
def _cut(local: Local, input: torch.Tensor, **_: object) -> tuple[torch.Tensor, ...]:
    """As `split`, in pieces that torch writes to: it refuses to write to one of several results of one call."""
    dim, sizes = section_sizes(local.call)
    ends = accumulate(sizes)
    return tuple(input.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True))


def _triangle(function: Callable[..., torch.Tensor]) -> Function:
    """Keep a triangle. Positions count elements: where rows or columns are padded or elsewhere, each says its own."""

    @shared
    def keep(local: Local, input: torch.Tensor, diagonal: int) -> torch.Tensor:
        if tuple(input.shape[-2:]) == local.call.shape("input")[-2:]:
            return function(input, diagonal)
        rows, columns = (local.positions("input", input.dim() - back).to(input.device) for back in (2, 1))
        offset = columns - rows.unsqueeze(-1)
        return input.masked_fill(offset > diagonal if function is torch.tril else offset < diagonal, 0)

    return keep


def _meshgrid(tensors: tuple[torch.Tensor, ...], indexing: str | None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.meshgrid(*tensors, indexing=indexing or "ij"))


def _roll(input: torch.Tensor, shifts: Any, dims: Any) -> torch.Tensor:
    return torch.roll(input, shifts, dims if dims is not None else ())


def _interleave(input: torch.Tensor, repeats: int, dim: int | None, output_size: int | None) -> torch.Tensor:
    return torch.repeat_interleave(input, repeats, dim)


def _as_complex(input: torch.Tensor) -> torch.Tensor:
    """torch wants both parts of a number side by side, which the stored array need not have."""
    *strides, last = input.stride()
    fits = last == 1 and not any(s % 2 for s in strides)
    # of nothing, any strides count as contiguous
    return torch.view_as_complex(input if fits else input.clone(memory_format=torch.contiguous_format))


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
    "tensor_split": _cut,
    "cat": torch.cat,
    "stack": torch.stack,
    "unflatten": _reshape,
    "ravel": _reshape,
    "view_as_complex": _as_complex,
    "view_as_real": lambda input: torch.view_as_real(input.resolve_conj()),
    "movedim": torch.movedim,
    "unbind": torch.unbind,
    "unfold": lambda input, dimension, size, step: input.unfold(dimension, size, step),
    "diagonal": torch.diagonal,
    "diag_embed": torch.diag_embed,
    "tril": _triangle(torch.tril),
    "triu": _triangle(torch.triu),
    "repeat": lambda input, repeats: input.repeat(repeats),
    "tile": lambda input, repeats: input.tile(repeats),
    "repeat_interleave": _interleave,
    "roll": _roll,
    "flip": torch.flip,
    "rot90": torch.rot90,
    "pad": F.pad,
    "meshgrid": _meshgrid,
    "pixel_shuffle": lambda input, upscale_factor: F.pixel_shuffle(input, upscale_factor),
    "pixel_unshuffle": lambda input, downscale_factor: F.pixel_unshuffle(input, downscale_factor),
}
