"""Queues, events and traces as TTNN has them: orders, refusals, addresses, races."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError, RaceError, TraceError
from meshloom.runtime.commands import Command


@pytest.fixture
def mesh() -> Iterator[Any]:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2), num_command_queues=2)
    yield device
    ttnn.close_mesh_device(device)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MESHLOOM_CHECK", "races")
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2), num_command_queues=2)
    yield device
    ttnn.close_mesh_device(device)


def rows(mesh: Any, values: torch.Tensor, **where: Any) -> Any:
    return ttnn.from_torch(values, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), **where)


def ones(mesh: Any, value: float = 1.0, **where: Any) -> Any:
    return rows(mesh, torch.full((2, 1, 32, 32), value), **where)


def value_of(tensor: Any) -> float:
    (found,) = ttnn.to_torch(tensor).unique().tolist()
    return found


class Gate(Command):
    """A command that waits until it is let through."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.opened = threading.Event()

    def run(self, queue: int) -> None:
        assert self.opened.wait(30)


# which queue


def test_queue_ids_are_numbers_with_a_name() -> None:
    assert (ttnn.QueueId(1) == 1, int(ttnn.QueueId(1)), repr(ttnn.QueueId(0))) == (True, 1, "QueueId(0)")
    assert ttnn.QueueId(1) != ttnn.QueueId(0) and hash(ttnn.QueueId(1)) == hash(ttnn.QueueId(1))
    with pytest.raises(ArgumentError, match="takes a number from 0 on, not -1"):
        ttnn.QueueId(-1)


def test_the_current_queue_is_one_per_thread_and_nests() -> None:
    seen = []
    with ttnn.command_queue(1):
        with ttnn.command_queue(ttnn.QueueId(0)):
            assert ttnn.get_current_command_queue_id_for_thread() == 0
        other = threading.Thread(target=lambda: seen.append(ttnn.get_current_command_queue_id_for_thread()))
        other.start()
        other.join()
        assert ttnn.get_current_command_queue_id_for_thread() == 1
    assert seen == [0] and ttnn.get_current_command_queue_id_for_thread() == 0


def test_a_queue_that_was_not_opened_is_refused(mesh: Any) -> None:
    x, host = ones(mesh, device=mesh), ones(mesh)
    for use in (
        lambda: ttnn.record_event(mesh, 7),
        lambda: ttnn.to_device(host, mesh, queue_id=7),
        lambda: x.cpu(cq_id=7),
        lambda: ttnn.copy_host_to_device_tensor(host, x, cq_id=7),
        lambda: ttnn.begin_trace_capture(mesh, cq_id=7),
        lambda: ttnn.synchronize_device(mesh, 7),
    ):
        with pytest.raises(RuntimeError, match="cq_id 7 is out of range"):
            use()
    with pytest.raises(TypeError, match="neither a number nor"):
        ttnn.record_event(mesh, "first")


# events


def test_an_event_comes_about_after_what_its_queue_was_given(mesh: Any) -> None:
    gate = Gate()
    mesh.runtime.queue(0).submit(gate, False)
    event = ttnn.record_event(mesh, 0)
    assert repr(event).startswith(f"MeshEvent(id={event.id}, device_id={mesh.id()}, mesh_cq_id=0, device_range=")
    ttnn.wait_for_event(1, event)
    after = ttnn.record_event(mesh, ttnn.QueueId(1))
    assert not event.query() and not after.query()
    gate.opened.set()
    ttnn.event_synchronize(after)
    assert event.query()


def test_wait_for_event_takes_the_event_alone_or_by_name(mesh: Any) -> None:
    event = ttnn.record_event(mesh)
    ttnn.wait_for_event(event)
    ttnn.wait_for_event(mesh_event=event)
    ttnn.wait_for_event(cq_id=1, mesh_event=event)
    ttnn.synchronize_device(mesh)
    with pytest.raises(TypeError, match=r"is not a ttnn\.MeshEvent"):
        ttnn.wait_for_event(1, None)


