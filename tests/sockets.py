"""What processes listen on, from the system's own tables (Linux): for tests that look at a run's open doors."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> dict[int, list[tuple[str, int]]]:
    """The addresses and ports on which each of these processes accepts connections."""
    return {pid: [_table(pid)[inode] for inode in sorted(_inodes(pid) & set(_table(pid)))] for pid in pids}


def _inodes(pid: int) -> set[int]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(each))
        except OSError:  # it has just been closed
            continue
        found |= {int(match[1])} if match else set()
    return found


def _table(pid: int) -> dict[int, tuple[str, int]]:
    """Sockets that listen in the network of a process, by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN:
                digits, _, port = local.partition(":")
                found[int(inode)] = _address(digits), int(port, 16)
    return found


def _address(digits: str) -> str:
    """The kernel prints words of four bytes in the machine's own order.

    >>> _address("0100007F")
    '127.0.0.1'
    """
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def is_store(address: str, port: int, seconds: float = 2) -> bool:
    """Whether a store of torch answers there; torch's own client waits for ever where somebody else listens."""
    import torch.distributed as dist

    answers: list[bool] = []

    def knock() -> None:
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
            store.set("knock", "knock")
            answers.append(bool(store.check(["knock"])))
        except RuntimeError:
            answers.append(False)

    caller = threading.Thread(target=knock, daemon=True)
    caller.start()
    caller.join(seconds)
    return answers == [True]
