"""The code of the requirements documents runs with only its import changed.

`SNIPPETS` holds that code as it stands there, without its comments. What it leaves open (a model, weights, a batch) is
defined here, as its reader would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshloom as loom
import ttnn_cnn
from meshloom import ttnn
from meshloom.cli import main
from meshloom.runtime import SimulatedClock, VirtualDriver
from meshloom.ttnn import models
from meshloom.ttnn.model_preprocessing import preprocess_model_parameters

IMPORTS = {"import ttnn": "from meshloom import ttnn"}  # all that is changed

SNIPPETS: dict[str, str] = {
    "1 usage": """
import ttnn
import torch

mesh_device = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))

a = torch.randn([4, 1, 64, 64], dtype=torch.bfloat16)
b = torch.randn([1, 1, 64, 128], dtype=torch.bfloat16)

tt_a = ttnn.from_torch(a, device=mesh_device, layout=ttnn.TILE_LAYOUT,
                        mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device))
tt_b = ttnn.from_torch(b, device=mesh_device, layout=ttnn.TILE_LAYOUT,
                        mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device))

output = ttnn.distributed.matmul(tt_a, tt_b)
""",
    "3 mesh": """
import ttnn

mesh_device = ttnn.open_mesh_device(
    mesh_shape=ttnn.MeshShape(1, 2),
    mesh_type=ttnn.MeshType.Ring,
)

num_devices = mesh_device.get_num_devices()
""",
    "3 replicate": """
weights_mesh_mapper = ttnn.ReplicateTensorToMesh(mesh_device)

weight = ttnn.from_torch(
    torch_weight,
    dtype=ttnn.bfloat8_b,
    mesh_mapper=weights_mesh_mapper,
)
""",
    "3 shard": """
inputs_mesh_mapper = ttnn.ShardTensorToMesh(mesh_device, dim=0)

input_tensor = ttnn.from_torch(
    torch_input,
    dtype=ttnn.bfloat16,
    mesh_mapper=inputs_mesh_mapper,
)
""",
    "3 data parallel": """
inputs_mapper = ttnn.ShardTensorToMesh(mesh_device, dim=0)
weights_mapper = ttnn.ReplicateTensorToMesh(mesh_device)

def create_preprocessor_with_mesh(mesh_device):
    mesh_mapper = ttnn.ReplicateTensorToMesh(mesh_device)

    def preprocessor(model, name, ttnn_module_args):
        return {
            "weight": ttnn.from_torch(
                model.weight,
                dtype=ttnn.bfloat8_b,
                mesh_mapper=mesh_mapper,
            ),
            "bias": ttnn.from_torch(
                model.bias.reshape(1, 1, 1, -1),
                dtype=ttnn.bfloat16,
                mesh_mapper=mesh_mapper,
            ),
        }
    return preprocessor

parameters = preprocess_model_parameters(
    initialize_model=lambda: reference_model,
    custom_preprocessor=create_preprocessor_with_mesh(mesh_device),
    device=None,
)

input_tensor = ttnn.from_torch(batch, mesh_mapper=inputs_mapper)
output = model(input_tensor)

output_torch = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0))
""",
    "3 composers": """
composer = ttnn.ConcatMeshToTensor(dim=0)
gathered = ttnn.to_torch(distributed_tensor, mesh_composer=composer)

composer = ttnn.ListMeshToTensor()
tensors_list = ttnn.to_torch(distributed_tensor, mesh_composer=composer)
""",
    "3 memory": """
dram_config = ttnn.create_sharded_memory_config(
    shape=input_shape,
    core_grid=mesh_device.dram_grid_size(),
    strategy=ttnn.ShardStrategy.WIDTH,
)
""",
    "3 synchronize": """
ttnn.synchronize_mesh_device(mesh_device)
""",
    "3 vision": """
from models.tt_cnn.tt.pipeline import PipelineConfig, create_pipeline_from_config

mesh_device = ttnn.open_mesh_device(
    mesh_shape=ttnn.MeshShape(1, 2),
)

inputs_mapper = ttnn.ShardTensorToMesh(mesh_device, dim=0)
weights_mapper = ttnn.ReplicateTensorToMesh(mesh_device)

parameters = preprocess_model_parameters(
    initialize_model=lambda: reference_model,
    custom_preprocessor=create_preprocessor(mesh_device, mesh_mapper=weights_mapper),
    device=None,
)

configs = create_model_configs(parameters, input_height, input_width, batch_size)
model = create_model(configs, mesh_device)