def test_row_125_synchronize_mesh_device_returns_only_after_queued_work_on_every_device(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    trace = ttnn.begin_trace_capture(mesh)
    y = ttnn.add(x, 1.0)
    ttnn.end_trace_capture(mesh, trace)
    gate = Gate()
    mesh.runtime.queue(0).submit(gate, False)
    ttnn.execute_trace(mesh, trace, blocking=False)
    array = y._block
    array.zero_()
    threading.Timer(0.02, gate.opened.set).start()
    ttnn.synchronize_mesh_device(mesh)
    assert gate.opened.is_set() and array.unique().tolist() == [2.0]


def test_row_127_two_submeshes_run_at_once() -> None:
    met = threading.Barrier(2, timeout=30)
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))

    class Meet(Command):
        def run(self, queue: int) -> None:
            met.wait()

    parts = mesh.create_submeshes(ttnn.MeshShape(1, 1))
    inputs = [ttnn.from_torch(torch.full((32, 32), float(i)), device=part) for i, part in enumerate(parts)]
    for part in parts:
        part.runtime.queue(0).submit(Meet("meet"), False)
    results = [ttnn.add(x, 1.0) for x in inputs]  # each waits for nobody but its own mesh
    ttnn.synchronize_mesh_device(mesh)  # one after the other would never meet
    assert [value_of(each) for each in results] == [1.0, 2.0]
    ttnn.close_mesh_device(mesh)


