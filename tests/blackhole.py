"""The stand-in for blackhole-py, ready for a test: cards in a folder, and a driver over them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from meshloom.processes import discovery
from meshloom.runtime.drivers.blackhole import BlackholeDriver

STAND_IN = Path(__file__).resolve().parent / "blackhole_stand_in"
if str(STAND_IN) not in sys.path:
    sys.path.append(str(STAND_IN))

import codegen  # noqa: E402
import device  # noqa: E402
import dram  # noqa: E402
import meshloom_kernels as kernels  # noqa: E402
from stand_in import MACHINE  # noqa: E402

__all__ = ["MACHINE", "STAND_IN", "codegen", "device", "dram", "driver", "install", "kernels"]


def install(monkeypatch: Any, folder: Path, cards: int = 4, **options: Any) -> None:
    """Put cards into the machine of the stand-in, with their nodes in a folder."""
    monkeypatch.setattr(discovery, "CARDS", folder / "tenstorrent")
    monkeypatch.setenv("MESHLOOM_BLACKHOLE", str(STAND_IN))
    MACHINE.install(folder / "tenstorrent", cards, **options)


def driver(**options: Any) -> BlackholeDriver:
    """A driver that knows how large the stand-in's banks are."""
    board = MACHINE.boards[0]
    return BlackholeDriver(
        STAND_IN, **{"bank_size": board.bank_size, "sysmem": MACHINE.sysmem, "timeout": 0.2, **options}
    )
