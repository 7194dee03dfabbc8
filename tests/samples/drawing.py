"""What samples are made of: operands, cases, and what they may ask of Hypothesis."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16)
NUMBERS = (torch.float32, torch.bfloat16, torch.int64)
ALL = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


@dataclass(frozen=True)
class Operand:
    """One operand to make: its shape, dtype, and which values it takes ("any", "nonzero", "below:N", "numbers:N")."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: str = "any"
    gradient: bool = True


@dataclass(frozen=True)
class Case:
    """One call: operands and the function of them; `gradients` is False where torch has none."""

    operands: tuple[Operand, ...]
    run: Callable[..., Any]
    gradients: bool = True


Sample = Callable[["Draw"], Case]


def without_gradients(sample: Sample) -> Sample:
    return lambda d: dataclasses.replace(sample(d), gradients=False)


class Draw:
    """What a sample may ask of Hypothesis.

    It draws choices, not strategies: a case of an op takes twenty of them, and as strategies they would cost as much as
    the op and its oracle. Hypothesis shrinks and mutates choices.
    """

    def __init__(self, data: st.DataObject) -> None:
        self._choices = data.conjecture_data

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self._choices.draw_integer(0, len(values) - 1)]

    def yes(self) -> bool:
        return self._choices.draw_boolean()

    def number(self, low: int, high: int) -> int:
        return self._choices.draw_integer(low, high)

    def size(self, empty: bool = True) -> int:
        return 0 if empty and self.number(0, 24) == 0 else int(self.pick(SIZES))

    def shape(self, low: int = 0, high: int = 3, empty: bool = True) -> tuple[int, ...]:
        return tuple(self.size(empty) for _ in range(self.number(low, high)))

    def dim(self, shape: Sequence[int]) -> int:
        """A dim of a shape, negative or not."""
        return self.number(-len(shape), len(shape) - 1)

    def broadcast_to(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to another: leading dims left off, some sizes 1."""
        start = self.number(0, len(shape))
        return tuple(1 if self.number(0, 3) == 0 else size for size in shape[start:])

    def scalar(self) -> Any:
        return self.pick((0, 1, 2, -3, 0.5, -2.0, float("inf"), True))


INTEGRAL = (torch.int64, torch.bool)


class Seeded(Draw):
    """Draws that follow from a text alone, so that every rank draws the same."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self._random.randrange(len(values))]

    def yes(self) -> bool:
        return self._random.random() < 0.5

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)
