"""A call's arguments as a cache key."""

from __future__ import annotations

from typing import Any

import torch

NUMBERS = (bool, int, float, complex)


class Unhashable(Exception):
    """An argument that no cache key can hold; such a call goes through the fallback."""


def freeze_number(value: object) -> tuple[object, ...]:
    """A number with its kind. 0.0 equals -0.0 and nan not even itself: these, and complex numbers, go by their text.

    >>> freeze_number(0.0) == freeze_number(-0.0), freeze_number(1) == freeze_number(1.0)
    (False, False)
    """
    kind = value.__class__
    return (kind, repr(value)) if not value or value != value or kind is complex else (kind, value)


def freeze(value: Any) -> Any:
    """A hashable stand-in for an argument that tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    kind = value.__class__
    if kind in NUMBERS:
        return freeze_number(value)
    if kind is slice:
        return (slice, freeze(value.start), freeze(value.stop), freeze(value.step))
    if isinstance(value, (tuple, list)):
        return (tuple, *(freeze(each) for each in value))
    if value is None or value is Ellipsis or isinstance(value, (str, torch.dtype, torch.device, torch.memory_format)):
        return value
    try:
        return (kind, int(value)) if hasattr(value, "__index__") else (kind, hash(value), value)
    except TypeError:
        raise Unhashable from None
