"""DTensors and device meshes as tensors on a mesh, and back: in one process, and in real ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import dtensor_ranks
import meshloom as loom
import ranks
from meshloom import Mesh
from refusals import refusal


@pytest.fixture
def alone():
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_a_device_mesh_becomes_a_mesh_of_the_same_shape_and_names(alone):
    mesh = loom.from_device_mesh(alone)
    assert mesh == Mesh(dp=1, tp=1)
    assert loom.current_mesh() is mesh
    assert loom.from_device_mesh(init_device_mesh("cpu", (1,))) == Mesh(x0=1)


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(0))])
def test_a_dtensor_of_one_process_goes_there_and_back(alone, placements):
    theirs = distribute_tensor(torch.arange(12.0).view(4, 3), alone, placements)
    ours = loom.from_dtensor(theirs)
    dtensor_ranks.check_same(ours, theirs)
    back = ours.to_dtensor()
    assert back.placements == theirs.placements and back.device_mesh is alone
    assert torch.equal(back.full_tensor(), theirs.full_tensor())


def test_a_tensor_made_of_a_dtensor_shares_its_memory(alone):
    theirs = distribute_tensor(torch.zeros(4), alone, [Shard(0), Replicate()])
    loom.from_dtensor(theirs).add_(1)
    assert theirs.full_tensor().tolist() == [1.0] * 4


@pytest.mark.parametrize("placements", ["S(0), S(1)", "R, S(0)", "P(sum), S(0)", "R, R"])
def test_virtual_devices_of_one_process_become_a_device_mesh_of_one(alone, placements):
    x = loom.distribute(torch.arange(15.0).view(5, 3), Mesh(dp=2, tp=4), "S(0), S(0)").redistribute(placements)
    theirs = x.to_dtensor()
    assert tuple(theirs.device_mesh.mesh.shape) == (1, 1)
    assert theirs.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(theirs.to_local(), torch.arange(15.0).view(5, 3))


def test_gradients_flow_from_a_dtensor_through_a_mesh_and_back(alone):
    theirs = distribute_tensor(torch.arange(6.0).view(2, 3), alone, [Shard(0), Replicate()]).requires_grad_()
    loom.from_dtensor(theirs).square().to_dtensor().sum().full_tensor().backward()
    assert torch.equal(theirs.grad.full_tensor(), 2 * torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("given", "notation"),
    [
        (None, "f32[8, 6](R, R)"),
        ([Shard(0), Replicate()], "f32[8, 6](S(0), R)"),
        ([Shard(-1), Partial()], "f32[8, 6](S(1), P(sum))"),
        ([loom.Shard(0), "S(1)"], "f32[8, 6](S(0), S(1))"),
        ({"tp": loom.Shard(1)}, "f32[8, 6](R, S(1))"),
        ("S(0), S(1)", "f32[8, 6](S(0), S(1))"),
    ],
)
def test_distribute_tensor_takes_placements_of_torch_and_of_meshloom(given, notation):
    x = loom.distribute_tensor(torch.ones(8, 6), Mesh(dp=2, tp=3), given)
    assert x.topology.notation == notation
    assert torch.equal(x.full_tensor(), torch.ones(8, 6))


def test_distribute_tensor_takes_a_device_mesh(alone):
    assert loom.distribute_tensor(torch.ones(4), alone, [Shard(0), Replicate()]).mesh == Mesh(dp=1, tp=1)


def test_to_local_is_what_the_devices_of_this_process_have_in_common():
    x = loom.distribute(torch.arange(4), Mesh(dp=2), "R")
    assert torch.equal(x.to_local(), torch.arange(4))
    alone = loom.distribute(torch.arange(4), Mesh(dp=1), "S(0)")
    assert torch.equal(alone.to_local(), torch.arange(4))


# refusals


def test_to_local_of_devices_that_differ_names_the_ways_to_their_parts():
    x = loom.distribute(torch.arange(8).view(4, 2), Mesh(dp=2, tp=2), "S(0), R")
    assert refusal(x.to_local, loom.PlacementError) == (
        "this process holds 4 devices, and they hold different parts along dp\n"
        "  tensor  i64[4, 2](S(0), R) on Mesh(dp=2, tp=2)\n"
        "  fix     x.shard_at((0, 0)) is the part of one device, x.block has all of them, x.to_torch() is the whole"
    )


def test_a_dtensor_without_processes_is_refused():
    with pytest.raises(loom.ArgumentError, match="a DTensor needs torch's processes, and they are not initialised"):
        loom.ones(4, mesh=Mesh(dp=2)).to_dtensor()


def test_distribute_names_from_dtensor_for_a_dtensor(alone):
    theirs = distribute_tensor(torch.ones(4), alone, [Shard(0), Replicate()])
    with pytest.raises(loom.ArgumentError, match=r"loom\.from_dtensor\(d\) takes it with its placements"):
        loom.distribute(theirs, Mesh(dp=2))


def test_from_dtensor_of_a_dense_tensor_names_distribute():
    with pytest.raises(loom.ArgumentError, match="from_dtensor takes a DTensor, not a Tensor"):
        loom.from_dtensor(torch.ones(2))
    with pytest.raises(loom.ArgumentError, match="is not a DeviceMesh"):
        loom.from_device_mesh(Mesh(dp=2))


def test_a_device_mesh_of_another_shape_is_refused(alone):
    with pytest.raises(loom.MeshError, match=r"the device mesh has shape \(1,\) and the processes are \(1, 1\)"):
        loom.ones(4, mesh=Mesh(dp=1, tp=1)).to_dtensor(init_device_mesh("cpu", (1,)))


def test_a_placement_of_torch_that_has_no_counterpart_is_refused(alone):
    with pytest.raises(loom.PlacementError, match="of a DTensor has no counterpart on a mesh"):
        loom.distribute_tensor(torch.ones(4), Mesh(dp=2), [Partial("band")])


# real processes


@pytest.mark.parametrize(("count", "shape"), [(2, (2,)), (4, (2, 2))])
def test_dtensors_of_several_processes_go_there_and_back(count, shape):
    found = ranks.run(count, "dtensor_ranks:there_and_back", shape)
    assert found == [len(dtensor_ranks.SHAPES) * len(dtensor_ranks.KINDS) ** len(shape)] * count


def test_partial_sums_of_two_processes_are_reduced_alike():
    assert ranks.run(2, "dtensor_ranks:partial_sums") == [len(dtensor_ranks.OPS)] * 2


def test_gradients_cross_between_a_dtensor_and_a_mesh_on_two_processes():
    assert ranks.run(2, "dtensor_ranks:gradients") == [len(dtensor_ranks.KINDS) ** 2] * 2


def test_a_layer_of_dtensors_and_one_on_a_mesh_train_together():
    assert max(ranks.run(2, "dtensor_ranks:mixed_model")) < 1e-6


def test_more_devices_than_processes_are_refused_with_a_mesh_that_fits():
    for told in ranks.run(2, "dtensor_ranks:refusals"):
        assert len(told) == 3
        assert "a DTensor has one device per process, and this process holds 2 of them" in told[0]
        assert "they hold different parts along tp" in told[1]
        assert "loom.from_dtensor(d)" in told[2]
