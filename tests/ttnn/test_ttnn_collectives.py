"""Collectives of the per-device view, against plain loops over devices and groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import ttnn
from meshloom.errors import ArgumentError, ModeError, OperandError
from meshloom.ttnn.tensor.tensor import Tensor
from ttnn_cases import semaphore_on

pytest_plugins = ("ttnn_meshes",)
Parts = dict[tuple[int, ...], torch.Tensor]
MODES = ("direct", "host", "fabric")
S, R, P = ttnn.PlacementShard, ttnn.PlacementReplicate(), ttnn.PlacementPartial()


# the oracle: parts by coordinate, groups as lists of coordinates


def parts_of(tensor: Tensor) -> Parts:
    full = tensor.block.expand(*tensor.grid, *tensor.shape)
    return {place: full[place].clone() for place in itertools.product(*map(range, tensor.grid))}


def groups_of(shape: tuple[int, ...], cluster_axis: int | None) -> list[list[tuple[int, ...]]]:
    places = list(itertools.product(*map(range, shape)))
    if cluster_axis is None:
        return [places]
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        found.setdefault(place[:cluster_axis] + place[cluster_axis + 1 :], []).append(place)
    return list(found.values())


def by_loops(parts: Parts, shape: tuple[int, ...], axis: int | None, step: Callable[[list[Any]], list[Any]]) -> Parts:
    found: Parts = {}
    for group in groups_of(shape, axis):
        found.update(zip(group, step([parts[place] for place in group]), strict=True))
    return found


def total(held: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.stack([each.double() for each in held]).sum(0)
    return wide.to(held[0].dtype)


def check_same(tensor: Tensor, wanted: Parts) -> None:
    found = parts_of(tensor)
    assert found.keys() == wanted.keys()
    for place, value in wanted.items():
        torch.testing.assert_close(found[place], value, rtol=1e-5, atol=1e-5)


LOOPS: dict[str, Callable[[list[torch.Tensor], int], list[torch.Tensor]]] = {
    "all_reduce": lambda held, dim: [total(held)] * len(held),
    "all_gather": lambda held, dim: [torch.cat(held, dim)] * len(held),
    "reduce_scatter": lambda held, dim: list(total(held).chunk(len(held), dim)),
    "mesh_partition": lambda held, dim: [each.chunk(len(held), dim)[i] for i, each in enumerate(held)],
    "all_to_all": lambda held, dim: [
        torch.cat([each.chunk(len(held), dim)[i] for each in held], -1) for i in range(len(held))
    ],
}


def call(name: str, x: Tensor, dim: int, axis: int | None, mode: str) -> Tensor:
    if name == "all_reduce":
        return ttnn.all_reduce(x, cluster_axis=axis, mode=mode)
    if name == "mesh_partition":
        return ttnn.mesh_partition(x, dim, axis)
    if name == "all_to_all":
        return ttnn.experimental.all_to_all_async_generic(x, -1, dim, cluster_axis=axis, mode=mode)
    return getattr(ttnn, name)(x, dim, cluster_axis=axis, mode=mode)


def tensor_on(mesh: Any, block: torch.Tensor, label: Any = None, layout: Any = ttnn.ROW_MAJOR_LAYOUT) -> Tensor:
    grid = tuple(mesh.shape)
    places = list(itertools.product(*map(range, grid)))
    told = label if label is not None else ttnn.TensorTopology(grid, [R] * len(grid), places)
    kinds = {torch.float32: ttnn.float32, torch.bfloat16: ttnn.bfloat16, torch.int32: ttnn.int32}
    return Tensor(block, grid, kinds[block.dtype], layout, told, mesh)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(st.sampled_from([(1,), (3,), (4,), (1, 2), (2, 2), (2, 4), (3, 2), (1, 1), (2, 1, 3), (2, 2, 2)]))
    axis = draw(st.sampled_from([None, *range(len(shape))]))
    size = math.prod(shape) if axis is None else shape[axis]
    rank = draw(st.integers(1, 3))
    dim = draw(st.integers(-rank, rank - 1))
    dims = [draw(st.integers(1, 3)) for _ in range(rank)]
    dims[dim] *= size
    return {
        "shape": shape,
        "axis": axis,
        "dim": dim,
        "dims": dims,
        "alike": [draw(st.booleans()) for _ in shape],
        "dtype": draw(st.sampled_from([torch.float32, torch.int32])),
        "name": draw(st.sampled_from(sorted(LOOPS))),
        "mode": draw(st.sampled_from(MODES)),
        "seed": draw(st.integers(0, 99)),
    }


def made(mesh: Any, case: dict[str, Any]) -> Tensor:
    lead = [1 if same else size for same, size in zip(case["alike"], case["shape"], strict=True)]
    generator = torch.Generator().manual_seed(case["seed"])
    block = torch.randint(-9, 9, (*lead, *case["dims"]), generator=generator)
    return tensor_on(mesh, block.to(case["dtype"]))


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_every_collective_does_on_any_mesh_what_loops_over_devices_do(open_mesh: Any, case: dict[str, Any]) -> None:
    x = made(open_mesh(*case["shape"]), case)
    before = x.block.clone()
    with ttnn.strictness("lenient"):  # groups of one are among them
        found = call(case["name"], x, case["dim"], case["axis"], case["mode"])
    loop = LOOPS[case["name"]]
    check_same(found, by_loops(parts_of(x), case["shape"], case["axis"], lambda held: loop(held, case["dim"])))
    found.block.zero_()
    assert torch.equal(x.block, before)  # a result shares no memory with its operand


def test_the_oracle_tells_a_wrong_group_and_a_wrong_order(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(2, 4), torch.arange(2 * 4 * 8.0).reshape(2, 4, 8))
    wrong = by_loops(parts_of(x), (2, 4), 0, lambda held: LOOPS["all_reduce"](held, 0))
    with pytest.raises(AssertionError):
        check_same(ttnn.all_reduce(x, cluster_axis=1), wrong)
    turned = by_loops(parts_of(x), (2, 4), 1, lambda held: LOOPS["all_gather"](held[::-1], 0))
    with pytest.raises(AssertionError):
        check_same(ttnn.all_gather(x, 0, cluster_axis=1), turned)


def test_an_all_reduce_of_a_replicated_tensor_is_a_multiple(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(torch.ones(1, 1, 32, 32), device=mesh, layout=ttnn.TILE_LAYOUT)
    assert ttnn.to_torch(ttnn.all_reduce(x)).unique().tolist() == [4.0]
    assert ttnn.to_torch(ttnn.all_reduce(x, cluster_axis=0)).unique().tolist() == [1.0]


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_low_precision_are_rounded_once(open_mesh: Any, mode: str) -> None:
    block = torch.tensor([256.0, 1.0, 1.0, 1.0]).reshape(1, 4, 1).bfloat16()  # hop by hop, 256 + 1 stays 256
    found = ttnn.all_reduce(tensor_on(open_mesh(1, 4), block), mode=mode)
    assert found.block.flatten().tolist() == [260.0]


def test_block_floats_are_summed_and_rounded_again(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = ttnn.from_torch(torch.full((1, 1, 32, 32), 3.0), dtype=ttnn.bfloat8_b, device=mesh)
    found = ttnn.all_reduce(x)
    assert found.dtype is ttnn.bfloat8_b and ttnn.to_torch(found).unique().tolist() == [12.0]


# labels


def label(mesh: Any, *placements: Any) -> Any:
    shape = tuple(mesh.shape) if len(placements) > 1 else (mesh.get_num_devices(),)
    return ttnn.TensorTopology(shape, placements, list(itertools.product(*map(range, mesh.shape))))


UNTOLD = ttnn.PlacementPartial("unknown")
TABLE = {  # input label: all_gather over axis 0, over axis 1, reduce_scatter, all_reduce, mesh_partition over axis 1
    (S(3),): ((R, UNTOLD), (S(3), R), (S(3),), (S(3), R), (S(3),)),
    (R,): ((R, R), (R, R), (R, S(3)), (R, R), (R, S(3))),
    (S(2), S(3)): ((R, S(3)), (S(2), R), (S(2), S(3)), (S(2), R), (S(2), S(3))),
    (R, S(3)): ((R, S(3)), (R, R), (R, S(3)), (R, R), (R, S(3))),
    (P, S(3)): ((R, S(3)), (P, R), (P, S(3)), (P, R), (P, S(3))),
}


@pytest.mark.parametrize("given_label", TABLE, ids=str)
def test_labels_of_results_are_true_and_those_of_the_original_where_it_can_tell(
    open_mesh: Any, given_label: Any
) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.zeros(2, 4, 1, 1, 8, 8), label(mesh, *given_label))
    found = (
        ttnn.all_gather(x, 3, cluster_axis=0),
        ttnn.all_gather(x, 3, cluster_axis=1),
        ttnn.reduce_scatter(x, 3, cluster_axis=1),
        ttnn.all_reduce(x, cluster_axis=1),
        ttnn.mesh_partition(x, 3, 1),
    )
    for each, wanted in zip(found, TABLE[given_label], strict=True):
        assert each.tensor_topology() == label(mesh, *wanted)


def test_over_all_devices_a_scatter_is_labelled_row_major_and_a_sum_replicated(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.zeros(2, 4, 1, 8), label(mesh, P, P))
    assert ttnn.reduce_scatter(x, 1).tensor_topology() == label(mesh, S(1))
    assert ttnn.mesh_partition(x, 1).tensor_topology() == label(mesh, S(1))
    assert ttnn.all_reduce(x).tensor_topology() == label(mesh, R, R)


def test_a_scatter_inside_of_an_axis_that_cuts_the_same_dim_has_no_whole(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.zeros(2, 4, 8, 8), label(mesh, S(0), S(1)))
    assert ttnn.reduce_scatter(x, 1, cluster_axis=0).tensor_topology() == label(mesh, UNTOLD, UNTOLD)


def test_a_label_that_cannot_be_told_is_refused_where_topologies_are_strict(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.zeros(2, 4, 8, 8), label(mesh, S(1)))
    with ttnn.manage_config("strict_ccl_topology", True):
        assert ttnn.all_gather(x, 1, cluster_axis=1).shape == (8, 32)
        with pytest.raises(OperandError, match="the topology of the result cannot be told"):
            ttnn.all_gather(x, 1, cluster_axis=0)


def test_all_gather_without_dim_takes_the_one_that_is_sharded_or_asks(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    rows = ttnn.ShardTensor2dMesh(mesh, mesh_shape=(2, 4), dims=(0, 1))
    data = torch.arange(64.0).reshape(8, 8)
    x = ttnn.from_torch(data, device=mesh, mesh_mapper=rows)
    assert ttnn.all_gather(x, cluster_axis=1).shape == (4, 8)
    assert ttnn.all_gather(ttnn.all_gather(x, cluster_axis=1), cluster_axis=0).shape == (8, 8)
    with pytest.raises(ArgumentError, match="dim is missing, and several dims are sharded"):
        ttnn.all_gather(x)
    with pytest.raises(ArgumentError, match="dim is missing, and no dim is sharded"):
        ttnn.all_gather(ttnn.from_torch(data, device=mesh))


def test_a_dim_that_does_not_divide_is_whole_again_after_the_gather(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    data = torch.arange(21.0).reshape(7, 3)
    x = ttnn.from_torch(data, device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (1, 4), (None, 0)))
    found = ttnn.all_gather(x, 0, cluster_axis=1)
    assert x.shape == (2, 3) and found.shape == (7, 3)
    assert torch.equal(ttnn.to_torch(found), data)


# outputs, logs, modes


def test_persistent_outputs_are_written_in_place(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = tensor_on(mesh, torch.arange(16.0).reshape(1, 4, 4))
    gathered = tensor_on(mesh, torch.zeros(1, 1, 16))
    address, array = gathered.buffer_address(), gathered.block
    assert ttnn.all_gather(x, 0, output_tensor=gathered) is gathered
    assert gathered.block is array and gathered.buffer_address() == address
    assert array.flatten().tolist() == list(range(16))
    scattered = tensor_on(mesh, torch.zeros(1, 4, 1))
    assert ttnn.reduce_scatter(x, 0, output_tensor=scattered) is scattered
    assert scattered.block.flatten().tolist() == [24.0, 28.0, 32.0, 36.0]
    with pytest.raises(OperandError, match=r"output_tensor has shape \[16\], the result \[1\]"):
        ttnn.reduce_scatter(x, 0, output_tensor=gathered)


def test_row_043_and_047_the_log_of_communication_has_every_collective_with_axis_and_bytes(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(2, 4), torch.ones(2, 4, 8, 8))
    with loom.record() as log:
        ttnn.all_reduce(x, cluster_axis=1)
        ttnn.all_gather(x, 0, cluster_axis=0, mode="host")
        ttnn.reduce_scatter(x, 0)
        ttnn.mesh_partition(x, 0, 1)
    assert [(event.kind, event.axis) for event in log] == [
        ("all_reduce", "x1"),
        ("all_gather", "x0"),
        ("reduce_scatter", "x0,x1"),
    ]
    assert log.events[0].bytes == 2 * 3 * 8 * 8 * 4 // 4 and log.host_bytes > 0


def test_collective_mode_is_the_default_inside(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(1, 4), torch.ones(1, 4, 2))
    with loom.record() as log, ttnn.collective_mode("host"):
        ttnn.all_reduce(x)
        ttnn.all_reduce(x, mode="direct")
    assert [event.call for event in log] == ["all_reduce (host)", "all_reduce"]
    with pytest.raises(ModeError, match="there is no mode 'hosts'"), ttnn.collective_mode("hosts"):
        pass
    with pytest.raises(ModeError, match="there is no mode 'hosts'"):
        ttnn.all_reduce(x, mode="hosts")


# from one to all, from one to one


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_reaches_the_senders_group_and_leaves_the_others(open_mesh: Any, mode: str) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.arange(8.0).reshape(2, 4, 1), label(mesh, S(0)))
    row = ttnn.broadcast(x, ttnn.MeshCoordinate(1, 2), cluster_axis=1, mode=mode)
    assert row.block.flatten().tolist() == [0, 1, 2, 3, 6, 6, 6, 6]
    assert row.tensor_topology() == label(mesh, S(0))
    column = ttnn.broadcast(x, ttnn.MeshCoordinate(1, 2), cluster_axis=0, mode=mode)
    assert column.block.flatten().tolist() == [0, 1, 6, 3, 4, 5, 6, 7]
    everywhere = ttnn.broadcast(x, ttnn.MeshCoordinate(1, 2), mode=mode)
    assert everywhere.block.flatten().tolist() == [6] and everywhere.tensor_topology() == label(mesh, R)


@pytest.mark.parametrize("axis", [0, 1, 2, None])
@pytest.mark.parametrize("lead", [(1, 2, 1), (2, 1, 1), (1, 1, 3), (2, 2, 1), (1, 1, 1), (2, 2, 3)])
def test_broadcast_leaves_other_groups_also_where_parts_are_alike(open_mesh: Any, lead: Any, axis: int | None) -> None:
    mesh = open_mesh(2, 2, 3)
    x = tensor_on(mesh, torch.arange(float(math.prod(lead))).reshape(*lead, 1, 1))
    held, sender = parts_of(x), (1, 1, 2)
    wanted = {
        place: held[sender] if sender in group else held[place]
        for group in groups_of((2, 2, 3), axis)
        for place in group
    }
    check_same(ttnn.broadcast(x, ttnn.MeshCoordinate(1, 1, 2), cluster_axis=axis), wanted)


def test_what_some_devices_got_alone_is_not_labelled_as_the_same(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    columns = tensor_on(mesh, torch.arange(4.0).reshape(1, 4, 1, 1), label(mesh, R, S(1)))
    found = ttnn.broadcast(columns, ttnn.MeshCoordinate(1, 2), cluster_axis=1)
    assert found.block.flatten().tolist() == [0, 1, 2, 3, 2, 2, 2, 2]
    with pytest.raises(OperandError, match="composer"):
        ttnn.to_torch(found)
    same = ttnn.from_torch(torch.ones(1, 1), device=mesh)
    for alone in (
        ttnn.point_to_point(same, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(0, 3)),
        ttnn.reduce_to_root(same, same, same, ttnn.MeshCoordinate(1, 0))[0],
    ):
        with pytest.raises(OperandError, match="composer"):
            ttnn.to_torch(alone)


def test_an_output_on_another_mesh_or_the_host_is_refused(open_mesh: Any) -> None:
    x = ttnn.from_torch(torch.ones(2, 2), device=open_mesh(2, 4))
    for output in (ttnn.zeros((2, 2), device=open_mesh(1, 4)), ttnn.zeros((2, 2))):
        with pytest.raises(OperandError, match="output_tensor is on"):
            ttnn.add(x, x, output_tensor=output)
        assert ttnn.to_torch(output).sum() == 0


def test_point_to_point_takes_no_output_of_another_shape(open_mesh: Any) -> None:
    x, output = (ttnn.ones((rows, 4), device=open_mesh(1, 4)) for rows in (1, 2))
    with pytest.raises(OperandError, match=r"output_tensor has shape \[2, 4\], what is sent \[1, 4\]"):
        ttnn.point_to_point(x, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(0, 3), output_tensor=output)


def test_persistent_buffers_are_written_in_every_spelling(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    sem, x = semaphore_on(mesh), ttnn.ones((4, 2), device=mesh)
    large, small = ttnn.zeros((16, 2), device=mesh), ttnn.zeros((1, 2), device=mesh)
    assert ttnn.experimental.all_gather_async(x, None, 0, sem, persistent_output_tensor=large) is large
    assert ttnn.experimental.reduce_scatter_minimal_async(x, small, 0, [sem]) is small
    assert large.block.unique().tolist() == [1] and small.block.unique().tolist() == [4]


def test_all_broadcast_gives_what_each_member_holds(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(2, 4), torch.arange(8.0).reshape(2, 4, 1))
    found = ttnn.all_broadcast(x, cluster_axis=1)
    assert [each.block.flatten().tolist() for each in found] == [[k, 4 + k] for k in range(4)]
    assert [each.block.flatten().tolist() for each in ttnn.all_broadcast(x)] == [[k] for k in range(8)]


@pytest.mark.parametrize("alike", [False, True])
def test_point_to_point_defines_the_receivers_part_alone(open_mesh: Any, alike: bool) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.full((1, 1, 1), 5.0) if alike else torch.arange(1.0, 9).reshape(2, 4, 1))
    found = ttnn.point_to_point(x, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(0, 3))
    sent = 5.0 if alike else 2.0
    assert found.block.flatten().tolist() == [0, 0, 0, sent, 0, 0, 0, 0]
    output = tensor_on(mesh, torch.full((2, 4, 1), 9.0))
    ttnn.point_to_point(x, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(1, 1), output_tensor=output)
    assert output.block.flatten().tolist() == [9, 9, 9, 9, 9, sent, 9, 9]
    with pytest.raises(OperandError, match="share no row or column"):
        ttnn.point_to_point(x, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(1, 2))


def test_reduce_to_root_is_attention_over_all_keys(open_mesh: Any) -> None:
    mesh, generator = open_mesh(4, 1), torch.Generator().manual_seed(0)
    scores = torch.randn(4, 8, 6, generator=generator)  # device, query, its keys
    values = torch.randn(4, 6, 16, generator=generator)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    given = [weights @ values, weights.sum(-1, keepdim=True), top]
    l, s, m = (tensor_on(mesh, each.unsqueeze(1)) for each in given)  # noqa: E741
    found = ttnn.reduce_to_root(l, s, m, ttnn.MeshCoordinate(1, 0))
    whole = torch.cat(list(scores), -1).softmax(-1) @ torch.cat(list(values), 0)
    at_root = [each.block[1, 0] for each in found]
    torch.testing.assert_close(at_root[0] / at_root[1], whole)
    assert all(float(each.block[0].abs().sum()) == 0 for each in found)


# refusals


def test_refusals_have_the_words_of_the_original(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.zeros(2, 4, 1, 3, 6, 6))
    for message, use in {
        "Invalid gather dim 7 for 4D input tensor": lambda: ttnn.all_gather(x, 7),
        "Dimension 1 must be divisible by ring_size": lambda: ttnn.reduce_scatter(x, 1, cluster_axis=0),
        "must be divisible by cluster axis size 4": lambda: ttnn.mesh_partition(x, 3, 1),
        "must be on device, got storage type: StorageType::HOST": lambda: ttnn.all_reduce(
            ttnn.from_torch(torch.ones(2))
        ),
        r"cluster_axis 2 is not an axis of a mesh of shape \[2, 4\]": lambda: ttnn.all_reduce(x, cluster_axis=2),
        r"sender_coord \[2, 0\] is not on the mesh": lambda: ttnn.broadcast(x, ttnn.MeshCoordinate(2, 0)),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            use()
    tiled = ttnn.from_torch(torch.ones(1, 1, 32, 64), device=mesh, layout=ttnn.TILE_LAYOUT)
    with pytest.raises(RuntimeError, match="Can only slice tilized tensor with width begin index aligned to tiles"):
        ttnn.mesh_partition(tiled, 3, 1)
    assert ttnn.mesh_partition(tiled, 3, 0).shape == (1, 1, 32, 32)


def test_arguments_about_speed_are_taken_and_checked_for_their_type(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x = tensor_on(mesh, torch.ones(2, 4, 4))
    speed = {"num_links": 2, "topology": ttnn.Topology.Ring, "subdevice_id": ttnn.SubDeviceId(0)}
    assert ttnn.all_gather(x, 0, cluster_axis=1, chunks_per_sync=1, **speed).shape == (16,)
    for argument, value in {"num_links": "two", "topology": "Ring", "subdevice_id": 0, "memory_config": 1}.items():
        with pytest.raises(TypeError, match=argument):
            ttnn.all_gather(x, 0, **{argument: value})
    with pytest.raises(TypeError, match="cluster_axis='rows'"):
        ttnn.all_reduce(x, cluster_axis="rows")
    with pytest.raises(TypeError, match="unexpected keyword argument 'clusteraxis'"):
        ttnn.all_reduce(x, clusteraxis=0)


def test_the_old_spelling_with_a_mesh_works_and_another_mesh_is_refused(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x = tensor_on(mesh, torch.ones(1, 4, 2))
    assert ttnn.all_gather(x, 0, mesh_device=mesh).shape == (8,)
    with pytest.raises(ArgumentError, match="mesh_device is"):
        ttnn.all_gather(x, 0, mesh_device=open_mesh(2, 4))


# the experimental spellings


def test_all_forms_of_all_gather_async_are_told_apart(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x, sem = tensor_on(mesh, torch.arange(16.0).reshape(2, 4, 2)), semaphore_on(mesh)
    gather, wanted = ttnn.experimental.all_gather_async, parts_of(ttnn.all_gather(x, 0, cluster_axis=1))
    buffer = tensor_on(mesh, torch.zeros(2, 4, 8))
    check_same(gather(x, 0, [sem, sem]), parts_of(ttnn.all_gather(x, 0)))
    check_same(gather(x, None, 0, sem, cluster_axis=1), wanted)
    assert gather(x, buffer, 0, sem, cluster_axis=1) is buffer
    check_same(buffer, wanted)
    check_same(gather(x, 0, 1, mesh, ttnn.Topology.Linear, sem), wanted)
    check_same(gather(x, dim=0, multi_device_global_semaphore=sem, cluster_axis=1, num_links=1), wanted)
    check_same(
        gather(x, persistent_output_buffer=None, dim=0, multi_device_global_semaphore=[sem], cluster_axis=1), wanted
    )
    turned = ttnn.experimental.all_gather_async_reversed(x, dim=0, multi_device_global_semaphore=sem, cluster_axis=1)
    check_same(turned, by_loops(parts_of(x), (2, 4), 1, lambda held: [torch.cat(held[::-1], 0)] * 4))
    with pytest.raises(ArgumentError, match=r"no form takes \(str\) after the tensor"):
        gather(x, "0")


def test_all_forms_of_all_reduce_async_are_told_apart(open_mesh: Any) -> None:
    mesh = open_mesh(2, 4)
    x, sem = tensor_on(mesh, torch.arange(16.0).reshape(2, 4, 2)), semaphore_on(mesh)
    reduce, kinds = ttnn.experimental.all_reduce_async, ttnn.ReduceType
    check_same(reduce(x, 8, [sem], [sem], [sem], kinds.Sum), parts_of(ttnn.all_reduce(x)))
    along = parts_of(ttnn.all_reduce(x, cluster_axis=1))
    check_same(reduce(x, 1, mesh, [sem], [sem], [sem], kinds.Sum), along)
    check_same(reduce(x, tensor_on(mesh, torch.zeros(2, 4, 8)), 1, mesh, sem), along)
    check_same(reduce(x, cluster_axis=1, mesh_device=mesh, math_op=kinds.Sum, num_links=1), along)
    largest = reduce(x, cluster_axis=0, mesh_device=mesh, math_op=kinds.Max)
    check_same(largest, by_loops(parts_of(x), (2, 4), 0, lambda held: [torch.stack(held).amax(0)] * 2))
    with pytest.raises(OperandError, match="num_devices is 4, the group has 8"):
        reduce(x, 4, [sem], [sem], [sem], kinds.Sum)
    with pytest.raises(OperandError, match=r"ReduceType\.Var cannot be made of reduced parts"):
        reduce(x, cluster_axis=1, mesh_device=mesh, math_op=kinds.Var)


def test_reduce_scatter_async_writes_the_buffer_of_the_results_shape(open_mesh: Any) -> None:
    mesh = open_mesh(1, 4)
    x, sem = tensor_on(mesh, torch.arange(16.0).reshape(1, 4, 4)), semaphore_on(mesh)
    scatter = ttnn.experimental.reduce_scatter_minimal_async
    scratch, output = ttnn.experimental.reduce_scatter_minimal_async_create_intermediate_buffer(x, 0)
    assert scatter(x, [scratch, output], 0, [sem], cluster_axis=1) is output
    check_same(output, parts_of(ttnn.reduce_scatter(x, 0, cluster_axis=1)))
    check_same(scatter(x, dim=0, multi_device_global_semaphore=[sem]), parts_of(output))
    buffers = ttnn.experimental.reduce_scatter_minimal_direct_create_persistent_buffers(x, 0)
    assert ttnn.experimental.reduce_scatter_minimal_direct(x, 0, persistent_buffers=buffers) is buffers[1]
    check_same(buffers[1], parts_of(output))


def test_all_to_all_along_one_dim_swaps_pieces(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(1, 4), torch.arange(16.0).reshape(1, 4, 4))
    found = ttnn.experimental.all_to_all_async_generic(x, 0, 0)
    check_same(found, by_loops(parts_of(x), (1, 4), None, lambda held: list(torch.stack(held).T)))


@pytest.mark.parametrize("padding_mode", ["zeros", "replicate"])
@pytest.mark.parametrize("alike", [False, True])
def test_neighbours_give_rows_at_the_edges(open_mesh: Any, padding_mode: str, alike: bool) -> None:
    lead = (2, 1) if alike else (2, 4)
    x = tensor_on(open_mesh(2, 4), torch.arange(math.prod(lead) * 6.0).reshape(*lead, 3, 2))

    def step(held: list[torch.Tensor]) -> list[torch.Tensor]:
        first = torch.zeros(2, 2) if padding_mode == "zeros" else held[0][:1].expand(2, 2)
        last = torch.zeros(1, 2) if padding_mode == "zeros" else held[-1][-1:]
        before = [first, *(each[-2:] for each in held[:-1])]
        after = [*(each[:1] for each in held[1:]), last]
        return [torch.cat(three, 0) for three in zip(before, held, after, strict=True)]

    found = ttnn.experimental.neighbor_pad_async(x, [0], [2], [1], padding_mode, [1])
    check_same(found, by_loops(parts_of(x), (2, 4), 1, step))
    alone = tensor_on(open_mesh(1, 4), x.block[:1])
    found = ttnn.experimental.neighbor_pad_async(alone, [0], [2], [1], padding_mode, [0])
    check_same(found, by_loops(parts_of(alone), (1, 4), 0, step))


def test_slice_reshard_cuts_the_whole_and_shares_it_out_again(open_mesh: Any) -> None:
    x = tensor_on(open_mesh(2, 4), torch.arange(2 * 4 * 3.0).reshape(2, 4, 3))
    found = ttnn.experimental.slice_reshard_async(x, 0, 2, 8, 1)
    check_same(found, by_loops(parts_of(x), (2, 4), 1, lambda held: list(torch.cat(held)[2:10].chunk(4))))


def test_gather_then_multiply_and_multiply_then_scatter_equal_the_two_ops(open_mesh: Any) -> None:
    mesh, generator = open_mesh(1, 4), torch.Generator().manual_seed(1)
    sem, offset = semaphore_on(mesh), ttnn.CoreCoord(0, 6)
    x, wide, narrow = (
        tensor_on(mesh, torch.randn(1, 4, *shape, generator=generator), layout=ttnn.TILE_LAYOUT)
        for shape in ((3, 4), (16, 8), (4, 8))
    )
    gathered, product = ttnn.experimental.all_gather_matmul_async(x, wide, None, 1, [sem], offset)
    check_same(gathered, parts_of(ttnn.all_gather(x, 1)))
    check_same(product, {place: part @ parts_of(wide)[place] for place, part in parts_of(gathered).items()})
    output = tensor_on(mesh, torch.zeros(1, 4, 3, 2), layout=ttnn.TILE_LAYOUT)
    product, scattered = ttnn.experimental.matmul_reduce_scatter_async(x, narrow, None, output, 1, [sem], offset)
    assert scattered is output
    check_same(product, {place: part @ parts_of(narrow)[place] for place, part in parts_of(x).items()})
    check_same(scattered, parts_of(ttnn.reduce_scatter(product, 1)))


# experts


def experts(mesh: Any, seed: int = 0) -> tuple[Any, ...]:
    """Tokens [2, 1, 3, 4] per device, two of eight experts for each, two experts per device in a mixed order."""
    grid, generator = tuple(mesh.shape), torch.Generator().manual_seed(seed)
    count = math.prod(grid)
    total_experts = 2 * count
    owner = torch.arange(total_experts) % count
    mapping = torch.nn.functional.one_hot(owner, count).int().reshape(1, 1, 1, 1, total_experts, count)
    tokens = torch.randn(*grid, 2, 1, 3, 4, generator=generator)
    chosen = torch.rand(*grid, 2, 1, 3, total_experts, generator=generator).argsort(-1)[..., :2].int()
    return tokens, chosen, mapping, owner


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("dim", [1, 2])
def test_tokens_go_to_the_devices_of_their_experts_and_back(open_mesh: Any, axis: int | None, dim: int) -> None:
    mesh = open_mesh(2, 2)
    tokens, chosen, mapping, owner = experts(mesh)
    x, indices, table = (tensor_on(mesh, each) for each in (tokens, chosen, mapping))
    sent, metadata = ttnn.all_to_all_dispatch(x, indices, table, cluster_axis=axis, output_concat_dim=dim)
    places = list(itertools.product(range(2), range(2)))

    def rows(values: Parts, group: list[Any]) -> torch.Tensor:
        return torch.cat([values[place].transpose(0, 1) for place in group], dim)

    wanted_rows: Parts = {}
    wanted_experts: Parts = {}
    for group in groups_of((2, 2), axis):
        for place in group:
            every, picked = rows(parts_of(x), group), rows(parts_of(indices), group)
            mine = (owner[picked.long()] == places.index(place)).any(-1, keepdim=True)
            wanted_rows[place], wanted_experts[place] = every * mine, picked
    check_same(sent, wanted_rows)
    check_same(metadata, wanted_experts)

    made = torch.stack([sent.block * 2, sent.block * 3], 2).squeeze(3)  # two experts: twice and three times the token
    back = ttnn.all_to_all_combine(tensor_on(mesh, made), metadata, table, cluster_axis=axis, output_shard_dim=dim)
    for group in groups_of((2, 2), axis):
        inside = {places.index(place) for place in group}
        for place in group:
            own, picked = parts_of(x)[place].squeeze(1), parts_of(indices)[place].squeeze(1).long()
            for k in range(2):
                factor = (2 + picked[..., k] // 4) * torch.tensor([int(o) in inside for o in owner])[picked[..., k]]
                torch.testing.assert_close(parts_of(back)[place][k], own * factor.unsqueeze(-1))


def test_a_local_sum_counts_once_per_device(open_mesh: Any) -> None:
    mesh = open_mesh(2, 2)
    tokens, chosen, mapping, owner = experts(mesh, seed=3)
    x, indices, table = (tensor_on(mesh, each) for each in (tokens, chosen, mapping))
    sent, metadata = ttnn.all_to_all_dispatch(x, indices, table)
    back = ttnn.all_to_all_combine(sent, metadata, table, local_reduce=True)
    same = (owner[chosen.long()][..., 0] == owner[chosen.long()][..., 1]).squeeze(3)  # both experts on one device
    assert bool(same.any()) and not bool(same.all())
    times = torch.where(same, 1.0, 2.0).unsqueeze(-1)
    torch.testing.assert_close(back.block.sum(2), tokens.squeeze(3) * times)


def test_routing_weights_are_shared_out_in_order(open_mesh: Any) -> None:
    weights = torch.tensor([[0.0, 1, 2, 0, 0, 3, 0, 4]]).reshape(1, 1, 1, 8)
    found = ttnn.moe_routing_remap(tensor_on(open_mesh(1, 2), weights), 4, 2, 1)
    assert found.block.flatten(0, 2).tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3, 0, 4]]
    with pytest.raises(OperandError, match="expert_parallel_size is 4, the axis has 2"):
        ttnn.moe_routing_remap(tensor_on(open_mesh(1, 2), weights), 4, 4, 1)


def test_weights_of_local_experts_and_their_runs(open_mesh: Any) -> None:
    mesh = open_mesh(1, 2)
    owner = torch.tensor([1, 0, 0, 1])
    mapping = tensor_on(mesh, torch.nn.functional.one_hot(owner, 2).int().reshape(1, 1, 1, 1, 4, 2))
    chosen = torch.tensor([[0, 2], [1, 3], [0, 3]]).int().reshape(1, 1, 1, 1, 3, 2)
    weights = torch.arange(1.0, 13).reshape(1, 1, 1, 1, 3, 4)
    found, runs = ttnn.moe_expert_token_remap(
        tensor_on(mesh, weights), mapping, tensor_on(mesh, chosen), reduction_size=2
    )
    assert found.block[0, 0].squeeze().tolist() == [[0, 3], [6, 0], [0, 0]]
    assert found.block[0, 1].squeeze().tolist() == [[1, 0], [0, 8], [9, 12]]
    assert runs.block[0, 0].squeeze().tolist() == [[1, 1], [0, 0]]
    assert runs.block[0, 1].squeeze().tolist() == [[1, 1], [1, 1]]


# sockets


def socket_pair(sender: Any, receiver: Any, pairs: list[Any]) -> Any:
    core = ttnn.CoreCoord(0, 0)
    connections = [
        ttnn.SocketConnection(
            ttnn.MeshCoreCoord(ttnn.MeshCoordinate(*a), core), ttnn.MeshCoreCoord(ttnn.MeshCoordinate(*b), core)
        )
        for a, b in pairs
    ]
    memory = ttnn.SocketMemoryConfig(ttnn.BufferType.L1, 4096)
    return ttnn.create_socket_pair(sender, receiver, ttnn.SocketConfig(connections, memory))


def test_what_is_sent_over_a_socket_arrives_in_order_at_the_receivers_alone(open_mesh: Any) -> None:
    first, second = open_mesh(2, 4).create_submeshes(ttnn.MeshShape(1, 4))
    sender, receiver = socket_pair(first, second, [((0, 0), (0, 3)), ((0, 1), (0, 2))])
    x = tensor_on(first, torch.arange(4.0).reshape(1, 4, 1))
    ttnn.experimental.send_async(x, sender)
    ttnn.experimental.send_async(ttnn.add(x, 10.0), sender)
    x.block.zero_()  # what was sent is a copy
    output = tensor_on(second, torch.full((1, 1, 1), -1.0))
    address = output.buffer_address()
    assert ttnn.experimental.recv_async(output, receiver) == [output]
    assert output.block.flatten().tolist() == [-1, -1, 1, 0] and output.buffer_address() == address
    ttnn.experimental.recv_async(output, receiver)
    assert output.block.flatten().tolist() == [-1, -1, 11, 10]
    with pytest.raises(OperandError, match="nothing has been sent"):
        ttnn.experimental.recv_async(output, receiver)


def test_what_arrives_over_a_socket_is_labelled_as_it_was_sent_or_not_as_the_same(open_mesh: Any) -> None:
    first, second = open_mesh(2, 4).create_submeshes(ttnn.MeshShape(1, 4))
    rows = ttnn.ShardTensorToMesh(first, dim=0)
    x = ttnn.from_torch(torch.arange(4.0).reshape(4, 1), device=first, mesh_mapper=rows)
    for pairs in ([((0, i), (0, i)) for i in range(4)], [((0, i), (0, 3 - i)) for i in range(4)], [((0, 1), (0, 1))]):
        sender, receiver = socket_pair(first, second, pairs)
        output = ttnn.allocate_tensor_on_device(x.spec, second)
        ttnn.experimental.send_async(x, sender)
        ttnn.experimental.recv_async(output, receiver)
        if pairs[0] == ((0, 0), (0, 0)):
            assert ttnn.to_torch(output).flatten().tolist() == [0, 1, 2, 3]
        else:
            with pytest.raises(OperandError, match="composer"):
                ttnn.to_torch(output)


def test_wrong_ends_meshes_and_shapes_of_sockets_are_told(open_mesh: Any) -> None:
    first, second = open_mesh(2, 4).create_submeshes(ttnn.MeshShape(1, 4))
    sender, receiver = socket_pair(first, second, [((0, 0), (0, 0))])
    x, y = tensor_on(first, torch.ones(1, 4, 2)), tensor_on(second, torch.ones(1, 4, 3))
    with pytest.raises(OperandError, match=r"the end SocketEndpoint\.RECEIVER"):
        ttnn.experimental.send_async(y, receiver)
    with pytest.raises(OperandError, match="the tensor is on"):
        ttnn.experimental.send_async(y, sender)
    ttnn.experimental.send_async(x, sender)
    with pytest.raises(OperandError, match=r"FLOAT32 \[3\] cannot receive DataType\.FLOAT32 \[2\]"):
        ttnn.experimental.recv_async(y, receiver)
    with pytest.raises(RuntimeError, match="not found"):
        socket_pair(first, second, [((1, 0), (0, 0))])
