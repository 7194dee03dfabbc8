"""Checklist rows that speak of cards: virtual ones, those in processes, and blackhole-py's over its stand-in."""

from __future__ import annotations

import os
import random
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
from blackhole import MACHINE, STAND_IN, codegen, driver, install, kernels
from meshloom.collectives import Schedule, Send
from meshloom.errors import ArgumentError, DeviceError, FabricError, ModeError, OutOfMemoryError, ShapeError
from meshloom.processes import discovery
from meshloom.runtime import (
    Fault,
    MeshBufferPy,
    MeshCoordinateRange,
    MeshDevice,
    MeshDevicePy,
    MeshWorkload,
    MeshWorkloadPy,
    ProcessDriver,
    Program,
    VirtualDriver,
    all_gather,
    all_gather_host,
    all_reduce,
    all_reduce_host,
    create_mesh_buffer,
    enqueue_mesh_workload,
    open_mesh_device,
    reduce_scatter,
    reduce_scatter_host,
)
from meshloom.runtime.card import Card
from meshloom.runtime.card_schedules import Piece, run_schedule
from meshloom.runtime.drivers.blackhole_memory import Memory
from meshloom.runtime.links import Channel, Routes, Semaphore
from test_runtime_cards import Stranger, Strangers

ROOT = Path(__file__).resolve().parents[2]
FILL, MATMUL = kernels.FILL, kernels.MATMUL


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, cards=8)


DRIVERS = {"virtual": VirtualDriver, "stand-in": driver, "processes": ProcessDriver}
on_linked_cards = pytest.mark.parametrize("made", DRIVERS.values(), ids=DRIVERS)
on_any_cards = pytest.mark.parametrize("made", [*DRIVERS.values(), Strangers], ids=[*DRIVERS, "stranger"])


def sharded(mesh: MeshDevice, *shape: int, shard: tuple[int, ...], **options: Any) -> Any:
    return create_mesh_buffer(mesh, layout="sharded", global_shape=shape, shard_shape=shard, **options)


def fill(buffer: Any, value: float, where: Any = None) -> MeshWorkload:
    """A program of blackhole-py on a range."""
    workload = MeshWorkload()
    workload.add_program(where, Program(FILL, writes=[buffer], args={"value": value}))
    return workload


def test_row_065_and_069_firmware_messages_and_structs_stay_behind_the_driver():
    card = driver().open(0)
    public = {name for name in dir(card) if not name.startswith("_")}
    assert not [name for name in public if re.search("firmware|message|multicast|struct|abi|register|noc|tlb", name)]
    assert {name for name in vars(Card) if not name.startswith("_")} <= public
    card.close()


def test_row_066_memory_of_the_card_is_freed_used_again_aligned_and_has_an_end():
    with open_mesh_device((2,), driver=driver()) as mesh:
        big = create_mesh_buffer(mesh, global_shape=(3 << 20,))  # 12 of 28 MiB
        other = create_mesh_buffer(mesh, global_shape=(3 << 20,))
        with pytest.raises(OutOfMemoryError, match="does not fit into DRAM"):
            create_mesh_buffer(mesh, global_shape=(3 << 20,))
        big.free()
        again = create_mesh_buffer(mesh, global_shape=(3 << 20,))
        assert again.address == 0 and other.address % 64 == 0
        assert again.handle(1).buffer.addr == again.handle(0).buffer.addr == 0x40  # lock-step
        assert mesh.memory_usage()[1,].used >= 24 << 20


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (2, 64, 64), (33, 70)])
def test_row_067_matrices_are_tilised_on_their_way_to_the_card_and_back(shape):
    with open_mesh_device((1,), driver=driver()) as mesh:
        x, value = create_mesh_buffer(mesh, global_shape=shape), torch.randn(shape)
        mesh.queue().enqueue_write(x, value)
        assert mesh.queue().enqueue_read(x).equal(value)


def test_row_068_a_bulk_read_of_cards_equals_the_read_of_each():
    with open_mesh_device((2, 4), driver=driver()) as mesh:
        x, value = sharded(mesh, 8, 8, shard=(4, 2)), torch.randn(8, 8)
        mesh.queue().enqueue_write(x, value)
        slow = torch.empty(8, 8)
        for place in mesh.coordinates():
            slow[x.layout.part(place)] = mesh.queue().enqueue_read(x, coordinate=place)
        assert mesh.queue().enqueue_read(x).equal(slow) and slow.equal(value)


