"""Tensors on cards that share no memory with this process: the cards hold the shards, and the host nothing."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import blackhole
import meshloom as loom
from counting_cards import KERNELS, CountingDriver, FilePiece
from meshloom import ttnn
from meshloom.errors import (
    ClosedError,
    CommunicationError,
    DeviceError,
    DeviceTimeoutError,
    MeshError,
    OutOfMemoryError,
    TraceError,
)
from meshloom.runtime import create_mesh_buffer, open_mesh_device
from meshloom.runtime.card_array import CardArray
from meshloom.runtime.chips import chip_of
from meshloom.runtime.drivers.process.driver import ProcessDriver


class Mesh:
    """A mesh of counting cards, and what it is made of."""

    def __init__(self, shape: tuple[int, ...], kernels: Any = None, **options: Any) -> None:
        self.driver = CountingDriver(kernels, **options)
        self.device = open_mesh_device(shape, driver=self.driver)

    def put(self, dense: torch.Tensor, placements: str) -> loom.Tensor:
        return loom.distribute(dense, self.device, placements)

    @property
    def crossed(self) -> int:
        return self.driver.crossed


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = Mesh((2, 2))
    yield made
    made.device.close()
    gc.collect()
    assert made.driver.used == [0, 0, 0, 0]


@pytest.fixture
def fluent() -> Iterator[Mesh]:
    made = Mesh((2, 2), KERNELS)
    yield made
    made.device.close()


def held_bytes() -> int:
    """The bytes of all arrays that Python knows of on the host, each memory once."""
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type == "cpu":
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return sum(storages.values())


# Row 170: the cards hold the shards, the host none


@pytest.mark.parametrize("make", [
    lambda mesh: mesh.put(torch.arange(24.0).view(6, 4), "S(0), S(1)"),
    lambda mesh: loom.arange(24.0, mesh=mesh.device, placements="R, R").view(6, 4).redistribute("S(0), S(1)"),
    lambda mesh: loom.from_local(
        [torch.arange(24.0).view(6, 4)[r : r + 3, c : c + 2] for r in (0, 3) for c in (0, 2)], mesh.device, "S(0), S(1)"
    ),
    lambda mesh: loom.Parameter(torch.arange(24.0).view(6, 4), mesh.device, "S(0), S(1)"),
])  # fmt: skip
def test_every_card_holds_its_shard_and_no_other(mesh, make):
    x, dense = make(mesh), torch.arange(24.0).view(6, 4)
    assert x._data.__class__ is CardArray
    gc.collect()
    for (row, column), card in mesh.device.members():
        pieces = [piece.array() for piece in card.pieces.values() if piece.shape == (3, 2)]
        expected = dense[3 * row : 3 * row + 3, 2 * column : 2 * column + 2]
        assert any(piece.equal(expected) for piece in pieces)
    assert x.to_torch().detach().equal(dense)


def test_row_170_the_host_holds_nothing_of_tensors_results_and_what_autograd_saves(mesh):
    saved = []
    gc.collect()
    before = held_bytes()
    x = loom.randn(64, 32, mesh=mesh.device, placements="S(0), R").requires_grad_()
    w = loom.randn(32, 48, mesh=mesh.device, placements="R, S(1)").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(type(each)) or each, lambda each: each):
        y = F.gelu(x @ w).softmax(0).sum()
    gc.collect()
    assert held_bytes() == before
    assert len(saved) >= 4 and set(saved) == {CardArray}
    y.backward()
    gc.collect()
    assert held_bytes() == before
    assert x.grad._data.__class__ is CardArray and w.grad._data.__class__ is CardArray


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_row_170_measured_by_the_memory_of_this_process():
    measure_growth()  # what the first time leaves behind: modules, and memory that malloc keeps
    grown, size = min(measure_growth() for _ in range(3))  # other threads of this process may grow meanwhile, once
    assert grown < size // 4


def measure_growth() -> tuple[int, int]:
    """By how much work on cards lets this process grow, and the bytes of one of its four arrays."""
    size = 40 << 20  # above this malloc gives memory back at once
    mesh = Mesh((2,), KERNELS, piece=FilePiece)
    with mesh.device:
        start = resident()
        x = mesh.put(torch.ones(size // 4 // 64, 64), "S(0)").requires_grad_()
        y = torch.relu(x)
        z = x * 2.0  # through the host
        z.sum().backward()
        assert sum(mesh.driver.used) >= 4 * size  # x, y, z and the gradient
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        grown = resident() - start
        assert y.shard_at((1,)).sum() == size // 8
    return grown, size


def test_the_measure_finds_what_the_host_holds(mesh):
    before = held_bytes()
    kept = torch.ones(1000)
    assert held_bytes() - before >= kept.nbytes


# Reading


def test_reading_fetches_what_the_cards_hold(mesh):
    dense = torch.arange(35.0).view(7, 5)
    x = mesh.put(dense, "S(0), S(1)")
    assert x.to_torch().equal(dense) and x.tolist() == dense.tolist() and (x.numpy() == dense.numpy()).all()
    assert x[3, 4].item() == 19 and x.sum().item() == dense.sum() and bool((x == x).all())
    assert x.shard_at((1, 1)).equal(dense[4:, 3:]) and x.block.shape == (2, 2, 4, 3)
    assert "19." in repr(x) and f"{x.max().item():.0f}" == "34"
    assert copy.deepcopy(x).to_torch().equal(dense)
    read = pickle.loads(pickle.dumps(x))
    assert read._data.__class__ is torch.Tensor and read.to_torch().equal(dense)


def test_reading_reads_a_replicated_tensor_from_one_card_and_a_sharded_one_from_each(mesh):
    same, cut = mesh.put(torch.ones(8, 8), "R, R"), mesh.put(torch.ones(8, 8), "S(0), S(1)")
    before = mesh.crossed
    same.to_torch()
    assert mesh.crossed - before == 256
    before = mesh.crossed
    cut.to_torch()
    assert mesh.crossed - before == 256
    assert same._data.memory.shards.part_bytes == 256 and cut._data.memory.shards.part_bytes == 64


def test_a_reader_that_gets_a_wrong_byte_is_noticed(mesh):
    x = mesh.put(torch.zeros(8), "S(0), R")
    next(iter(mesh.driver.cards[2].pieces.values())).bytes[3] = 64
    assert not x.to_torch().equal(torch.zeros(8))


def test_gradients_cross_between_plain_tensors_and_cards(mesh):
    plain = torch.ones(6, requires_grad=True)
    x = mesh.put(plain, "S(0), R")
    (x * torch.arange(6.0)).to_torch().square().sum().backward()
    assert type(plain.grad) is torch.Tensor
    assert plain.grad.equal(2 * torch.arange(6.0).square())


def test_tensors_go_between_meshes(mesh):
    dense, here = torch.randn(6, 4), loom.open_mesh((3,))
    x, y = mesh.put(dense, "S(0), R"), loom.zeros(6, 4, mesh=here)
    y.copy_(x)
    assert y._data.__class__ is torch.Tensor and y.to_torch().equal(dense)
    x.copy_(y * 2)
    assert x.to_torch().equal(2 * dense)
    other = Mesh((2,))
    z = loom.zeros(6, 4, mesh=other.device, placements="S(0)")
    z.copy_(x)
    assert z.to_torch().equal(2 * dense) and z._data.memory.store is other.device.lease.store
    other.device.close()


# Ops


def layers(placements: list[str], mesh: Mesh) -> tuple[list[torch.Tensor], list[loom.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (4, 6), (6,), (6, 4), (4,), (8, 4)]
    dense = [torch.randn(shape, generator=generator) for shape in shapes]
    ours = [mesh.put(each, where) for each, where in zip(dense, placements, strict=True)]
    for each in (*dense[1:5], *ours[1:5]):
        each.requires_grad_()
    return dense, ours


def step(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, gradient: Any) -> Any:
    """Forward, backward and an update."""
    y = torch.relu(x @ w1 + b1) @ w2 + b2
    y.backward(gradient)
    with torch.no_grad():
        for each in (w1, b1, w2, b2):
            each.add_(each.grad, alpha=-0.1)
    return y


PLACED = {
    "data parallel": ["S(0), S(0)", "R, R", "R, R", "R, R", "R, R", "S(0), S(0)"],
    "columns then rows": ["S(0), R", "R, S(1)", "R, S(0)", "R, S(0)", "R, R", "S(0), R"],
    "replicated": ["R, R"] * 6,
}


@pytest.mark.parametrize("how", PLACED)
def test_a_step_of_kernels_that_the_driver_offers_moves_no_byte_through_the_host(fluent, how):
    dense, ours = layers(PLACED[how], fluent)
    expected = step(*dense)
    before = fluent.crossed
    with loom.record() as log, loom.communication("allow"):
        found = step(*ours)
    assert fluent.crossed == before and log.host_bytes == 0 and log.transfers == []
    assert fluent.device.counts["launch"] >= 4 * 15
    assert fluent.driver.cards[3].launched == {
        "matmul": 5, "add": 6, "relu": 1, "relu_backward": 1, "transpose": 3, "sum_over": 2
    }  # fmt: skip
    torch.testing.assert_close(found.to_torch().detach(), expected.detach())
    for mine, theirs in zip(ours[1:5], dense[1:5], strict=True):
        torch.testing.assert_close(mine.to_torch().detach(), theirs.detach())
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad)


def test_a_sum_over_devices_goes_over_links_and_without_links_through_the_host(monkeypatch):
    a, b = torch.randn(4, 6), torch.randn(6, 3)
    for linked in (True, False):
        mesh = Mesh((2,), KERNELS, linked=linked)
        x, w = mesh.put(a, "S(1)"), mesh.put(b, "S(0)")
        before = mesh.crossed
        y = x @ w
        assert (mesh.crossed == before) is linked
        torch.testing.assert_close(y.to_torch(), a @ b)
        mesh.device.close()


def test_what_has_no_kernel_goes_through_the_host_and_is_counted_explained_and_recorded_alike(mesh):
    x = mesh.put(torch.randn(7, 4), "S(0), R").requires_grad_()

    def program() -> Any:
        y = torch.softmax(x, 0).square().sum()
        y.backward()
        return y

    before = mesh.crossed
    found = loom.explain(program)
    assert mesh.crossed == before and x.grad is None
    with loom.record() as log:
        program()
    assert [(e.kind, e.bytes, e.call, e.phase) for e in found.transfers] == [
        (e.kind, e.bytes, e.call, e.phase) for e in log.transfers
    ]
    assert mesh.crossed - before == log.host_bytes == found.host_bytes > 0
    assert mesh.device.counts["host_bytes"] == mesh.crossed
    first = log.transfers[0]
    assert (first.kind, first.bytes, first.cards, first.call) == ("host read", 2 * 64, 2, "softmax")
    assert first.where.startswith("test_cards.py:") and "host read of 128 B from 2 cards for softmax" in str(found)
    assert any(each.phase == "backward" for each in log.transfers) and "host write" in str(log)


def test_an_op_that_would_go_through_the_host_can_be_forbidden_and_reading_cannot(mesh):
    x = mesh.put(torch.ones(4), "R, R")
    with loom.communication("forbid"):
        with pytest.raises(CommunicationError, match="mul would move 16 B through the host where") as caught:
            x * 2
        assert "host read (forward)" in str(caught.value) and "kernel" in str(caught.value)
        assert x.to_torch().sum() == 4
    with loom.communication("warn", above=8), pytest.warns(loom.CommunicationWarning, match="through the host at"):
        x * 2


def test_inside_of_an_op_nothing_crosses(mesh):
    x = mesh.put(torch.randn(8, 8), "S(0), R")
    before = mesh.crossed
    F.layer_norm(x, (8,))  # several calls of torch
    assert mesh.crossed - before == x._data.nbytes + 2 * x._data.nbytes  # each half lies on two cards


# Views and writes


def test_views_alias_in_both_directions(mesh):
    dense = torch.arange(24.0).view(6, 4)
    x = mesh.put(dense, "S(0), R")
    rows, turned, flat = x[2:4], x.t(), x.view(-1)
    rows.mul_(10)
    dense[2:4] *= 10
    for mine, theirs in ((x, dense), (turned, dense.t()), (flat, dense.view(-1)), (rows, dense[2:4])):
        assert mine.to_torch().equal(theirs)
    turned[1] = -1.0
    x[0, 0] = 5.0
    dense.t()[1] = -1.0
    dense[0, 0] = 5.0
    assert x.to_torch().equal(dense) and flat.to_torch().equal(dense.view(-1))
    x.t_()
    assert x.to_torch().equal(dense.t())


@pytest.mark.parametrize("size", [0, 1, 5, 7, 8])
def test_padding_stays_zero_under_writes(mesh, size):
    dense = torch.arange(float(size))
    x = mesh.put(dense.clone(), "S(0), S(0)")
    x.add_(1).mul_(3).sub_(x.clone()).fill_(2.0)
    x.exp_()
    assert x._data.__class__ is CardArray
    inside = sum(piece.array().sum() for card in mesh.device.cards for piece in card.pieces.values())
    assert inside == pytest.approx(size * torch.tensor(2.0).exp().item(), rel=1e-5)
    assert x.to_torch().equal(torch.full((size,), 2.0).exp_())


def test_a_copy_shares_memory_until_one_is_written(mesh):
    x = mesh.put(torch.ones(64), "S(0), S(0)")
    used, before = sum(mesh.driver.used), mesh.crossed
    y = x.clone()
    assert sum(mesh.driver.used) == used and mesh.crossed == before
    y.mul_(2)
    assert x.to_torch().sum() == 64 and y.to_torch().sum() == 128


def test_dtypes_conjugates_and_views_of_bits(mesh):
    z = torch.randn(6, dtype=torch.complex64)
    x = mesh.put(z, "S(0), R")
    assert x.conj().to_torch().equal(z.conj()) and torch.view_as_real(x).to_torch().equal(torch.view_as_real(z))
    assert x.conj().imag.to_torch().equal(z.conj().imag)
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64, torch.uint8):
        values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
        assert (
            (mesh.put(values, "S(0), R") | mesh.put(values, "R, R")).to_torch().equal(values | values)
            if (not dtype.is_floating_point)
            else (mesh.put(values, "S(0), R") + 1).to_torch().equal(values + 1)
        )


def test_captures_are_refused(mesh):
    x = mesh.put(torch.ones(4), "R, R")
    with pytest.raises(TraceError, match="captured"), mesh.device.capture():
        x + 1
    assert (x + 1).to_torch().sum() == 8


# Memory


def test_memory_is_accounted_and_given_back_when_arrays_die(mesh):
    x = mesh.put(torch.ones(1024), "S(0), R")
    assert mesh.driver.used == [2048] * 4 and mesh.device.memory_usage()[0, 0].used == 2048
    y = x + x
    assert mesh.driver.used == [4096] * 4
    view = y[:10]
    del x, y
    gc.collect()
    assert mesh.driver.used == [2048] * 4
    del view
    gc.collect()
    assert mesh.driver.used == [0] * 4 and mesh.device.memory_usage()[1, 1].used == 0


def test_too_much_is_an_error_that_names_the_owner_and_loses_nothing():
    mesh = Mesh((2,), chip=chip_of(None, 64 << 10))
    x = mesh.put(torch.ones(20 << 10), "S(0)")
    with pytest.raises(OutOfMemoryError, match=r"does not fit") as caught:
        x.redistribute("R")
    assert "array float32[20480], since test_cards.py:" in str(caught.value)
    del caught
    gc.collect()
    assert mesh.driver.used == [40960, 40960] and x.sum().item() == 20 << 10 and "1., 1., 1." in repr(x)
    mesh.device.close()


def test_tensors_die_in_threads_while_cards_are_used(mesh):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for size in range(1, 30):
                x = mesh.put(torch.ones(size), "S(0), R")
                assert (x + x).sum().item() == 2 * size
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    gc.collect()
    assert mesh.driver.used == [0] * 4


def test_a_closed_mesh_is_an_error_for_tensors_and_for_gradients_of_old_results():
    mesh = Mesh((2,))
    x = mesh.put(torch.ones(4), "S(0)").requires_grad_()
    y, root = x * 2, (x * 3)._data
    mesh.device.close()
    for use in (
        lambda: x + 1,
        lambda: y.to_torch(),
        lambda: x.tolist(),
        lambda: root.sum(),
        lambda: loom.distribute(torch.ones(2), mesh.device),
        lambda: y.sum().backward(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert mesh.driver.used == [0, 0] and all(usage.used == 0 for usage in mesh.device.memory_usage().values())
    assert "closed" in repr(x)


# Faults


@pytest.mark.parametrize("command", ["alloc", "write", "read", "launch", "send", "receive"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_card_that_fails_in_the_middle_of_an_op_is_an_error_with_its_coordinate_and_the_operands_stay(
    fluent, command, after
):
    dense, weight = torch.randn(4, 6), torch.randn(6, 4)
    x, w = fluent.put(dense, "S(0), S(1)"), fluent.put(weight, "R, S(0)")
    used = fluent.driver.used
    fluent.driver.cards[3].fail[command] = after
    hit: DeviceError | None = None
    for _ in range(3):
        try:
            x.copy_(torch.sigmoid(torch.relu(x @ w).exp() @ w.t()) * x * 0 + x)
        except DeviceError as error:
            hit = error
            break
    if after and hit is None:
        pytest.skip(f"no op sends a second {command} through this card")
    assert hit is not None
    assert "failed on 1 of" in str(hit) and f"(1, 1): DeviceError: card 3 failed in a {command}" in str(hit)
    assert "test_cards.py:" in str(hit)
    fluent.driver.cards[3].fail.clear()
    del hit
    gc.collect()
    torch.testing.assert_close(x.to_torch(), dense)
    torch.testing.assert_close(w.to_torch(), weight)
    assert fluent.driver.used == used
    torch.testing.assert_close((x @ w).to_torch(), dense @ weight)


def test_a_write_in_place_that_fails_leaves_the_old_value(mesh):
    x = mesh.put(torch.ones(8), "S(0), S(0)")
    mesh.driver.cards[1].fail["write"] = 0
    with pytest.raises(DeviceError, match=r"write for mul_ at test_cards.py:\d+ failed on 1 of 4 devices"):
        x.mul_(2)
    mesh.driver.cards[1].fail.clear()
    assert x.to_torch().equal(torch.ones(8))
    x.mul_(2)
    assert x.to_torch().equal(torch.full((8,), 2.0))


def test_a_kernel_that_does_not_end_is_an_error_and_its_card_is_lost(fluent):
    x = fluent.put(torch.ones(4), "S(0), R")
    fluent.driver.cards[2].hangs = True
    with pytest.raises(DeviceTimeoutError, match="kernel relu for relu at") as caught:
        torch.relu(x)
    assert "(1, 0): DeviceTimeoutError" in str(caught.value)
    with pytest.raises(DeviceError, match=r"a card is lost: at \(1, 0\)"):
        torch.relu(x)


def test_ctrl_c_in_a_transfer_stays_what_it_is(mesh):
    x = mesh.put(torch.ones(4), "S(0), R")
    mesh.driver.cards[0].interrupts = True
    with pytest.raises(KeyboardInterrupt):
        x.to_torch()
    mesh.driver.cards[0].interrupts = False
    assert x.to_torch().sum() == 4


# Buffers, the per-device view, models


def test_a_tensor_over_a_buffer_shares_its_memory(mesh):
    device, queue = mesh.device, mesh.device.queue()
    buffer = create_mesh_buffer(device, layout="sharded", global_shape=(4, 6), shard_shape=(2, 3))
    queue.enqueue_write(buffer, torch.arange(24.0).view(4, 6))
    used = sum(mesh.driver.used)
    x = loom.from_buffer(buffer)
    assert sum(mesh.driver.used) == used and x.to_torch().equal(torch.arange(24.0).view(4, 6))
    x.mul_(2)
    assert queue.enqueue_read(buffer)[0, 1] == 2
    queue.enqueue_write(buffer, torch.ones(4, 6))
    copied = x.clone()
    queue.enqueue_write(buffer, torch.zeros(4, 6))
    assert copied.sum().item() == 24 and x.sum().item() == 0
    (y := loom.from_buffer(buffer)).add_(1)
    assert queue.enqueue_read(buffer).sum() == 24
    del x
    gc.collect()
    assert queue.enqueue_read(buffer).sum() == 24
    buffer.free()
    with pytest.raises(ClosedError, match="has been freed"):
        y.sum()


def test_a_submesh_has_tensors_of_its_own_on_the_same_cards(mesh):
    x = mesh.put(torch.ones(8), "S(0), R")
    part = mesh.device.create_submesh((1, 2), (1, 0))
    y = loom.distribute(torch.arange(4.0), part, "R, S(0)")
    assert mesh.driver.used == [16, 16, 24, 24] and mesh.device.memory_usage()[1, 0].used > 16
    twice, total = (y * 2).to_torch(), x.to_torch().sum()
    assert twice.sum() == 12 and total == 8
    with pytest.raises(MeshError, match="different meshes"):
        x[:4] + y
    part.close()
    gc.collect()
    assert mesh.driver.used == [16] * 4 and x.to_torch().sum() == 8
    with pytest.raises(ClosedError):
        y.sum()


def test_the_per_device_view_puts_parts_on_cards_and_computes_there():
    driver = CountingDriver(KERNELS)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2), driver=driver) as device:
        a, b = torch.randn(8, 32), torch.randn(32, 16)
        rows = ttnn.ShardTensor2dMesh(device, (2, 2), dims=(0, None))
        x = ttnn.from_torch(a, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=rows)
        w = ttnn.from_torch(b, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device)
        assert driver.used == [4 * 32 * 4 + 32 * 16 * 4] * 4
        assert next(iter(driver.cards[2].pieces.values())).array().view(4, 32).equal(a[4:])
        y = ttnn.softmax(ttnn.relu(ttnn.matmul(x, w)) + 1.0, dim=-1)
        both = ttnn.ConcatMesh2dToTensor(device, (2, 2), dims=(0, 1))
        found = ttnn.to_torch(y, mesh_composer=both)[:, :16]
        torch.testing.assert_close(found, (a @ b).relu().add(1).softmax(-1), rtol=1e-4, atol=1e-4)
        gathered = ttnn.all_gather(x, dim=0, cluster_axis=0)
        assert [*gathered.shape] == [8, 32] and gathered.block.__class__ is CardArray
        assert ttnn.from_device(x).block.__class__ is torch.Tensor
        ttnn.deallocate(x)
        with pytest.raises(RuntimeError, match="not allocated"):
            ttnn.relu(x)
        del gathered, y, w
        gc.collect()
        assert driver.used == [0] * 4


@pytest.mark.parametrize("kernels", [{}, KERNELS], ids=["by the host", "by kernels"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_stock_model_and_optimizer_train_as_dense(kernels, optimizer):
    mesh = Mesh((2, 2), kernels)
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    ours = copy.deepcopy(dense)
    for module in ours.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(value.detach(), mesh.device, "R, S(0)"))
    data, labels = torch.randn(8, 6), torch.randn(8, 4)
    x, y = mesh.put(data, "S(0), R"), mesh.put(labels, "S(0), R")
    mine, theirs = optimizer(ours.parameters(), lr=0.05), optimizer(dense.parameters(), lr=0.05)
    for _ in range(4):
        losses = []
        for model, inputs, wanted, steps in ((ours, x, y, mine), (dense, data, labels, theirs)):
            loss = F.mse_loss(model(inputs), wanted)
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(one.to_torch().detach(), other.detach(), rtol=1e-4, atol=1e-5)
    mesh.device.close()


def test_a_checkpoint_is_written_from_cards_and_read_onto_them(mesh, tmp_path):
    state = {"a": mesh.put(torch.randn(7, 5), "S(0), S(1)"), "b": mesh.put(torch.arange(4), "R, S(0)")}
    state["c"] = mesh.put(torch.randn(7, 5), "S(0), S(1)")  # alike, and no alias of the first
    loom.save(state, tmp_path / "step")
    expected = {name: each.to_torch() for name, each in state.items()}
    for each in state.values():
        each.zero_()
    loom.load(tmp_path / "step", into=state)
    for name, each in state.items():
        assert each.to_torch().equal(expected[name]) and each._data.__class__ is CardArray
    elsewhere = {
        name: loom.zeros_like(each, mesh=loom.open_mesh((3,)), placements="S(0)") for name, each in state.items()
    }
    loom.load(tmp_path / "step", into=elsewhere)
    assert all(each.to_torch().equal(expected[name]) for name, each in elsewhere.items())


def test_a_model_is_parallelized_onto_cards_and_back(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    dense, x = copy.deepcopy(model), torch.randn(4, 6)
    loom.parallelize(model, mesh.device.mesh, {"0.*": "x1=S(0)", "2.weight": "x1=S(1)", "2.bias": "R"})
    assert all(each._data.__class__ is CardArray for each in model.parameters())
    torch.testing.assert_close(model(mesh.put(x, "S(0), R")).to_torch(), dense(x))
    loom.unparallelize(model)
    torch.testing.assert_close(model(x), dense(x))


def test_a_step_on_the_stand_in_for_blackhole_py_moves_no_byte_through_the_host(monkeypatch, tmp_path):
    blackhole.install(monkeypatch, tmp_path)
    a, up, bias, down = torch.randn(64, 64), torch.randn(64, 96), torch.randn(1, 96), torch.randn(96, 32)
    with open_mesh_device((2, 2), driver=blackhole.driver()) as mesh:
        x, w1, b = (loom.distribute(each, mesh, p) for each, p in ((a, "S(0), R"), (up, "R, S(1)"), (bias, "R, S(1)")))
        w2 = loom.distribute(down, mesh, "R, S(0)")
        before = mesh.counts["host_bytes"]
        y = torch.relu(x @ w1 + b) @ w2
        assert mesh.counts["host_bytes"] == before and mesh.counts["launch"] == 16 and mesh.counts["send"] == 4
        torch.testing.assert_close(y.to_torch(), torch.relu(a @ up + bias) @ down, rtol=1e-4, atol=1e-4)


def test_a_whole_step_on_cards_in_processes_moves_no_byte_through_the_host():
    with open_mesh_device((2, 2), driver=ProcessDriver()) as device:
        mesh = SimpleNamespace(put=lambda dense, placements: loom.distribute(dense, device, placements))
        dense, ours = layers(PLACED["columns then rows"], mesh)
        expected, before = step(*dense), device.counts["host_bytes"]
        found = step(*ours)
        assert device.counts["host_bytes"] == before
        torch.testing.assert_close(found.to_torch().detach(), expected.detach())
        for mine, theirs in zip(ours[1:5], dense[1:5], strict=True):
            torch.testing.assert_close(mine.to_torch().detach(), theirs.detach())


def test_a_card_in_a_process_that_is_killed_in_the_middle_of_a_program_is_an_error_with_its_coordinate():
    with pytest.raises(DeviceError) as caught, open_mesh_device((2,), driver=ProcessDriver()) as device:
        x = loom.distribute(torch.ones(8), device, "S(0)")
        os.kill(device.get_device(1).pid, signal.SIGKILL)
        for _ in range(100):
            x = x + 1
            time.sleep(0.01)
    assert "(1,)" in str(caught.value) and "test_cards.py:" in str(caught.value)


def network() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) / 3 for shape in ((6, 16), (16, 2))]
    return weights, [torch.randn(shape, generator=generator) for shape in ((32, 6), (32, 2))]


def gradients(x: Any, target: Any, up: Any, down: Any, partial: Any) -> tuple[Any, ...]:
    """The loss and the gradients of an MLP by hand, each a sum over the rows of the batch."""
    hidden = x @ up
    active = hidden.relu()
    wrong = active @ down - target
    error = wrong * (2 / 64)
    asked = {} if partial is None else {"output": partial}
    product, total = (loom.matmul, loom.sum) if asked else (torch.matmul, torch.sum)
    return (
        total(wrong.square(), **asked),
        product(x.mT, (error @ down.mT) * (hidden > 0), **asked),
        product(active.mT, error, **asked),
    )


@pytest.mark.filterwarnings("ignore::meshloom.comms.modes.HostTrafficWarning")
@pytest.mark.parametrize("mode", ["host", "direct"])
@pytest.mark.parametrize("cards", ["by the host", "by kernels", "in processes", "stand-in"])
def test_row_085_the_mlp_trains_on_cards_with_host_collectives(cards, mode, monkeypatch, tmp_path):
    blackhole.install(monkeypatch, tmp_path)
    counting = partial(CountingDriver, KERNELS if cards == "by kernels" else {})
    make = {"in processes": ProcessDriver, "stand-in": blackhole.driver}.get(cards, counting)
    device = open_mesh_device((4,), driver=make())
    dense, (data, labels) = network()
    x, target = loom.distribute(data, device, "S(0)"), loom.distribute(labels, device, "S(0)")
    ours, losses = [loom.distribute(each, device, "R") for each in dense], []
    for _ in range(15):
        parts = gradients(x, target, *ours, loom.Partial("sum"))
        loss, *mine = (loom.collectives.all_reduce(part, mode=mode) for part in parts)
        expected, *theirs = gradients(data, labels, *dense, None)
        ours = [w - 0.2 * g for w, g in zip(ours, mine, strict=True)]
        dense = [w - 0.2 * g for w, g in zip(dense, theirs, strict=True)]
        losses.append(loss.item())
        assert losses[-1] == pytest.approx(expected.item(), rel=1e-4)
    for found, wanted in zip(ours, dense, strict=True):
        torch.testing.assert_close(found.to_torch(), wanted, rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    device.close()
