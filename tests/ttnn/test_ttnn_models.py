"""Models in TTNN's spelling on meshes of several shapes equal torch: MLPs in three ways, a decoder layer, a CNN."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interpreters
import meshloom as loom
from meshloom import ttnn
from meshloom.ttnn.model_preprocessing import preprocess_model_parameters
from meshloom.ttnn.pipeline import PipelineConfig, create_pipeline_from_config
from test_examples import ENVIRONMENT, ROOT
from ttnn_cnn import create_model, create_model_configs, create_preprocessor, made

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from ttnn_decoder import Config, Decoder, Layer, sequences
from ttnn_mlp import WAYS, Weights, correlation, hybrid, reference

SHAPES = [(1, 8), (2, 4), (8, 4)]
ENOUGH = 0.999


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh; the one of 8x4 on a Galaxy, as the environment says."""
    if request.param == (8, 4):
        monkeypatch.setenv("MESHLOOM_SYSTEM", "Galaxy")
    with ttnn.create_mesh_device(ttnn.MeshShape(*request.param)) as opened:
        yield opened


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("way", WAYS)
def test_an_mlp_in_bfloat16_is_torchs_in_every_way(mesh, way):
    x, weights = inputs(torch.bfloat16), Weights.draw(128, 256, torch.bfloat16)
    assert correlation(WAYS[way](x, weights, mesh), reference(x, weights)) > ENOUGH


@pytest.mark.parametrize("way", WAYS)
def test_an_mlp_in_float32_is_torchs_up_to_rounding(mesh, way):
    x, weights = inputs(torch.float32), Weights.draw(128, 256, torch.float32)
    torch.testing.assert_close(WAYS[way](x, weights, mesh), reference(x, weights), rtol=1e-4, atol=1e-5)


def test_terms_that_are_not_summed_are_caught(mesh, monkeypatch):
    x, weights = inputs(torch.bfloat16), Weights.draw(128, 256, torch.bfloat16)
    monkeypatch.setattr(ttnn, "all_reduce", lambda tensor, **options: first_term(tensor))
    assert correlation(hybrid(x, weights, mesh), reference(x, weights)) < 0.9


def first_term(tensor: Any) -> Any:
    """A tensor of partial sums with a label that says that they are the sum."""
    label = tensor.tensor_topology()
    kept = [
        ttnn.PlacementReplicate() if isinstance(each, ttnn.PlacementPartial) else each for each in label.placements()
    ]
    tensor.update_tensor_topology(label.with_placements(kept))
    return tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_decoder_layer_reads_a_prompt_and_then_tokens_as_torch_does(mesh, dtype):
    layer = Layer(Config(), dtype)
    x = sequences(layer.config, users=8, length=19, dtype=dtype)
    expected = layer.reference(x)
    decoder = Decoder(layer, mesh, users=8)
    with loom.record() as log:
        found = [decoder.prefill(x[:, :16])]
    assert log.kinds() == {"all_reduce": 2}
    found += [decoder.decode(x[:, position], position)[:, None] for position in (16, 17, 18)]
    together = torch.cat(found, 1)
    if dtype is torch.float32:
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
    for position in range(19):
        assert correlation(together[:, position], expected[:, position]) > ENOUGH


def test_a_decoder_that_forgets_its_cache_is_caught():
    layer = Layer(Config())
    x = sequences(layer.config, users=8, length=17)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
        decoder = Decoder(layer, mesh, users=8)
        assert correlation(decoder.decode(x[:, 16], 16), layer.reference(x)[:, 16]) < ENOUGH


# a CNN through a pipeline


@pytest.mark.parametrize(
    "config",
    [PipelineConfig(use_trace=False), PipelineConfig(use_trace=True), PipelineConfig(True, 2, True)],
    ids=["eager", "traced", "two queues"],
)
def test_a_small_cnn_goes_through_a_pipeline_on_two_devices(config):
    reference_model, dram = made(), ttnn.DRAM_MEMORY_CONFIG
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2), num_command_queues=2) as pair:
        parameters = preprocess_model_parameters(
            initialize_model=lambda: reference_model,
            custom_preprocessor=create_preprocessor(pair, mesh_mapper=ttnn.ReplicateTensorToMesh(pair)),
            device=None,
        )
        model = create_model(create_model_configs(parameters, 8, 8, 2), pair)
        pictures = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        cut = ttnn.ShardTensorToMesh(pair, dim=0)
        tensors = [ttnn.from_torch(each, dtype=ttnn.bfloat16, mesh_mapper=cut) for each in pictures]
        pipeline = create_pipeline_from_config(config, model, pair, dram, dram, dram)
        outputs = pipeline.compile(tensors[0]).enqueue(tensors).pop_all()
        for output, given in zip(outputs, pictures, strict=True):
            assert correlation(ttnn.to_torch(output).reshape(4, -1), reference_model(given).detach()) > ENOUGH
        pipeline.cleanup()


# the examples as a user runs them


def run(name: str, *arguments: str, **environment: str) -> str:
    done = interpreters.run([str(ROOT / "examples" / name), *arguments], {**ENVIRONMENT, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["ttnn_mlp.py", "ttnn_decoder.py"])
def test_the_examples_run_on_a_galaxy(name):
    printed = run(name, "--mesh", "8x4", MESHLOOM_SYSTEM="Galaxy")
    assert "MeshDevice(8x4 grid, 32 devices)" in printed and printed.count("PCC 0.9999") >= 4


@pytest.mark.parametrize("name", ["ttnn_mlp.py", "ttnn_decoder.py"])
def test_the_examples_say_what_they_take(name):
    assert "--mesh" in run(name, "--help")
    assert "from meshloom import ttnn" in (ROOT / "examples" / name).read_text()


def test_a_galaxy_has_32_devices_and_no_more(monkeypatch):
    monkeypatch.setenv("MESHLOOM_SYSTEM", "Galaxy")
    with pytest.raises(RuntimeError, match="requires 64 devices, but only 32"):
        ttnn.open_mesh_device(ttnn.MeshShape(8, 8))
