"""What torch and safetensors put around a model: files, scalers, averages, parametrizations, collating, calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import meshloom as loom
from library_checks import check_equal, check_gradients, check_on_mesh, check_states, dense
from library_models import IS_DENSE, LAYOUTS, MARKS, both, llama, put, seeded, share

pytestmark = MARKS
ALL = pytest.mark.parametrize("layout", LAYOUTS)
BOTH_MESHES = pytest.mark.parametrize("layout", ["sharded", "uneven"])


def network() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


# safetensors


@ALL
def test_a_file_of_safetensors_has_the_values_of_dense(layout, tmp_path):
    from safetensors.torch import load_file, save_file

    model, ours = both(network(), layout)
    save_file(ours.state_dict(), tmp_path / "ours.safetensors")
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    check_states(load_file(tmp_path / "ours.safetensors"), model.state_dict(), 0.0)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "dense.safetensors").read_bytes()


@BOTH_MESHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_file_of_safetensors_keeps_dtype_and_shape(layout, dtype, tmp_path):
    from safetensors.torch import load_file, save, save_file

    values = {"even": torch.arange(24).view(8, 3).to(dtype), "odd": torch.arange(7).to(dtype)}
    on_mesh = {name: share(value, layout) for name, value in values.items()}
    save_file(on_mesh, tmp_path / "values.safetensors")
    found = load_file(tmp_path / "values.safetensors")
    for name, value in values.items():
        assert found[name].dtype == dtype and torch.equal(found[name], value)
    assert save(on_mesh) == save(values)


@BOTH_MESHES
def test_a_view_of_a_tensor_is_saved_with_its_own_values(layout, tmp_path):
    """Transposed, sliced and computed: what is stored differs from what it means."""
    from safetensors.torch import load_file, save_file

    x = torch.arange(40.0).view(8, 5)
    y = share(x, layout)
    made = {"computed": y * 2 + 1, "turned": y.T.contiguous(), "cut": y[1:4].clone(), "sum": y.sum(0)}
    save_file(made, tmp_path / "views.safetensors")
    found = load_file(tmp_path / "views.safetensors")
    expected = {"computed": x * 2 + 1, "turned": x.T, "cut": x[1:4], "sum": x.sum(0)}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@BOTH_MESHES
def test_a_model_is_saved_and_loaded_by_name(layout, tmp_path):
    from safetensors.torch import load_model, save_model

    model, ours = both(llama(), layout)  # tied weights: save_model writes them once
    save_model(ours, str(tmp_path / "model.safetensors"))
    for p in ours.parameters():
        p.data.zero_()
    assert load_model(ours, str(tmp_path / "model.safetensors")) == (set(), [])
    check_states(ours.state_dict(), model.state_dict(), 0.0)
    check_on_mesh(ours)


@ALL
def test_the_memory_of_a_view_is_a_part_of_that_of_its_base(layout):
    """Savers compare the first and the last address of tensors to find out which of them share memory."""
    x = share(torch.arange(40.0).view(8, 5), layout)
    first, size = x.data_ptr(), x.element_size()
    assert x.view(-1)[-1].data_ptr() == first + 39 * size
    assert x[2].data_ptr() == x[2:].data_ptr() == x.narrow(0, 2, 3).data_ptr() == first + 10 * size
    assert x[2].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_tied_tensors_share_a_storage_and_no_others_do(tmp_path):
    from safetensors.torch import save_file

    one = nn.Parameter(torch.ones(4, 3))
    ours = put(nn.ParameterDict({"a": one, "b": one, "c": nn.Parameter(torch.ones(4, 3))}), "uneven")
    addresses = [ours[name].untyped_storage().data_ptr() for name in "abc"]
    assert addresses[0] == addresses[1] != addresses[2]
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(dict(ours.items()), tmp_path / "tied.safetensors")


# torch.save


@ALL
def test_a_state_that_torch_saved_is_the_one_it_loads(layout, tmp_path):
    model, ours = both(network(), layout)
    optimizer = torch.optim.AdamW(ours.parameters())
    step(ours, optimizer, share(inputs(), layout))
    torch.save({"model": ours.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    again = put(model, layout)
    found = torch.load(tmp_path / "state.pt")
    again.load_state_dict(found["model"])
    other = torch.optim.AdamW(again.parameters())
    other.load_state_dict(found["optimizer"])
    for each, moved in ((ours, optimizer), (again, other)):
        step(each, moved, share(inputs(1), layout))
    check_states(again.state_dict(), ours.state_dict(), 0.0)


# scalers


@ALL
def test_a_scaler_steps_as_with_the_dense_model(layout):
    model, ours = both(network(), layout)
    found = [scaled_steps(each, batch) for each, batch in ((model, inputs()), (ours, share(inputs(), layout)))]
    assert found[0] == found[1] == [1024.0, 512.0, 512.0, 1024.0]
    check_gradients(ours, model)
    check_states(ours.state_dict(), model.state_dict())


def scaled_steps(model: Any, batch: Any) -> list[float]:
    """The scales of four steps; the second one overflows and must be left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        loss = model(batch).square().mean() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@BOTH_MESHES
