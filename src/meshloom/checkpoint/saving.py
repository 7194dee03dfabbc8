"""`save`: a state into a folder, by all processes together.

    gather      the state as a tree and tensors by name              every process, the same
    assign      which process writes which piece                     every process, the same table
    agree       all have the same state, all see the same folder     two short collectives
    write       own pieces into files, then a note with checksums    each by itself, in a thread if asked
    put         when all notes are there: index, sync, rename        the first process

From the first write on processes meet in the folder alone: notes are files, and a lock that is free means that its
process has ended. So a thread can write while the program goes on, and no collective waits for a disk.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshloom.checkpoint.arrays import BLOCK, own_copy
from meshloom.checkpoint.files import Part, sync_folder, write_file, write_synced
from meshloom.checkpoint.folders import (
    Lock,
    as_folder,
    check_series,
    check_target,
    is_free,
    is_held,
    lock_file,
    name_aside,
    put_in_place,
    remove_leftovers,
    remove_older,
)
from meshloom.checkpoint.index import NAME, File, Index, Piece, Saved, read_json, write_index
from meshloom.checkpoint.progress import Progress, check_progress, show
from meshloom.checkpoint.state import Gathered, gather
from meshloom.checkpoint.writers import Share, Source, assign
from meshloom.comms import WORLD
from meshloom.engines.layout import short_name
from meshloom.errors import CheckpointError, MeshloomError, expect
from meshloom.mesh import HERE
from meshloom.placement import extents
from meshloom.processes.divergence import checksum, some_of
from meshloom.processes.exchange import agree
from meshloom.runtime.card_array import to_host
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import sent

LARGE = 4 << 30  # bytes after which a process begins another file
LOOK = 0.02  # seconds between two looks into the folder
GRACE = 5.0  # seconds that the first process waits for others to stop writing before it removes what failed


class Saving:
    """A save that is done or under way.

    `done` says whether it has ended, `wait` returns when it has and raises what went wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_told = False

    def __repr__(self) -> str:
        fate = "under way" if not self.done else "failed" if self._error is not None else "done"
        return f"Saving({str(self.folder)!r}, {fate})"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> Path:
        """The folder, once it is complete; raises what went wrong, or a TimeoutError after so many seconds."""
        if not self._ended.wait(seconds):
            raise TimeoutError(f"the save to {self.folder} has not ended within {seconds:g} s")
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.folder

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


_under_way: list[Saving] = []


@sent("loom:save")
def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    progress: Progress = None,
) -> Saving:
    """Write a state to a folder: modules, optimizers, anything with `state_dict`, tensors, plain values.

    All processes call it. The folder appears complete or not at all; one that is there already is exchanged for the new
    one. `keep=3` removes the checkpoints before the last three of a series (`runs/step-000100`). `asynchronous=True`
    copies what this process writes and returns; `wait()` of what it returns says how it ended.

    >>> import tempfile, meshloom as loom
    >>> mesh = loom.open_mesh((2,), axes=("tp",))
    >>> folder = tempfile.mkdtemp() + "/step-000007"
    >>> state = {"weight": loom.ones(3, mesh=mesh, placements="S(0)"), "step": 7}
    >>> loom.save(state, folder).done
    True
    >>> fresh = {"weight": loom.zeros(3, mesh=mesh, placements="R"), "step": 0}
    >>> loom.load(folder, into=fresh)["weight"].to_torch(), fresh["step"]
    (tensor([1., 1., 1.]), 7)
    """
    check_progress(progress)
    expect("asynchronous", asynchronous, bool, fix="True or False")
    finish_earlier()
    job = _prepare(state, folder, keep)
    saving = Saving(job.folder)
    if not asynchronous:
        with show("saving", job.nbytes, progress) as told:
            saving._run(lambda: job.run(told))
        saving.wait()
        return saving
    _start(saving, job, progress)
    return saving


def _start(saving: Saving, job: Job, progress: Progress) -> None:
    """Write in a thread; what fails there is told by `wait`, by the next save, or at the end of the program."""
    job.copy_parts()
    if not _under_way:
        atexit.register(_tell_at_exit)
    _under_way[:] = [saving]

    def act() -> None:
        with show("saving", job.nbytes, progress if progress is not None else False) as told:
            job.run(told)

    threading.Thread(target=saving._run, args=(act,), name="meshloom save", daemon=False).start()


def finish_earlier() -> None:
    """Wait for a save that is under way; if it failed and nobody was told, this tells."""
    for saving in _under_way:
        saving._ended.wait()
        if saving._error is not None and not saving._is_told:
            saving.wait()


