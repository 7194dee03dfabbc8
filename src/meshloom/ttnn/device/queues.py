"""Command queues, events and traces as TTNN has them, on those of the runtime.

Ops run at once on the caller's thread, and so do transfers: in the order of the program, which is one of those that the
queues allow. Only a trace that is replayed without blocking is under way beside the program: whoever touches a tensor
of its mesh waits for it first (`settle`; a mesh where somebody has to is `watched`). So results are always right, also
where a program forgot an event; on a mesh opened with `check="races"` (or MESHLOOM_CHECK=races) such a program is told
what it forgot.

While a trace is captured nothing runs. What it uses keeps its address until the trace is released, whoever lets go of
it: nobody is given memory that a replay writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from meshloom.errors import ArgumentError, OperandError, TraceError, where
from meshloom.processes.divergence import note
from meshloom.runtime import state
from meshloom.runtime.commands import Replay
from meshloom.runtime.device import MeshDevice as RuntimeDevice
from meshloom.runtime.events import MeshEvent
from meshloom.runtime.geometry import MeshCoordinateRange
from meshloom.runtime.memory import Allocator, Region, make_region
from meshloom.runtime.queue import MeshCommandQueue
from meshloom.runtime.races import Access
from meshloom.runtime.trace import Trace
from meshloom.ttnn.choices import Number
from meshloom.ttnn.device.system import tell
from meshloom.ttnn.tensor.parts import Block

if TYPE_CHECKING:
    from meshloom.ttnn.device.mesh_device import MeshDevice
    from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "MeshEvent MeshTraceId QueueId begin_trace_capture command_queue end_trace_capture event_synchronize execute_trace "
    "get_current_command_queue_id_for_thread is_trace_capture_active record_event release_trace synchronize_device "
    "synchronize_devices synchronize_mesh_device wait_for_event"
).split()

READS = "Reads are not supported during trace capture."
WRITES = "Writes are not supported during trace capture."
EVENTS = "Event Synchronization is not supported during trace capture."
BLOCKING = "Blocking is not supported when recording a trace."


class QueueId(Number):
    """The number of a command queue.

    >>> QueueId(1), int(QueueId(1)), QueueId(1) == 1
    (QueueId(1), 1, True)
    """


class MeshTraceId(Number):
    """The number of a trace."""


# which queue


class _Current(threading.local):
    number = 0


_current = _Current()


@contextmanager
def command_queue(cq_id: int) -> Iterator[None]:
    """What this thread does inside counts as done on that queue, where it does not name another.

    >>> with command_queue(1):
    ...     get_current_command_queue_id_for_thread()
    QueueId(1)
    """
    before, _current.number = _current.number, int(QueueId(int(cq_id)))
    try:
        yield
    finally:
        _current.number = before


def get_current_command_queue_id_for_thread() -> QueueId:
    """The queue that this thread is on."""
    return QueueId(_current.number)


def queue_of(device: MeshDevice, cq_id: int | None = None) -> MeshCommandQueue:
    """A queue of a mesh by its number, the current one of the thread for None."""
    return _find_queue(device.runtime, cq_id)


def _find_queue(device: RuntimeDevice, cq_id: object) -> MeshCommandQueue:
    if cq_id is not None and (isinstance(cq_id, bool) or not isinstance(cq_id, int)):
        raise ArgumentError(f"cq_id={cq_id!r} is neither a number nor a ttnn.QueueId")
    number = _current.number if cq_id is None else int(cq_id)
    if not 0 <= number < len(device.queues):
        raise OperandError(
            f"cq_id {number} is out of range",
            mesh=f"{device}, opened with num_command_queues={len(device.queues)}",
            fix="open_mesh_device(..., num_command_queues=2) has queues 0 and 1",
        )
    return device.queue(number)


# what ops and transfers do


def settle(device: MeshDevice) -> None:
    """Wait for what is under way on a mesh. The race detector is not told: the program did not wait."""
    device.watched = device.is_watched()
    for queue in device.runtime.queues:
        queue.settle(queue._last)


def transfer(tensor: Tensor, cq_id: int | None, *, writes: bool) -> None:
    """A tensor on a mesh is about to be read to the host, or written from it, on a queue."""
    device = tensor.device()
    assert device is not None
    queue = queue_of(device, cq_id)
    if state.capture is not None:
        raise _refusal(WRITES if writes else READS)
    if writes:
        _check_grid(device, tensor)
    if device.watched:
        settle(device)
    if device.runtime.system.races is not None:
        verb = "write" if writes else "read"
        _tell(queue, f"{verb} of {_name_of(tensor)} at {where()}", [_access(tensor, writes)])


def note_allocation(device: MeshDevice, region: Region) -> None:
    """A tensor has got memory; what is there counts as written by the host."""
    races = device.runtime.system.races
    if races is not None:
        races.note_allocation(region)
        races.note_host_write(region, device.runtime.numbers)


def used(device: MeshDevice, name: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
    """An op reads tensors of a mesh, or has written some."""
    if device.reshaped:
        for tensor in reads:
            _check_grid(device, tensor)
    if reads and state.checked and device.runtime.mesh.is_split:
        note(f"ttnn.{name}({', '.join(f'{each.dtype.name} {list(each.shape)}' for each in reads)})", where())
    capture = state.capture
    if capture is not None:
        for tensor in (*reads, *writes):
            tensor.pin()
            note_use(tensor._room)
        for tensor in reads:
            if not capture.makes(tensor.block):
                _memory().read(tensor._room, tensor.block)
    elif device.watched:
        settle(device)
    if device.runtime.system.races is not None:
        listed = [*(_access(each, False) for each in reads), *(_access(each, True) for each in writes)]
        if capture is not None:
            capture.keep(_Accesses(listed))
        else:
            _tell(queue_of(device), f"ttnn.{name} at {where()}", listed)


def note_write(tensor: Tensor) -> Tensor:
    """An op has made a tensor, or written it."""
    device = tensor.device()
    if device is not None and (device.watched or state.capture is not None):
        used(device, "op", writes=(tensor,))
    return tensor


def _check_grid(device: MeshDevice, tensor: Tensor) -> None:
    if tensor._grid != tuple(device.shape):
        raise OperandError(
            f"{_name_of(tensor)} was made when its mesh was of shape {list(tensor._grid)}",
            mesh=device,
            fix="read it with ttnn.to_torch, and make it again with ttnn.from_torch",
        )


class _Accesses(NamedTuple):
    """What one op of a trace reads and writes."""

    listed: list[Access]


def _access(tensor: Tensor, writes: bool) -> Access:
    device, room = tensor.device(), tensor._room
    assert device is not None and room is not None
    cards = dict(zip(device.runtime.numbers, device.runtime.coordinates(), strict=True))
    return Access(room.region, _name_of(tensor), cards, writes)


def _name_of(tensor: Tensor) -> str:
    return f"tensor {tensor.tensor_id} ({tensor.dtype.name} {list(tensor.shape)})"


def _tell(queue: MeshCommandQueue, text: str, accesses: Iterable[Access]) -> None:
    if queue.system.races is not None:
        queue.system.races.note_command(queue.id, text, accesses)


def _refusal(reason: str) -> TraceError:
    trace = state.capture.trace.id
    return TraceError(reason, trace=trace, fix="do it before or after the capture")


def _refuse_in_capture(reason: str) -> None:
    if state.capture is not None:
        raise _refusal(reason)


# events


def record_event(
    mesh_device: MeshDevice,
    cq_id: int | None = None,
    sub_device_ids: Sequence[Any] = (),
    device_range: MeshCoordinateRange | None = None,
) -> MeshEvent:
    """An event that comes about when all that a queue has been given so far is done."""
    queue = queue_of(mesh_device, cq_id)
    _refuse_in_capture(EVENTS)
    return queue.record_event(device_range)


def wait_for_event(cq_id: int | MeshEvent | None = None, mesh_event: MeshEvent | None = None) -> None:
    """Let a queue wait for an event of another: what it is given from now on comes after."""
    if isinstance(cq_id, MeshEvent) and mesh_event is None:
        cq_id, mesh_event = None, cq_id
    event = _event(mesh_event)
    queue = _find_queue(event.queue.device, cq_id)
    _refuse_in_capture(EVENTS)
    queue.wait_for_event(event)


def event_synchronize(mesh_event: MeshEvent) -> None:
    """Wait for an event on the host."""
    event = _event(mesh_event)
    _refuse_in_capture(EVENTS)
    event.synchronize()
    tell("waited", event)


def _event(given: Any) -> MeshEvent:
    if not isinstance(given, MeshEvent):
        raise ArgumentError(f"{given!r} is not a ttnn.MeshEvent", fix="ttnn.record_event(mesh_device, cq_id)")
    return given


def synchronize_device(device: MeshDevice, cq_id: int | None = None, sub_device_ids: Sequence[Any] = ()) -> None:
    """Wait for all queues of a mesh, its submeshes included, or for one queue."""
    if not hasattr(device, "check_sub_devices"):
        raise ArgumentError(f"device={device!r} is not a MeshDevice", fix="give what ttnn.open_mesh_device returned")
    device.check_sub_devices(sub_device_ids)
    if cq_id is not None:
        queue_of(device, cq_id)
    _refuse_in_capture(BLOCKING)
    device.runtime.synchronize(None if cq_id is None else int(cq_id))
    tell("waited", device)


synchronize_mesh_device = synchronize_devices = synchronize_device


# traces


_traces: WeakKeyDictionary[MeshDevice, dict[int, Trace]] = WeakKeyDictionary()


def is_trace_capture_active(device: MeshDevice | None = None) -> bool:
    """Whether a trace is being captured on a mesh (on any, in this thread, without one)."""
    if device is None:
        return state.capture is not None
    return any(queue.capture is not None for queue in device.runtime.queues)


def begin_trace_capture(mesh_device: MeshDevice, *, cq_id: int | None = None) -> MeshTraceId:
    """From now on ops of this thread are written down and their results allocated, and nothing runs."""
    queue = queue_of(mesh_device, cq_id)
    taken = queue.capture
    if taken is not None:
        Trace(mesh_device.runtime)  # a refused capture takes a number, as in the original
        raise TraceError(
            f"CQ {queue.cq_id} is already being used for tracing tid {taken.trace.id}",
            fix="ttnn.end_trace_capture first",
        )
    return MeshTraceId(mesh_device.runtime.begin_trace_capture(queue.cq_id).id)


def end_trace_capture(mesh_device: MeshDevice, trace_id: int, *, cq_id: int | None = None) -> None:
    """The trace can be replayed from now on; what it uses stays where it is until it is released."""
    queue = queue_of(mesh_device, cq_id)
    taken = queue.capture
    if taken is None or taken.trace.id != int(trace_id):
        raise TraceError(
            f"CQ {queue.cq_id} is not being used for tracing tid {int(trace_id)}",
            fix="name the queue and the trace that ttnn.begin_trace_capture was given and gave",
        )
    accesses = [each.listed for each in taken._wrappers if isinstance(each, _Accesses)]
    mesh_device.runtime.end_trace_capture(taken.trace)
    taken.trace.used = accesses
    _traces.setdefault(mesh_device, {})[int(trace_id)] = taken.trace


def _free_pieces(allocator: Allocator, region: Region) -> list[tuple[int, int]]:
    """The pieces of a region that nobody has now."""
    place, found = region.address, []
    for other in allocator.live():
        if other.overlaps(region):
            if other.address > place:
                found.append((place, other.address))
            place = max(place, other.end)
    return [*found, (place, region.end)] if place < region.end else found


def execute_trace(mesh_device: MeshDevice, trace_id: int, *, cq_id: int | None = None, blocking: bool = True) -> None:
    """Replay a trace on a queue: its inputs are read as they are now, its results are written where they were.

    Without `blocking` it returns at once; whoever touches a tensor of the mesh waits for it.
    """
    queue = queue_of(mesh_device, cq_id)
    _refuse_in_capture(BLOCKING)
    trace = _traces.get(mesh_device, {}).get(int(trace_id))
    if trace is None:
        raise TraceError(
            f"Trace instance {int(trace_id)} must exist on Mesh device {mesh_device.id()}'s "
            "active sub-device manager 0",
            fix="it was released, or never captured on this mesh",
        )
    for other in mesh_device.runtime.queues:  # what others were given comes first: no replay meets another
        if other is not queue:
            other.settle(other._last)
    mesh_device.watched = True
    queue.submit(Replay(trace), blocking)


def release_trace(mesh_device: MeshDevice, trace_id: int) -> None:
    """Let a trace and what it kept go; a second time does nothing."""
    trace = _traces.get(mesh_device, {}).pop(int(trace_id), None)
    if trace is not None:
        settle(mesh_device)
        trace.release()


# memory of a capture


class _Memory:
    """The memory that a capture uses.

    While it lasts, what the program frees is handed out again as always: addresses are those that the program gets
    outside of it. Afterwards the trace has all that it writes to, so that nobody else is given it.
    """

    def __init__(self) -> None:
        self._rooms: WeakSet[Any] = WeakSet()
        self._regions: dict[tuple[Allocator, int], Region] = {}  # all that were used, by the number of the region
        self._inputs: dict[tuple[Allocator, int], Block] = {}  # arrays of before the capture, by their address

    def use(self, room: Any) -> None:
        """A tensor of the capture is there."""
        self._rooms.add(room)
        self._regions[room.allocator, room.region.number] = room.region

    def read(self, room: Any, block: Block) -> None:
        """An array of before the capture is an input of it."""
        self._inputs.setdefault((room.allocator, room.region.address), block)

    def found_at(self, room: Any, like: Block, axes: int) -> Block | None:
        """The input that was where a room is, if its parts have the shape and dtype of another's."""
        found = self._inputs.get((room.allocator, room.region.address))
        fits = found is not None and found.dtype == like.dtype and found.shape[axes:] == like.shape[axes:]
        return found if fits else None

    def hold(self, trace: Trace) -> None:
        """Let memory outlive whoever frees it; what was freed during the capture is taken again, where nobody is."""
        rooms = list(self._rooms)
        for room in rooms:
            room.traces += (trace,)
        trace._kept.append(rooms)
        freed: dict[tuple[Allocator, int], list[Region]] = {}
        for (allocator, _), region in self._regions.items():
            allocator.settle()
            if region.freed:
                freed.setdefault((allocator, region.mask), []).append(region)
        for (allocator, mask), regions in freed.items():
            for start, end in _join(regions):
                wanted = make_region(start, end - start, mask, "", "")
                for low, high in _free_pieces(allocator, wanted):
                    size = (high - low) * allocator.banks
                    made = allocator.allocate(size, mask, f"trace {trace.id}", trace.where, low)
                    trace._kept.append(_Taken(allocator, made))


