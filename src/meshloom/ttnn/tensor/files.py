"""Tensors in files, and `as_tensor`, which keeps weights in them.

A file is: 16 bytes of magic, the version and the length of the header (little-endian), the header as JSON, the values
as raw bytes, and a checksum of everything before it. Nothing is ever unpickled: a file that is not ours, of another
version, cut short or changed is refused with a message. It is written beside its place and moved there when complete,
so that a reader sees all of it or nothing. A tensor keeps its label, so that cached weights know their placement.
"""

from __future__ import annotations

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

from meshloom.errors import ArgumentError, MeshloomError, OperandError, expect
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.calling import Optionals, op
from meshloom.ttnn.tensor.boxes import agree, gather_parts
from meshloom.ttnn.tensor.converting import from_torch
from meshloom.ttnn.tensor.formats import DataType, Layout, Tile
from meshloom.ttnn.tensor.mappers import TensorToMesh, mapper_of
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE, Placement, PlacementPartial, PlacementShard, TensorTopology
from meshloom.ttnn.tensor.transfers import from_device, move_to

__all__ = ["DumpTensorMode"]

MAGIC = b"meshloom-tensor\n"
VERSION = 1
HEAD = struct.Struct("<IQ")  # version, bytes of the header
CHECKSUM = 16
LONGEST_HEADER, LONGEST_CONFIG = 1 << 24, 1 << 15  # bytes, of all of it and of the memory config in it
LARGEST_SIZE, MOST_DIMS, MOST_DEVICES = 1 << 62, 64, 1 << 20
PARTIALS = ("sum", "mean", "max", "min", "prod", "unknown")
SUFFIX = ".tensorbin"
Header = tuple[tuple[int, ...], dict[str, Any]]


class DumpTensorMode(Choice):
    """Which parts go into a file: those of all processes, or this one's."""

    DISTRIBUTED_GATHER, LOCAL = 0, 1


def _path(file_name: str | os.PathLike[str]) -> Path:
    expect("file_name", file_name, (str, os.PathLike), fix=f"give a path that ends with {SUFFIX}")
    path = Path(file_name)
    if path.suffix != SUFFIX:
        raise OperandError(f"File {path} must have {SUFFIX} extension", fix=f"{path}{SUFFIX}")
    return path


# writing


@op("dump_tensor")
def dump_tensor(file_name, tensor, *, mode: DumpTensorMode = DumpTensorMode.DISTRIBUTED_GATHER) -> None:
    """Write a tensor with its parts, its format and its label to a `.tensorbin` file."""
    path = _path(file_name)
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"ttnn.dump_tensor takes a ttnn.Tensor, not a {type(tensor).__name__}")
    held = gather_parts(from_device(tensor))
    block = held.block.contiguous()
    header = json.dumps(_header(held, block)).encode()
    raw = block.reshape(-1).view(torch.uint8).numpy().data
    _write(path, [MAGIC, HEAD.pack(VERSION, len(header)), header, raw])


def _write(path: Path, pieces: list[Any]) -> None:
    """Put pieces and their checksum into a file that appears complete or not at all."""
    if not path.parent.is_dir():
        raise OperandError(f"there is no folder {path.parent} to write {path.name} into", fix=f"mkdir -p {path.parent}")
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
        "placements": [_placement_json(each) for each in label.placements()],
        "mesh_coords": label.mesh_coords(),
    }


def _placement_json(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, PlacementShard):
        return {"shard": placement.dim, "size": placement.size}
    return {"partial": placement.op} if isinstance(placement, PlacementPartial) else {}


# reading


@op("load_tensor")
def load_tensor(file_name, *, device=None) -> Tensor:
    """The tensor that `dump_tensor` wrote, on the host or on a mesh."""
    path = _path(file_name)
    with path.open("rb") as file:
        tensor = _read(file, path)
    return tensor if device is None else move_to(tensor, device, tensor.memory_config(), copies=False)


def _refusal(path: Path, why: str) -> OperandError:
    return OperandError(f"{path} {why}", fix="write it again with ttnn.dump_tensor")


