"""A mesh is a value: equal, hashable, printable and readable back; its devices keep id and home when it is reshaped."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import Mesh
from meshloom.mesh.process import counts

NAMES = ("dp", "tp", "pp", "x_1")
shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(shapes)
    ids = draw(st.permutations(range(100, 100 + math.prod(shape)))) if draw(st.booleans()) else None
    return Mesh.of(shape, NAMES[: len(shape)], device_ids=ids)


@given(meshes())
@settings(max_examples=60, deadline=None)
def test_a_mesh_reads_back_from_its_texts(mesh):
    assert loom.parse(str(mesh)) == mesh
    assert eval(repr(mesh)) == mesh


@given(meshes())
@settings(max_examples=40, deadline=None)
def test_copies_and_pickles_are_equal_and_hash_alike(mesh):
    for other in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh), copy.copy(mesh)):
        assert other == mesh
        assert hash(other) == hash(mesh)
        assert other.homes == mesh.homes


@given(meshes(), meshes())
@settings(max_examples=60, deadline=None)
def test_meshes_are_equal_exactly_by_names_sizes_and_ids(one, other):
    same = (one.axes, one.shape, one.device_ids) == (other.axes, other.shape, other.device_ids)
    assert (one == other) is same
    assert not same or hash(one) == hash(other)


def test_names_order_and_ids_tell_meshes_apart():
    mesh = Mesh(dp=2, tp=4)
    assert mesh != Mesh(tp=4, dp=2)
    assert mesh != Mesh(a=2, tp=4)
    assert mesh != Mesh.of((2, 4), ("dp", "tp"), device_ids=range(8, 16))
    assert mesh != (2, 4)
    assert mesh == Mesh.of((2, 4), ("dp", "tp")) == loom.open_mesh((2, 4), axes=("dp", "tp"))


def test_a_mesh_prints_short_and_as_code():
    assert str(Mesh(dp=2, tp=4)) == repr(Mesh(dp=2, tp=4)) == "Mesh(dp=2, tp=4)"
    moved = Mesh.of((2, 2), ("a", "b"), device_ids=(3, 2, 1, 0))
    assert str(moved) == "Mesh(a=2, b=2, ids=[3, 2, 1, 0])"
    assert repr(moved) == "Mesh.of((2, 2), ('a', 'b'), device_ids=(3, 2, 1, 0))"


def test_axes_without_names_are_numbered():
    assert str(loom.open_mesh((2, 3))) == "Mesh(x0=2, x1=3)"
    assert loom.open_mesh(5).shape == (5,)


def test_a_mesh_cannot_change():
    mesh = Mesh(dp=2)
    with pytest.raises(AttributeError, match="a Mesh is a value and cannot change: shape = 3"):
        mesh.shape = 3  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="cannot change: del axes"):
        del mesh.axes


@given(meshes())
@settings(max_examples=40, deadline=None)
def test_index_is_row_major_and_total(mesh):
    assert [mesh.index(place) for place in mesh.coordinates()] == list(range(mesh.size))
    assert len(list(mesh.coordinates())) == mesh.size == math.prod(mesh.shape)


def test_axis_finds_names_and_positions():
    mesh = Mesh(dp=2, tp=4)
    assert [mesh.axis(each) for each in ("dp", "tp", 0, 1, -1)] == [0, 1, 0, 1, 1]
    with pytest.raises(loom.MeshError, match="axis 2 is out of range for 2 axes"):
        mesh.axis(2)


# virtual and physical


@st.composite
def virtual(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...]]:
    physical = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    lanes = [draw(st.integers(1, 3)) for _ in physical]
    shape = tuple(p * n for p, n in zip(physical, lanes, strict=True))
    return Mesh.of(shape, NAMES[: len(shape)], physical=physical), physical


@given(virtual())
@settings(max_examples=60, deadline=None)
def test_virtual_to_physical_is_total_and_invertible(pair):
    mesh, physical = pair
    homes = [mesh.virtual_to_physical(place) for place in mesh.coordinates()]
    assert len(set(homes)) == mesh.size
    assert {place for place, _ in homes} == set(itertools.product(*map(range, physical)))
    lanes = mesh.size // math.prod(physical)
    assert {lane for _, lane in homes} == set(range(lanes))
    assert [mesh.physical_to_virtual(*home) for home in homes] == list(mesh.coordinates())


@given(virtual(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_homes_and_ids_survive_reshape_and_submesh(pair, rng):
    mesh, _ = pair
    divisors = [d for d in range(1, mesh.size + 1) if mesh.size % d == 0]
    rows = rng.choice(divisors)
    grid = mesh.reshape(a=rows, b=mesh.size // rows)
    assert grid.homes == mesh.homes and grid.device_ids == mesh.device_ids
    line = grid.submesh(a=rows - 1)
    assert line.axes == ("b",)
    for b in range(line.size):
        assert line.virtual_to_physical((b,)) == grid.virtual_to_physical((rows - 1, b))
    home = grid.virtual_to_physical((rows - 1, 0))
    assert line.physical_to_virtual(*home) == (0,)


def test_4x4_on_2x2_has_four_lanes_per_device():
    mesh = loom.open_mesh((4, 4), axes=("r", "c"), physical=(2, 2))
    assert mesh.virtual_to_physical((0, 0)) == ((0, 0), 0)
    assert mesh.virtual_to_physical((1, 1)) == ((0, 0), 3)
    assert mesh.virtual_to_physical((3, 0)) == ((1, 0), 2)
    with pytest.raises(loom.MeshError, match=r"no virtual device lives at \(\(2, 0\), 0\)"):
        mesh.physical_to_virtual((2, 0))


# submeshes


def test_submesh_drops_an_axis_for_an_int_and_keeps_it_for_a_slice():
    mesh = Mesh(dp=2, tp=4)
    assert mesh.submesh(dp=1).device_ids == (4, 5, 6, 7)
    assert mesh.submesh(dp=-1) == mesh.submesh(dp=1)
    half = mesh.submesh(tp=slice(2, None))
    assert (half.axes, half.shape, half.device_ids) == (("dp", "tp"), (2, 2), (2, 3, 6, 7))
    assert mesh.submesh(tp=slice(None, None, 2)).device_ids == (0, 2, 4, 6)
    assert mesh.submesh({"dp": 0, "tp": 3}).device_ids == (3,)
    assert mesh.submesh() == mesh


def test_a_submesh_without_a_device_is_an_error():
    with pytest.raises(loom.MeshError, match="slice 4:9 of axis 'tp' holds no device"):
        Mesh(dp=2, tp=4).submesh(tp=slice(4, 9))


def test_ops_run_on_a_submesh_and_do_not_mix_with_the_whole():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    part = mesh.submesh(dp=1)
    x = loom.arange(10, mesh=part)
    assert x.sum().item() == 45
    assert str(x.topology) == "i64[10](S(0)) on Mesh(tp=4, ids=[4, 5, 6, 7])"
    with pytest.raises(loom.MeshError, match="the operands are on different meshes"):
        x + loom.arange(10, mesh=mesh)


def test_reshape_keeps_the_devices_in_order():
    mesh = Mesh.of((2, 3), ("a", "b"), device_ids=(5, 4, 3, 2, 1, 0))
    assert mesh.reshape(x=6).device_ids == (5, 4, 3, 2, 1, 0)
    assert mesh.reshape(x=6).reshape(a=2, b=3) == mesh


def test_the_mesh_opened_last_is_the_current_one():
    mesh = loom.open_mesh((3,), axes=("w",))
    assert loom.current_mesh() == mesh
    assert loom.zeros(6).mesh == mesh


def test_a_mesh_of_no_axes_is_one_device():
    mesh = Mesh()
    assert mesh.size == 1 and list(mesh.coordinates()) == [()]
    assert loom.ones(3, mesh=mesh).sum().item() == 3


def test_a_mesh_costs_what_its_shape_costs():
    tracemalloc.start()
    try:
        mesh = loom.open_mesh((10**9,), axes=("a",))
        grid = mesh.reshape(x=10**3, y=10**6)
        halves = mesh.split(4)
        assert mesh == Mesh(a=10**9) == loom.parse(str(mesh)) == pickle.loads(pickle.dumps(mesh)) == eval(repr(mesh))
        assert hash(mesh) == hash(Mesh(a=10**9)) and mesh != Mesh(a=10**9 + 1) and mesh != grid
        assert mesh.device_id((123_456_789,)) == 123_456_789
        assert grid.virtual_to_physical((5, 7)) == ((5_000_007,), 0) and grid.homes == mesh.homes
        assert list(itertools.islice(grid.coordinates(), 2)) == [(0, 0), (0, 1)]
        assert halves.local_shape == (250_000_000,)
        assert list(itertools.islice(halves.local_coordinates(3), 2)) == [(750_000_000,), (750_000_001,)]
        assert counts((10**9,))[:4] == [1, 2, 4, 5] and len(counts((10**9,))) == 100
        assert Mesh.of((10**6, 10**3), physical=(10**3, 10**3)).virtual_to_physical((999_999, 5)) == ((999, 5), 999)
        assert mesh.reordered(range(10**9)) is mesh
        assert "Mesh" in mesh._repr_html_()
        x = loom.ones(4, mesh=mesh, placements="R")
        assert (x + x).tolist() == [2.0] * 4
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@given(meshes())
@settings(max_examples=40, deadline=None)
def test_ids_that_count_through_are_the_same_however_they_were_given(mesh):
    again = Mesh.of(mesh.shape, mesh.axes, device_ids=list(mesh.device_ids))
    assert again == mesh and hash(again) == hash(mesh)
    if mesh.device_ids == tuple(range(mesh.size)):
        assert again == Mesh.of(mesh.shape, mesh.axes, device_ids=range(mesh.size)) == Mesh.of(mesh.shape, mesh.axes)


def test_the_mesh_of_a_device_is_told_from_a_plain_one():
    with loom.runtime.open_mesh_device((2, 4)) as one, loom.runtime.open_mesh_device((2, 4)) as other:
        assert one.mesh != other.mesh != Mesh.of((2, 4)) != one.mesh
        assert one.mesh.with_lease(None) == Mesh.of((2, 4)) == pickle.loads(pickle.dumps(one.mesh))
        assert copy.deepcopy(one.mesh) is one.mesh
        assert one.mesh.reshape(x=8).lease is one.mesh.submesh(x0=0).lease is one.mesh.lease
