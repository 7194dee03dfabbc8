"""The driver for blackhole-py over a stand-in: the suite of cards, the traps of that driver, programs, faults."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blackhole import MACHINE, STAND_IN, codegen, device as cards, dram, driver, install, kernels
from meshloom.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceTimeoutError,
    FabricError,
    MeshError,
    OutOfMemoryError,
    UnsupportedError,
)
from meshloom.processes import discovery
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from meshloom.runtime.card import FluentDriver, LinkedCard, Part, SizedCard, SourceKernel
from meshloom.runtime.drivers import blackhole_memory as memory, blackhole_modules
from meshloom.runtime.drivers.blackhole import BlackholeDriver
from meshloom.runtime.drivers.card_locks import alone
from meshloom.runtime.links import Channel
from runtime_conformance import CardConformance, LinkConformance

Device, DataflowLaunch, CardProgram, Compiler = cards.Device, cards.DataflowLaunch, cards.Program, codegen.Compiler
ADD, FILL, MATMUL, RELU = kernels.ADD, kernels.FILL, kernels.MATMUL, kernels.RELU
HOLDING = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


class TestBlackhole(LinkConformance):
    def driver(self):
        return driver()

    def test_row_169_this_is_the_suite_of_cards_and_nothing_of_it_is_left_out(self):
        suite = [name for name in dir(LinkConformance) if name.startswith("test_")]
        assert len(suite) >= 17 and isinstance(self.driver(), BlackholeDriver)
        assert all(getattr(type(self), name) is getattr(LinkConformance, name) for name in suite)


class TestSlowBlackhole(CardConformance):
    """Slow dispatch: every command is done when its call returns."""

    @pytest.fixture(autouse=True)
    def slow(self, monkeypatch, machine):
        monkeypatch.setenv("TT_USB", "1")

    def driver(self):
        return driver()


# the traps: the stand-in bites whoever does not know them


def fill_program(address: int, value: float) -> CardProgram:
    """A program of one core that fills a tile, as a user of blackhole-py would write it."""
    compiler = Compiler()
    reader, writer = compiler.compile_dataflow("read", "ncrisc"), compiler.compile_dataflow("write", "brisc")
    bits = int(np.float32(value).view(np.uint32))
    launch = DataflowLaunch(1, [0, 1], [address], reader, writer)
    return CardProgram([launch], compiler.compile_compute("fill"), [4, bits], [0], 4096, 1, cores=1)


def test_trap_memory_only_grows_and_wraps_around_at_its_end():
    device = Device(0)
    first = device.dram.alloc_write(b"\1" * 4096, page_size=4096)
    device.sync()
    while device.dram.next < MACHINE.boards[0].bank_size:
        last = device.dram.alloc(1 << 20, page_size=1 << 20)
    assert last.addr + (1 << 20) > MACHINE.boards[0].bank_size  # nobody said that it does not fit
    device.dram.write(last, b"\2" * (1 << 20))
    assert device.dram.read(first) != b"\1" * 4096
    device.close()


def test_trap_a_second_fast_write_overwrites_the_first():
    device = Device(0)
    first, second = device.dram.alloc(64), device.dram.alloc(64)
    device.dram.write(first, b"a" * 64)
    device.dram.write(second, b"b" * 64)
    assert device.dram.read(first) == b"b" * 64
    device.close()


def test_trap_a_queued_read_has_no_data_before_the_sync():
    device = Device(0)
    pending = device.dram.enqueue_read(device.dram.alloc_write(b"a" * 64))
    assert pending.data is None
    device.sync()
    assert pending.data == b"a" * 64
    device.close()


def test_trap_another_program_at_the_same_id_runs_the_old_one():
    device = Device(0)
    tile = device.dram.alloc(4096, page_size=4096)
    made = fill_program(tile.addr, 1.0)
    device.run(made, wait=True)
    parts, old = {**vars(made), "compute_rt_args": [4, int(np.float32(2).view(np.uint32))]}, id(made)
    del made
    kept = [CardProgram(**parts) for _ in range(50)]  # CPython gives the address of what was freed to the next
    (again,) = (program for program in kept if id(program) == old)
    device.run(again, wait=True)
    assert np.frombuffer(device.dram.read(tile), np.float32)[0] == 1.0  # and not 2.0
    device.close()


def test_trap_a_wrong_card_ends_the_program():
    MACHINE.boards[2].kind = "p150a"
    with pytest.raises(SystemExit):
        Device(2)


def test_trap_banks_of_two_cards_are_not_the_same_ones():
    devices = [Device(0), Device(1)]
    for device in devices:
        device.dram.alloc_write(bytes(range(64)) * 7)
        device.sync()
    assert devices[0].harvested_dram != devices[1].harvested_dram
    raw = [{number: bank[0x40:0x80].tolist() for number, bank in MACHINE.boards[i].banks.items()} for i in (0, 1)]
    assert raw[0].keys() != raw[1].keys() and len(raw[0]) == len(raw[1]) == 7
    for device in devices:
        device.close()


def test_trap_a_second_owner_ends_the_commands_of_the_first():
    first = Device(0)
    first.dram.alloc_write(b"a" * 64)
    second = Device(0)
    with pytest.raises(RuntimeError, match="event mismatch"):
        first.sync()
    first.close()
    second.close()


def test_trap_a_wait_for_a_hung_card_times_out():
    device = Device(0)
    MACHINE.boards[0].hangs = True
    with pytest.raises(TimeoutError):
        device.sync(timeout_s=0.01)
    device.close()


RACING = """
import sys
sys.path.insert(0, {stand_in!r})
from codegen import Compiler
sys.stdin.readline()
for number in range(20):
    Compiler().compile_dataflow(f"kernel {{number}} " + "x" * 50, "brisc").source()
