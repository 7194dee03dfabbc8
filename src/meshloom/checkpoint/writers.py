"""Who writes which piece of a tensor: every element once, and every process about as many bytes.

A piece is a box of a tensor that goes into one file. What one process alone holds, it writes. What several hold goes to
the one of them that has least to write; large ones are cut, so that the holders share them. All processes come to the
same table, without asking each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshloom.placement import Part, Topology, extents
from meshloom.types import Shape, itemsize, numel

SHARED = 1 << 26  # bytes; a piece that several processes hold and that is larger is cut


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written: its dtype and global shape, and where it lies (None: every process holds all of it)."""

    dtype: str
    shape: Shape
    topology: Topology | None = None


@dataclass(frozen=True, slots=True)
class Share(Part):
    """What one rank writes of a tensor: a box of it."""

    name: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Held(Part):
    """A box of a tensor, and the ranks that hold it."""

    ranks: tuple[int, ...]


def assign(sources: Mapping[str, Source], count: int) -> list[Share]:
    """The pieces of some tensors, each with the rank of `count` that writes it.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.placement import Replicate, Shard
    >>> mesh = Mesh.of((2,), processes=(2,))
    >>> whole = Source("f32", (3,), Topology(mesh, (Replicate(),), (3,), "f32"))
    >>> half = Source("f32", (5,), Topology(mesh, (Shard(0),), (5,), "f32"))
    >>> [(piece.name, piece.start, piece.shape, piece.rank) for piece in assign({"r": whole, "s": half}, 2)]
    [('r', (0,), (3,), 1), ('s', (0,), (3,), 0), ('s', (3,), (2,), 1)]
    """
    loads = [0] * count
    seen: dict[Topology, tuple[Held, ...]] = {}  # layers are alike: many tensors share a topology
    held = [
        (name, box, _nbytes(source, box)) for name, source in sources.items() for box in _boxes(source, count, seen)
    ]
    for _, box, nbytes in held:
        if len(box.ranks) == 1:
            loads[box.ranks[0]] += nbytes
    writers: dict[int, int] = {}
    for number in sorted(range(len(held)), key=lambda number: (-held[number][2], number)):
        _, box, nbytes = held[number]
        writers[number] = min(box.ranks, key=lambda rank: (loads[rank], rank))
        if len(box.ranks) > 1:
            loads[writers[number]] += nbytes
    return [Share(box.start, box.shape, name, writers[i], nbytes) for i, (name, box, nbytes) in enumerate(held)]


def _nbytes(source: Source, box: Held) -> int:
    return numel(box.shape) * itemsize(source.dtype)


def _boxes(source: Source, count: int, seen: dict[Topology, tuple[Held, ...]]) -> Iterator[Held]:
    topology = source.topology
    if topology is None or not (topology.mesh.is_split or topology.mesh.ranks):
        whole = Held((0,) * len(source.shape), source.shape, tuple(range(count)))
        boxes: tuple[Held, ...] = (whole,)
    else:
        boxes = seen[topology] if topology in seen else seen.setdefault(topology, _held_by(topology))
    for box in boxes:
        yield from _share(box, _nbytes(source, box))


def _held_by(topology: Topology) -> tuple[Held, ...]:
    """The different boxes that processes hold, in the order of ranks."""
    found: dict[tuple[Shape, Shape], list[int]] = {}
    for rank in topology.mesh.holders:
        for extent in extents(topology, rank):
            found.setdefault((extent.start, extent.shape), []).append(rank)
    return tuple(Held(start, shape, tuple(ranks)) for (start, shape), ranks in found.items())


def _share(box: Held, nbytes: int) -> Iterator[Held]:
    """A large box that several hold, cut along its first dim; any other as it is."""
    parts = min(len(box.ranks), box.shape[0]) if box.shape and nbytes > SHARED else 1
    for part in range(parts):
        if parts == 1:
            yield box
            continue
        first, last = part * box.shape[0] // parts, (part + 1) * box.shape[0] // parts
        yield Held((box.start[0] + first, *box.start[1:]), (last - first, *box.shape[1:]), box.ranks)
