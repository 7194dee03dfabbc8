"""What several ranks say, as one text: a line that all of them say is shown once. Pure: time is an argument.

`Lines` cuts one rank's bytes into lines; `Merger` brings the lines of all ranks together. A line is held until every
rank has said it, has gone past it or has ended, or until `wait` seconds are over; lines of a rank keep their order.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from meshloom.types import spell_numbers

WAIT = 0.5  # seconds that a line waits for the other ranks, and half a line for its end
LIMIT = 10_000  # lines that are held at most


Place = tuple[int, int]  # how many lines before it, and which was heard first


@dataclass(slots=True)
class Said:
    """A line, the ranks that said it, when the first of them did, and its place among the others."""

    line: str
    ranks: set[int]
    since: float
    place: Place


class Merger:
    """Lines of several ranks in one order: a line has its place by how many a rank has said before it.

    >>> merger = Merger([0, 1])
    >>> for rank, line in [(0, "start"), (1, "start"), (0, "mine"), (0, "end"), (1, "and mine"), (1, "end")]:
    ...     for said in merger.say(rank, line, now=0.0):
    ...         print(sorted(said.ranks), said.line)
    [0, 1] start
    [0] mine
    [1] and mine
    [0, 1] end
    """

    def __init__(self, ranks: Iterable[int], wait: float = WAIT) -> None:
        self._wait = wait
        self._held: list[Said] = []  # by place
        self._by_line: dict[str, list[Said]] = {}  # by place too
        self._at: dict[int, Place] = dict.fromkeys(ranks, (0, -1))  # the last line of every rank that still runs
        self._heard = count()

    def say(self, rank: int, line: str, now: float) -> list[Said]:
        """A rank says a line: what can be shown now."""
        same = self._by_line.setdefault(line, [])
        later = bisect_right(same, self._at[rank], key=_place)
        if later == len(same):
            same.append(self._new(line, (self._at[rank][0] + 1, next(self._heard)), now))
        same[later].ranks.add(rank)
        self._at[rank] = same[later].place
        return list(self._ready(now))

    def _new(self, line: str, place: Place, now: float) -> Said:
        """A line at its place; it may not make those behind it wait longer."""
        index = bisect_right(self._held, place, key=_place)
        since = self._held[index].since if index < len(self._held) else now
        self._held.insert(index, said := Said(line, set(), since, place))
        return said

    def leave(self, rank: int, now: float) -> list[Said]:
        """A rank has ended and says no more."""
        self._at.pop(rank, None)
        return list(self._ready(now))

    def tick(self, now: float) -> list[Said]:
        """What has waited long enough."""
        return list(self._ready(now))

    @property
    def due(self) -> float | None:
        """When the line at the head has waited long enough."""
        return self._held[0].since + self._wait if self._held else None

    def _ready(self, now: float) -> Iterator[Said]:
        while self._held:
            head = self._held[0]
            passed = all(at > head.place or rank in head.ranks for rank, at in self._at.items())
            if not passed and now < head.since + self._wait and len(self._held) <= LIMIT:
                return
            self._take()
            yield head

    def _take(self) -> None:
        head = self._held.pop(0)
        same = self._by_line[head.line]
        same.pop(0)
        if not same:
            del self._by_line[head.line]


def _place(said: Said) -> Place:
    return said.place


class Lines:
    """One rank's bytes as lines; half a line that waits too long, or is the last, is a line.

    >>> lines = Lines()
    >>> lines.feed(b"one\\nt", now=0.0), lines.feed(b"wo\\n", now=0.1)
    (['one'], ['two'])
    """

    def __init__(self, wait: float = WAIT) -> None:
        self._wait = wait
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._since = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that these bytes complete."""
        waited = bool(self._rest)
        *whole, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if whole or not waited:
            self._since = now
        return [_visible_text(line) for line in whole]

    def tick(self, now: float) -> list[str]:
        """Half a line that has waited long enough."""
        return self._cut() if self._rest and now >= self._since + self._wait else []

    def end(self) -> list[str]:
        """What is left at the end."""
        self._rest += self._decoder.decode(b"", final=True)
        return self._cut() if self._rest else []

    @property
    def due(self) -> float | None:
        """When half a line has waited long enough."""
        return self._since + self._wait if self._rest else None

    def _cut(self) -> list[str]:
        rest, self._rest = self._rest, ""
        return [_visible_text(rest)]


def _visible_text(line: str) -> str:
    """What a terminal leaves of a line: a progress bar goes back with \\r and writes over itself."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def tag(ranks: Iterable[int], world: int) -> str:
    """Who said it, in brackets.

    >>> tag([1], 4), tag([0, 1, 3], 4), tag(range(4), 4)
    ('[rank 1]', '[ranks 0-1,3]', '[all 4]')
    """
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"[rank {numbers[0]}]"
    return f"[all {world}]" if len(numbers) == world else f"[ranks {spell_numbers(numbers)}]"
