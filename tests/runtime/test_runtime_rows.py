"""Checklist rows about the mesh runtime, one test each."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import ttnn
from meshloom.errors import (
    ArgumentError,
    ClosedError,
    MeshError,
    MeshloomError,
    OutOfMemoryError,
    RaceError,
    ShapeError,
)
from meshloom.processes import discovery as control
from meshloom.runtime import (
    MeshCoordinateRange,
    MeshDevice,
    MeshShape,
    MeshType,
    MeshWorkload,
    ProcessDriver,
    Program,
    ShardedBufferConfig,
    VirtualDriver,
    close_mesh_device,
    create_mesh_buffer,
    enqueue_mesh_workload,
    open_mesh_device,
    synchronize_mesh_device,
    tilize,
    untilize,
)
from meshloom.runtime.card import Card
from meshloom.runtime.memory import Allocator
from meshloom.runtime.virtual import SimulatedClock
from meshloom.tensor import entries as calls
from test_runtime_cards import Stranger, Strangers

ROOT = Path(__file__).resolve().parents[2]


def sharded(mesh: MeshDevice, *shape: int, shard: tuple[int, ...], **options: Any) -> Any:
    return create_mesh_buffer(mesh, layout="sharded", global_shape=shape, shard_shape=shard, **options)


def on_all(kernel: Any, *buffers: Any, where: Any = None, **options: Any) -> MeshWorkload:
    workload = MeshWorkload()
    workload.add_program(where, Program(kernel, updates=buffers, **options))
    return workload


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def write_place(x: torch.Tensor, coordinate: tuple[int, ...]) -> None:
    x.copy_(torch.tensor(coordinate, dtype=x.dtype))


def test_row_029_one_mesh_device_launches_on_8_cards_with_one_call():
    with open_mesh_device((2, 4)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        enqueue_mesh_workload(mesh, on_all(write_place, x))
        assert mesh.counts["launch"] == 8
        for place in mesh.coordinates():
            assert mesh.queue().enqueue_read(x, coordinate=place).tolist() == list(place)


def test_row_030_a_mesh_device_is_a_grid_of_devices_in_row_major_order():
    with open_mesh_device((2, 4)) as mesh:
        assert mesh.shape == (2, 4) and mesh.num_devices == mesh.get_num_devices() == 8
        assert [mesh.get_device(r, c).info().index for r in range(2) for c in range(4)] == mesh.get_device_ids()
        assert mesh.get_device((1, 2)) is mesh.get_device(1, 2)
        for outside in ((2, 0), (0, 4), (-1, 0), (0,)):
            with pytest.raises(MeshError, match="is not on the mesh"):
                mesh.get_device(outside)


@pytest.mark.parametrize("driver", [VirtualDriver, Strangers, ProcessDriver])
def test_row_031_and_071_two_programs_on_two_ranges_run_on_exactly_their_coordinates(driver):
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        workload = MeshWorkload()
        workload.add_program(MeshCoordinateRange((0, 0), (0, 1)), Program(lambda x: x.fill_(1), updates=[x]))
        workload.add_program(MeshCoordinateRange((1, 1), (1, 1)), Program(lambda x: x.fill_(2), updates=[x]))
        mesh.queue().enqueue_write(x, [0.0])
        enqueue_mesh_workload(mesh, workload)
        found = [mesh.queue().enqueue_read(x, coordinate=place).item() for place in mesh.coordinates()]
        assert found == [1, 1, 0, 2] and mesh.counts["launch"] == 3


def test_row_032_overlapping_ranges_are_refused():
    workload = MeshWorkload()
    workload.add_program(((0, 0), (1, 1)), Program(lambda: None))
    with pytest.raises(ValueError, match=r"range \(1, 1\)\.\.\(2, 2\) overlaps \(0, 0\)\.\.\(1, 1\)"):
        workload.add_program(((1, 1), (2, 2)), Program(lambda: None))
    workload.add_program(((0, 2), (1, 3)), Program(lambda: None))


def test_row_033_a_replicated_buffer_is_read_back_from_every_card():
    with open_mesh_device((2, 4)) as mesh:
        x = create_mesh_buffer(mesh, layout="replicated", global_shape=(3, 2))
        value = torch.randn(3, 2)
        mesh.queue().enqueue_write(x, value)
        for place in mesh.coordinates():
            assert mesh.queue().enqueue_read(x, coordinate=place).equal(value)


def test_row_034_card_i_reads_back_exactly_its_slice():
    with open_mesh_device((2, 4)) as mesh:
        x = sharded(mesh, 8, 8, shard=(4, 2))
        value = torch.randn(8, 8)
        mesh.queue().enqueue_write(x, value)
        for r, c in mesh.coordinates():
            expected = value[4 * r : 4 * r + 4, 2 * c : 2 * c + 2]
            assert mesh.queue().enqueue_read(x, coordinate=(r, c)).equal(expected)


@pytest.mark.parametrize("orientation", ["row_major", "col_major"])
def test_row_035_orientation_places_shards_along_rows_or_down_columns(orientation):
    with open_mesh_device((2, 4)) as mesh:
        config = ShardedBufferConfig(256, (8, 8), (1, 8), orientation)
        x = create_mesh_buffer(mesh, config)
        value = torch.arange(64.0).view(8, 8)
        mesh.queue().enqueue_write(x, value)
        for r, c in mesh.coordinates():
            number = r * 4 + c if orientation == "row_major" else c * 2 + r
            assert mesh.queue().enqueue_read(x, coordinate=(r, c)).equal(value[number : number + 1])
        assert mesh.queue().enqueue_read(x).equal(value)
        half = create_mesh_buffer(mesh, ShardedBufferConfig(None, (8, 8), (0, 2), "row_major"))
        mesh.queue().enqueue_write(half, value)
        assert mesh.queue().enqueue_read(half, coordinate=(1, 2)).equal(value[:, 4:6])


def test_row_036_enqueue_finish_output_correct():
    with open_mesh_device((2, 4)) as mesh:
        x = sharded(mesh, 8, 8, shard=(4, 2))
        queue = mesh.queue()
        queue.enqueue_write(x, torch.zeros(8, 8))
        queue.enqueue_workload(on_all(add_one, x))
        queue.finish()
        assert queue.enqueue_read(x).eq(1).all()


def test_row_037_a_read_that_does_not_block_is_complete_after_finish():
    gate = threading.Event()
    with open_mesh_device((2,)) as mesh:
        x = sharded(mesh, 4, shard=(2,))
        queue, out = mesh.queue(), torch.full((4,), -1.0)
        queue.enqueue_write(x, torch.arange(4.0), blocking=True)
        queue.enqueue_workload(on_all(lambda x: gate.wait() and x.add_(1), x, vectorised=True))
        pending = queue.enqueue_read(x, out=out, blocking=False)
        assert not pending.done() and out.eq(-1).all()
        gate.set()
        queue.finish()
        assert pending.done() and out.tolist() == pending.result().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("driver", [VirtualDriver, Strangers])
def test_row_038_and_075_two_queues_overlap_and_are_ordered_only_by_events(driver):
    met = threading.Barrier(2, timeout=30)
    with open_mesh_device((2,), driver=driver(), num_command_queues=2) as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(1,)) for _ in range(2))
        meet = lambda x, coordinate: met.wait() if coordinate == (0,) else None  # noqa: E731
        mesh.queue(0).enqueue_workload(on_all(meet, x))
        mesh.queue(1).enqueue_workload(on_all(meet, y))  # neither would end without the other
        mesh.synchronize()
        mesh.queue(0).enqueue_write(x, [5.0])
        mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
        assert mesh.queue(1).enqueue_read(x).tolist() == [5.0]


def test_row_039_no_kernel_is_running_after_finish():
    with open_mesh_device((2, 2)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        for card in mesh.cards:
            card.slow_down(launch=0.05)
        began = time.monotonic()
        mesh.queue().enqueue_workload(on_all(add_one, x))
        mesh.queue().finish()
        assert not any(card.is_busy for card in mesh.cards)
        assert time.monotonic() - began >= 0.05  # they were


def handed_over(seed: int, with_event: bool) -> bool:
    """Whether queue 1 reads what queue 0 wrote, in the order of completion that a seed gives."""
    with open_mesh_device((2,), num_command_queues=2, stress=seed) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        mesh.queue(0).enqueue_workload(on_all(add_one, x))
        mesh.queue(0).enqueue_workload(on_all(add_one, x))
        if with_event:
            mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
        return mesh.queue(1).enqueue_read(x).item() == 2


def test_row_040_with_an_event_100_of_100_are_right_and_without_it_some_are_wrong():
    assert all(handed_over(seed, True) for seed in range(100))
    assert not all(handed_over(seed, False) for seed in range(100))


def test_row_040_the_host_waits_for_an_event():
    gate = threading.Event()
    with open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        mesh.queue().enqueue_workload(on_all(lambda x: gate.wait(), x, vectorised=True))
        event = mesh.queue().record_event()
        assert not event.query()
        gate.set()
        event.synchronize()
        assert event.query()


def test_row_041_replaying_100_times_equals_100_eager_runs():
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        y.add_(x)
        x.mul_(1.01)

    found = []
    for replay in (False, True):
        with open_mesh_device((2, 2)) as mesh:
            x, y = (sharded(mesh, 4, 4, shard=(2, 2)) for _ in range(2))
            queue, work = mesh.queue(), on_all(step, x, y)
            queue.enqueue_write(x, torch.ones(4, 4))
            queue.enqueue_write(y, torch.zeros(4, 4))
            if replay:
                with mesh.capture() as trace:
                    queue.enqueue_workload(work)
                assert queue.enqueue_read(y).eq(0).all()  # nothing ran
                for _ in range(100):
                    mesh.execute_trace(trace, blocking=False)
            else:
                for _ in range(100):
                    queue.enqueue_workload(work)
            found.append(queue.enqueue_read(y))
    assert found[0].equal(found[1]) and found[0].gt(100).all()


def test_row_042_add_on_the_left_half_and_mul_on_the_right_half_in_one_enqueue():
    with open_mesh_device((2, 4)) as mesh:
        a, b, c = (sharded(mesh, 4, 8, shard=(2, 2)) for _ in range(3))
        workload = MeshWorkload()
        add, mul = (lambda a, b, c: c.copy_(a + b)), (lambda a, b, c: c.copy_(a * b))
        workload.add_program(((0, 0), (1, 1)), Program(add, [a, b], [c]))
        workload.add_program(((0, 2), (1, 3)), Program(mul, [a, b], [c]))
        left, right = torch.randn(4, 8), torch.randn(4, 8)
        mesh.queue().enqueue_write(a, left)
        mesh.queue().enqueue_write(b, right)
        enqueue_mesh_workload(mesh, workload)
        expected = torch.cat([(left + right)[:, :4], (left * right)[:, 4:]], 1)
        assert mesh.queue().enqueue_read(c).equal(expected)


def test_row_052_and_057_without_ids_a_mesh_takes_the_devices_that_are_discovered(monkeypatch):
    monkeypatch.setenv("MESHLOOM_VIRTUAL_DEVICES", "6")
    monkeypatch.setenv("MESHLOOM_VISIBLE_DEVICES", "5,1,3,2")
    assert [device.id for device in control.discover()] == [5, 1, 3, 2]
    with open_mesh_device((2, 2)) as mesh:
        assert mesh.get_device_ids() == [5, 1, 3, 2]
    with open_mesh_device() as mesh:
        assert mesh.shape == (4,)
    with pytest.raises(MeshError, match="needs 8 devices and there are 4"):
        open_mesh_device((2, 4))
    monkeypatch.setenv("MESHLOOM_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MESHLOOM_VIRTUAL_DEVICES")
    with open_mesh_device((2, 4)) as mesh:  # virtual devices need no declaration
        assert mesh.num_devices == 8


def test_row_053_the_control_plane_tells_the_shape_of_an_open_mesh():
    with open_mesh_device((2, 4)) as mesh:
        assert control.control(mesh.mesh).mesh_shape("global") == (2, 4)


def test_row_056_commands_never_ask_the_control_plane(monkeypatch):
    with open_mesh_device((2, 2), num_command_queues=2) as mesh:

        def refused(*_: Any) -> None:
            raise AssertionError("the data plane asked for devices")

        monkeypatch.setattr(control, "discover", refused)
        monkeypatch.setattr("meshloom.runtime.opening.discover", refused)
        monkeypatch.setattr(VirtualDriver, "enumerate", refused)
        x = sharded(mesh, 4, 4, shard=(2, 2))
        mesh.queue().enqueue_write(x, torch.zeros(4, 4))
        enqueue_mesh_workload(mesh, on_all(add_one, x))
        mesh.queue(1).wait_for_event(mesh.queue().record_event())
        assert mesh.queue(1).enqueue_read(x).eq(1).all()
        with mesh.capture() as trace:
            mesh.queue().enqueue_workload(on_all(add_one, x))
        trace.replay()
        assert mesh.create_submesh((1, 2)).memory_usage()
        with pytest.raises(AssertionError, match="the data plane asked"):
            open_mesh_device((2, 2))


def test_row_061_the_example_goes_through_the_seven_steps():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "seven_steps.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [line[0] for line in steps] == list("123456777")
    for word in ("open", "allocate", "program", "write", "enqueue", "synchronise", "trace"):
        assert word in done.stdout


def test_row_062_the_same_program_on_all_coordinates_writes_each_its_own():
    with open_mesh_device((4, 8)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        enqueue_mesh_workload(mesh, on_all(write_place, x))
        places = [tuple(mesh.queue().enqueue_read(x, coordinate=p).int().tolist()) for p in mesh.coordinates()]
        assert places == list(mesh.coordinates())


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (8,), (2, 2, 2)])
def test_row_063_a_sharded_write_then_read_is_the_identity(shape):
    with open_mesh_device(shape) as mesh:
        x = sharded(mesh, 4 * mesh.num_devices, 3, shard=(4, 3))
        value = torch.randn(4 * mesh.num_devices, 3)
        mesh.queue().enqueue_write(x, value)
        assert mesh.queue().enqueue_read(x).equal(value)


def test_row_064_slow_and_fast_dispatch_give_equal_results(monkeypatch):
    def run(**options: Any) -> torch.Tensor:
        with open_mesh_device((2, 2), num_command_queues=2, **options) as mesh:
            x = sharded(mesh, 4, 4, shard=(2, 2))
            mesh.queue().enqueue_write(x, torch.arange(16.0).view(4, 4))
            mesh.queue().enqueue_workload(on_all(lambda x: x.copy_(x.softmax(0) + x.sum()), x))
            mesh.queue(1).wait_for_event(mesh.queue().record_event())
            with mesh.capture() as trace:
                mesh.queue().enqueue_workload(on_all(add_one, x))
            mesh.synchronize()
            trace.replay()
            assert mesh.system.dispatch == expected
            return mesh.queue(1).enqueue_read(x)

    expected = "fast"
    fast = run()
    expected = "slow"
    assert run(dispatch="slow").equal(fast)
    monkeypatch.setenv("MESHLOOM_DISPATCH", "slow")
    assert run().equal(fast)
    with pytest.raises(ArgumentError, match="there is no dispatch 'slwo'"):
        open_mesh_device((2,), dispatch="slwo")


@pytest.mark.parametrize("driver", [VirtualDriver, Strangers, ProcessDriver])
def test_row_065_and_069_a_card_is_used_through_memory_kernels_and_waiting_alone(driver):
    """Firmware, launch messages, multicast and structs are the driver's business: the protocol has no verb for them."""
    spoken = {name for name in vars(Card) if not name.startswith("_")}
    assert spoken >= {"alloc", "write", "read", "load", "launch", "wait"}
    assert not [name for name in spoken if re.search("firmware|message|multicast|struct|abi|register", name)]
    assert {name for name in vars(Stranger) if not name.startswith("_")} <= spoken  # a card that has nothing else
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        enqueue_mesh_workload(mesh, on_all(write_place, x))
        for place in mesh.coordinates():
            assert mesh.queue().enqueue_read(x, coordinate=place).tolist() == list(place)


