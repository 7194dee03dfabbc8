"""What can go wrong, as one tree of exceptions with one way of writing a message.

    MeshloomError
    ├── MeshError            ValueError *         a mesh that cannot exist, an unknown axis, two meshes in one op
    ├── PlacementError       ValueError           a placement that does not fit the tensor or the mesh
    ├── ShapeError           ValueError *         operands whose shapes do not go together
    ├── NotationError        ValueError           text that `parse` cannot read
    ├── FabricError          ValueError           links that cannot be, or a ring or line that they do not form
    ├── ModeError            ValueError           a way of carrying out a collective that does not exist
    ├── BindingError         ValueError           ranks, hosts and devices that do not go together
    ├── BoundsError          IndexError *         an index that the tensor does not have
    ├── DTypeError           TypeError *          a dtype that the operation has no meaning for
    ├── ArgumentError        TypeError *          a call with the wrong arguments
    ├── CommunicationError   RuntimeError         communication inside `communication("forbid")`
    ├── DivergenceError      RuntimeError         processes of one run that do different things
    ├── GradientError        RuntimeError         a gradient that cannot be had that way
    ├── LaunchError          RuntimeError         a run that cannot start, or a rank of it that failed
    ├── CheckpointError      RuntimeError         files of weights or states that cannot be written, read or trusted
    ├── PeerLostError        RuntimeError         a process that is gone, never came, or does not answer in time
    ├── PipelineError        RuntimeError         a stage of a pipeline that failed, with its micro-batch
    ├── RaceError            RuntimeError         two uses of one memory that nothing orders, or a result used too early
    ├── OutOfMemoryError     MemoryError *        a buffer or tensor that the devices have no room for
    ├── ClosedError          RuntimeError         a mesh that was closed, a buffer freed, a trace released
    ├── TraceError           RuntimeError         something that cannot be captured, or a trace that is not there
    ├── DeviceError          RuntimeError         commands that failed on some devices
    ├── OperandError         RuntimeError         an op on what devices hold that cannot take these operands
    ├── UncoveredError       AttributeError       a name of TTNN that is not covered, or that nobody has
    ├── DeviceTimeoutError   TimeoutError         a device or a queue that did not end in time
    ├── ScheduleError        RuntimeError         a schedule of sends that does not do what its collective means
    ├── ViewError            RuntimeError         an in-place write into elements that share memory
    └── UnsupportedError     NotImplementedError  something that needs values, or a transform we refuse

Those with a star are also a RuntimeError, because torch raises one in their place: a program that catches what torch
raises catches ours. (NotImplementedError is a RuntimeError by itself.)

Inner code raises facts; the boundary in `tensor.dispatch` adds the call and its operands with `located`.
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
from collections.abc import Iterable
from functools import cache
from types import CodeType, FrameType

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep


def message(headline: str, **details: object) -> str:
    """The headline, then one aligned line per detail; details that are None are left out.

    >>> print(message("dim 5 is out of range", tensor="f32[4]", fix="use dim 0"))
    dim 5 is out of range
      tensor  f32[4]
      fix     use dim 0
    """
    kept = {key: str(value) for key, value in details.items() if value is not None}
    width = max((len(key) for key in kept), default=0) + 2
    indent = "\n" + " " * (width + 2)
    return "\n".join([headline, *(f"  {key:<{width}}{value.replace(chr(10), indent)}" for key, value in kept.items())])


def closest(name: object, known: Iterable[object]) -> str:
    """A phrase that lists the known names nearest to `name`, or all of them when there are few.

    >>> closest("tq", ["dp", "tp"])
    "did you mean 'tp'? known: 'dp', 'tp'"
    """
    names = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
    shown = names if len(names) <= 12 else near or names[:12]
    listing = "known: " + (", ".join(repr(each) for each in shown) or "none")
    return f"did you mean {near[0]!r}? {listing}" if near else listing


def expect(what: str, value: object, kind: type | tuple[type, ...], fix: str | None = None) -> None:
    """An error unless an argument is of a type; True is no number.

    >>> expect("stress", "x", int, fix="give a seed, such as 0")
    Traceback (most recent call last):
        ...
    meshloom.errors.ArgumentError: stress='x' is of type str
      fix  give a seed, such as 0
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ArgumentError(f"{what}={value!r:.80} is of type {type(value).__name__}", fix=fix)


def expect_seconds(what: str, value: object, least: float = 0.0) -> None:
    """An error unless an argument is a time: seconds, or None for no end."""
    if value is None:
        return
    expect(what, value, (int, float), fix="give seconds, or None for no end")
    if not least <= value < 1e9:  # type: ignore[operator]
        raise ArgumentError(f"{what}={value!r} is no time to wait", fix="give seconds above 0, or None for no end")


def where() -> str:
    """The line of the program that is calling, outside of meshloom and torch: `train.py:12`."""
    return line_of(sys._getframe(1)) or STARTED.line or "unknown line"


class _Started(threading.local):
    """In a thread of ours: the line of the program that started its work."""

    line = ""


STARTED = _Started()


def line_of(frame: FrameType | None) -> str:
    """The innermost line of the program from a frame on outwards; empty where there is none."""
    return place_name(place_of(frame))