def test_row_141_reading_a_tensor_of_a_trace_under_way_waits_and_is_right(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    trace = ttnn.begin_trace_capture(mesh)
    y = ttnn.multiply(x, 3.0)
    ttnn.end_trace_capture(mesh, trace)
    for read in (value_of, lambda t: value_of(t.cpu()), lambda t: value_of(ttnn.add(t, 0.0))):
        y._block.zero_()
        gate = Gate()
        mesh.runtime.queue(0).submit(gate, False)
        ttnn.execute_trace(mesh, trace, blocking=False)
        threading.Timer(0.02, gate.opened.set).start()
        assert read(y) == 3.0


# traces


def test_nothing_runs_while_a_trace_is_captured_and_each_replay_reads_its_inputs_again(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    assert not ttnn.is_trace_capture_active(mesh)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    assert ttnn.is_trace_capture_active(mesh) and ttnn.is_trace_capture_active()
    y = ttnn.add(ttnn.multiply(x, 2.0), 1.0)
    z = ttnn.all_gather(y, 0)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    assert isinstance(trace, ttnn.MeshTraceId) and int(trace) == trace
    addresses = y.buffer_address(), z.buffer_address()
    for value in (1.0, 5.0, -2.0):
        ttnn.copy_host_to_device_tensor(ones(mesh, value), x)
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        assert value_of(y) == value_of(z) == 2 * value + 1
        assert (y.buffer_address(), z.buffer_address()) == addresses
    ttnn.release_trace(mesh, trace)
    ttnn.release_trace(mesh, trace)


def test_what_decides_sizes_is_read_when_a_trace_is_captured_and_the_rest_by_every_replay(mesh: Any) -> None:
    rows = torch.arange(8.0).reshape(1, 1, 8, 1).expand(1, 1, 8, 96).contiguous()
    everywhere = {"device": mesh, "mesh_mapper": ttnn.ReplicateTensorToMesh(mesh)}
    x = ttnn.from_torch(rows, layout=ttnn.TILE_LAYOUT, **everywhere)

    def whole(*numbers: int, **options: Any) -> Any:
        return ttnn.from_torch(torch.tensor(numbers), dtype=ttnn.int32, **options)

    starts, ends, first = (whole(*each, **everywhere) for each in ((0, 0, 1, 0), (1, 1, 3, 96), (1,)))
    trace = ttnn.begin_trace_capture(mesh)
    cut = ttnn.slice(x, starts, ends)
    queries, _, _ = ttnn.experimental.nlp_create_qkv_heads_decode(
        x, num_heads=1, num_kv_heads=1, batch_offset=first, slice_size=2
    )
    with pytest.raises(TraceError, match="needs values"):  # bounds that only a replay has
        ttnn.slice(x, ttnn.add(starts, 0), ttnn.add(ends, 0))
    ttnn.end_trace_capture(mesh, trace)
    for row in (1, 5):
        for tensor, numbers in ((starts, (0, 0, row, 0)), (ends, (1, 1, row + 2, 96)), (first, (row,))):
            ttnn.copy_host_to_device_tensor(whole(*numbers, mesh_mapper=everywhere["mesh_mapper"]), tensor)
        ttnn.execute_trace(mesh, trace, blocking=False)
        for part in ttnn.get_device_tensors(cut):
            assert torch.equal(ttnn.to_torch(part), rows[:, :, row : row + 2])
        for part in ttnn.get_device_tensors(queries):
            assert torch.equal(ttnn.to_torch(part), rows[0, :, row : row + 2, None, :32])
    ttnn.release_trace(mesh, trace)


def test_a_copy_of_a_traces_output_stays_when_the_trace_runs_again(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    trace = ttnn.begin_trace_capture(mesh)
    y = ttnn.add(x, 1.0)
    ttnn.end_trace_capture(mesh, trace)
    kept = []
    for value in range(3):
        ttnn.copy_host_to_device_tensor(ones(mesh, float(value)), x)
        ttnn.execute_trace(mesh, trace, blocking=False)
        kept.append(y.cpu(blocking=False))
    ttnn.synchronize_device(mesh)
    assert [value_of(each) for each in kept] == [1.0, 2.0, 3.0]


def test_refusals_of_traces_have_the_words_of_the_original(mesh: Any) -> None:
    x, host = ones(mesh, device=mesh), ones(mesh)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    number = int(trace)
    for message, use in {
        f"CQ 0 is already being used for tracing tid {number}": lambda: ttnn.begin_trace_capture(mesh, cq_id=0),
        f"CQ 1 is not being used for tracing tid {number}": lambda: ttnn.end_trace_capture(mesh, trace, cq_id=1),
        "Reads are not supported during trace capture.": lambda: ttnn.to_torch(x),
        "Writes are not supported during trace capture.": lambda: ttnn.copy_host_to_device_tensor(host, x),
        "Event Synchronization is not supported during trace capture.": lambda: ttnn.record_event(mesh, 0),
        "Blocking is not supported when recording a trace.": lambda: ttnn.synchronize_device(mesh),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            use()
    with pytest.raises(TraceError, match="Writes are not supported"):
        ttnn.from_torch(torch.ones(2, 2), device=mesh)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    again = ttnn.begin_trace_capture(mesh, cq_id=0)
    assert int(again) == number + 2  # the refused one took a number
    ttnn.end_trace_capture(mesh, again, cq_id=0)
    missing = rf"Trace instance 99999 must exist on Mesh device {mesh.id()}'s active sub-device manager 0"
    with pytest.raises(RuntimeError, match=missing):
        ttnn.execute_trace(mesh, ttnn.MeshTraceId(99999))
    ttnn.release_trace(mesh, trace)
    with pytest.raises(RuntimeError, match=f"Trace instance {number} must exist"):
        ttnn.execute_trace(mesh, trace)


def test_memory_of_a_live_trace_is_given_to_nobody(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    trace = ttnn.begin_trace_capture(mesh)
    inner = ttnn.multiply(x, 2.0)
    y = ttnn.add(inner, 1.0)
    taken = {inner.buffer_address(), y.buffer_address()}
    ttnn.deallocate(inner)  # inside of the capture: its place may be used again there, and by nobody later
    ttnn.end_trace_capture(mesh, trace)
    ttnn.deallocate(y)
    del inner, y
    gc.collect()
    others = [ttnn.add(x, float(i)) for i in range(8)]
    assert taken.isdisjoint(other.buffer_address() for other in others)
    ttnn.execute_trace(mesh, trace)
    assert [value_of(other) for other in others] == [1.0 + i for i in range(8)]
    used = mesh.runtime.memory_usage()[0, 0].used
    ttnn.release_trace(mesh, trace)
    gc.collect()
    assert mesh.runtime.memory_usage()[0, 0].used < used
    assert ttnn.add(x, 1.0).buffer_address() in taken


def test_an_input_freed_and_allocated_again_during_a_capture_is_the_same_memory(mesh: Any) -> None:
    config = ttnn.L1_MEMORY_CONFIG
    x = ttnn.to_memory_config(ones(mesh, device=mesh), config)
    address, spec = x.buffer_address(), x.spec
    trace = ttnn.begin_trace_capture(mesh)
    y = ttnn.multiply(x, 2.0)
    ttnn.deallocate(x)
    again = ttnn.allocate_tensor_on_device(spec, mesh)
    ttnn.end_trace_capture(mesh, trace)
    assert again.buffer_address() == address
    for value in (3.0, 4.0):
        ttnn.copy_host_to_device_tensor(ones(mesh, value), again)
        ttnn.execute_trace(mesh, trace)
        assert value_of(y) == 2 * value


def test_two_traces_and_ops_between_them_keep_their_values(mesh: Any) -> None:
    x = ones(mesh, device=mesh)
    found = []
    for factor in (2.0, 3.0):
        trace = ttnn.begin_trace_capture(mesh)
        found.append((trace, ttnn.multiply(x, factor)))
        ttnn.end_trace_capture(mesh, trace)
    (first, y), (second, z) = found
    ttnn.execute_trace(mesh, first, cq_id=0, blocking=False)
    ttnn.execute_trace(mesh, second, cq_id=1, blocking=False)
    assert (value_of(y), value_of(z), value_of(ttnn.add(y, z))) == (2.0, 3.0, 5.0)


def test_a_replay_that_fails_is_told_to_whoever_waits(mesh: Any) -> None:
    class Broken(Command):
        def run(self, queue: int) -> None:
            raise ValueError("broken on purpose")

    x = ones(mesh, device=mesh)
    mesh.runtime.queue(0).submit(Broken("broken"), False)
    mesh.watched = True
    with pytest.raises(RuntimeError, match="broken"):
        ttnn.add(x, 1.0)
    assert value_of(ttnn.add(x, 1.0)) == 2.0  # told once, and the queue is clear again


# races


def test_an_unordered_use_on_two_queues_is_told(watched: Any) -> None:
    x, host = ones(watched, device=watched), ones(watched, 2.0)
    ttnn.synchronize_device(watched)
    ttnn.add(x, 1.0)
    with pytest.raises(RaceError, match="not ordered after") as told:
        ttnn.copy_host_to_device_tensor(host, x, cq_id=1)
    assert "ttnn.add" in str(told.value) and "write of tensor" in str(told.value)


def test_events_order_the_queues_and_nothing_is_told(watched: Any) -> None:
    x, host = ones(watched, device=watched), ones(watched, 2.0)
    done = ttnn.record_event(watched, 0)
    for _ in range(2):
        ttnn.wait_for_event(1, done)
        ttnn.copy_host_to_device_tensor(host, x, cq_id=1)
        written = ttnn.record_event(watched, 1)
        ttnn.wait_for_event(0, written)
        y = ttnn.add(x, 1.0)
        done = ttnn.record_event(watched, 0)
    assert value_of(y) == 3.0


def test_a_read_on_another_queue_without_an_event_is_told_and_with_one_is_not(watched: Any) -> None:
    x = ones(watched, device=watched)
    y = ttnn.add(x, 1.0)
    with pytest.raises(RaceError, match="read of tensor"):
        y.cpu(cq_id=1)
    ttnn.wait_for_event(1, ttnn.record_event(watched, 0))
    assert value_of(y.cpu(cq_id=1)) == 2.0
    z = ttnn.add(x, 2.0)
    ttnn.synchronize_device(watched)
    assert value_of(z.cpu(cq_id=1)) == 3.0


def test_a_replay_uses_what_its_ops_use(watched: Any) -> None:
    x, host = ones(watched, device=watched), ones(watched, 2.0)
    trace = ttnn.begin_trace_capture(watched)
    y = ttnn.multiply(ttnn.add(x, 1.0), 2.0)
    ttnn.end_trace_capture(watched, trace)
    ttnn.execute_trace(watched, trace, blocking=False)
    with pytest.raises(RaceError, match="replay trace"):
        ttnn.copy_host_to_device_tensor(host, x, cq_id=1)
    with pytest.raises(RaceError, match="replay trace"):
        y.cpu(cq_id=1)
    ttnn.wait_for_event(1, ttnn.record_event(watched, 0))
    assert value_of(y.cpu(cq_id=1)) == 4.0


COPIES = {
    "typecast": lambda x: ttnn.typecast(x, ttnn.bfloat16),
    "to_layout": lambda x: ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT),
    "to_memory_config": lambda x: ttnn.to_memory_config(x, ttnn.L1_MEMORY_CONFIG),
    "clone": ttnn.clone,
    "move": lambda x: ttnn.move(ttnn.add(x, 0.0)),
    "copy": lambda x: ttnn.copy(x, ttnn.add(x, 1.0)),
    "full": lambda x: ttnn.full([1, 1, 32, 32], 1.0, device=x.device(), layout=ttnn.TILE_LAYOUT),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_a_copy_writes_is_used_by_its_queue_and_by_a_replay(watched: Any, name: str) -> None:
    x = ones(watched, device=watched)
    ttnn.synchronize_device(watched)
    y = COPIES[name](x)
    with pytest.raises(RaceError, match="read of tensor"):
        y.cpu(cq_id=1)
    ttnn.synchronize_device(watched)
    trace = ttnn.begin_trace_capture(watched)
    for _ in range(2):  # the second is where the first was
        between = COPIES[name](x)
        y = ttnn.add(between, 1.0)
        ttnn.deallocate(between)
    ttnn.end_trace_capture(watched, trace)
    ttnn.synchronize_device(watched)
    for _ in range(2):
        ttnn.execute_trace(watched, trace, blocking=False)  # nothing to tell: it reads what it wrote
        assert value_of(y) == 2.0


@pytest.mark.parametrize("words", ["races", "races,always"])
def test_the_check_of_races_goes_with_that_of_processes(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_CHECK", words)
    assert loom.ones(4, mesh=loom.open_mesh((2,))).tolist() == [1.0] * 4
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    assert device.runtime.system.races is not None
    ttnn.close_mesh_device(device)


def test_without_the_check_the_same_program_runs_and_is_right(mesh: Any) -> None:
    x, host = ones(mesh, device=mesh), ones(mesh, 2.0)
    y = ttnn.add(x, 1.0)
    ttnn.copy_host_to_device_tensor(host, x, cq_id=1)
    assert (value_of(y), value_of(x)) == (2.0, 2.0)


def test_a_tensor_on_a_closed_mesh_is_told(mesh: Any) -> None:
    other = ttnn.open_mesh_device(ttnn.MeshShape(1, 1))
    x = ttnn.from_torch(torch.ones(2), device=other)
    ttnn.close_mesh_device(other)
    with pytest.raises(RuntimeError, match="has been closed"):
        ttnn.to_torch(x)
    with pytest.raises(OperandError, match="cq_id 2 is out of range"):
        ttnn.record_event(mesh, 2)


def test_what_a_trace_made_the_same_on_all_devices_takes_results_that_differ(mesh: Any) -> None:
    x = rows(mesh, torch.arange(2.0).reshape(2, 1), device=mesh)
    trace = ttnn.begin_trace_capture(mesh)
    total = ttnn.all_reduce(x)
    double = ttnn.add(total, total)
    ttnn.add(x, double, output_tensor=total)
    ttnn.end_trace_capture(mesh, trace)
    for values in ([0.0, 1.0], [3.0, 4.0]):
        ttnn.copy_host_to_device_tensor(rows(mesh, torch.tensor(values).reshape(2, 1)), x)
        ttnn.execute_trace(mesh, trace)
        found = [ttnn.to_torch(each).item() for each in ttnn.get_device_tensors(total)]
        assert found == [each + 2 * sum(values) for each in values]


# a mesh that changes under tensors and traces


def test_a_mesh_closed_during_a_capture_ends_it(mesh: Any) -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as other:
        x = ones(other, device=other)
        ttnn.begin_trace_capture(other)
        ttnn.add(x, x)
    assert not ttnn.is_trace_capture_active()
    assert value_of(ttnn.add(ones(mesh, device=mesh), 1.0)) == 2


def test_a_mesh_closed_inside_its_own_capture_tells_the_error_of_the_program() -> None:
    device = loom.runtime.open_mesh_device((1, 2))
    with pytest.raises(ZeroDivisionError), device.capture():
        device.close()
        raise ZeroDivisionError


def test_a_mesh_is_not_reshaped_during_a_capture(mesh: Any) -> None:
    trace = ttnn.begin_trace_capture(mesh)
    with pytest.raises(TraceError, match="cannot be reshaped during trace capture"):
        mesh.reshape(ttnn.MeshShape(2, 1))
    ttnn.end_trace_capture(mesh, trace)


def test_tensors_of_before_a_reshape_are_read_and_refused_by_ops(mesh: Any) -> None:
    x, same = rows(mesh, torch.arange(2.0).reshape(2, 1), device=mesh), ttnn.ones((1, 1), device=mesh)
    mesh.reshape(ttnn.MeshShape(2, 1))
    for call in (
        lambda: ttnn.add(x, 1.0),
        lambda: ttnn.all_reduce(same, cluster_axis=0),
        lambda: ttnn.copy_host_to_device_tensor(rows(mesh, torch.ones(2, 1)), x),
    ):
        with pytest.raises(OperandError, match=r"was made when its mesh was of shape \[1, 2\]"):
            call()
    assert ttnn.to_torch(x).flatten().tolist() == [0, 1]
    new = rows(mesh, torch.arange(2.0).reshape(2, 1), device=mesh)
    assert ttnn.to_torch(ttnn.all_reduce(new, cluster_axis=0)).tolist() == [[1]]