def test_row_066_memory_is_aligned_freed_joined_reused_and_never_overcommitted():
    memory = Allocator("DRAM", 64 * 10, banks=1, devices=1)
    a, b, c = (memory.allocate(size, 1, name) for size, name in ((1, "a"), (65, "b"), (64, "c")))
    assert [each.address for each in (a, b, c)] == [0, 64, 192]
    memory.release(a)
    memory.release(b)
    assert memory.allocate(192, 1, "d").address == 0  # joined
    assert memory.resize(c, 300).address == 192  # grown in place
    with pytest.raises(MemoryError, match="does not fit into DRAM"):
        memory.allocate(65 * 4, 1, "e")
    assert all(region.address % 64 == 0 for region in memory.live())


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (2, 64, 64), (2, 3, 32, 64)])
def test_row_067_untilize_is_the_inverse_of_tilize(shape):
    x = torch.randn(shape)
    assert untilize(tilize(x), shape).equal(x)
    rows, cols = shape[-2:]
    first = x.reshape(-1, rows, cols)[0].numpy()
    order = first.reshape(rows // 32, 2, 16, cols // 32, 2, 16).transpose(0, 3, 1, 4, 2, 5).reshape(-1)
    assert tilize(x).reshape(-1, rows * cols)[0].tolist() == order.tolist()


def test_row_067_sides_that_do_not_fit_are_padded_or_refused():
    x = torch.randn(2, 33, 5)
    with pytest.raises(ShapeError, match=r"sides \[33, 5\] are no multiples of 32"):
        tilize(x)
    padded = tilize(x, pad=True)
    assert padded.shape == (2, 64 * 32) and untilize(padded, x.shape).equal(x)


def test_row_068_a_bulk_read_equals_the_slow_read():
    with open_mesh_device((2, 4)) as mesh:
        x = sharded(mesh, 8, 8, shard=(4, 2))
        mesh.queue().enqueue_write(x, torch.randn(8, 8))
        bulk = mesh.queue().enqueue_read(x)
        slow = torch.empty(8, 8)
        for place in mesh.coordinates():
            slow[x.layout.part(place)] = mesh.queue().enqueue_read(x, coordinate=place)
        assert bulk.equal(slow)


def test_row_070_and_072_a_mesh_wraps_any_cards_and_a_handle_is_the_cards_own():
    with open_mesh_device((2, 2), driver=Strangers()) as mesh:
        x = sharded(mesh, 4, 4, shard=(2, 2))
        mesh.queue().enqueue_write(x, torch.arange(16.0).view(4, 4), blocking=True)
        card = mesh.get_device(1, 0)
        assert card.memory[x.handle(1, 0)].tolist() == [[8, 9], [12, 13]]
    assert card.closed


@pytest.mark.parametrize("dispatch", ["fast", "slow"])
def test_row_073_launches_are_in_row_major_order_in_1000_runs(dispatch):
    with open_mesh_device((2, 2), dispatch=dispatch) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        workload = MeshWorkload()
        workload.add_program(((0, 1), (1, 1)), Program(write_place, updates=[x]))
        workload.add_program(((0, 0), (1, 0)), Program(write_place, updates=[x]))
        with mesh.logged() as log:
            for _ in range(1000):
                mesh.queue().enqueue_workload(workload)
            mesh.queue().finish()
        assert [entry.coordinate for entry in log] == list(mesh.coordinates()) * 1000


def test_row_074_and_081_blocking_returns_when_all_cards_are_done_and_otherwise_before_the_slowest():
    with open_mesh_device((1, 2)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        slowest = mesh.get_device(0, 1)
        slowest.slow_down(launch=0.1)
        enqueue_mesh_workload(mesh, on_all(add_one, x), blocking=True)
        assert not slowest.is_busy
        event_before = time.monotonic()
        enqueue_mesh_workload(mesh, on_all(add_one, x), blocking=False)
        event = mesh.queue().record_event()
        assert not event.query()
        mesh.queue().finish()
        assert event.query() and time.monotonic() - event_before >= 0.1


def test_row_076_and_091_ids_and_paths_choose_the_cards_and_their_order():
    spellings = (
        lambda: open_mesh_device([3, 1], (1, 2)),
        lambda: open_mesh_device(["virtual:3", "virtual:1"], (1, 2)),
        lambda: open_mesh_device(["/dev/tenstorrent/3", "/dev/tenstorrent/1"], (1, 2), driver=VirtualDriver()),
        lambda: open_mesh_device([Path("/dev/tenstorrent/3"), 1], MeshShape(1, 2), driver=VirtualDriver()),
        lambda: open_mesh_device((1, 2), [3, 1]),
        lambda: open_mesh_device((1, 2), device_ids=(3, 1)),
        lambda: open_mesh_device(MeshShape(1, 2), [3, 1]),
        lambda: open_mesh_device(mesh_shape=MeshShape(1, 2), device_ids=[3, 1], mesh_type=MeshType.Ring),
    )
    for spelled in spellings:
        with spelled() as mesh:
            assert mesh.get_device_ids() == [3, 1] and mesh.shape == (1, 2)
            assert mesh.get_device(0, 0).info().index == 3
    with pytest.raises(ArgumentError, match="names no device"):
        open_mesh_device(["/dev/null"], (1,))


def test_row_077_a_replicated_write_is_n_writes_of_the_same_payload():
    for dispatch in ("fast", "slow"):
        with open_mesh_device((2, 4), dispatch=dispatch) as mesh, mesh.logged() as log:
            x = create_mesh_buffer(mesh, global_shape=(16,))
            mesh.queue().enqueue_write(x, torch.ones(16), blocking=True)
            assert [(entry.kind, entry.nbytes) for entry in log] == [("write", 64)] * 8


def test_row_078_a_sharded_write_is_n_writes_of_one_nth():
    for dispatch in ("fast", "slow"):
        with open_mesh_device((2, 4), dispatch=dispatch) as mesh, mesh.logged() as log:
            x = sharded(mesh, 16, shard=(2,))
            mesh.queue().enqueue_write(x, torch.ones(16), blocking=True)
            assert [(entry.kind, entry.nbytes) for entry in log] == [("write", 8)] * 8


@pytest.mark.parametrize("dispatch", ["fast", "slow"])
def test_row_079_and_080_a_kernel_is_compiled_once_and_launched_on_each_of_8_cards(dispatch):
    with open_mesh_device((2, 4), dispatch=dispatch) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        enqueue_mesh_workload(mesh, on_all(write_place, x))
        assert mesh.counts["compiles"] == 1 and mesh.counts["launch"] == 8
        enqueue_mesh_workload(mesh, on_all(write_place, x))
        assert mesh.counts["compiles"] == 1 and mesh.counts["launch"] == 16
        enqueue_mesh_workload(mesh, on_all(add_one, x))
        assert mesh.counts["compiles"] == 2


def test_row_092_create_mesh_buffer_takes_both_layouts_and_refuses_shards_that_do_not_tile():
    with open_mesh_device((2, 4)) as mesh:
        assert create_mesh_buffer(mesh, layout="replicated", global_shape=(4, 4)).local_shape == (4, 4)
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 1))
        assert x.local_shape == (2, 1)
        with pytest.raises(ShapeError, match=r"shards of 3 do not tile dim 0 of size 4 \(4 % 3 = 1\)"):
            create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(3, 1))
        with pytest.raises(ShapeError, match="16 shards do not fit on 8 devices"):
            create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(1, 1))
        with pytest.raises(ArgumentError, match="there is no layout 'shard'"):
            create_mesh_buffer(mesh, layout="shard", global_shape=(4, 4))