def place_of(frame: FrameType | None) -> tuple[str, int]:
    """The file and the line of `line_of`; `place_name` makes a text of them."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_program(file):
            return file, frame.f_lineno
        frame = frame.f_back
    file, _, line = STARTED.line.rpartition(":")
    return (file, int(line)) if line.isdecimal() else ("", 0)


Spot = tuple[CodeType | str, int]  # a code object and how far it has come, or a file and its line


def spot_of(frame: FrameType | None) -> Spot:
    """The innermost spot of the program from a frame on outwards. `place_at` finds its line, which takes longer."""
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back
    return place_of(None)


def place_at(spot: Spot) -> tuple[str, int]:
    """The file and the line of a spot."""
    code, at = spot
    if isinstance(code, str):
        return code, at
    return code.co_filename, next((line for start, end, line in code.co_lines() if start <= at < end), None) or 0


def place_name(place: tuple[str, int]) -> str:
    """A file and a line as text: `train.py:12`; empty where there is none."""
    file, line = place
    return f"{_name(file)}:{line}" if file else ""


_name = cache(os.path.basename)


@cache
def is_program(file: str) -> bool:
    """Whether a file belongs to the program, not to meshloom, torch or the interpreter."""
    is_standard = file.startswith(_STANDARD) and "-packages" not in file
    return not (is_standard or file.startswith((_HERE, "<frozen")) or f"{os.sep}torch{os.sep}" in file)


class MeshloomError(Exception):
    """The root of every error that meshloom raises on purpose."""

    def __init__(self, headline: str, **details: object) -> None:
        self.headline = headline
        self.details = details
        super().__init__(message(headline, **details))

    def locate(self, **details: object) -> MeshloomError:
        """The same error with where it happened; details it already has win, unless they are None."""
        merged = {**details, **{name: each for name, each in self.details.items() if each is not None}}
        fix = merged.pop("fix", None)
        return type(self)(self.headline, **merged, fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.headline, self.details)


def _rebuild(kind: type[MeshloomError], headline: str, details: dict[str, object]) -> MeshloomError:
    return kind(headline, **details)


class MeshError(MeshloomError, ValueError, RuntimeError):
    """A mesh that cannot exist, an axis it does not have, or two meshes in one op."""


class PlacementError(MeshloomError, ValueError):
    """A placement that does not fit the tensor or the mesh."""


class ShapeError(MeshloomError, ValueError, RuntimeError):
    """Operands whose shapes do not go together."""


class NotationError(MeshloomError, ValueError):
    """Text that `parse` cannot read."""


class FabricError(MeshloomError, ValueError):
    """Links that cannot be, or a ring or line that the links do not form."""


class ModeError(MeshloomError, ValueError):
    """A way of carrying out a collective that does not exist."""


class BindingError(MeshloomError, ValueError):
    """Ranks, hosts and devices that do not go together, or are told by halves."""


class BoundsError(MeshloomError, IndexError, RuntimeError):
    """An index that the tensor does not have."""


class DTypeError(MeshloomError, TypeError, RuntimeError):
    """A dtype that the operation has no meaning for."""


class ArgumentError(MeshloomError, TypeError, RuntimeError):
    """A call with the wrong arguments."""


class CommunicationError(MeshloomError, RuntimeError):
    """Communication where it was forbidden."""


class DivergenceError(MeshloomError, RuntimeError):
    """Processes of one run that do different things where all must do the same."""


class LaunchError(MeshloomError, RuntimeError):
    """A run of several processes that cannot start, or one of whose ranks failed."""


class CheckpointError(MeshloomError, RuntimeError):
    """A file of weights or a checkpoint that cannot be written, read or trusted."""


class PeerLostError(MeshloomError, RuntimeError):
    """A process that is gone, never came, or does not answer within the timeout."""


LostError = PeerLostError  # the name before 0.2


class PipelineError(MeshloomError, RuntimeError):
    """A stage of a pipeline that failed, with its micro-batch."""


class GradientError(MeshloomError, RuntimeError):
    """A gradient that cannot be had that way."""


class RaceError(MeshloomError, RuntimeError):
    """Two uses of one memory that nothing orders, a result used too early, or a read of what nothing has written."""


class OutOfMemoryError(MeshloomError, MemoryError, RuntimeError):
    """A buffer or tensor that the devices have no room for."""


class ClosedError(MeshloomError, RuntimeError):
    """A mesh that was closed, a buffer that was freed, a trace that was released."""


class TraceError(MeshloomError, RuntimeError):
    """Something that cannot be captured, or a trace that is not there."""


class DeviceError(MeshloomError, RuntimeError):
    """Commands that failed on some devices."""


class OperandError(MeshloomError, RuntimeError):
    """An op on what devices hold cannot take these operands."""


class UncoveredError(MeshloomError, AttributeError):
    """A name of TTNN that is not covered, or that nobody has."""


class DeviceTimeoutError(MeshloomError, TimeoutError):
    """A device or a queue that did not end in time."""


class ScheduleError(MeshloomError, RuntimeError):
    """A schedule of sends that does not do what its collective means, or could not run."""


class ViewError(MeshloomError, RuntimeError):
    """An in-place write into a view whose elements share memory."""


class UnsupportedError(MeshloomError, NotImplementedError):
    """Something that needs values where there are none, or a transform that is refused."""
