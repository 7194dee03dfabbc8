"""torch.distributed.checkpoint with tensors on a mesh: any mesh to any mesh, DTensor's files in both directions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import meshloom as loom
import ranks
from checkpoint_cases import MESHES, on, value
from meshloom import Partial

SHAPES = {"w": (10, 7), "v": (5,), "n": (), "e": (0, 3), "b": (6, 2, 3)}
DTYPES = {"w": torch.float32, "v": torch.bfloat16, "n": torch.float64, "e": torch.float32, "b": torch.bool}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors(mesh: loom.Mesh | None, is_saved: bool) -> dict[str, Any]:
    found = {}
    for name, shape in SHAPES.items():
        data = value(name, shape, DTYPES[name]) if is_saved else torch.zeros(shape, dtype=DTYPES[name])
        found[name] = on(mesh, name, data)
    return {"model": found, "step": 7 if is_saved else 0}


def check(found: dict[str, Any]) -> None:
    for name, each in found["model"].items():
        dense = each.to_torch() if isinstance(each, loom.Tensor) else each
        assert torch.equal(dense, value(name, SHAPES[name], DTYPES[name])), name
    assert found["step"] == 7


def test_a_checkpoint_of_one_mesh_is_read_on_any_other_and_dense(tmp_path):
    dcp.save(tensors(loom.open_mesh((2, 4)), True), checkpoint_id=tmp_path / "a")
    for shape in MESHES:
        state = tensors(loom.open_mesh(shape), False)
        dcp.load(state, checkpoint_id=tmp_path / "a")
        check(state)
    state = tensors(None, False)
    dcp.load(state, checkpoint_id=tmp_path / "a")
    check(state)
    dcp.save(tensors(None, True), checkpoint_id=tmp_path / "b")
    state = tensors(loom.open_mesh((3, 2)), False)
    dcp.load(state, checkpoint_id=tmp_path / "b")
    check(state)


def test_a_partial_tensor_is_refused_with_its_redistribution(tmp_path):
    x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("tp",)), placements={"tp": Partial("sum")})
    with pytest.raises((loom.UnsupportedError, dcp.CheckpointException), match="a partial tensor cannot be saved"):
        dcp.save({"x": x}, checkpoint_id=tmp_path)


def test_a_loaded_tensor_keeps_its_padding_at_zero_and_its_memory(tmp_path):
    mesh = loom.open_mesh((2, 4))
    dcp.save({"x": torch.arange(1.0, 11.0)}, checkpoint_id=tmp_path)
    x = loom.zeros(10, mesh=mesh, placements="S(0), S(0)")
    memory = x._data.data_ptr()
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert x._data.data_ptr() == memory and float(x._data.sum()) == 55.0 and x._data.numel() == 16
    assert x.to_torch().tolist() == list(range(1, 11))


def trained(mesh: loom.Mesh | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    if mesh is not None:
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, loom.Parameter(on(mesh, name, parameter.detach())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(4, 6) if mesh is None else loom.ones(4, 6, mesh=mesh)
    model(x).square().sum().backward()
    optimizer.step()
    return model, optimizer


def both(folder: str) -> str:
    """On every rank: ours to DTensor's and back, ours to ours on another mesh, a model with its optimizer."""
    count = int(os.environ["WORLD_SIZE"])
    mesh = loom.open_mesh((count,), axes=("tp",))
    state = tensors(mesh, True)
    dcp.save(state, checkpoint_id=f"{folder}/ours")
    wide = loom.open_mesh((2 * count, 3))
    for where in (mesh, wide):
        found = tensors(where, False)
        dcp.load(found, checkpoint_id=f"{folder}/ours")
        check(found)
    theirs = theirs_like(count, zeros=True)
    dcp.load(theirs, checkpoint_id=f"{folder}/ours")
    for name in ("w", "b"):
        assert torch.equal(theirs["model"][name].full_tensor(), value(name, SHAPES[name], DTYPES[name])), name
    dcp.save(theirs_like(count, zeros=False), checkpoint_id=f"{folder}/theirs")
    found = tensors(wide, False)
    part = {"model": {name: found["model"][name] for name in ("w", "b")}}
    dcp.load(part, checkpoint_id=f"{folder}/theirs")
    check({**part, "step": 7})
    with_model(folder, mesh, wide)
    state = tensors(wide, True)
    pending = dcp.async_save(state, checkpoint_id=f"{folder}/later", async_stager=loom.checkpoint.CopyStager())
    for each in state["model"].values():
        each.zero_()
    pending.result()
    found = tensors(mesh, False)
    dcp.load(found, checkpoint_id=f"{folder}/later")
    check(found)
    return "all read"


def theirs_like(count: int, zeros: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    where = init_device_mesh("cpu", (count,))
    found = {}
    for name, dim in (("w", 1), ("b", 0)):
        data = value(name, SHAPES[name], DTYPES[name])
        found[name] = distribute_tensor(torch.zeros_like(data) if zeros else data, where, [Shard(dim)])
    return {"model": found}


def with_model(folder: str, mesh: loom.Mesh, other: loom.Mesh) -> None:
    model, optimizer = trained(mesh)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/model")
    fresh, later = trained(other)
    with torch.no_grad():
        for each in fresh.parameters():
            each.zero_()
    weights, moments = get_state_dict(fresh, later)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/model")
    set_state_dict(fresh, later, model_state_dict=weights, optim_state_dict=moments)
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.to_torch(), theirs.to_torch())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(later.state[ours][key].to_torch(), optimizer.state[theirs][key].to_torch()), key
    dist.barrier()


@pytest.mark.slow
def test_two_processes_read_what_dtensors_wrote_and_the_other_way_round_and_one_reads_theirs(tmp_path):
    assert ranks.run(2, "test_distributed_checkpoint:both", str(tmp_path)) == ["all read"] * 2
    state = tensors(loom.open_mesh((2, 3)), False)
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    check(state)
    state = tensors(None, False)
    dcp.load(state, checkpoint_id=tmp_path / "later")
    check(state)
