"""Collectives between processes: one round of `torch.distributed` each, straight to its groups.

Arrays without data (`meta`) only change their shape here: what is explained never reaches another process. Every call
goes through `begin`, which numbers it and compares it with what the other processes do; `perform` waits for it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshloom.comms.group import WORLD, Group
from meshloom.context import state
from meshloom.engines.reductions import REDUCTIONS, add_parts
from meshloom.mesh import HERE

# what Gloo cannot carry as it is, and what carries it instead
_CARRIERS = {torch.bool: torch.uint8, torch.int16: torch.int32}


class UnderWay(Protocol):
    """A collective that has begun."""

    def wait(self) -> None:
        """Return at its end."""


def begin(
    kind: str, group: Group, sent: torch.Tensor, start: Callable[[], object], combine: Callable[[torch.Tensor], None]
) -> UnderWay:
    """Begin one collective, as the processes have agreed to when they met (`processes.divergence`).

    `start` begins it in torch; `combine` makes the result of what every process sent, where that came with a check.
    """
    group.connect()
    for log in state.logs:
        log.note_sent(kind, group.processes, sent.nbytes)
    found: UnderWay = WORLD.begin(kind, group, sent, start, combine)
    STARTER.tell()
    return found


def perform(
    kind: str, group: Group, sent: torch.Tensor, start: Callable[[], object], combine: Callable[[torch.Tensor], None]
) -> None:
    """Run one collective to its end."""
    begin(kind, group, sent, start, combine).wait()


class _Starter(threading.local):
    """In a thread that carries out a collective for another: how it says that the collective has begun."""

    def __init__(self) -> None:
        self._tell: Callable[[], None] | None = None

    def tell(self) -> None:
        if self._tell is not None:
            self._tell()

    def wait_for(self, tell: Callable[[], None]) -> None:
        """Call this when the next collective of this thread has begun."""
        self._tell = tell


STARTER = _Starter()


def _options(op: str) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = REDUCTIONS[op].between
    return options


_OPTIONS = {op: _options(op) for op in REDUCTIONS}


def _encode(data: torch.Tensor) -> torch.Tensor:
    """The array as the wire takes it: contiguous, in a dtype that it knows."""
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    carrier = _CARRIERS.get(data.dtype)
    return data.contiguous() if carrier is None else data.to(carrier).contiguous()


def _decode(carried: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(carried)
    return carried if carried.dtype == dtype else carried.to(dtype)


def _keys(data: torch.Tensor, op: str) -> torch.Tensor:
    """Floats as integers of the same order, nan beyond all others: Gloo's own comparison loses nan."""
    wide = data.float() if data.element_size() < 4 else data
    whole = torch.int64 if wide.element_size() == 8 else torch.int32
    limit = torch.iinfo(whole)
    return _flip(wide.contiguous().view(whole)).masked_fill_(wide.isnan(), limit.max if op == "max" else limit.min)


def _values(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _flip(keys).view(torch.float64 if keys.element_size() == 8 else torch.float32).to(dtype)


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """The bits of a float as an integer of the same order, and back: those of a negative number count downwards."""
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & torch.iinfo(bits.dtype).max)


def all_reduce(data: torch.Tensor, group: Group, op: str = "sum", *, own: bool = False) -> torch.Tensor:
    """The reduction of every process's array; into the same memory where it is `own`."""
    if data.is_meta or data.numel() == 0:
        return data
    if data.is_complex() and op not in ("sum", "mean"):
        return _reduce(all_gather(data, group), op)
    if data.is_floating_point() and op in ("max", "min"):
        return _values(all_reduce(_keys(data, op), group, op, own=True), data.dtype)
    sent = _encode(data)
    if not own and sent.data_ptr() == data.data_ptr():
        sent = sent.clone()
    found = _decode(_begin_all_reduce(sent, group, op)(), data.dtype)
    return found / group.processes if op == "mean" else found


def _begin_all_reduce(sent: torch.Tensor, group: Group, op: str) -> Callable[[], torch.Tensor]:
    """Begin the reduction of what every process sends, into the same memory; call what comes back for it."""

    def combine(parts: torch.Tensor) -> None:
        sent.copy_(_reduce(parts, op))

    if sent.device.type == "cpu" and sent.nbytes * group.processes <= SMALL:
        return _begin_by_gathering(sent, group, combine)
    under_way = begin("all_reduce", group, sent, lambda: group.handle.allreduce([sent], _OPTIONS[op]), combine)

    def finish() -> torch.Tensor:
        under_way.wait()
        return sent

    return finish


SMALL = 1 << 20  # bytes that may arrive at a process