batch_input = torch.randn(batch_size * num_devices, C, H, W)
ttnn_input = ttnn.from_torch(batch_input, mesh_mapper=inputs_mapper)
output = model(ttnn_input)

output_torch = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0))
""",
    "3 cleanup": """
ttnn.close_mesh_device(mesh_device)
""",
    "2 sketch": """
from ttnn import open_mesh_device, create_mesh_buffer, enqueue_mesh_workload, all_reduce, all_gather

mesh = open_mesh_device(shape, device_ids=None)
replicated = create_mesh_buffer(mesh, layout="replicated", global_shape=global_shape)
sharded = create_mesh_buffer(mesh, layout="sharded", global_shape=global_shape, shard_shape=shard_shape)
enqueue_mesh_workload(mesh, workload(mesh, replicated, sharded), blocking=True)
tensor = tensor_on(mesh)
reduced = [all_reduce(tensor, mode=mode) for mode in ("host", "fabric")]
gathered = [all_gather(tensor, mode=mode) for mode in ("host", "fabric")]
""",
}


def run(name: str, namespace: dict[str, Any]) -> None:
    """Run a snippet with its import changed, and nothing else."""
    code = SNIPPETS[name]
    for original, ours in IMPORTS.items():
        code = "\n".join(ours if line == original else line for line in code.splitlines())
    code = code.replace("from ttnn import", "from meshloom.ttnn import")
    exec(compile(code, f"document {name}", "exec"), namespace)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What snippets share; its meshes are closed at the end."""
    monkeypatch.setitem(sys.modules, "models", models)
    namespace: dict[str, Any] = {"torch": torch, "preprocess_model_parameters": preprocess_model_parameters}
    yield namespace
    for value in list(namespace.values()):
        if isinstance(value, ttnn.MeshDevice):
            ttnn.close_mesh_device(value)


@pytest.fixture
def guide(space: dict[str, Any]) -> dict[str, Any]:
    """The third document, up to where a mesh is open."""
    run("3 mesh", space)
    return space


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.detach().float().flatten(), y.detach().float().flatten()]))[0, 1])


def test_row_096_only_imports_are_changed():
    for name, code in SNIPPETS.items():
        changed = [line for line in code.splitlines() if line.startswith(("import ttnn", "from ttnn"))]
        assert len(changed) <= 1, name
    with pytest.raises(NameError):
        run("3 replicate", {"ttnn": ttnn})  # what a snippet leaves open is really taken from around it


def test_row_096_the_usage_of_document_1_runs(space):
    run("1 usage", space)
    assert space["output"].shape == (4, 1, 64, 128)
    parts = [ttnn.to_torch(each) for each in ttnn.get_device_tensors(space["output"])]
    assert len(parts) == 8
    for part in parts:
        assert correlation(part, space["a"].float() @ space["b"].float()) > 0.999


def test_row_107_the_mesh_of_the_guide_is_a_ring_of_two(guide):
    assert guide["num_devices"] == 2
    assert guide["mesh_device"].mesh_type is ttnn.MeshType.Ring


def test_row_111_weights_of_the_guide_are_on_the_host_and_know_their_mesh(guide):
    guide["torch_weight"] = values(64, 32)
    run("3 replicate", guide)
    weight = guide["weight"]
    assert weight.device() is None and weight.dtype is ttnn.bfloat8_b
    assert [tuple(part.shape) for part in ttnn.to_torch(weight, mesh_composer=ttnn.ListMeshToTensor())] == [
        (64, 32)
    ] * 2
    assert correlation(ttnn.to_torch(weight), guide["torch_weight"]) > 0.999


def test_row_113_inputs_of_the_guide_are_cut_at_the_batch(guide):
    guide["torch_input"] = values(8, 16)
    run("3 shard", guide)
    parts = ttnn.to_torch(guide["input_tensor"], mesh_composer=ttnn.ListMeshToTensor())
    assert torch.equal(torch.cat(parts), guide["torch_input"].bfloat16()) and len(parts[0]) == 4


def data_parallel(space: dict[str, Any]) -> torch.Tensor:
    """Run the pattern of the guide around a linear layer; what torch gives for it."""
    torch.manual_seed(0)
    reference = torch.nn.Linear(64, 32)

    def model(x: Any) -> Any:
        parameters, tile = space["parameters"], ttnn.TILE_LAYOUT
        weight, bias = (ttnn.to_layout(each, tile) for each in (parameters.weight, parameters.bias))
        return ttnn.linear(ttnn.to_layout(x, tile), weight, bias=bias, transpose_b=True)

    space.update(reference_model=reference, batch=values(8, 1, 4, 64), model=model)
    run("3 data parallel", space)
    return reference(space["batch"]).detach()


