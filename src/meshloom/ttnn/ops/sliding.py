"""What convolution and pooling share: pictures of all devices as one batch with channels first, windows, flat results.

A device's pictures are [N, H, W, C] or, flattened, [1, 1, N * H * W, C]; results are flattened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.nn import functional as F

from meshloom.errors import OperandError
from meshloom.ttnn.ops.block_moves import whole
from meshloom.ttnn.ops.topologies import moves, topology_of
from meshloom.ttnn.tensor.padding import fill_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

Around = tuple[int, int, int, int]  # top, bottom, left, right


def channels_first(name: str, tensor: Tensor, sizes: tuple[int, int, int, int]) -> Block:
    """Pictures of every device as [*mesh, N, C, H, W], zero where channels are padding; sizes are N, H, W, C."""
    if math.prod(tensor.shape) != math.prod(sizes) or tensor.shape[-1] != sizes[-1]:
        batch, height, width, channels = sizes
        raise OperandError(
            f"ttnn.{name}: {batch} pictures {height}x{width} with {channels} channels are not in {list(tensor.shape)}",
            fix=f"[1, 1, {batch * height * width}, {channels}], sizes being those of one device",
        )
    block = fill_padding(tensor.block, tensor, [-1], "sum")
    return block.reshape(*block.shape[: len(tensor.grid)], *sizes).movedim(-1, -3)


def flatten_pictures(pictures: Block, axes: int) -> Block:
    """[*mesh, N, C, H, W] as [*mesh, 1, 1, N * H * W, C]."""
    last = pictures.movedim(-3, -1)
    return last.reshape(*pictures.shape[:axes], 1, 1, -1, pictures.shape[-3])


def around(padding: int | Sequence[int]) -> Around:
    """Padding as top, bottom, left, right: of one number, (height, width) or all four.

    >>> around(1), around((1, 2)), around((1, 2, 3, 4))
    ((1, 1, 1, 1), (1, 1, 2, 2), (1, 2, 3, 4))
    """
    sizes = whole(padding, 2)
    if len(sizes) == 4:
        return (sizes[0], sizes[1], sizes[2], sizes[3])
    return (sizes[0], sizes[0], sizes[1], sizes[1])


class Window:
    """Windows over pictures: their size, their steps, what is around the pictures, and how far apart places are."""

    def __init__(self, *, kernel_size, stride, padding, dilation=(1, 1), ceil_mode=False) -> None:
        self.kernel, self.steps, self.holes = (whole(each, 2) for each in (kernel_size, stride, dilation))
        self.edges, self.ceil = around(padding), ceil_mode

    def count(self, height: int, width: int) -> tuple[int, int]:
        """How many there are down and across."""
        top, bottom, left, right = self.edges
        return (
            windows(height, self.kernel[0], self.steps[0], top, bottom, self.holes[0], self.ceil),
            windows(width, self.kernel[1], self.steps[1], left, right, self.holes[1], self.ceil),
        )

    def pad(self, pictures: Block, **how: Any) -> Block:
        """Pictures [..., H, W] with what is around them."""
        top, bottom, left, right = self.edges
        return F.pad(pictures, (left, right, top, bottom), **how) if any(self.edges) else pictures


def windows(size: int, kernel: int, stride: int, before: int, after: int, dilation: int = 1, ceil: bool = False) -> int:
    """How many windows fit; rounded up if asked for, but none begins in the padding behind.

    >>> windows(7, 3, 2, 1, 1), windows(8, 3, 2, 0, 0), windows(8, 3, 2, 0, 0, ceil=True)
    (4, 3, 4)
    """
    room = size + before + after - dilation * (kernel - 1) - 1
    if room < 0:
        raise OperandError(f"a window of {dilation * (kernel - 1) + 1} does not fit into {size + before + after}")
    count = -(-room // stride) + 1 if ceil else room // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + before else count


def topology_of_pictures(tensor: Tensor, rows: int, linear: bool) -> TensorTopology:
    """Of an op on every picture and channel alone, with so many rows in its result: cut at pictures or at channels."""
    *_, channels = shape = tensor.shape
    places: list[int | None] = [None] * len(shape)
    places[pictures_dim(tensor)], places[-1] = 2, 3
    return topology_of(moves(tuple(places), linear=linear), tensor, shape=(1, 1, rows, channels), scales=True)


def pictures_dim(tensor: Tensor) -> int:
    """The dim that counts pictures, or all their pixels: cut there, an axis does not cut inside of them."""
    return 2 if len(tensor.shape) == 4 and tuple(tensor.shape[:2]) == (1, 1) else 0
