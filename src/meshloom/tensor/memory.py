"""What reads a tensor's memory: `data_ptr` and storages, of a dense copy of the global value that the tensor keeps.

Savers read memory through a pointer, and a tensor of ours has no memory of its own in torch's eyes. Tensors that share
their stored array share the copy, so that tied weights look tied; a stored array that is the dense value already is
its own copy. Writing through such a pointer is not supported.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from meshloom.tensor.base import Tensor
from meshloom.tensor.moving import shadowed, to_torch
from meshloom.tensor.views import recipe_of


class Copy:
    """The dense value of a stored array, as it was at a version; it keeps the array, whose address is its key."""

    __slots__ = ("__weakref__", "dense", "source", "version")

    def __init__(self, dense: torch.Tensor, source: torch.Tensor) -> None:
        self.dense, self.source, self.version = dense, source, source._version


_copies: weakref.WeakValueDictionary[tuple[Any, ...], Copy] = weakref.WeakValueDictionary()


def dense_of(tensor: Tensor) -> torch.Tensor:
    """The dense value as an array whose memory can be read, kept alive by the tensor."""
    tensor = shadowed(tensor)
    data, topology = tensor._data, tensor.topology
    recipe = recipe_of(tensor)
    if recipe is not None:  # in the memory of its base, as torch has it, where what it reads there lies in a row
        found = recipe.of_dense(dense_of(tensor._view[0]))
        if found.is_contiguous():
            return found
    if data.is_meta or (topology.is_whole and tuple(data.shape) == topology.shape and data.is_contiguous()):
        return data
    key = data.untyped_storage()._cdata, data.storage_offset(), data.stride(), topology
    copy = _copies.get(key)
    if copy is None or copy.version != data._version:
        dense = to_torch(tensor).detach().contiguous()
        if copy is None:
            copy = _copies[key] = Copy(dense, data)
        else:  # in the memory that others may have a pointer to
            copy.dense.copy_(dense)
            copy.source, copy.version = data, data._version
    tensor._dense = copy
    return copy.dense


def data_ptr(tensor: Tensor) -> int:
    """The address of a dense copy of the global value, made now and kept alive by the tensor."""
    return dense_of(tensor).data_ptr()


def untyped_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of the dense copy: one for all tensors that share their stored array."""
    return dense_of(tensor).untyped_storage()


def storage(tensor: Tensor) -> torch.TypedStorage:
    """As `untyped_storage`, with the dtype."""
    return torch.TypedStorage(wrap_storage=untyped_storage(tensor), dtype=tensor.dtype, _internal=True)
