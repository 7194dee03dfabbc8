"""The tensor of the per-device view: `shape` is what one device holds.

It has a block (see `parts`), a format, a label that says how the parts make up a whole, and on a device room in memory
with one address on all devices. A tensor on the host may know the mesh that it is meant for (`home`): the first op that
computes with it moves it there. Operators and conversions are ops and are looked up in the table by name.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy
import torch

from meshloom.engines.private import disable_current_modes
from meshloom.errors import ArgumentError, BoundsError, OperandError, TraceError
from meshloom.runtime import MeshCoordinate, state
from meshloom.runtime.card_array import CardArray, lay_block, to_host
from meshloom.runtime.memory import Region
from meshloom.ttnn import surface
from meshloom.ttnn.device import queues
from meshloom.ttnn.refusal_levels import refuse, refuse_if
from meshloom.ttnn.tensor.boxes import gather_parts, held_shape, place_here, unseen_axes
from meshloom.ttnn.tensor.formats import TILE_SIZE, DataType, Layout, Shape, Tile, bytes_of, padded_shape
from meshloom.ttnn.tensor.hostbuffer import DistributedHostBuffer
from meshloom.ttnn.tensor.memory import (
    DRAM_MEMORY_CONFIG,
    BufferType,
    MemoryConfig,
    Room,
    TensorMemoryLayout,
    room_on,
    row_of,
    share_of_bank,
    with_both_specs,
)
from meshloom.ttnn.tensor.parts import Block, part
from meshloom.ttnn.tensor.sharding import flaw_of_shards
from meshloom.ttnn.tensor.specs import StorageType, TensorSpec
from meshloom.ttnn.tensor.topology import REPLICATE, UNKNOWN, TensorTopology

if TYPE_CHECKING:
    from meshloom.ttnn.device.mesh_device import MeshDevice

__all__ = ["Tensor"]

TILE = Tile()
PAGE_ALIGNMENT = {BufferType.DRAM: 32}  # bytes; 16 in all other memories
next_id = count().__next__


@cache
def _op(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = surface.find(name)
    return found


def _operator(name: str) -> Callable[..., Tensor]:
    def call(*operands: Any) -> Tensor:
        found: Tensor = _op(name)(*operands)
        return found

    return call


class Owner:
    """Whose memory it is; a text only when somebody reads it."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, shape

    def __str__(self) -> str:
        return f"tensor {self.dtype.name} {list(self.shape)}"


_bytes_known: dict[tuple[Any, ...], int] = {}  # with the usual tile; enum members are told by their value


def _bytes(shape: tuple[int, ...], dtype: DataType, layout: Layout, tile: Tile) -> int:
    """The bytes that a device needs for its part."""
    key = (shape, dtype._value_, layout._value_)
    found = _bytes_known.get(key) if tile is TILE else None
    if found is None:
        found = bytes_of(math.prod(padded_shape(shape, layout, tile)), dtype)
        if tile is TILE and len(_bytes_known) < 4096:
            _bytes_known[key] = found
    return found


def bytes_on(
    memory: MemoryConfig, shape: tuple[int, ...], dtype: DataType, layout: Layout, tile: Tile
) -> tuple[int, bool]:
    """The bytes that a device needs for its part in a memory, and whether it needs them in every bank."""
    if memory.memory_layout is not TensorMemoryLayout.INTERLEAVED:
        share = share_of_bank(memory, padded_shape(shape, layout, tile, row_of(memory)))
        if share is not None:
            return bytes_of(share, dtype), True
    return _bytes(shape, dtype, layout, tile), False


def lie(block: Block, device: MeshDevice | None) -> Block:
    """A block where its tensor is: on the cards of a device that have memory of their own, or here."""
    store = None if device is None else device.runtime.lease.store
    return lay_block(block, store) if store is not None else to_host(block)


