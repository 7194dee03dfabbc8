"""Plans as text: one line for each decision, and TOML. Both are read back with what is wrong in them by line or key."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshloom.errors import NotationError, closest
from meshloom.nn.tables import spell_axes

_TABLES = {"parameter": "parameters", "input": "inputs", "output": "outputs"}
_LISTS = {"unit": "units", "recompute": "recompute", "experts": "experts"}
_KEYS = ("batch", *_LISTS.values(), *_TABLES.values())
_EXAMPLE = "write lines such as 'parameter  **.q_proj.weight  tp=S(0)'"


def write_words(plan: Mapping[str, Any]) -> str:
    """The parts of a plan, one line for each decision; an empty plan says so."""
    lines: list[tuple[str, ...]] = [("batch", spell_axes(plan["batch"]))] if "batch" in plan else []
    width = max((len(pattern) for name in _TABLES.values() for pattern in plan.get(name, ())), default=0)
    for word, name in _TABLES.items():
        table = plan.get(name, {})
        lines += [(word, pattern.ljust(width), spell_axes(axes)) for pattern, axes in table.items()]
    lines += [(word, pattern) for word, name in _LISTS.items() for pattern in plan.get(name, ())]
    return "\n".join(f"{word:<9}  " + "  ".join(rest) for word, *rest in lines) or "batch      R"


def read_words(text: str) -> dict[str, Any]:
    """The parts of a plan from its printed lines."""
    found: dict[str, Any] = {name: {} for name in _TABLES.values()} | {name: [] for name in _LISTS.values()}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            _read_line(line.split(), f"line {number}: {line.strip()!r}", found)
    return found


def _read_line(words: list[str], where: str, found: dict[str, Any]) -> None:
    word, *rest = words
    if word == "batch" and "batch" not in found:
        found["batch"] = " ".join(rest)
    elif word in _LISTS and len(rest) == 1:
        found[_LISTS[word]].append(rest[0])
    elif word in _TABLES and len(rest) >= 2 and rest[0] not in found[_TABLES[word]]:
        found[_TABLES[word]][rest[0]] = " ".join(rest[1:])
    else:
        known = ("batch", *_TABLES, *_LISTS)
        raise NotationError(f"{where} cannot be read", fix=_EXAMPLE if word in known else closest(word, known))


def write_toml(plan: Mapping[str, Any]) -> str:
    """The parts of a plan as TOML."""
    parts = [f"batch = {_quote(spell_axes(plan['batch']))}"] if "batch" in plan else []
    parts += [f"{name} = [{', '.join(map(_quote, plan[name]))}]" for name in _LISTS.values() if name in plan]
    for name in _TABLES.values():
        if name in plan:
            parts += ["", f"[{name}]"]
            parts += [f"{_quote(pattern)} = {_quote(spell_axes(axes))}" for pattern, axes in plan[name].items()]
    return "\n".join(parts) + "\n"


_quote: Callable[[str], str] = json.dumps  # a text in JSON is a text in TOML


def read_toml(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The parts of a plan from a TOML text, or from a file; an error has the name of the file."""
    where, text = _text_of(source)
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        found: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise NotationError(f"{where} is not TOML: {error}", fix="write '[parameters]' and lines below it") from None
    for key, value in found.items():
        if key not in _KEYS:
            raise NotationError(f"{where} has a key {key!r} that plans do not have", fix=closest(key, _KEYS))
        wanted = dict if key in _TABLES.values() else list if key in _LISTS.values() else (str, dict)
        if not isinstance(value, wanted):
            raise NotationError(f"{where}: {key} = {value!r} cannot be read", fix=f"{key} is {_FORMS[key]}")
    return found


_FORMS = {
    "batch": 'a text: batch = "dp=S(0)"',
    **{name: f'a table: [{name}] and lines such as "**.weight" = "tp=S(0)"' for name in _TABLES.values()},
    **{name: f'a list of patterns: {name} = ["layers.*"]' for name in _LISTS.values()},
}


def _text_of(source: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or "=" in source):
        return "the text", source
    try:
        return os.fspath(source), Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise NotationError(
            f"{os.fspath(source)} cannot be read: {error.strerror}", fix="give the path of a TOML file, or its text"
        ) from None
    except UnicodeDecodeError:
        raise NotationError(f"{os.fspath(source)} is not UTF-8 text", fix="give the path of a TOML file") from None
