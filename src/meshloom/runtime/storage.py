"""Where the bytes of a buffer are: in one block for all devices, or with each card by itself.

Cards of this process share its memory: the buffer is one block (mesh axes first, size 1 where all devices hold the
same), and each card's handle is a view of it. Other cards hold their part themselves. A block stored once is given to
each device by itself (`own`) before somebody writes at one coordinate.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from meshloom.engines.layout import to_block, torch_dtype
from meshloom.engines.private import disable_current_modes
from meshloom.mesh import Coordinate
from meshloom.runtime.card import Card
from meshloom.runtime.geometry import MeshCoordinateRange
from meshloom.runtime.layouts import Layout, topology_of


class Storage(Protocol):
    """The memory of one buffer."""

    def at(self, place: Coordinate) -> Any:
        """The handle of the card at a coordinate."""


class Block:
    """One array for all devices. `data` is the stored array of the layout's topology, as long as they agree."""

    def __init__(self, layout: Layout, poison: bool) -> None:
        self._lock = threading.Lock()
        self.mesh, self.axes = layout.mesh, layout.mesh.ndim
        topology, dtype = topology_of(layout), torch_dtype(layout.dtype)
        with disable_current_modes():
            if topology is None:
                self.data: torch.Tensor | None = None
                self.block = _make_array(layout.held + layout.local_shape, dtype, poison)
            else:
                self.data = _make_array(topology.stored_shape, dtype, poison)
                self.block = to_block(self.data, topology)

    @property
    def is_shared(self) -> bool:
        """Whether some devices hold one and the same array."""
        return tuple(self.block.shape[: self.axes]) != self.mesh.local_shape

    def unshare(self) -> torch.Tensor:
        """The block with an array for every device: from now on they may differ."""
        with self._lock:
            if self.is_shared:
                local = self.block.shape[self.axes :]
                self.block = self.block.expand(*self.mesh.local_shape, *local).contiguous()
                self.data = None
            return self.block

    def at(self, place: Coordinate) -> torch.Tensor:
        block = self.block
        if self.mesh.is_split:
            place = tuple(c - start for c, start in zip(place, self.mesh.local_offset, strict=True))
        return block[tuple(c if size > 1 else 0 for c, size in zip(place, block.shape, strict=False))]

    def box(self, where: MeshCoordinateRange) -> torch.Tensor:
        """The block of a range of coordinates of this process; axes of size 1 stay so."""
        block, starts = self.block, self.mesh.local_offset
        slices = [slice(s.start - start, s.stop - start) for s, start in zip(where.slices, starts, strict=True)]
        cut = tuple(s if size > 1 else slice(None) for s, size in zip(slices, block.shape, strict=False))
        return block[cut]


def _make_array(shape: Sequence[int], dtype: torch.dtype, poison: bool) -> torch.Tensor:
    if not poison:
        return torch.zeros(tuple(shape), dtype=dtype)
    bad = float("nan") if dtype.is_floating_point or dtype.is_complex else True
    return torch.full(
        tuple(shape), bad if dtype == torch.bool or bad is not True else torch.iinfo(dtype).max, dtype=dtype
    )


class Scattered:
    """Every card holds its part."""

    def __init__(self, layout: Layout, cards: Sequence[Card], address: int) -> None:
        dtype = torch_dtype(layout.dtype)
        self._cards = cards
        self._handles: dict[Coordinate, Any] = {}
        try:
            for place, card in zip(layout.mesh.local_coordinates(), cards, strict=True):
                self._handles[place] = card.alloc(address, layout.local_shape, dtype)
        except BaseException:
            self.free()
            raise

    def at(self, place: Coordinate) -> Any:
        return self._handles[place]

    def free(self) -> None:
        """Tell every card."""
        for card, handle in zip(self._cards, self._handles.values(), strict=False):
            card.free(handle)