class _Making(type):
    """Ops make tensors from a block and its grid; people from data, as TTNN's constructors take it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 4 and isinstance(args[1], tuple) and isinstance(args[0], torch.Tensor):
            return super().__call__(*args, **kwargs)
        return import_module("meshloom.ttnn.tensor.converting").from_data(*args, **kwargs)


class Tensor(metaclass=_Making):
    """What every device of a mesh holds, all of one shape; on the host or in the devices' memory.

    >>> from meshloom import ttnn
    >>> x = ttnn.Tensor([1.0, 2.0, 3.0, 4.0], [2, 2], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT)
    >>> x.shape, x.dtype, x.to_list()
    (Shape([2, 2]), DataType.FLOAT32, [[1.0, 2.0], [3.0, 4.0]])
    """

    __slots__ = (
        "__weakref__ _block _coords _device _form _grid _memory _pad _pinned _relabelled _room _shape _sharers "
        "_topology dtype home layout tensor_id tile"
    ).split()

    _block: Block | None
    _coords: tuple[MeshCoordinate, ...] | None
    _form: object | None  # what `form_of` gave; None when something of it has changed
    _room: Room | None
    _sharers: dict[int, Sharer] | None
    _relabelled: tuple[Block, Block]  # by a reshape: the block, and the one with its padding that it is a view of

    def __init__(
        self,
        block: Block,
        grid: Sequence[int],
        dtype: DataType,
        layout: Layout,
        topology: TensorTopology,
        device: MeshDevice | None = None,
        memory_config: MemoryConfig = DRAM_MEMORY_CONFIG,
        tile: Tile = TILE,
        pad_value: float = 0.0,
        coords: tuple[MeshCoordinate, ...] | None = None,
        room: Room | None = None,
        home: MeshDevice | None = None,
    ) -> None:
        if block.__class__ is CardArray or (device is not None and device.runtime.lease.store is not None):
            block = lie(block, device)
        self._block, self.dtype, self.layout, self.tile = block, dtype, layout, tile
        self._grid = grid if isinstance(grid, tuple) else tuple(grid)
        self._topology, self._device, self._memory, self._pad = topology, device, memory_config, pad_value
        self._coords = coords  # the devices that hold a part; None means all
        self.home = device or home
        self._pinned = False
        self._sharers = self._form = None
        self.tensor_id = next_id()
        self._room = room if room is not None or device is None else self._allocate(device)
        if state.capture is not None and device is not None:
            self._pinned = True
            queues.note_use(self._room)

    def _allocate(self, device: MeshDevice) -> Room:
        shape = self._block.shape[len(self._grid) :]  # type: ignore[union-attr]
        if self._memory.memory_layout is not TensorMemoryLayout.INTERLEAVED:
            flaw = self.flaw_of_shards()
            if flaw is not None:
                refuse(flaw, "give another shard spec")
        size, per_bank = bytes_on(self._memory, shape, self.dtype, self.layout, self.tile)
        if self._block.__class__ is CardArray:  # its memory is counted already: an address is all that is missing
            size = 0
        made = room_on(device, self._memory.buffer_type, size, Owner(self.dtype, shape), per_bank)
        queues.note_allocation(device, made.region)
        return made

    def __copy__(self) -> Tensor:
        """Another name for the same parts."""
        made: Tensor = object.__new__(Tensor)
        for name in self.__slots__:
            if name != "__weakref__" and hasattr(self, name):
                setattr(made, name, getattr(self, name))
        made._sharers = None
        return self.shared_by(made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = self._like(self.block.clone())
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its parts, format and label, as in a file; the mesh stays here, so it is read back on the host."""
        return import_module("meshloom.ttnn.tensor.files").pack(self)

    # shape and format

    @property
    def shape(self) -> Shape:
        """What one device holds, without the padding of tiles. It stays readable after `deallocate`."""
        block = self._block
        return Shape(block.shape[len(self._grid) :]) if block is not None else self._shape

    @property
    def padded_shape(self) -> Shape:
        """What one device holds, with the padding of tiles, and what was made padding by hand."""
        sizes: Sequence[int] = self.shape
        if hasattr(self, "_relabelled") and self._relabelled[0] is self._block:
            sizes = self._relabelled[1].shape[len(self._grid) :]
        return Shape(padded_shape(sizes, self.layout, self.tile, self._row()))

    def _row(self) -> int:
        return 1 if self._memory.memory_layout is TensorMemoryLayout.INTERLEAVED else row_of(self._memory)

    @property
    def block(self) -> Block:
        """What all devices hold: mesh axes first, 1 where they hold the same. Shares memory."""
        if self._block is None or (self._room is not None and self._room.region.freed):
            raise OperandError(
                f"a tensor of {self.dtype.name} {list(self.shape)} is not allocated",
                fix="it was deallocated: make it again, or deallocate later",
            )
        return self._block

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the mesh that the parts lie on, those of other processes included (see `boxes`)."""
        return self._grid

    @property
    def spec(self) -> TensorSpec:
        """Shape, dtype, layout and memory: what `allocate_tensor_on_device` takes."""
        return TensorSpec.of(self)

    def get_dtype(self) -> DataType:
        return self.dtype

    def get_layout(self) -> Layout:
        return self.layout

    def get_tile(self) -> Tile:
        return self.tile

    def memory_config(self) -> MemoryConfig:
        """Where a device keeps its part."""
        if self._memory.memory_layout is TensorMemoryLayout.INTERLEAVED:
            return self._memory
        return with_both_specs(self._memory, tuple(self.padded_shape))

    def flaw_of_shards(self) -> str | None:
        """Why the original refuses its shards, if it does."""
        return flaw_of_shards(self._memory, tuple(self.padded_shape), self.layout, self.tile)

    def is_sharded(self) -> bool:
        """Whether a device spreads its part over cores by a shard shape."""
        return self._memory.is_sharded()

    def volume(self) -> int:
        """The elements of one device, padding of tiles included."""
        return math.prod(self.padded_shape)

    def logical_volume(self) -> int:
        """The elements of one device."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """The bytes of one element; a block float's are those of its mantissa."""
        return max(1, bytes_of(16, self.dtype) // 16)

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentError("a tensor without dims has no length")
        return self.shape[0]

    # where it is

    def storage_type(self) -> StorageType:
        return StorageType.HOST if self._device is None else StorageType.DEVICE

    def device(self) -> MeshDevice | None:
        """The mesh that it is on; None on the host."""
        return self._device

    def devices(self) -> list[MeshDevice]:
        """The mesh that it is on, in a list."""
        return [self._device] if self._device is not None else []

    def device_coords(self) -> list[MeshCoordinate]:
        """The devices that hold a part."""
        return list(self._coords) if self._coords is not None else [MeshCoordinate(place) for place in self._places()]

    def _places(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self._grid))

    def tensor_topology(self) -> TensorTopology:
        """How the parts make up a whole."""
        return self._topology

    def update_tensor_topology(self, topology: TensorTopology) -> None:
        """Say how the parts make up a whole."""
        if not isinstance(topology, TensorTopology):
            raise ArgumentError(f"{topology!r} is not a TensorTopology")
        if topology is not self._topology:
            self._topology, self._form = topology, None

    topology = tensor_topology  # as meshloom's guide spells it

    # memory

    def is_allocated(self) -> bool:
        return self._block is not None and not (self._room is not None and self._room.region.freed)

    def deallocate(self, force: bool = False) -> None:
        """Give its memory back, at once with `force`, else when the last tensor that shares it is gone."""
        if self._block is None:
            return
        self._shape, self._block, self._form = self.shape, None, None
        room, self._room = self._room, None
        if force and room is not None:
            room.free()

    def _region(self) -> Region:
        self.block  # noqa: B018  an error if it is gone
        if self._room is None:
            raise OperandError("a tensor on the host has no buffer", fix="ttnn.to_device(tensor, mesh_device)")
        return self._room.region

    def buffer_address(self) -> int:
        """Its address, the same on all devices."""
        return self._region().address

    def buffer_unique_id(self) -> int:
        """A number that no other allocation of this process has."""
        return self._region().number

    def buffer_page_size(self) -> int:
        """The bytes of a page: a tile, or a row."""
        if self.layout is Layout.TILE:
            return self.tile.get_tile_size(self.dtype)
        spec = getattr(self._memory, "shard_spec", None)
        width = spec.shape[-1] if spec is not None else self.padded_shape[-1]
        return bytes_of(width, self.dtype)

    def buffer_aligned_page_size(self) -> int:
        """The bytes that a page takes."""
        alignment = PAGE_ALIGNMENT.get(self._memory.buffer_type, 16)
        return -(-self.buffer_page_size() // alignment) * alignment

    def buffer_num_pages(self) -> int:
        """The pages of one device."""
        size = self.buffer_page_size()
        return -(-bytes_of(self.volume(), self.dtype) // size) if size else 0

    def is_per_core_allocated(self) -> bool:
        """Whether every core has an address of its own: never, all share one."""
        return False

    def is_range_lockstep_allocated(self) -> bool:
        """Whether all devices have it at one address."""
        return self._room is not None

    def experimental_per_core_buffer_address(self, device_coord: Sequence[int], core: Any) -> int:
        """The address on a core of a device: the same on all."""
        return self.buffer_address()

    # moving, for the modules of this room

    def settle(self) -> None:
        """Go from the host to the mesh that it knows: what the first op that computes with it does.

        It gets memory of its own there, so that tensors of the host that are views of it stay as they are.
        """
        assert self._device is None and self.home is not None
        block = self.block
        is_outside = state.capture is not None and not state.capture.makes(block)  # of a trace: replays must not copy
        with disable_current_modes() if is_outside else nullcontext():
            self._block = lie(block.clone(memory_format=torch.contiguous_format), self.home)
        self._room = self._allocate(self.home)
        self._device, self._form = self.home, None

    def pin(self) -> None:
        """A trace refers to its array: from now on that stays where it is."""
        self._pinned = True

    def shared_by(self, view: Tensor, place: Sequence[int] | None = None) -> Tensor:
        """A view of its parts, or of the part at a coordinate, which will follow it to another array (`grow`)."""
        block = self.block
        if block.shape[: len(self._grid)] == held_shape(self._grid) and block.is_contiguous():
            return view  # it stays where it is
        sharers = self._sharers
        if sharers is None:
            sharers = self._sharers = {}
            _add_sharer(sharers, self, None)
        inherited = sharers[id(self)][1]
        _add_sharer(sharers, view, place if inherited is None else inherited)
        view._sharers = sharers
        return view

    def sharers(self) -> list[tuple[Tensor, Sequence[int] | None]]:
        """The other tensors of its memory that may have to follow it, each with the coordinate of its only part."""
        if self._sharers is None or self._sharers[id(self)][1] is not None:
            return []
        listed = [(ref(), place) for ref, place in self._sharers.values()]
        return [(each, place) for each, place in listed if each is not None and each is not self]

    def grow(self, block: Block) -> None:
        """Take on another array, in which more devices have a part of their own. Tensors of its memory follow, and what
        their labels said was the same along an axis is so no more."""
        axes, before = len(self._grid), self.block.shape
        grown = [old < new for old, new in zip(before[:axes], block.shape[:axes], strict=True)]
        if hasattr(self, "_relabelled") and self._relabelled[0] is self._block:  # with the rows that are padding here
            rows = self._relabelled[1]
            whole = rows.expand(*block.shape[:axes], *rows.shape[axes:]).clone()
            whole[_inside(self.shape)] = block
            block = whole
        self._see(block)
        for each, place in self.sharers():
            if each._block is None:
                continue
            if place is None:
                each._see(block)
                each.update_tensor_topology(_tell_apart(each._topology, grown))
            else:
                each._block = part(block, place).reshape(each._block.shape)
                each._form = None

    def _see(self, block: Block) -> None:
        """Be a view of another array: the same elements in its own shape, or those that a reshape made padding of."""
        lead, self._form = block.shape[: len(self._grid)], None
        if hasattr(self, "_relabelled") and self._relabelled[0] is self._block:
            rows = block.reshape(*lead, *self._relabelled[1].shape[len(lead) :])
            seen = rows[_inside(self.shape)]
            self._block, self._relabelled = seen, (seen, rows)
        else:
            self._block = block.reshape(*lead, *self.shape)

    def write(
        self, values: Block, places: Sequence[Sequence[int]] | None = None, label: TensorTopology | None = None
    ) -> None:
        """Take on other values, in place; only on the devices that it lies on, or on some of them. An array that held
        the same for all devices grows where they now differ. `label` is that of the values, if all devices have one."""
        axes = len(self._grid)
        if self._sharers is not None:
            self.tell_sharers_apart(label if places is None else None)
        if places is None or places == self._coords:
            places = self._coords
            is_alone = self._sharers is None and all(size == 1 for size in self.block.shape[:axes])
            if places is None or is_alone:
                self._give_parts(values.shape[:axes]).copy_(values)
                return
        before, room = self.block, self._give_parts(held_shape(self._grid))
        if room is not before:
            room.copy_(before)
        for place in places:
            here = place_here(self._grid, place)
            if here is not None:
                part(room, here).copy_(part(values, here))

    def tell_sharers_apart(self, label: TensorTopology | None = None) -> None:
        """It is about to get other values: what labels of tensors of its memory said was the same along an axis may be
        so no more on other processes, which is not seen here. `label` is that of the values, if it is known."""
        apart = unseen_axes(self._grid, label)
        if any(apart):
            for each, _ in self.sharers():
                each.update_tensor_topology(_tell_apart(each._topology, apart))

    def _give_parts(self, sizes: Sequence[int]) -> Block:
        """Its array with at least these mesh axes; a new one, with nothing in it, if it has to grow."""
        room, axes = self.block, len(self._grid)
        if any(have < need for have, need in zip(room.shape[:axes], sizes, strict=True)):
            pinned = self._pinned or any(each._pinned for each, _ in self.sharers())
            if pinned and not (state.capture is not None and state.capture.makes(room)):
                raise TraceError(
                    "a trace was captured while all devices held the same in this tensor, and now they would differ",
                    fix="make it with ttnn.allocate_tensor_on_device before the capture, or shard it from the start",
                )
            lead = tuple(map(max, room.shape[:axes], sizes))
            room = torch.empty((*lead, *room.shape[axes:]), dtype=room.dtype)
            self.grow(room)
        return room

    def wait(self) -> None:
        """Return when what was queued on its mesh is done, for the host is about to read it."""
        if self._device is not None:
            queues.transfer(self, None, writes=False)

    # values

    def cpu(self, blocking: bool = True, cq_id: int | None = None) -> Tensor:
        """A copy on the host, with the same parts."""
        found: Tensor = _op("from_device")(self, blocking, queue_id=cq_id)
        return found

    def to(self, target: Any, mem_config: MemoryConfig | None = None, cq_id: int | None = None) -> Tensor:
        """On a mesh, in a layout, a dtype or a memory config."""
        found: Tensor = _op("to")(self, target, mem_config, cq_id=cq_id)
        return found

    def to_torch(self, mesh_composer: Any = None) -> torch.Tensor:
        """The whole as a torch tensor, put together by a composer or by what the label says."""
        found: torch.Tensor = _op("to_torch")(self, mesh_composer=mesh_composer)
        return found

    def to_numpy(self, mesh_composer: Any = None) -> numpy.ndarray:
        """The whole as a numpy array; bfloat16, which numpy lacks, as float32."""
        found = self.to_torch(mesh_composer)
        return (found.float() if found.dtype is torch.bfloat16 else found).numpy()

    def to_torch_with_padded_shape(self) -> torch.Tensor:
        """The whole, every part with the padding of its tiles."""
        return self._like(self._pad_tiles(self._pad), layout=Layout.ROW_MAJOR).to_torch()

    def to_list(self) -> Any:
        return self.to_torch().tolist()

    def item(self) -> Any:
        """The value of a tensor with one element that all devices agree on."""
        self.block  # noqa: B018  an error if it is gone
        if self.logical_volume() != 1:
            raise OperandError(f"a tensor of shape {list(self.shape)} has no single item", fix="index it first")
        self.wait()
        values = gather_parts(self).block.reshape(-1)
        if values.numel() > 1 and not bool((values == values[0]).all()):
            raise OperandError("the devices hold different values", fix="ttnn.get_device_tensors(x)[i].item()")
        return values[0].item()

    def device_bytes(self, coordinate: Sequence[int] | None = None) -> bytes:
        """What a device keeps for its part, byte by byte: rows, or tiles face by face, block floats packed."""
        found: bytes = import_module("meshloom.ttnn.tensor.device_bytes").read(self, coordinate)
        return found

    def host_buffer(self) -> DistributedHostBuffer:
        """The parts of a tensor on the host, by coordinate."""
        if self._device is not None:
            raise OperandError("a tensor on devices has no host buffer", fix="x.cpu().host_buffer()")
        return DistributedHostBuffer(self.block, self._grid, self._coords)

    def part(self, place: Sequence[int]) -> Block:
        """What the device at a coordinate holds, a view."""
        here = place_here(self._grid, place)
        if here is None:
            raise OperandError(
                f"another process holds the device at {tuple(place)}",
                fix="ttnn.to_torch(x), which gathers, or ttnn.get_device_tensors(x) on all processes",
            )
        return part(self.block, here)

    def extract_shard(self, core: Any) -> Tensor:
        """What a core holds of the part of its device, on the host: by coordinate of the core or its number."""
        spec = getattr(self._memory, "shard_spec", None)
        if spec is None:
            raise OperandError("only a tensor that is sharded over cores has shards", memory=self._memory)
        self.wait()
        cores = _op("corerange_to_cores")(spec.grid, None, spec.orientation.name == "ROW_MAJOR")
        number = core if isinstance(core, int) else next((i for i, each in enumerate(cores) if each == core), -1)
        if not 0 <= number < len(cores):
            raise BoundsError(f"core {core} holds no shard", cores=spec.grid)
        height, width = spec.shape
        padded = self._pad_tiles(self._pad)
        axes = len(self._grid)
        flat = padded.reshape(*padded.shape[:axes], -1, padded.shape[-1])
        across = -(-flat.shape[-1] // width)
        row, column = divmod(number, across)
        cut = flat[..., row * height : (row + 1) * height, column * width : (column + 1) * width]
        return Tensor(cut.clone(), self._grid, self.dtype, self.layout, self._topology, home=self.home, tile=self.tile)

    # padding by hand

    def _like(self, block: Block, **other: Any) -> Tensor:
        """A block with the format, label and place of this tensor, but for what is said."""
        kept: dict[str, Any] = {
            "grid": self._grid,
            "dtype": self.dtype,
            "layout": self.layout,
            "topology": self._topology,
            "device": self._device,
            "memory_config": self._memory,
            "tile": self.tile,
            "pad_value": self._pad,
            "coords": self._coords,
            "room": None,
            "home": self.home,
        }
        return Tensor(block, *(kept | other).values())

    def _with_padding(self) -> Block:
        """The block with what a reshape or `pad` made padding."""
        block = self.block
        return self._relabelled[1] if hasattr(self, "_relabelled") and self._relabelled[0] is block else block

    def _pad_tiles(self, value: float) -> Block:
        block, sizes = self._with_padding(), tuple(self.padded_shape)
        lead, held = block.shape[: len(self._grid)], block.shape[len(self._grid) :]
        block = block.reshape(*lead, *(1,) * (len(sizes) - len(held)), *held)
        return _grow(block, sizes, (0,) * len(sizes), value)

    def pad(self, output_shape: Sequence[int], input_start: Sequence[int], value: float) -> Tensor:
        """Inside a larger shape, the rest filled: that is padding, and the shape stays. From another place than the
        corner on, what is put in front counts as elements. Tiles have the padding that they have."""
        refuse_if(self._device is not None, "Tensor must be on host for padding", "use ttnn.pad")
        if self.layout is Layout.TILE:
            return self
        filled = _grow(self.block, output_shape, input_start, value)
        return self._like(filled) if any(input_start) else self._inside_of(filled)

    def _inside_of(self, filled: Block) -> Tensor:
        """The tensor in the corner of a larger block, whose other elements are padding."""
        seen = filled[_inside(self.shape)]
        made = self._like(seen)
        made._relabelled = (seen, filled)
        return made

    def unpad(self, start: Sequence[int], end: Sequence[int]) -> Tensor:
        """The box from a place to another, without the end; padding may be in it."""
        refuse_if(self._device is not None, "Tensor must be on host for unpadding", "use ttnn.slice")
        refuse_if(self.layout is not Layout.ROW_MAJOR, "Tensor layout must be ROW_MAJOR for unpadding")
        block = self._with_padding()
        box: tuple[Any, ...] = (..., *(slice(a, b) for a, b in zip(start, end, strict=True)))
        return self._like(block[box].clone())

    def pad_to_tile(self, value: float) -> Tensor:
        """As large as its tiles, the rest filled: the shape stays."""
        sizes = padded_shape(self.shape, Layout.TILE, self.tile)
        if len(sizes) > len(self.shape) and self.layout is Layout.ROW_MAJOR:  # of a vector: rows are put in front
            return self._like(_grow(self.block, sizes, (0,) * len(sizes), value))
        return self.pad(sizes, (0,) * len(sizes), value)

    def unpad_from_tile(self, output_shape: Sequence[int]) -> Tensor:
        """Cut to a shape."""
        is_whole = not any(size % TILE_SIZE for size in self.padded_shape[-2:])
        refuse_if(not is_whole, "Last 2 dims of input shape must be multiples of 32", "use unpad")
        return self.unpad((0,) * len(self.shape), output_shape)

    def reshape(self, *shape: Any) -> Tensor:
        """In another shape with as many elements."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        found: Tensor = _op("reshape")(self, sizes)
        return found

    # operators

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("multiply")
    __sub__, __rsub__ = _operator("subtract"), _operator("rsub")
    __truediv__, __rtruediv__ = _operator("divide"), _operator("rdiv")
    __pow__, __matmul__, __neg__ = _operator("pow"), _operator("matmul"), _operator("neg")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __hash__ = object.__hash__
    __iter__ = None  # a loop over `[]` would cut it up row by row

    def __bool__(self) -> bool:
        """There is one: `if tensor:` asks no more, as in TTNN. `item()` reads the value."""
        return True

    def __getitem__(self, index: Any) -> Tensor:
        starts, ends, steps, gone = _box(index, self.shape)
        found: Tensor = _op("slice")(self, starts, ends, steps)
        return _op("squeeze")(found, gone) if gone else found

    def __repr__(self) -> str:
        return str(import_module("meshloom.ttnn.tensor.printing").text(self))


def form_of(tensor: Tensor) -> object | None:
    """What stands for all that decisions about a tensor depend on: shape, dtype, layout, label, grid, memory and the
    devices that it lies on. Tensors that are alike in all of it have one. None without a block or the usual tile, and
    on a mesh that processes split."""
    block = tensor._block
    if block is None or tensor.tile is not TILE or tensor._grid.__class__ is not tuple:
        return None
    told = (
        block.shape, tensor.dtype._value_, tensor.layout._value_, tensor._topology, tensor._grid,
        tensor._memory.token, tensor._coords,
    )  # fmt: skip
    found = _forms.get(told)
    if found is None:
        if len(_forms) >= FORMS:
            _forms.clear()
        found = _forms.setdefault(told, object())
    tensor._form = found
    return found


_forms: dict[tuple[Any, ...], object] = {}
FORMS = 4096  # that are known at once; one that is forgotten gets another object

Sharer = tuple["weakref.ref[Tensor]", Sequence[int] | None]


def _add_sharer(sharers: dict[int, Sharer], tensor: Tensor, place: Sequence[int] | None) -> None:
    """Keep a tensor among those of one memory for as long as it is there."""
    number = id(tensor)
    sharers[number] = weakref.ref(tensor, lambda _: sharers.pop(number, None)), place


def _tell_apart(topology: TensorTopology, grown: Sequence[bool]) -> TensorTopology:
    """A label, after devices along some mesh axes got parts of their own that it does not know of."""
    placements = topology.placements()
    axes = grown if len(placements) == len(grown) else [any(grown)] * len(placements)
    told = zip(placements, axes, strict=True)
    return topology.with_placements([UNKNOWN if wrong and each == REPLICATE else each for each, wrong in told])


def _grow(block: Block, shape: Sequence[int], start: Sequence[int], value: float) -> Block:
    """A block whose parts lie inside a larger shape from a place on."""
    ends: list[int] = []
    for size, first, have in zip(reversed(shape), reversed(start), reversed(block.shape), strict=False):
        ends += [first, size - first - have]
    return torch.nn.functional.pad(block, ends, value=value)


Box = tuple[list[int], list[int], list[int], list[int]]


def _box(index: Any, shape: Shape) -> Box:
    """An index as starts, ends, steps of a slice, and the dims that numbers take away.

    >>> _box((0, Ellipsis, slice(1, None)), Shape([2, 3, 4]))
    ([0, 0, 1], [1, 3, 4], [1, 1, 1], [0])
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(each is Ellipsis for each in given) > 1:
        raise BoundsError("an index can only have a single ellipsis ('...')")
    named = len(given) - (Ellipsis in given)
    if named > len(shape):
        raise BoundsError(f"{named} indices for a tensor of {len(shape)} dims")
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    full = given[:at] + [slice(None)] * (len(shape) - named) + given[at + 1 :]
    starts, ends, steps, gone = [], [], [], []
    for dim, (each, size) in enumerate(zip(full, shape, strict=True)):
        if isinstance(each, slice):
            start, end, step = each.indices(size)
        elif isinstance(each, int) and -size <= each < size:
            start, end, step = each % size, each % size + 1, 1
            gone.append(dim)
        elif isinstance(each, int):
            raise BoundsError(f"index {each} is out of bounds for dim {dim} of size {size}")
        else:
            raise ArgumentError(f"{each!r} cannot index a tensor", fix="use numbers, slices and ...")
        starts.append(start)
        ends.append(end)
        steps.append(step)
    return starts, ends, steps, gone


def _inside(shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of the first elements of the last dims."""
    return (..., *(slice(size) for size in shape))