def test_row_093_enqueue_mesh_workload_blocks_unless_told_otherwise():
    gate = threading.Event()
    with open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        enqueue_mesh_workload(mesh, on_all(lambda x: gate.wait(), x, vectorised=True), blocking=False)
        gate.set()
        enqueue_mesh_workload(mesh, on_all(lambda x: x.fill_(3), x))
        assert x.handle(1).item() == 3


COMPILING = """
import sys, torch
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device

def kernel(x, by):
    for _ in range(3):
        x.add_(by)

sys.stdin.readline()
for turn in range(20):
    with open_mesh_device((2, 2)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        workload = MeshWorkload()
        workload.add_program(None, Program(kernel, updates=[x], args={"by": turn}))
        mesh.queue().enqueue_workload(workload)
        assert mesh.queue().enqueue_read(x).tolist() == [3.0 * turn] * 4
        print(mesh.counts["compiles"])
"""


@pytest.mark.slow
def test_row_097_four_processes_compile_the_same_kernel_at_once_without_corruption(tmp_path):
    where = tmp_path / "cache"
    environment = {**os.environ, "MESHLOOM_CACHE": str(where), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        for _ in range(4)
    ]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert all(len(counts) == 20 for counts in printed)
    compiled = sum(int(each) for counts in printed for each in counts)
    assert 1 <= compiled <= 4  # each at most once, and whoever came late found it
    files = list(where.iterdir())
    assert len(files) == 1 and not files[0].name.startswith(".")


