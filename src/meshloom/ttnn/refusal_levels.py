"""What the original would refuse and what happens then: an error, a warning once per line, or nothing.

`ttnn.strictness("original")` holds from the call on, and as a context manager until its end. What our pages offer
beyond the original (`to_torch` without a composer, uneven shards) is refused at that level only. The rules are
where they belong: those of ops by family in `ops.refusals`, those of shards in `tensor.sharding`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import TracebackType

from meshloom.errors import ArgumentError, OperandError, closest, message, place_of

__all__ = ["RefusalWarning", "strictness"]

LEVELS = ("original", "warn", "lenient")


class RefusalWarning(UserWarning):
    """The original would refuse a call that works here."""


class Setting:
    """The level of this process, what was told on which line, and how often the original's refusal counted.

    A call that is refused is not remembered as a kind that was seen before: it is told on every new line.
    """

    level = "warn"
    refusals = 0
    told: set[tuple[str, int, str]] = set()

    def change(self, level: str) -> None:
        """Set the level; what was decided at another one is decided again."""
        if level != self.level:
            self.level = level
            import_module("meshloom.ttnn.ops.repeats").forget()


setting = Setting()


class strictness:
    """Say what becomes of calls that the original refuses: "original" raises its error, "warn" tells it once per line
    of the program, "lenient" says nothing.

    >>> from meshloom import ttnn
    >>> mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 1))
    >>> whole = ttnn.full([2], 4, dtype=ttnn.uint32, device=mesh)
    >>> with ttnn.strictness("lenient"):
    ...     ttnn.to_torch(ttnn.sqrt(whole)).tolist()
    [2, 2]
    >>> ttnn.close_mesh_device(mesh)
    """

    def __init__(self, level: str) -> None:
        if level not in LEVELS:
            raise ArgumentError(f"strictness {level!r} is not known", fix=closest(level, LEVELS))
        self._before = setting.level
        setting.change(level)

    def __enter__(self) -> strictness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setting.change(self._before)


def refuse(reason: str, fix: str | None = None) -> None:
    """Tell that the original refuses what is being called, for its reason."""
    if setting.level == "lenient":
        return
    setting.refusals += 1
    if setting.level == "original":
        raise OperandError(reason, fix=fix)
    file, line = place_of(sys._getframe(1))
    if (file, line, reason) not in setting.told:
        setting.told.add((file, line, reason))
        told = message(f"TTNN refuses this call: {reason}", fix=fix, quiet="ttnn.strictness('lenient')")
        warnings.warn_explicit(told, RefusalWarning, file or "<unknown>", line or 1)


def refuse_addition(reason: str, fix: str) -> None:
    """Raise at the level of the original only: for what our pages offer beyond it, on purpose."""
    if setting.level == "original":
        raise OperandError(reason, fix=fix)


def refuse_if(is_refused: bool, reason: str, fix: str | None = None) -> None:
    """`refuse` where the original does."""
    if is_refused:
        refuse(reason, fix)
