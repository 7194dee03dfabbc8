"""A collective as data: steps of sends between coordinates.

A value of `size` elements is cut into `chunks` pieces. A device's memory during a collective is one slot per chunk. A
send takes what the source holds in its slot of a chunk and, at the destination, either replaces that slot or is combined
with it (`reduce`). All sends of one step happen at once: they read what was there before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Send:
    """One message: a chunk from a source to a destination, replacing or combining what is there."""

    source: Coordinate
    destination: Coordinate
    chunk: int
    reduce: bool = False

    def __str__(self) -> str:
        return f"{self.source} {'+' if self.reduce else '-'}> {self.destination} chunk {self.chunk}"


Step = tuple[Send, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective over a group of coordinates, as steps of sends.

    `collective` is its name, `group` the coordinates in the order in which results are numbered, `chunks` the number of
    pieces, `owner` (for each chunk) the position in the group of the member that brings it in or takes it home, where
    the collective has one (all_gather, reduce_scatter, gather, scatter, all_to_all: chunk i*p+j goes from i to j).
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
