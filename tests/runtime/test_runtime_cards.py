"""Cards: the virtual ones and a stranger pass the same suite; faults and delays do what they say."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from meshloom.errors import ArgumentError, DeviceError, DeviceTimeoutError, OutOfMemoryError
from meshloom.runtime import Fault, MeshWorkload, Program, VirtualDriver, create_mesh_buffer, open_mesh_device
from meshloom.runtime.card import CardInfo
from meshloom.runtime.chips import chip_of
from meshloom.runtime.compile_cache import link, translate
from runtime_conformance import CardConformance, LinkConformance


class TestVirtual(LinkConformance):
    def driver(self) -> VirtualDriver:
        return VirtualDriver(range(4))


class TestEndlessVirtual(CardConformance):
    def driver(self) -> VirtualDriver:
        return VirtualDriver()


class Stranger:
    """A card of another make: memory of its own, in bytes, and a thread per launch."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.memory: dict[int, torch.Tensor] = {}
        self.closed = False

    def info(self) -> CardInfo:
        return CardInfo(self.index, f"stranger:{self.index}", chip_of("quietbox"))

    def alloc(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        self.memory[address] = torch.zeros(shape, dtype=dtype)
        return address

    def free(self, handle: int) -> None:
        del self.memory[handle]

    def write(self, handle: int, data: torch.Tensor, index: Any = ...) -> None:
        self.memory[handle][index] = data

    def read(self, handle: int, index: Any = ...) -> torch.Tensor:
        return self.memory[handle][index].clone()

    def load(self, binary: bytes, kernel: Any) -> Any:
        return link(binary, kernel)

    def launch(self, loaded: Any, handles: Sequence[int], args: Mapping[str, Any]) -> Any:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                loaded(*(self.memory[handle] for handle in handles), **args)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, errors

    def wait(self, ticket: Any, timeout: float | None) -> bool:
        thread, errors = ticket
        thread.join(timeout)
        if errors:
            raise errors[0]
        return not thread.is_alive()

    def close(self) -> None:
        self.closed = True


class Strangers:
    shares_memory = False

    def enumerate(self) -> Sequence[int]:
        return range(4)

    def open(self, index: int) -> Stranger:
        return Stranger(index)

    def compile(self, kernel: Any) -> bytes:
        return translate(kernel)

    def is_plain(self) -> bool:
        return False


class TestStranger(CardConformance):
    def driver(self) -> Strangers:
        return Strangers()

    def test_freeing_a_buffer_frees_it_on_every_card(self):
        with open_mesh_device((2, 2), driver=self.driver()) as mesh:
            x = create_mesh_buffer(mesh, global_shape=(4,))
            assert all(card.memory for card in mesh.cards)
            x.free()
            assert not any(card.memory for card in mesh.cards)


# faults


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def prepared(mesh: Any) -> tuple[Any, MeshWorkload]:
    x = create_mesh_buffer(mesh, layout="sharded", global_shape=(8, 2), shard_shape=(2, 2), name="x")
    workload = MeshWorkload()
    workload.add_program(None, Program(add_one, updates=[x], name="add_one"))
    return x, workload


def test_a_write_error_names_coordinate_command_and_line_and_the_others_are_written():
    with open_mesh_device((2, 2)) as mesh:
        x, workload = prepared(mesh)
        mesh.get_device(1, 0).inject(Fault("write", times=1))
        queue = mesh.queue()
        queue.enqueue_write(x, torch.ones(8, 2))
        queue.enqueue_workload(workload)
        with pytest.raises(DeviceError) as caught:
            queue.finish()
        text = str(caught.value)
        assert "write x at test_runtime_cards.py:" in text and "failed on 1 of 4 devices" in text
        assert "(1, 0): DeviceError: card 2 failed in a write" in text
        assert "#2 workload add_one" in text and "not run" in text
        assert queue.enqueue_read(x, coordinate=(0, 1)).eq(1).all()
        assert queue.enqueue_read(x, coordinate=(1, 0)).eq(0).all()


def test_a_launch_that_raises_is_collected_with_the_others_and_the_queue_goes_on():
    def sometimes(x: torch.Tensor, coordinate: tuple[int, int]) -> None:
        if coordinate[1] == 1:
            raise ZeroDivisionError(f"planted at {coordinate}")
        x.add_(1)

    with open_mesh_device((2, 2)) as mesh:
        x, good = prepared(mesh)
        bad = MeshWorkload()
        bad.add_program(None, Program(sometimes, updates=[x]))
        queue = mesh.queue()
        queue.enqueue_write(x, torch.zeros(8, 2))
        queue.enqueue_workload(bad)
        with pytest.raises(DeviceError) as caught:
            queue.finish()
        assert "workload sometimes" in str(caught.value) and "2 of 4 devices" in str(caught.value)
        assert "(0, 1): ZeroDivisionError: planted at (0, 1)" in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        queue.enqueue_workload(good)
        assert queue.enqueue_read(x).view(4, -1)[:, 0].tolist() == [2, 1, 2, 1]


def test_a_launch_that_never_ends_is_an_error_within_the_timeout_and_other_cards_stay_usable():
    threads = threading.active_count()
    mesh = open_mesh_device((2, 2), timeout=0.2)
    x, workload = prepared(mesh)
    queue = mesh.queue()
    queue.enqueue_write(x, torch.zeros(8, 2))
    mesh.get_device(0, 1).inject(Fault("launch", "hang"))
    queue.enqueue_workload(workload)
    with pytest.raises(DeviceTimeoutError) as caught:
        queue.finish()
    assert "workload add_one at test_runtime_cards.py:" in str(caught.value)
    assert "(0, 1): DeviceTimeoutError: did not end within 0.2 s" in str(caught.value)
    rest = MeshWorkload()
    rest.add_program(((1, 0), (1, 1)), Program(add_one, updates=[x]))
    queue.enqueue_workload(rest, blocking=True)
    assert queue.enqueue_read(x, coordinate=(1, 1)).eq(2).all()
    queue.enqueue_workload(workload)
    with pytest.raises(DeviceError, match="hangs in an earlier launch"):
        queue.finish()
    mesh.get_device(0, 1).reset()
    queue.enqueue_workload(workload, blocking=True)
    address = x.address
    x.free()  # the launch may still write there
    with pytest.raises(OutOfMemoryError, match=r"buffer x \(freed, kept by a launch that hangs\) is there"):
        create_mesh_buffer(mesh, global_shape=(1,), address=address)
    mesh.close()
    assert threading.active_count() == threads
    assert all(usage.used == 0 for usage in mesh.memory_usage().values())


def test_a_queue_that_waits_for_an_event_of_a_failed_queue_fails_too_instead_of_hanging():
    with open_mesh_device((2,), num_command_queues=2) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,), name="x")
        mesh.get_device(0).inject(Fault("write", times=1))
        first, second = mesh.queue(0), mesh.queue(1)
        first.enqueue_write(x, torch.ones(2))
        second.wait_for_event(first.record_event())
        second.enqueue_write(x, torch.zeros(2))
        with pytest.raises(DeviceError, match="write x at"):
            first.finish()
        with pytest.raises(DeviceError, match=r"event .* of queue 0 failed"):
            second.finish()
        second.enqueue_write(x, torch.zeros(2), blocking=True)


