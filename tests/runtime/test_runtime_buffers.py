"""Buffers, programs and workloads: layouts, pieces, what is stored once, kernels once for all or on each, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom.errors import ArgumentError, ClosedError, MeshError, PlacementError, ShapeError
from meshloom.runtime import (
    MeshCoordinateRange,
    MeshDevice,
    MeshShape,
    MeshType,
    MeshWorkload,
    Program,
    ReplicatedBufferConfig,
    ShardedBufferConfig,
    create_mesh_buffer,
    enqueue_mesh_workload,
    open_mesh_device,
)
from meshloom.runtime.compile_cache import CompileCache, fingerprint, link, seal, translate


def sharded(mesh: MeshDevice, *shape: int, shard: tuple[int, ...], **options: Any) -> Any:
    return create_mesh_buffer(mesh, layout="sharded", global_shape=shape, shard_shape=shard, **options)


@given(
    mesh=st.sampled_from([(1,), (4,), (2, 2), (2, 4), (4, 2), (2, 2, 2)]),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    replicated=st.tuples(st.booleans(), st.booleans()),
    orientation=st.sampled_from(["row_major", "col_major"]),
    dispatch=st.sampled_from(["fast", "slow"]),
)
@settings(max_examples=150)
def test_what_is_written_is_read_for_every_layout_that_fits(mesh, grid, sides, replicated, orientation, dispatch):
    shape = tuple(g * s for g, s in zip(grid, sides, strict=True))
    shard = tuple(0 if r else s for r, s in zip(replicated, sides, strict=True))
    config = ShardedBufferConfig(None, shape, shard, orientation)
    with open_mesh_device(mesh, dispatch=dispatch) as device:
        try:
            x = create_mesh_buffer(device, config)
        except ShapeError as error:
            assert "shards do not fit" in str(error)
            return
        value = torch.randn(shape)
        device.queue().enqueue_write(x, value)
        assert device.queue().enqueue_read(x).equal(value)
        for place in device.coordinates():
            part = x.layout.part(place)
            if part is not None:
                assert device.queue().enqueue_read(x, coordinate=place).equal(value[part])


def test_the_buffer_layout_and_the_tensor_placement_say_the_same():
    with open_mesh_device((2, 4)) as mesh:
        cases = (
            (ShardedBufferConfig(None, (4, 8), (2, 2)), "(S(0), S(1))"),
            (ShardedBufferConfig(None, (8, 4), (1, 4)), "(S(0), S(0))"),
            (ShardedBufferConfig(None, (4, 8), (0, 2)), "(R, S(1))"),
            (ShardedBufferConfig(None, (4, 8), (2, 0), "col_major"), "(S(0), R)"),
            (ReplicatedBufferConfig(shape=(4, 8)), "(R, R)"),
        )
        for config, placements in cases:
            x = create_mesh_buffer(mesh, config)
            assert x.topology.notation.endswith(placements)
            value = torch.arange(32.0).view(x.shape)
            mesh.queue().enqueue_write(x, value)
            tensor = loom.distribute(value, mesh, x.topology.placements)
            for place in mesh.coordinates():
                assert tensor.shard_at(place).equal(mesh.queue().enqueue_read(x, coordinate=place))


def test_a_layout_that_no_placements_say_has_no_topology():
    with open_mesh_device((2, 4)) as mesh:
        x = sharded(mesh, 2, 8, shard=(2, 8))  # one shard, seven devices without
        with pytest.raises(PlacementError, match="no placements say what this buffer's layout says"):
            x.topology  # noqa: B018
        with pytest.raises(MeshError, match=r"has no shard at \(0, 1\)"):
            mesh.queue().enqueue_read(x, coordinate=(0, 1))


def test_a_replicated_buffer_is_stored_once_until_a_coordinate_is_written():
    with open_mesh_device((8, 16)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1024,))
        assert x.storage.block.untyped_storage().nbytes() == 4096
        mesh.queue().enqueue_write(x, torch.ones(1024))
        mesh.queue().enqueue_write(x, torch.zeros(1024), coordinate=(3, 3), blocking=True)
        assert x.storage.block.shape == (8, 16, 1024)
        assert mesh.queue().enqueue_read(x, coordinate=(3, 2)).eq(1).all()
        assert mesh.queue().enqueue_read(x, coordinate=(3, 3)).eq(0).all()
        with pytest.raises(loom.DeviceError, match="should be the same at"):
            mesh.queue().enqueue_read(x)
        mesh.queue().enqueue_write(x, torch.ones(1024))
        assert mesh.queue().enqueue_read(x).eq(1).all()


def test_pieces_of_a_part_are_written_and_read_with_strides():
    with open_mesh_device((2,)) as mesh:
        x = sharded(mesh, 8, 6, shard=(4, 6))
        value = torch.arange(48.0).view(8, 6)
        queue = mesh.queue()
        queue.enqueue_write(x, value)
        every_other = (slice(None, None, 2), slice(1, None, 3))
        assert queue.enqueue_read(x, coordinate=(1,), index=every_other).equal(value[4:][every_other])
        queue.enqueue_write(x, torch.zeros(2, 2), coordinate=(1,), index=every_other)
        value[4:][every_other] = 0
        assert queue.enqueue_read(x).equal(value)
        with pytest.raises(ShapeError, match="does not index"):
            queue.enqueue_read(x, coordinate=(0,), index=(0, 0, 0))
        with pytest.raises(MeshError, match="give coordinate= as well"):
            queue.enqueue_read(x, index=0)


def test_data_of_another_shape_or_kind_is_refused_and_of_another_dtype_cast():
    with open_mesh_device((2,)) as mesh:
        x = sharded(mesh, 4, shard=(2,), dtype="i32", name="x")
        with pytest.raises(ShapeError, match=r"x takes i32\[4\] and got shape \[5\]"):
            mesh.queue().enqueue_write(x, torch.ones(5))
        with pytest.raises(ArgumentError, match="a str cannot be written"):
            mesh.queue().enqueue_write(x, "abcd")
        mesh.queue().enqueue_write(x, [1.0, 2.0, 3.0, 4.0])
        assert mesh.queue().enqueue_read(x).tolist() == [1, 2, 3, 4]


def test_the_caller_may_change_his_data_at_once():
    with open_mesh_device((2,), stress=3) as mesh:
        x, value = sharded(mesh, 4, shard=(2,)), torch.ones(4)
        mesh.queue().enqueue_write(x, value)
        value.zero_()
        assert mesh.queue().enqueue_read(x).eq(1).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"layout": "replicated"},
        {"layout": "replicated", "global_shape": (4,), "shard_shape": (2,)},
        {"layout": "sharded", "global_shape": (4,)},
        {"layout": "sharded", "global_shape": (4,), "shard_shape": (2, 2)},
        {"layout": "sharded", "global_shape": (4,), "shard_shape": (2,), "orientation": "diagonal"},
        {"layout": "sharded", "global_shape": (4,), "shard_shape": (2,), "global_size": 17},
        {"global_shape": (4,), "buffer_type": "flash"},
        {"global_shape": (-4,)},
    ],
    ids=str,
)
def test_buffers_that_cannot_be_are_refused(arguments):
    with open_mesh_device((2,)) as mesh, pytest.raises((ArgumentError, ShapeError)):
        create_mesh_buffer(mesh, **arguments)


# programs


def run(kernel: Any, dispatch: str = "fast", **options: Any) -> tuple[torch.Tensor, MeshDevice]:
    """A kernel on three buffers of a 2x4 mesh: what it left in the third."""
    with open_mesh_device((2, 4), dispatch=dispatch) as mesh:
        a, b, c = (sharded(mesh, 6, 16, shard=(3, 4)) for _ in range(3))
        for seed, each in enumerate((a, b, c)):
            value = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
            mesh.queue().enqueue_write(each, value)
        workload = MeshWorkload()
        workload.add_program(None, Program(kernel, [a, b], [c], **options))
        enqueue_mesh_workload(mesh, workload)
        return mesh.queue().enqueue_read(c), mesh


KERNELS = {
    "pointwise": lambda a, b, c: c.copy_(a * b + 1),
    "a sum over rows": lambda a, b, c: c.copy_((a + b).sum(0, keepdim=True).expand(3, 4)),
    "a product": lambda a, b, c: c.copy_(a @ b.T @ a),
    "softmax": lambda a, b, c: c.copy_(a.softmax(0) * b.amax()),
    "out=": lambda a, b, c: torch.add(a, b, out=c),
    "a branch on values": lambda a, b, c: c.copy_(a if a.sum() > 0 else b),
    "an item": lambda a, b, c: c.fill_(a[0, 0].item()),
    "a loop with slices": lambda a, b, c: [c[i].copy_(a[i] - b[2 - i]) for i in range(3)],
    "transpose and reshape": lambda a, b, c: c.copy_(a.t().reshape(3, 4) + b),
    "sorting": lambda a, b, c: c.copy_(a.sort(0).values),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_the_same_once_for_all_devices_as_on_each(name):
    fast, _ = run(KERNELS[name])
    slow, _ = run(KERNELS[name], dispatch="slow")
    each, _ = run(KERNELS[name], vectorised=False)
    torch.testing.assert_close(fast, slow)
    assert slow.equal(each)


def test_a_kernel_that_allows_it_is_called_once_for_all_devices():
    calls = []

    def kernel(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        calls.append(tuple(a.shape))
        c.copy_(a + b)

    run(kernel, vectorised=True)
    assert calls == [(2, 4, 3, 4)]
    calls.clear()
    run(kernel)
    assert calls == [(3, 4)] * 2  # once on shapes, once for all
    calls.clear()
    run(kernel, vectorised=False)
    assert calls == [(3, 4)] * 8


def test_a_result_of_replicated_operands_stays_stored_once_and_one_of_sharded_operands_does_not():
    with open_mesh_device((4,)) as mesh:
        a, b = (create_mesh_buffer(mesh, global_shape=(3,)) for _ in range(2))
        s = sharded(mesh, 12, shard=(3,))
        workload = MeshWorkload()
        workload.add_program(None, Program(lambda a, b: b.copy_(a + 1), [a], [b]))
        enqueue_mesh_workload(mesh, workload)
        assert b.storage.is_shared and mesh.queue().enqueue_read(b).tolist() == [1, 1, 1]
        mesh.queue().enqueue_write(s, torch.arange(12.0))
        workload = MeshWorkload()
        workload.add_program(None, Program(lambda s, b: b.copy_(s), [s], [b]))
        enqueue_mesh_workload(mesh, workload)
        assert not b.storage.is_shared
        assert mesh.queue().enqueue_read(b, coordinate=(2,)).tolist() == [6, 7, 8]


def test_arguments_are_per_program_per_workload_and_per_coordinate_and_hold_from_the_next_enqueue():
    def kernel(x: torch.Tensor, base: float, plus: float = 0.0) -> None:
        x.fill_(base + plus)

    with open_mesh_device((3,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        workload = MeshWorkload()
        workload.add_program(None, Program(kernel, writes=[x], args={"base": 1.0}))
        read = lambda: [mesh.queue().enqueue_read(x, coordinate=(i,)).item() for i in range(3)]  # noqa: E731
        enqueue_mesh_workload(mesh, workload)
        assert read() == [1, 1, 1]
        workload.set_args(plus=10.0)
        workload.set_args((1,), plus=20.0)
        enqueue_mesh_workload(mesh, workload)
        assert read() == [11, 21, 11]
        workload.set_args((7,), plus=1.0)
        with pytest.raises(MeshError, match="is not on the mesh"):
            enqueue_mesh_workload(mesh, workload)


def test_kernels_made_by_one_function_keep_what_they_close_over():
    def adder(by: float) -> Any:
        return lambda x: x.add_(by)

    with open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(1,))
        for by in (1.0, 10.0, 100.0):
            workload = MeshWorkload()
            workload.add_program(None, Program(adder(by), updates=[x]))
            enqueue_mesh_workload(mesh, workload)
        assert mesh.queue().enqueue_read(x).item() == 111 and mesh.counts["compiles"] == 1


def test_workloads_that_cannot_be_are_refused():
    with open_mesh_device((2, 2)) as mesh, open_mesh_device((2, 2)) as other:
        x, foreign = create_mesh_buffer(mesh, global_shape=(1,)), create_mesh_buffer(other, global_shape=(1,))
        outside = MeshWorkload()
        outside.add_program(((0, 0), (2, 0)), Program(lambda: None))
        with pytest.raises(MeshError, match=r"coordinate \(2, 0\) is not on the mesh"):
            enqueue_mesh_workload(mesh, outside)
        with pytest.raises(ArgumentError, match="the workload has no program"):
            enqueue_mesh_workload(mesh, MeshWorkload())
        strange = MeshWorkload()
        strange.add_program(None, Program(lambda x: None, updates=[foreign]))
        with pytest.raises(MeshError, match="is on MeshDevice"):
            enqueue_mesh_workload(mesh, strange)
        wrong = MeshWorkload()
        wrong.add_program(None, Program(lambda x, by: None, updates=[x]))
        with pytest.raises(ArgumentError, match="missing a required argument: 'by'"):
            enqueue_mesh_workload(mesh, wrong)
        good = MeshWorkload()
        good.add_program((0, 0), Program(lambda x: None, updates=[x]))
        enqueue_mesh_workload(mesh, good)
        with pytest.raises(ClosedError, match="a workload that was enqueued cannot change"):
            good.add_program((1, 1), Program(lambda x: None, updates=[x]))
        with pytest.raises(MeshError, match="belongs to the mesh it was first enqueued on"):
            enqueue_mesh_workload(other, good)
        with pytest.raises(ArgumentError, match="a kernel is a Python function"):
            Program(len)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="add_program takes a Program"):
            MeshWorkload().add_program(None, print)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="there is no queue 1: 1 were opened"):
            mesh.queue(1)


def test_a_tensor_over_a_buffer_shares_its_memory_and_refuses_devices_that_differ():
    with open_mesh_device((2,)) as mesh:
        x = create_mesh_buffer(mesh, global_shape=(2,), name="x")
        tensor = loom.from_buffer(x)
        tensor.fill_(3.0)
        assert mesh.queue().enqueue_read(x).tolist() == [3, 3]
        mesh.queue().enqueue_write(x, [9.0, 9.0], coordinate=(1,))
        with pytest.raises(PlacementError, match="x was written at single coordinates"):
            tensor.to_torch()
        x.free()
        with pytest.raises(ClosedError, match="x has been freed"):
            loom.from_buffer(x)


@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
def test_collectives_of_the_sketch_work_on_tensors_over_buffers(mode):
    with open_mesh_device((4,)) as mesh:
        x = sharded(mesh, 8, 2, shard=(2, 2))
        value = torch.randn(8, 2)
        mesh.queue().enqueue_write(x, value)
        tensor = loom.from_buffer(x)
        total = loom.collectives.all_reduce(tensor, mode=mode)
        torch.testing.assert_close(total.to_torch(), value.view(4, 2, 2).sum(0))
        assert loom.collectives.all_gather(tensor, 0, mode=mode).to_torch().equal(value)


# opening


def test_the_type_of_a_mesh_changes_its_links():
    for kind, ring in ((MeshType.Ring, True), ("Line", False), (MeshType.Mesh, False), (MeshType.Torus, True)):
        with open_mesh_device(mesh_shape=MeshShape(1, 4), mesh_type=kind) as mesh:
            route = mesh.fabric.route((0, 0), (0, 3))
            assert (len(route) == 2) is ring
    with open_mesh_device((1, 4)) as mesh:
        assert mesh.mesh_type is None


def test_a_range_is_checked_and_counts_row_major():
    assert list(MeshCoordinateRange(MeshShape(1, 2))) == [(0, 0), (0, 1)]
    assert (0, 1) in MeshCoordinateRange((0, 0), (1, 1)) and (0, 2) not in MeshCoordinateRange((0, 0), (1, 1))
    with pytest.raises(MeshError, match="a range cannot go from"):
        MeshCoordinateRange((1, 0), (0, 0))
    with pytest.raises(MeshError, match="MeshShape takes whole numbers"):
        MeshShape("2x4")


# the compile cache


def kernel_a(x: Any) -> None:
    x.add_(1)


def test_a_fingerprint_follows_the_code_and_nothing_else():
    made = [eval("lambda x: x + 1"), eval("lambda x: x + 1"), eval("lambda x: x + 1.0"), eval("lambda y: y + 1")]
    one, same, other, named = map(fingerprint, made)
    assert one == same and len({one, other, named}) == 3


def test_a_fingerprint_is_the_same_in_another_process():
    text = (
        "from meshloom.runtime.compile_cache import fingerprint\n"
        "print(fingerprint(lambda x: x in {'a', 'b', 'c'} and (lambda: 2.5)()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True, env={**os.environ, **seed}
        ).stdout
        for seed in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert len(found) == 1


def test_a_shared_directory_is_used_again_and_a_broken_file_is_compiled_again(tmp_path):
    first, second = CompileCache(tmp_path), CompileCache(tmp_path)
    binary = first.binary(kernel_a, translate)
    assert second.binary(kernel_a, translate) == binary
    assert (first.compiles, second.compiles, second.hits) == (1, 0, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(seal(path.name, binary)[:-3])
    third = CompileCache(tmp_path)
    assert third.binary(kernel_a, translate) == binary and third.compiles == 1
    assert path.read_bytes() == seal(path.name, binary)
    x = torch.zeros(1)
    link(binary, kernel_a)(x)
    assert x.item() == 1


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_cache_that_others_can_write_is_refused(tmp_path, mode):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(ArgumentError, match="can be written by others") as caught:
        open_mesh_device((2,), cache=shared)
    assert caught.value.details["fix"].startswith(f"chmod go-w {shared}")
    assert f"mode {mode:04o}" in str(caught.value)


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ArgumentError, match="can be written by others"):
        CompileCache(tmp_path)


def test_a_cache_that_becomes_writable_is_refused_before_code_is_read(tmp_path):
    cache = CompileCache(tmp_path / "made")
    cache.binary(kernel_a, translate)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    (tmp_path / "made").chmod(0o777)
    with pytest.raises(ArgumentError, match="can be written by others"):
        cache.binary(lambda x: x, translate)


def test_code_that_somebody_else_could_have_written_does_not_run(tmp_path):
    """Code under the name of a kernel, with the right checksum, in a file that others can write or as another's."""

    def planted(x):
        raise AssertionError("planted code has run")

    name = fingerprint(kernel_a)
    path = tmp_path / name
    path.write_bytes(seal(name, translate(planted)))
    path.chmod(0o666)
    found = CompileCache(tmp_path)
    assert found.binary(kernel_a, translate) == translate(kernel_a) and found.compiles == 1
    path.write_bytes(seal(fingerprint(planted), translate(planted)))
    found = CompileCache(tmp_path)
    assert found.binary(kernel_a, translate) == translate(kernel_a) and found.compiles == 1


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("MESHLOOM_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    CompileCache().binary(kernel_a, translate)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MESHLOOM_CACHE", str(tmp_path / "made"))
    CompileCache().binary(kernel_a, translate)
    assert len(list((tmp_path / "made").iterdir())) == 1