def _read(file: BinaryIO, path: Path) -> Tensor:
    size = os.fstat(file.fileno()).st_size
    start = file.read(len(MAGIC) + HEAD.size)
    if not start.startswith(MAGIC):
        raise _refusal(path, "is not a tensor file of meshloom")
    if len(start) < len(MAGIC) + HEAD.size:
        raise _refusal(path, f"is cut short: it has {size} bytes, less than the start of a tensor file")
    version, length = HEAD.unpack(start[len(MAGIC) :])
    if version != VERSION:
        raise _refusal(path, f"has version {version} of the format, and this reads version {VERSION}")
    if length > min(size - len(start), LONGEST_HEADER):
        raise _refusal(path, f"is cut short or damaged: its header should have {length} bytes")
    text = file.read(length)
    shape, about = _parse_header(text, path)
    kind = about["dtype"].store
    nbytes = math.prod(shape) * kind.itemsize
    expected = len(start) + length + nbytes + CHECKSUM
    if size != expected:
        raise _refusal(path, f"is cut short or damaged: it has {size} of {expected} bytes")
    raw = bytearray(nbytes)
    file.readinto(raw)  # type: ignore[attr-defined]
    total = hashlib.blake2b(digest_size=CHECKSUM)
    for piece in (start, text, raw):
        total.update(piece)
    if total.digest() != file.read(CHECKSUM):
        raise _refusal(path, "is damaged: its checksum is not that of its content")
    values = torch.frombuffer(raw, dtype=kind) if nbytes else torch.empty(0, dtype=kind)
    return Tensor(values.reshape(shape), *about.values())


# What Python raises on the way through JSON that somebody else made: wrong types, missing keys, numbers or nesting
# beyond all measure; and what our own values say of arguments that they do not take.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MeshloomError)


def _parse_header(text: bytes, path: Path) -> Header:
    try:
        return _check_header(json.loads(text))
    except UNREADABLE as error:
        reason = getattr(error, "headline", None) or f"{type(error).__name__}: {error}"
        raise _refusal(path, f"is damaged: its header cannot be read ({reason:.200})") from error


def _check_header(found: dict[str, Any]) -> Header:
    """The shape of a block and what a tensor takes behind it: sizes agree, and every word is one that we write."""
    grid, block = _sizes(found["grid"], 1), _sizes(found["block"], 0)
    _check_block(block, grid)
    coords, (height, width, transposed) = found["coords"], found["tile"]
    if not isinstance(transposed, bool) or len(found["memory_config"]) > LONGEST_CONFIG:
        raise ValueError("a tile or a memory config that is none")
    if found["dtype"] == DataType.INVALID.name:
        raise ValueError("a dtype without values")
    return block, {
        "grid": grid,
        "dtype": DataType[found["dtype"]],
        "layout": Layout[found["layout"]],
        "topology": _label(found, len(block) - len(grid), grid),
        "device": None,
        "memory_config": MemoryConfig.from_json(found["memory_config"]),
        "tile": Tile((height, width), transposed),
        "pad_value": float(found["pad"]),
        "coords": None if coords is None else _places(coords, grid),
    }


def _sizes(found: Any, least: int) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and least <= size < LARGEST_SIZE for size in found):
        raise ValueError(f"{found!s:.60} are no sizes")
    return tuple(found)


