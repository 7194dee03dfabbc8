"""The memory of one card: a file without a name that its process and ours have mapped.

A file that has no name ends with the last process that has it open, however that ends: there is nothing to clean up.
It is sparse: bytes that nobody has touched cost nothing, so it is as large as the card could ever need. Pieces are
given out first fit and start as zeros. A piece goes back when nobody refers to it, be that a handle or a launch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from meshloom.errors import OutOfMemoryError
from meshloom.runtime.chips import Chip
from meshloom.runtime.memory import Gaps, align, size_text
from meshloom.types import Shape

ROOM = 4  # times what the chip has: first fit over DRAM and L1 together must never be the one that is full
SLACK = 16 << 20  # bytes at the top that are kept when they are free: they will be used again


class Piece:
    """Some bytes of an arena, until nobody refers to them."""

    __slots__ = ("_drop", "end", "start")

    def __init__(self, start: int, end: int, drop: Callable[[tuple[int, int]], None]) -> None:
        self.start, self.end, self._drop = start, end, drop

    def __del__(self) -> None:
        self._drop((self.start, self.end))  # only makes a note: this may run anywhere


class Arena:
    """The memory of a card, as its owner sees it.

    >>> arena = Arena(1 << 20, "example")
    >>> first, second = arena.take(100), arena.take(10)
    >>> (first.start, first.end), second.start
    ((0, 128), 128)
    >>> del first; arena.take(64).start
    0
    """

    def __init__(self, size: int, name: str) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = _open_nameless(name, self.size)
        self.bytes = map_file(self.file.fileno(), self.size)
        self._gaps = Gaps(self.size)
        self._top = 0  # from here on, all bytes are zero
        self._dropped: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Piece:
        """A piece of so many bytes, all zero."""
        size = align(nbytes)
        with self._lock:
            self._drain()
            start = self._gaps.fit(size)
            if start is None:
                raise OutOfMemoryError(
                    f"{size_text(size)} do not fit into the memory of the card, {size_text(self.size)}",
                    fix="free buffers, or shard over more cards",
                )
            self._gaps.take(start, start + size)
            used, self._top = self._top, max(self._top, start + size)
        if start < used:
            view(self.bytes, start, (min(used, start + size) - start,), torch.uint8).zero_()
        return Piece(start, start + size, self._dropped.append)

    def put(self, data: bytes) -> Piece:
        """A piece that holds these bytes."""
        piece = self.take(len(data))
        self.bytes[piece.start : piece.start + len(data)] = data
        return piece

    @property
    def used(self) -> int:
        """The bytes that pieces hold."""
        with self._lock:
            self._drain()
            return self.size - sum(end - start for start, end in self._gaps.pieces)

    def close(self) -> None:
        """The card is closed: the system has all pages again, whoever still refers to them."""
        with self._lock:
            self._give_back(0, -(-self._top // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._top = 0
        self.file.close()

    def _drain(self) -> None:
        while self._dropped:
            self._gaps.give(*self._dropped.popleft())
        free = self._gaps.pieces[-1][0] if self._gaps.pieces else self.size
        floor = -(-free // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._top - floor >= SLACK:
            self._give_back(floor, -(-self._top // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._top = floor

    def _give_back(self, start: int, end: int) -> None:
        """Let the system have these pages again: they read as zeros."""
        if start == end:
            return
        if hasattr(mmap, "MADV_REMOVE"):
            self.bytes.madvise(mmap.MADV_REMOVE, start, end - start)
        else:
            view(self.bytes, start, (end - start,), torch.uint8).zero_()


def size_for(chip: Chip) -> int:
    """How large the arena of a chip is."""
    return ROOM * (chip.dram + chip.l1 * chip.cores.num_cores)


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """The file as memory, which others see change."""
    return mmap.mmap(descriptor, size)


def view(memory: mmap.mmap, start: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """The array that begins at a byte of an arena."""
    count = 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def _open_nameless(name: str, size: int) -> _Nameless:
    if hasattr(os, "memfd_create"):
        return _Nameless(os.memfd_create(f"meshloom-{name}"), size)
    with tempfile.TemporaryFile() as file:
        return _Nameless(os.dup(file.fileno()), size)


class _Nameless:
    """A file that has no name, closed with its last reference."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._descriptor
