"""Devices as TTNN spells them: geometry, systems, opening and closing, submeshes, fabric, sockets, program cache."""

import math
import os
from collections.abc import Iterator

import pytest
import torch

import ranks
from meshloom import ttnn
from meshloom.errors import ArgumentError, ClosedError, MeshError, OperandError
from meshloom.runtime import Program, create_mesh_buffer
from meshloom.runtime.workload import MeshWorkload
from ttnn_cases import close_all


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Every test starts without a system and leaves nothing open."""
    close_all()
    yield
    close_all()
    ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)
    ttnn.set_system(None)


# rows of the checklist


def test_row_12_open_mesh_device_takes_a_shape_as_its_first_argument() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    assert mesh.get_num_devices() == 8 and mesh.shape == ttnn.MeshShape(2, 4)
    assert repr(mesh) == "MeshDevice(2x4 grid, 8 devices)"


def test_row_107_a_ring_of_two_opens_by_keywords() -> None:
    mesh = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(1, 2), mesh_type=ttnn.MeshType.Ring)
    assert mesh.mesh_type is ttnn.MeshType.Ring and mesh.shape == ttnn.MeshShape(1, 2)


def test_row_108_the_type_of_a_mesh_changes_its_routes() -> None:
    hops = {}
    for kind in (ttnn.MeshType.Line, ttnn.MeshType.Ring, ttnn.MeshType.Mesh, ttnn.MeshType.Torus):
        with ttnn.create_mesh_device(ttnn.MeshShape(1, 8), mesh_type=kind) as mesh:
            hops[kind.name] = mesh.runtime.fabric.hops((0, 0), (0, 7))
    assert hops["Line"] == hops["Mesh"] == 7 and hops["Ring"] == hops["Torus"] == 1


def test_row_109_the_type_of_a_mesh_may_be_left_out() -> None:
    mesh = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(1, 2))
    assert mesh.mesh_type is None and mesh.get_num_devices() == 2


def test_row_110_get_num_devices_counts() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2), mesh_type=ttnn.MeshType.Ring)
    assert mesh.get_num_devices() == 2


def test_row_122_a_sharded_config_is_where_a_tensor_then_lies() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    config = ttnn.create_sharded_memory_config((1, 1, 64, 256), ttnn.CoreGrid(x=8, y=1), ttnn.ShardStrategy.WIDTH)
    assert config.memory_layout is ttnn.TensorMemoryLayout.WIDTH_SHARDED
    assert config.shard_spec.shape == [64, 32] and config.shard_spec.num_cores() == 8
    x = ttnn.from_torch(torch.ones(1, 1, 64, 256), ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=mesh)
    x = ttnn.to_memory_config(x, config)
    assert x.memory_config() == config and x.is_sharded()
    assert ttnn.get_memory_view(mesh, ttnn.BufferType.L1).total_bytes_allocated_per_bank == 64 * 32 * 2  # a shard
    assert ttnn.get_memory_view(mesh, ttnn.BufferType.DRAM).total_bytes_allocated_per_bank == 0


def test_row_123_the_grid_of_dram_banks_serves_as_a_core_grid() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    assert (mesh.dram_grid_size().x, mesh.dram_grid_size().y) == (12, 1)
    config = ttnn.create_sharded_memory_config(
        shape=(1, 1, 32, 12 * 64), core_grid=mesh.dram_grid_size(), strategy=ttnn.ShardStrategy.WIDTH
    )
    assert config.shard_spec.shape == [32, 64] and config.shard_spec.num_cores() == 12


@pytest.mark.parametrize(
    ("strategy", "orientation", "expected"),
    [
        ("HEIGHT", None, [32, 512]),
        ("WIDTH", None, [256, 64]),
        ("BLOCK", None, [128, 128]),
        ("BLOCK", "COL_MAJOR", [64, 256]),
    ],
)
def test_row_124_shard_shapes_follow_the_strategy(strategy: str, orientation: str | None, expected: list[int]) -> None:
    config = ttnn.create_sharded_memory_config(
        (2, 1, 128, 512),
        ttnn.CoreGrid(x=4, y=2),
        ttnn.ShardStrategy[strategy],
        None if orientation is None else ttnn.ShardOrientation[orientation],
    )
    assert config.shard_spec.shape == expected and config.buffer_type is ttnn.BufferType.L1


def test_row_125_synchronize_mesh_device_returns_after_the_work_of_every_device() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    buffer = create_mesh_buffer(mesh.runtime, layout="replicated", global_shape=(4,))

    def slow(x: torch.Tensor) -> None:
        for _ in range(200):
            x += 1

    work = MeshWorkload()
    work.add_program(ttnn.MeshCoordinateRange(mesh.shape), Program(slow, writes=[buffer]))
    mesh.runtime.queue(0).enqueue_workload(work, blocking=False)
    event = mesh.runtime.queue(0).record_event()
    ttnn.synchronize_mesh_device(mesh)
    assert event.is_done
    assert [handle.tolist() for handle in (buffer.handle(0, 0), buffer.handle(0, 1))] == [[200.0] * 4] * 2


def test_row_137_a_batch_is_so_many_rows_on_every_device() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    batch = 3 * mesh.get_num_devices()
    x = ttnn.from_torch(torch.ones(batch, 8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert x.shape == [3, 8]
    mesh.runtime.check_batch(batch, 3)
    with pytest.raises(ArgumentError, match="a batch of 7 is not 3 on each of 2 devices"):
        mesh.runtime.check_batch(7, 3)


def test_row_138_a_closed_mesh_is_not_used_and_can_be_opened_again() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.from_torch(torch.ones(32, 32), layout=ttnn.TILE_LAYOUT, device=mesh)
    cards = mesh.runtime.cards
    ttnn.close_mesh_device(mesh)
    ttnn.close_mesh_device(mesh)
    assert all(card.closed for card in cards)
    assert mesh.shape == ttnn.MeshShape(1, 2) and mesh.get_device_ids() == [0, 1]
    with pytest.raises(ClosedError, match="has been closed"):
        ttnn.add(x, x)
    again = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    assert again.get_num_devices() == 2 and again is not mesh


def test_row_139_a_shape_that_needs_more_devices_than_there_are_is_refused() -> None:
    ttnn.set_system("T3000")
    message = (
        r"Requested mesh shape MeshShape\(\[4, 4\]\) requires 16 devices, but only 8 devices are available in the "
        r"system mesh MeshShape\(\[2, 4\]\)\."
    )
    with pytest.raises(RuntimeError, match=message):
        ttnn.open_mesh_device(ttnn.MeshShape(4, 4))


# geometry


def test_shapes_and_coordinates_are_spelled_as_in_ttnn() -> None:
    shape, place = ttnn.MeshShape(2, 4), ttnn.MeshCoordinate(1, 2)
    assert repr(shape) == "MeshShape([2, 4])" and repr(place) == "MeshCoordinate([1, 2])"
    assert shape.mesh_size() == 8 and shape.dims() == 2 and shape[-1] == 4 and list(shape) == [2, 4]
    assert ttnn.MeshShape([8]).dims() == 1 and ttnn.MeshShape(2, 3, 4).mesh_size() == 24
    assert ttnn.MeshCoordinate([]).dims() == 0 and hash(place) == hash(ttnn.MeshCoordinate([1, 2]))
    with pytest.raises(MeshError, match="MeshShape cannot have 0 dimension"):
        ttnn.MeshShape([])
    with pytest.raises(MeshError, match="whole numbers"):
        ttnn.MeshShape(-1, 2)


def test_ranges_list_coordinates_row_by_row_and_refuse_what_is_no_box() -> None:
    box = ttnn.MeshCoordinateRange(ttnn.MeshCoordinate(0, 0), ttnn.MeshCoordinate(1, 1))
    assert repr(box) == "MeshCoordinateRange(start=MeshCoordinate([0, 0]), end=MeshCoordinate([1, 1]))"
    assert list(box) == [(0, 0), (0, 1), (1, 0), (1, 1)] and all(isinstance(c, ttnn.MeshCoordinate) for c in box)
    assert list(ttnn.MeshCoordinateRange(ttnn.MeshShape(1, 2))) == [(0, 0), (0, 1)]
    with pytest.raises(RuntimeError, match="Start coordinate is greater than end coordinate"):
        ttnn.MeshCoordinateRange(ttnn.MeshCoordinate(1, 0), ttnn.MeshCoordinate(0, 1))
    with pytest.raises(RuntimeError, match="dimensions of a coordinate range do not match: 2 != 3"):
        ttnn.MeshCoordinateRange(ttnn.MeshCoordinate(1, 0), ttnn.MeshCoordinate(1, 1, 1))


def test_sets_of_ranges_join_what_makes_one_box_and_nothing_else() -> None:
    def box(*corners: int) -> ttnn.MeshCoordinateRange:
        return ttnn.MeshCoordinateRange(corners[:2], corners[2:])

    boxes = ttnn.MeshCoordinateRangeSet(box(0, 0, 0, 1))
    boxes.merge(box(2, 2, 2, 3))
    assert len(boxes.ranges()) == 2
    boxes.merge(box(0, 2, 0, 3))
    boxes.merge(box(1, 0, 1, 3))  # joins the first row, which joined two
    assert boxes.ranges() == [box(0, 0, 1, 3), box(2, 2, 2, 3)]
    boxes.merge(box(0, 1, 1, 2))  # inside
    assert len(boxes.ranges()) == 2


# systems


def test_a_t3000_has_the_ids_of_its_driver() -> None:
    ttnn.set_system("T3000")
    for shape, ids in {(2, 4): [4, 0, 2, 6, 5, 1, 3, 7], (1, 8): [4, 0, 2, 6, 7, 3, 1, 5]}.items():
        with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh:
            assert mesh.get_device_ids() == ids
    assert ttnn.get_num_devices() == 8 and ttnn.get_device_ids() == list(range(8))
    assert list(ttnn.get_pcie_device_ids()) == [0, 1, 2, 3] and ttnn.get_num_pcie_devices() == 4
    assert ttnn.cluster.get_cluster_type() is ttnn.ClusterType.T3K and ttnn.get_arch_name() == "wormhole_b0"


def test_a_galaxy_has_32_devices_with_more_cores() -> None:
    ttnn.set_system("galaxy")
    mesh = ttnn.open_mesh_device()
    assert mesh.shape == ttnn.MeshShape(8, 4) and repr(mesh.compute_with_storage_grid_size()) == "8-10"
    assert ttnn.get_num_links(mesh) == 4 and ttnn.get_num_devices() == 32


def test_the_environment_chooses_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_SYSTEM", "LoudBox")
    assert ttnn.get_arch_name() == "blackhole" and ttnn.device.is_blackhole() and not ttnn.device.is_wormhole_b0()
    mesh = ttnn.open_mesh_device()
    assert mesh.arch() is ttnn.Arch.BLACKHOLE and repr(mesh.dram_grid_size()) == "8-1"
    with pytest.raises(OperandError, match="cannot change while devices are open"):
        ttnn.set_system("N300")


def test_a_number_of_devices_may_have_any_shape() -> None:
    ttnn.set_system(32)
    for shape in ((4, 8), (2, 2, 8), (1, 32)):
        with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh:
            assert mesh.get_num_devices() == 32
    with pytest.raises(RuntimeError, match="requires 33 devices, but only 32"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 33))
    assert ttnn._ttnn.multi_device.SystemMeshDescriptor().shape() == ttnn.MeshShape(1, 32)


def test_without_a_system_there_are_as_many_devices_as_are_asked_for() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(10, 20))
    assert mesh.get_device_ids() == list(range(200))


def test_an_unknown_system_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="there is no system 'T300'") as error:
        ttnn.set_system("T300")
    assert "did you mean" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "offset", "places"),
    [
        ((1, 4), (0, 2), [2, 3, 7, 6]),  # round the corner
        ((4, 1), (0, 0), [0, 1, 2, 3]),  # a line is a line
        ((2, 2), (0, 1), [1, 2, 5, 6]),
        ((4, 2), (0, 0), [0, 4, 1, 5, 2, 6, 3, 7]),  # fits only turned
        ((1, 1), (1, 3), [7]),
    ],
)
def test_meshes_lie_on_the_grid_of_the_system(
    shape: tuple[int, int], offset: tuple[int, int], places: list[int]
) -> None:
    ttnn.set_system("2x4")
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape), offset=ttnn.MeshCoordinate(*offset))
    assert mesh.get_device_ids() == places


@pytest.mark.parametrize(
    ("shape", "offset", "message"),
    [
        ((2, 4), (0, 1), "Requested mesh is too big and is not rotatable"),
        ((1, 4), (1, 2), "Requested mesh is too big and is not rotatable"),
        ((2, 2, 2), None, "Requested mesh shape dimensions mismatch: 3 != 2"),
        ((1, 2), (2, 0), "The specified offset .* is out of bounds"),
    ],
)
def test_meshes_that_do_not_fit_the_system_are_refused(
    shape: tuple[int, ...], offset: tuple[int, ...] | None, message: str
) -> None:
    ttnn.set_system("T3000")
    with pytest.raises(RuntimeError, match=message):
        ttnn.open_mesh_device(ttnn.MeshShape(*shape), offset=offset)


# opening and closing


@pytest.mark.parametrize(
    "opened",
    [
        lambda: ttnn.open_mesh_device(ttnn.MeshShape(1, 2), [3, 1]),
        lambda: ttnn.open_mesh_device((1, 2), device_ids=[3, 1]),
        lambda: ttnn.open_mesh_device([3, 1], (1, 2)),
        lambda: ttnn.open_mesh_device(["virtual:3", "virtual:1"], (1, 2)),
        lambda: ttnn.open_mesh_device(["virtual:3", "virtual:1"], shape=(1, 2)),
        lambda: ttnn.open_mesh_device(ttnn.MeshShape(1, 2), physical_device_ids=[3, 1]),
        lambda: ttnn.open_mesh_device(ttnn.MeshShape(1, 2), 0, 0, 1, None, None, [3, 1]),
    ],
)
def test_every_spelling_of_opening_chosen_devices_works(opened) -> None:  # type: ignore[no-untyped-def]
    mesh = opened()
    assert mesh.shape == ttnn.MeshShape(1, 2) and mesh.get_device_ids() == [3, 1]


def test_devices_that_do_not_match_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Shape and values size mismatch; shape mesh_size: 2, values size: 3"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 2), physical_device_ids=[0, 1, 2])
    with pytest.raises(TypeError, match="num_command_queues=3"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 2), num_command_queues=3)
    with pytest.raises(TypeError, match="trace_region_size=-1"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 2), trace_region_size=-1)
    ttnn.set_system("N300")
    with pytest.raises(RuntimeError, match="there is no device 2"):
        ttnn.open_device(device_id=2)


def test_all_arguments_of_the_original_are_taken() -> None:
    mesh = ttnn.open_mesh_device(
        mesh_shape=ttnn.MeshShape(1, 2),
        l1_small_size=32768,
        trace_region_size=1 << 20,
        num_command_queues=2,
        dispatch_core_config=ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.WORKER, ttnn.DispatchCoreAxis.ROW),
        offset=None,
        physical_device_ids=[],
        worker_l1_size=0,
    )
    assert mesh.options["l1_small_size"] == 32768 and len(mesh.runtime.queues) == 2


def test_one_device_is_a_mesh_of_one() -> None:
    assert ttnn.Device is ttnn.MeshDevice
    with ttnn.manage_device(device_id=3) as device:
        assert device.shape == ttnn.MeshShape(1, 1) and device.get_device_ids() == [3]
    assert device.runtime.closed
    devices = ttnn.CreateDevices([0, 2])
    assert {number: device.get_device_ids() for number, device in devices.items()} == {0: [0], 2: [2]}
    ttnn.CloseDevices(devices)
    assert all(device.runtime.closed for device in devices.values())


def test_the_default_device_is_remembered_while_it_is_open() -> None:
    device = ttnn.open_device(device_id=0)
    assert ttnn.GetDefaultDevice() is None
    ttnn.SetDefaultDevice(device)
    assert ttnn.GetDefaultDevice() is device
    ttnn.close_device(device)
    assert ttnn.GetDefaultDevice() is None


def test_queues_that_were_not_opened_are_refused() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    ttnn.synchronize_device(mesh, cq_id=0)
    with pytest.raises(RuntimeError, match="cq_id 1 is out of range"):
        ttnn.synchronize_device(mesh, cq_id=1)


def test_attributes_may_be_set_and_equality_is_identity() -> None:
    a, b = ttnn.open_mesh_device(ttnn.MeshShape(1, 2)), ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    a.cache_entries_counter = 3
    assert a.cache_entries_counter == 3 and a != b and b.id() == a.id() + 1


# submeshes and reshape


def test_submeshes_tile_the_parent_row_by_row() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    parts = mesh.create_submeshes(ttnn.MeshShape(2, 2))
    assert [each.get_device_ids() for each in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.get_submeshes() == parts and [each.id() for each in parts] == [mesh.id() + 1, mesh.id() + 2]
    one = mesh.create_submesh(ttnn.MeshShape(1, 2), ttnn.MeshCoordinate(1, 1))
    assert one.get_device_ids() == [5, 6] and one.parent is mesh
    mesh.quiesce_devices()
    mesh.close()
    assert all(each.runtime.closed for each in (*parts, one))


def test_submeshes_that_cannot_be_are_refused() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    with pytest.raises(RuntimeError, match=r"Invalid submesh shape: \(0, 2\). All dimensions must be positive."):
        mesh.create_submesh(ttnn.MeshShape(0, 2))
    with pytest.raises(RuntimeError, match="does not fit within parent mesh"):
        mesh.create_submesh(ttnn.MeshShape(2, 2), ttnn.MeshCoordinate(0, 3))
    message = r"Shape MeshShape\(\[2, 4\]\) is not divisible by submesh shape MeshShape\(\[2, 3\]\) along dimension 1"
    with pytest.raises(RuntimeError, match=message):
        mesh.create_submeshes(ttnn.MeshShape(2, 3))
    with pytest.raises(RuntimeError, match=r"Device ID requested for MeshCoord .* not found"):
        mesh.get_device_id(ttnn.MeshCoordinate(2, 0))


def test_a_reshape_to_a_line_follows_the_snake_and_back() -> None:
    ttnn.set_system("T3000")
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    mesh.reshape(ttnn.MeshShape(1, 8))
    assert mesh.get_device_ids() == [4, 0, 2, 6, 7, 3, 1, 5]
    assert [mesh.runtime.system.cards[n].info().index for n in mesh.runtime.numbers] == mesh.get_device_ids()
    mesh.reshape(ttnn.MeshShape(8, 1))
    mesh.reshape(ttnn.MeshShape(2, 4))
    assert mesh.get_device_ids() == [4, 0, 2, 6, 5, 1, 3, 7]
    with pytest.raises(RuntimeError, match="New shape must have the same number of devices as current shape"):
        mesh.reshape(ttnn.MeshShape(1, 4))
    with pytest.raises(RuntimeError, match=r"cannot be reshaped|dimensions mismatch"):
        mesh.reshape(ttnn.MeshShape(2, 2, 2))


def test_a_view_and_a_descriptor_tell_the_shape() -> None:
    ttnn.set_system("T3000")
    mesh = ttnn.open_mesh_device()
    view = mesh.get_view()
    assert view.shape() == mesh.shape and view.num_devices() == 8 and view.is_local(ttnn.MeshCoordinate(1, 3))
    whole = ttnn.SystemMeshDescriptor()
    assert whole.shape() == whole.local_shape() == ttnn.MeshShape(2, 4) and whole.all_local()
    assert whole.get_device_id(ttnn.MeshCoordinate(1, 0)) == 5
    assert repr(mesh.get_fabric_node_id(ttnn.MeshCoordinate(0, 1))) == "FabricNodeId(M0, D1)"


# the program cache


def test_the_program_cache_counts_different_programs() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x, y = (ttnn.from_torch(torch.ones(n, 32), layout=ttnn.TILE_LAYOUT, device=mesh) for n in (32, 64))
    start = mesh.num_program_cache_entries()
    ttnn.add(x, x)
    ttnn.add(x, x)
    assert mesh.num_program_cache_entries() == start + 1
    ttnn.add(y, y)
    ttnn.relu(x)
    assert mesh.num_program_cache_entries() == start + 3
    mesh.clear_program_cache()
    assert mesh.num_program_cache_entries() == 0
    mesh.disable_and_clear_program_cache()
    ttnn.add(x, x)
    assert mesh.num_program_cache_entries() == 0
    mesh.enable_program_cache()
    ttnn.add(x, x)
    assert mesh.num_program_cache_entries() == 1


def test_a_forbidden_miss_is_refused_and_a_hit_is_not() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.from_torch(torch.ones(32, 32), layout=ttnn.TILE_LAYOUT, device=mesh)
    ttnn.add(x, x)
    mesh.set_program_cache_misses_allowed(False)
    ttnn.add(x, x)
    with pytest.raises(RuntimeError, match="program cache miss occurred, but cache misses are forbidden"):
        ttnn.relu(x)
    mesh.set_program_cache_misses_allowed(True)
    ttnn.relu(x)


# fabric


def test_the_fabric_is_configured_before_devices_are_opened() -> None:
    ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D_RING)
    assert ttnn.get_fabric_config() is ttnn.FabricConfig.FABRIC_1D_RING
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    assert mesh.mesh_type is ttnn.MeshType.Ring
    with pytest.raises(RuntimeError, match=r"SetFabricConfig\(FABRIC_1D\) is not allowed while devices are still open"):
        ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)
    assert [each.value for each in ttnn.FabricConfig] == list(range(9))
    assert {each.name: each.value for each in ttnn.Topology} == {"Linear": 1, "Ring": 2, "Mesh": 3, "Torus": 4}


def test_with_the_fabric_on_all_devices_of_a_system_are_opened() -> None:
    ttnn.set_system("T3000")
    ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    with pytest.raises(RuntimeError, match="Fabric is being used but Device 1 is not active"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    assert mesh.create_submesh(ttnn.MeshShape(1, 4)).get_num_devices() == 4


@pytest.mark.parametrize(
    ("system", "shape", "axis", "expected"),
    [
        ("Galaxy", (8, 4), 0, "Ring"),
        ("Galaxy", (8, 4), None, "Ring"),
        ("T3000", (2, 4), 1, "Linear"),  # no cable back
        ("T3000", (1, 8), 1, "Ring"),  # the snake of two rows closes
        ("N300", (1, 2), 1, "Linear"),  # two devices
        (None, (1, 8), 1, "Linear"),
    ],
)
def test_a_ring_needs_a_way_back_and_more_than_two_devices(
    system: str | None, shape: tuple[int, int], axis: int | None, expected: str
) -> None:
    ttnn.set_system(system)
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape))
    x = ttnn.from_torch(torch.ones(32, 32), layout=ttnn.TILE_LAYOUT, device=mesh)
    assert ttnn.get_usable_topology(x, ttnn.Topology.Ring, axis) is ttnn.Topology[expected]
    assert ttnn.get_usable_topology(x, ttnn.Topology.Linear, axis) is ttnn.Topology.Linear


def test_semaphores_count_at_one_address() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    cores = ttnn.num_cores_to_corerangeset(8, ttnn.CoreCoord(8, 8), row_wise=True)
    a, b = (ttnn.create_global_semaphore(mesh, cores, value) for value in (0, 7))
    assert ttnn.get_global_semaphore_address(a) != ttnn.get_global_semaphore_address(b)
    assert (a.value, b.value, a.add(2)) == (0, 7, 2)
    ttnn.reset_global_semaphore_value(a, 0)
    assert a.value == 0
    with pytest.raises(TypeError, match="a semaphore counts from 0"):
        ttnn.reset_global_semaphore_value(a, -1)


def test_delays_are_checked_for_the_shape_of_the_mesh() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 2))
    ttnn.apply_device_delay(mesh, [[0, 100], [200, 300]])
    with pytest.raises(RuntimeError, match="for a mesh of shape"):
        ttnn.apply_device_delay(mesh, [[0, 1, 2]])


# sub-devices, memory, cores


def test_sub_devices_are_loaded_stalled_and_removed_in_order() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    halves = [ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(x, 0), ttnn.CoreCoord(x + 3, 7))]) for x in (0, 4)]
    manager = mesh.create_sub_device_manager([ttnn.SubDevice([half]) for half in halves], 3200)
    mesh.load_sub_device_manager(manager)
    mesh.set_sub_device_stall_group([ttnn.SubDeviceId(1)])
    ttnn.synchronize_device(mesh, sub_device_ids=[ttnn.SubDeviceId(0)])
    with pytest.raises(RuntimeError, match="there is no sub-device"):
        mesh.set_sub_device_stall_group([ttnn.SubDeviceId(2)])
    with pytest.raises(RuntimeError, match="Cannot remove active sub device manager"):
        mesh.remove_sub_device_manager(manager)
    mesh.clear_loaded_sub_device_manager()
    mesh.remove_sub_device_manager(manager)
    with pytest.raises(RuntimeError, match="does not exist"):
        mesh.load_sub_device_manager(manager)
    with pytest.raises(RuntimeError, match="intersect"):
        mesh.create_sub_device_manager([ttnn.SubDevice([halves[0]])] * 2, 0)


def test_a_memory_view_tells_every_piece(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.from_torch(torch.ones(64, 64), layout=ttnn.TILE_LAYOUT, device=mesh)
    view = ttnn.get_memory_view(mesh, ttnn.BufferType.DRAM)
    assert view.num_banks == 12 and view.total_bytes_allocated_per_bank >= -(-4 * 64 * 64 // 12)
    assert view.total_bytes_allocated_per_bank + view.total_bytes_free_per_bank == view.total_bytes_per_bank
    assert [each["allocated"] for each in view.block_table] == ["yes", "no"]
    monkeypatch.chdir(tmp_path)
    ttnn.dump_device_memory_state(mesh, prefix="here_")
    summary = (tmp_path / "generated/reports/here_memory_usage_summary.csv").read_text()
    assert str(view.total_bytes_allocated_per_bank) in summary
    ttnn.deallocate(x)
    assert ttnn.get_memory_view(mesh, ttnn.BufferType.DRAM).total_bytes_allocated_per_bank == 0


def test_cores_are_numbered_one_way_and_back() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    core = ttnn.CoreCoord(3, 5)
    assert mesh.logical_core_from_worker_core(mesh.worker_core_from_logical_core(core)) == core
    with pytest.raises(RuntimeError, match="there is no core 8-0"):
        mesh.worker_core_from_logical_core(ttnn.CoreCoord(8, 0))
    assert mesh.dram_core_from_logical_core(ttnn.CoreCoord(11, 0)) == ttnn.CoreCoord(11, 0)
    workers = mesh.get_optimal_dram_bank_to_logical_worker_assignment(ttnn.NOC.RISCV_0_default)
    assert len(set(workers)) == 12
    assert mesh.core_grid == ttnn.CoreGrid(x=8, y=8) and mesh.core_grid.num_cores == 64
    assert math.isnan(mesh.sfpu_nan()) and mesh.sfpu_inf() == math.inf and mesh.sfpu_eps() == 2.0**-23


# sockets and processes


def socket_config(**ends: int) -> ttnn.SocketConfig:
    cores = [ttnn.MeshCoreCoord(ttnn.MeshCoordinate(0, n), ttnn.CoreCoord(0, 0)) for n in range(2)]
    connections = [ttnn.SocketConnection(cores[n], cores[1 - n]) for n in range(2)]
    return ttnn.SocketConfig(connections, ttnn.SocketMemoryConfig(ttnn.BufferType.L1, 4096), **ends)


def numbers(mesh: ttnn.MeshDevice, *values: float) -> ttnn.Tensor:
    """A number on each of two devices."""
    mapper = ttnn.ShardTensorToMesh(mesh, dim=0)
    return ttnn.from_torch(torch.tensor(values)[:, None], ttnn.bfloat16, device=mesh, mesh_mapper=mapper)


def listed(tensor: ttnn.Tensor) -> list[float]:
    return ttnn.to_torch(tensor, mesh_composer=ttnn.ConcatMeshToTensor(dim=0)).flatten().tolist()


def test_both_ends_of_a_socket_between_processes_are_two_ranks() -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    with pytest.raises(RuntimeError, match="rank 0 is not one of two ends of a socket from rank 0 to rank 0"):
        ttnn.MeshSocket(mesh, socket_config(sender_rank=0, receiver_rank=0))
    sender, receiver = ttnn.create_socket_pair(mesh, mesh, socket_config(sender_rank=0, receiver_rank=0))
    ttnn.experimental.send_async(numbers(mesh, 1.5, 2.5), sender)
    room = numbers(mesh, 0, 0)
    ttnn.experimental.recv_async(room, receiver)
    assert listed(room) == [2.5, 1.5]  # connections cross over


def test_alone_a_program_is_rank_0_of_1() -> None:
    ttnn.init_distributed_context()
    assert ttnn.distributed_context_is_initialized() and not ttnn.using_distributed_env()
    assert ttnn.distributed_context_get_rank() == ttnn.Rank(0) and int(ttnn.distributed_context_get_size()) == 1
    ttnn.distributed_context_barrier()
    assert ttnn.distributed_context_allgather_int(5) == [5]
    with pytest.raises(RuntimeError, match="would wait for ever"):
        ttnn.distributed_context_recv_bytes(1, 0)
    with pytest.raises(TypeError, match="there is no rank 1"):
        ttnn.distributed_context_send_bytes(b"x", 1)


def talk() -> tuple[int, list[int], bytes, list[float]]:
    """What a rank of two does: numbers, bytes, and a socket from rank 0 to rank 1."""
    os.environ["TT_MESH_ID"] = os.environ["RANK"]  # two meshes, one process each
    ttnn.init_distributed_context()
    rank = int(ttnn.distributed_context_get_rank())
    ttnn.distributed_context_barrier()
    given = ttnn.distributed_context_allgather_int(rank + 10)
    if rank == 0:
        ttnn.distributed_context_send_bytes(b"mesh", 1, tag=3)
    told = ttnn.distributed_context_recv_bytes(4, 0, tag=3) if rank else b""
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as mesh:
        socket = ttnn.MeshSocket(mesh, socket_config(sender_rank=0, receiver_rank=1))
        tensor = numbers(mesh, 1.5, 2.5) if rank == 0 else numbers(mesh, 0, 0)
        if rank == 0:
            ttnn.experimental.send_async(tensor, socket)
        else:
            ttnn.experimental.recv_async(tensor, socket)
        return rank, given, told, listed(tensor)


def test_two_processes_share_numbers_bytes_and_a_socket() -> None:
    assert ranks.run(2, "test_ttnn_devices:talk") == [
        (0, [10, 11], b"", [1.5, 2.5]),
        (1, [10, 11], b"mesh", [2.5, 1.5]),
    ]


def product() -> tuple[bool, torch.Tensor, list[float]]:
    """Whether the last device is held here, a product of shards, and its sums over the columns in every mode."""
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
        given = torch.arange(64.0).reshape(8, 8) / 64
        rows = ttnn.ShardTensorToMesh(mesh, dim=0)
        x = ttnn.from_torch(given, device=mesh, mesh_mapper=rows, layout=ttnn.TILE_LAYOUT)
        made = ttnn.matmul(x, ttnn.from_torch(given.T.contiguous(), device=mesh, layout=ttnn.TILE_LAYOUT))
        sums = [ttnn.all_reduce(made, mode=mode) for mode in ("direct", "host", "fabric")]
        is_here = mesh.get_view().is_local(ttnn.MeshCoordinate(1, 3))
        return is_here, ttnn.to_torch(made), [ttnn.to_torch(each).sum().item() for each in sums]


def test_two_processes_split_a_mesh_and_all_compute_the_same() -> None:
    given = torch.arange(64.0).reshape(8, 8) / 64
    for rank, (is_here, made, sums) in enumerate(ranks.run(2, "test_ttnn_devices:product")):
        assert is_here == (rank == 1)
        torch.testing.assert_close(made, given @ given.T)
        assert sums == pytest.approx([float((given @ given.T).sum())] * 3)
