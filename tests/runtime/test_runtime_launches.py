"""A launch that takes too long, raises what ends programs, or waits for itself is an error; nobody hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom.errors import DeviceError, DeviceTimeoutError
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device

WAYS: list[dict[str, Any]] = [{}, {"dispatch": "slow"}, {"stress": 3}]
PATIENCE = 60  # seconds after which a test that hangs would be ended


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What kernels wait for; it opens at the end, so that no thread is left."""
    made = threading.Event()
    yield made
    made.set()


def on_all(kernel: Callable[..., None], *buffers: Any, where: Any = None, **options: Any) -> MeshWorkload:
    workload = MeshWorkload()
    workload.add_program(where, Program(kernel, updates=buffers, **options))
    return workload


def sharded(mesh: Any) -> Any:
    return create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 2), shard_shape=(2, 1), name="x")


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_slower_than_the_timeout_is_an_error(way, gate):
    def stuck(x, coordinate):
        if coordinate == (0, 1):
            gate.wait(PATIENCE)

    began = time.monotonic()
    mesh = open_mesh_device((2, 2), timeout=0.2, **way)
    x = sharded(mesh)
    with pytest.raises(DeviceTimeoutError) as caught:
        mesh.queue().enqueue_workload(on_all(stuck, x, name="stuck"))
        mesh.queue().finish()
    text = str(caught.value)
    assert "workload stuck at test_runtime_launches.py:" in text and "failed on 1 of 4 devices" in text
    assert "(0, 1): DeviceTimeoutError: did not end within 0.2 s" in text and "close the mesh device" in text
    mesh.close()  # and does not wait for it
    assert time.monotonic() - began < PATIENCE / 2


def test_a_lost_card_takes_no_further_work_and_the_others_do(gate):
    def stuck(x, coordinate):
        if coordinate == (0, 1):
            gate.wait(PATIENCE)

    with open_mesh_device((2, 2), timeout=0.2) as mesh:
        x, queue = sharded(mesh), mesh.queue()
        with pytest.raises(DeviceTimeoutError):
            queue.enqueue_workload(on_all(stuck, x), blocking=True)
        for use in (
            lambda: queue.enqueue_write(x, torch.ones(4, 2)),
            lambda: queue.enqueue_read(x, coordinate=(0, 1)),
            lambda: queue.enqueue_workload(on_all(stuck, x)),
            lambda: loom.from_buffer(x),
        ):
            with pytest.raises(
                DeviceError, match=r"a card is lost: at \(0, 1\), workload stuck at .* did not end within"
            ):
                use()
        queue.enqueue_write(x, torch.ones(2, 1), coordinate=(1, 0))
        queue.enqueue_workload(on_all(lambda x: x.add_(1), x, where=[(1, 0), (1, 1)]))
        assert queue.enqueue_read(x, coordinate=(1, 0)).tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vectorised", [True, None])
def test_a_kernel_on_blocks_that_is_too_slow_loses_all_of_its_cards(way, vectorised, gate):
    def stuck(x):
        gate.wait(PATIENCE)

    with open_mesh_device((2, 2), timeout=0.2, **way) as mesh:
        x = sharded(mesh)
        with pytest.raises(DeviceTimeoutError, match="did not end within"):
            mesh.queue().enqueue_workload(on_all(stuck, x, vectorised=vectorised), blocking=True)
        with pytest.raises(DeviceError, match="a card is lost"):
            mesh.queue().enqueue_read(x)


def test_who_waits_for_a_queue_that_waits_for_a_stuck_one_is_told(gate):
    """Queue 1 waits for an event of queue 0, which never comes; nobody waits for queue 0 itself."""
    with open_mesh_device((2,), num_command_queues=2, timeout=0.2) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        mesh.queue(0).enqueue_workload(on_all(lambda x: gate.wait(PATIENCE) and None, x))
        mesh.queue(1).wait_for_event(mesh.queue(0).record_event())
        with pytest.raises(DeviceError, match="wait for event"):
            mesh.queue(1).finish()
        with pytest.raises(DeviceTimeoutError):
            mesh.queue(0).finish()


