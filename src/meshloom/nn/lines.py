"""The lines of a plan in few words: names that differ in numbers or in one word become one pattern."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.nn.patterns import fits
from meshloom.placement import Placement

Lines = dict[str, dict[str, Placement]]


def brief(lines: Mapping[str, dict[str, Placement]], known: Mapping[str, object]) -> Lines:
    """Lines with stars for numbers and braces for words, wherever they still say the same of every known name.

    >>> from meshloom import Shard
    >>> lines = {f"layers.{i}.{word}.weight": {"tp": Shard(0)} for i in range(2) for word in ("q", "k")}
    >>> list(brief(lines, {**lines, "layers.0.norm.weight": {}}))
    ['layers.*.{q,k}.weight']
    """
    starred: Lines = {}
    agreed: dict[str, object] = {}
    for name, axes in lines.items():
        for form in _forms(name):
            if form not in agreed:
                agreed[form] = _shared([known[each] for each in known if fits(form, each)])
        starred[next((form for form in _forms(name) if agreed[form] == axes), name)] = axes
    return _braced(starred)


def _shared(values: list[object]) -> object:
    """The value that all are, or None."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _forms(name: str) -> Iterator[str]:
    """A name with stars for its numbers: for all, then for all but the last, and so on."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers), 0, -1):
        yield ".".join("*" if place in numbers[:count] else part for place, part in enumerate(parts))


def _braced(lines: Lines) -> Lines:
    """Lines that differ in one word only as one: `*.{q_proj,k_proj}.weight`."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for pattern, axes in lines.items():
        *head, word, last = ("", *pattern.split("."))
        own = None if len(head) > 1 else word  # at the top, words have little to do with each other
        groups.setdefault((*head, own, last, tuple(axes.items())), []).append(word)
    found: Lines = {}
    for (*parts, _, last, axes), words in groups.items():
        word = words[0] if len(words) == 1 else "{" + ",".join(words) + "}"
        found[".".join(part for part in (*parts, word, last) if part)] = dict(axes)
    return found
