"""Two callables timed against each other: short rounds in turn, best of many.

The machine is never quite quiet. A pause hits one round, not the best of many, and because the rounds alternate, a slow
minute slows both sides. So the figure is the ratio of the two bests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat

Work = Callable[[], object]
Around = Callable[[], AbstractContextManager[object]]

# A round is long enough for the clock and short enough for a pause to miss it.
ROUND_SECONDS = 0.0005
MINIMUM_ROUNDS = 3
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


def duel(ours: Work, dense: Work, seconds: float, around: Around = nullcontext) -> Timing:
    """The best of both sides after `seconds` of alternating rounds; `around` is entered for ours, outside the clock."""
    with _quiet():
        loops = _calibrate(ours, around), _calibrate(dense, nullcontext)
        best = [float("inf"), float("inf")]
        rounds, end = 0, time.perf_counter() + seconds
        while rounds < MINIMUM_ROUNDS or time.perf_counter() < end:
            # who goes first alternates too: the second finds warmer caches
            for side in (0, 1) if rounds % 2 else (1, 0):
                work, context = ((ours, around), (dense, nullcontext))[side]
                best[side] = min(best[side], _round(work, context, loops[side]))
            rounds += 1
    return Timing(best[0], best[1], rounds)


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _calibrate(work: Work, around: Around) -> int:
    """How many calls fill a round; the calls made to find out also warm every cache."""
    once, end = _round(work, around, 1), time.perf_counter() + CALIBRATION_SECONDS
    for _ in range(CALIBRATION_CALLS):
        once = min(once, _round(work, around, 1))
        if time.perf_counter() > end:
            break
    return max(1, int(ROUND_SECONDS / once))


def _round(work: Work, around: Around, loops: int) -> float:
    with around():
        start = time.perf_counter()
        for _ in repeat(None, loops):
            work()
        return (time.perf_counter() - start) / loops
