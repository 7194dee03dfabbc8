"""The tensor: members, operators, memory, conversions, transfers, the public surface, settings and pictures."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshloom import ttnn
from meshloom.errors import ArgumentError, BoundsError, DTypeError, OperandError, TraceError, UncoveredError
from meshloom.ttnn import config, surface
from meshloom.ttnn.tensor import pictures

pytest_plugins = ("ttnn_meshes",)

KINDS = "BFLOAT16 FLOAT32 UINT32 BFLOAT8_B BFLOAT4_B UINT8 UINT16 INT32 INT8".split()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)


@pytest.fixture
def mesh(open_mesh):
    return open_mesh(2, 4)


def sharded(mesh, x, dim=0, **options):
    return ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=dim), **options)


# the surface


def test_importing_the_surface_does_not_load_torch():
    code = "import sys, meshloom; from meshloom import ttnn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_both_spellings_of_the_import_give_one_module():
    assert importlib.import_module("meshloom.ttnn") is ttnn


def test_namespaces_hold_ops_by_their_dotted_names_and_modules_their_own_names():
    assert ttnn._ttnn.multi_device.MeshShape is ttnn.types.MeshShape is ttnn.MeshShape
    dotted = [name for name in surface.table() if name.startswith("experimental.") and name.count(".") == 1]
    assert dotted, "there are experimental ops"
    for name in dotted:
        assert getattr(ttnn.experimental, name.partition(".")[2]) is surface.table()[name]
    assert ttnn.device.open_mesh_device is ttnn.open_mesh_device
    assert set(dir(ttnn)) > {"add", "from_torch", "MeshShape", "experimental", "distributed"}


def test_every_listed_name_of_every_module_is_found():
    for name, value in surface.flat().items():
        assert getattr(ttnn, name) is (surface.table().get(name) or value)


def test_a_name_that_is_not_covered_is_an_attribute_error_that_names_the_nearest():
    missing = sorted(surface.originals() - set(surface.table()) - set(surface.flat()) - set(dir(ttnn)))
    missing = [name for name in missing if "." not in name]
    assert missing, "some names of the original are not covered"
    with pytest.raises(AttributeError, match=f"ttnn.{missing[0]} is not covered"):
        getattr(ttnn, missing[0])
    with pytest.raises(UncoveredError, match=r"(?s)ttnn has no from_troch.*did you mean 'from_torch'"):
        _ = ttnn.from_troch


# shape, format, memory


def test_tiles_pad_and_rows_do_not(mesh):
    x = sharded(mesh, numbers(1, 1, 40, 80), dim=3, layout=ttnn.TILE_LAYOUT)
    assert (x.shape, x.padded_shape) == ([1, 1, 40, 10], [1, 1, 64, 32])
    assert (x.logical_volume(), x.volume()) == (400, 2048)
    assert ttnn.has_tile_padding(x) and ttnn.has_tile_padding(x, dim=-1) and not ttnn.has_tile_padding(x, dim=0)
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT)
    assert rows.padded_shape == rows.shape and torch.equal(rows.to_torch(), numbers(1, 1, 40, 80))
    assert ttnn.from_torch(torch.tensor(1.0), layout=ttnn.TILE_LAYOUT).padded_shape == [32, 32]


def test_the_members_of_section_seven(mesh):
    x = sharded(mesh, numbers(16, 64).bfloat16(), layout=ttnn.TILE_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
    assert x.storage_type() is ttnn.StorageType.DEVICE and x.cpu().storage_type() is ttnn.StorageType.HOST
    assert x.device() is mesh and x.devices() == [mesh] and x.cpu().device() is None and len(x.device_coords()) == 8
    assert x.memory_config() == ttnn.L1_MEMORY_CONFIG and not x.is_sharded() and x.is_allocated()
    assert (x.element_size(), x.buffer_page_size(), x.buffer_num_pages()) == (2, 2048, 2)
    assert x.spec == ttnn.TensorSpec([2, 64], ttnn.bfloat16, ttnn.TILE_LAYOUT, ttnn.BufferType.L1)
    assert (x.get_dtype(), x.get_layout(), x.get_tile()) == (ttnn.bfloat16, ttnn.TILE_LAYOUT, ttnn.Tile((32, 32)))
    rows = sharded(mesh, numbers(16, 5), layout=ttnn.ROW_MAJOR_LAYOUT)
    assert (rows.buffer_page_size(), rows.buffer_aligned_page_size(), rows.buffer_num_pages()) == (20, 32, 2)
    assert x.tensor_id != rows.tensor_id and x.buffer_unique_id() != rows.buffer_unique_id()
    with pytest.raises(OperandError, match="no buffer"):
        x.cpu().buffer_address()


def test_dram_grows_up_and_l1_grows_down_and_freed_memory_is_handed_out_again(open_mesh):
    mesh = open_mesh(1, 2)
    make = {
        "up": lambda: ttnn.from_torch(numbers(64, 64), device=mesh),
        "down": lambda: ttnn.from_torch(numbers(64, 64), device=mesh, memory_config=ttnn.L1_MEMORY_CONFIG),
    }
    for direction, tensor in make.items():
        first, second = tensor(), tensor()
        above = second.buffer_address() > first.buffer_address()
        assert above == (direction == "up")
        address = first.buffer_address()
        ttnn.deallocate(first)
        assert tensor().buffer_address() == address, "the freed block comes first"


def test_a_tensor_without_room_names_those_who_have_it(open_mesh):
    mesh = open_mesh(1, 2)
    held = ttnn.from_torch(numbers(32, 64), device=mesh, memory_config=ttnn.L1_MEMORY_CONFIG)
    with pytest.raises(
        MemoryError, match=r"(?s)tensor FLOAT32 .* does not fit into L1.*tensor FLOAT32 \[32, 64\], since test_"
    ):
        ttnn.allocate_tensor_on_device([1 << 14, 1 << 13], ttnn.float32, ttnn.TILE_LAYOUT, mesh, ttnn.L1_MEMORY_CONFIG)
    assert held.is_allocated()


def test_after_deallocate_the_shape_is_readable_and_every_use_is_a_clear_error(mesh):
    x = sharded(mesh, numbers(16, 4))
    used = mesh.runtime.memory_usage()[(0, 0)].used
    ttnn.deallocate(x)
    ttnn.deallocate(x)
    assert mesh.runtime.memory_usage()[(0, 0)].used < used
    assert x.shape == [2, 4] and not x.is_allocated() and "deallocated" in repr(x)
    for use in (lambda: ttnn.to_torch(x), lambda: ttnn.add(x, 1.0), x.buffer_address, lambda: x.cpu(), x.item):
        with pytest.raises(RuntimeError, match="not allocated"):
            use()


def test_force_frees_what_others_share_and_without_it_the_last_one_does(mesh):
    x = sharded(mesh, numbers(16, 4))
    parts = ttnn.get_device_tensors(x)
    x.deallocate()
    assert parts[0].is_allocated() and torch.equal(parts[1].to_torch(), numbers(16, 4)[2:4])
    parts[0].deallocate(force=True)
    assert not parts[1].is_allocated()
    with pytest.raises(RuntimeError, match="not allocated"):
        parts[1].to_torch()


# values


@pytest.mark.parametrize("kind", KINDS)
def test_values_come_back_in_the_dtype_that_torch_has_for_them(mesh, kind):
    dtype = getattr(ttnn.DataType, kind)
    x = ttnn.from_torch(numbers(8, 4), dtype=dtype, device=mesh)
    expected = {"BFLOAT8_B": torch.float32, "BFLOAT4_B": torch.float32, "BFLOAT16": torch.bfloat16}
    found = ttnn.to_torch(x)
    assert x.dtype is dtype and found.dtype == expected.get(kind, getattr(torch, kind.lower(), None))
    if kind != "BFLOAT4_B":
        assert torch.equal(found.float(), numbers(8, 4))
    assert x.layout is (ttnn.TILE_LAYOUT if kind.endswith("_B") else ttnn.ROW_MAJOR_LAYOUT)


def test_the_dtype_follows_from_torchs_and_float64_has_to_be_named():
    inferred = {
        torch.float16: "BFLOAT16", torch.int8: "INT8", torch.int16: "UINT16", torch.int32: "INT32",
        torch.int64: "UINT32", torch.uint8: "UINT8", torch.uint16: "UINT16", torch.uint32: "UINT32",
        torch.bool: "UINT8",
    }  # fmt: skip
    for kind, name in inferred.items():
        assert ttnn.from_torch(torch.ones(2).to(kind)).dtype.name == name
    with pytest.raises(DTypeError, match="float64"):
        ttnn.from_torch(torch.ones(2, dtype=torch.float64))


def test_fractions_are_cut_and_integers_wrap_or_stop_as_in_the_original():
    x = torch.tensor([1.6, -1.6, 300.0, 70000.0])
    found = {name: ttnn.from_torch(x, dtype=getattr(ttnn, name)).to_list() for name in ("uint8", "uint16", "int32")}
    assert found == {"uint8": [1, 255, 44, 112], "uint16": [1, 0, 300, 65535], "int32": [1, -1, 300, 70000]}
    assert ttnn.from_torch(x, dtype=ttnn.uint32).to_list()[1] == 2**32 - 1


def test_tensors_share_no_memory_with_torch(mesh):
    x = numbers(8, 4)
    t, whole = sharded(mesh, x), ttnn.from_torch(x)
    back, again = ttnn.to_torch(t), ttnn.to_torch(whole)
    x.zero_(), back.zero_(), again.zero_()
    assert torch.equal(ttnn.to_torch(t), numbers(8, 4)) and torch.equal(ttnn.to_torch(whole), numbers(8, 4))


def test_block_floats_need_tiles_and_a_spec_stands_alone():
    with pytest.raises(RuntimeError, match="Layout must be Layout::TILE for bfloat8_b or bfloat4_b!"):
        ttnn.from_torch(numbers(32, 32), dtype=ttnn.bfloat8_b, layout=ttnn.ROW_MAJOR_LAYOUT)
    spec = ttnn.TensorSpec([4, 4], ttnn.bfloat16, ttnn.TILE_LAYOUT)
    assert ttnn.from_torch(numbers(4, 4), spec=spec).spec == spec
    with pytest.raises(RuntimeError, match=r"ttnn.from_torch: dtype must be None when spec is specified"):
        ttnn.from_torch(numbers(4, 4), dtype=ttnn.bfloat16, spec=spec)


def test_to_torch_takes_a_dtype_and_a_rank():
    x = ttnn.from_torch(numbers(1, 1, 2, 3))
    assert ttnn.to_torch(x, dtype=torch.int32, torch_rank=2).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(RuntimeError, match="ttnn: Unable to squeeze to desired rank!"):
        ttnn.to_torch(x, torch_rank=1)


def test_item_list_numpy_and_the_constructors():
    assert ttnn.Tensor([1, 2, 3, 4], [2, 2], ttnn.int32, ttnn.ROW_MAJOR_LAYOUT).to_list() == [[1, 2], [3, 4]]
    x = ttnn.Tensor(numbers(2, 2), ttnn.bfloat16)
    assert x.dtype is ttnn.bfloat16 and numpy.array_equal(x.to_numpy(), numbers(2, 2).numpy())
    assert ttnn.Tensor(numbers(1)).item() == 1.0
    with pytest.raises(OperandError, match="no single item"):
        x.item()


def test_an_item_is_one_that_all_devices_agree_on(mesh):
    assert ttnn.from_torch(torch.tensor([3.0]), device=mesh).item() == 3.0
    with pytest.raises(OperandError, match="different values"):
        sharded(mesh, numbers(8)).item()


def test_the_host_buffer_has_the_parts_by_coordinate(mesh):
    x = ttnn.from_torch(numbers(10, 2), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    buffer = x.host_buffer()
    assert list(buffer.shape()) == [2, 4] and buffer.is_local(ttnn.MeshCoordinate(1, 3))
    assert torch.equal(buffer.get_shard(ttnn.MeshCoordinate(1, 0)), numbers(10, 2)[8:])
    assert buffer.get_shard(ttnn.MeshCoordinate(1, 1)) is None and len(list(buffer.shard_coords())) == 5
    with pytest.raises(BoundsError, match="out of bounds"):
        buffer.get_shard(ttnn.MeshCoordinate(2, 0))


def test_padding_by_hand():
    x = ttnn.from_torch(numbers(2, 3))
    padded = x.pad([4, 4], [1, 0], 9.0)
    assert padded.to_list() == [[9, 9, 9, 9], [1, 2, 3, 9], [4, 5, 6, 9], [9, 9, 9, 9]]
    assert torch.equal(padded.unpad([1, 0], [3, 3]).to_torch(), numbers(2, 3))
    tiled = x.pad_to_tile(0.0)
    assert tiled.shape == [2, 3] and tiled.padded_shape == [32, 32]
    assert torch.equal(tiled.unpad_from_tile([2, 3]).to_torch(), numbers(2, 3))
    inside = x.pad([4, 4], [0, 0], 9.0)
    assert inside.to_list() == x.to_list() and inside.padded_shape == [4, 4]
    assert inside.unpad([0, 2], [3, 4]).to_list() == [[3, 9], [6, 9], [9, 9]]
    assert inside.to_torch_with_padded_shape()[3].tolist() == [9, 9, 9, 9]
    assert x.reshape(3, 2).shape == x.reshape([3, 2]).shape == [3, 2]
    assert ttnn.from_torch(numbers(2, 3), layout=ttnn.TILE_LAYOUT).to_torch_with_padded_shape().shape == (32, 32)


def test_a_shard_of_a_core_is_its_piece(open_mesh):
    mesh, x = open_mesh(1, 2), numbers(128, 64)
    memory = ttnn.create_sharded_memory_config((128, 64), ttnn.CoreGrid(x=2, y=2), ttnn.ShardStrategy.BLOCK)
    t = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, memory_config=memory)
    assert torch.equal(t.extract_shard(3).to_torch(), x[64:, 32:])
    assert torch.equal(t.extract_shard(ttnn.CoreCoord(1, 0)).to_torch(), x[:64, 32:])
    with pytest.raises(BoundsError):
        t.extract_shard(4)


# operators

SCALARS = st.floats(0.5, 2.0, width=16)


@given(SCALARS, st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_operators_are_those_of_torch_on_every_part(open_mesh, scalar, rows):
    mesh = open_mesh(1, 2)
    x, y = numbers(rows, 4), numbers(rows, 4) * 2 - 3
    mapper = ttnn.ShardTensorToMesh(mesh, dim=0, uneven=True)
    a, b = (ttnn.from_torch(v, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=mapper) for v in (x, y))
    pairs = [
        (a + b, x + y), (a - b, x - y), (a * b, x * y), (a / b, x / y),
        (a + scalar, x + scalar), (scalar + a, x + scalar), (a - scalar, x - scalar), (scalar - a, scalar - x),
        (a * scalar, x * scalar), (scalar * a, x * scalar), (a / scalar, x / scalar), (scalar / a, scalar / x),
        (-a, -x), (a**2, x**2),
    ]  # fmt: skip
    for found, expected in pairs:
        torch.testing.assert_close(ttnn.to_torch(found), expected)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        method = f"__{name}__"
        assert torch.equal(ttnn.to_torch(getattr(a, method)(b)).bool(), getattr(x, method)(y))


def test_matmul_and_indexing(mesh):
    x, w = numbers(8, 32) / 100, numbers(32, 16) / 100
    a, b = sharded(mesh, x, layout=ttnn.TILE_LAYOUT), ttnn.from_torch(w, device=mesh, layout=ttnn.TILE_LAYOUT)
    torch.testing.assert_close(ttnn.to_torch(a @ b), x @ w)
    t = ttnn.from_torch(numbers(4, 6, 8), device=mesh)
    for index in (0, -1, slice(1, 3), (slice(None), 2), (..., 3), (1, ..., slice(2, 8, 2)), (1, 2, slice(0, 4))):
        assert torch.equal(ttnn.to_torch(t[index]), numbers(4, 6, 8)[index])
    with pytest.raises(IndexError, match="out of bounds"):
        t[4]
    with pytest.raises(IndexError, match="4 indices for a tensor of 3 dims"):
        t[0, 0, 0, 0]
    with pytest.raises(TypeError, match="cannot index"):
        t["a"]


def test_tensors_are_told_apart_by_identity_in_sets_and_are_not_iterated(mesh):
    a, b = ttnn.from_torch(numbers(2)), ttnn.from_torch(numbers(2))
    assert len({a, b}) == 2
    with pytest.raises(TypeError):
        iter(a)


# transfers


def test_a_single_tensor_goes_to_every_device_and_parts_to_their_own(mesh, open_mesh):
    x = numbers(8, 2)
    single = ttnn.to_device(ttnn.from_torch(x), mesh)
    assert repr(single.tensor_topology().placements()) == "[PlacementReplicate()]" and torch.equal(single.to_torch(), x)
    host = sharded(mesh, x).cpu()
    again = ttnn.to_device(host, mesh, ttnn.L1_MEMORY_CONFIG)
    assert again.memory_config() == ttnn.L1_MEMORY_CONFIG and torch.equal(again.to_torch(), x)
    assert ttnn.to_device(again, mesh) is not again
    assert ttnn.to_device(again, mesh).buffer_address() == again.buffer_address()
    with pytest.raises(RuntimeError, match=r"Coordinate MeshCoordinate\(\[0, 2\]\) not found in mesh"):
        ttnn.to_device(host, open_mesh(1, 2))


def test_a_host_tensor_that_knows_its_mesh_moves_with_the_first_op_that_computes(mesh):
    x = ttnn.from_torch(numbers(8, 2), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    assert x.device() is None and x.storage_type() is ttnn.StorageType.HOST
    y = ttnn.add(x, 1.0)
    assert x.device() is mesh and y.device() is mesh and x.buffer_address() != y.buffer_address()
    assert torch.equal(y.to_torch(), numbers(8, 2) + 1)
    with pytest.raises(RuntimeError, match="must be on device, got storage type: StorageType::HOST"):
        ttnn.add(ttnn.from_torch(numbers(2)), 1.0)


def test_writing_keeps_the_address_and_takes_the_label(mesh):
    x = numbers(8, 4)
    room = ttnn.allocate_tensor_on_device([1, 4], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT, mesh)
    assert repr(room.tensor_topology().placements()) == "[PlacementReplicate(), PlacementReplicate()]"
    address, array = room.buffer_address(), room.block
    host = ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    ttnn.copy_host_to_device_tensor(host, room)
    assert room.buffer_address() == address and room.block is array and torch.equal(room.to_torch(), x)
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(x[:1]), room)
    assert room.block is array and torch.equal(room.to_torch(), x[:1])
    back = ttnn.allocate_tensor_on_host(room.spec, mesh)
    ttnn.copy_device_to_host_tensor(room, back)
    assert torch.equal(back.to_torch(), x[:1])


def test_copies_refuse_what_does_not_match(mesh):
    room = ttnn.allocate_tensor_on_device([1, 4], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT, mesh)
    for host, text in (
        (ttnn.from_torch(numbers(2, 4)), "Host tensor has different shape"),
        (ttnn.from_torch(numbers(1, 4).bfloat16()), "Host tensor has different dtype"),
        (ttnn.from_torch(numbers(1, 4), layout=ttnn.TILE_LAYOUT), "Host tensor has different page config"),
    ):
        with pytest.raises(RuntimeError, match=text):
            ttnn.copy_host_to_device_tensor(host, room)
    with pytest.raises(RuntimeError, match="in the order of their names"):
        ttnn.copy_host_to_device_tensor(room, ttnn.from_torch(numbers(1, 4)))
    with pytest.raises(ArgumentError, match="takes"):
        ttnn.allocate_tensor_on_device([1, 4], ttnn.float32, mesh_device=mesh)


def test_a_captured_tensor_does_not_change_its_array(open_mesh):
    mesh = open_mesh(1, 2)
    same = ttnn.from_torch(numbers(2, 2), device=mesh)
    ttnn.add(same, 1.0)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    y = ttnn.add(same, 1.0)
    with pytest.raises(TraceError, match="Reads are not supported during trace capture"):
        ttnn.to_torch(same)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    parts = ttnn.from_torch(numbers(4, 2), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(TraceError, match="would differ"):
        ttnn.copy_host_to_device_tensor(parts, same)
    with pytest.raises(TraceError, match="would differ"):
        ttnn.add(ttnn.to_device(parts, mesh), 1.0, output_tensor=same)
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(numbers(2, 2) * 5), same)
    ttnn.execute_trace(mesh, trace, cq_id=0, blocking=True)
    assert torch.equal(y.to_torch(), numbers(2, 2) * 5 + 1)
    ttnn.release_trace(mesh, trace)


@pytest.mark.parametrize("dtype", [ttnn.bfloat8_b, ttnn.bfloat4_b])
def test_block_floats_in_a_trace_are_those_outside(open_mesh, dtype):
    mesh = open_mesh(1, 2)
    values = torch.randn(32, 64)
    values[0, 0], values[1, 3], values[2, 16:32], values[3, :16] = math.inf, math.nan, 1e-35, 0.0
    x = ttnn.from_torch(torch.zeros(32, 64), device=mesh, layout=ttnn.TILE_LAYOUT)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    y = ttnn.typecast(x, dtype)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(values, layout=ttnn.TILE_LAYOUT), x)
    ttnn.execute_trace(mesh, trace, cq_id=0)
    torch.testing.assert_close(y.to_torch(), ttnn.typecast(x, dtype).to_torch(), rtol=0, atol=0, equal_nan=True)
    assert y.to_torch().isnan().sum() == 1 and y.to_torch().isinf().sum() == 1
    ttnn.release_trace(mesh, trace)


def test_copies_of_a_tensor(mesh):
    x = sharded(mesh, numbers(8, 4))
    for made in (ttnn.clone(x), ttnn.to_memory_config(x, ttnn.L1_MEMORY_CONFIG), ttnn.to_layout(x, ttnn.TILE_LAYOUT)):
        assert made.buffer_address() != x.buffer_address() or made.memory_config() != x.memory_config()
        assert torch.equal(made.to_torch(), numbers(8, 4)) and made.tensor_topology() == x.tensor_topology()
    whole = ttnn.typecast(x, ttnn.int32)
    assert whole.dtype is ttnn.int32 and whole.to_torch().dtype == torch.int32
    assert ttnn.typecast(x, ttnn.float32, ttnn.uint16).dtype is ttnn.uint16
    target = ttnn.from_torch(torch.zeros(1, 4), device=mesh)
    assert ttnn.copy(x, target) is target and torch.equal(target.to_torch(), numbers(8, 4))
    moved = ttnn.move(ttnn.clone(x), memory_config=ttnn.L1_MEMORY_CONFIG)
    assert moved.memory_config() == ttnn.L1_MEMORY_CONFIG and torch.equal(moved.to_torch(), numbers(8, 4))
    assert ttnn.to_layout(x, x.layout) is x and ttnn.to_dtype(ttnn.from_torch(numbers(2)), ttnn.bfloat16).item


def test_reallocate_moves_together(open_mesh):
    mesh = open_mesh(1, 2)
    hole, x = ttnn.from_torch(numbers(64, 64), device=mesh), ttnn.from_torch(numbers(64, 64), device=mesh)
    before = hole.buffer_address()
    ttnn.deallocate(hole)
    moved = ttnn.reallocate(x)
    assert moved.buffer_address() == before and not x.is_allocated() and torch.equal(moved.to_torch(), numbers(64, 64))


# parts


def test_parts_of_devices_share_memory_and_keep_the_label(mesh):
    x = sharded(mesh, numbers(8, 4))
    parts = ttnn.get_device_tensors(x)
    assert [part.device_coords() for part in parts] == [[place] for place in x.device_coords()]
    assert all(part.device() is mesh and part.buffer_address() == x.buffer_address() for part in parts)
    assert all(part.tensor_topology() == x.tensor_topology() for part in parts)
    assert torch.equal((parts[2] + 1.0).to_torch(), numbers(8, 4)[2:3] + 1)
    label = x.tensor_topology()
    some = ttnn.combine_device_tensors(tensors=parts[1:3])
    assert some.device_coords() == x.device_coords()[1:3] and torch.equal(some.to_torch(), numbers(8, 4)[1:3])
    assert x.tensor_topology() == label, "the source keeps its label"


def test_parts_of_the_host_stand_alone_and_come_back(mesh):
    x = sharded(mesh, numbers(8, 4)).cpu()
    parts = ttnn.get_device_tensors(x)
    assert all(list(part.tensor_topology().distribution_shape()) == [1] for part in parts)
    again = ttnn.from_host_shards(parts, mesh.shape)
    assert torch.equal(again.to_torch(), numbers(8, 4))
    with pytest.raises(RuntimeError, match="Number of tensor shards must match mesh size"):
        ttnn.from_host_shards(parts[:3], mesh.shape)
    with pytest.raises(RuntimeError, match="All tensor shards must have the same tensor spec"):
        ttnn.from_host_shards([*parts[:7], ttnn.from_torch(numbers(2, 4))], mesh.shape)


def test_results_combined_from_several_tensors_have_memory_of_their_own(mesh):
    parts = ttnn.get_device_tensors(sharded(mesh, numbers(8, 4)))
    whole = ttnn.combine_device_tensors(tensors=[part * (i + 1.0) for i, part in enumerate(parts)])
    assert torch.equal(whole.to_torch(), numbers(8, 4) * torch.arange(1.0, 9)[:, None])
    with pytest.raises(OperandError, match="same device"):
        ttnn.combine_device_tensors(tensors=[parts[0], parts[0]])


def test_ops_on_some_devices_exist_on_the_devices_that_all_operands_are_on(mesh):
    parts = ttnn.get_device_tensors(sharded(mesh, numbers(8, 4)))
    some = ttnn.combine_device_tensors(tensors=parts[:3])
    other = ttnn.combine_device_tensors(tensors=parts[1:])
    assert ttnn.add(some, other).device_coords() == some.device_coords()[1:]


# text and pictures


def test_the_text_shows_every_part_that_differs(mesh):
    text = repr(sharded(mesh, numbers(2, 2)))
    assert "(0, 0): [[1.0000, 2.0000]]" in text and "(0, 1): [[3.0000, 4.0000]]" in text and "(0, 2)" not in text
    assert "(*, *): [[1.0000, 2.0000]," in repr(ttnn.from_torch(numbers(2, 2), device=mesh))
    ttnn.set_printoptions(precision=1, profile="short")
    try:
        assert repr(ttnn.from_torch(numbers(9))).startswith("ttnn.Tensor([1.0, 2.0,  ..., 8.0, 9.0], shape=")
    finally:
        ttnn.set_printoptions(precision=4)
    with pytest.raises(TypeError, match="there is no profile"):
        ttnn.set_printoptions(profile="tall")


def test_tensors_of_the_host_and_of_one_device_print_as_in_the_original(open_mesh):
    x = torch.tensor([187, 17, 124, 164, 50])
    line = (
        "ttnn.Tensor([  187,    17,  ...,   164,    50], shape=Shape([5]), dtype=DataType::UINT32, layout=Layout::{})"
    )
    host = ttnn.from_torch(x, dtype=ttnn.uint32)
    assert str(host) == line.format("ROW_MAJOR") and str(ttnn.to_layout(host, ttnn.TILE_LAYOUT)) == line.format("TILE")
    assert str(ttnn.from_torch(x, dtype=ttnn.uint32, device=open_mesh(1, 1))) == line.format("ROW_MAJOR")
    assert "MeshDevice(1x2" in str(ttnn.from_torch(x, dtype=ttnn.uint32, device=open_mesh(1, 2)))
    rows = str(ttnn.from_torch(torch.arange(12).int().reshape(6, 1, 2)))
    assert rows == (
        "ttnn.Tensor([[[    0,     1]],\n\n             [[    2,     3]],\n\n             ...,\n\n"
        "             [[    8,     9]],\n\n             [[   10,    11]]], "
        "shape=Shape([6, 1, 2]), dtype=DataType::INT32, layout=Layout::ROW_MAJOR)"
    )


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_pictures_of_meshes_and_tensors_with_any_number_of_axes(open_mesh, capsys, shape):
    mesh = open_mesh(*shape)
    ttnn.visualize_mesh_device(mesh)
    drawn = capsys.readouterr().out
    assert all(f"Dev. ID: {number}" in drawn for number in mesh.get_device_ids())
    x = sharded(mesh, numbers(10, 4))
    ttnn.visualize_tensor(x)
    drawn = capsys.readouterr().out
    assert "[8:10, 0:4]" in drawn and drawn.count("nothing") == 3 and "PlacementShard(0)" in drawn
    with pytest.raises(ArgumentError):
        pictures.visualize_tensor(numbers(2))


def test_the_picture_of_the_system(capsys):
    ttnn.visualize_system_mesh()
    assert "Dev. ID: 0" in capsys.readouterr().out


# settings and hooks


def test_settings_are_typed_known_and_restored(tmp_path):
    with ttnn.manage_config("enable_logging", True):
        assert ttnn.CONFIG.enable_logging
    assert not ttnn.CONFIG.enable_logging
    with pytest.raises(TypeError, match="did you mean 'enable_logging'"):
        ttnn.CONFIG.enable_loging = True
    with pytest.raises(TypeError, match="enable_logging is a bool"):
        ttnn.CONFIG.enable_logging = "yes"
    path = tmp_path / "config.json"
    with ttnn.manage_config("comparison_mode_pcc", 0.9):
        ttnn.save_config_to_json_file(path)
    with ttnn.manage_config("comparison_mode_pcc", 0.5):
        config.read_environment({"TTNN_CONFIG_PATH": str(path)})
        assert ttnn.CONFIG.comparison_mode_pcc == 0.9
        config.read_environment({"TTNN_CONFIG_OVERRIDES": json.dumps({"comparison_mode_pcc": 0.7})})
        assert ttnn.CONFIG.comparison_mode_pcc == 0.7
        ttnn.load_config_from_dictionary({"comparison_mode_pcc": 0.6})
        assert ttnn.CONFIG.comparison_mode_pcc == 0.6
    with pytest.raises(TypeError, match="TTNN_CONFIG_OVERRIDES is not JSON"):
        config.read_environment({"TTNN_CONFIG_OVERRIDES": "{"})


def test_hooks_see_every_operation_while_they_are_registered(mesh):
    x, seen = ttnn.from_torch(numbers(2, 2), device=mesh), []
    with (
        ttnn.register_pre_operation_hook(lambda op, args, kwargs: seen.append(("pre", op.__name__))),
        ttnn.register_post_operation_hook(lambda op, args, kwargs, out: seen.append(("post", out.shape))),
    ):
        ttnn.add(x, 1.0)
    ttnn.add(x, 1.0)
    assert seen == [("pre", seen[0][1]), ("post", [2, 2])]


def test_golden_functions_are_torchs_or_what_was_attached():
    assert ttnn.get_golden_function(ttnn.relu) is torch.relu
    with pytest.raises(ArgumentError):
        ttnn.get_golden_function(len)


# rows


def test_row_013_from_torch_in_tiles_with_a_mapper_round_trips(mesh):
    x = torch.randn([4, 1, 64, 64], dtype=torch.bfloat16)
    t = ttnn.from_torch(
        x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh)
    )  # fmt: skip
    assert torch.equal(ttnn.to_torch(t), x)
    assert torch.equal(ttnn.to_torch(sharded(mesh, x, dim=2, layout=ttnn.TILE_LAYOUT)), x)


def test_row_016_bfloat16_stays_bfloat16(mesh):
    x = torch.randn(8, 32).bfloat16()
    t = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT)
    assert t.dtype is ttnn.bfloat16 and ttnn.add(t, t).dtype is ttnn.bfloat16
    assert ttnn.to_torch(t).dtype == torch.bfloat16 and torch.equal(ttnn.to_torch(t), x)


def test_row_025_the_label_tells_placements_and_survives_ops(mesh):
    x = ttnn.from_torch(
        numbers(4, 8), device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (None, 1))
    )
    expected = "[PlacementReplicate(), PlacementShard(1)]"
    for t in (x, x + 1.0, ttnn.relu(x), ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT), x.cpu()):
        assert repr(t.topology().placements()) == expected == repr(t.tensor_topology().placements())
    assert repr(ttnn.permute(x, (1, 0)).topology().placements()) == "[PlacementReplicate(), PlacementShard(0)]"


def test_row_111_a_host_tensor_with_a_mapper_is_moved_later(mesh):
    w = torch.randn(32, 64)
    weight = ttnn.from_torch(w, dtype=ttnn.bfloat8_b, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
    assert weight.device() is None and weight.layout is ttnn.TILE_LAYOUT
    x = ttnn.from_torch(torch.randn(8, 32), layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    y = ttnn.matmul(x, weight)
    assert y.device() is weight.device() is mesh
    torch.testing.assert_close(ttnn.to_torch(y), ttnn.to_torch(x) @ ttnn.to_torch(weight), rtol=2e-2, atol=1e-1)


def test_row_141_a_read_waits_for_what_is_queued(open_mesh):
    mesh = open_mesh(1, 2)
    x = ttnn.from_torch(numbers(64, 64), device=mesh, layout=ttnn.TILE_LAYOUT)
    ttnn.add(x, 0.0)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    y = x
    for _ in range(50):
        y = ttnn.add(y, 1.0)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    for _ in range(5):
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        assert torch.equal(ttnn.to_torch(y), numbers(64, 64) + 50)
        ttnn.copy_host_to_device_tensor(ttnn.from_torch(torch.zeros(64, 64), layout=ttnn.TILE_LAYOUT), x)
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        assert torch.equal(ttnn.to_torch(y), torch.full((64, 64), 50.0))
        ttnn.copy_host_to_device_tensor(ttnn.from_torch(numbers(64, 64), layout=ttnn.TILE_LAYOUT), x)
    ttnn.release_trace(mesh, trace)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="no complex dtypes"):
        ttnn.from_torch(torch.ones(2, dtype=torch.complex64), dtype=ttnn.float32)
