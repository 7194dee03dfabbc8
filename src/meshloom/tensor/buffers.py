"""Tensors over buffers of the runtime: one memory, two views.

Tensor ops run on the caller's thread. When a queue is given a command that uses the buffer, the tensor forgets its
array; the next op that wants it (`array_of`) waits for the commands on this buffer, and no others, and finds it again.
So a tensor that nobody queues for costs nothing.
"""

from __future__ import annotations

import weakref

import torch

from meshloom.errors import expect
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.transfers import stored_array
from meshloom.tensor.base import Tensor

# The buffers of tensors that have forgotten their array, by the tensor's id: `==` of tensors is an op.
_forgotten: dict[int, MeshBuffer] = {}


def from_buffer(buffer: MeshBuffer) -> Tensor:
    """A tensor that shares the memory of a buffer; its layout must be one that placements can say.

    >>> from meshloom.runtime import create_mesh_buffer, open_mesh_device
    >>> with open_mesh_device((2,)) as mesh:
    ...     x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,))
    ...     mesh.queue().enqueue_write(x, [1, 2, 3, 4], blocking=False)
    ...     (from_buffer(x) * 10).tolist()
    [10.0, 20.0, 30.0, 40.0]
    """
    expect("buffer", buffer, MeshBuffer, fix="give what create_mesh_buffer returned")
    buffer.take()
    made = Tensor(buffer.topology, stored_array(buffer))
    key = id(made)
    reference = weakref.ref(made, lambda _: _forgotten.pop(key, None))

    def forget() -> bool:
        tensor = reference()
        if tensor is not None and id(tensor) not in _forgotten:
            _forgotten[id(tensor)] = buffer
            del tensor._data
        return tensor is not None

    buffer.watch(forget)
    return made


def array_of(tensor: Tensor) -> torch.Tensor:
    """The array that a tensor has forgotten, after the commands that use it."""
    buffer = _forgotten.get(id(tensor))
    if buffer is None:
        raise AttributeError("_data")
    buffer.take()
    data = stored_array(buffer)
    _forgotten.pop(id(tensor), None)
    tensor._data = data
    return data
