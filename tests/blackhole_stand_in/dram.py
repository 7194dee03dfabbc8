"""DRAM: a bump allocator, pages around the banks, and two ways in: through windows, or queued through sysmem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from defs import DRAM_ALIGNMENT, DRAM_WRITE_OFFSET, PAGE_LIMIT, TILE_COLS, TILE_ROWS, DType
from stand_in import MACHINE, Board


@dataclass(frozen=True)
class DramBuffer:
    """Pages at one offset of every bank: page p lies in bank p % n, at addr + (p // n) * page_size."""

    name: str
    addr: int
    size: int
    page_size: int
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None


@dataclass
class PendingRead:
    """A read that was queued: `data` is there after the sync."""

    buf: DramBuffer
    data: bytes | None = None


def tilize(data: bytes, bpe: int, shape: tuple[int, ...]) -> bytes:
    """Rows to tiles of four faces; the last two dims must be multiples of 32."""
    *batch, rows, cols = shape
    assert rows % TILE_ROWS == 0 and cols % TILE_COLS == 0, "not a multiple of a tile"
    split = np.frombuffer(data, f"V{bpe}").reshape(*batch, rows // 32, 2, 16, cols // 32, 2, 16)
    lead = len(batch)
    order = (*range(lead), *(lead + axis for axis in (0, 3, 1, 4, 2, 5)))
    return split.transpose(order).tobytes()


def untilize(data: bytes, bpe: int, shape: tuple[int, ...]) -> bytes:
    """The inverse of tilize."""
    *batch, rows, cols = shape
    assert rows % TILE_ROWS == 0 and cols % TILE_COLS == 0, "not a multiple of a tile"
    split = np.frombuffer(data, f"V{bpe}").reshape(*batch, rows // 32, cols // 32, 2, 2, 16, 16)
    lead = len(batch)
    order = (*range(lead), *(lead + axis for axis in (0, 2, 4, 1, 3, 5)))
    return split.transpose(order).tobytes()


class DramAllocator:
    """Memory of one card."""

    def __init__(
        self,
        board: Board,
        bank_tiles: list[int],
        enqueue: Callable[[Callable[[], None]], None],
        sync_fn: Callable[[], None] | None = None,
        enable_sysmem: bool = False,
    ) -> None:
        self.board, self.bank_tiles, self.enqueue, self.sync_fn = board, bank_tiles, enqueue, sync_fn
        self.next = DRAM_WRITE_OFFSET
        self.sysmem = np.zeros(MACHINE.sysmem, np.uint8) if enable_sysmem else None

    def alloc(self, size, name=None, page_size=None, dtype=None, shape=None) -> DramBuffer:
        """The next piece of memory. It never comes back, and nobody looks whether it is there."""
        page = page_size or DRAM_ALIGNMENT
        assert page <= PAGE_LIMIT and page % DRAM_ALIGNMENT == 0
        buf = DramBuffer(name or f"buf{self.next:x}", self.next, size, page, dtype, shape)
        self.next += math.ceil(math.ceil(size / page) / len(self.bank_tiles)) * page
        return buf

    def alloc_write(self, data, name=None, page_size=None, dtype=None, shape=None) -> DramBuffer:
        """Allocate, and write."""
        buf = self.alloc(len(data), name, page_size, dtype, shape)
        self.write(buf, data)
        return buf

    def write(self, buf: DramBuffer, data: bytes) -> None:
        """Fast: the data goes to the start of sysmem, and a fill is queued that reads it from there some time later."""
        assert len(data) <= buf.size, "more data than the buffer holds"
        if buf.dtype is not None and buf.shape is not None:
            data = tilize(data, buf.dtype.value, buf.shape)
        if self.sysmem is None:
            self.poke(buf, np.frombuffer(data, np.uint8))
            return
        assert len(data) <= len(self.sysmem), "the data does not fit into sysmem"
        size, sysmem = len(data), self.sysmem
        sysmem[:size] = np.frombuffer(data, np.uint8)
        self.enqueue(lambda: self.poke(buf, sysmem[:size]))

    def enqueue_read(self, buf: DramBuffer) -> PendingRead:
        """Queue a drain."""
        pending = PendingRead(buf)

        def drain() -> None:
            data = self.peek(buf).tobytes()
            tiled = buf.dtype is not None and buf.shape is not None
            pending.data = untilize(data, buf.dtype.value, buf.shape) if tiled else data

        self.enqueue(drain)
        return pending

    def read(self, buf: DramBuffer) -> bytes:
        """Queue a drain and wait for it."""
        pending = self.enqueue_read(buf)
        if self.sync_fn is not None:
            self.sync_fn()
        assert pending.data is not None
        return pending.data

    def close(self) -> None:
        """Unpin sysmem."""
        self.sysmem = None

    # the memory itself

    def positions(self, buf: DramBuffer) -> tuple[np.ndarray, np.ndarray]:
        """Bank and offset of every byte; an offset behind the end is one at the beginning."""
        at = np.arange(buf.size)
        page, inside = np.divmod(at, buf.page_size)
        turn, bank = np.divmod(page, len(self.bank_tiles))
        offset = (buf.addr + turn * buf.page_size + inside) % self.board.bank_size
        return np.array(self.bank_tiles)[bank], offset

    def peek(self, buf: DramBuffer) -> np.ndarray:
        """What the banks hold."""
        bank, offset = self.positions(buf)
        found = np.empty(buf.size, np.uint8)
        for number in set(bank.tolist()):
            found[bank == number] = self.board.bank(number)[offset[bank == number]]
        return found

    def poke(self, buf: DramBuffer, data: np.ndarray, at: np.ndarray | None = None) -> None:
        """Put bytes into the banks: the first ones, or those at some positions."""
        bank, offset = self.positions(buf)
        chosen = np.arange(len(data)) if at is None else at
        bank, offset = bank[chosen], offset[chosen]
        for number in set(bank.tolist()):
            self.board.bank(number)[offset[bank == number]] = data[bank == number]
