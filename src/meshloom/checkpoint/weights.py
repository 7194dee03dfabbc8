"""Files of weights, read by slices: `open_weights` takes safetensors files or a folder of them.

Files are mapped into memory, and a read touches the pages of the slices that this process holds and no others. What a
header says is compared with the file when it is opened; nothing is unpickled. The weights of a checkpoint of ours are
read too, checksums and all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshloom.checkpoint.exporting import weights_of
from meshloom.checkpoint.files import open_files
from meshloom.checkpoint.formats import read_dtype
from meshloom.checkpoint.index import NAME, Index, Saved, read_index, read_json
from meshloom.comms import WORLD
from meshloom.engines.layout import empty_stored
from meshloom.errors import ArgumentError, CheckpointError, closest
from meshloom.placement import Topology, extents
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import _number
from meshloom.types import Shape

Path_ = str | os.PathLike[str]
INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, as its header has it."""

    file: str
    shape: Shape
    dtype: str


class Weights:
    """Tensors in files, by name. `open_weights` makes it.

    >>> import tempfile, meshloom as loom
    >>> from safetensors.torch import save_file
    >>> file = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"up": torch.arange(6.0).view(2, 3)}, file)
    >>> weights = open_weights(file)
    >>> weights
    Weights of 1 tensor in 1 file
    >>> weights.names(), weights.shape("up"), weights.dtype("up")
    (('up',), (2, 3), 'f32')
    >>> mesh = loom.open_mesh((2,), axes=("tp",))
    >>> weights.read("up", Topology(mesh, (loom.Shard(1),), (2, 3), "f32"))
    Tensor f32[2, 3](S(1)) on Mesh(tp=2)
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """

    def __init__(self, files: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
        self._files, self._entries = dict(files), dict(entries)

    def __repr__(self) -> str:
        tensors, files = len(self._entries), len(self._files)
        return f"Weights of {tensors} tensor{'s' * (tensors != 1)} in {files} file{'s' * (files != 1)}"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in order."""
        return tuple(sorted(self._entries))

    def shape(self, name: str) -> Shape:
        """The global shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The short name of a tensor's dtype, such as `bf16`."""
        return self._entry(name).dtype

    def read(self, name: str, topology: Topology) -> Tensor:
        """A tensor, placed as a topology says; this process reads only what it holds of it."""
        entry = self._entry(name)
        _check_fits(name, entry, topology)
        stored = make_room(topology)
        self._fill(name, topology, stored)
        return _number(Tensor(topology, stored))

    def _fill(self, name: str, topology: Topology, stored: torch.Tensor) -> None:
        source = self._files[self._entry(name).file].get_slice(name)
        for extent in extents(topology):
            stored[extent.stored].copy_(source[extent.slices] if extent.shape else source[...])

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name!r} in {self!r}", fix=closest(name, self._entries))
        return self._entries[name]


class SavedWeights(Weights):
    """The weights of a checkpoint of ours: any pieces into any placements, once their checksums are compared."""

    def __init__(self, index: Index, tensors: Mapping[str, Saved]) -> None:
        where = str(index.place)
        super().__init__(index.files, {key: Entry(where, each.shape, each.dtype) for key, each in tensors.items()})
        self._index, self._tensors = index, tensors

    def _fill(self, name: str, topology: Topology, stored: torch.Tensor) -> None:
        saved = self._tensors[name]
        with open_files(self._index) as opened:
            jobs = [
                (box, stored[extent.stored][inside])
                for extent in extents(topology)
                for box, inside in opened.boxes(saved, extent.start, extent.stop)
            ]
            opened.verify([(box.file, *box.span) for box, _ in jobs])
            for box, view in jobs:
                opened.read(box, view)


def make_room(topology: Topology) -> torch.Tensor:
    """Memory for what this process holds, where it holds its blocks; its padding is zero, the rest is to be filled."""
    stored = empty_stored(topology)
    return stored.to(WORLD.device) if topology.mesh.is_split and not stored.is_meta else stored


def _check_fits(name: str, entry: Entry, topology: Topology) -> None:
    """An error unless a tensor of a file can lie as a topology says."""
    said = f"{entry.dtype}{list(entry.shape)}"
    if topology.shape != entry.shape or topology.dtype != entry.dtype:
        raise CheckpointError(
            f"{name!r} is {said} in {entry.file}, and {topology.dtype}{list(topology.shape)} was asked for",
            asked=topology,
            fix="ask for the shape and the dtype of the file; cast the tensor afterwards: x.to(dtype)",
        )
    if topology.partial_axes:
        raise CheckpointError(
            f"{name!r} cannot be read as a partial value: a file has the value itself",
            asked=topology,
            fix="read it replicated or sharded, and redistribute it",
        )


