"""Which part of a buffer each device holds: all of it, or a shard of a global array.

Shards are counted row-major over the global array. `row_major` gives them to devices along the rows of the mesh,
`col_major` down its columns. A shard side of 0 means *replicated along that dim*: every shard has all of it, and the
shards then go along the columns of the mesh and are copied down them (`row_major`), or along its rows and are copied
across (`col_major`). A mesh of more than two axes counts its first ones as rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from meshloom.errors import ArgumentError, PlacementError, ShapeError, closest
from meshloom.mesh import Coordinate, Mesh
from meshloom.mesh.process import place_of
from meshloom.placement import Placement, Replicate, Shard, Topology
from meshloom.types import Shape, check_dtype, itemsize, numel

ORIENTATIONS = ("row_major", "col_major")
LAYOUTS = ("replicated", "sharded")
_BY_SIZE = {1: "u8", 2: "bf16", 4: "f32", 8: "f64"}


@dataclass(frozen=True, slots=True)
class ReplicatedBufferConfig:
    """Every device holds the whole: a shape, or a number of bytes.

    >>> ReplicatedBufferConfig(size=128).shape
    (128,)
    """

    size: int | None = None
    shape: Shape | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.size is None and self.shape is None:
            raise ArgumentError("a replicated buffer needs a size in bytes or a shape")
        put = object.__setattr__
        put(self, "dtype", check_dtype(self.dtype or ("u8" if self.shape is None else "f32")))
        put(self, "shape", _shape("shape", (self.size or 0,) if self.shape is None else self.shape))
        _check_size(self.size, self.shape or (), self.dtype)


@dataclass(frozen=True, slots=True)
class ShardedBufferConfig:
    """Every device holds a shard of a global array; a shard side of 0 is replicated.

    >>> ShardedBufferConfig(global_shape=(8, 8), shard_shape=(4, 0)).local_shape
    (4, 8)
    """

    global_size: int | None = None
    global_shape: Shape = ()
    shard_shape: Shape = ()
    orientation: str = "row_major"
    dtype: str = ""
    local_shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "global_shape", _shape("global_shape", self.global_shape))
        put(self, "shard_shape", _shape("shard_shape", self.shard_shape))
        if self.orientation not in ORIENTATIONS:
            raise ArgumentError(f"orientation {self.orientation!r}", fix=closest(self.orientation, ORIENTATIONS))
        put(self, "dtype", check_dtype(self.dtype or self._dtype()))
        _check_size(self.global_size, self.global_shape, self.dtype)
        _check_tiling(self.global_shape, self.shard_shape)
        put(self, "local_shape", tuple(s or g for g, s in zip(self.global_shape, self.shard_shape, strict=True)))

    def _dtype(self) -> str:
        """Without a dtype, the one whose size follows from the bytes of all and the shape."""
        if self.global_size is None or not numel(self.global_shape):
            return "f32"
        return _BY_SIZE.get(self.global_size // numel(self.global_shape), "f32")

    @property
    def grid(self) -> Shape:
        """How many shards there are along each dim."""
        return tuple(g // s if s else 1 for g, s in zip(self.global_shape, self.shard_shape, strict=True))


Config = ReplicatedBufferConfig | ShardedBufferConfig


def _shape(name: str, given: Sequence[int] | None) -> Shape:
    sizes = (given,) if isinstance(given, int) else tuple(given or ())
    if not all(isinstance(each, int) and each >= 0 for each in sizes):
        raise ShapeError(f"{name} is {given!r}", fix="give whole numbers, 0 or more")
    return sizes


def _check_size(size: int | None, shape: Shape, dtype: str) -> None:
    expected = numel(shape) * itemsize(dtype)
    if size is not None and size != expected:
        raise ShapeError(f"{dtype}{list(shape)} has {expected} B, not {size}", fix="leave the size out: it follows")


def _check_tiling(whole: Shape, shard: Shape) -> None:
    if len(whole) != len(shard):
        raise ShapeError(f"shard_shape {shard} and global_shape {whole} have different numbers of dims")
    for dim, (size, part) in enumerate(zip(whole, shard, strict=True)):
        if part and size % part:
            raise ShapeError(
                f"shards of {part} do not tile dim {dim} of size {size} ({size} % {part} = {size % part})",
                asked=f"global_shape={whole}, shard_shape={shard}",
                fix=f"use a shard of {math.gcd(size, part)}, pad dim {dim} to {-(-size // part) * part}, "
                "or 0 to replicate it",
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """A config on a mesh: what each coordinate holds.

    `lead` are the mesh axes of the block: 1 where all devices along an axis hold the same, which is then stored once.
    `shards` has the number of the shard that each coordinate holds, row-major; None where a coordinate has none.
    """

    mesh: Mesh
    shape: Shape
    local_shape: Shape
    grid: Shape
    lead: Shape
    shards: tuple[int | None, ...]
    dtype: str

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole."""
        return self.shape == self.local_shape

    @property
    def held(self) -> Shape:
        """The mesh axes of the block that this process holds."""
        return tuple(1 if size == 1 else here for size, here in zip(self.lead, self.mesh.local_shape, strict=True))

    @property
    def local_bytes(self) -> int:
        """What one device holds, in bytes."""
        return numel(self.local_shape) * itemsize(self.dtype)

    def part(self, place: Coordinate) -> tuple[slice, ...] | None:
        """What a coordinate holds, as an index of the global array; None if it holds nothing."""
        number = self.shards[self.mesh.index(place)]
        return None if number is None else self.slices(number)

    def slices(self, number: int) -> tuple[slice, ...]:
        """The shard of that number as an index of the global array."""
        places = zip(place_of(number, self.grid), self.local_shape, strict=True)
        return tuple(slice(place * size, (place + 1) * size) for place, size in places)

    def holders(self) -> dict[int, Coordinate]:
        """For each shard the first coordinate that holds it."""
        found: dict[int, Coordinate] = {}
        for place, number in zip(self.mesh.coordinates(), self.shards, strict=True):
            if number is not None:
                found.setdefault(number, place)
        return found

    def __str__(self) -> str:
        how = "replicated" if self.is_replicated else f"shards {list(self.local_shape)}"
        return f"{self.dtype}{list(self.shape)} {how}"