def test_row_070_and_072_a_mesh_device_py_wraps_any_cards_and_a_handle_is_the_drivers_buffer():
    rack = driver()
    cards = [rack.open(index) for index in (2, 0, 3, 1)]
    with MeshDevicePy(cards, (2, 2), driver=rack) as mesh:
        assert mesh.get_device_ids() == [2, 0, 3, 1] and mesh.get_device(1, 0) is cards[2]
        x = sharded(mesh, 4, 4, shard=(2, 2))
        mesh.queue().enqueue_write(x, torch.arange(16.0).view(4, 4), blocking=True)
        handle = x.handle(1, 0)
        assert isinstance(handle, Memory) and isinstance(handle.buffer, rack.modules.DramBuffer)
        assert cards[2].read(handle).tolist() == [[8, 9], [12, 13]]
    assert all(card.closed for card in cards)
    strangers = [Stranger(index) for index in range(2)]
    with MeshDevicePy(strangers) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        mesh.queue().enqueue_write(x, [1.0, 2.0], blocking=True)
        assert [card.memory[x.handle(i)].tolist() for i, card in enumerate(strangers)] == [[1, 2], [1, 2]]
    with pytest.raises(ArgumentError, match="is no card"):
        MeshDevicePy([object()])


def test_row_071_two_programs_of_the_driver_on_two_ranges_run_on_exactly_their_coordinates():
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        workload = MeshWorkload()
        for box, value in ((((0, 0), (0, 1)), 1.0), (((1, 1), (1, 1)), 2.0)):
            workload.add_program(MeshCoordinateRange(*box), Program(FILL, writes=[x], args={"value": value}))
        mesh.queue().enqueue_write(x, torch.zeros(32, 32))
        enqueue_mesh_workload(mesh, workload)
        found = [mesh.queue().enqueue_read(x, coordinate=place)[0, 0].item() for place in mesh.coordinates()]
        assert found == [1, 1, 0, 2] and mesh.counts["launch"] == 3
        assert [MACHINE.boards[i].executed for i in range(4)] == [["cold"], ["cold"], [], ["cold"]]


def test_row_073_programs_of_the_driver_are_launched_in_row_major_order_in_1000_runs():
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1, 1))
        workload = MeshWorkload()
        workload.add_program(((0, 1), (1, 1)), Program(FILL, writes=[x], args={"value": 1.0}))
        workload.add_program(((0, 0), (1, 0)), Program(FILL, writes=[x], args={"value": 2.0}))
        with mesh.logged() as log:
            for _ in range(1000):
                mesh.queue().enqueue_workload(workload)
            mesh.queue().finish()
        assert [entry.coordinate for entry in log] == list(mesh.coordinates()) * 1000
        assert MACHINE.boards[3].executed == ["cold"] + ["hot"] * 999


def test_row_074_and_081_blocking_waits_for_the_slowest_card_and_otherwise_returns_before_it():
    with open_mesh_device((1, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        slow, gate = mesh.cards[1], threading.Event()
        wait = slow._device.sync
        slow._device.sync = lambda timeout_s: (gate.wait(20), wait(timeout_s))
        enqueue_mesh_workload(mesh, fill(x, 1.0), blocking=False)
        event = mesh.queue().record_event()
        assert not event.query() and len(slow._device._commands) <= 1
        threading.Timer(0.05, gate.set).start()
        enqueue_mesh_workload(mesh, fill(x, 2.0), blocking=True)
        assert gate.is_set() and event.query() and not slow._device._commands
        assert slow.read(x.handle(0, 1)).eq(2).all()


def test_row_075_two_queues_overlap_on_the_cards_of_the_driver():
    met = threading.Barrier(2, timeout=30)
    with open_mesh_device((2,), driver=driver(), num_command_queues=2) as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(1,)) for _ in range(2))
        meet = lambda x, coordinate: met.wait() if coordinate == (0,) else None  # noqa: E731
        for number, buffer in enumerate((x, y)):
            workload = MeshWorkload()
            workload.add_program(None, Program(meet, updates=[buffer]))
            mesh.queue(number).enqueue_workload(workload)  # neither would end without the other
        mesh.synchronize()


def handed_over(seed: int, with_event: bool) -> bool:
    """Whether queue 1 reads what a program of the driver on queue 0 wrote, in the order that a seed gives."""
    with open_mesh_device((1,), driver=driver(), num_command_queues=2, stress=seed) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1, 1))
        mesh.queue(0).enqueue_workload(fill(x, 1.0))
        mesh.queue(0).enqueue_workload(fill(x, seed + 2.0))
        if with_event:
            mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
        return mesh.queue(1).enqueue_read(x).item() == seed + 2


def test_row_075_with_an_event_100_of_100_are_right_and_without_it_some_are_wrong():
    assert all(handed_over(seed, True) for seed in range(100))
    assert not all(handed_over(seed, False) for seed in range(100))


