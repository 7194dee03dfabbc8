"""A copy between two meshes: every process that holds some of the target receives what it lacks, once.

Within one process it is an array operation. Between processes each pair has messages of its own (`wire.begin_message`):
what a process gives another travels in one of them, and sending does not wait. A process that holds nothing of the
target has an array without data there, of the shape that all others have; so has one that holds nothing of the source.
The gradient is copied back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.comms import wire
from meshloom.comms.group import WORLD
from meshloom.context import state
from meshloom.engines import layout
from meshloom.engines.node import Node
from meshloom.errors import DivergenceError, UnsupportedError
from meshloom.mesh import HERE
from meshloom.placement import Topology, Transfer, transfers

_HEAD = 16  # bytes in front of a message, which say what it is

Finish = Callable[[], torch.Tensor]


def copy(data: torch.Tensor, source: Topology, target: Topology) -> torch.Tensor:
    """The stored array of a tensor on another mesh; neither topology is partial."""
    if not crosses(source, target) or state.shadows is not None:
        return _copy_here(data, source, target)
    return Copy.apply(data, source, target)


def crosses(source: Topology, target: Topology) -> bool:
    """Whether a copy is between processes: they hold different parts of the meshes."""
    return any(each.is_split or each.ranks for each in (source.mesh, target.mesh))


def _copy_here(data: torch.Tensor, source: Topology, target: Topology) -> torch.Tensor:
    """Through the dense tensor, which is what a replicated one stores on any mesh."""
    if data.is_meta:
        return _Along.apply(data, target.stored_shape)
    for step in (layout.mover(source, source.replicated), layout.mover(target.replicated, target)):
        data = data if step is None else step(data)
    return data


class _Along(Node):
    """An array without data in place of another, with a gradient of the other's shape."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.shape = data.shape
        return data.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_empty(ctx.shape), None


class Copy(Node):
    """A copy between processes; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, source: Topology, target: Topology) -> torch.Tensor:
        ctx.way, ctx.call = (target, source), WORLD.watch.call
        return begin_copy(data.detach(), source, target)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        WORLD.watch.call = ctx.call if ctx.call.endswith(" backward") else f"{ctx.call} backward"
        return Copy.apply(gradient, *ctx.way), None, None


def begin_copy(data: torch.Tensor, source: Topology, target: Topology, channel: str = "") -> Finish:
    """Send what others need of this process, and begin to receive; call what comes back for the array, once.

    What is sent is on its way by itself: `wire.settle_messages` waits for it. Messages of one channel are in order.
    """
    if not crosses(source, target) or state.shadows is not None:
        return lambda: _copy_here(data, source, target)
    if not source.mesh.is_elsewhere and data.is_meta:
        raise UnsupportedError(
            "a tensor without data cannot be copied to other processes, which wait for it",
            tensor=source,
            target=target,
            fix="run dry runs and meta tensors in one process; loom.explain works in many",
        )
    found = [each for each in transfers(source, target) if HERE.rank in (each.source, each.target)]
    connect(source, target, channel)
    rooms = [(each, _begin_to_receive(each, source, target, channel)) for each in found if each.source != HERE.rank]
    own = [(each, data) for each in found if each.source == HERE.rank == each.target]
    for each in found:
        if each.source == HERE.rank != each.target:
            _send(each, data, source, target, channel)
    return lambda: _join(target, own, rooms)


def connect(source: Topology, target: Topology, channel: str = "") -> None:
    """Make the groups that a copy and its gradient need, if there are none: in an order that all processes share."""
    pairs = {(min(each.source, each.target), max(each.source, each.target)) for each in transfers(source, target)}
    for pair in sorted(pairs):
        if HERE.rank in pair and pair[0] != pair[1]:
            wire.connect_pair(*pair, channel)
            if _is_announced(channel):
                wire.connect_pair(*pair, f"{channel} heads")


def _is_announced(channel: str) -> bool:
    """Whether a message says what it is before it comes: one of another size than awaited would end the process.

    On channels of their own, messages are known beforehand, and are compared when they have come.
    """
    return WORLD.check == "always" or (not channel and WORLD.check != "off")


def _send(transfer: Transfer, data: torch.Tensor, source: Topology, target: Topology, channel: str) -> None:
    """The boxes of a transfer one after the other, with what it is in front."""
    room = torch.empty(_HEAD + transfer.count * data.element_size(), dtype=torch.uint8, device=data.device)
    room[:_HEAD] = _head(source, target).to(room.device)
    flat = room[_HEAD:].view(data.dtype)
    for box, part in zip(transfer.boxes, _cut(flat, transfer), strict=True):
        part.copy_(data[box.taken])
    if _is_announced(channel):
        wire.begin_message(room[:_HEAD].clone(), transfer.source, transfer.target, f"{channel} heads")
    wire.begin_message(room, transfer.source, transfer.target, channel)


def _begin_to_receive(transfer: Transfer, source: Topology, target: Topology, channel: str) -> Finish:
    dtype = layout.torch_dtype(target.dtype)
    is_announced = _is_announced(channel)
    size = _HEAD if is_announced else _HEAD + transfer.count * dtype.itemsize
    room = torch.empty(size, dtype=torch.uint8, device=WORLD.device)
    first = f"{channel} heads" if is_announced else channel
    under_way = wire.begin_message(room, transfer.source, transfer.target, first)

    def finish() -> torch.Tensor:
        under_way.wait()
        _check(room, transfer, source, target)
        if not is_announced:
            return room[_HEAD:].view(dtype)
        rest = torch.empty(_HEAD + transfer.count * dtype.itemsize, dtype=torch.uint8, device=WORLD.device)
        wire.begin_message(rest, transfer.source, transfer.target, channel).wait()
        return rest[_HEAD:].view(dtype)

    return finish


def _cut(flat: torch.Tensor, transfer: Transfer) -> Sequence[torch.Tensor]:
    """The boxes in the order in which a message has them."""
    sizes = [torch.Size(each.shape).numel() for each in transfer.boxes]
    return [part.view(each.shape) for part, each in zip(flat.split(sizes), transfer.boxes, strict=True)]


def _head(source: Topology, target: Topology) -> torch.Tensor:
    text = f"{source} -> {target}".encode()
    told = zlib.crc32(text).to_bytes(8, "little") + len(text).to_bytes(8, "little")
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)


def _check(room: torch.Tensor, transfer: Transfer, source: Topology, target: Topology) -> None:
    if not torch.equal(room[:_HEAD].cpu(), _head(source, target)):
        error: DivergenceError = WORLD.watch.diverged(
            f"rank {transfer.source} copies another tensor to rank {transfer.target} than that awaits",
            awaited=f"{source} -> {target}",
            fix="every rank runs the same calls in the same order; branch on values that all of them share",
        )
        raise error


def _join(
    target: Topology,
    own: Sequence[tuple[Transfer, torch.Tensor]],
    rooms: Sequence[tuple[Transfer, Finish]],
) -> torch.Tensor:
    """The array of the target from what this process has and what has arrived."""
    stored = layout.empty_stored(target)
    if stored.is_meta:
        return stored
    stored = stored.to(WORLD.device) if HERE.count > 1 else stored
    for transfer, data in own:
        for box in transfer.boxes:
            stored[box.put] = data[box.taken]
    for transfer, finish in rooms:
        for box, part in zip(transfer.boxes, _cut(finish(), transfer), strict=True):
            stored[box.put] = part
    return stored
