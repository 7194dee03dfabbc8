"""Mappers and composers: what every device gets, that the whole comes back, uneven dims, labels and refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import create_mesh_buffer
from meshloom.ttnn import PlacementPartial, PlacementReplicate, PlacementShard

pytest_plugins = ("ttnn_meshes",)

R = PlacementReplicate()


def S(dim: int) -> PlacementShard:
    return PlacementShard(dim)


def numbers(*shape: int) -> torch.Tensor:
    """Values that are all different."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)


def check_part(part: torch.Tensor, whole: torch.Tensor, place: tuple[int, ...], mesh: tuple[int, ...], cuts: list):
    """A part is the box of the whole that its coordinate says, the rest zeros: reckoned element by element."""
    sizes = list(whole.shape)
    starts = [0] * whole.dim()
    for axis, dim in enumerate(cuts):
        if dim is not None:
            sizes[dim] = -(-whole.shape[dim] // mesh[axis])
            starts[dim] = place[axis] * sizes[dim]
    assert list(part.shape) == sizes
    for index in itertools.product(*map(range, sizes)):
        at = tuple(start + i for start, i in zip(starts, index, strict=True))
        inside = all(c < size for c, size in zip(at, whole.shape, strict=True))
        assert part[index].item() == (whole[at].item() if inside else 0)


def test_the_oracle_of_parts_finds_a_part_of_another_device():
    whole = numbers(4, 2)
    check_part(whole[2:], whole, (1,), (2,), [0])
    with pytest.raises(AssertionError):
        check_part(whole[:2], whole, (1,), (2,), [0])


@st.composite
def distributions(draw):
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 16)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 400)))
    dims = draw(st.permutations(range(len(shape))))
    cuts = [draw(st.sampled_from([None, dim])) for dim in dims][: len(mesh)]
    return mesh, shape, cuts + [None] * (len(mesh) - len(cuts))


@given(distributions())
@settings(max_examples=150, deadline=None)
def test_every_device_gets_its_box_and_the_whole_comes_back(open_mesh, case):
    mesh_shape, shape, cuts = case
    mesh, x = open_mesh(*mesh_shape), numbers(*shape)
    placements = [R if dim is None else S(dim) for dim in cuts]
    mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig(placements), uneven=True)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=mapper)
    assert torch.equal(ttnn.to_torch(t), x)
    assert t.tensor_topology().placements() == placements
    stored = t.block.shape[: len(mesh_shape)]
    assert all(size == 1 for size, dim in zip(stored, cuts, strict=True) if dim is None), "equal parts are stored once"
    for place in t.device_coords():
        check_part(t.part(place), x, tuple(place), mesh_shape, cuts)


@given(st.integers(1, 8), st.integers(0, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_one_axis_over_all_devices_composes_to_the_same_by_composer_and_by_label(open_mesh, count, size, uneven):
    mesh, x = open_mesh(1, count), numbers(3, size)
    t = ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=-1, uneven=uneven))
    for composer in (None, ttnn.ConcatMeshToTensor(mesh, dim=1), ttnn.ConcatMeshToTensor(dim=-1)):
        assert torch.equal(ttnn.to_torch(t, mesh_composer=composer), x)
    parts = ttnn.to_torch(t, mesh_composer=ttnn.ListMeshToTensor())
    assert torch.equal(torch.cat(parts, 1), x)