class _Taken:
    """Bytes that nobody has but a trace; given back when the trace is released."""

    def __init__(self, allocator: Allocator, region: Region) -> None:
        self.allocator, self.region = allocator, region

    def __del__(self) -> None:
        self.allocator.drop(self.region)


def _join(regions: Iterable[Region]) -> list[tuple[int, int]]:
    """The pieces that regions cover, from where to where; those that touch are one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((region.address, region.end) for region in regions):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


_memories: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()  # by capture


def _memory() -> _Memory:
    """The memory of the capture that is under way."""
    found = _memories.get(state.capture)
    if found is None:
        found = _memories[state.capture] = _Memory()
        state.capture.at_end(found.hold)
    return found


def note_use(room: Any) -> None:
    """During a capture: a tensor is where a replay writes to, so nobody else gets it while the trace lives."""
    _memory().use(room)


def hold(tensor: Tensor) -> None:
    """During a capture: the trace keeps a tensor's memory from now on, also if somebody frees the tensor."""
    assert state.capture is not None and tensor._room is not None
    tensor._room.traces += (state.capture.trace,)
    state.capture.keep(tensor._room)


def found_at(room: Any, like: Block, axes: int) -> Block | None:
    """During a capture: the array that was at an address before, if it has the shape that is asked for.

    Programs free the input of a trace inside of it and allocate it again at the same address, to write it before each
    replay. On hardware that is the same memory; so it is here.
    """
    return None if state.capture is None else _memory().found_at(room, like, axes)
