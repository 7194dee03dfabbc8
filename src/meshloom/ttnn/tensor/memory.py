"""Where a device keeps its part: in which memory, and spread over which of its cores or banks."""

from __future__ import annotations

import copy
import enum
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from meshloom.errors import ArgumentError, OperandError, place_of
from meshloom.runtime.memory import Allocator, Region
from meshloom.ttnn.choices import Choice, spell_choice
from meshloom.ttnn.device.cores import CoreCoord, CoreGrid, CoreRange, CoreRangeSet
from meshloom.ttnn.tensor.formats import TILE_SIZE, Shape

if TYPE_CHECKING:
    from meshloom.ttnn.device.mesh_device import MeshDevice

__all__ = (
    "DRAM_MEMORY_CONFIG L1_BLOCK_SHARDED_MEMORY_CONFIG L1_HEIGHT_SHARDED_MEMORY_CONFIG L1_MEMORY_CONFIG "
    "L1_WIDTH_SHARDED_MEMORY_CONFIG BufferType MemoryConfig NdShardSpec ShardDistributionStrategy ShardOrientation "
    "ShardSpec ShardStrategy TensorMemoryLayout create_sharded_memory_config create_sharded_memory_config_"
).split()


class BufferType(Choice):
    """A kind of memory."""

    DRAM, L1, L1_SMALL, TRACE = 0, 1, 3, 4


class TensorMemoryLayout(Choice):
    """How a part is spread over cores or banks."""

    INTERLEAVED, HEIGHT_SHARDED, WIDTH_SHARDED, BLOCK_SHARDED, ND_SHARDED = 0, 2, 3, 4, 5


class ShardOrientation(Choice):
    """In which order shards go over the cores of a grid."""

    ROW_MAJOR, COL_MAJOR = 0, 1


class ShardStrategy(enum.Enum):
    """Along what a matrix is cut."""

    HEIGHT, WIDTH, BLOCK = 1, 2, 3


class ShardDistributionStrategy(Choice):
    """How many-dimensional shards go over cores."""

    ROUND_ROBIN_1D, GRID_2D, CONTIGUOUS_1D = 0, 1, 2


class Room:
    """Bytes on every device of a mesh; given back when the last that uses them is gone, or by hand."""

    __slots__ = ("__weakref__", "allocator", "region", "traces")

    allocator: Allocator
    region: Region
    traces: tuple[Any, ...]  # that write there when they are replayed

    def __del__(self) -> None:
        self.allocator.drop(self.region)

    def free(self) -> None:
        """Give it back now, or when the traces that use it are released."""
        if all(trace.released for trace in self.traces):
            self.allocator.release(self.region)


def hold_region(allocator: Allocator, region: Region) -> Room:
    """The room of a region that was allocated."""
    made = _blank(Room)
    made.allocator, made.region, made.traces = allocator, region, ()
    return made


_blank = object.__new__


def room_on(device: MeshDevice, kind: BufferType, size: int, owner: Any, per_bank: bool = False) -> Room:
    """Bytes in a memory of every device, or that many in every bank of it; what is in L1 is taken from the top."""
    runtime, is_l1 = device.runtime, kind is not BufferType.DRAM
    allocator = runtime.system.memory["l1" if is_l1 else "dram"]
    size = size * allocator.banks if per_bank else size
    place = place_of(sys._getframe(1))
    return hold_region(allocator, allocator.allocate(size, runtime.mask, owner, place, from_top=is_l1))


Grids = CoreGrid | CoreCoord | CoreRange | CoreRangeSet | Sequence[Any]


def _are_sizes(given: Sequence[int]) -> bool:
    return all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in given)


@dataclass(eq=True, repr=False)
class ShardSpec:
    """The cores that have a shard each, and how large a shard is.

    >>> grid = CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(7, 0))])
    >>> ShardSpec(grid, (32, 64), ShardOrientation.ROW_MAJOR).shape
    [32, 64]
    """

    grid: CoreRangeSet
    shape: list[int]
    orientation: ShardOrientation

    def __init__(
        self,
        grid: CoreRangeSet,
        shard_shape: Sequence[int],
        shard_orientation: ShardOrientation = ShardOrientation.ROW_MAJOR,
    ) -> None:
        if not isinstance(grid, CoreRangeSet) or len(shard_shape) != 2 or not _are_sizes(shard_shape):
            raise ArgumentError(f"ShardSpec takes a CoreRangeSet and two sizes, not {grid!r} and {shard_shape!r}")
        self.grid, self.shape, self.orientation = grid, list(shard_shape), shard_orientation

    def num_cores(self) -> int:
        return self.grid.num_cores()

    def __hash__(self) -> int:
        return hash((self.grid, tuple(self.shape), self.orientation))

    def __repr__(self) -> str:
        sides = ", ".join(map(str, self.shape))
        return f"ShardSpec(grid={self.grid},shape={{{sides}}},orientation={spell_choice(self.orientation)})"

    def to_json(self) -> str:
        return json.dumps({"grid": self.grid.to_json(), "shape": self.shape, "orientation": self.orientation.name})

    @staticmethod
    def from_json(text: str) -> ShardSpec:
        found = json.loads(text)
        return ShardSpec(CoreRangeSet.from_json(found["grid"]), found["shape"], ShardOrientation[found["orientation"]])