def test_row_115_the_data_parallel_pattern_of_the_guide_runs(guide):
    expected = data_parallel(guide)
    assert guide["output_torch"].shape == expected.shape
    assert correlation(guide["output_torch"], expected) > 0.99


def test_row_104_two_devices_with_the_same_weights_give_what_one_gives(space):
    found = {}
    for devices in (1, 2):
        code = SNIPPETS["3 mesh"].replace("MeshShape(1, 2)", f"MeshShape(1, {devices})")
        exec(code.replace("import ttnn", "from meshloom import ttnn"), space)
        data_parallel(space)
        found[devices] = space["output_torch"]
        labels = [each.tensor_topology().placements() for each in (space["parameters"].weight, space["input_tensor"])]
        ttnn.close_mesh_device(space["mesh_device"])
    assert torch.equal(found[1], found[2])
    assert labels == [[ttnn.PlacementReplicate()], [ttnn.PlacementShard(0)]]


def test_row_120_and_121_the_composers_of_the_guide_run(guide):
    dense = values(6, 4)
    mapper = ttnn.ShardTensorToMesh(guide["mesh_device"], dim=0)
    guide["distributed_tensor"] = ttnn.from_torch(dense, device=guide["mesh_device"], mesh_mapper=mapper)
    run("3 composers", guide)
    assert torch.equal(guide["gathered"], dense)
    assert [len(each) for each in guide["tensors_list"]] == [3, 3]
    assert torch.equal(torch.cat(guide["tensors_list"]), dense)


def test_row_122_the_memory_config_of_the_guide_can_be_used(guide):
    grid = guide["mesh_device"].dram_grid_size()
    guide["input_shape"] = (1, 1, 32, 32 * grid.x * grid.y)
    run("3 memory", guide)
    x = ttnn.from_torch(
        values(*guide["input_shape"]),
        device=guide["mesh_device"],
        layout=ttnn.TILE_LAYOUT,
        memory_config=guide["dram_config"],
    )
    assert x.memory_config().shard_spec.shape == [32, 32]


def test_row_125_and_138_the_guide_synchronizes_and_closes(guide):
    run("3 synchronize", guide)
    run("3 cleanup", guide)
    run("3 mesh", guide)
    guide["torch_input"] = values(8, 16)
    run("3 shard", guide)
    run("3 cleanup", guide)
    with pytest.raises(loom.ClosedError):
        ttnn.relu(guide["input_tensor"])


def test_row_133_the_vision_model_of_the_guide_runs(space):
    reference = ttnn_cnn.made()
    space.update(
        ttnn=ttnn,
        reference_model=reference,
        create_preprocessor=ttnn_cnn.create_preprocessor,
        create_model_configs=ttnn_cnn.create_model_configs,
        create_model=ttnn_cnn.create_model,
        num_devices=2,
        batch_size=2,
        input_height=8,
        input_width=8,
        C=3,
        H=8,
        W=8,
    )
    run("3 vision", space)
    expected = reference(space["batch_input"])
    assert correlation(space["output_torch"].reshape(expected.shape), expected) > 0.99
    made = space["create_pipeline_from_config"](
        space["PipelineConfig"](use_trace=False), space["model"], space["mesh_device"], ttnn.DRAM_MEMORY_CONFIG
    )
    (popped,) = made.compile(space["ttnn_input"].cpu()).enqueue([space["ttnn_input"].cpu()]).pop_all()
    assert torch.equal(ttnn.to_torch(popped), space["output_torch"])


def test_row_096_the_sketch_of_document_2_runs_by_its_names(space):
    ran = []

    def kernel(whole: torch.Tensor, part: torch.Tensor) -> None:
        ran.append(tuple(part.shape))
        part.copy_(whole[: len(part)])

    def workload(mesh: Any, replicated: Any, sharded: Any) -> Any:
        made = ttnn.MeshWorkload()
        made.add_program(None, ttnn.Program(kernel, [replicated], [sharded]))
        return made

    def tensor_on(mesh: Any) -> Any:
        return ttnn.from_torch(dense, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))

    dense = values(8, 4)
    space.update(shape=(1, 4), global_shape=(8, 4), shard_shape=(2, 4), workload=workload, tensor_on=tensor_on)
    run("2 sketch", space)
    assert space["mesh"].get_num_devices() == 4 and ran
    for reduced in space["reduced"]:
        for part in ttnn.get_device_tensors(reduced):
            torch.testing.assert_close(ttnn.to_torch(part), dense.reshape(4, 2, 4).sum(0))
    for gathered in space["gathered"]:
        assert all(torch.equal(ttnn.to_torch(part), dense) for part in ttnn.get_device_tensors(gathered))


