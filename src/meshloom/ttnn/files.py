"""Tensors in files, and `as_tensor`, which keeps weights in them.

A file is: 16 bytes of magic, the version and the length of the header (little-endian), the header as JSON, the values
as raw bytes, and a checksum of everything before it. Nothing is ever unpickled: a file that is not ours, of another
version, cut short or changed is refused with a message. It is written beside its place and moved there when complete,
so that a reader sees all of it or nothing. A tensor keeps its label, so that cached weights know their placement.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.calling import op
from meshloom.ttnn.converting import from_torch
from meshloom.ttnn.device import MeshDevice
from meshloom.ttnn.formats import DataType, Layout, Tile
from meshloom.ttnn.mappers import TensorToMesh
from meshloom.ttnn.memory import MemoryConfig
from meshloom.ttnn.tensor import Tensor
from meshloom.ttnn.topology import REPLICATE, Placement, PlacementPartial, PlacementShard, TensorTopology
from meshloom.ttnn.transfers import from_device, moved

__all__ = ["DumpTensorMode"]

MAGIC = b"meshloom-tensor\n"
VERSION = 1
HEAD = struct.Struct("<IQ")  # version, bytes of the header
CHECKSUM = 16
LONGEST_HEADER = 1 << 24
SUFFIX = ".tensorbin"


class DumpTensorMode(enum.Enum):
    """Which parts go into a file: those of all processes, or this one's."""

    DISTRIBUTED_GATHER = 0
    LOCAL = 1

    __repr__ = enum.Enum.__str__


def _path(file_name: str | os.PathLike[str]) -> Path:
    path = Path(file_name)
    if path.suffix != SUFFIX:
        raise OperandError(f"File {path} must have {SUFFIX} extension", fix=f"{path}{SUFFIX}")
    return path


# writing


@op("dump_tensor")
def dump_tensor(
    file_name: str | os.PathLike[str], tensor: Tensor, *, mode: DumpTensorMode = DumpTensorMode.DISTRIBUTED_GATHER
) -> None:
    """Write a tensor with its parts, its format and its label to a `.tensorbin` file."""
    path = _path(file_name)
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"ttnn.dump_tensor takes a ttnn.Tensor, not a {type(tensor).__name__}")
    held = from_device(tensor)
    block = held.block.contiguous()
    header = json.dumps(_header(held, block)).encode()
    raw = block.reshape(-1).view(torch.uint8).numpy().data
    _write(path, [MAGIC, HEAD.pack(VERSION, len(header)), header, raw])


