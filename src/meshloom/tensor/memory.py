"""What reads a tensor's memory: `data_ptr` and storages, of a dense copy of the global value that the tensor keeps.

Savers read memory through a pointer, and a tensor of ours has no memory of its own in torch's eyes. Tensors that share
their stored array share the copy, so that tied weights look tied; a stored array that is the dense value already is
its own copy. Writing through such a pointer is not supported.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from meshloom.runtime.card_array import CardArray
from meshloom.tensor.base import Tensor
from meshloom.tensor.moving import same_storage, shadow_of, to_torch
from meshloom.tensor.views import base_of, moved_view, recipe_of


class Copy:
    """The dense value of a stored array; it keeps the array's storage, whose address is its key."""

    __slots__ = ("__weakref__", "dense", "storage")

    def __init__(self, dense: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.dense, self.storage = dense, storage


_copies: weakref.WeakValueDictionary[tuple[Any, ...], Copy] = weakref.WeakValueDictionary()


def dense_of(tensor: Tensor) -> torch.Tensor:
    """The dense value as an array whose memory can be read, kept alive by the tensor.

    It is read anew at every call: arrays that share memory need not share a version, and whether an older copy is still
    there depends on the process.
    """
    tensor = shadow_of(tensor)
    data, topology = tensor._data, tensor.topology
    found = _inside_of_base(tensor, data)
    if found is not None:
        return found
    is_here = not topology.mesh.ranks  # where some processes hold it, all of them ask for it
    is_dense = topology.is_whole and tuple(data.shape) == topology.shape and data.is_contiguous()
    if is_here and (data.is_meta or (is_dense and data.__class__ is not CardArray)):
        return data
    dense = to_torch(tensor).detach().contiguous()
    storage = data.untyped_storage()
    key = storage._cdata, data.storage_offset(), data.stride(), topology
    copy = _copies.get(key)
    if copy is None:
        copy = _copies[key] = Copy(dense, storage)
    else:  # in the memory that others may have a pointer to
        copy.dense.copy_(dense)
    tensor._dense = copy
    return copy.dense


def _inside_of_base(tensor: Tensor, data: torch.Tensor) -> torch.Tensor | None:
    """A view in the memory of its base, as torch has it, where what it reads there lies in a row."""
    recipe = recipe_of(tensor)
    if recipe is None:
        return None
    base = base_of(tensor)
    if moved_view(tensor) is None and ("_old" in vars(base) or not same_storage(base._data, data)):
        return None  # the base was turned in place or has other memory since
    found = recipe.of_dense(dense_of(base))
    return found if found.is_contiguous() else None


def data_ptr(tensor: Tensor) -> int:
    """The address of a dense copy of the global value, made now and kept alive by the tensor."""
    return dense_of(tensor).data_ptr()


def untyped_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of the dense copy: one for all tensors that share their stored array."""
    return dense_of(tensor).untyped_storage()


def storage(tensor: Tensor) -> torch.TypedStorage:
    """As `untyped_storage`, with the dtype."""
    return torch.TypedStorage(wrap_storage=untyped_storage(tensor), dtype=tensor.dtype, _internal=True)
