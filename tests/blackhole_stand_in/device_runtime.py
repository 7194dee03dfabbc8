"""What all devices do when they are opened and closed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from device_dispatch import Cores, CoreWork, Program, bake, resolve_cores
from dram import DramAllocator
from stand_in import BANKS, MACHINE

Core = tuple[int, int]


@dataclass
class TileGrid:
    """Where things are on the chip."""

    dram: list[int]
    tensix: list[Core]


class CommonDevice:
    """A card that is open. Nobody keeps a second owner away, and the first one then loses what it had queued."""

    is_fast = False

    def __init__(self, device: int = 0) -> None:
        self.device, self.path = device, str(MACHINE.folder / str(device))
        self.fd = os.open(self.path, os.O_RDWR)
        board = MACHINE.boards[device]
        self.arch = board.kind
        if board.kind != "p100a":
            os.close(self.fd)
            raise SystemExit(f"unsupported card type {board.kind}")
        board.owner += 1
        self._board, self._owner = board, board.owner
        self.harvested_dram = board.harvested
        tensix = [(x, y) for x in (*range(1, 8), *range(10, 15)) for y in range(2, 12)]
        self.tiles = TileGrid([bank for bank in range(BANKS) if bank != board.harvested], tensix)
        self.worker_cores = tensix
        self.dispatchable_cores = tensix[:-2] if self.is_fast else tensix
        self._commands: list[Callable[[], None]] = []
        self._streams: dict[int, list[CoreWork]] = {}
        self.dram = DramAllocator(board, self.tiles.dram, self._enqueue, self.sync, enable_sysmem=self.is_fast)
        self._cores = Cores(self.dram)
        self.closed = False

    def _enqueue(self, command: Callable[[], None]) -> None:
        self._commands.append(command)

    def resolve_cores(self, cores: object = "all") -> list[Core]:
        """Cores that programs may use."""
        return resolve_cores(cores, self.dispatchable_cores)

    def _stream(self, program: Program) -> list[CoreWork]:
        """Cold: all is uploaded. Hot: what was uploaded under this id runs again, whatever the program says now."""
        if id(program) not in self._streams:
            self._streams[id(program)] = bake(program, self.dispatchable_cores)
            self._board.executed.append("cold")
        else:
            self._board.executed.append("hot")
        return self._streams[id(program)]

    def sync(self, timeout_s: float = 10.0) -> None:
        """Wait for all that was queued."""
        if self._owner != self._board.owner:
            raise RuntimeError("event mismatch: somebody else has opened the card")
        if self._board.hangs:
            time.sleep(min(timeout_s, 10.0))
            raise TimeoutError(f"timed out after {timeout_s} s")
        if self._commands and self._board.delay:
            time.sleep(self._board.delay)
        while self._commands:
            self._commands.pop(0)()

    synchronize = sync

    def close(self) -> None:
        """Let the card go."""
        if not self.closed:
            self.closed = True
            self.dram.close()
            os.close(self.fd)
