"""Dictionaries whose items are attributes too, nested ones included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DotAccessDict", "make_dot_access_dict"]


class DotAccessDict(dict[Any, Any]):
    """A dictionary whose items are read, set and deleted as attributes; one that is missing is a KeyError, as in TTNN.

    >>> found = DotAccessDict(width=8)
    >>> found.height = 4
    >>> found.width, found["height"]
    (8, 4)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and notebooks ask every object for
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def make_dot_access_dict(
    dictionary: Mapping[Any, Any], *, ignore_types: type | tuple[type, ...] | None = None
) -> DotAccessDict:
    """A dictionary, and those inside of it, with items as attributes; values of the types to ignore stay as they are.

    >>> make_dot_access_dict({"layer": {"weight": 1}}).layer.weight
    1
    """
    if isinstance(dictionary, DotAccessDict):
        return dictionary
    ignored = ignore_types or ()

    def make(value: Any) -> Any:
        is_nested = isinstance(value, dict) and not isinstance(value, ignored)
        return make_dot_access_dict(value, ignore_types=ignore_types) if is_nested else value

    return DotAccessDict({key: make(value) for key, value in dictionary.items()})
