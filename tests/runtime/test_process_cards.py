"""Cards in processes of their own pass the suite, compute at the same time, and keep to themselves what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.errors import ArgumentError, DeviceError, DeviceTimeoutError
from meshloom.runtime import Fault, MeshWorkload, ProcessDriver, Program, create_mesh_buffer, open_mesh_device
from meshloom.runtime.buffer_collectives import all_reduce
from meshloom.runtime.card import Part
from meshloom.runtime.drivers.process import life
from meshloom.runtime.drivers.process.arena import SLACK, Arena, view
from meshloom.runtime.drivers.process.frames import Frames
from meshloom.runtime.drivers.process.op_kernels import NAMES
from runtime_conformance import LinkConformance
from test_runtime_launches import in_a_child

PATIENCE = 60.0


class TestProcessCards(LinkConformance):
    def driver(self) -> ProcessDriver:
        return ProcessDriver(range(4))


@pytest.fixture
def card() -> Iterator[Any]:
    made = ProcessDriver().open(0)
    yield made
    made.close()


def on_all(kernel: Callable[..., None], *buffers: Any, where: Any = None, **args: Any) -> MeshWorkload:
    workload = MeshWorkload()
    workload.add_program(where, Program(kernel, updates=buffers, args=args))
    return workload


def run(card: Any, kernel: Callable[..., None], *handles: Any, **args: Any) -> None:
    """Launch a kernel on a card and wait for it."""
    assert card.wait(card.launch(card.load(card.driver.compile(kernel), kernel), handles, args), PATIENCE)


def holding(card: Any, value: torch.Tensor) -> Any:
    handle = card.alloc(0, tuple(value.shape), value.dtype)
    card.write(handle, value)
    return handle


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_gone(pids: list[int]) -> None:
    """Raise unless all processes end soon."""
    end = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.01)


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


# what goes wrong with one card: an error with its coordinate, and nothing else


def kill(x: torch.Tensor, coordinate: tuple[int, int]) -> None:
    if coordinate == (0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    x.add_(1)


def crash(x: torch.Tensor, coordinate: tuple[int, int]) -> None:
    if coordinate == (0, 1):
        ctypes.string_at(0)
    x.add_(1)


def leave(x: torch.Tensor, coordinate: tuple[int, int]) -> None:
    if coordinate == (0, 1):
        os._exit(3)
    x.add_(1)


def hang(x: torch.Tensor, coordinate: tuple[int, int]) -> None:
    while coordinate == (0, 1):
        pass
    x.add_(1)


LOST = {
    "killed": (kill, "was killed by signal 9 (SIGKILL), as the system does when memory runs out"),
    "crashed": (crash, "was killed by signal 11 (SIGSEGV)"),
    "left": (leave, "ended with exit code 3"),
}


@pytest.mark.parametrize("fault", [*LOST, "hung"])
def test_a_card_that_is_lost_is_an_error_with_its_coordinate_and_the_others_stay_usable(fault):
    kernel, fate = LOST.get(fault, (hang, ""))
    with open_mesh_device((2, 2), driver="processes", timeout=None if fate else 0.5) as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 2), shard_shape=(2, 1), name="x")
        kept = create_mesh_buffer(mesh, global_shape=(3,), name="kept")
        queue, pid = mesh.queue(), mesh.get_device(0, 1).pid
        queue.enqueue_write(x, torch.zeros(4, 2))
        queue.enqueue_write(kept, torch.arange(3.0))
        queue.enqueue_workload(on_all(kernel, x))
        with pytest.raises(DeviceError if fate else DeviceTimeoutError) as caught:
            queue.finish()
        told = str(caught.value)
        assert f"workload {kernel.__name__} at test_process_cards.py:" in told and "failed on 1 of 4 devices" in told
        if fate:
            assert f"(0, 1): DeviceError: card 1 was lost in a launch of {kernel.__name__}: its process {fate}" in told
        else:
            assert "(0, 1): DeviceTimeoutError: did not end within 0.5 s, and was ended" in told
        assert not is_running(pid)
        for place in ((0, 0), (1, 0), (1, 1)):
            assert queue.enqueue_read(x, coordinate=place).eq(1).all()
        queue.enqueue_workload(on_all(add_one, x, where=[(1, 0), (1, 1)]), blocking=True)
        assert queue.enqueue_read(x, coordinate=(1, 1)).eq(2).all()
        late = f"workload hang at test_process_cards.py:.* {'did not end within'}"
        for use in (
            lambda: queue.enqueue_write(x, torch.zeros(4, 2), blocking=True),
            lambda: queue.enqueue_read(x, coordinate=(0, 1)),
            lambda: queue.enqueue_workload(on_all(add_one, x), blocking=True),
        ):
            with pytest.raises(DeviceError, match=r"\(0, 1\): DeviceError: card 1 is lost: " + ("" if fate else late)):
                use()
        mesh.get_device(0, 1).reset()  # another process with the same memory
        assert queue.enqueue_read(kept, coordinate=(0, 1)).tolist() == [0, 1, 2]
        queue.enqueue_write(x, torch.zeros(4, 2))
        queue.enqueue_workload(on_all(add_one, x))
        assert queue.enqueue_read(x).eq(1).all()


def fill(x: torch.Tensor, size: int) -> None:
    x.copy_(torch.ones(size)[:1])


def test_a_kernel_that_takes_too_much_memory_is_an_error_with_its_coordinate_and_its_card_goes_on():
    with open_mesh_device((2,), driver=ProcessDriver(memory_limit=1 << 30)) as mesh:
        x, queue = create_mesh_buffer(mesh, global_shape=(1,), name="x"), mesh.queue()
        greedy = on_all(fill, x, where=(1,), size=1 << 29)
        with pytest.raises(DeviceError, match=r"\(1,\): RuntimeError: .*(memory|alloc)") as caught:
            queue.enqueue_workload(greedy, blocking=True)
        assert isinstance(caught.value.__cause__, RuntimeError)
        queue.enqueue_workload(on_all(fill, x, size=4), blocking=True)
        assert queue.enqueue_read(x).tolist() == [1.0]


@pytest.mark.parametrize("command", ["write", "read", "launch"])
@pytest.mark.parametrize("kind", ["raise", "kill", "hang"])
def test_injected_faults_strike_in_every_command_and_a_reset_ends_them(card, command, kind):
    x = holding(card, torch.zeros(1))
    acts = {"write": lambda: card.write(x, torch.ones(1)), "read": lambda: card.read(x)}

    def launch() -> None:
        ticket = card.launch(card.load(card.driver.compile(add_one), add_one), [x], {})
        if not card.wait(ticket, 0.2):
            card.end("it was given up")
            card.wait(ticket, 0.0)

    act = acts.get(command, launch)
    card.inject(Fault(command, kind, after=1, times=1))
    act()
    with pytest.raises(DeviceError) as caught:
        act()
    if kind == "raise":
        assert caught.value.headline == f"card 0 failed in a {command}"
    else:
        assert "lost" in caught.value.headline
        card.reset()
    card.write(x, torch.ones(1))
    assert card.read(x).tolist() == [1.0]


def test_a_card_of_this_process_cannot_be_killed():
    with open_mesh_device((1,)) as mesh, pytest.raises(ArgumentError, match="card 0 lives in this process"):
        mesh.get_device(0).inject(Fault("launch", "kill"))


def test_a_card_that_is_killed_while_it_does_nothing_is_found_lost_by_the_next_command(card):
    x = holding(card, torch.ones(2))
    os.kill(card.pid, signal.SIGTERM)
    check_gone([card.pid])
    for use in (lambda: card.read(x), lambda: card.write(x, torch.ones(2)), lambda: run(card, add_one, x)):
        with pytest.raises(DeviceError, match=r"card 0 is lost: its process was killed by signal 15 \(SIGTERM\)"):
            use()
    card.free(x)
    assert card.is_lost
    card.reset()
    assert not card.is_lost
    run(card, add_one, holding(card, torch.ones(1)))


def test_when_the_server_is_killed_its_cards_end_and_a_reset_starts_another(card):
    x = holding(card, torch.ones(1))
    server = life._nursery._process.pid
    os.kill(server, signal.SIGKILL)
    check_gone([server, card.pid])
    with pytest.raises(DeviceError, match="card 0 is lost: its process does not answer any more"):
        run(card, add_one, x)
    card.reset()
    run(card, add_one, x)
    assert card.read(x).tolist() == [2.0]
    assert life._nursery._process.pid != server


# nothing is left behind


def test_closing_ends_the_processes_and_leaves_no_file_and_no_descriptor():
    gc.collect()
    files = [os.listdir("/proc/self/fd"), sorted(os.listdir("/dev/shm"))]
    with open_mesh_device((2, 2), driver="processes") as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1000,))
        mesh.queue().enqueue_workload(on_all(add_one, x), blocking=True)
        assert sorted(os.listdir("/dev/shm")) == files[1]  # the memory has no name
        pids = [each.pid for each in mesh.cards]
        assert len({*pids, os.getpid()}) == 5 and all(map(is_running, pids))
    assert not any(map(is_running, pids))
    del mesh, x
    gc.collect()
    assert [len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))] == [len(files[0]), files[1]]


def test_a_card_that_nobody_refers_to_ends_even_in_the_middle_of_a_kernel():
    card = ProcessDriver().open(0)
    pid, x = card.pid, holding(card, torch.ones(1))
    card.launch(card.load(card.driver.compile(hang), hang), [x], {"coordinate": (0, 1)})
    del card, x
    gc.collect()
    check_gone([pid])


def test_what_a_kernel_has_started_ends_with_its_card(card):
    x = holding(card, torch.zeros(1, dtype=torch.int64))

    def start(x: torch.Tensor) -> None:
        import subprocess

        x.fill_(subprocess.Popen(["sleep", "1000"]).pid)

    run(card, start, x)
    pid = int(card.read(x))
    assert is_running(pid)
    card.close()
    check_gone([pid])


def owner(path: str) -> None:
    """A program with two cards that compute for ever; it writes the processes that there are into a file."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mesh = open_mesh_device((2,), driver="processes", timeout=None)
    x = create_mesh_buffer(mesh, global_shape=(1,))
    mesh.queue().enqueue_workload(on_all(spin, x))
    while not all(each.is_busy for each in mesh.cards):
        time.sleep(0.01)
    pids = [life._nursery._process.pid, *(each.pid for each in mesh.cards)]
    Path(path).with_suffix(".new").write_text(" ".join(map(str, pids)))
    Path(path).with_suffix(".new").rename(path)
    mesh.queue().finish()