def _scalar_and_used(mesh: Any) -> dict[str, Any]:
    """Tensors of all kinds on a mesh, each used once, so that whatever remembers calls remembers these."""
    x = loom.randn(8, 4, mesh=mesh, placements="S(0), S(1)")
    leaf = loom.ones(4, 4, mesh=mesh, placements="S(0), R").requires_grad_()
    weight = loom.Parameter(torch.randn(4, 4), mesh, "R, S(0)")
    (leaf @ weight).sum().backward()
    made = {"x": x, "leaf": leaf, "weight": weight, "s": loom.ones((), mesh=mesh), "loss": (leaf * 2).sum()}
    made["optimizer"] = torch.optim.SGD([weight], lr=0.1)
    for name, use in USES.items():
        if name not in ("loss.backward()", "torch.autograd.grad"):
            use(**made)
    return made


USES: dict[str, Any] = {
    "x + x": lambda x, **_: x + x,
    "x + 1": lambda x, **_: x + 1,
    "1 + x": lambda x, **_: 1 + x,
    "x @ x.T": lambda x, **_: x @ x.T,
    "x.exp()": lambda x, **_: x.exp(),
    "torch.add": lambda x, **_: torch.add(x, x),
    "x.sum()": lambda x, **_: x.sum(),
    "softmax": lambda x, **_: torch.softmax(x, -1),
    "fallback": lambda x, **_: torch.fft.fft(x),
    "x[0]": lambda x, **_: x[0],
    "x.view": lambda x, **_: x.view(32),
    "x.detach()": lambda x, **_: x.detach(),
    "x.clone()": lambda x, **_: x.clone(),
    "x.double()": lambda x, **_: x.to(torch.float64),
    "x.add_(1)": lambda x, **_: x.add_(1),
    "x.zero_()": lambda x, **_: x.zero_(),
    "x[0] = 1": lambda x, **_: x.__setitem__(0, 1.0),
    "x.to_torch()": lambda x, **_: x.to_torch(),
    "x.tolist()": lambda x, **_: x.tolist(),
    "x.numpy()": lambda x, **_: x.numpy(),
    "x.block": lambda x, **_: x.block,
    "x.shard_at": lambda x, **_: x.shard_at((0, 0)),
    "x.redistribute": lambda x, **_: x.redistribute("R, R"),
    "all_reduce": lambda x, **_: loom.collectives.all_reduce(x),
    "zeros_like": lambda x, **_: loom.zeros_like(x),
    "deepcopy": lambda x, **_: copy.deepcopy(x),
    "pickle": lambda x, **_: pickle.dumps(x),
    "explain": lambda x, **_: loom.explain(lambda: x + x),
    "x.mesh": lambda x, **_: x.mesh,
    "s.item()": lambda s, **_: s.item(),
    "bool(s)": lambda s, **_: bool(s),
    "leaf.grad": lambda leaf, **_: leaf.grad,
    "weight.grad": lambda weight, **_: weight.grad,
    "weight + 1": lambda weight, **_: weight + 1,
    "optimizer.step()": lambda optimizer, **_: optimizer.step(),
    "loss.backward()": lambda loss, **_: loss.backward(),
    "torch.autograd.grad": lambda loss, leaf, **_: torch.autograd.grad(loss, leaf),
}


