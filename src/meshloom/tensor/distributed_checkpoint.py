"""What `torch.distributed.checkpoint` asks a tensor for: the boxes that this process holds, and the memory of each.

DTensor answers the same three questions, so files of both are alike: either reads what the other wrote, on any mesh and
any number of processes. torch sorts out by itself which process writes a box that several hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from meshloom.errors import UnsupportedError
from meshloom.placement import Extent, extents
from meshloom.tensor.base import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def create_write_items(self: Tensor, fqn: str, object: Any) -> list[WriteItem]:
    """What this process writes of the tensor: one item for each of its boxes."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for number, chunk in enumerate(create_chunk_list(self)):
        properties = TensorProperties.create_from_tensor(self._data.detach())
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.topology.shape))
        items.append(
            WriteItem(index=MetadataIndex(fqn, chunk.offsets, number), type=WriteItemType.SHARD, tensor_data=data)
        )
    return items


def create_chunk_list(self: Tensor) -> list[ChunkStorageMetadata]:
    """The boxes that this process holds."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape)) for box in _boxes(self)]


def get_tensor_shard(self: Tensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of one of the boxes; writing to it writes the tensor."""
    offset = tuple(index.offset or ())
    for box in _boxes(self):
        if box.start == offset:
            return self._data.detach()[box.stored]
    raise UnsupportedError(
        f"this process holds no box of {index.fqn!r} that begins at {list(offset)}",
        tensor=self.topology,
        fix="give torch.distributed.checkpoint the tensors that it was given at first",
    )


def _boxes(tensor: Tensor) -> tuple[Extent, ...]:
    """What this process holds; of a tensor without elements all of it, so that it has a name in the file."""
    topology = tensor.topology
    topology.check_open()
    if topology.partial_axes:
        raise UnsupportedError(
            "a partial tensor cannot be saved or loaded: no process holds its value",
            tensor=topology,
            fix=f"redistribute it first: x.redistribute({topology.reduced.placements})",
        )
    if 0 in topology.shape:
        zero = (0,) * topology.ndim
        return (Extent(zero, topology.shape, zero),)
    return extents(topology)


# The methods of a tensor that are written here; `tensor.methods` attaches them.
METHODS: dict[str, Callable[..., Any]] = {
    "__create_write_items__": create_write_items,
    "__create_chunk_list__": create_chunk_list,
    "__get_tensor_shard__": get_tensor_shard,
}
