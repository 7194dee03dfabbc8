"""The index of a checkpoint: what was saved, which box of which tensor is where, and the checksums of the files.

It is JSON (`docs/checkpoints.md` has the table), read as something that anybody may have written: every name, number
and box is looked at before a file is opened.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy

from meshloom.checkpoint.formats import is_known, nbytes
from meshloom.checkpoint.values import DEEPEST
from meshloom.errors import CheckpointError
from meshloom.placement import Part
from meshloom.types import Shape, numel

NAME = "index.json"
FORMAT = "meshloom checkpoint"
VERSION = 1
CHUNK = 1 << 20  # bytes of a file that one checksum is of
LARGEST = 1 << 28  # bytes of an index; that of a terabyte has less than a tenth
MOST_BYTES = 1 << 60
MOST_DIMS = 64
MOST_CELLS = 1 << 24
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\.safetensors")


@dataclass(frozen=True, slots=True)
class Piece(Part):
    """A box of a tensor, its file, and its name there."""

    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint: its dtype, its global shape, and the pieces that make it up.

    >>> str(Saved("f32", (4, 2), ()))
    'f32[4, 2]'
    """

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint: its bytes, and the CRC-32 of each chunk of it."""

    nbytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds."""

    state: dict[str, Any]
    tensors: Mapping[str, Saved]
    files: Mapping[str, File]
    token: str = ""  # a name of its own, so that two checkpoints are told apart
    place: Path = field(default_factory=Path)  # the folder that it was read from

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())


def write_index(index: Index) -> bytes:
    """The index as the bytes of its file."""
    tensors = {
        name: {
            "dtype": saved.dtype,
            "shape": list(saved.shape),
            "pieces": [
                {"start": list(p.start), "shape": list(p.shape), "file": p.file, "name": p.key} for p in saved.pieces
            ],
        }
        for name, saved in index.tensors.items()
    }
    files = {
        name: {"bytes": file.nbytes, "crc32": "".join(f"{each:08x}" for each in file.sums)}
        for name, file in index.files.items()
    }
    found = {
        "format": FORMAT,
        "version": VERSION,
        "token": index.token,
        "chunk": CHUNK,
        "state": index.state,
        "tensors": tensors,
        "files": files,
    }
    text = _canonical(found)
    return (text[:-1] + f',"crc32":"{zlib.crc32(text.encode()):08x}"}}').encode()


def _canonical(found: Mapping[str, Any]) -> str:
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


def read_index(folder: Path) -> Index:
    """The index in a folder, checked; an error that begins with the name of the file."""
    file = folder / NAME
    found = read_json(file, _why_missing)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{file}: it is not the index of a checkpoint", fix=_why_missing(file))
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{file}: it has version {found.get('version')!r:.40} of the format, and this meshloom reads {VERSION}",
            fix="read it with the meshloom that wrote it, and export it: loom.export(folder, file)",
        )
    said = found.pop("crc32", None)
    if said != f"{zlib.crc32(_canonical(found).encode()):08x}":
        raise _damaged(file, "it was changed: its checksum does not fit")
    return _Reader(file).read(found)