@dataclass(unsafe_hash=True, repr=False)
class NdShardSpec:
    """Shards of any number of dims, and the cores that they go over."""

    shard_shape: Sequence[int]
    grid: CoreRangeSet
    orientation: ShardOrientation = ShardOrientation.ROW_MAJOR
    shard_distribution_strategy: ShardDistributionStrategy = ShardDistributionStrategy.ROUND_ROBIN_1D

    def __post_init__(self) -> None:
        if not isinstance(self.grid, CoreRangeSet) or not _are_sizes(self.shard_shape):
            raise ArgumentError(
                f"NdShardSpec takes sizes and a CoreRangeSet, not {self.shard_shape!r} and {self.grid!r}"
            )
        self.shard_shape = Shape(self.shard_shape)

    def __repr__(self) -> str:
        return (
            f"NdShardSpec(shard_shape={self.shard_shape},grid={self.grid},orientation={spell_choice(self.orientation)},"
            f"shard_distribution_strategy={spell_choice(self.shard_distribution_strategy)})"
        )

    def num_cores(self) -> int:
        return self.grid.num_cores()

    def to_json(self) -> str:
        return json.dumps(
            {
                "shard_shape": list(self.shard_shape),
                "grid": self.grid.to_json(),
                "orientation": self.orientation.name,
                "shard_distribution_strategy": self.shard_distribution_strategy.name,
            }
        )

    @staticmethod
    def from_json(text: str) -> NdShardSpec:
        found = json.loads(text)
        return NdShardSpec(
            found["shard_shape"],
            CoreRangeSet.from_json(found["grid"]),
            ShardOrientation[found["orientation"]],
            ShardDistributionStrategy[found["shard_distribution_strategy"]],
        )


@dataclass(frozen=True, init=False, eq=False, repr=False)
class MemoryConfig:
    """Which memory, and how a part is spread over it: `(memory_layout, buffer_type, shard_spec)` or
    `(buffer_type, nd_shard_spec)`. That of a tensor has both specs; configs are compared by what they were made with.

    >>> MemoryConfig().interleaved, MemoryConfig(buffer_type=BufferType.L1) == L1_MEMORY_CONFIG
    (True, True)
    >>> MemoryConfig.from_json(L1_BLOCK_SHARDED_MEMORY_CONFIG.to_json()).memory_layout
    TensorMemoryLayout.BLOCK_SHARDED
    """

    memory_layout: TensorMemoryLayout
    buffer_type: BufferType
    shard_spec: ShardSpec | None
    nd_shard_spec: NdShardSpec | None
    created_with_nd_shard_spec: bool
    token: int = field(compare=False)  # the same in configs that are alike in all of this: it stands for one in a key

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        by_dims = "nd_shard_spec" in kwargs or (bool(args) and isinstance(args[0], BufferType))
        found = _of_dims(*args, **kwargs) if by_dims else _of_matrix(*args, **kwargs)
        object.__setattr__(self, "created_with_nd_shard_spec", by_dims)
        for name, value, kind in zip(_FIELDS, found, _KINDS, strict=True):
            if not isinstance(value, kind):
                raise ArgumentError(f"MemoryConfig: {name}={value!r} is a {type(value).__name__}")
            object.__setattr__(self, name, _copy_of(value))
        object.__setattr__(self, "token", _token_of(self))

    @property
    def interleaved(self) -> bool:
        """Whether pages go round the banks."""
        return self.memory_layout is TensorMemoryLayout.INTERLEAVED

    def is_sharded(self) -> bool:
        """Whether cores have a shard each."""
        return self.memory_layout is not TensorMemoryLayout.INTERLEAVED

    def to_json(self) -> str:
        made_with = "nd_shard_spec" if self.created_with_nd_shard_spec else "shard_spec"
        specs = {
            name: spec.to_json() if spec is not None and name == made_with else None for name, spec in self._specs()
        }
        return json.dumps({"memory_layout": self.memory_layout.name, "buffer_type": self.buffer_type.name, **specs})

    def _specs(self) -> list[tuple[str, ShardSpec | NdShardSpec | None]]:
        return [("shard_spec", self.shard_spec), ("nd_shard_spec", self.nd_shard_spec)]

    @staticmethod
    def from_json(text: str) -> MemoryConfig:
        found = json.loads(text)
        kind = BufferType[found["buffer_type"]]
        if found["nd_shard_spec"] is not None:
            return MemoryConfig(kind, NdShardSpec.from_json(found["nd_shard_spec"]))
        spec = None if found["shard_spec"] is None else ShardSpec.from_json(found["shard_spec"])
        return MemoryConfig(TensorMemoryLayout[found["memory_layout"]], kind, spec)

    def _made_with(self) -> tuple[Any, ...]:
        if self.created_with_nd_shard_spec:
            return self.buffer_type, self.nd_shard_spec
        return self.buffer_type, self.memory_layout, self.shard_spec

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, MemoryConfig) and self._made_with() == other._made_with()

    def __hash__(self) -> int:
        return hash(self._made_with())

    def __repr__(self) -> str:
        specs = "".join(f",{name}={'std::nullopt' if spec is None else spec}" for name, spec in self._specs())
        return (
            f"MemoryConfig(memory_layout={spell_choice(self.memory_layout)},buffer_type={spell_choice(self.buffer_type)}"
            f"{specs},created_with_nd_shard_spec={int(self.created_with_nd_shard_spec)},per_core_allocation=0,"
            "range_lockstep_allocation=0)"
        )