def test_row_076_and_091_paths_open_real_cards_in_their_order_and_ids_choose_them():
    rack = {"driver": driver()}
    spellings = (
        lambda: open_mesh_device(["/dev/tenstorrent/3", "/dev/tenstorrent/1"], (1, 2)),
        lambda: open_mesh_device([Path("/dev/tenstorrent/3"), 1], (1, 2)),
        lambda: open_mesh_device((1, 2), ["/dev/tenstorrent/3", "/dev/tenstorrent/1"]),
        lambda: open_mesh_device((1, 2), device_ids=[3, 1], **rack),
        lambda: open_mesh_device([3, 1], (1, 2), **rack),
        lambda: loom.ttnn.open_mesh_device(["/dev/tenstorrent/3", "/dev/tenstorrent/1"], (1, 2)).runtime,
    )
    for spelled in spellings:
        with spelled() as mesh:
            assert mesh.get_device_ids() == [3, 1] and mesh.shape == (1, 2)
            assert [card.info().path for card in mesh.cards] == [str(discovery.CARDS / each) for each in ("3", "1")]
    with pytest.raises(ArgumentError, match="a mesh has one kind"):
        open_mesh_device(["/dev/tenstorrent/3", "virtual:1"], (1, 2))


def test_row_169_a_real_path_says_what_is_missing_where_it_cannot_be_opened(monkeypatch, tmp_path):
    monkeypatch.setattr(discovery, "CARDS", tmp_path / "nothing")
    with pytest.raises(loom.MeshError) as caught:
        open_mesh_device(["/dev/tenstorrent/0"], (1,))
    assert str(caught.value) == (
        "there is no device 0\n"
        "  devices  []\n"
        f"  node     {tmp_path}/nothing/0 is not there: no such card, or its kernel module is not loaded\n"
        "  fix      virtual cards are opened by ids, or by paths such as virtual:0"
    )
    code = (
        "from meshloom.runtime import open_mesh_device\n"
        "import meshloom.processes.discovery as d, pathlib\n"
        f"d.CARDS = pathlib.Path({str(tmp_path / 'tenstorrent')!r})\n"
        "try:\n    open_mesh_device(['/dev/tenstorrent/0'], (1,))\nexcept RuntimeError as error:\n    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MESHLOOM_BLACKHOLE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.startswith(
        "the device at (0,) does not open: blackhole-py, the driver of Tenstorrent cards, is not installed here\n"
    ), done.stderr
    assert "MESHLOOM_BLACKHOLE=/path/to/blackhole-py" in done.stdout


def test_row_077_and_078_a_replicated_write_is_n_equal_writes_and_a_sharded_one_n_of_one_nth():
    with open_mesh_device((2, 4), driver=driver()) as mesh, mesh.logged() as log:
        x, y = create_mesh_buffer(mesh, global_shape=(16,)), sharded(mesh, 16, shard=(2,))
        mesh.queue().enqueue_write(x, torch.ones(16))
        mesh.queue().enqueue_write(y, torch.ones(16), blocking=True)
        assert [(entry.kind, entry.nbytes) for entry in log] == [("write", 64)] * 8 + [("write", 8)] * 8


def test_row_079_and_080_sources_are_compiled_once_and_launched_on_each_of_8_cards():
    with open_mesh_device((2, 4), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        before = codegen.Compiler.compiled
        for value in (1.0, 2.0):
            enqueue_mesh_workload(mesh, fill(x, value))
        assert mesh.counts["compiles"] == 1 and mesh.counts["launch"] == 16
        assert codegen.Compiler.compiled - before == 5  # a reader, a writer, and a kernel for three processors


# training by hand: gradients are reduced on the host


def train(made: Any, devices: int, batch: torch.Tensor, target: torch.Tensor, steps: int = 4) -> list[torch.Tensor]:
    """An MLP whose batch is sharded over cards; its gradients are summed by `all_reduce_host`."""
    torch.manual_seed(0)
    start = {"w1": torch.randn(6, 10) * 0.3, "b1": torch.zeros(1, 10), "w2": torch.randn(10, 2) * 0.3}

    def gradients(x: Any, t: Any, w1: Any, b1: Any, w2: Any, g1: Any, gb: Any, g2: Any) -> None:
        with torch.enable_grad():
            leaves = [each.clone().requires_grad_() for each in (w1, b1, w2)]
            loss = ((torch.relu(x @ leaves[0] + leaves[1]) @ leaves[2] - t) ** 2).sum()
            for room, found in zip((g1, gb, g2), torch.autograd.grad(loss, leaves), strict=True):
                room.copy_(found)

    def update(w: Any, g: Any) -> None:
        w.sub_(0.01 * g)

    with open_mesh_device((devices,), driver=made()) as mesh:
        queue, rows = mesh.queue(), len(batch) // devices
        x, t = (sharded(mesh, *each.shape, shard=(rows, each.shape[1])) for each in (batch, target))
        weights = {name: create_mesh_buffer(mesh, global_shape=value.shape) for name, value in start.items()}
        grads = {name: create_mesh_buffer(mesh, global_shape=value.shape) for name, value in start.items()}
        for buffer, value in ((x, batch), (t, target), *((weights[name], start[name]) for name in start)):
            queue.enqueue_write(buffer, value)
        work = MeshWorkload()
        options = {"reads": [x, t, *weights.values()], "writes": list(grads.values()), "vectorised": False}
        work.add_program(None, Program(gradients, **options))
        for _ in range(steps):
            queue.enqueue_workload(work)
            for name, weight in weights.items():
                step = MeshWorkload()
                step.add_program(None, Program(update, reads=[], updates=[weight, all_reduce_host(grads[name])]))
                queue.enqueue_workload(step)
        return [queue.enqueue_read(weight) for weight in weights.values()]


@on_any_cards
def test_row_082_and_085_an_mlp_trains_with_gradients_reduced_on_the_host_as_on_one_card(made):
    batch, target = torch.randn(16, 6), torch.randn(16, 2)
    one = train(VirtualDriver, 1, batch, target)
    for found, expected in zip(train(made, 4, batch, target), one, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# collectives


@on_any_cards
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32])
def test_row_083_and_171_all_reduce_host_reads_and_writes_every_card_and_equals_torch(made, kind):
    with open_mesh_device((2, 2), driver=made()) as mesh:
        x, value = sharded(mesh, 20, 6, shard=(10, 3), dtype=kind), (torch.randn(20, 6) * 9).to(kind)
        mesh.queue().enqueue_write(x, value, blocking=True)
        parts = [value[r : r + 10, c : c + 3] for r in (0, 10) for c in (0, 3)]
        wide = torch.float32 if kind == torch.bfloat16 else kind
        expected = (((parts[0].to(wide) + parts[1].to(wide)) + parts[2].to(wide)) + parts[3].to(wide)).to(kind)
        with mesh.logged() as log:
            found = all_reduce_host(x)
        size = 30 * value.element_size()
        places = list(mesh.coordinates())
        assert [(entry.kind, entry.coordinate, entry.nbytes) for entry in log] == [
            *(("read", place, size) for place in places),
            *(("write", place, size) for place in places),
        ]
        for place in places:
            assert mesh.queue().enqueue_read(found, coordinate=place).equal(expected)  # bit by bit: the order is fixed


