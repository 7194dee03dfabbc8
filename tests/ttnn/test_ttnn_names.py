"""Names and spellings that programs use: settings, graphs, dictionaries, cores, shapes, numpy arrays."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys

import numpy
import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError, DTypeError, OperandError, UnsupportedError
from meshloom.ttnn import config, dot_access, graph, tracer

pytest_plugins = ("ttnn_meshes",)


@pytest.fixture
def mesh(open_mesh):
    return open_mesh(1, 2)


# numpy


@pytest.mark.parametrize("kind", "float32 float16 int8 int16 int32 int64 uint8 uint16 uint32 bool".split())
def test_from_torch_takes_numpy_arrays_of_every_dtype_that_torch_has(kind):
    array = numpy.arange(12).reshape(3, 4).astype(kind)
    found, expected = ttnn.from_torch(array), ttnn.from_torch(torch.from_numpy(array.copy()))
    assert found.dtype is expected.dtype and torch.equal(found.to_torch(), expected.to_torch())


def test_arrays_that_torch_cannot_share_are_copied_and_none_is_shared(mesh):
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    for given in (array[::-1, ::-1], array.T, array.astype(">f4"), frozen, numpy.array(2.0, dtype=numpy.float32)):
        assert numpy.array_equal(ttnn.from_torch(given).to_numpy(), given)
    mapper = ttnn.ShardTensorToMesh(mesh, dim=0)
    found = ttnn.from_torch(array, dtype=ttnn.bfloat16, device=mesh, mesh_mapper=mapper)
    array[:] = 0
    assert found.shape == [1, 3] and found.to_list() == [[0, 1, 2], [3, 4, 5]]
    assert ttnn.Tensor(numpy.ones((2, 2), numpy.float32)).shape == ttnn.as_tensor(numpy.ones((2, 2), "f4")).shape
    with pytest.raises(DTypeError, match=r"say which|float64 has no counterpart"):
        ttnn.from_torch(numpy.ones(2))
    with pytest.raises(DTypeError, match=r"numpy.s <U1"):
        ttnn.from_torch(numpy.array(["a"]))
    with pytest.raises(TypeError, match=r"a torch.Tensor or a numpy array, not a list"):
        ttnn.from_torch([1.0])


# enums and shapes

CLUSTERS = (
    "INVALID N150 N300 T3K GALAXY TG P100 P150 P150_X2 P150_X4 SIMULATOR_WORMHOLE_B0 SIMULATOR_BLACKHOLE N300_2x2 "
    "P150_X8 P300 SIMULATOR_QUASAR BLACKHOLE_GALAXY P300_X2 CUSTOM"
).split()


def test_a_cluster_type_has_all_products_with_their_numbers():
    assert [each.name for each in ttnn.cluster.ClusterType] == CLUSTERS
    assert [each.value for each in ttnn.cluster.ClusterType] == list(range(19))


def test_shapes_and_coordinates_take_their_sizes_by_name():
    assert ttnn.MeshShape(s0=2, s1=4) == ttnn.MeshShape(2, s1=4) == ttnn.MeshShape(shape=[2, 4]) == ttnn.MeshShape(2, 4)
    assert ttnn.MeshShape(s1=4, s0=2, s2=3) == (2, 4, 3)
    assert ttnn.MeshCoordinate(c0=1, c1=2) == ttnn.MeshCoordinate(coords=[1, 2]) == ttnn.MeshCoordinate(1, 2)
    for named in ({"s0": 2, "s2": 4}, {"rows": 2}, {"s0": 2, "shape": [2]}):
        with pytest.raises(TypeError, match=r"MeshShape takes s0, s1\.\.\. or shape"):
            ttnn.MeshShape(**named)
    with pytest.raises(ArgumentError):
        ttnn.MeshShape(2, shape=[4])


def test_cores_may_be_pairs_of_numbers():
    box = ttnn.CoreRange((0, 0), (3, 1))
    assert box == ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(3, 1)) == ttnn.CoreRange([0, 0], end=(3, 1))
    assert hash(box) == hash(ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(3, 1))) and box.start.x == 0
    cores = ttnn.CoreRangeSet([box])
    assert box.contains((3, 1)) and cores.contains((0, 1)) and not cores.contains((4, 0))
    assert ttnn.num_cores_to_corerangeset(3, (2, 2), True) == ttnn.num_cores_to_corerangeset(
        3, ttnn.CoreCoord(2, 2), True
    )
    assert ttnn.grid_to_cores((0, 0), (1, 1)) == ttnn.grid_to_cores(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(1, 1))
    assert ttnn.split_work_to_cores((2, 2), 6, True) == ttnn.split_work_to_cores(ttnn.CoreCoord(2, 2), 6, True)
    first = ttnn.num_cores_to_corerangeset_in_subcoregrids((1, 0), 2, cores, True)
    assert first == ttnn.CoreRangeSet([ttnn.CoreRange((1, 0), (2, 0))])
    with pytest.raises(RuntimeError, match="Invalid core range"):
        ttnn.CoreRange((1, 1), (0, 0))
    with pytest.raises(TypeError):
        ttnn.CoreRange((0, 0, 0), (1, 1))
    with pytest.raises(TypeError):
        ttnn.CoreRange(0, (1, 1))


def test_slice_types_of_convolutions_have_names_of_their_own():
    kinds = ttnn.Conv2dSliceConfig.SliceTypeEnum
    named = (ttnn.Conv2dL1Full, ttnn.Conv2dDRAMSliceHeight, ttnn.Conv2dDRAMSliceWidth)
    assert named == (kinds.L1Full, kinds.DRAMSliceHeight, kinds.DRAMSliceWidth)
    assert ttnn.Conv2dL1FullSliceConfig == ttnn.Conv2dSliceConfig(slice_type=ttnn.Conv2dL1Full)


# ops


def test_neighbours_pad_with_a_number_of_links_for_every_dim(mesh):
    x = torch.arange(8.0).reshape(1, 4, 2, 1)
    tensor = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1))
    semaphores = [ttnn.create_global_semaphore(mesh, ttnn.CoreRangeSet([ttnn.CoreRange((0, 0), (0, 0))]), 0)]

    def padded(links):
        return ttnn.experimental.neighbor_pad_async(
            tensor, [1], [1], [0], "zeros", [1], semaphores, semaphores, num_links=links, topology=ttnn.Topology.Linear
        )

    first = padded(1)
    assert torch.equal(padded([1]).block, first.block) and torch.equal(padded((2,)).block, first.block)
    for links in ("1", [1.0]):
        with pytest.raises(TypeError, match="num_links"):
            padded(links)
    with pytest.raises(TypeError, match="num_links"):
        ttnn.all_gather(tensor, 1, num_links=[1])


def test_typecast_is_also_an_experimental_op(mesh):
    x = ttnn.from_torch(torch.tensor([[1.5, 2.5]]), device=mesh)
    found = ttnn.experimental.typecast(x, ttnn.bfloat16, ttnn.L1_MEMORY_CONFIG)
    assert found.dtype is ttnn.bfloat16 and found.memory_config() == ttnn.L1_MEMORY_CONFIG
    room = ttnn.zeros([1, 2], dtype=ttnn.int32, device=mesh)
    assert ttnn.experimental.typecast(x, ttnn.int32, optional_output_tensor=room) is room and room.to_list() == [[1, 2]]


def test_to_goes_by_what_it_is_given(mesh):
    x = ttnn.from_torch(torch.ones(2, 2))
    there = ttnn.to(x, mesh, ttnn.L1_MEMORY_CONFIG)
    assert there.device() is mesh and there.memory_config() == ttnn.L1_MEMORY_CONFIG and x.device() is None
    assert ttnn.to(there, ttnn.bfloat16).dtype is ttnn.bfloat16 and ttnn.to(x, ttnn.float32) is x
    assert ttnn.to(there, ttnn.TILE_LAYOUT).layout is ttnn.TILE_LAYOUT
    assert ttnn.to(there, ttnn.DRAM_MEMORY_CONFIG).memory_config() == ttnn.DRAM_MEMORY_CONFIG
    assert x.to(ttnn.bfloat16).dtype is ttnn.bfloat16 and x.to(mesh).device() is mesh
    with pytest.raises(TypeError, match="no mesh, dtype, layout or memory config"):
        ttnn.to(x, torch.float32)


def test_a_fallback_function_is_torchs_on_tensors_of_ttnn(mesh):
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    tensor = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT)
    found = ttnn.get_fallback_function(ttnn.relu)(tensor, memory_config=ttnn.L1_MEMORY_CONFIG)
    assert found.device() is mesh and found.layout is ttnn.TILE_LAYOUT and torch.equal(found.to_torch(), x.relu())
    assert found.memory_config() == ttnn.L1_MEMORY_CONFIG
    assert ttnn.get_fallback_function(ttnn.add)(tensor, 1.0, dtype=ttnn.bfloat16).dtype is ttnn.bfloat16
    assert torch.equal(ttnn.get_fallback_function(ttnn.relu)(x), x.relu())
    cut = ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(OperandError, match="differs between devices"):
        ttnn.get_fallback_function(ttnn.relu)(cut)
    with pytest.raises(AttributeError, match="has no golden function"):
        ttnn.get_fallback_function(ttnn.all_gather)
    with pytest.raises(TypeError, match="not an operation"):
        ttnn.get_fallback_function(torch.relu)


# cores of group norms


@pytest.mark.parametrize("height", [False, True])
@pytest.mark.parametrize(
    ("channels", "groups", "rows"), [(320, 32, 4096), (640, 32, 1024), (1280, 32, 96), (96, 3, 50)]
)
def test_a_group_norm_is_asked_where_its_input_should_lie_and_runs_there(open_mesh, height, channels, groups, rows):
    device = open_mesh(1, 1)
    for row_major in (False, True):
        sizes = {"num_channels": channels, "num_groups": groups, "input_nhw": rows}
        memory, grid = ttnn.determine_expected_group_norm_sharded_config_and_grid_size(
            device=device, **sizes, is_height_sharded=height, is_row_major=row_major
        )
        spec = memory.shard_spec
        across = ttnn.get_group_norm_cores_across_channel(memory.memory_layout, grid, spec.orientation)
        assert spec.shape[0] % 32 == 0 and spec.shape[1] * across == channels
        assert spec.shape[1] % (channels // groups) == 0, "a group is on two cores"
        assert spec.shape[0] * (spec.grid.num_cores() // across) == -(-rows // 32) * 32
        assert grid.x <= 8 and grid.y <= 8 and spec.grid.num_cores() <= grid.x * grid.y
    x = torch.randn(1, 1, rows, channels)
    given = ttnn.to_memory_config(ttnn.from_torch(x, device=device), memory)  # in rows, as it was asked for last
    found = ttnn.group_norm(given, num_groups=groups, epsilon=1e-5, core_grid=grid)
    want = torch.nn.functional.group_norm(x[0].transpose(1, 2), groups, eps=1e-5).transpose(1, 2)[None]
    torch.testing.assert_close(ttnn.to_torch(found), want, rtol=1e-4, atol=1e-4)


def test_channels_that_make_no_equal_groups_in_tiles_are_refused(open_mesh):
    with pytest.raises(RuntimeError, match="equal groups in whole tiles"):
        ttnn.determine_expected_group_norm_sharded_config_and_grid_size(
            device=open_mesh(1, 1), num_channels=40, num_groups=4, input_nhw=32, is_height_sharded=False
        )


# marks


def test_zones_and_messages_are_seen_by_torchs_profiler(mesh):
    x = ttnn.from_torch(torch.ones(2, 2), device=mesh)
    with torch.profiler.profile() as profile:
        ttnn.start_tracy_zone("model.py", "outer", 1)
        ttnn.profiler.start_tracy_zone("model.py", "inner", 2)
        ttnn.relu(x)
        assert ttnn.stop_tracy_zone() and ttnn.stop_tracy_zone("outer") and not ttnn.stop_tracy_zone()
        ttnn.tracy_message("half way")
        ttnn.tracy_frame()
    events = {event.name: event for event in profile.events()}
    outer, inner = (events[f"{name} model.py:{line}"].time_range for name, line in (("outer", 1), ("inner", 2)))
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert {"half way", "frame"} <= set(events)
    with pytest.raises(UnsupportedError, match="no hardware measures"):
        ttnn.profiler.get_latest_programs_perf_data()
    with pytest.raises(TypeError, match="takes a text"):
        ttnn.tracy_message(3)


# devices


def test_names_of_devices_are_in_their_module_too():
    for name in "SubDevice SubDeviceId SubDeviceManagerId DispatchCoreType DispatchCoreAxis get_memory_view".split():
        assert getattr(ttnn.device, name) is getattr(ttnn, name)
    assert ttnn.device.synchronize_device is ttnn.synchronize_device
    with pytest.raises(AttributeError, match="no_such_name"):
        ttnn.device.no_such_name  # noqa: B018


def test_memory_reports_are_written_for_new_programs_while_they_are_enabled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.ones([32, 32], device=device, layout=ttnn.TILE_LAYOUT)
    ttnn.relu(x)
    reports = tmp_path / "generated" / "reports"
    assert not reports.exists()
    ttnn.device.EnableMemoryReports()
    try:
        before = device.num_program_cache_entries()
        ttnn.add(x, x)
        ttnn.add(x, x)
        written = sorted(path.name for path in reports.iterdir())
        assert written == [f"program_{before + 1}_memory_{kind}.csv" for kind in ("blocks", "usage_summary")]
        summary = (reports / written[1]).read_text().splitlines()
        assert summary[0].startswith("memory,num_banks") and summary[1].startswith("DRAM,")
    finally:
        ttnn.device.DisableMemoryReports()
    ttnn.multiply(x, x)
    assert len(list(reports.iterdir())) == 2
    ttnn.close_mesh_device(device)


def test_an_open_mesh_of_no_declared_system_takes_any_shape_of_as_many_devices(monkeypatch):
    monkeypatch.delenv("MESHLOOM_SYSTEM", raising=False)
    device = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    for shape in ((4, 2), (1, 8), (8, 1), (2, 4)):
        device.reshape(ttnn.MeshShape(*shape))
        assert device.shape == ttnn.MeshShape(*shape) and device.get_num_devices() == 8
        x = torch.arange(16.0).reshape(8, 2)
        found = ttnn.from_torch(x, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, dim=0))
        assert torch.equal(ttnn.to_torch(ttnn.all_gather(found, 0)), x)
    with pytest.raises(RuntimeError, match="same number of devices"):
        device.reshape(ttnn.MeshShape(3, 3))
    ttnn.close_mesh_device(device)


# dictionaries


def test_items_of_a_dot_access_dict_are_attributes():
    tree = ttnn.dot_access.make_dot_access_dict({"a": {"b": {"c": 1}}, 0: [2], "torch": {"d": 3}})
    assert tree.a.b.c == 1 and tree["a"].b["c"] == 1 and tree[0] == [2]
    tree.a.e = 5
    assert tree["a"]["e"] == 5
    del tree.a.b
    with pytest.raises(KeyError):
        tree.a.b  # noqa: B018
    assert dot_access.make_dot_access_dict(tree) is tree
    assert copy.deepcopy(tree) == tree and pickle.loads(pickle.dumps(tree)) == tree and copy.deepcopy(tree).a.e == 5

    class Kept(dict):
        """A dictionary that is to stay as it is."""

    found = dot_access.make_dot_access_dict({"kept": Kept(x=1), "made": {"x": {"y": 2}}}, ignore_types=Kept)
    assert type(found.kept) is Kept and found.made.x.y == 2


# settings


def test_a_config_copies_another():
    with ttnn.manage_config("comparison_mode_pcc", 0.5):
        copied = ttnn.Config(ttnn.CONFIG)
    assert copied.comparison_mode_pcc == 0.5 and ttnn.CONFIG.comparison_mode_pcc != 0.5
    copied.enable_logging = True
    assert not ttnn.CONFIG.enable_logging and ttnn.Config() == ttnn.Config(ttnn.Config())
    with pytest.raises(TypeError, match="Config takes another Config"):
        ttnn.Config({"enable_logging": True})


def test_the_file_of_settings_is_written_if_it_is_missing(tmp_path):
    path = tmp_path / "ttnn.json"
    config.read_environment({"TTNN_CONFIG_PATH": str(path)})
    assert json.loads(path.read_text())["comparison_mode_pcc"] == ttnn.CONFIG.comparison_mode_pcc


def test_the_variables_of_settings_are_names(tmp_path):
    path = tmp_path / "ttnn.json"
    path.write_text('{"enable_logging": true}')
    text = "from meshloom import ttnn; print(ttnn.CONFIG_PATH, ttnn.CONFIG_OVERRIDES, ttnn.CONFIG.enable_logging)"
    told = {"TTNN_CONFIG_PATH": str(path), "TTNN_CONFIG_OVERRIDES": '{"comparison_mode_pcc": 0.5}'}
    done = subprocess.run(
        [sys.executable, "-c", text], env=os.environ | told, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == f'{path} {{"comparison_mode_pcc": 0.5}} True'
    if "TTNN_CONFIG_PATH" not in os.environ:
        assert ttnn.CONFIG_PATH is None
    if "TTNN_CONFIG_OVERRIDES" not in os.environ:
        assert ttnn.CONFIG_OVERRIDES is None


# graphs

GRAPH = """
append_python_io_record begin_graph_capture count_intermediate_and_output_tensors disable_detailed_buffer_tracing
disable_python_io_recording disable_python_stack_traces enable_detailed_buffer_tracing enable_python_io_recording
enable_python_stack_traces end_graph_capture end_graph_capture_to_file extract_calltrace extract_levelized_graph
extract_operation_durations extract_output_info extract_output_tensors extract_peak_L1_memory_usage
extract_resource_usage_per_core extract_total_duration_from_graph flush_comparison_records_to_db full_graph_capture
has_comparison_records import_report is_detailed_buffer_tracing_enabled is_graph_capture_active
is_python_io_recording_enabled is_python_stack_trace_enabled pretty_format pretty_print record_python_operation
record_python_operation_error record_tensor_comparison_data reset_comparison_records_data store_captured_graph
store_output_tensor_ids track_function_end track_function_start visualize visualize_edge visualize_node
""".split()
TRACER = """
codegen codegen_submodules codegen_top_level_module create_ttnn_input_tensor disable_tracing duration_to_string
enable_tracing extract_args_and_kwargs_from_arg_name_value_pairs get_arg_name_value_pairs get_graph get_input_tensors
get_module_input_nodes get_module_input_tensor_names get_module_output_nodes is_tracing_enabled layout_to_string
memory_config_to_string module_to_source_code node_to_statement postprocess_return_value preprocess_args_and_kwargs
preprocess_return_value trace trace_ttnn_operation visualize visualize_node
""".split()


@pytest.mark.parametrize(("module", "names"), [(graph, GRAPH), (tracer, TRACER)])
def test_every_function_of_graph_and_tracer_works_or_says_why_it_is_not_here(module, names):
    refused = [name for name in names if name not in module.__all__]
    assert len(refused) < len(names) and set(module.__all__) - {"RunMode", "TensorInfo"} <= set(names)
    for name in refused:
        with pytest.raises(UnsupportedError, match=rf"{name} is not here: \w+"):
            getattr(module, name)()
    for name in module.__all__:
        assert callable(getattr(module, name))
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    assert getattr(ttnn, module.__name__.rpartition(".")[2]) is module


def test_a_captured_graph_has_functions_and_tensors_in_order(mesh, tmp_path):
    x = ttnn.from_torch(torch.ones(2, 3), device=mesh)
    assert not ttnn.graph.is_graph_capture_active()
    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NORMAL)
    assert ttnn.graph.is_graph_capture_active()
    with pytest.raises(RuntimeError, match="already being captured"):
        ttnn.graph.begin_graph_capture()
    y = ttnn.add(ttnn.relu(x), x)
    nodes = ttnn.graph.end_graph_capture_to_file(tmp_path / "graph.json")
    assert ttnn.graph.extract_calltrace(nodes) == ["ttnn::relu", "ttnn::add"]
    assert ttnn.graph.extract_output_tensors(nodes) == {y.tensor_id}
    assert ttnn.graph.count_intermediate_and_output_tensors(nodes) == (1, 1)
    (info,) = ttnn.graph.extract_output_info(nodes)
    assert (info.shape, info.dtype, info.layout, info.size) == ([2, 3], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT, 24)
    assert json.loads((tmp_path / "graph.json").read_text()) == nodes
    assert [node["counter"] for node in nodes] == list(range(len(nodes)))
    assert nodes[0]["node_type"] == "capture_start" and nodes[-1]["node_type"] == "capture_end"
    assert not ttnn.graph.is_graph_capture_active()
    with pytest.raises(RuntimeError, match="no graph is being captured"):
        ttnn.graph.end_graph_capture()


def test_functions_of_the_program_are_around_the_ops_inside_of_them(mesh, capsys):
    x = ttnn.from_torch(torch.ones(2, 3), device=mesh)
    ttnn.graph.enable_python_stack_traces()
    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NO_DISPATCH)
    ttnn.graph.track_function_start("layer")
    with pytest.raises(RuntimeError):
        ttnn.matmul(x, x)  # an op that fails has no end, and the layer has one
    ttnn.graph.track_function_end()
    ttnn.relu(x)
    nodes = ttnn.graph.end_graph_capture()
    ttnn.graph.disable_python_stack_traces()
    assert not ttnn.graph.is_python_stack_trace_enabled()
    assert ttnn.graph.extract_calltrace(nodes)[0] == "layer" and ttnn.graph.extract_calltrace(nodes)[-1] == "ttnn::relu"
    relu = next(node for node in nodes if node["params"].get("name") == "ttnn::relu")
    assert relu["counter"] in nodes[0]["connections"] and "test_ttnn_names.py" in relu["params"]["stack_trace"]
    ttnn.graph.pretty_print(nodes)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "0: capture_start" and "    1: function_start (name=layer" in shown
