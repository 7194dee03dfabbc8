"""Pipelines as data: which stage does what, in which order; proven, counted and timed without a device.

A `Turn` is the forward or the backward pass of one micro-batch on one stage. A schedule has a row of turns for every
stage, which the stage does in this order; what it needs of others it waits for. `gpipe` does all forward passes and
then all backward passes. `1f1b` begins a backward pass as soon as there is one, so that stage s of n keeps the
activations of at most n - s micro-batches, however many there are. Both take the same time.

`balance` cuts a row of weights into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshloom.errors import ArgumentError, ScheduleError, closest

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """One pass of one micro-batch on one stage; prints `F2` or `B2`."""

    stage: int
    batch: int
    phase: str

    def __str__(self) -> str:
        return f"{self.phase[0].upper()}{self.batch}"

    def needs(self, stages: int, has_backward: bool = True) -> tuple[Turn, ...]:
        """The turns of others, and the forward pass of a backward one, that come before it."""
        if self.phase == FORWARD:
            return (Turn(self.stage - 1, self.batch, FORWARD),) if self.stage else ()
        own = Turn(self.stage, self.batch, FORWARD)
        return (own, Turn(self.stage + 1, self.batch, BACKWARD)) if self.stage + 1 < stages else (own,)


@dataclass(frozen=True)
class PipelineSchedule:
    """The turns of every stage, in the order in which it does them.

    >>> print(schedule_of("1f1b", stages=2, batches=3))
    stage 0  F0 F1 B0 F2 B1 B2
    stage 1  F0 B0 F1 B1 F2 B2
    """

    name: str
    batches: int
    rows: tuple[tuple[Turn, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rows)

    def __str__(self) -> str:
        return "\n".join(f"stage {number}  {' '.join(map(str, row))}" for number, row in enumerate(self.rows))

    def alive(self, stage: int) -> int:
        """The most micro-batches whose activations a stage keeps at a time.

        >>> [schedule_of("1f1b", 4, 8).alive(stage) for stage in range(4)], schedule_of("gpipe", 4, 8).alive(0)
        ([4, 3, 2, 1], 8)
        """
        return max(accumulate(1 if turn.phase == FORWARD else -1 for turn in self.rows[stage]), default=0)

    def check(self) -> PipelineSchedule:
        """The schedule itself, proven: each pass once, nothing before what it needs, and nobody waits for ever."""
        for number, row in enumerate(self.rows):
            phases = {turn.phase for turn in row} | {FORWARD}
            wanted = {Turn(number, batch, phase) for batch in range(self.batches) for phase in phases}
            if set(row) != wanted or len(row) != len(wanted):
                raise ScheduleError(
                    f"stage {number} does not do each pass of {self.batches} micro-batches once",
                    row=" ".join(map(str, row)),
                )
        self.order(range(self.stages))
        return self

    def order(self, stages: Iterable[int]) -> tuple[Turn, ...]:
        """The turns of some stages in one order that fits all rows: as if every turn took the same time.

        >>> " ".join(f"{turn.stage}:{turn}" for turn in schedule_of("1f1b", 2, 2).order([0, 1]))
        '0:F0 0:F1 1:F0 1:B0 0:B0 1:F1 1:B1 0:B1'
        """
        kept = set(stages)
        return tuple(turn for turn, _, _ in self.play(lambda turn: 1.0) if turn.stage in kept)

    def play(self, seconds: Callable[[Turn], float], sending: float = 0.0) -> list[tuple[Turn, float, float]]:
        """Every turn with its start and its end, in the order of starting; between stages `sending` seconds pass."""
        done: dict[Turn, float] = {}
        free = [0.0] * self.stages
        places = [0] * self.stages
        found: list[tuple[Turn, float, float]] = []
        total = sum(map(len, self.rows))
        while len(found) < total:
            ready = list(self._ready(done, free, places, sending))
            if not ready:
                waiting = [
                    f"stage {s} at {row[i]}"
                    for s, (i, row) in enumerate(zip(places, self.rows, strict=True))
                    if i < len(row)
                ]
                raise ScheduleError("every stage waits for another", waiting="\n".join(waiting))
            start, turn = min(ready)
            end = start + seconds(turn)
            done[turn], free[turn.stage] = end, end
            places[turn.stage] += 1
            found.append((turn, start, end))
        return found

    def _ready(
        self, done: Mapping[Turn, float], free: Sequence[float], places: Sequence[int], sending: float
    ) -> Iterator[tuple[float, Turn]]:
        """The next turn of each stage, if all that it needs is done, and when it can start."""
        for stage, row in enumerate(self.rows):
            turn = row[places[stage]] if places[stage] < len(row) else None
            needs = turn.needs(self.stages) if turn is not None else ()
            if turn is not None and all(each in done for each in needs):
                arrivals = (done[each] + sending * (each.stage != stage) for each in needs)
                yield max([free[stage], *arrivals]), turn

    def bubble(self, forward: float = 1.0, backward: float = 2.0, sending: float = 0.0) -> float:
        """The part of the time in which stages do nothing, if all passes of a phase take the same time.

        >>> schedule_of("1f1b", 4, 8).bubble() == 3 / 11
        True
        """
        played = self.play(lambda turn: forward if turn.phase == FORWARD else backward, sending)
        time = max((end for _, _, end in played), default=0.0)
        busy = sum(end - start for _, start, end in played)
        return 1.0 - busy / (time * self.stages) if time else 0.0

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in one order."""
        return self.order(range(self.stages))