@on_any_cards
def test_row_084_and_171_all_gather_host_broadcasts_what_it_joins_or_cuts_it_again(made):
    with open_mesh_device((4,), driver=made()) as mesh:
        x, value = sharded(mesh, 8, 4, shard=(2, 4)), torch.randn(8, 4)
        mesh.queue().enqueue_write(x, value, blocking=True)
        with mesh.logged() as log:
            everywhere = all_gather_host(x)
        assert [entry.nbytes for entry in log] == [32] * 4 + [128] * 4
        assert mesh.queue().enqueue_read(everywhere, coordinate=(3,)).equal(value)
        again = all_gather_host(x, shard_shape=(8, 1))
        for place in range(4):
            assert mesh.queue().enqueue_read(again, coordinate=(place,)).equal(value[:, place : place + 1])
        across = all_gather_host(x, 1)
        assert mesh.queue().enqueue_read(across).equal(torch.cat(value.chunk(4), 1))
        summed = reduce_scatter_host(x, 1)
        assert mesh.queue().enqueue_read(summed).equal(sum(value.chunk(4)))
        with pytest.raises(ShapeError, match=r"dim 0 of size 2 cannot be scattered over 4 devices \(2 % 4 = 2\)"):
            reduce_scatter_host(x, 0)


def test_row_086_links_are_discovered_and_routes_follow_them():
    with open_mesh_device((8,), driver=driver()) as mesh:
        assert len(mesh.fabric.links) == 16
        assert [len(mesh.fabric.route((0,), (i,))) - 1 for i in range(8)] == [0, 1, 2, 3, 4, 3, 2, 1]
        part = mesh.create_submesh((4,))
        assert [len(part.fabric.route((0,), (i,))) - 1 for i in range(4)] == [0, 1, 2, 3]  # a line is left of the ring
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        with pytest.raises(FabricError):  # no link leads down a column
            all_reduce(x, axis=0, mode="fabric")
        all_reduce(x, axis=1, mode="fabric")
    with pytest.raises(FabricError, match=r"a ring of \(2, 4\) needs a link from \(0, 0\) to \(0, 3\)"):
        open_mesh_device((2, 4), mesh_type="Ring", driver=driver())  # the links form one ring of 8
    open_mesh_device((8,), mesh_type="Ring", driver=driver()).close()
    with open_mesh_device((2,), [0, 4], driver=driver()) as mesh, pytest.raises(FabricError):
        mesh.fabric.route((0,), (1,))
    MACHINE.boards[1].slots.pop(0)
    with (
        open_mesh_device((2,), driver=driver()) as mesh,
        pytest.raises(FabricError, match=r"the card at \(0,\) has a link to \(1,\), and the one there has none back"),
    ):
        assert mesh.fabric


