"""Collectives, composers and shared memory, where values or their meaning once differed from the original's."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from meshloom import ttnn
from meshloom.errors import OperandError, TraceError
from meshloom.ttnn.tensor.tensor import Tensor
from ttnn_cases import semaphore_on

pytest_plugins = ("ttnn_meshes",)
MODES = ("direct", "host", "fabric")
S, R = ttnn.PlacementShard, ttnn.PlacementReplicate()
UNKNOWN = ttnn.PlacementPartial("unknown")


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).reshape(shape)


def put(mesh: Any, values: torch.Tensor, shape: Sequence[int], *placements: Any, offset: Sequence[int] = ()) -> Tensor:
    """Values on a mesh as a config of a mapper says."""
    config = ttnn.MeshMapperConfig(list(placements), ttnn.MeshShape(*shape), offset)
    return ttnn.from_torch(values, device=mesh, mesh_mapper=ttnn.create_mesh_mapper(mesh, config))


def of_block(mesh: Any, block: torch.Tensor, *placements: Any) -> Tensor:
    """A tensor of a block as it is, labelled."""
    grid = tuple(mesh.shape)
    label = ttnn.TensorTopology(grid, placements, list(itertools.product(*map(range, grid))))
    kind = ttnn.float32 if block.is_floating_point() else ttnn.int32
    return Tensor(block, grid, kind, ttnn.ROW_MAJOR_LAYOUT, label, mesh)


def parts(tensor: Tensor) -> list[torch.Tensor]:
    """What every device that holds a part holds, row-major."""
    return [tensor.part(place).clone() for place in tensor.device_coords()]


def check_parts(tensor: Tensor, wanted: Sequence[torch.Tensor]) -> None:
    found = parts(tensor)
    assert len(found) == len(wanted)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want)


def label_of(tensor: Tensor) -> tuple[list[int], list[Any]]:
    label = tensor.tensor_topology()
    return list(label.distribution_shape()), label.placements()


# all_to_all: `in_dim` is the dim that is sharded before, `out_dim` the one after


@pytest.mark.parametrize("mode", MODES)
def test_all_to_all_joins_the_in_dim_and_cuts_the_out_dim(open_mesh: Any, mode: str) -> None:
    mesh, data = open_mesh(1, 8), numbers(1, 1, 256, 512)
    x = ttnn.from_torch(data, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=3))
    found = ttnn.experimental.all_to_all_async_generic(x, 3, 2, mode=mode)
    assert found.shape == (1, 1, 32, 512)
    check_parts(found, data.chunk(8, 2))
    assert torch.equal(ttnn.to_torch(found), data)
    semaphore = semaphore_on(mesh)
    output = ttnn.allocate_tensor_on_device(found.spec, mesh)
    assert ttnn.experimental.all_to_all_async(x, None, output, 3, 2, semaphore) is output
    check_parts(output, data.chunk(8, 2))
    back = ttnn.experimental.all_to_all_async_generic(found, 2, 3, cluster_axis=1)
    check_parts(back, data.chunk(8, 3))


def test_all_to_all_leaves_the_padding_of_the_in_dim_out(open_mesh: Any) -> None:
    mesh, data = open_mesh(1, 4), numbers(8, 7)
    x = put(mesh, data, (1, 4), R, S(1))
    assert x.shape == (8, 2)
    found = ttnn.experimental.all_to_all_async_generic(x, 1, 0)
    assert found.shape == (2, 7)
    assert torch.equal(ttnn.to_torch(found), data)


# composers with a shape of their own


def composed(tensor: Tensor, mesh: Any, dims: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    composer = ttnn.create_mesh_composer(mesh, ttnn.MeshComposerConfig(list(dims), ttnn.MeshShape(*shape)))
    return ttnn.to_torch(tensor, mesh_composer=composer)


def test_a_composer_takes_as_many_devices_from_the_first_as_its_shape_has(open_mesh: Any) -> None:
    mesh, data = open_mesh(1, 8), numbers(2, 3)
    x = ttnn.from_torch(data, device=mesh)
    assert torch.equal(composed(x, mesh, [0], [1]), data)
    assert torch.equal(composed(x, mesh, [0], [3]), data.repeat(3, 1))
    assert torch.equal(composed(x, mesh, [0, 1], [1, 2]), data.repeat(1, 2))
    host = ttnn.from_torch(data, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
    assert torch.equal(composed(host, mesh, [0], [1]), data)
    rows = ttnn.from_torch(numbers(16, 3), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert torch.equal(composed(rows, mesh, [0], [3]), numbers(16, 3)[:6])


def test_a_composer_of_a_box_takes_the_first_rows_and_columns(open_mesh: Any) -> None:
    mesh, data = open_mesh(2, 4), numbers(4, 8)
    x = ttnn.from_torch(data, device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, 1)))
    assert torch.equal(composed(x, mesh, [0, 1], [2, 2]), data[:, :4])
    assert torch.equal(composed(x, mesh, [0, 1], [2, 1]), data[:, :2])
    assert torch.equal(ttnn.to_torch(x, mesh_composer=ttnn.ConcatMesh2dToTensor(mesh, (1, 4), (0, 1))), data[:2])
    assert torch.equal(composed(x, mesh, [0], [5]), torch.cat(parts(x)[:5]))


def test_a_composer_takes_those_that_hold_a_part(open_mesh: Any) -> None:
    mesh, data = open_mesh(2, 4), numbers(2, 4)
    right = put(mesh, data, (2, 2), S(0), S(1), offset=(0, 2))
    assert torch.equal(composed(right, mesh, [0, 1], [2, 2]), data)
    assert torch.equal(composed(right, mesh, [0], [1]), data[:1, :2])
    every = ttnn.ConcatMeshToTensor(mesh, dim=0)
    assert torch.equal(ttnn.to_torch(right, mesh_composer=every), torch.cat(parts(right)))


def test_a_composer_of_some_devices_leaves_the_padding_of_uneven_dims_out(open_mesh: Any) -> None:
    mesh, data = open_mesh(2, 4), numbers(3, 7)
    x = put(mesh, data, (2, 4), S(0), S(1))
    assert torch.equal(composed(x, mesh, [0, 1], [2, 2]), data[:, :4])
    assert torch.equal(composed(x, mesh, [1], [4]), data[:2])
    copies = put(mesh, data, (2, 4), S(0), R)
    assert torch.equal(composed(copies, mesh, [0], [2]), data[:2].repeat(2, 1))


# sums of local experts


def test_a_local_sum_is_in_the_slot_of_the_first_local_expert(open_mesh: Any) -> None:
    mesh = open_mesh(1, 2)
    mapping = of_block(mesh, torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]).int().reshape(1, 1, 1, 1, 4, 2), R, R)
    chosen = torch.tensor([[1, 0], [0, 1], [3, 0], [2, 3], [3, 2], [1, 2]]).int()  # of six tokens, three on a device
    metadata = of_block(mesh, chosen.reshape(1, 1, 1, 6, 1, 2), R, R)
    sums = of_block(mesh, torch.stack([numbers(6), 10 * numbers(6)]).reshape(1, 2, 1, 6, 1, 1), R, S(0))
    found = ttnn.all_to_all_combine(sums, metadata, mapping, local_reduce=True)
    slots = torch.cat([each.flatten(1) for each in parts(found)], 1).T  # [token, slot]
    assert slots.tolist() == [[0, 1], [2, 0], [30, 3], [40, 0], [0, 50], [6, 60]]


# a tensor on part of a mesh


@pytest.fixture(params=["first of a row", "box", "line"])
def some(request: Any, open_mesh: Any) -> Tensor:
    """A tensor on some devices of a mesh: the first two of eight, a box at an offset, five of two rows."""
    if request.param == "first of a row":
        return put(open_mesh(1, 8), numbers(2, 8), (2,), S(0))
    if request.param == "box":
        return put(open_mesh(2, 4), numbers(2, 16), (2, 2), S(0), S(1), offset=(0, 1))
    return put(open_mesh(2, 4), numbers(5, 10), (5,), S(0))


@pytest.mark.parametrize("mode", MODES)
def test_collectives_act_on_the_devices_that_the_tensor_lies_on(some: Tensor, mode: str) -> None:
    held, count = parts(some), len(some.device_coords())
    total = torch.stack(held).sum(0)
    reduced = ttnn.all_reduce(some, mode=mode)
    check_parts(reduced, [total] * count)
    assert reduced.device_coords() == some.device_coords()
    assert torch.equal(ttnn.to_torch(reduced), total)
    scattered = ttnn.reduce_scatter(some, 1, mode=mode) if total.shape[1] % count == 0 else None
    if scattered is not None:
        check_parts(scattered, total.chunk(count, 1))
        assert torch.equal(ttnn.to_torch(scattered), total)
    last = some.device_coords()[-1]
    check_parts(ttnn.broadcast(some, last, mode=mode), [held[-1]] * count)
    every = ttnn.all_broadcast(some, mode=mode)
    assert len(every) == count
    for each, value in zip(every, held, strict=True):
        check_parts(each, [value] * count)
    sent = ttnn.point_to_point(some, some.device_coords()[0], some.device_coords()[1], mode=mode)
    check_parts(sent, [torch.zeros_like(held[0]), held[0], *(torch.zeros_like(held[0]) for _ in held[2:])])


def test_the_reduction_of_a_scatter_on_part_of_a_mesh_is_cut_for_its_devices(open_mesh: Any) -> None:
    some = put(open_mesh(1, 8), numbers(4, 8), (4,), S(0))
    found = ttnn.reduce_scatter(some, 1, cluster_axis=1)
    assert found.shape == (1, 2) and len(found.device_coords()) == 4
    check_parts(found, numbers(4, 8).sum(0, keepdim=True).chunk(4, 1))
    assert label_of(found) == ([4], [S(1)])


def test_groups_along_an_axis_are_those_of_the_box(open_mesh: Any) -> None:
    some = put(open_mesh(2, 4), numbers(2, 16), (2, 2), S(0), S(1), offset=(0, 2))
    held = parts(some)
    across = ttnn.all_reduce(some, cluster_axis=1)
    check_parts(across, [held[0] + held[1]] * 2 + [held[2] + held[3]] * 2)
    down = ttnn.all_reduce(some, cluster_axis=0)
    check_parts(down, [held[0] + held[2], held[1] + held[3]] * 2)
    assert down.tensor_topology().mesh_coords() == some.device_coords()
    assert label_of(down) == ([2, 2], [R, S(1)])
    check_parts(ttnn.mesh_partition(some, 1, 1), [held[0][:, :4], held[1][:, 4:], held[2][:, :4], held[3][:, 4:]])


def test_devices_that_are_no_rows_and_columns_have_no_groups_along_an_axis(open_mesh: Any) -> None:
    some = put(open_mesh(2, 4), numbers(5, 10), (5,), S(0))
    with pytest.raises(OperandError, match="the tensor is on 5 of 8 devices, which are no rows and columns") as caught:
        ttnn.all_reduce(some, cluster_axis=1)
    assert "cluster_axis=None" in str(caught.value)
    with pytest.raises(OperandError, match=r"sender_coord \[1, 3\] holds no part of the tensor"):
        ttnn.broadcast(some, ttnn.MeshCoordinate(1, 3))


def test_an_all_gather_on_part_of_a_mesh_has_room_for_every_device_of_the_group(open_mesh: Any) -> None:
    """As in the original, whose shape is that; what devices without a part would have given is zero."""
    mesh = open_mesh(1, 8)
    x = ttnn.from_torch(numbers(2, 2, 3), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    found = ttnn.all_gather(x, 1, cluster_axis=1)
    assert found.shape == (1, 16, 3) and len(found.device_coords()) == 2
    wanted = torch.cat([*numbers(2, 2, 3).chunk(2), torch.zeros(1, 12, 3)], 1)
    check_parts(found, [wanted, wanted])
    right = put(open_mesh(2, 4), numbers(2, 2), (2, 2), S(0), S(1), offset=(0, 2))
    upper, lower = torch.tensor([[0.0, 0, 1, 2]]), torch.tensor([[0.0, 0, 3, 4]])
    check_parts(ttnn.all_gather(right, 1, cluster_axis=1), [upper, upper, lower, lower])


def test_an_output_on_all_devices_keeps_what_devices_without_a_part_hold(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    some = put(mesh, numbers(2, 3), (2,), S(0))
    for work in (ttnn.add, ttnn.multiply):
        output = ttnn.from_torch(torch.full((4, 3), -1.0), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
        work(some, some, output_tensor=output)
        check_parts(output, [*parts(work(some, some)), *[torch.full((1, 3), -1.0)] * 2])


# labels keep their rank


def test_the_label_of_a_collective_over_all_devices_keeps_its_rank(open_mesh: Any) -> None:
    mesh = open_mesh(1, 8)
    alike = ttnn.from_torch(numbers(64, 128), device=mesh)
    assert label_of(ttnn.all_gather(alike, dim=1, cluster_axis=1)) == ([8], [R])
    assert label_of(ttnn.reduce_scatter(alike, dim=1, cluster_axis=1)) == ([8], [S(1)])
    assert label_of(ttnn.all_reduce(alike, cluster_axis=1)) == ([8], [R])
    rows = ttnn.from_torch(numbers(8, 40, 64), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert label_of(ttnn.all_gather(rows, dim=1, cluster_axis=1)) == ([8], [R])
    assert label_of(ttnn.all_gather(rows, dim=0)) == ([8], [R])
    assert label_of(ttnn.all_reduce(rows, cluster_axis=0)) == ([8], [S(0)])  # groups of one: nothing has changed
    grid = put(mesh, numbers(8, 40), (1, 8), R, S(0))
    assert label_of(ttnn.all_gather(grid, dim=0, cluster_axis=1)) == ([1, 8], [R, R])


def test_along_one_axis_of_two_a_label_is_about_both(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    alike = ttnn.from_torch(numbers(8, 8), device=mesh)
    assert label_of(ttnn.all_gather(alike, 1, cluster_axis=1)) == ([2, 4], [R, R])
    assert label_of(ttnn.reduce_scatter(alike, 1, cluster_axis=1)) == ([2, 4], [R, S(1)])
    assert label_of(ttnn.all_gather(alike, 1)) == ([8], [R])


def test_a_gather_along_the_only_axis_leaves_out_the_padding_that_a_label_over_all_devices_tells_of(
    open_mesh: Any,
) -> None:
    mesh, data = open_mesh(1, 4), numbers(7, 3)
    x = ttnn.from_torch(data, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert label_of(x) == ([4], [S(0)]) and x.shape == (2, 3)
    found = ttnn.all_gather(x, 0, cluster_axis=1)
    assert found.shape == (7, 3) and torch.equal(ttnn.to_torch(found), data)


# buffers


def test_the_buffers_of_a_scatter_are_for_what_arrives_and_for_the_result(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(numbers(8, 4), device=mesh)
    buffers = ttnn.experimental.reduce_scatter_minimal_async_create_intermediate_buffer(x, 0, cluster_axis=1)
    assert [tuple(each.shape) for each in buffers] == [(8, 4), (2, 4)]
    semaphore = semaphore_on(mesh)
    found = ttnn.experimental.reduce_scatter_minimal_async(x, buffers, 0, [semaphore], cluster_axis=1)
    assert found is buffers[1]
    check_parts(found, (4 * numbers(8, 4)).chunk(4))


# caches


@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (0, 1), (3, 1)])
def test_a_cache_cut_along_one_axis_and_written_along_another_has_no_global_tensor(open_mesh: Any, dims: Any) -> None:
    mesh, (had, new) = open_mesh(2, 2), dims
    cache = of_block(mesh, torch.zeros(2, 1, 2, 2, 4, 2), S(had), R)
    tokens = of_block(mesh, numbers(1, 2, 1, 2, 2, 2), R, S(new))
    ttnn.fill_cache(cache, tokens, 0)
    assert cache.tensor_topology().placements() == [S(had), UNKNOWN]
    assert [each[0, :, :2].tolist() for each in parts(cache)] == [each[0].tolist() for each in parts(tokens)]
    with pytest.raises(OperandError, match="Supply a mesh composer"):
        ttnn.to_torch(cache)


def test_a_cache_written_along_the_axis_that_cuts_it_stays_a_global_tensor(open_mesh: Any) -> None:
    mesh = open_mesh(2, 2)
    cache = of_block(mesh, torch.zeros(1, 2, 2, 1, 4, 3), R, S(1))
    ttnn.fill_cache(cache, of_block(mesh, numbers(1, 2, 1, 1, 4, 3), R, S(1)), 0)
    assert cache.tensor_topology().placements() == [R, S(1)]
    ttnn.update_cache(cache, of_block(mesh, numbers(2, 2, 1, 1, 2, 3), S(2), S(1)), 3)
    assert cache.tensor_topology().placements() == [S(0), S(1)]


def test_every_way_to_write_a_cache_tells_that_the_axes_differ(open_mesh: Any) -> None:
    mesh = open_mesh(2, 2)

    def cache() -> Tensor:
        return of_block(mesh, torch.zeros(2, 1, 2, 2, 4, 2), S(1), R)

    def check_untold(tensor: Tensor) -> None:
        assert tensor.tensor_topology().placements() == [S(1), UNKNOWN]

    check_untold(ttnn.update_cache(cache(), of_block(mesh, numbers(1, 2, 1, 2, 2, 2), R, S(1)), 1))
    tokens = of_block(mesh, numbers(1, 2, 1, 2, 2, 2), R, S(2))
    check_untold(ttnn.experimental.paged_update_cache(cache(), tokens, update_idxs=[0, 1]))
    table = of_block(mesh, torch.tensor([[0, 1]]).int().reshape(1, 1, 1, 2), R, R)
    check_untold(ttnn.experimental.paged_fill_cache(cache(), of_block(mesh, numbers(1, 2, 1, 2, 4, 2), R, S(1)), table))


# views


def differ(mesh: Any, x: Tensor) -> torch.Tensor:
    """Write other values for every device into a tensor that was stored once."""
    data = numbers(mesh.get_num_devices() * x.shape[0], *x.shape[1:])
    source = ttnn.from_torch(data, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    ttnn.copy_host_to_device_tensor(source, x)
    return data


def test_parts_of_a_tensor_stored_once_show_what_is_written_later(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(torch.zeros(2, 4), device=mesh)
    single, same, turned = ttnn.get_device_tensors(x), ttnn.to_device(x, mesh), ttnn.reshape(x, (1, 2, 4))
    again = ttnn.reshape(turned, (2, 1, 4))
    assert {each.buffer_address() for each in (*single, same, turned, again)} == {x.buffer_address()}
    data = differ(mesh, x)
    for each, value in zip(single, data.chunk(4), strict=True):
        assert torch.equal(ttnn.to_torch(each), value)
    check_parts(same, data.chunk(4))
    check_parts(turned, [each.reshape(1, 2, 4) for each in data.chunk(4)])
    check_parts(again, [each.reshape(2, 1, 4) for each in data.chunk(4)])


def test_a_tensor_shows_what_is_written_into_a_view_of_it(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(torch.zeros(2, 4), device=mesh)
    flat = ttnn.reshape(x, (1, 2, 4))
    data = differ(mesh, flat)
    check_parts(x, [each[0] for each in data.chunk(4)])
    with pytest.raises(OperandError, match="Supply a mesh composer"):  # its label said that all hold the same
        ttnn.to_torch(x)


def test_a_cache_and_a_view_of_it_stay_one_when_devices_write_different_tokens(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    cache = ttnn.from_torch(torch.zeros(2, 1, 4, 3), device=mesh)
    view = ttnn.reshape(cache, (1, 2, 4, 3))
    assert view.buffer_address() == cache.buffer_address()
    ttnn.fill_cache(cache, of_block(mesh, numbers(1, 4, 1, 1, 4, 3), R, S(1)), 1)
    check_parts(view, [each.reshape(1, 2, 4, 3) for each in parts(cache)])
    assert len({each.sum().item() for each in parts(view)}) == 4


def test_parts_on_the_host_show_what_is_written_later(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    host = ttnn.from_torch(torch.zeros(2, 4)).cpu()
    host = ttnn.from_host_shards([host] * 4, ttnn.MeshShape(1, 4))
    once = ttnn.from_torch(torch.zeros(2, 4), device=mesh).cpu()
    rows = ttnn.from_torch(numbers(8, 4), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    for target in (host, once):
        single = ttnn.get_device_tensors(target)
        ttnn.copy_device_to_host_tensor(rows, target)
        for each, value in zip(single, numbers(8, 4).chunk(4), strict=True):
            assert torch.equal(ttnn.to_torch(each), value)


def test_what_a_trace_refers_to_does_not_move_when_a_view_of_it_is_written(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(torch.ones(2, 4), device=mesh)
    view = ttnn.reshape(x, (1, 2, 4))
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    found = ttnn.add(x, x)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    with pytest.raises(TraceError, match="a trace was captured while all devices held the same"):
        differ(mesh, view)
    ttnn.execute_trace(mesh, trace, cq_id=0)
    assert torch.equal(ttnn.to_torch(found), torch.full((2, 4), 2.0))
    ttnn.release_trace(mesh, trace)


@pytest.mark.parametrize("is_stored_once", [True, False])
def test_what_is_written_into_the_tensor_of_one_device_is_on_that_device_alone(
    open_mesh: Any, is_stored_once: bool
) -> None:
    mesh = open_mesh(1, 4)
    mapper = ttnn.ReplicateTensorToMesh(mesh) if is_stored_once else ttnn.ShardTensorToMesh(mesh, dim=0)
    x = ttnn.from_torch(torch.zeros(1 if is_stored_once else 4, 2), device=mesh, mesh_mapper=mapper)
    second, last = ttnn.get_device_tensors(x)[1::2]
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(torch.ones(1, 2)), second)
    ttnn.add_(last, 5.0)
    ttnn.add(second, second, output_tensor=second)
    assert [each.flatten().tolist() for each in parts(x)] == [[0, 0], [2, 2], [0, 0], [5, 5]]
    assert ttnn.to_torch(second).tolist() == [[2, 2]]
    assert (UNKNOWN in x.tensor_topology().placements()) == is_stored_once


@pytest.mark.parametrize("is_stored_once", [True, False])
def test_the_cache_of_one_device_is_written_on_that_device_alone(open_mesh: Any, is_stored_once: bool) -> None:
    mesh = open_mesh(1, 4)
    tokens = ttnn.from_torch(torch.ones(1, 1, 2, 2), device=mesh)
    writes = (
        lambda cache: ttnn.fill_cache(cache, tokens, 0),
        lambda cache: ttnn.update_cache(cache, tokens, 1),
        lambda cache: ttnn.experimental.paged_update_cache(cache, tokens, update_idxs=[1]),
        lambda cache: ttnn.experimental.slice_write(tokens, cache, [0, 0, 0, 0], [1, 1, 2, 2], [1, 1, 1, 1]),
    )
    for write in writes:
        lead = (1, 1) if is_stored_once else (1, 4)
        cache = of_block(mesh, torch.zeros(*lead, 1, 1, 4, 2), R, R)
        write(ttnn.get_device_tensors(cache)[2])
        assert [bool(each.any()) for each in parts(cache)] == [False, False, True, False]
    positions = of_block(mesh, torch.zeros(1, 1, 3).int(), R, R)
    ttnn.plus_one(ttnn.get_device_tensors(positions)[1])
    assert [each.tolist() for each in parts(positions)] == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]


def test_a_host_tensor_that_has_views_is_pickled_without_them(open_mesh: Any) -> None:
    once = ttnn.from_torch(numbers(2, 4), device=open_mesh(1, 4)).cpu()
    single = ttnn.get_device_tensors(once)
    for each in (once, single[3]):
        assert torch.equal(ttnn.to_torch(pickle.loads(pickle.dumps(each))), numbers(2, 4))


def test_views_that_are_gone_are_forgotten(open_mesh: Any) -> None:
    x = ttnn.from_torch(torch.zeros(2, 4), device=open_mesh(1, 4))
    for _ in range(10):
        ttnn.get_device_tensors(x)
    kept = ttnn.get_device_tensors(x)
    assert len(x.sharers()) == len(kept)


# words


def test_what_cannot_be_reconstructed_is_said_in_plain_words(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    terms = of_block(mesh, torch.ones(2, 4, 2, 2), ttnn.PlacementPartial(), R)
    with pytest.raises(OperandError, match="the global tensor cannot be reconstructed from these shards"):
        ttnn.distributed.softmax(ttnn.gelu(terms))


@pytest.mark.parametrize("grows", ["tensor", "relabelled"])
def test_a_reshape_that_made_rows_padding_follows_when_devices_differ(
    open_mesh: Callable[..., Any], grows: str
) -> None:
    values = numbers(1, 1, 32, 64)
    x = ttnn.from_torch(values, device=open_mesh(1, 2), layout=ttnn.TILE_LAYOUT, dtype=ttnn.float32)
    y = ttnn.reshape(x, ttnn.Shape([1, 1, 5, 64]), ttnn.Shape([1, 1, 32, 64]))
    assert x.block.shape[:2] == (1, 1)  # stored once
    one = x if grows == "tensor" else y
    block = one.block.expand(1, 2, *one.block.shape[2:]).clone()
    block[:, 1] += 1000
    one.grow(block)
    rows = 32 if grows == "tensor" else 5
    moved = torch.cat([values[:, :, :rows] + 1000, values[:, :, rows:]], 2)
    check_parts(x, [values, moved])
    check_parts(y, [values[:, :, :5], moved[:, :, :5]])
    back = ttnn.reshape(y, ttnn.Shape([1, 1, 32, 64]), ttnn.Shape([1, 1, 32, 64]))
    check_parts(back, [values, moved])
