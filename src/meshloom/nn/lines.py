"""The lines of a plan in few words: names that differ in numbers or in one word become one pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshloom.nn.patterns import fits, generalise
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
    for name, axes in lines.items():
        general = generalise(name)
        alike = all(where == axes for each, where in known.items() if fits(general, each))
        starred[general if alike else name] = axes
    return _braced(starred)


def _braced(lines: Lines) -> Lines:
    """Lines that differ in one word only as one: `*.{q_proj,k_proj}.weight`."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for pattern, axes in lines.items():
        *head, word, last = ("", *pattern.split("."))
        groups.setdefault((*head, None, last, tuple(axes.items())), []).append(word)
    found: Lines = {}
    for (*parts, _, last, axes), words in groups.items():
        word = words[0] if len(words) == 1 else "{" + ",".join(words) + "}"
        found[".".join(part for part in (*parts, word, last) if part)] = dict(axes)
    return found
