"""Callables timed against each other: short rounds in turn, best of many.

The machine is never quite quiet. A pause hits one round, not the best of many, and because the rounds alternate, a slow
minute slows all sides. So the figure is the ratio of two bests, and a best counts when other rounds came close to it:
where the machine was so busy that a side was never left alone twice, the rounds go on.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat

Work = Callable[[], object]
Around = Callable[[], AbstractContextManager[object]]

# A round is long enough for the clock and short enough for a pause to miss it.
ROUND_SECONDS = 0.0005
MINIMUM_ROUNDS = 3
# A best that so many rounds come so close to was not disturbed; the search for one takes so many times as long at most.
CLOSE, CLOSE_ROUNDS, LONGEST = 1.03, 3, 5
CALIBRATION_SECONDS = 0.05
CALIBRATION_CALLS = 50


@dataclass(frozen=True, slots=True)
class Timing:
    """The best seconds per call of both sides.

    >>> Timing(0.0003, 0.0002, 50).ratio
    1.5
    """

    ours: float
    dense: float
    rounds: int

    @property
    def ratio(self) -> float:
        """How many times the dense work ours costs."""
        return round(self.ours / self.dense, 4)

    @property
    def extra_us(self) -> float:
        """What ours costs on top, in microseconds."""
        return round((self.ours - self.dense) * 1e6, 3)


@dataclass(frozen=True, slots=True)
class Side:
    """A work to be timed; `around` is entered for each of its rounds, outside the clock."""

    work: Work
    around: Around = nullcontext


def duel(ours: Work, dense: Work, seconds: float, within: float = math.inf) -> Timing:
    """The best of both sides after `seconds` of alternating rounds; see `contest`."""
    best, rounds = contest((Side(ours), Side(dense)), seconds, within)
    return Timing(*best, rounds)


def contest(sides: Sequence[Side], seconds: float, within: float = math.inf) -> tuple[list[float], int]:
    """The best seconds per call of every side after `seconds` of rounds in turn, and the number of rounds.

    A best counts when others came within that many seconds of it, and within 3 % of it in any case.
    """
    with _quiet():
        loops = [_calibrate(side) for side in sides]
        lowest: list[list[float]] = [[] for _ in sides]  # of each side the quickest rounds, in order
        rounds, start = 0, time.perf_counter()
        while rounds < MINIMUM_ROUNDS or _goes_on(lowest, time.perf_counter() - start, seconds, within):
            for turn in range(len(sides)):
                number = (turn + rounds) % len(sides)  # who goes first changes too: those after find warmer caches
                lowest[number] = sorted([*lowest[number], _round(sides[number], loops[number])])[:CLOSE_ROUNDS]
            rounds += 1
    return [each[0] for each in lowest], rounds


def _goes_on(lowest: Sequence[Sequence[float]], spent: float, seconds: float, within: float = math.inf) -> bool:
    """Whether there is time left, or a best that no other round came close to and more time to look for one."""
    is_settled = all(each[-1] - each[0] <= min(within, (CLOSE - 1) * each[0]) for each in lowest)
    return spent < seconds * (1 if is_settled else LONGEST)


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _calibrate(side: Side) -> int:
    """How many calls fill a round; the calls made to find out also warm every cache."""
    once, end = _round(side, 1), time.perf_counter() + CALIBRATION_SECONDS
    for _ in range(CALIBRATION_CALLS):
        once = min(once, _round(side, 1))
        if time.perf_counter() > end:
            break
    return max(1, int(ROUND_SECONDS / once))


def _round(side: Side, loops: int) -> float:
    work = side.work
    with side.around():
        work()  # the side before has just filled the caches of the machine; in a program, a step follows its like
        start = time.perf_counter()
        for _ in repeat(None, loops):
            work()
        return (time.perf_counter() - start) / loops
