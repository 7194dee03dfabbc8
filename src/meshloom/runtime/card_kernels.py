"""Calls of torch as kernels that a driver offers."""

from __future__ import annotations

from typing import Any


def launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on the cards alone; NotImplemented where the driver offers no kernel that fits."""
    return NotImplemented