@pytest.mark.parametrize(
    ("size", "shards", "rows"), [(10, 5, 2), (7, 7, 1), (12, 6, 2), (14, 7, 2), (16, 8, 2), (3, 3, 1)]
)
def test_what_the_original_accepts_lies_on_the_first_devices_only(open_mesh, size, shards, rows):
    mesh = open_mesh(2, 4)
    t = ttnn.from_torch(numbers(size, 4), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert list(t.shape) == [rows, 4]
    assert list(t.tensor_topology().distribution_shape()) == [shards]
    assert len(t.device_coords()) == len(ttnn.get_device_tensors(t)) == shards
    assert t.device_coords() == t.tensor_topology().mesh_coords()
    assert torch.equal(ttnn.to_torch(t), numbers(size, 4))


def test_what_the_original_refuses_is_padded_and_keeps_its_size(open_mesh):
    mesh = open_mesh(2, 4)
    nine = ttnn.from_torch(numbers(9, 4), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert (list(nine.shape), nine.tensor_topology().placements()[0].size) == ([2, 4], 9)
    rows = ttnn.from_torch(numbers(3, 8), device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, 1)))
    assert (list(rows.shape), repr(rows.tensor_topology().placements())) == (
        [2, 2],
        "[PlacementShard(0, size=3), PlacementShard(1)]",
    )
    composer = ttnn.ConcatMesh2dToTensor(mesh, (2, 4), (0, 1))
    for x, whole in ((nine, numbers(9, 4)), (rows, numbers(3, 8))):
        assert torch.equal(ttnn.to_torch(x), whole)
    assert torch.equal(ttnn.to_torch(rows, mesh_composer=composer), numbers(3, 8))


def test_a_composer_that_joins_copies_of_padded_parts_leaves_the_padding_out(open_mesh):
    mesh = open_mesh(2, 4)
    x = numbers(3, 1)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, None)))
    joined = ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))
    assert torch.equal(joined, torch.cat([x[:2]] * 4 + [x[2:]] * 4))


def test_replicated_parts_are_joined_as_copies_by_a_composer_and_taken_once_without(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(2, 3)
    t = ttnn.from_torch(x, device=mesh)
    assert torch.equal(ttnn.to_torch(t), x)
    assert torch.equal(ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0)), x.repeat(8, 1))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_terms_are_put_together_by_the_label(open_mesh, op):
    mesh, x = open_mesh(2, 4), numbers(4, 3)
    config = ttnn.MeshMapperConfig([S(0), PlacementPartial(op)])
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.create_mesh_mapper(mesh, config))
    assert torch.equal(ttnn.to_torch(t), x)


def test_equal_terms_of_a_sum_count_once_for_each_device(open_mesh):
    mesh, x = open_mesh(1, 4), numbers(2, 3)
    t = ttnn.from_torch(x, device=mesh)
    label = t.tensor_topology()
    t.update_tensor_topology(label.with_placements([PlacementPartial()]))
    assert torch.equal(ttnn.to_torch(t), x * 4)


def test_a_box_of_the_mesh_at_an_offset(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(2, 4)
    config = ttnn.MeshMapperConfig([S(0), S(1)], ttnn.MeshShape(2, 2), ttnn.MeshCoordinate(0, 1))
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.create_mesh_mapper(mesh, config))
    assert t.device_coords() == [ttnn.MeshCoordinate(r, c) for r in (0, 1) for c in (1, 2)]
    assert torch.equal(t.part((1, 1)), x[1:, :2])
    assert torch.equal(ttnn.to_torch(t), x)