def _copy_of(value: Any) -> Any:
    """A spec of the config's own: programs change theirs and use them again."""
    if isinstance(value, ShardSpec):
        return ShardSpec(value.grid, value.shape, value.orientation)
    return copy.copy(value) if isinstance(value, NdShardSpec) else value


_tokens: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count()
TOKENS = 4096  # configs that are known at once; one that is forgotten gets another token


def _token_of(config: MemoryConfig) -> int:
    if len(_tokens) >= TOKENS:
        _tokens.clear()
    told = (config.memory_layout, config.buffer_type, *config._specs(), config.created_with_nd_shard_spec)
    return _tokens.setdefault(told, next(_numbers))


_FIELDS = ("memory_layout", "buffer_type", "shard_spec", "nd_shard_spec")
_KINDS: tuple[Any, ...] = (TensorMemoryLayout, BufferType, (ShardSpec, type(None)), (NdShardSpec, type(None)))


def _of_matrix(
    memory_layout: TensorMemoryLayout = TensorMemoryLayout.INTERLEAVED,
    buffer_type: BufferType = BufferType.DRAM,
    shard_spec: ShardSpec | None = None,
) -> tuple[Any, ...]:
    return memory_layout, buffer_type, shard_spec, None


def _of_dims(buffer_type: BufferType, nd_shard_spec: NdShardSpec) -> tuple[Any, ...]:
    return TensorMemoryLayout.ND_SHARDED, buffer_type, None, nd_shard_spec


DRAM_MEMORY_CONFIG = MemoryConfig()
L1_MEMORY_CONFIG = MemoryConfig(buffer_type=BufferType.L1)
L1_BLOCK_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.BLOCK_SHARDED, BufferType.L1)
L1_HEIGHT_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.HEIGHT_SHARDED, BufferType.L1)
L1_WIDTH_SHARDED_MEMORY_CONFIG = MemoryConfig(TensorMemoryLayout.WIDTH_SHARDED, BufferType.L1)


def row_of(config: MemoryConfig) -> int:
    """The elements that rows are filled up to a multiple of: those of a shard, where cores have shards."""
    if config.shard_spec is not None:
        return config.shard_spec.shape[1]
    return 1 if config.nd_shard_spec is None else config.nd_shard_spec.shard_shape[-1]