def test_row_177_every_use_of_a_tensor_on_a_closed_mesh_device_raises():
    with open_mesh_device((2, 2)) as mesh:
        held = _scalar_and_used(mesh)
    for name, use in USES.items():
        with pytest.raises(ClosedError):
            pytest.fail(f"{name} works on a closed mesh: {use(**held)!r:.80}")
    for made in (
        lambda: loom.ones(4, mesh=mesh),
        lambda: loom.distribute([1.0], mesh.mesh),
        lambda: loom.Parameter(torch.ones(4), mesh, "S(0), S(0)"),
    ):
        with pytest.raises(ClosedError, match="has been closed"):
            made()
    x = held["x"]
    assert repr(x) == "Tensor f32[8, 4](S(0), S(1)) on Mesh(x0=2, x1=2), closed" and x.shape == (8, 4)
    with pytest.raises(ClosedError) as caught:
        x + x
    assert str(caught.value) == (
        "f32[8, 4](S(0), S(1)) on Mesh(x0=2, x1=2) is on a mesh device that has been closed\n"
        "  fix  read it before: x.to_torch() has its values"
    )


def test_row_177_closing_one_mesh_leaves_others_of_its_shape_alone():
    plain = loom.ones(4, mesh=loom.open_mesh((2, 2)), placements="S(0), R")
    with open_mesh_device((2, 2)) as open_one:
        kept = loom.ones(4, mesh=open_one, placements="S(0), R")
        with open_mesh_device((2, 2)) as other:
            loom.ones(4, mesh=other, placements="S(0), R") + 1
            part = other.create_submesh((1, 2))
            lost = loom.ones(4, mesh=part, placements="R, S(0)")
            part.close()
            with pytest.raises(ClosedError):
                lost + 1
        assert (kept + 1).tolist() == [2.0] * 4
    assert (plain + 1).tolist() == [2.0] * 4
    with open_mesh_device((2, 2)) as again:
        assert (loom.ones(4, mesh=again, placements="S(0), R") + 1).tolist() == [2.0] * 4


