"""Placements and topologies: every spelling, and chunks against a reference that knows nothing of formulas."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.placement import as_placements
from meshloom.types import itemsize

AXES = ("a", "b", "c", "d")
MESH = Mesh(dp=2, tp=4)


@st.composite
def topologies(draw: st.DrawFn, partial: bool = True) -> Topology:
    """Any topology: a mesh of 1 to 4 axes, dims of 0 to 12, any nesting of axes on dims."""
    shape = tuple(draw(st.lists(st.integers(0, 12), min_size=0, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    kinds += [Partial(draw(st.sampled_from(["sum", "max"])))] if partial else []
    placements = tuple(draw(st.sampled_from(kinds)) for _ in sizes)
    return Topology(
        Mesh.of(sizes, AXES[: len(sizes)]), placements, shape, draw(st.sampled_from(["f32", "bf16", "i64"]))
    )


def cut(indices: list[int], parts: int, width: int) -> list[list[int]]:
    """Chunks of `width` consecutive indices, the last ones shorter or empty."""
    return [indices[i * width : (i + 1) * width] for i in range(parts)]


def reference(topology: Topology, dim: int) -> dict[tuple[int, ...], list[int]]:
    """For each coordinate the global indices of one dim that it holds, by cutting lists, left mesh axis first."""
    held = {(): list(range(topology.shape[dim]))}
    width = topology.shape[dim]
    for size, placement in zip(topology.mesh.shape, topology.placements, strict=True):
        if placement == Shard(dim):
            width = -(-width // size)
            held = {(*at, i): part for at, whole in held.items() for i, part in enumerate(cut(whole, size, width))}
        else:
            held = {(*at, i): whole for at, whole in held.items() for i in range(size)}
    return held


@given(topologies())
@settings(max_examples=150, deadline=None)
def test_chunks_are_what_cutting_lists_gives(topology):
    for dim in range(topology.ndim):
        for place, indices in reference(topology, dim).items():
            start, extent = topology.chunk(place, dim)
            assert list(range(start, start + extent)) == indices
            assert topology.offset(place)[dim] == start
            assert topology.extent(place)[dim] == extent


@given(topologies())
@settings(max_examples=100, deadline=None)
def test_local_shape_holds_the_largest_chunk_and_padding_fills_the_rest(topology):
    for place in topology.mesh.coordinates():
        extent, padding = topology.extent(place), topology.padding(place)
        assert tuple(e + p for e, p in zip(extent, padding, strict=True)) == topology.local_shape
        assert all(p >= 0 for p in padding)
    assert topology.extent((0,) * topology.mesh.ndim) == topology.local_shape
    assert topology.padded is any(any(topology.padding(place)) for place in topology.mesh.coordinates())


@given(topologies(partial=False))
@settings(max_examples=80, deadline=None)
def test_shards_tile_the_tensor_exactly(topology):
    """Among coordinates that differ only on sharding axes, every element is held exactly once."""
    sharding = [axis for axis, each in enumerate(topology.placements) if isinstance(each, Shard)]
    held: dict[tuple[int, ...], int] = {}
    for place in topology.mesh.coordinates():
        if any(place[axis] for axis in range(topology.mesh.ndim) if axis not in sharding):
            continue
        ranges = (range(o, o + e) for o, e in zip(topology.offset(place), topology.extent(place), strict=True))
        for index in itertools.product(*ranges):
            held[index] = held.get(index, 0) + 1
    assert held == dict.fromkeys(itertools.product(*map(range, topology.shape)), 1)


@given(topologies(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_owners_are_the_coordinates_whose_chunks_hold_the_index(topology, rng):
    if 0 in topology.shape:
        return
    index = tuple(rng.randrange(size) for size in topology.shape)
    held = [reference(topology, dim) for dim in range(topology.ndim)]
    expected = [c for c in topology.mesh.coordinates() if all(i in h[c] for i, h in zip(index, held, strict=True))]
    assert list(topology.owners(index)) == expected
    assert expected


@given(topologies())
@settings(max_examples=100, deadline=None)
def test_a_topology_reads_back_from_its_text(topology):
    assert loom.parse(str(topology)) is topology
    assert eval(repr(topology)) is topology


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_equal_topologies_are_one_object(topology):
    again = Topology(
        Mesh.of(topology.mesh.shape, topology.mesh.axes), list(topology.placements), topology.shape, topology.dtype
    )  # type: ignore[arg-type]
    assert again is topology
    assert copy.deepcopy(topology) is topology is copy.copy(topology)
    assert pickle.loads(pickle.dumps(topology)) is topology


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_block_and_stored_shapes_have_the_same_number_of_elements(topology):
    assert count(topology.block_shape) == count(topology.stored_shape)
    replicated = [axis for axis, each in enumerate(topology.placements) if isinstance(each, Replicate)]
    assert all(topology.block_shape[axis] == 1 for axis in replicated)
    assert topology.local_bytes == count(topology.local_shape) * itemsize(topology.dtype)


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def test_interning_holds_no_topology_that_nobody_uses():
    before = len(Topology._known)
    for size in range(1000, 1200):
        Topology(MESH, (Replicate(), Replicate()), (size,), "f32")
    assert len(Topology._known) <= before + 5


def test_ten_over_two_and_four_nests_with_interior_padding():
    topology = Topology(Mesh(a=2, b=4), (Shard(0), Shard(0)), (10,), "f32")
    assert [topology.extent(c)[0] for c in topology.mesh.coordinates()] == [2, 2, 1, 0, 2, 2, 1, 0]
    assert [topology.offset(c)[0] for c in topology.mesh.coordinates()] == [0, 2, 4, 5, 5, 7, 9, 10]


# spellings


@pytest.mark.parametrize(
    "given",
    [
        {"dp": Shard(0)},
        {"dp": "S(0)", "tp": "R"},
        (Shard(0), Replicate()),
        [Shard(0), "R"],
        "S(0), R",
        "(S(0), R)",
        " S(0) ,R ",
        {"tp": Replicate(), "dp": Shard(-2)},
        (Shard(-2), Replicate()),
    ],
)
def test_every_spelling_means_the_same_placements(given):
    assert as_placements(given, MESH, ndim=2) == (Shard(0), Replicate())
    assert loom.ones(4, 4, mesh=MESH, placements=given).topology.notation == "f32[4, 4](S(0), R)"


def test_one_placement_is_enough_on_a_mesh_of_one_axis():
    assert as_placements(Shard(1), Mesh(w=4), 2) == as_placements("S(1)", Mesh(w=4), 2) == (Shard(1),)


EVERY = [Shard(0), Shard(3), Shard(-1), Replicate(), *map(Partial, ("sum", "mean", "max", "min", "prod"))]


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_a_placement_reads_back_from_its_texts(placement):
    assert loom.parse(str(placement)) == placement
    assert eval(repr(placement)) == placement
    assert loom.parse(f"({placement})") == (placement,)


@pytest.mark.parametrize("text", ["S", "S(x)", "Q(0)", "S(0) R", "R R", "P()", "S(0),,R", "S(0.5)", "r"])
def test_text_that_is_no_placement_is_refused(text):
    with pytest.raises(loom.MeshloomError):
        loom.parse(text)


@pytest.mark.parametrize("value", [True, "0", 1.0, None])
def test_shard_takes_a_whole_number(value):
    with pytest.raises(loom.PlacementError, match="Shard takes the number of a dim, not"):
        Shard(value)


def test_without_placements_every_axis_shards_dim_0_and_a_number_is_replicated():
    assert loom.zeros(16, 2, mesh=MESH).placements == (Shard(0), Shard(0))
    assert loom.zeros((), mesh=MESH).placements == (Replicate(), Replicate())


def test_axes_that_a_dict_does_not_name_are_replicated():
    assert loom.zeros(16, 2, mesh=MESH, placements={"tp": Shard(1)}).placements == (Replicate(), Shard(1))
    assert loom.zeros(16, 2, mesh=MESH, placements={}).placements == (Replicate(), Replicate())


def test_an_index_outside_has_no_owner():
    with pytest.raises(loom.PlacementError, match=r"index \(4,\) is not in the tensor"):
        Topology(MESH, (Shard(0), Replicate()), (4,), "f32").owners((4,))


def test_partial_axes_that_reduce_differently_are_refused():
    with pytest.raises(loom.PlacementError, match="partial axes with different reductions have no common order"):
        Topology(MESH, (Partial("sum"), Partial("max")), (4,), "f32")
    assert Topology(MESH, (Partial("sum"), Partial("mean")), (4,), "f32").partial_axes == (0, 1)