@lru_cache(maxsize=4096)
def with_both_specs(config: MemoryConfig, shape: tuple[int, ...]) -> MemoryConfig:
    """The config of a tensor of that padded shape: a spec for matrices has one for many dims beside it, and the other
    way round where the shards are those of a matrix.

    >>> config = create_sharded_memory_config((64, 256), CoreGrid(x=8, y=1), ShardStrategy.WIDTH)
    >>> with_both_specs(config, (64, 256)).nd_shard_spec.shard_shape, with_both_specs(config, (64, 256)) == config
    (Shape([64, 32]), True)
    """
    if config.shard_spec is not None and config.nd_shard_spec is None:
        given = config.shard_spec
        strategies, is_block = ShardDistributionStrategy, config.memory_layout is TensorMemoryLayout.BLOCK_SHARDED
        strategy = strategies.GRID_2D if is_block else strategies.ROUND_ROBIN_1D
        nd = NdShardSpec(given.shape, given.grid, given.orientation, strategy)
        return _completed(config, config.memory_layout, given, nd)
    if config.nd_shard_spec is not None and config.shard_spec is None:
        nd = config.nd_shard_spec
        found = _as_matrix(nd, shape)
        if found is not None:
            layout, sides = found
            return _completed(config, layout, ShardSpec(nd.grid, sides, nd.orientation), nd)
    return config


def _completed(
    config: MemoryConfig, layout: TensorMemoryLayout, spec: ShardSpec | None, nd: NdShardSpec | None
) -> MemoryConfig:
    made: MemoryConfig = object.__new__(MemoryConfig)
    for name, value in zip(_FIELDS, (layout, config.buffer_type, spec, nd), strict=True):
        object.__setattr__(made, name, value)
    object.__setattr__(made, "created_with_nd_shard_spec", config.created_with_nd_shard_spec)
    object.__setattr__(made, "token", _token_of(made))
    return made


