"""Who is told what a program does with meshes beside its ops: that it opens them, closes them and waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WATCHERS: list[Callable[[str, Any], None]] = []  # called as watcher("opened", device); also "closed", "waited"


def tell(what: str, device: Any) -> None:
    """Say that something was done with a mesh."""
    for watcher in tuple(WATCHERS):
        watcher(what, device)
