"""Copies between meshes: an ordinary redistribution, with values, gradients, price, record, explain and forbid."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
import pipeline_ranks
import ranks
from meshloom import Partial, Replicate, Shard, Topology
from meshloom.cost import price
from meshloom.fabric import VIRTUAL, preset
from meshloom.planner import moves, settle

WHOLE = loom.open_mesh((2, 2, 3), axes=("pp", "dp", "tp"))
MESHES = (
    WHOLE.submesh(pp=0),
    WHOLE.submesh(pp=1),
    WHOLE.submesh(pp=1).reshape(x=6),
    WHOLE.submesh(pp=0, dp=slice(0, 1)),
    WHOLE,
    loom.Mesh.of((2,), ("y",), device_ids=(40, 41)),
)
FIRST, SECOND = MESHES[:2]


@st.composite
def placements(draw, mesh, dims, partial=True):
    options = [Replicate(), *map(Shard, range(dims)), *([Partial("sum")] if partial else [])]
    return tuple(draw(st.sampled_from(options)) for _ in mesh.shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_copy_has_the_values_and_the_gradient_of_the_dense_tensor(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple))
    mesh, other = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(MESHES))
    dense = torch.randn(shape, requires_grad=True)
    x = loom.distribute(dense.detach(), mesh, data.draw(placements(mesh, len(shape), False))).requires_grad_()
    wanted = data.draw(placements(other, len(shape)))
    y = x.redistribute(data.draw(placements(mesh, len(shape)))).redistribute(wanted, mesh=other)
    assert y.topology == Topology(other, wanted, shape, "f32")
    torch.testing.assert_close(y.detach().to_torch(), dense.detach())
    weights = torch.randn(shape)
    (y * loom.distribute(weights, other, {})).sum().backward()
    assert x.grad.topology == x.topology.reduced
    torch.testing.assert_close(x.grad.to_torch(), weights)


def test_a_copy_is_recorded_explained_priced_and_forbidden():
    x = loom.randn(12, 6, mesh=FIRST, placements="S(0), P(sum)")

    def program():
        return x.redistribute("S(0), R", mesh=SECOND)

    with loom.record() as log:
        y = program()
    told = ["reduce_scatter(sum) over tp of 3: 96 B", f"copy {FIRST} -> {SECOND}: 144 B"]
    assert [str(event.collective) for event in log] == told
    assert [str(event.collective) for event in loom.explain(program).events] == told
    assert log.kinds()["copy"] == 1 and log.events[1].call == "redistribute"
    assert moves(x.topology, y.topology, VIRTUAL) == tuple(event.collective for event in log)
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError, match="240 B per device"):
        program()
    for machine in (VIRTUAL, preset("galaxy").machine()):
        small, large = (
            price(loom.collectives.Collective("copy", "", 6, size, "f32", ()), machine) for size in (8, 8 << 20)
        )
        assert 0 < small < large


def test_a_gradient_takes_the_way_back_and_is_seen():
    x = loom.randn(12, 6, mesh=FIRST, placements="S(0), R").requires_grad_()
    with loom.record() as log:
        (x.redistribute("R, R", mesh=SECOND) * 2).sum().backward()
    assert [(event.kind, event.phase, event.bytes) for event in log] == [
        ("copy", "forward", 288),
        ("copy", "backward", 144),
    ]


def test_devices_that_have_their_part_already_receive_nothing():
    x = loom.randn(12, mesh=FIRST, placements="S(0), S(0)")
    line = FIRST.reshape(x=6)
    with loom.communication("forbid"):
        y = x.redistribute("S(0)", mesh=line)
    assert y.topology.mesh == line
    torch.testing.assert_close(y.to_torch(), x.to_torch())
    with loom.record() as log:
        x.redistribute("R", mesh=line)
    assert [event.bytes for event in log] == [40]  # ten of twelve numbers


def test_a_partial_tensor_leaves_its_mesh_as_shards_where_that_is_cheaper():
    wide = Topology(FIRST, (Partial("sum"), Replicate()), (1 << 12, 64), "f32")
    assert settle(wide, VIRTUAL).placements == (Shard(0), Replicate())
    assert settle(wide.reduced, VIRTUAL) is wide.reduced


def test_a_copy_is_memory_of_its_own():
    x = loom.ones(6, mesh=FIRST, placements="R, R")
    y = x.redistribute("R, R", mesh=SECOND)
    y.zero_()
    assert x.sum().item() == 6
    same = x.redistribute("R, R", mesh=FIRST)
    assert same is x


def test_what_is_no_mesh_is_refused():
    x = loom.ones(6, mesh=FIRST)
    with pytest.raises(loom.ArgumentError, match="mesh=3 is of type int"):
        x.redistribute("R", mesh=3)
    with pytest.raises(loom.PlacementError, match="3 placements for 2 mesh axes"):
        x.redistribute("R, R, R", mesh=SECOND)
    with pytest.raises(loom.MeshError, match="different meshes") as told:
        x + x.redistribute("R, R", mesh=SECOND)
    assert "x.redistribute(placements, mesh=mesh)" in str(told.value)


def test_a_copy_of_meta_tensors_knows_shapes_and_keeps_gradients():
    x = loom.empty(6, 4, mesh=FIRST, placements="S(0), R", device="meta").requires_grad_()
    y = x.redistribute("R, S(1)", mesh=SECOND)
    assert (y._data.is_meta, y.topology.notation) == (True, "f32[6, 4](R, S(1))")
    y.sum().backward()
    assert x.grad.topology == x.topology


def test_a_mesh_with_ranks_is_a_value():
    part = loom.Mesh.of((4, 2), ("pp", "tp"), processes=(2, 1)).submesh(pp=slice(2, 4))
    assert part.ranks == (1,)
    assert pickle.loads(pickle.dumps(part)) == part == copy.deepcopy(part)
    assert part != part.held_by(()) != part.held_by((0,))


@pytest.mark.parametrize("count", [2, 4])
def test_every_process_runs_the_program_whatever_it_holds(count):
    """Programs on two submeshes and copies of all kinds equal dense; values reach processes that hold nothing."""
    found = ranks.run(count, "pipeline_ranks:copies")
    elsewhere = [(False, True)] * (count // 2) + [(True, False)] * (count // 2)
    assert [each["program"]["elsewhere"] for each in found] == elsewhere
    assert [each["program"]["data"] for each in found] == elsewhere
    assert [each["random"] for each in found] == [12] * count
    holder, *_, other = (each["uses"] for each in found)
    assert holder[:-1] == other[:-1]
    assert holder[-2].startswith("a tensor that is split over processes cannot be pickled")
    assert (holder[-1], other[-1]) == ("given", "the shard at (0,) is held by rank 0 and not by this one")


def test_one_process_runs_the_same_program():
    assert pipeline_ranks.program_on_two_submeshes()["elsewhere"] == (False, False)
    assert pipeline_ranks.random_copies(12) == 12


def test_ranks_that_copy_different_tensors_are_told_so():
    with pytest.raises(AssertionError, match="copies another tensor to rank 1 than that awaits"):
        ranks.run(2, "pipeline_ranks:copy_differently")


@pytest.mark.parametrize("driver", [None, "processes"])
def test_a_device_that_can_be_closed_takes_copies_and_gives_them_back(driver):
    x = loom.arange(6, mesh=FIRST, placements="S(0), R")
    with loom.runtime.open_mesh_device((2,), **({} if driver is None else {"driver": driver})) as device:
        y = x.redistribute("S(0)", mesh=device)
        torch.testing.assert_close((y + y).to_torch(), 2 * torch.arange(6))
        torch.testing.assert_close(y.redistribute("R, R", mesh=SECOND).to_torch(), torch.arange(6))
    for act in (lambda: x.redistribute("S(0)", mesh=device), lambda: y.redistribute("R, R", mesh=SECOND)):
        with pytest.raises(loom.ClosedError, match="has been closed"):
            act()