# examples and scaling that the documents promise


def test_row_101_a_data_parallel_program_runs_on_4x8():
    x, w = values(64, 32), values(32, 16, seed=1)
    with ttnn.create_mesh_device(ttnn.MeshShape(4, 8)) as mesh:
        a = ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
        b = ttnn.from_torch(w, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
        y = ttnn.linear(a, b, activation="gelu")
        assert mesh.get_num_devices() == 32 and y.shape == (2, 16)
        found = ttnn.to_torch(y, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))
    torch.testing.assert_close(found, torch.nn.functional.gelu(x @ w), rtol=1e-4, atol=1e-4)


def test_row_102_a_column_then_row_parallel_mlp_on_1x8_is_torchs():
    x, up, down = values(32, 64), values(64, 128, seed=1) / 8, values(128, 64, seed=2) / 11
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 8)) as mesh:

        def put(tensor: torch.Tensor, mapper: Any) -> Any:
            return ttnn.from_torch(tensor, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=mapper)

        hidden = ttnn.linear(
            put(x, ttnn.ReplicateTensorToMesh(mesh)), put(up, ttnn.ShardTensorToMesh(mesh, dim=1)), activation="gelu"
        )
        terms = ttnn.matmul(hidden, put(down, ttnn.ShardTensorToMesh(mesh, dim=0)))
        assert terms.tensor_topology().placements() == [ttnn.PlacementPartial()]
        parts = [ttnn.to_torch(each) for each in ttnn.get_device_tensors(ttnn.all_reduce(terms, cluster_axis=1))]
    expected = torch.nn.functional.gelu(x @ up) @ down
    for part in parts:
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


def test_row_126_cards_of_fixed_speed_take_as_long_for_a_batch_eight_times_as_large():
    def rows_per_second(devices: int) -> float:
        clock = SimulatedClock()
        with ttnn.create_mesh_device(ttnn.MeshShape(1, devices), driver=VirtualDriver(clock=clock)) as mesh:
            batch = ttnn.create_mesh_buffer(mesh, "sharded", global_shape=(devices, 4), shard_shape=(1, 4))
            for card in mesh.runtime.cards:
                card.slow_down(launch=0.02)
            for _ in range(10):
                work = ttnn.MeshWorkload()
                work.add_program(None, ttnn.Program(lambda rows: rows.add_(1), updates=[batch]))
                ttnn.enqueue_mesh_workload(mesh, work, blocking=False)
            ttnn.synchronize_mesh_device(mesh)
            return 10 * devices / clock.now()

    assert rows_per_second(1) == pytest.approx(50)
    assert rows_per_second(8) >= 7 * rows_per_second(1)


# differences on purpose, as docs/ttnn.md lists them


def refused(kind: type[Exception], phrase: str, call: Any) -> None:
    with pytest.raises(kind, match=phrase):
        call()


def test_where_the_original_crashes_or_corrupts_there_is_an_error():
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh, ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as other:
        x, gone, host = (ttnn.from_torch(values(32, 32), device=where) for where in (mesh, mesh, None))
        ttnn.deallocate(gone)
        refused(RuntimeError, "not allocated", lambda: ttnn.to_torch(gone))
        refused(RuntimeError, "in the order of their names", lambda: ttnn.copy_host_to_device_tensor(x, host))
        refused(TypeError, "say which", lambda: ttnn.from_torch(values(4).double()))
        refused(RuntimeError, "must be on device", lambda: ttnn.add(host, host))
        elsewhere = ttnn.from_torch(values(32, 32), device=other)
        refused(RuntimeError, "need to be on the same device", lambda: ttnn.add(x, elsewhere))
        cache = ttnn.reshape(x, (1, 1, 32, 32))
        refused(RuntimeError, "position 99 of 32", lambda: ttnn.update_cache(cache, cache, 99))
    refused(RuntimeError, "has been closed", lambda: ttnn.add(x, x))