def test_a_kernel_that_comes_back_after_all_changes_nothing_that_is_told(gate):
    ended, ran = threading.Event(), []

    def stuck(x, coordinate):
        if coordinate == (0,):
            gate.wait(PATIENCE)
            ended.set()
        else:
            ran.append(coordinate)

    with open_mesh_device((2,), timeout=0.1) as mesh:
        x, queue = create_mesh_buffer(mesh, global_shape=(2,)), mesh.queue()
        queue.enqueue_workload(on_all(stuck, x))
        queue.enqueue_workload(on_all(stuck, x, name="behind"))
        with pytest.raises(DeviceTimeoutError) as caught:
            queue.finish()
        assert "behind" in str(caught.value) and "not run" in str(caught.value)
        gate.set()
        assert ended.wait(PATIENCE)
        queue.finish()
    assert ran == []


def test_close_does_not_wait_for_a_kernel_longer_than_the_timeout(gate):
    mesh = open_mesh_device((2,), timeout=0.1)
    x = create_mesh_buffer(mesh, global_shape=(2,))
    mesh.queue().enqueue_workload(on_all(lambda x: gate.wait(PATIENCE) and None, x))
    with pytest.raises(DeviceTimeoutError):
        mesh.close()
    assert mesh.closed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("vectorised", [True, False, None])
def test_whatever_a_kernel_raises_is_told_and_the_queue_goes_on(way, kind, vectorised):
    def failing(x):
        raise kind("out of here")

    with open_mesh_device((2, 2), **way) as mesh:
        x, queue = sharded(mesh), mesh.queue()
        with pytest.raises(DeviceError, match=rf"{kind.__name__}: out of here"):
            queue.enqueue_workload(on_all(failing, x, vectorised=vectorised), blocking=True)
        queue.enqueue_write(x, torch.ones(4, 2))
        assert queue.enqueue_read(x).sum() == 8


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_that_waits_for_its_own_queue_gets_an_error(way):
    with open_mesh_device((2,), **way) as mesh:
        x, queue = create_mesh_buffer(mesh, global_shape=(2,)), mesh.queue()
        for wait in (
            queue.finish,
            mesh.synchronize,
            lambda: queue.enqueue_read(x),
            lambda: queue.enqueue_read(x, blocking=False).result(),
            lambda: queue.record_event().synchronize(),
            lambda: queue.enqueue_workload(on_all(lambda x: None, x), blocking=True),
        ):
            with pytest.raises(DeviceError, match="RaceError: a kernel waits for queue 0, on which it runs itself"):
                queue.enqueue_workload(on_all(lambda x, wait=wait: wait() and None, x, vectorised=False), blocking=True)
            queue.finish()


def in_a_child(act: Callable[[], Any]) -> str:
    """What a function raises in a forked child, by name; it is ended after a while, should it hang."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode()[:1000])
        os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    for _ in range(PATIENCE * 50):
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(read, 1000).decode()
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


def test_a_queue_in_a_forked_child_raises_at_once():
    with open_mesh_device((2,)) as mesh:
        x, queue = create_mesh_buffer(mesh, global_shape=(2,)), mesh.queue()
        queue.enqueue_write(x, torch.ones(2), blocking=True)
        event = queue.record_event()
        for use in (
            queue.finish,
            mesh.synchronize,
            event.synchronize,
            lambda: queue.enqueue_write(x, torch.ones(2)),
            lambda: queue.enqueue_read(x),
        ):
            assert in_a_child(use).startswith("DeviceError: the mesh device was opened by process")
        assert in_a_child(mesh.close) == "nothing"
        assert queue.enqueue_read(x).tolist() == [1.0, 1.0]


def test_an_asynchronous_collective_works_in_a_forked_child_and_does_not_cross_the_fork(gate):
    x = loom.ones(4, mesh=loom.open_mesh((2,)), placements="S(0)")
    assert loom.collectives.all_reduce_async(x).wait().tolist() == [2.0, 2.0]
    started = loom.collectives.all_reduce_async(x)
    started.wait()

    def anew() -> None:
        assert loom.collectives.all_reduce_async(x).wait(PATIENCE).tolist() == [2.0, 2.0]
        assert started.wait().tolist() == [2.0, 2.0]  # it was there before

    assert in_a_child(anew) == "nothing"
    from meshloom.comms.handles import Handle

    held = Handle("all_reduce", x.topology, lambda: gate.wait(PATIENCE) and x)
    assert in_a_child(held.wait).startswith("RaceError: all_reduce was started by process")
    gate.set()
    assert held.wait(PATIENCE) is x
