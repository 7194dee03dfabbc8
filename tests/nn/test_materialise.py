"""Models on `meta`: their own initialisers on any mesh, values from files, and nothing left to chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as loom
import model_matrix
import ranks
from library_models import MARKS, PUBLIC, build_on_meta
from meshloom import Mesh, Plan
from meshloom.nn import plan_of

LAYOUTS = {"2x4": (Mesh(dp=2, tp=4), "tensor"), "3": (Mesh(tp=3), "fsdp"), "1": (Mesh(dp=1), "data")}


class Rope(nn.Module):
    """A buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speed", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.speed.copy_(10.0 ** -torch.arange(4.0))
            self.count.fill_(7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.rope = nn.Embedding(9, 4, padding_idx=2), nn.BatchNorm1d(4), Rope()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, letters: Any) -> Any:
        x = self.embedding(letters) * self.rope.speed
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm((x + self.mlp(x)).transpose(1, 2)).transpose(1, 2))


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: each.detach().to_torch() if isinstance(each, loom.Tensor) else each.detach() for name, each in named}


def made(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    mesh, plan = LAYOUTS[layout]
    return tensors(loom.parallelize(on_meta(), mesh, plan))


def test_initialisers_give_the_same_numbers_on_every_mesh():
    first, *others = (made(layout) for layout in LAYOUTS)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], value) for name, value in first.items())
    assert first["mlp.0.weight"].std() > 0.1 and first["mlp.0.weight"].abs().max() <= 0.5
    assert not first["embedding.weight"][2].any() and first["embedding.weight"][3].any()
    assert torch.equal(first["norm.running_var"], torch.ones(4)) and first["norm.num_batches_tracked"] == 0
    assert torch.equal(first["rope.speed"], Rope().speed) and first["rope.count"] == 7


