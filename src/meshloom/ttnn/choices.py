"""What an argument may be, by name: an enum that prints as TTNN's do."""

from __future__ import annotations

import enum


class Choice(enum.Enum):
    """One of several, printed with its name alone: `Layout.TILE`."""

    __repr__ = enum.Enum.__str__
