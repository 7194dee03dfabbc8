"""Arrays of torch as bytes, without a copy where their memory is in order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshloom.engines.layout import view_bytes

BLOCK = 1 << 22  # bytes that are copied at a time where memory is not in order


def as_bytes(array: torch.Tensor) -> memoryview:
    """The memory of a contiguous array on the host; writing to it writes the array.

    >>> as_bytes(torch.tensor([1, 2], dtype=torch.int16)).tolist()
    [1, 0, 2, 0]
    """
    return view_bytes(array).numpy().data


def is_plain(array: torch.Tensor) -> bool:
    """Whether an array's memory is on the host and in the order of its elements."""
    return array.device.type == "cpu" and array.is_contiguous() and not array.is_conj() and not array.is_neg()


def bytes_of(array: torch.Tensor) -> Iterator[memoryview]:
    """The elements of an array in order, as bytes; at most a block is copied at a time."""
    if array.numel() == 0:
        return
    if is_plain(array):
        yield as_bytes(array)
    elif array.nbytes <= BLOCK or array.dim() == 0:
        yield as_bytes(array.detach().resolve_conj().resolve_neg().contiguous().cpu())
    else:
        rows = max(1, BLOCK * array.shape[0] // array.nbytes)
        for first in range(0, array.shape[0], rows):
            part = array[first : first + rows]
            yield from bytes_of(part if len(part) > 1 else part[0])


def own_copy(array: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in order."""
    return array.detach().resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)