def open_weights(path: Path_ | Iterable[Path_], *, part: str | None = None) -> Weights:
    """The tensors of one safetensors file, of several, or of a folder of them (with or without an index).

    A folder of Hugging Face has its index beside the files, which says where each tensor is. Of a checkpoint of ours it
    is the weights of the module in it; `part` names the module if there are several. Opening reads the headers; `read`
    then reads slices.
    """
    if isinstance(path, (str, os.PathLike)):
        place = Path(path)
        if (place / NAME).is_file():
            index = read_index(place)
            return SavedWeights(index, weights_of(index, part))
        return _open_folder(place) if place.is_dir() else _open_files([place])
    if not isinstance(path, Iterable):
        raise ArgumentError(
            f"open_weights takes a file, several files or a folder, not a {type(path).__name__}",
            fix='loom.checkpoint.open_weights("model.safetensors")',
        )
    return _open_files([Path(each) for each in path])


def _open_folder(folder: Path) -> Weights:
    indices = sorted(folder.glob(f"*{INDEX}"))
    if len(indices) > 1:
        names = ", ".join(each.name for each in indices)
        raise CheckpointError(
            f"{folder}: {len(indices)} indices are there: {names}", fix="give the files of one of them in a list"
        )
    if indices:
        return _open_indexed(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no safetensors files are there", fix="give a folder that has some, or a file")
    return _open_files(files)


def _open_files(places: Sequence[Path]) -> Weights:
    """Every tensor of some files; a name in two of them is an error."""
    files: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for place in places:
        name = str(place)
        files[name] = _open(place)
        for key, entry in _read_header(name, files[name]).items():
            if key in entries:
                raise CheckpointError(
                    f"{name}: it has {key!r}, and so has {entries[key].file}", fix="give files of one model"
                )
            entries[key] = entry
    return Weights(files, entries)


def _open_indexed(index: Path) -> Weights:
    """The tensors that an index names, each in the file that it says."""
    where = _read_weight_map(index)
    files: dict[str, Any] = {}
    headers: dict[str, dict[str, Entry]] = {}
    for file in dict.fromkeys(where.values()):
        name = str(index.parent / file)
        files[name] = _open(index.parent / file)
        headers[file] = _read_header(name, files[name])
    for key, file in where.items():
        if key not in headers[file]:
            raise CheckpointError(
                f"{index.parent / file}: it has no {key!r}, and {index.name} says that it has",
                fix="fetch the index and the files again: they are not of one model",
            )
    return Weights(files, {key: headers[file][key] for key, file in where.items()})


def _read_weight_map(index: Path) -> dict[str, str]:
    found = read_json(index)
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: it has no table of tensors (weight_map)", fix="fetch the index again")
    for file in where.values():
        check_plain_name(index, file)
    return where


def check_plain_name(index: Path, file: str) -> None:
    """An error if an index names a file that is not beside it."""
    if file != os.path.basename(file) or file in ("", ".", "..") or "\0" in file:
        raise CheckpointError(
            f"{index}: it names a file outside of its folder, {file!r:.80}", fix="do not trust where it came from"
        )


def _open(place: Path) -> Any:
    """A mapped file whose header holds: offsets inside of it, without holes and overlaps."""
    try:
        return safe_open(str(place), framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such file", fix=_beside(place)) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{place}: it is not a whole safetensors file: {error}", fix="write or fetch it again"
        ) from None


def _beside(place: Path) -> str:
    try:
        return closest(place.name, sorted(each.name for each in place.parent.iterdir()))
    except OSError:
        return f"{place.parent} is not a folder that can be read"


def _read_header(name: str, file: Any) -> dict[str, Entry]:
    found = {}
    for key in file.keys():  # noqa: SIM118  not a dictionary
        part = file.get_slice(key)
        spelled = part.get_dtype()
        dtype = read_dtype(spelled)
        if dtype is None:
            raise CheckpointError(f"{name}: {key!r} has dtype {spelled}, which tensors do not have")
        found[key] = Entry(name, tuple(part.get_shape()), dtype)
    return found
