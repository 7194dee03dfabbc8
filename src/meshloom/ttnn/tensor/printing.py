"""A tensor as text: on the host or on one device as the original prints it, else every part that differs, with the
devices that hold it.

>>> from meshloom import ttnn
>>> print(ttnn.Tensor([1.0, 2.0], [2], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT))
ttnn.Tensor([1.0000, 2.0000], shape=Shape([2]), dtype=DataType::FLOAT32, layout=Layout::ROW_MAJOR)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from meshloom.errors import ArgumentError, closest
from meshloom.ttnn.choices import spell_choice
from meshloom.ttnn.tensor.boxes import gather_parts
from meshloom.ttnn.tensor.parts import Block, part

if TYPE_CHECKING:
    from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["set_printoptions"]

PROFILES = {"empty": 0, "short": 2, "full": None}  # elements shown at each end of a dim; None shows all
PARTS_SHOWN = 8
WIDTH = 5  # of a whole number
OPENING = "ttnn.Tensor("


@dataclass
class Options:
    """How numbers are written."""

    profile: str = "short"
    sci_mode: bool | None = None
    precision: int = 4


options = Options()


def set_printoptions(
    *, profile: str | None = None, sci_mode: bool | str | None = None, precision: int | None = None
) -> None:
    """Say how tensors are printed: profile "empty", "short" or "full", powers of ten or not, digits after the point."""
    if profile is not None and profile.lower() not in PROFILES:
        raise ArgumentError(f"there is no profile {profile!r}", fix=closest(profile, PROFILES))
    if precision is not None and precision < 0:
        raise ArgumentError(f"precision={precision} is negative")
    options.profile = (profile or options.profile).lower()
    options.precision = options.precision if precision is None else precision
    if sci_mode is not None:
        options.sci_mode = None if sci_mode == "default" else bool(sci_mode)


def text(tensor: Tensor) -> str:
    tail = f"shape={tensor.shape}, dtype={spell_choice(tensor.dtype)}, layout={spell_choice(tensor.layout)}"
    if not tensor.is_allocated():
        return f"{OPENING}<deallocated>, {tail})"
    tensor.wait()
    shown = list(itertools.islice(_parts(gather_parts(tensor, by_label=True)), PARTS_SHOWN + 1))
    if len(shown) == 1 and (tensor.device() is None or math.prod(tensor.grid) == 1):
        return f"{OPENING}{numbers(shown[0][1], len(OPENING))}, {tail})"
    lines = [f"  {places}: {numbers(values, len(places) + 4)}" for places, values in shown[:PARTS_SHOWN]]
    more = ["  ..."] if len(shown) > PARTS_SHOWN else []
    where = f"{tensor.device()}, " if tensor.device() is not None else ""
    label = tensor.tensor_topology()
    return "\n".join([f"{OPENING}{where}{tail}, {label.distribution_shape()} {label.placements()})", *lines, *more])


def _parts(tensor: Tensor) -> Iterator[tuple[str, Block]]:
    """Each part that an array keeps, with the coordinates it is for: `(0, *)` is the whole first row."""
    lead = tensor.block.shape[: len(tensor.grid)]
    held = {tuple(place) for place in tensor.device_coords()}
    for place in itertools.product(*map(range, lead)):
        if any(_covers(place, lead, each) for each in held):
            yield _stars(place, lead, tensor.grid), part(tensor.block, place)


def _covers(place: Sequence[int], lead: Sequence[int], device: Sequence[int]) -> bool:
    return all(size == 1 or a == b for a, size, b in zip(place, lead, device, strict=True))


def _stars(place: Sequence[int], lead: Sequence[int], grid: Sequence[int]) -> str:
    listed = ("*" if size == 1 < full else str(at) for at, size, full in zip(place, lead, grid, strict=True))
    return f"({', '.join(listed)})"


def numbers(values: Block, indent: int) -> str:
    """The values of one part, in brackets; further lines begin below the first."""
    ends = PROFILES[options.profile]
    if ends == 0:
        return "[...]"
    return _nest(values, ends, indent)


def _nest(values: Block, ends: int | None, indent: int) -> str:
    if values.dim() == 0:
        return _number(values)
    size = values.shape[0]
    if ends is None or size <= 2 * ends:
        listed = [_nest(each, ends, indent + 1) for each in values]
    else:
        first, last = values[:ends], values[-ends:]
        rest = " ..." if values.dim() == 1 else "..."
        listed = [*(_nest(e, ends, indent + 1) for e in first), rest, *(_nest(e, ends, indent + 1) for e in last)]
    lines = min(values.dim() - 1, 2)  # rows are one below the other, and matrices have an empty line between them
    between = "," + ("\n" * lines + " " * (indent + 1) if lines else " ")
    return f"[{between.join(listed)}]"


def _number(value: torch.Tensor) -> str:
    number = value.item()
    if not value.is_floating_point():
        return f"{number:{WIDTH}d}"
    far = number != 0 and abs(number) != float("inf") and not 1e-4 <= abs(number) < 1e8
    scientific = far if options.sci_mode is None else options.sci_mode
    return f"{number:.{options.precision}{'e' if scientific else 'f'}}"
