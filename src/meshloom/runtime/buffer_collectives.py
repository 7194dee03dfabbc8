"""Collectives on what cards hold: through the host, or over the links between them. Same call, another `mode`.

`mode="host"` reads every card, reduces or joins on the host (low precision in float32, in the order of the members,
rounded once) and writes every card. `mode="fabric"` runs a schedule of sends between neighbours: no byte comes near the
host. They are literal: they act on what each device holds. A group is the devices along some mesh axes, all of them by
default; its members are in row-major order. Tensors go to the collectives on tensors, which mean the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from meshloom import collectives
from meshloom.collectives.algorithms import algorithm as find_algorithm, candidates, choose
from meshloom.collectives.schedule import Schedule, chunk_sizes
from meshloom.comms.schedules import chunks_by_owner
from meshloom.engines.layout import torch_dtype
from meshloom.engines.reductions import REDUCTIONS
from meshloom.errors import ArgumentError, DeviceTimeoutError, ModeError, ShapeError, UnsupportedError, closest
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate, Mesh
from meshloom.runtime import transfers
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.card import Card
from meshloom.runtime.card_schedules import Piece, at_card, run_schedule
from meshloom.runtime.commands import Transfer
from meshloom.runtime.layouts import Config, ReplicatedBufferConfig, ShardedBufferConfig
from meshloom.runtime.races import Access
from meshloom.runtime.storage import Block

MODES = ("host", "fabric")
LOW = (torch.bfloat16, torch.float16)
ON_CARDS = ("sum", "max", "min", "prod")
Axis = str | int | Sequence[str | int] | None
Parts = dict[Coordinate, torch.Tensor]
Group = tuple[Coordinate, ...]


def all_reduce(
    x: Any,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "host",
    *,
    cq_id: int = 0,
    blocking: bool = True,
    algorithm: str | None = None,
) -> Any:
    """Every device of a group holds the reduction of what its members hold: another buffer, or a tensor of a tensor.

    >>> from meshloom.runtime import create_mesh_buffer, open_mesh_device
    >>> with open_mesh_device((2,)) as mesh:
    ...     x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,))
    ...     mesh.queue().enqueue_write(x, [1, 2, 3, 4])
    ...     mesh.queue().enqueue_read(all_reduce(x, mode="fabric"))
    tensor([4., 6.])
    """
    if not isinstance(x, MeshBuffer):
        return _on_tensor("all_reduce", x, mode=mode, axis=axis, op=op, algorithm=algorithm)
    _check(x, mode, op)
    return _Exchange("all_reduce", x, axis, op, mode, algorithm, 0).submit(None, cq_id, blocking)


def all_gather(
    x: Any,
    dim: int = 0,
    axis: Axis = None,
    mode: str = "host",
    *,
    shard_shape: Sequence[int] | None = None,
    cq_id: int = 0,
    blocking: bool = True,
    algorithm: str | None = None,
) -> Any:
    """Every device of a group holds what all its members hold, one after the other along `dim`.

    With a `shard_shape`, what was joined is cut again: each device holds another shard of it (through the host only).
    """
    if not isinstance(x, MeshBuffer):
        return _on_tensor("all_gather", x, dim, mode=mode, axis=axis, algorithm=algorithm)
    _check(x, mode)
    made = _Exchange("all_gather", x, axis, "sum", mode, algorithm, _dim(x, dim))
    return made.submit(shard_shape, cq_id, blocking)


def reduce_scatter(
    x: Any,
    dim: int = 0,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "host",
    *,
    cq_id: int = 0,
    blocking: bool = True,
    algorithm: str | None = None,
) -> Any:
    """Each device of a group holds its chunk, along `dim`, of the reduction of what the members hold."""
    if not isinstance(x, MeshBuffer):
        return _on_tensor("reduce_scatter", x, dim, mode=mode, axis=axis, op=op, algorithm=algorithm)
    _check(x, mode, op)
    made = _Exchange("reduce_scatter", x, axis, op, mode, algorithm, _dim(x, dim))
    return made.submit(None, cq_id, blocking)


def all_reduce_host(x: Any, axis: Axis = None, op: str = "sum", **options: Any) -> Any:
    """`all_reduce` through the host: read every card, reduce, write every card."""
    return all_reduce(x, axis, op, "host", **options)


def all_gather_host(x: Any, dim: int = 0, axis: Axis = None, **options: Any) -> Any:
    """`all_gather` through the host: read every card, join, write all of it, or with a `shard_shape` shards of it."""
    return all_gather(x, dim, axis, "host", **options)


def reduce_scatter_host(x: Any, dim: int = 0, axis: Axis = None, op: str = "sum", **options: Any) -> Any:
    """`reduce_scatter` through the host: read every card, reduce, write each its chunk."""
    return reduce_scatter(x, dim, axis, op, "host", **options)


def _on_tensor(kind: str, x: Any, *place: int, **options: Any) -> Any:
    if not hasattr(x, "topology"):
        raise ArgumentError(
            f"{kind} takes a MeshBuffer or a tensor, not {type(x).__name__}", fix="create_mesh_buffer(mesh, ...)"
        )
    return getattr(collectives, kind)(x, *place, **{k: v for k, v in options.items() if v is not None})


def _check(x: MeshBuffer, mode: str, op: str = "sum") -> None:
    if mode not in MODES:
        raise ModeError(f"there is no mode {mode!r}", fix=closest(mode, MODES))
    if op not in REDUCTIONS:
        raise ArgumentError(f"there is no reduction {op!r}", fix=closest(op, REDUCTIONS))
    if mode == "fabric" and op not in ON_CARDS:
        raise ArgumentError(f"cards do not compute a {op} of what arrives", fix='op="sum", and divide it in a kernel')
    if op == "mean" and not torch_dtype(x.dtype).is_floating_point:
        raise ArgumentError(f"{x.dtype} has no mean", fix='op="sum", or a buffer of f32')
    if x.device.mesh.is_split:
        raise UnsupportedError(
            f"{x.device} is split over processes: a collective on its buffers would need all of them",
            fix="use tensors: loom.collectives",
        )
    missing = next((place for place in x.device.coordinates() if x.layout.part(place) is None), None)
    if missing is not None:
        raise ShapeError(f"{x.name} has no shard at {missing}", buffer=x, fix="use as many shards as devices")


def _dim(x: MeshBuffer, dim: int) -> int:
    rank = len(x.local_shape)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise ShapeError(f"{x.name} has no dim {dim!r}", buffer=x, fix=f"dims are -{rank} to {rank - 1}")
    return dim % rank


def groups_of(mesh: Mesh, axis: Axis) -> list[Group]:
    """The groups along some axes, each with its members in row-major order.

    >>> groups_of(Mesh(r=2, c=2), "c")
    [((0, 0), (0, 1)), ((1, 0), (1, 1))]
    """
    listed = range(mesh.ndim) if axis is None else [axis] if isinstance(axis, (str, int)) else axis
    along = {mesh.axis(each) for each in listed}
    found: dict[Coordinate, list[Coordinate]] = {}
    for place in mesh.coordinates():
        found.setdefault(tuple(c for a, c in enumerate(place) if a not in along), []).append(place)
    return [tuple(members) for members in found.values()]


@lru_cache(maxsize=256)
def _fastest(kind: str, group: Group, fabric: Fabric, size: int) -> Schedule:
    """The fastest schedule after which all members of an all-reduce hold the same bits."""
    schedule = choose(kind, group, fabric, size)(group, fabric)
    if kind != "all_reduce" or sums_once(schedule):
        return schedule
    every = (each.schedule for each in candidates(kind, group, fabric, size))
    return next(each for each in every if each is not None and sums_once(each))


def sums_once(schedule: Schedule) -> bool:
    """Whether one member ends the sum of each chunk and the others get a copy of it. Where each member adds up by
    itself, it does so in an order of its own, and floats differ in the last bits."""
    last = {(send.destination, chunk): send.reduce for step in schedule.steps for send in step for chunk in send.chunks}
    ended = Counter(chunk for (_, chunk), reduce in last.items() if reduce)
    return all(count == 1 for count in ended.values())


class _Exchange(Transfer):
    """A collective on a buffer, as a command of a queue: it reads one buffer and writes another."""

    captured = "collectives on buffers are not captured"

    def __init__(
        self, kind: str, x: MeshBuffer, axis: Axis, op: str, mode: str, algorithm: str | None, dim: int
    ) -> None:
        super().__init__(f"{kind} of {x.name} by {mode}")
        x.device.check_buffer(x)
        self._kind, self._x, self._op, self._mode, self._dim = kind, x, op, mode, dim
        self._groups = groups_of(x.device.mesh, axis)
        self._whole = len(self._groups) == 1
        self._schedules = self._plan(algorithm) if mode == "fabric" else []

    @property
    def _members(self) -> int:
        return len(self._groups[0])

    def submit(self, shard_shape: Sequence[int] | None, cq_id: int, blocking: bool) -> MeshBuffer:
        """Allocate the result, and enqueue."""
        device = self._x.device
        self._out = MeshBuffer(device, self._config(shard_shape), name=f"{self._kind}({self._x.name})")
        self._work = MeshBuffer(device, self._copy_config()) if self._needs_work else None
        self.buffers = tuple(each for each in (self._x, self._out, self._work) if each is not None)
        try:
            device.queue(cq_id).submit(self, blocking)
        except BaseException:
            for made in self.buffers[1:]:
                made.free()
            raise
        return self._out

    def accesses(self) -> Iterable[Access]:
        for buffer in self.buffers:
            cards = buffer.cards(buffer.device.coordinates())
            yield Access(buffer.region, buffer.name, cards, buffer is not self._x)

    # what comes out

    def _config(self, shard_shape: Sequence[int] | None) -> Config:
        x, shape = self._x, list(self._x.local_shape)
        if self._kind == "all_gather":
            shape[self._dim] *= self._members
        if shard_shape is not None:
            if not self._whole or self._mode != "host":
                raise ArgumentError(
                    "what is cut again is joined over the whole mesh by the host", fix="leave axis= out"
                )
            return ShardedBufferConfig(None, tuple(shape), tuple(shard_shape), dtype=x.dtype)
        if self._kind != "reduce_scatter":
            return ReplicatedBufferConfig(None, tuple(shape), x.dtype)
        size = shape[self._dim]
        if size % self._members:
            raise ShapeError(
                f"dim {self._dim} of size {size} cannot be scattered over {self._members} devices"
                f" ({size} % {self._members} = {size % self._members})",
                buffer=x,
                fix=f"pad it to {-(-size // self._members) * self._members}, or scatter another dim",
            )
        part = tuple(n // self._members if d == self._dim else n for d, n in enumerate(shape))
        if self._whole:
            return ShardedBufferConfig(None, tuple(shape), part, dtype=x.dtype)
        return ReplicatedBufferConfig(None, part, x.dtype)

    @property
    def _needs_work(self) -> bool:
        """Whether sums are made in memory that is neither the operand nor the result."""
        return self._mode == "fabric" and self._kind == "reduce_scatter"

    def _copy_config(self) -> Config:
        return ReplicatedBufferConfig(None, self._x.local_shape, self._x.dtype)

    def move(self, queue: int) -> None:
        if self._mode == "host":
            self._write(self._combine(self._read(queue)), queue)
        else:
            self._send(queue)

    # through the host

    def _read(self, queue: int) -> Parts:
        x, found = self._x, Parts()

        def read(place: Coordinate, card: Card) -> None:
            found[place] = card.read(x.storage.at(place))
            x.device.system.tell("read", [place], x.size, queue, 1)

        x.device.system.each(x.device.members(), read)
        return found

    def _combine(self, parts: Parts) -> Parts:
        found = Parts()
        for group in self._groups:
            held = [parts[place] for place in group]
            made = torch.cat(held, self._dim) if self._kind == "all_gather" else reduce_parts(held, self._op)
            if self._kind == "reduce_scatter":
                found |= dict(zip(group, made.chunk(self._members, self._dim), strict=True))
            else:
                found |= dict.fromkeys(group, made)
        return found

    def _write(self, parts: Parts, queue: int) -> None:
        out = self._out
        if self._whole and self._kind != "reduce_scatter":
            transfers.write_all(out, next(iter(parts.values())), queue)
            return

        def write(place: Coordinate, card: Card) -> None:
            card.write(out.storage.at(place), parts[place])
            out.device.system.tell("write", [place], out.size, queue, 1)

        _unshare(out)
        out.device.system.each(out.device.members(), write)

    # over links

    def _plan(self, name: str | None) -> list[Schedule]:
        """A schedule for every group, or an error where links do not lead from member to member."""
        fabric, size = self._x.device.fabric, self._x.size
        found = []
        for group in self._groups:
            found.append(
                find_algorithm(self._kind, name)(group, fabric) if name else _fastest(self._kind, group, fabric, size)
            )
        return found

    def _send(self, queue: int) -> None:
        target = self._work or self._out
        _unshare(target)
        device, system = self._x.device, self._x.device.system
        cards = dict(device.members())
        handles = {place: target.storage.at(place) for place in cards}
        self._copy_all(cards, lambda place: (self._x.storage.at(place), ...), lambda place: self._own(place, handles))
        timeout, itemsize = system.launches.timeout, torch_dtype(self._x.dtype).itemsize
        for schedule in self._schedules:
            before = system.routes.bytes
            pieces = self._pieces(schedule)
            run_schedule(schedule, cards, handles, pieces, itemsize, system.routes, op=self._op, timeout=timeout)
            system.tell("send", schedule.group, system.routes.bytes - before, queue, schedule.sends)
        if self._work is not None:
            _unshare(self._out)
            indices = {
                place: index for group in self._groups for place, index in zip(group, self._slices(), strict=True)
            }
            self._copy_all(
                cards, lambda place: (handles[place], indices[place]), lambda place: (self._out.storage.at(place), ...)
            )

    def _own(self, place: Coordinate, handles: Mapping[Coordinate, Any]) -> tuple[Any, Any]:
        """Where a member's own part goes first."""
        if self._kind != "all_gather":
            return handles[place], ...
        group = next(group for group in self._groups if place in group)
        return handles[place], self._slices()[group.index(place)]

    def _slices(self) -> list[tuple[slice, ...]]:
        """The piece of each member along the dim: of the result of a gather, or of the operand of a scatter."""
        size = self._x.local_shape[self._dim]
        step = size if self._kind == "all_gather" else size // self._members
        before = (slice(None),) * self._dim
        return [(*before, slice(i * step, (i + 1) * step)) for i in range(self._members)]

    def _pieces(self, schedule: Schedule) -> list[Piece]:
        """Where every chunk of a schedule lies."""
        elements = math.prod(self._x.local_shape)
        if self._kind == "all_reduce":
            return cut_pieces(..., chunk_sizes(elements, schedule.chunks))
        found: list[Piece] = [Piece(..., 0, 0)] * schedule.chunks
        each = elements if self._kind == "all_gather" else elements // self._members
        for chunks, index in zip(chunks_by_owner(schedule), self._slices(), strict=True):
            for chunk, piece in zip(chunks, cut_pieces(index, chunk_sizes(each, len(chunks))), strict=True):
                found[chunk] = piece
        return found

    def _copy_all(
        self,
        cards: Mapping[Coordinate, Any],
        source: Callable[[Coordinate], tuple[Any, Any]],
        target: Callable[[Coordinate], tuple[Any, Any]],
    ) -> None:
        """Copy within every card, all of them at once."""
        timeout = self._x.device.system.launches.timeout
        tickets = [(place, card, card.copy(*source(place), *target(place))) for place, card in cards.items()]
        for place, card, ticket in tickets:
            with at_card(place):
                if not card.wait(ticket, timeout):
                    raise DeviceTimeoutError(f"a copy did not end within {timeout} s")


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of arrays in their order, low precision in float32 and rounded once."""
    kind = parts[0].dtype
    wide = torch.float32 if kind in LOW else kind
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = REDUCTIONS[op].combine(total, part.to(wide))
    return (total / len(parts) if op == "mean" else total).to(kind, copy=len(parts) == 1)


def cut_pieces(index: Any, sizes: Sequence[int]) -> list[Piece]:
    """The chunks of what an index names, one after the other."""
    found, start = [], 0
    for size in sizes:
        found.append(Piece(index, start, start + size))
        start += size
    return found


def _unshare(buffer: MeshBuffer) -> None:
    """Devices may differ from now on."""
    if isinstance(buffer.storage, Block):
        buffer.storage.unshare()
