"""The machine under the stand-in: which cards there are, what is in their memory, and what goes wrong with them.

This tree stands in for blackhole-py (the files of February 2026), which nobody here has a card for. It was written from
a description of that driver, not copied from it, and it keeps the traps that a user of the driver must know of:

    dram.py       alloc only grows: there is no free and no end; an address behind the end wraps around
                  a fast write leaves its data in one staging memory, which the next one overwrites unless you sync
                  a read is queued: its data is there after the sync
    device.py     programs are remembered by id(program): another one at the same id runs the old one
                  a wrong kind of card ends the program with SystemExit
                  two owners of a card end each other's commands
                  every card has another bank switched off
    codegen.py    the cache of kernels on disk is written by plain copies: two processes read halves
    ethernet.py   a slot is overwritten whether or not somebody has taken what is in it

`ethernet.py` and `meshloom_kernels.py` have no counterpart in that driver: it has no links and no kernels of ops.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

BANKS = 8
MIB = 1 << 20


@dataclass
class Slot:
    """Room for one message at the end of a link."""

    data: bytes | None = None
    overruns: int = 0


@dataclass
class Board:
    """One card: what it is, what it holds, and what is wrong with it."""

    index: int
    kind: str = "p100a"
    harvested: int = 0
    bank_size: int = 4 * MIB
    hangs: bool = False  # whatever it is told to do never ends
    delay: float = 0.0  # seconds that every wait takes
    owner: int = 0  # which opening of it is the last
    banks: dict[int, np.ndarray] = field(default_factory=dict)
    slots: dict[int, list[Slot]] = field(default_factory=dict)  # by the peer that writes there
    executed: list[str] = field(default_factory=list)

    def bank(self, number: int) -> np.ndarray:
        """The memory of a bank, which is there when it is first used."""
        return self.banks.setdefault(number, np.zeros(self.bank_size, np.uint8))


class Machine:
    """All cards, and the links between them."""

    def __init__(self) -> None:
        self.install(Path(os.environ.get("STAND_IN_DEVICES", "/dev/tenstorrent")), 4)

    def install(
        self, folder: Path, cards: int, links: str = "ring", slots: int = 2, slot_size: int = 4096, **options: object
    ) -> None:
        """Put cards into a machine: nodes in a folder, with links around a ring (or "all", or none)."""
        self.folder, self.sysmem, self.cache = folder, MIB, os.environ.get("STAND_IN_CACHE")
        self.boards = {i: Board(i, harvested=(3 * i + 1) % BANKS, **options) for i in range(cards)}
        self.slot_size, self.cut = slot_size, set()
        for one in range(cards if links else 0):
            for other in range(cards):
                if one != other and (links == "all" or (one - other) % cards in (1, cards - 1)):
                    self.boards[one].slots[other] = [Slot() for _ in range(slots)]
        if folder != Path("/dev/tenstorrent"):
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(cards):
                (folder / str(index)).touch()


MACHINE = Machine()
