"""Patterns of dotted names, as plans use them: globs whose parts are the parts of a name.

`*` stands for anything inside of one part, `**` for any number of parts (none included), `?` for one character, and
`{q,k,v}` for one of several words. A pattern fits a whole name, never a piece of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from meshloom.errors import NotationError, closest, expect

_TOKEN = re.compile(r"\*\*\.|\.\*\*$|\*\*|[*?{},]|[^*?{},]+?(?=\.\*\*$|[*?{},]|$)")
_MEANING = {"**.": r"(?:[^.]+\.)*", ".**": r"(?:\.[^.]+)*", "**": ".*", "*": "[^.]*", "?": "[^.]", "{": "(?:", "}": ")"}


def fits(pattern: str, name: str) -> bool:
    """Whether a name is one that a pattern stands for.

    >>> fits("layers.*.{q,k,v}_proj.weight", "layers.0.k_proj.weight"), fits("layers.*.weight", "layers.0.norm.weight")
    (True, False)
    >>> fits("**.bias", "bias"), fits("**.bias", "layers.0.norm.bias")
    (True, True)
    """
    return _compiled(pattern).fullmatch(name) is not None


def check_pattern(pattern: object) -> str:
    """The pattern, or an error that says what is wrong with it."""
    expect("pattern", pattern, str, fix="give a name with stars, such as '**.q_proj.weight'")
    assert isinstance(pattern, str)
    if not pattern or any(character.isspace() for character in pattern):
        raise NotationError(f"{pattern!r} is not a pattern of names", fix="write a name with stars: '**.q_proj.weight'")
    _compiled(pattern)
    return pattern


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    depth, parts = 0, []
    for token in _TOKEN.findall(pattern):
        depth += (token == "{") - (token == "}")
        if not 0 <= depth <= 1:
            break
        parts.append("|" if token == "," and depth else _MEANING.get(token) or re.escape(token))
    if depth:
        raise NotationError(f"{pattern!r} has a brace that is not closed", fix="write words in braces: '{q,k,v}_proj'")
    return re.compile("".join(parts))


def generalise(name: str) -> str:
    """A name with stars for its numbers.

    >>> generalise("layers.11.fc1.weight")
    'layers.*.fc1.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fold(names: Iterable[str]) -> str:
    """Names that differ in numbers only as one, with their count.

    >>> fold(["layers.0.weight", "layers.1.weight", "head.weight"])
    'layers.*.weight x2, head.weight'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(generalise(name), []).append(name)
    return ", ".join(alike[0] if len(alike) == 1 else f"{general} x{len(alike)}" for general, alike in groups.items())


def near(pattern: str, names: Iterable[str]) -> str:
    """The known names that look most like a pattern, for an error."""
    return closest(pattern.replace("**.", ""), dict.fromkeys(generalise(name) for name in names))