def test_an_open_mesh_device_keeps_no_more_calls_than_the_cache_holds(monkeypatch):
    calls.CACHE.clear()
    monkeypatch.setattr(calls, "LIMIT", 4)
    with open_mesh_device((2,)) as mesh:
        for size in range(1, 10):
            loom.ones(size, mesh=mesh) + 1
        kept = calls._LEASED[mesh.mesh.lease]
        assert kept == set(calls.CACHE) and len(kept) == 4
    assert not calls.CACHE and mesh.mesh.lease not in calls._LEASED


def test_row_177_use_after_close_raises_in_the_runtime_and_in_ttnn():
    with open_mesh_device((2, 2)) as mesh:
        x = sharded(mesh, 4, 4, shard=(2, 2))
        view, queue = loom.from_buffer(x), mesh.queue()
    for use in (
        lambda: mesh.queue(),
        lambda: queue.enqueue_write(x, torch.ones(4, 4)),
        lambda: queue.enqueue_read(x),
        lambda: mesh.synchronize(),
        lambda: sharded(mesh, 4, 4, shard=(2, 2)),
        lambda: x.handle(0, 0),
        lambda: loom.from_buffer(x),
        lambda: view + 1,
        lambda: mesh.create_submesh((1, 1)),
    ):
        with pytest.raises(ClosedError):
            use()
    device = ttnn.open_mesh_device(ttnn.MeshShape(2, 2))
    mapper = ttnn.ShardTensorToMesh(device, dim=0)
    t = ttnn.from_torch(torch.ones(4, 4), layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=mapper)
    ttnn.close_mesh_device(device)
    for use in (
        lambda: ttnn.add(t, t),
        lambda: ttnn.to_torch(t),
        lambda: t + 1,
        lambda: ttnn.from_torch(torch.ones(2), device=device),
        lambda: ttnn.distributed.matmul(t, t),
        lambda: ttnn.all_gather(t, dim=0),
    ):
        with pytest.raises(MeshloomError, match=r"closed|not allocated"):
            use()


