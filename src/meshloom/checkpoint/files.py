"""Files of a checkpoint: safetensors, written piece by piece with checksums, read by boxes.

A file is written from start to end and synced; the disk has most of it before the last byte is written. The CRC-32 of
each chunk is taken on the way. CRC-32 finds every flipped bit, zlib has it (2 to 4 GB/s on one core), and anybody can
check it. It is against accidents: whoever can write to the folder can write another checksum too.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshloom.checkpoint.arrays import BLOCK, as_bytes, bytes_of, is_plain
from meshloom.checkpoint.formats import carry, nbytes
from meshloom.checkpoint.helpers import Helper
from meshloom.checkpoint.index import CHUNK, File, Index, Piece, Saved
from meshloom.engines.layout import torch_dtype
from meshloom.errors import CheckpointError
from meshloom.types import Shape, itemsize, numel

ALIGNED = 64  # data begins at a multiple of it, for those who map the file
READERS = 4  # threads that compare checksums; zlib and the disk both let others run
MOST_OPEN = 256  # files
STEP = 1 << 23  # bytes between two words about progress
SYNC = 1 << 26  # bytes after which the disk is given what was written, while more is

_SYNC_DATA = getattr(os, "fdatasync", os.fsync)  # macOS has the other one alone
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Told = Callable[[int], None]  # told of bytes as they are done


def silent(_: int) -> None:
    """Nobody is told."""


# Writing


@dataclass(frozen=True)
class Part:
    """A piece to be written: its name in the file, its dtype and shape, and what gives the arrays that make it up."""

    key: str
    dtype: str
    shape: Shape
    arrays: Callable[[], Iterable[torch.Tensor]]


def write_file(path: Path, parts: Sequence[Part], told: Told = silent, about: Mapping[str, str] | None = None) -> File:
    """Write arrays as one safetensors file and sync it; its size and checksums."""
    with (
        open(path, "xb", buffering=0) as file,
        Helper("copy") as copier,
        Helper("sum") as adder,
        Helper("sync") as syncer,
    ):
        out, synced = _Summed(file.write, adder), _Synced(file.fileno(), syncer)
        out.write(_header(parts, about))
        for part in parts:
            for array in part.arrays():
                is_at_hand = is_plain(array) or array.nbytes <= BLOCK
                for view in bytes_of(array) if is_at_hand else _ahead(bytes_of(array), copier):
                    for step in _steps(view):
                        out.write(step)
                        synced.note(len(step))
                        told(len(step))
        synced.end()
    return out.end()


def _ahead(views: Iterator[memoryview], copier: Helper) -> Iterator[memoryview]:
    """The same, each made while the one before it is used: what is not in order is copied."""
    following = copier.begin(lambda: next(views, None))
    while (view := following.result()) is not None:
        following = copier.begin(lambda: next(views, None))
        yield view


def _steps(view: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(view), STEP):
        yield view[first : first + STEP]


def _header(parts: Iterable[Part], about: Mapping[str, str] | None) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    offset = 0
    for part in parts:
        carried = carry(part.dtype, part.shape)
        assert carried is not None
        size = nbytes(part.dtype, part.shape)
        table[part.key] = {"dtype": carried[0], "shape": carried[1], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return struct.pack("<Q", len(text)) + text


class _Summed:
    """Writes bytes, and takes the checksum of each chunk; of many bytes in a thread, while the disk has them."""

    def __init__(self, write: Callable[[memoryview], int | None], adder: Helper) -> None:
        self._write, self._adder = write, adder
        self._sums, self._crc, self._nbytes = list[int](), 0, 0
        self._summing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._wait()
        if len(view) >= CHUNK:
            self._summing = self._adder.begin(lambda: self._sum(view))
        else:
            self._sum(view)
        done = 0
        while done < len(view):
            done += self._write(view[done:]) or 0

    def _wait(self) -> None:
        """Until what was written last is summed, too."""
        if self._summing is not None:
            self._summing.result()
            self._summing = None

    def _sum(self, view: memoryview) -> None:
        while view:
            room = CHUNK - self._nbytes % CHUNK
            self._crc = zlib.crc32(view[:room], self._crc)
            self._nbytes += len(view[:room])
            view = view[room:]
            if self._nbytes % CHUNK == 0:
                self._close_chunk()

    def _close_chunk(self) -> None:
        self._sums.append(self._crc)
        self._crc = 0

    def end(self) -> File:
        self._wait()
        if self._nbytes % CHUNK:
            self._close_chunk()
        return File(self._nbytes, tuple(self._sums))


class _Synced:
    """Lets what was written reach the disk while more is written; a failure there is raised here, once."""

    def __init__(self, number: int, syncer: Helper) -> None:
        self._number, self._syncer, self._waiting = number, syncer, 0
        self._syncing: Future[None] | None = None

    def note(self, nbytes: int) -> None:
        self._waiting += nbytes
        if self._waiting >= SYNC and (self._syncing is None or self._syncing.done()):
            self._await()
            self._waiting, self._syncing = 0, self._syncer.begin(lambda: _SYNC_DATA(self._number))

    def _await(self) -> None:
        if self._syncing is not None:
            self._syncing.result()

    def end(self) -> None:
        self._await()
        os.fsync(self._number)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_synced(path: Path, data: bytes) -> None:
    """A small file, on the disk when this returns."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


