"""A preset from a TOML text; what is wrong with it is said with file, line and key."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

from meshloom.errors import FabricError, closest
from meshloom.fabric.axis import KINDS
from meshloom.fabric.fabric import Pair
from meshloom.fabric.links import Link
from meshloom.mesh import Coordinate
from meshloom.types import BLOCK_FORMATS, LONG_NAME

_T = TypeVar("_T")
# What an efficiency of links can be given for: an axis of a kind, messages that are combined, or these on that axis.
PATTERNS = ("combine", *KINDS, *(f"{kind}.combine" for kind in KINDS))
_HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"']+)\s*=")


class Document:
    """Values by dotted key, each taken once; what is missing, wrong or left over is refused with its line."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._values = dict(_flat(_parse(text, file)))
        self._lines = _lines(text)

    def take(self, key: str, read: Callable[[object], _T], default: _T | None = None) -> _T:
        """The value of a key as `read` gives it; `read` raises ValueError with what it wants instead."""
        if key not in self._values:
            if default is not None:
                return default
            raise self.refusal(key, "is missing", fix=f"give {key}")
        value = self._values.pop(key)
        try:
            return read(value)
        except ValueError as error:
            raise self.refusal(key, f"is {value!r}", fix=f"give {error}") from None

    def has(self, key: str) -> bool:
        """Whether a key was given."""
        return key in self._values

    def section(self, prefix: str, read: Callable[[object], _T], optional: bool = False) -> dict[str, _T]:
        """All values under a key, by the rest of their key."""
        keys = [key for key in self._values if key.startswith(f"{prefix}.")]
        if not keys and not optional:
            raise self.refusal(prefix, "is missing", fix=f"give {prefix}")
        return {key.removeprefix(f"{prefix}."): self.take(key, read) for key in keys}

    def finish(self, known: tuple[str, ...]) -> None:
        """Refuse keys that nothing took."""
        for key in self._values:
            raise self.refusal(key, "is not a key of a preset", fix=closest(key, known))

    def refusal(self, key: str, what: str, fix: str) -> FabricError:
        """An error that begins with file, line and key; the line of a missing key is that of its table."""
        found = self._line(key)
        return FabricError(f"{self.file}{f', line {found}' if found else ''}: {key} {what}", fix=fix)

    def _line(self, key: str) -> int | None:
        while key not in self._lines and "." in key:
            key = key.rpartition(".")[0]
        return self._lines.get(key)


def _parse(text: str, file: str) -> dict[str, object]:
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise FabricError(
            f"{file} is not TOML: {error}", fix="write `key = value` lines under `[table]` headings"
        ) from None
    return values


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines(text: str) -> dict[str, int]:
    """The line on which each dotted key, and each table, first stands."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _bare(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault(f"{table}.{_bare(key[1])}".lstrip("."), number)
    return found


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def text(value: object) -> str:
    """A text, or ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def number(value: object) -> float:
    """A number above 0, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("a number above 0")
    return float(value)


def seconds(value: object) -> float:
    """A number from 0 on, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("0 or a number above it")
    return float(value)


def share(value: object) -> float:
    """A number above 0 and up to 1, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError("a number above 0 and up to 1")
    return float(value)


def whole(value: object) -> int:
    """A whole number of at least 1, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def kind(value: object) -> str:
    """A kind of axis, or ValueError."""
    if value not in KINDS:
        raise ValueError(f"one of {', '.join(KINDS)}")
    return str(value)


def sizes(value: object) -> tuple[int, ...]:
    """A shape, or ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError("a list of whole numbers, such as [2, 4]")
    return tuple(whole(each) for each in value)


def per_axis(read: Callable[[object], _T], axes: int) -> Callable[[object], tuple[_T, ...]]:
    """A reader of one value for all axes, or of a list with one for each."""

    def read_all(value: object) -> tuple[_T, ...]:
        values = value if isinstance(value, list) else [value] * axes
        if len(values) != axes:
            raise ValueError(f"one value, or a list of {axes}: one per axis")
        return tuple(read(each) for each in values)

    return read_all


def pairs(axes: int) -> Callable[[Any], tuple[Pair, ...]]:
    """A reader of a list of pairs of coordinates."""

    def read(value: object) -> tuple[Pair, ...]:
        if not isinstance(value, list):
            raise ValueError("a list of pairs of coordinates")
        return tuple(_pair(each, axes) for each in value)

    return read


def joins(axes: int) -> Callable[[object], tuple[Pair | Link, ...]]:
    """A reader of a list of pairs, or of directed links with figures of their own."""

    def read(value: object) -> tuple[Pair | Link, ...]:
        if not isinstance(value, list):
            raise ValueError("a list of pairs of coordinates, or of tables with from, to, latency and bandwidth")
        return tuple(_link(each, axes) if isinstance(each, dict) else _pair(each, axes) for each in value)

    return read


def _link(value: dict[str, object], axes: int) -> Link:
    if value.keys() != {"from", "to", "latency", "bandwidth"}:
        raise ValueError("tables with from, to, latency and bandwidth")
    source, destination = _pair([value["from"], value["to"]], axes)
    return Link(source, destination, number(value["latency"]), number(value["bandwidth"]))


def _pair(value: object, axes: int) -> Pair:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"pairs of coordinates, such as [{[0] * axes}, {[1] * axes}]")
    return _coordinate(value[0], axes), _coordinate(value[1], axes)


def _coordinate(value: object, axes: int) -> Coordinate:
    if not isinstance(value, list) or len(value) != axes or any(type(at) is not int or at < 0 for at in value):
        raise ValueError(f"coordinates of {axes} whole numbers from 0")
    return tuple(value)


def patterns(document: Document, prefix: str) -> tuple[tuple[str, float], ...]:
    """The part of the bandwidth that is reached, by pattern: a kind of axis, `combine`, or both as `line.combine`."""
    shares = document.section(prefix, share, optional=True)
    for name in shares:
        if name not in PATTERNS:
            raise document.refusal(f"{prefix}.{name}", "is not a pattern", fix=closest(name, PATTERNS))
    return tuple(shares.items())


def flops(document: Document, prefix: str) -> tuple[tuple[str, float], ...]:
    """FLOP/s by the short name of a dtype, or the name of a format that only devices have."""
    known = (*LONG_NAME, *BLOCK_FORMATS)
    figures = document.section(prefix, number)
    for name in figures:
        if name not in known:
            raise document.refusal(f"{prefix}.{name}", "is not a dtype", fix=closest(name, known))
    return tuple(figures.items())
