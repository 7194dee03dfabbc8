"""Between the host and buffers: one array call on the block where that will do, else card by card."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.comms import WORLD, group_of, wire
from meshloom.engines.layout import torch_dtype
from meshloom.engines.private import disable_current_modes
from meshloom.errors import ArgumentError, DTypeError, PlacementError, ShapeError
from meshloom.mesh import Coordinate
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.card import Card
from meshloom.runtime.card_array import borrow
from meshloom.runtime.layouts import need_topology
from meshloom.runtime.storage import Block


def host_value(data: object, shape: tuple[int, ...], dtype: str, what: str) -> torch.Tensor:
    """Host data of exactly that shape and dtype, with memory of its own: the caller may change his at once."""
    with disable_current_modes():  # while a trace is captured on one queue, others go on
        try:
            value = torch.as_tensor(data).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"a {type(data).__name__} cannot be written", reason=error) from None
        if tuple(value.shape) != shape:
            raise ShapeError(f"{what} takes {dtype}{list(shape)} and got shape {list(value.shape)}")
        wanted = torch_dtype(dtype)
        if value.is_complex() and not wanted.is_complex:
            raise DTypeError(
                f"{what} holds {dtype} and got complex numbers", fix="write x.real, or make it dtype='c64'"
            )
        return value.to(wanted, copy=True, memory_format=torch.contiguous_format)


def write_all(buffer: MeshBuffer, value: torch.Tensor, queue: int) -> None:
    """Write the whole: the same to every device, or to each its shard."""
    system, storage = buffer.device.system, buffer.storage
    if system.is_vectorised and isinstance(storage, Block):
        if storage.data is not None and not buffer.device.mesh.is_split:
            storage.data.copy_(value)
        elif buffer.layout.is_replicated:
            storage.block.copy_(value)
        else:
            for place in buffer.device.mesh.local_coordinates():
                part = buffer.layout.part(place)
                if part is not None:
                    storage.at(place).copy_(value[part])
        system.tell("write", buffer.device.mesh.local_coordinates(), buffer.size, queue, _writers(buffer))
        return

    def write(place: Coordinate, card: Card) -> None:
        part = buffer.layout.part(place)
        if part is not None:
            card.write(buffer.storage.at(place), value[part])
            system.tell("write", [place], buffer.size, queue, 1)

    _own_if_faulty(buffer)
    system.each(buffer.device.members(), write)


def _writers(buffer: MeshBuffer) -> int:
    """How many devices of this process hold a part."""
    mesh, shards = buffer.device.mesh, buffer.layout.shards
    if mesh.is_split:
        shards = tuple(shards[mesh.index(place)] for place in mesh.local_coordinates())
    return len(shards) - shards.count(None)


def _own_if_faulty(buffer: MeshBuffer) -> None:
    """Where a card may fail, devices may differ afterwards."""
    if isinstance(buffer.storage, Block) and not buffer.device.system.driver.is_plain():
        buffer.storage.unshare()


def read_all(buffer: MeshBuffer, queue: int) -> torch.Tensor:
    """The whole, put together; an error where devices that should hold the same do not. If processes split the mesh,
    what this one holds, the mesh axes first: `gather_whole` makes the whole of it, where the program waits."""
    system, storage = buffer.device.system, buffer.storage
    if system.is_vectorised and isinstance(storage, Block):
        if buffer.device.mesh.is_split:
            found = storage.block.expand(*buffer.device.mesh.local_shape, *buffer.local_shape).clone()
        else:
            found = storage.data.clone() if storage.data is not None else _join_parts(buffer, storage)
        system.tell("read", buffer.device.mesh.local_coordinates(), buffer.size, queue, _writers(buffer))
        return found
    parts: dict[Coordinate, torch.Tensor] = {}

    def read(place: Coordinate, card: Card) -> None:
        if buffer.layout.part(place) is not None:
            parts[place] = card.read(storage.at(place))
            system.tell("read", [place], buffer.size, queue, 1)

    system.each(buffer.device.members(), read)
    return _stack(buffer, parts) if buffer.device.mesh.is_split else _put_together(buffer, parts, are_copies=True)


def _stack(buffer: MeshBuffer, parts: dict[Coordinate, torch.Tensor]) -> torch.Tensor:
    """The parts of this process as one array, the mesh axes first; zeros where a device has none."""
    nothing = torch.zeros(buffer.local_shape, dtype=torch_dtype(buffer.dtype))
    places = buffer.device.mesh.local_coordinates()
    rows = torch.stack([parts.get(place, nothing) for place in places])
    return torch.unflatten(rows, 0, buffer.device.mesh.local_shape)


def gather_whole(buffer: MeshBuffer, held: torch.Tensor, place: Coordinate | None) -> torch.Tensor:
    """What was read here, and by the other processes that split the mesh: the whole, or the part at a coordinate."""
    mesh = buffer.device.mesh
    group = group_of(mesh, range(mesh.ndim))
    assert group is not None
    WORLD.watch.begin(f"read of {buffer.name}", mesh)
    if place is not None:
        part: torch.Tensor = wire.broadcast(held, group, mesh.owner(place))
        return part
    found = wire.all_gather(held.flatten(0, mesh.ndim - 1), group)
    parts: dict[Coordinate, torch.Tensor] = {}
    for rank, each in enumerate(found):
        parts |= dict(zip(mesh.local_coordinates(rank), each, strict=True))
    return _put_together(buffer, parts)


def _join_parts(buffer: MeshBuffer, storage: Block) -> torch.Tensor:
    places = [place for place in buffer.device.coordinates() if buffer.layout.part(place) is not None]
    return _put_together(buffer, {place: storage.at(place) for place in places})


def _put_together(buffer: MeshBuffer, parts: dict[Coordinate, torch.Tensor], are_copies: bool = False) -> torch.Tensor:
    """The whole; where it is but one part, and that is a copy that nobody else has, the part itself."""
    layout = buffer.layout
    is_part = are_copies and layout.is_replicated
    whole = next(iter(parts.values())) if is_part else torch.empty(layout.shape, dtype=torch_dtype(layout.dtype))
    first: dict[int, Coordinate] = {}
    for place, number in zip(buffer.device.coordinates(), layout.shards, strict=True):
        if number is None:
            continue
        part = parts[place]
        if number not in first:
            first[number] = place
            if part is not whole:
                whole[layout.slices(number)] = part
        elif not torch.equal(part, parts[first[number]]):
            raise PlacementError(
                f"{buffer.name} should be the same at {first[number]} and {place}, and is not",
                buffer=buffer,
                fix=f"read one coordinate: queue.enqueue_read({buffer.name}, coordinate={place})",
            )
    return whole


def write_at(buffer: MeshBuffer, place: Coordinate, value: torch.Tensor, index: object, queue: int) -> None:
    """Write what one device holds, or a part of it."""
    system = buffer.device.system
    if isinstance(buffer.storage, Block):
        buffer.storage.unshare()
    if not buffer.device.mesh.is_here(place):
        return

    def write(at: Coordinate, card: Card) -> None:
        card.write(buffer.storage.at(at), value, index)
        system.tell("write", [at], value.numel() * value.element_size(), queue, 1)

    system.each([(place, buffer.device.card(place))], write)


def read_at(buffer: MeshBuffer, place: Coordinate, index: object, queue: int) -> torch.Tensor:
    """What one device holds, or a part of it; room for it if another process holds the device."""
    system, found = buffer.device.system, []
    if not buffer.device.mesh.is_here(place):
        return torch.empty(part_shape(buffer, index), dtype=torch_dtype(buffer.dtype))

    def read(at: Coordinate, card: Card) -> None:
        found.append(card.read(buffer.storage.at(at), index))
        system.tell("read", [at], found[0].numel() * found[0].element_size(), queue, 1)

    system.each([(place, buffer.device.card(place))], read)
    return found[0]


def part_shape(buffer: MeshBuffer, index: Any) -> tuple[int, ...]:
    """The shape of what an index names in one device's part, or an error."""
    try:
        return tuple(torch.empty(buffer.local_shape, device="meta")[index].shape)
    except (IndexError, TypeError, ValueError) as error:
        raise ShapeError(f"{index!r} does not index {list(buffer.local_shape)}", reason=error, buffer=buffer) from None


def stored_array(buffer: MeshBuffer) -> torch.Tensor:
    """The array that a tensor over the buffer shares, or an error if its devices no longer agree."""
    storage = buffer.storage
    need_topology(buffer.layout)
    if not isinstance(storage, Block):
        return borrow(buffer)
    if storage.data is None:
        raise PlacementError(
            f"{buffer.name} was written at single coordinates: its devices may differ",
            buffer=buffer,
            fix="read it by coordinate, or write it as a whole into another buffer",
        )
    return storage.data