class _Together:
    """Several works of torch's as one, which ends when all have ended or one has failed."""

    def __init__(self, works: list[Any]) -> None:
        self._works, self._has_failed = works, False

    def is_completed(self) -> bool:
        return self._has_failed or all(work.is_completed() for work in self._works)

    def wait(self, *limit: timedelta) -> None:
        while self._works and not self._has_failed:
            is_over = self._works[0].is_completed()
            try:
                self._works[0].wait(*limit)
            except RuntimeError:
                self._has_failed = is_over
                raise
            self._works.pop(0)


def gather_into(room: torch.Tensor, sent: torch.Tensor, handle: Any, index: int) -> Any:
    """Begin to gather what every process sends into `room`, (processes, ...); `index` is this one's place.

    On the CPU little goes to each process directly, in one round, and of more each process sends its part to all, into
    the place where it belongs. Gloo's own passes parts on, in as many rounds as there are processes, and receives them
    in other memory, which the system gives it every time.
    """
    if sent.device.type != "cpu":
        return handle._allgather_base(room.view(-1), sent.view(-1))
    if room.nbytes <= SMALL:
        return handle.alltoall_base(room.view(-1), sent.expand(room.shape).contiguous().view(-1), [], [])
    room[index] = sent
    return _Together([handle.broadcast([part], _from(root)) for root, part in enumerate(room)])


def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _begin_gather(kind: str, sent: torch.Tensor, group: Group) -> tuple[torch.Tensor, UnderWay]:
    """Begin to gather; what every process sends is there, (processes, ...), when it has ended."""
    room = sent.new_empty((group.processes, *sent.shape))

    def start() -> Any:
        return gather_into(room, sent, group.handle, group.index)

    def take(parts: torch.Tensor) -> None:
        room.copy_(parts)

    return room, begin(kind, group, sent, start, take)


def _begin_by_gathering(
    sent: torch.Tensor, group: Group, combine: Callable[[torch.Tensor], None]
) -> Callable[[], torch.Tensor]:
    """An all-reduce of little: every process gets all parts in one round, and reduces them in the same order.

    Gloo's own takes several rounds, and with few bytes the rounds are what costs.
    """
    room, under_way = _begin_gather("all_reduce", sent, group)

    def finish() -> torch.Tensor:
        under_way.wait()
        combine(room)
        return sent

    return finish


def begin_sum(data: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin the sum of every process's array, in its own memory; call what comes back for the result."""
    if data.is_meta or data.numel() == 0:
        return lambda: data
    finish = _begin_all_reduce(_encode(data), group, "sum")
    return lambda: _decode(finish(), data.dtype)


class _Outbox(threading.local):
    """Messages of this process that are on their way."""

    def __init__(self) -> None:
        self.messages: list[Any] = []


_OUTBOX = _Outbox()


def begin_message(data: torch.Tensor, source: int, target: int, channel: str = "") -> UnderWay:
    """Send an array to another process, or begin to receive one; those of a channel arrive in the order of sending.

    A message is a broadcast in a group of two, one for each direction: unlike torch's own `send` and `recv` it can be
    waited for by slices, and goes on by itself.
    """
    handle = connect_pair(source, target, channel)
    for log in state.logs:
        log.note_sent("copy", 2, data.nbytes)
    _OUTBOX.messages[:] = [each for each in _OUTBOX.messages if not each.has_ended()]
    under_way: Any = WORLD.message("copy", lambda: handle.broadcast([data], _from(int(source > target))))
    if source == HERE.rank:
        _OUTBOX.messages.append(under_way)
    return under_way  # type: ignore[no-any-return]


def connect_pair(source: int, target: int, channel: str = "") -> Any:
    """The group for messages from one process to another; both make those of both directions together."""
    pair = (min(source, target), max(source, target))
    handles = {way: WORLD.connect(pair, True, f"{way[0]} -> {way[1]} {channel}") for way in (pair, pair[::-1])}
    return handles[source, target]


def settle_messages() -> None:
    """Wait until what this process has sent has arrived."""
    while _OUTBOX.messages:
        _OUTBOX.messages.pop(0).wait()


def barrier(group: Group) -> None:
    """Return when every process of the group is here."""
    if group.mesh.is_elsewhere:
        return
    all_reduce(torch.zeros(1), group, own=True)


# so many parts are added one by one, with the same result: less work than a sum that has to look for -0 afterwards
_FEW = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 2, torch.float16: 2}