def test_another_rank_deals_shards_in_row_major_order(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(4, 2)
    config = ttnn.MeshMapperConfig([S(0), S(1)], ttnn.MeshShape(4, 2))  # too tall for the mesh: dealt row by row
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.create_mesh_mapper(mesh, config))
    assert [t.part(place).item() for place in t.device_coords()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.equal(ttnn.to_torch(t), x)
    mapping = ttnn.compute_distribution_to_mesh_mapping(ttnn.MeshShape(4, 2), ttnn.MeshShape(2, 4))
    assert mapping == t.tensor_topology().mesh_coords() == t.device_coords()


REFUSALS = {
    "too many places": (
        lambda mesh: ttnn.MeshMapperConfig([S(0), S(1)], ttnn.MeshShape(8, 2)),
        "does not match the device shape size MeshShape",
    ),
    "too few placements": (lambda mesh: ttnn.MeshMapperConfig([S(0)]), "does not match the number of placements"),
    "an offset in row-major mode": (
        lambda mesh: ttnn.MeshMapperConfig([S(0)], ttnn.MeshShape([4]), (0, 1)),
        "mesh_offset_override is only supported when the distribution fits",
    ),
    "an offset too far": (
        lambda mesh: ttnn.MeshMapperConfig([S(0), S(1)], ttnn.MeshShape(2, 2), (0, 3)),
        r"does not fit within the mesh device shape MeshShape\(\[2, 4\]\) \(dimension 1\)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_configs_that_do_not_fit_are_refused_when_the_mapper_is_made(open_mesh, name):
    mesh = open_mesh(2, 4)
    make, text = REFUSALS[name]
    with pytest.raises(RuntimeError, match=text):
        ttnn.create_mesh_mapper(mesh, make(mesh))


def test_dims_are_checked_when_a_tensor_comes(open_mesh):
    mesh = open_mesh(2, 4)
    with pytest.raises(OperandError, match="dims must be unique"):
        ttnn.from_torch(numbers(1, 1, 8, 8), mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (-1, 3)))
    with pytest.raises(OperandError, match=r"Invalid dimension index; got dims: \{4\}, tensor dimension: 4"):
        ttnn.from_torch(numbers(1, 1, 8, 8), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=4))
    t = ttnn.from_torch(numbers(1, 1, 8, 8), device=mesh)
    with pytest.raises(OperandError, match="dims must be unique"):
        ttnn.to_torch(t, mesh_composer=ttnn.ConcatMesh2dToTensor(mesh, (2, 4), (-1, 3)))


def test_composers_refuse_what_does_not_fit(open_mesh):
    mesh = open_mesh(2, 4)
    grid = ttnn.ConcatMesh2dToTensor(mesh, (2, 4), (0, 1))
    some = ttnn.from_torch(numbers(4, 4), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(OperandError, match="ND composition requires the number of tensors 4 to match the mesh shape"):
        ttnn.to_torch(some, mesh_composer=grid)
    with pytest.raises(OperandError, match=r"Coordinate MeshCoordinate\(\[0, 1\]\) is out of bounds for shape"):
        ttnn.to_torch(ttnn.from_torch(numbers(4, 4)), mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))
    with pytest.raises(OperandError, match="does not match the number of dimensions in the config"):
        ttnn.create_mesh_composer(mesh, ttnn.MeshComposerConfig([0]))


def test_a_label_that_does_not_tell_asks_for_a_composer(open_mesh):
    mesh = open_mesh(2, 4)
    t = ttnn.allocate_tensor_on_host([2, 2], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT, mesh)
    with pytest.raises(RuntimeError, match="Supply a mesh composer to concatenate multi-device shards"):
        ttnn.to_torch(t)
    assert ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0)).shape == (16, 2)