def test_tensors_on_cards_with_memory_of_their_own_lie_there():
    with open_mesh_device((2, 2), driver=Strangers()) as mesh:
        for make in (
            lambda: loom.ones(4, mesh=mesh),
            lambda: loom.randn(4, mesh=mesh.mesh),
            lambda: loom.distribute(torch.ones(4), mesh),
            lambda: loom.from_local([torch.ones(1)] * 4, mesh, "S(0), S(0)"),
            lambda: loom.Parameter(torch.ones(4), mesh, "S(0), S(0)"),
        ):
            made = make()
            held = [next(iter(card.memory.values())) for card in mesh.cards]
            assert torch.cat(held).equal(made.to_torch().detach())
            del made
            assert not any(card.memory for card in mesh.cards)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2), driver=Strangers()) as device:
        host = ttnn.from_torch(torch.ones(4, 4))
        for make in (lambda: ttnn.from_torch(torch.ones(4, 4), device=device), lambda: ttnn.to_device(host, device)):
            made = make()
            assert all(next(iter(card.memory.values())).sum() == 16 for card in device.runtime.cards)
            del made


def test_row_098_shuffled_completion_finds_a_planted_race_that_the_usual_order_hides():
    def sum_of(seed: int | None, with_event: bool) -> float:
        with open_mesh_device((2,), num_command_queues=2, stress=seed) as mesh:
            x = create_mesh_buffer(mesh, global_shape=(1,))
            mesh.queue(0).enqueue_write(x, [1.0], blocking=seed is None)  # a host barrier hides it
            if with_event:
                mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
            mesh.queue(1).enqueue_workload(on_all(add_one, x))
            mesh.synchronize()
            return mesh.queue(0).enqueue_read(x).item()

    assert sum_of(None, False) == 2
    assert {sum_of(seed, False) for seed in range(50)} == {1, 2}
    assert {sum_of(seed, True) for seed in range(50)} == {2}
    with pytest.raises(RaceError), open_mesh_device((2,), num_command_queues=2, check="races") as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        mesh.queue(0).enqueue_write(x, [1.0])
        mesh.queue(1).enqueue_workload(on_all(add_one, x))


def test_row_105_layer_1_on_device_0_and_layer_2_on_device_1():
    x, w1, w2 = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 3)
    with open_mesh_device((1, 2)) as mesh:
        first, second = mesh.create_submeshes((1, 1))
        assert (first.get_device_ids(), second.get_device_ids()) == ([0], [1])
        hidden = (loom.distribute(x, first, "R, R") @ loom.distribute(w1, first, "R, R")).relu()
        carried = loom.distribute(hidden.to_torch(), second, "R, R")
        out = carried @ loom.distribute(w2, second, "R, R")
        assert out.mesh.device_ids == (1,)
        torch.testing.assert_close(out.to_torch(), (x @ w1).relu() @ w2)


def test_row_106_a_tensor_too_large_for_one_card_is_held_sharded_over_two():
    with open_mesh_device((2,), memory=1 << 20) as mesh:
        big = torch.ones(3 << 17)  # 1.5 MiB
        x = loom.distribute(big, mesh, "S(0)")
        assert [usage.used for usage in mesh.memory_usage().values()] == [3 << 18] * 2
        with pytest.raises(OutOfMemoryError, match=r"tensor f32\[393216\]\(R\) of 1.5 MiB does not fit") as caught:
            loom.distribute(big, mesh, "R")
        assert "tensor f32[393216](S(0)), since test_runtime_rows.py:" in str(caught.value)
        assert "shard it over 2 devices or more" in str(caught.value)
        assert x.sum().item() == 3 << 17
        with pytest.raises(MemoryError):
            x * 2
        del x
        assert all(usage.used == 0 for usage in mesh.memory_usage().values())
    with open_mesh_device((1,), memory=1 << 20) as mesh, pytest.raises(MemoryError, match="does not fit"):
        loom.distribute(big, mesh)
    assert loom.distribute(big, loom.open_mesh((1,))).shape == (3 << 17,)  # without a limit nobody counts


def test_row_123_the_dram_grid_is_the_grid_of_banks():
    with open_mesh_device((2, 4), preset="t3000") as mesh:
        grid = mesh.dram_grid_size()
        assert (grid.x, grid.y, grid.num_cores) == (12, 1, 12)
        assert mesh.compute_with_storage_grid_size().num_cores == 64


