"""Files of tensors: they come back as they were, and what is not ours, cut short or changed is refused."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn import files

pytest_plugins = ("ttnn_meshes",)

KINDS = "bfloat16 float32 uint32 bfloat8_b bfloat4_b uint8 uint16 int32 int8".split()


@pytest.fixture
def mesh(open_mesh):
    return open_mesh(2, 4)


def check_same(a, b):
    """Two tensors are the same in all that a file keeps."""
    assert torch.equal(a.block, b.block) and a.grid == b.grid and a.device_coords() == b.device_coords()
    assert (a.dtype, a.layout, a.tile, a.memory_config()) == (b.dtype, b.layout, b.tile, b.memory_config())
    assert repr(a.tensor_topology()) == repr(b.tensor_topology())


def test_the_check_of_sameness_sees_another_label(mesh):
    x = ttnn.from_torch(torch.ones(8, 2), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    y = ttnn.from_torch(torch.ones(8, 2), mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    check_same(x, y)
    y.update_tensor_topology(y.tensor_topology().with_placements([ttnn.PlacementShard(1)]))
    with pytest.raises(AssertionError):
        check_same(x, y)


@given(st.sampled_from(KINDS), st.lists(st.integers(0, 9), min_size=0, max_size=3), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_tensor_comes_back_as_it_was(tmp_path_factory, open_mesh, kind, shape, is_tiled, is_sharded):
    mesh, path = open_mesh(2, 4), tmp_path_factory.mktemp("files") / "x.tensorbin"
    dtype = getattr(ttnn, kind)
    layout = ttnn.TILE_LAYOUT if is_tiled or dtype.is_block_float else ttnn.ROW_MAJOR_LAYOUT
    mapper = ttnn.ShardTensorToMesh(mesh, dim=0) if is_sharded and shape else None
    x = ttnn.from_torch(torch.rand(shape) * 100, dtype=dtype, layout=layout, mesh_mapper=mapper)
    ttnn.dump_tensor(path, x)
    check_same(ttnn.load_tensor(path), x)
    assert os.listdir(path.parent) == ["x.tensorbin"], "nothing is left beside it"


def test_a_tensor_of_devices_keeps_its_placement_and_memory(mesh, tmp_path):
    x = torch.randn(9, 64)
    t = ttnn.from_torch(
        x, device=mesh, memory_config=ttnn.L1_MEMORY_CONFIG, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, 1))
    )
    ttnn.dump_tensor(tmp_path / "w.tensorbin", t)
    back = ttnn.load_tensor(tmp_path / "w.tensorbin", device=mesh)
    assert back.device() is mesh and torch.equal(back.to_torch(), x)
    check_same(back, t)


def test_the_suffix_is_asked_for(mesh, tmp_path):
    x = ttnn.from_torch(torch.ones(2))
    for call in (lambda: ttnn.dump_tensor(tmp_path / "x.bin", x), lambda: ttnn.load_tensor(tmp_path / "x.bin")):
        with pytest.raises(RuntimeError, match=r"must have \.tensorbin extension"):
            call()
    with pytest.raises(FileNotFoundError):
        ttnn.load_tensor(tmp_path / "none.tensorbin")


def test_every_file_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "x.tensorbin"
    ttnn.dump_tensor(path, ttnn.from_torch(torch.randn(4, 4)))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(OperandError, match=r"is cut short|is not a tensor file"):
            ttnn.load_tensor(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(OperandError, match="cut short or damaged"):
        ttnn.load_tensor(path)


def test_every_byte_that_is_changed_is_noticed(tmp_path):
    path = tmp_path / "x.tensorbin"
    ttnn.dump_tensor(path, ttnn.from_torch(torch.randn(4, 4)))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(OperandError):
            ttnn.load_tensor(path)


def test_a_file_of_somebody_else_is_refused_and_never_unpickled(tmp_path):
    path = tmp_path / "x.tensorbin"

    class Boom:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "unpickled"),)

    torch.save(torch.ones(3), path)
    with pytest.raises(OperandError, match="is not a tensor file of meshloom"):
        ttnn.load_tensor(path)
    path.write_bytes(pickle.dumps(Boom()))
    with pytest.raises(OperandError, match="is not a tensor file of meshloom"):
        ttnn.load_tensor(path)
    assert not (tmp_path / "unpickled").exists()


def test_another_version_is_told(tmp_path):
    path = tmp_path / "x.tensorbin"
    ttnn.dump_tensor(path, ttnn.from_torch(torch.ones(3)))
    raw = bytearray(path.read_bytes())
    raw[len(files.MAGIC)] = 9
    path.write_bytes(raw)
    with pytest.raises(OperandError, match="has version 9 of the format, and this reads version 1"):
        ttnn.load_tensor(path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.tensorbin"
    ttnn.dump_tensor(path, ttnn.from_torch(torch.ones(3)))

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="no room"):
        ttnn.dump_tensor(path, ttnn.from_torch(torch.zeros(3)))
    assert ttnn.load_tensor(path).to_list() == [1, 1, 1] and os.listdir(tmp_path) == ["x.tensorbin"]


# as_tensor


def test_as_tensor_keeps_weights_with_their_placement(mesh, tmp_path):
    w = torch.randn(64, 64)
    options = {
        "dtype": ttnn.bfloat16,
        "layout": ttnn.TILE_LAYOUT,
        "device": mesh,
        "memory_config": ttnn.DRAM_MEMORY_CONFIG,
        "cache_file_name": tmp_path / "w",
        "mesh_mapper": ttnn.ShardTensorToMesh(mesh, dim=1),
    }
    made = ttnn.as_tensor(w, **options)
    assert os.listdir(tmp_path) == ["w_dtype_BFLOAT16_layout_TILE.tensorbin"]
    cached = ttnn.as_tensor(torch.zeros(64, 64), **options)
    check_same(cached, made)
    assert repr(cached.tensor_topology().placements()) == "[PlacementShard(1)]"
    check_same(ttnn.as_tensor(None, **options), made)


def test_as_tensor_does_not_use_a_cache_of_another_placement(mesh, open_mesh, tmp_path):
    w, zeros = torch.randn(64, 64), torch.zeros(64, 64)
    cache = {"cache_file_name": tmp_path / "w", "dtype": ttnn.float32}
    ttnn.as_tensor(w, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1), **cache)
    other = ttnn.as_tensor(w, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), **cache)
    assert other.shape == [8, 64]
    smaller = ttnn.as_tensor(w, mesh_mapper=ttnn.ShardTensorToMesh(open_mesh(1, 2), dim=0), **cache)
    assert smaller.shape == [32, 64] and torch.equal(smaller.to_torch(), w)
    again = ttnn.as_tensor(zeros, mesh_mapper=ttnn.ShardTensorToMesh(open_mesh(1, 2), dim=0), **cache)
    assert torch.equal(again.to_torch(), w)


def test_as_tensor_keeps_replicated_weights_once(mesh, tmp_path):
    w = torch.randn(32, 32)
    cache = {"cache_file_name": tmp_path / "w", "dtype": ttnn.bfloat8_b, "layout": ttnn.TILE_LAYOUT}
    made = ttnn.as_tensor(w, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh), **cache)
    (name,) = os.listdir(tmp_path)
    assert ttnn.load_tensor(tmp_path / name).grid == (1, 1)
    cached = ttnn.as_tensor(torch.zeros(32, 32), mesh_mapper=ttnn.ReplicateTensorToMesh(mesh), **cache)
    check_same(cached, made)
    assert torch.equal(ttnn.add(cached, 0.0).to_torch(), made.to_torch()), "it knows its mesh"


def test_as_tensor_refuses_a_device_without_memory_and_applies_preprocess(mesh, tmp_path):
    with pytest.raises(RuntimeError, match="memory_config must be specified when device is specified"):
        ttnn.as_tensor(torch.ones(2), device=mesh)
    with pytest.raises(ArgumentError, match="no tensor, and no file"):
        ttnn.as_tensor(None, cache_file_name=tmp_path / "w")
    assert ttnn.as_tensor(torch.ones(2), preprocess=lambda x: x * 3).to_list() == [3, 3]
