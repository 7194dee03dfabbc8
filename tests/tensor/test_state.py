"""State that users keep: copied, saved and loaded, on the same mesh, on another one, dense; and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import meshloom as loom
import ranks
from meshloom import MeshError, PeerLostError, Replicate, Shard, UnsupportedError

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
        "virtual": loom.Mesh.of((4, 4), physical=(2, 2)).reshape(x=16),
    }
    found = _saved_and_loaded(kept, weights_only=weights_only)
    assert found["mesh"] == kept["mesh"]
    assert found["virtual"].virtual_to_physical((15,)) == kept["virtual"].virtual_to_physical((15,)) == ((1, 1), 3)
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


def test_torchs_own_parameter_takes_a_tensor_on_a_mesh():
    made = nn.Parameter(loom.zeros(4, 6, mesh=MESH, placements="S(0), R"))
    assert isinstance(made, nn.Parameter) and isinstance(made, loom.Parameter) and made.requires_grad
    assert str(made.topology) == "f32[4, 6](S(0), R) on Mesh(dp=2, tp=2)"
    module = nn.Linear(6, 4, bias=False)
    module.load_state_dict({"weight": made.detach() + 1}, assign=True)
    assert isinstance(module.weight, loom.Parameter)
    module(loom.ones(2, 6, mesh=MESH)).sum().backward()
    assert module.weight.grad.placements == made.placements


def test_a_tensor_of_two_processes_is_refused_by_one_at_its_first_use():
    """As one that was saved by a rank, and is loaded by itself."""
    placed = loom.Topology(MESH.split(2), (Shard(0), Replicate()), (4, 2), "f32")
    held = loom.Tensor(placed, torch.zeros(2, 2))
    for use in (lambda: held + 1, lambda: held.to_torch(), lambda: held.sum()):
        with pytest.raises(PeerLostError) as caught:
            use()
        assert caught.value.headline == "a mesh over 2 processes is used by 1"


SPLIT = "a tensor that is split over processes cannot be pickled or sent"


def _trained(mesh: loom.Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(mesh, "S(0)")
    optimizer = torch.optim.AdamW(model.parameters())
    model(loom.ones(4, 6, mesh=mesh)).sum().backward()
    optimizer.step()
    return model, optimizer


def _check_refused(act: Callable[[], Any], where: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        act()
    assert SPLIT in str(caught.value) and "x.to_torch() on all ranks" in str(caught.value), where


def files_of_split_tensors(folder: str) -> int:
    """On every rank: no file and no message holds a part; copies do; what all hold goes through."""
    mesh = loom.open_mesh((2,))
    model, optimizer = _trained(mesh)
    split = loom.arange(4.0, mesh=mesh, placements="S(0)")
    partial = loom.ones(4, mesh=mesh, placements="P(sum)")
    kept = {
        "tensor": split,
        "partial": partial,
        "parameter": model[0].weight,
        "gradient": model[0].weight.grad,
        "model": model,
        "state": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    for name, value in kept.items():
        _check_refused(lambda value=value: pickle.dumps(value), name)
        _check_refused(lambda value=value: ForkingPickler.dumps(value), name)
        _check_refused(lambda value=value: torch.save(value, io.BytesIO()), name)
    for copied in (copy.copy, copy.deepcopy):
        for value in (split, partial, model[0].weight, model[0].weight.grad):
            torch.testing.assert_close(copied(value).to_torch(), value.to_torch())
    torch.testing.assert_close(copy.deepcopy(model)[0].weight.to_torch(), model[0].weight.to_torch())
    full = split.redistribute("R")
    assert pickle.loads(pickle.dumps(full)).tolist() == [0.0, 1.0, 2.0, 3.0]
    dcp.save({"full": full}, checkpoint_id=f"{folder}/full")
    found = {"full": full * 0}
    dcp.load(found, checkpoint_id=f"{folder}/full")
    assert found["full"].tolist() == [0.0, 1.0, 2.0, 3.0]
    return len(kept)


def test_files_and_messages_refuse_a_tensor_that_is_split_over_processes(tmp_path):
    assert ranks.run(2, "test_state:files_of_split_tensors", str(tmp_path)) == [7, 7]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_process_holds_all_of_it(tmp_path):
    model, optimizer = _trained(loom.Mesh(x=2))
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(kept, checkpoint_id=tmp_path)
    fresh, other = _trained(loom.Mesh(x=2))
    with torch.no_grad():
        for each in fresh.parameters():
            each.zero_()
    found = {"model": fresh.state_dict(), "optimizer": other.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path)
    fresh.load_state_dict(found["model"])
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs.to_torch())
