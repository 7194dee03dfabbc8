"""The mesh device: a grid of cards with memory and queues, seen as one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from meshloom.context import state
from meshloom.errors import (
    ArgumentError,
    DeviceTimeoutError,
    MeshError,
    TraceError,
    UnsupportedError,
    closest,
    expect,
)
from meshloom.fabric import VIRTUAL, Fabric
from meshloom.mesh import Coordinate, Mesh
from meshloom.processes.discovery import Scope, check_scope
from meshloom.runtime import accounts
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.card import Card, EndableCard
from meshloom.runtime.card_memory import CardStore
from meshloom.runtime.chips import Grid
from meshloom.runtime.geometry import MeshShape, MeshType
from meshloom.runtime.leases import Lease
from meshloom.runtime.links import discover_links
from meshloom.runtime.memory import Region, Usage
from meshloom.runtime.queue import MeshCommandQueue
from meshloom.runtime.runners import Runner
from meshloom.runtime.system import Entry, System, close_cards
from meshloom.runtime.trace import Capture, Trace
from meshloom.runtime.workload import MeshWorkload

CLOSING_SECONDS = 60.0
_ids = count()


class MeshDevice:
    """A grid of cards. It *has* a mesh (a value), memory and queues, and is closed.

    >>> from meshloom.runtime import open_mesh_device
    >>> with open_mesh_device((2, 4)) as mesh:
    ...     mesh, mesh.get_device_ids(), mesh.mesh
    (MeshDevice(2x4, 8 devices), [0, 1, 2, 3, 4, 5, 6, 7], Mesh(x0=2, x1=4))
    """

    def __init__(
        self,
        mesh: Mesh,
        numbers: Sequence[int],
        system: System,
        queues: int,
        mesh_type: MeshType | None,
        parent: MeshDevice | None = None,
    ) -> None:
        self.id = next(_ids)
        self.system, self.numbers, self.parent = system, tuple(numbers), parent
        self.lease = Lease(_describe_mesh(mesh))
        self.mesh = mesh.with_lease(self.lease)
        if not system.driver.shares_memory:
            self.lease.store = CardStore(system, self.mesh, self.numbers)
        self.mesh_type = mesh_type
        self.mask = sum(1 << number for number in self.numbers)
        self.closed = self.is_closing = False
        self._children: weakref.WeakSet[MeshDevice] = weakref.WeakSet()
        self._buffers: weakref.WeakSet[MeshBuffer] = weakref.WeakSet()
        self._traces: weakref.WeakValueDictionary[int, Trace] = weakref.WeakValueDictionary()
        self._later: list[tuple[MeshBuffer, Region]] = []
        self._hung: set[MeshBuffer] = set()
        self.queues = tuple(MeshCommandQueue(self, cq_id) for cq_id in range(queues))
        runners = [queue.runner for queue in self.queues]
        self._stop = weakref.finalize(self, _stop, runners)

    # the grid

    @property
    def shape(self) -> MeshShape:
        """The shape of the grid."""
        return MeshShape(*self.mesh.shape)

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self.mesh.size

    def get_num_devices(self) -> int:
        """How many devices there are."""
        return self.mesh.size

    def coordinates(self) -> Iterator[Coordinate]:
        """Every coordinate, row-major."""
        return self.mesh.coordinates()

    @property
    def cards(self) -> list[Card]:
        """The cards of this process, row-major."""
        return [card for _, card in self.members()]

    def card(self, place: Coordinate) -> Card:
        """The card at a coordinate of this process."""
        number = self.numbers[self.mesh.index(place)]
        if self.mesh.is_split and not self.mesh.is_here(place):
            raise MeshError(
                f"rank {self.mesh.owner(place)} holds the device at {tuple(place)}",
                mesh=self.mesh,
                fix="name a coordinate of mesh.local_coordinates(); reads of a whole buffer gather from all processes",
            )
        found = self.system.cards[number]
        assert found is not None  # this process holds the coordinate, and opened the card
        return found

    def members(self) -> Iterator[tuple[Coordinate, Card]]:
        """Every coordinate that this process holds, with its card, row-major."""
        return ((place, self.card(place)) for place in self.mesh.local_coordinates())

    def get_device(self, *place: Any) -> Card:
        """The card at a coordinate: `get_device(0, 1)` or `get_device((0, 1))`."""
        listed = place[0] if len(place) == 1 and not isinstance(place[0], int) else place
        return self.card(self.mesh.check(listed))

    def get_device_id(self, place: Sequence[int]) -> int:
        """The id of the device at a coordinate."""
        return self.mesh.device_id(place)

    def get_device_ids(self, scope: Scope = "global") -> list[int]:
        """The ids of the devices, row-major: of all, or with `scope="local"` of those that this process holds."""
        if check_scope(scope) == "global":
            return list(self.mesh.device_ids)
        return [self.mesh.device_id(place) for place in self.mesh.local_coordinates()]

    def virtual_to_physical(self, place: Sequence[int]) -> tuple[Coordinate, int]:
        """Where the device at a coordinate really is; the answer survives a reshape."""
        return self.mesh.virtual_to_physical(place)

    def dram_grid_size(self) -> Grid:
        """The banks of DRAM of one card, as a grid that serves as a core grid."""
        return self.system.chip.dram_grid

    def compute_with_storage_grid_size(self) -> Grid:
        """The cores of one card."""
        return self.system.chip.cores

    @property
    def fabric(self) -> Fabric:
        """The links between the devices: of virtual ones by the mesh's type (lines, unless it was opened as a ring), of
        others as the cards say."""
        if not self.system.driver.shares_memory:
            return discover_links(dict(self.members()), self.mesh.shape)
        kinds = (self.mesh_type or MeshType.Mesh).kinds(self.mesh.shape)
        return Fabric.grid(self.mesh.shape, kinds, VIRTUAL.latency, VIRTUAL.bandwidth, name="virtual")

    def reshape(self, *shape: object, axes: Sequence[str] | None = None, order: Sequence[int] | None = None) -> None:
        """The same devices in another shape or order; each keeps its id and its home. Buffers must be freed before."""
        self.check_open()
        sizes = MeshShape(*shape)
        held = [buffer for buffer in self._buffers if buffer.is_allocated]
        if held:
            listed = ", ".join(sorted(buffer.name for buffer in held))
            raise MeshError(f"{len(held)} buffers lie on the mesh as it is: {listed}", fix="free them first")
        names = tuple(axes) if axes is not None else tuple(f"x{i}" for i in range(len(sizes)))
        places = list(order) if order is not None else list(range(self.mesh.size))
        before, ordered = self.mesh, self.mesh.reordered(places)
        self.mesh = ordered.reshape(**dict(zip(names, sizes, strict=True)))
        self.numbers = tuple(self.numbers[place] for place in places)
        accounts.note_moved(before, self)

    def create_submesh(self, shape: Sequence[int], offset: Sequence[int] | None = None) -> MeshDevice:
        """A mesh of some of the devices, with queues of its own; memory is one account, so they may overlap safely."""
        self.check_open()
        expect("shape", shape, Sequence, fix="give a size for every axis")
        sizes, start = tuple(shape), tuple(offset) if offset is not None else (0,) * self.mesh.ndim
        if len(sizes) != self.mesh.ndim or len(start) != self.mesh.ndim or min(sizes) < 1:
            raise MeshError(f"a submesh of shape {sizes} at {start}", mesh=self.mesh, fix="give a size for every axis")
        if any(a < 0 or a + n > size for a, n, size in zip(start, sizes, self.mesh.shape, strict=True)):
            raise MeshError(f"a submesh of shape {sizes} at {start} does not fit", mesh=self.mesh)
        if self.mesh.is_split and not self.system.driver.shares_memory:
            raise UnsupportedError(
                f"{self} is split over processes, and its cards hold memory of their own: it has no submeshes",
                fix="open a mesh of the cards that you need",
            )
        box = {axis: slice(a, a + n) for axis, a, n in zip(self.mesh.axes, start, sizes, strict=True)}
        places = self.mesh.submesh(box)
        by_id = dict(zip(self.mesh.device_ids, self.numbers, strict=True))
        numbers = [by_id[each] for each in places.device_ids]
        made = MeshDevice(places, numbers, self.system, len(self.queues), self.mesh_type, self)
        self._children.add(made)
        return made

    def create_submeshes(self, shape: Sequence[int]) -> list[MeshDevice]:
        """The whole mesh cut into submeshes of one shape, row-major."""
        sizes = tuple(shape)
        for axis, (size, part) in enumerate(zip(self.mesh.shape, sizes, strict=True)):
            if part < 1 or size % part:
                raise MeshError(f"{part} does not divide axis {axis} of size {size}", mesh=self.mesh, asked=sizes)
        steps = Mesh.of([size // part for size, part in zip(self.mesh.shape, sizes, strict=True)])
        offsets = [tuple(c * n for c, n in zip(place, sizes, strict=True)) for place in steps.coordinates()]
        return [self.create_submesh(sizes, offset) for offset in offsets]

    def get_submeshes(self) -> list[MeshDevice]:
        """The submeshes that are open."""
        return sorted((child for child in self._children if not child.closed), key=lambda child: child.id)

    # memory

    def memory_usage(self, buffer_type: str = "dram") -> dict[Coordinate, Usage]:
        """The memory of every device: used, free, peak, largest free piece."""
        if buffer_type not in self.system.memory:
            raise ArgumentError(f"there is no memory {buffer_type!r}", fix=closest(buffer_type, self.system.memory))
        usage = self.system.memory[buffer_type].usage()
        return {place: usage[number] for place, number in zip(self.coordinates(), self.numbers, strict=True)}

    def check_batch(self, size: int, per_device: int) -> None:
        """An error unless a batch is so many rows on every device: `size == per_device * num_devices`."""
        if size != per_device * self.num_devices:
            raise ArgumentError(
                f"a batch of {size} is not {per_device} on each of {self.num_devices} devices",
                fix=f"use a batch of {per_device * self.num_devices}",
            )

    def adopt(self, buffer: MeshBuffer) -> None:
        """A buffer has been allocated here."""
        self._buffers.add(buffer)

    def check_buffer(self, buffer: MeshBuffer) -> None:
        """An error unless a buffer is here and has memory."""
        if not isinstance(buffer, MeshBuffer):
            raise ArgumentError(f"{buffer!r} is not a MeshBuffer", fix="create_mesh_buffer(mesh, ...)")
        buffer.check()
        if buffer.device is not self:
            raise MeshError(f"{buffer.name} is on {buffer.device}, not on {self}", fix="use the mesh it was made on")

    # queues

    def queue(self, cq_id: int = 0) -> MeshCommandQueue:
        """The command queue of that number."""
        self.check_open()
        expect("cq_id", cq_id, int, fix=f"queues are numbered from 0 to {len(self.queues) - 1}")
        if not 0 <= cq_id < len(self.queues):
            more = f", or open more: open_mesh_device(..., num_command_queues={cq_id + 1})" if cq_id > 0 else ""
            raise MeshError(
                f"there is no queue {cq_id}: {len(self.queues)} were opened",
                fix=f"queues are numbered from 0 to {len(self.queues) - 1}{more}",
            )
        return self.queues[cq_id]

    def synchronize(self, cq_id: int | None = None, timeout: float | None = None) -> None:
        """Wait for one queue, or for all of them, those of submeshes included."""
        self.check_open()
        for queue in self.queues if cq_id is None else (self.queue(cq_id),):
            queue.finish(timeout)
        if cq_id is None:
            for child in self.get_submeshes():
                child.synchronize(timeout=timeout)

    def logged(self) -> contextlib.AbstractContextManager[list[Entry]]:
        """Everything that cards are told to do inside, in order of dispatch."""
        return self.system.logged()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many writes, reads, launches and sends cards were told to do, the bytes between cards and host
        (`host_bytes`), and how many kernels were compiled."""
        return self.system.counts

    # traces

    def begin_trace_capture(self, cq_id: int = 0) -> Trace:
        """From now on, write down what is enqueued on a queue, and tensor ops of this thread, without running it."""
        queue = self.queue(cq_id)
        trace = Trace(self)
        Capture(trace, queue)
        return trace

    def end_trace_capture(self, trace: Trace) -> None:
        """The trace can be replayed from now on."""
        expect("trace", trace, Trace, fix="give what begin_trace_capture returned")
        taken = state.capture
        if taken is None or taken.trace is not trace:
            raise TraceError(f"trace {trace.id} is not being captured in this thread")
        taken.end()
        self._traces[trace.id] = trace
        weakref.finalize(trace, _let_go, weakref.ref(self), trace.id).atexit = False

    @contextlib.contextmanager
    def capture(self, cq_id: int = 0) -> Iterator[Trace]:
        """Capture what is inside."""
        trace = self.begin_trace_capture(cq_id)
        try:
            yield trace
        except BaseException:
            self._end_capture()
            raise
        self.end_trace_capture(trace)

    def _end_capture(self) -> None:
        """Throw away what this thread is capturing on it."""
        taken = state.capture
        if taken is not None and taken.queue is not None and taken.queue.device is self:
            taken.end(keep=False)

    def execute_trace(self, trace: Trace, cq_id: int = 0, *, blocking: bool = True) -> None:
        """Replay a trace on a queue."""
        self.queue(cq_id).enqueue_trace(trace, blocking=blocking)

    def release_trace(self, trace: Trace) -> None:
        """Let a trace's memory go."""
        expect("trace", trace, Trace, fix="give what begin_trace_capture returned")
        trace.release()

    def is_held(self, buffer: MeshBuffer) -> bool:
        """Whether a live trace, one being captured, or a launch that hangs uses a buffer."""
        taken = state.capture
        capturing = taken is not None and taken.queue is not None and taken.queue.device is self
        return capturing or buffer in self._hung or any(buffer in trace.buffers for trace in self._traces.values())

    def hang(self, buffers: Iterable[MeshBuffer]) -> None:
        """A launch did not end and may still write to these: nobody else gets their memory while the mesh is open."""
        self._hung.update(buffers)

    def lose(self, places: Iterable[Coordinate], reason: str) -> None:
        """The cards at some coordinates do not come back."""
        for place in places:
            number = self.numbers[self.mesh.index(place)]
            self.system.launches.lost[number] = f"at {tuple(place)}, {reason}"

    def leave(self, places: Iterable[Coordinate], buffers: Iterable[MeshBuffer], reason: str) -> bool:
        """Something takes too long on some cards. Where a card can end it, it does: True if all could. Elsewhere it may
        still write: the card is lost, and nobody gets the memory."""
        stuck = []
        for place in places:
            card = self.card(place)
            if isinstance(card, EndableCard):
                card.end(reason)
            else:
                stuck.append((place, card))
        if stuck:
            self.hang(buffers)
            lost = (place for place, card in stuck if not getattr(card, "hangs", False))
            self.lose(lost, reason)  # a virtual card that hangs refuses work by itself, until it is reset
        return not stuck

    def free_later(self, buffer: MeshBuffer) -> None:
        """A buffer was freed that something still uses: its place stays taken until that is over."""
        names = ", ".join(str(trace.id) for trace in self._traces.values() if buffer in trace.buffers)
        who = "a launch that hangs" if buffer in self._hung else f"trace {names or 'under capture'}"
        buffer.region.owner += f" (freed, kept by {who})"
        self._later.append((buffer, buffer.region))

    def let_go(self, trace_id: int) -> None:
        """A trace was released, or nobody refers to it: what only it kept is freed."""
        self._traces.pop(trace_id, None)
        for pair in [pair for pair in self._later if not self.is_held(pair[0])]:
            self._later.remove(pair)
            self.system.memory[pair[0].buffer_type].drop(pair[1])
            pair[0].tell_cards()

    # the end

    def check_open(self) -> None:
        """An error if it has been closed."""
        self.lease.check_open()

    def close(self, timeout: float | None = CLOSING_SECONDS) -> None:
        """Wait for all queues, then let everything go. Twice is harmless. Errors nobody was told of are raised."""
        if self.closed:
            return
        for child in self.get_submeshes():
            child.close(timeout)
        self._end_capture()
        self.is_closing = True
        stopped = [queue.runner.stop(timeout) for queue in self.queues]
        self._stop.detach()
        errors: list[Exception] = [error for queue in self.queues if (error := queue.forget()) is not None]
        for trace in list(self._traces.values()):
            trace.release()
        self._hung.clear()
        self.let_go(-1)
        for buffer in list(self._buffers):
            buffer.free()
        self.closed = True
        accounts.note_closed(self)
        self.lease.end()
        if self.parent is None:
            errors += close_cards(self.system.cards)
        if not all(stopped):
            late = [queue.cq_id for queue, ended in zip(self.queues, stopped, strict=True) if not ended]
            raise DeviceTimeoutError(
                f"queue {late[0]} of {self} did not end within {timeout} s", story=self.queues[late[0]].story()
            )
        if errors:
            raise errors[0]

    def __enter__(self) -> MeshDevice:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # what went wrong inside is what matters
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        return _describe_mesh(self.mesh)


def _describe_mesh(mesh: Mesh) -> str:
    grid = "x".join(map(str, mesh.shape))
    return f"MeshDevice({grid}, {mesh.size} device{'s' if mesh.size != 1 else ''})"


def _let_go(device: weakref.ref[MeshDevice], trace_id: int) -> None:
    found = device()
    if found is not None:
        found.let_go(trace_id)


def _stop(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.stop(0.0)


def enqueue_mesh_workload(mesh: MeshDevice, workload: MeshWorkload, blocking: bool = True, *, cq_id: int = 0) -> None:
    """Launch every program of a workload on its range; with `blocking`, return when all devices are done."""
    _check_device(mesh).queue(cq_id).enqueue_workload(workload, blocking=blocking)


def synchronize_mesh_device(mesh: MeshDevice) -> None:
    """Return only after all that was queued on every device."""
    _check_device(mesh).synchronize()


def close_mesh_device(mesh: MeshDevice) -> None:
    """Close a mesh device; twice is harmless."""
    _check_device(mesh).close()


def _check_device(mesh: MeshDevice) -> MeshDevice:
    expect("mesh", mesh, MeshDevice, fix="give what open_mesh_device returned")
    return mesh