def test_parts_that_the_original_leaves_undefined_are_zero():
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh:
        x = ttnn.from_torch(torch.arange(1.0, 5), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
        sent = ttnn.point_to_point(x, ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate(1, 1))
        parts = ttnn.to_torch(sent, mesh_composer=ttnn.ListMeshToTensor())
    assert [part.item() for part in parts] == [0, 0, 0, 2]


def test_a_range_lists_its_coordinates():
    first, last = ttnn.MeshCoordinate(0, 0), ttnn.MeshCoordinate(1, 0)
    assert list(ttnn.MeshCoordinateRange(first, last)) == [first, last]


# the checklist of the guide

GOOD = """
import torch
import ttnn
mesh_device = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(1, 2))
weight = ttnn.from_torch(torch.ones(32, 32), layout=ttnn.TILE_LAYOUT, device=mesh_device,
                         mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device))
batch = ttnn.from_torch(torch.ones(8, 32), layout=ttnn.TILE_LAYOUT, device=mesh_device,
                        mesh_mapper=ttnn.ShardTensorToMesh(mesh_device, dim=0))
output = ttnn.linear(batch, weight)
ttnn.synchronize_mesh_device(mesh_device)
result = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0))
ttnn.close_mesh_device(mesh_device)
"""

# What is changed in the good program, and the item that no longer holds.
FAULTS = {
    1: ("MeshShape(1, 2)", "MeshShape(1, 64)"),
    2: ("ReplicateTensorToMesh(mesh_device))", "ShardTensorToMesh(mesh_device, dim=1))"),
    3: ("ShardTensorToMesh(mesh_device, dim=0)", "ReplicateTensorToMesh(mesh_device)"),
    4: ("torch.ones(8, 32)", "torch.ones(7, 32)"),
    5: ("ttnn.to_torch(output,", "ttnn.to_torch(ttnn.all_gather(output, dim=0),"),
    6: ("result = ", "host = output.cpu(blocking=False)\nresult = "),
    7: ("ttnn.close_mesh_device(mesh_device)", ""),
}


@pytest.fixture
def examined(tmp_path, monkeypatch, capsys):
    """Run the doctor on a program; its exit code and what it printed."""
    monkeypatch.setenv("MESHLOOM_SYSTEM", "T3000")
    before = dict(sys.modules)

    def run(code: str) -> tuple[int, list[str]]:
        script = tmp_path / "program.py"
        script.write_text(code)
        return main(["doctor", str(script)]), capsys.readouterr().out.splitlines()

    yield run
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("ttnn", "models"):
            del sys.modules[name]
    for mesh in list(ttnn.device.system.OPEN):
        ttnn.close_mesh_device(mesh)


def test_row_140_the_doctor_finds_nothing_wrong_with_the_pattern_of_the_guide(examined):
    code, lines = examined(GOOD)
    assert code == 0
    assert [line[:6] for line in lines] == [f"[ok] {number}" for number in range(1, 8)] + ["all 7 "]


@pytest.mark.parametrize("item", FAULTS)
def test_row_140_the_doctor_finds_each_of_the_seven_faults(examined, item):
    original, faulty = FAULTS[item]
    assert original in GOOD
    code, lines = examined(GOOD.replace(original, faulty))
    assert code == 1
    marks = {int(line[5]): line[1:3] for line in lines if line.startswith("[")}
    assert marks[item] == "no", lines
    if item != 1:  # without a mesh nothing else was seen
        follows = [5] if item == 3 else []  # a composer then puts copies together
        assert [number for number, mark in marks.items() if mark == "no"] == [item, *follows]


def test_row_140_tensor_parallel_programs_are_not_told_to_replicate(examined):
    code, lines = examined(
        GOOD.replace("ReplicateTensorToMesh(mesh_device))", "ShardTensorToMesh(mesh_device, dim=0))")
        .replace("ShardTensorToMesh(mesh_device, dim=0))\noutput", "ShardTensorToMesh(mesh_device, dim=1))\noutput")
        .replace("ttnn.linear(batch, weight)", "ttnn.all_reduce(ttnn.linear(batch, weight))")
        .replace(", mesh_composer=ttnn.ConcatMeshToTensor(dim=0)", "")
    )
    assert (code, lines[-1]) == (0, "all 7 items hold")


def test_row_140_the_doctor_tells_of_a_program_that_fails_and_of_one_that_is_not_there(examined, capsys, tmp_path):
    assert examined(GOOD + "\nraise ValueError('later')\n")[0] == 1
    assert main(["doctor", str(tmp_path / "none.py")]) == 1
    assert "there is no script" in capsys.readouterr().err