def _tell_at_exit() -> None:
    """The end of the program, which has waited for the thread: a failure that nobody was told of is an exit code."""
    for saving in _under_way:
        if saving._error is not None and not saving._is_told:
            print(f"{type(saving._error).__name__}: {saving._error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


# Preparing: together


def _prepare(state: dict[str, Any], folder: str | os.PathLike[str], keep: int | None) -> Job:
    """Gather, agree and open the folder aside; after this the processes need no collective."""
    token = os.urandom(8).hex()
    found: dict[str, Any] = {}

    def gather_all() -> dict[str, Any]:
        found["folder"] = as_folder(folder)
        check_series(found["folder"], keep)
        found["state"] = gather(state)
        if HERE.rank == 0:
            found["lock"] = _open_aside(found["folder"], name_aside(found["folder"], token))
        return {"token": token, "digest": _digest(found["folder"], found["state"], keep)}

    try:
        told = agree("save", gather_all, CheckpointError)
        _compare(told)
        aside = name_aside(found["folder"], told[0]["token"])
        job = found["job"] = Job(found["folder"], aside, keep, _settle(found["state"]), held=found.get("lock"))
        agree("save", job.lock, CheckpointError)
    except BaseException:
        _give_up(found, token)
        raise
    return job


def _give_up(found: dict[str, Any], token: str) -> None:
    """Leave nothing behind of a save that has not begun."""
    if "lock" in found:
        shutil.rmtree(name_aside(found["folder"], token), ignore_errors=True)
        found["lock"].release(remove=True)
    elif "job" in found:
        found["job"].release()


def _settle(gathered: Gathered) -> Gathered:
    """Partial tensors are reduced: a file has the value itself."""
    for name, tensor in gathered.tensors.items():
        if isinstance(tensor, Tensor) and tensor.topology.partial_axes:
            with torch.no_grad():
                gathered.tensors[name] = tensor.redistribute(tensor.topology.reduced.placements)
    return gathered


def _open_aside(folder: Path, aside: Path) -> Lock:
    """The folder aside, and the lock that says that it is written to."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_target(folder)
        remove_leftovers(folder)
        held = Lock(lock_file(aside, 0))
        aside.mkdir()
        return held
    except OSError as error:
        raise CheckpointError(f"{error.filename or aside}: it cannot be made: {error.strerror}") from None


def _digest(folder: Path, gathered: Gathered, keep: int | None) -> dict[str, str]:
    """What all processes must have alike: the folder, the tensors, the values of each part of the state."""
    tensors = {name: str(_source(tensor)) for name, tensor in gathered.tensors.items()}
    parts = {"the folder": str(folder), "keep": keep, "the tensors": tensors}
    parts |= {f"state[{key!r}]": node for key, node in gathered.tree.items()}
    if HERE.count > 1:
        parts |= {f"the dense tensor {name!r}": _sample(each) for name, each in gathered.tensors.items()}
    return {name: f"{zlib.crc32(json.dumps(part).encode()):08x}" for name, part in parts.items()}


def _sample(tensor: torch.Tensor) -> int:
    """A number that dense tensors with the same values share; they count as replicated."""
    return 0 if isinstance(tensor, Tensor) else checksum(some_of(tensor))


def _compare(told: list[dict[str, Any]]) -> None:
    first = told[0]["digest"]
    for rank, each in enumerate(told):
        if each["digest"] != first:
            names = [name for name in {**first, **each["digest"]} if first.get(name) != each["digest"].get(name)]
            raise CheckpointError(
                f"ranks 0 and {rank} do not save the same: {', '.join(names[:4])} differs",
                fix="save values that all processes share; what differs by rank belongs into a list with one per rank",
            )


def _source(tensor: torch.Tensor) -> Source:
    topology = tensor.topology if isinstance(tensor, Tensor) else None
    return Source(short_name(tensor.dtype), tuple(tensor.shape), topology)


# Writing: each by itself


@dataclass
class Job:
    """What one process writes."""

    folder: Path
    aside: Path
    keep: int | None
    gathered: Gathered
    pieces: list[Share] = field(default_factory=list)  # of all processes
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    held: Lock | None = None
    _keys: set[str] = field(default_factory=lambda: {"__metadata__"})  # names in files that are taken
    number: int = 0  # of the folder aside, which it keeps when it is renamed

    def __post_init__(self) -> None:
        self.sources = {name: _source(tensor) for name, tensor in self.gathered.tensors.items()}
        self.pieces = assign(self.sources, HERE.count)

    @property
    def own(self) -> list[tuple[int, Share]]:
        """The pieces that this process writes, with their numbers."""
        return [(number, piece) for number, piece in enumerate(self.pieces) if piece.rank == HERE.rank]

    @property
    def nbytes(self) -> int:
        """The bytes that this process writes."""
        return sum(piece.nbytes for _, piece in self.own)

    def lock(self) -> None:
        """Say in the folder that this process writes there."""
        if not self.aside.is_dir():
            raise CheckpointError(
                f"{self.aside}: rank 0 has made this folder, and rank {HERE.rank} does not see it",
                fix="save to a folder that all hosts share",
            )
        self.number = os.stat(self.aside).st_ino
        if self.held is None:
            self.held = Lock(lock_file(self.aside, HERE.rank))

    def copy_parts(self) -> None:
        """Copy what this process writes, so that the program may go on and change it."""
        try:
            self.copies = {number: self._copy(piece) for number, piece in self.own}
        except BaseException:
            self.release()
            raise
        self.gathered.tensors.clear()

    def _copy(self, piece: Share) -> torch.Tensor:
        array = self._view(piece)
        return own_copy(array) if array is not None else self._assemble(piece)

    def arrays(self, piece: Share) -> Iterator[torch.Tensor]:
        """What this process holds of a tensor in the box of a piece: as it lies in memory, or some rows at a time."""
        array = self._view(piece)
        if array is not None:
            yield array
            return
        rows = max(1, BLOCK * piece.shape[0] // max(1, piece.nbytes))
        for first in range(0, piece.shape[0], rows):
            count = min(rows, piece.shape[0] - first)
            yield self._assemble(
                replace(piece, start=(piece.start[0] + first, *piece.start[1:]), shape=(count, *piece.shape[1:]))
            )

    def _view(self, piece: Share) -> torch.Tensor | None:
        """The box in the memory of its tensor; None where padding lies inside of it."""
        tensor = self.gathered.tensors[piece.name]
        if not isinstance(tensor, Tensor):
            return tensor.detach()[_slices(piece.start, piece.shape)]
        for extent in extents(tensor.topology):
            inside = tuple(a - s for a, s in zip(piece.start, extent.start, strict=True))
            fits = zip(inside, piece.shape, extent.shape, strict=True)
            if all(a >= 0 and a + size <= whole for a, size, whole in fits):
                place = tuple(map(sum, zip(extent.place, inside, strict=True)))
                return to_host(tensor._data.detach()[_slices(place, piece.shape)])
        return None

    def _assemble(self, piece: Share) -> torch.Tensor:
        """A box that lies in several places of the stored array, because padding lies between them."""
        tensor = self.gathered.tensors[piece.name]
        assert isinstance(tensor, Tensor)
        found = torch.empty(piece.shape, dtype=tensor.dtype)
        for extent in extents(tensor.topology):
            first, last = tuple(map(max, piece.start, extent.start)), tuple(map(min, piece.stop, extent.stop))
            if all(a < b for a, b in zip(first, last, strict=True)):
                shape = tuple(b - a for a, b in zip(first, last, strict=True))
                at = tuple(a - s for a, s in zip(first, piece.start, strict=True))
                place = tuple(a - s + p for a, s, p in zip(first, extent.start, extent.place, strict=True))
                found[_slices(at, shape)] = to_host(tensor._data.detach()[_slices(place, shape)])
        return found

    def run(self, told: Callable[[int], None]) -> None:
        """Write, and wait until the checkpoint is in place; whatever fails here, the others are told."""
        try:
            self._write(told)
            if HERE.rank == 0:
                self._complete()
            else:
                self._await_end()
        except BaseException as error:
            self._fail(error)
            if isinstance(error, OSError):
                name = error.filename or self.aside
                raise CheckpointError(
                    f"{name}: it cannot be written: {error.strerror}", fix="the checkpoint before it is as it was"
                ) from error
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the folder."""
        if self.held is not None:
            self.held.release(remove=HERE.rank == 0)

    def _write(self, told: Callable[[int], None]) -> None:
        table: dict[str, Any] = {"files": {}, "pieces": {}}
        for number, group in enumerate(self._files()):
            name = f"rank-{HERE.rank:05d}-{number:03d}.safetensors"
            parts = [self._part(piece_number, piece) for piece_number, piece in group]
            file = write_file(self.aside / name, parts, told)
            table["files"][name] = {"bytes": file.nbytes, "sums": file.sums}
            table["pieces"] |= {str(n): [name, part.key] for (n, _), part in zip(group, parts, strict=True)}
            for piece_number, _ in group:
                self.copies.pop(piece_number, None)
        write_synced(self._note(HERE.rank, ".part"), json.dumps(table).encode())
        os.rename(self._note(HERE.rank, ".part"), self._note(HERE.rank))

    def _files(self) -> list[list[tuple[int, Share]]]:
        """The pieces of this process, by file."""
        files: list[list[tuple[int, Share]]] = []
        size = LARGE
        for number, piece in self.own:
            if size + piece.nbytes > LARGE or not files:
                files.append([])
                size = 0
            files[-1].append((number, piece))
            size += piece.nbytes
        return files

    def _part(self, number: int, piece: Share) -> Part:
        source = self.sources[piece.name]
        key = piece.name
        if piece.shape != source.shape:
            key += "[" + ", ".join(f"{a}:{b}" for a, b in zip(piece.start, piece.stop, strict=True)) + "]"
        while key in self._keys:  # a tensor may have the name of another one's piece
            key += "~"
        self._keys.add(key)
        if number in self.copies:
            return Part(key, source.dtype, piece.shape, lambda: [self.copies[number]])
        return Part(key, source.dtype, piece.shape, lambda: self.arrays(piece))

    def _note(self, rank: int, ending: str = "") -> Path:
        return self.aside / f"rank-{rank:05d}.json{ending}"

    # Putting in place: the first process

    def _complete(self) -> None:
        notes = [self._await_note(rank) for rank in range(HERE.count)]
        files = {
            name: File(each["bytes"], tuple(each["sums"])) for note in notes for name, each in note["files"].items()
        }
        where = {int(number): each for note in notes for number, each in note["pieces"].items()}
        listed: dict[str, list[Piece]] = {name: [] for name in self.sources}
        for number, piece in enumerate(self.pieces):
            listed[piece.name].append(Piece(piece.start, piece.shape, *where[number]))
        tensors = {name: Saved(each.dtype, each.shape, tuple(listed[name])) for name, each in self.sources.items()}
        token = self.aside.name.rpartition("-")[2]
        write_synced(self.aside / NAME, write_index(Index(self.gathered.tree, tensors, files, token)))
        for rank in range(HERE.count):
            self._note(rank).unlink()
            if rank != HERE.rank:
                lock_file(self.aside, rank).unlink()
        sync_folder(self.aside)
        put_in_place(self.aside, self.folder)
        if self.keep is not None:
            remove_older(self.folder, self.keep)

    def _await_note(self, rank: int) -> Any:
        wait = _Patience(self.aside)
        while not self._note(rank).exists():
            self._look_for_failures(rank)
            wait.pause(f"rank {rank} has not written its part of {self.folder}")
        return read_json(self._note(rank))

    def _look_for_failures(self, rank: int) -> None:
        """An error if a process has failed, or if a certain one has ended without a word."""
        for failed in sorted(self.aside.glob("*.failed")):
            there = int(failed.name[5:10])
            raise CheckpointError(f"rank {there} could not write its part of {self.folder}: {failed.read_text()}")
        if rank != HERE.rank and is_free(lock_file(self.aside, rank)):
            raise CheckpointError(
                f"rank {rank} ended before {self.folder} was complete", fix=f"look at what rank {rank} says"
            )

    def _await_end(self) -> None:
        """Until the first process has put the checkpoint in place: then the folder is the one that was aside."""
        wait = _Patience(self.aside)
        while not self._is_in_place():
            if not self.aside.is_dir() and not self._is_in_place():
                raise CheckpointError(f"rank 0 could not complete {self.folder}", fix="look at what rank 0 says")
            self._look_for_failures(0)
            wait.pause(f"rank 0 has not completed {self.folder}")

    def _is_in_place(self) -> bool:
        try:
            return os.stat(self.folder).st_ino == self.number
        except FileNotFoundError:
            return False

    def _fail(self, error: BaseException) -> None:
        """Tell the others, let go of the folder, and remove it once nobody writes there."""
        text = error.headline if isinstance(error, MeshloomError) else str(error) or type(error).__name__
        with suppress(OSError):  # on a full disk the free lock says it
            (self.aside / f"rank-{HERE.rank:05d}.failed").write_text(text)
        if HERE.rank == 0:
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any(is_held(lock) for lock in self.aside.glob("*.lock")):
                time.sleep(LOOK)
            shutil.rmtree(self.aside, ignore_errors=True)
        self.release()


class _Patience:
    """Waits for others for as long as what they write grows."""

    def __init__(self, aside: Path) -> None:
        self.aside, self.size, self.since = aside, -1, time.monotonic()

    def pause(self, what: str) -> None:
        time.sleep(LOOK)
        size = 0
        try:
            for each in os.scandir(self.aside):
                size += each.stat().st_size
        except FileNotFoundError:  # put in place, or removed, while we looked
            return
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        if WORLD.watch is not None and WORLD.watch.failure is not None:
            raise CheckpointError(f"{what}, and will not: {WORLD.watch.failure['headline']}")
        if time.monotonic() - self.since > WORLD.timeout:
            raise CheckpointError(
                f"{what} for {WORLD.timeout:g} s", fix="raise timeout= of open_mesh (or MESHLOOM_TIMEOUT) if it is slow"
            )


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