def test_a_scaler_under_autocast_trains_as_the_dense_model(layout):
    model, ours = both(network(), layout)
    for each, batch in ((model, inputs()), (ours, share(inputs(), layout))):
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    check_states(ours.state_dict(), model.state_dict(), 2e-2)  # bfloat16 has 8 bits


# averages


AVERAGES = {
    "of all": {},
    "of all, in lists": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "exponential, in lists": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "of one's own": {"avg_fn": lambda average, now, count: 0.7 * average + 0.3 * now},
}


@pytest.mark.parametrize("kind", AVERAGES)
@BOTH_MESHES
def test_an_averaged_model_is_the_average_of_dense(kind, layout):
    pairs = []
    for each, batch in zip(both(network(), layout), (inputs(), share(inputs(), layout)), strict=True):
        averaged = AveragedModel(each, **AVERAGES[kind])
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        schedule = SWALR(optimizer, swa_lr=0.05)
        for _ in range(3):
            step(each, optimizer, batch)
            averaged.update_parameters(each)
            schedule.step()
        pairs.append((averaged, averaged(batch)))
    (expected, value), (found, ours) = pairs
    check_states(found.state_dict(), expected.state_dict())
    check_equal(ours, value)
    check_on_mesh(found)


def test_statistics_of_an_averaged_model_are_those_of_dense():
    with seeded():
        model, ours = both(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), "sharded")
    for each, placed in ((model, lambda value: value), (ours, lambda value: share(value, "sharded"))):
        update_bn([placed(inputs(seed)) for seed in range(3)], each)
    check_states(ours.state_dict(), model.state_dict())


# parametrizations


def weight_normed(layer: nn.Linear) -> nn.Module:
    return parametrizations.weight_norm(layer)


def orthogonal(layer: nn.Linear) -> nn.Module:
    return parametrizations.orthogonal(layer)


def orthogonal_by_cayley(layer: nn.Linear) -> nn.Module:
    return parametrizations.orthogonal(layer, orthogonal_map="cayley")


def spectral_normed(layer: nn.Linear) -> nn.Module:
    return parametrizations.spectral_norm(layer)


PARAMETRIZED = pytest.mark.parametrize(
    "parametrized", [weight_normed, orthogonal, orthogonal_by_cayley, spectral_normed], ids=lambda each: each.__name__
)