@on_linked_cards
def test_row_087_a_message_goes_from_card_to_card_and_no_byte_through_the_host(made):
    with open_mesh_device((2,), driver=made()) as mesh:
        x, value = sharded(mesh, 80, 40, shard=(40, 40)), torch.randn(80, 40)
        mesh.queue().enqueue_write(x, value, blocking=True)
        before = mesh.counts["host_bytes"]
        one, other = mesh.cards
        channel = Channel(one, other)
        for start in range(0, 1600, 400):
            channel.send(x.handle(0), ..., start, start + 400)
            channel.receive(x.handle(1), ..., start, start + 400)
        assert mesh.counts["host_bytes"] == before
        assert mesh.queue().enqueue_read(x, coordinate=(1,)).equal(value[:40])


@on_linked_cards
@pytest.mark.parametrize("seed", range(3))
def test_row_088_a_producer_and_a_consumer_over_bounded_slots_never_lose_live_data(made, seed):
    """Every message is another one; both sides wait at random; what arrives is what was sent, in order."""
    rack = made()
    one, other = rack.open(0), rack.open(1)
    channel, count, failed = Channel(one, other), 40, []
    source, target = one.alloc(0, (8,), torch.float32), other.alloc(0, (8,), torch.float32)
    found: list[float] = []

    def produce() -> None:
        dice = random.Random(f"producer {seed}")
        for number in range(count):
            one.write(source, torch.full((8,), float(number)))
            time.sleep(dice.choice((0, 0, 1e-3)))
            channel.send(source, ..., 0, 8, timeout=20)

    def consume() -> None:
        dice = random.Random(f"consumer {seed}")
        for _ in range(count):
            time.sleep(dice.choice((0, 0, 1e-3)))
            channel.receive(target, ..., 0, 8, timeout=20)
            found.append(other.read(target)[0].item())

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and found == list(map(float, range(count)))
    assert not any(slot.overruns for slot in MACHINE.boards[1].slots[0])
    assert channel.credits.value == channel.slots and channel.arrived.value == 0
    one.close()
    other.close()


def test_row_088_without_credits_the_link_loses_live_data():
    """The test of the test: whoever sends without asking overwrites what nobody has taken."""
    rack = driver()
    one, other = rack.open(0), rack.open(1)
    memory, there = one.alloc(0, (4,), torch.float32), other.alloc(0, (4,), torch.float32)
    for value in (1.0, 2.0):
        one.write(memory, torch.full((4,), value))
        one.wait(one.send(memory, ..., 0, 4, 1, 0), 1.0)
    other.wait(other.receive(there, ..., 0, 4, 0, 0, None), 1.0)
    assert other.read(there).eq(2).all() and MACHINE.boards[1].slots[0][0].overruns == 1
    with pytest.raises(DeviceError, match="slot 0 from card 0 is empty"):
        other.wait(other.receive(there, ..., 0, 4, 0, 0, None), 1.0)
    one.close()
    other.close()


def test_row_088_messages_that_are_not_the_next_and_waits_without_end_are_errors():
    rack = VirtualDriver()
    one, other = rack.open(0), rack.open(1)
    memory = one.alloc(0, (4,), torch.float32)
    channel = Channel(one, other)
    channel.send(memory, ..., 0, 4)
    with pytest.raises(DeviceError, match="expected message 0 of 2 elements from card 0 and got message 0 of 4"):
        channel.receive(memory, ..., 0, 2)
    with pytest.raises(DeviceError, match="the link from card 0 to card 1 is broken"):
        channel.send(memory, ..., 0, 4)
    with pytest.raises(TimeoutError, match=r"a post did not come within 0\.01 s"):
        Semaphore(0).take(0.01)


def test_row_088_a_circle_of_waits_is_found_before_anything_moves():
    two_each = (Send((0,), (1,), 0), Send((0,), (1,), 1), Send((1,), (0,), 2), Send((1,), (0,), 3))
    greedy = Schedule("all_gather", "greedy", ((0,), (1,)), 4, (two_each,), owners=(0, 0, 1, 1))
    routes, pieces = Routes(), [Piece(..., i, i + 1) for i in range(4)]
    with pytest.raises(loom.ScheduleError, match="members wait in a circle"):
        run_schedule(greedy, {}, {}, pieces, 4, routes)
    assert routes.messages == 0


COLLECTIVES: dict[str, Any] = {
    "all_reduce": lambda x, mode: all_reduce(x, mode=mode),
    "all_reduce max": lambda x, mode: all_reduce(x, op="max", mode=mode),
    "all_gather 0": lambda x, mode: all_gather(x, 0, mode=mode),
    "all_gather 1": lambda x, mode: all_gather(x, 1, mode=mode),
    "reduce_scatter 0": lambda x, mode: reduce_scatter(x, 0, mode=mode),
    "reduce_scatter 1": lambda x, mode: reduce_scatter(x, 1, mode=mode),
}


