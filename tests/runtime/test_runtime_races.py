"""The race detector: it fires where nothing orders two uses, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom.errors import ArgumentError, RaceError
from meshloom.runtime import MeshDevice, MeshWorkload, Program, create_mesh_buffer, open_mesh_device


@pytest.fixture
def mesh() -> Any:
    with open_mesh_device((2,), num_command_queues=3, check="races") as opened:
        yield opened


def buffer(mesh: MeshDevice, name: str = "x") -> Any:
    return create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,), name=name)


def work(x: Any, where: Any = None, *, reads: Any = ()) -> MeshWorkload:
    made = MeshWorkload()
    kernel = (lambda r, x: x.add_(r)) if reads else (lambda x: x.add_(1))
    made.add_program(where, Program(kernel, reads=reads, updates=[x], name="touch"))
    return made


def test_a_read_that_is_not_ordered_after_the_write_is_told_with_both_lines_and_the_missing_event(mesh):
    x = buffer(mesh)
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    with pytest.raises(RaceError) as caught:
        mesh.queue(1).enqueue_read(x)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("read x at test_runtime_races.py:") and "reads x at (0,), not ordered after" in lines[0]
    text = str(caught.value)
    assert "first    queue 0: write x at test_runtime_races.py:" in text
    assert "second   queue 1: read x at test_runtime_races.py:" in text
    assert "an event recorded on queue 0 after the first and waited for by queue 1" in text
    assert "event = queue0.record_event(); queue1.wait_for_event(event)" in text


def test_a_race_is_told_even_if_everything_ran_one_after_the_other():
    with open_mesh_device((2,), num_command_queues=2, check="races", dispatch="slow") as mesh:
        x = buffer(mesh)
        mesh.queue(0).enqueue_write(x, torch.ones(4))
        with pytest.raises(RaceError):
            mesh.queue(1).enqueue_read(x)


@pytest.mark.parametrize("first", ["write", "work", "read"])
@pytest.mark.parametrize("second", ["write", "work", "read"])
@pytest.mark.parametrize("ordered", ["", "event", "finish", "event on the host", "blocking"])
def test_every_pair_of_uses_with_a_write_must_be_ordered(mesh, first, second, ordered):
    x = buffer(mesh)
    mesh.queue(2).enqueue_write(x, torch.ones(4), blocking=True)

    def use(queue: Any, how: str, blocking: bool = False) -> None:
        if how == "write":
            queue.enqueue_write(x, torch.zeros(4), blocking=blocking)
        elif how == "work":
            queue.enqueue_workload(work(x), blocking=blocking)
        else:
            queue.enqueue_read(x, blocking=blocking)

    use(mesh.queue(0), first, ordered == "blocking")
    if ordered == "event":
        mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
    elif ordered == "finish":
        mesh.queue(0).finish()
    elif ordered == "event on the host":
        mesh.queue(0).record_event().synchronize()
    if ordered or first == second == "read":
        use(mesh.queue(1), second)
    else:
        with pytest.raises(RaceError, match="not ordered after"):
            use(mesh.queue(1), second)


def test_an_event_orders_only_what_was_enqueued_before_it(mesh):
    x, y = buffer(mesh), buffer(mesh, "y")
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    event = mesh.queue(0).record_event()
    mesh.queue(0).enqueue_write(y, torch.ones(4))
    mesh.queue(1).wait_for_event(event)
    mesh.queue(1).enqueue_read(x)
    with pytest.raises(RaceError, match="reads y"):
        mesh.queue(1).enqueue_read(y)


def test_order_goes_through_a_third_queue(mesh):
    x = buffer(mesh)
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
    mesh.queue(2).wait_for_event(mesh.queue(1).record_event())
    mesh.queue(2).enqueue_read(x)


def test_different_devices_and_different_buffers_do_not_collide(mesh):
    x, y = buffer(mesh), buffer(mesh, "y")
    mesh.queue(0).enqueue_write(x, torch.ones(2), coordinate=(0,))
    mesh.queue(1).enqueue_write(x, torch.ones(2), coordinate=(1,))
    mesh.queue(2).enqueue_write(y, torch.ones(4))
    mesh.queue(0).enqueue_workload(work(x, (0,)))
    mesh.queue(1).enqueue_workload(work(x, (1,)))
    with pytest.raises(RaceError, match=r"writes x at \(1,\)|reads x at \(1,\)"):
        mesh.queue(0).enqueue_workload(work(x))


def test_a_read_of_memory_that_nothing_has_written_is_told(mesh):
    x = buffer(mesh)
    with pytest.raises(RaceError, match=r"reads x at \(0,\), where nothing has been written"):
        mesh.queue().enqueue_read(x)
    mesh.queue().enqueue_write(x, torch.ones(2), coordinate=(0,))
    with pytest.raises(RaceError, match=r"reads x at \(1,\), where nothing has been written"):
        mesh.queue().enqueue_workload(work(buffer(mesh, "y"), reads=[x]))
    assert mesh.queue().enqueue_read(x, coordinate=(0,)).tolist() == [1, 1]


def test_unwritten_memory_holds_nan_while_races_are_checked():
    with open_mesh_device((2,), check="races") as mesh:
        assert buffer(mesh).handle(0).isnan().all()
    with open_mesh_device((2,)) as mesh:
        assert buffer(mesh).handle(0).eq(0).all()


def test_memory_that_is_given_out_again_must_be_written_after_its_last_use(mesh):
    x = buffer(mesh, "old")
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    x.free()
    y = buffer(mesh, "new")
    assert y.address == x.address
    with pytest.raises(RaceError, match=r"writes new at .*not ordered after write old"):
        mesh.queue(1).enqueue_write(y, torch.ones(4))
    mesh.queue(0).enqueue_write(y, torch.ones(4))  # the same queue is in order
    with pytest.raises(RaceError, match="not ordered"):
        mesh.queue(1).enqueue_read(y)


def test_what_was_in_memory_before_does_not_count_as_written(mesh):
    x = buffer(mesh, "old")
    mesh.queue(0).enqueue_write(x, torch.ones(4), blocking=True)
    x.free()
    with pytest.raises(RaceError, match="nothing has been written"):
        mesh.queue(0).enqueue_read(buffer(mesh, "new"))


def test_a_replay_reads_and_writes_what_its_commands_do(mesh):
    x, y = buffer(mesh), buffer(mesh, "y")
    mesh.queue(0).enqueue_write(x, torch.ones(4), blocking=True)
    mesh.queue(0).enqueue_write(y, torch.ones(4), blocking=True)
    with mesh.capture() as trace:
        mesh.queue(0).enqueue_workload(work(y, reads=[x]))
    mesh.execute_trace(trace, 0, blocking=False)
    with pytest.raises(RaceError, match="not ordered after replay trace"):
        mesh.queue(1).enqueue_write(x, torch.ones(4))
    mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
    mesh.queue(1).enqueue_write(x, torch.ones(4))


def test_what_a_trace_writes_first_may_be_unwritten(mesh):
    x, y = buffer(mesh), buffer(mesh, "y")
    fill = MeshWorkload()
    fill.add_program(None, Program(lambda x: x.fill_(2), writes=[x]))
    with mesh.capture() as trace:
        mesh.queue().enqueue_workload(fill)
    with mesh.capture() as reading:
        mesh.queue().enqueue_workload(work(y, reads=[x]))
    with pytest.raises(RaceError, match="nothing has been written"):
        mesh.execute_trace(reading)
    mesh.execute_trace(trace)
    assert mesh.queue().enqueue_read(x).tolist() == [2] * 4


def test_a_tensor_over_a_buffer_is_ordered_by_waiting(mesh):
    x = buffer(mesh)
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    tensor = loom.from_buffer(x)
    tensor.add_(1)
    mesh.queue(1).enqueue_workload(work(x))
    assert tensor.tolist() == [3] * 4
    mesh.queue(2).enqueue_read(x)


def test_queues_of_submeshes_are_watched_too(mesh):
    x = buffer(mesh)
    mesh.queue(0).enqueue_write(x, torch.ones(4))
    x.free()
    part = mesh.create_submesh((1,))
    y = create_mesh_buffer(part, global_shape=(2,), name="y")
    with pytest.raises(RaceError, match="not ordered after write x"):
        part.queue(0).enqueue_write(y, torch.ones(2))


def test_without_check_nothing_is_watched_and_an_unknown_check_is_refused():
    with open_mesh_device((2,), num_command_queues=2) as mesh:
        x = buffer(mesh)
        mesh.queue(0).enqueue_write(x, torch.ones(4))
        mesh.queue(1).enqueue_read(x)
    with pytest.raises(ArgumentError, match="there is no check 'race'"):
        open_mesh_device((2,), check="race")
