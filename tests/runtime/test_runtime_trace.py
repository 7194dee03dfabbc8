"""Traces: nothing runs while they are captured, a replay is the same as running, and what they use is protected."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom.engines import kernel
from meshloom.errors import ClosedError, DeviceError, MeshError, OutOfMemoryError, TraceError
from meshloom.runtime import MeshWorkload, Program, capture, create_mesh_buffer, open_mesh_device, state
from meshloom.tensor import dispatch

MESHES = [(1,), (2, 4), (128,)]


def placed(*shape: int, mesh: Any, placements: Any = None, seed: int = 0) -> loom.Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return loom.distribute(value, mesh, placements)


def program(x: Any, w: Any) -> Any:
    """Matmul, broadcasting, a softmax, views, a reduction, slices, in-place ops, uneven shards."""
    y = (x @ w).relu() * 2 + w.sum(0)
    z = y.softmax(-1).reshape(-1, w.shape[1]).transpose(0, 1)
    total = loom.zeros_like(y) if isinstance(y, loom.Tensor) else torch.zeros_like(y)
    total += y
    total.mul_(0.5)
    return total, z[1:3], (y - y.mean(0)).square().sum(), total.amax(1)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("rows", [128, 131])
def test_a_replay_gives_what_running_gives_for_every_new_input(shape, rows):
    mesh = loom.open_mesh(shape)
    x, w = placed(rows, 12, mesh=mesh), placed(12, 6, mesh=mesh, placements=(loom.Replicate(),) * len(shape), seed=1)
    with capture() as trace:
        found = program(x, w)
    for seed in (3, 4):
        fresh = placed(rows, 12, mesh=mesh, seed=seed)
        x.copy_(fresh)
        trace.replay()
        for one, other in zip(found, program(fresh, w), strict=True):
            torch.testing.assert_close(one.to_torch(), other.to_torch())


PICTURES = {
    "pad with copies": lambda x: F.pad(x, (1, 2) * (x.dim() - 2), mode="replicate"),
    "pad with mirrors": lambda x: F.pad(x, (1, 2) * (x.dim() - 2), mode="reflect"),
    "pad with zeros": lambda x: F.pad(x, (1, 2) * (x.dim() - 2)),
    "larger pixels": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "between pixels": lambda x: F.interpolate(x, scale_factor=2, mode={4: "bilinear", 5: "trilinear"}[x.dim()]),
    "largest": lambda x: (F.max_pool2d if x.dim() == 4 else F.max_pool3d)(x, 2),
    "mean": lambda x: (F.avg_pool2d if x.dim() == 4 else F.avg_pool3d)(x, 2),
    "means of parts": lambda x: (F.adaptive_avg_pool2d if x.dim() == 4 else F.adaptive_avg_pool3d)(x, 3),
    "largest of parts": lambda x: (F.adaptive_max_pool2d if x.dim() == 4 else F.adaptive_max_pool3d)(x, 3),
    "convolution": lambda x: (F.conv2d if x.dim() == 4 else F.conv3d)(x, torch.ones(6, 4, *[3] * (x.dim() - 2))),
    "each": lambda x: F.silu(x * 2),
    "sum": lambda x: x.sum(1, keepdim=True) + x,
}


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("name", PICTURES)
def test_views_of_what_is_made_of_pictures_with_channels_last_are_right_in_a_replay(name, rank):
    x = torch.randn(2, *[6] * (rank - 2), 4, generator=torch.Generator().manual_seed(0)).movedim(-1, 1)
    with capture() as trace:
        made = PICTURES[name](x)
        views = made.flatten(0, 1)[1], made.transpose(-1, -2).reshape(-1), made + 1
    for _ in range(2):
        trace.replay()
        wanted = PICTURES[name](x)
        torch.testing.assert_close(made, wanted)
        expected = wanted.flatten(0, 1)[1], wanted.transpose(-1, -2).reshape(-1), wanted + 1
        for found, each in zip(views, expected, strict=True):
            torch.testing.assert_close(found, each)


def test_conjugates_and_their_imaginary_parts_are_right_in_a_replay():
    x, y = (torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def run(a, b):
        z = torch.complex(a, b) * 2
        return z.conj().clone(), z.conj().imag + 1, z * z.conj(), torch.complex(a, b).conj().resolve_conj().imag

    with capture() as trace:
        made = run(x, y)
    for seed in (2, 3):
        x.copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
        trace.replay()
        for found, each in zip(made, run(x, y), strict=True):
            torch.testing.assert_close(found, each)


def test_nothing_is_computed_while_a_trace_is_captured():
    mesh = loom.open_mesh((2,))
    x = loom.ones(4, mesh=mesh)
    target = loom.zeros(4, mesh=mesh)
    with capture() as trace:
        target.add_(x)
    assert target.tolist() == [0] * 4
    trace.replay()
    trace.replay()
    assert target.tolist() == [2] * 4


def test_a_replay_plans_nothing_and_makes_one_call_per_op(monkeypatch):
    mesh = loom.open_mesh((8,))
    x, w = placed(64, 16, mesh=mesh), placed(16, 16, mesh=mesh, placements="R")
    with capture() as trace:
        y = x
        for _ in range(10):
            y = (y @ w + x).relu()
    assert len(trace) == 30

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a replay asked dispatch")

    monkeypatch.setattr(dispatch, "plan", refused)
    monkeypatch.setattr(kernel.Kernel, "run", refused)
    monkeypatch.setattr(dispatch.Resolved, "__init__", refused)
    trace.replay()
    monkeypatch.undo()
    expected = x
    for _ in range(10):
        expected = (expected @ w + x).relu()
    torch.testing.assert_close(y.to_torch(), expected.to_torch())


def test_constants_are_computed_once_and_again_where_something_writes_into_them():
    mesh = loom.open_mesh((4,))
    x = placed(10, mesh=mesh)
    for _ in range(2):  # the second time every call has been seen before
        with capture() as trace:
            shifted = x + loom.arange(10, mesh=mesh)
            total = loom.full((10,), 5.0, mesh=mesh)
            total += shifted
        length = len(trace)
        for _ in range(2):  # a second replay must not add to the first
            trace.replay()
            torch.testing.assert_close(total.to_torch(), x.to_torch() + torch.arange(10) + 5)
        assert length <= 4


def test_masks_that_a_capture_makes_are_right_for_everybody_else():
    mesh = loom.open_mesh((7,), axes=("seven",))  # no other test has this mesh: its masks are made here
    x = placed(10, mesh=mesh)
    with capture() as trace:
        y = (x + 1).log()
    other = loom.distribute(torch.ones(10), mesh)
    torch.testing.assert_close((other + 1).exp().sum().to_torch(), torch.full((10,), 2.0).exp().sum())
    trace.replay()
    torch.testing.assert_close(y.to_torch(), (x.to_torch() + 1).log(), equal_nan=True)


def test_what_is_derived_from_a_mask_in_a_capture_is_right_before_the_replay():
    mesh = loom.open_mesh((7,), axes=("eleven",))  # no other test has this mesh
    x = placed(10, mesh=mesh)
    assert (x + 1).log().nansum().isfinite()  # the mask is there, its inverse is not
    with capture():
        x.add_(1)
    y = placed(10, mesh=mesh)
    y.add_(1)
    torch.testing.assert_close(y.prod().to_torch(), y.to_torch().prod())
    torch.testing.assert_close(y.to_torch(), placed(10, mesh=mesh).to_torch() + 1)


@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
def test_collectives_are_captured_in_every_mode(mode):
    mesh = loom.open_mesh((4,), axes=("d",))
    x = placed(8, 3, mesh=mesh, placements="S(0)")
    with capture() as trace:
        total = loom.collectives.all_reduce(x, mode=mode)
        moved = x.redistribute("S(1)")
    fresh = placed(8, 3, mesh=mesh, placements="S(0)", seed=5)
    x.copy_(fresh)
    trace.replay()
    torch.testing.assert_close(total.to_torch(), loom.collectives.all_reduce(fresh, mode=mode).to_torch())
    torch.testing.assert_close(moved.to_torch(), fresh.to_torch())


def test_a_training_step_is_captured_with_backward_and_update():
    def run(replay: bool) -> torch.Tensor:
        torch.manual_seed(0)
        mesh = loom.open_mesh((4,), axes=("d",))
        w = loom.distribute(torch.randn(6, 3), mesh, "R").requires_grad_()
        x, y = placed(8, 6, mesh=mesh, placements="S(0)"), placed(8, 3, mesh=mesh, placements="S(0)", seed=1)

        def step() -> None:
            loss = F.mse_loss(x @ w, y)
            (gradient,) = torch.autograd.grad(loss._data, w._data)
            with torch.no_grad():
                w._data.sub_(gradient, alpha=0.1)

        if replay:
            with capture() as trace:
                step()
            for _ in range(5):
                trace.replay()
        else:
            for _ in range(5):
                step()
        return w.detach().to_torch()

    torch.testing.assert_close(run(True), run(False))


def test_values_cannot_be_read_while_nothing_is_computed():
    x = placed(4, mesh=loom.open_mesh((2,)))
    for ask in (lambda: x.sum().item(), lambda: x.tolist(), lambda: x.numpy(), lambda: bool(x.sum() > 0)):
        with pytest.raises(TraceError, match="while a trace is captured nothing is computed"), capture():
            ask()
        assert state.capture is None
    with pytest.raises(TraceError, match="needs values"), capture():
        torch.nonzero(x._data)
    assert x.sum().item() == x.to_torch().sum().item()


def test_two_captures_in_one_thread_are_refused_and_one_that_raises_is_thrown_away():
    with capture() as trace, pytest.raises(TraceError, match="already being captured"), capture():
        pass
    trace.replay()
    with pytest.raises(KeyError), capture() as broken:
        raise KeyError("mine")
    with pytest.raises(ClosedError, match="has been released"):
        broken.replay()
    assert state.capture is None


def test_other_threads_are_not_captured():
    x = loom.ones(4, mesh=loom.open_mesh((2,)))
    found = []
    with capture() as trace:
        thread = threading.Thread(target=lambda: found.append((x + 1).tolist()))
        thread.start()
        thread.join()
    assert found == [[2.0] * 4] and len(trace) == 0


# commands


def touched(x: Any, by: float = 1.0) -> MeshWorkload:
    workload = MeshWorkload()
    workload.add_program(None, Program(lambda x, by: x.add_(by), updates=[x], args={"by": by}))
    return workload


@pytest.fixture
def mesh() -> Any:
    with open_mesh_device((2,), num_command_queues=2, memory=4096) as opened:
        yield opened


def test_several_traces_live_at_once_and_each_writes_where_it_did(mesh):
    x, y = (create_mesh_buffer(mesh, global_shape=(2,)) for _ in range(2))
    traces = []
    for buffer, by in ((x, 1.0), (y, 10.0), (x, 100.0)):
        with mesh.capture() as trace:
            mesh.queue().enqueue_workload(touched(buffer, by))
        traces.append(trace)
    for trace in (traces[0], traces[2], traces[1], traces[1]):
        mesh.execute_trace(trace, blocking=False)
    assert mesh.queue().enqueue_read(x).tolist() == [101, 101]
    assert mesh.queue().enqueue_read(y).tolist() == [20, 20]


def test_commands_and_tensor_ops_are_captured_together_in_order(mesh):
    x = create_mesh_buffer(mesh, global_shape=(2,))
    tensor = loom.from_buffer(x)
    with mesh.capture() as trace:
        doubled = tensor * 2
        mesh.queue().enqueue_workload(touched(x))
        tripled = tensor * 3
    for expected in (1, 2):
        trace.replay()
        assert doubled.tolist() == [2 * (expected - 1)] * 2 and tripled.tolist() == [3 * expected] * 2


def test_a_buffer_that_a_live_trace_uses_keeps_its_place_until_release(mesh):
    x = create_mesh_buffer(mesh, global_shape=(16,), name="x")
    with mesh.capture() as trace:
        mesh.queue().enqueue_workload(touched(x))
    address = x.address
    x.free()
    with pytest.raises(ClosedError, match="x has been freed"):
        mesh.queue().enqueue_read(x)
    assert create_mesh_buffer(mesh, global_shape=(16,)).address != address
    with pytest.raises(OutOfMemoryError, match=rf"buffer x \(freed, kept by trace {trace.id}\) is there"):
        create_mesh_buffer(mesh, global_shape=(16,), address=address)
    mesh.execute_trace(trace)
    mesh.release_trace(trace)
    mesh.release_trace(trace)
    assert create_mesh_buffer(mesh, global_shape=(16,), address=address).address == address
    with pytest.raises(ClosedError, match="has been released"):
        mesh.execute_trace(trace)


def test_a_buffer_freed_while_a_trace_is_captured_is_protected_too(mesh):
    with mesh.capture() as trace:
        inner = create_mesh_buffer(mesh, global_shape=(16,), name="inner")
        mesh.queue().enqueue_workload(touched(inner))
        inner.free()
        after = create_mesh_buffer(mesh, global_shape=(16,), name="after")
    assert after.address != inner.address
    mesh.queue().enqueue_write(after, torch.zeros(16))
    mesh.execute_trace(trace)
    assert mesh.queue().enqueue_read(after).eq(0).all()


def test_a_trace_that_nobody_refers_to_lets_its_memory_go(mesh):
    x = create_mesh_buffer(mesh, global_shape=(16,))
    with mesh.capture() as trace:
        mesh.queue().enqueue_workload(touched(x))
    x.free()
    assert mesh.memory_usage()[0,].used == 64
    del trace, x
    assert mesh.memory_usage()[0,].used == 0


def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on(mesh):
    x = create_mesh_buffer(mesh, global_shape=(2,))
    event = mesh.queue(1).record_event()
    with mesh.capture() as trace:
        queue = mesh.queue()
        for refused, text in (
            (lambda: queue.enqueue_write(x, [0.0, 0.0]), "writes from the host are not captured"),
            (lambda: queue.enqueue_read(x), "reads to the host are not captured"),
            (lambda: queue.record_event(), "events are not captured"),
            (lambda: queue.wait_for_event(event), "events are not captured"),
            (lambda: queue.enqueue_workload(touched(x), blocking=True), "nothing can be waited for"),
            (lambda: queue.enqueue_trace(trace), "still being captured"),
        ):
            with pytest.raises(TraceError, match=text):
                refused()
        mesh.queue(1).enqueue_write(x, [5.0, 5.0], blocking=True)  # another queue goes on
        queue.enqueue_workload(touched(x))
    mesh.execute_trace(trace)
    assert mesh.queue().enqueue_read(x).tolist() == [6, 6]


def test_a_trace_of_another_mesh_or_thread_is_refused(mesh):
    x = create_mesh_buffer(mesh, global_shape=(2,))
    with mesh.capture() as trace:
        mesh.queue().enqueue_workload(touched(x))
    with open_mesh_device((2,)) as other, pytest.raises(MeshError, match="belongs to MeshDevice"):
        other.execute_trace(trace)
    with pytest.raises(TraceError, match="is not being captured in this thread"):
        mesh.end_trace_capture(trace)


def test_an_error_in_a_replay_names_the_command_inside(mesh):
    x = create_mesh_buffer(mesh, global_shape=(2,))

    def broken(x: torch.Tensor, coordinate: tuple[int, ...]) -> None:
        raise ZeroDivisionError("planted")

    workload = MeshWorkload()
    workload.add_program(None, Program(broken, updates=[x]))
    with mesh.capture() as trace:
        mesh.queue().enqueue_workload(workload)
    with pytest.raises(DeviceError) as caught:
        mesh.execute_trace(trace)
    assert f"replay trace {trace.id}" in str(caught.value) and "workload broken at test_runtime_trace.py" in str(
        caught.value
    )


def test_results_of_a_captured_program_stay_in_the_books_while_the_trace_lives():
    with open_mesh_device((2,), memory=1 << 16) as device:
        x = loom.ones(64, mesh=device, placements="S(0)")
        with device.capture() as trace:
            y = (x + 1) * 2
        held = device.memory_usage()[0,].used
        assert held >= 3 * 128
        del y
        assert device.memory_usage()[0,].used == held
        trace.replay()
        trace.release()
        assert device.memory_usage()[0,].used == 128


def test_intermediate_results_share_memory_and_what_somebody_holds_does_not():
    mesh = loom.open_mesh((4,))
    x = placed(64, 64, mesh=mesh)
    with capture() as trace:
        y = x
        kept = []
        for turn in range(20):
            y = (y * 1.5 + x).tanh()
            if turn in (3, 7):
                kept.append(y)
    outs = [call.keywords["out"] for call in trace._calls]
    memories = {out.untyped_storage().data_ptr() for out in outs}
    assert len(outs) == 60 and len(memories) <= 8
    trace.replay()
    expected, wanted = x, []
    for turn in range(20):
        expected = (expected * 1.5 + x).tanh()
        if turn in (3, 7):
            wanted.append(expected)
    for found, other in zip([*kept, y], [*wanted, expected], strict=True):
        assert found.to_torch().equal(other.to_torch())