@PARAMETRIZED
@BOTH_MESHES
def test_a_parametrized_layer_on_a_mesh_trains_as_the_dense_one(parametrized, layout):
    with seeded():
        model, ours = both(parametrized(nn.Linear(6, 6)), layout)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for each, batch in ((model, x), (ours, share(x, layout))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            step(each, optimizer, batch)
    check_gradients(ours, model)
    check_equal(ours.weight, model.weight, 1e-4)


@pytest.mark.parametrize("parametrized", [weight_normed, orthogonal], ids=lambda each: each.__name__)
@BOTH_MESHES
def test_a_layer_that_is_on_a_mesh_can_be_parametrized(parametrized, layout):
    with seeded():
        model, ours = both(nn.Linear(6, 6), layout)
    weight = dense(model.weight).clone()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for each, batch in ((model, x), (ours, share(x, layout))):
        step(parametrized(each), torch.optim.SGD(each.parameters(), lr=0.1), batch)
    check_equal(ours.weight, model.weight, 1e-4)
    assert not torch.equal(dense(ours.weight), weight)
    check_on_mesh(ours)
    parametrize.remove_parametrizations(ours, "weight")
    parametrize.remove_parametrizations(model, "weight")
    check_states(ours.state_dict(), model.state_dict(), 1e-4)


# collating and calling


@ALL
def test_samples_on_a_mesh_are_collated_as_dense_ones(layout):
    rows = list(inputs())
    placed = rows if IS_DENSE else [loom.distribute(row, LAYOUTS[layout].mesh) for row in rows]
    samples = [{"x": row, "y": (number, row.sum())} for number, row in enumerate(placed)]
    found = torch.utils.data.default_collate(samples)
    expected = torch.utils.data.default_collate([{"x": row, "y": (i, row.sum())} for i, row in enumerate(rows)])
    check_equal(found["x"], expected["x"])
    check_equal(found["y"][0], expected["y"][0])
    check_equal(found["y"][1], expected["y"][1])


def test_a_data_loader_over_a_tensor_on_a_mesh_gives_its_rows():
    rows = inputs()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(share(rows, "uneven")), batch_size=3)
    check_equal(torch.cat([batch for (batch,) in loader]), rows)


@ALL
def test_a_module_called_with_other_parameters_gives_what_dense_gives(layout):
    model, ours = both(network(), layout)
    found = []
    for each, batch in ((model, inputs()), (ours, share(inputs(), layout))):
        others = {name: (p.detach() * 1.5).requires_grad_() for name, p in each.named_parameters()}
        result = torch.func.functional_call(each, others, (batch,))
        gradients = torch.autograd.grad(result.square().mean(), list(others.values()))
        found.append({"result": result, **dict(zip(others, gradients, strict=True))})
    check_states(found[1], found[0])
    assert all(p.grad is None for p in ours.parameters())


def test_a_copy_of_a_model_is_its_own():
    ours = put(network(), "sharded")
    other = copy.deepcopy(ours)
    step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), share(inputs(), "sharded"))
    check_states(other.state_dict(), network().state_dict(), 0.0)


# what libraries ask of a tensor


@BOTH_MESHES
def test_other_data_may_have_another_shape(layout):
    """What `resize_token_embeddings` does."""
    ours = put(nn.Linear(5, 8), layout)
    other = put(nn.Linear(5, 11), layout)
    ours.weight.data = other.weight.data
    assert tuple(ours.weight.shape) == tuple(ours.weight.detach().shape) == (11, 5)
    check_equal(ours.weight, other.weight, 0.0)
    ours.weight.sum().backward()
    check_equal(ours.weight.grad, torch.ones(11, 5))


@BOTH_MESHES
def test_what_is_on_a_mesh_is_a_tensor_of_torch(layout):
    x, p = share(inputs(), layout), put(network(), layout)[0].weight
    for each in (x, p, x * 2, p * 2, p.detach(), p.data):
        assert isinstance(each, torch.Tensor) and torch.is_tensor(each)
    assert isinstance(p, nn.Parameter) and not isinstance(p * 2, nn.Parameter)
    (p * 2).sum().backward()
    assert isinstance(p.grad, torch.Tensor)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=["foreach", "fused", "default"])
@BOTH_MESHES
def test_an_optimizer_that_works_on_lists_steps_as_with_the_dense_model(options, layout):
    model, ours = both(network(), layout)
    for each, batch in ((model, inputs()), (ours, share(inputs(), layout))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, **options)
        for _ in range(2):
            step(each, optimizer, batch)
            nn.utils.clip_grad_norm_(each.parameters(), 0.1, foreach=options.get("foreach"))
    check_states(ours.state_dict(), model.state_dict())