def _write(path: Path, pieces: list[Any]) -> None:
    """Put pieces and their checksum into a file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            total = hashlib.blake2b(digest_size=CHECKSUM)
            for piece in pieces:
                total.update(piece)
                file.write(piece)
            file.write(total.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _header(tensor: Tensor, block: torch.Tensor) -> dict[str, Any]:
    label = tensor.tensor_topology()
    return {
        "dtype": tensor.dtype.name,
        "layout": tensor.layout.name,
        "tile": [*tensor.tile.tile_shape, tensor.tile.transpose_tile],
        "pad": tensor._pad,
        "memory_config": tensor.memory_config().to_json(),
        "grid": tensor.grid,
        "coords": tensor._coords,
        "block": tuple(block.shape),
        "distribution_shape": tuple(label.distribution_shape()),
        "placements": [_written(each) for each in label.placements()],
        "mesh_coords": label.mesh_coords(),
    }


def _written(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, PlacementShard):
        return {"shard": placement.dim, "size": placement.size}
    return {"partial": placement.op} if isinstance(placement, PlacementPartial) else {}


def _placement(found: dict[str, Any]) -> Placement:
    if "shard" in found:
        return PlacementShard(found["shard"], found["size"])
    return PlacementPartial(found["partial"]) if "partial" in found else REPLICATE


# reading


@op("load_tensor")
def load_tensor(file_name: str | os.PathLike[str], *, device: MeshDevice | None = None) -> Tensor:
    """The tensor that `dump_tensor` wrote, on the host or on a mesh."""
    path = _path(file_name)
    with path.open("rb") as file:
        tensor = _read(file, path)
    return tensor if device is None else moved(tensor, device, tensor.memory_config(), copies=False)


def _refused(path: Path, why: str) -> OperandError:
    return OperandError(f"{path} {why}", fix="write it again with ttnn.dump_tensor")


def _read(file: BinaryIO, path: Path) -> Tensor:
    size = os.fstat(file.fileno()).st_size
    start = file.read(len(MAGIC) + HEAD.size)
    if not start.startswith(MAGIC):
        raise _refused(path, "is not a tensor file of meshloom")
    if len(start) < len(MAGIC) + HEAD.size:
        raise _refused(path, f"is cut short: it has {size} bytes, less than the start of a tensor file")
    version, length = HEAD.unpack(start[len(MAGIC) :])
    if version != VERSION:
        raise _refused(path, f"has version {version} of the format, and this reads version {VERSION}")
    if length > min(size - len(start), LONGEST_HEADER):
        raise _refused(path, f"is cut short or damaged: its header should have {length} bytes")
    text = file.read(length)
    header = _parsed(text, path)
    kind = DataType[header["dtype"]]
    shape = header["block"]
    nbytes = math.prod(shape) * kind.store.itemsize
    expected = len(start) + length + nbytes + CHECKSUM
    if size != expected:
        raise _refused(path, f"is cut short or damaged: it has {size} of {expected} bytes")
    raw = bytearray(nbytes)
    file.readinto(raw)  # type: ignore[attr-defined]
    total = hashlib.blake2b(digest_size=CHECKSUM)
    for piece in (start, text, raw):
        total.update(piece)
    if total.digest() != file.read(CHECKSUM):
        raise _refused(path, "is damaged: its checksum is not that of its content")
    values = torch.frombuffer(raw, dtype=kind.store) if nbytes else torch.empty(0, dtype=kind.store)
    return _tensor(values.reshape(shape), kind, header)


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    """The header, with all that a tensor needs."""
    try:
        found = json.loads(text)
        needed = {"dtype": DataType, "layout": Layout}
        if not all(found[name] in kinds.__members__ for name, kinds in needed.items()):
            raise KeyError("a dtype or layout that is not known")
        if not all(isinstance(size, int) and size >= 0 for size in (*found["block"], *found["grid"])):
            raise KeyError("sizes that are no sizes")
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"is damaged: its header cannot be read ({error})") from error
    return dict(found)


def _tensor(block: torch.Tensor, kind: DataType, header: dict[str, Any]) -> Tensor:
    height, width, transposed = header["tile"]
    coords = header["coords"]
    label = TensorTopology(
        header["distribution_shape"], [_placement(each) for each in header["placements"]], header["mesh_coords"]
    )
    return Tensor(
        block,
        tuple(header["grid"]),
        kind,
        Layout[header["layout"]],
        label,
        None,
        MemoryConfig.from_json(header["memory_config"]),
        Tile((height, width), transposed),
        header["pad"],
        None if coords is None else tuple(MeshCoordinate(place) for place in coords),
    )


# the cache of weights


def cache_path(cache_file_name: str | os.PathLike[str], dtype: DataType | None, layout: Layout | None) -> Path:
    """The file that a cached tensor is in.

    >>> cache_path("weights/w1", DataType.BFLOAT8_B, Layout.TILE).name
    'w1_dtype_BFLOAT8_B_layout_TILE.tensorbin'
    """
    kind = dtype.name if dtype is not None else "None"
    order = layout.name if layout is not None else "None"
    return Path(f"{cache_file_name}_dtype_{kind}_layout_{order}{SUFFIX}")


@op("as_tensor")
def as_tensor(
    tensor: torch.Tensor | None,
    dtype: DataType | None = None,
    *,
    layout: Layout | None = Layout.ROW_MAJOR,
    device: MeshDevice | None = None,
    memory_config: MemoryConfig | None = None,
    cache_file_name: str | os.PathLike[str] | None = None,
    preprocess: Callable[[Any], Any] | None = None,
    mesh_mapper: TensorToMesh | None = None,
    cache_dump_mode: DumpTensorMode = DumpTensorMode.DISTRIBUTED_GATHER,
) -> Tensor:
    """As `from_torch`, but kept in a file: the next time it comes from there, with its placement.

    Replicated weights are kept once. A file that was made for another mesh or another mapper is made again.
    """
    if device is not None and memory_config is None:
        raise OperandError("memory_config must be specified when device is specified", fix="ttnn.DRAM_MEMORY_CONFIG")
    mapper = mesh_mapper.unwrap() if mesh_mapper is not None else None
    if dtype is not None and dtype.is_block_float and layout is Layout.ROW_MAJOR:
        layout = Layout.TILE
    kept = None if mapper is not None and mapper.is_replicated else mapper

    def make() -> Tensor:
        if tensor is None:
            raise ArgumentError("ttnn.as_tensor has no tensor, and no file to take it from", file=cache_file_name)
        values = preprocess(tensor) if preprocess is not None else tensor
        found: Tensor = from_torch(values, dtype, layout=layout, memory_config=memory_config, mesh_mapper=kept)
        return found

    if cache_file_name is None:
        found = make()
    else:
        path = cache_path(cache_file_name, dtype, layout)
        cached = _cached(path, kept, tensor)
        found = cached if cached is not None else _filled(path, make(), cache_dump_mode)
    if device is not None:
        return moved(found, device, memory_config or found.memory_config(), copies=False)
    if mapper is not None:
        found = found if kept is not None else _everywhere(found, mapper)
        found.home = mapper.mesh
    return found


def _cached(path: Path, mapper: TensorToMesh | None, tensor: torch.Tensor | None) -> Tensor | None:
    """What a file has, if it was made for the same mapper; without a tensor to make it anew, in any case."""
    if not path.exists():
        return None
    found: Tensor = load_tensor(path)
    if mapper is None:
        return found if math.prod(found.grid) == 1 or tensor is None else None
    if tensor is not None and not _is_of(found, mapper):
        return None
    return found


def _is_of(tensor: Tensor, mapper: TensorToMesh) -> bool:
    rank, label = len(tensor.shape), tensor.tensor_topology()
    wanted = [
        PlacementShard(each.dim % rank) if isinstance(each, PlacementShard) and rank else each
        for each in mapper.config().placements
    ]
    is_same_shape = len(label.distribution_shape()) == len(mapper.shape)
    return tensor.grid == mapper.grid and is_same_shape and label.placements() == wanted


def _filled(path: Path, tensor: Tensor, mode: DumpTensorMode) -> Tensor:
    dump_tensor(path, tensor, mode=mode)
    return tensor


def _everywhere(tensor: Tensor, mapper: TensorToMesh) -> Tensor:
    """A single tensor of the host as equal parts for all devices of a mapper's mesh."""
    block, label, coords = mapper.map(tensor.part((0, 0)))
    return Tensor(
        block,
        mapper.grid,
        tensor.dtype,
        tensor.layout,
        label,
        None,
        tensor.memory_config(),
        tensor.tile,
        tensor._pad,
        coords,
    )