def test_an_error_that_nobody_asked_for_is_raised_at_close():
    mesh = open_mesh_device((2,))
    x = create_mesh_buffer(mesh, global_shape=(2,))
    mesh.get_device(0).inject(Fault("write"))
    mesh.queue().enqueue_write(x, torch.ones(2))
    with pytest.raises(DeviceError, match="failed on 1 of 2 devices"):
        mesh.close()
    mesh.close()


def test_an_error_inside_a_with_block_is_not_hidden_by_close():
    with pytest.raises(KeyError), open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,))
        mesh.get_device(0).inject(Fault("write"))
        mesh.queue().enqueue_write(x, torch.ones(2))
        raise KeyError("mine")


def test_a_fault_strikes_after_some_and_some_times():
    card = VirtualDriver().open(0)
    memory = card.alloc(0, (1,), torch.float32)
    card.inject(Fault("read", after=1, times=2))
    card.read(memory)
    for _ in range(2):
        with pytest.raises(DeviceError, match="card 0 failed in a read"):
            card.read(memory)
    card.read(memory)


def test_a_card_that_hangs_in_a_write_says_so():
    card = VirtualDriver().open(0)
    memory = card.alloc(0, (1,), torch.float32)
    card.inject(Fault("write", "hang"))
    for text in ("does not answer to a write", "hangs in an earlier launch"):
        with pytest.raises(DeviceError, match=text):
            card.write(memory, torch.ones(1))


def test_unknown_faults_and_delays_are_refused():
    with pytest.raises(ArgumentError, match="there is no fault 'explode'"):
        Fault("launch", "explode")
    with pytest.raises(ArgumentError, match="a card has no command 'start'"):
        VirtualDriver().open(0).slow_down(start=1.0)


def test_a_kernel_that_loops_forever_on_the_host_is_a_timeout_of_the_queue():
    gate = threading.Event()

    def stuck(x: torch.Tensor) -> None:
        gate.wait()

    mesh = open_mesh_device((1,))
    x = create_mesh_buffer(mesh, global_shape=(1,))
    workload = MeshWorkload()
    workload.add_program(None, Program(stuck, updates=[x], vectorised=False))
    mesh.queue().enqueue_workload(workload)
    with pytest.raises(DeviceTimeoutError, match=r"queue 0 did not end within 0\.1 s") as caught:
        mesh.queue().finish(timeout=0.1)
    assert "#1 workload stuck at test_runtime_cards.py" in str(caught.value)
    gate.set()
    mesh.close()


def test_cards_are_told_of_a_buffer_that_nobody_refers_to_and_keep_what_a_trace_uses():
    with open_mesh_device((2,), driver=Strangers()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        del x
        gc.collect()
        assert not any(card.memory for card in mesh.cards)
        y = create_mesh_buffer(mesh, global_shape=(4,))
        work = MeshWorkload()
        work.add_program(None, Program(add_one, updates=[y]))
        with mesh.capture() as trace:
            mesh.queue().enqueue_workload(work)
        y.free()
        mesh.execute_trace(trace)
        assert all(card.memory for card in mesh.cards)
        trace.release()
        assert not any(card.memory for card in mesh.cards)