def _as_matrix(nd: NdShardSpec, shape: Sequence[int]) -> tuple[TensorMemoryLayout, tuple[int, int]] | None:
    """Shards of many dims as shards of the matrix [all leading dims times height, width]; None where they are none.

    They are if rows stay together: up to some dim a shard has size 1, and behind it all of each dim.
    """
    part = (*(1,) * (len(shape) - len(nd.shard_shape)), *nd.shard_shape)
    if len(part) > len(shape):
        return None
    long = [place for place in range(len(part) - 1) if part[place] != 1]
    if any(part[place] < shape[place] for place in range(long[0] + 1 if long else 0, len(part) - 1)):
        return None
    height, width = math.prod(shape[:-1]), shape[-1]
    sides = math.prod(part[:-1]), part[-1]
    cores = nd.grid.num_cores()
    if sides[1] >= width and -(-height // sides[0]) <= cores:
        return TensorMemoryLayout.HEIGHT_SHARDED, sides
    if sides[0] >= height and -(-width // sides[1]) <= cores:
        return TensorMemoryLayout.WIDTH_SHARDED, sides
    if nd.shard_distribution_strategy is ShardDistributionStrategy.GRID_2D:
        return TensorMemoryLayout.BLOCK_SHARDED, sides
    return None


def share_of_bank(config: MemoryConfig, shape: Sequence[int]) -> int | None:
    """The elements that the fullest core has of a tensor of that shape; None where pages go round all banks.

    >>> config = create_sharded_memory_config((64, 256), CoreGrid(x=8, y=1), ShardStrategy.WIDTH)
    >>> share_of_bank(config, (64, 256)), share_of_bank(DRAM_MEMORY_CONFIG, (64, 256))
    (2048, None)
    """
    spec = config.shard_spec or config.nd_shard_spec
    if spec is None or config.interleaved:
        return None
    part = spec.shape if isinstance(spec, ShardSpec) else spec.shard_shape
    sizes = (1,) * (len(part) - len(shape)) + tuple(shape)
    first = len(sizes) - len(part) + 1  # dims in front count as one with the first that is cut
    whole = (math.prod(sizes[:first]), *sizes[first:])
    shards = math.prod(-(-size // side) for size, side in zip(whole, part, strict=True))
    return math.prod(part) * -(-shards // spec.num_cores())


_LAYOUTS = {
    ShardStrategy.HEIGHT: TensorMemoryLayout.HEIGHT_SHARDED,
    ShardStrategy.WIDTH: TensorMemoryLayout.WIDTH_SHARDED,
    ShardStrategy.BLOCK: TensorMemoryLayout.BLOCK_SHARDED,
}


def create_sharded_memory_config(
    shape: Sequence[int],
    core_grid: Grids,
    strategy: ShardStrategy,
    orientation: ShardOrientation | None = None,
    use_height_and_width_as_shard_shape: bool = False,
) -> MemoryConfig:
    """A config in L1 that cuts a tensor, seen as [all leading dims times height, width], over a grid of cores.

    >>> create_sharded_memory_config((1, 1, 64, 768), CoreCoord(12, 1), ShardStrategy.WIDTH).shard_spec.shape
    [64, 64]
    >>> create_sharded_memory_config((2, 64, 128), CoreGrid(x=4, y=2), ShardStrategy.BLOCK).shard_spec.shape
    [64, 32]
    """
    if not use_height_and_width_as_shard_shape:
        if isinstance(core_grid, CoreRangeSet):
            raise OperandError(
                "height and width must be shard shape with CoreRangeSet",
                fix="use_height_and_width_as_shard_shape=True, or give a CoreGrid",
            )
        height, width, cores = math.prod(shape[:-1]), shape[-1], _grid_of(core_grid)
        down, across = _cuts(_strategy(strategy), cores, orientation is ShardOrientation.COL_MAJOR)
        if height % down or width % across:
            raise OperandError(
                f"Invalid sharding core_grid: {height} rows over {down} and {width} columns over {across}",
                shape=list(shape),
                grid=cores,
                fix="a grid whose sides divide the tensor, or shard shapes of your own with a CoreRangeSet",
            )
    return create_sharded_memory_config_(
        shape, core_grid, _strategy(strategy), orientation, use_height_and_width_as_shard_shape
    )


def create_sharded_memory_config_(
    shape: Sequence[int],
    core_grid: Grids,
    strategy: ShardStrategy | TensorMemoryLayout,
    orientation: ShardOrientation | None = None,
    use_height_and_width_as_shard_shape: bool = False,
    tile_layout: bool = False,
) -> MemoryConfig:
    """As `create_sharded_memory_config`, but what does not divide is rounded up; with tiles, the tensor is first.

    >>> create_sharded_memory_config_((1, 100, 64), CoreGrid(x=8, y=1), ShardStrategy.HEIGHT).shard_spec.shape
    [13, 64]
    """
    layout = strategy if isinstance(strategy, TensorMemoryLayout) else _LAYOUTS[_strategy(strategy)]
    known = next((each for each, meant in _LAYOUTS.items() if meant is layout), None)
    if known is None:
        raise OperandError(f"{layout} does not shard a matrix", fix="HEIGHT_SHARDED, WIDTH_SHARDED or BLOCK_SHARDED")
    turned, cores = orientation is ShardOrientation.COL_MAJOR, _grid_of(core_grid)
    if use_height_and_width_as_shard_shape:
        part = (shape[-1], shape[-2]) if turned else (shape[-2], shape[-1])
    else:
        down, across = _cuts(known, cores, turned)
        side = TILE_SIZE if tile_layout else 1
        height, width = (-(-size // side) * side for size in (math.prod(shape[:-1]), shape[-1]))
        part = (-(-height // down), -(-width // across))
    spec = ShardSpec(cores, part, orientation or ShardOrientation.ROW_MAJOR)
    return MemoryConfig(layout, BufferType.L1, spec)


def _strategy(given: object) -> ShardStrategy:
    if not isinstance(given, ShardStrategy):
        raise OperandError(f"Invalid sharding strategy {given!r}", fix="ttnn.ShardStrategy.HEIGHT, WIDTH or BLOCK")
    return given


def _grid_of(given: Any) -> CoreRangeSet:
    """A grid in any of its spellings as a set: a CoreGrid, the size that a device tells, a range, a set."""
    if isinstance(given, CoreRangeSet):
        return given
    if isinstance(given, CoreRange):
        return CoreRangeSet([given])
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(each, int) for each in given):
        given = CoreGrid(x=given[0], y=given[1])
    if isinstance(given, (tuple, list)) and given:
        return CoreRangeSet([each for grid in given for each in _grid_of(grid).ranges()])
    if not all(isinstance(getattr(given, name, None), int) for name in "xy"):
        raise OperandError(f"Invalid core_grid type {type(given).__name__}", fix="ttnn.CoreGrid(x=8, y=8)")
    return CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(given.x - 1, given.y - 1))])


def _cuts(strategy: ShardStrategy, cores: CoreRangeSet, turned: bool) -> tuple[int, int]:
    """Into how many pieces height and width are cut."""
    if strategy is ShardStrategy.HEIGHT:
        return cores.num_cores(), 1
    if strategy is ShardStrategy.WIDTH:
        return 1, cores.num_cores()
    size = cores.bounding_box().grid_size()
    return (size.x, size.y) if turned else (size.y, size.x)
