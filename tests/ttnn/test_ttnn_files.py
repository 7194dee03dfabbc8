"""Files of tensors: they come back as they were, and what is not ours, cut short or changed is refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import pickle
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshloom import ttnn
from meshloom.errors import ArgumentError, MeshloomError, OperandError
from meshloom.ttnn.tensor import files

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


# hostile headers under a checksum that is right

JUNK = [
    None, True, -1, 0, 1, 2, 3, 7, 64, 1 << 40, 1 << 62, 1 << 70, 10**300, 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "0", "FLOAT32", "INVALID", "sum", "__class__", [], [[]], {}, [0, 0], [1, 1], [1 << 40, 1], [1 << 61, 1 << 61],
    ["a"], [None], {"shard": 0}, {"shard": 9, "size": None}, {"shard": -9, "size": 1}, {"shard": 0, "size": "x"},
    {"partial": []}, {"partial": "other"}, {"": 0}, [-1, 1], [0, 0, 0], [1] * 200, [0] * 40,
]  # fmt: skip


def mutated(rng, value):
    """A value with one thing changed somewhere inside: replaced, left out, repeated; JSON inside text too."""
    if isinstance(value, str) and value.startswith(("{", "[")) and rng.random() < 0.8:
        return json.dumps(mutated(rng, json.loads(value)))
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(JUNK))
    made = copy.copy(value)
    at = rng.choice(list(made)) if isinstance(made, dict) else rng.randrange(len(made))
    kind = rng.random()
    if kind < 0.15:
        del made[at]
    elif kind < 0.25 and isinstance(made, list):
        made.insert(at, made[at])
    else:
        made[at] = mutated(rng, made[at])
    return made


def write_file(path, header, values=None):
    """A file with that header, as many bytes as it asks for (if they are few), and the right checksum."""
    if values is None:
        try:
            wanted = math.prod(header["block"]) * files.DataType[header["dtype"]].store.itemsize
            values = bytes(wanted) if 0 <= wanted < 1 << 16 else b""
        except (TypeError, KeyError, OverflowError, ValueError):
            values = bytes(64)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = files.MAGIC + files.HEAD.pack(files.VERSION, len(text)) + text + values
    path.write_bytes(content + hashlib.blake2b(content, digest_size=files.CHECKSUM).digest())


def valid_headers(mesh, folder):
    """Headers of different kinds of tensors."""
    x = torch.randn(8, 4)
    sharded = ttnn.create_sharded_memory_config((64, 32), ttnn.CoreGrid(x=2, y=1), ttnn.ShardStrategy.HEIGHT)
    tensors = [
        ttnn.from_torch(x),
        ttnn.from_torch(x, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT, memory_config=sharded),
        ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0)),
        ttnn.from_torch(x[:3], mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0)),
        ttnn.from_torch(x, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh), device=mesh),
        ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (2, 4), (0, None))),
    ]
    for number, tensor in enumerate(tensors):
        path = folder / f"{number}.tensorbin"
        ttnn.dump_tensor(path, tensor)
        raw = path.read_bytes()
        start = len(files.MAGIC) + files.HEAD.size
        (_, length) = files.HEAD.unpack(raw[len(files.MAGIC) : start])
        yield json.loads(raw[start : start + length])


def use(path, mesh):
    """Load a file and do with its tensor what people do; only our own errors may come."""
    x = ttnn.load_tensor(path)
    for act in (repr, ttnn.to_torch, ttnn.get_device_tensors, lambda t: ttnn.to_device(t, mesh), copy.copy):
        with contextlib.suppress(MeshloomError):  # refused in our words, as a label whose parts make up no whole
            act(x)
    return x


def test_a_thousand_hostile_headers_end_in_a_tensor_or_in_our_error(mesh, tmp_path):
    rng = random.Random(20)
    headers, path, loaded = list(valid_headers(mesh, tmp_path)), tmp_path / "x.tensorbin", 0
    for _ in range(1000):
        header = rng.choice(headers)
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = mutated(rng, header)
        write_file(path, header)
        try:
            with ttnn.strictness("lenient"):  # shards that no core could hold are read all the same
                use(path, mesh)
            loaded += 1
        except OperandError as error:
            assert str(path) in str(error)
    assert 20 < loaded < 700, "the mutations are too wild, or too tame"


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"dtype":' * 50_000,
        b'{"block": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"dtype"',
        b"{}",
    ],
)
def test_a_header_that_is_no_header_is_refused(tmp_path, text):
    path = tmp_path / "x.tensorbin"
    write_file(path, text, b"")
    with pytest.raises(OperandError, match="is damaged: its header cannot be read"):
        ttnn.load_tensor(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": [1 << 40, 1 << 20]},  # of one stored part: no memory was asked for, until somebody counts devices
        {"grid": [3, 4]},
        {"grid": []},
        {"block": [1, 1, 0, 1 << 61, 1 << 61]},
        {"block": [1, 1] + [1] * 100},
        {"coords": [[0, 9]]},
        {"coords": [[0, 0], [0, 0]]},
        {"mesh_coords": []},
        {"placements": []},
        {"memory_config": "[" * 20_000},
        {"memory_config": " " * 70_000 + "{}"},
    ],
)
def test_sizes_that_do_not_agree_are_refused_before_anything_is_allocated(mesh, tmp_path, changes):
    path = tmp_path / "x.tensorbin"
    header = list(valid_headers(mesh, tmp_path))[2]
    write_file(path, {**header, **changes})
    with pytest.raises(OperandError, match="is damaged"):
        ttnn.load_tensor(path)


def test_a_file_is_not_dumped_into_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "missing" / "x.tensorbin"
    with pytest.raises(OperandError, match="there is no folder"):
        ttnn.dump_tensor(path, ttnn.from_torch(torch.ones(3)))
    assert not path.parent.exists()


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