@on_linked_cards
@pytest.mark.parametrize("shape", [(1,), (2,), (5,)])
def test_row_089_over_links_no_byte_goes_through_the_host_and_the_result_is_that_of_the_host(made, shape):
    with open_mesh_device(shape, driver=made()) as mesh:
        x = sharded(mesh, 10 * shape[0], 40, shard=(10, 40))
        value = torch.randint(-99, 99, (10 * shape[0], 40)).float()  # sums are exact, in whatever order
        mesh.queue().enqueue_write(x, value, blocking=True)
        for name, collective in COLLECTIVES.items():
            before = mesh.counts["host_bytes"]
            sent = collective(x, "fabric")
            assert mesh.counts["host_bytes"] == before, name
            read = collective(x, "host")
            assert mesh.counts["host_bytes"] > before
            for place in mesh.coordinates():
                held = [mesh.queue().enqueue_read(each, coordinate=place) for each in (sent, read)]
                assert held[0].equal(held[1]), (name, place)
        assert mesh.queue().enqueue_read(x).equal(value)  # the operand is as it was


@on_linked_cards
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32, torch.float64])
def test_row_089_in_groups_of_a_grid_and_for_every_kind(made, kind):
    MACHINE.install(discovery.CARDS, 8, links="all", slot_size=64)
    with open_mesh_device((2, 4), driver=made()) as mesh:
        x = sharded(mesh, 6, 20, shard=(3, 5), dtype=kind)
        value = torch.randint(-9, 9, (6, 20)).to(kind)
        mesh.queue().enqueue_write(x, value, blocking=True)
        for axis in (0, 1, "x1", [0, 1], None):
            sent, read = (all_reduce(x, axis=axis, mode=mode) for mode in ("fabric", "host"))
            for place in mesh.coordinates():
                held = [mesh.queue().enqueue_read(each, coordinate=place) for each in (sent, read)]
                assert held[0].equal(held[1]), (axis, place)
        row = mesh.queue().enqueue_read(all_reduce(x, axis=1, mode="fabric"), coordinate=(1, 2))
        assert row.equal(sum(value[3:, c : c + 5] for c in range(0, 20, 5)))


@on_linked_cards
def test_row_090_and_174_one_script_switches_by_its_mode_argument(made):
    def script(mode: str) -> list[torch.Tensor]:
        with open_mesh_device((4,), driver=made()) as mesh:
            assert isinstance(mesh, MeshDevicePy) and issubclass(MeshDevicePy, MeshDevice)
            x = sharded(mesh, 16, 4, shard=(4, 4))
            assert isinstance(x, MeshBufferPy)
            mesh.queue().enqueue_write(x, torch.arange(64.0).view(16, 4))
            work = MeshWorkloadPy()
            work.add_program(None, Program(lambda x: x.add_(1), updates=[x]))
            enqueue_mesh_workload(mesh, work)
            total = all_reduce(x, mode=mode)
            whole = all_gather(reduce_scatter(total, 0, mode=mode), 0, mode=mode)
            return [mesh.queue().enqueue_read(each) for each in (total, whole)]

    for found, expected in zip(script("fabric"), script("host"), strict=True):
        assert found.equal(expected)


def test_row_092_and_093_buffers_and_workloads_of_the_driver_have_the_documents_arguments():
    with open_mesh_device((2, 4), driver=driver()) as mesh:
        assert create_mesh_buffer(mesh, layout="replicated", global_shape=(4, 4)).local_shape == (4, 4)
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 1))
        assert x.local_shape == (2, 1)
        with pytest.raises(ShapeError, match=r"shards of 3 do not tile dim 0 of size 4 \(4 % 3 = 1\)"):
            create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(3, 1))
        enqueue_mesh_workload(mesh, fill(x, 1.0), blocking=False)
        enqueue_mesh_workload(mesh, fill(x, 2.0))
        assert mesh.cards[7].read(x.handle(1, 3)).eq(2).all()


@on_linked_cards
def test_row_094_and_095_unknown_modes_and_reductions_are_refused(made):
    with open_mesh_device((2,), driver=made()) as mesh:
        x = sharded(mesh, 4, shard=(2,), dtype=torch.int32)
        for call in (all_reduce, all_gather, reduce_scatter):
            with pytest.raises(ValueError, match="there is no mode 'direct'"):
                call(x, mode="direct")
        with pytest.raises(ArgumentError, match="there is no reduction 'average'"):
            all_reduce(x, op="average")
        with pytest.raises(ArgumentError, match="cards do not compute a mean"):
            all_reduce(x, op="mean", mode="fabric")
        with pytest.raises(ArgumentError, match="i32 has no mean"):
            all_reduce(x, op="mean")
        with pytest.raises(ShapeError, match="has no dim 1"):
            all_gather(x, 1)
        with pytest.raises(ArgumentError, match="takes a MeshBuffer or a tensor, not list"):
            all_reduce([1.0])
        assert mesh.counts["write"] == mesh.counts["read"] == 0