def _reduce(parts: torch.Tensor, op: str) -> torch.Tensor:
    """What processes sent, reduced as torch.distributed does: a mean is divided afterwards."""
    if op in ("sum", "mean") and 1 < len(parts) <= _FEW.get(parts.dtype, 0):
        return add_parts(parts)
    return REDUCTIONS["sum" if op == "mean" else op].along(parts, 0)


def all_gather(data: torch.Tensor, group: Group) -> torch.Tensor:
    """Every process's array, stacked in the order of the group."""
    return begin_all_gather(data, group)()


def begin_all_gather(data: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin to gather every process's array; call what comes back for the result, once."""
    if data.is_meta or data.numel() == 0:
        return lambda: data.new_empty((group.processes, *data.shape))
    sent = _encode(data)
    room, under_way = _begin_gather("all_gather", sent, group)

    def finish() -> torch.Tensor:
        under_way.wait()
        return _decode(room, data.dtype)

    return finish


def reduce_scatter(pieces: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Piece i of every process, reduced, at process i."""
    return begin_reduce_scatter(pieces, group, op)()


def begin_reduce_scatter(pieces: torch.Tensor, group: Group, op: str = "sum") -> Callable[[], torch.Tensor]:
    """Begin to reduce and scatter; call what comes back for the result, once.

    On the CPU every process sends each other one its piece and reduces what arrives, so that each byte crosses once.
    Gloo's own is an all-reduce of which all but one piece is thrown away.
    """
    if pieces.is_meta or pieces.numel() == 0:
        return lambda: pieces.new_empty(pieces.shape[1:])
    sent = _encode(pieces)
    is_whole = sent.device.type != "cpu" and op in ("sum", "mean")  # NCCL has one that is as good
    room = sent.new_empty((1, *sent.shape[1:])) if is_whole else torch.empty_like(sent)
    options: Any = dist.ReduceScatterOptions()

    def start() -> Any:
        if is_whole:
            return group.handle._reduce_scatter_base(room.view(-1), sent.view(-1), options)
        return group.handle.alltoall_base(room.view(-1), sent.view(-1), [], [])

    def combine(parts: torch.Tensor) -> None:
        room.copy_(parts[:, group.index])

    under_way, is_complex = begin("reduce_scatter", group, sent, start, combine), pieces.is_complex()

    def finish() -> torch.Tensor:
        under_way.wait()
        found = _reduce(_decode(room, pieces.dtype) if is_complex else room, op)
        found = found if is_complex else _decode(found, pieces.dtype)
        return found / group.processes if op == "mean" else found

    return finish


def all_to_all(pieces: torch.Tensor, group: Group) -> torch.Tensor:
    """Piece i goes to process i: what comes back is a piece from each."""
    if pieces.is_meta or pieces.numel() == 0:
        return torch.empty_like(pieces)
    sent = _encode(pieces)
    room = torch.empty_like(sent)

    def start() -> Any:
        return group.handle.alltoall_base(room.view(-1), sent.view(-1), [], [])

    def combine(parts: torch.Tensor) -> None:
        room.copy_(parts[:, group.index])

    perform("all_to_all", group, sent, start, combine)
    return _decode(room, pieces.dtype)


def broadcast(data: torch.Tensor, group: Group, root: int) -> torch.Tensor:
    """The array of process `root` of the group."""
    if data.is_meta or data.numel() == 0:
        return data
    carried = _encode(data)
    sent = carried.clone() if group.index == root else torch.empty_like(carried)

    def combine(parts: torch.Tensor) -> None:
        sent.copy_(parts[root])

    perform("broadcast", group, sent, lambda: group.handle.broadcast([sent], _from(root)), combine)
    return _decode(sent, data.dtype)


def exchange_rows(
    rows: torch.Tensor, leaving: Sequence[Sequence[int]], asked: Sequence[tuple[int, int]], group: Group
) -> torch.Tensor:
    """Some rows for each process: those that this one asked of others (process, row), in the order of the processes."""
    sent = _encode(rows)
    room = sent.new_empty((len(asked), *sent.shape[1:]))
    if rows.is_meta or rows.numel() == 0:
        return _decode(room, rows.dtype)
    width = sent[0].numel()
    order = [row for each in leaving for row in each]
    packed = (sent if order == list(range(len(sent))) else sent[order]).view(-1, width)
    incoming = [sum(1 for source, _ in asked if source == process) for process in range(group.processes)]

    def start() -> Any:
        return group.handle.alltoall_base(room.view(-1, width), packed, incoming, [len(each) for each in leaving])

    def combine(parts: torch.Tensor) -> None:
        for place, (source, row) in enumerate(asked):
            room[place] = parts[source, row]

    perform("exchange", group, sent, start, combine)
    return _decode(room, rows.dtype)