def _gpipe(stage: int, stages: int, batches: int) -> list[Turn]:
    return [Turn(stage, batch, phase) for phase in (FORWARD, BACKWARD) for batch in range(batches)]


def _one_forward_one_backward(stage: int, stages: int, batches: int) -> list[Turn]:
    """As many forward passes as there are stages behind this one; then one of each in turn; then what is left."""
    first = min(stages - 1 - stage, batches)
    row = [Turn(stage, batch, FORWARD) for batch in range(first)]
    for batch in range(batches - first):
        row += [Turn(stage, first + batch, FORWARD), Turn(stage, batch, BACKWARD)]
    return row + [Turn(stage, batch, BACKWARD) for batch in range(batches - first, batches)]


def _forward_only(stage: int, stages: int, batches: int) -> list[Turn]:
    return [Turn(stage, batch, FORWARD) for batch in range(batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Turn]]] = {  # the row of a stage
    "1f1b": _one_forward_one_backward,
    "gpipe": _gpipe,
}


def schedule_of(name: str, stages: int, batches: int) -> PipelineSchedule:
    """The schedule of a name for so many stages and micro-batches."""
    if name not in SCHEDULES:
        raise ArgumentError(f"schedule={name!r} is not known", fix=closest(name, SCHEDULES))
    return _make(name, SCHEDULES[name], stages, batches)


def forward_schedule(stages: int, batches: int) -> PipelineSchedule:
    """Forward passes alone.

    >>> print(forward_schedule(2, 2))
    stage 0  F0 F1
    stage 1  F0 F1
    """
    return _make("forward", _forward_only, stages, batches)


def _make(name: str, row: Callable[[int, int, int], list[Turn]], stages: int, batches: int) -> PipelineSchedule:
    return PipelineSchedule(name, batches, tuple(tuple(row(stage, stages, batches)) for stage in range(stages)))


def balance(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where the stages after the first begin, so that the heaviest is as light as can be.

    >>> balance([4, 1, 1, 1, 1, 4], 3)
    (1, 5)
    """
    if not 1 <= stages <= len(weights):
        raise ArgumentError(f"{len(weights)} parts cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(weights)]
    best = {(1, end): (sums[end], 0) for end in range(1, len(sums))}  # heaviest stage, and where the last one begins
    for count in range(2, stages + 1):
        for end in range(count, len(sums)):
            best[count, end] = min(
                (max(best[count - 1, start][0], sums[end] - sums[start]), start) for start in range(count - 1, end)
            )
    cuts, end = [], len(weights)
    for count in range(stages, 1, -1):
        end = best[count, end][1]
        cuts.append(end)
    return tuple(reversed(cuts))
