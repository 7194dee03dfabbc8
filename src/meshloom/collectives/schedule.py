"""A collective as data: steps of sends between coordinates.

A value of `size` elements is cut into `chunks` pieces. A device's memory during a collective is one slot per chunk. A
send takes what the source holds in its slot of a chunk and, at the destination, either replaces that slot or is
combined with it (`reduce`). All sends of one step happen at once: they read what was there before the step. Several
reduces may meet in one slot in one step; they are combined in the order in which the step lists them. Nothing else may
be written twice in one step. A link carries one send per step and direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshloom.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Send:
    """One message: a chunk (and `also` others) from a source to a destination, replacing or combining what is there.

    >>> print(Send((0,), (1,), 2, reduce=True)); print(Send((0,), (1,), 2, also=(3, 5)))
    (0,) +> (1,) chunk 2
    (0,) -> (1,) chunks 2, 3, 5
    """

    source: Coordinate
    destination: Coordinate
    chunk: int
    reduce: bool = False
    also: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, ...]:
        """Every chunk of the message."""
        return (self.chunk, *self.also)

    def __str__(self) -> str:
        what = f"chunks {', '.join(map(str, self.chunks))}" if self.also else f"chunk {self.chunk}"
        return f"{self.source} {'+' if self.reduce else '-'}> {self.destination} {what}"


Step = tuple[Send, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective over a group of coordinates, as steps of sends.

    `collective` is its name, `group` the coordinates in the order in which results are numbered, `chunks` the number of
    pieces, `root` the position in the group of the member that a rooted collective starts from or ends at. `owners`
    has, for each chunk, the position of the member that brings it in (all_gather, gather) or takes it home
    (reduce_scatter, scatter, all_to_all: chunk i*p+j goes from i to j); it is empty where chunks have no owner. An
    owner may have several chunks: in their order they are the pieces of what it brings in or takes home.
    """

    collective: str
    algorithm: str
    group: tuple[Coordinate, ...]
    chunks: int
    steps: tuple[Step, ...]
    owners: tuple[int, ...] = ()
    root: int = 0

    @property
    def sends(self) -> int:
        """How many messages there are."""
        return sum(len(step) for step in self.steps)

    def __hash__(self) -> int:
        """Without the sends, of which there may be millions: schedules are looked up at every collective."""
        return hash((self.collective, self.algorithm, self.group, self.chunks, len(self.steps), self.root))

    def __str__(self) -> str:
        size = f"{len(self.steps)} steps, {self.sends} sends, {self.chunks} chunks"
        return f"{self.collective} by {self.algorithm} over {len(self.group)}: {size}"


def chunk_sizes(size: int, chunks: int) -> tuple[int, ...]:
    """How `size` elements are cut: every chunk as large as the first, as far as they reach.

    >>> chunk_sizes(10, 4), chunk_sizes(2, 4)
    ((3, 3, 3, 1), (1, 1, 0, 0))
    """
    each = -(-size // chunks)
    return tuple(max(0, min(each, size - i * each)) for i in range(chunks))


def waves(step: Iterable[Send]) -> Iterator[Step]:
    """A step in parts that write no slot twice, for an executor that writes many slots at once.

    Every part still reads what was there before the step.

    >>> [len(wave) for wave in waves((Send((0,), (2,), 0, True), Send((1,), (2,), 0, True)))]
    [1, 1]
    """
    parts: list[list[Send]] = []
    written: dict[tuple[Coordinate, int], int] = {}
    for send in step:
        slots = [(send.destination, chunk) for chunk in send.chunks]
        turn = max(written.get(slot, 0) for slot in slots)
        written.update((slot, turn + 1) for slot in slots)
        parts.extend([] for _ in range(turn + 1 - len(parts)))
        parts[turn].append(send)
    return (tuple(part) for part in parts)
