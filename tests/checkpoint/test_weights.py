"""Files of weights: every dtype on any mesh with any placements, only the slices of this process, files that lie."""

from __future__ import annotations

import itertools
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.checkpoint import open_weights
from meshloom.engines.layout import torch_dtype
from meshloom.placement import extents
from oracle import MESHES

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(data: torch.Tensor) -> torch.Tensor:
    """The bits of an array, which compare where values do not."""
    return data.contiguous().view(SIGNED[data.element_size()])


SAMPLES = {
    "f32": torch.randn(10, 7),
    "f64": torch.randn(3, 4, 5, dtype=torch.float64),
    "f16": torch.randn(5).half(),
    "bf16": torch.randn(9, 2).bfloat16(),
    "f8": torch.randn(5, 4).to(torch.float8_e4m3fn),
    "f8b": torch.randn(6).to(torch.float8_e5m2),
    "bool": torch.randn(11) > 0,
    "i64": torch.arange(12).view(3, 4),
    "i8": torch.arange(7, dtype=torch.int8),
    "u16": torch.arange(7).to(torch.uint16),
    "u64": torch.arange(7).to(torch.uint64),
    "c64": torch.randn(5, 2, dtype=torch.complex64),
    "number": torch.tensor(3.5),
    "nothing": torch.zeros(0, 3),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(SAMPLES, made)
    return made


def all_placements(mesh: Mesh, dims: int) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    return list(itertools.product(kinds, repeat=mesh.ndim))


@pytest.mark.parametrize("shape", [shape for shape in MESHES if len(shape) < 3 or shape == (2, 3, 2)])
def test_every_dtype_is_read_bit_for_bit_with_its_padding_on_any_mesh(file, shape):
    weights, mesh, read = open_weights(file), loom.open_mesh(shape), 0
    for name, dense in SAMPLES.items():
        for placements in all_placements(mesh, dense.dim())[:16]:
            found = weights.read(name, Topology(mesh, placements, weights.shape(name), weights.dtype(name)))
            wanted = loom.distribute(dense, mesh, placements)
            assert found.topology is wanted.topology
            assert found.dtype == dense.dtype
            assert torch.equal(bits(found._data), bits(wanted._data))
            read += 1
    assert read >= len(SAMPLES) * 2


def test_names_shapes_and_dtypes_are_those_of_the_header(file):
    weights = open_weights(file)
    assert weights.names() == tuple(sorted(SAMPLES)) and len(weights) == len(SAMPLES)
    for name, dense in SAMPLES.items():
        assert weights.shape(name) == tuple(dense.shape)
        assert torch_dtype(weights.dtype(name)) == dense.dtype
        assert name in weights
    assert "up" not in weights


def test_the_boxes_of_all_processes_are_the_whole_tensor_once_per_replica(file):
    for shape, grid in (((4,), (2,)), ((2, 4), (2, 2)), ((3, 2), (3, 1)), ((2, 4), (1, 4)), ((4, 4), (2, 4))):
        mesh = Mesh.of(shape, processes=grid)
        for placements in all_placements(mesh, 2):
            topology = Topology(mesh, placements, (10, 7), "f32")
            seen = torch.zeros(10, 7, dtype=torch.int64)
            for rank in range(len(list(itertools.product(*(range(n) for n in grid))))):
                for extent in extents(topology, rank):
                    seen[extent.slices] += 1
            copies = 1
            for parts, placement in zip(grid, placements, strict=True):
                copies *= parts if isinstance(placement, Replicate) else 1
            assert torch.equal(seen, torch.full((10, 7), copies)), topology


def mapped(file: Path) -> int:
    """The bytes of a file that this process has touched through its mapping."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


SLACK = 1 << 22  # the system maps pages in groups, of up to 2 MB at either end


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_only_the_slices_of_this_process_are_touched(tmp_path, placement):
    file, rows = tmp_path / "large.safetensors", 16384
    save_file({"w": torch.randn(rows, 1024)}, file)
    weights, mesh = open_weights(file), Mesh.of((8,), processes=(8,))
    before = mapped(file)
    read = weights.read("w", Topology(mesh, (placement,), (rows, 1024), "f32"))
    touched = mapped(file) - before
    held = read._data.numel() * 4
    assert held == (rows * 4096 // 8 if placement == Shard(0) else rows * 4096)
    assert held <= touched + SLACK and touched <= held + SLACK
    assert before <= SLACK


def test_a_folder_with_an_index_of_hugging_face_is_read_through_it(tmp_path):
    save_file({"a": torch.ones(3), "old": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.arange(4)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "stranger.safetensors")
    where = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    weights = open_weights(tmp_path)
    assert weights.names() == ("a", "b") and weights.shape("a") == (3,)
    mesh = loom.open_mesh((2,))
    assert weights.read("b", Topology(mesh, (Shard(0),), (4,), "i64")).to_torch().tolist() == [0, 1, 2, 3]


def test_several_files_and_a_folder_without_an_index_are_one(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    assert open_weights(tmp_path).names() == ("a", "b")
    assert open_weights([tmp_path / "one.safetensors", str(tmp_path / "two.safetensors")]).names() == ("a", "b")
    save_file({"a": torch.ones(3)}, tmp_path / "three.safetensors")
    with pytest.raises(loom.CheckpointError, match=r"two.safetensors|three.safetensors.*it has 'a', and so has"):
        open_weights(tmp_path)


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LIES = {
    "short data": raw({"a": tensor([4], 0, 16)}, b"\0" * 8),
    "more data than said": raw({"a": tensor([1], 0, 4)}, b"\0" * 8),
    "a shape that is not its bytes": raw({"a": tensor([5], 0, 16)}, b"\0" * 16),
    "an overlap": raw({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"\0" * 12),
    "a hole": raw({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"\0" * 12),
    "a huge shape": raw({"a": tensor([1 << 62, 1 << 62], 0, 4)}, b"\0" * 4),
    "a huge header": raw({}, length=1 << 60),
    "a header that ends early": raw({"a": tensor([1], 0, 4)}, length=1000),
    "no JSON": raw(b"\x80\x04K\x01.", b""),
    "deep JSON": raw(b"[" * 100_000),
    "an unknown dtype": raw({"a": tensor([1], 0, 4, "F99")}, b"\0" * 4),
    "a dtype that tensors do not have": raw({"a": tensor([4], 0, 2, "F4")}, b"\0" * 2),
    "a negative shape": raw({"a": tensor([-1], 0, 4)}, b"\0" * 4),
    "nothing at all": b"",
    "a pickle": b"\x80\x04\x95" + b"x" * 100,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_with_the_file_first(tmp_path, lie):
    file = tmp_path / "model.safetensors"
    file.write_bytes(LIES[lie])
    with pytest.raises(loom.CheckpointError) as refused:
        open_weights(file)
    assert str(refused.value).startswith(str(file))


HOSTILE = {
    "a path upwards": {"weight_map": {"a": "../secret.safetensors"}},
    "an absolute path": {"weight_map": {"a": "/etc/passwd"}},
    "a folder": {"weight_map": {"a": ".."}},
    "no table": {"metadata": {}},
    "a list": [1, 2],
    "a number for a file": {"weight_map": {"a": 3}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused(tmp_path, case):
    save_file({"a": torch.ones(3)}, tmp_path / "secret.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps(HOSTILE[case]))
    with pytest.raises(loom.CheckpointError) as refused:
        open_weights(inside)
    assert str(refused.value).startswith(str(index))


def test_a_missing_file_a_missing_name_and_an_empty_folder_are_told(tmp_path, file):
    with pytest.raises(loom.CheckpointError, match="there is no such file"):
        open_weights(tmp_path / "absent.safetensors")
    with pytest.raises(loom.CheckpointError, match="no safetensors files are there"):
        open_weights(tmp_path)
    with pytest.raises(loom.CheckpointError, match="there is no tensor 'f31'"):
        open_weights(file).shape("f31")
    where = {"weight_map": {"gone": "model.safetensors"}}
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(where))
    with pytest.raises(loom.CheckpointError, match=r"it has no 'gone', and model\.safetensors.index\.json says"):
        open_weights(tmp_path)


def test_other_shapes_dtypes_and_partial_placements_are_refused(file):
    weights, mesh = open_weights(file), loom.open_mesh((2,), axes=("tp",))
    with pytest.raises(loom.CheckpointError) as refused:
        weights.read("f32", Topology(mesh, (Shard(0),), (10, 8), "f32"))
    assert str(refused.value).splitlines() == [
        f"'f32' is f32[10, 7] in {file}, and f32[10, 8] was asked for",
        "  asked  f32[10, 8](S(0)) on Mesh(tp=2)",
        "  fix    ask for the shape and the dtype of the file; cast the tensor afterwards: x.to(dtype)",
    ]
    with pytest.raises(loom.CheckpointError, match="bf16"):
        weights.read("f32", Topology(mesh, (Shard(0),), (10, 7), "bf16"))
    with pytest.raises(loom.CheckpointError, match="cannot be read as a partial value"):
        weights.read("f32", Topology(mesh, (Partial("sum"),), (10, 7), "f32"))
    with pytest.raises(loom.ArgumentError, match="takes a file, several files or a folder"):
        open_weights(7)  # type: ignore[arg-type]
