"""Model preprocessing: what becomes of modules, who is asked, where tensors lie, and what caches keep."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.model_preprocessing import (
    ParameterDict,
    ParameterList,
    convert_torch_model_to_ttnn_model,
    fold_batch_norm2d_into_conv2d,
    infer_ttnn_module_args,
    make_parameter_dict,
    preprocess_linear_bias,
    preprocess_linear_weight,
    preprocess_model,
    preprocess_model_parameters,
    preprocess_remaining_children_and_parameters,
)

BF16 = ttnn.bfloat16


@pytest.fixture
def mesh() -> Iterator[Any]:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    yield device
    ttnn.close_mesh_device(device)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.act = torch.nn.ReLU()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 8)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.ReLU())


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def values(tensor: Any) -> torch.Tensor:
    return ttnn.to_torch(tensor).float()


def test_known_modules_are_converted_in_their_way_and_others_parameter_by_parameter() -> None:
    model = net()
    parameters = preprocess_model_parameters(initialize_model=lambda: model)
    block, source = parameters.blocks[1], model.blocks[1]
    found = {
        "fc.weight": (block.fc.weight, source.fc.weight.T, ttnn.TILE_LAYOUT),
        "fc.bias": (block.fc.bias, source.fc.bias.reshape(1, -1), ttnn.TILE_LAYOUT),
        "norm.weight": (block.norm.weight, source.norm.weight.reshape(1, -1), ttnn.TILE_LAYOUT),
        "embed": (parameters.embed.weight, model.embed.weight, ttnn.ROW_MAJOR_LAYOUT),
        "scale": (block.scale, source.scale, ttnn.ROW_MAJOR_LAYOUT),
        "head": (parameters.head[0].weight, model.head[0].weight.T, ttnn.TILE_LAYOUT),
    }
    for made, wanted, layout in found.values():
        assert made.dtype is BF16 and made.layout is layout and made.device() is None
        assert torch.equal(values(made), wanted.detach().bfloat16().float())
    assert set(parameters.head) == {0} and "act" not in block  # digits are numbers, empty children are left out
    assert not torch.equal(values(block.fc.weight), values(parameters.blocks[0].fc.weight))


def test_dtypes_of_plain_parameters_follow_the_table() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, dtype in {"a": torch.float64, "b": torch.int64, "c": torch.int32, "d": torch.uint8}.items():
                self.register_parameter(name, torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False))

    found = convert_torch_model_to_ttnn_model(Odd(), name="")
    assert [found[each].dtype for each in "abcd"] == [BF16, ttnn.uint32, ttnn.int32, ttnn.uint8]


def test_what_is_not_to_be_converted_stays_torch_with_linear_weights_transposed() -> None:
    model, asked = net(), []

    def convert_to_ttnn(module: torch.nn.Module, full_name: str) -> bool:
        asked.append(full_name)
        return not full_name.startswith("net.blocks.0")

    parameters = preprocess_model_parameters(
        initialize_model=lambda: model, convert_to_ttnn=convert_to_ttnn, prefix="net"
    )
    kept = parameters.blocks[0].fc.weight
    assert isinstance(kept, torch.Tensor) and torch.equal(kept, model.blocks[0].fc.weight.T)
    assert isinstance(parameters.blocks[1].fc.weight, ttnn.Tensor)
    assert {"net", "net.blocks.0.fc", "net.head.0"} <= set(asked)


def test_row_116_a_custom_preprocessor_is_asked_for_every_module_and_its_answer_stands_for_it() -> None:
    model, asked = net(), []

    def custom(module: torch.nn.Module, name: str, ttnn_module_args: Any) -> dict[str, Any]:
        asked.append(name)
        return {"mine": {"value": 7}} if isinstance(module, Block) else {}

    parameters = preprocess_model_parameters(initialize_model=lambda: model, custom_preprocessor=custom)
    assert parameters.blocks[0].mine.value == 7 and set(parameters.blocks[0]) == {"mine"}
    assert parameters.embed.weight.shape == (5, 8)
    assert "blocks.0" in asked and "head.0" in asked and "blocks.0.fc" not in asked  # all of a module was answered


@pytest.mark.parametrize("custom", [lambda model, name: {}, lambda model, name, convert_to_ttnn: {},
                                    lambda model, name, ttnn_module_args, convert_to_ttnn: {}])  # fmt: skip
def test_custom_preprocessors_take_two_to_four_arguments(custom: Any) -> None:
    found = preprocess_model_parameters(initialize_model=net, custom_preprocessor=custom)
    assert found.head[0].weight.shape == (8, 4)


def test_custom_preprocessors_with_other_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match="custom_preprocessor takes 1 arguments"):
        preprocess_model_parameters(initialize_model=net, custom_preprocessor=lambda model: {})
    with pytest.raises(RuntimeError, match="an argument 'device' that nobody gives"):
        preprocess_model_parameters(initialize_model=net, custom_preprocessor=lambda model, name, device: {})


def test_children_that_were_done_by_hand_are_left_out_of_the_rest() -> None:
    block = net().blocks[0]
    rest = preprocess_remaining_children_and_parameters(block, already_preprocessed_children=("fc", "scale"))
    assert set(rest) == {"norm"}


def test_row_117_parameters_are_there_by_name_and_lie_as_they_were_mapped(mesh: Any) -> None:
    with ttnn.distribute(ttnn.ReplicateTensorToMesh(mesh)):
        parameters = preprocess_model_parameters(initialize_model=net, device=mesh)
    weight = parameters.blocks[0].fc.weight
    assert weight.device() is mesh and weight.shape == (8, 16)
    assert weight.tensor_topology().placements() == [ttnn.PlacementReplicate()]
    with ttnn.distribute(ttnn.ShardTensorToMesh(mesh, dim=-1)):
        cut = preprocess_model_parameters(initialize_model=lambda: torch.nn.Linear(8, 16).eval(), device=mesh)
    assert cut.weight.shape == (8, 8) and cut.bias.shape == (1, 8)
    mapper = ttnn.ShardTensorToMesh(mesh, dim=1)
    linear = torch.nn.Linear(8, 16)
    assert preprocess_linear_weight(linear.weight, dtype=BF16, weights_mesh_mapper=mapper).shape == (8, 8)
    assert preprocess_linear_bias(linear.bias, dtype=BF16, weights_mesh_mapper=mapper).shape == (1, 8)


def guide_preprocessor(mesh_device: Any) -> Any:
    """As the multi-device guide writes it."""
    mesh_mapper = ttnn.ReplicateTensorToMesh(mesh_device)

    def preprocessor(model: torch.nn.Module, name: str, ttnn_module_args: Any) -> Any:
        return {
            "weight": ttnn.from_torch(model.weight, dtype=ttnn.bfloat8_b, mesh_mapper=mesh_mapper),
            "bias": ttnn.from_torch(model.bias.reshape(1, 1, 1, -1), dtype=BF16, mesh_mapper=mesh_mapper),
        }

    return preprocessor


def guide_parameters(mesh: Any, model: torch.nn.Linear) -> Any:
    return preprocess_model_parameters(
        initialize_model=lambda: model, custom_preprocessor=guide_preprocessor(mesh), device=None
    )


def test_row_118_a_bias_of_four_dims_is_added_to_every_row(mesh: Any) -> None:
    model = torch.nn.Linear(32, 64).eval()
    parameters = guide_parameters(mesh, model)
    assert parameters.bias.shape == (1, 1, 1, 64)
    x = ttnn.from_torch(torch.zeros(2, 1, 32, 64), device=mesh, layout=ttnn.TILE_LAYOUT)
    found = ttnn.add(x, ttnn.to_layout(parameters.bias, ttnn.TILE_LAYOUT))
    wanted = model.bias.detach().bfloat16().float().expand(2, 1, 32, 64)
    assert torch.equal(values(found), wanted)


def test_row_119_mixed_dtypes_stay_close_to_float32(mesh: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 32).eval()
    parameters = guide_parameters(mesh, model)
    assert (parameters.weight.dtype, parameters.bias.dtype) == (ttnn.bfloat8_b, BF16)
    batch = torch.randn(4, 1, 32, 64)
    rows = ttnn.ShardTensorToMesh(mesh, dim=0)
    x = ttnn.from_torch(batch, dtype=BF16, layout=ttnn.TILE_LAYOUT, mesh_mapper=rows)
    bias = ttnn.to_layout(parameters.bias, ttnn.TILE_LAYOUT)
    output = ttnn.linear(x, parameters.weight, bias=bias, transpose_b=True)
    found = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0)).float()
    both = torch.stack([found.flatten(), model(batch).detach().flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.99
    assert torch.corrcoef(torch.stack([both[0].roll(1), both[1]]))[0, 1] < 0.5  # the measure tells


def test_a_model_in_training_mode_is_told_and_put_into_evaluation_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2).train()
    with caplog.at_level(logging.WARNING):
        preprocess_model_parameters(initialize_model=lambda: model)
    assert not model.training and "training mode" in caplog.text


def test_trees_are_read_by_attribute_and_missing_names_are_key_errors() -> None:
    tree = make_parameter_dict({"a": {"b": 1}, 0: ParameterList([2, 3])})
    assert tree.a.b == 1 and isinstance(tree.a, ParameterDict) and tree[0][1] == 3
    with pytest.raises(KeyError):
        tree.missing  # noqa: B018
    del tree.a
    assert "a" not in tree
    assert 1 in tree[0] and 2 not in tree[0] and -1 not in tree[0]
    assert copy.deepcopy(tree) == tree and pickle.loads(pickle.dumps(tree)) == tree
    assert repr(make_parameter_dict({"w": {"x": torch.ones(2)}})) == "w:\n  x: torch.Tensor [2] torch.float32"


def test_a_folded_batch_norm_needs_running_statistics() -> None:
    conv = torch.nn.Conv2d(3, 4, 3, bias=False)
    norm = torch.nn.BatchNorm2d(4).train()
    norm(torch.randn(8, 4, 5, 5) * 3 + 1)
    norm.eval()
    weight, bias = fold_batch_norm2d_into_conv2d(conv, norm)
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(torch.nn.functional.conv2d(x, weight, bias.flatten()), norm(conv(x)))
    with pytest.raises(RuntimeError, match="must have track_running_stats=True"):
        fold_batch_norm2d_into_conv2d(conv, torch.nn.BatchNorm2d(4, track_running_stats=False))


# modules that a run meets


def pictures() -> torch.nn.Module:
    torch.manual_seed(2)
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return torch.nn.Sequential(*layers, torch.nn.Conv2d(8, 4, 1)).eval()


def test_a_run_shows_the_arguments_of_convolutions_and_poolings() -> None:
    args = infer_ttnn_module_args(model=pictures(), run_model=lambda m: m(torch.randn(2, 3, 8, 8)))
    assert (args[0].in_channels, args[0].batch_size, args[0].input_height, args[0].padding) == (3, 2, 8, (1, 1))
    assert (args[2].channels, args[2].kernel_size) == (8, (2, 2)) and args[3].input_width == 4


def test_convolutions_and_poolings_become_objects_to_call(mesh: Any) -> None:
    model, batch = pictures(), torch.randn(2, 3, 8, 8)
    with ttnn.distribute(ttnn.ReplicateTensorToMesh(mesh)):
        parameters = preprocess_model(initialize_model=lambda: model, run_model=lambda m: m(batch[:1]), device=mesh)
    rows = ttnn.ShardTensorToMesh(mesh, dim=0)
    x = ttnn.from_torch(batch.permute(0, 2, 3, 1).contiguous(), dtype=BF16, device=mesh, mesh_mapper=rows)
    found = parameters[3](parameters[2](ttnn.relu(parameters[0](x))))
    output = ttnn.to_torch(ttnn.to_layout(found, ttnn.ROW_MAJOR_LAYOUT), mesh_composer=ttnn.ConcatMeshToTensor(dim=0))
    wanted = model(batch).detach().permute(0, 2, 3, 1)
    torch.testing.assert_close(output.float().reshape(wanted.shape), wanted, atol=0.05, rtol=0.05)


# caches


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with ttnn.manage_config("enable_model_cache", True), ttnn.manage_config("model_cache_path", tmp_path):
        yield tmp_path


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (dict, list)):
        pairs = a.items() if isinstance(a, dict) else enumerate(a)
        return type(a) is type(b) and len(a) == len(b) and all(same(value, b[key]) for key, value in pairs)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a.dtype is b.dtype and a.layout is b.layout and torch.equal(values(a), values(b))


def test_a_cache_gives_the_same_tree_without_the_model(cache: Path) -> None:
    def keep(module: torch.nn.Module, name: str) -> bool:
        return not name.startswith("head")

    made = preprocess_model_parameters(model_name="org/net", version="1", initialize_model=net, convert_to_ttnn=keep)
    assert (cache / "org_net" / "version.txt").read_text() == "1"
    found = preprocess_model_parameters(model_name="org/net", version="1")
    assert same(made, found) and isinstance(found.blocks, ParameterList) and 0 in found.head
    other = preprocess_model_parameters(initialize_model=lambda: Net().eval(), convert_to_ttnn=keep)
    assert not same(made, other)  # the comparison tells other weights


def test_another_version_is_made_again_and_a_missing_cache_asks_for_the_model(cache: Path) -> None:
    made = []

    def initialize() -> torch.nn.Module:
        made.append(1)
        return torch.nn.Linear(2, 2).eval()

    for version in ("1", "1", "2"):
        preprocess_model_parameters(model_name="m", version=version, initialize_model=initialize)
    assert len(made) == 2
    with pytest.raises(RuntimeError, match='Please provide "initialize_model" argument'):
        preprocess_model_parameters(model_name="m", version="3")
    with pytest.raises(RuntimeError, match='Please provide "initialize_model" argument'):
        preprocess_model_parameters()


def test_nothing_is_kept_without_a_name_or_with_the_cache_off(tmp_path: Path) -> None:
    with ttnn.manage_config("model_cache_path", tmp_path):
        preprocess_model_parameters(model_name="m", version="1", initialize_model=net)
        with ttnn.manage_config("enable_model_cache", True):
            preprocess_model_parameters(initialize_model=net)
    assert list(tmp_path.iterdir()) == []


def test_cached_modules_can_be_called(cache: Path, mesh: Any) -> None:
    batch = torch.randn(1, 3, 8, 8)
    run = {"model_name": "p", "version": "1", "run_model": lambda m: m(batch)}
    x = ttnn.from_torch(batch.permute(0, 2, 3, 1).contiguous(), dtype=BF16, device=mesh)
    with ttnn.distribute(ttnn.ReplicateTensorToMesh(mesh)):
        made = preprocess_model(initialize_model=pictures, device=mesh, **run)
    found = preprocess_model(device=mesh, **run)
    assert torch.equal(values(made[0](x)), values(found[0](x))) and repr(found[2]) == repr(made[2])


def test_a_cache_whose_version_is_no_text_is_made_again(cache: Path) -> None:
    def made() -> Any:
        return preprocess_model_parameters(model_name="m", version="1", initialize_model=net)

    made()
    (cache / "m" / "version.txt").write_bytes(b"\x80\x04")
    made()
    assert (cache / "m" / "version.txt").read_bytes() == b"1"


@pytest.mark.parametrize("harm", ["cut", "empty", "pickle", "index", "dtype", "size", "gone"])
def test_a_cache_that_is_cut_or_not_ours_is_refused_and_never_unpickled(cache: Path, harm: str) -> None:
    preprocess_model_parameters(
        model_name="m", version="1", initialize_model=net, convert_to_ttnn=lambda module, name: "head" not in name
    )
    folder = cache / "m"
    bad = folder / "index.json" if harm in ("index", "dtype", "size") else sorted(folder.glob("*.npy"))[0]
    if harm in ("dtype", "size"):
        other = {"dtype": "nonsense", "size": "float64"}[harm]
        bad.write_text(bad.read_text().replace('"dtype": "float32"', f'"dtype": "{other}"'))
    elif harm == "empty":
        bad.write_bytes(b"")
    elif harm == "cut":
        bad.write_bytes(bad.read_bytes()[:-4])
    elif harm == "gone":
        bad.unlink()
    else:
        bad.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(RuntimeError, match="cannot be read"):
        preprocess_model_parameters(model_name="m", version="1")


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", 5])
def test_a_model_name_that_leaves_the_cache_is_refused(cache: Path, name: Any) -> None:
    with pytest.raises(ArgumentError, match="names no folder"):
        preprocess_model_parameters(model_name=name, version="1", initialize_model=net)
    assert not list(cache.iterdir())


def _indexed(cache: Path, index: str) -> None:
    folder = cache / "m"
    folder.mkdir()
    (folder / "version.txt").write_text("1")
    (folder / "index.json").write_text(index)


@pytest.mark.parametrize("kind", ["ttnn", "torch"])
@pytest.mark.parametrize("name", ["../secret{}", "../../x{}", "a/b{}", "{folder}/secret{}", "..", ".", "", None, 3, []])
def test_an_index_names_files_of_its_folder_only(cache: Path, kind: str, name: Any) -> None:
    numpy.save(cache / "secret.npy", numpy.arange(3))
    ttnn.dump_tensor(cache / "secret.tensorbin", ttnn.from_torch(torch.ones(3)))
    if isinstance(name, str):
        name = name.format({"ttnn": ".tensorbin", "torch": ".npy"}[kind], folder=cache)
    _indexed(cache, json.dumps({"dict": [["w", {kind: name, "dtype": "int64"}]]}))
    with pytest.raises(OperandError, match="is not the name of a file in the folder"):
        preprocess_model_parameters(model_name="m", version="1")


@pytest.mark.parametrize(
    "index",
    ['{"list":[' * 20_000, "[" * 100_000, "3", "null", '"dict"', "{}", '{"dict": 5}', '{"dict": [[[], {"value": 1}]]}',
     '{"list": [{"ttnn": "missing.tensorbin"}]}', '{"conv2d": {"a": {"dtype": []}}, "weight": 1}', "9" * 5000],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(cache: Path, index: str) -> None:
    _indexed(cache, index)
    with pytest.raises(OperandError, match=r"the model cache in .* cannot be read"):
        preprocess_model_parameters(model_name="m", version="1")


@pytest.mark.parametrize("shape", ["(10000000000000,)", "(1, -5)", "(2,)", "()", "(" * 200 + ")" * 200])
def test_an_array_that_promises_more_than_its_file_has_is_refused(cache: Path, shape: str) -> None:
    _indexed(cache, json.dumps({"torch": "w.npy", "dtype": "int32"}))
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    (cache / "m" / "w.npy").write_bytes(start + bytes(12))
    with pytest.raises(OperandError, match=r"the model cache in .* cannot be read"):
        preprocess_model_parameters(model_name="m", version="1")


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)
