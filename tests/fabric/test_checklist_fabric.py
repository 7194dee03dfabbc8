"""Checklist rows about collectives and links, one test each, in the library's own spelling."""

from __future__ import annotations

import random
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import Mesh, Replicate
from meshloom.collectives import Schedule, Send
from meshloom.collectives.algorithms import ALGORITHMS, algorithms_of
from meshloom.collectives.proof import check_credits
from meshloom.comms import modes
from meshloom.fabric import Fabric

MODES = ("direct", "host", "fabric")
WORKERS = Mesh(w=4)
GRID = Mesh(dp=2, tp=4)


@pytest.fixture(autouse=True)
def nothing_went_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_through_host", [0, 0, 0.0])


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held_by_everyone(tensor: loom.Tensor) -> torch.Tensor:
    """What each device holds, if all hold the same."""
    first, *others = [tensor.shard_at(place) for place in tensor.mesh.coordinates()]
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", [WORKERS, GRID], ids=str)
def test_row_043_all_reduce_is_the_sum_over_the_mesh_on_every_device(mesh, mode):
    value = values(8 * mesh.size, 6)
    x = loom.distribute(value, mesh, (loom.Shard(0),) * mesh.ndim)
    found = loom.collectives.all_reduce(x, mode=mode)
    torch.testing.assert_close(
        held_by_everyone(found), torch.stack(value.chunk(mesh.size)).sum(0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [0, 1])
def test_row_044_all_gather_joins_along_a_dim_in_mesh_order_on_every_device(dim, mode):
    value = values(16, 24)
    x = loom.distribute(value, GRID, (loom.Shard(dim),) * 2)
    assert held_by_everyone(loom.collectives.all_gather(x, dim, mode=mode)).equal(value)
    rows = loom.collectives.all_gather(loom.distribute(value, WORKERS, "S(0)"), 1, mode=mode)
    assert held_by_everyone(rows).equal(torch.cat(value.chunk(4), 1))


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    layer.weight = loom.Parameter(layer.weight.detach(), WORKERS, {})
    layer.bias = loom.Parameter(layer.bias.detach(), WORKERS, {})
    x = loom.distribute(values(8, 6), WORKERS, "S(0)")
    layer(x).square().mean().backward()
    return layer, torch.optim.AdamW(layer.parameters())


def test_row_046_an_optimizer_step_has_no_collective():
    """The gradient's reduction is a node of backward, with the line of the forward op that caused it."""
    with loom.record() as before:
        layer, optimizer = _training()
    sums = [event for event in before if event.phase == "backward" and event.call == "linear"]
    assert [event.kind for event in sums] == ["all_reduce"] * 2
    assert all(event.where.startswith("test_checklist_fabric.py:") for event in sums)
    with loom.record() as step, loom.communication("forbid"):
        optimizer.step()
    assert len(step) == 0
    assert len(loom.explain(optimizer.step).events) == 0

    gradients = [parameter.grad for parameter in layer.parameters()]
    for calls in (1, 2, 5):
        with loom.record() as more:
            for _ in range(calls):
                loom.collectives.all_reduce(gradients[0], op="mean")
            optimizer.step()
        assert more.kinds() == {"all_reduce": calls}


def test_row_083_all_reduce_through_the_host_is_the_sum_of_torch():
    value = torch.arange(32).view(8, 4)
    found = loom.collectives.all_reduce(loom.distribute(value, WORKERS, "S(0)"), mode="host")
    assert held_by_everyone(found).equal(torch.stack(value.chunk(4)).sum(0))


def test_row_084_a_gather_through_the_host_is_broadcast_or_resharded():
    value = torch.arange(64).view(8, 8)
    x = loom.distribute(value, WORKERS, "S(0)")
    with loom.record() as log:
        everywhere = loom.collectives.all_gather(x, 0, mode="host")
        resharded = loom.collectives.all_to_all(x, 1, 0, mode="host")
    assert held_by_everyone(everywhere).equal(value)
    assert [resharded.shard_at((i,)).tolist() for i in range(4)] == [part.tolist() for part in value.chunk(4, 1)]
    assert all(event.host > 0 for event in log)


def test_row_087_a_message_between_devices_does_not_touch_the_host():
    x = loom.arange(8, mesh=WORKERS, placements="S(0)")
    with loom.record() as log:
        found = loom.collectives.send_recv(x, 0, 2, mode="fabric")
    assert found.to_torch().tolist() == [0, 1, 2, 3, 0, 1, 6, 7]
    assert log.host_bytes == 0 and modes._through_host == [0, 0, 0.0]
    assert [(event.kind, event.bytes) for event in log] == [("send_recv", 16)]


class Slot:
    """Room for one message on one link: whoever writes over a message that nobody took is told."""

    def __init__(self) -> None:
        self.credit, self.arrived = threading.Semaphore(1), threading.Semaphore(0)
        self.message: dict[int, int] | None = None

    def put(self, message: dict[int, int], patient: bool = True) -> None:
        if patient and not self.credit.acquire(timeout=20):
            raise AssertionError("no credit came")
        if self.message is not None:
            raise AssertionError("live data was overwritten")
        self.message = message
        self.arrived.release()

    def take(self) -> dict[int, int]:
        if not self.arrived.acquire(timeout=20):
            raise AssertionError("no message came")
        message, self.message = self.message, None
        assert message is not None
        self.credit.release()
        return message


class Member(threading.Thread):
    """One device of a schedule: of every step first its sends, then its receives, with random delays between."""

    def __init__(self, schedule: Schedule, place: Any, slots: dict[Any, Slot], seed: int) -> None:
        super().__init__(daemon=True)
        self.schedule, self.place, self.slots = schedule, place, slots
        self.random = random.Random(f"{seed}{place}")
        self.held = {chunk: place[0] + 10 * chunk for chunk in range(schedule.chunks)}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for step in self.schedule.steps:
                self.act(step)
        except AssertionError as error:
            self.failure = error

    def act(self, step: Any) -> None:
        before = dict(self.held)
        for send in [each for each in step if each.source == self.place]:
            self.wait()
            self.slots[send.source, send.destination].put({chunk: before[chunk] for chunk in send.chunks})
        for send in [each for each in step if each.destination == self.place]:
            self.wait()
            for chunk, value in self.slots[send.source, send.destination].take().items():
                self.held[chunk] = self.held[chunk] + value if send.reduce else value

    def wait(self) -> None:
        time.sleep(self.random.choice((0, 0, 1e-4, 5e-4)))


def run_with_delays(schedule: Schedule, fabric: Fabric, seed: int) -> list[Member]:
    slots = {(link.source, link.destination): Slot() for link in fabric.links}
    members = [Member(schedule, place, slots, seed) for place in schedule.group]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
        assert not member.is_alive()
        if member.failure is not None:
            raise member.failure
    return members


RING = Fabric.grid((4,), "ring", 1e-6, 1e9)


@pytest.mark.parametrize("name", ["ring", "bidirectional_ring", "line", "pipeline", "spanning_tree"])
def test_row_088_one_slot_per_link_never_loses_live_data_under_random_delays(name):
    """Every device is a thread, every link one slot with a credit; the sums come out right for every seed."""
    schedule = ALGORITHMS["all_reduce", name](RING.coordinates(), RING)
    check_credits(schedule, orders=20)
    for seed in range(10):
        for member in run_with_delays(schedule, RING, seed):
            assert member.held == {chunk: 0 + 1 + 2 + 3 + 40 * chunk for chunk in range(schedule.chunks)}


def test_row_088_a_producer_without_a_credit_and_a_circle_of_waits_are_found():
    slot = Slot()
    slot.put({0: 1})
    with pytest.raises(AssertionError, match="live data was overwritten"):
        slot.put({0: 2}, patient=False)
    pair = Fabric.grid((2,), "line", 1e-6, 1e9)
    two_each = (Send((0,), (1,), 0), Send((0,), (1,), 1), Send((1,), (0,), 2), Send((1,), (0,), 3))
    greedy = Schedule("all_gather", "greedy", pair.coordinates(), 4, (two_each,), owners=(0, 0, 1, 1))
    with pytest.raises(loom.ScheduleError, match="members wait in a circle"):
        check_credits(greedy)


@pytest.mark.parametrize(
    ("collective", "options"),
    [
        ("all_reduce", {}),
        ("all_gather", {"dim": 0}),
        ("reduce_scatter", {"dim": 1}),
        ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
        ("broadcast", {"root": 2}),
        ("reduce", {"root": 1}),
        ("gather", {"dim": 0, "root": 3}),
        ("scatter", {"dim": 1, "root": 1}),
    ],
)
def test_row_089_over_links_no_byte_goes_through_the_host_and_the_result_is_the_same(collective, options):
    x = loom.distribute(torch.arange(16 * 8).view(16, 8), GRID, "S(0), S(0)")
    call = getattr(loom.collectives, collective)
    with loom.record() as fabric:
        sent = call(x, mode="fabric", **options)
    with loom.record() as host:
        read = call(x, mode="host", **options)
    assert fabric.host_bytes == 0 and host.host_bytes > 0 and fabric.bytes == host.bytes > 0
    assert sent.topology == read.topology
    assert all(sent.shard_at(place).equal(read.shard_at(place)) for place in GRID.coordinates())


def _script(mode: str) -> list[torch.Tensor]:
    """A program that uses collectives by hand; the mode is all that changes."""
    x = loom.distribute(values(16, 8), GRID, "S(0), S(1)").requires_grad_()
    total = loom.collectives.all_reduce(x, "tp", mode=mode)
    whole = loom.collectives.all_gather(total, 0, "dp", mode=mode)
    part = loom.collectives.reduce_scatter(whole, 0, mode=mode)
    moved = loom.collectives.all_to_all(loom.collectives.shift(part, 1, mode=mode), 1, 0, "dp", mode=mode)
    moved.square().sum().backward()
    return [moved.to_torch().detach(), x.grad.to_torch()]


@pytest.mark.parametrize("mode", MODES[1:])
def test_row_090_one_script_runs_in_every_mode(mode):
    for found, expected in zip(_script(mode), _script("direct"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_row_094_all_reduce_knows_its_modes():
    x = loom.arange(8, mesh=WORKERS, placements="S(0)")
    results = [loom.collectives.all_reduce(x, mode=mode).to_torch().tolist() for mode in MODES]
    assert results == [[12, 16]] * 3
    with pytest.raises(ValueError, match="there is no mode 'device'"):
        loom.collectives.all_reduce(x, mode="device")


def test_row_095_all_gather_knows_its_modes():
    x = loom.arange(8, mesh=WORKERS, placements="S(0)")
    results = [loom.collectives.all_gather(x, 0, mode=mode).to_torch().tolist() for mode in MODES]
    assert results == [list(range(8))] * 3
    with pytest.raises(ValueError, match="there is no mode 'device'"):
        loom.collectives.all_gather(x, 0, mode="device")


def test_row_100_what_goes_through_the_host_is_in_the_record_and_in_a_warning():
    x = loom.arange(8, mesh=WORKERS, placements="S(0)")
    with loom.record() as log:
        loom.collectives.all_reduce(x, mode="host")
    assert log.host_bytes == 2 * 8 * 8  # all that was read, and as much written
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(modes.HOT):
            loom.collectives.all_reduce(x, mode="host")
    (warning,) = caught
    assert f"100 collectives went through the host, {100 * 128} B in " in str(warning.message)
    assert " s, the last at test_checklist_fabric.py:" in str(warning.message)


def test_row_128_a_sum_is_reduced_locally_before_anything_moves():
    x = loom.distribute(values(4096, 16), WORKERS, "S(0)")
    with loom.record() as log:
        total = x.sum()
        columns = x.sum(0)
    sizes = [event.bytes for event in log]
    assert log.kinds() == {"all_reduce": 2}
    assert sizes == [2 * 4 * 3 // 4, 2 * 16 * 4 * 3 // 4]  # one partial per device, not the 64 KB of its shard
    torch.testing.assert_close(total.item(), x.to_torch().sum().item(), rtol=1e-4, atol=1e-3)

    partial = loom.sum(x, 0, output={"w": loom.Partial("sum")})
    with loom.record() as explicit:
        found = loom.collectives.all_reduce(partial)
    assert [event.bytes for event in explicit] == [2 * 16 * 4 * 3 // 4]
    torch.testing.assert_close(found.to_torch(), columns.to_torch(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_row_168_broadcast_gather_and_all_reduce_are_seen_by_name_with_bytes(mode):
    x = loom.ones(8, 4, mesh=WORKERS, placements="S(0)")
    with loom.record() as log:
        loom.collectives.broadcast(x, 0, mode=mode)
        loom.collectives.gather(x, 0, mode=mode)
        loom.collectives.all_reduce(x, mode=mode)
    held = 2 * 4 * 4
    assert [(event.kind, event.axis, event.bytes) for event in log] == [
        ("broadcast", "w", held),
        ("gather", "w", 3 * held),
        ("all_reduce", "w", 2 * held * 3 // 4),
    ]
    shown = str(log).splitlines()
    assert [line.split(" over w of 4: ")[0] for line in shown[:3]] == ["broadcast", "gather", "all_reduce(sum)"]


def test_an_all_reduce_of_a_replicated_tensor_counts_every_device():
    x = loom.ones(3, mesh=WORKERS, placements="R")
    found = loom.collectives.all_reduce(x)
    assert found.placements == (Replicate(),) and found.to_torch().tolist() == [4.0] * 3


def test_every_collective_of_the_table_has_an_algorithm_for_a_ring():
    for collective in {line.collective for line in ALGORITHMS.values()}:
        assert [line for line in algorithms_of(collective) if line.needs == "ring"]