def test_distribute_sets_defaults_inside_and_only_there(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(8, 2)
    with ttnn.distribute(ttnn.ShardTensorToMesh(mesh, dim=0)):
        t = ttnn.from_torch(x)
        whole = ttnn.from_torch(x, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
    with ttnn.distribute(ttnn.ConcatMeshToTensor(mesh, dim=1)):
        assert ttnn.to_torch(t).shape == (1, 16)
    assert (list(t.shape), list(whole.shape), list(ttnn.from_torch(x).shape)) == ([1, 2], [8, 2], [8, 2])
    assert torch.equal(ttnn.to_torch(t), x)
    with (
        pytest.raises(ValueError, match="Argument must be an instance of either TensorToMesh or MeshToTensor"),
        ttnn.distribute(3),
    ):
        pass


def test_distribute_tensor_and_aggregate_tensor_are_inverse(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(8, 2)
    t = ttnn.distribute_tensor(ttnn.from_torch(x), ttnn.ShardTensorToMesh(mesh, dim=0), mesh)
    assert t.device() is mesh and list(t.shape) == [1, 2]
    whole = ttnn.aggregate_tensor(t, ttnn.ConcatMeshToTensor(mesh, dim=0))
    assert torch.equal(whole.to_torch(), x) and list(whole.tensor_topology().distribution_shape()) == [1]
    with pytest.raises(RuntimeError, match="TensorToMesh only supports host tensors; got storage type"):
        ttnn.distribute_tensor(t, ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(ArgumentError):
        ttnn.distribute_tensor(whole, ttnn.ReplicateTensorToMeshWrapper(ttnn.ReplicateTensorToMesh(mesh)))


def test_configs_print_as_in_the_original(open_mesh):
    mesh = open_mesh(2, 4)
    assert repr(ttnn.ShardTensorToMesh(mesh, 0).config()) == (
        "MeshMapperConfig(placements: [PlacementShard(0)], mesh_shape_override=MeshShape([8]))"
    )
    assert ttnn.MeshMapperConfig(row_dim=None, col_dim=1).placements == [R, S(1)]
    assert ttnn.MeshMapperConfig(0, None).placements == [S(0), R]
    assert repr(ttnn.MeshComposerConfig(row_dim=0, col_dim=-1)) == "MeshComposerConfig(dims: [0, -1])"
    assert repr(ttnn.MeshComposerConfig(0, -1)) == "MeshComposerConfig(dims: [0, -1])"


# rows


def test_row_015_replicate_tensor_to_mesh_gives_every_device_all_of_it(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(4, 3)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
    parts = ttnn.get_device_tensors(t)
    assert len(parts) == 8 and all(torch.equal(ttnn.to_torch(part), x) for part in parts)


def test_row_048_a_config_that_replicates_on_both_axes(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(4, 3)
    mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig([R, R]))
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=mapper)
    assert t.tensor_topology().placements() == [R, R] and list(t.tensor_topology().distribution_shape()) == [2, 4]
    assert all(torch.equal(ttnn.to_torch(part), x) for part in ttnn.get_device_tensors(t))


def test_row_049_a_config_that_shards_both_dims_gives_eight_blocks(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(4, 8)
    mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig([S(0), S(1)]))
    parts = ttnn.get_device_tensors(ttnn.from_torch(x, device=mesh, mesh_mapper=mapper))
    expected = [x[2 * r : 2 * r + 2, 2 * c : 2 * c + 2] for r in range(2) for c in range(4)]
    assert all(torch.equal(ttnn.to_torch(p), e) for p, e in zip(parts, expected, strict=True))


@pytest.mark.parametrize("dims", [p for p in itertools.permutations(range(-4, 4), 2) if p[0] % 4 != p[1] % 4])
def test_row_050_compose_after_map_is_the_identity_for_all_pairs_of_dims(open_mesh, dims):
    mesh, x = open_mesh(2, 4), numbers(8, 4, 8, 4)
    mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig([S(dim) for dim in dims]))
    composer = ttnn.create_mesh_composer(mesh, ttnn.MeshComposerConfig(list(dims)))
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=mapper)
    assert torch.equal(ttnn.to_torch(t, mesh_composer=composer), x)


def test_row_051_a_mapper_and_a_buffer_layout_agree_on_who_holds_what(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(4, 8)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, 1)))
    buffer = create_mesh_buffer(mesh.runtime, layout="sharded", global_shape=(4, 8), shard_shape=(2, 2))
    queue = mesh.runtime.queue()
    queue.enqueue_write(buffer, x)
    for place in t.device_coords():
        assert torch.equal(t.part(place), queue.enqueue_read(buffer, coordinate=tuple(place)))
    buffer.free()


def test_row_113_sharding_the_batch_gives_every_device_its_rows(open_mesh):
    mesh, x = open_mesh(1, 2), numbers(8, 3)
    t = ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    first, second = ttnn.get_device_tensors(t)
    assert torch.equal(first.to_torch(), x[:4]) and torch.equal(second.to_torch(), x[4:])


@pytest.mark.parametrize("dim", [1, -1, -2])
def test_row_114_other_dims_and_negative_ones(open_mesh, dim):
    mesh, x = open_mesh(1, 2), numbers(4, 6, 8)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=dim))
    parts = [ttnn.to_torch(part) for part in ttnn.get_device_tensors(t)]
    assert all(torch.equal(p, e) for p, e in zip(parts, x.chunk(2, dim), strict=True))
    assert t.tensor_topology().placements() == [S(dim % 3)]


def test_row_120_concat_with_and_without_a_mesh(open_mesh):
    mesh, x = open_mesh(1, 2), numbers(8, 3)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert torch.equal(ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(dim=0)), x)
    assert torch.equal(ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0)), x)
    with pytest.raises(ArgumentError, match="needs a dim"):
        ttnn.ConcatMeshToTensor(mesh)


