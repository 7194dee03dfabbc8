"""Pipelines: every executor gives what torch gives, at stable addresses, and its queues are in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from meshloom import ttnn
from meshloom.errors import RaceError
from meshloom.ttnn import models
from meshloom.ttnn.model_preprocessing import fold_batch_norm2d_into_conv2d, preprocess_model_parameters
from meshloom.ttnn.models import executors
from meshloom.ttnn.pipeline import (
    PipelineConfig,
    create_pipeline_from_config,
    get_memory_config_for_persistent_dram_tensor,
    pipeline,
)

CONFIGS = {
    "ModelExecutor": PipelineConfig(use_trace=False),
    "TracedModelExecutor": PipelineConfig(use_trace=True),
    "MultiCQModelOverlappedInputExecutor": PipelineConfig(use_trace=False, num_command_queues=2),
    "MultiCQTracedModelOverlappedInputExecutor": PipelineConfig(use_trace=True, num_command_queues=2),
    "MultiCQTracedModelPipelinedIOExecutor": PipelineConfig(True, 2, True),
}
TRACED = [name for name in CONFIGS if "Traced" in name]


@pytest.fixture(params=[(1, 2), (2, 4)], ids=["1x2", "2x4"])
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MESHLOOM_CHECK", "races")  # an executor that forgets an event is told
    device = ttnn.open_mesh_device(ttnn.MeshShape(*request.param), num_command_queues=2)
    yield device
    ttnn.close_mesh_device(device)


@pytest.fixture
def pair() -> Iterator[Any]:
    device = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(1, 2), num_command_queues=2)
    yield device
    ttnn.close_mesh_device(device)


def pcc(a: torch.Tensor, b: torch.Tensor) -> float:
    both = torch.stack([a.detach().flatten().float(), b.detach().flatten().float()])
    return float(torch.corrcoef(both)[0, 1])


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp_on(device: Any, torch_model: MLP, *, frees_input: bool = True) -> Callable[[Any], Any]:
    with ttnn.distribute(ttnn.ReplicateTensorToMesh(device)):
        parameters = preprocess_model_parameters(initialize_model=torch_model.eval, device=device)

    def model(x: Any) -> Any:
        hidden = ttnn.linear(x, parameters.up.weight, bias=parameters.up.bias, activation="relu")
        if frees_input:
            ttnn.deallocate(x)
        found = ttnn.linear(hidden, parameters.down.weight, bias=parameters.down.bias)
        ttnn.deallocate(hidden)
        return found

    return model


def host(device: Any, batch: torch.Tensor, layout: Any = ttnn.TILE_LAYOUT) -> Any:
    rows = ttnn.ShardTensorToMesh(device, dim=0)
    found = ttnn.from_torch(batch, dtype=ttnn.bfloat16, layout=layout, mesh_mapper=rows)
    assert found.device() is None
    return found


def pipe(name: str, model: Any, device: Any) -> Any:
    made = create_pipeline_from_config(
        CONFIGS[name], model, device, ttnn.L1_MEMORY_CONFIG, ttnn.DRAM_MEMORY_CONFIG, ttnn.DRAM_MEMORY_CONFIG
    )
    assert type(made.executor).__name__ == name
    return made


def batches(device: Any, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(device.get_num_devices(), 1, 32, 32, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("frees_input", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_executor_gives_what_torch_gives_in_order(mesh: Any, name: str, frees_input: bool) -> None:
    torch_model = MLP()
    inputs = batches(mesh, 5)
    made = pipe(name, mlp_on(mesh, torch_model, frees_input=frees_input), mesh)
    assert made.compile(host(mesh, inputs[0])) is made
    for chosen in (inputs[:2], inputs):
        outputs = made.enqueue([host(mesh, each) for each in chosen]).pop_all()
        assert outputs is made.output_tensors and len(outputs) == len(chosen)
        for output, given in zip(outputs, chosen, strict=True):
            assert output.device() is None
            assert pcc(ttnn.to_torch(output), torch_model(given)) > 0.999
    assert pcc(ttnn.to_torch(outputs[0]), torch_model(inputs[1])) < 0.9  # the oracle tells another input's output
    made.cleanup()


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_go_into_slots_that_were_made_before(pair: Any, name: str) -> None:
    torch_model, inputs = MLP(), batches(pair, 3)
    made = pipe(name, mlp_on(pair, torch_model), pair)
    with pytest.raises(RuntimeError, match="must be compiled before outputs are preallocated"):
        made.preallocate_output_tensors_on_host(3)
    assert made.compile(host(pair, inputs[0])).preallocate_output_tensors_on_host(3) is made
    assert made.preallocated_output_tensors
    first = made.enqueue([host(pair, each) for each in inputs]).pop_all()
    again = made.enqueue([host(pair, each) for each in inputs[1:]]).pop_all()
    assert again[0] is first[0]
    assert pcc(ttnn.to_torch(again[0]), torch_model(inputs[1])) > 0.999
    with pytest.raises(ValueError, match="4 inputs for 3 preallocated output tensors"):
        made.enqueue([host(pair, each) for each in (*inputs, inputs[0])])


@pytest.mark.parametrize("name", TRACED)
def test_addresses_of_a_traces_input_and_output_never_change(pair: Any, name: str) -> None:
    inputs = batches(pair, 4)
    made = pipe(name, mlp_on(pair, MLP()), pair)
    made.compile(host(pair, inputs[0]))
    executor = made.executor

    def addresses() -> tuple[int, ...]:
        tensors = (executor.dram_input_tensor, executor.l1_input_tensor, executor.output)
        return tuple(tensor.buffer_address() for tensor in tensors)

    before = addresses()
    for _ in range(2):
        made.enqueue([host(pair, each) for each in inputs]).pop_all()
        assert addresses() == before
    trace = executor.trace_id
    made.cleanup()
    with pytest.raises(RuntimeError, match="must exist on Mesh device"):
        ttnn.execute_trace(pair, trace)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"MultiCQTracedModelPipelinedIOExecutor"}))
def test_models_may_return_several_tensors(pair: Any, name: str) -> None:
    made = pipe(name, lambda x: [ttnn.add(x, 1.0), (ttnn.multiply(x, 2.0), {"x": ttnn.add(x, 0.0)})], pair)
    given = torch.ones(2, 1, 32, 32)
    made.compile(host(pair, given)).preallocate_output_tensors_on_host(1)
    ((one, (two, named)),) = made.enqueue([host(pair, given * 3)]).pop_all()
    assert [ttnn.to_torch(each).unique().item() for each in (one, two, named["x"])] == [4.0, 6.0, 3.0]
    assert made.output_schema == [None, (None, {"x": None})]


@pytest.mark.parametrize("name", TRACED)
def test_a_pipeline_that_is_compiled_again_lets_go_of_the_trace_before(pair: Any, name: str) -> None:
    made = pipe(name, lambda x: ttnn.add(x, 1.0), pair)
    inputs = host(pair, batches(pair, 1)[0])
    used = []
    for _ in range(3):
        made.compile(inputs)
        used.append([pair.memory_usage(kind)[0, 0].used for kind in ("dram", "l1")])
    assert used[0] == used[1] == used[2]


def test_the_pipelined_executor_takes_one_output_and_two_inputs_at_least(pair: Any) -> None:
    name, given = "MultiCQTracedModelPipelinedIOExecutor", torch.ones(2, 1, 32, 32)
    with pytest.raises(TypeError, match="a model with one output, this one returns list"):
        pipe(name, lambda x: [ttnn.add(x, 1.0)], pair).compile(host(pair, given))
    made = pipe(name, lambda x: ttnn.add(x, 1.0), pair).compile(host(pair, given))
    with pytest.raises(ValueError, match="needs at least 2 inputs at once, not 1"):
        made.enqueue([host(pair, given)])


def test_configurations_that_cannot_be_are_refused(pair: Any) -> None:
    def make(config: PipelineConfig, *memory: Any) -> Any:
        return create_pipeline_from_config(config, lambda x: x, pair, ttnn.L1_MEMORY_CONFIG, *memory)

    dram = ttnn.DRAM_MEMORY_CONFIG
    for config, memory, message in (
        (PipelineConfig(num_command_queues=3), (dram,), "Unsupported pipeline configuration: "),
        (PipelineConfig(False, 2, True), (dram, dram), "requires tracing"),
        (PipelineConfig(), (), "dram_input_memory_config is needed"),
        (PipelineConfig(False, 2), (), "dram_input_memory_config is needed"),
        (PipelineConfig(True, 2, True), (dram,), "dram_output_memory_config is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            make(config, *memory)
    made = make(PipelineConfig(use_trace=False))
    with pytest.raises(ValueError, match="Input tensors must be on host"):
        made.enqueue([ttnn.from_torch(torch.ones(2, 2), device=pair)])
    with pytest.raises(RuntimeError, match="has not been compiled"):
        made.enqueue([ttnn.from_torch(torch.ones(2, 2))])


def test_an_executor_that_forgets_an_event_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_CHECK", "races")
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2), num_command_queues=2)

    class Forgetful(executors.MultiCQModelOverlappedInputExecutor):
        def _hand_over(self) -> None:
            pass

    made = pipeline(Forgetful(lambda x: ttnn.add(x, 1.0), device, ttnn.DRAM_MEMORY_CONFIG, ttnn.L1_MEMORY_CONFIG))
    with pytest.raises(RaceError, match="not ordered after write of tensor"):
        made.compile(host(device, torch.ones(2, 1, 32, 32)))
    ttnn.close_mesh_device(device)


@pytest.mark.parametrize(("shape", "strategy", "shard"), [
    ((1, 1, 64, 48), "WIDTH_SHARDED", [64, 4]),
    ((1, 1, 64, 50), "WIDTH_SHARDED", [64, 5]),
    ((1, 2, 33, 32), "HEIGHT_SHARDED", [6, 32]),
])  # fmt: skip
def test_a_persistent_tensor_is_spread_over_as_many_banks_as_divide_it(shape: Any, strategy: str, shard: Any) -> None:
    layout = getattr(ttnn.TensorMemoryLayout, strategy)
    config = get_memory_config_for_persistent_dram_tensor(shape, layout, ttnn.CoreCoord(12, 1))
    assert config.buffer_type is ttnn.BufferType.DRAM and list(config.shard_spec.shape) == shard
    with pytest.raises(ValueError, match="Unsupported shard strategy"):
        get_memory_config_for_persistent_dram_tensor(
            shape, ttnn.TensorMemoryLayout.BLOCK_SHARDED, ttnn.CoreCoord(12, 1)
        )
    with pytest.raises(ValueError, match="must have one row"):
        get_memory_config_for_persistent_dram_tensor(shape, layout, ttnn.CoreCoord(6, 2))


# the vision model of the guide


class SmallCNN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.conv2 = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


def create_preprocessor(mesh_device: Any, mesh_mapper: Any) -> Callable[..., Any]:
    def preprocessor(model: torch.nn.Module, name: str, ttnn_module_args: Any) -> Any:
        if not isinstance(model, SmallCNN):
            return {}
        weight, bias = fold_batch_norm2d_into_conv2d(model.conv1, model.bn1)

        def put(values: torch.Tensor) -> Any:
            return ttnn.from_torch(values, dtype=ttnn.bfloat16, mesh_mapper=mesh_mapper)

        return {
            "conv1": {"weight": put(weight), "bias": put(bias)},
            "conv2": {"weight": put(model.conv2.weight), "bias": put(model.conv2.bias.reshape(1, 1, 1, -1))},
            "fc": {
                "weight": ttnn.from_torch(
                    model.fc.weight.T, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, mesh_mapper=mesh_mapper
                ),
                "bias": ttnn.from_torch(
                    model.fc.bias.reshape(1, -1), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, mesh_mapper=mesh_mapper
                ),
            },
        }

    return preprocessor


def create_model_configs(parameters: Any, input_height: int, input_width: int, batch_size: int) -> Any:
    first = {"in_channels": 3, "out_channels": 8, "input_height": input_height, "input_width": input_width}
    second = {"in_channels": 8, "out_channels": 16, "input_height": input_height, "input_width": input_width}
    second["stride"] = (2, 2)
    shared = {"kernel_size": (3, 3), "padding": (1, 1), "batch_size": batch_size}
    return [(parameters, {**shared, **first}, {**shared, **second})]


def create_model(configs: Any, mesh_device: Any) -> Callable[[Any], Any]:
    ((parameters, first, second),) = configs

    def model(x: Any) -> Any:
        for layer, options in ((parameters.conv1, first), (parameters.conv2, second)):
            x = ttnn.conv2d(
                input_tensor=x, weight_tensor=layer.weight, bias_tensor=layer.bias, device=mesh_device, **options
            )
            x = ttnn.relu(x)
        batch = first["batch_size"]
        pictures = ttnn.reshape(ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT), (batch, 1, -1, second["out_channels"]))
        means = ttnn.mean(ttnn.to_layout(pictures, ttnn.TILE_LAYOUT), dim=2, keepdim=True)
        return ttnn.linear(means, parameters.fc.weight, bias=parameters.fc.bias)

    return model


def cnn(mesh_device: Any, batch_size: int = 2) -> tuple[SmallCNN, Any]:
    torch.manual_seed(0)
    reference_model = SmallCNN().eval()
    parameters = preprocess_model_parameters(
        initialize_model=lambda: reference_model,
        custom_preprocessor=create_preprocessor(mesh_device, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device)),
        device=None,
    )
    configs = create_model_configs(parameters, 8, 8, batch_size)
    return reference_model, create_model(configs, mesh_device)


def channels_last(batch: torch.Tensor) -> torch.Tensor:
    return batch.permute(0, 2, 3, 1).contiguous()


def test_row_133_a_small_cnn_on_two_devices_equals_torch(pair: Any) -> None:
    reference_model, model = cnn(pair)
    batch_input = torch.randn(2 * pair.get_num_devices(), 3, 8, 8)
    inputs_mapper = ttnn.ShardTensorToMesh(pair, dim=0)
    ttnn_input = ttnn.from_torch(channels_last(batch_input), dtype=ttnn.bfloat16, mesh_mapper=inputs_mapper)
    output = model(ttnn_input)
    output_torch = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0))
    assert pcc(output_torch.reshape(4, 10), reference_model(batch_input)) > 0.99


@pytest.mark.parametrize("name", CONFIGS)
def test_row_134_a_pipeline_compiles_enqueues_and_pops_on_the_mesh(
    pair: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "models", models)
    from models.tt_cnn.tt.executor import ModelExecutor
    from models.tt_cnn.tt.pipeline import create_pipeline_from_config as create

    assert ModelExecutor is executors.ModelExecutor
    reference_model, model = cnn(pair)
    inputs = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    tensors = [host(pair, channels_last(each), ttnn.ROW_MAJOR_LAYOUT) for each in inputs]
    dram = ttnn.DRAM_MEMORY_CONFIG
    made = create(CONFIGS[name], model, pair, ttnn.L1_MEMORY_CONFIG, dram, dram)
    outputs = made.compile(tensors[0]).enqueue(tensors).pop_all()
    for output, given in zip(outputs, inputs, strict=True):
        assert pcc(ttnn.to_torch(output).reshape(4, 10), reference_model(given)) > 0.99
    made.cleanup()


def test_row_135_a_mapper_goes_through_to_the_preprocessor(pair: Any) -> None:
    parameters = preprocess_model_parameters(
        initialize_model=lambda: SmallCNN().eval(),
        custom_preprocessor=create_preprocessor(pair, mesh_mapper=ttnn.ShardTensorToMesh(pair, dim=0)),
        device=None,
    )
    assert parameters.conv1.weight.shape == (4, 3, 3, 3)
    assert parameters.conv1.weight.tensor_topology().placements() == [ttnn.PlacementShard(0)]


def test_row_136_the_models_of_the_guide_build_and_run(pair: Any) -> None:
    _, model = cnn(pair, batch_size=1)
    found = model(host(pair, torch.randn(2, 8, 8, 3), ttnn.ROW_MAJOR_LAYOUT))
    assert found.shape == (1, 1, 1, 10)
