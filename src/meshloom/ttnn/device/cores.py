"""Cores of one device: coordinates, ranges, sets of ranges, and how work is divided over them.

`x` counts columns and `y` rows. A set is kept as rectangles that do not overlap; what sets are made of is told by their
cores, so merging and subtracting go through cores and make as few rectangles as a sweep finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.errors import ArgumentError, OperandError

__all__ = (
    "CoreCoord CoreGrid CoreRange CoreRangeSet corerange_to_cores grid_to_cores num_cores_to_corerangeset "
    "num_cores_to_corerangeset_in_subcoregrids split_work_to_cores"
).split()

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class CoreCoord:
    """A core, or the size of a grid of them.

    >>> CoreCoord(8, 7), CoreCoord((8, 7)).y, CoreCoord.from_json(CoreCoord(1, 2).to_json()) == CoreCoord(1, 2)
    (8-7, 7, True)
    """

    x: int
    y: int

    def __init__(self, *place: Any) -> None:
        listed = place[0] if len(place) == 1 and isinstance(place[0], (tuple, list)) else place
        if len(listed) != 2 or not all(isinstance(each, int) and each >= 0 for each in listed):
            raise ArgumentError(f"CoreCoord takes x and y, not {place!r}", fix="write CoreCoord(0, 0)")
        object.__setattr__(self, "x", listed[0])
        object.__setattr__(self, "y", listed[1])

    def to_json(self) -> str:
        return json.dumps({"x": self.x, "y": self.y})

    @staticmethod
    def from_json(text: str) -> CoreCoord:
        return CoreCoord(*json.loads(text).values())

    @property
    def num_cores(self) -> int:
        return self.x * self.y

    def __repr__(self) -> str:
        return f"{self.x}-{self.y}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreGrid:
    """A grid of cores from the corner on: `x` columns, `y` rows.

    >>> CoreGrid(x=8, y=4).num_cores
    32
    """

    x: int
    y: int

    def __post_init__(self) -> None:
        if self.x < 1 or self.y < 1:
            raise ArgumentError(f"a grid of {self.x} columns and {self.y} rows has no cores")

    @property
    def num_cores(self) -> int:
        return self.x * self.y

    def __repr__(self) -> str:
        return f"ttnn.CoreGrid(x={self.x}, y={self.y})"


def _core(given: Any) -> Any:
    """A core where there is a pair of numbers."""
    return CoreCoord(given) if isinstance(given, (tuple, list)) else given


@dataclass(frozen=True, slots=True, repr=False)
class CoreRange:
    """A rectangle of cores, both corners included. A core may be a pair of numbers, here and in the functions below.

    >>> CoreRange(CoreCoord(0, 0), CoreCoord(3, 1)).grid_size(), CoreRange((0, 0), (3, 1)).end
    (4-2, 3-1)
    """

    start: CoreCoord
    end: CoreCoord

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, _core(getattr(self, name)))
        if not (isinstance(self.start, CoreCoord) and isinstance(self.end, CoreCoord)):
            raise ArgumentError(f"a range goes from a CoreCoord to a CoreCoord, not {self.start!r} to {self.end!r}")
        if self.end.x < self.start.x or self.end.y < self.start.y:
            raise OperandError(
                f"Invalid core range for start_coord: {self.start}, end_coord: {self.end}",
                fix="give the lower corner first",
            )

    def grid_size(self) -> CoreCoord:
        """Columns and rows."""
        return CoreCoord(self.end.x - self.start.x + 1, self.end.y - self.start.y + 1)

    def size(self) -> int:
        return self.grid_size().num_cores

    def contains(self, other: CoreCoord | CoreRange | CoreRangeSet) -> bool:
        """Whether a core, a range or all of a set is in it."""
        return CoreRangeSet([self]).contains(other)

    def cells(self, row_wise: bool = True) -> Iterator[Cell]:
        """Its cores, row after row or column after column."""
        columns, rows = range(self.start.x, self.end.x + 1), range(self.start.y, self.end.y + 1)
        return ((x, y) for y in rows for x in columns) if row_wise else ((x, y) for x in columns for y in rows)

    def to_json(self) -> str:
        return json.dumps(_corners(self))

    @staticmethod
    def from_json(text: str) -> CoreRange:
        return _range(json.loads(text))

    def __repr__(self) -> str:
        return f"[{self.start} - {self.end}]"


def _corners(found: CoreRange) -> list[list[int]]:
    return [[found.start.x, found.start.y], [found.end.x, found.end.y]]


def _range(corners: Sequence[Sequence[int]]) -> CoreRange:
    return CoreRange(CoreCoord(*corners[0]), CoreCoord(*corners[1]))


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class CoreRangeSet:
    """Rectangles of cores that do not overlap.

    >>> left = CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(1, 3))])
    >>> right = CoreRangeSet({CoreRange(CoreCoord(2, 0), CoreCoord(3, 3))})
    >>> left.merge(right), left.merge(right).subtract(left) == right
    ({[0-0 - 3-3]}, True)
    """

    _ranges: tuple[CoreRange, ...]

    def __init__(self, core_ranges: Iterable[CoreRange] | CoreRange = ()) -> None:
        given = (core_ranges,) if isinstance(core_ranges, CoreRange) else tuple(core_ranges)
        if not all(isinstance(each, CoreRange) for each in given):
            raise ArgumentError(f"CoreRangeSet takes CoreRanges, not {core_ranges!r}")
        if isinstance(core_ranges, (set, frozenset)):
            given = tuple(sorted(given, key=_corners))
        for place, each in enumerate(given):
            for other in given[:place]:
                if _overlap(each, other):
                    raise OperandError(
                        "Cannot create CoreRangeSet with specified core ranges because core ranges "
                        f"{other} and {each} overlap!",
                        fix="merge them: CoreRangeSet([a]).merge(CoreRangeSet([b]))",
                    )
        object.__setattr__(self, "_ranges", given)

    def ranges(self) -> list[CoreRange]:
        return list(self._ranges)

    def num_cores(self) -> int:
        return sum(each.size() for each in self._ranges)

    def size(self) -> int:
        return len(self._ranges)

    def empty(self) -> bool:
        return not self._ranges

    def bounding_box(self) -> CoreRange:
        """The smallest rectangle around all of it."""
        if not self._ranges:
            raise OperandError("Cannot get bounding_box of an empty CoreRangeSet!")
        starts, ends = [each.start for each in self._ranges], [each.end for each in self._ranges]
        low = CoreCoord(min(core.x for core in starts), min(core.y for core in starts))
        return CoreRange(low, CoreCoord(max(core.x for core in ends), max(core.y for core in ends)))

    def contains(self, other: CoreCoord | CoreRange | CoreRangeSet) -> bool:
        """Whether a core, a range or all of a set is in it."""
        return set(_cells(other)) <= set(self.cells())

    def merge(self, other: CoreRangeSet) -> CoreRangeSet:
        return join_cells({*self.cells(), *other.cells()})

    def subtract(self, other: CoreRangeSet) -> CoreRangeSet:
        """The cores that are not in the other."""
        return join_cells(set(self.cells()) - set(other.cells()))

    def cells(self, row_wise: bool = True) -> Iterator[Cell]:
        """The cores, rectangle after rectangle."""
        return (cell for each in self._ranges for cell in each.cells(row_wise))

    def to_json(self) -> str:
        return json.dumps([_corners(each) for each in self._ranges])

    @staticmethod
    def from_json(text: str) -> CoreRangeSet:
        return CoreRangeSet([_range(corners) for corners in json.loads(text)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoreRangeSet) and set(self._ranges) == set(other._ranges)

    def __hash__(self) -> int:
        return hash(frozenset(self._ranges))

    def __repr__(self) -> str:
        return "{" + ", ".join(map(repr, self._ranges)) + "}"


def _overlap(a: CoreRange, b: CoreRange) -> bool:
    across = a.start.x <= b.end.x and b.start.x <= a.end.x
    return across and a.start.y <= b.end.y and b.start.y <= a.end.y


def _cells(of: CoreCoord | CoreRange | CoreRangeSet) -> Iterator[Cell]:
    of = _core(of)
    if isinstance(of, CoreCoord):
        return iter(((of.x, of.y),))
    if isinstance(of, (CoreRange, CoreRangeSet)):
        return of.cells()
    raise ArgumentError(f"{of!r} is no core, range or set of ranges")


def join_cells(cells: Iterable[Cell], row_wise: bool = True) -> CoreRangeSet:
    """Cores as rectangles: runs within rows, and equal runs of neighbouring rows as one; or by columns.

    >>> join_cells({(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)})
    {[0-0 - 1-1], [0-2 - 0-2]}
    """
    turned = [(x, y) if row_wise else (y, x) for x, y in cells]
    done: list[tuple[int, int, int, int]] = []
    grown: dict[tuple[int, int], tuple[int, int]] = {}  # columns of a run: the rows it goes through
    for row in sorted({y for _, y in turned}):
        runs = _runs(sorted(x for x, y in turned if y == row))
        kept = {run: (grown[run][0] if run in grown and grown[run][1] == row - 1 else row, row) for run in runs}
        done += [(*run, *rows) for run, rows in grown.items() if run not in kept or kept[run][0] != rows[0]]
        grown = kept
    done += [(*run, *rows) for run, rows in grown.items()]
    corners = [((a, c), (b, d)) if row_wise else ((c, a), (d, b)) for a, b, c, d in done]
    return CoreRangeSet([_range(each) for each in corners])


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found


def grid_to_cores(*args: Any, **kwargs: Any) -> list[CoreCoord]:
    """The cores of a grid in order: `(num_cores, grid_size_x, grid_size_y, row_wise)` or `(start, end, row_wise)`.

    >>> grid_to_cores(3, 2, 2, row_wise=True), grid_to_cores(CoreCoord(0, 0), CoreCoord(1, 1))
    ([0-0, 1-0, 0-1], [0-0, 0-1, 1-0, 1-1])
    """
    by_corners = "start" in kwargs or (bool(args) and isinstance(_core(args[0]), CoreCoord))
    return _between(*args, **kwargs) if by_corners else _first(*args, **kwargs)


def _between(start: CoreCoord, end: CoreCoord, row_wise: bool = False) -> list[CoreCoord]:
    return [CoreCoord(cell) for cell in CoreRange(start, end).cells(row_wise)]


def _first(num_cores: int, grid_size_x: int, grid_size_y: int, row_wise: bool = False) -> list[CoreCoord]:
    if num_cores > grid_size_x * grid_size_y:
        raise OperandError(f"Number of cores {num_cores} exceeds grid size {grid_size_x}x{grid_size_y}")
    return _between(CoreCoord(0, 0), CoreCoord(grid_size_x - 1, grid_size_y - 1), row_wise)[:num_cores]


def corerange_to_cores(
    core_range_set: CoreRangeSet, max_cores: int | None = None, row_wise: bool = False
) -> list[CoreCoord]:
    """The cores of a set in order, at most so many."""
    return [CoreCoord(cell) for cell in core_range_set.cells(row_wise)][:max_cores]


def num_cores_to_corerangeset(target_num_cores: int, grid_size: CoreCoord, row_wise: bool = False) -> CoreRangeSet:
    """The first so many cores of a grid, column after column or row after row.

    >>> num_cores_to_corerangeset(10, CoreCoord(8, 8), row_wise=True)
    {[0-0 - 7-0], [0-1 - 1-1]}
    """
    size = _core(grid_size)
    whole = CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(size.x - 1, size.y - 1))])
    return num_cores_to_corerangeset_in_subcoregrids(CoreCoord(0, 0), target_num_cores, whole, row_wise)


def num_cores_to_corerangeset_in_subcoregrids(
    start_core: CoreCoord, target_num_cores: int, sub_core_grids: CoreRangeSet, row_wise: bool = False
) -> CoreRangeSet:
    """So many cores of a set from a core on, rectangle after rectangle."""
    start_core, cells = _core(start_core), list(sub_core_grids.cells(row_wise))
    if (start_core.x, start_core.y) not in cells:
        raise OperandError(f"start core {start_core} is not in {sub_core_grids}")
    there = cells[cells.index((start_core.x, start_core.y)) :]
    if not 0 < target_num_cores <= len(there):
        raise OperandError(
            f"Target number of cores {target_num_cores} is greater than total number of available cores {len(there)}"
        )
    return join_cells(there[:target_num_cores], row_wise)


def split_work_to_cores(
    grid: CoreCoord | CoreGrid | CoreRangeSet, units_to_divide: int, row_wise: bool = False
) -> tuple[int, CoreRangeSet, CoreRangeSet, CoreRangeSet, int, int]:
    """Units of work over cores: their number, all of them, those with one unit more, the others, and units of each.

    >>> split_work_to_cores(CoreCoord(2, 2), 6, row_wise=True)
    (4, {[0-0 - 1-1]}, {[0-0 - 1-0]}, {[0-1 - 1-1]}, 2, 1)
    """
    grid = _core(grid)
    if isinstance(grid, CoreRangeSet):
        cells = list(grid.cells(row_wise))
    else:
        cells = list(CoreRange(CoreCoord(0, 0), CoreCoord(grid.x - 1, grid.y - 1)).cells(row_wise))
    used = min(units_to_divide, len(cells))
    if not used:
        return 0, CoreRangeSet(), CoreRangeSet(), CoreRangeSet(), 0, 0
    units, more = divmod(units_to_divide, used)
    everyone = join_cells(cells[:used], row_wise)
    if not more:
        return used, everyone, everyone, CoreRangeSet(), units, 0
    return used, everyone, join_cells(cells[:more], row_wise), join_cells(cells[more:used], row_wise), units + 1, units
