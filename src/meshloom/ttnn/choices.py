"""Words and numbers that print as TTNN's do: the base of its enums, and of its ids."""

from __future__ import annotations

import enum

from meshloom.errors import ArgumentError


class Choice(enum.Enum):
    """One of several, printed with its name alone: `Layout.TILE`."""

    __repr__ = enum.Enum.__str__
    __hash__ = object.__hash__  # each is one object; an Enum's own goes by its name, and takes a Python call


def spell_choice(choice: enum.Enum) -> str:
    """A choice as it stands inside longer texts of the original: `Layout::TILE`."""
    return str(choice).replace(".", "::")


class Number(int):
    """A number with a name, from 0 on.

    >>> Number(1), str(Number(1)), Number(1) == 1
    (Number(1), '1', True)
    """

    def __init__(self, number: int = 0) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ArgumentError(f"{type(self).__name__} takes a number from 0 on, not {number!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self)})"

    __str__ = int.__repr__
