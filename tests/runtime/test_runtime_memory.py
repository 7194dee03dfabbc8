"""Memory: first fit in lock-step, pieces joined, owners told; tensors in the books of a mesh with a limit; no leaks."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom.errors import ArgumentError, ClosedError, MeshError, OutOfMemoryError
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from meshloom.runtime.memory import Allocator, Region, make_region
from meshloom.tensor import base

DEVICES = 3


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 7), st.booleans()), max_size=60))
@settings(max_examples=200)
def test_regions_never_overlap_and_all_is_free_again_in_one_piece(calls):
    memory = Allocator("DRAM", 64 * 20, banks=1, devices=DEVICES)
    held: list[Region] = []
    for size, mask, frees in calls:
        if frees and held:
            memory.release(held.pop(size % len(held)))
        try:
            held.append(memory.allocate(size, mask, "x", from_top=bool(size % 2)))
        except OutOfMemoryError:
            assert not fits(held, size, mask)
        for i, one in enumerate(held):
            assert one.address % 64 == 0 and one.end <= memory.bank_size
            assert not any(one.overlaps(other) for other in held[:i])
        used = [sum(r.size for r in held if r.mask >> device & 1) for device in range(DEVICES)]
        assert [usage.used for usage in memory.usage()] == used
    for region in held:
        memory.release(region)
    assert all(usage.largest_free == memory.bank_size for usage in memory.usage())


def fits(held: list[Region], size: int, mask: int) -> bool:
    """Whether some address is free on all devices of the mask, tried one by one."""
    wanted = max(1, -(-size // 64)) * 64
    places = range(0, 64 * 20 - wanted + 1, 64)
    return any(not any(make_region(a, wanted, mask, "", "").overlaps(r) for r in held) for a in places)


def test_the_same_calls_give_the_same_addresses():
    def addresses() -> list[int]:
        with open_mesh_device((2, 2), memory=1 << 16) as mesh:
            a, b, c = (create_mesh_buffer(mesh, global_shape=(n,)) for n in (100, 200, 300))
            b.free()
            part = mesh.create_submesh((1, 2))
            d = create_mesh_buffer(part, global_shape=(50,))
            e = create_mesh_buffer(mesh, global_shape=(100,))
            return [each.address for each in (a, c, d, e)]

    first = addresses()
    assert first == addresses() and len(set(first)) == 4


def test_from_the_top_addresses_go_down_and_a_freed_piece_is_handed_out_again():
    memory = Allocator("L1", 1024, banks=1, devices=1)
    first, second = (memory.allocate(size, 1, "x", from_top=True) for size in (64, 128))
    assert (first.address, second.address, memory.allocate(64, 1, "low").address) == (960, 832, 0)
    memory.release(first)
    assert memory.allocate(64, 1, "again", from_top=True).address == 960


def test_overlapping_submeshes_never_get_the_same_bytes():
    with open_mesh_device((1, 3), memory=4096) as mesh:
        left, right = mesh.create_submesh((1, 2)), mesh.create_submesh((1, 2), (0, 1))
        a, b = create_mesh_buffer(left, global_shape=(16,)), create_mesh_buffer(right, global_shape=(16,))
        c = create_mesh_buffer(mesh, global_shape=(16,))
        assert len({a.address, b.address, c.address}) == 3
        a.free()
        assert create_mesh_buffer(left, global_shape=(16,)).address == a.address


def test_out_of_memory_lists_the_largest_owners_and_their_lines():
    with open_mesh_device((2,), memory=64 * 16) as mesh:
        kept = [create_mesh_buffer(mesh, global_shape=(16 * n,), name=f"b{n}") for n in (1, 5, 2, 3, 1, 1, 1)]
        with pytest.raises(OutOfMemoryError) as caught:
            create_mesh_buffer(mesh, global_shape=(48,), name="late")
        assert str(caught.value).splitlines()[0] == "buffer late of 192 B does not fit into DRAM of 1.0 KiB per device"
        text = str(caught.value)
        assert "896 B in use, 128 B free, largest free piece 128 B" in text
        assert text.index("320 B  buffer b5, since test_runtime_memory.py:") < text.index("192 B  buffer b3")
        assert "and 2 more" in text and "free an owner" in text
        assert isinstance(caught.value, MemoryError)
        kept[3].free()
        create_mesh_buffer(mesh, global_shape=(48,), name="late").free()


def test_memory_in_pieces_is_told_from_memory_that_is_full():
    with open_mesh_device((1,), memory=64 * 4) as mesh:
        a, b, c, d = (create_mesh_buffer(mesh, global_shape=(16,)) for _ in range(4))
        a.free()
        c.free()
        with pytest.raises(OutOfMemoryError, match="free memory is in pieces"):
            create_mesh_buffer(mesh, global_shape=(32,))
        assert b.is_allocated and d.is_allocated


def test_an_address_can_be_asked_for_and_is_refused_where_somebody_is():
    with open_mesh_device((2,), memory=1024) as mesh:
        a = create_mesh_buffer(mesh, global_shape=(16,), address=128, name="a")
        assert a.address == 128
        with pytest.raises(OutOfMemoryError, match="buffer b cannot have address 0x80: buffer a is there"):
            create_mesh_buffer(mesh, global_shape=(16,), address=128, name="b")
        with pytest.raises(ArgumentError, match="address 0x41 is not one of DRAM"):
            create_mesh_buffer(mesh, global_shape=(16,), address=65)
        assert create_mesh_buffer(mesh, global_shape=(16,)).address == 0


def test_dram_and_l1_have_the_sizes_and_banks_of_the_preset():
    with open_mesh_device((2, 4), preset="t3000") as mesh:
        usage = mesh.memory_usage()[0, 0]
        assert 11.99e9 < usage.free <= 12e9
        big = create_mesh_buffer(mesh, global_shape=(1200,))
        assert mesh.memory_usage()[0, 0].used == 12 * 448  # 400 B in each of 12 banks, aligned
        l1 = create_mesh_buffer(mesh, global_shape=(64,), buffer_type="l1")
        assert big.address == l1.address == 0  # memories of their own
        assert mesh.memory_usage("l1")[0, 0].used == 64 * 64
        with pytest.raises(OutOfMemoryError, match=r"does not fit into L1 of 91\.5 MiB"):
            create_mesh_buffer(mesh, global_shape=(1 << 25,), buffer_type="l1")


def test_a_buffer_that_nobody_refers_to_is_freed():
    with open_mesh_device((2,), memory=128) as mesh:
        for _ in range(5):
            create_mesh_buffer(mesh, global_shape=(32,))
        assert mesh.memory_usage()[0,].used == 0


def test_a_buffer_in_a_queue_keeps_its_memory_until_the_command_is_done():
    gate = threading.Event()
    with open_mesh_device((2,), memory=128) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32,))
        workload = MeshWorkload()
        workload.add_program(None, Program(lambda x: gate.wait(), updates=[x], vectorised=True))
        mesh.queue().enqueue_workload(workload)
        del x, workload
        gc.collect()
        assert mesh.memory_usage()[0,].used == 128
        gate.set()
        mesh.synchronize()
        gc.collect()
        assert mesh.memory_usage()[0,].used == 0


def test_use_after_free_is_an_error_at_the_line_that_uses():
    with open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,), name="x")
        workload = MeshWorkload()
        workload.add_program(None, Program(lambda x: None, updates=[x]))
        x.free()
        x.free()
        for use in (
            lambda: mesh.queue().enqueue_write(x, [0.0] * 4),
            lambda: mesh.queue().enqueue_read(x),
            lambda: mesh.queue().enqueue_workload(workload),
            lambda: x.handle(0),
        ):
            with pytest.raises(ClosedError, match="x has been freed"):
                use()


def test_reshape_keeps_ids_and_homes_and_refuses_while_buffers_lie_there():
    with open_mesh_device((4, 4), physical=(2, 2)) as mesh:
        homes = {mesh.get_device_id(place): mesh.virtual_to_physical(place) for place in mesh.coordinates()}
        x = create_mesh_buffer(mesh, global_shape=(4,), name="x")
        with pytest.raises(MeshError, match="1 buffers lie on the mesh as it is: x"):
            mesh.reshape(2, 8)
        x.free()
        mesh.reshape(2, 8)
        assert mesh.shape == (2, 8)
        assert {mesh.get_device_id(place): mesh.virtual_to_physical(place) for place in mesh.coordinates()} == homes


def test_submeshes_that_do_not_fit_are_refused():
    with open_mesh_device((2, 4)) as mesh:
        with pytest.raises(MeshError, match="does not fit"):
            mesh.create_submesh((2, 2), (0, 3))
        with pytest.raises(MeshError, match="3 does not divide axis 1 of size 4"):
            mesh.create_submeshes((1, 3))
        parts = mesh.create_submeshes((2, 2))
        assert [part.get_device_ids() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert mesh.get_submeshes() == parts
        parts[0].close()
        assert mesh.get_submeshes() == parts[1:]


# tensors in the books


def test_results_of_ops_are_accounted_and_leave_with_their_last_tensor():
    with open_mesh_device((4,), memory=1 << 20) as mesh:
        x = loom.ones(1024, mesh=mesh, placements="S(0)")
        y = x + x
        view = y.reshape(32, 32)
        used = [usage.used for usage in mesh.memory_usage().values()]
        assert used == [2 * 1024] * 4  # the view has no memory of its own
        del y
        assert mesh.memory_usage()[0,].used == 2 * 1024
        del view, x
        assert mesh.memory_usage()[0,].used == 0
        assert mesh.memory_usage()[0,].peak <= 4 * 1024


def test_without_a_limit_nothing_is_accounted_and_tensors_cost_what_they_did():
    plain = dict(vars(base.Tensor))
    with open_mesh_device((2,)) as mesh:
        loom.ones(8, mesh=mesh)
        assert mesh.memory_usage()[0,].peak == 0
    with open_mesh_device((2,), memory=4096) as mesh:
        loom.ones(8, mesh=mesh)
        assert mesh.memory_usage()[0,].peak > 0
        assert dict(vars(base.Tensor)) == plain  # nobody swaps what the class does


def test_tensors_on_other_meshes_are_not_accounted():
    with open_mesh_device((2,), memory=4096) as mesh:
        loom.ones(1 << 16, mesh=loom.open_mesh((8,)))
        assert mesh.memory_usage()[0,].peak == 0


def test_buffers_and_tensors_share_one_memory():
    with open_mesh_device((2,), memory=1024) as mesh:
        held = loom.ones(128, mesh=mesh, placements="R")
        with pytest.raises(OutOfMemoryError, match=r"tensor f32\[128\]\(R\), since"):
            create_mesh_buffer(mesh, global_shape=(256,), name="b")
        del held
        create_mesh_buffer(mesh, global_shape=(256,), name="b")


# leaks


def test_1000_open_and_close_cycles_leak_neither_threads_nor_memory():
    def cycle() -> None:
        with open_mesh_device((2, 2), num_command_queues=2, memory=1 << 16) as mesh:
            x = create_mesh_buffer(mesh, global_shape=(4,))
            mesh.queue(0).enqueue_write(x, torch.zeros(4))
            mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
            mesh.queue(1).enqueue_read(x)

    for _ in range(20):
        cycle()
    gc.collect()
    threads, objects = threading.active_count(), len(gc.get_objects())
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            cycle()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    assert threading.active_count() == threads
    assert len(gc.get_objects()) - objects < 500
    assert grown < 200_000


def test_a_mesh_that_nobody_closed_lets_its_threads_go():
    threads = threading.active_count()
    for _ in range(20):
        mesh = open_mesh_device((2,))
        x = create_mesh_buffer(mesh, global_shape=(4,))
        mesh.queue().enqueue_write(x, torch.zeros(4), blocking=True)
        del mesh, x
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("meshloom-queue"):
            thread.join(5)
    assert threading.active_count() == threads


def test_10000_alloc_and_free_cycles_leak_nothing():
    with open_mesh_device((2, 4), memory=1 << 20) as mesh:
        kept = create_mesh_buffer(mesh, global_shape=(100,))
        gc.collect()
        for turn in range(10_000):
            made = create_mesh_buffer(mesh, global_shape=(1 + turn % 300,))
            assert made.address == 448
            made.free()
            if turn == 400:  # every shape has been seen
                del made
                gc.collect()
                objects = len(gc.get_objects())
                made = kept
        del made
        gc.collect()
        assert len(gc.get_objects()) - objects < 500
        assert mesh.memory_usage()[0, 0].used == 448
        kept.free()
        assert mesh.memory_usage()[0, 0].largest_free == 1 << 20


@given(st.integers(0, 1 << 32))
def test_memory_that_is_handed_on_lies_where_first_fit_would_put_it(seed):
    draw = random.Random(seed)
    noted, freed = (Allocator("DRAM", 1 << 14, banks=1, devices=3) for _ in range(2))
    live = []
    for _ in range(40):
        if live and draw.random() < 0.5:
            late, early = live.pop(draw.randrange(len(live)))
            noted.drop(late)
            freed.release(early)
        else:
            size, mask = draw.choice([64, 64, 64, 128, 256]), draw.choice([0b111, 0b111, 0b001, 0b110])
            top = draw.random() < 0.4
            pair = tuple(each.allocate(size, mask, "x", from_top=top) for each in (noted, freed))
            assert pair[0].address == pair[1].address
            live.append(pair)
    assert [usage.used for usage in noted.usage()] == [usage.used for usage in freed.usage()]
    assert [each.address for each in noted.live()] == [each.address for each in freed.live()]