"""


@pytest.mark.slow
def test_trap_processes_that_compile_at_once_read_halves(tmp_path):
    environment = {**os.environ, "STAND_IN_CACHE": str(tmp_path / "metal-cache")}
    code = RACING.format(stand_in=str(STAND_IN))
    assert any(b"bad ELF" in error for error in _run_at_once([sys.executable, "-c", code], environment, 4))


def _run_at_once(command: list[str], environment: dict[str, str], count: int) -> list[bytes]:
    """What processes that start at the same time write to stderr."""
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=environment, **options) for _ in range(count)]
    for process in running:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    return [process.communicate(timeout=120)[1] for process in running]


# memory


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (5000,), (0,), (0, 4), (1, 1), (33, 70), (2, 3, 40, 33), (7, 32, 32)])
def test_arrays_of_any_shape_and_kind_come_back(shape, kind):
    with open_mesh_device((2,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=shape, dtype=kind)
        value = torch.randint(0, 2, shape).to(kind) if kind == torch.bool else (torch.randn(shape) * 50).to(kind)
        mesh.queue().enqueue_write(x, value)
        assert mesh.queue().enqueue_read(x).equal(value)


def test_a_matrix_lies_on_the_card_as_the_driver_would_tilise_it():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(64, 96))
        value = torch.randn(64, 96)
        mesh.queue().enqueue_write(x, value, blocking=True)
        held = mesh.cards[0]._device.dram.read(x.handle(0).buffer)
        assert held == dram.tilize(value.numpy().tobytes(), 4, (64, 96))


def test_padding_is_zero():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(3, 5))
        mesh.queue().enqueue_write(x, torch.ones(3, 5), blocking=True)
        held = np.frombuffer(mesh.cards[0]._device.dram.read(x.handle(0).buffer), np.float32)
        assert held.sum() == 15 and held.size == 1024


def test_writes_larger_than_the_staging_memory_go_in_pieces():
    MACHINE.sysmem = 3 * 7 * 4096
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(50 * 32, 64))
        value = torch.randn(50 * 32, 64)
        mesh.queue().enqueue_write(x, value)
        assert mesh.queue().enqueue_read(x).equal(value)


def test_two_writes_in_a_row_both_arrive():
    with open_mesh_device((2,), driver=driver()) as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(4, 4)) for _ in range(2))
        mesh.queue().enqueue_write(x, torch.ones(4, 4))
        mesh.queue().enqueue_write(y, torch.zeros(4, 4))
        assert mesh.queue().enqueue_read(x).eq(1).all() and mesh.queue().enqueue_read(y).eq(0).all()


def test_buffers_never_overlap_and_freed_memory_is_used_again():
    with open_mesh_device((2,), driver=driver()) as mesh:
        held = [create_mesh_buffer(mesh, global_shape=(rows, 5)) for rows in (1, 33, 7 * 32, 100, 1)]
        for number, buffer in enumerate(held):
            mesh.queue().enqueue_write(buffer, torch.full(buffer.shape, float(number)))
        for number, buffer in enumerate(held):
            assert mesh.queue().enqueue_read(buffer).eq(number).all()
        address = held[2].address
        held[2].free()
        again = create_mesh_buffer(mesh, global_shape=(7 * 32, 5))
        assert again.address == address


def test_memory_has_an_end():
    with open_mesh_device((2,), driver=driver()) as mesh:
        total = 7 * (MACHINE.boards[0].bank_size - 0x40)
        assert mesh.system.chip.dram == total and mesh.dram_grid_size().num_cores == 7
        with pytest.raises(OutOfMemoryError, match=r"does not fit into DRAM of 28\.0 MiB per device"):
            create_mesh_buffer(mesh, global_shape=(2 * total // 4,))
        with pytest.raises(OutOfMemoryError, match="does not fit into a bank of card 0"):
            mesh.cards[0].alloc(MACHINE.boards[0].bank_size, (1,), torch.float32)
        with pytest.raises(UnsupportedError, match="cards of BlackholeDriver keep buffers in DRAM, not in l1"):
            create_mesh_buffer(mesh, global_shape=(1,), buffer_type="l1")


def test_cards_with_different_banks_share_what_all_of_them_have():
    opened: list[Any] = []

    class Mixed(BlackholeDriver):
        def open(self, index: int) -> Any:
            card = super().open(index)
            if index == 1:
                card._device.harvested_dram = [2, 5]
            opened.append(card)
            return card

    with open_mesh_device((2,), driver=Mixed(STAND_IN, bank_size=1 << 20)) as mesh:
        assert [card.info().chip.banks for card in opened] == [7, 6]
        assert mesh.system.chip.banks == 6 and mesh.system.chip.dram == 6 * ((1 << 20) - 0x40)


# programs


def on_all(kernel: Any, reads: Any = (), writes: Any = (), where: Any = None, **args: Any) -> MeshWorkload:
    workload = MeshWorkload()
    workload.add_program(where, Program(kernel, reads=list(reads), writes=list(writes), args=args))
    return workload


def test_programs_of_the_driver_run_on_the_cards_and_move_nothing_through_the_host():
    with open_mesh_device((2,), driver=driver()) as mesh:
        a, b, c, d = (create_mesh_buffer(mesh, global_shape=(40, 40)) for _ in range(4))
        x, y = torch.randn(40, 40), torch.randn(40, 40)
        mesh.queue().enqueue_write(a, x)
        mesh.queue().enqueue_write(b, y, blocking=True)
        before = mesh.counts["host_bytes"]
        mesh.queue().enqueue_workload(on_all(MATMUL, [a, b], [c]))
        mesh.queue().enqueue_workload(on_all(ADD, [c, a], [d]))
        mesh.queue().enqueue_workload(on_all(RELU, [d], [c]), blocking=True)
        assert mesh.counts["host_bytes"] == before and not any(card.host_bytes for card in mesh.cards)
        torch.testing.assert_close(mesh.queue().enqueue_read(c), (x @ y + x).relu(), rtol=1e-4, atol=1e-4)


def test_bfloat16_programs_round_once():
    with open_mesh_device((1,), driver=driver()) as mesh:
        a, b, c = (create_mesh_buffer(mesh, global_shape=(64, 64), dtype="bf16") for _ in range(3))
        x, y = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
        mesh.queue().enqueue_write(a, x)
        mesh.queue().enqueue_write(b, y)
        mesh.queue().enqueue_workload(on_all(MATMUL, [a, b], [c]))
        expected = (x.float() @ y.float()).bfloat16()
        torch.testing.assert_close(mesh.queue().enqueue_read(c).float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_a_program_runs_hot_for_the_same_arguments_and_anew_for_others():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        executed = MACHINE.boards[0].executed
        workload = on_all(FILL, writes=[x], value=2.0)
        for value in (2.0, 2.0, 3.0, 2.0):
            workload.set_args(value=value)
            mesh.queue().enqueue_workload(workload)
            assert mesh.queue().enqueue_read(x).eq(value).all()
        assert executed == ["cold", "hot", "cold", "hot"]


def test_fault_a_program_freed_too_early_is_kept_by_its_card():
    kept = []

    def build(compiled: Any, handles: Any, args: Any) -> CardProgram:
        program = fill_program(handles[0].buffer.addr, args["value"])
        kept.append(weakref.ref(program))
        return program

    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        for value in range(12):  # as in the trap, but nobody keeps a program, a workload or a kernel here
            kernel = SourceKernel("fill", {"compute": "fill", "reader": str(value)}, build)
            mesh.queue().enqueue_workload(on_all(kernel, writes=[x], value=float(value)))
            assert mesh.queue().enqueue_read(x).eq(value).all()
            del kernel
            gc.collect()
        assert all(ref() is not None for ref in kept) and len(kept) == 12
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_a_python_kernel_runs_on_the_host_and_is_counted():
    with open_mesh_device((2,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4, 4))
        mesh.queue().enqueue_write(x, torch.ones(4, 4))
        mesh.queue().enqueue_workload(on_all(lambda x: x.mul_(3), writes=[x]))
        assert mesh.queue().enqueue_read(x).eq(3).all()
        assert [card.host_bytes for card in mesh.cards] == [128, 128]  # read, and written back


def test_what_a_kernel_on_the_host_leaves_alone_is_not_written_back():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x, y = (create_mesh_buffer(mesh, global_shape=(4,)) for _ in range(2))
        mesh.queue().enqueue_write(x, [float("nan"), 1.0, 2.0, 3.0])
        mesh.queue().enqueue_workload(on_all(lambda x, y: y.copy_(x.isnan()), [x], [y]))
        assert mesh.queue().enqueue_read(y).tolist() == [1, 0, 0, 0]
        assert mesh.cards[0].host_bytes == 3 * 16


def test_a_kernel_that_does_not_compile_says_so():
    broken = SourceKernel("broken", {"compute": "#error no such thing"}, lambda *_: None)
    with open_mesh_device((2,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        mesh.queue().enqueue_workload(on_all(broken, writes=[x]))
        with pytest.raises(DeviceError, match="cannot compile kernel 'broken': RuntimeError: compile failed"):
            mesh.queue().finish()
        odd = SourceKernel("odd", {"middle": "what"}, lambda *_: None)
        mesh.queue().enqueue_workload(on_all(odd, writes=[x]))
        with pytest.raises(DeviceError, match="a kernel has no role 'middle'"):
            mesh.queue().finish()


def test_arguments_that_cannot_be_compared_are_refused():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        mesh.queue().enqueue_workload(on_all(FILL, writes=[x], value=[1.0]))
        with pytest.raises(DeviceError, match="the arguments of 'fill' cannot be compared"):
            mesh.queue().finish()


def test_a_source_kernel_on_virtual_cards_is_refused():
    with open_mesh_device((1,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        mesh.queue().enqueue_workload(on_all(FILL, writes=[x], value=1.0))
        with pytest.raises(DeviceError, match="a kernel is a Python function"):
            mesh.queue().finish()


def test_the_driver_offers_kernels_for_operands_that_it_knows():
    rack, part = driver(), Part((40, 40), torch.float32)
    assert isinstance(rack, FluentDriver)
    assert rack.kernel_of("matmul", [part, part], part, {}) is MATMUL
    assert rack.kernel_of("add", [part, part], part, {"alpha": 2}) is None
    assert rack.kernel_of("relu", [Part((4,), torch.float64)], Part((4,), torch.float64), {}) is None
    assert rack.kernel_of("softmax", [part], part, {}) is None
    assert driver(kernels={}).kernel_of("matmul", [part, part], part, {}) is None
    card = rack.open(0)
    assert isinstance(card, LinkedCard) and isinstance(card, SizedCard)
    card.close()


def test_without_links_beside_it_a_card_has_none(monkeypatch):
    monkeypatch.setattr(blackhole_modules, "LINKS", "no_such_file")
    card = driver().open(0)
    assert not isinstance(card, LinkedCard)
    card.close()


# finding cards and their driver


def test_enumerate_lists_nodes_and_honours_the_visible_ones(monkeypatch):
    assert driver().enumerate() == [0, 1, 2, 3]
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "3,1")
    assert driver().enumerate() == [3, 1]
    with open_mesh_device((2,), driver=driver()) as mesh:
        assert mesh.get_device_ids() == [3, 1]
    with pytest.raises(MeshError, match="there is no device 0"):
        open_mesh_device(["/dev/tenstorrent/0"], (1,))


def test_the_folder_is_an_argument_or_a_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("MESHLOOM_BLACKHOLE")
    assert blackhole_modules.find_folder(STAND_IN) == STAND_IN
    monkeypatch.setenv("MESHLOOM_BLACKHOLE", str(STAND_IN))
    assert blackhole_modules.find_folder() == STAND_IN
    with pytest.raises(ArgumentError, match=r"it has no device\.py"):
        blackhole_modules.find_folder(tmp_path)
    monkeypatch.delenv("MESHLOOM_BLACKHOLE")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if Path(each) != STAND_IN])
    monkeypatch.delitem(sys.modules, "device")
    assert blackhole_modules.find_folder() is None
    with pytest.raises(DeviceError, match="blackhole-py, the driver of Tenstorrent cards, is not installed here"):
        blackhole_modules.load()


def test_another_version_of_blackhole_py_is_refused_by_what_it_lacks(tmp_path):
    folder = tmp_path / "later"
    folder.mkdir()
    (folder / "device.py").write_text("class Device: pass\n")
    with pytest.raises(DeviceError, match="a module 'device' is already imported from"):
        blackhole_modules.load(folder)
    code = f"from meshloom.runtime.drivers.blackhole_modules import load\nload({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "has no DramBuffer in dram" in done.stderr and "files of February 2026" in done.stderr


# faults of cards, each an error that says where


def lock_held(tmp_path: Path) -> Callable[[], None]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(discovery.CARDS / "1")], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"

    def act() -> None:
        try:
            open_mesh_device((2, 2), driver=driver())
        finally:
            holder.kill()
            holder.communicate()

    return act


def two_owners(tmp_path: Path) -> Callable[[], None]:
    first = open_mesh_device((2,), driver=driver())

    def act() -> None:
        try:
            open_mesh_device((2, 2), driver=driver())
        finally:
            x = create_mesh_buffer(first, global_shape=(4,))
            first.queue().enqueue_write(x, [1.0, 2.0, 3.0, 4.0])  # the first owner has lost nothing
            assert first.queue().enqueue_read(x).tolist() == [1, 2, 3, 4]
            first.close()

    return act


def wrong_kind(tmp_path: Path) -> Callable[[], None]:
    MACHINE.boards[3].kind = "p150a"
    return lambda: open_mesh_device((2, 2), driver=driver())


def path_not_there(tmp_path: Path) -> Callable[[], None]:
    return lambda: open_mesh_device(["/dev/tenstorrent/0", "/dev/tenstorrent/7"], (2,))


def read_after_close(tmp_path: Path) -> Callable[[], None]:
    mesh = open_mesh_device((2,), driver=driver())
    x = create_mesh_buffer(mesh, global_shape=(4,))
    card, handle = mesh.cards[1], x.handle(1)
    mesh.close()
    return lambda: card.read(handle)


def _hung(command: Callable[[Any, Any], None]) -> None:
    """A command on two cards, one of which does not answer; the other one stays usable."""
    with open_mesh_device((2,), driver=driver(timeout=0.05), timeout=0.05) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        mesh.queue().enqueue_write(x, torch.ones(32, 32), blocking=True)
        MACHINE.boards[1].hangs = True
        try:
            command(mesh, x)
        finally:
            assert mesh.queue().enqueue_read(x, coordinate=(0,)).sum() > 0
            with pytest.raises(DeviceError, match="card"):  # it is lost, and said to be
                mesh.queue().enqueue_read(x, coordinate=(1,))


def write_timeout(tmp_path: Path) -> Callable[[], None]:
    return lambda: _hung(lambda mesh, x: mesh.queue().enqueue_write(x, torch.ones(32, 32), blocking=True))


def read_timeout(tmp_path: Path) -> Callable[[], None]:
    return lambda: _hung(lambda mesh, x: mesh.queue().enqueue_read(x))


def launch_timeout(tmp_path: Path) -> Callable[[], None]:
    work = lambda x: on_all(FILL, writes=[x], value=2.0)  # noqa: E731
    return lambda: _hung(lambda mesh, x: mesh.queue().enqueue_workload(work(x), blocking=True))


def link_cut(tmp_path: Path) -> Callable[[], None]:
    from meshloom.runtime import all_reduce

    def act() -> None:
        with open_mesh_device((4,), driver=driver()) as mesh:
            x = create_mesh_buffer(mesh, global_shape=(8, 8))
            mesh.queue().enqueue_write(x, torch.ones(8, 8), blocking=True)
            MACHINE.cut.add(frozenset((2, 3)))
            all_reduce(x, mode="fabric")

    return act


def slot_overrun(tmp_path: Path) -> Callable[[], None]:
    def act() -> None:
        rack = driver()
        one, other = rack.open(0), rack.open(1)
        x = one.alloc(0, (4,), torch.float32)
        one.write(x, torch.ones(4))
        channel = Channel(one, other)
        try:
            for _ in range(channel.slots + 1):
                channel.send(x, ..., 0, 4, timeout=0.05)
        finally:
            assert not any(slot.overruns for slot in MACHINE.boards[1].slots[0])
            one.close()
            other.close()

    return act


FAULTS: dict[str, tuple[Callable[[Path], Callable[[], None]], type[Exception], str]] = {
    "lock held": (lock_held, DeviceError, r"the device at \(0, 1\) does not open: .*1 is in use by process \d+"),
    "two owners": (two_owners, DeviceError, r"the device at \(0, 0\) does not open: .*0 is in use by this process"),
    "wrong kind": (wrong_kind, DeviceError, r"the device at \(1, 1\) .* wanted to end the program .* p150a"),
    "path not there": (path_not_there, MeshError, r"there is no device 7(.|\n)*tenstorrent/7 is not there"),
    "read after close": (read_after_close, ClosedError, "card 1 is closed"),
    "write time-out": (write_timeout, DeviceTimeoutError, r"\(1,\): DeviceTimeoutError: card 1 timed out in a write"),
    "read time-out": (read_timeout, DeviceTimeoutError, r"\(1,\): DeviceTimeoutError: card 1 timed out in a read"),
    "launch time-out": (launch_timeout, DeviceTimeoutError, r"\(1,\): DeviceTimeoutError: did not end within 0.05 s"),
    "link cut": (link_cut, DeviceTimeoutError, r"\([23],\): DeviceTimeoutError: .* the link from [23] to [23] is down"),
    "slot overrun": (slot_overrun, DeviceTimeoutError, "a free slot from card 0 to card 1 did not come within 0.05 s"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_card_is_an_error_that_says_where(name, tmp_path):
    prepare, kind, text = FAULTS[name]
    act = prepare(tmp_path)
    with pytest.raises(kind, match=text):
        act()
    for board in MACHINE.boards.values():  # nothing is left behind: every card can be opened again
        board.kind, board.hangs = "p100a", False
    MACHINE.cut.clear()
    with open_mesh_device((2, 2), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        mesh.queue().enqueue_write(x, [1.0, 2.0, 3.0, 4.0])
        assert mesh.queue().enqueue_read(x).tolist() == [1, 2, 3, 4]


def test_memory_of_a_lost_card_is_not_given_to_others():
    with open_mesh_device((1,), driver=driver(timeout=0.05), timeout=0.05) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        MACHINE.boards[0].hangs = True
        with pytest.raises(DeviceTimeoutError):
            mesh.queue().enqueue_write(x, torch.ones(32, 32), blocking=True)
        address = x.address
        x.free()
        assert create_mesh_buffer(mesh, global_shape=(32, 32)).address != address


def test_a_card_that_nobody_closed_is_free_again():
    driver().open(0)
    gc.collect()
    driver().open(0).close()


def test_an_error_of_a_program_is_one_of_ours_and_the_card_goes_on():
    MACHINE.boards[0].slots.clear()
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(32, 32))
        bad = SourceKernel("bad", {"compute": "no_such_op"}, lambda c, h, a: _bad_program(c))
        mesh.queue().enqueue_workload(on_all(bad, writes=[x]))
        with pytest.raises(DeviceError, match=r"\(0,\): DeviceError: card 0 failed in a wait: AttributeError"):
            mesh.queue().finish()
        mesh.queue().enqueue_write(x, torch.ones(32, 32))
        assert mesh.queue().enqueue_read(x).eq(1).all()


def _bad_program(compiled: Any) -> CardProgram:
    launch = DataflowLaunch(1, [], [], None, None)
    return CardProgram([launch], compiled["compute"], [], [], 4096, 1, cores=1)


def test_two_threads_use_one_card():
    with open_mesh_device((1,), driver=driver(), num_command_queues=2) as mesh:
        buffers = [create_mesh_buffer(mesh, global_shape=(64, 64)) for _ in range(2)]
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(30):
                    queue = mesh.queue(number)
                    queue.enqueue_write(buffers[number], torch.full((64, 64), float(turn)))
                    assert queue.enqueue_read(buffers[number]).eq(turn).all()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_the_memory_of_indices_is_runs_of_bytes():
    shape = (40, 40)
    flat = np.frombuffer(memory.to_card(torch.arange(1600.0).view(shape)), np.uint8)
    for index in (..., (slice(3, 17),), (slice(None), slice(30, 35)), (slice(5, 6), slice(0, 40, 1))):
        runs = memory.runs_of(shape, 4, memory.index_key(index), 2, 9)
        found = np.concatenate([flat[start : start + length] for start, length in runs]).view(np.float32)
        assert found.tolist() == torch.arange(1600.0).view(shape)[index].reshape(-1)[2:9].tolist()


def test_a_forked_child_leaves_the_card_to_its_parent():
    with open_mesh_device((1,), driver=driver()) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(4,))
        mesh.queue().enqueue_write(x, [1.0, 2.0, 3.0, 4.0], blocking=True)
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                mesh.cards[0].close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(DeviceError, match="in use by this process"):
            driver().open(0)
        assert mesh.queue().enqueue_read(x).tolist() == [1, 2, 3, 4]


def test_wrong_options_leave_no_card_open():
    for options in ({"dispatch": "slwo"}, {"check": "rcaes"}, {"worker_l1_size": -1}, {"mesh_type": "Torus"}):
        with pytest.raises((ArgumentError, FabricError)):
            open_mesh_device((2, 2), driver=driver(), **options)
        assert all(not _is_locked(discovery.CARDS / str(index)) for index in range(4))


def _is_locked(node: Path) -> bool:
    with node.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_card_that_fails_in_closing_is_an_error_and_the_others_are_closed():
    mesh = open_mesh_device((3,), driver=driver())

    def fail() -> None:
        raise SystemExit("planted")

    mesh.cards[0]._device.close = fail
    with pytest.raises(DeviceError, match="blackhole-py failed in closing the card: SystemExit: planted"):
        mesh.close()
    assert not any(_is_locked(discovery.CARDS / str(index)) for index in range(3))


def test_writes_of_pieces_from_two_threads_are_not_lost():
    card = driver().open(0)
    x = card.alloc(0, (2, 8), torch.float32)
    card.write(x, torch.zeros(2, 8))

    def work(row: int) -> None:
        for column in range(8):
            card.write(x, torch.tensor(1.0), (row, column))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert card.read(x).eq(1).all()
    card.close()


def test_whoever_waits_for_a_compiler_that_hangs_gets_an_error(tmp_path):
    lock, text = tmp_path / "lock", r"this process has held .* for 0\.05 s"
    with alone(lock, 1.0), pytest.raises(DeviceTimeoutError, match=text), alone(lock, 0.05):
        pass