def test_row_125_synchronize_returns_only_after_queued_work_on_every_device():
    with open_mesh_device((2, 2), num_command_queues=2) as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(1,)) for _ in range(2))
        part = mesh.create_submesh((1, 2))
        z = create_mesh_buffer(part, global_shape=(1,))
        for card in mesh.cards:
            card.slow_down(launch=0.03)
        mesh.queue(0).enqueue_workload(on_all(add_one, x))
        mesh.queue(1).enqueue_workload(on_all(add_one, y))
        part.queue().enqueue_workload(on_all(add_one, z))
        synchronize_mesh_device(mesh)
        assert not any(card.is_busy for card in mesh.cards)
        assert [buffer.handle(0, 0).item() for buffer in (x, y, z)] == [1, 1, 1]


def test_row_126_throughput_of_cards_of_fixed_speed_grows_with_their_number():
    def rows_per_second(devices: int) -> float:
        clock = SimulatedClock()
        with open_mesh_device((devices,), driver=VirtualDriver(clock=clock)) as mesh:
            x = sharded(mesh, devices, shard=(1,))
            for card in mesh.cards:
                card.slow_down(launch=0.02)
            for _ in range(10):
                mesh.queue().enqueue_workload(on_all(add_one, x))
            mesh.queue().finish()
            return 10 * devices / clock.now()

    assert rows_per_second(1) == pytest.approx(50)
    assert rows_per_second(8) >= 7 * rows_per_second(1)


def test_row_127_two_submeshes_run_at_once():
    met = threading.Barrier(2, timeout=30)
    with open_mesh_device((1, 2)) as mesh:
        for part in mesh.create_submeshes((1, 1)):
            x = create_mesh_buffer(part, global_shape=(1,))
            part.queue().enqueue_workload(on_all(lambda x: met.wait() and None, x, vectorised=True))
        mesh.synchronize()  # one after the other would never meet


def test_row_130_memory_usage_tells_used_free_and_peak_and_falls_after_free():
    with open_mesh_device((2, 2), memory=4096) as mesh:
        before = mesh.memory_usage()
        assert set(before) == set(mesh.coordinates())
        x = sharded(mesh, 32, 32, shard=(16, 16))
        part = create_mesh_buffer(mesh.create_submesh((1, 1)), global_shape=(16,))
        usage = mesh.memory_usage()
        assert (usage[0, 0].used, usage[1, 1].used, usage[1, 1].free) == (1024 + 64, 1024, 3072)
        x.free()
        part.free()
        after = mesh.memory_usage()[0, 0]
        assert (after.used, after.free, after.peak, after.largest_free) == (0, 4096, 1088, 4096)


def test_row_137_a_batch_that_is_not_batch_size_times_devices_is_a_clear_error():
    with open_mesh_device((1, 2)) as mesh:
        mesh.check_batch(8, per_device=4)
        with pytest.raises(ArgumentError, match="a batch of 7 is not 4 on each of 2 devices"):
            mesh.check_batch(7, per_device=4)
        with pytest.raises(ShapeError, match="shards of 4 do not tile dim 0 of size 7"):
            sharded(mesh, 7, 3, shard=(4, 3))


def test_row_138_closing_releases_the_cards_and_use_after_it_raises():
    mesh = open_mesh_device((2, 2))
    x = create_mesh_buffer(mesh, global_shape=(4,))
    cards, queue = mesh.cards, mesh.queue()
    close_mesh_device(mesh)
    close_mesh_device(mesh)
    assert all(card.closed for card in cards) and mesh.shape == (2, 2)
    for use in (
        lambda: create_mesh_buffer(mesh, global_shape=(4,)),
        lambda: queue.enqueue_read(x),
        lambda: mesh.queue(),
        lambda: mesh.create_submesh((1, 1)),
        lambda: mesh.begin_trace_capture(),
        lambda: mesh.synchronize(),
    ):
        with pytest.raises(ClosedError, match=r"MeshDevice\(2x2, 4 devices\) has been closed"):
            use()
    with open_mesh_device((2, 2)) as again:
        assert again.num_devices == 4


def test_row_139_a_shape_that_is_wrong_for_the_devices_raises():
    with pytest.raises(MeshError, match=r"shape \(2, 4\) needs 8 devices and 3 were given"):
        open_mesh_device((2, 4), device_ids=[0, 1, 2])
    with pytest.raises(MeshError, match=r"shape \(2, 4\) needs 8 devices and there are 4"):
        open_mesh_device((2, 4), driver=VirtualDriver(range(4)))
    with pytest.raises(MeshError, match="there is no device 9"):
        open_mesh_device((1, 2), device_ids=[0, 9], driver=VirtualDriver(range(4)))


def test_row_141_reading_a_tensor_whose_buffer_is_in_a_queue_waits_and_is_correct():
    gate, other = threading.Event(), threading.Event()
    with open_mesh_device((2,), num_command_queues=2) as mesh:
        x, y = (sharded(mesh, 4, shard=(2,)) for _ in range(2))
        tensor = loom.from_buffer(x)
        mesh.queue(0).enqueue_workload(on_all(lambda x: gate.wait() and x.fill_(7), x, vectorised=True))
        mesh.queue(1).enqueue_workload(on_all(lambda y: other.wait(), y, vectorised=True))
        threading.Timer(0.05, gate.set).start()
        assert tensor.to_torch().tolist() == [7] * 4  # and does not wait for queue 1
        tensor.add_(1)
        assert mesh.queue(0).enqueue_read(x).tolist() == [8] * 4
        mesh.queue(0).enqueue_workload(on_all(lambda x: x.mul_(2), x))
        assert (tensor + 1).tolist() == [17] * 4
        other.set()