def read_json(file: Path, explain: Callable[[Path], str | None] = lambda _: None) -> Any:
    """What a file of JSON says; an error that begins with its name."""
    try:
        size = file.stat().st_size
        if size > LARGEST:
            raise CheckpointError(f"{file}: it has {size} bytes, and no index has more than {LARGEST}")
        return json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file", fix=explain(file)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{file}: it is not JSON that can be read: {reason}", fix="fetch it again") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _why_missing(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"{folder} is not a folder; loom.latest(parent) finds the newest checkpoint of a parent folder"
    inside = sorted(each.name for each in folder.iterdir() if (each / NAME).is_file())
    if inside:
        return f"checkpoints lie inside of it: {', '.join(inside[-4:])}; loom.latest({str(folder)!r}) gives the newest"
    if any(folder.glob("*.safetensors")):
        return "it has safetensors files: loom.checkpoint.open_weights(folder) reads them"
    return "give a folder that loom.save wrote"


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {what}", fix="use another one; meshloom checkpoint verify FOLDER looks at it")


class _Reader:
    """Reads what an index says, and refuses what cannot be."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, found: Mapping[str, Any]) -> Index:
        if found.get("chunk") != CHUNK:
            self._refuse(f"its checksums are of {found.get('chunk')!r:.40} bytes each, and not of {CHUNK}")
        files = {name: self._file(name, each) for name, each in self._table(found, "files").items()}
        tensors = {name: self._tensor(name, each, files) for name, each in self._table(found, "tensors").items()}
        token = found.get("token")
        state = found.get("state")
        if not isinstance(token, str) or not isinstance(state, dict):
            self._refuse("it says nothing of the state")
        if _is_deep(state):
            self._refuse("its state is nested too deeply")
        return Index(state, tensors, files, token, self.file.parent)

    def _refuse(self, what: str) -> NoReturn:
        raise _damaged(self.file, what)

    def _table(self, found: Mapping[str, Any], name: str) -> dict[str, Any]:
        table = found.get(name)
        if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
            self._refuse(f"it has no table of {name}")
        return table

    def _file(self, name: str, found: Mapping[str, Any]) -> File:
        if not _FILE.fullmatch(name) or name != os.path.basename(name):
            self._refuse(f"it names a file that cannot be one of its own, {name!r:.80}")
        size, text = found.get("bytes"), found.get("crc32")
        if not isinstance(size, int) or not _is_size(size):
            self._refuse(f"it says that {name} has {size!r:.40} bytes")
        if not isinstance(text, str) or len(text) != 8 * -(-size // CHUNK) or not re.fullmatch("[0-9a-f]*", text):
            self._refuse(f"the checksums of {name} are not those of {size} bytes")
        return File(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))

    def _tensor(self, name: str, found: Mapping[str, Any], files: Mapping[str, File]) -> Saved:
        dtype, shape = found.get("dtype"), self._shape(name, found.get("shape"))
        if not isinstance(dtype, str) or not is_known(dtype):
            self._refuse(f"{name!r:.80} has dtype {dtype!r:.40}, which files do not have")
        if nbytes(str(dtype), shape) > MOST_BYTES:
            self._refuse(f"{name!r:.80} of shape {list(shape)!r:.80} is larger than any file")
        listed = found.get("pieces")
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            self._refuse(f"{name!r:.80} has no list of pieces")
        pieces = tuple(self._piece(name, shape, each, files) for each in listed)
        if not _covers(shape, pieces):
            self._refuse(f"the pieces of {name!r:.80} overlap or leave holes")
        return Saved(str(dtype), shape, pieces)

    def _shape(self, name: str, found: Any) -> Shape:
        if not isinstance(found, list) or len(found) > MOST_DIMS or not all(_is_size(each) for each in found):
            self._refuse(f"{name!r:.80} has the shape {found!r:.80}")
        return tuple(found)

    def _piece(self, name: str, whole: Shape, found: Mapping[str, Any], files: Mapping[str, File]) -> Piece:
        start, shape = self._shape(name, found.get("start")), self._shape(name, found.get("shape"))
        file, key = found.get("file"), found.get("name")
        if not isinstance(file, str) or file not in files or not isinstance(key, str):
            self._refuse(f"a piece of {name!r:.80} is in {file!r:.80}, which is not among its files")
        piece = Piece(start, shape, str(file), str(key))
        if len(start) != len(whole) or len(shape) != len(whole):
            self._refuse(f"a piece of {name!r:.80} has other dims than {list(whole)}")
        if any(stop > size for stop, size in zip(piece.stop, whole, strict=True)):
            self._refuse(f"a piece of {name!r:.80} lies outside of {list(whole)}")
        return piece


def _is_deep(state: Any) -> bool:
    """Whether tables and lists are nested deeper than those of any state; one level of a state may be three here."""
    level = [state]
    for _ in range(3 * DEEPEST):
        level = [inside for each in level for inside in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES


def _covers(shape: Shape, pieces: tuple[Piece, ...]) -> bool:
    """Whether pieces hold every element once: they are painted on a grid whose lines are their edges.

    >>> _covers((4,), (Piece((0,), (2,), "", ""), Piece((2,), (2,), "", "")))
    True
    >>> _covers((4,), (Piece((0,), (3,), "", ""), Piece((2,), (2,), "", "")))
    False
    """
    if numel(shape) == 0 or not pieces:
        return numel(shape) == 0
    if len(pieces) == 1:
        return pieces[0].shape == shape
    edges = [sorted({0, size, *(p.start[d] for p in pieces), *(p.stop[d] for p in pieces)}) for d, size in _each(shape)]
    counts = tuple(len(each) - 1 for each in edges)
    if numel(counts) > MOST_CELLS:
        return False
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    grid = numpy.zeros(counts, dtype=numpy.uint8)
    for piece in pieces:
        lines = zip(numbers, piece.start, piece.stop, strict=True)
        box = tuple(slice(number[start], number[stop]) for number, start, stop in lines)
        if grid[box].any():
            return False
        grid[box] = 1
    return bool(grid.all())


def _each(shape: Shape) -> list[tuple[int, int]]:
    return list(enumerate(shape))