def test_row_094_without_links_the_fabric_says_so():
    with open_mesh_device((2,), driver=Strangers()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        with pytest.raises(FabricError, match=r"the card at \(0,\) has no links") as caught:
            all_reduce(x, mode="fabric")
        assert 'use mode="host"' in str(caught.value)


def test_row_174_the_collectives_of_the_document_take_tensors_too():
    mesh = loom.open_mesh((4,), axes=("d",))
    x = loom.distribute(torch.arange(8.0), mesh, "S(0)")
    assert all_reduce_host(x).tolist() == [12, 16]
    assert all_gather_host(x).tolist() == list(range(8))
    assert all_reduce(x, mode="fabric").tolist() == [12, 16]
    assert reduce_scatter_host(loom.ones(4, mesh=mesh, placements="R")).tolist() == [4] * 4
    with pytest.raises(ModeError):
        all_gather(x, mode="device")


def test_row_089_and_171_collectives_on_tensors_of_cards_read_and_write_each_once_or_send_over_links():
    with open_mesh_device((4,), driver=driver()) as mesh:
        value = torch.randint(-9, 9, (8, 4)).float()
        x = loom.distribute(value, mesh, "S(0)")
        expected = {"all_reduce": sum(value.chunk(4)), "all_gather": value, "reduce_scatter": sum(value.chunk(4))}
        for name, call in (("all_reduce", all_reduce_host), ("all_gather", all_gather_host)):
            with mesh.logged() as log:
                found = call(x)
            size = found.to_torch().nbytes
            assert [(entry.kind, entry.coordinate, entry.nbytes) for entry in log] == [
                *(("read", place, 32) for place in mesh.coordinates()),
                *(("write", place, size) for place in mesh.coordinates()),
            ]
            assert found.to_torch().equal(expected[name])
        assert reduce_scatter_host(x, 1).to_torch().equal(expected["reduce_scatter"])
        before = mesh.counts["host_bytes"]
        total = all_reduce(x, mode="fabric")
        assert mesh.counts["host_bytes"] == before and mesh.counts["send"] > 0
        assert total.to_torch().equal(expected["all_reduce"]) and x.to_torch().equal(value)
        leaf = loom.distribute(value, mesh, "S(0)").requires_grad_()
        for mode in ("host", "fabric"):
            (gradient,) = torch.autograd.grad(all_reduce(leaf, mode=mode).square().sum(), leaf)
            assert gradient.to_torch().equal((2 * expected["all_reduce"]).repeat(4, 1))
    with open_mesh_device((2,), [0, 4], driver=driver()) as mesh:
        x = loom.ones(4, mesh=mesh, placements="S(0)")
        with pytest.raises(FabricError, match="no links lead from card to card along x0"):
            all_reduce(x, mode="fabric")


# the cache of kernels

COMPILING = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from blackhole import MACHINE, STAND_IN, codegen, driver, kernels
from meshloom.processes import discovery
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from meshloom.runtime.card import SourceKernel

discovery.CARDS = Path({cards!r}) / sys.argv[1]
MACHINE.install(discovery.CARDS, 1)
sys.stdin.readline()
with open_mesh_device((1,), driver=driver()) as mesh:
    x = create_mesh_buffer(mesh, global_shape=(32, 32))
    for turn in range(10):
        sources = {{**kernels.FILL.sources, "reader": f"reader {{turn}}"}}
        workload = MeshWorkload()
        kernel = SourceKernel("fill", sources, kernels.FILL.build)
        workload.add_program(None, Program(kernel, writes=[x], args={{"value": float(turn)}}))
        mesh.queue().enqueue_workload(workload)
        assert mesh.queue().enqueue_read(x).eq(turn).all()
    print(mesh.counts["compiles"])
"""


def compile_at_once(tmp_path: Path, environments: list[dict[str, str]]) -> list[int]:
    """How many kernels each of several processes had to compile, all at once through the driver."""
    code = COMPILING.format(tests=str(ROOT / "tests"), cards=str(tmp_path / "boards"))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "STAND_IN_CACHE": str(tmp_path / "metal-cache")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**common, **environment},
            text=True,
        )
        for number, environment in enumerate(environments)
    ]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), results
    return [int(printed) for printed, _ in results]


@pytest.mark.slow
def test_row_097_and_172_four_processes_compile_through_the_driver_and_share_nothing_by_accident(tmp_path):
    """blackhole-py writes its own cache without a lock; two of them share TT_METAL_CACHE, the others have their own."""
    shared, own = tmp_path / "shared", [tmp_path / "third", tmp_path / "fourth"]
    named = [shared, shared, *own]
    counts = compile_at_once(tmp_path, [{"TT_METAL_CACHE": str(each)} for each in named])
    assert all(count <= 10 for count in counts) and counts[2:] == [10, 10]
    assert 10 <= counts[0] + counts[1] <= 20
    for folder in (shared, *own):
        kept = sorted((folder / "meshloom").iterdir())
        assert len(kept) == 10 and not [each for each in kept if each.name.startswith(".")]
        assert (folder / "meshloom").stat().st_mode & 0o777 == 0o700


def test_row_172_tt_metal_cache_is_where_compiled_kernels_lie(monkeypatch, tmp_path):
    def compile_once() -> int:
        with open_mesh_device((1,), driver=driver()) as mesh:
            enqueue_mesh_workload(mesh, fill(create_mesh_buffer(mesh, global_shape=(32, 32)), 1.0))
            return mesh.counts["compiles"]

    monkeypatch.delenv("MESHLOOM_CACHE", raising=False)
    monkeypatch.setenv("TT_METAL_CACHE", str(tmp_path / "one"))
    assert [compile_once(), compile_once()] == [1, 0]
    assert len(list((tmp_path / "one" / "meshloom").iterdir())) == 1
    monkeypatch.setenv("TT_METAL_CACHE", str(tmp_path / "two"))
    assert compile_once() == 1
    monkeypatch.setenv("MESHLOOM_CACHE", str(tmp_path / "three"))  # ours comes first
    assert compile_once() == 1 and len(list((tmp_path / "three").iterdir())) == 1
    assert STAND_IN.is_dir()


# corners


@on_linked_cards
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (1, 1), (3, 0, 2)])
def test_collectives_of_nothing_and_of_single_elements(made, shape):
    with open_mesh_device((3,), driver=made()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=shape)
        mesh.queue().enqueue_write(x, torch.full(shape, 2.0), blocking=True)
        for mode in ("host", "fabric"):
            assert mesh.queue().enqueue_read(all_reduce(x, mode=mode)).equal(torch.full(shape, 6.0))
            if shape:
                joined = mesh.queue().enqueue_read(all_gather(x, -1, mode=mode))
                assert joined.equal(torch.full((*shape[:-1], 3 * shape[-1]), 2.0))


@on_linked_cards
def test_collectives_are_ordered_by_queues_and_events_and_seen_by_the_race_detector(made):
    with open_mesh_device((2,), driver=made(), num_command_queues=2, check="races") as mesh:
        x = sharded(mesh, 4, shard=(2,))
        mesh.queue(0).enqueue_write(x, [1.0, 2.0, 3.0, 4.0])
        with pytest.raises(loom.RaceError, match="not ordered after write"):
            all_reduce(x, cq_id=1)
        mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
        for mode in ("host", "fabric"):
            total = all_reduce(x, mode=mode, cq_id=1, blocking=False)
            assert mesh.queue(1).enqueue_read(total).tolist() == [4, 6]


@on_linked_cards
def test_two_queues_may_use_the_links_at_once(made):
    with open_mesh_device((4,), driver=made(), num_command_queues=2) as mesh:
        buffers = [create_mesh_buffer(mesh, global_shape=(300,)) for _ in range(2)]
        for number, buffer in enumerate(buffers):
            mesh.queue(number).enqueue_write(buffer, torch.full((300,), number + 1.0))
        found = [
            (number, all_reduce(buffers[number], mode="fabric", cq_id=number, blocking=False))
            for _ in range(5)
            for number in range(2)
        ]
        for number, total in found:
            assert mesh.queue(number).enqueue_read(total).eq(4 * (number + 1)).all()


def test_collectives_on_buffers_are_not_captured_and_leave_no_memory_behind():
    with open_mesh_device((2,)) as mesh:
        x = sharded(mesh, 4, shard=(2,))
        used = mesh.memory_usage()[0,].used
        with pytest.raises(loom.TraceError, match="collectives on buffers are not captured"), mesh.capture():
            all_reduce(x)
        assert mesh.memory_usage()[0,].used == used
        with pytest.raises(DeviceError):
            mesh.cards[0].inject(Fault("read", times=1))
            all_reduce_host(x)
        assert mesh.memory_usage()[0,].used == used
        reduce_scatter(x, mode="fabric")
        assert mesh.memory_usage()[0,].used == used


def test_a_failed_collective_names_the_coordinate_and_the_next_one_works():
    with open_mesh_device((4,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(8,))
        mesh.queue().enqueue_write(x, torch.ones(8), blocking=True)
        mesh.get_device(2).inject(Fault("write", times=1))
        with pytest.raises(DeviceError, match=r"all_reduce of \w+ by host .*(.|\n)*\(2,\): DeviceError: card 2 failed"):
            all_reduce_host(x)
        assert mesh.queue().enqueue_read(all_reduce_host(x)).eq(4).all()
        mesh.get_device(1).inject(Fault("receive", times=1))
        with pytest.raises(DeviceError, match=r"\(1,\): DeviceError: card 1 failed in a receive"):
            all_reduce(x, mode="fabric")
