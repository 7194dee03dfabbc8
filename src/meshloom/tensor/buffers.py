"""Tensors over buffers of the runtime: one memory, two views.

Tensor ops run on the caller's thread. When a queue is given a command that uses the buffer, the tensor forgets its
array; the next op that wants it waits for the commands on this buffer, and no others, and finds it again.
"""

from __future__ import annotations

import weakref

import torch

from meshloom.errors import expect
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.storage import Block
from meshloom.runtime.transfers import stored_array
from meshloom.tensor.base import Tensor
from meshloom.tensor.lazy import STORED, ask


class BufferArray:
    """The array of a buffer; forgotten while a queue uses the buffer."""

    def __init__(self, buffer: MeshBuffer, tensor: Tensor) -> None:
        self.buffer, self.tensor, self.forgotten = buffer, weakref.ref(tensor), False

    def find(self, tensor: Tensor) -> torch.Tensor:
        """The array, after the commands that use it."""
        if not isinstance(self.buffer.storage, Block):
            self.buffer.check()  # its cards have given the memory to others since
        if self.forgotten:
            self.buffer.take()
            STORED.__set__(tensor, stored_array(self.buffer))
            self.forgotten = False
        found: torch.Tensor = STORED.__get__(tensor)
        return found

    def forget(self) -> bool:
        """A queue uses the buffer; whether the tensor is still there."""
        self.forgotten = True
        return self.tensor() is not None


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
    finder = BufferArray(buffer, made)
    buffer.watch(finder.forget)
    return ask(made, finder)