def _check_block(block: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """An error unless the mesh axes of a block are those of the grid, or 1 where all devices hold the same."""
    lead = block[: len(grid)]
    if not grid or math.prod(grid) > MOST_DEVICES or len(lead) < len(grid) or len(block) > MOST_DIMS:
        raise ValueError(f"a block of shape {block} on a grid of shape {grid}")
    if any(held not in (1, size) for held, size in zip(lead, grid, strict=True)):
        raise ValueError(f"a block of shape {block} does not lie on a grid of shape {grid}")
    if math.prod(max(size, 1) for size in block) >= LARGEST_SIZE:  # of zero bytes, and yet too large to be a shape
        raise ValueError(f"a block of shape {block}")


def _places(found: Any, grid: tuple[int, ...]) -> tuple[MeshCoordinate, ...]:
    places = tuple(MeshCoordinate(_sizes(place, 0)) for place in found)
    for place in places:
        if len(place) != len(grid) or any(c >= size for c, size in zip(place, grid, strict=True)):
            raise ValueError(f"{place} is not on a grid of shape {grid}")
    if not places or len(set(places)) != len(places):
        raise ValueError("no devices, or a device twice")
    return places


def _label(found: dict[str, Any], rank: int, grid: tuple[int, ...]) -> TensorTopology:
    shape, places = _sizes(found["distribution_shape"], 1), _places(found["mesh_coords"], grid)
    placements = [_placement(each, rank) for each in found["placements"]]
    if len(placements) != len(shape) or math.prod(shape) != len(places):
        raise ValueError(f"{len(placements)} placements of {len(places)} devices in the shape {shape}")
    return TensorTopology(shape, placements, places)


def _placement(found: dict[str, Any], rank: int) -> Placement:
    if "shard" in found:
        dim, size = found["shard"], found["size"]
        if type(dim) is not int or not -rank <= dim < rank:
            raise ValueError(f"a shard of dim {dim!r} of {rank}")
        return PlacementShard(dim, None if size is None else _sizes([size], 0)[0])
    if "partial" in found:
        if found["partial"] not in PARTIALS:
            raise ValueError(f"a partial {found['partial']!r}")
        return PlacementPartial(found["partial"])
    if found != {}:
        raise ValueError(f"{found!s:.60} is no placement")
    return REPLICATE


# as a pickle


def pack(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[torch.Tensor, str]]:
    """What `pickle` and `torch.save` keep of a tensor: its block, and the header that its file would have."""
    held = gather_parts(from_device(tensor))
    block = held.block.clone(memory_format=torch.contiguous_format)  # alone, and not the array that it is a view of
    return restore, (block, json.dumps(_header(held, block)))


def restore(block: torch.Tensor, header: str) -> Tensor:
    """The tensor of a pickle, on the host; `ttnn.to_device(tensor, mesh)` puts it on a mesh again."""
    try:
        shape, about = _check_header(json.loads(header))
    except UNREADABLE as error:
        raise OperandError(f"a pickled tensor is damaged: {error!s:.200}", fix="save it again") from error
    if tuple(block.shape) != shape or block.dtype is not about["dtype"].store:
        raise OperandError(
            f"a pickled tensor is damaged: it has {list(block.shape)} of {block.dtype}, its header {list(shape)} of "
            f"{about['dtype']}",
            fix="save it again",
        )
    return Tensor(block, *about.values())


torch.serialization.add_safe_globals([restore])  # so that `torch.load` reads it as it reads a dense tensor


# the cache of weights


def cache_path(cache_file_name: str | os.PathLike[str], dtype: DataType | None, layout: Layout | None) -> Path:
    """The file that a cached tensor is in.

    >>> cache_path("weights/w1", DataType.BFLOAT8_B, Layout.TILE).name
    'w1_dtype_BFLOAT8_B_layout_TILE.tensorbin'
    """
    kind = dtype.name if dtype is not None else "None"
    order = layout.name if layout is not None else "None"
    return Path(f"{cache_file_name}_dtype_{kind}_layout_{order}{SUFFIX}")


_CACHED = Optionals(
    "memory_config cache_file_name preprocess mesh_mapper", cache_dump_mode=DumpTensorMode.DISTRIBUTED_GATHER
)


@op("as_tensor", more=_CACHED)
def as_tensor(
    tensor: torch.Tensor | None, dtype=None, *, layout: Layout | None = Layout.ROW_MAJOR, device=None, **how
) -> Tensor:
    """As `from_torch`, but kept in a file: the next time it comes from there, with its placement.

    Replicated weights are kept once. A file that was made for another mesh or another mapper is made again.
    """
    memory_config, cache_file_name, preprocess, mesh_mapper, cache_dump_mode = _CACHED(how)
    if device is not None and memory_config is None:
        raise OperandError("memory_config must be specified when device is specified", fix="ttnn.DRAM_MEMORY_CONFIG")
    mapper = mapper_of(mesh_mapper, device)
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
        cached = _load_cached(path, kept, tensor)
        if kept is not None and not agree(kept.grid, cached is not None):  # all processes make it together, or none
            cached = None
        found = cached if cached is not None else _fill_cache(path, make(), cache_dump_mode)
    if device is not None:
        return move_to(found, device, memory_config or found.memory_config(), copies=False)
    if mapper is not None:
        found = found if kept is not None else _everywhere(found, mapper)
        found.home = mapper.mesh
    return found


def _load_cached(path: Path, mapper: TensorToMesh | None, tensor: torch.Tensor | None) -> Tensor | None:
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


def _fill_cache(path: Path, tensor: Tensor, mode: DumpTensorMode) -> Tensor:
    path.parent.mkdir(parents=True, exist_ok=True)
    dump_tensor(path, tensor, mode=mode)
    return tensor


def _everywhere(tensor: Tensor, mapper: TensorToMesh) -> Tensor:
    """A single tensor of the host as equal parts for all devices of a mapper's mesh."""
    block, label, coords = mapper.map(tensor.part((0, 0)))
    return tensor._like(block, grid=mapper.grid, topology=label, coords=coords)