def spin(x: torch.Tensor) -> None:
    while True:
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_ended_while_kernels_run(tmp_path, number):
    import ranks

    before = sorted(os.listdir("/dev/shm"))
    path = tmp_path / "pids"
    output = str(tmp_path / "output")
    started = ranks.FORKS.Process(target=ranks.live, args=(output, dict(os.environ), owner, str(path)))
    started.start()
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end and started.is_alive(), Path(output).read_text()
        time.sleep(0.02)
    pids = [int(each) for each in path.read_text().split()]
    assert len(pids) == 3 and all(map(is_running, pids))
    os.kill(started.pid, number)
    started.join(PATIENCE)
    assert started.exitcode == (1 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in Path(output).read_text()
    check_gone(pids)
    assert sorted(os.listdir("/dev/shm")) == before


def test_cards_do_not_hear_ctrl_c(card):
    os.kill(card.pid, signal.SIGINT)
    run(card, add_one, holding(card, torch.ones(1)))
    assert os.getsid(card.pid) != os.getsid(0)


def with_own_card() -> None:
    card = ProcessDriver().open(0)
    x = holding(card, torch.ones(1))
    run(card, add_one, x)
    assert card.read(x).tolist() == [2.0]


def test_a_forked_child_is_refused_and_does_not_keep_the_cards_alive():
    with open_mesh_device((1,), driver="processes") as mesh:
        x, queue, card = create_mesh_buffer(mesh, global_shape=(2,)), mesh.queue(), mesh.cards[0]
        queue.enqueue_write(x, torch.ones(2), blocking=True)
        handle = x.handle(0)
        for use in (lambda: card.read(handle), lambda: card.write(handle, torch.ones(2)), card.reset, queue.finish):
            assert "was forked from it" in in_a_child(use)
        assert in_a_child(card.close) == in_a_child(mesh.close) == "nothing"
        assert in_a_child(with_own_card) == "nothing"
        assert queue.enqueue_read(x).tolist() == [1.0, 1.0]


# cards at work at the same time


def meet(x: torch.Tensor, folder: str, coordinate: tuple[int, ...]) -> None:
    """Wait until the other card is here too."""
    (Path(folder) / str(sum(coordinate))).touch()
    end = time.monotonic() + 30
    while len(list(Path(folder).iterdir())) < 2:
        if time.monotonic() > end:
            raise TimeoutError("the other card did not come")


def test_row_127_kernels_of_two_submeshes_run_at_once(tmp_path):
    with open_mesh_device((1, 2), driver="processes") as mesh:
        for number, part in enumerate(mesh.create_submeshes((1, 1))):
            x = create_mesh_buffer(part, global_shape=(1,))
            part.queue().enqueue_workload(on_all(meet, x, folder=str(tmp_path), coordinate=(number,)))
        mesh.synchronize()  # one after the other would never meet


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, span: torch.Tensor, seconds: float) -> None:
    """C = A @ B, over and over for a while; when it began and ended."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        torch.mm(a, b, out=c)
    span.copy_(torch.tensor([began, time.monotonic()], dtype=torch.float64))


def test_row_144_workers_that_compute_multiply_their_rows_at_the_same_time():
    with open_mesh_device((2,), driver="processes") as mesh:
        whole, b = torch.randn(64, 16), torch.randn(16, 32)
        sharded: dict[str, Any] = {"layout": "sharded"}
        x = create_mesh_buffer(mesh, global_shape=(64, 16), shard_shape=(32, 16), **sharded)
        w = create_mesh_buffer(mesh, global_shape=(16, 32))
        c = create_mesh_buffer(mesh, global_shape=(64, 32), shard_shape=(32, 32), **sharded)
        spans = create_mesh_buffer(mesh, global_shape=(4,), shard_shape=(2,), dtype="float64", **sharded)
        queue = mesh.queue()
        queue.enqueue_write(x, whole)
        queue.enqueue_write(w, b)
        workload = MeshWorkload()
        workload.add_program(None, Program(multiply, [x, w], [c, spans], args={"seconds": 0.1}))
        queue.enqueue_workload(workload)
        torch.testing.assert_close(queue.enqueue_read(c), whole @ b)
        assert queue.enqueue_read(c, coordinate=(1,)).shape == (32, 32)
        (first, ended), (second, also) = queue.enqueue_read(spans).view(2, 2).tolist()
        assert max(first, second) < min(ended, also)


def test_row_081_blocking_false_returns_before_the_slowest_card():
    with open_mesh_device((1, 2), driver="processes") as mesh:
        x, slowest = create_mesh_buffer(mesh, global_shape=(1,)), mesh.get_device(0, 1)
        slowest.slow_down(launch=0.3)
        mesh.queue().enqueue_workload(on_all(add_one, x), blocking=True)
        assert not slowest.is_busy
        began = time.monotonic()
        mesh.queue().enqueue_workload(on_all(add_one, x))
        event = mesh.queue().record_event()
        assert not event.query()
        mesh.queue().finish()
        assert event.query() and time.monotonic() - began >= 0.3
        assert mesh.queue().enqueue_read(x).tolist() == [2.0]


def seconds_for_rounds(devices: int) -> float:
    with open_mesh_device((devices,), driver="processes") as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        mesh.queue().enqueue_workload(on_all(add_one, x), blocking=True)
        for each in mesh.cards:
            each.slow_down(launch=0.15)
        began = time.monotonic()
        for _ in range(3):
            mesh.queue().enqueue_workload(on_all(add_one, x))
        mesh.queue().finish()
        return time.monotonic() - began


def test_row_126_eight_cards_of_fixed_speed_do_seven_times_the_work_of_one_in_the_same_time():
    alone = seconds_for_rounds(1)
    assert alone >= 0.45
    assert any(8 / seconds_for_rounds(8) >= 7 / alone for _ in range(4))  # other programs may have the cores


def test_a_write_waits_for_launches_that_use_the_memory_and_for_no_others(card, tmp_path):
    def wait(x: torch.Tensor, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.001)
        x.mul_(2)

    used, other, path = holding(card, torch.ones(2)), holding(card, torch.ones(2)), tmp_path / "go"
    ticket = card.launch(card.load(card.driver.compile(wait), wait), [used], {"path": str(path)})
    card.write(other, torch.full((2,), 7.0))
    assert card.read(other).tolist() == [7.0, 7.0] and card.is_busy and not card.wait(ticket, 0.0)
    found: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: found.append(card.read(used)))
    reader.start()
    time.sleep(0.05)
    assert not found
    path.touch()
    reader.join(PATIENCE)
    assert found[0].tolist() == [2.0, 2.0] and card.wait(ticket, PATIENCE)


def test_who_waits_hears_of_what_another_thread_has_taken_in(card):
    """One thread waits for launches, the other only looks: it often takes in the answer before the first can."""
    loaded, x = card.load(card.driver.compile(add_one), add_one), holding(card, torch.zeros(1))
    over, looks = threading.Event(), [0]

    def look() -> None:
        while not over.is_set():
            looks[0] += card.is_busy or card.is_lost

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            began = time.monotonic()
            assert card.wait(card.launch(loaded, [x], {}), PATIENCE)
            assert time.monotonic() - began < PATIENCE / 2
    finally:
        over.set()
        thread.join()
    assert card.read(x).item() == 300 and looks[0]


def test_memory_of_another_card_is_refused(card):
    other = ProcessDriver().open(0)
    x = holding(other, torch.ones(1))
    for use in (lambda: card.read(x), lambda: card.write(x, torch.ones(1)), lambda: run(card, add_one, x)):
        with pytest.raises(DeviceError, match="the memory is of another card"):
            use()
    other.close()


def test_threads_wait_for_their_own_launches_of_one_card(card):
    def work(number: int) -> None:
        x = holding(card, torch.zeros(1))
        for _ in range(50):
            run(card, add_one, x)
        found[number] = card.read(x).item()

    found: dict[int, float] = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == dict.fromkeys(range(4), 50.0)


# links

REDUCED = {"sum": torch.sum, "max": torch.amax, "prod": torch.prod}


@pytest.mark.parametrize("op", REDUCED)
def test_row_087_cards_reduce_over_links_and_no_byte_comes_near_the_host(op):
    value = torch.randn(4 * 7, 5)
    with open_mesh_device((2, 2), driver="processes") as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(28, 5), shard_shape=(7, 5))
        mesh.queue().enqueue_write(x, value, blocking=True)
        before = mesh.counts["host_bytes"]
        assert before == value.nbytes
        found = all_reduce(x, op=op, mode="fabric")
        assert mesh.counts["host_bytes"] == before and mesh.system.routes.bytes > 0
        torch.testing.assert_close(mesh.queue().enqueue_read(found), REDUCED[op](value.view(4, 7, 5), 0))
        assert all_reduce(x, op=op, mode="host") is not found and mesh.counts["host_bytes"] > before + value.nbytes


def test_an_all_reduce_over_links_leaves_the_same_bits_on_every_card():
    value = torch.randn(8 * 100) * torch.logspace(-6, 6, 800)
    with open_mesh_device((8,), driver="processes") as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(800,), shard_shape=(100,))
        mesh.queue().enqueue_write(x, value)
        mesh.queue().enqueue_read(all_reduce(x, mode="fabric"))  # an error where cards differ
        with pytest.raises(DeviceError, match="should be the same at"):  # each card adds up in its own order
            mesh.queue().enqueue_read(all_reduce(x, mode="fabric", algorithm="direct"))


def test_messages_longer_than_a_slot_and_parts_of_memory_go_over_links():
    driver = ProcessDriver()
    one, other = driver.open(3), driver.open(8)
    assert (one.peers(), other.peers()) == ([8], [3])
    value = torch.arange(24.0).view(4, 6)
    x, y = holding(one, value), holding(other, torch.ones(4, 6))
    there, back = (slice(None), slice(1, 4)), (slice(0, 4), slice(3, 6))
    assert one.wait(one.send(x, there, 2, 8, 8, 1), PATIENCE)
    assert other.wait(other.receive(y, back, 2, 8, 3, 1, "sum"), PATIENCE)
    expected = torch.ones(4, 6)
    flat = expected[back].flatten()
    flat[2:8] += value[there].flatten()[2:8]
    expected[back] = flat.view(4, 3)
    assert other.read(y).equal(expected)
    assert other.wait(other.copy(y, 0, y, 1), PATIENCE) and other.read(y, 1).equal(expected[0])
    count, size = one.slots(8)
    for slot, elements in ((count, 1), (0, size // 4 + 1)):
        with pytest.raises(DeviceError, match="do not fit into slot"):
            one.send(x, ..., 0, elements, 8, slot)
    one.close()
    other.close()
    with open_mesh_device((2,), driver="processes") as mesh:
        big = create_mesh_buffer(mesh, layout="sharded", global_shape=(2, 700_000), shard_shape=(1, 700_000))
        mesh.queue().enqueue_write(big, torch.ones(2, 700_000))
        assert mesh.queue().enqueue_read(all_reduce(big, mode="fabric")).eq(2).all()


def test_a_card_that_is_killed_in_a_send_is_an_error_with_its_coordinate():
    with open_mesh_device((2,), driver="processes") as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,))
        mesh.queue().enqueue_write(x, torch.ones(4))
        mesh.get_device(1).inject(Fault("send", "kill"))
        with pytest.raises(
            DeviceError, match=r"\(1,\): DeviceError: card 1 was lost in a launch of put: its process was"
        ):
            all_reduce(x, mode="fabric")
        assert mesh.queue().enqueue_read(x, coordinate=(0,)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("op", NAMES)
def test_every_op_that_the_driver_offers_is_that_of_torch(card, op):
    shapes = {"matmul": [(3, 4), (4, 5)], "sum": [(3, 4)], "transpose": [(3, 4)]}
    args = {"sum": {"dim": (1,)}, "transpose": {"dim0": 0, "dim1": 1}, "add": {"alpha": 2}}.get(op, {})
    binary = op in ("add", "sub", "mul", "div") or "backward" in op
    operands = [torch.rand(shape) + 0.1 for shape in shapes.get(op, [(3, 4)] * (2 if binary else 1))]
    more = {"threshold": 0} if op == "threshold_backward" else {}
    wanted = getattr(torch.ops.aten, op)(*operands, **args, **more).contiguous()
    kernel = card.driver.kernel_of(
        op, [Part(x.shape, x.dtype) for x in operands], Part(wanted.shape, wanted.dtype), args
    )
    out = card.alloc(0, tuple(wanted.shape), wanted.dtype)
    run(card, kernel, *(holding(card, each) for each in operands), out, **args)
    torch.testing.assert_close(card.read(out), wanted)


def test_ops_on_other_dtypes_and_unknown_ops_are_not_offered():
    driver, part, other = ProcessDriver(), Part((2,), torch.float32), Part((2,), torch.int64)
    assert driver.kernel_of("add", [part, part], part, {}) is not None
    for op, operands in (("add", [part, other]), ("add", [other, other]), ("sort", [part])):
        assert driver.kernel_of(op, operands, operands[0], {}) is None


# training


def forward(x: Any, up: Any, down: Any, target: Any, grad_up: Any, grad_down: Any, loss: Any) -> None:
    """Loss and gradients of a part of the batch."""
    hidden = x @ up
    active = hidden.relu()
    wrong = active @ down - target
    error = wrong * (2 / 64)
    loss.copy_(wrong.square().sum())
    grad_up.copy_(x.mT @ ((error @ down.mT) * (hidden > 0)))
    grad_down.copy_(active.mT @ error)


def step(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.sub_(gradient, alpha=0.2)


@pytest.mark.parametrize("mode", ["host", "fabric"])
def test_row_085_an_mlp_trains_on_cards_in_processes_as_it_does_dense(mode):
    made = torch.Generator().manual_seed(3)
    x, target = torch.randn(32, 6, generator=made), torch.randn(32, 2, generator=made)
    weights = [torch.randn(6, 8, generator=made) / 2, torch.randn(8, 2, generator=made) / 2]
    dense, expected = [w.clone().requires_grad_() for w in weights], []
    for _ in range(25):
        loss = ((x @ dense[0]).relu() @ dense[1] - target).square().sum()
        expected.append(loss.item() / 64)
        for w, g in zip(dense, torch.autograd.grad(loss / 64, dense), strict=True):
            w.data.sub_(g, alpha=0.2)
    with open_mesh_device((4,), driver="processes") as mesh:
        queue = mesh.queue()

        def put(value: torch.Tensor, sharded: bool) -> Any:
            shape = (value.shape[0] // 4, *value.shape[1:])
            options = {"layout": "sharded", "shard_shape": shape} if sharded else {}
            buffer = create_mesh_buffer(mesh, global_shape=tuple(value.shape), **options)
            queue.enqueue_write(buffer, value)
            return buffer

        batch, wanted = put(x, True), put(target, True)
        held = [put(w, False) for w in weights]
        parts = [put(torch.zeros(4 * w.shape[0], w.shape[1]), True) for w in weights]
        loss = put(torch.zeros(4), True)
        work = MeshWorkload()
        work.add_program(None, Program(forward, [batch, *held, wanted], [*parts, loss]))
        losses = []
        for _ in range(25):
            queue.enqueue_workload(work)
            losses.append(queue.enqueue_read(all_reduce(loss, mode=mode)).item() / 64)
            for weight, part in zip(held, parts, strict=True):
                update = MeshWorkload()
                update.add_program(None, Program(step, reads=[], updates=[weight, all_reduce(part, mode=mode)]))
                queue.enqueue_workload(update)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-6)
        assert losses[-1] < 0.7 * losses[0]
        for weight, w in zip(held, dense, strict=True):
            torch.testing.assert_close(queue.enqueue_read(weight), w.detach(), rtol=1e-4, atol=1e-5)


# through the mesh


def slow_fill(x: torch.Tensor, value: float) -> None:
    time.sleep(0.1)
    x.fill_(value)


@pytest.mark.parametrize("way", [{}, {"dispatch": "slow"}, {"stress": 3}, {"check": "races"}])
def test_a_buffer_that_is_freed_while_commands_use_it_gives_its_memory_to_nobody_before_they_are_done(way):
    with open_mesh_device((2,), driver="processes", **way) as mesh:
        x, queue = create_mesh_buffer(mesh, global_shape=(4,), name="x"), mesh.queue()
        queue.enqueue_write(x, torch.zeros(4))
        queue.enqueue_workload(on_all(slow_fill, x, value=7.0))
        queue.enqueue_workload(on_all(slow_fill, x, value=8.0))
        x.free()
        y = create_mesh_buffer(mesh, global_shape=(4,), name="y")
        queue.enqueue_write(y, torch.ones(4))
        queue.enqueue_workload(on_all(add_one, y))
        assert queue.enqueue_read(y).eq(2).all()
        queue.finish()


def test_what_a_trace_uses_stays_on_the_cards_until_it_is_released():
    with open_mesh_device((2,), driver="processes") as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(4,), name=name) for name in "xy")
        queue, workload = mesh.queue(), MeshWorkload()
        workload.add_program(None, Program(copy_twice, [x], [y]))
        queue.enqueue_write(x, torch.ones(4))
        with mesh.capture() as trace:
            queue.enqueue_workload(workload)
        x.free()
        other = create_mesh_buffer(mesh, global_shape=(4,))
        queue.enqueue_write(other, torch.full((4,), 9.0))
        mesh.execute_trace(trace)
        assert queue.enqueue_read(y).eq(2).all()
        used = mesh.cards[0]._arena.used
        trace.release()
        del x, workload, trace
        gc.collect()
        assert mesh.cards[0]._arena.used < used


def copy_twice(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(2 * x)


def test_a_card_that_hangs_in_a_send_is_ended_and_usable_after_a_reset():
    with open_mesh_device((2,), driver="processes", timeout=0.3) as mesh:
        x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,))
        mesh.queue().enqueue_write(x, torch.ones(4))
        mesh.get_device(0).inject(Fault("send", "hang", times=1))
        with pytest.raises(DeviceTimeoutError, match=r"\(0,\): DeviceTimeoutError: message 0 from card 0 to card 1"):
            all_reduce(x, mode="fabric")
        with pytest.raises(DeviceError, match=r"card 0 is lost: all_reduce of .* did not end in time"):
            mesh.queue().enqueue_read(x, coordinate=(0,))
        mesh.get_device(0).reset()
        assert mesh.queue().enqueue_read(all_reduce(x, mode="host")).eq(2).all()


def test_a_program_that_closes_nothing_ends_quietly(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from meshloom.runtime import create_mesh_buffer, open_mesh_device, MeshWorkload, Program\n"
        "class Shift:\n    by = 1\n"
        "def add(x):\n    x.add_(2); print('there')\n"
        "def bad(x):\n    x.add_(Shift.by)\n"
        "mesh = open_mesh_device((1,), driver='processes')\n"
        "x = create_mesh_buffer(mesh, global_shape=(2,))\n"
        "for kernel in (add, bad):\n"
        "    workload = MeshWorkload(); workload.add_program(None, Program(kernel, updates=[x]))\n"
        "    try:\n"
        "        mesh.queue().enqueue_workload(workload, blocking=True)\n"
        "    except RuntimeError as error:\n"
        "        print(str(error).splitlines()[2])\n"
        "print(mesh.queue().enqueue_read(x).tolist(), mesh.cards[0].pid)\n"
    )
    ran = subprocess.run([sys.executable, "-X", "dev", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (ran.returncode, ran.stderr) == (0, "")
    there, told, result = ran.stdout.splitlines()
    assert there == "there" and result.startswith("[2.0, 2.0] ")
    assert "(0,): ArgumentError: kernel 'bad' cannot go to the process of a card: it refers to Shift" in told
    check_gone([int(result.split()[-1])])


# kernels and what they refer to

FACTOR = 3


def scale(x: torch.Tensor) -> None:
    x.mul_(FACTOR)


def countdown(x: torch.Tensor, times: int) -> None:
    if times:
        scale(x)
        countdown(x, times - 1)


def test_a_kernel_takes_along_its_globals_functions_closure_and_defaults(card):
    by, empty = 5, []

    def inner(x: torch.Tensor, *, plus: float = 0.5) -> None:
        countdown(x, 2)
        x.mul_(by).add_(plus + len(empty) + math.floor(math.pi))

    x = holding(card, torch.ones(1))
    run(card, inner, x)
    assert card.read(x).tolist() == [9 * 5 + 3.5]
    run(card, lambda x: x.copy_(torch.nn.functional.relu(-x)), x)
    assert card.read(x).tolist() == [0.0]


def test_a_kernel_may_import_and_call_what_imports(card):
    x = holding(card, torch.zeros(2))
    run(card, lambda x: x.copy_(torch.tensor([1.0, 2.0])), x)
    assert card.read(x).tolist() == [1.0, 2.0]


def test_a_card_works_in_the_folder_and_finds_the_modules_of_its_owner(tmp_path, monkeypatch):
    (tmp_path / "beside_the_kernel.py").write_text("VALUE = 5.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def kernel(x: torch.Tensor, name: str) -> None:
        import beside_the_kernel

        x.fill_(beside_the_kernel.VALUE * os.path.exists(name))

    card = ProcessDriver().open(0)
    x = holding(card, torch.zeros(1))
    run(card, kernel, x, name="beside_the_kernel.py")
    assert card.read(x).tolist() == [5.0]
    card.close()


def test_a_reset_ends_what_others_wait_for(card):
    x = holding(card, torch.ones(1))
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(DeviceError) as caught:
            run(card, spin, x)
        told.append(caught.value.headline)

    thread = threading.Thread(target=wait)
    thread.start()
    while not card.is_busy:
        time.sleep(0.01)
    card.reset()
    thread.join(PATIENCE)
    assert told == ["card 0 was lost in a launch of spin: it was reset"]
    run(card, add_one, x)


def test_a_card_that_the_system_has_stopped_is_ended_after_the_timeout():
    with open_mesh_device((2,), driver="processes", timeout=0.3) as mesh:
        x, pid = create_mesh_buffer(mesh, global_shape=(1,)), mesh.cards[1].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeviceTimeoutError, match=r"\(1,\): DeviceTimeoutError: did not end within 0\.3 s, and was"):
            mesh.queue().enqueue_workload(on_all(add_one, x), blocking=True)
        check_gone([pid])


def test_an_attribute_with_the_name_of_a_global_is_not_taken_along(card):
    names: dict[str, Any] = {"view": threading.Lock()}
    exec("def kernel(x):\n    x.view(-1).add_(1)", names)
    x = holding(card, torch.ones(2))
    run(card, names["kernel"], x)
    assert card.read(x).tolist() == [2.0, 2.0]


def test_what_cannot_go_along_is_named(card):
    gate = threading.Event()

    def stuck(x: torch.Tensor) -> None:
        gate.wait()

    with pytest.raises(ArgumentError, match="kernel 'stuck' cannot go to the process of a card: it refers to gate, <"):
        card.load(card.driver.compile(stuck), stuck)
    with pytest.raises(ArgumentError, match="argument 'lock' of kernel 'add_one' cannot go"):
        card.launch(card.load(card.driver.compile(add_one), add_one), [], {"lock": threading.Lock()})
    run(card, add_one, holding(card, torch.ones(1)))


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:  # can be written by pickle and not be read
        super().__init__("odd")


def test_whatever_a_kernel_raises_is_told_with_the_lines_of_its_process(card):
    def failing(kind: str) -> None:
        raise {"KeyError": KeyError, "SystemExit": SystemExit, "Interrupt": KeyboardInterrupt}[kind]("planted")

    for kind, error in (("KeyError", KeyError), ("SystemExit", SystemExit), ("Interrupt", KeyboardInterrupt)):
        with pytest.raises(error, match="planted") as caught:
            run(card, failing, kind=kind)
        assert "in failing" in str(caught.value.__cause__)

    def odd() -> None:
        raise Odd(1, 2)

    with pytest.raises(DeviceError, match="Odd: odd, on card 0"):
        run(card, odd)
    run(card, add_one, holding(card, torch.ones(1)))


def test_long_arguments_and_many_launches_under_way(card):
    def add(x: torch.Tensor, value: torch.Tensor) -> None:
        x.add_(value.sum())

    x, value = holding(card, torch.zeros(1)), torch.ones(100_000)
    loaded = card.load(card.driver.compile(add), add)
    tickets = [card.launch(loaded, [x], {"value": value}) for _ in range(50)]
    assert all(card.wait(ticket, PATIENCE) for ticket in reversed(tickets))
    assert card.read(x).tolist() == [5_000_000.0]
    card.free(x)
    assert card._arena.used == 0


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64])
def test_memory_of_any_shape_and_dtype(card, shape, dtype):
    value = torch.randn(shape).to(dtype)
    x, y = holding(card, value), card.alloc(0, shape, dtype)
    assert card.read(y).eq(0).all()
    run(card, lambda x, y: y.copy_(x), x, y)
    assert card.read(y).equal(value) and card.read(y).dtype == dtype and card.read(y).shape == shape


def test_memory_that_a_launch_uses_is_given_to_nobody_else(card):
    def slow(x: torch.Tensor) -> None:
        time.sleep(0.2)
        x.fill_(9)

    x = holding(card, torch.ones(4))
    ticket = card.launch(card.load(card.driver.compile(slow), slow), [x], {})
    card.free(x)
    y = card.alloc(0, (4,), torch.float32)
    assert card.wait(ticket, PATIENCE) and card.read(y).eq(0).all()
    with pytest.raises(DeviceError, match="has been freed"):
        card.read(x)
    del x, ticket
    assert card.alloc(0, (4,), torch.float32).piece.start < y.piece.start


def test_a_closed_card_gives_its_memory_back_though_somebody_holds_it(card):
    x = holding(card, torch.ones(1 << 22))
    held = os.dup(card._arena.file.fileno())
    assert os.fstat(held).st_blocks * 512 >= 1 << 24
    card.close()
    assert os.fstat(held).st_blocks == 0 and x.shape == (1 << 22,)
    os.close(held)


def test_a_closed_card_says_so(card):
    x = holding(card, torch.ones(1))
    card.close()
    for use in (lambda: card.read(x), lambda: card.alloc(0, (1,), torch.int8), lambda: run(card, add_one, x)):
        with pytest.raises(DeviceError, match="card 0 is closed"):
            use()
    card.reset()  # nothing to start
    for wrong in ({"threads": 0}, {"threads": 1.5}, {"memory_limit": "1"}, {"memory_limit": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            ProcessDriver(**wrong)


def test_drivers_by_name():
    with open_mesh_device((1,), driver="virtual") as mesh:
        assert mesh.cards[0].info().path == "virtual:0"
    with open_mesh_device((1,), [5], driver="processes", memory=1 << 20) as mesh:
        assert mesh.cards[0].info().path == "process:5" and mesh.cards[0].info().chip.dram == 1 << 20
    with pytest.raises(ArgumentError, match="there is no driver 'process'") as caught:
        open_mesh_device((1,), driver="process")
    assert "did you mean 'processes'?" in str(caught.value)


# the parts


def test_the_arena_gives_zeros_joins_pieces_and_returns_pages():
    arena = Arena(8 * SLACK, "test")
    first, second = arena.take(2 * SLACK), arena.take(100)
    view(arena.bytes, first.start, (first.end - first.start,), torch.uint8).fill_(1)
    view(arena.bytes, second.start, (100,), torch.uint8).fill_(1)
    blocks = os.fstat(arena.file.fileno()).st_blocks
    assert blocks * 512 >= 2 * SLACK
    del first
    again = arena.take(SLACK)  # beneath what is still used: zeroed
    assert again.start == 0 and not view(arena.bytes, 0, (SLACK,), torch.uint8).any()
    del again, second
    assert arena.used == 0 and os.fstat(arena.file.fileno()).st_blocks * 512 < SLACK
    whole = arena.take(2 * SLACK)
    assert not view(arena.bytes, whole.start, (2 * SLACK,), torch.uint8).any()
    with pytest.raises(MemoryError, match="do not fit into the memory of the card"):
        arena.take(7 * SLACK)


def test_two_sides_that_send_long_messages_at_once_do_not_wait_for_each_other():
    one, other = map(Frames, socket.socketpair())
    message = bytes(10 << 20)

    def answer() -> None:
        other.send(message, PATIENCE)
        assert other.receive(PATIENCE) == message

    thread = threading.Thread(target=answer)
    thread.start()
    one.send(message, PATIENCE)
    assert one.receive(PATIENCE) == message
    thread.join(PATIENCE)
    for end in (one, other):
        end.close()


def test_a_message_that_was_cut_off_is_the_end_and_one_that_nobody_takes_a_timeout():
    one, other = socket.socketpair()
    frames = Frames(other)
    with pytest.raises(TimeoutError, match=r"took nothing for 0\.05 s"):
        frames.send(bytes(10 << 20), 0.05)
    one.close()
    with pytest.raises(EOFError):
        frames.receive(PATIENCE)
    frames.close()