def test_row_121_a_list_of_the_parts_in_mesh_order(open_mesh):
    mesh, x = open_mesh(2, 4), numbers(16, 3)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    parts = ttnn.to_torch(t, mesh_composer=ttnn.ListMeshToTensor())
    assert len(parts) == 8 and all(torch.equal(p, e) for p, e in zip(parts, x.chunk(8), strict=True))


def test_row_131_a_batch_of_seven_is_padded_to_eight_and_cut_to_seven(open_mesh):
    mesh, x = open_mesh(1, 2), numbers(7, 3)
    t = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert list(t.shape) == [4, 3]
    y = ttnn.multiply(ttnn.add(t, 1.0), 2.0)
    assert torch.equal(ttnn.to_torch(y), (x + 1) * 2)
    assert torch.equal(ttnn.to_torch(y, mesh_composer=ttnn.ConcatMeshToTensor(dim=0)), (x + 1) * 2)


def test_row_132_uneven_shards_on_request_and_ops_on_them(open_mesh):
    mesh, x, w = open_mesh(1, 2), numbers(7, 32), numbers(32, 5) / 100
    t = ttnn.from_torch(
        x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    )
    weight = ttnn.from_torch(w, device=mesh, layout=ttnn.TILE_LAYOUT)
    parts = ttnn.to_torch(t, mesh_composer=ttnn.ListMeshToTensor())
    assert [len(part) for part in parts] == [4, 3]
    y = ttnn.relu(ttnn.matmul(t, weight))
    torch.testing.assert_close(ttnn.to_torch(y), torch.relu(x @ w))
    assert [len(part) for part in ttnn.to_torch(y, mesh_composer=ttnn.ListMeshToTensor())] == [4, 3]
    ten = ttnn.from_torch(numbers(10, 2), mesh_mapper=ttnn.ShardTensorToMesh(open_mesh(2, 4), 0, uneven=True))
    assert len(ten.device_coords()) == 8 and torch.equal(ttnn.to_torch(ten), numbers(10, 2))


PADDED = {
    "sum": (lambda x: ttnn.sum(x, dim=0), lambda x: x.sum(0)),
    "max": (lambda x: ttnn.max(x, dim=0), lambda x: x.amax(0)),
    "min of negatives": (lambda x: ttnn.min(ttnn.abs(x), dim=0), lambda x: x.abs().amin(0)),
    "all of it": (lambda x: ttnn.sum(x), lambda x: x.sum()),
    "product": (lambda x: ttnn.prod(x, dim=0), lambda x: x.prod(0)),
    "matmul over the batch": (lambda x: ttnn.matmul(x, x, transpose_a=True), lambda x: x.T @ x),
    "another dim": (lambda x: ttnn.mean(x, dim=1), lambda x: x.mean(1)),
    "turned": (lambda x: ttnn.permute(x, (1, 0)), lambda x: x.T),
    "gathered": (lambda x: ttnn.all_gather(x, dim=0), lambda x: x),
    "reshaped": (lambda x: ttnn.reshape(x, (len(x), 2, 2)), lambda x: x.reshape(-1, 2, 2)),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("size", [5, 7])
def test_padding_never_counts(open_mesh, name, size):
    mesh, x = open_mesh(1, 2), numbers(size, 4) / 8
    mapper = ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    t = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=mapper)
    run, expected = PADDED[name]
    torch.testing.assert_close(ttnn.to_torch(run(ttnn.subtract(t, 9.0))), expected(x - 9))


@pytest.mark.parametrize(
    "op",
    [
        lambda x: ttnn.concat([x, x], dim=0),
        lambda x: ttnn.slice(x, [0, 0], [3, 4]),
        lambda x: ttnn.reshape(x, (2, 2, 4)),
        lambda x: ttnn.mean(x, dim=0),
    ],
)
def test_where_padding_gets_between_the_values_no_whole_is_told(open_mesh, op):
    mesh, x = open_mesh(1, 2), numbers(7, 4)
    t = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(RuntimeError, match="Supply a mesh composer"):
        ttnn.to_torch(op(t))
