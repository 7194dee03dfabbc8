"""The processes that run a program together, as TTNN asks for them: rank, size, barrier, bytes from one to another.

They are those of `meshloom run` or torchrun. A program that was started alone is rank 0 of 1; what it sends to itself
it can receive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist

from meshloom.comms import WORLD
from meshloom.errors import ArgumentError, OperandError
from meshloom.processes import join
from meshloom.processes.bindings import process
from meshloom.ttnn.choices import Number

__all__ = (
    "Rank Size SubcontextId distributed_context_allgather_int distributed_context_barrier distributed_context_get_rank "
    "distributed_context_get_size distributed_context_is_initialized distributed_context_local_to_world_rank "
    "distributed_context_recv_bytes distributed_context_send_bytes distributed_context_subcontext_count "
    "distributed_context_subcontext_id distributed_context_subcontext_size distributed_context_subcontext_sizes "
    "distributed_context_world_rank distributed_context_world_size init_distributed_context using_distributed_env"
).split()

_started = False
_own: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)  # what this process sent to itself, by tag


class Rank(Number):
    """The number of a process.

    >>> Rank(1) < Rank(2), str(Rank(1)), Rank(1)
    (True, '1', Rank(1))
    """


class Size(Number):
    """A number of processes."""


class SubcontextId(Number):
    """The number of a group of processes: there is one group, of all."""


def using_distributed_env() -> bool:
    """Whether several processes run this program together."""
    return process().count > 1


def init_distributed_context() -> None:
    """Meet the other processes; alone, nothing happens."""
    global _started
    join()
    _started = True


def distributed_context_is_initialized() -> bool:
    return _started or WORLD.is_joined


def distributed_context_get_rank() -> Rank:
    _check_started()
    return Rank(process().rank)


def distributed_context_get_size() -> Size:
    _check_started()
    return Size(process().count)


def _check_started() -> None:
    if not distributed_context_is_initialized():
        raise OperandError("Distributed context not initialized", fix="ttnn.init_distributed_context() first")


distributed_context_world_rank = distributed_context_get_rank
distributed_context_world_size = distributed_context_get_size


def distributed_context_barrier() -> None:
    """Return when all processes are here."""
    _check_started()
    if WORLD.control is not None:
        dist.barrier(group=WORLD.control.handle)


def distributed_context_allgather_int(value: int) -> list[int]:
    """The number of every process, in order of ranks."""
    _check_started()
    mine = torch.tensor([value], dtype=torch.int64)
    if WORLD.control is None:
        return [int(mine)]
    found = [torch.empty_like(mine) for _ in range(WORLD.control.size)]
    dist.all_gather(found, mine, group=WORLD.control.handle)
    return [int(each) for each in found]


def send(data: torch.Tensor, dest: int, tag: int = 0) -> None:
    """Hand an array to a process; to this one, a copy that waits to be received."""
    _check_peer(dest)
    if dest == process().rank:
        _own[tag].append(data.clone())
    else:
        dist.send(_as_bytes(data.contiguous()), dest, group=_group(), tag=tag)


def receive(into: torch.Tensor, source: int, tag: int = 0) -> None:
    """Fill an array with what a process sent."""
    _check_peer(source)
    if source != process().rank:
        room = torch.empty(into.shape, dtype=into.dtype)
        dist.recv(_as_bytes(room), source, group=_group(), tag=tag)
        into.copy_(room)
        return
    if not _own[tag]:
        raise OperandError(
            "this process waits for what it has not sent itself, and would wait for ever", fix="send first"
        )
    into.copy_(_own[tag].popleft().reshape(into.shape))


def _as_bytes(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1).view(torch.uint8)


def _group() -> Any:
    assert WORLD.control is not None
    return WORLD.control.handle


def _check_peer(rank: int) -> None:
    _check_started()
    if not 0 <= rank < process().count:
        raise ArgumentError(f"there is no rank {rank}", fix=f"ranks go from 0 to {process().count - 1}")


def distributed_context_send_bytes(data: bytes, dest: int, tag: int = 0) -> None:
    send(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), dest, tag)


def distributed_context_recv_bytes(size: int, source: int, tag: int = 0) -> bytes:
    """So many bytes that a process sent.

    >>> init_distributed_context()
    >>> distributed_context_send_bytes(b"loom", 0); distributed_context_recv_bytes(4, 0)
    b'loom'
    """
    room = torch.empty(size, dtype=torch.uint8)
    receive(room, source, tag)
    return bytes(room.tolist())


def distributed_context_subcontext_count() -> int:
    """How many groups there are: one, of all processes."""
    return 1


def distributed_context_subcontext_id() -> int | None:
    """The group of this process."""
    return 0 if distributed_context_is_initialized() else None


def distributed_context_subcontext_size(subcontext_id: int) -> Size:
    """How many processes a group has."""
    _check_subcontext(subcontext_id)
    return distributed_context_get_size()


def distributed_context_subcontext_sizes() -> list[int]:
    """How many processes each group has."""
    return [int(distributed_context_get_size())]


def distributed_context_local_to_world_rank(subcontext_id: int, local_rank: int) -> Rank:
    """The rank, among all, of a process of a group."""
    _check_subcontext(subcontext_id)
    _check_peer(local_rank)
    return Rank(local_rank)


def _check_subcontext(number: int) -> None:
    if number != 0:
        raise ArgumentError(f"there is no group {number} of processes", fix="0: one group of all")
