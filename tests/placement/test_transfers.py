"""What a copy between meshes sends: every element arrives once, from somebody who holds it."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, strategies as st

from meshloom.mesh import HERE, Mesh
from meshloom.placement import Replicate, Shard, Topology, bytes_received, extents, transfers
from meshloom.types import itemsize, numel

COUNT = 4  # processes


@pytest.fixture(autouse=True)
def processes():
    HERE.count = COUNT
    yield
    HERE.count = 1


@st.composite
def meshes(draw):
    """A mesh of four processes, one of their submeshes, or one that everybody holds whole."""
    shape, grid = draw(st.sampled_from([((4, 2), (4, 1)), ((2, 4), (2, 2)), ((8,), (4,)), ((4, 3), (4, 1))]))
    mesh = Mesh.of(shape, [f"a{i}" for i in range(len(shape))], processes=grid)
    kind = draw(st.sampled_from(["whole", "part", "one", "everybody"]))
    if kind == "part":
        return mesh.submesh(a0=slice(shape[0] // 2, None))
    if kind == "one":
        return mesh.submesh(a0=slice(0, shape[0] // 4) if len(shape) == 1 else 0)
    return Mesh.of((3,), ["b"]) if kind == "everybody" else mesh


@st.composite
def placed(draw, shape):
    mesh = draw(meshes())
    options = st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])
    return Topology(mesh, [draw(options) for _ in mesh.shape], shape, "f32")


def stored(topology: Topology, rank: int, whole: numpy.ndarray) -> numpy.ndarray:
    """What a process stores of a tensor; padding is zero."""
    made = numpy.zeros(topology.stored_shape, whole.dtype)
    for extent in extents(topology, rank):
        made[extent.stored] = whole[extent.slices]
    return made


@given(st.data())
def test_every_element_arrives_once_from_somebody_who_holds_it(data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2).map(tuple))
    source, target = data.draw(placed(shape)), data.draw(placed(shape))
    whole = numpy.arange(1, 1 + numel(shape)).reshape(shape)
    rooms = {rank: numpy.zeros(target.stored_shape, whole.dtype) for rank in target.mesh.holders}
    for each in transfers(source, target):
        given_away = stored(source, each.source, whole)
        assert each.source in source.mesh.holders
        for box in each.boxes:
            assert not rooms[each.target][box.put].any()  # nobody has brought it before
            rooms[each.target][box.put] = given_away[box.taken]
    for rank, room in rooms.items():
        numpy.testing.assert_array_equal(room, stored(target, rank, whole))


def test_a_process_that_holds_what_it_needs_asks_nobody():
    mesh = Mesh.of((4,), ["a"], processes=(4,))
    both = [Topology(each, (Shard(0),), (8,), "f32") for each in (mesh, mesh.reshape(x=4))]
    assert [(each.source, each.target) for each in transfers(*both)] == [(rank, rank) for rank in range(4)]


def test_those_that_hold_the_same_share_the_sending():
    mesh = Mesh.of((4, 1), ["a", "b"], processes=(4, 1))
    source = Topology(mesh.submesh(a=slice(0, 2)), (Replicate(), Replicate()), (8,), "f32")
    target = Topology(mesh.submesh(a=slice(2, 4)), (Replicate(), Replicate()), (8,), "f32")
    assert [(each.source, each.target) for each in transfers(source, target)] == [(0, 2), (1, 3)]


@given(st.data())
def test_bytes_are_what_the_device_that_lacks_most_receives(data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2).map(tuple))
    source, target = data.draw(placed(shape)), data.draw(placed(shape))
    held = {
        device: {index for index in numpy.ndindex(*shape) if source._holds(place, index)}
        for place, device in zip(source.mesh.coordinates(), source.mesh.device_ids, strict=True)
    }
    lacking = [
        sum(target._holds(place, index) and index not in held.get(device, ()) for index in numpy.ndindex(*shape))
        for place, device in zip(target.mesh.coordinates(), target.mesh.device_ids, strict=True)
    ]
    found = bytes_received(source, target)
    if set(source.mesh.device_ids).isdisjoint(target.mesh.device_ids):
        assert found == target.local_bytes  # padding counts, as everywhere
    else:
        assert found == max(lacking) * itemsize("f32")


def test_submeshes_stay_with_the_processes_that_hold_their_devices():
    mesh = Mesh.of((4, 2), ("pp", "tp"), processes=(2, 2))
    parts = [mesh.submesh(pp=i) for i in range(4)]
    assert [each.ranks for each in parts] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [each.processes for each in parts] == [(2,)] * 4
    assert mesh.submesh(tp=0).ranks == (0, 2)
    assert mesh.submesh(pp=slice(0, 4, 2)).ranks == ()  # all of them
    assert mesh.submesh(pp=slice(1, 4)).processes == (1, 1)  # no equal boxes: everybody holds all of it
    assert mesh.submesh(pp=slice(1, 4)).holders == (0, 1, 2, 3)
    inner = parts[3].submesh(tp=slice(1, 2))
    assert (inner.ranks, inner.owner((0,)), list(inner.local_coordinates(3))) == ((3,), 3, [(0,)])
    assert list(inner.local_coordinates(2)) == []
    assert parts[2].is_elsewhere and not parts[0].is_elsewhere  # this is rank 0
    assert math.prod(parts[2].local_shape) == 1