def test_a_model_made_on_a_mesh_is_tied_and_trains():
    mesh, plan = LAYOUTS["2x4"]
    model = loom.parallelize(on_meta(), mesh, plan)
    assert model.head.weight is model.embedding.weight
    assert model.mlp[0].weight.topology.notation == "f32[16, 4](R, S(0))"
    model(torch.arange(8).view(2, 4)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    back = loom.unparallelize(model)
    assert not any(tensor.is_meta for tensor in (*back.parameters(), *back.buffers()))


def test_other_seeds_give_other_numbers():
    mesh, plan = LAYOUTS["3"]
    torch.manual_seed(6)
    other = tensors(loom.parallelize(on_meta(), mesh, plan))
    assert not torch.equal(other["mlp.0.weight"], made("3")["mlp.0.weight"])


def test_without_data_it_stays_on_meta_for_a_dry_run():
    mesh, plan = LAYOUTS["2x4"]
    model = loom.parallelize(on_meta(), mesh, plan, device="meta")
    assert all(tensor.is_meta and isinstance(tensor, loom.Tensor) for tensor in model.parameters())
    assert model.mlp[0].weight.topology.notation == "f32[16, 4](R, S(0))"


class Bare(nn.Module):
    def __init__(self, partly: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        if buffer:
            self.register_buffer("table", torch.arange(3))
        else:
            self.gain = nn.Parameter(torch.ones(3))
        if partly:
            self.reset_parameters = self._fill_some

    def _fill_some(self) -> None:
        self.gain[:2] = 1.0


@pytest.mark.parametrize(("options", "name"), [({}, "gain"), ({"partly": True}, "gain"), ({"buffer": True}, "table")])
def test_what_no_initialiser_writes_is_refused_by_name_and_nothing_is_changed(options, name):
    with torch.device("meta"):
        model = Bare(**options)
    with pytest.raises(loom.ArgumentError) as caught:
        loom.parallelize(model, Mesh(tp=2), "fsdp")
    assert str(caught.value) == (
        f"no initialiser of this Bare on meta writes {name}\n"
        "  fix  give their module a reset_parameters() that writes them, read them from files (weights=...), or build "
        "the module on the CPU"
    )
    assert all(type(tensor) is nn.Parameter and tensor.is_meta for tensor in model.parameters())
    assert plan_of(model) is None


def test_a_module_that_is_partly_on_meta_keeps_what_it_has():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    values = model[0].weight.detach().clone()
    loom.parallelize(model, Mesh(tp=2), "fsdp")
    assert torch.equal(model[0].weight.to_torch(), values) and model[1].weight.to_torch().isfinite().all()


# Files


def save(path: Path, state: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, Path]:
    torch.manual_seed(1)
    dense = Net().eval()
    dense.norm.running_mean += 0.25
    state = {name: value for name, value in dense.state_dict().items() if name != "head.weight"}
    return dense, save(tmp_path / "model.safetensors", state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_meta", [True, False])
def test_a_model_is_read_from_a_file(layout, is_meta, saved):
    dense, file = saved
    mesh, plan = LAYOUTS[layout]
    model = loom.parallelize(on_meta() if is_meta else Net(), mesh, plan, weights=file)
    found = tensors(model)
    assert all(torch.equal(found[name], value) for name, value in tensors(dense).items())
    letters = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model.eval()(letters).to_torch(), dense(letters), rtol=1e-5, atol=1e-6)


def test_a_file_of_another_dtype_is_cast_to_that_of_the_module(saved, tmp_path):
    dense, _ = saved
    file = save(tmp_path / "half.safetensors", {name: value.double() for name, value in dense.state_dict().items()})
    model = loom.parallelize(on_meta(), Mesh(tp=2), "fsdp", weights=file)
    assert model.mlp[0].weight.dtype == torch.float32 and model.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(model.mlp[0].weight.to_torch(), dense.mlp[0].weight)


def test_what_a_file_lacks_is_refused_by_name(saved, tmp_path):
    dense, _ = saved
    state = {name: value for name, value in dense.state_dict().items() if "mlp.0" not in name and name != "head.weight"}
    file = save(tmp_path / "part.safetensors", {**state, "mlp.9.weight": torch.zeros(1)})
    with pytest.raises(loom.ArgumentError) as caught:
        loom.parallelize(on_meta(), Mesh(tp=2), "fsdp", weights=file)
    assert str(caught.value).splitlines()[0] == f"{file} lacks 2 tensors of this Net"
    assert "  missing  mlp.0.weight, mlp.0.bias\n  files    mlp.9.weight\n" in str(caught.value)


def test_another_shape_in_a_file_is_refused(saved, tmp_path):
    dense, _ = saved
    state = dense.state_dict() | {"mlp.0.bias": torch.zeros(3)}
    with pytest.raises(loom.ShapeError) as caught:
        loom.parallelize(on_meta(), Mesh(tp=2), "fsdp", weights=save(tmp_path / "other.safetensors", state))
    assert str(caught.value) == (
        "'mlp.0.bias' has the shape [3] in the files and [16] in the module\n"
        "  fix  build the module with the configuration that the files were written with"
    )


def test_weights_and_no_data_do_not_go_together(saved):
    with pytest.raises(loom.ArgumentError, match=r"device='meta' and weights=.* do not go together here"):
        loom.parallelize(on_meta(), Mesh(tp=2), "fsdp", weights=saved[1], device="meta")


# Processes


def test_two_processes_make_the_model_that_one_makes():
    told = ranks.run(2, "model_ranks:made", "3")
    expected = made("3")
    for values in told:
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def wide() -> nn.Module:
    return nn.Linear(1024, 1024, bias=False)


@pytest.mark.parametrize("way", ["initialisers", "files"])
def test_a_process_needs_memory_for_its_part_of_a_model_and_two_tensors(way, tmp_path):
    """A model of 64 MB on two processes."""
    size, tensor = 64 * 2**20, 4 * 2**20
    state = {f"{place}.{name}": value for place in range(16) for name, value in wide().state_dict().items()}
    file = save(tmp_path / "wide.safetensors", state)
    for used in ranks.run(2, "model_ranks:memory_used", way, str(file), "fsdp"):
        assert used["held"] == size // 2
        assert size // 2 <= used["peak"] < size // 2 + 3 * tensor, used
    for used in ranks.run(2, "model_ranks:memory_used", way, str(file), "data"):
        assert used["held"] == size and used["peak"] >= size, used


# Public models


@pytest.mark.parametrize("name", [each for each in PUBLIC if each != "clip"])
@pytest.mark.xdist_group("models")
@pytest.mark.slow
@MARKS[-1]
def test_a_public_model_on_meta_is_the_same_on_every_mesh_and_has_its_buffers(name):
    found = []
    for mesh, plan in (("2x4", "tensor"), ("3", "fsdp")):
        torch.manual_seed(0)
        found.append(tensors(loom.parallelize(build_on_meta(name), model_matrix.open_mesh(mesh), plan)))
    first, second = found
    assert all(torch.equal(second[key], value) for key, value in first.items())
    assert all(torch.equal(first[key], value) for key, value in PUBLIC[name]().named_buffers())


@pytest.mark.xdist_group("models")
@pytest.mark.slow
@MARKS[-1]
def test_a_parameter_that_transformers_does_not_initialise_is_refused():
    with pytest.raises(loom.ArgumentError, match="no initialiser of this CLIPModel on meta writes logit_scale"):
        loom.parallelize(build_on_meta("clip"), Mesh(tp=2), "data")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "clip"])
@pytest.mark.xdist_group("models")
@pytest.mark.slow
@MARKS[-1]
def test_a_folder_of_transformers_is_read(name, tmp_path):
    dense = PUBLIC[name]()
    dense.save_pretrained(tmp_path, max_shard_size="10KB", save_original_format=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = loom.parallelize(build_on_meta(name), Mesh(dp=2, tp=4), "fsdp+tensor", weights=tmp_path)
    found = tensors(model)
    assert all(torch.equal(found[key], value) for key, value in tensors(dense).items())


def test_a_plan_of_a_module_on_meta_can_be_checked():
    assert Plan({"mlp.0.weight": "tp=S(0)"}).check(on_meta()).parameters["mlp.0.weight"]
