"""A client and its workers: the same program, the same values, the same random numbers as in one process."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpt
import meshloom as loom
import ranks
from busy_machine import Patience
from controller_cases import check_remote_case, llama_losses
from meshloom import Replicate, Shard
from meshloom.controller.cluster import Cluster
from meshloom.controller.tensors import RemoteTensor
from samples import SAMPLES

CASES = int(os.environ.get("MESHLOOM_CASES", "0")) or 500
pytestmark = pytest.mark.xdist_group("controller")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with loom.launch(workers=2, timeout=60, threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def clusters(cluster: Cluster) -> Iterator[dict[int, Cluster]]:
    """By the number of workers."""
    with loom.launch(workers=4, timeout=60, threads=1) as four:
        yield {2: cluster, 4: four}


@pytest.fixture
def mesh(cluster: Cluster) -> loom.Mesh:
    return cluster.open_mesh((2, 2), axes=("dp", "tp"))


HERE = loom.Mesh(dp=2, tp=2)  # the same mesh in this process


def test_the_program_of_the_issue(mesh):
    torch.manual_seed(0)
    x = loom.randn(64, 32, mesh=mesh, placements={"dp": Shard(0)})
    w = loom.randn(32, 16, mesh=mesh, placements={"tp": Shard(1)})
    found = (x @ w).relu().mean().item()
    torch.manual_seed(0)
    a = loom.randn(64, 32, mesh=HERE, placements={"dp": Shard(0)})
    b = loom.randn(32, 16, mesh=HERE, placements={"tp": Shard(1)})
    assert torch.equal(x.to_torch(), a.to_torch()) and torch.equal(w.to_torch(), b.to_torch())
    assert found == pytest.approx((a @ b).relu().mean().item(), rel=1e-6)


@pytest.mark.slow
def test_ops_on_a_cluster_equal_dense_torch(cluster, record_property):
    """Values and gradients of every op; with MESHLOOM_CASES more of each."""
    each = math.ceil(CASES / len(SAMPLES))
    ran = 0
    for name in sorted(SAMPLES):
        for number in range(each):
            check_remote_case(cluster, name, number)
            ran += 1
    assert ran >= CASES
    record_property("cases of ops on a cluster", ran)


def test_the_oracle_of_ops_can_fail(cluster, monkeypatch):
    import controller_cases

    monkeypatch.setitem(SAMPLES, "relu", lambda d: _wrong(SAMPLES["gelu"](d)))
    with pytest.raises(AssertionError):
        for number in range(5):
            controller_cases.check_remote_case(cluster, "relu", number)


def _wrong(case):
    right = case.run
    return copy.replace(case, run=None) if sys.version_info >= (3, 13) else _Changed(case, right)


class _Changed:
    def __init__(self, case, right):
        self.operands, self.gradients = case.operands, False
        self.run = lambda *values: right(*values) + (1 if isinstance(values[0], loom.Tensor) else 0)


# Rows of the checklist


def test_row_166_the_dispatcher_handles_a_distributed_matmul(cluster):
    """Client code has no placement; the log shows the chosen plan."""
    workers = cluster.open_mesh(4, axes=("worker",))
    a, b = torch.randn(128, 64), torch.randn(64, 32)
    x, w = loom.distribute(a), b
    c = x @ w
    (line,) = [each for each in cluster.log.of("matmul") if "f32[128, 64]" in str(each)][-1:]
    assert line.plan == ("matmul: f32[128, 64](S(0)), f32[64, 32](R) -> f32[128, 32](S(0)) (worker takes m)",)
    assert line.collectives == () and line.where.startswith("test_controller.py:")
    assert c.mesh == workers
    torch.testing.assert_close(c.to_torch(), a @ b)


def test_row_176_one_broadcast_and_one_gather_however_often(cluster):
    cluster.open_mesh(4, axes=("worker",))
    a, b = torch.randn(128, 64), torch.randn(64, 32)
    x = loom.distribute(a)
    before = len(cluster.log)
    for _ in range(3):
        c = x @ b
    torch.testing.assert_close(c.to_torch(), a @ b)
    since = cluster.log.lines[before:]
    assert [(each.call, each.bytes) for each in since if each.is_transfer] == [
        ("broadcast", 64 * 32 * 4),
        ("gather", 128 * 32 * 4),
    ]
    assert "all_reduce" not in {each.kind for line in since for each in line.collectives}
    b += 1  # another value is another broadcast
    torch.testing.assert_close((x @ b).to_torch(), a @ b)
    assert [each.call for each in cluster.log.lines[before:]].count("broadcast") == 2


def test_row_168_broadcast_gather_and_all_reduce_by_name(cluster):
    cluster.open_mesh(4, axes=("worker",))
    before = len(cluster.log)
    (loom.distribute(torch.randn(128, 64)) @ torch.randn(64, 32)).sum().item()
    kinds = [each.call for each in cluster.log.lines[before:] if each.is_transfer]
    assert kinds == ["scatter", "broadcast", "gather"]
    (moved,) = [each for line in cluster.log.lines[before:] for each in line.collectives]
    assert (moved.kind, moved.axis, moved.bytes) == ("all_reduce", "worker", 6)


@pytest.mark.slow
def test_row_167_killing_one_of_four_workers_raises_in_time():
    with loom.launch(workers=4, timeout=5, threads=1) as four:
        mesh = four.open_mesh(4)
        x = loom.ones(8, mesh=mesh)
        assert x.sum().item() == 8
        os.kill(four.counters()[2]["pid"], 9)
        waited = Patience()
        with pytest.raises(loom.PeerLostError, match="worker 2"):
            while True:
                x.sum().item()
        assert waited.seconds < 6


# Programs


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
]


def train(mesh, plan, optimizer, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 5))
    model = loom.parallelize(model, mesh, plan)
    steps = optimizer(model.parameters(), **options)
    x, y = torch.randn(10, 12), torch.randint(0, 5, (10,))
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = F.cross_entropy(model(x), loom.distribute(y, mesh, {"dp": Shard(0)}))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        losses.append(loss.item())
    return torch.tensor(losses), [each.detach().to_torch() for each in model.parameters()]


@pytest.mark.parametrize("plan", ["fsdp", "tensor"])
@pytest.mark.parametrize("optimizer, options", OPTIMIZERS, ids=["sgd", "adamw", "foreach", "fused"])
def test_a_model_trains_as_in_one_process(mesh, plan, optimizer, options):
    """Dropout included: the client draws the keys."""
    losses, weights = train(mesh, plan, optimizer, options)
    wanted, theirs = train(HERE, plan, optimizer, options)
    torch.testing.assert_close(losses, wanted)
    for mine, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "plan"), [*((2, plan) for plan in gpt.PLANS), (4, "data"), (4, "tensor")])
def test_the_gpt_example_trains_as_in_one_process_and_with_the_bits_of_ranks(workers, plan, clusters, monkeypatch):
    """The order of sums is that of as many ranks; in one process matmuls of all devices are one."""
    wanted, ranked = gpt.losses(plan, 3), ranks.run(workers, "gpt:losses", plan, 3)[0]
    monkeypatch.setattr(loom, "open_mesh", clusters[workers].open_mesh)
    found = gpt.losses(plan, 3)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found == ranked


def test_tensors_are_tensors(mesh):
    x = loom.ones(4, 6, mesh=mesh)
    assert isinstance(x, loom.Tensor) and isinstance(x, torch.Tensor) and type(x) is RemoteTensor
    assert x.shape == (4, 6) and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim == 2 and len(x) == 4
    assert not x.is_meta and x.is_leaf and x.grad is None and not x.requires_grad and x.nbytes == 96
    p = loom.Parameter(torch.ones(4), mesh)
    assert isinstance(p, nn.Parameter) and p.requires_grad and isinstance(nn.Parameter(x), nn.Parameter)
    assert repr(p).startswith("Parameter containing:\nTensor f32[4](R, R) on Mesh(dp=2, tp=2), requires_grad=True\nt")
    assert x.sum().item() == 24 and float(x[0, 0]) == 1 and bool(x.all()) and f"{x.mean():.2f}" == "1.00"
    assert x.tolist() == x.numpy().tolist() == torch.ones(4, 6).tolist()
    assert copy.deepcopy(p).requires_grad and copy.copy(x).tolist() == x.tolist()


def test_results_that_depend_on_values_are_asked_for(mesh):
    dense = torch.tensor([3.0, -1.0, 2.0, -5.0, 0.0])
    x = loom.distribute(dense, mesh, "S(0), R").requires_grad_()
    kept = x[x > 0]
    assert kept.tolist() == [3.0, 2.0] and kept.requires_grad
    (kept * kept).sum().backward()
    assert x.grad.tolist() == [6.0, 0.0, 4.0, 0.0, 0.0]
    assert x.detach().nonzero().tolist() == dense.nonzero().tolist()
    assert torch.equal(x.detach(), x.detach()) and x.detach().unique().tolist() == dense.unique().tolist()


def test_views_and_writes_in_place(mesh):
    dense, x = torch.zeros(4, 6), loom.zeros(4, 6, mesh=mesh, placements="S(0), S(1)")
    for each in (dense, x):
        view = each[1:3]
        view += 2
        each[0, 0] = 5
        each.t()[3].mul_(4)
        each[:, 1].copy_(torch.arange(4.0))
    assert x.tolist() == dense.tolist()
    w = loom.ones(6, mesh=mesh).requires_grad_()
    y = x.clone()
    row = y[2]
    row.mul_(w)
    assert y.requires_grad and row.requires_grad and not y.is_leaf
    y.sum().backward()
    assert w.grad.tolist() == dense[2].tolist()


def test_gradients_reach_exactly_the_leaves_that_they_reach_in_torch(mesh):
    a, b, c = (loom.ones(4, mesh=mesh).requires_grad_() for _ in range(3))
    ((a * 2).expand_as(b).sum() + c.detach().sum()).backward()
    assert a.grad.tolist() == [2.0] * 4 and b.grad is None and c.grad is None
    (ga, gb) = torch.autograd.grad((a * b).sum(), (a, b))
    assert ga.tolist() == gb.tolist() == [1.0] * 4
    with pytest.raises(loom.GradientError, match="do not depend"):
        torch.autograd.grad(a.sum(), (b,))
    middle = a * 3
    middle.retain_grad()
    (middle * middle).sum().backward()
    assert middle.grad.tolist() == [6.0] * 4 and a.grad.tolist() == [20.0] * 4
    a.grad = None
    assert a.grad is None
    first = torch.autograd.grad((a**3).sum(), (a,), create_graph=True)[0]
    first.sum().backward()
    assert a.grad.tolist() == [6.0] * 4


def test_a_norm_that_torch_gives_no_gradient_has_none_here_either(mesh):
    w = loom.ones(4, mesh=mesh).requires_grad_()
    (torch.linalg.vector_norm(w, 0) * 2).backward()
    assert w.grad is None
    (torch.linalg.vector_norm(w, 2) + torch.linalg.vector_norm(w, 0)).backward()
    assert w.grad.tolist() == pytest.approx([0.5] * 4)


def test_modes_of_the_client_hold_on_the_workers(mesh):
    x = loom.ones(4, 4, mesh=mesh).requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with loom.with_output({"tp": Shard(1)}):
        y = x.detach() @ x.detach()
    assert y.placements[1] == Shard(1) and y.tolist() == [[4.0] * 4] * 4
    assert loom.matmul(x, x, output={"dp": Replicate(), "tp": Shard(0)}).placements == (Replicate(), Shard(0))


def test_each_block_of_autocast_sees_the_weights_as_they_are(mesh):
    w, x = loom.ones(4, 4, mesh=mesh).requires_grad_(), loom.ones(4, 4, mesh=mesh, placements="S(0), R")
    found = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.nn.functional.linear(x, w).float().mean())
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():  # no call lies between the blocks
            w += 1
    assert [each.item() for each in found] == [4.0, 8.0, 12.0]


def test_inference_mode_counts_writes_too(mesh):
    with torch.inference_mode():
        x = loom.ones(4, 4, mesh=mesh, placements="S(0), R")
        x[1:3] += 1
        assert (x @ x).relu().sum().item() == 144.0


def test_numbers_that_torch_keeps_as_views_arrive_as_they_are(mesh):
    plain = torch.tensor([1 + 2j, 3 - 1j, 2j])
    x = loom.distribute(plain, mesh, "S(0), R")
    assert torch.equal((x * plain.conj()).to_torch(), plain * plain.conj())
    assert torch.equal(x.imag.to_torch(), plain.imag) and torch.equal(x.conj().imag.to_torch(), plain.conj().imag)


def test_a_dry_run_is_refused_rather_than_empty(mesh):
    x = loom.ones(4, 4, mesh=mesh)
    with pytest.raises(loom.UnsupportedError, match="dry-run the program on a mesh of this process"), loom.dry_run():
        x @ x


def test_a_compiled_function_works_on_a_cluster(mesh):
    double = torch.compile(lambda x: (x * 2).relu().sum(), backend="eager")
    assert double(loom.ones(4, 3, mesh=mesh, placements="S(0), R")).item() == 24.0


def test_record_explain_and_forbid(mesh):
    x = loom.ones(8, 4, mesh=mesh, placements="S(0), R").requires_grad_()
    w = loom.ones(4, 4, mesh=mesh, placements="R, R").requires_grad_()
    here = [loom.ones(*each.shape, mesh=HERE, placements=each.placements).requires_grad_() for each in (x, w)]

    def work(a, b):
        (a @ b).sum().backward()

    with loom.record() as log:
        work(x, w)
    with loom.record() as wanted:
        work(*here)
    assert [(each.kind, each.axis, each.bytes, each.phase) for each in log] == [
        (each.kind, each.axis, each.bytes, each.phase) for each in wanted
    ]
    assert {each.where.rpartition(":")[0] for each in log} == {"test_controller.py"}
    plan = loom.explain(lambda: x @ w)
    assert [str(each.collective) for each in plan.events] == []
    assert [str(each.collective) for each in loom.explain(lambda: x.sum()).events] == [
        "all_reduce(sum) over dp of 2: 4 B"
    ]
    with loom.communication("forbid"):
        assert (x.detach() * 2).shape == (8, 4)
        with pytest.raises(loom.CommunicationError, match="where communication is forbidden"):
            x.sum()


def test_random_numbers_are_those_of_one_process(mesh):
    def draw(where):
        torch.manual_seed(5)
        x = loom.rand(7, 3, mesh=where)
        x = x + loom.randint(0, 9, (7, 3), mesh=where) + loom.zeros(7, 3, mesh=where).normal_()
        x = x + F.dropout(x, 0.5) + torch.nn.init.uniform_(loom.zeros(7, 3, mesh=where)) + torch.randn_like(x)
        return x.to_torch(), torch.rand(2)

    for mine, theirs in zip(draw(mesh), draw(HERE), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(draw(mesh), draw(HERE), strict=True):  # seen before
        torch.testing.assert_close(mine, theirs)


def test_what_would_run_inside_of_a_worker_is_refused(mesh):
    x = loom.ones(4, mesh=mesh).requires_grad_()
    with pytest.raises(loom.UnsupportedError, match="inside of a worker's backward"):
        x.register_hook(lambda gradient: gradient)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    with pytest.raises(loom.UnsupportedError, match=r"autograd\.Function"):
        Twice.apply(x).sum()
    with pytest.raises(loom.UnsupportedError, match="requires a gradient"):
        x + torch.ones(4, requires_grad=True)
    with pytest.raises(loom.GradientError, match="do not flow from the client back"):
        x.to_torch().sum().backward()
    with pytest.raises(loom.UnsupportedError, match="pickled"):
        pickle.dumps(x)


def test_meshes_of_here_and_there_do_not_mix(mesh):
    with pytest.raises(loom.MeshError, match="a tensor of this process beside one of a cluster"):
        loom.ones(4, mesh=mesh) + loom.ones(4, mesh=HERE)


def test_the_client_holds_no_data_and_dropped_tensors_are_freed(cluster, mesh):
    def memory() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    cluster.wait()
    held, before = cluster.counters()[0], memory()
    tensors = [loom.ones(1000, 1000, mesh=mesh) for _ in range(50)]
    for _ in range(3):
        tensors = [each * 2 for each in tensors]
    grown = cluster.counters()[0]
    assert grown["bytes"] - held["bytes"] == 50 * 2_000_000  # half of each is on this worker
    assert memory() - before < 8 << 20
    assert grown["calls"] - held["calls"] >= 200
    issued = cluster.session.issued
    del tensors
    gc.collect()
    assert cluster.session.issued == issued  # not a call each
    assert cluster.counters()[0]["bytes"] <= held["bytes"]


def test_threads_may_call_at_once(mesh):
    found: dict[int, float] = {}

    def work(number: int) -> None:
        with torch.no_grad() if number % 2 else torch.enable_grad():
            x = loom.full((4,), float(number), mesh=mesh)
            for _ in range(50):
                x = x + 1
            found[number] = x.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {number: 4.0 * (number + 50) for number in range(4)}


def test_wrong_arguments_are_refused_here_and_nothing_is_lost(cluster, mesh):
    x = loom.ones(4, 4, mesh=mesh)
    issued = cluster.session.issued
    for wrong in (lambda: x @ loom.ones(3, 3, mesh=mesh), lambda: x.sum(dim=7), lambda: x.reshape(3, 5)):
        with pytest.raises(loom.MeshloomError):
            wrong()
    assert cluster.session.issued - issued <= 2  # the tensor of ones, and modes
    assert x.sum().item() == 16
    for wrong in ({"workers": 0}, {"workers": "2"}, {"workers": 2, "timeout": -1}, {"workers": 2, "on": "moon"}):
        with pytest.raises(loom.MeshloomError):
            loom.launch(**wrong)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (1, 1), (5,), (7, 3)])
@pytest.mark.parametrize("placements", ["R, R", "S(0), R", "S(0), S(0)", "P(sum), S(0)"])
def test_uneven_empty_and_small_shapes_survive_the_way_there_and_back(mesh, shape, placements):
    dense = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    x = loom.distribute(dense, mesh, placements)
    assert str(x.topology.placements) == str(loom.distribute(dense, HERE, placements).topology.placements)
    assert torch.equal(x.to_torch(), dense)
    assert torch.equal((x + 1).sum().to_torch(), (dense + 1).sum())


def test_bool_bf16_and_complex_survive(mesh):
    for kind in (torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float16, torch.uint8):
        dense = torch.tensor([0, 1, 1, 0, 1]).to(kind)
        assert torch.equal(loom.distribute(dense, mesh, "S(0), R").to_torch(), dense)
    x = loom.distribute([float("nan"), float("inf"), -0.0], mesh)
    assert repr(x.to_torch()) == "tensor([nan, inf, -0.])"


def test_collectives_by_hand(mesh):
    x = loom.arange(8, mesh=mesh, placements="S(0), R", dtype="float32")
    here = loom.arange(8, mesh=HERE, placements="S(0), R", dtype="float32")
    gathered, there = (loom.collectives.all_gather(each, 0, axis="dp") for each in (x, here))
    assert gathered.topology.notation == there.topology.notation and gathered.tolist() == there.tolist()
    summed, theirs = (loom.collectives.all_reduce(each, axis="tp") for each in (x, here))
    assert summed.topology.notation == theirs.topology.notation and summed.tolist() == theirs.tolist()


def test_collectives_that_are_started_come_in_order(cluster, mesh):
    x = loom.arange(8, mesh=mesh, placements="S(0), R", dtype="float32")
    y = loom.arange(8, mesh=HERE, placements="S(0), R", dtype="float32")
    handle = loom.collectives.all_reduce_async(x, "tp")
    later = x.add_(100)  # the workers do it after the collective
    assert torch.equal(handle.wait().to_torch(), loom.collectives.all_reduce(y, "tp").to_torch())
    assert handle.done() and handle.tensor is handle.wait() and later.to_torch()[0] == 100
    assert "all_reduce" in repr(handle) and "done" in repr(handle)
    with pytest.raises(loom.UnsupportedError, match="stress"):
        loom.collectives.all_reduce_async(x, "tp", stress=1)
    with pytest.raises(loom.MeshloomError, match="'nowhere'"):
        loom.collectives.all_reduce_async(x, "nowhere")


@pytest.mark.parametrize("placements", ["S(0), R", "S(0), S(0)", "S(0), S(1)", "R, R", "R, S(1)"])
def test_parts_of_devices_are_put_on_the_workers(mesh, placements):
    dense = torch.arange(15.0).view(5, 3)
    whole = loom.distribute(dense, HERE, placements)
    parts = [whole.shard_at(each).clone() for each in HERE.coordinates()]
    found = loom.from_local(parts, mesh, placements)
    assert type(found) is RemoteTensor and found.topology.placements == whole.topology.placements
    assert torch.equal(found.to_torch(), dense)
    by_place = dict(zip(HERE.coordinates(), parts, strict=True))
    assert torch.equal(loom.from_local(by_place, mesh, placements).to_torch(), dense)


def test_parts_that_do_not_fit_are_refused_here(mesh):
    with pytest.raises(loom.ShapeError):
        loom.from_local([torch.ones(2)] * 3, mesh, "S(0), R")
    with pytest.raises(loom.UnsupportedError, match="summed up"):
        loom.from_local([torch.ones(2)] * 4, mesh, "P(sum), R")
    with pytest.raises(loom.UnsupportedError, match="gradient"):
        loom.from_local([torch.ones(2, requires_grad=True)] * 4, mesh, "S(0), R")
    assert loom.ones(4, mesh=mesh).sum().item() == 4


# Checkpoints and traces


def test_checkpoints_are_written_and_read_by_the_workers(mesh, tmp_path):
    def make(where):
        torch.manual_seed(3)
        model = loom.parallelize(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), where, "fsdp")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()

    model, optimizer = make(mesh)
    step(model, optimizer)
    folder = tmp_path / "step-000001"
    assert loom.save({"model": model, "optimizer": optimizer, "step": 1}, folder).done
    step(model, optimizer)
    for where in (mesh, HERE):  # this cluster again, and one process
        other, its = make(where)
        state = loom.load(folder, into={"model": other, "optimizer": its, "step": 0})
        assert state["step"] == 1
        step(other, its)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().to_torch(), theirs.detach().to_torch())
    with pytest.raises(loom.CheckpointError):
        loom.load(tmp_path / "nowhere", into={"model": model})


def test_a_trace_is_captured_once_and_replayed_by_name(cluster, mesh):
    w = loom.ones(4, mesh=mesh).requires_grad_()
    x = loom.ones(4, mesh=mesh)
    with cluster.trace("step"):
        loss = (w * x).square().sum()
        loss.backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.25)
        w.grad = None
    assert loss.item() == 4 and w.tolist() == [0.5] * 4
    issued = cluster.session.issued
    cluster.replay("step", times=2)
    assert cluster.session.issued == issued + 1
    assert loss.item() == 0.25 and w.tolist() == [0.125] * 4
    with torch.no_grad():
        x.copy_(torch.zeros(4))
    cluster.replay("step")
    assert loss.item() == 0
    with pytest.raises(loom.TraceError, match="a value was read"), cluster.trace("other"):
        w.sum().item()
    with pytest.raises(loom.TraceError, match="random numbers"), cluster.trace("other"):
        loom.rand(4, mesh=mesh)
    with pytest.raises(loom.TraceError, match="no trace"):
        cluster.replay("stpe")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers here")
@pytest.mark.parametrize("workers", [2, 4])
def test_a_public_llama_trains_as_in_one_process(workers):
    ranked = ranks.run(workers, "controller_cases:llama_losses_of_rank")[0]
    with loom.launch(workers=workers, timeout=60, threads=1) as made:  # that has seen as few calls as the ranks
        four = made.open_mesh((2, 2), axes=("dp", "tp"))
        llama_losses(four, "fsdp")  # ranks and workers add in another order the first time that they see a call
        found = llama_losses(four, "fsdp")
        assert found == pytest.approx(llama_losses(HERE, "fsdp"), rel=1e-5)
        assert found == ranked
        three = made.open_mesh((3,), axes=("dp",))  # not split: every worker computes all of it
        assert llama_losses(three, "fsdp") == llama_losses(loom.Mesh(dp=3), "fsdp")  # the order of sums is the same


@pytest.mark.slow
def test_four_workers_give_what_one_process_gives(clusters):
    mesh = clusters[4].open_mesh((2, 2), axes=("dp", "tp"))
    for plan in ("fsdp", "tensor"):
        losses, weights = train(mesh, plan, *OPTIMIZERS[1])
        wanted, theirs = train(HERE, plan, *OPTIMIZERS[1])
        torch.testing.assert_close(losses, wanted)
        for mine, other in zip(weights, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    for name in ("matmul", "softmax", "layer_norm", "getitem", "cumsum", "cross_entropy"):
        for number in range(3):
            check_remote_case(clusters[4], name, number)


def test_loaders_files_and_accumulation_work_from_the_client(mesh, tmp_path):
    batches = [each.tolist() for each in loom.data.Loader(torch.arange(10.0), 4, mesh, {"dp": Shard(0)}, seed=3)]
    assert batches == [
        each.tolist() for each in loom.data.Loader(torch.arange(10.0), 4, HERE, {"dp": Shard(0)}, seed=3)
    ]

    def make(seed):
        torch.manual_seed(seed)
        return nn.Linear(6, 5)

    there = loom.parallelize(make(1), HERE, "fsdp")
    loom.save({"model": there}, tmp_path / "first")
    model = loom.parallelize(make(2), mesh, "fsdp", weights=tmp_path / "first")
    assert type(model.weight) is RemoteTensor and torch.equal(model.weight.detach().to_torch(), make(1).weight.detach())
    for each in (model, there):
        with loom.accumulate():
            each(torch.ones(4, 6)).sum().backward()
        loom.synchronize(each.parameters())
    assert model.weight.grad.tolist() == there.weight.grad.tolist()
    assert loom.dropout(loom.ones(64, mesh=mesh)).unique().tolist() in ([0.0, 2.0], [2.0])


@pytest.mark.slow
def test_workers_of_two_hosts_come_to_one_client(tmp_path, monkeypatch):
    """Both hosts are this one; the second runs the command that the client prints for it."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    monkeypatch.setenv("MESHLOOM_SECRET_FILE", str(secret))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    started: list[subprocess.Popen[bytes]] = []

    def be_the_other_host() -> None:
        while "on localhost: " not in said.getvalue():
            time.sleep(0.05)
        command = said.getvalue().partition("on localhost: ")[2].strip()
        started.append(
            subprocess.Popen(command.replace("meshloom run", f"{sys.executable} -m meshloom run"), shell=True)
        )

    thread = threading.Thread(target=be_the_other_host)
    thread.start()
    with loom.launch(hosts=["127.0.0.1:1", "localhost:1"], timeout=30, threads=1) as cluster:
        assert loom.arange(6, mesh=cluster.open_mesh(2)).sum().item() == 15
    thread.join()
    assert started[0].wait(20) == 0
