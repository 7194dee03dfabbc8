"""Links between cards, as the driver of meshloom asks for them; the real driver has no such file.

A message is a list of byte runs of a buffer. Nothing here looks whether a slot is free: that is the caller's business.
"""

from __future__ import annotations

import numpy as np

from device_dispatch import to_bytes, to_numbers
from device_runtime import CommonDevice
from dram import DramBuffer
from stand_in import MACHINE, Slot

Runs = np.ndarray  # rows of (offset, length), in bytes
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def peers(device: CommonDevice) -> list[int]:
    """The cards that a link leads to."""
    return sorted(MACHINE.boards[device.device].slots)


def slots(device: CommonDevice, peer: int) -> tuple[int, int]:
    """How many slots there are for messages from a peer, and their size."""
    return len(MACHINE.boards[device.device].slots[peer]), MACHINE.slot_size


def send(device: CommonDevice, buf: DramBuffer, runs: Runs, peer: int, slot: int) -> None:
    """Queue a message to a slot of the peer."""

    def act() -> None:
        _check(device, peer)
        data = device.dram.peek(buf)[_positions(runs)].tobytes()
        assert len(data) <= MACHINE.slot_size, "the message does not fit into a slot"
        there = MACHINE.boards[peer].slots[device.device][slot]
        there.overruns += there.data is not None
        there.data = data

    device._enqueue(act)


def receive(device: CommonDevice, buf: DramBuffer, runs: Runs, peer: int, slot: int, op: str | None, kind: str) -> None:
    """Queue the way from a slot into memory."""

    def act() -> None:
        _check(device, peer)
        there: Slot = MACHINE.boards[device.device].slots[peer][slot]
        if there.data is None:
            raise RuntimeError(f"slot {slot} from card {peer} is empty")
        data, at = np.frombuffer(there.data, np.uint8), _positions(runs)
        there.data = None
        device.dram.poke(buf, data if op is None else _combine(device.dram.peek(buf)[at], data, op, kind), at)

    device._enqueue(act)


def copy(device: CommonDevice, source: DramBuffer, runs: Runs, target: DramBuffer, target_runs: Runs) -> None:
    """Queue a copy within the card."""
    device._enqueue(
        lambda: device.dram.poke(target, device.dram.peek(source)[_positions(runs)], _positions(target_runs))
    )


def clear(device: CommonDevice, buf: DramBuffer) -> None:
    """Queue zeros for all of a buffer."""
    device._enqueue(lambda: device.dram.poke(buf, np.zeros(buf.size, np.uint8)))


def _check(device: CommonDevice, peer: int) -> None:
    if frozenset((device.device, peer)) in MACHINE.cut:
        raise TimeoutError(f"the link from {device.device} to {peer} is down")


def _positions(runs: Runs) -> np.ndarray:
    return np.concatenate([np.arange(start, start + length) for start, length in runs]) if len(runs) else np.arange(0)


def _combine(mine: np.ndarray, theirs: np.ndarray, op: str, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        return to_bytes(COMBINE[op](to_numbers(mine, 2), to_numbers(theirs, 2)), 2)
    return COMBINE[op](mine.view(kind), theirs.view(kind)).view(np.uint8)
