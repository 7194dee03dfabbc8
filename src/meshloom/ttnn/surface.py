"""Where the public names come from: the `__all__` of every module of the room, and the table of ops by dotted name.

Ops with dots are found in namespaces (`ttnn.transformer.concatenate_heads`). Some modules are namespaces of their own
and their names stay inside (`ttnn.distributed.matmul` is not `ttnn.matmul`). Modules of the original that only hold
names which are also at the top (`ttnn.types`, `ttnn._ttnn.multi_device`) are answered from the top.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module, resources
from types import ModuleType
from typing import Any

from meshloom.errors import UncoveredError, UnsupportedError, closest

PACKAGE = "meshloom.ttnn"
APART = frozenset(  # their names stay inside
    "distributed dot_access graph models model_preprocessing pipeline preprocessing tracer".split()
)
MIRRORS = frozenset("_ttnn core types cluster operations".split())  # hold names of the top in the original
ABSENT = object()  # what a name means that nobody knows


@cache
def flat() -> dict[str, Any]:
    """Every name of the top that is no op: what the modules of the room list."""
    found: dict[str, Any] = {}
    for module in _modules(PACKAGE):
        for name in getattr(module, "__all__", ()):
            found[name] = getattr(module, name)
    return found


def _modules(package: str) -> Iterable[ModuleType]:
    for info in pkgutil.iter_modules(import_module(package).__path__):
        if info.name not in APART:
            yield import_module(f"{package}.{info.name}")
            if info.ispkg:
                yield from _modules(f"{package}.{info.name}")


def table() -> dict[str, Any]:
    """Every op by its dotted name."""
    flat()  # ops are in the table once their modules are loaded
    found: dict[str, Any] = import_module(f"{PACKAGE}.ops.calling").TABLE
    return found


def find(name: str, inside: str = "") -> Any:
    """What a name means, at the top or inside a namespace; an error that knows what the original has."""
    found = look(name, inside)
    if found is ABSENT:
        raise _unknown(f"{inside}.{name}" if inside else name)
    return found


def look(name: str, inside: str = "") -> Any:
    """What a name means, or ABSENT: the error would look for the nearest among all names."""
    path = f"{inside}.{name}" if inside else name
    ops, head = table(), path.partition(".")[0]
    if path in ops:
        return import_module(f"{PACKAGE}.ops.calling").describe(ops[path])
    if head in MIRRORS:
        return flat()[name] if name in flat() else Namespace(path)
    if not inside and name in flat():
        return flat()[name]
    return Namespace(path) if any(each.startswith(f"{path}.") for each in ops) else ABSENT


def names(inside: str = "") -> list[str]:
    """The names at the top, or inside a namespace."""
    start = f"{inside}." if inside else ""
    here = {each[len(start) :].partition(".")[0] for each in table() if each.startswith(start)}
    return sorted(here if inside else here | set(flat()) | MIRRORS | APART)


@cache
def originals() -> frozenset[str]:
    """The names that the original has, without the leading `ttnn.`."""
    return frozenset(resources.files(PACKAGE).joinpath("names.txt").read_text().split())


def _unknown(path: str) -> UncoveredError:
    known = closest(path, [*table(), *flat()])
    if path in originals() or any(each.startswith(f"{path}.") for each in originals()):
        reason = import_module(f"{PACKAGE}.ops.omitted").reason_of(path)
        facts = {"reason": reason} if reason else {}
        return UncoveredError(f"ttnn.{path} is not covered", **facts, fix=known)
    return UncoveredError(f"ttnn has no {path}", fix=known)


class Namespace(ModuleType):
    """Names behind a dot: `ttnn.transformer`, `ttnn.experimental`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{PACKAGE}.{path}", f"The names of ttnn.{path}.")
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = find(name, self._path)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return names(self._path)

    def __repr__(self) -> str:
        return f"<namespace ttnn.{self._path}>"


def stand_in(package: str, path: Iterable[str], file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a folder whose names are those of one of its files, as in the original's module; names that
    the original has there and ours at the top are found too."""
    files = frozenset(module.name for module in pkgutil.iter_modules(path))
    inside = package.removeprefix(f"{PACKAGE}.")

    def find_in_file(name: str) -> Any:
        if name.startswith("__") or name in files:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if f"{inside}.{name}" in originals() and name in flat():
            return flat()[name]
        return getattr(import_module(f"{package}.{file}"), name)

    return find_in_file


def refusing(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module of which some functions only say why they are not here: names by reason."""
    why = {name: reason for reason, names_of in reasons.items() for name in names_of.split()}

    def find_refusal(name: str) -> Any:
        if name not in why:
            raise AttributeError(f"module 'ttnn.{module}' has no attribute {name!r}")

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(f"ttnn.{module}.{name} is not here: {why[name]}")

        refuse.__name__ = refuse.__qualname__ = name
        refuse.__doc__ = f"Not here: {why[name]}."
        return refuse

    return find_refusal
