"""State that users keep: copied, saved and loaded, on the same mesh, on another one, dense; and what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import ArgumentError, LostError, MeshError, Replicate, Shard

MESH = loom.Mesh(dp=2, tp=2)
OTHER = loom.Mesh(x=3)


def _model(mesh: loom.Mesh, placements: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        for name, each in list(layer.named_parameters()):
            setattr(layer, name, loom.Parameter(each.detach(), mesh, placements))
    return model


def _saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_copy_takes_a_tensor_of_another_mesh_and_keeps_the_target_where_it_is():
    dense = torch.randn(5, 4)
    for source in ("S(0), S(1)", "R, S(0)", "P(sum), R"):
        target = loom.zeros(5, 4, mesh=OTHER, placements="S(1)")
        target.copy_(loom.distribute(dense, MESH, {}).redistribute(source))
        torch.testing.assert_close(target.to_torch(), dense)
        assert target.topology.notation == "f32[5, 4](S(1))"


def test_data_and_gradients_may_come_from_another_mesh():
    dense = torch.randn(5, 4)
    ours, theirs = loom.Parameter(torch.zeros(5, 4), OTHER, "S(0)"), loom.distribute(dense, MESH, "S(1), R")
    ours.data = theirs
    ours.grad = theirs
    torch.testing.assert_close(ours.to_torch().detach(), dense)
    torch.testing.assert_close(ours.grad.to_torch(), dense)
    assert ours.topology is ours.grad.topology is loom.parse("f32[5, 4](S(0)) on Mesh(x=3)")


def test_a_state_dict_goes_from_one_mesh_to_another():
    source, target = _model(MESH, {"dp": Shard(0)}), _model(OTHER, {"x": Shard(0)})
    with torch.no_grad():
        for each in source.parameters():
            each.mul_(2)
    target.load_state_dict(source.state_dict())
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs.to_torch())
        assert ours.mesh == OTHER and ours.placements == (Shard(0),)


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_was_saved_is_loaded_as_torch_loads_by_default(weights_only):
    model = _model(MESH, {"dp": Shard(0)})
    optimizer = torch.optim.AdamW(model.parameters())
    model(loom.ones(4, 6, mesh=MESH)).sum().backward()
    optimizer.step()
    kept = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": model[0].weight,
        "gradient": model[0].weight.grad,
        "partial": loom.ones(3, mesh=MESH, placements="P(mean), R"),
        "mesh": MESH.submesh(dp=1),
    }
    found = _saved_and_loaded(kept, weights_only=weights_only)
    assert found["mesh"] == kept["mesh"]
    for name in ("parameter", "gradient", "partial"):
        assert type(found[name]) is type(kept[name]) and found[name].topology is kept[name].topology
        torch.testing.assert_close(found[name].to_torch(), kept[name].to_torch())
    for name, value in kept["model"].items():
        assert found["model"][name].topology is value.topology
        torch.testing.assert_close(found["model"][name].to_torch(), value.to_torch())
    average = found["optimizer"]["state"][0]["exp_avg"]
    torch.testing.assert_close(average.to_torch(), optimizer.state[model[0].weight]["exp_avg"].to_torch())


def test_a_parameter_goes_where_it_is_asked_to_lie_also_from_a_tensor_on_the_mesh():
    x = loom.randn(4, 6, mesh=MESH, placements="S(0), S(1)")
    assert loom.Parameter(x).placements == x.placements
    assert loom.Parameter(x, MESH).placements == x.placements
    placed = loom.Parameter(x, MESH, {"tp": Shard(0)})
    assert placed.placements == (Replicate(), Shard(0))  # what a dict does not name is replicated, as from a dense one
    torch.testing.assert_close(placed.to_torch().detach(), x.to_torch())


def test_a_parameter_on_another_mesh_than_its_tensor_is_refused():
    with pytest.raises(MeshError) as caught:
        loom.Parameter(loom.zeros(4, 6, mesh=MESH, placements="S(0), R"), OTHER, {})
    assert (
        str(caught.value)
        == """\
a parameter was asked for on another mesh than that of its tensor
  tensor  f32[4, 6](S(0), R) on Mesh(dp=2, tp=2)
  asked   Mesh(x=3)
  fix     loom.Parameter(x.to_torch(), mesh, placements)"""
    )


def test_torchs_own_parameter_refuses_a_tensor_on_a_mesh_and_names_ours():
    with pytest.raises(ArgumentError) as caught:
        nn.Parameter(loom.zeros(4, 6, mesh=MESH, placements="S(0), R"))
    assert (
        str(caught.value)
        == """\
torch.nn.Parameter does not take a tensor on a mesh
  tensor  f32[4, 6](S(0), R) on Mesh(dp=2, tp=2)
  fix     use loom.Parameter(x); load_state_dict without assign=True copies into parameters that are on a mesh"""
    )


def test_a_tensor_of_two_processes_is_refused_by_one_at_its_first_use():
    """As one that was saved by a rank, and is loaded by itself."""
    placed = loom.Topology(MESH.split(2), (Shard(0), Replicate()), (4, 2), "f32")
    held = loom.Tensor(placed, torch.zeros(2, 2))
    for use in (lambda: held + 1, lambda: held.to_torch(), lambda: held.sum()):
        with pytest.raises(LostError) as caught:
            use()
        assert caught.value.headline == "a mesh over 2 processes is used by 1"