def layout_of(config: Config, mesh: Mesh) -> Layout:
    """What each device of a mesh holds of a buffer."""
    if isinstance(config, ReplicatedBufferConfig):
        shape = config.shape or ()
        return Layout(mesh, shape, shape, (1,) * len(shape), (1,) * mesh.ndim, (0,) * mesh.size, config.dtype)
    count = math.prod(config.grid)
    cols = mesh.shape[-1] if mesh.shape else 1
    rows = mesh.size // cols
    kept = [side for side in config.shard_shape if side]
    if len(kept) == len(config.shard_shape):
        shards, lead = _over_all(count, rows, cols, config.orientation), mesh.shape
    elif not kept:
        shards, lead = [0] * mesh.size, (1,) * mesh.ndim
    else:
        shards, lead = _over_one_side(count, rows, cols, config.orientation, mesh)
    if count > len(set(shards) - {None}):
        raise ShapeError(
            f"{count} shards do not fit on {mesh.size} devices",
            mesh=mesh,
            asked=f"global_shape={config.global_shape}, shard_shape={config.shard_shape}, {config.orientation}",
            fix="use larger shards or a larger mesh",
        )
    placed = tuple(number if number is not None and number < count else None for number in shards)
    return Layout(mesh, config.global_shape, config.local_shape, config.grid, lead, placed, config.dtype)


def _over_all(count: int, rows: int, cols: int, orientation: str) -> list[int | None]:
    if orientation == "row_major":
        numbers = range(rows * cols)
    else:
        numbers = [col * rows + row for row in range(rows) for col in range(cols)]  # type: ignore[assignment]
    return [number if number < count else None for number in numbers]


def _over_one_side(
    count: int, rows: int, cols: int, orientation: str, mesh: Mesh
) -> tuple[list[int | None], tuple[int, ...]]:
    along_columns = orientation == "row_major"
    numbers = [col if along_columns else row for row in range(rows) for col in range(cols)]
    lead = (1,) * (mesh.ndim - 1) + mesh.shape[-1:] if along_columns else mesh.shape[:-1] + (1,)
    return [number if number < count else None for number in numbers], lead


@lru_cache(maxsize=1024)
def topology_of(layout: Layout) -> Topology | None:
    """The placements that say the same as a layout; None if none do.

    >>> config = ShardedBufferConfig(global_shape=(4, 8), shard_shape=(2, 2))
    >>> print(topology_of(layout_of(config, Mesh(r=2, c=4))))
    f32[4, 8](S(0), S(1)) on Mesh(r=2, c=4)
    """
    if None in layout.shards:
        return None
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(layout.shape)))]
    for placements in itertools.product(options, repeat=layout.mesh.ndim):
        if all(isinstance(p, Replicate) == (n == 1 < m) or m == 1 for p, n, m in _axes(placements, layout)):
            found = Topology(layout.mesh, placements, layout.shape, layout.dtype)
            if found.local_shape == layout.local_shape and _agree(found, layout):
                return found
    return None


def _axes(placements: Sequence[Placement], layout: Layout) -> list[tuple[Placement, int, int]]:
    return list(zip(placements, layout.lead, layout.mesh.shape, strict=True))


def _agree(topology: Topology, layout: Layout) -> bool:
    for place in layout.mesh.coordinates():
        part = layout.part(place)
        if part is None or tuple(each.start for each in part) != topology.offset(place):
            return False
    return True


def need_topology(layout: Layout) -> Topology:
    """The placements that say the same as a layout, or an error that says why there are none."""
    found = topology_of(layout)
    if found is None:
        raise PlacementError(
            f"no placements say what this buffer's layout says: {layout}",
            mesh=layout.mesh,
            fix="use as many shards as devices, in row-major order",
        )
    return found