# Reading


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a piece: where the piece's data begin in its file, its shape there, and where in it the box lies."""

    file: str
    offset: int
    whole: Shape
    start: Shape
    shape: Shape
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the file from the first to behind the last element of the box."""
        first = last = 0
        for size, start, extent in zip(self.whole, self.start, self.shape, strict=True):
            first, last = first * size + start, last * size + start + extent - 1
        return self.offset + first * self.itemsize, self.offset + (last + 1) * self.itemsize


class Opened:
    """The files of a checkpoint, open for reading. `open_files` makes it.

    They are found through the folder as it was when it was opened: if a new checkpoint takes its name, this one is
    still read, or an error tells that it is gone.
    """

    def __init__(self, index: Index, folder: int) -> None:
        self.index, self._folder = index, folder
        self._numbers: dict[str, int] = {}  # the one that was read last comes last
        self._readers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._headers: dict[str, dict[str, Any]] = {}
        self._begins: dict[str, int] = {}

    def check_all(self) -> None:
        """An error unless every file is there, and as long as the index says."""
        for name, file in self.index.files.items():
            try:
                found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                self.refuse(name, "it is missing")
            except OSError as error:
                self.refuse(name, f"it cannot be read: {error.strerror}")
            if stat.S_ISLNK(found.st_mode):
                self.refuse(name, "it is a link to somewhere else")
            if not stat.S_ISREG(found.st_mode):
                self.refuse(name, "it is not a file")
            if found.st_size != file.nbytes:
                self.refuse(name, f"it has {found.st_size} bytes, and the index says {file.nbytes}")

    @contextmanager
    def _reading(self, file: str) -> Iterator[int]:
        """The open file; it stays open while somebody reads it, and is closed when many others were read since."""
        with self._lock:
            number = self._numbers.pop(file, None)
            if number is None:
                number = self._open(file)
            self._numbers[file] = number
            self._readers[file] += 1
        try:
            yield number
        finally:
            with self._lock:
                self._readers[file] -= 1
                if len(self._numbers) > MOST_OPEN:
                    idle = next(each for each in self._numbers if not self._readers[each])
                    os.close(self._numbers.pop(idle))

    def _open(self, file: str) -> int:
        try:
            return os.open(file, _READ, dir_fd=self._folder)
        except OSError as error:
            self.refuse(file, f"it cannot be read: {error.strerror}")

    def close(self) -> None:
        """Close the files."""
        while self._numbers:
            os.close(self._numbers.popitem()[1])

    def boxes(self, saved: Saved, start: Shape, stop: Shape) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """The boxes that make up a part of a tensor, each with its place in that part."""
        for piece in saved.pieces:
            first = tuple(map(max, start, piece.start))
            last = tuple(map(min, stop, piece.stop))
            if all(a < b for a, b in zip(first, last, strict=True)):
                inside = tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True))
                yield self._box(saved, piece, first, last), inside

    def _box(self, saved: Saved, piece: Piece, first: Shape, last: Shape) -> Box:
        begin = tuple(a - s for a, s in zip(first, piece.start, strict=True))
        extent = tuple(b - a for a, b in zip(first, last, strict=True))
        return Box(piece.file, self._offset(saved, piece), piece.shape, begin, extent, itemsize(saved.dtype))

    def _offset(self, saved: Saved, piece: Piece) -> int:
        """Where a piece begins in its file, whose header must say what the index says."""
        header = self._header(piece.file)
        found, carried = header.get(piece.key), carry(saved.dtype, piece.shape)
        assert carried is not None
        said = {"dtype": carried[0], "shape": list(carried[1])}
        if not isinstance(found, dict) or {name: found.get(name) for name in said} != said:
            told = "nothing" if not isinstance(found, dict) else f"{found.get('dtype')!s:.20}{found.get('shape')!s:.60}"
            self.refuse(
                piece.file, f"it has {told} as {piece.key!r:.80}, and the index says {saved.dtype}{said['shape']}"
            )
        offsets, size = found.get("data_offsets"), nbytes(saved.dtype, piece.shape)
        begin = offsets[0] if isinstance(offsets, list) and len(offsets) == 2 else None
        if not isinstance(begin, int) or offsets != [begin, begin + size] or begin < 0:
            self.refuse(piece.file, f"the place of {piece.key!r:.80} in it is not one of {size} bytes")
        place = self._begins[piece.file] + begin
        if place + size > self.index.files[piece.file].nbytes:
            self.refuse(piece.file, f"{piece.key!r:.80} lies beyond its end")
        return place

    def check_headers(self) -> None:
        """An error unless the headers of the files say of every piece what the index says."""
        for saved in self.index.tensors.values():
            for piece in saved.pieces:
                self._offset(saved, piece)

    def _header(self, file: str) -> dict[str, Any]:
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _read_header(self, file: str) -> dict[str, Any]:
        size = self.index.files[file].nbytes
        with self._reading(file) as number:
            begin = os.pread(number, 8, 0)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
        if 8 + length > size:
            self.refuse(file, "it is not a safetensors file: its header does not fit into it")
        self.verify([(file, 0, 8 + length)])
        text = bytearray(length)
        self.read_flat(file, 8, memoryview(text))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.refuse(file, "it is not a safetensors file: its header is not a table")
        self._begins[file] = 8 + length
        return found

    def refuse(self, file: str, what: str) -> NoReturn:
        """An error that begins with the name of a file."""
        raise CheckpointError(
            f"{self.index.place / file}: {what}", fix="use another checkpoint, or fetch this one again"
        )

    def read_flat(self, file: str, offset: int, room: memoryview) -> None:
        """Bytes of a file, from a place on, into memory."""
        done = 0
        with self._reading(file) as number:
            while done < len(room):
                count = os.preadv(number, [room[done : done + (1 << 30)]], offset + done)
                if count == 0:
                    self.refuse(file, f"it ended at {offset + done} while it was read")
                done += count

    def read(self, box: Box, target: torch.Tensor, told: Told = silent) -> None:
        """A box into an array of its shape."""
        self._read(box.file, box.offset, box.whole, box.start, target.detach(), told)

    def _read(self, file: str, offset: int, whole: Shape, start: Shape, target: torch.Tensor, told: Told) -> None:
        if target.numel() == 0:
            return
        element = target.element_size()
        row = numel(whole[1:]) * element
        if tuple(target.shape[1:]) == whole[1:]:  # rows as they are in the file
            self._read_rows(file, offset + (start[0] if start else 0) * row, target, told)
        elif row > BLOCK:
            for number in range(target.shape[0]):
                self._read(file, offset + (start[0] + number) * row, whole[1:], start[1:], target[number], told)
        else:
            sides = (slice(s, s + size) for s, size in zip(start[1:], target.shape[1:], strict=True))
            box = (slice(None), *sides)
            for first in range(0, target.shape[0], count := BLOCK // row):
                part = target[first : first + count]
                rows = torch.empty((len(part), *whole[1:]), dtype=target.dtype)
                self.read_flat(file, offset + (start[0] + first) * row, as_bytes(rows))
                part.copy_(rows[box])
                told(part.nbytes)

    def _read_rows(self, file: str, offset: int, target: torch.Tensor, told: Told) -> None:
        if is_plain(target):
            view = as_bytes(target)
            for first in range(0, len(view), STEP):
                self.read_flat(file, offset + first, view[first : first + STEP])
                told(len(view[first : first + STEP]))
        elif target.nbytes <= BLOCK or target.dim() == 0:
            rows = torch.empty(target.shape, dtype=target.dtype)
            self.read_flat(file, offset, as_bytes(rows))
            target.copy_(rows)
            told(target.nbytes)
        else:
            row = target.nbytes // target.shape[0]
            for first in range(0, target.shape[0], count := max(1, BLOCK // row)):
                part = target[first : first + count]
                self._read_rows(file, offset + first * row, part if len(part) > 1 else part[0], told)

    def verify(self, spans: Iterable[tuple[str, int, int]], told: Told = silent) -> None:
        """Compare the checksums of all chunks that some bytes lie in; an error names a file that was changed."""
        chunks = sorted({(file, chunk) for file, a, b in spans for chunk in range(a // CHUNK, -(-b // CHUNK))})
        if not chunks:
            return
        share = -(-len(chunks) // READERS)
        groups = [chunks[first : first + share] for first in range(0, len(chunks), share)]
        if len(groups) == 1 or len(chunks) < 2 * READERS:
            self._compare(chunks, told)
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="meshloom checksums") as threads:
            for done in [threads.submit(self._compare, group, told) for group in groups]:
                done.result()

    def _compare(self, chunks: Sequence[tuple[str, int]], told: Told) -> None:
        room = memoryview(bytearray(CHUNK))
        for file, number in chunks:
            known = self.index.files[file]
            part = room[: min(CHUNK, known.nbytes - number * CHUNK)]
            self.read_flat(file, number * CHUNK, part)
            if zlib.crc32(part) != known.sums[number]:
                self.refuse(file, f"it was changed: bytes {number * CHUNK} to {number * CHUNK + len(part)} differ")
            told(len(part))


@contextmanager
def open_files(index: Index) -> Iterator[Opened]:
    """The files of a checkpoint, all there and as long as the index says."""
    folder = os.open(index.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    opened = Opened(index, folder)
    try:
        opened.check_all()
        yield opened
    finally:
        opened.close()
        os.close(folder)


def read_part(opened: Opened, saved: Saved, start: Shape, stop: Shape, told: Told = silent) -> torch.Tensor:
    """A part of a tensor as a dense array; what it reads is compared with the checksums first."""
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    found = torch.empty(shape, dtype=torch_dtype(saved.dtype))
    boxes = list(opened.boxes(saved, start, stop))
    opened.verify([(box.file, *box.span) for box, _ in boxes])
    for box, inside in boxes:
        opened.read(box, found[inside], told)
    return found
