"""Memory of a trace's intermediate results, used again: what nobody outside holds lives from the call that makes it to
the last that uses it, and then its bytes go to a later one. A replay so touches as little memory as running does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.engines.private import neg_view, tree_map_only
from meshloom.runtime.recorder import Step, memory_of


@dataclass(frozen=True, slots=True)
class Spot:
    """An array by where it lies: which memory, and how it is seen there, maybe as conjugates or with the other sign."""

    memory: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class Reuse:
    """Takes the arrays out of steps, sees which memory somebody outside still holds, and puts arrays in again."""

    def __init__(self, steps: Sequence[object], made: dict[int, weakref.ref[object]]) -> None:
        self._steps = [(number, step) for number, step in enumerate(steps) if isinstance(step, Step)]
        self._made = made
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def take_out(self) -> None:
        """Replace arrays by spots, so that whatever is still alive afterwards is held by somebody else."""
        for number, step in self._steps:

            def spot(array: torch.Tensor, number: int = number) -> Any:
                memory = memory_of(array)
                if memory not in self._made:
                    return array
                self._first.setdefault(memory, number)
                self._last[memory] = number
                place = (array.dtype, int(array.storage_offset()), tuple(array.shape), array.stride())
                return Spot(memory, *place, array.is_conj(), array.is_neg())

            step.args = tree_map_only(torch.Tensor, spot, step.args)
            step.kwargs = tree_map_only(torch.Tensor, spot, step.kwargs)
            step.results = tree_map_only(torch.Tensor, spot, step.results)

    def put_in(self, sizes: dict[int, int]) -> None:
        """Replace spots by arrays: in the memory that is held outside, or in memory that is used again."""
        rooms: dict[int, Any] = {memory: self._made[memory]() for memory in self._first}
        inner = [memory for memory, found in rooms.items() if found is None]
        rooms.update(shared_rooms([(self._first[m], self._last[m], sizes[m], m) for m in inner]))

        def array(spot: Spot) -> torch.Tensor:
            made = torch.empty(0, dtype=spot.dtype).set_(rooms[spot.memory], spot.offset, spot.size, spot.stride)
            made = made.conj() if spot.is_conj else made
            seen: torch.Tensor = neg_view(made) if spot.is_neg else made
            return seen

        for _, step in self._steps:
            step.args = tree_map_only(Spot, array, step.args)
            step.kwargs = tree_map_only(Spot, array, step.kwargs)
            step.results = tree_map_only(Spot, array, step.results)


def shared_rooms(lives: Sequence[tuple[int, int, int, int]]) -> dict[int, Any]:
    """Memory for values that live from a first step to a last one: those that are never alive together may share it.

    >>> rooms = shared_rooms([(0, 1, 64, 10), (1, 2, 64, 11), (2, 3, 64, 12)])
    >>> rooms[10] is rooms[12], rooms[10] is rooms[11]
    (True, False)
    """
    free: list[Any] = []
    busy: list[tuple[int, Any]] = []
    found: dict[int, Any] = {}
    for first, last, size, name in sorted(lives):
        free += [room for end, room in busy if end < first]
        busy = [(end, room) for end, room in busy if end >= first]
        fitting = [room for room in free if size <= room.nbytes() <= 2 * size]
        room = min(fitting, key=lambda each: each.nbytes()) if fitting else torch.UntypedStorage(size)
        free = [each for each in free if each is not room]
        busy.append((last, room))
        found[name] = room
    return found
